//! The command as a user meets it.

#[path = "command/chat.rs"]
mod chat;
#[path = "command/ends.rs"]
mod ends;
#[path = "command/faults.rs"]
mod faults;
#[path = "command/ladder.rs"]
mod ladder;
#[path = "command/limits.rs"]
mod limits;
#[path = "command/pack.rs"]
mod pack;
#[path = "command/trust.rs"]
mod trust;

use k3_tests::{checkpoints, json};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

fn k3() -> Command {
    let [first, rest @ ..] = &program()[..] else { unreachable!("it has a name") };
    let mut command = Command::new(first);
    command.args(rest).env_remove("K3_MODEL").stdin(Stdio::null());
    command
}

/// The words that start k3 with SIGINT at its default. What a shell has put into the background, and these
/// tests with it, has that signal ignored, and k3 leaves it so.
fn program() -> Vec<&'static str> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
    let mut words = vec![env!("CARGO_BIN_EXE_k3")];
    if ignored & 2 != 0 {
        words.splice(..0, ["env", "--default-signal=INT"]);
    }
    words
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

/// Sends a signal to a process that nobody has waited for.
fn send(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("kill");
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

/// The tables of README.md and the objects have the same fields, so neither changes alone.
#[test]
fn json_has_the_fields_that_are_documented() {
    use std::collections::BTreeSet;
    fn names(cell: &str) -> Vec<String> {
        let quoted = cell.split('`').skip(1).step_by(2);
        quoted
            .filter(|n| *n != "null" && n.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
            .map(str::to_owned)
            .collect()
    }
    fn fields(object: &serde_json::Value) -> BTreeSet<String> {
        object.as_object().unwrap_or_else(|| panic!("no object: {object}")).keys().cloned().collect()
    }
    let readme = std::fs::read_to_string(k3_tests::root().join("README.md")).expect("README.md");
    let section = readme.split("\n### JSON\n").nth(1).and_then(|rest| rest.split("\n### ").next()).expect("a section");
    let mut tables = section.split("|---|---|\n").skip(1).map(|table| {
        let rows = table.lines().take_while(|line| line.starts_with('|'));
        rows.map(|row| row.trim_matches('|').split_once('|').expect("two cells")).collect::<Vec<_>>()
    });
    let (run, chat) = (tables.next().expect("of k3 run"), tables.next().expect("of k3 chat"));
    let common = ["--json", "--quiet", "--memory", "64M", "--max-tokens", "3", "--logprobs", "2", "--speculate", "2"];
    let found = object(k3().args(["run", "--ids", "5,6,7", "--ignore-eos"]).args(common).arg(tiny()));
    let documented: BTreeSet<_> = run.iter().flat_map(|(cell, _)| names(cell)).collect();
    assert_eq!(fields(&found), documented);
    let inner = ["stopped_by", "usage", "memory", "io", "speculation", "seconds"];
    let inside = |object: &serde_json::Value| {
        for field in inner {
            let (_, cell) = run.iter().find(|(names, _)| names.contains(field)).expect("documented");
            assert_eq!(fields(&object[field]), names(cell).into_iter().collect(), "{field}");
        }
        assert_eq!(fields(&object["logprobs"][0]), ["id", "logprob", "text", "top"].map(str::to_owned).into());
    };
    inside(&found);

    let found = object(k3().args(["chat", "--message", "x"]).args(common).arg(tiny()));
    let documented = documented.into_iter().filter(|n| !["prompt_ids", "text"].contains(&n.as_str()));
    assert_eq!(fields(&found), documented.chain(chat.iter().flat_map(|(cell, _)| names(cell))).collect());
    inside(&found);
    let expected = ["content", "reasoning_content", "role"].map(str::to_owned);
    assert!(fields(&found["message"]).is_superset(&expected.into()));

    // The story: the `io` of a batch, "as below", lacked a field of the table.
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (prompts(folder.path()), folder.path().join("out.jsonl"));
    let found = object(&mut batch(&input, &output, &["--json", "--memory", "64M"]));
    let told =
        readme.split("With `--json` the command prints at the end ").nth(1).and_then(|rest| rest.split("\n\n").next());
    // A list in brackets is of the fields within.
    let (mut outer, mut within) = (String::new(), std::collections::BTreeMap::new());
    for part in told.expect("the fields of a batch").split_inclusive(')') {
        let (before, list) = part.split_once('(').unwrap_or((part, ""));
        outer += before;
        within.extend(names(before).pop().filter(|_| !list.is_empty()).map(|name| (name, names(list))));
    }
    assert_eq!(fields(&found), names(&outer).into_iter().collect());
    assert_eq!(within.keys().collect::<Vec<_>>(), ["failed", "seconds", "usage"]);
    for (field, names) in within.iter().filter(|(field, _)| *field != "failed") {
        assert_eq!(fields(&found[field]), names.iter().cloned().collect(), "{field}");
    }
    for field in ["memory", "io"] {
        let (_, cell) = run.iter().find(|(names, _)| names.contains(field)).expect("documented");
        assert_eq!(fields(&found[field]), names(cell).into_iter().collect(), "{field}");
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
        #[cfg(not(feature = "demo"))]
        (&["run", "--prompt", "x"], "K3_MODEL"),
        (&["run", dir, "--prompt", "x", "--ids", "1"], "cannot be used"),
        (&["run", dir, "--prompt", ""], "empty"),
        (&["run", dir, "--prompt-file", "/dev/null"], "empty"),
        (&["run", dir, "--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (&["run", dir, "--ids", "1,999999"], "999999"),
        (&["run", dir, "--ids", "1,2,3", "--context", "2"], "context holds 2"),
        (&["run", dir, "--ids", "1", "--memory", "much"], "much"),
        (&["run", dir, "--ids", "1", "--memory", "-1"], "write 2G, 12GiB or auto"),
        (&["run", dir, "--ids", "1", "--backend", "neon"], "neon"),
        (&["run", dir, "--ids", "1", "--threads", "0"], "threads"),
        (&["perplexity", dir], "--file"),
        (&["perplexity", dir, "--file", "/dev/null"], "0 tokens"),
        (&["perplexity", dir, "--file", "/dev/null", "--nll-out", "/no/such/folder"], "/no/such/folder"),
        (&["perplexity", dir, "--file", "/dev/null", "--nll-out", dir], "directory"),
        (&["cachesim", "/dev/null", "--svg", "/no/such/folder"], "/no/such/folder"),
        (&["run", dir, "--ids", "1", "--context", "0"], "1 token,"),
        (&["ladder", dir, "--budgets", "2G,much"], "much"),
        (&["ladder", dir, "--budgets", "2G", "--memory", "2G"], "--memory"),
        (&["ladder", dir, "--budgets", "2G", "--out", "/no/such/folder"], "/no/such/folder"),
        (&["ladder", dir, "--budgets", "2G", "--ids", "999999"], "999999"),
        (&["ladder", dir, "--budgets", "2G", "--prompt", ""], "empty"),
        (&["ladder", dir, "--budgets", "2G", "--max-tokens", "0"], "--max-tokens"),
        (&["perplexity", dir, "--file", "/nowhere/at/all"], "/nowhere/at/all"),
        (&["perplexity", dir, "--file", "/dev/null", "--window", "0"], "--window"),
        (&["perplexity", dir, "--file", "/dev/null", "--backend", "neon"], "neon"),
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

/// The numbers of a one-byte-order `.npy` file after its header.
fn npy<const N: usize, T>(path: &Path, number: impl Fn([u8; N]) -> T) -> Vec<T> {
    let bytes = std::fs::read(path).expect("the file");
    let at = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[at..].as_chunks().0.iter().map(|&b| number(b)).collect()
}

fn object(command: &mut Command) -> serde_json::Value {
    let output = command.output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

const TEXT: &str = "In the beginning was a tiny text, \u{20ac} and all.\nIt has 2 lines!\n";

/// The logits that `run` dumps, and arithmetic of the test's own, give the numbers of `perplexity`.
#[test]
#[expect(clippy::disallowed_methods, reason = "the platform's exp is the independent judge here")]
fn perplexity_is_that_of_the_logits() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, dump, out) = (folder.path().join("text"), folder.path().join("l.npy"), folder.path().join("nll.npy"));
    std::fs::write(&file, TEXT).expect("write");
    let dir = tiny();
    let vocab = json(&dir.join("config.json"))["text_config"]["vocab_size"].as_u64().expect("vocab");
    let vocab = usize::try_from(vocab).expect("small");
    let prompt = object(k3().args(["run", "--json", "--max-tokens", "0", "--prompt-file"]).arg(&file).arg(&dir));
    let ids: Vec<u64> =
        prompt["prompt_ids"].as_array().expect("ids").iter().filter_map(serde_json::Value::as_u64).collect();
    assert!(ids.len() > 30, "{ids:?}");
    // A window longer than the text is the whole text.
    for window in [1, 7, ids.len() - 1, 100_000] {
        let mut expected = Vec::new();
        for (w, inputs) in ids[..ids.len() - 1].chunks(window).enumerate() {
            let list = inputs.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
            let run = ["run", "--json", "--max-tokens", "0", "--ids", &list, "--dump-logits"];
            object(k3().args(run).arg(&dump).arg(&dir));
            for (i, row) in npy(&dump, f32::from_le_bytes).chunks(vocab).enumerate() {
                let target = usize::try_from(ids[w * window + i + 1]).expect("an id");
                let sum: f64 = row.iter().rev().map(|&l| f64::from(l).exp()).sum();
                expected.push(sum.ln() - f64::from(row[target]));
            }
        }
        let mut command = k3();
        command.args(["perplexity", "--json", "--window", &window.to_string(), "--file"]).arg(&file);
        let found = object(command.arg("--nll-out").arg(&out).arg(&dir));
        let near =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-12 * expected, "{found} {expected}");
        let each = npy(&out, f64::from_le_bytes);
        assert_eq!(each.len(), expected.len());
        each.iter().zip(&expected).for_each(|(&found, &expected)| near(found, expected));
        let total: f64 = expected.iter().sum();
        let first = object(k3().args(["run", "--json", "--max-tokens", "0", "--ids", &ids[0].to_string()]).arg(&dir));
        assert_eq!(first["prompt_ids"][0], ids[0]);
        // The text begins with a token that is one character, "I" or more of it.
        let bytes = found["bytes"].as_u64().expect("bytes");
        assert!(bytes < TEXT.len() as u64 && bytes + 4 > TEXT.len() as u64, "{bytes}");
        assert_eq!(found["tokens"], ids.len());
        assert_eq!(found["counted"], expected.len());
        assert_eq!(found["window"], window.min(ids.len() - 1));
        assert_eq!(found["complete"], true);
        let mean = total / expected.len() as f64;
        near(found["nll"].as_f64().expect("nll"), mean);
        near(found["perplexity"].as_f64().expect("perplexity"), mean.exp());
        near(found["bits_per_byte"].as_f64().expect("bits"), total / 2f64.ln() / bytes as f64);
    }
}

#[test]
fn perplexity_depends_on_nothing_but_model_text_and_window() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, out) = (folder.path().join("text"), folder.path().join("nll.npy"));
    std::fs::write(&file, TEXT).expect("write");
    for dir in checkpoints() {
        let run = |more: &[&str]| {
            let mut command = k3();
            command.args(["perplexity", "--json", "--window", "20", "--file"]).arg(&file).args(more);
            let object = object(command.arg("--nll-out").arg(&out).arg(&dir));
            let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
            assert!(peak <= object["memory"]["budget_bytes"].as_u64().expect("a budget"), "{object}");
            (std::fs::read(&out).expect("nll"), object["nll"].to_string(), object["perplexity"].to_string())
        };
        let expected = run(&["--backend", "scalar", "--threads", "1", "--chunk", "1"]);
        let variants: [&[&str]; 6] = [
            &[],
            &["--chunk", "3"],
            &["--chunk", "20", "--threads", "3"],
            &["--io", "buffered"],
            &["--memory", "64M"],
            &["--memory", "20M", "--chunk", "2"],
        ];
        for variant in variants {
            assert!(run(variant) == expected, "{variant:?} gives other bits");
        }
    }
    // Standard input is a file as well, and people get lines.
    let output = k3()
        .args(["perplexity", "--quiet", "--file", "-"])
        .arg(tiny())
        .stdin(std::fs::File::open(&file).expect("open"))
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(output.stderr.is_empty());
    let lines = text(&output.stdout);
    for name in ["tokens", "counted", "bytes", "nll", "perplexity", "bits_per_byte", "seconds"] {
        assert!(lines.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}: {lines}");
    }
}

/// `k3 run` without a model.
#[cfg(feature = "demo")]
mod demo {
    use super::*;
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt as _;

    /// No process may write here, not even the superuser's.
    const UNWRITABLE: &str = "/proc/self";

    fn demo() -> Command {
        let mut command = k3();
        command.args(["run", "--prompt", "In the beginning", "--max-tokens", "5", "--memory", "64M", "--ignore-eos"]);
        for name in ["XDG_CACHE_HOME", "HOME", "TMPDIR"] {
            command.env_remove(name);
        }
        command
    }

    /// The text that the files in the repository give.
    fn expected() -> Vec<u8> {
        let output = demo().arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("demo")).output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        assert!(!output.stdout.is_empty());
        output.stdout
    }

    fn check(output: &Output) {
        assert_eq!(code(output), 0, "{}", text(&output.stderr));
        assert_eq!(output.stdout, expected(), "{}", text(&output.stderr));
    }

    /// The folder the demo was unpacked to, the only thing in the cache.
    fn unpacked(cache: &Path) -> PathBuf {
        let mut entries = std::fs::read_dir(cache.join("k3")).expect("k3");
        let folder = entries.next().expect("a folder").expect("a folder").path();
        assert!(entries.next().is_none());
        folder
    }

    /// Names, inodes and contents.
    fn files(dir: &Path) -> BTreeMap<PathBuf, (u64, Vec<u8>)> {
        let entries = std::fs::read_dir(dir).expect("read_dir").map(|e| e.expect("entry").path());
        entries
            .map(|p| (p.clone(), (p.metadata().expect("metadata").ino(), std::fs::read(&p).expect("read"))))
            .collect()
    }

    #[test]
    fn runs_and_is_unpacked_once() {
        let cache = tempfile::tempdir().expect("a folder");
        check(&demo().env("XDG_CACHE_HOME", cache.path()).output().expect("k3"));
        let before = files(&unpacked(cache.path()));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
        for (path, (_, bytes)) in &before {
            assert!(std::fs::read(source.join(path.file_name().expect("a name"))).expect("read") == *bytes);
        }
        let output = demo().env("XDG_CACHE_HOME", cache.path()).output().expect("k3");
        check(&output);
        assert!(text(&output.stderr).contains("demo model"));
        assert!(files(&unpacked(cache.path())) == before, "written again");
        let quiet = demo().arg("--quiet").env("XDG_CACHE_HOME", cache.path()).output().expect("k3");
        check(&quiet);
        assert!(quiet.stderr.is_empty());
        // Other commands have it too.
        let file = cache.path().join("text");
        std::fs::write(&file, TEXT).expect("write");
        let mut command = k3();
        command.args(["perplexity", "--json", "--memory", "64M", "--file"]).arg(&file);
        let found = object(command.env("XDG_CACHE_HOME", cache.path()));
        assert!(found["perplexity"].as_f64().is_some_and(|p| p > 1.0), "{found}");
        // A variable that lost its value is not taken for "no model".
        let output = demo().env("XDG_CACHE_HOME", cache.path()).env("K3_MODEL", "").output().expect("k3");
        assert_eq!(code(&output), 2, "{}", text(&output.stderr));
        // The other variable.
        let home = tempfile::tempdir().expect("a folder");
        check(&demo().env("HOME", home.path()).output().expect("k3"));
        unpacked(&home.path().join(".cache"));
    }

    #[test]
    fn processes_may_race_and_be_killed() {
        let cache = tempfile::tempdir().expect("a folder");
        for millis in [1, 4, 8] {
            let mut child = demo()
                .env("XDG_CACHE_HOME", cache.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("k3");
            std::thread::sleep(std::time::Duration::from_millis(millis));
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
        let race = || {
            let mut command = demo();
            command.env("XDG_CACHE_HOME", cache.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().expect("k3")
        };
        let racing = [race(), race(), race(), race()];
        racing.into_iter().for_each(|child| check(&child.wait_with_output().expect("k3")));
        unpacked(cache.path());
    }

    #[test]
    fn damage_is_mended() {
        let cache = tempfile::tempdir().expect("a folder");
        let run = || check(&demo().env("XDG_CACHE_HOME", cache.path()).output().expect("k3"));
        run();
        let folder = unpacked(cache.path());
        let before = files(&folder);
        let shard = before.keys().find(|p| p.extension().is_some_and(|e| e == "safetensors")).expect("a shard");
        let whole = &before[shard].1;
        std::fs::write(shard, &whole[..whole.len() / 2]).expect("write");
        run();
        let mut flipped = whole.clone();
        *flipped.last_mut().expect("bytes") ^= 1;
        std::fs::write(shard, &flipped).expect("write");
        run();
        std::fs::remove_file(folder.join("config.json")).expect("remove");
        run();
        let after = files(&folder);
        assert!(before.keys().eq(after.keys()));
        assert!(before.iter().zip(&after).all(|((_, (_, before)), (_, (_, after)))| before == after));
    }

    #[test]
    fn without_a_cache_it_is_read_from_the_program() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        for cache in [None, Some(Path::new(UNWRITABLE)), Some(file.path()), Some(Path::new("relative"))] {
            let temporary = tempfile::tempdir().expect("a folder");
            let mut command = demo();
            command.env("TMPDIR", temporary.path());
            if let Some(cache) = cache {
                command.env("XDG_CACHE_HOME", cache);
            }
            let output = command.output().expect("k3");
            check(&output);
            assert!(text(&output.stderr).contains("from k3 itself"), "{}", text(&output.stderr));
            assert_eq!(std::fs::read_dir(temporary.path()).expect("read_dir").count(), 0);
        }
    }

    #[test]
    fn a_full_disk_is_no_obstacle_and_what_was_begun_is_taken_away() {
        // Played by a limit on the size of files.
        let folder = tempfile::tempdir().expect("a folder");
        let mut shell = Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f 8; exec \"$0\" run --prompt x", env!("CARGO_BIN_EXE_k3")]);
        shell.env_remove("K3_MODEL").env("XDG_CACHE_HOME", folder.path()).env("TMPDIR", folder.path());
        let output = shell.output().expect("sh");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let left = std::fs::read_dir(unpacked(folder.path())).expect("read_dir");
        assert!(left.map(|e| e.expect("entry").file_name()).all(|n| !n.to_string_lossy().ends_with(".part")));
        assert_eq!(std::fs::read_dir(folder.path()).expect("read_dir").count(), 1, "k3 only");
    }

    /// Unpacking touches the demo's pages in the binary, and these count.
    #[test]
    fn the_least_budget_is_kept_while_unpacking_and_without() {
        let cache = tempfile::tempdir().expect("a folder");
        let never = |memory: &str| run_in(Path::new(UNWRITABLE), memory);
        least_is_kept(&|memory| run_in(&cache.path().join(memory), memory));
        least_is_kept(&never);
    }

    fn run_in(cache: &Path, memory: &str) -> Output {
        let mut command = k3();
        command.args(["run", "--json", "--ids", "5,6,7", "--max-tokens", "3", "--memory", memory]);
        command.env("XDG_CACHE_HOME", cache).output().expect("k3")
    }

    fn least_is_kept(run: &dyn Fn(&str) -> Output) {
        let message = text(&run("1M").stderr);
        let floor = message.split("the least is ").nth(1).and_then(|rest| rest.split(['(', ' ']).nth(3));
        let floor: u64 = floor.and_then(|f| f.parse().ok()).unwrap_or_else(|| panic!("no floor in {message}"));
        let output = run(&floor.to_string());
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("peak");
        println!("floor {floor}, peak {peak}");
        assert!(peak <= floor, "peak {peak} of {floor}");
    }
}

#[test]
fn a_plan_is_that_of_the_run() {
    let dir = tiny();
    let plan = |memory: &str| {
        let mut command = k3();
        command
            .args(["plan", "--json", "--disk", "2", "--context", "5", "--threads", "2", "--memory", memory])
            .arg(&dir);
        command.output().expect("k3")
    };
    assert_eq!(code(&plan("1M")), 4);
    for memory in ["17M", "18M", "40M"] {
        let output = plan(memory);
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let sum: u64 = object["ledger"].as_array().expect("ledger").iter().filter_map(|e| e["bytes"].as_u64()).sum();
        assert_eq!(object["memory"]["planned_bytes"], sum);
        let trunk = object["read_per_token"]["trunk_bytes"].as_u64().expect("bytes");
        assert_eq!(trunk == 0, object["memory"]["head_pinned"] == true, "{memory}: {object}");
        let seconds = object["seconds_per_token"]["at_least"].as_f64().expect("seconds");
        #[expect(clippy::cast_precision_loss, reason = "a few megabytes")]
        let expected = trunk as f64 / 2e9;
        assert!((seconds - expected).abs() < 1e-9);
        // Five positions, read in one chunk: the run it describes plans the same.
        let run = k3()
            .args(["run", "--json", "--ids", "1,2,3,4,5", "--max-tokens", "1", "--threads", "2", "--memory", memory])
            .arg(&dir)
            .output()
            .expect("k3");
        let run: serde_json::Value = serde_json::from_slice(&run.stdout).expect("JSON");
        for field in ["planned_bytes", "pinned_layers", "head_pinned", "arena_experts", "chunk"] {
            assert_eq!(object["memory"][field], run["memory"][field], "{memory}: {field}");
        }
    }
    // The story: a speed that no number of bytes a second can be gave a null where a number belongs.
    for speed in ["0", "-1", "nan", "inf", "1e305", "1e-300"] {
        let output = k3().args(["plan", "--disk", speed]).arg(&dir).output().expect("k3");
        assert_eq!(code(&output), 2, "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("not a speed"), "{}", text(&output.stderr));
    }
}

/// The story: a target for logits was replaced by a regular file whatever it was, and a folder was
/// refused only when all the work was done.
#[test]
fn logits_replace_files_and_nothing_else() {
    use std::os::unix::fs::FileTypeExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let dump = |path: &std::path::Path| {
        let mut command = k3();
        command.args(["run", "--ids", "1,2", "--max-tokens", "1", "--quiet", "--dump-logits"]).arg(path).arg(tiny());
        command.output().expect("k3")
    };
    let refused = dump(folder.path());
    assert_eq!(code(&refused), 2, "{}", text(&refused.stderr));
    assert!(refused.stdout.is_empty());
    assert_eq!(code(&dump(&folder.path().join("no/such/folder.npy"))), 2);

    let (file, link) = (folder.path().join("file.npy"), folder.path().join("link.npy"));
    std::fs::write(&file, "old").expect("write");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    assert_eq!(code(&dump(&link)), 0);
    assert!(std::fs::symlink_metadata(&link).expect("metadata").is_symlink());
    let whole = std::fs::read(&file).expect("read");
    assert!(whole.starts_with(b"\x93NUMPY"));

    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read(pipe).expect("read")
    });
    assert_eq!(code(&dump(&pipe)), 0);
    assert_eq!(reader.join().expect("reader"), whole);
    assert!(std::fs::symlink_metadata(&pipe).expect("metadata").file_type().is_fifo());
    assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 3, "nothing is left behind");
}

/// The story: whoever mistyped an option's file was told that MODEL_DIR is incomplete.
#[test]
fn a_file_that_an_option_names_is_the_users_mistake() {
    let model = tiny();
    let folder = tempfile::tempdir().expect("a folder");
    let (model, folder) = (model.to_str().expect("a path"), folder.path().to_str().expect("a path"));
    for file in ["/no/such/file.npy", folder] {
        let hint = "name a file that can be read";
        for (option, args) in [
            ("--trunk", &["run", "--ids", "1", model, "--trunk", file][..]),
            ("--trunk", &["plan", model, "--trunk", file]),
            ("--trunk", &["inspect", model, "--trunk", file]),
            ("--logits", &["verify", model, "--ids", "1", "--logits", file]),
            ("--verify", &["pack", "--verify", file]),
            ("--verify", &["pack", "--verify", file, model]),
        ] {
            let output = k3().args(args).output().expect("k3");
            let message = text(&output.stderr);
            assert_eq!(code(&output), 2, "{args:?}: {message}");
            assert!(message.contains(&format!("{option} {file}: ")) && message.contains(hint), "{args:?}: {message}");
        }
    }
    // A directory that is none is still no checkpoint.
    let output = k3().args(["pack", "--verify", "/no/such", "/no/such/either"]).output().expect("k3");
    assert_eq!(code(&output), 2);
    let output = k3().args(["run", "--ids", "1", "/no/such"]).output().expect("k3");
    assert!(code(&output) == 3 && text(&output.stderr).contains("MODEL_DIR"), "{}", text(&output.stderr));
}

#[test]
fn a_signal_ends_a_text_with_what_there_is() {
    for (signal, expected) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let child = k3()
            .args(["run", "--ids", "1,2,3", "--max-tokens", "1000000", "--ignore-eos", "--json", "--quiet"])
            .arg(tiny())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("k3");
        std::thread::sleep(std::time::Duration::from_millis(700));
        send(&child, signal);
        let output = child.wait_with_output().expect("k3");
        assert_eq!(code(&output), expected, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(object["finish_reason"], "cancelled");
    }
}

#[test]
fn ids_need_no_vocabulary_and_damage_is_told_however_quiet() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("model");
    k3_tests::copy_dir(&tiny(), &dir);
    std::fs::remove_file(dir.join("tiktoken.model")).expect("remove");
    // Every scale byte of the experts' shards becomes NaN: the header says where they are.
    for entry in std::fs::read_dir(&dir).expect("folder") {
        let path = entry.expect("entry").path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let mut bytes = std::fs::read(&path).expect("read");
        let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
        for (name, entry) in header.as_object().expect("header") {
            if name.ends_with("w1.weight_scale") {
                let at =
                    |i: usize| 8 + len + usize::try_from(entry["data_offsets"][i].as_u64().expect("at")).expect("at");
                bytes[at(0)..at(1)].fill(255);
            }
        }
        std::fs::write(&path, bytes).expect("write");
    }
    let run = |extra: &[&str]| {
        let mut command = k3();
        command
            .args(["run", "--ids", " 1, 2,3 ", "--max-tokens", "3", "--ignore-eos", "--quiet"])
            .args(extra)
            .arg(&dir);
        command.output().expect("k3")
    };
    let output = run(&[]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("NaN (255)"), "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_slice(&run(&["--json"]).stdout).expect("JSON");
    let ids: Vec<String> = object["generated_ids"].as_array().expect("ids").iter().map(ToString::to_string).collect();
    assert_eq!(text(&output.stdout), format!("{}\n", ids.join(",")));
    assert!(object["text"].is_null());
    let refused = k3().args(["run", "--prompt", "x"]).arg(&dir).output().expect("k3");
    assert_eq!(code(&refused), 3, "{}", text(&refused.stderr));
}

#[test]
fn a_trace_is_replayed_as_the_run_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let (path, svg) = (folder.path().join("trace"), folder.path().join("curve.svg"));
    for policy in ["frequency", "lru"] {
        let output = k3()
            .args([
                "run",
                "--json",
                "--quiet",
                "--ids",
                "1,2,3",
                "--max-tokens",
                "30",
                "--ignore-eos",
                "--memory",
                "17M",
            ])
            .args(["--chunk", "3", "--experts", policy, "--trace"])
            .arg(&path)
            .arg(tiny())
            .output()
            .expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let run: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let slots = run["memory"]["arena_experts"].to_string();
        let output =
            k3().args(["cachesim", "--json", "--slots", &slots, "--svg"]).args([&svg, &path]).output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let sim: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        // Eight layers, three experts each, for each token that was read behind the prompt.
        assert_eq!(sim["requests"], 29 * 8 * 3);
        let row = &sim["hit_rates"][0];
        assert!(row[policy].as_f64().expect("a rate") <= row["optimum"].as_f64().expect("a rate"));
        assert!(std::fs::read_to_string(&svg).expect("svg").contains("polyline"));
    }
    // The story: a refused run left a header where a trace had been, and a picture replaced its own trace.
    let whole = std::fs::read(&path).expect("read");
    let refused =
        k3().args(["run", "--ids", "1", "--memory", "1M", "--trace"]).args([&path, &tiny()]).output().expect("k3");
    assert_eq!(code(&refused), 4);
    let refused = k3().args(["cachesim", "--svg"]).args([&path, &path]).output().expect("k3");
    assert_eq!(code(&refused), 2);
    assert_eq!(std::fs::read(&path).expect("read"), whole);
    std::fs::write(&path, &whole[..16]).expect("write");
    assert_eq!(code(&k3().arg("cachesim").arg(&path).output().expect("k3")), 3);
    std::fs::write(&path, "no trace").expect("write");
    assert_eq!(code(&k3().arg("cachesim").arg(&path).output().expect("k3")), 3);
}

/// The recorded trace of the released model, where it is at hand: the optimum is the published one, and
/// the default policy is never far below LRU and far above it where LRU hits nothing.
#[test]
fn the_recorded_trace_gives_the_published_optimum() {
    let Some(path) = k3_tests::outside("data/expert_trace.bin") else { return };
    let output = k3()
        .args(["cachesim", "--json", "--pairs", "5", "--slots", "455,911,1367,1823,2735,3647,7294"])
        .arg(path)
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let sim: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rates = sim["hit_rates"].as_array().expect("rows");
    let column = |name: &str| rates.iter().map(|r| r[name].as_f64().expect("a rate")).collect::<Vec<_>>();
    let published = [0.294, 0.451, 0.519, 0.563, 0.580, 0.580, 0.580];
    for (found, expected) in column("optimum").iter().zip(published) {
        assert!((found - expected).abs() < 0.0006, "{found} {expected}");
    }
    for ((frequency, lru), least) in
        column("frequency").iter().zip(column("lru")).zip([0.09, 0.18, 0.25, 0.0, 0.0, 0.0, 0.0])
    {
        assert!(*frequency >= least && *frequency >= lru - 0.015, "{frequency} {lru}");
    }
}

/// The gate that fluent but wrong engines fail: the demo's held-out text surprises the engine as much
/// as it does the reference, window by window, and less than it does a trigram.
#[test]
fn the_demo_is_as_surprised_as_its_reference() {
    let demo = k3_tests::root().join("fixtures/demo");
    let eval = json(&demo.join("eval.json"));
    let windows: Vec<f64> =
        eval["first_windows_nll"].as_array().expect("windows").iter().filter_map(serde_json::Value::as_f64).collect();
    let window = usize::try_from(eval["context"].as_u64().expect("context")).expect("context");
    let whole = std::fs::read(demo.join("heldout.txt")).expect("the held-out text");
    let folder = tempfile::tempdir().expect("a folder");
    let (text, out) = (folder.path().join("text"), folder.path().join("nll.npy"));
    // Ten bytes a token are more than enough for the first windows; where the text is cut, ids differ.
    std::fs::write(&text, &whole[..windows.len() * window * 10]).expect("write");
    let output = k3()
        .args(["perplexity", "--quiet", "--json", "--memory", "64M", "--window", &window.to_string(), "--nll-out"])
        .arg(&out)
        .arg("--file")
        .args([&text, &demo])
        .output()
        .expect("k3");
    assert_eq!(code(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = std::fs::read(&out).expect("nll");
    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let nll: Vec<f64> = bytes[header..].as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
    let trigram = eval["trigram"]["nll"].as_f64().expect("trigram");
    assert!(windows.len() >= 8 && eval["model"]["nll"].as_f64().expect("nll") < trigram - 0.5);
    for (i, (expected, found)) in windows.iter().zip(nll.chunks_exact(window)).enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "a window")]
        let found = found.iter().sum::<f64>() / window as f64;
        // The reference computes in f32: a hundredth of what is asked for is left for that.
        assert!((found / expected - 1.0).abs() < 1e-6, "window {i}: {found}, expected {expected}");
    }
}

/// The story: the user's own text, or one of two outputs, was silently replaced by the other.
#[test]
fn an_output_never_replaces_what_the_command_reads_or_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("text");
    std::fs::write(&path, "a text of some length").expect("write");
    let name = path.to_str().expect("a path");
    for args in [
        &["perplexity", "--file", name, "--nll-out", name][..],
        &["run", "--prompt-file", name, "--dump-logits", name],
        &["run", "--prompt-file", name, "--trace", name],
        &["run", "--ids", "1", "--trace", "new", "--dump-logits", "new"],
        &["ladder", "--prompt-file", name, "--out", name],
        &["ladder", "--svg", "new", "--out", "new"],
    ] {
        let output = k3().args(args).arg(tiny()).output().expect("k3");
        assert_eq!(code(&output), 2, "{args:?}: {}", text(&output.stderr));
    }
    assert_eq!(std::fs::read(&path).expect("read"), b"a text of some length");
    // Nor a file of the model.
    let model = folder.path().join("model");
    k3_tests::copy_dir(&tiny(), &model);
    let config = std::fs::read(model.join("config.json")).expect("read");
    for args in [
        &["run", "--ids", "1", "--trace"][..],
        &["run", "--ids", "1", "--dump-logits"],
        &["perplexity", "--file", name, "--nll-out"],
        &["ladder", "--out"],
        &["ladder", "--svg"],
    ] {
        let output = k3().args(args).arg(model.join("config.json")).arg(&model).output().expect("k3");
        assert_eq!(code(&output), 2, "{args:?}: {}", text(&output.stderr));
    }
    assert_eq!(std::fs::read(model.join("config.json")).expect("read"), config);
}

#[test]
#[cfg(not(feature = "demo"))]
fn without_the_demo_nothing_speaks_of_it() {
    for command in ["run", "perplexity", "plan", "ladder"] {
        let output = k3().args([command, "--help"]).output().expect("k3");
        assert!(!text(&output.stdout).contains("demo"), "{}", text(&output.stdout));
    }
}

#[test]
fn guesses_change_no_text_and_are_counted() {
    let prompt = "the king and the queen, the king and the queen, the king and the queen, the king";
    let run = |more: &[&str]| {
        let mut command = k3();
        command.args(["run", "--json", "--quiet", "--memory", "64M", "--max-tokens", "40", "--prompt", prompt]);
        command.args(["--ignore-eos"]).args(more).arg(k3_tests::root().join("fixtures/demo"));
        object(&mut command)
    };
    let plain = run(&[]);
    assert!(plain["speculation"].is_null());
    let (mut drafted, mut accepted) = (0, 0);
    for n in ["1", "3", "8"] {
        let guessed = run(&["--speculate", n]);
        assert_eq!(guessed["generated_ids"], plain["generated_ids"], "{n}");
        assert_eq!(guessed["text"], plain["text"]);
        let peak = guessed["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
        assert!(peak < 64_000_000, "peak {peak}");
        let count = |field: &str| guessed["speculation"][field].as_u64().expect("a count");
        assert!(count("accepted") <= count("drafted") && count("passes") <= count("drafted"));
        (drafted, accepted) = (drafted + count("drafted"), accepted + count("accepted"));
    }
    assert!(drafted > 0 && accepted > 0, "{accepted} of {drafted}: this text repeats itself");
    let refused =
        k3().args(["run", "--ids", "1", "--speculate", "8", "--chunk", "8"]).arg(tiny()).output().expect("k3");
    assert_eq!(code(&refused), 2);
    assert!(text(&refused.stderr).contains("9 positions"), "{}", text(&refused.stderr));
}

/// A batch of the demo, with prompts of all kinds.
fn prompts(folder: &Path) -> PathBuf {
    let path = folder.join("prompts.jsonl");
    let lines = [
        r#"{"id": "a", "prompt": "In the beginning"}"#,
        r#"{"id": 1, "ids": [40, 5, 6], "max_tokens": 3}"#,
        "",
        r#"{"id": "1", "prompt": "What is the matter with the long prompt of this line, and with you? Nothing."}"#,
        r#"{"id": "none", "prompt": "And", "max_tokens": 0}"#,
        r#"{"prompt": "The \u20ac of\nthe", "id": "e", "max_tokens": 20}"#,
        r#"{"id": "last", "ids": [7], "max_tokens": 1}"#,
    ];
    std::fs::write(&path, lines.join("\n")).expect("write");
    path
}

fn batch(input: &Path, output: &Path, more: &[&str]) -> Command {
    let mut command = k3();
    command.arg("batch").arg("--input").arg(input).arg("--output").arg(output);
    command.args(["--quiet", "--max-tokens", "9", "--ignore-eos"]).args(more);
    command.arg(k3_tests::root().join("fixtures/demo"));
    command
}

/// The lines of an output below its header, by id.
fn results(path: &Path) -> std::collections::BTreeMap<String, serde_json::Value> {
    let text = std::fs::read_to_string(path).expect("results");
    assert!(text.ends_with('\n'));
    let lines = text.lines().skip(1).map(|line| serde_json::from_str(line).expect("JSON"));
    lines.map(|v: serde_json::Value| (v["id"].to_string(), v)).collect()
}

#[test]
fn a_batch_gives_the_texts_of_single_runs_and_goes_on_where_it_was_broken_off() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (prompts(folder.path()), folder.path().join("out.jsonl"));
    let object = object(&mut batch(&input, &output, &["--json", "--memory", "64M", "--in-flight", "3"]));
    assert_eq!((&object["ended"], &object["done_before"]), (&6.into(), &0.into()));
    assert_eq!(object["in_flight"], 3);
    let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
    assert!(peak < 64_000_000, "peak {peak}");
    let whole = results(&output);
    assert_eq!(whole.len(), 6);
    for line in std::fs::read_to_string(&input).expect("input").lines().filter(|l| !l.is_empty()) {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let mut alone = k3();
        alone.args(["run", "--json", "--quiet", "--memory", "64M", "--ignore-eos", "--max-tokens"]);
        alone.arg(line["max_tokens"].as_u64().unwrap_or(9).to_string());
        match line["prompt"].as_str() {
            Some(prompt) => alone.args(["--prompt", prompt]),
            None => alone.args(["--ids", line["ids"].to_string().trim_matches(['[', ']'])]),
        };
        let alone = self::object(alone.arg(k3_tests::root().join("fixtures/demo")));
        let result = &whole[&line["id"].to_string()];
        for field in ["generated_ids", "text", "finish_reason"] {
            assert_eq!(result[field], alone[field], "{line}");
        }
    }

    // Broken off in the middle of each line, and of the header; other budgets, threads and numbers.
    let bytes = std::fs::read(&output).expect("results");
    let ends: Vec<_> = bytes.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1).collect();
    for (cut, more) in [
        (0, ["--memory", "40M", "--threads", "1"]),
        (ends[0] - 9, ["--in-flight", "1", "--chunk", "2"]),
        (ends[0], ["--in-flight", "6", "--chunk", "4"]),
        (ends[2] + 11, ["--memory", "64M", "--backend", "scalar"]),
        (ends[5], ["--memory", "64M", "--threads", "3"]),
        (ends[6], ["--memory", "64M", "--threads", "2"]),
    ] {
        std::fs::write(&output, &bytes[..cut]).expect("write");
        let object = self::object(&mut batch(&input, &output, &[&more[..], &["--json"]].concat()));
        let before = ends.iter().filter(|end| **end <= cut).count().saturating_sub(1);
        assert_eq!((&object["done_before"], &object["ended"]), (&before.into(), &(6 - before).into()), "cut at {cut}");
        assert!(results(&output) == whole, "cut at {cut}");
    }

    // What is not of this batch is refused and stays as it is.
    let refused = |output: &Path, more: &[&str], code: i32, says: &str| {
        let before = std::fs::read(output).ok();
        let answer = batch(&input, output, more).output().expect("k3");
        assert_eq!((self::code(&answer), text(&answer.stdout)), (code, String::new()), "{}", text(&answer.stderr));
        assert!(text(&answer.stderr).contains(says), "{}", text(&answer.stderr));
        assert!(std::fs::read(output).ok() == before, "{says}");
    };
    refused(&output, &["--parse-special"], 2, "not the output of this batch");
    refused(&input, &[], 2, "named twice");
    let note = folder.path().join("note.txt");
    std::fs::write(&note, "my notes\n").expect("write");
    refused(&note, &[], 2, "not the output of this batch");
    std::fs::write(&note, "k3").expect("write");
    refused(&note, &[], 2, "not the output of this batch");
    std::fs::write(&note, [&bytes[..], br#"{"id": "other"}"#, b"\n"].concat()).expect("write");
    refused(&note, &[], 3, "line 8 is not a result");
    let held = std::fs::File::open(&output).expect("open");
    held.lock().expect("a lock");
    refused(&output, &[], 2, "another batch");
}

/// Options on the command line, on a line, and both; each text is that of a run with the same ones.
#[test]
fn a_batch_draws_what_single_runs_draw() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let demo = k3_tests::root().join("fixtures/demo");
    let alone = |more: &[&str]| {
        let mut command = k3();
        command.args(["run", "--json", "--quiet", "--memory", "64M", "--ignore-eos", "--max-tokens", "9"]);
        object(command.args(["--prompt", "In the beginning"]).args(more).arg(&demo))
    };
    let plain = alone(&[]);
    let id = plain["generated_ids"][3].to_string();
    let words = plain["text"].as_str().expect("text");
    let cut = &words[words.len() / 2..words.len() / 2 + 3];
    let warm = ["--temperature", "1.3", "--seed", "5", "--top-p", "0.9"];
    let cases: &[(&str, &[&str])] = &[
        ("", &warm),
        (r#""seed": 6"#, &["--temperature", "1.3", "--seed", "6", "--top-p", "0.9"]),
        (r#""temperature": 0, "stop": null"#, &[]),
        (
            r#""temperature": 0.7, "top_k": 40, "min_p": 0.01, "logprobs": 2"#,
            &[
                "--temperature",
                "0.7",
                "--seed",
                "5",
                "--top-p",
                "0.9",
                "--top-k",
                "40",
                "--min-p",
                "0.01",
                "--logprobs",
                "2",
            ],
        ),
        (
            r#""temperature": 0, "repeat_penalty": 1.5, "logit_bias": {"7": 2.5, "40": "-inf"}"#,
            &["--repeat-penalty", "1.5", "--logit-bias", "7=2.5", "--logit-bias", "40=-inf"],
        ),
        (
            &format!(r#""temperature": 0, "stop": {}"#, serde_json::Value::from(cut)),
            &["--stop", &format!("text:{cut}")],
        ),
        (&format!(r#""temperature": 0, "stop": ["never there", {id}]"#), &["--stop", "never there", "--stop", &id]),
    ];
    let lines: Vec<_> = (0..)
        .zip(cases)
        .map(|(i, (own, _))| {
            let comma = if own.is_empty() { "" } else { ", " };
            format!(r#"{{"id": {i}, "prompt": "In the beginning"{comma}{own}}}"#)
        })
        .collect();
    std::fs::write(&input, lines.join("\n")).expect("write");
    let summary = object(&mut batch(&input, &output, &[&["--json", "--in-flight", "4"], &warm[..]].concat()));
    assert_eq!(summary["ended"], cases.len());
    let results = results(&output);
    for (i, (own, flags)) in cases.iter().enumerate() {
        let (result, alone) = (&results[&i.to_string()], alone(flags));
        for field in ["generated_ids", "text", "finish_reason", "stopped_by", "logprobs"] {
            assert_eq!(result[field], alone[field], "{field}: {own}");
        }
    }
    assert_ne!(results["0"]["text"], results["1"]["text"]);
    // With other options it is another batch.
    let other =
        batch(&input, &output, &["--temperature", "1.3", "--seed", "4", "--top-p", "0.9"]).output().expect("k3");
    assert_eq!(code(&other), 2, "{}", text(&other.stderr));
    assert!(text(&other.stderr).contains("not the output of this batch"));
}

/// One row of the embedding is infinite: texts that read this id are named, and all others are as ever.
#[test]
fn a_text_that_goes_non_finite_is_named_and_stops_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let model = folder.path().join("model");
    k3_tests::copy_dir(&k3_tests::root().join("fixtures/demo"), &model);
    let index = json(&model.join("model.safetensors.index.json"));
    let name = "language_model.model.embed_tokens.weight";
    let shard = model.join(index["weight_map"][name].as_str().expect("a shard"));
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("a length");
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
    let width = usize::try_from(header[name]["shape"][1].as_u64().expect("a width")).expect("a width");
    let begin = usize::try_from(header[name]["data_offsets"][0].as_u64().expect("a place")).expect("a place");
    let at = 8 + len + begin + 2 * (width * 300 + 5);
    bytes[at..at + 2].copy_from_slice(&0x7f80u16.to_le_bytes());
    std::fs::write(&shard, bytes).expect("write");

    let lines = [
        r#"{"id": "good", "ids": [40, 5, 6]}"#,
        r#"{"id": "bad", "ids": [40, 5, 300, 6]}"#,
        r#"{"id": "long", "ids": [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], "max_tokens": 4}"#,
        r#"{"id": "later", "ids": [9], "logit_bias": {"300": 1000}, "max_tokens": 3}"#,
        r#"{"id": "last", "ids": [41], "max_tokens": 12}"#,
    ];
    std::fs::write(&input, lines.join("\n")).expect("write");
    let run = |model: &Path, output: &Path, more: &[&str]| {
        let mut command = k3();
        command.arg("batch").arg("--input").arg(&input).arg("--output").arg(output).arg(model);
        command.args(["--json", "--quiet", "--memory", "64M", "--ignore-eos", "--max-tokens", "6"]).args(more);
        command.output().expect("k3")
    };
    let sound = folder.path().join("sound.jsonl");
    let answer = run(&k3_tests::root().join("fixtures/demo"), &sound, &[]);
    assert_eq!(code(&answer), 0, "{}", text(&answer.stderr));
    let sound = results(&sound);
    for more in [&["--in-flight", "3", "--chunk", "5"][..], &["--in-flight", "1"], &[]] {
        let answer = run(&model, &output, more);
        assert_eq!(code(&answer), 6, "{}", text(&answer.stderr));
        let said = text(&answer.stderr);
        for part in ["line 2 (id \"bad\"): ", "line 4 (id \"later\"): ", "position 2 in the embedding", "2 of 5 texts"]
        {
            assert!(said.contains(part), "{part}: {said}");
        }
        let summary: serde_json::Value = serde_json::from_slice(&answer.stdout).expect("JSON");
        assert_eq!((&summary["ended"], &summary["failed"][0]["line"]), (&3.into(), &2.into()), "{summary}");
        let found = results(&output);
        assert_eq!(found.keys().collect::<Vec<_>>(), ["\"good\"", "\"last\"", "\"long\""]);
        assert!(found.iter().all(|(id, result)| *result == sound[id]), "{found:?}");
        // What is missing is tried again, and nothing else.
        let again = run(&model, &output, more);
        assert_eq!(code(&again), 6, "{}", text(&again.stderr));
        let summary: serde_json::Value = serde_json::from_slice(&again.stdout).expect("JSON");
        assert_eq!((&summary["ended"], &summary["done_before"]), (&0.into(), &3.into()));
        std::fs::remove_file(&output).expect("remove");
    }

    // A weight is of no text: it ends them all, and no line is blamed.
    let name = "language_model.model.norm.weight";
    let shard = model.join(index["weight_map"][name].as_str().expect("a shard"));
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("a length");
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
    let at = 8 + len + usize::try_from(header[name]["data_offsets"][0].as_u64().expect("a place")).expect("a place");
    bytes[at..at + 2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    std::fs::write(&shard, bytes).expect("write");
    let answer = run(&model, &output, &["--in-flight", "1"]);
    assert_eq!(code(&answer), 6, "{}", text(&answer.stderr));
    let said = text(&answer.stderr);
    assert!(said.contains(name) && !said.contains("line"), "{said}");
    assert!(results(&output).is_empty());
}

#[test]
fn wrong_lines_of_a_batch_are_told_by_number_before_anything_runs() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let say = |lines: &[&str], more: &[&str]| {
        std::fs::write(&input, lines.join("\n")).expect("write");
        let answer = batch(&input, &output, more).output().expect("k3");
        assert_eq!(code(&answer), 2, "{}", text(&answer.stderr));
        assert!(!output.exists());
        text(&answer.stderr)
    };
    let good = r#"{"id": 1, "ids": [1]}"#;
    let all = say(
        &[
            good,
            "[]",
            r#"{"ids": [1]}"#,
            r#"{"id": null, "ids": []}"#,
            r#"{"id": 2}"#,
            r#"{"id": 3, "prompt": 4}"#,
            "{",
        ],
        &[],
    );
    for said in
        ["line 2: this is no object", "line 3: \"id\" is missing", "line 4: ", "line 5: ", "line 6: ", "line 7: "]
    {
        assert!(all.contains(said), "{all}");
    }
    for (line, said) in [
        (r#"{"id": 1, "ids": [2]}"#, "line 2: id 1 is that of line 1"),
        (r#"{"id": 2, "ids": [1], "prompt": "a"}"#, "both"),
        (r#"{"id": 2, "ids": [1.5]}"#, "1.5"),
        (r#"{"id": 2, "ids": [70000]}"#, "line 2: token id 70000"),
        (r#"{"id": 2, "prompt": ""}"#, "line 2: the prompt is empty"),
        (r#"{"id": 2, "ids": [1], "max_tokens": -1}"#, "max_tokens"),
        (r#"{"id": 2, "ids": [1], "temprature": 1}"#, "temprature"),
        (r#"{"id": 2, "ids": [1], "ids": [2]}"#, "line 2: byte"),
        (r#"{"id": 2, "ids": [1], "temperature": -1}"#, "line 2: temperature -1"),
        (r#"{"id": 2, "ids": [1], "temperature": "1"}"#, "line 2: \"temperature\" is no number"),
        (r#"{"id": 2, "ids": [1], "temperature": 1, "top_p": 1.5}"#, "line 2: top-p 1.5"),
        (r#"{"id": 2, "ids": [1], "temperature": 1, "top_k": 0}"#, "line 2: top-k 0"),
        (r#"{"id": 2, "ids": [1], "seed": 4}"#, "line 2: \"seed\" has no effect"),
        (r#"{"id": 2, "ids": [1], "temperature": 0, "min_p": 0.5}"#, "line 2: min-p has no effect"),
        (r#"{"id": 2, "ids": [1], "stop": ""}"#, "line 2: \"\" in \"stop\""),
        (r#"{"id": 2, "ids": [1], "stop": ["a", 70000]}"#, "line 2: stop: token id 70000"),
        (r#"{"id": 2, "ids": [1], "logit_bias": {"x": 1}}"#, "line 2: \"x\": 1 in \"logit_bias\""),
        (r#"{"id": 2, "ids": [1], "logit_bias": {"70000": 1}}"#, "line 2: logit-bias: token id 70000"),
        (r#"{"id": 2, "ids": [1], "logprobs": 1001}"#, "line 2: \"logprobs\" is no count up to 1000"),
    ] {
        let answer = say(&[good, line], &[]);
        assert!(answer.contains(said), "{answer}");
    }
    assert!(say(&["", " "], &[]).contains("no prompts"));
    let answer = say(&[good], &["--temperature", "0", "--seed", "4"]);
    assert!(answer.contains("--seed has no effect") && !answer.contains("line"), "{answer}");
    assert!(say(&[r#"{"id": 2, "ids": [1, 2, 3]}"#], &["--context", "2"]).contains("line 1: the prompt has 3 tokens"));
    assert!(say(&["x"; 20], &[]).contains("and 12 more faults"));
}

/// The story: numbers from the command line and from lines of a batch were added up unchecked. A debug build ended
/// in a panic; a released one had a context of 0.
#[test]
fn numbers_beyond_all_memory_are_refused_by_the_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("text"), "In the beginning").expect("write");
    let most = "18446744073709551615";
    std::fs::write(path("in"), format!("{{\"id\": 1, \"ids\": [1, 2], \"max_tokens\": {most}}}\n")).expect("write");
    std::fs::write(path("short"), "{\"id\": 1, \"ids\": [1, 2]}\n").expect("write");
    let (input, short, output, session) = (path("in"), path("short"), path("out"), path("session"));
    let run = ["run", "--ids", "1,2"];
    let chat = ["chat", "--message", "a", "--json"];
    let batch = ["batch", "--output", &output, "--input"];
    for args in [
        [&batch[..], &[&input]].concat(),
        [&batch[..], &[&input, "--logprobs", "3"]].concat(),
        [&batch[..], &[&short, "--max-tokens", most]].concat(),
        [&batch[..], &[&short, "--context", most]].concat(),
        [&run[..], &["--max-tokens", most]].concat(),
        [&run[..], &["--max-tokens", most, "--json", "--logprobs", "1000"]].concat(),
        [&run[..], &["--context", most, "--session", &session]].concat(),
        [&run[..], &["--max-tokens", most, "--speculate", "64"]].concat(),
        [&chat[..], &["--max-tokens", most, "--logprobs", "3"]].concat(),
        [&chat[..], &["--context", most, "--session", &session]].concat(),
        vec!["plan", "--disk", "1", "--context", most],
    ] {
        let answer = k3().args(&args).args(["--memory", "64M"]).arg(tiny()).output().expect("k3");
        let message = text(&answer.stderr);
        assert_eq!(code(&answer), 4, "{args:?}: {message}");
        assert!(message.contains("cannot hold"), "{args:?}: {message}");
        // What was not begun is not there.
        assert!(!Path::new(&output).exists(), "{args:?}");
    }
}

/// The story: an output was told apart by config, names and lengths, so that a fine-tuned model's texts were put
/// among those of the model it was made of.
#[test]
fn a_batch_does_not_go_on_with_other_weights() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (prompts(folder.path()), folder.path().join("out.jsonl"));
    let model = folder.path().join("model");
    k3_tests::copy_dir(&k3_tests::root().join("fixtures/demo"), &model);
    let run = || {
        let mut command = k3();
        command.arg("batch").arg("--input").arg(&input).arg("--output").arg(&output).arg(&model);
        command
            .args(["--json", "--quiet", "--memory", "64M", "--ignore-eos", "--max-tokens", "3"])
            .output()
            .expect("k3")
    };
    let answer = run();
    assert_eq!(code(&answer), 0, "{}", text(&answer.stderr));
    let written = std::fs::read_to_string(&output).expect("results");

    // An output of before says of no weights.
    let (first, texts) = written.split_once('\n').expect("a line");
    assert!(first.starts_with("{\"k3_batch\":2,"), "{first}");
    let old = format!("{}\n{texts}", first.replace("\"k3_batch\":2", "\"k3_batch\":1"));
    std::fs::write(&output, &old).expect("write");
    let answer = run();
    assert_eq!(code(&answer), 2, "{}", text(&answer.stderr));
    assert!(text(&answer.stderr).contains("which weights") && text(&answer.stderr).contains("an older k3"));
    assert_eq!(std::fs::read_to_string(&output).expect("results"), old);

    // The same shapes, other weights.
    std::fs::write(&output, &written).expect("write");
    let index = json(&model.join("model.safetensors.index.json"));
    let name = "language_model.lm_head.weight";
    let shard = model.join(index["weight_map"][name].as_str().expect("a shard"));
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("a length");
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).expect("a header");
    let place =
        |i: usize| usize::try_from(header[name]["data_offsets"][i].as_u64().expect("a place")).expect("a place");
    let (begin, end) = (8 + len + place(0), 8 + len + place(1));
    bytes[begin..end].chunks_exact_mut(2).for_each(|number| number[0] ^= 1);
    std::fs::write(&shard, bytes).expect("write");
    let answer = run();
    assert_eq!(code(&answer), 2, "{}", text(&answer.stderr));
    assert!(text(&answer.stderr).contains("not the output of this batch"), "{}", text(&answer.stderr));
    assert_eq!(std::fs::read_to_string(&output).expect("results"), written);
}

#[test]
fn an_interrupted_batch_keeps_what_has_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let lines: Vec<_> =
        (0..60).map(|i| format!(r#"{{"id": {i}, "ids": [{}, 9], "max_tokens": {}}}"#, i + 1, 2 + i)).collect();
    std::fs::write(&input, lines.join("\n")).expect("write");
    let mut child = batch(&input, &output, &["--in-flight", "2", "--threads", "1"]).spawn().expect("k3");
    while std::fs::read(&output).map_or(0, |b| b.iter().filter(|b| **b == b'\n').count()) < 4 {
        assert!(child.try_wait().expect("wait").is_none(), "it ended before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    send(&child, Signal::INT);
    assert_eq!(child.wait().expect("wait").code(), Some(130));
    let kept = results(&output);
    assert!((3..60).contains(&kept.len()), "{} texts", kept.len());
    let object = object(&mut batch(&input, &output, &["--json"]));
    assert_eq!(object["done_before"].as_u64().expect("a count"), kept.len() as u64);
    let all = results(&output);
    assert_eq!(all.len(), 60);
    assert!(kept.iter().all(|(id, result)| all[id] == *result));
}

/// The story: each of sixty prompts was planned to remember what the longest does, whether it ran or not, and four
/// times too much.
#[test]
fn log_probabilities_of_many_prompts_are_planned_for_those_that_run() {
    let folder = tempfile::tempdir().expect("a folder");
    let (input, output) = (folder.path().join("in.jsonl"), folder.path().join("out.jsonl"));
    let lines: String = (0..60).map(|i| format!("{{\"id\": {i}, \"ids\": [{}, 6]}}\n", 7 + i)).collect();
    std::fs::write(&input, lines).expect("write");
    let args = ["--json", "--memory", "48M", "--max-tokens", "30", "--logprobs", "300"];
    let mut command = k3();
    command.arg("batch").arg("--input").arg(&input).arg("--output").arg(&output);
    let found = object(command.args(["--quiet", "--ignore-eos"]).args(args).arg(tiny()));
    assert_eq!(found["ended"], 60);
    assert!(found["in_flight"].as_u64().expect("a count") > 4, "{found}");
    let peak = found["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
    assert!(peak < 48_000_000, "peak {peak}");
}

/// Runs a command with standard input.
fn piped(command: &mut Command, input: &[u8]) -> Output {
    use std::io::Write as _;
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
    let mut stdin = child.stdin.take().expect("stdin");
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Whoever refuses its input goes away before it has read it.
            let _ = stdin.write_all(input);
        });
        child.wait_with_output().expect("k3")
    })
}

/// What a shell, a file of another system or an accident puts into a text.
const AWKWARD: &[u8] = b"a\r\nb\0c \xff\xfe\xe2\x82 \xe2\x82\xac\xf0\x9f<|sep|>[EOS]\n\n";

#[test]
fn any_bytes_become_ids_and_come_back() {
    let dir = tiny();
    // Longer than a block, and than what is settled at a time.
    let long: Vec<u8> = AWKWARD.iter().copied().cycle().take(3_000_000).collect();
    for text in [AWKWARD, &long, b"", b"\xf0", "\u{e9}".repeat(700_000).as_bytes()] {
        let ids = piped(k3().arg("tokenize").arg(&dir), text);
        assert_eq!(code(&ids), 0, "{}", self::text(&ids.stderr));
        let back = piped(k3().arg("detokenize").arg(&dir), &ids.stdout);
        assert_eq!(code(&back), 0, "{}", self::text(&back.stderr));
        assert!(back.stdout == text, "{} bytes came back from {}", back.stdout.len(), text.len());
        let count = piped(k3().args(["tokenize", "--count"]).arg(&dir), text);
        assert_eq!(self::text(&count.stdout), format!("{}\n", self::text(&ids.stdout).lines().count()));
    }
}

#[test]
fn a_prompt_reaches_the_tokenizer_as_it_is() {
    let dir = tiny();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), AWKWARD).expect("written");
    let expected = piped(k3().arg("tokenize").arg(&dir), AWKWARD);
    let run = |path: &Path| {
        let mut command = k3();
        command.args(["run", "--json", "--max-tokens", "1", "--memory", "64M", "--prompt-file"]).arg(path).arg(&dir);
        let output = piped(&mut command, AWKWARD);
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let ids = object["prompt_ids"].as_array().expect("ids");
        ids.iter().map(|id| format!("{id}\n")).collect::<String>()
    };
    for path in [file.path(), Path::new("-")] {
        assert_eq!(run(path), text(&expected.stdout), "{}", path.display());
    }
    // As an argument a text cannot hold NUL.
    use std::os::unix::ffi::OsStrExt as _;
    let argument: Vec<u8> = AWKWARD.iter().copied().filter(|&b| b != 0).collect();
    let of_text = k3().args(["tokenize", "--text"]).arg(std::ffi::OsStr::from_bytes(&argument)).arg(&dir).output();
    let of_pipe = piped(k3().arg("tokenize").arg(&dir), &argument);
    assert!(of_text.expect("k3").stdout == of_pipe.stdout);
}

#[test]
fn tokenizer_commands_have_json_and_control_ids() {
    let dir = tiny();
    let tokenize = |args: &[&str], input: &[u8]| {
        let output = piped(k3().arg("tokenize").args(args).arg(&dir), input);
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")
    };
    let plain = tokenize(&["--json"], b"a<|sep|>\xff");
    let special = tokenize(&["--json", "--parse-special"], b"a<|sep|>\xff");
    assert_eq!((&plain["bytes"], &special["bytes"], &special["count"]), (&9.into(), &9.into(), &3.into()));
    assert_eq!(plain["count"], plain["ids"].as_array().expect("ids").len());
    assert_ne!(plain["ids"], special["ids"]);
    let counted = tokenize(&["--json", "--count"], b"a<|sep|>\xff");
    assert_eq!((&counted["count"], &counted["ids"]), (&plain["count"], &serde_json::Value::Null));

    let ids: Vec<String> = special["ids"].as_array().expect("ids").iter().map(ToString::to_string).collect();
    let detokenize = |args: &[&str]| {
        let output = k3().args(["detokenize", "--ids", &ids.join(", ")]).args(args).arg(&dir).output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        output.stdout
    };
    assert_eq!(detokenize(&[]), b"a\xff");
    assert_eq!(detokenize(&["--special"]), b"a<|sep|>\xff");
    let object: serde_json::Value = serde_json::from_slice(&detokenize(&["--special", "--json"])).expect("JSON");
    assert_eq!((&object["text"], &object["bytes"]), (&"a<|sep|>\u{fffd}".into(), &9.into()));
    assert_eq!(object["count"], 3);
}

#[test]
fn ids_that_are_none_are_refused_by_number() {
    let dir = tiny();
    for (ids, part) in [
        ("1 2 999999", "id number 3: token id 999999 is out of range"),
        ("1,-2", "id number 2: \"-2\""),
        ("1 4294967296", "id number 2"),
        ("0x1", "id number 1"),
        (&"1".repeat(5_000_000), "id number 1: \"1111"),
    ] {
        let output = piped(k3().arg("detokenize").arg(&dir), ids.as_bytes());
        assert_eq!(code(&output), 2, "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
    }
    for args in [&["tokenize", "--file", "/nowhere/at/all"][..], &["detokenize", "--file", "/nowhere/at/all"]] {
        let output = k3().args(args).arg(&dir).output().expect("k3");
        assert_eq!(code(&output), 2);
        assert!(text(&output.stderr).contains("/nowhere/at/all"));
    }
    let output = k3().args(["tokenize", "/nowhere/at/all"]).output().expect("k3");
    assert_eq!(code(&output), 3, "{}", text(&output.stderr));
}

/// The story: an id that is none left half an object behind, which no program can read.
#[test]
fn a_failure_with_json_is_in_a_whole_object() {
    let dir = tiny();
    let object = |output: &Output, failed: i32| {
        assert_eq!(code(output), failed, "{}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        let error = object["error"].as_str().expect("an error").to_owned();
        assert!(text(&output.stderr).contains(&error), "{error} / {}", text(&output.stderr));
        object
    };
    let detokenize = |input: &str| piped(k3().args(["detokenize", "--json"]).arg(&dir), input.as_bytes());
    let ids = text(&piped(k3().arg("tokenize").arg(&dir), b"a \"b\" \xe4\xbd").stdout);
    for bad in ["999999", "-2", "4294967296", &"1".repeat(5_000_000)] {
        let found = object(&detokenize(&format!("{ids} {bad} {ids}")), 2);
        let count = ids.lines().count();
        assert_eq!((&found["text"], &found["count"]), (&"a \"b\" \u{fffd}".into(), &count.into()));
        assert_eq!(found["bytes"], 8);
        assert!(found["error"].as_str().expect("a text").contains(&format!("id number {}", count + 1)), "{found}");
    }
    assert_eq!(object(&detokenize("x"), 2)["text"], "");
    // Before there is anything to print, and after it.
    for command in ["tokenize", "detokenize"] {
        let none = object(&k3().args([command, "--json", "--file", "/nowhere"]).arg(&dir).output().expect("k3"), 2);
        assert_eq!(none.as_object().expect("an object").len(), 1, "{none}");
        object(&k3().args([command, "--json", "/nowhere/at/all"]).output().expect("k3"), 3);
        object(&k3().args([command, "--json", "--file", "/"]).arg(&dir).output().expect("k3"), 2);
    }
    let counted = k3().args(["tokenize", "--json", "--count", "--file", "/"]).arg(&dir).output().expect("k3");
    assert_eq!(object(&counted, 2)["count"], 0);
}

#[test]
fn a_reader_of_ids_may_go_away() {
    let mut child = k3()
        .args(["tokenize", "--file", "/dev/zero"])
        .arg(tiny())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3");
    // One endless text: it ends because nobody reads what it prints.
    let mut first = [0; 16];
    std::io::Read::read_exact(child.stdout.as_mut().expect("stdout"), &mut first).expect("ids");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
}

/// The figures mean nothing here; what is held is that they are there, and that nothing stays behind.
#[test]
fn bench_measures_what_scripts_read() {
    let here = tempfile::tempdir().expect("a folder");
    let bench = |more: &[&std::ffi::OsStr]| {
        let fixed = ["bench", "--seconds", "0", "--threads", "1", "--backend", "scalar", "--memory", "64M", "--json"];
        let output = k3().args(fixed).args(more).current_dir(here.path()).output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("one JSON object")
    };
    let number = |object: &serde_json::Value, path: &str| {
        assert!(object.pointer(path).is_some_and(serde_json::Value::is_number), "{path}: {object}");
    };
    let alone = bench(&[]);
    for path in ["/memory_read_gb_s", "/kernels/bf16_gb_s", "/kernels/mxfp4_gb_s", "/threads"] {
        number(&alone, path);
    }
    number(&alone, "/kernels/threads/0/backends/scalar/bf16_gb_s");
    if alone.pointer("/disk/skipped").is_none() {
        number(&alone, "/disk/sequential_gb_s");
        number(&alone, "/disk/experts_gb_s");
    }
    assert!(alone["expected"].is_null());
    assert_eq!(std::fs::read_dir(here.path()).expect("the folder").count(), 0, "a file stays behind");

    let model = bench(&[tiny().as_os_str()]);
    for path in ["/disk/cases/0/gb_s", "/expected/seconds_per_token/at_least", "/expected/compute_seconds"] {
        number(&model, path);
    }
    assert_eq!(model["expected"]["budget_bytes"], 64_000_000);
    let output = k3().args(["bench", "/no/such/model"]).output().expect("k3");
    assert_eq!(code(&output), 3, "{}", text(&output.stderr));
}
