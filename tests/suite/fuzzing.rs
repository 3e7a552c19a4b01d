//! The fuzz targets on seeds, committed inputs and mutations of both; see `k3_tests::fuzz`.

use crate::counting::bytes_allocated;
use k3_tests::fuzz::{Mutator, TARGETS, Target};
use k3_tests::root;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Bytes that a target may ask for in all, beside some for each byte of its input: a vocabulary's
/// smallest arena, a few times over.
const FIXED: u64 = 4 << 20;

/// The same for each byte of the input; the targets themselves keep what they were told, for comparing.
const EACH: u64 = 4096;

/// Runs a target, and says on which input if it panics or takes memory that the input does not justify.
fn run(target: &Target, what: &str, input: &[u8]) {
    let result = catch_unwind(AssertUnwindSafe(|| {
        let bytes = bytes_allocated(|| (target.run)(input));
        assert!(bytes <= FIXED + EACH * input.len() as u64, "{bytes} bytes for an input of {}", input.len());
    }));
    if let Err(panic) = result {
        println!("{}, {what}: {}", target.name, input.escape_ascii());
        resume_unwind(panic);
    }
}

fn check(name: &str) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    let inputs = target.inputs();
    // What a target prepares once for the whole process is not an input's.
    (target.run)(&[]);
    for (i, input) in inputs.iter().enumerate() {
        run(target, &format!("input {i}"), input);
    }
    for seed in 0..u64::from(target.mutations) {
        let input = Mutator::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15)).mutate(target, &inputs);
        run(target, &format!("mutation {seed}"), &input);
    }
}

/// A test for each target, so that they run side by side and are named when they fail.
macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            check(stringify!($name));
        })*

        #[test]
        fn every_target_is_tested_here_and_has_its_file() {
            let names: Vec<_> = TARGETS.iter().map(|t| t.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
            let manifest = std::fs::read_to_string(root().join("tests/fuzz/Cargo.toml")).expect("Cargo.toml");
            for name in &names {
                let file = root().join(format!("tests/fuzz/fuzz_targets/{name}.rs"));
                let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
                assert!(text.contains(&format!("targets::{name}(")), "{}", file.display());
                assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name} is not in Cargo.toml");
            }
            let files = std::fs::read_dir(root().join("tests/fuzz/fuzz_targets")).expect("fuzz_targets").count();
            assert_eq!(files, names.len(), "a file without a target");
        }
    };
}

targets!(json config header index shard names vocab text tensor views trace conversation coded trunk session messages batch listing plan reference size);
