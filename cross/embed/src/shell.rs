//! What the core asks of its surroundings: [`Weights`] from an archive in memory, and an [`Executor`].
//!
//! The checkpoint is one tar file, as it comes from `tar -c` over the release's folder: `config.json`,
//! the shards, `tiktoken.model`. Nothing is copied out of it; a tensor is a range of its bytes.

use crate::Fault;
use k3_core::carve::Carver;
use k3_core::checkpoint::{ExpertTensor, GlobalTensor, Named, Tensor, expected, slot, slot_count};
use k3_core::config::ModelConfig;
use k3_core::exec::{Executor, Split};
use k3_core::model::Weights;
use k3_core::safetensors::Header;
use k3_core::view::{Bf16Matrix, Expert, ExpertId, LayerIndex, MatrixRows, Mxfp4Matrix, TokenId};

/// One after the other: there are no threads here.
pub(crate) struct InOrder;

impl Executor for InOrder {
    fn width(&self) -> usize {
        1
    }

    fn run<S: Split>(&self, mut work: S, f: impl Fn(usize, S::Part) + Sync) {
        let mut i = 0;
        while let Some(part) = work.next() {
            f(i, part);
            i += 1;
        }
    }
}

/// The bytes of a tar archive.
#[derive(Clone, Copy)]
pub(crate) struct Archive<'a>(pub(crate) &'a [u8]);

impl<'a> Archive<'a> {
    /// Each plain file: its name without folders, where it starts, its bytes.
    fn files(self) -> impl Iterator<Item = (&'a [u8], usize, &'a [u8])> {
        let mut at = 0_usize;
        core::iter::from_fn(move || {
            loop {
                let header = self.0.get(at..)?.first_chunk::<512>()?;
                let name = header[..100].split(|&b| b == 0).next().filter(|name| !name.is_empty())?;
                let digits = header[124..136].iter().take_while(|b| b.is_ascii_digit());
                let size = digits.fold(0_usize, |n, d| n.saturating_mul(8).saturating_add(usize::from(d - b'0')));
                let (start, plain) = (at.checked_add(512)?, matches!(header[156], b'0' | 0));
                let bytes = self.0.get(start..start.checked_add(size)?)?;
                at = start.checked_add(size.checked_next_multiple_of(512)?)?;
                if plain {
                    return Some((name.rsplit(|&b| b == b'/').next()?, start, bytes));
                }
            }
        })
    }

    /// The file with this name.
    pub(crate) fn file(self, name: &str) -> Result<&'a [u8], Fault> {
        self.files().find(|file| file.0 == name.as_bytes()).map(|file| file.2).ok_or(Fault::Archive)
    }
}

/// Every tensor of a checkpoint as a range of the archive.
pub(crate) struct Checkpoint<'a> {
    archive: &'a [u8],
    config: &'a ModelConfig,
    /// First byte and length by [`slot`]; a tensor never starts at 0, since a header comes before it.
    places: &'a [[u32; 2]],
}

impl<'a> Checkpoint<'a> {
    /// Reads the shards' headers. The places take memory from `carver`.
    pub(crate) fn open(archive: Archive<'a>, config: &'a ModelConfig, carver: &mut Carver<'a>) -> Result<Self, Fault> {
        let places = carver.take::<[u32; 2]>(slot_count(config))?;
        places.fill([0, 0]);
        for (_, start, shard) in archive.files().filter(|(name, ..)| name.ends_with(b".safetensors")) {
            let (first, rest) = shard.split_first_chunk::<8>().ok_or(Fault::Tensor)?;
            let len = usize::try_from(u64::from_le_bytes(*first)).map_err(|_| Fault::Tensor)?;
            let header = Header::parse(rest.get(..len).ok_or(Fault::Tensor)?, shard.len() as u64)?;
            for entry in header.entries() {
                let entry = entry?;
                let tensor = match Tensor::parse_json(entry.name, config) {
                    Named::Known(tensor) => tensor,
                    Named::Ignored => continue,
                    // Config and shards do not belong together.
                    _ => return Err(Fault::Tensor),
                };
                tensor.accepts(config, entry.dtype.ok_or(Fault::Tensor)?, entry.shape()).map_err(|_| Fault::Tensor)?;
                let place = [(start as u64).saturating_add(entry.begin), entry.len()];
                let [Ok(from), Ok(len)] = place.map(u32::try_from) else { return Err(Fault::Tensor) };
                match places.get_mut(slot(tensor, config)) {
                    Some(place @ [0, _]) => *place = [from, len],
                    _ => return Err(Fault::Tensor),
                }
            }
        }
        let places: &'a [[u32; 2]] = places;
        let there = |tensor| places.get(slot(tensor, config)).is_some_and(|place| place[0] > 0);
        let all = expected(config).all(there);
        if all { Ok(Self { archive: archive.0, config, places }) } else { Err(Fault::Tensor) }
    }

    fn bytes(&self, tensor: Tensor) -> Result<&'a [u8], Fault> {
        let [from, len] = *self.places.get(slot(tensor, self.config)).ok_or(Fault::Tensor)?;
        self.archive.get(from as usize..).and_then(|rest| rest.get(..len as usize)).ok_or(Fault::Tensor)
    }

    fn matrix(&self, tensor: Tensor) -> Result<Bf16Matrix<'a>, Fault> {
        let (rows, cols) = self.shape(tensor)?;
        Bf16Matrix::new(self.bytes(tensor)?, rows, cols).map_err(|_| Fault::Tensor)
    }

    fn shape(&self, tensor: Tensor) -> Result<(usize, usize), Fault> {
        let spec = tensor.spec(self.config);
        let [Ok(rows), Ok(cols)] = [spec.rows(), spec.cols()].map(usize::try_from) else { return Err(Fault::Tensor) };
        Ok((rows, cols))
    }
}

/// All of it is in memory, so each matrix is one block, and nothing has to be read ahead.
impl Weights for Checkpoint<'_> {
    type Error = Fault;

    fn begin(&mut self, _head: bool) -> Result<(), Fault> {
        Ok(())
    }

    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), Fault> {
        let table = Checkpoint::matrix(self, Tensor::Global(GlobalTensor::Embed))?;
        ids.iter().enumerate().for_each(|(i, id)| each(i, table.row(id.get())));
        Ok(())
    }

    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Fault> {
        each(self.bytes(tensor)?);
        Ok(())
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), Fault> {
        each(0, Checkpoint::matrix(self, tensor)?.into());
        Ok(())
    }

    fn request_experts(&mut self, _layer: LayerIndex, _ids: &[ExpertId]) -> Result<(), Fault> {
        Ok(())
    }

    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), Fault> {
        let (inner, latent) = (self.config.moe_intermediate_size, self.config.routed_expert_hidden_size);
        for (i, &id) in ids.iter().enumerate() {
            let matrix = |packed, scale, rows, cols| {
                let part = |part| self.bytes(Tensor::Expert(layer, id, part));
                Mxfp4Matrix::new(part(packed)?, part(scale)?, rows, cols).map_err(|_| Fault::Tensor)
            };
            let w1 = matrix(ExpertTensor::W1Packed, ExpertTensor::W1Scale, inner, latent)?;
            let w2 = matrix(ExpertTensor::W2Packed, ExpertTensor::W2Scale, latent, inner)?;
            let w3 = matrix(ExpertTensor::W3Packed, ExpertTensor::W3Scale, inner, latent)?;
            each(i, Expert { w1, w2, w3 });
        }
        Ok(())
    }
}
