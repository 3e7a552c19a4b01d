//! Files that have no name until they are whole: a process that is killed leaves nothing of them.

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// A new file, to read and write, that will have a name in the folder of `target`; `None` where the file
/// system or the kernel has no such files.
///
/// # Errors
/// Those of the system.
pub fn unnamed(target: &Path) -> io::Result<Option<File>> {
    let folder = target.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Only through /proc can such a file get its name.
    if !Path::new("/proc/self/fd").is_dir() {
        return Ok(None);
    }
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::from_raw_mode(0o666)) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    fn a_file_is_not_there_before_it_has_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join("f");
        let Some(mut file) = unnamed(&name).unwrap() else {
            println!("SKIPPED: no files without a name here");
            return;
        };
        file.write_all(b"whole").unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        give_name(&file, &name).unwrap();
        assert_eq!(std::fs::read(&name).unwrap(), b"whole");
        assert_eq!(give_name(&file, &name).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(unnamed(&dir.path().join("no/f")).is_err());
    }
}
