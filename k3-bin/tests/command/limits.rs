//! Budgets where something else than k3 watches over them: a memory control group, or a limit of the
//! process.

use super::{code, k3, send, text};
use k3_platform::synth::{Fill, Synth, write};
use k3_tests::root;
use rustix::process::Signal;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// A checkpoint of 30 MB with random weights, of which the least budget holds a small part.
pub(crate) fn filled(dir: &Path) {
    let text = std::fs::read_to_string(root().join("fixtures/tiny/config.json")).expect("the tiny config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let model = &mut config["text_config"];
    for (field, value) in [
        ("hidden_size", 512),
        ("intermediate_size", 1024),
        ("moe_intermediate_size", 128),
        ("routed_expert_hidden_size", 256),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 4),
        ("qk_nope_head_dim", 64),
        ("v_head_dim", 64),
    ] {
        model[field] = value.into();
    }
    model["linear_attn_config"]["num_heads"] = 4.into();
    model["linear_attn_config"]["head_dim"] = 64.into();
    let config = config.to_string();
    let synth = Synth { config: config.as_bytes(), fill: Fill::Everything, seed: 7, threads: 2 };
    write(dir, &synth).expect("a checkpoint");
}

/// The least budget that `k3 run` names when it refuses.
pub(crate) fn floor(output: &Output) -> u64 {
    assert_eq!(code(output), 4, "{}", text(&output.stderr));
    let message = text(&output.stderr);
    let floor = message.split("the least is ").nth(1).and_then(|rest| rest.split(['(', ' ']).nth(3));
    floor.and_then(|f| f.parse().ok()).unwrap_or_else(|| panic!("no floor in {message}"))
}

/// A memory control group below this process's own, of either version.
struct Group {
    dir: PathBuf,
    unified: bool,
}

impl Group {
    /// `None`, said aloud, where the machine allows none.
    fn new() -> Option<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("k3-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |line: &str, controller: &str| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            controllers.split(',').any(|c| c == controller).then(|| path.trim_start_matches('/').to_owned())
        };
        let legacy = own
            .lines()
            .find_map(|line| path(line, "memory"))
            .map(|own| (Path::new("/sys/fs/cgroup/memory").join(own).join(&name), false));
        let unified = own
            .lines()
            .find_map(|line| path(line, ""))
            .map(|own| (Path::new("/sys/fs/cgroup").join(own).join(&name), true));
        for (dir, unified) in legacy.into_iter().chain(unified) {
            if std::fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Self { dir, unified };
            if group.dir.join(group.limit_file()).exists() {
                return Some(group);
            }
        }
        println!("SKIPPED: no memory control group can be made here");
        None
    }

    const fn limit_file(&self) -> &'static str {
        if self.unified { "memory.max" } else { "memory.limit_in_bytes" }
    }

    /// Runs a command in the group, without swap: a machine that has some would let it pass the limit.
    fn run(&self, limit: u64, args: &[&str]) -> Output {
        self.command(limit, args).output().expect("sh")
    }

    /// A command that will run in the group.
    fn command(&self, limit: u64, args: &[&str]) -> Command {
        // The limit on memory and swap together is never the smaller one. It is not there where swap is not counted.
        let both = self.dir.join("memory.memsw.limit_in_bytes");
        let _ = std::fs::write(&both, "-1");
        std::fs::write(self.dir.join(self.limit_file()), limit.to_string()).expect("a limit");
        let _ = if self.unified {
            std::fs::write(self.dir.join("memory.swap.max"), "0")
        } else {
            std::fs::write(both, limit.to_string())
        };
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ > \"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        shell.arg(env!("CARGO_BIN_EXE_k3")).args(args).env_remove("K3_MODEL");
        shell
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // What ran in it has been waited for.
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// Address space that counts as data and is no part of a budget: stacks of the two computing and eight
/// reading threads, of 2 MiB each, and what the allocator sets aside for each thread.
const SLACK: u64 = 12 * ((2 << 20) + (1 << 20));

/// Runs a command under a limit on private memory.
fn under_ulimit(limit: u64, args: &[&str]) -> Output {
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -d \"$0\" && exec \"$@\"", &(limit / 1024).to_string()]);
    shell.arg(env!("CARGO_BIN_EXE_k3")).args(args).env_remove("K3_MODEL").output().expect("sh")
}

#[test]
fn a_limit_of_the_size_of_the_budget_is_enough() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    filled(&model);
    let model = model.to_str().expect("a path");
    let args = |memory: &str| {
        let args = ["run", model, "--json", "--ids", "3,1,4", "--max-tokens", "3", "--ignore-eos", "--threads", "2"];
        let memory = ["--memory".to_owned(), memory.to_owned()];
        args.iter().map(|&a| a.to_owned()).chain(memory).collect::<Vec<_>>()
    };
    let least = floor(&k3().args(args("1M")).output().expect("k3"));
    let group = Group::new();
    // The very least has a ring of one small slot, and reads for seconds; a checkpoint of a megabyte is run
    // with it elsewhere.
    let budgets = [least + 1_000_000, least + 3_000_000, least + 9_000_000, least + 20_000_000, 100_000_000];
    let (mut ids, mut pinned) = (None, Vec::new());
    for budget in budgets {
        let args = args(&budget.to_string());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let grouped = group.as_ref().map(|group| ("group", group.run(budget, &args)));
        for (limit, output) in [("ulimit", under_ulimit(budget + SLACK, &args))].into_iter().chain(grouped) {
            assert_eq!(code(&output), 0, "{limit} {budget}: {}", text(&output.stderr));
            let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
            let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
            assert!(peak <= budget, "{limit}: peak {peak} of {budget}");
            assert_eq!(object["generated_ids"].as_array().expect("ids").len(), 3);
            assert_eq!(*ids.get_or_insert_with(|| object["generated_ids"].clone()), object["generated_ids"]);
            // The layers are walked in a cycle: what is pinned is exactly what is found.
            let layers = object["memory"]["pinned_layers"].as_u64().expect("layers");
            #[expect(clippy::cast_precision_loss, reason = "nine layers")]
            let share = layers as f64 / 9.0;
            let rate = object["io"]["trunk_hit_rate"].as_f64().expect("a rate");
            assert!((rate - share).abs() < 1e-12, "{rate} for {layers} of 9 layers");
            pinned.push(layers);
        }
    }
    assert!(pinned.first() == Some(&0) && pinned.last() == Some(&9), "{pinned:?}");
    assert!(pinned.iter().any(|n| (1..9).contains(n)), "{pinned:?}");
}

/// A budget is no more than a wish where something else sets a limit. That the limit will be met is said
/// before the first read, and not when the process is killed in the middle of its text.
#[test]
fn a_budget_beyond_a_limit_is_refused_before_the_first_read() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    filled(&model);
    let model = model.to_str().expect("a path");
    // All of the model and a long context: 74 MB.
    let args = ["run", model, "--ids", "3,1,4", "--max-tokens", "1", "--threads", "2", "--context", "60000"];
    let args = [&args[..], &["--memory", "2G"]].concat();
    let group = Group::new();
    let grouped = group.as_ref().map(|group| ("group", group.run(45_000_000, &args)));
    for (limit, output) in [("ulimit", under_ulimit(65_000_000, &args))].into_iter().chain(grouped) {
        let message = text(&output.stderr);
        assert_eq!(code(&output), 4, "{limit}: {message}");
        assert!(message.contains("pinned trunk") && message.contains("lower --memory"), "{limit}: {message}");
        assert!(output.stdout.is_empty(), "{limit}");
        // It is the whole of what is mapped later that was tried, and no single slot of it.
        let refused = message.split("refused ").nth(1).and_then(|rest| rest.split(' ').next());
        let bytes = refused.map_or(u64::MAX, |bytes| bytes.parse().expect("a number"));
        assert!(bytes > 20_000_000, "{limit}: {message}");
    }
    // The same plan in peace.
    let output = k3().args(&args).output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
}

/// What measures and checks keeps within its budget as a run does, and says what there was no memory for.
#[test]
fn commands_without_an_engine_keep_within_their_budgets() {
    let folder = tempfile::tempdir().expect("a folder");
    let within = |args: &[&str], budget: u64| {
        let mut command = k3();
        command.args(args).args(["--json", "--memory", &budget.to_string()]).current_dir(folder.path());
        let output = command.env("XDG_CACHE_HOME", folder.path()).output().expect("k3");
        assert_eq!(code(&output), 0, "{args:?} {budget}: {}", text(&output.stderr));
        let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(object["memory"]["budget_bytes"], budget);
        let peak = object["memory"]["peak_rss_bytes"].as_u64().expect("a peak");
        assert!(peak <= budget, "{args:?}: peak {peak} of {budget}");
        object
    };
    // A build with debug assertions is larger before it does anything.
    let bench = ["bench", "--seconds", "1", "--threads", "2", "--backend", "scalar"];
    let (small, large) = (within(&bench, 40_000_000), within(&bench, 150_000_000));
    assert!(small["kernels"]["bf16_gb_s"].is_null() && small["kernels"]["skipped"].is_string(), "{small}");
    assert!(large["kernels"]["bf16_gb_s"].is_number() && large["kernels"]["skipped"].is_null(), "{large}");
    if large["disk"]["skipped"].is_null() {
        // Eight experts of the release do not fit into either, nor sixteen.
        for (object, most) in [(&small, 2), (&large, 8)] {
            let cases = object["disk"]["cases"].as_array().expect("cases");
            let depth = cases[1]["in_flight"].as_u64().expect("a depth");
            assert!(depth < most && cases[2]["gb_s"].is_null(), "{object}");
            assert!(cases[0]["gb_s"].is_number() && cases[0]["in_flight"] == 8, "{object}");
        }
    }
    let (small, large) = (within(&["doctor"], 40_000_000), within(&["doctor"], 150_000_000));
    assert!(small["machine"]["bf16_bytes_per_second"].is_null(), "{small}");
    assert!(large["machine"]["bf16_bytes_per_second"].is_number(), "{large}");
    if let Some(reads) = large["disk"]["reads"].as_array() {
        let deep = |order: &str| reads.iter().filter(|r| r["order"] == order).count();
        assert!(deep("sequential") == 3 && (1..=2).contains(&deep("experts")), "{large}");
    }
    // Sixteen experts would not fit into the group, and what kills there says nothing.
    if let Some(group) = Group::new() {
        for args in [&["doctor", "--json"][..], &["bench", "--json", "--seconds", "1", "--backend", "scalar"]] {
            let output = group.command(200_000_000, args).current_dir(folder.path()).output().expect("sh");
            assert_eq!(code(&output), 0, "{args:?}: {:?} {}", output.status, text(&output.stderr));
        }
    }
    // Eight threads would take 134 MB.
    let (mut sums, big) = (String::new(), folder.path().join("model"));
    k3_tests::copy_dir(&root().join("fixtures/tiny"), &big);
    for i in 0..8 {
        let name = format!("other-{i}.bin");
        std::fs::File::create(big.join(&name)).and_then(|f| f.set_len(20 << 20)).expect("a file");
    }
    for entry in std::fs::read_dir(&big).expect("read_dir").map(|e| e.expect("an entry")).filter(|e| e.path().is_file())
    {
        let sha = k3_platform::digest::of(&std::fs::read(entry.path()).expect("read"));
        sums += &format!("{}  {}\n", k3_platform::digest::hex(&sha), entry.file_name().to_string_lossy());
    }
    let list = folder.path().join("sums");
    std::fs::write(&list, sums).expect("write");
    let (list, big) = (list.to_str().expect("a path"), big.to_str().expect("a path"));
    let args = ["verify", "--threads", "8", "--scales", "--hash", list, big];
    for budget in [45_000_000, 80_000_000] {
        let found = within(&args, budget);
        assert!(found["checks"]["hash"]["good"].as_u64() >= Some(20), "{found}");
    }
    // Refused before anything is read, with the least that would do.
    let output = k3().args(args).args(["--memory", "5M"]).env("XDG_CACHE_HOME", folder.path()).output().expect("k3");
    let least = floor(&output);
    within(&args, least + 1_000_000);
}

/// A trace is read whole, and what is no trace may never end.
#[test]
fn a_trace_without_end_is_refused() {
    let output = under_ulimit(200_000_000, &["cachesim", "/dev/zero"]);
    let message = text(&output.stderr);
    assert_eq!(code(&output), 2, "{message}");
    assert!(message.contains("/dev/zero: more than") && message.contains("k3 run --trace"), "{message}");
}

/// The address space counts what threads set aside and never touch: "auto" leaves room for it.
#[test]
fn auto_keeps_within_the_address_space() {
    let tiny = root().join("fixtures/tiny");
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -v 1500000 && exec \"$@\"", "sh", env!("CARGO_BIN_EXE_k3")]);
    shell.args(["run", "--json", "--ids", "1,2", "--max-tokens", "2", "--threads", "2"]).arg(tiny);
    let output = shell.env_remove("K3_MODEL").output().expect("sh");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let budget = object["memory"]["budget_bytes"].as_u64().expect("a budget");
    // Eleven threads set aside 64 MiB each.
    assert!(budget < 1_500_000 * 1024 - 11 * (64 << 20), "{budget}");
}

/// The story: as many threads as read headers took all of a small address space, and what they then asked for was
/// refused, or ended the process.
#[test]
fn headers_are_read_in_a_small_address_space() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    filled(&model);
    for kilobytes in [100_000, 300_000, 500_000, 700_000, 300_000, 500_000, 300_000, 500_000] {
        let script = format!("ulimit -v {kilobytes}; exec \"$@\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_k3"), "inspect", "--memory", "64M"]).arg(&model);
        let output = shell.env_remove("K3_MODEL").output().expect("sh");
        assert_eq!(code(&output), 0, "{kilobytes}: {}", text(&output.stderr));
    }
}

/// What is free is found out where the limit is, whoever set it.
#[test]
fn auto_keeps_within_the_group() {
    let Some(group) = Group::new() else { return };
    let tiny = root().join("fixtures/tiny");
    let limit = 80_000_000;
    let output =
        group.run(limit, &["run", "--json", "--ids", "1,2", "--max-tokens", "2", tiny.to_str().expect("a path")]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let budget = object["memory"]["budget_bytes"].as_u64().expect("a budget");
    assert!(budget < limit, "{budget}");
}

/// The released shape, refused in less memory than one of its layers takes: nothing was allocated for it.
#[test]
fn a_refusal_comes_before_anything_is_allocated() {
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model");
    match write(&model, &Synth::default()) {
        Ok(_) => {}
        Err(error) => {
            println!("SKIPPED: {error}");
            return;
        }
    }
    let args = ["run", "--ids", "1", "--max-tokens", "1", "--memory", "300M", model.to_str().expect("a path")];
    let group = Group::new();
    let grouped = group.as_ref().map(|group| group.run(100_000_000, &args));
    for output in [under_ulimit(100_000_000, &args)].into_iter().chain(grouped) {
        let least = floor(&output);
        assert!((300_000_000..700_000_000).contains(&least), "{least}");
        for part in ["KDA states", "69 layers x 96 heads", "trunk ring", "page tables", "total"] {
            assert!(text(&output.stderr).contains(part), "{part}: {}", text(&output.stderr));
        }
        assert!(output.stdout.is_empty());
    }
    // A long prompt at eight gigabytes is accepted: 55,296 bytes a position.
    let mut plan = k3();
    plan.args(["plan", "--json", "--disk", "1", "--memory", "8G", "--context", "32768"]).arg(&model);
    let output = plan.output().expect("k3");
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let entries = plan["ledger"].as_array().expect("a ledger");
    let context = entries.iter().find(|e| e["name"] == "context").expect("the context");
    assert_eq!(context["bytes"], 32_768 * 55_296);
    assert!(plan["memory"]["planned_bytes"].as_u64().expect("bytes") <= 8_000_000_000);
}

/// The most memory that a command had which was interrupted some time after its plan stood.
fn peak(args: &[&str]) -> u64 {
    let mut child = k3().args(args).arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("k3");
    let mut said = String::new();
    for line in BufReader::new(child.stderr.take().expect("stderr")).lines() {
        let line = line.expect("a line");
        let planned = line.starts_with("  total ");
        said += &format!("{line}\n");
        if planned {
            // Long enough to read what is pinned.
            std::thread::sleep(Duration::from_secs(3));
            send(&child, Signal::INT);
        }
    }
    let output = child.wait_with_output().expect("k3");
    assert!(matches!(code(&output), 0 | 130), "{args:?}: {} {said}", code(&output));
    let object: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    object["memory"]["peak_rss_bytes"].as_u64().expect("a peak")
}

/// The story: ids were in no plan, and a batch had them twice, so that an input of an eighth of the memory took more
/// than all of it.
#[test]
fn what_is_read_is_part_of_the_plan() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let model = path("model");
    filled(&model);
    let budget = 40_000_000;
    let words = ["In", "the", "beginning", "heaven", "and", "earth", "was", "without", "form", "void"];
    let mut seed = 1u64;
    let mut prose = |len: usize| {
        let mut prose = String::new();
        while prose.len() < len {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            prose += words[usize::try_from(seed >> 33).expect("31 bits") % words.len()];
            prose.push(' ');
        }
        prose
    };
    std::fs::write(path("text"), prose(3_500_000)).expect("write");
    let texts: String = (0..1500).map(|i| format!("{{\"id\":{i},\"prompt\":\"{}\"}}\n", prose(2000))).collect();
    std::fs::write(path("texts"), texts).expect("write");
    let short = |n: usize| (0..n).map(|i| format!("{{\"id\":{i},\"ids\":[1]}}\n")).collect::<String>();
    std::fs::write(path("short"), short(18_000)).expect("write");
    std::fs::write(path("many"), short(20_000)).expect("write");
    let list = vec!["1"; 2_000_000].join(",");
    std::fs::write(path("list"), format!("{{\"id\":1,\"ids\":[{list}]}}\n")).expect("write");

    let (model, memory) = (model.to_str().expect("a path").to_owned(), budget.to_string());
    let names = ["text", "texts", "short", "many", "list", "out"].map(|name| path(name).display().to_string());
    let [text, texts, short, many, list, out] = names.each_ref().map(String::as_str);
    let common = [&model, "--memory", &memory, "--threads", "2"];
    let peak_of = |what: &str, args: &[&str]| {
        let peak = peak(&[args, &common].concat());
        println!("{what}: {peak} of {budget}");
        assert!(peak <= budget, "{what}: {peak} of {budget}");
    };
    peak_of("perplexity", &["perplexity", "--file", text]);
    fn batch<'a>(input: &'a str, out: &'a str) -> [&'a str; 7] {
        ["batch", "--max-tokens", "2", "--input", input, "--output", out]
    }
    peak_of("texts", &batch(texts, out));
    std::fs::remove_file(out).expect("remove");
    peak_of("texts, one by one", &[&batch(texts, out)[..], &["--in-flight", "1"]].concat());
    std::fs::remove_file(out).expect("remove");
    peak_of("short lines", &batch(short, out));
    std::fs::remove_file(out).expect("remove");

    // As many lines as take the memory while they are read.
    let output = k3().args(batch(many, out)).args(common).output().expect("k3");
    let message = self::text(&output.stderr);
    assert!(code(&output) == 2 && message.contains("20000 prompts take"), "{message}");
    // A list of ids is no tree.
    let args = [&batch(list, out)[..], &common, &["--context", "10"]].concat();
    let output = under_ulimit(60_000_000, &args);
    let message = self::text(&output.stderr);
    assert!(code(&output) == 2 && message.contains("2000000 tokens, --context holds 10"), "{message}");
    assert!(!Path::new(out).exists());
}
