//! How fast the products with a matrix are, beside what memory and multipliers allow.
//!
//! ```text
//! cargo bench -p k3-platform
//! cargo bench -p k3-platform --bench kernels -- --check --seconds 60 --backend avx2
//! ```
//!
//! The measuring is that of `k3 bench`, `k3_platform::measure`: released shapes, weights that come from
//! memory, parts handed to threads as in the engine, outputs compared with the scalar kernels' first.
//! For one position a figure is GB/s of weights and its part of the read bandwidth; for several it is
//! GMAC/s and its part of the FMA peak. All are of one run, taken in turns, best and median.
//!
//! `--check` ends with 1 if a part is below its floor at all threads. Performance is asserted here and in
//! no test.
#![expect(clippy::cast_precision_loss, reason = "counts are printed to three digits")]

use k3_core::backend::Backend;
use k3_platform::exec::Rayon;
use k3_platform::measure::kernels::{Case, Coding, Figure, RELEASED, Report, measure};
use k3_platform::measure::weights;
use k3_platform::memory::default_threads;
use std::process::ExitCode;
use std::time::Duration;

/// Memory that the weights are read from: several times any cache (bytes).
const DATA: usize = 768 << 20;
/// Positions at once.
const POSITIONS: [usize; 4] = [1, 4, 8, 16];

/// The least part of the read bandwidth (one position) or of the FMA peak (eight), at all threads.
fn floor(figure: &Figure) -> Option<f64> {
    let Case { shape, positions, backend } = figure.case;
    match (backend.name(), shape.coding, positions) {
        ("avx2" | "avx512", Coding::Bf16, 1) => Some(0.85),
        ("avx2", Coding::Mxfp4, 1) => Some(0.25),
        ("avx512", Coding::Mxfp4, 1) => Some(0.60),
        ("avx2", Coding::Bf16, 8) => Some(0.65),
        ("avx2", Coding::Mxfp4, 8) => Some(0.40),
        ("avx512", Coding::Bf16, 8) => Some(0.75),
        ("avx512", Coding::Mxfp4, 8) => Some(0.60),
        _ => None,
    }
}

/// The part that a floor is of.
fn part(report: &Report, figure: &Figure) -> (f64, &'static str) {
    if figure.case.positions == 1 {
        (figure.bytes.best / report.read.best, "of reading")
    } else {
        (figure.products().best / report.peak(figure.case.backend), "of FMA peak")
    }
}

struct Options {
    check: bool,
    seconds: f64,
    backends: Vec<Backend>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { check: false, seconds: 40.0, backends: Backend::available().collect() };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            // What cargo itself passes.
            "--bench" => {}
            "--check" => options.check = true,
            "--seconds" => {
                let seconds = args.next().and_then(|s| s.parse().ok()).filter(|s: &f64| s.is_finite() && *s >= 0.0);
                options.seconds = seconds.ok_or("--seconds takes a number")?;
            }
            "--backend" => {
                let name = args.next().unwrap_or_default();
                let backend = Backend::by_name(&name).ok_or(format!("this machine has no kernels named {name:?}"))?;
                options.backends = vec![backend];
            }
            other => return Err(format!("{other}: known are --check, --seconds N and --backend NAME")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<bool, String> {
    let options = options()?;
    let all = default_threads();
    let mut threads = vec![1, all];
    threads.dedup();
    let mut passed = true;
    for &n in &threads {
        let exec = Rayon::new(n).map_err(|e| e.to_string())?;
        let data = weights(DATA, &exec).map_err(|e| e.to_string())?;
        let mut cases = Vec::new();
        for shape in RELEASED {
            for positions in POSITIONS {
                for &backend in &options.backends {
                    // The definition is for comparison; at several positions it would take all the time.
                    if backend != Backend::SCALAR || (positions == 1 && (shape == RELEASED[0] || shape == RELEASED[3]))
                    {
                        cases.push(Case { shape, positions, backend });
                    }
                }
            }
        }
        let time = Duration::from_secs_f64(options.seconds / threads.len() as f64);
        let report = measure(&data, &exec, &cases, time).map_err(|e| e.to_string())?;
        println!("{n} threads: reading {:.2} GB/s (median {:.2})", report.read.best / 1e9, report.read.median / 1e9);
        for (backend, peak) in &report.peaks {
            println!("  {} FMA peak {:.1} GMAC/s (median {:.1})", backend.name(), peak.best / 1e9, peak.median / 1e9);
        }
        for figure in &report.figures {
            let Case { shape, positions, backend } = figure.case;
            let (ratio, of) = part(&report, figure);
            let floor = floor(figure).filter(|_| n == all);
            let verdict = match floor {
                Some(floor) if ratio < floor => format!("  BELOW {floor:.2}"),
                Some(floor) => format!("  (floor {floor:.2})"),
                None => String::new(),
            };
            passed &= floor.is_none_or(|floor| ratio >= floor);
            println!(
                "  {:<6} {:>5}x{:<5} {:>2} positions {:<6} {:7.2} GB/s (median {:6.2}) {:7.2} GMAC/s  {ratio:.2} {of}{verdict}",
                shape.coding.name(),
                shape.rows,
                shape.cols,
                positions,
                backend.name(),
                figure.bytes.best / 1e9,
                figure.bytes.median / 1e9,
                figure.products().best / 1e9,
            );
        }
    }
    Ok(passed || !options.check)
}
