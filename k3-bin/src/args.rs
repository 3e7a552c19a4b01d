//! The command line.

use clap::{Args, Parser, Subcommand, ValueEnum};
use k3_platform::io::PATIENCE;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

/// Runs Kimi K3 on one ordinary CPU, in as little memory as you give it.
#[derive(Debug, Parser)]
#[command(name = "k3", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    a check that was asked for failed
  2    usage, or a config or prompt that is refused
  3    the checkpoint, packed trunk, vocabulary or session is damaged, incomplete or of another model
  4    the budget cannot hold the request
  5    I/O failed while running
  6    the arithmetic went non-finite
  130  interrupted (143: terminated); what was generated so far is printed

Sizes: G and GB are 10^9 bytes, GiB is 2^30; likewise M and K.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Continues a prompt with the model's own tokens.
    Run(Box<Run>),
    /// Talks with the model.
    Chat(Box<Chat>),
    /// Continues many prompts at the same time: one pass over the weights serves them all.
    Batch(Box<Batch>),

    /// Says how well the model predicts a text.
    Perplexity(Box<Perplexity>),

    /// Shows what a memory budget would be spent on, and what a token would cost; runs nothing.
    Plan(Box<Plan>),

    /// Runs one prompt at several memory budgets and says what each of them gains.
    Ladder(Box<Ladder>),

    /// Prints the token ids of a text, one a line.
    Tokenize(Tokenize),

    /// Prints the text of token ids, byte for byte.
    Detokenize(Detokenize),

    /// Says what this machine, its disk and a checkpoint can do, and what to type.
    Doctor(Box<Doctor>),

    /// Says what the bytes of a checkpoint are: every tensor, counted and held against the files. Of a packed
    /// trunk (k3 pack), its table.
    Inspect(Box<Inspect>),

    /// Checks a checkpoint: structure, digests, scales, and outputs against those of another engine.
    Verify(Box<Verify>),

    /// Copies the trunk into one verified file, losslessly a quarter smaller, or checks such a file.
    Pack(Pack),

    /// Measures memory, kernels and disk, and says what a token of a model would take.
    Bench(Box<Bench>),

    /// Replays an expert trace against arenas of other sizes.
    Cachesim(Cachesim),

    /// Prints a script that completes command lines.
    Completions(Completions),

    /// Prints the manual page.
    Man,

    /// Writes a checkpoint of placeholders, for measuring and for tests.
    #[command(hide = true)]
    Synth(Synth),
}

/// An id, with blanks around it.
fn id(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.trim().parse()
}

/// Ids to guess.
fn speculate(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if n <= SPECULATE_MOST => Ok(n),
        Ok(_) => Err(format!("guesses have at most {SPECULATE_MOST} tokens")),
        Err(e) => Err(format!("{e}")),
    }
}

/// No guess is longer: what comes after so many is hardly ever right.
const SPECULATE_MOST: usize = 64;

/// Where the weights are read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Io {
    /// Past the page cache where the file system allows it.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// How experts are chosen to stay in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Experts {
    /// Those that are asked for most often.
    Frequency,
    /// Those that were asked for last.
    Lru,
}

/// How a disk is read.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Reading {
    /// Seconds that a read may bring nothing before the command gives up; 0 waits for ever
    /// [default: 60].
    #[arg(long, value_name = "SECONDS")]
    pub(crate) io_timeout: Option<u32>,

    /// Reads no faster than so many GB a second, to see what another disk would do.
    #[arg(long, value_name = "GB/S", hide = true)]
    pub(crate) disk_limit: Option<f64>,
}

impl Reading {
    /// How long a read may bring nothing.
    pub(crate) fn patience(self) -> Duration {
        match self.io_timeout {
            None => PATIENCE,
            // Nobody waits for a century, and an instant can be that far away.
            Some(0) => Duration::from_secs(100 * 365 * 86_400),
            Some(seconds) => Duration::from_secs(seconds.into()),
        }
    }
}

/// What every command that runs a model takes.
#[derive(Debug, Args)]
pub(crate) struct Common {
    #[cfg_attr(
        feature = "demo",
        doc = "The checkpoint's directory, as downloaded [default: a tiny demo model that is part of k3]."
    )]
    #[cfg_attr(not(feature = "demo"), doc = "The checkpoint's directory, as downloaded.")]
    #[arg(env = "K3_MODEL", value_name = "MODEL_DIR")]
    pub(crate) model: Option<PathBuf>,

    /// Memory the whole process may use at its peak, such as 2G or 12GiB; "auto" is what the machine
    /// has free, less a reserve.
    #[arg(long, value_name = "SIZE", default_value = "auto", allow_negative_numbers = true)]
    pub(crate) memory: String,

    /// Threads that compute [default: the physical cores this process may use].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Kernels: scalar, avx2 or avx512; "auto" is the best of this CPU. The answer never depends on it.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub(crate) backend: String,

    /// Positions per prefill pass [default: what a sixteenth of the memory holds].
    #[arg(long, value_name = "N")]
    pub(crate) chunk: Option<std::num::NonZeroUsize>,

    /// How weights are read.
    #[arg(long, value_enum, default_value_t = Io::Direct)]
    pub(crate) io: Io,

    #[command(flatten)]
    pub(crate) reading: Reading,

    /// A packed trunk (k3 pack) to read instead of the shards' trunk; "auto" is trunk.k3 in MODEL_DIR if
    /// it is there and of this model, "none" is the shards.
    #[arg(long, value_name = "FILE", default_value = "auto")]
    pub(crate) trunk: PathBuf,

    /// Which experts stay in memory.
    #[arg(long, value_enum, default_value_t = Experts::Frequency)]
    pub(crate) experts: Experts,

    /// Prints one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,

    /// No progress and no report.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// A help text: its lines that begin with "@" are about the demo, and not for a k3 without it.
fn help(text: &str) -> String {
    let lines = text.lines().filter_map(|line| match line.strip_prefix('@') {
        Some(line) => cfg!(feature = "demo").then_some(line),
        None => Some(line),
    });
    lines.collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

const TOKENIZE_EXAMPLES: &str = "\
Examples:
  k3 tokenize /models/kimi-k3 --text \"Hello world\"
  k3 tokenize /models/kimi-k3 --file book.txt --count
  k3 tokenize < book.txt | k3 detokenize | cmp - book.txt

Only tiktoken.model of MODEL_DIR is needed, and tokenizer_config.json where it is there.";

#[derive(Debug, Args)]
#[command(after_help = TOKENIZE_EXAMPLES)]
pub(crate) struct Tokenize {
    #[command(flatten)]
    pub(crate) model: TokenizerDir,

    /// The text.
    #[arg(long, value_name = "TEXT", conflicts_with = "file")]
    pub(crate) text: Option<std::ffi::OsString>,

    /// A file with the text, taken byte for byte; "-" is standard input.
    #[arg(long, value_name = "PATH", default_value = "-")]
    pub(crate) file: PathBuf,

    /// Turns spellings such as <|open|> into control ids; without it they are text.
    #[arg(long)]
    pub(crate) parse_special: bool,

    /// Prints how many ids there are, and not the ids.
    #[arg(long)]
    pub(crate) count: bool,

    /// Prints one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = TOKENIZE_EXAMPLES)]
pub(crate) struct Detokenize {
    #[command(flatten)]
    pub(crate) model: TokenizerDir,

    /// The ids, separated by commas or blanks.
    #[arg(long, value_name = "1,2,3", conflicts_with = "file")]
    pub(crate) ids: Option<String>,

    /// A file with the ids in decimal, separated by white space or commas; "-" is standard input.
    #[arg(long, value_name = "PATH", default_value = "-")]
    pub(crate) file: PathBuf,

    /// Spells control ids out; without it they are left out.
    #[arg(long)]
    pub(crate) special: bool,

    /// Prints one JSON object, in which bytes that are not UTF-8 are replaced.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the tokenizer's files are.
#[derive(Debug, Args)]
pub(crate) struct TokenizerDir {
    #[cfg_attr(
        feature = "demo",
        doc = "The directory with tiktoken.model [default: the demo model that is part of k3]."
    )]
    #[cfg_attr(not(feature = "demo"), doc = "The directory with tiktoken.model.")]
    #[arg(env = "K3_MODEL", value_name = "MODEL_DIR")]
    pub(crate) dir: Option<PathBuf>,
}

const RUN_EXAMPLES: &str = "\
Examples:
@  k3 run --prompt \"In the beginning\"
  k3 run /models/kimi-k3 --prompt \"The capital of France is\" --memory 16G
  k3 run /models/kimi-k3 --prompt-file question.txt --max-tokens 400 --json > answer.json
  K3_MODEL=/models/kimi-k3 k3 run --ids 1008,10484,318,15383,387 --max-tokens 8
  k3 run /models/kimi-k3 --prompt \"Once\" --temperature 0.8 --top-p 0.95 --seed 7 --session tale.k3s
  k3 run /models/kimi-k3 --session tale.k3s --max-tokens 50

@Without MODEL_DIR and K3_MODEL the demo model runs. It is unpacked once, to k3/ in $XDG_CACHE_HOME or
@~/.cache, and checked at every start.";

#[derive(Debug, Args)]
#[command(after_help = help(RUN_EXAMPLES))]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) prompt: Prompt,

    /// Tokens to generate at most.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,

    /// Positions the sequence may have [default: what prompt and --max-tokens need].
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,

    /// Runs the whole prefix again for each token: slow, and a check of everything that is kept.
    #[arg(long, conflicts_with = "session")]
    pub(crate) no_incremental: bool,

    /// Guesses up to N tokens from what the text has said before, and reads them in one pass with the
    /// last one. The text is the same; it is faster where it repeats itself. Switches itself off while
    /// that does not pay.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = speculate, conflicts_with = "no_incremental")]
    pub(crate) speculate: usize,

    /// Goes on past the ids that end a text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Turns spellings such as <|open|> in the prompt into control ids; without it they are text.
    #[arg(long, conflicts_with = "ids")]
    pub(crate) parse_special: bool,

    /// Records which experts each pass asks for, for k3 cachesim.
    #[arg(long, value_name = "FILE", conflicts_with = "no_incremental")]
    pub(crate) trace: Option<PathBuf>,

    /// Writes the logits of every prompt position to a .npy file, f32 [positions, vocabulary].
    #[arg(long, value_name = "FILE.npy", conflicts_with = "session")]
    pub(crate) dump_logits: Option<PathBuf>,

    /// The ladder's process whose rung this is.
    #[arg(long, value_name = "PID", hide = true)]
    pub(crate) rung_of: Option<i32>,

    #[command(flatten)]
    pub(crate) sampling: Sampling,

    #[command(flatten)]
    pub(crate) logprobs: Logprobs,

    #[command(flatten)]
    pub(crate) session: Session,

    #[command(flatten)]
    pub(crate) common: Common,
}

const LADDER_HELP: &str = "\
Each budget is a process of its own, k3 run, so that its peak is its own. A line is printed when its
process has ended; columns are separated by tabs, and what is not known is \"-\":

  budget_bytes       what was asked for
  status             ok; refused (below the floor, nothing was run); failed; cancelled
  floor_bytes        the least budget that can hold this request
  pinned_layers      layers that stay in memory, of all layers (N/L)
  head_pinned        whether lm_head stays, too
  arena_experts      experts that have room in memory
  seconds_per_token  of the tokens after the first
  trunk_hit_rate     share of layers found in memory
  expert_hit_rate    share of experts found in memory
  gb_per_token       10^9 bytes read for each token after the first
  peak_rss_bytes     peak of the process
  same_ids           whether the tokens are those of the first budget that ran

The exit code is 0 also if some budgets were refused, 4 if all were, 1 if the tokens were not the same
everywhere, and that of the run if one failed.

Examples:
@  k3 ladder --budgets 24M,32M,64M
  k3 ladder /models/kimi-k3 --budgets 2G,4G,8G,16G --out ladder.tsv --svg ladder.svg
  k3 ladder /models/kimi-k3 --memory 24G --prompt \"The capital of France is\" --json";

#[derive(Debug, Args)]
#[command(after_help = help(LADDER_HELP))]
pub(crate) struct Ladder {
    /// Budgets to try, such as 2G,4GiB [default: from the least that will do, by powers of two, to all
    /// that helps or to --memory].
    #[arg(long, value_name = "SIZE,SIZE", value_delimiter = ',', num_args = 1, conflicts_with = "memory")]
    pub(crate) budgets: Vec<String>,

    #[command(flatten)]
    pub(crate) prompt: AnyPrompt,

    /// Tokens to generate.
    #[arg(long, value_name = "N", default_value = "4")]
    pub(crate) max_tokens: NonZeroUsize,

    /// Writes the table to a file, too.
    #[arg(long, value_name = "FILE.tsv")]
    pub(crate) out: Option<PathBuf>,

    /// Draws time and hit rates, too.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) svg: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) common: Common,
}

const BATCH_HELP: &str = "\
Input, a line for each prompt:
  {\"id\": \"a\", \"prompt\": \"text\"}    or    {\"id\": 1, \"ids\": [1008, 10484]}
  id is a string or a number and occurs once. A line that is wrong is refused by its number before
  anything runs. A line may have what is then used in place of the option of that name:
  \"max_tokens\", \"temperature\", \"top_p\", \"top_k\", \"min_p\", \"seed\", \"repeat_penalty\", \"logprobs\",
  \"logit_bias\": {\"17\": -2.5, \"9\": \"-inf\"}, \"stop\": \"text\" or an id or a list of both

Output, a line for each text, in the order in which they end:
  {\"id\": \"a\", \"generated_ids\": [..], \"text\": \"..\", \"finish_reason\": \"length\", \"stopped_by\": {..}}
  and \"logprobs\" where they are asked for, all as in k3 run --json.
  The first line says what the texts depend on: input, model, and the options that matter to them.
  Each line is written when its text has ended. If the batch is interrupted, the same command goes on
  with the prompts that have no line yet; --memory, --threads and the like may be others then.

Each text is the one that k3 run gives for its prompt, with the same seed where it is drawn. A text whose
arithmetic goes non-finite has no line; it is named at the end, and the others are not touched (exit code 6).

Example:
  k3 batch /models/kimi-k3 --input prompts.jsonl --output texts.jsonl --memory 32G";

#[derive(Debug, Args)]
#[command(after_help = BATCH_HELP)]
pub(crate) struct Batch {
    /// The prompts, one JSON object a line; "-" is standard input.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) input: PathBuf,

    /// Where the texts go. A file that an interrupted batch has left is continued.
    #[arg(long, value_name = "FILE.jsonl")]
    pub(crate) output: PathBuf,

    /// Tokens to generate at most, for prompts that do not say.
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub(crate) max_tokens: usize,

    /// Positions a sequence may have [default: what the longest prompt and its tokens need].
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,

    /// Prompts that run at the same time at most [default: what half of the memory holds].
    #[arg(long, value_name = "N")]
    pub(crate) in_flight: Option<NonZeroUsize>,

    /// Goes on past the ids that end a text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// Turns spellings such as <|open|> in prompts into control ids; without it they are text.
    #[arg(long)]
    pub(crate) parse_special: bool,

    #[command(flatten)]
    pub(crate) sampling: Sampling,

    /// Adds to each text the log-probability of each id, and those of the N best.
    #[arg(long, value_name = "N", help_heading = "Sampling", value_parser = clap::value_parser!(u16).range(..=LOGPROBS_MOST))]
    pub(crate) logprobs: Option<u16>,

    #[command(flatten)]
    pub(crate) common: Common,
}

/// How ids are chosen.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct Sampling {
    /// Draws ids instead of taking the best: above 1 more freely, below 1 less; 0 takes the best.
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f64>,

    /// Draws from the best ids that have this share of the probability together.
    #[arg(long, value_name = "P", requires = "temperature", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,

    /// Draws from the best K ids.
    #[arg(long, value_name = "K", requires = "temperature")]
    pub(crate) top_k: Option<u32>,

    /// Draws from ids that have at least this share of the best one's probability.
    #[arg(long, value_name = "P", requires = "temperature", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,

    /// Where the randomness comes from: the same seed gives the same text everywhere [default: 0].
    #[arg(long, value_name = "N", requires = "temperature")]
    pub(crate) seed: Option<u64>,

    /// Makes ids that the sequence holds already less likely (above 1) or more likely (below 1).
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub(crate) repeat_penalty: Option<f64>,

    /// Adds V to the logit of an id; -inf takes it out. May be given more than once.
    #[arg(long, value_name = "ID=V", value_parser = bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,

    /// Ends the text before TEXT or at the id (digits alone are an id; text:42 is the text \"42\"). May be
    /// given more than once.
    #[arg(long, value_name = "TEXT|ID", value_parser = stop, allow_hyphen_values = true)]
    pub(crate) stop: Vec<Stop>,
}

/// What is told of the choices.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct Logprobs {
    /// Adds to the JSON the log-probability of each id, and those of the N best.
    #[arg(long, value_name = "N", requires = "json", value_parser = clap::value_parser!(u16).range(..=LOGPROBS_MOST))]
    pub(crate) logprobs: Option<u16>,
}

/// The most log-probabilities of a place that are told.
pub(crate) const LOGPROBS_MOST: i64 = 1000;

/// What ends a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Stop {
    Text(Vec<u8>),
    Id(u32),
}

fn stop(text: &str) -> Result<Stop, String> {
    if let Some(text) = text.strip_prefix("text:").filter(|text| !text.is_empty()) {
        return Ok(Stop::Text(text.into()));
    }
    if text.is_empty() {
        return Err("an empty text is everywhere".to_owned());
    }
    if text.bytes().all(|b| b.is_ascii_digit()) {
        return text.parse().map(Stop::Id).map_err(|e| e.to_string());
    }
    Ok(Stop::Text(text.into()))
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let (id, value) = text.split_once('=').ok_or("write ID=V, such as 17=-2.5")?;
    let value: f32 = value.trim().parse().map_err(|e| format!("{value}: {e}"))?;
    Ok((self::id(id).map_err(|e| format!("{id}: {e}"))?, value))
}

/// A sequence that is kept in a file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Session")]
pub(crate) struct Session {
    /// Keeps the sequence in a file, and goes on from it: only what is new is read. Nobody else can read a new
    /// one.
    #[arg(long, value_name = "FILE")]
    pub(crate) session: Option<PathBuf>,

    /// Bytes of the file for states on the way, from which a text that was edited resumes. One of the
    /// released model has 465 MB.
    #[arg(long, value_name = "SIZE", default_value = "1G", requires = "session")]
    pub(crate) session_checkpoints: String,
}

const CHAT_EXAMPLES: &str = "\
Examples:
  k3 chat /models/kimi-k3 --memory 16G
  k3 chat /models/kimi-k3 --message \"What is a monad?\" --think low
  k3 chat /models/kimi-k3 --messages talk.json --json > answer.json
  k3 chat /models/kimi-k3 --session talk.k3s

Thinking goes to standard error, the answer to standard output. In a dialogue /help lists the commands;
Ctrl-C ends an answer, and a second one the program.";

#[derive(Debug, Args)]
#[command(after_help = CHAT_EXAMPLES)]
pub(crate) struct Chat {
    /// Says this, prints the answer and ends.
    #[arg(long, value_name = "TEXT", conflicts_with = "messages")]
    pub(crate) message: Option<std::ffi::OsString>,

    /// Answers a conversation, a JSON list of messages as for the OpenAI API, and ends; \"-\" is standard
    /// input.
    #[arg(long, value_name = "FILE")]
    pub(crate) messages: Option<PathBuf>,

    /// What the model is told first.
    #[arg(long, value_name = "TEXT", conflicts_with = "messages")]
    pub(crate) system: Option<String>,

    /// Tools the model may call: a JSON list of declarations.
    #[arg(long, value_name = "FILE")]
    pub(crate) tools: Option<PathBuf>,

    /// Whether and how much the model thinks: off, on, low, high or max [default: max; off for the demo].
    #[arg(long, value_name = "EFFORT", value_parser = thinking)]
    pub(crate) think: Option<k3_core::chat::Thinking>,

    /// Does not show what the model thinks.
    #[arg(long, conflicts_with = "json")]
    pub(crate) hide_thinking: bool,

    /// Tokens of an answer at most.
    #[arg(long, value_name = "N", default_value = "2048")]
    pub(crate) max_tokens: NonZeroUsize,

    /// Positions the conversation may have [default: 4096 in a dialogue, else what is needed].
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,

    /// Guesses up to N tokens from what was said before, and reads them in one pass with the last one; as in
    /// k3 run.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = speculate)]
    pub(crate) speculate: usize,

    #[command(flatten)]
    pub(crate) sampling: Sampling,

    #[command(flatten)]
    pub(crate) logprobs: Logprobs,

    #[command(flatten)]
    pub(crate) session: Session,

    #[command(flatten)]
    pub(crate) common: Common,
}

/// `on` is the effort that the release takes when none is named.
pub(crate) fn thinking(text: &str) -> Result<k3_core::chat::Thinking, String> {
    use k3_core::chat::{Effort, Thinking};
    match text {
        "off" => Ok(Thinking::Off),
        "on" => Ok(Thinking::On(Some(Effort::default()))),
        name => Effort::by_name(name)
            .map(|effort| Thinking::On(Some(effort)))
            .ok_or_else(|| "it is off, on, low, high or max".to_owned()),
    }
}

const PACK_EXAMPLES: &str = "\
Examples:
  k3 pack /models/kimi-k3 /models/kimi-k3/trunk.k3
  k3 pack /models/kimi-k3 /fast/trunk.k3 --threads 8
  k3 run /models/kimi-k3 --trunk /fast/trunk.k3 --prompt \"Hello\"
  k3 pack --verify /fast/trunk.k3 /models/kimi-k3

As MODEL_DIR/trunk.k3 the file is found by itself. An interrupted pack goes on where it stopped when the
same command is given again; until it is whole and read back it is called OUT.part.";

#[derive(Debug, Args)]
#[command(after_help = PACK_EXAMPLES, override_usage = "\
k3 pack [OPTIONS] MODEL_DIR OUT
       k3 pack --verify OUT [MODEL_DIR]")]
pub(crate) struct Pack {
    /// The checkpoint's directory; with --verify, the packed file.
    #[arg(value_name = "MODEL_DIR")]
    pub(crate) first: PathBuf,

    /// The file to write, which must not exist; with --verify, the model to compare it with.
    #[arg(value_name = "OUT")]
    pub(crate) second: Option<PathBuf>,

    /// Codes matrices so that they take three quarters; every bit is preserved. This is the default.
    #[arg(long, conflicts_with = "raw")]
    pub(crate) lossless: bool,

    /// Copies weights as they are.
    #[arg(long)]
    pub(crate) raw: bool,

    /// Threads that read and code [default: the physical cores this process may use].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    #[command(flatten)]
    pub(crate) reading: Reading,

    /// Does not read the file back before it gets its name.
    #[arg(long)]
    pub(crate) no_verify: bool,

    /// Checks a packed file: all its checksums, and every weight if MODEL_DIR is given. Exit code 1 says
    /// that it is not whole.
    #[arg(long, conflicts_with_all = ["lossless", "raw", "threads", "no_verify"])]
    pub(crate) verify: bool,

    /// No progress and no summary.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

const BENCH_HELP: &str = "\
Reading is measured on the model's own files, or, without one, on a file of up to 1 GiB in the current
folder, which has no name and is gone with the process. Close other programs: whatever else runs makes
the figures smaller.

What is measured keeps within --memory: with less of it there are fewer weights and fewer reads in flight, and
what there is no memory for is said, and null in the JSON.

Examples:
  k3 bench
  k3 bench /models/kimi-k3 --memory 16G
  k3 bench --quick --json | jq .kernels";

#[derive(Debug, Args)]
#[command(after_help = BENCH_HELP)]
pub(crate) struct Bench {
    /// Seconds to measure, about.
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    pub(crate) seconds: u16,

    /// Four seconds, for a first look.
    #[arg(long, conflicts_with = "seconds")]
    pub(crate) quick: bool,

    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
pub(crate) struct Cachesim {
    /// A trace that k3 run --trace has written.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,

    /// Experts the arena holds [default: ten sizes up to all that were ever asked for].
    #[arg(long, value_name = "N,N", value_delimiter = ',')]
    pub(crate) slots: Vec<usize>,

    /// FILE holds pairs of i32 (layer, expert) of passes that grow by a position: the ids of the
    /// first one.
    #[arg(long, value_name = "IDS")]
    pub(crate) pairs: Option<std::num::NonZeroUsize>,

    /// Experts a position chooses, for --pairs.
    #[arg(long, value_name = "K", default_value = "16", requires = "pairs")]
    pub(crate) chosen: std::num::NonZeroUsize,

    /// Draws the curves, too.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) svg: Option<PathBuf>,

    /// Prints one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Positions a plan makes room for when none are asked for.
pub(crate) const PLAN_CONTEXT: usize = 4096;

/// What a plan that nothing is run by is made for.
#[derive(Debug, Args)]
pub(crate) struct Planned {
    /// Positions the sequence may have.
    #[arg(long, value_name = "N", default_value_t = PLAN_CONTEXT)]
    pub(crate) context: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    pub(crate) planned: Planned,

    /// Speed of the disk in GB (10^9 bytes) a second [default: measured on the checkpoint for a second].
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true)]
    pub(crate) disk: Option<f64>,

    #[command(flatten)]
    pub(crate) common: Common,
}

const DOCTOR_HELP: &str = "\
What is measured takes a few seconds and reads at most some gigabytes, past the page cache. Without
MODEL_DIR it is the disk under the current folder, by a file that is written there and removed. It keeps
within --memory: with less of it there are fewer reads in flight, and what there is no memory for is said, and
null in the JSON.

The exit code is 0 if the model can run, however slowly; 3 if it is damaged or incomplete, 4 if there is
too little memory for it, 5 if the system cannot read it.

Examples:
  k3 doctor
  k3 doctor /models/kimi-k3
  k3 doctor /models/kimi-k3 --memory 16G --json > machine.json";

#[derive(Debug, Args)]
#[command(after_help = DOCTOR_HELP)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) planned: Planned,

    #[command(flatten)]
    pub(crate) common: Common,
}

const INSPECT_HELP: &str = "\
Examples:
  k3 inspect /models/kimi-k3
  k3 inspect /models/kimi-k3 --memory 16G --json";

#[derive(Debug, Args)]
#[command(after_help = INSPECT_HELP)]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) planned: Planned,

    #[command(flatten)]
    pub(crate) common: Common,
}

const VERIFY_HELP: &str = "\
Without options: every shard is there with the length and the header it should have, index, config,
shards and vocabulary agree, no tensor is missing, twice, or of another model. This reads the headers
only. All faults are listed; a file that is bad whatever the others are comes with what fetches it again.

--hash reads every byte. FILE is what sha256sum prints, or the listing of a model hub saved as JSON (an
array of files with \"path\", \"size\" and \"lfs\", or a model with \"siblings\"). Files that a listing has
no SHA-256 for are held against their sizes. What was digested is recorded in k3/ in $XDG_CACHE_HOME or
~/.cache as long as something is left to do, so a check that was stopped goes on where it was. A listing must
say something of every file that a run reads.

With less --memory, --hash and --scales read less at a time. Reading the index takes some 25 MB for the release,
whatever --memory says; a check that has no room beside it is refused.

--logits compares after each of --ids; a file of fewer rows is that of the last ids. --layers compares the
running sum that leaves each layer: DIR has a file for each layer, such as layer-007.npy, [ids, hidden];
one file of [layers, ids, hidden] will do as well. Files are .npy (<f4, <f8), safetensors of one tensor
(F32, BF16), or raw f32. What a layer may be off by is --layer-budget times the standard deviation of its
reference.

The exit code is 0 if all is well, 1 if a check that was asked for failed, 2 if config.json is refused, 3 if the
checkpoint is damaged or incomplete, 5 if the system could not read all of it.

Examples:
  k3 verify /models/kimi-k3
  k3 verify /models/kimi-k3 --hash SHA256SUMS --scales
  k3 verify /models/kimi-k3 --ids 1,2,3 --logits reference.npy --tolerance 0.01
  k3 verify /models/kimi-k3 --ids 1,2,3 --layers hidden/";

#[derive(Debug, Args)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct Verify {
    /// Holds every file against its SHA-256.
    #[arg(long, value_name = "FILE")]
    pub(crate) hash: Option<PathBuf>,

    /// Digests files again that an earlier check has digested.
    #[arg(long, requires = "hash")]
    pub(crate) again: bool,

    /// Looks at the scale bytes of every expert.
    #[arg(long)]
    pub(crate) scales: bool,

    /// The token ids that are run, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', num_args = 1, value_parser = id)]
    pub(crate) ids: Vec<u32>,

    /// Compares the logits with those of a file.
    #[arg(long, value_name = "FILE", requires = "ids")]
    pub(crate) logits: Option<PathBuf>,

    /// Compares what leaves each layer with the files of a directory.
    #[arg(long, value_name = "DIR", requires = "ids")]
    pub(crate) layers: Option<PathBuf>,

    /// What a logit may be off by.
    #[arg(long, value_name = "X", default_value_t = 5e-3, requires = "logits")]
    pub(crate) tolerance: f64,

    /// What a layer may be off by, as a share of its reference's standard deviation.
    #[arg(long, value_name = "X", default_value_t = 3e-3, requires = "layers")]
    pub(crate) layer_budget: f64,

    /// How many of the largest logits are compared as a set.
    #[arg(long, value_name = "K", default_value_t = 10, requires = "logits")]
    pub(crate) top: usize,

    #[command(flatten)]
    pub(crate) common: Common,
}

const COMPLETIONS_HELP: &str = "\
Examples:
  k3 completions bash > ~/.local/share/bash-completion/completions/k3
  k3 completions zsh > \"${fpath[1]}/_k3\"
  k3 completions fish > ~/.config/fish/completions/k3.fish";

#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_HELP)]
pub(crate) struct Completions {
    /// For which shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

const PERPLEXITY_HELP: &str = "\
What is counted:
  The text is encoded whole, as plain text, to n ids, and read in windows of N ids from the first id
  on. Each window begins from the zero state and predicts, after each of its ids, the id that follows
  in the text, so its last prediction is of the first id of the next window. Every id but the first
  of the text counts exactly once: n - 1 tokens, and their bytes. The first id of a window is read
  and not predicted there.

  nll            mean of -ln p, natural logarithm, over the counted tokens
  perplexity     e^nll
  bits_per_byte  total of -log2 p over the bytes of the counted tokens

Examples:
@  k3 perplexity --file fixtures/demo/heldout.txt --window 256
  k3 perplexity /models/kimi-k3 --file book.txt --memory 16G --json --nll-out nll.npy";

#[derive(Debug, Args)]
#[command(after_help = help(PERPLEXITY_HELP))]
pub(crate) struct Perplexity {
    /// The text, taken byte for byte; "-" is standard input.
    #[arg(long, value_name = "TEXT")]
    pub(crate) file: PathBuf,

    /// Ids a window reads from the zero state on [default: all of a text up to 2048].
    #[arg(long, value_name = "N")]
    pub(crate) window: Option<NonZeroUsize>,

    /// Writes -ln p of each counted token to a .npy file of one dimension, f64.
    #[arg(long, value_name = "FILE.npy")]
    pub(crate) nll_out: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) common: Common,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct Prompt {
    /// The text to continue.
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<std::ffi::OsString>,

    /// A file with the text to continue, taken byte for byte; "-" is standard input.
    #[arg(long, value_name = "PATH")]
    pub(crate) prompt_file: Option<PathBuf>,

    /// The token ids to continue, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', num_args = 1, value_parser = id)]
    pub(crate) ids: Option<Vec<u32>>,
}

impl Prompt {
    /// Whether none was given.
    pub(crate) const fn is_empty(&self) -> bool {
        self.prompt.is_none() && self.prompt_file.is_none() && self.ids.is_none()
    }
}

/// [`Prompt`] where one need not be given.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct AnyPrompt {
    /// The text to continue [default: the ids 1,2,3,4].
    #[arg(long, value_name = "TEXT")]
    prompt: Option<std::ffi::OsString>,

    /// A file with the text to continue, taken byte for byte; "-" is standard input.
    #[arg(long, value_name = "PATH")]
    pub(crate) prompt_file: Option<PathBuf>,

    /// The token ids to continue, separated by commas.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', num_args = 1, value_parser = id)]
    ids: Option<Vec<u32>>,
}

impl AnyPrompt {
    /// What was given, or else ids that every vocabulary has.
    pub(crate) fn or_ids(&self) -> Prompt {
        let Self { prompt, prompt_file, ids } = self;
        let none = prompt.is_none() && prompt_file.is_none() && ids.is_none();
        let ids = if none { Some(vec![1, 2, 3, 4]) } else { ids.clone() };
        Prompt { prompt: prompt.clone(), prompt_file: prompt_file.clone(), ids }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Synth {
    /// The directory to write; it must not exist, or be empty.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,

    /// A config.json [default: the shape of the release].
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Layers, counted from 0, that get random weights; "head" is what lies outside the layers. All else is holes.
    #[arg(long, value_name = "L0,L7,head", value_delimiter = ',', num_args = 1, conflicts_with = "fill_all")]
    pub(crate) fill: Vec<String>,

    /// Random weights everywhere.
    #[arg(long)]
    pub(crate) fill_all: bool,

    /// Where the weights' randomness starts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Prints one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}
