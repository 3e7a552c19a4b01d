//! Scratch of one pass. It means nothing between passes.

use super::layout::{Walker, product};
use crate::backend::Panel;
use crate::carve::{BufferError, Carver, Line, Tally, enough};
use crate::config::{MlpKind, ModelConfig};
use crate::view::ExpertId;

/// Rows of a product of several positions that are held before they are turned to `[position, row]`.
const TILE_ROWS: usize = 4096;

/// How much room a pass needs: everything a workspace's size depends on besides the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Positions of the largest chunk.
    pub chunk: usize,
    /// Positions of the longest sequence ([`State::context`](super::State::context)).
    pub context: usize,
    /// Threads that run at the same time. It should be the [`Executor::width`](crate::exec::Executor::width):
    /// with another value results are the same, and parallelism or memory is lost. 0 counts as 1.
    pub width: usize,
}

/// Named disjoint buffers of a pass, for as many positions and threads as its [`Extent`] says.
// In the shapes below `n` is the chunk, `H` is `hidden_size`, `P` the KDA width, `k` the experts per token,
// `Z` the latent width, `I` the expert width.
#[derive(Debug)]
pub struct Workspace<'a> {
    pub(crate) extent: Extent,
    pub(crate) residual: Residual<'a>,
    pub(crate) vectors: Vectors<'a>,
    pub(crate) products: Products<'a>,
    pub(crate) kda: KdaScratch<'a>,
    pub(crate) mla: MlaScratch<'a>,
    pub(crate) moe: MoeScratch<'a>,
}

/// The attention-residual state and the vectors a sub-layer reads and writes.
#[derive(Debug)]
pub(crate) struct Residual<'a> {
    /// `[sources, n, H]`: finished blocks, then the running sum.
    pub(crate) values: &'a mut [f32],
    /// `[n, sources]`.
    pub(crate) scores: &'a mut [f32],
    /// `[n, H]`: the mix.
    pub(crate) mixed: &'a mut [f32],
    /// `[n, H]`: the normed mix, which the sub-layer reads.
    pub(crate) x: &'a mut [f32],
    /// `[n, H]`: what the sub-layer gives.
    pub(crate) y: &'a mut [f32],
}

/// The vectors of one layer, decoded to f32.
#[derive(Debug)]
pub(crate) struct Vectors<'a> {
    pub(crate) input_norm: &'a mut [f32],
    pub(crate) post_norm: &'a mut [f32],
    /// Norm weight times projection weight, for the mix before attention.
    pub(crate) fold_attn: &'a mut [f32],
    /// The same for the mix before the MLP.
    pub(crate) fold_mlp: &'a mut [f32],
    /// `[3, P, kernel]`.
    pub(crate) taps: &'a mut [f32],
    /// One per head is used; the file may have `head_dim` of them.
    pub(crate) a_log: &'a mut [f32],
    pub(crate) dt_bias: &'a mut [f32],
    pub(crate) o_norm: &'a mut [f32],
    pub(crate) q_norm: &'a mut [f32],
    pub(crate) kv_norm: &'a mut [f32],
    pub(crate) router_bias: &'a mut [f32],
    pub(crate) latent_norm: &'a mut [f32],
}

/// What products of streamed matrices need.
#[derive(Debug)]
pub(crate) struct Products<'a> {
    /// The sub-layer's input `x` as a panel: shared by all matrices that read it.
    pub(crate) panel_x: &'a mut [f64],
    /// Any other input.
    pub(crate) panel: &'a mut [f64],
    /// `[rows, n]` for chunks of several positions.
    pub(crate) tile: &'a mut [f32],
    /// `[n, max(dense, shared) width]`: gate and up of the dense or shared MLP.
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a mut [f32],
}

/// Delta attention.
#[derive(Debug)]
pub(crate) struct KdaScratch<'a> {
    /// `[3, kernel - 1 + m, P]` of one sequence: q, k, v before the convolution, history first.
    pub(crate) window: &'a mut [f32],
    /// `[3, m, P]` of each sequence, one after the other: q, k, v.
    pub(crate) qkv: &'a mut [f32],
    /// `[n, head_dim]`.
    pub(crate) low: &'a mut [f32],
    /// `[n, P]`: q before the convolution, then the decay's input, then what the heads give, gated.
    pub(crate) z: &'a mut [f32],
    /// `[n, P]`: k before the convolution, then the decay.
    pub(crate) alpha: &'a mut [f32],
    /// `[n, heads]`.
    pub(crate) beta: &'a mut [f32],
    /// `[n, P]`.
    pub(crate) gate: &'a mut [f32],
    /// `[n, P]`: v before the convolution; then `[heads, m, head_dim]` of each sequence, one after the other.
    pub(crate) heads: &'a mut [f32],
}

/// Latent attention.
#[derive(Debug)]
pub(crate) struct MlaScratch<'a> {
    /// `[n, q_lora_rank]`.
    pub(crate) cq: &'a mut [f32],
    /// `[n, heads, nope + rope]`.
    pub(crate) q: &'a mut [f32],
    /// `[n, kv_lora_rank + rope]`.
    pub(crate) latent: &'a mut [f32],
    /// `[n, heads, v]`.
    pub(crate) gate: &'a mut [f32],
    /// `[n, heads, v]`: what the heads give, gated.
    pub(crate) attended: &'a mut [f32],
    /// `[heads, m, v]` of each sequence, one after the other.
    pub(crate) heads: &'a mut [f32],
    /// Elements of `thread` that one thread uses.
    pub(crate) thread_len: usize,
    /// `[width, per thread]`: attended latents, values, absorbed query, scores.
    pub(crate) thread: &'a mut [f32],
    /// `[width, panel]`.
    pub(crate) panels: &'a mut [f64],
}

/// Latent mixture of experts.
#[derive(Debug)]
pub(crate) struct MoeScratch<'a> {
    /// `[n, experts]`.
    pub(crate) scores: &'a mut [f32],
    /// `[n, k]` in rank order.
    pub(crate) ids: &'a mut [ExpertId],
    pub(crate) weights: &'a mut [f32],
    /// `[experts + 1]`.
    pub(crate) starts: &'a mut [u32],
    /// `[n * k]`: pairs (position, rank) as `position * k + rank`, grouped by expert.
    pub(crate) pairs: &'a mut [u32],
    /// Distinct experts, rising, and whether each has arrived.
    pub(crate) distinct: &'a mut [ExpertId],
    pub(crate) arrived: &'a mut [u32],
    /// `[n, Z]`.
    pub(crate) z: &'a mut [f32],
    /// `[n, Z]`: the rows of `z` one expert reads; then what it gives.
    pub(crate) rows: &'a mut [f32],
    /// `[n, I]`.
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a mut [f32],
    /// `[n, k, Z]`: each expert's result in its own slot.
    pub(crate) slots: &'a mut [f32],
    /// `[n, Z]`.
    pub(crate) sum: &'a mut [f32],
}

/// Vectors a position mixes at most: one for each block, and the running sum.
pub(crate) const fn sources(c: &ModelConfig) -> usize {
    c.num_hidden_layers.div_ceil(c.attn_res_block_size) + 1
}

/// f32 elements of [`MlaScratch::thread`] for one thread.
fn mla_thread_len(c: &ModelConfig, extent: Extent) -> Option<usize> {
    let per_position = c.kv_lora_rank.checked_add(c.v_head_dim)?;
    extent.context.checked_add(c.latent_width())?.checked_add(per_position.checked_mul(extent.chunk)?)
}

impl<'a> Workspace<'a> {
    /// Lines needed for passes of this extent; `None` if that overflows.
    #[must_use]
    pub fn lines(config: &ModelConfig, extent: Extent) -> Option<usize> {
        let mut tally = Tally::new();
        Self::walk(&mut tally, config, extent).ok()?;
        Some(tally.lines())
    }

    /// Splits the front of the caller's memory; what is behind [`Workspace::lines`] is not touched. Contents
    /// need not be zero.
    ///
    /// # Errors
    /// [`BufferError`] if `memory` is shorter than [`Workspace::lines`].
    pub fn new(memory: &'a mut [Line], config: &ModelConfig, extent: Extent) -> Result<Self, BufferError> {
        enough(memory, Self::lines(config, extent))?;
        Self::walk(&mut Carver::new(memory), config, extent)
    }

    /// The largest chunk, the context and the threads it was made for.
    #[must_use]
    pub const fn extent(&self) -> Extent {
        self.extent
    }

    fn walk(w: &mut impl Walker<'a>, c: &ModelConfig, extent: Extent) -> Result<Self, BufferError> {
        // Attention has scratch for each thread, and there is at least the caller.
        let extent = Extent { width: extent.width.max(1), ..extent };
        let (n, hidden) = (extent.chunk, c.hidden_size);
        let any_dense = c.layers().any(|l| c.mlp_kind(l) == MlpKind::Dense);
        let any_moe = c.layers().any(|l| c.mlp_kind(l) == MlpKind::Moe);
        let mlp = (if any_dense { c.intermediate_size } else { 0 }).max(if any_moe { c.shared_width() } else { 0 });
        // Sizes of a kind of layer the model does not have are zero.
        let kda = usize::from(c.num_kda_layers() > 0);
        let mla = usize::from(c.num_mla_layers() > 0);
        let moe = usize::from(any_moe);
        let width = c.kda_width() * kda;
        let heads_v = product(&[c.num_attention_heads, c.v_head_dim, mla]).ok_or(BufferError::Overflow)?;
        let heads_q = product(&[c.num_attention_heads, c.qk_head_dim(), mla]).ok_or(BufferError::Overflow)?;
        let (experts, k) = (c.num_experts * moe, c.num_experts_per_token * moe);
        let (latent, inner) = (c.routed_expert_hidden_size * moe, c.moe_intermediate_size * moe);
        let distinct = product(&[n, k]).ok_or(BufferError::Overflow)?.min(experts);
        let sources = sources(c);
        let thread_len = if mla == 0 { 0 } else { mla_thread_len(c, extent).ok_or(BufferError::Overflow)? };

        let inputs = [mlp, width, heads_v, c.q_lora_rank * mla, c.kda_head_dim * kda, latent, inner];
        let panel = Panel::len(inputs.into_iter().max().unwrap_or(0), n);
        let panel_x = Panel::len(hidden, n);
        let outputs = [mlp, width, heads_v, heads_q, hidden, experts, latent, inner, c.vocab_size];
        let tile_rows = if n > 1 { outputs.into_iter().max().unwrap_or(0).min(TILE_ROWS) } else { 0 };

        let d = |dims: &[usize]| product(dims);
        Ok(Self {
            extent,
            residual: Residual {
                values: w.part(d(&[sources, n, hidden]))?,
                scores: w.part(d(&[n, sources]))?,
                mixed: w.part(d(&[n, hidden]))?,
                x: w.part(d(&[n, hidden]))?,
                y: w.part(d(&[n, hidden]))?,
            },
            vectors: Vectors {
                input_norm: w.part(d(&[hidden]))?,
                post_norm: w.part(d(&[hidden]))?,
                fold_attn: w.part(d(&[hidden]))?,
                fold_mlp: w.part(d(&[hidden]))?,
                taps: w.part(d(&[3, width, c.conv_kernel_size]))?,
                a_log: w.part(d(&[c.kda_num_heads.max(c.kda_head_dim), kda]))?,
                dt_bias: w.part(d(&[width]))?,
                o_norm: w.part(d(&[c.kda_head_dim, kda]))?,
                q_norm: w.part(d(&[c.q_lora_rank, mla]))?,
                kv_norm: w.part(d(&[c.kv_lora_rank, mla]))?,
                router_bias: w.part(d(&[experts]))?,
                latent_norm: w.part(d(&[latent]))?,
            },
            products: Products {
                panel_x: w.part(panel_x)?,
                panel: w.part(panel)?,
                tile: w.part(d(&[tile_rows, n]))?,
                gate: w.part(d(&[n, mlp]))?,
                up: w.part(d(&[n, mlp]))?,
            },
            kda: KdaScratch {
                window: w.part(n.checked_add(c.conv_kernel_size - 1).and_then(|rows| d(&[3, rows, width])))?,
                qkv: w.part(d(&[3, n, width]))?,
                low: w.part(d(&[n, c.kda_head_dim, kda]))?,
                z: w.part(d(&[n, width]))?,
                alpha: w.part(d(&[n, width]))?,
                beta: w.part(d(&[n, c.kda_num_heads, kda]))?,
                gate: w.part(d(&[n, width]))?,
                heads: w.part(d(&[n, width]))?,
            },
            mla: MlaScratch {
                cq: w.part(d(&[n, c.q_lora_rank, mla]))?,
                q: w.part(d(&[n, heads_q]))?,
                latent: w.part(d(&[n, c.latent_width(), mla]))?,
                gate: w.part(d(&[n, heads_v]))?,
                attended: w.part(d(&[n, heads_v]))?,
                heads: w.part(d(&[n, heads_v]))?,
                thread_len,
                thread: w.part(d(&[thread_len, extent.width]))?,
                panels: w.part(Panel::len(c.kv_lora_rank, n).and_then(|len| d(&[len, extent.width, mla])))?,
            },
            moe: MoeScratch {
                scores: w.part(d(&[n, experts]))?,
                ids: w.part(d(&[n, k]))?,
                weights: w.part(d(&[n, k]))?,
                starts: w.part(d(&[experts + 1]))?,
                pairs: w.part(d(&[n, k]))?,
                distinct: w.part(d(&[distinct]))?,
                arrived: w.part(d(&[distinct]))?,
                z: w.part(d(&[n, latent]))?,
                rows: w.part(d(&[n, latent]))?,
                gate: w.part(d(&[n, inner]))?,
                up: w.part(d(&[n, inner]))?,
                slots: w.part(d(&[n, k, latent]))?,
                sum: w.part(d(&[n, latent]))?,
            },
        })
    }
}
