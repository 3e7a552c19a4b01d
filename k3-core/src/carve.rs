//! One slice from the caller, split into named disjoint parts.
//!
//! Every buffer of the core is carved from memory the caller owns. The unit is a cache line of 64
//! bytes, so every part starts on one: SIMD loads of a part never straddle a line by accident, and
//! alignment is a matter of types and not of luck.
//!
//! ```
//! use k3_core::carve::{Carver, Line};
//!
//! let mut memory = [Line::ZERO; 3];
//! let mut carver = Carver::new(&mut memory);
//! let (bytes, floats) = (carver.take::<u8>(100)?, carver.take::<f32>(10)?);
//! assert_eq!((bytes.len(), floats.len()), (100, 10)); // two lines and one
//! assert!(carver.take::<u8>(1).is_err());
//! # Ok::<(), k3_core::carve::BufferError>(())
//! ```
//!
//! A [`Line`] can be carved itself, so one buffer serves for all that a model needs:
//!
//! ```
//! use k3_core::carve::{BufferError, Carver, Line};
//! use k3_core::config::ModelConfig;
//! use k3_core::model::{Extent, State, Workspace};
//!
//! fn carve(memory: &mut [Line], config: &ModelConfig) -> Result<(), BufferError> {
//!     let extent = Extent { chunk: 4, context: 32, width: 1 };
//!     let state = State::lines(config, extent.context).ok_or(BufferError::Overflow)?;
//!     let workspace = Workspace::lines(config, extent).ok_or(BufferError::Overflow)?;
//!
//!     let mut carver = Carver::new(memory);
//!     let mut state = State::new(carver.take(state)?, config, extent.context)?;
//!     let mut workspace = Workspace::new(carver.take(workspace)?, config, extent)?;
//!     let logits = carver.take::<f32>(config.vocab_size)?;
//!     // ...
//! #   assert!(state.position() == 0 && workspace.extent() == extent && logits.len() == config.vocab_size);
//! #   let _ = (&mut state, &mut workspace);
//!     Ok(())
//! }
//! # let config = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tiny/config.json"));
//! # let config = ModelConfig::parse(config).unwrap();
//! # carve(&mut vec![Line::ZERO; 4096], &config).unwrap();
//! # assert!(matches!(carve(&mut [], &config), Err(BufferError::TooSmall { given: 0, .. })));
//! ```

use bytemuck::{Pod, Zeroable};

/// Sixty-four bytes on a 64-byte border: the unit in which workspaces and states are measured.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct Line([u64; 8]);

impl Line {
    /// Bytes in a line.
    pub const BYTES: usize = 64;
    /// A line of zeros, for building buffers.
    pub const ZERO: Self = Self([0; 8]);

    /// Whether a line can be looked at as a whole number of `T`. Asked while compiling.
    const fn holds<T>() -> bool {
        size_of::<T>() > 0 && Self::BYTES.is_multiple_of(size_of::<T>()) && align_of::<T>() <= align_of::<Self>()
    }

    /// Lines that hold `count` elements of `T`; `None` if that overflows.
    #[must_use]
    pub const fn of<T>(count: usize) -> Option<usize> {
        match count.checked_mul(size_of::<T>()) {
            Some(bytes) => Some(bytes.div_ceil(Self::BYTES)),
            None => None,
        }
    }
}

/// The caller's slice is shorter than the sizes its config asks for, or those sizes overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BufferError {
    /// The slice has too few lines. Both numbers count from its front.
    TooSmall {
        /// Lines that would do. Of [`Carver::take`]: up to the end of the part that did not fit.
        needed: usize,
        /// Lines that were given.
        given: usize,
    },
    /// The size does not fit the address space.
    Overflow,
}

impl core::fmt::Display for BufferError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match *self {
            Self::TooSmall { needed, given } => {
                write!(f, "the buffer has {given} lines of 64 bytes, {needed} are needed")
            }
            Self::Overflow => f.write_str("the buffer's size does not fit the address space"),
        }
    }
}

impl core::error::Error for BufferError {}

/// Refuses memory that is shorter than `lines`, which is `None` if their number does not fit the address space.
pub(crate) fn enough(memory: &[Line], lines: Option<usize>) -> Result<(), BufferError> {
    match lines {
        None => Err(BufferError::Overflow),
        Some(needed) if memory.len() < needed => Err(BufferError::TooSmall { needed, given: memory.len() }),
        Some(_) => Ok(()),
    }
}

/// Hands out parts of one slice, front to back.
#[derive(Debug)]
pub struct Carver<'a> {
    rest: &'a mut [Line],
    taken: usize,
}

impl<'a> Carver<'a> {
    /// Starts carving at the front of `lines`.
    #[must_use]
    pub fn new(lines: &'a mut [Line]) -> Self {
        Self { rest: lines, taken: 0 }
    }

    /// The next `count` elements of `T`, starting on a line of their own. Contents are whatever the
    /// caller's memory held.
    ///
    /// # Errors
    /// [`BufferError`] if not enough of the slice is left. Its numbers are of the whole slice, with what was
    /// taken before. The carver is used up then, also for smaller parts.
    pub fn take<T: Pod>(&mut self, count: usize) -> Result<&'a mut [T], BufferError> {
        const { assert!(Line::holds::<T>(), "a line is not a whole number of such elements") };
        let lines = Line::of::<T>(count).ok_or(BufferError::Overflow)?;
        let given = self.taken.saturating_add(self.rest.len());
        let needed = self.taken.checked_add(lines).ok_or(BufferError::Overflow)?;
        let rest = core::mem::take(&mut self.rest);
        let Some((part, rest)) = rest.split_at_mut_checked(lines) else {
            return Err(BufferError::TooSmall { needed, given });
        };
        self.rest = rest;
        self.taken = needed;
        // So many lines hold `count` elements; asked in a way that has no panic in it.
        bytemuck::cast_slice_mut::<Line, T>(part).get_mut(..count).ok_or(BufferError::Overflow)
    }
}

/// Adds up what a [`Carver`] would take, in the same order and with the same rounding.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally(usize);

impl Tally {
    /// Nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(0)
    }

    /// Adds a part of `count` elements of `T`; `None` if the sum overflows.
    #[must_use]
    pub const fn add<T>(self, count: usize) -> Option<Self> {
        const { assert!(Line::holds::<T>(), "a line is not a whole number of such elements") };
        match Line::of::<T>(count) {
            Some(lines) => match self.0.checked_add(lines) {
                Some(sum) => Some(Self(sum)),
                None => None,
            },
            None => None,
        }
    }

    /// The sum, in lines.
    #[must_use]
    pub const fn lines(self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_aligned_and_counted() {
        let mut memory = [Line::ZERO; 4];
        let mut carver = Carver::new(&mut memory);
        let a = carver.take::<f32>(17).unwrap();
        let b = carver.take::<f64>(1).unwrap();
        assert_eq!((a.len(), b.len()), (17, 1));
        assert!(a.as_ptr().addr().is_multiple_of(64) && b.as_ptr().addr().is_multiple_of(64));
        let tally = Tally::new().add::<f32>(17).unwrap().add::<f64>(1).unwrap();
        assert_eq!(tally.lines(), 3);
        assert_eq!(carver.take::<u8>(65).unwrap_err(), BufferError::TooSmall { needed: 5, given: 4 });
        assert!(Line::of::<f64>(usize::MAX / 4).is_none());
    }
}
