//! The pass itself.

use super::error::{ForwardError, Place};
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
use crate::view::{Bf16Matrix, Expert, F32Matrix, LayerIndex, TokenId};

/// Watches a pass from outside. All methods do nothing unless overridden; none can change a value.
pub trait Observer {
    /// The running residual sum leaving `layer`: `[positions, hidden]`.
    fn layer(&mut self, layer: LayerIndex, running_sum: &[f32]) {
        let _ = (layer, running_sum);
    }

    /// The experts of a layer, `[positions, experts per token]` in rank order, and their weights.
    fn routed(&mut self, layer: LayerIndex, ids: &[u32], weights: &[f32]) {
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
    /// positions, `0 <= m <= n`; with `m = 0` the head is not read at all.
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
        let wanted = self.admit(state, workspace, ids, logits)?;
        state.torn = true;
        let mut pass = Pass { model: *self, weights, n: ids.len(), start: state.position };
        pass.run(state, workspace, ids, wanted, logits, observer)?;
        state.position += ids.len();
        state.torn = false;
        Ok(())
    }

    /// One layer's attention on its own: `y = Attention(x)` for `[n, hidden]`, with the state moved on
    /// by `n` positions. For checking a layer against a reference; a whole pass is
    /// [`Model::forward`].
    ///
    /// The weights are asked for the layer's vectors, then for its attention matrices.
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
        let n = self.admit_vectors(workspace, x, y)?;
        let (needed, context) = (state.position.saturating_add(n), state.context().min(workspace.extent().context));
        if state.torn {
            return Err(ForwardError::TornState);
        }
        if needed > context {
            return Err(ForwardError::ContextFull { needed, context });
        }
        state.torn = true;
        let mut pass = Pass { model: *self, weights, n, start: state.position };
        pass.layer_vectors(layer, &mut workspace.vectors)?;
        let Workspace { vectors, products, kda, mla, .. } = workspace;
        pass.attention(layer, state, x, vectors, products, (kda, mla), y)?;
        (state.position, state.torn) = (needed, false);
        Ok(())
    }

    /// One layer's MLP on its own: `y = MLP(x)` for `[n, hidden]`; see [`Model::attention`].
    ///
    /// The weights are asked for the layer's vectors, then for its MLP matrices and experts.
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
        let n = self.admit_vectors(workspace, x, y)?;
        let mut pass = Pass { model: *self, weights, n, start: 0 };
        pass.layer_vectors(layer, &mut workspace.vectors)?;
        let Workspace { residual, vectors, products, moe, .. } = workspace;
        let routed = &mut residual.mixed[..x.len()];
        pass.mlp(layer, 0, x, vectors, products, (moe, routed), y, observer)
    }

    /// How many positions two vectors for a single sub-layer have.
    fn admit_vectors<E>(&self, workspace: &Workspace<'_>, x: &[f32], y: &[f32]) -> Result<usize, ForwardError<E>> {
        let (n, chunk) = (x.len() / self.config.hidden_size, workspace.extent().chunk);
        if n == 0 || x.len() != y.len() || n * self.config.hidden_size != x.len() {
            return Err(ForwardError::EmptyChunk);
        }
        if n > chunk {
            return Err(ForwardError::ChunkTooLong { given: n, chunk });
        }
        Ok(n)
    }

    /// Everything that can be refused before anything is touched. Returns how many positions want
    /// logits.
    fn admit<E>(
        &self,
        state: &State<'_>,
        workspace: &Workspace<'_>,
        ids: &[TokenId],
        logits: &[f32],
    ) -> Result<usize, ForwardError<E>> {
        let extent = workspace.extent();
        let vocab = self.config.vocab_size;
        if state.torn {
            return Err(ForwardError::TornState);
        }
        if ids.is_empty() {
            return Err(ForwardError::EmptyChunk);
        }
        if ids.len() > extent.chunk {
            return Err(ForwardError::ChunkTooLong { given: ids.len(), chunk: extent.chunk });
        }
        let (needed, context) = (state.position.saturating_add(ids.len()), state.context().min(extent.context));
        if needed > context {
            return Err(ForwardError::ContextFull { needed, context });
        }
        if let Some(index) = ids.iter().position(|id| id.get() >= vocab) {
            return Err(ForwardError::TokenOutOfRange { index, id: ids[index] });
        }
        let wanted = logits.len() / vocab;
        if !logits.len().is_multiple_of(vocab) || wanted > ids.len() {
            return Err(ForwardError::LogitsLength { found: logits.len(), vocab });
        }
        Ok(wanted)
    }
}

/// One pass of `n` positions.
struct Pass<'p, X, W> {
    model: Model<'p, X>,
    weights: &'p mut W,
    n: usize,
    /// Positions before the chunk.
    start: usize,
}

type Step<W> = Result<(), ForwardError<<W as Weights>::Error>>;

impl<X: Executor, W: Weights> Pass<'_, X, W> {
    fn run(
        &mut self,
        state: &mut State<'_>,
        ws: &mut Workspace<'_>,
        ids: &[TokenId],
        wanted: usize,
        logits: &mut [f32],
        observer: &mut impl Observer,
    ) -> Step<W> {
        let Model { config: c, backend, exec } = self.model;
        let (n, hidden, eps) = (self.n, c.hidden_size, c.rms_norm_eps);
        let start = self.start;
        let Workspace { residual, vectors, products, kda, mla, moe, .. } = ws;
        let (mixed, x, y) =
            (&mut residual.mixed[..n * hidden], &mut residual.x[..n * hidden], &mut residual.y[..n * hidden]);
        let scores = &mut residual.scores[..n * sources(c)];

        // Sources of the mix: `blocks` finished ones, then the running sum. A block is finished by
        // counting it; nothing is copied.
        self.weights.begin(wanted > 0).map_err(ForwardError::Weights)?;
        let mut blocks = 0;
        self.embed(ids, &mut residual.values[..n * hidden])?;
        finite(&residual.values[..n * hidden], hidden, start, Place::Embedding)?;

        for layer in c.layers() {
            self.layer_vectors(layer, vectors)?;
            residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_attn, eps, scores, mixed);
            let fresh = layer.get().is_multiple_of(c.attn_res_block_size);
            blocks += usize::from(fresh);
            self.norm(mixed, vectors.input_norm, x);
            self.attention(layer, state, x, vectors, products, (kda, mla), y)?;
            let sum = &mut residual.values[blocks * n * hidden..][..n * hidden];
            if fresh {
                sum.copy_from_slice(y);
            } else {
                add(sum, y);
            }
            finite(sum, hidden, start, Place::Attention(layer))?;

            residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_mlp, eps, scores, mixed);
            self.norm(mixed, vectors.post_norm, x);
            self.mlp(layer, start, x, vectors, products, (moe, mixed), y, observer)?;
            let sum = &mut residual.values[blocks * n * hidden..][..n * hidden];
            add(sum, y);
            finite(sum, hidden, start, Place::Mlp(layer))?;
            observer.layer(layer, sum);
        }
        if wanted == 0 {
            return Ok(());
        }

        // 3.7: the mix and the norm of the positions that want logits, then the head.
        let global = Tensor::Global;
        self.vector(global(GlobalTensor::OutResNorm), vectors.input_norm)?;
        self.vector(global(GlobalTensor::OutResProj), vectors.fold_attn)?;
        times(vectors.fold_attn, vectors.input_norm);
        self.vector(global(GlobalTensor::FinalNorm), vectors.post_norm)?;
        residual::mix(backend, exec, residual.values, blocks + 1, vectors.fold_attn, eps, scores, mixed);
        self.norm(mixed, vectors.post_norm, x);
        let x = &x[(n - wanted) * hidden..];
        observer.last(x);
        let panel = backend.pack(Layout::Bf16, x, hidden, wanted, products.panel_x);
        self.linear(global(GlobalTensor::LmHead), &panel, products.tile, logits)?;
        for (t, logits) in logits.chunks_exact(c.vocab_size).enumerate() {
            if let Some((id, _)) = (0..).map(TokenId).zip(logits).find(|(_, l)| !l.is_finite()) {
                let position = start + n - wanted + t;
                return Err(ForwardError::NonFinite { position, place: Place::Logit(id) });
            }
        }
        Ok(())
    }

    /// `y = Attention(x)`, of whichever kind the layer has.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn attention(
        &mut self,
        layer: LayerIndex,
        state: &mut State<'_>,
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        (kda, mla): (&mut KdaScratch<'_>, &mut MlaScratch<'_>),
        y: &mut [f32],
    ) -> Step<W> {
        match self.model.config.layer_kind(layer) {
            LayerKind::Kda => self.kda(layer, state, x, v, products, kda, y),
            LayerKind::Mla => self.mla(layer, state, x, v, products, mla, y),
        }
    }

    /// `y = MLP(x)`, of whichever kind the layer has. `routed` is scratch of `y`'s size.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn mlp(
        &mut self,
        layer: LayerIndex,
        start: usize,
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
            MlpKind::Moe => self.moe(layer, start, x, v, products, (moe, routed), y, observer),
        }
    }

    fn embed(&mut self, ids: &[TokenId], out: &mut [f32]) -> Step<W> {
        let Model { config: c, backend, .. } = self.model;
        let (hidden, mut rows) = (c.hidden_size, 0);
        let each = &mut |i: usize, bytes: &[u8]| {
            if bytes.len() == hidden * 2 && i < ids.len() {
                backend.decode_bf16(bytes, &mut out[i * hidden..][..hidden]);
                rows += 1;
            }
        };
        self.weights.embed(ids, each).map_err(ForwardError::Weights)?;
        if rows == ids.len() {
            Ok(())
        } else {
            Err(ForwardError::Incomplete { tensor: Tensor::Global(GlobalTensor::Embed) })
        }
    }

    /// Decodes a vector into the front of `out`, which may be longer only for `A_log`.
    fn vector(&mut self, tensor: Tensor, out: &mut [f32]) -> Step<W> {
        let backend = self.model.backend;
        let dtype = tensor.spec(self.model.config).dtype;
        let padded = matches!(tensor, Tensor::Layer(_, LayerTensor::ALog));
        let mut whole = false;
        self.weights
            .vector(tensor, &mut |bytes| {
                let count = bytes.len() / if dtype == Dtype::Bf16 { 2 } else { 4 };
                if count > out.len() || (count < out.len() && !padded) {
                    return;
                }
                out[count..].fill(0.0);
                if dtype == Dtype::Bf16 {
                    backend.decode_bf16(bytes, &mut out[..count]);
                } else {
                    for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                        *o = f32::from_le_bytes(*b);
                    }
                }
                whole = true;
            })
            .map_err(ForwardError::Weights)?;
        if !whole {
            return Err(ForwardError::Incomplete { tensor });
        }
        // Sigmoids and caps would turn an infinity into an ordinary number.
        finite(out, out.len(), self.start, Place::Weight(tensor))
    }

    /// All vectors of a layer, in the walk order of [`crate::checkpoint::layer_tensors`].
    fn layer_vectors(&mut self, layer: LayerIndex, v: &mut Vectors<'_>) -> Step<W> {
        use LayerTensor as T;
        let c = self.model.config;
        let t = |role| Tensor::Layer(layer, role);
        self.vector(t(T::InputNorm), v.input_norm)?;
        self.vector(t(T::PostNorm), v.post_norm)?;
        // The folds need two vectors each and have one buffer: the product of two f32 is rounded to
        // f32, whichever is decoded first.
        self.fold(layer, T::AttnResNorm, T::AttnResProj, v.fold_attn)?;
        self.fold(layer, T::MlpResNorm, T::MlpResProj, v.fold_mlp)?;
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
    fn fold(&mut self, layer: LayerIndex, norm: LayerTensor, proj: LayerTensor, out: &mut [f32]) -> Step<W> {
        self.vector(Tensor::Layer(layer, norm), out)?;
        let mut whole = false;
        let tensor = Tensor::Layer(layer, proj);
        self.weights
            .vector(tensor, &mut |bytes| {
                let (pairs, _) = bytes.as_chunks::<2>();
                whole = bytes.len() == out.len() * 2;
                for (o, b) in out.iter_mut().zip(pairs) {
                    *o *= half::bf16::from_le_bytes(*b).to_f32();
                }
            })
            .map_err(ForwardError::Weights)?;
        if !whole {
            return Err(ForwardError::Incomplete { tensor });
        }
        finite(out, out.len(), self.start, Place::Weight(tensor))
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
    fn blocks(&mut self, tensor: Tensor, mut each: impl FnMut(usize, Bf16Matrix<'_>)) -> Step<W> {
        let spec = tensor.spec(self.model.config);
        let (rows, cols) = (length(spec.rows()), length(spec.cols()));
        let granule = tensor.row_granule(self.model.config);
        let (mut next, mut fits) = (0, true);
        self.weights
            .matrix(tensor, &mut |first, block| {
                fits &= first == next && block.cols() == cols;
                fits &= block.rows().is_multiple_of(granule) && block.rows() <= rows - next;
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
        finite(out, out.len() / x.positions(), self.start, Place::Product(tensor))
    }

    /// Delta attention (spec 3.3): `y = KDA(x)`.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn kda(
        &mut self,
        layer: LayerIndex,
        state: &mut State<'_>,
        x: &[f32],
        v: &Vectors<'_>,
        products: &mut Products<'_>,
        s: &mut KdaScratch<'_>,
        y: &mut [f32],
    ) -> Step<W> {
        use LayerTensor as T;
        let Model { config: c, backend, exec } = self.model;
        let (n, ordinal) = (self.n, c.kda_ordinal(layer));
        let shape =
            kda::Shape { positions: n, heads: c.kda_num_heads, head_dim: c.kda_head_dim, kernel: c.conv_kernel_size };
        let (width, history) = (shape.width(), (shape.kernel - 1) * shape.width());
        let t = |role| Tensor::Layer(layer, role);
        let Products { panel_x, panel, tile, .. } = products;

        let px = backend.pack(Layout::Bf16, x, c.hidden_size, n, panel_x);
        let window = &mut s.window[..3 * (history + n * width)];
        let past = &mut state.conv[ordinal * 3 * history..][..3 * history];
        for (i, role) in [T::Q, T::K, T::V].into_iter().enumerate() {
            let rows = &mut window[i * (history + n * width)..][..history + n * width];
            let (before, now) = rows.split_at_mut(history);
            let past = &mut past[i * history..][..history];
            before.copy_from_slice(past);
            self.linear(t(role), &px, tile, now)?;
            past.copy_from_slice(&rows[n * width..]);
        }
        let (low, z) = (&mut s.low[..n * shape.head_dim], &mut s.z[..n * width]);
        let (beta, gate) = (&mut s.beta[..n * shape.heads], &mut s.gate[..n * width]);
        self.linear(t(T::FA), &px, tile, low)?;
        self.linear(t(T::B), &px, tile, beta)?;
        self.linear(t(T::G), &px, tile, gate)?;
        let pl = backend.pack(Layout::Bf16, low, shape.head_dim, n, panel);
        self.linear(t(T::FB), &pl, tile, z)?;

        let (qkv, alpha) = (&mut s.qkv[..3 * n * width], &mut s.alpha[..n * width]);
        kda::convolve(backend, exec, shape, window, v.taps, qkv);
        kda::decay(backend, exec, shape, z, v.dt_bias, v.a_log, c.gate_lower_bound, alpha);
        backend.sigmoid(beta);
        let matrices = shape.heads * shape.head_dim * shape.head_dim;
        let matrices = &mut state.kda[ordinal * matrices..][..matrices];
        let heads = &mut s.heads[..n * width];
        kda::recur(backend, exec, shape, matrices, qkv, alpha, beta, heads);
        // `z` has been read: it holds the gated heads now.
        kda::gated_norm(backend, exec, shape, heads, v.o_norm, c.rms_norm_eps, gate, z);
        let po = backend.pack(Layout::Bf16, z, width, n, panel);
        self.linear(t(T::O), &po, tile, y)
    }

    /// Gated latent attention (spec 3.4): `y = MLA(x)`.
    #[expect(clippy::too_many_arguments, reason = "each buffer is named at the call")]
    fn mla(
        &mut self,
        layer: LayerIndex,
        state: &mut State<'_>,
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
            positions: n,
            heads: c.num_attention_heads,
            nope: c.qk_nope_head_dim,
            rope: c.qk_rope_head_dim,
            value: c.v_head_dim,
            rank: c.kv_lora_rank,
        };
        let (width, row) = (shape.heads * shape.value, shape.latent());
        let t = |role| Tensor::Layer(layer, role);
        let Products { panel_x, panel, tile, .. } = products;

        let px = backend.pack(Layout::Bf16, x, c.hidden_size, n, panel_x);
        let (cq, latent) = (&mut s.cq[..n * c.q_lora_rank], &mut s.latent[..n * row]);
        let (q, gate) = (&mut s.q[..n * shape.heads * (shape.nope + shape.rope)], &mut s.gate[..n * width]);
        self.linear(t(T::QA), &px, tile, cq)?;
        self.linear(t(T::KvA), &px, tile, latent)?;
        self.linear(t(T::G), &px, tile, gate)?;
        for cq in cq.chunks_exact_mut(c.q_lora_rank) {
            rms_norm_in_place(backend, cq, v.q_norm, MLA_LORA_EPS);
        }
        let pq = backend.pack(Layout::Bf16, cq, c.q_lora_rank, n, panel);
        self.linear(t(T::QB), &pq, tile, q)?;

        // The rope slots of a cached row are stored as they are: normed is only the latent.
        let first = (c.mla_ordinal(layer) * state.context() + state.position) * row;
        for (latent, cached) in latent.chunks_exact_mut(row).zip(state.latent[first..].chunks_exact_mut(row)) {
            rms_norm_in_place(backend, &mut latent[..shape.rank], v.kv_norm, MLA_LORA_EPS);
            cached.copy_from_slice(latent);
        }
        let seen = state.position + n;
        let cache = &state.latent[first - state.position * row..][..seen * row];
        let heads = &mut s.heads[..n * width];
        let (thread, panels) = (&mut *s.thread, &mut *s.panels);
        let thread_len = s.thread_len;
        self.blocks(t(T::KvB), |first, block| {
            if let Ok(cache) = F32Matrix::new(cache, seen, row) {
                let scratch = &mut mla::Scratch { thread_len, thread: &mut *thread, panels: &mut *panels };
                let head = first / shape.head_rows();
                mla::attend(backend, exec, shape, block, head, q, cache, scratch, heads);
            }
        })?;

        let attended = &mut s.attended[..n * width];
        exec.run(Parts::new(attended, shape.value), |i, out| {
            let (t, head) = (i / shape.heads, i % shape.heads);
            out.copy_from_slice(&heads[(head * n + t) * shape.value..][..shape.value]);
            backend.mul_sigmoid(out, &gate[i * shape.value..][..shape.value]);
        });
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
        start: usize,
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
                return Err(ForwardError::NonFinite { position: start + i, place: Place::Router(layer) });
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
        let (mut wrong, mut infinite) = (None, None);
        let each = &mut |i: usize, expert: Expert<'_>| {
            let Some(arrived) = arrived.get_mut(i) else { return };
            *arrived += 1;
            let shapes = [(expert.w1, inner, width), (expert.w3, inner, width), (expert.w2, width, inner)];
            if shapes.iter().any(|(m, rows, cols)| (m.rows(), m.cols()) != (*rows, *cols)) {
                wrong = Some(i);
                return;
            }
            let pairs = groups.pairs(i);
            let m = pairs.len();
            for (row, &pair) in rows.chunks_exact_mut(width).zip(pairs) {
                row.copy_from_slice(&z[pair as usize / k * width..][..width]);
            }
            let (rows, eg, eu) = (&mut rows[..m * width], &mut eg[..m * inner], &mut eu[..m * inner]);
            let pz = backend.pack(Layout::Mxfp4, rows, width, m, panel);
            multiply(backend, exec, expert.w1, 0, &pz, tile, eg);
            multiply(backend, exec, expert.w3, 0, &pz, tile, eu);
            if let Some(at) = eg.iter().zip(&*eu).position(|(g, u)| !(g.is_finite() && u.is_finite())) {
                infinite = infinite.or(Some((i, pairs[at / inner] as usize / k)));
            }
            situ(backend, exec, c, eg, eu);
            let pi = backend.pack(Layout::Mxfp4, eg, inner, m, panel);
            multiply(backend, exec, expert.w2, 0, &pi, tile, rows);
            for (row, &pair) in rows.chunks_exact(width).zip(pairs) {
                slots[pair as usize * width..][..width].copy_from_slice(row);
            }
        };
        self.weights.experts(layer, groups.distinct, each).map_err(ForwardError::Weights)?;
        if let Some(i) = wrong.or_else(|| arrived.iter().position(|&times| times != 1)) {
            return Err(ForwardError::Expert { layer, expert: groups.distinct[i] });
        }
        if let Some((i, position)) = infinite {
            let place = Place::Expert(layer, groups.distinct[i]);
            return Err(ForwardError::NonFinite { position: start + position, place });
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

/// A dimension that [`ModelConfig`] holds as a `usize`, from a [`TensorSpec`](crate::checkpoint::TensorSpec).
fn length(dim: u64) -> usize {
    usize::try_from(dim).unwrap_or(usize::MAX)
}

fn add(sum: &mut [f32], y: &[f32]) {
    for (s, y) in sum.iter_mut().zip(y) {
        *s += y;
    }
}

fn times(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a *= b;
    }
}

/// Stops the pass at the first value that is not finite.
fn finite<E>(rows: &[f32], width: usize, start: usize, place: Place) -> Result<(), ForwardError<E>> {
    match rows.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(ForwardError::NonFinite { position: start + i / width, place }),
    }
}
