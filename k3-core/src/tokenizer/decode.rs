//! Ids back to bytes, and bytes to text that can be shown while it grows.
//!
//! Two steps, because the two consumers differ. [`Decoder`] gives raw bytes: a token may end in the
//! middle of a character, and standard output takes what there is. [`Utf8Stream`] holds such a tail
//! back until the character is complete, and is for those who need text (JSON, a terminal).

use super::specials::Specials;
use super::vocab::Vocab;
use crate::view::TokenId;

/// An id that is neither a token nor of the special block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnknownId {
    /// The id.
    pub id: TokenId,
    /// The first id that is out of range.
    pub end: u32,
}

impl core::fmt::Display for UnknownId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "token id {} is out of range, ids end at {}", self.id.0, self.end)
    }
}

impl core::error::Error for UnknownId {}

/// What becomes of control ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlText {
    /// They are spelled out.
    Spell,
    /// They are left out.
    Drop,
}

/// Ids to raw bytes.
#[derive(Debug, Clone, Copy)]
pub struct Decoder<'a> {
    vocab: &'a Vocab<'a>,
    specials: &'a Specials<'a>,
    controls: ControlText,
}

impl<'a> Decoder<'a> {
    /// Decodes by this vocabulary and its special block.
    #[must_use]
    pub const fn new(vocab: &'a Vocab<'a>, specials: &'a Specials<'a>, controls: ControlText) -> Self {
        Self { vocab, specials, controls }
    }

    /// Hands the bytes of `id` to `out`, in one or more parts; none for a control id that is dropped.
    ///
    /// # Errors
    /// [`UnknownId`]; nothing was handed out then.
    pub fn push(&self, id: TokenId, mut out: impl FnMut(&[u8])) -> Result<(), UnknownId> {
        if let Some(token) = self.vocab.token(id.0) {
            out(token);
        } else if let Some(spelling) = self.specials.spelling(id) {
            if self.controls == ControlText::Spell {
                spelling.parts().into_iter().filter(|part| !part.is_empty()).for_each(out);
            }
        } else {
            return Err(UnknownId { id, end: self.specials.end() });
        }
        Ok(())
    }
}

/// Bytes to text, a character at the earliest when it is complete.
///
/// All text handed out is, together, what `String::from_utf8_lossy` makes of all the bytes: each
/// maximal ill-formed part is one U+FFFD. At most three bytes are held back.
#[derive(Debug, Clone, Copy, Default)]
pub struct Utf8Stream {
    /// The beginning of a character.
    held: [u8; 4],
    len: usize,
}

const REPLACEMENT: &str = "\u{fffd}";

impl Utf8Stream {
    /// Nothing held back.
    #[must_use]
    pub const fn new() -> Self {
        Self { held: [0; 4], len: 0 }
    }

    /// How many bytes are held back.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.len
    }

    /// Takes `bytes` and hands out what is complete, in one or more parts.
    pub fn push(&mut self, bytes: &[u8], mut out: impl FnMut(&str)) {
        let mut rest = bytes;
        while self.len > 0 {
            let Some((&byte, behind)) = rest.split_first() else { return };
            if let Some(slot) = self.held.get_mut(self.len) {
                *slot = byte;
            }
            let held = self.held.get(..self.len.saturating_add(1)).unwrap_or_default();
            match core::str::from_utf8(held) {
                Ok(c) => {
                    out(c);
                    (self.len, rest) = (0, behind);
                }
                // What is held can never be completed; this byte is not a part of it.
                Err(e) if e.error_len().is_some() || self.len >= 3 => {
                    out(REPLACEMENT);
                    self.len = 0;
                }
                Err(_) => (self.len, rest) = (held.len(), behind),
            }
        }
        while !rest.is_empty() {
            let (good, skip) = match core::str::from_utf8(rest) {
                Ok(text) => (text, None),
                Err(e) => {
                    let good = rest.get(..e.valid_up_to()).unwrap_or_default();
                    (core::str::from_utf8(good).unwrap_or_default(), Some(e.error_len()))
                }
            };
            if !good.is_empty() {
                out(good);
            }
            rest = rest.get(good.len()..).unwrap_or_default();
            match skip {
                None => return,
                Some(Some(bad)) => {
                    out(REPLACEMENT);
                    rest = rest.get(bad..).unwrap_or_default();
                }
                Some(None) => {
                    if let Some(place) = self.held.get_mut(..rest.len()) {
                        place.copy_from_slice(rest);
                        self.len = rest.len();
                    }
                    return;
                }
            }
        }
    }

    /// Ends the text: a tail that was held back becomes one U+FFFD.
    pub fn finish(&mut self, mut out: impl FnMut(&str)) {
        if core::mem::take(&mut self.len) > 0 {
            out(REPLACEMENT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::specials::Control;
    use super::super::vocab::tests::{file, load, tokens};
    use super::*;
    use std::string::String;
    use std::vec::Vec;

    #[test]
    fn tokens_controls_and_strangers() {
        let vocab = load(&file(&tokens(&[b"ab"])), &mut Vec::new()).unwrap();
        let specials = Specials::new(vocab.len(), &mut []);
        let decode = |controls, ids: &[u32]| {
            let decoder = Decoder::new(&vocab, &specials, controls);
            let mut bytes = Vec::new();
            let result = ids.iter().try_for_each(|&id| decoder.push(TokenId(id), |b| bytes.extend_from_slice(b)));
            (result, bytes)
        };
        let open = specials.id(Control::OPEN).0;
        let ids = [256, open, 0, open + 7];
        assert_eq!(decode(ControlText::Spell, &ids), (Ok(()), b"ab<|open|>\xff<|reserved_token_267|>".to_vec()));
        assert_eq!(decode(ControlText::Drop, &ids), (Ok(()), b"ab\xff".to_vec()));
        for id in [513, u32::MAX] {
            let unknown = UnknownId { id: TokenId(id), end: 513 };
            assert_eq!(decode(ControlText::Drop, &[256, id]), (Err(unknown), b"ab".to_vec()));
        }
    }

    #[test]
    fn text_is_the_lossy_text_however_the_bytes_arrive() {
        let alphabet = [0x41, 0x80, 0xbf, 0xc3, 0xa9, 0xe4, 0xbd, 0xa0, 0xed, 0xf0, 0x9f, 0x98, 0xf4, 0x90, 0xff];
        let mut state = 0x2545_f491_4f6c_dd1du64;
        let mut random = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 33).unwrap() % n
        };
        for case in 0..20_000 {
            let bytes: Vec<u8> = (0..random(12)).map(|_| alphabet[random(alphabet.len())]).collect();
            let (mut stream, mut text, mut rest) = (Utf8Stream::new(), String::new(), &bytes[..]);
            while !rest.is_empty() {
                let (now, later) = rest.split_at(1 + random(rest.len()));
                stream.push(now, |t| text.push_str(t));
                assert!(stream.held() <= 3);
                rest = later;
            }
            stream.finish(|t| text.push_str(t));
            assert_eq!(text, String::from_utf8_lossy(&bytes), "case {case} {bytes:02x?}");
        }
    }

    #[test]
    fn only_an_unfinished_character_is_held_back() {
        let mut stream = Utf8Stream::new();
        let mut shown = Vec::new();
        for part in [&b"a\xe4"[..], b"\xbd", b"\xa0b", b"\xf0\x9f", b"c"] {
            let mut text = String::new();
            stream.push(part, |t| text.push_str(t));
            shown.push(text);
        }
        assert_eq!(shown, ["a", "", "\u{4f60}b", "", "\u{fffd}c"]);
    }
}
