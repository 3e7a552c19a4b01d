//! A sequence that survives the process: what the model remembers of it, and its ids.
//!
//! The next run reads only what is new. What it may reuse is decided by ids: the longest common beginning
//! of the ids in the file and those it is given. The latent cache can be cut anywhere. The KDA state cannot
//! be rewound, so the file holds it at several positions, and a run resumes from the last one that lies
//! within the common beginning.
//!
//! # The file
//!
//! Everything is little-endian; a NaN is written as `7fc00000`. Sizes follow from the header, there are no
//! offsets, and the parts follow each other without gaps:
//!
//! ```text
//! header   128 bytes, below
//! states   n times: KDA matrices [kda layers, heads, key, value], then convolution history
//!          [kda layers, 3, kernel - 1, width], f32. Of one position each; the order is in the table
//! ids      u32 each
//! latents  [mla layers, positions, kv_lora_rank + qk_rope_head_dim], f32
//! table    n times: u64 position of the state, u64 checksum of the state
//!
//! at  header
//!   0  magic "k3sess\r\n"
//!   8  u32 version = 1          12  u32 bytes of the header = 128
//!  16  u64 digest of the config 24  u64 digest of some of the weights
//!  32  u64 f32s of the KDA matrices of a state
//!  40  u64 f32s of the history of a state
//!  48  u64 mla layers           56  u64 f32s of a latent
//!  64  u64 ids                  72  u64 positions of the latents
//!  80  u64 states               88  u64 bytes of the file
//!  96  u64 checksum of the ids 104  u64 checksum of the latents
//! 112  u64 checksum of the table
//! 120  u64 checksum of the 120 bytes before
//! ```
//!
//! Checksums and digests are [`Checksum`]s. Which part may be trusted when: the header after its checksum,
//! its own sizes and the digests agree; ids and table after theirs; a state and the latents only when they
//! are read, before a pass is run on them. A state at position `p` belongs to the first `p` ids.
//!
//! # Writing
//!
//! A run writes a new file beside the old one (`NAME.new`, a name that it gets last where the file system has
//! files without one), syncs it, and renames it over the old one: until then the old one is whole, and if
//! anything fails it stays. States go to the new file at the moment they
//! are reached, through one buffer of a megabyte: no second copy of a state is ever in memory. A lock on
//! `NAME.lock` keeps two runs from one session.
//!
//! What was said is nobody else's business: a session that is begun can be read by its owner only. One that is
//! replaced keeps the permissions that it has got since.

use crate::checkpoint::Checkpoint;
use crate::checksum::Checksum;
use crate::engine::Engine;
use crate::error::Error;
use crate::io::{give_name, read_exact_at, take_after, unnamed};
use crate::lock;
use k3_core::checkpoint::{GlobalTensor, Tensor};
use k3_core::config::ModelConfig;
use k3_core::math::canonical_bits;
use k3_core::model::StateParts;
use k3_core::view::TokenId;
use std::fs::{File, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"k3sess\r\n";
const VERSION: u32 = 1;
const HEADER: usize = 128;

/// Bytes of the buffer that everything passes through.
const BUFFER: usize = 1 << 20;

/// Bytes that an open session holds in memory besides its ids.
pub const BUFFER_BYTES: u64 = BUFFER as u64;

/// Most states a file holds besides the last one, whatever their size.
pub const MOST_STATES: usize = 64;

/// Permissions of a session that is begun.
const PRIVATE: u32 = 0o600;

/// Most ids a file may claim to hold.
const MOST_IDS: u64 = 1 << 26;

/// Positions between two states that are kept on the way.
pub const SPACING: usize = 256;

/// Why a session cannot be used.
#[derive(Debug)]
#[non_exhaustive]
pub enum SessionError {
    /// Another run has it.
    Locked {
        /// The session.
        path: PathBuf,
    },
    /// It is not a file that could be a session's.
    NotAFile {
        /// The session.
        path: PathBuf,
    },
    /// No file can be written there.
    Place {
        /// The file that was tried.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It cannot be opened or read.
    Read {
        /// The session.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It cannot be written. The old file is as it was.
    Write {
        /// The file that was being written.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It does not begin as a session does.
    NotASession {
        /// The session.
        path: PathBuf,
    },
    /// Another version of this program wrote it.
    Version {
        /// The session.
        path: PathBuf,
        /// The version of its form.
        found: u32,
    },
    /// It is of a model with another config or other weights.
    OtherModel {
        /// The session.
        path: PathBuf,
        /// What differs: `"config"` or `"weights"`.
        what: &'static str,
    },
    /// A length or a checksum is not what it should be.
    Damaged {
        /// The session.
        path: PathBuf,
        /// The part of the file.
        what: &'static str,
    },
    /// The engine's part.
    Engine(Error),
}

impl std::fmt::Display for SessionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Locked { path } => write!(f, "{}: another run uses this session", path.display()),
            Self::NotAFile { path } => write!(f, "{}: not a regular file", path.display()),
            Self::Place { path, source } | Self::Read { path, source } => write!(f, "{}: {source}", path.display()),
            Self::Write { path, source } => {
                write!(f, "{}: {source}; the session is as it was before", path.display())
            }
            Self::NotASession { path } => write!(f, "{}: this is not a session", path.display()),
            Self::Version { path, found } => {
                write!(f, "{}: a session of version {found}, this program knows version {VERSION}", path.display())
            }
            Self::OtherModel { path, what } => {
                write!(f, "{}: a session of another model: its {what} differ", path.display())
            }
            Self::Damaged { path, what } => write!(f, "{}: damaged: {what}", path.display()),
            Self::Engine(source) => source.fmt(f),
        }
    }
}

impl std::error::Error for SessionError {}

impl From<Error> for SessionError {
    fn from(source: Error) -> Self {
        Self::Engine(source)
    }
}

/// Which model a session is of, and the sizes that follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Model {
    config: u64,
    weights: u64,
    kda: u64,
    conv: u64,
    mla_layers: u64,
    latent: u64,
}

impl Model {
    fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let c = checkpoint.config();
        let width = c.kda_width() as u64;
        let layers = c.num_kda_layers() as u64;
        Ok(Self {
            config: config_digest(c),
            weights: weights_digest(checkpoint)?,
            kda: layers * width * c.kda_head_dim as u64,
            conv: layers * 3 * (c.conv_kernel_size as u64 - 1) * width,
            mla_layers: c.num_mla_layers() as u64,
            latent: c.latent_width() as u64,
        })
    }

    /// Bytes of a state.
    const fn state(&self) -> u64 {
        4 * (self.kda + self.conv)
    }
}

/// A digest of everything in a config that changes what the model computes or what ids mean.
fn config_digest(c: &ModelConfig) -> u64 {
    let mut sum = Checksum::default();
    for n in [
        c.vocab_size,
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.intermediate_size,
        c.q_lora_rank,
        c.kv_lora_rank,
        c.qk_nope_head_dim,
        c.qk_rope_head_dim,
        c.v_head_dim,
        c.first_k_dense_replace,
        c.num_experts,
        c.num_experts_per_token,
        c.num_shared_experts,
        c.moe_intermediate_size,
        c.routed_expert_hidden_size,
        c.attn_res_block_size,
        c.kda_num_heads,
        c.kda_head_dim,
        c.conv_kernel_size,
        usize::from(c.moe_renormalize),
    ] {
        sum.update(&(n as u64).to_le_bytes());
    }
    sum.update(&c.rms_norm_eps.to_bits().to_le_bytes());
    for x in [c.situ_beta, c.situ_linear_beta, c.routed_scaling_factor, c.gate_lower_bound] {
        sum.update(&x.to_bits().to_le_bytes());
    }
    for l in c.layers() {
        sum.update(&[u8::from(c.layer_map.is_mla(l))]);
    }
    sum.finish()
}

/// A digest of the three small tensors outside the layers: a model that was trained further has others.
fn weights_digest(checkpoint: &Checkpoint) -> Result<u64, Error> {
    let mut sum = Checksum::default();
    for tensor in [GlobalTensor::OutResNorm, GlobalTensor::OutResProj, GlobalTensor::FinalNorm] {
        let tensor = Tensor::Global(tensor);
        let place = checkpoint.index().place(tensor, checkpoint.config());
        let mut bytes = vec![0; checkpoint.index().stored_bytes(tensor, checkpoint.config())];
        read_exact_at(&*checkpoint.shard(place.shard)?, &mut bytes, place.offset)?;
        sum.update(&bytes);
    }
    Ok(sum.finish())
}

/// A state in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Kept {
    position: u64,
    checksum: u64,
}

/// A header that has been held against the file's length and its own checksum.
#[derive(Debug, Clone)]
struct Header {
    model: Model,
    ids: u64,
    positions: u64,
    states: u64,
    ids_sum: u64,
    latents_sum: u64,
    table_sum: u64,
}

impl Header {
    /// Bytes of a file with this header; `None` if that overflows.
    fn length(&self) -> Option<u64> {
        let m = &self.model;
        let latents = m.mla_layers.checked_mul(self.positions)?.checked_mul(m.latent)?.checked_mul(4)?;
        let state = m.kda.checked_add(m.conv)?.checked_mul(4)?;
        (HEADER as u64)
            .checked_add(self.states.checked_mul(state)?)?
            .checked_add(self.ids.checked_mul(4)?)?
            .checked_add(latents)?
            .checked_add(self.states.checked_mul(16)?)
    }

    fn ids_at(&self) -> u64 {
        HEADER as u64 + self.states * self.model.state()
    }

    fn latents_at(&self) -> u64 {
        self.ids_at() + 4 * self.ids
    }

    fn table_at(&self) -> u64 {
        self.latents_at() + 4 * self.model.mla_layers * self.positions * self.model.latent
    }

    fn write(&self) -> [u8; HEADER] {
        let m = &self.model;
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&128u32.to_le_bytes());
        let numbers = [
            m.config,
            m.weights,
            m.kda,
            m.conv,
            m.mla_layers,
            m.latent,
            self.ids,
            self.positions,
            self.states,
            self.length().unwrap_or(u64::MAX),
            self.ids_sum,
            self.latents_sum,
            self.table_sum,
        ];
        for (place, n) in bytes[16..120].as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
            *place = n.to_le_bytes();
        }
        let sum = Checksum::of(&bytes[..120]);
        bytes[120..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn read(bytes: &[u8; HEADER], len: u64, path: &Path) -> Result<Self, SessionError> {
        let damaged = |what| SessionError::Damaged { path: path.to_owned(), what };
        let at = |i: usize| bytes[i..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
        if &bytes[..8] != MAGIC {
            return Err(SessionError::NotASession { path: path.to_owned() });
        }
        let version = bytes[8..].first_chunk::<4>().map_or(0, |b| u32::from_le_bytes(*b));
        if version != VERSION {
            return Err(SessionError::Version { path: path.to_owned(), found: version });
        }
        if Checksum::of(&bytes[..120]) != at(120) || bytes[12..16] != 128u32.to_le_bytes() {
            return Err(damaged("the header's checksum"));
        }
        let model =
            Model { config: at(16), weights: at(24), kda: at(32), conv: at(40), mla_layers: at(48), latent: at(56) };
        let header = Self {
            model,
            ids: at(64),
            positions: at(72),
            states: at(80),
            ids_sum: at(96),
            latents_sum: at(104),
            table_sum: at(112),
        };
        if header.length() != Some(len) || at(88) != len || header.ids > MOST_IDS || header.positions > header.ids {
            return Err(damaged("its length"));
        }
        Ok(header)
    }
}

/// A lock that goes away with the process. The file goes, too, unless somebody waits with it.
#[derive(Debug)]
struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    fn take(session: &Path) -> Result<Self, SessionError> {
        let path = suffixed(session, ".lock");
        let failed = |source| SessionError::Place { path: path.clone(), source };
        match lock::open(&path).map_err(failed)? {
            (file, Ok(())) => Ok(Self { file, path }),
            (_, Err(TryLockError::WouldBlock)) => Err(SessionError::Locked { path: session.to_owned() }),
            (_, Err(TryLockError::Error(source))) => Err(failed(source)),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While it is locked, so that nobody can be holding what is removed.
        let _ = std::fs::remove_file(&self.path);
        let _ = self.file.unlock();
    }
}

fn suffixed(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// An old file, open.
#[derive(Debug)]
struct Old {
    file: File,
    header: Header,
    ids: Vec<TokenId>,
    states: Vec<Kept>,
}

/// A new file, being written.
#[derive(Debug)]
struct New {
    file: File,
    path: PathBuf,
    /// Whether it is there already, under this path.
    named: bool,
    states: Vec<Kept>,
    /// Whether it took the old one's place.
    done: bool,
}

impl Drop for New {
    fn drop(&mut self) {
        if self.named && !self.done {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A session file, locked.
#[derive(Debug)]
pub struct Session {
    path: PathBuf,
    model: Model,
    /// States the new file may hold besides the last one.
    most: usize,
    old: Option<Old>,
    new: Option<New>,
    buffer: Vec<u8>,
    _lock: Lock,
}

impl Session {
    /// Opens the session of this model at `path`, or begins one if there is no such file. States on the way
    /// take at most `checkpoints` bytes of the file.
    ///
    /// # Errors
    /// [`SessionError`]; nothing was written then.
    pub fn open(path: &Path, checkpoint: &Checkpoint, checkpoints: u64) -> Result<Self, SessionError> {
        // A rename would replace a link, and not what it leads to.
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let model = Model::of(checkpoint)?;
        let most = usize::try_from(checkpoints.checked_div(model.state()).unwrap_or(0)).unwrap_or(usize::MAX);
        if std::fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            return Err(SessionError::NotAFile { path });
        }
        let lock = Lock::take(&path)?;
        let failed = |source| SessionError::Read { path: path.clone(), source };
        let old = match std::fs::metadata(&path) {
            Ok(_) => Some(Old::open(&path, &model)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(error)),
        };
        let most = most.min(MOST_STATES);
        Ok(Self { path, model, most, old, new: None, buffer: vec![0; BUFFER], _lock: lock })
    }

    /// The ids of the session as it was opened.
    #[must_use]
    pub fn ids(&self) -> &[TokenId] {
        self.old.as_ref().map_or(&[], |old| &old.ids)
    }

    /// Where a run of `ids` can resume: the position of the last state within the common beginning of these
    /// ids and the session's that leaves at least one id to read. 0 is the beginning.
    #[must_use]
    pub fn resumes_at(&self, ids: &[TokenId]) -> usize {
        let Some(old) = &self.old else { return 0 };
        let most = common(&old.ids, ids).min(ids.len().saturating_sub(1)) as u64;
        let at = old.states.iter().map(|s| s.position).filter(|&p| p <= most).max().unwrap_or(0);
        usize::try_from(at).unwrap_or(0)
    }

    /// Puts into the engine what it can resume `ids` from, and begins the new file with the states that
    /// stay true. The engine's position afterwards is [`Session::resumes_at`].
    ///
    /// # Errors
    /// [`SessionError`]; the session is as it was, and the engine's sequence is empty.
    pub fn resume(&mut self, engine: &mut Engine, ids: &[TokenId]) -> Result<(), SessionError> {
        let at = self.resumes_at(ids);
        engine.reset()?;
        self.begin(ids)?;
        match &self.old {
            Some(old) if at > 0 => engine.restore(at, |parts| old.load(at as u64, parts, &mut self.buffer, &self.path)),
            _ => Ok(()),
        }
    }

    /// Begins the new file, for ids that start with some of the old one's.
    fn begin(&mut self, ids: &[TokenId]) -> Result<(), SessionError> {
        self.new = None;
        let path = suffixed(&self.path, ".new");
        let failed = |source| SessionError::Write { path: path.clone(), source };
        // What a killed run left there is nobody's.
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let (file, named) = match unnamed(&path, PRIVATE).map_err(failed)? {
            Some(file) => (file, false),
            None => {
                let mut options = File::options();
                options.create_new(true).read(true).write(true).mode(PRIVATE);
                (options.open(&path).map_err(failed)?, true)
            }
        };
        let mut new = New { file, path: path.clone(), named, states: Vec::new(), done: false };
        if let Some(old) = &self.old {
            let kept = common(&old.ids, ids) as u64;
            let mut stay: Vec<usize> = (0..old.states.len()).filter(|&i| old.states[i].position <= kept).collect();
            stay.sort_by_key(|&i| old.states[i].position);
            while stay.len() > self.most {
                let positions: Vec<u64> = stay.iter().map(|&i| old.states[i].position).collect();
                stay.remove(least_worth(&positions, old.header.ids));
            }
            for i in stay {
                old.copy_state(i, &mut new, &mut self.buffer, &self.path)?;
            }
        }
        self.new = Some(new);
        Ok(())
    }

    /// Keeps the engine's state if it is [`SPACING`] positions after the last one that was kept, or if
    /// `anyway`: at the end of a turn, say.
    ///
    /// # Errors
    /// [`SessionError::Write`]; the session is as it was, and nothing more will be written.
    pub fn checkpoint(&mut self, engine: &mut Engine, anyway: bool) -> Result<(), SessionError> {
        let position = engine.position() as u64;
        let Some(new) = &mut self.new else { return Ok(()) };
        let last = new.states.iter().map(|s| s.position).max().unwrap_or(0);
        let far = position >= last + if anyway { 1 } else { SPACING as u64 };
        if self.most == 0 || !far || engine.is_torn() {
            return Ok(());
        }
        let slot = if new.states.len() < self.most {
            new.states.len()
        } else {
            let mut order: Vec<usize> = (0..new.states.len()).collect();
            order.sort_by_key(|&i| new.states[i].position);
            let positions: Vec<u64> = order.iter().map(|&i| new.states[i].position).collect();
            order[least_worth(&positions, position)]
        };
        let written = new.put_state(slot, position, engine, &self.model, &mut self.buffer);
        if written.is_err() {
            self.new = None;
        }
        written
    }

    /// Writes the session with these ids, of which the engine has read the first [`Engine::position`], and
    /// puts it in the old one's place.
    ///
    /// # Errors
    /// [`SessionError::Write`]; the session is as it was.
    pub fn save(&mut self, engine: &mut Engine, ids: &[TokenId]) -> Result<(), SessionError> {
        let Some(mut new) = self.new.take() else { return Ok(()) };
        let position = engine.position() as u64;
        // A pass that stopped half-way leaves nothing to write but what was kept before it.
        let whole = !engine.is_torn() && position > 0;
        if whole && !new.states.iter().any(|s| s.position == position) {
            let slot = new.states.len();
            new.put_state(slot, position, engine, &self.model, &mut self.buffer)?;
        }
        let positions = new.states.iter().map(|s| s.position).max().unwrap_or(0);
        new.finish(engine, ids, positions, &self.model, &mut self.buffer, &self.path)?;
        self.old = Some(Old::open(&self.path, &self.model)?);
        Ok(())
    }

    /// Saves, and goes on: for a dialogue, after each turn.
    ///
    /// # Errors
    /// [`SessionError`]; the session is the one that was saved last.
    pub fn save_and_go_on(&mut self, engine: &mut Engine, ids: &[TokenId]) -> Result<(), SessionError> {
        self.save(engine, ids)?;
        self.begin(ids)
    }
}

/// How many ids two sequences begin with alike.
fn common(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Which of these rising positions can be missed most easily by a sequence that ends at `end`: where the
/// gap it would leave is smallest for how far back it is. So states lie dense at the end, where texts are
/// edited, and thin at the beginning.
fn least_worth(positions: &[u64], end: u64) -> usize {
    let worth = |i: usize| {
        let before = i.checked_sub(1).map_or(0, |i| positions[i]);
        let after = positions.get(i + 1).copied().unwrap_or(end);
        // Compared as fractions gap / distance, without division.
        (u128::from(after - before), u128::from(end.saturating_sub(positions[i]) + 1))
    };
    (0..positions.len())
        .min_by(|&i, &j| {
            let ((gap, far), (other, further)) = (worth(i), worth(j));
            (gap * further).cmp(&(other * far))
        })
        .unwrap_or(0)
}

impl Old {
    fn open(path: &Path, model: &Model) -> Result<Self, SessionError> {
        let failed = |source| SessionError::Read { path: path.to_owned(), source };
        let damaged = |what| SessionError::Damaged { path: path.to_owned(), what };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let mut bytes = [0; HEADER];
        match file.read_exact_at(&mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(SessionError::NotASession { path: path.to_owned() });
            }
            other => other.map_err(failed)?,
        }
        let header = Header::read(&bytes, len, path)?;
        let other = |what| SessionError::OtherModel { path: path.to_owned(), what };
        if (Model { weights: model.weights, ..header.model }) != *model {
            return Err(other("config"));
        }
        if header.model.weights != model.weights {
            return Err(other("weights"));
        }
        if header.states > MOST_STATES as u64 + 1 {
            return Err(damaged("the number of states"));
        }
        // The file is as long as it says, so it really has as many ids.
        let mut bytes = vec![0; usize::try_from(4 * header.ids).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, header.ids_at()).map_err(failed)?;
        if Checksum::of(&bytes) != header.ids_sum {
            return Err(damaged("the checksum of the ids"));
        }
        let ids = bytes.as_chunks::<4>().0.iter().map(|b| TokenId(u32::from_le_bytes(*b))).collect();
        let mut bytes = vec![0; usize::try_from(16 * header.states).unwrap_or(usize::MAX)];
        file.read_exact_at(&mut bytes, header.table_at()).map_err(failed)?;
        if Checksum::of(&bytes) != header.table_sum {
            return Err(damaged("the checksum of the table"));
        }
        let entry =
            |pair: &[[u8; 8]; 2]| Kept { position: u64::from_le_bytes(pair[0]), checksum: u64::from_le_bytes(pair[1]) };
        let states: Vec<Kept> = bytes.as_chunks::<8>().0.as_chunks::<2>().0.iter().map(entry).collect();
        if states.iter().any(|s| s.position == 0 || s.position > header.positions) {
            return Err(damaged("a position in the table"));
        }
        Ok(Self { file, header, ids, states })
    }

    /// Copies a state to the end of those of a new file.
    fn copy_state(&self, i: usize, new: &mut New, buffer: &mut [u8], path: &Path) -> Result<(), SessionError> {
        let size = self.header.model.state();
        let (from, to) = (HEADER as u64 + i as u64 * size, HEADER as u64 + new.states.len() as u64 * size);
        let mut sum = Checksum::default();
        let mut done = 0;
        while done < size {
            let part = (size - done).min(buffer.len() as u64);
            let part = &mut buffer[..usize::try_from(part).unwrap_or(0)];
            let failed = |source| SessionError::Read { path: path.to_owned(), source };
            self.file.read_exact_at(part, from + done).map_err(failed)?;
            sum.update(part);
            new.write(part, to + done)?;
            done += part.len() as u64;
        }
        if sum.finish() != self.states[i].checksum {
            return Err(SessionError::Damaged { path: path.to_owned(), what: "the checksum of a state" });
        }
        new.states.push(self.states[i]);
        Ok(())
    }

    /// Reads the state at `position` and the latents up to there.
    fn load(
        &self,
        position: u64,
        parts: StateParts<&mut [f32]>,
        buffer: &mut [u8],
        path: &Path,
    ) -> Result<(), SessionError> {
        let damaged = |what| SessionError::Damaged { path: path.to_owned(), what };
        let StateParts { kda, conv, latent } = parts;
        let i = self.states.iter().position(|s| s.position == position).ok_or(damaged("the table"))?;
        let m = &self.header.model;
        let mut source =
            Source { file: &self.file, at: HEADER as u64 + i as u64 * m.state(), sum: Checksum::default(), path };
        source.floats(kda, buffer)?;
        source.floats(conv, buffer)?;
        if source.sum.finish() != self.states[i].checksum {
            return Err(damaged("the checksum of a state"));
        }
        let mut source = Source { file: &self.file, at: self.header.latents_at(), sum: Checksum::default(), path };
        let width = usize::try_from(m.latent).unwrap_or(0);
        let layers = usize::try_from(m.mla_layers).unwrap_or(0);
        let context = latent.len().checked_div(layers * width).unwrap_or(0);
        let (wanted, there) =
            (usize::try_from(position).unwrap_or(0), usize::try_from(self.header.positions).unwrap_or(0));
        for layer in 0..layers {
            let rows = &mut latent[layer * context * width..][..wanted * width];
            source.floats(rows, buffer)?;
            source.skip((there - wanted) as u64 * 4 * m.latent, buffer)?;
        }
        if source.sum.finish() != self.header.latents_sum {
            return Err(damaged("the checksum of the latents"));
        }
        Ok(())
    }
}

/// A part of an old file, read front to back.
struct Source<'f> {
    file: &'f File,
    at: u64,
    sum: Checksum,
    path: &'f Path,
}

impl Source<'_> {
    fn next<'b>(&mut self, most: u64, buffer: &'b mut [u8]) -> Result<&'b [u8], SessionError> {
        let len = usize::try_from(most.min(buffer.len() as u64)).unwrap_or(0);
        let part = &mut buffer[..len];
        let failed = |source| SessionError::Read { path: self.path.to_owned(), source };
        self.file.read_exact_at(part, self.at).map_err(failed)?;
        self.at += len as u64;
        self.sum.update(part);
        Ok(part)
    }

    fn floats(&mut self, out: &mut [f32], buffer: &mut [u8]) -> Result<(), SessionError> {
        let per = buffer.len() / 4;
        for block in out.chunks_mut(per) {
            let bytes = self.next(4 * block.len() as u64, buffer)?;
            for (x, b) in block.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*b);
            }
        }
        Ok(())
    }

    fn skip(&mut self, mut bytes: u64, buffer: &mut [u8]) -> Result<(), SessionError> {
        while bytes > 0 {
            bytes -= self.next(bytes, buffer)?.len() as u64;
        }
        Ok(())
    }
}

impl New {
    fn write(&self, bytes: &[u8], at: u64) -> Result<(), SessionError> {
        self.file.write_all_at(bytes, at).map_err(|source| SessionError::Write { path: self.path.clone(), source })
    }

    /// Writes floats through the buffer; gives where they end.
    fn floats(&self, x: &[f32], mut at: u64, sum: &mut Checksum, buffer: &mut [u8]) -> Result<u64, SessionError> {
        for block in x.chunks(buffer.len() / 4) {
            let bytes = &mut buffer[..4 * block.len()];
            for (b, &x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(block) {
                *b = canonical_bits(x).to_le_bytes();
            }
            sum.update(bytes);
            self.write(bytes, at)?;
            at += bytes.len() as u64;
        }
        Ok(at)
    }

    fn put_state(
        &mut self,
        slot: usize,
        position: u64,
        engine: &mut Engine,
        model: &Model,
        buffer: &mut [u8],
    ) -> Result<(), SessionError> {
        let state = engine.state()?;
        let parts = state.parts();
        let mut sum = Checksum::default();
        let at = self.floats(parts.kda, HEADER as u64 + slot as u64 * model.state(), &mut sum, buffer)?;
        self.floats(parts.conv, at, &mut sum, buffer)?;
        let kept = Kept { position, checksum: sum.finish() };
        match self.states.get_mut(slot) {
            Some(place) => *place = kept,
            None => self.states.push(kept),
        }
        Ok(())
    }

    /// Writes what comes behind the states and the header, and takes the old file's place.
    fn finish(
        &mut self,
        engine: &mut Engine,
        ids: &[TokenId],
        positions: u64,
        model: &Model,
        buffer: &mut [u8],
        path: &Path,
    ) -> Result<(), SessionError> {
        let failed = |source| SessionError::Write { path: self.path.clone(), source };
        let mut header = Header {
            model: *model,
            ids: ids.len() as u64,
            positions,
            states: self.states.len() as u64,
            ids_sum: 0,
            latents_sum: 0,
            table_sum: 0,
        };
        let mut sum = Checksum::default();
        let mut at = header.ids_at();
        for block in ids.chunks(buffer.len() / 4) {
            let bytes = &mut buffer[..4 * block.len()];
            for (b, id) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(block) {
                *b = id.0.to_le_bytes();
            }
            sum.update(bytes);
            self.write(bytes, at)?;
            at += bytes.len() as u64;
        }
        header.ids_sum = sum.finish();
        let mut sum = Checksum::default();
        {
            let state = engine.state()?;
            let latent = state.parts().latent;
            let width = usize::try_from(model.latent).unwrap_or(0);
            let layers = usize::try_from(model.mla_layers).unwrap_or(0);
            let context = latent.len().checked_div(layers * width).unwrap_or(0);
            let rows = usize::try_from(positions).unwrap_or(0);
            for layer in 0..layers {
                at = self.floats(&latent[layer * context * width..][..rows * width], at, &mut sum, buffer)?;
            }
        }
        header.latents_sum = sum.finish();
        let mut table = Vec::with_capacity(16 * self.states.len());
        for state in &self.states {
            table.extend_from_slice(&state.position.to_le_bytes());
            table.extend_from_slice(&state.checksum.to_le_bytes());
        }
        header.table_sum = Checksum::of(&table);
        self.write(&table, at)?;
        // Last: what is not complete does not begin as a session does.
        self.write(&header.write(), 0)?;
        (&self.file).flush().and_then(|()| self.file.sync_all()).map_err(failed)?;
        // As they are now, and not as they were when this run began.
        if let Ok(old) = std::fs::metadata(path) {
            take_after(&self.file, &old).map_err(failed)?;
        }
        if !self.named {
            give_name(&self.file, &self.path).map_err(failed)?;
            self.named = true;
        }
        std::fs::rename(&self.path, path).map_err(failed)?;
        self.done = true;
        // The rename itself survives a crash only if the folder is written, too. Not all systems can.
        if let Some(folder) = path.parent() {
            let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_lie_dense_at_the_end() {
        let mut positions: Vec<u64> = Vec::new();
        for end in (256..=100 * 256).step_by(256) {
            if positions.len() == 8 {
                positions.remove(least_worth(&positions, end));
            }
            positions.push(end);
        }
        assert_eq!(positions.len(), 8);
        let end = 100 * 256;
        // However far back a text is edited, what is read again is a fraction of what lies behind.
        for edit in (1024..end).step_by(100) {
            let from = positions.iter().copied().filter(|&p| p <= edit).max().unwrap_or(0);
            assert!(edit - from <= (end - edit) * 3 + 1024, "{positions:?}: an edit at {edit} resumes at {from}");
        }
        assert_eq!(positions.last(), Some(&end));
    }

    #[test]
    fn a_full_disk_is_an_error_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.new");
        std::fs::write(&path, b"").unwrap();
        let file = File::options().write(true).open("/dev/full").unwrap();
        let new = New { file, path: path.clone(), named: true, states: Vec::new(), done: false };
        let mut sum = Checksum::default();
        let error = new.floats(&[1.0; 100], 0, &mut sum, &mut [0; 64]).unwrap_err();
        assert!(matches!(&error, SessionError::Write { source, .. } if source.kind() == io::ErrorKind::StorageFull));
        assert!(error.to_string().contains("as it was before"));
        drop(new);
        assert!(!path.exists());
    }

    #[test]
    fn a_header_is_read_back_and_every_byte_of_it_counts() {
        let model = Model { config: 1, weights: 2, kda: 30, conv: 4, mla_layers: 2, latent: 6 };
        let header = Header { model, ids: 12, positions: 11, states: 3, ids_sum: 7, latents_sum: 8, table_sum: 9 };
        let len = header.length().unwrap();
        assert_eq!(len, 128 + 3 * 136 + 48 + 2 * 11 * 24 + 48);
        let bytes = header.write();
        let path = Path::new("s");
        let read = Header::read(&bytes, len, path).unwrap();
        assert_eq!((read.model, read.ids, read.table_sum), (model, 12, 9));
        for i in 0..HEADER {
            for bit in 0..8 {
                let mut other = bytes;
                other[i] ^= 1 << bit;
                assert!(Header::read(&other, len, path).is_err(), "byte {i}");
            }
        }
        for other in [0, len - 1, len + 1, u64::MAX] {
            assert!(Header::read(&bytes, other, path).is_err());
        }
        // A length that lies, with a checksum that is right.
        for ids in [13, u64::MAX, 1 << 62] {
            let bytes = Header { ids, ..header.clone() }.write();
            assert!(matches!(Header::read(&bytes, len, path), Err(SessionError::Damaged { .. })));
        }
    }
}
