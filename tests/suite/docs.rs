//! What the documentation promises about itself.

use k3_tests::root;
use std::path::{Path, PathBuf};

/// Every public module of the core has an example at its head that runs as a test.
#[test]
fn each_public_module_of_the_core_has_an_example() {
    let mut seen = 0;
    visit(&root().join("k3-core/src"), &root().join("k3-core/src/lib.rs"), &mut seen);
    assert!(seen > 15, "only {seen} modules found");
}

/// A new fact in an error is no breaking change: each error type of the core is `#[non_exhaustive]`.
#[test]
fn each_error_of_the_core_may_grow() {
    let mut text = String::new();
    for file in sources(&root().join("k3-core/src")) {
        text.push_str(&std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())));
    }
    let mut seen = 0;
    for (_, after) in text.match_indices("error::Error for ").map(|(at, found)| text.split_at(at + found.len())) {
        let name: String = after.chars().take_while(char::is_ascii_alphanumeric).collect();
        let enumeration = text.contains(&format!("#[non_exhaustive]\npub enum {name} {{"))
            || text.contains(&format!("#[non_exhaustive]\npub enum {name}<"));
        let structure = text.contains(&format!("#[non_exhaustive]\npub struct {name} {{"));
        assert!(enumeration || structure, "{name} is not #[non_exhaustive]");
        seen += 1;
    }
    assert!(seen > 10, "only {seen} errors found");
}

/// All files below a folder.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let paths = entries.map(|entry| entry.expect("entry").path());
    paths.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// Looks at the head of `file`, whose submodules are in `dir`, and at those that are public.
fn visit(dir: &Path, file: &Path, seen: &mut usize) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let fences = text.lines().filter_map(|line| line.strip_prefix("//! ```"));
    // Every second one closes a block; one that opens without a word is Rust.
    assert!(fences.step_by(2).any(str::is_empty), "{} has no example at its head", file.display());
    *seen += 1;
    for line in text.lines() {
        let Some(name) = line.strip_prefix("pub mod ").and_then(|rest| rest.strip_suffix(';')) else { continue };
        let (flat, nested) = (dir.join(format!("{name}.rs")), dir.join(name).join("mod.rs"));
        if flat.exists() {
            visit(dir, &flat, seen);
        } else {
            visit(&dir.join(name), &nested, seen);
        }
    }
}
