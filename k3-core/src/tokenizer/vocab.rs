//! The vocabulary: `tiktoken.model` as a table from rank to bytes and back.
//!
//! The file is text, one token a line: the token's bytes in base64, a space, its rank in decimal.
//! A rank is a token id and is also the order in which byte-pair merging prefers tokens. Ranks must
//! be dense (`0..n`, in any order of lines) and all 256 single bytes must be tokens, so that any
//! text can be encoded. A line may end in CR LF and may be blank.
//!
//! Everything lies in an arena of the caller:
//!
//! ```text
//! bytes, offsets  the bytes of all tokens in rank order, and where each one starts
//! direct          the ranks of strings of one and of two bytes
//! table           a hash table from longer strings to ranks; up to eight bytes lie in the slot itself
//! pairs           a hash table from two ranks to the rank of the token that merging makes of them
//! ```
//!
//! The hashes have no key, since the core has no source of randomness. They mix strongly, and nothing
//! rests on that: an entry that would have to be stored further than [`PROBES`] slots from its place
//! is refused when the file is loaded, so a file made to collide is an error and never a slow run.
//!
//! Loading looks at each line twice, and the text of a token once more when its place is known; a file whose
//! lines are all as they should be is read by words of eight bytes ([`plain`]).
//!
//! **Why one pair a token is enough.** Merging looks at bytes: any two neighbours whose bytes are a
//! token may become it. But while the ends of a stretch are ends of parts, what happens inside does
//! not depend on what lies outside. So wherever two parts become token `t`, they are the two that
//! merging the bytes of `t` alone ends with, before its last step. Merging `t` alone only makes
//! shorter tokens before that step, so the pairs are found in the order of length, each with the help
//! of those before it. A token that merging does not reach has no pair: only a whole piece can be it.

use super::bpe::{self, WINDOW, Window};
use crate::carve::{BufferError, Carver, Line, Tally, enough};

/// Slots a search looks at before it gives up. At a table at most two thirds full the longest walk of
/// 160,000 well-mixed tokens is below 100.
const PROBES: usize = 512;

/// Tokens a vocabulary may have: so many that two of them and a third fit one slot of 64 bits. The
/// release has 163,584.
pub(super) const MAX_TOKENS: usize = 1 << RANK_BITS;

/// Bits of a rank.
const RANK_BITS: u32 = 21;

/// Bits of the filter for each slot of the table of pairs: about one in twelve pairs that are none passes.
const FILTER: usize = 8;

/// No token.
pub(super) const NO_RANK: u32 = u32::MAX;

/// A slot of the table of strings: what is compared, the rank, and the length in bytes.
///
/// Of a string of up to eight bytes the bytes themselves are compared, so one cache line answers. Of
/// a longer one it is the hash, and its bytes are read if that is equal.
type Slot = [u64; 2];

/// A slot that holds nothing.
const EMPTY: Slot = [u64::MAX; 2];

/// A slot of the table of pairs that holds nothing. Others are left rank, right rank, rank of both.
const NO_PAIR: u64 = u64::MAX;

/// Strings of one and of two bytes.
const DIRECT: usize = 256 + 65_536;

/// Where a string of one or two bytes has its entry.
#[inline]
fn direct(token: &[u8]) -> Option<usize> {
    match *token {
        [a] => Some(usize::from(a)),
        [a, b] => Some(usize::from(u16::from_be_bytes([a, b])).wrapping_add(256)),
        _ => None,
    }
}

/// What is wrong with one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LineFault {
    /// There is no space between the token and its rank.
    NoSpace,
    /// The token is not standard base64 with canonical padding.
    Base64,
    /// The token has no bytes.
    EmptyToken,
    /// The rank is not a decimal number below 2^32 (digits only).
    Rank,
}

/// Why a vocabulary file is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum VocabError {
    /// A line cannot be read.
    Line {
        /// The line, counted from one.
        line: usize,
        /// Where the line starts, in bytes of the file.
        offset: usize,
        /// What is wrong with it.
        what: LineFault,
    },
    /// A rank is given twice.
    DuplicateRank {
        /// The second line that gives it, counted from one.
        line: usize,
        /// Where that line starts, in bytes of the file.
        offset: usize,
        /// The rank.
        rank: u32,
    },
    /// The ranks have a gap: the file's tokens are not `0..tokens`.
    MissingRank {
        /// The lowest rank that no line gives.
        rank: u32,
        /// Tokens in the file.
        tokens: u32,
    },
    /// Two ranks have the same bytes.
    DuplicateToken {
        /// The lower rank.
        first: u32,
        /// The higher rank.
        second: u32,
    },
    /// A single byte is no token, so there would be text that cannot be encoded.
    MissingByte {
        /// The byte.
        byte: u8,
    },
    /// More than 2^21 tokens, or more bytes than 32-bit offsets can name.
    TooLarge {
        /// Tokens in the file.
        tokens: usize,
        /// Bytes of all tokens.
        bytes: usize,
    },
    /// Too many tokens have the same hash: not a vocabulary but an attack.
    Crowded {
        /// The token that finds no place.
        rank: u32,
    },
    /// The arena is too small.
    Buffer(BufferError),
}

impl core::fmt::Display for VocabError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Line { line, offset, what } => {
                let what = match what {
                    LineFault::NoSpace => "no space between token and rank",
                    LineFault::Base64 => "the token is not valid base64",
                    LineFault::EmptyToken => "the token is empty",
                    LineFault::Rank => "the rank is not a decimal number below 2^32",
                };
                write!(f, "line {line} (offset {offset}): {what}")
            }
            Self::DuplicateRank { line, offset, rank } => {
                write!(f, "line {line} (offset {offset}): rank {rank} is given twice")
            }
            Self::MissingRank { rank, tokens } => write!(f, "{tokens} tokens, but none has rank {rank}"),
            Self::DuplicateToken { first, second } => write!(f, "ranks {first} and {second} have the same bytes"),
            Self::MissingByte { byte } => write!(f, "no token is the single byte 0x{byte:02x}"),
            Self::TooLarge { tokens, bytes } => {
                write!(
                    f,
                    "{tokens} tokens of {bytes} bytes are more than a vocabulary may have (2^21 tokens, 2^32 bytes)"
                )
            }
            Self::Crowded { rank } => write!(f, "rank {rank} collides with too many other tokens"),
            Self::Buffer(e) => write!(f, "vocabulary arena: {e}"),
        }
    }
}

impl core::error::Error for VocabError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Buffer(e) => Some(e),
            _ => None,
        }
    }
}

impl From<BufferError> for VocabError {
    fn from(e: BufferError) -> Self {
        Self::Buffer(e)
    }
}

/// A line of the file, split but not decoded.
#[derive(Debug, Clone, Copy)]
struct Entry<'f> {
    line: usize,
    /// Where the line, and so its token, starts (bytes of the file).
    offset: usize,
    base64: &'f [u8],
    bytes: usize,
    rank: u32,
}

impl Entry<'_> {
    const fn fault(&self, what: LineFault) -> VocabError {
        VocabError::Line { line: self.line, offset: self.offset, what }
    }
}

/// The lines of `file` that are not blank.
fn entries(file: &[u8]) -> impl Iterator<Item = Result<Entry<'_>, VocabError>> {
    let (mut rest, mut line, mut offset) = (file, 0usize, 0usize);
    core::iter::from_fn(move || {
        while !rest.is_empty() {
            line = line.saturating_add(1);
            let mut entry = Entry { line, offset, base64: &[], bytes: 0, rank: 0 };
            let (found, behind) = match plain(rest) {
                Some((base64, rank, behind)) => (split(base64, Some(rank)), behind),
                None => {
                    let mut parts = rest.splitn(2, |&b| b == b'\n');
                    let (text, behind) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                    let text = text.strip_suffix(b"\r").unwrap_or(text);
                    let mut halves = text.splitn(2, |&b| b == b' ');
                    let found = match (halves.next(), halves.next()) {
                        (Some(base64), Some(rank)) => split(base64, decimal(rank)),
                        _ if text.is_empty() => Ok((&[][..], 0, 0)),
                        _ => Err(LineFault::NoSpace),
                    };
                    (found, behind)
                }
            };
            offset = offset.saturating_add(rest.len().saturating_sub(behind.len()));
            rest = behind;
            match found {
                Ok((_, 0, _)) => {}
                Ok((base64, bytes, rank)) => {
                    (entry.base64, entry.bytes, entry.rank) = (base64, bytes, rank);
                    return Some(Ok(entry));
                }
                Err(what) => return Some(Err(entry.fault(what))),
            }
        }
        None
    })
}

/// The two halves of a line, with the bytes of its token.
#[inline]
fn split(base64: &[u8], rank: Option<u32>) -> Result<(&[u8], usize, u32), LineFault> {
    let bytes = decoded_len(base64).ok_or(LineFault::Base64)?;
    if bytes == 0 {
        return Err(LineFault::EmptyToken);
    }
    Ok((base64, bytes, rank.ok_or(LineFault::Rank)?))
}

/// A line as nearly all are: what is in front of its only space, a number of up to nine digits, and the end of
/// the line; and what is behind that. `None` of others, and of some that are like it.
#[inline]
fn plain(text: &[u8]) -> Option<(&[u8], u32, &[u8])> {
    // Base64 has no character up to the space.
    let (base64, rest) = text.split_at_checked(first_low(text))?;
    let mut rest = rest.strip_prefix(b" ")?;
    let (mut rank, mut digits) = (0u32, 0u32);
    while let [digit @ b'0'..=b'9', behind @ ..] = rest {
        rank = rank.wrapping_mul(10).wrapping_add(u32::from(digit.wrapping_sub(b'0')));
        digits = digits.wrapping_add(1);
        rest = behind;
    }
    let rest = match rest {
        [b'\n', rest @ ..] | [b'\r', b'\n', rest @ ..] => rest,
        [] => rest,
        _ => return None,
    };
    matches!(digits, 1..=9).then_some((base64, rank, rest))
}

/// Where the first byte up to the space is, or the end.
#[inline]
fn first_low(text: &[u8]) -> usize {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const ABOVE: u64 = ONES.wrapping_mul(b' ' as u64).wrapping_add(ONES);
    let (words, rest) = text.as_chunks::<8>();
    let mut at = 0usize;
    for word in words {
        let word = u64::from_le_bytes(*word);
        // The highest bit of a byte that is low; what borrows from the bytes above it makes no difference to
        // the lowest such bit.
        let low = word.wrapping_sub(ABOVE) & !word & ONES.wrapping_shl(7);
        if low != 0 {
            return at.saturating_add(low.trailing_zeros().wrapping_shr(3) as usize);
        }
        at = at.saturating_add(8);
    }
    at.saturating_add(rest.iter().position(|&b| b <= b' ').unwrap_or(rest.len()))
}

fn decimal(text: &[u8]) -> Option<u32> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u32, |n, &b| {
        let digit = b.is_ascii_digit().then(|| b.wrapping_sub(b'0'))?;
        n.checked_mul(10)?.checked_add(u32::from(digit))
    })
}

/// Bytes that base64 `text` stands for, going by its length and padding alone.
fn decoded_len(text: &[u8]) -> Option<usize> {
    let pads = match text {
        [.., b'=', b'='] => 2,
        [.., b'='] => 1,
        _ => 0,
    };
    if !text.len().is_multiple_of(4) {
        return None;
    }
    text.len().checked_div(4)?.checked_mul(3)?.checked_sub(pads)
}

/// The value of each base64 character; 255 for the others, `=` among them.
static BASE64: [u8; 256] = {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut table = [255; 256];
    let mut value = 0u8;
    while value < 64 {
        #[expect(clippy::indexing_slicing, reason = "value < 64, at compile time")]
        {
            table[alphabet[value as usize] as usize] = value;
        }
        value = value.wrapping_add(1);
    }
    table
};

/// The value of a base64 character, or more than 63.
#[inline]
fn value(c: u8) -> u8 {
    BASE64.get(usize::from(c)).copied().unwrap_or(255)
}

/// Decodes base64 of [`decoded_len`] `out.len()`; `None` if it is not strictly valid.
fn decode(text: &[u8], out: &mut [u8]) -> Option<()> {
    let (quads, rest) = text.as_chunks::<4>();
    let (parts, tail) = out.as_chunks_mut::<3>();
    // Only the last part can be short, and only there is padding allowed.
    let (whole, last) = quads.split_at_checked(parts.len())?;
    let mut all = 0;
    let mut decoded = |quad: [u8; 4]| {
        let [a, b, c, d] = quad.map(value);
        all |= a | b | c | d;
        let [a, b, c, d] = [a, b, c, d].map(u32::from);
        let [_, bytes @ ..] = (a.wrapping_shl(18) | b.wrapping_shl(12) | c.wrapping_shl(6) | d).to_be_bytes();
        bytes
    };
    for (part, quad) in parts.iter_mut().zip(whole) {
        *part = decoded(*quad);
    }
    // Bits behind the end must be zero, or two spellings would mean one token.
    match (last, tail) {
        ([], []) => {}
        ([[a, b, b'=', b'=']], [x]) => match decoded([*a, *b, b'A', b'A']) {
            [byte, 0, 0] => *x = byte,
            _ => return None,
        },
        ([[a, b, c, b'=']], [x, y]) => match decoded([*a, *b, *c, b'A']) {
            [first, second, 0] => (*x, *y) = (first, second),
            _ => return None,
        },
        _ => return None,
    }
    (rest.is_empty() && all < 64).then_some(())
}

/// The high and the low half of a product, folded: every input bit reaches every output bit.
#[expect(clippy::cast_possible_truncation, reason = "the two halves are what is wanted")]
#[inline]
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128).wrapping_mul(b as u128);
    product as u64 ^ (product >> 64) as u64
}

/// Digits of e and of sqrt(3): odd, irregular, and not chosen for anything.
const MIX: [u64; 2] = [0xb7e1_5162_8aed_2a6b, 0xbb67_ae85_84ca_a73b];

/// What a slot says of a string of three bytes or more, but for its rank; and where to look for it.
#[expect(clippy::cast_possible_truncation, reason = "the hash is cut to a slot number on purpose")]
#[inline]
fn key(bytes: &[u8]) -> (u64, usize) {
    let word = |b: Option<&[u8; 8]>| b.map_or(0, |b| u64::from_le_bytes(*b));
    let half = |b: Option<&[u8; 4]>| b.map_or(0, |b| u64::from(u32::from_le_bytes(*b)));
    let [a, b] = MIX;
    let len = bytes.len() as u64;
    match *bytes {
        [x, y, z] => {
            let key = u64::from(x) | u64::from(y) << 8 | u64::from(z) << 16;
            (key, fold(key ^ len ^ a, b) as usize)
        }
        _ if bytes.len() <= 8 => {
            // Where the two halves overlap they have the same bits.
            let above = bytes.len().wrapping_sub(4).wrapping_mul(8) as u32;
            let key = half(bytes.first_chunk()) | half(bytes.last_chunk()).wrapping_shl(above);
            (key, fold(key ^ len ^ a, b) as usize)
        }
        _ => {
            let (words, _) = bytes.as_chunks::<8>();
            let state = words.iter().fold(a ^ len, |state, w| fold(state ^ u64::from_le_bytes(*w), b));
            let hash = fold(fold(state ^ word(bytes.last_chunk()), b) ^ a, b);
            (hash, hash as usize)
        }
    }
}

/// Words of the filter beside so many slots: a power of two like these.
const fn filter_words(slots: usize) -> usize {
    slots.saturating_mul(FILTER).div_ceil(64)
}

/// What merging asks: the ranks of single bytes, of two bytes, and of two neighbours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Merges<'a> {
    /// The ranks of all strings of one and of two bytes, or [`NO_RANK`].
    direct: &'a [u32],
    /// A power of two of slots, at most two thirds of them used.
    pairs: &'a [u64],
    /// [`FILTER`] bits a slot, set where a pair may be. Most pairs that are asked for are none, and this
    /// is small enough to stay in a processor's own cache.
    filter: &'a [u64],
}

impl Merges<'_> {
    /// The rank of a single byte.
    #[inline]
    pub(super) fn byte(&self, byte: u8) -> u32 {
        self.direct.get(usize::from(byte)).copied().unwrap_or(NO_RANK)
    }

    /// The rank of two bytes, or [`NO_RANK`].
    #[inline]
    pub(super) fn bytes(&self, left: u8, right: u8) -> u32 {
        direct(&[left, right]).and_then(|at| self.direct.get(at)).copied().unwrap_or(NO_RANK)
    }

    /// The rank of what merging makes of two neighbours of which not both are single bytes, or
    /// [`NO_RANK`].
    #[expect(clippy::cast_possible_truncation, reason = "the lowest bits of a slot are the rank")]
    #[inline]
    pub(super) fn pair(&self, left: u32, right: u32) -> u32 {
        let key = pair_key(left, right);
        let mut at = pair_place(key);
        let (word, bit) = filter_place(at, self.filter.len());
        if self.filter.get(word).is_none_or(|word| word & bit == 0) {
            return NO_RANK;
        }
        let mask = self.pairs.len().wrapping_sub(1);
        for _ in 0..PROBES {
            let slot = self.pairs.get(at & mask).copied().unwrap_or(NO_PAIR);
            if slot >> RANK_BITS == key {
                return slot as u32 & ((1 << RANK_BITS) - 1);
            }
            if slot == NO_PAIR {
                break;
            }
            at = at.wrapping_add(1);
        }
        NO_RANK
    }
}

#[inline]
fn pair_key(left: u32, right: u32) -> u64 {
    u64::from(left) << RANK_BITS | u64::from(right)
}

#[expect(clippy::cast_possible_truncation, reason = "the product is cut to a slot number on purpose")]
#[inline]
fn pair_place(key: u64) -> usize {
    let [a, _] = MIX;
    // The upper half depends on all bits of the key; what uses more than 32 bits has the rest as well.
    key.wrapping_mul(a).rotate_left(32) as usize
}

/// The word of the filter and the bit in it of a pair with this place.
#[inline]
fn filter_place(place: usize, words: usize) -> (usize, u64) {
    (place.wrapping_shr(6) & words.wrapping_sub(1), 1 << (place & 63))
}

/// A loaded vocabulary: `n` tokens with the ranks `0..n`.
#[derive(Debug, Clone, Copy)]
pub struct Vocab<'a> {
    bytes: &'a [u8],
    /// Token `r` is `bytes[offsets[r]..offsets[r + 1]]`.
    offsets: &'a [u32],
    /// A power of two of slots, at most two thirds of them used.
    table: &'a [Slot],
    merges: Merges<'a>,
    longest: usize,
}

/// A file that has been looked at: how much there is in it.
#[derive(Debug, Clone, Copy)]
pub struct Measured<'f> {
    file: &'f [u8],
    tokens: u32,
    bytes: usize,
    slots: usize,
    longest: usize,
    lines: usize,
}

/// Slots of the table for so many tokens, of which a third or more stay empty; `None` if that overflows.
fn slots(tokens: usize) -> Option<usize> {
    tokens.checked_add(tokens / 2)?.checked_next_power_of_two()
}

/// Tokens of which one word says which lengths they have.
const BLOCK: usize = 16;

impl<'f> Measured<'f> {
    fn new(file: &'f [u8]) -> Result<Self, VocabError> {
        let (mut tokens, mut bytes, mut longest) = (0usize, 0usize, 0usize);
        for entry in entries(file) {
            let entry = entry?;
            tokens = tokens.saturating_add(1);
            bytes = bytes.saturating_add(entry.bytes);
            longest = longest.max(entry.bytes);
        }
        let large = VocabError::TooLarge { tokens, bytes };
        let count = u32::try_from(tokens).ok().filter(|_| tokens <= MAX_TOKENS);
        let slots = slots(tokens).ok_or(large)?;
        u32::try_from(bytes).map_err(|_| large)?;
        let mut this = Self { file, tokens: count.ok_or(large)?, bytes, slots, longest, lines: 0 };
        this.lines = this.tally().ok_or(BufferError::Overflow)?;
        Ok(this)
    }

    fn tally(&self) -> Option<usize> {
        let tally = Tally::new().add::<u8>(self.bytes)?.add::<u32>((self.tokens as usize).checked_add(1)?)?;
        let tally = tally.add::<Slot>(self.slots)?.add::<u32>(DIRECT)?.add::<u64>(self.slots)?;
        let tally = tally.add::<u64>(filter_words(self.slots))?.add::<u64>(self.blocks())?;
        Some(tally.add::<Line>(bpe::scratch_len(self.longest)?)?.lines())
    }

    const fn blocks(&self) -> usize {
        (self.tokens as usize).div_ceil(BLOCK)
    }

    /// Lines of arena that [`Measured::load`] needs.
    #[must_use]
    pub const fn lines(&self) -> usize {
        self.lines
    }

    /// As [`Vocab::load`].
    ///
    /// # Errors
    /// As of [`Vocab::load`].
    pub fn load<'a>(&self, arena: &'a mut [Line]) -> Result<Vocab<'a>, VocabError> {
        enough(arena, Some(self.lines))?;
        let mut carver = Carver::new(arena);
        let bytes = carver.take::<u8>(self.bytes)?;
        let offsets = carver.take::<u32>((self.tokens as usize).saturating_add(1))?;
        let table = carver.take::<Slot>(self.slots)?;
        let direct = carver.take::<u32>(DIRECT)?;
        let pairs = carver.take::<u64>(self.slots)?;
        let filter = carver.take::<u64>(filter_words(self.slots))?;
        let blocks = carver.take::<u64>(self.blocks())?;
        let scratch = carver.take::<Line>(bpe::scratch_len(self.longest).ok_or(BufferError::Overflow)?)?;

        // What is for the pairs holds where each token's text is until there are any.
        place(self.file, self.tokens, offsets, pairs)?;
        decode_all(self.file, offsets, pairs, bytes)?;
        let (bytes, offsets): (&'a [u8], &'a [u32]) = (bytes, offsets);
        table.fill(EMPTY);
        direct.fill(NO_RANK);
        for rank in 0..self.tokens {
            insert(bytes, offsets, table, direct, rank)?;
        }
        let (table, direct): (&'a [Slot], &'a [u32]) = (table, direct);
        if let Some(byte) = (0..=255).find(|&byte| direct.get(usize::from(byte)).is_none_or(|&r| r == NO_RANK)) {
            return Err(VocabError::MissingByte { byte });
        }
        pairs.fill(NO_PAIR);
        filter.fill(0);
        let longest = self.longest;
        let vocab = Vocab { bytes, offsets, table, merges: Merges { direct, pairs: &[], filter: &[] }, longest };
        vocab.find_pairs(pairs, filter, blocks, scratch)?;
        Ok(Vocab { merges: Merges { direct, pairs, filter }, ..vocab })
    }
}

impl<'a> Vocab<'a> {
    /// The first look at a file: one pass over its text.
    ///
    /// # Errors
    /// [`VocabError`] if a line is malformed or the whole is too large. What this accepts can still
    /// be refused by [`Measured::load`].
    pub fn measure(file: &[u8]) -> Result<Measured<'_>, VocabError> {
        Measured::new(file)
    }

    /// Lines of arena that [`Vocab::load`] needs for `file`.
    ///
    /// # Errors
    /// As of [`Vocab::measure`].
    pub fn required(file: &[u8]) -> Result<usize, VocabError> {
        Ok(Self::measure(file)?.lines())
    }

    /// Reads `file` into `arena`, of which [`Vocab::required`] lines are used. Who asks for these lines spares
    /// a look at the file by [`Vocab::measure`] and [`Measured::load`].
    ///
    /// # Errors
    /// [`VocabError`] says what the file or the arena lacks, and where.
    ///
    /// **Source.** Spec 5.1, `tiktoken.model`.
    pub fn load(file: &[u8], arena: &'a mut [Line]) -> Result<Self, VocabError> {
        Self::measure(file)?.load(arena)
    }

    /// Fills `pairs` and `filter`; see the module's head.
    fn find_pairs(
        &self,
        pairs: &mut [u64],
        filter: &mut [u64],
        blocks: &mut [u64],
        scratch: &mut [Line],
    ) -> Result<(), VocabError> {
        let direct = self.merges.direct;
        let (mut window, mut short) = (Window::new(), bpe::Short::new());
        self.fill_blocks(blocks);
        for len in 3..=WINDOW.min(self.longest) {
            for (rank, token) in self.tokens_of(len, blocks) {
                window.merge(&Merges { direct, pairs, filter }, token);
                if let Some((left, right)) = window.two() {
                    insert_pair(pairs, filter, left, right, rank)?;
                }
            }
        }
        for (rank, token) in self.tokens().filter(|(_, token)| token.len() > WINDOW) {
            let (mut parts, mut count) = ([NO_RANK; 2], 0usize);
            bpe::merge_by_bytes(self, token, &mut short, scratch, &mut |part| {
                if let Some(place) = parts.get_mut(count) {
                    *place = part;
                }
                count = count.saturating_add(1);
            })?;
            if count == 2 {
                let [left, right] = parts;
                insert_pair(pairs, filter, left, right, rank)?;
            }
        }
        Ok(())
    }

    /// Notes in a word for each [`BLOCK`] of tokens which lengths they have: bit i is i + 1 bytes.
    fn fill_blocks(&self, blocks: &mut [u64]) {
        let ends = self.offsets.get(1..).unwrap_or_default();
        for (block, (from, to)) in blocks.iter_mut().zip(self.offsets.chunks(BLOCK).zip(ends.chunks(BLOCK))) {
            *block = from.iter().zip(to).fold(0, |lengths, (from, to)| {
                let len = to.wrapping_sub(*from);
                lengths | 1u64.checked_shl(len.wrapping_sub(1)).unwrap_or(0)
            });
        }
    }

    /// Tokens of `len` bytes, at most 64, with their ranks. Few lengths have many tokens, so whole blocks are
    /// passed over.
    fn tokens_of(&self, len: usize, blocks: &[u64]) -> impl Iterator<Item = (u32, &'a [u8])> {
        let Self { bytes, offsets, .. } = *self;
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        let lengths = 1u64.checked_shl(len.wrapping_sub(1)).unwrap_or(0);
        let ends = offsets.get(1..).unwrap_or_default();
        let blocks = blocks.iter().zip((0u32..).step_by(BLOCK).zip(offsets.chunks(BLOCK).zip(ends.chunks(BLOCK))));
        blocks.filter(move |(block, _)| **block & lengths != 0).flat_map(move |(_, (first, (from, to)))| {
            let has = |found: u64, (at, (from, to)): (u32, (&u32, &u32))| {
                found | u64::from(to.wrapping_sub(*from) == len).wrapping_shl(at)
            };
            let mut found = (0u32..).zip(from.iter().zip(to)).fold(0, has);
            core::iter::from_fn(move || {
                let at = found.trailing_zeros();
                let (&from, &to) = (from.get(at as usize)?, to.get(at as usize)?);
                found &= found.wrapping_sub(1);
                Some((first.wrapping_add(at), bytes.get(from as usize..to as usize)?))
            })
        })
    }

    /// All tokens with their ranks.
    fn tokens(&self) -> impl Iterator<Item = (u32, &'a [u8])> {
        let Self { bytes, offsets, .. } = *self;
        (0u32..).zip(offsets.windows(2)).filter_map(move |(rank, ends)| match *ends {
            [from, to] => Some((rank, bytes.get(from as usize..to as usize)?)),
            _ => None,
        })
    }

    /// What merging asks.
    #[inline]
    pub(super) const fn merges(&self) -> &Merges<'a> {
        &self.merges
    }

    /// Number of tokens; the ids of the special block start here.
    #[expect(clippy::cast_possible_truncation, reason = "counted as u32 when loaded")]
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.offsets.len().saturating_sub(1) as u32
    }

    /// Whether there are no tokens: never, since all single bytes are tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the longest token.
    #[must_use]
    pub const fn longest(&self) -> usize {
        self.longest
    }

    /// The bytes of the token with this rank.
    #[must_use]
    #[inline]
    pub fn token(&self, rank: u32) -> Option<&'a [u8]> {
        self.bytes.get(range(self.offsets, rank)?)
    }

    /// The rank of the token with exactly these bytes.
    #[must_use]
    #[inline]
    pub fn rank(&self, token: &[u8]) -> Option<u32> {
        if let Some(at) = direct(token) {
            return self.merges.direct.get(at).copied().filter(|&rank| rank != NO_RANK);
        }
        if token.is_empty() || token.len() > self.longest {
            return None;
        }
        match find(self.bytes, self.offsets, self.table, token) {
            Found::Rank(rank) => Some(rank),
            Found::Free(..) | Found::Crowded => None,
        }
    }
}

/// Fills `offsets` from the lengths of the tokens, and `starts` with where their texts are in the file; checks
/// that the ranks are dense.
fn place(file: &[u8], tokens: u32, offsets: &mut [u32], starts: &mut [u64]) -> Result<(), VocabError> {
    // First the length of token r at r + 1; no token has length 0, so 0 means "not seen".
    offsets.fill(0);
    let mut outside = false;
    for entry in entries(file) {
        let Entry { line, offset, bytes, rank, .. } = entry?;
        let lengths = offsets.get_mut(1..).unwrap_or_default();
        match (lengths.get_mut(rank as usize), starts.get_mut(rank as usize)) {
            (Some(length), Some(start)) if *length == 0 => {
                (*length, *start) = (u32::try_from(bytes).unwrap_or(u32::MAX), offset as u64);
            }
            (Some(_), _) => return Err(VocabError::DuplicateRank { line, offset, rank }),
            (None, _) => outside = true,
        }
    }
    if outside {
        // As many lines as ranks, and one of them names another rank: then one rank has no line.
        let rank = (0..tokens).zip(offsets.iter().skip(1)).find(|&(_, &length)| length == 0).map_or(tokens, |x| x.0);
        return Err(VocabError::MissingRank { rank, tokens });
    }
    let mut sum = 0u32;
    for offset in offsets {
        sum = sum.saturating_add(*offset);
        *offset = sum;
    }
    Ok(())
}

/// Decodes the tokens, whose texts begin at `starts`, to their places in `bytes`.
fn decode_all(file: &[u8], offsets: &[u32], starts: &[u64], bytes: &mut [u8]) -> Result<(), VocabError> {
    let mut rest = bytes;
    for (ends, &start) in offsets.windows(2).zip(starts) {
        let len = match *ends {
            [from, to] => to.wrapping_sub(from) as usize,
            _ => 0,
        };
        let decoded = rest.split_at_mut_checked(len).and_then(|(out, behind)| {
            // Padded, every text of so many bytes has one length.
            let text = file.get(usize::try_from(start).ok()?..)?.get(..len.div_ceil(3).checked_mul(4)?)?;
            decode(text, out)?;
            Some(behind)
        });
        match decoded {
            Some(behind) => rest = behind,
            None => return Err(not_base64(file)),
        }
    }
    Ok(())
}

/// The first line whose token is not base64, which there is.
#[cold]
fn not_base64(file: &[u8]) -> VocabError {
    for entry in entries(file) {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return error,
        };
        let (quads, rest) = entry.base64.as_chunks::<4>();
        let (front, last) = quads.split_at_checked(quads.len().saturating_sub(1)).unwrap_or_default();
        let whole = front.iter().all(|quad| decode(quad, &mut [0; 3]).is_some());
        let len = entry.bytes.saturating_sub(front.len().saturating_mul(3));
        let ends = last.iter().all(|quad| [0; 3].get_mut(..len).is_some_and(|out| decode(quad, out).is_some()));
        if !(whole && ends && rest.is_empty()) {
            return entry.fault(LineFault::Base64);
        }
    }
    VocabError::Buffer(BufferError::Overflow)
}

#[inline]
fn range(offsets: &[u32], rank: u32) -> Option<core::ops::Range<usize>> {
    let at = rank as usize;
    match offsets.get(at..at.checked_add(2)?)? {
        &[from, to] => Some(from as usize..to as usize),
        _ => None,
    }
}

enum Found {
    /// The token is there.
    Rank(u32),
    /// It is not; this slot is where it would go, and what is compared there.
    Free(usize, u64),
    /// It is not, and there is no slot for it.
    Crowded,
}

#[expect(clippy::cast_possible_truncation, reason = "the lower half of a slot's second word is the rank")]
#[inline]
fn find(bytes: &[u8], offsets: &[u32], table: &[Slot], token: &[u8]) -> Found {
    let (key, mut at) = key(token);
    let mask = table.len().wrapping_sub(1);
    for _ in 0..PROBES {
        let slot = table.get(at & mask).copied().unwrap_or(EMPTY);
        let [found, word] = slot;
        let rank = word as u32;
        if found == key && word >> 32 == token.len() as u64 {
            if token.len() <= 8 || range(offsets, rank).and_then(|r| bytes.get(r)) == Some(token) {
                return Found::Rank(rank);
            }
        } else if slot == EMPTY {
            return Found::Free(at & mask, key);
        }
        at = at.wrapping_add(1);
    }
    Found::Crowded
}

fn insert(bytes: &[u8], offsets: &[u32], table: &mut [Slot], short: &mut [u32], rank: u32) -> Result<(), VocabError> {
    let token = range(offsets, rank).and_then(|r| bytes.get(r)).unwrap_or_default();
    if let Some(entry) = direct(token).and_then(|at| short.get_mut(at)) {
        return match core::mem::replace(entry, rank) {
            NO_RANK => Ok(()),
            first => Err(VocabError::DuplicateToken { first, second: rank }),
        };
    }
    match find(bytes, offsets, table, token) {
        Found::Rank(first) => return Err(VocabError::DuplicateToken { first, second: rank }),
        Found::Crowded => return Err(VocabError::Crowded { rank }),
        Found::Free(at, key) => {
            if let Some(slot) = table.get_mut(at) {
                *slot = [key, (token.len() as u64) << 32 | u64::from(rank)];
            }
        }
    }
    Ok(())
}

/// Notes that merging makes token `rank` of two others. No pair is noted twice: its bytes are those
/// of one token.
fn insert_pair(pairs: &mut [u64], filter: &mut [u64], left: u32, right: u32, rank: u32) -> Result<(), VocabError> {
    let key = pair_key(left, right);
    let mask = pairs.len().wrapping_sub(1);
    let mut at = pair_place(key);
    let (word, bit) = filter_place(at, filter.len());
    if let Some(word) = filter.get_mut(word) {
        *word |= bit;
    }
    for _ in 0..PROBES {
        match pairs.get_mut(at & mask) {
            Some(slot) if *slot == NO_PAIR => {
                *slot = key << RANK_BITS | u64::from(rank);
                return Ok(());
            }
            _ => at = at.wrapping_add(1),
        }
    }
    Err(VocabError::Crowded { rank })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::format;
    use std::string::String;
    use std::vec::Vec;

    pub(crate) fn base64(bytes: &[u8]) -> String {
        let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut out = String::new();
        for part in bytes.chunks(3) {
            let word = part.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - part.len()));
            for i in 0..4 {
                let c = alphabet[(word >> (18 - 6 * i)) as usize & 63] as char;
                out.push(if i <= part.len() { c } else { '=' });
            }
        }
        out
    }

    /// All single bytes, in falling order, and then `more`.
    pub(crate) fn tokens(more: &[&[u8]]) -> Vec<Vec<u8>> {
        (0..=255u8).rev().map(|b| std::vec![b]).chain(more.iter().map(|t| t.to_vec())).collect()
    }

    pub(crate) fn file(tokens: &[Vec<u8>]) -> String {
        tokens.iter().enumerate().map(|(rank, t)| format!("{} {rank}\n", base64(t))).collect()
    }

    pub(crate) fn load(file: &str, arena: &mut Vec<Line>) -> Result<Vocab<'static>, VocabError> {
        let lines = Vocab::required(file.as_bytes())?;
        // Whatever the memory held must not matter.
        *arena = std::vec![bytemuck::cast([0xa5u8; 64]); lines];
        Vocab::load(file.as_bytes(), core::mem::take(arena).leak())
    }

    fn error(file: &str) -> VocabError {
        load(file, &mut Vec::new()).unwrap_err()
    }

    #[test]
    fn ranks_and_bytes_are_inverse_in_any_order_of_lines() {
        let all = tokens(&[b"ab", b"abc", b"\xff\xfe", b"the quick brown fox", b"eight b.", b"nine byte"]);
        let text = file(&all);
        let mut lines: Vec<&str> = text.lines().collect();
        lines.rotate_left(100);
        let shuffled = String::from("\r\n\n") + &lines.join("\r\n") + "\r\n\r\n";
        for text in [&text, &shuffled, &String::from(text.trim_end())] {
            let vocab = load(text, &mut Vec::new()).unwrap();
            assert_eq!(vocab.len() as usize, all.len());
            assert_eq!(vocab.longest(), 19);
            for (rank, token) in all.iter().enumerate() {
                let rank = u32::try_from(rank).unwrap();
                assert_eq!(vocab.token(rank), Some(&token[..]));
                assert_eq!(vocab.rank(token), Some(rank));
            }
            assert_eq!((vocab.token(vocab.len()), vocab.token(u32::MAX)), (None, None));
            for absent in [&b""[..], b"abcd", b"the quick brown fo", b"the quick brown foxx", b"nine bytf"] {
                assert_eq!(vocab.rank(absent), None);
            }
        }
    }

    #[test]
    fn every_fault_is_named() {
        let good = file(&tokens(&[b"ab"]));
        let end = good.len();
        let fault = |what| VocabError::Line { line: 258, offset: end, what };
        for (line, what) in [
            ("YWJj", LineFault::NoSpace),
            ("YWJj\t257", LineFault::NoSpace),
            ("YWJ 257", LineFault::Base64),
            ("YW=j 257", LineFault::Base64),
            ("YWJ= YQ== 257", LineFault::Rank),
            ("Y=== 257", LineFault::Base64),
            ("==== 257", LineFault::Base64),
            ("YR== 257", LineFault::Base64),
            ("YWJjYQ==YWJj 257", LineFault::Base64),
            ("YW-_ 257", LineFault::Base64),
            ("YW\u{e9} 257", LineFault::Base64),
            (" 257", LineFault::EmptyToken),
            ("YWJj ", LineFault::Rank),
            ("YWJj +257", LineFault::Rank),
            ("YWJj 4294967296", LineFault::Rank),
            ("YWJj  257", LineFault::Rank),
            ("YWJj 257 ", LineFault::Rank),
        ] {
            assert_eq!(error(&format!("{good}{line}\n")), fault(what), "{line:?}");
        }
        assert_eq!(error(""), VocabError::MissingByte { byte: 0 });
        assert_eq!(error(&format!("{good}YWJj 7\n")), VocabError::DuplicateRank { line: 258, offset: end, rank: 7 });
        assert_eq!(error(&format!("{good}YWJj 258\n")), VocabError::MissingRank { rank: 257, tokens: 258 });
        assert_eq!(error(&format!("{good}YWJj 4294967295\n")), VocabError::MissingRank { rank: 257, tokens: 258 });
        assert_eq!(error(&format!("{good}YWI= 257\n")), VocabError::DuplicateToken { first: 256, second: 257 });
        let mut all = tokens(&[]);
        all[255 - 0x41] = b"AA".to_vec();
        assert_eq!(error(&file(&all)), VocabError::MissingByte { byte: 0x41 });
        let needed = Vocab::required(good.as_bytes()).unwrap();
        for given in [0, 1, needed / 2, needed - 1] {
            let error = Vocab::load(good.as_bytes(), &mut std::vec![Line::ZERO; given]).unwrap_err();
            assert_eq!(error, VocabError::Buffer(BufferError::TooSmall { needed, given }));
        }
        assert!(format!("{}", error(&format!("{good}YWJj 258\n"))).contains("257"));
    }

    /// Lines read the short way and the long way are the same, whatever is in them.
    #[test]
    fn plain_lines_are_read_as_all_are() {
        /// Line, offset, base64, rank.
        type Read<'f> = Result<(usize, usize, &'f [u8], u32), VocabError>;
        fn long_way(file: &[u8]) -> Vec<Read<'_>> {
            let mut offset = 0;
            let lines = file.split(|&b| b == b'\n').zip(1..).map(|(text, line)| {
                let start = offset;
                offset += text.len() + 1;
                (line, start, text.strip_suffix(b"\r").unwrap_or(text))
            });
            let lines = lines.filter(|(_, _, text)| !text.is_empty()).map(|(line, offset, text)| {
                let halves = text.iter().position(|&b| b == b' ').map(|at| (&text[..at], &text[at + 1..]));
                let found = halves.ok_or(LineFault::NoSpace).and_then(|(base64, rank)| {
                    match decoded_len(base64) {
                        None => return Err(LineFault::Base64),
                        Some(0) => return Err(LineFault::EmptyToken),
                        Some(_) => {}
                    }
                    Ok((line, offset, base64, decimal(rank).ok_or(LineFault::Rank)?))
                });
                found.map_err(|what| VocabError::Line { line, offset, what })
            });
            lines.collect()
        }
        let good = "YQ== 0\nYWJjZGVmZ2hp 123456789\r\nYWJj 4294967295\n\nYWI= 7";
        let odd = [" ", "\n", "\r", "\r\n", "=", "\t", "\0", "\u{e9}", "0", "-", "99999999999", "YWJj"];
        let mut seed = 1u64;
        for _ in 0..20_000 {
            let mut file = good.as_bytes().to_vec();
            for _ in 0..3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let pick = |n: usize, shift: u32| usize::try_from(seed >> shift & 0xffff).unwrap() % n;
                let at = pick(file.len() + 1, 20);
                let end = (at + pick(3, 50)).min(file.len());
                file.splice(at..end, odd[pick(odd.len(), 33)].bytes());
            }
            let found: Vec<_> = entries(&file).map(|e| e.map(|e| (e.line, e.offset, e.base64, e.rank))).collect();
            // The first fault ends a reader; what the lines behind it say does not matter, and is the same.
            assert_eq!(found, long_way(&file), "{}", file.escape_ascii());
        }
    }

    /// Tokens are decoded in the order of their ranks, and lines refused in that of the file.
    #[test]
    fn of_several_faults_the_first_line_is_named() {
        let good = file(&tokens(&[]));
        for (first, second) in [("YW-_ 257", "YR== 256"), ("YR== 257", "YWJjYQ==YWJj 256"), ("YW=j 257", "Y=== 256")] {
            let text = format!("{good}{first}\n{second}\n");
            let expected = VocabError::Line { line: 257, offset: good.len(), what: LineFault::Base64 };
            assert_eq!(error(&text), expected, "{first} {second}");
        }
        let text = format!("{good}YWJj 257\nYWJj\u{e9}A== 256\n");
        assert!(matches!(error(&text), VocabError::Line { line: 258, what: LineFault::Base64, .. }));
    }

    #[test]
    fn a_truncated_file_is_refused_at_every_length() {
        let good = file(&tokens(&[]));
        for cut in 0..good.len() - 1 {
            assert!(load(&good[..cut], &mut Vec::new()).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn probe_walks_are_short() {
        // Counters, the least random keys there are, at the released vocabulary's size: five of eight
        // slots are taken.
        let all: Vec<Vec<u8>> = (0..163_584u32).map(|i| (i + 0x6161_6161).to_le_bytes().to_vec()).collect();
        let mut table = std::vec![EMPTY; slots(163_584).unwrap()];
        let bytes = all.concat();
        let offsets: Vec<u32> = (0..=163_584).map(|i| i * 4).collect();
        for rank in 0..163_584 {
            insert(&bytes, &offsets, &mut table, &mut [], rank).unwrap();
        }
        let walk = table.split(|&s| s == EMPTY).map(<[Slot]>::len).max().unwrap();
        assert!(walk < 100, "longest walk {walk}");
    }
}
