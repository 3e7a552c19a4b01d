//! What the files of a release should be: a file of SHA-256 sums, or the listing of a model hub.

use crate::fail::Failure;
use crate::input::{self, Input};
use k3_platform::digest::{self, Sha};
use serde_json::Value;
use std::io::Read as _;
use std::path::{Component, Path};

/// A listing of a release with a hundred shards has a few hundred kilobytes (bytes).
const MOST: u64 = 64 << 20;

/// What a file should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Its path in the model's directory.
    pub name: String,
    /// Its length (bytes).
    pub len: Option<u64>,
    /// Its SHA-256.
    pub sha: Option<Sha>,
}

/// What the files of a release should be.
#[derive(Debug, Default)]
pub struct Listing {
    /// The name under which the release can be fetched, if the listing says so.
    pub repository: Option<String>,
    /// Its files.
    pub files: Vec<Expected>,
}

impl Listing {
    /// Reads a listing of either form.
    pub(crate) fn read(path: &Path) -> Result<Self, Failure> {
        let hint = "--hash takes what sha256sum prints, or a hub's listing of files as JSON, with their details \
                    (as from .../tree/main, or with ?blobs=true)";
        let refused = |what: String| Failure::usage(format!("{}: {what}", path.display()), hint);
        let failed = |e: std::io::Error| input::failed(path, &e, hint);
        let mut bytes = Vec::new();
        Input::open(path).map_err(failed)?.take(MOST + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MOST {
            return Err(refused(format!("more than {MOST} bytes are too many for a listing")));
        }
        Self::parse(&bytes).map_err(refused)
    }

    /// Understands a listing of either form.
    ///
    /// # Errors
    /// In a sentence, what is wrong with it.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let this = if bytes.trim_ascii_start().starts_with(b"[") || bytes.trim_ascii_start().starts_with(b"{") {
            let value = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
            Self::hub(&value)?
        } else {
            Self::sums(&String::from_utf8_lossy(bytes))?
        };
        if let Some(file) = this.files.iter().find(|f| !inside(&f.name)) {
            return Err(format!("{:?} is not a name inside the model's directory", file.name));
        }
        let mut files: Vec<_> = this.files.iter().collect();
        files.sort_by_key(|f| &f.name);
        if let Some(two) = files.windows(2).find(|two| two[0].name == two[1].name && two[0] != two[1]) {
            return Err(format!("{:?} is listed twice, and not with the same facts", two[0].name));
        }
        // It stands in a command that is shown, to be typed.
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        if let Some(repository) = this.repository.as_ref().filter(|id| !id.chars().all(plain) || id.starts_with('-')) {
            return Err(format!("{repository:?} is not the name of a repository"));
        }
        // A hub that is asked for names alone says neither. Nothing could fail to match, and all would seem well.
        if this.files.iter().all(|f| f.sha.is_none()) {
            return Err("no file in it has a SHA-256".to_owned());
        }
        Ok(this)
    }

    /// Lines of `HEX  NAME`, `HEX *NAME` or `SHA256 (NAME) = HEX`.
    fn sums(text: &str) -> Result<Self, String> {
        let mut files = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let pair = match line.strip_prefix("SHA256 (") {
                Some(rest) => rest.rsplit_once(") = ").map(|(name, hex)| (hex, name)),
                None => {
                    line.split_once([' ', '\t']).map(|(hex, name)| (hex, name.trim_start_matches([' ', '\t', '*'])))
                }
            };
            let found = pair.and_then(|(hex, name)| Some((digest::from_hex(hex)?, name)));
            let Some((sha, name)) = found.filter(|(_, name)| !name.is_empty()) else {
                return Err(format!("line {}: expected a SHA-256 and a name", number + 1));
            };
            let name = name.strip_prefix("./").unwrap_or(name).to_owned();
            files.push(Expected { name, len: None, sha: Some(sha) });
        }
        if files.is_empty() { Err("no sums are in it".to_owned()) } else { Ok(Self { repository: None, files }) }
    }

    /// An array of files, or an object with an array of `siblings`.
    fn hub(value: &Value) -> Result<Self, String> {
        let repository = ["id", "modelId"].iter().find_map(|key| Some(value.get(key)?.as_str()?.to_owned()));
        let entries = value.as_array().or_else(|| value.get("siblings")?.as_array());
        let mut files = Vec::new();
        for entry in entries.into_iter().flatten().filter(|e| e.get("type").is_none_or(|kind| kind == "file")) {
            let Some(name) = ["path", "rfilename"].iter().find_map(|key| entry.get(key)?.as_str()) else { continue };
            let lfs = entry.get("lfs");
            // One that cannot be read is not the same as none.
            let sha = ["sha256", "oid"].iter().find_map(|key| lfs?.get(key));
            let sha = sha.map(|sha| {
                let text = sha.as_str().map(|text| text.strip_prefix("sha256:").unwrap_or(text));
                text.and_then(digest::from_hex).ok_or_else(|| format!("the SHA-256 of {name:?} is none: {sha}"))
            });
            let len = lfs.and_then(|lfs| lfs.get("size")).or_else(|| entry.get("size")).and_then(Value::as_u64);
            files.push(Expected { name: name.to_owned(), len, sha: sha.transpose()? });
        }
        if files.is_empty() { Err("this JSON lists no files".to_owned()) } else { Ok(Self { repository, files }) }
    }
}

/// Whether a name leads nowhere but into the directory.
fn inside(name: &str) -> bool {
    !name.contains('\0') && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Listing, Failure> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Listing::read(file.path())
    }

    #[test]
    fn both_forms_say_the_same() {
        let sha = digest::of(b"x");
        let hex = digest::hex(&sha);
        let sums = read(&format!("# made today\n{hex}  a b\n{hex} *./b\n\nSHA256 (c) = {hex}\n")).unwrap();
        let names: Vec<_> = sums.files.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["a b", "b", "c"]);
        assert!(sums.files.iter().all(|f| f.sha == Some(sha) && f.len.is_none()));
        let tree = format!(
            r#"[{{"type":"directory","path":"d"}},{{"type":"file","path":"a","size":9,"oid":"11"}},
                {{"type":"file","path":"b","size":3,"lfs":{{"oid":"{hex}","size":5,"pointerSize":3}}}}]"#
        );
        let model = format!(
            r#"{{"id":"some/model","siblings":[{{"rfilename":"a","size":9}},
                {{"rfilename":"b","lfs":{{"sha256":"{hex}","size":5}}}}]}}"#
        );
        for (text, repository) in [(tree, None), (model, Some("some/model".to_owned()))] {
            let listing = read(&text).unwrap();
            assert_eq!(listing.repository, repository);
            let expected = [("a", Some(9), None), ("b", Some(5), Some(sha))];
            let expected = expected.map(|(name, len, sha)| Expected { name: name.to_owned(), len, sha });
            assert_eq!(listing.files, expected);
        }
    }

    #[test]
    fn what_is_no_listing_is_refused() {
        let hex = digest::hex(&digest::of(b"x"));
        let leads_out = format!("{hex}  ../secret\n");
        let twice = format!("{hex}  a\n{}  a\n", hex.replace(['0', '1', '2', '3', '4'], "9"));
        let absolute = format!("{hex}  /etc/passwd\n");
        for (text, part) in [
            ("", "no sums"),
            ("abc  name\n", "line 1"),
            (&hex[..], "line 1"),
            ("[]", "no files"),
            ("{\"x\": 1}", "no files"),
            ("[1, 2", "EOF"),
            (r#"{"id":"a/b","siblings":[{"rfilename":"a"},{"rfilename":"b"}]}"#, "no file in it has a SHA-256"),
            (r#"[{"path":"a","size":9}]"#, "no file in it has a SHA-256"),
            (r#"[{"path":"a","size":9,"lfs":{"oid":"12345"}}]"#, "the SHA-256 of \"a\" is none"),
            (r#"{"id":"a/b; rm -rf ~","siblings":[{"rfilename":"a"}]}"#, "is not the name of a repository"),
            (r#"{"id":"a\u001b[31m","siblings":[{"rfilename":"a"}]}"#, "\"a\\u{1b}[31m\" is not the name"),
            (&twice, "\"a\" is listed twice"),
            (&leads_out, "../secret"),
            (&absolute, "/etc/passwd"),
        ] {
            let failure = read(text).unwrap_err();
            assert!(failure.code == 2 && failure.message.contains(part), "{text}: {}", failure.message);
        }
    }
}
