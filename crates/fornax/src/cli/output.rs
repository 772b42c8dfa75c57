//! What commands print: numbers for people, JSON for programs.

use std::io::{self, Read, Write};
use std::path::Path;

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

/// Text out of a model's files as one line for a terminal. What a terminal would obey (escape sequences, a name that runs
/// backwards) is written out instead: whoever made the file must not move the reader's cursor.
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

/// A size for people.
pub(crate) fn bytes(count: u64) -> String {
    let count = count as f64;
    match count {
        _ if count >= 1e9 => format!("{:.2} GB", count / 1e9),
        _ if count >= 1e6 => format!("{:.1} MB", count / 1e6),
        _ if count >= 1e3 => format!("{:.1} kB", count / 1e3),
        _ => format!("{count} B"),
    }
}

/// A size of memory for people, in binary units.
pub(crate) fn binary(count: u64) -> String {
    let count = count as f64;
    let (kib, mib, gib) = (1024.0, 1024.0 * 1024.0, 1024.0 * 1024.0 * 1024.0);
    match count {
        _ if count >= gib => format!("{:.1} GiB", count / gib),
        _ if count >= mib => format!("{:.1} MiB", count / mib),
        _ if count >= kib => format!("{:.1} KiB", count / kib),
        _ => format!("{count} B"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let check = |count: u64, text: &str| assert_eq!(bytes(count), text);
        check(0, "0 B");
        check(999, "999 B");
        check(98_362_432, "98.4 MB");
        check(4_000_000_000, "4.00 GB");
        let check = |count: u64, text: &str| assert_eq!(binary(count), text);
        check(1023, "1023 B");
        check(12_288, "12.0 KiB");
        check(180 << 20, "180.0 MiB");
        check(46_702_792_704, "43.5 GiB");
    }

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
