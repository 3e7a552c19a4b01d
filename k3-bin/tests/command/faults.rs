//! Faults of the disk and of the surroundings, as a person meets them. `tests/README.md` has the table;
//! each of its lines is a test here or in `tests/suite/faults.rs`.

use super::ends::ended;
use super::trust::{copy, scales};
use super::{code, k3, npy, send, text, tiny};
use rustix::process::Signal;
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const IDS: [&str; 9] = ["run", "--ids", "1,2,3,4,5", "--max-tokens", "6", "--ignore-eos", "--memory", "64M", "--chunk"];

/// A run of a few tokens; arguments may follow.
fn run(dir: &Path) -> Command {
    let mut command = k3();
    command.args(IDS).arg("4").arg(dir);
    command
}

/// What it prints where nothing goes wrong.
fn undisturbed() -> Vec<u8> {
    let output = run(&tiny()).arg("--quiet").output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(output.stdout.len() > 5);
    output.stdout
}

/// Nothing that was printed is wrong: it is where the undisturbed text begins.
fn honest(output: &Output, expected: &[u8]) {
    let printed = output.stdout.strip_suffix(b"\n").unwrap_or(&output.stdout);
    assert!(expected.starts_with(printed), "{:?} is not the beginning of {:?}", text(printed), text(expected));
}

/// Whether faults can be asked for: a released binary has none.
///
/// The story: tests of other files asked, too, and no run of CI had both them and faults. It builds with debug
/// assertions for the tests of this file only.
fn injected() -> bool {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    assert!(test == "main" || test.starts_with("faults::"), "{test} belongs into faults.rs, or nobody runs it");
    if !cfg!(debug_assertions) {
        println!("SKIPPED: faults need a build with debug assertions");
    }
    cfg!(debug_assertions)
}

fn faulty(faults: &str, args: &[&str]) -> Output {
    run(&tiny()).args(args).env("K3_FAULTS", faults).output().expect("k3")
}

#[test]
fn a_read_that_fails_ends_the_run_with_5_wherever_it_is() {
    if !injected() {
        return;
    }
    let expected = undisturbed();
    // Headers, trunk, experts, head: from the first read to where there are no more.
    let mut met = 0;
    for read in [0, 1, 5, 20, 30, 40, 60, 90, 130, 200, 300, 100_000] {
        // A budget that keeps nothing, so that reading goes on through the run.
        let output = faulty(&format!("fail_read={read}"), &["--quiet"]);
        honest(&output, &expected);
        let message = text(&output.stderr);
        match code(&output) {
            0 => assert!(output.stdout == expected && read > 30, "{read}"),
            5 => {
                assert!(
                    message.contains("nput/output error") && message.contains(&*tiny().to_string_lossy()),
                    "{message}"
                );
                met += 1;
            }
            other => panic!("read {read}: {other}: {message}"),
        }
    }
    assert!(met >= 5, "{met}");
}

#[test]
fn short_and_interrupted_reads_are_not_seen() {
    if !injected() {
        return;
    }
    let expected = undisturbed();
    for seed in 0..3 {
        let output = faulty(&format!("short=2,interrupt=2,seed={seed}"), &["--quiet"]);
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        assert_eq!(output.stdout, expected);
    }
}

#[test]
fn a_read_that_never_returns_is_named() {
    if !injected() {
        return;
    }
    let expected = undisturbed();
    let started = std::time::Instant::now();
    let output = faulty("hang_read=40", &["--quiet", "--io-timeout", "1"]);
    assert_eq!(code(&output), 5, "{}", text(&output.stderr));
    honest(&output, &expected);
    let message = text(&output.stderr);
    for part in [".safetensors: read at byte", "has brought nothing for", "--io-timeout"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(started.elapsed() < Duration::from_secs(50), "the default is a minute");
    // A signal ends the wait as well.
    let child = run(&tiny())
        .args(["--quiet", "--io-timeout", "0"])
        .env("K3_FAULTS", "hang_read=40")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("k3");
    std::thread::sleep(Duration::from_millis(700));
    send(&child, Signal::TERM);
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 143, "{}", text(&output.stderr));
    honest(&output, &expected);
}

/// Config, index, headers and vocabulary: what is read before there is a plan.
#[test]
fn a_small_file_that_never_comes_is_named() {
    if !injected() {
        return;
    }
    let mut named = std::collections::BTreeSet::new();
    for read in [0, 1, 2, 5, 12, 20] {
        let output = faulty(&format!("hang_read={read}"), &["--quiet", "--io-timeout", "1"]);
        let message = text(&output.stderr);
        assert_eq!(code(&output), 5, "read {read}: {message}");
        for part in ["has brought nothing for 1 s", "--io-timeout"] {
            assert!(message.contains(part), "read {read}: {message}");
        }
        assert!(output.stdout.is_empty());
        let name = message.split([':', '/']).find(|part| part.contains(".json") || part.contains(".safetensors"));
        named.insert(name.unwrap_or_else(|| panic!("no file in {message}")).to_owned());
    }
    assert!(named.contains("config.json") && named.contains("model.safetensors.index.json"), "{named:?}");
    assert!(named.iter().any(|name| name.ends_with(".safetensors")), "{named:?}");
    // A signal ends the wait as well.
    let mut command = run(&tiny());
    command.args(["--quiet", "--io-timeout", "0"]).env("K3_FAULTS", "hang_read=2");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
    std::thread::sleep(Duration::from_millis(700));
    send(&child, Signal::TERM);
    let output = child.wait_with_output().expect("k3");
    assert_eq!((code(&output), output.stdout.len()), (143, 0), "{}", text(&output.stderr));
}

/// A check that is stopped while a header hangs has found nothing, least of all faults.
#[test]
fn a_check_that_is_stopped_at_a_header_finds_no_fault() {
    if !injected() {
        return;
    }
    // The config, the index, a header, and one of the last.
    for read in [0, 1, 2, 12] {
        let mut command = k3();
        command.args(["verify", "--io-timeout", "0"]).arg(tiny()).env("K3_FAULTS", format!("hang_read={read}"));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(700));
        send(&child, Signal::TERM);
        let output = child.wait_with_output().expect("k3");
        assert_eq!((code(&output), text(&output.stdout)), (143, String::new()), "read {read}");
    }
    // One that is given up is a fault of the disk, and of no file.
    let mut command = k3();
    command.args(["verify", "--io-timeout", "1"]).arg(tiny()).env("K3_FAULTS", "hang_read=3");
    let output = command.output().expect("k3");
    let lines = text(&output.stdout);
    assert_eq!(code(&output), 5, "{lines}");
    assert!(lines.contains("has brought nothing for 1 s") && lines.contains("--io-timeout"), "{lines}");
    assert!(!lines.contains("rm -f"), "{lines}");
}

/// The story: only the headers of a pack had a limit; its bulk reads waited for ever.
#[test]
fn a_pack_gives_up_on_a_disk_that_does_not_answer() {
    if !injected() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let whole = folder.path().join("whole.k3");
    let pack = |faults: &str, args: &[&std::ffi::OsStr]| {
        let mut command = k3();
        command.args(["pack", "--quiet"]).args(args).env("K3_FAULTS", faults);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let model = tiny();
    let done = pack("", &[model.as_os_str(), whole.as_os_str()]).env_remove("K3_FAULTS").output().expect("k3");
    assert_eq!(code(&done), 0, "{}", text(&done.stderr));
    let out = folder.path().join("out.k3");
    let shard = "only=model-00003-of-000012.safetensors,hang_read=";
    let verify = std::ffi::OsStr::new("--verify");
    let timeout = ["--io-timeout", "1"].map(std::ffi::OsStr::new);
    // Of each file the first two reads are of its header and its table.
    std::thread::scope(|scope| {
        for (read, case) in (0..4).flat_map(|read| (0..5).map(move |case| (read, case))) {
            let (pack, model, whole) = (&pack, &model, &whole);
            scope.spawn(move || {
                // A pack that is written is each run's own.
                let name = format!("out-{read}-{case}.k3");
                let out = whole.with_file_name(&name);
                let (file, args) = match case {
                    0 => (shard.to_owned(), vec![model.as_os_str(), out.as_os_str()]),
                    1 => (format!("only={name}.part,hang_read="), vec![model.as_os_str(), out.as_os_str()]),
                    2 => ("only=whole.k3,hang_read=".to_owned(), vec![verify, whole.as_os_str()]),
                    3 => ("only=whole.k3,hang_read=".to_owned(), vec![verify, whole.as_os_str(), model.as_os_str()]),
                    _ => (shard.to_owned(), vec![verify, whole.as_os_str(), model.as_os_str()]),
                };
                let args: Vec<_> = timeout.into_iter().chain(args).collect();
                let output = pack(&format!("{file}{read}"), &args).output().expect("k3");
                let message = text(&output.stderr);
                if code(&output) == 0 {
                    assert!(read > 2, "{file}{read}: no read hung");
                    return;
                }
                assert_eq!(code(&output), 5, "{file}{read}: {message}");
                for part in ["read at byte", "has brought nothing for", "--io-timeout"] {
                    assert!(message.contains(part), "{file}{read}: {message}");
                }
                assert!(!out.exists(), "{file}{read}");
            });
        }
    });
    // What only looks at its table has the same limit.
    for read in 0..2 {
        let mut inspect = k3();
        inspect.args(["inspect", "--io-timeout", "1"]).arg(&whole);
        let output = inspect.env("K3_FAULTS", format!("only=whole.k3,hang_read={read}")).output().expect("k3");
        assert_eq!(code(&output), 5, "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("has brought nothing for 1 s"), "{}", text(&output.stderr));
    }
    // A signal ends the wait as well.
    let stages = [
        (format!("{shard}2"), vec![model.as_os_str(), out.as_os_str()]),
        ("only=whole.k3,hang_read=2".to_owned(), vec![verify, whole.as_os_str()]),
    ];
    for (faults, args) in stages {
        let args: Vec<_> = ["--io-timeout", "0"].map(std::ffi::OsStr::new).into_iter().chain(args).collect();
        let child = pack(&faults, &args).spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(700));
        send(&child, Signal::TERM);
        let output = child.wait_with_output().expect("k3");
        assert_eq!(code(&output), 143, "{faults}: {}", text(&output.stderr));
    }
}

/// The story: what a session knows its model by was read by nobody but the command itself, which saw neither the
/// limit nor a signal.
#[test]
fn a_session_gives_up_on_a_disk_that_does_not_answer() {
    if !injected() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let session = |read: u32, seconds: &str| {
        let mut command = run(&tiny());
        command.args(["--quiet", "--io-timeout", seconds, "--session"]).arg(folder.path().join(format!("s{read}")));
        command.env("K3_FAULTS", format!("hang_read={read}")).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    // From the last headers to the first reads of a pass.
    let reads = 20..44;
    let mut running: Vec<_> = reads.map(|read| (read, session(read, "1").spawn().expect("k3"))).collect();
    for (read, child) in &mut running {
        assert_eq!(ended(child).code(), Some(5), "read {read}");
        let mut message = String::new();
        std::io::Read::read_to_string(child.stderr.as_mut().expect("a pipe"), &mut message).expect("text");
        for part in ["has brought nothing for", "--io-timeout"] {
            assert!(message.contains(part), "read {read}: {message}");
        }
    }
    assert!(!std::fs::exists(folder.path().join("s28")).expect("a folder"));
    // A signal ends the wait as well.
    let mut running: Vec<_> = (27..31).map(|read| session(read, "0").spawn().expect("k3")).collect();
    std::thread::sleep(Duration::from_millis(1500));
    for child in &mut running {
        send(child, Signal::TERM);
        assert_eq!(ended(child).code(), Some(143));
    }
}

/// The story: the time in which a process was stopped counted as time in which the disk did not answer.
#[test]
fn a_run_that_is_stopped_and_continued_is_none_of_the_disks_faults() {
    let expected = undisturbed();
    // A disk so slow that a read is always waited for, and so little memory that all of them are short.
    let run = |memory: &str| {
        let mut command = k3();
        command.args(IDS.map(|arg| if arg == "64M" { memory } else { arg })).args(["4", "--quiet"]).arg(tiny());
        command.args(["--io-timeout", "1", "--disk-limit", "0.002"]);
        command
    };
    let least = super::limits::floor(&run("1M").output().expect("k3")).to_string();
    let mut child = run(&least).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
    let mut stops = 0;
    std::thread::sleep(Duration::from_millis(400));
    while child.try_wait().expect("wait").is_none() {
        send(&child, Signal::STOP);
        std::thread::sleep(Duration::from_millis(1400));
        send(&child, Signal::CONT);
        stops += 1;
        // A few are enough; the rest runs in peace.
        if stops == 6 {
            break;
        }
        std::thread::sleep(Duration::from_millis(250));
    }
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 0, "after {stops} stops: {}", text(&output.stderr));
    assert!(output.stdout == expected && stops > 2, "{stops}");
}

/// A dialogue that is being opened, waits for its first line, or was only started, ends at the first signal.
#[test]
fn a_signal_ends_a_dialogue_that_has_not_begun() {
    let model = k3_tests::root().join("fixtures/demo");
    let moments = [0, 2, 5, 10, 15, 20, 30, 45, 70, 100, 150, 220, 320, 500, 800, 1200];
    for (i, millis) in moments.into_iter().enumerate() {
        // Where SIGINT has to be put at its default first, one that comes earlier is lost.
        let listens = super::program().len() == 1 || millis > 100;
        let signal = if i % 2 == 0 && listens { Signal::INT } else { Signal::TERM };
        let mut chat = k3();
        chat.args(["chat", "--quiet", "--memory", "200M"]).arg(&model).stdin(Stdio::piped());
        let mut child = chat.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("k3");
        let stdin = child.stdin.take();
        std::thread::sleep(Duration::from_millis(millis));
        send(&child, signal);
        let status = ended(&mut child);
        let number = signal.as_raw();
        // By the signal itself before the command had begun to listen.
        assert!(
            status.signal() == Some(number) || status.code() == Some(128 + number),
            "{millis} ms, {signal:?}: {status}"
        );
        drop(stdin);
    }
}

/// A rung is read from as the ladder was told to.
#[test]
fn a_rung_waits_for_its_disk_as_long_as_the_ladder_was_told() {
    if !injected() {
        return;
    }
    let mut command = k3();
    command.args(["ladder", "--json", "--quiet", "--budgets", "64M", "--max-tokens", "2", "--io-timeout", "1"]);
    let output = command.arg(tiny()).env("K3_FAULTS", "hang_read=40").output().expect("k3");
    assert_eq!(code(&output), 5, "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let reason = object["rungs"][0]["reason"].as_str().expect("a reason");
    assert!(reason.contains("has brought nothing for 1 s"), "{reason}");
}

/// A check of digests that is stopped goes on where it was.
#[test]
fn a_check_that_is_interrupted_goes_on() {
    if !injected() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let list = folder.path().join("sums");
    let names = std::fs::read_dir(tiny()).expect("read_dir").map(|e| e.expect("entry"));
    let names = names.filter(|e| e.path().is_file()).map(|e| e.file_name());
    let sums = Command::new("sha256sum").args(names).current_dir(tiny()).output().expect("sha256sum");
    std::fs::write(&list, sums.stdout).expect("write");
    let verify = || {
        let mut command = k3();
        command.args(["verify", "--json", "--threads", "1", "--hash"]).arg(&list).arg(tiny());
        command.env("XDG_CACHE_HOME", folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    // Behind the reads of the headers and of the first files.
    let child = verify().env("K3_FAULTS", "hang_read=38").spawn().expect("k3");
    std::thread::sleep(Duration::from_millis(1500));
    send(&child, Signal::INT);
    let output = child.wait_with_output().expect("k3");
    assert_eq!(code(&output), 130, "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("goes on from there") && output.stdout.is_empty());
    let output = verify().output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stdout));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let hash = &found["checks"]["hash"];
    assert!(hash["resumed"].as_u64() >= Some(2) && hash["digested"].as_u64() >= Some(2), "{found}");
}

/// What is foretold of a packed trunk is measured where it lies, which may be on another disk than the shards.
#[test]
fn a_packed_trunk_is_measured_where_it_lies() {
    if !injected() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let pack = folder.path().join("trunk.k3");
    let packed = k3().arg("pack").arg(tiny()).arg(&pack).output().expect("k3");
    assert_eq!(code(&packed), 0, "{}", text(&packed.stderr));
    let run = |args: &[&str], read: usize| {
        let mut command = k3();
        command.args(args).args(["--memory", "64M", "--threads", "1", "--trunk"]).arg(&pack).arg(tiny());
        command.env("K3_FAULTS", format!("fail_read={read},only=trunk.k3")).output().expect("k3")
    };
    // The first read that opening the pack does without.
    let opened = (0..20).find(|&read| code(&run(&["plan", "--disk", "1"], read)) == 0).expect("it is opened");
    for args in [&["plan"][..], &["doctor"], &["bench", "--seconds", "0", "--backend", "scalar"]] {
        let output = run(args, opened);
        assert_eq!(code(&output), 5, "{args:?}: {}", text(&output.stdout));
        assert!(text(&output.stderr).contains("trunk.k3: read at byte"), "{args:?}: {}", text(&output.stderr));
    }
}

/// Nor is a file told to be deleted because the disk did not bring it.
#[test]
fn a_check_of_a_disk_that_fails_deletes_no_file() {
    if !injected() {
        return;
    }
    let mut command = k3();
    command.env("K3_FAULTS", "fail_read=0,only=model-00006-of-000012.safetensors").arg("verify").arg(tiny());
    let output = command.output().expect("k3");
    let lines = text(&output.stdout);
    assert_eq!(code(&output), 5, "{lines} {}", text(&output.stderr));
    assert!(lines.contains("bad: ") && lines.contains("os error 5") && !lines.contains("rm -f"), "{lines}");
}

#[test]
fn a_file_that_shrinks_ends_the_run_with_5() {
    if !injected() {
        return;
    }
    let expected = undisturbed();
    let output = faulty("truncate=4096,truncate_from=40", &["--quiet"]);
    assert_eq!(code(&output), 5, "{}", text(&output.stderr));
    honest(&output, &expected);
    assert!(text(&output.stderr).contains("shrank while in use"), "{}", text(&output.stderr));
}

#[test]
fn a_panic_of_any_thread_aborts_and_leaves_no_file() {
    if !injected() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let dump = folder.path().join("logits.npy");
    for read in [0, 50] {
        let output = run(&tiny())
            .args(["--quiet", "--dump-logits"])
            .arg(&dump)
            .env("K3_FAULTS", format!("panic_read={read}"))
            .output()
            .expect("k3");
        // What a shell calls 134.
        assert_eq!(output.status.signal(), Some(6), "{:?} {}", output.status, text(&output.stderr));
        assert!(text(&output.stderr).contains("faulty.rs"), "{}", text(&output.stderr));
        assert_eq!(std::fs::read_dir(folder.path()).expect("read_dir").count(), 0, "nothing is left");
    }
}

#[test]
fn a_nan_scale_is_named_in_the_report() {
    let (_folder, dir) = copy();
    for expert in 0..40 {
        let tensor = format!("language_model.model.layers.2.block_sparse_moe.experts.{expert}.w1.weight_scale");
        let index = super::json(&dir.join("model.safetensors.index.json"));
        if index["weight_map"][&tensor].is_string() {
            scales(&dir, &tensor, 255, 1);
        }
    }
    let output = run(&dir).args(["--json", "--quiet"]).output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let damaged = found["damaged_experts"].as_array().expect("experts");
    assert!(!damaged.is_empty() && damaged.iter().all(|d| d["layer"] == 2 && d["nan_scale_bytes"] == 1), "{found}");
    assert!(text(&output.stderr).contains("of layer 2 has 1 scale bytes that are NaN"), "{}", text(&output.stderr));
}

#[test]
fn a_signal_at_any_moment_prints_only_what_is_true() {
    let run = |tokens: &str| {
        let mut command = k3();
        command.args(["run", "--json", "--quiet", "--ids", "1,2,3", "--ignore-eos", "--memory", "64M", "--max-tokens"]);
        command.arg(tokens).arg(tiny()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let whole: Value = serde_json::from_slice(&run("400").output().expect("k3").stdout).expect("JSON");
    let whole = whole["generated_ids"].as_array().expect("ids").clone();
    for (i, millis) in [0, 3, 10, 25, 60, 130, 260, 500].into_iter().enumerate() {
        // Where SIGINT has to be put at its default first, one that comes earlier is lost.
        let listens = super::program().len() == 1 || millis > 100;
        let signal = if i % 2 == 0 && listens { Signal::INT } else { Signal::TERM };
        let child = run("20000").spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(millis));
        send(&child, signal);
        let output = child.wait_with_output().expect("k3");
        if output.status.signal() == Some(signal.as_raw()) {
            // Before the command had begun to listen.
            assert!(output.stdout.is_empty());
            continue;
        }
        assert_eq!(code(&output), 128 + signal.as_raw(), "{}", text(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let ids = found["generated_ids"].as_array().expect("ids");
        let common = ids.len().min(whole.len());
        assert!(ids[..common] == whole[..common] && found["finish_reason"] == "cancelled", "{millis} ms");
    }
}

#[test]
fn a_kill_leaves_whole_files_or_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let dump = folder.path().join("logits.npy");
    let run = |ids: &str| {
        let mut command = k3();
        command.args(["run", "--quiet", "--max-tokens", "1", "--chunk", "1", "--ids", ids, "--dump-logits"]);
        command.arg(&dump).arg(tiny()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    assert!(run("1,2").status().expect("k3").success());
    let old = std::fs::read(&dump).expect("read");
    let ids = vec!["3"; 60].join(",");
    for millis in [5, 20, 60, 120, 200] {
        let mut child = run(&ids).spawn().expect("k3");
        std::thread::sleep(Duration::from_millis(millis));
        let _ended_before = child.kill();
        child.wait().expect("k3");
        let now = std::fs::read(&dump).expect("read");
        let rows = npy(&dump, f32::from_le_bytes).len();
        assert!(now == old || rows > old.len() / 4, "{millis} ms: a part of a file");
        if now != old {
            break;
        }
    }
}

/// A command that writes a file, and what tells a whole one.
struct Writer<'a> {
    args: Vec<&'a str>,
    whole: &'a dyn Fn(&Path),
}

/// Kills of each writer, spread over the time that it takes.
const KILLS: u32 = 5;

/// SIGKILL at any moment: the file is the old one or a whole new one, and nothing lies beside it.
#[test]
fn a_kill_of_any_writer_leaves_whole_files_or_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, inputs) = (tiny(), folder.path().join("in"));
    std::fs::create_dir(&inputs).expect("a folder");
    let (model, trace, text_file) = (model.to_str().expect("a path"), inputs.join("trace"), inputs.join("text"));
    std::fs::write(&text_file, "in the beginning ".repeat(8)).expect("write");
    let output = run(&tiny()).args(["--quiet", "--trace"]).arg(&trace).output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let (trace, text_file) = (trace.to_str().expect("a path"), text_file.to_str().expect("a path"));
    let svg = |path: &Path| assert!(std::fs::read_to_string(path).expect("text").trim_end().ends_with("</svg>"));
    let is_trace = |path: &Path| {
        let output = k3().arg("cachesim").arg(path).output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    };
    let table = |path: &Path| {
        let table = std::fs::read_to_string(path).expect("text");
        let columns: Vec<_> = table.lines().map(|line| line.split('\t').count()).collect();
        assert!(table.ends_with('\n') && columns == [12, 12, 12], "{table}");
    };
    let numbers = |path: &Path| assert!(!npy(path, f64::from_le_bytes).is_empty());
    let writers = [
        Writer {
            args: vec!["run", model, "--ids", "1,2", "--max-tokens", "40", "--ignore-eos", "--trace"],
            whole: &is_trace,
        },
        Writer { args: vec!["perplexity", model, "--file", text_file, "--nll-out"], whole: &numbers },
        Writer {
            args: vec!["ladder", model, "--ids", "1,2", "--max-tokens", "1", "--budgets", "1M,64M", "--out"],
            whole: &table,
        },
        Writer {
            args: vec!["ladder", model, "--ids", "1,2", "--max-tokens", "1", "--budgets", "64M", "--svg"],
            whole: &svg,
        },
        Writer { args: vec!["cachesim", trace, "--svg"], whole: &svg },
    ];
    let mut killed = 0;
    for (i, Writer { args, whole }) in writers.iter().enumerate() {
        let dir = folder.path().join(i.to_string());
        std::fs::create_dir(&dir).expect("a folder");
        let out = dir.join("out");
        let command = || {
            let mut command = k3();
            command.args(args).arg(&out).stdout(Stdio::null()).stderr(Stdio::null());
            command
        };
        let started = std::time::Instant::now();
        assert!(command().status().expect("k3").success(), "{args:?}");
        let takes = started.elapsed();
        whole(&out);
        // Something that every new file differs from.
        let old = b"what was there before";
        for moment in 0..KILLS {
            std::fs::write(&out, old).expect("write");
            let mut child = command().spawn().expect("k3");
            std::thread::sleep(takes * moment / (KILLS - 1));
            let _ended_before = child.kill();
            killed += u32::from(child.wait().expect("k3").signal() == Some(9));
            if std::fs::read(&out).expect("read") != old {
                whole(&out);
            }
            let left: Vec<_> = std::fs::read_dir(&dir).expect("read_dir").map(|e| e.expect("entry").path()).collect();
            assert!(left.len() == 1 && left[0] == out, "{args:?}: {left:?}");
        }
    }
    assert!(killed > KILLS, "only {killed} were killed");
}

/// The same of what goes on where it was: a session's text and a batch's answers are those of a run that
/// nobody killed.
#[test]
fn a_kill_of_a_session_or_a_batch_costs_no_word() {
    let folder = tempfile::tempdir().expect("a folder");
    let (dir, prompts) = (folder.path().join("out"), folder.path().join("prompts"));
    std::fs::create_dir(&dir).expect("a folder");
    let session = dir.join("session");
    let kept = |tokens: &str, prompt: &[&str]| {
        let mut command = k3();
        command.args(["run", "--json", "--quiet", "--ignore-eos", "--memory", "64M", "--max-tokens", tokens]);
        command.args(prompt).arg("--session").arg(&session).arg(tiny());
        command
    };
    let ids = |command: &mut Command| {
        let output = command.output().expect("k3");
        assert_eq!(code(&output), 0, "{}", text(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let part = |name: &str| found[name].as_array().expect("ids").clone();
        [part("prompt_ids"), part("generated_ids")].concat()
    };
    let started = std::time::Instant::now();
    let expected = ids(&mut kept("30", &["--ids", "1,2,3"]));
    let takes = started.elapsed();
    for moment in 0..KILLS {
        std::fs::remove_file(&session).expect("remove");
        assert_eq!(ids(&mut kept("2", &["--ids", "1,2,3"])), expected[..5]);
        let mut command = kept("25", &[]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("k3");
        std::thread::sleep(takes * moment / (KILLS - 1));
        let _ended_before = child.kill();
        child.wait().expect("k3");
        // A lock that nobody holds has no bytes, and goes with the next run.
        for beside in std::fs::read_dir(&dir).expect("read_dir").map(|e| e.expect("entry")) {
            let (name, len) = (beside.file_name(), beside.metadata().expect("metadata").len());
            assert!(name == "session" || name == "session.lock" && len == 0, "moment {moment}: {name:?} is left");
        }
        let found = ids(&mut kept("1", &[]));
        assert!(found.len() >= 6 && found[..] == expected[..found.len()], "moment {moment}: {found:?}");
    }

    let out = folder.path().join("answers");
    let lines: Vec<_> = (1..5).map(|i| format!("{{\"id\": {i}, \"ids\": [{i}, 2, 3]}}\n")).collect();
    std::fs::write(&prompts, lines.concat()).expect("write");
    let batch = || {
        let mut command = k3();
        command.args(["batch", "--quiet", "--ignore-eos", "--max-tokens", "4", "--memory", "64M", "--input"]);
        command.arg(&prompts).arg("--output").arg(&out).arg(tiny()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let answers = || {
        let lines = std::fs::read_to_string(&out).expect("text");
        let answers = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        // The last line sums up.
        let answers = answers.filter(|a| !a["id"].is_null());
        let mut answers: Vec<_> = answers.map(|a| (a["id"].to_string(), a["generated_ids"].clone())).collect();
        answers.sort_by(|a, b| a.0.cmp(&b.0));
        answers
    };
    let started = std::time::Instant::now();
    assert!(batch().status().expect("k3").success());
    let takes = started.elapsed();
    let expected = answers();
    assert_eq!(expected.len(), 4);
    for moment in 0..KILLS {
        std::fs::remove_file(&out).expect("remove");
        let mut child = batch().spawn().expect("k3");
        std::thread::sleep(takes * moment / (KILLS - 1));
        let _ended_before = child.kill();
        child.wait().expect("k3");
        assert!(batch().status().expect("k3").success(), "moment {moment}");
        assert_eq!(answers(), expected, "moment {moment}");
    }
}

/// Runs `script` in a mount namespace of its own, with the command as `$K3`, the model as `$MODEL`, a
/// folder of inputs as `$IN` and one of 64 kB that goes away as `$AT`. None, said aloud, where that is not
/// allowed.
fn mounted(script: &str, inputs: &Path) -> Option<Output> {
    let folder = tempfile::tempdir().expect("a folder");
    let whole = format!("set -e; mount -t tmpfs -o size=64k k3 \"$AT\"; {script}");
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", "mount -t tmpfs k3 \"$AT\""]).env("AT", folder.path());
    match command.output() {
        Ok(output) if output.status.success() => {}
        Ok(output) => {
            println!("SKIPPED: no mounts of one's own here: {}", text(&output.stderr));
            return None;
        }
        Err(error) => {
            println!("SKIPPED: unshare: {error}");
            return None;
        }
    }
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", &whole]).env("AT", folder.path()).env("MODEL", tiny());
    command.env("IN", inputs).env("K3", env!("CARGO_BIN_EXE_k3")).env_remove("K3_MODEL").stdin(Stdio::null());
    Some(command.output().expect("unshare"))
}

/// The commands that write a file, each to `$AT/out`.
const WRITERS: [&str; 11] = [
    "run \"$MODEL\" --quiet --ids 1,2,3 --max-tokens 1 --dump-logits \"$AT/out\"",
    "run \"$MODEL\" --quiet --ids 1,2,3 --max-tokens 400 --ignore-eos --trace \"$AT/out\"",
    "perplexity \"$MODEL\" --quiet --file /proc/filesystems --nll-out \"$AT/out\"",
    "run \"$MODEL\" --quiet --ids 1,2,3 --max-tokens 2 --ignore-eos --session \"$AT/out\"",
    "batch \"$MODEL\" --quiet --max-tokens 2 --input \"$IN/prompts\" --output \"$AT/out\"",
    "ladder \"$MODEL\" --quiet --ids 1,2 --max-tokens 1 --budgets 64M --out \"$AT/out\"",
    "cachesim \"$IN/trace\" --svg \"$AT/out\"",
    "ladder \"$MODEL\" --quiet --ids 1,2 --max-tokens 1 --budgets 64M --svg \"$AT/out\"",
    "chat \"$MODEL\" --quiet --message hello --max-tokens 2 --memory 64M --session \"$AT/out\"",
    "pack \"$MODEL\" \"$AT/out\" --quiet",
    "synth \"$AT/out\"",
];

#[test]
fn a_disk_that_is_full_or_read_only_is_said_and_nothing_is_left() {
    let inputs = tempfile::tempdir().expect("a folder");
    std::fs::write(inputs.path().join("prompts"), "{\"id\": 1, \"ids\": [1, 2, 3]}\n").expect("write");
    let trace = run(&tiny()).arg("--quiet").arg("--trace").arg(inputs.path().join("trace")).output().expect("k3");
    assert_eq!(code(&trace), 0, "{}", text(&trace.stderr));
    for writer in WRITERS {
        // Full to the last byte.
        let full = format!(
            "set +e; head -c 65536 /dev/zero > \"$AT/fill\"; \"$K3\" {writer} >/dev/null; code=$?; ls -A \"$AT\"; exit $code"
        );
        let Some(output) = mounted(&full, inputs.path()) else { return };
        let message = text(&output.stderr);
        assert!(matches!(code(&output), 2 | 5), "{writer}: {} {message}", code(&output));
        assert!(message.starts_with("k3: ") && !message.contains("panicked"), "{writer}: {message}");
        let left = text(&output.stdout);
        // A folder is made first.
        assert!(left == "fill\n" || writer.starts_with("synth"), "{writer} left {left}");
        let read_only = format!("mount -o remount,ro \"$AT\"; set +e; \"$K3\" {writer} >/dev/null; exit $?");
        let Some(output) = mounted(&read_only, inputs.path()) else { return };
        let message = text(&output.stderr);
        assert!(matches!(code(&output), 2 | 5), "{writer}: {} {message}", code(&output));
        assert!(message.contains("Read-only file system") && message.contains("out"), "{writer}: {message}");
    }
    // Standard output that takes nothing.
    for args in
        [&["inspect"][..], &["verify"], &["plan", "--disk", "1"], &["run", "--ids", "1", "--quiet"], &["doctor"]]
    {
        let full = std::fs::File::options().write(true).open("/dev/full").expect("/dev/full");
        let output = k3().args(args).arg(tiny()).stdout(full).output().expect("k3");
        assert_eq!(code(&output), 5, "{args:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("No space left"), "{args:?}: {}", text(&output.stderr));
    }
}

/// The story: where a pack that was begun had no room to go on, "nothing was written" stood beside what was kept.
#[test]
fn a_pack_without_room_says_what_is_kept() {
    let inputs = tempfile::tempdir().expect("a folder");
    std::os::unix::fs::symlink(k3_tests::root().join("fixtures/demo"), inputs.path().join("demo")).expect("a link");
    // One or two megabytes of about four, see `a_full_disk_keeps_what_there_is`.
    let script = "mount -o remount,size=16m \"$AT\"; set +e; trap '' XFSZ; \
        (ulimit -f 2000; \"$K3\" pack \"$IN/demo\" \"$AT/out\" --quiet 2>/dev/null); \
        head -c 16777216 /dev/zero > \"$AT/fill\" 2>/dev/null; \
        \"$K3\" pack \"$IN/demo\" \"$AT/out\" --quiet; code=$?; ls -A \"$AT\"; exit $code";
    let Some(output) = mounted(script, inputs.path()) else { return };
    let (message, left) = (text(&output.stderr), text(&output.stdout));
    assert_eq!(code(&output), 5, "{message}");
    assert!(left.contains("out.part\n"), "{left} {message}");
    assert!(message.contains("are needed") && message.contains("is kept"), "{message}");
    assert!(!message.contains("nothing was written"), "{message}");
}

#[test]
fn a_reader_that_goes_away_ends_every_command_in_peace() {
    for args in
        [&["inspect"][..], &["verify"], &["plan", "--disk", "1"], &["doctor"], &["run", "--ids", "1", "--quiet"]]
    {
        let mut child = k3().args(args).arg(tiny()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("k3");
        assert_eq!(code(&output), 0, "{args:?}: {}", text(&output.stderr));
    }
}

/// The files of the tiny checkpoint, reached in another way.
fn linked(to: &Path, link: impl Fn(&Path, &Path)) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(tiny()).expect("read_dir").map(|e| e.expect("entry").path()) {
        if entry.is_file() {
            link(&entry, &to.join(entry.file_name().expect("a name")));
        }
    }
}

#[test]
fn surroundings_do_not_change_the_answer() {
    let expected = undisturbed();
    let folder = tempfile::tempdir().expect("a folder");
    let symlink = |from: &Path, to: &Path| std::os::unix::fs::symlink(from, to).expect("a link");
    let check = |what: &str, command: &mut Command| {
        let output = command.arg("--quiet").output().expect("k3");
        assert_eq!(code(&output), 0, "{what}: {}", text(&output.stderr));
        assert_eq!(output.stdout, expected, "{what}");
    };

    let links = folder.path().join("links");
    linked(&links, symlink);
    check("a folder of symlinks", &mut run(&links));
    let strange = folder.path().join("spaces and \u{1f980} \u{e9}");
    symlink(&links, &strange);
    check("a strange name", &mut run(&strange));
    let bytes = folder.path().join(OsStr::from_bytes(b"not \xff utf-8"));
    symlink(&links, &bytes);
    check("a name that is no text", &mut run(&bytes));

    // What other systems and other checkpoints leave in a folder.
    let crowd = folder.path().join("crowd");
    linked(&crowd, symlink);
    std::fs::write(crowd.join("._model-00001-of-000012.safetensors"), "\0\x05\x16\x07").expect("write");
    std::fs::create_dir(crowd.join("folder.safetensors")).expect("a folder");
    let shard = std::fs::read_dir(tiny()).expect("read_dir").map(|e| e.expect("entry").path());
    let shard = shard.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).min().expect("a shard");
    std::fs::copy(&shard, crowd.join("model-99999-of-99999.safetensors")).expect("copy");
    check("hidden files, folders and stray shards", &mut run(&crowd));
    let found = k3().args(["verify", "--json"]).arg(&crowd).output().expect("k3");
    assert_eq!(code(&found), 0, "{}", text(&found.stdout));
    assert!(
        text(&found.stdout).contains("model-99999-of-99999.safetensors: not in the index"),
        "{}",
        text(&found.stdout)
    );
    assert!(!text(&found.stdout).contains("._model") && !text(&found.stdout).contains("folder.safetensors"));

    match tempfile::tempdir_in("/dev/shm") {
        Ok(memory) => {
            let dir = memory.path().join("model");
            k3_tests::copy_dir(&tiny(), &dir);
            check("tmpfs", &mut run(&dir));
        }
        Err(error) => println!("SKIPPED: /dev/shm: {error}"),
    }
    let odd = std::fs::metadata(&shard).expect("metadata").len();
    assert!(!odd.is_multiple_of(4096), "the tiny checkpoint has files that are no multiple of 4 KiB");

    let (_copied, locked) = copy();
    let mut permissions = std::fs::metadata(&locked).expect("metadata").permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&locked, permissions).expect("permissions");
    check("a read-only folder", &mut run(&locked));

    check("no HOME", run(&tiny()).env_remove("HOME").env_remove("XDG_CACHE_HOME"));
    check("an empty environment", run(&tiny()).env_clear());
    check("locale C", run(&tiny()).env("LC_ALL", "C").env("LANG", "C"));
    let shell = |script: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", script, env!("CARGO_BIN_EXE_k3")]).args(IDS).arg("4").arg(tiny());
        command.env_remove("K3_MODEL").stdin(Stdio::null());
        command
    };
    check("sixteen descriptors", &mut shell("ulimit -n 16; exec \"$0\" \"$@\""));
    check("one processor", &mut shell("exec taskset -c 0 \"$0\" \"$@\""));
    check("no terminal", &mut shell("exec setsid \"$0\" \"$@\""));
    check("a closed standard input", &mut shell("exec \"$0\" \"$@\" <&-"));
    check("a closed standard error", &mut shell("exec \"$0\" \"$@\" 2>&-"));
    let closed = shell("exec \"$0\" \"$@\" >&-").output().expect("sh");
    assert!(code(&closed) == 0 || code(&closed) == 5, "{}", text(&closed.stderr));
    assert!(!text(&closed.stderr).contains("panicked"));

    // A file system over another one.
    let overlay = "mkdir \"$AT/u\" \"$AT/w\" \"$AT/m\"; mount -t overlay -o lowerdir=\"$MODEL\",upperdir=\"$AT/u\",workdir=\"$AT/w\" k3 \"$AT/m\" || exit 77; \
                   exec \"$K3\" run --ids 1,2,3,4,5 --max-tokens 6 --ignore-eos --memory 64M --chunk 4 --quiet \"$AT/m\"";
    match mounted(overlay, folder.path()) {
        Some(output) if code(&output) == 77 => println!("SKIPPED: overlay: {}", text(&output.stderr)),
        Some(output) => assert_eq!((code(&output), &output.stdout), (0, &expected), "{}", text(&output.stderr)),
        None => {}
    }
}

#[test]
fn a_dangling_link_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("links");
    linked(&dir, |from, to| std::os::unix::fs::symlink(from, to).expect("a link"));
    let mut shards: Vec<PathBuf> =
        std::fs::read_dir(&dir).expect("read_dir").map(|e| e.expect("entry").path()).collect();
    shards.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    shards.sort();
    std::fs::remove_file(&shards[2]).expect("remove");
    std::os::unix::fs::symlink("nowhere", &shards[2]).expect("a link");
    for command in ["run", "verify", "doctor", "inspect"] {
        let mut k3 = k3();
        k3.arg(command).arg(&dir);
        if command == "run" {
            k3.args(["--ids", "1"]);
        }
        let output = k3.output().expect("k3");
        assert_eq!(code(&output), 3, "{command}: {}", text(&output.stderr));
        let all = text(&output.stdout) + &text(&output.stderr);
        assert!(all.contains(&shards[2].display().to_string()) && all.contains("missing"), "{command}: {all}");
    }
}
