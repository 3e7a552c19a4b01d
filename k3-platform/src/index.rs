//! Where each tensor lies: index and shard headers, reconciled, in ten bytes a tensor.
//!
//! The released model has 497,220 tensors in 96 shards. Names are not kept: a tensor of the config
//! has a number ([`k3_core::checkpoint::slot`]), and the index is two flat arrays over these
//! numbers. The 60 MB of `model.safetensors.index.json` are read in windows, the headers of a few
//! shards at a time.
//!
//! A length that a file claims is held against what it has to say before memory is taken for it: the
//! arrays, against the bytes the index needs to name so many tensors; a header, against the tensors
//! the index has in its shard.

use crate::aligned::{AlignedBuf, AllocError};
use crate::error::Error;
use crate::io::{GaveUp, ReadAt, ReadFault, Source, Stamp, read_exact_at};
use crate::memory::available;
use crate::segment::Place;
use k3_core::checkpoint::{self, LayerTensor, Named, Sum, Tensor};
use k3_core::config::ModelConfig;
use k3_core::json::{Event, JsonError, Parser, State, Str};
use k3_core::safetensors;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Bytes of `model.safetensors.index.json` that are looked at together.
const WINDOW: usize = 1 << 20;

/// A tensor's name is not longer than this (bytes).
const NAME: usize = 512;

/// Names of tensors that are not read, and shards: more than any release has, few enough to keep.
const MANY: usize = 65_000;

/// Bytes that a header may have beside its tensors: `__metadata__`, and the blanks that align the data.
const HEADER_REST: u64 = 64 << 10;

/// Bytes that a header may have for each tensor of its shard. The release has fewer than 200.
const HEADER_EACH: u64 = 512;

/// Headers that are read at the same time. Each holds its text meanwhile, 0.8 MB in the release.
const AT_ONCE: usize = 4;

/// No entry of a `weight_map` is shorter than this (bytes): the shortest name a tensor of the model
/// has (`language_model.lm_head.weight`), the least name of a file, quotes, colon and comma.
const ENTRY: u64 = 36;

/// No shard.
const NOWHERE: u16 = u16::MAX;

/// A file of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shard {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its length (bytes).
    pub len: u64,
    /// Which file it was when its header was read, if the source says so.
    pub stamp: Option<Stamp>,
    /// Where its data begin: its header's length and the eight bytes that say it.
    pub header: u64,
    /// XXH3 of its header (128 bits).
    pub digest: u128,
}

/// Where each tensor lies.
#[derive(Debug)]
pub struct Index {
    shards: Vec<Shard>,
    shard_of: Vec<u16>,
    offset_of: Vec<u64>,
    /// Lengths of the tensors that may have more than one ([`Tensor::accepts`]: `A_log`), if it is
    /// not the usual one (bytes).
    odd: HashMap<usize, u64>,
    /// Tensors that belong to the checkpoint and not to the text model.
    ignored: usize,
    /// What these add up to, by the first part of their names.
    other: BTreeMap<String, Sum>,
    /// Bytes between tensors that belong to none.
    gaps: u64,
}

/// Calls `member(parser event)` for each event of a JSON file read in windows.
fn scan(
    path: &Path,
    file: &dyn ReadAt,
    mut event: impl FnMut(usize, Event<'_>, u64) -> Result<(), Error>,
) -> Result<(), Error> {
    let len = file.len().map_err(|e| Error::open(path, e))?;
    let (mut state, mut base) = (State::START, 0u64);
    let mut window: Vec<u8> = Vec::new();
    loop {
        let have = base + window.len() as u64;
        let more = usize::try_from(len - have).unwrap_or(usize::MAX).min(WINDOW);
        let start = window.len();
        window.resize(start + more, 0);
        read_exact_at(file, &mut window[start..], have)?;
        let last = have + more as u64 == len;
        let mut parser = Parser::resume(state, &window, base, last);
        loop {
            match parser.next() {
                Ok(Some(e)) => event(parser.depth(), e, parser.token_offset())?,
                Ok(None) => return Ok(()),
                Err(JsonError::Incomplete { .. }) => break,
                Err(source) => return Err(Error::Json { path: path.to_owned(), source }),
            }
        }
        // No token of an index is as long as a window.
        if parser.consumed() == 0 && window.len() >= 2 * WINDOW {
            return Err(Error::Structure { path: path.to_owned(), expected: "a shorter string", offset: base });
        }
        let consumed = parser.consumed();
        state = parser.state();
        base += consumed as u64;
        window.drain(..consumed);
    }
}

/// Memory for `count` values, refused by an error where the system has none.
fn filled<T: Clone>(count: usize, value: T) -> Result<Vec<T>, AllocError> {
    let mut values = Vec::new();
    let bytes = count.saturating_mul(size_of::<T>());
    values.try_reserve_exact(count).map_err(|_| AllocError { bytes })?;
    values.resize(count, value);
    Ok(values)
}

fn decode<'b>(path: &Path, text: &Str<'_>, buffer: &'b mut [u8; NAME]) -> Result<&'b str, Error> {
    text.decode_into(buffer).map_err(|_| Error::Structure {
        path: path.to_owned(),
        expected: "a name of at most 512 bytes",
        offset: text.offset(),
    })
}

/// How much of a directory is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// The first fault ends it.
    Fault,
    /// Every shard is looked at, whatever is wrong with the others.
    End,
}

impl Index {
    /// Reads the index of `dir` and the headers of all the shards it names, and holds them against
    /// each other, the config, and the files' lengths.
    ///
    /// # Errors
    /// [`Error`] naming the first contradiction.
    pub fn open(dir: &Path, source: &dyn Source, config: &ModelConfig) -> Result<Self, Error> {
        let (index, mut faults) = Self::look(dir, source, config, Until::Fault)?;
        let absent = faults.iter().filter(|e| matches!(e, Error::MissingShard { .. })).count();
        if faults.is_empty() {
            return Ok(index);
        }
        match faults.swap_remove(0) {
            Error::MissingShard { path, .. } => Err(Error::MissingShard { path, count: absent }),
            error => Err(error),
        }
    }

    /// The same, but every shard is looked at: the faults of all of them, and what of the index can be
    /// used (nothing may be read by it if there are any).
    ///
    /// # Errors
    /// [`Error`] if the index itself cannot be read.
    pub fn examine(dir: &Path, source: &dyn Source, config: &ModelConfig) -> Result<(Self, Vec<Error>), Error> {
        Self::look(dir, source, config, Until::End)
    }

    fn look(dir: &Path, source: &dyn Source, config: &ModelConfig, until: Until) -> Result<(Self, Vec<Error>), Error> {
        let path = dir.join("model.safetensors.index.json");
        let file = source.open_cached(&path).map_err(|e| Error::open(&path, e))?;
        let expected = checkpoint::census(config).total().tensors;
        // The config alone may ask for 400 million tensors, which would be 4 GB of slots.
        let len = file.len().map_err(|e| Error::open(&path, e))?;
        if len < expected.saturating_mul(ENTRY) {
            return Err(Error::ShortIndex { path, len, tensors: expected });
        }
        let count = checkpoint::slot_count(config);
        let mut index = Self {
            shards: Vec::new(),
            shard_of: filled(count, NOWHERE)?,
            offset_of: Vec::new(),
            odd: HashMap::new(),
            ignored: 0,
            other: BTreeMap::new(),
            gaps: 0,
        };
        let map = index.read_map(&path, &*file, config)?;
        index.ignored = map.ignored.len();
        let mut faults = Vec::new();
        // None is unknown and none was named twice, so their number says whether one is missing.
        if map.known != expected {
            let missing = |&t: &Tensor| index.shard_of[checkpoint::slot(t, config)] == NOWHERE;
            let mut missing = checkpoint::expected(config).filter(missing);
            if let Some(first) = missing.next() {
                faults.push(Error::MissingTensors { path, first, count: 1 + missing.count() });
                if until == Until::Fault {
                    return Ok((index, faults));
                }
            }
        }

        // Only now, when the index has named every tensor there is a slot for.
        index.offset_of = filled(count, 0)?;
        let paths: Vec<_> = index.shards.iter().map(|shard| dir.join(&shard.name)).collect();
        faults.extend(index.read_headers(&paths, &map, source, config, until)?);
        Ok((index, faults))
    }

    /// The `weight_map`.
    fn read_map(&mut self, path: &Path, file: &dyn ReadAt, config: &ModelConfig) -> Result<Map, Error> {
        let mut known = 0;
        let mut counts: Vec<u64> = Vec::new();
        let mut numbers: HashMap<String, u16> = HashMap::new();
        let mut ignored: HashMap<String, u16> = HashMap::new();
        let (mut inside, mut seen) = (false, false);
        // The member whose value comes next: a tensor of the model, or an ignored one.
        let mut member: Option<Result<Tensor, String>> = None;
        let mut buffer = [0; NAME];
        let structure = |expected, offset| Error::Structure { path: path.to_owned(), expected, offset };
        scan(path, file, |depth, event, offset| {
            match (depth, event) {
                (1, Event::Key(key)) => {
                    inside = key == "weight_map";
                    if inside && seen {
                        return Err(structure("one \"weight_map\"", offset));
                    }
                    seen |= inside;
                }
                (2, Event::Key(key)) if inside => {
                    let name = decode(path, &key, &mut buffer)?;
                    member = Some(match Tensor::parse(name, config) {
                        Named::Known(tensor) => Ok(tensor),
                        Named::Ignored => Err(name.to_owned()),
                        Named::Unknown => {
                            return Err(Error::UnknownTensor { path: path.to_owned(), name: name.to_owned() });
                        }
                    });
                }
                (2, Event::Str(text)) if inside => {
                    let name = decode(path, &text, &mut buffer)?;
                    let number = match numbers.get(name) {
                        Some(&number) => number,
                        None => {
                            let plain = Path::new(name).file_name().is_some_and(|f| f == name)
                                && !name.contains(char::is_control);
                            if !plain {
                                return Err(Error::ShardName { path: path.to_owned(), name: name.to_owned() });
                            }
                            let number = u16::try_from(self.shards.len()).ok().filter(|&n| usize::from(n) < MANY);
                            let number = number.ok_or_else(|| structure("fewer shards", offset))?;
                            self.shards.push(Shard {
                                name: name.to_owned(),
                                len: 0,
                                stamp: None,
                                header: 0,
                                digest: 0,
                            });
                            counts.push(0);
                            numbers.insert(name.to_owned(), number);
                            number
                        }
                    };
                    counts[usize::from(number)] += 1;
                    match member.take() {
                        Some(Ok(tensor)) => {
                            let slot = checkpoint::slot(tensor, config);
                            if self.shard_of[slot] != NOWHERE {
                                return Err(Error::Duplicate { path: path.to_owned(), name: tensor.to_string() });
                            }
                            self.shard_of[slot] = number;
                            known += 1;
                        }
                        Some(Err(name)) => {
                            if ignored.len() == MANY {
                                return Err(structure("fewer tensors that are not of the text model", offset));
                            }
                            if ignored.insert(name.clone(), number).is_some() {
                                return Err(Error::Duplicate { path: path.to_owned(), name });
                            }
                        }
                        None => {}
                    }
                }
                (1, Event::ObjectEnd) if inside => inside = false,
                (1.., _) if inside && !matches!((depth, event), (2, Event::ObjectStart)) => {
                    return Err(structure("an object of tensor names and file names", offset));
                }
                _ => {}
            }
            Ok(())
        })?;
        if !seen {
            return Err(structure("a \"weight_map\"", 0));
        }
        Ok(Map { known, ignored, counts })
    }

    /// Opens each shard, once, and reads its header. Returns what is wrong: shards that cannot be opened,
    /// then headers, both in the order of the shards, then what shards lack.
    ///
    /// Until a fault that is the first such file that is there and cannot be opened, or else all that are not
    /// there, or else the first header with a fault. So after such a header the shards behind it are still
    /// opened, and no more than that.
    ///
    /// # Errors
    /// If an open is given up: the others would be waited for as long.
    fn read_headers(
        &mut self,
        paths: &[PathBuf],
        map: &Map,
        source: &dyn Source,
        config: &ModelConfig,
        until: Until,
    ) -> Result<Vec<Error>, Error> {
        let offsets: Vec<AtomicU64> = std::mem::take(&mut self.offset_of).into_iter().map(AtomicU64::new).collect();
        let headers = Headers { config, map, shard_of: &self.shard_of, offset_of: &offsets };
        let (next, failed, over) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let results = Mutex::new(Vec::new());
        let work = || {
            while !over.load(Ordering::Relaxed) {
                // Before the number is taken: all shards in front of the first fault are then read.
                let only_open = until == Until::Fault && failed.load(Ordering::Relaxed);
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(path) = paths.get(number) else { break };
                let found = match source.open_cached(path) {
                    Err(e) => Found::Unopened(e),
                    Ok(_) if only_open => continue,
                    Ok(file) => match headers.read(number, path, &*file) {
                        Ok(contents) => Found::Whole(contents),
                        Err(error) => Found::Fault(error),
                    },
                };
                failed.fetch_or(!matches!(found, Found::Whole(_)), Ordering::Relaxed);
                over.fetch_or(found.ends(until), Ordering::Relaxed);
                if let Ok(mut results) = results.lock() {
                    results.push((number, found));
                }
            }
        };
        // Each may start another that it waits for. Where address space is limited, threads that start as long as
        // they can leave nothing for what they do; while one starts, the C library maps twice of what it keeps.
        let fits = |threads: &usize| available(4 * threads).is_none_or(|room| room.bytes > 0);
        let threads = (1..=AT_ONCE.min(paths.len())).rev().find(fits).unwrap_or(1);
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // Fewer threads than wished for, or none, come to the same answer.
                let _started = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
        self.offset_of = offsets.into_iter().map(AtomicU64::into_inner).collect();
        let mut results = results.into_inner().unwrap_or_default();
        // Shards are taken in order, so the first that fails is the same whoever was faster.
        results.sort_unstable_by_key(|r| r.0);
        // What is wrong in a header explains what another shard lacks, so it comes first.
        let (mut unopened, mut faults, mut lacking) = (Vec::new(), Vec::new(), Vec::new());
        for (number, found) in results {
            let path = &paths[number];
            let last = found.ends(until);
            let contents = match found {
                Found::Whole(contents) => contents,
                Found::Unopened(e) if last => return Err(Error::open(path, e)),
                Found::Fault(error) if last => return Err(error),
                Found::Unopened(e) if e.kind() == ErrorKind::NotFound => {
                    unopened.push(Error::MissingShard { path: path.clone(), count: 1 });
                    continue;
                }
                Found::Unopened(e) => {
                    unopened.push(Error::open(path, e));
                    continue;
                }
                Found::Fault(error) => {
                    faults.push(error);
                    continue;
                }
            };
            // Each tensor of a shard was looked up in the index, so only the reverse can be wrong.
            if contents.tensors != map.counts[number] {
                lacking.push(self.unfound(path, number, config, map, &contents.ignored));
            }
            let shard = &mut self.shards[number];
            (shard.len, shard.stamp, shard.header) = (contents.file_len, contents.stamp, contents.header);
            shard.digest = contents.digest;
            self.odd.extend(contents.odd);
            self.gaps = self.gaps.saturating_add(contents.gaps);
            for (name, sum) in contents.other {
                let all = self.other.entry(name).or_default();
                *all = all.plus(sum);
            }
        }
        unopened.append(&mut faults);
        unopened.append(&mut lacking);
        Ok(unopened)
    }

    /// The first tensor that the index names and shard `number` does not have.
    fn unfound(&self, path: &Path, number: usize, config: &ModelConfig, map: &Map, ignored: &HashSet<String>) -> Error {
        let unseen = checkpoint::expected(config).find(|&t| {
            let slot = checkpoint::slot(t, config);
            usize::from(self.shard_of[slot]) == number && self.offset_of[slot] == 0
        });
        let name = match unseen {
            Some(tensor) => tensor.to_string(),
            None => {
                let mine = map.ignored.iter().filter(|&(n, &s)| usize::from(s) == number && !ignored.contains(n));
                mine.map(|(n, _)| n).min().cloned().unwrap_or_default()
            }
        };
        Error::NotInShard { path: path.to_owned(), name, indexed: true }
    }

    /// The files, in the order in which the index first names them.
    #[must_use]
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tensors that belong to the checkpoint and not to the text model.
    #[must_use]
    pub const fn ignored(&self) -> usize {
        self.ignored
    }

    /// What these add up to, by the first part of their names. Elements count as parameters.
    #[must_use]
    pub const fn other(&self) -> &BTreeMap<String, Sum> {
        &self.other
    }

    /// Bytes behind the headers that belong to no tensor.
    #[must_use]
    pub const fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Where a tensor of `config` begins.
    #[must_use]
    pub fn place(&self, tensor: Tensor, config: &ModelConfig) -> Place {
        let slot = checkpoint::slot(tensor, config);
        Place { shard: self.shard_of[slot], offset: self.offset_of[slot] }
    }

    /// Bytes a tensor of `config` has in its file.
    #[must_use]
    pub fn stored_bytes(&self, tensor: Tensor, config: &ModelConfig) -> usize {
        let slot = checkpoint::slot(tensor, config);
        let bytes = self.odd.get(&slot).copied().unwrap_or_else(|| tensor.spec(config).bytes());
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Bytes that are kept.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let names: usize = self.shards.iter().map(|s| size_of::<Shard>() + s.name.len()).sum();
        (self.shard_of.len() * 2 + self.offset_of.len() * 8 + names) as u64
    }
}

/// What the `weight_map` says, besides the shard of each tensor.
#[derive(Debug)]
struct Map {
    /// Tensors of the model that it names.
    known: u64,
    /// The other tensors, with their shards.
    ignored: HashMap<String, u16>,
    /// Tensors of each shard, of both kinds.
    counts: Vec<u64>,
}

/// What the headers are held against, and where their offsets go.
struct Headers<'a> {
    config: &'a ModelConfig,
    map: &'a Map,
    shard_of: &'a [u16],
    /// Written by several threads, each slot by the one that reads its shard.
    offset_of: &'a [AtomicU64],
}

/// What became of one shard.
enum Found {
    Whole(Contents),
    Unopened(std::io::Error),
    /// Something is wrong with its header.
    Fault(Error),
}

impl Found {
    /// Whether no other shard is looked at after this. A disk that does not answer would be waited for again;
    /// and a file that is there and cannot be opened is what ends a look until the first fault.
    fn ends(&self, until: Until) -> bool {
        match self {
            Self::Whole(_) => false,
            Self::Unopened(e) => GaveUp::of(e).is_some() || (until == Until::Fault && e.kind() != ErrorKind::NotFound),
            Self::Fault(Error::Stopped) => true,
            Self::Fault(Error::Read(e)) => until == Until::Fault && matches!(e.fault, ReadFault::Stalled { .. }),
            Self::Fault(_) => false,
        }
    }
}

/// What one header says, besides the offsets.
#[derive(Debug)]
struct Contents {
    file_len: u64,
    stamp: Option<Stamp>,
    header: u64,
    digest: u128,
    tensors: u64,
    odd: Vec<(usize, u64)>,
    /// Its tensors that are not of the text model.
    ignored: HashSet<String>,
    other: BTreeMap<String, Sum>,
    gaps: u64,
}

impl Headers<'_> {
    /// One shard's header.
    fn read(&self, number: usize, path: &Path, file: &dyn ReadAt) -> Result<Contents, Error> {
        let file_len = file.len().map_err(|e| Error::open(path, e))?;
        let header_fault = |source| Error::Header { path: path.to_owned(), source };
        let mut prefix = [0; 8];
        if file_len >= 8 {
            read_exact_at(file, &mut prefix, 0)?;
        }
        let len = safetensors::header_len(prefix, file_len).map_err(header_fault)?;
        let tensors = self.map.counts.get(number).copied().unwrap_or(0);
        let most = HEADER_EACH.saturating_mul(tensors).saturating_add(HEADER_REST);
        if len > most {
            return Err(Error::TooLong { path: path.to_owned(), what: "the header", len, most });
        }
        let mut bytes = AlignedBuf::zeroed(usize::try_from(len).unwrap_or(usize::MAX))?;
        read_exact_at(file, &mut bytes, 8)?;
        let header = safetensors::Header::parse(&bytes, file_len).map_err(header_fault)?;
        let data_start = header.data_start();
        let mut spans: Vec<(u64, u64, u64)> = Vec::new();
        let mut odd = Vec::new();
        let mut ignored: HashSet<String> = HashSet::new();
        let mut other: BTreeMap<String, Sum> = BTreeMap::new();
        let mut buffer = [0; NAME];
        let mine = u16::try_from(number).unwrap_or(NOWHERE);
        for entry in header.entries() {
            let entry = entry.map_err(header_fault)?;
            let name = decode(path, &entry.name, &mut buffer)?;
            spans.push((entry.begin, entry.end, entry.name.offset()));
            match Tensor::parse(name, self.config) {
                Named::Known(tensor) => {
                    let slot = checkpoint::slot(tensor, self.config);
                    if self.shard_of[slot] != mine {
                        return Err(Error::NotInShard { path: path.to_owned(), name: name.to_owned(), indexed: false });
                    }
                    // An offset of zero is inside the header, so it can stand for "not yet seen".
                    if self.offset_of[slot].swap(entry.begin, Ordering::Relaxed) != 0 {
                        return Err(Error::Duplicate { path: path.to_owned(), name: name.to_owned() });
                    }
                    let Some(dtype) = entry.dtype else {
                        let mut text = [0; 64];
                        let name = entry.dtype_name.decode_into(&mut text).unwrap_or("of a long name");
                        let fault = format!("its dtype {name:?} is not one this engine reads");
                        return Err(Error::Shape { path: path.to_owned(), tensor, fault });
                    };
                    tensor.accepts(self.config, dtype, entry.shape()).map_err(|fault| Error::Shape {
                        path: path.to_owned(),
                        tensor,
                        fault: fault.to_string(),
                    })?;
                    // No other may have a length of its own.
                    if matches!(tensor, Tensor::Layer(_, LayerTensor::ALog))
                        && entry.len() != tensor.spec(self.config).bytes()
                    {
                        odd.push((slot, entry.len()));
                    }
                }
                Named::Ignored => {
                    if self.map.ignored.get(name) != Some(&mine) {
                        return Err(Error::NotInShard { path: path.to_owned(), name: name.to_owned(), indexed: false });
                    }
                    if !ignored.insert(name.to_owned()) {
                        return Err(Error::Duplicate { path: path.to_owned(), name: name.to_owned() });
                    }
                    let parameters = entry.shape().iter().fold(1, |n: u64, &d| n.saturating_mul(d));
                    let first = name.split('.').next().unwrap_or(name).to_owned();
                    let sum = other.entry(first).or_default();
                    *sum = sum.plus(Sum { tensors: 1, parameters, bytes: entry.len() });
                }
                Named::Unknown => return Err(Error::UnknownTensor { path: path.to_owned(), name: name.to_owned() }),
            }
        }
        let tensors = spans.len() as u64;
        spans.sort_unstable();
        let name_at = |at: u64| {
            let mut text = [0; NAME];
            header.name_at(at).and_then(|n| n.decode_into(&mut text).ok().map(str::to_owned)).unwrap_or_default()
        };
        let mut gaps = spans.first().map_or(0, |s| s.0 - data_start);
        for pair in spans.windows(2) {
            if let [(_, end, first), (begin, _, second)] = *pair {
                if begin < end {
                    return Err(Error::Overlap {
                        first: name_at(first),
                        second: name_at(second),
                        path: path.to_owned(),
                    });
                }
                gaps += begin - end;
            }
        }
        let end = spans.iter().map(|s| s.1).max().unwrap_or(data_start);
        if end != file_len {
            return Err(Error::Length { path: path.to_owned(), expected: end, found: file_len });
        }
        let (stamp, digest) = (file.stamp(), xxhash_rust::xxh3::xxh3_128(&bytes));
        Ok(Contents { file_len, stamp, digest, header: data_start, tensors, odd, ignored, other, gaps })
    }
}
