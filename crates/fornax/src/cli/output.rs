//! What commands print: numbers for people, JSON for programs.

use std::io::{self, Read, Write};
use std::path::Path;

pub(crate) use fornax::units::{binary, bytes};
use serde::Serialize;

use super::failure::Failure;

/// One JSON document and a line end on standard output.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(value)?;
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()?;
    Ok(())
}

/// Text out of a model's files as one line for a terminal. What a terminal would obey (escape sequences, a name that
/// runs backwards) is written out instead: whoever made the file must not move the reader's cursor.
pub(crate) fn line(text: &str) -> String {
    let obeyed = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => line.push('\t'),
            _ if obeyed(c) => line.extend(c.escape_unicode()),
            _ => line.push(c),
        }
    }
    line
}

/// The text of a file named on the command line; `-` is standard input.
pub(crate) fn text_of(path: &Path) -> Result<String, Failure> {
    let mut text = Vec::new();
    if path == Path::new("-") {
        io::stdin().lock().read_to_end(&mut text).map_err(|error| Failure::unreadable(path, &error))?;
    } else {
        text = std::fs::read(path).map_err(|error| Failure::unreadable(path, &error))?;
    }
    String::from_utf8(text).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::usage(format!("{} is not UTF-8 at byte {at}; convert it first", path.display()))
    })
}

/// The same, of a file that others should not read.
pub(crate) fn secret_of(path: &Path) -> Result<String, Failure> {
    look_at_secret(path)?;
    text_of(path)
}

/// Refuses a file of secrets that every user may write, and warns of one that every user may read.
pub(crate) fn look_at_secret(path: &Path) -> Result<(), Failure> {
    if path == Path::new("-") {
        return Ok(());
    }
    if let Some(warning) = fornax_server::exposure(path).map_err(|error| Failure::unreadable(path, &error))? {
        // Nobody reads it, and the work can go on.
        drop(writeln!(io::stderr(), "warning: {warning}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_written_out() {
        let check = |text: &str, wanted: &str| assert_eq!(line(text), wanted);
        check("blk.0.attn_q.weight", "blk.0.attn_q.weight");
        check("größe\t模型", "größe\t模型");
        check("a\u{1b}[2Jb", "a\\u{1b}[2Jb");
        check("a\nb\rc\u{7f}", "a\\u{a}b\\u{d}c\\u{7f}");
        check("\u{9b}31m", "\\u{9b}31m");
        check("\u{202e}fugg", "\\u{202e}fugg");
    }

    #[test]
    fn text_that_is_not_utf8_is_refused_with_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("latin1.txt");
        std::fs::write(&path, b"caf\xe9").unwrap();
        let failure = text_of(&path).unwrap_err().to_string();
        assert!(failure.contains("not UTF-8 at byte 3"), "{failure}");
    }
}
