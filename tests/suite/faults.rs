//! Faults of the disk, met through the I/O seam: a pass gives the right bits or an error that names the
//! file, and never anything between. The command's side of the same is in `k3-bin/tests`.

use crate::run::{How, engine, engine_with, run};
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Faults, Faulty, Mode, ReadFault};
use k3_tests::checkpoints;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const PROMPT: [TokenId; 4] = [TokenId(1), TokenId(2), TokenId(3), TokenId(4)];

/// The least memory: everything is read again for each pass, through a ring of one slot and an arena of
/// one expert.
fn least(dir: &Path) -> How {
    let how = How { chunk: Some(4), budget: 0, ..How::default() };
    match engine(Checkpoint::open(dir, Arc::new(Disk::default())).expect("open"), &how, 4, 8) {
        Err(Error::Budget(refusal)) => How { budget: refusal.floor, ..how },
        other => panic!("a budget of nothing was not refused: {other:?}"),
    }
}

/// An engine over a source with faults, which begin behind the headers.
fn faulty(dir: &Path, how: &How, patience: Duration, faults: impl Fn(u64) -> Faults) -> (Engine, Faulty) {
    let counting = Faulty::new(Disk::new(Mode::Direct), Faults::default());
    Checkpoint::open(dir, Arc::new(counting.clone())).expect("open");
    let source = Faulty::new(Disk::new(Mode::Direct), faults(counting.reads()));
    let mut checkpoint = Checkpoint::open(dir, Arc::new(source.clone())).expect("open");
    checkpoint.set_patience(patience);
    (engine_with(checkpoint, how, 4, 8, Arc::default()).expect("an engine"), source)
}

const LONG: Duration = Duration::from_secs(600);

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|v| v.to_bits()).collect()
}

/// Every read of a pass fails once: each time the pass ends with an error that names a file, and the
/// engine gives the right bits as soon as the disk does.
#[test]
fn each_read_of_a_pass_may_fail() {
    let dir = &checkpoints()[0];
    let how = least(dir);
    let expected = bits(&run(dir, &how, &PROMPT, 0).expect("a run").logits);
    let (mut engine, source) = faulty(dir, &how, LONG, |_| Faults::default());
    let before = source.reads();
    let mut logits = vec![0.0; expected.len()];
    engine.step(&PROMPT, &mut logits, &mut ()).expect("a pass");
    let reads = source.reads() - before;
    assert!(reads > 60, "{reads}");
    let mut failed = 0;
    for read in (0..reads).step_by(7) {
        let (mut engine, _) =
            faulty(dir, &how, LONG, |first| Faults { fail_read: Some(first + read), ..Faults::default() });
        logits.fill(7.0);
        match engine.step(&PROMPT, &mut logits, &mut ()) {
            Err(Error::Read(error)) => {
                assert!(error.path.starts_with(dir) && matches!(error.fault, ReadFault::System(_)), "{error}");
                failed += 1;
            }
            // It was one of the reads ahead, for a pass that never came.
            Ok(()) => assert!(bits(&logits) == expected, "read {read}"),
            Err(other) => panic!("read {read}: {other}"),
        }
        let again = engine.step(&PROMPT, &mut logits, &mut ());
        if engine.position() == 0 {
            assert!(again.is_err(), "a torn state was used");
        }
        engine.reset().expect("reset");
        // The read that fails may be one that was made ahead.
        let passes = (0..2).map(|_| {
            engine.reset().expect("reset");
            engine.step(&PROMPT, &mut logits, &mut ())
        });
        assert!(passes.filter(Result::is_ok).count() >= 1, "read {read}");
        assert!(bits(&logits) == expected, "read {read}: other bits after a fault");
    }
    assert!(failed > 5, "{failed}");
}

#[test]
fn short_late_and_interrupted_reads_change_no_bit() {
    let dir = &checkpoints()[0];
    let how = least(dir);
    let expected = bits(&run(dir, &how, &PROMPT, 0).expect("a run").logits);
    for seed in 0..4 {
        let late_by = Duration::from_micros(200);
        let faults = Faults { seed, short: 2, interrupt: 2, late: 3, late_by, ..Faults::default() };
        let (mut engine, _) = faulty(dir, &how, LONG, |_| faults.clone());
        let mut logits = vec![0.0; expected.len()];
        engine.step(&PROMPT, &mut logits, &mut ()).expect("a pass");
        assert!(bits(&logits) == expected, "seed {seed}");
    }
}

/// The story: a disk that does not answer held the run up for ever, and so did whoever gave up on it.
#[test]
fn a_read_that_never_returns_ends_the_pass_with_its_file_and_place() {
    let dir = &checkpoints()[0];
    let how = least(dir);
    let expected = bits(&run(dir, &how, &PROMPT, 0).expect("a run").logits);
    for read in [0, 9, 30] {
        let patience = Duration::from_millis(150);
        let (mut engine, _) =
            faulty(dir, &how, patience, |first| Faults { hang_read: Some(first + read), ..Faults::default() });
        let mut logits = vec![7.0; PROMPT.len() * engine.checkpoint().config().vocab_size];
        let started = Instant::now();
        let error = engine.step(&PROMPT, &mut logits, &mut ()).expect_err("a pass without a read");
        let Error::Read(error) = &error else { panic!("{error}") };
        assert!(matches!(error.fault, ReadFault::Stalled { .. }) && error.path.starts_with(dir), "{error}");
        assert!(error.to_string().contains("has brought nothing"), "{error}");
        // The next pass waits for the same read, or does without it; dropping the engine does not wait.
        engine.reset().expect("reset");
        match engine.step(&PROMPT, &mut logits, &mut ()) {
            Ok(()) => assert!(bits(&logits) == expected, "read {read}"),
            Err(error) => assert!(error.to_string().contains("has brought nothing"), "{error}"),
        }
        drop(engine);
        assert!(started.elapsed() < Duration::from_secs(60));
    }
}

#[test]
fn a_file_that_shrinks_under_a_run_is_named() {
    let dir = &checkpoints()[0];
    let how = least(dir);
    for read in [0, 25] {
        let faults = |first| Faults { truncate: Some(4096), truncate_from: first + read, ..Faults::default() };
        let (mut engine, _) = faulty(dir, &how, LONG, faults);
        let mut logits = vec![7.0; PROMPT.len() * engine.checkpoint().config().vocab_size];
        let error = engine.step(&PROMPT, &mut logits, &mut ()).expect_err("a pass without its bytes");
        assert!(matches!(&error, Error::Read(e) if matches!(e.fault, ReadFault::Shrank { .. })), "{error}");
        assert!(logits.iter().all(|v| v.to_bits() == 7f32.to_bits()));
    }
}

/// A reader that panics is an answer like any other here; the command ends at once (134).
#[test]
fn a_panic_in_a_reader_is_no_hang() {
    let dir = &checkpoints()[0];
    let how = least(dir);
    if cfg!(panic = "abort") {
        println!("SKIPPED: a panic ends this process");
        return;
    }
    let (mut engine, _) = faulty(dir, &how, LONG, |first| Faults { panic_read: Some(first + 20), ..Faults::default() });
    let mut logits = vec![7.0; PROMPT.len() * engine.checkpoint().config().vocab_size];
    let error = engine.step(&PROMPT, &mut logits, &mut ()).expect_err("a pass without its bytes");
    assert!(matches!(&error, Error::Read(e) if matches!(e.fault, ReadFault::Panicked)), "{error}");
}
