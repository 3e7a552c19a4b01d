//! SIGINT and SIGTERM.
//!
//! The first one asks for an end: the pass stops, and what there is gets printed. A second one ends
//! the process at once. A signal that whoever started the process has set to be ignored (a shell does
//! so for what runs in the background of a script) stays ignored.

use crate::fail::{self, Failure};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// What handlers set. There is one, as there is one process, and what the system said to it.
static SIGNALS: OnceLock<io::Result<Signals>> = OnceLock::new();

struct Signals {
    /// Set by the first signal.
    stop: Arc<AtomicBool>,
    /// The number of the last one.
    number: Arc<AtomicUsize>,
}

impl Signals {
    /// Takes the signals over. A second time would put a shutdown behind the first one's flag, and the first
    /// signal would end the process.
    fn take() -> io::Result<Self> {
        let this = Self { stop: Arc::default(), number: Arc::default() };
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        for (signal, value) in [(SIGINT, 2), (SIGTERM, 15)] {
            if ignored & (1 << (value - 1)) != 0 {
                continue;
            }
            // In this order: the shutdown looks at the flag before this signal sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&this.stop))?;
            flag::register_usize(signal, Arc::clone(&this.number), value)?;
            flag::register(signal, Arc::clone(&this.stop))?;
        }
        Ok(this)
    }
}

fn signals() -> Option<&'static Signals> {
    SIGNALS.get()?.as_ref().ok()
}

/// Takes the signals over, unless that was done, and gives the flag that the first one sets.
///
/// # Errors
/// If the system refuses a handler.
pub(crate) fn watch() -> Result<Arc<AtomicBool>, Failure> {
    match SIGNALS.get_or_init(Signals::take) {
        Ok(signals) => Ok(Arc::clone(&signals.stop)),
        Err(e) => Err(Failure { code: fail::IO, message: format!("signals: {e}"), hint: None }),
    }
}

/// Whether a signal has asked for an end.
pub(crate) fn stopped() -> bool {
    signals().is_some_and(|signals| signals.stop.load(Ordering::SeqCst))
}

/// Whether the signal that asked last was SIGTERM.
pub(crate) fn terminated() -> bool {
    code() == 128 + 15
}

/// The exit code that a signal asks for.
pub(crate) fn code() -> u8 {
    let number = signals().map_or(0, |signals| signals.number.load(Ordering::SeqCst));
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

    /// Several parts of a command may ask for the flag; the first signal is a request all the same.
    #[test]
    fn signals_are_taken_over_once() {
        if !k3_tests::alone("signals::tests::signals_are_taken_over_once") {
            return;
        }
        let [one, other] = [(); 2].map(|()| watch().unwrap());
        assert!(Arc::ptr_eq(&one, &other) && !stopped());
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::TERM).unwrap();
        let started = std::time::Instant::now();
        while !stopped() {
            assert!(started.elapsed().as_secs() < 60, "no signal came");
            std::thread::yield_now();
        }
        assert!(one.load(Ordering::SeqCst) && terminated());
    }
}
