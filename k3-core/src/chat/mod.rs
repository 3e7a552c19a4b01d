//! Conversations as the model reads and writes them: XTML (spec 5.4).
//!
//! What this is: [`Prompt::render`] turns messages into control ids and texts, and [`Parser`] turns the
//! model's ids back into thinking, answer and tool calls. What it is not: a tokenizer. Both ends speak in
//! [`Part`]s, a control id or the bytes of a text, and a text part is always encoded by itself and as
//! ordinary text. So nobody's text can contain a control id, whatever it spells, and pieces never merge
//! across the edge of a tag, which would give other ids than the model was trained on.
//!
//! ```text
//! open(tag, attributes) = <|open|> tag { ` key` `="` value `"` } <|sep|>
//! close(tag)            = <|close|> tag <|sep|>
//!
//! prompt  = [tool-declare] [thinking-effort] { message } generation
//! message = open(message, role=R ..) body close(message) <|end_of_msg|>
//! answer  = [think] response [tools { call { argument } }]      the body of an assistant's message
//! generation = open(message, role=assistant) open(think)        or open(response): thinking is off
//! ```
//!
//! The model starts inside of the channel that `generation` has opened, and ends its message itself.
//!
//! Wire texts the spec does not give are not guessed: see [`Unwritten`]. Two things about those that are
//! given rest on a reading of it. The block of tool declarations ends with its three backquotes and no
//! line break behind them. A call's argument that is an object or an array is written compactly, as
//! tool declarations are, with its members in their order.
//!
//! ```
//! use k3_core::chat::{Message, Part, Prompt, Thinking};
//! use k3_core::tokenizer::Control;
//!
//! let messages = [Message::User { name: None, content: b"What is <|open|>?" }];
//! let prompt = Prompt { thinking: Thinking::Off, ..Prompt::new(&messages) };
//! let mut shown = String::new();
//! prompt.render(&mut [], |part| {
//!     match part {
//!         Part::Control(Control::OPEN) => shown.push('<'),
//!         Part::Control(Control::CLOSE) => shown.push_str("</"),
//!         Part::Control(Control::SEP) => shown.push('>'),
//!         Part::Control(_) => shown.push('.'),
//!         Part::Text(text) => shown.push_str(&String::from_utf8_lossy(text)),
//!     }
//!     Ok::<(), std::convert::Infallible>(())
//! })?;
//! assert_eq!(
//!     shown,
//!     "<message role=\"user\">What is <|open|>?</message>.<message role=\"assistant\"><response>"
//! );
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(
    not(test),
    deny(
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic
    )
)]

mod canonical;
mod parse;
mod render;
#[cfg(test)]
mod tests;

pub use parse::{Attributes, Event, Malformed, Parser, Start, TAG_BYTES, Tag, Value};
pub use render::RenderError;

use crate::json::JsonError;
use crate::tokenizer::Control;

/// A piece of a conversation on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'p> {
    /// A control id.
    Control(Control),
    /// The bytes of a text, which is encoded by itself and without looking for control spellings.
    Text(&'p [u8]),
}

/// How much the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Effort {
    /// `low`
    Low,
    /// `high`
    High,
    /// `max`, which the release takes when none is named.
    #[default]
    Max,
}

impl Effort {
    /// Its name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }

    /// The effort of this name. `medium` is none: the prompt's own text lists it, and the release's encoder
    /// refuses it (spec section 7, point 6).
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        [Self::Low, Self::High, Self::Max].into_iter().find(|effort| effort.name() == name)
    }
}

/// Whether the model thinks before it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    /// It begins inside its thinking channel. With an effort a system message names it.
    On(Option<Effort>),
    /// It begins with the answer, and thinking of earlier messages is left out.
    Off,
}

impl Default for Thinking {
    fn default() -> Self {
        Self::On(Some(Effort::default()))
    }
}

/// Whether the model is told that it must, or must not, call a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// It decides; nothing is said.
    #[default]
    Auto,
    /// It must. Refused: [`Unwritten::ToolChoice`].
    Required,
    /// It must not. Refused: [`Unwritten::ToolChoice`].
    None,
}

/// The form of answer that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResponseFormat {
    /// Text; nothing is said.
    #[default]
    Text,
    /// A JSON object. Refused: [`Unwritten::ResponseFormat`].
    JsonObject,
    /// JSON of a schema. Refused: [`Unwritten::ResponseFormat`].
    JsonSchema,
}

/// A tool call of the assistant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call<'a> {
    /// The caller's name for this call, by which results are put in order; it is not written.
    pub id: Option<&'a str>,
    /// The tool.
    pub name: &'a str,
    /// Its arguments: a JSON object, or anything else, which is then written as it is.
    pub arguments: &'a str,
}

/// A message of a conversation. Contents are bytes and reach the tokenizer as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// What the model is told to be.
    System {
        /// Who says it.
        name: Option<&'a str>,
        /// The body, not trimmed.
        content: &'a [u8],
        /// Tools that are declared from here on. Refused if there are any: [`Unwritten::SystemTools`].
        tools: Option<&'a str>,
    },
    /// What a person says.
    User {
        /// Who says it.
        name: Option<&'a str>,
        /// The body, not trimmed.
        content: &'a [u8],
    },
    /// What the model said.
    Assistant {
        /// Who it is.
        name: Option<&'a str>,
        /// What it thought. Written, even if empty, when thinking is on.
        reasoning: &'a [u8],
        /// What it answered.
        content: &'a [u8],
        /// The tools it called.
        calls: &'a [Call<'a>],
    },
    /// What a tool gave back.
    Tool {
        /// The tool.
        name: &'a str,
        /// The [`Call::id`] this is the result of.
        id: Option<&'a str>,
        /// The body, not trimmed.
        content: &'a [u8],
    },
}

/// A whole conversation, up to where the model is to go on.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// The tools: a JSON array of declarations. It is written compactly and with sorted keys; an empty one is
    /// not written, as in the release.
    pub tools: Option<&'a str>,
    /// Whether a tool must be called.
    pub tool_choice: ToolChoice,
    /// The form of the answer.
    pub response_format: ResponseFormat,
    /// Whether and how much the model thinks.
    pub thinking: Thinking,
    /// What was said so far.
    pub messages: &'a [Message<'a>],
}

impl<'a> Prompt<'a> {
    /// Messages, and the release's defaults for all else: no tools, thinking with effort `max`.
    #[must_use]
    pub const fn new(messages: &'a [Message<'a>]) -> Self {
        Self {
            tools: None,
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            thinking: Thinking::On(Some(Effort::Max)),
            messages,
        }
    }
}

/// What exists in the release, but whose exact wire text the spec does not give. A guess would be read by
/// the model as something it was not trained on, so these are refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unwritten {
    /// A system message that declares tools in the middle of a conversation.
    SystemTools,
    /// The message that says a tool must, or must not, be called.
    ToolChoice,
    /// The message that asks for JSON.
    ResponseFormat,
    /// An image or another medium in a body.
    Media,
}

impl core::fmt::Display for Unwritten {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::SystemTools => "a system message with tools of its own",
            Self::ToolChoice => "a tool choice other than \"auto\"",
            Self::ResponseFormat => "a response format other than \"text\"",
            Self::Media => "an image or another medium",
        })
    }
}

/// Why a conversation is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatError {
    /// Something whose wire text is not known here.
    Unwritten(Unwritten),
    /// The tool declarations are not JSON.
    Tools(JsonError),
    /// The tool declarations are JSON, but not an array.
    ToolsArray,
    /// An object has one key twice, in the tool declarations or in a call's arguments.
    DuplicateKey {
        /// Where it is for the second time (bytes from the start of the innermost object).
        offset: u64,
    },
    /// An object has more keys than any declaration or call needs.
    Keys {
        /// The most that are accepted.
        most: usize,
    },
    /// A number has no finite value as f64.
    Number,
    /// A name, or a key of a call's arguments, makes a tag that a [`Parser`] with [`TAG_BYTES`] cannot read back.
    Tag {
        /// Bytes of the tag.
        len: usize,
        /// The most that are accepted.
        most: usize,
    },
    /// The caller's buffer for composed texts is too short.
    Buffer {
        /// Bytes that are needed for this text; see [`Prompt::text_len`].
        needed: usize,
        /// Bytes that were given.
        given: usize,
    },
}

impl core::fmt::Display for ChatError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Unwritten(what) => {
                write!(f, "{what} is not supported: the exact text the model was trained on is not known")
            }
            Self::Tools(error) => write!(f, "the tool declarations are not JSON: {error}"),
            Self::ToolsArray => f.write_str("the tool declarations are not a JSON array"),
            Self::DuplicateKey { offset } => write!(f, "an object has a key twice (byte {offset} of it)"),
            Self::Keys { most } => write!(f, "an object has more than {most} keys"),
            Self::Number => f.write_str("a number is too large for a double"),
            Self::Tag { len, most } => {
                write!(f, "a name, or a key of a call's arguments, makes a tag of {len} bytes, more than {most}")
            }
            Self::Buffer { needed, given } => {
                write!(f, "the buffer for composed text has {given} bytes, {needed} are needed")
            }
        }
    }
}

impl core::error::Error for ChatError {}
