//! The trunk on its way through memory: pinned layers, and a ring for the rest.
//!
//! Layers are walked in a cycle, so what is kept is *fixed*: a cache that evicts the oldest would
//! hit nothing. Which layers, is for [`crate::plan`] to say. The rest passes through a ring of equal slots. Reads are issued in walk order as
//! soon as a slot is free, across the end of a pass into the next one; the closure that borrows a
//! block returning *is* the release of its slot.
//!
//! ```text
//! walk      [layer 0][layer 1] ... [layer L-1][head]     segments, cut to the slot size
//!            pinned   ^ cursor  ^ next read     pinned
//! ```

use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::fetch::{Fetch, Fetched, Priority};
use crate::segment::{Form, Piece, Segment};
use crate::walk::{LISTED, Walk};
use k3_core::checkpoint::Tensor;
use k3_core::coded::CodedMatrix;
use k3_core::view::{Bf16Matrix, MatrixRows};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What the trunk did (all counts since it was built).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrunkStats {
    /// Layers walked.
    pub visits: u64,
    /// Of these, pinned layers.
    pub hits: u64,
    /// Time spent waiting for a read that had not arrived.
    pub waited: Duration,
}

/// A segment: its layer (the head is the last one), and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Spot {
    layer: usize,
    segment: usize,
}

impl Spot {
    fn tag(self) -> u64 {
        (self.layer as u64) << 32 | self.segment as u64
    }

    fn of(tag: u64) -> Self {
        let part = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Self { layer: part(tag >> 32), segment: part(tag & 0xffff_ffff) }
    }
}

/// The trunk of one checkpoint.
#[derive(Debug)]
pub struct Trunk {
    walk: Walk,
    slot: usize,
    /// Segments of the layers that were needed last.
    lists: VecDeque<(usize, Arc<[Segment]>)>,
    /// Which layers are pinned; the last entry is the head.
    keeps: Vec<bool>,
    kept: HashMap<Spot, AlignedBuf>,
    /// Ring slots that hold nothing.
    free: Vec<AlignedBuf>,
    /// Segments asked for, in order, and not yet taken.
    asked: VecDeque<Spot>,
    /// Arrived, not yet taken.
    arrived: Vec<(Spot, Result<AlignedBuf, Error>)>,
    /// The next segment to ask for, and whether it belongs to the pass after this one.
    next: Spot,
    next_pass: bool,
    /// Whether this pass reads the head.
    head: bool,
    /// The segment that is being lent, and the piece of it that comes next.
    cursor: Spot,
    piece: usize,
    current: Option<AlignedBuf>,
    sender: Sender<Fetched>,
    receiver: Receiver<Fetched>,
    /// Kept segments may be on their way at the same time, at most this many.
    window: usize,
    stats: TrunkStats,
}

impl Trunk {
    /// Maps the ring. Nothing is read yet. `slot` is at least [`Walk::least_slot`]; `keeps` says of each
    /// layer, and at last of the head, whether it is pinned. If all are, the ring may have no slots.
    ///
    /// # Errors
    /// [`Error::Memory`] if the ring cannot be mapped.
    pub fn new(walk: Walk, slot: usize, ring: usize, keeps: Vec<bool>) -> Result<Self, Error> {
        let streams = keeps.iter().any(|&keeps| !keeps);
        let free = (0..ring.max(usize::from(streams))).map(|_| AlignedBuf::zeroed(slot)).collect::<Result<_, _>>()?;
        let (sender, receiver) = channel();
        Ok(Self {
            walk,
            slot,
            lists: VecDeque::new(),
            keeps,
            kept: HashMap::new(),
            free,
            asked: VecDeque::new(),
            arrived: Vec::new(),
            next: Spot::default(),
            next_pass: false,
            head: false,
            cursor: Spot::default(),
            piece: 0,
            current: None,
            sender,
            receiver,
            window: if streams { ring.clamp(2, 8) } else { 8 },
            stats: TrunkStats::default(),
        })
    }

    /// Counts since it was built.
    #[must_use]
    pub const fn stats(&self) -> TrunkStats {
        self.stats
    }

    /// The layer behind the last one of a pass.
    fn end(&self, head: bool) -> usize {
        if head { self.walk.len() } else { self.walk.len().saturating_sub(1) }
    }

    /// Whether the segments of a layer stay.
    fn keeps(&self, layer: usize) -> bool {
        self.keeps.get(layer).is_some_and(|&keeps| keeps)
    }

    /// The segments of a layer; none behind the last one.
    fn list(&mut self, layer: usize) -> Arc<[Segment]> {
        if let Some((_, list)) = self.lists.iter().find(|(l, _)| *l == layer) {
            return Arc::clone(list);
        }
        let list: Arc<[Segment]> = self.walk.cut(layer, self.slot).into();
        self.lists.push_front((layer, Arc::clone(&list)));
        while self.lists.len() > 2 && self.lists.iter().map(|(_, l)| l.len()).sum::<usize>() > LISTED {
            self.lists.pop_back();
        }
        list
    }

    /// The segment behind one.
    fn behind(&mut self, spot: Spot) -> Spot {
        if spot.segment + 1 < self.list(spot.layer).len() {
            Spot { segment: spot.segment + 1, ..spot }
        } else {
            Spot { layer: spot.layer + 1, segment: 0 }
        }
    }

    /// A pass begins. What was read ahead for it is used; what a broken-off pass left is dropped.
    ///
    /// # Errors
    /// Those of the reads.
    pub fn begin(&mut self, fetch: &Fetch, head: bool) -> Result<(), Error> {
        let start = Spot::default();
        let at_start = self.cursor == start && self.piece == 0 && self.asked.is_empty();
        let at_end = self.cursor == Spot { layer: self.end(self.head), segment: 0 } && self.piece == 0;
        if at_end && self.next_pass {
            self.next_pass = false;
        } else if !(at_start && !self.next_pass && self.next == start) {
            self.drain(fetch)?;
            (self.next, self.next_pass) = (start, false);
        }
        (self.cursor, self.piece, self.head) = (start, 0, head);
        self.pump(fetch)
    }

    /// Waits for everything on its way and frees it.
    fn drain(&mut self, fetch: &Fetch) -> Result<(), Error> {
        self.free.extend(self.current.take());
        for (spot, buffer) in std::mem::take(&mut self.arrived) {
            self.give_back(spot, buffer.ok());
            self.asked.pop_back();
        }
        // What is left are as many as are on their way, though not those by name.
        while !self.asked.is_empty() {
            let fetched = fetch.outlast(&self.receiver)?;
            self.give_back(Spot::of(fetched.tag), Some(fetched.buffer));
            self.asked.pop_back();
        }
        Ok(())
    }

    /// Frees a ring slot; the buffer of a segment that would have been kept goes back to the system.
    fn give_back(&mut self, spot: Spot, buffer: Option<AlignedBuf>) {
        if !self.keeps(spot.layer) {
            self.free.extend(buffer);
        }
    }

    /// Asks for the next segments while there is room for them.
    fn pump(&mut self, fetch: &Fetch) -> Result<(), Error> {
        loop {
            let end = self.end(self.head && !self.next_pass);
            if self.next.layer >= end {
                if self.next_pass || end == 0 {
                    return Ok(());
                }
                (self.next, self.next_pass) = (Spot::default(), true);
                continue;
            }
            let spot = self.next;
            let keeps = self.keeps(spot.layer);
            if keeps && (self.kept.contains_key(&spot) || self.asked.contains(&spot)) {
                self.next = self.behind(spot);
                continue;
            }
            let list = self.list(spot.layer);
            let segment = list.get(spot.segment).ok_or(Error::Order)?;
            let buffer = if keeps {
                if self.asked.len() >= self.window {
                    return Ok(());
                }
                AlignedBuf::zeroed(segment.bytes)?
            } else {
                let Some(buffer) = self.free.pop() else { return Ok(()) };
                buffer
            };
            fetch.submit_checked(&segment.reads, &segment.checks, buffer, spot.tag(), Priority::Prefetch, &self.sender);
            self.asked.push_back(spot);
            self.next = self.behind(spot);
        }
    }

    /// Makes the cursor's segment the current one.
    fn load(&mut self, fetch: &Fetch) -> Result<(), Error> {
        let spot = self.cursor;
        if self.current.is_some() || self.kept.contains_key(&spot) {
            return Ok(());
        }
        self.pump(fetch)?;
        if self.asked.front() != Some(&spot) {
            return Err(Error::Order);
        }
        let started = Instant::now();
        let index = loop {
            if let Some(i) = self.arrived.iter().position(|(s, _)| *s == spot) {
                break i;
            }
            let Fetched { tag, buffer, result } = fetch.wait(&self.receiver)?;
            let from = Spot::of(tag);
            match result {
                Ok(()) => self.arrived.push((from, Ok(buffer))),
                Err(error) => {
                    self.give_back(from, Some(buffer));
                    self.arrived.push((from, Err(error.into())));
                }
            }
        };
        self.stats.waited += started.elapsed();
        let (_, buffer) = self.arrived.swap_remove(index);
        self.asked.pop_front();
        let buffer = buffer?;
        if self.keeps(spot.layer) {
            self.kept.insert(spot, buffer);
        } else {
            self.current = Some(buffer);
        }
        Ok(())
    }

    /// Lends the pieces of `tensor`, which must be the next of the walk.
    fn lend(&mut self, fetch: &Fetch, tensor: Tensor, mut each: impl FnMut(&Piece, &[u8])) -> Result<(), Error> {
        let mut found = false;
        loop {
            let list = self.list(self.cursor.layer);
            let Some(segment) = list.get(self.cursor.segment) else { break };
            let piece = *segment.pieces.get(self.piece).ok_or(Error::Order)?;
            if piece.tensor != tensor {
                break;
            }
            if self.cursor.segment == 0 && self.piece == 0 && self.cursor.layer + 1 < self.walk.len() {
                self.stats.visits += 1;
                self.stats.hits += u64::from(self.keeps(self.cursor.layer));
            }
            found = true;
            fetch.check()?;
            self.load(fetch)?;
            let buffer = self.current.as_ref().or_else(|| self.kept.get(&self.cursor)).ok_or(Error::Order)?;
            let bytes = buffer.get(piece.at..piece.at + piece.len).ok_or(Error::Order)?;
            each(&piece, bytes);
            self.piece += 1;
            if self.piece == segment.pieces.len() {
                // The slot is free: the next read can start.
                (self.cursor, self.piece) = (self.behind(self.cursor), 0);
                self.free.extend(self.current.take());
                self.pump(fetch)?;
            }
        }
        if found { Ok(()) } else { Err(Error::Order) }
    }

    /// See [`k3_core::model::Weights::vector`].
    ///
    /// # Errors
    /// Those of the reads; [`Error::Order`] if the tensor is not the next of the walk.
    pub fn vector(&mut self, fetch: &Fetch, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.lend(fetch, tensor, |_, bytes| each(bytes))
    }

    /// See [`k3_core::model::Weights::matrix`].
    ///
    /// # Errors
    /// Those of the reads; [`Error::Order`] if the tensor is not the next of the walk.
    pub fn matrix(
        &mut self,
        fetch: &Fetch,
        tensor: Tensor,
        each: &mut dyn FnMut(usize, MatrixRows<'_>),
    ) -> Result<(), Error> {
        let (mut whole, mut fault) = (true, None);
        self.lend(fetch, tensor, |piece, bytes| match piece.form {
            Form::Raw => match Bf16Matrix::new(bytes, piece.rows, bytes.len() / 2 / piece.rows.max(1)) {
                Ok(block) => each(piece.first_row, block.into()),
                Err(_) => whole = false,
            },
            Form::Coded { cols } => match CodedMatrix::new(bytes, piece.rows, cols) {
                Ok(block) => each(piece.first_row, block.into()),
                Err(error) => fault = fault.or(Some(error)),
            },
        })?;
        match fault {
            Some(fault) => Err(self.walk.block_error(fault)),
            None if whole => Ok(()),
            None => Err(Error::Order),
        }
    }
}
