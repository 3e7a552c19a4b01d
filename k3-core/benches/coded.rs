//! What the lossless code of bf16 weights costs and saves: ratio, coding, and products with the coded
//! form beside products with the raw one.
//!
//! ```text
//! cargo bench -p k3-core --bench coded
//! ```
//!
//! Speeds are GB/s of raw bf16, so that a coded product which is as fast as a raw one shows the same
//! number though it moves a quarter fewer bytes. Each product walks over several matrices in turn, so
//! weights come from memory. With two threads each has half of the rows.
#![expect(clippy::cast_precision_loss, reason = "counts and times are printed to three digits")]

use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::coded::{CodedMatrix, encode};
use k3_core::math::canonical_bits;
use k3_core::view::Bf16Matrix;
use std::hint::black_box;
use std::time::Instant;

const ROUNDS: usize = 7;
const SHAPE: (usize, usize) = (12288, 7168);
const COUNT: usize = 3;

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Nearly normal, as weights are: a sum of uniform numbers, whose tails are what misfits are made
    /// of, and one in 4096 far outside.
    fn weight(&mut self) -> f32 {
        let (a, b) = (self.next(), self.next());
        let part = |n: u64| (n & 0xffff) as f32 / 65536.0 - 0.5;
        let sum: f32 = [a, a >> 16, a >> 32, a >> 48, b, b >> 16].into_iter().map(part).sum();
        sum * 0.03 * if b >> 52 == 0 { 1e4 } else { 1.0 }
    }
}

fn best(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

/// GB/s at which `threads` threads read `data`, each its part of it.
fn read_bandwidth(data: &[u8], threads: usize) -> f64 {
    let part = data.len() / threads / 8 / 64 * 64;
    let read = |data: &[u8]| {
        let (_, words, _) = bytemuck::pod_align_to::<u8, u64>(data);
        let part = words.len() / 8 / 8 * 8;
        let mut sums = [0u64; 8];
        for line in (0..part).step_by(8) {
            for stream in 0..8 {
                for (sum, &word) in sums.iter_mut().zip(&words[stream * part + line..][..8]) {
                    *sum ^= word;
                }
            }
        }
        black_box(sums);
    };
    let seconds = best(|| {
        std::thread::scope(|scope| {
            for data in data.chunks_exact(8 * part).take(threads).skip(1) {
                scope.spawn(|| read(data));
            }
            read(&data[..8 * part]);
        });
    });
    (threads * 8 * part) as f64 / seconds / 1e9
}

/// Runs `work(first row, rows of out)` for the halves of `out`, or for all of it.
fn halves(threads: usize, out: &mut [f32], positions: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let per = (out.len() / positions).div_ceil(threads);
    std::thread::scope(|scope| {
        let mut parts = out.chunks_mut(per * positions).enumerate();
        let first = parts.next();
        for (i, part) in parts {
            let work = &work;
            scope.spawn(move || work(i * per, part));
        }
        if let Some((i, part)) = first {
            work(i * per, part);
        }
    });
}

fn main() {
    let (rows, cols) = SHAPE;
    let size = rows * cols * 2;
    let mut random = Random(1);
    let raw: Vec<u8> = (0..rows * cols)
        .flat_map(|_| half::bf16::from_f32(random.weight()).to_le_bytes())
        .collect::<Vec<_>>()
        .repeat(COUNT);
    // Row blocks, as a packed trunk has them; about half a megabyte each.
    let per_block = 48;
    let mut coded = vec![0; size * COUNT];
    let started = Instant::now();
    let mut blocks = Vec::new();
    let mut at = 0;
    for matrix in raw.chunks_exact(size) {
        for block in matrix.chunks(per_block * cols * 2) {
            let len = encode(block, block.len() / cols / 2, cols, &mut coded[at..]).expect("smaller");
            blocks.push((at, len));
            at = (at + len).next_multiple_of(64);
        }
    }
    println!("encoding: {:.2} GB/s, one thread", raw.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
    let views: Vec<CodedMatrix<'_>> = blocks
        .iter()
        .map(|&(at, len)| CodedMatrix::new(&coded[at..][..len], per_block, cols).expect("a block"))
        .collect();
    let misfits: usize = views.iter().map(CodedMatrix::misfits).sum();
    println!("ratio {:.4}, misfits {:.1e}", at as f64 / raw.len() as f64, misfits as f64 / (raw.len() / 2) as f64);
    let mut row = vec![0; cols * 2];
    let seconds = best(|| {
        for (view, raw) in views.iter().zip(raw.chunks(per_block * cols * 2)).take(64) {
            for r in 0..per_block {
                view.decode_row(r, &mut row);
                assert!(row == raw[r * cols * 2..][..cols * 2]);
            }
        }
    });
    println!(
        "decoding row by row and comparing (scalar): {:.2} GB/s",
        (64 * per_block * cols * 2) as f64 / seconds / 1e9
    );

    for threads in [1, 2] {
        let bandwidth = read_bandwidth(&raw, threads);
        println!("{threads} threads, reading: {bandwidth:.2} GB/s");
        for positions in [1usize, 2, 4, 8, 16] {
            let x: Vec<f32> = (0..cols * positions).map(|i| ((i * 7919 % 251) as f32 - 125.0) / 64.0).collect();
            let mut lines = vec![Line::ZERO; Line::of::<f64>(Panel::len(cols, positions).unwrap()).unwrap()];
            let panel = Backend::SCALAR.pack(Layout::Bf16, &x, cols, positions, bytemuck::cast_slice_mut(&mut lines));
            let (mut found, mut out) = (vec![0.0; rows * positions], vec![0.0; rows * positions]);
            for backend in Backend::available().filter(|b| *b != Backend::SCALAR || (positions, threads) == (1, 1)) {
                let raw_rows = |m: usize, first: usize, count: usize| {
                    Bf16Matrix::new(&raw[m * size + first * cols * 2..][..count * cols * 2], count, cols).unwrap()
                };
                let multiply_raw = |out: &mut [f32]| {
                    for m in 0..COUNT {
                        halves(threads, out, positions, |first, out| {
                            backend.matmul_bf16(raw_rows(m, first, out.len() / positions), &panel, out);
                        });
                    }
                };
                let multiply_coded = |out: &mut [f32]| {
                    for views in views.chunks_exact(rows / per_block) {
                        halves(threads, out, positions, |first, out| {
                            for (view, out) in
                                views[first / per_block..].iter().zip(out.chunks_mut(per_block * positions))
                            {
                                backend.matmul_coded(*view, &panel, out);
                            }
                        });
                    }
                };
                multiply_raw(&mut out);
                multiply_coded(&mut found);
                assert!(found.iter().zip(&out).all(|(&f, &e)| canonical_bits(f) == canonical_bits(e)), "other bits");
                let bytes = (size * COUNT) as f64 / 1e9;
                let (raw, coded) =
                    (bytes / best(|| multiply_raw(&mut out)), bytes / best(|| multiply_coded(&mut found)));
                println!(
                    "{threads} threads, {positions:2} positions, {:6}: raw {raw:6.2} ({:.2} of reading), coded {coded:6.2} \
                     ({:.2}), coded/raw {:.2}",
                    backend.name(),
                    raw / bandwidth,
                    coded / bandwidth,
                    coded / raw
                );
            }
        }
    }
}
