//! What can go wrong between a directory and a token.

use crate::aligned::AllocError;
use crate::io::{GaveUp, ReadError, ReadFault};
use crate::plan::Refusal;
use k3_core::checkpoint::Tensor;
use k3_core::config::ConfigError;
use k3_core::json::JsonError;
use k3_core::model::ForwardError;
use k3_core::safetensors::HeaderError;
use k3_core::tokenizer::{SpecialError, VocabError};
use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint could not be opened or run. Each names the file, the thing in it, and what was
/// expected; `k3-bin` maps the variants to exit codes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be opened or read while the checkpoint was being opened.
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A file, or a part of it that is read whole, is longer than any of its kind can need to be.
    TooLong {
        /// The file.
        path: PathBuf,
        /// The file or the part of it.
        what: &'static str,
        /// Its length (bytes).
        len: u64,
        /// The most that is read (bytes).
        most: u64,
    },
    /// `config.json` is refused.
    Config {
        /// The file.
        path: PathBuf,
        /// All its faults.
        source: Box<ConfigError>,
    },
    /// A JSON file is not what it should be.
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: JsonError,
    },
    /// A JSON file has the wrong structure.
    Structure {
        /// The file.
        path: PathBuf,
        /// What was expected.
        expected: &'static str,
        /// Where (bytes).
        offset: u64,
    },
    /// A shard's header is refused.
    Header {
        /// The shard.
        path: PathBuf,
        /// Where and why.
        source: HeaderError,
    },
    /// The index or a shard has a tensor that this model does not.
    UnknownTensor {
        /// The file that names it.
        path: PathBuf,
        /// Its name.
        name: String,
    },
    /// A file names the same tensor twice.
    Duplicate {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The index is too short to name every tensor of the model, whatever it says.
    ShortIndex {
        /// The index.
        path: PathBuf,
        /// Its length (bytes).
        len: u64,
        /// Tensors of the model in `config.json`.
        tensors: u64,
    },
    /// Tensors of the model that the index does not have.
    MissingTensors {
        /// The index.
        path: PathBuf,
        /// The first of them.
        first: Tensor,
        /// How many there are.
        count: usize,
    },
    /// Index and shard contradict each other about where a tensor is.
    NotInShard {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Whether the index says it is there (and the shard does not have it), or the reverse.
        indexed: bool,
    },
    /// A tensor has another type or shape than the config asks for.
    Shape {
        /// The shard.
        path: PathBuf,
        /// The tensor.
        tensor: Tensor,
        /// What is wrong.
        fault: String,
    },
    /// Two tensors of a shard share bytes.
    Overlap {
        /// The shard.
        path: PathBuf,
        /// One.
        first: String,
        /// The other.
        second: String,
    },
    /// A shard does not end where its last tensor does.
    Length {
        /// The shard.
        path: PathBuf,
        /// Where the last tensor ends (bytes from the start of the file).
        expected: u64,
        /// Length of the file (bytes).
        found: u64,
    },
    /// The index names a shard that is not a plain file name.
    ShardName {
        /// The index.
        path: PathBuf,
        /// The name.
        name: String,
    },
    /// A shard the index names is not there.
    MissingShard {
        /// The shard.
        path: PathBuf,
        /// How many are missing in all.
        count: usize,
    },
    /// `tiktoken.model` is refused.
    Vocab {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: VocabError,
    },
    /// The vocabulary is of another model.
    VocabSize {
        /// The file.
        path: PathBuf,
        /// Ids the config has.
        expected: usize,
        /// Ids the vocabulary has.
        found: usize,
    },
    /// A name of a control id is refused.
    Special {
        /// The file.
        path: PathBuf,
        /// Which and why.
        source: SpecialError,
    },
    /// The budget cannot hold the request.
    Budget(Box<Refusal>),
    /// The system refused memory the plan had counted.
    Memory(AllocError),
    /// The system refused a thread.
    Threads(io::Error),
    /// A packed trunk is damaged, of another model, or could not be written.
    Pack(Box<crate::pack::PackError>),
    /// A read failed while running.
    Read(ReadError),
    /// A pass was refused or stopped.
    Forward(Box<ForwardError<Infallible>>),
    /// The stop flag was set.
    Stopped,
    /// Weights were asked for out of order: a bug.
    Order,
}

/// The weights' part of a [`ForwardError`] that has been taken out of it.
pub use std::convert::Infallible;

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Open { path, source } => write!(f, "{}: {source}", path.display()),
            Self::TooLong { path, what, len, most } => {
                write!(f, "{}: {what} has {len} bytes, in this model it can have {most} at most", path.display())
            }
            Self::Config { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Json { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Structure { path, expected, offset } => {
                write!(f, "{}: byte {offset}: expected {expected}", path.display())
            }
            Self::Header { path, source } => write!(f, "{}: {source}", path.display()),
            Self::UnknownTensor { path, name } => {
                write!(f, "{}: tensor {name:?} is not part of the model in config.json", path.display())
            }
            Self::Duplicate { path, name } => write!(f, "{}: tensor {name} is named twice", path.display()),
            Self::ShortIndex { path, len, tensors } => write!(
                f,
                "{}: a file of {len} bytes cannot hold the \"weight_map\" of the {tensors} tensors of the model in \
                 config.json",
                path.display()
            ),
            Self::MissingTensors { path, first, count } => {
                write!(f, "{}: {count} tensors of the model are not named, the first is {first}", path.display())
            }
            Self::NotInShard { path, name, indexed: true } => {
                write!(f, "{}: tensor {name} is not here, though the index says so", path.display())
            }
            Self::NotInShard { path, name, indexed: false } => {
                write!(f, "{}: tensor {name} is here, but the index does not say so", path.display())
            }
            Self::Shape { path, tensor, fault } => write!(f, "{}: tensor {tensor}: {fault}", path.display()),
            Self::Overlap { path, first, second } => {
                write!(f, "{}: tensors {first} and {second} share bytes", path.display())
            }
            Self::Length { path, expected, found } => {
                write!(f, "{}: the file has {found} bytes, its last tensor ends at {expected}", path.display())
            }
            Self::ShardName { path, name } => {
                write!(f, "{}: shard name {name:?} is not a plain file name", path.display())
            }
            Self::MissingShard { path, count: 1 } => write!(f, "{}: the shard is missing", path.display()),
            Self::MissingShard { path, count } => {
                write!(f, "{}: the shard is missing, and {} more", path.display(), count - 1)
            }
            Self::Vocab { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Special { path, source } => write!(f, "{}: {source}", path.display()),
            Self::VocabSize { path, expected, found } => {
                write!(
                    f,
                    "{}: the vocabulary has {found} ids with its special ones, the config {expected}",
                    path.display()
                )
            }
            Self::Budget(refusal) => refusal.fmt(f),
            Self::Memory(source) => source.fmt(f),
            Self::Threads(source) => write!(f, "a thread could not be started: {source}"),
            Self::Pack(source) => source.fmt(f),
            Self::Read(source) => source.fmt(f),
            Self::Forward(source) => source.fmt(f),
            Self::Stopped => f.write_str("stopped"),
            Self::Order => f.write_str("weights were asked for out of order: this is a bug"),
        }
    }
}

impl std::error::Error for Error {}

impl From<ReadError> for Error {
    fn from(source: ReadError) -> Self {
        match source.fault {
            ReadFault::Stopped => Self::Stopped,
            _ => Self::Read(source),
        }
    }
}

impl Error {
    /// A file that could not be opened, or of which the system will not say what is asked.
    pub(crate) fn open(path: &Path, source: io::Error) -> Self {
        match GaveUp::of(&source) {
            Some(GaveUp::Stopped) => Self::Stopped,
            _ => Self::Open { path: path.to_owned(), source },
        }
    }
}

impl From<AllocError> for Error {
    fn from(source: AllocError) -> Self {
        Self::Memory(source)
    }
}

impl From<Refusal> for Error {
    fn from(source: Refusal) -> Self {
        Self::Budget(Box::new(source))
    }
}

impl From<ForwardError<Self>> for Error {
    fn from(error: ForwardError<Self>) -> Self {
        match error.split() {
            Ok(rest) => Self::Forward(Box::new(rest)),
            Err(inner) => inner,
        }
    }
}
