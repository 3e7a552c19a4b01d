//! Time as it passes for somebody who waits.
//!
//! A process can be stopped and continued, and a busy machine may not run it for a while. In such a time no disk
//! failed to answer: the answer may have been there all the while, and the thread that has it may come to say so
//! only after the one that waits for it. So whoever waits looks at the clock again and again, and between two
//! looks no more than [`STEP`] passes.

use std::time::{Duration, Instant};

/// What passes between two looks at most: twice the longest pause of those who wait.
const STEP: Duration = Duration::from_millis(100);

/// A clock that stands still while nobody looks at it.
#[derive(Debug)]
pub(super) struct Clock {
    looked: Instant,
    passed: Duration,
}

impl Clock {
    /// A clock that starts now.
    pub(super) fn new() -> Self {
        Self { looked: Instant::now(), passed: Duration::ZERO }
    }

    /// How much time has passed since it started.
    pub(super) fn look(&mut self) -> Duration {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Duration {
        self.passed += now.saturating_duration_since(self.looked).min(STEP);
        self.looked = now;
        self.passed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_pause_is_one_step() {
        let mut clock = Clock::new();
        let start = clock.looked;
        let at = |clock: &mut Clock, millis| clock.look_at(start + Duration::from_millis(millis)).as_millis();
        assert_eq!([at(&mut clock, 0), at(&mut clock, 50), at(&mut clock, 120)], [0, 50, 120]);
        // Stopped for an hour, and continued.
        assert_eq!(at(&mut clock, 3_600_000), 220);
        assert_eq!(at(&mut clock, 3_600_050), 270);
        // It never goes back.
        assert_eq!(at(&mut clock, 7), 270);
    }
}
