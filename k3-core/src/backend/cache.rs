//! How many columns of a matrix are walked before the next rows are, with one position.
//!
//! The f64 of the panel are read again for every group of rows. Where a block of them stays in the
//! first-level cache beside the rows that stream through it, blocks are faster. Where it does not, what
//! remains of a block is that rows are no longer read from end to end, and whole rows are faster: on a
//! Zen 3 with 32 KiB they were read at 0.86 of the bandwidth of one thread, in blocks at 0.79. A Zen 5 with
//! 48 KiB was measured the other way round. AVX-512 with 32 KiB has not been measured. Which
//! one it is changes no bit of a result.

use core::arch::x86_64::{__cpuid, __cpuid_count, CpuidResult};
use core::sync::atomic::{AtomicUsize, Ordering};

/// Columns of a block: their f64 take 28 KiB.
const BLOCK: usize = 3584;
/// The smallest first-level cache that keeps a block beside two groups of rows (bytes).
const ROOM: usize = 48 << 10;
/// The most columns in one piece: their f64 take half of the smallest second-level cache of a CPU with AVX2
/// (256 KiB). Of the released model's matrices only the dense layer's down projection has more (33,792).
const WHOLE: usize = 16384;

/// Asking the CPU may take a detour through a hypervisor, so it is done once; 0 before that.
static COLUMNS: AtomicUsize = AtomicUsize::new(0);

/// Columns of a block of a product with one position: a multiple of 512.
pub(super) fn columns() -> usize {
    // Threads that come here together find the same.
    let known = COLUMNS.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let columns = choose(first_level());
    COLUMNS.store(columns, Ordering::Relaxed);
    columns
}

/// Runs `check` as on CPUs with small and with large caches, and with many blocks to a row.
///
/// Tests that run beside it get other blocks than they expect, but no other bits.
#[cfg(test)]
pub(super) fn for_each_size(mut check: impl FnMut()) {
    for columns in [WHOLE, BLOCK, 512] {
        COLUMNS.store(columns, Ordering::Relaxed);
        check();
    }
    COLUMNS.store(0, Ordering::Relaxed);
}

/// Columns of a block where the first-level data cache has that many bytes; 0 if it is not known.
const fn choose(cache: usize) -> usize {
    if cache >= ROOM { BLOCK } else { WHOLE }
}

/// Bytes of the first-level data cache, 0 if the CPU does not tell.
fn first_level() -> usize {
    #[allow(unused_unsafe, reason = "these functions became safe in a later Rust than the oldest that builds this")]
    // SAFETY: every CPU that gets here has AVX2, and so the instruction.
    let (intel, amd) = unsafe {
        // "Deterministic cache parameters", and AMD's leaf of the same form, where there are such leaves.
        let extensions = if __cpuid(0x8000_0000).eax >= 0x8000_001d { __cpuid(0x8000_0001).ecx } else { 0 };
        let topology = extensions >> 22 & 1 == 1;
        (
            if __cpuid(0).eax >= 4 { data_cache(|i| __cpuid_count(4, i)) } else { None },
            if topology { data_cache(|i| __cpuid_count(0x8000_001d, i)) } else { None },
        )
    };
    intel.or(amd).unwrap_or(0)
}

/// Bytes of the first-level data cache among the caches that `leaf` lists.
fn data_cache(leaf: impl Fn(u32) -> CpuidResult) -> Option<usize> {
    // A list ends with type 0; no CPU has this many caches.
    for i in 0..16 {
        let CpuidResult { eax, ebx, ecx, .. } = leaf(i);
        match (eax & 31, eax >> 5 & 7) {
            (0, _) => break,
            (1, 1) => {
                let ways = u64::from(ebx >> 22) + 1;
                let (partitions, line) = (u64::from(ebx >> 12 & 0x3ff) + 1, u64::from(ebx & 0xfff) + 1);
                return usize::try_from(ways * partitions * line * (u64::from(ecx) + 1)).ok();
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_is_found_in_the_list_of_a_cpu() {
        let cache = |eax, ebx, ecx| CpuidResult { eax, ebx, ecx, edx: 0 };
        // As a Zen 3 lists them: data, instructions, second level.
        let zen3 = [cache(0x121, 0x1c0_003f, 0x3f), cache(0x122, 0x1c0_003f, 0x3f), cache(0x143, 0x1c0_003f, 0x3ff)];
        let list = |i: u32| zen3.get(i as usize).copied().unwrap_or(cache(0, 0, 0));
        assert_eq!(data_cache(list), Some(32 << 10));
        // Twelve ways of 64 sets, behind the instructions.
        let ice_lake = [cache(0x122, 0x1c0_003f, 0x3f), cache(0x121, 0x2c0_003f, 0x3f)];
        assert_eq!(data_cache(|i| ice_lake.get(i as usize).copied().unwrap_or(cache(0, 0, 0))), Some(48 << 10));
        assert_eq!(data_cache(|_| cache(0, 0, 0)), None);
        assert_eq!(data_cache(|_| cache(0x143, u32::MAX, u32::MAX)), None, "a list without an end");
    }

    #[test]
    fn blocks_are_for_caches_that_hold_them() {
        assert_eq!([0, 32 << 10, 48 << 10].map(choose), [WHOLE, WHOLE, BLOCK]);
        assert!([0, usize::MAX].map(choose).iter().all(|columns| columns.is_multiple_of(512)));
        assert!(columns() > 0);
    }
}
