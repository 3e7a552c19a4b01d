//! Outputs computed by others for whole checkpoints.

use crate::run::{How, run};
use k3_core::view::TokenId;
use k3_tests::{checkpoints, floats, json};
use serde_json::Value;
use std::path::Path;

/// Tolerances of checkpoints that do not bring their own in a manifest.
const LOGITS: f64 = 2e-3;
const HIDDEN: f64 = 2e-3;
const ROUTER: f64 = 5e-5;

fn ids(value: &Value) -> Vec<TokenId> {
    let number = |v: &Value| TokenId(u32::try_from(v.as_u64().expect("an id")).expect("an id"));
    value.as_array().expect("ids").iter().map(number).collect()
}

fn worst(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max)
}

fn deviation(x: &[f32]) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand values")]
    let n = x.len() as f64;
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    (x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt()
}

fn check(dir: &Path, prompt: &Value, tolerance: &Value) {
    let expected = dir.join("expected");
    let limit = |name: &str, default: f64| tolerance[name].as_f64().unwrap_or(default);
    let file = |value: &Value| expected.join(value.as_str().expect("a file name"));
    let (input, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
    for incremental in [true, false] {
        let how = How { incremental, ..How::default() };
        let out = run(dir, &how, &input, greedy.len()).expect("a run");
        assert_eq!(out.generated, greedy, "{}: greedy ids, incremental: {incremental}", dir.display());
        let logits = floats(&file(&prompt["logits"]["file"]));
        let rows = prompt["logits"]["shape"][0].as_u64().expect("rows");
        let rows = usize::try_from(rows).expect("rows");
        let vocab = logits.len() / rows;
        let gap = worst(&out.logits[..rows * vocab], &logits);
        assert!(gap <= limit("logits_abs", LOGITS), "{}: logits differ by {gap}", dir.display());
        println!("{}: incremental {incremental}: logits within {gap:.2e}", dir.display());
        for (t, want) in ids(&prompt["argmax_ids"]).into_iter().enumerate() {
            let row = &out.logits[t * vocab..(t + 1) * vocab];
            assert_eq!(k3_core::ops::sample::argmax(row), Ok(Some(want)), "argmax at {t}");
        }
        if let Some(name) = prompt["hidden"]["file"].as_str() {
            let hidden = floats(&expected.join(name));
            for (layer, expected) in hidden.chunks_exact(out.hidden[0].len()).enumerate() {
                let gap = worst(&out.hidden[layer], expected) / deviation(expected);
                assert!(gap <= limit("hidden_abs_over_layer_std", HIDDEN), "layer {layer}: hidden differs by {gap}");
            }
            assert_eq!(hidden.len(), out.hidden.len() * out.hidden[0].len());
        }
        if let Some(name) = prompt["final"]["file"].as_str() {
            let gap = worst(&out.last, &floats(&expected.join(name)));
            assert!(gap <= limit("logits_abs", LOGITS), "final differs by {gap}");
        }
        if let Some(name) = prompt["router"]["ids"].as_str() {
            let bytes = std::fs::read(expected.join(name)).expect("router ids");
            let want: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            let weights = floats(&file(&prompt["router"]["weights"]));
            let k = usize::try_from(prompt["router"]["shape"][2].as_u64().expect("k")).expect("k");
            let mut at = 0;
            for (layer, ids, found) in &out.routed {
                for (ids, found) in ids.chunks_exact(k).zip(found.chunks_exact(k)) {
                    let mut pairs: Vec<_> = ids.iter().zip(found).collect();
                    pairs.sort_by_key(|p| *p.0);
                    for (id, weight) in pairs {
                        assert_eq!(*id, want[at], "layer {} router id", layer.0);
                        let gap = f64::from((weight - weights[at]).abs());
                        assert!(gap <= limit("router_weight_abs", ROUTER), "layer {} weight off by {gap}", layer.0);
                        at += 1;
                    }
                }
            }
            assert_eq!(at, want.len());
        }
    }
}

#[test]
fn outputs_are_those_of_independent_implementations() {
    for dir in checkpoints() {
        let path = dir.join("expected/expected.json");
        if !path.exists() {
            println!("SKIPPED: {} has no expected outputs", dir.display());
            continue;
        }
        let manifest = dir.join("MANIFEST.json");
        let tolerance = if manifest.exists() { json(&manifest)["tolerance"].clone() } else { Value::Null };
        let expected = json(&path);
        let prompts = expected["prompts"].as_array().expect("prompts");
        assert!(!prompts.is_empty());
        for prompt in prompts {
            check(&dir, prompt, &tolerance);
        }
    }
}
