//! The demo checkpoint: carried inside the binary, unpacked where the engine can read it like any
//! other.
//!
//! ```text
//! $XDG_CACHE_HOME/k3/demo-ID/     or ~/.cache/k3/demo-ID/; ID is a digest of all names and bytes
//!     config.json                 each file: length and SHA-256 compared at every start;
//!     ...                         what differs is written to a temporary neighbour and renamed
//! ```
//!
//! There is no lock and no marker. A file is either missing, or wrong, or the bytes that every
//! process with this ID would write, and a rename puts it there whole: so any number of processes may
//! unpack at once, a stopped one leaves work for the next, and a crash of the machine that loses
//! unsynced bytes is found by the digest. Where no folder can be used the demo is read from the program
//! itself: there is nothing to clean up then, however the process ends.

use k3_platform::io::Source;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The demo, ready to be opened.
#[derive(Debug)]
pub(crate) struct Demo {
    dir: PathBuf,
    touched: u64,
    /// Whether it is read from the program, and `dir` is only a name.
    included: bool,
}

impl Demo {
    /// The checkpoint's directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Bytes of the binary that were written out, or will be read. They are pages of this process from
    /// then on, and so part of its peak.
    pub(crate) const fn touched(&self) -> u64 {
        self.touched
    }

    /// The same of a process that is started now.
    pub(crate) const fn touched_again(&self) -> u64 {
        if self.included { self.touched } else { 0 }
    }

    /// Whether it has no directory.
    pub(crate) const fn is_included(&self) -> bool {
        self.included
    }

    /// Where its files are read, if not from the disk.
    pub(crate) fn source(&self) -> Option<Arc<dyn Source>> {
        #[cfg(feature = "demo")]
        if self.included {
            return Some(Arc::new(packed::Included));
        }
        None
    }
}

#[cfg(not(feature = "demo"))]
pub(crate) fn unpack(_: bool) -> Result<Demo, crate::fail::Failure> {
    Err(crate::fail::Failure::usage("no model, and this k3 was built without the demo", NAME_ONE))
}

#[cfg(feature = "demo")]
pub(crate) use packed::unpack;

const NAME_ONE: &str = "name a checkpoint directory, or set K3_MODEL";

#[cfg(feature = "demo")]
mod packed {
    use super::{Demo, NAME_ONE};
    use crate::cache;
    use crate::fail::Failure;
    use k3_platform::io::{ReadAt, Source};
    use sha2::{Digest as _, Sha256};
    use std::fs;
    use std::io::{self, Read as _, Write as _};
    use std::os::unix::fs::DirBuilderExt as _;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::{Duration, SystemTime};

    /// A file of the demo.
    pub(super) struct Packed {
        name: &'static str,
        sha256: [u8; 32],
        bytes: &'static [u8],
    }

    include!(concat!(env!("OUT_DIR"), "/demo.rs"));

    /// Temporary files of stopped processes are removed when they are older than this.
    const STALE: Duration = Duration::from_secs(3600);
    const PART: &str = ".part";

    /// Makes sure that the demo lies unpacked and whole in a folder.
    ///
    /// # Errors
    /// If no folder can be written.
    pub(crate) fn unpack(quiet: bool) -> Result<Demo, Failure> {
        if FILES.is_empty() {
            return Err(Failure::usage("no model, and this k3 was built where there was no demo to include", NAME_ONE));
        }
        let say = |text: String| {
            if !quiet {
                let _ = writeln!(io::stderr(), "note: {text}");
            }
        };
        let refused = match cache::folder(|name| std::env::var_os(name)) {
            Some(root) => {
                let dir = root.join(format!("demo-{ID}"));
                match fill(&dir, FILES) {
                    Ok(touched) => {
                        say(format!("no MODEL_DIR: this is the tiny demo model, from {}", dir.display()));
                        return Ok(Demo { dir, touched, included: false });
                    }
                    Err(error) => format!("{}: {error}", dir.display()),
                }
            }
            None => "neither XDG_CACHE_HOME nor HOME names a folder".to_owned(),
        };
        say(format!("no MODEL_DIR: this is the tiny demo model, read from k3 itself, for {refused}"));
        let bytes: usize = FILES.iter().map(|f| f.bytes.len()).sum();
        Ok(Demo { dir: PathBuf::from("demo"), touched: bytes as u64, included: true })
    }

    /// The files as they lie in the program.
    #[derive(Debug)]
    pub(super) struct Included;

    impl Source for Included {
        fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
            let name = path.file_name().and_then(|name| name.to_str());
            let file = FILES.iter().find(|f| Some(f.name) == name).ok_or(io::ErrorKind::NotFound)?;
            Ok(Arc::new(Slice { path: path.to_owned(), bytes: file.bytes }))
        }
    }

    /// One of them.
    struct Slice {
        path: PathBuf,
        bytes: &'static [u8],
    }

    impl ReadAt for Slice {
        fn len(&self) -> io::Result<u64> {
            Ok(self.bytes.len() as u64)
        }

        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            let rest = usize::try_from(offset).ok().and_then(|at| self.bytes.get(at..)).unwrap_or_default();
            let count = rest.len().min(buf.len());
            buf[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }

        fn alignment(&self) -> usize {
            1
        }

        fn path(&self) -> &Path {
            &self.path
        }
    }

    /// Brings `dir` to hold `files`, and gives the bytes written for it. Files that are right stay.
    fn fill(dir: &Path, files: &[Packed]) -> io::Result<u64> {
        let (mut written, mut created) = (0, false);
        for file in files {
            let path = dir.join(file.name);
            if holds(&path, file).unwrap_or(false) {
                continue;
            }
            if !created {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
                remove_stale(dir);
                created = true;
            }
            let prefix = format!(".{}.", file.name);
            let mut part = tempfile::Builder::new().prefix(&prefix).suffix(PART).tempfile_in(dir)?;
            part.write_all(file.bytes)?;
            // A file that another process has put there meanwhile must stay: that process may be reading
            // it already, and what is replaced under a reader is refused.
            if let Err(e) = part.persist_noclobber(&path) {
                let there = e.error.kind() == io::ErrorKind::AlreadyExists;
                if there && holds(&path, file).unwrap_or(false) {
                    continue;
                }
                e.file.persist(&path).map_err(|e| e.error)?;
            }
            written += file.bytes.len() as u64;
        }
        Ok(written)
    }

    /// Whether the bytes at `path` are those of `file`. The bytes in the binary are not looked at, so
    /// they take no memory when nothing is written.
    fn holds(path: &Path, file: &Packed) -> io::Result<bool> {
        let meta = fs::metadata(path)?;
        if !meta.is_file() || meta.len() != file.bytes.len() as u64 {
            return Ok(false);
        }
        let mut reader = fs::File::open(path)?;
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => return Ok(<[u8; 32]>::from(hash.finalize()) == file.sha256),
                Ok(n) => hash.update(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Best effort: nothing depends on it.
    fn remove_stale(dir: &Path) {
        let stale = |entry: &fs::DirEntry| {
            let time = entry.metadata().and_then(|meta| meta.modified()).ok()?;
            let old = SystemTime::now().duration_since(time).is_ok_and(|age| age > STALE);
            (old && entry.file_name().to_string_lossy().ends_with(PART)).then_some(())
        };
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if stale(&entry).is_some() {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::ffi::OsString;

        fn files() -> [Packed; 2] {
            let packed = |name, bytes: &'static [u8]| Packed { name, sha256: Sha256::digest(bytes).into(), bytes };
            [packed("a", b"first"), packed("b", b"second")]
        }

        #[test]
        fn the_cache_follows_the_xdg_rules() {
            let with = |xdg: Option<&str>, home: Option<&str>| {
                cache::folder(|name| if name == "HOME" { home } else { xdg }.map(OsString::from))
            };
            assert_eq!(with(Some("/c"), Some("/h")), Some("/c/k3".into()));
            assert_eq!(with(None, Some("/h")), Some("/h/.cache/k3".into()));
            assert_eq!(with(Some(""), Some("/h")), Some("/h/.cache/k3".into()));
            assert_eq!(with(Some("c"), Some("/h")), Some("/h/.cache/k3".into()));
            assert_eq!(with(Some("c"), Some("h")), None);
            assert_eq!(with(None, None), None);
        }

        #[test]
        fn the_table_is_the_folder_as_it_is() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
            for file in FILES {
                assert!(holds(&folder.join(file.name), file).unwrap(), "{}", file.name);
                assert_eq!(<[u8; 32]>::from(Sha256::digest(file.bytes)), file.sha256);
            }
            let shards = |names: &mut dyn Iterator<Item = String>| names.filter(|n| n.contains(".safetensors")).count();
            let there = fs::read_dir(&folder).into_iter().flatten().flatten();
            assert_eq!(
                shards(&mut there.map(|e| e.file_name().to_string_lossy().into_owned())),
                shards(&mut FILES.iter().map(|f| f.name.to_owned()))
            );
        }

        /// The story: a process that found a file missing put its own copy over that of another one,
        /// which was reading it already and refused what had been replaced under it.
        #[test]
        fn what_one_has_put_there_no_other_replaces() {
            use std::os::unix::fs::MetadataExt as _;
            for _ in 0..20 {
                let folder = tempfile::tempdir().unwrap();
                let dir = folder.path().join("demo");
                let inodes = || {
                    fill(&dir, &files()).unwrap();
                    ["a", "b"].map(|name| fs::metadata(dir.join(name)).unwrap().ino())
                };
                let seen: Vec<_> = std::thread::scope(|scope| {
                    let started: Vec<_> = (0..8).map(|_| scope.spawn(inodes)).collect();
                    started.into_iter().map(|thread| thread.join().unwrap()).collect()
                });
                assert!(seen.iter().all(|s| *s == inodes()), "{seen:?}");
            }
        }

        #[test]
        fn every_kind_of_damage_is_mended_and_leftovers_go_when_old() {
            let files = files();
            let root = tempfile::tempdir().unwrap();
            let dir = root.path().join("x/y");
            assert_eq!(fill(&dir, &files).unwrap(), 11);
            assert_eq!(fill(&dir, &files).unwrap(), 0);
            let check = || {
                assert_eq!(fs::read(dir.join("a")).unwrap(), b"first");
                assert_eq!(fs::read(dir.join("b")).unwrap(), b"second");
            };
            check();
            let old = fs::File::create(dir.join(".a.123.part")).unwrap();
            old.set_modified(SystemTime::now() - 2 * STALE).unwrap();
            let fresh = dir.join(".a.456.part");
            fs::write(&fresh, b"fi").unwrap();
            fs::write(dir.join("other"), b"kept").unwrap();
            let damage: [&dyn Fn(&Path); 5] = [
                &|path| fs::write(path, b"sec").unwrap(),
                &|path| fs::write(path, b"sEcond").unwrap(),
                &|path| fs::write(path, b"second and more").unwrap(),
                &|path| fs::remove_file(path).unwrap(),
                &|path| {
                    fs::remove_file(path).unwrap();
                    std::os::unix::fs::symlink("nowhere", path).unwrap();
                },
            ];
            for damage in damage {
                damage(&dir.join("b"));
                assert_eq!(fill(&dir, &files).unwrap(), 6);
                check();
            }
            assert!(!dir.join(".a.123.part").exists() && fresh.exists() && dir.join("other").exists());
            // What no rename can replace is an error, and not a panic or a loop.
            fs::remove_file(dir.join("b")).unwrap();
            fs::create_dir(dir.join("b")).unwrap();
            assert!(fill(&dir, &files).is_err());
            assert_eq!(fs::read_dir(&dir).unwrap().count(), 4, "no part file is left");
        }
    }
}
