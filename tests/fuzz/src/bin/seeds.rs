//! Writes the seeds of a target, and its words as a dictionary: `seeds TARGET DIRECTORY DICTIONARY`.

use std::fmt::Write as _;

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(dir), Some(words), None) = (args.next(), args.next(), args.next(), args.next()) else {
        eprintln!("usage: seeds TARGET DIRECTORY DICTIONARY");
        std::process::exit(2);
    };
    let Some(target) = k3_tests::fuzz::TARGETS.iter().find(|t| t.name == name) else {
        eprintln!("no such target: {name}");
        std::process::exit(2);
    };
    std::fs::create_dir_all(&dir)?;
    for (i, seed) in (target.seeds)().iter().enumerate() {
        std::fs::write(format!("{dir}/seed-{i}"), seed)?;
    }
    let mut dictionary = String::new();
    for word in target.words {
        let escaped: String = word.bytes().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "\\x{byte:02x}");
            text
        });
        let _ = writeln!(dictionary, "\"{escaped}\"");
    }
    std::fs::write(words, dictionary)?;
    // For run.sh: how long an input may be.
    println!("{}", target.max_len);
    Ok(())
}
