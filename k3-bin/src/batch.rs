//! `k3 batch`: a file of prompts in, a file of texts out, many at the same time.

use crate::args::Batch as Args;
use crate::fail::{self, Failure};
use crate::lines::{self, Defaults, Given, Line, Unlike, Written};
use crate::output;
use crate::report::{self, Progress};
use crate::sampling::{Chosen, Picker};
use crate::start::{Options, Started, TEXT_BYTES, Wanted};
use crate::text::{self, Stops};
use k3_core::model::Observer;
use k3_core::ops::sample::Candidate;
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::batch::{self, Listener, Outcome, Prompt, Text};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::generate::Finish;
use k3_platform::pack::Digests;
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What is known of a line besides its prompt, which is the engine's.
struct Job {
    /// The line's number in the file.
    line: usize,
    id: Value,
    /// Ids of the prompt.
    prompt: usize,
    max_tokens: usize,
    /// Lines without options of their own share it.
    chosen: Arc<Chosen>,
}

impl Job {
    /// Tokens of the text that have room in a context.
    fn tokens(&self, context: usize) -> usize {
        self.max_tokens.min(context.saturating_sub(self.prompt).saturating_add(1))
    }
}

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn batch(args: &Args) -> Result<u8, Failure> {
    let started = Instant::now();
    let options = Options::new(&args.common)?;
    output::check(
        &[("--output", Some(&args.output))],
        &[("--input", Some(&args.input))],
        args.common.model.as_deref(),
    )?;
    let bytes = text::read(&args.input, "--input", options.budget())?;
    lines::check_number(&args.input, &bytes, options.budget())?;
    let Args { max_tokens, ref sampling, logprobs, .. } = *args;
    let lines = lines::read(&args.input, &bytes, &Defaults { max_tokens, sampling: sampling.clone(), logprobs })?;
    let opened = options.open()?;
    let texts = lines.iter().any(|l| matches!(l.prompt, Given::Text(_)));
    let mut files = text::vocabulary(&opened.checkpoint, texts)?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?;
    let header = header(args, &bytes, &opened.checkpoint)?;
    // What was taken apart leaves gaps, which the allocator keeps.
    let gaps = bytes.len() as u64;
    drop(bytes);
    let (mut todo, mut left) = jobs(args, lines, vocabulary.as_ref(), &opened.checkpoint)?;
    let held = gaps.saturating_add(held(&todo));
    let (mut out, done) = Results::open(&args.output, &header, &todo)?;
    let before = done.iter().filter(|done| **done).count();
    let remains = || {
        let mut done = done.iter();
        move || done.next().is_some_and(|done| !done)
    };
    let (mut job_remains, mut prompt_remains) = (remains(), remains());
    todo.retain(|_| job_remains());
    left.retain(|_| prompt_remains());

    // The last token generated is written and never read.
    let needed = |job: &Job| job.prompt.saturating_add(job.max_tokens.saturating_sub(1));
    let context = args.context.unwrap_or_else(|| todo.iter().map(needed).max().unwrap_or(1));
    let vocab = opened.checkpoint.config().vocab_size;
    let candidates = todo.iter().map(|job| job.chosen.candidates(vocab)).max().unwrap_or(0);
    // Of texts that run at the same time each remembers its own; one at a time becomes JSON.
    let told: Vec<_> = todo.iter().map(|job| told(job, context)).collect();
    let mut remembered: Vec<u64> = told.iter().map(|told| told.0).collect();
    remembered.sort_unstable_by(|a, b| b.cmp(a));
    let json = told.iter().map(|told| told.1).max().unwrap_or(0);
    let sequences = left.len().min(args.in_flight.map_or(usize::MAX, std::num::NonZeroUsize::get)).max(1);
    let run = opened.start(Wanted {
        context,
        prompt: todo.iter().map(|job| job.prompt).sum::<usize>().max(1),
        tokenizer: vocabulary.as_ref().map_or(0, Vocabulary::bytes),
        sequences,
        beside: ((candidates * size_of::<Candidate>()) as u64).saturating_add(json).saturating_add(held),
        beside_each: std::array::from_fn(|i| remembered.get(i).copied().unwrap_or(0)),
        ..Wanted::default()
    });
    let mut run = run.and_then(|run| out.begin(&header).map(|()| run)).inspect_err(|_| out.abandon())?;
    let config = *run.engine.checkpoint().config();
    let open = started.elapsed();
    let progress = Progress::new(!args.common.quiet, config.num_hidden_layers);
    let mut watch = Watch {
        progress,
        out: &mut out,
        vocabulary,
        jobs: &todo,
        writing: HashMap::new(),
        scratch: vec![Candidate::EMPTY; candidates],
        ended: 0,
        failed: Vec::new(),
    };
    let stops = |number: usize, id| {
        todo.get(number).is_some_and(|job| job.chosen.stops_at(id)) || !args.ignore_eos && text::stops(id, &config)
    };
    let outcome = batch::run(&mut run.engine, left, &batch::Wanted { context, stops: &stops }, &mut watch)?;
    watch.progress.clear();
    let failed = watch.failed;
    let total = started.elapsed();

    let stats = run.engine.stats();
    if args.common.json {
        let Outcome { ended, passes, read, generated, in_flight, .. } = outcome;
        report::print_json(&json!({
            "model": run.engine.checkpoint().dir().display().to_string(),
            "prompts": done.len(),
            "done_before": before,
            "ended": ended,
            "failed": failed.iter().map(|(job, error)| {
                json!({"line": job.line, "id": job.id, "error": error.message})
            }).collect::<Vec<_>>(),
            "cancelled": outcome.cancelled,
            "usage": {"read_tokens": read, "generated_tokens": generated},
            "passes": passes,
            "in_flight": in_flight,
            "memory": report::memory(run.engine.plan()),
            "io": report::io(&stats, run.direct()),
            "seconds": {
                "total": total.as_secs_f64(),
                "open": open.as_secs_f64(),
                "generating": outcome.took.as_secs_f64(),
                "waited_for_disk": stats.waited().as_secs_f64(),
            },
            "threads": run.engine.plan().extent.width,
            "backend": run.engine.backend().name(),
            "damaged_experts": report::damaged(&stats),
        }))?;
    }
    if !args.common.quiet {
        run.note_buffered();
        end(&outcome, before, &run);
    }
    report::damage(&stats);
    for (job, error) in &failed {
        let id = lines::shown(&job.id);
        let message = format!("{}: line {} (id {id}): {}", args.input.display(), job.line, error.message);
        Failure { code: error.code, message, hint: None }.print();
    }
    if let (Some((_, error)), false) = (failed.first(), outcome.cancelled) {
        let message = format!("{} of {} texts could not be made", failed.len(), todo.len());
        let hint = "the others are there; the same command tries these again".to_owned();
        return Err(Failure { code: error.code, message, hint: Some(hint) });
    }
    Ok(Started::code(outcome.cancelled))
}

/// Prints what there is to say about a batch.
fn end(outcome: &Outcome, before: usize, run: &Started) {
    let Outcome { ended, passes, generated, in_flight, took, .. } = *outcome;
    let before = if before > 0 { format!(", {before} were there already") } else { String::new() };
    #[expect(clippy::cast_precision_loss, reason = "for people")]
    let each = if generated > 0 { format!("{:.3} s", took.as_secs_f64() / generated as f64) } else { "-".to_owned() };
    let _ = writeln!(
        std::io::stderr(),
        "{ended} texts of {generated} tokens in {passes} passes, at most {in_flight} at once, {each} per token{before}",
    );
    report::resources(&run.engine.stats(), run.engine.plan());
}

/// Bytes that all lines take until the end, and their prompts until their turn.
fn held(jobs: &[Job]) -> u64 {
    let mut last = None;
    jobs.iter().fold(0u64, |sum, job| {
        // Those that share options lie anywhere; whoever counts them twice plans a little more.
        let own = last.replace(Arc::as_ptr(&job.chosen)) != Some(Arc::as_ptr(&job.chosen));
        let options = if own { lines::OPTIONS_BYTES.saturating_add(job.chosen.held()) } else { 0 };
        let ids = size_of::<TokenId>() as u64 * job.prompt as u64;
        sum.saturating_add(lines::LINE_BYTES).saturating_add(ids).saturating_add(options)
    })
}

/// Bytes that a text holds while it is written, and those of its log-probabilities' JSON when it is.
fn told(job: &Job, context: usize) -> (u64, u64) {
    let tokens = job.tokens(context);
    let (remembered, json) = job.chosen.told(tokens);
    // A list that grows may be there twice.
    let text = TEXT_BYTES.saturating_mul(tokens as u64);
    let again = 2 * size_of::<TokenId>() as u64 * job.prompt as u64;
    (remembered.saturating_add(text).saturating_add(again), json)
}

/// The lines, and their prompts as ids. Refuses what no pass could run.
fn jobs(
    args: &Args,
    lines: Vec<Line>,
    vocabulary: Option<&Vocabulary<'_>>,
    checkpoint: &Checkpoint,
) -> Result<(Vec<Job>, Vec<Prompt>), Failure> {
    let vocab = checkpoint.config().vocab_size;
    // What is wrong with the command's own options is no line's fault.
    let shared = Arc::new(Chosen::new(&args.sampling, args.logprobs, vocab, vocabulary.is_some())?);
    let (mut jobs, mut prompts) = (Vec::with_capacity(lines.len()), Vec::with_capacity(lines.len()));
    let mut faults = Vec::new();
    for Line { number, id, prompt, max_tokens, sampling, logprobs } in lines {
        let mut ids = match (prompt, vocabulary) {
            (Given::Ids(ids), _) => ids,
            (Given::Text(text), Some(vocabulary)) => vocabulary.encode(text.as_bytes(), args.parse_special)?,
            (Given::Text(_), None) => Vec::new(),
        };
        if ids.is_empty() {
            faults.push(format!("line {number}: the prompt is empty"));
        } else if let Some(id) = ids.iter().find(|id| id.get() >= vocab) {
            faults.push(format!("line {number}: token id {} is not in the vocabulary of {vocab} ids", id.0));
        } else if let Some(context) = args.context.filter(|c| ids.len() > *c) {
            let tokens = ids.len();
            faults.push(format!("line {number}: the prompt has {tokens} tokens, --context holds {context}"));
        }
        ids.shrink_to_fit();
        let chosen = if sampling.is_none() && logprobs == args.logprobs {
            Ok(Arc::clone(&shared))
        } else {
            let sampling = sampling.as_deref().unwrap_or(&args.sampling);
            Chosen::new(sampling, logprobs, vocab, vocabulary.is_some()).map(Arc::new)
        };
        match chosen {
            Ok(chosen) => jobs.push(Job { line: number, id, prompt: ids.len(), max_tokens, chosen }),
            // The names of options are those of the fields.
            Err(failure) => faults.push(format!("line {number}: {}", failure.message.replace("--", ""))),
        }
        prompts.push(Prompt { ids, max_tokens });
    }
    lines::refuse(&args.input, &faults)?;
    Ok((jobs, prompts))
}

/// FNV-1a, 64 bits: against mistakes, not against malice.
fn digest<'b>(parts: impl IntoIterator<Item = &'b [u8]>) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        for byte in part.iter().chain(&[0xff]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}

/// How the first line of an output begins that knows its model by config and lengths alone: those of another
/// training are the same.
const BEFORE: &[u8] = b"{\"k3_batch\":1,";

/// The first line of the output: everything that a text depends on. Budget, threads, kernels and the rest
/// are not among it.
fn header(args: &Args, input: &[u8], checkpoint: &Checkpoint) -> Result<String, Failure> {
    let Digests { config, headers, samples } = Digests::of(checkpoint)?;
    let object = json!({
        "k3_batch": 2,
        "input": digest([input]),
        "model": digest([&config[..], &headers, &samples]),
        "max_tokens": args.max_tokens,
        "context": args.context,
        "ignore_eos": args.ignore_eos,
        "parse_special": args.parse_special,
        "sampling": digest([format!("{:?} {:?}", args.sampling, args.logprobs).as_bytes()]),
    });
    Ok(format!("{object}\n"))
}

/// The output file.
struct Results {
    file: File,
    path: std::path::PathBuf,
    /// Whether it was not there before.
    created: bool,
    /// Whether its first line is there.
    begun: bool,
}

impl Results {
    /// Opens the output, or creates it. What an interrupted batch has left of it stays, and says which
    /// prompts are done; a line that was broken off is taken away.
    fn open(path: &Path, header: &str, jobs: &[Job]) -> Result<(Self, Vec<bool>), Failure> {
        let failed = |e: &std::io::Error| Failure::target(path, e);
        let mut options = File::options();
        let (mut file, created) = match options.read(true).write(true).create_new(true).open(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                (options.create_new(false).create(true).truncate(false).open(path).map_err(|e| failed(&e))?, false)
            }
            other => (other.map_err(|e| failed(&e))?, true),
        };
        if !file.metadata().map_err(|e| failed(&e))?.is_file() {
            return Err(Failure::usage(
                format!("{}: this is no regular file", path.display()),
                "--output takes a file that a batch can be continued from",
            ));
        }
        if file.try_lock().is_err() {
            let message = format!("{}: another batch is writing this file", path.display());
            return Err(Failure::usage(message, "wait for it, or name another file"));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| failed(&e))?;
        let Written { whole, done } = Written::parse(&bytes, header.as_bytes(), jobs.iter().map(|job| &job.id))
            .map_err(|unlike| match unlike {
                Unlike::Foreign if bytes.starts_with(BEFORE) => before(path),
                Unlike::Foreign => foreign(path),
                Unlike::Line(line) => Failure {
                    code: fail::DAMAGED,
                    message: format!("{}: line {line} is not a result of this batch", path.display()),
                    hint: Some("the file was changed since: name another one, or take the line out".to_owned()),
                },
            })?;
        file.set_len(whole as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(|e| failed(&e))?;
        Ok((Self { file, path: path.to_owned(), created, begun: whole > 0 }, done))
    }

    /// Writes the first line, unless it is there.
    fn begin(&mut self, header: &str) -> Result<(), Failure> {
        if !self.begun {
            self.file.write_all(header.as_bytes()).map_err(|e| Failure::output(&self.path, &e))?;
        }
        Ok(())
    }

    /// A batch that does not run leaves no file that was not there.
    fn abandon(&self) {
        if self.created {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    /// Appends a line, whole and lasting.
    fn append(&mut self, object: &Value) -> Result<(), Failure> {
        let line = format!("{object}\n");
        let written = self.file.write_all(line.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| Failure::output(&self.path, &e))
    }
}

fn before(path: &Path) -> Failure {
    Failure::usage(
        format!("{}: this file does not say which weights its texts are of", path.display()),
        "an older k3 began it, and can end it; or name another file",
    )
}

fn foreign(path: &Path) -> Failure {
    Failure::usage(
        format!("{}: this file is not the output of this batch", path.display()),
        "it is of another input, model or other options, or of no batch at all: name another file",
    )
}

/// What a batch is watched with, and where its texts go.
struct Watch<'w> {
    progress: Progress,
    out: &'w mut Results,
    vocabulary: Option<Vocabulary<'w>>,
    /// What runs.
    jobs: &'w [Job],
    /// Texts that are being written, by number.
    writing: HashMap<usize, Writing<'w>>,
    /// What all pickers use.
    scratch: Vec<Candidate>,
    ended: usize,
    failed: Vec<(&'w Job, Failure)>,
}

/// A text that is being written.
struct Writing<'w> {
    picker: Picker<'w>,
    stops: Stops,
    text: Vec<u8>,
}

impl<'w> Watch<'w> {
    fn job(&self, number: usize) -> Result<&'w Job, Error> {
        self.jobs.get(number).ok_or(Error::Order)
    }
}

impl<'w> Writing<'w> {
    fn new(job: &'w Job) -> Self {
        Self { picker: job.chosen.picker_among(), stops: job.chosen.stops(), text: Vec::new() }
    }
}

impl Observer for Watch<'_> {
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        self.progress.layer(layer, running_sum);
    }
}

impl Listener for Watch<'_> {
    type Error = Failure;

    fn begin(&mut self, in_flight: usize, ids: usize) {
        let (ended, of) = (self.ended, self.jobs.len());
        self.progress.begin(format!("{ended} of {of} texts, {in_flight} in flight, a pass over {ids} tokens"));
    }

    fn pick(&mut self, number: usize, position: usize, history: &[TokenId], logits: &[f32]) -> Result<TokenId, Error> {
        let job = self.job(number)?;
        let writing = self.writing.entry(number).or_insert_with(|| Writing::new(job));
        writing.picker.pick_among(position, history, logits, &mut self.scratch)
    }

    fn token(&mut self, number: usize, id: TokenId) -> Result<ControlFlow<Finish>, Failure> {
        let (Some(vocabulary), Some(writing)) = (&self.vocabulary, self.writing.get_mut(&number)) else {
            return Ok(ControlFlow::Continue(()));
        };
        let mut bytes = Vec::new();
        vocabulary.decode(id, &mut bytes);
        writing.text.extend(writing.stops.push(&bytes));
        let found = writing.stops.found().is_some();
        Ok(if found { ControlFlow::Break(Finish::Stop) } else { ControlFlow::Continue(()) })
    }

    fn ended(&mut self, text: Text<'_>) -> Result<(), Failure> {
        self.ended += 1;
        let job = self.job(text.number)?;
        let Writing { picker, mut stops, text: mut bytes } =
            self.writing.remove(&text.number).unwrap_or_else(|| Writing::new(job));
        bytes.extend(stops.finish());
        let mut line = json!({
            "id": job.id,
            "generated_ids": text.ids.iter().map(|id| id.0).collect::<Vec<_>>(),
            "text": self.vocabulary.as_ref().map(|_| String::from_utf8_lossy(&bytes)),
            "finish_reason": text.finish.name(),
            "stopped_by": {"id": text.stop.map(|id| id.0), "text": stops.found().map(String::from_utf8_lossy)},
        });
        if picker.tells() {
            line["logprobs"] = picker.json(job.prompt, text.ids, self.vocabulary.as_ref());
        }
        self.out.append(&line)
    }

    fn failed(&mut self, number: usize, error: Error) -> Result<(), Failure> {
        self.writing.remove(&number);
        self.failed.push((self.job(number)?, error.into()));
        Ok(())
    }
}
