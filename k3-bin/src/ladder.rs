//! `k3 ladder`: one prompt at several budgets, each in a process of its own.
//!
//! The peak that the system counts is that of a process, so nothing else gives every budget its own.
//! This process plans, starts `k3 run --json` for one budget after another, and writes down what they
//! say. A budget below the floor is a row and not a failure; a run that is killed is a row, too. If
//! this process is interrupted it ends the run, and if it is killed the system does.

use crate::args::{Experts, Io, Ladder as Args};
use crate::fail::{BUDGET, CHECK, Failure, IO};
use crate::output::{self, Output};
use crate::report;
use crate::signals;
use crate::start::{Opened, Options, Wanted};
use crate::svg;
use crate::text::{self, Source};
use k3_platform::error::Error;
use k3_platform::ladder::rungs;
use k3_platform::units::{self, human};
use k3_platform::vocabulary::VocabularyFiles;
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// How often a run and the signals are looked at.
const LOOK: Duration = Duration::from_millis(20);

/// A run that was asked to end has this long to say what it has.
const GRACE: Duration = Duration::from_secs(10);

const COLUMNS: [&str; 12] = [
    "budget_bytes",
    "status",
    "floor_bytes",
    "pinned_layers",
    "head_pinned",
    "arena_experts",
    "seconds_per_token",
    "trunk_hit_rate",
    "expert_hit_rate",
    "gb_per_token",
    "peak_rss_bytes",
    "same_ids",
];

/// For the run of a rung: it ends when the ladder does, however that ends.
///
/// # Errors
/// If the ladder is gone already.
pub(crate) fn end_with(ladder: i32) -> Result<(), Failure> {
    let failed = |message: String| Failure { code: IO, message, hint: None };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(|e| failed(format!("prctl: {e}")))?;
    // It may have ended before the system was told.
    let parent = getppid().map(Pid::as_raw_nonzero).map(std::num::NonZero::get);
    if parent == Some(ladder) { Ok(()) } else { Err(failed("the ladder has ended".to_owned())) }
}

/// What became of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Ok,
    Refused,
    Failed,
    Cancelled,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A budget, and what its run said.
#[derive(Debug)]
struct Rung {
    budget: u64,
    floor: u64,
    layers: usize,
    status: Status,
    /// The JSON object of the run, if it came to that.
    said: Value,
    /// Whether the tokens are those of the first rung; unknown if it has none.
    same: Option<bool>,
    /// Why it failed, for people.
    reason: Option<String>,
}

impl Rung {
    fn ids(&self) -> Option<&Value> {
        (self.status == Status::Ok).then(|| &self.said["generated_ids"])
    }

    /// The value of each column after the first three.
    fn values(&self) -> [Value; 9] {
        let said = |group: &str, field: &str| self.said[group][field].clone();
        let pinned = said("memory", "pinned_layers").as_u64();
        let gb = said("io", "bytes_per_token").as_f64().map(|bytes| bytes / 1e9);
        [
            json!(pinned.map(|n| format!("{n}/{}", self.layers))),
            said("memory", "head_pinned"),
            said("memory", "arena_experts"),
            said("seconds", "per_token"),
            said("io", "trunk_hit_rate"),
            said("io", "expert_hit_rate"),
            json!(gb),
            said("memory", "peak_rss_bytes"),
            json!(self.same),
        ]
    }

    /// A line of the table.
    fn line(&self) -> String {
        let mut cells = vec![self.budget.to_string(), self.status.name().to_owned(), self.floor.to_string()];
        cells.extend(self.values().iter().zip(&COLUMNS[3..]).map(|(value, column)| match value {
            Value::Null => "-".to_owned(),
            Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
            Value::String(text) => text.clone(),
            Value::Number(n) => match (n.as_f64().filter(|_| n.is_f64()), *column) {
                // As many digits as are worth reading.
                (Some(x), "gb_per_token") => format!("{x:.3}"),
                (Some(x), _) => format!("{x:.4}"),
                (None, _) => n.to_string(),
            },
            other => other.to_string(),
        }));
        cells.join("\t")
    }

    fn json(&self) -> Value {
        let mut row = json!({
            COLUMNS[0]: self.budget,
            COLUMNS[1]: self.status.name(),
            COLUMNS[2]: self.floor,
        });
        for (value, column) in self.values().into_iter().zip(&COLUMNS[3..]) {
            row[*column] = value;
        }
        // A number where a program reads it; how many there are is beside the rows.
        row["pinned_layers"] = self.said["memory"]["pinned_layers"].clone();
        row["generated_ids"] = self.said["generated_ids"].clone();
        row["reason"] = json!(self.reason);
        row
    }
}

/// What every rung runs.
struct Task<'a> {
    args: &'a Args,
    /// `None` if the model is part of k3.
    model: Option<std::path::PathBuf>,
    prompt: Source,
}

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn ladder(args: &Args) -> Result<u8, Failure> {
    let options = Options::new(&args.common)?;
    let budgets: Result<Vec<u64>, _> = args.budgets.iter().map(|text| units::parse(text)).collect();
    let budgets = budgets.map_err(|e| Failure::usage(format!("--budgets: {e}"), "write sizes such as 2G,4G,8GiB"))?;
    output::check(
        &[("--out", args.out.as_ref()), ("--svg", args.svg.as_ref())],
        &[("--prompt-file", args.prompt.prompt_file.as_ref())],
        args.common.model.as_deref(),
    )?;
    let (table, picture) = (Output::optional(args.out.as_ref())?, Output::optional(args.svg.as_ref())?);
    let prompt = text::source(&args.prompt.or_ids(), options.budget())?;
    let most = options.budget();
    let opened = options.open()?;
    let wanted = wanted(args, &prompt, &opened)?;
    let layers = opened.checkpoint.config().num_hidden_layers;
    let plan = |budget| opened.plan_of_child(budget, wanted);
    let floor = match plan(0) {
        Err(Error::Budget(refusal)) => refusal.floor,
        Err(error) => return Err(error.into()),
        Ok(_) => 0,
    };
    let budgets = if budgets.is_empty() {
        // A plan leaves a little over, so that it takes a little more than it spends.
        let everything = plan(u64::MAX).map_or(u64::MAX, |all| all.ledger.total() / 63 * 64);
        rungs(floor, everything, most)
    } else {
        budgets
    };
    let task = Task { args, model: opened.named().map(Path::to_owned), prompt };
    let dir = opened.checkpoint.dir().display().to_string();
    // What the runs do not share with this process they can have.
    drop(opened);

    let mut rows: Vec<Rung> = Vec::new();
    let mut reader = !args.common.json;
    let header = COLUMNS.join("\t");
    let mut say = |line: &str, needed: bool| -> Result<bool, Failure> {
        if reader {
            reader = report::print_line(line)?;
        }
        Ok(reader || needed)
    };
    let needed = args.common.json || table.is_some() || picture.is_some();
    if say(&header, needed)? {
        for (i, &budget) in budgets.iter().enumerate() {
            if signals::stopped() {
                break;
            }
            let mut rung =
                Rung { budget, floor, layers, status: Status::Refused, said: Value::Null, same: None, reason: None };
            task.note(|| format!("rung {} of {}: {}", i + 1, budgets.len(), human(budget)));
            if budget >= floor {
                task.run(&mut rung)?;
            } else {
                rung.reason = Some(format!("the least that can hold this request is {floor} bytes"));
            }
            let first = rows.iter().find_map(Rung::ids);
            rung.same = rung.ids().map(|ids| first.is_none_or(|first| first == ids));
            if let Some(reason) = &rung.reason {
                task.note(|| format!("{}: {}: {reason}", human(budget), rung.status.name()));
            }
            let line = rung.line();
            rows.push(rung);
            if !say(&line, needed)? {
                break;
            }
        }
    }
    if let Some((path, mut out)) = args.out.as_ref().zip(table) {
        let lines: Vec<String> = std::iter::once(header).chain(rows.iter().map(Rung::line)).collect();
        let written = out.write_all(format!("{}\n", lines.join("\n")).as_bytes()).and_then(|()| out.finish());
        written.map_err(|e| Failure::output(path, &e))?;
    }
    if let Some((path, mut out)) = args.svg.as_ref().zip(picture) {
        let written = out.write_all(plot(&rows).as_bytes()).and_then(|()| out.finish());
        written.map_err(|e| Failure::output(path, &e))?;
    }
    if args.common.json {
        let each: Vec<_> = rows.iter().map(Rung::json).collect();
        report::print_json(&json!({"model": dir, "layers": layers, "floor_bytes": floor, "rungs": each}))?;
    }
    Ok(code(&rows))
}

/// The exit code that the rungs add up to.
fn code(rows: &[Rung]) -> u8 {
    let has = |status| rows.iter().any(|r| r.status == status);
    if signals::stopped() || has(Status::Cancelled) {
        signals::code()
    } else if rows.iter().any(|r| r.same == Some(false)) {
        CHECK
    } else if let Some(failed) = rows.iter().find(|r| r.status == Status::Failed) {
        failed.said["exit_code"].as_u64().and_then(|code| u8::try_from(code).ok()).unwrap_or(IO)
    } else if !rows.is_empty() && rows.iter().all(|r| r.status == Status::Refused) {
        BUDGET
    } else {
        0
    }
}

/// What a run of this prompt will ask of its plan.
fn wanted(args: &Args, prompt: &Source, opened: &Opened<'_>) -> Result<Wanted, Failure> {
    let mut files = text::vocabulary(&opened.checkpoint, matches!(prompt, Source::Text(_)))?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?;
    let ids = match (prompt, &vocabulary) {
        (Source::Ids(ids), _) => ids.clone(),
        (Source::Text(bytes), Some(vocabulary)) => vocabulary.encode(bytes, false)?,
        (Source::Text(_), None) => Vec::new(),
    };
    text::check_ids(&ids, opened.checkpoint.config().vocab_size)?;
    let context = ids.len().saturating_add(args.max_tokens.get() - 1);
    let tokenizer = vocabulary.map_or(0, |v| v.bytes());
    Ok(Wanted { context, prompt: ids.len(), tokenizer, ..Wanted::default() })
}

impl Task<'_> {
    fn note(&self, text: impl Fn() -> String) {
        if !self.args.common.quiet {
            let _ = writeln!(std::io::stderr(), "{}", text());
        }
    }

    fn command(&self, budget: u64) -> Command {
        let common = &self.args.common;
        // The program that is running, even if another one has its name by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("k3").args(["run", "--json", "--ignore-eos", "--memory", &budget.to_string()]);
        command.args(["--rung-of", &std::process::id().to_string()]);
        command.args(["--max-tokens", &self.args.max_tokens.to_string(), "--backend", &common.backend]);
        command.args(["--io", if common.io == Io::Direct { "direct" } else { "buffered" }]);
        command.args(["--experts", if common.experts == Experts::Lru { "lru" } else { "frequency" }]);
        command.arg("--trunk").arg(&common.trunk);
        if let Some(threads) = common.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        if let Some(chunk) = common.chunk {
            command.args(["--chunk", &chunk.to_string()]);
        }
        if let Some(seconds) = common.reading.io_timeout {
            command.args(["--io-timeout", &seconds.to_string()]);
        }
        if let Some(limit) = common.reading.disk_limit {
            command.args(["--disk-limit", &limit.to_string()]);
        }
        if common.quiet {
            command.arg("--quiet");
        }
        match &self.prompt {
            Source::Text(_) => command.args(["--prompt-file", "-"]).stdin(Stdio::piped()),
            Source::Ids(ids) => {
                let ids: Vec<_> = ids.iter().map(|id| id.0.to_string()).collect();
                command.args(["--ids", &ids.join(",")]).stdin(Stdio::null())
            }
        };
        command.env_remove("K3_MODEL");
        if let Some(model) = &self.model {
            command.arg("--").arg(model);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs one rung to its end.
    fn run(&self, rung: &mut Rung) -> Result<(), Failure> {
        let failed = |e| Failure { code: IO, message: format!("k3 run: {e}"), hint: None };
        // From this thread, which lives as long as the process: the run ends with it.
        let mut child = self.command(rung.budget).spawn().map_err(failed)?;
        let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let label = human(rung.budget);
        let ended = std::thread::scope(|scope| {
            let listeners = || {
                if let (Some(mut stdin), Source::Text(text)) = (stdin, &self.prompt) {
                    // A run that is refused does not read it.
                    Builder::new().spawn_scoped(scope, move || stdin.write_all(text))?;
                }
                let out = Builder::new().spawn_scoped(scope, move || {
                    let mut bytes = Vec::new();
                    // Nothing that a run says is longer.
                    let _ = stdout.map(|out| out.take(64 << 20).read_to_end(&mut bytes));
                    bytes
                })?;
                let err = Builder::new().spawn_scoped(scope, || self.listen(&label, stderr))?;
                Ok((out, err))
            };
            let (out, err) = match listeners() {
                Ok(listeners) => listeners,
                Err(error) => {
                    // Whom nobody listens to is not left behind.
                    let _ = child.kill().and_then(|()| child.wait());
                    return Err(error);
                }
            };
            let status = wait(&mut child)?;
            Ok((status, out.join().unwrap_or_default(), err.join().unwrap_or_default()))
        });
        let (status, out, reason) = ended.map_err(failed)?;
        rung.said = serde_json::from_slice(&out).unwrap_or_default();
        rung.status = match status.code() {
            Some(0) if rung.said.is_object() => Status::Ok,
            Some(code) if code == i32::from(BUDGET) => Status::Refused,
            _ if signals::stopped() => Status::Cancelled,
            _ => Status::Failed,
        };
        if rung.status != Status::Ok {
            rung.reason = reason.or_else(|| Some(status.to_string()));
            if !rung.said.is_object() {
                rung.said = json!({});
            }
            rung.said["exit_code"] = json!(status.code().unwrap_or(i32::from(IO)));
        }
        Ok(())
    }

    /// Passes on what a run says on standard error, and gives the line that says why it failed.
    fn listen(&self, label: &str, from: Option<impl Read>) -> Option<String> {
        let mut reason = None;
        for line in from.map(BufReader::new)?.split(b'\n') {
            let line = line.ok()?;
            let line = String::from_utf8_lossy(&line).into_owned();
            match line.strip_prefix("k3: ") {
                Some(message) => reason = Some(message.to_owned()),
                None => self.note(|| format!("{label}: {line}")),
            }
        }
        reason
    }
}

/// Waits for a run, and ends it when a signal has come.
fn wait(child: &mut Child) -> std::io::Result<ExitStatus> {
    let mut told: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match told {
            None if signals::stopped() => {
                // It has not been waited for, so the number is still its own.
                let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                let _ = pid.map(|pid| kill_process(pid, Signal::TERM));
                told = Some(Instant::now());
            }
            Some(since) if since.elapsed() > GRACE => child.kill()?,
            _ => {}
        }
        std::thread::sleep(LOOK);
    }
}

/// Time and hit rates over the budgets, on a logarithmic axis.
fn plot(rows: &[Rung]) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a picture")]
    let logs: Vec<f64> = rows.iter().map(|r| (r.budget.max(1) as f64).ln()).collect();
    let low = logs.iter().copied().fold(f64::INFINITY, f64::min);
    let high = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let place = |log: f64| if high > low { (log - low) / (high - low) } else { 0.5 };
    let ticks: Vec<_> = rows.iter().zip(&logs).map(|(r, &log)| (place(log), human(r.budget))).collect();
    let curve = |name, group: &str, field: &str| svg::Curve {
        name,
        points: (rows.iter().zip(&logs))
            .filter_map(|(r, &log)| Some((place(log), r.said[group][field].as_f64()?)))
            .collect(),
    };
    let chart = |unit, curves| svg::Chart { axis: "memory budget", ticks: ticks.clone(), unit, curves };
    svg::draw(&[
        chart(svg::Unit::Seconds, vec![curve("seconds per token", "seconds", "per_token")]),
        chart(
            svg::Unit::Share,
            vec![curve("trunk hit rate", "io", "trunk_hit_rate"), curve("expert hit rate", "io", "expert_hit_rate")],
        ),
    ])
}
