//! How fast the products with a matrix are, beside the speed at which memory can be read.
//!
//! Products run as in the engine: a matrix at a time, cut into parts of rows for the executor by the
//! core's own rule, so the hand-off between threads is in the figure. One after the other they walk
//! over more memory than a cache holds.

use super::{Rate, Task, in_turns, read_all};
use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::exec::Executor;
use k3_core::math::canonical_bits;
use k3_core::ops::linear::multiply;
use k3_core::view::{Bf16Matrix, GROUP, Mxfp4Matrix};
use std::hint::black_box;
use std::time::Duration;

/// How weights are coded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// The trunk's.
    Bf16,
    /// The routed experts'.
    Mxfp4,
}

impl Coding {
    /// `bf16` or `mxfp4`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Mxfp4 => "mxfp4",
        }
    }

    const fn layout(self) -> Layout {
        match self {
            Self::Bf16 => Layout::Bf16,
            Self::Mxfp4 => Layout::Mxfp4,
        }
    }
}

/// A matrix of the released model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// How it is coded.
    pub coding: Coding,
    /// Its rows.
    pub rows: usize,
    /// Its columns, whole groups of 32.
    pub cols: usize,
}

/// The shapes that nearly all of the released model consists of.
pub const RELEASED: [Shape; 5] = [
    Shape { coding: Coding::Bf16, rows: 12288, cols: 7168 },
    Shape { coding: Coding::Bf16, rows: 7168, cols: 12288 },
    Shape { coding: Coding::Bf16, rows: 6144, cols: 7168 },
    Shape { coding: Coding::Mxfp4, rows: 3072, cols: 3584 },
    Shape { coding: Coding::Mxfp4, rows: 3584, cols: 3072 },
];

/// A matrix as the trunk has them, with fewer rows: what machines with little memory are measured by.
pub const SMALL: Shape = Shape { rows: 1536, ..RELEASED[0] };

/// What [`measure`] takes for inputs and outputs at most, besides the weights, if no case has more than eight
/// positions (bytes).
pub const BESIDE: u64 = 8_000_000;

impl Shape {
    /// Bytes of codes and of scales.
    const fn parts(self) -> (usize, usize) {
        let weights = self.rows * self.cols;
        match self.coding {
            Coding::Bf16 => (weights * 2, 0),
            Coding::Mxfp4 => (weights / 2, weights / GROUP),
        }
    }

    /// Bytes of the matrix as it is stored.
    #[must_use]
    pub const fn bytes(self) -> usize {
        let (codes, scales) = self.parts();
        codes + scales
    }
}

/// What to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    /// The matrix.
    pub shape: Shape,
    /// Vectors it is multiplied with at once.
    pub positions: usize,
    /// By which kernels.
    pub backend: Backend,
}

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figure {
    /// What was timed.
    pub case: Case,
    /// Bytes of weights a second.
    pub bytes: Rate,
}

impl Figure {
    /// Products a second.
    #[must_use]
    pub fn products(&self) -> Rate {
        let Shape { rows, cols, .. } = self.case.shape;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let per_byte = (rows * cols * self.case.positions) as f64 / self.case.shape.bytes() as f64;
        Rate { best: self.bytes.best * per_byte, median: self.bytes.median * per_byte }
    }
}

/// Figures of the same run, and what they can be held against.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Bytes a second that the same threads read.
    pub read: Rate,
    /// Products a second of each backend's multipliers alone, all operands in registers.
    pub peaks: Vec<(Backend, Rate)>,
    /// One for each case.
    pub figures: Vec<Figure>,
}

impl Report {
    /// Products a second of a backend's multipliers; zero if it was not among the cases.
    #[must_use]
    pub fn peak(&self, backend: Backend) -> f64 {
        self.peaks.iter().find(|(b, _)| *b == backend).map_or(0.0, |(_, rate)| rate.best)
    }
}

/// A case could not be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelError {
    /// The memory to read from holds not even one of the matrices.
    TooSmall {
        /// The shape.
        shape: Shape,
        /// Bytes there are.
        bytes: usize,
    },
    /// A kernel's output is not the scalar one's.
    Wrong(Case),
}

impl std::fmt::Display for KernelError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooSmall { shape, bytes } => {
                let Shape { coding, rows, cols } = shape;
                write!(f, "{bytes} bytes of memory hold no {} matrix of {rows} x {cols}", coding.name())
            }
            Self::Wrong(Case { shape, positions, backend }) => {
                let Shape { coding, rows, cols } = shape;
                let (coding, backend) = (coding.name(), backend.name());
                write!(f, "the {backend} product with {coding} {rows} x {cols}, {positions} positions, is wrong")
            }
        }
    }
}

impl std::error::Error for KernelError {}

/// A case with its inputs and outputs.
struct Prepared {
    case: Case,
    panel: Vec<Line>,
    tile: Vec<f32>,
    out: Vec<f32>,
    next: usize,
}

/// Rows of the outputs that are compared with the scalar kernel's.
const CHECKED: usize = 16;
/// Rounds of the multipliers' chain.
const CHAIN: usize = 200_000;

impl Prepared {
    fn new(case: Case) -> Option<Self> {
        let Case { shape: Shape { rows, cols, .. }, positions, .. } = case;
        let lines = Line::of::<f64>(Panel::len(cols, positions)?)?;
        let (tile, out) = (vec![0.0; rows * positions], vec![0.0; rows * positions]);
        Some(Self { case, panel: vec![Line::ZERO; lines], tile, out, next: 0 })
    }

    /// Multiplies the next matrix of `data`.
    fn run(&mut self, data: &[u8], exec: &impl Executor, x: &[f32]) {
        let Case { shape, positions, backend } = self.case;
        let (bytes, (codes, _)) = (shape.bytes(), shape.parts());
        if self.next + bytes > data.len() {
            self.next = 0;
        }
        let data = &data[self.next..][..bytes];
        self.next += bytes.next_multiple_of(64);
        let buf = bytemuck::cast_slice_mut(&mut self.panel);
        let panel = backend.pack(shape.coding.layout(), &x[..shape.cols * positions], shape.cols, positions, buf);
        let (tile, out) = (&mut self.tile[..], &mut self.out[..]);
        match shape.coding {
            Coding::Bf16 => {
                if let Ok(w) = Bf16Matrix::new(data, shape.rows, shape.cols) {
                    multiply(backend, exec, w, 0, &panel, tile, out);
                }
            }
            Coding::Mxfp4 => {
                if let Ok(w) = Mxfp4Matrix::new(&data[..codes], &data[codes..], shape.rows, shape.cols) {
                    multiply(backend, exec, w, 0, &panel, tile, out);
                }
            }
        }
        black_box(&self.out);
    }

    /// Whether the first rows are those of the scalar kernel.
    fn is_right(&mut self, data: &[u8], exec: &impl Executor, x: &[f32]) -> bool {
        let Case { shape, positions, .. } = self.case;
        self.next = 0;
        self.run(data, exec, x);
        let rows = CHECKED.min(shape.rows);
        // The first rows of the whole matrix are a matrix, but MXFP4 scales lie behind all codes.
        let (codes, scales) = shape.parts();
        let (codes, scales) = (&data[..codes], &data[codes..][..scales]);
        let mut lines = vec![Line::ZERO; self.panel.len()];
        let (layout, x) = (shape.coding.layout(), &x[..shape.cols * positions]);
        let panel = Backend::SCALAR.pack(layout, x, shape.cols, positions, bytemuck::cast_slice_mut(&mut lines));
        let mut expected = vec![0.0; rows * positions];
        let part = |bytes: &[u8]| bytes.len() / shape.rows * rows;
        match shape.coding {
            Coding::Bf16 => match Bf16Matrix::new(&codes[..part(codes)], rows, shape.cols) {
                Ok(w) => Backend::SCALAR.matmul_bf16(w, &panel, &mut expected),
                Err(_) => return false,
            },
            Coding::Mxfp4 => {
                let (codes, scales) = (&codes[..part(codes)], &scales[..part(scales)]);
                match Mxfp4Matrix::new(codes, scales, rows, shape.cols) {
                    Ok(w) => Backend::SCALAR.matmul_mxfp4(w, &panel, &mut expected),
                    Err(_) => return false,
                }
            }
        }
        (0..rows * positions).all(|i| {
            let (row, position) = (i / positions, i % positions);
            canonical_bits(self.out[position * shape.rows + row]) == canonical_bits(expected[i])
        })
    }
}

/// Times the cases, in turns, for about `time` in all, on weights from `data` (see
/// [`weights`](super::weights)) and the threads of `exec`.
///
/// Each output is compared with the scalar kernel's first.
///
/// # Errors
/// [`KernelError`].
#[expect(clippy::cast_precision_loss, reason = "rates")]
pub fn measure(data: &[u8], exec: &impl Executor, cases: &[Case], time: Duration) -> Result<Report, KernelError> {
    let most = cases.iter().map(|c| c.shape.cols * c.positions).max().unwrap_or(0);
    let x: Vec<f32> = (0..most).map(|i| ((i * 7919 % 251) as f32 - 125.0) / 64.0).collect();
    let mut prepared = Vec::with_capacity(cases.len());
    for &case in cases {
        let small = KernelError::TooSmall { shape: case.shape, bytes: data.len() };
        if case.shape.bytes() > data.len() {
            return Err(small);
        }
        let mut one = Prepared::new(case).ok_or(small)?;
        if !one.is_right(data, exec, &x) {
            return Err(KernelError::Wrong(case));
        }
        prepared.push(one);
    }
    let mut backends: Vec<Backend> = Vec::new();
    for case in cases {
        if !backends.contains(&case.backend) {
            backends.push(case.backend);
        }
    }
    let read = Task { amount: data.len() as f64, run: Box::new(|| read_all(data, exec)) };
    let width = exec.width();
    let peaks = backends.iter().map(|&backend| {
        let run = move || {
            exec.run(k3_core::exec::Parts::new(&mut vec![0.0; width], 1), |_, sum| {
                sum[0] = backend.multiply_chain(CHAIN);
            });
        };
        Task { amount: (CHAIN * Backend::CHAIN_PRODUCTS * width) as f64, run: Box::new(run) }
    });
    let mut tasks: Vec<Task<'_>> = std::iter::once(read).chain(peaks).collect();
    for one in &mut prepared {
        // Short products are repeated, so that a clock's grain does not matter to who measures at all.
        let enough = if time.is_zero() { 0 } else { 32_000_000 };
        let times = (enough / one.case.shape.bytes()).max(1);
        let x = &x;
        let amount = (times * one.case.shape.bytes()) as f64;
        let run = move || (0..times).for_each(|_| one.run(data, exec, x));
        tasks.push(Task { amount, run: Box::new(run) });
    }
    let mut rates = in_turns(&mut tasks, time).into_iter();
    let read = rates.next().unwrap_or_default();
    let peaks = backends.into_iter().zip(rates.by_ref()).collect::<Vec<_>>();
    let figures = cases.iter().zip(rates).map(|(&case, bytes)| Figure { case, bytes }).collect();
    Ok(Report { read, peaks, figures })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::Rayon;
    use crate::measure::weights;
    use k3_core::exec::Serial;

    #[test]
    fn every_case_has_a_figure_and_is_checked() {
        let exec = Rayon::new(2).unwrap();
        let data = weights(1 << 20, &exec).unwrap();
        let mut cases = Vec::new();
        for backend in Backend::available() {
            for coding in [Coding::Bf16, Coding::Mxfp4] {
                for positions in [1, 3] {
                    cases.push(Case { shape: Shape { coding, rows: 40, cols: 96 }, positions, backend });
                }
            }
        }
        let report = measure(&data, &exec, &cases, Duration::ZERO).unwrap();
        assert_eq!(report.figures.iter().map(|f| f.case).collect::<Vec<_>>(), cases);
        assert!(report.read.best > 0.0 && cases.iter().all(|c| report.peak(c.backend) > 0.0));
        assert!(report.figures.iter().all(|f| f.bytes.best >= f.bytes.median && f.bytes.median > 0.0));
        let (one, three) = (&report.figures[0], &report.figures[1]);
        assert!((one.products().best / one.bytes.best - 0.5).abs() < 1e-12);
        assert!((three.products().best / three.bytes.best - 1.5).abs() < 1e-12);
    }

    #[test]
    fn memory_that_holds_no_matrix_is_refused() {
        let case = Case { shape: RELEASED[3], positions: 1, backend: Backend::SCALAR };
        let error = measure(&[0; 100], &Serial, &[case], Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "100 bytes of memory hold no mxfp4 matrix of 3072 x 3584");
        assert_eq!(RELEASED[3].bytes(), 3072 * 3584 / 2 + 3072 * 3584 / 32);
    }
}
