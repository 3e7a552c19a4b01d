//! The functions. Each takes any bytes; a panic is a finding. Those with a setting of their own have a file
//! of their own.
#![expect(clippy::missing_panics_doc, reason = "a panic is what a target is for")]

pub use super::command::{FIELDS, SUMS, batch, batch_seeds, listing, listing_seeds};
pub use super::messages::{MEMBERS, messages, messages_seeds};
pub use super::planned::{plan, plan_seeds};
pub use super::stored::{coded, coded_seeds, session, session_seeds, trunk, trunk_seeds};

use super::memory::Files;
use crate::root;
use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::chat::{self, Part, Start};
use k3_core::checkpoint::{self, Named, Tensor};
use k3_core::config::ModelConfig;
use k3_core::json::{Event, JsonError, MAX_DEPTH, Parser, State};
use k3_core::math::canonical_bits;
use k3_core::model::{Extent, Workspace};
use k3_core::safetensors::{self, Header};
use k3_core::tokenizer::{self, Control, ControlText, Decoder, Pieces, Specials, Utf8Stream, Vocab};
use k3_core::view::{Bf16Matrix, GROUP, Mxfp4Matrix};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::index::Index;
use k3_platform::policy::Policy;
use k3_platform::reference::{Reference, ReferenceError};
use k3_platform::trace::{self as expert_trace, Trace};
use k3_platform::units;
use k3_platform::vocabulary::VocabularyFiles;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The config of the smallest model there is.
pub(super) fn tiny_config() -> &'static ModelConfig {
    static CONFIG: OnceLock<ModelConfig> = OnceLock::new();
    CONFIG.get_or_init(|| ModelConfig::parse(&fixture("k3-core/tests/tiny/config.json")).expect("the tiny config"))
}

fn fixture(name: &str) -> Vec<u8> {
    let path = root().join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Formats an error, since a message is code too. It is one line, and nothing in it does anything to a
/// terminal: names that it repeats are a stranger's.
pub(super) fn message(error: &dyn std::error::Error) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains(char::is_control), "a message of one line: {text:?}");
    let mut source = error.source();
    while let Some(error) = source {
        assert!(!error.to_string().is_empty());
        source = error.source();
    }
}

/// An event of [`json`] without what it borrows: kind, text, place.
type Seen = (u8, String, u64, usize);

fn seen(parser: &Parser<'_>, event: &Event<'_>) -> Seen {
    let (kind, text) = match event {
        Event::ObjectStart => (b'{', String::new()),
        Event::ObjectEnd => (b'}', String::new()),
        Event::ArrayStart => (b'[', String::new()),
        Event::ArrayEnd => (b']', String::new()),
        Event::Key(text) | Event::Str(text) => {
            let decoded: String = text.chars().collect();
            assert_eq!(decoded.len(), text.decoded_len());
            let mut buffer = vec![0; decoded.len()];
            assert_eq!(text.decode_into(&mut buffer), Ok(decoded.as_str()));
            assert!(*text == decoded.as_str() && text.raw().is_none_or(|raw| raw == decoded));
            (if matches!(event, Event::Key(_)) { b'k' } else { b's' }, decoded)
        }
        Event::Number(n) => {
            assert!(!n.as_f64().is_nan() && !n.as_f32().is_nan(), "{}", n.text());
            assert!(n.as_u64().is_none_or(|value| value.to_string() == n.text()));
            (b'0', n.text().to_owned())
        }
        Event::Bool(value) => (b'b', value.to_string()),
        Event::Null => (b'n', String::new()),
    };
    (kind, text, parser.token_offset(), parser.depth())
}

/// The whole document and its windows give the same events and the same error.
pub fn json(data: &[u8]) {
    let mut parser = Parser::new(data);
    let mut events = Vec::new();
    let whole = loop {
        match parser.next() {
            Ok(Some(event)) => events.push(seen(&parser, &event)),
            Ok(None) => break Ok(()),
            Err(error) => {
                message(&error);
                assert_eq!(parser.next(), Err(error), "asking again gives the same answer");
                break Err(error);
            }
        }
        assert!(parser.depth() <= MAX_DEPTH && events.len() <= data.len());
    };
    assert!(!matches!(whole, Err(JsonError::Incomplete { .. })));

    // Windows that grow where they must. Their size comes from the input, so all of them occur.
    let step = 1 + data.len() % 13;
    let (mut state, mut start, mut end, mut again) = (State::START, 0, step.min(data.len()), Vec::new());
    let windowed = loop {
        let mut parser = Parser::resume(state, &data[start..end], start as u64, end == data.len());
        let stop = loop {
            match parser.next() {
                Ok(Some(event)) => again.push(seen(&parser, &event)),
                Ok(None) => break Some(Ok(())),
                Err(JsonError::Incomplete { .. }) => break None,
                Err(error) => break Some(Err(error)),
            }
        };
        if let Some(stop) = stop {
            break stop;
        }
        assert!(end < data.len(), "the last window is never incomplete");
        (state, start) = (parser.state(), start + parser.consumed());
        // Doubling a window that does not hold a token keeps the work linear.
        end = data.len().min(end + step.max(end - start));
    };
    assert_eq!(whole, windowed);
    assert!(events == again, "windows give other events");

    assert!(whole.is_err() || Parser::new(data).skip_value().is_ok(), "a document can be skipped");
}

/// Documents of all sorts.
#[must_use]
pub fn json_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        r#"{"a": [1, -2.5e+3, "\u00e9\ud83d\ude00\n", {}, [], true, false, null]}"#,
        r#"[[[[{"k\u0065y":"\"\\\/\b\f\n\r\t"}]]]]"#,
        " \t\r\n0 ",
        "\"a string, and nothing else\"",
        "-0.0e-0",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into();
    seeds.push([vec![b'['; MAX_DEPTH], vec![b']'; MAX_DEPTH]].concat());
    seeds.push(fixture("fixtures/tiny/config.json"));
    seeds
}

/// A config is refused with facts, or everything that is derived from it can be.
pub fn config(data: &[u8]) {
    let config = match ModelConfig::parse(data) {
        Ok(config) => config,
        Err(error) => {
            assert!(error.faults().len() <= data.len() + 256);
            for fault in error.faults() {
                let text = fault.to_string();
                assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
            }
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert_eq!(config.num_mla_layers() + config.num_kda_layers(), config.num_hidden_layers);
    for layer in config.layers().take(4) {
        for tensor in checkpoint::layer_tensors(&config, layer) {
            let spec = Tensor::Layer(layer, tensor).spec(&config);
            assert!(spec.bytes() >= spec.elements(), "{tensor:?}");
        }
        assert!(checkpoint::layer_bytes(&config, layer) > 0);
    }
    let census = checkpoint::census(&config);
    assert!(census.total().tensors <= checkpoint::slot_count(&config) as u64);
    for tensor in checkpoint::expected(&config).take(200) {
        let slot = checkpoint::slot(tensor, &config);
        assert_eq!(checkpoint::tensor_at(slot, &config), Some(tensor));
        assert_eq!(Tensor::parse(&tensor.to_string(), &config), Named::Known(tensor));
    }
    for extent in [(1, 1), (7, 100), (usize::MAX, 1), (1, usize::MAX), (4096, 1 << 40)] {
        let extent = Extent { chunk: extent.0, context: extent.1, width: 1 };
        let _ = Workspace::lines(&config, extent);
        let _ = k3_core::model::State::lines(&config, extent.context);
    }
}

/// The configs of the fixtures.
#[must_use]
pub fn config_seeds() -> Vec<Vec<u8>> {
    ["fixtures/tiny/config.json", "fixtures/demo/config.json", "k3-core/tests/tiny/config.json"].map(fixture).into()
}

/// What an entry says lies in the file and has the size of its shape. Of the input, the first eight
/// bytes are the length of the file; the rest is the header.
pub fn header(data: &[u8]) {
    let Some((first, json)) = data.split_first_chunk::<8>() else { return };
    let file_len = u64::from_le_bytes(*first);
    let header = match Header::parse(json, file_len) {
        Ok(header) => header,
        Err(error) => return message(&error),
    };
    assert_eq!(safetensors::header_len((json.len() as u64).to_le_bytes(), file_len), Ok(json.len() as u64));
    assert_eq!(header.data_start() + header.data_len(), file_len);
    let mut ranges = Vec::new();
    for entry in header.entries() {
        match entry {
            Ok(entry) => {
                assert!(header.data_start() <= entry.begin && entry.begin <= entry.end && entry.end <= file_len);
                if let Some(dtype) = entry.dtype {
                    assert_eq!(entry.shape().iter().product::<u64>() * dtype.size(), entry.len());
                }
                ranges.push((entry.begin, entry.end));
            }
            Err(error) => {
                message(&error);
                if let Some(at) = error.at() {
                    assert!(header.name_at(at).is_some(), "the error names a tensor");
                }
                return;
            }
        }
    }
    assert!(ranges.len() <= json.len());
    match safetensors::check_layout(&mut ranges, (header.data_start(), file_len)) {
        Ok(()) => assert_eq!(ranges.iter().map(|r| r.1 - r.0).sum::<u64>(), header.data_len()),
        Err(error) => message(&error),
    }
}

/// Headers of fixtures, and one with everything a header may have.
#[must_use]
pub fn header_seeds() -> Vec<Vec<u8>> {
    let framed = |json: &[u8], data: u64| [&(8 + json.len() as u64 + data).to_le_bytes(), json].concat();
    let mut seeds = vec![
        framed(
            br#"{"__metadata__":{"format":"pt"},"a\u0062":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
                "c":{"shape":[],"other":[{}],"data_offsets":[24,32],"dtype":"I64"}}  "#,
            32,
        ),
        framed(b"{}", 0),
    ];
    for name in ["model-00010-of-000012", "model-00011-of-000012", "model-00012-of-000012"] {
        let shard = fixture(&format!("fixtures/tiny/{name}.safetensors"));
        let (first, rest) = shard.split_first_chunk::<8>().expect("a length");
        let len = usize::try_from(u64::from_le_bytes(*first)).expect("fits");
        seeds.push(framed(&rest[..len], (rest.len() - len) as u64));
    }
    seeds
}

pub(super) const SHARDS: [&str; 2] = ["a.safetensors", "b.safetensors"];

/// An index of [`tiny_config`] over two shards, the header of each, and the bytes of its data.
pub(super) fn tiny_files() -> (String, [(String, u64); 2]) {
    files_of(tiny_config())
}

/// The same of another config.
pub(super) fn files_of(config: &ModelConfig) -> (String, [(String, u64); 2]) {
    let mut index = String::from(r#"{"metadata":{"total_size":1},"weight_map":{"#);
    let mut shards = [const { (String::new(), 0) }; 2];
    for (i, tensor) in checkpoint::expected(config).enumerate() {
        let (header, at) = &mut shards[i % 2];
        let spec = tensor.spec(config);
        let comma = if i == 0 { "" } else { "," };
        write!(index, r#"{comma}"{tensor}":"{}""#, SHARDS[i % 2]).expect("a string grows");
        let comma = if header.is_empty() { "{" } else { "," };
        let (dtype, end) = (spec.dtype.name(), *at + spec.bytes());
        write!(
            header,
            r#"{comma}"{tensor}":{{"dtype":"{dtype}","shape":{:?},"data_offsets":[{at},{end}]}}"#,
            spec.shape()
        )
        .expect("a string grows");
        *at = end;
    }
    index.push_str("}}");
    shards.iter_mut().for_each(|shard| shard.0.push('}'));
    (index, shards)
}

pub(super) fn put_shard(files: &Files, name: &str, header: &[u8], data: u64) {
    files.put(name, [&(header.len() as u64).to_le_bytes(), header].concat(), data);
}

fn open_index(files: &Files) {
    let config = tiny_config();
    match Index::open(Path::new("/model"), files, config) {
        Ok(index) => {
            for tensor in checkpoint::expected(config) {
                let place = index.place(tensor, config);
                let shard = &index.shards()[usize::from(place.shard)];
                assert!(place.offset + index.stored_bytes(tensor, config) as u64 <= shard.len, "{tensor}");
            }
        }
        Err(error) => message(&error),
    }
}

/// An index over shards that are as they should be.
pub fn index(data: &[u8]) {
    static FILES: OnceLock<Files> = OnceLock::new();
    let files = FILES.get_or_init(|| {
        let files = Files::default();
        for (name, (header, data)) in SHARDS.iter().zip(&tiny_files().1) {
            put_shard(&files, name, header.as_bytes(), *data);
        }
        files
    });
    files.put("model.safetensors.index.json", data.to_vec(), 0);
    open_index(files);
}

/// The right index, and one with shards nobody has.
#[must_use]
pub fn index_seeds() -> Vec<Vec<u8>> {
    let index = tiny_files().0;
    let other = index.replace(SHARDS[1], "c.safetensors");
    let more = index.replacen("{\"lang", "{\"vision_tower.x\":\"a.safetensors\",\"lang", 1);
    [index, other, more].map(String::into_bytes).into()
}

/// A shard under an index that is as it should be.
pub fn shard(data: &[u8]) {
    static FILES: OnceLock<(Files, u64)> = OnceLock::new();
    let (files, len) = FILES.get_or_init(|| {
        let files = Files::default();
        let (index, [(first, data), (_, len)]) = tiny_files();
        files.put("model.safetensors.index.json", index.into_bytes(), 0);
        put_shard(&files, SHARDS[0], first.as_bytes(), data);
        (files, len)
    });
    put_shard(files, SHARDS[1], data, *len);
    open_index(files);
}

/// The right header, and with another order and blanks.
#[must_use]
pub fn shard_seeds() -> Vec<Vec<u8>> {
    let (_, [(first, _), (second, _)]) = tiny_files();
    vec![
        first.into_bytes(),
        second.replacen('{', "  {\"__metadata__\":{\"a\":\"b\"},", 1).into_bytes(),
        second.into_bytes(),
    ]
}

/// `tokenizer_config.json` beside a checkpoint that is as it should be.
pub fn names(data: &[u8]) {
    static OPENED: OnceLock<(Arc<Files>, Checkpoint)> = OnceLock::new();
    let (files, checkpoint) = OPENED.get_or_init(|| {
        let files = Arc::new(Files::default());
        for entry in std::fs::read_dir(root().join("fixtures/tiny")).expect("the tiny checkpoint") {
            let name = entry.expect("entry").file_name().into_string().expect("a plain name");
            files.put(&name, fixture(&format!("fixtures/tiny/{name}")), 0);
        }
        let checkpoint = Checkpoint::open(Path::new("/model"), Arc::<Files>::clone(&files)).expect("opens");
        (files, checkpoint)
    });
    files.put("tokenizer_config.json", data.to_vec(), 0);
    let mut opened = match VocabularyFiles::open(checkpoint) {
        Ok(opened) => opened,
        Err(error) => return message(&error),
    };
    match opened.load() {
        Ok(vocabulary) => {
            let text = "[BOS]<|open|>one two<|sep|>\u{fffd}".as_bytes();
            let mut back = Vec::new();
            for id in vocabulary.encode(text, true).expect("memory for a short text") {
                vocabulary.decode(id, &mut back);
            }
            assert_eq!(back, text);
        }
        Err(error) => message(&error),
    }
}

/// The fixtures' own, and one that renames.
#[must_use]
pub fn names_seeds() -> Vec<Vec<u8>> {
    let base = fixture("fixtures/tiny/tiktoken.model").iter().filter(|&&b| b == b'\n').count();
    let renamed = format!(
        r#"{{"added_tokens_decoder":{{"{}":{{"content":"<\u007cnew|>","special":true}},"{}":{{"content":"x"}}}}}}"#,
        base + 3,
        base + 100
    );
    vec![fixture("fixtures/tiny/tokenizer_config.json"), renamed.into_bytes(), b"{}".to_vec()]
}

/// A vocabulary that is accepted knows each of its tokens, and encodes what it decodes.
pub fn vocab(data: &[u8]) {
    let lines = match Vocab::required(data) {
        Ok(lines) => lines,
        Err(error) => return message(&error),
    };
    // The memory asked for is in proportion to the file.
    assert!(lines <= 4608 + data.len(), "{lines} lines for {} bytes", data.len());
    let mut arena = vec![Line::ZERO; lines];
    let vocab = match Vocab::load(data, &mut arena) {
        Ok(vocab) => vocab,
        Err(error) => return message(&error),
    };
    assert!(Vocab::load(data, &mut vec![Line::ZERO; lines - 1]).is_err(), "one line less is too small");
    for rank in 0..vocab.len() {
        let token = vocab.token(rank).expect("a token for each rank");
        assert!(!token.is_empty() && token.len() <= vocab.longest());
        assert_eq!(vocab.rank(token), Some(rank));
    }
    assert_eq!(vocab.token(vocab.len()), None);
    let tail = &data[data.len().saturating_sub(300)..];
    round_trip(&vocab, &Specials::new(vocab.len(), &mut []), tail);
}

/// The fixtures' own, whole and cut behind the single bytes.
#[must_use]
pub fn vocab_seeds() -> Vec<Vec<u8>> {
    let whole = fixture("fixtures/tiny/tiktoken.model");
    let bytes: Vec<u8> = whole.split_inclusive(|&b| b == b'\n').take(256).flatten().copied().collect();
    let windows = String::from_utf8_lossy(&bytes).replace('\n', "\r\n").into_bytes();
    vec![whole, bytes, windows]
}

/// Encodes with and without control spellings; what comes back is what went in.
fn round_trip(vocab: &Vocab<'_>, specials: &Specials<'_>, text: &[u8]) {
    let joined: Vec<u8> = Pieces::new(text).flatten().copied().collect();
    assert!(joined == text, "pieces are the text");
    for special in [None, Some(specials)] {
        let piece = tokenizer::longest_piece(text, special);
        assert!(piece <= text.len());
        let mut scratch = vec![Line::ZERO; tokenizer::scratch_len(piece).expect("a size")];
        let mut ids = Vec::new();
        let out = |id| ids.push(id);
        match special {
            None => tokenizer::encode(vocab, text, &mut scratch, out),
            Some(specials) => tokenizer::encode_with_specials(vocab, specials, text, &mut scratch, out),
        }
        .expect("the scratch is made for the longest piece");
        assert!(ids.len() <= text.len());
        let decoder = Decoder::new(vocab, specials, ControlText::Spell);
        let (mut bytes, mut shown, mut stream) = (Vec::new(), String::new(), Utf8Stream::new());
        for id in ids {
            assert!(special.is_some() || specials.control(id).is_none(), "plain text has no control ids");
            decoder
                .push(id, |part| {
                    bytes.extend_from_slice(part);
                    stream.push(part, |text| shown.push_str(text));
                })
                .expect("an id that was encoded");
            assert!(stream.held() <= 3);
        }
        stream.finish(|text| shown.push_str(text));
        assert!(bytes == text, "decoding gives the text");
        assert!(shown == String::from_utf8_lossy(text), "the stream shows what a lossy conversion does");
    }
}

/// Spellings of control ids, for the mutations of [`text`].
pub const SPELLINGS: &[&str] = &[
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|reserved_token_",
    "|>",
    "[BOS]",
    "[EOS]",
    "<|",
    "\u{6570}\u{5b57}",
    "'ll",
    "\r\n",
    "   ",
    "\u{301}",
    "\u{200d}",
    "\u{fffd}",
    "\u{10ffff}",
    "0123",
];

/// Any text through the demo's vocabulary.
pub fn text(data: &[u8]) {
    // Its memory is never given back: there is one in a process.
    static VOCAB: OnceLock<Vocab<'static>> = OnceLock::new();
    let vocab = VOCAB.get_or_init(|| {
        let file = fixture("fixtures/demo/tiktoken.model");
        let arena = vec![Line::ZERO; Vocab::required(&file).expect("a size")].leak();
        Vocab::load(&file, arena).expect("the demo's vocabulary")
    });
    round_trip(vocab, &Specials::new(vocab.len(), &mut []), data);
}

/// Texts with everything that is cut in its own way.
#[must_use]
pub fn text_seeds() -> Vec<Vec<u8>> {
    let mut seeds: Vec<Vec<u8>> = [
        "In the beginning God created the heaven and the earth.",
        "the other 12345 words \u{6570}\u{5b57} <|sep|>\r\n\t  x'LL you've  ",
        "<|open|>message role=\"user\"<|sep|>text<|close|>message<|sep|>[EOS]<|reserved_token_4000|>",
        "e\u{301}\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}\u{ad}\u{2028}\u{3000}\u{661}\u{2167}",
    ]
    .map(|text| text.as_bytes().to_vec())
    .into();
    seeds.push(b"\xff\xfe\xc0\x80\xed\xa0\x80\xf4\x90\x80\x80\xe2\x82".to_vec());
    seeds.push("y".repeat(700).into_bytes());
    seeds
}

/// A tensor's name that is known is written as it was read.
pub fn tensor(data: &[u8]) {
    let Ok(name) = std::str::from_utf8(data) else { return };
    let config = tiny_config();
    if let Named::Known(tensor) = Tensor::parse(name, config) {
        assert_eq!(tensor.to_string(), name);
        assert!(tensor.exists(config));
        assert_eq!(checkpoint::tensor_at(checkpoint::slot(tensor, config), config), Some(tensor));
    }
}

/// Each kind of name.
#[must_use]
pub fn tensor_seeds() -> Vec<Vec<u8>> {
    let mut names: Vec<String> = checkpoint::expected(tiny_config()).step_by(7).map(|t| t.to_string()).collect();
    names.push("vision_tower.encoder.norm.weight".into());
    names.into_iter().map(String::into_bytes).collect()
}

/// Weights of any bits: a view is refused, or every back end multiplies it to the same bits.
///
/// The input is rows, columns, positions, then activations and weights.
pub fn views(data: &[u8]) {
    let Some((&[rows, cols, positions, kind], rest)) = data.split_first_chunk::<4>() else { return };
    let (rows, cols, positions) = (usize::from(rows % 9), usize::from(cols), 1 + usize::from(positions % 6));
    let mxfp4 = kind % 2 == 1;
    let cols = if mxfp4 { cols / 4 * GROUP / 8 * 8 } else { cols };
    let (words, _) = rest.as_chunks::<4>();
    let x: Vec<f32> = (0..positions * cols).map(|i| words.get(i).map_or(1.0, |w| f32::from_le_bytes(*w))).collect();
    let weights = rest.get(x.len() * 4..).unwrap_or_default();
    let mut first: Option<Vec<u32>> = None;
    for backend in Backend::available() {
        let mut buf = vec![0.0; Panel::len(cols, positions).expect("a size")];
        let mut out = vec![0.0; rows * positions];
        if mxfp4 {
            let (packed, scales) = weights.split_at(weights.len().min(rows * cols / 2));
            let Ok(view) = Mxfp4Matrix::new(packed, &scales[..scales.len().min(rows * cols / GROUP)], rows, cols)
            else {
                return;
            };
            assert!(view.nan_scales() <= view.scales().len());
            let panel = backend.pack(Layout::Mxfp4, &x, cols, positions, &mut buf);
            backend.matmul_mxfp4(view, &panel, &mut out);
        } else {
            let Ok(view) = Bf16Matrix::new(&weights[..weights.len().min(rows * cols * 2)], rows, cols) else { return };
            let panel = backend.pack(Layout::Bf16, &x, cols, positions, &mut buf);
            backend.matmul_bf16(view, &panel, &mut out);
        }
        let bits: Vec<u32> = out.iter().map(|&value| canonical_bits(value)).collect();
        let first = first.get_or_insert_with(|| bits.clone());
        assert!(*first == bits, "{} differs: {rows} x {cols}, {positions} positions", backend.name());
    }
}

/// Shapes around the widths of registers, with weights of all bits.
#[must_use]
pub fn views_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (rows, cols, positions, kind) in [(3_u8, 17_u8, 1_u8, 0_u8), (5, 33, 5, 0), (2, 8, 0, 1), (7, 4, 3, 1)] {
        let body = (0..3000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24).to_le_bytes()[0]);
        seeds.push([rows, cols, positions, kind].into_iter().chain(body).collect());
    }
    seeds
}

/// A recorded trace replays without losing or inventing a request.
pub fn trace(data: &[u8]) {
    match Trace::parse(data) {
        Ok(trace) => {
            let mut again = Vec::new();
            expert_trace::begin(&mut again, trace.chosen).expect("memory");
            assert!(data.starts_with(&again));
            for capacity in [0, 1, 5, 64] {
                let best = trace.belady(capacity);
                for policy in [Policy::Lru, Policy::Frequency] {
                    let hits = trace.replay(policy, capacity);
                    assert_eq!(hits.requests, best.requests);
                    assert!(hits.hits <= hits.requests && !hits.rate().is_infinite());
                }
            }
        }
        Err(error) => message(&error),
    }
    if let Some((&[prompt, chosen], pairs)) = data.split_first_chunk::<2>() {
        match Trace::parse_pairs(pairs, usize::from(prompt), usize::from(chosen)) {
            Ok(trace) => assert!(trace.requests.len() <= pairs.len() / 8),
            Err(error) => message(&error),
        }
    }
}

/// A trace, and pairs.
#[must_use]
pub fn trace_seeds() -> Vec<Vec<u8>> {
    let mut own = Vec::new();
    expert_trace::begin(&mut own, 2).expect("memory");
    for step in 0..6_u16 {
        for layer in 1..4_u16 {
            let ids = [layer * step % 5, 7, step].map(k3_core::view::ExpertId);
            expert_trace::record(&mut own, step.into(), k3_core::view::LayerIndex(layer), &ids).expect("memory");
        }
    }
    let mut pairs = vec![2, 2];
    for pass in 0..3_i32 {
        for layer in 1..3_i32 {
            for i in 0..2 * (2 + pass) {
                pairs.extend_from_slice(&layer.to_le_bytes());
                pairs.extend_from_slice(&(i * 3 % 7).to_le_bytes());
            }
        }
    }
    vec![own, pairs]
}

/// Numbers of another engine: refused, or all rows that it says are there can be read, and nothing behind
/// them.
///
/// The input is the length of a row, with a bit for the name of the file, how many zeros follow, and the file.
pub fn reference(data: &[u8]) {
    let Some((&[row, zeros], bytes)) = data.split_first_chunk::<2>() else { return };
    let name = if row & 1 == 0 { "logits.npy" } else { "logits.safetensors" };
    let (row, zeros) = (usize::from(row / 2), u64::from(zeros));
    let files = Files::default();
    files.put(name, bytes.to_vec(), zeros);
    let len = bytes.len() as u64 + zeros;
    let reference = match Reference::open(&files, Path::new(name), row) {
        Ok(reference) => reference,
        Err(error) => {
            assert!(!matches!(&error, ReferenceError::Read(Error::Read(error)) if error.offset < len), "{error}");
            assert!(error.to_string().len() < 4096, "a message that can be read: {} bytes", error.to_string().len());
            return message(&error);
        }
    };
    let rows = reference.rows();
    assert!(row > 0 && rows > 0 && rows.saturating_mul(row as u64) <= len);
    let mut numbers = Vec::new();
    for at in [0, rows / 2, rows - 1] {
        reference.read(at, &mut numbers).expect("a row that is there");
        assert_eq!(numbers.len(), row);
    }
}

/// Each form, with its numbers and without.
#[must_use]
pub fn reference_seeds() -> Vec<Vec<u8>> {
    let numbers: Vec<u8> = (0..6_u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let npy = |version: &[u8], descr: &str, shape: &str| {
        let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n");
        let size = if version[0] == 1 { 2 } else { 4 };
        let len = (header.len() as u64).to_le_bytes();
        [b"\x93NUMPY", version, &len[..size], header.as_bytes()].concat()
    };
    let tensor = |dtype: &str, bytes: usize| {
        let header = format!(r#"{{"logits":{{"dtype":"{dtype}","shape":[2,3],"data_offsets":[0,{bytes}]}}}}"#);
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()
    };
    vec![
        [&[6, 0][..], &npy(&[1, 0], "<f4", "(2, 3)"), &numbers].concat(),
        [&[6, 48][..], &npy(&[2, 0], "<f8", "(1, 2, 3)")].concat(),
        [&[12, 24][..], &npy(&[1, 0], "<f4", "(6,)")].concat(),
        [&[7, 0][..], &tensor("F32", 24), &numbers].concat(),
        [&[7, 12][..], &tensor("BF16", 12)].concat(),
        [&[6, 0][..], &numbers].concat(),
    ]
}

/// A size that is read is written in the right order of magnitude.
pub fn size(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match units::parse(text) {
        Ok(bytes) => {
            assert!(text.trim().starts_with(|c: char| c.is_ascii_digit()));
            let written = units::human(bytes);
            // Beyond terabytes there are units to write and none to read.
            if bytes < 900_000_000_000_000 {
                let again = units::parse(&written).expect("what is written can be read");
                assert!(again.abs_diff(bytes) <= bytes / 100, "{text}: {bytes}, {again}");
            }
        }
        Err(error) => message(&error),
    }
}

/// Sizes as people write them.
#[must_use]
pub fn size_seeds() -> Vec<Vec<u8>> {
    ["2G", " 1.5 GiB ", "123", "0.000000000001T", "18446744073709551615", "1.0000000000000000001KiB", "9kB", "x"]
        .map(|text| text.as_bytes().to_vec())
        .into()
}

/// Words of the wire, for the mutations of [`conversation`].
pub const TAGS: &[&str] = &[
    "message",
    "think",
    "response",
    "tools",
    "call",
    "argument",
    "json",
    " role=\"",
    " key=\"",
    " tool=\"",
    " type=\"",
    " index=\"1\"",
    "\"",
    "&quot;",
    "&amp;",
    "=",
    " ",
];

/// A conversation as parts: control ids by a byte of 0xf8 and above, texts between them. The parser never
/// panics, closes what it opened, and what it calls malformed has a reason.
pub fn conversation(data: &[u8]) {
    const CONTROLS: [Control; 8] = [
        Control::OPEN,
        Control::CLOSE,
        Control::SEP,
        Control::END_OF_MSG,
        Control::EOS,
        Control::BOS,
        Control::MEDIA_PAD,
        Control::at(200),
    ];
    let Some((&first, rest)) = data.split_first() else { return };
    let start = [Start::Outside, Start::Think, Start::Response][usize::from(first % 3)];
    let mut buffer = [0; 64];
    let mut parser = chat::Parser::new(start, &mut buffer);
    let mut depth = parser.opened().len();
    let mut push = |part: Part<'_>| {
        let result = parser.push(part, |event| match event {
            chat::Event::Open { attributes, .. } => {
                depth += 1;
                for (key, value) in attributes.iter() {
                    assert!(!key.is_empty() && attributes.get(key).is_some());
                    assert!(value.chars().count() <= 64);
                }
            }
            chat::Event::Close { .. } => depth = depth.checked_sub(1).expect("what is closed was open"),
            chat::Event::Text { bytes, .. } => assert!(!bytes.is_empty()),
            chat::Event::End => {}
        });
        if let Err(error) = result {
            message(&error);
        }
    };
    let mut text = 0;
    for (at, &byte) in rest.iter().enumerate() {
        if byte >= 0xf8 {
            if text < at {
                push(Part::Text(&rest[text..at]));
            }
            push(Part::Control(CONTROLS[usize::from(byte & 7)]));
            text = at + 1;
        }
    }
    push(Part::Text(&rest[text..]));
}

/// An answer with everything an answer may have, a whole conversation, and tags that are none.
#[must_use]
pub fn conversation_seeds() -> Vec<Vec<u8>> {
    // 0xf8 opens, 0xf9 closes, 0xfa ends a tag, 0xfb ends the message.
    let wire = |start: u8, text: &str| {
        let mut bytes = vec![start];
        for (i, part) in text.split(['<', '>', '/', '.']).enumerate() {
            bytes.extend_from_slice(part.as_bytes());
            let mark = text.bytes().filter(|b| b"<>/.".contains(b)).nth(i);
            bytes.extend(mark.map(|mark| match mark {
                b'<' => 0xf8,
                b'/' => 0xf9,
                b'>' => 0xfa,
                _ => 0xfb,
            }));
        }
        bytes
    };
    vec![
        wire(1, "let me see/think><response>the answer/response>/message>."),
        wire(
            2,
            "/response><tools><call tool=\"a\" index=\"1\"><argument key=\"k\" type=\"string\">v/argument>\
             <argument key=\"&quot;&amp;\" type=\"number\">1/argument>/call>/tools>/message>.",
        ),
        wire(0, "<message role=\"user\">hello/message>.<message role=\"assistant\"><think>"),
        wire(0, "<message role=user><massage>/tools>."),
    ]
}
