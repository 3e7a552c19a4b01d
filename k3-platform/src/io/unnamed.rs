//! Files that have no name until they are whole: a process that is killed leaves nothing of them.

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use std::fs::{File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::Path;

/// A new file, to read and write, that will have a name in the folder of `target`, and permissions `mode` less
/// what the process masks; `None` where the file system or the kernel has no such files.
///
/// # Errors
/// Those of the system.
pub fn unnamed(target: &Path, mode: u32) -> io::Result<Option<File>> {
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Only through /proc can such a file get its name.
    if !Path::new("/proc/self/fd").is_dir() {
        return Ok(None);
    }
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::from_raw_mode(mode)) {
        Ok(fd) => Ok(Some(fd.into())),
        // How kernels and file systems say that they have none.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Gives a file of [`unnamed`] a name, which nothing has yet.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], and others of the system.
pub fn give_name(file: &File, name: &Path) -> io::Result<()> {
    let open = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, open.as_str(), CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}

/// Gives a new file the permissions of the one whose place it takes, and its owner where that is allowed. A
/// group that cannot be had is no reason to let another one do what only that one might.
///
/// # Errors
/// Those of the system.
pub fn take_after(file: &File, old: &Metadata) -> io::Result<()> {
    let new = file.metadata()?;
    let mut mode = old.mode() & 0o777;
    let owned = (new.uid(), new.gid()) == (old.uid(), old.gid())
        || fchown(file, Some(old.uid()), Some(old.gid())).is_ok()
        || fchown(file, None, Some(old.gid())).is_ok();
    if !owned && new.gid() != old.gid() {
        mode &= !0o070 | (mode & 0o007) << 3;
    }
    // A file system without permissions refuses every change, and all its files have the same.
    if new.mode() & 0o777 == mode { Ok(()) } else { file.set_permissions(Permissions::from_mode(mode)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_file_is_not_there_before_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("f");
        let Some(mut file) = unnamed(&name, 0o666).unwrap() else {
            println!("SKIPPED: no files without a name here");
            return;
        };
        file.write_all(b"whole").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        give_name(&file, &name).unwrap();
        assert_eq!(std::fs::read(&name).unwrap(), b"whole");
        assert_eq!(give_name(&file, &name).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(unnamed(&dir.path().join("no/f"), 0o666).is_err());
    }

    #[test]
    fn a_new_file_may_be_read_by_those_who_read_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| File::create_new(dir.path().join(name)).unwrap());
        let mode = |file: &File| file.metadata().unwrap().mode() & 0o7777;
        for wanted in [0o600, 0o644, 0o400, 0o664, 0o4755] {
            old.set_permissions(Permissions::from_mode(wanted)).unwrap();
            take_after(&new, &old.metadata().unwrap()).unwrap();
            assert_eq!(mode(&new), wanted & 0o777);
        }
        // Of another group, which only root can give.
        old.set_permissions(Permissions::from_mode(0o640)).unwrap();
        if fchown(&old, Some(1), Some(1)).is_err() {
            println!("SKIPPED: this user cannot give a file away");
            return;
        }
        take_after(&new, &old.metadata().unwrap()).unwrap();
        let meta = new.metadata().unwrap();
        assert_eq!((meta.uid(), meta.gid(), mode(&new)), (1, 1, 0o640));
    }
}
