//! JSON as Python's `json.dumps` writes it: compact, non-ASCII kept, keys sorted where that is asked for.
//!
//! Nothing is allocated. An object is sorted by passing over it again for every [`BLOCK`] of its keys, at each
//! level of nesting; [`KEYS`] and the parser's depth bound how often its bytes are looked at.

use super::ChatError;
use crate::json::{Event, JsonError, Number, Parser, Str};
use core::cmp::Ordering;
use core::fmt::Write as _;

/// Keys an object may have. A tool's declaration has a dozen.
pub(super) const KEYS: usize = 1024;

/// Keys that are sorted in one pass: a kilobyte of stack for each level of nesting.
const BLOCK: usize = 32;

/// Text that is composed in the caller's buffer. What does not fit is counted and not kept.
#[derive(Debug)]
pub(super) struct Text<'b> {
    buffer: &'b mut [u8],
    len: usize,
}

impl<'b> Text<'b> {
    pub(super) const fn new(buffer: &'b mut [u8]) -> Self {
        Self { buffer, len: 0 }
    }

    pub(super) fn put(&mut self, bytes: &[u8]) {
        let end = self.len.saturating_add(bytes.len());
        if let Some(place) = self.buffer.get_mut(self.len..end) {
            place.copy_from_slice(bytes);
        }
        self.len = end;
    }

    pub(super) fn put_char(&mut self, c: char) {
        self.put(c.encode_utf8(&mut [0; 4]).as_bytes());
    }

    /// Bytes that were put.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// What was put, if it fits.
    pub(super) fn finish(&self) -> Result<&[u8], ChatError> {
        self.buffer.get(..self.len).ok_or(ChatError::Buffer { needed: self.len, given: self.buffer.len() })
    }
}

/// Why a value cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Json(JsonError),
    Duplicate { offset: u64 },
    Keys,
    Number,
}

impl From<JsonError> for Fault {
    fn from(error: JsonError) -> Self {
        Self::Json(error)
    }
}

/// Whether members are written by rising key, or as they stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Sorted,
    Kept,
}

/// Passes over a whole document, so that later steps cannot meet a fault.
pub(super) fn check(json: &[u8]) -> Result<(), JsonError> {
    let mut parser = Parser::new(json);
    while parser.next()?.is_some() {}
    Ok(())
}

/// Visits the members of the object `json`: key and value. `Ok(false)` if it is no object.
pub(super) fn members<'j>(
    json: &'j [u8],
    mut each: impl FnMut(Str<'j>, &'j [u8]) -> Result<(), Fault>,
) -> Result<bool, Fault> {
    let mut parser = Parser::new(json);
    if parser.next()? != Some(Event::ObjectStart) {
        return Ok(false);
    }
    while let Some(Event::Key(key)) = parser.next()? {
        each(key, parser.raw_value()?)?;
    }
    Ok(true)
}

/// Visits the members of the object `json` by rising key. Code points and UTF-8 bytes sort alike.
///
/// A key that is there twice is refused, as are too many keys.
fn rising<'j>(json: &'j [u8], mut each: impl FnMut(Str<'j>, &'j [u8]) -> Result<(), Fault>) -> Result<(), Fault> {
    let mut last: Option<Str<'j>> = None;
    loop {
        // The least keys above the last one, sorted.
        let mut block: [Option<Str<'j>>; BLOCK] = [None; BLOCK];
        let (mut count, mut more) = (0usize, false);
        members(json, |key, _| {
            count = count.saturating_add(1);
            if count > KEYS {
                return Err(Fault::Keys);
            }
            if last.is_some_and(|last| order(key, last).is_le()) {
                return Ok(());
            }
            let held = block.partition_point(|other| other.is_some_and(|other| order(other, key).is_lt()));
            if block.get(held).copied().flatten().is_some_and(|other| order(other, key).is_eq()) {
                return Err(Fault::Duplicate { offset: key.offset() });
            }
            more |= block.last().is_some_and(Option::is_some);
            if let Some(above @ [_, ..]) = block.get_mut(held..) {
                above.rotate_right(1);
                if let Some(place) = above.first_mut() {
                    *place = Some(key);
                }
            }
            Ok(())
        })?;
        for key in block.into_iter().flatten() {
            each(key, value_of(json, key)?)?;
            last = Some(key);
        }
        if !more {
            return Ok(());
        }
    }
}

fn order(a: Str<'_>, b: Str<'_>) -> Ordering {
    a.chars().cmp(b.chars())
}

/// The value of a member of `json`.
fn value_of<'j>(json: &'j [u8], key: Str<'j>) -> Result<&'j [u8], Fault> {
    // Behind two quotes and what is between them.
    let end = usize::try_from(key.offset()).unwrap_or(usize::MAX).saturating_add(key.source().len()).saturating_add(2);
    let rest = json.get(end..).unwrap_or_default();
    let colon = rest.iter().position(|&b| b == b':').unwrap_or(rest.len()).saturating_add(1);
    Ok(Parser::new(rest.get(colon..).unwrap_or_default()).raw_value()?)
}

/// Refuses an object that has a key twice, or too many.
pub(super) fn unique(json: &[u8]) -> Result<(), Fault> {
    rising(json, |_, _| Ok(()))
}

/// Writes the value `json`. It nests no deeper than a parser allows, so neither does this.
pub(super) fn value(json: &[u8], order: Order, out: &mut Text<'_>) -> Result<(), Fault> {
    let mut parser = Parser::new(json);
    match parser.next()? {
        Some(Event::ObjectStart) if order == Order::Sorted => sorted(json, out)?,
        Some(Event::ObjectStart) => {
            unique(json)?;
            out.put(b"{");
            let mut separator: &[u8] = b"";
            members(json, |key, value_of| {
                out.put(separator);
                separator = b",";
                string(key, out);
                out.put(b":");
                value(value_of, order, out)
            })?;
            out.put(b"}");
        }
        Some(Event::ArrayStart) => {
            out.put(b"[");
            let mut separator: &[u8] = b"";
            loop {
                // What is next is either a value or the end: a look with a second parser says which.
                if matches!(parser.clone().next()?, None | Some(Event::ArrayEnd)) {
                    break;
                }
                out.put(separator);
                separator = b",";
                value(parser.raw_value()?, order, out)?;
            }
            out.put(b"]");
        }
        Some(Event::Str(text)) => string(text, out),
        Some(Event::Number(n)) => number(n, out)?,
        Some(Event::Bool(b)) => out.put(if b { b"true" } else { b"false" }),
        Some(Event::Null) => out.put(b"null"),
        Some(Event::Key(_) | Event::ObjectEnd | Event::ArrayEnd) | None => {}
    }
    Ok(())
}

/// Writes the members of an object by rising key.
fn sorted(json: &[u8], out: &mut Text<'_>) -> Result<(), Fault> {
    out.put(b"{");
    let mut separator: &[u8] = b"";
    rising(json, |key, value_of| {
        out.put(separator);
        separator = b",";
        string(key, out);
        out.put(b":");
        value(value_of, Order::Sorted, out)
    })?;
    out.put(b"}");
    Ok(())
}

/// Writes a string with the escapes that Python writes when it keeps non-ASCII characters.
fn string(text: Str<'_>, out: &mut Text<'_>) {
    out.put(b"\"");
    for c in text.chars() {
        match c {
            '"' => out.put(b"\\\""),
            '\\' => out.put(b"\\\\"),
            '\n' => out.put(b"\\n"),
            '\r' => out.put(b"\\r"),
            '\t' => out.put(b"\\t"),
            '\u{8}' => out.put(b"\\b"),
            '\u{c}' => out.put(b"\\f"),
            c if c < ' ' => {
                let hex = |n: u32| char::from_digit(n & 15, 16).unwrap_or('0');
                out.put(b"\\u00");
                out.put_char(hex(u32::from(c) >> 4));
                out.put_char(hex(u32::from(c)));
            }
            c => out.put_char(c),
        }
    }
    out.put(b"\"");
}

/// Writes a number as Python does: integers of any size as they are, others by their shortest digits.
fn number(n: Number<'_>, out: &mut Text<'_>) -> Result<(), Fault> {
    let text = n.text();
    if !text.contains(['.', 'e', 'E']) {
        out.put(if text == "-0" { b"0" } else { text.as_bytes() });
        return Ok(());
    }
    let value: f64 = n.as_f64();
    if !value.is_finite() {
        return Err(Fault::Number);
    }
    // Rust and Python both give the shortest digits that read back as the same value; the layout differs.
    let mut digits = Digits::default();
    let _ = write!(digits, "{value:e}");
    let written = digits.buffer.get(..digits.len).unwrap_or_default();
    let split = written.iter().position(|&b| b == b'e').unwrap_or(written.len());
    let (mantissa, exponent) = written.split_at_checked(split).unwrap_or_default();
    let exponent: i32 =
        core::str::from_utf8(exponent.get(1..).unwrap_or_default()).ok().and_then(|e| e.parse().ok()).unwrap_or(0);
    if mantissa.first() == Some(&b'-') {
        out.put(b"-");
    }
    let count = mantissa.iter().filter(|b| b.is_ascii_digit()).count();
    let digit = |i: usize| mantissa.iter().filter(|b| b.is_ascii_digit()).nth(i).copied().unwrap_or(b'0');
    let place = |at: i32| usize::try_from(at).unwrap_or(usize::MAX);
    if (-4..16).contains(&exponent) {
        // Positions behind the point are negative: 10^0 is the last one before it.
        for at in (0..=exponent.max(0)).rev() {
            out.put(&[if at > exponent { b'0' } else { digit(place(exponent.saturating_sub(at))) }]);
        }
        out.put(b".");
        let last = exponent.saturating_sub(i32::try_from(count).unwrap_or(0)).saturating_add(1).min(-1);
        for at in (last..0).rev() {
            out.put(&[if at > exponent { b'0' } else { digit(place(exponent.saturating_sub(at))) }]);
        }
    } else {
        out.put(&[digit(0)]);
        for i in 1..count {
            out.put(if i == 1 { b"." } else { b"" });
            out.put(&[digit(i)]);
        }
        out.put(if exponent < 0 { b"e-" } else { b"e+" });
        let size = exponent.unsigned_abs();
        for power in [100, 10, 1] {
            let d = u8::try_from(size.checked_div(power).unwrap_or(0) % 10).unwrap_or(0);
            if power < 100 || d > 0 {
                out.put(&[b'0'.wrapping_add(d)]);
            }
        }
    }
    Ok(())
}

/// What `{:e}` of an f64 needs: a sign, 17 digits, a point, `e-308`.
#[derive(Debug, Default)]
struct Digits {
    buffer: [u8; 32],
    len: usize,
}

impl core::fmt::Write for Digits {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let end = self.len.saturating_add(text.len());
        self.buffer.get_mut(self.len..end).ok_or(core::fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::tests::steps;
    use std::string::String;
    use std::vec::Vec;
    use std::{format, vec};

    fn written(json: &str, order: Order) -> Result<String, Fault> {
        let mut buffer = vec![0; 4096];
        let mut text = Text::new(&mut buffer);
        value(json.as_bytes(), order, &mut text)?;
        Ok(String::from_utf8(text.finish().unwrap().to_vec()).unwrap())
    }

    /// Expected values are what CPython 3 gives for `json.dumps(json.loads(x), ensure_ascii=False,
    /// separators=(",", ":"), sort_keys=True)`.
    #[test]
    fn json_is_written_as_python_writes_it() {
        for (json, expected) in [
            (r#" { "b" : 1 , "a" : [ 1 , { "d" : null , "c" : true } ] } "#, r#"{"a":[1,{"c":true,"d":null}],"b":1}"#),
            (r#"[]"#, "[]"),
            (r#"{}"#, "{}"),
            (r#"[[],{},[[]]]"#, "[[],{},[[]]]"),
            (
                r#""\u00e9\ud83d\ude00\/\u0007\b\f\n\r\t\u007f\"\\""#,
                "\"\u{e9}\u{1f600}/\\u0007\\b\\f\\n\\r\\t\u{7f}\\\"\\\\\"",
            ),
            // Code points, not UTF-16 units, and upper case first.
            (
                r#"{"\ud83d\ude00":1,"\uffee":2,"a":3,"B":4,"":5,"ab":6}"#,
                "{\"\":5,\"B\":4,\"a\":3,\"ab\":6,\"\u{ffee}\":2,\"\u{1f600}\":1}",
            ),
        ] {
            assert_eq!(written(json, Order::Sorted).as_deref(), Ok(expected), "{json}");
        }
        assert_eq!(written(r#"{"b":1,"a":{"d":2,"c":3}}"#, Order::Kept).as_deref(), Ok(r#"{"b":1,"a":{"d":2,"c":3}}"#));
    }

    #[test]
    fn numbers_are_laid_out_as_python_lays_them_out() {
        for (json, expected) in [
            ("0", "0"),
            ("-0", "0"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("-0.0", "-0.0"),
            ("1.0", "1.0"),
            ("1.50", "1.5"),
            ("100.0", "100.0"),
            ("123.456", "123.456"),
            ("0.1", "0.1"),
            ("-12.25", "-12.25"),
            ("0.0001", "0.0001"),
            ("0.00012345", "0.00012345"),
            ("0.00001", "1e-05"),
            ("1.5e-7", "1.5e-07"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("1.25E+20", "1.25e+20"),
            ("1234567890123456.0", "1234567890123456.0"),
            ("12345678901234567.0", "1.2345678901234568e+16"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("5e-324", "5e-324"),
        ] {
            assert_eq!(written(json, Order::Sorted).as_deref(), Ok(expected), "{json}");
        }
        assert_eq!(written("1e999", Order::Kept), Err(Fault::Number));
    }

    #[test]
    fn a_key_that_is_there_twice_has_no_meaning() {
        for json in [r#"{"a":1,"b":2,"\u0061":3}"#, r#"[{"x":{"a":1,"a":1}}]"#] {
            for order in [Order::Sorted, Order::Kept] {
                assert!(matches!(written(json, order), Err(Fault::Duplicate { .. })), "{json}");
            }
        }
        assert_eq!(written(r#"[{"a":1,"a":"0123"}]"#, Order::Sorted), Err(Fault::Duplicate { offset: 7 }));
        let many: String = (0..=KEYS).map(|i| format!("\"{i}\":0,")).collect();
        for order in [Order::Sorted, Order::Kept] {
            assert_eq!(written(&format!("{{{many}\"x\":0}}"), order), Err(Fault::Keys));
        }
    }
    /// A list of tools with some hundred keys on each of sixty levels took minutes: every level looked at all
    /// that was in it again for every key. What a message list found when it was to be fuzzed.
    #[test]
    fn deep_objects_with_many_keys_are_not_looked_at_for_each_key() {
        let keys = |i: usize| format!("\"{}{i}\":0", if i.is_multiple_of(2) { "b" } else { "a" });
        let level: String = (0..200).map(|i| keys(i * 7919 % 200) + ",").collect();
        let json = (0..60).fold("0".into(), |json: String, _| format!("{{{level}\"m\":{json}}}"));
        for order in [Order::Sorted, Order::Kept] {
            let mut text = Text::new(&mut []);
            let before = steps();
            value(json.as_bytes(), order, &mut text).unwrap();
            let looks = steps() - before;
            // At each level seven passes for 201 keys and a few more, some bytes being looked at twice.
            assert!(looks < 60 * 24 * json.len(), "{looks} looks at {} bytes", json.len());
            assert_eq!(text.len(), json.len());
        }
    }

    #[test]
    fn blocks_join_without_a_seam() {
        for count in [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, KEYS] {
            let name = |i: usize| format!("k{:04}", i * 7919 % 10007);
            let object = |names: Vec<String>| {
                let members: Vec<String> =
                    names.iter().map(|name| format!("\"{name}\":{{\"v\":[1,\"{name}\"]}}")).collect();
                format!("{{{}}}", members.join(","))
            };
            let names: Vec<String> = (0..count).map(name).collect();
            let mut rising = names.clone();
            rising.sort();
            let mut buffer = vec![0; 64 << 10];
            let mut text = Text::new(&mut buffer);
            value(object(names.clone()).as_bytes(), Order::Sorted, &mut text).unwrap();
            assert!(text.finish().unwrap() == object(rising).as_bytes(), "{count} keys");
            // The first key again at the end, whatever block it is in.
            let twice = [&names[1..], &names[..1], &names[..1]].concat();
            let refused = written(&object(twice), Order::Sorted);
            assert!(matches!(refused, Err(Fault::Duplicate { .. } | Fault::Keys)), "{count} keys");
        }
    }
}
