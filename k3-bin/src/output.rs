//! Files the command writes: refused before anything is computed, there only when they are complete.
//!
//! The bytes go to a file without a name, which takes its name when it is whole: a process that is
//! killed leaves nothing, and an older file stays as it was. A file system that has no such files
//! gets a hidden neighbour, `.k3-PID.part`, which is renamed. A new file has the permissions of the one it
//! replaces. What is no regular file (a pipe, a device) cannot appear: it is written as it is.

use crate::fail::Failure;
use crate::input;
use crate::signals;
use k3_platform::io::{give_name, take_after, unnamed};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A file in the making.
#[derive(Debug)]
pub(crate) struct Output {
    out: BufWriter<Patient<File>>,
    unfinished: Option<Unfinished>,
}

/// What is to happen to a regular file when it is complete.
#[derive(Debug)]
struct Unfinished {
    target: PathBuf,
    /// The neighbour that holds the bytes, where they are not in a file without a name.
    temporary: Option<PathBuf>,
}

impl Output {
    /// Makes sure that `path` can be written, and begins. A pipe is waited for until somebody reads it, or a
    /// signal asks for an end.
    ///
    /// # Errors
    /// As usage: the user named the wrong file.
    pub(crate) fn create(path: &Path) -> Result<Self, Failure> {
        Self::try_create(path).map_err(|e| input::failed(path, &e, "name a file that can be written"))
    }

    /// The same of an option that may be absent.
    ///
    /// # Errors
    /// As [`Output::create`].
    pub(crate) fn optional(path: Option<&PathBuf>) -> Result<Option<Self>, Failure> {
        path.map(|path| Self::create(path)).transpose()
    }

    fn try_create(path: &Path) -> io::Result<Self> {
        let (file, unfinished) = match std::fs::metadata(path) {
            Ok(there) if there.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            Ok(there) if there.file_type().is_fifo() => (open_pipe(path)?, None),
            Ok(there) if !there.is_file() => (File::options().write(true).open(path)?, None),
            there => {
                // What a link leads to is replaced, not the link; and only what may be written. Whoever may not
                // read the old file may not read the new one while it is written, either.
                let (target, mode) = match there {
                    Ok(_) => {
                        File::options().append(true).open(path)?;
                        (path.canonicalize()?, 0o600)
                    }
                    Err(_) => (path.to_owned(), 0o666),
                };
                if target.file_name().is_none() {
                    return Err(io::Error::new(io::ErrorKind::InvalidInput, "this is not the name of a file"));
                }
                let (file, temporary) = begin(&target, mode)?;
                (file, Some(Unfinished { target, temporary }))
            }
        };
        Ok(Self { out: BufWriter::new(Patient(file)), unfinished })
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        if let Some(Unfinished { target, temporary }) = &self.unfinished {
            let file = &self.out.get_ref().0;
            if let Ok(old) = std::fs::metadata(target) {
                take_after(file, &old)?;
            }
            file.sync_all()?;
            match temporary {
                Some(temporary) => std::fs::rename(temporary, target)?,
                None => name(file, target)?,
            }
        }
        self.unfinished = None;
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Some(Unfinished { temporary: Some(temporary), .. }) = &self.unfinished {
            // Best effort: the command is failing already.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

/// Opens a named pipe for writing when somebody reads it, and says so if that takes long.
fn open_pipe(path: &Path) -> io::Result<File> {
    const LOOK: Duration = Duration::from_millis(20);
    const LONG: Duration = Duration::from_secs(2);
    let begun = Instant::now();
    let mut told = false;
    loop {
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        match File::options().write(true).custom_flags(flags).open(path) {
            Err(e) if e.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {}
            other => return other,
        }
        if signals::stopped() {
            return Err(input::interrupted());
        }
        if !told && begun.elapsed() >= LONG {
            told = true;
            // If standard error is closed there is nobody to tell.
            let _ = writeln!(io::stderr(), "note: {}: waiting for somebody to read this pipe", path.display());
        }
        std::thread::sleep(LOOK);
    }
}

fn neighbour(target: &Path) -> PathBuf {
    target.with_file_name(format!(".k3-{}.part", std::process::id()))
}

/// A file for the bytes of `target`, and its name if it has to have one.
fn begin(target: &Path, mode: u32) -> io::Result<(File, Option<PathBuf>)> {
    if let Some(file) = unnamed(target, mode)? {
        return Ok((file, None));
    }
    let temporary = neighbour(target);
    Ok((File::options().write(true).create_new(true).mode(mode).open(&temporary)?, Some(temporary)))
}

/// Gives a file without a name the one it is for.
fn name(file: &File, target: &Path) -> io::Result<()> {
    match give_name(file, target) {
        // A link replaces nothing, a rename does.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let temporary = neighbour(target);
            give_name(file, &temporary)?;
            std::fs::rename(&temporary, target).inspect_err(|_| drop(std::fs::remove_file(&temporary)))
        }
        other => other,
    }
}

/// Refuses outputs that are one file, that the command also reads, or that are a part of `model`. Each
/// path comes with the option that names it.
///
/// # Errors
/// As usage.
pub(crate) fn check(
    outputs: &[(&str, Option<&PathBuf>)],
    inputs: &[(&str, Option<&PathBuf>)],
    model: Option<&Path>,
) -> Result<(), Failure> {
    let named = |list: &[(&str, Option<&PathBuf>)]| -> Vec<(String, PathBuf)> {
        list.iter().filter_map(|(option, path)| Some(((*option).to_owned(), path.cloned()?))).collect()
    };
    let (outputs, inputs) = (named(outputs), named(inputs));
    let same = |a: &Path, b: &Path| a == b || crate::text::same_file(a, b);
    for (i, (option, path)) in outputs.iter().enumerate() {
        if let Some((other, _)) = outputs[i + 1..].iter().chain(&inputs).find(|(_, other)| same(path, other)) {
            let message = format!("{} is named twice, once to be written", path.display());
            return Err(Failure::usage(message, format!("{option} and {other} take different files")));
        }
        let mut files = model.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten().flatten();
        if path.is_file() && files.any(|file| same(path, &file.path())) {
            let message = format!("{option} {}: this is a file of the model", path.display());
            return Err(Failure::usage(message, "name another file"));
        }
    }
    Ok(())
}

/// Writes to what may take no bytes for as long as it likes: a pipe whose reader is busy, a terminal
/// that is held. Once a signal has asked for an end, such a reader counts as gone.
#[derive(Debug)]
pub(crate) struct Patient<W>(pub(crate) W);

impl<W: AsFd> Write for Patient<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        // What a pipe that can be written to takes at once.
        const PIPE: usize = 4096;
        const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        let mut last_look = false;
        loop {
            match poll(&mut [PollFd::new(&self.0, PollFlags::OUT)], Some(&LOOK)) {
                Err(Errno::INTR) => continue,
                Ok(0) if last_look => return Err(io::ErrorKind::BrokenPipe.into()),
                Ok(0) => {
                    last_look = signals::stopped();
                    continue;
                }
                // What cannot be polled is written to.
                Ok(_) | Err(_) => {}
            }
            return match rustix::io::write(&self.0, &bytes[..bytes.len().min(PIPE)]) {
                Err(Errno::INTR | Errno::AGAIN) => continue,
                other => Ok(other?),
            };
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard output, written to with patience and at once.
pub(crate) fn stdout() -> Patient<io::StdoutLock<'static>> {
    Patient(io::stdout().lock())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_only_when_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let count = || std::fs::read_dir(&dir).unwrap().count();
        for round in ["one", "another"] {
            let mut output = Output::create(&path).unwrap();
            output.write_all(round.as_bytes()).unwrap();
            assert_eq!(path.exists(), round == "another");
            output.finish().unwrap();
            assert_eq!((std::fs::read(&path).unwrap(), count()), (round.as_bytes().to_vec(), 1));
        }
        drop(Output::create(&path).unwrap());
        assert_eq!((std::fs::read(&path).unwrap(), count()), (b"another".to_vec(), 1));
        // With a name, as where files must have one.
        let temporary = neighbour(&path);
        let file = File::create_new(&temporary).unwrap();
        let unfinished = |temporary| Some(Unfinished { target: path.clone(), temporary: Some(temporary) });
        let out = BufWriter::new(Patient(file.try_clone().unwrap()));
        drop(Output { out, unfinished: unfinished(temporary.clone()) });
        assert_eq!((temporary.exists(), count()), (false, 1));
        let file = File::create_new(&temporary).unwrap();
        let mut output = Output { out: BufWriter::new(Patient(file)), unfinished: unfinished(temporary) };
        output.write_all(b"third").unwrap();
        output.finish().unwrap();
        assert_eq!((std::fs::read(&path).unwrap(), count()), (b"third".to_vec(), 1));
    }

    /// The story: a file that only its owner could read was everybody's after the next run.
    #[test]
    fn a_file_that_is_replaced_keeps_its_permissions() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let new = || Output::create(&path).unwrap().finish().unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        File::create_new(dir.path().join("y")).unwrap();
        let usual = std::fs::metadata(dir.path().join("y")).unwrap().permissions().mode() & 0o777;
        new();
        assert_eq!(mode(), usual);
        for wanted in [0o600, 0o640, 0o666] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(wanted)).unwrap();
            new();
            assert_eq!(mode(), wanted);
        }
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join("no/such/folder"), dir.path().join(".."), PathBuf::new()] {
            assert_eq!(Output::create(&path).unwrap_err().code, crate::fail::USAGE, "{}", path.display());
        }
    }

    #[test]
    fn outputs_are_no_inputs_and_not_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, link) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("link"));
        std::fs::write(&a, "a").unwrap();
        std::os::unix::fs::symlink(&a, &link).unwrap();
        let outside = dir.path().parent().map(|p| p.join("k3-nowhere"));
        assert!(
            check(&[("--x", Some(&a)), ("--y", Some(&b)), ("--z", None)], &[("--in", outside.as_ref())], None).is_ok()
        );
        assert!(check(&[("--x", Some(&b)), ("--y", Some(&b))], &[], None).is_err());
        assert!(check(&[("--x", Some(&link))], &[("--in", Some(&a))], None).is_err());
        assert!(check(&[("--x", Some(&link))], &[], Some(dir.path())).is_err());
        assert!(check(&[("--x", Some(&b))], &[], Some(dir.path())).is_ok());
    }
}
