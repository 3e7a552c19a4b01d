//! Sizes as people write them.
//!
//! `K`, `M`, `G` and `T`, with or without a `B`, are powers of 1000; `KiB`, `MiB`, `GiB` and `TiB` are
//! powers of 1024. Case does not matter. All arithmetic is on integers, so `1.5G` is exactly
//! 1,500,000,000 bytes.

/// Why a text is not a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeFault {
    /// It does not start with a decimal number.
    Number,
    /// What follows the number is no unit of size.
    Unit,
    /// A number of bytes with a fraction, so a unit was probably forgotten.
    Fraction,
    /// It is 2^64 bytes or more.
    TooLarge,
}

/// A text that was meant as a size and is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeError {
    /// The text as it was given.
    pub text: String,
    /// What is wrong with it.
    pub fault: SizeFault,
}

impl std::fmt::Display for SizeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let what = match self.fault {
            SizeFault::Number => "does not start with a number, as 2GB or 1.5GiB do",
            SizeFault::Unit => "has an unknown unit: K, M, G, T, their B and iB forms, or none for bytes",
            SizeFault::Fraction => "is not a whole number of bytes and has no unit",
            SizeFault::TooLarge => "does not fit 64 bits",
        };
        write!(f, "the size {:?} {what}", self.text)
    }
}

impl std::error::Error for SizeError {}

/// Reads a size in bytes. A fraction of a byte that a unit leaves over is dropped, so the result is
/// never more than what was written.
///
/// ```
/// use k3_platform::units::parse;
/// assert_eq!(parse("2G"), Ok(2_000_000_000));
/// assert_eq!(parse("1.5 GiB"), Ok(3 << 29));
/// assert!(parse("much").is_err());
/// ```
///
/// # Errors
/// [`SizeError`] with the text and what is wrong with it.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    parse_parts(text.trim()).map_err(|fault| SizeError { text: text.to_owned(), fault })
}

fn parse_parts(text: &str) -> Result<u64, SizeFault> {
    let (whole, rest) = digits(text);
    let (fraction, unit) = match rest.strip_prefix('.') {
        Some(rest) => digits(rest),
        None => ("0", rest),
    };
    if whole.is_empty() || fraction.is_empty() {
        return Err(SizeFault::Number);
    }
    let unit = unit.trim_start();
    let scale = scale(unit).ok_or(SizeFault::Unit)?;
    let fraction = fraction.trim_end_matches('0');
    if scale == 1 && !fraction.is_empty() {
        return Err(SizeFault::Fraction);
    }
    // Twelve digits after the point resolve one byte of a terabyte; those after them only round down.
    let mut sum = whole.parse::<u64>().ok().and_then(|n| n.checked_mul(scale)).ok_or(SizeFault::TooLarge)?;
    let (mut part, mut power) = (0_u128, 1_u128);
    for digit in fraction.bytes().take(15) {
        part = part * 10 + u128::from(digit - b'0');
        power *= 10;
    }
    let part = u64::try_from(part * u128::from(scale) / power).map_err(|_| SizeFault::TooLarge)?;
    sum = sum.checked_add(part).ok_or(SizeFault::TooLarge)?;
    Ok(sum)
}

/// The leading decimal digits of a text, and the rest.
fn digits(text: &str) -> (&str, &str) {
    text.split_at(text.bytes().take_while(u8::is_ascii_digit).count())
}

/// Bytes in a unit.
fn scale(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if unit.is_empty() || unit == "b" {
        return Some(1);
    }
    let mut letters = unit.chars();
    let power = 1 + "kmgt".find(letters.next()?)?;
    let base: u64 = match letters.as_str() {
        "" | "b" => 1000,
        "ib" => 1024,
        _ => return None,
    };
    base.checked_pow(u32::try_from(power).ok()?)
}

/// Bytes for people: three digits or more with two after the point, decimal units.
///
/// ```
/// assert_eq!(k3_platform::units::human(2_000_000_000), "2.00 GB");
/// ```
#[must_use]
pub fn human(bytes: u64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut unit = 1_u128;
    let mut text = String::new();
    for name in ["kB", "MB", "GB", "TB", "PB", "EB"] {
        unit *= 1000;
        let hundredths = (u128::from(bytes) * 100 + unit / 2) / unit;
        text = format!("{}.{:02} {name}", hundredths / 100, hundredths % 100);
        // Chosen after rounding: 999,999 bytes are 1.00 MB and not 1000.00 kB.
        if hundredths < 100_000 {
            break;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_exact() {
        for (text, bytes) in [
            ("0", 0),
            ("123", 123),
            ("100B", 100),
            ("2G", 2_000_000_000),
            ("2GB", 2_000_000_000),
            ("2gb", 2_000_000_000),
            ("2GiB", 2 << 30),
            ("2gIb", 2 << 30),
            (" 2 GB ", 2_000_000_000),
            ("1.5G", 1_500_000_000),
            ("1.50G", 1_500_000_000),
            ("1.5KiB", 1536),
            ("3k", 3000),
            ("7M", 7_000_000),
            ("7MiB", 7 << 20),
            ("1.56TB", 1_560_000_000_000),
            ("1TiB", 1 << 40),
            ("1.0", 1),
            ("0.3KiB", 307),
            ("0.000000000001T", 1),
            ("0.99999999999999999999999999999999999999999T", 999_999_999_999),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn refusals_name_the_text() {
        use SizeFault::{Fraction, Number, TooLarge, Unit};
        for (text, fault) in [
            ("", Number),
            ("GB", Number),
            ("-1G", Number),
            (".5G", Number),
            ("5.G", Number),
            ("nan", Number),
            ("2Q", Unit),
            ("2Gi", Unit),
            ("2GBB", Unit),
            ("2 G B", Unit),
            ("1e9", Unit),
            ("1.2.3G", Unit),
            ("0x10", Unit),
            ("2\u{a0}\u{e9}", Unit),
            ("1.5", Fraction),
            ("18446744073709551616", TooLarge),
            ("20000000T", TooLarge),
            ("18446744.073709551616T", TooLarge),
            ("99999999999999999999999999999999G", TooLarge),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error, SizeError { text: text.to_owned(), fault });
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn text_for_people_rounds_into_the_right_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (55_296, "55.30 kB"),
            (999_994, "999.99 kB"),
            (999_995, "1.00 MB"),
            (2_000_000_000, "2.00 GB"),
            (1_560_000_000_000, "1.56 TB"),
            (u64::MAX, "18.45 EB"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }
}
