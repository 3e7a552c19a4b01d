//! Which experts a run asked for, recorded, and replayed against arenas of other sizes.
//!
//! ```text
//! offset  bytes  field
//!      0      8  magic: "K3TRACE" and a version byte, 1
//!      8      2  experts that a position chooses (little-endian, like everything here)
//!     10      2  zero
//!     12      4  zero
//!     16     8n  requests in walk order: step u32, layer u16, expert u16
//! ```
//!
//! A *step* is a pass over the layers: the first steps read the prompt, the others one token each. An
//! expert stands once for each step and layer that asked for it, however many positions did.

use crate::experts::{Name, transit};
use crate::policy::{Directory, Policy};
use k3_core::view::{ExpertId, LayerIndex};
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};

/// The first bytes of a trace: the format's name and version.
const MAGIC: [u8; 8] = *b"K3TRACE\x01";
const HEADER: usize = 16;
const RECORD: usize = 8;

/// One expert asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The pass, counted from zero.
    pub step: u32,
    /// Whom it asked for.
    pub name: Name,
}

/// A recorded run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Experts that a position chooses in a layer.
    pub chosen: usize,
    /// Requests in the order in which they were made.
    pub requests: Vec<Request>,
}

/// Why bytes are not a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceError {
    /// They do not begin like one of this version.
    Magic,
    /// They end inside a record, or the header.
    Torn {
        /// How many bytes there are.
        len: usize,
    },
    /// Steps do not rise, or a header field is not what it must be.
    Malformed {
        /// Where (bytes).
        offset: usize,
    },
}

impl std::fmt::Display for TraceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Self::Magic => f.write_str("not an expert trace of this version"),
            Self::Torn { len } => write!(f, "the trace ends inside a record: it has {len} bytes"),
            Self::Malformed { offset } => write!(f, "byte {offset}: not what a trace has there"),
        }
    }
}

impl std::error::Error for TraceError {}

/// Writes the header of a trace whose positions choose `chosen` experts.
///
/// # Errors
/// Those of the writer.
pub fn begin(out: &mut impl Write, chosen: usize) -> io::Result<()> {
    let chosen = u16::try_from(chosen).map_err(|_| io::ErrorKind::InvalidInput)?;
    out.write_all(&MAGIC)?;
    out.write_all(&chosen.to_le_bytes())?;
    out.write_all(&[0; 6])
}

/// Writes what one layer of one step asked for: `ids` of all its positions, in any order.
///
/// # Errors
/// Those of the writer.
pub fn record(out: &mut impl Write, step: u32, layer: LayerIndex, ids: &[ExpertId]) -> io::Result<()> {
    let distinct: BTreeSet<ExpertId> = ids.iter().copied().collect();
    for id in distinct {
        out.write_all(&step.to_le_bytes())?;
        out.write_all(&layer.0.to_le_bytes())?;
        out.write_all(&id.0.to_le_bytes())?;
    }
    Ok(())
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, TraceError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(TraceError::Magic);
        }
        let Some((header, body)) = bytes.split_at_checked(HEADER) else {
            return Err(TraceError::Torn { len: bytes.len() });
        };
        let chosen = usize::from(u16::from_le_bytes([header[8], header[9]]));
        if chosen == 0 || header[10..].iter().any(|&b| b != 0) {
            return Err(TraceError::Malformed { offset: 8 });
        }
        let (records, rest) = body.as_chunks::<RECORD>();
        if !rest.is_empty() {
            return Err(TraceError::Torn { len: bytes.len() });
        }
        let mut requests: Vec<Request> = Vec::with_capacity(records.len());
        for (i, &[s0, s1, s2, s3, l0, l1, e0, e1]) in records.iter().enumerate() {
            let step = u32::from_le_bytes([s0, s1, s2, s3]);
            if requests.last().is_some_and(|last| step < last.step) {
                return Err(TraceError::Malformed { offset: HEADER + i * RECORD });
            }
            let name = (LayerIndex(u16::from_le_bytes([l0, l1])), ExpertId(u16::from_le_bytes([e0, e1])));
            requests.push(Request { step, name });
        }
        Ok(Self { chosen, requests })
    }

    /// Reads pairs of i32 (layer, expert) as another engine recorded them while it ran a prompt of
    /// `prompt` ids again and again, longer by one id each time: pass after pass, layer after layer,
    /// `chosen` pairs a position. What an incremental engine would have asked for is all of the first
    /// pass and the last position of each other one.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn parse_pairs(bytes: &[u8], prompt: usize, chosen: usize) -> Result<Self, TraceError> {
        let (pairs, rest) = bytes.as_chunks::<RECORD>();
        if !rest.is_empty() {
            return Err(TraceError::Torn { len: bytes.len() });
        }
        let pair = |&[l0, l1, l2, l3, e0, e1, e2, e3]: &[u8; RECORD]| {
            let layer = u16::try_from(i32::from_le_bytes([l0, l1, l2, l3])).ok()?;
            let expert = u16::try_from(i32::from_le_bytes([e0, e1, e2, e3])).ok()?;
            Some((LayerIndex(layer), ExpertId(expert)))
        };
        let mut requests = Vec::new();
        let (mut at, mut step, mut positions) = (0, 0u32, prompt.max(1));
        let mut last_layer = None;
        while at < pairs.len() {
            let malformed = TraceError::Malformed { offset: at * RECORD };
            let end = positions.checked_mul(chosen).and_then(|n| at.checked_add(n)).ok_or(malformed)?;
            let group = pairs.get(at..end).ok_or(malformed)?;
            let names: Option<Vec<Name>> = group.iter().map(pair).collect();
            let names = names.ok_or(malformed)?;
            let layer = names.first().ok_or(malformed)?.0;
            if last_layer.is_some_and(|last| layer <= last) {
                // The layers begin again: a new pass, longer by one position.
                (step, positions, last_layer) = (step + 1, positions + 1, None);
                continue;
            }
            if names.iter().any(|n| n.0 != layer) {
                return Err(malformed);
            }
            last_layer = Some(layer);
            at += group.len();
            let asked = if step == 0 { &names[..] } else { &names[names.len() - chosen..] };
            let distinct: BTreeSet<Name> = asked.iter().copied().collect();
            requests.extend(distinct.into_iter().map(|name| Request { step, name }));
        }
        Ok(Self { chosen, requests })
    }

    /// Requests behind the first step, and those of them that an arena of `capacity` slots serves.
    /// The engine's own directory decides, with as many slots passing through as the engine has.
    #[must_use]
    pub fn replay(&self, policy: Policy, capacity: usize) -> Hits {
        let distinct: BTreeSet<Name> = self.requests.iter().map(|r| r.name).collect();
        let kept = capacity - transit(capacity, distinct.len(), self.chosen).min(capacity);
        let mut directory = Directory::new(policy, kept);
        let mut hits = Hits::default();
        let mut at = 0;
        let mut step = None;
        while let Some(first) = self.requests.get(at) {
            if step != Some(first.step) {
                step = Some(first.step);
                directory.pass();
            }
            // The engine asks for a layer's choice at once, and serves it afterwards.
            let same = |r: &&Request| r.step == first.step && r.name.0 == first.name.0;
            let layer = &self.requests[at..at + self.requests[at..].iter().take_while(same).count()];
            for request in layer {
                hits.count(request.step, directory.request(request.name));
            }
            for request in layer {
                directory.admit(request.name, |_| false);
            }
            at += layer.len();
        }
        hits
    }

    /// The most that any policy could serve: what is needed latest gives way, and what is needed
    /// later still is not kept at all (Belady's rule, with bypass).
    #[must_use]
    pub fn belady(&self, capacity: usize) -> Hits {
        let mut next = vec![usize::MAX; self.requests.len()];
        let mut seen: HashMap<Name, usize> = HashMap::new();
        for (i, request) in self.requests.iter().enumerate().rev() {
            if let Some(later) = seen.insert(request.name, i) {
                next[i] = later;
            }
        }
        let mut kept: BTreeSet<(usize, Name)> = BTreeSet::new();
        let mut hits = Hits::default();
        for (i, request) in self.requests.iter().enumerate() {
            hits.count(request.step, kept.remove(&(i, request.name)));
            if next[i] == usize::MAX {
                continue;
            }
            kept.insert((next[i], request.name));
            if kept.len() > capacity {
                kept.pop_last();
            }
        }
        hits
    }
}

/// What a replay counted, the first step left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Hits {
    /// Requests.
    pub requests: u64,
    /// Of these, served from memory.
    pub hits: u64,
}

impl Hits {
    fn count(&mut self, step: u32, hit: bool) {
        if step > 0 {
            self.requests += 1;
            self.hits += u64::from(hit);
        }
    }

    /// The share that was served; 0 for none at all.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    pub fn rate(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { self.hits as f64 / self.requests as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(steps: &[&[(u16, &[u16])]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        begin(&mut bytes, 2).unwrap();
        for (step, layers) in (0..).zip(steps) {
            for (layer, ids) in *layers {
                let ids: Vec<_> = ids.iter().map(|&id| ExpertId(id)).collect();
                record(&mut bytes, step, LayerIndex(*layer), &ids).unwrap();
            }
        }
        bytes
    }

    #[test]
    fn what_was_recorded_is_read_back_and_nothing_else() {
        let bytes = written(&[&[(1, &[5, 3, 5, 9]), (2, &[0, 1])], &[(1, &[3, 4])]]);
        let trace = Trace::parse(&bytes).unwrap();
        let names: Vec<_> = trace.requests.iter().map(|r| (r.step, r.name.0.0, r.name.1.0)).collect();
        assert_eq!(names, [(0, 1, 3), (0, 1, 5), (0, 1, 9), (0, 2, 0), (0, 2, 1), (1, 1, 3), (1, 1, 4)]);
        for len in 0..bytes.len() {
            let whole = len >= HEADER && (len - HEADER).is_multiple_of(RECORD);
            assert_eq!(Trace::parse(&bytes[..len]).is_ok(), whole, "{len} bytes");
        }
        let mut back = bytes.clone();
        back[HEADER] = 9;
        assert_eq!(Trace::parse(&back), Err(TraceError::Malformed { offset: HEADER + RECORD }));
        back = bytes;
        back[7] = 2;
        assert_eq!(Trace::parse(&back), Err(TraceError::Magic));
    }

    #[test]
    fn pairs_of_growing_passes_become_steps() {
        let mut bytes = Vec::new();
        // Two positions, then three, in two layers with one choice each.
        for (layer, expert) in [(1, 7), (1, 8), (2, 4), (2, 4), (1, 7), (1, 8), (1, 9), (2, 4), (2, 4), (2, 6)] {
            bytes.extend_from_slice(&i32::to_le_bytes(layer));
            bytes.extend_from_slice(&i32::to_le_bytes(expert));
        }
        let trace = Trace::parse_pairs(&bytes, 2, 1).unwrap();
        let names: Vec<_> = trace.requests.iter().map(|r| (r.step, r.name.0.0, r.name.1.0)).collect();
        assert_eq!(names, [(0, 1, 7), (0, 1, 8), (0, 2, 4), (1, 1, 9), (1, 2, 6)]);
        assert!(Trace::parse_pairs(&bytes[..bytes.len() - 8], 2, 1).is_err());
        assert!(Trace::parse_pairs(&[255; 16], 1, 1).is_err());
        assert!(Trace::parse_pairs(&bytes, usize::MAX, 2).is_err());
        assert!(Trace::parse_pairs(&bytes, 2, usize::MAX).is_err());
    }

    #[test]
    fn no_policy_beats_the_optimum_and_everything_in_memory_always_hits() {
        let mut seed = 5u32;
        let steps: Vec<Vec<(u16, Vec<ExpertId>)>> = (0..40)
            .map(|_| {
                (0..6)
                    .map(|layer| {
                        let ids = (0..2).map(|_| {
                            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            ExpertId(u16::try_from((seed >> 16) % 10 * ((seed >> 8) % 2)).unwrap())
                        });
                        (layer, ids.collect())
                    })
                    .collect()
            })
            .collect();
        let mut bytes = Vec::new();
        begin(&mut bytes, 2).unwrap();
        for (step, layers) in (0..).zip(&steps) {
            for (layer, ids) in layers {
                record(&mut bytes, step, LayerIndex(*layer), ids).unwrap();
            }
        }
        let trace = Trace::parse(&bytes).unwrap();
        for capacity in [0, 1, 2, 5, 10, 20, 40, 60] {
            let best = trace.belady(capacity);
            for policy in [Policy::Lru, Policy::Frequency] {
                let found = trace.replay(policy, capacity);
                assert_eq!(found.requests, best.requests);
                assert!(found.hits <= best.hits, "{policy:?} at {capacity}");
            }
        }
        assert_eq!(trace.belady(0).hits, 0);
        assert_eq!(trace.replay(Policy::Lru, 60), trace.belady(60));
    }
}
