//! A checksum for what this program writes and reads back: XXH64.
//!
//! It finds damage, at the speed of memory; it is no defence against somebody who means harm.
//!
//! **Source.** Y. Collet, the xxHash specification, version 0.1.1, algorithm XXH64. The tests hold values
//! of its reference implementation.

const P1: u64 = 0x9e37_79b1_85eb_ca87;
const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
const P3: u64 = 0x1656_67b1_9e37_79f9;
const P4: u64 = 0x85eb_ca77_c2b2_ae63;
const P5: u64 = 0x27d4_eb2f_1656_67c5;

/// Bytes of a stripe.
const STRIPE: usize = 32;

/// XXH64 with seed 0 of bytes that come in parts.
#[derive(Debug, Clone)]
pub struct Checksum {
    lanes: [u64; 4],
    /// The beginning of a stripe.
    held: [u8; STRIPE],
    len: u64,
}

impl Default for Checksum {
    fn default() -> Self {
        Self { lanes: [P1.wrapping_add(P2), P2, 0, 0u64.wrapping_sub(P1)], held: [0; STRIPE], len: 0 }
    }
}

fn round(lane: u64, input: u64) -> u64 {
    lane.wrapping_add(input.wrapping_mul(P2)).rotate_left(31).wrapping_mul(P1)
}

impl Checksum {
    /// The checksum of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> u64 {
        let mut sum = Self::default();
        sum.update(bytes);
        sum.finish()
    }

    fn stripe(&mut self, stripe: &[u8; STRIPE]) {
        for (lane, word) in self.lanes.iter_mut().zip(stripe.as_chunks::<8>().0) {
            *lane = round(*lane, u64::from_le_bytes(*word));
        }
    }

    /// Takes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        let held = usize::try_from(self.len % STRIPE as u64).unwrap_or(0);
        self.len = self.len.wrapping_add(bytes.len() as u64);
        if held > 0 {
            let (now, later) = bytes.split_at(bytes.len().min(STRIPE - held));
            self.held[held..held + now.len()].copy_from_slice(now);
            if held + now.len() < STRIPE {
                return;
            }
            let stripe = self.held;
            self.stripe(&stripe);
            bytes = later;
        }
        let (stripes, rest) = bytes.as_chunks::<STRIPE>();
        stripes.iter().for_each(|stripe| self.stripe(stripe));
        self.held[..rest.len()].copy_from_slice(rest);
    }

    /// The checksum of all bytes so far.
    #[must_use]
    pub fn finish(&self) -> u64 {
        let [a, b, c, d] = self.lanes;
        let mut hash = P5;
        if self.len >= STRIPE as u64 {
            let (a1, b1, c1, d1) = (a.rotate_left(1), b.rotate_left(7), c.rotate_left(12), d.rotate_left(18));
            hash = a1.wrapping_add(b1).wrapping_add(c1).wrapping_add(d1);
            for lane in self.lanes {
                hash = (hash ^ round(0, lane)).wrapping_mul(P1).wrapping_add(P4);
            }
        }
        hash = hash.wrapping_add(self.len);
        let held = usize::try_from(self.len % STRIPE as u64).unwrap_or(0);
        let (words, rest) = self.held[..held].as_chunks::<8>();
        for word in words {
            hash ^= round(0, u64::from_le_bytes(*word));
            hash = hash.rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
        }
        let (words, rest) = rest.as_chunks::<4>();
        for word in words {
            hash ^= u64::from(u32::from_le_bytes(*word)).wrapping_mul(P1);
            hash = hash.rotate_left(23).wrapping_mul(P2).wrapping_add(P3);
        }
        for &byte in rest {
            hash ^= u64::from(byte).wrapping_mul(P5);
            hash = hash.rotate_left(11).wrapping_mul(P1);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(P2);
        hash = (hash ^ (hash >> 29)).wrapping_mul(P3);
        hash ^ (hash >> 32)
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
