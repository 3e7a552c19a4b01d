//! Files of the system, past the page cache where that is possible.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Advice, AtFlags, Mode as Permissions, OFlags, StatxFlags};

use super::{MAX_ALIGNMENT, ReadAt, Source, Stamp};

/// How files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Mode {
    /// Past the page cache. Where a file system cannot, as [`Mode::Buffered`]; see
    /// [`Disk::fell_back`].
    #[default]
    Direct,
    /// Through the page cache, which keeps what it likes.
    Buffered,
    /// Through the page cache, which is asked to forget each range once it was read.
    Discarded,
}

/// Opens files of the system.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    mode: Mode,
    fell_back: Arc<AtomicBool>,
}

impl Disk {
    /// Opens files in this mode.
    #[must_use]
    pub fn new(mode: Mode) -> Self {
        Self { mode, fell_back: Arc::default() }
    }

    /// Whether any file so far could not be read directly though [`Mode::Direct`] was asked for. Clones
    /// share the answer.
    #[must_use]
    pub fn fell_back(&self) -> bool {
        self.fell_back.load(Ordering::Relaxed)
    }

    /// Opens a file to read.
    ///
    /// # Errors
    /// As for [`Source::open`].
    pub fn file(&self, path: &Path) -> io::Result<File> {
        File::open(path, self.mode, Arc::clone(&self.fell_back))
    }
}

impl Source for Disk {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(self.file(path)?))
    }

    /// The cache is asked to forget what was read: its pages count in a control group, where a budget
    /// is to be kept as well.
    fn open_cached(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(File::open(path, Mode::Discarded, Arc::clone(&self.fell_back))?))
    }
}

/// An open file of the system. Made by [`Disk::file`].
#[derive(Debug)]
pub struct File {
    file: fs::File,
    path: PathBuf,
    stamp: Stamp,
    /// Alignment of direct reads, in bytes.
    align: usize,
    direct: AtomicBool,
    discard: bool,
    fell_back: Arc<AtomicBool>,
}

impl File {
    fn open(path: &Path, mode: Mode, fell_back: Arc<AtomicBool>) -> io::Result<Self> {
        // NONBLOCK so that a pipe is refused below instead of waiting for its other end; it means
        // nothing to a regular file.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let wanted = mode == Mode::Direct;
        let mut direct = wanted;
        let first = if direct { flags | OFlags::DIRECT } else { flags };
        let fd = match rustix::fs::open(path, first, Permissions::empty()) {
            Err(e) if direct && cannot_be_direct(e.into()).is_ok() => {
                direct = false;
                rustix::fs::open(path, flags, Permissions::empty())?
            }
            other => other?,
        };
        let file = fs::File::from(fd);
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let align = if direct { direct_alignment(&file) } else { None };
        let this = Self {
            file,
            path: path.to_owned(),
            stamp: Stamp::of(&meta),
            align: align.unwrap_or(1),
            direct: AtomicBool::new(direct),
            discard: mode == Mode::Discarded,
            fell_back,
        };
        if direct && align.is_none() {
            this.fall_back()?;
        }
        if wanted && !direct {
            this.fell_back.store(true, Ordering::Relaxed);
        }
        Ok(this)
    }

    /// Whether reads go past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// Reads through the page cache from now on. Harmless if another thread did the same just now.
    fn fall_back(&self) -> io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        rustix::fs::fcntl_setfl(&self.file, flags - OFlags::DIRECT)?;
        self.direct.store(false, Ordering::Relaxed);
        self.fell_back.store(true, Ordering::Relaxed);
        Ok(())
    }
}

/// Bytes that this user may still write in the file system of a folder.
///
/// # Errors
/// The system's.
pub fn free_space(dir: &Path) -> io::Result<u64> {
    Ok(free(&rustix::fs::statvfs(dir)?))
}

/// The same of the file system that an open file is on.
///
/// # Errors
/// The system's.
pub fn free_space_of(file: impl AsFd) -> io::Result<u64> {
    Ok(free(&rustix::fs::fstatvfs(file)?))
}

const fn free(fs: &rustix::fs::StatVfs) -> u64 {
    fs.f_bavail.saturating_mul(fs.f_frsize)
}

/// `Ok` if the error is how a file system says that it has no direct reads; else the error.
fn cannot_be_direct(error: io::Error) -> io::Result<()> {
    match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(()),
        _ => Err(error),
    }
}

/// The alignment direct reads of this file need; `None` if it has none that we can keep.
fn direct_alignment(file: &fs::File) -> Option<usize> {
    let answer = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let (memory, offset) = match answer {
        Ok(s) if s.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => (s.stx_dio_mem_align, s.stx_dio_offset_align),
        // Before Linux 6.1, or a file system that does not say: what all disks of today agree with.
        _ => return Some(MAX_ALIGNMENT),
    };
    let align = usize::try_from(memory.max(offset)).ok()?;
    let usable = memory > 0 && offset > 0 && align.is_power_of_two() && align <= MAX_ALIGNMENT;
    usable.then_some(align)
}

impl ReadAt for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.stamp.len)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.is_direct() {
            // Checked here, because the system's answer would look like a file system without
            // direct reads.
            if !super::is_aligned(buf, offset, self.align) {
                return Err(io::Error::new(io::ErrorKind::InvalidInput, "a direct read that is not aligned"));
            }
            match self.file.read_at(buf, offset) {
                Ok(count) => return Ok(count),
                // Some file systems only find out now. Offsets no file has are refused the same way.
                Err(e) if i64::try_from(offset).is_ok() => cannot_be_direct(e)?,
                Err(e) => return Err(e),
            }
            self.fall_back()?;
        }
        let count = self.file.read_at(buf, offset)?;
        if self.discard
            && let Some(len) = std::num::NonZeroU64::new(count as u64)
        {
            // Advice that is declined changes nothing but the cache.
            let _declined = rustix::fs::fadvise(&self.file, offset, Some(len), Advice::DontNeed);
        }
        Ok(count)
    }

    fn alignment(&self) -> usize {
        if self.is_direct() { self.align } else { 1 }
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn stamp(&self) -> Option<Stamp> {
        Some(self.stamp)
    }

    fn stamp_now(&self) -> io::Result<Option<Stamp>> {
        Ok(Some(Stamp::of(&self.file.metadata()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::{bytes, dirs, write};
    use super::super::{read_exact_at, read_window};
    use super::*;
    use crate::aligned::AlignedBuf;

    #[test]
    fn modes_are_what_they_say() {
        for dir in dirs() {
            let path = write(&dir, "f", 10_000);
            let disk = Disk::new(Mode::Direct);
            let file = disk.file(&path).unwrap();
            assert_ne!(file.is_direct(), disk.fell_back());
            assert!(file.alignment().is_power_of_two() && file.alignment() <= MAX_ALIGNMENT);
            let disk = Disk::new(Mode::Buffered);
            let file = disk.file(&path).unwrap();
            assert!(!file.is_direct() && !disk.fell_back());
            assert_eq!((file.alignment(), file.path()), (1, &*path));
        }
    }

    #[test]
    fn reads_that_are_not_aligned_do_not_switch_direct_reads_off() {
        let dir = tempfile::tempdir().unwrap();
        let file = Disk::new(Mode::Direct).file(&write(&dir, "f", 10_000)).unwrap();
        if !file.is_direct() {
            println!("SKIPPED: no direct reads in the temporary directory");
            return;
        }
        let mut buf = AlignedBuf::zeroed(8192).unwrap();
        for (from, to, offset) in [(1, 4097, 0), (0, 4095, 0), (0, 4096, 7)] {
            let error = file.read_at(&mut buf[from..to], offset).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
        assert!(file.read_at(&mut buf, (1 << 63) + 4096).is_err());
        assert!(file.is_direct());
    }

    /// A file system that takes the flag and refuses the read looks like a file that is less aligned
    /// than it claims, which is how this test makes one.
    #[test]
    fn a_refusal_at_the_first_read_falls_back() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Disk::new(Mode::Direct);
        let mut file = disk.file(&write(&dir, "f", 10_000)).unwrap();
        if !file.is_direct() {
            println!("SKIPPED: no direct reads in the temporary directory");
            return;
        }
        file.align = 1;
        let mut buf = AlignedBuf::zeroed(4096).unwrap();
        assert_eq!(file.read_at(&mut buf[..100], 7).unwrap(), 100);
        assert_eq!(buf[..100], bytes(7, 100));
        if file.is_direct() {
            println!("SKIPPED: direct reads in the temporary directory take any alignment");
            return;
        }
        assert!(disk.fell_back());
        let window = super::super::Window::new(5000, 1000, 4096).unwrap();
        read_window(&file, &mut buf, window).unwrap();
        assert_eq!(buf[window.range()], bytes(5000, 1000));
    }

    #[test]
    fn a_stamp_is_the_same_until_the_file_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 10_000);
        let stamp = |mode| Disk::new(mode).file(&path).unwrap().stamp().unwrap();
        let first = stamp(Mode::Direct);
        let file = Disk::new(Mode::Direct).file(&path).unwrap();
        read_exact_at(&file, &mut [0; 100], 5).unwrap();
        assert!(first.len == 10_000 && first == stamp(Mode::Buffered) && first == stamp(Mode::Discarded));
        std::fs::rename(write(&dir, "g", 10_000), &path).unwrap();
        let second = stamp(Mode::Direct);
        assert_ne!(first.ino, second.ino);
        // A clock as coarse as ten milliseconds stamps what is written after.
        std::thread::sleep(std::time::Duration::from_millis(30));
        write(&dir, "f", 10_000);
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(5, 7)).unwrap();
        let third = stamp(Mode::Direct);
        assert_eq!((third.ino, third.len, third.mtime), (second.ino, second.len, (5, 7)));
        assert_ne!(third.ctime, second.ctime);
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for mode in [Mode::Direct, Mode::Buffered] {
            let disk = Disk::new(mode);
            assert_eq!(disk.file(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
            for path in [dir.path(), Path::new("/dev/zero")] {
                assert_eq!(disk.file(path).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{}", path.display());
            }
            let file = disk.file(Path::new("/proc/self/status")).unwrap();
            assert!(read_exact_at(&file, &mut [0; 8], 0).is_ok(), "{mode:?}");
        }
    }
}
