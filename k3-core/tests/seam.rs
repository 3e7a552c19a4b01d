//! What the core does with a host that breaks the rules of `Weights`, or asks for odd sizes.
//!
//! Each rule is broken for one tensor at a time, for every tensor that a pass asks for: the pass must
//! be refused by that tensor's name. What is let through would be other logits, and nobody would know.

#[path = "tiny/mod.rs"]
mod tiny;

use k3_core::backend::{Backend, Layout, Panel};
use k3_core::carve::Line;
use k3_core::checkpoint::{GlobalTensor, LayerTensor, Tensor, head_tensors, layer_tensors};
use k3_core::coded::{CodedMatrix, coded_len, encode};
use k3_core::config::ModelConfig;
use k3_core::exec::{Executor, Serial, Split};
use k3_core::model::{Extent, ForwardError, Journal, Model, Place, Sequence, State, Weights, Workspace};
use k3_core::view::{Bf16Matrix, Expert, ExpertId, LayerIndex, MatrixRows, Mxfp4Matrix, TokenId, ViewError};
use std::collections::BTreeSet;
use tiny::{CONFIG, Tiny};

const IDS: [TokenId; 3] = [TokenId(3), TokenId(47), TokenId(3)];

/// How a vector or a row is lent: as pieces, each `bytes` longer or shorter than it should be.
type Lengths = &'static [isize];

/// What the host does wrong.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    /// A vector in these pieces.
    Vector(Tensor, Lengths),
    /// `A_log` of layer 0 with this many bytes, those past the heads' being this one.
    ALog(usize, u8),
    /// Rows of the embedding: index and length of each.
    Rows(&'static [(usize, isize)]),
    /// A matrix in blocks: first row as it is said, and the rows that are lent, in quarters.
    Blocks(Tensor, &'static [(usize, [usize; 2])]),
    /// A matrix as what is made of it.
    Remade(Tensor, Remade),
    /// The embedding's row of this index as NaN.
    NanRow(usize),
    /// One matrix of each routed expert of a layer (`w1`, `w2`, `w3`) without its last row.
    Short(LayerIndex, usize),
    /// One matrix of each routed expert of a layer with scales beyond all bounds, the last expert first or last.
    Infinite(LayerIndex, usize, bool),
    /// The routed experts of a layer by their index in what was asked for; one past the end is its number.
    Experts(LayerIndex, &'static [usize]),
}

/// What a matrix is lent as.
#[derive(Debug, Clone, Copy)]
enum Remade {
    /// As many rows, one column less.
    Narrow,
    /// Row by row.
    SingleRows,
    Coded,
}

struct Host<'c> {
    tiny: Tiny<'c>,
    fault: Fault,
    /// Experts that the last list had, which must be more than one for an order to be wrong.
    picked: usize,
}

/// `bytes` with some more of them, or fewer, at the end.
fn resized(bytes: &[u8], by: isize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().saturating_add_signed(by), 0);
    bytes
}

impl Weights for Host<'_> {
    type Error = ViewError;

    fn begin(&mut self, head: bool) -> Result<(), ViewError> {
        self.tiny.begin(head)
    }

    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), ViewError> {
        let rows = match self.fault {
            Fault::Rows(rows) => rows,
            Fault::NanRow(wrong) => {
                return self.tiny.embed(ids, &mut |i, row| match i == wrong {
                    true => each(i, &[0xc0, 0x7f].repeat(row.len() / 2)),
                    false => each(i, row),
                });
            }
            _ => return self.tiny.embed(ids, each),
        };
        let mut all = Vec::new();
        self.tiny.embed(ids, &mut |_, row| all.push(row.to_vec()))?;
        for &(i, by) in rows {
            each(i, &resized(&all[i % all.len()], by));
        }
        Ok(())
    }

    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), ViewError> {
        let fault = self.fault;
        self.tiny.vector(tensor, &mut |bytes| match fault {
            Fault::Vector(wrong, lengths) if tensor == wrong => {
                lengths.iter().for_each(|&by| each(&resized(bytes, by)));
            }
            Fault::ALog(len, tail) if tensor == Tensor::Layer(LayerIndex(0), LayerTensor::ALog) => {
                let mut bytes = bytes.to_vec();
                bytes.resize(len, tail);
                each(&bytes);
            }
            _ => each(bytes),
        })
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), ViewError> {
        let (blocks, remade) = match self.fault {
            Fault::Blocks(wrong, blocks) if tensor == wrong => (blocks, None),
            Fault::Remade(wrong, remade) if tensor == wrong => (&[][..], Some(remade)),
            _ => return self.tiny.matrix(tensor, each),
        };
        let granule = tensor.row_granule(self.tiny.config);
        let (mut all, mut cols) = (Vec::new(), 0);
        self.tiny.matrix(tensor, &mut |_, rows| {
            let MatrixRows::Raw(rows) = rows else { panic!("tiny has no coded matrix") };
            all.extend_from_slice(rows.bytes());
            cols = rows.cols();
        })?;
        let rows = all.len() / 2 / cols;
        let whole = Bf16Matrix::new(&all, rows, cols)?;
        // Quarters of a matrix, or of as many granules as there are.
        let quarter = |q: usize| rows / granule * q / 4 * granule;
        match remade {
            Some(Remade::Narrow) => {
                each(0, Bf16Matrix::new(&all[..rows * (cols - 1) * 2], rows, cols - 1)?.into());
            }
            Some(Remade::SingleRows) => (0..rows).for_each(|r| each(r, whole.slice(r..r + 1).into())),
            Some(Remade::Coded) => {
                let mut block = vec![0; coded_len(rows, cols, rows * cols).unwrap()];
                let len = encode(&all, rows, cols, &mut block).unwrap();
                each(0, CodedMatrix::new(&block[..len], rows, cols).unwrap().into());
            }
            None => {}
        }
        for &(first, [from, to]) in blocks {
            each(quarter(first), whole.slice(quarter(from)..quarter(to)).into());
        }
        Ok(())
    }

    fn request_experts(&mut self, layer: LayerIndex, ids: &[ExpertId]) -> Result<(), ViewError> {
        self.tiny.request_experts(layer, ids)
    }

    fn experts(
        &mut self,
        layer: LayerIndex,
        ids: &[ExpertId],
        each: &mut dyn FnMut(usize, Expert<'_>),
    ) -> Result<(), ViewError> {
        let order = match self.fault {
            Fault::Experts(wrong, order) if layer == wrong => order,
            Fault::Short(wrong, which) if layer == wrong => {
                return self.tiny.experts(layer, ids, &mut |i, mut expert| {
                    let matrix = [&mut expert.w1, &mut expert.w2, &mut expert.w3].into_iter().nth(which).unwrap();
                    *matrix = matrix.slice(0..matrix.rows() - 1);
                    each(i, expert);
                });
            }
            Fault::Infinite(wrong, which, last_first) if layer == wrong => {
                self.picked = ids.len();
                for i in 0..ids.len() {
                    let wanted = if last_first { ids.len() - 1 - i } else { i };
                    self.tiny.experts(layer, ids, &mut |i, mut expert| {
                        if i == wanted {
                            let matrix = [&mut expert.w1, &mut expert.w2, &mut expert.w3].into_iter().nth(which);
                            let matrix = matrix.unwrap();
                            let scales = vec![254; matrix.scales().len()];
                            let remade = Mxfp4Matrix::new(matrix.packed(), &scales, matrix.rows(), matrix.cols());
                            let remade = remade.unwrap();
                            let [mut w1, mut w2, mut w3] = [expert.w1, expert.w2, expert.w3];
                            *[&mut w1, &mut w2, &mut w3].into_iter().nth(which).unwrap() = remade;
                            each(i, Expert { w1, w2, w3 });
                        }
                    })?;
                }
                return Ok(());
            }
            _ => return self.tiny.experts(layer, ids, each),
        };
        self.picked = ids.len();
        for &i in order {
            self.tiny.experts(layer, ids, &mut |j, expert| {
                if i % ids.len() == j {
                    each(i, expert);
                }
            })?;
        }
        Ok(())
    }
}

/// A pass over [`IDS`]: its result, whether the state is torn, experts of the last list, the logits' bits.
type Passed = (Result<(), ForwardError<ViewError>>, bool, usize, Vec<u32>);

fn pass(fault: Fault, exec: &impl Executor, width: usize) -> Passed {
    pass_on(Backend::detect(), fault, exec, width)
}

fn pass_on(backend: Backend, fault: Fault, exec: &impl Executor, width: usize) -> Passed {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let extent = Extent { chunk: IDS.len(), context: 8, width };
    let mut memory = vec![Line::ZERO; State::lines(&config, 8).unwrap()];
    let mut state = State::new(&mut memory, &config, 8).unwrap();
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let mut workspace = Workspace::new(&mut scratch, &config, extent).unwrap();
    let model = Model { config: &config, backend, exec };
    let mut host = Host { tiny: Tiny { config: &config, block: usize::MAX }, fault, picked: 0 };
    let mut logits = vec![0.0; config.vocab_size];
    let result = model.forward(&mut host, &mut state, &mut workspace, &IDS, &mut logits, &mut ());
    (result, state.is_torn(), host.picked, logits.into_iter().map(f32::to_bits).collect())
}

fn refused(fault: Fault, tensor: Tensor) {
    let (result, torn, ..) = pass(fault, &Serial, 1);
    assert_eq!(result, Err(ForwardError::Incomplete { tensor }), "{tensor}, {fault:?}");
    assert!(torn, "{tensor}, {fault:?}");
    assert!(result.unwrap_err().to_string().contains(&tensor.to_string()));
}

/// Every tensor that a pass asks for besides the embedding and experts: vectors, then matrices.
fn asked() -> (Vec<Tensor>, Vec<Tensor>) {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let layers = config.layers().flat_map(|l| layer_tensors(&config, l).map(move |t| Tensor::Layer(l, t)));
    layers.chain(head_tensors().map(Tensor::Global)).partition(|tensor| match *tensor {
        Tensor::Layer(_, t) => t.is_vector(),
        Tensor::Global(t) => t.is_vector(),
        Tensor::Expert(..) => unreachable!(),
    })
}

/// A second call multiplied into the fold of a residual mix once more, and the logits were others.
#[test]
fn a_vector_comes_whole_and_once() {
    let (vectors, _) = asked();
    assert_eq!(vectors.len(), 5 * 6 + 3 * 6 + 2 * 2 + 4 * 2 + 3, "every vector of the five layers and the head");
    for tensor in vectors {
        let wrong: [Lengths; 9] = [&[], &[0, 0], &[-1], &[1], &[-2], &[2], &[-4], &[0, -4], &[-4, 0]];
        for lengths in wrong {
            refused(Fault::Vector(tensor, lengths), tensor);
        }
    }
}

/// One that was too short for the heads passed for one whose heads end in zeros.
#[test]
fn a_log_has_one_of_two_lengths() {
    let tensor = Tensor::Layer(LayerIndex(0), LayerTensor::ALog);
    let (_, _, _, expected) = pass(Fault::None, &Serial, 1);
    for len in 0..=44 {
        let fault = Fault::ALog(len, 0);
        // Two heads of ten, four bytes each.
        if len == 8 || len == 40 {
            let (result, torn, _, logits) = pass(fault, &Serial, 1);
            assert_eq!((result, torn), (Ok(()), false), "{len}");
            assert!(logits == expected, "{len}");
        } else {
            refused(fault, tensor);
        }
    }
    let (result, torn, ..) = pass(Fault::ALog(40, 1), &Serial, 1);
    assert_eq!((result, torn), (Err(ForwardError::ALogTail { layer: LayerIndex(0) }), true));
}

/// Rows were only counted: one that came twice stood in for one that did not come.
#[test]
fn each_row_of_the_embedding_comes_once() {
    let tensor = Tensor::Global(GlobalTensor::Embed);
    let wrong: [&[(usize, isize)]; 9] = [
        &[],
        &[(0, 0), (1, 0)],
        &[(0, 0), (0, 0), (1, 0)],
        &[(2, 0), (1, 0), (1, 0)],
        &[(0, 0), (1, 0), (2, 0), (2, 0)],
        &[(0, 0), (1, 0), (2, 0), (3, 0)],
        &[(0, 0), (1, 0), (5, 0)],
        &[(0, 0), (1, -1), (2, 0)],
        &[(0, 0), (1, 2), (1, 0), (2, 0)],
    ];
    for rows in wrong {
        refused(Fault::Rows(rows), tensor);
    }
    let (_, _, _, expected) = pass(Fault::None, &Serial, 1);
    let (result, _, _, logits) = pass(Fault::Rows(&[(2, 0), (0, 0), (1, 0)]), &Serial, 1);
    assert_eq!(result, Ok(()), "any order will do");
    assert!(logits == expected);
}

#[test]
fn the_rows_of_a_matrix_come_once_and_in_order() {
    let (_, matrices) = asked();
    let (_, _, _, expected) = pass(Fault::None, &Serial, 1);
    for tensor in matrices {
        let wrong: [&[(usize, [usize; 2])]; 6] = [
            &[],
            &[(2, [2, 4]), (0, [0, 2])],
            &[(0, [0, 4]), (0, [0, 4])],
            &[(0, [0, 2])],
            &[(2, [2, 4])],
            &[(0, [0, 2]), (0, [2, 4])],
        ];
        for blocks in wrong {
            refused(Fault::Blocks(tensor, blocks), tensor);
        }
        // A block without rows is one.
        let fault = Fault::Blocks(tensor, &[(0, [0, 0]), (0, [0, 2]), (2, [2, 2]), (2, [2, 4]), (4, [4, 4])]);
        let (result, _, _, logits) = pass(fault, &Serial, 1);
        assert_eq!(result, Ok(()), "{tensor}");
        assert!(logits == expected, "{tensor}");
    }
}

/// Heads of `kv_b_proj` are used whole and raw, and what is used of a row is never more than its columns.
#[test]
fn a_matrix_comes_in_a_form_that_its_tensor_allows() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let (_, _, _, expected) = pass(Fault::None, &Serial, 1);
    let mut differ = (0, 0);
    for tensor in asked().1 {
        refused(Fault::Remade(tensor, Remade::Narrow), tensor);
        let granular = tensor.row_granule(&config) > 1;
        differ.0 += usize::from(granular);
        differ.1 += usize::from(!tensor.may_be_coded());
        for (remade, allowed) in [(Remade::SingleRows, !granular), (Remade::Coded, tensor.may_be_coded())] {
            let fault = Fault::Remade(tensor, remade);
            if allowed {
                let (result, _, _, logits) = pass(fault, &Serial, 1);
                assert_eq!(result, Ok(()), "{tensor}, {remade:?}");
                assert!(logits == expected, "{tensor}, {remade:?}");
            } else {
                refused(fault, tensor);
            }
        }
    }
    assert!(differ.0 > 0 && differ.1 > 0, "{differ:?}");
}

/// The product with `w2` was not looked at, so the next matrix was named; and which expert was named depended on the
/// order of arrival.
#[test]
fn a_fault_of_an_expert_is_told_by_its_name_in_every_order() {
    for layer in (1..5).map(LayerIndex) {
        for which in 0..3 {
            let (result, torn, ..) = pass(Fault::Short(layer, which), &Serial, 1);
            let Err(ForwardError::Expert { layer: l, expert: least }) = result else { panic!("{result:?}") };
            assert!(torn && l == layer, "layer {}, matrix {which}", layer.0);
            let found = [false, true].map(|last_first| {
                let (result, torn, picked, _) = pass(Fault::Infinite(layer, which, last_first), &Serial, 1);
                assert!(torn && picked > 1);
                match result {
                    Err(ForwardError::NonFinite { sequence: 0, position, place: Place::Expert(l, expert) }) => {
                        (position, l, expert)
                    }
                    _ => panic!("layer {}, matrix {which}: {result:?}", layer.0),
                }
            });
            assert_eq!(found[0], found[1], "layer {}, matrix {which}", layer.0);
            assert_eq!((found[0].1, found[0].2), (layer, least), "the first of the experts");
        }
        let (result, torn, ..) = pass(Fault::Experts(layer, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]), &Serial, 1);
        assert_eq!((result, torn), (Err(ForwardError::StrayExpert { layer }), true));
    }
}

#[test]
fn an_id_beyond_the_vocabulary_is_refused_and_a_torn_state_stays_torn() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let extent = Extent { chunk: IDS.len(), context: 8, width: 1 };
    let mut memory = vec![Line::ZERO; State::lines(&config, 8).unwrap()];
    let mut state = State::new(&mut memory, &config, 8).unwrap();
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let mut workspace = Workspace::new(&mut scratch, &config, extent).unwrap();
    let mut notes = vec![Line::ZERO; Journal::lines(&config, 3).unwrap()];
    let mut journal = Journal::new(&mut notes, &config, 3).unwrap();
    let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
    let mut host = Host { tiny: Tiny { config: &config, block: usize::MAX }, fault: Fault::None, picked: 0 };

    let id = TokenId(u32::try_from(config.vocab_size).unwrap());
    let wrong = [IDS[0], id, IDS[2]];
    let result = model.forward(&mut host, &mut state, &mut workspace, &wrong, &mut [], &mut ());
    assert_eq!(result, Err(ForwardError::TokenOutOfRange { index: 1, id }));
    assert!(!state.is_torn() && state.position() == 0);

    model.verify(&mut host, &mut state, &mut journal, &mut workspace, &IDS, &mut [], &mut ()).unwrap();
    host.fault = Fault::NanRow(1);
    let result = model.forward(&mut host, &mut state, &mut workspace, &IDS, &mut [], &mut ());
    assert_eq!(result, Err(ForwardError::NonFinite { sequence: 0, position: 1, place: Place::Embedding }));
    host.fault = Fault::None;
    let result = model.forward(&mut host, &mut state, &mut workspace, &IDS, &mut [], &mut ());
    assert_eq!(result, Err(ForwardError::TornState));
    assert!(!model.commit(&mut state, &mut journal, &mut workspace, 1), "a torn state");
    let (x, mut y) = (vec![0.5; 2 * config.hidden_size], vec![0.0; 2 * config.hidden_size]);
    let result = model.attention(&mut host, &mut state, &mut workspace, LayerIndex(0), &x, &mut y);
    assert_eq!(result, Err(ForwardError::TornState));
    state.reset();

    // A layer on its own.
    let (layers, hidden) = (config.num_hidden_layers, config.hidden_size);
    let beyond = LayerIndex(u16::try_from(layers).unwrap());
    let refusals = [
        (beyond, 2 * hidden, 2 * hidden, ForwardError::NoSuchLayer { layer: beyond, layers }),
        (LayerIndex(1), 0, 0, ForwardError::EmptyChunk),
        (LayerIndex(1), hidden / 2, hidden / 2, ForwardError::VectorLength { x: hidden / 2, y: hidden / 2, hidden }),
        (LayerIndex(1), 2 * hidden, hidden, ForwardError::VectorLength { x: 2 * hidden, y: hidden, hidden }),
    ];
    for (layer, of_x, of_y, expected) in refusals {
        let (x, y) = (&x[..of_x], &mut y[..of_y]);
        assert_eq!(model.attention(&mut host, &mut state, &mut workspace, layer, x, y), Err(expected));
        assert_eq!(model.mlp(&mut host, &mut workspace, layer, x, y, &mut ()), Err(expected));
    }
    assert!(state.position() == 0 && !state.is_torn());
}

/// Only the position was compared: a journal of an earlier trial, or of a sequence that had been reset, moved the
/// state on by steps of one text beside the latents of another.
#[test]
fn a_journal_is_of_the_last_pass() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let extent = Extent { chunk: IDS.len(), context: 8, width: 1 };
    let mut memory = vec![Line::ZERO; State::lines(&config, 8).unwrap()];
    let mut state = State::new(&mut memory, &config, 8).unwrap();
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let mut workspace = Workspace::new(&mut scratch, &config, extent).unwrap();
    let lines = || vec![Line::ZERO; Journal::lines(&config, 3).unwrap()];
    let (mut first, mut second) = (lines(), lines());
    let mut first = Journal::new(&mut first, &config, 3).unwrap();
    let mut second = Journal::new(&mut second, &config, 3).unwrap();
    let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
    let mut tiny = Tiny { config: &config, block: usize::MAX };
    let mut verify = |state: &mut State<'_>, journal: &mut Journal<'_>, workspace: &mut Workspace<'_>| {
        model.verify(&mut tiny, state, journal, workspace, &IDS, &mut [], &mut ()).unwrap();
    };

    verify(&mut state, &mut first, &mut workspace);
    verify(&mut state, &mut second, &mut workspace);
    assert!(!model.commit(&mut state, &mut first, &mut workspace, 3), "a trial later");
    assert!(model.commit(&mut state, &mut second, &mut workspace, 0), "nothing of it is right");
    verify(&mut state, &mut first, &mut workspace);
    state.reset();
    assert!(!model.commit(&mut state, &mut first, &mut workspace, 3), "another sequence");
    verify(&mut state, &mut first, &mut workspace);
    assert!(model.commit(&mut state, &mut first, &mut workspace, 2) && state.position() == 2);
    assert!(!model.commit(&mut state, &mut first, &mut workspace, 0), "it is used once");
}

/// A sequence on trial and one that is not, in one pass, get what each gets alone; and of two the one is named in
/// which a value is not finite.
#[test]
fn a_trial_beside_another_sequence() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let vocab = config.vocab_size;
    let extent = Extent { chunk: 2 * IDS.len(), context: 8, width: 1 };
    let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
    let mut host = Host { tiny: Tiny { config: &config, block: usize::MAX }, fault: Fault::None, picked: 0 };
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let mut workspace = Workspace::new(&mut scratch, &config, extent).unwrap();
    let lines = || vec![Line::ZERO; State::lines(&config, 8).unwrap()];
    let mut memory = [lines(), lines()];
    let mut states = memory.each_mut().map(|memory| State::new(memory, &config, 8).unwrap());
    let mut notes = vec![Line::ZERO; Journal::lines(&config, 3).unwrap()];
    let mut journal = Journal::new(&mut notes, &config, 3).unwrap();
    let bits = |logits: &[f32]| logits.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
    let [a, b] = [IDS, [TokenId(9), TokenId(3), TokenId(30)]];

    // Alone: of the first only two ids are right.
    let mut alone = vec![0.0; 7 * vocab];
    let (of_a, rest) = alone.split_at_mut(3 * vocab);
    let (of_b, next) = rest.split_at_mut(3 * vocab);
    for (state, ids, logits) in [(0, a, of_a), (1, b, of_b)] {
        model.forward(&mut host, &mut states[state], &mut workspace, &ids, logits, &mut ()).unwrap();
        states[state].reset();
    }
    model.forward(&mut host, &mut states[0], &mut workspace, &a[..2], &mut [], &mut ()).unwrap();
    model.forward(&mut host, &mut states[0], &mut workspace, &b[..1], next, &mut ()).unwrap();
    states[0].reset();

    let mut together = vec![0.0; 7 * vocab];
    let (both, next) = together.split_at_mut(6 * vocab);
    let ids = [a, b].concat();
    let [first, second] = &mut states;
    let mut sequences = [
        Sequence { state: first, journal: Some(&mut journal), positions: 3, wanted: 3 },
        Sequence { state: second, journal: None, positions: 3, wanted: 3 },
    ];
    model.forward_many(&mut host, &mut sequences, &mut workspace, &ids, both, &mut ()).unwrap();
    assert_eq!(states.each_ref().map(State::position), [0, 3]);
    assert!(model.commit(&mut states[0], &mut journal, &mut workspace, 2));
    model.forward(&mut host, &mut states[0], &mut workspace, &b[..1], next, &mut ()).unwrap();
    assert_eq!(bits(&together), bits(&alone));

    host.fault = Fault::NanRow(4);
    let [first, second] = &mut states;
    let mut sequences = [
        Sequence { state: first, journal: Some(&mut journal), positions: 3, wanted: 0 },
        Sequence { state: second, journal: None, positions: 2, wanted: 0 },
    ];
    let result = model.forward_many(&mut host, &mut sequences, &mut workspace, &ids[..5], &mut [], &mut ());
    assert_eq!(result, Err(ForwardError::NonFinite { sequence: 1, position: 4, place: Place::Embedding }));
    assert_eq!(states.each_ref().map(State::is_torn), [false, true], "a trial tears nothing");
}

#[test]
fn each_expert_comes_once() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let mut picks = BTreeSet::new();
    for layer in config.layers().skip(1) {
        let wrong: [&[usize]; 4] = [&[], &[0], &[0, 0, 1, 2, 3, 4], &[1, 2, 3, 4]];
        for order in wrong {
            let (result, torn, picked, _) = pass(Fault::Experts(layer, order), &Serial, 1);
            let layer_is = |e| matches!(e, ForwardError::Expert { layer: l, .. } if l == layer);
            assert!(result.is_err_and(layer_is) && torn, "layer {}, {order:?}", layer.0);
            picks.insert(picked);
        }
    }
    assert!(picks.iter().all(|&picked| picked > 1), "{picks:?}");
}

/// Says a width of its own, and runs the parts in order.
struct Says(usize);

impl Executor for Says {
    fn width(&self) -> usize {
        self.0
    }

    fn run<S: Split>(&self, work: S, f: impl Fn(usize, S::Part) + Sync) {
        Serial.run(work, f);
    }
}

/// A workspace for no thread was given out, and the first attention over it divided by zero.
#[test]
fn a_width_is_at_least_one_and_need_not_be_the_executors() {
    let (_, _, _, expected) = pass(Fault::None, &Serial, 1);
    for extent in [0, 1, 2, 3, 64] {
        for width in [0, 1, 2, 7, 64] {
            let (result, torn, _, logits) = pass(Fault::None, &Says(width), extent);
            assert_eq!((result, torn), (Ok(()), false), "extent {extent}, executor {width}");
            assert!(logits == expected, "extent {extent}, executor {width}");
        }
    }
    let config = ModelConfig::parse(CONFIG).unwrap();
    let extent = |width| Extent { chunk: 1, context: 8, width };
    assert_eq!(Workspace::lines(&config, extent(0)), Workspace::lines(&config, extent(1)));
    let mut scratch = vec![Line::ZERO; Workspace::lines(&config, extent(0)).unwrap()];
    assert_eq!(Workspace::new(&mut scratch, &config, extent(0)).unwrap().extent(), extent(1));
}

/// Sizes that hold nothing are refused by the pass, and a commit over a smaller workspace indexed past its end.
#[test]
fn a_workspace_may_be_too_small_for_what_is_asked() {
    let config = ModelConfig::parse(CONFIG).unwrap();
    let model = Model { config: &config, backend: Backend::detect(), exec: &Serial };
    let mut weights = Tiny { config: &config, block: usize::MAX };
    let lines = |extent| vec![Line::ZERO; Workspace::lines(&config, extent).unwrap()];
    let [none, small, large] = [0, 1, 3].map(|chunk| Extent { chunk, context: 8, width: 1 });
    let nowhere = Extent { context: 0, ..large };
    let [mut a, mut b, mut c, mut d] = [none, small, large, nowhere].map(lines);
    let mut none = Workspace::new(&mut a, &config, none).unwrap();
    let mut small = Workspace::new(&mut b, &config, small).unwrap();
    let mut large = Workspace::new(&mut c, &config, large).unwrap();
    let mut nowhere = Workspace::new(&mut d, &config, nowhere).unwrap();
    let mut memory = vec![Line::ZERO; State::lines(&config, 8).unwrap()];
    let mut state = State::new(&mut memory, &config, 8).unwrap();
    let mut notes = vec![Line::ZERO; Journal::lines(&config, 3).unwrap()];
    let mut journal = Journal::new(&mut notes, &config, 3).unwrap();

    let mut refusal = |workspace: &mut Workspace<'_>| {
        model.forward(&mut weights, &mut state, workspace, &IDS, &mut [], &mut ()).unwrap_err()
    };
    assert_eq!(refusal(&mut none), ForwardError::ChunkTooLong { given: 3, chunk: 0 });
    assert_eq!(refusal(&mut nowhere), ForwardError::ContextFull { needed: 3, context: 0 });
    model.verify(&mut weights, &mut state, &mut journal, &mut large, &IDS, &mut [], &mut ()).unwrap();
    assert!(!model.commit(&mut state, &mut journal, &mut small, 2) && state.position() == 0);
    assert!(model.commit(&mut state, &mut journal, &mut small, 1) && state.position() == 1);
}

/// The crate's documentation names the figure. The largest part is the lanes that wait for the next columns.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "there are no threads")]
fn a_pass_takes_less_than_128_kib_of_stack() {
    let pass = |backend| {
        pass_on(backend, Fault::None, &Serial, 1).0.unwrap();
        // Tiny has no coded matrix.
        let (rows, cols) = (49, 1100);
        let raw: Vec<u8> = [0x80, 0x3f].repeat(rows * cols);
        let mut block = vec![0; coded_len(rows, cols, 0).unwrap()];
        let len = encode(&raw, rows, cols, &mut block).unwrap();
        let coded = CodedMatrix::new(&block[..len], rows, cols).unwrap();
        for positions in [1, 17] {
            let mut panel = vec![0.0; Panel::len(cols, positions).unwrap()];
            let panel = backend.pack(Layout::Bf16, &vec![1.0; positions * cols], cols, positions, &mut panel);
            let mut out = vec![0.0; rows * positions];
            backend.matmul_coded(coded, &panel, &mut out);
            assert!(out.iter().all(|&sum| (sum - 1100.0).abs() < 0.5), "{}", backend.name());
        }
    };
    for backend in Backend::available() {
        let small = std::thread::Builder::new().stack_size(128 << 10);
        small.spawn(move || pass(backend)).unwrap().join().unwrap();
    }
}
