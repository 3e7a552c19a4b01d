//! Outputs computed by others for whole checkpoints.

use crate::run::{How, run};
use k3_core::view::TokenId;
use k3_tests::{checkpoints, floats, json, own};
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
                        assert_eq!(u32::from(id.0), want[at], "layer {} router id", layer.0);
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

/// The project's own fixtures keep what their reference gives after the last id of the prompt.
#[test]
fn outputs_are_those_of_the_project_s_reference() {
    let mut checked = 0;
    for dir in own() {
        let expected = json(&dir.join("expected.json"));
        for prompt in expected["prompts"].as_array().expect("prompts") {
            let (input, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy_ids"]));
            let k = prompt["router_ids"][0].as_array().expect("router ids").len();
            for incremental in [true, false] {
                let how = How { incremental, chunk: Some(input.len()), ..How::default() };
                let out = run(&dir, &how, &input, greedy.len()).expect("a run");
                assert_eq!(out.generated, greedy, "{}, incremental: {incremental}", dir.display());
                let close = |what: &str, found: &[f32], expected: &Value, limit: f64| {
                    let expected = k3_tests::flat(expected);
                    assert_eq!(found.len(), expected.len(), "{what}");
                    let gap = found.iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
                    assert!(gap <= limit, "{}: {what} differs by {gap}", dir.display());
                };
                let vocab = out.logits.len() / (input.len() + greedy.len());
                let row = &out.logits[(input.len() - 1) * vocab..input.len() * vocab];
                close("logits", row, &prompt["logits"], LOGITS);
                let hidden = out.hidden.last().expect("layers");
                let width = hidden.len() / input.len();
                let last = &hidden[(input.len() - 1) * width..];
                close("hidden", last, &prompt["hidden_last"], HIDDEN * deviation(hidden).max(1.0));
                let mut router = Vec::new();
                for (_, ids, _) in &out.routed {
                    let mut ids = ids[ids.len() - k..].to_vec();
                    ids.sort_unstable();
                    router.extend(ids.into_iter().map(|id| f64::from(id.0)));
                }
                assert_eq!(router, k3_tests::flat(&prompt["router_ids"]), "{}: router", dir.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 4, "{checked} runs were checked");
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
