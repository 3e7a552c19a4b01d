//! A checksum for what this program writes and reads back: XXH64.
//!
//! It finds damage, at the speed of memory; it is no defence against somebody who means harm.
//!
//! **Source.** Y. Collet, the xxHash specification, version 0.1.1, algorithm XXH64. The tests hold values
//! of its reference implementation.

use xxhash_rust::xxh64::{Xxh64, xxh64};

/// XXH64 with seed 0 of bytes that come in parts.
#[derive(Clone)]
pub struct Checksum(Xxh64);

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checksum({:016x})", self.finish())
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self(Xxh64::new(0))
    }
}

impl Checksum {
    /// The checksum of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u64 {
        xxh64(bytes, 0)
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        for (text, sum) in
            [(&b""[..], 0xef46_db37_51d8_e999), (b"a", 0xd24e_c4f1_a98c_6e5b), (b"abc", 0x44bc_2cf5_ad77_0999)]
        {
            assert_eq!(Checksum::of(text), sum);
        }
    }

    #[test]
    fn cuts_do_not_matter_and_every_byte_does() {
        let bytes: Vec<u8> = (0..200u8).map(|i| i.wrapping_mul(37)).collect();
        for len in 0..=bytes.len() {
            let whole = Checksum::of(&bytes[..len]);
            for cut in 0..=len {
                let mut sum = Checksum::default();
                sum.update(&bytes[..cut]);
                sum.update(&bytes[cut..len]);
                assert_eq!(sum.finish(), whole, "{len} at {cut}");
                let mut other = bytes[..len].to_vec();
                if let Some(byte) = other.get_mut(cut) {
                    *byte ^= 1;
                    assert_ne!(Checksum::of(&other), whole);
                }
            }
        }
    }
}
