//! A pack that is there: opened, held against a model, read whole.

use super::format::{Header, PAGE, Table};
use super::source::groups;
use super::{Digests, Group, PackError, PackFault, Part, PieceRecord, SegmentRecord, TensorRecord};
use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::io::{Check, FileSet, ReadFault, Source as Opener, Stamp, read_exact_at};
use crate::segment::{Form, Piece, Place, Read, Segment, block};
use k3_core::checkpoint::{GlobalTensor, Tensor};
use k3_core::coded::CodedMatrix;
use k3_core::view::TokenId;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;
use xxhash_rust::xxh3::xxh3_64;

/// A packed trunk whose header and table were read and checked. Its segments are checked when they are read.
pub struct Pack {
    path: PathBuf,
    stamp: Option<Stamp>,
    header: Header,
    table: Table,
}

impl std::fmt::Debug for Pack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pack").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Pack {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Pack`] if it is no pack or a damaged one; those of the reads.
    pub fn open(path: &Path, opener: &dyn Opener) -> Result<Self, Error> {
        let failed = |source| Error::open(path, source);
        let fault = |fault| PackError { path: path.to_owned(), fault };
        let file = opener.open_cached(path).map_err(failed)?;
        let len = file.len().map_err(failed)?;
        if len < PAGE {
            return Err(fault(PackFault::NotAPack).into());
        }
        let mut page = [0; 4096];
        read_exact_at(&*file, &mut page, 0)?;
        let header = Header::parse(&page, len).map_err(fault)?;
        // Held against the file's length and a bound before there is a buffer.
        let mut bytes = AlignedBuf::zeroed(usize::try_from(header.table_len).unwrap_or(usize::MAX))?;
        read_exact_at(&*file, &mut bytes, header.table_at)?;
        if xxh3_64(&bytes) != header.table_sum {
            return Err(fault(PackFault::Table).into());
        }
        let table = Table::parse(&bytes, header.table_at).map_err(fault)?;
        Ok(Self { path: path.to_owned(), stamp: file.stamp(), header, table })
    }

    /// Holds it against a model: same digests, same tensors in the same order.
    ///
    /// # Errors
    /// [`Error::Pack`] naming what differs; those of the reads.
    pub fn matches(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        self.made_of(&Digests::of(checkpoint)?)?;
        let expected = groups(checkpoint);
        let config = checkpoint.config();
        let mut tensors = self.table.tensors.iter();
        let mut next_piece = 0;
        for (group, sources) in expected.iter().enumerate() {
            for source in sources {
                let same = tensors.next().is_some_and(|t| {
                    let granule = source.tensor.row_granule(config) as u64;
                    let pieces = &self.table.pieces[t.first_piece..t.first_piece + t.pieces];
                    next_piece = t.first_piece + t.pieces;
                    t.tensor == source.tensor
                        && t.dtype == source.tensor.spec(config).dtype
                        && t.rows == source.rows as u64
                        && t.cols.saturating_mul(t.dtype.size()) == source.row_bytes as u64
                        && pieces.iter().all(|p| u64::from(p.rows).is_multiple_of(granule))
                });
                if !same {
                    return Err(self.error(PackFault::OtherTensors { group }).into());
                }
            }
            let ends = self.table.groups.get(group).map(|g| g.first_segment + g.segments);
            let first =
                ends.map(|s| self.table.segments.get(s).map_or(self.table.pieces.len(), |s| s.first_piece as usize));
            if first != Some(next_piece) {
                return Err(self.error(PackFault::OtherTensors { group }).into());
            }
        }
        let all = tensors.next().is_none() && self.table.groups.len() == expected.len();
        if all { Ok(()) } else { Err(self.error(PackFault::OtherTensors { group: expected.len() }).into()) }
    }

    fn made_of(&self, digests: &Digests) -> Result<(), Error> {
        let own = &self.header.digests;
        let part = if own.config != digests.config {
            Part::Config
        } else if own.headers != digests.headers {
            Part::Headers
        } else if own.samples != digests.samples {
            Part::Weights
        } else {
            return Ok(());
        };
        Err(self.error(PackFault::OtherModel(part)).into())
    }

    fn error(&self, fault: PackFault) -> PackError {
        PackError { path: self.path.clone(), fault }
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which file it was when it was opened.
    #[must_use]
    pub const fn stamp(&self) -> Option<Stamp> {
        self.stamp
    }

    /// The file as a set of one, which is refused if it is no longer the one that was opened.
    #[must_use]
    pub fn files(&self, opener: &Arc<dyn Opener>) -> FileSet {
        FileSet::with_stamps(Arc::clone(opener), vec![(self.path.clone(), self.stamp)], 1)
    }

    /// Whether its matrices are coded.
    #[must_use]
    pub const fn is_coded(&self) -> bool {
        self.header.coded
    }

    /// Its length (bytes).
    #[must_use]
    pub const fn file_len(&self) -> u64 {
        self.header.file_len
    }

    /// Bytes of its tensors in the shards.
    #[must_use]
    pub const fn raw_bytes(&self) -> u64 {
        self.header.raw
    }

    /// Layers of the model.
    #[must_use]
    pub const fn layers(&self) -> u32 {
        self.header.layers
    }

    /// Digests of what it was made of.
    #[must_use]
    pub const fn digests(&self) -> &Digests {
        &self.header.digests
    }

    /// The embedding, the layers, the head.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.table.groups
    }

    /// Its tensors, in the order of the file.
    #[must_use]
    pub fn tensors(&self) -> &[TensorRecord] {
        &self.table.tensors
    }

    /// Its segments.
    #[must_use]
    pub fn segments(&self) -> &[SegmentRecord] {
        &self.table.segments
    }

    /// The pieces of a tensor.
    #[must_use]
    pub fn pieces(&self, tensor: &TensorRecord) -> &[PieceRecord] {
        self.table.pieces.get(tensor.first_piece..tensor.first_piece + tensor.pieces).unwrap_or_default()
    }

    /// The segment that has a piece.
    #[must_use]
    pub fn segment_of(&self, piece: usize) -> usize {
        self.table.segments.partition_point(|s| s.first_piece as usize <= piece).saturating_sub(1)
    }

    /// Bytes that are kept in memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.table.bytes()
    }

    /// The smallest slot that a segment of any layer or the head fits (bytes).
    pub(crate) fn least_slot(&self) -> usize {
        let first = self.table.groups.first().map_or(0, |embedding| embedding.segments);
        self.table.segments.iter().skip(first).map(|s| s.len as usize).max().unwrap_or(block())
    }

    /// Bytes of the largest layer (bytes).
    pub(crate) fn largest_layer(&self) -> usize {
        let bytes = |g: usize| self.table.segments_of(g).iter().map(|s| s.len as usize).sum::<usize>();
        (1..self.table.groups.len()).map(bytes).max().unwrap_or(0)
    }

    /// Pieces of a layer or, behind the last, of the head.
    pub(crate) fn piece_count(&self, layer: usize) -> usize {
        let start = |group: usize| self.table.groups.get(group).map(|g| g.first_segment);
        let first = |s: Option<usize>| s.and_then(|s| self.table.segments.get(s)).map(|s| s.first_piece as usize);
        first(start(layer + 2)).unwrap_or(self.table.pieces.len()) - first(start(layer + 1)).unwrap_or(0)
    }

    /// What is read together of a layer or, behind the last, of the head: as many of its segments as
    /// fit a slot, which lie end to end.
    pub(crate) fn cut(&self, layer: usize, slot: usize, file: u16) -> Vec<Segment> {
        let first = self.table.groups.get(layer + 1).map_or(0, |g| g.first_segment);
        let mut cut: Vec<Segment> = Vec::new();
        for (number, record) in (first..).zip(self.table.segments_of(layer + 1)) {
            let len = record.len as usize;
            let segment = match cut.pop() {
                Some(open) if open.bytes + len <= slot => open,
                full => {
                    cut.extend(full);
                    Segment::default()
                }
            };
            cut.push(self.append(segment, number, file));
        }
        for segment in &mut cut {
            segment.pieces.shrink_to_fit();
            segment.checks.shrink_to_fit();
        }
        cut
    }

    /// Adds segment `number` to those that are read before it.
    fn append(&self, mut open: Segment, number: usize, file: u16) -> Segment {
        let Some(record) = self.table.segments.get(number) else { return open };
        let (base, len) = (open.bytes, record.len as usize);
        for p in self.table.pieces_of(number) {
            let Some(t) = self.table.tensors.get(p.tensor as usize) else { continue };
            let cols = usize::try_from(t.cols).unwrap_or(usize::MAX);
            open.pieces.push(Piece {
                tensor: t.tensor,
                first_row: p.first_row as usize,
                rows: p.rows as usize,
                place: Place { shard: file, offset: record.offset + u64::from(p.at) },
                len: p.len as usize,
                at: base + p.at as usize,
                form: if p.coded { Form::Coded { cols } } else { Form::Raw },
            });
        }
        match open.reads.last_mut() {
            Some(read) => read.len += len,
            None => open.reads.push(Read { place: Place { shard: file, offset: record.offset }, len, at: 0 }),
        }
        open.checks.push(Check { at: base, len, sum: record.sum, segment: number, offset: record.offset });
        open.bytes += len;
        open
    }

    /// The segment that has a row of the embedding, with one piece, that which has the row.
    pub(crate) fn embedding_row(&self, id: TokenId, file: u16) -> Segment {
        let is_embed = |t: &&TensorRecord| t.tensor == Tensor::Global(GlobalTensor::Embed);
        let pieces = self.table.tensors.first().filter(is_embed).map_or(&[][..], |t| self.pieces(t));
        let index = pieces.partition_point(|p| p.first_row <= id.0).saturating_sub(1);
        let mut segment = self.append(Segment::default(), self.segment_of(index), file);
        let row = id.get();
        segment.pieces.retain(|p| p.first_row <= row && row < p.first_row + p.rows);
        segment
    }
}

/// A segment that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Different {
    /// Its number.
    pub segment: usize,
    /// Where it lies (bytes).
    pub offset: u64,
    /// The tensor in it that differs from the source, if the segment itself is whole.
    pub tensor: Option<Tensor>,
}

impl std::fmt::Display for Different {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { segment, offset, tensor } = self;
        match tensor {
            None => write!(f, "segment {segment} (at byte {offset}) is damaged"),
            Some(tensor) => write!(f, "segment {segment} (at byte {offset}): {tensor} is not that of the model"),
        }
    }
}

/// Segments that are being read at the same time, each of at most some megabytes.
const AHEAD: usize = 4;

/// Reads a whole pack, out of its own [`Pack::files`], and lists the segments whose checksum does not hold.
/// `each` is told the bytes that are done.
///
/// # Errors
/// Those of the reads, also of one that brings nothing for longer than the files' [patience](FileSet::patience);
/// [`Error::Stopped`] once the flag is set.
pub fn verify(
    pack: &Pack,
    files: FileSet,
    stop: &Arc<AtomicBool>,
    each: &mut dyn FnMut(u64),
) -> Result<Vec<Different>, Error> {
    let whole = |number| pack.append(Segment::default(), number, 0);
    walk(pack, files, stop, &whole, each, |_, _| Ok(None))
}

/// The same, and decodes every piece and compares it with the shards of the model, which
/// [`Pack::matches`].
///
/// # Errors
/// As of [`verify`], also of the reads of shards.
pub fn compare(
    pack: &Pack,
    checkpoint: &Checkpoint,
    stop: &Arc<AtomicBool>,
    each: &mut dyn FnMut(u64),
) -> Result<Vec<Different>, Error> {
    let sources: Vec<_> = groups(checkpoint).into_iter().flatten().collect();
    let mut row = Vec::new();
    // Behind the segment of the pack, what it was made of.
    let beside = |number: usize| {
        let mut all = pack.append(Segment::default(), number, checkpoint.pack_number());
        let pieces = pack.table.pieces_of(number).iter().filter_map(|p| {
            let source = sources.get(p.tensor as usize)?;
            let (first_row, rows, row_bytes) = (p.first_row as usize, p.rows as usize, source.row_bytes);
            let offset = source.place.offset + (first_row * row_bytes) as u64;
            let place = Place { offset, ..source.place };
            Some(Piece { tensor: source.tensor, first_row, rows, place, len: rows * row_bytes, at: 0, form: Form::Raw })
        });
        let raw = Segment::gather(pieces.collect());
        let base = all.bytes;
        all.reads.extend(raw.reads.iter().map(|read| Read { at: base + read.at, ..*read }));
        all.pieces = raw.pieces;
        all.pieces.iter_mut().for_each(|piece| piece.at += base);
        all.bytes += raw.bytes;
        all
    };
    walk(pack, checkpoint.files_and(pack), stop, &beside, each, |segment, bytes| {
        let number = segment.checks.first().map_or(0, |check| check.segment);
        for (i, p) in pack.table.pieces_of(number).iter().enumerate() {
            let piece = segment.pieces.get(i).ok_or(Error::Order)?;
            let row_bytes = piece.len / piece.rows.max(1);
            let raw = bytes.get(piece.at..piece.at + piece.len).ok_or(Error::Order)?;
            let stored = bytes.get(p.at as usize..(p.at + p.len) as usize).ok_or(Error::Order)?;
            let same = if p.coded {
                row.resize(row_bytes, 0);
                CodedMatrix::new(stored, piece.rows, row_bytes / 2).is_ok_and(|coded| {
                    raw.chunks_exact(row_bytes).enumerate().all(|(r, raw)| {
                        coded.decode_row(r, &mut row);
                        row == raw
                    })
                })
            } else {
                stored == raw
            };
            if !same {
                return Ok(Some(piece.tensor));
            }
        }
        Ok(None)
    })
}

/// Reads what `wanted` says of each segment of a pack, and hands those whose checksum holds to `look`.
fn walk(
    pack: &Pack,
    files: FileSet,
    stop: &Arc<AtomicBool>,
    wanted: &dyn Fn(usize) -> Segment,
    each: &mut dyn FnMut(u64),
    mut look: impl FnMut(&Segment, &[u8]) -> Result<Option<Tensor>, Error>,
) -> Result<Vec<Different>, Error> {
    let fetch = Fetch::new(files, AHEAD.min(pack.table.segments.len()), Arc::clone(stop))?;
    let (send, answers) = channel();
    let mut numbers = 0..pack.table.segments.len();
    let mut flying: HashMap<u64, Segment> = HashMap::new();
    let mut free: Vec<AlignedBuf> = Vec::new();
    let (mut different, mut done) = (Vec::new(), 0);
    loop {
        while flying.len() < AHEAD
            && let Some(number) = numbers.next()
        {
            let segment = wanted(number);
            let buffer = match free.pop().filter(|buffer| buffer.len() >= segment.bytes) {
                Some(buffer) => buffer,
                None => AlignedBuf::zeroed(segment.bytes)?,
            };
            fetch.submit_checked(&segment.reads, &segment.checks, buffer, number as u64, Priority::Prefetch, &send);
            flying.insert(number as u64, segment);
        }
        if flying.is_empty() {
            break;
        }
        let fetched = fetch.wait(&answers)?;
        let segment = flying.remove(&fetched.tag).ok_or(Error::Order)?;
        let (number, len) = segment.checks.first().map(|check| (check.segment, check.len)).ok_or(Error::Order)?;
        let offset = pack.table.segments.get(number).ok_or(Error::Order)?.offset;
        match fetched.result {
            Ok(()) => {
                if let Some(tensor) = look(&segment, &fetched.buffer)? {
                    different.push(Different { segment: number, offset, tensor: Some(tensor) });
                }
            }
            Err(error) if matches!(error.fault, ReadFault::Checksum { .. }) => {
                different.push(Different { segment: number, offset, tensor: None });
            }
            Err(error) => return Err(error.into()),
        }
        free.push(fetched.buffer);
        done += len as u64;
        each(done);
        fetch.check()?;
    }
    different.sort_by_key(|d| d.segment);
    Ok(different)
}
