//! The arithmetic of the model as a table of kernels, chosen once for a machine.
//!
//! A [`Backend`] is a name and a table of functions, each of which does the work of a block of rows,
//! so that choosing costs nothing. Whoever holds a value holds the proof that the CPU features it
//! needs were detected: the constructors are the only way to one. Its methods check every length and
//! are safe; a length that does not fit is a bug of the caller and panics.
//!
//! *All backends give the same bits* (any NaN counted as one value). [`Backend::SCALAR`] is the
//! definition, plain loops that read like the contract:
//!
//! * A dot product has sixteen f64 accumulators. Element `i` goes to lane `i mod 16`, in rising `i`.
//!   The lanes are folded by one tree (`l[j] += l[j + 8]`, then 4, 2, 1) and rounded to f32 once.
//! * An MXFP4 dot product takes, per group of 32 and lane `j` of 16, `p = v[j] x[j] + v[j+16] x[j+16]`
//!   with unscaled weights, then `acc[j] += scale * p`. A scale byte of 255 counts as 0.
//! * A sum across rows has one f64 accumulator for each output, terms in rising index, rounded once.
//!
//! ```
//! use k3_core::backend::Backend;
//!
//! let (a, b): (Vec<f32>, Vec<f32>) = (0..100).map(|i| (i as f32 / 7.0, 3.0 - i as f32)).unzip();
//! for backend in Backend::available() {
//!     assert_eq!(backend.dot(&a, &b).to_bits(), Backend::SCALAR.dot(&a, &b).to_bits());
//! }
//! ```
//!
//! The environment must round to nearest and must not flush subnormals; that is what Rust assumes too.
//!
//! What is not here: what the numbers mean ([`ops`](crate::ops), [`model`](crate::model)) and how rows are
//! spread over threads ([`exec`](crate::exec)). A product with a matrix is called on slices of its rows, by any number of
//! threads, with one shared [`Panel`].
#![expect(unsafe_code, reason = "kernels for CPU features that the holder of a Backend has detected")]

// Without SSE2 the target passes floats in integer registers (kernels, firmware), and the compiler
// has no vectors to lower these to.
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod avx2;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod avx512;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod cache;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod coded;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod lanes;
mod scalar;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
mod tiles;

use crate::coded::CodedMatrix;
use crate::math;
use crate::view::{Bf16Matrix, F32Matrix, GROUP, Mxfp4Matrix};

/// Accumulators of a dot product.
pub(crate) const LANES: usize = 16;
/// Positions that lie together in a panel.
const TILE: usize = 4;

/// Adds up the sixteen lanes of a dot product in the one order of the contract.
pub(crate) fn fold(mut lanes: [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        for j in 0..half {
            lanes[j] += lanes[j + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Which weights a [`Panel`] is arranged for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// bf16: of every sixteen columns the eight even ones, then the eight odd ones.
    Bf16,
    /// MXFP4: columns in their own order.
    Mxfp4,
}

impl Layout {
    /// Where column `j` of a block of sixteen lies in its block.
    const fn place(self, j: usize) -> usize {
        match self {
            Self::Bf16 => j / 2 + j % 2 * (LANES / 2),
            Self::Mxfp4 => j,
        }
    }
}

/// Activation vectors in f64, arranged for the kernels: made once, read for every row of a matrix.
///
/// Positions lie in tiles of four (the last tile may have fewer); in a tile, block after block of
/// sixteen columns; in a block, position after position. Columns are padded with zeros to a multiple
/// of 32. All backends share one arrangement, so a panel may be packed by one and used by another.
#[derive(Debug, Clone, Copy)]
pub struct Panel<'a> {
    layout: Layout,
    cols: usize,
    positions: usize,
    data: &'a [f64],
}

impl Panel<'_> {
    /// How many f64 a panel of any layout takes; `None` if that overflows.
    #[must_use]
    pub const fn len(cols: usize, positions: usize) -> Option<usize> {
        match cols.checked_next_multiple_of(GROUP) {
            Some(padded) => padded.checked_mul(positions),
            None => None,
        }
    }

    /// Columns of the matrix the panel can be multiplied with.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Number of activation vectors.
    #[must_use]
    pub const fn positions(&self) -> usize {
        self.positions
    }

    /// Which weights the panel is arranged for.
    #[must_use]
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Columns with their padding.
    const fn padded(&self) -> usize {
        self.cols.next_multiple_of(GROUP)
    }

    /// The tile that starts at position `first`, a multiple of [`TILE`], and how many positions it has.
    fn tile(&self, first: usize) -> (&[f64], usize) {
        let count = TILE.min(self.positions - first);
        (&self.data[first * self.padded()..][..count * self.padded()], count)
    }

    /// Block `block` of sixteen columns of `position`.
    fn block(&self, position: usize, block: usize) -> &[f64] {
        let (tile, count) = self.tile(position / TILE * TILE);
        &tile[(block * count + position % TILE) * LANES..][..LANES]
    }
}

/// The kernels. Every entry may rely on the lengths its method of [`Backend`] checks, and must not be
/// called unless the CPU features of its backend were detected: that is why the pointers are unsafe.
struct Table {
    name: &'static str,
    dot: unsafe fn(&[f32], &[f32]) -> f32,
    sum_squares: unsafe fn(&[f32]) -> f64,
    sum: unsafe fn(&[f32]) -> f64,
    matmul_bf16: unsafe fn(Bf16Matrix<'_>, &Panel<'_>, &mut [f32]),
    matmul_coded: unsafe fn(CodedMatrix<'_>, &Panel<'_>, &mut [f32]),
    matmul_mxfp4: unsafe fn(Mxfp4Matrix<'_>, &Panel<'_>, &mut [f32]),
    matmul_f32: unsafe fn(F32Matrix<'_>, &[f32], &mut [f32]),
    sum_rows_f32: unsafe fn(&[f32], &[f32], usize, &mut [f32]),
    sum_rows_bf16: unsafe fn(&[f32], Bf16Matrix<'_>, &mut [f32]),
    kda_step: unsafe fn(&mut [f32], &KdaStep<'_>, &mut [f32]),
    conv_silu: unsafe fn(&[f32], &[f32], &mut [f32]),
    situ: unsafe fn(&mut [f32], &[f32], f32, f32),
    sigmoid: unsafe fn(&mut [f32]),
    mul_sigmoid: unsafe fn(&mut [f32], &[f32]),
    exp_sub: unsafe fn(&mut [f32], f32),
    kda_alpha: unsafe fn(&[f32], &[f32], f32, f32, &mut [f32]),
    decode_bf16: unsafe fn(&[u8], &mut [f32]),
    multiply_chain: unsafe fn(usize) -> f64,
}

/// What a step of the KDA recurrence reads besides the state: one head, one position.
#[derive(Clone, Copy)]
struct KdaStep<'a> {
    /// `[dk]`
    alpha: &'a [f32],
    beta: f32,
    /// `[dk]`
    q: &'a [f32],
    /// `[dk]`
    k: &'a [f32],
    /// `[dv]`
    v: &'a [f32],
}

/// A set of kernels together with the proof that this machine can run them.
#[derive(Clone, Copy)]
pub struct Backend {
    table: &'static Table,
}

impl core::fmt::Debug for Backend {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Backend({})", self.name())
    }
}

impl PartialEq for Backend {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Backend {}

/// Choosing.
impl Backend {
    /// Plain loops: the definition. Runs anywhere.
    pub const SCALAR: Self = Self { table: &scalar::TABLE };

    /// 256-bit kernels, if the CPU and the operating system have AVX2 and FMA.
    #[must_use]
    pub fn avx2() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
        if avx2::detected() {
            return Some(Self { table: &avx2::TABLE });
        }
        None
    }

    /// 512-bit kernels, if the CPU and the operating system have AVX-512 F, DQ, BW and VL.
    #[must_use]
    pub fn avx512() -> Option<Self> {
        #[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
        if avx512::detected() {
            return Some(Self { table: &avx512::TABLE });
        }
        None
    }

    /// The widest backend of this machine.
    #[must_use]
    pub fn detect() -> Self {
        Self::avx512().or_else(Self::avx2).unwrap_or(Self::SCALAR)
    }

    /// All backends of this machine, the scalar one first.
    pub fn available() -> impl Iterator<Item = Self> {
        [Some(Self::SCALAR), Self::avx2(), Self::avx512()].into_iter().flatten()
    }

    /// The backend of that [`name`](Self::name), if this machine has it.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::available().find(|backend| backend.name() == name)
    }

    /// `scalar`, `avx2` or `avx512`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.table.name
    }
}

/// Dot products: the lane rule.
impl Backend {
    /// The dot product of two vectors.
    ///
    /// # Panics
    /// If their lengths differ.
    #[must_use]
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "the vectors differ in length");
        // SAFETY: holding `self` proves the features of its table; the lengths were checked.
        unsafe { (self.table.dot)(a, b) }
    }

    /// The sum of the squares, not rounded to f32.
    #[must_use]
    pub fn sum_squares(self, x: &[f32]) -> f64 {
        // SAFETY: holding `self` proves the features of its table.
        unsafe { (self.table.sum_squares)(x) }
    }

    /// The sum, by the lane rule over the index, not rounded to f32.
    #[must_use]
    pub fn sum(self, x: &[f32]) -> f64 {
        // SAFETY: holding `self` proves the features of its table.
        unsafe { (self.table.sum)(x) }
    }

    /// Arranges `x`, `[positions, cols]`, in the front of `buf` for the `matmul` methods.
    ///
    /// Any backend makes the same panel. A `buf` that starts on a cache line is faster.
    ///
    /// # Panics
    /// If `x` is not `positions * cols` long or `buf` is shorter than [`Panel::len`].
    #[must_use]
    pub fn pack<'p>(self, layout: Layout, x: &[f32], cols: usize, positions: usize, buf: &'p mut [f64]) -> Panel<'p> {
        let len = Panel::len(cols, positions).expect("a panel that fits the address space");
        assert_eq!(x.len(), cols * positions, "activations of another shape");
        let (data, _) = buf.split_at_mut_checked(len).expect("a buffer of Panel::len");
        let padded = cols.next_multiple_of(GROUP);
        for first in (0..positions).step_by(TILE) {
            let count = TILE.min(positions - first);
            let tile = &mut data[first * padded..][..count * padded];
            for (b, block) in tile.chunks_exact_mut(LANES).enumerate() {
                let (from, to) = ((b / count * LANES).min(cols), ((b / count + 1) * LANES).min(cols));
                let row = &x[(first + b % count) * cols..][from..to];
                pack_block(layout, row, block);
            }
        }
        Panel { layout, cols, positions, data }
    }

    /// `out = w x` for bf16 weights: `out` is `[rows, positions]`.
    ///
    /// # Panics
    /// If the panel has another layout or number of columns than `w`, or `out` another length.
    pub fn matmul_bf16(self, w: Bf16Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
        check_matmul(w.rows(), w.cols(), Layout::Bf16, x, out);
        if !out.is_empty() {
            // SAFETY: holding `self` proves the features of its table; the shapes were checked.
            unsafe { (self.table.matmul_bf16)(w, x, out) }
        }
    }

    /// `out = w x` for coded bf16 weights: `out` is `[rows, positions]`. The bits are those of
    /// [`Backend::matmul_bf16`] with the matrix that was coded.
    ///
    /// # Panics
    /// If the panel has another layout or number of columns than `w`, or `out` another length.
    pub fn matmul_coded(self, w: CodedMatrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
        check_matmul(w.rows(), w.cols(), Layout::Bf16, x, out);
        if !out.is_empty() {
            // SAFETY: holding `self` proves the features of its table; the shapes were checked.
            unsafe { (self.table.matmul_coded)(w, x, out) }
        }
    }

    /// `out = w x` for MXFP4 weights: `out` is `[rows, positions]`.
    ///
    /// # Panics
    /// If the panel has another layout or number of columns than `w`, or `out` another length.
    pub fn matmul_mxfp4(self, w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
        check_matmul(w.rows(), w.cols(), Layout::Mxfp4, x, out);
        if !out.is_empty() {
            // SAFETY: holding `self` proves the features of its table; the shapes were checked.
            unsafe { (self.table.matmul_mxfp4)(w, x, out) }
        }
    }

    /// `out = w x` for a matrix that was computed here (the latent cache) and one vector.
    ///
    /// # Panics
    /// If `x` is not as long as a row or `out` not as long as a column.
    pub fn matmul_f32(self, w: F32Matrix<'_>, x: &[f32], out: &mut [f32]) {
        assert_eq!(x.len(), w.cols(), "a vector of another length than the rows");
        assert_eq!(out.len(), w.rows(), "an output of another length than the columns");
        // SAFETY: holding `self` proves the features of its table; the shapes were checked.
        unsafe { (self.table.matmul_f32)(w, x, out) }
    }
}

/// Sums across rows: one accumulator for each output.
impl Backend {
    /// `out[e] = sum_j coef[j] * rows[j * stride + e]`, `j` rising.
    ///
    /// # Panics
    /// If `rows` ends before the last row does.
    pub fn sum_rows_f32(self, coef: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
        if let Some(last) = coef.len().checked_sub(1) {
            let end = last.checked_mul(stride).and_then(|start| start.checked_add(out.len()));
            assert!(end.is_some_and(|end| end <= rows.len()), "rows that end before the last one does");
        }
        // SAFETY: holding `self` proves the features of its table; all rows lie inside `rows`.
        unsafe { (self.table.sum_rows_f32)(coef, rows, stride, out) }
    }

    /// `out[e] = sum_j coef[j] * rows[j][e]`, `j` rising.
    ///
    /// # Panics
    /// If `coef` is not as long as a column or `out` not as long as a row.
    pub fn sum_rows_bf16(self, coef: &[f32], rows: Bf16Matrix<'_>, out: &mut [f32]) {
        assert_eq!(coef.len(), rows.rows(), "a coefficient for each row");
        assert_eq!(out.len(), rows.cols(), "an output of another length than the rows");
        // SAFETY: holding `self` proves the features of its table; the shapes were checked.
        unsafe { (self.table.sum_rows_bf16)(coef, rows, out) }
    }

    /// One step of the KDA recurrence (spec 3.3 step 6) on the state `s`, `[dk, dv]`, of one head.
    ///
    /// `alpha`, `q` and `k` are `[dk]`, `v` and `o` are `[dv]`. `S = f32(alpha S)`, `u = S^T k`,
    /// `delta = f32(beta f32(v - u))`, `S = f32(S + k delta)`, `o = S^T q`: the output is read after
    /// the write.
    ///
    /// # Panics
    /// If a slice does not have the length its shape says.
    #[expect(clippy::too_many_arguments, reason = "the letters of the formula")]
    pub fn kda_step(self, s: &mut [f32], alpha: &[f32], beta: f32, q: &[f32], k: &[f32], v: &[f32], o: &mut [f32]) {
        let (dk, dv) = (k.len(), v.len());
        assert!(alpha.len() == dk && q.len() == dk && o.len() == dv, "vectors of other lengths than the head");
        assert_eq!(Some(s.len()), dk.checked_mul(dv), "a state of another shape");
        // SAFETY: holding `self` proves the features of its table; the shapes were checked.
        unsafe { (self.table.kda_step)(s, &KdaStep { alpha, beta, q, k, v }, o) }
    }

    /// The causal convolution of every channel and its SiLU: `out` is `[channels]`.
    ///
    /// `taps` is `[channels, k]` and `window` is `[k, channels]`, oldest first, the last row being
    /// the current input. The sum over the taps rises with time and is rounded once.
    ///
    /// # Panics
    /// If `taps` and `window` differ in length or are not a whole number of channels.
    pub fn conv_silu(self, taps: &[f32], window: &[f32], out: &mut [f32]) {
        assert_eq!(taps.len(), window.len(), "taps and window differ in length");
        assert_eq!(taps.len().checked_rem(out.len()).unwrap_or(taps.len()), 0, "taps of other channels");
        if !out.is_empty() {
            // SAFETY: holding `self` proves the features of its table; both inputs are
            // `out.len()` times the same number of taps long.
            unsafe { (self.table.conv_silu)(taps, window, out) }
        }
    }
}

/// Functions of single elements, the bodies of [`math`].
impl Backend {
    /// `gate[i] = situ(gate[i], up[i])`, see [`math::situ`].
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn situ(self, gate: &mut [f32], up: &[f32], b1: f32, b2: f32) {
        assert_eq!(gate.len(), up.len(), "gate and up differ in length");
        // SAFETY: holding `self` proves the features of its table; the lengths were checked.
        unsafe { (self.table.situ)(gate, up, b1, b2) }
    }

    /// `x[i] = sigmoid(x[i])`.
    pub fn sigmoid(self, x: &mut [f32]) {
        // SAFETY: holding `self` proves the features of its table.
        unsafe { (self.table.sigmoid)(x) }
    }

    /// `x[i] *= sigmoid(gate[i])`, the sigmoid rounded to f32 first.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn mul_sigmoid(self, x: &mut [f32], gate: &[f32]) {
        assert_eq!(x.len(), gate.len(), "a gate of another length");
        // SAFETY: holding `self` proves the features of its table; the lengths were checked.
        unsafe { (self.table.mul_sigmoid)(x, gate) }
    }

    /// `x[i] = exp(f32(x[i] - max))`.
    pub fn exp_sub(self, x: &mut [f32], max: f32) {
        // SAFETY: holding `self` proves the features of its table.
        unsafe { (self.table.exp_sub)(x, max) }
    }

    /// The decay of the key channels of one head (spec 3.3 step 4):
    /// `out[i] = exp(lower * sigmoid(exp(a_log) * (z[i] + dt_bias[i])))`, every step rounded to f32.
    ///
    /// # Panics
    /// If the slices differ in length.
    pub fn kda_alpha(self, z: &[f32], dt_bias: &[f32], a_log: f32, lower: f32, out: &mut [f32]) {
        assert!(z.len() == out.len() && dt_bias.len() == out.len(), "channels differ in number");
        // SAFETY: holding `self` proves the features of its table; the lengths were checked.
        unsafe { (self.table.kda_alpha)(z, dt_bias, math::exp(a_log), lower, out) }
    }

    /// Decodes little-endian bf16.
    ///
    /// # Panics
    /// If `bytes` is not two bytes for each element of `out`.
    pub fn decode_bf16(self, bytes: &[u8], out: &mut [f32]) {
        assert!(bytes.len().is_multiple_of(2) && bytes.len() / 2 == out.len(), "two bytes for each element");
        // SAFETY: holding `self` proves the features of its table; the lengths were checked.
        unsafe { (self.table.decode_bf16)(bytes, out) }
    }
}

/// For benchmarks.
impl Backend {
    /// Products of a round of [`multiply_chain`](Self::multiply_chain).
    pub const CHAIN_PRODUCTS: usize = 6 * LANES;

    /// `rounds` times 96 products and additions, in chains enough to hide the latency and none on memory:
    /// the speed of the multipliers, of which several positions can reach a part. The value means nothing.
    #[must_use]
    pub fn multiply_chain(self, rounds: usize) -> f64 {
        // SAFETY: holding `self` proves the features of its table.
        unsafe { (self.table.multiply_chain)(rounds) }
    }
}

/// Writes up to sixteen columns of one position to their places and zeros to the rest.
fn pack_block(layout: Layout, row: &[f32], block: &mut [f64]) {
    if row.len() < LANES {
        block.fill(0.0);
    }
    for (j, &x) in row.iter().enumerate() {
        block[layout.place(j)] = f64::from(x);
    }
}

fn check_matmul(rows: usize, cols: usize, layout: Layout, x: &Panel<'_>, out: &[f32]) {
    assert_eq!(x.layout, layout, "a panel packed for other weights");
    assert_eq!(x.cols, cols, "a panel of another number of columns");
    assert_eq!(Some(out.len()), rows.checked_mul(x.positions), "an output of another shape");
}
