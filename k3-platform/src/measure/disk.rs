//! How fast files are read: by the engine's own pool, in its own way, in blocks of a size and so many
//! at a time.

use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::io::{Disk, FileSet, Mode, free_space};
use crate::segment::{Place, Read, block};
use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Where the next block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// Behind the last one, as the trunk is read.
    Sequential,
    /// Anywhere, as experts are read.
    Random,
}

impl Pattern {
    /// `sequential` or `random`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sequential => "sequential",
            Self::Random => "random",
        }
    }
}

/// A way of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The order.
    pub pattern: Pattern,
    /// Bytes of a read.
    pub block: usize,
    /// Reads in flight.
    pub depth: usize,
}

impl Case {
    /// Bytes of a read at least: shorter ones are another way of reading.
    const LEAST: usize = 64 << 10;

    /// What its buffers take (bytes).
    #[must_use]
    pub const fn memory(self) -> u64 {
        (self.depth as u64).saturating_mul(room_for(self.block) as u64)
    }

    /// The same with buffers of `bytes` in all, as an engine with little memory reads: shorter reads of what
    /// lies in a row, fewer at a time of what comes whole. `None` if there is no room for one.
    #[must_use]
    pub fn within(self, bytes: u64) -> Option<Self> {
        if self.memory() <= bytes {
            return Some(self);
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        match self.pattern {
            Pattern::Sequential => {
                let each = bytes / self.depth.max(1) / block() * block();
                let block = each.saturating_sub(block());
                (block >= Self::LEAST).then_some(Self { block, ..self })
            }
            Pattern::Random => {
                let depth = bytes / room_for(self.block);
                (depth > 0).then_some(Self { depth, ..self })
            }
        }
    }
}

/// Bytes of buffer that a read takes: an offset within a block of the disk costs the bytes before it, and those
/// up to the next behind.
const fn room_for(bytes: usize) -> usize {
    bytes.next_multiple_of(block()) + block()
}

/// Bytes of a routed expert of the released model, from its first tensor to its last.
pub const EXPERT: usize = 17_547_264;

/// The engine's two ways of reading, then what other sizes and depths would give.
pub const CASES: [Case; 8] = [
    Case { pattern: Pattern::Sequential, block: 16 << 20, depth: 8 },
    Case { pattern: Pattern::Random, block: EXPERT, depth: 8 },
    Case { pattern: Pattern::Random, block: EXPERT, depth: 16 },
    Case { pattern: Pattern::Random, block: EXPERT, depth: 1 },
    Case { pattern: Pattern::Sequential, block: 4 << 20, depth: 8 },
    Case { pattern: Pattern::Sequential, block: 1 << 20, depth: 8 },
    Case { pattern: Pattern::Sequential, block: 16 << 20, depth: 1 },
    Case { pattern: Pattern::Random, block: 64 << 10, depth: 16 },
];

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    /// How it was read; the block is what the files allowed.
    pub case: Case,
    /// Bytes that arrived.
    pub bytes: u64,
    /// From the first request to the last answer.
    pub seconds: f64,
}

impl Figure {
    /// Bytes a second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let bytes = self.bytes as f64;
        bytes / self.seconds.max(1e-9)
    }
}

/// Reads of one case over files of these lengths, each a position in the set and an offset.
///
/// Sequential reads pass over the files once. Random ones never end; they take blocks of the
/// file by its share of all blocks.
struct Reads {
    case: Case,
    files: Vec<(u16, u64)>,
    next: u64,
    seed: u64,
}

impl Reads {
    fn new(case: Case, mut files: Vec<(u16, u64)>) -> Self {
        // Long files first: their reads are whole blocks.
        files.sort_by_key(|&(_, len)| std::cmp::Reverse(len));
        let longest = files.first().map_or(0, |&(_, len)| len);
        let block = case.block.min(usize::try_from(longest).unwrap_or(usize::MAX));
        let case = Case { block, ..case };
        Self { case, files, next: 0, seed: 0x9e37_79b9_7f4a_7c15 }
    }

    /// Whole blocks of all files.
    fn blocks(&self) -> u64 {
        self.files.iter().map(|&(_, len)| len.checked_div(self.case.block as u64).unwrap_or(0)).sum()
    }
}

impl Iterator for Reads {
    type Item = Read;

    fn next(&mut self) -> Option<Read> {
        let (blocks, len) = (self.blocks(), self.case.block as u64);
        let mut block = match self.case.pattern {
            Pattern::Sequential => self.next,
            Pattern::Random => {
                self.seed ^= self.seed << 13;
                self.seed ^= self.seed >> 7;
                self.seed ^= self.seed << 17;
                self.seed.checked_rem(blocks)?
            }
        };
        self.next += 1;
        for &(shard, file) in &self.files {
            let here = file / len.max(1);
            if block < here {
                return Some(Read { place: Place { shard, offset: block * len }, len: self.case.block, at: 0 });
            }
            block -= here;
        }
        None
    }
}

/// Reads the files of `set`, of these lengths, for about `time`; sequential reads end earlier if the
/// files do. Setting `stop` ends the wait with [`Error::Stopped`].
///
/// # Errors
/// Those of the reads, and [`Error::Memory`] if there is none for `depth` blocks.
pub fn measure(
    set: &FileSet,
    lengths: &[u64],
    case: Case,
    time: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<Figure, Error> {
    run(set, Reads::new(case, (0..).zip(lengths.iter().copied()).collect()), time, stop)
}

/// The same of the files that a pass over a checkpoint streams: the shards, or its packed trunk.
///
/// # Errors
/// As [`measure`].
pub fn streamed(checkpoint: &Checkpoint, case: Case, time: Duration, stop: &Arc<AtomicBool>) -> Result<Figure, Error> {
    run(&checkpoint.files(), Reads::new(case, checkpoint.streamed()), time, stop)
}

fn run(set: &FileSet, mut reads: Reads, time: Duration, stop: &Arc<AtomicBool>) -> Result<Figure, Error> {
    let case = reads.case;
    let depth = case.depth.max(1);
    let fetch = Fetch::new(set.clone(), depth, Arc::clone(stop))?;
    let (sender, receiver) = channel();
    let buffers: Vec<AlignedBuf> =
        (0..depth).map(|_| AlignedBuf::zeroed(room_for(case.block))).collect::<Result<_, _>>()?;
    let started = Instant::now();
    let (mut in_flight, mut bytes) = (0, 0);
    let mut submit = |buffer: AlignedBuf| match reads.next() {
        Some(read) => {
            fetch.submit(&[read], buffer, read.len as u64, Priority::Prefetch, &sender);
            1
        }
        None => 0,
    };
    for buffer in buffers {
        in_flight += submit(buffer);
    }
    while in_flight > 0 {
        let fetched = fetch.wait(&receiver)?;
        fetched.result?;
        in_flight -= 1;
        bytes += fetched.tag;
        if started.elapsed() < time {
            in_flight += submit(fetched.buffer);
        }
    }
    Ok(Figure { case, bytes, seconds: started.elapsed().as_secs_f64() })
}

/// A file of random bytes to measure a disk with where there is no checkpoint.
///
/// It has no name once it is made, so it is gone with the process, however that ends.
#[derive(Debug)]
pub struct Scratch {
    file: fs::File,
    len: u64,
}

/// Why there is no [`Scratch`].
#[derive(Debug)]
#[non_exhaustive]
pub enum ScratchError {
    /// The file would take more than a quarter of what is free.
    NoRoom {
        /// Bytes that are free.
        free: u64,
        /// Bytes that must be.
        needed: u64,
    },
    /// The system's answer.
    Io(io::Error),
    /// The stop flag was set.
    Stopped,
}

impl std::fmt::Display for ScratchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoRoom { free, needed } => write!(f, "{free} bytes are free here, and {needed} must be"),
            Self::Io(e) => write!(f, "no file can be made here: {e}"),
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

impl std::error::Error for ScratchError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(e) => Some(e),
            _ => None,
        }
    }
}

impl From<io::Error> for ScratchError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Scratch {
    /// Parts of a file that are written at once (bytes).
    pub const PART: usize = 4 << 20;

    /// Writes `len` bytes in `dir`, or what a slow disk takes in `time`, and waits until they are on it.
    ///
    /// # Errors
    /// [`ScratchError`]; nothing is left in `dir`.
    pub fn write(dir: &Path, len: u64, time: Duration, stop: &AtomicBool) -> Result<Self, ScratchError> {
        let (free, needed) = (free_space(dir)?, len.saturating_mul(4));
        if free < needed {
            return Err(ScratchError::NoRoom { free, needed });
        }
        let path = dir.join(format!(".k3-bench-{}", std::process::id()));
        let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        fs::remove_file(&path)?;
        let mut scratch = Self { file, len: 0 };
        let started = Instant::now();
        let (mut seed, mut part) = (1u64, vec![0u8; Self::PART]);
        while scratch.len < len && (scratch.len == 0 || started.elapsed() < time) {
            if stop.load(Ordering::Relaxed) {
                return Err(ScratchError::Stopped);
            }
            // Random, for a disk that compresses would be faster than the weights' one.
            for eight in part.chunks_exact_mut(8) {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                eight.copy_from_slice(&seed.to_le_bytes());
            }
            let now = usize::try_from(len - scratch.len).unwrap_or(Self::PART).min(Self::PART);
            scratch.file.write_all(&part[..now])?;
            // As it goes: a signal is not kept waiting by gigabytes at the end.
            scratch.file.sync_data()?;
            scratch.len += now as u64;
        }
        Ok(scratch)
    }

    /// Its length (bytes).
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// It alone as a set, for [`measure`], while `self` lives; and the disk it is read by.
    #[must_use]
    pub fn files(&self, mode: Mode) -> (FileSet, Disk) {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        let disk = Disk::new(mode);
        (FileSet::new(Arc::new(disk.clone()), vec![path], 1), disk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(case: Case, files: &[u64], n: usize) -> Vec<(u16, u64)> {
        let reads = Reads::new(case, (0..).zip(files.iter().copied()).collect());
        reads.take(n).map(|r| (r.place.shard, r.place.offset)).collect()
    }

    #[test]
    fn sequential_reads_are_each_block_once_and_random_ones_are_blocks() {
        let case = Case { pattern: Pattern::Sequential, block: 10, depth: 1 };
        assert_eq!(offsets(case, &[25, 9, 30], 99), [(2, 0), (2, 10), (2, 20), (0, 0), (0, 10)]);
        let random = offsets(Case { pattern: Pattern::Random, ..case }, &[25, 9, 30], 200);
        assert_eq!(random.len(), 200);
        for place in offsets(case, &[25, 9, 30], 99) {
            assert!(random.contains(&place), "{place:?}");
        }
        // Files shorter than a block are read whole, and no files are no reads.
        assert_eq!(offsets(case, &[4, 7], 9), [(1, 0)]);
        assert!(offsets(case, &[], 9).is_empty() && offsets(case, &[0], 9).is_empty());
        assert!(offsets(Case { pattern: Pattern::Random, ..case }, &[0], 9).is_empty());
    }

    #[test]
    fn buffers_keep_within_their_memory() {
        let [sequential, random, ..] = CASES;
        for case in [sequential, random] {
            assert_eq!(case.within(case.memory()), Some(case));
            let mut last = u64::MAX;
            for bytes in (0..=case.memory()).rev().step_by(99_999) {
                let Some(less) = case.within(bytes) else {
                    last = bytes;
                    break;
                };
                assert!(less.memory() <= bytes && less.block > 0 && less.depth > 0, "{less:?} in {bytes}");
                match case.pattern {
                    Pattern::Sequential => assert_eq!(less.depth, case.depth),
                    Pattern::Random => assert_eq!(less.block, case.block),
                }
            }
            assert!(last < 18_000_000, "{case:?} would have had room in {last}");
        }
        assert_eq!((sequential.within(0), random.within(EXPERT as u64)), (None, None));
        assert_eq!(random.within(60_000_000).map(|c| c.depth), Some(3));
    }

    #[test]
    fn what_is_counted_was_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1u8; 300_000]).unwrap();
        let set = FileSet::new(Arc::new(Disk::new(Mode::Direct)), vec![path], 1);
        let case = Case { pattern: Pattern::Sequential, block: 100_000, depth: 2 };
        let figure = measure(&set, &[300_000], case, Duration::from_secs(100), &Arc::default()).unwrap();
        assert_eq!(figure.bytes, 300_000);
        assert!(figure.rate() > 0.0);
        let random = Case { pattern: Pattern::Random, ..case };
        let figure = measure(&set, &[300_000], random, Duration::ZERO, &Arc::default()).unwrap();
        assert_eq!(figure.bytes, 200_000, "at least a round");
    }

    #[test]
    fn a_scratch_has_no_name_and_is_read_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let scratch = Scratch::write(dir.path(), 5 << 20, Duration::from_secs(100), &stop).unwrap();
        assert_eq!((scratch.len(), fs::read_dir(dir.path()).unwrap().count()), (5 << 20, 0));
        let (files, _) = scratch.files(Mode::Direct);
        let case = Case { pattern: Pattern::Sequential, block: 1 << 20, depth: 3 };
        assert_eq!(measure(&files, &[scratch.len()], case, Duration::from_secs(100), &stop).unwrap().bytes, 5 << 20);
        // A slow disk ends it after a part, and a signal before.
        let scratch = Scratch::write(dir.path(), 5 << 20, Duration::ZERO, &stop).unwrap();
        assert_eq!(scratch.len(), 4 << 20);
        stop.store(true, Ordering::Relaxed);
        let stopped = Scratch::write(dir.path(), 5 << 20, Duration::from_secs(100), &stop).unwrap_err();
        assert_eq!(stopped.to_string(), "stopped");
        let large = Scratch::write(dir.path(), u64::MAX / 4, Duration::ZERO, &stop).unwrap_err();
        assert!(matches!(large, ScratchError::NoRoom { .. }), "{large}");
        assert!(matches!(Scratch::write(&dir.path().join("no"), 1, Duration::ZERO, &stop), Err(ScratchError::Io(_))));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
