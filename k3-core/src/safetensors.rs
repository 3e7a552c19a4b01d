//! The header of a safetensors file: which tensor lies where.
//!
//! ```text
//! 0        8           8 + n
//! | u64 n  | JSON      | data                     |
//! ```
//!
//! The number is little-endian. The JSON maps a name to dtype, shape and a range of the data; a
//! member `__metadata__` is passed over. Every range is checked against the file and the shape
//! before it is handed out, so what reads by an [`Entry`] cannot leave the file. What needs memory
//! is left to the caller: that no name comes twice, and that no two ranges overlap
//! ([`check_layout`] does that over the caller's own array).
//!
//! ```
//! use k3_core::safetensors::{Header, header_len};
//!
//! let json = br#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#;
//! let file_len = 8 + json.len() as u64 + 24;
//! assert_eq!(header_len((json.len() as u64).to_le_bytes(), file_len)?, json.len() as u64);
//! let header = Header::parse(json, file_len)?;
//! for entry in header.entries() {
//!     let entry = entry?;
//!     assert!(entry.name == "a" && entry.shape() == [2, 3]);
//!     assert_eq!(entry.begin, 8 + json.len() as u64);
//! }
//! # Ok::<(), k3_core::safetensors::HeaderError>(())
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

use crate::checkpoint::Dtype;
use crate::json::{Event, JsonError, Parser, Str};
use core::fmt;

/// Longest header that is read, in bytes. The largest of the release has less than 1 MB.
pub const MAX_HEADER: u64 = 100_000_000;

/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 8;

/// Bytes in front of the JSON.
pub const PREFIX: u64 = 8;

/// A member of a header's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Member {
    /// `dtype`, a string.
    Dtype,
    /// `shape`, an array of integers.
    Shape,
    /// `data_offsets`, an array of two integers.
    Offsets,
}

impl Member {
    const ALL: [Self; 3] = [Self::Dtype, Self::Shape, Self::Offsets];

    /// The key in the header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dtype => "dtype",
            Self::Shape => "shape",
            Self::Offsets => "data_offsets",
        }
    }
}

/// Why a header is refused. `at` is where the name of the tensor in question stands in the JSON;
/// [`Header::name_at`] reads it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file is too short for a length.
    TooShort {
        /// Bytes of the file.
        file_len: u64,
    },
    /// The header claims to be longer than [`MAX_HEADER`].
    TooLong {
        /// The claim in bytes.
        len: u64,
    },
    /// The header claims to go beyond the end of the file.
    BeyondFile {
        /// The claim in bytes.
        len: u64,
        /// Bytes of the file.
        file_len: u64,
    },
    /// The header is not JSON.
    Json(JsonError),
    /// The header is not an object.
    NotAnObject,
    /// The entry is not an object.
    NotAnEntry {
        /// Its name's place.
        at: u64,
    },
    /// The entry lacks a member.
    Missing {
        /// Its name's place.
        at: u64,
        /// What it lacks.
        member: Member,
    },
    /// The entry has a member twice.
    Twice {
        /// Its name's place.
        at: u64,
        /// What it has twice.
        member: Member,
    },
    /// The member is not of the kind that it must be.
    Malformed {
        /// Its name's place.
        at: u64,
        /// Which member.
        member: Member,
    },
    /// The tensor has more than [`MAX_RANK`] dimensions.
    Rank {
        /// Its name's place.
        at: u64,
    },
    /// The number of elements or bytes does not fit 64 bits.
    Overflow {
        /// Its name's place.
        at: u64,
    },
    /// The range runs backwards or leaves the data.
    Range {
        /// Its name's place.
        at: u64,
        /// First byte, counted from the start of the data.
        begin: u64,
        /// Byte after the last, counted from the start of the data.
        end: u64,
        /// Bytes of data in the file.
        data_len: u64,
    },
    /// The range does not have the size that dtype and shape ask for.
    Size {
        /// Its name's place.
        at: u64,
        /// Bytes that dtype and shape ask for.
        expected: u64,
        /// Bytes of the range.
        found: u64,
    },
}

impl HeaderError {
    /// Where the name of the tensor in question stands in the JSON, if it is about one.
    #[must_use]
    pub const fn at(&self) -> Option<u64> {
        match *self {
            Self::NotAnEntry { at }
            | Self::Missing { at, .. }
            | Self::Twice { at, .. }
            | Self::Malformed { at, .. }
            | Self::Rank { at }
            | Self::Overflow { at }
            | Self::Range { at, .. }
            | Self::Size { at, .. } => Some(at),
            _ => None,
        }
    }
}

impl From<JsonError> for HeaderError {
    fn from(error: JsonError) -> Self {
        Self::Json(error)
    }
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = self.at() {
            write!(f, "header byte {at}: ")?;
        }
        match *self {
            Self::TooShort { file_len } => write!(f, "{file_len} bytes are too few for a safetensors file"),
            Self::TooLong { len } => write!(f, "the header claims {len} bytes, more than {MAX_HEADER}"),
            Self::BeyondFile { len, file_len } => {
                write!(f, "the header claims {len} bytes, the file has {file_len}")
            }
            Self::Json(error) => write!(f, "the header is not JSON: {error}"),
            Self::NotAnObject => f.write_str("the header is not an object"),
            Self::NotAnEntry { .. } => f.write_str("the entry is not an object"),
            Self::Missing { member, .. } => write!(f, "{} is missing", member.name()),
            Self::Twice { member, .. } => write!(f, "{} is given twice", member.name()),
            Self::Malformed { member, .. } => write!(f, "{} is malformed", member.name()),
            Self::Rank { .. } => write!(f, "more than {MAX_RANK} dimensions"),
            Self::Overflow { .. } => f.write_str("the tensor's size does not fit 64 bits"),
            Self::Range { begin, end, data_len, .. } => {
                write!(f, "the range {begin}..{end} is not one of the {data_len} bytes of data")
            }
            Self::Size { expected, found, .. } => {
                write!(f, "dtype and shape ask for {expected} bytes, the range has {found}")
            }
        }
    }
}

impl core::error::Error for HeaderError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Json(error) => Some(error),
            _ => None,
        }
    }
}

/// Bytes of the JSON, from the first eight bytes of a file of `file_len` bytes. Data may be empty.
///
/// # Errors
/// [`HeaderError`] if the file cannot hold such a header or it is longer than [`MAX_HEADER`].
pub const fn header_len(first: [u8; 8], file_len: u64) -> Result<u64, HeaderError> {
    let len = u64::from_le_bytes(first);
    let Some(room) = file_len.checked_sub(PREFIX) else {
        return Err(HeaderError::TooShort { file_len });
    };
    if len > room {
        Err(HeaderError::BeyondFile { len, file_len })
    } else if len > MAX_HEADER {
        Err(HeaderError::TooLong { len })
    } else {
        Ok(len)
    }
}

/// A tensor in a file. The range lies in the file and, if the dtype is known, has the right size.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// Its name.
    pub name: Str<'a>,
    /// Its element type; `None` if this engine has no use for it (see `dtype_name`).
    pub dtype: Option<Dtype>,
    /// The element type as written.
    pub dtype_name: Str<'a>,
    /// First byte, counted from the start of the file.
    pub begin: u64,
    /// Byte after the last, counted from the start of the file.
    pub end: u64,
    dims: [u64; MAX_RANK],
    rank: usize,
}

impl Entry<'_> {
    /// Its dimensions, outermost first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.dims.get(..self.rank).unwrap_or(&self.dims)
    }

    /// Size in bytes.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.end.saturating_sub(self.begin)
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The JSON of a header and the size of its file.
#[derive(Debug, Clone, Copy)]
pub struct Header<'a> {
    json: &'a [u8],
    data_start: u64,
    data_len: u64,
}

impl<'a> Header<'a> {
    /// Takes the JSON, exactly the [`header_len`] bytes that follow the first eight, of a file of
    /// `file_len` bytes. Entries are checked as they are read.
    ///
    /// # Errors
    /// [`HeaderError`] if the file cannot hold such a header or it is longer than [`MAX_HEADER`].
    pub fn parse(json: &'a [u8], file_len: u64) -> Result<Self, HeaderError> {
        let len = header_len((json.len() as u64).to_le_bytes(), file_len)?;
        let data_start = PREFIX.saturating_add(len);
        Ok(Self { json, data_start, data_len: file_len.saturating_sub(data_start) })
    }

    /// First byte of the data in the file.
    #[must_use]
    pub const fn data_start(&self) -> u64 {
        self.data_start
    }

    /// Bytes of the data.
    #[must_use]
    pub const fn data_len(&self) -> u64 {
        self.data_len
    }

    /// The tensors in the order of the header. It ends behind the first error.
    #[must_use]
    pub const fn entries(&self) -> Entries<'a> {
        Entries { header: *self, parser: Parser::new(self.json), done: false }
    }

    /// The name that a [`HeaderError`] is about.
    #[must_use]
    pub fn name_at(&self, at: u64) -> Option<Str<'a>> {
        match Parser::new(self.json.get(usize::try_from(at).ok()?..)?).next() {
            Ok(Some(Event::Str(name))) => Some(name),
            _ => None,
        }
    }
}

/// The tensors of a [`Header`].
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    header: Header<'a>,
    parser: Parser<'a>,
    done: bool,
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<Entry<'a>, HeaderError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        let item = self.step().transpose();
        self.done = !matches!(item, Some(Ok(_)));
        item
    }
}

impl<'a> Entries<'a> {
    fn step(&mut self) -> Result<Option<Entry<'a>>, HeaderError> {
        if self.parser.consumed() == 0 && self.parser.next()? != Some(Event::ObjectStart) {
            return Err(HeaderError::NotAnObject);
        }
        loop {
            match self.parser.next()? {
                Some(Event::Key(name)) if name == "__metadata__" => self.parser.skip_value()?,
                Some(Event::Key(name)) => return self.entry(name).map(Some),
                // The end of the object: nothing but space may follow.
                _ => return Ok(self.parser.next().map(|_| None)?),
            }
        }
    }

    fn entry(&mut self, name: Str<'a>) -> Result<Entry<'a>, HeaderError> {
        let at = name.offset();
        if self.parser.next()? != Some(Event::ObjectStart) {
            return Err(HeaderError::NotAnEntry { at });
        }
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(Event::Key(key)) = self.parser.next()? {
            let Some(member) = Member::ALL.into_iter().find(|m| key == m.name()) else {
                self.parser.skip_value()?;
                continue;
            };
            let twice = match member {
                Member::Dtype => match self.parser.next()? {
                    Some(Event::Str(name)) => dtype.replace(name).is_some(),
                    _ => return Err(HeaderError::Malformed { at, member }),
                },
                Member::Shape => shape.replace(self.integers::<MAX_RANK>(at, member)?).is_some(),
                Member::Offsets => offsets.replace(self.integers::<2>(at, member)?).is_some(),
            };
            if twice {
                return Err(HeaderError::Twice { at, member });
            }
        }
        let dtype_name = dtype.ok_or(HeaderError::Missing { at, member: Member::Dtype })?;
        let (dims, rank) = shape.ok_or(HeaderError::Missing { at, member: Member::Shape })?;
        let ([begin, end], count) = offsets.ok_or(HeaderError::Missing { at, member: Member::Offsets })?;
        if count != 2 {
            return Err(HeaderError::Malformed { at, member: Member::Offsets });
        }
        let data_len = self.header.data_len;
        let found = match end.checked_sub(begin) {
            Some(found) if end <= data_len => found,
            _ => return Err(HeaderError::Range { at, begin, end, data_len }),
        };
        let elements = dims.iter().take(rank).try_fold(1_u64, |n, &d| n.checked_mul(d));
        let elements = elements.ok_or(HeaderError::Overflow { at })?;
        let dtype = [Dtype::Bf16, Dtype::F32, Dtype::U8].into_iter().find(|d| dtype_name == d.name());
        if let Some(dtype) = dtype {
            let expected = elements.checked_mul(dtype.size()).ok_or(HeaderError::Overflow { at })?;
            if expected != found {
                return Err(HeaderError::Size { at, expected, found });
            }
        }
        // Both lie in the file, so the sums fit.
        let start = self.header.data_start;
        let (begin, end) = (start.saturating_add(begin), start.saturating_add(end));
        Ok(Entry { name, dtype, dtype_name, begin, end, dims, rank })
    }

    /// An array of up to `N` integers, and their number.
    fn integers<const N: usize>(&mut self, at: u64, member: Member) -> Result<([u64; N], usize), HeaderError> {
        let malformed = HeaderError::Malformed { at, member };
        if self.parser.next()? != Some(Event::ArrayStart) {
            return Err(malformed);
        }
        let (mut values, mut count) = ([0; N], 0_usize);
        loop {
            match self.parser.next()? {
                Some(Event::ArrayEnd) => return Ok((values, count)),
                Some(Event::Number(number)) => {
                    let value = number.as_u64().ok_or(malformed)?;
                    let full = if member == Member::Shape { HeaderError::Rank { at } } else { malformed };
                    *values.get_mut(count).ok_or(full)? = value;
                    count = count.saturating_add(1);
                }
                _ => return Err(malformed),
            }
        }
    }
}

/// Two ranges of a file that do not lie end to end, or bytes that belong to none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutFault {
    /// Two ranges share bytes.
    Overlap {
        /// First byte of the later one.
        begin: u64,
        /// Byte after the last of the earlier one.
        end: u64,
    },
    /// Bytes of the data that belong to no range.
    Hole {
        /// First of them.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// A range runs backwards or leaves the data.
    Outside {
        /// First byte.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
}

impl fmt::Display for LayoutFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Overlap { begin, end } => write!(f, "bytes {begin}..{end} belong to two tensors"),
            Self::Hole { begin, end } => write!(f, "bytes {begin}..{end} belong to no tensor"),
            Self::Outside { begin, end } => write!(f, "bytes {begin}..{end} are not a range of the data"),
        }
    }
}

impl core::error::Error for LayoutFault {}

/// Checks that the ranges of a file's entries, each `(begin, end)`, tile `data` (also begin and
/// end) without overlap and without holes, as the format demands. Sorts the caller's array.
///
/// # Errors
/// [`LayoutFault`]: the first from the front.
pub fn check_layout(ranges: &mut [(u64, u64)], data: (u64, u64)) -> Result<(), LayoutFault> {
    ranges.sort_unstable();
    let mut at = data.0;
    for &(begin, end) in &*ranges {
        if begin < data.0 || begin > end || end > data.1 {
            return Err(LayoutFault::Outside { begin, end });
        }
        if begin < at {
            return Err(LayoutFault::Overlap { begin, end: at.min(end) });
        }
        if begin > at {
            return Err(LayoutFault::Hole { begin: at, end: begin });
        }
        at = end;
    }
    if at < data.1 { Err(LayoutFault::Hole { begin: at, end: data.1 }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;
    use std::string::String;
    use std::vec::Vec;

    /// Name, shape and range in the data.
    type Row = (String, Vec<u64>, u64, u64);

    fn read(json: &str, data_len: u64) -> Result<Vec<Row>, HeaderError> {
        let file_len = PREFIX + json.len() as u64 + data_len;
        let header = Header::parse(json.as_bytes(), file_len)?;
        let row = |e: Entry<'_>| {
            let (begin, end) = (e.begin - header.data_start(), e.end - header.data_start());
            (e.name.chars().collect(), e.shape().to_vec(), begin, end)
        };
        header.entries().map(|e| e.map(row)).collect()
    }

    #[test]
    fn lengths_that_lie_are_refused() {
        let len = |n: u64, file_len| header_len(n.to_le_bytes(), file_len);
        assert_eq!(len(2, 10), Ok(2));
        assert_eq!(len(0, 7), Err(HeaderError::TooShort { file_len: 7 }));
        for n in [3, u64::MAX, u64::MAX - 7, 1 << 63] {
            assert_eq!(len(n, 10), Err(HeaderError::BeyondFile { len: n, file_len: 10 }));
        }
        assert_eq!(len(MAX_HEADER, u64::MAX), Ok(MAX_HEADER));
        assert_eq!(len(MAX_HEADER + 1, u64::MAX), Err(HeaderError::TooLong { len: MAX_HEADER + 1 }));
        assert!(Header::parse(b"{}", 9).is_err());
    }

    #[test]
    fn entries_are_read_and_metadata_is_not() {
        let json = r#"{"__metadata__":{"format":"pt","x":[{}]},
            "a":{"dtype":"BF16","shape":[2,1,3],"data_offsets":[0,12]},
            "\u0062":{"data_offsets":[12,16],"extra":{"y":1},"shape":[],"dtype":"F32"},
            "c":{"dtype":"F8_E4M3","shape":[7],"data_offsets":[16,16]} } "#;
        let found = read(json, 16).unwrap();
        assert_eq!(found[0], ("a".into(), std::vec![2, 1, 3], 0, 12));
        assert_eq!(found[1], ("b".into(), std::vec![], 12, 16));
        assert_eq!(found.len(), 3);
        assert_eq!(read("{}", 0), Ok(std::vec![]));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let entry = |dtype: &str, shape: &str, offsets: &str| {
            let json = format!(r#"{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#);
            read(&json, 16).unwrap_err()
        };
        let (at, bf16) = (1, "\"BF16\"");
        let range = |begin, end| HeaderError::Range { at, begin, end, data_len: 16 };
        let malformed = |member| HeaderError::Malformed { at, member };
        assert_eq!(entry(bf16, "[2]", "[4,0]"), range(4, 0));
        assert_eq!(entry(bf16, "[2]", "[14,18]"), range(14, 18));
        assert_eq!(entry("\"X\"", "[2]", "[14,18]"), range(14, 18));
        assert_eq!(entry(bf16, "[2]", "[18446744073709551615,4]"), range(u64::MAX, 4));
        assert_eq!(entry(bf16, "[3]", "[0,4]"), HeaderError::Size { at, expected: 6, found: 4 });
        assert_eq!(entry(bf16, "[4294967296,4294967296]", "[0,0]"), HeaderError::Overflow { at });
        assert_eq!(entry(bf16, "[9223372036854775808]", "[0,0]"), HeaderError::Overflow { at });
        assert_eq!(entry(bf16, "[1,1,1,1,1,1,1,1,1]", "[0,2]"), HeaderError::Rank { at });
        assert_eq!(entry(bf16, "[2.0]", "[0,4]"), malformed(Member::Shape));
        assert_eq!(entry(bf16, "[-2]", "[0,4]"), malformed(Member::Shape));
        assert_eq!(entry(bf16, "2", "[0,4]"), malformed(Member::Shape));
        assert_eq!(entry(bf16, "[2]", "[0]"), malformed(Member::Offsets));
        assert_eq!(entry(bf16, "[2]", "[0,4,4]"), malformed(Member::Offsets));
        assert_eq!(entry("3", "[2]", "[0,4]"), malformed(Member::Dtype));
        assert_eq!(entry(bf16, "[2],\"shape\":[2]", "[0,4]"), HeaderError::Twice { at, member: Member::Shape });
        let missing = HeaderError::Missing { at, member: Member::Dtype };
        assert_eq!(read(r#"{"a":{"shape":[],"data_offsets":[0,0]}}"#, 0), Err(missing));
        assert_eq!(read(r#"{"a":[]}"#, 0), Err(HeaderError::NotAnEntry { at }));
        assert_eq!(read("[]", 0), Err(HeaderError::NotAnObject));
        assert!(matches!(read("{} {", 0), Err(HeaderError::Json(_))));
        assert!(matches!(read("", 0), Err(HeaderError::Json(_))));
    }

    #[test]
    fn errors_lead_to_the_name() {
        let json = br#"{"first":{"dtype":"U8","shape":[],"data_offsets":[0,1]}, "second":1}"#;
        let header = Header::parse(json, 8 + json.len() as u64 + 1).unwrap();
        let mut entries = header.entries();
        assert!(entries.next().unwrap().is_ok());
        let error = entries.next().unwrap().unwrap_err();
        assert!(header.name_at(error.at().unwrap()).unwrap() == "second");
        assert!(entries.next().is_none() && header.name_at(u64::MAX).is_none());
    }

    #[test]
    fn no_truncation_or_flip_panics() {
        let json = br#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"U8","shape":[4],"data_offsets":[12,16]}}"#;
        for at in 0..json.len() {
            for flip in 1..=255 {
                let mut bad = json.to_vec();
                bad[at] ^= flip;
                let header = Header::parse(&bad, 8 + bad.len() as u64 + 16).unwrap();
                for entry in header.entries().flatten() {
                    assert!(entry.begin <= entry.end && entry.end <= 8 + bad.len() as u64 + 16);
                }
            }
            let header = Header::parse(&json[..at], 8 + at as u64 + 16).unwrap();
            assert!(header.entries().any(|e| e.is_err()));
        }
    }

    #[test]
    fn layouts_tile_the_data() {
        let check = |ranges: &[(u64, u64)]| check_layout(&mut ranges.to_vec(), (10, 30));
        assert_eq!(check(&[(20, 30), (10, 20), (20, 20)]), Ok(()));
        assert_eq!(check(&[(10, 20), (21, 30)]), Err(LayoutFault::Hole { begin: 20, end: 21 }));
        assert_eq!(check(&[(10, 20), (19, 30)]), Err(LayoutFault::Overlap { begin: 19, end: 20 }));
        assert_eq!(check(&[(10, 29)]), Err(LayoutFault::Hole { begin: 29, end: 30 }));
        assert_eq!(check(&[(10, 31)]), Err(LayoutFault::Outside { begin: 10, end: 31 }));
        assert_eq!(check(&[]), Err(LayoutFault::Hole { begin: 10, end: 30 }));
    }
}
