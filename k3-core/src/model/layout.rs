//! Buffers as a table: name, element, dimensions. Size and split come from the same lines.

use crate::carve::{BufferError, Carver, Tally};

/// The product of dimensions, or `None` if it overflows.
pub(crate) fn product(dims: &[usize]) -> Option<usize> {
    dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
}

/// What walks a layout: once to add sizes up, once to hand parts out.
pub(crate) trait Walker<'a> {
    /// A part of `count` elements.
    fn part<T: bytemuck::Pod>(&mut self, count: Option<usize>) -> Result<&'a mut [T], BufferError>;
}

impl<'a> Walker<'a> for Tally {
    fn part<T: bytemuck::Pod>(&mut self, count: Option<usize>) -> Result<&'a mut [T], BufferError> {
        *self = count.and_then(|count| self.add::<T>(count)).ok_or(BufferError::Overflow)?;
        Ok(&mut [])
    }
}

impl<'a> Walker<'a> for Carver<'a> {
    fn part<T: bytemuck::Pod>(&mut self, count: Option<usize>) -> Result<&'a mut [T], BufferError> {
        self.take(count.ok_or(BufferError::Overflow)?)
    }
}
