//! Packs the demo checkpoint: what lies in `demo/` becomes a table of names, digests and bytes.
//!
//! `demo` is a link to a folder of `fixtures/`, so the repository holds one copy; a published package
//! holds the files themselves. The content is taken as it is. Without the folder the table is empty,
//! and the command says so when it is asked for the demo.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=demo");
    #[cfg(feature = "demo")]
    demo::pack();
}

#[cfg(feature = "demo")]
mod demo {
    use sha2::{Digest as _, Sha256};
    use std::fmt::Write as _;
    use std::path::{Path, PathBuf};

    /// Whether a file is part of a checkpoint; a folder of fixtures has others too.
    fn belongs(name: &str) -> bool {
        let exact = ["config.json", "model.safetensors.index.json", "tiktoken.model", "tokenizer_config.json"];
        exact.contains(&name) || Path::new(name).extension().is_some_and(|e| e == "safetensors")
    }

    fn files(dir: &Path) -> Vec<(String, PathBuf)> {
        let mut files: Vec<_> = std::fs::read_dir(dir)
            .into_iter()
            .flatten()
            .filter_map(|entry| Some((entry.as_ref().ok()?.file_name().into_string().ok()?, entry.ok()?.path())))
            .filter(|(name, _)| belongs(name))
            .collect();
        files.sort();
        files
    }

    /// Writes the table to the output folder.
    pub(super) fn pack() {
        let folder = |name| PathBuf::from(std::env::var_os(name).expect("cargo sets it"));
        let files = files(&folder("CARGO_MANIFEST_DIR").join("demo"));
        let mut all = Sha256::new();
        let mut table = String::from("pub(super) static FILES: &[Packed] = &[\n");
        for (name, path) in &files {
            // The folder's own time does not change when a file in it does.
            println!("cargo::rerun-if-changed=demo/{name}");
            let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let sha256: [u8; 32] = Sha256::digest(&bytes).into();
            all.update(name.as_bytes());
            all.update([0]);
            all.update(sha256);
            let _ = writeln!(
                table,
                "    Packed {{ name: {name:?}, sha256: {sha256:?}, bytes: include_bytes!({path:?}) }},"
            );
        }
        let digest: [u8; 32] = all.finalize().into();
        let id = digest.iter().take(8).fold(String::new(), |id, byte| id + &format!("{byte:02x}"));
        let _ = writeln!(table, "];\npub(super) const ID: &str = {id:?};");
        std::fs::write(folder("OUT_DIR").join("demo.rs"), table).expect("the output folder can be written");
    }
}
