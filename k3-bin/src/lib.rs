//! The `k3` command as a library: arguments, progress, printing. No arithmetic and no policy of reading.
//!
//! It is a library so that what the command reads from outside is read in one place and can be called by who throws
//! any bytes at it (`tests/fuzz`): [`messages`], [`lines`] and [`listing`]. Programs that want a model use
//! `k3-platform`; what is here may change with every version.

mod args;
mod batch;
mod bench;
mod cache;
mod cachesim;
mod chat;
mod demo;
mod doctor;
pub mod fail;
mod faults;
mod help;
mod input;
mod inspect;
mod keep;
mod ladder;
mod line;
pub mod lines;
pub mod listing;
pub mod messages;
mod npy;
mod output;
mod pack;
mod perplexity;
mod plan;
mod report;
mod run;
mod sampling;
mod signals;
mod start;
mod svg;
mod synth;
mod text;
mod tokens;
mod trunk;
mod verify;

use args::Command;
use std::process::ExitCode;

/// Runs the command that the process was started with, and says how it ends.
#[must_use]
pub fn main() -> ExitCode {
    fail::abort_on_panic();
    // clap answers a usage error with 2 and help with 0, as documented.
    let cli = help::parse();
    let done = match cli.command {
        Command::Run(run) => run::run(&run),
        Command::Chat(chat) => chat::chat(&chat),
        Command::Batch(batch) => batch::batch(&batch),
        Command::Perplexity(perplexity) => perplexity::perplexity(&perplexity),
        Command::Plan(plan) => plan::plan(&plan),
        Command::Ladder(ladder) => ladder::ladder(&ladder),
        Command::Pack(args) => pack::pack(&args),
        Command::Tokenize(tokenize) => tokens::tokenize(&tokenize),
        Command::Detokenize(detokenize) => tokens::detokenize(&detokenize),
        Command::Inspect(inspect) => inspect::inspect(&inspect),
        Command::Verify(verify) => verify::verify(&verify),
        Command::Doctor(doctor) => doctor::doctor(&doctor),
        Command::Completions(completions) => help::completions(&completions),
        Command::Man => help::man(),
        Command::Bench(bench) => bench::bench(&bench),
        Command::Cachesim(cachesim) => cachesim::cachesim(&cachesim),
        Command::Synth(synth) => synth::run(&synth),
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            failure.print();
            ExitCode::from(failure.code)
        }
    }
}
