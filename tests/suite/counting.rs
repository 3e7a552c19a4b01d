//! An allocator that counts, for each thread on its own: other tests run at the same time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Constant and without a destructor, so that using it never allocates.
    static CALLS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, with a look at how often it is asked.
struct Counting;

fn count(bytes: usize) {
    // A thread that is ending has no counter any more and nobody who reads it.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
    let _ = BYTES.try_with(|sum| sum.set(sum.get().saturating_add(bytes as u64)));
}

// SAFETY: every call is handed on to `System` with the arguments it came with, and what `System`
// answers is what the caller gets; counting touches neither.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: as for `alloc`; `old` came from `System`, as all memory here does.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: `old` came from `System` with this layout, as all memory here does.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `f` returns, and how often it asked for memory on this thread.
pub(crate) fn allocations<T>(f: impl FnOnce() -> T) -> (T, u64) {
    let before = CALLS.get();
    let value = f();
    (value, CALLS.get() - before)
}

/// How many bytes `f` asked for on this thread, all requests together.
pub(crate) fn bytes_allocated(f: impl FnOnce()) -> u64 {
    let before = BYTES.get();
    f();
    BYTES.get() - before
}
