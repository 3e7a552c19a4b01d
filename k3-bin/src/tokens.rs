//! `k3 tokenize` and `k3 detokenize`: text to ids and back, without a model.
//!
//! Both take a text of any length in little memory. A text is encoded in parts that do not depend on
//! what follows them (`tokenizer::settled`), which are below two megabytes unless the text holds a
//! longer run of bytes that are no UTF-8.

use crate::args::{Detokenize, Tokenize, TokenizerDir};
use crate::demo::{self, Demo};
use crate::fail::Failure;
use crate::input::{self, Input};
use crate::output;
use crate::signals;
use k3_core::tokenizer::{ControlText, Utf8Stream, settled};
use k3_core::view::TokenId;
use k3_platform::io::{Disk, Mode, Source};
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use std::borrow::Cow;
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;

/// Digits an id may have, zeros in front of it among them.
const DIGITS: usize = 32;

/// Why the work ends early.
enum Stop {
    /// Whoever read the output went away.
    Closed,
    /// The output cannot be written to.
    Output(Failure),
    Failed(Failure),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// A failed write.
impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Output(Failure::output(Path::new("standard output"), &error)),
        }
    }
}

/// Standard output. With `--json` it is one object, which is whole however the work ends: what fails while ids or
/// text are being printed closes them and is its last member.
struct Printer {
    out: BufWriter<output::Patient<io::StdoutLock<'static>>>,
    json: bool,
    /// What closes the members that have been begun; `None` before the first.
    close: Option<&'static str>,
    characters: Utf8Stream,
    count: u64,
    bytes: u64,
}

impl Printer {
    /// Prints what `work` prints, and says with what exit code the command ends.
    fn run(json: bool, work: impl FnOnce(&mut Self) -> Result<(), Stop>) -> Result<u8, Failure> {
        if json {
            // A signal, too, closes the object.
            signals::watch()?;
        }
        let out = BufWriter::with_capacity(1 << 16, output::stdout());
        let mut this = Self { out, json, close: None, characters: Utf8Stream::new(), count: 0, bytes: 0 };
        let done = work(&mut this);
        let printed = match &done {
            Ok(()) => this.end(None),
            Err(Stop::Failed(failure)) => this.end(Some(&failure.message)),
            Err(Stop::Closed | Stop::Output(_)) => Ok(()),
        };
        match done.and(printed.map_err(Stop::from)) {
            Ok(()) | Err(Stop::Closed) => Ok(0),
            Err(Stop::Failed(failure) | Stop::Output(failure)) => Err(failure),
        }
    }

    /// Begins the object: the directory, and what opens and closes the member that grows.
    fn begin(&mut self, dir: &Path, open: &str, close: &'static str) -> io::Result<()> {
        if self.json {
            write!(self.out, "{{\"model\":{}{open}", quoted(&dir.display().to_string()))?;
            self.close = Some(close);
        }
        Ok(())
    }

    /// Prints a part of a text.
    fn text(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.bytes += bytes.len() as u64;
        if !self.json {
            return self.out.write_all(bytes);
        }
        let mut json = String::new();
        self.characters.push(bytes, |part| json.push_str(escaped(part).as_str()));
        self.out.write_all(json.as_bytes())
    }

    /// Ends the object, or what is printed in its place.
    fn end(&mut self, error: Option<&str>) -> io::Result<()> {
        if self.json {
            let mut json = String::new();
            std::mem::take(&mut self.characters).finish(|part| json.push_str(part));
            let (count, bytes) = (self.count, self.bytes);
            let separator = match self.close {
                Some(close) => {
                    write!(self.out, "{json}{close},\"count\":{count},\"bytes\":{bytes}")?;
                    ","
                }
                None => {
                    write!(self.out, "{{")?;
                    ""
                }
            };
            if let Some(error) = error {
                write!(self.out, "{separator}\"error\":{}", quoted(error))?;
            }
            writeln!(self.out, "}}")?;
        }
        self.out.flush()
    }
}

/// Prints the ids of a text.
pub(crate) fn tokenize(args: &Tokenize) -> Result<u8, Failure> {
    Printer::run(args.json, |to| {
        let input = Bytes::open(args.text.as_ref().map(|text| text.as_bytes()), &args.file)?;
        with_vocabulary(&args.model, |dir, vocabulary| write_ids(args, input, dir, vocabulary, to))
    })
}

fn write_ids(
    args: &Tokenize,
    mut input: Bytes<'_>,
    dir: &Path,
    vocabulary: &Vocabulary<'_>,
    to: &mut Printer,
) -> Result<(), Stop> {
    let listed = !args.count;
    let (open, close) = if listed { (",\"ids\":[", "]") } else { ("", "") };
    to.begin(dir, open, close)?;
    let mut text = Vec::new();
    loop {
        let more = input.read(&mut text)?;
        let part = if more { settled(&text) } else { text.len() };
        if part > 0 {
            for id in vocabulary.encode(&text[..part], args.parse_special).map_err(Failure::from)? {
                match (listed, args.json) {
                    (true, true) if to.count > 0 => write!(to.out, ",{}", id.0)?,
                    (true, true) => write!(to.out, "{}", id.0)?,
                    (true, false) => writeln!(to.out, "{}", id.0)?,
                    (false, _) => {}
                }
                to.count += 1;
            }
            to.bytes += part as u64;
            text.drain(..part);
        }
        if !more {
            break;
        }
    }
    if args.count && !args.json {
        writeln!(to.out, "{}", to.count)?;
    }
    Ok(())
}

/// Prints the bytes of ids.
pub(crate) fn detokenize(args: &Detokenize) -> Result<u8, Failure> {
    Printer::run(args.json, |to| {
        let input = Bytes::open(args.ids.as_ref().map(String::as_bytes), &args.file)?;
        with_vocabulary(&args.model, |dir, vocabulary| write_text(args, input, dir, vocabulary, to))
    })
}

fn write_text(
    args: &Detokenize,
    mut input: Bytes<'_>,
    dir: &Path,
    vocabulary: &Vocabulary<'_>,
    to: &mut Printer,
) -> Result<(), Stop> {
    let controls = if args.special { ControlText::Spell } else { ControlText::Drop };
    let (mut text, mut bytes) = (Vec::new(), Vec::new());
    to.begin(dir, ",\"text\":\"", "\"")?;
    loop {
        let more = input.read(&mut text)?;
        let end = if more { text.iter().rposition(|&b| separates(b)).map_or(0, |i| i + 1) } else { text.len() };
        if end == 0 && text.len() > DIGITS && more {
            return Err(not_an_id(&text, to.count + 1).into());
        }
        for word in text[..end].split(|&b| separates(b)).filter(|word| !word.is_empty()) {
            let place = to.count + 1;
            let number = std::str::from_utf8(word).ok().filter(|word| word.bytes().all(|b| b.is_ascii_digit()));
            let Some(id) = number.and_then(|word| word.parse().ok()).map(TokenId) else {
                return Err(not_an_id(word, place).into());
            };
            vocabulary.decode_as(id, controls, &mut bytes).map_err(|unknown| {
                Failure::usage(
                    format!("id number {place}: {unknown}"),
                    "the ids are of another vocabulary, or damaged; what is printed is the text before it",
                )
            })?;
            to.text(&bytes)?;
            to.count = place;
            bytes.clear();
        }
        text.drain(..end);
        if !more {
            return Ok(());
        }
    }
}

/// What may stand between two ids.
const fn separates(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == b','
}

fn not_an_id(word: &[u8], number: u64) -> Failure {
    let shown = word.get(..DIGITS).map_or_else(
        || String::from_utf8_lossy(word),
        |front| Cow::Owned(format!("{}...", String::from_utf8_lossy(front))),
    );
    Failure::usage(
        format!("id number {number}: {shown:?} is not a token id"),
        "ids are decimal numbers, separated by white space or commas",
    )
}

/// A JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A part of a JSON string, without the quotes.
fn escaped(text: &str) -> String {
    let mut json = quoted(text);
    json.pop();
    json.remove(0);
    json
}

/// Calls `work` with the directory that was named, or the demo's, and its vocabulary.
fn with_vocabulary(
    args: &TokenizerDir,
    work: impl FnOnce(&Path, &Vocabulary<'_>) -> Result<(), Stop>,
) -> Result<(), Stop> {
    let (dir, demo) = match &args.dir {
        Some(dir) => (dir.clone(), None),
        None => {
            let demo = demo::unpack(true)?;
            (demo.dir().to_owned(), Some(demo))
        }
    };
    let disk = || Arc::new(Disk::new(Mode::Buffered)) as Arc<dyn Source>;
    let source = demo.as_ref().and_then(Demo::source).unwrap_or_else(disk);
    let mut files = VocabularyFiles::in_dir(&dir, &*source).map_err(Failure::from)?;
    let vocabulary = files.load().map_err(Failure::from)?;
    work(&dir, &vocabulary)
}

/// Where bytes come from.
struct Bytes<'a> {
    name: &'a Path,
    from: Box<dyn Read + 'a>,
}

impl<'a> Bytes<'a> {
    /// What was given itself, or else the file.
    fn open(given: Option<&'a [u8]>, file: &'a Path) -> Result<Self, Failure> {
        let from: Box<dyn Read + 'a> = match given {
            Some(bytes) => Box::new(bytes),
            None => Box::new(Input::open(file).map_err(|e| Self::failed(file, &e))?),
        };
        Ok(Self { name: file, from })
    }

    fn failed(name: &Path, error: &io::Error) -> Failure {
        input::failed(name, error, "--file takes a file, or - for standard input")
    }

    /// Appends up to a block; false if there is no more to come.
    fn read(&mut self, to: &mut Vec<u8>) -> Result<bool, Failure> {
        let block = self.from.by_ref().take(BLOCK as u64).read_to_end(to).map_err(|e| Self::failed(self.name, &e))?;
        Ok(block == BLOCK)
    }
}
