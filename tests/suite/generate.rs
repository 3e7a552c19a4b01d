//! The loop from a prompt to a text.

use crate::run::{How, engine, open, run};
use k3_core::model::Observer;
use k3_core::view::TokenId;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::generate::{Finish, Generator, Greedy, Listener, Outcome, Wanted};
use k3_platform::io::Mode;
use k3_tests::checkpoints;
use std::ops::ControlFlow;

/// Listens until it has heard enough.
pub(crate) struct Heard {
    pub(crate) ids: Vec<TokenId>,
    pub(crate) enough: usize,
}

impl Observer for Heard {}

impl Listener for Heard {
    type Error = Error;

    fn token(&mut self, id: TokenId) -> Result<ControlFlow<Finish>, Error> {
        self.ids.push(id);
        Ok(if self.ids.len() == self.enough { ControlFlow::Break(Finish::Length) } else { ControlFlow::Continue(()) })
    }
}

/// What `max` more tokens are asked with.
pub(crate) fn wanted(max_tokens: usize, context: usize, stops: &dyn Fn(TokenId) -> bool) -> Wanted<'_> {
    Wanted { max_tokens, context, stops, prompt_logits: false, incremental: true }
}

fn go(engine: &mut Engine, ids: &mut Vec<TokenId>, wanted: &Wanted<'_>) -> Outcome {
    let mut heard = Heard { ids: Vec::new(), enough: 0 };
    let before = ids.len();
    let outcome = Generator::new(engine).generate(engine, ids, wanted, &mut Greedy, &mut heard).expect("a text");
    assert_eq!((&ids[before..], outcome.generated), (&heard.ids[..], heard.ids.len()));
    outcome
}

#[test]
fn a_text_goes_on_where_it_ended_whatever_ended_it() {
    let dir = &checkpoints()[0];
    let how = How { chunk: Some(3), ..How::default() };
    let prompt: Vec<_> = [5, 90, 17, 5].map(TokenId).to_vec();
    let expected = run(dir, &how, &prompt, 8).expect("a run").generated;
    let never = |_| false;
    let mut engine = engine(open(dir, Mode::Direct).expect("open"), &how, 4, 12).expect("an engine");

    // By length, then by an id that ends texts, then by the context, then by the listener.
    let mut ids = prompt.clone();
    let outcome = go(&mut engine, &mut ids, &wanted(2, 12, &never));
    assert_eq!((outcome.finish, outcome.prompt, outcome.decoded), (Finish::Length, 4, 1));
    assert_eq!((ids.len(), engine.position()), (6, 5));
    // The first place from here on where an id comes that has not come before.
    let at = (3..8).find(|&i| !expected[2..i].contains(&expected[i])).expect("a new id");
    let outcome = go(&mut engine, &mut ids, &wanted(9, 12, &|id| id == expected[at]));
    assert_eq!((outcome.finish, outcome.stop), (Finish::Stop, Some(expected[at])));
    assert_eq!((ids.len(), engine.position(), outcome.prompt), (4 + at, 4 + at, 1));
    ids.extend(outcome.stop);
    let outcome = go(&mut engine, &mut ids, &wanted(100, 11, &never));
    assert_eq!((outcome.finish, ids.len()), (Finish::Context, 12));
    assert_eq!(ids[4..], expected[..ids.len() - 4]);

    // Nothing to read is nothing to go on from.
    let mut heard = Heard { ids: Vec::new(), enough: 1 };
    let mut generator = Generator::new(&engine);
    let mut read = ids[..engine.position()].to_vec();
    let nothing = generator.generate(&mut engine, &mut read, &wanted(1, 12, &never), &mut Greedy, &mut heard);
    assert!(matches!(nothing, Err(Error::Order)));
    engine.reset().expect("reset");
    let mut ids = prompt;
    let outcome = generator.generate(&mut engine, &mut ids, &wanted(9, 12, &never), &mut Greedy, &mut heard);
    assert_eq!((outcome.expect("a text").generated, ids[4]), (1, expected[0]));
}
