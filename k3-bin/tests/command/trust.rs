//! `inspect`, `verify`, `doctor`, and the help.

use super::{code, json, k3, object, text, tiny};
use k3_tests::{checkpoints, copy_dir, root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A private copy of the project's tiny checkpoint.
pub(super) fn copy() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path().join("model");
    copy_dir(&tiny(), &dir);
    (folder, dir)
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("read_dir").map(|e| e.expect("entry").path());
    let mut all: Vec<_> = entries.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
    all.sort();
    all
}

/// `k3 verify` with a cache folder of its own.
fn verify(dir: &Path, cache: &Path, args: &[&str]) -> Output {
    let mut command = k3();
    command.env("XDG_CACHE_HOME", cache).arg("verify").args(args).arg(dir);
    command.output().expect("k3")
}

fn verified(dir: &Path, cache: &Path, args: &[&str]) -> (i32, Value) {
    let output = verify(dir, cache, &[&["--json"], args].concat());
    let value = serde_json::from_slice(&output.stdout);
    (code(&output), value.unwrap_or_else(|e| panic!("{e}: {} {}", text(&output.stdout), text(&output.stderr))))
}

/// What sha256sum prints for the files of a directory.
fn sums(dir: &Path) -> String {
    let names = std::fs::read_dir(dir).expect("read_dir").map(|e| e.expect("entry").file_name());
    let output = Command::new("sha256sum").args(names).current_dir(dir).output().expect("sha256sum");
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

/// The files of a directory as a hub lists them.
fn hub(dir: &Path) -> Value {
    let sums = sums(dir);
    let files = sums.lines().map(|line| {
        let (hex, name) = line.split_once("  ").expect("a line");
        let size = std::fs::metadata(dir.join(name)).expect("metadata").len();
        if name.ends_with(".json") {
            serde_json::json!({"rfilename": name, "size": size})
        } else {
            serde_json::json!({"rfilename": name, "size": size, "lfs": {"sha256": hex, "size": size}})
        }
    });
    serde_json::json!({"id": "somebody/a-model", "siblings": files.collect::<Vec<_>>()})
}

#[test]
fn a_census_is_that_of_the_files() {
    for dir in checkpoints() {
        let found = object(k3().args(["inspect", "--json", "--memory", "64M"]).arg(&dir));
        let files: u64 = shards(&dir).iter().map(|p| std::fs::metadata(p).expect("metadata").len()).sum();
        assert_eq!(found["file_bytes"], files, "{found}");
        assert_eq!(found["accounted_bytes"], files);
        assert_eq!((&found["reconciled"], &found["unnamed_bytes"]), (&Value::Bool(true), &0.into()));
        let index = json(&dir.join("model.safetensors.index.json"));
        assert_eq!(found["tensors"]["tensors"], index["weight_map"].as_object().expect("map").len());
        let plan = object(k3().args(["plan", "--json", "--disk", "1", "--memory", "64M"]).arg(&dir));
        assert_eq!(found["plan"]["memory"]["pinned_layers"], plan["memory"]["pinned_layers"]);
        assert_eq!(found["plan"]["read_per_token"]["trunk_bytes"], plan["read_per_token"]["trunk_bytes"]);
        assert_eq!(found["reductions"]["all_bf16_bytes"], 2 * found["tensors"]["parameters"].as_u64().expect("n"));
        // A budget that is too small says nothing about the checkpoint.
        let small = object(k3().args(["inspect", "--json", "--memory", "1M"]).arg(&dir));
        assert_eq!(small["classes"], found["classes"]);
        assert!(small["plan"]["refused"].as_str().expect("a refusal").contains("the least is"));
        let lines = text(&k3().arg("inspect").arg(&dir).output().expect("k3").stdout);
        for part in ["routed experts", "to the byte", "KDA and moe", "never read", "always active"] {
            assert!(lines.contains(part), "{part}: {lines}");
        }
    }
    let file = k3().arg("inspect").arg(tiny().join("config.json")).output().expect("k3");
    // A file is looked at as a packed trunk.
    assert_eq!(code(&file), 3, "{}", text(&file.stderr));
    assert!(text(&file.stderr).contains("no packed trunk"), "{}", text(&file.stderr));
}

#[test]
fn a_sound_checkpoint_passes_every_check() {
    let (folder, dir) = copy();
    let cache = folder.path().join("cache");
    let (list, listing) = (folder.path().join("sums"), folder.path().join("hub.json"));
    std::fs::write(&list, sums(&dir)).expect("write");
    std::fs::write(&listing, hub(&dir).to_string()).expect("write");
    for file in [&list, &listing] {
        let (code, found) = verified(&dir, &cache, &["--scales", "--hash", file.to_str().expect("a path")]);
        assert_eq!((code, &found["passed"]), (0, &Value::Bool(true)), "{found}");
        assert_eq!(found["faults"], serde_json::json!([]));
        assert!(found["checks"]["hash"]["good"].as_u64().expect("good") >= 12, "{found}");
        assert_eq!(found["checks"]["hash"]["resumed"], 0, "nothing is left to be resumed: {found}");
        assert_eq!(found["checks"]["scales"]["passed"], true);
    }
    let output = verify(&dir, &cache, &[]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(text(&output.stdout).ends_with("all is well\n"), "{}", text(&output.stdout));
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

/// All that is wrong is listed, and each with what mends it.
#[test]
fn every_bad_file_is_listed_with_how_to_fetch_it() {
    let (folder, dir) = copy();
    let cache = folder.path().join("cache");
    let listing = folder.path().join("hub.json");
    std::fs::write(&listing, hub(&dir).to_string()).expect("write");
    let all = shards(&dir);
    std::fs::remove_file(&all[1]).expect("remove");
    let bytes = std::fs::read(&all[3]).expect("read");
    std::fs::write(&all[3], &bytes[..bytes.len() - 100]).expect("write");
    std::fs::write(&all[5], b"<html>not found</html>").expect("write");
    std::fs::write(dir.join("tiktoken.model"), "x").expect("write");
    let (code, found) = verified(&dir, &cache, &[]);
    assert_eq!(code, 3, "{found}");
    let faults = found["faults"].as_array().expect("faults");
    let bad: Vec<_> = faults.iter().map(|f| PathBuf::from(f["file"].as_str().expect("file"))).collect();
    assert_eq!(bad, [&all[1], &all[3], &all[5], &dir.join("tiktoken.model")].map(Clone::clone), "{found}");
    let name = |path: &Path| path.file_name().expect("a name").to_string_lossy().into_owned();
    for (fault, path) in faults.iter().zip(&bad) {
        let fetch = fault["fetch"].as_str().expect("a command");
        assert!(fetch.contains(&format!(" {} ", name(path))) && fetch.contains("REPOSITORY"), "{fetch}");
    }
    let (code, found) = verified(&dir, &cache, &["--hash", listing.to_str().expect("a path"), "--scales"]);
    assert_eq!(code, 3, "{found}");
    assert!(found["faults"][0]["fetch"].as_str().expect("a command").contains("somebody/a-model"), "{found}");
    assert!(found["notes"].to_string().contains("not looked at"), "{found}");
    let lines = text(&verify(&dir, &cache, &[]).stdout);
    assert_eq!(lines.lines().filter(|line| line.starts_with("bad: ")).count(), 4, "{lines}");
    // A folder that is none.
    let (code, found) = verified(&folder.path().join("nowhere"), &cache, &[]);
    assert_eq!((code, found["faults"].as_array().expect("faults").len()), (3, 1), "{found}");
}

/// The story: a hub that is asked for the names alone lists no sizes and no digests, and a check against that said
/// that all was well with no file looked at.
#[test]
fn a_listing_that_says_nothing_is_no_check() {
    let (folder, dir) = copy();
    let cache = folder.path().join("cache");
    let listing = folder.path().join("hub.json");
    let path = listing.to_str().expect("a path");
    let without = |names: &dyn Fn(&str) -> bool| {
        let mut value = hub(&dir);
        for file in value["siblings"].as_array_mut().expect("siblings") {
            let file = file.as_object_mut().expect("a file");
            if names(file["rfilename"].as_str().expect("a name")) {
                file.remove("size");
                file.remove("lfs");
            }
        }
        std::fs::write(&listing, value.to_string()).expect("write");
    };
    without(&|_| true);
    let output = verify(&dir, &cache, &["--hash", path]);
    assert_eq!((code(&output), output.stdout.len()), (2, 0), "{}", text(&output.stdout));
    for part in ["no file in it has a SHA-256", "blobs=true"] {
        assert!(text(&output.stderr).contains(part), "{}", text(&output.stderr));
    }
    // Of one file that is needed, a shard or a small one.
    let shard = shards(&dir)[2].file_name().expect("a name").to_string_lossy().into_owned();
    for needed in [&*shard, "config.json"] {
        without(&|name| name == needed);
        let (code, found) = verified(&dir, &cache, &["--hash", path]);
        assert_eq!((code, &found["passed"], &found["checks"]["hash"]["passed"]), (1, &false.into(), &false.into()));
        let faults = found["faults"].as_array().expect("faults");
        assert_eq!(faults.len(), 1, "{found}");
        assert!(faults[0]["file"].as_str().expect("a file").ends_with(needed), "{found}");
        assert!(faults[0]["fault"].as_str().expect("text").contains("neither its size nor its SHA-256"), "{found}");
        assert_eq!(faults[0]["fetch"], Value::Null, "it may be sound: {found}");
    }
    // Of one that nobody reads it is said, and no more.
    std::fs::write(dir.join("README.md"), "read me").expect("write");
    without(&|name| name == "README.md");
    let output = verify(&dir, &cache, &["--hash", path]);
    assert_eq!(code(&output), 0, "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("says nothing of 1 file that is not needed"), "{}", text(&output.stdout));
    // What is missing has not passed.
    without(&|_| false);
    std::fs::remove_file(dir.join(shard)).expect("remove");
    let (code, found) = verified(&dir, &cache, &["--hash", path]);
    assert_eq!((code, &found["checks"]["hash"]["passed"]), (3, &false.into()), "{found}");
}

/// Deleting is only said of what is bad whatever the other files are. What the system does not bring, or what nobody
/// knows, may be sound.
#[test]
fn no_sound_file_is_told_to_be_deleted() {
    let (folder, dir) = copy();
    let cache = folder.path().join("cache");
    let list = folder.path().join("sums");
    let whole = sums(&dir);
    let few = whole.lines().filter(|line| !line.ends_with(" config.json")).map(|line| format!("{line}\n"));
    std::fs::write(&list, few.collect::<String>()).expect("write");
    let none = |code_of: i32, part: &str, output: &Output| {
        let lines = text(&output.stdout);
        assert_eq!(code(output), code_of, "{part}: {lines} {}", text(&output.stderr));
        assert!(lines.contains("bad: ") && lines.contains(part) && !lines.contains("rm -f"), "{part}: {lines}");
    };
    let output = verify(&dir, &cache, &["--hash", list.to_str().expect("a path")]);
    none(1, "the listing does not have it", &output);
    // Two shards that stand in each other's place: which of three files is wrong is not known.
    let all = shards(&dir);
    let swap = || {
        let third = dir.join("third");
        for (from, to) in [(&all[2], &third), (&all[3], &all[2]), (&third, &all[3])] {
            std::fs::rename(from, to).expect("rename");
        }
    };
    swap();
    none(3, "one and the same release", &verify(&dir, &cache, &[]));
    swap();
    // A link that leads to itself cannot be opened; a run says the same.
    let (shard, aside) = (&all[4], dir.join("aside"));
    std::fs::rename(shard, &aside).expect("rename");
    std::os::unix::fs::symlink(shard, shard).expect("a link");
    let run = k3().args(["run", "--ids", "1", "--memory", "64M"]).arg(&dir).output().expect("k3");
    assert_eq!(code(&run), 5, "{}", text(&run.stderr));
    none(5, "os error 40", &verify(&dir, &cache, &[]));
    none(5, "not all of the checkpoint can be read", &verify(&dir, &cache, &["--scales"]));
    let doctor = k3().args(["doctor", "--json"]).arg(&dir).output().expect("k3");
    assert_eq!(code(&doctor), 5, "{}", text(&doctor.stderr));
    std::fs::remove_file(shard).expect("remove");
    // What is not there, and a folder in its place, are told once, also with a listing; a folder is not fetched over.
    std::fs::write(&list, &whole).expect("write");
    for folder in [false, true] {
        if folder {
            std::fs::create_dir(shard).expect("a folder");
        }
        let (code, found) = verified(&dir, &cache, &["--hash", list.to_str().expect("a path")]);
        let faults = found["faults"].as_array().expect("faults");
        let told: Vec<_> = faults.iter().filter(|f| f["file"] == shard.to_str().expect("a path")).collect();
        assert!(code != 0 && told.len() == 1 && told[0]["fetch"].is_string() != folder, "{faults:?}");
        assert_eq!(found["checks"]["hash"]["passed"], false, "{found}");
    }
    std::fs::remove_dir(shard).expect("remove");
    std::fs::rename(&aside, shard).expect("rename");
    // Without an index nothing says which shards are strays.
    let index = dir.join("model.safetensors.index.json");
    std::fs::write(&index, "{").expect("write");
    let output = verify(&dir, &cache, &[]);
    let lines = text(&output.stdout);
    assert!(code(&output) == 3 && lines.contains("rm -f") && !lines.contains("not in the index"), "{lines}");
    assert!(lines.ends_with("1 fault\n"), "{lines}");
    // A config that is refused has the code that it has for a run.
    let config = dir.join("config.json");
    std::fs::write(&config, "{}").expect("write");
    let output = verify(&dir, &cache, &[]);
    assert_eq!(code(&output), 2, "{}", text(&output.stdout));
}

/// What only the bytes can tell: a flipped bit, found; and a check that goes on where it was.
#[test]
fn a_flipped_bit_is_found_and_sound_files_are_not_read_again() {
    let (folder, dir) = copy();
    let cache = folder.path().join("cache");
    let list = folder.path().join("sums");
    std::fs::write(&list, sums(&dir)).expect("write");
    let list = list.to_str().expect("a path");
    let shard = &shards(&dir)[4];
    let whole = std::fs::read(shard).expect("read");
    let mut flipped = whole.clone();
    let at = flipped.len() - 7;
    flipped[at] ^= 4;
    std::fs::write(shard, &flipped).expect("write");
    // Nothing but the digest sees it.
    assert_eq!(verified(&dir, &cache, &[]).0, 0);
    let (code, found) = verified(&dir, &cache, &["--hash", list]);
    assert_eq!(code, 1, "{found}");
    assert_eq!(found["faults"].as_array().expect("faults").len(), 1, "{found}");
    assert_eq!(found["faults"][0]["file"], shard.display().to_string());
    assert!(found["faults"][0]["fault"].as_str().expect("text").contains("SHA-256"), "{found}");
    let files = found["checks"]["hash"]["digested"].as_u64().expect("n");
    // Fetched again: only that file is read.
    std::fs::write(shard, &whole).expect("write");
    let (code, found) = verified(&dir, &cache, &["--hash", list]);
    assert_eq!(code, 0, "{found}");
    assert_eq!(
        (&found["checks"]["hash"]["digested"], &found["checks"]["hash"]["resumed"]),
        (&1.into(), &(files - 1).into())
    );
    // All was well, so the next check trusts nothing.
    let (_, found) = verified(&dir, &cache, &["--hash", list]);
    assert_eq!(found["checks"]["hash"]["digested"], files, "{found}");
    // Nor does one that is told not to.
    std::fs::write(shard, &flipped).expect("write");
    assert_eq!(verified(&dir, &cache, &["--hash", list]).0, 1);
    std::fs::write(shard, &whole).expect("write");
    let (code, found) = verified(&dir, &cache, &["--hash", list, "--again"]);
    assert_eq!((code, &found["checks"]["hash"]["digested"]), (0, &files.into()), "{found}");
    // A file the listing does not have was not checked, and that is said.
    let few: String =
        sums(&dir).lines().filter(|line| !line.ends_with(".model")).map(|line| format!("{line}\n")).collect();
    std::fs::write(list, few).expect("write");
    let (code, found) = verified(&dir, &cache, &["--hash", list]);
    assert!(code == 1 && found["faults"].to_string().contains("was not checked"), "{found}");
    // Without a cache folder it is checked all the same.
    let mut command = k3();
    command.env_remove("HOME").env_remove("XDG_CACHE_HOME").args(["verify", "--hash", list]).arg(&dir);
    let output = command.output().expect("k3");
    assert!(text(&output.stdout).contains("neither XDG_CACHE_HOME nor HOME"), "{}", text(&output.stdout));
}

/// Overwrites the scales of a matrix of an expert.
pub(super) fn scales(dir: &Path, tensor: &str, value: u8, count: usize) -> PathBuf {
    let index = json(&dir.join("model.safetensors.index.json"));
    let path = dir.join(index["weight_map"][tensor].as_str().expect("a shard"));
    let mut bytes = std::fs::read(&path).expect("read");
    let len = usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8"))).expect("len");
    let header: Value = serde_json::from_slice(&bytes[8..8 + len]).expect("header");
    let at = |i: usize| 8 + len + usize::try_from(header[tensor]["data_offsets"][i].as_u64().expect("at")).expect("at");
    let range = at(0)..at(1).min(at(0).saturating_add(count));
    bytes[range].fill(value);
    std::fs::write(&path, bytes).expect("write");
    path
}

#[test]
fn scales_that_no_checkpoint_has_are_named() {
    let (folder, dir) = copy();
    let expert = |e: u16| format!("language_model.model.layers.2.block_sparse_moe.experts.{e}.w2.weight_scale");
    let path = scales(&dir, &expert(3), 255, 2);
    scales(&dir, &expert(1), 0, usize::MAX);
    let (code, found) = verified(&dir, folder.path(), &["--scales"]);
    assert_eq!(code, 1, "{found}");
    let damaged = found["checks"]["scales"]["damaged"].as_array().expect("damaged");
    assert_eq!(damaged.len(), 2, "{found}");
    for (d, (expert, nan, blank)) in damaged.iter().zip([(1, 0, true), (3, 2, false)]) {
        assert_eq!((&d["layer"], &d["expert"]), (&2.into(), &expert.into()));
        assert_eq!((&d["nan_scale_bytes"], &d["blank"], &d["matrix"]), (&nan.into(), &blank.into(), &"w2".into()));
    }
    assert_eq!(damaged[1]["file"], path.display().to_string());
    assert_eq!(found["faults"].as_array().expect("faults").len(), 1, "one shard, one line: {found}");
}

/// Ids and reference files of the outside oracle.
struct Oracle {
    dir: PathBuf,
    ids: String,
    all: String,
    logits: PathBuf,
    hidden: PathBuf,
    /// Layers, ids, elements.
    shape: [usize; 3],
}

fn oracle() -> Option<Oracle> {
    let dir = k3_tests::outside("oracle/tiny13")?;
    let expected = json(&dir.join("expected/expected.json"));
    let prompt = &expected["prompts"][0];
    let list = |name: &str| prompt[name].as_array().expect("ids").iter().map(Value::to_string).collect::<Vec<_>>();
    let (ids, greedy) = (list("ids"), list("greedy_ids"));
    let file = |name: &str| dir.join("expected").join(prompt[name]["file"].as_str().expect("a name"));
    let shape =
        [0, 1, 2].map(|i| usize::try_from(prompt["hidden"]["shape"][i].as_u64().expect("a dimension")).expect("small"));
    let rows = usize::try_from(prompt["logits"]["shape"][0].as_u64().expect("rows")).expect("small");
    let all = [&ids[..], &greedy[..]].concat()[..rows].join(",");
    let (logits, hidden) = (file("logits"), file("hidden"));
    Some(Oracle { dir, ids: ids.join(","), all, logits, hidden, shape })
}

#[test]
fn outputs_are_held_against_those_of_others() {
    let Some(oracle) = oracle() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let path = |p: &Path| p.to_str().expect("a path").to_owned();
    let run = |args: &[&str]| verified(&oracle.dir, folder.path(), &[&["--quiet", "--memory", "64M"], args].concat());
    let (code, found) = run(&["--ids", &oracle.all, "--logits", &path(&oracle.logits)]);
    let logits = &found["checks"]["logits"];
    assert_eq!((code, &logits["passed"], &logits["same_argmax"]), (0, &true.into(), &logits["rows"]), "{found}");
    assert!(logits["max_abs"].as_f64().expect("a number") < 1e-3 && logits["correlation"].as_f64() > Some(0.999_999));
    assert!(logits["top_overlap"].as_f64() > Some(0.98), "{found}");
    // In chunks, and held against less than what rounding does.
    let (code, found) =
        run(&["--ids", &oracle.all, "--logits", &path(&oracle.logits), "--chunk", "3", "--tolerance", "1e-9"]);
    assert_eq!((code, &found["checks"]["logits"]["max_abs"]), (1, &logits["max_abs"]), "{found}");

    // A file of the last rows only, and one of a wrong engine.
    let bytes = std::fs::read(&oracle.logits).expect("read");
    let rows = usize::try_from(logits["rows"].as_u64().expect("rows")).expect("small");
    let last = folder.path().join("last.f32");
    std::fs::write(&last, &bytes[bytes.len() - bytes.len() / rows..]).expect("write");
    let (code, found) = run(&["--ids", &oracle.all, "--logits", &path(&last)]);
    assert_eq!((code, &found["checks"]["logits"]["rows"]), (0, &1.into()), "{found}");
    assert_eq!(found["checks"]["logits"]["position"], rows - 1);
    let (code, found) = run(&["--ids", &oracle.ids, "--logits", &path(&last)]);
    assert_eq!((code, &found["passed"]), (1, &false.into()), "{found}");

    // Layers: one file of all, and a file for each.
    let (code, found) = run(&["--ids", &oracle.ids, "--layers", &path(&oracle.hidden), "--chunk", "2"]);
    let layers = &found["checks"]["layers"];
    assert_eq!((code, &layers["passed"]), (0, &true.into()), "{found}");
    assert_eq!(layers["layers"].as_array().expect("layers").len(), oracle.shape[0]);
    assert!((0.0..=1.0).contains(&layers["of_budget"].as_f64().expect("a share")), "{found}");
    let each = folder.path().join("each");
    std::fs::create_dir(&each).expect("a folder");
    let bytes = std::fs::read(&oracle.hidden).expect("read");
    let size = 4 * oracle.shape[1] * oracle.shape[2];
    for (layer, part) in bytes.chunks_exact(size).enumerate().filter(|(layer, _)| layer % 3 == 0) {
        std::fs::write(each.join(format!("layer-{layer:03}.f32")), part).expect("write");
    }
    let (code, found) = run(&["--ids", &oracle.ids, "--layers", &path(&each)]);
    assert_eq!(code, 0, "{found}");
    assert_eq!(found["checks"]["layers"]["layers"].as_array().expect("layers").len(), oracle.shape[0].div_ceil(3));
    // One that is off is named.
    let mut part = std::fs::read(each.join("layer-006.f32")).expect("read");
    part[3] ^= 0x40;
    std::fs::write(each.join("layer-006.f32"), &part).expect("write");
    let (code, found) = run(&["--ids", &oracle.ids, "--layers", &path(&each)]);
    assert_eq!((code, &found["checks"]["layers"]["worst"]), (1, &6.into()), "{found}");

    for (args, part) in [
        (["--ids", "1,2", "--logits", &path(&oracle.logits)], "no more rows than ids"),
        (["--ids", "1,2", "--layers", &path(&each)], "rows, expected 2"),
        (["--ids", "1,2", "--layers", &path(folder.path())], "no file in it is of a layer"),
        (["--ids", "1,99999", "--logits", &path(&last)], "99999"),
    ] {
        let output = verify(&oracle.dir, folder.path(), &args);
        assert_eq!(code_of(&output), 2, "{args:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(part), "{args:?}: {}", text(&output.stderr));
    }
}

fn code_of(output: &Output) -> i32 {
    code(output)
}

/// A newcomer runs what `k3 doctor` prints, and nothing else.
#[test]
fn what_the_doctor_says_works_when_it_is_pasted() {
    let folder = tempfile::tempdir().expect("a folder");
    let strange = folder.path().join("a model's folder");
    std::os::unix::fs::symlink(root().join("fixtures/demo"), &strange).expect("a link");
    let paste = |command: &str| {
        let output = Command::new("sh")
            .args(["-c", command])
            .env("XDG_CACHE_HOME", folder.path())
            .env_remove("K3_MODEL")
            .stdin(Stdio::null())
            .output();
        output.expect("sh")
    };
    let with_model: &[&str] = &["--threads", "2", strange.to_str().expect("a path")];
    for args in [with_model, &[]] {
        if args.is_empty() && !cfg!(feature = "demo") {
            continue;
        }
        let mut command = k3();
        command.args(["doctor", "--json"]).args(args).current_dir(folder.path());
        let found = object(&mut command);
        let command = found["recommended"]["command"].as_str().expect("a command");
        // The demo's speed is not measured, so nothing is foretold.
        let seconds = &found["recommended"]["seconds_per_token"];
        assert!(if args.is_empty() { seconds.is_null() } else { seconds.as_f64() > Some(0.0) }, "{found}");
        assert_eq!(found["exit_code"], 0);
        let output = paste(command);
        assert_eq!(code(&output), 0, "{command}: {}", text(&output.stderr));
        assert!(!output.stdout.is_empty());
        let reads = found["disk"]["reads"].as_array().map_or(0, Vec::len);
        assert!(reads == 8 || !found["disk"].is_object(), "{found}");
    }
    let lines = text(&k3().arg("doctor").args(with_model).output().expect("k3").stdout);
    for part in ["processor", "memory", "disk", "model", "what to type", "expect"] {
        assert!(lines.contains(part), "{part}: {lines}");
    }
    let left: Vec<_> =
        std::fs::read_dir(folder.path()).expect("read_dir").map(|e| e.expect("entry").file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("doctor")), "{left:?}");
}

/// A run that is not as the one the figures are of is another one.
#[test]
fn what_the_doctor_is_told_is_in_what_it_says() {
    let pack = tempfile::tempdir().expect("a folder");
    let pack = pack.path().join("a trunk.k3");
    let packed = k3().arg("pack").arg(tiny()).arg(&pack).output().expect("k3");
    assert_eq!(code(&packed), 0, "{}", text(&packed.stderr));
    let options =
        "--threads 2 --backend scalar --io buffered --experts lru --chunk 3 --io-timeout 9 --context 500".split(' ');
    let mut command = k3();
    command.args(["doctor", "--json"]).args(options.clone()).arg("--trunk").arg(&pack).arg(tiny());
    let found = object(&mut command);
    let command = found["recommended"]["command"].as_str().expect("a command");
    let trunk = format!("--trunk '{}'", pack.display());
    let pairs = options.clone().zip(options.skip(1)).step_by(2).map(|(name, value)| format!("{name} {value}"));
    for option in pairs.chain([trunk]) {
        assert!(command.contains(&option), "{option}: {command}");
    }
    let output = Command::new("sh").args(["-c", command]).env_remove("K3_MODEL").output().expect("sh");
    assert_eq!(code(&output), 0, "{command}: {}", text(&output.stderr));
    assert_eq!(found["disk"]["packed_trunk"], pack.display().to_string(), "{found}");
}

#[test]
fn the_doctor_sees_what_is_missing_and_what_is_too_small() {
    let (_folder, dir) = copy();
    let doctor = |args: &[&str]| {
        let mut command = k3();
        command.args(["doctor", "--json"]).args(args).arg(&dir);
        let output = command.output().expect("k3");
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        (code(&output), found)
    };
    let (code_small, found) = doctor(&["--memory", "1M"]);
    assert_eq!((code_small, &found["model"]["complete"]), (4, &true.into()), "{found}");
    std::fs::write(dir.join("model-1.safetensors.incomplete"), "x").expect("write");
    std::fs::remove_file(&shards(&dir)[0]).expect("remove");
    let (code, found) = doctor(&[]);
    assert_eq!((code, &found["model"]["complete"]), (3, &false.into()), "{found}");
    assert_eq!(found["model"]["faults"].as_array().expect("faults").len(), 1);
    assert_eq!(found["model"]["unfinished"].as_array().expect("unfinished").len(), 1);
    let command = found["recommended"]["command"].as_str().expect("a command");
    let output = Command::new("sh").args(["-c", command]).output().expect("sh");
    assert_eq!(output.status.code(), Some(3), "{command}");
    assert!(text(&output.stdout).contains("fetch it again"), "{}", text(&output.stdout));
}

#[test]
fn help_completions_and_the_manual_page_are_there() {
    let run = |args: &[&str]| {
        let output = k3().args(args).output().expect("k3");
        assert_eq!(code(&output), 0, "{args:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    for help in [run(&["help"]), run(&["--help"])] {
        for part in ["Start here:", "Know and check a model:", "k3 doctor", "Exit codes:", "--version"] {
            assert!(help.contains(part), "{part}: {help}");
        }
        assert!(!help.contains('\x1b'), "colours only on a terminal");
    }
    assert!(run(&["help", "verify"]).contains("--hash"));
    let version = run(&["--version"]);
    for part in [env!("CARGO_PKG_VERSION"), "features:", "kernels:", "scalar"] {
        assert!(version.contains(part), "{version}");
    }
    for (shell, part) in [("bash", "complete -F"), ("zsh", "#compdef k3"), ("fish", "complete -c k3")] {
        let script = run(&["completions", shell]);
        assert!(script.contains(part) && script.contains("verify"), "{shell}");
    }
    let page = run(&["man"]);
    assert!(page.contains(".TH k3 1") && page.contains("verify"), "{page}");
    if let Ok(mut bash) = Command::new("bash").args(["-n", "/dev/stdin"]).stdin(Stdio::piped()).spawn() {
        let mut stdin = bash.stdin.take().expect("stdin");
        std::io::Write::write_all(&mut stdin, run(&["completions", "bash"]).as_bytes()).expect("write");
        drop(stdin);
        assert!(bash.wait().expect("bash").success(), "the script is not one");
    }
}
