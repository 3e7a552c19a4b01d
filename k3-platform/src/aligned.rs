//! Owned memory that starts on a page, is zero at first, and goes back to the system when dropped.
//!
//! The general-purpose allocator keeps what it frees and does not align to pages. A budget that is a
//! promise needs the first to be false, and direct reads need the second to be true, so buffers are
//! anonymous mappings of their own. A page that was never touched costs no resident memory.
//!
//! This is the only module of the crate with `unsafe` in it.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use k3_core::carve::Line;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes to whose multiple every buffer is aligned at least: the smallest page of any Linux machine.
pub const ALIGNMENT: usize = 4096;

/// Bytes of a large page, where there are any.
const HUGE: usize = 2 << 20;

/// Stands for the address of an empty buffer, so that it is as aligned as any other.
#[repr(align(4096))]
struct Page;

const _: () = assert!(align_of::<Page>() == ALIGNMENT);

/// The system has no memory of this size to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocError {
    /// Bytes asked for; `usize::MAX` if the size did not fit the address space.
    pub bytes: usize,
}

impl std::fmt::Display for AllocError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the system refused {} bytes of memory", self.bytes)
    }
}

impl std::error::Error for AllocError {}

/// A buffer of bytes with a mapping of its own.
///
/// Reads as a slice of exactly the length asked for. The start is a multiple of [`ALIGNMENT`], for
/// the empty buffer as well.
pub struct AlignedBuf {
    start: NonNull<u8>,
    /// Bytes; zero means that nothing is mapped.
    len: usize,
}

// SAFETY: the mapping is private to this value and plain memory; no thread is special to it.
unsafe impl Send for AlignedBuf {}
// SAFETY: a shared reference only gives out shared slices; there is no interior mutability.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// A buffer of no bytes, which costs nothing and cannot fail.
    #[must_use]
    pub const fn empty() -> Self {
        Self { start: NonNull::<Page>::dangling().cast(), len: 0 }
    }

    /// A buffer of `len` bytes, all zero. Large ones ask for large pages, see
    /// [`advise_huge`](Self::advise_huge).
    ///
    /// # Errors
    /// [`AllocError`] if the system refuses: out of address space, over `RLIMIT_AS` or
    /// `RLIMIT_DATA`, or more than the kernel will commit.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        if len == 0 {
            return Ok(Self::empty());
        }
        let refused = AllocError { bytes: len };
        // Room for rounding up to a page of any size, so that the kernel's own rounding cannot wrap.
        if len > isize::MAX as usize - (1 << 20) {
            return Err(refused);
        }
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose free addresses, so no memory
        // in use is touched.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let start = start.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or(refused)?;
        let buf = Self { start, len };
        if len >= 2 * HUGE {
            buf.advise_huge();
        }
        Ok(buf)
    }

    /// A buffer of `lines` lines of 64 bytes, all zero: what the core's sizes are measured in.
    ///
    /// # Errors
    /// [`AllocError`] as for [`AlignedBuf::zeroed`], also if the size overflows.
    pub fn zeroed_lines(lines: usize) -> Result<Self, AllocError> {
        let bytes = lines.checked_mul(Line::BYTES).ok_or(AllocError { bytes: usize::MAX })?;
        Self::zeroed(bytes)
    }

    /// The whole lines of the buffer; bytes after the last whole line are left out.
    #[must_use]
    pub fn lines(&self) -> &[Line] {
        let whole = self.len - self.len % Line::BYTES;
        bytemuck::cast_slice(&self[..whole])
    }

    /// The whole lines of the buffer, to write; bytes after the last whole line are left out.
    #[must_use]
    pub fn lines_mut(&mut self) -> &mut [Line] {
        let whole = self.len - self.len % Line::BYTES;
        bytemuck::cast_slice_mut(&mut self[..whole])
    }

    /// Asks for large pages, which make long walks over the buffer cheaper. A hint: a kernel that
    /// declines changes nothing. A touch may then make a large page (2 MiB) resident at once, but never
    /// more than the buffer.
    pub fn advise_huge(&self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: the range is exactly this value's own mapping, and this advice does not change
        // what the memory holds.
        let _declined = unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage) };
    }
}

impl Default for AlignedBuf {
    fn default() -> Self {
        Self::empty()
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is the start of a readable mapping of `len` bytes that lives as long as
        // `self` (or is aligned and dangling, with `len` zero); the kernel zeroed it, so every byte
        // is initialised, and `&self` keeps writers out.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the mapping is writable and `&mut self` is the only way to it.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len == 0 {
            return;
        }
        // SAFETY: the range is exactly what `zeroed` mapped, it is unmapped once, and no slice of it
        // outlives `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of a mapping of our own");
    }
}

impl std::fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AlignedBuf").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_zero_aligned_and_writable() {
        for len in [0, 1, 63, 64, 65, 4095, 4096, 4097, 3 << 20] {
            let mut buf = AlignedBuf::zeroed(len).unwrap();
            buf.advise_huge();
            assert_eq!((buf.len(), buf.lines().len()), (len, len / 64));
            assert!(buf.as_ptr().addr().is_multiple_of(ALIGNMENT), "len {len}");
            assert!(buf.iter().all(|&b| b == 0));
            buf.fill(7);
            assert!(buf.iter().all(|&b| b == 7));
            buf.lines_mut().fill(Line::ZERO);
            assert_eq!(buf.iter().filter(|&&b| b == 7).count(), len % 64);
        }
        assert_eq!(AlignedBuf::zeroed_lines(3).unwrap().len(), 192);
    }

    #[test]
    fn sizes_nobody_has_are_errors() {
        for bytes in [usize::MAX, isize::MAX as usize, isize::MAX as usize - 4096, 1 << 60] {
            assert_eq!(AlignedBuf::zeroed(bytes).unwrap_err(), AllocError { bytes });
        }
        assert_eq!(AlignedBuf::zeroed_lines(usize::MAX / 2).unwrap_err(), AllocError { bytes: usize::MAX });
    }

    #[test]
    fn buffers_move_between_threads() {
        let mut buf = AlignedBuf::zeroed(100).unwrap();
        let buf = std::thread::spawn(move || {
            buf[99] = 1;
            buf
        });
        assert_eq!(buf.join().unwrap()[99], 1);
    }
}
