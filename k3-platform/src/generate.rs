//! The loop from a prompt to its continuation: the prompt in chunks, then one id after the other.
//!
//! A sequence is a list of ids of which the engine has read the first [`Engine::position`]. Generating
//! reads the rest, picks an id, appends it, and goes on until there is a reason not to:
//!
//! ```text
//! ids   [ read by the engine ............ | not read yet ... ]
//! loop: read what is not; pick an id from the last logits; append it; tell the listener
//! ```
//!
//! If the plan has room for guesses ([`Plan::speculate`]), what is likely to follow is read in the same
//! pass as the last id, and taken as far as it turns out to be what is picked: see [`crate::draft`].
//! The text is the same with and without.
//!
//! So the next turn of a dialogue, or a session that was loaded, is more ids appended to the same list.
//!
//! Who picks is a [`Pick`]; who watches, prints and may end it is a [`Listener`].

#[cfg(doc)]
use crate::plan::Plan;

use crate::draft::{Gate, Guesses, guess};
use crate::engine::Engine;
use crate::error::Error;
use k3_core::model::Observer;
use k3_core::ops::sample::argmax;
use k3_core::view::TokenId;
use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

/// Chooses ids.
pub trait Pick {
    /// The id at `position` of the sequence, from all the ids before it and the logits
    /// (`[vocab_size]`, all finite) after the last of them.
    ///
    /// The answer depends on the arguments and on what the picker was made with, and on nothing else:
    /// not on what it was asked before. A position may be asked for more than once, or not at all.
    ///
    /// # Errors
    /// [`Error::Order`] if there is nothing to choose from.
    fn pick(&mut self, position: usize, history: &[TokenId], logits: &[f32]) -> Result<TokenId, Error>;
}

/// The largest logit; the lowest id among equals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Greedy;

impl Pick for Greedy {
    fn pick(&mut self, _: usize, _: &[TokenId], logits: &[f32]) -> Result<TokenId, Error> {
        // The pass has refused logits that are not finite; this is the same refusal once more.
        argmax(logits).ok().flatten().ok_or(Error::Order)
    }
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// It has the tokens that were asked for.
    Length,
    /// An id came that ends a text.
    Stop,
    /// The context is full.
    Context,
    /// The stop flag was set.
    Cancelled,
}

impl Finish {
    /// Its name in JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Length => "length",
            Self::Stop => "stop",
            Self::Context => "context",
            Self::Cancelled => "cancelled",
        }
    }
}

/// What the pass that begins is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// It reads the prompt's ids up to `done` of `of`.
    Prompt {
        /// Ids read when the pass is over.
        done: usize,
        /// Ids of the prompt.
        of: usize,
    },
    /// It is for the generated token after `generated` others.
    Token {
        /// Tokens generated so far.
        generated: usize,
    },
}

/// Watches a text come into being.
pub trait Listener: Observer + Send {
    /// Why it gives up.
    type Error: From<Error>;

    /// A pass begins.
    fn begin(&mut self, stage: Stage) {
        let _ = stage;
    }

    /// A pass is over. `logits`: `[m, vocab_size]` of its last `m` positions, of which one that was
    /// only guessed is none.
    ///
    /// # Errors
    /// The listener's own, which ends the text.
    fn passed(&mut self, stage: Stage, logits: &[f32]) -> Result<(), Self::Error> {
        let _ = (stage, logits);
        Ok(())
    }

    /// A pass is settled: the engine has read all ids up to [`Engine::position`], and each of them is of the
    /// sequence. `Break` ends the text here, with nothing lost.
    ///
    /// # Errors
    /// The listener's own, which ends the text.
    fn settled(&mut self, engine: &mut Engine) -> Result<ControlFlow<Finish>, Self::Error> {
        let _ = engine;
        Ok(ControlFlow::Continue(()))
    }

    /// An id was generated. `Break` ends the text with the reason it gives.
    ///
    /// # Errors
    /// The listener's own, which ends the text.
    fn token(&mut self, id: TokenId) -> Result<ControlFlow<Finish>, Self::Error>;
}

/// What is asked for.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Positions the sequence may have. At most the plan's context.
    pub context: usize,
    /// Whether an id ends the text. Such an id is not part of it.
    pub stops: &'a dyn Fn(TokenId) -> bool,
    /// Whether the logits of all positions of the prompt are computed, for [`Listener::passed`]. The
    /// plan must have room for them.
    pub prompt_logits: bool,
    /// Whether what was read stays read. If not, all ids are read again for each token.
    pub incremental: bool,
}

impl std::fmt::Debug for Wanted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wanted")
            .field("max_tokens", &self.max_tokens)
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Why the text ended.
    pub finish: Finish,
    /// The id that ended it, if one did. It was not appended to the sequence.
    pub stop: Option<TokenId>,
    /// Ids of the prompt: those that had not been read at the beginning.
    pub prompt: usize,
    /// Tokens generated, which are the last of the sequence.
    pub generated: usize,
    /// Wall time until the prompt was read.
    pub prefill: Duration,
    /// Wall time of the tokens after the first.
    pub decode: Duration,
    /// Picks that were made in that time, one that ended the text included.
    pub decoded: u32,
    /// Bytes that came from files in that time. Reads go ahead of what computes, so a few of them may be
    /// for the token that comes next.
    pub decode_read: u64,
    /// What came of guesses, since the generator was made.
    pub guesses: Guesses,
}

impl Outcome {
    /// Seconds of a decoded token; `None` if there was none after the first.
    #[must_use]
    pub fn per_token(&self) -> Option<f64> {
        (self.decoded > 0).then(|| self.decode.as_secs_f64() / f64::from(self.decoded))
    }

    /// Bytes read for a decoded token; `None` if there was none after the first.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a mean for people")]
    pub fn read_per_token(&self) -> Option<f64> {
        (self.decoded > 0).then(|| self.decode_read as f64 / f64::from(self.decoded))
    }
}

/// Generates texts with an engine. What it holds is the logits that the plan has counted.
#[derive(Debug)]
pub struct Generator {
    logits: Vec<f32>,
    gate: Gate,
    /// The guess of the pass at hand.
    guess: Vec<TokenId>,
}

impl Generator {
    /// For texts of this engine.
    #[must_use]
    pub fn new(engine: &Engine) -> Self {
        let logits = vec![0.0; engine.checkpoint().config().vocab_size * engine.plan().logit_rows];
        Self { logits, gate: Gate::new(engine.plan().speculate), guess: Vec::new() }
    }

    /// Continues `ids`, of which the engine has read the first [`Engine::position`], and appends what
    /// it generates. Afterwards the engine has again read the first [`Engine::position`] of them: all
    /// but the last, as a rule, and all if the text ended before an id was picked or by an id that was
    /// not appended. If it was cancelled or failed, the engine may have to be reset:
    /// [`Engine::is_torn`].
    ///
    /// # Errors
    /// Those of the passes, of the picker and of the listener. [`Error::Order`] if there is nothing to
    /// read.
    pub fn generate<L: Listener>(
        &mut self,
        engine: &mut Engine,
        ids: &mut Vec<TokenId>,
        wanted: &Wanted<'_>,
        picker: &mut impl Pick,
        listener: &mut L,
    ) -> Result<Outcome, L::Error> {
        let vocab = engine.checkpoint().config().vocab_size;
        let begun = ids.len();
        let mut outcome = Outcome {
            finish: Finish::Length,
            stop: None,
            prompt: begun.saturating_sub(engine.position()),
            generated: 0,
            prefill: Duration::ZERO,
            decode: Duration::ZERO,
            decoded: 0,
            decode_read: 0,
            guesses: self.gate.guesses(),
        };
        let mut read_before = 0;
        loop {
            let started = Instant::now();
            let first = ids.len() == begun;
            if !wanted.incremental {
                engine.reset()?;
            }
            // The last row that is computed is that of the last token that is wanted.
            let room =
                (wanted.max_tokens - outcome.generated).min(wanted.context - engine.position().min(wanted.context));
            let most = if first || !wanted.incremental { 0 } else { self.gate.length().min(room.saturating_sub(1)) };
            guess(ids, most, &mut self.guess);
            let stage = Stage::Token { generated: outcome.generated };
            let rows = if self.guess.is_empty() {
                self.read(engine, ids, first.then_some(outcome.prompt), stage, wanted, listener)?
            } else {
                self.read_with_guess(engine, ids, stage, listener)?
            };
            let rows = match rows {
                ControlFlow::Continue(rows) => rows,
                ControlFlow::Break(finish) => {
                    outcome.finish = finish;
                    return Ok(outcome);
                }
            };
            if first {
                outcome.prefill = started.elapsed();
                read_before = engine.bytes_read();
            }
            if wanted.max_tokens == 0 {
                return Ok(outcome);
            }

            // An id for each row, while what is picked is what was guessed to come next.
            let before = ids.len();
            for (i, logits) in self.logits[rows.start * vocab..rows.end * vocab].chunks_exact(vocab).enumerate() {
                let id = match picker.pick(ids.len(), ids, logits) {
                    Ok(id) => id,
                    Err(error) => {
                        ids.truncate(before);
                        return Err(error.into());
                    }
                };
                if (wanted.stops)(id) {
                    outcome.stop = Some(id);
                    break;
                }
                ids.push(id);
                if self.guess.get(i) != Some(&id) {
                    break;
                }
            }
            let mut taken = ids.len() - before + usize::from(outcome.stop.is_some());
            if !self.guess.is_empty() {
                listener.passed(stage, &self.logits[..taken * vocab])?;
            }
            let took = started.elapsed();
            let mut end = outcome.stop.map(|_| Finish::Stop);
            for i in before..ids.len() {
                outcome.generated += 1;
                if let ControlFlow::Break(finish) = listener.token(ids[i])? {
                    ids.truncate(i + 1);
                    (taken, end, outcome.stop) = (i + 1 - before, Some(finish), None);
                    break;
                }
            }
            let committing = Instant::now();
            if !self.guess.is_empty() {
                engine.commit(taken)?;
                if let ControlFlow::Break(finish) = listener.settled(engine)? {
                    end.get_or_insert(finish);
                }
            }
            if !first {
                let took = took + committing.elapsed();
                outcome.decode += took;
                outcome.decode_read = engine.bytes_read() - read_before;
                outcome.decoded += u32::try_from(taken).unwrap_or(u32::MAX);
                match self.guess.len() {
                    0 => self.gate.plain(took),
                    drafted => self.gate.tried(drafted, taken - 1, taken, took),
                }
                outcome.guesses = self.gate.guesses();
            }
            if end.is_none() && outcome.generated < wanted.max_tokens && ids.len() > wanted.context {
                end = Some(Finish::Context);
            }
            if let Some(finish) = end.or((outcome.generated == wanted.max_tokens).then_some(Finish::Length)) {
                outcome.finish = finish;
                return Ok(outcome);
            }
        }
    }

    /// Reads what the engine has not read of `ids`. `prompt`: how many these are, if they are the
    /// prompt. Gives the row of the last id's logits, or why it was stopped.
    fn read<L: Listener>(
        &mut self,
        engine: &mut Engine,
        ids: &[TokenId],
        prompt: Option<usize>,
        token: Stage,
        wanted: &Wanted<'_>,
        listener: &mut L,
    ) -> Result<ControlFlow<Finish, Range<usize>>, L::Error> {
        let (vocab, chunk) = (engine.checkpoint().config().vocab_size, engine.plan().extent.chunk);
        let unread = ids.get(engine.position()..).filter(|unread| !unread.is_empty()).ok_or(Error::Order)?;
        let (mut done, mut rows) = (0, 0);
        for part in unread.chunks(chunk) {
            done += part.len();
            let stage = prompt.map_or(token, |of| Stage::Prompt { done, of });
            rows =
                if prompt.is_some() && wanted.prompt_logits { part.len() } else { usize::from(done == unread.len()) };
            listener.begin(stage);
            let logits = self.logits.get_mut(..rows * vocab).ok_or(Error::Order)?;
            match engine.step(part, logits, listener) {
                Err(Error::Stopped) => return Ok(ControlFlow::Break(Finish::Cancelled)),
                other => other?,
            }
            listener.passed(stage, logits)?;
            if let ControlFlow::Break(finish) = listener.settled(engine)? {
                return Ok(ControlFlow::Break(finish));
            }
        }
        Ok(ControlFlow::Continue(rows - 1..rows))
    }

    /// Reads the last id and the guess, on trial. Gives the rows of their logits, or why it was
    /// stopped.
    fn read_with_guess<L: Listener>(
        &mut self,
        engine: &mut Engine,
        ids: &[TokenId],
        stage: Stage,
        listener: &mut L,
    ) -> Result<ControlFlow<Finish, Range<usize>>, L::Error> {
        let mut all = ids.get(engine.position()..).unwrap_or_default().to_vec();
        if all.len() != 1 {
            return Err(Error::Order.into());
        }
        all.extend_from_slice(&self.guess);
        listener.begin(stage);
        let vocab = engine.checkpoint().config().vocab_size;
        let logits = self.logits.get_mut(..all.len() * vocab).ok_or(Error::Order)?;
        match engine.verify(&all, logits, listener) {
            Err(Error::Stopped) => return Ok(ControlFlow::Break(Finish::Cancelled)),
            other => other?,
        }
        Ok(ControlFlow::Continue(0..all.len()))
    }
}
