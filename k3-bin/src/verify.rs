//! `k3 verify`: is this the checkpoint it should be, and is what it computes what others compute?

use crate::args::Verify as Args;
use crate::cache;
use crate::fail::{BUDGET, CHECK, DAMAGED, Failure, IO, USAGE};
use crate::listing::{Expected, Listing};
use crate::report::{self, Progress, grouped};
use crate::signals;
use crate::start::{Located, Opened, Options, Wanted, held, room};
use k3_core::checkpoint::ExpertTensor;
use k3_core::model::Observer;
use k3_core::view::{LayerIndex, TokenId};
use k3_platform::digest::{self, Event, Record, Sha};
use k3_platform::error::Error;
use k3_platform::io::{FileSet, Source, open_limit};
use k3_platform::memory::{default_threads, peak_rss};
use k3_platform::reference::{Difference, Reference, ReferenceError, largest};
use k3_platform::scales::{self, Damage, Damaged};
use k3_platform::survey::Survey;
use k3_platform::units::human;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Checks that were asked for failed.
const FAILED: u8 = CHECK;

/// Notes, and experts with damaged scales in a shard, that are printed one by one.
const SHOWN: usize = 10;

/// Files of a checkpoint besides the shards.
const SMALL: [&str; 4] = ["config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json"];

/// Something a check has found.
struct Fault {
    /// The file it is in.
    path: PathBuf,
    /// What is wrong.
    what: String,
    /// What it means for the exit code.
    code: u8,
    mend: Mend,
}

/// What is done about a fault.
enum Mend {
    /// The file is not what it should be, whatever the others are: it is fetched again.
    Fetch,
    /// The file may be sound. What is known is said.
    Say(Option<String>),
}

impl Mend {
    const NOTHING: Self = Self::Say(None);

    /// Of what keeps a checkpoint from being opened or read.
    fn of(error: &Error) -> Self {
        match error {
            Error::Open { source, .. } if source.kind() == ErrorKind::NotFound => Self::Fetch,
            Error::MissingShard { .. }
            | Error::Length { .. }
            | Error::Header { .. }
            | Error::TooLong { .. }
            | Error::Config { .. }
            | Error::Json { .. }
            | Error::Structure { .. }
            | Error::ShortIndex { .. }
            | Error::ShardName { .. }
            | Error::Duplicate { .. }
            | Error::Overlap { .. }
            | Error::Vocab { .. } => Self::Fetch,
            // Files that contradict each other, of which one is right; and what the system does not bring.
            _ => Self::Say(Failure::from(error).hint),
        }
    }
}

/// What all checks have found.
#[derive(Default)]
struct Findings {
    faults: Vec<Fault>,
    notes: Vec<String>,
    /// A line for each check, and the same as JSON.
    checks: Vec<String>,
    json: serde_json::Map<String, Value>,
    repository: Option<String>,
}

impl Findings {
    fn fault(&mut self, path: impl Into<PathBuf>, what: impl Into<String>, code: u8, mend: Mend) {
        self.faults.push(Fault { path: path.into(), what: what.into(), code, mend });
    }

    /// The same, if nothing was told of this file yet.
    fn unless_told(&mut self, path: impl Into<PathBuf>, what: impl Into<String>, code: u8, mend: Mend) {
        let path = path.into();
        if !self.faults.iter().any(|fault| fault.path == path) {
            self.fault(path, what, code, mend);
        }
    }

    /// What keeps a checkpoint from being opened or read. It means for the exit code what it would for a run.
    /// Errors that name no file are told of `path`.
    fn error(&mut self, path: &Path, error: &Error) {
        let text = error.to_string();
        let path = path_of(error).unwrap_or_else(|| path.to_owned());
        let what = text.strip_prefix(&format!("{}: ", path.display())).unwrap_or(&text).to_owned();
        self.fault(path, what, Failure::from(error).code, Mend::of(error));
    }

    fn check(&mut self, name: &str, line: &str, value: Value) {
        self.checks.push(format!("{name}: {line}"));
        self.json.insert(name.to_owned(), value);
    }

    /// The worst.
    fn code(&self) -> u8 {
        worst(self.faults.iter().map(|f| f.code))
    }
}

/// Of several exit codes the one that is told: damage before what could not be read, and that before checks
/// that failed.
pub(crate) fn worst(codes: impl Iterator<Item = u8>) -> u8 {
    let order = [DAMAGED, USAGE, IO, BUDGET, FAILED];
    let place = |code: &u8| order.iter().position(|c| c == code).unwrap_or(order.len());
    codes.min_by_key(place).unwrap_or(0)
}

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn verify(args: &Args) -> Result<u8, Failure> {
    for (name, value) in [("--tolerance", args.tolerance), ("--layer-budget", args.layer_budget)] {
        if !(value >= 0.0 && value.is_finite()) {
            return Err(Failure::usage(format!("{name} {value}: not a difference"), "write a number such as 0.005"));
        }
    }
    let listing = args.hash.as_deref().map(Listing::read).transpose()?;
    let located = Options::new(&args.common)?.locate()?;
    let budget = located.budget();
    let source = Arc::clone(&located.source);
    let mut progress = Progress::new(!args.common.quiet, 0);
    let mut findings =
        Findings { repository: listing.as_ref().and_then(|l| l.repository.clone()), ..Findings::default() };
    let mut survey = Survey::of(&located.dir, &*source);
    // What was not waited for is no fault of the files.
    if signals::stopped() {
        return Ok(signals::code());
    }
    structure(&located.dir, &survey, &mut findings);
    let bytes = survey.index.as_ref().map(|i| i.shards().iter().map(|s| s.len).sum());
    let dir = located.dir.clone();
    if let Some(listing) = &listing {
        match hash(args, listing, &located, &*source, &survey, &mut findings, &mut progress) {
            Err(Stop::Signal) => return Ok(signals::code()),
            Err(Stop::Failure(failure)) => return Err(failure),
            Ok(()) => {}
        }
    }
    let outputs = args.logits.is_some() || args.layers.is_some();
    if args.scales || outputs {
        if findings.faults.iter().any(|f| f.code != FAILED) {
            findings
                .notes
                .push("scales and outputs were not looked at: not all of the checkpoint can be read".to_owned());
        } else {
            // A second index takes its place.
            drop(survey.index.take());
            let opened = located.open()?;
            if args.scales && !scan(&opened, &mut findings, &mut progress)? {
                return Ok(signals::code());
            }
            if outputs && let Some(code) = compare(args, opened, &*source, &mut findings)? {
                return Ok(code);
            }
        }
    }
    drop(progress);
    print(args, &dir, bytes, budget, &findings)?;
    Ok(findings.code())
}

/// Takes over what the survey has found.
fn structure(dir: &Path, survey: &Survey, findings: &mut Findings) {
    for error in &survey.faults {
        findings.error(dir, error);
    }
    for path in &survey.unfinished {
        findings.notes.push(format!("{}: a download that was not finished has left this", path.display()));
    }
    for path in &survey.strays {
        findings.notes.push(format!("{}: not in the index, so it is not read", path.display()));
    }
    for sparse in &survey.sparse {
        findings.notes.push(format!(
            "{}: only {} of {} bytes are on the disk: holes of a download that was not finished, or placeholders",
            sparse.path.display(),
            grouped(sparse.on_disk),
            grouped(sparse.len),
        ));
    }
    let shards = survey.index.as_ref().map_or(0, |i| i.shards().len());
    let state = match survey.faults.len() {
        0 => "ok".to_owned(),
        n => report::count(n, "fault"),
    };
    let value = json!({"shards": shards, "faults": survey.faults.len(), "passed": survey.faults.is_empty()});
    findings.check("structure", &format!("{shards} shards, {state}"), value);
}

/// The file an error is about.
fn path_of(error: &Error) -> Option<PathBuf> {
    Some(match error {
        Error::Open { path, .. }
        | Error::TooLong { path, .. }
        | Error::Config { path, .. }
        | Error::Json { path, .. }
        | Error::Structure { path, .. }
        | Error::Header { path, .. }
        | Error::UnknownTensor { path, .. }
        | Error::Duplicate { path, .. }
        | Error::ShortIndex { path, .. }
        | Error::MissingTensors { path, .. }
        | Error::NotInShard { path, .. }
        | Error::Shape { path, .. }
        | Error::Overlap { path, .. }
        | Error::Length { path, .. }
        | Error::ShardName { path, .. }
        | Error::MissingShard { path, .. }
        | Error::Vocab { path, .. }
        | Error::VocabSize { path, .. }
        | Error::Special { path, .. } => path.clone(),
        Error::Read(error) => error.path.clone(),
        _ => return None,
    })
}

/// Why hashing ends early.
enum Stop {
    Signal,
    Failure(Failure),
}

/// Holds sizes and digests against a listing.
fn hash(
    args: &Args,
    listing: &Listing,
    located: &Located<'_>,
    source: &dyn Source,
    survey: &Survey,
    findings: &mut Findings,
    progress: &mut Progress,
) -> Result<(), Stop> {
    let dir = &located.dir;
    let before = findings.faults.len();
    let shards = survey.index.iter().flat_map(|i| i.shards().iter().map(|s| s.name.as_str()));
    let needed: Vec<&str> = SMALL.into_iter().chain(shards).collect();
    let listed: BTreeMap<&str, &Expected> = listing.files.iter().map(|f| (f.name.as_str(), f)).collect();
    for name in &needed {
        let path = dir.join(name);
        if !listed.contains_key(name) && path.exists() {
            findings.fault(path, "the listing does not have it, so it was not checked", FAILED, Mend::NOTHING);
        }
    }
    let (mut todo, mut by_size, mut absent, mut unknown) = (Vec::new(), 0, 0, 0);
    // What was told of them before is not told again.
    let mut unread = 0;
    for (&name, &file) in &listed {
        let path = dir.join(name);
        let len = match std::fs::metadata(&path) {
            Ok(meta) if meta.is_file() => meta.len(),
            // What lies there in its place is not what fetching would replace.
            Ok(_) => {
                unread += 1;
                findings.unless_told(path, "not a regular file", DAMAGED, Mend::NOTHING);
                continue;
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {
                if needed.contains(&name) {
                    unread += 1;
                    findings.unless_told(path, "missing", DAMAGED, Mend::Fetch);
                } else {
                    absent += 1;
                }
                continue;
            }
            Err(e) => {
                unread += 1;
                findings.unless_told(path, e.to_string(), IO, Mend::NOTHING);
                continue;
            }
        };
        match (file.len, file.sha) {
            (Some(expected), _) if expected != len => {
                let what = format!("it has {len} bytes, the listing says {expected}");
                findings.fault(path, what, FAILED, Mend::Fetch);
            }
            (_, Some(sha)) => todo.push((name, path, len, sha)),
            (Some(_), None) => by_size += 1,
            (None, None) if needed.contains(&name) => {
                let what = "the listing has neither its size nor its SHA-256, so it was not checked";
                findings.fault(path, what, FAILED, Mend::NOTHING);
            }
            (None, None) => unknown += 1,
        }
    }
    let mut record = open_record(args, dir, findings);
    let mut resumed = 0;
    todo.retain(|(name, path, _, sha)| {
        let known = record.as_ref().filter(|_| !args.again).and_then(|record| {
            let stamp = source.open_cached(path).ok()?.stamp()?;
            record.get(name, stamp)
        });
        let same = known == Some(*sha);
        resumed += usize::from(same);
        !same
    });
    let bytes: u64 = todo.iter().map(|t| t.2).sum();
    let (mut good, mut done) = (0, 0);
    progress.begin("hashing".to_owned());
    let files = FileSet::new(Arc::clone(&located.source), todo.iter().map(|t| t.1.clone()).collect(), open_limit())
        .with_patience(located.patience());
    let threads = args.common.threads.map_or_else(default_threads, usize::from);
    let threads = threads.min(todo.len().max(1));
    let memory = memory_for(located.budget(), threads + digest::DEPTH, digest::LEAST_MEMORY).map_err(Stop::Failure)?;
    let result = digest::sha256(&files, threads, memory, &located.stop, |event| match event {
        Event::Bytes(so_far) => progress.show(|running| {
            let pace = report::pace(so_far, bytes.saturating_sub(so_far), running);
            format!("{} of {} ({done} of {} files), {pace}", human(so_far), human(bytes), todo.len())
        }),
        Event::Done(number, result) => {
            done += 1;
            let (name, path, _, expected) = &todo[number];
            match result {
                Ok((sha, stamp)) => {
                    if let (Some(record), Some(stamp)) = (&mut record, stamp) {
                        // Without a record the next check begins again, and nothing else is lost.
                        let _ = record.add(name, stamp, sha);
                    }
                    if sha == *expected {
                        good += 1;
                    } else {
                        findings.fault(path.clone(), mismatch(&sha, expected), FAILED, Mend::Fetch);
                    }
                }
                Err(error) => findings.error(path, &error),
            }
        }
    });
    progress.clear();
    match result {
        Ok(()) => {}
        Err(Error::Stopped) => {
            let _ = writeln!(
                std::io::stderr(),
                "stopped with {} of {} files digested; the same command goes on from there",
                resumed + done,
                resumed + todo.len()
            );
            return Err(Stop::Signal);
        }
        Err(error) => return Err(Stop::Failure(error.into())),
    }
    let passed = good == todo.len() && unread == 0 && findings.faults.len() == before;
    if findings.faults.is_empty() {
        // Nothing is left to be resumed; the next check reads everything again.
        let _gone = record.map(Record::remove);
    }
    let mut line = format!("{} of {} files have their SHA-256", good + resumed, resumed + todo.len());
    if resumed > 0 {
        let _ = write!(line, ", {resumed} of them from an earlier check");
    }
    if by_size > 0 {
        let _ = write!(line, "; {by_size} have only a size to be held against, and have it");
    }
    if absent > 0 {
        let _ = write!(line, "; {absent} listed files are not here and not needed");
    }
    if unknown > 0 {
        let files = if unknown == 1 { "file that is" } else { "files that are" };
        let _ = write!(line, "; the listing says nothing of {unknown} {files} not needed");
    }
    let value = json!({
        "digested": todo.len(), "resumed": resumed, "good": good + resumed, "by_size": by_size, "passed": passed,
    });
    findings.check("hash", &line, value);
    Ok(())
}

fn mismatch(found: &Sha, expected: &Sha) -> String {
    format!("its SHA-256 is {}, the listing says {}", digest::hex(found), digest::hex(expected))
}

/// Memory for the buffers of a check on so many threads that needs `least`, or why the budget leaves none.
fn memory_for(budget: u64, threads: usize, least: u64) -> Result<u64, Failure> {
    // The index has been read, and what that took was not asked of the budget.
    let least = peak_rss().unwrap_or(0).max(held(threads) + least);
    if budget >= least {
        return Ok(room(budget, threads));
    }
    let (budget, round) = (human(budget), human(least));
    Err(Failure {
        code: BUDGET,
        message: format!("a budget of {budget} has no room for this check: the least is {round} ({least} bytes)"),
        hint: Some("give more with --memory".to_owned()),
    })
}

/// The record of digests of this directory, if there can be one.
fn open_record(args: &Args, dir: &Path, findings: &mut Findings) -> Option<Record> {
    let folder = cache::folder(|name| std::env::var_os(name));
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    let id = digest::hex(&digest::of(whole.as_os_str().as_encoded_bytes()));
    let record = folder.map(|folder| Record::open(&folder.join(format!("verify-{}.sums", &id[..16]))));
    let why = match record {
        Some(Ok(record)) => return Some(record),
        Some(Err(error)) => error.to_string(),
        None => "neither XDG_CACHE_HOME nor HOME names a folder".to_owned(),
    };
    if !args.common.quiet {
        findings.notes.push(format!("digests were not recorded, so a check that is stopped begins again: {why}"));
    }
    None
}

/// Looks at all scales; false if a signal came.
fn scan(opened: &Opened<'_>, findings: &mut Findings, progress: &mut Progress) -> Result<bool, Failure> {
    progress.begin("scales".to_owned());
    // A scale for each group of 32 codes of half a byte, and what the blocks of a disk add to it.
    let least = k3_core::checkpoint::expert_bytes(opened.checkpoint.config()) / 16 + (64 << 10);
    let memory = memory_for(opened.budget(), scales::DEPTH, least)?;
    let damaged = scales::scan(&opened.checkpoint, memory, opened.stop(), |done, of| {
        progress.show(|_| format!("expert {done} of {of}"));
    });
    progress.clear();
    let damaged = match damaged {
        Ok(damaged) => damaged,
        Err(Error::Stopped) => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let checkpoint = &opened.checkpoint;
    let shard = |d: &Damaged| {
        let shard = checkpoint.index().shards().get(usize::from(d.place.shard));
        checkpoint.dir().join(shard.map_or("", |s| s.name.as_str()))
    };
    let part = |part: ExpertTensor| part.name().split('.').next().unwrap_or_default();
    // One line for a file: what mends it is fetching the file.
    let mut by_shard: BTreeMap<PathBuf, Vec<&Damaged>> = BTreeMap::new();
    for d in &damaged {
        by_shard.entry(shard(d)).or_default().push(d);
    }
    for (path, all) in by_shard {
        let mut what = String::new();
        for (i, d) in all.iter().take(SHOWN).enumerate() {
            let separator = if i > 0 { "; " } else { "" };
            let state = match d.damage {
                Damage::Nan(n) => format!("{n} NaN, the first at byte {}", d.place.offset),
                Damage::Blank => format!("all zero from byte {} on", d.place.offset),
            };
            let (layer, expert) = (d.name.0.0, d.name.1.0);
            let _ = write!(what, "{separator}scales of {} of expert {expert} of layer {layer}: {state}", part(d.part));
        }
        if all.len() > SHOWN {
            let _ = write!(what, "; and {} more", all.len() - SHOWN);
        }
        findings.fault(path, what, FAILED, Mend::Fetch);
    }
    let experts = checkpoint.config().num_moe_layers() * checkpoint.config().num_experts;
    let each = |d: &Damaged| {
        let (nan, blank) = match d.damage {
            Damage::Nan(n) => (n, false),
            Damage::Blank => (0, true),
        };
        let file = shard(d).display().to_string();
        json!({
            "layer": d.name.0.0, "expert": d.name.1.0, "matrix": part(d.part), "nan_scale_bytes": nan, "blank": blank,
            "file": file, "offset": d.place.offset,
        })
    };
    let value = json!({
        "experts": experts, "damaged": damaged.iter().map(each).collect::<Vec<_>>(), "passed": damaged.is_empty(),
    });
    let state = if damaged.is_empty() { "no NaN".to_owned() } else { format!("{} matrices damaged", damaged.len()) };
    findings.check("scales", &format!("{} experts, {state}", grouped(experts as u64)), value);
    Ok(true)
}

impl From<ReferenceError> for Failure {
    fn from(error: ReferenceError) -> Self {
        match error {
            ReferenceError::Read(error) => error.into(),
            other => Self::usage(other.to_string(), "see k3 verify --help for the forms a reference may have"),
        }
    }
}

/// Where the reference of a layer is: a file, and the row of the first id.
struct LayerReference {
    file: Arc<Reference>,
    first: u64,
}

/// What leaves the layers, compared as it comes.
struct Watch {
    progress: Progress,
    layers: BTreeMap<usize, (LayerReference, Difference)>,
    hidden: usize,
    /// Ids read by the passes before this one.
    done: u64,
    failed: Option<Error>,
}

impl Observer for Watch {
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        self.progress.layer(layer, running_sum);
        let Some((reference, difference)) = self.layers.get_mut(&layer.get()) else { return };
        let mut expected = Vec::new();
        for (row, found) in (self.done..).zip(running_sum.chunks_exact(self.hidden)) {
            match reference.file.read(reference.first + row, &mut expected) {
                Ok(()) => difference.add(row, found, &expected),
                Err(error) => {
                    self.failed.get_or_insert(error);
                    return;
                }
            }
        }
    }
}

/// Runs the ids and compares; the exit code if a signal came.
fn compare(
    args: &Args,
    opened: Opened<'_>,
    source: &dyn Source,
    findings: &mut Findings,
) -> Result<Option<u8>, Failure> {
    let config = *opened.checkpoint.config();
    let (vocab, hidden, count) = (config.vocab_size, config.hidden_size, args.ids.len());
    if let Some(id) = args.ids.iter().find(|&&id| id as usize >= vocab) {
        return Err(Failure::usage(
            format!("token id {id} is not in the vocabulary"),
            format!("ids are 0 to {}", vocab - 1),
        ));
    }
    let logits = match &args.logits {
        Some(path) => Some(Reference::open(source, path, vocab).map_err(|error| match error {
            ReferenceError::Read(error) => Failure::named("--logits", path, error),
            other => other.into(),
        })?),
        None => None,
    };
    if let Some(reference) = logits.as_ref().filter(|r| r.rows() > count as u64) {
        let message = format!("{}: {} rows for {count} ids", reference.path().display(), reference.rows());
        return Err(Failure::usage(message, "there is a row after each id, so a reference has no more rows than ids"));
    }
    let layers = match &args.layers {
        Some(path) => layer_references(path, source, hidden, count, config.num_hidden_layers)?,
        None => BTreeMap::new(),
    };
    let layers = layers.into_iter().map(|(l, r)| (l, (r, Difference::default()))).collect();
    let progress = Progress::new(!args.common.quiet, config.num_hidden_layers);
    let mut watch = Watch { progress, layers, hidden, done: 0, failed: None };
    let ids: Vec<TokenId> = args.ids.iter().copied().map(TokenId).collect();
    let mut run =
        opened.start(Wanted { context: count, prompt: count, all_logits: logits.is_some(), ..Wanted::default() })?;
    run.engine.reset()?;
    let chunk = run.engine.plan().extent.chunk;
    let mut found = vec![0.0; vocab * run.engine.plan().logit_rows];
    let mut table = Logits::default();
    for part in ids.chunks(chunk) {
        watch.progress.begin(format!("id {} of {count}", watch.done + 1));
        let rows = if logits.is_some() { part.len() } else { 0 };
        match run.engine.step(part, &mut found[..rows * vocab], &mut watch) {
            Err(Error::Stopped) => return Ok(Some(signals::code())),
            other => other?,
        }
        if let Some(error) = watch.failed.take() {
            return Err(error.into());
        }
        if let Some(reference) = &logits {
            let mut expected = Vec::new();
            for (position, row) in (watch.done..).zip(found[..rows * vocab].chunks_exact(vocab)) {
                // The last row of the file is that of the last id.
                let Some(at) = (position + reference.rows()).checked_sub(count as u64) else { continue };
                reference.read(at, &mut expected)?;
                table.add(position, row, &expected, args.top);
            }
        }
        watch.done += part.len() as u64;
    }
    watch.progress.clear();
    if let Some(reference) = &logits {
        table.tell(args, reference, findings);
    }
    if let Some(path) = &args.layers {
        tell_layers(args, path, &watch.layers, findings);
    }
    Ok(None)
}

/// How far logits are from those of a file.
#[derive(Default)]
struct Logits {
    difference: Difference,
    rows: u64,
    same_argmax: u64,
    shared: usize,
    of: usize,
}

impl Logits {
    fn add(&mut self, position: u64, found: &[f32], expected: &[f64], top: usize) {
        self.difference.add(position, found, expected);
        let found: Vec<f64> = found.iter().copied().map(f64::from).collect();
        let (ours, theirs) = (largest(&found, top.max(1)), largest(expected, top.max(1)));
        self.rows += 1;
        self.same_argmax += u64::from(ours.first() == theirs.first());
        self.shared += ours.iter().filter(|id| theirs.contains(id)).count();
        self.of += theirs.len();
    }

    fn tell(&self, args: &Args, reference: &Reference, findings: &mut Findings) {
        let d = &self.difference;
        let passed = d.max_abs <= args.tolerance;
        #[expect(clippy::cast_precision_loss, reason = "a share of a few thousand")]
        let overlap = self.shared as f64 / self.of.max(1) as f64;
        let value = json!({
            "rows": self.rows, "max_abs": d.max_abs, "position": d.at.0, "id": d.at.1, "max_relative": d.max_relative,
            "correlation": d.correlation(), "top": args.top, "top_overlap": overlap, "same_argmax": self.same_argmax,
            "tolerance": args.tolerance, "passed": passed,
        });
        let line = format!(
            "{} rows, off by {:.3e} at most (id {} after position {}; {:.3e} relative); correlation {}; \
             argmax the same in {} of {}; {:.1}% of the {} largest shared; {} (tolerance {:.1e})",
            self.rows,
            d.max_abs,
            d.at.1,
            d.at.0,
            d.max_relative,
            d.correlation().map_or("-".to_owned(), |c| format!("{c:.9}")),
            self.same_argmax,
            self.rows,
            100.0 * overlap,
            args.top.max(1),
            if passed { "passed" } else { "FAILED" },
            args.tolerance,
        );
        findings.check("logits", &line, value);
        if !passed {
            let what = format!("logits differ by {:.3e}, {:.1e} are allowed", d.max_abs, args.tolerance);
            findings.fault(reference.path(), what, FAILED, Mend::NOTHING);
        }
    }
}

fn tell_layers(
    args: &Args,
    path: &Path,
    layers: &BTreeMap<usize, (LayerReference, Difference)>,
    findings: &mut Findings,
) {
    // A reference that does not vary has no scale, so nothing but equality is within it.
    let share = |d: &Difference| {
        let budget = args.layer_budget * d.deviation();
        if d.max_abs > 0.0 { d.max_abs / budget } else { 0.0 }
    };
    let worst = layers.iter().max_by(|a, b| share(&a.1.1).total_cmp(&share(&b.1.1)));
    let Some((layer, (_, d))) = worst else { return };
    let passed = share(d) <= 1.0;
    let line = format!(
        "{} compared; the worst is layer {layer}: {:.1}% of its budget (off by {:.3e} at position {}, element {}); {}",
        layers.len(),
        100.0 * share(d),
        d.max_abs,
        d.at.0,
        d.at.1,
        if passed { "passed" } else { "FAILED" },
    );
    let each = layers.iter().map(|(layer, (_, d))| {
        json!({"layer": layer, "max_abs": d.max_abs, "deviation": d.deviation(), "of_budget": share(d)})
    });
    let value = json!({
        "worst": layer, "of_budget": share(d), "layers": each.collect::<Vec<_>>(), "passed": passed,
    });
    findings.check("layers", &line, value);
    if !passed {
        // The first that is off is where to look; those behind it inherit.
        let first = layers.iter().find(|(_, (_, d))| share(d) > 1.0).map_or(*layer, |(layer, _)| *layer);
        let what = format!("layer {first} is the first outside its budget; layer {layer} is the worst");
        findings.fault(path, what, FAILED, Mend::NOTHING);
    }
}

/// The references of the layers that have one.
fn layer_references(
    path: &Path,
    source: &dyn Source,
    hidden: usize,
    ids: usize,
    layers: usize,
) -> Result<BTreeMap<usize, LayerReference>, Failure> {
    let refused = |message: String| {
        Failure::usage(
            message,
            "name the files layer-000.npy and so on, [ids, hidden], or give one [layers, ids, hidden]",
        )
    };
    let rows = |reference: &Reference, expected: usize| {
        if reference.rows() == expected as u64 {
            return Ok(());
        }
        let path = reference.path().display();
        Err(refused(format!("{path}: {} rows, expected {expected}", reference.rows())))
    };
    let mut found = BTreeMap::new();
    if path.is_file() {
        let file = Reference::open(source, path, hidden)?;
        rows(&file, layers.saturating_mul(ids))?;
        let file = Arc::new(file);
        for layer in 0..layers {
            let first = (layer as u64).saturating_mul(ids as u64);
            found.insert(layer, LayerReference { file: Arc::clone(&file), first });
        }
        return Ok(found);
    }
    let entries = std::fs::read_dir(path).map_err(|e| refused(format!("{}: {e}", path.display())))?;
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(layer) = layer_of(&name).filter(|_| entry.path().is_file()) else { continue };
        if layer >= layers {
            return Err(refused(format!("{name}: the model has {layers} layers, counted from 0")));
        }
        let file = Reference::open(source, &entry.path(), hidden)?;
        rows(&file, ids)?;
        let reference = LayerReference { file: Arc::new(file), first: 0 };
        if found.insert(layer, reference).is_some() {
            return Err(refused(format!("{name}: another file is of layer {layer} as well")));
        }
    }
    if found.is_empty() {
        return Err(refused(format!("{}: no file in it is of a layer", path.display())));
    }
    Ok(found)
}

/// The layer in a name such as `layer-007.npy` or `layers.7.safetensors`; hidden files have none.
fn layer_of(name: &str) -> Option<usize> {
    let rest = name.strip_prefix("layers").or_else(|| name.strip_prefix("layer"))?;
    let rest = rest.trim_start_matches(['-', '_', '.', ' ']);
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().ok()
}

/// A path as a shell reads it.
pub(crate) fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:@%,".contains(c);
    // A name that begins as an option does is none.
    let text = if text.starts_with('-') { format!("./{text}") } else { text };
    if !text.is_empty() && text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

/// What fetches one file again.
pub(crate) fn fetch(dir: &Path, path: &Path, repository: Option<&str>) -> Option<String> {
    let name = path.strip_prefix(dir).ok().filter(|name| !name.as_os_str().is_empty())?;
    let repository = repository.unwrap_or("REPOSITORY");
    Some(format!("rm -f -- {} && hf download {repository} {} --local-dir {}", quoted(path), quoted(name), quoted(dir)))
}

fn print(args: &Args, dir: &Path, bytes: Option<u64>, budget: u64, findings: &Findings) -> Result<(), Failure> {
    let again = |fault: &Fault| match fault.mend {
        Mend::Fetch => fetch(dir, &fault.path, findings.repository.as_deref()),
        Mend::Say(_) => None,
    };
    if args.common.json {
        let faults = findings
            .faults
            .iter()
            .map(|f| json!({"file": f.path.display().to_string(), "fault": f.what, "fetch": again(f)}));
        return report::print_json(&json!({
            "model": dir.display().to_string(),
            "bytes": bytes,
            "checks": findings.json,
            "faults": faults.collect::<Vec<_>>(),
            "notes": findings.notes,
            "memory": report::held(budget),
            "passed": findings.faults.is_empty(),
        }));
    }
    let mut out = format!("{}\n", dir.display());
    for line in &findings.checks {
        let _ = writeln!(out, "{line}");
    }
    for note in findings.notes.iter().take(SHOWN) {
        let _ = writeln!(out, "note: {note}");
    }
    if findings.notes.len() > SHOWN {
        let _ = writeln!(out, "note: and {} more, which --json lists", findings.notes.len() - SHOWN);
    }
    for fault in &findings.faults {
        let _ = writeln!(out, "bad: {}: {}", fault.path.display(), fault.what);
        if let Some(fetch) = again(fault) {
            let _ = writeln!(out, "     fetch it again: {fetch}");
        } else if let Mend::Say(Some(hint)) = &fault.mend {
            let _ = writeln!(out, "     {hint}");
        }
    }
    let end = match findings.faults.len() {
        0 => "all is well".to_owned(),
        1 => "1 fault".to_owned(),
        n => format!("{n} faults"),
    };
    out.push_str(&end);
    report::print(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_which_layer() {
        for (name, layer) in [
            ("layer-007.npy", Some(7)),
            ("layer_12.f32", Some(12)),
            ("layers.3.safetensors", Some(3)),
            ("layer0", Some(0)),
            ("layer.npy", None),
            ("hidden.npy", None),
            ("._layer-001.npy", None),
        ] {
            assert_eq!(layer_of(name), layer, "{name}");
        }
    }

    #[test]
    fn what_is_printed_can_be_pasted() {
        assert_eq!(quoted(Path::new("/models/k3")), "/models/k3");
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
        assert_eq!(fetch(Path::new("/m"), Path::new("/m"), None), None);
        let one = fetch(Path::new("/m"), Path::new("/m/x"), Some("a/b"));
        assert_eq!(one.as_deref(), Some("rm -f -- /m/x && hf download a/b x --local-dir /m"));
    }
}
