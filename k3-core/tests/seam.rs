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
use k3_core::model::{Extent, ForwardError, Journal, Model, State, Weights, Workspace};
use k3_core::view::{Bf16Matrix, Expert, ExpertId, LayerIndex, MatrixRows, TokenId, ViewError};
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
    /// `A_log` of layer 0 with this many bytes, those past the heads' being zero.
    ALog(usize),
    /// Rows of the embedding: index and length of each.
    Rows(&'static [(usize, isize)]),
    /// A matrix in blocks: first row as it is said, and the rows that are lent, in quarters.
    Blocks(Tensor, &'static [(usize, [usize; 2])]),
    /// The routed experts of a layer by their index in what was asked for; one past the end is its number.
    Experts(LayerIndex, &'static [usize]),
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
        let Fault::Rows(rows) = self.fault else { return self.tiny.embed(ids, each) };
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
            Fault::ALog(len) if tensor == Tensor::Layer(LayerIndex(0), LayerTensor::ALog) => {
                let mut bytes = bytes.to_vec();
                bytes.resize(len, 0);
                each(&bytes);
            }
            _ => each(bytes),
        })
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), ViewError> {
        let Fault::Blocks(wrong, blocks) = self.fault else { return self.tiny.matrix(tensor, each) };
        if tensor != wrong {
            return self.tiny.matrix(tensor, each);
        }
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
        let Fault::Experts(wrong, order) = self.fault else { return self.tiny.experts(layer, ids, each) };
        if layer != wrong {
            return self.tiny.experts(layer, ids, each);
        }
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
        let fault = Fault::ALog(len);
        // Two heads of ten, four bytes each.
        if len == 8 || len == 40 {
            let (result, torn, _, logits) = pass(fault, &Serial, 1);
            assert_eq!((result, torn), (Ok(()), false), "{len}");
            assert!(logits == expected, "{len}");
        } else {
            refused(fault, tensor);
        }
    }
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
