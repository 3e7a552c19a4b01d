//! The core never allocates: it is counted, call by call.
//!
//! That it links without an allocator is proved in `cross/no-std`; here the calls are made in a
//! program that has one.

#[path = "../../k3-core/tests/tiny/mod.rs"]
pub(crate) mod tiny;

use crate::counting::allocations;
use k3_core::backend::Backend;
use k3_core::carve::Line;
use k3_core::config::ModelConfig;
use k3_core::exec::Serial;
use k3_core::model::{Extent, Model, State, Workspace};
use k3_core::ops::sample::argmax;
use k3_core::safetensors::{Header, header_len};
use k3_core::tokenizer::{self, ControlText, Decoder, Specials, Utf8Stream, Vocab};
use k3_core::view::TokenId;
use k3_tests::root;
use tiny::{CONFIG, Tiny};

/// Runs `f` and requires that it did not allocate.
fn none<T>(what: &str, f: impl FnOnce() -> T) -> T {
    let (value, calls) = allocations(f);
    assert_eq!(calls, 0, "{what} allocated");
    value
}

#[test]
fn the_counter_counts_this_thread_only() {
    let ((), calls) = allocations(|| {
        let mut bytes: Vec<u8> = Vec::with_capacity(8);
        bytes.extend_from_slice(&[1; 64]);
        drop(std::hint::black_box(bytes));
    });
    assert_eq!(calls, 2, "one allocation and one that grew it");
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            for i in 0..1000 {
                drop(std::hint::black_box(vec![i; 10]));
            }
        });
        none("a thread that does nothing", || std::hint::black_box(1));
        busy.join().expect("the other thread");
    });
}

#[test]
fn files_are_parsed_without_allocating() {
    let folder = root().join("fixtures/tiny");
    let config = std::fs::read(folder.join("config.json")).expect("config.json");
    assert!(none("a config", || ModelConfig::parse(&config).is_ok()));
    assert!(none("a refused config", || ModelConfig::parse(br#"{"model_type": "kimi_k3"}"#).is_err()));

    let shard = std::fs::read(folder.join("model-00002-of-000012.safetensors")).expect("a shard");
    let (first, rest) = shard.split_first_chunk::<8>().expect("a length");
    let file_len = shard.len() as u64;
    let entries = none("a shard's header", || {
        let len = header_len(*first, file_len).expect("a header that fits");
        let header = Header::parse(&rest[..usize::try_from(len).expect("fits")], file_len).expect("a header");
        header.entries().filter(Result::is_ok).count()
    });
    assert!(entries > 50, "{entries} entries");
}

#[test]
fn text_goes_there_and_back_without_allocating() {
    let file = std::fs::read(root().join("fixtures/tiny/tiktoken.model")).expect("a vocabulary");
    let lines = none("the vocabulary's size", || Vocab::required(&file)).expect("a size");
    let mut arena = vec![Line::ZERO; lines];
    let vocab = none("the vocabulary", || Vocab::load(&file, &mut arena)).expect("a vocabulary");
    let specials = none("the special tokens", || Specials::new(vocab.len(), &mut []));

    // Words, digits, a script without spaces, a control's spelling, a piece longer than any buffer.
    let text = format!("the other 12345 words \u{6570}\u{5b57} <|sep|>\r\n{} {}", "y".repeat(3000), "! ".repeat(200));
    let piece = none("the longest piece", || tokenizer::longest_piece(text.as_bytes(), Some(&specials)));
    let mut scratch = vec![Line::ZERO; tokenizer::scratch_len(piece).expect("a size")];
    let mut ids = Vec::with_capacity(text.len());
    none("encoding", || {
        tokenizer::encode_with_specials(&vocab, &specials, text.as_bytes(), &mut scratch, |id| ids.push(id))
    })
    .expect("ids");

    let (mut stream, mut shown) = (Utf8Stream::new(), String::with_capacity(text.len()));
    none("decoding", || {
        let decoder = Decoder::new(&vocab, &specials, ControlText::Spell);
        for id in &ids {
            decoder.push(*id, |bytes| stream.push(bytes, |part| shown.push_str(part))).expect("a known id");
        }
        stream.finish(|part| shown.push_str(part));
    });
    assert_eq!(shown, text);
}

#[test]
fn a_pass_does_not_allocate() {
    let config = ModelConfig::parse(CONFIG).expect("a config");
    let extent = Extent { chunk: 4, context: 16, width: 1 };
    let mut memory = vec![Line::ZERO; State::lines(&config, extent.context).expect("a size")];
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).expect("a size")];
    let mut logits = vec![0.0; config.vocab_size];
    for backend in Backend::available() {
        none(backend.name(), || {
            let mut state = State::new(&mut memory, &config, extent.context).expect("a state");
            let mut workspace = Workspace::new(&mut scratch, &config, extent).expect("a workspace");
            let model = Model { config: &config, backend, exec: &Serial };
            let mut weights = Tiny { config: &config, block: 3 };
            let mut ids = [3, 47, 0, 12].map(TokenId);
            let mut chunk = ids.len();
            for _ in 0..5 {
                model
                    .forward(&mut weights, &mut state, &mut workspace, &ids[..chunk], &mut logits, &mut ())
                    .expect("a pass");
                (ids[0], chunk) = (argmax(&logits).expect("finite logits").expect("an id"), 1);
            }
        });
    }
}
