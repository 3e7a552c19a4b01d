//! How the classes follow from Unicode's tables. Compiled into the build script, which makes one table
//! of them, and into the tests, which compare the two.
//!
//! The tables are those of Unicode 16.0, the version the reference's regular expressions are built
//! with; the two table crates are pinned for that reason and `versions_are_pinned` holds them to it.
//! A character that a later Unicode assigns is unassigned here, as it is there.

use super::classes::{Class, HAN, LETTER, LOWER, NEWLINE, NUMBER, SPACE, UPPER};

/// The flags of `c`.
pub(crate) fn of(c: char) -> Class {
    use unicode_properties::{GeneralCategory as G, UnicodeGeneralCategory as _};
    use unicode_script::{Script, UnicodeScript as _};
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
    if c.script() == Script::Han { class & !(UPPER | LOWER) | HAN } else { class }
}
