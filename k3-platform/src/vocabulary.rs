//! The tokenizer's files of a checkpoint, and the tokenizer over them.

use crate::aligned::AlignedBuf;
use crate::checkpoint::{Checkpoint, SMALL_FILE, read_small};
use crate::error::Error;
use crate::io::Source as Opener;
use k3_core::carve::Line;
use k3_core::chat::{Call, Part, Prompt, RenderError};
use k3_core::json::{Event, JsonError, Parser};
use k3_core::tokenizer::{
    Control, ControlText, Decoder, Specials, UnknownId, Vocab, encode, encode_with_specials, longest_piece, scratch_len,
};
use k3_core::view::TokenId;
use std::path::{Path, PathBuf};

/// Bytes that `tiktoken.model` may have for each id of the model: a line is the base64 of a token and
/// its rank. Some may be longer: released lines have well under 100 on average.
const LINE: u64 = 160;

/// Bytes of `tiktoken.model` that are read for a model of any number of ids.
const RANKS: u64 = 64 << 20;

/// `tiktoken.model` and `tokenizer_config.json`, read, and the memory a [`Vocabulary`] borrows.
#[derive(Debug)]
pub struct VocabularyFiles {
    path: PathBuf,
    config_path: PathBuf,
    ranks: Vec<u8>,
    config: Option<Vec<u8>>,
    arena: AlignedBuf,
    names: Vec<u8>,
    /// Ids of the model, where it is known.
    ids: Option<usize>,
}

/// Text to ids and back with a checkpoint's own vocabulary.
#[derive(Debug)]
pub struct Vocabulary<'m> {
    vocab: Vocab<'m>,
    specials: Specials<'m>,
    bytes: u64,
}

impl VocabularyFiles {
    /// Reads the files of a checkpoint. `tokenizer_config.json` may be absent: the released names of
    /// the control ids are known.
    ///
    /// # Errors
    /// [`Error`] naming the file.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self, Error> {
        Self::read(checkpoint.dir(), &**checkpoint.opener(), Some(checkpoint.config().vocab_size))
    }

    /// Reads the same files of a directory that needs to hold nothing else.
    ///
    /// # Errors
    /// [`Error`] naming the file.
    pub fn in_dir(dir: &Path, opener: &dyn Opener) -> Result<Self, Error> {
        Self::read(dir, opener, None)
    }

    /// Reads the files of a directory whose model has so many ids, if that is known.
    ///
    /// # Errors
    /// [`Error`] naming the file.
    pub fn read(dir: &Path, opener: &dyn Opener, ids: Option<usize>) -> Result<Self, Error> {
        let path = dir.join("tiktoken.model");
        let most = ids.map_or(RANKS, |ids| (64 + LINE.saturating_mul(ids as u64)).min(RANKS));
        let ranks = read_small(opener, &path, most)?;
        let config_path = dir.join("tokenizer_config.json");
        let config = match read_small(opener, &config_path, SMALL_FILE) {
            Ok(bytes) => Some(bytes),
            Err(Error::Open { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let names = vec![0; config.as_ref().map_or(0, Vec::len)];
        Ok(Self { path, config_path, ranks, config, arena: AlignedBuf::empty(), names, ids })
    }

    /// Builds the tokenizer; what was read of the files is freed.
    ///
    /// # Errors
    /// [`Error`] naming the file and the place in it.
    pub fn load(&mut self) -> Result<Vocabulary<'_>, Error> {
        let Self { path, config_path, ranks, config, arena, names, ids } = self;
        let fault = |source| Error::Vocab { path: path.clone(), source };
        let measured = Vocab::measure(ranks).map_err(fault)?;
        *arena = AlignedBuf::zeroed_lines(measured.lines())?;
        let bytes = (arena.len() + names.len()) as u64;
        let vocab = measured.load(arena.lines_mut()).map_err(fault)?;
        *ranks = Vec::new();
        let mut specials = Specials::new(vocab.len(), names);
        let found = specials.end() as usize;
        if let Some(expected) = ids.filter(|&ids| ids != found) {
            return Err(Error::VocabSize { path: path.clone(), expected, found });
        }
        if let Some(json) = config.take() {
            read_names(config_path, &json, &mut specials)?;
        }
        specials.check().map_err(|source| Error::Special { path: config_path.clone(), source })?;
        Ok(Vocabulary { vocab, specials, bytes })
    }
}

/// `added_tokens_decoder`: `{"163584": {"content": "[BOS]", ...}, ...}`.
fn read_names(path: &Path, json: &[u8], specials: &mut Specials<'_>) -> Result<(), Error> {
    let structure = |expected, offset| Error::Structure { path: path.to_owned(), expected, offset };
    let fault = |source: JsonError| Error::Json { path: path.to_owned(), source };
    let mut parser = Parser::new(json);
    let (mut inside, mut id, mut content) = (false, None, false);
    let mut buffer = [0; 1024];
    let mut seen = std::collections::HashSet::new();
    while let Some(event) = parser.next().map_err(fault)? {
        let offset = parser.token_offset();
        match (parser.depth(), event) {
            (1, Event::Key(key)) => inside = key == "added_tokens_decoder",
            (2, Event::Key(key)) if inside => {
                let number = key.decode_into(&mut buffer).ok().and_then(|text| text.parse().ok()).map(TokenId);
                let number = number.ok_or_else(|| structure("a token id", offset))?;
                if !seen.insert(number) {
                    return Err(structure("each token id once", offset));
                }
                id = Some(number);
            }
            (3, Event::Key(key)) if inside => content = key == "content",
            (3, Event::Str(text)) if inside && content => {
                let name = text.decode_into(&mut buffer).map_err(|_| structure("a shorter name", offset))?;
                let id = id.ok_or_else(|| structure("a token id", offset))?;
                specials.set_name(id, name).map_err(|source| Error::Special { path: path.to_owned(), source })?;
            }
            (3, _) if inside && content => return Err(structure("a string", offset)),
            _ => {}
        }
    }
    Ok(())
}

impl Vocabulary<'_> {
    /// Bytes that are kept.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The ids of a text. With `special`, spellings of control ids become those ids; without it they
    /// are text like any other.
    ///
    /// # Errors
    /// [`Error::Memory`] if there is no memory for the scratch of a long piece.
    pub fn encode(&self, text: &[u8], special: bool) -> Result<Vec<TokenId>, Error> {
        let lines =
            scratch_len(longest_piece(text, special.then_some(&self.specials))).unwrap_or(usize::MAX / Line::BYTES);
        let mut scratch = AlignedBuf::zeroed_lines(lines)?;
        let mut ids = Vec::new();
        let out = |id| ids.push(id);
        let done = if special {
            encode_with_specials(&self.vocab, &self.specials, text, scratch.lines_mut(), out)
        } else {
            encode(&self.vocab, text, scratch.lines_mut(), out)
        };
        // The scratch was made for the longest piece of this very text.
        done.map_err(|_| Error::Order)?;
        Ok(ids)
    }

    /// Appends the bytes of an id; a control id is spelled out.
    pub fn decode(&self, id: TokenId, out: &mut Vec<u8>) {
        // An id of this model is in its vocabulary: `load` has compared the two sizes.
        let _ = self.decode_as(id, ControlText::Spell, out);
    }

    /// Appends the bytes of an id, of a control id as `controls` says.
    ///
    /// # Errors
    /// [`UnknownId`] if it is out of range; nothing was appended then.
    pub fn decode_as(&self, id: TokenId, controls: ControlText, out: &mut Vec<u8>) -> Result<(), UnknownId> {
        Decoder::new(&self.vocab, &self.specials, controls).push(id, |part| out.extend_from_slice(part))
    }

    /// The id of a control.
    #[must_use]
    pub const fn id(&self, control: Control) -> TokenId {
        self.specials.id(control)
    }

    /// Which control an id is, if it is one.
    #[must_use]
    pub fn control(&self, id: TokenId) -> Option<Control> {
        self.specials.control(id)
    }

    /// Appends the ids of a part of a conversation. Its text is ordinary text, whatever it spells.
    ///
    /// # Errors
    /// [`Error::Memory`] as for [`Vocabulary::encode`].
    pub fn append(&self, part: Part<'_>, ids: &mut Vec<TokenId>) -> Result<(), Error> {
        match part {
            Part::Control(control) => ids.push(self.id(control)),
            Part::Text(text) => ids.extend(self.encode(text, false)?),
        }
        Ok(())
    }

    /// The ids of a whole conversation, up to where the model goes on; with `after` only those that follow
    /// what the model has in its state, whose last message had these calls.
    ///
    /// # Errors
    /// [`RenderError`] if the conversation is refused.
    pub fn render(&self, prompt: &Prompt<'_>, after: Option<&[Call<'_>]>) -> Result<Vec<TokenId>, RenderError<Error>> {
        let mut text = vec![0; prompt.text_len().map_err(RenderError::<Error>::from)?];
        let mut ids = Vec::new();
        let part = |part: Part<'_>| self.append(part, &mut ids);
        match after {
            None => prompt.render(&mut text, part)?,
            Some(calls) => prompt.render_more(calls, &mut text, part)?,
        }
        Ok(ids)
    }

    /// Whether an id ends a text.
    #[must_use]
    pub fn is_stop(&self, id: TokenId) -> bool {
        self.specials.is_stop(id)
    }
}
