//! Several sequences in a pass, and passes on trial: the bits of a sequence that is alone.

use crate::alloc::tiny::{CONFIG, Tiny};
use k3_core::backend::Backend;
use k3_core::carve::Line;
use k3_core::checkpoint::Tensor;
use k3_core::config::ModelConfig;
use k3_core::exec::Serial;
use k3_core::math::canonical_bits;
use k3_core::model::{Extent, ForwardError, Journal, Model, Sequence, State, Weights, Workspace};
use k3_core::view::{Expert, ExpertId, LayerIndex, MatrixRows, TokenId, ViewError};

const CONTEXT: usize = 24;
const EXTENT: Extent = Extent { chunk: 12, context: CONTEXT, width: 1 };

/// Ids of three sequences; no two begin alike, and the lengths straddle the convolution's history.
const TEXTS: [&[u32]; 3] = [&[3, 47, 0, 12, 12, 31, 8, 25, 3], &[9], &[44, 8, 17, 44, 5]];

struct Bench {
    config: ModelConfig,
    scratch: Vec<Line>,
}

impl Bench {
    fn new() -> Self {
        let config = ModelConfig::parse(CONFIG).expect("a config");
        let scratch = vec![Line::ZERO; Workspace::lines(&config, EXTENT).expect("a size")];
        Self { config, scratch }
    }

    fn memory(&self) -> Vec<Line> {
        vec![Line::ZERO; State::lines(&self.config, CONTEXT).expect("a size")]
    }

    /// Runs ids in chunks of `chunk` and gives the bits of all logits.
    fn forward(&mut self, state: &mut State<'_>, ids: &[TokenId], chunk: usize) -> Vec<u32> {
        let vocab = self.config.vocab_size;
        let mut workspace = Workspace::new(&mut self.scratch, &self.config, EXTENT).expect("a workspace");
        let model = Model { config: &self.config, backend: Backend::detect(), exec: &Serial };
        let mut weights = Tiny { config: &self.config, block: 3 };
        let mut all = Vec::new();
        for ids in ids.chunks(chunk) {
            let mut logits = vec![0.0; ids.len() * vocab];
            model.forward(&mut weights, state, &mut workspace, ids, &mut logits, &mut ()).expect("a pass");
            all.extend(bits(&logits));
        }
        all
    }
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> {
    values.iter().map(|&v| canonical_bits(v))
}

fn ids(text: &[u32]) -> Vec<TokenId> {
    text.iter().copied().map(TokenId).collect()
}

#[test]
fn sequences_in_one_pass_have_the_bits_of_each_alone() {
    let mut bench = Bench::new();
    let vocab = bench.config.vocab_size;
    let mut alone = Vec::new();
    for text in TEXTS {
        let mut memory = bench.memory();
        let mut state = State::new(&mut memory, &bench.config, CONTEXT).expect("a state");
        let logits = bench.forward(&mut state, &ids(text), 1);
        // And three more each, so that what is remembered is seen.
        let more = bench.forward(&mut state, &ids(&[1, 2, 30]), 1);
        alone.push((logits, more));
    }
    for backend in Backend::available() {
        // Who comes with how many ids, pass by pass.
        for passes in [
            vec![[(0, 9), (1, 1)].as_slice(), &[(2, 5)]],
            vec![&[(0, 5), (1, 1), (2, 5)], &[(0, 4)]],
            vec![&[(0, 1), (2, 3)], &[(0, 2), (2, 2)], &[(0, 6), (1, 1)]],
            vec![&[(2, 5), (0, 7)], &[(1, 1), (0, 2)]],
        ] {
            let mut memories = TEXTS.map(|_| bench.memory());
            let mut states = memories.each_mut().map(|m| State::new(m, &bench.config, CONTEXT).expect("a state"));
            let mut seen = TEXTS.map(|_| Vec::new());
            for pass in passes {
                let mut all = Vec::new();
                for &(who, n) in pass {
                    all.extend(ids(&TEXTS[who][states[who].position()..][..n]));
                }
                let mut logits = vec![0.0; all.len() * vocab];
                let mut workspace = Workspace::new(&mut bench.scratch, &bench.config, EXTENT).expect("a workspace");
                let mut weights = Tiny { config: &bench.config, block: 3 };
                let model = Model { config: &bench.config, backend, exec: &Serial };
                let mut free: Vec<_> = states.iter_mut().map(Some).collect();
                let mut sequences: Vec<_> = pass
                    .iter()
                    .map(|&(who, n)| {
                        let state = free[who].take().expect("each once");
                        Sequence { state, journal: None, positions: n, wanted: n }
                    })
                    .collect();
                model
                    .forward_many(&mut weights, &mut sequences, &mut workspace, &all, &mut logits, &mut ())
                    .expect("a pass");
                let mut rows = logits.chunks_exact(vocab);
                for &(who, n) in pass {
                    rows.by_ref().take(n).for_each(|row| seen[who].extend(bits(row)));
                }
            }
            for ((seen, state), (logits, more)) in seen.iter().zip(&mut states).zip(&alone) {
                assert!(seen == logits, "{}", backend.name());
                assert!(&bench.forward(state, &ids(&[1, 2, 30]), 2) == more, "{}", backend.name());
            }
        }
    }
}

#[test]
fn only_the_rows_that_are_wanted_come_out() {
    let mut bench = Bench::new();
    let vocab = bench.config.vocab_size;
    let mut memories = [bench.memory(), bench.memory(), bench.memory()];
    let mut states = memories.each_mut().map(|m| State::new(m, &bench.config, CONTEXT).expect("a state"));
    let mut expected = Vec::new();
    for (text, wanted) in [(TEXTS[0], 2), (TEXTS[1], 0), (TEXTS[2], 1)] {
        let mut memory = bench.memory();
        let mut state = State::new(&mut memory, &bench.config, CONTEXT).expect("a state");
        let logits = bench.forward(&mut state, &ids(&text[..text.len().min(5)]), 12);
        expected.extend_from_slice(&logits[logits.len() - wanted * vocab..]);
    }
    let mut workspace = Workspace::new(&mut bench.scratch, &bench.config, EXTENT).expect("a workspace");
    let mut weights = Tiny { config: &bench.config, block: 3 };
    let model = Model { config: &bench.config, backend: Backend::detect(), exec: &Serial };
    let all = ids(&[&TEXTS[0][..5], TEXTS[1], TEXTS[2]].concat());
    let mut logits = vec![0.0; 3 * vocab];
    let mut run = |ids: &[TokenId], logits: &mut [f32], shares: [(usize, usize); 3]| {
        let mut shares = shares.into_iter();
        let mut sequences = states.each_mut().map(|state| {
            let (positions, wanted) = shares.next().expect("three");
            Sequence { state, journal: None, positions, wanted }
        });
        model.forward_many(&mut weights, &mut sequences, &mut workspace, ids, logits, &mut ())
    };
    // Refusals change nothing.
    assert!(matches!(run(&all, &mut logits, [(5, 2), (1, 0), (5, 0)]), Err(ForwardError::LogitsLength { .. })));
    assert!(matches!(run(&all, &mut logits, [(5, 1), (1, 2), (5, 0)]), Err(ForwardError::LogitsLength { .. })));
    assert!(matches!(run(&all, &mut logits, [(5, 2), (0, 0), (6, 1)]), Err(ForwardError::EmptyChunk)));
    let lengths = ForwardError::SequenceLengths { given: 11, positions: 12 };
    assert!(run(&all, &mut logits, [(6, 2), (1, 0), (5, 1)]).is_err_and(|e| e == lengths));
    run(&all, &mut logits, [(5, 2), (1, 0), (5, 1)]).expect("a pass");
    assert!(bits(&logits).eq(expected));
}

#[test]
fn a_trial_moves_nothing_and_a_commit_moves_what_a_pass_would() {
    let mut bench = Bench::new();
    let vocab = bench.config.vocab_size;
    let text = ids(TEXTS[0]);
    let after = ids(&[5, 5, 20]);
    let mut notes = vec![Line::ZERO; Journal::lines(&bench.config, 6).expect("a size")];
    for before in [0, 1, 2, 4] {
        for tried in 1..=5 {
            for accepted in 0..=tried {
                let case = format!("{accepted} of {tried} after {before}");
                let (mut memory, mut other) = (bench.memory(), bench.memory());
                let mut state = State::new(&mut memory, &bench.config, CONTEXT).expect("a state");
                let mut plain = State::new(&mut other, &bench.config, CONTEXT).expect("a state");
                bench.forward(&mut state, &text[..before], 3);
                bench.forward(&mut plain, &text[..before], 3);
                // What is not accepted are other ids than the text's.
                let mut guess = text[before..before + tried].to_vec();
                guess[accepted..].fill(TokenId(40));

                let mut journal = Journal::new(&mut notes, &bench.config, 6).expect("a journal");
                let mut workspace = Workspace::new(&mut bench.scratch, &bench.config, EXTENT).expect("a workspace");
                let model = Model { config: &bench.config, backend: Backend::detect(), exec: &Serial };
                let mut weights = Tiny { config: &bench.config, block: 3 };
                let mut logits = vec![0.0; tried * vocab];
                // Twice: the first trial left nothing behind.
                for _ in 0..2 {
                    model
                        .verify(&mut weights, &mut state, &mut journal, &mut workspace, &guess, &mut logits, &mut ())
                        .expect("a pass");
                    assert_eq!((state.position(), state.is_torn()), (before, false), "{case}");
                }
                assert!(!model.commit(&mut state, &mut journal, &mut workspace, tried + 1), "{case}");
                assert!(model.commit(&mut state, &mut journal, &mut workspace, accepted), "{case}");
                assert!(!model.commit(&mut state, &mut journal, &mut workspace, 0), "a journal is used once");
                assert_eq!(state.position(), before + accepted, "{case}");

                let expected = bench.forward(&mut plain, &text[before..before + accepted], 1);
                assert!(bits(&logits[..accepted * vocab]).eq(expected), "{case}");
                assert!(bench.forward(&mut state, &after, 2) == bench.forward(&mut plain, &after, 1), "{case}");
            }
        }
    }
}

/// Weights that end after some matrices.
struct Breaks<'c> {
    tiny: Tiny<'c>,
    after: usize,
}

impl Weights for Breaks<'_> {
    type Error = ViewError;

    fn begin(&mut self, head: bool) -> Result<(), ViewError> {
        self.tiny.begin(head)
    }

    fn embed(&mut self, ids: &[TokenId], each: &mut dyn FnMut(usize, &[u8])) -> Result<(), ViewError> {
        self.tiny.embed(ids, each)
    }

    fn vector(&mut self, tensor: Tensor, each: &mut dyn FnMut(&[u8])) -> Result<(), ViewError> {
        self.tiny.vector(tensor, each)
    }

    fn matrix(&mut self, tensor: Tensor, each: &mut dyn FnMut(usize, MatrixRows<'_>)) -> Result<(), ViewError> {
        match self.after.checked_sub(1) {
            Some(left) => self.after = left,
            // Without rows the pass counts itself incomplete.
            None => return Ok(()),
        }
        self.tiny.matrix(tensor, each)
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
        self.tiny.experts(layer, ids, each)
    }
}

#[test]
fn a_trial_that_breaks_off_tears_nothing() {
    let mut bench = Bench::new();
    let mut memory = bench.memory();
    let mut state = State::new(&mut memory, &bench.config, CONTEXT).expect("a state");
    bench.forward(&mut state, &ids(&[3, 47]), 2);
    let mut notes = vec![Line::ZERO; Journal::lines(&bench.config, 3).expect("a size")];
    let mut journal = Journal::new(&mut notes, &bench.config, 3).expect("a journal");
    let mut workspace = Workspace::new(&mut bench.scratch, &bench.config, EXTENT).expect("a workspace");
    let model = Model { config: &bench.config, backend: Backend::detect(), exec: &Serial };
    let mut logits = vec![0.0; bench.config.vocab_size];
    let guess = ids(&[0, 12, 12]);
    // The weights end in the middle of each layer in turn.
    for matrices in 0..20 {
        let mut weights = Breaks { tiny: Tiny { config: &bench.config, block: 3 }, after: matrices };
        model
            .verify(&mut weights, &mut state, &mut journal, &mut workspace, &guess, &mut logits, &mut ())
            .expect_err("no more weights");
        assert_eq!((state.position(), state.is_torn()), (2, false));
        assert!(!model.commit(&mut state, &mut journal, &mut workspace, 1), "nothing was tried to the end");
    }
    let too_many = ids(&[1; 4]);
    let mut weights = Tiny { config: &bench.config, block: 3 };
    let refused = model.verify(&mut weights, &mut state, &mut journal, &mut workspace, &too_many, &mut logits, &mut ());
    assert!(refused.is_err_and(|e| matches!(e, ForwardError::ChunkTooLong { given: 4, chunk: 3 })));
    let mut other = bench.memory();
    let mut plain = State::new(&mut other, &bench.config, CONTEXT).expect("a state");
    bench.forward(&mut plain, &ids(&[3, 47]), 2);
    assert!(bench.forward(&mut state, &guess, 3) == bench.forward(&mut plain, &guess, 3));
}
