//! Outputs of other engines, and how far this one's are from them.
//!
//! A reference is a file of numbers: `.npy` (`<f4` or `<f8`, C order), safetensors (one tensor, F32 or
//! BF16), or raw little-endian f32. It is read row by row, as it is compared: logits of the release are
//! 655 kB a position.

use crate::error::Error;
use crate::io::{ReadAt, Source, read_exact_at};
use k3_core::checkpoint::Dtype;
use k3_core::safetensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How the numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Element {
    F32,
    F64,
    Bf16,
}

impl Element {
    const fn size(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F64 => 8,
            Self::Bf16 => 2,
        }
    }
}

/// Why a file is no reference.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReferenceError {
    /// It cannot be read.
    Read(Error),
    /// It is not in one of the forms.
    Form {
        /// The file.
        path: PathBuf,
        /// What was expected of it.
        expected: &'static str,
    },
    /// It does not have rows of the length that is compared.
    Rows {
        /// The file.
        path: PathBuf,
        /// Its shape; numbers in all, if it has none.
        shape: Vec<u64>,
        /// What a row should have.
        row: usize,
    },
}

impl std::fmt::Display for ReferenceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Read(source) => source.fmt(f),
            Self::Form { path, expected } => write!(f, "{}: expected {expected}", path.display()),
            Self::Rows { path, shape, row } => {
                write!(f, "{}: its shape {shape:?} is not one of rows of {row} numbers", path.display())
            }
        }
    }
}

impl std::error::Error for ReferenceError {}

impl From<Error> for ReferenceError {
    fn from(source: Error) -> Self {
        Self::Read(source)
    }
}

/// Rows of numbers in a file.
pub struct Reference {
    file: Arc<dyn ReadAt>,
    start: u64,
    element: Element,
    rows: u64,
    row: usize,
}

impl std::fmt::Debug for Reference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reference").field("path", &self.file.path()).field("rows", &self.rows).finish_non_exhaustive()
    }
}

/// The header of an `.npy` file is not longer than this (bytes).
const NPY_HEADER: u64 = 64 << 10;

/// The header of a safetensors file of one tensor is not longer than this (bytes).
const TENSORS_HEADER: u64 = 1 << 20;

impl Reference {
    /// Opens a file whose rows have `row` numbers.
    ///
    /// # Errors
    /// [`ReferenceError`] naming the file.
    pub fn open(source: &dyn Source, path: &Path, row: usize) -> Result<Self, ReferenceError> {
        let failed = |source| Error::Open { path: path.to_owned(), source };
        let file = source.open_cached(path).map_err(failed)?;
        let len = file.len().map_err(failed)?;
        let mut magic = [0; 10];
        if len >= 10 {
            read_exact_at(&*file, &mut magic, 0).map_err(Error::from)?;
        }
        let named = |ending: &str| path.extension().is_some_and(|e| e == ending);
        let (element, shape, start) = if magic.starts_with(b"\x93NUMPY") {
            npy(&*file, magic, len)?
        } else if named("safetensors") {
            tensor(&*file, len)?
        } else {
            (Element::F32, vec![len / 4], 0)
        };
        let count = shape.iter().try_fold(1, |n: u64, &d| n.checked_mul(d));
        let last = shape.last().copied().unwrap_or(0);
        let raw = start == 0;
        let fits = count.filter(|&n| {
            let rows = n > 0 && n.is_multiple_of(row as u64) && (raw || last == row as u64);
            let bytes = n.checked_mul(element.size()).and_then(|bytes| bytes.checked_add(start));
            rows && bytes.is_some_and(|end| if raw { end == len } else { end <= len })
        });
        match fits {
            Some(count) => Ok(Self { file, start, element, rows: count / row as u64, row }),
            None => Err(ReferenceError::Rows { path: path.to_owned(), shape, row }),
        }
    }

    /// How many rows there are.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Reads a row into `out`, which has its length.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn read(&self, row: u64, out: &mut Vec<f64>) -> Result<(), Error> {
        let size = self.element.size();
        let bytes = usize::try_from(self.row as u64 * size).unwrap_or(usize::MAX);
        let mut buffer = vec![0; bytes];
        read_exact_at(&*self.file, &mut buffer, self.start + row * self.row as u64 * size)?;
        out.clear();
        match self.element {
            Element::F32 => out.extend(buffer.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)))),
            Element::F64 => out.extend(buffer.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b))),
            Element::Bf16 => out.extend(buffer.as_chunks::<2>().0.iter().map(|&[low, high]| {
                // The upper half of an f32.
                f64::from(f32::from_le_bytes([0, 0, low, high]))
            })),
        }
        Ok(())
    }
}

type Found = (Element, Vec<u64>, u64);

/// The header of an `.npy` file: a Python dictionary of three members.
fn npy(file: &dyn ReadAt, magic: [u8; 10], len: u64) -> Result<Found, ReferenceError> {
    let form = |expected| ReferenceError::Form { path: file.path().to_owned(), expected };
    let [_, _, _, _, _, _, major, _, a, b] = magic;
    let (at, size) = if major == 1 {
        (10, u64::from(u16::from_le_bytes([a, b])))
    } else {
        let mut rest = [0; 2];
        read_exact_at(file, &mut rest, 10).map_err(Error::from)?;
        (12, u64::from(u32::from_le_bytes([a, b, rest[0], rest[1]])))
    };
    if size > NPY_HEADER || at + size > len {
        return Err(form("a whole .npy header"));
    }
    let mut header = vec![0; usize::try_from(size).unwrap_or(0)];
    read_exact_at(file, &mut header, at).map_err(Error::from)?;
    let text = String::from_utf8_lossy(&header);
    let value = |name: &str| text.split_once(name).map(|(_, rest)| rest.trim_start_matches([':', ' ']));
    let element = match value("'descr'").map(|v| v.trim_start_matches('\'')) {
        Some(v) if v.starts_with("<f4") => Element::F32,
        Some(v) if v.starts_with("<f8") => Element::F64,
        _ => return Err(form("an .npy file of <f4 or <f8")),
    };
    if !value("'fortran_order'").is_some_and(|v| v.starts_with("False")) {
        return Err(form("an .npy file in C order"));
    }
    let shape = value("'shape'").and_then(|v| v.strip_prefix('(')?.split_once(')'));
    let dims =
        shape.map(|(dims, _)| dims.split(',').map(str::trim).filter(|d| !d.is_empty()).map(str::parse).collect());
    match dims {
        Some(Ok(dims)) => Ok((element, dims, at + size)),
        _ => Err(form("an .npy file with a shape")),
    }
}

/// The header of a safetensors file with one tensor.
fn tensor(file: &dyn ReadAt, len: u64) -> Result<Found, ReferenceError> {
    let path = || file.path().to_owned();
    let fault = |source| Error::Header { path: path(), source };
    let form = |expected| ReferenceError::Form { path: path(), expected };
    let mut prefix = [0; 8];
    if len >= 8 {
        read_exact_at(file, &mut prefix, 0).map_err(Error::from)?;
    }
    let size = safetensors::header_len(prefix, len).map_err(fault)?;
    if size > TENSORS_HEADER {
        return Err(form("a safetensors file of one tensor"));
    }
    let mut bytes = vec![0; usize::try_from(size).unwrap_or(0)];
    read_exact_at(file, &mut bytes, 8).map_err(Error::from)?;
    let header = safetensors::Header::parse(&bytes, len).map_err(fault)?;
    let mut entries = header.entries();
    let (first, second) = (entries.next(), entries.next());
    let (Some(entry), None) = (first, second) else { return Err(form("a safetensors file of one tensor")) };
    let entry = entry.map_err(fault)?;
    let element = match entry.dtype {
        Some(Dtype::F32) => Element::F32,
        Some(Dtype::Bf16) => Element::Bf16,
        _ => return Err(form("a tensor of F32 or BF16")),
    };
    Ok((element, entry.shape().to_vec(), entry.begin))
}

/// How far rows of numbers are from a reference.
#[derive(Debug, Clone, Default)]
pub struct Difference {
    /// Numbers compared.
    pub count: u64,
    /// Largest absolute difference; infinite if one of the two is not finite.
    pub max_abs: f64,
    /// Its row and column.
    pub at: (u64, usize),
    /// Largest difference as a share of the reference's number, or of a thousandth of the largest in its
    /// row where that is more: what is next to zero has no relative error worth the name.
    pub max_relative: f64,
    sums: Sums,
}

/// Sums over all pairs (found, expected).
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    found: f64,
    expected: f64,
    found_squared: f64,
    expected_squared: f64,
    product: f64,
}

impl Difference {
    /// Compares a row.
    pub fn add(&mut self, row: u64, found: &[f32], expected: &[f64]) {
        let largest = expected.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        for (column, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            let found = f64::from(found);
            let gap = (found - expected).abs();
            let gap = if gap.is_nan() { f64::INFINITY } else { gap };
            if gap > self.max_abs {
                (self.max_abs, self.at) = (gap, (row, column));
            }
            let scale = expected.abs().max(largest / 1000.0);
            if gap > 0.0 {
                self.max_relative = self.max_relative.max(gap / scale);
            }
            let s = &mut self.sums;
            s.found += found;
            s.expected += expected;
            s.found_squared += found * found;
            s.expected_squared += expected * expected;
            s.product += found * expected;
        }
        self.count += found.len().min(expected.len()) as u64;
    }

    /// The linear correlation of the two; `None` where one of them does not vary.
    #[must_use]
    pub fn correlation(&self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let n = self.count as f64;
        let s = self.sums;
        let product = (n * s.found_squared - s.found * s.found) * (n * s.expected_squared - s.expected * s.expected);
        (product > 0.0).then(|| (n * s.product - s.found * s.expected) / product.sqrt())
    }

    /// The standard deviation of the reference's numbers.
    #[must_use]
    pub fn deviation(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let n = (self.count as f64).max(1.0);
        let mean = self.sums.expected / n;
        (self.sums.expected_squared / n - mean * mean).max(0.0).sqrt()
    }
}

/// The places of the `k` largest numbers, largest first; of equals, the first.
#[must_use]
pub fn largest(row: &[f64], k: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..row.len()).collect();
    let k = k.min(places.len());
    let order = |&a: &usize, &b: &usize| row[b].total_cmp(&row[a]).then(a.cmp(&b));
    if k > 0 && k < places.len() {
        places.select_nth_unstable_by(k - 1, order);
    }
    places.truncate(k);
    places.sort_unstable_by(order);
    places
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Disk;

    #[test]
    fn every_form_gives_the_same_rows() {
        let dir = tempfile::tempdir().unwrap();
        let values = [0.5f32, -1.0, 2.0, 3.5, -0.25, 8.0];
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let double: Vec<u8> = values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect();
        let half: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()[2..].to_vec()).collect();
        let npy = |descr: &str, shape: &str, data: &[u8]| {
            let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
            let len = u16::try_from(header.len()).unwrap().to_le_bytes();
            [b"\x93NUMPY\x01\x00", &len[..], header.as_bytes(), data].concat()
        };
        let tensors = |dtype: &str, data: &[u8]| {
            let header =
                format!(r#"{{"logits":{{"dtype":"{dtype}","shape":[2,3],"data_offsets":[0,{}]}}}}"#, data.len());
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
        };
        let files = [
            ("a.f32", raw.clone()),
            ("a.npy", npy("<f4", "(2, 3)", &raw)),
            ("b.npy", npy("<f8", "(1, 2, 3)", &double)),
            ("a.safetensors", tensors("F32", &raw)),
            ("b.safetensors", tensors("BF16", &half)),
        ];
        for (name, bytes) in files {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let reference = Reference::open(&Disk::default(), &path, 3).unwrap();
            assert_eq!(reference.rows(), 2, "{name}");
            let mut row = Vec::new();
            for r in 0..2 {
                reference.read(r, &mut row).unwrap();
                let expected: Vec<f64> =
                    values[3 * usize::try_from(r).unwrap()..][..3].iter().map(|&v| v.into()).collect();
                assert_eq!(row, expected, "{name}");
            }
            assert!(matches!(Reference::open(&Disk::default(), &path, 4), Err(ReferenceError::Rows { .. })), "{name}");
        }
        for (name, bytes) in [
            ("big.npy", npy(">f4", "(2, 3)", &raw)),
            ("short.npy", npy("<f4", "(2, 3)", &raw[..20])),
            ("odd.f32", raw[..23].to_vec()),
            ("empty.f32", Vec::new()),
            ("x.safetensors", vec![9; 30]),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            let error = Reference::open(&Disk::default(), &path, 3).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[test]
    fn differences_are_what_they_say() {
        let mut d = Difference::default();
        d.add(0, &[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]);
        assert!(d.max_abs == 0.0 && d.max_relative == 0.0 && (d.correlation().unwrap() - 1.0).abs() < 1e-12);
        assert!((d.deviation() - (2.0f64 / 3.0).sqrt()).abs() < 1e-12);
        d.add(5, &[1.0, 2.5], &[1.0, 2.0]);
        assert_eq!((d.max_abs, d.at, d.max_relative, d.count), (0.5, (5, 1), 0.25, 5));
        d.add(6, &[f32::NAN], &[0.0]);
        assert!(d.max_abs.is_infinite() && d.at == (6, 0));
        assert_eq!(largest(&[1.0, 5.0, 5.0, -2.0, 7.0], 3), [4, 1, 2]);
        assert_eq!(largest(&[1.0], 9), [0]);
        assert!(largest(&[1.0], 0).is_empty());
    }
}
