//! `k3 bench`: what the machine can do, and what a token would take on it.

use crate::args::{Bench as Args, Io};
use crate::fail::{self, Failure};
use crate::report;
use crate::signals;
use crate::start::{Opened, Options, Wanted};
use k3_core::backend::Backend;
use k3_platform::aligned::AllocError;
use k3_platform::error::Error;
use k3_platform::exec::Rayon;
use k3_platform::io::{FileSet, Mode};
use k3_platform::measure::disk::{self, EXPERT, Scratch, ScratchError};
use k3_platform::measure::kernels::{self, Case, Coding, RELEASED, Report};
use k3_platform::measure::token::{Expected, Rates, expect};
use k3_platform::measure::weights;
use k3_platform::memory::{available, default_threads};
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
/// Memory the kernels read weights from: several times any cache, if a quarter of what is free holds it
/// (bytes).
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
    // A model that cannot be opened is told before anything is measured.
    let opened = if args.common.model.is_some() { Some(options.open()?) } else { None };
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
        match kernels_on(n, &backends, Duration::from_secs_f64(share))? {
            Ok(report) => measured.push((n, report)),
            Err(reason) => skipped = Some(reason),
        }
        if signals::stopped() {
            return Ok(signals::code());
        }
    }
    let mode = if args.common.io == Io::Direct { Mode::Direct } else { Mode::Buffered };
    let disk = match disk_of(opened.as_ref(), mode, Duration::from_secs_f64(seconds * (1.0 - KERNELS)), &stop) {
        Err(Failure { .. }) if signals::stopped() => return Ok(signals::code()),
        other => other?,
    };
    let best = measured.last().map(|(_, report)| Best::of(report, backend));
    let expected = match (&opened, &best, &disk) {
        (Some(opened), Some(best), Ok(disk)) => Some(expected(opened, best, disk)?),
        _ => None,
    };
    if args.common.json {
        report::print_json(&object(backend, &measured, skipped.as_deref(), best, &disk, expected))?;
    } else {
        report::print(&text(&measured, skipped.as_deref(), &disk, expected))?;
    }
    Ok(0)
}

/// All backends of this machine, or the one that was asked for.
fn chosen(name: &str, backend: Backend) -> Vec<Backend> {
    if name == "auto" { Backend::available().collect() } else { vec![backend] }
}

/// Measures on so many threads, or says why not.
fn kernels_on(threads: usize, backends: &[Backend], time: Duration) -> Result<Result<Report, String>, Failure> {
    let free = available(0).map_or(u64::MAX, |a| a.bytes);
    // Who gives no time wants to see the fields, not the figures.
    let (trunk, wanted) = if time.is_zero() { (RELEASED[2], RELEASED[2].bytes()) } else { (RELEASED[0], DATA) };
    let bytes = wanted.min(usize::try_from(free / 4).unwrap_or(wanted));
    if bytes < trunk.bytes() {
        return Ok(Err(format!("only {} of memory are free", human(free))));
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
    kernels::measure(&data, &exec, &cases, time).map(Ok).map_err(|e| internal(&e))
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
    direct: bool,
    figures: Vec<disk::Figure>,
}

impl Disk {
    /// The best of a pattern (bytes a second).
    fn best(&self, pattern: disk::Pattern) -> f64 {
        let these = self.figures.iter().filter(|f| f.case.pattern == pattern);
        these.map(disk::Figure::rate).fold(0.0, f64::max)
    }
}

/// Measures the disk, or says why not.
fn disk_of(
    opened: Option<&Opened<'_>>,
    mode: Mode,
    time: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<Result<Disk, String>, Failure> {
    let Some(opened) = opened else {
        let here = Path::new(".");
        let (writing, reading) = (time.mul_f64(WRITING), time.mul_f64(1.0 - WRITING));
        let scratch = match Scratch::write(here, SCRATCH, writing, stop) {
            Ok(scratch) => scratch,
            Err(ScratchError::Stopped) => return Err(Error::Stopped.into()),
            Err(error) => return Ok(Err(error.to_string())),
        };
        let (files, disk) = scratch.files(mode);
        let figures = cases(&files, &[scratch.len()], reading, stop)?;
        let source = format!("a file of {} in the current folder", human(scratch.len()));
        return Ok(Ok(Disk { source, direct: mode == Mode::Direct && !disk.fell_back(), figures }));
    };
    let lengths: Vec<u64> = opened.checkpoint.index().shards().iter().map(|s| s.len).collect();
    let figures = cases(&opened.checkpoint.files(), &lengths, time, stop)?;
    let source = opened.checkpoint.dir().display().to_string();
    Ok(Ok(Disk { source, direct: mode == Mode::Direct && !opened.disk().fell_back(), figures }))
}

fn cases(
    files: &FileSet,
    lengths: &[u64],
    time: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<Vec<disk::Figure>, Failure> {
    let each = time / u32::try_from(disk::CASES.len()).unwrap_or(1);
    let figure = |&case| Ok(disk::measure(files, lengths, case, each, stop)?);
    disk::CASES.iter().map(figure).collect()
}

fn expected(opened: &Opened<'_>, best: &Best, disk: &Disk) -> Result<(Expected, u64), Failure> {
    let plan = opened.plan(Wanted { context: CONTEXT, prompt: CONTEXT, ..Wanted::default() })?;
    let rates = Rates {
        sequential: disk.best(disk::Pattern::Sequential),
        experts: disk.best(disk::Pattern::Random),
        bf16: best.bf16,
        mxfp4: best.mxfp4,
    };
    Ok((expect(&opened.checkpoint, &plan, &rates), plan.budget))
}

/// GB or billions a second, as far as anybody reads.
fn giga(rate: f64) -> f64 {
    (rate / 1e6).round() / 1e3
}

fn object(
    backend: Backend,
    measured: &[(usize, Report)],
    skipped: Option<&str>,
    best: Option<Best>,
    disk: &Result<Disk, String>,
    expected: Option<(Expected, u64)>,
) -> Value {
    let threads: Vec<Value> = measured
        .iter()
        .map(|(n, report)| {
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
            json!({"threads": n, "memory_read_gb_s": giga(report.read.best), "backends": backends})
        })
        .collect();
    let disk = match disk {
        Err(reason) => json!({"skipped": reason}),
        Ok(disk) => json!({
            "source": disk.source,
            "direct": disk.direct,
            "sequential_gb_s": giga(disk.best(disk::Pattern::Sequential)),
            "experts_gb_s": giga(disk.best(disk::Pattern::Random)),
            "cases": disk.figures.iter().map(|f| json!({
                "pattern": f.case.pattern.name(),
                "block_bytes": f.case.block,
                "in_flight": f.case.depth,
                "gb_s": giga(f.rate()),
                "bytes": f.bytes,
            })).collect::<Vec<_>>(),
        }),
    };
    json!({
        "threads": measured.last().map(|(n, _)| n),
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
    measured: &[(usize, Report)],
    skipped: Option<&str>,
    disk: &Result<Disk, String>,
    expected: Option<(Expected, u64)>,
) -> String {
    use std::fmt::Write as _;
    let mut text = String::new();
    for (n, report) in measured {
        let plural = if *n == 1 { "thread" } else { "threads" };
        let _ = writeln!(text, "{n} {plural}: memory is read at {:.1} GB/s", report.read.best / 1e9);
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
            for f in &disk.figures {
                let what = if f.case.block == EXPERT { "experts of".to_owned() } else { String::new() };
                let (pattern, block, depth) = (f.case.pattern.name(), human(f.case.block as u64), f.case.depth);
                let _ = writeln!(
                    text,
                    "  {pattern:<10} {what:>10} {block:>9}, {depth:>2} in flight {:7.2} GB/s",
                    f.rate() / 1e9
                );
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
