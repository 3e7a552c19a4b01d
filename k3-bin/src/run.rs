//! `k3 run`: a prompt in, its greedy continuation out.

use crate::args::{Io, Run};
use crate::fail::Failure;
use crate::npy::Npy;
use crate::report::{Progress, Times};
use crate::text::{self, Source, Streamed};
use crate::{fail, report};
use k3_core::backend::Backend;
use k3_core::ops::sample::argmax;
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::io::{Disk, Mode};
use k3_platform::memory::{default_threads, peak_rss};
use k3_platform::plan::Request;
use k3_platform::units;
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use serde_json::json;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// What is left free of the memory a machine has to give when --memory is auto: an eighth, at least
/// this (bytes).
const RESERVE: u64 = 512_000_000;

/// Threads that read, and so reads in flight.
const READERS: usize = 8;

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

/// SIGINT and SIGTERM: a flag the engine looks at, and the number for the exit code. The first one
/// stops the pass and prints what there is; a second one ends the process at once.
fn watch_signals(stop: &Arc<AtomicBool>) -> Result<Arc<AtomicUsize>, Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use signal_hook::flag;
    let number = Arc::new(AtomicUsize::new(0));
    for (signal, value) in [(SIGINT, 2), (SIGTERM, 15)] {
        // In this order: the shutdown looks at the flag before this signal sets it.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(stop))
            .and_then(|_| flag::register_usize(signal, Arc::clone(&number), value))
            .and_then(|_| flag::register(signal, Arc::clone(stop)))
            .map_err(|e| Failure { code: fail::IO, message: format!("signals: {e}"), hint: None })?;
    }
    Ok(number)
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

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn run(args: &Run) -> Result<u8, Failure> {
    let started = Instant::now();
    let backend = backend(&args.backend)?;
    let prompt = text::source(&args.prompt)?;
    let Some(dir) = args.model.as_deref().filter(|d| !d.as_os_str().is_empty()) else {
        return Err(Failure::usage("no model", "name a checkpoint directory, or set K3_MODEL"));
    };
    let budget = budget(&args.memory)?;
    let mode = if args.io == Io::Direct { Mode::Direct } else { Mode::Buffered };
    let disk = Disk::new(mode);
    let checkpoint = Checkpoint::open(dir, Arc::new(disk.clone()))?;
    let mut files = text::vocabulary(&checkpoint, matches!(prompt, Source::Text(_)))?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?;
    let prompt = match (prompt, &vocabulary) {
        (Source::Ids(ids), _) => ids,
        (Source::Text(bytes), Some(vocabulary)) => vocabulary.encode(&bytes, args.parse_special)?,
        (Source::Text(_), None) => Vec::new(),
    };
    let context = check_prompt(args, &prompt, checkpoint.config().vocab_size)?;
    let request = Request {
        budget,
        context,
        prompt: prompt.len(),
        chunk: args.chunk.map(|n| n.clamp(1, prompt.len())),
        threads: args.threads.map_or_else(default_threads, usize::from),
        readers: READERS,
        all_logits: args.dump_logits.is_some(),
    };
    let plan = checkpoint.plan(&request, vocabulary.as_ref().map_or(0, Vocabulary::bytes))?;
    if !args.quiet {
        report::plan(&plan, backend.name());
    }
    let mut engine = Engine::new(checkpoint, plan, backend)?;
    let signal = watch_signals(&engine.stop_flag())?;
    let out = Out { streamed: Streamed::default(), json: args.json, closed: false, text: Vec::new() };
    let times = Times { open: started.elapsed(), ..Times::default() };
    let mut session = Session { args, vocabulary, prompt, context, times, generated: Vec::new(), out };
    let finish = session.generate(&mut engine)?;
    session.times.total = started.elapsed();
    session.end(&engine, finish, disk.fell_back())?;
    Ok(match (finish, signal.load(Ordering::SeqCst)) {
        (Finish::Cancelled, number) => 128 + u8::try_from(number).unwrap_or(2),
        _ => 0,
    })
}

fn backend(name: &str) -> Result<Backend, Failure> {
    if name == "auto" {
        return Ok(Backend::detect());
    }
    Backend::by_name(name).ok_or_else(|| {
        let names: Vec<_> = Backend::available().map(Backend::name).collect();
        Failure::usage(
            format!("--backend {name}: not on this CPU"),
            format!("this CPU has: auto, {}", names.join(", ")),
        )
    })
}

fn budget(text: &str) -> Result<u64, Failure> {
    if text != "auto" {
        return units::parse(text).map_err(|e| Failure::usage(format!("--memory: {e}"), "write 2G, 12GiB or auto"));
    }
    let Some(available) = k3_platform::memory::available() else {
        return Err(Failure::usage("the system does not say how much memory is free", "give --memory SIZE"));
    };
    // What this process holds already is part of the budget it is about to be given.
    let held = k3_platform::memory::rss().unwrap_or(0);
    Ok(available.bytes.saturating_sub(RESERVE.max(available.bytes / 8)).saturating_add(held))
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

impl Session<'_> {
    fn generate(&mut self, engine: &mut Engine) -> Result<Finish, Failure> {
        let config = *engine.checkpoint().config();
        let (vocab, chunk) = (config.vocab_size, engine.plan().extent.chunk);
        let mut progress = Progress::new(!self.args.quiet, config.num_hidden_layers);
        let mut logits = vec![0.0; vocab * engine.plan().logit_rows];
        let mut dump = match &self.args.dump_logits {
            Some(path) => {
                Some((Npy::create(path, self.prompt.len(), vocab).map_err(|e| Failure::output(path, &e))?, path))
            }
            None => None,
        };
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
                progress.begin(format!("{what} {} of {of}", if fresh { done } else { self.generated.len() + 1 }));
                rows = match (&dump, done == ids.len()) {
                    (Some(_), _) if fresh => part.len(),
                    (_, last) => usize::from(last),
                };
                match engine.step(part, &mut logits[..rows * vocab], &mut progress) {
                    Err(Error::Stopped) => {
                        stopped = true;
                        break;
                    }
                    other => other?,
                }
                if let Some((npy, path)) = dump.as_mut().filter(|_| fresh) {
                    npy.write(&logits[..rows * vocab]).map_err(|e| Failure::output(path, &e))?;
                }
            }
            progress.clear();
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
            if !self.args.ignore_eos && self.stops(id, config.eos_token_id) {
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
        let rest = self.out.streamed.finish();
        self.out.write(&rest)?;
        self.out.write(if self.out.text.is_empty() { b"" } else { b"\n" })?;
        Ok(finish)
    }

    fn stops(&self, id: TokenId, eos: Option<u32>) -> bool {
        eos == Some(id.0) || self.vocabulary.as_ref().is_some_and(|v| v.is_stop(id))
    }

    /// Sends a token's bytes out, whole characters at a time.
    fn say(&mut self, id: TokenId) -> Result<(), Failure> {
        let Some(vocabulary) = &self.vocabulary else { return Ok(()) };
        let before = self.out.text.len();
        vocabulary.decode(id, &mut self.out.text);
        let ready = self.out.streamed.push(&self.out.text[before..]);
        self.out.write(&ready)
    }

    fn end(&mut self, engine: &Engine, finish: Finish, fell_back: bool) -> Result<(), Failure> {
        let (stats, plan) = (engine.stats(), engine.plan());
        let ids = |ids: &[TokenId]| ids.iter().map(|id| id.0).collect::<Vec<_>>();
        if self.args.json {
            let nan: Vec<_> = stats
                .experts
                .nan_scales
                .iter()
                .map(|((l, e), n)| json!({"layer": l.0, "expert": e.0, "nan_scale_bytes": n}))
                .collect();
            let object = json!({
                "model": engine.checkpoint().dir().display().to_string(),
                "prompt_ids": ids(&self.prompt),
                "generated_ids": ids(&self.generated),
                "text": String::from_utf8_lossy(&self.out.text),
                "finish_reason": finish.name(),
                "usage": {"prompt_tokens": self.prompt.len(), "generated_tokens": self.generated.len()},
                "memory": {
                    "budget_bytes": plan.budget,
                    "planned_bytes": plan.ledger.total(),
                    "peak_rss_bytes": peak_rss(),
                    "pinned_layers": plan.pinned,
                    "head_pinned": plan.head_pinned,
                    "arena_experts": plan.arena,
                    "chunk": plan.extent.chunk,
                    "context": plan.extent.context,
                },
                "io": {
                    "bytes_read": stats.bytes_read,
                    "trunk_hit_rate": stats.trunk_hit_rate(),
                    "expert_hit_rate": stats.expert_hit_rate(),
                    "direct": self.args.io == Io::Direct && !fell_back,
                },
                "seconds": {
                    "total": self.times.total.as_secs_f64(),
                    "open": self.times.open.as_secs_f64(),
                    "prefill": self.times.prefill.as_secs_f64(),
                    "per_token": self.times.per_token(),
                    "waited_for_disk": stats.waited().as_secs_f64(),
                },
                "threads": plan.extent.width,
                "backend": engine.backend().name(),
                "damaged_experts": nan,
            });
            let mut out = std::io::stdout().lock();
            match writeln!(out, "{object}").and_then(|()| out.flush()) {
                Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                    return Err(Failure::output(std::path::Path::new("standard output"), &e));
                }
                _ => {}
            }
        }
        if !self.args.quiet {
            if fell_back {
                let _ = writeln!(std::io::stderr(), "note: this file system has no O_DIRECT; reads were buffered");
            }
            report::end(&self.times, self.prompt.len(), self.generated.len(), &stats, plan);
        }
        Ok(())
    }
}
