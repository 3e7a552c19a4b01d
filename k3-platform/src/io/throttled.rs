//! A disk that is slower than the one there is, for measuring.

use super::detour::{Detour, Detoured};
use super::{ReadAt, Source};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A [`Source`] all of whose files together are read at no more than some speed.
///
/// As of one disk: a read takes its turn behind those that were asked for before it, and then as long
/// as its bytes take at that speed. Files opened by [`Source::open_cached`] are left alone.
#[derive(Clone)]
pub struct Throttled {
    source: Arc<dyn Source>,
    disk: Arc<Turn>,
}

struct Turn {
    bytes_per_second: f64,
    /// When all that was asked for so far will have been read.
    free: Mutex<Instant>,
}

impl Turn {
    fn wait(&self, bytes: usize) {
        #[expect(clippy::cast_precision_loss, reason = "a time")]
        let takes = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second);
        let now = Instant::now();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        *free = (*free).max(now) + takes;
        let until = *free;
        drop(free);
        std::thread::sleep(until.saturating_duration_since(now));
    }
}

impl Throttled {
    /// Wraps a source.
    #[must_use]
    pub fn new(source: Arc<dyn Source>, bytes_per_second: f64) -> Self {
        let disk = Turn { bytes_per_second: bytes_per_second.max(1.0), free: Mutex::new(Instant::now()) };
        Self { source, disk: Arc::new(disk) }
    }
}

impl std::fmt::Debug for Throttled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Throttled").field("bytes_per_second", &self.disk.bytes_per_second).finish_non_exhaustive()
    }
}

impl Source for Throttled {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(Detoured::new(self.source.open(path)?, Arc::clone(&self.disk))))
    }

    fn open_cached(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        self.source.open_cached(path)
    }
}

impl Detour for Arc<Turn> {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let count = file.read_at(buf, offset)?;
        self.wait(count);
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, write};
    use super::super::{Disk, Mode, read_exact_at};
    use super::*;

    #[test]
    fn the_bytes_are_the_same_and_never_earlier() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 100_000);
        let source = Throttled::new(Arc::new(Disk::new(Mode::Buffered)), 5e6);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut all = vec![0; 100_000];
                    read_exact_at(&*source.open(&path).unwrap(), &mut all, 0).unwrap();
                    assert!(all == bytes(0, 100_000));
                });
            }
        });
        // Two times 20 ms, one after the other; a sleep is never shorter than asked for.
        assert!(started.elapsed() >= Duration::from_millis(39));
    }
}
