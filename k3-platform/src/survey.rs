//! Everything that can be said of a checkpoint's directory without reading its weights.
//!
//! [`Checkpoint::open`](crate::checkpoint::Checkpoint::open) stops at the first fault, for a run can do
//! no more. Whoever has to mend a download wants all of them at once.

use crate::checkpoint::{SMALL_FILE, read_small};
use crate::error::Error;
use crate::index::Index;
use crate::io::Source;
use crate::vocabulary::VocabularyFiles;
use k3_core::config::ModelConfig;
use std::fs;
use std::path::{Path, PathBuf};

/// Endings of files that programs leave beside what they have not finished downloading.
const UNFINISHED: [&str; 6] = ["aria2", "incomplete", "part", "partial", "crdownload", "!qB"];

/// A shard takes this share of its length on the disk, or it has holes (per cent). Compressing file
/// systems gain little on weights.
const WHOLE: u64 = 95;

/// A shard that is shorter on the disk than it says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sparse {
    /// The file.
    pub path: PathBuf,
    /// Its length (bytes).
    pub len: u64,
    /// What it takes on the disk (bytes).
    pub on_disk: u64,
}

/// What was found in a directory.
#[derive(Debug, Default)]
pub struct Survey {
    /// The config, if it is accepted.
    pub config: Option<ModelConfig>,
    /// The index, if it can be read. Shards that are at fault have a length of zero in it.
    pub index: Option<Index>,
    /// All that a run would be refused for.
    pub faults: Vec<Error>,
    /// Shards that lie there and are not in the index, if it can be read. They are not read: the index decides.
    pub strays: Vec<PathBuf>,
    /// What an unfinished download leaves.
    pub unfinished: Vec<PathBuf>,
    /// Shards with holes: places that nobody has written to.
    pub sparse: Vec<Sparse>,
}

impl Survey {
    /// Looks at a directory.
    #[must_use]
    pub fn of(dir: &Path, source: &dyn Source) -> Self {
        let mut this = Self::default();
        this.look_around(dir);
        let path = dir.join("config.json");
        let config = read_small(source, &path, SMALL_FILE)
            .and_then(|bytes| ModelConfig::parse(&bytes).map_err(|e| Error::Config { path, source: Box::new(e) }));
        let config = match config {
            Ok(config) => config,
            Err(fault) => {
                // A directory that is not there has no config, but that is not what is wrong with it.
                this.faults.push(match (fault, fs::metadata(dir)) {
                    (Error::Open { .. }, Err(source)) => Error::Open { path: dir.to_owned(), source },
                    (Error::Open { .. }, Ok(meta)) if !meta.is_dir() => {
                        Error::Open { path: dir.to_owned(), source: std::io::ErrorKind::NotADirectory.into() }
                    }
                    (fault, _) => fault,
                });
                this.strays.clear();
                return this;
            }
        };
        this.config = Some(config);
        match Index::examine(dir, source, &config) {
            Ok((index, faults)) => {
                this.faults.extend(faults);
                this.holes(dir, &index);
                let named = |path: &PathBuf| index.shards().iter().any(|s| path.file_name() == Some(s.name.as_ref()));
                this.strays.retain(|path| !named(path));
                this.index = Some(index);
            }
            Err(fault) => {
                this.faults.push(fault);
                // Nothing says which shards are named.
                this.strays.clear();
            }
        }
        let vocabulary = VocabularyFiles::read(dir, source, Some(config.vocab_size));
        if let Err(fault) = vocabulary.and_then(|mut files| files.load().map(|_| ())) {
            this.faults.push(fault);
        }
        this
    }

    fn look_around(&mut self, dir: &Path) {
        // Where a well-known client keeps what it has not finished.
        for folder in [dir.to_owned(), dir.join(".cache/huggingface/download")] {
            let Ok(entries) = fs::read_dir(&folder) else { continue };
            for path in entries.filter_map(|e| Some(e.ok()?.path())) {
                let Some(ending) = path.extension().and_then(|e| e.to_str()) else { continue };
                let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
                if UNFINISHED.contains(&ending) && path.is_file() {
                    self.unfinished.push(path);
                } else if ending == "safetensors" && folder == *dir && !hidden && path.is_file() {
                    self.strays.push(path);
                }
            }
        }
        self.unfinished.sort();
        self.strays.sort();
    }

    fn holes(&mut self, dir: &Path, index: &Index) {
        use std::os::unix::fs::MetadataExt as _;
        for shard in index.shards() {
            let path = dir.join(&shard.name);
            let Ok(meta) = fs::metadata(&path) else { continue };
            let (len, on_disk) = (meta.len(), meta.blocks().saturating_mul(512));
            // A few blocks of a small file say nothing.
            if len > 1 << 20 && on_disk < len / 100 * WHOLE {
                self.sparse.push(Sparse { path, len, on_disk });
            }
        }
    }
}
