//! The classes of characters that the pre-tokeniser tells apart. Compiled into the build script, too.

/// Flags of one character. A set bit says that the character belongs to the class.
pub(crate) type Class = u8;

/// Script=Han. Includes letters, but also numbers (U+3007), marks (U+16FF0) and symbols (radicals).
pub(crate) const HAN: Class = 1;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`: what may stand in the upper-case part of a word.
pub(crate) const UPPER: Class = 2;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]`: what may stand in the lower-case part of a word.
pub(crate) const LOWER: Class = 4;
/// `\p{L}`.
pub(crate) const LETTER: Class = 8;
/// `\p{N}`.
pub(crate) const NUMBER: Class = 16;
/// `\s`, the property White_Space.
pub(crate) const SPACE: Class = 32;
/// `[\r\n]`.
pub(crate) const NEWLINE: Class = 64;
