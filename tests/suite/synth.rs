//! Placeholder checkpoints: they open, they run, and the released shape has the release's numbers.

use crate::run::{How, engine, open, run};
use k3_core::checkpoint::{self, Class, LayerTensor, Tensor};
use k3_core::config::ModelConfig;
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::error::Error;
use k3_platform::inventory::Inventory;
use k3_platform::io::{Disk, Mode};
use k3_platform::memory::rss;
use k3_platform::survey::Survey;
use k3_platform::synth::{Fill, Synth, SynthError, Written, write};
use k3_platform::vocabulary::VocabularyFiles;
use k3_tests::root;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Disk that the sparse form of the released shape takes at most (bytes).
const SPARSE: u64 = 200 << 20;

/// Writes a checkpoint; `None`, said aloud, where the disk cannot have it.
fn synth(dir: &Path, what: &Synth<'_>) -> Option<Written> {
    match write(dir, what) {
        Ok(written) => Some(written),
        Err(error @ (SynthError::NoHoles { .. } | SynthError::Space { .. })) => {
            println!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn small() -> Vec<u8> {
    fs::read(root().join("fixtures/tiny/config.json")).expect("the tiny config")
}

#[test]
fn a_filled_one_runs_the_same_at_every_budget() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dir, config) = (folder.path().join("new/model"), small());
    let what = Synth { config: &config, fill: Fill::Everything, seed: 5, threads: 3 };
    let Some(written) = synth(&dir, &what) else { return };
    let model = ModelConfig::parse(&config).expect("config");
    let total = checkpoint::census(&model).total();
    assert_eq!((written.filled, written.tensors), (total.bytes, total.tensors + 2));
    assert_eq!(written.shards, model.num_hidden_layers + 3);

    let prompt: Vec<TokenId> = [3, 1, 4, 1, 5, 9, 2, 6].map(TokenId).to_vec();
    let floor = match engine(open(&dir, Mode::Direct).expect("open"), &How { budget: 0, ..How::default() }, 8, 14) {
        Err(Error::Budget(refusal)) => refusal.floor,
        other => panic!("a budget of nothing was not refused: {other:?}"),
    };
    let mut first: Option<(Vec<f32>, Vec<TokenId>)> = None;
    for budget in [floor, floor + 500_000, floor + 3_000_000, 1 << 30] {
        let out = run(&dir, &How { budget, ..How::default() }, &prompt, 6).expect("a run");
        // Weights of a sensible scale: something is said, and not the same whatever was asked.
        assert!(out.logits.iter().all(|v| v.is_finite()));
        let spread = |row: &[f32]| row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let rows: Vec<_> = out.logits.chunks(model.vocab_size).map(spread).collect();
        assert!(rows.iter().all(|m| (0.5..100.0).contains(m)), "{rows:?}");
        assert!(out.routed.iter().all(|(_, _, weights)| weights.iter().all(|w| (0.0..=1.0).contains(w))));
        match &first {
            None => first = Some((out.logits, out.generated)),
            Some(first) => assert!(*first == (out.logits, out.generated), "other bits at {budget}"),
        }
    }
    let said: BTreeSet<_> = first.expect("a run").1.into_iter().collect();
    println!("said {said:?}");

    let checkpoint = open(&dir, Mode::Buffered).expect("open");
    let mut files = VocabularyFiles::open(&checkpoint).expect("vocabulary files");
    let vocabulary = files.load().expect("vocabulary");
    let (text, mut back) = (" caaa Zz \u{20ac}", Vec::new());
    let ids = vocabulary.encode(text.as_bytes(), false).expect("encode");
    ids.iter().for_each(|&id| vocabulary.decode(id, &mut back));
    assert!(back == text.as_bytes() && ids[0] == TokenId(256 + 2), "{ids:?}");
}

#[test]
fn what_is_filled_does_not_depend_on_the_rest() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = small();
    let model = ModelConfig::parse(&config).expect("config");
    let layers = model.num_hidden_layers;
    let fills = [
        Fill::Everything,
        Fill::Some { layers: [0, 3].map(LayerIndex).into(), head: true },
        Fill::Some { layers: [3].map(LayerIndex).into(), head: false },
        Fill::Nothing,
    ];
    let shard = |n: usize, number: usize| {
        let name = format!("model-{number:05}-of-{:06}.safetensors", layers + 3);
        fs::read(folder.path().join(n.to_string()).join(name)).expect("a shard")
    };
    for (n, fill) in fills.into_iter().enumerate() {
        let what = Synth { config: &config, fill, seed: 1, threads: 1 + n };
        if synth(&folder.path().join(n.to_string()), &what).is_none() {
            return;
        }
        // Every form is a checkpoint.
        open(&folder.path().join(n.to_string()), Mode::Direct).expect("open");
    }
    for (number, like_first) in
        [(1, [true, true, false, false]), (2, [true, false, false, false]), (4, [true, true, true, false])]
    {
        for (n, same) in like_first.into_iter().enumerate() {
            assert_eq!(shard(n, number) == shard(0, number), same, "shard {number} of fill {n}");
        }
    }
    let head = layers + 1;
    assert!(shard(0, head) == shard(1, head) && shard(0, head) != shard(2, head), "the head");

    // The same directory is not written twice, and nothing in it is touched.
    let dir = folder.path().join("0");
    let before = fs::metadata(dir.join("config.json")).expect("metadata").mtime_nsec();
    let refused = write(&dir, &Synth { config: &config, ..Synth::default() });
    assert!(matches!(refused, Err(SynthError::NotEmpty { .. })), "{refused:?}");
    assert_eq!(fs::metadata(dir.join("config.json")).expect("metadata").mtime_nsec(), before);
    let beyond = LayerIndex(u16::try_from(layers).expect("few"));
    let fill = Fill::Some { layers: [beyond].into(), head: false };
    let none = write(&folder.path().join("none"), &Synth { config: &config, fill, ..Synth::default() });
    assert!(matches!(none, Err(SynthError::Layer { layer, .. }) if layer == beyond), "{none:?}");
    assert!(!folder.path().join("none").exists());
}

#[test]
fn the_released_shape_has_the_numbers_of_the_release() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    let Some(written) = synth(dir, &Synth::default()) else { return };
    assert_eq!((written.shards, written.tensors, written.filled), (96, 497_220, 0));
    assert_eq!((written.bytes, written.headers), (1_560_936_091_448, 75_766_584));
    let files = fs::read_dir(dir).expect("read_dir").map(|e| e.expect("entry").metadata().expect("metadata"));
    let (mut bytes, mut on_disk) = (0, 0);
    for meta in files {
        bytes += meta.len();
        on_disk += meta.blocks() * 512;
    }
    assert!(bytes > 1_560_936_091_448 && on_disk < SPARSE, "{on_disk} bytes on disk");

    let before = rss().unwrap_or(0);
    let checkpoint = open(dir, Mode::Direct).expect("open");
    let after = rss().unwrap_or(0);
    println!("resident memory grew by {} bytes", after.saturating_sub(before));
    let index = checkpoint.index();
    assert_eq!((index.shards().len(), index.ignored()), (96, 168));
    assert_eq!(checkpoint::expected(checkpoint.config()).count() + index.ignored(), 497_220);
    assert_eq!(index.shards().iter().map(|s| s.len).sum::<u64>(), 1_560_936_091_448);
    assert!(index.bytes() < 40_000_000, "{}", index.bytes());
    // The index is what is kept; other tests run at the same time, so this is only a coarse net.
    assert!(after.saturating_sub(before) < 400_000_000);
    // An expert of 4284 blocks that does not begin on one.
    assert_eq!(checkpoint.expert_bytes(), 4285 * 4096);
    // Every byte of it has a name.
    let found = Inventory::of(&checkpoint);
    assert_eq!((found.files, found.accounted()), (1_560_936_091_448, 1_560_936_091_448));
    assert_eq!((found.headers, found.gaps), (75_766_584, 0));
    assert_eq!(found.always_active().parameters, 56_743_648_000);
    assert_eq!((found.experts, found.expert_bytes), (82_432, 17_547_264));
    assert_eq!(found.class(Class::Routed).bytes, 82_432 * 17_547_264);
    assert_eq!((found.tensors().tensors, found.never().tensors), (497_220, 168));
    assert_eq!(found.kinds.iter().map(|k| k.layers).collect::<Vec<_>>(), [1, 68, 24]);
    let census = checkpoint::census(checkpoint.config());
    assert!(Class::ALL.into_iter().all(|c| found.class(c) == census.class(c)));
    let survey = Survey::of(dir, &Disk::new(Mode::Direct));
    assert!(survey.faults.is_empty() && survey.strays.is_empty(), "{:?}", survey.faults);
    assert!(survey.sparse.len() >= 93, "holes are seen");

    let a_log = Tensor::Layer(LayerIndex(0), LayerTensor::ALog);
    assert_eq!(index.stored_bytes(a_log, checkpoint.config()), 512);

    // Two gigabytes are enough, and a refusal has the numbers.
    let how = How { budget: 2_000_000_000, chunk: Some(1), ..How::default() };
    let engine_at = |budget| engine(open(dir, Mode::Direct).expect("open"), &How { budget, ..how }, 8, 64);
    match engine_at(100_000_000) {
        Err(Error::Budget(refusal)) => assert!(refusal.floor < 600_000_000, "{refusal}"),
        other => panic!("100 MB were not refused: {other:?}"),
    }
    let two = engine_at(2_000_000_000).expect("2 GB");
    assert!(two.plan().ledger.total() <= 2_000_000_000 && two.plan().arena >= 16, "{}", two.plan().ledger);
    println!("{}", two.plan().ledger);
}

/// The rehearsal's config (see the README) has the released widths.
#[test]
fn the_rehearsal_has_the_released_widths() {
    let parse = |bytes: &[u8]| ModelConfig::parse(bytes).expect("a config");
    let ours = parse(&fs::read(root().join("tests/real10.json")).expect("the config"));
    let released = parse(k3_core::config::RELEASED_JSON.as_bytes());
    let widths = |c: &ModelConfig| {
        [
            c.hidden_size,
            c.intermediate_size,
            c.moe_intermediate_size,
            c.routed_expert_hidden_size,
            c.kda_num_heads,
            c.kda_head_dim,
            c.latent_width(),
        ]
    };
    assert_eq!(widths(&ours), widths(&released));
    let bytes = checkpoint::census(&ours).total().bytes;
    assert!((9_500_000_000..11_000_000_000).contains(&bytes), "{bytes}");
}
