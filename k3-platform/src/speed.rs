//! How fast the disk under a checkpoint is, read as the engine reads it, how fast the kernels are, and what a
//! token then takes.

use crate::aligned::AlignedBuf;
use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::fetch::{Fetch, Priority};
use crate::io::FileSet;
use crate::plan::Plan;
use crate::segment::{Place, Read, block};
use k3_core::backend::{Backend, Layout, Panel};
use k3_core::view::{Bf16Matrix, GROUP, Mxfp4Matrix};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
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
    let mut shards = checkpoint.streamed();
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

/// In which order a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// From front to back, as the trunk is.
    Sequential,
    /// All over the files, as experts are.
    Random,
}

/// Bytes a second of reads of `len` bytes, `depth` in flight, over the files of a set, for about `time`.
/// `lens` are the lengths of the files. Files may be read more than once, so where reads go through
/// the page cache this is the speed of memory. `None` if no file is as long as a read.
///
/// # Errors
/// Those of the reads; [`Error::Stopped`] once the flag is set.
pub fn reads(
    files: &FileSet,
    lens: &[u64],
    len: usize,
    depth: usize,
    order: Order,
    time: Duration,
    stop: &Arc<AtomicBool>,
) -> Result<Option<f64>, Error> {
    // The places a read of this length can be, over all files in a row.
    let places: Vec<u64> = lens.iter().map(|l| l / len as u64).collect();
    let count: u64 = places.iter().sum();
    if count == 0 {
        return Ok(None);
    }
    let place = |number: u64| {
        let (mut shard, mut number) = (0u16, number % count);
        for &here in &places {
            if number < here {
                break;
            }
            number -= here;
            shard += 1;
        }
        Place { shard, offset: number * len as u64 / block() as u64 * block() as u64 }
    };
    let fetch = Fetch::new(files.clone(), depth, Arc::clone(stop))?;
    let (sender, receiver) = channel();
    let started = Instant::now();
    let (mut number, mut in_flight, mut bytes) = (0u64, 0, 0u64);
    let mut submit = |buffer: AlignedBuf| {
        // An odd multiplier of 64 bits visits every place, far from the one before.
        let at = if order == Order::Random { number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8 } else { number };
        number += 1;
        fetch.submit(&[Read { place: place(at), len, at: 0 }], buffer, 0, Priority::Prefetch, &sender);
    };
    for _ in 0..depth {
        submit(AlignedBuf::zeroed(len.next_multiple_of(block()))?);
        in_flight += 1;
    }
    while in_flight > 0 {
        let fetched = fetch.wait(&receiver)?;
        fetched.result?;
        in_flight -= 1;
        bytes += len as u64;
        if started.elapsed() < time {
            submit(fetched.buffer);
            in_flight += 1;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a speed")]
    let rate = bytes as f64 / started.elapsed().as_secs_f64().max(1e-9);
    Ok(Some(rate))
}

/// How fast weights are multiplied with one position (bytes of weights a second, all threads).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kernels {
    /// Those of the trunk.
    pub bf16: f64,
    /// Those of the routed experts, with their scales.
    pub mxfp4: f64,
}

/// Columns of the matrices that kernels are measured with, those of the release, and rows: more weights
/// than a thread's caches hold.
const COLUMNS: usize = 7168;
const ROWS: usize = 1536;

/// Measures the kernels on `threads` threads, each for about `time`.
#[must_use]
pub fn kernels(backend: Backend, threads: usize, time: Duration) -> Kernels {
    let one = || {
        let vector = vec![0.5f32; COLUMNS];
        let mut buffer = vec![0.0; Panel::len(COLUMNS, 1).unwrap_or(0)];
        let mut out = vec![0.0f32; ROWS];
        let (weights, packed, scales) =
            (vec![60; ROWS * COLUMNS * 2], vec![0x21; ROWS * COLUMNS / 2], vec![120; ROWS * COLUMNS / GROUP]);
        let mut measure = |layout: Layout, bytes: usize, work: &mut dyn FnMut(&Panel<'_>, &mut [f32])| {
            let panel = backend.pack(layout, &vector, COLUMNS, 1, &mut buffer);
            work(&panel, &mut out);
            let (started, mut done) = (Instant::now(), 0u64);
            while started.elapsed() < time {
                work(&panel, &mut out);
                done += bytes as u64;
            }
            #[expect(clippy::cast_precision_loss, reason = "a speed")]
            let rate = done as f64 / started.elapsed().as_secs_f64().max(1e-9);
            rate
        };
        let bf16 = Bf16Matrix::new(&weights, ROWS, COLUMNS).map_or(0.0, |matrix| {
            measure(Layout::Bf16, weights.len(), &mut |x, out| backend.matmul_bf16(matrix, x, out))
        });
        let mxfp4 = Mxfp4Matrix::new(&packed, &scales, ROWS, COLUMNS).map_or(0.0, |matrix| {
            measure(Layout::Mxfp4, packed.len() + scales.len(), &mut |x, out| backend.matmul_mxfp4(matrix, x, out))
        });
        Kernels { bf16, mxfp4 }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
        let mut all = one();
        for thread in threads {
            if let Ok(each) = thread.join() {
                (all.bf16, all.mxfp4) = (all.bf16 + each.bf16, all.mxfp4 + each.mxfp4);
            }
        }
        all
    })
}

/// What a machine does, in bytes of weights a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// The disk, read from front to back.
    pub sequential: f64,
    /// The disk, an expert here and another there.
    pub experts: f64,
    /// The kernels, on the trunk.
    pub bf16: f64,
    /// The kernels, on experts.
    pub mxfp4: f64,
}

/// Seconds that a generated token takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// Reading what the plan has not in memory, if all chosen experts are.
    pub disk_at_least: f64,
    /// The same if none of them is.
    pub disk_at_most: f64,
    /// Multiplying.
    pub compute: f64,
}

impl Expected {
    /// From the best case to the worst: the disk reads while the processors compute, so the slower of
    /// the two decides.
    #[must_use]
    pub const fn per_token(&self) -> (f64, f64) {
        (self.disk_at_least.max(self.compute), self.disk_at_most.max(self.compute))
    }
}

/// What to expect of a plan for this checkpoint.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "a prediction")]
pub fn expect(checkpoint: &Checkpoint, plan: &Plan, rates: &Rates) -> Expected {
    let (trunk, experts) = checkpoint.multiplied();
    let time = |bytes: u64, rate: f64| if bytes == 0 { 0.0 } else { bytes as f64 / rate };
    let disk_at_least = time(plan.trunk_read, rates.sequential);
    Expected {
        disk_at_least,
        disk_at_most: disk_at_least + time(plan.experts_read, rates.experts),
        compute: time(trunk, rates.bf16) + time(experts, rates.mxfp4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_disk_and_processors_decides() {
        let expected = Expected { disk_at_least: 1.0, disk_at_most: 4.0, compute: 2.0 };
        assert_eq!(expected.per_token(), (2.0, 4.0));
    }
}
