//! Failures as people see them: one sentence, a hint, and an exit code.

use crate::signals;
use k3_core::model::ForwardError;
use k3_platform::error::Error;
use k3_platform::io::{Changed, ReadFault};
use k3_platform::pack::PackFault;
use k3_platform::session::SessionError;
use k3_platform::synth::SynthError;
use std::io::{ErrorKind, IsTerminal as _, Write as _};
use std::path::Path;

/// A check that was asked for failed.
pub(crate) const CHECK: u8 = 1;
/// Usage, or a config or prompt that is refused.
pub(crate) const USAGE: u8 = 2;
/// The checkpoint or vocabulary is damaged, incomplete or of another model.
pub(crate) const DAMAGED: u8 = 3;
/// The budget cannot hold the request.
pub(crate) const BUDGET: u8 = 4;
/// I/O failed while running.
pub(crate) const IO: u8 = 5;
/// The arithmetic went non-finite.
pub(crate) const NON_FINITE: u8 = 6;

/// What to do about a disk that brings nothing.
const SILENT: &str = "the disk, or the way to it, does not answer; --io-timeout SECONDS waits longer";

/// What to do about a file that is not what it was.
const CHANGED: &str = "something writes to the model's folder: let it finish";

/// Why the command stops.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// What is wrong, in a sentence.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Failure {
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { code: USAGE, message: message.into(), hint: Some(hint.into()) }
    }

    /// Writing to `what` failed.
    pub(crate) fn output(what: &Path, error: &std::io::Error) -> Self {
        Self { code: IO, message: format!("{}: {error}", what.display()), hint: None }
    }

    /// A file to be written cannot be: said before anything is computed.
    pub(crate) fn target(what: &Path, error: &std::io::Error) -> Self {
        Self::usage(format!("{}: {error}", what.display()), "name a file that can be written")
    }

    /// What is wrong with `file`, which `option` names, or with what it is held against: if the file itself
    /// cannot be opened, the user named the wrong one.
    pub(crate) fn named(option: &str, file: &Path, error: Error) -> Self {
        match &error {
            Error::Open { path, source } if path == file && is_wrong_name(source.kind()) => {
                Self::usage(format!("{option} {}: {source}", file.display()), "name a file that can be read")
            }
            _ => error.into(),
        }
    }

    pub(crate) fn print(&self) {
        let mut err = std::io::stderr().lock();
        let colours = err.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        let (red, green, plain) = if colours { ("\x1b[1;31m", "\x1b[32m", "\x1b[0m") } else { ("", "", "") };
        // If standard error is closed too there is nobody left to tell.
        let _ = writeln!(err, "{red}k3:{plain} {}", self.message);
        if let Some(hint) = &self.hint {
            let _ = writeln!(err, "{green}hint:{plain} {hint}");
        }
    }
}

/// Whether the system says so of a name, and not of a disk.
fn is_wrong_name(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::InvalidInput
            | ErrorKind::NotADirectory
            | ErrorKind::IsADirectory
    )
}

/// From here on a panic of any thread prints where, and ends the process with 134: a bug must not go on
/// with half of its threads, nor look like a usage error.
pub(crate) fn abort_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        say(info);
        std::process::abort();
    }));
}

/// The exit-code table of errors.
impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        let message = error.to_string();
        let (code, hint) = match error {
            Error::Open { source, .. } if source.kind() == ErrorKind::NotFound => (
                DAMAGED,
                Some("MODEL_DIR must hold config.json, model.safetensors.index.json, the shards and tiktoken.model"),
            ),
            Error::Open { source, .. } if matches!(source.get_ref(), Some(e) if e.is::<Changed>()) => {
                (IO, Some(CHANGED))
            }
            Error::Open { source, .. }
                if matches!(
                    source.kind(),
                    ErrorKind::InvalidData
                        | ErrorKind::InvalidInput
                        | ErrorKind::NotADirectory
                        | ErrorKind::IsADirectory
                ) =>
            {
                (DAMAGED, Some("this is not a file of a checkpoint: MODEL_DIR must be the downloaded directory"))
            }
            Error::Open { source, .. } if source.kind() == ErrorKind::TimedOut => (IO, Some(SILENT)),
            Error::Open { .. } | Error::Threads(_) => (IO, None),
            Error::Stopped => (signals::code(), None),
            Error::Config { .. } => {
                (USAGE, Some("use the config.json of the release; fields renamed by other tools are not guessed"))
            }
            Error::MissingShard { .. } | Error::Length { .. } | Error::Header { .. } => {
                (DAMAGED, Some("the download is incomplete or damaged: fetch this file again"))
            }
            Error::Json { .. }
            | Error::Structure { .. }
            | Error::TooLong { .. }
            | Error::UnknownTensor { .. }
            | Error::Duplicate { .. }
            | Error::ShortIndex { .. }
            | Error::MissingTensors { .. }
            | Error::NotInShard { .. }
            | Error::Shape { .. }
            | Error::Overlap { .. }
            | Error::ShardName { .. }
            | Error::Vocab { .. }
            | Error::Special { .. }
            | Error::VocabSize { .. } => {
                (DAMAGED, Some("config, index, shards and vocabulary must come from one and the same release"))
            }
            Error::Budget(_) => (BUDGET, Some("give more with --memory, or ask for less with --context or --chunk")),
            Error::Memory(_) => (BUDGET, Some("the system gave less than it said was free: lower --memory")),
            Error::Pack(e) => match &e.fault {
                PackFault::OtherModel(_) | PackFault::OtherTensors { .. } => {
                    (DAMAGED, Some("pack this model with k3 pack, or run without it by --trunk none"))
                }
                PackFault::Exists => (USAGE, Some("name another file, or delete this one")),
                PackFault::Create(_) => (USAGE, Some("name a file in a directory that can be written")),
                PackFault::Busy => (IO, Some("wait for it, or name another file")),
                PackFault::Space { .. } => {
                    (IO, Some("make room, or name a file on another disk; what an earlier run has packed is kept"))
                }
                PackFault::Write(_) => {
                    (IO, Some("what is packed so far is kept in OUT.part; the same command goes on from there"))
                }
                PackFault::Verify { .. } => (IO, Some("the disk does not keep what is written to it: check it")),
                PackFault::Codec => (IO, Some("please report it; --raw packs without the code")),
                PackFault::NotAPack => {
                    (DAMAGED, Some("name a file that `k3 pack` has made, or run without one by --trunk none"))
                }
                PackFault::Version(_) => (DAMAGED, Some("pack the model again with this k3")),
                _ => (DAMAGED, Some("delete the file and pack the model again, or run without it by --trunk none")),
            },
            Error::Read(inner) => match inner.fault {
                ReadFault::Stalled { .. } => (IO, Some(SILENT)),
                ReadFault::Shrank { .. } => (IO, Some(CHANGED)),
                ReadFault::System(_) => {
                    (IO, Some("the system could not read this; `k3 verify --hash` finds all such files"))
                }
                ReadFault::Checksum { .. } => (
                    DAMAGED,
                    Some("delete the packed trunk and pack the model again, or run without it by --trunk none"),
                ),
                _ => (IO, None),
            },
            Error::Forward(inner) => match **inner {
                ForwardError::NonFinite { .. } => {
                    (NON_FINITE, Some("nothing was sampled from it; the weights are damaged, or of another model"))
                }
                ForwardError::ALogTail { .. } => (DAMAGED, Some("config and shards are of different models")),
                _ => (USAGE, None),
            },
            _ => (IO, None),
        };
        Self { code, message, hint: hint.map(str::to_owned) }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::from(&error)
    }
}

impl From<SessionError> for Failure {
    fn from(error: SessionError) -> Self {
        let message = error.to_string();
        let (code, hint) = match error {
            SessionError::Engine(error) => return error.into(),
            SessionError::Locked { .. } => (USAGE, "wait for it, or name another file with --session"),
            SessionError::Place { .. } => (USAGE, "name a file in a folder that can be written to"),
            SessionError::NotAFile { .. } => (USAGE, "--session takes a file, which may not be there yet"),
            SessionError::NotASession { .. } => (DAMAGED, "--session would replace it; it was left as it is"),
            SessionError::Version { .. } => (DAMAGED, "name another file; this one was left as it is"),
            SessionError::OtherModel { .. } => (DAMAGED, "a session belongs to one model; name another file"),
            SessionError::Damaged { .. } => {
                (DAMAGED, "it was left as it is; restore it from a copy, or name another file")
            }
            SessionError::Read { .. } => (IO, "the session cannot be read"),
            SessionError::Write { .. } => (IO, "make room, or name a file in another place"),
            _ => (IO, "see the message"),
        };
        Self { code, message, hint: Some(hint.to_owned()) }
    }
}

impl From<SynthError> for Failure {
    fn from(error: SynthError) -> Self {
        let message = error.to_string();
        let (code, hint) = match &error {
            SynthError::NotEmpty { .. } => {
                (USAGE, Some("name a directory that does not exist yet; nothing was written"))
            }
            SynthError::Config(_) | SynthError::Vocabulary { .. } | SynthError::Layer { .. } => (USAGE, None),
            SynthError::Space { .. } => (IO, Some("fill fewer layers, or write to a larger disk")),
            _ => (IO, None),
        };
        Self { code, message, hint: hint.map(str::to_owned) }
    }
}
