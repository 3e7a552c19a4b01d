//! `k3 doctor`: what this machine, its disk and a checkpoint can do, and what to type.

use crate::args::{Cli, Doctor as Args, PLAN_CONTEXT};
use crate::bench::{self, weights_within};
use crate::fail::{BUDGET, Failure};
use crate::report;
use crate::signals;
use crate::start::{Opened, Options, READERS, Wanted, room};
use crate::text;
use crate::verify::{fetch, quoted, worst};
use clap::CommandFactory as _;
use k3_core::backend::Backend;
use k3_core::checkpoint::Class;
use k3_platform::error::Error;
use k3_platform::exec::Rayon;
use k3_platform::inventory::Inventory;
use k3_platform::io::{Disk, Mode, free_space, open_limit};
use k3_platform::measure::disk::{self, Case, EXPERT, Figure, Pattern, Scratch};
use k3_platform::measure::kernels::{self, Coding, RELEASED, SMALL};
use k3_platform::measure::token::{Rates, expect};
use k3_platform::measure::weights;
use k3_platform::memory::{Machine, available, default_threads};
use k3_platform::plan::Plan;
use k3_platform::survey::Survey;
use k3_platform::units::human;
use k3_platform::vocabulary::VocabularyFiles;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// How long each speed is measured.
const MEASURE: Duration = Duration::from_millis(300);

/// Reads in flight that are measured; the engine has [`READERS`].
const DEPTHS: [usize; 4] = [1, 4, READERS, 16];

/// Bytes of a sequential read: a slot of the ring.
const SEGMENT: usize = 16 << 20;

/// Bytes of the file that stands for a model, and the longest that writing it may take.
const SAMPLE: u64 = 256 << 20;
const WRITE: Duration = Duration::from_secs(10);

/// Memory the kernels read weights from, if the budget and a quarter of what is free hold it (bytes).
const DATA: usize = 128 << 20;

/// A shell's `k3 run` that answers soon even where a token takes minutes.
const TRY: &str = "--prompt 'The capital of France is' --max-tokens 8";

/// What the disk does.
struct DiskSpeed {
    figures: Vec<Figure>,
    direct: bool,
    /// The packed trunk that sequential reads were of.
    pack: Option<PathBuf>,
}

impl DiskSpeed {
    /// As the engine reads, or with as many reads in flight as memory is enough for.
    fn at(&self, pattern: Pattern) -> Option<f64> {
        let these = self.figures.iter().filter(|f| f.case.pattern == pattern && f.case.depth <= READERS);
        these.max_by_key(|f| f.case.depth).map(Figure::rate)
    }
}

/// Bytes of weights a second that are multiplied with one position, on all threads.
#[derive(Debug, Clone, Copy)]
struct Kernels {
    bf16: f64,
    mxfp4: f64,
}

impl Kernels {
    /// Measures them; `None` where there is no memory for it.
    fn measure(backend: Backend, threads: usize, budget: u64) -> Option<Self> {
        let bytes = weights_within(budget, threads, DATA);
        if bytes < SMALL.bytes() {
            return None;
        }
        let exec = Rayon::new(threads).ok()?;
        let data = weights(bytes, &exec).ok()?;
        let cases = [SMALL, RELEASED[3]].map(|shape| kernels::Case { shape, positions: 1, backend });
        let report = kernels::measure(&data, &exec, &cases, MEASURE).ok()?;
        let rate = |coding| report.figures.iter().find(|f| f.case.shape.coding == coding).map(|f| f.bytes.best);
        Some(Self { bf16: rate(Coding::Bf16)?, mxfp4: rate(Coding::Mxfp4)? })
    }
}

/// What is recommended.
struct Advice {
    command: String,
    /// Seconds a token takes.
    seconds: Option<f64>,
    /// Why so many, or why nothing is foretold.
    why: Option<String>,
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
    let kernels = Kernels::measure(backend, threads, budget);
    hush(args);
    machine(backend, threads, budget, kernels, &mut report);
    let here = ["config.json", "model.safetensors.index.json"].iter().all(|name| Path::new(name).is_file());
    let named = args.common.model.is_some();
    let advice =
        if named || here { model(args, budget, kernels, &mut report)? } else { no_model(args, budget, &mut report)? };
    if signals::stopped() {
        return Ok(signals::code());
    }
    report.group("what to type");
    report.line("", &advice.command);
    if let Some(why) = &advice.why {
        let rate = match advice.seconds {
            Some(seconds) if seconds < 1.0 => format!("about {:.1} tokens a second: ", 1.0 / seconds),
            Some(seconds) => format!("about {seconds:.1} s a token: "),
            None => String::new(),
        };
        report.line("expect", format!("{rate}{why}"));
    }
    report.json.insert(
        "recommended".into(),
        json!({
            "command": advice.command,
            "seconds_per_token": advice.seconds,
            "reason": advice.why,
        }),
    );
    report.json.insert("exit_code".into(), json!(advice.code));
    report.json.insert("memory".into(), report::held(budget));
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

fn machine(backend: Backend, threads: usize, budget: u64, kernels: Option<Kernels>, report: &mut Report) {
    let machine = Machine::this();
    report.group("processor");
    let name = machine.processor();
    if let Some(name) = &name {
        report.line("name", name);
    }
    let all: Vec<_> = Backend::available().map(Backend::name).collect();
    report.line("kernels", format!("{} (this CPU has {})", backend.name(), all.join(", ")));
    let speed = kernels.map(|Kernels { bf16, mxfp4 }| {
        format!("{:.1} GB/s of trunk weights, {:.1} GB/s of experts", bf16 / 1e9, mxfp4 / 1e9)
    });
    report.line("speed", speed.unwrap_or_else(|| "not measured: there is too little memory for it".to_owned()));
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
            "bf16_bytes_per_second": kernels.map(|k| k.bf16), "mxfp4_bytes_per_second": kernels.map(|k| k.mxfp4),
        }),
    );
}

/// Measures reads of two kinds at four depths, or at those that the budget is enough for.
fn measure(
    args: &Args,
    budget: u64,
    disk: &Disk,
    expert: usize,
    read: impl Fn(Case) -> Result<Figure, Error>,
) -> Result<DiskSpeed, Failure> {
    let room = room(budget, DEPTHS[3]);
    let mut figures = Vec::new();
    for (pattern, block) in [(Pattern::Sequential, SEGMENT), (Pattern::Random, expert)] {
        // Pieces of one size for all depths, which the engine would read with so much memory.
        let Some(engine) = (Case { pattern, block, depth: READERS }).within(room) else { continue };
        for case in DEPTHS.map(|depth| Case { depth, ..engine }) {
            if case.memory() > room {
                continue;
            }
            say(args, &format!("measuring the disk: {}, {} in flight", name_of(pattern), case.depth));
            // A small model is read in small pieces.
            figures.extend(Some(read(case)?).filter(|f| f.bytes > 0));
        }
    }
    hush(args);
    let direct = args.common.io == crate::args::Io::Direct && !disk.fell_back();
    Ok(DiskSpeed { figures, direct, pack: None })
}

const fn name_of(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::Sequential => "sequential",
        Pattern::Random => "experts",
    }
}

fn tell_disk(dir: &Path, speed: &DiskSpeed, need: Option<u64>, report: &mut Report) {
    report.group("disk");
    report.line("folder", dir.display());
    let how = if speed.direct { "past the page cache" } else { "through the page cache, so some of this is memory" };
    report.line("read", how);
    if let Some(pack) = &speed.pack {
        report.line("trunk", format!("{}, which is what was read in sequence", pack.display()));
    }
    for pattern in [Pattern::Sequential, Pattern::Random] {
        let these: Vec<_> = speed.figures.iter().filter(|f| f.case.pattern == pattern).collect();
        let each = these.iter().map(|f| format!("{:.2} at {}", f.rate() / 1e9, f.case.depth)).collect::<Vec<_>>();
        let Some(first) = these.first() else {
            report.line(name_of(pattern), "not measured: there is too little memory for it");
            continue;
        };
        let (each, block) = (each.join(", "), human(first.case.block as u64));
        report.line(name_of(pattern), format!("{each} in flight (GB/s, reads of {block})"));
    }
    let free = free_space(dir).ok();
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
        .figures
        .iter()
        .map(|f| json!({"order": name_of(f.case.pattern), "in_flight": f.case.depth, "bytes_per_second": f.rate()}));
    report.json.insert(
        "disk".into(),
        json!({
            "folder": dir.display().to_string(), "packed_trunk": speed.pack.as_ref().map(|p| p.display().to_string()),
            "direct": speed.direct, "reads": rows.collect::<Vec<_>>(),
            "free_bytes": free, "pack_bytes_at_most": need,
        }),
    );
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
    if common.trunk != Path::new("auto") {
        let _ = write!(text, " --trunk {}", quoted(&common.trunk));
    }
    if common.experts == crate::args::Experts::Lru {
        text.push_str(" --experts lru");
    }
    if let Some(chunk) = common.chunk {
        let _ = write!(text, " --chunk {chunk}");
    }
    if let Some(seconds) = common.reading.io_timeout {
        let _ = write!(text, " --io-timeout {seconds}");
    }
    if let Some(limit) = common.reading.disk_limit {
        let _ = write!(text, " --disk-limit {limit}");
    }
    if args.planned.context != PLAN_CONTEXT {
        let _ = write!(text, " --context {}", args.planned.context);
    }
    text
}

/// What there is to say of a checkpoint.
fn model(args: &Args, budget: u64, kernels: Option<Kernels>, report: &mut Report) -> Result<Advice, Failure> {
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
        let code = worst(survey.faults.iter().map(|error| Failure::from(error).code));
        return Ok(Advice { command, seconds: None, why: None, code });
    }
    let opened = located.open()?;
    let inventory = Inventory::of(&opened.checkpoint);
    report.line("complete", format!("{} shards, {}", opened.checkpoint.index().shards().len(), human(inventory.files)));
    let mut files = text::vocabulary(&opened.checkpoint, false)?;
    let tokenizer = files.as_mut().map(VocabularyFiles::load).transpose()?.map_or(0, |v| v.bytes());
    let context = args.planned.context.max(1);
    let plan = opened.plan(Wanted { context, prompt: 16, tokenizer, ..Wanted::default() });
    let expert = usize::try_from(inventory.expert_bytes).unwrap_or(EXPERT);
    let mut speed = match measure(args, budget, opened.disk(), expert, |case| bench::read(&opened, case, MEASURE)) {
        Ok(speed) => speed,
        Err(_) if signals::stopped() => {
            return Ok(Advice { command: String::new(), seconds: None, why: None, code: signals::code() });
        }
        Err(failure) => return Err(failure),
    };
    speed.pack = opened.checkpoint.pack().map(|pack| pack.path().to_owned());
    let pack = inventory.model().bytes - inventory.class(Class::Routed).bytes - inventory.embedding.bytes;
    tell_disk(&dir, &speed, Some(pack), report);
    match plan {
        Ok(plan) => Ok(run(args, &opened, &plan, &speed, kernels, !survey.sparse.is_empty())),
        Err(failure) if failure.code == BUDGET => {
            report.group("too little memory");
            report.text.push_str(&format!("  {}\n", failure.message.replace('\n', "\n  ")));
            let command = format!("{} plan {} --memory SIZE --context {context}", program(), quoted(&dir));
            Ok(Advice { command, seconds: None, why: None, code: BUDGET })
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
    plan: &Plan,
    speed: &DiskSpeed,
    kernels: Option<Kernels>,
    holes: bool,
) -> Advice {
    // Rounded down, so that what was free a moment ago still is.
    let memory = match plan.budget {
        b @ 2_000_000_000.. => format!("{}.{}G", b / 1_000_000_000, b / 100_000_000 % 10),
        b => format!("{}M", b / 1_000_000),
    };
    let command =
        format!("{} run {} {TRY} --memory {memory}{}", program(), quoted(opened.checkpoint.dir()), same_options(args));
    let (Some(sequential), Some(experts), Some(Kernels { bf16, mxfp4 })) =
        (speed.at(Pattern::Sequential), speed.at(Pattern::Random), kernels)
    else {
        let why = "not foretold, for not all of this machine could be measured in so little memory".to_owned();
        return Advice { command, seconds: None, why: Some(why), code: 0 };
    };
    let expected = expect(&opened.checkpoint, plan, &Rates { sequential, experts, bf16, mxfp4 });
    let (disk, arithmetic) = (expected.disk_at_most, expected.compute);
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
    Advice { command, seconds: Some(expected.per_token().1), why: Some(why), code: 0 }
}

/// What there is to say without a model: the disk here, and the demo.
fn no_model(args: &Args, budget: u64, report: &mut Report) -> Result<Advice, Failure> {
    let here = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."));
    let stop = signals::watch()?;
    let mode = if args.common.io == crate::args::Io::Direct { Mode::Direct } else { Mode::Buffered };
    match sample(args, budget, &here, mode, &stop) {
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
    // What a token of so small a model takes is neither weights nor reads, and that was not measured.
    let why = "a model of 7 MB, whose speed says nothing; it shows that everything works".to_owned();
    Ok(Advice { command, seconds: None, why: demo.then_some(why), code: 0 })
}

/// Measures the disk under a folder by a file that has no name.
fn sample(args: &Args, budget: u64, dir: &Path, mode: Mode, stop: &Arc<AtomicBool>) -> Result<DiskSpeed, String> {
    if room(budget, DEPTHS[3]) < Scratch::PART as u64 {
        return Err("there is too little memory for it".to_owned());
    }
    say(args, "writing a file to measure the disk with");
    let scratch = Scratch::write(dir, SAMPLE, WRITE, stop);
    hush(args);
    let scratch = scratch.map_err(|e| e.to_string())?;
    let (files, disk) = scratch.files(mode);
    let read = |case| disk::measure(&files, &[scratch.len()], case, MEASURE, stop);
    measure(args, budget, &disk, EXPERT, read).map_err(|failure| failure.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_foretold_rests_on_the_engines_own_reads() {
        let figure = |pattern, depth: usize| {
            let case = Case { pattern, block: 1, depth };
            Figure { case, bytes: depth as u64, seconds: 1.0 }
        };
        let speed = |depths: &[usize]| {
            let figures = depths.iter().map(|&depth| figure(Pattern::Random, depth)).collect();
            DiskSpeed { figures, direct: true, pack: None }
        };
        assert_eq!(speed(&DEPTHS).at(Pattern::Random), Some(8.0));
        // In little memory the engine has fewer in flight, too.
        assert_eq!(speed(&[1, 4]).at(Pattern::Random), Some(4.0));
        assert_eq!(speed(&DEPTHS).at(Pattern::Sequential), None);
    }
}
