//! The engine: owns every buffer, and is the only implementor of the core's [`Weights`].

use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::exec::Rayon;
use crate::experts::{Arena, ExpertStats};
use crate::fetch::{Fetch, Fetched, Priority};
use crate::plan::Plan;
use crate::segment::Form;
use crate::trunk::{Trunk, TrunkStats};
use k3_core::backend::Backend;
use k3_core::checkpoint::Tensor;
use k3_core::coded::CodedMatrix;
use k3_core::model::{Journal, Model, Observer, Sequence, State, StateParts, Weights, Workspace};
use k3_core::view::{Expert, ExpertId, LayerIndex, MatrixRows, TokenId};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What a run did, in numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Stats {
    /// Bytes that came from files.
    pub bytes_read: u64,
    /// The trunk's counts.
    pub trunk: TrunkStats,
    /// The experts' counts.
    pub experts: ExpertStats,
    /// Time spent waiting for rows of the embedding.
    pub rows_waited: Duration,
    /// Time spent in passes, waiting included.
    pub in_passes: Duration,
    /// Time the disk had something to do.
    pub disk_busy: Duration,
}

impl Stats {
    /// Share of layer visits served by pinned layers; `None` before the first. The one-time load
    /// of the pinned layers counts as served: it is a cost of starting, not of a token.
    #[must_use]
    pub fn trunk_hit_rate(&self) -> Option<f64> {
        ratio(self.trunk.hits, self.trunk.visits)
    }

    /// Share of expert requests served by the arena; `None` before the first.
    #[must_use]
    pub fn expert_hit_rate(&self) -> Option<f64> {
        ratio(self.experts.hits, self.experts.requests)
    }

    /// Time the computation stood still for the disk.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.trunk.waited + self.experts.waited + self.rows_waited
    }

    /// Time the computation went on.
    #[must_use]
    pub fn computed(&self) -> Duration {
        self.in_passes.saturating_sub(self.waited())
    }

    /// The overlap: share of the disk's busy time in which the computation went on, which is what
    /// reading ahead has saved. `None` if nothing was read.
    #[must_use]
    pub fn overlap(&self) -> Option<f64> {
        let busy = self.disk_busy.as_secs_f64();
        (busy > 0.0).then(|| (1.0 - self.waited().as_secs_f64() / busy).max(0.0))
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts for people")]
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// A checkpoint ready to run within a plan: one sequence, or several at the same time
/// ([`Plan::sequences`]). Where no number is asked for, it is the first that is meant.
#[derive(Debug)]
pub struct Engine {
    storage: Storage,
    plan: Plan,
    backend: Backend,
    exec: Rayon,
    sequences: Vec<Memory>,
    workspace: AlignedBuf,
    journal: AlignedBuf,
    /// First position and length of the pass on trial that the journal holds.
    trial: Option<(usize, usize)>,
    in_passes: Duration,
}

/// What one sequence remembers: see [`State`].
#[derive(Debug)]
struct Memory {
    lines: AlignedBuf,
    position: usize,
    torn: bool,
}

/// What one sequence reads in a pass of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Its number, below [`Plan::sequences`].
    pub sequence: usize,
    /// Ids it reads.
    pub positions: usize,
    /// For how many of them, the last ones, it wants logits.
    pub wanted: usize,
}

/// Where the weights are: everything behind [`Weights`].
#[derive(Debug)]
struct Storage {
    checkpoint: Checkpoint,
    fetch: Fetch,
    trunk: Trunk,
    arena: Arena,
    /// Buffers for rows of the embedding, at most one for each reader.
    rows: Vec<AlignedBuf>,
    rows_out: usize,
    rows_waited: Duration,
    readers: usize,
    /// A row of the embedding, decoded.
    row: Vec<u8>,
    /// A number for each row that was ever asked for: an answer to a pass that was stopped must not
    /// be taken for another's.
    row_tag: u64,
    row_sender: Sender<Fetched>,
    row_receiver: Receiver<Fetched>,
}

impl Engine {
    /// Maps what the plan says, and finds out whether the system will give the rest when it is needed. Nothing
    /// is read before the first pass. Setting `stop` stops the
    /// running pass, or the next one, with [`Error::Stopped`].
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::Threads`] if the system refuses what the plan had counted.
    pub fn new(checkpoint: Checkpoint, plan: Plan, backend: Backend, stop: Arc<AtomicBool>) -> Result<Self, Error> {
        let config = *checkpoint.config();
        let exec = Rayon::new(plan.extent.width).map_err(|e| Error::Threads(std::io::Error::other(e)))?;
        let fetch = Fetch::new(checkpoint.files(), plan.readers, stop)?;
        let trunk = Trunk::new(checkpoint.walk(), plan.slot, plan.ring, plan.keeps.clone())?;
        let arena = Arena::new(config, plan.arena, checkpoint.expert_bytes(), plan.policy);
        // The plan was made from the same two numbers, and did not overflow.
        let lines = |n: Option<usize>| AlignedBuf::zeroed_lines(n.unwrap_or(usize::MAX / 128));
        let memory = |_| {
            let lines = lines(State::lines(&config, plan.extent.context))?;
            Ok(Memory { lines, position: 0, torn: false })
        };
        let sequences = (0..plan.sequences).map(memory).collect::<Result<_, Error>>()?;
        let journal = lines(if plan.speculate > 0 { Journal::lines(&config, plan.speculate + 1) } else { Some(0) })?;
        let workspace = lines(Workspace::lines(&config, plan.extent))?;
        // That there is room for what is mapped later is found out now, and not an hour into a run. Nothing of
        // it is touched.
        drop(AlignedBuf::zeroed(usize::try_from(plan.mapped_later).unwrap_or(usize::MAX))?);
        let (row_sender, row_receiver) = channel();
        let storage = Storage {
            checkpoint,
            fetch,
            trunk,
            arena,
            rows: Vec::new(),
            rows_out: 0,
            rows_waited: Duration::ZERO,
            readers: plan.readers.max(1),
            row: Vec::new(),
            row_tag: 0,
            row_sender,
            row_receiver,
        };
        Ok(Self { storage, plan, backend, exec, sequences, workspace, journal, trial: None, in_passes: Duration::ZERO })
    }

    /// The checkpoint.
    #[must_use]
    pub const fn checkpoint(&self) -> &Checkpoint {
        &self.storage.checkpoint
    }

    /// The plan it was built for.
    #[must_use]
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels it computes with.
    #[must_use]
    pub const fn backend(&self) -> Backend {
        self.backend
    }

    /// Positions seen so far.
    #[must_use]
    pub fn position(&self) -> usize {
        self.sequences.first().map_or(0, |m| m.position)
    }

    /// Whether a pass stopped half-way, so that the sequence can only be [`Engine::reset`].
    #[must_use]
    pub fn is_torn(&self) -> bool {
        self.sequences.first().is_some_and(|m| m.torn)
    }

    /// What is remembered of the sequence.
    ///
    /// # Errors
    /// [`Error::Order`] cannot happen while the plan holds; it is passed on if it does.
    pub fn state(&mut self) -> Result<State<'_>, Error> {
        let (config, context) = (self.storage.checkpoint.config(), self.plan.extent.context);
        let Memory { lines, position, torn } = self.sequences.first_mut().ok_or(Error::Order)?;
        State::attach(lines.lines_mut(), config, context, *position, *torn).map_err(|_| Error::Order)
    }

    /// Puts another sequence in place of this one, at `position`: `fill` writes what it remembers. If that
    /// fails the sequence is empty.
    ///
    /// # Errors
    /// Those of `fill`, and [`Error::Order`] if `position` is beyond the plan's context.
    pub fn restore<E: From<Error>>(
        &mut self,
        position: usize,
        fill: impl FnOnce(StateParts<&mut [f32]>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.reset()?;
        if position > self.plan.extent.context {
            return Err(Error::Order.into());
        }
        if let Err(error) = fill(self.state()?.parts_mut()) {
            self.reset()?;
            return Err(error);
        }
        self.sequences.first_mut().ok_or(Error::Order)?.position = position;
        Ok(())
    }

    /// Forgets the sequence, not the weights that are in memory.
    ///
    /// # Errors
    /// [`Error::Memory`] cannot happen while the plan holds; it is passed on if it does.
    pub fn reset(&mut self) -> Result<(), Error> {
        self.reset_sequence(0)
    }

    /// Forgets one of several sequences.
    ///
    /// # Errors
    /// [`Error::Order`] if there is none of this number.
    pub fn reset_sequence(&mut self, sequence: usize) -> Result<(), Error> {
        let config = *self.storage.checkpoint.config();
        let memory = self.sequences.get_mut(sequence).ok_or(Error::Order)?;
        State::new(memory.lines.lines_mut(), &config, self.plan.extent.context).map_err(|_| Error::Order)?;
        (memory.position, memory.torn) = (0, false);
        // What was run on trial was of a sequence that is forgotten.
        self.trial = None;
        Ok(())
    }

    /// Runs `ids`, at most a chunk of them, after the positions seen so far. `logits`: `[m,
    /// vocab_size]` for the last `m` positions; see [`Model::forward`].
    ///
    /// # Errors
    /// [`Error`]; after one that is not a refusal the sequence must be [`Engine::reset`].
    pub fn step(
        &mut self,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut (impl Observer + Send),
    ) -> Result<(), Error> {
        let wanted = logits.len() / self.storage.checkpoint.config().vocab_size;
        let share = Share { sequence: 0, positions: ids.len(), wanted };
        self.step_many(&[share], ids, logits, observer)
    }

    /// Runs the next ids of several sequences in one pass; see [`Model::forward_many`]. The numbers of
    /// `shares` rise.
    ///
    /// # Errors
    /// As [`Engine::step`], for all of the sequences. [`Error::Order`] if a number does not rise, or is of
    /// no sequence.
    pub fn step_many(
        &mut self,
        shares: &[Share],
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut (impl Observer + Send),
    ) -> Result<(), Error> {
        self.trial = None;
        let config = *self.storage.checkpoint.config();
        let context = self.plan.extent.context;
        let mut memories = Vec::with_capacity(shares.len());
        let mut rest = self.sequences.iter_mut().enumerate();
        for share in shares {
            let (_, memory) = rest.find(|(number, _)| *number == share.sequence).ok_or(Error::Order)?;
            memories.push(memory);
        }
        let mut states = Vec::with_capacity(shares.len());
        let mut outcomes = Vec::with_capacity(shares.len());
        for Memory { lines, position, torn } in memories {
            let state = State::attach(lines.lines_mut(), &config, context, *position, *torn);
            states.push(state.map_err(|_| Error::Order)?);
            outcomes.push((position, torn));
        }
        let mut sequences: Vec<_> = states
            .iter_mut()
            .zip(shares)
            .map(|(state, s)| Sequence { state, journal: None, positions: s.positions, wanted: s.wanted })
            .collect();
        let mut workspace =
            Workspace::new(self.workspace.lines_mut(), &config, self.plan.extent).map_err(|_| Error::Order)?;
        let model = Model { config: &config, backend: self.backend, exec: &self.exec };
        let started = Instant::now();
        let pass = || model.forward_many(&mut self.storage, &mut sequences, &mut workspace, ids, logits, observer);
        let result = self.exec.enter(pass);
        self.in_passes += started.elapsed();
        // What a pass has read is one checkpoint only if nobody wrote to it meanwhile.
        let unchanged = if result.is_ok() { self.storage.fetch.unchanged() } else { Ok(()) };
        for (state, (position, torn)) in states.iter().zip(outcomes) {
            (*position, *torn) = (state.position(), state.is_torn() || unchanged.is_err());
        }
        result?;
        unchanged
    }

    /// Runs `ids` on trial, at most [`Plan::speculate`] and one: the sequence stays where it is until
    /// [`Engine::commit`] says how many of them it is to have seen. See [`Model::verify`].
    ///
    /// # Errors
    /// [`Error`]; the sequence is as before, whatever happens.
    pub fn verify(
        &mut self,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut (impl Observer + Send),
    ) -> Result<(), Error> {
        self.trial = None;
        let config = *self.storage.checkpoint.config();
        let memory = self.sequences.first_mut().ok_or(Error::Order)?;
        let start = memory.position;
        let mut state = State::attach(memory.lines.lines_mut(), &config, self.plan.extent.context, start, memory.torn)
            .map_err(|_| Error::Order)?;
        let mut journal =
            Journal::new(self.journal.lines_mut(), &config, self.plan.speculate + 1).map_err(|_| Error::Order)?;
        let mut workspace =
            Workspace::new(self.workspace.lines_mut(), &config, self.plan.extent).map_err(|_| Error::Order)?;
        let model = Model { config: &config, backend: self.backend, exec: &self.exec };
        let started = Instant::now();
        let pass = || model.verify(&mut self.storage, &mut state, &mut journal, &mut workspace, ids, logits, observer);
        let result = self.exec.enter(pass);
        self.in_passes += started.elapsed();
        result?;
        self.storage.fetch.unchanged()?;
        self.trial = Some((start, ids.len()));
        Ok(())
    }

    /// Moves the sequence on by the first `accepted` ids that were run on trial last; the others leave no
    /// trace.
    ///
    /// # Errors
    /// [`Error::Order`] if these were fewer, or the sequence has moved since.
    pub fn commit(&mut self, accepted: usize) -> Result<(), Error> {
        let trial = self.trial.take().ok_or(Error::Order)?;
        let config = *self.storage.checkpoint.config();
        let memory = self.sequences.first_mut().ok_or(Error::Order)?;
        let (position, torn) = (memory.position, memory.torn);
        let mut state = State::attach(memory.lines.lines_mut(), &config, self.plan.extent.context, position, torn)
            .map_err(|_| Error::Order)?;
        let mut journal = Journal::attach(self.journal.lines_mut(), &config, self.plan.speculate + 1, trial)
            .map_err(|_| Error::Order)?;
        let mut workspace =
            Workspace::new(self.workspace.lines_mut(), &config, self.plan.extent).map_err(|_| Error::Order)?;
        let model = Model { config: &config, backend: self.backend, exec: &self.exec };
        if !model.commit(&mut state, &mut journal, &mut workspace, accepted) {
            return Err(Error::Order);
        }
        memory.position = state.position();
        Ok(())
    }

    /// Bytes that came from files so far: of the [`Engine::stats`], what is cheap to ask for.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.storage.fetch.bytes_read()
    }

    /// What was done so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Storage { fetch, trunk, arena, .. } = &self.storage;
        Stats {
            bytes_read: fetch.bytes_read(),
            trunk: trunk.stats(),
            experts: arena.stats().clone(),
            rows_waited: self.storage.rows_waited,
            in_passes: self.in_passes,
            disk_busy: fetch.busy(),
        }
    }
}

impl Storage {
    /// Lends a row of the embedding out of the segment that was read for it.
    fn lend_row(&mut self, id: TokenId, buffer: &AlignedBuf, each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        let row_bytes = self.checkpoint.config().hidden_size * 2;
        let segment = self.checkpoint.embedding_row(id);
        let piece = *segment.pieces.first().ok_or(Error::Order)?;
        let bytes = buffer.get(piece.at..piece.at + piece.len).ok_or(Error::Order)?;
        let r = id.get() - piece.first_row;
        match piece.form {
            Form::Raw => each(bytes.get(r * row_bytes..(r + 1) * row_bytes).ok_or(Error::Order)?),
            Form::Coded { cols } => {
                let block = CodedMatrix::new(bytes, piece.rows, cols);
                let block = block.map_err(|e| self.checkpoint.walk().block_error(e))?;
                self.row.resize(row_bytes, 0);
                block.decode_row(r, &mut self.row);
                each(&self.row);
            }
        }
        Ok(())
    }
}

impl Weights for Storage {
    type Error = Error;

    fn begin(&mut self, head: bool) -> Result<(), Error> {
        self.arena.begin();
        self.trunk.begin(&self.fetch, head)
    }

    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), Error> {
        // Rows of 14 KB from anywhere in 2.35 GB, or segments of a pack: as many at a time as there are
        // readers.
        let base = self.row_tag;
        self.row_tag += ids.len() as u64;
        let (mut next, mut done) = (0, 0);
        while done < ids.len() {
            while let Some(&id) = ids.get(next)
                && self.rows_out < self.readers
            {
                let segment = self.checkpoint.embedding_row(id);
                let buffer = match self.rows.pop().filter(|b| b.len() >= segment.bytes) {
                    Some(buffer) => buffer,
                    None => AlignedBuf::zeroed(segment.bytes.next_multiple_of(4096) + 4096)?,
                };
                let (reads, checks, tag) = (&segment.reads, &segment.checks, base + next as u64);
                self.fetch.submit_checked(reads, checks, buffer, tag, Priority::Urgent, &self.row_sender);
                self.rows_out += 1;
                next += 1;
            }
            let started = Instant::now();
            let fetched = self.fetch.wait(&self.row_receiver)?;
            self.rows_waited += started.elapsed();
            self.rows_out -= 1;
            // One that a stopped pass has asked for is of no use.
            let index = fetched.tag.checked_sub(base).and_then(|i| usize::try_from(i).ok());
            if let Some((i, &id)) = index.and_then(|i| Some((i, ids.get(i)?))) {
                fetched.result?;
                self.lend_row(id, &fetched.buffer, &mut |row| each(i, row))?;
                done += 1;
            }
            self.rows.push(fetched.buffer);
        }
        Ok(())
    }

    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Error> {
        self.trunk.vector(&self.fetch, tensor, each)
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), Error> {
        self.trunk.matrix(&self.fetch, tensor, each)
    }

    fn request_experts(&mut self, layer: LayerIndex, ids: &[ExpertId]) -> Result<(), Error> {
        let Self { checkpoint, fetch, arena, .. } = self;
        arena.request(fetch, layer, ids, &|t| checkpoint.index().place(t, checkpoint.config()))
    }

    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), Error> {
        let Self { checkpoint, fetch, arena, .. } = self;
        arena.serve(fetch, layer, ids, &|t| checkpoint.index().place(t, checkpoint.config()), each)
    }
}
