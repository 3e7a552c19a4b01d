//! `.npy` files, written as their values come.

use crate::output::Output;
use std::io::Write as _;
use std::marker::PhantomData;

/// A number such a file may hold.
pub(crate) trait Element: Copy {
    /// Its type, as the header writes it.
    const DESCR: &'static str;
    /// Its bytes in the file.
    fn bytes(self) -> impl AsRef<[u8]>;
}

impl Element for f32 {
    const DESCR: &'static str = "<f4";
    fn bytes(self) -> impl AsRef<[u8]> {
        self.to_le_bytes()
    }
}

impl Element for f64 {
    const DESCR: &'static str = "<f8";
    fn bytes(self) -> impl AsRef<[u8]> {
        self.to_le_bytes()
    }
}

/// A file of numbers.
#[derive(Debug)]
pub(crate) struct Npy<T> {
    values: PhantomData<T>,
    out: Output,
}

impl<T: Element> Npy<T> {
    /// Starts a file of this shape.
    pub(crate) fn new(out: Output, shape: &[usize]) -> std::io::Result<Self> {
        let mut this = Self { values: PhantomData, out };
        let mut dims = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        if shape.len() == 1 {
            // Python's tuple of one.
            dims.push(',');
        }
        let mut header = format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({dims}), }}", T::DESCR);
        // Magic, version and length take ten bytes; the data starts on a multiple of 64, after a
        // line feed.
        let padded = (10 + header.len() + 1).next_multiple_of(64) - 10;
        header.extend(std::iter::repeat_n(' ', padded - 1 - header.len()));
        header.push('\n');
        let len = u16::try_from(header.len()).map_err(|_| std::io::ErrorKind::InvalidInput)?;
        this.out.write_all(b"\x93NUMPY\x01\x00")?;
        this.out.write_all(&len.to_le_bytes())?;
        this.out.write_all(header.as_bytes())?;
        Ok(this)
    }

    /// Appends values, row-major.
    pub(crate) fn write(&mut self, values: &[T]) -> std::io::Result<()> {
        values.iter().try_for_each(|v| self.out.write_all(v.bytes().as_ref()))
    }

    /// Puts the file in its place.
    pub(crate) fn finish(self) -> std::io::Result<()> {
        self.out.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_says_what_follows_and_the_data_is_aligned() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.npy");
        let mut npy = Npy::new(Output::create(&path).unwrap(), &[2, 3]).unwrap();
        npy.write(&[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        npy.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() % 64, 24);
        assert!(bytes[..bytes.len() - 24].ends_with(b"\n") && bytes.starts_with(b"\x93NUMPY"));
        let header = String::from_utf8_lossy(&bytes[10..bytes.len() - 24]).into_owned();
        assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"), "{header}");
    }
}
