//! The trunk on its way through memory: a pinned prefix, and a ring for the rest.
//!
//! Layers are walked in a cycle, so what is kept is a *prefix*: a cache that evicts the oldest would
//! hit nothing. The rest passes through a ring of equal slots. Reads are issued in walk order as
//! soon as a slot is free, across the end of a pass into the next one; the closure that borrows a
//! block returning *is* the release of its slot.
//!
//! ```text
//! walk      [layer 0][layer 1] ... [layer L-1][head]     segments, cut to the slot size
//!            ^^^^^^^^^ pinned        ^ cursor  ^ next read
//! ```

use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::fetch::{Fetch, Fetched, Priority};
use crate::segment::{Segment, Source, cut};
use k3_core::checkpoint::Tensor;
use k3_core::view::Bf16Matrix;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What the trunk did (all counts since it was built).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrunkStats {
    /// Layers walked.
    pub visits: u64,
    /// Of these, layers of the pinned prefix.
    pub hits: u64,
    /// Time spent waiting for a read that had not arrived.
    pub waited: Duration,
}

/// Where the walk stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cursor {
    segment: usize,
    piece: usize,
}

/// The trunk of one checkpoint.
#[derive(Debug)]
pub struct Trunk {
    segments: Vec<Segment>,
    /// Segments of each layer; the last entry is the head.
    layers: Vec<Range<usize>>,
    /// Whether the segments of a layer stay.
    keep: Vec<bool>,
    kept: Vec<Option<AlignedBuf>>,
    /// Ring slots that hold nothing.
    free: Vec<AlignedBuf>,
    /// Segments asked for, in order, and not yet taken.
    asked: VecDeque<usize>,
    /// Arrived, not yet taken.
    arrived: Vec<(usize, Result<AlignedBuf, Error>)>,
    /// The next segment to ask for, and whether it belongs to the pass after this one.
    next: usize,
    next_pass: bool,
    /// Whether this pass reads the head.
    head: bool,
    cursor: Cursor,
    current: Option<AlignedBuf>,
    sender: Sender<Fetched>,
    receiver: Receiver<Fetched>,
    /// Kept segments may be on their way at the same time, at most this many.
    window: usize,
    stats: TrunkStats,
}

impl Trunk {
    /// Cuts the walk into segments and maps the ring. Nothing is read yet.
    ///
    /// # Errors
    /// [`Error::Memory`] if the ring cannot be mapped.
    pub fn new(
        walk: &[Vec<Source>],
        slot: usize,
        ring: usize,
        pinned: usize,
        head_pinned: bool,
    ) -> Result<Self, Error> {
        let (mut segments, mut layers, mut keep) = (Vec::new(), Vec::new(), Vec::new());
        for (i, sources) in walk.iter().enumerate() {
            let first = segments.len();
            segments.extend(cut(sources, slot));
            layers.push(first..segments.len());
            let stays = if i + 1 == walk.len() { head_pinned } else { i < pinned };
            keep.resize(segments.len(), stays);
        }
        let free = (0..ring.max(1)).map(|_| AlignedBuf::zeroed(slot)).collect::<Result<_, _>>()?;
        let (sender, receiver) = channel();
        Ok(Self {
            kept: segments.iter().map(|_| None).collect(),
            segments,
            layers,
            keep,
            free,
            asked: VecDeque::new(),
            arrived: Vec::new(),
            next: 0,
            next_pass: false,
            head: false,
            cursor: Cursor { segment: 0, piece: 0 },
            current: None,
            sender,
            receiver,
            window: ring.clamp(2, 8),
            stats: TrunkStats::default(),
        })
    }

    /// Counts since it was built.
    #[must_use]
    pub const fn stats(&self) -> TrunkStats {
        self.stats
    }

    /// First segment of the head: the end of the layers.
    fn body(&self) -> usize {
        self.layers.last().map_or(0, |head| head.start)
    }

    /// A pass begins. What was read ahead for it is used; what a broken-off pass left is dropped.
    ///
    /// # Errors
    /// Those of the reads.
    pub fn begin(&mut self, fetch: &Fetch, head: bool) -> Result<(), Error> {
        let end = if self.head { self.segments.len() } else { self.body() };
        let at_start = self.cursor == Cursor { segment: 0, piece: 0 } && self.asked.is_empty();
        let at_end = self.cursor == Cursor { segment: end, piece: 0 };
        if at_end && self.next_pass {
            self.next_pass = false;
        } else if !(at_start && !self.next_pass && self.next == 0) {
            self.drain();
            (self.next, self.next_pass) = (0, false);
        }
        (self.cursor, self.head) = (Cursor { segment: 0, piece: 0 }, head);
        self.pump(fetch)
    }

    /// Waits for everything on its way and frees it.
    fn drain(&mut self) {
        self.free.extend(self.current.take());
        let mut expected = self.asked.len() - self.arrived.len();
        for (segment, buffer) in std::mem::take(&mut self.arrived) {
            self.give_back(segment, buffer.ok());
        }
        while expected > 0 {
            let Ok(fetched) = self.receiver.recv() else { break };
            let segment = usize::try_from(fetched.tag).unwrap_or(usize::MAX);
            self.give_back(segment, Some(fetched.buffer));
            expected -= 1;
        }
        self.asked.clear();
    }

    fn give_back(&mut self, segment: usize, buffer: Option<AlignedBuf>) {
        if !self.keep.get(segment).copied().unwrap_or(true) {
            self.free.extend(buffer);
        }
    }

    /// Asks for the next segments while there is room for them.
    fn pump(&mut self, fetch: &Fetch) -> Result<(), Error> {
        loop {
            let end = if self.next_pass || !self.head { self.body() } else { self.segments.len() };
            if self.next >= end {
                if self.next_pass || end == 0 {
                    return Ok(());
                }
                (self.next, self.next_pass) = (0, true);
                continue;
            }
            let segment = self.next;
            if self.keep[segment] && (self.kept[segment].is_some() || self.asked.contains(&segment)) {
                self.next += 1;
                continue;
            }
            let buffer = if self.keep[segment] {
                if self.asked.len() >= self.window {
                    return Ok(());
                }
                AlignedBuf::zeroed(self.segments[segment].bytes)?
            } else {
                let Some(buffer) = self.free.pop() else { return Ok(()) };
                buffer
            };
            fetch.submit(&self.segments[segment].reads, buffer, segment as u64, Priority::Prefetch, &self.sender);
            self.asked.push_back(segment);
            self.next += 1;
        }
    }

    /// Makes the cursor's segment the current one.
    fn load(&mut self, fetch: &Fetch) -> Result<(), Error> {
        let segment = self.cursor.segment;
        if self.current.is_some() || self.kept.get(segment).is_some_and(Option::is_some) {
            return Ok(());
        }
        self.pump(fetch)?;
        if self.asked.front() != Some(&segment) {
            return Err(Error::Order);
        }
        let started = Instant::now();
        let index = loop {
            if let Some(i) = self.arrived.iter().position(|(s, _)| *s == segment) {
                break i;
            }
            let fetched = fetch.wait(&self.receiver)?;
            let tag = usize::try_from(fetched.tag).unwrap_or(usize::MAX);
            let Fetched { buffer, result, .. } = fetched;
            match result {
                Ok(()) => self.arrived.push((tag, Ok(buffer))),
                Err(error) => {
                    self.give_back(tag, Some(buffer));
                    self.arrived.push((tag, Err(error.into())));
                }
            }
        };
        self.stats.waited += started.elapsed();
        let (_, buffer) = self.arrived.swap_remove(index);
        self.asked.pop_front();
        let buffer = buffer?;
        if self.keep[segment] {
            self.kept[segment] = Some(buffer);
        } else {
            self.current = Some(buffer);
        }
        Ok(())
    }

    /// Moves past the current piece; frees the slot behind the last one.
    fn advance(&mut self, fetch: &Fetch) -> Result<(), Error> {
        self.cursor.piece += 1;
        if self.cursor.piece == self.segments[self.cursor.segment].pieces.len() {
            self.cursor = Cursor { segment: self.cursor.segment + 1, piece: 0 };
            self.free.extend(self.current.take());
            self.pump(fetch)?;
        }
        Ok(())
    }

    /// Lends the pieces of `tensor`, which must be the next of the walk.
    fn lend(&mut self, fetch: &Fetch, tensor: Tensor, mut each: impl FnMut(usize, usize, &[u8])) -> Result<(), Error> {
        let mut found = false;
        while let Some(segment) = self.segments.get(self.cursor.segment) {
            let piece = segment.pieces[self.cursor.piece];
            if piece.tensor != tensor {
                break;
            }
            if !found && self.cursor.piece == 0 {
                self.count(self.cursor.segment);
            }
            found = true;
            fetch.check()?;
            self.load(fetch)?;
            let buffer = self.current.as_ref().or(self.kept[self.cursor.segment].as_ref()).ok_or(Error::Order)?;
            let bytes = buffer.get(piece.at..piece.at + piece.len).ok_or(Error::Order)?;
            each(piece.first_row, piece.rows, bytes);
            self.advance(fetch)?;
        }
        if found { Ok(()) } else { Err(Error::Order) }
    }

    fn count(&mut self, segment: usize) {
        let body = self.layers.len() - 1;
        if let Some(layer) = self.layers[..body].iter().find(|l| l.start == segment && !l.is_empty()) {
            self.stats.visits += 1;
            self.stats.hits += u64::from(self.keep[layer.start]);
        }
    }

    /// See [`k3_core::model::Weights::vector`].
    ///
    /// # Errors
    /// Those of the reads; [`Error::Order`] if the tensor is not the next of the walk.
    pub fn vector(&mut self, fetch: &Fetch, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.lend(fetch, tensor, |_, _, bytes| each(bytes))
    }

    /// See [`k3_core::model::Weights::matrix`].
    ///
    /// # Errors
    /// Those of the reads; [`Error::Order`] if the tensor is not the next of the walk.
    pub fn matrix(
        &mut self,
        fetch: &Fetch,
        tensor: Tensor,
        each: &mut dyn FnMut(usize, Bf16Matrix<'_>),
    ) -> Result<(), Error> {
        let mut whole = true;
        self.lend(fetch, tensor, |first, rows, bytes| {
            match Bf16Matrix::new(bytes, rows, bytes.len() / 2 / rows.max(1)) {
                Ok(block) => each(first, block),
                Err(_) => whole = false,
            }
        })?;
        if whole { Ok(()) } else { Err(Error::Order) }
    }
}
