//! Checked views of weights as they lie in a file, and the small integers that name things.
//!
//! A view is a borrowed byte slice together with the shape it was checked against. It can only be
//! built checked, so a kernel that holds one never meets a length that does not fit. Bytes are
//! little-endian whatever the machine is, and need no alignment: a tensor starts wherever the
//! checkpoint put it. Whoever computes with them says so where it loads them.
//!
//! ```
//! use k3_core::view::{Bf16Matrix, ViewError};
//!
//! let bytes = [0x80, 0x3f, 0x00, 0x40, 0x00, 0xc0, 0x00, 0x00]; // 1, 2; -2, 0
//! assert_eq!(Bf16Matrix::new(&bytes, 2, 2)?.row(1), [0x00, 0xc0, 0x00, 0x00]);
//! assert_eq!(Bf16Matrix::new(&bytes, 3, 2).unwrap_err(), ViewError::Length { expected: 12, found: 8 });
//! # Ok::<(), ViewError>(())
//! ```

use crate::coded::CodedMatrix;
use core::ops::Range;

/// A token id: a row of the embedding table and of `lm_head` (config `vocab_size`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct TokenId(pub u32);

/// A layer, counted from zero (the config's own lists count from one).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIndex(pub u16);

/// A routed expert of a layer, counted from zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct ExpertId(pub u16);

impl LayerIndex {
    /// The layer number as an index into a slice.
    #[must_use]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

impl ExpertId {
    /// The expert number as an index into a slice.
    #[must_use]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

impl TokenId {
    /// The id as an index into a slice.
    #[must_use]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

/// Weights that share one E8M0 scale in MXFP4 (spec section 4; config `group_size`).
pub const GROUP: usize = 32;

/// A view whose bytes do not have the length its shape asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ViewError {
    /// `rows * cols` elements do not fit the address space.
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// The byte slice is shorter or longer than the shape.
    Length {
        /// Bytes the shape asks for.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// An MXFP4 row must be a whole number of groups of [`GROUP`] columns.
    Group {
        /// Columns asked for.
        cols: usize,
    },
}

impl core::fmt::Display for ViewError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::TooLarge { rows, cols } => write!(f, "{rows} x {cols} elements do not fit the address space"),
            Self::Length { expected, found } => write!(f, "expected {expected} bytes, found {found}"),
            Self::Group { cols } => write!(f, "{cols} columns are not a multiple of {GROUP}"),
        }
    }
}

impl core::error::Error for ViewError {}

fn check(rows: usize, cols: usize, size: usize, bytes: &[u8]) -> Result<(), ViewError> {
    let expected =
        rows.checked_mul(cols).and_then(|n| n.checked_mul(size)).ok_or(ViewError::TooLarge { rows, cols })?;
    if bytes.len() == expected { Ok(()) } else { Err(ViewError::Length { expected, found: bytes.len() }) }
}

/// Stops at rows that are not there. What lies within is in the bytes, for their length was checked; rows that
/// are not may overflow to ones that are, or have no bytes at all.
#[track_caller]
fn within(range: &Range<usize>, rows: usize) {
    assert!(range.start <= range.end && range.end <= rows, "rows {range:?} of {rows}");
}

/// Rows of a bf16 matrix, `[rows, cols]` row-major, two little-endian bytes an element.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Matrix<'a> {
    bytes: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Bf16Matrix<'a> {
    /// Views `bytes` as `[rows, cols]`.
    ///
    /// # Errors
    /// [`ViewError`] if `bytes` is not exactly `rows * cols * 2` long.
    pub fn new(bytes: &'a [u8], rows: usize, cols: usize) -> Result<Self, ViewError> {
        check(rows, cols, 2, bytes)?;
        Ok(Self { bytes, rows, cols })
    }

    /// Number of rows (outputs).
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// All bytes, row after row.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The bytes of row `r`.
    ///
    /// # Panics
    /// If `r` is not a row: a bug of the caller.
    #[must_use]
    pub fn row(&self, r: usize) -> &'a [u8] {
        within(&(r..r + 1), self.rows);
        &self.bytes[r * self.cols * 2..][..self.cols * 2]
    }

    /// The rows of `range` as a view of their own.
    ///
    /// # Panics
    /// If `range` leaves the matrix: a bug of the caller.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        within(&range, self.rows);
        let bytes = &self.bytes[range.start * self.cols * 2..range.end * self.cols * 2];
        Self { bytes, rows: range.len(), cols: self.cols }
    }
}

/// Rows of a bf16 matrix in whichever form they are kept. A product has the same bits with both.
#[derive(Debug, Clone, Copy)]
pub enum MatrixRows<'a> {
    /// As they are in the release.
    Raw(Bf16Matrix<'a>),
    /// Losslessly smaller.
    Coded(CodedMatrix<'a>),
}

impl MatrixRows<'_> {
    /// Number of rows (outputs).
    #[must_use]
    pub const fn rows(&self) -> usize {
        match self {
            Self::Raw(m) => m.rows(),
            Self::Coded(m) => m.rows(),
        }
    }

    /// Number of columns (inputs).
    #[must_use]
    pub const fn cols(&self) -> usize {
        match self {
            Self::Raw(m) => m.cols(),
            Self::Coded(m) => m.cols(),
        }
    }
}

impl<'a> From<Bf16Matrix<'a>> for MatrixRows<'a> {
    fn from(m: Bf16Matrix<'a>) -> Self {
        Self::Raw(m)
    }
}

impl<'a> From<CodedMatrix<'a>> for MatrixRows<'a> {
    fn from(m: CodedMatrix<'a>) -> Self {
        Self::Coded(m)
    }
}

/// Rows of an f32 matrix that was computed here (the latent cache), `[rows, cols]` row-major.
#[derive(Debug, Clone, Copy)]
pub struct F32Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
}

impl<'a> F32Matrix<'a> {
    /// Views `data` as `[rows, cols]`.
    ///
    /// # Errors
    /// [`ViewError`] if `data` is not exactly `rows * cols` long (lengths are given in bytes).
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Result<Self, ViewError> {
        check(rows, cols, 4, bytemuck::cast_slice(data))?;
        Ok(Self { data, rows, cols })
    }

    /// Number of rows (outputs).
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// All elements, row after row.
    #[must_use]
    pub const fn data(&self) -> &'a [f32] {
        self.data
    }

    /// Row `r`.
    ///
    /// # Panics
    /// If `r` is not a row: a bug of the caller.
    #[must_use]
    pub fn row(&self, r: usize) -> &'a [f32] {
        within(&(r..r + 1), self.rows);
        &self.data[r * self.cols..][..self.cols]
    }

    /// The rows of `range` as a view of their own.
    ///
    /// # Panics
    /// If `range` leaves the matrix: a bug of the caller.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        within(&range, self.rows);
        Self { data: &self.data[range.start * self.cols..range.end * self.cols], rows: range.len(), cols: self.cols }
    }
}

/// Rows of an MXFP4 matrix as released: E2M1 nibbles and E8M0 scale bytes (spec section 4).
///
/// `packed` is `[rows, cols / 2]`, the low nibble being the even element; `scales` is
/// `[rows, cols / 32]`. The weights are never expanded to memory.
#[derive(Debug, Clone, Copy)]
pub struct Mxfp4Matrix<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    rows: usize,
    cols: usize,
}

impl<'a> Mxfp4Matrix<'a> {
    /// Views nibbles and scales as `[rows, cols]`.
    ///
    /// # Errors
    /// [`ViewError`] if `cols` is not a multiple of [`GROUP`] or a slice has the wrong length.
    pub fn new(packed: &'a [u8], scales: &'a [u8], rows: usize, cols: usize) -> Result<Self, ViewError> {
        if !cols.is_multiple_of(GROUP) {
            return Err(ViewError::Group { cols });
        }
        check(rows, cols / 2, 1, packed)?;
        check(rows, cols / GROUP, 1, scales)?;
        Ok(Self { packed, scales, rows, cols })
    }

    /// Number of rows (outputs).
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns (inputs).
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// The nibbles of all rows.
    #[must_use]
    pub const fn packed(&self) -> &'a [u8] {
        self.packed
    }

    /// The scale bytes of all rows.
    #[must_use]
    pub const fn scales(&self) -> &'a [u8] {
        self.scales
    }

    /// The nibbles and the scale bytes of row `r`.
    ///
    /// # Panics
    /// If `r` is not a row: a bug of the caller.
    #[must_use]
    pub fn row(&self, r: usize) -> (&'a [u8], &'a [u8]) {
        within(&(r..r + 1), self.rows);
        let (p, s) = (self.cols / 2, self.cols / GROUP);
        (&self.packed[r * p..][..p], &self.scales[r * s..][..s])
    }

    /// The rows of `range` as a view of their own.
    ///
    /// # Panics
    /// If `range` leaves the matrix: a bug of the caller.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        within(&range, self.rows);
        let (p, s) = (self.cols / 2, self.cols / GROUP);
        Self {
            packed: &self.packed[range.start * p..range.end * p],
            scales: &self.scales[range.start * s..range.end * s],
            rows: range.len(),
            cols: self.cols,
        }
    }

    /// How many scale bytes are 255, the NaN of E8M0. Each silences its group of 32 weights.
    #[must_use]
    pub fn nan_scales(&self) -> usize {
        // So few at a time that a count fits a byte: then a compiler can count in bytes, which matters
        // because every scale that arrives from the disk passes here.
        let few = |scales: &[u8]| scales.iter().fold(0_u8, |n, &s| n.wrapping_add(u8::from(s == 255)));
        self.scales.chunks(255).map(|scales| usize::from(few(scales))).sum()
    }
}

/// The three matrices of a routed expert: `w2 situ(w1 z, w3 z)` (spec 3.6).
#[derive(Debug, Clone, Copy)]
pub struct Expert<'a> {
    /// Gate, `[moe_intermediate_size, routed_expert_hidden_size]`.
    pub w1: Mxfp4Matrix<'a>,
    /// Down, `[routed_expert_hidden_size, moe_intermediate_size]`.
    pub w2: Mxfp4Matrix<'a>,
    /// Up, `[moe_intermediate_size, routed_expert_hidden_size]`.
    pub w3: Mxfp4Matrix<'a>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_are_only_built_checked() {
        assert_eq!(Bf16Matrix::new(&[0; 11], 2, 3).unwrap_err(), ViewError::Length { expected: 12, found: 11 });
        assert_eq!(Bf16Matrix::new(&[], usize::MAX, 3).unwrap_err(), ViewError::TooLarge { rows: usize::MAX, cols: 3 });
        assert_eq!(Mxfp4Matrix::new(&[0; 17], &[0; 1], 1, 34).unwrap_err(), ViewError::Group { cols: 34 });
        assert_eq!(
            Mxfp4Matrix::new(&[0; 32], &[0; 1], 2, 32).unwrap_err(),
            ViewError::Length { expected: 2, found: 1 }
        );
        assert!(F32Matrix::new(&[0.0; 6], 2, 3).is_ok());
        assert!(F32Matrix::new(&[0.0; 6], 2, 4).is_err());
    }

    #[test]
    fn slices_are_the_rows_they_name() {
        let bytes: [u8; 24] = core::array::from_fn(|i| u8::try_from(i).unwrap());
        let m = Bf16Matrix::new(&bytes, 4, 3).unwrap();
        assert_eq!(m.slice(1..3).row(1), m.row(2));
        assert_eq!(m.slice(4..4).rows(), 0);
        let packed: [u8; 48] = core::array::from_fn(|i| u8::try_from(i).unwrap());
        let q = Mxfp4Matrix::new(&packed, &[1, 255, 255], 3, 32).unwrap();
        assert_eq!(q.slice(1..3).row(1), q.row(2));
        assert_eq!((q.nan_scales(), q.slice(0..1).nan_scales()), (2, 0));
    }

    /// Products of rows and columns that wrapped around were rows of a slice, and without columns all rows were.
    #[test]
    fn rows_that_are_not_there_are_refused() {
        let panics = |f: &dyn Fn() -> usize| std::panic::catch_unwind(core::panic::AssertUnwindSafe(f)).is_err();
        let (floats, bytes) = ([0.0; 8], [0; 64]);
        let f = F32Matrix::new(&floats, 4, 2).unwrap();
        let b = Bf16Matrix::new(&bytes[..16], 4, 2).unwrap();
        let none = Bf16Matrix::new(&[], 4, 0).unwrap();
        let q = Mxfp4Matrix::new(&bytes, &bytes[..4], 4, 32).unwrap();
        let far = 1 << (usize::BITS - 2);
        #[expect(clippy::reversed_empty_ranges, reason = "what a caller may get wrong")]
        for range in [0..5, 4..5, 3..2, 0..far, far..far + 1, far..far, 5..5] {
            assert!(panics(&|| f.slice(range.clone()).rows()), "{range:?}");
            assert!(panics(&|| b.slice(range.clone()).rows()), "{range:?}");
            assert!(panics(&|| none.slice(range.clone()).rows()), "{range:?}");
            assert!(panics(&|| q.slice(range.clone()).rows()), "{range:?}");
        }
        for row in [4, far, 2 * far] {
            assert!(panics(&|| f.row(row).len()) && panics(&|| b.row(row).len()), "{row}");
            assert!(panics(&|| none.row(row).len()) && panics(&|| q.row(row).0.len()), "{row}");
        }
    }
}
