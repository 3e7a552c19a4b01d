//! `k3 cachesim`: how large an arena is worth its memory, from a recorded run.

use crate::args::Cachesim;
use crate::fail::{DAMAGED, Failure};
use crate::report;
use crate::text;
use k3_platform::policy::Policy;
use k3_platform::trace::Trace;
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// The curves, in the order of the columns.
const NAMES: [&str; 3] = ["lru", "frequency", "optimum"];

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn cachesim(args: &Cachesim) -> Result<u8, Failure> {
    let path = args.file.display();
    let bytes = std::fs::read(&args.file)
        .map_err(|e| Failure::usage(format!("{path}: {e}"), "name a trace that k3 run --trace has written"))?;
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
    if args.svg.as_ref().is_some_and(|svg| text::same_file(svg, &args.file)) {
        return Err(Failure::usage("--svg names the trace itself", "name another file"));
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
    if let Some(svg) = &args.svg {
        std::fs::write(svg, plot(&rows)).map_err(|e| Failure::output(svg, &e))?;
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

/// The curves as a picture: slots to the right, hit rate upwards.
fn plot(rows: &[(usize, [f64; 3])]) -> String {
    const COLOURS: [&str; 3] = ["#888888", "#1f6fb4", "#c0392b"];
    let most = rows.iter().map(|r| r.0).max().unwrap_or(1).max(1);
    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    let x = |slots: usize| 60.0 + 520.0 * slots as f64 / most as f64;
    let y = |rate: f64| 340.0 - 300.0 * rate;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"640\" height=\"400\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"640\" height=\"400\" fill=\"white\"/>\n",
    );
    for tenth in (0..=10).step_by(2) {
        let at = y(f64::from(tenth) / 10.0);
        let _ = writeln!(svg, "<line x1=\"60\" x2=\"580\" y1=\"{at}\" y2=\"{at}\" stroke=\"#dddddd\"/>");
        let _ = writeln!(svg, "<text x=\"52\" y=\"{}\" text-anchor=\"end\">{} %</text>", at + 4.0, tenth * 10);
    }
    for (i, (name, colour)) in NAMES.iter().zip(COLOURS).enumerate() {
        let points: Vec<String> = rows.iter().map(|(s, r)| format!("{:.1},{:.1}", x(*s), y(r[i]))).collect();
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        let _ = writeln!(svg, "<text x=\"{}\" y=\"24\" fill=\"{colour}\">{name}</text>", 70 + 100 * i);
    }
    for (slots, _) in rows {
        let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"358\" text-anchor=\"middle\">{slots}</text>", x(*slots));
    }
    svg.push_str("<text x=\"320\" y=\"384\" text-anchor=\"middle\">experts in memory</text>\n</svg>\n");
    svg
}
