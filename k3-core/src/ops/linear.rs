//! A matrix that arrives in blocks of rows, times the vectors of a chunk.
//!
//! A block's rows are cut into parts for the executor; a row's dot products are one kernel's work,
//! so neither blocks nor parts can be seen in a result.

use crate::backend::{Backend, Panel};
use crate::exec::{Executor, Parts};
use crate::view::{Bf16Matrix, MatrixRows};

/// Parts per thread: enough that a thread which was held up does not hold up the rest.
const PARTS_PER_THREAD: usize = 4;

/// Rows per part for `rows` rows on `width` threads. Results do not depend on it.
#[must_use]
pub(crate) fn part_rows(rows: usize, width: usize) -> usize {
    rows.div_ceil(width.max(1) * PARTS_PER_THREAD).next_multiple_of(8)
}

/// Some rows of a matrix of either encoding.
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
/// * `tile`: scratch for `[some rows, positions]`, unused for one position;
/// * `out`: `[positions, rows of the whole matrix]`, of which columns `first..` are written.
///
/// # Panics
/// If `out` has no room for the block's rows, or the panel is one for other weights.
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
