//! `k3 run`: a prompt in, its greedy continuation out.

use crate::args::Run;
use crate::fail::Failure;
use crate::npy::Npy;
use crate::report::{self, Progress, Times};
use crate::start::{Options, Started, Wanted};
use crate::text::{self, Source, Streamed};
use k3_core::config::ModelConfig;
use k3_core::model::Observer;
use k3_core::ops::sample::argmax;
use k3_core::tokenizer::{self, Control};
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::trace;
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use serde_json::json;
use std::io::Write as _;
use std::time::Instant;

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Length,
    Stop,
    Context,
    Cancelled,
}

impl Finish {
    const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
            Self::Context => "context",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Everything a run needs besides the engine.
struct Session<'r> {
    args: &'r Run,
    vocabulary: Option<Vocabulary<'r>>,
    prompt: Vec<TokenId>,
    context: usize,
    times: Times,
    generated: Vec<TokenId>,
    out: Out,
}

/// Standard output while text streams to it.
struct Out {
    streamed: Streamed,
    json: bool,
    /// Whoever read standard output went away: nothing more is computed, and that is no failure.
    closed: bool,
    /// All bytes of the text, for JSON.
    text: Vec<u8>,
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.json || bytes.is_empty() || self.closed {
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        match out.write_all(bytes).and_then(|()| out.flush()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => self.closed = true,
            Err(e) => return Err(Failure::output(std::path::Path::new("standard output"), &e)),
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Records the experts that passes ask for. What a run that was stopped has recorded is a trace too.
struct Tracer {
    path: std::path::PathBuf,
    out: std::io::BufWriter<std::fs::File>,
    step: u32,
    /// The first error of writing, told after the pass.
    failed: Option<std::io::Error>,
}

impl Tracer {
    fn create(path: &std::path::Path, chosen: usize) -> Result<Self, Failure> {
        let out = std::fs::File::create(path).map_err(|e| Failure::target(path, &e))?;
        let mut out = std::io::BufWriter::new(out);
        trace::begin(&mut out, chosen).map_err(|e| Failure::target(path, &e))?;
        Ok(Self { path: path.to_owned(), out, step: 0, failed: None })
    }

    fn passed(&mut self) -> Result<(), Failure> {
        self.step += 1;
        match self.failed.take() {
            Some(error) => Err(Failure::output(&self.path, &error)),
            None => Ok(()),
        }
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|e| Failure::output(&self.path, &e))
    }
}

/// What a run watches its passes with.
struct Watch {
    progress: Progress,
    tracer: Option<Tracer>,
}

impl Observer for Watch {
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        self.progress.layer(layer, running_sum);
    }

    fn routed(&mut self, layer: LayerIndex, ids: &[u32], _: &[f32]) {
        if let Some(tracer) = &mut self.tracer
            && let Err(error) = trace::record(&mut tracer.out, tracer.step, layer, ids)
        {
            tracer.failed.get_or_insert(error);
        }
    }
}

/// Where logits go, and its name.
type Dump<'p> = (Npy<f32>, &'p std::path::Path);

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn run(args: &Run) -> Result<u8, Failure> {
    let started = Instant::now();
    let options = Options::new(&args.common)?;
    let files = [&args.prompt.prompt_file, &args.dump_logits, &args.trace];
    for (i, a) in files.iter().enumerate() {
        for b in &files[i + 1..] {
            if let (Some(a), Some(b)) = (a, b)
                && (a == b || text::same_file(a, b))
            {
                let message = format!("{} is named twice, once to be written", b.display());
                return Err(Failure::usage(message, "--prompt-file, --dump-logits and --trace take different files"));
            }
        }
    }
    let prompt = text::source(&args.prompt, options.budget())?;
    let opened = options.open()?;
    let mut files = text::vocabulary(&opened.checkpoint, matches!(prompt, Source::Text(_)))?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?;
    let prompt = match (prompt, &vocabulary) {
        (Source::Ids(ids), _) => ids,
        (Source::Text(bytes), Some(vocabulary)) => vocabulary.encode(&bytes, args.parse_special)?,
        (Source::Text(_), None) => Vec::new(),
    };
    let context = check_prompt(args, &prompt, opened.checkpoint.config().vocab_size)?;
    // A target that cannot be written is refused before anything is computed.
    let dump = match &args.dump_logits {
        Some(path) => {
            let shape = [prompt.len(), opened.checkpoint.config().vocab_size];
            Some((Npy::create(path, &shape).map_err(|e| Failure::target(path, &e))?, path.as_path()))
        }
        None => None,
    };
    let mut run = opened.start(Wanted {
        context,
        prompt: prompt.len(),
        all_logits: args.dump_logits.is_some(),
        tokenizer: vocabulary.as_ref().map_or(0, Vocabulary::bytes),
    })?;
    // A run that is refused leaves an older trace as it is.
    let tracer = match &args.trace {
        Some(path) => Some(Tracer::create(path, run.engine.checkpoint().config().num_experts_per_token)?),
        None => None,
    };
    let out = Out { streamed: Streamed::default(), json: args.common.json, closed: false, text: Vec::new() };
    let times = Times { open: started.elapsed(), ..Times::default() };
    let mut session = Session { args, vocabulary, prompt, context, times, generated: Vec::new(), out };
    let finish = session.generate(&mut run.engine, dump, tracer)?;
    session.times.total = started.elapsed();
    session.end(&run, finish)?;
    Ok(run.code(finish == Finish::Cancelled))
}

/// Refuses what no pass could run. Returns the context.
fn check_prompt(args: &Run, prompt: &[TokenId], vocab: usize) -> Result<usize, Failure> {
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt is empty", "the model continues text: give it at least one token"));
    }
    if let Some((i, id)) = prompt.iter().enumerate().find(|(_, id)| id.get() >= vocab) {
        let hint = format!("ids are 0 to {}", vocab - 1);
        return Err(Failure::usage(format!("token id {} at place {i} is not in the vocabulary", id.0), hint));
    }
    // The last token generated is printed and never read.
    let needed = prompt.len().saturating_add(args.max_tokens.saturating_sub(1));
    let context = args.context.unwrap_or(needed);
    if prompt.len() > context {
        let message = format!("the prompt has {} tokens, the context holds {context}", prompt.len());
        return Err(Failure::usage(message, "raise --context, or shorten the prompt"));
    }
    Ok(context)
}

/// Whether an id ends a text: the config's, or one of the two that the control block has for it. The
/// block is the last 256 ids, whether or not the vocabulary's file is there.
fn stops(id: TokenId, config: &ModelConfig) -> bool {
    let base = config.vocab_size.saturating_sub(tokenizer::BLOCK as usize);
    let distance = id.get().checked_sub(base).and_then(|d| u8::try_from(d).ok()).map(Control::at);
    config.eos_token_id == Some(id.0) || matches!(distance, Some(Control::EOS | Control::END_OF_MSG))
}

impl Session<'_> {
    fn generate(
        &mut self,
        engine: &mut Engine,
        mut dump: Option<Dump<'_>>,
        tracer: Option<Tracer>,
    ) -> Result<Finish, Failure> {
        let config = *engine.checkpoint().config();
        let (vocab, chunk) = (config.vocab_size, engine.plan().extent.chunk);
        let mut watch = Watch { progress: Progress::new(!self.args.common.quiet, config.num_hidden_layers), tracer };
        let mut logits = vec![0.0; vocab * engine.plan().logit_rows];
        let finish = loop {
            let started = Instant::now();
            let fresh = self.generated.is_empty();
            let again = fresh || self.args.no_incremental;
            if again {
                engine.reset()?;
            }
            let ids: Vec<TokenId> = match self.generated.last() {
                Some(&last) if !again => vec![last],
                _ => [&self.prompt[..], &self.generated[..]].concat(),
            };
            let what = if fresh { "prompt" } else { "token" };
            let mut rows = 0;
            let mut done = 0;
            let mut stopped = false;
            for part in ids.chunks(chunk) {
                done += part.len();
                let of = if fresh { ids.len() } else { self.args.max_tokens };
                watch.progress.begin(format!("{what} {} of {of}", if fresh { done } else { self.generated.len() + 1 }));
                rows = match (&dump, done == ids.len()) {
                    (Some(_), _) if fresh => part.len(),
                    (_, last) => usize::from(last),
                };
                match engine.step(part, &mut logits[..rows * vocab], &mut watch) {
                    Err(Error::Stopped) => {
                        stopped = true;
                        break;
                    }
                    other => other?,
                }
                if let Some(tracer) = &mut watch.tracer {
                    tracer.passed()?;
                }
                if let Some((npy, path)) = dump.as_mut().filter(|_| fresh) {
                    npy.write(&logits[..rows * vocab]).map_err(|e| Failure::output(path, &e))?;
                }
            }
            watch.progress.clear();
            if stopped {
                break Finish::Cancelled;
            }
            if fresh {
                self.times.prefill = started.elapsed();
                if let Some((npy, path)) = dump.take() {
                    npy.finish().map_err(|e| Failure::output(path, &e))?;
                }
            } else {
                self.times.decode += started.elapsed();
                self.times.decoded += 1;
            }
            if self.args.max_tokens == 0 {
                break Finish::Length;
            }
            let last = &logits[(rows.max(1) - 1) * vocab..rows.max(1) * vocab];
            // The pass has refused logits that are not finite; this is the same refusal once more.
            let id = argmax(last).ok().flatten().ok_or(Error::Order)?;
            if !self.args.ignore_eos && stops(id, &config) {
                break Finish::Stop;
            }
            self.generated.push(id);
            self.say(id)?;
            if self.out.closed || self.generated.len() == self.args.max_tokens {
                break Finish::Length;
            }
            if self.prompt.len() + self.generated.len() > self.context {
                break Finish::Context;
            }
        };
        if let Some(tracer) = watch.tracer {
            tracer.finish()?;
        }
        let rest = self.out.streamed.finish();
        self.out.write(&rest)?;
        self.out.write(if self.out.text.is_empty() { b"" } else { b"\n" })?;
        Ok(finish)
    }

    /// Sends a token's bytes out, whole characters at a time.
    fn say(&mut self, id: TokenId) -> Result<(), Failure> {
        let Some(vocabulary) = &self.vocabulary else {
            // Without a vocabulary the ids are all there is to print.
            let separator = if self.generated.len() > 1 { "," } else { "" };
            let text = format!("{separator}{}", id.0);
            self.out.text.extend_from_slice(text.as_bytes());
            return self.out.write(text.as_bytes());
        };
        let before = self.out.text.len();
        vocabulary.decode(id, &mut self.out.text);
        let ready = self.out.streamed.push(&self.out.text[before..]);
        self.out.write(&ready)
    }

    fn end(&mut self, run: &Started, finish: Finish) -> Result<(), Failure> {
        let engine = &run.engine;
        let stats = engine.stats();
        let ids = |ids: &[TokenId]| ids.iter().map(|id| id.0).collect::<Vec<_>>();
        if self.args.common.json {
            report::print_json(&json!({
                "model": engine.checkpoint().dir().display().to_string(),
                "prompt_ids": ids(&self.prompt),
                "generated_ids": ids(&self.generated),
                "text": self.vocabulary.as_ref().map(|_| String::from_utf8_lossy(&self.out.text)),
                "finish_reason": finish.name(),
                "usage": {"prompt_tokens": self.prompt.len(), "generated_tokens": self.generated.len()},
                "memory": report::memory(engine.plan()),
                "io": report::io(&stats, run.direct()),
                "seconds": {
                    "total": self.times.total.as_secs_f64(),
                    "open": self.times.open.as_secs_f64(),
                    "prefill": self.times.prefill.as_secs_f64(),
                    "per_token": self.times.per_token(),
                    "waited_for_disk": stats.waited().as_secs_f64(),
                },
                "threads": engine.plan().extent.width,
                "backend": engine.backend().name(),
                "damaged_experts": report::damaged(&stats),
            }))?;
        }
        if !self.args.common.quiet {
            run.note_buffered();
            report::end(&self.times, self.prompt.len(), self.generated.len(), &stats, engine.plan());
        }
        report::damage(&stats);
        Ok(())
    }
}
