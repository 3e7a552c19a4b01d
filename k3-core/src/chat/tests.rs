//! Conversations, id by id.
//!
//! Expected ids are spelled by hand from spec 5.4: `O`, `C`, `S` and `M` are control ids, any other word
//! is one token, found in the list by its bytes. No tokenizer and no renderer has a part in them. The
//! vocabulary has traps: tokens that merging would make if pieces met across an edge.

use super::*;
use crate::carve::Line;
use crate::tokenizer::{Specials, Vocab, scratch_len};
use std::borrow::ToOwned as _;
use std::format;
use std::string::{String, ToString as _};
use std::vec::Vec;

/// Tokens above the 256 bytes. Each is reached only if its text is a piece of its own.
const WORDS: &[&str] = &[
    "message",
    "role",
    "user",
    "system",
    "assistant",
    "type",
    "think",
    "response",
    "tools",
    "call",
    "tool",
    "index",
    "argument",
    "key",
    "json",
    "object",
    "string",
    "number",
    "boolean",
    "null",
    "array",
    "name",
    "hi",
    "there",
    " role",
    " type",
    " name",
    " tool",
    " index",
    " key",
    "=\"",
    "tool",
    "-declare",
    "declare",
    "effort",
    "-effort",
    "thinking",
    "ada",
    "amp",
    "quot",
    "&quot",
    ";quot",
    "weather",
    "&quot;",
    "&amp;",
    "ok",
    " there",
    "true",
    "12",
    "Oslo",
    "city",
    "open",
    "<|",
    "|>",
    "sep",
    "day",
    "hm",
    "sun",
    // Traps: what would come out if the text of a tag were encoded in one piece, or a body with its tags.
    "message role",
    "role=\"",
    " role=\"",
    "\"user",
    "user\"",
    "=\"user\"",
    "\" index",
    "=\"user",
    "hi<|",
    "\"\"",
];

struct Fixture {
    words: Vec<Vec<u8>>,
    vocab: Vocab<'static>,
}

impl Fixture {
    fn new() -> Self {
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|b| std::vec![b]).collect();
        for word in WORDS {
            if !words.iter().any(|w| w == word.as_bytes()) {
                words.push(word.as_bytes().to_vec());
            }
        }
        let file: String =
            words.iter().enumerate().map(|(rank, w)| format!("{} {rank}\n", crate::tokenizer::base64(w))).collect();
        let arena = std::vec![Line::ZERO; Vocab::required(file.as_bytes()).unwrap()].leak();
        let vocab = Vocab::load(file.as_bytes(), arena).unwrap();
        Self { words, vocab }
    }

    fn specials(&self) -> Specials<'static> {
        Specials::new(self.vocab.len(), &mut [])
    }

    /// `O`, `C`, `S`, `M`: controls. `@`: the byte ff. `_x`: the token " x". `'a b'`: the bytes one by one. Else a token.
    fn ids(&self, spelled: &str) -> Vec<u32> {
        let base = self.vocab.len();
        let mut ids = Vec::new();
        let mut rest = spelled.trim();
        while !rest.is_empty() {
            if let Some(quoted) = rest.strip_prefix('\'') {
                let (bytes, behind) = quoted.split_once('\'').expect("a closing quote");
                ids.extend(bytes.bytes().map(u32::from));
                rest = behind.trim_start();
                continue;
            }
            let (word, behind) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            rest = behind.trim_start();
            ids.push(match word {
                "O" => base + 3,
                "C" => base + 4,
                "S" => base + 5,
                "M" => base + 2,
                "@" => 255,
                _ => {
                    let word = word.replace('_', " ");
                    let rank = self.words.iter().position(|w| w == word.as_bytes());
                    u32::try_from(rank.unwrap_or_else(|| panic!("{word:?} is no token"))).unwrap()
                }
            });
        }
        ids
    }

    fn render(&self, prompt: &Prompt<'_>) -> Result<Vec<u32>, ChatError> {
        let mut text = std::vec![0xa5; prompt.text_len()?];
        let mut scratch = std::vec![Line::ZERO; scratch_len(1 << 16).unwrap()];
        let mut ids = Vec::new();
        prompt.encode(&self.vocab, &self.specials(), &mut text, &mut scratch, |id| ids.push(id.0)).map_err(
            |e| match e {
                RenderError::Refused(error) => error,
                RenderError::Part(error) => panic!("{error}"),
            },
        )?;
        Ok(ids)
    }

    fn shown(&self, ids: &[u32]) -> String {
        let base = self.vocab.len();
        let mut out = String::new();
        for &id in ids {
            match id.checked_sub(base) {
                Some(3) => out += " O ",
                Some(4) => out += " C ",
                Some(5) => out += " S ",
                Some(2) => out += " M\n",
                _ => out += &format!("[{}]", String::from_utf8_lossy(&self.words[id as usize])),
            }
        }
        out
    }

    fn check(&self, what: &str, prompt: &Prompt<'_>, expected: &str) {
        let found = self.render(prompt).unwrap_or_else(|e| panic!("{what}: {e}"));
        let expected = self.ids(expected);
        assert!(found == expected, "{what}:\nfound\n{}\nexpected\n{}", self.shown(&found), self.shown(&expected));
    }
}

fn user(content: &str) -> Message<'_> {
    Message::User { name: None, content: content.as_bytes() }
}

const OFF: &str = "O message _role =\" assistant \" S O response S";
const ON: &str = "O message _role =\" assistant \" S O think S";

fn plain<'m>(messages: &'m [Message<'m>]) -> Prompt<'m> {
    Prompt { thinking: Thinking::Off, ..Prompt::new(messages) }
}

fn quiet<'m>(messages: &'m [Message<'m>]) -> Prompt<'m> {
    Prompt { thinking: Thinking::On(None), ..Prompt::new(messages) }
}

#[test]
fn each_role_alone() {
    let f = Fixture::new();
    f.check("nothing", &plain(&[]), OFF);
    f.check("nothing, thinking", &quiet(&[]), ON);
    let said = "O message _role =\" user \" S hi _there C message S M ";
    f.check("user", &plain(&[user("hi there")]), &(said.to_owned() + OFF));
    f.check("user, thinking", &quiet(&[user("hi there")]), &(said.to_owned() + ON));
    // Not trimmed.
    f.check("blanks", &plain(&[user(" \n")]), &format!("O message _role =\" user \" S ' \n' C message S M {OFF}"));
    f.check("empty", &plain(&[user("")]), &format!("O message _role =\" user \" S C message S M {OFF}"));
    let named = Message::User { name: Some("ada"), content: b"hi" };
    f.check(
        "named",
        &plain(&[named]),
        &format!("O message _role =\" user \" _name =\" ada \" S hi C message S M {OFF}"),
    );
    let system = Message::System { name: None, content: b"ok", tools: None };
    f.check("system", &plain(&[system]), &format!("O message _role =\" system \" S ok C message S M {OFF}"));
    let answer = Message::Assistant { name: None, reasoning: b"hm", content: b"ok", calls: &[] };
    f.check(
        "assistant, not thinking",
        &plain(&[answer]),
        &format!("O message _role =\" assistant \" S O response S ok C response S C message S M {OFF}"),
    );
    f.check(
        "assistant, thinking",
        &quiet(&[answer]),
        &format!(
            "O message _role =\" assistant \" S O think S hm C think S O response S ok C response S C message S M {ON}"
        ),
    );
    let answer = Message::Assistant { name: Some("ada"), reasoning: b"", content: b"", calls: &[] };
    f.check(
        "thinking is there even if empty",
        &quiet(&[answer]),
        &format!(
            "O message _role =\" assistant \" _name =\" ada \" S O think S C think S O response S C response S \
             C message S M {ON}"
        ),
    );
    let result = Message::Tool { name: "weather", id: None, content: b"sun" };
    f.check(
        "tool",
        &plain(&[result, result]),
        &format!(
            "O message _role =\" tool \" _tool =\" weather \" _index =\" '1' \" S sun C message S M \
             O message _role =\" tool \" _tool =\" weather \" _index =\" '2' \" S sun C message S M {OFF}"
        ),
    );
}

/// The body's bytes one by one, but for the words that are tokens: pieces as the pattern of spec 5.2 cuts.
fn bytes(pieces: &[&str]) -> String {
    let quoted = |p: &&str| if WORDS.contains(p) { p.replace(' ', "_") } else { format!("'{p}'") };
    pieces.iter().map(quoted).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_head_names_tools_and_effort() {
    let f = Fixture::new();
    for (effort, name) in [(Effort::Low, "low"), (Effort::High, "high"), (Effort::Max, "max")] {
        let prompt = Prompt { thinking: Thinking::On(Some(effort)), ..Prompt::new(&[]) };
        let body = bytes(&[
            "`",
            "thinking",
            "_",
            "effort",
            "` guides on how much to",
            " ",
            "think",
            " in your ",
            "thinking",
            " channel (not including the ",
            "response",
            " channel), supported values include `low`, `medium`, `high`, and `max`.\nNow the ",
            "system",
            " is invoked with `",
            "thinking",
            "_",
            "effort",
            "=",
            name,
            "`.",
        ]);
        // Merges inside of words that the vocabulary has with other neighbours are not what is tested here, so
        // this case compares bytes of the body and ids of what is around it.
        let found = f.render(&prompt).unwrap();
        let head = f.ids("O message _role =\" system \" _type =\" thinking -effort \" S");
        let tail = f.ids(&format!("C message S M {ON}"));
        let inner = &found[head.len()..found.len() - tail.len()];
        assert_eq!((&found[..head.len()], &found[found.len() - tail.len()..]), (&head[..], &tail[..]));
        assert!(inner.iter().all(|&id| id < f.vocab.len()));
        assert_eq!(text(&f, inner), text(&f, &f.ids(&body)));
    }
    let tools =
        r#" [ {"type": "function", "function": {"name": "weather", "parameters": {"b": 1.0, "a": "\u00e9"}}} ] "#;
    let prompt = Prompt { tools: Some(tools), ..plain(&[]) };
    let found = f.render(&prompt).unwrap();
    let head = f.ids("O message _role =\" system \" _type =\" tool -declare \" S");
    let tail = f.ids(&format!("C message S M {OFF}"));
    let inner = &found[head.len()..found.len() - tail.len()];
    assert_eq!((&found[..head.len()], &found[found.len() - tail.len()..]), (&head[..], &tail[..]));
    assert_eq!(
        text(&f, inner),
        "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n\
         [{\"function\":{\"name\":\"weather\",\"parameters\":{\"a\":\"\u{e9}\",\"b\":1.0}},\"type\":\"function\"}]\n```"
    );
    // Tools first, then the effort, then messages.
    let prompt = Prompt { tools: Some("[{}]"), ..Prompt::new(&[]) };
    let ids = f.render(&prompt).unwrap();
    let shown = f.shown(&ids);
    let places = ["-declare", "-effort", "think]"].map(|word| shown.find(word).expect("there"));
    assert!(places.is_sorted(), "{shown}");
    // No tools are no tools, however that is said: also those of a system message.
    let none = Prompt { tools: Some(" [ ] "), ..plain(&[]) };
    assert_eq!(f.render(&none), f.render(&plain(&[])));
    let system = |tools| [Message::System { name: None, content: b"sun", tools }];
    assert_eq!(f.render(&plain(&system(Some("[]")))), f.render(&plain(&system(None))));
}

std::thread_local! {
    static COMPARED: core::cell::Cell<u64> = const { core::cell::Cell::new(0) };
}

/// Counts comparisons of the ids of calls.
pub(super) fn compared() {
    COMPARED.set(COMPARED.get() + 1);
}

/// A thousand results of tools took seven seconds: each was looked up in the calls again for every other one.
#[test]
fn many_results_are_put_in_order_by_pairs() {
    let f = Fixture::new();
    let count = 200;
    let ids: Vec<String> = (0..count).map(|i| i.to_string()).collect();
    let call = |id| Call { name: "weather", id: Some(id), arguments: "{}" };
    let calls: Vec<_> = ids.iter().map(|id| call(id.as_str())).collect();
    let mut messages = std::vec![Message::Assistant { name: None, reasoning: b"", content: b"", calls: &calls }];
    messages.extend(ids.iter().rev().map(|id| Message::Tool { name: "weather", id: Some(id), content: id.as_bytes() }));
    let before = COMPARED.get();
    let found = f.render(&plain(&messages)).unwrap();
    let pairs = (COMPARED.get() - before) / (count * count);
    // For the length and for the parts: is each known, are all different, which is whose, which call is first.
    assert!(pairs <= 2 * 4, "{pairs}");
    messages[1..].reverse();
    assert!(f.render(&plain(&messages)).unwrap() == found);
}

fn text(f: &Fixture, ids: &[u32]) -> String {
    String::from_utf8(ids.iter().flat_map(|&id| f.words[id as usize].clone()).collect()).unwrap()
}

#[test]
fn calls_and_results() {
    let f = Fixture::new();
    let call = Call {
        id: Some("x"),
        name: "weather",
        arguments: r#"{"city": "Oslo", "day": 12, "key": true, "name": null, "json": [ 1 , {"a" : 2} ], "a\"&": ""}"#,
    };
    let raw = Call { id: Some("y"), name: "day", arguments: "hi {" };
    let calls = [call, raw];
    let asks = Message::Assistant { name: None, reasoning: b"", content: b"ok", calls: &calls };
    let asked = "O message _role =\" assistant \" S O response S ok C response S O tools S \
         O call _tool =\" weather \" _index =\" '1' \" S \
         O argument _key =\" city \" _type =\" string \" S Oslo C argument S \
         O argument _key =\" day \" _type =\" number \" S 12 C argument S \
         O argument _key =\" key \" _type =\" boolean \" S true C argument S \
         O argument _key =\" name \" _type =\" null \" S null C argument S \
         O argument _key =\" json \" _type =\" array \" S '[1,{\"a\":2}]' C argument S \
         O argument _key =\" 'a' &quot ';&' amp ';' \" _type =\" string \" S C argument S \
         C call S \
         O call _tool =\" day \" _index =\" '2' \" S O json _type =\" object \" S hi ' {' C json S C call S \
         C tools S C message S M ";
    f.check("calls", &plain(&[asks]), &(asked.to_owned() + OFF));

    let result = |id, name| Message::Tool { name, id, content: b"sun" };
    let written = |name: &str, index: u32| {
        format!("O message _role =\" tool \" _tool =\" {name} \" _index =\" '{index}' \" S sun C message S M ")
    };
    let said = "O message _role =\" user \" S hi C message S M ";
    let in_order = asked.to_owned() + &written("weather", 1) + &written("day", 2) + said + &written("ada", 3) + OFF;
    let swapped = [asks, result(Some("y"), "day"), result(Some("x"), "weather"), user("hi"), result(None, "ada")];
    f.check("results in call order", &plain(&swapped), &in_order);
    // One that belongs to no call: the order is left as it is.
    let strange = [asks, result(Some("y"), "day"), result(Some("z"), "weather")];
    f.check(
        "a strange result",
        &plain(&strange),
        &(asked.to_owned() + &written("day", 1) + &written("weather", 2) + OFF),
    );
    let twice = [asks, result(Some("y"), "day"), result(Some("y"), "weather")];
    f.check(
        "one call, two results",
        &plain(&twice),
        &(asked.to_owned() + &written("day", 1) + &written("weather", 2) + OFF),
    );

    // What follows a conversation in the state is the same as in the whole.
    let whole = f.render(&plain(&swapped)).unwrap();
    let more = plain(&swapped[1..]);
    let (mut ids, mut buffer) = (Vec::new(), std::vec![0; 256]);
    let mut scratch = std::vec![Line::ZERO; scratch_len(4096).unwrap()];
    more.render_more(&calls, &mut buffer, |part| {
        match part {
            Part::Control(control) => ids.push(f.specials().id(control).0),
            Part::Text(t) => crate::tokenizer::encode(&f.vocab, t, &mut scratch, |id| ids.push(id.0)).unwrap(),
        }
        Ok::<(), core::convert::Infallible>(())
    })
    .unwrap();
    assert_eq!(ids, whole[f.ids(asked).len()..]);
}

#[test]
fn control_spellings_and_quotes_stay_text() {
    let f = Fixture::new();
    let named = Message::User { name: Some("a\"<|sep|>&quot;"), content: b"<|open|>hi<|end_of_msg|>\xff" };
    let found = f.render(&plain(&[named])).unwrap();
    f.check(
        "spelled",
        &plain(&[named]),
        &format!(
            "O message _role =\" user \" _name =\" 'a' &quot ';' <| sep |> '&' amp ;quot ';' \" S \
             <| open |> hi <| 'end' '_' 'of' '_' 'msg' |> @ C message S M {OFF}"
        ),
    );
    assert!(found.contains(&255));
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let f = Fixture::new();
    let cases = [
        (Prompt { tool_choice: ToolChoice::Required, ..plain(&[]) }, Unwritten::ToolChoice),
        (Prompt { tool_choice: ToolChoice::None, ..plain(&[]) }, Unwritten::ToolChoice),
        (Prompt { response_format: ResponseFormat::JsonObject, ..plain(&[]) }, Unwritten::ResponseFormat),
        (Prompt { response_format: ResponseFormat::JsonSchema, ..plain(&[]) }, Unwritten::ResponseFormat),
        (plain(&[Message::System { name: None, content: b"", tools: Some("[{}]") }]), Unwritten::SystemTools),
    ];
    for (prompt, what) in cases {
        assert_eq!(f.render(&prompt), Err(ChatError::Unwritten(what)));
        assert!(ChatError::Unwritten(what).to_string().contains("not supported"));
    }
    assert_eq!(f.render(&Prompt { tools: Some("{}"), ..plain(&[]) }), Err(ChatError::ToolsArray));
    assert!(matches!(f.render(&Prompt { tools: Some("[1,]"), ..plain(&[]) }), Err(ChatError::Tools(_))));
    assert_eq!(Effort::by_name("medium"), None);
    assert_eq!(Effort::by_name("high"), Some(Effort::High));
    // A buffer that is too short says what is missing.
    let prompt = Prompt::new(&[]);
    let needed = prompt.text_len().unwrap();
    let short = prompt.render(&mut std::vec![0; needed - 1], |_| Ok::<(), ()>(()));
    assert_eq!(short, Err(RenderError::Refused(ChatError::Buffer { needed, given: needed - 1 })));
}

/// What a listener makes of parts.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
struct Heard {
    log: String,
}

fn hear(parser: &mut Parser<'_>, heard: &mut Heard, part: Part<'_>) -> Result<(), Malformed> {
    parser.push(part, |event| {
        heard.log += &match event {
            Event::Open { tag, attributes } => {
                let shown: Vec<_> = attributes.iter().map(|(k, v)| format!(" {k}={v}")).collect();
                format!("<{}{}>", tag.name(), shown.concat())
            }
            Event::Text { bytes, .. } => String::from_utf8_lossy(bytes).into_owned(),
            Event::Close { tag } => format!("</{}>", tag.name()),
            Event::End => "$".to_owned(),
        };
    })
}

/// Parts spelled like ids, without a vocabulary.
fn parts(spelled: &str) -> Vec<Part<'_>> {
    spelled
        .split(' ')
        .map(|word| match word {
            "O" => Part::Control(Control::OPEN),
            "C" => Part::Control(Control::CLOSE),
            "S" => Part::Control(Control::SEP),
            "M" => Part::Control(Control::END_OF_MSG),
            "E" => Part::Control(Control::EOS),
            "U" => Part::Control(Control::UNK),
            "_role" => Part::Text(b" role"),
            "_tool" => Part::Text(b" tool"),
            "_" => Part::Text(b" "),
            word => Part::Text(word.as_bytes()),
        })
        .collect()
}

fn parse(start: Start, spelled: &str) -> (String, Option<Malformed>) {
    let mut buffer = [0; 40];
    let mut parser = Parser::new(start, &mut buffer);
    let (mut heard, mut fault) = (Heard::default(), None);
    for part in parts(spelled) {
        if let Err(error) = hear(&mut parser, &mut heard, part) {
            assert_eq!(fault, None, "told once");
            fault = Some(error);
        }
    }
    (heard.log, fault)
}

#[test]
fn answers_are_taken_apart() {
    for (start, spelled, heard) in [
        (
            Start::Think,
            "hm m C think S O response S ok C response S C message S M",
            "hmm</think><response>ok</response></message>$",
        ),
        (Start::Response, "ok C response S C message S E", "ok</response></message>$"),
        // Spelled controls are text; white space between tags is nothing.
        (
            Start::Response,
            "<|close|>response<|sep|> C response S _ C message S M",
            "<|close|>response<|sep|></response></message>$",
        ),
        (
            Start::Response,
            "C response S O tools S O call _tool =\" we ather \" S O argument _role =\" a&quot;&amp;quot; \" S 1 C argument S \
             C call S O call S O json S {} C json S C call S C tools S C message S M",
            "</response><tools><call tool=weather><argument role=a\"&quot;>1</argument></call><call><json>{}</json></call></tools></message>$",
        ),
        (
            Start::Outside,
            "O message _role =\" user \" S hi C message S M O message _role =\" assistant \" S O think S hm",
            "<message role=user>hi</message>$<message role=assistant><think>hm",
        ),
    ] {
        assert_eq!(parse(start, spelled), (heard.to_owned(), None), "{spelled}");
    }
}

#[test]
fn malformed_answers_give_what_was_there_and_one_error() {
    use Malformed::{Close, Control as Stray, Long, Nesting, Syntax, Text, Unclosed, Unknown};
    for (start, spelled, heard, fault) in [
        (Start::Think, "hm M", "hm$", Unclosed { tag: Tag::Think }),
        (Start::Think, "hm C thi M", "hm$", Syntax),
        (Start::Think, "hm C response S ok M", "hm$", Close { tag: Tag::Response, open: Some(Tag::Think) }),
        (Start::Think, "hm C think S ok", "hm</think>", Text),
        (Start::Think, "hm O call S ok", "hm", Nesting { tag: Tag::Call, inside: Some(Tag::Think) }),
        (Start::Think, "hm O thonk S ok", "hm", Unknown),
        (Start::Think, "hm O S ok", "hm", Unknown),
        (Start::Think, "hm S ok", "hm", Stray { control: Control::SEP }),
        (Start::Think, "hm U ok", "hm", Stray { control: Control::UNK }),
        (Start::Think, "hm O O S", "hm", Stray { control: Control::OPEN }),
        (Start::Response, "C response _role S x", "", Syntax),
        (Start::Response, "C response S O tools _role S x", "</response>", Syntax),
        (Start::Response, "C response S O tools _role =\" a S x", "</response>", Syntax),
        (Start::Response, "C response S O tools _role =\" a \" x S x", "</response>", Syntax),
        (Start::Response, "O 0123456789012345678901234567890123456789x S M", "$", Long { given: 40 }),
        (Start::Outside, "x", "", Text),
        (
            Start::Response,
            "C response S C message S C message S",
            "</response></message>",
            Close { tag: Tag::Message, open: None },
        ),
        (Start::Response, "C response S C message S M x", "</response></message>$", Text),
        (Start::Response, "O message S", "", Nesting { tag: Tag::Message, inside: Some(Tag::Response) }),
    ] {
        assert_eq!(parse(start, spelled), (heard.to_owned(), Some(fault)), "{spelled}");
        assert!(!fault.to_string().is_empty());
    }
}

/// Whatever comes, nothing panics, at most one error comes between two ends, and an end is always heard.
#[test]
fn any_ids_are_survived() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % n
    };
    let words = "O O O C C C S S S S M E U message think response tools call argument json _role =\" a \" x _";
    let words: Vec<Part<'_>> = parts(words);
    for _ in 0..20_000 {
        let mut buffer = [0; 24];
        let start = [Start::Think, Start::Response, Start::Outside][random(3)];
        let mut parser = Parser::new(start, &mut buffer);
        let mut errors = 0;
        for _ in 0..random(40) {
            let part = words[random(words.len())];
            let mut ended = false;
            let result = parser.push(part, |event| ended |= event == Event::End);
            if matches!(part, Part::Control(Control::END_OF_MSG | Control::EOS)) {
                assert!(ended);
                errors = 0;
            } else {
                errors += usize::from(result.is_err());
                assert!(errors <= 1);
            }
        }
    }
}

/// What the renderer writes, the parser reads.
#[test]
fn a_rendered_conversation_is_read_back() {
    let calls = [Call { id: None, name: "a\"&amp;b", arguments: r#"{"k\"":"v<","n":1}"# }];
    let messages = [
        user("q"),
        Message::Assistant { name: None, reasoning: b"r", content: b"c", calls: &calls },
        Message::Tool { name: "t", id: None, content: b"x" },
    ];
    let mut buffer = [0; TAG_BYTES];
    let mut parser = Parser::new(Start::Outside, &mut buffer);
    let mut heard = Heard::default();
    quiet(&messages).render(&mut [0; 64], |part| hear(&mut parser, &mut heard, part)).unwrap();
    assert_eq!(
        heard.log,
        "<message role=user>q</message>$<message role=assistant><think>r</think><response>c</response><tools>\
         <call tool=a\"&amp;b index=1><argument key=k\" type=string>v<</argument><argument key=n type=number>1</argument>\
         </call></tools></message>$<message role=tool tool=t index=1>x</message>$<message role=assistant><think>"
    );
    assert_eq!(parser.opened(), [Tag::Message, Tag::Think]);
}

/// What the parser's buffer cannot hold is not written: a session of it could not be gone on with.
#[test]
fn a_tag_is_refused_that_could_not_be_read_back() {
    let written = |messages: &[Message<'_>]| {
        let prompt = quiet(messages);
        let mut text = std::vec![0; prompt.text_len()?];
        let mut buffer = [0; TAG_BYTES];
        let mut parser = Parser::new(Start::Outside, &mut buffer);
        let read = prompt.render(&mut text, |part| parser.push(part, |_| {}));
        match read {
            Ok(()) => Ok(()),
            Err(RenderError::Refused(error)) => Err(error),
            Err(RenderError::Part(malformed)) => panic!("{malformed:?}"),
        }
    };
    // An ampersand is five bytes.
    let named = |spare: usize| {
        let name = "n".repeat(TAG_BYTES - "message role=\"user\" name=\"&amp;\"".len() + spare) + "&";
        written(&[Message::User { name: Some(&name), content: b"q" }])
    };
    let keyed = |spare: usize| {
        let key = "k".repeat(TAG_BYTES - "argument key=\"&amp;\" type=\"null\"".len() + spare);
        let arguments = std::format!("{{\"{key}&\":null}}");
        let calls = [Call { id: None, name: "f", arguments: &arguments }];
        written(&[Message::Assistant { name: None, reasoning: b"", content: b"", calls: &calls }])
    };
    for tag in [&named as &dyn Fn(usize) -> Result<(), ChatError>, &keyed] {
        assert_eq!(tag(0), Ok(()));
        assert_eq!(tag(1), Err(ChatError::Tag { len: TAG_BYTES + 1, most: TAG_BYTES }));
    }
}

/// Keys are sorted level by level. The crate's documentation names the figure.
#[test]
#[cfg_attr(target_family = "wasm", ignore = "there are no threads")]
fn tools_at_the_limit_of_nesting_take_less_than_256_kib_of_stack() {
    let render = || {
        let tools = (2..crate::json::MAX_DEPTH).fold("[]".into(), |json: String, _| format!("{{\"a\":{json}}}"));
        let tools = format!("[{tools}]");
        let prompt = Prompt { tools: Some(&tools), ..Prompt::new(&[]) };
        let mut text = std::vec![0; prompt.text_len().unwrap()];
        let mut parts = 0;
        let count = |_: Part<'_>| {
            parts += 1;
            Ok::<(), core::convert::Infallible>(())
        };
        prompt.render(&mut text, count).unwrap();
        assert!(parts > 0);
        let deeper = Prompt { tools: Some(&format!("[{tools}]")), ..Prompt::new(&[]) };
        assert!(matches!(deeper.text_len(), Err(ChatError::Tools(JsonError::TooDeep { .. }))));
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(render).unwrap().join().unwrap();
}
