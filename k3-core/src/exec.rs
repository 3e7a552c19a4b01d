//! How work is spread over threads, without the core knowing that threads exist.
//!
//! An [`Executor`] runs a function over disjoint parts. The parts are handed over as exclusive
//! slices, so an implementation cannot make two calls overlap without `unsafe` of its own, and no
//! kernel's result can depend on the order or the number of threads.
//!
//! ```
//! use k3_core::exec::{Executor, Parts, Serial};
//!
//! let mut data = [1, 2, 3, 4, 5];
//! Serial.run(Parts::new(&mut data, 2), |i, part| part.iter_mut().for_each(|x| *x += 10 * i));
//! assert_eq!(data, [1, 2, 13, 14, 25]);
//! ```

/// Work that can be cut in two between any of its parts.
pub trait Split: Send + Sized {
    /// What one call of the function receives.
    type Part;
    /// Number of parts.
    fn len(&self) -> usize;
    /// Whether there is nothing to do.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Parts `..mid` and parts `mid..`. `mid` is at most [`Split::len`].
    fn split_at(self, mid: usize) -> (Self, Self);
    /// Takes the first part off; `None` if there is none.
    fn next(&mut self) -> Option<Self::Part>;
}

/// A slice cut into parts of equal length; the last one may be shorter.
#[derive(Debug)]
pub struct Parts<'a, T> {
    data: &'a mut [T],
    size: usize,
}

impl<'a, T> Parts<'a, T> {
    /// Cuts `data` every `size` elements. A `size` of zero counts as one.
    #[must_use]
    pub fn new(data: &'a mut [T], size: usize) -> Self {
        Self { data, size: size.max(1) }
    }
}

impl<'a, T: Send> Split for Parts<'a, T> {
    type Part = &'a mut [T];

    fn len(&self) -> usize {
        self.data.len().div_ceil(self.size)
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let at = mid.saturating_mul(self.size).min(self.data.len());
        let (a, b) = self.data.split_at_mut(at);
        (Self { data: a, size: self.size }, Self { data: b, size: self.size })
    }

    fn next(&mut self) -> Option<Self::Part> {
        if self.data.is_empty() {
            return None;
        }
        let data = core::mem::take(&mut self.data);
        let (part, rest) = data.split_at_mut(self.size.min(data.len()));
        self.data = rest;
        Some(part)
    }
}

/// Two kinds of work whose parts go together, pairwise; the shorter one decides the number.
impl<A: Split, B: Split> Split for (A, B) {
    type Part = (A::Part, B::Part);

    fn len(&self) -> usize {
        self.0.len().min(self.1.len())
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        let (a0, a1) = self.0.split_at(mid);
        let (b0, b1) = self.1.split_at(mid);
        ((a0, b0), (a1, b1))
    }

    fn next(&mut self) -> Option<Self::Part> {
        if self.len() == 0 {
            return None;
        }
        Some((self.0.next()?, self.1.next()?))
    }
}

/// Runs a function over the parts of some work, in any order, on as many threads as it likes.
///
/// # Example
///
/// Threads that are started for each run: simple, not quick.
///
/// ```
/// use k3_core::exec::{Executor, Parts, Split};
///
/// struct Threads(usize);
///
/// impl Executor for Threads {
///     fn width(&self) -> usize {
///         self.0
///     }
///
///     fn run<S: Split>(&self, work: S, f: impl Fn(usize, S::Part) + Sync) {
///         let share = |mut work: S, first: usize| {
///             let mut i = first;
///             while let Some(part) = work.next() {
///                 f(i, part);
///                 i += 1;
///             }
///         };
///         let share = &share;
///         std::thread::scope(|scope| {
///             let (mut rest, mut first) = (work, 0);
///             for threads in (2..=self.0).rev() {
///                 let len = rest.len() / threads;
///                 let (mine, others) = rest.split_at(len);
///                 scope.spawn(move || share(mine, first));
///                 // The second half goes on counting where it was cut off.
///                 (rest, first) = (others, first + len);
///             }
///             share(rest, first);
///         });
///     }
/// }
///
/// let mut data = [0; 1000];
/// Threads(3).run(Parts::new(&mut data, 7), |i, part| part.fill(i));
/// assert!((0..1000).all(|x| data[x] == x / 7));
/// ```
pub trait Executor: Sync {
    /// How many parts can run at the same time; kernels size their parts by it. Results never
    /// depend on it.
    fn width(&self) -> usize;

    /// Calls `f(i, part_i)` once for every part of `work` and returns when all calls have returned.
    ///
    /// There may be many more parts than [`Executor::width`]. Their numbers count from the front of the whole
    /// work: after [`split_at(mid)`](Split::split_at) those of the second half start at `mid`. A part for
    /// which `f` is not called cannot be noticed, and results are wrong. `run` is never called out of an `f`.
    fn run<S: Split>(&self, work: S, f: impl Fn(usize, S::Part) + Sync);
}

/// One thread: the parts in order.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Executor for Serial {
    fn width(&self) -> usize {
        1
    }

    fn run<S: Split>(&self, mut work: S, f: impl Fn(usize, S::Part) + Sync) {
        let mut i = 0;
        while let Some(part) = work.next() {
            f(i, part);
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn parts_cover_the_slice_once_however_they_are_split() {
        for len in 0..20 {
            for size in 0..7 {
                for mid in 0..=Parts::new(&mut std::vec![0u8; len], size).len() {
                    let mut data = std::vec![0u8; len];
                    let (mut a, mut b) = Parts::new(&mut data, size).split_at(mid);
                    let mut seen = 0;
                    while let Some(p) = a.next().or_else(|| b.next()) {
                        seen += 1;
                        p.iter_mut().for_each(|x| *x += 1);
                    }
                    assert_eq!(seen, len.div_ceil(size.max(1)));
                    assert!(data.iter().all(|&x| x == 1), "len {len} size {size} mid {mid}");
                }
            }
        }
    }

    #[test]
    fn pairs_stay_together() {
        let (mut a, mut b): (Vec<u32>, Vec<u32>) = ((0..6).collect(), (0..3).collect());
        Serial.run((Parts::new(&mut a, 2), Parts::new(&mut b, 1)), |i, (x, y)| {
            assert_eq!((x[0] as usize, y[0] as usize), (2 * i, i));
            y[0] += x[1];
        });
        assert_eq!(b, [1, 4, 7]);
    }
}
