//! The options for choosing ids, understood, and the picker they make.

use crate::args::{Sampling, Stop};
use crate::fail::Failure;
use crate::text::Stops;
use k3_core::ops::sample::{Candidate, Sampler, Settings, top_logprobs};
use k3_core::view::TokenId;
use k3_platform::error::Error;
use k3_platform::generate::Pick;
use k3_platform::vocabulary::Vocabulary;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Options that have been checked against the vocabulary.
#[derive(Debug)]
pub(crate) struct Chosen {
    settings: Settings<'static>,
    bias: Vec<(TokenId, f32)>,
    logprobs: Option<usize>,
    stop_ids: Vec<TokenId>,
    stop_texts: Vec<Vec<u8>>,
}

impl Chosen {
    /// Refuses what has no meaning, and what would have no effect.
    pub(crate) fn new(args: &Sampling, logprobs: Option<u16>, vocab: usize, texts: bool) -> Result<Self, Failure> {
        let outside = |flag: &str, id: u32| {
            let hint = format!("ids are 0 to {}", vocab - 1);
            Failure::usage(format!("{flag}: token id {id} is not in the vocabulary"), hint)
        };
        if args.temperature == Some(0.0) {
            let ignored = [
                ("--top-p", args.top_p.is_some()),
                ("--top-k", args.top_k.is_some()),
                ("--min-p", args.min_p.is_some()),
                ("--seed", args.seed.is_some()),
            ];
            if let Some((flag, _)) = ignored.iter().find(|(_, given)| *given) {
                let message = format!("{flag} has no effect with --temperature 0, which takes the best id");
                return Err(Failure::usage(message, format!("leave {flag} out, or raise the temperature")));
            }
        }
        let mut bias: Vec<_> = args.logit_bias.iter().map(|&(id, v)| (TokenId(id), v)).collect();
        bias.sort_by_key(|(id, _)| *id);
        if let Some((id, _)) = bias.iter().find(|(id, _)| id.get() >= vocab) {
            return Err(outside("--logit-bias", id.0));
        }
        if bias.iter().filter(|(_, v)| *v == f32::NEG_INFINITY).count() == vocab {
            return Err(Failure::usage("--logit-bias takes out every id", "leave at least one"));
        }
        let greedy = Settings::GREEDY;
        let settings = Settings {
            temperature: args.temperature.unwrap_or(greedy.temperature),
            top_k: args.top_k,
            top_p: args.top_p.unwrap_or(greedy.top_p),
            min_p: args.min_p.unwrap_or(greedy.min_p),
            repeat_penalty: args.repeat_penalty.unwrap_or(greedy.repeat_penalty),
            bias: &[],
            seed: args.seed.unwrap_or(greedy.seed),
        };
        Sampler::new(Settings { bias: &bias, ..settings })
            .map_err(|e| Failure::usage(format!("--{e}"), "k3 run --help says what each option takes"))?;
        let (mut stop_ids, mut stop_texts) = (Vec::new(), Vec::new());
        for stop in &args.stop {
            match stop {
                Stop::Id(id) if *id as usize >= vocab => return Err(outside("--stop", *id)),
                Stop::Id(id) => stop_ids.push(TokenId(*id)),
                Stop::Text(_) if !texts => {
                    let hint = "put tiktoken.model into MODEL_DIR, or give an id";
                    return Err(Failure::usage("--stop: without a vocabulary there is no text", hint));
                }
                Stop::Text(text) => stop_texts.push(text.clone()),
            }
        }
        Ok(Self { settings, bias, logprobs: logprobs.map(|n| usize::from(n).min(vocab)), stop_ids, stop_texts })
    }

    /// Whether an option says that this id ends a text.
    pub(crate) fn stops_at(&self, id: TokenId) -> bool {
        self.stop_ids.contains(&id)
    }

    /// The texts that end a text.
    pub(crate) fn stops(&self) -> Stops {
        Stops::new(self.stop_texts.clone())
    }

    /// A picker of its own.
    pub(crate) fn picker(&self, vocab: usize) -> Picker<'_> {
        Picker { scratch: vec![Candidate::EMPTY; self.candidates(vocab)], ..self.picker_among() }
    }

    /// A picker that has to be lent [`Chosen::candidates`] for each pick.
    pub(crate) fn picker_among(&self) -> Picker<'_> {
        let sampler = Sampler::new(Settings { bias: &self.bias, ..self.settings }).ok();
        Picker { sampler, scratch: Vec::new(), logprobs: self.logprobs, picked: BTreeMap::new() }
    }

    /// Candidates that picking needs.
    pub(crate) fn candidates(&self, vocab: usize) -> usize {
        let sampler = Sampler::new(Settings { bias: &self.bias, ..self.settings });
        let needed = sampler.map_or(0, |sampler| sampler.scratch_len(vocab));
        if self.logprobs.is_some() { vocab } else { needed }
    }

    /// Bytes of the lists, and of those that they were made of: what is given back leaves gaps.
    pub(crate) fn held(&self) -> u64 {
        // The allocator gives no less than 32 bytes, in steps of 16, of which eight are its own.
        let text = |text: &Vec<u8>| size_of::<Vec<u8>>() + (text.len() + 8).next_multiple_of(16).max(32);
        let given = self.stop_texts.len() + self.stop_ids.len();
        let texts = self.stop_texts.iter().map(text).sum::<usize>();
        (size_of_val(&*self.bias) + size_of_val(&*self.stop_ids) + 2 * texts + given * size_of::<Stop>()) as u64
    }

    /// Bytes that a picker and what it remembers of a text of so many tokens hold.
    pub(crate) fn bytes(&self, vocab: usize, tokens: usize) -> u64 {
        let (remembered, json) = self.told(tokens);
        ((self.candidates(vocab) * size_of::<Candidate>()) as u64).saturating_add(remembered).saturating_add(json)
    }

    /// Bytes of the log-probabilities of so many tokens, and of the JSON that is made of them.
    pub(crate) fn told(&self, tokens: usize) -> (u64, u64) {
        let Some(n) = self.logprobs.map(|n| n as u64) else { return (0, 0) };
        let place = PLACE_BYTES.saturating_add(n.saturating_mul(size_of::<(TokenId, f64)>() as u64));
        let all = (n + 1).saturating_mul(tokens as u64);
        (place.saturating_mul(tokens as u64), all.saturating_mul(LOGPROB_JSON_BYTES))
    }
}

/// Bytes of a place whose log-probabilities are remembered, besides these: its part of a tree whose nodes are half
/// full, and what the allocator adds to a list.
const PLACE_BYTES: u64 = 160;

/// Bytes of its JSON: a tree's node for three members, their names, a text, and what is printed of it.
const LOGPROB_JSON_BYTES: u64 = 1300;

/// Chooses ids, and remembers what there was to choose from.
pub(crate) struct Picker<'s> {
    sampler: Option<Sampler<'s>>,
    scratch: Vec<Candidate>,
    logprobs: Option<usize>,
    /// By position, since one may be asked for more than once.
    picked: BTreeMap<usize, Picked>,
}

struct Picked {
    id: TokenId,
    logprob: f64,
    best: Vec<(TokenId, f64)>,
}

impl Pick for Picker<'_> {
    fn pick(&mut self, position: usize, history: &[TokenId], logits: &[f32]) -> Result<TokenId, Error> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let picked = self.pick_among(position, history, logits, &mut scratch);
        self.scratch = scratch;
        picked
    }
}

impl Picker<'_> {
    /// As [`Pick::pick`], with scratch that others use, too.
    pub(crate) fn pick_among(
        &mut self,
        position: usize,
        history: &[TokenId],
        logits: &[f32],
        scratch: &mut [Candidate],
    ) -> Result<TokenId, Error> {
        // Options and logits were checked: nothing is left to go wrong.
        let sampler = self.sampler.ok_or(Error::Order)?;
        let id = sampler.pick(position as u64, history, logits, scratch).map_err(|_| Error::Order)?;
        if let Some(most) = self.logprobs {
            let mut best = Vec::with_capacity(most);
            top_logprobs(logits, most, scratch, |id, p| best.push((id, p))).map_err(|_| Error::Order)?;
            let nll = k3_core::ops::loss::nll(logits, id).ok().flatten().ok_or(Error::Order)?;
            self.picked.insert(position, Picked { id, logprob: -nll, best });
        }
        Ok(id)
    }

    /// Whether log-probabilities were asked for.
    pub(crate) const fn tells(&self) -> bool {
        self.logprobs.is_some()
    }

    /// Forgets what there was to choose from.
    pub(crate) fn forget(&mut self) {
        self.picked.clear();
    }

    /// The JSON of the log-probabilities of the ids from `position` on; null if none were asked for.
    pub(crate) fn json(&self, position: usize, ids: &[TokenId], vocabulary: Option<&Vocabulary<'_>>) -> Value {
        if self.logprobs.is_none() {
            return Value::Null;
        }
        let text = |id: TokenId| {
            vocabulary.map(|vocabulary| {
                let mut bytes = Vec::new();
                vocabulary.decode(id, &mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        };
        let one = |id: TokenId, logprob: f64| json!({"id": id.0, "text": text(id), "logprob": logprob});
        let each = |(at, &id): (usize, &TokenId)| {
            let picked = self.picked.get(&(position + at)).filter(|picked| picked.id == id)?;
            let mut object = one(id, picked.logprob);
            object["top"] = picked.best.iter().map(|&(id, p)| one(id, p)).collect();
            Some(object)
        };
        ids.iter().enumerate().map(|pair| each(pair).unwrap_or(Value::Null)).collect()
    }
}
