//! The user's cache folder.

use std::ffi::OsString;
use std::path::PathBuf;

/// The folder of this program by the XDG base directory rules: a relative path counts as none.
/// `variable` is how the environment is asked.
pub(crate) fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("k3"))
}
