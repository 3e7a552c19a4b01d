//! How fast texts become ids and ids become texts.
//!
//! ```text
//! cargo bench -p k3-core --bench tokenizer
//! cargo bench -p k3-core --bench tokenizer -- tiktoken.model TEXT...
//! ```
//!
//! One thread. Without arguments the demo's vocabulary and texts that are made here; with them any
//! vocabulary and any files, which `fixtures/tokenizer/parity.py --speed` gives to tiktoken, too. Decoding is
//! compared with the text before anything is timed. The best of several rounds is printed, in
//! megabytes (10^6 bytes) of text a second.
#![expect(clippy::cast_precision_loss, reason = "counts and times are printed to three digits")]

use k3_core::carve::Line;
use k3_core::tokenizer::{ControlText, Decoder, Specials, Vocab, encode, longest_piece, scratch_len};
use k3_core::view::TokenId;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

const ROUNDS: usize = 7;

/// Bytes of a text that is made here.
const LENGTH: usize = 1_000_000;

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

/// Numbers below `n` from a seed; xorshift64.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).expect("31 bits") % n
    }
}

/// `parts` in a random order, again and again.
fn shuffled(parts: &[&str]) -> Vec<u8> {
    let (mut text, mut rng) = (String::new(), Seeded(88_172_645_463_325_252));
    while text.len() < LENGTH {
        text.push_str(parts[rng.below(parts.len())]);
    }
    text.into_bytes()
}

/// Texts of several kinds.
fn texts() -> Vec<(String, Vec<u8>)> {
    let english = include_bytes!("../../fixtures/demo/heldout.txt");
    let code = concat!(
        include_str!("../src/tokenizer/pretoken.rs"),
        include_str!("../src/tokenizer/vocab.rs"),
        include_str!("../src/json.rs"),
        include_str!("../src/config.rs"),
    );
    let repeated = |text: &[u8]| text.repeat(LENGTH.div_ceil(text.len()));
    let han: Vec<String> = ('\u{4e00}'..'\u{5200}').map(String::from).chain(["\u{3002}\n".into()]).collect();
    let words =
        ["the ", "\u{6f22}\u{5b57}", "\u{43c}\u{438}\u{440} ", "12345", " \u{1f468}\u{200d}\u{1f469} ", "e\u{301}!"];
    vec![
        ("english".into(), repeated(english)),
        ("code".into(), repeated(code.as_bytes())),
        ("chinese".into(), shuffled(&han.iter().map(String::as_str).collect::<Vec<_>>())),
        ("mixed".into(), shuffled(&words)),
        ("whitespace".into(), shuffled(&["\n", "    ", "\t", "\r\n", "                ", "x = 1"])),
        ("one piece".into(), shuffled(&["a", "b", "c", "d", "e", "th", "in", "er"])),
    ]
}

fn main() {
    // cargo itself adds --bench.
    let mut files = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/demo/tiktoken.model");
    let model = std::fs::read(files.next().map_or(demo, Into::into)).expect("a vocabulary");
    let mut given: Vec<(String, Vec<u8>)> =
        files.map(|path| (path.clone(), std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}")))).collect();
    if given.is_empty() {
        given = texts();
    }

    let start = Instant::now();
    let measured = Vocab::measure(&model).expect("a vocabulary");
    let lines = measured.lines();
    let mut arena = vec![Line::ZERO; lines];
    let vocab = measured.load(&mut arena).expect("a vocabulary");
    println!(
        "{} tokens, loaded in {:.1} ms, {:.1} MB",
        vocab.len(),
        start.elapsed().as_secs_f64() * 1e3,
        (lines * Line::BYTES) as f64 / 1e6
    );
    let specials = Specials::new(vocab.len(), &mut []);
    let decoder = Decoder::new(&vocab, &specials, ControlText::Spell);
    println!("{:<16} {:>8} {:>8} {:>12} {:>12}", "text", "bytes", "ids", "encode MB/s", "decode MB/s");
    for (name, text) in given {
        let mut scratch = vec![Line::ZERO; scratch_len(longest_piece(&text, None)).expect("a size")];
        let mut ids = Vec::with_capacity(text.len());
        encode(&vocab, &text, &mut scratch, |id| ids.push(id)).expect("enough scratch");
        let mut bytes = Vec::with_capacity(text.len());
        let mut decode = |ids: &[TokenId]| {
            bytes.clear();
            for &id in ids {
                decoder.push(id, |part| bytes.extend_from_slice(part)).expect("an id");
            }
            black_box(bytes.as_slice()) == text.as_slice()
        };
        assert!(decode(&ids), "{name}: other text");
        let seconds = best(|| assert!(decode(&ids)));
        let encode_seconds = best(|| {
            ids.clear();
            encode(&vocab, &text, &mut scratch, |id| ids.push(id)).expect("enough scratch");
            black_box(&mut ids);
        });
        let rate = |seconds: f64| text.len() as f64 / seconds / 1e6;
        let name = Path::new(&name).file_stem().map_or(name.clone(), |stem| stem.to_string_lossy().into_owned());
        println!(
            "{name:<16} {:>8} {:>8} {:>12.1} {:>12.1}",
            text.len(),
            ids.len(),
            rate(encode_seconds),
            rate(seconds)
        );
    }
}
