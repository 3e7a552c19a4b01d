//! Every kernel of every backend against the definition, and the definition against a naive text.

use super::*;
use crate::math::canonical_bits;
use std::vec::Vec;
use std::{eprintln, format, vec};

/// xorshift64*: seeded, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.bits() >> 33).unwrap() % n
    }

    fn word(&mut self) -> u32 {
        u32::try_from(self.bits() >> 32).unwrap()
    }

    /// A value around one.
    fn plain(&mut self) -> f32 {
        f32::from_bits(self.word() & 0x8fff_ffff | 0x3800_0000)
    }

    fn value(&mut self, kind: Kind) -> f32 {
        const EDGES: [u32; 16] = [
            0,
            0x8000_0000,
            1,
            0x8000_0001,
            0x007f_ffff,
            0x0080_0000,
            0x807f_ffff,
            0x7f7f_ffff,
            0xff7f_ffff,
            0x3f80_0000,
            0xbf80_0000,
            0x3f7f_ffff,
            0x42b1_7218,
            0xc2cf_f1b5,
            0x7f80_0000,
            0x7fc0_0000,
        ];
        match kind {
            Kind::Plain => self.plain(),
            Kind::Finite => match self.below(4) {
                0 => f32::from_bits(EDGES[self.below(14)]),
                1 => f32::from_bits(self.word() & 0x807f_ffff),
                2 => f32::from_bits(self.word() & 0xbfff_ffff),
                _ => self.plain(),
            },
            Kind::Rare => match self.below(60) {
                0 => f32::from_bits(EDGES[self.below(16)]),
                1 => f32::from_bits(self.word()),
                _ => self.plain(),
            },
            Kind::Any => f32::from_bits(self.word()),
        }
    }

    fn vector(&mut self, n: usize, kind: Kind) -> Vec<f32> {
        (0..n).map(|_| self.value(kind)).collect()
    }

    fn bf16(&mut self, n: usize, kind: Kind) -> Vec<u8> {
        (0..n).flat_map(|_| half::bf16::from_f32(self.value(kind)).to_le_bytes()).collect()
    }
}

/// What kind of values a case is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// Around one: roundings of sums show.
    Plain,
    /// Signed zeros, subnormals and huge values between plain ones.
    Finite,
    /// Now and then an edge, infinity or NaN.
    Rare,
    /// Any bit pattern.
    Any,
}

const KINDS: [Kind; 4] = [Kind::Plain, Kind::Finite, Kind::Rare, Kind::Any];

/// Every length up to two groups and a bit, and the edges of registers, tiles and column blocks.
fn lengths() -> impl Iterator<Item = usize> {
    (0..=67).chain([95, 96, 97, 127, 128, 129, 160, 255, 256, 257, 511, 513, 576, 1040, 3583, 3585, 7168])
}

/// The only backend to test, if one is asked for; a machine that was chosen for it and has it not fails.
fn asked() -> Option<Backend> {
    let name = std::env::var("K3_TEST_BACKEND").ok()?;
    Some(Backend::by_name(&name).unwrap_or_else(|| panic!("this machine has no {name}")))
}

/// Runs `check` for every backend but the definition.
fn each(check: impl Fn(Backend)) {
    if let Some(backend) = asked() {
        return check(backend);
    }
    for name in ["avx2", "avx512"] {
        match Backend::by_name(name) {
            Some(backend) => check(backend),
            None => eprintln!("SKIPPED: this machine has no {name}"),
        }
    }
}

/// Runs `check` for the definition too.
fn each_and_scalar(check: impl Fn(Backend)) {
    if asked().is_none() {
        check(Backend::SCALAR);
    }
    each(check);
}

#[track_caller]
fn same(found: &[f32], expected: &[f32], case: &str) {
    assert_eq!(found.len(), expected.len(), "{case}");
    for (i, (&f, &e)) in found.iter().zip(expected).enumerate() {
        assert_eq!(canonical_bits(f), canonical_bits(e), "{case}, element {i}: {f:e} instead of {e:e}");
    }
}

fn same64(found: f64, expected: f64, case: &str) {
    assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()), "{case}");
}

/// The panel, in a buffer that starts at an odd f64.
fn packed(layout: Layout, x: &[f32], cols: usize, positions: usize, use_it: impl FnOnce(&Panel<'_>)) {
    let mut buf = vec![f64::NAN; Panel::len(cols, positions).unwrap() + 1];
    use_it(&Backend::SCALAR.pack(layout, x, cols, positions, &mut buf[1..]));
}

/// Runs `check` for each way in which a row may be cut into blocks of columns.
fn each_cut(positions: usize, mut check: impl FnMut()) {
    #[cfg(all(target_arch = "x86_64", target_feature = "sse2"))]
    if positions == 1 {
        return cache::for_each_size(check);
    }
    let _ = positions;
    check();
}

#[test]
fn fold_adds_in_the_one_order_of_the_contract() {
    // Beside 1e16 a one is lost and a two is not: from the left these sum to 14, by the tree to 12.
    let l: [f64; LANES] = core::array::from_fn(|j| [1e16, -1e16, 1.0][j.min(2)]);
    let eight = |j: usize| l[j] + l[j + 8];
    let four = |j: usize| eight(j) + eight(j + 4);
    let two = |j: usize| four(j) + four(j + 2);
    assert_eq!(fold(l).to_bits(), (two(0) + two(1)).to_bits());
    assert_ne!(fold(l).to_bits(), l.iter().sum::<f64>().to_bits(), "an order that is not told apart");
}

#[test]
fn scalar_products_are_those_of_a_naive_text() {
    let mut random = Random(1);
    for cols in [1, 15, 16, 17, 32, 50, 64] {
        let (rows, positions) = (3, 6);
        let (w, x) = (random.bf16(rows * cols, Kind::Plain), random.vector(positions * cols, Kind::Plain));
        let mut out = vec![0.0; rows * positions];
        packed(Layout::Bf16, &x, cols, positions, |x| {
            Backend::SCALAR.matmul_bf16(Bf16Matrix::new(&w, rows, cols).unwrap(), x, &mut out);
        });
        for r in 0..rows {
            for p in 0..positions {
                let mut lanes = [0.0; LANES];
                for i in 0..cols {
                    let w = f32::from_bits(
                        u32::from(w[(r * cols + i) * 2]) << 16 | u32::from(w[(r * cols + i) * 2 + 1]) << 24,
                    );
                    lanes[i % 16] += f64::from(w) * f64::from(x[p * cols + i]);
                }
                assert_eq!(out[r * positions + p].to_bits(), math::round(fold(lanes)).to_bits());
            }
        }
        if cols % GROUP == 0 {
            let packed_w: Vec<u8> = (0..rows * cols / 2).map(|_| random.bits().to_le_bytes()[7]).collect();
            let scales: Vec<u8> = (0..rows * cols / GROUP).map(|_| [0, 127, 130, 120, 255][random.below(5)]).collect();
            packed(Layout::Mxfp4, &x, cols, positions, |x| {
                let w = Mxfp4Matrix::new(&packed_w, &scales, rows, cols).unwrap();
                Backend::SCALAR.matmul_mxfp4(w, x, &mut out);
            });
            let weight = |r: usize, i: usize| {
                let at = r * cols + i;
                let code = packed_w[at / 2] >> (4 * (at % 2)) & 15;
                let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
                if code > 7 { -size } else { size }
            };
            for r in 0..rows {
                for p in 0..positions {
                    let mut lanes = [0.0; LANES];
                    for g in 0..cols / GROUP {
                        let byte = scales[r * cols / GROUP + g];
                        let scale = if byte == 255 { 0.0 } else { (f64::from(byte) - 127.0).exp2() };
                        for (j, lane) in lanes.iter_mut().enumerate() {
                            let (a, b) = (g * 32 + j, g * 32 + j + 16);
                            *lane += scale
                                * (weight(r, a) * f64::from(x[p * cols + a])
                                    + weight(r, b) * f64::from(x[p * cols + b]));
                        }
                    }
                    assert_eq!(out[r * positions + p].to_bits(), math::round(fold(lanes)).to_bits());
                }
            }
        }
    }
}

#[test]
fn vectors() {
    each(|backend| {
        let mut random = Random(2);
        for n in lengths() {
            for kind in KINDS {
                let case = format!("{backend:?} {n} {kind:?}");
                let (a, b) = (random.vector(n, kind), random.vector(n, kind));
                let s = Backend::SCALAR;
                same(&[backend.dot(&a, &b)], &[s.dot(&a, &b)], &case);
                same64(backend.sum(&a), s.sum(&a), &case);
                same64(backend.sum_squares(&a), s.sum_squares(&a), &case);
            }
        }
    });
}

#[test]
fn products_with_bf16() {
    each(|backend| {
        let mut random = Random(3);
        for cols in lengths() {
            for kind in KINDS {
                for (rows, positions) in [
                    (0, 1),
                    (1, 1),
                    (4, 1),
                    (7, 1),
                    (50, 1),
                    (1, 2),
                    (5, 3),
                    (8, 4),
                    (26, 5),
                    (7, 9),
                    (4, 15),
                    (3, 16),
                    (4, 18),
                ] {
                    if cols > 600 && (rows > 10 || kind != Kind::Plain) {
                        continue;
                    }
                    let (w, x) = (random.bf16(rows * cols, kind), random.vector(positions * cols, kind));
                    let w = Bf16Matrix::new(&w, rows, cols).unwrap();
                    let (mut found, mut expected) = (vec![1.0; rows * positions], vec![2.0; rows * positions]);
                    packed(Layout::Bf16, &x, cols, positions, |x| {
                        Backend::SCALAR.matmul_bf16(w, x, &mut expected);
                        each_cut(positions, || {
                            found.fill(1.0);
                            backend.matmul_bf16(w, x, &mut found);
                            let case = format!("{backend:?} {rows}x{cols}, {positions} positions, {kind:?}");
                            same(&found, &expected, &case);
                        });
                    });
                }
            }
        }
    });
}

/// A coded matrix beside the bf16 matrix it was made of, with all kernels and all amounts of misfits.
#[test]
fn products_with_coded_are_those_with_bf16() {
    use crate::coded::{CodedMatrix, coded_len, encode};
    each_and_scalar(|backend| {
        let mut random = Random(13);
        let (mut fewest, mut most) = (f64::INFINITY, 0.0f64);
        for cols in lengths() {
            // One exponent in a hundred misses the table, nearly none do, or nearly all do.
            for kind in KINDS {
                for (rows, positions) in [
                    (0, 1),
                    (1, 1),
                    (4, 1),
                    (7, 1),
                    (50, 1),
                    (1, 2),
                    (5, 3),
                    (8, 4),
                    (26, 5),
                    (7, 9),
                    (4, 15),
                    (3, 16),
                    (4, 18),
                ] {
                    if cols > 600 && (rows > 10 || kind == Kind::Finite) {
                        continue;
                    }
                    let (mut w, x) = (random.bf16(rows * cols, kind), random.vector(positions * cols, kind));
                    // Rows of nothing but misfits between others.
                    for row in w.chunks_exact_mut((2 * cols).max(1)).skip(2).step_by(3) {
                        row.iter_mut().for_each(|b| *b = random.bits().to_le_bytes()[7]);
                    }
                    let mut block = vec![0; coded_len(rows, cols, rows * cols).unwrap()];
                    let len = encode(&w, rows, cols, &mut block).unwrap();
                    let coded = CodedMatrix::new(&block[..len], rows, cols).unwrap();
                    let raw = Bf16Matrix::new(&w, rows, cols).unwrap();
                    if rows * cols > 1000 {
                        let share = coded.misfits() as f64 / (rows * cols) as f64;
                        (fewest, most) = (fewest.min(share), most.max(share));
                    }
                    let (mut found, mut expected) = (vec![1.0; rows * positions], vec![2.0; rows * positions]);
                    packed(Layout::Bf16, &x, cols, positions, |x| {
                        Backend::SCALAR.matmul_bf16(raw, x, &mut expected);
                        each_cut(positions, || {
                            found.fill(1.0);
                            backend.matmul_coded(coded, x, &mut found);
                            let case = format!("{backend:?} {rows}x{cols}, {positions} positions, {kind:?}");
                            same(&found, &expected, &case);
                        });
                        let half = rows / 2;
                        backend.matmul_coded(coded.slice(half..rows), x, &mut found[half * positions..]);
                    });
                    same(&found, &expected, &format!("{backend:?} half of {rows}x{cols}, {positions}, {kind:?}"));
                }
            }
        }
        assert!(fewest < 0.01 && most > 0.85, "{fewest} {most}");
    });
}

#[test]
fn products_with_mxfp4() {
    each(|backend| {
        let mut random = Random(4);
        for groups in [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 96, 112] {
            for kind in KINDS {
                for (rows, positions) in
                    [(0, 1), (1, 1), (4, 1), (7, 1), (1, 2), (5, 3), (8, 4), (19, 5), (3, 12), (3, 16), (4, 18)]
                {
                    let cols = groups * GROUP;
                    let w: Vec<u8> = (0..rows * cols / 2).map(|_| random.bits().to_le_bytes()[7]).collect();
                    // Every scale byte in turn, so that a row mixes 2^-127 with 2^127 and the NaN; or near 1.
                    let near = kind == Kind::Plain;
                    let scales: Vec<u8> = (0..rows * groups)
                        .map(|i| u8::try_from(if near { 120 + i % 16 } else { i * 89 % 256 }).unwrap())
                        .collect();
                    let x = random.vector(positions * cols, kind);
                    let w = Mxfp4Matrix::new(&w, &scales, rows, cols).unwrap();
                    let (mut found, mut expected) = (vec![1.0; rows * positions], vec![2.0; rows * positions]);
                    packed(Layout::Mxfp4, &x, cols, positions, |x| {
                        backend.matmul_mxfp4(w, x, &mut found);
                        Backend::SCALAR.matmul_mxfp4(w, x, &mut expected);
                    });
                    same(&found, &expected, &format!("{backend:?} {rows}x{cols}, {positions} positions, {kind:?}"));
                }
            }
        }
    });
}

/// All 256 scale bytes with all 16 codes, one group a row: the whole table.
#[test]
fn every_scale_byte_and_every_code() {
    each_and_scalar(|backend| {
        let scales: Vec<u8> = (0..=255).collect();
        let w: Vec<u8> = (0..256).flat_map(|_| (0..16u8).map(|code| code | code << 4)).collect();
        let w = Mxfp4Matrix::new(&w, &scales, 256, GROUP).unwrap();
        for code in 0..16 {
            let mut x = [0.0f32; GROUP];
            x[2 * code + 1] = 1.5;
            let mut out = [0.0; 256];
            packed(Layout::Mxfp4, &x, GROUP, 1, |x| backend.matmul_mxfp4(w, x, &mut out));
            let size = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code % 8] * if code > 7 { -1.5 } else { 1.5 };
            for (byte, &out) in out.iter().enumerate() {
                let scale = if byte == 255 { 0.0 } else { (byte as f64 - 127.0).exp2() };
                // Accumulators start at +0: a zero never has a sign.
                let expected = math::round(0.0 + scale * size);
                assert_eq!(out.to_bits(), expected.to_bits(), "{backend:?} scale byte {byte} code {code}");
            }
        }
    });
}

#[test]
fn positions_do_not_see_each_other() {
    each_and_scalar(|backend| {
        let mut random = Random(5);
        for positions in (1..=9).chain([16, 21]) {
            for cols in [32, 96, 544] {
                let rows = 9;
                let w = random.bf16(rows * cols, Kind::Rare);
                let w = Bf16Matrix::new(&w, rows, cols).unwrap();
                let codes: Vec<u8> = (0..rows * cols / 2).map(|_| random.bits().to_le_bytes()[7]).collect();
                let scales: Vec<u8> = (0..rows * cols / GROUP).map(|_| random.bits().to_le_bytes()[7]).collect();
                let m = Mxfp4Matrix::new(&codes, &scales, rows, cols).unwrap();
                let x = random.vector(positions * cols, Kind::Rare);
                let (mut b, mut q) = (vec![0.0; rows * positions], vec![0.0; rows * positions]);
                packed(Layout::Bf16, &x, cols, positions, |x| backend.matmul_bf16(w, x, &mut b));
                packed(Layout::Mxfp4, &x, cols, positions, |x| backend.matmul_mxfp4(m, x, &mut q));
                for p in 0..positions {
                    let one = &x[p * cols..][..cols];
                    let column = |all: &[f32]| all.iter().skip(p).step_by(positions).copied().collect::<Vec<_>>();
                    let mut out = vec![0.0; rows];
                    let case = format!("{backend:?} position {p} of {positions}, {cols} columns");
                    packed(Layout::Bf16, one, cols, 1, |x| backend.matmul_bf16(w, x, &mut out));
                    same(&column(&b), &out, &case);
                    packed(Layout::Mxfp4, one, cols, 1, |x| backend.matmul_mxfp4(m, x, &mut out));
                    same(&column(&q), &out, &case);
                }
            }
        }
    });
}

#[test]
fn sums_across_rows_and_products_with_f32() {
    each(|backend| {
        let mut random = Random(6);
        let s = Backend::SCALAR;
        for n in lengths().filter(|&n| n < 1100) {
            for kind in KINDS {
                for rows in [0, 1, 2, 5] {
                    let case = format!("{backend:?} {rows}x{n} {kind:?}");
                    let (stride, coef) = (n + 3, random.vector(rows, kind));
                    let data = random.vector((rows * stride).saturating_sub(3), kind);
                    let (mut found, mut expected) = (vec![1.0; n], vec![2.0; n]);
                    backend.sum_rows_f32(&coef, &data, stride, &mut found);
                    s.sum_rows_f32(&coef, &data, stride, &mut expected);
                    same(&found, &expected, &case);
                    let bytes = random.bf16(rows * n, kind);
                    let m = Bf16Matrix::new(&bytes, rows, n).unwrap();
                    backend.sum_rows_bf16(&coef, m, &mut found);
                    s.sum_rows_bf16(&coef, m, &mut expected);
                    same(&found, &expected, &case);
                    let m = F32Matrix::new(&data[..rows * n], rows, n).unwrap();
                    let x = random.vector(n, kind);
                    let (mut found, mut expected) = (vec![1.0; rows], vec![2.0; rows]);
                    backend.matmul_f32(m, &x, &mut found);
                    s.matmul_f32(m, &x, &mut expected);
                    same(&found, &expected, &case);
                }
            }
        }
    });
}

#[test]
fn kda_steps() {
    each(|backend| {
        let mut random = Random(7);
        for dv in lengths().filter(|&n| n < 260) {
            for kind in KINDS {
                let dk = [0, 1, 7, 128][random.below(4)];
                let state = random.vector(dk * dv, kind);
                let (alpha, q, k) = (random.vector(dk, kind), random.vector(dk, kind), random.vector(dk, kind));
                let (v, beta) = (random.vector(dv, kind), random.value(kind));
                let run = |backend: Backend| {
                    let (mut s, mut o) = (state.clone(), vec![3.0; dv]);
                    backend.kda_step(&mut s, &alpha, beta, &q, &k, &v, &mut o);
                    (s, o)
                };
                let ((s, o), (s0, o0)) = (run(backend), run(Backend::SCALAR));
                same(&s, &s0, &format!("{backend:?} state {dk}x{dv} {kind:?}"));
                same(&o, &o0, &format!("{backend:?} output {dk}x{dv} {kind:?}"));
            }
        }
    });
}

#[test]
fn single_elements() {
    each(|backend| {
        let mut random = Random(8);
        let s = Backend::SCALAR;
        for n in lengths() {
            for kind in KINDS {
                let case = format!("{backend:?} {n} {kind:?}");
                let (a, b) = (random.vector(n, kind), random.vector(n, kind));
                let c = random.value(kind);
                let both = |name: &str, f: &dyn Fn(Backend, &mut [f32])| {
                    let (mut found, mut expected) = (a.clone(), a.clone());
                    f(backend, &mut found);
                    f(s, &mut expected);
                    same(&found, &expected, &format!("{name} {case}"));
                };
                both("situ", &|t, x| t.situ(x, &b, 4.0, 25.0));
                both("sigmoid", &|t, x| t.sigmoid(x));
                both("mul_sigmoid", &|t, x| t.mul_sigmoid(x, &b));
                both("exp_sub", &|t, x| t.exp_sub(x, c));
                both("kda_alpha", &|t, x| t.kda_alpha(&a, &b, c, -5.0, x));
                both("decode", &|t, x| {
                    let bytes: Vec<u8> = b.iter().flat_map(|b| half::bf16::from_f32(*b).to_le_bytes()).collect();
                    t.decode_bf16(&bytes, x);
                });
                for taps in [1, 3, 4] {
                    let (t, w) = (random.vector(n * taps, kind), random.vector(n * taps, kind));
                    both("conv", &|backend, x| backend.conv_silu(&t, &w, x));
                }
            }
        }
    });
}

#[test]
fn names_choose() {
    for backend in Backend::available() {
        assert_eq!(Backend::by_name(backend.name()), Some(backend));
    }
    assert_eq!(Backend::by_name("none"), None);
    assert_eq!(Backend::available().last(), Some(Backend::detect()));
    assert_eq!(Panel::len(usize::MAX, 1), None);
    assert_eq!(Panel::len(33, 3), Some(192));
}
