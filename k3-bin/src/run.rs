//! `k3 run`: a prompt in, its continuation out.

use crate::args::Run;
use crate::fail::Failure;
use crate::keep::Keep;
use crate::ladder;
use crate::npy::Npy;
use crate::output::{self, Output};
use crate::report::{self, Progress};
use crate::sampling::{Chosen, Picker};
use crate::signals;
use crate::start::{Options, Started, Wanted};
use crate::text::{self, Source, Stops, Streamed};
use k3_core::model::Observer;
use k3_core::view::{ExpertId, LayerIndex, TokenId};
use k3_platform::engine::Engine;
use k3_platform::generate::{self, Finish, Generator, Listener, Outcome, Stage};
use k3_platform::trace;
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use serde_json::json;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Standard output while text streams to it.
struct Out {
    stops: Stops,
    streamed: Streamed,
    json: bool,
    /// Whoever read standard output went away: nothing more is computed, and that is no failure.
    closed: bool,
    /// All bytes of the text, for JSON.
    text: Vec<u8>,
}

impl Out {
    /// Takes the bytes of a token.
    fn say(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let ready = self.stops.push(bytes);
        self.text.extend_from_slice(&ready);
        let ready = self.streamed.push(&ready);
        self.write(&ready)
    }

    /// Nothing more comes.
    fn finish(&mut self) -> Result<(), Failure> {
        let rest = self.stops.finish();
        self.text.extend_from_slice(&rest);
        let mut rest = self.streamed.push(&rest);
        rest.extend(self.streamed.finish());
        self.write(&rest)?;
        self.write(if self.text.is_empty() { b"" } else { b"\n" })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.json || bytes.is_empty() || self.closed {
            return Ok(());
        }
        match output::stdout().write_all(bytes) {
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
    out: Output,
    step: u32,
    /// The first error of writing, told after the pass.
    failed: Option<std::io::Error>,
}

impl Tracer {
    fn new(path: &std::path::Path, mut out: Output, chosen: usize) -> Result<Self, Failure> {
        trace::begin(&mut out, chosen).map_err(|e| Failure::output(path, &e))?;
        Ok(Self { path: path.to_owned(), out, step: 0, failed: None })
    }

    fn passed(&mut self) -> Result<(), Failure> {
        self.step += 1;
        match self.failed.take() {
            Some(error) => Err(Failure::output(&self.path, &error)),
            None => Ok(()),
        }
    }

    fn finish(self) -> Result<(), Failure> {
        self.out.finish().map_err(|e| Failure::output(&self.path, &e))
    }
}

/// What a run watches its passes with, and where what they give goes.
struct Watch<'r> {
    progress: Progress,
    tracer: Option<Tracer>,
    dump: Option<Dump<'r>>,
    vocabulary: Option<Vocabulary<'r>>,
    out: Out,
    keep: Keep,
    /// Ends the text after the pass that runs, if nothing may be lost of it.
    interrupt: Option<Arc<AtomicBool>>,
    /// Whether the pass was the prompt's last.
    turned: bool,
    /// Whether it was one of the prompt's others.
    reading: bool,
    /// Tokens that were said.
    said: usize,
    max_tokens: usize,
    /// When the first layer of all was done.
    first_layer: Option<Instant>,
}

impl Watch<'_> {
    fn is_interrupted(&self) -> bool {
        self.interrupt.as_ref().is_some_and(|flag| flag.load(Ordering::SeqCst))
    }
}

impl Observer for Watch<'_> {
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        self.first_layer.get_or_insert_with(Instant::now);
        self.progress.layer(layer, running_sum);
    }

    fn routed(&mut self, layer: LayerIndex, ids: &[ExpertId], _: &[f32]) {
        if let Some(tracer) = &mut self.tracer
            && let Err(error) = trace::record(&mut tracer.out, tracer.step, layer, ids)
        {
            tracer.failed.get_or_insert(error);
        }
    }
}

impl Listener for Watch<'_> {
    type Error = Failure;

    fn begin(&mut self, stage: Stage) {
        self.progress.begin(match stage {
            Stage::Prompt { done, of } => format!("prompt {done} of {of}"),
            Stage::Token { generated } => format!("token {} of {}", generated + 1, self.max_tokens),
        });
    }

    fn passed(&mut self, stage: Stage, logits: &[f32]) -> Result<(), Failure> {
        if let Some(tracer) = &mut self.tracer {
            tracer.passed()?;
        }
        (self.turned, self.reading) = (false, false);
        let Stage::Prompt { done, of } = stage else { return Ok(()) };
        // One id is what a text that goes on has left over.
        (self.turned, self.reading) = (done == of && of > 1, done < of);
        if let Some((npy, path)) = &mut self.dump {
            npy.write(logits).map_err(|e| Failure::output(path, &e))?;
        }
        if done == of
            && let Some((npy, path)) = self.dump.take()
        {
            npy.finish().map_err(|e| Failure::output(path, &e))?;
        }
        Ok(())
    }

    fn settled(&mut self, engine: &mut Engine) -> Result<ControlFlow<Finish>, Failure> {
        self.keep.checkpoint(engine, self.turned);
        // After the prompt's last pass an id is picked first: then there is one that was not read, from which
        // the next run can go on.
        let end = self.reading && self.is_interrupted();
        Ok(if end { ControlFlow::Break(Finish::Cancelled) } else { ControlFlow::Continue(()) })
    }

    /// Sends a token's bytes out, whole characters at a time.
    fn token(&mut self, id: TokenId) -> Result<ControlFlow<Finish>, Failure> {
        self.progress.clear();
        self.said += 1;
        if let Some(vocabulary) = &self.vocabulary {
            let mut bytes = Vec::new();
            vocabulary.decode(id, &mut bytes);
            self.out.say(&bytes)?;
        } else {
            // Without a vocabulary the ids are all there is to print.
            let separator = if self.said > 1 { "," } else { "" };
            self.out.say(format!("{separator}{}", id.0).as_bytes())?;
        }
        Ok(if self.out.stops.found().is_some() {
            ControlFlow::Break(Finish::Stop)
        } else if self.is_interrupted() || (self.out.closed && signals::stopped()) {
            // A reader that was not waited for because of a signal did not go.
            ControlFlow::Break(Finish::Cancelled)
        } else if self.out.closed {
            // To whoever went away, the text is as long as they wanted it.
            ControlFlow::Break(Finish::Length)
        } else {
            ControlFlow::Continue(())
        })
    }
}

/// Wall time of a run, from its start.
#[derive(Debug, Clone, Copy)]
struct Times {
    /// Until the engine stood.
    open: Duration,
    /// Until the first layer was done.
    first_layer: Option<Duration>,
    total: Duration,
}

/// Where logits go, and its name.
type Dump<'p> = (Npy<f32>, &'p std::path::Path);

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn run(args: &Run) -> Result<u8, Failure> {
    let started = Instant::now();
    if let Some(parent) = args.rung_of {
        ladder::end_with(parent)?;
    }
    let options = Options::new(&args.common)?;
    options.check_guesses(args.speculate)?;
    let options = if args.session.session.is_some() { options.gentle() } else { options };
    output::check(
        &[
            ("--dump-logits", args.dump_logits.as_ref()),
            ("--trace", args.trace.as_ref()),
            ("--session", args.session.session.as_ref()),
        ],
        &[("--prompt-file", args.prompt.prompt_file.as_ref())],
        args.common.model.as_deref(),
    )?;
    // A target that cannot be written is refused before anything is read or computed.
    let dump = Output::optional(args.dump_logits.as_ref())?;
    let tracer = Output::optional(args.trace.as_ref())?;
    // Without a prompt a session goes on where it stopped.
    let resumes = args.session.session.is_some() && args.prompt.is_empty();
    let prompt = if resumes { Source::Ids(Vec::new()) } else { text::source(&args.prompt, options.budget())? };
    let opened = options.open()?;
    let vocab = opened.checkpoint.config().vocab_size;
    let mut files = text::vocabulary(&opened.checkpoint, matches!(prompt, Source::Text(_)))?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?;
    let chosen = Chosen::new(&args.sampling, args.logprobs.logprobs, vocab, vocabulary.is_some())?;
    let keep = Keep::open(&args.session, &opened.checkpoint)?;
    let prompt = match (prompt, &vocabulary) {
        _ if resumes => keep.ids().to_vec(),
        (Source::Ids(ids), _) => ids,
        (Source::Text(bytes), Some(vocabulary)) => vocabulary.encode(&bytes, args.parse_special)?,
        (Source::Text(_), None) => Vec::new(),
    };
    let context = check_prompt(args, &prompt, vocab)?;
    let dump = match args.dump_logits.as_ref().zip(dump) {
        Some((path, out)) => {
            let shape = [prompt.len(), vocab];
            Some((Npy::new(out, &shape).map_err(|e| Failure::output(path, &e))?, path.as_path()))
        }
        None => None,
    };
    let mut run = opened.start(Wanted {
        context,
        prompt: prompt.len(),
        all_logits: args.dump_logits.is_some(),
        tokenizer: vocabulary.as_ref().map_or(0, Vocabulary::bytes),
        speculate: args.speculate,
        beside: chosen.bytes(vocab, args.max_tokens).saturating_add(keep.bytes(context)),
        ..Wanted::default()
    })?;
    let config = *run.engine.checkpoint().config();
    let tracer = match args.trace.as_ref().zip(tracer) {
        Some((path, out)) => Some(Tracer::new(path, out, config.num_experts_per_token)?),
        None => None,
    };
    let out = Out {
        stops: chosen.stops(),
        streamed: Streamed::default(),
        json: args.common.json,
        closed: false,
        text: Vec::new(),
    };
    let progress = Progress::new(!args.common.quiet, config.num_hidden_layers);
    let mut watch = Watch {
        progress,
        tracer,
        dump,
        vocabulary,
        out,
        interrupt: keep.is_some().then(|| Arc::clone(&run.stop)),
        keep,
        turned: false,
        reading: false,
        said: 0,
        max_tokens: args.max_tokens,
        first_layer: None,
    };
    watch.keep.resume(&mut run.engine, &prompt, args.common.quiet)?;
    let open = started.elapsed();
    let wanted = generate::Wanted {
        max_tokens: args.max_tokens,
        context,
        stops: &|id| chosen.stops_at(id) || !args.ignore_eos && text::stops(id, &config),
        prompt_logits: args.dump_logits.is_some(),
        incremental: !args.no_incremental,
    };
    let (given, mut ids) = (prompt.len(), prompt);
    let mut picker = chosen.picker(vocab);
    let mut generator = Generator::new(&run.engine);
    let outcome = generator.generate(&mut run.engine, &mut ids, &wanted, &mut picker, &mut watch)?;
    watch.progress.clear();
    if let Some(tracer) = watch.tracer.take() {
        tracer.finish()?;
    }
    watch.out.finish()?;
    // What was read is kept before anybody is told that it was.
    let saved = watch.keep.save(&mut run.engine, &ids, false);
    let first_layer = watch.first_layer.map(|done| done.duration_since(started));
    let times = Times { open, first_layer, total: started.elapsed() };
    end(args, &run, ids.split_at(given), &outcome, times, &watch, &picker)?;
    saved?;
    Ok(Started::code(outcome.finish == Finish::Cancelled))
}

/// Refuses what no pass could run. Returns the context.
fn check_prompt(args: &Run, prompt: &[TokenId], vocab: usize) -> Result<usize, Failure> {
    if prompt.is_empty() && args.session.session.is_some() {
        let hint = "the session is new: begin it with --prompt, --prompt-file or --ids";
        return Err(Failure::usage("the prompt is empty", hint));
    }
    text::check_ids(prompt, vocab)?;
    // The last token generated is printed and never read.
    let needed = prompt.len().saturating_add(args.max_tokens.saturating_sub(1));
    let context = args.context.unwrap_or(needed);
    if prompt.len() > context {
        let message = format!("the prompt has {}, the context holds {context}", report::count(prompt.len(), "token"));
        return Err(Failure::usage(message, "raise --context, or shorten the prompt"));
    }
    Ok(context)
}

/// Prints what there is to say about a run.
fn end(
    args: &Run,
    run: &Started,
    (prompt, generated): (&[TokenId], &[TokenId]),
    outcome: &Outcome,
    times: Times,
    watch: &Watch<'_>,
    picker: &Picker<'_>,
) -> Result<(), Failure> {
    let engine = &run.engine;
    let stats = engine.stats();
    if args.common.json {
        let numbers = |ids: &[TokenId]| ids.iter().map(|id| id.0).collect::<Vec<_>>();
        let vocabulary = watch.vocabulary.as_ref();
        let stop_text = watch.out.stops.found().map(String::from_utf8_lossy);
        let mut io = report::io(&stats, run.direct());
        io["bytes_per_token"] = json!(outcome.read_per_token());
        report::print_json(&json!({
            "model": engine.checkpoint().dir().display().to_string(),
            "prompt_ids": numbers(prompt),
            "generated_ids": numbers(generated),
            "text": vocabulary.map(|_| String::from_utf8_lossy(&watch.out.text)),
            "finish_reason": outcome.finish.name(),
            "stopped_by": {"id": outcome.stop.map(|id| id.0), "text": stop_text},
            "logprobs": picker.json(prompt.len(), generated, vocabulary),
            "usage": {
                "prompt_tokens": prompt.len(),
                "reused_tokens": prompt.len() - outcome.prompt,
                "generated_tokens": generated.len(),
            },
            "memory": report::memory(engine.plan()),
            "io": io,
            "speculation": (args.speculate > 0).then(|| report::guesses(&outcome.guesses)),
            "seconds": {
                "total": times.total.as_secs_f64(),
                "open": times.open.as_secs_f64(),
                "first_layer": times.first_layer.map(|t| t.as_secs_f64()),
                "prefill": outcome.prefill.as_secs_f64(),
                "per_token": outcome.per_token(),
                "waited_for_disk": stats.waited().as_secs_f64(),
            },
            "threads": engine.plan().extent.width,
            "backend": engine.backend().name(),
            "damaged_experts": report::damaged(&stats),
        }))?;
    }
    if !args.common.quiet && args.rung_of.is_none() {
        run.note_buffered();
        report::end(outcome, &stats, engine.plan());
    }
    report::damage(&stats);
    Ok(())
}
