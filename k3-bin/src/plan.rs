//! `k3 plan`: the ledger of a run that does not take place, and what a token would cost.

use crate::args::Plan as Args;
use crate::fail::Failure;
use crate::report;
use crate::start::{Options, Wanted};
use crate::text;
use k3_platform::speed;
use k3_platform::units::human;
use k3_platform::vocabulary::VocabularyFiles;
use serde_json::json;
use std::time::Duration;

/// How long the disk is measured.
const MEASURE: Duration = Duration::from_secs(1);

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn plan(args: &Args) -> Result<u8, Failure> {
    // From a punched card to more than all disks there are: what is outside gives no numbers of seconds.
    if let Some(disk) = args.disk.filter(|d| !(1e-9..=1e9).contains(d)) {
        return Err(Failure::usage(format!("--disk {disk}: not a speed"), "write GB a second, such as 3.5"));
    }
    let opened = Options::new(&args.common)?.open()?;
    let mut files = text::vocabulary(&opened.checkpoint, false)?;
    let tokenizer = files.as_mut().map(VocabularyFiles::load).transpose()?.map_or(0, |v| v.bytes());
    let context = args.context.max(1);
    let plan = opened.plan(Wanted { context, prompt: context, tokenizer, ..Wanted::default() })?;
    let measured = match args.disk {
        Some(_) => None,
        None => Some(speed::sequential(&opened.checkpoint, MEASURE)?),
    };
    let rate = args.disk.map(|gb| gb * 1e9).or(measured).unwrap_or(0.0);
    // Only the disk is counted: arithmetic goes on while it reads, and small budgets wait for the disk.
    #[expect(clippy::cast_precision_loss, reason = "a prediction")]
    let seconds = |bytes: u64| if rate > 0.0 { bytes as f64 / rate } else { f64::INFINITY };
    let (trunk, experts) = (plan.trunk_read, plan.experts_read);
    if args.common.json {
        let ledger: Vec<_> =
            plan.ledger.entries.iter().map(|e| json!({"name": e.name, "bytes": e.bytes, "note": e.note})).collect();
        report::print_json(&json!({
            "model": opened.checkpoint.dir().display().to_string(),
            "memory": report::memory(&plan),
            "ledger": ledger,
            "ring": {"slots": plan.ring, "slot_bytes": plan.slot},
            "read_per_token": {"trunk_bytes": trunk, "experts_bytes_at_most": experts},
            "disk": {"bytes_per_second": rate, "measured": measured.is_some()},
            "seconds_per_token": {"at_least": seconds(trunk), "at_most": seconds(trunk + experts)},
        }))?;
    } else {
        let source = if measured.is_some() { "measured" } else { "given" };
        report::print(&format!(
            "memory plan for {} ({} threads, {} kernels):\n{}\n\
             a generated token reads {} of trunk and at most {} of experts\n\
             at {:.2} GB/s ({source}) the disk takes {:.3} s to {:.3} s for a token",
            human(plan.budget),
            plan.extent.width,
            opened.backend().name(),
            plan.ledger,
            human(trunk),
            human(experts),
            rate / 1e9,
            seconds(trunk),
            seconds(trunk + experts),
        ))?;
    }
    Ok(0)
}
