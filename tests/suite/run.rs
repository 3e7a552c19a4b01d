//! One run of an engine, described by a value.

use k3_core::backend::Backend;
use k3_core::model::Observer;
use k3_core::ops::sample::argmax;
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::{Engine, Stats};
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode, Source};
use k3_platform::plan::Request;
use std::path::Path;
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
}

impl Default for How {
    fn default() -> Self {
        let backend = Backend::detect();
        Self { backend, threads: 2, chunk: None, budget: 1 << 30, mode: Mode::Direct, incremental: true }
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
    pub(crate) routed: Vec<(LayerIndex, Vec<u32>, Vec<f32>)>,
    pub(crate) last: Vec<f32>,
    pub(crate) stats: Option<Stats>,
    pub(crate) pinned: usize,
}

#[derive(Default)]
struct Watch {
    off: bool,
    hidden: Vec<Vec<f32>>,
    routed: Vec<(LayerIndex, Vec<u32>, Vec<f32>)>,
    last: Vec<f32>,
}

impl Observer for Watch {
    fn layer(&mut self, _: LayerIndex, running_sum: &[f32]) {
        if !self.off {
            self.hidden.push(running_sum.to_vec());
        }
    }

    fn routed(&mut self, layer: LayerIndex, ids: &[u32], weights: &[f32]) {
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
        policy: k3_platform::policy::Policy::default(),
        touched: 0,
    };
    let plan = checkpoint.plan(&request, 0)?;
    Engine::new(checkpoint, plan, how.backend, stop)
}

/// Runs a prompt and `max` greedy tokens.
pub(crate) fn run(dir: &Path, how: &How, prompt: &[TokenId], max: usize) -> Result<Outcome, Error> {
    run_from(Arc::new(Disk::new(how.mode)), dir, how, prompt, max)
}

/// The same with files from anywhere.
pub(crate) fn run_from(
    source: Arc<dyn Source>,
    dir: &Path,
    how: &How,
    prompt: &[TokenId],
    max: usize,
) -> Result<Outcome, Error> {
    let checkpoint = Checkpoint::open(dir, source)?;
    let vocab = checkpoint.config().vocab_size;
    let mut engine = engine(checkpoint, how, prompt.len(), prompt.len() + max)?;
    let chunk = engine.plan().extent.chunk;
    let mut out = Outcome { pinned: engine.plan().pinned, ..Outcome::default() };
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
