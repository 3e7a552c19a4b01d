//! `k3 inspect`: what the bytes of a checkpoint are.

use crate::args::Inspect as Args;
use crate::fail::{BUDGET, Failure};
use crate::report::{self, grouped};
use crate::start::{Opened, Options, Wanted};
use crate::trunk;
use k3_core::checkpoint::{Class, Sum, layer_bytes};
use k3_core::config::{LayerKind, MlpKind};
use k3_platform::inventory::{Inventory, Kind};
use k3_platform::plan::Plan;
use k3_platform::units::human;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn inspect(args: &Args) -> Result<u8, Failure> {
    let located = Options::new(&args.common)?.locate()?;
    if located.dir.is_file() {
        return trunk::show(&located.dir, &*located.source, args.common.json);
    }
    let opened = located.open()?;
    let inventory = Inventory::of(&opened.checkpoint);
    let context = args.planned.context.max(1);
    // A budget that is too small for a run says nothing about the checkpoint.
    let plan = match opened.plan(Wanted { context, prompt: context, ..Wanted::default() }) {
        Ok(plan) => Ok(plan),
        Err(failure) if failure.code == BUDGET => Err(failure.message),
        Err(failure) => return Err(failure),
    };
    if args.common.json {
        report::print_json(&object(&opened, &inventory, plan.as_ref()))?;
    } else {
        report::print(text(&opened, &inventory, plan.as_ref()).trim_end())?;
    }
    Ok(0)
}

/// Where the bytes are while a plan runs.
struct Places {
    /// Read once and kept (bytes).
    pinned: u64,
    /// Experts that may stay (bytes).
    arena: u64,
    /// Read for each token, whatever was chosen (bytes).
    streamed: u64,
    /// Experts read for each token at most (bytes).
    chosen: u64,
    /// One row of the embedding (bytes).
    row: u64,
    /// Never read (bytes).
    never: u64,
}

impl Places {
    fn of(opened: &Opened<'_>, inventory: &Inventory, plan: &Plan) -> Self {
        let config = opened.checkpoint.config();
        let layers = config
            .layers()
            .zip(&plan.keeps)
            .filter(|(_, keeps)| **keeps)
            .map(|(l, _)| layer_bytes(config, l))
            .sum::<u64>();
        Self {
            pinned: layers + if plan.head_pinned() { inventory.head.bytes } else { 0 },
            arena: (plan.arena as u64).saturating_mul(inventory.expert_bytes),
            streamed: plan.trunk_read,
            chosen: plan.experts_read,
            row: config.hidden_size as u64 * 2,
            never: inventory.never().bytes,
        }
    }
}

fn attention(kind: &Kind) -> &'static str {
    match kind.attention {
        LayerKind::Kda => "kda",
        LayerKind::Mla => "mla",
    }
}

fn mlp(kind: &Kind) -> &'static str {
    match kind.mlp {
        MlpKind::Dense => "dense",
        MlpKind::Moe => "moe",
    }
}

/// The size of the whole checkpoint if every weight were bf16 (bytes).
fn as_bf16(inventory: &Inventory) -> u64 {
    inventory.tensors().parameters.saturating_mul(2)
}

fn object(opened: &Opened<'_>, inventory: &Inventory, plan: Result<&Plan, &String>) -> Value {
    let sum = |s: Sum| json!({"tensors": s.tensors, "parameters": s.parameters, "bytes": s.bytes});
    let key = |class: Class| class.name().to_lowercase().replace(' ', "_");
    let classes: serde_json::Map<String, Value> =
        Class::ALL.into_iter().map(|c| (key(c), sum(inventory.class(c)))).collect();
    let other: serde_json::Map<String, Value> = inventory.other.iter().map(|(n, s)| (n.clone(), sum(*s))).collect();
    let kinds = inventory.kinds.iter().map(|k| {
        json!({
            "attention": attention(k), "mlp": mlp(k), "layers": k.layers, "trunk": sum(k.trunk), "routed": sum(k.routed),
        })
    });
    let plan = match plan {
        Ok(plan) => {
            let p = Places::of(opened, inventory, plan);
            json!({
                "memory": report::memory(plan),
                "resident": {"pinned_bytes": p.pinned, "arena_bytes": p.arena},
                "read_per_token": {
                    "trunk_bytes": p.streamed, "experts_bytes_at_most": p.chosen, "embedding_bytes": p.row,
                },
                "never_read_bytes": p.never,
            })
        }
        Err(refused) => json!({"refused": refused}),
    };
    json!({
        "model": opened.checkpoint.dir().display().to_string(),
        "shards": opened.checkpoint.index().shards().len(),
        "classes": classes,
        "other": other,
        "tensors": sum(inventory.tensors()),
        "always_active": sum(inventory.always_active()),
        "experts": {"count": inventory.experts, "bytes_each": inventory.expert_bytes},
        "layers": kinds.collect::<Vec<_>>(),
        "header_bytes": inventory.headers,
        "unnamed_bytes": inventory.gaps,
        "accounted_bytes": inventory.accounted(),
        "file_bytes": inventory.files,
        "reconciled": inventory.accounted() == inventory.files,
        "reductions": {
            "all_bf16_bytes": as_bf16(inventory),
            "shipped_bytes": inventory.files,
            "always_active_bytes": inventory.always_active().bytes,
            "plan_bytes": plan["memory"]["planned_bytes"],
        },
        "plan": plan,
    })
}

fn text(opened: &Opened<'_>, inventory: &Inventory, plan: Result<&Plan, &String>) -> String {
    let mut out = String::new();
    let shards = opened.checkpoint.index().shards().len();
    let _ = writeln!(out, "{}: {shards} shards", opened.checkpoint.dir().display());
    let _ = writeln!(out, "\n{:<22}{:>9}{:>20}{:>20}", "", "tensors", "parameters", "bytes");
    let mut row = |name: &str, s: Sum| {
        let (tensors, parameters, bytes) = (grouped(s.tensors), grouped(s.parameters), grouped(s.bytes));
        let _ = writeln!(out, "{name:<22}{tensors:>9}{parameters:>20}{bytes:>20}");
    };
    for class in Class::ALL {
        row(class.name(), inventory.class(class));
    }
    for (name, sum) in &inventory.other {
        row(&format!("other ({name})"), *sum);
    }
    row("all tensors", inventory.tensors());
    row("always active", inventory.always_active());
    let _ = writeln!(out, "{:<31}{:>40}", "headers", grouped(inventory.headers));
    if inventory.gaps > 0 {
        let _ = writeln!(out, "{:<31}{:>40}", "of no tensor", grouped(inventory.gaps));
    }
    let equal = if inventory.accounted() == inventory.files {
        "the sum of tensors and headers, to the byte"
    } else {
        "NOT the sum of tensors and headers"
    };
    let _ = writeln!(out, "{:<31}{:>40}  {equal}", "files", grouped(inventory.files));
    let _ = writeln!(out, "{} experts of {} bytes", grouped(inventory.experts), grouped(inventory.expert_bytes));

    let _ = writeln!(out, "\n{:<22}{:>9}{:>20}{:>20}", "layers", "number", "trunk of each", "experts of each");
    for kind in &inventory.kinds {
        let name = format!("{} and {}", attention(kind).to_uppercase(), mlp(kind));
        let (trunk, routed) = (kind.trunk.bytes / kind.layers, kind.routed.bytes / kind.layers);
        let _ = writeln!(out, "{name:<22}{:>9}{:>20}{:>20}", kind.layers, grouped(trunk), grouped(routed));
    }

    let _ = writeln!(out, "\nfrom all to little");
    let mut size = |name: &str, bytes: u64, note: &str| {
        let _ = writeln!(out, "  {name:<20}{:>12}  {note}", human(bytes));
    };
    size("all of it in bf16", as_bf16(inventory), "");
    size("as shipped", inventory.files, "routed experts in 4 bits, with a scale for each 32");
    size("always active", inventory.always_active().bytes, "all but the routed experts");
    match plan {
        Ok(plan) => {
            let p = Places::of(opened, inventory, plan);
            size("this plan", plan.ledger.total(), &format!("--memory {}", human(plan.budget)));
            let _ = writeln!(out, "\nby this plan");
            let mut line = |name: &str, bytes: u64, note: String| {
                let _ = writeln!(out, "  {name:<20}{:>12}  {note}", human(bytes));
            };
            let head = if plan.head_pinned() { " and the head" } else { "" };
            line("stays in memory", p.pinned, format!("{} layers{head}", plan.pinned()));
            line("may stay", p.arena, format!("{} experts", plan.arena));
            line("read for each token", p.streamed, "the other layers, the head if it is not pinned".to_owned());
            line("", p.chosen, "chosen experts that are not in memory, at most".to_owned());
            line("", p.row, "a row of the embedding".to_owned());
            line("never read", p.never, "what is not of the text model".to_owned());
        }
        Err(refused) => {
            let first = refused.lines().next().unwrap_or_default();
            let _ = writeln!(out, "  {:<20}{:>12}  {}", "a plan", "-", first.trim_end_matches(':'));
        }
    }
    out
}
