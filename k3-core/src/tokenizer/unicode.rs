//! What the pre-tokeniser asks about a character, as one byte of flags.
//!
//! A table of pages of 128 characters, equal pages kept once, which the build script makes of
//! Unicode's own tables (see `by_tables`): two reads, whatever the script.

#[cfg(test)]
mod by_tables;
mod classes;

pub(super) use classes::{Class, HAN, LETTER, LOWER, NEWLINE, NUMBER, SPACE, UPPER};

include!(concat!(env!("OUT_DIR"), "/classes.rs"));

/// The flags of an ASCII byte; `None` for other bytes.
#[inline(always)]
pub(super) fn of_ascii(byte: u8) -> Option<Class> {
    // ASCII is the first page.
    let [page, ..] = &PAGES;
    page.get(usize::from(byte)).copied()
}

/// The flags of `c`.
#[inline]
pub(super) fn of(c: char) -> Class {
    let (page, place) = ((c as usize).wrapping_shr(7), c as usize & 127);
    let page = INDEX.get(page).and_then(|&page| PAGES.get(usize::from(page)));
    page.and_then(|page| page.get(place)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use unicode_script::{Script, UnicodeScript as _};

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
    fn the_table_is_that_of_unicode() {
        for c in characters() {
            assert_eq!(of(c), by_tables::of(c), "U+{:04X}", u32::from(c));
        }
        for byte in 0..=255 {
            assert_eq!(of_ascii(byte), byte.is_ascii().then(|| of(char::from(byte))));
        }
    }

    #[test]
    fn han_is_more_than_letters() {
        assert!(('\0'..'\u{2e80}').all(|c| of(c) & HAN == 0 && c.script() != Script::Han));
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
