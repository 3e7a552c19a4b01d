//! What the person at the terminal sees: progress while it runs, a report at the end.

use crate::fail::Failure;
use crate::output;
use k3_core::model::Observer;
use k3_core::view::{ExpertId, LayerIndex};
use k3_platform::draft::Guesses;
use k3_platform::engine::Stats;
use k3_platform::generate::Outcome;
use k3_platform::memory::peak_rss;
use k3_platform::plan::Plan;
use k3_platform::units::human;
use serde_json::{Value, json};
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Nothing is said about what takes less than this.
const SILENT: Duration = Duration::from_secs(2);

/// A line of standard error is renewed at most this often.
const EVERY: Duration = Duration::from_millis(200);

/// A progress line that clears itself. On something that is not a terminal it says a line every ten
/// seconds.
#[derive(Debug)]
pub(crate) struct Progress {
    enabled: bool,
    terminal: bool,
    layers: usize,
    started: Instant,
    last: Instant,
    what: String,
    shown: bool,
}

impl Progress {
    pub(crate) fn new(enabled: bool, layers: usize) -> Self {
        let now = Instant::now();
        let terminal = std::io::stderr().is_terminal();
        Self { enabled, terminal, layers, started: now, last: now, what: String::new(), shown: false }
    }

    /// Names what begins now.
    pub(crate) fn begin(&mut self, what: String) {
        (self.what, self.started) = (what, Instant::now());
    }

    /// Says where the thing that began is now. The clock runs on.
    pub(crate) fn update(&mut self, what: String) {
        self.what = what;
    }

    /// Takes the line away, before other output.
    pub(crate) fn clear(&mut self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
            self.shown = false;
        }
    }
}

impl Progress {
    /// Shows how far it is, if it is time to say something.
    pub(crate) fn show(&mut self, detail: impl FnOnce(Duration) -> String) {
        let every = if self.terminal { EVERY } else { EVERY * 50 };
        let running = self.started.elapsed();
        if !self.enabled || running < SILENT || self.last.elapsed() < every {
            return;
        }
        self.last = Instant::now();
        let (detail, seconds) = (detail(running), running.as_secs());
        let mut err = std::io::stderr().lock();
        // A closed standard error must not end a run.
        let _ = if self.terminal {
            self.shown = true;
            write!(err, "\r\x1b[K{}: {detail}, {seconds} s", self.what).and_then(|()| err.flush())
        } else {
            writeln!(err, "{}: {detail}, {seconds} s", self.what)
        };
    }
}

impl Observer for Progress {
    fn layer(&mut self, layer: LayerIndex, _: &[f32]) {
        let layers = self.layers;
        self.show(|_| format!("layer {} of {layers}", layer.get() + 1));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // Whatever ends the work, the next line begins on a clean one.
        self.clear();
    }
}

/// A whole number with its digits in groups of three.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// How fast `done` bytes were done in a time, and how long so many others will take.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a speed and minutes, for people"
)]
pub(crate) fn pace(done: u64, left: u64, running: Duration) -> String {
    let rate = done as f64 / running.as_secs_f64().max(1e-9);
    if done == 0 {
        return "nothing yet".to_owned();
    }
    let seconds = (left as f64 / rate) as u64;
    let time = match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        _ => format!("{:.1} h", seconds as f64 / 3600.0),
    };
    format!("{:.2} GB/s, {time} left", rate / 1e9)
}

/// A progress line of bytes, with their rate and the time that is left.
#[derive(Debug)]
pub(crate) struct Meter {
    progress: Progress,
    /// What was done when it began.
    first: u64,
}

impl Meter {
    pub(crate) fn new(enabled: bool) -> Self {
        Self { progress: Progress::new(enabled, 0), first: 0 }
    }

    /// Names what begins now; `first` bytes of it are done.
    pub(crate) fn begin(&mut self, what: &str, first: u64) {
        self.progress.begin(what.to_owned());
        self.first = first;
    }

    /// So many bytes are done.
    pub(crate) fn update(&mut self, done: u64, total: u64) {
        let first = self.first;
        self.progress.show(|running| {
            let pace = pace(done.saturating_sub(first), total.saturating_sub(done), running);
            format!("{} of {}, {pace}", human(done), human(total))
        });
    }

    /// Takes the line away, before other output.
    pub(crate) fn clear(&mut self) {
        self.progress.clear();
    }
}

/// Prints the plan.
pub(crate) fn plan(plan: &Plan, backend: &str) {
    let mut err = std::io::stderr().lock();
    let _ = writeln!(
        err,
        "memory plan for {} ({} threads, {backend} kernels):\n{}",
        human(plan.budget),
        plan.extent.width,
        plan.ledger
    );
}

/// A number of things.
pub(crate) fn count(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// Prints one line of JSON.
pub(crate) fn print_json(object: &Value) -> Result<(), Failure> {
    print(&object.to_string())
}

/// Prints a result. Whoever goes away instead of reading it is no failure.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    print_line(text).map(drop)
}

/// The same of a line among others: false if whoever read them went away.
pub(crate) fn print_line(text: &str) -> Result<bool, Failure> {
    // One piece, so that it is not written word by word.
    match output::stdout().write_all(format!("{text}\n").as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(Failure::output(std::path::Path::new("standard output"), &e)),
        Ok(()) => Ok(true),
    }
}

/// The JSON of a plan and what became of it.
pub(crate) fn memory(plan: &Plan) -> Value {
    json!({
        "budget_bytes": plan.budget,
        "planned_bytes": plan.ledger.total(),
        "peak_rss_bytes": peak_rss(),
        "pinned_layers": plan.pinned(),
        "head_pinned": plan.head_pinned(),
        "arena_experts": plan.arena,
        "chunk": plan.extent.chunk,
        "context": plan.extent.context,
    })
}

/// The JSON of what a command without an engine was given and took.
pub(crate) fn held(budget: u64) -> Value {
    json!({"budget_bytes": budget, "peak_rss_bytes": peak_rss()})
}

/// The JSON of what was read. Bytes of a token are filled in by who generates one after the other.
pub(crate) fn io(stats: &Stats, direct: bool) -> Value {
    json!({
        "bytes_read": stats.bytes_read,
        "bytes_per_token": null,
        "trunk_hit_rate": stats.trunk_hit_rate(),
        "expert_hit_rate": stats.expert_hit_rate(),
        "direct": direct,
        "disk_busy_seconds": stats.disk_busy.as_secs_f64(),
        "waited_seconds": stats.waited().as_secs_f64(),
        "computed_seconds": stats.computed().as_secs_f64(),
        "overlap": stats.overlap(),
    })
}

/// The JSON of guesses.
pub(crate) fn guesses(guesses: &Guesses) -> Value {
    let Guesses { passes, drafted, accepted, rests } = guesses;
    json!({"passes": passes, "drafted": drafted, "accepted": accepted, "rests": rests})
}

/// The JSON of experts with scales that are NaN.
pub(crate) fn damaged(stats: &Stats) -> Value {
    let each = |((layer, expert), count): (&(LayerIndex, ExpertId), _)| json!({"layer": layer.0, "expert": expert.0, "nan_scale_bytes": count});
    stats.experts.nan_scales.iter().map(each).collect()
}

/// Prints what the run did.
pub(crate) fn end(outcome: &Outcome, stats: &Stats, plan: &Plan) {
    let _ = writeln!(
        std::io::stderr(),
        "{} in {:.2} s, {} generated, {} per token",
        count(outcome.prompt, "prompt token"),
        outcome.prefill.as_secs_f64(),
        outcome.generated,
        outcome.per_token().map_or("-".to_owned(), |s| format!("{s:.3} s")),
    );
    if plan.speculate > 0 {
        let Guesses { passes, drafted, accepted, rests } = outcome.guesses;
        let _ = writeln!(
            std::io::stderr(),
            "guessed {drafted} tokens in {passes} passes, {accepted} of them right; rested {rests} times"
        );
    }
    resources(stats, plan);
}

/// Prints what was read and held.
pub(crate) fn resources(stats: &Stats, plan: &Plan) {
    let mut err = std::io::stderr().lock();
    let percent = |rate: Option<f64>| rate.map_or("-".to_owned(), |r| format!("{:.1}%", 100.0 * r));
    let _ = writeln!(
        err,
        "computed {:.2} s, waited {:.2} s; the disk was busy for {:.2} s, {} of it behind computing",
        stats.computed().as_secs_f64(),
        stats.waited().as_secs_f64(),
        stats.disk_busy.as_secs_f64(),
        percent(stats.overlap()),
    );
    let _ = writeln!(
        err,
        "read {}; trunk hits {}, expert hits {}; peak memory {} of {}",
        human(stats.bytes_read),
        percent(stats.trunk_hit_rate()),
        percent(stats.expert_hit_rate()),
        peak_rss().map_or("unknown".to_owned(), human),
        human(plan.budget),
    );
}

/// Warns of damaged experts, however quiet the run is: their weights were not all used.
pub(crate) fn damage(stats: &Stats) {
    let nan = &stats.experts.nan_scales;
    let Some(((layer, expert), count)) = nan.iter().next() else { return };
    let more = match nan.len() - 1 {
        0 => String::new(),
        n => format!(", and {n} more experts are damaged"),
    };
    let _ = writeln!(
        std::io::stderr(),
        "warning: expert {} of layer {} has {count} scale bytes that are NaN (255), which counted as 0{more}",
        expert.0,
        layer.0
    );
}
