//! Passes that are stopped half-way leave nothing behind that a later one could trip over.

use crate::run::{How, engine, engine_with, run};
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Faults, Faulty, Mode};
use k3_tests::checkpoints;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The story: a pass is stopped while experts and trunk are on their way. Their reads arrive in the
/// middle of a later pass, into an arena of one slot and a ring of one slot, where every buffer
/// that is not given back at once is missing for good.
#[test]
fn a_stopped_pass_does_not_disturb_the_next_one() {
    let dir = &checkpoints()[0];
    let prompt: Vec<_> = (1..5).map(TokenId).collect();
    let base = How { chunk: Some(4), mode: Mode::Buffered, ..How::default() };
    let expected = run(dir, &base, &prompt, 0).expect("a run").logits;
    for (more, seed) in [0, 0, 0, 40_000, 400_000, 30_000_000].into_iter().zip(0..) {
        let faults = Faults { seed, late: 2, late_by: Duration::from_micros(300), ..Faults::default() };
        let source = Arc::new(Faulty::new(Disk::new(Mode::Buffered), faults));
        let checkpoint = Checkpoint::open(dir, Arc::clone(&source) as _).expect("open");
        let vocab = checkpoint.config().vocab_size;
        let floor = match engine(checkpoint, &How { budget: 0, ..base }, 4, 4) {
            Err(Error::Budget(refusal)) => refusal.floor,
            other => panic!("not refused: {other:?}"),
        };
        let checkpoint = Checkpoint::open(dir, source).expect("open");
        let stop = Arc::new(AtomicBool::new(false));
        let how = How { budget: floor + more, ..base };
        let mut engine = engine_with(checkpoint, &how, 4, 4, Arc::clone(&stop)).expect("an engine");
        let mut logits = vec![0.0; 4 * vocab];
        let (mut stopped, mut finished) = (0, 0);
        for attempt in 0..30u64 {
            engine.reset().expect("reset");
            let later = Arc::clone(&stop);
            let timer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(attempt * attempt * 100));
                later.store(true, Ordering::Relaxed);
            });
            match engine.step(&prompt, &mut logits, &mut ()) {
                Ok(()) => finished += 1,
                Err(Error::Stopped) => {
                    stopped += 1;
                    let again = engine.step(&prompt, &mut logits, &mut ()).expect_err("torn");
                    assert!(again.to_string().contains("reset"), "{again}");
                }
                Err(error) => panic!("{error}"),
            }
            timer.join().expect("timer");
            stop.store(false, Ordering::Relaxed);
            if attempt % 5 == 4 {
                engine.reset().expect("reset");
                engine.step(&prompt, &mut logits, &mut ()).expect("an undisturbed pass");
                assert!(logits.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "attempt {attempt}");
            }
        }
        println!("floor + {more}: {stopped} stopped, {finished} finished");
        assert!(stopped > 0);
    }
}
