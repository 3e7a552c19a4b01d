//! Budgets to try one after another.

/// Budgets from `floor`, the least that can hold a request, to what `everything` resident takes, or to
/// `most` if that is less: the two ends, and between them the powers of two of a gigabyte (10^9 bytes)
/// that are not close to either. Only `most`, which will be refused, if it is below the floor.
///
/// ```
/// use k3_platform::ladder::rungs;
/// let giga = 1_000_000_000;
/// assert_eq!(rungs(giga * 6 / 10, 12 * giga, u64::MAX), [600, 1000, 2000, 4000, 8000, 12_000].map(|m| m * 1_000_000));
/// ```
#[must_use]
pub fn rungs(floor: u64, everything: u64, most: u64) -> Vec<u64> {
    const GIGA: u64 = 1_000_000_000;
    let top = everything.max(floor).min(most);
    if top <= floor {
        return vec![top];
    }
    // A fifth more than the floor is another budget; less is the same one again.
    let apart = |low: u64, high: u64| high - low > high / 5;
    // 10^9 halves nine times without a rest, which is where a model of some megabytes begins.
    let halves = (1..=9).rev().map(|n| GIGA >> n);
    let powers = halves.chain((0..34).map(|n| GIGA << n)).filter(|&p| p > floor && p < top);
    let between = powers.filter(|&p| apart(floor, p) && apart(p, top));
    [floor].into_iter().chain(between).chain([top]).collect()
}

#[cfg(test)]
mod tests {
    use super::rungs;

    #[test]
    fn rungs_rise_from_the_floor_to_the_top() {
        let sizes = [0, 1, 15_000_000, 15_625_000, 600_000_000, 1_000_000_000, 1_130_000_000_000, u64::MAX];
        for floor in sizes {
            for everything in sizes {
                for most in sizes {
                    let rungs = rungs(floor, everything, most);
                    let case = format!("{floor} {everything} {most}: {rungs:?}");
                    assert!(rungs.is_sorted_by(|a, b| a < b), "{case}");
                    let top = everything.max(floor).min(most);
                    assert_eq!(rungs.last(), Some(&top), "{case}");
                    assert_eq!(rungs[0], floor.min(top), "{case}");
                }
            }
        }
        let tiny = rungs(15_300_000, 40_000_000, u64::MAX);
        assert_eq!(tiny, [15_300_000, 31_250_000, 40_000_000]);
        assert_eq!(rungs(600, 700, 500), [500]);
    }
}
