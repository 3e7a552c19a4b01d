//! The bits of every kernel and of a whole forward pass, written down.
//!
//! Other tests compare back ends with each other on one machine; this one compares machines. Inputs
//! are made from integers, outputs are hashed (FNV-1a, 64 bits, any NaN as one value), and the hashes
//! below hold for every back end, byte order and pointer width. One that differs is a broken promise,
//! not a number to update: the floating-point contract is the only thing that may change them.

#[path = "tiny/mod.rs"]
mod tiny;

use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::coded::{CodedMatrix, coded_len, encode};
use k3_core::config::ModelConfig;
use k3_core::exec::Serial;
use k3_core::math::{self, canonical_bits};
use k3_core::model::{Extent, Model, State, Workspace};
use k3_core::ops::sample::argmax;
use k3_core::view::{Bf16Matrix, F32Matrix, Mxfp4Matrix, TokenId};
use tiny::{CONFIG, Tiny};

/// FNV-1a over little-endian bytes.
struct Hash(u64);

impl Hash {
    const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    }

    fn floats(&mut self, values: &[f32]) {
        for &value in values {
            self.bytes(&canonical_bits(value).to_le_bytes());
        }
    }
}

/// Seeded inputs, from integers alone.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(self.0 >> 32).unwrap()
    }

    /// Of either sign, from 2^-16 to 2^4: sums lose bits, nothing overflows.
    fn float(&mut self) -> f32 {
        let bits = self.next();
        f32::from_bits((bits & 0x807f_ffff) | ((111 + (bits >> 23 & 0xff) % 20) << 23))
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// As [`Seeded::float`], with zeros, subnormals, extremes, infinities and a NaN among them.
    fn wild(&mut self, n: usize) -> Vec<f32> {
        let edges = [
            0.0,
            -0.0,
            f32::from_bits(1),
            -f32::from_bits(0x7f_ffff),
            f32::MIN_POSITIVE,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            88.722_84,
            -103.9,
            1e-20,
            -20.0,
        ];
        (0..n).map(|i| if i % 3 == 1 { edges[i / 3 % edges.len()] } else { self.float() }).collect()
    }

    fn bf16(&mut self, n: usize) -> Vec<u8> {
        (0..n).flat_map(|_| u16::try_from(self.float().to_bits() >> 16).unwrap().to_le_bytes()).collect()
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next().to_le_bytes()[3]).collect()
    }
}

/// Lengths around the widths of registers, lanes and groups.
const LENGTHS: [usize; 12] = [0, 1, 7, 8, 15, 16, 17, 31, 33, 64, 100, 257];

type Kernel = fn(Backend, &mut Seeded, usize, &mut Hash);

/// A kernel, what its outputs hash to, and how to run it at one of the lengths. Its place here seeds its
/// inputs, so a new one goes to the end.
const KERNELS: [(&str, u64, Kernel); 17] = [
    ("dot", 0x7c01_d6c4_c4e7_73e8, |b, s, n, h| h.floats(&[b.dot(&s.floats(n), &s.floats(n))])),
    ("sum_squares", 0x8fb1_eff0_73af_4425, |b, s, n, h| h.bytes(&b.sum_squares(&s.floats(n)).to_bits().to_le_bytes())),
    ("sum", 0xa876_7157_e9b4_f335, |b, s, n, h| h.bytes(&b.sum(&s.floats(n)).to_bits().to_le_bytes())),
    ("matmul_bf16", 0xb0e8_1a64_ee37_5bb8, |b, s, n, h| {
        let (w, x) = (s.bf16(5 * n), s.floats(6 * n));
        for positions in [1, 4, 6] {
            let mut buf = vec![0.0; Panel::len(n, positions).unwrap()];
            let panel = b.pack(Layout::Bf16, &x[..positions * n], n, positions, &mut buf);
            let mut out = vec![0.0; 5 * positions];
            b.matmul_bf16(Bf16Matrix::new(&w, 5, n).unwrap(), &panel, &mut out);
            h.floats(&out);
        }
    }),
    ("matmul_mxfp4", 0x9bd5_788b_2259_6716, |b, s, n, h| {
        // Every scale byte occurs, the NaN (255) among them, so sums do overflow here.
        let n = n.next_multiple_of(32);
        let (packed, scales, x) = (s.bytes(7 * n / 2), s.bytes(7 * n / 32), s.floats(6 * n));
        for positions in [1, 4, 6] {
            let mut buf = vec![0.0; Panel::len(n, positions).unwrap()];
            let panel = b.pack(Layout::Mxfp4, &x[..positions * n], n, positions, &mut buf);
            let mut out = vec![0.0; 7 * positions];
            b.matmul_mxfp4(Mxfp4Matrix::new(&packed, &scales, 7, n).unwrap(), &panel, &mut out);
            h.floats(&out);
        }
    }),
    ("matmul_f32", 0x929a_9621_d427_ae42, |b, s, n, h| {
        let (w, x, mut out) = (s.floats(5 * n), s.floats(n), [0.0; 5]);
        b.matmul_f32(F32Matrix::new(&w, 5, n).unwrap(), &x, &mut out);
        h.floats(&out);
    }),
    ("sum_rows_f32", 0x4221_e443_70ef_4a7f, |b, s, n, h| {
        let (coef, rows, mut out) = (s.floats(9), s.floats(9 * (n + 3)), vec![0.0; n]);
        b.sum_rows_f32(&coef, &rows, n + 3, &mut out);
        h.floats(&out);
    }),
    ("sum_rows_bf16", 0x81c2_38f5_79cf_5360, |b, s, n, h| {
        let (coef, rows, mut out) = (s.floats(9), s.bf16(9 * n), vec![0.0; n]);
        b.sum_rows_bf16(&coef, Bf16Matrix::new(&rows, 9, n).unwrap(), &mut out);
        h.floats(&out);
    }),
    ("kda_step", 0xe295_6b81_20fb_274f, |b, s, n, h| {
        let (dk, dv) = (n.min(33), n);
        let (mut state, mut out) = (s.floats(dk * dv), vec![0.0; dv]);
        for _ in 0..3 {
            let (alpha, q, k, v) = (s.floats(dk), s.floats(dk), s.floats(dk), s.floats(dv));
            let mut alpha = alpha;
            b.sigmoid(&mut alpha);
            b.kda_step(&mut state, &alpha, 0.7, &q, &k, &v, &mut out);
            h.floats(&out);
        }
        h.floats(&state);
    }),
    ("conv_silu", 0x17ce_3eca_340f_d2be, |b, s, n, h| {
        let (taps, window, mut out) = (s.floats(4 * n), s.floats(4 * n), vec![0.0; n]);
        b.conv_silu(&taps, &window, &mut out);
        h.floats(&out);
    }),
    ("situ", 0x9654_5f39_947e_f219, |b, s, n, h| {
        let (mut gate, up) = (s.wild(n), s.wild(n));
        b.situ(&mut gate, &up, 4.0, 25.0);
        h.floats(&gate);
    }),
    ("sigmoid", 0x6a83_eaa2_a235_10c1, |b, s, n, h| {
        let mut x = s.wild(n);
        b.sigmoid(&mut x);
        h.floats(&x);
    }),
    ("mul_sigmoid", 0x27f5_51a8_d678_5588, |b, s, n, h| {
        let (mut x, gate) = (s.floats(n), s.wild(n));
        b.mul_sigmoid(&mut x, &gate);
        h.floats(&x);
    }),
    ("exp_sub", 0xadc5_869c_7828_b83b, |b, s, n, h| {
        let mut x = s.wild(n);
        b.exp_sub(&mut x, 1.25);
        h.floats(&x);
    }),
    ("kda_alpha", 0x08e1_5244_a3f2_9c07, |b, s, n, h| {
        let (z, bias, mut out) = (s.wild(n), s.floats(n), vec![0.0; n]);
        b.kda_alpha(&z, &bias, 0.3, -5.0, &mut out);
        h.floats(&out);
    }),
    ("decode_bf16", 0x850e_12fd_ce60_077c, |b, s, n, h| {
        let (bytes, mut out) = (s.bytes(2 * n), vec![0.0; n]);
        b.decode_bf16(&bytes, &mut out);
        h.floats(&out);
    }),
    ("matmul_coded", 0x142a_b9eb_3a20_62b7, |b, s, n, h| {
        // Seven weights in ten fit the table; then nearly all of them.
        let (mut w, x) = (s.bf16(5 * n), s.floats(11 * n));
        for every in [1, 37] {
            for weight in w.chunks_exact_mut(2).enumerate().filter_map(|(i, w)| (i % every != 0).then_some(w)) {
                weight[1] = weight[1] & 0x83 | 0x3c;
            }
            let mut block = vec![0; coded_len(5, n, 5 * n).unwrap()];
            let len = encode(&w, 5, n, &mut block).unwrap();
            h.bytes(&block[..len]);
            let coded = CodedMatrix::new(&block[..len], 5, n).unwrap();
            for positions in [1, 4, 11] {
                let mut buf = vec![0.0; Panel::len(n, positions).unwrap()];
                let panel = b.pack(Layout::Bf16, &x[..positions * n], n, positions, &mut buf);
                let mut out = vec![0.0; 5 * positions];
                b.matmul_coded(coded, &panel, &mut out);
                h.floats(&out);
            }
        }
    }),
];

/// All back ends there are here, or the one that `K3_TEST_BACKEND` asks for; a machine that was chosen for it
/// and has it not fails.
fn backends() -> Vec<Backend> {
    match std::env::var("K3_TEST_BACKEND") {
        Ok(name) => vec![Backend::by_name(&name).unwrap_or_else(|| panic!("this machine has no {name}"))],
        Err(_) => Backend::available().collect(),
    }
}

#[test]
fn kernels_give_the_bits_that_are_written_here() {
    let mut wrong = Vec::new();
    for (i, (name, expected, kernel)) in KERNELS.iter().enumerate() {
        for backend in backends() {
            let (mut hash, mut seeded) = (Hash::new(), Seeded(1 + i as u64));
            for n in LENGTHS {
                kernel(backend, &mut seeded, n, &mut hash);
            }
            if hash.0 != *expected {
                wrong.push(format!("{name}, {}: {:#018x}, expected {expected:#018x}", backend.name(), hash.0));
            }
        }
    }
    assert!(wrong.is_empty(), "other bits:\n{}", wrong.join("\n"));
}

/// [`math`] on its own: 4096 arguments over all bit patterns of an f32.
const MATH: u64 = 0xa94e_66af_fd26_9951;

#[test]
fn functions_give_the_bits_that_are_written_here() {
    let mut hash = Hash::new();
    for x in (0..4096u32).map(|i| f32::from_bits(i.wrapping_mul(1_048_573))) {
        hash.floats(&[math::exp(x), math::sigmoid(x), math::tanh(x), math::silu(x), math::situ(x, -x, 4.0, 25.0)]);
    }
    assert_eq!(hash.0, MATH, "{:#018x}", hash.0);
}

const IDS: [u32; 9] = [3, 47, 0, 12, 12, 31, 8, 25, 3];

/// Logits of [`IDS`] at every position, then of eight greedy tokens.
const PASS: u64 = 0xba41_ffb0_ad79_c658;

/// The greedy tokens.
const GREEDY: [u32; 8] = [17, 44, 8, 17, 44, 5, 9, 47];

/// Runs [`IDS`] in chunks, then generates.
fn pass(backend: Backend, chunk: usize, block: usize) -> (u64, [u32; 8]) {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let extent = Extent { chunk, context: 32, width: 1 };
    let mut memory = vec![Line::ZERO; State::lines(&config, 32).unwrap()];
    let mut state = State::new(&mut memory, &config, 32).unwrap();
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let mut workspace = Workspace::new(&mut scratch, &config, extent).unwrap();
    let model = Model { config: &config, backend, exec: &Serial };
    let mut weights = Tiny { config: &config, block };
    let mut logits = vec![0.0; chunk * config.vocab_size];
    let mut hash = Hash::new();

    let mut last = TokenId(0);
    for ids in IDS.map(TokenId).chunks(chunk) {
        let logits = &mut logits[..ids.len() * config.vocab_size];
        model.forward(&mut weights, &mut state, &mut workspace, ids, logits, &mut ()).unwrap();
        hash.floats(logits);
        last = argmax(&logits[logits.len() - config.vocab_size..]).unwrap().unwrap();
    }
    let mut greedy = [0; 8];
    for id in &mut greedy {
        let logits = &mut logits[..config.vocab_size];
        model.forward(&mut weights, &mut state, &mut workspace, &[last], logits, &mut ()).unwrap();
        hash.floats(logits);
        last = argmax(logits).unwrap().unwrap();
        *id = last.0;
    }
    (hash.0, greedy)
}

#[test]
fn a_pass_gives_the_bits_that_are_written_here() {
    for backend in backends() {
        for chunk in [1, 2, 5, 9] {
            for block in [1, 3, usize::MAX] {
                let (hash, greedy) = pass(backend, chunk, block);
                let case = format!("{}, chunks of {chunk}, blocks of {block}", backend.name());
                assert_eq!(greedy, GREEDY, "{case}");
                assert_eq!(hash, PASS, "{case}: {hash:#018x}");
            }
        }
    }
}
