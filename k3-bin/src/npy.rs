//! `.npy` files, written as their values come.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

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

/// A file that appears under its name only when it is complete. What is no regular file (a pipe, a
/// device) cannot appear: it is written as it is.
#[derive(Debug)]
pub(crate) struct Npy<T> {
    values: PhantomData<T>,
    out: BufWriter<File>,
    /// Where the bytes are until they are complete, and where they go then.
    unfinished: Option<(PathBuf, PathBuf)>,
}

impl<T: Element> Npy<T> {
    /// Starts a file of this shape.
    pub(crate) fn create(path: &Path, shape: &[usize]) -> std::io::Result<Self> {
        use std::io::{Error, ErrorKind};
        let (out, unfinished) = match std::fs::metadata(path) {
            Ok(there) if there.is_dir() => return Err(Error::from(ErrorKind::IsADirectory)),
            Ok(there) if !there.is_file() => (File::options().write(true).open(path)?, None),
            there => {
                // What a link leads to is replaced, not the link; and only what may be written.
                let target = match there {
                    Ok(_) => {
                        File::options().append(true).open(path)?;
                        path.canonicalize()?
                    }
                    Err(_) => path.to_owned(),
                };
                if target.file_name().is_none() {
                    return Err(Error::new(ErrorKind::InvalidInput, "this is not the name of a file"));
                }
                let temporary = target.with_file_name(format!(".k3-{}.part", std::process::id()));
                (File::options().write(true).create_new(true).open(&temporary)?, Some((temporary, target)))
            }
        };
        let mut this = Self { values: PhantomData, out: BufWriter::new(out), unfinished };
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
    pub(crate) fn finish(mut self) -> std::io::Result<()> {
        self.out.flush()?;
        if let Some((temporary, target)) = &self.unfinished {
            self.out.get_ref().sync_all()?;
            std::fs::rename(temporary, target)?;
        }
        self.unfinished = None;
        Ok(())
    }
}

impl<T> Drop for Npy<T> {
    fn drop(&mut self) {
        if let Some((temporary, _)) = &self.unfinished {
            // Best effort: the run is failing already.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_only_when_complete_and_its_data_is_aligned() {
        let dir = std::env::temp_dir().join(format!("k3-npy-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("x.npy");
        let mut npy = Npy::create(&path, &[2, 3]).unwrap();
        npy.write(&[0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        assert!(!path.exists());
        npy.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len() % 64, 24);
        assert!(bytes[..bytes.len() - 24].ends_with(b"\n") && bytes.starts_with(b"\x93NUMPY"));
        let header = String::from_utf8_lossy(&bytes[10..bytes.len() - 24]).into_owned();
        assert!(header.starts_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"), "{header}");
        drop(Npy::<f64>::create(&path, &[1]).unwrap());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
