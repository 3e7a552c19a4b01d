//! Sessions: what was written down and read back is what was never interrupted.

use crate::run::{How, engine, open};
use k3_core::math::canonical_bits;
use k3_core::view::TokenId;
use k3_platform::engine::Engine;
use k3_platform::error::Error;
use k3_platform::generate::{Finish, Generator, Greedy, Listener, Stage, Wanted};
use k3_platform::io::Mode;
use k3_platform::session::{Session, SessionError};
use k3_tests::checkpoints;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

const CONTEXT: usize = 40;

fn ids(n: u32, vocab: usize) -> Vec<TokenId> {
    (0..n).map(|i| TokenId((i * i * 7 + i) % u32::try_from(vocab).unwrap())).collect()
}

fn vocab(dir: &Path) -> usize {
    open(dir, Mode::Buffered).unwrap().config().vocab_size
}

fn started(dir: &Path, chunk: usize) -> Engine {
    engine(open(dir, Mode::Buffered).unwrap(), &How { chunk: Some(chunk), ..How::default() }, 16, CONTEXT).unwrap()
}

/// Bits of the logits after each of `ids` that the engine has not read.
fn read(engine: &mut Engine, ids: &[TokenId]) -> Vec<u32> {
    let vocab = engine.checkpoint().config().vocab_size;
    let chunk = engine.plan().extent.chunk;
    let mut all = Vec::new();
    for part in ids[engine.position()..].to_vec().chunks(chunk) {
        let mut logits = vec![0.0; part.len() * vocab];
        engine.step(part, &mut logits, &mut ()).unwrap();
        all.extend(logits.into_iter().map(canonical_bits));
    }
    all
}

fn file(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("talk.k3")
}

const MUCH: u64 = 1 << 30;

fn session(path: &Path, dir: &Path, checkpoints: u64) -> Result<Session, SessionError> {
    Session::open(path, &open(dir, Mode::Buffered).unwrap(), checkpoints)
}

/// Any split point, whatever the chunks before and after it: the logits after it are those of one run.
#[test]
fn a_split_anywhere_changes_no_bit() {
    for dir in checkpoints() {
        let vocab = vocab(&dir);
        let all = ids(16, vocab);
        let expected = read(&mut started(&dir, 5), &all);
        for (split, before, after) in [(1, 1, 5), (3, 5, 1), (4, 3, 5), (5, 5, 5), (8, 5, 3), (11, 2, 16), (15, 16, 1)]
        {
            let folder = tempfile::tempdir().unwrap();
            let path = file(&folder);
            {
                let mut engine = started(&dir, before);
                let mut s = session(&path, &dir, 0).unwrap();
                s.resume(&mut engine, &all[..split]).unwrap();
                read(&mut engine, &all[..split]);
                s.save(&mut engine, &all[..split]).unwrap();
            }
            // Another process, and another context: rows of the latent cache lie elsewhere.
            let how = How { chunk: Some(after), threads: 1, ..How::default() };
            let mut engine = engine(open(&dir, Mode::Direct).unwrap(), &how, 16, CONTEXT + 13).unwrap();
            let mut s = session(&path, &dir, 0).unwrap();
            assert_eq!(s.ids(), &all[..split]);
            assert_eq!(s.resumes_at(&all), split);
            s.resume(&mut engine, &all).unwrap();
            assert_eq!(engine.position(), split);
            assert!(read(&mut engine, &all) == expected[split * vocab..], "{} split at {split}", dir.display());
        }
    }
}

/// After a pass on trial whose guesses were wrong from some place on, what is kept is what a plain run keeps.
#[test]
fn guesses_leave_no_trace_in_a_session() {
    for dir in checkpoints() {
        let vocab = vocab(&dir);
        let all = ids(16, vocab);
        let expected = read(&mut started(&dir, 5), &all);
        for (guessed, right) in [(1, 0), (3, 0), (3, 1), (4, 3), (2, 2)] {
            let folder = tempfile::tempdir().unwrap();
            let path = file(&folder);
            let end = 7 + right;
            {
                let how = How { chunk: Some(5), speculate: 4, ..How::default() };
                let mut engine = engine(open(&dir, Mode::Buffered).unwrap(), &how, 16, CONTEXT).unwrap();
                let mut s = session(&path, &dir, MUCH).unwrap();
                s.resume(&mut engine, &all).unwrap();
                read(&mut engine, &all[..6]);
                let mut trial = all[6..7 + guessed].to_vec();
                for wrong in &mut trial[1 + right..] {
                    wrong.0 = (wrong.0 + 1) % u32::try_from(vocab).unwrap();
                }
                engine.verify(&trial, &mut vec![0.0; trial.len() * vocab], &mut ()).unwrap();
                engine.commit(1 + right).unwrap();
                assert_eq!(engine.position(), end);
                s.checkpoint(&mut engine, true).unwrap();
                s.save(&mut engine, &all[..end]).unwrap();
            }
            let mut engine = started(&dir, 3);
            session(&path, &dir, MUCH).unwrap().resume(&mut engine, &all).unwrap();
            assert_eq!(engine.position(), end);
            assert!(read(&mut engine, &all) == expected[end * vocab..], "{right} of {guessed} were right");
        }
    }
}

/// The story: a trial of a sequence that had been forgotten was committed to the next one of the same length.
#[test]
fn a_trial_is_of_the_sequence_as_it_is() {
    let dir = checkpoints().swap_remove(0);
    let vocab = vocab(&dir);
    let all = ids(12, vocab);
    let how = How { chunk: Some(5), speculate: 4, ..How::default() };
    let mut engine = engine(open(&dir, Mode::Buffered).unwrap(), &how, 12, CONTEXT).unwrap();
    let mut moved: [&mut dyn FnMut(&mut Engine); 3] = [
        &mut |engine| engine.reset().unwrap(),
        &mut |engine| engine.restore(6, |_| Ok::<_, Error>(())).unwrap(),
        &mut |engine| engine.step(&all[6..7], &mut [], &mut ()).unwrap(),
    ];
    for (case, moved) in moved.iter_mut().enumerate() {
        engine.reset().unwrap();
        read(&mut engine, &all[..6]);
        engine.verify(&all[6..9], &mut vec![0.0; 3 * vocab], &mut ()).unwrap();
        moved(&mut engine);
        let position = engine.position();
        assert!(matches!(engine.commit(if case == 0 { 0 } else { 2 }), Err(Error::Order)), "{case}");
        assert_eq!(engine.position(), position, "{case}");
    }
}

/// A text that was edited resumes from the last state before the edit, with the bits of a fresh run.
#[test]
fn edits_resume_from_a_checkpoint() {
    let dir = checkpoints().swap_remove(0);
    let vocab = vocab(&dir);
    let all = ids(16, vocab);
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    {
        let mut engine = started(&dir, 4);
        let mut s = session(&path, &dir, MUCH).unwrap();
        s.resume(&mut engine, &all).unwrap();
        for end in [4, 8, 12] {
            read(&mut engine, &all[..end]);
            s.checkpoint(&mut engine, true).unwrap();
        }
        read(&mut engine, &all);
        s.save(&mut engine, &all).unwrap();
    }
    for (edit, resumed) in [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (13, 12), (15, 12)] {
        let mut other = all.clone();
        other[edit] = TokenId((other[edit].0 + 1) % u32::try_from(vocab).unwrap());
        let expected = read(&mut started(&dir, 3), &other);
        let mut s = session(&path, &dir, MUCH).unwrap();
        let mut engine = started(&dir, 5);
        s.resume(&mut engine, &other).unwrap();
        assert_eq!(engine.position(), resumed, "an edit at {edit}");
        assert!(read(&mut engine, &other) == expected[resumed * vocab..], "an edit at {edit}");
        // Not saved: the file stays.
    }
    // The same ids again, or fewer, or more: at least one is read.
    let s = session(&path, &dir, MUCH).unwrap();
    let more = [&all[..], &ids(2, vocab)].concat();
    for (ids, at) in [(&all[..], 12), (&all[..12], 8), (&all[..13], 12), (&more[..], 16), (&all[..1], 0)] {
        assert_eq!(s.resumes_at(ids), at, "{} ids", ids.len());
    }
}

#[test]
fn states_keep_within_the_size_that_was_given() {
    let dir = checkpoints().swap_remove(0);
    let all = ids(16, vocab(&dir));
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let config = *open(&dir, Mode::Buffered).unwrap().config();
    let state = 64 * k3_core::model::State::lines(&config, 0).unwrap() as u64;
    let mut sizes = Vec::new();
    for kept in [0u64, 1, 2, 5] {
        let mut engine = started(&dir, 2);
        let _ = std::fs::remove_file(&path);
        let mut s = session(&path, &dir, kept * state).unwrap();
        s.resume(&mut engine, &all).unwrap();
        for end in 1..=16 {
            read(&mut engine, &all[..end]);
            s.checkpoint(&mut engine, true).unwrap();
        }
        s.save(&mut engine, &all).unwrap();
        sizes.push(std::fs::metadata(&path).unwrap().len());
    }
    // The last state is always there; with room for one, it is that one.
    assert_eq!(sizes[0], sizes[1]);
    assert!(sizes[2] - sizes[1] >= state / 2 && sizes[2] - sizes[1] <= state + 64, "{sizes:?} of {state}");
    assert!(sizes[3] - sizes[1] <= 4 * (state + 64), "{sizes:?} of {state}");
}

/// Whatever byte is flipped, wherever the file is cut, it is refused or it does no harm, and it stays.
#[test]
fn damage_is_refused_and_nothing_is_lost() {
    let dir = checkpoints().swap_remove(0);
    let all = ids(10, vocab(&dir));
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let mut engine = started(&dir, 5);
    {
        let mut s = session(&path, &dir, MUCH).unwrap();
        s.resume(&mut engine, &all).unwrap();
        read(&mut engine, &all[..5]);
        s.checkpoint(&mut engine, true).unwrap();
        read(&mut engine, &all);
        s.save(&mut engine, &all).unwrap();
    }
    let good = std::fs::read(&path).unwrap();
    let more = [&all[..], &all[..2]].concat();
    let mut attempt = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let result = session(&path, &dir, MUCH).and_then(|mut s| s.resume(&mut engine, &more));
        assert!(std::fs::read(&path).unwrap() == bytes, "the file was touched");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something was left behind");
        result
    };
    assert!(attempt(&good).is_ok());
    let mut places: Vec<usize> = (0..128).chain((128..good.len()).step_by(good.len() / 60)).collect();
    places.extend([good.len() - 1, good.len() - 9, good.len() - 17]);
    for place in places {
        let mut bad = good.clone();
        bad[place] ^= 0x10;
        let error = attempt(&bad).expect_err("a flipped byte");
        assert!(!matches!(error, SessionError::Engine(_)), "byte {place}: {error}");
    }
    for len in [0, 1, 127, 128, 129, good.len() / 2, good.len() - 1] {
        assert!(attempt(&good[..len]).is_err(), "{len} bytes");
    }
    assert!(attempt(&[&good[..], b"x"].concat()).is_err());
    let mut version = good.clone();
    version[8] = 2;
    assert!(matches!(attempt(&version), Err(SessionError::Version { found: 2, .. })));
    assert!(matches!(attempt(b"{}"), Err(SessionError::NotASession { .. })));
    // What a killed run left beside it is no obstacle.
    std::fs::write(folder.path().join("talk.k3.new"), b"half").unwrap();
    std::fs::write(folder.path().join("talk.k3.lock"), b"").unwrap();
    assert!(attempt(&good).is_ok());
}

#[test]
fn another_model_is_refused_and_so_is_a_second_run() {
    let dirs: Vec<PathBuf> =
        [checkpoints().swap_remove(0), k3_tests::root().join("fixtures/demo")].into_iter().collect();
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let mut engine = started(&dirs[0], 5);
    let few = ids(3, 100);
    let mut first = session(&path, &dirs[0], 0).unwrap();
    first.resume(&mut engine, &few).unwrap();
    assert!(matches!(session(&path, &dirs[0], 0), Err(SessionError::Locked { .. })));
    read(&mut engine, &few);
    first.save(&mut engine, &few).unwrap();
    assert!(matches!(session(&path, &dirs[0], 0), Err(SessionError::Locked { .. })));
    drop(first);
    assert!(matches!(session(&path, &dirs[1], 0), Err(SessionError::OtherModel { what: "config", .. })));
    assert!(session(&path, &dirs[0], 0).is_ok());
    // The same shape and other weights: a byte of the final norm.
    let copy = tempfile::tempdir().unwrap();
    k3_tests::copy_dir(&dirs[0], copy.path());
    let checkpoint = open(copy.path(), Mode::Buffered).unwrap();
    let norm = k3_core::checkpoint::Tensor::Global(k3_core::checkpoint::GlobalTensor::FinalNorm);
    let place = checkpoint.index().place(norm, checkpoint.config());
    let shard = copy.path().join(&checkpoint.index().shards()[usize::from(place.shard)].name);
    let mut bytes = std::fs::read(&shard).unwrap();
    bytes[usize::try_from(place.offset).unwrap()] ^= 1;
    std::fs::write(&shard, bytes).unwrap();
    assert!(matches!(session(&path, copy.path(), 0), Err(SessionError::OtherModel { what: "weights", .. })));
    assert!(matches!(session(folder.path(), &dirs[0], 0), Err(SessionError::NotAFile { .. })));
}

/// The story: a session that only its owner could read was everybody's after the next run.
#[test]
fn what_was_said_is_for_its_owner() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = checkpoints().swap_remove(0);
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let mut engine = started(&dir, 5);
    let few = ids(3, 100);
    let mut s = session(&path, &dir, 0).unwrap();
    s.resume(&mut engine, &few).unwrap();
    read(&mut engine, &few);
    s.save_and_go_on(&mut engine, &few).unwrap();
    assert_eq!(mode(), 0o600);
    // Whatever the owner makes of it stays, also if that is while a run has it.
    for wanted in [0o640, 0o604, 0o600] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(wanted)).unwrap();
        s.save_and_go_on(&mut engine, &few).unwrap();
        assert_eq!(mode(), wanted);
    }
}

/// Saves as a run does: states on the way, a stop in the middle.
struct Saving<'s> {
    session: &'s mut Session,
    stop_after: usize,
    said: usize,
}

impl k3_core::model::Observer for Saving<'_> {}

impl Listener for Saving<'_> {
    type Error = SessionError;

    fn settled(&mut self, engine: &mut Engine) -> Result<ControlFlow<Finish>, SessionError> {
        self.session.checkpoint(engine, true)?;
        Ok(ControlFlow::Continue(()))
    }

    fn passed(&mut self, _: Stage, _: &[f32]) -> Result<(), SessionError> {
        Ok(())
    }

    fn token(&mut self, _: TokenId) -> Result<ControlFlow<Finish>, SessionError> {
        self.said += 1;
        Ok(if self.said == self.stop_after { ControlFlow::Break(Finish::Cancelled) } else { ControlFlow::Continue(()) })
    }
}

/// Turn after turn in one process each: the text is that of one process.
#[test]
fn turns_in_separate_processes_are_one_text() {
    let dir = checkpoints().swap_remove(0);
    let prompt = ids(7, vocab(&dir));
    let wanted =
        Wanted { max_tokens: 12, context: CONTEXT, stops: &|_| false, prompt_logits: false, incremental: true };
    let folder = tempfile::tempdir().unwrap();
    let path = file(&folder);
    let mut whole = prompt.clone();
    {
        let other = folder.path().join("whole.k3");
        let mut engine = started(&dir, 3);
        let mut session = session(&other, &dir, 0).unwrap();
        session.resume(&mut engine, &whole).unwrap();
        let mut listener = Saving { session: &mut session, stop_after: usize::MAX, said: 0 };
        Generator::new(&engine).generate(&mut engine, &mut whole, &wanted, &mut Greedy, &mut listener).unwrap();
    }
    let mut text = prompt.clone();
    let mut positions = Vec::new();
    for stop_after in [1, 4, 2, 5] {
        let mut engine = started(&dir, 2);
        let mut session = session(&path, &dir, MUCH).unwrap();
        if !session.ids().is_empty() {
            assert_eq!(session.ids(), text);
        }
        session.resume(&mut engine, &text).unwrap();
        positions.push(engine.position());
        let mut listener = Saving { session: &mut session, stop_after, said: 0 };
        Generator::new(&engine).generate(&mut engine, &mut text, &wanted, &mut Greedy, &mut listener).unwrap();
        session.save(&mut engine, &text).unwrap();
    }
    assert_eq!(text, whole);
    // Only the last id of the turn before is read again: it never was.
    assert_eq!(positions, [0, 7, 11, 13]);
}
