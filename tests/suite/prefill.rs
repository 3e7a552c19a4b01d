//! What a long prompt reads: each byte of the trunk once per chunk, each chosen expert once per chunk.

use crate::run::{How, engine, open};
use k3_core::checkpoint::{GlobalTensor, Tensor, layer_tensors};
use k3_core::config::MlpKind;
use k3_core::model::Observer;
use k3_core::view::{ExpertId, LayerIndex, TokenId};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::experts;
use k3_platform::io::{Detour, Detoured, Disk, Mode, ReadAt, Source};
use k3_platform::synth::{Fill, Synth, write};
use k3_tests::root;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// File, first byte and length of each read, in order.
type Log = Arc<Mutex<Vec<(PathBuf, u64, u64)>>>;

/// A disk that keeps a log.
struct Logging(Disk, Noting);

/// Notes a read that was made.
#[derive(Clone)]
struct Noting(Log);

impl Source for Logging {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(Detoured::new(self.0.open(path)?, self.1.clone())))
    }
}

impl Detour for Noting {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let read = file.read_at(buf, offset)?;
        self.0.lock().expect("log").push((file.path().to_owned(), offset, read as u64));
        Ok(read)
    }
}

/// Experts that each pass has chosen.
#[derive(Default)]
struct Chosen(Vec<BTreeSet<(u16, ExpertId)>>);

impl Observer for Chosen {
    fn routed(&mut self, layer: LayerIndex, ids: &[ExpertId], _: &[f32]) {
        let pass = self.0.last_mut().expect("a pass");
        pass.extend(ids.iter().map(|id| (layer.0, *id)));
    }
}

const PROMPT: usize = 512;

fn prompt(vocab: usize) -> Vec<TokenId> {
    let vocab = u32::try_from(vocab).expect("fits");
    (0..512u32).map(|i| TokenId(i * i * 31 % vocab)).collect()
}

/// Tensors of at least this many bytes are looked at, at their quarters: pieces less than 64 KiB apart
/// share a read, so what lies in a smaller gap may come along with it.
const LARGE: u64 = 256 << 10;

/// A checkpoint whose matrices are large and whose layers are few.
fn checkpoint(dir: &Path) {
    let path = root().join("k3-core/tests/tiny/config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("read")).expect("JSON");
    for (field, value) in [
        ("vocab_size", 1024),
        ("hidden_size", 512),
        ("intermediate_size", 256),
        ("moe_intermediate_size", 64),
        ("routed_expert_hidden_size", 128),
        ("num_experts", 8),
    ] {
        config[field] = value.into();
    }
    config["linear_attn_config"]["head_dim"] = 128.into();
    let config = config.to_string();
    let what = Synth { config: config.as_bytes(), fill: Fill::Everything, seed: 3, threads: 2 };
    write(dir, &what).expect("a checkpoint");
}

#[test]
fn a_chunk_reads_each_trunk_byte_and_each_chosen_expert_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("model");
    checkpoint(&dir);
    // With one slot for experts; and with slots for the trunk so long that few blocks are at their ends,
    // where two reads meet.
    count(&dir, 0, false);
    count(&dir, 1_200_000, true);
}

/// Counts the reads of a prompt with `more` bytes than the least; also those of the trunk.
fn count(dir: &Path, more: u64, trunk: bool) {
    let chunk = 200;
    let how = How { chunk: Some(chunk), mode: Mode::Buffered, ..How::default() };
    let floor = match engine(open(dir, how.mode).expect("open"), &How { budget: 0, ..how }, PROMPT, PROMPT) {
        Err(Error::Budget(refusal)) => refusal.floor,
        other => panic!("not refused: {other:?}"),
    };
    let log = Log::default();
    let source = Arc::new(Logging(Disk::new(Mode::Buffered), Noting(Arc::clone(&log))));
    let checkpoint = Checkpoint::open(dir, source).expect("open");
    let mut engine = engine(checkpoint, &How { budget: floor + more, ..how }, PROMPT, PROMPT).expect("an engine");
    let keeps = engine.plan().keeps.clone();
    assert!(engine.plan().pinned() <= keeps.len() / 2 && (more > 0 || engine.plan().arena == 1));
    let config = *engine.checkpoint().config();
    let mut chosen = Chosen::default();
    let mut logits = vec![0.0; config.vocab_size];
    log.lock().expect("log").clear();
    let ids = prompt(config.vocab_size);
    let passes = ids.chunks(chunk).len();
    for (i, ids) in ids.chunks(chunk).enumerate() {
        chosen.0.push(BTreeSet::new());
        let rows = if i + 1 == passes { config.vocab_size } else { 0 };
        engine.step(ids, &mut logits[..rows], &mut chosen).expect("a pass");
    }
    let (index, stats) = (engine.checkpoint().index(), engine.stats());
    let path = |shard: u16| dir.join(&index.shards()[usize::from(shard)].name);
    let place = |t| index.place(t, &config);
    let log = log.lock().expect("log").clone();

    // Experts: as often as passes have chosen them, except one that was still there.
    let wanted: u64 = chosen.0.iter().map(|pass| pass.len() as u64).sum();
    assert_eq!(stats.experts.requests, wanted, "each once per chunk, however many positions chose it");
    let mut reads: BTreeMap<(PathBuf, u64), u64> = BTreeMap::new();
    for (path, offset, _) in &log {
        *reads.entry((path.clone(), *offset)).or_default() += 1;
    }
    let (mut found, mut starts) = (0, BTreeSet::new());
    for layer in config.layers().filter(|&l| config.mlp_kind(l) == MlpKind::Moe) {
        for expert in 0..u16::try_from(config.num_experts).expect("fits") {
            let segment = experts::segment(&config, (layer, ExpertId(expert)), place);
            let [read] = segment.reads[..] else { panic!("these experts lie in one piece") };
            let start = (path(read.place.shard), read.place.offset);
            let times = reads.get(&start).copied().unwrap_or(0);
            let passes = chosen.0.iter().filter(|pass| pass.contains(&(layer.0, ExpertId(expert)))).count() as u64;
            assert!(times <= passes, "expert {expert} of layer {}: {times} reads in {passes} passes", layer.0);
            found += times;
            starts.insert(start);
        }
    }
    assert_eq!(found, wanted - stats.experts.hits);

    if !trunk {
        return;
    }
    // The trunk: three bytes of every large tensor, of which one at least is not where two reads meet.
    let trunk: Vec<_> = log.iter().filter(|(path, offset, _)| !starts.contains(&(path.clone(), *offset))).collect();
    let mut seen = 0;
    // What is pinned is read once in all.
    let times = |l: LayerIndex| if keeps[l.get()] { 1 } else { passes };
    let tensors = config.layers().flat_map(|l| layer_tensors(&config, l).map(move |t| (Tensor::Layer(l, t), times(l))));
    for (tensor, times) in tensors.chain([(Tensor::Global(GlobalTensor::LmHead), 1)]) {
        let bytes = tensor.spec(&config).bytes();
        if bytes < LARGE {
            continue;
        }
        let at = place(tensor);
        let path = path(at.shard);
        let reads = [1, 2, 3].map(|quarter| {
            let byte = at.offset + bytes * quarter / 4;
            trunk.iter().filter(|(p, offset, len)| *p == path && (*offset..*offset + *len).contains(&byte)).count()
        });
        // The first segments may have been read ahead, for a pass that never came.
        let ahead = usize::from(matches!(tensor, Tensor::Layer(LayerIndex(0), _)));
        let least = reads.into_iter().min().expect("three");
        assert!((times..=times + ahead).contains(&least), "{tensor}: {reads:?} reads in {times} passes");
        seen += 1;
    }
    assert!(seen > 15, "{seen} tensors are large enough");
}

#[test]
fn more_memory_means_longer_chunks_up_to_the_prompt() {
    let dir = root().join("fixtures/demo");
    let mut before = 1;
    for budget in [24_000_000, 32_000_000, 64_000_000, 128_000_000, 1_000_000_000] {
        let how = How { budget, ..How::default() };
        let engine = engine(open(&dir, how.mode).expect("open"), &how, PROMPT, PROMPT).expect("an engine");
        let chunk = engine.plan().extent.chunk;
        assert!(chunk >= before && chunk <= PROMPT, "{budget}: {chunk} after {before}");
        before = chunk;
    }
    assert_eq!(before, PROMPT);
}
