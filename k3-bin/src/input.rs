//! What the command reads besides a model: files, pipes, standard input.
//!
//! A pipe may bring nothing for as long as it likes, and a named one may have nobody at its other end. It is waited
//! for, but not in the system: there a signal that was taken over would not be seen.

use crate::fail::Failure;
use crate::signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// A file, or standard input, read with patience: until a signal asks for an end.
#[derive(Debug)]
pub(crate) enum Input {
    File(File),
    Stdin,
}

impl Input {
    /// Opens a file; `-` is standard input. A named pipe that nobody writes to is open at once.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if path == Path::new("-") {
            return Ok(Self::Stdin);
        }
        let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        Ok(Self::File(File::options().read(true).custom_flags(flags).open(path)?))
    }
}

/// A signal has asked for an end. Comes inside an [`io::Error`].
#[derive(Debug)]
struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if signals::terminated() { "terminated" } else { "interrupted" })
    }
}

impl std::error::Error for Interrupted {}

/// What a failed read or open is: usage, for the user named the wrong file, or a signal's end.
pub(crate) fn failed(name: &Path, error: &io::Error, hint: &str) -> Failure {
    let message = format!("{}: {error}", name.display());
    if error.get_ref().and_then(|inner| inner.downcast_ref::<Interrupted>()).is_some() {
        return Failure { code: signals::code(), message, hint: None };
    }
    Failure::usage(message, hint)
}

/// Waits until what is asked for can be done, or a signal has come: an error then.
pub(crate) fn wait(fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    loop {
        if signals::stopped() {
            return Err(interrupted());
        }
        match poll(&mut [PollFd::new(&fd, flags)], Some(&LOOK)) {
            Ok(0) | Err(Errno::INTR) => {}
            // What cannot be polled is tried.
            Ok(_) | Err(_) => return Ok(()),
        }
    }
}

/// The error of a wait that a signal has ended.
pub(crate) fn interrupted() -> io::Error {
    io::Error::other(Interrupted)
}

impl Read for Input {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let stdin = io::stdin();
        let fd = match &*self {
            Self::File(file) => file.as_fd(),
            Self::Stdin => stdin.as_fd(),
        };
        loop {
            wait(fd, PollFlags::IN)?;
            match rustix::io::read(fd, &mut *to) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                other => return Ok(other?),
            }
        }
    }
}
