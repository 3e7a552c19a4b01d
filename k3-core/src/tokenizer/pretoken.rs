//! The pre-tokeniser: text into the pieces that byte-pair merging never crosses (spec 5.2).
//!
//! Two cuts, one after the other:
//!
//! 1. **Chunks.** The text is cut every [`CHUNK_CHARS`] characters. Within each of those, wherever a
//!    run of white space, or of anything else, would grow beyond [`RUN_CHARS`] characters, it is cut
//!    before the character that is one too many. White space is here what the reference's language
//!    calls so: White_Space and also U+001C..U+001F. Only unusual text has such a cut.
//! 2. **Pieces.** Each chunk is split as if it were a text of its own by the first of these rules
//!    that matches, again and again:
//!
//! ```text
//! 1  [\p{Han}]+
//! 2  [^\r\n\p{L}\p{N}]?[UPPER]*[LOWER]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! 3  [^\r\n\p{L}\p{N}]?[UPPER]+[LOWER]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! 4  \p{N}{1,3}
//! 5   ?[^\s\p{L}\p{N}]+[\r\n]*
//! 6  \s*[\r\n]+
//! 7  \s+(?!\S)
//! 8  \s+
//! ```
//!
//! with `UPPER` = `\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}` without Han and `LOWER` =
//! `\p{Ll}\p{Lm}\p{Lo}\p{M}` without Han. The rules are ordered alternatives of a backtracking
//! engine; this is the same function without an engine:
//!
//! * *Rule 2 gives back.* `UPPER*` takes the whole run; if no lower-case letter follows it returns
//!   characters until the last one it returned is in `LOWER` too. So the word ends after the last
//!   character of the run that is in both classes. One scan finds it.
//! * *Rules 6 and 7 give back*: to just behind the run's last line break; and by one character,
//!   unless the text ends.
//! * *Cost.* After a short match of rule 2 the rest of its run holds no character of `LOWER`, so
//!   rule 3 takes all of it; after rule 6 the rest of the run holds no line break. A run is scanned
//!   a fixed number of times, so time is linear (`long_runs_are_linear`).
//! * *Folding.* `(?i)` folds by Unicode: `'s` also matches an apostrophe and U+017F. The other
//!   letters of the contractions have no relatives outside ASCII.
//!
//! **Invalid UTF-8** has no rule in the reference. A maximal run of bytes that belong to no
//! character is one piece; the valid stretches around it are cut as if each were the whole text.

use super::unicode::{self, Class, HAN, LETTER, LOWER, NEWLINE, NUMBER, SPACE, UPPER};

/// Characters after which the text is cut whatever they are.
pub const CHUNK_CHARS: usize = 400_000;

/// Characters of one run of white space, or of anything else, after which the text is cut.
pub const RUN_CHARS: usize = 25_000;

/// Either text that was found valid or a run of bytes that is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chunk<'t> {
    /// A stretch of characters, cut by the two limits.
    Text(&'t str),
    /// A maximal run of bytes that belong to no character.
    Invalid(&'t [u8]),
}

/// The first cut: an iterator over the chunks of a text.
#[derive(Debug, Clone)]
pub(super) struct Chunks<'t> {
    /// Valid text that is not handed out yet.
    valid: &'t str,
    /// Characters of the current [`CHUNK_CHARS`] that are handed out.
    used: usize,
    /// Bytes behind `valid`, not looked at yet.
    rest: &'t [u8],
}

impl<'t> Chunks<'t> {
    pub(super) fn new(text: &'t [u8]) -> Self {
        Self { valid: "", used: 0, rest: text }
    }

    /// Whether the last chunk ended with the last of [`CHUNK_CHARS`] characters, and there are more.
    pub(super) const fn is_at_cut(&self) -> bool {
        self.used == 0 && !self.valid.is_empty()
    }

    /// Length in bytes of the next chunk of `valid`.
    fn cut(&mut self) -> usize {
        let text = self.valid;
        // As many bytes hold at most as many characters: the usual prompt needs no count.
        if text.len() <= RUN_CHARS && self.used == 0 {
            return text.len();
        }
        let end = nth_char(text, CHUNK_CHARS.saturating_sub(self.used));
        let limited = text.get(..end).unwrap_or(text);
        match run_cut(limited) {
            Some(at) => {
                let cut = limited.get(..at).unwrap_or_default().chars().count();
                self.used = self.used.saturating_add(cut);
                at
            }
            None => {
                self.used = 0;
                end
            }
        }
    }
}

/// Where character number `n` of `text` starts, or the end if there are not so many.
fn nth_char(text: &str, n: usize) -> usize {
    let starts = |bytes: &[u8]| bytes.iter().filter(|&&b| b & 0xc0 != 0x80).count();
    let (mut at, mut left) = (0usize, n);
    for block in text.as_bytes().chunks(4096) {
        let count = starts(block);
        if count > left {
            let begins = block.iter().enumerate().filter(|&(_, &b)| b & 0xc0 != 0x80);
            return at.saturating_add(begins.map(|(i, _)| i).nth(left).unwrap_or(0));
        }
        left = left.saturating_sub(count);
        at = at.saturating_add(block.len());
    }
    text.len()
}

/// White space as the chunk rule means it.
#[inline]
fn is_gap(c: char) -> bool {
    matches!(c, '\t'..='\r' | '\x1c'..='\x20') || (!c.is_ascii() && c.is_whitespace())
}

/// Where the first run of more than [`RUN_CHARS`] characters has to be cut.
///
/// Such a run has more than that many bytes. So it is enough to look back from so far ahead for a
/// place where ASCII text changes its kind, and to go on from there: in most texts a few bytes in
/// 25,000 are looked at. Only where there is no such place are characters counted, and then up to
/// the end of that stretch at least, so that the time is linear whatever the text is.
fn run_cut(text: &str) -> Option<usize> {
    let mut from = 0usize;
    loop {
        let end = from.saturating_add(RUN_CHARS);
        let window = text.as_bytes().get(from..=end)?;
        let changes = |pair: &[u8]| match *pair {
            [a, b] => a.is_ascii() && b.is_ascii() && is_gap(char::from(a)) != is_gap(char::from(b)),
            _ => false,
        };
        if let Some(i) = window.windows(2).rposition(changes) {
            from = from.saturating_add(i).saturating_add(1);
            continue;
        }
        let (mut run, mut kind, start) = (0usize, None, from);
        for (at, c) in text.get(start..)?.char_indices() {
            let at = start.saturating_add(at);
            let gap = Some(is_gap(c));
            if gap != kind {
                (run, kind, from) = (0, gap, at);
                if at > end {
                    break;
                }
            }
            if run >= RUN_CHARS {
                return Some(at);
            }
            run = run.saturating_add(1);
        }
        if from <= end {
            return None;
        }
    }
}

impl<'t> Iterator for Chunks<'t> {
    type Item = Chunk<'t>;

    fn next(&mut self) -> Option<Chunk<'t>> {
        if self.valid.is_empty() {
            self.used = 0;
            let mut invalid = 0usize;
            // Each round skips one ill-formed sequence; it ends at the first good character.
            loop {
                let (bad, rest) = self.rest.split_at_checked(invalid)?;
                let (valid, skip) = match core::str::from_utf8(rest) {
                    Ok(valid) => (valid, 0),
                    Err(e) => {
                        let valid = rest.get(..e.valid_up_to()).unwrap_or_default();
                        let skip = e.error_len().unwrap_or(rest.len());
                        (core::str::from_utf8(valid).unwrap_or_default(), skip)
                    }
                };
                if valid.is_empty() && skip > 0 {
                    invalid = invalid.saturating_add(skip);
                } else if invalid > 0 {
                    self.rest = rest;
                    return Some(Chunk::Invalid(bad));
                } else if valid.is_empty() {
                    return None;
                } else {
                    self.valid = valid;
                    self.rest = rest.get(valid.len()..).unwrap_or_default();
                    break;
                }
            }
        }
        let at = self.cut();
        let (chunk, rest) = self.valid.split_at_checked(at)?;
        self.valid = rest;
        Some(Chunk::Text(chunk))
    }
}

/// The pieces of a text, in order. Together they are the text, byte for byte, and none is empty.
#[derive(Debug, Clone)]
pub struct Pieces<'t> {
    chunks: Chunks<'t>,
    text: Split<'t>,
}

impl<'t> Pieces<'t> {
    /// Starts at the front of `text`, which may hold any bytes.
    ///
    /// The text is cut after every [`CHUNK_CHARS`] characters, and within these where a run of white space, or
    /// of anything else, grows beyond [`RUN_CHARS`]. What lies between two cuts is split by the first of these
    /// rules that matches, again and again; bytes that are no UTF-8 are a piece of their own.
    ///
    /// ```text
    /// [\p{Han}]+
    /// [^\r\n\p{L}\p{N}]?[UPPER]*[LOWER]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
    /// [^\r\n\p{L}\p{N}]?[UPPER]+[LOWER]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
    /// \p{N}{1,3}
    ///  ?[^\s\p{L}\p{N}]+[\r\n]*
    /// \s*[\r\n]+
    /// \s+(?!\S)
    /// \s+
    ///
    /// UPPER = \p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M} without Han
    /// LOWER = \p{Ll}\p{Lm}\p{Lo}\p{M} without Han
    /// ```
    ///
    /// **Source.** Spec 5.2.
    #[must_use]
    pub fn new(text: &'t [u8]) -> Self {
        Self { chunks: Chunks::new(text), text: Split::new("") }
    }
}

impl<'t> Iterator for Pieces<'t> {
    type Item = &'t [u8];

    fn next(&mut self) -> Option<&'t [u8]> {
        loop {
            if let Some(piece) = self.text.next() {
                return Some(piece.as_bytes());
            }
            match self.chunks.next()? {
                Chunk::Text(text) => self.text = Split::new(text),
                Chunk::Invalid(bytes) => return Some(bytes),
            }
        }
    }
}

/// The second cut: the pieces of one chunk.
#[derive(Debug, Clone)]
pub(super) struct Split<'t> {
    rest: &'t str,
}

impl<'t> Split<'t> {
    pub(super) fn new(chunk: &'t str) -> Self {
        Self { rest: chunk }
    }
}

impl<'t> Iterator for Split<'t> {
    type Item = &'t str;

    #[inline]
    fn next(&mut self) -> Option<&'t str> {
        if self.rest.is_empty() {
            return None;
        }
        // Every character is the start of some rule, so the length is never 0; a slip here would
        // hand out the whole rest, and not loop.
        let len = piece(self.rest);
        let (piece, rest) = match self.rest.split_at_checked(len) {
            Some(parts) if len > 0 => parts,
            _ => (self.rest, ""),
        };
        self.rest = rest;
        Some(piece)
    }
}

/// The class of the character at byte `at` and where the next one starts; `None` at the end.
#[inline(always)]
fn look(text: &str, at: usize) -> Option<(Class, usize)> {
    #[cfg(test)]
    tests::LOOKS.set(tests::LOOKS.get() + 1);
    match unicode::of_ascii(*text.as_bytes().get(at)?) {
        Some(class) => Some((class, at.wrapping_add(1))),
        None => look_beyond_ascii(text, at),
    }
}

#[inline(never)]
fn look_beyond_ascii(text: &str, at: usize) -> Option<(Class, usize)> {
    let c = text.get(at..)?.chars().next()?;
    Some((unicode::of(c), at.saturating_add(c.len_utf8())))
}

/// Where the run of characters that have a flag of `any` and none of `none`, from `at` on, ends.
#[inline]
fn run(text: &str, mut at: usize, any: Class, none: Class) -> usize {
    while let Some((class, next)) = look(text, at) {
        if class & none != 0 || (any != 0 && class & any == 0) {
            break;
        }
        at = next;
    }
    at
}

/// The length in bytes of the piece at the front of `text`; 0 only for empty text.
fn piece(text: &str) -> usize {
    let Some((first, second)) = look(text, 0) else { return 0 };
    if first & HAN != 0 {
        return run(text, second, HAN, 0);
    }
    // Rules 2 and 3, each first with and then without a prefix. A letter cannot be a prefix; a mark
    // can be one and can also begin the word itself.
    let prefixed = first & (LETTER | NUMBER | NEWLINE) == 0;
    let bare = first & (UPPER | LOWER) != 0;
    if prefixed || bare {
        let after = if prefixed { word(text, second) } else { Word::NONE };
        let whole = if bare && after.ends_lower.is_none() { word(text, 0) } else { Word::NONE };
        let end = after.ends_lower.or(whole.ends_lower).or(after.upper).or(whole.upper);
        if let Some(end) = end {
            return end.saturating_add(contraction(text, end));
        }
    }
    if first & NUMBER != 0 {
        let mut end = second;
        for _ in 0..2 {
            match look(text, end) {
                Some((class, next)) if class & NUMBER != 0 => end = next,
                _ => break,
            }
        }
        return end;
    }
    // Rule 5: the space belongs to what follows it, if that is neither space, letter nor number.
    let from = if text.as_bytes().first() == Some(&b' ') { second } else { 0 };
    let end = run(text, from, 0, SPACE | LETTER | NUMBER);
    if end > from {
        return run(text, end, NEWLINE, 0);
    }
    white(text)
}

/// What rules 2 and 3 find behind their prefix.
struct Word {
    /// End of `[UPPER]*[LOWER]+`.
    ends_lower: Option<usize>,
    /// End of `[UPPER]+[LOWER]*`. Only known when the other is not: there is no `LOWER` then.
    upper: Option<usize>,
}

impl Word {
    const NONE: Self = Self { ends_lower: None, upper: None };
}

#[inline]
fn word(text: &str, from: usize) -> Word {
    let mut at = from;
    // The end of the last character that is in both classes: as far as UPPER* has to give back.
    let mut both = None;
    while let Some((class, next)) = look(text, at) {
        if class & UPPER == 0 {
            if class & LOWER != 0 {
                return Word { ends_lower: Some(run(text, next, LOWER, 0)), upper: None };
            }
            break;
        }
        at = next;
        if class & LOWER != 0 {
            both = Some(at);
        }
    }
    Word { ends_lower: both, upper: (at > from).then_some(at) }
}

/// Length in bytes of the contraction at byte `at`, or 0.
#[inline]
fn contraction(text: &str, at: usize) -> usize {
    let Some([b'\'', tail @ ..]) = text.as_bytes().get(at..) else { return 0 };
    let lower = |i: usize| tail.get(i).map_or(0, u8::to_ascii_lowercase);
    match (lower(0), lower(1)) {
        (b's' | b't' | b'm' | b'd', _) => 2,
        (b'r' | b'v', b'e') | (b'l', b'l') | (0xc5, 0xbf) => 3,
        _ => 0,
    }
}

/// Rules 6 to 8, at a white space.
fn white(text: &str) -> usize {
    let (mut end, mut last, mut newline) = (0, 0, None);
    while let Some((class, next)) = look(text, end) {
        if class & SPACE == 0 {
            break;
        }
        last = end;
        end = next;
        if class & NEWLINE != 0 {
            newline = Some(end);
        }
    }
    match newline {
        Some(newline) => newline,
        None if last == 0 || end == text.len() => end,
        None => last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    fn split(text: &str) -> Vec<&str> {
        Pieces::new(text.as_bytes()).map(|p| core::str::from_utf8(p).unwrap()).collect()
    }

    #[test]
    fn examples_of_the_spec() {
        assert_eq!(
            split("HelloWorld \u{6f22}\u{5b57}\u{30c6}\u{30b9}\u{30c8} 12345 it's"),
            ["Hello", "World", " ", "\u{6f22}\u{5b57}", "\u{30c6}\u{30b9}\u{30c8}", " ", "123", "45", " it's"]
        );
        assert_eq!(split("1\u{3007}2"), ["1\u{3007}2"]);
        assert_eq!(split("!\u{2e80}x"), ["!\u{2e80}", "x"]);
        assert_eq!(split("\u{2e80}x"), ["\u{2e80}", "x"]);
    }

    #[test]
    fn give_back() {
        // A modifier letter is in both classes: UPPER* returns to it, and rule 3 takes the rest.
        assert_eq!(split("A\u{2b0}BC1"), ["A\u{2b0}", "BC", "1"]);
        assert_eq!(split("\u{301}AB"), ["\u{301}", "AB"]);
        assert_eq!(split("!AB"), ["!AB"]);
        assert_eq!(split("HELLOworld"), ["HELLOworld"]);
        assert_eq!(split(" \r\n  x"), [" \r\n", " ", " x"]);
        assert_eq!(split("a  \u{a0} 1 "), ["a", "  \u{a0}", " ", "1", " "]);
        assert_eq!(split("ok!!\r\n\n x"), ["ok", "!!\r\n\n", " x"]);
    }

    #[test]
    fn contractions_fold_by_unicode() {
        assert_eq!(split("it'\u{17f}x"), ["it'\u{17f}", "x"]);
        assert_eq!(split("we'LLama"), ["we'LL", "ama"]);
        assert_eq!(split("I'Rex'v"), ["I'Re", "x", "'v"]);
    }

    #[test]
    fn invalid_bytes_are_pieces_of_their_own() {
        let text = b"ab\xff\xfe\xe4\xbdc \xf0\x9f";
        let pieces: Vec<&[u8]> = Pieces::new(text).collect();
        assert_eq!(pieces, [b"ab" as &[u8], b"\xff\xfe\xe4\xbd", b"c", b" ", b"\xf0\x9f"]);
        assert_eq!(Pieces::new(b"").next(), None);
    }

    /// The chunk rule as plainly as it can be said.
    fn chunks_by_definition(text: &str) -> Vec<String> {
        let mut all = Vec::new();
        for part in text.chars().collect::<Vec<_>>().chunks(CHUNK_CHARS) {
            let (mut chunk, mut run, mut kind) = (String::new(), 0, None);
            for &c in part {
                let space = c.is_whitespace() || ('\x1c'..='\x1f').contains(&c);
                run = if kind == Some(space) { run + 1 } else { 1 };
                kind = Some(space);
                if run > RUN_CHARS {
                    all.push(core::mem::take(&mut chunk));
                    run = 1;
                }
                chunk.push(c);
            }
            all.push(chunk);
        }
        all
    }

    #[test]
    fn chunks_are_cut_where_the_spec_says() {
        let word = |n: usize| "\u{e9}".repeat(n);
        let mut cases = std::vec![
            word(RUN_CHARS),
            word(RUN_CHARS + 1),
            " ".repeat(2 * RUN_CHARS + 7),
            word(RUN_CHARS - 1) + " " + &word(RUN_CHARS) + "\x1c" + &word(RUN_CHARS + 1),
            "\x1c".repeat(RUN_CHARS - 3) + "     x",
            "ab ".repeat(CHUNK_CHARS / 3 - 100) + &word(3 * RUN_CHARS),
            "ab ".repeat(CHUNK_CHARS),
            word(2 * CHUNK_CHARS + 1),
            "abcd ".repeat(CHUNK_CHARS / 5),
        ];
        // Changes of kind that no two neighbouring ASCII bytes show.
        cases.push("\u{e9}\u{3000}".repeat(60_000) + &word(RUN_CHARS + 1) + "\u{3000}x");
        cases.push(word(RUN_CHARS / 2) + "\u{3000}" + &word(RUN_CHARS + 1) + &"ab ".repeat(20_000));
        cases.push("\u{3000}".repeat(RUN_CHARS + 1) + "x" + &" ".repeat(RUN_CHARS + 2));
        for n in [RUN_CHARS - 1, RUN_CHARS, RUN_CHARS + 1] {
            cases.push("ab ".repeat(1000) + &"x".repeat(n) + " " + &"y".repeat(n));
        }
        cases.push("x".repeat(CHUNK_CHARS - 5) + "     " + &"y ".repeat(CHUNK_CHARS / 2));
        for (case, text) in cases.iter().enumerate() {
            let found: Vec<_> = Chunks::new(text.as_bytes()).collect();
            let expected = chunks_by_definition(text);
            assert_eq!(found.len(), expected.len(), "case {case}");
            for (a, b) in found.iter().zip(&expected) {
                assert!(*a == Chunk::Text(b), "case {case}");
            }
        }
    }

    std::thread_local! {
        /// Characters that this thread has looked at, each as often as that was.
        pub(super) static LOOKS: core::cell::Cell<usize> = const { core::cell::Cell::new(0) };
    }

    #[test]
    fn long_runs_are_linear() {
        // Each of these is quadratic for an engine that rescans.
        let length = 20_000;
        for unit in ["A", " ", "\u{301}", "\u{2b0}A", "\n", "!", "\u{301}A", "\n ", "'s", "\u{2e80}"] {
            for tail in ["1", "", "x", "\u{301}"] {
                let text = unit.repeat(length / unit.len()) + tail;
                LOOKS.set(0);
                assert_eq!(Split::new(&text).map(str::len).sum::<usize>(), text.len());
                let (looks, characters) = (LOOKS.get(), text.chars().count());
                assert!(looks <= 6 * characters, "{looks} looks at {characters} characters of {unit:?} and {tail:?}");
            }
        }
    }

    #[test]
    fn golden_splits() {
        // Made by fixtures/tokenizer/make_golden.py: a line is a text, its pieces in hex.
        let golden = include_str!("../../../fixtures/tokenizer/splits.txt");
        let mut lines = 0;
        for line in golden.lines().filter(|l| !l.starts_with('#')) {
            let pieces: Vec<Vec<u8>> = line
                .split(' ')
                .map(|p| (0..p.len()).step_by(2).map(|i| u8::from_str_radix(&p[i..i + 2], 16).unwrap()).collect())
                .collect();
            let text = pieces.concat();
            let found: Vec<&[u8]> = Pieces::new(&text).collect();
            assert_eq!(found, pieces, "{:?}", String::from_utf8_lossy(&text));
            lines += 1;
        }
        assert!(lines > 500, "only {lines} lines");
    }
}
