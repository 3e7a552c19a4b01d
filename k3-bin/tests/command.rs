//! The command as a user meets it.

use k3_tests::{checkpoints, json};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

fn k3() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_k3"));
    command.env_remove("K3_MODEL").stdin(Stdio::null());
    command
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn tiny() -> PathBuf {
    checkpoints().swap_remove(0)
}

#[test]
fn json_has_what_scripts_read() {
    for dir in checkpoints() {
        let expected = dir.join("expected/expected.json");
        if !expected.exists() {
            println!("SKIPPED: {} has no expected outputs", dir.display());
            continue;
        }
        let expected = json(&expected);
        for prompt in expected["prompts"].as_array().expect("prompts") {
            let greedy = prompt["greedy_ids"].as_array().expect("ids");
            let output = k3()
                .args(["run", "--ignore-eos", "--parse-special", "--json", "--memory", "64M", "--max-tokens"])
                .arg(greedy.len().to_string())
                .arg("--prompt")
                .arg(prompt["text"].as_str().expect("text"))
                .arg(&dir)
                .output()
                .expect("k3");
            assert_eq!(code(&output), 0, "{}", text(&output.stderr));
            let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
            assert_eq!(object["prompt_ids"], prompt["ids"]);
            assert_eq!(object["generated_ids"], prompt["greedy_ids"]);
            assert_eq!(object["finish_reason"], "length");
            assert_eq!(object["memory"]["budget_bytes"], 64_000_000);
            let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
            assert!(peak < 64_000_000, "peak {peak}");
            for (group, field) in [
                ("io", "bytes_read"),
                ("io", "trunk_hit_rate"),
                ("io", "expert_hit_rate"),
                ("seconds", "total"),
                ("seconds", "prefill"),
                ("seconds", "per_token"),
            ] {
                assert!(object[group][field].is_number(), "{group}.{field}: {object}");
            }
            if let Some(hex) = prompt["greedy_text_bytes_hex"].as_str() {
                let bytes: Vec<u8> =
                    (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex")).collect();
                assert_eq!(object["text"].as_str().expect("text"), String::from_utf8_lossy(&bytes));
                let output = k3()
                    .args(["run", "--ignore-eos", "--parse-special", "--quiet", "--memory", "64M", "--max-tokens"])
                    .arg(greedy.len().to_string())
                    .arg("--prompt")
                    .arg(prompt["text"].as_str().expect("text"))
                    .arg(&dir)
                    .output()
                    .expect("k3");
                assert_eq!(output.stdout.strip_suffix(b"\n").expect("a line"), bytes, "raw bytes on stdout");
                assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
            }
        }
    }
}

/// Peak memory stays under the budget even when that is the least that is accepted.
#[test]
fn the_least_budget_is_kept() {
    for dir in checkpoints() {
        let run = |memory: &str| {
            let mut command = k3();
            command.args(["run", "--json", "--ids", "5,6,7", "--max-tokens", "3", "--memory", memory]).arg(&dir);
            command.output().expect("k3")
        };
        let refused = run("1M");
        assert_eq!(code(&refused), 4, "{}", text(&refused.stderr));
        assert!(refused.stdout.is_empty());
        let message = text(&refused.stderr);
        let floor = message.split("the least is ").nth(1).and_then(|rest| rest.split(['(', ' ']).nth(3));
        let floor: u64 = floor.and_then(|f| f.parse().ok()).unwrap_or_else(|| panic!("no floor in {message}"));
        let output = run(&floor.to_string());
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("peak");
        println!("{}: floor {floor}, peak {peak}", dir.display());
        assert!(peak <= floor, "peak {peak} of {floor}");
    }
}

#[test]
fn usage_is_refused_with_2_and_says_what_to_do() {
    let dir = tiny();
    let dir = dir.to_str().expect("a path");
    let cases: &[(&[&str], &str)] = &[
        (&["run", dir], "--prompt"),
        (&["run", "--prompt", "x"], "K3_MODEL"),
        (&["run", dir, "--prompt", "x", "--ids", "1"], "cannot be used"),
        (&["run", dir, "--prompt", ""], "empty"),
        (&["run", dir, "--prompt-file", "/dev/null"], "empty"),
        (&["run", dir, "--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (&["run", dir, "--ids", "1,999999"], "999999"),
        (&["run", dir, "--ids", "1,2,3", "--context", "2"], "context holds 2"),
        (&["run", dir, "--ids", "1", "--memory", "much"], "much"),
        (&["run", dir, "--ids", "1", "--backend", "neon"], "neon"),
        (&["run", dir, "--ids", "1", "--threads", "0"], "threads"),
    ];
    for (args, part) in cases {
        let output = k3().args(*args).output().expect("k3");
        assert_eq!(code(&output), 2, "{args:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(text(&output.stderr).contains(part), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn the_context_ends_a_text_where_it_is_full() {
    let output = k3()
        .args(["run", "--json", "--ids", "1,2,3", "--context", "5", "--max-tokens", "20", "--ignore-eos"])
        .arg(tiny())
        .output()
        .expect("k3");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(object["finish_reason"], "context");
    // Positions 0..5 are read; the last of them still says which id comes next.
    assert_eq!(object["generated_ids"].as_array().expect("ids").len(), 3);
}

#[test]
fn logits_of_the_prompt_arrive_as_npy() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("logits.npy");
    let dir = tiny();
    let output = k3()
        .args(["run", "--ids", "1,2,3,4", "--max-tokens", "1", "--chunk", "3", "--dump-logits"])
        .arg(&path)
        .arg(&dir)
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let bytes = std::fs::read(&path).expect("the file");
    let config = json(&dir.join("config.json"));
    let vocab = config["text_config"]["vocab_size"].as_u64().expect("vocab");
    let header = text(&bytes[10..128]);
    assert!(header.contains(&format!("(4, {vocab})")), "{header}");
    assert_eq!(bytes.len() as u64, 128 + 16 * vocab);
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1);
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let mut child = k3()
        .args(["run", "--ids", "1,2,3", "--max-tokens", "2000", "--ignore-eos", "--quiet"])
        .arg(tiny())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}
