//! A matrix that arrives in blocks of rows, times the vectors of a chunk.
//!
//! A block's rows are cut into parts for the executor; a row's dot products are one kernel's work,
//! so neither blocks nor parts can be seen in a result.
//!
//! ```
//! use k3_core::backend::{Backend, Layout, Panel};
//! use k3_core::exec::Serial;
//! use k3_core::ops::linear::multiply;
//! use k3_core::view::Bf16Matrix;
//!
//! // [[1, 2], [0, -1]] as it is stored.
//! let bytes = [0x80, 0x3f, 0x00, 0x40, 0x00, 0x00, 0x80, 0xbf];
//! let w = Bf16Matrix::new(&bytes, 2, 2)?;
//! let (backend, mut buf) = (Backend::detect(), vec![0.0; Panel::len(2, 1).unwrap_or(0)]);
//! let x = backend.pack(Layout::Bf16, &[3.0, 5.0], 2, 1, &mut buf);
//! let mut y = [0.0; 2];
//! multiply(backend, &Serial, w, 0, &x, &mut [], &mut y);
//! assert_eq!(y, [13.0, -5.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use crate::backend::{Backend, Panel};
use crate::exec::{Executor, Parts};
use crate::view::{Bf16Matrix, MatrixRows};

/// Parts per thread: enough that a thread which was held up does not hold up the rest.
const PARTS_PER_THREAD: usize = 4;

/// Rows per part for `rows` rows on `width` threads. Results do not depend on it.
#[must_use]
pub(crate) fn part_rows(rows: usize, width: usize) -> usize {
    rows.div_ceil(width.max(1).saturating_mul(PARTS_PER_THREAD)).next_multiple_of(8)
}

/// Some rows of a matrix, however its weights are coded.
pub trait RowBlock: Copy + Sync {
    /// Number of rows.
    fn rows(self) -> usize;
    /// `out[row, position] = rows first.. of the block times x`, for `out.len() / positions` rows.
    fn multiply(self, backend: Backend, first: usize, x: &Panel<'_>, out: &mut [f32]);
}

impl RowBlock for Bf16Matrix<'_> {
    fn rows(self) -> usize {
        Bf16Matrix::rows(&self)
    }

    fn multiply(self, backend: Backend, first: usize, x: &Panel<'_>, out: &mut [f32]) {
        backend.matmul_bf16(self.slice(first..first + out.len() / x.positions()), x, out);
    }
}

impl RowBlock for MatrixRows<'_> {
    fn rows(self) -> usize {
        MatrixRows::rows(&self)
    }

    fn multiply(self, backend: Backend, first: usize, x: &Panel<'_>, out: &mut [f32]) {
        match self {
            Self::Raw(m) => m.multiply(backend, first, x, out),
            Self::Coded(m) => backend.matmul_coded(m.slice(first..first + out.len() / x.positions()), x, out),
        }
    }
}

impl RowBlock for crate::view::Mxfp4Matrix<'_> {
    fn rows(self) -> usize {
        Self::rows(&self)
    }

    fn multiply(self, backend: Backend, first: usize, x: &Panel<'_>, out: &mut [f32]) {
        backend.matmul_mxfp4(self.slice(first..first + out.len() / x.positions()), x, out);
    }
}

/// Multiplies one block, which starts at row `first` of its matrix, with all positions of `x`.
///
/// * `tile`: scratch for `[some rows, positions]`, at least one row of them; unused for one position;
/// * `out`: `[positions, rows of the whole matrix]`, of which columns `first..` are written.
///
/// # Panics
/// If `out` has no room for the block's rows, `tile` for one row, or the panel is empty or one for other weights.
pub fn multiply<X: Executor>(
    backend: Backend,
    exec: &X,
    block: impl RowBlock,
    first: usize,
    x: &Panel<'_>,
    tile: &mut [f32],
    out: &mut [f32],
) {
    let n = x.positions();
    if n == 1 {
        let out = &mut out[first..first + block.rows()];
        let per = part_rows(out.len(), exec.width());
        exec.run(Parts::new(out, per), |i, part| block.multiply(backend, i * per, x, part));
        return;
    }
    assert!(n > 0 && tile.len() >= n, "a product with {n} positions, and a tile for {}", tile.len());
    let all_rows = out.len() / n;
    let mut done = 0;
    while done < block.rows() {
        let rows = (tile.len() / n).min(block.rows() - done);
        let tile = &mut tile[..rows * n];
        let per = part_rows(rows, exec.width());
        exec.run(Parts::new(tile, per * n), |i, part| block.multiply(backend, done + i * per, x, part));
        let tile = &*tile;
        exec.run(Parts::new(out, all_rows), |t, out| {
            for (o, products) in out[first + done..].iter_mut().zip(tile.chunks_exact(n)) {
                *o = products[t];
            }
        });
        done += rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Layout;
    use crate::exec::Serial;
    use std::vec;

    /// Without room for a row nothing was done, again and again.
    #[test]
    #[should_panic(expected = "a product with 2 positions, and a tile for 1")]
    fn a_tile_without_a_row_is_refused() {
        let w = Bf16Matrix::new(&[0; 4], 1, 2).unwrap();
        let mut buf = vec![0.0; Panel::len(2, 2).unwrap()];
        let x = Backend::SCALAR.pack(Layout::Bf16, &[1.0; 4], 2, 2, &mut buf);
        multiply(Backend::SCALAR, &Serial, w, 0, &x, &mut [0.0], &mut [0.0; 2]);
    }
}
