//! What every command that runs a model does first: options to a checkpoint, a plan and an engine.

use crate::args::{Common, Experts, Io};
use crate::demo::{self, Demo};
use crate::fail::{BUDGET, Failure};
use crate::faults;
use crate::report;
use crate::signals;
use k3_core::backend::Backend;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode, Patient, Source, Throttled};
use k3_platform::memory::{Availability, available, default_threads, obtainable, rss};
use k3_platform::pack;
use k3_platform::plan::{MOST_SEQUENCES, PROCESS_BYTES, Plan, Request, THREAD_BYTES};
use k3_platform::policy::Policy;
use k3_platform::units;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// What is left free of the memory a machine has to give when --memory is auto: an eighth, at least
/// this (bytes), but not more than half.
const RESERVE: u64 = 512_000_000;

/// Threads that read, and so reads in flight.
pub(crate) const READERS: usize = 8;

/// Bytes that a text holds for each of its positions: its id and its bytes, in lists that grow, and what of it a
/// conversation keeps.
pub(crate) const TEXT_BYTES: u64 = 24;

/// Bytes of its JSON for each position: the id in a tree, and what is printed of it and its text, twice.
const JSON_BYTES: u64 = 104;

/// Options that have been understood. Made before anything slow, so that what is wrong with them is
/// said at once.
pub(crate) struct Options<'a> {
    common: &'a Common,
    backend: Backend,
    budget: u64,
    gentle: bool,
}

/// What a command asks of its engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    /// Positions of the longest sequence.
    pub(crate) context: usize,
    /// Positions a chunk could use at most.
    pub(crate) prompt: usize,
    /// Whether logits of all positions are read.
    pub(crate) all_logits: bool,
    /// What the tokenizer holds (bytes).
    pub(crate) tokenizer: u64,
    /// Ids that are guessed at most.
    pub(crate) speculate: usize,
    /// Sequences that are to run at the same time, at most.
    pub(crate) sequences: usize,
    /// What the command holds besides one text of this context: a sampler's scratch, a session's buffer, other
    /// texts (bytes).
    pub(crate) beside: u64,
    /// The same for each sequence that runs, the most first (bytes).
    pub(crate) beside_each: [u64; MOST_SEQUENCES],
}

/// One short sequence, and no guesses.
impl Default for Wanted {
    fn default() -> Self {
        Self {
            context: 1,
            prompt: 1,
            all_logits: false,
            tokenizer: 0,
            speculate: 0,
            sequences: 1,
            beside: 0,
            beside_each: [0; MOST_SEQUENCES],
        }
    }
}

/// A directory that is meant to be a checkpoint, not looked into yet.
pub(crate) struct Located<'a> {
    options: Options<'a>,
    disk: Disk,
    demo: Option<Demo>,
    pub(crate) stop: Arc<AtomicBool>,
    /// What opens its files.
    pub(crate) source: Arc<dyn Source>,
    pub(crate) dir: PathBuf,
}

/// A checkpoint, opened.
pub(crate) struct Opened<'a> {
    options: Options<'a>,
    disk: Disk,
    demo: Option<Demo>,
    stop: Arc<AtomicBool>,
    pub(crate) checkpoint: Checkpoint,
}

/// An engine, and what lives as long as it does.
pub(crate) struct Started {
    pub(crate) engine: Engine,
    disk: Disk,
    direct: bool,
    /// Set by the first signal. While it is set, the next one ends the process.
    pub(crate) stop: Arc<AtomicBool>,
}

impl<'a> Options<'a> {
    pub(crate) fn new(common: &'a Common) -> Result<Self, Failure> {
        Ok(Self { common, backend: backend(&common.backend)?, budget: budget(common)?, gentle: false })
    }

    /// Refuses guesses that a chunk has no room for.
    pub(crate) fn check_guesses(&self, speculate: usize) -> Result<(), Failure> {
        let Some(chunk) = self.common.chunk.filter(|c| c.get() <= speculate) else { return Ok(()) };
        let message = format!("--speculate {speculate} reads {} positions in a pass", speculate + 1);
        Err(Failure::usage(message, format!("--chunk {chunk} allows fewer: raise it, or guess less")))
    }

    /// A signal does not stop a pass in the middle: whoever listens ends the text after it. So nothing that
    /// was read is lost.
    pub(crate) fn gentle(self) -> Self {
        Self { gentle: true, ..self }
    }

    /// The kernels a run would compute with.
    pub(crate) const fn backend(&self) -> Backend {
        self.backend
    }

    fn patience(&self) -> Duration {
        self.common.reading.patience()
    }

    /// Memory that may be used (bytes).
    pub(crate) const fn budget(&self) -> u64 {
        self.budget
    }

    /// Opens the checkpoint, or the demo where none is named. From here on signals stop a pass and not
    /// the process.
    pub(crate) fn open(self) -> Result<Opened<'a>, Failure> {
        self.locate()?.open()
    }

    /// Finds out which directory is meant, without looking into it. From here on signals stop a pass
    /// and not the process.
    pub(crate) fn locate(self) -> Result<Located<'a>, Failure> {
        self.locate_in(None)
    }

    /// The same, with another directory than the demo where none is named.
    pub(crate) fn locate_or(self, dir: &Path) -> Result<Located<'a>, Failure> {
        self.locate_in(Some(dir))
    }

    fn locate_in(self, other: Option<&Path>) -> Result<Located<'a>, Failure> {
        let stop = signals::watch()?;
        let (dir, demo) = match self.common.model.as_deref().or(other) {
            Some(dir) => (dir.to_owned(), None),
            None => {
                let demo = demo::unpack(self.common.quiet)?;
                (demo.dir().to_owned(), Some(demo))
            }
        };
        let disk = Disk::new(if self.common.io == Io::Direct { Mode::Direct } else { Mode::Buffered });
        let source = match demo.as_ref().and_then(Demo::source) {
            Some(included) => included,
            None => faults::wrap(&disk)?,
        };
        let source = throttled(source, self.common.reading.disk_limit);
        let source = Arc::new(Patient::new(source, self.patience(), Arc::clone(&stop)));
        Ok(Located { options: self, disk, demo, stop, source, dir })
    }
}

impl<'a> Located<'a> {
    /// Opens the checkpoint.
    pub(crate) fn open(self) -> Result<Opened<'a>, Failure> {
        let Self { options, disk, demo, stop, source, dir } = self;
        let mut checkpoint = Checkpoint::open(&dir, source)?;
        checkpoint.set_patience(options.patience());
        use_pack(&mut checkpoint, options.common)?;
        Ok(Opened { options, disk, demo, stop, checkpoint })
    }

    /// How long a read may bring nothing.
    pub(crate) fn patience(&self) -> Duration {
        self.options.patience()
    }

    /// Memory that may be used (bytes).
    pub(crate) const fn budget(&self) -> u64 {
        self.options.budget
    }
}

impl Opened<'_> {
    /// Whether this is the demo that is part of the program.
    pub(crate) const fn is_demo(&self) -> bool {
        self.demo.is_some()
    }

    /// Memory that may be used (bytes).
    pub(crate) const fn budget(&self) -> u64 {
        self.options.budget
    }

    /// What its files are read from.
    pub(crate) const fn disk(&self) -> &Disk {
        &self.disk
    }

    /// What a signal sets.
    pub(crate) const fn stop(&self) -> &Arc<AtomicBool> {
        &self.stop
    }

    /// The plan a run would be made by.
    pub(crate) fn plan(&self, wanted: Wanted) -> Result<Plan, Failure> {
        let touched = self.demo.as_ref().map_or(0, Demo::touched);
        Ok(self.checkpoint.plan(&self.request(self.options.budget, touched, wanted), wanted.tokenizer)?)
    }

    /// The plan that a run of its own process would be made by, if it were given `budget` bytes.
    pub(crate) fn plan_of_child(&self, budget: u64, wanted: Wanted) -> Result<Plan, Error> {
        let touched = self.demo.as_ref().map_or(0, Demo::touched_again);
        self.checkpoint.plan(&self.request(budget, touched, wanted), wanted.tokenizer)
    }

    /// What a child must be told so that it finds this checkpoint: nothing where it is part of k3.
    pub(crate) fn named(&self) -> Option<&Path> {
        let included = self.demo.as_ref().is_some_and(Demo::is_included);
        (!included).then(|| self.checkpoint.dir())
    }

    /// The plan there would be without the packed trunk; `None` if there is none, or if the budget holds
    /// no other.
    pub(crate) fn plan_of_shards(&self, wanted: Wanted) -> Option<Plan> {
        self.checkpoint.pack()?;
        let touched = self.demo.as_ref().map_or(0, Demo::touched);
        self.checkpoint.plan_of_shards(&self.request(self.options.budget, touched, wanted), wanted.tokenizer).ok()
    }

    fn request(&self, budget: u64, touched: u64, wanted: Wanted) -> Request {
        let common = self.options.common;
        Request {
            budget,
            context: wanted.context,
            prompt: wanted.prompt,
            chunk: common.chunk.map(|n| n.get().min(wanted.prompt.max(1))),
            threads: threads(common),
            readers: READERS,
            all_logits: wanted.all_logits,
            speculate: wanted.speculate,
            sequences: wanted.sequences,
            policy: match common.experts {
                Experts::Lru => Policy::Lru,
                Experts::Frequency => Policy::Frequency,
            },
            touched,
            beside: wanted.beside.saturating_add((TEXT_BYTES + JSON_BYTES).saturating_mul(wanted.context as u64)),
            beside_each: wanted.beside_each,
        }
    }

    /// The kernels a run would compute with.
    pub(crate) fn backend(&self) -> Backend {
        self.options.backend
    }

    /// Plans, says so, and builds the engine.
    pub(crate) fn start(self, wanted: Wanted) -> Result<Started, Failure> {
        let plan = self.plan(wanted)?;
        let held = rss().unwrap_or(0);
        check_room(&plan, obtainable(), held)?;
        let Self { options: Options { common, backend, gentle, .. }, disk, demo, stop, checkpoint } = self;
        let included = demo.is_some_and(|demo| demo.is_included());
        if !common.quiet {
            report::plan(&plan, backend.name());
        }
        let passes = if gentle { Arc::default() } else { Arc::clone(&stop) };
        let engine = Engine::new(checkpoint, plan, backend, passes)?;
        Ok(Started { engine, disk, direct: common.io == Io::Direct && !included, stop })
    }
}

impl Started {
    /// The exit code of what is not a failure.
    pub(crate) fn code(cancelled: bool) -> u8 {
        if cancelled { signals::code() } else { 0 }
    }

    /// Whether reads went past the page cache.
    pub(crate) fn direct(&self) -> bool {
        self.direct && !self.disk.fell_back()
    }

    /// Says so if reads could not go past the page cache though they should.
    pub(crate) fn note_buffered(&self) {
        if self.disk.fell_back() {
            let _ = writeln!(std::io::stderr(), "note: this file system has no O_DIRECT; reads were buffered");
        }
    }
}

/// The same files, as slow as is asked (GB a second).
pub(crate) fn throttled(source: Arc<dyn Source>, limit: Option<f64>) -> Arc<dyn Source> {
    match limit {
        Some(limit) if limit > 0.0 => Arc::new(Throttled::new(source, limit * 1e9)),
        _ => source,
    }
}

/// The packed trunk that is named, or one that is found and is of this model.
fn use_pack(checkpoint: &mut Checkpoint, common: &Common) -> Result<(), Failure> {
    if common.trunk == Path::new("none") {
        return Ok(());
    }
    if common.trunk != Path::new("auto") {
        return checkpoint.use_pack(&common.trunk).map_err(|e| Failure::named("--trunk", &common.trunk, e));
    }
    let found = checkpoint.dir().join(pack::FILE_NAME);
    if found.exists()
        && let Err(error) = checkpoint.use_pack(&found)
        && !common.quiet
    {
        let _ = writeln!(std::io::stderr(), "note: the packed trunk is not used: {error}");
    }
    Ok(())
}

fn backend(name: &str) -> Result<Backend, Failure> {
    if name == "auto" {
        return Ok(Backend::detect());
    }
    Backend::by_name(name).ok_or_else(|| {
        let names: Vec<_> = Backend::available().map(Backend::name).collect();
        let what = if ["avx2", "avx512"].contains(&name) { "not on this CPU" } else { "no such kernels" };
        Failure::usage(format!("--backend {name}: {what}"), format!("this CPU has: auto, {}", names.join(", ")))
    })
}

/// Threads that compute.
fn threads(common: &Common) -> usize {
    common.threads.map_or_else(default_threads, usize::from)
}

fn budget(common: &Common) -> Result<u64, Failure> {
    if common.memory != "auto" {
        let size = units::parse(&common.memory);
        return size.map_err(|e| Failure::usage(format!("--memory: {e}"), "write 2G, 12GiB or auto"));
    }
    // One more waits for signals.
    let Some(available) = available(threads(common) + READERS + 1) else {
        return Err(Failure::usage("the system does not say how much memory is free", "give --memory SIZE"));
    };
    // What this process holds already is part of the budget it is about to be given.
    let held = rss().unwrap_or(0);
    let reserve = RESERVE.max(available.bytes / 8).min(available.bytes / 2);
    Ok((available.bytes - reserve).saturating_add(held))
}

/// What a command that runs no engine takes with so many threads, its buffers not counted (bytes).
pub(crate) fn held(threads: usize) -> u64 {
    rss().unwrap_or(0).max(PROCESS_BYTES).saturating_add(threads as u64 * THREAD_BYTES)
}

/// What a budget leaves for the buffers of such a command, and never all that can be had (bytes).
pub(crate) fn room(budget: u64, threads: usize) -> u64 {
    let free = available(threads).map_or(u64::MAX, |a| a.bytes);
    budget.saturating_sub(held(threads)).min(free / 4 * 3)
}

/// Refuses a plan that would get this process killed in the middle of its work, whatever else is given up
/// for it. Of it `held` bytes are there already.
fn check_room(plan: &Plan, room: Option<Availability>, held: u64) -> Result<(), Failure> {
    let Some(room) = room else { return Ok(()) };
    // What a plan counts for the process itself is more than most touch; the system's own part of a control
    // group is not in the plan.
    let most = room.bytes.saturating_add(held);
    if plan.ledger.total() <= most.saturating_add(PROCESS_BYTES) {
        return Ok(());
    }
    let (total, limit) = (units::human(plan.ledger.total()), &room.limit);
    let message = format!(
        "this run would take {total}, and no more than {} can be had: {limit}\n{}",
        units::human(most),
        plan.ledger
    );
    Err(Failure {
        code: BUDGET,
        message,
        hint: Some("lower --memory; \"auto\" is what is free, less a reserve".into()),
    })
}
