//! The seam at which a test decides which reader goes on.
//!
//! Which of several reads answers first is for the disk and the system to say, and no two runs are the
//! same. A [`Source`](super::Source) with a [`Schedule`] says it instead: every place at which readers
//! can overtake each other, or the consumer them, asks it. One that lets a single reader run at a time
//! makes a run a function of its choices, so that a run that went wrong can be had again.
//!
//! Only tests have one; without it each of these places costs a look at an empty `Option`.

/// Decides who goes on. Its methods are called on the threads they are about and may block them.
pub trait Schedule: Send + Sync {
    /// Files that a set may have open, if that is less than it was told.
    fn descriptors(&self) -> usize;

    /// This reader has taken the job of this number, counted from 0 in the order of submission.
    fn takes(&self, job: u64);

    /// This reader is about to ask a set for an open file: at first, and again whenever it was woken
    /// because it had to wait for one. No lock is held.
    fn asks(&self);

    /// This reader will now sleep until a set has something new for it. The set's lock is held.
    fn sleeps(&self);

    /// All readers that sleep are being woken. The set's lock is held.
    fn wakes(&self);

    /// The consumer has come to a point at which readers may go on meanwhile; it can do nothing else
    /// until an answer has come if it `waits`. `readers` tells how many readers have a job, or nothing
    /// while one of them is still about to take one.
    fn pause(&self, waits: bool, readers: &dyn Fn() -> Option<usize>);
}
