//! Text to token ids and back (spec section 5).
//!
//! The first and the last step of a token's way: prompt bytes -> [`encode`] -> ids, and sampled id
//! -> [`Decoder`] -> bytes. What a conversation looks like in ids is not decided here.
//!
//! ```text
//! Vocab        tiktoken.model: rank <-> bytes, in an arena of the caller
//! Specials     the 256 control ids above the ranks
//! Pieces       text -> pieces that merging never crosses
//! encode       text -> pieces -> ids
//! Decoder      id -> bytes
//! Utf8Stream   bytes -> text that can be shown
//! ```
//!
//! Any bytes can be encoded, and decoding gives the same bytes back: no input is normalised or
//! replaced. Time is linear in the text but for the logarithm in merging a long piece; no text is
//! slow by construction.
//!
//! # Example
//! ```
//! use k3_core::carve::Line;
//! use k3_core::tokenizer::{self, ControlText, Decoder, Specials, Vocab};
//! use k3_core::view::TokenId;
//!
//! // A vocabulary of the 256 single bytes alone.
//! let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
//! let line = |b: usize| {
//!     format!("{}{}== {b}\n", alphabet[b >> 2] as char, alphabet[(b & 3) << 4] as char)
//! };
//! let file: String = (0..256).map(line).collect();
//!
//! let mut arena = vec![Line::ZERO; Vocab::required(file.as_bytes())?];
//! let vocab = Vocab::load(file.as_bytes(), &mut arena)?;
//! let specials = Specials::new(vocab.len(), &mut []);
//!
//! let text = b"ok<|sep|>";
//! let mut scratch = vec![Line::ZERO; tokenizer::scratch_len(text.len()).unwrap()];
//! let mut ids = Vec::new();
//! tokenizer::encode_with_specials(&vocab, &specials, text, &mut scratch, |id| ids.push(id))?;
//! assert_eq!(ids, [TokenId(111), TokenId(107), TokenId(256 + 5)]);
//!
//! let mut bytes = Vec::new();
//! let decoder = Decoder::new(&vocab, &specials, ControlText::Spell);
//! for id in ids {
//!     decoder.push(id, |part| bytes.extend_from_slice(part))?;
//! }
//! assert_eq!(bytes, text);
//! # Ok::<(), Box<dyn core::error::Error>>(())
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

mod bpe;
mod decode;
mod pretoken;
mod specials;
mod unicode;
mod vocab;

pub use bpe::SHORT_PIECE;
pub use decode::{ControlText, Decoder, UnknownId, Utf8Stream};
pub use pretoken::{CHUNK_CHARS, Pieces, RUN_CHARS};
pub use specials::{BLOCK, Control, NAME_MAX, Occurrence, SpecialError, Specials, Spelling};
pub use vocab::{LineFault, Measured, Vocab, VocabError};

#[cfg(test)]
pub(crate) use vocab::tests::base64;

use crate::carve::{BufferError, Line};
use crate::view::TokenId;
use pretoken::{Chunk, Chunks, Split};

/// A piece of the text needs more scratch memory than was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EncodeError {
    /// Where the piece starts, in bytes of the text.
    pub at: usize,
    /// Its length in bytes.
    pub piece: usize,
    /// What it needs and what it was given.
    pub buffer: BufferError,
}

impl core::fmt::Display for EncodeError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "cannot encode the {} bytes at offset {} that stay together: {}", self.piece, self.at, self.buffer)
    }
}

impl core::error::Error for EncodeError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        Some(&self.buffer)
    }
}

/// Bytes of the longest piece of `text`: what its scratch has to be made for. Give the specials if
/// [`encode_with_specials`] will get them, since a text between two spellings is cut otherwise.
#[must_use]
pub fn longest_piece(text: &[u8], specials: Option<&Specials<'_>>) -> usize {
    let mut longest = 0;
    let walked = walk(text, specials, |part| {
        if let Part::Piece(piece) = part {
            longest = longest.max(piece.len());
        }
        Ok::<(), core::convert::Infallible>(())
    });
    walked.map_or(0, |()| longest)
}

/// Lines of scratch that encoding a piece of `piece` bytes needs; `None` if that overflows.
///
/// Zero up to [`SHORT_PIECE`] bytes, else about 13 bytes a byte. The length of the text is a safe
/// choice, [`longest_piece`] the exact one.
#[must_use]
pub fn scratch_len(piece: usize) -> Option<usize> {
    bpe::scratch_len(piece)
}

/// How many bytes at the front of `text` have the same ids whatever follows them, and whatever comes
/// behind them is encoded as if it stood alone. So a text can be encoded in parts: give as many bytes
/// as there are, encode those that are settled, and go on from there with more.
///
/// 0 if nothing is settled yet. Of well-formed text, [`CHUNK_CHARS`] characters are; where bytes that
/// are no UTF-8 end, so is what lies before.
#[must_use]
pub fn settled(text: &[u8]) -> usize {
    let (mut settled, mut at, mut invalid) = (0usize, 0usize, false);
    let mut chunks = Chunks::new(text);
    while let Some(chunk) = chunks.next() {
        match chunk {
            Chunk::Invalid(bytes) => {
                at = at.saturating_add(bytes.len());
                invalid = true;
            }
            Chunk::Text(text) => {
                if core::mem::take(&mut invalid) {
                    settled = at;
                }
                at = at.saturating_add(text.len());
                if chunks.is_at_cut() {
                    settled = at;
                }
            }
        }
    }
    settled
}

/// Encodes `text`, handing its ids to `out` in order. Control spellings are ordinary text.
///
/// Nothing is prepended. `text` may hold any bytes; what is not UTF-8 is encoded byte for byte. There are at
/// most `text.len()` ids, since none stands for nothing.
///
/// # Errors
/// [`EncodeError`] if `scratch` is too short for some piece; the ids before it were handed out.
///
/// **Source.** Spec 5.2 and 5.3.
pub fn encode(
    vocab: &Vocab<'_>,
    text: &[u8],
    scratch: &mut [Line],
    out: impl FnMut(TokenId),
) -> Result<(), EncodeError> {
    encode_parts(vocab, None, text, scratch, out)
}

/// Encodes `text` like [`encode`], but spellings of control ids become those ids.
///
/// At each place the longest spelling is taken. What lies between two of them is encoded as a text
/// of its own. As in the reference, a spelling that one of the cuts of [`CHUNK_CHARS`] and
/// [`RUN_CHARS`] goes through is not one.
///
/// # Errors
/// [`EncodeError`] as for [`encode`].
pub fn encode_with_specials(
    vocab: &Vocab<'_>,
    specials: &Specials<'_>,
    text: &[u8],
    scratch: &mut [Line],
    out: impl FnMut(TokenId),
) -> Result<(), EncodeError> {
    encode_parts(vocab, Some(specials), text, scratch, out)
}

fn encode_parts(
    vocab: &Vocab<'_>,
    specials: Option<&Specials<'_>>,
    text: &[u8],
    scratch: &mut [Line],
    mut out: impl FnMut(TokenId),
) -> Result<(), EncodeError> {
    let mut memory = bpe::Memory::new();
    let mut at = 0usize;
    walk(text, specials, |part| {
        let len = match part {
            Part::Piece(piece) => {
                bpe::merge(vocab, piece, &mut memory, scratch, &mut |rank| out(TokenId(rank)))
                    .map_err(|buffer| EncodeError { at, piece: piece.len(), buffer })?;
                piece.len()
            }
            Part::Control(id, len) => {
                out(id);
                len
            }
        };
        at = at.saturating_add(len);
        Ok(())
    })
}

/// What a text consists of.
enum Part<'t> {
    /// Bytes that are merged among themselves.
    Piece(&'t [u8]),
    /// A control id and the length of its spelling.
    Control(TokenId, usize),
}

/// Visits the parts of `text` in order.
#[inline]
fn walk<'t, E>(
    text: &'t [u8],
    specials: Option<&Specials<'_>>,
    mut visit: impl FnMut(Part<'t>) -> Result<(), E>,
) -> Result<(), E> {
    for chunk in Chunks::new(text) {
        let mut rest = match chunk {
            Chunk::Invalid(bytes) => {
                visit(Part::Piece(bytes))?;
                continue;
            }
            Chunk::Text(text) => text,
        };
        loop {
            // Spellings are whole characters, so both of their ends lie between characters.
            let found = specials.and_then(|s| s.find(rest.as_bytes())).and_then(|found| {
                let (before, spelled) = rest.split_at_checked(found.at)?;
                Some((before, found, spelled.get(found.len..)?))
            });
            let before = found.map_or(rest, |(before, ..)| before);
            for piece in Split::new(before) {
                visit(Part::Piece(piece.as_bytes()))?;
            }
            let Some((_, found, behind)) = found else { break };
            visit(Part::Control(found.id, found.len))?;
            rest = behind;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::vocab::tests::{file, load, tokens};
    use super::*;
    use std::format;
    use std::path::Path;
    use std::string::String;
    use std::vec::Vec;

    fn ids(vocab: &Vocab<'_>, specials: Option<&Specials<'_>>, text: &[u8]) -> Vec<u32> {
        let mut scratch = std::vec![Line::ZERO; scratch_len(longest_piece(text, specials)).unwrap()];
        let mut ids = Vec::new();
        match specials {
            None => encode(vocab, text, &mut scratch, |id| ids.push(id.0)).unwrap(),
            Some(s) => encode_with_specials(vocab, s, text, &mut scratch, |id| ids.push(id.0)).unwrap(),
        }
        ids
    }

    fn decoded(vocab: &Vocab<'_>, specials: &Specials<'_>, ids: &[u32]) -> Vec<u8> {
        let decoder = Decoder::new(vocab, specials, ControlText::Spell);
        let mut bytes = Vec::new();
        ids.iter().for_each(|&id| decoder.push(TokenId(id), |b| bytes.extend_from_slice(b)).unwrap());
        bytes
    }

    #[test]
    fn specials_are_text_unless_asked_for() {
        let vocab = load(&file(&tokens(&[b"<|", b"|>", b"a<"])), &mut Vec::new()).unwrap();
        let specials = Specials::new(vocab.len(), &mut []);
        let text = b"a<|open|>\xff<|open|>b<|reserved_token_267|><|open|";
        assert!(ids(&vocab, None, text).iter().all(|&id| id < vocab.len()));
        let found = ids(&vocab, Some(&specials), text);
        let controls: Vec<u32> = found.iter().copied().filter(|&id| id >= vocab.len()).collect();
        assert_eq!(controls, [262, 262, 267]);
        for found in [found, ids(&vocab, None, text)] {
            assert_eq!(decoded(&vocab, &specials, &found), text);
        }
    }

    #[test]
    fn a_spelling_can_make_the_piece_beside_it_longer() {
        // Between two spellings line breaks and the blanks behind them are one piece; without, the
        // punctuation takes the line breaks. Scratch sized without the specials would be too short.
        let text = format!("<|sep|>{}{}\n<|sep|>", "\n".repeat(200), " ".repeat(100));
        let vocab = load(&file(&tokens(&[])), &mut Vec::new()).unwrap();
        let specials = Specials::new(vocab.len(), &mut []);
        assert_eq!(longest_piece(text.as_bytes(), None), 202);
        assert_eq!(longest_piece(text.as_bytes(), Some(&specials)), 301);
        assert_eq!(ids(&vocab, Some(&specials), text.as_bytes()).len(), 303);
    }

    #[test]
    fn any_bytes_come_back() {
        let vocab = load(&file(&tokens(&[b"\xff\x80", b"ab", b" a", b"\xe4\xbd"])), &mut Vec::new()).unwrap();
        let specials = Specials::new(vocab.len(), &mut []);
        let mut state = 88_172_645_463_325_252u64;
        for len in (0..300).chain([5000, 70_000]) {
            let text: Vec<u8> = (0..len)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    b"\xff\x80ab \xe4\xbd\xa0\n<|sep|>"[usize::try_from(state >> 40).unwrap() % 16]
                })
                .collect();
            for specials_too in [None, Some(&specials)] {
                assert_eq!(decoded(&vocab, &specials, &ids(&vocab, specials_too, &text)), text, "len {len}");
            }
        }
    }

    #[test]
    fn an_error_says_which_piece() {
        let vocab = load(&file(&tokens(&[])), &mut Vec::new()).unwrap();
        let text = format!("ab {}", "x".repeat(1000));
        let mut before = 0;
        let err = encode(&vocab, text.as_bytes(), &mut [], |_| before += 1).unwrap_err();
        assert_eq!((before, err.at, err.piece), (2, 2, 1001));
    }

    #[test]
    fn parts_that_are_settled_are_encoded_alone() {
        let vocab = load(&file(&tokens(&[b"ab", b" a", b"\xff\x80", b"\xc3\xa9b"])), &mut Vec::new()).unwrap();
        let long = |unit: &str| unit.repeat(2 * CHUNK_CHARS / unit.chars().count()).into_bytes();
        let broken = b"ab\xff\x80ab \xc3".repeat(9);
        for (text, block) in [
            (long("ab \u{e9}"), 300_000),
            (long("\u{e9}"), 700_000),
            (broken.clone(), 1),
            (broken, 7),
            (long("ab\n"), 1_000_001),
            (b"\xff".repeat(50), 3),
        ] {
            let (mut ids_of_parts, mut rest, mut most) = (Vec::new(), Vec::new(), 0);
            for more in text.chunks(block) {
                rest.extend_from_slice(more);
                let settled = settled(&rest);
                ids_of_parts.extend(ids(&vocab, None, &rest[..settled]));
                rest.drain(..settled);
                most = most.max(rest.len());
            }
            ids_of_parts.extend(ids(&vocab, None, &rest));
            assert!(ids_of_parts == ids(&vocab, None, &text), "blocks of {block}");
            assert!(text[0] == 0xff || most < 4 * CHUNK_CHARS && most < text.len(), "{most} of {}", text.len());
        }
    }

    /// The arrays or strings behind `"key": `; the file is ours and flat enough for this.
    fn fields<'j>(json: &'j str, key: &str, open: char, close: &str) -> Vec<&'j str> {
        let key = format!("\"{key}\":");
        let behind = json.split(&*key).skip(1).filter_map(|rest| rest.trim_start().strip_prefix(open));
        behind.map(|rest| &rest[..rest.find(close).unwrap()]).collect()
    }

    fn numbers(list: &str) -> Vec<u32> {
        list.split(',').map(|n| n.trim().parse().unwrap()).collect()
    }

    /// Undoes the escapes of a JSON string.
    fn unescaped(text: &str) -> String {
        let (mut units, mut rest) = (Vec::new(), text.chars());
        while let Some(c) = rest.next() {
            let c = match (c, if c == '\\' { rest.next() } else { None }) {
                (_, Some('u')) => {
                    let hex: String = rest.by_ref().take(4).collect();
                    units.push(u16::from_str_radix(&hex, 16).unwrap());
                    continue;
                }
                (_, Some('n')) => '\n',
                (_, Some(escaped)) => escaped,
                (c, None) => c,
            };
            units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
        }
        String::from_utf16(&units).unwrap()
    }

    #[test]
    fn oracle_prompts_and_answers() {
        let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/oracle/tiny13");
        let (Ok(model), Ok(json)) = (
            std::fs::read(oracle.join("tiktoken.model")),
            std::fs::read_to_string(oracle.join("expected/expected.json")),
        ) else {
            std::eprintln!("SKIPPED: the oracle is not beside the repository");
            return;
        };
        let mut arena = std::vec![Line::ZERO; Vocab::required(&model).unwrap()];
        let vocab = Vocab::load(&model, &mut arena).unwrap();
        let specials = Specials::new(vocab.len(), &mut []);

        // No text of the oracle ends in a backslash, so an unescaped quote is one before a comma.
        let texts = fields(&json, "text", '"', "\",");
        let prompts = fields(&json, "ids", '[', "]");
        let answers = fields(&json, "greedy_ids", '[', "]");
        let bytes = fields(&json, "greedy_text_bytes_hex", '"', "\"");
        assert_eq!((texts.len(), prompts.len(), answers.len(), bytes.len()), (3, 3, 3, 3));
        for i in 0..3 {
            let text = unescaped(texts[i]);
            assert_eq!(ids(&vocab, Some(&specials), text.as_bytes()), numbers(prompts[i]), "{text}");
            let found = decoded(&vocab, &specials, &numbers(answers[i]));
            let hex: String = found.iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, bytes[i]);
        }
    }
}
