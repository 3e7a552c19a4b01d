//! The `k3` command: arguments, progress, printing. No arithmetic and no policy of reading.

mod args;
mod batch;
mod cachesim;
mod chat;
mod demo;
mod fail;
mod keep;
mod ladder;
mod line;
mod messages;
mod npy;
mod output;
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

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    // clap answers a usage error with 2 and help with 0, as documented.
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Run(run) => run::run(&run),
        Command::Chat(chat) => chat::chat(&chat),
        Command::Batch(batch) => batch::batch(&batch),
        Command::Perplexity(perplexity) => perplexity::perplexity(&perplexity),
        Command::Plan(plan) => plan::plan(&plan),
        Command::Ladder(ladder) => ladder::ladder(&ladder),
        Command::Tokenize(tokenize) => tokens::tokenize(&tokenize),
        Command::Detokenize(detokenize) => tokens::detokenize(&detokenize),
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
