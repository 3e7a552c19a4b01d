//! The core's [`Executor`] on a pool of threads.
//!
//! Work is halved until pieces are small, and idle threads steal the halves. Nothing here can change a
//! result: parts are disjoint by type, and each call gets the same index it would get in order.

use k3_core::exec::{Executor, Serial, Split};

/// The threads of a pool could not be started.
#[derive(Debug)]
pub struct SpawnError {
    /// Threads asked for.
    pub threads: usize,
    source: rayon::ThreadPoolBuildError,
}

impl std::fmt::Display for SpawnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "could not start {} compute threads", self.threads)
    }
}

impl std::error::Error for SpawnError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A fixed number of compute threads that run the parts of the core's work.
#[derive(Debug)]
pub struct Rayon {
    /// `None` for one thread: the caller's own.
    pool: Option<rayon::ThreadPool>,
    threads: usize,
}

impl Rayon {
    /// Bytes of stack of each thread. Only touched pages are resident; kernels keep their tables in
    /// the workspace, and halving nests no deeper than the logarithm of the number of parts.
    pub const STACK: usize = 1 << 20;

    /// Starts `threads` threads; zero counts as one. One thread means the caller's own, and starts none.
    ///
    /// # Errors
    /// [`SpawnError`] if the system refuses a thread.
    pub fn new(threads: usize) -> Result<Self, SpawnError> {
        let threads = threads.max(1);
        let pool = if threads == 1 {
            None
        } else {
            let builder = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .stack_size(Self::STACK)
                .thread_name(|i| format!("k3-compute-{i}"));
            Some(builder.build().map_err(|source| SpawnError { threads, source })?)
        };
        Ok(Self { pool, threads })
    }

    /// Runs `f` on one of the threads, so that each [`run`](Executor::run) inside it starts without a
    /// change of threads: less than 1 us instead of 14, of which a pass with thousands of short products
    /// wants many. Results are the same.
    pub fn enter<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(f),
            None => f(),
        }
    }
}

impl Executor for Rayon {
    fn width(&self) -> usize {
        self.threads
    }

    /// As the trait says; a panic in `f` comes out of this call once the parts that are running have
    /// returned.
    fn run<S: Split>(&self, work: S, f: impl Fn(usize, S::Part) + Sync) {
        match &self.pool {
            // A single part gains nothing from changing the thread.
            Some(pool) if work.len() > 1 => {
                // Four pieces a thread even out parts of unequal cost; more would only cost steals.
                let grain = (work.len() / (4 * self.threads)).max(1);
                pool.install(|| halve(work, 0, grain, &f));
            }
            _ => Serial.run(work, f),
        }
    }
}

/// Runs `work`, whose first part has the index `first`, in pieces of at most `grain` parts.
fn halve<S: Split>(mut work: S, first: usize, grain: usize, f: &(impl Fn(usize, S::Part) + Sync)) {
    let len = work.len();
    if len > grain {
        let mid = len / 2;
        let (left, right) = work.split_at(mid);
        rayon::join(|| halve(left, first, grain, f), || halve(right, first + mid, grain, f));
        return;
    }
    let mut index = first;
    while let Some(part) = work.next() {
        f(index, part);
        index += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k3_core::exec::Parts;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn paint(executor: &impl Executor, len: usize, size: usize) -> (Vec<u64>, Vec<u32>) {
        let (mut a, mut b) = (vec![1_u64; len], vec![0_u32; len]);
        executor.run((Parts::new(&mut a, size), Parts::new(&mut b, 1)), |i, (x, y)| {
            for (k, x) in x.iter_mut().enumerate() {
                *x += (i * 1000 + k) as u64;
            }
            y[0] += 7;
        });
        (a, b)
    }

    #[test]
    fn results_equal_serial_for_every_shape() {
        for threads in [0, 1, 2, 3, 8] {
            let pool = Rayon::new(threads).unwrap();
            assert_eq!(pool.width(), threads.max(1));
            for len in (0..40).chain([255, 256, 257, 1000]) {
                for size in [1, 2, 3, 7, 64] {
                    let wanted = paint(&Serial, len, size);
                    assert_eq!(paint(&pool, len, size), wanted, "threads {threads} len {len} size {size}");
                }
            }
        }
    }

    #[test]
    fn results_are_the_same_from_inside() {
        for threads in [1, 2, 3] {
            let pool = Rayon::new(threads).unwrap();
            assert_eq!(pool.enter(|| paint(&pool, 100, 3)), paint(&Serial, 100, 3), "threads {threads}");
        }
    }

    #[test]
    fn work_can_start_work() {
        let pool = Rayon::new(2).unwrap();
        let count = AtomicUsize::new(0);
        pool.run(Parts::new(&mut [0_u8; 10], 1), |_, _| {
            pool.run(Parts::new(&mut [0_u8; 10], 1), |_, _| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 100);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for threads in [1, 2] {
            let pool = Rayon::new(threads).unwrap();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(Parts::new(&mut [0_u8; 100], 1), |i, _| assert_ne!(i, 57, "part 57"));
            }));
            assert!(outcome.is_err());
            assert_eq!(paint(&pool, 50, 3), paint(&Serial, 50, 3));
        }
    }
}
