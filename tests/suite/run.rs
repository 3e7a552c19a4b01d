//! One run of an engine, described by a value.

use k3_core::backend::Backend;
use k3_core::model::Observer;
use k3_core::ops::sample::argmax;
use k3_core::view::{ExpertId, LayerIndex, TokenId};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::{Engine, Share, Stats};
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode, Source};
use k3_platform::plan::{MOST_SEQUENCES, Request};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Everything that must not change a bit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    pub(crate) backend: Backend,
    pub(crate) threads: usize,
    pub(crate) chunk: Option<usize>,
    pub(crate) budget: u64,
    pub(crate) mode: Mode,
    pub(crate) incremental: bool,
    pub(crate) speculate: usize,
    pub(crate) sequences: usize,
    /// Reads the trunk from a pack: raw or coded.
    pub(crate) pack: Option<bool>,
}

impl Default for How {
    fn default() -> Self {
        let backend = Backend::detect();
        Self {
            backend,
            threads: 2,
            chunk: None,
            budget: 1 << 30,
            mode: Mode::Direct,
            incremental: true,
            speculate: 0,
            sequences: 1,
            pack: None,
        }
    }
}

/// What came out.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// `[prompt + generated - 1, vocab]`: row `t` after the first `t + 1` ids.
    pub(crate) logits: Vec<f32>,
    pub(crate) generated: Vec<TokenId>,
    /// `[layer][position][hidden]` of the prompt, if it was one chunk.
    pub(crate) hidden: Vec<Vec<f32>>,
    /// `[routed layer]`: ids and weights of the prompt, in rank order.
    pub(crate) routed: Vec<(LayerIndex, Vec<ExpertId>, Vec<f32>)>,
    pub(crate) last: Vec<f32>,
    pub(crate) stats: Option<Stats>,
    pub(crate) pinned: usize,
}

#[derive(Default)]
struct Watch {
    off: bool,
    hidden: Vec<Vec<f32>>,
    routed: Vec<(LayerIndex, Vec<ExpertId>, Vec<f32>)>,
    last: Vec<f32>,
}

impl Observer for Watch {
    fn layer(&mut self, _: LayerIndex, running_sum: &[f32]) {
        if !self.off {
            self.hidden.push(running_sum.to_vec());
        }
    }

    fn routed(&mut self, layer: LayerIndex, ids: &[ExpertId], weights: &[f32]) {
        if !self.off {
            self.routed.push((layer, ids.to_vec(), weights.to_vec()));
        }
    }

    fn last(&mut self, normed: &[f32]) {
        if !self.off {
            self.last.extend_from_slice(normed);
        }
    }
}

/// Opens a checkpoint.
pub(crate) fn open(dir: &Path, mode: Mode) -> Result<Checkpoint, Error> {
    Checkpoint::open(dir, Arc::new(Disk::new(mode)))
}

/// The packed trunk of a checkpoint, made once by each process that asks.
pub(crate) fn packed(dir: &Path, coded: bool) -> PathBuf {
    use std::collections::HashMap;
    use std::sync::{LazyLock, Mutex};
    static MADE: LazyLock<Mutex<HashMap<(PathBuf, bool), PathBuf>>> = LazyLock::new(Mutex::default);
    let mut made = MADE.lock().expect("no test panics here");
    let path = made.entry((dir.to_owned(), coded)).or_insert_with(|| {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{coded}.k3"));
        let _absent = std::fs::remove_file(&out);
        let options = k3_platform::pack::Options { coded, threads: 2, verify: true };
        let checkpoint = open(dir, Mode::Buffered).expect("open");
        k3_platform::pack::write(&checkpoint, &out, options, &Arc::default(), &mut |_| ()).expect("a pack");
        out
    });
    path.clone()
}

/// Opens a checkpoint as a run would read it.
pub(crate) fn open_for(dir: &Path, how: &How) -> Result<Checkpoint, Error> {
    open_from(Arc::new(Disk::new(how.mode)), dir, how)
}

fn open_from(source: Arc<dyn Source>, dir: &Path, how: &How) -> Result<Checkpoint, Error> {
    let mut checkpoint = Checkpoint::open(dir, source)?;
    if let Some(coded) = how.pack {
        checkpoint.use_pack(&packed(dir, coded))?;
    }
    Ok(checkpoint)
}

/// The engine for a request on this checkpoint.
pub(crate) fn engine(checkpoint: Checkpoint, how: &How, prompt: usize, context: usize) -> Result<Engine, Error> {
    engine_with(checkpoint, how, prompt, context, Arc::default())
}

/// The same with a flag that stops it.
pub(crate) fn engine_with(
    checkpoint: Checkpoint,
    how: &How,
    prompt: usize,
    context: usize,
    stop: Arc<AtomicBool>,
) -> Result<Engine, Error> {
    let request = Request {
        budget: how.budget,
        context,
        prompt,
        chunk: how.chunk,
        threads: how.threads,
        readers: 2,
        all_logits: true,
        speculate: how.speculate,
        sequences: how.sequences,
        policy: k3_platform::policy::Policy::default(),
        touched: 0,
        beside: 0,
        beside_each: [0; MOST_SEQUENCES],
    };
    let plan = checkpoint.plan(&request, 0)?;
    Engine::new(checkpoint, plan, how.backend, stop)
}

/// Runs a prompt and `max` greedy tokens.
pub(crate) fn run(dir: &Path, how: &How, prompt: &[TokenId], max: usize) -> Result<Outcome, Error> {
    run_from(Arc::new(Disk::new(how.mode)), dir, how, prompt, max)
}

/// Runs a prompt, and then the ids of `text` (its continuation) as guesses of `how.speculate` ids of which a
/// part is wrong: none, one, two, and so on, around and around. Every tenth token goes without.
pub(crate) fn run_guessing(dir: &Path, how: &How, prompt: &[TokenId], text: &[TokenId]) -> Result<Outcome, Error> {
    let checkpoint = open(dir, how.mode)?;
    let vocab = checkpoint.config().vocab_size;
    let mut engine = engine(checkpoint, how, prompt.len(), prompt.len() + text.len())?;
    let mut out = Outcome { pinned: engine.plan().pinned(), ..Outcome::default() };
    for part in prompt.chunks(engine.plan().extent.chunk) {
        let mut logits = vec![0.0; part.len() * vocab];
        engine.step(part, &mut logits, &mut ())?;
        out.logits.extend_from_slice(&logits);
    }
    let last = |logits: &[f32]| argmax(&logits[logits.len() - vocab..]).expect("finite").expect("a vocabulary");
    let mut wrong = 0;
    while out.generated.len() < text.len() {
        let done = out.generated.len();
        out.generated.push(last(&out.logits));
        let mut ids = vec![out.generated[done]];
        let right = &text[done + 1..];
        ids.extend_from_slice(&right[..how.speculate.min(right.len())]);
        let keep = ids.len() - wrong.min(ids.len() - 1);
        ids[keep..].iter_mut().for_each(|id| id.0 = (id.0 + 1) % u32::try_from(vocab).unwrap_or(u32::MAX));
        wrong = (wrong + 1) % (how.speculate + 2);
        if wrong == 0 {
            ids.truncate(1);
            let mut logits = vec![0.0; vocab];
            engine.step(&ids, &mut logits, &mut ())?;
            out.logits.extend_from_slice(&logits);
            continue;
        }
        let mut logits = vec![0.0; ids.len() * vocab];
        engine.verify(&ids, &mut logits, &mut ())?;
        engine.commit(keep)?;
        out.logits.extend_from_slice(&logits[..keep * vocab]);
        out.generated.extend_from_slice(&ids[1..keep]);
    }
    out.stats = Some(engine.stats());
    Ok(out)
}

/// Runs a prompt and its continuation `text` among other sequences that come and go, of other lengths, and
/// gives what became of the first.
pub(crate) fn run_among(dir: &Path, how: &How, prompt: &[TokenId], text: &[TokenId]) -> Result<Outcome, Error> {
    let checkpoint = open(dir, how.mode)?;
    let vocab = checkpoint.config().vocab_size;
    let mut engine = engine(checkpoint, how, prompt.len(), prompt.len() + text.len())?;
    let (chunk, many) = (engine.plan().extent.chunk, engine.plan().sequences);
    let mut out = Outcome { pinned: engine.plan().pinned(), ..Outcome::default() };
    let all = [prompt, text].concat();
    let (mut read, mut others) = (0, vec![0; many]);
    let mut pass = 0;
    while read < all.len() {
        // The one that is looked at changes neither its place nor its ids, but the company it has.
        let mine = (1 + pass % 3).min(all.len() - read).min(chunk + 1 - many.min(chunk));
        let mut shares = Vec::new();
        let mut ids = Vec::new();
        let mut left = chunk - mine;
        for (number, seen) in others.iter_mut().enumerate() {
            if number == many / 2 {
                shares.push(Share { sequence: number, positions: mine, wanted: mine });
                ids.extend_from_slice(&all[read..read + mine]);
                continue;
            }
            let n = ((number + pass) % 4).min(left).min(all.len() - *seen);
            if n == 0 {
                engine.reset_sequence(number)?;
                *seen = 0;
                continue;
            }
            shares.push(Share { sequence: number, positions: n, wanted: number % 2 });
            ids.extend((0..n).map(|i| all[(*seen + i + number) % all.len()]));
            (*seen, left) = (*seen + n, left - n);
        }
        let rows: usize = shares.iter().map(|s| s.wanted).sum();
        let mut logits = vec![0.0; rows * vocab];
        engine.step_many(&shares, &ids, &mut logits, &mut ())?;
        let before: usize = shares.iter().take_while(|s| s.sequence != many / 2).map(|s| s.wanted).sum();
        out.logits.extend_from_slice(&logits[before * vocab..(before + mine) * vocab]);
        read += mine;
        pass += 1;
    }
    let picks = out.logits.chunks_exact(vocab).skip(prompt.len() - 1).take(text.len());
    out.generated = picks.map(|row| argmax(row).expect("finite").expect("a vocabulary")).collect();
    out.stats = Some(engine.stats());
    Ok(out)
}

/// The same with files from anywhere.
pub(crate) fn run_from(
    source: Arc<dyn Source>,
    dir: &Path,
    how: &How,
    prompt: &[TokenId],
    max: usize,
) -> Result<Outcome, Error> {
    let checkpoint = open_from(source, dir, how)?;
    let vocab = checkpoint.config().vocab_size;
    let mut engine = engine(checkpoint, how, prompt.len(), prompt.len() + max)?;
    let chunk = engine.plan().extent.chunk;
    let mut out = Outcome { pinned: engine.plan().pinned(), ..Outcome::default() };
    let mut watch = Watch { off: prompt.len() > chunk, ..Watch::default() };
    let mut row = vec![0.0; vocab];
    for step in 0..=max {
        let mut ids = prompt.to_vec();
        if step > 0 {
            watch.off = true;
            ids.extend_from_slice(&out.generated);
            if how.incremental {
                ids = out.generated[step - 1..].to_vec();
            }
        }
        if step == 0 || !how.incremental {
            engine.reset()?;
        }
        let mut done = 0;
        for part in ids.chunks(chunk) {
            done += part.len();
            let rows = if step == 0 { part.len() } else { usize::from(done == ids.len()) };
            let mut logits = vec![0.0; rows * vocab];
            engine.step(part, &mut logits, &mut watch)?;
            out.logits.extend_from_slice(&logits);
            if rows > 0 {
                row.copy_from_slice(&logits[(rows - 1) * vocab..]);
            }
        }
        if step < max {
            out.generated.push(argmax(&row).expect("finite").expect("a vocabulary"));
        }
    }
    (out.hidden, out.routed, out.last) = (watch.hidden, watch.routed, watch.last);
    out.stats = Some(engine.stats());
    Ok(out)
}
