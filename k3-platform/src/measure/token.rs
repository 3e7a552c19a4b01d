//! What a token takes on a machine whose disk and kernels were measured.

use crate::checkpoint::Checkpoint;
use crate::plan::Plan;

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
