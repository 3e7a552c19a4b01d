//! `k3 synth`: a checkpoint of placeholders.

use crate::args::Synth as Args;
use crate::fail::Failure;
use k3_core::view::LayerIndex;
use k3_platform::memory::default_threads;
use k3_platform::synth::{Fill, Synth, write};
use k3_platform::units::human;
use serde_json::json;
use std::io::Write as _;
use std::time::Instant;

/// Runs the command.
pub(crate) fn run(args: &Args) -> Result<u8, Failure> {
    let started = Instant::now();
    let config = match &args.config {
        Some(path) => {
            let failed = |e| Failure::usage(format!("{}: {e}", path.display()), "--config takes a config.json");
            Some(std::fs::read(path).map_err(failed)?)
        }
        None => None,
    };
    let mut synth = Synth { fill: fill(args)?, seed: args.seed, threads: default_threads(), ..Synth::default() };
    if let Some(config) = &config {
        synth.config = config;
    }
    let written = write(&args.dir, &synth)?;
    let seconds = started.elapsed().as_secs_f64();
    let line = if args.json {
        json!({
            "model": args.dir.display().to_string(),
            "shards": written.shards,
            "tensors": written.tensors,
            "bytes": written.bytes,
            "header_bytes": written.headers,
            "filled_bytes": written.filled,
            "seed": args.seed,
            "seconds": seconds,
        })
        .to_string()
    } else {
        format!(
            "{}: {} tensors in {} shards, {} ({} of them weights, the rest holes) in {seconds:.2} s",
            args.dir.display(),
            written.tensors,
            written.shards,
            human(written.bytes),
            human(written.filled),
        )
    };
    match writeln!(std::io::stdout().lock(), "{line}") {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::output(std::path::Path::new("standard output"), &e))
        }
        _ => Ok(0),
    }
}

/// Layers as people write them: `0`, `L0`, or `head`.
fn fill(args: &Args) -> Result<Fill, Failure> {
    if args.fill_all {
        return Ok(Fill::Everything);
    }
    let (mut layers, mut head) = (std::collections::BTreeSet::new(), false);
    for text in &args.fill {
        if text == "head" {
            head = true;
            continue;
        }
        let number = text.strip_prefix(['L', 'l']).unwrap_or(text).parse().map_err(|_| {
            Failure::usage(format!("--fill {text}: no layer"), "write numbers of layers from 0 on, and \"head\"")
        })?;
        layers.insert(LayerIndex(number));
    }
    Ok(if args.fill.is_empty() { Fill::Nothing } else { Fill::Some { layers, head } })
}
