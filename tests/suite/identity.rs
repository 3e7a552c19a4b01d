//! The promise in one table: the same bits whatever the machine, the budget and the path.

use crate::run::{How, Outcome, engine, open, open_for, run, run_among, run_guessing};
use k3_core::backend::Backend;
use k3_core::math::canonical_bits;
use k3_core::view::TokenId;
use k3_platform::io::Mode;
use k3_tests::checkpoints;
use std::path::Path;

const GENERATED: usize = 6;

fn prompt(vocab: usize) -> Vec<TokenId> {
    // Thirteen ids spread over the vocabulary, some of them twice.
    (0..13u32).map(|i| TokenId(i * i * 7 % u32::try_from(vocab).unwrap_or(u32::MAX))).collect()
}

fn bits(out: &Outcome) -> (Vec<u32>, Vec<TokenId>) {
    (out.logits.iter().map(|&v| canonical_bits(v)).collect(), out.generated.clone())
}

/// The least budget that is accepted.
fn floor(dir: &Path, how: &How, prompt: usize, context: usize) -> u64 {
    let how = How { budget: 0, ..*how };
    match engine(open_for(dir, &how).expect("open"), &how, prompt, context) {
        Err(k3_platform::error::Error::Budget(refusal)) => refusal.floor,
        other => panic!("a budget of nothing was not refused: {other:?}"),
    }
}

fn table(dir: &Path) -> Vec<(String, How)> {
    let base = How::default();
    let mut rows = Vec::new();
    for backend in Backend::available() {
        rows.push((format!("backend {}", backend.name()), How { backend, ..base }));
        // Chunks exercise the several-position kernels, which are other code.
        rows.push((format!("backend {} in chunks of 5", backend.name()), How { backend, chunk: Some(5), ..base }));
    }
    for name in ["avx2", "avx512"] {
        if Backend::by_name(name).is_none() {
            println!("SKIPPED: backend {name}: this CPU does not have it");
        }
    }
    for threads in [1, 2, 7] {
        rows.push((format!("{threads} threads"), How { threads, ..base }));
    }
    for chunk in [1, 2, 5, 13] {
        rows.push((format!("chunk {chunk}"), How { chunk: Some(chunk), ..base }));
        rows.push((format!("chunk {chunk}, 7 threads"), How { chunk: Some(chunk), threads: 7, ..base }));
    }
    let least = floor(dir, &How { chunk: Some(1), ..base }, 13, 13 + GENERATED);
    for (what, budget) in [
        ("the least", least),
        ("a little more", least + 40_000),
        ("a few experts", least + 300_000),
        ("some layers", least + 1_500_000),
        ("most layers", least + 4_000_000),
        ("everything", least + 64_000_000),
    ] {
        for mode in [Mode::Direct, Mode::Buffered] {
            for chunk in [Some(1), None] {
                rows.push((format!("budget: {what}, {mode:?}, chunk {chunk:?}"), How { budget, mode, chunk, ..base }));
            }
        }
    }
    // Guesses need chunks they fit in, and companions states of their own.
    let guessing = floor(dir, &How { speculate: 3, ..base }, 13, 13 + GENERATED);
    for speculate in [1, 2, 3] {
        let how = How { speculate, budget: guessing + 40_000, threads: 1, backend: Backend::SCALAR, ..base };
        rows.push((format!("guesses of {speculate}, little memory, scalar"), how));
    }
    for (backend, (sequences, chunk)) in Backend::available().zip([(5, Some(13)), (3, Some(4)), (2, None)]) {
        let how = How { backend, speculate: 5, chunk: Some(7), ..base };
        rows.push((format!("guesses of 5, chunk 7, {}", backend.name()), how));
        let how = How { backend, sequences, chunk, ..base };
        rows.push((format!("one of {sequences} sequences, chunk {chunk:?}, {}", backend.name()), how));
    }
    for (threads, budget) in [(1, guessing + 600_000), (7, guessing + 2_000_000)] {
        let how = How { sequences: 4, threads, budget, ..base };
        rows.push((format!("one of 4 sequences, {threads} threads, budget {budget}"), how));
    }
    // The trunk from one file, as it was and coded, at every kind of budget.
    for (form, pack) in [("raw", Some(false)), ("lossless", Some(true))] {
        let base = How { pack, ..base };
        for backend in Backend::available() {
            // The prompt in chunks, then token by token: both kernels.
            let name = format!("{form} pack, backend {}", backend.name());
            rows.push((name, How { backend, chunk: Some(5), ..base }));
        }
        let least = floor(dir, &How { chunk: Some(1), ..base }, 13, 13 + GENERATED);
        for (more, chunk) in [(0, Some(1)), (40_000, None), (300_000, Some(1)), (1_500_000, None), (4_000_000, None)] {
            let name = format!("{form} pack, least budget + {more}, chunk {chunk:?}");
            rows.push((name, How { budget: least + more, chunk, ..base }));
        }
    }
    rows.push(("the whole prefix again for each token".to_owned(), How { incremental: false, ..base }));
    rows.push((
        "the whole prefix again, least budget, one thread, scalar".to_owned(),
        How { incremental: false, budget: least, threads: 1, chunk: Some(1), backend: Backend::SCALAR, ..base },
    ));
    rows
}

#[test]
fn the_same_bits_on_every_row_of_the_table() {
    for dir in checkpoints() {
        let vocab = open(&dir, Mode::Direct).expect("open").config().vocab_size;
        let prompt = prompt(vocab);
        let reference =
            How { backend: Backend::SCALAR, threads: 1, chunk: Some(1), mode: Mode::Buffered, ..How::default() };
        let expected = bits(&run(&dir, &reference, &prompt, GENERATED).expect("the reference run"));
        assert_eq!(expected.0.len(), (prompt.len() + GENERATED) * vocab);
        let (mut pinned, mut hits) = (Vec::new(), Vec::new());
        for (name, how) in table(&dir) {
            let out = match how {
                How { speculate: 1.., .. } => run_guessing(&dir, &how, &prompt, &expected.1),
                How { sequences: 2.., .. } => run_among(&dir, &how, &prompt, &expected.1),
                _ => run(&dir, &how, &prompt, GENERATED),
            };
            let out = out.unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(bits(&out) == expected, "{}: other bits with {name}", dir.display());
            let stats = out.stats.expect("stats");
            let layers = stats.trunk.visits as f64;
            let rate = stats.trunk.hits as f64 / layers;
            let all = open(&dir, Mode::Direct).expect("open").config().num_hidden_layers as f64;
            assert!((rate - out.pinned as f64 / all).abs() < 1e-12, "{name}: pinned N of L must hit N/L");
            pinned.push(out.pinned);
            hits.push(stats.experts.hits);
        }
        // The table is only worth its name if the budgets really differ.
        pinned.sort_unstable();
        pinned.dedup();
        assert!(pinned.len() >= 3, "budgets pin {pinned:?} layers only");
        assert!(hits.iter().any(|&h| h > 0) && hits.contains(&0), "expert hits {hits:?}");
    }
}
