//! Memory: what is refused, and that nothing is allocated in the core.

use crate::run::{How, engine, open};
use k3_platform::error::Error;
use k3_platform::io::Mode;
use k3_tests::checkpoints;

#[test]
fn a_budget_below_the_floor_is_refused_with_the_numbers() {
    for dir in checkpoints() {
        let how = How { budget: 1_000_000, ..How::default() };
        let error = engine(open(&dir, Mode::Direct).expect("open"), &how, 4, 8).expect_err("refused");
        let Error::Budget(refusal) = &error else { panic!("{error}") };
        assert!(refusal.floor > how.budget && refusal.ledger.total() == refusal.floor);
        let text = error.to_string();
        for part in ["KDA states", "context", "trunk ring", "experts", "total", &refusal.floor.to_string()] {
            assert!(text.contains(part), "{text}");
        }
        // The floor it names is accepted, and one byte less is not.
        for (budget, fine) in [(refusal.floor, true), (refusal.floor - 1, false)] {
            let how = How { budget, ..How::default() };
            assert_eq!(engine(open(&dir, Mode::Direct).expect("open"), &how, 4, 8).is_ok(), fine, "{budget}");
        }
    }
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
                    pinned = pinned.max(plan.pinned);
                }
                Err(Error::Budget(refusal)) => assert!(refusal.floor > budget),
                Err(error) => panic!("{error}"),
            }
        }
        assert!(pinned > 0);
    }
}
