//! Messages to parts.

use super::canonical::{Fault, KEYS, Order, Text, check, members, unique, value};
use super::{
    Call, ChatError, Effort, Message, Part, Prompt, ResponseFormat, TAG_BYTES, Thinking, ToolChoice, Unwritten,
};
use crate::carve::Line;
use crate::json::{Event, Parser};
use crate::tokenizer::{Control, EncodeError, Specials, Vocab, encode};
use crate::view::TokenId;

const TOOLS_HEAD: &[u8] = b"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
const TOOLS_TAIL: &[u8] = b"\n```";
const EFFORT_HEAD: &[u8] =
    b"`thinking_effort` guides on how much to think in your thinking channel (not including the \
response channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with \
`thinking_effort=";
const EFFORT_TAIL: &[u8] = b"`.";

/// Why rendering stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenderError<E> {
    /// The conversation is refused, or the buffer is too short.
    Refused(ChatError),
    /// What the receiver of the parts answered.
    Part(E),
}

impl<E: core::fmt::Display> core::fmt::Display for RenderError<E> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Refused(error) => error.fmt(f),
            Self::Part(error) => error.fmt(f),
        }
    }
}

// What is shown is the inner error; its cause is the next.
impl<E: core::error::Error> core::error::Error for RenderError<E> {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::Refused(error) => error.source(),
            Self::Part(error) => error.source(),
        }
    }
}

impl<E> From<ChatError> for RenderError<E> {
    fn from(error: ChatError) -> Self {
        Self::Refused(error)
    }
}

impl Prompt<'_> {
    /// Hands the parts of the whole prompt to `part`, up to where the model goes on.
    ///
    /// `text` is where texts that the caller does not have in one piece are composed: tool declarations,
    /// arguments, escaped attribute values. [`Prompt::text_len`] says how long it must be.
    ///
    /// # Errors
    /// [`RenderError`]; some parts may have been handed out.
    ///
    /// **Source.** Spec 5.4.
    pub fn render<E>(
        &self,
        text: &mut [u8],
        part: impl FnMut(Part<'_>) -> Result<(), E>,
    ) -> Result<(), RenderError<E>> {
        Writer { text, longest: 0, tag: None, measure: false, part }.prompt(self)
    }

    /// Like [`Prompt::render`], for messages that follow a conversation the model has in its state: the
    /// messages and what makes it answer, without the head. `calls` are those of the assistant's message
    /// before, whose results may be among the messages.
    ///
    /// # Errors
    /// [`RenderError`]; some parts may have been handed out.
    pub fn render_more<E>(
        &self,
        calls: &[Call<'_>],
        text: &mut [u8],
        part: impl FnMut(Part<'_>) -> Result<(), E>,
    ) -> Result<(), RenderError<E>> {
        Writer { text, longest: 0, tag: None, measure: false, part }.more(self, calls)
    }

    /// Bytes of the longest text that has to be composed; 0 if none has.
    ///
    /// # Errors
    /// [`ChatError`] if the conversation is refused.
    pub fn text_len(&self) -> Result<usize, ChatError> {
        let part = |_: Part<'_>| Ok::<(), core::convert::Infallible>(());
        let mut writer = Writer { text: &mut [], longest: 0, tag: None, measure: true, part };
        match writer.prompt(self) {
            Ok(()) => Ok(writer.longest),
            Err(RenderError::Refused(error)) => Err(error),
            Err(RenderError::Part(never)) => match never {},
        }
    }

    /// The ids of the whole prompt. `scratch` is the tokenizer's, for the longest piece of any text.
    ///
    /// # Errors
    /// [`RenderError`]; some ids may have been handed out.
    pub fn encode(
        &self,
        vocab: &Vocab<'_>,
        specials: &Specials<'_>,
        text: &mut [u8],
        scratch: &mut [Line],
        mut out: impl FnMut(TokenId),
    ) -> Result<(), RenderError<EncodeError>> {
        self.render(text, |part| match part {
            Part::Control(control) => {
                out(specials.id(control));
                Ok(())
            }
            Part::Text(bytes) => encode(vocab, bytes, scratch, &mut out),
        })
    }
}

/// How the bytes of a body come about.
enum Body<'a> {
    Bytes(&'a [u8]),
    Tools(&'a str),
    Effort(Effort),
}

/// The id of the call that a message is the result of.
const fn answered<'a>(message: &Message<'a>) -> Option<&'a str> {
    match *message {
        Message::Tool { id, .. } => id,
        _ => None,
    }
}

/// Whether two messages name the same call.
fn same(a: Option<&str>, b: Option<&str>) -> bool {
    #[cfg(test)]
    super::tests::compared();
    a.is_some() && a == b
}

/// Whether there are tools in a list of declarations. An empty list is as good as none (spec 5.4: "if tools").
fn declares(tools: &str) -> Result<bool, ChatError> {
    let json = tools.as_bytes();
    check(json).map_err(ChatError::Tools)?;
    let mut parser = Parser::new(json);
    if parser.next() != Ok(Some(Event::ArrayStart)) {
        return Err(ChatError::ToolsArray);
    }
    Ok(parser.next() != Ok(Some(Event::ArrayEnd)))
}

struct Writer<'b, F> {
    text: &'b mut [u8],
    /// Bytes of the longest composed text so far.
    longest: usize,
    /// Bytes of the tag that is being written.
    tag: Option<usize>,
    /// Texts that do not fit are only counted.
    measure: bool,
    part: F,
}

type Attribute<'a> = (&'a str, &'a str);

impl<E, F: FnMut(Part<'_>) -> Result<(), E>> Writer<'_, F> {
    fn prompt(&mut self, prompt: &Prompt<'_>) -> Result<(), RenderError<E>> {
        if prompt.tool_choice != ToolChoice::Auto {
            return Err(ChatError::Unwritten(Unwritten::ToolChoice).into());
        }
        if prompt.response_format != ResponseFormat::Text {
            return Err(ChatError::Unwritten(Unwritten::ResponseFormat).into());
        }
        if let Some(tools) = prompt.tools
            && declares(tools)?
        {
            self.message(&[("role", "system"), ("type", "tool-declare")], &Body::Tools(tools))?;
        }
        if let Thinking::On(Some(effort)) = prompt.thinking {
            self.message(&[("role", "system"), ("type", "thinking-effort")], &Body::Effort(effort))?;
        }
        self.more(prompt, &[])
    }

    fn more(&mut self, prompt: &Prompt<'_>, calls: &[Call<'_>]) -> Result<(), RenderError<E>> {
        let mut calls = calls;
        // Results since the last message of the assistant.
        let mut results = 0;
        let mut rest = prompt.messages;
        while let Some((message, behind)) = rest.split_first() {
            rest = behind;
            match *message {
                Message::System { tools: Some(tools), .. } if declares(tools)? => {
                    return Err(ChatError::Unwritten(Unwritten::SystemTools).into());
                }
                Message::System { name, content, .. } => self.speech("system", name, content)?,
                Message::User { name, content } => self.speech("user", name, content)?,
                Message::Assistant { name, reasoning, content, calls: made } => {
                    self.assistant(prompt.thinking, name, reasoning, content, made)?;
                    (calls, results) = (made, 0);
                }
                Message::Tool { .. } => {
                    let more = behind.iter().take_while(|m| matches!(m, Message::Tool { .. })).count();
                    let all = prompt.messages.len().saturating_sub(behind.len()).saturating_sub(1);
                    let run = prompt.messages.get(all..all.saturating_add(more).saturating_add(1)).unwrap_or_default();
                    results = self.results(run, calls, results)?;
                    rest = behind.get(more..).unwrap_or_default();
                }
            }
        }
        self.open("message", &[("role", "assistant")])?;
        self.open(if prompt.thinking == Thinking::Off { "response" } else { "think" }, &[])
    }

    fn speech(&mut self, role: &str, name: Option<&str>, content: &[u8]) -> Result<(), RenderError<E>> {
        match name {
            Some(name) => self.message(&[("role", role), ("name", name)], &Body::Bytes(content)),
            None => self.message(&[("role", role)], &Body::Bytes(content)),
        }
    }

    fn assistant(
        &mut self,
        thinking: Thinking,
        name: Option<&str>,
        reasoning: &[u8],
        content: &[u8],
        calls: &[Call<'_>],
    ) -> Result<(), RenderError<E>> {
        match name {
            Some(name) => self.open("message", &[("role", "assistant"), ("name", name)])?,
            None => self.open("message", &[("role", "assistant")])?,
        }
        if thinking != Thinking::Off {
            self.element("think", &[], reasoning)?;
        }
        self.element("response", &[], content)?;
        if !calls.is_empty() {
            self.open("tools", &[])?;
            for (i, call) in calls.iter().enumerate() {
                self.call(call, i.saturating_add(1))?;
            }
            self.close("tools")?;
        }
        self.close("message")?;
        self.control(Control::END_OF_MSG)
    }

    fn call(&mut self, call: &Call<'_>, index: usize) -> Result<(), RenderError<E>> {
        let mut number = [0; 20];
        self.open("call", &[("tool", call.name), ("index", decimal(index, &mut number))])?;
        let json = call.arguments.as_bytes();
        let parsed = check(json).is_ok() && Parser::new(json).next() == Ok(Some(Event::ObjectStart));
        if parsed {
            unique(json).map_err(refused)?;
            let mut failed = None;
            let walked = members(json, |key, json| {
                if failed.is_none() {
                    failed = self.argument(key, json).err();
                }
                Ok(())
            });
            walked.map_err(refused)?;
            if let Some(error) = failed {
                return Err(error);
            }
        } else {
            self.element("json", &[("type", "object")], json)?;
        }
        self.close("call")
    }

    fn argument(&mut self, key: crate::json::Str<'_>, json: &[u8]) -> Result<(), RenderError<E>> {
        let event = Parser::new(json).next().map_err(|e| refused(Fault::Json(e)))?;
        let kind = match event {
            Some(Event::Str(_)) => "string",
            Some(Event::Number(_)) => "number",
            Some(Event::Bool(_)) => "boolean",
            Some(Event::ArrayStart) => "array",
            Some(Event::ObjectStart) => "object",
            _ => "null",
        };
        // The key is an attribute's value, but decoded from JSON first.
        self.control(Control::OPEN)?;
        self.plain(b"argument")?;
        self.plain(b" key")?;
        self.plain(b"=\"")?;
        self.composed(|out| {
            key.chars().for_each(|c| escaped(c, out));
            Ok(())
        })?;
        self.plain(b"\"")?;
        self.attribute(("type", kind))?;
        self.control(Control::SEP)?;
        if let Some(Event::Str(text)) = event {
            self.composed(|out| {
                text.chars().for_each(|c| out.put_char(c));
                Ok(())
            })?;
        } else {
            self.composed(|out| value(json, Order::Kept, out))?;
        }
        self.close("argument")
    }

    /// Results of tools that stand together, in the order of the calls if each belongs to another one.
    fn results(&mut self, run: &[Message<'_>], calls: &[Call<'_>], before: usize) -> Result<usize, RenderError<E>> {
        let known = run.iter().all(|m| calls.iter().any(|call| same(call.id, answered(m))));
        let distinct =
            run.iter().enumerate().all(|(i, m)| !run.iter().take(i).any(|other| same(answered(other), answered(m))));
        let mut count = before;
        if known && distinct {
            for (place, call) in calls.iter().enumerate() {
                let Some(message) = run.iter().find(|m| same(answered(m), call.id)) else { continue };
                // Of calls that share an id the first has the result.
                if calls.iter().take(place).any(|earlier| same(earlier.id, call.id)) {
                    continue;
                }
                count = count.saturating_add(1);
                self.result(message, count)?;
            }
        } else {
            for message in run {
                count = count.saturating_add(1);
                self.result(message, count)?;
            }
        }
        Ok(count)
    }

    fn result(&mut self, message: &Message<'_>, index: usize) -> Result<(), RenderError<E>> {
        let Message::Tool { name, content, .. } = *message else { return Ok(()) };
        let mut number = [0; 20];
        let index = decimal(index, &mut number);
        self.message(&[("role", "tool"), ("tool", name), ("index", index)], &Body::Bytes(content))
    }

    fn message(&mut self, attributes: &[Attribute<'_>], body: &Body<'_>) -> Result<(), RenderError<E>> {
        self.open("message", attributes)?;
        match *body {
            Body::Bytes(bytes) => self.plain(bytes)?,
            Body::Effort(effort) => self.composed(|out| {
                [EFFORT_HEAD, effort.name().as_bytes(), EFFORT_TAIL].into_iter().for_each(|part| out.put(part));
                Ok(())
            })?,
            Body::Tools(json) => self.composed(|out| {
                out.put(TOOLS_HEAD);
                value(json.as_bytes(), Order::Sorted, out)?;
                out.put(TOOLS_TAIL);
                Ok(())
            })?,
        }
        self.close("message")?;
        self.control(Control::END_OF_MSG)
    }

    fn element(&mut self, tag: &str, attributes: &[Attribute<'_>], body: &[u8]) -> Result<(), RenderError<E>> {
        self.open(tag, attributes)?;
        self.plain(body)?;
        self.close(tag)
    }

    fn open(&mut self, tag: &str, attributes: &[Attribute<'_>]) -> Result<(), RenderError<E>> {
        self.control(Control::OPEN)?;
        self.plain(tag.as_bytes())?;
        attributes.iter().try_for_each(|&attribute| self.attribute(attribute))?;
        self.control(Control::SEP)
    }

    fn close(&mut self, tag: &str) -> Result<(), RenderError<E>> {
        self.control(Control::CLOSE)?;
        self.plain(tag.as_bytes())?;
        self.control(Control::SEP)
    }

    /// ` key`, `="`, value, `"`: four texts. The longest key here is 5 bytes long.
    fn attribute(&mut self, (key, value): Attribute<'_>) -> Result<(), RenderError<E>> {
        let mut spaced = [b' '; 8];
        let len = key.len().saturating_add(1);
        if let Some(place) = spaced.get_mut(1..len) {
            place.copy_from_slice(key.as_bytes());
        }
        self.plain(spaced.get(..len).unwrap_or_default())?;
        self.plain(b"=\"")?;
        if value.contains(['&', '"']) {
            self.composed(|out| {
                value.chars().for_each(|c| escaped(c, out));
                Ok(())
            })?;
        } else {
            self.plain(value.as_bytes())?;
        }
        self.plain(b"\"")
    }

    fn composed(&mut self, compose: impl FnOnce(&mut Text<'_>) -> Result<(), Fault>) -> Result<(), RenderError<E>> {
        let mut text = Text::new(self.text);
        compose(&mut text).map_err(refused)?;
        self.longest = self.longest.max(text.len());
        self.tag = self.tag.map(|len| len.saturating_add(text.len()));
        match text.finish() {
            Ok(bytes) if !bytes.is_empty() => (self.part)(Part::Text(bytes)).map_err(RenderError::Part),
            Err(error) if !self.measure => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn plain(&mut self, bytes: &[u8]) -> Result<(), RenderError<E>> {
        self.tag = self.tag.map(|len| len.saturating_add(bytes.len()));
        if bytes.is_empty() { Ok(()) } else { (self.part)(Part::Text(bytes)).map_err(RenderError::Part) }
    }

    fn control(&mut self, control: Control) -> Result<(), RenderError<E>> {
        if control == Control::OPEN {
            self.tag = Some(0);
        } else if let Some(len) = self.tag.take().filter(|&len| len > TAG_BYTES) {
            return Err(ChatError::Tag { len, most: TAG_BYTES }.into());
        }
        (self.part)(Part::Control(control)).map_err(RenderError::Part)
    }
}

fn escaped(c: char, out: &mut Text<'_>) {
    match c {
        '&' => out.put(b"&amp;"),
        '"' => out.put(b"&quot;"),
        c => out.put_char(c),
    }
}

fn refused<E>(fault: Fault) -> RenderError<E> {
    RenderError::Refused(match fault {
        Fault::Json(error) => ChatError::Tools(error),
        Fault::Duplicate { offset } => ChatError::DuplicateKey { offset },
        Fault::Keys => ChatError::Keys { most: KEYS },
        Fault::Number => ChatError::Number,
    })
}

/// The digits of `n`.
fn decimal(n: usize, buffer: &mut [u8; 20]) -> &str {
    let (mut rest, mut from) = (n, buffer.len());
    for (at, digit) in buffer.iter_mut().enumerate().rev() {
        *digit = b'0'.wrapping_add(u8::try_from(rest % 10).unwrap_or(0));
        (rest, from) = (rest / 10, at);
        if rest == 0 {
            break;
        }
    }
    core::str::from_utf8(buffer.get(from..).unwrap_or_default()).unwrap_or_default()
}
