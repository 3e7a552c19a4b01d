//! Writing a pack: segments coded in parallel, written in order, resumed where they were confirmed.
//!
//! ```text
//! workers   read rows from the shards -> code -> decode and compare      any number of segments ahead
//! writer    append segment k to OUT.part; every 64 MiB: sync OUT.part, then append to OUT.part.log, sync
//! end       table, header, sync -> read back, check -> rename -> sync the directory -> remove the log
//! ```
//!
//! What the log says is on the disk, for the data was synced before the log was written: a process
//! that is killed, or a machine that loses power, costs at most the last 64 MiB of work. Which rows
//! are in which segment is decided before anything is read, from the config and the places of
//! tensors alone, and a block has one code; so an interrupted pack ends with the same bytes as one
//! that was not.

use super::format::{Header, PAGE, PIECE_ALIGN, Table};
use super::read::{Pack, verify};
use super::source::groups;
use super::{
    Digests, EMBED_SEGMENT, Group, LEAST_SEGMENT, MOST_SEGMENT, PackError, PackFault, PieceRecord, SegmentRecord,
    TensorRecord,
};
use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::io::free_space_of;
use crate::lock;
use crate::memory::available;
use crate::segment::{Form, Piece, Place, Segment, Source, block};
use k3_core::coded::{CodedMatrix, coded_len, encode};
use rustix::fs::RenameFlags;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Data is synced, and the log written, when so much of it is new (bytes), or a sixteenth of a small file, or
/// after this time.
const SYNC_BYTES: u64 = 64 << 20;
const SYNC_TIME: Duration = Duration::from_secs(2);
/// Segments that may be ready and not yet written, for each worker.
const AHEAD: usize = 2;
/// In the log, the bit of a piece's length that says that it is coded.
const CODED_BIT: u32 = 1 << 31;
const LOG_MAGIC: &[u8; 12] = b"K3PACKLOG\0\x01\0";

/// How a pack is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Whether matrices are coded.
    pub coded: bool,
    /// Threads that read and code.
    pub threads: usize,
    /// Whether the file is read back before it gets its name.
    pub verify: bool,
}

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Segments are written.
    Packing,
    /// The file is read back.
    Verifying,
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// With what.
    pub stage: Stage,
    /// Bytes done: of the shards while packing, of the file while verifying.
    pub done: u64,
    /// Bytes there are to do.
    pub total: u64,
    /// Bytes of the shards that an earlier, interrupted run had done.
    pub resumed: u64,
    /// Bytes of the file so far.
    pub written: u64,
}

/// How it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the file was there already, whole and of this model and form; it was not touched.
    pub already: bool,
    /// Length of the file (bytes).
    pub file_len: u64,
    /// Bytes of its tensors in the shards.
    pub raw: u64,
    /// Bytes of the shards that an earlier run had done.
    pub resumed: u64,
}

/// Rows of a tensor that become a piece.
#[derive(Debug, Clone, Copy)]
struct Take {
    /// Of all the sources.
    source: usize,
    first_row: usize,
    rows: usize,
}

/// A segment that will be.
#[derive(Debug, Clone)]
struct Planned {
    group: usize,
    takes: Vec<Take>,
}

/// A segment that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    len: u32,
    sum: u64,
    /// Length and form of each piece.
    pieces: Vec<(u32, bool)>,
}

/// A segment ready to be written.
#[derive(Debug)]
struct Ready {
    bytes: Vec<u8>,
    written: Written,
}

/// `path` with something behind its name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

fn cols(source: &Source) -> usize {
    source.row_bytes / 2
}

/// Bytes that rows of a tensor take if there are no misfits.
fn nominal(source: &Source, rows: usize, coded: bool) -> usize {
    let raw = rows * source.row_bytes;
    let len = if coded && source.tensor.may_be_coded() { coded_len(rows, cols(source), 0) } else { None };
    len.unwrap_or(raw).min(raw).next_multiple_of(PIECE_ALIGN)
}

/// Bytes of a segment without its padding, if there are no misfits.
fn used(segment: &Planned, sources: &[Source], coded: bool) -> usize {
    segment.takes.iter().map(|t| nominal(&sources[t.source], t.rows, coded)).sum()
}

/// What a pack of a checkpoint will take, as far as its shape tells: misfits come on top, some ten
/// thousandths of trained weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nominal {
    /// Bytes of the file.
    pub file: u64,
    /// Bytes that a pass reads, if nothing is pinned: all but the embedding.
    pub read: u64,
}

/// The sizes of a pack that has not been written, from nothing but the shape of the model.
#[must_use]
pub fn nominal_sizes(checkpoint: &Checkpoint, coded: bool) -> Nominal {
    let groups = groups(checkpoint);
    let sources: Vec<_> = groups.iter().flatten().copied().collect();
    let mut sizes = Nominal { file: 0, read: 0 };
    for segment in layout(&groups, coded) {
        let bytes = used(&segment, &sources, coded).next_multiple_of(block()) as u64;
        sizes.file += bytes;
        sizes.read += if segment.group > 0 { bytes } else { 0 };
    }
    sizes
}

/// Which rows go to which segment: a function of the model's shape and the form alone.
fn layout(groups: &[Vec<Source>], coded: bool) -> Vec<Planned> {
    let bytes = |g: &Vec<Source>| g.iter().map(|s| s.rows * s.row_bytes).sum::<usize>();
    let largest = groups.iter().skip(1).map(bytes).max().unwrap_or(0);
    let most = (largest / 16).clamp(LEAST_SEGMENT, MOST_SEGMENT).next_multiple_of(block());
    let mut segments = Vec::new();
    let mut number = 0;
    for (group, sources) in groups.iter().enumerate() {
        let limit = if group == 0 { EMBED_SEGMENT } else { most };
        let (mut takes, mut used) = (Vec::new(), 0);
        for source in sources {
            let granule = source.granule.max(1);
            let mut first_row = 0;
            while first_row < source.rows {
                let rest = source.rows - first_row;
                let fits = |rows: usize| used + nominal(source, rows, coded) <= limit;
                let mut rows = rest;
                if !fits(rows) {
                    // The most granules that fit, found by halves: sizes rise with the rows.
                    let (mut low, mut high) = (0, rest / granule);
                    while low < high {
                        let middle = (low + high).div_ceil(2);
                        (low, high) = if fits(middle * granule) { (middle, high) } else { (low, middle - 1) };
                    }
                    rows = low * granule;
                    if rows == 0 && !takes.is_empty() {
                        segments.push(Planned { group, takes: std::mem::take(&mut takes) });
                        used = 0;
                        continue;
                    }
                    rows = fullest(source, used, rows.max(granule).min(rest), coded);
                }
                takes.push(Take { source: number, first_row, rows });
                used += nominal(source, rows, coded);
                first_row += rows;
                if first_row < source.rows {
                    segments.push(Planned { group, takes: std::mem::take(&mut takes) });
                    used = 0;
                }
            }
            number += 1;
        }
        if !takes.is_empty() {
            segments.push(Planned { group, takes });
        }
    }
    segments
}

/// Up to a quarter fewer rows than `most`, if the segment then ends nearer to the end of a block.
fn fullest(source: &Source, used: usize, most: usize, coded: bool) -> usize {
    let granule = source.granule.max(1);
    let waste = |rows: usize| {
        let total = used + nominal(source, rows, coded);
        // Room for as many misfits as trained weights have, and some more.
        let padded = (total + total / 1024 + PIECE_ALIGN).next_multiple_of(block());
        (padded - total) * 1000 / total.max(1)
    };
    let least = (most - most / 4).max(granule);
    (least..=most).rev().filter(|rows| rows.is_multiple_of(granule)).min_by_key(|&rows| waste(rows)).unwrap_or(most)
}

/// What the workers share.
struct Work<'a> {
    fetch: Fetch,
    sources: &'a [Source],
    planned: &'a [Planned],
    coded: bool,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The next segment to take up, and the one to be written next.
    next: usize,
    wanted: usize,
    ahead: usize,
    ready: HashMap<usize, Result<Ready, Error>>,
    over: bool,
}

impl Work<'_> {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut buffer = AlignedBuf::empty();
        loop {
            let mut state = self.lock();
            while !state.over && state.next < self.planned.len() && state.next >= state.wanted + state.ahead {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.over || state.next >= self.planned.len() {
                return;
            }
            let number = state.next;
            state.next += 1;
            drop(state);
            let result = self.make(number, &mut buffer);
            self.lock().ready.insert(number, result);
            self.changed.notify_all();
        }
    }

    /// Reads and codes one segment.
    fn make(&self, number: usize, buffer: &mut AlignedBuf) -> Result<Ready, Error> {
        let takes = &self.planned[number].takes;
        let pieces = takes.iter().map(|take| {
            let source = &self.sources[take.source];
            Piece {
                tensor: source.tensor,
                first_row: take.first_row,
                rows: take.rows,
                place: Place {
                    shard: source.place.shard,
                    offset: source.place.offset + (take.first_row * source.row_bytes) as u64,
                },
                len: take.rows * source.row_bytes,
                at: 0,
                form: Form::Raw,
            }
        });
        let segment = Segment::gather(pieces.collect());
        if buffer.len() < segment.bytes {
            *buffer = AlignedBuf::zeroed(segment.bytes)?;
        }
        let (send, answers) = channel();
        self.fetch.submit(&segment.reads, std::mem::take(buffer), 0, Priority::Prefetch, &send);
        let fetched = self.fetch.wait(&answers)?;
        *buffer = fetched.buffer;
        fetched.result?;
        let mut bytes = Vec::with_capacity(segment.bytes + takes.len() * PIECE_ALIGN + block());
        let mut lengths = Vec::with_capacity(takes.len());
        for (take, piece) in takes.iter().zip(&segment.pieces) {
            let raw = &buffer[piece.at..piece.at + piece.len];
            let at = bytes.len();
            bytes.resize(at + raw.len(), 0);
            let cols = cols(&self.sources[take.source]);
            let coded = if self.coded && piece.tensor.may_be_coded() {
                encode(raw, take.rows, cols, &mut bytes[at..])
            } else {
                None
            };
            match coded {
                Some(len) => {
                    bytes.truncate(at + len);
                    decodes(&bytes[at..], raw, take.rows, cols)?;
                }
                None => bytes[at..].copy_from_slice(raw),
            }
            let len = u32::try_from(bytes.len() - at).ok().filter(|len| len & CODED_BIT == 0).ok_or(Error::Order)?;
            lengths.push((len, coded.is_some()));
            bytes.resize(bytes.len().next_multiple_of(PIECE_ALIGN), 0);
        }
        bytes.resize(bytes.len().next_multiple_of(block()), 0);
        let len = u32::try_from(bytes.len()).map_err(|_| Error::Order)?;
        let written = Written { len, sum: xxh3_64(&bytes), pieces: lengths };
        Ok(Ready { bytes, written })
    }
}

/// That a block is what it was made of is not a matter of trust.
fn decodes(block: &[u8], raw: &[u8], rows: usize, cols: usize) -> Result<(), Error> {
    let mut row = vec![0; cols * 2];
    let same = CodedMatrix::new(block, rows, cols).is_ok_and(|coded| {
        raw.chunks_exact((cols * 2).max(1)).enumerate().all(|(r, raw)| {
            coded.decode_row(r, &mut row);
            row == raw
        })
    });
    if same { Ok(()) } else { Err(PackError { path: PathBuf::new(), fault: PackFault::Codec }.into()) }
}

/// The file that grows, and the log of what of it the disk has.
struct Part {
    path: PathBuf,
    log_path: PathBuf,
    file: File,
    log: File,
    /// Segments that are in the file.
    written: Vec<Written>,
    /// Where the next one goes.
    offset: u64,
    /// Where the log ends, and records whose data is not yet synced.
    log_end: u64,
    pending: Vec<u8>,
    unsynced: u64,
    sync_at: u64,
    synced: Instant,
}

impl Part {
    /// Opens what an earlier run has left, as far as it belongs to this pack; or begins.
    fn open(out: &Path, head: &[u8], planned: &[Planned], sync_at: u64) -> Result<Self, PackError> {
        let (path, log_path) = (beside(out, ".part"), beside(out, ".part.log"));
        let create = |e| fault(out, PackFault::Create(e));
        // On a file system without locks two packs at once are the user's affair.
        let (file, locked) = lock::open(&path).map_err(create)?;
        if let Err(TryLockError::WouldBlock) = locked {
            return Err(fault(&path, PackFault::Busy));
        }
        let log = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&log_path);
        let log = log.map_err(create)?;
        let empty = |file: &File| file.metadata().is_ok_and(|meta| meta.len() == 0);
        let fresh = empty(&file) && empty(&log);
        let mut part = Self {
            path,
            log_path,
            file,
            log,
            written: Vec::new(),
            offset: PAGE,
            log_end: head.len() as u64,
            pending: Vec::new(),
            unsynced: 0,
            sync_at,
            synced: Instant::now(),
        };
        if let Err(error) = part.resume(head, planned) {
            if fresh {
                part.remove();
            }
            return Err(part.failed(error));
        }
        Ok(part)
    }

    /// Leaves nothing behind if nothing was done.
    fn abandon(&self) {
        if self.written.is_empty() {
            self.remove();
        }
    }

    /// Nothing was begun, so nothing is left behind.
    fn remove(&self) {
        let _gone = (std::fs::remove_file(&self.path), std::fs::remove_file(&self.log_path));
    }

    fn failed(&self, source: io::Error) -> PackError {
        fault(&self.path, PackFault::Write(source))
    }

    fn resume(&mut self, head: &[u8], planned: &[Planned]) -> io::Result<()> {
        let len = self.file.metadata()?.len();
        let mut log = Vec::new();
        io::Read::read_to_end(&mut &self.log, &mut log)?;
        match log.strip_prefix(head) {
            Some(mut records) => {
                for planned in planned {
                    let Some((written, rest)) = parse_record(records, self.written.len(), planned.takes.len()) else {
                        break;
                    };
                    if self.offset + u64::from(written.len) > len {
                        break;
                    }
                    self.offset += u64::from(written.len);
                    self.log_end += (records.len() - rest.len()) as u64;
                    self.written.push(written);
                    records = rest;
                }
            }
            None => {
                // Another pack's, or nobody's.
                self.log.set_len(0)?;
                self.log.write_all_at(head, 0)?;
            }
        }
        // What was written and never confirmed may be anything.
        self.file.set_len(self.offset)?;
        self.log.set_len(self.log_end)?;
        self.log.sync_all()
    }

    /// Appends a segment.
    fn append(&mut self, ready: Ready) -> io::Result<()> {
        self.file.write_all_at(&ready.bytes, self.offset)?;
        self.offset += ready.bytes.len() as u64;
        self.unsynced += ready.bytes.len() as u64;
        self.pending.extend_from_slice(&emit_record(self.written.len(), &ready.written));
        self.written.push(ready.written);
        if self.unsynced >= self.sync_at || self.synced.elapsed() >= SYNC_TIME {
            self.sync()?;
        }
        Ok(())
    }

    /// First the data, then the log that speaks of it.
    fn sync(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.file.sync_data()?;
        self.log.write_all_at(&self.pending, self.log_end)?;
        self.log.sync_data()?;
        self.log_end += self.pending.len() as u64;
        self.pending.clear();
        (self.unsynced, self.synced) = (0, Instant::now());
        Ok(())
    }
}

fn fault(path: &Path, fault: PackFault) -> PackError {
    PackError { path: path.to_owned(), fault }
}

/// What a log begins with: which pack it is of.
fn log_head(digests: &Digests, coded: bool, segments: usize) -> Vec<u8> {
    let mut head = LOG_MAGIC.to_vec();
    head.extend_from_slice(&u32::from(coded).to_le_bytes());
    head.extend_from_slice(&(segments as u64).to_le_bytes());
    for digest in [&digests.config, &digests.headers, &digests.samples] {
        head.extend_from_slice(digest);
    }
    let sum = xxh3_64(&head);
    head.extend_from_slice(&sum.to_le_bytes());
    head
}

/// Number, length, checksum, pieces, and a checksum of the record.
fn emit_record(number: usize, written: &Written) -> Vec<u8> {
    let mut record = (number as u64).to_le_bytes().to_vec();
    record.extend_from_slice(&written.len.to_le_bytes());
    record.extend_from_slice(&written.sum.to_le_bytes());
    for &(len, coded) in &written.pieces {
        record.extend_from_slice(&(len | if coded { CODED_BIT } else { 0 }).to_le_bytes());
    }
    let sum = xxh3_64(&record);
    record.extend_from_slice(&sum.to_le_bytes());
    record
}

/// The record of segment `number`, which has so many pieces, and what is behind it.
fn parse_record(bytes: &[u8], number: usize, pieces: usize) -> Option<(Written, &[u8])> {
    let (body, rest) = bytes.split_at_checked(20 + 4 * pieces)?;
    let (sum, rest) = rest.split_first_chunk::<8>()?;
    if xxh3_64(body).to_le_bytes() != *sum {
        return None;
    }
    let (found, body) = body.split_first_chunk::<8>()?;
    let (len, body) = body.split_first_chunk::<4>()?;
    let (sum, body) = body.split_first_chunk::<8>()?;
    let piece = |word: &[u8; 4]| {
        let word = u32::from_le_bytes(*word);
        (word & !CODED_BIT, word & CODED_BIT != 0)
    };
    let pieces = body.as_chunks::<4>().0.iter().map(piece).collect();
    let written = Written { len: u32::from_le_bytes(*len), sum: u64::from_le_bytes(*sum), pieces };
    (u64::from_le_bytes(*found) == number as u64).then_some((written, rest))
}

/// Packs the trunk of `checkpoint` into `out`. Setting `stop` ends it; what was written is kept and the
/// next call goes on from there.
///
/// # Errors
/// [`Error::Pack`] saying what is in the way; [`Error::Stopped`]; those of reading the shards, also of a read that
/// brings nothing for longer than the checkpoint's [patience](Checkpoint::patience). There is never a file `out`
/// that is not whole.
pub fn write(
    checkpoint: &Checkpoint,
    out: &Path,
    options: Options,
    stop: &Arc<AtomicBool>,
    progress: &mut dyn FnMut(&Progress),
) -> Result<Outcome, Error> {
    let groups = groups(checkpoint);
    let sources: Vec<Source> = groups.iter().flatten().copied().collect();
    let raw: u64 = sources.iter().map(|s| (s.rows * s.row_bytes) as u64).sum();
    let digests = Digests::of(checkpoint)?;
    let planned = layout(&groups, options.coded);
    if let Some(already) = already(checkpoint, out, options.coded)? {
        // A run that was killed between the rename and its last step.
        let _gone = std::fs::remove_file(beside(out, ".part.log"));
        return Ok(Outcome { raw, ..already });
    }
    // Before the file, so that nothing is begun where the system refuses threads.
    let raw_of = |p: &Planned| p.takes.iter().map(|t| (t.rows * sources[t.source].row_bytes) as u64).sum::<u64>();
    let threads = affordable(options.threads.min(planned.len()), planned.iter().map(raw_of).max().unwrap_or(0));
    let fetch = Fetch::with_at_most(&checkpoint.files(), threads, stop)?;
    let mut part =
        Part::open(out, &log_head(&digests, options.coded, planned.len()), &planned, SYNC_BYTES.min(raw / 16))?;
    // Another process may have finished it before this one had the lock.
    if let Some(already) = already(checkpoint, out, options.coded).inspect_err(|_| part.abandon())? {
        part.remove();
        return Ok(Outcome { raw, ..already });
    }
    space(out, &part, &sources, &planned, options.coded)?;

    let resumed: u64 = planned.iter().take(part.written.len()).map(raw_of).sum();
    let mut now = Progress { stage: Stage::Packing, done: resumed, total: raw, resumed, written: part.offset };
    // What an earlier run did is said even if nothing is left to do.
    progress(&now);
    let first = part.written.len();
    let ready = HashMap::new();
    let state = State { next: first, wanted: first, ahead: AHEAD * threads, ready, over: false };
    let work = Work {
        fetch,
        sources: &sources,
        planned: &planned,
        coded: options.coded,
        state: Mutex::new(state),
        changed: Condvar::new(),
    };
    let result = std::thread::scope(|scope| {
        for started in 0..threads {
            // Fewer threads than wished for come to the same file.
            match std::thread::Builder::new().spawn_scoped(scope, || work.run()) {
                Err(error) if started == 0 => return Err(Error::Threads(error)),
                Err(_) => break,
                Ok(_) => {}
            }
        }
        let result = (first..planned.len()).try_for_each(|number| {
            let ready = wait(&work, number, stop)?;
            part.append(ready).map_err(|e| part.failed(e))?;
            now.done += raw_of(&planned[number]);
            now.written = part.offset;
            progress(&now);
            Ok::<_, Error>(())
        });
        work.lock().over = true;
        work.changed.notify_all();
        result
    });
    // Whatever ended it, what was done is done.
    let synced = part.sync();
    if let Err(Error::Threads(_) | Error::Memory(_)) = &result {
        part.abandon();
    }
    result?;
    synced.map_err(|e| part.failed(e))?;

    let table = table(&planned, &groups, &sources, checkpoint, &part.written);
    let file_len = finish(&part, &table, digests, raw, options.coded, checkpoint).map_err(|e| part.failed(e))?;
    if options.verify {
        let pack = Pack::open(&part.path, &**checkpoint.opener())?;
        now = Progress { stage: Stage::Verifying, done: 0, total: file_len, resumed: 0, written: file_len };
        let files = pack.files(checkpoint.opener()).with_patience(checkpoint.patience());
        let different = verify(&pack, files, stop, &mut |done| {
            now.done = done;
            progress(&now);
        })?;
        if let Some(first) = different.first() {
            // The log has vouched for what the disk did not keep.
            let _gone = std::fs::remove_file(&part.log_path);
            return Err(fault(out, PackFault::Verify { segment: first.segment }).into());
        }
    }
    publish(&part.path, out)?;
    let _gone = std::fs::remove_file(&part.log_path);
    Ok(Outcome { already: false, file_len, raw, resumed })
}

/// So many threads, or as many as there is memory for: each has a segment of so many bytes, its code and what is
/// ready, and another thread that reads for it. Where address space is limited, threads that start as long as they
/// can leave nothing for what they do; and while one starts, the C library maps twice of what it keeps.
fn affordable(threads: usize, segment: u64) -> usize {
    let each = segment.saturating_mul(2 + AHEAD as u64);
    let fits = |threads: usize| {
        let room = available(4 * threads + 1);
        room.is_none_or(|room| room.bytes >= each.saturating_mul(threads as u64))
    };
    std::iter::successors(Some(threads), |threads| Some(threads / 2)).find(|&n| n <= 1 || fits(n)).unwrap_or(1).max(1)
}

/// The file that is there already, if it is this pack; `None` if there is none.
fn already(checkpoint: &Checkpoint, out: &Path, coded: bool) -> Result<Option<Outcome>, PackError> {
    if out.symlink_metadata().is_err() {
        return Ok(None);
    }
    let pack = Pack::open(out, &**checkpoint.opener()).ok().filter(|p| p.is_coded() == coded);
    match pack.filter(|p| p.matches(checkpoint).is_ok()) {
        Some(pack) => Ok(Some(Outcome { already: true, file_len: pack.file_len(), raw: 0, resumed: 0 })),
        None => Err(fault(out, PackFault::Exists)),
    }
}

/// Refuses at once what the disk has no room for.
fn space(out: &Path, part: &Part, sources: &[Source], planned: &[Planned], coded: bool) -> Result<(), Error> {
    let bytes = |p: &Planned| {
        let used = used(p, sources, coded);
        (used + used / 1024).next_multiple_of(block()) as u64
    };
    let needed = planned.iter().skip(part.written.len()).map(bytes).sum::<u64>() + planned.len() as u64 * 64;
    // A file system that does not say is found out later.
    let Ok(free) = free_space_of(&part.file) else { return Ok(()) };
    if needed <= free {
        return Ok(());
    }
    part.abandon();
    Err(fault(out, PackFault::Space { needed, free }).into())
}

/// The next segment, when it is ready.
fn wait(work: &Work<'_>, number: usize, stop: &AtomicBool) -> Result<Ready, Error> {
    let mut state = work.lock();
    state.wanted = number;
    work.changed.notify_all();
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Stopped);
        }
        if let Some(ready) = state.ready.remove(&number) {
            return ready;
        }
        let waited = work.changed.wait_timeout(state, Duration::from_millis(50));
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// The table of what was written.
fn table(
    planned: &[Planned],
    groups: &[Vec<Source>],
    sources: &[Source],
    checkpoint: &Checkpoint,
    written: &[Written],
) -> Table {
    let mut table = Table::default();
    let mut offset = PAGE;
    let tensors = sources.iter().map(|s| {
        let dtype = s.tensor.spec(checkpoint.config()).dtype;
        let cols = s.row_bytes as u64 / dtype.size();
        TensorRecord { tensor: s.tensor, dtype, first_piece: 0, pieces: 0, rows: s.rows as u64, cols, stored: 0 }
    });
    table.tensors = tensors.collect();
    // Segments, pieces and rows are counted in four bytes; `Table::parse` refuses what did not fit.
    let word = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    for (planned, written) in planned.iter().zip(written) {
        let first_piece = word(table.pieces.len());
        let mut at = 0;
        for (take, &(len, coded)) in planned.takes.iter().zip(&written.pieces) {
            let tensor = &mut table.tensors[take.source];
            if tensor.pieces == 0 {
                tensor.first_piece = table.pieces.len();
            }
            tensor.pieces += 1;
            tensor.stored += u64::from(len);
            let (first_row, rows) = (word(take.first_row), word(take.rows));
            table.pieces.push(PieceRecord { tensor: word(take.source), first_row, rows, at: word(at), len, coded });
            at += (len as usize).next_multiple_of(PIECE_ALIGN);
        }
        table.segments.push(SegmentRecord { offset, len: written.len, first_piece, sum: written.sum });
        offset += u64::from(written.len);
    }
    for group in 0..groups.len() {
        let first_segment = planned.iter().position(|p| p.group == group).unwrap_or(0);
        let segments = planned.iter().filter(|p| p.group == group).count();
        table.groups.push(Group { first_segment, segments });
    }
    table
}

/// Table and header; then all of it is on the disk.
fn finish(
    part: &Part,
    table: &Table,
    digests: Digests,
    raw: u64,
    coded: bool,
    checkpoint: &Checkpoint,
) -> io::Result<u64> {
    let bytes = table.emit();
    let table_at = part.offset;
    let file_len = table_at + bytes.len() as u64;
    part.file.write_all_at(&bytes, table_at)?;
    let header = Header {
        coded,
        file_len,
        table_at,
        table_len: bytes.len() as u64,
        table_sum: xxh3_64(&bytes),
        digests,
        raw,
        layers: u32::try_from(checkpoint.config().num_hidden_layers).unwrap_or(u32::MAX),
    };
    part.file.write_all_at(&header.emit(), 0)?;
    part.file.sync_all()?;
    // What is read back must come from the disk; declined advice only makes the check weaker.
    let _declined = rustix::fs::fadvise(&part.file, 0, None, rustix::fs::Advice::DontNeed);
    Ok(file_len)
}

/// Gives the file its name, for good.
fn publish(part: &Path, out: &Path) -> Result<(), Error> {
    let renamed = rustix::fs::renameat_with(rustix::fs::CWD, part, rustix::fs::CWD, out, RenameFlags::NOREPLACE);
    let renamed = match renamed.map_err(io::Error::from) {
        Err(e) if e.kind() == ErrorKind::AlreadyExists => return Err(fault(out, PackFault::Exists).into()),
        Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => std::fs::rename(part, out),
        other => other,
    };
    renamed.map_err(|e| fault(out, PackFault::Write(e)))?;
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(|e| fault(out, PackFault::Write(e)))?;
    Ok(())
}
