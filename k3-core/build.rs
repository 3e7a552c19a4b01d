//! Makes the table of character classes that the tokenizer looks into (`src/tokenizer/unicode.rs`).

#[path = "src/tokenizer/unicode/by_tables.rs"]
mod by_tables;
#[path = "src/tokenizer/unicode/classes.rs"]
mod classes;

use std::path::Path;

/// Characters of a page.
const PAGE: u32 = 128;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=src/tokenizer/unicode/by_tables.rs");
    println!("cargo::rerun-if-changed=src/tokenizer/unicode/classes.rs");
    let (mut index, mut pages) = (Vec::new(), Vec::new());
    for first in (0..=u32::from(char::MAX)).step_by(PAGE as usize) {
        // Surrogates are no characters: nobody asks for them.
        let class = |c| char::from_u32(c).map_or(0, by_tables::of);
        let page: Vec<classes::Class> = (first..first + PAGE).map(class).collect();
        let place = pages.iter().position(|p| *p == page).unwrap_or_else(|| {
            pages.push(page);
            pages.len() - 1
        });
        index.push(u8::try_from(place).expect("at most 256 different pages"));
    }
    let table = format!(
        "static INDEX: [u8; {}] = {index:?};\nstatic PAGES: [[u8; {PAGE}]; {}] = {pages:?};\n",
        index.len(),
        pages.len()
    );
    let out = std::env::var_os("OUT_DIR").expect("cargo gives a folder");
    std::fs::write(Path::new(&out).join("classes.rs"), table).expect("the folder takes a file");
}
