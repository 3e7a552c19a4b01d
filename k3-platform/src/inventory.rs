//! What the bytes of a checkpoint are: every tensor counted by its part of the model, and the sum held
//! against the files.

use crate::checkpoint::Checkpoint;
use k3_core::checkpoint::{Class, GlobalTensor, Sum, Tensor, expected};
use k3_core::config::{LayerKind, MlpKind};

/// Layers that are built alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Their attention.
    pub attention: LayerKind,
    /// Their MLP.
    pub mlp: MlpKind,
    /// How many there are.
    pub layers: u64,
    /// Everything but routed experts, of all of them.
    pub trunk: Sum,
    /// The routed experts of all of them.
    pub routed: Sum,
}

/// What the bytes of a checkpoint are. Sizes are those in the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// The text model, in the order of [`Class::ALL`].
    pub classes: [Sum; Class::ALL.len()],
    /// Of these, the embedding table.
    pub embedding: Sum,
    /// Of these, what the walk reads behind the last layer: output norm, mix and head.
    pub head: Sum,
    /// The layers, by how they are built.
    pub kinds: Vec<Kind>,
    /// Tensors that are never read, by the first part of their names.
    pub other: Vec<(String, Sum)>,
    /// Headers of the shards, with the eight bytes in front of each (bytes).
    pub headers: u64,
    /// Bytes of the shards that belong to no tensor.
    pub gaps: u64,
    /// The lengths of all shards together (bytes).
    pub files: u64,
    /// Routed experts.
    pub experts: u64,
    /// Bytes of each.
    pub expert_bytes: u64,
}

impl Inventory {
    /// Counts a checkpoint. Nothing is read: opening it has read all that is needed.
    #[must_use]
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let (config, index) = (checkpoint.config(), checkpoint.index());
        let mut this = Self {
            classes: Default::default(),
            embedding: Sum::default(),
            head: Sum::default(),
            kinds: Vec::new(),
            other: index.other().iter().map(|(name, &sum)| (name.clone(), sum)).collect(),
            headers: index.shards().iter().map(|s| s.header).sum(),
            gaps: index.gaps(),
            files: index.shards().iter().map(|s| s.len).sum(),
            experts: (config.num_moe_layers() as u64).saturating_mul(config.num_experts as u64),
            expert_bytes: k3_core::checkpoint::expert_bytes(config),
        };
        for l in config.layers() {
            let (attention, mlp) = (config.layer_kind(l), config.mlp_kind(l));
            match this.kinds.iter_mut().find(|k| k.attention == attention && k.mlp == mlp) {
                Some(kind) => kind.layers += 1,
                None => {
                    let (trunk, routed) = Default::default();
                    this.kinds.push(Kind { attention, mlp, layers: 1, trunk, routed });
                }
            }
        }
        for tensor in expected(config) {
            let sum = stored(tensor, checkpoint);
            let class = &mut this.classes[tensor.class() as usize];
            *class = class.plus(sum);
            let (l, routed) = match tensor {
                Tensor::Global(GlobalTensor::Embed) => {
                    this.embedding = this.embedding.plus(sum);
                    continue;
                }
                Tensor::Global(_) => {
                    this.head = this.head.plus(sum);
                    continue;
                }
                Tensor::Layer(l, _) => (l, false),
                Tensor::Expert(l, _, _) => (l, true),
            };
            let (attention, mlp) = (config.layer_kind(l), config.mlp_kind(l));
            if let Some(kind) = this.kinds.iter_mut().find(|k| k.attention == attention && k.mlp == mlp) {
                let part = if routed { &mut kind.routed } else { &mut kind.trunk };
                *part = part.plus(sum);
            }
        }
        this
    }

    /// One part of the text model.
    #[must_use]
    pub fn class(&self, class: Class) -> Sum {
        self.classes[class as usize]
    }

    /// The text model.
    #[must_use]
    pub fn model(&self) -> Sum {
        self.classes.iter().fold(Sum::default(), |all, &sum| all.plus(sum))
    }

    /// The text model without its routed experts: what every token passes through, and the embedding.
    #[must_use]
    pub fn always_active(&self) -> Sum {
        let parts = Class::ALL.into_iter().filter(|&c| c != Class::Routed).map(|c| self.class(c));
        parts.fold(Sum::default(), Sum::plus)
    }

    /// What is never read.
    #[must_use]
    pub fn never(&self) -> Sum {
        self.other.iter().fold(Sum::default(), |all, (_, sum)| all.plus(*sum))
    }

    /// Every tensor of the checkpoint.
    #[must_use]
    pub fn tensors(&self) -> Sum {
        self.model().plus(self.never())
    }

    /// What headers, tensors and gaps add up to (bytes). It is [`Inventory::files`], or something has not
    /// been counted.
    #[must_use]
    pub fn accounted(&self) -> u64 {
        self.tensors().bytes.saturating_add(self.headers).saturating_add(self.gaps)
    }
}

/// A tensor as the file has it: `A_log` may be shorter than its spec.
fn stored(tensor: Tensor, checkpoint: &Checkpoint) -> Sum {
    let config = checkpoint.config();
    let sum = Sum::of(tensor, config);
    if matches!(tensor, Tensor::Expert(..)) {
        return sum;
    }
    let bytes = checkpoint.index().stored_bytes(tensor, config) as u64;
    let parameters = if bytes == sum.bytes { sum.parameters } else { bytes / tensor.spec(config).dtype.size() };
    Sum { parameters, bytes, ..sum }
}
