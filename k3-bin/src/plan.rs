//! `k3 plan`: the ledger of a run that does not take place, and what a token would cost.

use crate::args::Plan as Args;
use crate::fail::Failure;
use crate::report;
use crate::start::{Opened, Options, Wanted};
use crate::text;
use k3_platform::measure::disk;
use k3_platform::pack;
use k3_platform::plan::Plan;
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
    let context = args.planned.context.max(1);
    let wanted = Wanted { context, prompt: context, tokenizer, ..Wanted::default() };
    let plan = opened.plan(wanted)?;
    let raw = opened.plan_of_shards(wanted);
    let measured = match args.disk {
        Some(_) => None,
        None => Some(disk::streamed(&opened.checkpoint, disk::CASES[0], MEASURE, opened.stop())?.rate()),
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
            "trunk": trunk_json(&opened, &plan, raw.as_ref()),
            "read_per_token": {"trunk_bytes": trunk, "experts_bytes_at_most": experts},
            "disk": {"bytes_per_second": rate, "measured": measured.is_some()},
            "seconds_per_token": {"at_least": seconds(trunk), "at_most": seconds(trunk + experts)},
        }))?;
    } else {
        let source = if measured.is_some() { "measured" } else { "given" };
        report::print(&format!(
            "memory plan for {} ({} threads, {} kernels):\n{}\n\
             a generated token reads {} of trunk and at most {} of experts\n\
             {}\
             at {:.2} GB/s ({source}) the disk takes {:.3} s to {:.3} s for a token",
            human(plan.budget),
            plan.extent.width,
            opened.backend().name(),
            plan.ledger,
            human(trunk),
            human(experts),
            trunk_line(&opened, &plan, raw.as_ref()),
            rate / 1e9,
            seconds(trunk),
            seconds(trunk + experts),
        ))?;
    }
    Ok(0)
}

/// Bytes of a pack that is not there, and of what a token would read of it with the memory that now holds
/// pinned layers: about, for pinned are whole layers.
fn would_be(opened: &Opened<'_>, plan: &Plan) -> (u64, u64) {
    let nominal = pack::nominal_sizes(&opened.checkpoint, true);
    (nominal.file, nominal.read.saturating_sub(plan.ledger.bytes_of("pinned trunk")))
}

/// The packed trunk beside the raw one, in a line.
fn trunk_line(opened: &Opened<'_>, plan: &Plan, raw: Option<&Plan>) -> String {
    let Some(pack) = opened.checkpoint.pack() else {
        let (file, read) = would_be(opened, plan);
        let now = human(plan.trunk_read);
        return if read < plan.trunk_read {
            let read = human(read);
            format!("a packed trunk (k3 pack, {} on disk) would make that about {read} instead of {now}\n", human(file))
        } else {
            String::new()
        };
    };
    let Some(raw) = raw else { return String::new() };
    let show = |plan: &Plan| format!("{} layers pinned, {} read", plan.pinned(), human(plan.trunk_read));
    format!("trunk from {}: {}; from the shards: {}\n", pack.path().display(), show(plan), show(raw))
}

/// The same for programs.
fn trunk_json(opened: &Opened<'_>, plan: &Plan, raw: Option<&Plan>) -> serde_json::Value {
    let show = |plan: &Plan| json!({"pinned_layers": plan.pinned(), "head_pinned": plan.head_pinned(), "read_bytes": plan.trunk_read});
    let Some(pack) = opened.checkpoint.pack() else {
        let (file, read) = would_be(opened, plan);
        let would_be = json!({"bytes": file, "read_bytes_about": read});
        return json!({"pack": null, "would_be": would_be, "shards": show(plan)});
    };
    json!({
        "pack": {
            "file": pack.path().display().to_string(),
            "bytes": pack.file_len(),
            "raw_bytes": pack.raw_bytes(),
            "form": if pack.is_coded() { "lossless" } else { "raw" },
            "plan": show(plan),
        },
        "shards": raw.map(show),
    })
}
