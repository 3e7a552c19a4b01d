//! The seam between arithmetic and storage.

use crate::checkpoint::Tensor;
use crate::view::{Expert, ExpertId, LayerIndex, MatrixRows, TokenId};

/// What the forward pass asks of whoever holds the weights.
///
/// Tensors are lent, as bytes, for the length of a closure. A matrix may arrive as any number of
/// blocks of rows: a resident one is one block, and one that is larger than all the memory there is
/// comes in many. The closure's return is the release of the block.
///
/// The forward pass asks in a fixed order: [`begin`](Self::begin), [`embed`](Self::embed), what
/// [`layer_tensors`](crate::checkpoint::layer_tensors) lists for each layer, and then, if the pass was begun
/// with `head`, what [`head_tensors`](crate::checkpoint::head_tensors) lists. In a layer with routed experts
/// [`request_experts`](Self::request_experts) comes directly behind
/// [`Router`](crate::checkpoint::LayerTensor::Router), and [`experts`](Self::experts) behind
/// [`SharedDown`](crate::checkpoint::LayerTensor::SharedDown). An implementation may therefore read ahead; one
/// that holds everything may ignore the order.
///
/// Vectors and matrices are told apart by [`LayerTensor::is_vector`](crate::checkpoint::LayerTensor::is_vector)
/// and [`GlobalTensor::is_vector`](crate::checkpoint::GlobalTensor::is_vector).
///
/// An implementation answers for its bytes: a read that failed is an `Err`, never a missing call.
/// The core sees to it that every vector, row and expert arrives once and whole, and refuses a pass otherwise
/// ([`Incomplete`](super::ForwardError::Incomplete), [`Expert`](super::ForwardError::Expert)). What the bytes
/// say it cannot know.
///
/// # Example
///
/// A checkpoint that is one shard in one slice.
///
/// ```
/// use k3_core::checkpoint::{self, ExpertTensor, GlobalTensor, Named, Tensor};
/// use k3_core::config::ModelConfig;
/// use k3_core::model::Weights;
/// use k3_core::safetensors::{Header, header_len};
/// use k3_core::view::{
///     Bf16Matrix, Expert, ExpertId, LayerIndex, MatrixRows, Mxfp4Matrix, TokenId, ViewError,
/// };
///
/// struct Shard<'a> {
///     config: &'a ModelConfig,
///     file: &'a [u8],
///     /// Where the tensor of each slot begins and ends.
///     places: &'a [[usize; 2]],
/// }
///
/// impl<'a> Shard<'a> {
///     /// `places` has [`checkpoint::slot_count`] elements.
///     fn open(
///         config: &'a ModelConfig,
///         file: &'a [u8],
///         places: &'a mut [[usize; 2]],
///     ) -> Result<Self, Box<dyn std::error::Error>> {
///         places.fill([0; 2]);
///         let (first, rest) = file.split_first_chunk().ok_or("a file of less than eight bytes")?;
///         let len = header_len(*first, file.len() as u64)? as usize;
///         for entry in Header::parse(&rest[..len], file.len() as u64)?.entries() {
///             let entry = entry?;
///             let tensor = match Tensor::parse_json(entry.name, config) {
///                 Named::Known(tensor) => tensor,
///                 Named::Ignored => continue,
///                 Named::Unknown => return Err("a tensor of another model".into()),
///             };
///             tensor.accepts(config, entry.dtype.ok_or("an unknown dtype")?, entry.shape())?;
///             let place = &mut places[checkpoint::slot(tensor, config)];
///             if *place != [0; 2] {
///                 return Err(format!("{tensor} is there twice").into());
///             }
///             *place = [entry.begin as usize, entry.end as usize];
///         }
///         match checkpoint::expected(config).find(|t| places[checkpoint::slot(*t, config)] == [0; 2]) {
///             Some(tensor) => Err(format!("{tensor} is missing").into()),
///             None => Ok(Self { config, file, places }),
///         }
///     }
///
///     fn bytes(&self, tensor: Tensor) -> &'a [u8] {
///         let [begin, end] = self.places[checkpoint::slot(tensor, self.config)];
///         &self.file[begin..end]
///     }
///
///     fn rows(&self, tensor: Tensor) -> Result<Bf16Matrix<'a>, ViewError> {
///         let spec = tensor.spec(self.config);
///         Bf16Matrix::new(self.bytes(tensor), spec.rows() as usize, spec.cols() as usize)
///     }
///
///     fn mxfp4(
///         &self,
///         (layer, id): (LayerIndex, ExpertId),
///         [packed, scale]: [ExpertTensor; 2],
///     ) -> Result<Mxfp4Matrix<'a>, ViewError> {
///         let [packed, scale] = [packed, scale].map(|part| Tensor::Expert(layer, id, part));
///         // A column of the packed tensor is a byte, and a byte is two columns of the matrix.
///         let spec = packed.spec(self.config);
///         let (rows, cols) = (spec.rows() as usize, 2 * spec.cols() as usize);
///         Mxfp4Matrix::new(self.bytes(packed), self.bytes(scale), rows, cols)
///     }
/// }
///
/// impl Weights for Shard<'_> {
///     type Error = ViewError;
///
///     fn begin(&mut self, _head: bool) -> Result<(), ViewError> {
///         Ok(())
///     }
///
///     fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), ViewError> {
///         let table = self.rows(Tensor::Global(GlobalTensor::Embed))?;
///         ids.iter().enumerate().for_each(|(i, id)| each(i, table.row(id.get())));
///         Ok(())
///     }
///
///     fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), ViewError> {
///         each(self.bytes(tensor));
///         Ok(())
///     }
///
///     fn matrix(
///         &mut self,
///         tensor: Tensor,
///         each: &mut dyn FnMut(usize, MatrixRows<'_>),
///     ) -> Result<(), ViewError> {
///         each(0, self.rows(tensor)?.into());
///         Ok(())
///     }
///
///     fn request_experts(&mut self, _layer: LayerIndex, _ids: &[ExpertId]) -> Result<(), ViewError> {
///         Ok(())
///     }
///
///     fn experts(
///         &mut self,
///         layer: LayerIndex,
///         ids: &[ExpertId],
///         each: &mut dyn FnMut(usize, Expert<'_>),
///     ) -> Result<(), ViewError> {
///         use ExpertTensor::{W1Packed, W1Scale, W2Packed, W2Scale, W3Packed, W3Scale};
///         for (i, &id) in ids.iter().enumerate() {
///             let expert = Expert {
///                 w1: self.mxfp4((layer, id), [W1Packed, W1Scale])?,
///                 w2: self.mxfp4((layer, id), [W2Packed, W2Scale])?,
///                 w3: self.mxfp4((layer, id), [W3Packed, W3Scale])?,
///             };
///             each(i, expert);
///         }
///         Ok(())
///     }
/// }
/// #
/// # // A shard as large as a tiny config asks for, and a pass over it.
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// #     use k3_core::{backend::Backend, carve::Line, checkpoint::LayerTensor, exec::Serial};
/// #     use k3_core::model::{Extent, Model, State, Workspace};
/// #     let config = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tiny/config.json"));
/// #     let config = ModelConfig::parse(config)?;
/// #     let ignored = r#"{"vision_tower.w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
/// #     let (mut json, mut data) = (String::from(ignored), vec![]);
/// #     for tensor in checkpoint::expected(&config) {
/// #         let (spec, begin) = (tensor.spec(&config), data.len());
/// #         let byte = if matches!(tensor, Tensor::Layer(_, LayerTensor::ALog)) { 0 } else { 0x3c };
/// #         data.resize(begin + spec.bytes() as usize, byte);
/// #         let (dtype, shape, end) = (spec.dtype, spec.shape(), data.len());
/// #         json += &format!(r#","{tensor}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#);
/// #     }
/// #     json.push('}');
/// #     let file = [&(json.len() as u64).to_le_bytes(), json.as_bytes(), &data].concat();
/// #     let mut places = vec![[0; 2]; checkpoint::slot_count(&config)];
/// #     let mut weights = Shard::open(&config, &file, &mut places)?;
/// #     let extent = Extent { chunk: 3, context: 3, width: 1 };
/// #     let mut remembered = vec![Line::ZERO; State::lines(&config, 3).unwrap()];
/// #     let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
/// #     let mut state = State::new(&mut remembered, &config, 3)?;
/// #     let mut workspace = Workspace::new(&mut scratch, &config, extent)?;
/// #     let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
/// #     let mut logits = vec![0.0; config.vocab_size];
/// #     let ids = [TokenId(3), TokenId(47), TokenId(0)];
/// #     model.forward(&mut weights, &mut state, &mut workspace, &ids, &mut logits, &mut ())?;
/// #     assert!(logits.iter().all(|&logit| logit != 0.0 && logit == logits[0]));
/// #     Ok(())
/// # }
/// ```
pub trait Weights {
    /// Why bytes could not be lent.
    type Error;

    /// A pass over all layers begins. `head`: whether `lm_head` will be asked for at its end.
    ///
    /// Not called by a pass that is refused before it begins, as for an id out of range, nor by
    /// [`Model::attention`](super::Model::attention) and [`Model::mlp`](super::Model::mlp).
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn begin(&mut self, head: bool) -> Result<(), Self::Error>;

    /// Lends the rows `ids` of `embed_tokens`, in any order, each as `each(index in ids, bytes)`.
    /// Bytes: bf16, `hidden_size` elements. The ids are below `vocab_size`; one may be there several times,
    /// and each index is lent once.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), Self::Error>;

    /// Lends a whole vector, once, as stored (its dtype is [`Tensor::spec`]'s).
    ///
    /// `A_log` has one of the two lengths of [`Tensor::accepts`], its padding included; that the padding is
    /// zero is checked here ([`ALogTail`](super::ForwardError::ALogTail)).
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), Self::Error>;

    /// Lends a matrix as blocks `each(first row, rows)` in rising order, which cover all rows once, from row 0
    /// on. Each block has a multiple of [`Tensor::row_granule`] rows; none at all is one. A tensor for which
    /// [`Tensor::may_be_coded`] says no is lent raw; each block of another may be raw or coded, and no result
    /// depends on which.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), Self::Error>;

    /// Says which experts of a layer [`Weights::experts`] will ask for next, so that reading can
    /// start while the shared experts are computed. `ids` rise and have no duplicates.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn request_experts(&mut self, layer: LayerIndex, ids: &[ExpertId]) -> Result<(), Self::Error>;

    /// Lends each of the experts, once, in the order in which they arrive, as `each(index in ids, expert)`.
    /// `layer` and `ids` are those of the last [`Weights::request_experts`]; both are called once for a layer.
    ///
    /// `w1` is `Mxfp4Matrix::new(bytes of W1Packed, bytes of W1Scale, rows, cols)` with the `rows` of the packed
    /// tensor's [`spec`](Tensor::spec) and *twice* its `cols`, which are bytes; likewise `w2` and `w3`.
    ///
    /// # Errors
    /// If the weights cannot be read.
    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), Self::Error>;
}
