//! What `k3 batch` and `k3 verify --hash` read.
#![expect(clippy::missing_panics_doc, reason = "a panic is what a target is for")]

use k3_bin::lines::{self, Defaults, Given, Unlike, Written};
use k3_bin::listing::Listing;
use k3_platform::digest;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::{Component, Path};

/// A refusal is told at a terminal; lines of it are the faults of lines.
fn told(text: &str) {
    assert!(!text.is_empty() && !text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
}

/// The first line of an output.
const HEADER: &[u8] = b"{\"k3_batch\":1}\n";

/// Lines are refused by their numbers, or each says one prompt, and again when it is written; and the output of an
/// interrupted batch is what says which of them are done. Of the input, what is behind the first zero byte is what
/// such an output has behind its first line.
pub fn batch(data: &[u8]) {
    let mut parts = data.splitn(2, |&b| b == 0);
    let (input, output) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let defaults = Defaults::new(7);
    let found = match lines::read(Path::new("input"), input, &defaults) {
        Ok(found) => found,
        Err(refused) => return told(&refused.message),
    };
    assert!(found.iter().map(|line| line.id.to_string()).collect::<HashSet<_>>().len() == found.len());
    assert!(found.windows(2).all(|pair| pair[0].number < pair[1].number));
    let written = found.iter().map(|line| {
        let mut object = json!({"id": line.id, "max_tokens": line.max_tokens});
        match &line.prompt {
            Given::Text(text) => object["prompt"] = json!(text),
            Given::Ids(ids) => object["ids"] = ids.iter().map(|id| id.0).collect(),
        }
        format!("{object}\n")
    });
    let again = lines::read(Path::new("again"), written.collect::<String>().as_bytes(), &defaults).expect("as written");
    assert_eq!(again.len(), found.len());
    for (a, b) in again.iter().zip(&found) {
        assert!(a.id == b.id && a.prompt == b.prompt && a.max_tokens == b.max_tokens, "{a:?}, {b:?}");
    }

    // Cut anywhere in its first line, an output is one that was just begun.
    let ids = || found.iter().map(|line| &line.id);
    let begun = &HEADER[..output.len() % HEADER.len()];
    let nothing = Written { whole: 0, done: vec![false; found.len()] };
    assert_eq!(Written::parse(begun, HEADER, ids()), Ok(nothing));
    let mut file = [HEADER, output].concat();
    let left = match Written::parse(&file, HEADER, ids()) {
        Ok(left) => left,
        Err(unlike) => {
            let lines = 2 + output.iter().filter(|&&b| b == b'\n').count();
            return assert!(matches!(unlike, Unlike::Line(line) if line < lines), "{unlike:?}");
        }
    };
    assert!(left.whole >= HEADER.len() && left.whole <= file.len() && left.done.len() == found.len());
    let results = file[HEADER.len()..left.whole].iter().filter(|&&b| b == b'\n').count();
    assert_eq!(left.done.iter().filter(|&&done| done).count(), results);
    // What is still to do, and is then done, is all there is.
    file.truncate(left.whole);
    for (line, _) in found.iter().zip(&left.done).filter(|(_, done)| !**done) {
        file.extend_from_slice(format!("{}\n", json!({"id": line.id, "generated_ids": [1]})).as_bytes());
    }
    let all = Written { whole: file.len(), done: vec![true; found.len()] };
    assert_eq!(Written::parse(&file, HEADER, ids()), Ok(all));
}

/// Members and values of a line, for the mutations of [`batch`].
pub const FIELDS: &[&str] = &[
    "{\"id\":\"a\",\"prompt\":\"b\"}\n",
    "{\"id\":1,\"ids\":[2,3]}\n",
    "{\"id\":\"a\",\"generated_ids\":[]}\n",
    "\"id\":",
    "\"prompt\":",
    "\"ids\":[",
    "\"max_tokens\":",
    "\"temperature\":",
    "\"top_p\":",
    "\"top_k\":",
    "\"min_p\":",
    "\"seed\":",
    "\"repeat_penalty\":",
    "\"logprobs\":",
    "\"logit_bias\":{\"1\":",
    "\"stop\":[",
    "\"-inf\"",
    "\n",
    "\r\n",
    "\0",
    "\\n",
    "\\u0085",
    "\\ud83d\\ude00",
    "\\u0000",
    "1e-308",
    "1.7976931348623157e308",
    "0.1",
    "-0.0",
    "18446744073709551615",
    "4294967296",
    "null",
    "true",
    ",",
    "[",
    "]",
    "{",
    "}",
    "\"",
];

/// An input with every field, and what a batch of it may have left.
#[must_use]
pub fn batch_seeds() -> Vec<Vec<u8>> {
    let full = r#"{"id":"a","prompt":"In the","max_tokens":3,"temperature":0.5,"top_p":0.9,"top_k":4,"min_p":0.1,"seed":7,"repeat_penalty":1.5,"logprobs":2,"logit_bias":{"17":-2.5,"9":"-inf"},"stop":["x",5]}"#;
    let plain = "{\"id\":1,\"ids\":[1,2]}\n\n{\"id\":2.5,\"ids\":[4294967295],\"stop\":\"end\"}\r\n";
    let result = r#"{"id":"a","generated_ids":[3],"text":"x","finish_reason":"length"}"#;
    vec![
        full.into(),
        plain.into(),
        format!("{full}\n{plain}\0{result}\n").into(),
        format!("{plain}{full}\0{{\"id\":2.5}}\n{result}\n{{\"id\":1,\"gen").into(),
        "{\"id\":\"a\",\"prompt\":\"b\"}\n{\"id\":\"a\",\"prompt\":\"c\"}\nx\n{}\n".into(),
    ]
}

/// A listing is refused in a line, or names files inside the model's directory and nothing else; and the sums that
/// it has say the same when they are written as `sha256sum` does.
pub fn listing(data: &[u8]) {
    let found = match Listing::parse(data) {
        Ok(found) => found,
        Err(refused) => return assert!(!refused.is_empty() && !refused.contains(char::is_control), "{refused:?}"),
    };
    assert!(!found.files.is_empty() && found.files.len() <= data.len());
    let mut sums = String::new();
    let mut kept = Vec::new();
    for file in &found.files {
        assert!(!file.name.contains('\0') && file.name.len() <= 3 * data.len());
        let mut parts = Path::new(&file.name).components();
        assert!(parts.all(|part| matches!(part, Component::Normal(_))), "{:?}", file.name);
        // Other names cannot be told from what is around them.
        let plain = !file.name.contains(char::is_control) && file.name.trim() == file.name;
        if let Some(sha) = file.sha.filter(|_| plain && !file.name.starts_with('*') && !file.name.is_empty()) {
            sums += &format!("{}  {}\n", digest::hex(&sha), file.name);
            kept.push((file.name.as_str(), sha));
        }
    }
    if kept.is_empty() {
        return;
    }
    let again = Listing::parse(sums.as_bytes()).expect("as written");
    let again: Vec<_> = again.files.iter().map(|file| (file.name.as_str(), file.sha)).collect();
    let expected: Vec<_> =
        kept.iter().map(|(name, sha)| (name.strip_prefix("./").unwrap_or(name), Some(*sha))).collect();
    assert_eq!(again, expected);
}

/// Members and values of listings, for the mutations of [`listing`].
pub const SUMS: &[&str] = &[
    "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
    "sha256:2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
    "SHA256 (",
    ") = ",
    "  ",
    " *",
    "./",
    "../",
    "/",
    "#",
    "\n",
    "\r\n",
    "\t",
    "\"siblings\":[",
    "\"rfilename\":\"",
    "\"path\":\"",
    "\"type\":\"file\"",
    "\"type\":\"directory\"",
    "\"lfs\":{\"oid\":\"",
    "\"sha256\":\"",
    "\"size\":",
    "\"id\":\"",
    "\"modelId\":\"",
    "\\u0000",
    "\\u0085",
    "\u{2028}",
    "18446744073709551616",
    "null",
    ",",
    "[",
    "]",
    "{",
    "}",
    "\"",
];

/// Listings of each form.
#[must_use]
pub fn listing_seeds() -> Vec<Vec<u8>> {
    let hex = digest::hex(&digest::of(b"x"));
    vec![
        format!("# sums\n{hex}  a b\n{hex} *./b\n\nSHA256 (c) = {hex}\r\n").into(),
        format!(
            r#"[{{"type":"directory","path":"d"}},{{"type":"file","path":"d/a","size":9,"oid":"11"}},
                {{"type":"file","path":"b","size":3,"lfs":{{"oid":"{hex}","size":5,"pointerSize":3}}}}]"#
        )
        .into(),
        format!(
            r#"{{"id":"some/model","siblings":[{{"rfilename":"a","size":9}},
                {{"rfilename":"b","lfs":{{"sha256":"sha256:{hex}","size":5}}}}]}}"#
        )
        .into(),
        format!("{hex}  ../a\n").into(),
        Value::Null.to_string().into(),
    ]
}
