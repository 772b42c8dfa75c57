//! Lines of words no wider than the terminal.
//!
//! A word waits until it ends, since only then is it known on which line it stands. Lines that a terminal broke by
//! itself would break in the middle of words.

use unicode_width::UnicodeWidthChar;

/// Of a line's beginning, what is looked at to know how far its next lines are indented.
const LEAD_CHARS: usize = 16;

/// Text being laid out. Without a width it passes as it is.
#[derive(Default)]
pub(super) struct Wrap {
    width: Option<usize>,
    /// Columns of the line that are shown.
    column: usize,
    /// Spaces and a word that are not shown yet, with the escape codes between them.
    held: String,
    /// Columns of the spaces that begin `held`, and of the word behind them.
    spaces: usize,
    word: usize,
    /// An escape code is under way.
    escaping: bool,
    /// How the line begins.
    lead: String,
}

impl Wrap {
    /// For lines of this many columns.
    pub(super) fn new(width: Option<usize>) -> Wrap {
        // Narrower than this nothing reads well, and a terminal may say that it has no columns at all.
        Wrap { width: width.filter(|&width| width >= 20), ..Wrap::default() }
    }

    /// What can be shown now that `text` has come. Escape codes take no room. Lines that are shown `as_is` are not laid
    /// out.
    pub(super) fn push(&mut self, text: &str, as_is: bool) -> String {
        let Some(width) = self.width else { return text.to_owned() };
        let mut out = String::with_capacity(text.len() + 2);
        for c in text.chars() {
            if self.escaping || c == '\x1b' {
                self.escaping = !c.is_ascii_alphabetic();
                self.held.push(c);
                continue;
            }
            if self.lead.chars().count() < LEAD_CHARS {
                self.lead.push(c);
            }
            match c {
                '\n' => {
                    self.place(width, &mut out);
                    out.push('\n');
                    (self.column, self.lead) = (0, String::new());
                }
                _ if as_is => {
                    self.place(usize::MAX, &mut out);
                    out.push(c);
                    self.column += columns(c);
                }
                ' ' => {
                    if self.word > 0 {
                        self.place(width, &mut out);
                    }
                    self.held.push(c);
                    self.spaces += 1;
                }
                _ => {
                    // Lines may break before and behind characters that fill two columns: scripts that have such have
                    // no spaces between words.
                    let wide = columns(c) > 1;
                    if wide && self.word > 0 {
                        self.place(width, &mut out);
                    }
                    self.held.push(c);
                    self.word += columns(c);
                    if wide || self.word >= width {
                        self.place(width, &mut out);
                    }
                }
            }
        }
        out
    }

    /// What was held.
    pub(super) fn flush(&mut self) -> String {
        let mut out = String::new();
        if let Some(width) = self.width {
            self.place(width, &mut out);
        }
        out
    }

    /// Shows what is held, on the next line if it does not fit on this one.
    fn place(&mut self, width: usize, out: &mut String) {
        let held = std::mem::take(&mut self.held);
        let (spaces, word) = (std::mem::take(&mut self.spaces), std::mem::take(&mut self.word));
        if self.column > 0 && word > 0 && self.column + spaces + word > width {
            let indent = indent(&self.lead).min(width / 2);
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            // The line's end stands for the spaces.
            let mut left = spaces;
            for c in held.chars() {
                match c {
                    ' ' if left > 0 => left -= 1,
                    _ => out.push(c),
                }
            }
            self.column = indent + word;
        } else {
            out.push_str(&held);
            self.column += spaces + word;
        }
    }
}

fn columns(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// How far the lines below one that begins so are indented: to the text of a list's item.
fn indent(lead: &str) -> usize {
    let text = lead.trim_start_matches(' ');
    let before = lead.len() - text.len();
    let digits = text.chars().take_while(char::is_ascii_digit).count();
    let mark = match &text[digits..] {
        rest if digits == 0 && rest.starts_with("• ") => 2,
        rest if digits > 0 && (rest.starts_with(". ") || rest.starts_with(") ")) => digits + 2,
        _ => 0,
    };
    before + mark
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whole, and a character at a time.
    fn check(text: &str, wanted: &str) {
        for size in [usize::MAX, 1, 3] {
            let mut wrap = Wrap::new(Some(20));
            let characters: Vec<char> = text.chars().collect();
            let mut shown = String::new();
            for part in characters.chunks(size) {
                shown.push_str(&wrap.push(&part.iter().collect::<String>(), false));
            }
            shown.push_str(&wrap.flush());
            assert_eq!(shown, wanted, "{text:?} in parts of {size}");
        }
    }

    #[test]
    fn words_stay_whole_and_lines_within_the_width() {
        check("The sky is blue today.", "The sky is blue\ntoday.");
        check("exactly twenty wide.", "exactly twenty wide.");
        check("exactly twenty wide. More", "exactly twenty wide.\nMore");
        check("one\ntwo", "one\ntwo");
        check("a  b", "a  b");
        check("", "");
    }

    #[test]
    fn a_word_wider_than_the_terminal_is_shown_in_full() {
        let word = "x".repeat(45);
        let mut wrap = Wrap::new(Some(20));
        let shown = wrap.push(&format!("a {word} b"), false) + &wrap.flush();
        assert_eq!(shown.replace(['\n', ' '], ""), format!("a{word}b"));
    }

    #[test]
    fn items_of_lists_hang_and_wide_characters_may_be_parted() {
        check("• one two three four five", "• one two three four\n  five");
        check("12. one two three four five", "12. one two three\n    four five");
        check("漢字漢字漢字漢字漢字漢字", "漢字漢字漢字漢字漢字\n漢字");
    }

    #[test]
    fn colours_take_no_room_and_stay() {
        check("The \x1b[1msky is blue\x1b[0m today.", "The \x1b[1msky is blue\x1b[0m\ntoday.");
    }

    #[test]
    fn code_and_texts_without_a_terminal_pass_as_they_are() {
        let long = "let a = 1; let b = 2; let c = 3;\n";
        assert_eq!(Wrap::new(Some(20)).push(long, true), long);
        assert_eq!(Wrap::new(None).push(long, false), long);
    }
}
