//! Many prompts at the same time: one pass over the weights serves all that are in flight.
//!
//! ```text
//! pass   prompt 1: its next id        prompt 2: its next id        prompt 3: the next 30 of its prompt
//!        \___________________________ one chunk of the workspace ____________________________________/
//! ```
//!
//! As many prompts are in flight as the plan has room for ([`Plan::sequences`]), in the order in which
//! they were given. Each pass reads the next id of every text that is being generated; what is left of
//! the chunk goes to prompts that are still being read, the oldest first. A text that ends makes room
//! for the next prompt at once. Each text is the one that its prompt would get alone.
//!
//! A value that is not finite ends the one text it belongs to. The pass is lost, and with it what the
//! sequences in it remember: the others are read again from their beginning, and go on as if nothing had
//! been. A weight that is not finite belongs to no text and ends them all.

#[cfg(doc)]
use crate::generate::Pick;
#[cfg(doc)]
use crate::plan::Plan;

use crate::engine::{Engine, Share};
use crate::error::Error;
use crate::generate::Finish;
use k3_core::model::{ForwardError, Observer, Place};
use k3_core::view::TokenId;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// A prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Its ids; at least one.
    pub ids: Vec<TokenId>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
}

/// A text that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a> {
    /// The number of its prompt.
    pub number: usize,
    /// The ids that were generated.
    pub ids: &'a [TokenId],
    /// Why it ended.
    pub finish: Finish,
    /// The id that ended it, if one did; it is no part of it.
    pub stop: Option<TokenId>,
}

/// What each text is made by. Texts are named by the numbers of their prompts.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// Positions of each sequence; at most the plan's context.
    pub context: usize,
    /// Whether an id ends the text of this number. Such an id is no part of it.
    pub stops: &'a dyn Fn(usize, TokenId) -> bool,
}

impl std::fmt::Debug for Wanted<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wanted").field("context", &self.context).finish_non_exhaustive()
    }
}

/// Chooses the ids of a batch, and watches it.
pub trait Listener: Observer + Send {
    /// Why it gives up.
    type Error: From<Error>;

    /// A pass begins: over `ids` ids of `in_flight` sequences.
    fn begin(&mut self, in_flight: usize, ids: usize) {
        let _ = (in_flight, ids);
    }

    /// The next id of the text of this number, as [`Pick::pick`] gives it to one alone.
    ///
    /// # Errors
    /// [`Error::Order`] if there is nothing to choose from.
    fn pick(&mut self, number: usize, position: usize, history: &[TokenId], logits: &[f32]) -> Result<TokenId, Error>;

    /// An id of a text was picked, and does not end it. `Break` ends the text behind it, for the reason it
    /// gives.
    ///
    /// # Errors
    /// The listener's own, which ends the batch.
    fn token(&mut self, number: usize, id: TokenId) -> Result<ControlFlow<Finish>, Self::Error> {
        let _ = (number, id);
        Ok(ControlFlow::Continue(()))
    }

    /// A text has ended.
    ///
    /// # Errors
    /// The listener's own, which ends the batch.
    fn ended(&mut self, text: Text<'_>) -> Result<(), Self::Error>;

    /// The arithmetic of a text is not finite: it is given up, and the others go on.
    ///
    /// # Errors
    /// The listener's own, which ends the batch: `error` itself, unless it says otherwise.
    fn failed(&mut self, number: usize, error: Error) -> Result<(), Self::Error> {
        let _ = number;
        Err(error.into())
    }
}

/// What became of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Texts that have ended.
    pub ended: usize,
    /// Texts that were given up.
    pub failed: usize,
    /// Whether the stop flag was set before all had.
    pub cancelled: bool,
    /// Passes over the weights.
    pub passes: u64,
    /// Ids that were read.
    pub read: u64,
    /// Tokens generated, those of texts that were not ended included.
    pub generated: u64,
    /// Most sequences in flight at once.
    pub in_flight: usize,
    /// Wall time.
    pub took: Duration,
}

/// A prompt in flight.
struct Flight {
    number: usize,
    /// Of the prompt and the text so far.
    ids: Vec<TokenId>,
    prompt: usize,
    max_tokens: usize,
    /// Ids that the engine has read.
    read: usize,
}

/// Generates the texts of `prompts`. Each goes away with its text.
///
/// # Errors
/// Those of the passes and of the listener. Texts that have not ended are lost.
pub fn run<L: Listener>(
    engine: &mut Engine,
    prompts: Vec<Prompt>,
    wanted: &Wanted<'_>,
    listener: &mut L,
) -> Result<Outcome, L::Error> {
    let started = Instant::now();
    let vocab = engine.checkpoint().config().vocab_size;
    let (slots, chunk) = (engine.plan().sequences, engine.plan().extent.chunk);
    let mut logits = vec![0.0; vocab * engine.plan().logit_rows];
    let mut flights: Vec<Option<Flight>> = (0..slots).map(|_| None).collect();
    let mut waiting = prompts.into_iter().enumerate();
    let mut outcome = Outcome::default();
    loop {
        for (slot, flight) in flights.iter_mut().enumerate() {
            if flight.is_none()
                && let Some((number, Prompt { ids, max_tokens })) = waiting.next()
            {
                engine.reset_sequence(slot)?;
                *flight = Some(Flight { number, prompt: ids.len(), ids, max_tokens, read: 0 });
            }
        }
        let (shares, ids) = compose(&flights, chunk);
        if shares.is_empty() {
            break;
        }
        outcome.in_flight = outcome.in_flight.max(shares.len());
        outcome.passes += 1;
        listener.begin(shares.len(), ids.len());
        let rows: usize = shares.iter().map(|s| s.wanted).sum();
        let rows = logits.get_mut(..rows * vocab).ok_or(Error::Order)?;
        match engine.step_many(&shares, &ids, rows, listener) {
            Err(Error::Stopped) => {
                outcome.cancelled = true;
                break;
            }
            Err(error) => {
                give_up(engine, &mut flights, &shares, error, listener)?;
                outcome.failed += 1;
                continue;
            }
            Ok(()) => {}
        }
        outcome.read += ids.len() as u64;
        let mut rows = rows.chunks_exact(vocab);
        for share in &shares {
            let slot = flights.get_mut(share.sequence).ok_or(Error::Order)?;
            let flight = slot.as_mut().ok_or(Error::Order)?;
            flight.read += share.positions;
            if share.wanted == 0 {
                continue;
            }
            let row = rows.next().ok_or(Error::Order)?;
            let before = flight.ids.len();
            let finish = flight.advance(row, wanted, listener)?;
            outcome.generated += (flight.ids.len() - before) as u64;
            if let Some((finish, stop)) = finish {
                let ids = flight.ids.get(flight.prompt..).unwrap_or_default();
                listener.ended(Text { number: flight.number, ids, finish, stop })?;
                outcome.ended += 1;
                *slot = None;
            }
        }
    }
    outcome.took = started.elapsed();
    Ok(outcome)
}

/// Gives up the text in whose arithmetic a value is not finite, and has the others of its pass begin again.
/// Any other error ends the batch.
fn give_up<L: Listener>(
    engine: &mut Engine,
    flights: &mut [Option<Flight>],
    shares: &[Share],
    error: Error,
    listener: &mut L,
) -> Result<(), L::Error> {
    let sequence = match &error {
        Error::Forward(inner) => match **inner {
            ForwardError::NonFinite { place: Place::Weight(_), .. } => None,
            ForwardError::NonFinite { sequence, .. } => shares.get(sequence),
            _ => None,
        },
        _ => None,
    };
    let Some(slot) = sequence.and_then(|share| flights.get_mut(share.sequence)) else { return Err(error.into()) };
    let flight = slot.take().ok_or(Error::Order)?;
    listener.failed(flight.number, error)?;
    for share in shares {
        engine.reset_sequence(share.sequence)?;
        if let Some(flight) = flights.get_mut(share.sequence).ok_or(Error::Order)? {
            flight.read = 0;
        }
    }
    Ok(())
}

impl Flight {
    /// Picks an id, and says whether the text has ended and by which id.
    fn advance<L: Listener>(
        &mut self,
        logits: &[f32],
        wanted: &Wanted<'_>,
        listener: &mut L,
    ) -> Result<Option<(Finish, Option<TokenId>)>, L::Error> {
        if self.max_tokens == 0 {
            return Ok(Some((Finish::Length, None)));
        }
        let id = listener.pick(self.number, self.ids.len(), &self.ids, logits)?;
        if (wanted.stops)(self.number, id) {
            return Ok(Some((Finish::Stop, Some(id))));
        }
        self.ids.push(id);
        Ok(if let ControlFlow::Break(finish) = listener.token(self.number, id)? {
            Some((finish, None))
        } else if self.ids.len() - self.prompt == self.max_tokens {
            Some((Finish::Length, None))
        } else if self.ids.len() > wanted.context {
            Some((Finish::Context, None))
        } else {
            None
        })
    }
}

/// Who reads what in the next pass: the next id of every text first, then prompts, in the order of their
/// numbers, as far as the chunk goes.
fn compose(flights: &[Option<Flight>], chunk: usize) -> (Vec<Share>, Vec<TokenId>) {
    let flying = || flights.iter().enumerate().filter_map(|(slot, flight)| Some((slot, flight.as_ref()?)));
    // Each gets one position, for the plan's chunk has one for each; the rest of the chunk goes by age.
    let mut positions = vec![0; flights.len()];
    let mut left = chunk;
    for (slot, _) in flying() {
        (positions[slot], left) = (1.min(left), left.saturating_sub(1));
    }
    let mut by_age: Vec<_> = flying().collect();
    by_age.sort_unstable_by_key(|(_, flight)| flight.number);
    for (slot, flight) in by_age {
        let more = (flight.ids.len() - flight.read - positions[slot]).min(left);
        positions[slot] += more;
        left -= more;
    }
    let (mut shares, mut ids) = (Vec::new(), Vec::new());
    for (slot, flight) in flying().filter(|(slot, _)| positions[*slot] > 0) {
        let end = flight.read + positions[slot];
        ids.extend_from_slice(&flight.ids[flight.read..end]);
        let wanted = usize::from(end == flight.ids.len());
        shares.push(Share { sequence: slot, positions: positions[slot], wanted });
    }
    (shares, ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flight(number: usize, ids: usize, read: usize) -> Option<Flight> {
        Some(Flight { number, ids: vec![TokenId(0); ids], prompt: ids, max_tokens: 1, read })
    }

    #[test]
    fn texts_come_first_and_old_prompts_before_young_ones() {
        let positions = |flights: &[Option<Flight>], chunk| {
            let (shares, ids) = compose(flights, chunk);
            assert_eq!(ids.len(), shares.iter().map(|s| s.positions).sum::<usize>());
            shares.iter().map(|s| (s.sequence, s.positions, s.wanted)).collect::<Vec<_>>()
        };
        let flights = [flight(7, 20, 0), flight(1, 9, 8), None, flight(5, 10, 2)];
        assert_eq!(positions(&flights, 3), [(0, 1, 0), (1, 1, 1), (3, 1, 0)]);
        assert_eq!(positions(&flights, 8), [(0, 1, 0), (1, 1, 1), (3, 6, 0)]);
        assert_eq!(positions(&flights, 12), [(0, 3, 0), (1, 1, 1), (3, 8, 1)]);
        assert_eq!(positions(&flights, 100), [(0, 20, 1), (1, 1, 1), (3, 8, 1)]);
        assert_eq!(positions(&[None, None], 5), []);
    }
}
