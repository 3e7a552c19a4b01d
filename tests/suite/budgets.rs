//! Memory: what is refused, and that nothing is allocated in the core.

use crate::run::{How, engine, open, run};
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::io::{Detour, Detoured, Disk, Mode, ReadAt, Source};
use k3_platform::plan::{MOST_SEQUENCES, Plan, Request};
use k3_platform::policy::Policy;
use k3_platform::synth::{Synth, write};
use k3_tests::checkpoints;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[test]
fn a_budget_below_the_floor_is_refused_with_the_numbers() {
    for dir in checkpoints() {
        let how = How { budget: 1_000_000, ..How::default() };
        let error = engine(open(&dir, Mode::Direct).expect("open"), &how, 4, 8).expect_err("refused");
        let Error::Budget(refusal) = &error else { panic!("{error}") };
        assert!(refusal.floor > how.budget && refusal.ledger.total() == refusal.floor);
        let text = error.to_string();
        for part in
            ["KDA states", "context", "trunk ring", "experts", "page tables", "total", &refusal.floor.to_string()]
        {
            assert!(text.contains(part), "{text}");
        }
        // The floor it names is accepted, and one byte less is not.
        for (budget, fine) in [(refusal.floor, true), (refusal.floor - 1, false)] {
            let how = How { budget, ..How::default() };
            assert_eq!(engine(open(&dir, Mode::Direct).expect("open"), &how, 4, 8).is_ok(), fine, "{budget}");
        }
    }
}

/// What is mapped piece by piece while a run goes on is asked for as a whole before it begins.
#[test]
fn what_will_be_mapped_later_is_found_to_fit_before_the_first_read() {
    let how = How { budget: 64_000_000, ..How::default() };
    let dir = &checkpoints()[0];
    let fine = engine(open(dir, Mode::Direct).expect("open"), &how, 4, 8).expect("an engine").plan().clone();
    let entries = fine.ledger.entries.iter().filter(|e| ["pinned trunk", "experts"].contains(&e.name));
    assert_eq!(fine.mapped_later, entries.map(|e| e.bytes).sum::<u64>());
    assert!(fine.mapped_later > 0);
    let plan = Plan { mapped_later: 1 << 60, ..fine };
    let checkpoint = open(dir, Mode::Direct).expect("open");
    let refused = Engine::new(checkpoint, plan, k3_core::backend::Backend::SCALAR, Arc::default());
    assert!(matches!(refused, Err(Error::Memory(e)) if e.bytes == 1 << 60));
}

/// Counts the bytes of shards that are read.
struct Counting(Disk, Count);

#[derive(Clone)]
struct Count(Arc<AtomicU64>);

impl Detour for Count {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let count = file.read_at(buf, offset)?;
        self.0.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

impl Source for Counting {
    fn open(&self, path: &Path) -> std::io::Result<Arc<dyn ReadAt>> {
        let file = self.0.open_cached(path)?;
        let is_shard = path.extension().is_some_and(|e| e == "safetensors");
        Ok(if is_shard { Arc::new(Detoured::new(file, self.1.clone())) } else { file })
    }
}

#[test]
fn a_refusal_has_read_the_headers_and_nothing_else() {
    for dir in checkpoints() {
        let read = Arc::new(AtomicU64::new(0));
        let source = Arc::new(Counting(Disk::new(Mode::Buffered), Count(Arc::clone(&read))));
        let checkpoint = Checkpoint::open(&dir, source).expect("open");
        let shards = checkpoint.index().shards().iter().map(|s| dir.join(&s.name));
        let header = |path: PathBuf| {
            let bytes = std::fs::read(path).expect("a shard");
            8 + u64::from_le_bytes(bytes[..8].try_into().expect("eight"))
        };
        let headers: u64 = shards.map(header).sum();
        let how = How { budget: 1_000_000, ..How::default() };
        assert!(matches!(engine(checkpoint, &how, 4, 8), Err(Error::Budget(_))));
        assert_eq!(read.load(Ordering::Relaxed), headers, "{}", dir.display());
    }
}

/// The released shape: what a position costs, and where the floor is.
#[test]
fn a_position_of_the_release_costs_what_its_latents_take() {
    let folder = tempfile::tempdir().expect("a folder");
    if let Err(error) = write(folder.path(), &Synth::default()) {
        println!("SKIPPED: {error}");
        return;
    }
    let checkpoint = open(folder.path(), Mode::Direct).expect("open");
    let request = |budget, context| Request {
        budget,
        context,
        prompt: context,
        chunk: None,
        threads: 2,
        readers: 8,
        all_logits: false,
        speculate: 0,
        sequences: 1,
        policy: Policy::default(),
        touched: 0,
        beside: 0,
        beside_each: [0; MOST_SEQUENCES],
    };
    let context = |plan: &Plan| plan.ledger.entries.iter().find(|e| e.name == "context").expect("a line").bytes;
    for positions in [1, 1000, 32_768, 1 << 20] {
        let plan = checkpoint.plan(&request(200_000_000_000, positions), 6_000_000).expect("a plan");
        assert_eq!(context(&plan), 55_296 * positions as u64);
    }
    // A prompt of 32,768 tokens fits eight gigabytes; two hold it, too, and less than its cache does not.
    let plan = checkpoint.plan(&request(8_000_000_000, 32_768), 6_000_000).expect("8 GB");
    assert!(plan.ledger.total() <= 8_000_000_000 && plan.extent.chunk > 1, "{}", plan.ledger);
    assert!(checkpoint.plan(&request(55_296 * 32_768, 32_768), 6_000_000).is_err());
    match checkpoint.plan(&request(0, 1), 6_000_000) {
        Err(Error::Budget(refusal)) => assert!(refusal.floor < 700_000_000, "{refusal}"),
        other => panic!("{other:?}"),
    }
}

/// The story: a ring of up to 48 slots was planned where all was pinned and nothing ever passed through it.
#[test]
fn where_all_of_the_trunk_is_pinned_there_is_no_ring() {
    let prompt = [TokenId(1), TokenId(2), TokenId(3)];
    for dir in checkpoints() {
        let plan = |budget| {
            let how = How { budget, ..How::default() };
            let engine = engine(open(&dir, Mode::Direct).expect("open"), &how, prompt.len(), 8).expect("an engine");
            engine.plan().clone()
        };
        let all = |plan: &Plan| plan.keeps.iter().all(|keeps| *keeps);
        let (mut low, mut high) = (16_000_000, 1 << 32);
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            (low, high) = if all(&plan(middle)) { (low, middle) } else { (middle, high) };
        }
        for budget in [low, high, high + (high - low) / 2, 1 << 32] {
            let plan = plan(budget);
            assert_eq!(all(&plan), budget >= high, "{budget}");
            assert_eq!((plan.ring == 0, plan.ledger.bytes_of("trunk ring") == 0), (all(&plan), all(&plan)));
            assert!(plan.ledger.total() <= budget, "{}", plan.ledger);
        }
        // All that one byte less keeps in a ring is pinned, and the answer is what it was.
        let [before, after] =
            [low, high].map(|budget| run(&dir, &How { budget, ..How::default() }, &prompt, 3).expect("a run"));
        assert_eq!(before.generated, after.generated);
        assert!(before.logits.iter().zip(&after.logits).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

/// The story: what each text of a batch remembers was planned as often as there were prompts, however few run.
#[test]
fn what_sequences_hold_is_planned_for_those_that_run() {
    let checkpoint = open(&checkpoints()[0], Mode::Direct).expect("open");
    let mut most = 0;
    for budget in [17_000_000, 20_000_000, 24_000_000, 32_000_000, 200_000_000] {
        let request = Request {
            budget,
            context: 16,
            prompt: 1000,
            chunk: None,
            threads: 1,
            readers: 1,
            all_logits: false,
            speculate: 0,
            sequences: 1000,
            policy: Policy::default(),
            touched: 0,
            beside: 1000,
            beside_each: std::array::from_fn(|i| 400_000 - 6000 * i as u64),
        };
        let plan = checkpoint.plan(&request, 0).expect("a plan");
        let each: u64 = request.beside_each.iter().take(plan.sequences).sum();
        assert_eq!(plan.ledger.bytes_of("text"), 1000 + each, "{}", plan.ledger);
        assert!(plan.sequences >= most && plan.ledger.total() <= budget, "{}", plan.ledger);
        most = plan.sequences;
    }
    assert_eq!(most, MOST_SEQUENCES);
}

#[test]
fn a_plan_never_passes_its_budget() {
    for dir in checkpoints() {
        let mut pinned = 0;
        for budget in (0..400).map(|i| 15_000_000 + i * 50_000) {
            let how = How { budget, ..How::default() };
            match engine(open(&dir, Mode::Direct).expect("open"), &how, 9, 16) {
                Ok(engine) => {
                    let plan = engine.plan();
                    assert!(plan.ledger.total() <= budget, "{budget}: {}", plan.ledger);
                    pinned = pinned.max(plan.pinned());
                }
                Err(Error::Budget(refusal)) => assert!(refusal.floor > budget),
                Err(error) => panic!("{error}"),
            }
        }
        assert!(pinned > 0);
    }
}
