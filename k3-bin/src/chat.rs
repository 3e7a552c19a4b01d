//! `k3 chat`: a conversation, turn by turn or one answer.

use crate::args::{self, Chat, PLAN_CONTEXT};
use crate::fail::Failure;
use crate::keep::Keep;
use crate::line::{Line, Lines};
use crate::messages::{self, Ending, Own, Reader, Role, Talk};
use crate::output::{self, Output};
use crate::report::{self, Progress};
use crate::sampling::{Chosen, Picker};
use crate::signals;
use crate::start::{Options, Started, Wanted};
use crate::text::{self, Stops, Streamed};
use k3_core::chat::{Malformed, Start, TAG_BYTES, Tag, Thinking};
use k3_core::model::Observer;
use k3_core::tokenizer::Control;
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::engine::Engine;
use k3_platform::generate::{self, Finish, Generator, Listener, Outcome, Stage};
use k3_platform::vocabulary::Vocabulary;
use serde_json::{Value, json};
use std::io::{IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HELP: &str = "\
/help               this list
/reset              begins again; what /system said stays
/save FILE          writes the conversation as JSON
/load FILE          goes on from a conversation in JSON
/system TEXT        what the model is told first; without TEXT, nothing
/think off|EFFORT   whether and how much it thinks: on, low, high, max
/stats              tokens, times and memory
/quit               ends, as does Ctrl-D
Ctrl-C ends an answer, and a second one the program.
A change of /system or /think is read from the beginning with the next message.";

const AGAIN: &str = "Ctrl-C again, or /quit, ends the program";

/// Shows an answer while it comes: thinking on standard error, the rest on standard output.
struct Show {
    quiet: bool,
    hide: bool,
    dim: bool,
    stops: Stops,
    answer: Streamed,
    thinking: Streamed,
    /// Whether the last thing shown was thinking, and whether anything was.
    thinks: bool,
    shown: bool,
    /// Whoever read standard output went away.
    closed: bool,
}

impl Show {
    fn new(args: &Chat, stops: Stops) -> Self {
        Self {
            quiet: args.common.json,
            hide: args.hide_thinking || args.common.quiet,
            dim: std::io::stderr().is_terminal(),
            stops,
            answer: Streamed::default(),
            thinking: Streamed::default(),
            thinks: false,
            shown: false,
            closed: false,
        }
    }

    fn text(&mut self, tag: Tag, bytes: &[u8]) -> Result<(), Failure> {
        match tag {
            Tag::Think => {
                let ready = self.thinking.push(bytes);
                self.think(&ready);
                Ok(())
            }
            Tag::Response => {
                let ready = self.stops.push(bytes);
                let ready = self.answer.push(&ready);
                self.say(&ready)
            }
            _ => Ok(()),
        }
    }

    /// If standard error is closed there is nobody to be shown it.
    fn think(&mut self, bytes: &[u8]) {
        if self.quiet || self.hide || bytes.is_empty() {
            return;
        }
        let mut err = std::io::stderr().lock();
        if self.dim && !self.thinks {
            let _ = err.write_all(b"\x1b[2m");
        }
        self.thinks = true;
        let _ = err.write_all(bytes).and_then(|()| err.flush());
    }

    fn end_thinking(&mut self) {
        if self.thinks {
            self.thinks = false;
            let _ = std::io::stderr().write_all(if self.dim { b"\x1b[0m\n" } else { b"\n" });
        }
    }

    fn say(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        if self.quiet || bytes.is_empty() || self.closed {
            return Ok(());
        }
        self.end_thinking();
        self.shown = true;
        match output::stdout().write_all(bytes) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => self.closed = true,
            other => other.map_err(|e| Failure::output(Path::new("standard output"), &e))?,
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        let rest = self.thinking.finish();
        self.think(&rest);
        self.end_thinking();
        let rest = self.stops.finish();
        let mut rest = self.answer.push(&rest);
        rest.extend(self.answer.finish());
        self.say(&rest)?;
        if self.shown { self.say(b"\n") } else { Ok(()) }
    }
}

/// Watches an answer come into being.
struct Watch<'w, 'v> {
    vocabulary: &'w Vocabulary<'v>,
    reader: Reader<'w>,
    progress: Progress,
    show: Show,
    keep: &'w mut Keep,
    interrupt: Arc<AtomicBool>,
    turned: bool,
    reading: bool,
    max_tokens: usize,
    /// When the first layer of all was done.
    first_layer: Option<Instant>,
}

impl Observer for Watch<'_, '_> {
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        self.first_layer.get_or_insert_with(Instant::now);
        self.progress.layer(layer, running_sum);
    }
}

impl Listener for Watch<'_, '_> {
    type Error = Failure;

    fn begin(&mut self, stage: Stage) {
        self.progress.begin(match stage {
            Stage::Prompt { done, of } => format!("reading {done} of {of}"),
            Stage::Token { generated } => format!("token {} of {}", generated + 1, self.max_tokens),
        });
    }

    fn passed(&mut self, stage: Stage, _: &[f32]) -> Result<(), Failure> {
        (self.turned, self.reading) = match stage {
            Stage::Prompt { done, of } => (done == of, done < of),
            Stage::Token { .. } => (false, false),
        };
        Ok(())
    }

    fn settled(&mut self, engine: &mut Engine) -> Result<ControlFlow<Finish>, Failure> {
        self.keep.checkpoint(engine, self.turned);
        let end = self.reading && self.interrupt.load(Ordering::SeqCst);
        Ok(if end { ControlFlow::Break(Finish::Cancelled) } else { ControlFlow::Continue(()) })
    }

    fn token(&mut self, id: TokenId) -> Result<ControlFlow<Finish>, Failure> {
        self.progress.clear();
        let mut result = Ok(());
        let Self { reader, show, vocabulary, .. } = self;
        reader.push(vocabulary, id, |tag, bytes| {
            if result.is_ok() {
                result = show.text(tag, bytes);
            }
        });
        result?;
        Ok(if self.show.stops.found().is_some() {
            ControlFlow::Break(Finish::Stop)
        } else if self.interrupt.load(Ordering::SeqCst) {
            ControlFlow::Break(Finish::Cancelled)
        } else if self.show.closed {
            ControlFlow::Break(Finish::Length)
        } else {
            ControlFlow::Continue(())
        })
    }
}

/// What a turn gave.
struct Turn {
    outcome: Outcome,
    /// Ids of the whole prompt.
    prompt: usize,
    /// When its first layer was done.
    first_layer: Option<Instant>,
    message: Own,
    malformed: Option<Malformed>,
    stop_text: Option<Vec<u8>>,
    /// Whoever read standard output went away.
    closed: bool,
    saved: Result<(), Failure>,
}

impl Turn {
    fn finish(&self) -> &'static str {
        let calls = self.outcome.finish == Finish::Stop && !self.message.calls.is_empty();
        if calls { "tool_calls" } else { self.outcome.finish.name() }
    }
}

/// A conversation and the engine that has read some of it.
struct Conversation<'r> {
    args: &'r Chat,
    run: Started,
    vocabulary: Vocabulary<'r>,
    chosen: &'r Chosen,
    picker: Picker<'r>,
    generator: Generator,
    keep: Keep,
    context: usize,
    talk: Talk,
    thinking: Thinking,
    /// What the engine was given last, of which it has read the first [`Engine::position`].
    ids: Vec<TokenId>,
    /// Ids that say the first so many messages, and that the next turn goes on from. `None`: all is
    /// rendered anew.
    base: Option<(Vec<TokenId>, usize)>,
    /// Whether the session's new file is begun.
    begun: bool,
    turns: u32,
    generated: usize,
    read: usize,
    prefill: Duration,
    decode: Duration,
}

impl Conversation<'_> {
    /// The ids up to where the model goes on.
    fn prompt(&self) -> Result<Vec<TokenId>, Failure> {
        let Talk { messages, tools, .. } = &self.talk;
        let Some((base, said)) = &self.base else {
            return messages::render(&self.vocabulary, messages, tools.as_deref(), self.thinking, None);
        };
        let after = messages[..*said].iter().rev().find(|m| m.role == Role::Assistant);
        let calls = Own::new(Role::Assistant, Vec::new());
        let after = Some(after.unwrap_or(&calls));
        let mut ids = base.clone();
        ids.extend(messages::render(&self.vocabulary, &messages[*said..], None, self.thinking, after)?);
        Ok(ids)
    }

    /// Has the model answer what was said.
    fn answer(&mut self) -> Result<Turn, Failure> {
        let mut ids = self.prompt()?;
        let prompt = ids.len();
        if prompt > self.context {
            let message = format!("the conversation has {prompt} tokens, the context holds {}", self.context);
            return Err(Failure::usage(message, "raise --context, or begin again with /reset"));
        }
        let engine = &mut self.run.engine;
        let common = self.ids.iter().zip(&ids).take_while(|(a, b)| a == b).count().min(prompt - 1);
        if !self.begun || engine.is_torn() || engine.position() > common {
            self.keep.resume(engine, &ids, self.args.common.quiet)?;
            self.begun = true;
        }
        let config = *engine.checkpoint().config();
        let mut buffer = [0; TAG_BYTES];
        let start = if self.thinking == Thinking::Off { Start::Response } else { Start::Think };
        let mut watch = Watch {
            vocabulary: &self.vocabulary,
            reader: Reader::new(start, &mut buffer),
            progress: Progress::new(!self.args.common.quiet, config.num_hidden_layers),
            show: Show::new(self.args, self.chosen.stops()),
            keep: &mut self.keep,
            interrupt: Arc::clone(&self.run.stop),
            turned: false,
            reading: false,
            max_tokens: self.args.max_tokens.get(),
            first_layer: None,
        };
        let wanted = generate::Wanted {
            max_tokens: self.args.max_tokens.get(),
            context: self.context,
            stops: &|id| self.chosen.stops_at(id) || text::stops(id, &config),
            prompt_logits: false,
            incremental: true,
        };
        self.picker.forget();
        let outcome = self.generator.generate(engine, &mut ids, &wanted, &mut self.picker, &mut watch);
        watch.progress.clear();
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(failure) => {
                self.ids = ids;
                return Err(failure);
            }
        };
        watch.show.finish()?;
        let Watch { mut reader, show, first_layer, .. } = watch;
        let (ending, malformed) = (reader.ending(&self.vocabulary), reader.malformed);
        let mut message = match reader.done.pop() {
            Some(message) => message,
            None => reader.unfinished().unwrap_or_else(|| Own::new(Role::Assistant, Vec::new())),
        };
        let (stop_text, closed) = (show.stops.found().map(<[u8]>::to_vec), show.closed);
        if let Some(stop) = &stop_text
            && let Some(at) = message.content.windows(stop.len()).position(|part| part == stop)
        {
            message.content.truncate(at);
        }
        self.talk.messages.push(message.clone());
        // An answer of which not one id came is none.
        if outcome.generated == 0 && outcome.stop.is_none() {
            self.talk.messages.pop();
        }
        self.base = match ending {
            _ if stop_text.is_some() || outcome.generated == 0 && outcome.stop.is_none() => None,
            Ending::Lost => None,
            Ending::Ids { keep, more } => {
                let mut base = ids[..prompt + keep].to_vec();
                base.extend(more);
                Some((base, self.talk.messages.len()))
            }
        };
        self.ids = ids;
        self.turns += 1;
        self.generated += outcome.generated;
        self.read += outcome.prompt;
        self.prefill += outcome.prefill;
        self.decode += outcome.decode;
        let saved = self.keep.save(&mut self.run.engine, &self.ids, true);
        if saved.is_err() {
            self.begun = false;
        }
        Ok(Turn { outcome, prompt, first_layer, message, malformed, stop_text, closed, saved })
    }

    /// The answer as JSON, of a command that `started` then.
    fn json(&self, turn: &Turn, open: Duration, started: Instant) -> Value {
        let engine = &self.run.engine;
        let stats = engine.stats();
        let Turn { outcome, prompt, .. } = turn;
        let mut io = report::io(&stats, self.run.direct());
        io["bytes_per_token"] = json!(outcome.read_per_token());
        json!({
            "model": engine.checkpoint().dir().display().to_string(),
            "message": turn.message.json(),
            "finish_reason": turn.finish(),
            "stopped_by": {
                "id": outcome.stop.map(|id| id.0),
                "text": turn.stop_text.as_deref().map(String::from_utf8_lossy),
            },
            "malformed": turn.malformed.map(|fault| fault.to_string()),
            "generated_ids": self.ids[*prompt..].iter().map(|id| id.0).collect::<Vec<_>>(),
            "logprobs": self.picker.json(*prompt, &self.ids[*prompt..], Some(&self.vocabulary)),
            "usage": {
                "prompt_tokens": prompt,
                "reused_tokens": prompt - outcome.prompt,
                "generated_tokens": outcome.generated,
            },
            "memory": report::memory(engine.plan()),
            "io": io,
            "speculation": (self.args.speculate > 0).then(|| report::guesses(&outcome.guesses)),
            "seconds": {
                "total": started.elapsed().as_secs_f64(),
                "open": open.as_secs_f64(),
                "first_layer": turn.first_layer.map(|done| done.duration_since(started).as_secs_f64()),
                "prefill": outcome.prefill.as_secs_f64(),
                "per_token": outcome.per_token(),
                "waited_for_disk": stats.waited().as_secs_f64(),
            },
            "threads": engine.plan().extent.width,
            "backend": engine.backend().name(),
            "damaged_experts": report::damaged(&stats),
        })
    }

    fn stats(&self) -> String {
        let seconds = |d: Duration| d.as_secs_f64();
        format!(
            "{} turns: {} tokens read in {:.2} s, {} generated in {:.2} s; {} of {} positions of the context used",
            self.turns,
            self.read,
            seconds(self.prefill),
            self.generated,
            seconds(self.decode),
            self.ids.len(),
            self.context,
        )
    }

    /// Carries out a command of a dialogue. `Break` ends it.
    fn command(&mut self, line: &str) -> Result<ControlFlow<()>, Failure> {
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let named = |what: &str| {
            if rest.is_empty() {
                Err(Failure::usage(format!("{name} needs {what}"), "/help lists the commands"))
            } else {
                Ok(())
            }
        };
        match name {
            "/help" => note(HELP),
            "/quit" | "/exit" => return Ok(ControlFlow::Break(())),
            "/reset" => {
                self.talk.messages.retain(|m| m.role == Role::System);
                self.base = None;
            }
            "/save" => {
                named("a file")?;
                let (path, args) = (PathBuf::from(rest), self.args);
                let inputs = [("--session", args.session.session.as_ref()), ("--tools", args.tools.as_ref())];
                output::check(&[("/save", Some(&path))], &inputs, args.common.model.as_deref())?;
                save(&path, &self.talk.json())?;
            }
            "/load" => {
                named("a file")?;
                let talk = Talk::parse(&text::read(Path::new(rest), "/load", self.run.engine.plan().budget)?)?;
                self.thinking = talk.thinking.unwrap_or(self.thinking);
                self.talk = talk;
                self.base = None;
                note(&format!("{} messages", self.talk.messages.len()));
            }
            "/system" => {
                self.talk.messages.retain(|m| m.role != Role::System);
                if !rest.is_empty() {
                    self.talk.messages.insert(0, Own::new(Role::System, rest));
                }
                self.base = None;
            }
            "/think" => {
                named("off, on, low, high or max")?;
                self.thinking = args::thinking(rest)
                    .map_err(|e| Failure::usage(format!("/think {rest}: {e}"), "for example /think low"))?;
                self.base = None;
            }
            "/stats" => {
                note(&self.stats());
                report::resources(&self.run.engine.stats(), self.run.engine.plan());
            }
            _ => return Err(Failure::usage(format!("{name} is no command"), "/help lists the commands")),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Talks until somebody has enough.
    fn dialogue(&mut self) -> Result<u8, Failure> {
        let mut lines = Lines::new();
        let (mut interrupts, mut begun) = (0, false);
        loop {
            // Between answers a signal ends the program: there is nothing to lose. One that came before, while
            // the model was opened or an answer was told and kept, was seen by nobody so far. Ctrl-C is for the
            // answer; whoever terminates means the program.
            if self.run.stop.swap(true, Ordering::SeqCst) {
                if !begun || signals::terminated() {
                    return Ok(signals::code());
                }
                if interrupts == 0 {
                    interrupts = 1;
                    note(AGAIN);
                }
            }
            begun = true;
            let line = lines.next("> ").map_err(|e| Failure::output(Path::new("standard input"), &e))?;
            self.run.stop.store(false, Ordering::SeqCst);
            let line = match line {
                Line::End => return Ok(0),
                Line::Interrupt if interrupts > 0 => return Ok(130),
                Line::Interrupt => {
                    interrupts += 1;
                    note(AGAIN);
                    continue;
                }
                Line::Text(line) => line,
            };
            interrupts = 0;
            if line.trim().is_empty() {
                continue;
            }
            if line.starts_with('/') {
                match self.command(line.trim()) {
                    Ok(ControlFlow::Break(())) => return Ok(0),
                    Ok(ControlFlow::Continue(())) => {}
                    Err(failure) => {
                        failure.print();
                        // As for an answer: a pipe that nobody opened was waited for.
                        interrupts = u32::from(signals::stopped());
                    }
                }
                continue;
            }
            self.talk.messages.push(Own::new(Role::User, line));
            match self.answer() {
                // Nobody is there to hear more.
                Ok(turn) if turn.closed => return turn.saved.map(|()| 0),
                Ok(turn) => {
                    self.tell(&turn);
                    // Whoever ended the answer need not say twice more that they want to go.
                    interrupts = u32::from(turn.outcome.finish == Finish::Cancelled);
                    if let Err(failure) = turn.saved {
                        failure.print();
                    }
                }
                // What was asked can be asked again, shorter; everything else ends the program.
                Err(failure) if failure.code == crate::fail::USAGE => {
                    self.talk.messages.pop();
                    failure.print();
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    const fn is_dialogue(&self) -> bool {
        self.args.message.is_none() && self.args.messages.is_none()
    }

    /// Says what an answer does not show by itself.
    fn tell(&self, turn: &Turn) {
        for call in &turn.message.calls {
            note(&format!("the model calls {} with {}", call.name, call.arguments));
        }
        if let Some(fault) = turn.malformed {
            note(&format!("the answer is malformed: {fault}; what came before it was kept"));
        }
        match turn.outcome.finish {
            Finish::Length => note("the answer was cut at --max-tokens"),
            Finish::Context => note("the context is full: /reset begins again, --context makes more room"),
            Finish::Cancelled if self.is_dialogue() && !signals::terminated() => {
                note("the answer was ended; Ctrl-C again ends the program");
            }
            Finish::Cancelled => note("the answer was ended"),
            Finish::Stop => {}
        }
    }
}

/// A line on standard error. If that is closed there is nobody to tell.
fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Writes a conversation. A file that is there is replaced when the new one is complete.
fn save(path: &Path, json: &Value) -> Result<(), Failure> {
    let mut out = Output::create(path)?;
    let text = serde_json::to_string_pretty(json).unwrap_or_default() + "\n";
    out.write_all(text.as_bytes()).and_then(|()| out.finish()).map_err(|e| Failure::target(path, &e))
}

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn chat(args: &Chat) -> Result<u8, Failure> {
    let started = Instant::now();
    let single = args.message.is_some() || args.messages.is_some();
    if args.common.json && !single {
        return Err(Failure::usage("--json has no effect in a dialogue", "give --message TEXT or --messages FILE"));
    }
    let options = Options::new(&args.common)?.gentle();
    options.check_guesses(args.speculate)?;
    output::check(
        &[("--session", args.session.session.as_ref())],
        &[("--messages", args.messages.as_ref()), ("--tools", args.tools.as_ref())],
        args.common.model.as_deref(),
    )?;
    let budget = options.budget();
    let mut talk = match &args.messages {
        Some(path) => Talk::parse(&text::read(path, "--messages", budget)?)?,
        None => Talk::default(),
    };
    if let Some(path) = &args.tools {
        if talk.tools.is_some() {
            return Err(Failure::usage("--tools: --messages declares tools, too", "give them in one place"));
        }
        let tools = text::read(path, "--tools", budget)?;
        talk.tools = Some(String::from_utf8(tools).map_err(|e| {
            Failure::usage(format!("--tools: {}: {e}", path.display()), "it is a JSON list of declarations")
        })?);
    }
    if args.think.is_some() && talk.thinking.is_some() {
        return Err(Failure::usage("--think: --messages has a reasoning_effort, too", "give it in one place"));
    }
    let opened = options.open()?;
    let vocab = opened.checkpoint.config().vocab_size;
    let chosen = Chosen::new(&args.sampling, args.logprobs.logprobs, vocab, true)?;
    let Some(mut files) = text::vocabulary(&opened.checkpoint, true)? else {
        return Err(Failure::usage("there is no vocabulary", "put tiktoken.model into MODEL_DIR"));
    };
    let vocabulary = files.load()?;
    let keep = Keep::open(&args.session, &opened.checkpoint)?;
    let demo = opened.is_demo();
    if demo && !args.common.quiet {
        note("the demo is a base model: it continues text and has never seen a conversation, so it does not answer");
    }
    let mut thinking = args.think.or(talk.thinking).unwrap_or(if demo { Thinking::Off } else { Thinking::default() });

    // A session that goes on: its ids are the conversation.
    let mut base = None;
    if !keep.ids().is_empty() && args.messages.is_none() {
        let mut buffer = [0; TAG_BYTES];
        let mut reader = Reader::new(Start::Outside, &mut buffer);
        keep.ids().iter().for_each(|&id| reader.push(&vocabulary, id, |_, _| {}));
        let unfinished = reader.unfinished();
        if vocabulary.control(keep.ids()[0]) != Some(Control::OPEN) {
            let message = "the session's ids are no conversation".to_owned();
            return Err(Failure::usage(message, "k3 run made it: go on with k3 run, or name another file"));
        }
        talk.messages = std::mem::take(&mut reader.done);
        talk.messages.extend(unfinished);
        // An answer that is malformed is kept as far as it is one: what follows it is rendered anew.
        if let Ending::Ids { keep: kept, more } = reader.ending(&vocabulary) {
            base = Some(([&keep.ids()[..kept], &more].concat(), talk.messages.len()));
        }
        if args.think.is_none() {
            thinking = if reader.thought { Thinking::On(reader.effort) } else { Thinking::Off };
        }
        let head = args.think.is_some() || args.tools.is_some() || args.system.is_some();
        talk.tools = talk.tools.or(reader.tools);
        if head {
            base = None;
        }
    }
    if let Some(system) = &args.system {
        talk.messages.retain(|m| m.role != Role::System);
        talk.messages.insert(0, Own::new(Role::System, system.as_str()));
    }
    if let Some(message) = &args.message {
        talk.messages.push(Own::new(Role::User, message.as_bytes()));
    }
    if single && talk.messages.is_empty() {
        return Err(Failure::usage("there are no messages", "the model answers at least one"));
    }
    // What is refused is refused before anything large is there.
    let rendered = match &base {
        Some((ids, said)) => {
            let after = Own::new(Role::Assistant, Vec::new());
            ids.len() + messages::render(&vocabulary, &talk.messages[*said..], None, thinking, Some(&after))?.len()
        }
        None => messages::render(&vocabulary, &talk.messages, talk.tools.as_deref(), thinking, None)?.len(),
    };
    let needed = rendered.saturating_add(args.max_tokens.get() - 1);
    let context = args.context.unwrap_or(if single { needed } else { needed.max(PLAN_CONTEXT) });
    if rendered > context {
        let message = format!("the conversation has {rendered} tokens, the context holds {context}");
        return Err(Failure::usage(message, "raise --context, or say less"));
    }
    let run = opened.start(Wanted {
        context,
        prompt: if single { rendered } else { context },
        all_logits: false,
        tokenizer: vocabulary.bytes(),
        beside: chosen.bytes(vocab, args.max_tokens.get()).saturating_add(keep.bytes(context)),
        speculate: args.speculate,
        ..Wanted::default()
    })?;
    let open = started.elapsed();
    let picker = chosen.picker(vocab);
    let generator = Generator::new(&run.engine);
    let mut conversation = Conversation {
        args,
        run,
        vocabulary,
        chosen: &chosen,
        picker,
        generator,
        keep,
        context,
        talk,
        thinking,
        ids: Vec::new(),
        base,
        begun: false,
        turns: 0,
        generated: 0,
        read: 0,
        prefill: Duration::ZERO,
        decode: Duration::ZERO,
    };
    if !single {
        return conversation.dialogue();
    }
    let turn = conversation.answer()?;
    if args.common.json {
        report::print_json(&conversation.json(&turn, open, started))?;
    } else if !args.common.quiet {
        conversation.tell(&turn);
    }
    if !args.common.quiet {
        conversation.run.note_buffered();
        report::end(&turn.outcome, &conversation.run.engine.stats(), conversation.run.engine.plan());
    }
    report::damage(&conversation.run.engine.stats());
    turn.saved?;
    Ok(Started::code(turn.outcome.finish == Finish::Cancelled))
}
