//! The scale bytes of every expert, read and looked at.
//!
//! They are 1/17 of an expert. A scale of 255 is NaN: the engine counts its group as zero and says so,
//! and nothing in a sound checkpoint has one. Scales that are all zero (2^-127) are what a hole in an
//! unfinished download reads as.

use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::experts::Name;
use crate::fetch::{Fetch, Priority};
use crate::segment::{Form, Piece, Place, Segment, block};
use k3_core::checkpoint::{ExpertTensor, Tensor};
use k3_core::config::MlpKind;
use k3_core::view::ExpertId;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::channel;

/// Reads in flight at most, and so threads that read.
pub const DEPTH: usize = 16;

/// The scale byte that is NaN.
const NAN: u8 = 255;

/// What is wrong with some scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// So many bytes are NaN.
    Nan(u64),
    /// All are zero.
    Blank,
}

/// A matrix of an expert whose scales are damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Damaged {
    /// The expert.
    pub name: Name,
    /// Its scales.
    pub part: ExpertTensor,
    /// What is wrong with them.
    pub damage: Damage,
    /// Where the first damaged byte lies.
    pub place: Place,
}

/// Looks at the scales of all experts, in the order of the layers, with buffers of `memory` bytes or of one
/// expert's scales. `progress` is told how many experts are done, and of how many.
///
/// # Errors
/// Those of the reads; [`Error::Stopped`] once the flag is set.
pub fn scan(
    checkpoint: &Checkpoint,
    memory: u64,
    stop: &Arc<AtomicBool>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Vec<Damaged>, Error> {
    let (config, index) = (checkpoint.config(), checkpoint.index());
    let moe = config.layers().filter(|&l| config.mlp_kind(l) == MlpKind::Moe);
    let mut names =
        moe.flat_map(|l| (0..config.num_experts).filter_map(move |e| Some((l, ExpertId(u16::try_from(e).ok()?)))));
    let all = config.num_moe_layers() * config.num_experts;
    let scales = |name: Name| {
        let parts = ExpertTensor::ALL.into_iter().filter(|t| t.is_scale()).map(|part| {
            let tensor = Tensor::Expert(name.0, name.1, part);
            let len = index.stored_bytes(tensor, config);
            Piece { tensor, first_row: 0, rows: 1, place: index.place(tensor, config), len, at: 0, form: Form::Raw }
        });
        Segment::gather(parts.collect())
    };
    let fetch = Fetch::new(checkpoint.files(), DEPTH, Arc::clone(stop))?;
    let (sender, receiver) = channel();
    let mut flying: HashMap<u64, (Name, Segment)> = HashMap::new();
    let (mut number, mut done, mut found) = (0, 0, Vec::new());
    let mut free: Vec<AlignedBuf> = Vec::new();
    let mut most = DEPTH;
    loop {
        while flying.len() < most
            && let Some(name) = names.next()
        {
            let segment = scales(name);
            // All experts are of one size.
            most = most_within(memory, buffer_for(&segment));
            let buffer = match free.pop().filter(|b| b.len() >= segment.bytes) {
                Some(buffer) => buffer,
                None => AlignedBuf::zeroed(buffer_for(&segment))?,
            };
            fetch.submit(&segment.reads, buffer, number, Priority::Prefetch, &sender);
            flying.insert(number, (name, segment));
            number += 1;
        }
        if flying.is_empty() {
            break;
        }
        let fetched = fetch.wait(&receiver)?;
        fetched.result?;
        let (name, segment) = flying.remove(&fetched.tag).ok_or(Error::Order)?;
        for piece in &segment.pieces {
            let bytes = fetched.buffer.get(piece.at..piece.at + piece.len).ok_or(Error::Order)?;
            let Tensor::Expert(_, _, part) = piece.tensor else { continue };
            if let Some((damage, at)) = damage(bytes) {
                let place = Place { offset: piece.place.offset + at as u64, ..piece.place };
                found.push(Damaged { name, part, damage, place });
            }
        }
        free.push(fetched.buffer);
        done += 1;
        progress(done, all);
    }
    found.sort_by_key(|d| (d.name, d.part));
    Ok(found)
}

/// Bytes of buffer for the scales of an expert: where it lies against the blocks of the disk changes what its
/// reads need, a little.
const fn buffer_for(segment: &Segment) -> usize {
    segment.bytes + 8 * block()
}

/// Buffers of a size that memory is enough for, at least one.
fn most_within(memory: u64, each: usize) -> usize {
    usize::try_from(memory / (each as u64).max(1)).unwrap_or(DEPTH).clamp(1, DEPTH)
}

/// What is wrong with the scales of a matrix, and the first byte of it.
fn damage(scales: &[u8]) -> Option<(Damage, usize)> {
    if let Some(first) = scales.iter().position(|&s| s == NAN) {
        let count = scales[first..].iter().filter(|&&s| s == NAN).count();
        return Some((Damage::Nan(count as u64), first));
    }
    (!scales.is_empty() && scales.iter().all(|&s| s == 0)).then_some((Damage::Blank, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_keep_within_their_memory() {
        let most = [0, 999, 2_999, 16_000, u64::MAX].map(|memory| most_within(memory, 1000));
        assert_eq!(most, [1, 1, 2, 16, 16]);
    }

    #[test]
    fn damage_is_what_no_checkpoint_has() {
        assert_eq!(damage(&[120, 0, 254]), None);
        assert_eq!(damage(&[1, 255, 0, 255]), Some((Damage::Nan(2), 1)));
        assert_eq!(damage(&[0; 40]), Some((Damage::Blank, 0)));
        assert_eq!(damage(&[]), None);
    }
}
