//! Small files and headers from a disk that may never answer.
//!
//! A read of the system cannot be called off. So a thread of its own opens each file of
//! [`Source::open_cached`] and reads from it, into memory of its own, and whoever asked waits for the thread
//! as long as patience lasts. A thread that never comes back keeps what it holds until the process ends.
//!
//! What [`Source::open`] opens is read by a [`ReadPool`](super::ReadPool), which has threads already.

use super::clock::Clock;
use super::detour::{Detour, Detoured};
use super::{ReadAt, Source};
use crate::aligned::AlignedBuf;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often the stop flag is looked at.
const GLANCE: Duration = Duration::from_millis(20);

/// No answer, or nobody who waits for it any longer. Comes inside an [`io::Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GaveUp {
    /// Nothing came, for so many seconds.
    Stalled(u64),
    /// The stop flag was set.
    Stopped,
}

impl GaveUp {
    /// What is in an error, if it is one of these.
    #[must_use]
    pub fn of(error: &io::Error) -> Option<Self> {
        error.get_ref()?.downcast_ref().copied()
    }
}

impl std::fmt::Display for GaveUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stalled(seconds) => write!(f, "opening it has brought nothing for {seconds} s"),
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

impl std::error::Error for GaveUp {}

impl From<GaveUp> for io::Error {
    fn from(reason: GaveUp) -> Self {
        let kind = match reason {
            GaveUp::Stalled(_) => io::ErrorKind::TimedOut,
            // Not `Interrupted`, which asks for another try.
            GaveUp::Stopped => io::ErrorKind::Other,
        };
        Self::new(kind, reason)
    }
}

/// A [`Source`] of whose [`Source::open_cached`] files no open and no read is waited for longer than patience
/// lasts, or than a stop flag is not set.
#[derive(Clone)]
pub struct Patient {
    source: Arc<dyn Source>,
    limits: Limits,
}

#[derive(Clone)]
struct Limits {
    patience: Duration,
    stop: Arc<AtomicBool>,
}

impl Limits {
    /// The answer, if there is one in time.
    fn wait<T>(&self, answers: &Receiver<T>) -> io::Result<T> {
        let mut clock = Clock::new();
        loop {
            match answers.recv_timeout(GLANCE.min(self.patience)) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the reader panicked")),
                Err(RecvTimeoutError::Timeout) if self.stop.load(Ordering::Relaxed) => {
                    return Err(GaveUp::Stopped.into());
                }
                Err(RecvTimeoutError::Timeout) if clock.look() >= self.patience => {
                    return Err(GaveUp::Stalled(self.patience.as_secs()).into());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

impl Patient {
    /// Wraps a source.
    #[must_use]
    pub fn new(source: Arc<dyn Source>, patience: Duration, stop: Arc<AtomicBool>) -> Self {
        Self { source, limits: Limits { patience, stop } }
    }
}

impl Source for Patient {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        self.source.open(path)
    }

    fn open_cached(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        let (source, path) = (Arc::clone(&self.source), path.to_owned());
        let ((ask, asked), (tell, told), (hand_out, opened)) = (channel::<Ask>(), channel(), channel());
        let read = move || {
            let file = match source.open_cached(&path) {
                Ok(file) => file,
                Err(error) => return drop(hand_out.send(Err(error))),
            };
            drop(hand_out.send(Ok(Arc::clone(&file))));
            for Ask { mut buffer, offset } in asked {
                let result = file.read_at(&mut buffer, offset);
                drop(tell.send((buffer, result)));
            }
        };
        std::thread::Builder::new().name("k3-headers".to_owned()).spawn(read)?;
        let file = self.limits.wait(&opened)??;
        let way = Waiting { limits: self.limits.clone(), reader: Mutex::new(Some((ask, told))) };
        Ok(Arc::new(Detoured::new(file, way)))
    }
}

/// A read that is asked for.
struct Ask {
    buffer: AlignedBuf,
    offset: u64,
}

type Reader = (Sender<Ask>, Receiver<(AlignedBuf, io::Result<usize>)>);

/// Reads by another thread.
struct Waiting {
    limits: Limits,
    /// `None` once it was given up: what it answers then is not an answer to the next question.
    reader: Mutex<Option<Reader>>,
}

impl Detour for Waiting {
    fn read_at(&self, _: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((ask, told)) = &*reader else { return Err(GaveUp::Stalled(self.limits.patience.as_secs()).into()) };
        let out_of_memory = |e| io::Error::new(io::ErrorKind::OutOfMemory, e);
        let buffer = AlignedBuf::zeroed(buf.len()).map_err(out_of_memory)?;
        // If it is gone, so are its answers.
        drop(ask.send(Ask { buffer, offset }));
        match self.limits.wait(told) {
            Ok((filled, result)) => {
                let count = result?.min(buf.len());
                buf[..count].copy_from_slice(&filled[..count]);
                Ok(count)
            }
            Err(error) => {
                *reader = None;
                Err(error)
            }
        }
    }
}

impl std::fmt::Debug for Patient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Patient").field("patience", &self.limits.patience).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, write};
    use super::super::{Disk, Faults, Faulty, Mode, ReadFault, read_exact_at};
    use super::*;

    const SOON: Duration = Duration::from_millis(1);

    fn faulty(faults: Faults) -> Arc<dyn Source> {
        Arc::new(Faulty::new(Disk::new(Mode::Direct), faults))
    }

    #[test]
    fn bytes_and_errors_come_through() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 300_000);
        let faults = Faults { seed: 5, short: 2, interrupt: 2, ..Faults::default() };
        let source = Patient::new(faulty(faults), Duration::from_secs(60), Arc::default());
        let file = source.open_cached(&path).unwrap();
        for offset in [0, 1, 4096, 299_999] {
            let mut buf = vec![0; 300_000 - usize::try_from(offset).unwrap()];
            read_exact_at(&*file, &mut buf, offset).unwrap();
            assert!(buf == bytes(offset, buf.len()), "{offset}");
        }
        let error = read_exact_at(&*file, &mut [0; 2], 299_999).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Ended { end: 300_001 }), "{error}");
        let absent = source.open_cached(&dir.path().join("g")).err().unwrap();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_read_that_never_returns_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 10_000);
        let hang = || faulty(Faults { hang_read: Some(1), ..Faults::default() });
        let file = Patient::new(hang(), SOON, Arc::default()).open_cached(&path);
        // Where even this machine takes longer than that, the open is what is given up.
        let Ok(file) = file else {
            println!("SKIPPED: opening a file takes longer than {SOON:?} here");
            return;
        };
        let mut failed = None;
        for _ in 0..3 {
            if let Err(error) = read_exact_at(&*file, &mut [0; 100], 7) {
                failed = Some(error);
            }
        }
        let error = failed.unwrap();
        assert!(matches!(error.fault, ReadFault::Stalled { seconds: 0 }) && error.path == path, "{error}");
        // A stop is waited for no longer either, however much patience there is.
        let stop = Arc::new(AtomicBool::new(false));
        let file = Patient::new(hang(), Duration::MAX, Arc::clone(&stop)).open_cached(&path).unwrap();
        read_exact_at(&*file, &mut [0; 100], 7).unwrap();
        stop.store(true, Ordering::Relaxed);
        let error = read_exact_at(&*file, &mut [0; 100], 7).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Stopped), "{error}");
    }

    /// A disk whose opens never return.
    struct Silent;

    impl Source for Silent {
        fn open(&self, _: &Path) -> io::Result<Arc<dyn ReadAt>> {
            loop {
                std::thread::park();
            }
        }
    }

    #[test]
    fn an_open_that_never_returns_is_given_up() {
        let error = Patient::new(Arc::new(Silent), SOON, Arc::default()).open_cached(Path::new("f")).err().unwrap();
        assert_eq!((error.kind(), GaveUp::of(&error)), (io::ErrorKind::TimedOut, Some(GaveUp::Stalled(0))));
    }
}
