//! The parsers' entry points in a program whose panic handler does not exist.
//!
//! The handler calls [`k3_panic_is_reachable`], which nothing defines. `run.sh` links each entry on its
//! own and drops what it does not reach: if any way leads from the entry to a panic - an index, an
//! overflow, a slice, an `unwrap` - that the optimiser could not show to be impossible, the linker
//! misses the symbol. A panic inside the standard library's own code counts as well.
//!
//! Bounds checks are there as in any release build, and overflow is not checked, as in any release build.
#![no_std]

use core::hint::black_box;
use k3_core::carve::Line;
use k3_core::chat::{self, Part};
use k3_core::checkpoint::{Named, Tensor};
use k3_core::config::ModelConfig;
use k3_core::json::{Event, JsonError, Parser, State};
use k3_core::safetensors::{self, Header};
use k3_core::tokenizer::{self, ControlText, Decoder, Specials, Utf8Stream, Vocab};
use k3_core::view::{Bf16Matrix, Mxfp4Matrix, TokenId};

unsafe extern "C" {
    fn k3_panic_is_reachable() -> !;
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: it is never called: no program that contains this call can be linked.
    unsafe { k3_panic_is_reachable() }
}

/// An entry point: its own symbol, and arguments nothing is known about.
macro_rules! entries {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)? $body:block)*) => {
        $(#[unsafe(no_mangle)]
        #[inline(never)]
        pub fn $name($($arg: $type),*) $(-> $out)? $body)*
    };
}

entries! {
    fn entry_json(document: &[u8]) -> usize {
        let (mut parser, mut sum) = (Parser::new(document), 0_usize);
        while let Ok(Some(event)) = parser.next() {
            sum = sum.wrapping_add(match event {
                Event::Key(text) | Event::Str(text) => text.decoded_len(),
                Event::Number(n) => n.text().len(),
                _ => parser.depth(),
            });
        }
        sum
    }

    fn entry_json_window(state: State, window: &[u8], base: u64, last: bool) -> Result<bool, JsonError> {
        let mut parser = Parser::resume(state, window, base, last);
        parser.next().map(|event| event.is_some())
    }

    fn entry_json_skip(document: &[u8]) -> bool {
        Parser::new(document).skip_value().is_ok()
    }

    fn entry_json_decode(document: &[u8], buffer: &mut [u8]) -> usize {
        match Parser::new(document).next() {
            Ok(Some(Event::Str(text))) => text.decode_into(buffer).map_or(0, str::len),
            _ => 0,
        }
    }

    fn entry_json_integers(document: &[u8]) -> Option<u64> {
        match Parser::new(document).next() {
            Ok(Some(Event::Number(n))) => n.as_u64().or_else(|| n.as_i64().map(i64::unsigned_abs)),
            _ => None,
        }
    }

    fn entry_json_floats(document: &[u8]) -> f64 {
        match Parser::new(document).next() {
            Ok(Some(Event::Number(n))) => n.as_f64() + f64::from(n.as_f32()),
            _ => 0.0,
        }
    }

    fn entry_config(document: &[u8]) -> usize {
        match ModelConfig::parse(document) {
            Ok(config) => black_box(&config).vocab_size,
            Err(error) => error.faults().len(),
        }
    }

    fn entry_header(json: &[u8], file_len: u64) -> u64 {
        let Ok(header) = Header::parse(json, file_len) else { return 0 };
        header.entries().map_while(Result::ok).map(|e| e.len() ^ e.shape().len() as u64).fold(0, u64::wrapping_add)
    }

    fn entry_layout(ranges: &mut [(u64, u64)], data: (u64, u64)) -> bool {
        safetensors::check_layout(ranges, data).is_ok()
    }

    fn entry_tensor_name(name: &str, config: &ModelConfig) -> bool {
        matches!(Tensor::parse(name, config), Named::Known(_))
    }

    fn entry_vocab(file: &[u8], arena: &mut [Line]) -> u32 {
        match Vocab::required(file) {
            Ok(_) => Vocab::load(file, arena).map_or(0, |vocab| vocab.len()),
            Err(_) => 0,
        }
    }

    fn entry_names(specials: &mut Specials<'_>, id: u32, name: &str) -> bool {
        specials.set_name(TokenId(id), name).is_ok() && specials.check().is_ok()
    }

    fn entry_encode(vocab: &Vocab<'_>, text: &[u8], scratch: &mut [Line]) -> usize {
        let mut count = 0_usize;
        let done = tokenizer::encode(vocab, text, scratch, |id| count = count.wrapping_add(id.0 as usize));
        done.map_or(0, |()| count)
    }

    fn entry_encode_specials(vocab: &Vocab<'_>, specials: &Specials<'_>, text: &[u8], scratch: &mut [Line]) -> usize {
        let mut count = 0_usize;
        let out = |id: TokenId| count = count.wrapping_add(id.0 as usize);
        tokenizer::encode_with_specials(vocab, specials, text, scratch, out).map_or(0, |()| count)
    }

    fn entry_longest_piece(text: &[u8], specials: &Specials<'_>) -> usize {
        tokenizer::longest_piece(text, Some(specials)).wrapping_add(tokenizer::longest_piece(text, None))
    }

    fn entry_decode(vocab: &Vocab<'_>, specials: &Specials<'_>, id: u32, out: &mut dyn FnMut(&[u8])) -> bool {
        Decoder::new(vocab, specials, ControlText::Spell).push(TokenId(id), out).is_ok()
    }

    fn entry_utf8(stream: &mut Utf8Stream, bytes: &[u8], out: &mut dyn FnMut(&str)) {
        stream.push(bytes, &mut *out);
        stream.finish(out);
    }

    fn entry_chat_parse(parser: &mut chat::Parser<'_>, part: Part<'_>, out: &mut dyn FnMut(&str)) -> bool {
        let done = parser.push(part, |event| {
            if let chat::Event::Open { attributes, .. } = event {
                attributes.iter().for_each(|(key, _)| out(key));
            }
        });
        done.is_ok()
    }

    fn entry_views(bytes: &[u8], scales: &[u8], rows: usize, cols: usize) -> usize {
        let bf16 = Bf16Matrix::new(bytes, rows, cols).map_or(0, |view| view.rows());
        bf16.wrapping_add(Mxfp4Matrix::new(bytes, scales, rows, cols).map_or(0, |view| view.nan_scales()))
    }
}

/// The control of `run.sh`: what is not an entry, and must not link.
#[unsafe(no_mangle)]
pub fn control_panics(bytes: &[u8], at: usize) -> u8 {
    bytes[at]
}
