//! Files in memory, so that a reader of checkpoints can be fuzzed without a disk.

use k3_platform::io::{ReadAt, Source};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// Bytes, zeros behind them, and bytes behind those: a shard whose data nobody looks at, or a pack
/// that is as long as it says.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    bytes: Vec<u8>,
    zeros: u64,
    tail: Vec<u8>,
}

/// Files by their names; the folder of a path does not matter.
#[derive(Debug, Default)]
pub(super) struct Files(RwLock<HashMap<PathBuf, Arc<File>>>);

impl Files {
    /// Adds a file, or puts it in the place of another. `zeros` bytes follow `bytes`.
    pub(super) fn put(&self, name: &str, bytes: Vec<u8>, zeros: u64) {
        self.put_hollow(name, bytes, zeros, Vec::new());
    }

    /// The same with `tail` behind the zeros.
    pub(super) fn put_hollow(&self, name: &str, bytes: Vec<u8>, zeros: u64, tail: Vec<u8>) {
        let file = Arc::new(File { path: name.into(), bytes, zeros, tail });
        // A target that panicked while it held the lock has left a whole map.
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(name.into(), file);
    }
}

impl Source for Files {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        let files = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let name = path.file_name().unwrap_or_default();
        match files.get(Path::new(name)) {
            Some(file) => Ok(Arc::<File>::clone(file)),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

impl ReadAt for File {
    fn len(&self) -> io::Result<u64> {
        Ok((self.bytes.len() as u64).saturating_add(self.zeros).saturating_add(self.tail.len() as u64))
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let left = self.len()?.saturating_sub(offset);
        let n = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        let from = usize::try_from(offset).unwrap_or(usize::MAX).min(self.bytes.len());
        let copied = n.min(self.bytes.len() - from);
        buf[..copied].copy_from_slice(&self.bytes[from..][..copied]);
        buf[copied..n].fill(0);
        // Where the tail begins, seen from the buffer, or how much of it lies before the buffer.
        let tail = (self.bytes.len() as u64).saturating_add(self.zeros);
        let before = usize::try_from(tail.saturating_sub(offset)).unwrap_or(usize::MAX).min(n);
        let skipped = usize::try_from(offset.saturating_sub(tail)).unwrap_or(usize::MAX).min(self.tail.len());
        buf[before..n].copy_from_slice(&self.tail[skipped..][..n - before]);
        Ok(n)
    }

    fn alignment(&self) -> usize {
        1
    }

    fn path(&self) -> &Path {
        &self.path
    }
}
