//! The tokenizer against tiktoken: `fixtures/tokenizer/parity.txt` says what that gave for the texts
//! that are made here, and in the same way by `parity.py` beside it.
//!
//! The vocabularies are the demo's, and one of the 256 bytes and all pairs of bytes: in that one ids
//! tell where a piece ends, whatever the script.

use k3_core::carve::Line;
use k3_core::tokenizer::{Vocab, encode, longest_piece, scratch_len};
use std::fmt::Write as _;
use std::path::Path;

type Texts = Vec<Vec<u8>>;

/// CRC-32 as zlib has it.
struct Crc(u32);

static CRC: [u32; 256] = {
    let mut table = [0; 256];
    let (mut at, mut byte) = (0, 0u32);
    while at < 256 {
        let (mut value, mut bit) = (byte, 0);
        while bit < 8 {
            value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
            bit += 1;
        }
        table[at] = value;
        (at, byte) = (at + 1, byte + 1);
    }
    table
};

impl Crc {
    fn add(&mut self, bytes: &[u8]) {
        let next = |crc: u32, &byte: &u8| CRC[usize::from(crc.to_le_bytes()[0] ^ byte)] ^ crc >> 8;
        self.0 = !bytes.iter().fold(!self.0, next);
    }
}

struct Seeded(u64);

impl Seeded {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % n
    }

    fn of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

const SPELLED: [&str; 9] = [
    "HelloWorld \u{6f22}\u{5b57}\u{30c6}\u{30b9}\u{30c8} 12345 it's",
    "1\u{3007}2",
    "!\u{2e80}x",
    "\u{2e80}x",
    "<|open|>message<|sep|>[BOS][EOS]<|end_of_msg|><|reserved_token_163592|>",
    "a\r\nb\r\n\r\n\r c\n\r\n d \r\n",
    "\0a\0\0 \0",
    "\u{feff}a\u{200b}b\u{ad}c",
    "",
];

#[rustfmt::skip]
const SCRIPTS: &[&str] = &[
    "the ", "The", " QUICK", "don't", "na\u{ef}ve ", "\u{df}", "\u{130}\u{131}", "\u{1c5}", "\u{2b0}",
    "\u{43c}\u{438}\u{440} ", "\u{41c}\u{418}\u{420}", "\u{3c9}\u{3a9}", "\u{5e9}\u{5dc}", "\u{627}\u{644}\u{639}",
    "\u{939}\u{93f}\u{928}\u{94d}", "\u{e44}\u{e17}\u{e22}", "\u{d55c}\u{ad6d}", "\u{3072}\u{3089}", "\u{30ab}\u{30bf}\u{30fc}",
    "\u{6f22}\u{5b57}", "\u{3005}", "\u{3007}", "\u{3021}", "\u{2e80}", "\u{20000}", "\u{f900}",
    "12", "3456", "\u{663}\u{664}", "\u{bd}", "\u{2167}", " ", "  ", "\t", "\n", "\r\n", "\u{a0}", "\u{3000}", "\u{2028}",
    "\x1c", "\u{85}", ".", "!!", " (", "/", "'", "\u{2019}s", "\u{301}", "\u{20dd}", "\u{1f600}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}", "\u{1f3fd}", "\u{1f1e9}\u{1f1ea}", "\u{200b}", "\u{e000}", "\0", "<|sep|>",
];

const BROKEN: [&[u8]; 8] =
    [b"\xff", b"\xc3", b"\xe4\xbd", b"\xf0\x9f\x98", b"\x80\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"];

const CONTRACTIONS: [&str; 24] = [
    "s", "t", "re", "ve", "m", "ll", "d", "S", "T", "RE", "rE", "VE", "Ve", "M", "LL", "lL", "D", "\u{17f}",
    "\u{212a}", "x", "r", "v", "l", "LE",
];

const FORMS: [&str; 8] =
    ["{0}\n", "a{0}b ", "A{0}B1", "1{0}2.", "\u{6f22}{0}\u{5b57}", " {0} {0}\n", "x'{0}", "{0}\u{301}{0}A"];

/// The texts of every character in every form, 256 characters each.
fn plane(plane: u32) -> Texts {
    let mut texts = Texts::new();
    for first in (plane << 16..(plane + 1) << 16).step_by(256) {
        for form in FORMS {
            let mut text = String::new();
            for c in (first..first + 256).filter_map(char::from_u32) {
                text.push_str(&form.replace("{0}", c.encode_utf8(&mut [0; 4])));
            }
            texts.push(text.into_bytes());
        }
    }
    texts
}

/// `count` texts of up to twelve parts.
fn mixed(rng: &mut Seeded, parts: &[&[u8]], count: usize) -> Texts {
    let mut one = || {
        let parts: Texts = (0..=rng.below(12)).map(|_| rng.of(parts).to_vec()).collect();
        parts.concat()
    };
    (0..count).map(|_| one()).collect()
}

/// A family's name and texts.
fn families(visit: &mut dyn FnMut(&str, Texts)) {
    visit("spelled", SPELLED.map(|t| t.as_bytes().to_vec()).to_vec());
    for number in 0..17 {
        visit(&format!("plane-{number}"), plane(number));
    }
    visit("alone", ('\0'..'\u{3000}').map(|c| c.to_string().into_bytes()).collect());
    let mut rng = Seeded(20_261_129);
    let mut parts: Vec<&[u8]> = SCRIPTS.iter().map(|s| s.as_bytes()).collect();
    visit("scripts", mixed(&mut rng, &parts, 20_000));
    parts.extend(BROKEN);
    visit("broken", mixed(&mut rng, &parts, 5_000));
    let mut texts = Texts::new();
    for head in ["it", "IT", "\u{e9}", "\u{5d0}", "\u{6f22}", "1", " ", "\u{301}", "!", ""] {
        for tail in CONTRACTIONS {
            texts.extend(["", "a", "S", "'s", " ", "1"].map(|behind| format!("{head}'{tail}{behind}").into_bytes()));
        }
    }
    visit("contractions", texts);
    let spaces = [" ", "\t", "\n", "\r", "\u{a0}", "\u{3000}", "\x0b", "\u{2028}"];
    let mut white = || {
        let mut text = "a".repeat(rng.below(2));
        for _ in 0..rng.below(9) {
            text.push_str(rng.of(&spaces));
        }
        text.push_str(rng.of(&["", "b", "1", "."]));
        text.into_bytes()
    };
    visit("white", (0..5_000).map(|_| white()).collect());
    let digits = |n: usize| format!("{}{}", "x".repeat(n % 2), "1234567890".repeat(3)).into_bytes()[..=n].to_vec();
    visit("digits", (0..30).map(digits).collect());
    let letters = b"abcdefghijklmnopqrstuvwxyz";
    visit(
        "long",
        vec![
            (0..1_000_000).map(|_| letters[rng.below(26)]).collect(),
            b"a".repeat(1_000_000),
            b"=".repeat(1_000_000),
            (" ".repeat(1_000_000) + "x").into_bytes(),
            "\u{6f22}\u{5b57}\u{4e2d}".repeat(111_112).into_bytes(),
            b"ab cd\r\n".repeat(142_858),
        ],
    );
}

/// How many ids the texts have, and a hash of them.
fn hashed(vocab: &Vocab<'_>, texts: &Texts) -> String {
    let (mut count, mut crc) = (0, Crc(0));
    let (mut scratch, mut bytes) = (Vec::new(), Vec::new());
    for text in texts {
        let lines = scratch_len(longest_piece(text, None)).unwrap();
        if lines > scratch.len() {
            scratch.resize(lines, Line::ZERO);
        }
        bytes.clear();
        encode(vocab, text, &mut scratch, |id| bytes.extend_from_slice(&id.0.to_le_bytes())).unwrap();
        count += bytes.len() / 4;
        crc.add(&bytes);
        crc.add(&[0xff; 4]);
    }
    format!("{count} {:08x}", crc.0)
}

fn load(file: &[u8]) -> Vocab<'static> {
    let arena = vec![Line::ZERO; Vocab::required(file).unwrap()].leak();
    Vocab::load(file, arena).unwrap()
}

fn base64(bytes: &[u8]) -> String {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let word = bytes.iter().fold(0u32, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - bytes.len()));
    let sign = |i: usize| if i <= bytes.len() { alphabet[(word >> (18 - 6 * i)) as usize & 63] } else { b'=' };
    (0..4).map(|i| char::from(sign(i))).collect()
}

fn pairs() -> String {
    let mut file = String::new();
    for byte in 0..=255u8 {
        writeln!(file, "{} {byte}", base64(&[byte])).unwrap();
    }
    for i in 0..=u16::MAX {
        writeln!(file, "{} {}", base64(&i.wrapping_mul(40503).to_be_bytes()), 256 + u32::from(i)).unwrap();
    }
    file
}

#[test]
#[cfg_attr(
    not(target_arch = "x86_64"),
    ignore = "takes many minutes where a processor is emulated, and finds nothing else"
)]
fn ids_are_those_of_tiktoken() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures");
    let demo = load(&std::fs::read(fixtures.join("demo/tiktoken.model")).unwrap());
    let pairs = load(pairs().as_bytes());
    let expected = std::fs::read_to_string(fixtures.join("tokenizer/parity.txt")).unwrap();
    let mut expected = expected.lines().filter(|line| !line.starts_with('#'));
    families(&mut |name, texts| {
        let mut crc = Crc(0);
        for text in &texts {
            crc.add(text);
            crc.add(b"\n\0");
        }
        let line = expected.next().unwrap();
        let texts_line = format!("{name} {:08x} ", crc.0);
        assert!(line.starts_with(&texts_line), "other texts: {texts_line}; parity.py has {line}");
        // `parity.py --run` finds the text, if this fails.
        assert_eq!(line, format!("{texts_line}{} {}", hashed(&demo, &texts), hashed(&pairs, &texts)));
    });
    assert_eq!(expected.next(), None);
}
