//! The seam between the engine and the disk.
//!
//! All bytes of a checkpoint come in through [`ReadAt`]. [`Disk`] opens real files, directly if the
//! file system allows it; [`Faulty`] wraps any [`Source`] and goes wrong on purpose, so each failure
//! the engine must survive can be met in a test; [`Patient`] waits for no header for ever; what such wrappers share is [`Detoured`].
//! [`FileSet`] keeps the number of open files under the process's limit, and [`ReadPool`] keeps the disk busy.
//!
//! Direct reads want offset, length and memory aligned. Nobody has to remember this to be correct:
//! [`read_exact_at`] takes any range, through a small buffer of its own if it must. To avoid that copy,
//! ask [`Window`] for the aligned range that covers the wanted one and use [`read_window`].

mod clock;
mod detour;
mod disk;
mod faulty;
mod patient;
mod pool;
mod schedule;
mod set;
mod throttled;
mod unnamed;

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::aligned::{self, AlignedBuf};

pub use detour::{Detour, Detoured};
pub use disk::{Disk, File, Mode, free_space, free_space_of};
pub use faulty::{Faults, Faulty};
pub use patient::{GaveUp, Patient};
pub use pool::{Check, Done, Extent, Job, Priority, ReadPool};
pub use schedule::Schedule;
pub use set::{Changed, FileSet, PATIENCE, open_limit};
pub use throttled::Throttled;
pub use unnamed::{give_name, take_after, unnamed};

/// The largest value [`ReadAt::alignment`] may have, in bytes. A buffer sized with room for it fits
/// every file.
pub const MAX_ALIGNMENT: usize = aligned::ALIGNMENT;

/// Bytes of the buffer through which [`read_exact_at`] reads what is not aligned.
const BOUNCE: usize = 1 << 20;

/// Reads without any new byte after which a file counts as ended, whatever its length says.
const STALLED: u32 = 8;

/// A file that is read at offsets, from any number of threads at once.
pub trait ReadAt: Send + Sync {
    /// Length in bytes when the file was opened. A file is not expected to change while it is open;
    /// one that ends before this is reported as [`ReadFault::Shrank`].
    ///
    /// # Errors
    /// Only an implementation that opens late has any.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file had no bytes when it was opened.
    ///
    /// # Errors
    /// Those of [`ReadAt::len`].
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Reads bytes from `offset` on into the front of `buf` and says how many.
    ///
    /// Fewer than `buf.len()` is no error: ask again for the rest. Zero means that the file ends at
    /// or before `offset` (or that `buf` is empty). The range may reach over the end of the file.
    /// `offset`, the length and the address of `buf` are multiples of [`ReadAt::alignment`].
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::Interrupted`] asks for another try, and
    /// [`io::ErrorKind::InvalidInput`] is for arguments that are not aligned.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Bytes to whose multiples reads must be aligned: a power of two, at most [`MAX_ALIGNMENT`]; 1 if
    /// any range will do. It may fall while a file is open, never rise.
    fn alignment(&self) -> usize;

    /// Where the file is, for messages.
    fn path(&self) -> &Path;

    /// Which file it is and when it was last written to, as of when it was opened; `None`, the
    /// default, if that is not known. As far as a file system can tell, two opens of a path with the
    /// same stamp read the same bytes.
    fn stamp(&self) -> Option<Stamp> {
        None
    }

    /// The same as of now: whether somebody writes to the file while it is open.
    ///
    /// # Errors
    /// Those of the system.
    fn stamp_now(&self) -> io::Result<Option<Stamp>> {
        Ok(self.stamp())
    }
}

/// What tells a file from any other at its path, and from itself before it was written to.
///
/// A length is not enough: a download of another version may be renamed over a shard of the same
/// length, and its bytes would be mixed with those of the shard that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Device of the file system.
    pub dev: u64,
    /// The file's number in it.
    pub ino: u64,
    /// Length in bytes.
    pub len: u64,
    /// When the contents last changed: seconds and nanoseconds. Whoever writes can set it back.
    pub mtime: (i64, i64),
    /// When contents or attributes last changed. Nobody can set it.
    pub ctime: (i64, i64),
}

impl Stamp {
    /// The stamp in what the system says of an open file.
    #[must_use]
    pub fn of(meta: &std::fs::Metadata) -> Self {
        use std::os::unix::fs::MetadataExt as _;
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            len: meta.len(),
            mtime: (meta.mtime(), meta.mtime_nsec()),
            ctime: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether a file that had the one stamp and has the other is one file, and was not written to. It may
    /// have another name or other permissions, which count in [`Stamp::ctime`].
    #[must_use]
    pub fn same_bytes(&self, other: &Self) -> bool {
        (self.dev, self.ino, self.len, self.mtime) == (other.dev, other.ino, other.len, other.mtime)
    }
}

/// Something that opens files. All reading starts at one of these.
pub trait Source: Send + Sync {
    /// Opens a file to read.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::InvalidInput`] for what is not a regular file.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>>;

    /// Opens a file of which little is read, and that again in the next run: indexes and headers. A
    /// source with a cache may read it through that; by default it is as [`Source::open`].
    ///
    /// # Errors
    /// As [`Source::open`].
    fn open_cached(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        self.open(path)
    }

    /// Who decides which reader of its files goes on: nobody, except in tests.
    fn schedule(&self) -> Option<Arc<dyn Schedule>> {
        None
    }
}

/// A range of a file that could not be read whole.
#[derive(Debug)]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Where in the file, in bytes: the start of the read that failed, or where the file ends.
    pub offset: u64,
    /// Why.
    pub fault: ReadFault,
}

/// Why a range could not be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReadFault {
    /// The system's answer.
    System(io::Error),
    /// The file ends there, and always did.
    Ended {
        /// End of the range that was wanted, in bytes from the start of the file.
        end: u64,
    },
    /// The file ends there or before, and was longer when it was opened.
    Shrank {
        /// Length when it was opened, in bytes.
        was: u64,
    },
    /// The buffer of a job is too short for the job: a bug of the caller.
    Buffer {
        /// Bytes the job needs.
        needed: usize,
        /// Bytes the buffer has.
        given: usize,
    },
    /// No byte came, and no answer.
    Stalled {
        /// For so long.
        seconds: u64,
    },
    /// Somebody asked for an end while it was waited for.
    Stopped,
    /// The bytes are not those that were written: their checksum differs.
    Checksum {
        /// Which segment of the file.
        segment: usize,
    },
    /// The reader panicked: a bug.
    Panicked,
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, offset, fault } = self;
        write!(f, "{}: ", path.display())?;
        match fault {
            ReadFault::System(error) => write!(f, "read at byte {offset} failed: {error}"),
            ReadFault::Ended { end } => write!(f, "the file ends at byte {offset}, {end} bytes are needed"),
            ReadFault::Shrank { was } => {
                write!(f, "the file shrank while in use: it had {was} bytes and has no byte {offset} now")
            }
            ReadFault::Buffer { needed, given } => {
                write!(f, "read at byte {offset} needs a buffer of {needed} bytes and has {given}")
            }
            ReadFault::Stalled { seconds } => {
                write!(f, "read at byte {offset} has brought nothing for {seconds} s")
            }
            ReadFault::Stopped => write!(f, "read at byte {offset} was stopped"),
            ReadFault::Checksum { segment } => {
                write!(f, "segment {segment}, which begins at byte {offset}, is damaged: its checksum differs")
            }
            ReadFault::Panicked => write!(f, "the reader panicked at byte {offset}"),
        }
    }
}

impl std::error::Error for ReadError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.fault {
            ReadFault::System(error) => Some(error),
            ReadFault::Ended { .. }
            | ReadFault::Shrank { .. }
            | ReadFault::Buffer { .. }
            | ReadFault::Stalled { .. }
            | ReadFault::Stopped
            | ReadFault::Checksum { .. }
            | ReadFault::Panicked => None,
        }
    }
}

/// The aligned range of a file that covers a wanted one.
///
/// Its end may lie behind the end of the file, whose length is no multiple of anything; only the
/// wanted bytes have to exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    start: u64,
    len: usize,
    skip: usize,
    wanted: usize,
}

impl Window {
    /// The smallest window around `wanted` bytes at `offset` whose ends are multiples of `align`
    /// (0 counts as 1). `None` if it does not fit the address space or the offsets of a file.
    #[must_use]
    pub fn new(offset: u64, wanted: usize, align: usize) -> Option<Self> {
        let align = align.max(1);
        let skip = usize::try_from(offset % align as u64).ok()?;
        let start = offset - skip as u64;
        let len = skip.checked_add(wanted)?.checked_next_multiple_of(align)?;
        // The system's offsets are signed.
        i64::try_from(start.checked_add(len as u64)?).ok()?;
        Some(Self { start, len, skip, wanted })
    }

    /// Bytes of memory a window around `wanted` bytes can need, wherever they start and whatever file
    /// they are in. `None` if that overflows.
    #[must_use]
    pub const fn room(wanted: usize) -> Option<usize> {
        match wanted.checked_add(MAX_ALIGNMENT - 1) {
            Some(len) => len.checked_next_multiple_of(MAX_ALIGNMENT),
            None => None,
        }
    }

    /// First byte of the window in the file.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// Bytes in the window.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the wanted bytes lie in the window.
    #[must_use]
    pub const fn range(&self) -> Range<usize> {
        self.skip..self.skip + self.wanted
    }
}

/// Fills `buf` with the bytes at `offset`, over short reads and interruptions. Any offset, length and
/// address will do; what is not aligned as the file asks goes through a buffer of up to 1 MiB that
/// lives for this call. Returns the bytes that came from the file, over-read ones included.
///
/// # Errors
/// [`ReadError`] that says where it stopped and why. The contents of `buf` are then
/// unspecified.
pub fn read_exact_at(file: &dyn ReadAt, buf: &mut [u8], offset: u64) -> Result<u64, ReadError> {
    if buf.is_empty() {
        return Ok(0);
    }
    let align = file.alignment().max(1);
    if is_aligned(buf, offset, align) {
        let needed = buf.len();
        return fill(file, buf, offset, needed, align);
    }
    let Some(all) = Window::new(offset, buf.len(), align) else {
        return Err(error(file, offset, ReadFault::Ended { end: offset.saturating_add(buf.len() as u64) }));
    };
    let mut bounce = AlignedBuf::zeroed(all.len().min(BOUNCE.max(2 * align)))
        .map_err(|e| error(file, offset, ReadFault::System(io::Error::new(io::ErrorKind::OutOfMemory, e))))?;
    let (mut done, mut fetched) = (0, 0);
    while done < buf.len() {
        let skip = all.skip * usize::from(done == 0);
        let start = offset + done as u64 - skip as u64;
        let wanted = (buf.len() - done).min(bounce.len() - skip);
        let len = (skip + wanted).next_multiple_of(align);
        fetched += fill(file, &mut bounce[..len], start, skip + wanted, align)?;
        buf[done..done + wanted].copy_from_slice(&bounce[skip..skip + wanted]);
        done += wanted;
    }
    Ok(fetched)
}

/// Reads a window into the front of `buf`, after which the wanted bytes are at [`Window::range`];
/// the others may be anything. No copy is made if `buf` and the window are aligned as the file asks;
/// if they are not, the wanted bytes arrive all the same. Returns the bytes that came from the file.
///
/// # Errors
/// [`ReadError`] if a wanted byte could not be had, or if `buf` is shorter than the window.
pub fn read_window(file: &dyn ReadAt, buf: &mut [u8], window: Window) -> Result<u64, ReadError> {
    let given = buf.len();
    let Some(buf) = buf.get_mut(..window.len) else {
        return Err(error(file, window.start, ReadFault::Buffer { needed: window.len, given }));
    };
    if window.wanted == 0 {
        return Ok(0);
    }
    let align = file.alignment().max(1);
    if is_aligned(buf, window.start, align) {
        fill(file, buf, window.start, window.range().end, align)
    } else {
        read_exact_at(file, &mut buf[window.range()], window.start + window.skip as u64)
    }
}

fn is_aligned(buf: &[u8], offset: u64, align: usize) -> bool {
    buf.as_ptr().addr().is_multiple_of(align) && buf.len().is_multiple_of(align) && offset.is_multiple_of(align as u64)
}

fn error(file: &dyn ReadAt, offset: u64, fault: ReadFault) -> ReadError {
    ReadError { path: file.path().to_owned(), offset, fault }
}

/// Reads until the first `needed` bytes of `buf` are there; the rest of `buf` is only room, so that
/// the last block of a file can be asked for whole. All arguments are aligned to `align`.
fn fill(file: &dyn ReadAt, buf: &mut [u8], offset: u64, needed: usize, align: usize) -> Result<u64, ReadError> {
    let (mut filled, mut fetched, mut stalled) = (0, 0, 0);
    while filled < needed {
        // A read that stopped inside a block is resumed at the block's start.
        let from = filled - filled % align;
        let Some(at) = offset.checked_add(from as u64) else {
            return Err(error(file, u64::MAX, ReadFault::Ended { end: u64::MAX }));
        };
        let count = match file.read_at(&mut buf[from..], at) {
            Ok(count) => count.min(buf.len() - from),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => {
                let fault = match GaveUp::of(&e) {
                    Some(GaveUp::Stalled(seconds)) => ReadFault::Stalled { seconds },
                    Some(GaveUp::Stopped) => ReadFault::Stopped,
                    None => ReadFault::System(e),
                };
                return Err(error(file, at, fault));
            }
        };
        fetched += count as u64;
        if from + count > filled {
            filled = from + count;
            stalled = 0;
            continue;
        }
        // The same bytes again: the end of the file, unless it is one of a few unlucky short reads.
        stalled += 1;
        let position = offset + filled as u64;
        let len = file.len().unwrap_or(position);
        if count == 0 || at + count as u64 >= len || stalled == STALLED {
            let end = offset.saturating_add(needed as u64);
            let fault = if position < len { ReadFault::Shrank { was: len } } else { ReadFault::Ended { end } };
            return Err(error(file, position.min(len), fault));
        }
    }
    Ok(fetched)
}

/// What the tests of the modules below share.
#[cfg(test)]
mod testkit {
    use std::io::Write;
    use std::path::PathBuf;

    /// Byte `i` of every test file: a period that no block size shares.
    pub(crate) fn byte(i: u64) -> u8 {
        u8::try_from(i % 251).unwrap()
    }

    pub(crate) fn bytes(offset: u64, len: usize) -> Vec<u8> {
        (offset..).take(len).map(byte).collect()
    }

    pub(crate) fn write(dir: &tempfile::TempDir, name: &str, len: usize) -> PathBuf {
        let path = dir.path().join(name);
        std::fs::File::create(&path).unwrap().write_all(&bytes(0, len)).unwrap();
        path
    }

    /// Temporary directories on a disk, and in memory where that exists.
    pub(crate) fn dirs() -> Vec<tempfile::TempDir> {
        let mut dirs = vec![tempfile::tempdir().unwrap()];
        match tempfile::tempdir_in("/dev/shm") {
            Ok(dir) => dirs.push(dir),
            Err(e) => println!("SKIPPED: /dev/shm: {e}"),
        }
        dirs
    }
}

#[cfg(test)]
mod tests {
    use super::testkit::{bytes, dirs, write};
    use super::*;

    #[test]
    fn windows_cover_what_is_wanted() {
        for align in [0, 1, 512, 4096] {
            for offset in [0, 1, 511, 512, 4095, 4096, 10_000] {
                for wanted in [0, 1, 511, 512, 4096, 9000] {
                    let w = Window::new(offset, wanted, align).unwrap();
                    let (align, case) = (align.max(1), format!("{align} {offset} {wanted}"));
                    assert!(w.start().is_multiple_of(align as u64) && w.len().is_multiple_of(align), "{case}");
                    assert_eq!(w.start() + w.range().start as u64, offset, "{case}");
                    assert_eq!(w.range().len(), wanted, "{case}");
                    assert!(w.range().end <= w.len() && w.len() < w.range().end + align, "{case}");
                    assert!(w.len() <= Window::room(wanted).unwrap(), "{case}");
                }
            }
        }
        assert_eq!(Window::new(u64::MAX, 1, 4096), None);
        assert_eq!(Window::new(i64::MAX as u64, 1, 1), None);
        assert_eq!(Window::new(1, usize::MAX, 4096), None);
        assert_eq!(Window::room(usize::MAX), None);
        assert!(Window::new(0, 0, 1).unwrap().is_empty());
    }

    /// Every file length around a block, every kind of range in it, every way to open it.
    #[test]
    fn any_range_can_be_read_up_to_the_last_byte() {
        for dir in dirs() {
            for len in [0, 1, 511, 4095, 4096, 4097, 8191, 12_345, BOUNCE + 4097] {
                let path = write(&dir, "f", len);
                for mode in [Mode::Direct, Mode::Buffered, Mode::Discarded] {
                    let file = Disk::new(mode).open(&path).unwrap();
                    assert_eq!((file.len().unwrap(), file.is_empty().unwrap()), (len as u64, len == 0));
                    for start in [0, 1, 100, 4000, 4096, 5000, len.saturating_sub(1), len] {
                        for end in [start, start + 1, start + 4096, start + 5000, len] {
                            let case = format!("{mode:?} len {len} range {start}..{end}");
                            if start > end {
                                continue;
                            }
                            let offset = start as u64;
                            let mut room = AlignedBuf::zeroed(Window::room(end - start).unwrap()).unwrap();
                            let mut plain = vec![0; end - start];
                            let read = read_exact_at(&*file, &mut plain, offset);
                            let window = Window::new(offset, end - start, file.alignment()).unwrap();
                            let seen = read_window(&*file, &mut room, window);
                            if end <= len || start == end {
                                assert_eq!(plain, bytes(offset, end - start), "{case}");
                                assert_eq!(room[window.range()], plain, "{case}");
                                assert!(read.unwrap() >= plain.len() as u64 && seen.is_ok(), "{case}");
                                // A position in the buffer that is not aligned costs a copy, no more.
                                let mut room = vec![0; window.len() + 1];
                                read_window(&*file, &mut room[1..], window).unwrap();
                                assert_eq!(room[1..][window.range()], plain, "{case}");
                                continue;
                            }
                            for error in [read.unwrap_err(), seen.unwrap_err()] {
                                assert_eq!(error.offset, len as u64, "{case}: {error}");
                                assert!(matches!(error.fault, ReadFault::Ended { .. }), "{case}: {error}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_file_that_shrank_is_told_from_a_short_one() {
        let dir = tempfile::tempdir().unwrap();
        for (now, mode) in [(0, Mode::Direct), (5000, Mode::Direct), (8192, Mode::Direct), (5000, Mode::Buffered)] {
            let path = write(&dir, "f", 20_000);
            let file = Disk::new(mode).open(&path).unwrap();
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(now).unwrap();
            let error = read_exact_at(&*file, &mut [0; 10_000], 0).unwrap_err();
            assert!(matches!(error.fault, ReadFault::Shrank { was: 20_000 }), "{now} {mode:?} {error}");
            assert_eq!((error.offset, &error.path), (now, &path), "{now} {mode:?}");
            assert!(error.to_string().contains("shrank"));
        }
    }

    #[test]
    fn ranges_outside_all_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 10);
        for mode in [Mode::Direct, Mode::Buffered] {
            let file = Disk::new(mode).open(&path).unwrap();
            for offset in [u64::MAX, u64::MAX - 4095, i64::MAX as u64 - 1, 1 << 62] {
                assert!(read_exact_at(&*file, &mut [0; 2], offset).is_err(), "{mode:?} {offset}");
            }
        }
        let file = Disk::new(Mode::Direct).open(&path).unwrap();
        let error = read_window(&*file, &mut [0; 5], Window::new(0, 6, 1).unwrap()).unwrap_err();
        assert!(matches!(error.fault, ReadFault::Buffer { needed: 6, given: 5 }));
    }
}
