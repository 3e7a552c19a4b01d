//! Files that one process at a time may have.
//!
//! A lock belongs to a file and not to its name. Who waits to open a file can get it when whoever held it has given
//! it another name, or removed it: then the lock is on a file that is somebody else's, or nobody's. So after locking
//! the name is looked up again.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Opens a file to be read and written, creates it if it is not there, and locks it as long as it is open. The second
/// part is whether it is locked, which some file systems cannot do.
///
/// # Errors
/// Those of opening.
pub(crate) fn open(path: &Path) -> io::Result<(File, Result<(), TryLockError>)> {
    open_and(path, &mut || {})
}

/// The same; `opened` is called between opening and locking.
fn open_and(path: &Path, opened: &mut dyn FnMut()) -> io::Result<(File, Result<(), TryLockError>)> {
    loop {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        opened();
        let locked = file.try_lock();
        if locked.is_err() {
            return Ok((file, locked));
        }
        let same = |there: Metadata, ours: &Metadata| (there.dev(), there.ino()) == (ours.dev(), ours.ino());
        let ours = file.metadata()?;
        if std::fs::metadata(path).is_ok_and(|there| same(there, &ours)) {
            return Ok((file, locked));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a pack was finished, and got its name, between another's opening and locking of the same
    /// unfinished file; the other found no log of it and cut the finished pack to nothing.
    #[test]
    fn what_is_locked_is_what_has_the_name() {
        let folder = tempfile::tempdir().unwrap();
        let (path, done) = (folder.path().join("part"), folder.path().join("done"));
        std::fs::write(&path, "all of it").unwrap();
        let mut moved = 0;
        let (file, locked) = open_and(&path, &mut || {
            if moved == 0 {
                std::fs::rename(&path, &done).unwrap();
            }
            moved += 1;
        })
        .unwrap();
        assert!(locked.is_ok() && moved == 2);
        file.set_len(0).unwrap();
        assert_eq!(std::fs::read(&done).unwrap(), b"all of it");
        // Removed in between, it is made again; and nobody else has it then.
        let mut removed = false;
        drop(file);
        let (file, _) = open_and(&path, &mut || {
            if !std::mem::replace(&mut removed, true) {
                std::fs::remove_file(&path).unwrap();
            }
        })
        .unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().ino(), file.metadata().unwrap().ino());
        assert!(matches!(open(&path).unwrap().1, Err(TryLockError::WouldBlock)));
        drop(file);
        assert!(open(&path).unwrap().1.is_ok());
    }
}
