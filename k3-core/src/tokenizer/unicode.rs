//! What the pre-tokeniser asks about a character, as one byte of flags.
//!
//! The tables are those of Unicode 16.0, the version the reference's regular expressions are built
//! with; the two table crates are pinned for that reason and `versions_are_pinned` holds them to it.
//! A character that a later Unicode assigns is unassigned here, as it is there.

use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};
use unicode_script::{Script, UnicodeScript};

/// Flags of one character. A set bit says that the character belongs to the class.
pub(super) type Class = u8;

/// Script=Han. Includes letters, but also numbers (U+3007), marks (U+16FF0) and symbols (radicals).
pub(super) const HAN: Class = 1;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`: what may stand in the upper-case part of a word.
pub(super) const UPPER: Class = 2;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`: what may stand in the lower-case part of a word.
pub(super) const LOWER: Class = 4;
/// `\p{L}`.
pub(super) const LETTER: Class = 8;
/// `\p{N}`.
pub(super) const NUMBER: Class = 16;
/// `\s`, the property White_Space.
pub(super) const SPACE: Class = 32;
/// `[\r\n]`.
pub(super) const NEWLINE: Class = 64;

static ASCII: [Class; 128] = {
    let mut table = [0; 128];
    let mut byte = 0u8;
    while byte < 128 {
        #[expect(clippy::indexing_slicing, reason = "byte < 128, at compile time")]
        {
            table[byte as usize] = match byte {
                b'A'..=b'Z' => UPPER | LETTER,
                b'a'..=b'z' => LOWER | LETTER,
                b'0'..=b'9' => NUMBER,
                b'\r' | b'\n' => SPACE | NEWLINE,
                b' ' | b'\t' | 0x0b | 0x0c => SPACE,
                _ => 0,
            };
        }
        byte = byte.wrapping_add(1);
    }
    table
};

/// The flags of an ASCII byte; `None` for other bytes.
#[inline]
pub(super) fn of_ascii(byte: u8) -> Option<Class> {
    ASCII.get(usize::from(byte)).copied()
}

/// The flags of `c`. The large uniform blocks are answered without a search.
pub(super) fn of(c: char) -> Class {
    match c {
        '\0'..='\x7f' => u8::try_from(c).ok().and_then(of_ascii).unwrap_or(0),
        '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' => HAN | LETTER,
        '\u{ac00}'..='\u{d7a3}' => UPPER | LOWER | LETTER,
        _ => searched(c),
    }
}

/// The flags of `c` from the tables alone.
fn searched(c: char) -> Class {
    use GeneralCategory as G;
    let class = match c.general_category() {
        G::UppercaseLetter | G::TitlecaseLetter => UPPER | LETTER,
        G::LowercaseLetter => LOWER | LETTER,
        G::ModifierLetter | G::OtherLetter => UPPER | LOWER | LETTER,
        G::NonspacingMark | G::SpacingMark | G::EnclosingMark => UPPER | LOWER,
        G::DecimalNumber | G::LetterNumber | G::OtherNumber => NUMBER,
        G::SpaceSeparator | G::LineSeparator | G::ParagraphSeparator => SPACE,
        G::Control => match c {
            '\r' | '\n' => SPACE | NEWLINE,
            '\t' | '\x0b' | '\x0c' | '\u{85}' => SPACE,
            _ => 0,
        },
        _ => 0,
    };
    // The first Han character is the radical U+2E80: most alphabets need only one search.
    if c >= '\u{2e80}' && c.script() == Script::Han { class & !(UPPER | LOWER) | HAN } else { class }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every character; every 41st where the processor is probably emulated and all take minutes.
    fn characters() -> impl Iterator<Item = char> {
        ('\0'..=char::MAX).step_by(if cfg!(target_arch = "x86_64") { 1 } else { 41 })
    }

    #[test]
    fn versions_are_pinned() {
        assert_eq!(unicode_properties::UNICODE_VERSION, (16, 0, 0));
        assert_eq!(unicode_script::UNICODE_VERSION, (16, 0, 0));
    }

    #[test]
    fn shortcuts_agree_with_the_tables() {
        for c in characters() {
            assert_eq!(of(c), searched(c), "U+{:04X}", u32::from(c));
        }
    }

    #[test]
    fn han_begins_where_the_search_does() {
        assert!(('\0'..'\u{2e80}').all(|c| c.script() != Script::Han));
        assert_eq!(of('\u{2e80}'), HAN);
        assert_eq!(of('\u{3007}'), HAN | NUMBER);
        assert_eq!(of('\u{3005}'), HAN | LETTER);
        assert_eq!(of('\u{16ff0}'), HAN);
    }

    #[test]
    fn white_space_is_the_property() {
        // `char::is_whitespace` is defined as White_Space, a set that has been closed for years.
        for c in characters() {
            assert_eq!(of(c) & SPACE != 0, c.is_whitespace(), "U+{:04X}", u32::from(c));
        }
    }
}
