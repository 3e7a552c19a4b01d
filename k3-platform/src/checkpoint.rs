//! A checkpoint directory in the released form, opened.

use crate::error::Error;
use crate::experts;
use crate::index::Index;
use crate::io::{Changed, FileSet, PATIENCE, ReadAt, Source as Opener, open_limit, read_exact_at};
use crate::pack::Pack;
use crate::plan::{Plan, Request, Sizes, plan};
use crate::segment::{Form, Piece, Place, Segment, Source};
use crate::walk::Walk;
use k3_core::checkpoint::{GlobalTensor, Tensor, head_tensors, layer_bytes, layer_tensors};
use k3_core::config::ModelConfig;
use k3_core::view::TokenId;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// `config.json` and the like are not larger than this (bytes). The released ones have a few thousand.
pub(crate) const SMALL_FILE: u64 = 1 << 20;

/// A directory whose config, index and shard headers agree with each other and with the files.
pub struct Checkpoint {
    dir: PathBuf,
    config: ModelConfig,
    /// XXH3 of `config.json`.
    config_digest: u128,
    index: Index,
    opener: Arc<dyn Opener>,
    walk: Arc<[Vec<Source>]>,
    pack: Option<Arc<Pack>>,
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
    let failed = |source| Error::open(path, source);
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
        let config_digest = xxhash_rust::xxh3::xxh3_128(&bytes);
        let config = ModelConfig::parse(&bytes).map_err(|e| Error::Config { path, source: Box::new(e) })?;
        let index = Index::open(dir, &*opener, &config)?;
        let walk = walk(&config, &index).into();
        let expert_bytes = experts::slot_bytes(&config, |t| index.place(t, &config));
        let dir = dir.to_owned();
        let patience = PATIENCE;
        Ok(Self { dir, config, config_digest, index, opener, walk, pack: None, expert_bytes, patience })
    }

    /// Reads the trunk from a pack from now on.
    ///
    /// # Errors
    /// [`Error::Pack`] if the file is no pack, is damaged, or was made of another model.
    pub fn use_pack(&mut self, path: &Path) -> Result<(), Error> {
        let pack = Pack::open(path, &*self.opener)?;
        pack.matches(self)?;
        self.pack = Some(Arc::new(pack));
        Ok(())
    }

    /// The pack that the trunk is read from.
    #[must_use]
    pub fn pack(&self) -> Option<&Pack> {
        self.pack.as_deref()
    }

    /// XXH3 of `config.json` as it is in the directory.
    pub(crate) const fn config_digest(&self) -> u128 {
        self.config_digest
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

    /// The tensors of each layer in walk order, and of the head in the last entry, in the shards.
    pub(crate) fn shard_walk(&self) -> &[Vec<Source>] {
        &self.walk
    }

    /// What a pass reads.
    #[must_use]
    pub fn walk(&self) -> Walk {
        match &self.pack {
            Some(pack) => Walk::Packed(Arc::clone(pack), self.pack_number()),
            None => Walk::Shards(Arc::clone(&self.walk)),
        }
    }

    /// The number of the pack in the set of files: behind the shards.
    pub(crate) fn pack_number(&self) -> u16 {
        // An index has fewer than 65,000 shards.
        u16::try_from(self.index.shards().len()).unwrap_or(u16::MAX)
    }

    /// The embedding table in the shards.
    pub(crate) fn embedding(&self) -> Source {
        source(&self.config, &self.index, Tensor::Global(GlobalTensor::Embed), false)
    }

    /// The files a pass streams, by their numbers in [`Checkpoint::files`], and their lengths (bytes).
    pub(crate) fn streamed(&self) -> Vec<(u16, u64)> {
        match &self.pack {
            Some(pack) => vec![(self.pack_number(), pack.file_len())],
            None => (0..).zip(self.index.shards().iter().map(|s| s.len)).collect(),
        }
    }

    /// Bytes of buffer that any expert fits.
    #[must_use]
    pub const fn expert_bytes(&self) -> usize {
        self.expert_bytes
    }

    /// A set of its shards, numbered as in the index, and of the pack behind them. One that is no longer
    /// the file whose header was read is refused when it is read from.
    #[must_use]
    pub fn files(&self) -> FileSet {
        self.files_with(self.pack())
    }

    /// The same with another pack behind the shards.
    pub(crate) fn files_and(&self, pack: &Pack) -> FileSet {
        self.files_with(Some(pack))
    }

    fn files_with(&self, pack: Option<&Pack>) -> FileSet {
        let shards = self.index.shards().iter().map(|s| (self.dir.join(&s.name), s.stamp));
        let pack = pack.map(|p| (p.path().to_owned(), p.stamp()));
        let files = shards.chain(pack).collect();
        FileSet::with_stamps(Arc::clone(&self.opener), files, open_limit()).with_patience(self.patience)
    }

    /// A shard of which little is read before there is a plan, if it is still the file whose header was read.
    pub(crate) fn shard(&self, number: u16) -> Result<Arc<dyn ReadAt>, Error> {
        let shard = self.index.shards().get(usize::from(number)).ok_or(Error::Order)?;
        let path = self.dir.join(&shard.name);
        let failed = |source| Error::open(&path, source);
        let file = self.opener.open_cached(&path).map_err(failed)?;
        let (was, now) = (shard.len, file.len().map_err(failed)?);
        let same = shard.stamp.zip(file.stamp()).is_none_or(|(was, now)| was.same_bytes(&now));
        if was != now || !same {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, Changed { was, now })));
        }
        Ok(file)
    }

    /// Bytes of weights that a generated token is multiplied with: of the trunk with its head, and of
    /// routed experts.
    #[must_use]
    pub fn multiplied(&self) -> (u64, u64) {
        let config = self.config();
        let head = Tensor::Global(GlobalTensor::LmHead).spec(config).bytes();
        let trunk = config.layers().map(|l| layer_bytes(config, l)).sum::<u64>() + head;
        let experts = (config.num_moe_layers() * config.num_experts_per_token) as u64;
        let weights = 3 * (config.routed_expert_hidden_size * config.moe_intermediate_size) as u64;
        // Two codes in a byte, and a scale for each group of 32.
        (trunk, experts.saturating_mul(weights / 2 + weights / 32))
    }

    /// How long a read may bring nothing before whoever waits for it gives up.
    #[must_use]
    pub const fn patience(&self) -> Duration {
        self.patience
    }

    /// Says how long a read may bring nothing before a pass gives up; [`PATIENCE`] if nobody says.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// What to read for a row of the embedding: one piece, which has the row.
    #[must_use]
    pub fn embedding_row(&self, id: TokenId) -> Segment {
        if let Some(pack) = &self.pack {
            return pack.embedding_row(id, self.pack_number());
        }
        let Place { shard, offset } = self.index.place(Tensor::Global(GlobalTensor::Embed), &self.config);
        let row = self.config.hidden_size * 2;
        let place = Place { shard, offset: offset + u64::from(id.0) * row as u64 };
        let tensor = Tensor::Global(GlobalTensor::Embed);
        Segment::gather(vec![Piece { tensor, first_row: id.get(), rows: 1, place, len: row, at: 0, form: Form::Raw }])
    }

    /// Makes the memory plan for a request. `tokenizer` is what the caller's tokenizer holds (bytes).
    ///
    /// # Errors
    /// [`Error::Budget`] if the budget cannot hold it.
    pub fn plan(&self, request: &Request, tokenizer: u64) -> Result<Plan, Error> {
        self.plan_for(&self.walk(), request, tokenizer)
    }

    /// The plan there would be without the pack.
    ///
    /// # Errors
    /// [`Error::Budget`] if the budget cannot hold it.
    pub fn plan_of_shards(&self, request: &Request, tokenizer: u64) -> Result<Plan, Error> {
        self.plan_for(&Walk::Shards(Arc::clone(&self.walk)), request, tokenizer)
    }

    fn plan_for(&self, walk_read: &Walk, request: &Request, tokenizer: u64) -> Result<Plan, Error> {
        let walk: usize = self.walk.iter().map(|w| w.len() * size_of::<Source>()).sum();
        let table = if let Walk::Packed(pack, _) = walk_read { pack.bytes() } else { 0 };
        let index = self.index.bytes() + 3 * walk as u64 + table;
        let sizes = Sizes { config: &self.config, walk: walk_read, expert: self.expert_bytes, index, tokenizer };
        Ok(plan(&sizes, request)?)
    }
}

fn source(config: &ModelConfig, index: &Index, tensor: Tensor, vector: bool) -> Source {
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
}

fn walk(config: &ModelConfig, index: &Index) -> Vec<Vec<Source>> {
    let of_layer = |l| {
        let tensors = layer_tensors(config, l);
        tensors.map(|t| source(config, index, Tensor::Layer(l, t), t.is_vector())).collect::<Vec<_>>()
    };
    let head = head_tensors().map(|t| source(config, index, Tensor::Global(t), t != GlobalTensor::LmHead)).collect();
    config.layers().map(of_layer).chain([head]).collect()
}
