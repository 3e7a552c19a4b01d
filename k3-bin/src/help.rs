//! Help: the commands by what they are for, `--version` with what this build has, completions, and the
//! manual page.

use crate::args::{Cli, Completions};
use crate::fail::Failure;
use crate::report;
use clap::{CommandFactory as _, FromArgMatches as _};
use k3_core::backend::Backend;
use std::path::Path;

/// Commands by what they are for. One that is in no group stands under the last heading.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Start here", &["doctor", "run", "chat"]),
    ("Use a model", &["perplexity", "batch", "tokenize", "detokenize"]),
    ("Know and check a model", &["inspect", "verify", "plan", "ladder", "pack"]),
    ("Measure, and everything else", &["bench", "cachesim", "completions", "man", "help"]),
];

const EXAMPLES: &str = "\
Examples:
  k3 doctor                                   what this machine can do
  k3 run --prompt \"In the beginning\"          the demo, without a model
  k3 doctor /models/kimi-k3                   is the download whole, and what to type
  k3 run /models/kimi-k3 --prompt \"The capital of France is\" --memory 16G
  k3 help run                                 all about one command";

/// The definition of the command line, with what only this process knows.
fn command() -> clap::Command {
    let plain = Cli::command();
    let exit_codes = plain.get_after_help().map(ToString::to_string).unwrap_or_default();
    let list = list(&plain);
    plain
        .long_version(version())
        .after_help(format!("{EXAMPLES}\n\n{exit_codes}"))
        .help_template(format!("{{about}}\n\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"))
}

/// The version, and what this build and this processor have.
fn version() -> String {
    let features = if cfg!(feature = "demo") { "demo" } else { "none" };
    let names: Vec<_> = Backend::available().map(Backend::name).collect();
    format!(
        "{}\nfeatures: {features}\nkernels:  {} (this CPU has {})\ntarget:   {}-{}",
        env!("CARGO_PKG_VERSION"),
        Backend::detect().name(),
        names.join(", "),
        std::env::consts::ARCH,
        std::env::consts::OS,
    )
}

/// The commands, in groups, with what they do.
fn list(command: &clap::Command) -> String {
    let visible: Vec<_> = command.get_subcommands().filter(|c| !c.is_hide_set()).collect();
    let width = visible.iter().map(|c| c.get_name().len()).chain(["help".len()]).max().unwrap_or(0);
    let grouped = |name: &str| GROUPS.iter().any(|(_, names)| names.contains(&name));
    let mut text = String::new();
    for (i, (heading, names)) in GROUPS.iter().enumerate() {
        let mut lines = String::new();
        let mut line = |name: &str, about: &str| lines.push_str(&format!("  {name:width$}  {about}\n"));
        let about = |c: &clap::Command| c.get_about().map(ToString::to_string).unwrap_or_default();
        for name in *names {
            match visible.iter().find(|c| c.get_name() == *name) {
                Some(c) => line(name, &about(c)),
                None => line(name, "Prints this, or all about one command"),
            }
        }
        if i + 1 == GROUPS.len() {
            visible.iter().filter(|c| !grouped(c.get_name())).for_each(|c| line(c.get_name(), &about(c)));
        }
        if !lines.is_empty() {
            text.push_str(&format!("{heading}:\n{lines}\n"));
        }
    }
    text
}

/// What was typed. A usage error ends the process with 2, help and version with 0.
pub(crate) fn parse() -> Cli {
    let mut matches = command().get_matches();
    match Cli::from_arg_matches_mut(&mut matches) {
        Ok(cli) => cli,
        Err(error) => error.format(&mut command()).exit(),
    }
}

/// `k3 completions`.
pub(crate) fn completions(args: &Completions) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "k3", &mut script);
    report::print(String::from_utf8_lossy(&script).trim_end())?;
    Ok(0)
}

/// `k3 man`.
pub(crate) fn man() -> Result<u8, Failure> {
    let mut page = Vec::new();
    // A version with lines about this machine does not belong on a page for all machines, nor does the
    // template, which lists what the page lists as well.
    let done = clap_mangen::Man::new(Cli::command()).render(&mut page);
    done.map_err(|e| Failure::output(Path::new("the manual page"), &e))?;
    report::print(String::from_utf8_lossy(&page).trim_end())?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_a_group_and_says_what_it_does() {
        let text = command().render_help().to_string();
        for c in Cli::command().get_subcommands() {
            let line = text.lines().find(|line| line.split_whitespace().next() == Some(c.get_name()));
            assert_eq!(line.is_some(), !c.is_hide_set(), "{}", c.get_name());
            let grouped = GROUPS.iter().any(|(_, names)| names.contains(&c.get_name()));
            assert!(grouped || c.is_hide_set(), "{} belongs in a group of the help", c.get_name());
            assert!(c.get_about().is_some(), "{}", c.get_name());
        }
        // A heading promises no command that is not there.
        for name in GROUPS.iter().flat_map(|(_, names)| *names).filter(|name| **name != "help") {
            let named = |c: &clap::Command| c.get_name() == *name && !c.is_hide_set();
            assert!(Cli::command().get_subcommands().any(named), "{name} is no command");
        }
        for part in ["Start here", "Exit codes", "Examples", "--version"] {
            assert!(text.contains(part), "{text}");
        }
        Cli::command().debug_assert();
    }
}
