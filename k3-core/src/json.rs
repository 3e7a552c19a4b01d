//! A pull parser for JSON over bytes, whole or in windows.
//!
//! What it is: a strict reader (RFC 8259 grammar, nothing more lenient) that hands out one [`Event`]
//! at a time and borrows text from the input. It never allocates, needs O(1) memory (the nesting is
//! a stack of bits) and takes time linear in the input. What it is not: a tree, or a judge of
//! duplicate keys, which would need memory; the config reader refuses those itself.
//!
//! Configs, safetensors headers, tokenizer files and the 60 MB tensor index all pass through here.
//! The index is read in windows: when a window ends inside a token, [`Parser::next`] answers
//! [`JsonError::Incomplete`], and [`Parser::resume`] goes on with the next window.
//!
//! ```
//! use k3_core::json::{Event, Parser};
//!
//! let mut parser = Parser::new(br#"{"layers": 93, "na\u006de": "k3"}"#);
//! assert_eq!(parser.next()?, Some(Event::ObjectStart));
//! assert!(matches!(parser.next()?, Some(Event::Key(key)) if key == "layers"));
//! let Some(Event::Number(n)) = parser.next()? else { panic!() };
//! assert_eq!(n.as_u64(), Some(93));
//! assert!(matches!(parser.next()?, Some(Event::Key(key)) if key == "name"));
//! assert!(matches!(parser.next()?, Some(Event::Str(text)) if text.raw() == Some("k3")));
//! assert_eq!(parser.next()?, Some(Event::ObjectEnd));
//! assert_eq!(parser.next()?, None);
//! # Ok::<(), k3_core::json::JsonError>(())
//! ```
//!
//! In windows: whatever follows [`Parser::consumed`] is kept, and the next window starts with it.
//!
//! ```
//! use k3_core::json::{JsonError, Parser, State};
//!
//! let document = br#"["shard-1", "shard-2"]"#;
//! let (mut state, mut start, mut end, mut events) = (State::START, 0, 8, 0);
//! loop {
//!     let last = end == document.len();
//!     let mut parser = Parser::resume(state, &document[start..end], start as u64, last);
//!     match parser.next() {
//!         Ok(Some(_)) => events += 1,
//!         Ok(None) => break,
//!         Err(JsonError::Incomplete { .. }) => end = document.len().min(end + 8),
//!         Err(error) => return Err(error),
//!     }
//!     (state, start) = (parser.state(), start + parser.consumed());
//! }
//! assert_eq!(events, 4);
//! # Ok::<(), JsonError>(())
//! ```
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]

use core::fmt;

/// How deeply arrays and objects may nest; deeper input is refused.
pub const MAX_DEPTH: usize = 64;

/// One step through a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'a> {
    /// `{`
    ObjectStart,
    /// `}`
    ObjectEnd,
    /// `[`
    ArrayStart,
    /// `]`
    ArrayEnd,
    /// The name of an object's member; its value follows.
    Key(Str<'a>),
    /// A string value.
    Str(Str<'a>),
    /// A number value.
    Number(Number<'a>),
    /// `true` or `false`.
    Bool(bool),
    /// `null`
    Null,
}

/// What the grammar asks for at the place of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// Any value.
    Value,
    /// A value or `]`.
    ValueOrEnd,
    /// A key in quotes.
    Key,
    /// A key in quotes or `}`.
    KeyOrEnd,
    /// `:`
    Colon,
    /// `,` or `}`.
    CommaOrObjectEnd,
    /// `,` or `]`.
    CommaOrArrayEnd,
    /// The rest of `true`, `false` or `null`.
    Literal,
    /// A digit of a number.
    Digit,
    /// The quote that ends a string.
    Quote,
    /// One of `" \ / b f n r t u` after a backslash.
    Escape,
    /// A hexadecimal digit of a `\u` escape.
    HexDigit,
    /// Nothing: the document was complete.
    End,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Value => "a value",
            Self::ValueOrEnd => "a value or ']'",
            Self::Key => "a key",
            Self::KeyOrEnd => "a key or '}'",
            Self::Colon => "':'",
            Self::CommaOrObjectEnd => "',' or '}'",
            Self::CommaOrArrayEnd => "',' or ']'",
            Self::Literal => "true, false or null",
            Self::Digit => "a digit",
            Self::Quote => "the closing quote of a string",
            Self::Escape => "an escape character",
            Self::HexDigit => "a hexadecimal digit",
            Self::End => "the end of the document",
        })
    }
}

/// Why a document is not JSON. Offsets are bytes from the start of the whole document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum JsonError {
    /// Not a fault: the window ended and more must be supplied (see [`Parser::resume`]). Never
    /// reported for a last window.
    Incomplete {
        /// Where the next window has to start.
        offset: u64,
    },
    /// A byte the grammar does not allow there, or the end of the document.
    Unexpected {
        /// Where.
        offset: u64,
        /// What would have been right.
        expected: Expected,
        /// The byte found; `None` is the end of the document.
        found: Option<u8>,
    },
    /// Nested deeper than [`MAX_DEPTH`].
    TooDeep {
        /// Where the bracket too many is.
        offset: u64,
    },
    /// A control character (below 0x20) inside a string must be escaped.
    ControlCharacter {
        /// Where.
        offset: u64,
        /// The byte.
        found: u8,
    },
    /// A `\u` escape names half of a surrogate pair and its partner is missing.
    LoneSurrogate {
        /// Where its backslash is.
        offset: u64,
    },
    /// A string is not UTF-8.
    InvalidUtf8 {
        /// The first byte that does not fit.
        offset: u64,
    },
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Incomplete { offset } => write!(f, "byte {offset}: the window ends here and more is needed"),
            Self::Unexpected { offset, expected, found: None } => {
                write!(f, "byte {offset}: expected {expected}, found the end of the document")
            }
            Self::Unexpected { offset, expected, found: Some(byte) } => {
                write!(f, "byte {offset}: expected {expected}, found '{}'", byte.escape_ascii())
            }
            Self::TooDeep { offset } => write!(f, "byte {offset}: nested deeper than {MAX_DEPTH}"),
            Self::ControlCharacter { offset, found } => {
                write!(f, "byte {offset}: control character 0x{found:02x} in a string")
            }
            Self::LoneSurrogate { offset } => write!(f, "byte {offset}: half of a surrogate pair"),
            Self::InvalidUtf8 { offset } => write!(f, "byte {offset}: not UTF-8"),
        }
    }
}

impl core::error::Error for JsonError {}

/// A string as it is written in the document, decoded only when asked. Its escapes were checked
/// by the parser, so decoding cannot fail.
#[derive(Debug, Clone, Copy)]
pub struct Str<'a> {
    text: &'a str,
    escaped: bool,
    offset: u64,
}

/// The buffer given to [`Str::decode_into`] is too short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TooLong {
    /// Bytes the decoded string has.
    pub needed: usize,
    /// Bytes that were given.
    pub given: usize,
}

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a string of {} bytes does not fit a buffer of {}", self.needed, self.given)
    }
}

impl core::error::Error for TooLong {}

impl<'a> Str<'a> {
    /// The string itself if it holds no escapes (the fast path), else `None`.
    #[must_use]
    pub const fn raw(&self) -> Option<&'a str> {
        if self.escaped { None } else { Some(self.text) }
    }

    /// The text between the quotes as written, escapes and all.
    #[must_use]
    pub const fn source(&self) -> &'a str {
        self.text
    }

    /// Where the opening quote is, in bytes from the start of the document.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.offset
    }

    /// The decoded characters.
    #[must_use]
    pub fn chars(&self) -> Chars<'a> {
        Chars { rest: self.text.chars() }
    }

    /// Bytes of the decoded string in UTF-8.
    #[must_use]
    pub fn decoded_len(&self) -> usize {
        if self.escaped {
            self.chars().fold(0, |sum: usize, c| sum.saturating_add(c.len_utf8()))
        } else {
            self.text.len()
        }
    }

    /// Decodes into the front of `buffer`.
    ///
    /// # Errors
    /// [`TooLong`] if it does not fit; the buffer's contents are then unspecified.
    pub fn decode_into<'b>(&self, buffer: &'b mut [u8]) -> Result<&'b str, TooLong> {
        let (needed, given) = (self.decoded_len(), buffer.len());
        let too_long = TooLong { needed, given };
        let out = buffer.get_mut(..needed).ok_or(too_long)?;
        if self.escaped {
            let mut rest = &mut *out;
            for c in self.chars() {
                let (head, tail) = rest.split_at_mut_checked(c.len_utf8()).ok_or(too_long)?;
                c.encode_utf8(head);
                rest = tail;
            }
        } else {
            out.copy_from_slice(self.text.as_bytes());
        }
        // Always UTF-8: it was just encoded, or the parser checked it.
        core::str::from_utf8(out).map_err(|_| too_long)
    }
}

impl PartialEq<str> for Str<'_> {
    fn eq(&self, other: &str) -> bool {
        if self.escaped { self.chars().eq(other.chars()) } else { self.text == other }
    }
}

impl PartialEq<&str> for Str<'_> {
    fn eq(&self, other: &&str) -> bool {
        *self == **other
    }
}

/// Equal when the decoded texts are, however they are written and wherever they stand.
impl PartialEq for Str<'_> {
    fn eq(&self, other: &Self) -> bool {
        if self.escaped || other.escaped { self.chars().eq(other.chars()) } else { self.text == other.text }
    }
}

impl Eq for Str<'_> {}

/// The decoded characters of a [`Str`].
#[derive(Debug, Clone)]
pub struct Chars<'a> {
    rest: core::str::Chars<'a>,
}

impl Chars<'_> {
    fn hex4(&mut self) -> u32 {
        (0..4).fold(0, |value, _| (value << 4) | self.rest.next().and_then(|c| c.to_digit(16)).unwrap_or(0))
    }
}

impl Iterator for Chars<'_> {
    type Item = char;

    fn next(&mut self) -> Option<char> {
        let c = self.rest.next()?;
        if c != '\\' {
            return Some(c);
        }
        Some(match self.rest.next()? {
            'b' => '\u{8}',
            'f' => '\u{c}',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'u' => {
                let mut code = self.hex4();
                if is_high(code) {
                    self.rest.next();
                    self.rest.next();
                    code = 0x1_0000_u32.wrapping_add((code & 0x3ff) << 10) | (self.hex4() & 0x3ff);
                }
                char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            same => same,
        })
    }
}

const fn is_high(code: u32) -> bool {
    matches!(code, 0xd800..=0xdbff)
}

const fn is_low(code: u32) -> bool {
    matches!(code, 0xdc00..=0xdfff)
}

/// A number as it is written; its text is checked against the JSON grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number<'a> {
    text: &'a str,
}

impl<'a> Number<'a> {
    /// The number as written.
    #[must_use]
    pub const fn text(&self) -> &'a str {
        self.text
    }

    /// The exact value if it is written as an integer (no sign, fraction or exponent) and fits.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        self.text.parse().ok()
    }

    /// The exact value if it is written as an integer (no fraction or exponent) and fits.
    #[must_use]
    pub fn as_i64(&self) -> Option<i64> {
        self.text.parse().ok()
    }

    /// The nearest f64; infinite if the number is too large for one.
    #[must_use]
    pub fn as_f64(&self) -> f64 {
        self.text.parse().unwrap_or(f64::NAN)
    }

    /// The nearest f32, rounded once from the text; infinite if the number is too large for one.
    #[must_use]
    pub fn as_f32(&self) -> f32 {
        self.text.parse().unwrap_or(f32::NAN)
    }
}

/// Where a parser stands in the grammar: all that has to be kept between two windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// One bit for each open container, the innermost lowest: 1 is an object.
    stack: u64,
    depth: u8,
    want: Want,
}

impl State {
    /// The start of a document.
    pub const START: Self = Self { stack: 0, depth: 0, want: Want::Value };

    /// Open arrays and objects.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.depth as usize
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    End,
}

/// Hands out the events of a document, front to back. See the module's examples.
#[derive(Debug, Clone)]
pub struct Parser<'a> {
    window: &'a [u8],
    base: u64,
    last: bool,
    /// Start of the token of the latest event, in the window.
    token: usize,
    /// Everything before is done with, in the window.
    at: usize,
    state: State,
}

impl<'a> Parser<'a> {
    /// Reads a whole document.
    #[must_use]
    pub const fn new(document: &'a [u8]) -> Self {
        Self::resume(State::START, document, 0, true)
    }

    /// Reads on in the next window of a document.
    ///
    /// `window` starts at byte `base_offset` of the document, which is where the parser that gave
    /// `state` had [`Parser::consumed`] up to. `last` says that the document ends with the window.
    /// A window that yields [`JsonError::Incomplete`] with nothing consumed has to be longer: it
    /// does not hold one token. (Each attempt rescans that one token, so grow windows by more than
    /// a byte.)
    #[must_use]
    pub const fn resume(state: State, window: &'a [u8], base_offset: u64, last: bool) -> Self {
        Self { window, base: base_offset, last, token: 0, at: 0, state }
    }

    /// Bytes of the window that are done with. After an event or [`JsonError::Incomplete`] this is
    /// where the next window starts; separators and space may be included.
    #[must_use]
    pub const fn consumed(&self) -> usize {
        self.at
    }

    /// The place in the grammar that belongs to [`Parser::consumed`].
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// Open arrays and objects.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.state.depth()
    }

    /// Where the token of the latest event starts, in bytes from the start of the document.
    #[must_use]
    pub fn token_offset(&self) -> u64 {
        self.absolute(self.token)
    }

    /// The next event, or `None` when the document is complete and nothing but space followed.
    ///
    /// # Errors
    /// [`JsonError`]. After [`JsonError::Incomplete`] go on with [`Parser::resume`]; after any other
    /// the document is refused, and asking again gives the same answer.
    #[expect(clippy::should_implement_trait, reason = "an iterator would hide that Incomplete is not an end")]
    pub fn next(&mut self) -> Result<Option<Event<'a>>, JsonError> {
        loop {
            while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek(self.at) {
                self.at = self.at.saturating_add(1);
            }
            let Some(byte) = self.peek(self.at) else {
                return if self.last && self.state.want == Want::End {
                    Ok(None)
                } else {
                    Err(self.unexpected(self.at))
                };
            };
            match (self.state.want, byte) {
                (Want::Colon, b':') => self.separator(Want::Value),
                (Want::CommaOrEnd, b',') if self.in_object() => self.separator(Want::Key),
                (Want::CommaOrEnd, b',') => self.separator(Want::Value),
                (Want::CommaOrEnd | Want::KeyOrEnd, b'}') if self.in_object() => {
                    return Ok(self.close(Event::ObjectEnd));
                }
                (Want::CommaOrEnd | Want::ValueOrEnd, b']') if !self.in_object() => {
                    return Ok(self.close(Event::ArrayEnd));
                }
                (Want::Key | Want::KeyOrEnd, b'"') => {
                    let (key, end) = self.string()?;
                    return Ok(self.emit(end, Want::Colon, Event::Key(key)));
                }
                (Want::Value | Want::ValueOrEnd, _) => return self.value(byte),
                _ => return Err(self.unexpected(self.at)),
            }
        }
    }

    /// Passes over the next value, whole; in front of a key, over the member.
    ///
    /// In a window: when it answers [`JsonError::Incomplete`], resume, then call
    /// [`Parser::skip_to_depth`] if [`Parser::depth`] is greater than it was, else this again.
    ///
    /// # Errors
    /// [`JsonError`], also if a container or the document ends instead of a value.
    pub fn skip_value(&mut self) -> Result<(), JsonError> {
        self.raw_value().map(|_| ())
    }

    /// Passes over events until no more than `depth` containers are open.
    ///
    /// # Errors
    /// [`JsonError`] as [`Parser::next`].
    pub fn skip_to_depth(&mut self, depth: usize) -> Result<(), JsonError> {
        while self.depth() > depth {
            self.next()?;
        }
        Ok(())
    }

    /// Passes over the next value and returns its bytes, which form a document of their own. For
    /// whole documents: in a window the value has to lie in it completely.
    ///
    /// # Errors
    /// [`JsonError`], also if a container or the document ends instead of a value.
    pub fn raw_value(&mut self) -> Result<&'a [u8], JsonError> {
        let (depth, want) = (self.depth(), self.state.want);
        let mut event = self.next()?;
        if let Some(Event::Key(_)) = event {
            event = self.next()?;
        }
        if matches!(event, None | Some(Event::ObjectEnd | Event::ArrayEnd)) {
            let found = self.peek(self.token).filter(|_| event.is_some());
            let offset = self.absolute(if event.is_some() { self.token } else { self.at });
            let expected = if want == Want::KeyOrEnd { Expected::Key } else { Expected::Value };
            return Err(JsonError::Unexpected { offset, expected, found });
        }
        let start = self.token;
        self.skip_to_depth(depth)?;
        Ok(self.window.get(start..self.at).unwrap_or_default())
    }

    fn peek(&self, at: usize) -> Option<u8> {
        #[cfg(test)]
        tests::looked_at(1);
        self.window.get(at).copied()
    }

    fn absolute(&self, at: usize) -> u64 {
        self.base.saturating_add(at as u64)
    }

    const fn in_object(&self) -> bool {
        self.state.depth > 0 && self.state.stack & 1 == 1
    }

    fn separator(&mut self, want: Want) {
        self.at = self.at.saturating_add(1);
        self.state.want = want;
    }

    /// The token from `self.at` to `end` is complete.
    const fn emit(&mut self, end: usize, want: Want, event: Event<'a>) -> Option<Event<'a>> {
        self.token = self.at;
        self.at = end;
        self.state.want = want;
        Some(event)
    }

    const fn after_value(&self) -> Want {
        if self.state.depth == 0 { Want::End } else { Want::CommaOrEnd }
    }

    fn close(&mut self, event: Event<'a>) -> Option<Event<'a>> {
        self.state.depth = self.state.depth.saturating_sub(1);
        self.state.stack >>= 1;
        self.emit(self.at.saturating_add(1), self.after_value(), event)
    }

    fn open(&mut self, object: bool) -> Result<Option<Event<'a>>, JsonError> {
        if self.depth() >= MAX_DEPTH {
            return Err(JsonError::TooDeep { offset: self.absolute(self.at) });
        }
        self.state.depth = self.state.depth.saturating_add(1);
        self.state.stack = (self.state.stack << 1) | u64::from(object);
        let (want, event) =
            if object { (Want::KeyOrEnd, Event::ObjectStart) } else { (Want::ValueOrEnd, Event::ArrayStart) };
        Ok(self.emit(self.at.saturating_add(1), want, event))
    }

    fn value(&mut self, first: u8) -> Result<Option<Event<'a>>, JsonError> {
        let (event, end) = match first {
            b'{' => return self.open(true),
            b'[' => return self.open(false),
            b'"' => {
                let (text, end) = self.string()?;
                (Event::Str(text), end)
            }
            b't' => (Event::Bool(true), self.literal(b"true")?),
            b'f' => (Event::Bool(false), self.literal(b"false")?),
            b'n' => (Event::Null, self.literal(b"null")?),
            b'-' | b'0'..=b'9' => {
                let end = self.number()?;
                let text = self.window.get(self.at..end).and_then(|b| core::str::from_utf8(b).ok());
                (Event::Number(Number { text: text.unwrap_or_default() }), end)
            }
            _ => return Err(self.unexpected(self.at)),
        };
        Ok(self.emit(end, self.after_value(), event))
    }

    fn literal(&self, word: &[u8]) -> Result<usize, JsonError> {
        let mut at = self.at;
        for &byte in word {
            if self.peek(at) != Some(byte) {
                return Err(self.expected(at, Expected::Literal));
            }
            at = at.saturating_add(1);
        }
        Ok(at)
    }

    /// The end of the number that starts at `self.at`. One that touches the end of a window may
    /// go on in the next.
    fn number(&self) -> Result<usize, JsonError> {
        let mut at = self.at;
        if self.peek(at) == Some(b'-') {
            at = at.saturating_add(1);
        }
        at = if self.peek(at) == Some(b'0') { at.saturating_add(1) } else { self.digits(at)? };
        if self.peek(at) == Some(b'.') {
            at = self.digits(at.saturating_add(1))?;
        }
        if let Some(b'e' | b'E') = self.peek(at) {
            at = at.saturating_add(1);
            if let Some(b'+' | b'-') = self.peek(at) {
                at = at.saturating_add(1);
            }
            at = self.digits(at)?;
        }
        if self.peek(at).is_none() && !self.last { Err(self.expected(at, Expected::Digit)) } else { Ok(at) }
    }

    fn digits(&self, start: usize) -> Result<usize, JsonError> {
        let count = self.window.get(start..).unwrap_or_default().iter().take_while(|b| b.is_ascii_digit()).count();
        #[cfg(test)]
        tests::looked_at(count);
        if count == 0 { Err(self.expected(start, Expected::Digit)) } else { Ok(start.saturating_add(count)) }
    }

    /// The string whose quote is at `self.at`, and the place after its closing quote.
    fn string(&self) -> Result<(Str<'a>, usize), JsonError> {
        let start = self.at.saturating_add(1);
        let mut at = start;
        let mut escaped = false;
        loop {
            let rest = self.window.get(at..).unwrap_or_default();
            at = at.saturating_add(plain(rest));
            match self.peek(at) {
                Some(b'"') => break,
                Some(b'\\') => {
                    at = self.escape(at)?;
                    escaped = true;
                }
                Some(found) => return Err(JsonError::ControlCharacter { offset: self.absolute(at), found }),
                None => return Err(self.expected(at, Expected::Quote)),
            }
        }
        #[cfg(test)]
        tests::looked_at(at.saturating_sub(start));
        match core::str::from_utf8(self.window.get(start..at).unwrap_or_default()) {
            Ok(text) => Ok((Str { text, escaped, offset: self.absolute(self.at) }, at.saturating_add(1))),
            Err(e) => {
                Err(JsonError::InvalidUtf8 { offset: self.absolute(start).saturating_add(e.valid_up_to() as u64) })
            }
        }
    }

    /// The place after the escape whose backslash is at `at`.
    fn escape(&self, at: usize) -> Result<usize, JsonError> {
        let lone = JsonError::LoneSurrogate { offset: self.absolute(at) };
        let (kind, end) = (at.saturating_add(1), at.saturating_add(2));
        match self.peek(kind) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(end),
            Some(b'u') => {
                let (code, end) = self.hex4(end)?;
                if is_low(code) {
                    return Err(lone);
                }
                if !is_high(code) {
                    return Ok(end);
                }
                let mut end = end;
                for byte in *b"\\u" {
                    match self.peek(end) {
                        Some(b) if b == byte => end = end.saturating_add(1),
                        None if !self.last => return Err(self.expected(end, Expected::Escape)),
                        _ => return Err(lone),
                    }
                }
                let (code, end) = self.hex4(end)?;
                if is_low(code) { Ok(end) } else { Err(lone) }
            }
            _ => Err(self.expected(kind, Expected::Escape)),
        }
    }

    fn hex4(&self, start: usize) -> Result<(u32, usize), JsonError> {
        let (mut code, mut at) = (0, start);
        for _ in 0..4 {
            let digit = self.peek(at).and_then(|b| char::from(b).to_digit(16));
            code = (code << 4) | digit.ok_or_else(|| self.expected(at, Expected::HexDigit))?;
            at = at.saturating_add(1);
        }
        Ok((code, at))
    }

    /// The error for a byte that the grammar does not want in the present state.
    fn unexpected(&self, at: usize) -> JsonError {
        let expected = match self.state.want {
            Want::Value => Expected::Value,
            Want::ValueOrEnd => Expected::ValueOrEnd,
            Want::Key => Expected::Key,
            Want::KeyOrEnd => Expected::KeyOrEnd,
            Want::Colon => Expected::Colon,
            Want::CommaOrEnd if self.in_object() => Expected::CommaOrObjectEnd,
            Want::CommaOrEnd => Expected::CommaOrArrayEnd,
            Want::End => Expected::End,
        };
        self.expected(at, expected)
    }

    /// The error for what stands at `at`: past the end of a window that is not the last one, it
    /// may still come.
    fn expected(&self, at: usize, expected: Expected) -> JsonError {
        match self.peek(at) {
            None if !self.last => JsonError::Incomplete { offset: self.absolute(self.at) },
            found => JsonError::Unexpected { offset: self.absolute(at), expected, found },
        }
    }
}

/// How many of the first bytes stand for themselves in a string: none that is a quote, a backslash or
/// below 0x20. Eight at a time, for names are long and an index has a million of them.
fn plain(bytes: &[u8]) -> usize {
    const LOW: u64 = 0x0101_0101_0101_0101;
    const HIGH: u64 = LOW << 7;
    // The high bit of each byte that is below `n`, and perhaps of some above it: a borrow only runs
    // upwards from a byte that really is below. Bytes from 0x80 on are never marked by themselves.
    let below = |word: u64, n: u8| word.wrapping_sub(LOW.wrapping_mul(u64::from(n))) & !word & HIGH;
    let is = |word: u64, byte: u8| below(word ^ LOW.wrapping_mul(u64::from(byte)), 1);
    let (words, _) = bytes.as_chunks::<8>();
    let clean = |word: &&[u8; 8]| {
        let word = u64::from_le_bytes(**word);
        below(word, 0x20) | is(word, b'"') | is(word, b'\\') == 0
    };
    let start = words.iter().take_while(clean).count().saturating_mul(8);
    let rest = bytes.get(start..).unwrap_or_default();
    let special = |&b: &u8| b == b'"' || b == b'\\' || b < 0x20;
    let end = start.saturating_add(rest.iter().position(special).unwrap_or(rest.len()));
    #[cfg(test)]
    tests::looked_at(end);
    end
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::format;
    use std::string::{String, ToString};
    use std::vec::Vec;

    std::thread_local! {
        /// Bytes that parsers of this thread have looked at, each as often as that was.
        static STEPS: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
    }

    pub(super) fn looked_at(bytes: usize) {
        STEPS.set(STEPS.get() + bytes);
    }

    /// How many that were so far.
    pub(crate) fn steps() -> usize {
        STEPS.get()
    }

    /// Time is linear in the document: counted, since clocks of busy machines prove nothing.
    #[test]
    fn no_document_is_looked_at_more_than_a_few_times() {
        // A name, and a document of about so many bytes.
        type Shape = (&'static str, fn(usize) -> String);
        let shapes: [Shape; 12] = [
            ("deep", |n| format!("{}{}", "[".repeat(n.min(MAX_DEPTH)), "]".repeat(n.min(MAX_DEPTH)))),
            ("too deep", |n| "[".repeat(n)),
            ("one string", |n| format!("\"{}\"", "x".repeat(n))),
            ("a string that does not end", |n| format!("\"{}", "x".repeat(n))),
            ("escapes", |n| format!("\"{}\"", "\\ud83d\\ude00\\n".repeat(n / 14))),
            ("characters of three bytes", |n| format!("\"{}\"", "\u{20ac}".repeat(n / 3))),
            ("one number", |n| format!("-{}.{}e+{}", "1".repeat(n / 3), "2".repeat(n / 3), "3".repeat(n / 3))),
            ("blanks", |n| format!("[{}]", " \n\t\r".repeat(n / 4))),
            ("many keys", |n| format!("{{{}\"z\":0}}", "\"key\":null,".repeat(n / 11))),
            ("many arrays", |n| format!("[{}[]]", "[[[]]],".repeat(n / 7))),
            ("an error at the end", |n| format!("[{}x]", "true,".repeat(n / 5))),
            ("quotes in a row", |n| format!("[{}\"\"]", "\"\",".repeat(n / 3))),
        ];
        for (name, shape) in shapes {
            for n in [100, 3000, 30_000] {
                let text = shape(n);
                STEPS.set(0);
                let whole = events(text.as_bytes());
                assert!(STEPS.get() <= 10 * text.len() + 100, "{name}: {} steps for {} bytes", STEPS.get(), text.len());
                // Windows of half the document and more: a token is looked at again once for each doubling.
                STEPS.set(0);
                let step = text.len() / 2 + 1;
                assert_eq!(whole.is_ok(), windowed(text.as_bytes(), |_| step).is_ok(), "{name}");
                assert!(STEPS.get() <= 30 * text.len() + 100, "{name}, in windows: {} steps", STEPS.get());
                // Skipping looks as often as walking does.
                STEPS.set(0);
                let _ = Parser::new(text.as_bytes()).skip_value();
                assert!(STEPS.get() <= 10 * text.len() + 100, "{name}, skipped: {} steps", STEPS.get());
            }
        }
    }

    const SAMPLE: &str = "\u{20}{\"a\" : [1, -0, 0.5e+10, 12E-3,true,false,null, [], {}],\n\t\"k\\u0065y\\n\":\"\\ud83d\\ude00 \u{20ac}\\\\\\\"\\/\",\"\":{\"x\":[[\"\"]]} , \"n\":-9223372036854775808 }\r\n";

    #[test]
    fn plain_bytes_are_counted_as_one_by_one() {
        // Each byte at each place of a word and of a tail, among neighbours that could borrow.
        for filler in [b' ', b'a', 0x7f, 0x80, 0xff] {
            for len in 0..20 {
                assert_eq!(plain(&std::vec![filler; len]), len);
                for at in 0..len {
                    for byte in 0..=u8::MAX {
                        let mut text = std::vec![filler; len];
                        text[at] = byte;
                        let expected = if byte == b'"' || byte == b'\\' || byte < 0x20 { at } else { len };
                        assert_eq!(plain(&text), expected, "{byte} at {at} of {len}");
                    }
                }
            }
        }
    }

    fn events(document: &[u8]) -> Result<Vec<String>, JsonError> {
        let mut parser = Parser::new(document);
        let mut out = Vec::new();
        while let Some(event) = parser.next()? {
            out.push(describe(event));
        }
        assert_eq!(parser.next(), Ok(None));
        Ok(out)
    }

    fn describe(event: Event<'_>) -> String {
        match event {
            Event::Key(s) => format!("key {:?} {}", s.chars().collect::<String>(), s.offset()),
            Event::Str(s) => format!("str {:?} {}", s.chars().collect::<String>(), s.offset()),
            other => format!("{other:?}"),
        }
    }

    fn windowed(document: &[u8], size: impl Fn(usize) -> usize) -> Result<Vec<String>, JsonError> {
        let (mut state, mut start, mut end, mut step) = (State::START, 0, 0, 0);
        let mut out = Vec::new();
        loop {
            let mut parser = Parser::resume(state, &document[start..end], start as u64, end == document.len());
            loop {
                match parser.next() {
                    Ok(Some(event)) => out.push(describe(event)),
                    Ok(None) => return Ok(out),
                    Err(JsonError::Incomplete { offset }) => {
                        assert_eq!(offset, (start + parser.consumed()) as u64);
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
            (state, start) = (parser.state(), start + parser.consumed());
            end = document.len().min(end + size(step));
            step += 1;
        }
    }

    #[test]
    fn every_split_gives_the_same_events() {
        for document in [SAMPLE, "12", "-0.5E3 ", "\"\\ud83d\\ude00\"", "true", " [ ] "] {
            let bytes = document.as_bytes();
            let whole = events(bytes).unwrap();
            for split in 0..=bytes.len() {
                let sizes = |step| if step == 0 { split } else { bytes.len() };
                assert_eq!(windowed(bytes, sizes).unwrap(), whole, "{document:?} split at {split}");
            }
            for size in 1..9 {
                assert_eq!(windowed(bytes, |_| size).unwrap(), whole, "{document:?} in windows of {size}");
            }
        }
    }

    #[test]
    fn every_truncation_is_an_error() {
        for end in 0..SAMPLE.trim_end().len() {
            let error = events(&SAMPLE.as_bytes()[..end]).unwrap_err();
            match error {
                JsonError::Unexpected { offset, found: None, .. } => assert_eq!(offset, end as u64),
                JsonError::InvalidUtf8 { .. } | JsonError::LoneSurrogate { .. } => {}
                other => panic!("{end}: {other:?}"),
            }
        }
    }

    #[test]
    fn errors_say_where_and_what() {
        let unexpected = |offset, expected, found| JsonError::Unexpected { offset, expected, found };
        let cases: &[(&[u8], JsonError)] = &[
            (b"", unexpected(0, Expected::Value, None)),
            (b"  ", unexpected(2, Expected::Value, None)),
            (b"\xef\xbb\xbf1", unexpected(0, Expected::Value, Some(0xef))),
            (b"1 2", unexpected(2, Expected::End, Some(b'2'))),
            (b"{}x", unexpected(2, Expected::End, Some(b'x'))),
            (b"truex", unexpected(4, Expected::End, Some(b'x'))),
            (b"trux", unexpected(3, Expected::Literal, Some(b'x'))),
            (b"[1,]", unexpected(3, Expected::Value, Some(b']'))),
            (b"[,1]", unexpected(1, Expected::ValueOrEnd, Some(b','))),
            (b"[1 2]", unexpected(3, Expected::CommaOrArrayEnd, Some(b'2'))),
            (b"[1}", unexpected(2, Expected::CommaOrArrayEnd, Some(b'}'))),
            (b"{\"a\":1]", unexpected(6, Expected::CommaOrObjectEnd, Some(b']'))),
            (b"{\"a\":1,}", unexpected(7, Expected::Key, Some(b'}'))),
            (b"{1:1}", unexpected(1, Expected::KeyOrEnd, Some(b'1'))),
            (b"{\"a\" 1}", unexpected(5, Expected::Colon, Some(b'1'))),
            (b"{\"a\":}", unexpected(5, Expected::Value, Some(b'}'))),
            (b"-", unexpected(1, Expected::Digit, None)),
            (b"+1", unexpected(0, Expected::Value, Some(b'+'))),
            (b".5", unexpected(0, Expected::Value, Some(b'.'))),
            (b"01", unexpected(1, Expected::End, Some(b'1'))),
            (b"1.", unexpected(2, Expected::Digit, None)),
            (b"1.e3", unexpected(2, Expected::Digit, Some(b'e'))),
            (b"1e", unexpected(2, Expected::Digit, None)),
            (b"1e+x", unexpected(3, Expected::Digit, Some(b'x'))),
            (b"NaN", unexpected(0, Expected::Value, Some(b'N'))),
            (b"\"a", unexpected(2, Expected::Quote, None)),
            (b"\"\\x\"", unexpected(2, Expected::Escape, Some(b'x'))),
            (b"\"\\u12g4\"", unexpected(5, Expected::HexDigit, Some(b'g'))),
            (b"\"a\nb\"", JsonError::ControlCharacter { offset: 2, found: b'\n' }),
            (b"\"\\udc00\"", JsonError::LoneSurrogate { offset: 1 }),
            (b"\"a\\ud800\"", JsonError::LoneSurrogate { offset: 2 }),
            (b"\"\\ud800\\n\"", JsonError::LoneSurrogate { offset: 1 }),
            (b"\"\\ud800\\ud800\"", JsonError::LoneSurrogate { offset: 1 }),
            (b"\"a\xff\"", JsonError::InvalidUtf8 { offset: 2 }),
            (b"\"\xed\xa0\x80\"", JsonError::InvalidUtf8 { offset: 1 }),
        ];
        for (document, error) in cases {
            assert_eq!(events(document).as_ref(), Err(error), "{:?}", String::from_utf8_lossy(document));
            let mut parser = Parser::new(document);
            while parser.next().is_ok() {}
            assert_eq!(parser.next().as_ref(), Err(error), "an error stays");
        }
        assert_eq!(events(b"[1 2]").unwrap_err().to_string(), "byte 3: expected ',' or ']', found '2'",);
    }

    #[test]
    fn depth_is_limited() {
        let nested = |n: usize| "[".repeat(n) + &"]".repeat(n);
        assert_eq!(events(nested(MAX_DEPTH).as_bytes()).unwrap().len(), 2 * MAX_DEPTH);
        assert_eq!(events(nested(MAX_DEPTH + 1).as_bytes()), Err(JsonError::TooDeep { offset: 64 }));
        let objects = "{\"a\":".repeat(MAX_DEPTH) + "1" + &"}".repeat(MAX_DEPTH);
        assert!(events(objects.as_bytes()).is_ok());
    }

    #[test]
    fn integers_are_exact() {
        let number = |text: &'static str| match Parser::new(text.as_bytes()).next() {
            Ok(Some(Event::Number(n))) => n,
            other => panic!("{other:?}"),
        };
        assert_eq!(number("18446744073709551615").as_u64(), Some(u64::MAX));
        assert_eq!(number("18446744073709551616").as_u64(), None);
        assert_eq!(number("9007199254740993").as_u64(), Some(9_007_199_254_740_993));
        assert_eq!(number("-9223372036854775808").as_i64(), Some(i64::MIN));
        for text in ["1.0", "1e3", "-1", "-0"] {
            assert_eq!(number(text).as_u64(), None, "{text}");
        }
        assert_eq!(number("-0").as_f64().to_bits(), (-0.0_f64).to_bits());
        assert_eq!(number("1e-05").as_f64().to_bits(), 1e-5_f64.to_bits());
        assert!(number("1e999").as_f64().is_infinite() && number("1e99").as_f32().is_infinite());
    }

    #[test]
    fn strings_compare_and_decode_through_escapes() {
        let Ok(Some(Event::Str(s))) = Parser::new(br#""k\u0065y \ud83d\ude00\t""#).next() else { panic!() };
        assert!(s == "key \u{1f600}\t" && s != "key" && s != *"key \u{1f600}\t.");
        assert_eq!(s.raw(), None);
        let mut buffer = [0; 9];
        assert_eq!(s.decode_into(&mut buffer), Ok("key \u{1f600}\t"));
        assert_eq!(s.decode_into(&mut buffer[..8]), Err(TooLong { needed: 9, given: 8 }));
        let Ok(Some(Event::Str(t))) = Parser::new(b" \"key\"").next() else { panic!() };
        assert_eq!((t.raw(), t.decode_into(&mut buffer), t.offset()), (Some("key"), Ok("key"), 1));
        assert_ne!(s, t);
    }

    #[test]
    fn values_can_be_skipped() {
        let mut parser = Parser::new(br#"{"a": [1, {"b": "]"}], "c": 3 , "d":{}}"#);
        parser.next().unwrap();
        parser.next().unwrap();
        assert_eq!(parser.raw_value(), Ok(&br#"[1, {"b": "]"}]"#[..]));
        assert_eq!(parser.raw_value(), Ok(&b"3"[..]));
        parser.skip_value().unwrap();
        assert!(parser.clone().skip_value().is_err());
        assert_eq!(parser.next(), Ok(Some(Event::ObjectEnd)));
        assert!(parser.skip_value().is_err());
    }

    #[test]
    fn no_byte_string_panics() {
        let alphabet = b"{}[]:,\"\\u0d8cE+-.1 tn\xf0\x9f\x01";
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            let mut text = Vec::new();
            for _ in 0..12 {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                text.push(alphabet[usize::try_from(seed >> 33).unwrap() % alphabet.len()]);
            }
            let whole = events(&text);
            let parts = windowed(&text, |_| 3);
            assert_eq!(whole.is_ok(), parts.is_ok(), "{text:?}");
        }
    }
}
