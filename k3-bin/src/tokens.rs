//! `k3 tokenize` and `k3 detokenize`: text to ids and back, without a model.
//!
//! Both take a text of any length in little memory. A text is encoded in parts that do not depend on
//! what follows them (`tokenizer::settled`), which are below two megabytes unless the text holds a
//! longer run of bytes that are no UTF-8.

use crate::args::{Detokenize, Tokenize, TokenizerDir};
use crate::demo::{self, Demo};
use crate::fail::Failure;
use crate::output;
use k3_core::tokenizer::{ControlText, Utf8Stream, settled};
use k3_core::view::TokenId;
use k3_platform::io::{Disk, Mode, Source};
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, BufWriter, ErrorKind, Read, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that are read at a time.
const BLOCK: usize = 1 << 20;

/// Digits an id may have, zeros in front of it among them.
const DIGITS: usize = 32;

/// Why the work ends early.
enum Stop {
    /// Whoever read the output went away.
    Closed,
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
            _ => Self::Failed(Failure::output(Path::new("standard output"), &error)),
        }
    }
}

/// The exit code of what is not a failure.
fn code(done: Result<(), Stop>) -> Result<u8, Failure> {
    match done {
        Ok(()) | Err(Stop::Closed) => Ok(0),
        Err(Stop::Failed(failure)) => Err(failure),
    }
}

/// Prints the ids of a text.
pub(crate) fn tokenize(args: &Tokenize) -> Result<u8, Failure> {
    let input = Input::open(args.text.as_ref().map(|text| text.as_bytes()), &args.file)?;
    let (dir, demo) = directory(&args.model)?;
    let disk = || Arc::new(Disk::new(Mode::Buffered)) as Arc<dyn Source>;
    let source = demo.as_ref().and_then(Demo::source).unwrap_or_else(disk);
    let mut files = VocabularyFiles::in_dir(&dir, &*source)?;
    code(write_ids(args, input, &dir, &files.load()?))
}

fn write_ids(args: &Tokenize, mut input: Input<'_>, dir: &Path, vocabulary: &Vocabulary<'_>) -> Result<(), Stop> {
    let mut out = BufWriter::with_capacity(1 << 16, output::stdout());
    let (mut text, mut count, mut bytes) = (Vec::new(), 0u64, 0u64);
    let listed = !args.count;
    if args.json {
        write!(out, "{{\"model\":{}", quoted(&dir.display().to_string()))?;
        if listed {
            write!(out, ",\"ids\":[")?;
        }
    }
    loop {
        let more = input.read(&mut text)?;
        let part = if more { settled(&text) } else { text.len() };
        if part > 0 {
            for id in vocabulary.encode(&text[..part], args.parse_special).map_err(Failure::from)? {
                match (listed, args.json) {
                    (true, true) if count > 0 => write!(out, ",{}", id.0)?,
                    (true, true) => write!(out, "{}", id.0)?,
                    (true, false) => writeln!(out, "{}", id.0)?,
                    (false, _) => {}
                }
                count += 1;
            }
            bytes += part as u64;
            text.drain(..part);
        }
        if !more {
            break;
        }
    }
    match (args.json, args.count) {
        (true, _) => {
            let close = if listed { "]" } else { "" };
            writeln!(out, "{close},\"count\":{count},\"bytes\":{bytes}}}")?;
        }
        (false, true) => writeln!(out, "{count}")?,
        (false, false) => {}
    }
    out.flush()?;
    Ok(())
}

/// Prints the bytes of ids.
pub(crate) fn detokenize(args: &Detokenize) -> Result<u8, Failure> {
    let input = Input::open(args.ids.as_ref().map(String::as_bytes), &args.file)?;
    let (dir, demo) = directory(&args.model)?;
    let disk = || Arc::new(Disk::new(Mode::Buffered)) as Arc<dyn Source>;
    let source = demo.as_ref().and_then(Demo::source).unwrap_or_else(disk);
    let mut files = VocabularyFiles::in_dir(&dir, &*source)?;
    code(write_text(args, input, &dir, &files.load()?))
}

fn write_text(args: &Detokenize, mut input: Input<'_>, dir: &Path, vocabulary: &Vocabulary<'_>) -> Result<(), Stop> {
    let mut out = BufWriter::with_capacity(1 << 16, output::stdout());
    let controls = if args.special { ControlText::Spell } else { ControlText::Drop };
    let (mut text, mut bytes, mut characters) = (Vec::new(), Vec::new(), Utf8Stream::new());
    let (mut count, mut length) = (0u64, 0u64);
    if args.json {
        write!(out, "{{\"model\":{},\"text\":\"", quoted(&dir.display().to_string()))?;
    }
    loop {
        let more = input.read(&mut text)?;
        let end = if more { text.iter().rposition(|&b| separates(b)).map_or(0, |i| i + 1) } else { text.len() };
        if end == 0 && text.len() > DIGITS && more {
            return Err(not_an_id(&text, count + 1).into());
        }
        for word in text[..end].split(|&b| separates(b)).filter(|word| !word.is_empty()) {
            count += 1;
            let number = std::str::from_utf8(word).ok().filter(|word| word.bytes().all(|b| b.is_ascii_digit()));
            let Some(id) = number.and_then(|word| word.parse().ok()).map(TokenId) else {
                return Err(not_an_id(word, count).into());
            };
            vocabulary.decode_as(id, controls, &mut bytes).map_err(|unknown| {
                Failure::usage(
                    format!("id number {count}: {unknown}"),
                    "the ids are of another vocabulary, or damaged; what is printed is the text before it",
                )
            })?;
            length += bytes.len() as u64;
            if args.json {
                let mut json = String::new();
                characters.push(&bytes, |part| json.push_str(escaped(part).as_str()));
                out.write_all(json.as_bytes())?;
            } else {
                out.write_all(&bytes)?;
            }
            bytes.clear();
        }
        text.drain(..end);
        if !more {
            break;
        }
    }
    if args.json {
        let mut json = String::new();
        characters.finish(|part| json.push_str(part));
        writeln!(out, "{json}\",\"count\":{count},\"bytes\":{length}}}")?;
    }
    out.flush()?;
    Ok(())
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

/// The directory that was named, or the demo's.
fn directory(args: &TokenizerDir) -> Result<(PathBuf, Option<Demo>), Failure> {
    match &args.dir {
        Some(dir) => Ok((dir.clone(), None)),
        None => {
            let demo = demo::unpack(true)?;
            Ok((demo.dir().to_owned(), Some(demo)))
        }
    }
}

/// Where bytes come from.
struct Input<'a> {
    name: &'a Path,
    from: Box<dyn Read + 'a>,
}

impl<'a> Input<'a> {
    /// What was given itself, or else the file.
    fn open(given: Option<&'a [u8]>, file: &'a Path) -> Result<Self, Failure> {
        let from: Box<dyn Read + 'a> = match given {
            Some(bytes) => Box::new(bytes),
            None if file == Path::new("-") => Box::new(io::stdin().lock()),
            None => Box::new(File::open(file).map_err(|e| Self::failed(file, &e))?),
        };
        Ok(Self { name: file, from })
    }

    fn failed(name: &Path, error: &io::Error) -> Failure {
        Failure::usage(format!("{}: {error}", name.display()), "--file takes a file, or - for standard input")
    }

    /// Appends up to a block; false if there is no more to come.
    fn read(&mut self, to: &mut Vec<u8>) -> Result<bool, Failure> {
        let block = self.from.by_ref().take(BLOCK as u64).read_to_end(to).map_err(|e| Self::failed(self.name, &e))?;
        Ok(block == BLOCK)
    }
}
