//! Conversations as JSON, in the form of the OpenAI API, and what the model answered.

use crate::fail::Failure;
use k3_core::chat::{
    Call, ChatError, Effort, Event, Malformed, Message, Parser, Part, Prompt, RenderError, ResponseFormat, Start,
    TAG_BYTES, Tag, Thinking, ToolChoice, Unwritten,
};
use k3_core::json;
use k3_core::tokenizer::Control;
use k3_core::view::TokenId;
use k3_platform::error::Error;
use k3_platform::vocabulary::Vocabulary;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// A call that owns its parts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnCall {
    /// What its result is told by.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// JSON, as it was written.
    pub arguments: String,
}

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Who runs the model.
    System,
    /// Who talks with it.
    User,
    /// The model.
    Assistant,
    /// What the model has called.
    Tool,
}

/// A message that owns its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// Who says it.
    pub role: Role,
    /// Who it is; of a result, the tool.
    pub name: Option<String>,
    /// What is said.
    pub content: Vec<u8>,
    /// What the model thought.
    pub reasoning: Vec<u8>,
    /// What the model calls.
    pub calls: Vec<OwnCall>,
    /// Of a result: the call's.
    pub id: Option<String>,
}

impl Own {
    pub(crate) fn new(role: Role, content: impl Into<Vec<u8>>) -> Self {
        Self { role, name: None, content: content.into(), reasoning: Vec::new(), calls: Vec::new(), id: None }
    }

    /// It as JSON; bytes that are not UTF-8 are replaced.
    #[must_use]
    pub fn json(&self) -> Value {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let role = match self.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        };
        let mut object = json!({"role": role, "content": text(&self.content)});
        if let Some(name) = &self.name {
            object["name"] = json!(name);
        }
        if let Some(id) = &self.id {
            object["tool_call_id"] = json!(id);
        }
        if self.role == Role::Assistant {
            object["reasoning_content"] = json!(text(&self.reasoning));
        }
        if !self.calls.is_empty() {
            let call = |call: &OwnCall| {
                json!({
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                })
            };
            object["tool_calls"] = self.calls.iter().map(call).collect();
        }
        object
    }
}

/// A conversation and what goes with it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Talk {
    /// What was said.
    pub messages: Vec<Own>,
    /// A JSON list.
    pub tools: Option<String>,
    /// How the model is to think, if it says so.
    pub thinking: Option<Thinking>,
}

/// The faults of JSON that is no conversation.
fn refuse<T>(what: impl std::fmt::Display) -> Result<T, Failure> {
    Err(Failure::usage(format!("messages: {what}"), "--messages takes a JSON list of {\"role\", \"content\"} objects"))
}

/// Refused in the core's words.
pub(crate) fn unwritten<T>(what: Unwritten) -> Result<T, Failure> {
    Err(Failure::usage(ChatError::Unwritten(what).to_string(), "leave it out"))
}

/// Refuses JSON that has one meaning when it is written and another when it is read: a key that an object has
/// twice, of which only the last would count, and integers that no 64 bits hold.
pub(crate) fn one_meaning(bytes: &[u8]) -> Result<(), String> {
    let mut parser = json::Parser::new(bytes);
    // The keys of each object that is open.
    let mut open: Vec<HashSet<String>> = Vec::new();
    while let Some(event) = parser.next().map_err(|e| e.to_string())? {
        match event {
            json::Event::ObjectStart => open.push(HashSet::new()),
            json::Event::ObjectEnd => {
                open.pop();
            }
            json::Event::Key(key) => {
                let key: String = key.chars().collect();
                if open.last_mut().is_some_and(|keys| !keys.insert(key.clone())) {
                    return Err(format!("byte {}: an object has {key:?} twice", parser.consumed()));
                }
            }
            json::Event::Number(n) if !n.text().contains(['.', 'e', 'E']) => {
                let text = n.text();
                if text == "-0" || text.parse::<i64>().is_err() && text.parse::<u64>().is_err() {
                    return Err(format!("byte {}: {text} does not fit a number of 64 bits", parser.consumed()));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The members of an object, each of which must be known. Null is as good as absent.
fn known<'j>(value: &'j Value, what: &str, keys: &[&str]) -> Result<&'j Map<String, Value>, Failure> {
    let Some(object) = value.as_object() else { return refuse(format!("{what} is not an object")) };
    match object.iter().find(|(key, value)| !keys.contains(&key.as_str()) && !value.is_null()) {
        Some((key, _)) => refuse(format!("{what} has an unknown member {key:?}, which would be ignored")),
        None => Ok(object),
    }
}

fn string(object: &Map<String, Value>, key: &str, what: &str) -> Result<Option<String>, Failure> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => refuse(format!("{what}: {key} is not a string")),
    }
}

/// A body: a string, nothing, or a list of texts.
fn body(value: Option<&Value>, what: &str) -> Result<String, Failure> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for part in parts {
                match part.get("type").and_then(Value::as_str) {
                    Some("text") => {
                        let part = known(part, &format!("{what}: a part"), &["type", "text"])?;
                        text += &string(part, "text", what)?.unwrap_or_default();
                    }
                    Some("image_url" | "input_audio" | "file" | "image" | "video_url") => {
                        return unwritten(Unwritten::Media);
                    }
                    _ => return refuse(format!("{what}: a part of content has no known type")),
                }
            }
            Ok(text)
        }
        Some(_) => refuse(format!("{what}: content is neither a string nor a list")),
    }
}

impl Talk {
    /// Reads a list of messages, or an object that holds one with tools and the like.
    ///
    /// # Errors
    /// As usage: what is no conversation, and what would be ignored.
    pub fn parse(bytes: &[u8]) -> Result<Self, Failure> {
        let json: Value = match serde_json::from_slice(bytes) {
            Ok(json) => json,
            Err(error) => return refuse(format!("not JSON: {error}")),
        };
        if let Err(fault) = one_meaning(bytes) {
            return refuse(fault);
        }
        let mut talk = Self::default();
        let list = if json.is_array() {
            &json
        } else {
            let keys = ["messages", "tools", "tool_choice", "response_format", "reasoning_effort"];
            let object = known(&json, "the document", &keys)?;
            talk.tools = object.get("tools").filter(|tools| !tools.is_null()).map(Value::to_string);
            let choice = match object.get("tool_choice") {
                None | Some(Value::Null) => ToolChoice::Auto,
                Some(Value::String(auto)) if auto == "auto" => ToolChoice::Auto,
                Some(Value::String(none)) if none == "none" => ToolChoice::None,
                Some(_) => ToolChoice::Required,
            };
            if choice != ToolChoice::Auto {
                return unwritten(Unwritten::ToolChoice);
            }
            let format = match object.get("response_format") {
                None | Some(Value::Null) => ResponseFormat::Text,
                Some(format) if format.get("type").and_then(Value::as_str) == Some("text") => ResponseFormat::Text,
                Some(_) => ResponseFormat::JsonObject,
            };
            if format != ResponseFormat::Text {
                return unwritten(Unwritten::ResponseFormat);
            }
            if let Some(effort) = string(object, "reasoning_effort", "the document")? {
                let Some(effort) = Effort::by_name(&effort) else {
                    return refuse(format!("reasoning_effort {effort:?}: it is low, high or max"));
                };
                talk.thinking = Some(Thinking::On(Some(effort)));
            }
            object.get("messages").unwrap_or(&Value::Null)
        };
        let Some(list) = list.as_array() else { return refuse("there is no list of messages") };
        for (i, message) in list.iter().enumerate() {
            talk.push(message, &format!("message {i}"))?;
        }
        Ok(talk)
    }

    fn push(&mut self, value: &Value, what: &str) -> Result<(), Failure> {
        let role = match value.get("role").and_then(Value::as_str) {
            Some("system") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("tool") => Role::Tool,
            Some(role) => return refuse(format!("{what}: role {role:?} is not system, user, assistant or tool")),
            None => return refuse(format!("{what} has no role")),
        };
        let keys: &[&str] = match role {
            Role::System => &["role", "content", "name", "tools"],
            Role::User => &["role", "content", "name"],
            Role::Assistant => &["role", "content", "name", "reasoning_content", "tool_calls"],
            Role::Tool => &["role", "content", "name", "tool_call_id"],
        };
        let object = known(value, what, keys)?;
        let none = |tools: &Value| tools.is_null() || tools.as_array().is_some_and(Vec::is_empty);
        if object.get("tools").is_some_and(|tools| !none(tools)) {
            return unwritten(Unwritten::SystemTools);
        }
        let mut own = Own::new(role, body(object.get("content"), what)?);
        own.name = string(object, "name", what)?;
        own.reasoning = string(object, "reasoning_content", what)?.unwrap_or_default().into_bytes();
        own.id = string(object, "tool_call_id", what)?;
        match object.get("tool_calls") {
            None | Some(Value::Null) => {}
            Some(Value::Array(calls)) => {
                for call in calls {
                    let what = format!("{what}: a tool call");
                    let call = known(call, &what, &["id", "type", "function", "index"])?;
                    let function = known(call.get("function").unwrap_or(&Value::Null), &what, &["name", "arguments"])?;
                    let Some(name) = string(function, "name", &what)? else {
                        return refuse(format!("{what} has no function.name"));
                    };
                    let arguments = match function.get("arguments") {
                        None | Some(Value::Null) => "{}".to_owned(),
                        Some(Value::String(text)) => text.clone(),
                        Some(object) => object.to_string(),
                    };
                    own.calls.push(OwnCall { id: string(call, "id", &what)?, name, arguments });
                }
            }
            Some(_) => return refuse(format!("{what}: tool_calls is not a list")),
        }
        if role == Role::Tool && own.name.is_none() {
            // The tool is the one that was called.
            let calls = self.messages.iter().rev().find(|m| m.role == Role::Assistant).map_or(&[][..], |m| &m.calls);
            own.name = calls.iter().find(|call| call.id.is_some() && call.id == own.id).map(|call| call.name.clone());
            if own.name.is_none() {
                return refuse(format!("{what}: a tool's result needs the tool's name, or the tool_call_id of a call"));
            }
        }
        self.messages.push(own);
        Ok(())
    }

    /// The list of messages as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        self.messages.iter().map(Own::json).collect()
    }
}

fn calls_of(own: &Own) -> Vec<Call<'_>> {
    own.calls.iter().map(|call| Call { id: call.id.as_deref(), name: &call.name, arguments: &call.arguments }).collect()
}

/// The ids of a conversation, or of the messages that follow one which is in the model's state; `after` is
/// the message before them.
///
/// # Errors
/// As usage: a conversation that the model's form cannot say.
pub fn render(
    vocabulary: &Vocabulary<'_>,
    messages: &[Own],
    tools: Option<&str>,
    thinking: Thinking,
    after: Option<&Own>,
) -> Result<Vec<TokenId>, Failure> {
    let calls: Vec<Vec<Call<'_>>> = messages.iter().map(calls_of).collect();
    let list: Vec<Message<'_>> = messages
        .iter()
        .zip(&calls)
        .map(|(own, calls)| {
            let (name, content) = (own.name.as_deref(), &own.content[..]);
            match own.role {
                Role::System => Message::System { name, content, tools: None },
                Role::User => Message::User { name, content },
                Role::Assistant => Message::Assistant { name, reasoning: &own.reasoning, content, calls },
                Role::Tool => Message::Tool { name: name.unwrap_or_default(), id: own.id.as_deref(), content },
            }
        })
        .collect();
    let prompt = Prompt { tools, thinking, ..Prompt::new(&list) };
    let before = after.map(calls_of);
    vocabulary.render(&prompt, before.as_deref()).map_err(|error| match error {
        RenderError::Part(error) => error.into(),
        RenderError::Refused(error) => Failure::usage(error.to_string(), "nothing was read or computed"),
        _ => Error::Order.into(),
    })
}

/// A message while its ids arrive.
#[derive(Debug)]
struct Growing {
    message: Own,
    /// `type` of a system message that is not a person's.
    kind: Option<String>,
    arguments: Vec<(String, String, Vec<u8>)>,
    raw: Option<Vec<u8>>,
}

impl Growing {
    fn new(role: Role) -> Self {
        Self { message: Own::new(role, Vec::new()), kind: None, arguments: Vec::new(), raw: None }
    }

    fn take(&mut self, event: &Event<'_>) {
        match *event {
            Event::Open { tag: Tag::Call, attributes } => {
                let name = attributes.get("tool").map(|v| v.to_string()).unwrap_or_default();
                let id = Some(format!("call_{}", self.message.calls.len() + 1));
                self.message.calls.push(OwnCall { id, name, arguments: String::new() });
                (self.arguments, self.raw) = (Vec::new(), None);
            }
            Event::Open { tag: Tag::Argument, attributes } => {
                let text = |key| attributes.get(key).map(|v| v.to_string()).unwrap_or_default();
                self.arguments.push((text("key"), text("type"), Vec::new()));
            }
            Event::Open { tag: Tag::Json, .. } => self.raw = Some(Vec::new()),
            Event::Text { tag, bytes } => match tag {
                Tag::Think => self.message.reasoning.extend_from_slice(bytes),
                Tag::Response | Tag::Message => self.message.content.extend_from_slice(bytes),
                Tag::Argument => {
                    if let Some((.., value)) = self.arguments.last_mut() {
                        value.extend_from_slice(bytes);
                    }
                }
                Tag::Json => self.raw.get_or_insert_default().extend_from_slice(bytes),
                Tag::Tools | Tag::Call => {}
            },
            Event::Close { tag: Tag::Call } => self.end_call(),
            Event::Open { .. } | Event::Close { .. } | Event::End => {}
        }
    }

    /// Arguments as JSON: strings are quoted, all else is JSON already and stays as it is written, or is kept as
    /// text if it is not. Of a key that comes twice the last one counts.
    fn end_call(&mut self) {
        let Some(call) = self.message.calls.last_mut() else { return };
        call.arguments = match self.raw.take() {
            Some(raw) => String::from_utf8_lossy(&raw).into_owned(),
            None => {
                let mut members: Vec<(String, String)> = Vec::new();
                for (key, kind, value) in self.arguments.drain(..) {
                    let text = String::from_utf8_lossy(&value).into_owned();
                    let is_json = kind != "string" && serde_json::from_str::<Value>(&text).is_ok();
                    let value = if is_json { text } else { Value::String(text).to_string() };
                    match members.iter_mut().find(|(other, _)| *other == key) {
                        Some((_, last)) => *last = value,
                        None => members.push((key, value)),
                    }
                }
                let members = members.into_iter().map(|(key, value)| format!("{}:{value}", Value::String(key)));
                format!("{{{}}}", members.collect::<Vec<_>>().join(","))
            }
        };
    }
}

/// What a stretch of ids says, id by id.
#[derive(Debug)]
pub struct Reader<'b> {
    parser: Parser<'b>,
    growing: Growing,
    /// Messages that have ended.
    pub done: Vec<Own>,
    /// The first thing that was wrong.
    pub malformed: Option<Malformed>,
    /// Ids that were taken.
    taken: usize,
    /// How many there were when the tag began that was begun last.
    tag_at: usize,
    /// Whether a channel for the answer was there.
    answered: bool,
    /// Whether a message was closed, and its end has not come.
    closed: bool,
    /// Whether the last message of the assistant had a thinking channel.
    pub thought: bool,
    /// What the head says: declarations of tools.
    pub tools: Option<String>,
    /// What the head says: the effort of thinking.
    pub effort: Option<Effort>,
}

/// What has to be said for a message that was cut short to be whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// These ids, after some of those that were taken.
    Ids {
        /// How many of those stay.
        keep: usize,
        /// What follows them.
        more: Vec<TokenId>,
    },
    /// Nothing would help.
    Lost,
}

impl<'b> Reader<'b> {
    /// A reader that stands at `start`.
    pub fn new(start: Start, buffer: &'b mut [u8; TAG_BYTES]) -> Self {
        let answered = start == Start::Response;
        let growing = Growing::new(Role::Assistant);
        let parser = Parser::new(start, buffer);
        Self {
            parser,
            growing,
            done: Vec::new(),
            malformed: None,
            taken: 0,
            tag_at: 0,
            answered,
            closed: false,
            thought: start == Start::Think,
            tools: None,
            effort: None,
        }
    }

    /// Takes an id, and hands out what it adds to a body.
    pub fn push(&mut self, vocabulary: &Vocabulary<'_>, id: TokenId, mut text: impl FnMut(Tag, &[u8])) {
        let mut bytes = Vec::new();
        let part = match vocabulary.control(id) {
            Some(control) => Part::Control(control),
            None => {
                vocabulary.decode(id, &mut bytes);
                Part::Text(&bytes)
            }
        };
        if matches!(part, Part::Control(Control::OPEN | Control::CLOSE)) && !self.parser.in_tag() {
            self.tag_at = self.taken;
        }
        self.taken += 1;
        let Self { growing, done, answered, closed, thought, tools, effort, .. } = self;
        let result = self.parser.push(part, |event| {
            match event {
                Event::Open { tag: Tag::Message, attributes } => {
                    let get = |key| attributes.get(key).map(|v| v.to_string());
                    *growing = Growing::new(match get("role").as_deref() {
                        Some("system") => Role::System,
                        Some("user") => Role::User,
                        Some("tool") => Role::Tool,
                        _ => Role::Assistant,
                    });
                    growing.message.name = get("tool").or_else(|| get("name"));
                    growing.kind = get("type");
                    (*answered, *thought) = (false, *thought && growing.message.role != Role::Assistant);
                }
                Event::Open { tag: Tag::Think, .. } => *thought = true,
                Event::Close { tag: Tag::Message } => *closed = true,
                Event::Open { tag: Tag::Response, .. } => *answered = true,
                Event::Text { tag, bytes } => text(tag, bytes),
                _ => {}
            }
            growing.take(&event);
            if event == Event::End {
                let ended = std::mem::replace(growing, Growing::new(Role::Assistant));
                *closed = false;
                // What the head says is no message of the conversation.
                let said = String::from_utf8_lossy(&ended.message.content);
                match ended.kind.as_deref() {
                    None => done.push(ended.message),
                    Some("tool-declare") => {
                        *tools =
                            said.split("```json\n").nth(1).and_then(|t| t.strip_suffix("\n```")).map(str::to_owned);
                    }
                    Some("thinking-effort") => {
                        let name = said.rsplit("thinking_effort=").next().unwrap_or_default();
                        *effort = Effort::by_name(name.trim_end_matches(['`', '.']));
                    }
                    Some(_) => {}
                }
            }
        });
        if let Err(error) = result {
            self.malformed.get_or_insert(error);
        }
    }

    /// The message that has not ended, as far as it goes.
    pub fn unfinished(&mut self) -> Option<Own> {
        if self.parser.opened().contains(&Tag::Call) {
            self.growing.end_call();
        }
        let there = self.closed || !self.parser.opened().is_empty() || self.malformed.is_some();
        there.then(|| self.growing.message.clone())
    }

    /// What makes a whole message of one that was cut short or was not yet ended.
    #[must_use]
    pub fn ending(&self, vocabulary: &Vocabulary<'_>) -> Ending {
        if self.parser.is_lost() || self.malformed.is_some() {
            return Ending::Lost;
        }
        let keep = if self.parser.in_tag() { self.tag_at } else { self.taken };
        let mut more = Vec::new();
        let mut tag = |control: Control, name: &str| {
            let parts = [Part::Control(control), Part::Text(name.as_bytes()), Part::Control(Control::SEP)];
            // Names of tags are a few bytes long.
            parts.into_iter().all(|part| vocabulary.append(part, &mut more).is_ok())
        };
        let mut whole = true;
        for (depth, open) in self.parser.opened().iter().enumerate().rev() {
            if depth == 0 && !self.answered && self.growing.message.role == Role::Assistant {
                whole &= tag(Control::OPEN, Tag::Response.name()) && tag(Control::CLOSE, Tag::Response.name());
            }
            whole &= tag(Control::CLOSE, open.name());
        }
        if !whole {
            return Ending::Lost;
        }
        if self.closed || !self.parser.opened().is_empty() {
            more.push(vocabulary.id(Control::END_OF_MSG));
        }
        Ending::Ids { keep, more }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(json: &str) -> String {
        Talk::parse(json.as_bytes()).expect_err(json).message
    }

    #[test]
    fn messages_are_read_and_written() {
        let json = r#"[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ada"},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{\"k\":1}"}}]},
            {"role": "tool", "tool_call_id": "x", "content": "7"}
        ]"#;
        let talk = Talk::parse(json.as_bytes()).unwrap();
        let roles: Vec<Role> = talk.messages.iter().map(|m| m.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool]);
        assert_eq!(talk.messages[1].content, b"ab");
        assert_eq!(talk.messages[3].name.as_deref(), Some("f"), "the tool that was called");
        let again = Talk::parse(talk.json().to_string().as_bytes()).unwrap();
        assert_eq!(again, talk);
        let object = format!(r#"{{"messages": {json}, "tools": [{{"b": 1}}], "reasoning_effort": "low"}}"#);
        let talk = Talk::parse(object.as_bytes()).unwrap();
        assert_eq!(talk.tools.as_deref(), Some(r#"[{"b":1}]"#));
        assert_eq!(talk.thinking, Some(Thinking::On(Some(Effort::Low))));
    }

    #[test]
    fn what_would_be_ignored_or_guessed_is_refused_by_name() {
        for (json, part) in [
            ("{", "not JSON"),
            ("{}", "no list"),
            ("[1]", "no role"),
            (r#"[{"role": "developer", "content": "x"}]"#, "developer"),
            (r#"[{"role": "user", "content": 1}]"#, "content"),
            (r#"[{"role": "user", "content": "x", "color": 1}]"#, "color"),
            (r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]"#, "image"),
            (r#"[{"role": "user", "content": [{"type": "thing"}]}]"#, "type"),
            (r#"[{"role": "system", "content": "x", "tools": [{}]}]"#, "tools of its own"),
            (r#"[{"role": "tool", "content": "x"}]"#, "tool_call_id"),
            (r#"[{"role": "assistant", "tool_calls": [{"function": {}}]}]"#, "function.name"),
            (r#"{"messages": [], "tool_choice": "required"}"#, "tool choice"),
            (r#"{"messages": [], "response_format": {"type": "json_object"}}"#, "response format"),
            (r#"{"messages": [], "reasoning_effort": "medium"}"#, "medium"),
            (r#"{"messages": [], "temperature": 1}"#, "temperature"),
            (r#"[{"role": "user", "content": "a", "content": "b"}]"#, "\"content\" twice"),
            (r#"{"messages": [], "tools": [{"n": 18446744073709551616}]}"#, "18446744073709551616"),
            (r#"{"messages": [], "tools": [{"n": [-0]}]}"#, "64 bits"),
        ] {
            let message = refused(json);
            assert!(message.contains(part), "{json}: {message}");
        }
    }

    /// Wherever a conversation is cut, it can be made whole, and is read as what it was.
    #[test]
    fn a_conversation_that_was_cut_is_made_whole() {
        use k3_platform::checkpoint::Checkpoint;
        use k3_platform::io::{Disk, Mode};
        use k3_platform::vocabulary::VocabularyFiles;
        let dir = k3_tests::root().join("fixtures/tiny");
        let checkpoint = Checkpoint::open(&dir, std::sync::Arc::new(Disk::new(Mode::Buffered))).unwrap();
        let mut files = VocabularyFiles::open(&checkpoint).unwrap();
        let vocabulary = files.load().unwrap();
        let json = r#"[{"role": "system", "content": "S"}, {"role": "user", "content": "u <|sep|>", "name": "a\"&b"},
            {"role": "assistant", "content": "c", "reasoning_content": "r", "tool_calls": [
                {"id": "call_1", "function": {"name": "f\"", "arguments": "{\"k\":\"v\",\"n\":[1,{},123456789012345678901]}"}},
                {"id": "call_2", "function": {"name": "g", "arguments": "raw"}}]},
            {"role": "tool", "name": "f\"", "content": "7"}, {"role": "user", "content": ""}]"#;
        let talk = Talk::parse(json.as_bytes()).unwrap();
        let tools = r#"[{"type":"function"}]"#;
        let read = |ids: &[TokenId], check: &mut dyn FnMut(&mut Reader<'_>)| {
            let mut buffer = [0; TAG_BYTES];
            let mut reader = Reader::new(Start::Outside, &mut buffer);
            ids.iter().for_each(|&id| reader.push(&vocabulary, id, |_, _| {}));
            check(&mut reader);
        };
        for thinking in [Thinking::On(Some(Effort::High)), Thinking::Off] {
            let ids = render(&vocabulary, &talk.messages, Some(tools), thinking, None).unwrap();
            read(&ids, &mut |reader| {
                assert_eq!((reader.malformed, reader.thought), (None, thinking != Thinking::Off));
                assert_eq!(reader.tools.as_deref(), Some(tools));
                assert_eq!(reader.effort, (thinking != Thinking::Off).then_some(Effort::High));
                let mut expected = talk.messages.clone();
                if thinking == Thinking::Off {
                    expected.iter_mut().for_each(|m| m.reasoning.clear());
                }
                assert_eq!(reader.done, expected);
            });
            for cut in 0..=ids.len() {
                let mut whole = Vec::new();
                let mut count = 0;
                read(&ids[..cut], &mut |reader| {
                    assert_eq!(reader.malformed, None);
                    count = reader.done.len() + usize::from(reader.unfinished().is_some());
                    let Ending::Ids { keep, more } = reader.ending(&vocabulary) else { panic!("lost at {cut}") };
                    whole = [&ids[..keep], &more].concat();
                });
                read(&whole, &mut |reader| {
                    assert_eq!((reader.malformed, reader.unfinished()), (None, None), "cut at {cut}");
                    assert!(reader.done.len() <= count && reader.done.len() + 1 >= count, "cut at {cut}");
                    assert_eq!(reader.ending(&vocabulary), Ending::Ids { keep: whole.len(), more: Vec::new() });
                });
            }
        }
    }
}
