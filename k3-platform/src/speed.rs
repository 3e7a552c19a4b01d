//! How fast the disk under a checkpoint is, read as the engine reads it.

use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::segment::{Place, Read, block};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Bytes of one read, and reads in flight: a slot of the ring, and its readers.
const READ: usize = 4 << 20;
const DEPTH: usize = 8;

/// Bytes a second of reads of 4 MiB, eight in flight, over the checkpoint's largest files, for about
/// `time`. Whole files are read once at most, so a small checkpoint ends earlier.
///
/// # Errors
/// Those of the reads.
pub fn sequential(checkpoint: &Checkpoint, time: Duration) -> Result<f64, Error> {
    let mut shards: Vec<(u16, u64)> = (0..).zip(checkpoint.index().shards().iter().map(|s| s.len)).collect();
    shards.sort_by_key(|&(_, len)| std::cmp::Reverse(len));
    let mut reads = shards.into_iter().flat_map(|(shard, len)| {
        (0..len).step_by(READ).map(move |offset| {
            let len = usize::try_from(len - offset).unwrap_or(READ).min(READ);
            Read { place: Place { shard, offset }, len, at: 0 }
        })
    });
    let fetch = Fetch::new(checkpoint.files(), DEPTH, Arc::default())?;
    let (sender, receiver) = channel();
    let started = Instant::now();
    let (mut in_flight, mut bytes) = (0, 0u64);
    let mut submit = |buffer: AlignedBuf| match reads.next() {
        Some(read) => {
            fetch.submit(&[read], buffer, read.len as u64, Priority::Prefetch, &sender);
            1
        }
        None => 0,
    };
    for _ in 0..DEPTH {
        in_flight += submit(AlignedBuf::zeroed(READ.next_multiple_of(block()))?);
    }
    while in_flight > 0 {
        let fetched = fetch.wait(&receiver)?;
        fetched.result?;
        in_flight -= 1;
        bytes += fetched.tag;
        if started.elapsed() < time {
            in_flight += submit(fetched.buffer);
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    let rate = bytes as f64 / started.elapsed().as_secs_f64().max(1e-9);
    Ok(rate)
}
