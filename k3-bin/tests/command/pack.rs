//! `k3 pack`, `k3 inspect` and runs from a packed trunk.

use super::{code, k3, send, text};
use k3_tests::{copy_dir, root};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn demo() -> PathBuf {
    root().join("fixtures/demo")
}

fn pack(dir: &Path, out: &Path, more: &[&str]) -> Output {
    k3().arg("pack").args(more).arg(dir).arg(out).output().expect("k3")
}

/// The ids a model goes on with.
fn ids(dir: &Path, more: &[&str]) -> Output {
    let mut command = k3();
    command.args(["run", "--json", "--ids", "5,6,7", "--max-tokens", "4", "--memory", "64M"]).args(more).arg(dir);
    command.output().expect("k3")
}

fn generated(output: &Output) -> serde_json::Value {
    assert_eq!(code(output), 0, "{}", text(&output.stderr));
    serde_json::from_slice::<serde_json::Value>(&output.stdout).expect("JSON")["generated_ids"].clone()
}

fn flip(path: &Path, at: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path).expect("open");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("write");
}

#[test]
fn a_packed_trunk_is_found_named_shown_and_refused() {
    let tmp = tempfile::tempdir().expect("tmp");
    let (model, other) = (tmp.path().join("model"), tmp.path().join("other"));
    copy_dir(&demo(), &model);
    copy_dir(&root().join("fixtures/tiny"), &other);
    let expected = generated(&ids(&model, &[]));
    let out = model.join("trunk.k3");
    let done = pack(&model, &out, &[]);
    assert_eq!(code(&done), 0, "{}", text(&done.stderr));
    assert!(text(&done.stdout).contains("trunk.k3: "), "{}", text(&done.stdout));
    assert_eq!(
        std::fs::read_dir(&model)
            .expect("dir")
            .filter(|e| { e.as_ref().expect("entry").file_name().to_string_lossy().contains(".part") })
            .count(),
        0,
        "nothing is left beside it"
    );

    // Trained weights: coded tensors take at most 0.76 of their size. In a file of four megabytes headers,
    // padding and what is not coded show, too.
    let shown = k3().args(["inspect", "--json"]).arg(&out).output().expect("k3");
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let (bytes, raw) = (shown["bytes"].as_f64().expect("bytes"), shown["raw_bytes"].as_f64().expect("raw"));
    let coded = shown["tensors"].as_array().expect("tensors").iter().filter(|t| t["coded_pieces"] == t["pieces"]);
    let size = |t: &serde_json::Value, name: &str| t[name].as_f64().expect("bytes");
    let (stored, of) = coded.fold((0.0, 0.0), |sum, t| (sum.0 + size(t, "stored_bytes"), sum.1 + size(t, "raw_bytes")));
    println!("demo: {bytes} of {raw}, {:.4}; coded tensors {stored} of {of}, {:.4}", bytes / raw, stored / of);
    assert!(of > 0.9 * raw && stored <= 0.76 * of && bytes <= 0.78 * raw);
    assert_eq!(shown["bytes"], std::fs::metadata(&out).expect("metadata").len());
    let table = text(&k3().arg("inspect").arg(&out).output().expect("k3").stdout);
    assert!(table.contains("language_model.model.layers.3.self_attn.kv_b_proj.weight"), "{table}");

    // Found by itself; or not at all; or by name from elsewhere.
    for more in [&[][..], &["--trunk", "none"], &["--trunk", out.to_str().expect("path"), "--threads", "1"]] {
        assert_eq!(generated(&ids(&model, more)), expected, "{more:?}");
    }
    // The least budget that holds a plan of either kind.
    let plan = |memory: u64| {
        let memory = memory.to_string();
        let args = ["plan", "--json", "--disk", "1", "--context", "8", "--memory", &memory];
        let plan = k3().args(args).arg(&model).output().expect("k3");
        let plan = serde_json::from_slice::<serde_json::Value>(&plan.stdout).ok();
        plan.filter(|plan| plan["trunk"]["shards"].is_object())
    };
    let plan = (15_000_000..60_000_000).step_by(500_000).find_map(plan).expect("a budget that will do");
    let (packed, shards) = (&plan["trunk"]["pack"]["plan"], &plan["trunk"]["shards"]);
    assert!(packed["read_bytes"].as_u64() < shards["read_bytes"].as_u64(), "{plan}");
    assert!(packed["pinned_layers"].as_u64() >= shards["pinned_layers"].as_u64(), "{plan}");

    // Packing again finds that there is nothing to do, and overwrites nothing.
    let again = pack(&model, &out, &[]);
    assert!(code(&again) == 0 && text(&again.stdout).contains("already"), "{}", text(&again.stderr));
    assert_eq!(code(&pack(&model, &out, &["--raw"])), 2);
    assert_eq!(code(&pack(&other, &out, &[])), 2);

    // Of another model: refused by name with what differs, passed over where it was only found.
    let refused = ids(&other, &["--trunk", out.to_str().expect("path")]);
    assert!(code(&refused) == 3 && text(&refused.stderr).contains("config.json"), "{}", text(&refused.stderr));
    std::fs::copy(&out, other.join("trunk.k3")).expect("copy");
    let passed = ids(&other, &[]);
    assert!(code(&passed) == 0 && text(&passed.stderr).contains("not used"), "{}", text(&passed.stderr));
    // The same config and headers and other weights.
    let shard = model.join("model-00005-of-000016.safetensors");
    let len = std::fs::metadata(&shard).expect("metadata").len();
    let check = |more: &[&Path]| k3().args(["pack", "--verify"]).arg(&out).args(more).output().expect("k3");
    assert_eq!(code(&check(&[&model])), 0, "{}", text(&check(&[&model]).stderr));
    flip(&shard, len - 4000);
    let changed = check(&[&model]);
    assert!(code(&changed) == 1 && text(&changed.stderr).contains("layers.4."), "{}", text(&changed.stderr));
    assert_eq!(code(&check(&[])), 0);

    // One byte, in a segment and in the table.
    flip(&out, 4096 + 2 * 65536 + 77);
    let damaged = check(&[]);
    assert!(code(&damaged) == 1 && text(&damaged.stderr).contains(" is damaged"), "{}", text(&damaged.stderr));
    flip(&out, 4096 + 2 * 65536 + 77);
    flip(&out, std::fs::metadata(&out).expect("metadata").len() - 1);
    assert_eq!(code(&check(&[])), 1);
    let refused = ids(&model, &["--trunk", out.to_str().expect("path")]);
    assert!(code(&refused) == 3 && text(&refused.stderr).contains("table"), "{}", text(&refused.stderr));
}

/// Corruption that a run meets stops it, and no answer is printed.
#[test]
fn a_damaged_segment_stops_a_run() {
    let tmp = tempfile::tempdir().expect("tmp");
    let out = tmp.path().join("t.k3");
    assert_eq!(code(&pack(&demo(), &out, &["--raw", "--no-verify"])), 0);
    let shown = k3().args(["inspect", "--json"]).arg(&out).output().expect("k3");
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let tensors = shown["tensors"].as_array().expect("tensors");
    let at = tensors.iter().find(|t| t["name"].as_str().is_some_and(|n| n.contains("layers.9."))).expect("layer 9");
    flip(&out, at["offset"].as_u64().expect("offset") + 5);
    let stopped = ids(&demo(), &["--trunk", out.to_str().expect("path")]);
    let message = text(&stopped.stderr);
    assert!(code(&stopped) == 3 && message.contains("segment ") && message.contains("checksum"), "{message}");
    assert!(stopped.stdout.is_empty());
}

#[test]
fn what_cannot_be_packed_is_refused_and_nothing_has_the_name() {
    let tmp = tempfile::tempdir().expect("tmp");
    let (model, out) = (tmp.path().join("model"), tmp.path().join("out.k3"));
    copy_dir(&demo(), &model);
    let shard = model.join("model-00007-of-000016.safetensors");
    std::fs::rename(&shard, tmp.path().join("away")).expect("rename");
    let missing = pack(&model, &out, &[]);
    assert!(code(&missing) == 3 && text(&missing.stderr).contains("00007"), "{}", text(&missing.stderr));
    for bad in ["/proc/trunk.k3", "/nowhere/trunk.k3"] {
        let refused = pack(&demo(), Path::new(bad), &[]);
        assert!(code(&refused) == 2 && text(&refused.stderr).contains("created"), "{}", text(&refused.stderr));
    }
    assert_eq!(code(&k3().arg("pack").arg(&model).output().expect("k3")), 2);
    assert!(!out.exists() && std::fs::read_dir(tmp.path()).expect("dir").count() == 2);
}

/// The story of a full disk: the file stops growing in the middle. What is there stays, and when there
/// is room again the same command ends with the same bytes.
#[test]
fn a_full_disk_keeps_what_there_is() {
    let tmp = tempfile::tempdir().expect("tmp");
    let (whole, out) = (tmp.path().join("whole.k3"), tmp.path().join("out.k3"));
    assert_eq!(code(&pack(&demo(), &whole, &[])), 0);
    // Blocks of 512 bytes in POSIX shells, of 1024 in bash: one or two megabytes of about four.
    let full = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 2000; exec \"$0\" pack \"$1\" \"$2\"", env!("CARGO_BIN_EXE_k3")])
        .args([&demo(), &out])
        .output()
        .expect("sh");
    let message = text(&full.stderr);
    assert!(code(&full) == 5 && message.contains("out.k3.part"), "{} {message}", code(&full));
    assert!(!out.exists() && tmp.path().join("out.k3.part").exists());
    let done = pack(&demo(), &out, &[]);
    assert_eq!(code(&done), 0, "{}", text(&done.stderr));
    assert!(text(&done.stderr).contains("earlier run"), "{}", text(&done.stderr));
    assert!(std::fs::read(&out).expect("read") == std::fs::read(&whole).expect("read"), "other bytes");
}

/// The story: `k3 pack` was aborted where the system refused one of its threads.
#[test]
fn a_pack_takes_the_threads_it_gets() {
    let tmp = tempfile::tempdir().expect("tmp");
    let (model, whole) = (tmp.path().join("model"), tmp.path().join("whole.k3"));
    super::limits::filled(&model);
    assert_eq!(code(&pack(&model, &whole, &["--threads", "2"])), 0);
    let whole = std::fs::read(&whole).expect("read");
    let (mut packed, mut refused) = (0, 0);
    // With less, threads that read headers may already be refused.
    for kilobytes in [600_000, 800_000, 900_000, 1_000_000, 1_100_000, 1_300_000, 1_500_000] {
        let out = tmp.path().join("out.k3");
        let script = format!("ulimit -v {kilobytes}; exec \"$0\" pack --quiet --threads 1024 \"$1\" \"$2\"");
        let output = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_k3")])
            .args([&model, &out])
            .output()
            .expect("sh");
        let message = text(&output.stderr);
        assert!(!message.contains("panicked"), "{kilobytes}: {message}");
        match code(&output) {
            0 => packed += 1,
            // Threads that open files, and what the C library maps for a moment, are not in our hands.
            4 | 5 => {
                refused += 1;
                assert_eq!(code(&pack(&model, &out, &["--threads", "2"])), 0);
            }
            code => panic!("{kilobytes}: {code} {message}"),
        }
        assert!(std::fs::read(&out).expect("read") == whole, "{kilobytes}: other bytes");
        std::fs::remove_file(&out).expect("remove");
        assert_eq!(std::fs::read_dir(tmp.path()).expect("dir").count(), 2, "{kilobytes}: something is left: {message}");
    }
    println!("{packed} packed, {refused} refused");
    assert!(packed > 3);
}

/// Killed again and again, at any moment: never a file under the name that is not whole, finished
/// segments stay finished, and in the end the bytes are those of an undisturbed pack.
#[test]
fn a_pack_that_is_killed_goes_on() {
    let tmp = tempfile::tempdir().expect("tmp");
    let whole = tmp.path().join("whole.k3");
    let started = Instant::now();
    // Slow enough that most of the time goes by between the first segment and the last.
    let slow = ["--disk-limit", "0.005"];
    assert_eq!(code(&pack(&demo(), &whole, &slow)), 0);
    let (time, whole) = (started.elapsed(), std::fs::read(&whole).expect("read"));
    let (mut kills, mut resumed, mut seed) = (0, 0, 0x9e37_79b9u64);
    let mut round = 0;
    while kills < 20 {
        round += 1;
        assert!(round < 200, "packs are too fast to be killed");
        let out = tmp.path().join(format!("{round}.k3"));
        // Twice: more would finish most packs, and nothing would be left to go on with.
        for _ in 0..2 {
            let child = k3().args(["pack", "--quiet"]).args(slow).arg(demo()).arg(&out).spawn();
            let mut child = child.expect("k3");
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(time.mul_f64((seed >> 40) as f64 / f64::from(1 << 24)));
            child.kill().expect("kill");
            let killed = child.wait().expect("wait").code().is_none();
            kills += usize::from(killed);
            if out.exists() {
                assert!(std::fs::read(&out).expect("read") == whole, "a file that is not whole has the name");
            }
        }
        let done = pack(&demo(), &out, &[]);
        assert_eq!(code(&done), 0, "{}", text(&done.stderr));
        resumed += usize::from(text(&done.stderr).contains("earlier run"));
        assert!(std::fs::read(&out).expect("read") == whole, "other bytes");
        assert_eq!(std::fs::read_dir(tmp.path()).expect("dir").count(), round + 1, "something is left");
    }
    println!("{kills} kills in {round} packs, {resumed} resumed");
    assert!(resumed > 0);
}

#[test]
fn an_interrupted_pack_says_how_to_go_on() {
    let tmp = tempfile::tempdir().expect("tmp");
    let out = tmp.path().join("out.k3");
    let mut command = k3();
    command.args(["pack", "--disk-limit", "0.002"]).arg(demo()).arg(&out).stderr(Stdio::piped());
    let child = command.spawn().expect("k3");
    let part = tmp.path().join("out.k3.part");
    let started = Instant::now();
    // Signals are watched before the file is there.
    while !part.exists() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(5));
    }
    send(&child, Signal::INT);
    let output = child.wait_with_output().expect("k3");
    let message = text(&output.stderr);
    assert!(code(&output) == 130 && message.contains("out.k3.part") && message.contains("same command"), "{message}");
    assert!(!out.exists() && part.exists());
}
