//! Plans: what a config asks for in memory, with files that are all there.
#![expect(clippy::missing_panics_doc, reason = "a panic is what a target is for")]

use super::memory::Files;
use super::targets::{SHARDS, config_seeds, files_of, message, put_shard};
use k3_core::checkpoint;
use k3_core::config::ModelConfig;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::plan::{Plan, Request};
use k3_platform::policy::Policy;
use std::path::Path;
use std::sync::Arc;

/// Tensors of a model that is looked at: more make a run slow, and are planned no otherwise.
const TENSORS: u64 = 400;

/// A file is not longer than this (bytes): systems count with signs.
const LONGEST: u64 = i64::MAX as u64 - (1 << 20);

/// A budget that lists of segments may fill (bytes).
const LISTS: u64 = 33 << 20;

/// A model of any config, with shards that are as it asks, is opened and planned: the plan holds the budget
/// and has room for what a pass does, or it says what would do.
///
/// The input is the budget, the context, the chunk and the sequences, what else is wished for, and `config.json`.
pub fn plan(data: &[u8]) {
    let Some((&[budget, context, chunk, wishes], json)) = data.split_first_chunk::<4>() else { return };
    // What is refused is the matter of `config`.
    let Ok(config) = ModelConfig::parse(json) else { return };
    if checkpoint::census(&config).total().tensors > TENSORS {
        return;
    }
    let bytes = |odd: usize| {
        let tensors = checkpoint::expected(&config).skip(odd).step_by(2).map(|t| t.spec(&config).bytes());
        tensors.fold(0, u64::saturating_add)
    };
    if bytes(0).max(bytes(1)) > LONGEST {
        return;
    }
    let files = Arc::new(Files::default());
    let (index, shards) = files_of(&config);
    files.put("model.safetensors.index.json", index.into_bytes(), 0);
    for (name, (header, data)) in SHARDS.iter().zip(shards) {
        put_shard(&files, name, header.as_bytes(), data);
    }
    files.put("config.json", json.to_vec(), 0);
    let checkpoint = Checkpoint::open(Path::new("/model"), files).expect("its own files");
    let (walk, multiplied) = (checkpoint.walk(), checkpoint.multiplied());
    assert!(multiplied.0 <= bytes(0).saturating_add(bytes(1)));

    // A large model in small slots has lists that are as long as the budget allows; not here.
    let lists = walk.list_bytes(walk.least_slot());
    let small = (1 << 24) + u64::from(budget) * (1 << 16);
    let budget = if lists < 4 << 20 && budget & 1 == 1 { u64::MAX >> (budget / 4) } else { small.min(LISTS) };
    let bit = |n: u8| usize::from(wishes >> n & 1);
    let request = Request {
        budget,
        context: [1, 300, 1 << 20, usize::MAX][usize::from(context % 4)].max(usize::from(context)),
        prompt: usize::from(chunk % 32),
        chunk: (chunk >= 128).then_some(1 + usize::from(chunk % 32)),
        threads: 1 + 7 * bit(0),
        readers: 1 + bit(1),
        policy: Policy::default(),
        all_logits: bit(2) == 1,
        speculate: 3 * bit(3),
        sequences: 1 + 5 * bit(4),
        touched: 0,
        beside: 0,
        beside_each: std::array::from_fn(|i| 64_000_u64.saturating_sub(1000 * i as u64) * bit(5) as u64),
    };
    match checkpoint.plan(&request, 0) {
        Ok(plan) => {
            holds(&checkpoint, &request, &plan);
            let more = Request { budget: budget.saturating_add(budget / 3), ..request };
            let more = checkpoint.plan(&more, 0).expect("more is no less");
            assert!(more.ledger.total() <= more.budget);
        }
        Err(Error::Budget(refusal)) => {
            assert!(refusal.floor > budget || refusal.floor == u64::MAX, "{refusal}");
            assert!(!refusal.to_string().contains(|c: char| c.is_control() && c != '\n'), "{refusal}");
            if refusal.floor <= LISTS || (lists < 4 << 20 && refusal.floor < u64::MAX) {
                let request = Request { budget: refusal.floor, ..request };
                let plan = checkpoint.plan(&request, 0).expect("what was said to do does");
                holds(&checkpoint, &request, &plan);
            }
        }
        Err(error) => message(&error),
    }
}

/// What a plan promises.
fn holds(checkpoint: &Checkpoint, request: &Request, plan: &Plan) {
    let (config, walk) = (checkpoint.config(), checkpoint.walk());
    assert!(plan.ledger.total() <= request.budget, "{}", plan.ledger);
    let experts = config.num_moe_layers() * config.num_experts;
    assert!(plan.arena <= experts && (plan.arena > 0 || experts == 0));
    assert_eq!(plan.ring == 0, plan.keeps.iter().all(|keeps| *keeps), "what is not pinned passes through a ring");
    assert!(plan.slot >= walk.least_slot());
    assert!((1..=request.sequences).contains(&plan.sequences) && plan.extent.chunk > request.speculate);
    assert!(request.chunk.is_none_or(|chunk| plan.extent.chunk >= chunk));
    assert_eq!(plan.keeps.len(), config.num_hidden_layers + 1);
    let mut read = 0_u64;
    for (layer, keeps) in plan.keeps.iter().enumerate() {
        for segment in walk.cut(layer, plan.slot) {
            assert!(segment.bytes <= plan.slot && !segment.pieces.is_empty());
            assert!(segment.pieces.iter().all(|p| p.at + p.len <= segment.bytes));
            read += if *keeps { 0 } else { segment.read_bytes() };
        }
    }
    assert_eq!(read, plan.trunk_read);
}

/// Small models with budgets that hold them and that do not.
#[must_use]
pub fn plan_seeds() -> Vec<Vec<u8>> {
    // The tiny model of the core, which has the fewest tensors.
    let config = config_seeds().pop().expect("configs");
    let wide = String::from_utf8_lossy(&config).replace("\"hidden_size\": 36", "\"hidden_size\": 2147483616");
    let mut seeds = Vec::new();
    for front in [[0_u8, 9, 3, 0], [0x91, 1, 5, 0xff], [0x40, 1, 0x85, 0x12], [1, 2, 40, 0], [0x21, 3, 1, 4]] {
        seeds.push([&front[..], &config].concat());
        seeds.push([&front[..], wide.as_bytes()].concat());
    }
    seeds
}
