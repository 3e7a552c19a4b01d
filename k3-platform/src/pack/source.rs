//! What a pack is made of: which tensors in which order, and digests that tell models apart.

use crate::checkpoint::Checkpoint;
use crate::error::Error;
use crate::io::{ReadAt, read_exact_at};
use crate::segment::Source;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a layer's weights that go into the digest.
const SAMPLE: usize = 4096;

/// Digests of a model's config, headers and weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digests {
    /// Of `config.json`.
    pub config: [u8; 16],
    /// Of the lengths and headers of the shards.
    pub headers: [u8; 16],
    /// Of samples of the weights.
    pub samples: [u8; 16],
}

impl Digests {
    /// Those of a checkpoint. Reads a block of each layer, the same in every run, and so like a header.
    ///
    /// # Errors
    /// Those of opening the shards and of the reads.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let mut headers = Vec::new();
        for shard in checkpoint.index().shards() {
            headers.extend_from_slice(&shard.digest.to_le_bytes());
            headers.extend_from_slice(&shard.len.to_le_bytes());
        }
        let mut samples = Vec::new();
        // Most shards have several layers, one behind the other.
        let mut open: Option<(u16, Arc<dyn ReadAt>)> = None;
        for source in checkpoint.shard_walk().iter().filter_map(|layer| layer.last()) {
            let len = source.rows * source.row_bytes;
            let wanted = len.min(SAMPLE);
            let start = samples.len();
            samples.resize(start + wanted, 0);
            let shard = source.place.shard;
            let file = match open.take().filter(|(number, _)| *number == shard) {
                Some((_, file)) => file,
                None => checkpoint.shard(shard)?,
            };
            let offset = source.place.offset + ((len - wanted) / 2) as u64;
            read_exact_at(&*file, &mut samples[start..], offset)?;
            open = Some((shard, file));
        }
        Ok(Self {
            config: checkpoint.config_digest().to_le_bytes(),
            headers: xxh3_128(&headers).to_le_bytes(),
            samples: xxh3_128(&samples).to_le_bytes(),
        })
    }
}

/// The tensors of a pack, group by group: the embedding, the layers, the head.
pub(super) fn groups(checkpoint: &Checkpoint) -> Vec<Vec<Source>> {
    let mut groups = vec![vec![checkpoint.embedding()]];
    groups.extend_from_slice(checkpoint.shard_walk());
    groups
}
