//! What the program writes and reads back: coded blocks, packed trunks, sessions.
//!
//! These forms are covered by checksums, which no mutation gets right. So the first byte of an input says which
//! sums and lengths are made true before it is read, and what is behind them is reached.
#![expect(clippy::missing_panics_doc, reason = "a panic is what a target is for")]

use super::memory::Files;
use super::targets::{SHARDS, message, put_shard, tiny_config, tiny_files};
use crate::root;
use k3_core::backend::{Backend, Layout, Panel};
use k3_core::coded::{CodedMatrix, coded_len, encode};
use k3_core::math::canonical_bits;
use k3_core::view::{Bf16Matrix, TokenId};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::checksum::Checksum;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::pack::{self, Pack};
use k3_platform::plan::{MOST_SEQUENCES, Request};
use k3_platform::policy::Policy;
use k3_platform::session::Session;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// The smallest model there is, in memory, with zeros for weights.
fn model() -> (Arc<Files>, Checkpoint) {
    let files = Arc::new(Files::default());
    let (index, shards) = tiny_files();
    files.put("model.safetensors.index.json", index.into_bytes(), 0);
    for (name, (header, data)) in SHARDS.iter().zip(shards) {
        put_shard(&files, name, header.as_bytes(), data);
    }
    let config = std::fs::read(root().join("k3-core/tests/tiny/config.json")).expect("the tiny config");
    files.put("config.json", config, 0);
    let checkpoint = Checkpoint::open(Path::new("/model"), Arc::<Files>::clone(&files)).expect("opens");
    (files, checkpoint)
}

/// Positions that an [`engine`] has room for.
const CONTEXT: usize = 24;

fn engine(checkpoint: Checkpoint) -> Engine {
    let request = Request {
        budget: 64 << 20,
        context: CONTEXT,
        prompt: 2,
        chunk: Some(2),
        threads: 1,
        readers: 1,
        policy: Policy::default(),
        all_logits: false,
        speculate: 0,
        sequences: 1,
        touched: 0,
        beside: 0,
        beside_each: [0; MOST_SEQUENCES],
    };
    let plan = checkpoint.plan(&request, 0).expect("a tiny model fits");
    Engine::new(checkpoint, plan, Backend::detect(), Arc::default()).expect("an engine")
}

/// A path of a file that is nobody else's.
fn temporary(what: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("k3-fuzz-{}-{n}.{what}", std::process::id()))
}

/// A number in some bytes, 0 if they are fewer.
fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|b| b.first_chunk::<N>()).copied().unwrap_or([0; N])
}

fn u32_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32::from_le_bytes(number(bytes, at)))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(number(bytes, at))
}

fn put(bytes: &mut [u8], at: usize, n: u64) {
    if let Some(place) = bytes.get_mut(at..).and_then(|b| b.first_chunk_mut::<8>()) {
        *place = n.to_le_bytes();
    }
}

/// `at..at + len` if that lies in `bytes`.
fn range(bytes: &[u8], at: u64, len: u64) -> Option<Range<usize>> {
    let (start, end) = (usize::try_from(at).ok()?, usize::try_from(at.checked_add(len)?).ok()?);
    (end <= bytes.len()).then_some(start..end)
}

/// Any bytes as a coded block: refused, or some matrix that every back end multiplies as its decoded
/// form. Any weights are coded without loss.
///
/// The input is rows, columns, and the block or the weights.
pub fn coded(data: &[u8]) {
    let Some((&[rows, cols], rest)) = data.split_first_chunk::<2>() else { return };
    let (rows, cols) = (usize::from(rows % 9), usize::from(cols));
    let bytes = rows * cols * 2;
    let decoded = |view: CodedMatrix<'_>| {
        let mut raw = vec![0; bytes];
        raw.chunks_mut((cols * 2).max(1)).enumerate().for_each(|(r, row)| view.decode_row(r, row));
        raw
    };
    if let Some(raw) = rest.get(..bytes) {
        let mut block = vec![0; coded_len(rows, cols, rows * cols).expect("a small matrix")];
        let len = encode(raw, rows, cols, &mut block).expect("room for misfits only");
        let view = CodedMatrix::new(&block[..len], rows, cols).expect("what was coded");
        assert!(decoded(view) == raw, "coding loses nothing");
        assert!(encode(raw, rows, cols, &mut block[..len - 1]).is_none(), "one byte less is too short");
    }
    let view = match CodedMatrix::new(rest, rows, cols) {
        Ok(view) => view,
        Err(error) => return message(&error),
    };
    let raw = decoded(view);
    let plain = Bf16Matrix::new(&raw, rows, cols).expect("the shape");
    for positions in [1, 5] {
        let x: Vec<f32> = (0_u8..=255).cycle().take(positions * cols).map(|i| f32::from(i) - 100.5).collect();
        let mut first: Option<Vec<u32>> = None;
        for backend in Backend::available() {
            let mut buf = vec![0.0; Panel::len(cols, positions).expect("a size")];
            let panel = backend.pack(Layout::Bf16, &x, cols, positions, &mut buf);
            let (mut of_coded, mut of_plain) = (vec![0.0; rows * positions], vec![0.0; rows * positions]);
            backend.matmul_coded(view, &panel, &mut of_coded);
            backend.matmul_bf16(plain, &panel, &mut of_plain);
            let bits = |out: Vec<f32>| out.into_iter().map(canonical_bits).collect::<Vec<u32>>();
            let (of_coded, of_plain) = (bits(of_coded), bits(of_plain));
            assert!(of_coded == of_plain, "{}: coded and plain differ: {rows} x {cols}", backend.name());
            let first = first.get_or_insert_with(|| of_plain.clone());
            assert!(*first == of_plain, "{} differs: {rows} x {cols}", backend.name());
        }
    }
}

/// Blocks with and without misfits, and weights to be coded.
#[must_use]
pub fn coded_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (rows, cols) in [(3_u8, 40_u8), (1, 32), (2, 5), (0, 7)] {
        let weight = |i: u32| (0x3c00 | (i * 7 % 0x3ff)) ^ if i % 29 == 3 { 0x7000 } else { 0 };
        let weights = 0..u32::from(rows) * u32::from(cols);
        let raw: Vec<u8> = weights.flat_map(|i| weight(i).to_le_bytes()[..2].to_vec()).collect();
        let mut block = vec![0; 4096];
        let len = encode(&raw, usize::from(rows), usize::from(cols), &mut block).expect("room");
        seeds.push([&[rows, cols][..], &block[..len]].concat());
        seeds.push([&[rows, cols][..], &raw].concat());
    }
    seeds
}

/// Fields of a pack's header between its magic and its zeros.
const FIELDS: usize = 100;
const PAGE: usize = 4096;
/// Where the header has its checksum.
const HEADER_SUM: usize = 4088;
/// Files up to this are read whole.
const WHOLE: u64 = 1 << 20;

/// Bits of the first byte: what is made true.
mod fix {
    pub(super) const LENGTHS: u8 = 1;
    pub(super) const DATA_SUMS: u8 = 2;
    pub(super) const OUTER_SUMS: u8 = 4;
    /// Whether a model is run as well.
    pub(super) const RUN: u8 = 8;
}

/// Where the records of segments are in a table, as far as they are there, and how many bytes the table has.
fn outline(table: &[u8]) -> (Vec<usize>, u64) {
    let [groups, tensors, segments, pieces] = [0, 4, 8, 12].map(|at| u32_at(table, at));
    let at = 16 + 8 * groups + 40 * tensors;
    let records = (0..segments).map_while(|i| range(table, at + 24 * i, 24)).map(|record| record.start).collect();
    (records, at + 24 * (segments + pieces))
}

/// A pack as the input says: the front of the file, the zeros behind it, and the table.
fn packed(data: &[u8]) -> Option<(Vec<u8>, u64, Vec<u8>)> {
    let (&[fixes], rest) = data.split_first_chunk::<1>()?;
    let (fields, rest) = rest.split_first_chunk::<FIELDS>()?;
    let len = usize::try_from(outline(rest).1).unwrap_or(usize::MAX).min(rest.len());
    let (table, segments) = rest.split_at(len);
    let mut table = table.to_vec();
    let mut file = [&b"K3TRUNK\0"[..], fields].concat();
    let (records, _) = outline(&table);
    let end = records.iter().fold(PAGE as u64, |end, record| end + u32_at(&table, record + 8));
    if fixes & fix::LENGTHS != 0 {
        put(&mut file, 16, end + len as u64);
        put(&mut file, 24, end);
        put(&mut file, 32, len as u64);
    }
    let table_at = u64_at(&file, 24);
    file.resize(PAGE, 0);
    let room = usize::try_from(table_at).unwrap_or(usize::MAX).saturating_sub(PAGE);
    file.extend_from_slice(&segments[..segments.len().min(room)]);
    if fixes & fix::DATA_SUMS != 0 && table_at <= WHOLE {
        let mut whole = file.clone();
        whole.resize(whole.len().max(usize::try_from(table_at).unwrap_or(0)), 0);
        for record in records {
            if let Some(segment) = range(&whole, u64_at(&table, record), u32_at(&table, record + 8)) {
                put(&mut table, record + 16, xxh3_64(&whole[segment]));
            }
        }
    }
    if fixes & fix::OUTER_SUMS != 0 {
        put(&mut file, 40, xxh3_64(&table));
        let sum = xxh3_64(&file[..HEADER_SUM]);
        put(&mut file, HEADER_SUM, sum);
    }
    let zeros = table_at.saturating_sub(file.len() as u64);
    Some((file, zeros, table))
}

/// A packed trunk of any form: refused, or everything its table says lies where it says. One that is of the
/// model is read whole and can be run.
///
/// The input is what is made true, the fields of the header, the table, and the front of the segments;
/// zeros follow up to the table.
pub fn trunk(data: &[u8]) {
    static MODEL: OnceLock<(Arc<Files>, Mutex<Checkpoint>)> = OnceLock::new();
    let (files, checkpoint) = MODEL.get_or_init(|| {
        let (files, checkpoint) = model();
        (files, Mutex::new(checkpoint))
    });
    let Some((front, zeros, table)) = packed(data) else { return };
    // A target that panicked while it held the lock has left a whole checkpoint.
    let mut checkpoint = checkpoint.lock().unwrap_or_else(PoisonError::into_inner);
    let path = Path::new("/model/trunk.k3");
    files.put_hollow("trunk.k3", front, zeros, table);
    let pack = match Pack::open(path, &**files) {
        Ok(pack) => pack,
        Err(error) => return message(&error),
    };
    let mut end = PAGE as u64;
    for segment in pack.segments() {
        assert_eq!(segment.offset, end);
        end += u64::from(segment.len);
    }
    assert!(end <= pack.file_len() && pack.bytes() <= 4096 + 4 * data.len() as u64);
    for tensor in pack.tensors() {
        let pieces = pack.pieces(tensor);
        assert_eq!(pieces.iter().map(|p| u64::from(p.rows)).sum::<u64>(), tensor.rows);
        for (i, piece) in (tensor.first_piece..).zip(pieces) {
            let segment = pack.segments()[pack.segment_of(i)];
            assert!(segment.first_piece as usize <= i && piece.at + piece.len <= segment.len);
        }
    }
    let of_model = checkpoint.use_pack(path);
    if pack.file_len() > WHOLE {
        return;
    }
    let different =
        pack::verify(&pack, pack.files(checkpoint.opener()), &Arc::default(), &mut |_| ()).expect("memory can be read");
    let sums_hold = data[0] & fix::DATA_SUMS == 0 || different.is_empty();
    assert!(sums_hold, "a segment whose sum is right is whole");
    match of_model {
        Ok(()) => {
            let compared = pack::compare(&pack, &checkpoint, &Arc::default(), &mut |_| ()).expect("memory can be read");
            assert!(compared.len() >= different.len());
            for id in 0..tiny_config().vocab_size {
                let row = checkpoint.embedding_row(TokenId(u32::try_from(id).expect("small")));
                assert_eq!(row.pieces.len(), 1, "each row is in one piece");
            }
            if data[0] & fix::RUN != 0 {
                run(files, path, different.is_empty());
            }
        }
        Err(error) => message(&error),
    }
}

/// Runs the model from a pack: it computes something, or says what is wrong with a segment.
fn run(files: &Arc<Files>, path: &Path, whole: bool) {
    let mut checkpoint = Checkpoint::open(Path::new("/model"), Arc::<Files>::clone(files)).expect("opens");
    checkpoint.use_pack(path).expect("it was used before");
    let mut engine = engine(checkpoint);
    let mut logits = vec![0.0; tiny_config().vocab_size];
    match engine.step(&[TokenId(1), TokenId(2)], &mut logits, &mut ()) {
        Ok(()) => {}
        Err(error) => {
            assert!(!whole || !matches!(error, Error::Read(_)), "all sums hold: {error}");
            message(&error);
        }
    }
}

/// The model's own packs, without the segments' bytes: zeros are a coded block, too.
#[must_use]
pub fn trunk_seeds() -> Vec<Vec<u8>> {
    let (files, mut checkpoint) = model();
    let mut seeds = Vec::new();
    for coded in [false, true] {
        let path = temporary("trunk");
        let options = pack::Options { coded, threads: 1, verify: false };
        // It is read back from the disk below, which the files in memory do not know.
        pack::write(&checkpoint, &path, options, &Arc::default(), &mut |_| ()).expect("a pack");
        let file = std::fs::read(&path).expect("the pack");
        std::fs::remove_file(&path).expect("the pack");
        let table_at = usize::try_from(u64_at(&file, 24)).expect("small");
        let (fields, table) = (&file[8..8 + FIELDS], &file[table_at..]);
        for fixes in [0, fix::DATA_SUMS | fix::OUTER_SUMS, fix::LENGTHS | fix::DATA_SUMS | fix::OUTER_SUMS | fix::RUN] {
            seeds.push([&[fixes][..], fields, table].concat());
        }
        seeds.push(
            [&[fix::DATA_SUMS | fix::OUTER_SUMS | fix::RUN][..], fields, table, &file[PAGE..PAGE + 512]].concat(),
        );
    }
    // Only what is accepted leads a fuzzer on.
    for seed in seeds.iter().filter(|seed| seed[0] & fix::OUTER_SUMS != 0) {
        let (front, zeros, table) = packed(seed).expect("a pack");
        files.put_hollow("trunk.k3", front, zeros, table);
        checkpoint.use_pack(Path::new("/model/trunk.k3")).expect("the model's own");
    }
    seeds
}

/// Where a session's header has what: its fields, in u64s.
mod session_at {
    pub(super) const HEADER: usize = 128;
    pub(super) const KDA: usize = 32;
    pub(super) const CONV: usize = 40;
    pub(super) const MLA_LAYERS: usize = 48;
    pub(super) const LATENT: usize = 56;
    pub(super) const IDS: usize = 64;
    pub(super) const POSITIONS: usize = 72;
    pub(super) const STATES: usize = 80;
    pub(super) const LENGTH: usize = 88;
    pub(super) const IDS_SUM: usize = 96;
    pub(super) const LATENTS_SUM: usize = 104;
    pub(super) const TABLE_SUM: usize = 112;
    pub(super) const SUM: usize = 120;
}

/// Makes the sums of a session's parts true that lie in the file.
fn sum_parts(file: &mut [u8]) -> Option<()> {
    use session_at::{CONV, HEADER, IDS, IDS_SUM, KDA, LATENT, LATENTS_SUM, MLA_LAYERS, POSITIONS, STATES, TABLE_SUM};
    let of = |file: &[u8], at| u64_at(file, at);
    let state = of(file, KDA).checked_add(of(file, CONV))?.checked_mul(4)?;
    let states = of(file, STATES);
    let ids_at = (HEADER as u64).checked_add(states.checked_mul(state)?)?;
    let ids = range(file, ids_at, of(file, IDS).checked_mul(4)?)?;
    let latents = of(file, MLA_LAYERS).checked_mul(of(file, POSITIONS))?.checked_mul(of(file, LATENT))?;
    let latents = range(file, ids.end as u64, latents.checked_mul(4)?)?;
    let table = range(file, latents.end as u64, states.checked_mul(16)?)?;
    for i in 0..usize::try_from(states).ok()? {
        let state = range(file, HEADER as u64 + i as u64 * state, state)?;
        let sum = Checksum::of(&file[state]);
        put(file, table.start + 16 * i + 8, sum);
    }
    for (at, part) in [(IDS_SUM, ids), (LATENTS_SUM, latents), (TABLE_SUM, table)] {
        let sum = Checksum::of(&file[part]);
        put(file, at, sum);
    }
    Some(())
}

/// A session file as the input says, and its first byte.
fn written(data: &[u8]) -> Option<(u8, Vec<u8>)> {
    let (&fixes, file) = data.split_first()?;
    let mut file = file.to_vec();
    if fixes & fix::DATA_SUMS != 0 {
        let _some_parts_are_not_in_the_file = sum_parts(&mut file);
    }
    if fixes & fix::LENGTHS != 0 {
        let len = file.len() as u64;
        put(&mut file, session_at::LENGTH, len);
    }
    if fixes & fix::OUTER_SUMS != 0 && file.len() >= session_at::HEADER {
        let sum = Checksum::of(&file[..session_at::SUM]);
        put(&mut file, session_at::SUM, sum);
    }
    Some((fixes, file))
}

/// A session file of any form: refused and left as it is, or resumed from where it says, and written again.
///
/// The input is what is made true, and the file.
pub fn session(data: &[u8]) {
    static MODEL: OnceLock<(Checkpoint, Mutex<Engine>)> = OnceLock::new();
    let (checkpoint, engine) = MODEL.get_or_init(|| (model().1, Mutex::new(engine(model().1))));
    let Some((fixes, file)) = written(data) else { return };
    // A target that panicked while it held the lock has left an engine that can be reset.
    let mut engine = engine.lock().unwrap_or_else(PoisonError::into_inner);
    let path = temporary("session");
    std::fs::write(&path, &file).expect("a place for temporary files");
    match resumed(&path, checkpoint, &mut engine, fixes & fix::RUN != 0) {
        Ok(()) => {}
        Err(error) => {
            message(&error);
            assert!(std::fs::read(&path).expect("it is there") == file, "what is refused is left as it is");
        }
    }
    std::fs::remove_file(&path).expect("it is there");
    assert!(!path.with_extension("session.new").exists() && !path.with_extension("session.lock").exists());
}

/// Resumes from a session and, if `save`, writes it again.
fn resumed(
    path: &Path,
    checkpoint: &Checkpoint,
    engine: &mut Engine,
    save: bool,
) -> Result<(), k3_platform::session::SessionError> {
    let mut session = Session::open(path, checkpoint, 1 << 20)?;
    let mut ids = session.ids().to_vec();
    ids.push(TokenId(3));
    let at = session.resumes_at(&ids);
    assert!(at < ids.len());
    session.resume(engine, &ids)?;
    assert_eq!(engine.position(), at);
    if save {
        session.save(engine, &ids)?;
        drop(session);
        let session = Session::open(path, checkpoint, 1 << 20)?;
        assert!(session.ids() == ids && session.resumes_at(&ids) == at, "what was written is read back");
    }
    Ok(())
}

/// A session with three states, and its beginnings.
#[must_use]
pub fn session_seeds() -> Vec<Vec<u8>> {
    let (_, checkpoint) = model();
    let mut engine = engine(model().1);
    let path = temporary("session");
    let ids: Vec<TokenId> = (1..=6).map(TokenId).collect();
    let mut session = Session::open(&path, &checkpoint, 1 << 20).expect("a new session");
    session.resume(&mut engine, &ids).expect("nothing to resume");
    let mut logits = vec![0.0; tiny_config().vocab_size];
    for part in ids.chunks(2) {
        engine.step(part, &mut logits, &mut ()).expect("a step");
        session.checkpoint(&mut engine, true).expect("written");
    }
    session.save(&mut engine, &ids).expect("saved");
    drop(session);
    let file = std::fs::read(&path).expect("the session");
    std::fs::remove_file(&path).expect("the session");
    let all = fix::LENGTHS | fix::DATA_SUMS | fix::OUTER_SUMS;
    let mut seeds: Vec<Vec<u8>> = [0, all, all | fix::RUN].map(|fixes| [&[fixes][..], &file].concat()).into();
    seeds.push([&[all][..], &file[..session_at::HEADER]].concat());
    // The same without states: short, and nothing to resume from.
    let state = 4 * (u64_at(&file, session_at::KDA) + u64_at(&file, session_at::CONV));
    let states = usize::try_from(state * u64_at(&file, session_at::STATES)).expect("small");
    let mut short = [&[all | fix::RUN][..], &file[..session_at::HEADER], &file[session_at::HEADER + states..]].concat();
    short.truncate(short.len() - 16 * 3);
    put(&mut short, 1 + session_at::STATES, 0);
    seeds.push(short);
    // Only what is accepted leads a fuzzer on.
    for seed in seeds.iter().filter(|seed| seed.len() > 1 + session_at::HEADER) {
        std::fs::write(&path, written(seed).expect("a file").1).expect("a place for temporary files");
        resumed(&path, &checkpoint, &mut engine, true).expect("the model's own");
        std::fs::remove_file(&path).expect("it is there");
    }
    seeds
}
