//! How fast the products with a matrix are, beside the speed at which memory can be read at all.
//!
//! ```text
//! cargo bench -p k3-core
//! ```
//!
//! One thread. Every product walks over several matrices in turn, so that weights come from memory
//! as they do in a model, and its output is compared with the scalar backend's before it is timed.
//! The best of several rounds is printed, in GB/s of weights and as a part of the read bandwidth of
//! the same round; with several positions also in products (GMAC/s).
#![expect(clippy::cast_precision_loss, reason = "counts and times are printed to three digits")]

use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::math::canonical_bits;
use k3_core::view::{Bf16Matrix, Mxfp4Matrix};
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 5;

/// Bytes from a seed; xorshift64*.
fn bytes(len: usize, mut seed: u64) -> Vec<u8> {
    let mut next = || {
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        seed.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}

fn activations(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 % 251) as f32 - 125.0) / 64.0).collect()
}

/// Seconds of the best round of `work`.
fn best(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// GB/s at which one thread reads `data`, as eight streams at a time to keep many lines in flight.
fn read_bandwidth(data: &[u8]) -> f64 {
    let (_, words, _) = bytemuck::pod_align_to::<u8, u64>(data);
    let part = words.len() / 8 / 8 * 8;
    let seconds = best(|| {
        let mut sums = [0u64; 8];
        for line in (0..part).step_by(8) {
            for stream in 0..8 {
                let words = &words[stream * part + line..][..8];
                for (sum, &word) in sums.iter_mut().zip(words) {
                    *sum ^= word;
                }
            }
        }
        black_box(sums);
    });
    (8 * 8 * part) as f64 / seconds / 1e9
}

/// Times a product that was found to equal `expected`, and prints a line.
fn report(what: &str, weights: usize, products: usize, bandwidth: f64, work: impl FnMut()) {
    let seconds = best(work);
    let speed = weights as f64 / seconds / 1e9;
    println!(
        "{what:<44} {speed:7.2} GB/s  {:5.2} of reading  {:7.2} GMAC/s",
        speed / bandwidth,
        products as f64 / seconds / 1e9
    );
}

fn same(found: &[f32], expected: &[f32]) {
    assert!(found.iter().zip(expected).all(|(&f, &e)| canonical_bits(f) == canonical_bits(e)), "wrong output");
}

fn main() {
    let positions_list = [1usize, 4, 8, 16];
    // The bytes of all matrices of a kind lie in one buffer, from an odd offset on.
    let (rows, cols, count) = (12288, 7168, 3);
    let size = rows * cols * 2;
    let mut data = bytes(size * count + 6, 1);
    // Exponents around one: the sign and the mantissa are random.
    data.iter_mut().skip(7).step_by(2).for_each(|high| *high = *high & 0x80 | 0x3f);
    let bandwidth = read_bandwidth(&data);
    println!("reading: {bandwidth:.2} GB/s");
    for positions in positions_list {
        let x = activations(cols * positions);
        let mut lines = vec![Line::ZERO; Line::of::<f64>(Panel::len(cols, positions).unwrap()).unwrap()];
        let panel = Backend::SCALAR.pack(Layout::Bf16, &x, cols, positions, bytemuck::cast_slice_mut(&mut lines));
        let matrix = |i: usize| Bf16Matrix::new(&data[6 + i * size..][..size], rows, cols).unwrap();
        let (mut expected, mut out) = (vec![0.0; 64 * positions], vec![0.0; rows * positions]);
        Backend::SCALAR.matmul_bf16(matrix(0).slice(0..64), &panel, &mut expected);
        for backend in Backend::available() {
            if backend == Backend::SCALAR && positions > 1 {
                continue;
            }
            backend.matmul_bf16(matrix(0), &panel, &mut out);
            same(&out[..64 * positions], &expected);
            let what = format!("bf16 {rows}x{cols}, {positions} positions, {}", backend.name());
            report(&what, size * count, rows * cols * count * positions, bandwidth, || {
                for i in 0..count {
                    backend.matmul_bf16(matrix(i), &panel, &mut out);
                    black_box(&out);
                }
            });
        }
    }
    let (rows, cols, count) = (3072, 3584, 80);
    let (size, scales) = (rows * cols / 2, rows * cols / 32);
    for positions in positions_list {
        let x = activations(cols * positions);
        let mut lines = vec![Line::ZERO; Line::of::<f64>(Panel::len(cols, positions).unwrap()).unwrap()];
        let panel = Backend::SCALAR.pack(Layout::Mxfp4, &x, cols, positions, bytemuck::cast_slice_mut(&mut lines));
        let matrix = |i: usize| {
            let (codes, rest) = data[i * (size + scales)..].split_at(size);
            Mxfp4Matrix::new(codes, &rest[..scales], rows, cols).unwrap()
        };
        let (mut expected, mut out) = (vec![0.0; 64 * positions], vec![0.0; rows * positions]);
        Backend::SCALAR.matmul_mxfp4(matrix(0).slice(0..64), &panel, &mut expected);
        for backend in Backend::available() {
            if backend == Backend::SCALAR && positions > 1 {
                continue;
            }
            backend.matmul_mxfp4(matrix(0), &panel, &mut out);
            same(&out[..64 * positions], &expected);
            let what = format!("mxfp4 {rows}x{cols}, {positions} positions, {}", backend.name());
            report(&what, (size + scales) * count, rows * cols * count * positions, bandwidth, || {
                for i in 0..count {
                    backend.matmul_mxfp4(matrix(i), &panel, &mut out);
                    black_box(&out);
                }
            });
        }
    }
}
