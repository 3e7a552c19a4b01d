//! Prompt bytes to ids and back, with the model's own vocabulary.

use crate::fail::Failure;
use crate::input::{self, Input};
use k3_core::config::ModelConfig;
use k3_core::tokenizer::{self, Control};
use k3_core::view::TokenId;
use k3_platform::checkpoint::Checkpoint;
use k3_platform::error::Error;
use k3_platform::vocabulary::VocabularyFiles;
use std::io::Read as _;
use std::path::Path;

/// Where a prompt comes from.
pub(crate) enum Source {
    Text(Vec<u8>),
    Ids(Vec<TokenId>),
}

/// Reads the prompt's bytes exactly as they are.
pub(crate) fn source(prompt: &crate::args::Prompt, budget: u64) -> Result<Source, Failure> {
    use std::os::unix::ffi::OsStringExt as _;
    if let Some(ids) = &prompt.ids {
        return Ok(Source::Ids(ids.iter().copied().map(TokenId).collect()));
    }
    if let Some(text) = &prompt.prompt {
        return Ok(Source::Text(text.clone().into_vec()));
    }
    let Some(path) = &prompt.prompt_file else {
        let hint = "give --prompt TEXT, --prompt-file PATH or --ids 1,2,3";
        return Err(Failure::usage("there is no prompt", hint));
    };
    Ok(Source::Text(read(path, "--prompt-file", budget)?))
}

/// Reads a file, or standard input, that `option` names. A text may have an eighth of the memory there
/// is: its ids, and what encoding needs, take several times its size.
pub(crate) fn read(path: &Path, option: &str, budget: u64) -> Result<Vec<u8>, Failure> {
    let failed = |e: std::io::Error| input::failed(path, &e, &format!("{option} takes a file"));
    let limit = budget / 8;
    let mut bytes = Vec::new();
    Input::open(path).map_err(failed)?.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > limit {
        let message = format!("{}: the text has more than {limit} bytes, an eighth of --memory", path.display());
        return Err(Failure::usage(message, "give more with --memory, or a shorter text"));
    }
    Ok(bytes)
}

/// Refuses a prompt that no model of `vocab` ids can continue.
pub(crate) fn check_ids(prompt: &[TokenId], vocab: usize) -> Result<(), Failure> {
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt is empty", "the model continues text: give it at least one token"));
    }
    if let Some((i, id)) = prompt.iter().enumerate().find(|(_, id)| id.get() >= vocab) {
        let hint = format!("ids are 0 to {}", vocab - 1);
        return Err(Failure::usage(format!("token id {} at place {i} is not in the vocabulary", id.0), hint));
    }
    Ok(())
}

/// Whether two names lead to one file that is there.
pub(crate) fn same_file(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// The vocabulary files of a checkpoint. Ids in and ids out need none, so they may be absent then.
pub(crate) fn vocabulary(checkpoint: &Checkpoint, needed: bool) -> Result<Option<VocabularyFiles>, Failure> {
    match VocabularyFiles::open(checkpoint) {
        Ok(files) => Ok(Some(files)),
        Err(Error::Open { source, .. }) if !needed && source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether an id ends a text: the config's, or one of the two that the control block has for it. The
/// block is the last 256 ids, whether or not the vocabulary's file is there.
pub(crate) fn stops(id: TokenId, config: &ModelConfig) -> bool {
    let base = config.vocab_size.saturating_sub(tokenizer::BLOCK as usize);
    let distance = id.get().checked_sub(base).and_then(|d| u8::try_from(d).ok()).map(Control::at);
    config.eos_token_id == Some(id.0) || matches!(distance, Some(Control::EOS | Control::END_OF_MSG))
}

/// Bytes on their way to a terminal: a character goes out when it is complete, and what is not UTF-8
/// goes out as it is.
#[derive(Debug, Default)]
pub(crate) struct Streamed(Vec<u8>);

impl Streamed {
    /// Takes bytes, and gives those that can be shown.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.0.extend_from_slice(bytes);
        let mut done = 0;
        loop {
            match std::str::from_utf8(&self.0[done..]) {
                Ok(_) => return std::mem::take(&mut self.0),
                Err(e) => {
                    done += e.valid_up_to();
                    match e.error_len() {
                        Some(invalid) => done += invalid,
                        // The beginning of a character.
                        None => return self.0.drain(..done).collect(),
                    }
                }
            }
        }
    }

    /// What is left when nothing more comes.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }
}

/// Texts that end a text. What could be the beginning of one is held back, and nothing else.
#[derive(Debug, Default)]
pub(crate) struct Stops {
    texts: Vec<Vec<u8>>,
    held: Vec<u8>,
    found: Option<usize>,
}

impl Stops {
    pub(crate) fn new(texts: Vec<Vec<u8>>) -> Self {
        Self { texts, ..Self::default() }
    }

    /// The text that was found.
    pub(crate) fn found(&self) -> Option<&[u8]> {
        self.found.map(|i| &self.texts[i][..])
    }

    /// Takes bytes, and gives those that are certainly before any of the texts. After one was found there
    /// are none.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<u8> {
        if self.texts.is_empty() {
            return bytes.to_vec();
        }
        let mut ready = Vec::new();
        for &byte in bytes {
            if self.found.is_some() {
                break;
            }
            self.held.push(byte);
            // Of several that end here, the one that began first.
            let ends = (0..self.texts.len()).filter(|&i| self.held.ends_with(&self.texts[i]));
            self.found = ends.max_by_key(|&i| (self.texts[i].len(), std::cmp::Reverse(i)));
            if let Some(i) = self.found {
                self.held.truncate(self.held.len() - self.texts[i].len());
                ready.append(&mut self.held);
            } else {
                let may = |from: usize| self.texts.iter().any(|text| text.starts_with(&self.held[from..]));
                let from = (0..self.held.len()).find(|&from| may(from)).unwrap_or(self.held.len());
                ready.extend(self.held.drain(..from));
            }
        }
        ready
    }

    /// What was held back when nothing more comes.
    pub(crate) fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_not_broken_and_no_byte_is_lost() {
        let mut s = Streamed::default();
        let euro = "\u{20ac}".as_bytes();
        assert_eq!(s.push(&euro[..2]), b"");
        assert_eq!(s.push(&euro[2..]), euro);
        assert_eq!(s.push(b"a\xffb\xe2\x82"), b"a\xffb");
        assert_eq!(s.push(b"x"), b"\xe2\x82x");
        assert_eq!(s.push(b"\xf0\x9f"), b"");
        assert_eq!(s.finish(), b"\xf0\x9f");
    }

    /// However the bytes are cut, what comes out is what is before the first stop, and at each moment only a
    /// beginning of a stop is held back.
    #[test]
    fn stop_texts_are_found_across_any_cut() {
        let cases: [(&[&str], &str, &str, Option<&str>); 9] = [
            (&["END"], "one END two", "one ", Some("END")),
            (&["END"], "E EN ENEND", "E EN EN", Some("END")),
            (&["aab"], "aaab", "a", Some("aab")),
            (&["abab"], "ababab", "", Some("abab")),
            (&["xyz", "yz"], "wxyz", "w", Some("xyz")),
            (&["long stop", "st"], "a long stop", "a long ", Some("st")),
            (&["\u{20ac}"], "5 \u{20ac}!", "5 ", Some("\u{20ac}")),
            (&["END"], "nothing EN", "nothing EN", None),
            (&[], "all", "all", None),
        ];
        for (texts, text, before, found) in cases {
            let texts: Vec<Vec<u8>> = texts.iter().map(|t| t.as_bytes().to_vec()).collect();
            for size in 1..=text.len() {
                let mut stops = Stops::new(texts.clone());
                let mut out = Vec::new();
                for part in text.as_bytes().chunks(size) {
                    out.extend(stops.push(part));
                    assert!(stops.held.is_empty() || texts.iter().any(|t| t.starts_with(&stops.held)));
                }
                assert_eq!(stops.found(), found.map(str::as_bytes), "{text}");
                out.extend(stops.finish());
                assert_eq!(out, before.as_bytes(), "{text} by {size}");
            }
        }
    }
}
