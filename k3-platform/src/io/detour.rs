//! What the sources that wrap another one share: files that are read another way and are otherwise the same.
//!
//! A [`Source`](super::Source) that slows reads down, counts them or makes them fail says with a [`Detour`] what
//! becomes of a read, and hands out the file as [`Detoured`]. All else is the file's own answer, so that no wrapper
//! forgets a method of [`ReadAt`] that has a default, and with it that somebody writes to the file.

use super::{ReadAt, Stamp};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Another way of reading from a file.
pub trait Detour: Send + Sync {
    /// As [`ReadAt::read_at`], with `file` as the place to read from.
    ///
    /// # Errors
    /// As of [`ReadAt::read_at`].
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

/// A file that is read by a [`Detour`]. All else is asked of the file itself.
///
/// ```
/// use k3_platform::io::{Detour, Detoured, Disk, ReadAt, Source};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
///
/// /// Counts bytes.
/// #[derive(Clone, Default)]
/// struct Count(Arc<AtomicU64>);
///
/// impl Detour for Count {
///     fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
///         let bytes = file.read_at(buf, offset)?;
///         self.0.fetch_add(bytes as u64, Ordering::Relaxed);
///         Ok(bytes)
///     }
/// }
///
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("f");
/// # std::fs::write(&path, "text")?;
/// let count = Count::default();
/// let file = Detoured::new(Disk::default().open_cached(&path)?, count.clone());
/// file.read_at(&mut [0; 3], 0)?;
/// assert_eq!((count.0.load(Ordering::Relaxed), file.len()?), (3, 4));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Detoured<D> {
    file: Arc<dyn ReadAt>,
    way: D,
}

impl<D: Detour> Detoured<D> {
    /// `file`, read by `way`.
    #[must_use]
    pub const fn new(file: Arc<dyn ReadAt>, way: D) -> Self {
        Self { file, way }
    }
}

impl<D> std::fmt::Debug for Detoured<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Detoured").field("path", &self.file.path()).finish_non_exhaustive()
    }
}

impl<D: Detour> ReadAt for Detoured<D> {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.way.read_at(&self.file, buf, offset)
    }

    fn alignment(&self) -> usize {
        self.file.alignment()
    }

    fn path(&self) -> &Path {
        self.file.path()
    }

    fn stamp(&self) -> Option<Stamp> {
        self.file.stamp()
    }

    fn stamp_now(&self) -> io::Result<Option<Stamp>> {
        self.file.stamp_now()
    }
}

#[cfg(test)]
mod tests {
    use super::super::testkit::write;
    use super::super::{Disk, Faults, Faulty, Mode, Patient, Source, Throttled};
    use std::sync::Arc;
    use std::time::Duration;

    /// Whatever lies before a file, somebody who writes to it is noticed behind it.
    #[test]
    fn a_wrapped_file_is_the_file_that_it_wraps() {
        let dir = tempfile::tempdir().unwrap();
        let path = write(&dir, "f", 5000);
        let disk: Arc<dyn Source> = Arc::new(Disk::new(Mode::Buffered));
        let sources: [Arc<dyn Source>; 3] = [
            Arc::new(Throttled::new(Arc::clone(&disk), 1e12)),
            Arc::new(Faulty::new(Disk::new(Mode::Buffered), Faults::default())),
            Arc::new(Patient::new(disk, Duration::from_secs(60), Arc::default())),
        ];
        let open = || sources.iter().flat_map(|s| [s.open(&path).unwrap(), s.open_cached(&path).unwrap()]);
        let files: Vec<_> = open().collect();
        for file in &files {
            assert_eq!((file.len().unwrap(), file.path(), file.alignment()), (5000, &*path, 1));
            assert!(file.stamp().is_some() && file.stamp_now().unwrap() == file.stamp());
        }
        std::fs::write(&path, b"shorter").unwrap();
        for file in files {
            assert_ne!(file.stamp_now().unwrap(), file.stamp());
        }
    }
}
