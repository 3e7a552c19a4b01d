//! What `k3 batch` reads: lines of prompts, and the output of a batch that was interrupted.

use crate::args::{LOGPROBS_MOST, Sampling, Stop};
use crate::fail::Failure;
use crate::messages;
use crate::report;
use k3_core::json::{Event, JsonError, Parser};
use k3_core::view::TokenId;
use k3_platform::units::human;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

/// Faults of the input that are told at once; the rest is counted.
const TOLD: usize = 8;

/// Bytes that a line takes, however short it is: the line, its id as it is and as text, its prompt's ids, its place
/// among all lines when they are looked for, and what lists and allocator add.
pub(crate) const LINE_BYTES: u64 = 512;

/// Bytes that options of its own add to a line.
pub(crate) const OPTIONS_BYTES: u64 = 640;

/// A line of the input.
#[derive(Debug)]
pub struct Line {
    /// Its number in the file, from 1.
    pub number: usize,
    /// What its result is told by: a string or a number.
    pub id: Value,
    /// What is to be continued.
    pub prompt: Given,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Its own options, and those of the command where they say nothing; `None` if it has none.
    pub(crate) sampling: Option<Box<Sampling>>,
    pub(crate) logprobs: Option<u16>,
}

/// How a prompt is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Given {
    /// As text.
    Text(String),
    /// As ids.
    Ids(Vec<TokenId>),
}

/// What the command says of lines that say nothing of it.
#[derive(Debug, Default)]
pub struct Defaults {
    pub(crate) max_tokens: usize,
    pub(crate) sampling: Sampling,
    pub(crate) logprobs: Option<u16>,
}

impl Defaults {
    /// Those of a command without options but for how many tokens are generated at most.
    #[must_use]
    pub fn new(max_tokens: usize) -> Self {
        Self { max_tokens, ..Self::default() }
    }
}

/// Bytes that an entry of a line's `stop` or `logit_bias` takes while it is read, however short it is.
const ENTRY_BYTES: u64 = 96;

/// Refuses more lines, and longer lists of theirs, than a quarter of the memory holds while they are read. Text and
/// ids are not what this is about: of them there are no more than there are bytes.
pub(crate) fn check_number(path: &Path, bytes: &[u8], budget: u64) -> Result<(), Failure> {
    let lines = bytes.split(|b| *b == b'\n').filter(|line| !line.trim_ascii().is_empty()).count();
    let entries: usize = bytes.split(|b| *b == b'\n').map(entries).sum();
    let needed = LINE_BYTES.saturating_mul(lines as u64).saturating_add(ENTRY_BYTES.saturating_mul(entries as u64));
    if needed <= budget / 4 {
        return Ok(());
    }
    let (lines, needed) = (report::count(lines, "prompt"), human(needed));
    let message = format!("{}: {lines} take {needed}, more than a quarter of --memory", path.display());
    Err(Failure::usage(message, "give more with --memory, or cut the file into several"))
}

/// Entries of a line's lists of options, or a few more: commas in texts count. Of what is no JSON, so many as stand
/// before the fault, for which the line is refused later.
fn entries(line: &[u8]) -> usize {
    let (mut parser, mut entries) = (Parser::new(line), 0);
    while let Ok(Some(event)) = parser.next() {
        let Event::Key(key) = event else { continue };
        let Ok(value) = parser.raw_value() else { break };
        if key == "stop" || key == "logit_bias" {
            entries += 1 + value.iter().filter(|b| **b == b',').count();
        }
    }
    entries
}

/// Reads the input, line by line, and refuses it for everything that is wrong with it.
///
/// # Errors
/// As usage, with the first faults by their lines.
pub fn read(path: &Path, bytes: &[u8], defaults: &Defaults) -> Result<Vec<Line>, Failure> {
    let (mut lines, mut faults) = (Vec::new(), Vec::new());
    let mut seen: HashMap<String, usize> = HashMap::new();
    for (number, bytes) in (1..).zip(bytes.split(|b| *b == b'\n')) {
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        match line(defaults, number, bytes) {
            Ok(line) => {
                if let Some(first) = seen.insert(line.id.to_string(), number) {
                    faults.push(format!("line {number}: id {} is that of line {first}", shown(&line.id)));
                }
                lines.push(line);
            }
            Err(fault) => faults.push(format!("line {number}: {fault}")),
        }
    }
    refuse(path, &faults)?;
    if lines.is_empty() {
        return Err(Failure::usage(format!("{}: there are no prompts", path.display()), HINT));
    }
    Ok(lines)
}

const HINT: &str = "each line is an object {\"id\": \"a\", \"prompt\": \"text\"} or {\"id\": 1, \"ids\": [1, 2]}, \
                    and may have \"max_tokens\", \"temperature\" and the like (k3 batch --help); no id occurs \
                    twice";

/// Refuses the input if there is a fault.
pub(crate) fn refuse(path: &Path, faults: &[String]) -> Result<(), Failure> {
    if faults.is_empty() {
        return Ok(());
    }
    let mut message = format!("{}: {}", path.display(), faults[..faults.len().min(TOLD)].join("\n    "));
    if faults.len() > TOLD {
        message += &format!("\n    and {} more faults", faults.len() - TOLD);
    }
    Err(Failure::usage(message, HINT))
}

/// One line.
fn line(defaults: &Defaults, number: usize, bytes: &[u8]) -> Result<Line, String> {
    messages::one_meaning(bytes)?;
    let (rest, ids) = take_ids(bytes).map_err(|e| e.to_string())?;
    let value: Value = serde_json::from_slice(&rest).map_err(|e| e.to_string())?;
    drop(rest);
    let Value::Object(mut fields) = value else { return Err("this is no object".to_owned()) };
    // As in messages: null is as good as absent.
    fields.retain(|_, value| !value.is_null());
    let id = match fields.remove("id") {
        Some(id @ (Value::String(_) | Value::Number(_))) => id,
        Some(_) => return Err("\"id\" is neither a string nor a number".to_owned()),
        None => return Err("\"id\" is missing".to_owned()),
    };
    let prompt = match (fields.remove("prompt"), fields.remove("ids")) {
        (Some(Value::String(text)), None) => Given::Text(text),
        (None, Some(Value::Array(left))) => match left.first() {
            None => Given::Ids(ids),
            Some(other) => return Err(no_id(other)),
        },
        (Some(_), None) => return Err("\"prompt\" is no string".to_owned()),
        (None, Some(_)) => return Err("\"ids\" is no array".to_owned()),
        (Some(_), Some(_)) => return Err("there are both \"prompt\" and \"ids\"".to_owned()),
        (None, None) => return Err("\"prompt\" or \"ids\" is missing".to_owned()),
    };
    let max_tokens = count(&mut fields, "max_tokens", usize::MAX as u64)?;
    let max_tokens = max_tokens.and_then(|n| usize::try_from(n).ok()).unwrap_or(defaults.max_tokens);
    let sampling = sampling(&defaults.sampling, &mut fields)?;
    let most = u64::try_from(LOGPROBS_MOST).unwrap_or(0);
    let logprobs = count(&mut fields, "logprobs", most)?.and_then(|n| u16::try_from(n).ok()).or(defaults.logprobs);
    match fields.keys().next() {
        Some(name) => Err(format!("a field {name:?} is not known")),
        None => Ok(Line { number, id, prompt, max_tokens, sampling, logprobs }),
    }
}

/// Takes the ids out of a line that is JSON: as a tree they take many times the bytes that they have as text. What
/// is left of them in the line is the first that is none.
fn take_ids(line: &[u8]) -> Result<(Cow<'_, [u8]>, Vec<TokenId>), JsonError> {
    let (mut parser, mut ids) = (Parser::new(line), Vec::new());
    while let Some(event) = parser.next()? {
        if parser.depth() != 1 || !matches!(event, Event::Key(key) if key == "ids") {
            continue;
        }
        let list = parser.raw_value()?;
        let mut values = Parser::new(list);
        if values.next()? != Some(Event::ArrayStart) {
            break;
        }
        let mut other = &[][..];
        while let Some(event) = values.next()?.filter(|event| *event != Event::ArrayEnd) {
            let id = if let Event::Number(n) = event { n.as_u64() } else { None };
            if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
                ids.push(TokenId(id));
                continue;
            }
            let start = usize::try_from(values.token_offset()).unwrap_or(usize::MAX);
            values.skip_to_depth(1)?;
            other = list.get(start..values.consumed()).unwrap_or_default();
            break;
        }
        ids.shrink_to_fit();
        let (before, after) = line.split_at(parser.consumed());
        let before = before.strip_suffix(list).unwrap_or_default();
        return Ok((Cow::Owned([before, b"[", other, b"]", after].concat()), ids));
    }
    Ok((Cow::Borrowed(line), ids))
}

/// A field that is a count of at most `most`.
fn count(fields: &mut Map<String, Value>, name: &str, most: u64) -> Result<Option<u64>, String> {
    let Some(value) = fields.remove(name) else { return Ok(None) };
    let n = value.as_u64().filter(|n| *n <= most);
    n.map(Some).ok_or_else(|| format!("{name:?} is no count up to {most}: {}", shown(&value)))
}

/// How the ids of a line are chosen. What its fields mean together is looked at by `sampling::Chosen::new`.
fn sampling(command: &Sampling, fields: &mut Map<String, Value>) -> Result<Option<Box<Sampling>>, String> {
    let before = fields.len();
    let mut number = |name: &str| match fields.remove(name) {
        None => Ok(None),
        Some(value) => value.as_f64().map(Some).ok_or_else(|| format!("{name:?} is no number: {}", shown(&value))),
    };
    let (temperature, top_p, min_p) = (number("temperature")?, number("top_p")?, number("min_p")?);
    let repeat_penalty = number("repeat_penalty")?;
    let top_k = count(fields, "top_k", u32::MAX.into())?.and_then(|k| u32::try_from(k).ok());
    let seed = count(fields, "seed", u64::MAX)?;
    let mut all = command.clone();
    if temperature == Some(0.0) {
        // The command's options for drawing are not for this line.
        (all.top_p, all.top_k, all.min_p, all.seed) = (None, None, None, None);
    }
    all.temperature = temperature.or(all.temperature);
    let drawing = [("top_p", top_p.is_some()), ("top_k", top_k.is_some()), ("min_p", min_p.is_some())];
    let drawing = drawing.into_iter().chain([("seed", seed.is_some())]);
    if let (None, Some((name, _))) = (all.temperature, drawing.into_iter().find(|(_, given)| *given)) {
        return Err(format!("{name:?} has no effect without \"temperature\""));
    }
    (all.top_p, all.top_k, all.min_p) = (top_p.or(all.top_p), top_k.or(all.top_k), min_p.or(all.min_p));
    (all.seed, all.repeat_penalty) = (seed.or(all.seed), repeat_penalty.or(all.repeat_penalty));
    match fields.remove("logit_bias") {
        None => {}
        Some(Value::Object(biases)) => all.logit_bias = biases.iter().map(bias).collect::<Result<_, _>>()?,
        Some(_) => return Err("\"logit_bias\" is no object of ids and numbers".to_owned()),
    }
    match fields.remove("stop") {
        None => {}
        Some(Value::Array(stops)) => all.stop = stops.iter().map(stop).collect::<Result<_, _>>()?,
        Some(one) => all.stop = vec![stop(&one)?],
    }
    // Each option that is there was taken out.
    Ok((fields.len() != before).then(|| Box::new(all)))
}

#[expect(clippy::cast_possible_truncation, reason = "a bias is an f32, as on the command line")]
fn bias((id, value): (&String, &Value)) -> Result<(u32, f32), String> {
    let number = if value == "-inf" { Some(f32::NEG_INFINITY) } else { value.as_f64().map(|v| v as f32) };
    let fault = || format!("{id:?}: {} in \"logit_bias\" is no id and its number or \"-inf\"", shown(value));
    id.parse().ok().zip(number).ok_or_else(fault)
}

fn stop(value: &Value) -> Result<Stop, String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(Stop::Text(text.clone().into_bytes())),
        Value::Number(_) => {
            let id = token(value).ok_or_else(|| format!("{} in \"stop\" is no token id", shown(value)));
            Ok(Stop::Id(id?.0))
        }
        _ => Err(format!("{} in \"stop\" is neither a text nor an id", shown(value))),
    }
}

fn token(value: &Value) -> Option<TokenId> {
    value.as_u64().and_then(|id| u32::try_from(id).ok()).map(TokenId)
}

fn no_id(value: &Value) -> String {
    format!("{} in \"ids\" is no token id", shown(value))
}

/// JSON for a message: without the control characters that JSON leaves as they are.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    text.chars().fold(String::with_capacity(text.len()), |mut shown, c| {
        match c {
            c if c.is_control() => shown += &format!("\\u{:04x}", u32::from(c)),
            c => shown.push(c),
        }
        shown
    })
}

/// What a batch has written so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// Bytes of whole lines; what follows them was broken off.
    pub whole: usize,
    /// Which of the ids have a result.
    pub done: Vec<bool>,
}

/// Why a file is not what this batch has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unlike {
    /// It does not begin with the batch's first line.
    Foreign,
    /// This line, from 1, is no result of an id, or a second one.
    Line(usize),
}

impl Written {
    /// Looks at an output that begins with the line `header`, of a batch with these ids. A file that ends in the
    /// middle of its first line has no whole line.
    ///
    /// # Errors
    /// [`Unlike`] if the batch has not written it.
    pub fn parse<'i>(bytes: &[u8], header: &[u8], ids: impl Iterator<Item = &'i Value>) -> Result<Self, Unlike> {
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |i| i + 1);
        let numbers: HashMap<_, _> = ids.zip(0..).map(|(id, i)| (id.to_string(), i)).collect();
        let mut done = vec![false; numbers.len()];
        if whole == 0 {
            return if header.starts_with(bytes) { Ok(Self { whole, done }) } else { Err(Unlike::Foreign) };
        }
        let results = bytes[..whole].strip_prefix(header).ok_or(Unlike::Foreign)?;
        for (line, result) in (2..).zip(results.split_inclusive(|b| *b == b'\n')) {
            let object: Option<Map<String, Value>> = serde_json::from_slice(result).ok();
            let known = object.and_then(|o| numbers.get(&o.get("id")?.to_string()).copied());
            if known.is_none_or(|i: usize| std::mem::replace(&mut done[i], true)) {
                return Err(Unlike::Line(line));
            }
        }
        Ok(Self { whole, done })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a thousand lines of 1,900 texts that end them took 125 MB of 73.
    #[test]
    fn long_lists_are_counted_before_they_are_read() {
        let stops = "\"a\",".repeat(99) + "\"a\"";
        let line = format!("{{\"id\":1,\"prompt\":\"b\",\"stop\":[{stops}]}}\n");
        let lines = line.repeat(100);
        let needed = 100 * (LINE_BYTES + 100 * ENTRY_BYTES);
        let check = |text: &str, budget| check_number(Path::new("in"), text.as_bytes(), budget);
        assert!(check(&lines, 4 * needed).is_ok());
        assert!(check(&lines, 4 * needed - 1).unwrap_err().message.contains("100 prompts take"));
        // Other commas are no entries, whatever else is in the line.
        for line in ["{\"ids\":[1,2,3,4,5,6,7,8],\"stop\":\"a\"}", "{\"stop\":1,\"prompt\":\"a, b, c, d, e\"}"] {
            assert!(check(line, 4 * (LINE_BYTES + ENTRY_BYTES)).is_ok(), "{line}");
        }
        assert_eq!(entries(b"{\"x\":{\"stop\":[1,2]},\"st\\u006fp\":[1,2],\"logit_bias\":{\"1\":2}}"), 3);
        assert_eq!([entries(b""), entries(b"[1,"), entries(b"{\"stop\":[1,2")], [0; 3]);
    }

    /// The story: ids came out of a tree of values, each with dozens of bytes.
    #[test]
    fn ids_are_taken_out_of_a_line() {
        let ids = |n: &[u32]| n.iter().copied().map(TokenId).collect::<Vec<_>>();
        for (line, rest, taken) in [
            (
                "{\"id\":1, \"ids\" : [ 1,\t4294967295 ], \"x\": [3]}",
                "{\"id\":1, \"ids\" : [], \"x\": [3]}",
                &[1, u32::MAX][..],
            ),
            ("{\"ids\":[]}", "{\"ids\":[]}", &[]),
            ("{\"i\\u0064s\":[7]}", "{\"i\\u0064s\":[]}", &[7]),
            ("{\"x\":{\"ids\":[1]},\"ids\":[2]}", "{\"x\":{\"ids\":[1]},\"ids\":[]}", &[2]),
            // Of what is no list of ids so much is left that it is refused.
            ("{\"ids\":[1,2,4294967296,3]}", "{\"ids\":[4294967296]}", &[1, 2]),
            ("{\"ids\":[1,{\"a\":[[]]},3]}", "{\"ids\":[{\"a\":[[]]}]}", &[1]),
            ("{\"ids\":[-1]}", "{\"ids\":[-1]}", &[]),
            ("{\"ids\":[null,\"1\"]}", "{\"ids\":[null]}", &[]),
            ("{\"ids\":{\"ids\":[1]}}", "{\"ids\":{\"ids\":[1]}}", &[]),
            ("[{\"ids\":[1]}]", "[{\"ids\":[1]}]", &[]),
        ] {
            let (left, found) = take_ids(line.as_bytes()).unwrap();
            assert_eq!((String::from_utf8_lossy(&left).as_ref(), found), (rest, ids(taken)), "{line}");
        }
        let read = |line: &str| read(Path::new("in"), line.as_bytes(), &Defaults::new(1));
        assert_eq!(read("{\"id\":1,\"ids\":[5,6]}").unwrap()[0].prompt, Given::Ids(ids(&[5, 6])));
        for (line, part) in [
            ("{\"id\":1,\"ids\":[5,1.0]}", "1.0 in \"ids\""),
            ("{\"id\":1,\"ids\":[5,[1]]}", "[1] in \"ids\""),
            ("{\"id\":1,\"ids\":{}}", "is no array"),
            ("{\"id\":1,\"ids\":[1", "line 1: "),
            ("{\"id\":1,\"ids\":[1],\"prompt\":\"a\"}", "both"),
        ] {
            let message = read(line).unwrap_err().message;
            assert!(message.contains(part), "{message}");
        }
    }

    /// The stories: DEL and the controls behind it, which JSON does not escape, reached the terminal; and a number
    /// that is an id was another one when it was read again, so that its result was of no prompt.
    #[test]
    fn ids_and_messages_are_what_was_written() {
        let read = |text: &str| read(Path::new("in"), text.as_bytes(), &Defaults::new(1));
        for (line, part) in [
            ("{\"id\":1,\"ids\":[1],\"logit_bias\":{\"9\":\"\u{7f}inf\"}}", "\\u007finf"),
            ("{\"id\":1,\"ids\":[\"\u{85}\"]}", "\\u0085"),
            ("{\"id\":1,\"ids\":[1],\"seed\":\"\u{9b}2J\"}", "\\u009b2J"),
            ("{\"id\":\"\u{9b}\",\"ids\":[1]}\n{\"id\":\"\u{9b}\",\"ids\":[1]}", "line 2: id \"\\u009b\""),
        ] {
            let message = read(line).unwrap_err().message;
            assert!(message.contains(part) && !message.contains(char::is_control), "{message:?}");
        }
        for id in
            ["0.1", "2.2250738585072014e-308", "5e-324", "1.7976931348623157e308", "9007199254740993.0", "3.1e-200"]
        {
            let lines = read(&format!("{{\"id\":{id},\"ids\":[1]}}")).unwrap();
            let file = format!("h\n{{\"id\":{}}}\n", lines[0].id);
            let all = Written { whole: file.len(), done: vec![true] };
            assert_eq!(Written::parse(file.as_bytes(), b"h\n", lines.iter().map(|l| &l.id)), Ok(all), "{id}");
            assert_eq!(lines[0].id.as_f64(), id.parse().ok());
        }
    }
}
