//! What the tests share: where fixtures are, how to damage them, how to run them.

pub mod fuzz;

use std::path::{Path, PathBuf};

/// The checkpoints that are there, with their expected outputs: the project's own always, the ones
/// beside the repository where it has them.
#[must_use]
pub fn checkpoints() -> Vec<PathBuf> {
    let root = root();
    let mut found = vec![root.join("fixtures/tiny")];
    found.extend(outside("oracle/tiny13"));
    found
}

/// The project's own checkpoints that come with expected outputs.
#[must_use]
pub fn own() -> Vec<PathBuf> {
    let all = ["tiny", "demo"].map(|name| root().join("fixtures").join(name));
    all.into_iter().filter(|dir| dir.join("expected.json").exists()).collect()
}

/// The workspace's folder.
#[must_use]
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// Something in the folder of outside references beside the repository; says so and gives nothing
/// where it is absent.
#[must_use]
pub fn outside(name: &str) -> Option<PathBuf> {
    let path = root().join("../shared").join(name);
    if path.exists() {
        return Some(path);
    }
    println!("SKIPPED: {} is not there (it is not part of the project)", path.display());
    None
}

/// Whether this process runs the test of this name and nothing else. If it does not, it has another one do so,
/// and fails as that one does: what the test says of its process is then not about the tests beside it.
///
/// # Panics
/// If the test fails, or is not there.
#[must_use]
pub fn alone(test: &str) -> bool {
    const ALONE: &str = "K3_TEST_ALONE";
    if std::env::var_os(ALONE).is_some_and(|name| name == test) {
        return true;
    }
    let mut process = std::process::Command::new(std::env::current_exe().expect("this program"));
    process.args(["--exact", test, "--nocapture", "--test-threads", "1"]).env(ALONE, test);
    let output = process.output().expect("this program");
    let [out, err] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    print!("{out}{err}");
    assert!(output.status.success() && out.contains("1 passed"), "{test}: {}", output.status);
    false
}

/// Little-endian f32 values of a file.
///
/// # Panics
/// If the file cannot be read.
#[must_use]
pub fn floats(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Copies a checkpoint directory (files only).
///
/// # Panics
/// If that fails.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("create");
    for entry in std::fs::read_dir(from).expect("read_dir") {
        let entry = entry.expect("entry");
        if entry.file_type().expect("type").is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).expect("copy");
            let mut permissions = std::fs::metadata(to.join(entry.file_name())).expect("metadata").permissions();
            #[expect(clippy::permissions_set_readonly_false, reason = "a copy in a private folder of the test")]
            permissions.set_readonly(false);
            std::fs::set_permissions(to.join(entry.file_name()), permissions).expect("permissions");
        }
    }
}

/// A JSON document with numbers as `f64`.
///
/// # Panics
/// If the file cannot be read.
#[must_use]
pub fn json(path: &Path) -> serde_json::Value {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All the numbers of nested arrays, in order; `"nan"`, `"inf"` and `"-inf"` count.
///
/// # Panics
/// If there is anything else among them.
#[must_use]
pub fn flat(value: &serde_json::Value) -> Vec<f64> {
    use serde_json::Value;
    match value {
        Value::Array(items) => items.iter().flat_map(flat).collect(),
        Value::Number(number) => vec![number.as_f64().expect("a number")],
        Value::String(text) => vec![match text.to_lowercase().trim_start_matches('+') {
            "nan" => f64::NAN,
            "inf" | "infinity" => f64::INFINITY,
            "-inf" | "-infinity" => f64::NEG_INFINITY,
            other => panic!("not a number: {other}"),
        }],
        other => panic!("not a number: {other}"),
    }
}
