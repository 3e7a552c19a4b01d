//! The pass itself.

use super::error::{ForwardError, Place};
use super::journal::{Journal, Steps};
use super::state::State;
use super::weights::Weights;
use super::workspace::{KdaScratch, MlaScratch, MoeScratch, Products, Vectors, Workspace, sources};
use crate::backend::{Backend, Layout, Panel};
use crate::checkpoint::{Dtype, GlobalTensor, LayerTensor, Tensor};
use crate::config::{LayerKind, MlpKind, ModelConfig};
use crate::exec::{Executor, Parts};
use crate::ops::linear::multiply;
use crate::ops::moe::Groups;
use crate::ops::norm::{MLA_LORA_EPS, rms_norm, rms_norm_in_place};
use crate::ops::{kda, mla, residual, router};
use crate::view::{Expert, ExpertId, F32Matrix, LayerIndex, MatrixRows, TokenId};

/// Watches a pass from outside. All methods do nothing unless overridden; none can change a value.
pub trait Observer {
    /// The running residual sum leaving `layer`: `[positions, hidden]`.
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        let _ = (layer, running_sum);
    }

    /// The experts of a layer, `[positions, experts per token]` in rank order, and their weights.
    fn routed(&mut self, layer: LayerIndex, ids: &[ExpertId], weights: &[f32]) {
        let _ = (layer, ids, weights);
    }

    /// The vectors `lm_head` reads: `[positions with logits, hidden]`.
    fn last(&mut self, normed: &[f32]) {
        let _ = normed;
    }
}

/// Watches nothing.
impl Observer for () {}

/// A config with the means to compute: which kernels, on which threads.
#[derive(Debug)]
pub struct Model<'m, X> {
    /// The model's dimensions.
    pub config: &'m ModelConfig,
    /// Its kernels. Results do not depend on the choice.
    pub backend: Backend,
    /// Its threads. Results do not depend on the choice.
    pub exec: &'m X,
}

// Derived, these would ask the executor to be `Copy`, of which only a reference is held.
impl<X> Clone for Model<'_, X> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<X> Copy for Model<'_, X> {}

impl<X: Executor> Model<'_, X> {
    /// Runs `ids` through all layers, after the positions `state` has seen, and moves the state on.
    ///
    /// **Shapes.** `ids`: `[n]`, `1 <= n <= chunk`. `logits`: `[m, vocab_size]` for the *last* `m`
    /// positions, `0 <= m <= n`; with `m = 0` the head is not read at all. `state` and `workspace` are those of
    /// this config.
    ///
    /// The same logits come out, bit for bit, however a sequence is cut into chunks.
    ///
    /// # Errors
    /// [`ForwardError`]. A pass that is refused changes nothing; one that stops half-way leaves the
    /// state torn, and `logits` without meaning.
    ///
    /// **Source:** spec 3.1 to 3.7.
    pub fn forward<W: Weights>(
        &self,
        weights: &mut W,
        state: &mut State<'_>,
        workspace: &mut Workspace<'_>,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut impl Observer,
    ) -> Result<(), ForwardError<W::Error>> {
        let wanted = logits.len() / self.config.vocab_size;
        let mut one = [Sequence { state, journal: None, positions: ids.len(), wanted }];
        self.forward_many(weights, &mut one, workspace, ids, logits, observer)
    }

    /// As [`Model::forward`], but the state stays where it is until [`Model::commit`] says how many of
    /// `ids` it is to have seen: for ids that may turn out to be wrong.
    ///
    /// The logits are those of [`Model::forward`], bit for bit. `ids` are at most
    /// [`Journal::positions`].
    ///
    /// # Errors
    /// [`ForwardError`]. Whatever happens, the state is as before and is not torn.
    #[expect(clippy::too_many_arguments, reason = "as for `forward`, and the journal")]
    pub fn verify<W: Weights>(
        &self,
        weights: &mut W,
        state: &mut State<'_>,
        journal: &mut Journal<'_>,
        workspace: &mut Workspace<'_>,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut impl Observer,
    ) -> Result<(), ForwardError<W::Error>> {
        let wanted = logits.len() / self.config.vocab_size;
        let mut one = [Sequence { state, journal: Some(journal), positions: ids.len(), wanted }];
        self.forward_many(weights, &mut one, workspace, ids, logits, observer)
    }

    /// Moves the state on by the first `accepted` ids of the pass that `journal` has seen, by the
    /// same steps that [`Model::forward`] would have taken. The other ids leave no trace. The journal
    /// is empty afterwards.
    ///
    /// False, and nothing happens, if the journal is not of the last pass over this state, or the state was reset
    /// since or is torn, or the journal has fewer ids than `accepted`, or the workspace is for smaller chunks.
    #[must_use]
    pub fn commit(
        &self,
        state: &mut State<'_>,
        journal: &mut Journal<'_>,
        workspace: &mut Workspace<'_>,
        accepted: usize,
    ) -> bool {
        let Self { config: c, backend, exec } = *self;
        let most = journal.held.min(workspace.extent().chunk);
        if state.torn || journal.start != Some((state.position, state.moves)) || accepted > most {
            return false;
        }
        if accepted > 0 {
            let shape = kda_shape(c, accepted);
            let (history, matrices) = (c.conv_kernel_size - 1, shape.width() * shape.head_dim);
            for ordinal in 0..c.num_kda_layers() {
                let KdaScratch { qkv, alpha, beta, heads, .. } = &mut workspace.kda;
                let qkv = &mut qkv[..3 * accepted * shape.width()];
                let (alpha, beta) = (&mut alpha[..accepted * shape.width()], &mut beta[..accepted * shape.heads]);
                journal.steps(ordinal, shape, qkv, alpha, beta);
                let matrices = &mut state.kda[ordinal * matrices..][..matrices];
                // What comes out was seen in the pass; only the state is wanted here.
                kda::recur(backend, exec, shape, matrices, qkv, alpha, beta, &mut heads[..accepted * shape.width()]);
                let past = &mut state.conv[ordinal * 3 * history * shape.width()..][..3 * history * shape.width()];
                journal.inputs(ordinal, shape, past);
            }
        }
        state.position += accepted;
        state.moved();
        journal.forget();
        true
    }

    /// One pass for several sequences, which share every byte of weights that it reads.
    ///
    /// **Shapes.** `ids`: those of the first sequence, then those of the second, and so on, `1 <= n <=
    /// chunk` in all. `logits`: the rows that the first one wants, then those of the second, and so
    /// on.
    ///
    /// Each sequence gets the bits it would get alone.
    ///
    /// # Errors
    /// [`ForwardError`]. A pass that is refused changes nothing; one that stops half-way leaves all
    /// states torn whose sequences have no journal. A value that is not finite stops the pass for all.
    pub fn forward_many<W: Weights>(
        &self,
        weights: &mut W,
        sequences: &mut [Sequence<'_, '_, '_>],
        workspace: &mut Workspace<'_>,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut impl Observer,
    ) -> Result<(), ForwardError<W::Error>> {
        self.admit(sequences, workspace, ids, logits)?;
        for s in &mut *sequences {
            // Whatever another journal has noted is of the past, also on trial: rows of the latent cache are new.
            s.state.moved();
            match &mut s.journal {
                Some(journal) => journal.forget(),
                None => s.state.torn = true,
            }
        }
        let mut pass = Pass { model: *self, weights, n: ids.len() };
        pass.run(sequences, workspace, ids, logits, observer).map_err(|error| placed(error, sequences))?;
        for s in sequences {
            match &mut s.journal {
                Some(journal) => {
                    (journal.start, journal.held) = (Some((s.state.position, s.state.moves)), s.positions);
                }
                None => {
                    s.state.position += s.positions;
                    s.state.torn = false;
                }
            }
        }
        Ok(())
    }

    /// One layer's attention on its own: `y = Attention(x)` for `[n, hidden]`, with the state moved on
    /// by `n` positions. For checking a layer against a reference; a whole pass is
    /// [`Model::forward`].
    ///
    /// The weights are asked for all of the layer's vectors, also those of its MLP, then for its attention
    /// matrices. [`Weights::begin`] is not called.
    ///
    /// # Errors
    /// [`ForwardError`] as [`Model::forward`].
    ///
    /// **Source:** spec 3.3 and 3.4.
    pub fn attention<W: Weights>(
        &self,
        weights: &mut W,
        state: &mut State<'_>,
        workspace: &mut Workspace<'_>,
        layer: LayerIndex,
        x: &[f32],
        y: &mut [f32],
    ) -> Result<(), ForwardError<W::Error>> {
        let n = self.admit_vectors(workspace, layer, x, y)?;
        let (needed, context) = (state.position.saturating_add(n), state.context().min(workspace.extent().context));
        if state.torn {
            return Err(ForwardError::TornState);
        }
        if needed > context {
            return Err(ForwardError::ContextFull { needed, context });
        }
        state.moved();
        state.torn = true;
        let mut one = [Sequence { state, journal: None, positions: n, wanted: 0 }];
        let mut pass = Pass { model: *self, weights, n };
        let Workspace { vectors, products, kda, mla, .. } = workspace;
        pass.layer_vectors(layer, vectors)
            .and_then(|()| pass.attention(layer, &mut one, x, vectors, products, (kda, mla), y))
            .map_err(|error| placed(error, &one))?;
        let [Sequence { state, .. }] = one;
        (state.position, state.torn) = (needed, false);
        Ok(())
    }

    /// One layer's MLP on its own: `y = MLP(x)` for `[n, hidden]`; see [`Model::attention`].
    ///
    /// The weights are asked for all of the layer's vectors, also those of its attention, then for its MLP
    /// matrices and experts. [`Weights::begin`] is not called.
    ///
    /// # Errors
    /// [`ForwardError`] as [`Model::forward`].
    ///
    /// **Source:** spec 3.5 and 3.6.
    pub fn mlp<W: Weights>(
        &self,
        weights: &mut W,
        workspace: &mut Workspace<'_>,
        layer: LayerIndex,
        x: &[f32],
        y: &mut [f32],
        observer: &mut impl Observer,
    ) -> Result<(), ForwardError<W::Error>> {
        let n = self.admit_vectors(workspace, layer, x, y)?;
        let mut pass = Pass { model: *self, weights, n };
        pass.layer_vectors(layer, &mut workspace.vectors)?;
        let Workspace { residual, vectors, products, moe, .. } = workspace;
        let routed = &mut residual.mixed[..x.len()];
        pass.mlp(layer, x, vectors, products, (moe, routed), y, observer)
    }

    /// How many positions the inputs and the outputs of a single sub-layer have.
    fn admit_vectors<E>(
        &self,
        workspace: &Workspace<'_>,
        layer: LayerIndex,
        x: &[f32],
        y: &[f32],
    ) -> Result<usize, ForwardError<E>> {
        let (hidden, chunk) = (self.config.hidden_size, workspace.extent().chunk);
        let layers = self.config.num_hidden_layers;
        if layer.get() >= layers {
            return Err(ForwardError::NoSuchLayer { layer, layers });
        }
        if x.is_empty() {
            return Err(ForwardError::EmptyChunk);
        }
        if x.len() != y.len() || !x.len().is_multiple_of(hidden) {
            return Err(ForwardError::VectorLength { x: x.len(), y: y.len(), hidden });
        }
        let n = x.len() / hidden;
        if n > chunk {
            return Err(ForwardError::ChunkTooLong { given: n, chunk });
        }
        Ok(n)
    }

    /// Everything that can be refused before anything is touched.
    fn admit<E>(
        &self,
        sequences: &[Sequence<'_, '_, '_>],
        workspace: &Workspace<'_>,
        ids: &[TokenId],
        logits: &[f32],
    ) -> Result<(), ForwardError<E>> {
        let extent = workspace.extent();
        let vocab = self.config.vocab_size;
        if sequences.iter().any(|s| s.state.torn) {
            return Err(ForwardError::TornState);
        }
        let positions = sequences.iter().fold(0usize, |sum, s| sum.saturating_add(s.positions));
        if ids.is_empty() || sequences.iter().any(|s| s.positions == 0) {
            return Err(ForwardError::EmptyChunk);
        }
        if positions != ids.len() {
            return Err(ForwardError::SequenceLengths { given: ids.len(), positions });
        }
        if ids.len() > extent.chunk {
            return Err(ForwardError::ChunkTooLong { given: ids.len(), chunk: extent.chunk });
        }
        for s in sequences {
            let context = s.state.context().min(extent.context);
            let needed = s.state.position.saturating_add(s.positions);
            if needed > context {
                return Err(ForwardError::ContextFull { needed, context });
            }
            if let Some(journal) = s.journal.as_ref().filter(|j| j.positions() < s.positions) {
                return Err(ForwardError::ChunkTooLong { given: s.positions, chunk: journal.positions() });
            }
        }
        if let Some(index) = ids.iter().position(|id| id.get() >= vocab) {
            return Err(ForwardError::TokenOutOfRange { index, id: ids[index] });
        }
        let wanted = sequences.iter().try_fold(0usize, |sum, s| (s.wanted <= s.positions).then(|| sum + s.wanted));
        if wanted.and_then(|rows| rows.checked_mul(vocab)) != Some(logits.len()) {
            return Err(ForwardError::LogitsLength { found: logits.len(), vocab });
        }
        Ok(())
    }
}

/// A sequence's share of a pass.
#[derive(Debug)]
pub struct Sequence<'a, 's, 'j> {
    /// What it remembers.
    pub state: &'a mut State<'s>,
    /// Where to note what would move the state on, instead of moving it: [`Model::verify`].
    pub journal: Option<&'a mut Journal<'j>>,
    /// Ids it reads in the pass, at least one.
    pub positions: usize,
    /// For how many of them, the last ones, it wants logits.
    pub wanted: usize,
}

/// Inside a pass a value that is not finite has the number of its row; here the row becomes its sequence
/// and the position there.
fn placed<E>(error: ForwardError<E>, sequences: &[Sequence<'_, '_, '_>]) -> ForwardError<E> {
    let ForwardError::NonFinite { position: mut row, place, .. } = error else { return error };
    for (sequence, s) in sequences.iter().enumerate() {
        if row < s.positions {
            return ForwardError::NonFinite { sequence, position: s.state.position + row, place };
        }
        row -= s.positions;
    }
    ForwardError::NonFinite { sequence: sequences.len(), position: row, place }
}

/// Dimensions of the model's KDA layers for `positions` of a sequence.
fn kda_shape(c: &ModelConfig, positions: usize) -> kda::Shape {
    kda::Shape { positions, heads: c.kda_num_heads, head_dim: c.kda_head_dim, kernel: c.conv_kernel_size }
}

/// One pass of `n` positions, whatever sequences they belong to: a *row* is a position's place in the
/// pass.
struct Pass<'p, X, W> {
    model: Model<'p, X>,
    weights: &'p mut W,
    n: usize,
}

type Step<W> = Result<(), ForwardError<<W as Weights>::Error>>;

impl<X: Executor, W: Weights> Pass<'_, X, W> {
    fn run(
        &mut self,
        sequences: &mut [Sequence<'_, '_, '_>],
        ws: &mut Workspace<'_>,
        ids: &[TokenId],
        logits: &mut [f32],
        observer: &mut impl Observer,
    ) -> Step<W> {
        let Model { config: c, backend, exec } = self.model;
        let (n, hidden, eps) = (self.n, c.hidden_size, c.rms_norm_eps);
        let wanted: usize = sequences.iter().map(|s| s.wanted).sum();
        let Workspace { residual, vectors, products, kda, mla, moe, .. } = ws;
        let (mixed, x, y) =
            (&mut residual.mixed[..n * hidden], &mut residual.x[..n * hidden], &mut residual.y[..n * hidden]);
        let scores = &mut residual.scores[..n * sources(c)];

        // Sources of the mix: `blocks` finished ones, then the running sum. A block is finished by
        // counting it; nothing is copied.
        self.weights.begin(wanted > 0).map_err(ForwardError::Weights)?;
        let mut blocks = 0;
        self.embed(ids, &mut residual.values[..n * hidden])?;
        finite(&residual.values[..n * hidden], hidden, Place::Embedding)?;

        for layer in c.layers() {
            self.layer_vectors(layer, vectors)?;
            residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_attn, eps, scores, mixed);
            let fresh = layer.get().is_multiple_of(c.attn_res_block_size);
            blocks += usize::from(fresh);
            self.norm(mixed, vectors.input_norm, x);
            self.attention(layer, sequences, x, vectors, products, (kda, mla), y)?;
            let sum = &mut residual.values[blocks * n * hidden..][..n * hidden];
            if fresh {
                sum.copy_from_slice(y);
            } else {
                add(sum, y);
            }
            finite(sum, hidden, Place::Attention(layer))?;

            residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_mlp, eps, scores, mixed);
            self.norm(mixed, vectors.post_norm, x);
            self.mlp(layer, x, vectors, products, (moe, mixed), y, observer)?;
            let sum = &mut residual.values[blocks * n * hidden..][..n * hidden];
            add(sum, y);
            finite(sum, hidden, Place::Mlp(layer))?;
            observer.layer(layer, sum);
        }
        if wanted == 0 {
            return Ok(());
        }

        // 3.7: the mix and the norm, then the head for the positions that want logits.
        let global = Tensor::Global;
        self.fold(global(GlobalTensor::OutResNorm), global(GlobalTensor::OutResProj), vectors.fold_attn)?;
        self.vector(global(GlobalTensor::FinalNorm), vectors.post_norm)?;
        residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_attn, eps, scores, mixed);
        self.norm(mixed, vectors.post_norm, x);
        let (mut end, mut rows) = (0, 0);
        for s in &*sequences {
            end += s.positions;
            x.copy_within((end - s.wanted) * hidden..end * hidden, rows * hidden);
            rows += s.wanted;
        }
        let x = &x[..wanted * hidden];
        observer.last(x);
        let panel = backend.pack(Layout::Bf16, x, hidden, wanted, products.panel_x);
        self.linear(global(GlobalTensor::LmHead), &panel, products.tile, logits)?;
        let (mut end, mut rows) = (0, logits.chunks_exact(c.vocab_size));
        for s in &*sequences {
            end += s.positions;
            for (row, logits) in (end - s.wanted..end).zip(&mut rows) {
                if let Some((id, _)) = (0..).map(TokenId).zip(logits).find(|(_, l)| !l.is_finite()) {
                    return Err(ForwardError::NonFinite { sequence: 0, position: row, place: Place::Logit(id) });
                }
            }
        }
        Ok(())
    }

    /// `y = Attention(x)`, of whichever kind the layer has.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn attention(
        &mut self,
        layer: LayerIndex,
        sequences: &mut [Sequence<'_, '_, '_>],
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        (kda, mla): (&mut KdaScratch<'_>, &mut MlaScratch<'_>),
        y: &mut [f32],
    ) -> Step<W> {
        match self.model.config.layer_kind(layer) {
            LayerKind::Kda => self.kda(layer, sequences, x, v, products, kda, y),
            LayerKind::Mla => self.mla(layer, sequences, x, v, products, mla, y),
        }
    }

    /// `y = MLP(x)`, of whichever kind the layer has. `routed` is scratch of `y`'s size.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn mlp(
        &mut self,
        layer: LayerIndex,
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        (moe, routed): (&mut MoeScratch<'_>, &mut [f32]),
        y: &mut [f32],
        observer: &mut impl Observer,
    ) -> Step<W> {
        let Model { config: c, backend, .. } = self.model;
        match c.mlp_kind(layer) {
            MlpKind::Dense => {
                let Products { panel_x, panel, tile, gate, up } = products;
                let px = backend.pack(Layout::Bf16, x, c.hidden_size, self.n, panel_x);
                let names = [LayerTensor::DenseGate, LayerTensor::DenseUp, LayerTensor::DenseDown];
                self.glu(layer, names, &px, (panel, tile), (gate, up), y)
            }
            MlpKind::Moe => self.moe(layer, x, v, products, (moe, routed), y, observer),
        }
    }

    /// Decodes the rows of `ids`, each of which must come once.
    fn embed(&mut self, ids: &[TokenId], out: &mut [f32]) -> Step<W> {
        let Model { config: c, backend, .. } = self.model;
        let (hidden, mut rows, mut fits) = (c.hidden_size, 0, true);
        // A row that has not come begins with a NaN. One that has come with a NaN stops the pass anyway.
        for row in out.chunks_exact_mut(hidden) {
            row[0] = f32::NAN;
        }
        let each = &mut |i: usize, bytes: &[u8]| match out.chunks_exact_mut(hidden).nth(i) {
            Some(row) if bytes.len() == hidden * 2 && row[0].is_nan() => {
                backend.decode_bf16(bytes, row);
                rows += 1;
            }
            _ => fits = false,
        };
        self.weights.embed(ids, each).map_err(ForwardError::Weights)?;
        if fits && rows == ids.len() {
            Ok(())
        } else {
            Err(ForwardError::Incomplete { tensor: Tensor::Global(GlobalTensor::Embed) })
        }
    }

    /// Lends a vector of `len` elements to `each` and sees to it that it came whole, and once: `each` may
    /// change what it writes to. `A_log` may also come without its padding.
    fn lend(&mut self, tensor: Tensor, len: usize, mut each: impl FnMut(&[u8])) -> Step<W> {
        let c = self.model.config;
        let size = length(tensor.spec(c).dtype.size());
        let unpadded = matches!(tensor, Tensor::Layer(_, LayerTensor::ALog)).then_some(c.kda_num_heads * size);
        let (mut came, mut fits) = (false, true);
        self.weights
            .vector(tensor, &mut |bytes| {
                fits &= !came && (bytes.len() == len * size || Some(bytes.len()) == unpadded);
                if fits {
                    each(bytes);
                    came = true;
                }
            })
            .map_err(ForwardError::Weights)?;
        if fits && came { Ok(()) } else { Err(ForwardError::Incomplete { tensor }) }
    }

    /// Decodes a vector into the front of `out`, and zeros behind it.
    fn vector(&mut self, tensor: Tensor, out: &mut [f32]) -> Step<W> {
        let backend = self.model.backend;
        let dtype = tensor.spec(self.model.config).dtype;
        self.lend(tensor, out.len(), |bytes| {
            if dtype == Dtype::Bf16 {
                backend.decode_bf16(bytes, out);
            } else {
                let (floats, _) = bytes.as_chunks::<4>();
                let (front, tail) = out.split_at_mut(floats.len());
                for (o, b) in front.iter_mut().zip(floats) {
                    *o = f32::from_le_bytes(*b);
                }
                tail.fill(0.0);
            }
        })?;
        // Sigmoids and caps would turn an infinity into an ordinary number.
        finite(out, out.len(), Place::Weight(tensor))
    }

    /// All vectors of a layer, in the walk order of [`layer_tensors`](crate::checkpoint::layer_tensors).
    fn layer_vectors(&mut self, layer: LayerIndex, v: &mut Vectors<'_>) -> Step<W> {
        use LayerTensor as T;
        let c = self.model.config;
        let t = |role| Tensor::Layer(layer, role);
        self.vector(t(T::InputNorm), v.input_norm)?;
        self.vector(t(T::PostNorm), v.post_norm)?;
        // The folds need two vectors each and have one buffer: the product of two f32 is rounded to
        // f32, whichever is decoded first.
        self.fold(t(T::AttnResNorm), t(T::AttnResProj), v.fold_attn)?;
        self.fold(t(T::MlpResNorm), t(T::MlpResProj), v.fold_mlp)?;
        match c.layer_kind(layer) {
            LayerKind::Kda => {
                let taps = v.taps.len() / 3;
                for (role, out) in [T::QConv, T::KConv, T::VConv].into_iter().zip(v.taps.chunks_exact_mut(taps)) {
                    self.vector(t(role), out)?;
                }
                self.vector(t(T::ALog), v.a_log)?;
                if v.a_log[c.kda_num_heads..].iter().any(|a| *a != 0.0) {
                    return Err(ForwardError::ALogTail { layer });
                }
                self.vector(t(T::DtBias), v.dt_bias)?;
                self.vector(t(T::ONorm), v.o_norm)?;
            }
            LayerKind::Mla => {
                self.vector(t(T::QANorm), v.q_norm)?;
                self.vector(t(T::KvANorm), v.kv_norm)?;
            }
        }
        if c.mlp_kind(layer) == MlpKind::Moe {
            self.vector(t(T::RouterBias), v.router_bias)?;
            self.vector(t(T::LatentNorm), v.latent_norm)?;
        }
        Ok(())
    }

    /// Norm weight times projection weight (spec 3.1).
    fn fold(&mut self, norm: Tensor, proj: Tensor, out: &mut [f32]) -> Step<W> {
        self.vector(norm, out)?;
        self.lend(proj, out.len(), |bytes| {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o *= half::bf16::from_le_bytes(*b).to_f32();
            }
        })?;
        finite(out, out.len(), Place::Weight(proj))
    }

    /// `out[t] = rms(x[t], weight)` with `rms_norm_eps`.
    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let Model { config: c, backend, exec } = self.model;
        let width = weight.len();
        exec.run(Parts::new(out, width), |t, out| {
            rms_norm(backend, &x[t * width..][..width], weight, c.rms_norm_eps, out);
        });
    }

    /// Lends the blocks of a matrix to `each` and sees to it that all rows came, in order.
    fn blocks(&mut self, tensor: Tensor, mut each: impl FnMut(usize, MatrixRows<'_>)) -> Step<W> {
        let spec = tensor.spec(self.model.config);
        let (rows, cols) = (length(spec.rows()), length(spec.cols()));
        let granule = tensor.row_granule(self.model.config);
        let (mut next, mut fits) = (0, true);
        self.weights
            .matrix(tensor, &mut |first, block| {
                fits &= first == next && block.cols() == cols;
                fits &= block.rows().is_multiple_of(granule) && block.rows() <= rows - next;
                fits &= matches!(block, MatrixRows::Raw(_)) || tensor.may_be_coded();
                if fits {
                    each(first, block);
                    next += block.rows();
                }
            })
            .map_err(ForwardError::Weights)?;
        if fits && next == rows { Ok(()) } else { Err(ForwardError::Incomplete { tensor }) }
    }

    /// `out[position, row] = matrix[row] . x[position]`.
    fn linear(&mut self, tensor: Tensor, x: &Panel<'_>, tile: &mut [f32], out: &mut [f32]) -> Step<W> {
        let Model { backend, exec, .. } = self.model;
        self.blocks(tensor, |first, block| multiply(backend, exec, block, first, x, tile, out))?;
        if matches!(tensor, Tensor::Global(_)) {
            // Logits name their id.
            return Ok(());
        }
        finite(out, out.len() / x.positions(), Place::Product(tensor))
    }

    /// Delta attention (spec 3.3): `y = KDA(x)`.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn kda(
        &mut self,
        layer: LayerIndex,
        sequences: &mut [Sequence<'_, '_, '_>],
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        s: &mut KdaScratch<'_>,
        y: &mut [f32],
    ) -> Step<W> {
        use LayerTensor as T;
        let Model { config: c, backend, exec } = self.model;
        let (n, ordinal) = (self.n, c.kda_ordinal(layer));
        let all = kda_shape(c, n);
        let (width, heads, history) = (all.width(), all.heads, all.kernel - 1);
        let t = |role| Tensor::Layer(layer, role);
        let Products { panel_x, panel, tile, .. } = products;
        let KdaScratch { window, qkv, low, z, alpha, beta, gate, heads: out } = s;
        let (qkv, z, alpha, out) =
            (&mut qkv[..3 * n * width], &mut z[..n * width], &mut alpha[..n * width], &mut out[..n * width]);

        // q, k and v before the convolution lie where other things come later (see `KdaScratch`).
        let px = backend.pack(Layout::Bf16, x, c.hidden_size, n, panel_x);
        let roles = [T::Q, T::K, T::V];
        for (role, raw) in roles.into_iter().zip([&mut *z, &mut *alpha, &mut *out]) {
            self.linear(t(role), &px, tile, raw)?;
        }
        let mut row = 0;
        for s in &mut *sequences {
            let m = s.positions;
            let rows = row * width..(row + m) * width;
            let window = &mut window[..3 * (history + m) * width];
            let past = &mut s.state.conv[ordinal * 3 * history * width..][..3 * history * width];
            for (i, raw) in [&*z, &*alpha, &*out].into_iter().enumerate() {
                let window = &mut window[i * (history + m) * width..][..(history + m) * width];
                let (before, now) = window.split_at_mut(history * width);
                let past = &mut past[i * history * width..][..history * width];
                before.copy_from_slice(past);
                now.copy_from_slice(&raw[rows.clone()]);
                match &mut s.journal {
                    Some(journal) => journal.note_inputs(ordinal, i, now),
                    None => past.copy_from_slice(&window[m * width..]),
                }
            }
            kda::convolve(backend, exec, kda_shape(c, m), window, v.taps, &mut qkv[3 * rows.start..3 * rows.end]);
            row += m;
        }

        let (low, beta, gate) = (&mut low[..n * all.head_dim], &mut beta[..n * heads], &mut gate[..n * width]);
        self.linear(t(T::FA), &px, tile, low)?;
        self.linear(t(T::B), &px, tile, beta)?;
        self.linear(t(T::G), &px, tile, gate)?;
        let pl = backend.pack(Layout::Bf16, low, all.head_dim, n, panel);
        self.linear(t(T::FB), &pl, tile, z)?;
        kda::decay(backend, exec, all, z, v.dt_bias, v.a_log, c.gate_lower_bound, alpha);
        backend.sigmoid(beta);

        let matrices = width * all.head_dim;
        let mut row = 0;
        for s in &mut *sequences {
            let (shape, rows) = (kda_shape(c, s.positions), row * width..(row + s.positions) * width);
            let (qkv, alpha) = (&qkv[3 * rows.start..3 * rows.end], &alpha[rows.clone()]);
            let beta = &beta[row * heads..][..s.positions * heads];
            let matrices = &mut s.state.kda[ordinal * matrices..][..matrices];
            let matrices = match &mut s.journal {
                Some(journal) => journal.note_steps(ordinal, Steps { shape, qkv, alpha, beta }, matrices),
                None => matrices,
            };
            kda::recur(backend, exec, shape, matrices, qkv, alpha, beta, &mut out[rows.clone()]);
            // `z` has been read: it holds the gated heads now.
            let (gate, z) = (&gate[rows.clone()], &mut z[rows.clone()]);
            kda::gated_norm(backend, exec, shape, &out[rows], v.o_norm, c.rms_norm_eps, gate, z);
            row += s.positions;
        }
        let po = backend.pack(Layout::Bf16, z, width, n, panel);
        self.linear(t(T::O), &po, tile, y)
    }

    /// Gated latent attention (spec 3.4): `y = MLA(x)`.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn mla(
        &mut self,
        layer: LayerIndex,
        sequences: &mut [Sequence<'_, '_, '_>],
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        s: &mut MlaScratch<'_>,
        y: &mut [f32],
    ) -> Step<W> {
        use LayerTensor as T;
        let Model { config: c, backend, exec } = self.model;
        let n = self.n;
        let shape = mla::Shape {
            positions: 0,
            heads: c.num_attention_heads,
            nope: c.qk_nope_head_dim,
            rope: c.qk_rope_head_dim,
            value: c.v_head_dim,
            rank: c.kv_lora_rank,
        };
        let (width, row, query) = (shape.heads * shape.value, shape.latent(), shape.heads * (shape.nope + shape.rope));
        let t = |role| Tensor::Layer(layer, role);
        let Products { panel_x, panel, tile, .. } = products;

        let px = backend.pack(Layout::Bf16, x, c.hidden_size, n, panel_x);
        let (cq, latent) = (&mut s.cq[..n * c.q_lora_rank], &mut s.latent[..n * row]);
        let (q, gate) = (&mut s.q[..n * query], &mut s.gate[..n * width]);
        self.linear(t(T::QA), &px, tile, cq)?;
        self.linear(t(T::KvA), &px, tile, latent)?;
        self.linear(t(T::G), &px, tile, gate)?;
        for cq in cq.chunks_exact_mut(c.q_lora_rank) {
            rms_norm_in_place(backend, cq, v.q_norm, MLA_LORA_EPS);
        }
        let pq = backend.pack(Layout::Bf16, cq, c.q_lora_rank, n, panel);
        self.linear(t(T::QB), &pq, tile, q)?;

        // The rope slots of a cached row are stored as they are: normed is only the latent.
        let ordinal = c.mla_ordinal(layer);
        let mut latents = latent.chunks_exact_mut(row);
        for s in &mut *sequences {
            let first = (ordinal * s.state.context() + s.state.position) * row;
            let cached = s.state.latent[first..].chunks_exact_mut(row).take(s.positions);
            for (cached, latent) in cached.zip(&mut latents) {
                rms_norm_in_place(backend, &mut latent[..shape.rank], v.kv_norm, MLA_LORA_EPS);
                cached.copy_from_slice(latent);
            }
        }
        let heads = &mut s.heads[..n * width];
        let (thread, panels) = (&mut *s.thread, &mut *s.panels);
        let thread_len = s.thread_len;
        self.blocks(t(T::KvB), |first, block| {
            let MatrixRows::Raw(block) = block else { return };
            let mut at = 0;
            for s in &*sequences {
                let (shape, seen) = (mla::Shape { positions: s.positions, ..shape }, s.state.position + s.positions);
                let cache = &s.state.latent[ordinal * s.state.context() * row..][..seen * row];
                if let Ok(cache) = F32Matrix::new(cache, seen, row) {
                    let scratch = &mut mla::Scratch { thread_len, thread: &mut *thread, panels: &mut *panels };
                    let head = first / shape.head_rows();
                    let q = &q[at * query..][..s.positions * query];
                    let heads = &mut heads[at * width..][..s.positions * width];
                    mla::attend(backend, exec, shape, block, head, q, cache, scratch, heads);
                }
                at += s.positions;
            }
        })?;

        let attended = &mut s.attended[..n * width];
        let mut at = 0;
        for s in &*sequences {
            let m = s.positions;
            let (heads, gate) = (&heads[at * width..][..m * width], &gate[at * width..][..m * width]);
            exec.run(Parts::new(&mut attended[at * width..][..m * width], shape.value), |i, out| {
                let (t, head) = (i / shape.heads, i % shape.heads);
                out.copy_from_slice(&heads[(head * m + t) * shape.value..][..shape.value]);
                backend.mul_sigmoid(out, &gate[i * shape.value..][..shape.value]);
            });
            at += m;
        }
        let po = backend.pack(Layout::Bf16, attended, width, n, panel);
        self.linear(t(T::O), &po, tile, y)
    }

    /// Gate, up, `SiTU`, down (spec 3.5): the dense MLP and the shared experts.
    fn glu(
        &mut self,
        layer: LayerIndex,
        [gate_name, up_name, down_name]: [LayerTensor; 3],
        x: &Panel<'_>,
        (panel, tile): (&mut [f64], &mut [f32]),
        (gate, up): (&mut [f32], &mut [f32]),
        y: &mut [f32],
    ) -> Step<W> {
        let Model { config: c, backend, exec } = self.model;
        let down = Tensor::Layer(layer, down_name);
        let width = length(down.spec(c).cols());
        let (gate, up) = (&mut gate[..self.n * width], &mut up[..self.n * width]);
        self.linear(Tensor::Layer(layer, gate_name), x, tile, gate)?;
        self.linear(Tensor::Layer(layer, up_name), x, tile, up)?;
        situ(backend, exec, c, gate, up);
        let inner = backend.pack(Layout::Bf16, gate, width, self.n, panel);
        self.linear(down, &inner, tile, y)
    }

    /// Router, routed experts on the latent, shared experts (spec 3.6): `y = MoE(x)`. `routed` is
    /// scratch of `y`'s size.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn moe(
        &mut self,
        layer: LayerIndex,
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        (s, routed): (&mut MoeScratch<'_>, &mut [f32]),
        y: &mut [f32],
        observer: &mut impl Observer,
    ) -> Step<W> {
        use LayerTensor as T;
        let Model { config: c, backend, exec } = self.model;
        let (n, k) = (self.n, c.num_experts_per_token);
        let (width, inner) = (c.routed_expert_hidden_size, c.moe_intermediate_size);
        let t = |role| Tensor::Layer(layer, role);
        let Products { panel_x, panel, tile, gate, up } = products;
        let px = backend.pack(Layout::Bf16, x, c.hidden_size, n, panel_x);

        // Who: each expert is asked for once, for all the positions that chose it.
        let scores = &mut s.scores[..n * c.num_experts];
        let (ids, weights) = (&mut s.ids[..n * k], &mut s.weights[..n * k]);
        self.linear(t(T::Router), &px, tile, scores)?;
        backend.sigmoid(scores);
        for (i, scores) in scores.chunks_exact(c.num_experts).enumerate() {
            let (ids, weights) = (&mut ids[i * k..][..k], &mut weights[i * k..][..k]);
            let (renormalize, scale) = (c.moe_renormalize, c.routed_scaling_factor);
            if !router::route(scores, v.router_bias, renormalize, scale, ids, weights) {
                return Err(ForwardError::NonFinite { sequence: 0, position: i, place: Place::Router(layer) });
            }
        }
        observer.routed(layer, ids, weights);
        let groups = Groups::new(ids, s.starts, s.pairs, s.distinct);
        let arrived = &mut s.arrived[..groups.distinct.len()];
        arrived.fill(0);
        self.weights.request_experts(layer, groups.distinct).map_err(ForwardError::Weights)?;

        // While the disk works: the latent, and the shared experts on the full width.
        let z = &mut s.z[..n * width];
        self.linear(t(T::LatentDown), &px, tile, z)?;
        let shared = [T::SharedGate, T::SharedUp, T::SharedDown];
        self.glu(layer, shared, &px, (&mut *panel, &mut *tile), (&mut *gate, &mut *up), y)?;

        // Each expert, whenever it lands, into the slots of its picks; then the sum in rank order.
        let slots = &mut s.slots[..n * k * width];
        let (rows, eg, eu) = (&mut *s.rows, &mut *s.gate, &mut *s.up);
        // Of several faults the first expert's is told, whichever arrived first.
        let (mut stray, mut infinite) = (false, None);
        let each = &mut |i: usize, expert: Expert<'_>| {
            let Some(arrived) = arrived.get_mut(i) else {
                stray = true;
                return;
            };
            let shapes = [(expert.w1, inner, width), (expert.w3, inner, width), (expert.w2, width, inner)];
            if *arrived > 0 || shapes.iter().any(|(m, rows, cols)| (m.rows(), m.cols()) != (*rows, *cols)) {
                *arrived = WRONG;
                return;
            }
            *arrived = 1;
            let pairs = groups.pairs(i);
            let mut first = |values: &[f32], width: usize| {
                if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                    let found = (i, pairs[at / width] as usize / k);
                    infinite = Some(infinite.map_or(found, |other| found.min(other)));
                }
            };
            let m = pairs.len();
            for (row, &pair) in rows.chunks_exact_mut(width).zip(pairs) {
                row.copy_from_slice(&z[pair as usize / k * width..][..width]);
            }
            let (rows, eg, eu) = (&mut rows[..m * width], &mut eg[..m * inner], &mut eu[..m * inner]);
            let pz = backend.pack(Layout::Mxfp4, rows, width, m, panel);
            multiply(backend, exec, expert.w1, 0, &pz, tile, eg);
            multiply(backend, exec, expert.w3, 0, &pz, tile, eu);
            first(eg, inner);
            first(eu, inner);
            situ(backend, exec, c, eg, eu);
            let pi = backend.pack(Layout::Mxfp4, eg, inner, m, panel);
            multiply(backend, exec, expert.w2, 0, &pi, tile, rows);
            first(rows, width);
            for (row, &pair) in rows.chunks_exact(width).zip(pairs) {
                slots[pair as usize * width..][..width].copy_from_slice(row);
            }
        };
        self.weights.experts(layer, groups.distinct, each).map_err(ForwardError::Weights)?;
        if let Some(i) = arrived.iter().position(|&times| times != 1) {
            return Err(ForwardError::Expert { layer, expert: groups.distinct[i] });
        }
        if stray {
            return Err(ForwardError::StrayExpert { layer });
        }
        if let Some((i, position)) = infinite {
            let place = Place::Expert(layer, groups.distinct[i]);
            return Err(ForwardError::NonFinite { sequence: 0, position, place });
        }
        let sum = &mut s.sum[..n * width];
        exec.run(Parts::new(sum, width), |i, sum| {
            backend.sum_rows_f32(&weights[i * k..][..k], &slots[i * k * width..][..k * width], width, sum);
            rms_norm_in_place(backend, sum, v.latent_norm, c.rms_norm_eps);
        });
        let ps = backend.pack(Layout::Bf16, sum, width, n, panel);
        self.linear(t(T::LatentUp), &ps, tile, routed)?;
        add(y, routed);
        Ok(())
    }
}

fn situ<X: Executor>(backend: Backend, exec: &X, c: &ModelConfig, gate: &mut [f32], up: &[f32]) {
    let per = gate.len().div_ceil(exec.width().max(1)).next_multiple_of(16);
    exec.run(Parts::new(gate, per), |i, gate| {
        backend.situ(gate, &up[i * per..][..gate.len()], c.situ_beta, c.situ_linear_beta);
    });
}

/// What stands for the number of times that an expert arrived, if it did so twice or in another shape.
const WRONG: u32 = 2;

/// A dimension that [`ModelConfig`] holds as a `usize`, from a [`TensorSpec`](crate::checkpoint::TensorSpec).
fn length(dim: u64) -> usize {
    usize::try_from(dim).unwrap_or(usize::MAX)
}

fn add(sum: &mut [f32], y: &[f32]) {
    for (s, y) in sum.iter_mut().zip(y) {
        *s += y;
    }
}

/// Stops the pass at the first value that is not finite. Its position is a row's number: see [`placed`].
fn finite<E>(rows: &[f32], width: usize, place: Place) -> Result<(), ForwardError<E>> {
    match rows.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(ForwardError::NonFinite { sequence: 0, position: i / width, place }),
    }
}
