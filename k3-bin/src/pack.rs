//! `k3 pack`: the trunk in one file; `k3 pack --verify`: whether it is still what it was.

use crate::args::Pack as Args;
use crate::fail::{self, Failure};
use crate::faults;
use crate::report::{self, Meter};
use crate::signals;
use crate::start::throttled;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode, Patient, Source};
use k3_platform::memory::default_threads;
use k3_platform::pack::{Options, Pack, PackFault, Stage, compare, verify, write};
use k3_platform::units::human;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn pack(args: &Args) -> Result<u8, Failure> {
    let stop = signals::watch()?;
    let opener = throttled(faults::wrap(&Disk::new(Mode::Direct))?, args.reading.disk_limit);
    let patience = args.reading.patience();
    let opener: Arc<dyn Source> = Arc::new(Patient::new(opener, patience, Arc::clone(&stop)));
    if args.verify {
        return check(args, &opener, &stop);
    }
    let Some(out) = &args.second else {
        return Err(Failure::usage("no OUT is named", "k3 pack MODEL_DIR OUT writes the file OUT"));
    };
    let mut checkpoint = Checkpoint::open(&args.first, opener)?;
    checkpoint.set_patience(patience);
    let threads = args.threads.map_or_else(default_threads, usize::from);
    let options = Options { coded: !args.raw, threads, verify: !args.no_verify };
    let mut meter = Meter::new(!args.quiet);
    let mut begun = None;
    let done = write(&checkpoint, out, options, &stop, &mut |p| {
        if begun != Some(p.stage) {
            begun = Some(p.stage);
            let already = if p.stage == Stage::Packing { p.resumed } else { 0 };
            meter.begin(if p.stage == Stage::Packing { "packing" } else { "verifying" }, already);
            if already > 0 && !args.quiet {
                let _ = writeln!(
                    std::io::stderr(),
                    "note: {} of {} were packed by an earlier run",
                    human(already),
                    human(p.total)
                );
            }
        }
        meter.update(p.done, p.total);
    });
    meter.clear();
    let done = match done {
        Err(Error::Stopped) => {
            let _ = writeln!(
                std::io::stderr(),
                "interrupted; what is packed so far is kept in {}.part, and the same command goes on from there",
                out.display()
            );
            return Ok(signals::code());
        }
        other => other?,
    };
    if args.quiet {
        return Ok(0);
    }
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let ratio = done.file_len as f64 / done.raw.max(1) as f64;
    let what = if done.already { "was there already: " } else { "" };
    report::print(&format!(
        "{}: {what}{} of weights in {}, {ratio:.4} of their size{}",
        out.display(),
        human(done.raw),
        human(done.file_len),
        if options.verify || done.already { "" } else { "; not read back" },
    ))?;
    Ok(0)
}

/// Exit code 1 if the file is not what it was, or not that of the model.
fn check(args: &Args, opener: &Arc<dyn Source>, stop: &Arc<AtomicBool>) -> Result<u8, Failure> {
    let (path, quiet, patience) = (&args.first, args.quiet, args.reading.patience());
    let failed = |error: Error| {
        // A file that is there and is no whole pack is what this command is asked about.
        let failed = matches!(&error, Error::Pack(e) if !matches!(e.fault, PackFault::Version(_)));
        let failure = Failure::named("--verify", path, error);
        if failed { Failure { code: fail::CHECK, ..failure } } else { failure }
    };
    let pack = Pack::open(path, &**opener).map_err(failed)?;
    let checkpoint = match &args.second {
        Some(dir) => {
            let mut checkpoint = Checkpoint::open(dir, Arc::clone(opener))?;
            checkpoint.set_patience(patience);
            Some(checkpoint)
        }
        None => None,
    };
    let mut meter = Meter::new(!quiet);
    meter.begin("verifying", 0);
    let mut each = |done: u64| meter.update(done, pack.file_len());
    let different = match &checkpoint {
        Some(checkpoint) => {
            pack.matches(checkpoint).map_err(failed)?;
            compare(&pack, checkpoint, stop, &mut each)
        }
        None => verify(&pack, pack.files(opener).with_patience(patience), stop, &mut each),
    };
    meter.clear();
    let different = match different {
        Err(Error::Stopped) => return Ok(signals::code()),
        other => other?,
    };
    match different.first() {
        None => {
            if !quiet {
                let against = if checkpoint.is_some() { ", and its weights are those of the model" } else { "" };
                report::print(&format!(
                    "{}: all {} segments are whole{against}",
                    path.display(),
                    pack.segments().len()
                ))?;
            }
            Ok(0)
        }
        Some(first) => {
            let more = match different.len() - 1 {
                0 => String::new(),
                n => format!(", and {n} more"),
            };
            Err(Failure {
                code: fail::CHECK,
                message: format!("{}: {first}{more}", path.display()),
                hint: Some("delete the file and pack it again; if it happens again, check the disk".to_owned()),
            })
        }
    }
}
