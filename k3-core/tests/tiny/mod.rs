// A whole model in a few kilobytes of constants, without std: five layers of every kind, widths that
// are no multiple of a register. It says nothing of sense; it is there so that every branch of the
// forward pass can run anywhere (golden bits, the crate's example, the proof that nothing allocates).
//
// Comments instead of inner docs, because the crate's example includes this file as text.

use k3_core::checkpoint::{GlobalTensor, LayerTensor, Tensor, slot};
use k3_core::config::ModelConfig;
use k3_core::model::Weights;
use k3_core::view::{Bf16Matrix, Expert, ExpertId, LayerIndex, MatrixRows, Mxfp4Matrix, TokenId, ViewError};

/// The model's `config.json`.
pub(crate) const CONFIG: &[u8] = include_bytes!("config.json");

/// Numbers whose high bits are random enough for weights; integers only, so that every machine makes
/// the same ones.
const fn next(x: u32) -> u32 {
    x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)
}

/// Little-endian bf16 of either sign between 2^-5 and 2^-1. Two of them also make an f32 of that size.
const fn floats<const N: usize>(mut x: u32) -> [u8; N] {
    let mut out = [0; N];
    let mut i = 0;
    while i + 1 < N {
        x = next(x);
        let (sign, exponent, mantissa) = (x >> 31, 122 + (x >> 29 & 3), x >> 20 & 0x7f);
        [out[i], out[i + 1], ..] = (sign << 15 | exponent << 7 | mantissa).to_le_bytes();
        i += 2;
    }
    out
}

/// `base + r` for a random `r` below `span`.
const fn bytes<const N: usize>(mut x: u32, base: u32, span: u32) -> [u8; N] {
    let mut out = [0; N];
    let mut i = 0;
    while i < N {
        x = next(x);
        [out[i], ..] = (base + (x >> 16) % span).to_le_bytes();
        i += 1;
    }
    out
}

static FLOATS: [u8; 8192] = floats(1);
static NIBBLES: [u8; 2048] = bytes(2, 0, 256);
static SCALES: [u8; 256] = bytes(3, 121, 6);

/// Answers for every tensor with a window of the constants, which starts where its slot says.
pub(crate) struct Tiny<'c> {
    /// Whose tensors these are.
    pub(crate) config: &'c ModelConfig,
    /// Row granules in a block of a matrix.
    pub(crate) block: usize,
}

impl Tiny<'_> {
    fn window<'b>(&self, from: &'b [u8], tensor: Tensor, len: usize) -> &'b [u8] {
        // Even, so that a window into `FLOATS` starts on a number.
        let start = slot(tensor, self.config) * 358 % (from.len() - len + 1) / 2 * 2;
        &from[start..][..len]
    }

    fn len(&self, tensor: Tensor) -> usize {
        // Like some released files, A_log without its padding.
        if let Tensor::Layer(_, LayerTensor::ALog) = tensor {
            return self.config.kda_num_heads * 4;
        }
        usize::try_from(tensor.spec(self.config).bytes()).unwrap_or(usize::MAX)
    }
}

impl Weights for Tiny<'_> {
    type Error = ViewError;

    fn begin(&mut self, _head: bool) -> Result<(), ViewError> {
        Ok(())
    }

    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), ViewError> {
        let tensor = Tensor::Global(GlobalTensor::Embed);
        let table = self.window(&FLOATS, tensor, self.len(tensor));
        let row = self.config.hidden_size * 2;
        for (i, id) in ids.iter().enumerate() {
            each(i, &table[id.get() * row..][..row]);
        }
        Ok(())
    }

    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), ViewError> {
        each(self.window(&FLOATS, tensor, self.len(tensor)));
        Ok(())
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), ViewError> {
        let spec = tensor.spec(self.config);
        let size = |dim| usize::try_from(dim).unwrap_or(usize::MAX);
        let (rows, cols) = (size(spec.rows()), size(spec.cols()));
        let whole = Bf16Matrix::new(self.window(&FLOATS, tensor, self.len(tensor)), rows, cols)?;
        let block = self.block.saturating_mul(tensor.row_granule(self.config)).clamp(1, rows);
        for first in (0..rows).step_by(block) {
            each(first, whole.slice(first..rows.min(first + block)).into());
        }
        Ok(())
    }

    fn request_experts(&mut self, _layer: LayerIndex, _ids: &[ExpertId]) -> Result<(), ViewError> {
        Ok(())
    }

    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), ViewError> {
        use k3_core::checkpoint::ExpertTensor as E;
        let (inner, latent) = (self.config.moe_intermediate_size, self.config.routed_expert_hidden_size);
        // Backwards: the order of arrival must not matter.
        for (i, &id) in ids.iter().enumerate().rev() {
            let matrix = |packed, scale, rows, cols| {
                let part = |from, part| {
                    let tensor = Tensor::Expert(layer, id, part);
                    self.window(from, tensor, self.len(tensor))
                };
                Mxfp4Matrix::new(part(&NIBBLES, packed), part(&SCALES, scale), rows, cols)
            };
            let expert = Expert {
                w1: matrix(E::W1Packed, E::W1Scale, inner, latent)?,
                w2: matrix(E::W2Packed, E::W2Scale, latent, inner)?,
                w3: matrix(E::W3Packed, E::W3Scale, inner, latent)?,
            };
            each(i, expert);
        }
        Ok(())
    }
}
