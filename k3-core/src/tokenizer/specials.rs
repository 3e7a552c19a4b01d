//! The control ids: the block of 256 ids above the last rank (spec 5.1).
//!
//! What an id of the block means follows from its *distance* from the block's base, so a small
//! fixture and the released model agree. What it is spelled follows from the released names, from
//! what `tokenizer_config.json` says on top of them, and else is `<|reserved_token_{id}|>`.
//!
//! A spelling inside a text is ordinary text. Only [`Specials::find`], which the caller asks for
//! knowingly, reads it as the id.

use crate::view::TokenId;

/// Control ids above the last rank of a vocabulary, named or not.
pub const BLOCK: u32 = 256;

/// A control id by its distance from the base of the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Control(u8);

impl Control {
    /// `[BOS]`. Never prepended by anything here.
    pub const BOS: Self = Self(0);
    /// `[EOS]`, which ends a text; a chat turn ends with [`Control::END_OF_MSG`].
    pub const EOS: Self = Self(1);
    /// `<|end_of_msg|>`, the end of a message.
    pub const END_OF_MSG: Self = Self(2);
    /// `<|open|>`, the begin of an opening tag.
    pub const OPEN: Self = Self(3);
    /// `<|close|>`, the begin of a closing tag.
    pub const CLOSE: Self = Self(4);
    /// `<|sep|>`, the end of a tag.
    pub const SEP: Self = Self(5);
    /// `[start_header_id]`.
    pub const START_HEADER: Self = Self(6);
    /// `[end_header_id]`.
    pub const END_HEADER: Self = Self(7);
    /// `[EOT]`.
    pub const EOT: Self = Self(9);
    /// `<|media_begin|>`.
    pub const MEDIA_BEGIN: Self = Self(18);
    /// `<|media_content|>`.
    pub const MEDIA_CONTENT: Self = Self(19);
    /// `<|media_end|>`.
    pub const MEDIA_END: Self = Self(20);
    /// `<|media_pad|>`, the place of an image.
    pub const MEDIA_PAD: Self = Self(21);
    /// `<osagent_mode>`.
    pub const OSAGENT_MODE: Self = Self(65);
    /// `[UNK]`. No encoding ever yields it: every byte is a token.
    pub const UNK: Self = Self(254);
    /// `[PAD]`.
    pub const PAD: Self = Self(255);

    /// The control id at this distance from the base.
    #[must_use]
    pub const fn at(distance: u8) -> Self {
        Self(distance)
    }

    /// The distance from the base.
    #[must_use]
    pub const fn distance(self) -> u8 {
        self.0
    }

    /// The name in the release, if it has one.
    #[must_use]
    pub const fn released_name(self) -> Option<&'static str> {
        Some(match self {
            Self::BOS => "[BOS]",
            Self::EOS => "[EOS]",
            Self::END_OF_MSG => "<|end_of_msg|>",
            Self::OPEN => "<|open|>",
            Self::CLOSE => "<|close|>",
            Self::SEP => "<|sep|>",
            Self::START_HEADER => "[start_header_id]",
            Self::END_HEADER => "[end_header_id]",
            Self::EOT => "[EOT]",
            Self::MEDIA_BEGIN => "<|media_begin|>",
            Self::MEDIA_CONTENT => "<|media_content|>",
            Self::MEDIA_END => "<|media_end|>",
            Self::MEDIA_PAD => "<|media_pad|>",
            Self::OSAGENT_MODE => "<osagent_mode>",
            Self::UNK => "[UNK]",
            Self::PAD => "[PAD]",
            _ => return None,
        })
    }
}

/// Bytes that the name of a control id may have. Looking for names in a text costs this much a byte at worst.
pub const NAME_MAX: usize = 255;

const RESERVED_HEAD: &str = "<|reserved_token_";
const RESERVED_TAIL: &str = "|>";

/// Why a name is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpecialError {
    /// The id is outside the block.
    Outside {
        /// The id.
        id: TokenId,
        /// First id of the block.
        base: u32,
    },
    /// The name is empty: it would be found everywhere.
    Empty {
        /// The id.
        id: TokenId,
    },
    /// The name has more than [`NAME_MAX`] bytes.
    Long {
        /// The id.
        id: TokenId,
        /// Bytes of the name.
        len: usize,
    },
    /// Two ids have the same spelling.
    Same {
        /// The lower id.
        first: TokenId,
        /// The higher id.
        second: TokenId,
    },
    /// The arena for names is used up. As many bytes as the config file has always suffice.
    Full {
        /// Bytes that all names so far need, with this one.
        needed: usize,
        /// Bytes in the arena.
        given: usize,
    },
}

impl core::fmt::Display for SpecialError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::Outside { id, base } => {
                write!(f, "id {} is outside the special block {base}..{}", id.0, base.saturating_add(BLOCK))
            }
            Self::Empty { id } => write!(f, "id {} has an empty name", id.0),
            Self::Long { id, len } => write!(f, "id {} has a name of {len} bytes, more than {NAME_MAX}", id.0),
            Self::Same { first, second } => write!(f, "ids {} and {} have the same name", first.0, second.0),
            Self::Full { needed, given } => write!(f, "the names need {needed} bytes, the buffer has {given}"),
        }
    }
}

impl core::error::Error for SpecialError {}

/// How a control id is spelled: three parts to be written one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Spelling<'a> {
    head: &'a str,
    digits: [u8; 10],
    /// Where the digits start.
    from: usize,
    tail: &'a str,
}

impl<'a> Spelling<'a> {
    const fn named(name: &'a str) -> Self {
        Self { head: name, digits: [b'0'; 10], from: 10, tail: "" }
    }

    fn reserved(id: u32) -> Self {
        let (mut digits, mut from, mut rest) = ([b'0'; 10], 10usize, id);
        for (at, digit) in digits.iter_mut().enumerate().rev() {
            *digit = b'0'.wrapping_add(u8::try_from(rest % 10).unwrap_or(0));
            rest /= 10;
            from = at;
            if rest == 0 {
                break;
            }
        }
        Self { head: RESERVED_HEAD, digits, from, tail: RESERVED_TAIL }
    }

    /// The parts as bytes; some may be empty.
    #[must_use]
    pub fn parts(&self) -> [&[u8]; 3] {
        [self.head.as_bytes(), self.digits.get(self.from..).unwrap_or_default(), self.tail.as_bytes()]
    }

    fn is_start_of(&self, text: &[u8]) -> Option<usize> {
        let rest = self.parts().iter().try_fold(text, |text, part| text.strip_prefix(*part))?;
        text.len().checked_sub(rest.len())
    }
}

impl core::fmt::Display for Spelling<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.parts().iter().try_for_each(|part| f.write_str(core::str::from_utf8(part).unwrap_or_default()))
    }
}

/// A control spelling in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occurrence {
    /// Where it starts, in bytes.
    pub at: usize,
    /// Its length in bytes.
    pub len: usize,
    /// The id it spells.
    pub id: TokenId,
}

/// The special block of one vocabulary and the names of its ids.
#[derive(Debug)]
pub struct Specials<'a> {
    base: u32,
    arena: &'a mut [u8],
    used: usize,
    /// Where in the arena the name at a distance lies; length 0: not renamed.
    renamed: [(u32, u32); BLOCK as usize],
    /// The distances that have a name, released or given: the first `count` of these.
    named: [u8; BLOCK as usize],
    count: usize,
    /// The bytes that some spelling starts with.
    first: [bool; 256],
}

impl<'a> Specials<'a> {
    /// The block above `base` ranks ([`Vocab::len`](super::Vocab::len)) with the released names.
    /// `arena` will hold the names that differ from those; it may be empty if none will be set.
    #[must_use]
    pub fn new(base: u32, arena: &'a mut [u8]) -> Self {
        let mut specials =
            Self { base, arena, used: 0, renamed: [(0, 0); 256], named: [0; 256], count: 0, first: [false; 256] };
        for distance in 0..=255 {
            if let Some(name) = Control(distance).released_name() {
                specials.list(distance, name.as_bytes());
            }
        }
        specials.starts(RESERVED_HEAD.as_bytes());
        specials
    }

    /// First id of the block: the number of ranks.
    #[must_use]
    pub const fn base(&self) -> u32 {
        self.base
    }

    /// Ids of vocabulary and block together: the config's `vocab_size`, if the two belong together. It is the
    /// caller's to compare them.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.base.saturating_add(BLOCK)
    }

    /// The id of a control.
    #[must_use]
    pub const fn id(&self, control: Control) -> TokenId {
        TokenId(self.base.saturating_add(control.0 as u32))
    }

    /// Which control an id is; `None` if it is outside the block.
    #[must_use]
    pub fn control(&self, id: TokenId) -> Option<Control> {
        u8::try_from(id.0.checked_sub(self.base)?).ok().map(Control)
    }

    /// Whether generation ends with this id: [`Control::END_OF_MSG`] and [`Control::EOS`].
    #[must_use]
    pub fn is_stop(&self, id: TokenId) -> bool {
        matches!(self.control(id), Some(Control::END_OF_MSG | Control::EOS))
    }

    /// Names an id, as an entry of `added_tokens_decoder` does. A second name replaces the first.
    /// Call [`Specials::check`] after the last one.
    ///
    /// # Errors
    /// [`SpecialError`] if the id is not of the block, the name is empty or too long, or the arena
    /// is full.
    pub fn set_name(&mut self, id: TokenId, name: &str) -> Result<(), SpecialError> {
        let Some(Control(distance)) = self.control(id) else {
            return Err(SpecialError::Outside { id, base: self.base });
        };
        if name.is_empty() {
            return Err(SpecialError::Empty { id });
        }
        if name.len() > NAME_MAX {
            return Err(SpecialError::Long { id, len: name.len() });
        }
        // What it is called already needs no room; that is the rule for a released config.
        if self.spelling(id).is_some_and(|s| s.is_start_of(name.as_bytes()) == Some(name.len())) {
            return Ok(());
        }
        let needed = self.used.saturating_add(name.len());
        let full = SpecialError::Full { needed, given: self.arena.len() };
        // By length and not by range, so that the compiler sees that the copy fits.
        let place = self.arena.get_mut(self.used..).and_then(|rest| rest.get_mut(..name.len())).ok_or(full)?;
        place.copy_from_slice(name.as_bytes());
        let at = u32::try_from(self.used).map_err(|_| full)?;
        let len = u32::try_from(name.len()).map_err(|_| full)?;
        if let Some(entry) = self.renamed.get_mut(usize::from(distance)) {
            *entry = (at, len);
        }
        self.used = needed;
        self.list(distance, name.as_bytes());
        Ok(())
    }

    /// Checks that no two ids have the same spelling.
    ///
    /// # Errors
    /// [`SpecialError::Same`] with the lowest such pair.
    pub fn check(&self) -> Result<(), SpecialError> {
        for low in self.base..self.end() {
            let Some(a) = self.spelling(TokenId(low)) else { continue };
            for high in low.saturating_add(1)..self.end() {
                let same = self
                    .spelling(TokenId(high))
                    .is_some_and(|b| a.parts().iter().copied().flatten().eq(b.parts().iter().copied().flatten()));
                if same {
                    return Err(SpecialError::Same { first: TokenId(low), second: TokenId(high) });
                }
            }
        }
        Ok(())
    }

    /// How an id of the block is spelled; `None` for other ids.
    #[must_use]
    pub fn spelling(&self, id: TokenId) -> Option<Spelling<'_>> {
        let control = self.control(id)?;
        Some(self.name(control).map_or_else(|| Spelling::reserved(id.0), Spelling::named))
    }

    /// The spelling that `text` starts with, and its length in bytes: the longest one.
    #[must_use]
    pub fn find_at(&self, text: &[u8]) -> Option<(TokenId, usize)> {
        let mut best = self.reserved_at(text);
        for &distance in self.named.get(..self.count).unwrap_or_default() {
            let control = Control(distance);
            let Some(name) = self.name(control) else { continue };
            if text.starts_with(name.as_bytes()) && best.is_none_or(|(_, len)| len < name.len()) {
                best = Some((self.id(control), name.len()));
            }
        }
        best
    }

    /// The first spelling in `text`. Time is linear in what lies before it.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Occurrence> {
        let starts = |b: &u8| self.first.get(usize::from(*b)).copied().unwrap_or(false);
        text.iter().enumerate().filter(|(_, b)| starts(b)).find_map(|(at, _)| {
            let (id, len) = self.find_at(text.get(at..)?)?;
            Some(Occurrence { at, len, id })
        })
    }

    /// A reserved spelling at the front of `text`, if that id has no other name.
    fn reserved_at(&self, text: &[u8]) -> Option<(TokenId, usize)> {
        let digits = text.strip_prefix(RESERVED_HEAD.as_bytes())?;
        let mut id = 0u32;
        for digit in digits.iter().take_while(|b| b.is_ascii_digit()) {
            id = id.checked_mul(10)?.checked_add(u32::from(digit.wrapping_sub(b'0')))?;
        }
        let id = TokenId(id);
        if self.name(self.control(id)?).is_some() {
            return None;
        }
        // Comparing with the spelling refuses leading zeros and a missing end.
        Some((id, Spelling::reserved(id.0).is_start_of(text)?))
    }

    fn name(&self, control: Control) -> Option<&str> {
        match self.renamed.get(usize::from(control.0)) {
            Some(&(at, len)) if len > 0 => {
                let bytes = self.arena.get(at as usize..(at as usize).saturating_add(len as usize))?;
                core::str::from_utf8(bytes).ok()
            }
            _ => control.released_name(),
        }
    }

    fn list(&mut self, distance: u8, name: &[u8]) {
        if !self.named.get(..self.count).unwrap_or_default().contains(&distance)
            && let Some(entry) = self.named.get_mut(self.count)
        {
            *entry = distance;
            self.count = self.count.saturating_add(1);
        }
        self.starts(name);
    }

    fn starts(&mut self, name: &[u8]) {
        if let Some(entry) = name.first().and_then(|&b| self.first.get_mut(usize::from(b))) {
            *entry = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::string::{String, ToString};

    #[test]
    fn released_ids_have_their_names() {
        let specials = Specials::new(163_584, &mut []);
        for (id, name) in [
            (163_584, "[BOS]"),
            (163_585, "[EOS]"),
            (163_586, "<|end_of_msg|>"),
            (163_587, "<|open|>"),
            (163_588, "<|close|>"),
            (163_589, "<|sep|>"),
            (163_590, "[start_header_id]"),
            (163_591, "[end_header_id]"),
            (163_592, "<|reserved_token_163592|>"),
            (163_593, "[EOT]"),
            (163_602, "<|media_begin|>"),
            (163_603, "<|media_content|>"),
            (163_604, "<|media_end|>"),
            (163_605, "<|media_pad|>"),
            (163_649, "<osagent_mode>"),
            (163_837, "<|reserved_token_163837|>"),
            (163_838, "[UNK]"),
            (163_839, "[PAD]"),
        ] {
            let id = TokenId(id);
            assert_eq!(specials.spelling(id).unwrap().to_string(), name);
            assert_eq!(specials.find_at((String::from(name) + "|>").as_bytes()), Some((id, name.len())));
        }
        assert!(specials.spelling(TokenId(163_583)).is_none() && specials.spelling(TokenId(163_840)).is_none());
        assert_eq!((specials.check(), specials.end()), (Ok(()), 163_840));
        assert!(specials.is_stop(TokenId(163_585)) && specials.is_stop(TokenId(163_586)));
        assert!(!specials.is_stop(TokenId(163_584)) && !specials.is_stop(TokenId(2)));
    }

    #[test]
    fn names_can_be_given() {
        let mut arena = [0; 24];
        let mut specials = Specials::new(300, &mut arena);
        specials.set_name(TokenId(300), "[BOS]").unwrap();
        specials.set_name(TokenId(308), "<|reserved_token_308|>").unwrap();
        assert_eq!(specials.used, 0, "a name that an id has already costs nothing");
        specials.set_name(TokenId(308), "<|open|>x").unwrap();
        specials.set_name(TokenId(301), "\u{e9}").unwrap();
        assert_eq!(specials.find_at(b"<|open|>xy"), Some((TokenId(308), 9)));
        assert_eq!(specials.find_at(b"<|open|>y"), Some((TokenId(303), 8)));
        assert_eq!(specials.find_at(b"<|reserved_token_308|>"), None);
        assert_eq!(specials.find_at(b"[EOS]"), None);
        assert_eq!(specials.find("a\u{e9}".as_bytes()), Some(Occurrence { at: 1, len: 2, id: TokenId(301) }));
        assert_eq!(specials.check(), Ok(()));
        specials.set_name(TokenId(400), "[PAD]").unwrap();
        assert_eq!(specials.check(), Err(SpecialError::Same { first: TokenId(400), second: TokenId(555) }));
        specials.set_name(TokenId(555), "[END]").unwrap();
        assert_eq!(specials.check(), Ok(()));
        let err = specials.set_name(TokenId(302), "abcd").unwrap_err();
        assert_eq!(err, SpecialError::Full { needed: 25, given: 24 });
        assert_eq!(specials.spelling(TokenId(302)).unwrap().to_string(), "<|end_of_msg|>");
        assert_eq!(specials.set_name(TokenId(302), ""), Err(SpecialError::Empty { id: TokenId(302) }));
        let long = "x".repeat(256);
        assert_eq!(specials.set_name(TokenId(302), &long), Err(SpecialError::Long { id: TokenId(302), len: 256 }));
        for id in [0, 299, 556, u32::MAX] {
            let id = TokenId(id);
            assert_eq!(specials.set_name(id, "x"), Err(SpecialError::Outside { id, base: 300 }));
        }
    }

    #[test]
    fn reserved_spellings_are_exact() {
        let specials = Specials::new(384, &mut []);
        for no in ["0392", "392", "392|", "391|>", "640|>", "383|>", "99999999999|>", "|>", " 392|>"] {
            assert_eq!(specials.find_at(format!("<|reserved_token_{no}").as_bytes()), None, "{no}");
        }
        let text = format!("{}<|reserved_token_392|>", "<|<[".repeat(1000));
        assert_eq!(specials.find(text.as_bytes()), Some(Occurrence { at: 4000, len: 22, id: TokenId(392) }));
        assert_eq!(specials.find(b"<|<[<|reserved_token_"), None);
    }
}
