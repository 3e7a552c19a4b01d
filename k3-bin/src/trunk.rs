//! `k3 inspect FILE`: the table of a packed trunk.

use crate::fail::Failure;
use crate::report;
use k3_platform::io::Source;
use k3_platform::pack::{Pack, TensorRecord};
use k3_platform::units::human;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;

/// Prints the table of a file. The answer is the exit code of what is not a failure.
pub(crate) fn show(path: &Path, source: &dyn Source, json: bool) -> Result<u8, Failure> {
    let pack = Pack::open(path, source)?;
    if json { as_json(path, &pack) } else { table(path, &pack) }?;
    Ok(0)
}

fn hex(digest: &[u8; 16]) -> String {
    digest.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Where a tensor's first byte lies in the file.
fn offset(pack: &Pack, t: &TensorRecord) -> u64 {
    let segment = pack.segments().get(pack.segment_of(t.first_piece));
    segment.map_or(0, |s| s.offset + pack.pieces(t).first().map_or(0, |p| u64::from(p.at)))
}

fn coded(pack: &Pack, t: &TensorRecord) -> usize {
    pack.pieces(t).iter().filter(|p| p.coded).count()
}

#[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn as_json(path: &Path, pack: &Pack) -> Result<(), Failure> {
    let tensors = pack.tensors().iter().map(|t| {
        json!({
            "name": t.tensor.to_string(),
            "dtype": t.dtype.name(),
            "rows": t.rows,
            "cols": t.cols,
            "offset": offset(pack, t),
            "stored_bytes": t.stored,
            "raw_bytes": t.raw(),
            "pieces": t.pieces,
            "coded_pieces": coded(pack, t),
        })
    });
    let groups = pack.groups().iter().enumerate().map(|(i, g)| {
        let segments = pack.segments().get(g.first_segment..g.first_segment + g.segments).unwrap_or_default();
        let layer = i.checked_sub(1).filter(|l| *l < pack.layers() as usize);
        json!({
            "layer": layer,
            "first_segment": g.first_segment,
            "segments": g.segments,
            "bytes": segments.iter().map(|s| u64::from(s.len)).sum::<u64>(),
        })
    });
    let digests = pack.digests();
    report::print_json(&json!({
        "file": path.display().to_string(),
        "kind": "trunk",
        "version": 1,
        "form": if pack.is_coded() { "lossless" } else { "raw" },
        "bytes": pack.file_len(),
        "raw_bytes": pack.raw_bytes(),
        "layers": pack.layers(),
        "digests": {
            "config": hex(&digests.config),
            "headers": hex(&digests.headers),
            "samples": hex(&digests.samples),
        },
        "segments": pack.segments().len(),
        "groups": groups.collect::<Vec<_>>(),
        "tensors": tensors.collect::<Vec<_>>(),
    }))
}

fn table(path: &Path, pack: &Pack) -> Result<(), Failure> {
    let mut text = format!(
        "{}: packed trunk, version 1, {}\n{} layers, {} segments, {} of weights in {} ({:.4})\n\
         made of config {}, headers {}, weights {}\n\n{:<72} {:>5} {:>16} {:>14} {:>13} {:>13} {:>6}",
        path.display(),
        if pack.is_coded() { "lossless code" } else { "raw" },
        pack.layers(),
        pack.segments().len(),
        human(pack.raw_bytes()),
        human(pack.file_len()),
        ratio(pack.file_len(), pack.raw_bytes()),
        hex(&pack.digests().config),
        hex(&pack.digests().headers),
        hex(&pack.digests().samples),
        "tensor",
        "dtype",
        "shape",
        "offset",
        "stored",
        "raw",
        "ratio",
    );
    for t in pack.tensors() {
        let _ = write!(
            text,
            "\n{:<72} {:>5} {:>16} {:>14} {:>13} {:>13} {:>6.4}",
            t.tensor.to_string(),
            t.dtype.name(),
            format!("{}x{}", t.rows, t.cols),
            offset(pack, t),
            t.stored,
            t.raw(),
            ratio(t.stored, t.raw()),
        );
    }
    report::print(&text)
}
