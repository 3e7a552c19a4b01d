//! `k3 doctor`: what this machine, its disk and a checkpoint can do, and what to type.

use crate::args::{Cli, Doctor as Args};
use crate::fail::{BUDGET, DAMAGED, Failure};
use crate::report;
use crate::signals;
use crate::start::{Opened, Options, Wanted};
use crate::text;
use crate::verify::{fetch, quoted};
use clap::CommandFactory as _;
use k3_core::backend::Backend;
use k3_core::checkpoint::Class;
use k3_platform::error::Error;
use k3_platform::inventory::Inventory;
use k3_platform::io::{Disk, FileSet, Mode, Source, open_limit};
use k3_platform::memory::{Machine, available, default_threads};
use k3_platform::plan::Plan;
use k3_platform::speed::{self, Kernels, Order};
use k3_platform::survey::Survey;
use k3_platform::units::human;
use k3_platform::vocabulary::VocabularyFiles;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How long each speed is measured.
const MEASURE: Duration = Duration::from_millis(300);

/// Reads in flight that are measured; the engine has eight.
const DEPTHS: [usize; 4] = [1, 4, 8, 16];
const ENGINE_DEPTH: usize = 8;

/// Bytes of a sequential read: a slot of the ring.
const SEGMENT: usize = 16 << 20;

/// Bytes of an expert of the release, and of the file that stands for a model.
const EXPERT: u64 = 17_547_264;
const SAMPLE: u64 = 256 << 20;

/// A shell's `k3 run` that answers soon even where a token takes minutes.
const TRY: &str = "--prompt 'The capital of France is' --max-tokens 8";

/// What the disk does: bytes a second by order and reads in flight.
struct DiskSpeed {
    rows: Vec<(Order, usize, f64)>,
    direct: bool,
    /// Bytes of a random read.
    expert: usize,
    segment: usize,
}

impl DiskSpeed {
    fn at(&self, order: Order) -> Option<f64> {
        self.rows.iter().find(|r| r.0 == order && r.1 == ENGINE_DEPTH).map(|r| r.2)
    }
}

/// What is recommended.
struct Advice {
    command: String,
    /// Seconds a token takes, and why.
    prediction: Option<(f64, String)>,
    code: u8,
}

/// What is said, in groups, and the same as JSON.
#[derive(Default)]
struct Report {
    text: String,
    json: serde_json::Map<String, Value>,
}

impl Report {
    fn group(&mut self, name: &str) {
        let _ = writeln!(self.text, "{}{name}", if self.text.is_empty() { "" } else { "\n" });
    }

    fn line(&mut self, name: &str, text: impl std::fmt::Display) {
        let _ = writeln!(self.text, "  {name:<13} {text}");
    }
}

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn doctor(args: &Args) -> Result<u8, Failure> {
    let options = Options::new(&args.common)?;
    let budget = options.budget();
    let threads = args.common.threads.map_or_else(default_threads, usize::from);
    let backend = options.backend();
    let mut report = Report::default();
    say(args, "measuring the kernels");
    let kernels = speed::kernels(backend, threads, MEASURE);
    hush(args);
    machine(backend, threads, budget, kernels, &mut report);
    let here = ["config.json", "model.safetensors.index.json"].iter().all(|name| Path::new(name).is_file());
    let named = args.common.model.is_some();
    let advice = if named || here { model(args, kernels, &mut report)? } else { no_model(args, &mut report)? };
    if signals::stopped() {
        return Ok(signals::code());
    }
    report.group("what to type");
    report.line("", &advice.command);
    if let Some((seconds, why)) = &advice.prediction {
        let rate = if *seconds < 1.0 {
            format!("{:.1} tokens a second", 1.0 / seconds)
        } else {
            format!("{seconds:.1} s a token")
        };
        report.line("expect", format!("about {rate}: {why}"));
    }
    report.json.insert(
        "recommended".into(),
        json!({
            "command": advice.command,
            "seconds_per_token": advice.prediction.as_ref().map(|p| p.0),
            "reason": advice.prediction.as_ref().map(|p| &p.1),
        }),
    );
    report.json.insert("exit_code".into(), json!(advice.code));
    if args.common.json {
        report::print_json(&Value::Object(report.json))?;
    } else {
        report::print(report.text.trim_end())?;
    }
    Ok(advice.code)
}

/// A word about what takes seconds.
fn say(args: &Args, what: &str) {
    use std::io::IsTerminal as _;
    let mut err = std::io::stderr();
    if !args.common.quiet && err.is_terminal() {
        let _ = write!(err, "\r\x1b[K{what}").and_then(|()| err.flush());
    }
}

/// Takes the word away.
fn hush(args: &Args) {
    say(args, "");
}

fn machine(backend: Backend, threads: usize, budget: u64, kernels: Kernels, report: &mut Report) {
    let machine = Machine::this();
    report.group("processor");
    let name = machine.processor();
    if let Some(name) = &name {
        report.line("name", name);
    }
    let all: Vec<_> = Backend::available().map(Backend::name).collect();
    report.line("kernels", format!("{} (this CPU has {})", backend.name(), all.join(", ")));
    let (trunk, experts) = (kernels.bf16 / 1e9, kernels.mxfp4 / 1e9);
    report.line("speed", format!("{trunk:.1} GB/s of trunk weights, {experts:.1} GB/s of experts"));
    let (processors, quota) = (machine.processors(), machine.quota());
    let mut cores = format!("{threads} threads");
    if let Some(n) = processors {
        let _ = write!(cores, ", on {n} processors this process may use");
    }
    if let Some(n) = quota {
        let _ = write!(cores, ", the time of {n} of them by a control group");
    }
    report.line("threads", cores);
    let free = available(0);
    let huge = machine.huge_pages();
    report.group("memory");
    if let Some(free) = &free {
        report.line("free", format!("{}, limited by {}", human(free.bytes), free.limit));
    }
    report.line("budget", format!("{} (what is free, less a reserve, or --memory)", human(budget)));
    report.line("huge pages", huge.as_deref().unwrap_or("unknown"));
    report.line("open files", format!("{} shards at a time", open_limit()));
    report.json.insert(
        "machine".into(),
        json!({
            "processor": name, "backend": backend.name(), "backends": all, "threads": threads, "processors": processors,
            "quota": quota, "available_bytes": free.as_ref().map(|f| f.bytes),
            "limit": free.as_ref().map(|f| f.limit.to_string()), "budget_bytes": budget, "huge_pages": huge,
            "open_files": open_limit(),
            "bf16_bytes_per_second": kernels.bf16, "mxfp4_bytes_per_second": kernels.mxfp4,
        }),
    );
}

/// Measures reads of two kinds at four depths.
fn measure(
    args: &Args,
    files: &FileSet,
    lens: &[u64],
    disk: &Disk,
    expert: u64,
    stop: &Arc<AtomicBool>,
) -> Result<DiskSpeed, Failure> {
    // A small model is read in small pieces.
    let longest = lens.iter().copied().max().unwrap_or(0);
    let fit = |len: u64| usize::try_from(len.min(longest)).unwrap_or(SEGMENT).max(1);
    let (segment, expert) = (fit(SEGMENT as u64), fit(expert));
    let mut rows = Vec::new();
    for (order, len) in [(Order::Sequential, segment), (Order::Random, expert)] {
        for depth in DEPTHS {
            say(args, &format!("measuring the disk: {}, {depth} in flight", name_of(order)));
            if let Some(rate) = speed::reads(files, lens, len, depth, order, MEASURE, stop)? {
                rows.push((order, depth, rate));
            }
        }
    }
    hush(args);
    Ok(DiskSpeed { rows, direct: args.common.io == crate::args::Io::Direct && !disk.fell_back(), expert, segment })
}

const fn name_of(order: Order) -> &'static str {
    match order {
        Order::Sequential => "sequential",
        Order::Random => "experts",
    }
}

fn tell_disk(dir: &Path, speed: &DiskSpeed, need: Option<u64>, report: &mut Report) {
    report.group("disk");
    report.line("folder", dir.display());
    let how = if speed.direct { "past the page cache" } else { "through the page cache, so some of this is memory" };
    report.line("read", how);
    for (order, len) in [(Order::Sequential, speed.segment), (Order::Random, speed.expert)] {
        let rows = speed.rows.iter().filter(|r| r.0 == order);
        let each = rows.map(|(_, depth, rate)| format!("{:.2} at {depth}", rate / 1e9)).collect::<Vec<_>>().join(", ");
        report.line(name_of(order), format!("{each} in flight (GB/s, reads of {})", human(len as u64)));
    }
    let free = free_space(dir);
    if let Some(free) = free {
        let pack = Cli::command().find_subcommand("pack").is_some();
        match need.filter(|_| pack) {
            Some(need) if need > free => {
                report.line(
                    "space",
                    format!("{} free; a pack of the trunk, up to {}, needs another disk", human(free), human(need)),
                );
            }
            Some(need) => {
                report.line(
                    "space",
                    format!("{} free, enough for a pack of the trunk, up to {}", human(free), human(need)),
                );
            }
            None => report.line("space", format!("{} free", human(free))),
        }
    }
    let rows = speed
        .rows
        .iter()
        .map(|(order, depth, rate)| json!({"order": name_of(*order), "in_flight": depth, "bytes_per_second": rate}));
    report.json.insert(
        "disk".into(),
        json!({
            "folder": dir.display().to_string(), "direct": speed.direct, "reads": rows.collect::<Vec<_>>(),
            "free_bytes": free, "pack_bytes_at_most": need,
        }),
    );
}

/// Bytes that this user may still write in the file system of a folder.
fn free_space(dir: &Path) -> Option<u64> {
    k3_platform::io::free_space(dir).ok()
}

/// The path by which this program was started, for a command that can be pasted.
fn program() -> String {
    std::env::args_os().next().map_or_else(|| "k3".to_owned(), |name| quoted(Path::new(&name)))
}

/// Options that were given here and that a run should have too.
fn same_options(args: &Args) -> String {
    let common = &args.common;
    let mut text = String::new();
    if let Some(threads) = common.threads {
        let _ = write!(text, " --threads {threads}");
    }
    if common.backend != "auto" {
        let _ = write!(text, " --backend {}", common.backend);
    }
    if common.io == crate::args::Io::Buffered {
        text.push_str(" --io buffered");
    }
    text
}

/// What there is to say of a checkpoint.
fn model(args: &Args, kernels: Kernels, report: &mut Report) -> Result<Advice, Failure> {
    let located = Options::new(&args.common)?.locate_or(Path::new("."))?;
    let dir = located.dir.clone();
    say(args, "looking at the checkpoint");
    let survey = Survey::of(&dir, &*located.source);
    hush(args);
    report.group("model");
    report.line("folder", dir.display());
    if args.common.model.is_none() {
        report.line("", "no MODEL_DIR: the current folder holds a checkpoint");
    }
    notes(&survey, report);
    let mut faults = Vec::new();
    for error in &survey.faults {
        report.line("bad", error);
        faults.push(error.to_string());
    }
    report.json.insert(
        "model".into(),
        json!({
            "folder": dir.display().to_string(), "complete": survey.faults.is_empty(), "faults": faults,
            "shards": survey.index.as_ref().map(|i| i.shards().len()),
            "unfinished": survey.unfinished.iter().map(|p| p.display().to_string()).collect::<Vec<_>>(),
            "strays": survey.strays.iter().map(|p| p.display().to_string()).collect::<Vec<_>>(),
            "shards_with_holes": survey.sparse.len(),
        }),
    );
    if !survey.faults.is_empty() {
        let missing = survey.faults.iter().filter(|e| matches!(e, Error::MissingShard { .. })).count();
        if missing > 0 {
            report.line("missing", format!("{missing} shards; a download that is not finished goes on where it was"));
        }
        let one = survey.faults.iter().find_map(|e| match e {
            Error::MissingShard { path, .. } | Error::Length { path, .. } | Error::Header { path, .. } => {
                fetch(&dir, path, None)
            }
            _ => None,
        });
        if let Some(one) = one {
            report.line("mend", format!("{one}   (for the first; REPOSITORY is where you have it from)"));
        }
        let command = format!("{} verify {}", program(), quoted(&dir));
        return Ok(Advice { command, prediction: None, code: DAMAGED });
    }
    let opened = located.open()?;
    let inventory = Inventory::of(&opened.checkpoint);
    report.line("complete", format!("{} shards, {}", opened.checkpoint.index().shards().len(), human(inventory.files)));
    let mut files = text::vocabulary(&opened.checkpoint, false)?;
    let tokenizer = files.as_mut().map(VocabularyFiles::load).transpose()?.map_or(0, |v| v.bytes());
    let context = args.context.max(1);
    let plan = opened.plan(Wanted { context, prompt: 16, tokenizer, ..Wanted::default() });
    let lens: Vec<u64> = opened.checkpoint.index().shards().iter().map(|s| s.len).collect();
    let speed =
        match measure(args, &opened.checkpoint.files(), &lens, opened.disk(), inventory.expert_bytes, opened.stop()) {
            Ok(speed) => speed,
            Err(_) if signals::stopped() => {
                return Ok(Advice { command: String::new(), prediction: None, code: signals::code() });
            }
            Err(failure) => return Err(failure),
        };
    let pack = inventory.model().bytes - inventory.class(Class::Routed).bytes - inventory.embedding.bytes;
    tell_disk(&dir, &speed, Some(pack), report);
    match plan {
        Ok(plan) => Ok(run(args, &opened, &inventory, &plan, &speed, kernels, !survey.sparse.is_empty())),
        Err(failure) if failure.code == BUDGET => {
            report.group("too little memory");
            report.text.push_str(&format!("  {}\n", failure.message.replace('\n', "\n  ")));
            let command = format!("{} plan {} --memory SIZE --context {context}", program(), quoted(&dir));
            Ok(Advice { command, prediction: None, code: BUDGET })
        }
        Err(failure) => Err(failure),
    }
}

fn notes(survey: &Survey, report: &mut Report) {
    for path in survey.unfinished.iter().take(5) {
        report.line("unfinished", path.display());
    }
    if survey.unfinished.len() > 5 {
        report.line("", format!("and {} more files of downloads", survey.unfinished.len() - 5));
    }
    for path in survey.strays.iter().take(5) {
        report.line("not read", format!("{}: not in the index", path.display()));
    }
    if let Some(first) = survey.sparse.first() {
        report.line(
            "holes",
            format!(
                "{} shards are not wholly on the disk, such as {}: a download that is not finished, or placeholders",
                survey.sparse.len(),
                first.path.display()
            ),
        );
    }
}

/// The command for a model that can run, and what to expect of it.
fn run(
    args: &Args,
    opened: &Opened<'_>,
    inventory: &Inventory,
    plan: &Plan,
    speed: &DiskSpeed,
    kernels: Kernels,
    holes: bool,
) -> Advice {
    // Rounded down, so that what was free a moment ago still is.
    let memory = match plan.budget {
        b @ 2_000_000_000.. => format!("{}.{}G", b / 1_000_000_000, b / 100_000_000 % 10),
        b => format!("{}M", b / 1_000_000),
    };
    let command =
        format!("{} run {} {TRY} --memory {memory}{}", program(), quoted(opened.checkpoint.dir()), same_options(args));
    #[expect(clippy::cast_precision_loss, reason = "a prediction")]
    let over = |bytes: u64, rate: f64| if rate > 0.0 { bytes as f64 / rate } else { f64::INFINITY };
    let (sequential, random) = (speed.at(Order::Sequential), speed.at(Order::Random));
    let Some((sequential, random)) = sequential.zip(random) else {
        return Advice { command, prediction: None, code: 0 };
    };
    let disk = over(plan.trunk_read, sequential) + over(plan.experts_read, random);
    let config = opened.checkpoint.config();
    let chosen = (config.num_moe_layers() * config.num_experts_per_token) as u64 * inventory.expert_bytes;
    let trunk = inventory.always_active().bytes - inventory.embedding.bytes;
    let arithmetic = over(trunk, kernels.bf16) + over(chosen, kernels.mxfp4);
    let read = match plan.trunk_read + plan.experts_read {
        0 => "nothing is read from the disk, for all of it stays in memory".to_owned(),
        _ => format!(
            "the disk brings {} of trunk and at most {} of experts in {disk:.3} s",
            human(plan.trunk_read),
            human(plan.experts_read)
        ),
    };
    let mut why = if disk > arithmetic {
        format!("the disk is the limit: {read}; the arithmetic takes {arithmetic:.3} s meanwhile")
    } else {
        format!("the arithmetic is the limit, with {arithmetic:.3} s; {read}")
    };
    if holes {
        why.push_str("; but there are holes in the shards, and holes are read faster than data");
    }
    Advice { command, prediction: Some((disk.max(arithmetic), why)), code: 0 }
}

/// What there is to say without a model: the disk here, and the demo.
fn no_model(args: &Args, report: &mut Report) -> Result<Advice, Failure> {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let stop = signals::watch()?;
    let disk = Disk::new(if args.common.io == crate::args::Io::Direct { Mode::Direct } else { Mode::Buffered });
    match sample(args, &here, &disk, &stop) {
        Ok(speed) => tell_disk(&here, &speed, None, report),
        Err(why) => {
            report.group("disk");
            report.line("folder", here.display());
            report.line("not measured", why);
        }
    }
    report.group("model");
    report.line("", "no MODEL_DIR and no K3_MODEL: the disk was measured in the current folder");
    report.line("", "the demo runs without a download; for the real model, get the release into a folder of");
    report.line("", format!("1.56 TB and ask again: {} doctor FOLDER", program()));
    report.json.insert("model".into(), Value::Null);
    let demo = cfg!(feature = "demo");
    let options = same_options(args);
    let command = if demo {
        format!("{} run --prompt 'In the beginning' --memory 64M{options}", program())
    } else {
        format!("{} help run", program())
    };
    let why = "a model of 7 MB; it shows that everything works".to_owned();
    Ok(Advice { command, prediction: demo.then_some((0.01, why)), code: 0 })
}

/// Measures the disk under a folder by a file that has no name once it is open.
fn sample(args: &Args, dir: &Path, disk: &Disk, stop: &Arc<AtomicBool>) -> Result<DiskSpeed, String> {
    if let Some(free) = free_space(dir)
        && free < 4 * SAMPLE
    {
        return Err(format!("only {} are free, and {} would be written", human(free), human(SAMPLE)));
    }
    say(args, "writing a file to measure the disk with");
    let path = dir.join(format!(".k3-doctor-{}.tmp", std::process::id()));
    let written = write_sample(&path);
    let files = FileSet::new(Arc::new(disk.clone()) as Arc<dyn Source>, vec![path.clone()], 1);
    // Open, so that its name can go; whatever stops the process now, nothing is left behind.
    let opened = files.file(0).map(|file| file.len());
    let _gone = fs::remove_file(&path);
    hush(args);
    written.map_err(|e| format!("a file to measure with cannot be written here: {e}"))?;
    match opened {
        Some(Ok(len)) => measure(args, &files, &[len], disk, EXPERT, stop).map_err(|failure| failure.message),
        Some(Err(e)) => Err(e.to_string()),
        None => Err("no file".to_owned()),
    }
}

fn write_sample(path: &Path) -> std::io::Result<()> {
    let mut file = fs::File::options().write(true).create_new(true).open(path)?;
    // Bytes that no file system can compress.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = vec![0u8; 1 << 20];
    for _ in 0..SAMPLE >> 20 {
        for word in block.as_chunks_mut::<8>().0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
        file.write_all(&block)?;
    }
    file.sync_all()
}
