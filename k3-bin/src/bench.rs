//! `k3 bench`: what the machine can do, and what a token would take on it.

use crate::args::{Bench as Args, Io};
use crate::fail::{self, Failure};
use crate::report;
use crate::signals;
use crate::start::{Opened, Options, Wanted, room};
use k3_core::backend::Backend;
use k3_platform::aligned::AllocError;
use k3_platform::error::Error;
use k3_platform::exec::Rayon;
use k3_platform::inventory::Inventory;
use k3_platform::io::Mode;
use k3_platform::measure::disk::{self, CASES, EXPERT, Scratch, ScratchError};
use k3_platform::measure::kernels::{self, BESIDE, Case, Coding, RELEASED, Report, SMALL};
use k3_platform::measure::token::{Expected, Rates, expect};
use k3_platform::measure::weights;
use k3_platform::memory::{available, default_threads};
use k3_platform::plan::Plan;
use k3_platform::units::human;
use serde_json::{Map, Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Seconds of `--quick`.
const QUICK: f64 = 4.0;
/// Part of the time that kernels get; the disk gets the rest.
const KERNELS: f64 = 0.5;
/// Memory the kernels read weights from: several times any cache, if the budget and a quarter of what is free
/// hold it (bytes).
const DATA: usize = 512 << 20;
/// The file that is read where there is no model (bytes).
const SCRATCH: u64 = 1 << 30;
/// Part of the disk's time in which that file is written.
const WRITING: f64 = 0.4;
/// Positions at once: a token, and a batch.
const POSITIONS: [usize; 2] = [1, 8];
/// Positions the predicted sequence has room for.
const CONTEXT: usize = 4096;

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn bench(args: &Args) -> Result<u8, Failure> {
    let seconds = if args.quick { QUICK } else { f64::from(args.seconds) };
    let options = Options::new(&args.common)?;
    let backend = options.backend();
    let all = args.common.threads.map_or_else(default_threads, usize::from);
    let budget = options.budget();
    // A model that cannot be opened, or run, is told before anything is measured.
    let opened = if args.common.model.is_some() { Some(options.open()?) } else { None };
    let plan = match &opened {
        Some(opened) => Some(opened.plan(Wanted { context: CONTEXT, prompt: CONTEXT, ..Wanted::default() })?),
        None => None,
    };
    let stop = match &opened {
        Some(opened) => Arc::clone(opened.stop()),
        None => signals::watch()?,
    };

    let backends = chosen(&args.common.backend, backend);
    let mut threads = vec![1, all];
    threads.dedup();
    let share = seconds * KERNELS / threads.len() as f64;
    let mut measured = Vec::new();
    let mut skipped = None;
    for &n in &threads {
        match kernels_on(n, budget, &backends, Duration::from_secs_f64(share))? {
            Ok(measure) => measured.push(measure),
            Err(reason) => skipped = Some(reason),
        }
        if signals::stopped() {
            return Ok(signals::code());
        }
    }
    let mode = if args.common.io == Io::Direct { Mode::Direct } else { Mode::Buffered };
    let time = Duration::from_secs_f64(seconds * (1.0 - KERNELS));
    let disk = match disk_of(opened.as_ref(), mode, budget, time, &stop) {
        Err(Failure { .. }) if signals::stopped() => return Ok(signals::code()),
        other => other?,
    };
    let best = measured.last().map(|measured| Best::of(&measured.report, backend));
    let expected = match (&opened, &plan, &best, &disk) {
        (Some(opened), Some(plan), Some(best), Ok(disk)) => expected(opened, plan, best, disk),
        _ => None,
    };
    if args.common.json {
        let mut object = object(backend, &measured, skipped.as_deref(), best, &disk, expected);
        object["memory"] = report::held(budget);
        report::print_json(&object)?;
    } else {
        report::print(&text(&measured, skipped.as_deref(), &disk, expected))?;
    }
    Ok(0)
}

/// All backends of this machine, or the one that was asked for.
fn chosen(name: &str, backend: Backend) -> Vec<Backend> {
    if name == "auto" { Backend::available().collect() } else { vec![backend] }
}

/// What the kernels of so many threads did.
struct Measured {
    threads: usize,
    /// Weights they read (bytes).
    weights: usize,
    report: Report,
}

/// Weights that kernels can be measured with: what a budget and what is free leave besides the kernels' inputs
/// and outputs, and `most` at most (bytes).
pub(crate) fn weights_within(budget: u64, threads: usize, most: usize) -> usize {
    let free = available(0).map_or(u64::MAX, |a| a.bytes);
    let bytes = room(budget, threads).saturating_sub(BESIDE).min(free / 4);
    most.min(usize::try_from(bytes).unwrap_or(most))
}

/// Measures on so many threads, or says why not.
fn kernels_on(
    threads: usize,
    budget: u64,
    backends: &[Backend],
    time: Duration,
) -> Result<Result<Measured, String>, Failure> {
    // Who gives no time wants to see the fields, not the figures.
    let bytes = weights_within(budget, threads, if time.is_zero() { SMALL.bytes() } else { DATA });
    let trunk = if bytes < RELEASED[0].bytes() { SMALL } else { RELEASED[0] };
    if bytes < trunk.bytes() {
        let (bytes, needed) = (human(bytes as u64), human(trunk.bytes() as u64));
        return Ok(Err(format!("there is memory for {bytes} of weights, and a matrix of the trunk has {needed}")));
    }
    let exec = Rayon::new(threads).map_err(|e| internal(&e))?;
    let data = match weights(bytes, &exec) {
        Ok(data) => data,
        Err(error @ AllocError { .. }) => return Ok(Err(error.to_string())),
    };
    let mut cases = Vec::new();
    for shape in [trunk, RELEASED[3]] {
        for positions in POSITIONS {
            // The definition at several positions would take all the time.
            let fast = backends.iter().filter(|&&b| b != Backend::SCALAR || positions == 1);
            cases.extend(fast.map(|&backend| Case { shape, positions, backend }));
        }
    }
    let report = kernels::measure(&data, &exec, &cases, time).map_err(|e| internal(&e))?;
    Ok(Ok(Measured { threads, weights: bytes, report }))
}

fn internal(error: &dyn std::error::Error) -> Failure {
    Failure { code: fail::IO, message: error.to_string(), hint: None }
}

/// Bytes a second at all threads.
#[derive(Debug, Clone, Copy)]
struct Best {
    read: f64,
    bf16: f64,
    mxfp4: f64,
}

impl Best {
    fn of(report: &Report, backend: Backend) -> Self {
        let of = |coding| rate(report, backend, coding, 1).unwrap_or(0.0);
        Self { read: report.read.best, bf16: of(Coding::Bf16), mxfp4: of(Coding::Mxfp4) }
    }
}

/// Bytes of weights a second (one position), or products a second.
fn rate(report: &Report, backend: Backend, coding: Coding, positions: usize) -> Option<f64> {
    let this = |c: &Case| c.backend == backend && c.shape.coding == coding && c.positions == positions;
    let figure = report.figures.iter().find(|f| this(&f.case))?;
    Some(if positions == 1 { figure.bytes.best } else { figure.products().best })
}

/// What the disk did.
struct Disk {
    source: String,
    /// The packed trunk that sequential reads were of.
    pack: Option<String>,
    direct: bool,
    /// Memory there was for buffers (bytes).
    room: u64,
    /// The engine's own ways first, as in [`CASES`]; `None` where memory is too small for one.
    figures: Vec<(disk::Case, Option<disk::Figure>)>,
}

impl Disk {
    /// Reads the trunk as the engine does (bytes a second).
    fn sequential(&self) -> Option<f64> {
        self.rate(0)
    }

    /// Reads experts as the engine does (bytes a second).
    fn experts(&self) -> Option<f64> {
        self.rate(1)
    }

    fn rate(&self, case: usize) -> Option<f64> {
        self.figures.get(case)?.1.as_ref().map(disk::Figure::rate)
    }
}

/// Measures the disk, or says why not.
fn disk_of(
    opened: Option<&Opened<'_>>,
    mode: Mode,
    budget: u64,
    time: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<Result<Disk, String>, Failure> {
    let depth = CASES.iter().map(|case| case.depth).max().unwrap_or(1);
    let room = room(budget, depth);
    if room < Scratch::PART as u64 {
        return Ok(Err(format!("there is memory for {} of buffers", human(room))));
    }
    let Some(opened) = opened else {
        let here = Path::new(".");
        let (writing, reading) = (time.mul_f64(WRITING), time.mul_f64(1.0 - WRITING));
        let scratch = match Scratch::write(here, SCRATCH, writing, stop) {
            Ok(scratch) => scratch,
            Err(ScratchError::Stopped) => return Err(Error::Stopped.into()),
            Err(error) => return Ok(Err(error.to_string())),
        };
        let (files, disk) = scratch.files(mode);
        let read = |case, time| disk::measure(&files, &[scratch.len()], case, time, stop);
        let figures = cases(EXPERT, room, reading, read)?;
        let source = format!("a file of {} in the current folder", human(scratch.len()));
        return Ok(Ok(Disk { source, pack: None, direct: mode == Mode::Direct && !disk.fell_back(), room, figures }));
    };
    let expert = usize::try_from(Inventory::of(&opened.checkpoint).expert_bytes).unwrap_or(EXPERT);
    let figures = cases(expert, room, time, |case, time| read(opened, case, time))?;
    let source = opened.checkpoint.dir().display().to_string();
    let pack = opened.checkpoint.pack().map(|pack| pack.path().display().to_string());
    Ok(Ok(Disk { source, pack, direct: mode == Mode::Direct && !opened.disk().fell_back(), room, figures }))
}

/// Reads the files of a model as the engine does: the trunk from where a pass streams it, experts from the
/// shards.
pub(crate) fn read(opened: &Opened<'_>, case: disk::Case, time: Duration) -> Result<disk::Figure, Error> {
    let (checkpoint, stop) = (&opened.checkpoint, opened.stop());
    match case.pattern {
        disk::Pattern::Sequential => disk::streamed(checkpoint, case, time, stop),
        disk::Pattern::Random => {
            let lengths: Vec<u64> = checkpoint.index().shards().iter().map(|s| s.len).collect();
            disk::measure(&checkpoint.files(), &lengths, case, time, stop)
        }
    }
}

/// Measures all cases with experts of a size and with so many bytes of buffers.
fn cases(
    expert: usize,
    room: u64,
    time: Duration,
    read: impl Fn(disk::Case, Duration) -> Result<disk::Figure, Error>,
) -> Result<Vec<(disk::Case, Option<disk::Figure>)>, Failure> {
    let each = time / u32::try_from(CASES.len()).unwrap_or(1);
    let mut figures = Vec::new();
    for (i, mut case) in CASES.into_iter().enumerate() {
        if case.block == EXPERT {
            case.block = expert;
        }
        // The engine reads with what it has. The others are there to be compared, so they are what they say.
        let fitting = case.within(room).filter(|&fitting| i < 2 || fitting == case);
        let figure = fitting.map(|case| read(case, each)).transpose()?;
        // A model may be smaller than a block.
        figures.push((figure.map_or(case, |f| f.case), figure.filter(|f| f.bytes > 0)));
    }
    Ok(figures)
}

/// Seconds of a token, and the budget it is for; `None` if the disk was not read in the engine's ways.
fn expected(opened: &Opened<'_>, plan: &Plan, best: &Best, disk: &Disk) -> Option<(Expected, u64)> {
    let rates = Rates { sequential: disk.sequential()?, experts: disk.experts()?, bf16: best.bf16, mxfp4: best.mxfp4 };
    Some((expect(&opened.checkpoint, plan, &rates), plan.budget))
}

/// GB or billions a second, as far as anybody reads.
fn giga(rate: f64) -> f64 {
    (rate / 1e6).round() / 1e3
}

fn object(
    backend: Backend,
    measured: &[Measured],
    skipped: Option<&str>,
    best: Option<Best>,
    disk: &Result<Disk, String>,
    expected: Option<(Expected, u64)>,
) -> Value {
    let threads: Vec<Value> = measured
        .iter()
        .map(|Measured { threads, weights, report }| {
            let mut backends = Map::new();
            for (backend, peak) in &report.peaks {
                let of = |coding, positions| rate(report, *backend, coding, positions).map(giga);
                let value = json!({
                    "fma_gmac_s": giga(peak.best),
                    "bf16_gb_s": of(Coding::Bf16, 1),
                    "mxfp4_gb_s": of(Coding::Mxfp4, 1),
                    "bf16_8_positions_gmac_s": of(Coding::Bf16, 8),
                    "mxfp4_8_positions_gmac_s": of(Coding::Mxfp4, 8),
                });
                backends.insert(backend.name().to_owned(), value);
            }
            json!({
                "threads": threads, "weights_bytes": weights, "memory_read_gb_s": giga(report.read.best),
                "backends": backends,
            })
        })
        .collect();
    let disk = match disk {
        Err(reason) => json!({"skipped": reason}),
        Ok(disk) => json!({
            "source": disk.source,
            "packed_trunk": disk.pack,
            "direct": disk.direct,
            "sequential_gb_s": disk.sequential().map(giga),
            "experts_gb_s": disk.experts().map(giga),
            "cases": disk.figures.iter().map(|(case, figure)| json!({
                "pattern": case.pattern.name(),
                "block_bytes": case.block,
                "in_flight": case.depth,
                "gb_s": figure.map(|f| giga(f.rate())),
                "bytes": figure.map(|f| f.bytes),
            })).collect::<Vec<_>>(),
        }),
    };
    json!({
        "threads": measured.last().map(|measured| measured.threads),
        "backend": backend.name(),
        "memory_read_gb_s": best.map(|b| giga(b.read)),
        "kernels": {
            "bf16_gb_s": best.map(|b| giga(b.bf16)),
            "mxfp4_gb_s": best.map(|b| giga(b.mxfp4)),
            "threads": threads,
            "skipped": skipped,
        },
        "disk": disk,
        "expected": expected.map(|(e, budget)| json!({
            "budget_bytes": budget,
            "seconds_per_token": {"at_least": e.per_token().0, "at_most": e.per_token().1},
            "disk_seconds": {"at_least": e.disk_at_least, "at_most": e.disk_at_most},
            "compute_seconds": e.compute,
        })),
    })
}

fn text(
    measured: &[Measured],
    skipped: Option<&str>,
    disk: &Result<Disk, String>,
    expected: Option<(Expected, u64)>,
) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for Measured { threads, weights, report } in measured {
        let threads = report::count(*threads, "thread");
        let few = match *weights < DATA {
            true => format!(", {} of it: a cache may hold a part", human(*weights as u64)),
            false => String::new(),
        };
        let _ = writeln!(text, "{threads}: memory is read at {:.1} GB/s{few}", report.read.best / 1e9);
        for (backend, peak) in &report.peaks {
            let part = |coding| {
                let rate = rate(report, *backend, coding, 1).unwrap_or(0.0);
                format!("{:.1} GB/s ({:.2} of reading)", rate / 1e9, rate / report.read.best)
            };
            let _ = write!(text, "  {:<7} bf16 {}, mxfp4 {}", backend.name(), part(Coding::Bf16), part(Coding::Mxfp4));
            let eight = |coding| rate(report, *backend, coding, 8).map(|r| r / peak.best);
            if let (Some(bf16), Some(mxfp4)) = (eight(Coding::Bf16), eight(Coding::Mxfp4)) {
                let peak = peak.best / 1e9;
                let _ = write!(text, "; 8 positions {bf16:.2} and {mxfp4:.2} of {peak:.0} GMAC/s");
            }
            text.push('\n');
        }
    }
    if let Some(reason) = skipped {
        let _ = writeln!(text, "kernels were not measured: {reason}");
    }
    match disk {
        Err(reason) => {
            let _ = writeln!(text, "the disk was not measured: {reason}");
        }
        Ok(disk) => {
            let how = if disk.direct { "past the page cache" } else { "through the page cache" };
            let _ = writeln!(text, "disk, {how}, {}:", disk.source);
            if let Some(pack) = &disk.pack {
                let _ = writeln!(text, "  (the sequential reads are of {pack})");
            }
            for (i, (case, figure)) in disk.figures.iter().enumerate() {
                let what = if CASES[i].block == EXPERT { "experts of" } else { "" };
                let rate = match figure {
                    Some(figure) => format!("{:7.2} GB/s", figure.rate() / 1e9),
                    None if case.memory() > disk.room => "not measured: too little memory".to_owned(),
                    None => "not measured: the files are too short".to_owned(),
                };
                let (pattern, block, depth) = (case.pattern.name(), human(case.block as u64), case.depth);
                let _ = writeln!(text, "  {pattern:<10} {what:>10} {block:>9}, {depth:>2} in flight {rate}");
            }
        }
    }
    if let Some((e, budget)) = expected {
        let (least, most) = e.per_token();
        let _ = writeln!(
            text,
            "a token with {} of memory: {least:.2} s to {most:.2} s (disk {:.2} s to {:.2} s, arithmetic {:.2} s)",
            human(budget),
            e.disk_at_least,
            e.disk_at_most,
            e.compute,
        );
    }
    text.pop();
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::start::READERS;

    /// Other ways may be faster, or slower, and the engine does not read so.
    #[test]
    fn what_is_foretold_rests_on_the_engines_own_reads() {
        let figure = |i: u64, case: disk::Case| (case, Some(disk::Figure { case, bytes: 1000 + i, seconds: 1.0 }));
        let figures: Vec<_> = (0..).zip(CASES).map(|(i, case)| figure(i, case)).collect();
        let mut disk = Disk { source: String::new(), pack: None, direct: true, room: 0, figures };
        assert_eq!((disk.sequential(), disk.experts()), (Some(1000.0), Some(1001.0)));
        for (case, pattern) in CASES.iter().zip([disk::Pattern::Sequential, disk::Pattern::Random]) {
            assert_eq!((case.pattern, case.depth), (pattern, READERS));
        }
        disk.figures[1].1 = None;
        assert_eq!((disk.sequential(), disk.experts()), (Some(1000.0), None));
    }
}
