//! Parts to thinking, answer and tool calls, one id at a time.
//!
//! Structure comes from control ids only, so a text may spell them without harm. The parser holds a stack
//! of open tags and the text of the tag that is being read, nothing else: bodies pass through.

use super::Part;
use crate::tokenizer::Control;

/// Bytes of a tag's text that are enough for names and keys of any reasonable length.
pub const TAG_BYTES: usize = 1024;

/// What can be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tag {
    /// A whole message.
    Message,
    /// The thinking channel.
    Think,
    /// The answer.
    Response,
    /// All calls of a message.
    Tools,
    /// A call: attributes `tool` and `index`.
    Call,
    /// An argument of a call: attributes `key` and `type`.
    Argument,
    /// All arguments of a call as one text.
    Json,
}

impl Tag {
    /// Its name on the wire.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Think => "think",
            Self::Response => "response",
            Self::Tools => "tools",
            Self::Call => "call",
            Self::Argument => "argument",
            Self::Json => "json",
        }
    }

    fn by_name(name: &str) -> Option<Self> {
        [Self::Message, Self::Think, Self::Response, Self::Tools, Self::Call, Self::Argument, Self::Json]
            .into_iter()
            .find(|tag| tag.name() == name)
    }

    const fn inside(self, parent: Option<Self>) -> bool {
        matches!(
            (parent, self),
            (None, Self::Message)
                | (Some(Self::Message), Self::Think | Self::Response | Self::Tools)
                | (Some(Self::Tools), Self::Call)
                | (Some(Self::Call), Self::Argument | Self::Json)
        )
    }

    /// Whether text may stand in it directly. In a message it is the body of one that is not the assistant's.
    const fn has_text(self) -> bool {
        matches!(self, Self::Message | Self::Think | Self::Response | Self::Argument | Self::Json)
    }
}

/// Where the ids begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Inside the thinking channel of an assistant's message: the model's output with thinking on.
    Think,
    /// Inside its answer: the model's output with thinking off.
    Response,
    /// Before a message: a whole conversation.
    Outside,
}

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event<'e> {
    /// A tag was opened.
    Open {
        /// Which.
        tag: Tag,
        /// Its attributes.
        attributes: Attributes<'e>,
    },
    /// Bytes of a body. They may end in the middle of a character.
    Text {
        /// The innermost open tag.
        tag: Tag,
        /// The bytes.
        bytes: &'e [u8],
    },
    /// A tag was closed.
    Close {
        /// Which.
        tag: Tag,
    },
    /// [`Control::END_OF_MSG`] or [`Control::EOS`].
    End,
}

/// Why ids are not a message. What came before stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Malformed {
    /// A control id that has no place there.
    Control {
        /// Which.
        control: Control,
    },
    /// Text where there can be none: between tags, or behind the end of a message.
    Text,
    /// A tag's text is not a name and attributes.
    Syntax,
    /// A tag's text does not fit the buffer.
    Long {
        /// Bytes the buffer has.
        given: usize,
    },
    /// A tag of a name that does not exist.
    Unknown,
    /// A tag where there can be none.
    Nesting {
        /// Which.
        tag: Tag,
        /// What it would be in.
        inside: Option<Tag>,
    },
    /// A tag that is closed and is not the one that is open.
    Close {
        /// What is closed.
        tag: Tag,
        /// What is open.
        open: Option<Tag>,
    },
    /// The end came while something was open.
    Unclosed {
        /// The innermost tag.
        tag: Tag,
    },
}

impl core::fmt::Display for Malformed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let name = |tag: Option<Tag>| tag.map_or("no message", Tag::name);
        match *self {
            Self::Control { control } => match control.released_name() {
                Some(name) => write!(f, "the control id {name} has no place here"),
                None => write!(f, "control id {} of the block has no place here", control.distance()),
            },
            Self::Text => f.write_str("text outside of any channel"),
            Self::Syntax => f.write_str("a tag that is not a name and attributes"),
            Self::Long { given } => write!(f, "a tag of more than {given} bytes"),
            Self::Unknown => f.write_str("a tag of an unknown name"),
            Self::Nesting { tag, inside } => write!(f, "\"{}\" was opened inside of {}", tag.name(), name(inside)),
            Self::Close { tag, open } => write!(f, "\"{}\" was closed inside of {}", tag.name(), name(open)),
            Self::Unclosed { tag } => write!(f, "the message ended inside of \"{}\"", tag.name()),
        }
    }
}

impl core::error::Error for Malformed {}

/// The attributes of a tag, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'e> {
    /// ` key="value" key="value"`
    raw: &'e str,
}

/// An attribute's value as it is on the wire; shown, it is what it means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value<'e>(&'e str);

impl<'e> Attributes<'e> {
    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'e str, Value<'e>)> {
        let mut rest = self.raw;
        core::iter::from_fn(move || {
            let (key, value, behind) = attribute(rest)?;
            rest = behind;
            Some((key, Value(value)))
        })
    }

    /// The first of this key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Value<'e>> {
        self.iter().find(|(found, _)| *found == key).map(|(_, value)| value)
    }
}

impl Value<'_> {
    /// The characters it means.
    pub fn chars(&self) -> impl Iterator<Item = char> {
        let mut rest = self.0;
        core::iter::from_fn(move || {
            for (escape, c) in [("&quot;", '"'), ("&amp;", '&')] {
                if let Some(behind) = rest.strip_prefix(escape) {
                    rest = behind;
                    return Some(c);
                }
            }
            let mut chars = rest.chars();
            let c = chars.next();
            rest = chars.as_str();
            c
        })
    }
}

impl core::fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        use core::fmt::Write as _;
        self.chars().try_for_each(|c| f.write_char(c))
    }
}

impl PartialEq<str> for Value<'_> {
    fn eq(&self, other: &str) -> bool {
        self.chars().eq(other.chars())
    }
}

/// The first attribute of ` key="value"...`, and what is behind it.
fn attribute(text: &str) -> Option<(&str, &str, &str)> {
    let (key, rest) = split(text.strip_prefix(' ')?, b'=')?;
    let (value, rest) = split(rest.strip_prefix('"')?, b'"')?;
    (!key.is_empty() && !key.contains([' ', '"'])).then_some((key, value, rest))
}

/// What is before the first `at`, an ASCII character, and what is behind it.
///
/// `str::split_once` keeps a bounds check that the optimiser does not see through (`cross/no-panic`).
fn split(text: &str, at: u8) -> Option<(&str, &str)> {
    let place = text.bytes().position(|b| b == at)?;
    Some((text.get(..place)?, text.get(place.saturating_add(1)..)?))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a body, or between tags.
    Body,
    /// Behind `open` or `close`, before `sep`.
    Tag { closing: bool },
    /// Behind the end.
    Ended,
    /// Malformed: waits for the end.
    Lost,
}

/// Depth of the deepest tag: message, tools, call, argument.
const DEPTH: usize = 4;

/// Reads what the model writes. See [`Start`] for where it begins.
///
/// ```
/// use k3_core::chat::{Event, Parser, Part, Start, TAG_BYTES, Tag};
/// use k3_core::tokenizer::Control;
///
/// let mut buffer = [0; TAG_BYTES];
/// let mut parser = Parser::new(Start::Response, &mut buffer);
/// let mut answer = Vec::new();
/// let close = [Part::Control(Control::CLOSE), Part::Text(b"response"), Part::Control(Control::SEP)];
/// for part in [&[Part::Text(b"It is "), Part::Text(b"a tag.")][..], &close].concat() {
///     parser.push(part, |event| {
///         if let Event::Text { tag: Tag::Response, bytes } = event {
///             answer.extend_from_slice(bytes);
///         }
///     })?;
/// }
/// assert_eq!(answer, b"It is a tag.");
/// assert_eq!(parser.open(), Some(Tag::Message));
/// # Ok::<(), k3_core::chat::Malformed>(())
/// ```
#[derive(Debug)]
pub struct Parser<'b> {
    /// The text of the tag that is being read.
    buffer: &'b mut [u8],
    len: usize,
    stack: [Tag; DEPTH],
    depth: usize,
    /// Whether the open message has channels: then text outside of them is none of its body.
    channels: bool,
    state: State,
}

impl<'b> Parser<'b> {
    /// A parser with a buffer for the text of one tag; [`TAG_BYTES`] are plenty.
    #[must_use]
    pub const fn new(start: Start, buffer: &'b mut [u8]) -> Self {
        let (stack, depth) = match start {
            Start::Outside => ([Tag::Message; DEPTH], 0),
            Start::Think => ([Tag::Message, Tag::Think, Tag::Message, Tag::Message], 2),
            Start::Response => ([Tag::Message, Tag::Response, Tag::Message, Tag::Message], 2),
        };
        Self { buffer, len: 0, stack, depth, channels: depth > 0, state: State::Body }
    }

    /// The innermost open tag.
    #[must_use]
    pub fn open(&self) -> Option<Tag> {
        self.stack.get(self.depth.checked_sub(1)?).copied()
    }

    /// All open tags, outermost first.
    #[must_use]
    pub fn opened(&self) -> &[Tag] {
        self.stack.get(..self.depth).unwrap_or_default()
    }

    /// Whether the ids so far end within a tag.
    #[must_use]
    pub const fn in_tag(&self) -> bool {
        matches!(self.state, State::Tag { .. })
    }

    /// Whether something was malformed.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        matches!(self.state, State::Lost)
    }

    /// Takes the next id, as a control or as the bytes of a token, and hands out what it completes. White
    /// space between tags is passed over.
    ///
    /// # Errors
    /// [`Malformed`], once: from then on texts are passed over until the end comes, so what was found before
    /// is a result to use.
    pub fn push(&mut self, part: Part<'_>, mut event: impl FnMut(Event<'_>)) -> Result<(), Malformed> {
        let result = self.step(part, &mut event);
        let end = matches!(part, Part::Control(Control::END_OF_MSG | Control::EOS));
        if result.is_err() && !end {
            self.state = State::Lost;
        }
        result
    }

    fn step(&mut self, part: Part<'_>, event: &mut dyn FnMut(Event<'_>)) -> Result<(), Malformed> {
        match (self.state, part) {
            (State::Ended, Part::Control(Control::OPEN)) if self.depth == 0 => {
                self.state = State::Tag { closing: false };
                self.len = 0;
            }
            (_, Part::Control(Control::END_OF_MSG | Control::EOS)) => {
                let lost = core::mem::replace(&mut self.state, State::Ended);
                let open = self.open();
                self.depth = 0;
                event(Event::End);
                match (lost, open) {
                    (State::Tag { .. }, _) => return Err(Malformed::Syntax),
                    (State::Body, Some(tag)) => return Err(Malformed::Unclosed { tag }),
                    _ => {}
                }
            }
            // An empty text says nothing, so nobody is told.
            (State::Lost, _) | (_, Part::Text([])) => {}
            (State::Body, Part::Control(control @ (Control::OPEN | Control::CLOSE))) => {
                self.state = State::Tag { closing: control == Control::CLOSE };
                self.len = 0;
            }
            (State::Tag { closing }, Part::Control(Control::SEP)) => {
                self.state = State::Body;
                self.tag(closing, event)?;
            }
            (_, Part::Control(control)) => return Err(Malformed::Control { control }),
            (State::Tag { .. }, Part::Text(bytes)) => {
                let long = Malformed::Long { given: self.buffer.len() };
                // By length and not by range, so that the compiler sees that the copy fits.
                let place = self.buffer.get_mut(self.len..).and_then(|rest| rest.get_mut(..bytes.len())).ok_or(long)?;
                place.copy_from_slice(bytes);
                self.len = self.len.saturating_add(bytes.len());
            }
            (State::Body | State::Ended, Part::Text(bytes)) => match self.open() {
                Some(tag) if tag.has_text() && !(tag == Tag::Message && self.channels) => {
                    event(Event::Text { tag, bytes });
                }
                _ if bytes.iter().all(u8::is_ascii_whitespace) => {}
                _ => return Err(Malformed::Text),
            },
        }
        Ok(())
    }

    /// A tag's text is complete.
    fn tag(&mut self, closing: bool, event: &mut dyn FnMut(Event<'_>)) -> Result<(), Malformed> {
        let open = self.open();
        let text = core::str::from_utf8(self.buffer.get(..self.len).unwrap_or_default());
        let text = text.map_err(|_| Malformed::Syntax)?;
        let name = text.split(' ').next().unwrap_or_default();
        let raw = text.get(name.len()..).unwrap_or_default();
        let tag = Tag::by_name(name).ok_or(Malformed::Unknown)?;
        if closing {
            if !raw.is_empty() {
                return Err(Malformed::Syntax);
            }
            if open != Some(tag) {
                return Err(Malformed::Close { tag, open });
            }
            self.depth = self.depth.saturating_sub(1);
            event(Event::Close { tag });
            return Ok(());
        }
        let mut rest = raw;
        while !rest.is_empty() {
            (_, _, rest) = attribute(rest).ok_or(Malformed::Syntax)?;
        }
        let nesting = Malformed::Nesting { tag, inside: open };
        if !tag.inside(open) {
            return Err(nesting);
        }
        *self.stack.get_mut(self.depth).ok_or(nesting)? = tag;
        self.depth = self.depth.saturating_add(1);
        self.channels = tag != Tag::Message;
        event(Event::Open { tag, attributes: Attributes { raw } });
        Ok(())
    }
}
