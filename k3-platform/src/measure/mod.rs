//! What this machine can do: memory, kernels and disk, measured as the engine uses them.
//!
//! `k3 bench` prints these figures, `k3 doctor` and `k3 plan` foretell by them, the benches hold them against
//! floors, and who only wants to know how fast a disk is asks [`disk`] alone. Everything takes a time to spend and answers with plain
//! numbers; nothing here prints, and no test depends on a time.
//!
//! A figure is the best of several rounds, with the median beside it: what disturbs a machine only ever
//! makes it slower. Figures that are compared with each other are taken in turns, round by round, so
//! that a disturbance meets all of them.

pub mod disk;
pub mod kernels;
pub mod token;

use crate::aligned::{AlignedBuf, AllocError};
use k3_core::exec::{Executor, Parts};
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Rates of several rounds, in units a second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rate {
    /// That of the fastest round.
    pub best: f64,
    /// That of the middle one.
    pub median: f64,
}

impl Rate {
    /// `amount` of work in each of these times.
    #[must_use]
    pub fn of(amount: f64, mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        let rate = |at: usize| seconds.get(at).map_or(0.0, |s| amount / s.max(1e-9));
        Self { best: rate(0), median: rate(seconds.len() / 2) }
    }
}

/// Something to time: how much one run of it does, and the run.
pub(crate) struct Task<'a> {
    pub(crate) amount: f64,
    pub(crate) run: Box<dyn FnMut() + 'a>,
}

/// Runs the tasks in turns until `time` is over, at least twice each; the first turn, which warms up,
/// does not count unless it is the only one.
pub(crate) fn in_turns(tasks: &mut [Task<'_>], time: Duration) -> Vec<Rate> {
    let started = Instant::now();
    let mut seconds: Vec<Vec<f64>> = vec![Vec::new(); tasks.len()];
    for round in 0.. {
        for (task, seconds) in tasks.iter_mut().zip(&mut seconds) {
            let start = Instant::now();
            (task.run)();
            if round > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        if round > 0 && started.elapsed() >= time {
            break;
        }
    }
    tasks.iter().zip(seconds).map(|(task, seconds)| Rate::of(task.amount, seconds)).collect()
}

/// Memory full of weights around one: larger than any cache that would serve them again.
///
/// # Errors
/// [`AllocError`] if the system has no such memory.
pub fn weights(bytes: usize, exec: &impl Executor) -> Result<AlignedBuf, AllocError> {
    const PART: usize = 1 << 20;
    let mut buf = AlignedBuf::zeroed(bytes)?;
    exec.run(Parts::new(&mut buf, PART), |i, part| {
        let mut state = i as u64 + 1;
        for eight in part.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Signs and mantissas are random, exponents those of 0.5 to 2, as bf16 and as scale bytes.
            eight.copy_from_slice(&((state & 0x80ff_80ff_80ff_80ff) | 0x3f00_3f00_3f00_3f00).to_le_bytes());
        }
    });
    Ok(buf)
}

/// Reads all of `data` once on the threads of `exec`, eight streams on each, so that many lines are in
/// flight: the speed that no product with a matrix in memory can pass.
pub fn read_all(data: &[u8], exec: &impl Executor) {
    let width = exec.width();
    let mut sums = vec![0u64; width * 4];
    let per = data.len().div_ceil(sums.len()).next_multiple_of(64);
    exec.run(Parts::new(&mut sums, 1), |i, sum| {
        let part = data.get(i * per..).unwrap_or_default();
        let (_, words, _) = bytemuck::pod_align_to::<u8, [u64; 8]>(&part[..per.min(part.len())]);
        sum[0] = xor(words);
    });
    black_box(sums);
}

fn xor(words: &[[u64; 8]]) -> u64 {
    let stream = words.len() / 8;
    let mut sums = [0u64; 8];
    let mut add = |line: &[u64; 8]| {
        for (sum, &word) in sums.iter_mut().zip(line) {
            *sum ^= word;
        }
    };
    for line in 0..stream {
        for s in 0..8 {
            add(&words[s * stream + line]);
        }
    }
    words[8 * stream..].iter().for_each(add);
    sums.iter().fold(0, |a, b| a ^ b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_core::exec::Serial;

    #[test]
    fn rates_are_the_best_and_the_median() {
        assert_eq!(Rate::of(6.0, vec![3.0, 1.0, 2.0]), Rate { best: 6.0, median: 3.0 });
        assert_eq!(Rate::of(6.0, Vec::new()), Rate::default());
    }

    #[test]
    fn every_word_is_read() {
        for lines in 0..40 {
            let words: Vec<[u64; 8]> = (0..lines).map(|i| [1 << i; 8].map(|w: u64| w)).collect();
            let mut words = words;
            for line in &mut words {
                line[1..].fill(0);
            }
            assert_eq!(xor(&words), (1u64 << lines) - 1, "{lines}");
        }
        read_all(&[1; 1000], &Serial);
    }

    #[test]
    fn tasks_take_turns() {
        let order = std::cell::RefCell::new(Vec::new());
        let task = |name: u8| Task { amount: 1.0, run: Box::new(move || ()) as Box<dyn FnMut()> }.named(name, &order);
        let mut tasks = [task(1), task(2)];
        let rates = in_turns(&mut tasks, Duration::ZERO);
        assert_eq!(rates.len(), 2);
        drop(tasks);
        assert_eq!(order.into_inner(), [1, 2, 1, 2]);
    }

    impl Task<'_> {
        fn named(self, name: u8, order: &std::cell::RefCell<Vec<u8>>) -> Task<'_> {
            Task { amount: self.amount, run: Box::new(move || order.borrow_mut().push(name)) }
        }
    }
}
