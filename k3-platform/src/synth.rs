//! Checkpoints that were never trained: the right files, names, shapes and sizes, without the download.
//!
//! What it is: the writer of placeholder checkpoints for measuring and testing. By default every
//! tensor is a hole in a sparse file, so that the released shape of 1.56 TB takes about 150 MB of
//! disk and seconds to write; chosen layers can be filled with seeded random weights of a sensible
//! scale. What it is not: a way to make a model. The names and shapes are those of
//! [`k3_core::checkpoint`]; nothing of them is repeated here.
//!
//! ```text
//! model-00001 .. model-L    one layer each: its trunk, then its experts in order
//! model-L+1                 embedding, head, norms of the output
//! model-L+2, model-L+3      placeholders for projector and vision tower, which the engine ignores
//! index, tiktoken.model, tokenizer_config.json, and config.json last
//! ```
//!
//! An interruption leaves a directory without `config.json`, which nothing takes for a checkpoint. A
//! weight is a function of the seed, its tensor and its place in it, so it does not matter which
//! other layers are filled, or by how many threads.

use crate::io::free_space;
use k3_core::checkpoint::{self, Dtype, GlobalTensor, LayerTensor, Tensor, expert_tensors, layer_tensors};
use k3_core::config::{ConfigError, ModelConfig, RELEASED_JSON};
use k3_core::tokenizer::{BLOCK, Control};
use k3_core::view::LayerIndex;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes of all the headers of the release, the eight in front of each included (spec section 2).
const RELEASED_HEADERS: u64 = 75_766_584;

/// The placeholders of the release (spec section 2): prefix of the names, tensors, bytes.
const RELEASED_PLACEHOLDERS: [(&str, u64, u64); 2] =
    [("mm_projector.placeholder", 3, 92_289_024), ("vision_tower.placeholder", 165, 802_428_928)];

/// Bytes that are generated and written together, by one thread.
const PIECE: u64 = 1 << 20;

/// Text files and headers need at most this for each tensor (bytes).
const TEXT_PER_TENSOR: u64 = 320;

/// A file of this length (bytes) must take no room if holes are worth anything.
const PROBE: u64 = 64 << 20;

/// Which weights are written rather than left as holes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Fill {
    /// None.
    #[default]
    Nothing,
    /// Those of some layers, and those outside the layers if `head` is set.
    Some {
        /// The layers.
        layers: BTreeSet<LayerIndex>,
        /// Embedding, head, and the norms of the output.
        head: bool,
    },
    /// All of them.
    Everything,
}

impl Fill {
    fn layer(&self, l: LayerIndex) -> bool {
        match self {
            Self::Nothing => false,
            Self::Some { layers, .. } => layers.contains(&l),
            Self::Everything => true,
        }
    }

    const fn head(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Some { head, .. } => *head,
            Self::Everything => true,
        }
    }

    /// Whether this weight is written.
    fn covers(&self, tensor: Tensor) -> bool {
        match tensor {
            Tensor::Global(_) => self.head(),
            Tensor::Layer(l, _) | Tensor::Expert(l, ..) => self.layer(l),
        }
    }
}

/// What to write.
#[derive(Debug, Clone)]
pub struct Synth<'a> {
    /// The bytes of `config.json`.
    pub config: &'a [u8],
    /// Which weights are not holes.
    pub fill: Fill,
    /// Where the weights' randomness starts.
    pub seed: u64,
    /// Threads that generate weights; zero counts as one.
    pub threads: usize,
}

impl Default for Synth<'_> {
    /// The released shape, all of it holes.
    fn default() -> Self {
        Self { config: RELEASED_JSON.as_bytes(), fill: Fill::Nothing, seed: 0, threads: 1 }
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Written {
    /// Files with tensors.
    pub shards: usize,
    /// Tensors, placeholders included.
    pub tensors: u64,
    /// Length of all the shards together (bytes).
    pub bytes: u64,
    /// Of these, headers (bytes).
    pub headers: u64,
    /// Of these, weights that are no holes (bytes).
    pub filled: u64,
}

/// Why a checkpoint was not written.
#[derive(Debug)]
#[non_exhaustive]
pub enum SynthError {
    /// The config is refused.
    Config(Box<ConfigError>),
    /// The vocabulary of the config has no room for the 256 bytes and the control ids.
    Vocabulary {
        /// Its size.
        ids: usize,
    },
    /// A layer to fill does not exist.
    Layer {
        /// Its number.
        layer: LayerIndex,
        /// How many there are.
        layers: usize,
    },
    /// The directory has something in it.
    NotEmpty {
        /// The directory.
        path: PathBuf,
    },
    /// The file system has no holes, so the shards would take all their length.
    NoHoles {
        /// The directory.
        path: PathBuf,
    },
    /// There is not enough room.
    Space {
        /// The directory.
        path: PathBuf,
        /// Bytes that will be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The system's answer.
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

impl std::fmt::Display for SynthError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config(source) => source.fmt(f),
            Self::Vocabulary { ids } => {
                write!(f, "a vocabulary of {ids} ids does not hold the 256 bytes and {BLOCK} control ids")
            }
            Self::Layer { layer, layers } => write!(f, "there is no layer {}: the config has {layers}", layer.0),
            Self::NotEmpty { path } => write!(f, "{}: the directory is not empty", path.display()),
            Self::NoHoles { path } => write!(f, "{}: the file system has no sparse files", path.display()),
            Self::Space { path, needed, free } => {
                write!(f, "{}: {needed} bytes are needed, {free} are free", path.display())
            }
            Self::Io { path, source } => write!(f, "{}: {source}", path.display()),
        }
    }
}

impl std::error::Error for SynthError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(source) => Some(source),
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Writes a checkpoint into `dir`, which is made if it is not there.
///
/// # Errors
/// [`SynthError`]; what was written so far stays, without a `config.json`.
pub fn write(dir: &Path, synth: &Synth<'_>) -> Result<Written, SynthError> {
    let config = ModelConfig::parse(synth.config).map_err(|e| SynthError::Config(Box::new(e)))?;
    let ranks = config.vocab_size.checked_sub(BLOCK as usize).filter(|&n| n >= 256);
    let ranks = ranks.ok_or(SynthError::Vocabulary { ids: config.vocab_size })?;
    if let Fill::Some { layers, .. } = &synth.fill
        && let Some(&layer) = layers.iter().find(|l| l.get() >= config.num_hidden_layers)
    {
        return Err(SynthError::Layer { layer, layers: config.num_hidden_layers });
    }
    prepare(dir, synth, &config)?;
    let mut writer = Writer::new(dir, synth, &config)?;
    for l in config.layers() {
        let trunk = layer_tensors(&config, l).map(|t| Tensor::Layer(l, t));
        let items: Vec<_> = trunk.chain(expert_tensors(&config, l)).map(|t| Item::model(t, &config)).collect();
        writer.shard(&items)?;
    }
    use GlobalTensor::{Embed, FinalNorm, LmHead, OutResNorm, OutResProj};
    // As the release has them: the two tables first.
    let globals = [Embed, LmHead, FinalNorm, OutResNorm, OutResProj].map(Tensor::Global);
    writer.shard(&globals.map(|t| Item::model(t, &config)))?;
    for placeholder in 0..RELEASED_PLACEHOLDERS.len() {
        writer.shard(&placeholders(placeholder, &config))?;
    }
    let written = writer.finish()?;
    save(dir, "tiktoken.model", &vocabulary(ranks))?;
    save(dir, "tokenizer_config.json", &control_names(ranks))?;
    // Last, and under its name only when it is whole.
    save(dir, "config.json.part", synth.config)?;
    let path = dir.join("config.json");
    fs::rename(dir.join("config.json.part"), &path).map_err(at(&path))?;
    Ok(written)
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> SynthError {
    move |source| SynthError::Io { path: path.to_owned(), source }
}

fn save(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), SynthError> {
    let path = dir.join(name);
    let save = || File::create_new(&path)?.write_all(bytes);
    save().map_err(at(&path))
}

/// Makes the directory, and finds out whether the files will fit.
fn prepare(dir: &Path, synth: &Synth<'_>, config: &ModelConfig) -> Result<(), SynthError> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    if fs::read_dir(dir).map_err(at(dir))?.next().is_some() {
        return Err(SynthError::NotEmpty { path: dir.to_owned() });
    }
    let (mut needed, mut tensors) = (0, 0);
    for tensor in checkpoint::expected(config) {
        tensors += 1;
        needed += if synth.fill.covers(tensor) { tensor.spec(config).bytes() } else { 0 };
    }
    needed += (tensors + config.vocab_size as u64) * TEXT_PER_TENSOR;
    let free = free_space(dir).map_err(at(dir))?;
    if needed > free {
        return Err(SynthError::Space { path: dir.to_owned(), needed, free });
    }
    if synth.fill != Fill::Everything {
        let path = dir.join("hole.part");
        let probe = || {
            let file = File::create_new(&path)?;
            file.set_len(PROBE)?;
            let blocks = file.metadata()?.blocks();
            fs::remove_file(&path)?;
            Ok(blocks)
        };
        // Blocks of 512 bytes, whatever the file system's own are.
        if probe().map_err(at(&path))? * 512 > PROBE / 2 {
            return Err(SynthError::NoHoles { path: dir.to_owned() });
        }
    }
    Ok(())
}

/// A tensor of a shard.
#[derive(Debug, Clone)]
struct Item {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    /// `None` for a placeholder.
    tensor: Option<Tensor>,
}

impl Item {
    fn model(tensor: Tensor, config: &ModelConfig) -> Self {
        let spec = tensor.spec(config);
        Self { name: tensor.to_string(), dtype: spec.dtype, shape: spec.shape().to_vec(), tensor: Some(tensor) }
    }

    fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size()
    }
}

/// Whether this is the model that was released, as far as tensors go.
fn is_released(config: &ModelConfig) -> bool {
    ModelConfig::parse(RELEASED_JSON.as_bytes())
        .is_ok_and(|released| checkpoint::census(config) == checkpoint::census(&released))
}

/// Tensors the engine passes over: of the release's number and size for its model, else one small
/// one.
fn placeholders(which: usize, config: &ModelConfig) -> Vec<Item> {
    let (prefix, count, bytes) = RELEASED_PLACEHOLDERS[which];
    let (count, elements) = if is_released(config) { (count, bytes / 2) } else { (1, config.hidden_size as u64) };
    // The last one takes what the division leaves.
    let share = elements / count;
    let item = |i| Item {
        name: format!("{prefix}.{i}.weight"),
        dtype: Dtype::Bf16,
        shape: vec![if i + 1 == count { elements - share * i } else { share }],
        tensor: None,
    };
    (0..count).map(item).collect()
}

/// What the shards have in common while they are being written.
struct Writer<'a> {
    dir: &'a Path,
    synth: &'a Synth<'a>,
    config: &'a ModelConfig,
    index: BufWriter<File>,
    index_path: PathBuf,
    /// Shards there will be.
    shards: usize,
    normals: Vec<f32>,
    written: Written,
}

impl<'a> Writer<'a> {
    fn new(dir: &'a Path, synth: &'a Synth<'a>, config: &'a ModelConfig) -> Result<Self, SynthError> {
        let shards = config.num_hidden_layers + 1 + RELEASED_PLACEHOLDERS.len();
        let index_path = dir.join("model.safetensors.index.json");
        let file = File::create_new(&index_path).map_err(at(&index_path))?;
        let total = checkpoint::census(config).total().bytes
            + (0..RELEASED_PLACEHOLDERS.len()).flat_map(|i| placeholders(i, config)).map(|i| i.bytes()).sum::<u64>();
        let mut index = BufWriter::with_capacity(1 << 20, file);
        write!(index, "{{\n  \"metadata\": {{\n    \"total_size\": {total}\n  }},\n  \"weight_map\": {{")
            .map_err(at(&index_path))?;
        let normals = normals(synth.seed);
        Ok(Self { dir, synth, config, index, index_path, shards, normals, written: Written::default() })
    }

    /// Writes the next shard.
    fn shard(&mut self, items: &[Item]) -> Result<(), SynthError> {
        self.written.shards += 1;
        let name = format!("model-{:05}-of-{:06}.safetensors", self.written.shards, self.shards);
        let mut header = "{\"__metadata__\":{\"format\":\"pt\"}".to_owned();
        let mut data = 0;
        let mut fill = Vec::new();
        for item in items {
            let shape: Vec<_> = item.shape.iter().map(u64::to_string).collect();
            let (end, dtype) = (data + item.bytes(), item.dtype.name());
            // Writing to a string cannot fail.
            let _ = write!(
                header,
                ",\"{}\":{{\"dtype\":\"{dtype}\",\"shape\":[{}],\"data_offsets\":[{data},{end}]}}",
                item.name,
                shape.join(",")
            );
            let comma = if self.written.tensors == 0 { "" } else { "," };
            write!(self.index, "{comma}\n    \"{}\": \"{name}\"", item.name).map_err(at(&self.index_path))?;
            self.written.tensors += 1;
            fill.extend(item.tensor.filter(|&t| self.synth.fill.covers(t)).map(|t| (t, data)));
            data = end;
        }
        header.push('}');
        let mut len = header.len().next_multiple_of(8);
        if self.written.shards == self.shards && is_released(self.config) {
            // So that all the files together have the release's length.
            let rest = RELEASED_HEADERS.saturating_sub(self.written.headers + 8);
            len = len.max(usize::try_from(rest).unwrap_or(0));
        }
        header.extend(std::iter::repeat_n(' ', len - header.len()));
        let path = self.dir.join(&name);
        let start = 8 + len as u64;
        let create = || {
            let file = File::create_new(&path)?;
            file.write_all_at(&(len as u64).to_le_bytes(), 0)?;
            file.write_all_at(header.as_bytes(), 8)?;
            file.set_len(start + data)?;
            Ok(file)
        };
        let file = create().map_err(at(&path))?;
        self.written.filled += self.weights(&file, start, &fill).map_err(at(&path))?;
        self.written.headers += start;
        self.written.bytes += start + data;
        Ok(())
    }

    /// Writes the weights of `tensors`, each with its place in the data. Returns how many bytes.
    fn weights(&self, file: &File, start: u64, tensors: &[(Tensor, u64)]) -> io::Result<u64> {
        let mut pieces = Vec::new();
        let mut total = 0;
        for &(tensor, begin) in tensors {
            let bytes = tensor.spec(self.config).bytes();
            total += bytes;
            for from in (0..bytes).step_by(usize::try_from(PIECE).unwrap_or(usize::MAX)) {
                pieces.push((tensor, start + begin, from, PIECE.min(bytes - from)));
            }
        }
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failure = Mutex::new(Ok(()));
        let work = || {
            let mut buffer = Vec::new();
            while let Some(&(tensor, base, from, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                buffer.clear();
                self.generate(tensor, from, len, &mut buffer);
                let done = file.write_all_at(&buffer, base + from);
                if done.is_err()
                    && let Ok(mut failure) = failure.lock()
                {
                    *failure = done;
                    failed.store(true, Ordering::Relaxed);
                }
                if failed.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.synth.threads.min(pieces.len()) {
                // Fewer threads than wished for, or none, write the same.
                let _started = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        failure.into_inner().unwrap_or(Ok(())).map(|()| total)
    }

    /// Appends `len` bytes of a tensor's weights, from byte `from` on.
    fn generate(&self, tensor: Tensor, from: u64, len: u64, out: &mut Vec<u8>) {
        let spec = tensor.spec(self.config);
        let slot = checkpoint::slot(tensor, self.config) as u64;
        let words = Words(mix(self.synth.seed ^ mix(slot)));
        let size = spec.dtype.size();
        let (first, last) = (from / size, (from + len) / size);
        let end = out.len() + usize::try_from(len).unwrap_or(usize::MAX);
        match law(tensor, self.config) {
            Law::Normal { mean, deviation, until } => {
                // Sixteen bits of a word choose one of 4096 normal numbers, four times a word. What ends
                // early, `A_log`, is f32.
                let scaled: Vec<f32> = self.normals.iter().map(|n| mean + deviation * n).collect();
                let floats = spec.dtype == Dtype::F32;
                let rounded: Vec<[u8; 2]> = scaled.iter().map(|v| bf16(*v).to_le_bytes()).collect();
                for i in first / 4..last.div_ceil(4) {
                    let word = words.at(i);
                    for k in 0..4 {
                        let pick = usize::from(lane(word, k) >> 4);
                        let value = if i * 4 + k < until { scaled[pick] } else { 0.0 };
                        if floats {
                            out.extend_from_slice(&value.to_le_bytes());
                        } else {
                            out.extend_from_slice(&rounded[pick]);
                        }
                    }
                }
            }
            Law::Bytes => out.extend((first / 8..last.div_ceil(8)).flat_map(|i| words.at(i).to_le_bytes())),
            Law::Scales { least } => {
                out.extend((first..last).map(|i| least + u8::from(words.at(i / 64) >> (i % 64) & 1 == 1)));
            }
        }
        // A piece starts on a word; only its end may lie inside one.
        out.truncate(end);
    }

    fn finish(mut self) -> Result<Written, SynthError> {
        self.index.write_all(b"\n  }\n}\n").and_then(|()| self.index.flush()).map_err(at(&self.index_path))?;
        Ok(self.written)
    }
}

/// How the weights of a tensor are spread.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Law {
    /// Normal; elements from `until` on are zero.
    Normal { mean: f32, deviation: f32, until: u64 },
    /// Random nibbles.
    Bytes,
    /// E8M0 scales: `least`, or one more.
    Scales { least: u8 },
}

/// The law that keeps activations near the size they have in a trained model.
fn law(tensor: Tensor, config: &ModelConfig) -> Law {
    let spec = tensor.spec(config);
    let normal = |mean, deviation| Law::Normal { mean, deviation, until: u64::MAX };
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a scale, not a count")]
    let fan_in = normal(0.0, 1.0 / (spec.cols() as f64).sqrt() as f32);
    match tensor {
        Tensor::Global(GlobalTensor::OutResNorm | GlobalTensor::FinalNorm) => normal(1.0, 0.1),
        Tensor::Global(_) => fan_in,
        Tensor::Layer(_, t) => match t {
            // A file pads it with zeros, and whoever reads it insists on them.
            LayerTensor::ALog => Law::Normal { mean: 0.0, deviation: 0.5, until: config.kda_num_heads as u64 },
            LayerTensor::DtBias => normal(-1.0, 1.0),
            LayerTensor::RouterBias => normal(0.0, 0.02),
            LayerTensor::AttnResProj | LayerTensor::MlpResProj => fan_in,
            LayerTensor::QConv | LayerTensor::KConv | LayerTensor::VConv => fan_in,
            t if t.is_vector() => normal(1.0, 0.1),
            _ => fan_in,
        },
        Tensor::Expert(_, _, t) if t.is_scale() => {
            // The sixteen E2M1 values have a root mean square of 2.9, a little less than 2^2 with the
            // half of a step that the random bit adds; one scale spans 32 weights.
            let halvings = (spec.cols() * 32).max(1).ilog2() / 2 + 2;
            Law::Scales { least: u8::try_from(127_u32.saturating_sub(halvings)).unwrap_or(0) }
        }
        Tensor::Expert(..) => Law::Bytes,
    }
}

/// Random words by number: the same whichever are asked for.
#[derive(Debug, Clone, Copy)]
struct Words(u64);

impl Words {
    fn at(self, i: u64) -> u64 {
        mix(self.0.wrapping_add(i.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

/// A bijection of 64 bits in which every bit depends on every other (the finalizer of splitmix64).
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Sixteen of a word's bits.
const fn lane(word: u64, i: u64) -> u16 {
    let bytes = word.to_le_bytes();
    let i = (i % 4) as usize * 2;
    u16::from_le_bytes([bytes[i], bytes[i + 1]])
}

/// 4096 numbers that are spread normally, near enough: sums of twelve even ones. They come in pairs
/// of opposite sign, so their mean is exactly zero.
fn normals(seed: u64) -> Vec<f32> {
    let words = Words(mix(!seed));
    let one = |i: u64| {
        let sum: u32 = (0..12).map(|k| u32::from(lane(words.at(i * 3 + k / 4), k % 4))).sum();
        #[expect(clippy::cast_precision_loss, reason = "less than 2^20")]
        let sum = sum as f32 / 65_536.0;
        sum - 6.0
    };
    (0..2048).map(one).flat_map(|v| [v, -v]).collect()
}

/// The nearest bf16; the value is finite.
fn bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits + 0x7fff + (bits >> 16 & 1);
    u16::try_from(rounded >> 16).unwrap_or(u16::MAX)
}

/// `tiktoken.model` with this many ranks: the bytes, then words of four letters.
fn vocabulary(ranks: usize) -> Vec<u8> {
    let mut text = Vec::with_capacity(ranks * 16);
    for rank in 0..ranks {
        let token: Vec<u8> = match u8::try_from(rank) {
            Ok(byte) => vec![byte],
            Err(_) => {
                // Five letters when four have run out: as many as it takes, and no two alike.
                let (mut rest, mut word) = (rank - 256, vec![b' ']);
                while word.len() < 5 || rest > 0 {
                    word.push(b'a' + u8::try_from(rest % 26).unwrap_or(0));
                    rest /= 26;
                }
                word
            }
        };
        base64(&token, &mut text);
        text.extend_from_slice(format!(" {rank}\n").as_bytes());
    }
    text
}

fn base64(bytes: &[u8], out: &mut Vec<u8>) {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for part in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|i| u32::from(part.get(i).copied().unwrap_or(0)));
        let bits = a << 16 | b << 8 | c;
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= part.len() { digit } else { b'=' });
        }
    }
}

/// `tokenizer_config.json`: the names the release gives to control ids.
fn control_names(ranks: usize) -> Vec<u8> {
    let names = (0..=u8::MAX).filter_map(|d| Some((ranks + usize::from(d), Control::at(d).released_name()?)));
    let entries: Vec<_> =
        names.map(|(id, name)| format!("    \"{id}\": {{\"content\": \"{name}\", \"special\": true}}")).collect();
    format!("{{\n  \"added_tokens_decoder\": {{\n{}\n  }}\n}}\n", entries.join(",\n")).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_core::checkpoint::ExpertTensor;
    use k3_core::view::ExpertId;

    #[test]
    fn base64_is_padded() {
        for (bytes, text) in
            [(&b""[..], ""), (b"M", "TQ=="), (b"Ma", "TWE="), (b"Man", "TWFu"), (b"\xff\xff\xfe", "///+")]
        {
            let mut out = Vec::new();
            base64(bytes, &mut out);
            assert_eq!(out, text.as_bytes());
        }
    }

    #[test]
    fn weights_do_not_depend_on_how_they_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let (synth, config) = (Synth::default(), ModelConfig::parse(RELEASED_JSON.as_bytes()).unwrap());
        let writer = Writer::new(folder.path(), &synth, &config).unwrap();
        let l = LayerIndex(1);
        let expert = |t| Tensor::Expert(l, ExpertId(7), t);
        for tensor in [
            Tensor::Layer(l, LayerTensor::Q),
            Tensor::Layer(l, LayerTensor::DtBias),
            expert(ExpertTensor::W1Packed),
            expert(ExpertTensor::W1Scale),
        ] {
            let (mut whole, mut cut) = (Vec::new(), Vec::new());
            writer.generate(tensor, 0, 4096, &mut whole);
            for (from, len) in [(0, 1024), (1024, 2048), (3072, 1020)] {
                writer.generate(tensor, from, len, &mut cut);
            }
            assert!(cut[..] == whole[..4092], "{tensor}");
            assert!(whole.chunks(64).skip(1).all(|c| c != &whole[..64]), "{tensor} repeats");
        }
        let mut a_log = Vec::new();
        writer.generate(Tensor::Layer(l, LayerTensor::ALog), 0, 512, &mut a_log);
        assert!(a_log[96 * 4..].iter().all(|&b| b == 0) && a_log[..96 * 4].iter().any(|&b| b != 0));
    }

    #[test]
    fn numbers_are_normal() {
        let normals = normals(3);
        let sum: f32 = normals.iter().sum();
        let square: f32 = normals.iter().map(|v| v * v).sum::<f32>() / 4096.0;
        assert!(sum.abs() < 1e-3 && (square - 1.0).abs() < 0.1, "{sum} {square}");
        assert_eq!([1.0, -1.5, 0.0, 1.003_906_2].map(bf16), [0x3f80, 0xbfc0, 0, 0x3f80]);
    }
}
