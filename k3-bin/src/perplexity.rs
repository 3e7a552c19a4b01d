//! `k3 perplexity`: a text in, how much it surprised the model out.

use crate::args::Perplexity;
use crate::fail::Failure;
use crate::npy::Npy;
use crate::output::{self, Output};
use crate::report::{self, Progress};
use crate::start::{Options, Started, Wanted};
use crate::text;
use k3_core::ops::loss::{Loss, nll};
use k3_core::view::TokenId;
use k3_platform::error::Error;
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use serde_json::json;
use std::io::Write as _;
use std::time::Instant;

/// Positions of a window when none is asked for: long enough that more context changes little, short
/// enough that the cache of a window is small.
const WINDOW: usize = 2048;

/// Runs the command. The answer is the exit code of what is not a failure.
pub(crate) fn perplexity(args: &Perplexity) -> Result<u8, Failure> {
    let started = Instant::now();
    let options = Options::new(&args.common)?;
    let files = [("--file", Some(&args.file))];
    output::check(&[("--nll-out", args.nll_out.as_ref())], &files, args.common.model.as_deref())?;
    let out = Output::optional(args.nll_out.as_ref())?;
    let bytes = text::read(&args.file, "--file", options.budget())?;
    let opened = options.open()?;
    let mut files = text::vocabulary(&opened.checkpoint, true)?;
    let vocabulary = files.as_mut().map(VocabularyFiles::load).transpose()?.ok_or(Error::Order)?;
    let mut ids = vocabulary.encode(&bytes, false)?;
    ids.shrink_to_fit();
    // The text goes; the allocator keeps its place.
    let held = (bytes.len() as u64).saturating_add(size_of_val(&*ids) as u64);
    drop(bytes);
    // The last id is predicted and never read.
    let read = ids.len().saturating_sub(1);
    if read == 0 {
        return Err(Failure::usage(
            format!("{}: the text has {}", args.file.display(), report::count(ids.len(), "token")),
            "the first token of a text is never predicted: give it at least two",
        ));
    }
    let window = args.window.map_or(WINDOW, std::num::NonZeroUsize::get).min(read);
    let tokenizer = vocabulary.bytes();
    let mut run = opened.start(Wanted {
        context: window,
        prompt: window,
        all_logits: true,
        tokenizer,
        beside: held,
        ..Wanted::default()
    })?;
    let open = started.elapsed();
    let mut text = Text { args, vocabulary, ids: &ids, window };
    let (loss, complete) = text.score(&mut run, out)?;
    let total = started.elapsed();
    let stats = run.engine.stats();
    if args.common.json {
        report::print_json(&json!({
            "model": run.engine.checkpoint().dir().display().to_string(),
            "tokens": ids.len(),
            "counted": loss.tokens,
            "bytes": loss.bytes,
            "window": window,
            "complete": complete,
            "nll": loss.mean(),
            "perplexity": loss.perplexity(),
            "bits_per_byte": loss.bits_per_byte(),
            "seconds": {
                "total": total.as_secs_f64(),
                "open": open.as_secs_f64(),
                "waited_for_disk": stats.waited().as_secs_f64(),
            },
            "memory": report::memory(run.engine.plan()),
            "io": report::io(&stats, run.direct()),
            "threads": run.engine.plan().extent.width,
            "backend": run.engine.backend().name(),
            "damaged_experts": report::damaged(&stats),
        }))?;
    } else {
        let number = |x: Option<f64>| x.map_or("-".to_owned(), |x| format!("{x:.6}"));
        let lines = [
            ("tokens", ids.len().to_string()),
            ("counted", loss.tokens.to_string()),
            ("bytes", loss.bytes.to_string()),
            ("nll", number(loss.mean())),
            ("perplexity", number(loss.perplexity())),
            ("bits_per_byte", number(loss.bits_per_byte())),
            ("seconds", format!("{:.2}", total.as_secs_f64())),
        ];
        report::print(&lines.map(|(name, value)| format!("{name:<14} {value}")).join("\n"))?;
    }
    if !args.common.quiet {
        run.note_buffered();
        if !complete {
            let _ =
                writeln!(std::io::stderr(), "note: stopped after {} of {}", loss.tokens, report::count(read, "token"));
        }
        report::resources(&stats, run.engine.plan());
    }
    report::damage(&stats);
    Ok(Started::code(!complete))
}

/// A text and how it is cut.
struct Text<'a> {
    args: &'a Perplexity,
    vocabulary: Vocabulary<'a>,
    ids: &'a [TokenId],
    window: usize,
}

impl Text<'_> {
    /// Sums over the text; false if a signal ended it early.
    fn score(&mut self, run: &mut Started, out: Option<Output>) -> Result<(Loss, bool), Failure> {
        let engine = &mut run.engine;
        let config = *engine.checkpoint().config();
        let (vocab, chunk) = (config.vocab_size, engine.plan().extent.chunk);
        let mut logits = vec![0.0; vocab * engine.plan().logit_rows];
        let (inputs, targets) = (&self.ids[..self.ids.len() - 1], &self.ids[1..]);
        let mut out = match self.args.nll_out.as_ref().zip(out) {
            Some((path, out)) => {
                Some((Npy::<f64>::new(out, &[targets.len()]).map_err(|e| Failure::output(path, &e))?, path))
            }
            None => None,
        };
        let mut progress = Progress::new(!self.args.common.quiet, config.num_hidden_layers);
        let (mut loss, mut bytes) = (Loss::default(), Vec::new());
        progress.begin(String::new());
        for (inputs, targets) in inputs.chunks(self.window).zip(targets.chunks(self.window)) {
            engine.reset()?;
            for (inputs, targets) in inputs.chunks(chunk).zip(targets.chunks(chunk)) {
                let so_far = loss.perplexity().map_or(String::new(), |p| format!(", perplexity so far {p:.3}"));
                progress.update(format!("token {} of {}{so_far}", loss.tokens + 1, self.ids.len() - 1));
                let logits = &mut logits[..inputs.len() * vocab];
                match engine.step(inputs, logits, &mut progress) {
                    Err(Error::Stopped) => {
                        progress.clear();
                        return Ok((loss, false));
                    }
                    other => other?,
                }
                for (row, &target) in logits.chunks_exact(vocab).zip(targets) {
                    // The pass has refused logits that are not finite, and the vocabulary is the
                    // config's.
                    let nll = nll(row, target).ok().flatten().ok_or(Error::Order)?;
                    bytes.clear();
                    self.vocabulary.decode(target, &mut bytes);
                    loss.add(nll, bytes.len());
                    if let Some((npy, path)) = &mut out {
                        npy.write(&[nll]).map_err(|e| Failure::output(path, &e))?;
                    }
                }
            }
        }
        progress.clear();
        if let Some((npy, path)) = out {
            npy.finish().map_err(|e| Failure::output(path, &e))?;
        }
        Ok((loss, true))
    }
}
