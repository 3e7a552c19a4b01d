//! SIGINT and SIGTERM.
//!
//! The first one asks for an end: the pass stops, and what there is gets printed. A second one ends
//! the process at once. A signal that whoever started the process has set to be ignored (a shell does
//! so for what runs in the background of a script) stays ignored.

use crate::fail::{self, Failure};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The flag, and the number of the signal that set it. There is one of each, as there is one process.
static SIGNALS: OnceLock<(Arc<AtomicBool>, Arc<AtomicUsize>)> = OnceLock::new();

/// Takes the signals over, and gives the flag that the first one sets.
///
/// # Errors
/// If the system refuses a handler.
pub(crate) fn watch() -> Result<Arc<AtomicBool>, Failure> {
    let (stop, number) = SIGNALS.get_or_init(Default::default);
    let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
    for (signal, value) in [(SIGINT, 2), (SIGTERM, 15)] {
        if ignored & (1 << (value - 1)) != 0 {
            continue;
        }
        // In this order: the shutdown looks at the flag before this signal sets it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop))
            .and_then(|_| flag::register_usize(signal, Arc::clone(number), value))
            .and_then(|_| flag::register(signal, Arc::clone(stop)))
            .map_err(|e| Failure { code: fail::IO, message: format!("signals: {e}"), hint: None })?;
    }
    Ok(Arc::clone(stop))
}

/// Whether a signal has asked for an end.
pub(crate) fn stopped() -> bool {
    SIGNALS.get().is_some_and(|(stop, _)| stop.load(Ordering::SeqCst))
}

/// Whether the signal that asked last was SIGTERM.
pub(crate) fn terminated() -> bool {
    code() == 128 + 15
}

/// The exit code that a signal asks for.
pub(crate) fn code() -> u8 {
    let number = SIGNALS.get().map_or(0, |(_, number)| number.load(Ordering::SeqCst));
    128 + u8::try_from(number).ok().filter(|&n| n != 0).unwrap_or(2)
}

/// The signals that are ignored, as bits from the first one on, in the text of `/proc/self/status`.
fn ignored(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_is_read() {
        let status = "Name:\tk3\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001003\nSigCgt:\t0000000180000440\n";
        assert_eq!(ignored(status), 0x1003);
        assert_eq!(ignored(""), 0);
    }
}
