//! Reads that go wrong on purpose, for tests of everything above.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::detour::{Detour, Detoured};
use super::{ReadAt, Source};

/// What goes wrong, and how often. The default is nothing.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// Decides which reads are hit. The same seed and order of reads give the same faults.
    pub seed: u64,
    /// One read in so many is cut short, to any length of at least one aligned block; 0 for none.
    pub short: u64,
    /// One read in so many is interrupted by a signal; 0 for none, and 1 counts as 2.
    pub interrupt: u64,
    /// One read in so many is late by [`Faults::late_by`]; 0 for none.
    pub late: u64,
    /// How late.
    pub late_by: Duration,
    /// This read fails with an I/O error; counted from 0 over all files that are hit.
    pub fail_read: Option<u64>,
    /// This read never returns.
    pub hang_read: Option<u64>,
    /// This read panics.
    pub panic_read: Option<u64>,
    /// Files end here, in bytes, though they were longer when opened.
    pub truncate: Option<u64>,
    /// Reads before this one still see them whole.
    pub truncate_from: u64,
    /// Only files with this name are hit; `None` for all.
    pub only: Option<String>,
}

#[derive(Debug)]
struct Plan {
    faults: Faults,
    reads: AtomicU64,
}

/// A [`Source`] whose files suffer [`Faults`].
#[derive(Clone)]
pub struct Faulty {
    source: Arc<dyn Source>,
    plan: Arc<Plan>,
}

impl Faulty {
    /// Wraps a source.
    #[must_use]
    pub fn new(source: impl Source + 'static, faults: Faults) -> Self {
        Self { source: Arc::new(source), plan: Arc::new(Plan { faults, reads: AtomicU64::new(0) }) }
    }

    /// Reads of the files that are hit so far, the failed ones included. Clones share the count.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.plan.reads.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faulty").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl Source for Faulty {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        let file = self.source.open(path)?;
        let hit = self.plan.faults.only.as_ref().is_none_or(|name| path.file_name() == Some(name.as_ref()));
        Ok(if hit { Arc::new(Detoured::new(file, Arc::clone(&self.plan))) } else { file })
    }
}

impl Detour for Arc<Plan> {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let faults = &self.faults;
        let number = self.reads.fetch_add(1, Ordering::Relaxed);
        let hit = |salt: u64, one_in: u64| one_in != 0 && mix(faults.seed, number, salt).is_multiple_of(one_in);
        if faults.fail_read == Some(number) {
            return Err(rustix::io::Errno::IO.into());
        }
        assert!(faults.panic_read != Some(number), "a panic that was asked for");
        while faults.hang_read == Some(number) {
            std::thread::park();
        }
        if hit(0, faults.late) {
            std::thread::sleep(faults.late_by);
        }
        if faults.interrupt != 0 && hit(1, faults.interrupt.max(2)) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        // Whole blocks, as the system cuts direct reads.
        let align = file.alignment();
        let mut len = buf.len();
        if len > align && hit(2, faults.short) {
            let blocks = (len / align) as u64;
            let kept = usize::try_from(1 + mix(faults.seed, number, 3) % blocks).unwrap_or(1);
            len = len.min(kept * align);
        }
        let count = file.read_at(&mut buf[..len], offset)?;
        let end = faults.truncate.filter(|_| number >= faults.truncate_from);
        let end = end.unwrap_or(u64::MAX).saturating_sub(offset);
        Ok(usize::try_from(end).map_or(count, |end| count.min(end)))
    }
}

/// A well-mixed number for each read and purpose (the finaliser of splitmix64).
fn mix(seed: u64, number: u64, salt: u64) -> u64 {
    let mut x = seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xd1b5_4a32_d192_ed03);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, write};
    use super::super::{Disk, Mode, ReadFault, read_exact_at};
    use super::*;

    #[test]
    fn short_late_and_interrupted_reads_lose_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 300_000);
        for mode in [Mode::Direct, Mode::Buffered] {
            for seed in 0..50 {
                let late_by = Duration::from_micros(10);
                let faults = Faults { seed, short: 2, interrupt: 1, late: 3, late_by, ..Faults::default() };
                let source = Faulty::new(Disk::new(mode), faults);
                let file = source.open(&path).unwrap();
                let (offset, mut buf) = (seed * 131, vec![0; 290_000]);
                read_exact_at(&*file, &mut buf, offset).unwrap();
                assert!(buf == bytes(offset, 290_000), "{mode:?} seed {seed}");
                let error = read_exact_at(&*file, &mut buf, 10_001).unwrap_err();
                assert_eq!(error.offset, 300_000, "{mode:?} seed {seed}: {error}");
            }
        }
    }

    #[test]
    fn the_chosen_read_of_the_chosen_file_fails() {
        let dir = tempfile::tempdir().unwrap();
        let (good, bad) = (write(&dir, "good", 100), write(&dir, "bad", 100));
        let faults = Faults { fail_read: Some(2), only: Some("bad".to_owned()), ..Faults::default() };
        let source = Faulty::new(Disk::new(Mode::Buffered), faults);
        let (good, bad) = (source.open(&good).unwrap(), source.open(&bad).unwrap());
        for i in 0..5 {
            read_exact_at(&*good, &mut [0; 10], 0).unwrap();
            let result = read_exact_at(&*bad, &mut [0; 10], 7);
            assert_eq!(result.is_err(), i == 2);
            if let Err(e) = result {
                assert!(matches!(&e.fault, ReadFault::System(e) if e.raw_os_error() == Some(5)), "{e}");
                assert!(e.offset == 7 && e.path.ends_with("bad") && std::error::Error::source(&e).is_some());
            }
        }
        assert_eq!(source.reads(), 5);
    }

    #[test]
    fn truncation_looks_like_a_file_that_shrank() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 50_000);
        for mode in [Mode::Direct, Mode::Buffered] {
            for cut in [0, 5000, 8192, 49_999] {
                let source = Faulty::new(Disk::new(mode), Faults { truncate: Some(cut), ..Faults::default() });
                let error = read_exact_at(&*source.open(&path).unwrap(), &mut [0; 50_000], 0).unwrap_err();
                assert!(matches!(error.fault, ReadFault::Shrank { was: 50_000 }), "{mode:?} {cut} {error}");
                assert_eq!(error.offset, cut);
            }
        }
    }
}
