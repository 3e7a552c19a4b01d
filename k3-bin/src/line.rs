//! Lines from a person: with editing and history at a terminal, plain from anything else.

use rustyline::error::ReadlineError;
use std::io::{BufRead as _, IsTerminal as _, Write as _};

/// What a person did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Line {
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupt,
    /// Ctrl-D, or the end of the input.
    End,
}

/// Where lines come from.
pub(crate) enum Lines {
    Terminal(Box<rustyline::DefaultEditor>),
    Plain,
}

impl Lines {
    /// Edits lines if both ends are a terminal.
    pub(crate) fn new() -> Self {
        if std::io::stdin().is_terminal()
            && std::io::stdout().is_terminal()
            && let Ok(editor) = rustyline::DefaultEditor::new()
        {
            return Self::Terminal(Box::new(editor));
        }
        Self::Plain
    }

    /// The next line. Bytes that are not UTF-8 are replaced: this is for people who type.
    pub(crate) fn next(&mut self, prompt: &str) -> std::io::Result<Line> {
        match self {
            Self::Terminal(editor) => match editor.readline(prompt) {
                Ok(line) => {
                    // A history that is full of nothing is of no use.
                    if !line.trim().is_empty() {
                        let _ = editor.add_history_entry(&line);
                    }
                    Ok(Line::Text(line))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupt),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Io(error)) => Err(error),
                Err(error) => Err(std::io::Error::other(error)),
            },
            Self::Plain => {
                let _ = std::io::stdout().flush();
                let mut line = Vec::new();
                if std::io::stdin().lock().read_until(b'\n', &mut line)? == 0 {
                    return Ok(Line::End);
                }
                if line.last() == Some(&b'\n') {
                    line.pop();
                }
                Ok(Line::Text(String::from_utf8_lossy(&line).into_owned()))
            }
        }
    }
}
