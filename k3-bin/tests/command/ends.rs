//! How a process ends when it is told to, or killed: soon, and leaving nothing that was not asked for.

use super::{code, k3, send, text, tiny};
use rustix::process::Signal;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Waits for a process that was told to end once. A minute is not a matter of speed.
pub(crate) fn ended(child: &mut Child) -> ExitStatus {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("wait") {
            return status;
        }
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().expect("kill");
            panic!("one signal was not enough");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The story: a pipe that nobody opened was waited for after the signals had been taken over, and only
/// a second signal ended that.
#[test]
fn a_pipe_that_nobody_opens_is_left_at_the_first_signal() {
    use std::os::unix::process::ExitStatusExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let text = folder.path().join("text");
    std::fs::write(&text, "a text").expect("write");
    let text = text.to_str().expect("a path");
    for args in [
        &["run", "--ids", "1", "--trace"][..],
        &["run", "--ids", "1", "--dump-logits"],
        &["run", "--prompt-file"],
        &["perplexity", "--file"],
        &["perplexity", "--file", text, "--nll-out"],
        &["ladder", "--budgets", "64M", "--out"],
        &["ladder", "--budgets", "64M", "--svg"],
        &["batch", "--output", text, "--input"],
        &["chat", "--message", "a", "--tools"],
        &["chat", "--messages"],
        &["verify", "--hash"],
        &["tokenize", "--json", "--file"],
        &["detokenize", "--json", "--file"],
    ] {
        let mut child =
            k3().args(args).arg(&pipe).arg(tiny()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(200));
        assert!(child.try_wait().expect("wait").is_none(), "{args:?} did not wait");
        send(&child, Signal::TERM);
        let status = ended(&mut child);
        assert!(status.signal() == Some(15) || status.code() == Some(143), "{args:?}: {status}");
    }
}

/// The story: what a command of a dialogue opens is opened when signals have long been taken over, and the first
/// one was not seen.
#[test]
fn a_dialogue_is_not_held_up_by_a_pipe_that_nobody_opens() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    for command in ["/save", "/load"] {
        let mut chat = k3();
        chat.args(["chat", "--memory", "64M", "--quiet"]).arg(tiny());
        let mut child = chat.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("k3");
        let mut stdin = child.stdin.take().expect("stdin");
        writeln!(stdin, "{command} {}", pipe.display()).expect("a line");
        std::thread::sleep(Duration::from_millis(1500));
        assert!(child.try_wait().expect("wait").is_none(), "{command} did not wait");
        send(&child, Signal::TERM);
        assert_eq!(ended(&mut child).code(), Some(143), "{command}");
        drop(stdin);
    }
}

/// A pipe that somebody opens later is written to and read from.
#[test]
fn a_pipe_is_waited_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let late = || std::thread::sleep(Duration::from_millis(300));
    let mut run = k3();
    run.args(["run", "--ids", "1,2", "--max-tokens", "2", "--ignore-eos", "--quiet", "--trace"]).arg(&pipe).arg(tiny());
    let mut child = run.stdout(Stdio::null()).spawn().expect("k3");
    late();
    let trace = std::fs::read(&pipe).expect("a trace");
    assert!(ended(&mut child).success() && trace.len() >= 16, "{} bytes", trace.len());
    // More than a pipe holds, in parts, with pauses.
    let words = "some words ".repeat(20_000);
    let mut count = k3();
    count.args(["tokenize", "--json", "--count", "--file"]).arg(&pipe).arg(tiny());
    let child = count.stdout(Stdio::piped()).spawn().expect("k3");
    late();
    let mut write = std::fs::File::options().write(true).open(&pipe).expect("the pipe");
    for part in words.as_bytes().chunks(100_000) {
        write.write_all(part).expect("write");
        late();
    }
    drop(write);
    let output = child.wait_with_output().expect("k3");
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(object["bytes"], words.len());
}

/// A signal ends what would never end, and what was begun as JSON is closed.
#[test]
fn a_signal_closes_the_object() {
    for (signal, expected, word) in [(Signal::INT, 130, "interrupted"), (Signal::TERM, 143, "terminated")] {
        for command in ["tokenize", "detokenize"] {
            let mut child = k3()
                .args([command, "--json"])
                .arg(tiny())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("k3");
            let mut stdin = child.stdin.take().expect("stdin");
            stdin.write_all(b"1 2 3 ").expect("write");
            std::thread::sleep(Duration::from_millis(700));
            send(&child, signal);
            let output = child.wait_with_output().expect("k3");
            drop(stdin);
            assert_eq!(code(&output), expected);
            let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
            assert!(object["error"].as_str().is_some_and(|error| error.contains(word)), "{object}");
        }
    }
}

/// The story: a full pipe held the process in a write, where it did not see the signal.
#[test]
fn a_reader_that_takes_nothing_does_not_hold_up_the_end() {
    for json in [false, true] {
        let (read, mut write) = std::io::pipe().expect("a pipe");
        // As much as a pipe holds.
        write.write_all(&vec![b'x'; 1 << 16]).expect("write");
        let mut command = k3();
        command.args(["run", "--ids", "1,2", "--max-tokens", "1000000", "--ignore-eos", "--quiet"]);
        if json {
            command.arg("--json");
        }
        let mut child = command.arg(tiny()).stdout(write).stderr(Stdio::null()).spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(500));
        send(&child, Signal::TERM);
        let status = ended(&mut child);
        assert_eq!(status.code(), Some(143));
        drop(read);
    }
}

/// The story: what a script had put into the background ended when the user interrupted something else.
#[test]
fn a_signal_that_was_ignored_stays_ignored() {
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' INT; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_k3")]);
    command.args(["run", "--ids", "1,2", "--max-tokens", "1000000", "--ignore-eos", "--quiet", "--json"]);
    let mut child = command.arg(tiny()).env_remove("K3_MODEL").stdout(Stdio::piped()).spawn().expect("sh");
    std::thread::sleep(Duration::from_millis(500));
    send(&child, Signal::INT);
    send(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().expect("wait").is_none(), "it ended by a signal that was ignored");
    send(&child, Signal::TERM);
    assert_eq!(ended(&mut child).code(), Some(143));
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_kill_at_any_moment_leaves_what_was_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    let [work, temporary, home] = ["work", "tmp", "home"].map(|name| folder.join(name));
    for dir in [&work, &temporary, &home] {
        std::fs::create_dir(dir).expect("create");
    }
    let command = || {
        let mut command = k3();
        // No folder for the demo, and an empty one for whatever else comes to mind.
        command.env("TMPDIR", &temporary).env("HOME", &home).env("XDG_CACHE_HOME", "/proc/self");
        command.current_dir(&work).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let mut seed = 20u64;
    for round in 0..24 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let delay = Duration::from_millis((seed >> 33) % [30, 150, 500][round % 3]);
        let mut run = command();
        run.args([
            "run",
            "--ids",
            "1,2,3,4,5,6,7,8",
            "--max-tokens",
            "3",
            "--trace",
            "trace",
            "--dump-logits",
            "l.npy",
        ]);
        #[cfg(not(feature = "demo"))]
        run.arg(tiny());
        let mut child = run.spawn().expect("k3");
        std::thread::sleep(delay);
        send(&child, if round % 2 == 0 { Signal::KILL } else { Signal::TERM });
        ended(&mut child);
        for name in names(&work) {
            // Under its name a file is whole.
            let bytes = std::fs::read(work.join(&name)).expect("read");
            match name.as_str() {
                "trace" => assert!(bytes.len() >= 16 && bytes.len() % 8 == 0),
                "l.npy" => {
                    let header = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
                    assert!(text(&bytes[..header]).contains("(8, "));
                    assert_eq!((bytes.len() - header) % (8 * 4), 0);
                }
                other => panic!("{other} after {delay:?}"),
            }
            std::fs::remove_file(work.join(name)).expect("remove");
        }
        assert!(names(&temporary).is_empty() && names(&home).is_empty(), "after {delay:?}");
    }
    // A checkpoint that was not finished is none, and is in its own folder.
    let config = k3_tests::root().join("fixtures/tiny/config.json");
    for round in 0..6 {
        let mut synth = command();
        synth.args(["synth", "model", "--fill-all", "--config"]).arg(&config);
        let mut child = synth.spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(round * 6));
        child.kill().expect("kill");
        child.wait().expect("wait");
        assert!(names(&work).iter().all(|name| name == "model"));
        let output = k3().args(["run", "--ids", "1", "--quiet"]).arg(work.join("model")).output().expect("k3");
        let whole = work.join("model/config.json").exists();
        assert_eq!(code(&output), if whole { 0 } else { 3 }, "{}", text(&output.stderr));
        let _ = std::fs::remove_dir_all(work.join("model"));
    }
    assert!(names(&temporary).is_empty() && names(&home).is_empty());
}
