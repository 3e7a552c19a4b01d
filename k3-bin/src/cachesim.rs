//! `k3 cachesim`: how large an arena is worth its memory, from a recorded run.

use crate::args::Cachesim;
use crate::fail::{DAMAGED, Failure};
use crate::output::{self, Output};
use crate::report;
use crate::svg;
use k3_platform::memory::available;
use k3_platform::policy::Policy;
use k3_platform::trace::Trace;
use k3_platform::units::human;
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::Path;

/// The curves, in the order of the columns.
const NAMES: [&str; 3] = ["lru", "frequency", "optimum"];

/// A trace may have this part of the memory that is free: what is made of it takes about twice its length.
const SHARE: u64 = 4;

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn cachesim(args: &Cachesim) -> Result<u8, Failure> {
    let path = args.file.display();
    output::check(&[("--svg", args.svg.as_ref())], &[("the trace", Some(&args.file))], None)?;
    let picture = Output::optional(args.svg.as_ref())?;
    let bytes = read(&args.file)?;
    let trace = match args.pairs {
        Some(prompt) => Trace::parse_pairs(&bytes, prompt.get(), args.chosen.get()),
        None => Trace::parse(&bytes),
    };
    let trace = trace.map_err(|e| Failure { code: DAMAGED, message: format!("{path}: {e}"), hint: None })?;
    drop(bytes);
    if trace.requests.is_empty() {
        let message = format!("{path}: the trace has no requests");
        return Err(Failure { code: DAMAGED, message, hint: Some("record one with k3 run --trace".to_owned()) });
    }
    let distinct = trace.requests.iter().map(|r| r.name).collect::<BTreeSet<_>>().len();
    let slots = if args.slots.is_empty() {
        (1..=10).map(|i| (distinct * i).div_ceil(10)).collect()
    } else {
        args.slots.clone()
    };
    let rows: Vec<(usize, [f64; 3])> = slots
        .into_iter()
        .map(|slots| {
            let [lru, frequency] = [Policy::Lru, Policy::Frequency].map(|policy| trace.replay(policy, slots).rate());
            (slots, [lru, frequency, trace.belady(slots).rate()])
        })
        .collect();
    if let Some((path, mut out)) = args.svg.as_ref().zip(picture) {
        let written = out.write_all(plot(&rows).as_bytes()).and_then(|()| out.finish());
        written.map_err(|e| Failure::output(path, &e))?;
    }
    let requests = trace.requests.iter().filter(|r| r.step > 0).count();
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|(slots, r)| json!({"slots": slots, NAMES[0]: r[0], NAMES[1]: r[1], NAMES[2]: r[2]}))
            .collect();
        report::print_json(&json!({"requests": requests, "distinct_experts": distinct, "hit_rates": rows}))?;
        return Ok(0);
    }
    let mut table =
        format!("{requests} requests after the prompt, {distinct} different experts; share found in memory\n");
    let _ = write!(table, "{:>8} {:>10} {:>10} {:>10}", "slots", NAMES[0], NAMES[1], NAMES[2]);
    for (slots, rates) in &rows {
        let _ = write!(table, "\n{slots:>8} {:>10.3} {:>10.3} {:>10.3}", rates[0], rates[1], rates[2]);
    }
    report::print(&table)?;
    Ok(0)
}

/// The bytes of a trace: no more than there is room for, whatever the file is.
fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let hint = "name a trace that k3 run --trace has written";
    let failed = |e: std::io::Error| Failure::usage(format!("{}: {e}", path.display()), hint);
    let most = available(0).map_or(u64::MAX - 1, |free| free.bytes / SHARE);
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        let message = format!("{}: more than {}, a quarter of the memory that is free", path.display(), human(most));
        return Err(Failure::usage(message, hint));
    }
    Ok(bytes)
}

/// The curves as a picture: slots to the right, hit rate upwards.
#[expect(clippy::cast_precision_loss, reason = "a picture")]
fn plot(rows: &[(usize, [f64; 3])]) -> String {
    let most = rows.iter().map(|r| r.0).max().unwrap_or(1).max(1) as f64;
    let place = |slots: usize| slots as f64 / most;
    let curve = |(i, name)| svg::Curve { name, points: rows.iter().map(|(s, r)| (place(*s), r[i])).collect() };
    svg::draw(&[svg::Chart {
        axis: "experts in memory",
        ticks: rows.iter().map(|(slots, _)| (place(*slots), slots.to_string())).collect(),
        unit: svg::Unit::Share,
        curves: NAMES.into_iter().enumerate().map(curve).collect(),
    }])
}
