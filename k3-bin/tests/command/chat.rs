//! Sampling, conversations and sessions as a user meets them.

use super::tiny;
use k3_tests::root;
use rustix::process::Signal;
use serde_json::Value;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn k3(args: &[&str]) -> Command {
    let mut command = super::k3();
    command.args(args);
    command
}

fn output(args: &[&str]) -> Output {
    k3(args).arg(tiny()).output().expect("k3")
}

fn err(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", err(output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn run(args: &[&str]) -> Value {
    let base = ["run", "--json", "--quiet", "--memory", "64M", "--ignore-eos"];
    json(&output(&[&base[..], args].concat()))
}

fn chat(args: &[&str]) -> Value {
    json(&output(&[&["chat", "--json", "--quiet", "--memory", "64M"], args].concat()))
}

/// Ids of the checkpoint, the last 256 of which are controls.
fn vocab() -> u64 {
    let config = k3_tests::json(&tiny().join("config.json"));
    let fields = [&config["text_config"]["vocab_size"], &config["vocab_size"]];
    fields.into_iter().find_map(Value::as_u64).expect("vocab_size")
}

/// Options that keep a model that was never trained from writing control ids.
fn plain() -> Vec<String> {
    (vocab() - 256..vocab()).flat_map(|id| ["--logit-bias".to_owned(), format!("{id}=-inf")]).collect()
}

fn strs(list: &[String]) -> Vec<&str> {
    list.iter().map(String::as_str).collect()
}

fn utf8(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

const PROMPT: [&str; 2] = ["--ids", "5,6,7,8"];

#[test]
fn a_seed_gives_the_same_ids_on_every_path() {
    let drawn = |more: &[&str]| {
        let sampling = ["--max-tokens", "24", "--temperature", "1.5", "--top-p", "0.98", "--repeat-penalty", "1.1"];
        run(&[&PROMPT[..], &sampling, more].concat())["generated_ids"].clone()
    };
    let first = drawn(&["--seed", "3"]);
    assert_eq!(first.as_array().expect("ids").len(), 24);
    for how in [
        &["--seed", "3", "--threads", "1", "--backend", "scalar", "--chunk", "1"][..],
        &["--seed", "3", "--no-incremental", "--threads", "7"],
        &["--seed", "3", "--logprobs", "2", "--speculate", "4"],
    ] {
        assert_eq!(drawn(how), first, "{how:?}");
    }
    assert_ne!(drawn(&["--seed", "4"]), first);
    let greedy = run(&[&PROMPT[..], &["--max-tokens", "24"]].concat())["generated_ids"].clone();
    assert_ne!(greedy, first);
    for same in [&["--temperature", "0"][..], &["--temperature", "2", "--top-k", "1", "--seed", "9"]] {
        let ids = run(&[&PROMPT[..], &["--max-tokens", "24"], same].concat())["generated_ids"].clone();
        assert_eq!(ids, greedy, "{same:?}");
    }
    // An id that is taken out is not there; one that is pushed is.
    let id = greedy[0].as_u64().expect("an id");
    let out = run(&[&PROMPT[..], &["--max-tokens", "8", "--logit-bias", &format!("{id}=-inf")]].concat());
    assert!(out["generated_ids"].as_array().expect("ids").iter().all(|other| *other != greedy[0]));
    let pushed = run(&[&PROMPT[..], &["--max-tokens", "3", "--logit-bias", "9=1000"]].concat());
    assert_eq!(pushed["generated_ids"], serde_json::json!([9, 9, 9]));
}

#[test]
fn stops_end_a_text_before_them() {
    let dir = root().join("fixtures/demo");
    let base = ["run", "--quiet", "--memory", "200M", "--max-tokens", "16", "--prompt", "In the beginning"];
    let run = |more: &[&str]| k3(&[&base[..], more].concat()).arg(&dir).output().expect("k3");
    let whole = json(&run(&["--json"]));
    let text = whole["text"].as_str().expect("text");
    assert!(text.is_ascii() && text.len() > 20, "{text}");
    // Every place: stops begin and end within tokens and between them.
    for (from, to) in [(0, 2), (5, 7), (6, 12), (9, 20)] {
        let stop = &text[from..to];
        let before = &text[..text.find(stop).expect("there")];
        let flag = format!("text:{stop}");
        let stops = ["--stop", "never there", "--stop", &flag];
        let cut = json(&run(&[&stops[..], &["--json"]].concat()));
        assert_eq!(cut["text"].as_str(), Some(before));
        assert_eq!((&cut["finish_reason"], cut["stopped_by"]["text"].as_str()), (&Value::from("stop"), Some(stop)));
        let streamed = String::from_utf8(run(&stops).stdout).expect("text");
        assert_eq!(streamed, if before.is_empty() { String::new() } else { format!("{before}\n") });
    }
    let ids = whole["generated_ids"].as_array().expect("ids");
    let first = ids.iter().position(|id| *id == ids[3]).expect("there");
    let cut = json(&run(&["--json", "--stop", &ids[3].to_string()]));
    assert_eq!(cut["generated_ids"].as_array().expect("ids"), &ids[..first]);
    assert_eq!(cut["stopped_by"]["id"], ids[3]);
}

#[test]
fn logprobs_are_of_the_logits_as_they_are() {
    let plain = run(&[&PROMPT[..], &["--max-tokens", "5", "--logprobs", "3"]].concat());
    let list = plain["logprobs"].as_array().expect("logprobs");
    assert_eq!(list.len(), 5);
    for (entry, id) in list.iter().zip(plain["generated_ids"].as_array().expect("ids")) {
        let top = entry["top"].as_array().expect("top");
        assert_eq!((&entry["id"], &top[0]["id"], top.len()), (id, id, 3));
        let p: Vec<f64> = top.iter().map(|t| t["logprob"].as_f64().expect("a number")).collect();
        assert!(p.is_sorted_by(|a, b| a >= b) && p[0] < 0.0, "{p:?}");
        assert_eq!(entry["logprob"], top[0]["logprob"]);
        assert!(entry["text"].is_string());
    }
    // A bias changes what is chosen and not what is told.
    let biased = run(&[&PROMPT[..], &["--max-tokens", "1", "--logprobs", "3", "--logit-bias", "9=1000"]].concat());
    assert_eq!(biased["logprobs"][0]["top"], plain["logprobs"][0]["top"]);
    assert_eq!(biased["logprobs"][0]["id"], 9);
    assert!(run(&[&PROMPT[..], &["--max-tokens", "1"]].concat())["logprobs"].is_null());
}

#[test]
fn what_has_no_meaning_or_no_effect_is_refused() {
    let cases: &[(&[&str], &str)] = &[
        (&["--temperature", "-1"], "temperature"),
        (&["--temperature", "nan"], "temperature"),
        (&["--temperature", "hot"], "temperature"),
        (&["--temperature", "1", "--top-p", "1.5"], "top-p"),
        (&["--temperature", "1", "--top-p", "0"], "top-p"),
        (&["--temperature", "1", "--top-k", "0"], "top-k"),
        (&["--temperature", "1", "--min-p", "2"], "min-p"),
        (&["--repeat-penalty", "0"], "repeat-penalty"),
        (&["--top-p", "0.9"], "--temperature"),
        (&["--seed", "1"], "--temperature"),
        (&["--temperature", "0", "--seed", "1"], "--seed has no effect"),
        (&["--temperature", "0", "--top-k", "5"], "--top-k has no effect"),
        (&["--logit-bias", "1"], "logit-bias"),
        (&["--logit-bias", "1=nan"], "logit-bias"),
        (&["--logit-bias", "999999=1"], "999999"),
        (&["--logit-bias", "1=1", "--logit-bias", "1=2"], "twice"),
        (&["--stop", ""], "stop"),
        (&["--stop", "999999"], "999999"),
        (&["--logprobs", "2"], "--json"),
        (&["--session-checkpoints", "1G"], "--session"),
        (&["--session", "/nowhere/at/all/s"], "/nowhere/at/all"),
        (&["--session", "/dev/null"], "not a regular file"),
        (&["--session", "s", "--no-incremental"], "cannot be used"),
        (&["--session", "s", "--dump-logits", "l.npy"], "cannot be used"),
        (&["--parse-special"], "cannot be used"),
    ];
    for (args, part) in cases {
        let output = output(&[&["run", "--ids", "1"], *args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
        assert!(output.stdout.is_empty(), "{args:?}");
        assert!(err(&output).contains(part), "{args:?}: {}", err(&output));
    }
    let chats: &[(&[&str], &str)] = &[
        (&["--json"], "dialogue"),
        (&["--message", "x", "--messages", "-"], "cannot be used"),
        (&["--message", "x", "--think", "medium"], "think"),
        (&["--messages", "/dev/null"], "not JSON"),
        (&["--message", "x", "--context", "3"], "context holds 3"),
        (&["--message", "x", "--max-tokens", "0"], "max-tokens"),
        (&["--message", "x", "--tools", "/nowhere/at/all"], "/nowhere/at/all"),
        (&["--message", "x", "--tools", "/dev/null"], "tool"),
        (&["--message", "x", "--json", "--hide-thinking"], "cannot be used"),
    ];
    for (args, part) in chats {
        let output = output(&[&["chat"], *args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", err(&output));
        assert!(err(&output).contains(part), "{args:?}: {}", err(&output));
    }
}

#[test]
fn a_session_goes_on_where_it_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("s.k3");
    let keep = ["--session", utf8(&session)];
    let whole = run(&[&PROMPT[..], &["--max-tokens", "12"]].concat());
    let mut ids = Vec::new();
    let mut reused = Vec::new();
    for (args, count, guess) in [(&PROMPT[..], "5", "0"), (&[], "4", "3"), (&[], "3", "1")] {
        let part = run(&[args, &keep, &["--max-tokens", count, "--speculate", guess]].concat());
        ids.extend(part["generated_ids"].as_array().expect("ids").clone());
        reused.push(part["usage"]["reused_tokens"].as_u64().expect("a count"));
    }
    assert_eq!(Value::from(ids), whole["generated_ids"]);
    // Each run reads the one id that its predecessor had printed and not read.
    assert_eq!(reused, [0, 8, 12]);
    // An edited text: the common beginning is four ids, and a state lies at the end of the prompt.
    let edited = run(&[&["--ids", "5,6,7,8,9,9,9"], &keep[..], &["--max-tokens", "4"]].concat());
    let fresh = run(&["--ids", "5,6,7,8,9,9,9", "--max-tokens", "4"]);
    assert_eq!(edited["generated_ids"], fresh["generated_ids"]);
    assert_eq!(edited["usage"]["reused_tokens"], 4);
    let told = output(&[&["run", "--memory", "64M", "--ids", "5,6,7", "--max-tokens", "1"], &keep[..]].concat());
    assert!(err(&told).contains("session: 3 of its 11 tokens"), "{}", err(&told));
    run(&[&["--ids", "5,6,7,8,9,9,9"], &keep[..], &["--max-tokens", "4"]].concat());
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1, "the session and nothing else");

    // Damage and strangers are refused with 3, and stay.
    let good = std::fs::read(&session).expect("the session");
    let refused = |bytes: &[u8], dir: &Path| {
        std::fs::write(&session, bytes).expect("write");
        let args = [&["run", "--quiet", "--memory", "64M"], &keep[..]].concat();
        let output = k3(&args).arg(dir).output().expect("k3");
        assert_eq!(output.status.code(), Some(3), "{}", err(&output));
        assert!(err(&output).contains("s.k3"), "{}", err(&output));
        assert!(output.stdout.is_empty());
        assert!(std::fs::read(&session).expect("the session") == bytes, "it was touched");
    };
    for place in [0, 9, 20, 70, 100, 130, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[place] ^= 1;
        refused(&bad, &tiny());
    }
    refused(&good[..good.len() - 1], &tiny());
    refused(b"notes", &tiny());
    refused(&good, &root().join("fixtures/demo"));

    // Another run holds it.
    std::fs::write(&session, &good).expect("write");
    let lock = std::fs::File::create(folder.path().join("s.k3.lock")).expect("a lock");
    lock.lock().expect("a lock");
    let output = output(&[&["run", "--ids", "1"], &keep[..]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("another run"), "{}", err(&output));
}

/// A file that may not grow stands in for a disk that is full: the text is there, the old session too.
#[test]
fn a_session_that_cannot_be_written_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("s.k3");
    run(&[&PROMPT[..], &["--max-tokens", "3", "--session", utf8(&session)]].concat());
    let good = std::fs::read(&session).expect("the session");
    // The shell's limit counts blocks of 512 bytes; the signal that says so is ignored, so writes fail.
    let script = "trap '' XFSZ; ulimit -f 8; exec \"$@\"";
    let output = Command::new("sh")
        .args(["-c", script, "sh", env!("CARGO_BIN_EXE_k3"), "run", "--quiet", "--memory", "64M", "--ids", "5,6,7,9"])
        .args(["--max-tokens", "3", "--ignore-eos", "--session", utf8(&session)])
        .arg(tiny())
        .env_remove("K3_MODEL")
        .output()
        .expect("sh");
    assert_eq!(output.status.code(), Some(5), "{}", err(&output));
    assert!(err(&output).contains("as it was before"), "{}", err(&output));
    assert!(std::fs::read(&session).expect("the session") == good);
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 1);
}

/// What a sampler, a session and a conversation hold is counted: the least budget that is accepted is kept.
#[test]
fn the_least_budget_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("s.k3");
    let attempt = |memory: &str| {
        let args = ["chat", "--json", "--message", "one", "--max-tokens", "6", "--temperature", "1", "--logprobs", "4"];
        // The second time the conversation is longer: the context is the same for both.
        let more =
            ["--session", utf8(&session), "--memory", memory, "--threads", "1", "--think", "off", "--context", "300"];
        output(&[&args[..], &more].concat())
    };
    keeps_least_budget(&attempt, 2);
    // Log-probabilities are most of this: they were not counted once.
    let many = ["run", "--json", "--ids", "5,6", "--max-tokens", "60", "--ignore-eos", "--logprobs", "1000"];
    keeps_least_budget(&|memory| output(&[&many[..], &["--memory", memory, "--threads", "1"]].concat()), 1);
}

/// Learns the least budget from a refusal, and holds so many runs to it.
fn keeps_least_budget(attempt: &dyn Fn(&str) -> Output, times: usize) {
    let refused = attempt("1M");
    assert_eq!(refused.status.code(), Some(4), "{}", err(&refused));
    let message = err(&refused);
    let floor = message.split("the least is ").nth(1).and_then(|rest| rest.split(['(', ' ']).nth(3));
    let floor: u64 = floor.and_then(|f| f.parse().ok()).unwrap_or_else(|| panic!("no floor in {message}"));
    for _ in 0..times {
        let object = json(&attempt(&floor.to_string()));
        let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
        assert!(peak <= floor, "peak {peak} of {floor}");
        let planned = object["memory"]["planned_bytes"].as_u64().expect("a sum");
        assert!(planned <= floor, "{planned} of {floor}");
    }
}

#[test]
fn one_answer_as_json() {
    let plain = plain();
    let plain = strs(&plain);
    let said = ["--message", "What is <|open|>?", "--max-tokens", "6"];
    let object = chat(&[&said[..], &plain, &["--system", "Be brief."]].concat());
    assert_eq!(object["finish_reason"], "length");
    assert_eq!(object["message"]["role"], "assistant");
    assert!(object["message"]["reasoning_content"].is_string(), "the model begins with thinking");
    assert_eq!(object["generated_ids"].as_array().expect("ids").len(), 6);
    for (group, field) in [
        ("usage", "prompt_tokens"),
        ("usage", "reused_tokens"),
        ("usage", "generated_tokens"),
        ("memory", "planned_bytes"),
        ("io", "bytes_read"),
        ("seconds", "total"),
        ("seconds", "prefill"),
    ] {
        assert!(object[group][field].is_number(), "{group}.{field}: {object}");
    }
    let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
    assert!(peak < 64_000_000, "{peak}");
    // The same as a list of messages, from a pipe.
    let list = r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is <|open|>?"}]"#;
    let mut child = k3(&["chat", "--json", "--quiet", "--memory", "64M", "--messages", "-", "--max-tokens", "6"])
        .args(&plain)
        .arg(tiny())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("k3");
    child.stdin.take().expect("a pipe").write_all(list.as_bytes()).expect("write");
    let same = json(&child.wait_with_output().expect("k3"));
    assert_eq!(same["generated_ids"], object["generated_ids"]);
    assert_eq!(same["usage"]["prompt_tokens"], object["usage"]["prompt_tokens"]);
    // Without thinking it begins with the answer; an id that ends a message ends it.
    let end_of_msg = vocab() - 256 + 2;
    let bias = format!("{end_of_msg}=1000");
    let stopped = chat(&[&said[..], &["--think", "off", "--logit-bias", &bias]].concat());
    assert_eq!(stopped["finish_reason"], "stop");
    assert_eq!(stopped["stopped_by"]["id"], end_of_msg);
    assert_eq!(
        (&stopped["message"]["content"], stopped["usage"]["generated_tokens"].as_u64()),
        (&Value::from(""), Some(0))
    );
    let off = chat(&[&said[..], &plain, &["--think", "off"]].concat());
    assert_eq!(off["message"]["reasoning_content"], "");
}

/// Turn two does not read turn one again, in one process and across processes, and it is the same text.
#[test]
fn turns_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("talk.k3");
    let keep = ["--think", "off", "--max-tokens", "5", "--session", utf8(&session)];
    let plain = plain();
    let plain = strs(&plain);
    let first = chat(&[&keep[..], &plain, &["--message", "one"]].concat());
    let second = chat(
        &[&plain[..], &["--max-tokens", "5", "--session", utf8(&session), "--message", "two", "--speculate", "2"]]
            .concat(),
    );
    let usage = |object: &Value, field: &str| object["usage"][field].as_u64().expect("a count");
    let read_before = usage(&first, "prompt_tokens") + usage(&first, "generated_tokens") - 1;
    assert_eq!(usage(&second, "reused_tokens"), read_before);
    assert!(usage(&second, "prompt_tokens") > read_before + 1);

    // The same in one dialogue.
    let saved = folder.path().join("talk.json");
    let script = format!("/help\n/stats\n/nonsense\none\n\ntwo\n/stats\n/save {}\n/quit\nnever\n", utf8(&saved));
    let args = ["chat", "--memory", "64M", "--think", "off", "--max-tokens", "5"];
    let mut child = k3(&args)
        .args(&plain)
        .arg(tiny())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3");
    child.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("write");
    let output = child.wait_with_output().expect("k3");
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let talk: Value = serde_json::from_slice(&std::fs::read(&saved).expect("saved")).expect("JSON");
    assert_eq!(talk[0]["content"], "one");
    assert_eq!(talk[1]["content"], first["message"]["content"]);
    assert_eq!(talk[3]["content"], second["message"]["content"]);
    assert_eq!(talk.as_array().expect("a list").len(), 4);
    for part in ["/load FILE", "/nonsense is no command", "2 turns", "cut at --max-tokens"] {
        assert!(err(&output).contains(part), "{part}: {}", err(&output));
    }
    let both = [&first, &second].map(|o| o["message"]["content"].as_str().expect("text").to_owned() + "\n").concat();
    assert_eq!(String::from_utf8_lossy(&output.stdout), both);

    // Whoever reads the answers goes away: the rest of the script is said to nobody.
    let mut child = k3(&["chat", "--memory", "64M", "--think", "off", "--max-tokens", "5"])
        .args(&plain)
        .arg(tiny())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3");
    drop(child.stdout.take());
    child.stdin.take().expect("a pipe").write_all(b"one\ntwo\n/stats\n").expect("write");
    let output = child.wait_with_output().expect("k3");
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    assert!(!err(&output).contains("turns"), "{}", err(&output));

    // What is saved replaces no file that is in use.
    let model = folder.path().join("model");
    k3_tests::copy_dir(&tiny(), &model);
    let config = std::fs::read(model.join("config.json")).expect("a config");
    let before = std::fs::read(&session).expect("a session");
    let script = format!("/save {}\n/save {}\n/quit\n", utf8(&model.join("config.json")), utf8(&session));
    let args = ["chat", "--memory", "64M", "--quiet", "--session", utf8(&session)];
    let mut child = k3(&args).arg(&model).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
    child.stdin.take().expect("a pipe").write_all(script.as_bytes()).expect("write");
    let output = child.wait_with_output().expect("k3");
    assert!(err(&output).contains("a file of the model"), "{}", err(&output));
    assert!(err(&output).contains("named twice"), "{}", err(&output));
    assert!(std::fs::read(model.join("config.json")).expect("a config") == config);
    assert!(std::fs::read(&session).expect("a session") == before);

    // A session of k3 run is none of a chat.
    let other = folder.path().join("run.k3");
    run(&[&PROMPT[..], &["--max-tokens", "2", "--session", utf8(&other)]].concat());
    let refused = self::output(&["chat", "--message", "x", "--session", utf8(&other)]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(err(&refused).contains("no conversation"), "{}", err(&refused));
}

/// An untrained model, or an unlucky one, writes control ids where they have no place.
#[test]
fn a_malformed_answer_spoils_no_session() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("talk.k3");
    let keep = ["--max-tokens", "3", "--session", utf8(&session)];
    let bias = format!("{}=1000", vocab() - 2);
    let first = chat(&[&keep[..], &["--think", "off", "--message", "one", "--logit-bias", &bias]].concat());
    assert!(first["malformed"].as_str().is_some_and(|fault| fault.contains("[UNK]")), "{first}");
    assert_eq!((&first["message"]["content"], &first["finish_reason"]), (&Value::from(""), &Value::from("length")));
    let plain = plain();
    let second = chat(&[&keep[..], &strs(&plain), &["--message", "two"]].concat());
    assert!(second["malformed"].is_null());
    // All but the answer is what it was.
    assert_eq!(second["usage"]["reused_tokens"], first["usage"]["prompt_tokens"]);
}

/// The story: the answer ended and the program waited for the next line, which nobody would type.
#[test]
fn a_dialogue_that_is_terminated_ends_and_is_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("talk.k3");
    let args = ["chat", "--quiet", "--memory", "200M", "--think", "off", "--max-tokens", "3000"];
    let mut child = k3(&args)
        .args(["--session", utf8(&session)])
        .arg(root().join("fixtures/demo"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("k3");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"one\n").expect("write");
    std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut [0; 8]).expect("text");
    super::send(&child, Signal::TERM);
    // A program that waits for a line waits for as long as the pipe is open.
    std::io::Read::read_to_end(child.stdout.as_mut().expect("a pipe"), &mut Vec::new()).expect("text");
    assert_eq!(child.wait().expect("k3").code(), Some(143));
    drop(stdin);
    assert!(std::fs::metadata(&session).expect("a session").len() > 1000);
}

/// The story: a signal that came while the end of an answer was told and kept was forgotten, and the next line was
/// answered.
#[test]
fn a_signal_behind_an_answer_ends_the_dialogue() {
    let (mut told, mut tells) = std::io::pipe().expect("a pipe");
    // As much as the pipe holds: what is told behind an answer waits for somebody to read it.
    rustix::fs::fcntl_setfl(&tells, rustix::fs::OFlags::NONBLOCK).expect("fcntl");
    for size in [4096, 1] {
        while tells.write_all(&vec![b'.'; size]).is_ok() {}
    }
    rustix::fs::fcntl_setfl(&tells, rustix::fs::OFlags::empty()).expect("fcntl");
    let mut child = k3(&["chat", "--quiet", "--memory", "200M", "--think", "off", "--max-tokens", "3"])
        .arg(root().join("fixtures/demo"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(tells)
        .spawn()
        .expect("k3");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(b"one\n").expect("write");
    let mut out = child.stdout.take().expect("a pipe");
    std::io::Read::read_exact(&mut out, &mut [0; 4]).expect("text");
    std::thread::sleep(std::time::Duration::from_secs(1));
    super::send(&child, Signal::TERM);
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert!(child.try_wait().expect("wait").is_none(), "it told nothing");
    let reader = std::thread::spawn(move || std::io::Read::read_to_end(&mut told, &mut Vec::new()));
    // What would be answered.
    stdin.write_all(b"two\n").expect("write");
    assert_eq!(super::ends::ended(&mut child).code(), Some(143));
    drop(stdin);
    reader.join().expect("no panic").expect("read");
}

/// Ctrl-C ends the answer, and what was read of it is kept.
#[test]
fn a_signal_ends_the_answer_and_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let session = folder.path().join("s.k3");
    let mut child = k3(&["run", "--quiet", "--memory", "64M", "--ignore-eos", "--max-tokens", "20000", "--ids", "5,6"])
        .args(["--session", utf8(&session)])
        .arg(tiny())
        .stdout(Stdio::piped())
        .spawn()
        .expect("k3");
    // Until there is some of it.
    let mut some = [0; 8];
    std::io::Read::read_exact(child.stdout.as_mut().expect("a pipe"), &mut some).expect("text");
    super::send(&child, Signal::INT);
    // A pipe that nobody reads would hold it.
    let mut rest = Vec::new();
    std::io::Read::read_to_end(child.stdout.as_mut().expect("a pipe"), &mut rest).expect("text");
    assert_eq!(child.wait().expect("k3").code(), Some(130));
    let next = run(&["--session", utf8(&session), "--max-tokens", "1"]);
    let usage = &next["usage"];
    assert_eq!(usage["reused_tokens"].as_u64(), usage["prompt_tokens"].as_u64().map(|n| n - 1));
}

#[cfg(feature = "demo")]
#[test]
fn the_demo_says_that_it_does_not_answer() {
    let output =
        k3(&["chat", "--message", "Who art thou?", "--max-tokens", "4", "--memory", "200M"]).output().expect("k3");
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    assert!(err(&output).contains("base model"), "{}", err(&output));
    assert!(!output.stdout.is_empty(), "it continues the text");
}

/// A command at a terminal of its own: `script` makes one, and passes on what is written to it.
struct Terminal {
    child: std::process::Child,
    seen: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
}

impl Terminal {
    /// `None` where there is no `script`.
    fn new(args: &[&str], dir: &Path) -> Option<Self> {
        let word = |word: &str| format!(" '{}'", word.replace('\'', r"'\''"));
        let words = [&super::program()[..], args, &[utf8(dir)]].concat();
        let line = "exec".to_owned() + &words.into_iter().map(word).collect::<String>();
        let mut script = Command::new("script");
        script.args(["-q", "-e", "-f", "-c", &line, "/dev/null"]).env_remove("K3_MODEL").env("TERM", "xterm");
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let Ok(mut child) = script.spawn() else {
            println!("SKIPPED: script(1) is not here, which would make a terminal");
            return None;
        };
        let seen: std::sync::Arc<std::sync::Mutex<Vec<u8>>> = std::sync::Arc::default();
        let (mut out, into) = (child.stdout.take().expect("a pipe"), std::sync::Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut block = [0; 4096];
            while let Ok(n @ 1..) = std::io::Read::read(&mut out, &mut block) {
                into.lock().expect("no panic").extend_from_slice(&block[..n]);
            }
        });
        Some(Self { child, seen })
    }

    fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen.lock().expect("no panic")).into_owned()
    }

    fn count(&self, what: &str) -> usize {
        self.seen().matches(what).count()
    }

    /// Waits until `count` times `what` was shown.
    fn wait_for(&self, what: &str, count: usize) {
        let started = std::time::Instant::now();
        while self.count(what) < count {
            assert!(started.elapsed().as_secs() < 120, "no {what:?} in {}", self.seen());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }

    fn types(&mut self, keys: &str) {
        self.child.stdin.as_mut().expect("a pipe").write_all(keys.as_bytes()).expect("write");
    }

    fn ends(&mut self) -> Option<i32> {
        self.child.wait().expect("script").code()
    }
}

/// The story: each line was read with a buffer of its own, and what else had been typed was lost with it.
#[test]
fn lines_that_are_typed_ahead_are_all_read() {
    let args = ["chat", "--memory", "200M", "--think", "off", "--max-tokens", "3", "--quiet"];
    let Some(mut terminal) = Terminal::new(&args, &root().join("fixtures/demo")) else { return };
    terminal.wait_for("> ", 1);
    terminal.types("one\ntwo\n/stats\nthree\n/stats\n/quit\n");
    assert_eq!(terminal.ends(), Some(0), "{}", terminal.seen());
    for part in ["2 turns", "3 turns"] {
        assert!(terminal.seen().contains(part), "{part}: {}", terminal.seen());
    }
}

#[test]
fn ctrl_c_ends_the_answer_and_a_second_one_the_program() {
    let args = ["chat", "--memory", "200M", "--think", "off", "--max-tokens", "3000", "--quiet"];
    let dir = root().join("fixtures/demo");
    let Some(mut terminal) = Terminal::new(&args, &dir) else { return };
    terminal.wait_for("> ", 1);
    // At the prompt two of them are needed, with nothing between.
    terminal.types("half a line\x03");
    terminal.wait_for("Ctrl-C again, or /quit", 1);
    terminal.types("/think off\n\x03");
    terminal.wait_for("Ctrl-C again, or /quit", 2);
    for turn in 1..=2 {
        let (answers, prompts) = (terminal.count("And"), terminal.count("> "));
        terminal.types("Behold\n");
        // The model's answers begin with it.
        terminal.wait_for("And", answers + 1);
        terminal.types("\x03");
        terminal.wait_for("the answer was ended", turn);
        terminal.wait_for("> ", prompts + 1);
    }
    terminal.types("\x03");
    assert_eq!(terminal.ends(), Some(130), "{}", terminal.seen());
}
