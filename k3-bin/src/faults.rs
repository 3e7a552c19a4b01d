//! Reads that go wrong on purpose, in builds with debug assertions: how tests see what a person sees
//! when a disk fails. A released `k3` has nothing of this.
//!
//! `K3_FAULTS` holds `name=number` pairs, separated by commas; the names are those of
//! [`k3_platform::io::Faults`]. Reads are counted from the first of a header on.

use crate::fail::Failure;
use k3_platform::io::{Disk, Source};
use std::sync::Arc;

/// What opens the files of a checkpoint.
#[cfg(not(debug_assertions))]
#[expect(clippy::unnecessary_wraps, reason = "it has errors where there are faults")]
pub(crate) fn wrap(disk: &Disk) -> Result<Arc<dyn Source>, Failure> {
    Ok(Arc::new(disk.clone()))
}

/// What opens the files of a checkpoint, with the faults that are asked for.
#[cfg(debug_assertions)]
pub(crate) fn wrap(disk: &Disk) -> Result<Arc<dyn Source>, Failure> {
    use k3_platform::io::{Faults, Faulty};
    let Some(text) = std::env::var_os("K3_FAULTS") else { return Ok(Arc::new(disk.clone())) };
    let refused = |part: &str| Failure::usage(format!("K3_FAULTS: {part}"), "write name=number, as in fail_read=7");
    let mut faults = Faults::default();
    for part in text.to_string_lossy().split(',') {
        let (name, value) = part.split_once('=').ok_or_else(|| refused(part))?;
        if name == "only" {
            faults.only = Some(value.to_owned());
            continue;
        }
        let number: u64 = value.parse().map_err(|_| refused(part))?;
        match name {
            "seed" => faults.seed = number,
            "short" => faults.short = number,
            "interrupt" => faults.interrupt = number,
            "fail_read" => faults.fail_read = Some(number),
            "hang_read" => faults.hang_read = Some(number),
            "panic_read" => faults.panic_read = Some(number),
            "truncate" => faults.truncate = Some(number),
            "truncate_from" => faults.truncate_from = number,
            _ => return Err(refused(part)),
        }
    }
    Ok(Arc::new(Faulty::new(disk.clone(), faults)))
}
