//! Conversations as JSON, as `k3 chat --messages` reads them.
#![expect(clippy::missing_panics_doc, reason = "a panic is what a target is for")]

use crate::root;
use k3_bin::messages::{Ending, Reader, Role, Talk, render};
use k3_core::chat::{Start, TAG_BYTES, Thinking};
use k3_platform::checkpoint::Checkpoint;
use k3_platform::io::{Disk, Mode};
use k3_platform::vocabulary::{Vocabulary, VocabularyFiles};
use std::sync::{Arc, OnceLock};

/// The vocabulary of the tiny checkpoint. Its memory is never given back: there is one in a process.
fn vocabulary() -> &'static Vocabulary<'static> {
    static VOCABULARY: OnceLock<Vocabulary<'static>> = OnceLock::new();
    VOCABULARY.get_or_init(|| {
        let dir = root().join("fixtures/tiny");
        let checkpoint = Checkpoint::open(&dir, Arc::new(Disk::new(Mode::Buffered))).expect("opens");
        let files = Box::leak(Box::new(VocabularyFiles::open(&checkpoint).expect("opens")));
        files.load().expect("the tiny vocabulary")
    })
}

/// A conversation is refused in one line, or it is written as it was read; and if the model can be told it,
/// the ids say the same messages.
pub fn messages(data: &[u8]) {
    let talk = match Talk::parse(data) {
        Ok(talk) => talk,
        Err(refused) => {
            let text = refused.message;
            return assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
        }
    };
    let again = Talk::parse(talk.json().to_string().as_bytes()).expect("what was written");
    assert!(again.messages == talk.messages, "written as it was read");

    let vocabulary = vocabulary();
    let thinking = talk.thinking.unwrap_or(Thinking::Off);
    let ids = match render(vocabulary, &talk.messages, talk.tools.as_deref(), thinking, None) {
        Ok(ids) => ids,
        Err(refused) => return assert!(!refused.message.contains(char::is_control), "{:?}", refused.message),
    };
    let mut buffer = [0; TAG_BYTES];
    let mut reader = Reader::new(Start::Outside, &mut buffer);
    ids.iter().for_each(|&id| reader.push(vocabulary, id, |_, _| {}));
    assert_eq!(reader.malformed, None);
    // What is open is the turn of the model.
    assert!(matches!(reader.ending(vocabulary), Ending::Ids { keep, .. } if keep == ids.len()));
    assert_eq!(reader.done.len(), talk.messages.len());
    for (read, said) in reader.done.iter().zip(&talk.messages) {
        assert!(read.role == said.role && read.content == said.content, "{read:?}, {said:?}");
        assert!(read.role != Role::Assistant || read.calls.len() == said.calls.len(), "{read:?}, {said:?}");
        assert!(read.calls.iter().zip(&said.calls).all(|(read, said)| read.name == said.name), "{read:?}, {said:?}");
    }
}

/// Members and values of a conversation, for the mutations of [`messages`].
pub const MEMBERS: &[&str] = &[
    "{\"role\":\"system\",\"content\":\"",
    "{\"role\":\"user\",\"content\":\"",
    "{\"role\":\"assistant\",\"content\":\"",
    "{\"role\":\"tool\",\"content\":\"",
    "\"}",
    "\"role\":",
    "\"name\":",
    "\"tool_call_id\":",
    "\"reasoning_content\":",
    "\"tool_calls\":[{\"id\":\"x\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":",
    "\"arguments\":",
    "\"tools\":",
    "\"messages\":",
    "\"tool_choice\":",
    "\"response_format\":",
    "\"reasoning_effort\":",
    "\"type\":\"text\"",
    "\"text\":",
    "\"image_url\"",
    "<|sep|>",
    "\\u0000",
    "\\ud83d\\ude00",
    "\\\"",
    "&quot;",
    "null",
    "1e999",
    "[[[[[[[[",
    "{\"a\":",
    ",",
    "[",
    "]",
    "{",
    "}",
];

/// A list with everything a list may have, and a document around one.
#[must_use]
pub fn messages_seeds() -> Vec<Vec<u8>> {
    let list = r#"[{"role":"system","content":"Be brief."},
        {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"<|sep|>"}],"name":"a\"&b"},
        {"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[
            {"id":"x","type":"function","function":{"name":"f","arguments":"{\"k\":\"v\",\"n\":[1,{}]}"}},
            {"id":"y","function":{"name":"g","arguments":{"a":null}}}]},
        {"role":"tool","tool_call_id":"x","content":"7"},{"role":"tool","name":"g","content":""}]"#;
    let tools = r#"[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]"#;
    vec![
        list.into(),
        format!(r#"{{"messages":{list},"tools":{tools},"reasoning_effort":"low","tool_choice":"auto"}}"#).into(),
        br#"[{"role":"user","content":"hello"}]"#.to_vec(),
        br#"{"messages":[],"response_format":{"type":"json_object"}}"#.to_vec(),
    ]
}
