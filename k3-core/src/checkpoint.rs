//! Every tensor of the checkpoint: its name, its shape, its place in the walk.
//!
//! This is the one place that knows what a tensor is called and how large it is (spec section 2).
//! The platform reconciles files with it, the forward pass asks for tensors by it, and the planner
//! adds up its sizes. It holds no bytes and reads no files.
//!
//! ```
//! use k3_core::checkpoint::{Dtype, LayerTensor, Named, Tensor};
//! use k3_core::view::LayerIndex;
//! use k3_core::config::{ModelConfig, RELEASED_JSON};
//!
//! let config = ModelConfig::parse(RELEASED_JSON.as_bytes())?;
//! let name = "language_model.model.layers.3.self_attn.kv_b_proj.weight";
//! let tensor = Tensor::Layer(LayerIndex(3), LayerTensor::KvB);
//! assert_eq!(tensor.to_string(), name);
//! assert_eq!(Tensor::parse(name, &config), Named::Known(tensor));
//! let spec = tensor.spec(&config);
//! assert_eq!((spec.dtype, spec.shape()), (Dtype::Bf16, &[96 * (128 + 128), 512][..]));
//! # Ok::<(), k3_core::config::ConfigError>(())
//! ```
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]

use crate::config::{LayerKind, MlpKind, ModelConfig};
use crate::json::Str;
use crate::view::{ExpertId, GROUP, LayerIndex};
use core::fmt;

/// How the elements of a tensor are stored, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// The upper half of an f32.
    Bf16,
    /// IEEE single precision.
    F32,
    /// Bytes: MXFP4 nibbles or scales.
    U8,
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::U8 => 1,
        }
    }

    /// As it is written in a safetensors header.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "BF16",
            Self::F32 => "F32",
            Self::U8 => "U8",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor outside the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GlobalTensor {
    /// Embedding table, `[vocab, hidden]`.
    Embed,
    /// Norm weight of the final residual mix, `[hidden]`.
    OutResNorm,
    /// Score weight of the final residual mix, `[1, hidden]`.
    OutResProj,
    /// Norm before the head, `[hidden]`.
    FinalNorm,
    /// Output head, `[vocab, hidden]`.
    LmHead,
}

impl GlobalTensor {
    /// All of them; the order is that of their slots.
    pub const ALL: [Self; 5] = [Self::Embed, Self::OutResNorm, Self::OutResProj, Self::FinalNorm, Self::LmHead];

    /// Whether it is small and asked for whole; else it is a matrix.
    #[must_use]
    pub const fn is_vector(self) -> bool {
        !matches!(self, Self::Embed | Self::LmHead)
    }

    /// The name without `language_model.` in front.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embed => "model.embed_tokens.weight",
            Self::OutResNorm => "model.output_attn_res_norm.weight",
            Self::OutResProj => "model.output_attn_res_proj.weight",
            Self::FinalNorm => "model.norm.weight",
            Self::LmHead => "lm_head.weight",
        }
    }
}

/// A tensor of a layer's trunk, that is, without its routed experts. The order is that of the walk:
/// what a layer has of it, the forward pass asks for in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerTensor {
    /// Norm before attention, `[hidden]`.
    InputNorm,
    /// Norm before the MLP, `[hidden]`.
    PostNorm,
    /// Norm weight of the residual mix before attention, `[hidden]`.
    AttnResNorm,
    /// Score weight of the residual mix before attention, `[1, hidden]`.
    AttnResProj,
    /// Norm weight of the residual mix before the MLP, `[hidden]`.
    MlpResNorm,
    /// Score weight of the residual mix before the MLP, `[1, hidden]`.
    MlpResProj,
    /// KDA: taps of the query, f32 `[kda_width, 1, taps]`.
    QConv,
    /// KDA: taps of the key, f32 `[kda_width, 1, taps]`.
    KConv,
    /// KDA: taps of the value, f32 `[kda_width, 1, taps]`.
    VConv,
    /// KDA: log decay of each head, f32; see [`Tensor::accepts`] for its length.
    ALog,
    /// KDA: bias of the decay, f32 `[kda_width]`.
    DtBias,
    /// KDA: norm of each head's output, f32 `[kda_head_dim]`.
    ONorm,
    /// MLA: norm of the query bottleneck, `[q_lora]`.
    QANorm,
    /// MLA: norm of the latent, `[kv_lora]`.
    KvANorm,
    /// MoE: bias of the choice of experts, f32 `[experts]`.
    RouterBias,
    /// MoE: norm of the experts' weighted sum, `[latent]`.
    LatentNorm,
    /// KDA: query, `[kda_width, hidden]`.
    Q,
    /// KDA: key, `[kda_width, hidden]`.
    K,
    /// KDA: value, `[kda_width, hidden]`.
    V,
    /// KDA: decay, first factor, `[kda_head_dim, hidden]`.
    FA,
    /// KDA: write strength of each head, `[kda_heads, hidden]`.
    B,
    /// MLA: query, first factor, `[q_lora, hidden]`.
    QA,
    /// MLA: latent and rope part, `[kv_lora + rope, hidden]`.
    KvA,
    /// Output gate: `[kda_width, hidden]` (KDA) or `[heads * v, hidden]` (MLA).
    G,
    /// KDA: decay, second factor, `[kda_width, kda_head_dim]`.
    FB,
    /// MLA: query, second factor, `[heads * (nope + rope), q_lora]`.
    QB,
    /// MLA: per head its key part, then its value part, `[heads * (nope + v), kv_lora]`.
    KvB,
    /// Output: `[hidden, kda_width]` (KDA) or `[hidden, heads * v]` (MLA).
    O,
    /// Dense MLP: gate, `[inner, hidden]`.
    DenseGate,
    /// Dense MLP: up, `[inner, hidden]`.
    DenseUp,
    /// Dense MLP: down, `[hidden, inner]`.
    DenseDown,
    /// MoE: router, `[experts, hidden]`.
    Router,
    /// MoE: from hidden to latent, `[latent, hidden]`.
    LatentDown,
    /// MoE: shared experts' gate, `[shared, hidden]`.
    SharedGate,
    /// MoE: shared experts' up, `[shared, hidden]`.
    SharedUp,
    /// MoE: shared experts' down, `[hidden, shared]`.
    SharedDown,
    /// MoE: from latent to hidden, `[hidden, latent]`.
    LatentUp,
}

impl LayerTensor {
    /// All of them in the order of the walk. No layer has all.
    pub const ALL: [Self; 37] = [
        Self::InputNorm,
        Self::PostNorm,
        Self::AttnResNorm,
        Self::AttnResProj,
        Self::MlpResNorm,
        Self::MlpResProj,
        Self::QConv,
        Self::KConv,
        Self::VConv,
        Self::ALog,
        Self::DtBias,
        Self::ONorm,
        Self::QANorm,
        Self::KvANorm,
        Self::RouterBias,
        Self::LatentNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::FA,
        Self::B,
        Self::QA,
        Self::KvA,
        Self::G,
        Self::FB,
        Self::QB,
        Self::KvB,
        Self::O,
        Self::DenseGate,
        Self::DenseUp,
        Self::DenseDown,
        Self::Router,
        Self::LatentDown,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::LatentUp,
    ];

    /// Whether it is small and asked for whole, ahead of the matrices (norms, biases, taps).
    #[must_use]
    pub const fn is_vector(self) -> bool {
        self as u8 <= Self::LatentNorm as u8
    }

    /// Whether a layer of these kinds has it.
    #[must_use]
    pub const fn belongs(self, attention: LayerKind, mlp: MlpKind) -> bool {
        match self {
            Self::InputNorm
            | Self::PostNorm
            | Self::AttnResNorm
            | Self::AttnResProj
            | Self::MlpResNorm
            | Self::MlpResProj
            | Self::G
            | Self::O => true,
            Self::QConv
            | Self::KConv
            | Self::VConv
            | Self::ALog
            | Self::DtBias
            | Self::ONorm
            | Self::Q
            | Self::K
            | Self::V
            | Self::FA
            | Self::FB
            | Self::B => matches!(attention, LayerKind::Kda),
            Self::QANorm | Self::KvANorm | Self::QA | Self::QB | Self::KvA | Self::KvB => {
                matches!(attention, LayerKind::Mla)
            }
            Self::DenseGate | Self::DenseUp | Self::DenseDown => matches!(mlp, MlpKind::Dense),
            Self::RouterBias
            | Self::LatentNorm
            | Self::Router
            | Self::LatentDown
            | Self::SharedGate
            | Self::SharedUp
            | Self::SharedDown
            | Self::LatentUp => matches!(mlp, MlpKind::Moe),
        }
    }

    /// The name without `language_model.model.layers.N.` in front.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InputNorm => "input_layernorm.weight",
            Self::PostNorm => "post_attention_layernorm.weight",
            Self::AttnResNorm => "self_attention_res_norm.weight",
            Self::AttnResProj => "self_attention_res_proj.weight",
            Self::MlpResNorm => "mlp_res_norm.weight",
            Self::MlpResProj => "mlp_res_proj.weight",
            Self::QConv => "self_attn.q_conv1d.weight",
            Self::KConv => "self_attn.k_conv1d.weight",
            Self::VConv => "self_attn.v_conv1d.weight",
            Self::ALog => "self_attn.A_log",
            Self::DtBias => "self_attn.dt_bias",
            Self::ONorm => "self_attn.o_norm.weight",
            Self::QANorm => "self_attn.q_a_layernorm.weight",
            Self::KvANorm => "self_attn.kv_a_layernorm.weight",
            Self::RouterBias => "block_sparse_moe.gate.e_score_correction_bias",
            Self::LatentNorm => "block_sparse_moe.routed_expert_norm.weight",
            Self::Q => "self_attn.q_proj.weight",
            Self::K => "self_attn.k_proj.weight",
            Self::V => "self_attn.v_proj.weight",
            Self::FA => "self_attn.f_a_proj.weight",
            Self::FB => "self_attn.f_b_proj.weight",
            Self::B => "self_attn.b_proj.weight",
            Self::QA => "self_attn.q_a_proj.weight",
            Self::QB => "self_attn.q_b_proj.weight",
            Self::KvA => "self_attn.kv_a_proj_with_mqa.weight",
            Self::KvB => "self_attn.kv_b_proj.weight",
            Self::G => "self_attn.g_proj.weight",
            Self::O => "self_attn.o_proj.weight",
            Self::DenseGate => "mlp.gate_proj.weight",
            Self::DenseUp => "mlp.up_proj.weight",
            Self::DenseDown => "mlp.down_proj.weight",
            Self::Router => "block_sparse_moe.gate.weight",
            Self::LatentDown => "block_sparse_moe.routed_expert_down_proj.weight",
            Self::SharedGate => "block_sparse_moe.shared_experts.gate_proj.weight",
            Self::SharedUp => "block_sparse_moe.shared_experts.up_proj.weight",
            Self::SharedDown => "block_sparse_moe.shared_experts.down_proj.weight",
            Self::LatentUp => "block_sparse_moe.routed_expert_up_proj.weight",
        }
    }
}

/// A tensor of a routed expert, in the order of the file: `w1` gate, `w2` down, `w3` up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ExpertTensor {
    /// Gate nibbles, `[inner, latent / 2]`.
    W1Packed,
    /// Gate scales, `[inner, latent / 32]`.
    W1Scale,
    /// Down nibbles, `[latent, inner / 2]`.
    W2Packed,
    /// Down scales, `[latent, inner / 32]`.
    W2Scale,
    /// Up nibbles, `[inner, latent / 2]`.
    W3Packed,
    /// Up scales, `[inner, latent / 32]`.
    W3Scale,
}

impl ExpertTensor {
    /// All of them in the order of the file.
    pub const ALL: [Self; 6] =
        [Self::W1Packed, Self::W1Scale, Self::W2Packed, Self::W2Scale, Self::W3Packed, Self::W3Scale];

    /// The name without `language_model.model.layers.N.block_sparse_moe.experts.E.` in front.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::W1Packed => "w1.weight_packed",
            Self::W1Scale => "w1.weight_scale",
            Self::W2Packed => "w2.weight_packed",
            Self::W2Scale => "w2.weight_scale",
            Self::W3Packed => "w3.weight_packed",
            Self::W3Scale => "w3.weight_scale",
        }
    }

    /// Whether it holds scales rather than nibbles.
    #[must_use]
    pub const fn is_scale(self) -> bool {
        matches!(self, Self::W1Scale | Self::W2Scale | Self::W3Scale)
    }
}

/// A tensor of the text model. `Display` is its released name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tensor {
    /// One outside the layers.
    Global(GlobalTensor),
    /// One of a layer's trunk.
    Layer(LayerIndex, LayerTensor),
    /// One of a routed expert.
    Expert(LayerIndex, ExpertId, ExpertTensor),
}

/// What a tensor's name means for a config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Named {
    /// A tensor of the text model.
    Known(Tensor),
    /// A tensor that is never read, and to be skipped: vision tower, projector, multi-token prediction.
    Ignored,
    /// No tensor of this model; also one whose layer is of another kind or does not exist. Files that have one
    /// do not belong to the config.
    Unknown,
}

/// Bytes in the longest [`Tensor`] name of any config, rounded up: room for one in a buffer.
pub const NAME_MAX: usize = 96;

const PREFIX: &str = "language_model.";
const LAYERS: &str = "model.layers.";
const EXPERTS: &str = "block_sparse_moe.experts.";

impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Global(t) => write!(f, "{PREFIX}{}", t.name()),
            Self::Layer(l, t) => write!(f, "{PREFIX}{LAYERS}{}.{}", l.0, t.name()),
            Self::Expert(l, e, t) => write!(f, "{PREFIX}{LAYERS}{}.{EXPERTS}{}.{}", l.0, e.0, t.name()),
        }
    }
}

/// A number as names spell it: digits only, no leading zero.
fn canonical(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let leading = text.len() > 1 && text.starts_with('0');
    if digits && !leading { text.parse().ok() } else { None }
}

impl Tensor {
    /// What `name` means in a model of this config.
    #[must_use]
    pub fn parse(name: &str, config: &ModelConfig) -> Named {
        match Self::known(name, config) {
            Some(tensor) => Named::Known(tensor),
            // Names are repeated in messages and lists, and a stranger's must not command a terminal.
            None if name.contains(char::is_control) => Named::Unknown,
            None if name.starts_with("vision_tower.") || name.starts_with("mm_projector.") => Named::Ignored,
            None if name.contains("mtp") => Named::Ignored,
            None => Named::Unknown,
        }
    }

    /// [`Tensor::parse`] of a name as it stands in a header or an index. One written with escapes
    /// is decoded; with more than 256 bytes it is unknown.
    #[must_use]
    pub fn parse_json(name: Str<'_>, config: &ModelConfig) -> Named {
        if let Some(raw) = name.raw() {
            return Self::parse(raw, config);
        }
        match name.decode_into(&mut [0; 256]) {
            Ok(name) => Self::parse(name, config),
            Err(_) => Named::Unknown,
        }
    }

    fn known(name: &str, config: &ModelConfig) -> Option<Self> {
        let name = name.strip_prefix(PREFIX)?;
        let Some(rest) = name.strip_prefix(LAYERS) else {
            return GlobalTensor::ALL.into_iter().find(|t| t.name() == name).map(Self::Global);
        };
        let (number, rest) = rest.split_once('.')?;
        let layer = LayerIndex(canonical(number)?);
        let tensor = if let Some(rest) = rest.strip_prefix(EXPERTS) {
            let (number, part) = rest.split_once('.')?;
            let part = ExpertTensor::ALL.into_iter().find(|t| t.name() == part)?;
            Self::Expert(layer, ExpertId(canonical(number)?), part)
        } else {
            Self::Layer(layer, LayerTensor::ALL.into_iter().find(|t| t.name() == rest)?)
        };
        tensor.exists(config).then_some(tensor)
    }

    /// Whether a model of this config has the tensor.
    #[must_use]
    pub fn exists(self, config: &ModelConfig) -> bool {
        match self {
            Self::Global(_) => true,
            Self::Layer(l, t) => {
                l.get() < config.num_hidden_layers && t.belongs(config.layer_kind(l), config.mlp_kind(l))
            }
            Self::Expert(l, e, _) => {
                l.get() < config.num_hidden_layers && config.mlp_kind(l) == MlpKind::Moe && e.get() < config.num_experts
            }
        }
    }

    /// Its dtype and shape (spec section 2).
    #[must_use]
    pub fn spec(self, c: &ModelConfig) -> TensorSpec {
        let (hidden, kda, latent) = (c.hidden_size, c.kda_width(), c.routed_expert_hidden_size);
        let (inner, dense, shared) = (c.moe_intermediate_size, c.intermediate_size, c.shared_width());
        let vector = |n| TensorSpec::new(Dtype::Bf16, &[n]);
        let floats = |n| TensorSpec::new(Dtype::F32, &[n]);
        let matrix = |rows, cols| TensorSpec::new(Dtype::Bf16, &[rows, cols]);
        match self {
            Self::Global(t) => match t {
                GlobalTensor::Embed | GlobalTensor::LmHead => matrix(c.vocab_size, hidden),
                GlobalTensor::OutResNorm | GlobalTensor::FinalNorm => vector(hidden),
                GlobalTensor::OutResProj => matrix(1, hidden),
            },
            Self::Layer(l, t) => {
                let attention = match c.layer_kind(l) {
                    LayerKind::Kda => kda,
                    LayerKind::Mla => c.mla_v_width(),
                };
                match t {
                    LayerTensor::InputNorm
                    | LayerTensor::PostNorm
                    | LayerTensor::AttnResNorm
                    | LayerTensor::MlpResNorm => vector(hidden),
                    LayerTensor::AttnResProj | LayerTensor::MlpResProj => matrix(1, hidden),
                    LayerTensor::QConv | LayerTensor::KConv | LayerTensor::VConv => {
                        TensorSpec::new(Dtype::F32, &[kda, 1, c.conv_kernel_size])
                    }
                    LayerTensor::ALog => floats(c.kda_head_dim.max(c.kda_num_heads)),
                    LayerTensor::DtBias => floats(kda),
                    LayerTensor::ONorm => floats(c.kda_head_dim),
                    LayerTensor::QANorm => vector(c.q_lora_rank),
                    LayerTensor::KvANorm => vector(c.kv_lora_rank),
                    LayerTensor::RouterBias => floats(c.num_experts),
                    LayerTensor::LatentNorm => vector(latent),
                    LayerTensor::Q | LayerTensor::K | LayerTensor::V => matrix(kda, hidden),
                    LayerTensor::FA => matrix(c.kda_head_dim, hidden),
                    LayerTensor::FB => matrix(kda, c.kda_head_dim),
                    LayerTensor::B => matrix(c.kda_num_heads, hidden),
                    LayerTensor::QA => matrix(c.q_lora_rank, hidden),
                    LayerTensor::QB => matrix(c.mla_q_width(), c.q_lora_rank),
                    LayerTensor::KvA => matrix(c.latent_width(), hidden),
                    LayerTensor::KvB => {
                        matrix(c.num_attention_heads.saturating_mul(c.kv_b_head_rows()), c.kv_lora_rank)
                    }
                    LayerTensor::G => matrix(attention, hidden),
                    LayerTensor::O => matrix(hidden, attention),
                    LayerTensor::DenseGate | LayerTensor::DenseUp => matrix(dense, hidden),
                    LayerTensor::DenseDown => matrix(hidden, dense),
                    LayerTensor::Router => matrix(c.num_experts, hidden),
                    LayerTensor::LatentDown => matrix(latent, hidden),
                    LayerTensor::SharedGate | LayerTensor::SharedUp => matrix(shared, hidden),
                    LayerTensor::SharedDown => matrix(hidden, shared),
                    LayerTensor::LatentUp => matrix(hidden, latent),
                }
            }
            Self::Expert(_, _, t) => {
                let (rows, cols) = match t {
                    ExpertTensor::W2Packed | ExpertTensor::W2Scale => (latent, inner),
                    _ => (inner, latent),
                };
                let cols = if t.is_scale() { cols / GROUP } else { cols / 2 };
                TensorSpec::new(Dtype::U8, &[rows, cols])
            }
        }
    }

    /// Whether a file may hold the tensor with this dtype and shape: that of [`Tensor::spec`].
    ///
    /// `A_log` alone may have another shape: the release pads `[kda_heads]` with zeros to
    /// `[kda_head_dim]`, other files do not pad (spec 7.2). Exactly `[kda_heads]` is accepted besides the shape of
    /// [`Tensor::spec`], which is the longer of the two. The forward pass takes the first `kda_num_heads` and refuses the rest if it is
    /// not zero.
    ///
    /// # Errors
    /// [`ShapeFault`]: the first thing that differs.
    pub fn accepts(self, config: &ModelConfig, dtype: Dtype, dims: &[u64]) -> Result<(), ShapeFault> {
        let spec = self.spec(config);
        if let (Self::Layer(_, LayerTensor::ALog), &[n]) = (self, dims)
            && dtype == spec.dtype
            && n == config.kda_num_heads as u64
        {
            return Ok(());
        }
        spec.check(dtype, dims)
    }

    /// Rows that have to arrive in one block when the tensor is streamed: one head of `KvB`, whose
    /// key and value parts are used together, else 1.
    #[must_use]
    pub const fn row_granule(self, config: &ModelConfig) -> usize {
        match self {
            Self::Layer(_, LayerTensor::KvB) => config.kv_b_head_rows(),
            _ => 1,
        }
    }

    /// Whether it may be kept in the lossless code of [`coded`](crate::coded): bf16 matrices that are used by
    /// multiplying with them, and the embedding, of which a row is decoded at a time.
    ///
    /// Vectors are few bytes (0.05% of the released trunk) and decoded whole. `KvB` is asked for sums
    /// across its rows as well as for products, head by head, and is 0.6% of the released trunk: a
    /// second kernel for a saving of 0.15% is not worth its tests.
    #[must_use]
    pub const fn may_be_coded(self) -> bool {
        match self {
            Self::Global(t) => !t.is_vector(),
            Self::Layer(_, LayerTensor::KvB) | Self::Expert(..) => false,
            Self::Layer(_, t) => !t.is_vector(),
        }
    }

    /// The part of the model it is counted in.
    #[must_use]
    pub const fn class(self) -> Class {
        match self {
            Self::Global(GlobalTensor::Embed | GlobalTensor::LmHead) => Class::EmbedHead,
            Self::Global(_) => Class::Norms,
            Self::Expert(..) => Class::Routed,
            Self::Layer(_, t) => match t {
                LayerTensor::InputNorm
                | LayerTensor::PostNorm
                | LayerTensor::AttnResNorm
                | LayerTensor::AttnResProj
                | LayerTensor::MlpResNorm
                | LayerTensor::MlpResProj => Class::Norms,
                LayerTensor::DenseGate | LayerTensor::DenseUp | LayerTensor::DenseDown => Class::Dense,
                LayerTensor::SharedGate | LayerTensor::SharedUp | LayerTensor::SharedDown => Class::Shared,
                LayerTensor::RouterBias
                | LayerTensor::LatentNorm
                | LayerTensor::Router
                | LayerTensor::LatentDown
                | LayerTensor::LatentUp => Class::RouterLatent,
                _ => Class::Attention,
            },
        }
    }
}

/// Dtype and shape of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorSpec {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; those from `rank` on are 1.
    pub dims: [u64; 3],
    /// How many of `dims` are written in the file.
    pub rank: u8,
}

/// How a tensor in a file differs from its [`TensorSpec`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShapeFault {
    /// Another element type.
    Dtype {
        /// That of the model.
        expected: Dtype,
        /// That of the file.
        found: Dtype,
    },
    /// Another number of dimensions.
    Rank {
        /// That of the model.
        expected: usize,
        /// That of the file.
        found: usize,
    },
    /// Another dimension.
    Dim {
        /// Which one, outermost 0.
        axis: usize,
        /// That of the model.
        expected: u64,
        /// That of the file.
        found: u64,
    },
}

impl fmt::Display for ShapeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Dtype { expected, found } => write!(f, "expected dtype {expected}, found {found}"),
            Self::Rank { expected, found } => write!(f, "expected {expected} dimensions, found {found}"),
            Self::Dim { axis, expected, found } => {
                write!(f, "expected dimension {axis} to be {expected}, found {found}")
            }
        }
    }
}

impl core::error::Error for ShapeFault {}

impl TensorSpec {
    fn new(dtype: Dtype, shape: &[usize]) -> Self {
        let (mut dims, mut rank) = ([1; 3], 0_u8);
        for (slot, &n) in dims.iter_mut().zip(shape) {
            *slot = n as u64;
            rank = rank.saturating_add(1);
        }
        Self { dtype, dims, rank }
    }

    /// The dimensions as the file writes them.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.dims.get(..usize::from(self.rank)).unwrap_or(&self.dims)
    }

    /// Number of elements. It fits for every config that was parsed.
    #[must_use]
    pub const fn elements(&self) -> u64 {
        let [a, b, c] = self.dims;
        a.saturating_mul(b).saturating_mul(c)
    }

    /// Size in bytes. It fits for every config that was parsed.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// Rows as a matrix: the outermost dimension, or 1 for a vector.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        let [a, ..] = self.dims;
        if self.rank < 2 { 1 } else { a }
    }

    /// Columns as a matrix: elements of a row.
    #[must_use]
    pub const fn cols(&self) -> u64 {
        let [a, b, c] = self.dims;
        if self.rank < 2 { a } else { b.saturating_mul(c) }
    }

    /// Compares with what a file says.
    ///
    /// # Errors
    /// [`ShapeFault`]: the first thing that differs.
    pub fn check(&self, dtype: Dtype, dims: &[u64]) -> Result<(), ShapeFault> {
        if dtype != self.dtype {
            return Err(ShapeFault::Dtype { expected: self.dtype, found: dtype });
        }
        if dims.len() != usize::from(self.rank) {
            return Err(ShapeFault::Rank { expected: usize::from(self.rank), found: dims.len() });
        }
        match self.dims.iter().zip(dims).enumerate().find(|(_, (a, b))| a != b) {
            Some((axis, (&expected, &found))) => Err(ShapeFault::Dim { axis, expected, found }),
            None => Ok(()),
        }
    }
}

/// The trunk tensors of layer `l` in the order in which the forward pass asks for them: first all
/// vectors, then the matrices of attention, then those of the MLP.
pub fn layer_tensors(config: &ModelConfig, l: LayerIndex) -> impl Iterator<Item = LayerTensor> + Clone + use<> {
    let (attention, mlp) = (config.layer_kind(l), config.mlp_kind(l));
    LayerTensor::ALL.into_iter().filter(move |t| t.belongs(attention, mlp))
}

/// The tensors behind the last layer in the order in which the forward pass asks for them.
pub fn head_tensors() -> impl ExactSizeIterator<Item = GlobalTensor> + Clone + use<> {
    GlobalTensor::ALL.into_iter().skip(1)
}

/// The six tensors of each expert of layer `l`, expert after expert; none if the layer is dense.
pub fn expert_tensors(config: &ModelConfig, l: LayerIndex) -> impl Iterator<Item = Tensor> + Clone + use<> {
    let experts = match config.mlp_kind(l) {
        MlpKind::Dense => 0,
        MlpKind::Moe => config.num_experts,
    };
    (0..experts)
        .filter_map(|e| u16::try_from(e).ok())
        .flat_map(move |e| ExpertTensor::ALL.into_iter().map(move |t| Tensor::Expert(l, ExpertId(e), t)))
}

/// Every tensor that the model has, once: 497,052 in the release.
pub fn expected(config: &ModelConfig) -> impl Iterator<Item = Tensor> + Clone + use<'_> {
    let layer = |l| layer_tensors(config, l).map(move |t| Tensor::Layer(l, t)).chain(expert_tensors(config, l));
    GlobalTensor::ALL.into_iter().map(Tensor::Global).chain(config.layers().flat_map(layer))
}

/// Slots of a layer's trunk.
const STRIDE: usize = LayerTensor::ALL.len();

/// Slots of an expert.
const PARTS: usize = ExpertTensor::ALL.len();

/// Slots of a flat array that has a place for every tensor (some places stay empty):
///
/// ```text
/// globals            5
/// layer tensors      layer * 37 + tensor
/// expert tensors     (moe layer * experts + expert) * 6 + part
/// ```
#[must_use]
pub const fn slot_count(config: &ModelConfig) -> usize {
    let experts = config.num_moe_layers().saturating_mul(config.num_experts);
    first_expert_slot(config).saturating_add(experts.saturating_mul(PARTS))
}

const fn first_expert_slot(config: &ModelConfig) -> usize {
    GlobalTensor::ALL.len().saturating_add(config.num_hidden_layers.saturating_mul(STRIDE))
}

/// The slot of a tensor: below [`slot_count`] and its own if the tensor [exists](Tensor::exists).
#[must_use]
pub const fn slot(tensor: Tensor, config: &ModelConfig) -> usize {
    match tensor {
        Tensor::Global(t) => t as usize,
        Tensor::Layer(l, t) => {
            let layer = l.get().saturating_mul(STRIDE);
            GlobalTensor::ALL.len().saturating_add(layer).saturating_add(t as usize)
        }
        Tensor::Expert(l, e, t) => {
            let expert = config.moe_ordinal(l).saturating_mul(config.num_experts).saturating_add(e.get());
            let part = expert.saturating_mul(PARTS).saturating_add(t as usize);
            first_expert_slot(config).saturating_add(part)
        }
    }
}

/// The tensor whose slot this is; `None` if the slot stays empty or is none.
#[must_use]
pub fn tensor_at(slot: usize, config: &ModelConfig) -> Option<Tensor> {
    let index = |n: usize| u16::try_from(n).ok();
    let tensor = if let Some(&t) = GlobalTensor::ALL.get(slot) {
        Tensor::Global(t)
    } else if let Some(rest) = slot.checked_sub(first_expert_slot(config)) {
        let part = *ExpertTensor::ALL.get(rest % PARTS)?;
        let expert = rest / PARTS;
        let layer = expert.checked_div(config.num_experts)?.checked_add(config.first_k_dense_replace)?;
        let expert = expert.checked_rem(config.num_experts)?;
        Tensor::Expert(LayerIndex(index(layer)?), ExpertId(index(expert)?), part)
    } else {
        let rest = slot.checked_sub(GlobalTensor::ALL.len())?;
        let t = *LayerTensor::ALL.get(rest % STRIDE)?;
        Tensor::Layer(LayerIndex(index(rest / STRIDE)?), t)
    };
    tensor.exists(config).then_some(tensor)
}

/// Bytes of one routed expert: its six tensors.
#[must_use]
pub fn expert_bytes(config: &ModelConfig) -> u64 {
    let bytes = |&t: &ExpertTensor| Tensor::Expert(LayerIndex(0), ExpertId(0), t).spec(config).bytes();
    ExpertTensor::ALL.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Bytes of the trunk tensors of layer `l`, with `A_log` padded as in the release.
#[must_use]
pub fn layer_bytes(config: &ModelConfig, l: LayerIndex) -> u64 {
    layer_tensors(config, l).map(|t| Tensor::Layer(l, t).spec(config).bytes()).fold(0, u64::saturating_add)
}

/// A part of the model in a [`Census`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Routed experts.
    Routed,
    /// Shared experts.
    Shared,
    /// Everything of KDA and MLA, their own norms included.
    Attention,
    /// Dense MLPs.
    Dense,
    /// Router, its bias, and the way into and out of the latent with its norm.
    RouterLatent,
    /// Norms and residual mixes of the layers and of the output.
    Norms,
    /// Embedding table and head.
    EmbedHead,
}

impl Class {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Routed, Self::Shared, Self::Attention, Self::Dense, Self::RouterLatent, Self::Norms, Self::EmbedHead];

    /// What people call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Routed => "routed experts",
            Self::Shared => "shared experts",
            Self::Attention => "attention",
            Self::Dense => "dense MLP",
            Self::RouterLatent => "router and latent",
            Self::Norms => "norms and mixes",
            Self::EmbedHead => "embedding and head",
        }
    }
}

/// What some tensors add up to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    /// Number of tensors.
    pub tensors: u64,
    /// Weights: elements, but an MXFP4 byte counts as two and its scales as none.
    pub parameters: u64,
    /// Bytes in the file.
    pub bytes: u64,
}

impl Sum {
    /// Both together.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            tensors: self.tensors.saturating_add(other.tensors),
            parameters: self.parameters.saturating_add(other.parameters),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    const fn times(self, n: u64) -> Self {
        Self {
            tensors: self.tensors.saturating_mul(n),
            parameters: self.parameters.saturating_mul(n),
            bytes: self.bytes.saturating_mul(n),
        }
    }

    /// One tensor's, as [`Tensor::spec`] has it.
    #[must_use]
    pub fn of(tensor: Tensor, config: &ModelConfig) -> Self {
        let spec = tensor.spec(config);
        let parameters = match tensor {
            Tensor::Expert(_, _, t) if t.is_scale() => 0,
            Tensor::Expert(..) => spec.elements().saturating_mul(2),
            _ => spec.elements(),
        };
        Self { tensors: 1, parameters, bytes: spec.bytes() }
    }
}

/// Tensors, parameters and bytes of the whole model by [`Class`], with `A_log` padded as in the
/// release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    classes: [Sum; Class::ALL.len()],
    trunk: Sum,
}

impl Census {
    /// One class.
    #[must_use]
    pub fn class(&self, class: Class) -> Sum {
        self.classes.get(class as usize).copied().unwrap_or_default()
    }

    /// All layers without their routed experts.
    #[must_use]
    pub const fn trunk(&self) -> Sum {
        self.trunk
    }

    /// Everything but the routed experts: what every token passes through, and the embedding table.
    #[must_use]
    pub fn always_active(&self) -> Sum {
        self.sum(|class| class != Class::Routed)
    }

    /// Everything.
    #[must_use]
    pub fn total(&self) -> Sum {
        self.sum(|_| true)
    }

    fn sum(&self, of: impl Fn(Class) -> bool) -> Sum {
        Class::ALL.into_iter().filter(|&c| of(c)).map(|c| self.class(c)).fold(Sum::default(), Sum::plus)
    }

    fn add(&mut self, class: Class, sum: Sum) {
        if let Some(slot) = self.classes.get_mut(class as usize) {
            *slot = slot.plus(sum);
        }
    }
}

/// Counts the model without looking at a file.
#[must_use]
pub fn census(config: &ModelConfig) -> Census {
    let mut census = Census::default();
    for tensor in GlobalTensor::ALL.map(Tensor::Global) {
        census.add(tensor.class(), Sum::of(tensor, config));
    }
    for l in config.layers() {
        for tensor in layer_tensors(config, l).map(|t| Tensor::Layer(l, t)) {
            let sum = Sum::of(tensor, config);
            census.add(tensor.class(), sum);
            census.trunk = census.trunk.plus(sum);
        }
        if config.mlp_kind(l) == MlpKind::Moe {
            let parts = ExpertTensor::ALL.map(|t| Sum::of(Tensor::Expert(l, ExpertId(0), t), config));
            let expert = parts.into_iter().fold(Sum::default(), Sum::plus);
            census.add(Class::Routed, expert.times(config.num_experts as u64));
        }
    }
    census
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::test_configs::{RELEASED, TINY};
    use std::collections::BTreeSet;
    use std::format;
    use std::string::ToString;
    use std::vec::Vec;

    fn released() -> ModelConfig {
        ModelConfig::parse(RELEASED.as_bytes()).unwrap()
    }

    fn tiny() -> ModelConfig {
        ModelConfig::parse(TINY.as_bytes()).unwrap()
    }

    #[test]
    fn the_census_is_that_of_the_release() {
        let c = released();
        let census = census(&c);
        assert_eq!((census.trunk().tensors, census.trunk().bytes), (2_455, 108_811_877_376));
        assert_eq!(census.class(Class::EmbedHead).bytes, 4_697_620_480);
        assert_eq!(census.class(Class::Shared).bytes, 24_310_185_984);
        let routed = census.class(Class::Routed);
        assert_eq!((routed.tensors, routed.bytes), (82_432 * 6, 1_446_456_066_048));
        assert_eq!(routed.parameters, 82_432 * 33_030_144);
        assert_eq!(expert_bytes(&c), 17_547_264);
        assert_eq!(census.always_active().parameters, 56_743_648_000);
        assert_eq!(census.always_active().bytes, 113_487_296_000 + 22_244_864);
        assert_eq!(census.total().parameters, 2_779_484_478_208);
        assert_eq!(census.total().tensors, 497_220 - 168);
        assert_eq!(census.total().bytes, 1_560_860_324_864 - 894_717_952);
        assert_eq!(census.class(Class::Dense).parameters, 726_663_168);
        assert_eq!(census.class(Class::Attention).parameters, 69 * 443_740_416 + 24 * 232_196_096);
        let moe = census.class(Class::Shared).parameters + census.class(Class::RouterLatent).parameters;
        assert_eq!(moe, 92 * 189_927_808);
        assert_eq!(census.class(Class::Norms).tensors, 93 * 6 + 3);
        let layers = [0, 1, 3].map(|l| layer_bytes(&c, LayerIndex(l)));
        assert_eq!(layers, [2_341_213_184, 1_267_744_256, 844_335_616]);
        let f32s = c.layers().flat_map(|l| layer_tensors(&c, l).map(move |t| Tensor::Layer(l, t)));
        assert_eq!(f32s.filter(|t| t.spec(&c).dtype == Dtype::F32).count(), 506);
    }

    #[test]
    fn every_tensor_has_its_own_slot_and_name() {
        for c in [released(), tiny()] {
            let mut used = std::vec![false; slot_count(&c)];
            for (i, tensor) in expected(&c).enumerate() {
                let slot = slot(tensor, &c);
                assert!(!used[slot], "{tensor}");
                used[slot] = true;
                assert_eq!(tensor_at(slot, &c), Some(tensor));
                // Half a million names take a minute where the processor is emulated. 29 is coprime to 6,
                // the tensors of an expert, so each of them is met.
                if !cfg!(target_arch = "x86_64") && i % 29 != 0 {
                    continue;
                }
                let name = tensor.to_string();
                assert!(name.len() <= NAME_MAX);
                assert_eq!(Tensor::parse(&name, &c), Named::Known(tensor), "{name}");
            }
            let count = used.iter().filter(|&&u| u).count();
            assert_eq!(count as u64, census(&c).total().tensors);
            for (slot, used) in used.iter().enumerate() {
                assert_eq!(tensor_at(slot, &c).is_some(), *used);
            }
            assert_eq!(tensor_at(slot_count(&c), &c), None);
            assert_eq!(tensor_at(usize::MAX, &c), None);
        }
        assert_eq!(expected(&released()).count(), 497_052);
    }

    #[test]
    fn declared_order_is_the_walk() {
        assert!(LayerTensor::ALL.is_sorted() && ExpertTensor::ALL.is_sorted() && GlobalTensor::ALL.is_sorted());
        assert!(LayerTensor::ALL.iter().enumerate().all(|(i, &t)| t as usize == i));
        let c = released();
        let walk = |l| layer_tensors(&c, LayerIndex(l)).collect::<Vec<_>>();
        use LayerTensor::*;
        let norms = [InputNorm, PostNorm, AttnResNorm, AttnResProj, MlpResNorm, MlpResProj];
        let dense = [&norms[..], &[QConv, KConv, VConv, ALog, DtBias, ONorm], &[Q, K, V, FA, B, G, FB, O]].concat();
        assert_eq!(walk(0), [&dense[..], &[DenseGate, DenseUp, DenseDown]].concat());
        let moe = [Router, LatentDown, SharedGate, SharedUp, SharedDown, LatentUp];
        let mla = [&norms[..], &[QANorm, KvANorm, RouterBias, LatentNorm], &[QA, KvA, G, QB, KvB, O], &moe].concat();
        assert_eq!(walk(3), mla);
        assert_eq!(walk(92), mla);
        assert_eq!((walk(1).len(), walk(3).len()), (6 + 14 + 8, 6 + 8 + 8));
        assert!(walk(1).is_sorted_by_key(|t| !t.is_vector()));
        assert_eq!(Tensor::Layer(LayerIndex(3), KvB).row_granule(&c), 256);
        assert_eq!(Tensor::Layer(LayerIndex(3), QB).row_granule(&c), 1);
    }

    #[test]
    fn names_that_do_not_fit_are_unknown() {
        let c = released();
        let layer = |rest: &str| Tensor::parse(&format!("language_model.model.layers.{rest}"), &c);
        for rest in [
            "03.input_layernorm.weight",
            "+3.input_layernorm.weight",
            ".input_layernorm.weight",
            "93.input_layernorm.weight",
            "65536.input_layernorm.weight",
            "3.self_attn.A_log",
            "0.self_attn.kv_b_proj.weight",
            "1.mlp.gate_proj.weight",
            "0.block_sparse_moe.gate.weight",
            "0.block_sparse_moe.experts.0.w1.weight_packed",
            "1.block_sparse_moe.experts.896.w1.weight_packed",
            "1.block_sparse_moe.experts.00.w1.weight_packed",
            "1.block_sparse_moe.experts.0.w4.weight_packed",
            "1.block_sparse_moe.experts.0.w1.weight",
            "1.input_layernorm.weight ",
            "1.self_attention_res.proj_weight",
        ] {
            assert_eq!(layer(rest), Named::Unknown, "{rest}");
        }
        assert_eq!(Tensor::parse("model.embed_tokens.weight", &c), Named::Unknown);
        assert_eq!(Tensor::parse("", &c), Named::Unknown);
        for name in ["vision_tower.x", "mm_projector.proj.0.weight", "language_model.model.mtp.0.x"] {
            assert_eq!(Tensor::parse(name, &c), Named::Ignored, "{name}");
        }
        for name in ["vision_tower.\u{1b}[2J", "mm_projector.\n", "\u{7}mtp", "vision_tower.\u{85}"] {
            assert_eq!(Tensor::parse(name, &c), Named::Unknown, "{name:?} would be obeyed by a terminal");
        }
    }

    #[test]
    fn shapes_are_checked_and_a_log_may_be_unpadded() {
        let c = released();
        let a_log = Tensor::Layer(LayerIndex(0), LayerTensor::ALog);
        assert_eq!(a_log.accepts(&c, Dtype::F32, &[128]), Ok(()));
        assert_eq!(a_log.accepts(&c, Dtype::F32, &[96]), Ok(()));
        let dim = |axis, expected, found| Err(ShapeFault::Dim { axis, expected, found });
        assert_eq!(a_log.accepts(&c, Dtype::F32, &[97]), dim(0, 128, 97));
        let wrong = ShapeFault::Dtype { expected: Dtype::F32, found: Dtype::Bf16 };
        assert_eq!(a_log.accepts(&c, Dtype::Bf16, &[96]), Err(wrong));
        let conv = Tensor::Layer(LayerIndex(0), LayerTensor::QConv);
        assert_eq!(conv.accepts(&c, Dtype::F32, &[12_288, 1, 4]), Ok(()));
        assert_eq!(conv.accepts(&c, Dtype::F32, &[12_288, 4, 1]), dim(1, 1, 4));
        assert_eq!(conv.accepts(&c, Dtype::F32, &[12_288, 4]), Err(ShapeFault::Rank { expected: 3, found: 2 }));
        assert_eq!((conv.spec(&c).rows(), conv.spec(&c).cols()), (12_288, 4));
        let wide = ModelConfig { kda_num_heads: 200, ..c };
        assert_eq!(a_log.spec(&wide).shape(), [200]);
        assert_eq!(a_log.accepts(&wide, Dtype::F32, &[128]), dim(0, 200, 128));
    }

    #[test]
    fn names_are_distinct() {
        let names: BTreeSet<_> = LayerTensor::ALL.iter().map(|t| t.name()).collect();
        assert_eq!(names.len(), LayerTensor::ALL.len());
    }
}
