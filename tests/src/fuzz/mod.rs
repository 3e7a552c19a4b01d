//! What is thrown at everything that reads bytes from outside.
//!
//! A target is a function over any bytes: it calls a reader, and panics when the reader breaks a
//! promise (a round trip that is none, two ways that disagree, a range that leaves its file). To add
//! one, write the function in [`targets`], give it a line in [`TARGETS`], and a file and a `[[bin]]` in
//! `tests/fuzz`; a test compares the three lists.
//!
//! The same functions run in two ways: under libFuzzer (`tests/fuzz/run.sh`), which looks for new ways
//! through the code, and under `cargo test` (`tests/suite/fuzzing.rs`) on seeds, the committed corpus
//! and mutations of both, with seeds that are the same in every run.

mod command;
mod memory;
mod messages;
mod planned;
mod stored;
pub mod targets;

use crate::root;
use std::path::PathBuf;

/// Something that reads bytes from outside.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name, also of its file in `tests/fuzz/fuzz_targets` and of its corpus.
    pub name: &'static str,
    /// Reads the bytes. Panics if a promise is broken, and on nothing else.
    pub run: fn(&[u8]),
    /// Inputs that are accepted, or nearly so, made from the fixtures.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words of its language, for mutations.
    pub words: &'static [&'static str],
    /// Mutations that `cargo test` tries; slow targets get fewer.
    pub mutations: u32,
    /// Longest input that is worth while (bytes).
    pub max_len: usize,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { mutations: 4000, ..Target::json("json", targets::json, targets::json_seeds) },
    Target { mutations: 4000, ..Target::json("config", targets::config, targets::config_seeds) },
    Target { mutations: 4000, ..Target::json("header", targets::header, targets::header_seeds) },
    Target { mutations: 300, max_len: 16 << 10, ..Target::json("index", targets::index, targets::index_seeds) },
    Target { mutations: 300, max_len: 16 << 10, ..Target::json("shard", targets::shard, targets::shard_seeds) },
    Target { mutations: 100, ..Target::json("names", targets::names, targets::names_seeds) },
    Target { mutations: 100, max_len: 8 << 10, ..Target::binary("vocab", targets::vocab, targets::vocab_seeds) },
    Target { mutations: 2000, words: targets::SPELLINGS, ..Target::binary("text", targets::text, targets::text_seeds) },
    Target { mutations: 2000, ..Target::binary("tensor", targets::tensor, targets::tensor_seeds) },
    Target { mutations: 1000, ..Target::binary("views", targets::views, targets::views_seeds) },
    Target { mutations: 1000, ..Target::binary("trace", targets::trace, targets::trace_seeds) },
    Target {
        mutations: 2000,
        words: targets::TAGS,
        ..Target::binary("conversation", targets::conversation, targets::conversation_seeds)
    },
    Target { mutations: 1000, ..Target::binary("coded", targets::coded, targets::coded_seeds) },
    Target { mutations: 300, max_len: 16 << 10, ..Target::binary("trunk", targets::trunk, targets::trunk_seeds) },
    Target { mutations: 300, max_len: 32 << 10, ..Target::binary("session", targets::session, targets::session_seeds) },
    Target {
        mutations: 300,
        words: targets::MEMBERS,
        ..Target::json("messages", targets::messages, targets::messages_seeds)
    },
    Target { words: targets::FIELDS, ..Target::json("batch", targets::batch, targets::batch_seeds) },
    Target {
        mutations: 2000,
        words: targets::SUMS,
        ..Target::json("listing", targets::listing, targets::listing_seeds)
    },
    Target { mutations: 100, ..Target::json("plan", targets::plan, targets::plan_seeds) },
    Target {
        mutations: 2000,
        max_len: 1024,
        ..Target::binary("reference", targets::reference, targets::reference_seeds)
    },
    Target { mutations: 4000, max_len: 256, ..Target::binary("size", targets::size, targets::size_seeds) },
];

/// What JSON is made of, and what numbers go wrong at.
const JSON: &[&str] = &[
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    "\"",
    "\\",
    "\\u0000",
    "\\ud800",
    "\\udc00",
    "\\ud83d\\ude00",
    "null",
    "true",
    "false",
    "-1",
    "0",
    "1e400",
    "-0.0",
    "1e-46",
    "18446744073709551615",
    "18446744073709551616",
    "4294967295",
    "65535",
    "[[[[[[[[",
    "{\"a\":",
    "\u{e9}",
    "\u{1f600}",
];

impl Target {
    const fn json(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self { name, run, seeds, words: JSON, mutations: 1000, max_len: 4096 }
    }

    const fn binary(name: &'static str, run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) -> Self {
        Self { name, run, seeds, words: &[], mutations: 1000, max_len: 4096 }
    }

    /// Where the committed inputs are: what libFuzzer found worth keeping.
    #[must_use]
    pub fn corpus_dir(&self) -> PathBuf {
        root().join("tests/fuzz/corpus").join(self.name)
    }

    /// The seeds and the committed inputs, in an order that does not depend on the file system.
    ///
    /// # Panics
    /// If the corpus cannot be read.
    #[must_use]
    pub fn inputs(&self) -> Vec<Vec<u8>> {
        let mut inputs = (self.seeds)();
        if let Ok(dir) = std::fs::read_dir(self.corpus_dir()) {
            let mut paths: Vec<PathBuf> = dir.map(|entry| entry.expect("entry").path()).collect();
            paths.sort();
            inputs.extend(paths.iter().map(|path| std::fs::read(path).expect("a corpus file")));
        }
        inputs
    }
}

/// Random changes to inputs, the same for the same seed.
#[derive(Debug)]
pub struct Mutator {
    seed: u64,
}

impl Mutator {
    /// Starts from `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed: seed | 1 }
    }

    fn next(&mut self) -> u64 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    /// Below `n`; 0 if `n` is 0.
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % (n as u64).max(1)).unwrap_or(0)
    }

    /// A range of `len` bytes, short more often than long.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let from = self.below(len);
        let most = (len - from).min(1 << self.below(10));
        from..from + self.below(most + 1)
    }

    /// One of `inputs`, changed in one to four ways and not longer than the target wants.
    pub fn mutate(&mut self, target: &Target, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = inputs.get(self.below(inputs.len())).cloned().unwrap_or_default();
        for _ in 0..=self.below(4) {
            self.change(&mut bytes, target.words, inputs);
        }
        bytes.truncate(target.max_len);
        bytes
    }

    fn change(&mut self, bytes: &mut Vec<u8>, words: &[&str], inputs: &[Vec<u8>]) {
        const EDGES: [u64; 8] = [0, 1, 0x7f, 0x80, 0xff, 0xffff, 0x7fff_ffff, u64::MAX];
        let at = self.below(bytes.len() + 1);
        match self.below(8) {
            0 => drop(bytes.drain(at..)),
            1 => drop(bytes.drain(self.range(bytes.len()))),
            2 => {
                let again = bytes[self.range(bytes.len())].to_vec();
                bytes.splice(at..at, again);
            }
            3 => {
                let other = &inputs[self.below(inputs.len())];
                bytes.splice(at..at, other[self.range(other.len())].iter().copied());
            }
            4 if !words.is_empty() => {
                let word = words[self.below(words.len())];
                let end = if self.below(2) == 0 { at } else { bytes.len().min(at + word.len()) };
                bytes.splice(at..end, word.bytes());
            }
            5 => {
                let edge = EDGES[self.below(EDGES.len())].to_le_bytes();
                let size = 1 << self.below(4);
                let end = bytes.len().min(at + size);
                bytes.splice(at..end, edge[..size].iter().copied());
            }
            6 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << self.below(8);
                }
            }
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = self.next().to_le_bytes()[0];
                }
            }
        }
    }
}
