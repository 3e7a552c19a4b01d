//! The definition of every kernel: plain loops, nothing shared with the SIMD back ends but the last
//! seven functions, which work on single elements and are compiled again for wider registers.
//!
//! All functions are safe. They become `unsafe fn` pointers in the table because other back ends'
//! functions are.

use super::{Backend, KdaStep, LANES, Layout, Panel, Table, fold};
use crate::coded::{self, CodedMatrix};
use crate::math::{self, round};
use crate::view::{Bf16Matrix, F32Matrix, GROUP, Mxfp4Matrix};

pub(super) static TABLE: Table = Table {
    name: "scalar",
    dot,
    sum_squares,
    sum,
    matmul_bf16,
    matmul_coded,
    matmul_mxfp4,
    matmul_f32,
    sum_rows_f32,
    sum_rows_bf16,
    kda_step,
    conv_silu,
    situ,
    sigmoid,
    mul_sigmoid,
    exp_sub,
    kda_alpha,
    decode_bf16,
    multiply_chain,
};

/// The sixteen E2M1 values by their code (spec section 4).
pub(super) const E2M1: [f64; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// Columns of the KDA state that one pass of a step covers.
const COLUMNS: usize = 64;

/// 2^(byte - 127), and 0 for the NaN of E8M0.
fn scale(byte: u8) -> f64 {
    if byte == 255 { 0.0 } else { f64::from_bits((u64::from(byte) + 1023 - 127) << 52) }
}

#[inline(always)]
fn bf16(low: u8, high: u8) -> f32 {
    half::bf16::from_le_bytes([low, high]).to_f32()
}

fn dot_lanes(a: &[f32], b: &[f32]) -> f64 {
    let mut lanes = [0.0; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        for ((lane, &a), &b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += f64::from(a) * f64::from(b);
        }
    }
    fold(lanes)
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    round(dot_lanes(a, b))
}

fn sum_squares(x: &[f32]) -> f64 {
    dot_lanes(x, x)
}

fn sum(x: &[f32]) -> f64 {
    let mut lanes = [0.0; LANES];
    for x in x.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(x) {
            *lane += f64::from(x);
        }
    }
    fold(lanes)
}

fn matmul_bf16(w: Bf16Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(x.positions).enumerate() {
        for (p, out) in out.iter_mut().enumerate() {
            let mut lanes = [0.0; LANES];
            for (b, w) in w.row(r).chunks(2 * LANES).enumerate() {
                let x = x.block(p, b);
                for (j, w) in w.chunks_exact(2).enumerate() {
                    lanes[j] += f64::from(bf16(w[0], w[1])) * x[Layout::Bf16.place(j)];
                }
            }
            *out = round(fold(lanes));
        }
    }
}

fn matmul_coded(w: CodedMatrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(x.positions).enumerate() {
        for (p, out) in out.iter_mut().enumerate() {
            let mut lanes = [0.0; LANES];
            for g in 0..w.groups_per_row() {
                let mut group = [0; 2 * coded::GROUP];
                let count = w.decode_group(r, g, &mut group);
                for (i, w) in group.chunks_exact(2).take(count).enumerate() {
                    let (b, j) = (2 * g + i / LANES, i % LANES);
                    lanes[j] += f64::from(bf16(w[0], w[1])) * x.block(p, b)[Layout::Bf16.place(j)];
                }
            }
            *out = round(fold(lanes));
        }
    }
}

fn matmul_mxfp4(w: Mxfp4Matrix<'_>, x: &Panel<'_>, out: &mut [f32]) {
    for (r, out) in out.chunks_exact_mut(x.positions).enumerate() {
        let (packed, scales) = w.row(r);
        for (p, out) in out.iter_mut().enumerate() {
            let mut lanes = [0.0; LANES];
            for (g, (packed, &byte)) in packed.chunks_exact(GROUP / 2).zip(scales).enumerate() {
                let (low, high) = (x.block(p, 2 * g), x.block(p, 2 * g + 1));
                let scale = scale(byte);
                for (j, lane) in lanes.iter_mut().enumerate() {
                    let nibble = |byte: u8| E2M1[usize::from(byte >> (4 * (j % 2)) & 15)];
                    let (v, v16) = (nibble(packed[j / 2]), nibble(packed[j / 2 + LANES / 2]));
                    *lane += scale * (v * low[j] + v16 * high[j]);
                }
            }
            *out = round(fold(lanes));
        }
    }
}

fn matmul_f32(w: F32Matrix<'_>, x: &[f32], out: &mut [f32]) {
    for (r, out) in out.iter_mut().enumerate() {
        *out = dot(w.row(r), x);
    }
}

fn sum_rows_f32(coef: &[f32], rows: &[f32], stride: usize, out: &mut [f32]) {
    for (e, out) in out.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (j, &c) in coef.iter().enumerate() {
            sum += f64::from(c) * f64::from(rows[j * stride + e]);
        }
        *out = round(sum);
    }
}

fn sum_rows_bf16(coef: &[f32], rows: Bf16Matrix<'_>, out: &mut [f32]) {
    for (e, out) in out.iter_mut().enumerate() {
        let mut sum = 0.0;
        for (j, &c) in coef.iter().enumerate() {
            let row = rows.row(j);
            sum += f64::from(c) * f64::from(bf16(row[2 * e], row[2 * e + 1]));
        }
        *out = round(sum);
    }
}

fn kda_step(s: &mut [f32], step: &KdaStep<'_>, o: &mut [f32]) {
    let dv = o.len();
    for first in (0..dv).step_by(COLUMNS) {
        let columns = first..dv.min(first + COLUMNS);
        let mut sums = [0.0; COLUMNS];
        for (i, (&alpha, &k)) in step.alpha.iter().zip(step.k).enumerate() {
            for (s, sum) in s[i * dv..][columns.clone()].iter_mut().zip(&mut sums) {
                *s *= alpha;
                *sum += f64::from(*s) * f64::from(k);
            }
        }
        let mut delta = [0.0; COLUMNS];
        for ((delta, &v), &u) in delta.iter_mut().zip(&step.v[columns.clone()]).zip(&sums) {
            *delta = step.beta * (v - round(u));
        }
        sums = [0.0; COLUMNS];
        for (i, (&q, &k)) in step.q.iter().zip(step.k).enumerate() {
            for ((s, sum), &delta) in s[i * dv..][columns.clone()].iter_mut().zip(&mut sums).zip(&delta) {
                *s = round(f64::from(*s) + f64::from(k) * f64::from(delta));
                *sum += f64::from(*s) * f64::from(q);
            }
        }
        for (o, &sum) in o[columns].iter_mut().zip(&sums) {
            *o = round(sum);
        }
    }
}

fn multiply_chain(rounds: usize) -> f64 {
    let mut sums = [core::hint::black_box(1.0); Backend::CHAIN_PRODUCTS];
    let factor = core::hint::black_box(0.5);
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = *sum * factor + 1.0;
        }
    }
    sums.iter().sum()
}

#[inline(always)]
pub(super) fn conv_silu(taps: &[f32], window: &[f32], out: &mut [f32]) {
    let channels = out.len();
    let k = taps.len() / channels;
    for (c, out) in out.iter_mut().enumerate() {
        let mut sum = 0.0;
        for j in 0..k {
            sum += f64::from(taps[c * k + j]) * f64::from(window[j * channels + c]);
        }
        *out = round(sum);
    }
    // A loop of its own, which the other back ends' registers fit.
    for out in out {
        *out = math::silu(*out);
    }
}

#[inline(always)]
pub(super) fn situ(gate: &mut [f32], up: &[f32], b1: f32, b2: f32) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = math::situ(*gate, up, b1, b2);
    }
}

#[inline(always)]
pub(super) fn sigmoid(x: &mut [f32]) {
    for x in x {
        *x = math::sigmoid(*x);
    }
}

#[inline(always)]
pub(super) fn mul_sigmoid(x: &mut [f32], gate: &[f32]) {
    for (x, &gate) in x.iter_mut().zip(gate) {
        *x *= math::sigmoid(gate);
    }
}

#[inline(always)]
pub(super) fn exp_sub(x: &mut [f32], max: f32) {
    for x in x {
        *x = math::exp(*x - max);
    }
}

#[inline(always)]
pub(super) fn kda_alpha(z: &[f32], dt_bias: &[f32], rate: f32, lower: f32, out: &mut [f32]) {
    for ((out, &z), &dt_bias) in out.iter_mut().zip(z).zip(dt_bias) {
        *out = math::kda_alpha(z, dt_bias, rate, lower);
    }
}

#[inline(always)]
pub(super) fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *out = bf16(bytes[0], bytes[1]);
    }
}
