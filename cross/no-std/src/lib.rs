//! The whole core in a program that has nothing else: no std, no allocator, no C library.
//!
//! `run.sh` beside this file builds it, links it with nothing but itself, looks through its symbols
//! and runs it on x86-64 Linux. It exits with 0, or with the number of the step that went wrong. All
//! memory is on the stack.
//!
//! Building is the first half of the proof: if anything in the graph links `alloc`, rustc asks for a
//! global allocator; if anything links `std`, there are two panic handlers. Linking and running is the
//! second half, for the calls made here.
#![no_std]

#[path = "../../../k3-core/tests/tiny/mod.rs"]
mod tiny;

use k3_core::backend::Backend;
use k3_core::carve::Line;
use k3_core::checkpoint::{Named, Tensor, expected};
use k3_core::config::ModelConfig;
use k3_core::exec::Serial;
use k3_core::json::Parser;
use k3_core::model::{Extent, Model, State, Workspace};
use k3_core::ops::sample::argmax;
use k3_core::safetensors::Header;
use k3_core::tokenizer::{self, ControlText, Decoder, Specials, Utf8Stream, Vocab};
use k3_core::view::TokenId;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}

// The entry, the exit, and the five functions rustc may call by name for copies and comparisons. They
// are not Rust: a loop that copies would be turned into a call of itself.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".globl _start, memcpy, memmove, memset, memcmp, bcmp",
    "_start:",
    "xor ebp, ebp",
    "and rsp, -16",
    "call k3_main",
    "mov edi, eax",
    "mov eax, 60",
    "syscall",
    "memmove:",
    "mov rax, rdi",
    "sub rax, rsi",
    "cmp rax, rdx",
    "jae memcpy",
    // The target starts inside the source: from the end.
    "mov rax, rdi",
    "mov rcx, rdx",
    "lea rdi, [rdi + rdx - 1]",
    "lea rsi, [rsi + rdx - 1]",
    "std",
    "rep movsb",
    "cld",
    "ret",
    "memcpy:",
    "mov rax, rdi",
    "mov rcx, rdx",
    "rep movsb",
    "ret",
    "memset:",
    "mov r8, rdi",
    "mov eax, esi",
    "mov rcx, rdx",
    "rep stosb",
    "mov rax, r8",
    "ret",
    "memcmp:",
    "bcmp:",
    "xor eax, eax",
    "mov rcx, rdx",
    "test rcx, rcx",
    "jz 2f",
    "repe cmpsb",
    "je 2f",
    "movzx eax, byte ptr [rdi - 1]",
    "movzx ecx, byte ptr [rsi - 1]",
    "sub ecx, eax",
    "mov eax, ecx",
    "2:",
    "ret",
);

/// Zero, or the number of the first step that went wrong.
#[unsafe(no_mangle)]
pub extern "C" fn k3_main() -> u32 {
    let steps: [fn() -> Option<()>; 5] = [config, header, text, forward, names];
    (1..).zip(steps).find(|(_, step)| step().is_none()).map_or(0, |(i, _)| i)
}

/// `None` if `fact` is false.
fn holds(fact: bool) -> Option<()> {
    fact.then_some(())
}

/// A config is read, and a wrong one is refused.
fn config() -> Option<()> {
    let config = ModelConfig::parse(tiny::CONFIG).ok()?;
    holds(config.num_mla_layers() == 2)?;
    holds(ModelConfig::parse(br#"{"model_type": "kimi_linear"}"#).is_err())
}

/// JSON is walked, and a safetensors header read.
fn header() -> Option<()> {
    Parser::new(br#"{"a": [1, 2.5e3, "\u00e9"]}"#).skip_value().ok()?;
    let json = br#"{"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#;
    let header = Header::parse(json, 8 + json.len() as u64 + 12).ok()?;
    let mut entries = 0;
    for entry in header.entries() {
        holds(entry.ok()?.len() == 12)?;
        entries += 1;
    }
    holds(entries == 1)
}

/// Text becomes ids and ids become text.
fn text() -> Option<()> {
    // A vocabulary of the single bytes: 256 lines of base64 and rank.
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut file, mut len) = ([0_u8; 2560], 0);
    for byte in 0..=255_u8 {
        let (b, digits) = (usize::from(byte), [byte / 100, byte / 10 % 10, byte % 10]);
        let skip = digits.iter().take(2).take_while(|d| **d == 0).count();
        let base64 = [alphabet[b >> 2], alphabet[(b & 3) << 4], b'=', b'=', b' '];
        let rank = digits.iter().skip(skip).map(|d| d + b'0');
        for c in base64.into_iter().chain(rank).chain([b'\n']) {
            *file.get_mut(len)? = c;
            len += 1;
        }
    }
    let file = file.get(..len)?;
    let mut arena = [Line::ZERO; 4608];
    let needed = Vocab::required(file).ok()?;
    let vocab = Vocab::load(file, arena.get_mut(..needed)?).ok()?;
    let specials = Specials::new(vocab.len(), &mut []);

    let prompt = "two words, \u{6570}\u{5b57} 123 and <|sep|> what follows".as_bytes();
    let mut scratch = [Line::ZERO; 16];
    let (mut ids, mut count) = ([TokenId(0); 64], 0);
    tokenizer::encode_with_specials(&vocab, &specials, prompt, &mut scratch, |id| {
        ids[count] = id;
        count += 1;
    })
    .ok()?;
    let decoder = Decoder::new(&vocab, &specials, ControlText::Spell);
    let (mut stream, mut same, mut rest) = (Utf8Stream::new(), true, prompt);
    for id in ids.get(..count)? {
        decoder
            .push(*id, |bytes| {
                stream.push(bytes, |text| match rest.split_at_checked(text.len()) {
                    Some((front, back)) if front == text.as_bytes() => rest = back,
                    _ => same = false,
                });
            })
            .ok()?;
    }
    holds(same && rest.is_empty())
}

/// A whole model runs, on every back end of the machine, to the same ids.
fn forward() -> Option<()> {
    const EXTENT: Extent = Extent { chunk: 5, context: 16, width: 1 };
    let config = ModelConfig::parse(tiny::CONFIG).ok()?;
    let (mut state, mut scratch, mut logits) = ([Line::ZERO; 128], [Line::ZERO; 1024], [0.0_f32; 48]);
    let mut first = None;
    for backend in Backend::available() {
        let mut state = State::new(&mut state, &config, EXTENT.context).ok()?;
        let mut workspace = Workspace::new(&mut scratch, &config, EXTENT).ok()?;
        let model = Model { config: &config, backend, exec: &Serial };
        let mut weights = tiny::Tiny { config: &config, block: 3 };
        let mut ids = [3, 47, 0, 12, 12].map(TokenId);
        let mut chunk = ids.len();
        for _ in 0..3 {
            model.forward(&mut weights, &mut state, &mut workspace, &ids[..chunk], &mut logits, &mut ()).ok()?;
            (ids[0], chunk) = (argmax(&logits).ok()??, 1);
        }
        holds(*first.get_or_insert(ids[0]) == ids[0])?;
    }
    holds(first.is_some())
}

/// Every tensor's name is written and read back.
fn names() -> Option<()> {
    use core::fmt::Write as _;

    struct Name([u8; 96], usize);
    impl core::fmt::Write for Name {
        fn write_str(&mut self, s: &str) -> core::fmt::Result {
            let to = self.0.get_mut(self.1..).and_then(|to| to.get_mut(..s.len())).ok_or(core::fmt::Error)?;
            to.copy_from_slice(s.as_bytes());
            self.1 += s.len();
            Ok(())
        }
    }

    let config = ModelConfig::parse(tiny::CONFIG).ok()?;
    for tensor in expected(&config) {
        let mut name = Name([0; 96], 0);
        write!(name, "{tensor}").ok()?;
        let name = core::str::from_utf8(name.0.get(..name.1)?).ok()?;
        holds(Tensor::parse(name, &config) == Named::Known(tensor))?;
    }
    Some(())
}
