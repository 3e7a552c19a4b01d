//! A session, if the options name one.

use crate::args;
use crate::fail::Failure;
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::engine::Engine;
use k3_platform::session::{BUFFER_BYTES, Session, SessionError};
use k3_platform::units;
use std::io::Write as _;

/// A session and what went wrong with it. That it cannot be written ends no text.
#[derive(Debug, Default)]
pub(crate) struct Keep {
    session: Option<Session>,
    failed: Option<SessionError>,
}

impl Keep {
    /// Opens the session the options name.
    pub(crate) fn open(args: &args::Session, checkpoint: &Checkpoint) -> Result<Self, Failure> {
        let Some(path) = &args.session else { return Ok(Self::default()) };
        let size = units::parse(&args.session_checkpoints)
            .map_err(|e| Failure::usage(format!("--session-checkpoints: {e}"), "write 1G or 0"))?;
        Ok(Self { session: Some(Session::open(path, checkpoint, size)?), failed: None })
    }

    pub(crate) const fn is_some(&self) -> bool {
        self.session.is_some()
    }

    /// Ids of the sequence as it was.
    pub(crate) fn ids(&self) -> &[TokenId] {
        self.session.as_ref().map_or(&[], Session::ids)
    }

    /// Bytes that are held for a context.
    pub(crate) fn bytes(&self, context: usize) -> u64 {
        if self.is_some() { BUFFER_BYTES.saturating_add(12u64.saturating_mul(context as u64)) } else { 0 }
    }

    /// Brings the engine to where it can go on; without a session to the beginning. Says so unless `quiet`:
    /// what is not common to the session and these ids will be replaced.
    pub(crate) fn resume(&mut self, engine: &mut Engine, ids: &[TokenId], quiet: bool) -> Result<(), Failure> {
        let Some(session) = &mut self.session else { return Ok(engine.reset()?) };
        let old = session.ids();
        let common = old.iter().zip(ids).take_while(|(a, b)| a == b).count();
        if !quiet && !old.is_empty() {
            let _ = writeln!(
                std::io::stderr(),
                "session: {common} of its {} tokens are those of this text; {} were read before and are not read again",
                old.len(),
                session.resumes_at(ids)
            );
        }
        Ok(session.resume(engine, ids)?)
    }

    /// Keeps a state on the way.
    pub(crate) fn checkpoint(&mut self, engine: &mut Engine, anyway: bool) {
        if let (Some(session), None) = (&mut self.session, &self.failed) {
            self.failed = session.checkpoint(engine, anyway).err();
        }
    }

    /// Writes the session.
    pub(crate) fn save(&mut self, engine: &mut Engine, ids: &[TokenId], go_on: bool) -> Result<(), Failure> {
        if let Some(failed) = self.failed.take() {
            return Err(failed.into());
        }
        match &mut self.session {
            Some(session) if go_on => Ok(session.save_and_go_on(engine, ids)?),
            Some(session) => Ok(session.save(engine, ids)?),
            None => Ok(()),
        }
    }
}
