//! Routed experts: an arena of slots, some kept by a [`Policy`], the rest passing through.
//!
//! When a router has chosen, every expert that is missing is asked for at once, as far as there are
//! slots; the core multiplies whichever has landed, and each that has been used makes room for one
//! that still waits, unless the policy keeps it. An arena of one slot works; a larger one reads less.

use crate::aligned::AlignedBuf;
use crate::error::Error;
use crate::fetch::{Fetch, Fetched, Priority};
use crate::policy::{Directory, Policy, Verdict};
use crate::segment::{BLOCK, Form, Piece, Place, Segment, block};
use k3_core::checkpoint::{ExpertTensor, Tensor};
use k3_core::config::{MlpKind, ModelConfig};
use k3_core::view::{Expert, ExpertId, LayerIndex, Mxfp4Matrix};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// The six parts of an expert in the order in which they are stored.
pub const PARTS: [ExpertTensor; 6] = [
    ExpertTensor::W1Packed,
    ExpertTensor::W1Scale,
    ExpertTensor::W2Packed,
    ExpertTensor::W2Scale,
    ExpertTensor::W3Packed,
    ExpertTensor::W3Scale,
];

/// An expert of the model.
pub type Name = (LayerIndex, ExpertId);

/// What the arena did (all counts since it was built).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpertStats {
    /// Experts asked for.
    pub requests: u64,
    /// Of these, found in memory.
    pub hits: u64,
    /// Time spent waiting for a read that had not arrived.
    pub waited: Duration,
    /// Experts with NaN scale bytes (255), which count as 0, and how many they have.
    pub nan_scales: BTreeMap<Name, usize>,
}

#[derive(Debug)]
enum Content {
    Reading,
    Here(AlignedBuf),
}

impl Content {
    fn buffer(self) -> Option<AlignedBuf> {
        match self {
            Self::Reading => None,
            Self::Here(buffer) => Some(buffer),
        }
    }
}

#[derive(Debug)]
struct Slot {
    content: Content,
    /// Part of the request that is being served, and not served yet.
    wanted: bool,
}

/// Slots for experts.
#[derive(Debug)]
pub struct Arena {
    config: ModelConfig,
    slot_bytes: usize,
    capacity: usize,
    /// Mapped, and holding nothing.
    free: Vec<AlignedBuf>,
    mapped: usize,
    /// What is in memory or on its way: what the directory keeps, and what passes through.
    slots: HashMap<Name, Slot>,
    directory: Directory<Name>,
    /// Chosen, missing, and without a slot so far.
    waiting: VecDeque<Name>,
    in_flight: usize,
    sender: Sender<Fetched>,
    receiver: Receiver<Fetched>,
    stats: ExpertStats,
}

/// The reads and pieces of one expert; `place` says where a part lies.
pub fn segment(config: &ModelConfig, name: Name, place: impl Fn(Tensor) -> Place) -> Segment {
    let pieces = PARTS.into_iter().map(|part| {
        let tensor = Tensor::Expert(name.0, name.1, part);
        let len = usize::try_from(tensor.spec(config).bytes()).unwrap_or(usize::MAX);
        Piece { tensor, first_row: 0, rows: 1, place: place(tensor), len, at: 0, form: Form::Raw }
    });
    Segment::gather(pieces.collect())
}

/// Bytes of buffer that any expert of the model fits: the longest [`segment`].
#[must_use]
pub fn slot_bytes(config: &ModelConfig, place: impl Fn(Tensor) -> Place) -> usize {
    let moe = config.layers().filter(|&l| config.mlp_kind(l) == MlpKind::Moe);
    let names =
        moe.flat_map(|l| (0..config.num_experts).filter_map(move |e| Some((l, ExpertId(u16::try_from(e).ok()?)))));
    let sizes = PARTS.map(|part| Tensor::Expert(LayerIndex(0), ExpertId(0), part).spec(config).bytes());
    let whole = usize::try_from(sizes.iter().sum::<u64>()).unwrap_or(usize::MAX);
    let bytes = |name: Name| {
        // In the release the parts lie end to end, and 82,432 experts are looked at whenever a
        // checkpoint is opened: no lists are made for those.
        let first = place(Tensor::Expert(name.0, name.1, PARTS[0]));
        let mut next = first;
        let in_a_row = PARTS.into_iter().zip(sizes).all(|(part, size)| {
            let here = place(Tensor::Expert(name.0, name.1, part)) == next;
            next.offset += size;
            here
        });
        match usize::try_from(first.offset % BLOCK) {
            Ok(skip) if in_a_row => (skip + whole).next_multiple_of(block()),
            _ => segment(config, name, &place).bytes,
        }
    };
    names.map(bytes).max().unwrap_or(0)
}

/// Slots of an arena that keep nothing: what passes through needs slots too, a layer's choice or half of
/// a small arena. If every one of the `experts` there are has a slot, nothing passes through.
#[must_use]
pub fn transit(capacity: usize, experts: usize, chosen: usize) -> usize {
    if capacity >= experts { 0 } else { chosen.min(capacity.div_ceil(2)) }
}

impl Arena {
    /// An arena for at most `capacity` experts whose segments have at most `slot_bytes`. Memory is
    /// mapped slot by slot, when one is first needed.
    #[must_use]
    pub fn new(config: ModelConfig, capacity: usize, slot_bytes: usize, policy: Policy) -> Self {
        let (sender, receiver) = channel();
        let capacity = capacity.max(1);
        let experts = config.num_moe_layers() * config.num_experts;
        let transit = transit(capacity, experts, config.num_experts_per_token);
        Self {
            config,
            slot_bytes,
            capacity,
            free: Vec::new(),
            mapped: 0,
            slots: HashMap::new(),
            directory: Directory::new(policy, capacity - transit),
            waiting: VecDeque::new(),
            in_flight: 0,
            sender,
            receiver,
            stats: ExpertStats::default(),
        }
    }

    /// Counts since it was built.
    #[must_use]
    pub const fn stats(&self) -> &ExpertStats {
        &self.stats
    }

    /// Starts reading what is missing of `ids`.
    ///
    /// # Errors
    /// [`Error::Memory`] if a slot cannot be mapped.
    pub fn request(
        &mut self,
        fetch: &Fetch,
        layer: LayerIndex,
        ids: &[ExpertId],
        place: &impl Fn(Tensor) -> Place,
    ) -> Result<(), Error> {
        // A broken-off pass may have left wishes behind, and what they brought.
        self.waiting.clear();
        self.slots.values_mut().for_each(|s| s.wanted = false);
        self.sweep();
        for &id in ids {
            let name = (layer, id);
            self.stats.requests += 1;
            self.directory.request(name);
            match self.slots.get_mut(&name) {
                Some(slot) => {
                    slot.wanted = true;
                    self.stats.hits += u64::from(matches!(slot.content, Content::Here(_)));
                }
                None => self.waiting.push_back(name),
            }
        }
        self.pump(fetch, place)
    }

    /// A pass over the layers begins.
    pub fn begin(&mut self) {
        self.directory.pass();
    }

    /// Frees what is here, not wanted and not kept.
    fn sweep(&mut self) {
        let Self { slots, directory, free, .. } = self;
        let stray = slots.extract_if(|&name, slot| {
            !slot.wanted && matches!(slot.content, Content::Here(_)) && !directory.contains(name)
        });
        free.extend(stray.filter_map(|(_, slot)| slot.content.buffer()));
    }

    /// Gives slots to those that wait.
    fn pump(&mut self, fetch: &Fetch, place: &impl Fn(Tensor) -> Place) -> Result<(), Error> {
        while let Some(&name) = self.waiting.front() {
            let buffer = match self.free.pop() {
                Some(buffer) => buffer,
                None if self.mapped < self.capacity => {
                    let buffer = AlignedBuf::zeroed(self.slot_bytes)?;
                    self.mapped += 1;
                    buffer
                }
                None => return Ok(()),
            };
            let segment = segment(&self.config, name, place);
            let tag = u64::from(name.0.0) << 16 | u64::from(name.1.0);
            fetch.submit(&segment.reads, buffer, tag, Priority::Urgent, &self.sender);
            self.slots.insert(name, Slot { content: Content::Reading, wanted: true });
            self.in_flight += 1;
            self.waiting.pop_front();
        }
        Ok(())
    }

    /// An expert has been served: it stays, or its slot is free again.
    fn settle(&mut self, name: Name) {
        let Self { slots, directory, free, .. } = self;
        let leaves = match directory.admit(name, |n| slots.get(&n).is_some_and(|s| s.wanted)) {
            Verdict::Keep => return,
            Verdict::Replace(victim) => victim,
            Verdict::Pass => name,
        };
        free.extend(slots.remove(&leaves).and_then(|slot| slot.content.buffer()));
    }

    /// Lends each of `ids`, which were requested last, once.
    ///
    /// # Errors
    /// Those of the reads.
    pub fn serve(
        &mut self,
        fetch: &Fetch,
        layer: LayerIndex,
        ids: &[ExpertId],
        place: &impl Fn(Tensor) -> Place,
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), Error> {
        let mut todo: VecDeque<ExpertId> = ids.iter().copied().collect();
        while !todo.is_empty() {
            fetch.check()?;
            let ready = todo.iter().position(|&id| {
                self.slots.get(&(layer, id)).is_some_and(|s| s.wanted && matches!(s.content, Content::Here(_)))
            });
            let Some(ready) = ready else {
                self.receive(fetch, place)?;
                self.pump(fetch, place)?;
                continue;
            };
            let Some(id) = todo.remove(ready) else { return Err(Error::Order) };
            let name = (layer, id);
            let index = ids.binary_search(&id).map_err(|_| Error::Order)?;
            let segment = segment(&self.config, name, place);
            let slot = self.slots.get_mut(&name).ok_or(Error::Order)?;
            slot.wanted = false;
            if let Content::Here(buffer) = &slot.content {
                each(index, view(&self.config, &segment, buffer).ok_or(Error::Order)?);
            }
            self.settle(name);
            self.pump(fetch, place)?;
        }
        Ok(())
    }

    /// Waits for one read.
    fn receive(&mut self, fetch: &Fetch, place: &impl Fn(Tensor) -> Place) -> Result<(), Error> {
        if self.in_flight == 0 {
            return Err(Error::Order);
        }
        let started = Instant::now();
        let fetched = fetch.wait(&self.receiver)?;
        self.stats.waited += started.elapsed();
        self.in_flight -= 1;
        let layer = LayerIndex(u16::try_from(fetched.tag >> 16).unwrap_or(u16::MAX));
        let name = (layer, ExpertId(u16::try_from(fetched.tag & 0xffff).unwrap_or(u16::MAX)));
        if let Err(error) = fetched.result {
            self.slots.remove(&name);
            self.free.push(fetched.buffer);
            return Err(error.into());
        }
        // Scales are 1/17 of the bytes; a NaN among them silences 32 weights and must not be silent.
        let segment = segment(&self.config, name, place);
        if let Some(e) = view(&self.config, &segment, &fetched.buffer) {
            let nan = [e.w1, e.w2, e.w3].iter().map(Mxfp4Matrix::nan_scales).sum();
            if nan > 0 {
                self.stats.nan_scales.insert(name, nan);
            }
        }
        match self.slots.get_mut(&name) {
            Some(slot) if slot.wanted || self.directory.contains(name) => {
                slot.content = Content::Here(fetched.buffer);
            }
            // The wish of a pass that was stopped: its slot is needed.
            _ => {
                self.slots.remove(&name);
                self.free.push(fetched.buffer);
            }
        }
        Ok(())
    }
}

/// The three matrices in a filled buffer.
fn view<'b>(config: &ModelConfig, segment: &Segment, buffer: &'b [u8]) -> Option<Expert<'b>> {
    let part = |i: usize| segment.pieces.get(i).and_then(|p| buffer.get(p.at..p.at + p.len));
    let (inner, latent) = (config.moe_intermediate_size, config.routed_expert_hidden_size);
    Some(Expert {
        w1: Mxfp4Matrix::new(part(0)?, part(1)?, inner, latent).ok()?,
        w2: Mxfp4Matrix::new(part(2)?, part(3)?, latent, inner).ok()?,
        w3: Mxfp4Matrix::new(part(4)?, part(5)?, inner, latent).ok()?,
    })
}
