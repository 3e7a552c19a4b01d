//! What a decoded token takes, beside what the disk and the computation take alone.
//!
//! ```text
//! cargo bench -p k3-platform --bench decode -- MODEL_DIR --budgets 500M,4G,11G
//! cargo bench -p k3-platform --bench decode -- MODEL_DIR --trunk FILE.k3 --limit 1,3,6 --check
//! ```
//!
//! For each budget a text is continued, and three times are taken of the same tokens:
//!
//! * **token**: wall time of a decoded token;
//! * **disk**: the very reads of those tokens once more, at the offsets and in the order in which the
//!   engine asked for them, with as many threads, and nothing computed;
//! * **compute**: the same tokens with everything in memory, so that nothing is read.
//!
//! The bound is `max(disk, compute)`, and `ratio` is what a token takes over it. Where one of the two is
//! at least twice the other, `--check` wants a ratio of at most 1.15, and ends with 1 otherwise. Where
//! they are nearer, threads that read and threads that compute share the cores, and the ratio is only
//! shown. `--limit` slows reads to so many GB/s, one row for each; for limits that the disk does not reach,
//! `--cached` reads a checkpoint that fits in memory through the page cache. With `--trunk` each row is measured
//! with the shards' trunk and with the file's, in turns, and `--check` wants the file's to be no slower
//! (2% for noise) where the disk is clearly the bound of both.
//!
//! It needs a checkpoint of gigabytes to mean anything, and so is given one: of a made one
//! (`k3 synth --fill-all`) the time is as good as of a real one.
#![expect(clippy::cast_precision_loss, reason = "times for people")]

use k3_core::backend::Backend;
use k3_core::ops::sample::argmax;
use k3_core::view::TokenId;
use k3_platform::aligned::AlignedBuf;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::io::{Detour, Detoured, Disk, Mode, ReadAt, ReadPool, Source, Throttled};
use k3_platform::memory::{available, default_threads};
use k3_platform::plan::{MOST_SEQUENCES, Request};
use k3_platform::policy::Policy;
use k3_platform::units;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// The most a token may take of its bound, where one side is [`CLEAR`] times the other.
const RATIO: f64 = 1.15;
/// How many times the smaller side the larger one is where the bound is clear.
const CLEAR: f64 = 2.0;
/// How much slower than the shards' a packed trunk may look.
const NOISE: f64 = 1.02;

/// A read that reached the disk.
#[derive(Clone)]
struct Seen {
    file: Arc<dyn ReadAt>,
    offset: u64,
    len: usize,
}

/// The reads since somebody began to listen.
type Log = Arc<Mutex<Option<Vec<Seen>>>>;

fn log(log: &Log) -> std::sync::MutexGuard<'_, Option<Vec<Seen>>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A source that notes every read of streamed files.
struct Recording {
    source: Arc<dyn Source>,
    log: Log,
}

/// Notes a read, and reads.
struct Noting(Log);

impl Source for Recording {
    fn open(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        Ok(Arc::new(Detoured::new(self.source.open(path)?, Noting(Arc::clone(&self.log)))))
    }

    fn open_cached(&self, path: &Path) -> io::Result<Arc<dyn ReadAt>> {
        self.source.open_cached(path)
    }
}

impl Detour for Noting {
    fn read_at(&self, file: &Arc<dyn ReadAt>, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        if let Some(seen) = &mut *log(&self.0) {
            seen.push(Seen { file: Arc::clone(file), offset, len: buf.len() });
        }
        file.read_at(buf, offset)
    }
}

#[derive(Clone)]
struct Options {
    dir: PathBuf,
    trunk: Option<PathBuf>,
    budgets: Vec<u64>,
    /// GB/s; `None` is the disk as it is.
    limits: Vec<Option<f64>>,
    tokens: usize,
    rounds: usize,
    readers: Vec<usize>,
    mode: Mode,
    check: bool,
}

fn list<T>(text: Option<String>, what: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Vec<T>, String> {
    let text = text.ok_or(format!("{what} takes a list"))?;
    text.split(',').map(|part| parse(part).ok_or(format!("{what}: {part:?}"))).collect()
}

fn options() -> Result<Option<Options>, String> {
    let mut dir = None;
    let mut options = Options {
        dir: PathBuf::new(),
        trunk: None,
        budgets: Vec::new(),
        limits: vec![None],
        tokens: 4,
        rounds: 2,
        readers: vec![ReadPool::THREADS],
        mode: Mode::Direct,
        check: false,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let number = |text: Option<String>| text.and_then(|t| t.parse().ok()).filter(|&n: &usize| n > 0);
        match arg.as_str() {
            // What cargo itself passes.
            "--bench" => {}
            "--check" => options.check = true,
            "--cached" => options.mode = Mode::Buffered,
            "--trunk" => options.trunk = Some(args.next().ok_or("--trunk takes a file")?.into()),
            "--budgets" => options.budgets = list(args.next(), "--budgets", |s| units::parse(s).ok())?,
            "--limit" => {
                let gb = |s: &str| s.parse().ok().filter(|&v: &f64| v.is_finite() && v > 0.0).map(Some);
                options.limits = list(args.next(), "--limit", gb)?;
            }
            "--tokens" => options.tokens = number(args.next()).ok_or("--tokens takes a number")?,
            "--rounds" => options.rounds = number(args.next()).ok_or("--rounds takes a number")?,
            "--readers" => options.readers = list(args.next(), "--readers", |s| number(Some(s.into())))?,
            other if !other.starts_with('-') && dir.is_none() => dir = Some(PathBuf::from(other)),
            other => {
                return Err(format!(
                    "{other}: known are MODEL_DIR, --trunk FILE, --budgets, --limit GB/s, --tokens, --rounds, --readers, --cached, --check"
                ));
            }
        }
    }
    Ok(dir.map(|dir| Options { dir, ..options }))
}

/// What was measured of one engine.
struct Run {
    /// Seconds of a token.
    token: f64,
    /// Seconds that the computation stood still, of a token.
    waited: f64,
    /// Bytes of a token.
    bytes: f64,
    reads: Vec<Seen>,
    ids: Vec<TokenId>,
}

/// What an engine is made of, besides its budget.
struct Setup<'a> {
    options: &'a Options,
    source: Arc<dyn Source>,
    trunk: Option<&'a Path>,
    readers: usize,
}

impl Setup<'_> {
    fn engine(&self, source: Arc<dyn Source>, budget: u64) -> Result<Engine, Error> {
        let mut checkpoint = Checkpoint::open(&self.options.dir, source)?;
        if let Some(trunk) = self.trunk {
            checkpoint.use_pack(trunk)?;
        }
        let request = Request {
            budget,
            context: self.options.tokens + PROMPT.len() + 1,
            prompt: PROMPT.len(),
            chunk: None,
            threads: default_threads(),
            readers: self.readers,
            policy: Policy::default(),
            all_logits: false,
            speculate: 0,
            sequences: 1,
            touched: 0,
            beside: 0,
            beside_each: [0; MOST_SEQUENCES],
        };
        let plan = checkpoint.plan(&request, 0)?;
        Engine::new(checkpoint, plan, Backend::detect(), Arc::default())
    }

    /// Continues the prompt within a budget. The token before those that are measured loads what stays.
    fn run(&self, budget: u64) -> Result<Run, Error> {
        let seen = Log::default();
        let recording = Recording { source: Arc::clone(&self.source), log: Arc::clone(&seen) };
        let mut engine = self.engine(Arc::new(recording), budget)?;
        self.decode(&mut engine, &seen)
    }

    /// The same with nothing left to read: the text for the second time, in memory that holds all of it.
    fn computed(&self) -> Result<Run, Error> {
        let all = available(default_threads()).map_or(u64::MAX, |a| a.bytes);
        let mut engine = self.engine(Arc::clone(&self.source), all)?;
        self.decode(&mut engine, &Log::default())?;
        engine.reset()?;
        self.decode(&mut engine, &Log::default())
    }

    fn decode(&self, engine: &mut Engine, seen: &Log) -> Result<Run, Error> {
        let mut logits = vec![0.0; engine.checkpoint().config().vocab_size];
        let best = |logits: &[f32]| argmax(logits).ok().flatten().unwrap_or(TokenId(0));
        for part in PROMPT.chunks(engine.plan().extent.chunk) {
            engine.step(part, &mut logits, &mut ())?;
        }
        let mut id = best(&logits);
        engine.step(&[id], &mut logits, &mut ())?;
        *log(seen) = Some(Vec::new());
        let (before, started) = (engine.stats(), Instant::now());
        let mut ids = Vec::new();
        for _ in 0..self.options.tokens {
            id = best(&logits);
            ids.push(id);
            engine.step(&[id], &mut logits, &mut ())?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let reads = log(seen).take().unwrap_or_default();
        let after = engine.stats();
        let tokens = self.options.tokens as f64;
        Ok(Run {
            token: seconds / tokens,
            waited: (after.waited() - before.waited()).as_secs_f64() / tokens,
            bytes: (after.bytes_read - before.bytes_read) as f64 / tokens,
            reads,
            ids,
        })
    }

    /// Seconds that the disk takes for these reads, of a token.
    fn replay(&self, reads: &[Seen]) -> Result<f64, String> {
        let next = AtomicUsize::new(0);
        let longest = reads.iter().map(|r| r.len).max().unwrap_or(0);
        let started = Instant::now();
        std::thread::scope(|scope| {
            let reader = || -> Result<(), String> {
                let mut buffer = AlignedBuf::zeroed(longest.max(1)).map_err(|e| e.to_string())?;
                while let Some(Seen { file, offset, len }) = reads.get(next.fetch_add(1, Ordering::Relaxed)) {
                    file.read_at(&mut buffer[..*len], *offset).map_err(|e| e.to_string())?;
                }
                Ok(())
            };
            let threads: Vec<_> = (0..self.readers).map(|_| scope.spawn(reader)).collect();
            threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| Err("a reader panicked".into())))
        })?;
        Ok(started.elapsed().as_secs_f64() / self.options.tokens as f64)
    }
}

const PROMPT: [TokenId; 4] = [TokenId(1), TokenId(2), TokenId(3), TokenId(4)];

fn main() -> ExitCode {
    match options().and_then(|options| options.map_or(Ok(None), |o| run(&o).map(Some))) {
        Ok(Some(true)) => ExitCode::SUCCESS,
        Ok(Some(false)) => ExitCode::FAILURE,
        Ok(None) => {
            println!("decode: no MODEL_DIR was given, so nothing was measured");
            ExitCode::SUCCESS
        }
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

fn run(options: &Options) -> Result<bool, String> {
    let mut passed = true;
    for &readers in &options.readers {
        for &limit in &options.limits {
            let disk: Arc<dyn Source> = Arc::new(Disk::new(options.mode));
            let source = match limit {
                Some(gb) => Arc::new(Throttled::new(disk, gb * 1e9)),
                None => disk,
            };
            let shards = Setup { options, source: Arc::clone(&source), trunk: None, readers };
            let packed = options.trunk.as_ref().map(|t| Setup { options, source, trunk: Some(t), readers });
            let setups: Vec<_> = [Some(&shards), packed.as_ref()].into_iter().flatten().collect();
            let limit = limit.map_or_else(|| "as it is".to_owned(), |gb| format!("{gb} GB/s"));
            println!("disk {limit}, {readers} readers, {} threads", default_threads());
            let compute = setups.iter().map(|s| s.computed()).collect::<Result<Vec<_>, _>>();
            let compute = compute.map_err(|e| e.to_string())?;
            for &budget in &options.budgets {
                passed &= row(&setups, &compute, budget)?;
            }
        }
    }
    Ok(passed || !options.check)
}

/// One budget with the trunk of each setup, in turns; the fastest round of each counts.
fn row(setups: &[&Setup<'_>], compute: &[Run], budget: u64) -> Result<bool, String> {
    let mut best: Vec<Option<(Run, f64)>> = setups.iter().map(|_| None).collect();
    for _ in 0..setups[0].options.rounds {
        for (setup, best) in setups.iter().zip(&mut best) {
            let run = setup.run(budget).map_err(|e| e.to_string())?;
            let disk = setup.replay(&run.reads)?;
            let disk = best.as_ref().map_or(disk, |b| b.1.min(disk));
            let faster = best.take().filter(|b| b.0.token <= run.token);
            *best = Some((faster.map_or(run, |b| b.0), disk));
        }
    }
    let mut passed = true;
    let mut tokens = Vec::new();
    for ((setup, best), compute) in setups.iter().zip(best).zip(compute) {
        let Some((run, disk)) = best else { continue };
        if run.ids != compute.ids {
            return Err(format!("{} gave other ids than everything in memory", units::human(budget)));
        }
        let bound = disk.max(compute.token);
        let (ratio, clear) = (run.token / bound, bound >= CLEAR * disk.min(compute.token));
        let verdict = match (clear, ratio <= RATIO) {
            (true, true) => "",
            (true, false) => "  ABOVE 1.15",
            (false, _) => "  (disk and compute are near each other)",
        };
        passed &= !clear || ratio <= RATIO;
        println!(
            "  {:>9} {:6} {:6.3} GB  token {:7.4} s  disk {disk:7.4} s  compute {:7.4} s  waited {:7.4} s  ratio {ratio:.2}{verdict}",
            units::human(budget),
            if setup.trunk.is_some() { "packed" } else { "shards" },
            run.bytes / 1e9,
            run.token,
            compute.token,
            run.waited,
        );
        tokens.push((run.token, clear && disk >= compute.token));
    }
    if let [(shards, first), (packed, second)] = tokens[..] {
        let slower = first && second && packed > shards * NOISE;
        println!("            packed takes {:.3} of it{}", packed / shards, if slower { "  SLOWER" } else { "" });
        passed &= !slower;
    }
    Ok(passed)
}
