//! A checkpoint directory in the released form, opened.

use crate::error::Error;
use crate::experts;
use crate::index::Index;
use crate::io::{FileSet, PATIENCE, Source as Opener, open_limit, read_exact_at};
use crate::plan::{Plan, Request, Sizes, plan};
use crate::segment::{Place, Source};
use k3_core::checkpoint::{GlobalTensor, Tensor, head_tensors, layer_tensors};
use k3_core::config::ModelConfig;
use k3_core::view::TokenId;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// `config.json` and the like are not larger than this (bytes). The released ones have a few thousand.
pub(crate) const SMALL_FILE: u64 = 1 << 20;

/// A directory whose config, index and shard headers agree with each other and with the files.
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    index: Index,
    opener: Arc<dyn Opener>,
    walk: Vec<Vec<Source>>,
    expert_bytes: usize,
    patience: Duration,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint").field("dir", &self.dir).finish_non_exhaustive()
    }
}

/// Reads a file of at most `most` bytes whole. Its length is a claim that costs memory outside any
/// plan, so it is held against what such a file can need before there is a buffer.
///
/// # Errors
/// [`Error::TooLong`], [`Error::Open`] and [`Error::Read`].
pub fn read_small(opener: &dyn Opener, path: &Path, most: u64) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let file = opener.open_cached(path).map_err(failed)?;
    let len = file.len().map_err(failed)?;
    if len > most {
        return Err(Error::TooLong { path: path.to_owned(), what: "the file", len, most });
    }
    let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
    read_exact_at(&*file, &mut bytes, 0)?;
    Ok(bytes)
}

impl Checkpoint {
    /// Opens `dir`. Everything that can be wrong with the files' structure is found here, before
    /// anything large is allocated.
    ///
    /// # Errors
    /// [`Error`] naming the file and what is wrong with it.
    pub fn open(dir: &Path, opener: Arc<dyn Opener>) -> Result<Self, Error> {
        let path = dir.join("config.json");
        let bytes = read_small(&*opener, &path, SMALL_FILE)?;
        let config = ModelConfig::parse(&bytes).map_err(|e| Error::Config { path, source: Box::new(e) })?;
        let index = Index::open(dir, &*opener, &config)?;
        let walk = walk(&config, &index);
        let expert_bytes = experts::slot_bytes(&config, |t| index.place(t, &config));
        Ok(Self { dir: dir.to_owned(), config, index, opener, walk, expert_bytes, patience: PATIENCE })
    }

    /// The model's dimensions.
    #[must_use]
    pub const fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where each tensor lies.
    #[must_use]
    pub const fn index(&self) -> &Index {
        &self.index
    }

    /// What opens its files.
    #[must_use]
    pub fn opener(&self) -> &Arc<dyn Opener> {
        &self.opener
    }

    /// The tensors of each layer in walk order, and of the head in the last entry.
    pub(crate) fn walk(&self) -> &[Vec<Source>] {
        &self.walk
    }

    /// Bytes of buffer that any expert fits.
    #[must_use]
    pub const fn expert_bytes(&self) -> usize {
        self.expert_bytes
    }

    /// A set of its shards, numbered as in the index. One that is no longer the file whose header was
    /// read is refused when it is read from.
    #[must_use]
    pub fn files(&self) -> FileSet {
        let files = self.index.shards().iter().map(|s| (self.dir.join(&s.name), s.stamp)).collect();
        FileSet::with_stamps(Arc::clone(&self.opener), files, open_limit()).with_patience(self.patience)
    }

    /// Says how long a read may bring nothing before a pass gives up; [`PATIENCE`] if nobody says.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// Where a row of the embedding lies, and how many bytes it has.
    #[must_use]
    pub fn embedding_row(&self, id: TokenId) -> (Place, usize) {
        let Place { shard, offset } = self.index.place(Tensor::Global(GlobalTensor::Embed), &self.config);
        let row = self.config.hidden_size * 2;
        (Place { shard, offset: offset + u64::from(id.0) * row as u64 }, row)
    }

    /// Makes the memory plan for a request. `tokenizer` is what the caller's tokenizer holds (bytes).
    ///
    /// # Errors
    /// [`Error::Budget`] if the budget cannot hold it.
    pub fn plan(&self, request: &Request, tokenizer: u64) -> Result<Plan, Error> {
        let walk: usize = self.walk.iter().map(|w| w.len() * size_of::<Source>()).sum();
        let index = self.index.bytes() + 3 * walk as u64;
        let sizes = Sizes { config: &self.config, walk: &self.walk, expert: self.expert_bytes, index, tokenizer };
        Ok(plan(&sizes, request)?)
    }
}

fn walk(config: &ModelConfig, index: &Index) -> Vec<Vec<Source>> {
    let source = |tensor: Tensor, vector: bool| {
        let spec = tensor.spec(config);
        let place = index.place(tensor, config);
        let whole = index.stored_bytes(tensor, config);
        if vector {
            Source { tensor, place, rows: 1, granule: 1, row_bytes: whole }
        } else {
            let granule = tensor.row_granule(config);
            let rows = usize::try_from(spec.rows()).unwrap_or(usize::MAX);
            Source { tensor, place, rows, granule, row_bytes: whole / rows.max(1) }
        }
    };
    let layers = config
        .layers()
        .map(|l| layer_tensors(config, l).map(|t| source(Tensor::Layer(l, t), t.is_vector())).collect::<Vec<_>>());
    let head = head_tensors().map(|t| source(Tensor::Global(t), t != GlobalTensor::LmHead)).collect();
    layers.chain([head]).collect()
}
