//! The model's dimensions and constants, read from `config.json` and trusted afterwards.
//!
//! What it is: the only reader of the config. It takes the nested file as released and the flat form
//! of small test models (spec 1.1), checks every field that changes the arithmetic, and reports all
//! that is wrong in one [`ConfigError`]. What it is not: lenient. Defaults elsewhere yield a
//! different model that still speaks, so a missing field is an error and not a default, and a config
//! that another framework has re-saved under its own names is refused field by field.
//!
//! ```
//! use k3_core::config::{Field, ModelConfig};
//!
//! let error = ModelConfig::parse(br#"{"model_type": "kimi_linear", "hidden_size": true}"#).unwrap_err();
//! assert!(error.faults().iter().any(|fault| fault.field == Field::VocabSize));
//! assert!(error.to_string().contains("hidden_size: expected an integer, found a bool"));
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

use crate::json::{Event, JsonError, Number, Parser, Str};
use crate::view::{GROUP, LayerIndex};
use core::fmt;

/// Most layers a config may have.
pub const MAX_LAYERS: usize = 1024;

/// Largest value of any single dimension, and of any product that is a tensor's width.
pub const MAX_DIM: usize = 1 << 31;

/// Most routed experts a layer may have, so that an id fits [`ExpertId`](crate::view::ExpertId).
pub const MAX_EXPERTS: usize = 1 << 16;

/// The released `config.json`, as far as the text model needs it (spec 1.4): the shape that plans and
/// placeholders of full size are made of. It stands in for nothing: a checkpoint has its own.
///
/// ```
/// use k3_core::config::{ModelConfig, RELEASED_JSON};
/// let config = ModelConfig::parse(RELEASED_JSON.as_bytes()).unwrap();
/// assert_eq!((config.num_hidden_layers, config.num_experts), (93, 896));
/// ```
pub const RELEASED_JSON: &str = r#"{"model_type":"kimi_k3","bos_token_id":163584,"eos_token_id":163586,"pad_token_id":163839,"tie_word_embeddings":false,
 "text_config":{"model_type":"kimi_linear","vocab_size":163840,"hidden_size":7168,"num_hidden_layers":93,"num_attention_heads":96,"num_key_value_heads":96,
  "intermediate_size":33792,"rms_norm_eps":1e-05,"hidden_act":"situ","activation_situ_beta":4.0,"activation_situ_linear_beta":25.0,"attn_res_block_size":12,
  "q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,"mla_use_nope":true,"mla_use_output_gate":true,
  "first_k_dense_replace":1,"moe_layer_freq":1,"num_experts":896,"num_experts_per_token":16,"num_shared_experts":2,"moe_intermediate_size":3072,
  "routed_expert_hidden_size":3584,"latent_moe_use_norm":true,"moe_router_activation_func":"sigmoid","moe_renormalize":true,"routed_scaling_factor":1.0,
  "num_expert_group":1,"topk_group":1,"use_grouped_topk":true,"num_nextn_predict_layers":0,"max_position_embeddings":1048576,"tie_word_embeddings":false,
  "linear_attn_config":{"num_heads":96,"head_dim":128,"short_conv_kernel_size":4,"gate_lower_bound":-5.0,"use_full_rank_gate":true,
   "full_attn_layers":[4,8,12,16,20,24,28,32,36,40,44,48,52,56,60,64,68,72,76,80,84,88,92,93],
   "kda_layers":[1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26,27,29,30,31,33,34,35,37,38,39,41,42,43,45,46,47,49,50,51,53,54,55,57,58,59,61,62,63,65,66,67,69,70,71,73,74,75,77,78,79,81,82,83,85,86,87,89,90,91]},
  "quantization_config":{"quant_method":"compressed-tensors","format":"mxfp4-pack-quantized","config_groups":{"group_0":{"weights":{"num_bits":4,"group_size":32}}}}}}"#;

/// The attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Kimi delta attention: a recurrent state (spec 3.3).
    Kda,
    /// Latent attention over all positions (spec 3.4).
    Mla,
}

/// The feed-forward part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MlpKind {
    /// One wide MLP (spec 3.5).
    Dense,
    /// Shared and routed experts (spec 3.6).
    Moe,
}

/// A set of layers: those whose attention is MLA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerMap {
    bits: [u64; MAX_LAYERS / 64],
}

impl LayerMap {
    /// No layer is MLA.
    pub const EMPTY: Self = Self { bits: [0; MAX_LAYERS / 64] };

    /// The same map with layer `l` being MLA. Layers from [`MAX_LAYERS`] on are left out.
    #[must_use]
    pub fn with(mut self, l: LayerIndex) -> Self {
        if let Some(word) = self.bits.get_mut(l.get() / 64) {
            *word |= 1 << (l.get() % 64);
        }
        self
    }

    /// Whether layer `l` is MLA.
    #[must_use]
    pub fn is_mla(&self, l: LayerIndex) -> bool {
        self.bits.get(l.get() / 64).is_some_and(|word| word >> (l.get() % 64) & 1 == 1)
    }

    /// MLA layers among the first `l`.
    #[must_use]
    pub fn rank(&self, l: usize) -> usize {
        let ones = |(i, word): (usize, &u64)| {
            let below = l.saturating_sub(i.saturating_mul(64));
            let mask = if below >= 64 { u64::MAX } else { !(u64::MAX << below) };
            (word & mask).count_ones() as usize
        };
        self.bits.iter().enumerate().map(ones).fold(0, usize::saturating_add)
    }
}

/// Dimensions and constants of a model. A value from [`ModelConfig::parse`] is sound: every product
/// that is a width or a size below fits, in bytes of u64, and the layer map covers every layer.
///
/// Names are those of the config file; counts are elements unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelConfig {
    /// Rows of the embedding table and of `lm_head`.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Layers, at most [`MAX_LAYERS`].
    pub num_hidden_layers: usize,
    /// Heads of an MLA layer.
    pub num_attention_heads: usize,
    /// Width of the dense MLP.
    pub intermediate_size: usize,
    /// MLA's query bottleneck.
    pub q_lora_rank: usize,
    /// MLA's latent, without the rope part.
    pub kv_lora_rank: usize,
    /// Width of an MLA head's query and key outside the rope part.
    pub qk_nope_head_dim: usize,
    /// Width of the rope part (which is never rotated).
    pub qk_rope_head_dim: usize,
    /// Width of an MLA head's value.
    pub v_head_dim: usize,
    /// Layers before this one have a dense MLP, the others experts.
    pub first_k_dense_replace: usize,
    /// Routed experts of a layer, at most [`MAX_EXPERTS`].
    pub num_experts: usize,
    /// Routed experts a token is sent to.
    pub num_experts_per_token: usize,
    /// Shared experts, fused into one MLP.
    pub num_shared_experts: usize,
    /// Inner width of one expert, a multiple of 32.
    pub moe_intermediate_size: usize,
    /// Width of the latent that routed experts read and write, a multiple of 32.
    pub routed_expert_hidden_size: usize,
    /// Layers of an attention-residual block.
    pub attn_res_block_size: usize,
    /// Heads of a KDA layer.
    pub kda_num_heads: usize,
    /// Width of a KDA head.
    pub kda_head_dim: usize,
    /// Taps of KDA's short convolution.
    pub conv_kernel_size: usize,
    /// Positions the model was made for, if the file says.
    pub max_position_embeddings: Option<usize>,
    /// Epsilon of all RMSNorms except those of MLA's bottlenecks (spec 3.4).
    pub rms_norm_eps: f64,
    /// Cap of the gate in SiTU (spec 3.5).
    pub situ_beta: f32,
    /// Cap of the linear half in SiTU.
    pub situ_linear_beta: f32,
    /// Factor on the router's weights.
    pub routed_scaling_factor: f32,
    /// Lower bound of KDA's log decay, negative.
    pub gate_lower_bound: f32,
    /// Whether the chosen experts' weights are divided by their sum.
    pub moe_renormalize: bool,
    /// The id that ends an answer.
    pub eos_token_id: Option<u32>,
    /// The id that may start a text (never prepended by this engine).
    pub bos_token_id: Option<u32>,
    /// The id that fills.
    pub pad_token_id: Option<u32>,
    /// Which layers are MLA.
    pub layer_map: LayerMap,
}

impl ModelConfig {
    /// Reads a `config.json`, by the rules of the table in spec 1.2.
    ///
    /// *Nested*, as released, the fields of the text model are in `text_config`, those of KDA in its
    /// `linear_attn_config`. *Flat*, as small test models have them, all of them stand at the top; KDA's may be in
    /// a `linear_attn_config` there, or stand beside the others under the second names that [`Field`] gives
    /// (spec 1.1).
    ///
    /// # Errors
    /// [`ConfigError`] with every fault that was found.
    #[expect(clippy::result_large_err, reason = "all faults at once, without an allocator; it is made once a run")]
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let mut reader = Reader::new();
        if let Err(error) = reader.locate(bytes) {
            return Err(ConfigError::one(Field::Document, FaultKind::Json(error)));
        }
        let config = reader.config();
        if reader.faults.count == 0 { Ok(config) } else { Err(reader.faults) }
    }

    /// Every layer, first to last.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = LayerIndex> + DoubleEndedIterator + Clone + use<> {
        (0..u16::try_from(self.num_hidden_layers.min(MAX_LAYERS)).unwrap_or(0)).map(LayerIndex)
    }

    /// The attention of layer `l`.
    #[must_use]
    pub fn layer_kind(&self, l: LayerIndex) -> LayerKind {
        if self.layer_map.is_mla(l) { LayerKind::Mla } else { LayerKind::Kda }
    }

    /// The feed-forward part of layer `l`.
    #[must_use]
    pub const fn mlp_kind(&self, l: LayerIndex) -> MlpKind {
        if l.get() < self.first_k_dense_replace { MlpKind::Dense } else { MlpKind::Moe }
    }

    /// Number of MLA layers.
    #[must_use]
    pub fn num_mla_layers(&self) -> usize {
        self.layer_map.rank(self.num_hidden_layers)
    }

    /// Number of KDA layers.
    #[must_use]
    pub fn num_kda_layers(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.num_mla_layers())
    }

    /// Number of layers with experts.
    #[must_use]
    pub const fn num_moe_layers(&self) -> usize {
        self.num_hidden_layers.saturating_sub(self.first_k_dense_replace)
    }

    /// KDA layers before layer `l`: its place among the KDA layers if it is one.
    #[must_use]
    pub fn kda_ordinal(&self, l: LayerIndex) -> usize {
        l.get().saturating_sub(self.mla_ordinal(l))
    }

    /// MLA layers before layer `l`: its place among the MLA layers if it is one.
    #[must_use]
    pub fn mla_ordinal(&self, l: LayerIndex) -> usize {
        self.layer_map.rank(l.get())
    }

    /// MoE layers before layer `l`: its place among the MoE layers if it is one.
    #[must_use]
    pub const fn moe_ordinal(&self, l: LayerIndex) -> usize {
        l.get().saturating_sub(self.first_k_dense_replace)
    }

    /// Width of KDA's q, k, v and gate: all heads side by side.
    #[must_use]
    pub const fn kda_width(&self) -> usize {
        self.kda_num_heads.saturating_mul(self.kda_head_dim)
    }

    /// Inner width of the fused shared experts.
    #[must_use]
    pub const fn shared_width(&self) -> usize {
        self.num_shared_experts.saturating_mul(self.moe_intermediate_size)
    }

    /// Width of one MLA head's query: the nope part, then the rope part.
    #[must_use]
    pub const fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim.saturating_add(self.qk_rope_head_dim)
    }

    /// Width of MLA's queries: all heads side by side.
    #[must_use]
    pub const fn mla_q_width(&self) -> usize {
        self.num_attention_heads.saturating_mul(self.qk_head_dim())
    }

    /// Width of MLA's output (and gate): all heads' values side by side.
    #[must_use]
    pub const fn mla_v_width(&self) -> usize {
        self.num_attention_heads.saturating_mul(self.v_head_dim)
    }

    /// Rows of `kv_b_proj` that belong to one head: its key part, then its value part.
    #[must_use]
    pub const fn kv_b_head_rows(&self) -> usize {
        self.qk_nope_head_dim.saturating_add(self.v_head_dim)
    }

    /// Width of what MLA caches for a position: the latent, then the rope part.
    #[must_use]
    pub const fn latent_width(&self) -> usize {
        self.kv_lora_rank.saturating_add(self.qk_rope_head_dim)
    }
}

/// A field of the config file, or the place of a fault that belongs to no single field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Field {
    /// The file as a whole.
    Document,
    /// `config`, the optional wrapper around everything.
    Wrapper,
    /// `text_config`
    TextConfig,
    /// `linear_attn_config`
    LinearAttnConfig,
    /// `model_type` of the root.
    RootModelType,
    /// `model_type` of `text_config`.
    ModelType,
    /// `tie_word_embeddings` of the root.
    RootTieWordEmbeddings,
    /// `tie_word_embeddings` of `text_config`.
    TieWordEmbeddings,
    /// `bos_token_id`
    BosTokenId,
    /// `eos_token_id`
    EosTokenId,
    /// `pad_token_id`
    PadTokenId,
    /// `vocab_size`
    VocabSize,
    /// `hidden_size`
    HiddenSize,
    /// `num_hidden_layers`
    NumHiddenLayers,
    /// `num_attention_heads`
    NumAttentionHeads,
    /// `num_key_value_heads`
    NumKeyValueHeads,
    /// `intermediate_size`
    IntermediateSize,
    /// `rms_norm_eps`
    RmsNormEps,
    /// `hidden_act`
    HiddenAct,
    /// `activation_situ_beta`, flat also `situ_beta`.
    SituBeta,
    /// `activation_situ_linear_beta`, flat also `situ_linear_beta`.
    SituLinearBeta,
    /// `attn_res_block_size`
    AttnResBlockSize,
    /// `q_lora_rank`
    QLoraRank,
    /// `kv_lora_rank`
    KvLoraRank,
    /// `qk_nope_head_dim`
    QkNopeHeadDim,
    /// `qk_rope_head_dim`
    QkRopeHeadDim,
    /// `v_head_dim`
    VHeadDim,
    /// `mla_use_nope`
    MlaUseNope,
    /// `mla_use_output_gate`
    MlaUseOutputGate,
    /// `first_k_dense_replace`
    FirstKDenseReplace,
    /// `moe_layer_freq`
    MoeLayerFreq,
    /// `num_experts`
    NumExperts,
    /// `num_experts_per_token`
    NumExpertsPerToken,
    /// `num_shared_experts`
    NumSharedExperts,
    /// `moe_intermediate_size`
    MoeIntermediateSize,
    /// `routed_expert_hidden_size`
    RoutedExpertHiddenSize,
    /// `latent_moe_use_norm`
    LatentMoeUseNorm,
    /// `moe_router_activation_func`
    RouterActivation,
    /// `moe_renormalize`
    MoeRenormalize,
    /// `routed_scaling_factor`
    RoutedScalingFactor,
    /// `num_expert_group`
    NumExpertGroup,
    /// `topk_group`
    TopkGroup,
    /// `num_nextn_predict_layers`
    NumNextnPredictLayers,
    /// `max_position_embeddings`
    MaxPositionEmbeddings,
    /// `linear_attn_config.num_heads`, flat also `kda_num_heads`.
    KdaNumHeads,
    /// `linear_attn_config.head_dim`, flat also `kda_head_dim`.
    KdaHeadDim,
    /// `linear_attn_config.short_conv_kernel_size`
    ConvKernelSize,
    /// `linear_attn_config.gate_lower_bound`
    GateLowerBound,
    /// `linear_attn_config.use_full_rank_gate`
    UseFullRankGate,
    /// `linear_attn_config.full_attn_layers`
    FullAttnLayers,
    /// `linear_attn_config.kda_layers`
    KdaLayers,
    /// `quantization_config`
    Quantization,
    /// `quantization_config` of the root, beside that of `text_config`.
    RootQuantization,
    /// `quantization_config.quant_method`
    QuantMethod,
    /// `quantization_config.format`
    QuantFormat,
    /// `quantization_config.config_groups`
    QuantGroups,
    /// `quantization_config.config_groups.group_0`
    QuantGroup0,
    /// `quantization_config.config_groups.group_0.weights`
    QuantWeights,
    /// `num_bits` of the quantised weights.
    QuantBits,
    /// `type` of the quantised weights.
    QuantType,
    /// `strategy` of the quantised weights.
    QuantStrategy,
    /// `group_size` of the quantised weights.
    QuantGroupSize,
    /// `symmetric` of the quantised weights.
    QuantSymmetric,
    /// `dynamic` of the quantised weights.
    QuantDynamic,
    /// `scale_dtype` of the quantised weights.
    QuantScaleDtype,
}

impl Field {
    /// The field's path as it stands in the released (nested) file, without `text_config.` in front
    /// unless that is needed to tell two apart.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Document => "config.json",
            Self::Wrapper => "config",
            Self::TextConfig => "text_config",
            Self::LinearAttnConfig => "linear_attn_config",
            Self::RootModelType => "model_type",
            Self::ModelType => "text_config.model_type",
            Self::RootTieWordEmbeddings => "tie_word_embeddings",
            Self::TieWordEmbeddings => "text_config.tie_word_embeddings",
            Self::BosTokenId => "bos_token_id",
            Self::EosTokenId => "eos_token_id",
            Self::PadTokenId => "pad_token_id",
            Self::VocabSize => "vocab_size",
            Self::HiddenSize => "hidden_size",
            Self::NumHiddenLayers => "num_hidden_layers",
            Self::NumAttentionHeads => "num_attention_heads",
            Self::NumKeyValueHeads => "num_key_value_heads",
            Self::IntermediateSize => "intermediate_size",
            Self::RmsNormEps => "rms_norm_eps",
            Self::HiddenAct => "hidden_act",
            Self::SituBeta => "activation_situ_beta",
            Self::SituLinearBeta => "activation_situ_linear_beta",
            Self::AttnResBlockSize => "attn_res_block_size",
            Self::QLoraRank => "q_lora_rank",
            Self::KvLoraRank => "kv_lora_rank",
            Self::QkNopeHeadDim => "qk_nope_head_dim",
            Self::QkRopeHeadDim => "qk_rope_head_dim",
            Self::VHeadDim => "v_head_dim",
            Self::MlaUseNope => "mla_use_nope",
            Self::MlaUseOutputGate => "mla_use_output_gate",
            Self::FirstKDenseReplace => "first_k_dense_replace",
            Self::MoeLayerFreq => "moe_layer_freq",
            Self::NumExperts => "num_experts",
            Self::NumExpertsPerToken => "num_experts_per_token",
            Self::NumSharedExperts => "num_shared_experts",
            Self::MoeIntermediateSize => "moe_intermediate_size",
            Self::RoutedExpertHiddenSize => "routed_expert_hidden_size",
            Self::LatentMoeUseNorm => "latent_moe_use_norm",
            Self::RouterActivation => "moe_router_activation_func",
            Self::MoeRenormalize => "moe_renormalize",
            Self::RoutedScalingFactor => "routed_scaling_factor",
            Self::NumExpertGroup => "num_expert_group",
            Self::TopkGroup => "topk_group",
            Self::NumNextnPredictLayers => "num_nextn_predict_layers",
            Self::MaxPositionEmbeddings => "max_position_embeddings",
            Self::KdaNumHeads => "linear_attn_config.num_heads",
            Self::KdaHeadDim => "linear_attn_config.head_dim",
            Self::ConvKernelSize => "linear_attn_config.short_conv_kernel_size",
            Self::GateLowerBound => "linear_attn_config.gate_lower_bound",
            Self::UseFullRankGate => "linear_attn_config.use_full_rank_gate",
            Self::FullAttnLayers => "linear_attn_config.full_attn_layers",
            Self::KdaLayers => "linear_attn_config.kda_layers",
            Self::Quantization => "quantization_config",
            Self::RootQuantization => "quantization_config of the root",
            Self::QuantMethod => "quantization_config.quant_method",
            Self::QuantFormat => "quantization_config.format",
            Self::QuantGroups => "quantization_config.config_groups",
            Self::QuantGroup0 => "quantization_config.config_groups.group_0",
            Self::QuantWeights => "quantization_config.config_groups.group_0.weights",
            Self::QuantBits => "quantization_config.config_groups.group_0.weights.num_bits",
            Self::QuantType => "quantization_config.config_groups.group_0.weights.type",
            Self::QuantStrategy => "quantization_config.config_groups.group_0.weights.strategy",
            Self::QuantGroupSize => "quantization_config.config_groups.group_0.weights.group_size",
            Self::QuantSymmetric => "quantization_config.config_groups.group_0.weights.symmetric",
            Self::QuantDynamic => "quantization_config.config_groups.group_0.weights.dynamic",
            Self::QuantScaleDtype => "quantization_config.config_groups.group_0.weights.scale_dtype",
        }
    }

    /// The last part of [`Field::name`]: the key in its object.
    fn key(self) -> &'static str {
        match self {
            Self::RootQuantization => "quantization_config",
            // From the front: the standard library's search from the end has panics in it.
            _ => self.name().split('.').fold("", |_, part| part),
        }
    }

    /// The key a flat config may use instead (spec 1.1).
    const fn alias(self) -> Option<&'static str> {
        match self {
            Self::SituBeta => Some("situ_beta"),
            Self::SituLinearBeta => Some("situ_linear_beta"),
            _ => None,
        }
    }
}

/// Number of [`Field`]s.
const FIELDS: usize = Field::QuantScaleDtype as usize + 1;

/// An object of the file, with the fields that are read from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Root,
    Text,
    /// Root and text in one.
    Flat,
    Linear,
    Quantization,
    Groups,
    Group0,
    Weights,
}

impl Place {
    /// The field that `key` is in this object, if it is read.
    fn field(self, key: Str<'_>) -> Option<Field> {
        let own = |fields: &[Field]| fields.iter().copied().find(|f| key == f.key());
        match self {
            Self::Root => own(&ROOT),
            Self::Text => own(&TEXT),
            Self::Flat => own(&TEXT)
                .or_else(|| own(&FLAT_IDS))
                .or_else(|| TEXT.iter().copied().find(|f| f.alias().is_some_and(|alias| key == alias)))
                .or_else(|| LINEAR.iter().copied().find(|&f| key == flat_key(f))),
            Self::Linear => own(&LINEAR),
            Self::Quantization => own(&[Field::QuantMethod, Field::QuantFormat, Field::QuantGroups]),
            Self::Groups => own(&[Field::QuantGroup0]),
            Self::Group0 => own(&[Field::QuantWeights]),
            Self::Weights => own(&WEIGHTS),
        }
    }
}

/// How a flat config without `linear_attn_config` names that object's members. The generic
/// `num_heads` and `head_dim` would mean something else there.
fn flat_key(field: Field) -> &'static str {
    match field {
        Field::KdaNumHeads => "kda_num_heads",
        Field::KdaHeadDim => "kda_head_dim",
        _ => field.key(),
    }
}

const ROOT: [Field; 8] = [
    Field::TextConfig,
    Field::Wrapper,
    Field::RootModelType,
    Field::RootTieWordEmbeddings,
    Field::RootQuantization,
    Field::BosTokenId,
    Field::EosTokenId,
    Field::PadTokenId,
];

const FLAT_IDS: [Field; 3] = [Field::BosTokenId, Field::EosTokenId, Field::PadTokenId];

const LINEAR: [Field; 7] = [
    Field::KdaNumHeads,
    Field::KdaHeadDim,
    Field::ConvKernelSize,
    Field::GateLowerBound,
    Field::UseFullRankGate,
    Field::FullAttnLayers,
    Field::KdaLayers,
];

const WEIGHTS: [Field; 7] = [
    Field::QuantBits,
    Field::QuantType,
    Field::QuantStrategy,
    Field::QuantGroupSize,
    Field::QuantSymmetric,
    Field::QuantDynamic,
    Field::QuantScaleDtype,
];

const TEXT: [Field; 37] = [
    Field::LinearAttnConfig,
    Field::ModelType,
    Field::TieWordEmbeddings,
    Field::VocabSize,
    Field::HiddenSize,
    Field::NumHiddenLayers,
    Field::NumAttentionHeads,
    Field::NumKeyValueHeads,
    Field::IntermediateSize,
    Field::RmsNormEps,
    Field::HiddenAct,
    Field::SituBeta,
    Field::SituLinearBeta,
    Field::AttnResBlockSize,
    Field::QLoraRank,
    Field::KvLoraRank,
    Field::QkNopeHeadDim,
    Field::QkRopeHeadDim,
    Field::VHeadDim,
    Field::MlaUseNope,
    Field::MlaUseOutputGate,
    Field::FirstKDenseReplace,
    Field::MoeLayerFreq,
    Field::NumExperts,
    Field::NumExpertsPerToken,
    Field::NumSharedExperts,
    Field::MoeIntermediateSize,
    Field::RoutedExpertHiddenSize,
    Field::LatentMoeUseNorm,
    Field::RouterActivation,
    Field::MoeRenormalize,
    Field::RoutedScalingFactor,
    Field::NumExpertGroup,
    Field::TopkGroup,
    Field::NumNextnPredictLayers,
    Field::MaxPositionEmbeddings,
    Field::Quantization,
];

/// The kind of a JSON value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum JsonType {
    /// A number without sign, fraction and exponent that fits 64 bits.
    Integer,
    /// Any number.
    Number,
    /// A string.
    String,
    /// `true` or `false`.
    Bool,
    /// `null`
    Null,
    /// An array.
    Array,
    /// An object.
    Object,
}

impl JsonType {
    fn of(value: &[u8]) -> Self {
        match value.first() {
            Some(b'{') => Self::Object,
            Some(b'[') => Self::Array,
            Some(b'"') => Self::String,
            Some(b't' | b'f') => Self::Bool,
            Some(b'n') | None => Self::Null,
            Some(_) => Self::Number,
        }
    }
}

impl fmt::Display for JsonType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Integer => "an integer",
            Self::Number => "a number",
            Self::String => "a string",
            Self::Bool => "a bool",
            Self::Null => "null",
            Self::Array => "an array",
            Self::Object => "an object",
        })
    }
}

/// What is wrong with a field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum FaultKind {
    /// The file is not JSON.
    Json(JsonError),
    /// The field is not there, and its value is never guessed.
    Missing,
    /// The value has the wrong JSON type.
    WrongType {
        /// The type it must have.
        expected: JsonType,
        /// The type it has.
        found: JsonType,
    },
    /// The field is given more than once, under one name or under a name and its alias.
    Duplicate,
    /// The value names a variant of the model that this engine does not compute.
    Unsupported {
        /// The only value that is computed, as JSON.
        supported: &'static str,
    },
    /// An integer out of range.
    Range {
        /// Least value.
        min: u64,
        /// Greatest value.
        max: u64,
        /// The value.
        found: u64,
    },
    /// A number that is not finite in f32 or not of the sign it needs.
    Number {
        /// The rule it breaks.
        rule: NumberRule,
        /// The value.
        found: f64,
    },
    /// MXFP4 scales cover 32 elements, so the width must be a multiple of 32.
    Multiple {
        /// The divisor.
        of: u64,
        /// The value.
        found: u64,
    },
    /// The field must have the value of another one.
    Mismatch {
        /// The other field.
        with: Field,
        /// Its value.
        expected: u64,
        /// This field's value.
        found: u64,
    },
    /// This field times (or plus) another is a width that is larger than [`MAX_DIM`].
    Width {
        /// The other factor.
        with: Field,
        /// The width.
        found: u64,
    },
    /// Tensors with this width twice would not have sizes that fit 64 bits.
    TooLarge {
        /// The width.
        width: u64,
    },
    /// The layer lists are both empty, or the one that decides is.
    NoLayers,
    /// A number in a layer list is not a layer. Lists count from one.
    NoSuchLayer {
        /// The number as listed.
        listed: u64,
        /// Layers the model has.
        layers: u64,
    },
    /// A layer stands twice in one list or in both. Lists count from one.
    LayerTwice {
        /// The layer as listed.
        listed: u64,
    },
    /// A layer stands in neither list. Lists count from one.
    LayerMissing {
        /// The layer as it would be listed.
        listed: u64,
    },
    /// Two forms of config in one file: which one counts would be a guess.
    Ambiguous,
}

/// What a real number must satisfy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NumberRule {
    /// Finite.
    Finite,
    /// Finite and above zero.
    Positive,
    /// Finite and below zero.
    Negative,
}

/// One thing that is wrong with a config.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Fault {
    /// Where.
    pub field: Field,
    /// What.
    pub kind: FaultKind,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.field.name())?;
        match self.kind {
            FaultKind::Json(error) => write!(f, ": not JSON: {error}"),
            FaultKind::Missing => f.write_str(": missing; take it from the released config.json, it is never guessed"),
            FaultKind::WrongType { expected, found } => write!(f, ": expected {expected}, found {found}"),
            FaultKind::Duplicate => f.write_str(": given more than once; keep one"),
            FaultKind::Unsupported { supported } => {
                write!(f, ": this variant is not computed; supported is {supported}")
            }
            FaultKind::Range { min, max, found } => write!(f, ": {found} is not in {min}..={max}"),
            FaultKind::Number { rule, found } => {
                let rule = match rule {
                    NumberRule::Finite => "finite",
                    NumberRule::Positive => "finite and above zero",
                    NumberRule::Negative => "finite and below zero",
                };
                write!(f, ": {found:e} must be {rule}")
            }
            FaultKind::Multiple { of, found } => write!(f, ": {found} is not a multiple of {of}, which MXFP4 needs"),
            FaultKind::Mismatch { with, expected, found } => {
                write!(f, ": {found} differs from {} = {expected}", with.name())
            }
            FaultKind::Width { with, found } => {
                write!(f, ": together with {} a width of {found}, more than {MAX_DIM}", with.name())
            }
            FaultKind::TooLarge { width } => {
                write!(f, ": a width of {width} makes the checkpoint larger than 64 bits can count")
            }
            FaultKind::NoLayers => f.write_str(": empty; list the MLA layers, counted from one"),
            FaultKind::NoSuchLayer { listed, layers } => {
                write!(f, ": {listed} is not a layer of 1..={layers} (layers count from one here)")
            }
            FaultKind::LayerTwice { listed } => write!(f, ": layer {listed} (counted from one) is listed twice"),
            FaultKind::LayerMissing { listed } => write!(f, ": layer {listed} (counted from one) is in neither list"),
            FaultKind::Ambiguous => f.write_str(": stands beside another form of config; keep one"),
        }
    }
}

/// Why a config is refused: everything that is wrong with it, at most one fault a field.
///
/// It is a few kilobytes, since it cannot allocate: box it to carry it far.
#[derive(Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ConfigError {
    faults: [Fault; Self::CAPACITY],
    count: usize,
}

impl ConfigError {
    /// Most faults that are kept.
    pub const CAPACITY: usize = FIELDS;

    const NONE: Self =
        Self { faults: [Fault { field: Field::Document, kind: FaultKind::Missing }; Self::CAPACITY], count: 0 };

    fn one(field: Field, kind: FaultKind) -> Self {
        let mut error = Self::NONE;
        error.push(field, kind);
        error
    }

    /// The faults in the order of discovery, at least one.
    #[must_use]
    pub fn faults(&self) -> &[Fault] {
        self.faults.get(..self.count).unwrap_or(&self.faults)
    }

    fn has(&self, field: Field) -> bool {
        self.faults().iter().any(|fault| fault.field == field)
    }

    /// Keeps the first fault of a field: the others would be consequences.
    fn push(&mut self, field: Field, kind: FaultKind) {
        if !self.has(field)
            && let Some(slot) = self.faults.get_mut(self.count)
        {
            *slot = Fault { field, kind };
            self.count = self.count.saturating_add(1);
        }
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.faults()).finish()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, fault) in self.faults().iter().enumerate() {
            if i > 0 {
                f.write_str("; ")?;
            }
            fault.fmt(f)?;
        }
        Ok(())
    }
}

impl core::error::Error for ConfigError {}

/// The bytes of every field that was found, and what was wrong so far.
struct Reader<'a> {
    values: [Option<&'a [u8]>; FIELDS],
    nested: bool,
    faults: ConfigError,
}

impl<'a> Reader<'a> {
    const fn new() -> Self {
        Self { values: [None; FIELDS], nested: false, faults: ConfigError::NONE }
    }

    fn raw(&self, field: Field) -> Option<&'a [u8]> {
        self.values.get(field as usize).copied().flatten()
    }

    /// Notes where each field of `object` stands.
    fn scan(&mut self, object: &'a [u8], place: Place) -> Result<(), JsonError> {
        let mut parser = Parser::new(object);
        if parser.next()? != Some(Event::ObjectStart) {
            return Ok(());
        }
        while let Some(Event::Key(key)) = parser.next()? {
            let value = parser.raw_value()?;
            let Some(field) = place.field(key) else {
                if place == Place::Groups {
                    self.faults.push(Field::QuantGroups, FaultKind::Unsupported { supported: "group_0 alone" });
                }
                continue;
            };
            match self.values.get_mut(field as usize) {
                Some(slot @ None) => *slot = Some(value),
                _ => self.faults.push(field, FaultKind::Duplicate),
            }
        }
        Ok(())
    }

    /// The object of `field`; a fault if it is something else. `null` counts as absent where the
    /// object is optional.
    fn object(&mut self, field: Field, required: bool) -> Option<&'a [u8]> {
        let value = self.raw(field).filter(|v| required || JsonType::of(v) != JsonType::Null);
        match value {
            Some(value) if JsonType::of(value) == JsonType::Object => Some(value),
            Some(value) => {
                self.wrong_type(field, JsonType::Object, value);
                None
            }
            None => {
                if required {
                    self.faults.push(field, FaultKind::Missing);
                }
                None
            }
        }
    }

    /// Finds every field of the file.
    fn locate(&mut self, bytes: &'a [u8]) -> Result<(), JsonError> {
        let mut parser = Parser::new(bytes);
        let mut root = parser.raw_value()?;
        parser.next()?;
        if JsonType::of(root) != JsonType::Object {
            self.wrong_type(Field::Document, JsonType::Object, root);
            return Ok(());
        }
        if let Some(inner) = self.unwrapped(root)? {
            root = inner;
        }
        self.nested = has_key(root, "text_config")?;
        if self.nested {
            self.scan(root, Place::Root)?;
            if let Some(text) = self.object(Field::TextConfig, true) {
                self.scan(text, Place::Text)?;
            }
        } else {
            self.scan(root, Place::Flat)?;
        }
        if let Some(linear) = self.object(Field::LinearAttnConfig, self.nested) {
            self.scan(linear, Place::Linear)?;
        }
        for field in [Field::Quantization, Field::RootQuantization] {
            if let Some(quantization) = self.object(field, false) {
                self.quantization(quantization)?;
            }
        }
        Ok(())
    }

    /// The object inside a `config` wrapper, if the root is one.
    fn unwrapped(&mut self, root: &'a [u8]) -> Result<Option<&'a [u8]>, JsonError> {
        let mut inner = None;
        let mut parser = Parser::new(root);
        parser.next()?;
        while let Some(Event::Key(key)) = parser.next()? {
            let value = parser.raw_value()?;
            if key == "config" && JsonType::of(value) == JsonType::Object {
                if inner.is_some() {
                    self.faults.push(Field::Wrapper, FaultKind::Duplicate);
                }
                inner = Some(value);
            }
        }
        if inner.is_some() && (has_key(root, "text_config")? || has_key(root, "num_hidden_layers")?) {
            self.faults.push(Field::Wrapper, FaultKind::Ambiguous);
            return Ok(None);
        }
        Ok(inner)
    }

    /// Checks one description of MXFP4 (spec 1.2).
    fn quantization(&mut self, object: &'a [u8]) -> Result<(), JsonError> {
        let fields = [Field::QuantMethod, Field::QuantFormat, Field::QuantGroups, Field::QuantGroup0];
        for field in fields.into_iter().chain([Field::QuantWeights]).chain(WEIGHTS) {
            if let Some(slot) = self.values.get_mut(field as usize) {
                *slot = None;
            }
        }
        self.scan(object, Place::Quantization)?;
        self.text(Field::QuantMethod, &["compressed-tensors"], "\"compressed-tensors\"", true);
        self.text(Field::QuantFormat, &["mxfp4-pack-quantized"], "\"mxfp4-pack-quantized\"", true);
        let Some(groups) = self.object(Field::QuantGroups, true) else { return Ok(()) };
        self.scan(groups, Place::Groups)?;
        let Some(group) = self.object(Field::QuantGroup0, true) else { return Ok(()) };
        self.scan(group, Place::Group0)?;
        let Some(weights) = self.object(Field::QuantWeights, true) else { return Ok(()) };
        self.scan(weights, Place::Weights)?;
        self.equal(Field::QuantBits, 4, "4", true);
        self.equal(Field::QuantGroupSize, GROUP as u64, "32", true);
        self.text(Field::QuantType, &["float"], "\"float\"", false);
        self.text(Field::QuantStrategy, &["group"], "\"group\"", false);
        self.text(Field::QuantScaleDtype, &["uint8", "torch.uint8"], "\"uint8\"", false);
        self.flag(Field::QuantSymmetric, true, "true", false);
        self.flag(Field::QuantDynamic, false, "false", false);
        Ok(())
    }

    fn wrong_type(&mut self, field: Field, expected: JsonType, value: &[u8]) {
        self.faults.push(field, FaultKind::WrongType { expected, found: JsonType::of(value) });
    }

    /// The single event that `field` is, or a fault if it is missing.
    fn scalar(&mut self, field: Field, required: bool) -> Option<(&'a [u8], Event<'a>)> {
        let Some(value) = self.raw(field) else {
            if required {
                self.faults.push(field, FaultKind::Missing);
            }
            return None;
        };
        Some((value, Parser::new(value).next().ok().flatten()?))
    }

    fn number(&mut self, field: Field, expected: JsonType, required: bool) -> Option<Number<'a>> {
        match self.scalar(field, required)? {
            (_, Event::Number(number)) => Some(number),
            (value, _) => {
                self.wrong_type(field, expected, value);
                None
            }
        }
    }

    fn integer(&mut self, field: Field, required: bool) -> Option<u64> {
        let number = self.number(field, JsonType::Integer, required)?;
        let value = number.as_u64();
        if value.is_none() {
            self.wrong_type(field, JsonType::Integer, number.text().as_bytes());
        }
        value
    }

    /// A required integer of `min..=max`; zero beside a fault.
    fn size(&mut self, field: Field, min: usize, max: usize) -> usize {
        let Some(found) = self.integer(field, true) else { return 0 };
        match usize::try_from(found) {
            Ok(value) if (min..=max).contains(&value) => value,
            _ => {
                self.faults.push(field, FaultKind::Range { min: min as u64, max: max as u64, found });
                0
            }
        }
    }

    fn dim(&mut self, field: Field) -> usize {
        self.size(field, 1, MAX_DIM)
    }

    /// A token id of the root; `null` counts as absent.
    fn id(&mut self, field: Field) -> Option<u32> {
        if self.raw(field).is_some_and(|v| JsonType::of(v) == JsonType::Null) {
            return None;
        }
        let found = self.integer(field, false)?;
        let id = u32::try_from(found).ok();
        if id.is_none() {
            self.faults.push(field, FaultKind::Range { min: 0, max: u64::from(u32::MAX), found });
        }
        id
    }

    /// A required real number; zero beside a fault.
    fn real<T: Real>(&mut self, field: Field, rule: NumberRule) -> T {
        let Some(number) = self.number(field, JsonType::Number, true) else { return T::default() };
        let value = T::read(number);
        let fits = match rule {
            NumberRule::Finite => true,
            NumberRule::Positive => value > T::default(),
            NumberRule::Negative => value < T::default(),
        };
        if !fits || !value.into().is_finite() {
            self.faults.push(field, FaultKind::Number { rule, found: number.as_f64() });
        }
        value
    }

    fn equal(&mut self, field: Field, only: u64, supported: &'static str, required: bool) {
        if self.integer(field, required).is_some_and(|value| value != only) {
            self.faults.push(field, FaultKind::Unsupported { supported });
        }
    }

    fn text(&mut self, field: Field, only: &[&str], supported: &'static str, required: bool) {
        match self.scalar(field, required) {
            Some((_, Event::Str(text))) if only.iter().any(|&o| text == o) => {}
            Some((_, Event::Str(_))) => self.faults.push(field, FaultKind::Unsupported { supported }),
            Some((value, _)) => self.wrong_type(field, JsonType::String, value),
            None => {}
        }
    }

    fn bool(&mut self, field: Field, required: bool) -> Option<bool> {
        match self.scalar(field, required)? {
            (_, Event::Bool(value)) => Some(value),
            (value, _) => {
                self.wrong_type(field, JsonType::Bool, value);
                None
            }
        }
    }

    fn flag(&mut self, field: Field, only: bool, supported: &'static str, required: bool) {
        if self.bool(field, required).is_some_and(|value| value != only) {
            self.faults.push(field, FaultKind::Unsupported { supported });
        }
    }

    /// A list of layers counted from one, as a set; `None` beside a fault or if it is absent.
    fn list(&mut self, field: Field, layers: usize, required: bool) -> Option<(LayerMap, usize)> {
        let Some(value) = self.raw(field) else {
            if required {
                self.faults.push(field, FaultKind::Missing);
            }
            return None;
        };
        if JsonType::of(value) != JsonType::Array {
            self.wrong_type(field, JsonType::Array, value);
            return None;
        }
        let mut parser = Parser::new(value);
        parser.next().ok()?;
        let (mut map, mut count) = (LayerMap::EMPTY, 0_usize);
        loop {
            let event = parser.next().ok().flatten()?;
            let listed = match event {
                Event::ArrayEnd => break,
                Event::Number(n) => n.as_u64(),
                _ => None,
            };
            let Some(listed) = listed else {
                let rest = usize::try_from(parser.token_offset()).ok().and_then(|at| value.get(at..));
                self.wrong_type(field, JsonType::Integer, rest.unwrap_or_default());
                return None;
            };
            let index = listed.checked_sub(1).and_then(|l| u16::try_from(l).ok()).map(LayerIndex);
            let Some(l) = index.filter(|l| l.get() < layers) else {
                if layers > 0 {
                    self.faults.push(field, FaultKind::NoSuchLayer { listed, layers: layers as u64 });
                }
                return None;
            };
            if map.is_mla(l) {
                self.faults.push(field, FaultKind::LayerTwice { listed });
                return None;
            }
            map = map.with(l);
            count = count.saturating_add(1);
        }
        Some((map, count))
    }

    /// The layer map (spec 1.3). `layers` is zero if the number is not known.
    fn layer_map(&mut self, layers: usize) -> LayerMap {
        let full = self.list(Field::FullAttnLayers, layers, true);
        let kda = self.list(Field::KdaLayers, layers, self.nested);
        let Some((full, count)) = full else { return LayerMap::EMPTY };
        if count == 0 {
            self.faults.push(Field::FullAttnLayers, FaultKind::NoLayers);
        } else if let Some((kda, _)) = kda {
            for l in (0..layers).filter_map(|l| u16::try_from(l).ok()).map(LayerIndex) {
                let listed = u64::from(l.0).saturating_add(1);
                match (full.is_mla(l), kda.is_mla(l)) {
                    (true, true) => self.faults.push(Field::KdaLayers, FaultKind::LayerTwice { listed }),
                    (false, false) => self.faults.push(Field::KdaLayers, FaultKind::LayerMissing { listed }),
                    _ => {}
                }
            }
        }
        full
    }

    /// All fields by the table of spec 1.2.
    fn config(&mut self) -> ModelConfig {
        if self.faults.has(Field::Document) {
            // Not even an object: that every field is missing goes without saying.
            return ModelConfig::NOTHING;
        }
        if self.nested {
            self.text(Field::RootModelType, &["kimi_k3"], "\"kimi_k3\"", true);
            self.text(Field::ModelType, &["kimi_linear"], "\"kimi_linear\"", false);
        } else {
            self.text(Field::ModelType, &["kimi_linear", "kimi_k3"], "\"kimi_linear\"", false);
        }
        if self.nested && self.faults.has(Field::TextConfig) {
            return ModelConfig::NOTHING;
        }
        self.text(Field::HiddenAct, &["situ"], "\"situ\"", true);
        self.text(Field::RouterActivation, &["sigmoid"], "\"sigmoid\"", true);
        self.flag(Field::MlaUseNope, true, "true", true);
        self.flag(Field::MlaUseOutputGate, true, "true", true);
        self.flag(Field::LatentMoeUseNorm, true, "true", true);
        self.flag(Field::UseFullRankGate, true, "true", self.nested && !self.faults.has(Field::LinearAttnConfig));
        self.flag(Field::TieWordEmbeddings, false, "false", false);
        self.flag(Field::RootTieWordEmbeddings, false, "false", false);
        self.equal(Field::MoeLayerFreq, 1, "1", false);
        self.equal(Field::NumExpertGroup, 1, "1", false);
        self.equal(Field::TopkGroup, 1, "1", false);
        self.equal(Field::NumNextnPredictLayers, 0, "0", false);

        let num_hidden_layers = self.size(Field::NumHiddenLayers, 1, MAX_LAYERS);
        let num_experts = self.size(Field::NumExperts, 1, MAX_EXPERTS);
        let most = |n: usize, limit| if n == 0 { limit } else { n };
        let config = ModelConfig {
            vocab_size: self.dim(Field::VocabSize),
            hidden_size: self.dim(Field::HiddenSize),
            num_hidden_layers,
            num_attention_heads: self.dim(Field::NumAttentionHeads),
            intermediate_size: self.dim(Field::IntermediateSize),
            q_lora_rank: self.dim(Field::QLoraRank),
            kv_lora_rank: self.dim(Field::KvLoraRank),
            qk_nope_head_dim: self.dim(Field::QkNopeHeadDim),
            qk_rope_head_dim: self.dim(Field::QkRopeHeadDim),
            v_head_dim: self.dim(Field::VHeadDim),
            first_k_dense_replace: self.size(Field::FirstKDenseReplace, 0, most(num_hidden_layers, MAX_LAYERS)),
            num_experts,
            num_experts_per_token: self.size(Field::NumExpertsPerToken, 1, most(num_experts, MAX_EXPERTS)),
            num_shared_experts: self.dim(Field::NumSharedExperts),
            moe_intermediate_size: self.dim(Field::MoeIntermediateSize),
            routed_expert_hidden_size: self.dim(Field::RoutedExpertHiddenSize),
            attn_res_block_size: self.dim(Field::AttnResBlockSize),
            kda_num_heads: self.dim(Field::KdaNumHeads),
            kda_head_dim: self.dim(Field::KdaHeadDim),
            conv_kernel_size: self.dim(Field::ConvKernelSize),
            max_position_embeddings: self.positions(),
            rms_norm_eps: self.real(Field::RmsNormEps, NumberRule::Positive),
            situ_beta: self.real(Field::SituBeta, NumberRule::Positive),
            situ_linear_beta: self.real(Field::SituLinearBeta, NumberRule::Positive),
            routed_scaling_factor: self.real(Field::RoutedScalingFactor, NumberRule::Finite),
            gate_lower_bound: self.real(Field::GateLowerBound, NumberRule::Negative),
            moe_renormalize: self.bool(Field::MoeRenormalize, true).unwrap_or_default(),
            eos_token_id: self.id(Field::EosTokenId),
            bos_token_id: self.id(Field::BosTokenId),
            pad_token_id: self.id(Field::PadTokenId),
            layer_map: self.layer_map(num_hidden_layers),
        };
        self.cross_check(&config);
        config
    }

    fn positions(&mut self) -> Option<usize> {
        if self.raw(Field::MaxPositionEmbeddings).is_none_or(|v| JsonType::of(v) == JsonType::Null) {
            return None;
        }
        Some(self.size(Field::MaxPositionEmbeddings, 1, MAX_DIM))
    }

    /// Rules that join fields. A field with a fault is zero here and breaks none.
    fn cross_check(&mut self, c: &ModelConfig) {
        if let Some(found) = self.integer(Field::NumKeyValueHeads, false)
            && c.num_attention_heads > 0
            && found != c.num_attention_heads as u64
        {
            let (with, expected) = (Field::NumAttentionHeads, c.num_attention_heads as u64);
            self.faults.push(Field::NumKeyValueHeads, FaultKind::Mismatch { with, expected, found });
        }
        for (field, width) in [
            (Field::MoeIntermediateSize, c.moe_intermediate_size),
            (Field::RoutedExpertHiddenSize, c.routed_expert_hidden_size),
        ] {
            if !width.is_multiple_of(GROUP) {
                self.faults.push(field, FaultKind::Multiple { of: GROUP as u64, found: width as u64 });
            }
        }
        // In u64, so that a target with a narrow usize refuses the same files in the same words.
        let times = |a: usize, b: u64| (a as u64).saturating_mul(b);
        let plus = |a: usize, b: usize| (a as u64).saturating_add(b as u64);
        let (q, kv) = (plus(c.qk_nope_head_dim, c.qk_rope_head_dim), plus(c.qk_nope_head_dim, c.v_head_dim));
        let widths = [
            (Field::KdaNumHeads, Field::KdaHeadDim, times(c.kda_num_heads, c.kda_head_dim as u64)),
            (Field::NumSharedExperts, Field::MoeIntermediateSize, {
                times(c.num_shared_experts, c.moe_intermediate_size as u64)
            }),
            (Field::NumAttentionHeads, Field::QkNopeHeadDim, times(c.num_attention_heads, q)),
            (Field::NumAttentionHeads, Field::VHeadDim, times(c.num_attention_heads, kv)),
            (Field::KvLoraRank, Field::QkRopeHeadDim, plus(c.kv_lora_rank, c.qk_rope_head_dim)),
        ];
        for (field, with, found) in widths {
            if found > MAX_DIM as u64 {
                self.faults.push(field, FaultKind::Width { with, found });
            }
        }
        // No tensor is larger than the square of the largest width in f32, and there are fewer
        // than this many: so every size and every sum of sizes fits 64 bits.
        let single = [
            (Field::VocabSize, c.vocab_size),
            (Field::HiddenSize, c.hidden_size),
            (Field::IntermediateSize, c.intermediate_size),
            (Field::QLoraRank, c.q_lora_rank),
            (Field::MoeIntermediateSize, c.moe_intermediate_size),
            (Field::RoutedExpertHiddenSize, c.routed_expert_hidden_size),
            (Field::ConvKernelSize, c.conv_kernel_size),
            (Field::NumExperts, c.num_experts),
        ];
        let joint = widths.iter().map(|&(field, _, width)| (field, width));
        let single = single.into_iter().map(|(field, width)| (field, width as u64));
        let Some((field, width)) = single.chain(joint).max_by_key(|&(_, width)| width) else { return };
        let per_layer = (c.num_experts as u64).saturating_mul(6).saturating_add(64);
        let tensors = (c.num_hidden_layers as u64).saturating_mul(per_layer);
        if width.checked_mul(width).and_then(|n| n.checked_mul(4)).and_then(|n| n.checked_mul(tensors)).is_none() {
            self.faults.push(field, FaultKind::TooLarge { width });
        }
    }
}

impl ModelConfig {
    /// What a refused file amounts to.
    const NOTHING: Self = Self {
        vocab_size: 0,
        hidden_size: 0,
        num_hidden_layers: 0,
        num_attention_heads: 0,
        intermediate_size: 0,
        q_lora_rank: 0,
        kv_lora_rank: 0,
        qk_nope_head_dim: 0,
        qk_rope_head_dim: 0,
        v_head_dim: 0,
        first_k_dense_replace: 0,
        num_experts: 0,
        num_experts_per_token: 0,
        num_shared_experts: 0,
        moe_intermediate_size: 0,
        routed_expert_hidden_size: 0,
        attn_res_block_size: 0,
        kda_num_heads: 0,
        kda_head_dim: 0,
        conv_kernel_size: 0,
        max_position_embeddings: None,
        rms_norm_eps: 0.0,
        situ_beta: 0.0,
        situ_linear_beta: 0.0,
        routed_scaling_factor: 0.0,
        gate_lower_bound: 0.0,
        moe_renormalize: false,
        eos_token_id: None,
        bos_token_id: None,
        pad_token_id: None,
        layer_map: LayerMap::EMPTY,
    };
}

/// f32 or f64, rounded once from the text.
trait Real: Copy + Default + PartialOrd + Into<f64> {
    fn read(number: Number<'_>) -> Self;
}

impl Real for f32 {
    fn read(number: Number<'_>) -> Self {
        number.as_f32()
    }
}

impl Real for f64 {
    fn read(number: Number<'_>) -> Self {
        number.as_f64()
    }
}

fn has_key(object: &[u8], name: &str) -> Result<bool, JsonError> {
    let mut parser = Parser::new(object);
    parser.next()?;
    while let Some(Event::Key(key)) = parser.next()? {
        if key == name {
            return Ok(true);
        }
        parser.skip_value()?;
    }
    Ok(false)
}

/// Configs that the tests of several modules read.
#[cfg(test)]
pub(crate) mod test_configs {
    pub(crate) const RELEASED: &str = super::RELEASED_JSON;

    /// Thirteen small layers in the nested form, with the fields the release has and nobody reads.
    pub(crate) const TINY: &str = r#"{"architectures":["KimiK3ForConditionalGeneration"],"model_type":"kimi_k3","dtype":"bfloat16",
"bos_token_id":384,"eos_token_id":386,"pad_token_id":639,"media_placeholder_token_id":405,
"tie_word_embeddings":false,"text_config":{"architectures":["KimiLinearForCausalLM"],
"model_type":"kimi_linear","vocab_size":640,"hidden_size":128,"num_hidden_layers":13,
"num_attention_heads":4,"num_key_value_heads":4,"head_dim":32,"intermediate_size":192,
"moe_intermediate_size":64,"hidden_act":"situ","activation_situ_beta":4.0,
"activation_situ_linear_beta":25.0,"attn_res_block_size":12,"rms_norm_eps":1e-05,"q_lora_rank":64,
"kv_lora_rank":32,"qk_nope_head_dim":24,"qk_rope_head_dim":8,"v_head_dim":16,"mla_use_nope":true,
"mla_use_output_gate":true,"linear_attn_config":{"kda_layers":[1,2,3,5,6,7,9,10,11],
"full_attn_layers":[4,8,12,13],"num_heads":4,"head_dim":32,"short_conv_kernel_size":4,
"gate_lower_bound":-5.0,"use_full_rank_gate":true},"num_experts":32,"num_experts_per_token":4,
"num_shared_experts":2,"routed_expert_hidden_size":64,"latent_moe_use_norm":true,
"moe_renormalize":true,"moe_router_activation_func":"sigmoid","routed_scaling_factor":1.0,
"first_k_dense_replace":1,"moe_layer_freq":1,"use_grouped_topk":true,"num_expert_group":1,
"topk_group":1,"topk_method":"noaux_tc","num_nextn_predict_layers":0,
"max_position_embeddings":1048576,"tie_word_embeddings":false,"use_cache":true,"dtype":"bfloat16",
"bos_token_id":384,"eos_token_id":386,"pad_token_id":639,
"quantization_config":{"quant_method":"compressed-tensors","format":"mxfp4-pack-quantized",
"quantization_status":"compressed","kv_cache_scheme":null,
"config_groups":{"group_0":{"format":"mxfp4-pack-quantized","input_activations":null,
"output_activations":null,"targets":["Linear"],"weights":{"num_bits":4,"type":"float",
"strategy":"group","group_size":32,"symmetric":true,"dynamic":false,"scale_dtype":"torch.uint8"}}},
"ignore":["re:.*self_attn.*","re:.*shared_experts.*","re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
"re:.*lm_head.*","re:.*vision_tower.*","re:.*mm_projector.*"]}},
"vision_config":{"model_type":"kimi_k3_vision","patch_size":14,"vt_hidden_size":8,
"vt_num_hidden_layers":1,"vt_num_attention_heads":1,"text_hidden_size":128}}"#;

    /// The flat form with its aliases (spec 1.1), in its wrapper.
    pub(crate) const FLAT: &str = r#"{"config": {"vocab_size":256,"hidden_size":128,"num_hidden_layers":13,
 "num_attention_heads":4,"intermediate_size":96,"rms_norm_eps":1e-5,"hidden_act":"situ","situ_beta":4,
 "situ_linear_beta":25.0,"attn_res_block_size":3,"q_lora_rank":64,"kv_lora_rank":32,"qk_nope_head_dim":24,
 "qk_rope_head_dim":8,"v_head_dim":16,"mla_use_nope":true,"mla_use_output_gate":true,"first_k_dense_replace":1,
 "num_experts":8,"num_experts_per_token":2,"num_shared_experts":2,"moe_intermediate_size":32,
 "routed_expert_hidden_size":64,"latent_moe_use_norm":true,"moe_router_activation_func":"sigmoid",
 "moe_renormalize":false,"routed_scaling_factor":-2.5,"kda_num_heads":4,"kda_head_dim":16,"num_heads":9,"head_dim":77,
 "short_conv_kernel_size":4,"gate_lower_bound":-5,"full_attn_layers":[4,8,12,13]}}"#;
}

#[cfg(test)]
mod tests {
    use super::test_configs::{FLAT, RELEASED, TINY};
    use super::*;
    use std::format;
    use std::string::{String, ToString};
    use std::vec::Vec;

    fn parse(text: &str) -> ModelConfig {
        ModelConfig::parse(text.as_bytes()).unwrap()
    }

    fn faults(text: &str) -> Vec<(Field, FaultKind)> {
        ModelConfig::parse(text.as_bytes()).unwrap_err().faults().iter().map(|f| (f.field, f.kind)).collect()
    }

    /// `text` with one place changed; the place must exist.
    fn edit(text: &str, from: &str, to: &str) -> String {
        assert!(text.contains(from), "{from}");
        text.replacen(from, to, 1)
    }

    fn one(text: &str, from: &str, to: &str) -> (Field, FaultKind) {
        let found = faults(&edit(text, from, to));
        assert_eq!(found.len(), 1, "{from} -> {to}: {found:?}");
        found[0]
    }

    #[test]
    fn the_release_is_read() {
        let c = parse(RELEASED);
        assert_eq!((c.vocab_size, c.hidden_size, c.num_hidden_layers), (163_840, 7168, 93));
        assert_eq!((c.kda_width(), c.shared_width(), c.qk_head_dim(), c.latent_width()), (12_288, 6144, 192, 576));
        assert_eq!((c.num_kda_layers(), c.num_mla_layers(), c.num_moe_layers()), (69, 24, 92));
        let mla: Vec<_> = c.layers().filter(|&l| c.layer_kind(l) == LayerKind::Mla).map(|l| l.0).collect();
        let wanted: Vec<_> = (0..92).filter(|l| l % 4 == 3).chain([92]).collect();
        assert_eq!(mla, wanted);
        for (i, &l) in mla.iter().enumerate() {
            assert_eq!((c.mla_ordinal(LayerIndex(l)), c.kda_ordinal(LayerIndex(l))), (i, usize::from(l) - i));
        }
        assert_eq!(c.mlp_kind(LayerIndex(0)), MlpKind::Dense);
        assert_eq!(c.mlp_kind(LayerIndex(1)), MlpKind::Moe);
        assert_eq!(c.rms_norm_eps.to_bits(), 1e-5_f64.to_bits());
        assert_eq!((c.eos_token_id, c.max_position_embeddings), (Some(163_586), Some(1 << 20)));
    }

    #[test]
    fn the_small_ones_are_read() {
        let c = parse(TINY);
        assert_eq!((c.kda_num_heads, c.kda_head_dim, c.num_experts, c.num_mla_layers()), (4, 32, 32, 4));
        let c = parse(FLAT);
        assert_eq!((c.kda_num_heads, c.kda_head_dim, c.num_kda_layers()), (4, 16, 9));
        assert_eq!((c.moe_renormalize, c.eos_token_id), (false, None));
        assert_eq!(c.routed_scaling_factor.to_bits(), (-2.5_f32).to_bits());
        let flat = &FLAT["{\"config\": ".len()..FLAT.len() - 1];
        assert_eq!(parse(flat), c);
    }

    #[test]
    fn everything_that_is_missing_is_named_at_once() {
        let found = faults(r#"{"model_type":"kimi_k3","text_config":{"linear_attn_config":{}}}"#);
        for name in ["vocab_size", "linear_attn_config.num_heads", "linear_attn_config.kda_layers", "moe_renormalize"] {
            assert!(found.iter().any(|(f, k)| f.name() == name && *k == FaultKind::Missing), "{name}");
        }
        let (optional, container) = (9, 1);
        assert_eq!(found.len(), TEXT.len() + LINEAR.len() - optional - container, "{found:?}");
        assert!(found.iter().all(|(_, kind)| *kind == FaultKind::Missing), "{found:?}");
        assert!(found.len() <= ConfigError::CAPACITY);
        let text = ModelConfig::parse(b"{}").unwrap_err().to_string();
        assert!(text.contains("num_experts: missing") && text.contains("; hidden_size: missing"), "{text}");
        assert!(!text.contains('\n'));
    }

    #[test]
    fn each_required_field_is_missed_by_name() {
        for field in TEXT.into_iter().chain(LINEAR) {
            let optional = [
                Field::ModelType,
                Field::TieWordEmbeddings,
                Field::NumKeyValueHeads,
                Field::MoeLayerFreq,
                Field::NumExpertGroup,
                Field::TopkGroup,
                Field::NumNextnPredictLayers,
                Field::MaxPositionEmbeddings,
                Field::Quantization,
            ];
            // The last place: `tie_word_embeddings` and `model_type` are in the root as well.
            let key = format!("\"{}\":", field.key());
            let at = RELEASED.rfind(&key).unwrap();
            let renamed = format!("{}\"renamed\":{}", &RELEASED[..at], &RELEASED[at + key.len()..]);
            if optional.contains(&field) {
                parse(&renamed);
            } else {
                let found = faults(&renamed);
                assert!(found.contains(&(field, FaultKind::Missing)), "{field:?}: {found:?}");
                assert!(found.len() == 1 || field == Field::LinearAttnConfig || field == Field::NumHiddenLayers);
            }
        }
    }

    #[test]
    fn values_are_judged() {
        let unsupported = |supported| FaultKind::Unsupported { supported };
        let wrong = |expected, found| FaultKind::WrongType { expected, found };
        let range = |min, max, found| FaultKind::Range { min, max, found };
        let number = |rule, found| FaultKind::Number { rule, found };
        let dim = MAX_DIM as u64;
        let cases = [
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":true",
                Field::HiddenSize,
                wrong(JsonType::Integer, JsonType::Bool),
            ),
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":7168.0",
                Field::HiddenSize,
                wrong(JsonType::Integer, JsonType::Number),
            ),
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":-1",
                Field::HiddenSize,
                wrong(JsonType::Integer, JsonType::Number),
            ),
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":\"7168\"",
                Field::HiddenSize,
                wrong(JsonType::Integer, JsonType::String),
            ),
            ("\"hidden_size\":7168", "\"hidden_size\":0", Field::HiddenSize, range(1, dim, 0)),
            ("\"hidden_size\":7168", "\"hidden_size\":2147483649", Field::HiddenSize, range(1, dim, dim + 1)),
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":7168,\"hidden_size\":7168",
                Field::HiddenSize,
                FaultKind::Duplicate,
            ),
            (
                "\"hidden_size\":7168",
                "\"hidden_size\":7168,\"h\\u0069dden_size\":1",
                Field::HiddenSize,
                FaultKind::Duplicate,
            ),
            (
                "\"num_key_value_heads\":96",
                "\"num_key_value_heads\":8",
                Field::NumKeyValueHeads,
                FaultKind::Mismatch { with: Field::NumAttentionHeads, expected: 96, found: 8 },
            ),
            ("1e-05", "0", Field::RmsNormEps, number(NumberRule::Positive, 0.0)),
            ("\"hidden_act\":\"situ\"", "\"hidden_act\":\"silu\"", Field::HiddenAct, unsupported("\"situ\"")),
            (
                "\"activation_situ_beta\":4.0",
                "\"activation_situ_beta\":1e60",
                Field::SituBeta,
                number(NumberRule::Positive, 1e60),
            ),
            (
                "\"activation_situ_linear_beta\":25.0",
                "\"activation_situ_linear_beta\":null",
                Field::SituLinearBeta,
                wrong(JsonType::Number, JsonType::Null),
            ),
            ("\"activation_situ_linear_beta\"", "\"situ_linear_beta\"", Field::SituLinearBeta, FaultKind::Missing),
            ("\"attn_res_block_size\":12", "\"attn_res_block_size\":0", Field::AttnResBlockSize, range(1, dim, 0)),
            (
                "\"q_lora_rank\":1536",
                "\"q_lora_rank\":null",
                Field::QLoraRank,
                wrong(JsonType::Integer, JsonType::Null),
            ),
            ("\"mla_use_nope\":true", "\"mla_use_nope\":false", Field::MlaUseNope, unsupported("true")),
            (
                "\"mla_use_output_gate\":true",
                "\"mla_use_output_gate\":false",
                Field::MlaUseOutputGate,
                unsupported("true"),
            ),
            (
                "\"latent_moe_use_norm\":true",
                "\"latent_moe_use_norm\":1",
                Field::LatentMoeUseNorm,
                wrong(JsonType::Bool, JsonType::Number),
            ),
            (
                "\"latent_moe_use_norm\":true",
                "\"latent_moe_use_norm\":false",
                Field::LatentMoeUseNorm,
                unsupported("true"),
            ),
            (
                "\"use_full_rank_gate\":true",
                "\"use_full_rank_gate\":false",
                Field::UseFullRankGate,
                unsupported("true"),
            ),
            ("\"moe_layer_freq\":1", "\"moe_layer_freq\":2", Field::MoeLayerFreq, unsupported("1")),
            ("\"num_experts\":896", "\"num_experts\":65537", Field::NumExperts, range(1, 65_536, 65_537)),
            (
                "\"num_experts_per_token\":16",
                "\"num_experts_per_token\":897",
                Field::NumExpertsPerToken,
                range(1, 896, 897),
            ),
            (
                "\"first_k_dense_replace\":1",
                "\"first_k_dense_replace\":94",
                Field::FirstKDenseReplace,
                range(0, 93, 94),
            ),
            (
                "\"moe_intermediate_size\":3072",
                "\"moe_intermediate_size\":3080",
                Field::MoeIntermediateSize,
                FaultKind::Multiple { of: 32, found: 3080 },
            ),
            (
                "\"routed_scaling_factor\":1.0",
                "\"routed_scaling_factor\":1e39",
                Field::RoutedScalingFactor,
                number(NumberRule::Finite, 1e39),
            ),
            (
                "\"moe_renormalize\":true",
                "\"moe_renormalize\":\"true\"",
                Field::MoeRenormalize,
                wrong(JsonType::Bool, JsonType::String),
            ),
            (
                "\"num_nextn_predict_layers\":0",
                "\"num_nextn_predict_layers\":1",
                Field::NumNextnPredictLayers,
                unsupported("0"),
            ),
            (
                "\"tie_word_embeddings\":false",
                "\"tie_word_embeddings\":true",
                Field::RootTieWordEmbeddings,
                unsupported("false"),
            ),
            (
                "\"gate_lower_bound\":-5.0",
                "\"gate_lower_bound\":5.0",
                Field::GateLowerBound,
                number(NumberRule::Negative, 5.0),
            ),
            (
                "\"gate_lower_bound\":-5.0",
                "\"gate_lower_bound\":null",
                Field::GateLowerBound,
                wrong(JsonType::Number, JsonType::Null),
            ),
            ("\"kimi_k3\"", "\"kimi_k2\"", Field::RootModelType, unsupported("\"kimi_k3\"")),
            ("\"kimi_linear\"", "\"llama\"", Field::ModelType, unsupported("\"kimi_linear\"")),
            (
                "\"eos_token_id\":163586",
                "\"eos_token_id\":4294967296",
                Field::EosTokenId,
                range(0, u64::from(u32::MAX), 1 << 32),
            ),
            ("\"num_hidden_layers\":93", "\"num_hidden_layers\":1025", Field::NumHiddenLayers, range(1, 1024, 1025)),
            ("compressed-tensors", "fp8", Field::QuantMethod, unsupported("\"compressed-tensors\"")),
            ("\"group_size\":32", "\"group_size\":16", Field::QuantGroupSize, unsupported("32")),
            ("\"num_bits\":4", "\"num_bits\":8", Field::QuantBits, unsupported("4")),
            ("\"num_bits\":4,", "\"num_bits\":4,\"dynamic\":true,", Field::QuantDynamic, unsupported("false")),
            ("{\"group_0\":", "{\"group_1\":{},\"group_0\":", Field::QuantGroups, unsupported("group_0 alone")),
            ("\"group_0\":", "\"group\":", Field::QuantGroups, unsupported("group_0 alone")),
            ("\"text_config\":{", "\"config\":{},\"text_config\":{", Field::Wrapper, FaultKind::Ambiguous),
            (
                "\"head_dim\":128",
                "\"head_dim\":2147483648",
                Field::KdaNumHeads,
                FaultKind::Width { with: Field::KdaHeadDim, found: 96 << 31 },
            ),
            (
                "\"vocab_size\":163840",
                "\"vocab_size\":2147483648",
                Field::VocabSize,
                FaultKind::TooLarge { width: dim },
            ),
            (
                "\"full_attn_layers\":[4,",
                "\"full_attn_layers\":[0,",
                Field::FullAttnLayers,
                FaultKind::NoSuchLayer { listed: 0, layers: 93 },
            ),
            ("92,93]", "92,94]", Field::FullAttnLayers, FaultKind::NoSuchLayer { listed: 94, layers: 93 }),
            ("92,93]", "92,92]", Field::FullAttnLayers, FaultKind::LayerTwice { listed: 92 }),
            ("92,93]", "92]", Field::KdaLayers, FaultKind::LayerMissing { listed: 93 }),
            ("\"kda_layers\":[1,", "\"kda_layers\":[4,1,", Field::KdaLayers, FaultKind::LayerTwice { listed: 4 }),
            ("92,93]", "92,\"93\"]", Field::FullAttnLayers, wrong(JsonType::Integer, JsonType::String)),
        ];
        for (from, to, field, kind) in cases {
            let found = faults(&edit(RELEASED, from, to));
            assert!(found.contains(&(field, kind)), "{to}: {found:?}");
        }
        for (from, to, field) in [
            ("\"group_size\":32", "\"group_size\":16", Field::QuantGroupSize),
            ("\"text_config\":{", "\"config\":{},\"text_config\":{", Field::Wrapper),
        ] {
            assert_eq!(one(RELEASED, from, to).0, field, "nothing follows from it");
        }
    }

    #[test]
    fn an_empty_map_is_not_all_kda() {
        assert_eq!(one(FLAT, "[4,8,12,13]", "[]"), (Field::FullAttnLayers, FaultKind::NoLayers));
        let given = edit(FLAT, "[4,8,12,13]", "[4,8,12,13],\"kda_layers\":[1,2,3]");
        assert_eq!(faults(&given), [(Field::KdaLayers, FaultKind::LayerMissing { listed: 5 })]);
    }

    #[test]
    fn generic_head_sizes_never_stand_for_those_of_kda() {
        assert_eq!(one(FLAT, "\"kda_head_dim\":16,", ""), (Field::KdaHeadDim, FaultKind::Missing));
        let twice = one(FLAT, "\"situ_beta\":4", "\"situ_beta\":4,\"activation_situ_beta\":4");
        assert_eq!(twice, (Field::SituBeta, FaultKind::Duplicate));
    }

    #[test]
    fn what_is_no_config_says_so() {
        let kind = |text: &str| faults(text)[0];
        assert!(matches!(kind("{\"a\":"), (Field::Document, FaultKind::Json(_))));
        assert!(matches!(kind("{} x"), (Field::Document, FaultKind::Json(_))));
        assert!(matches!(kind("[]"), (Field::Document, FaultKind::WrongType { .. })));
        assert!(faults("{\"text_config\":[]}").iter().any(|(f, _)| *f == Field::TextConfig));
        for end in 0..RELEASED.len() {
            assert!(matches!(kind(&RELEASED[..end]), (Field::Document, FaultKind::Json(_))), "{end}");
        }
    }

    #[test]
    fn ranks_count_the_layers_before() {
        let map = [0, 63, 64, 127, 1023].into_iter().fold(LayerMap::EMPTY, |m, l| m.with(LayerIndex(l)));
        let ranks = [0, 1, 63, 64, 65, 127, 128, 1023, 1024, 5000].map(|l| map.rank(l));
        assert_eq!(ranks, [0, 1, 1, 2, 3, 3, 4, 4, 5, 5]);
        assert!(map.is_mla(LayerIndex(1023)) && !map.is_mla(LayerIndex(1024)));
    }
}
