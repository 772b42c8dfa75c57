//! Markdown as it streams in, made readable on a terminal.
//!
//! Nothing waits longer than it must: a line's beginning until it is known what line it is, a mark until its other half
//! has come or the line has ended. A mark without its other half is shown as it was written, so no character of the
//! model is lost. Lines are not broken here: `wrap.rs` does so.

use super::screen::printable_char;

const RESET: &str = "\x1b[0m";
const BOLD: &str = "\x1b[1m";
const DIM: &str = "\x1b[2m";
const ITALIC: &str = "\x1b[3m";
const HEADING: &str = "\x1b[1;36m";
const CODE: &str = "\x1b[33m";

/// Characters that are held for the other half of a mark: emphasis is short, and whoever reads should not wait.
const HELD_MAX: usize = 300;

/// An answer being rendered.
#[derive(Default)]
pub(super) struct Markdown {
    place: Place,
    /// What cannot be shown yet.
    held: String,
    /// The fence that ends the code block: its character, and how many at least.
    fence: Option<(char, usize)>,
    /// In force outside of spans.
    base: &'static str,
    /// The character before `held`.
    before: Option<char>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Place {
    /// Nothing of the line is shown.
    #[default]
    Start,
    /// In its text.
    Text,
    /// In a line of a code block.
    Code,
}

/// What a line turns out to be.
enum Lead {
    Undecided,
    Text,
    Heading(usize),
    Bullet(usize),
    Quote(usize),
}

impl Markdown {
    /// What can be shown now that `text` has come.
    pub(super) fn push(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 16);
        for c in text.chars() {
            self.character(printable_char(c), &mut out);
        }
        out
    }

    /// Whether what comes is shown as it is.
    pub(super) fn is_in_code(&self) -> bool {
        self.place == Place::Code
    }

    /// What was still held.
    pub(super) fn finish(mut self) -> String {
        let mut out = self.push("\n");
        out.pop();
        out
    }

    fn character(&mut self, c: char, out: &mut String) {
        match self.place {
            Place::Start if self.fence.is_some() => self.code_start(c, out),
            Place::Start => self.start(c, out),
            Place::Code if c == '\n' => self.end_line(out),
            Place::Code => out.push(c),
            Place::Text => self.inline(c, out),
        }
    }

    fn end_line(&mut self, out: &mut String) {
        if !self.base.is_empty() || self.place == Place::Code {
            out.push_str(RESET);
        }
        out.push('\n');
        (self.place, self.base, self.before) = (Place::Start, "", None);
    }

    /// A line of a code block begins: it may be the fence.
    fn code_start(&mut self, c: char, out: &mut String) {
        let Some((mark, least)) = self.fence else { return };
        if c != '\n' {
            self.held.push(c);
            let text = self.held.trim_start_matches(' ');
            if text.trim_end_matches(' ').chars().all(|c| c == mark) {
                return;
            }
            self.place = Place::Code;
            out.push_str(CODE);
            out.push_str(&std::mem::take(&mut self.held));
            return;
        }
        let line = std::mem::take(&mut self.held);
        if line.trim().chars().count() >= least {
            self.fence = None;
            out.push_str(&format!("{DIM}{line}{RESET}"));
        } else {
            out.push_str(&line);
        }
        self.end_line(out);
    }

    fn start(&mut self, c: char, out: &mut String) {
        if c == '\n' {
            let line = std::mem::take(&mut self.held);
            if let Some(fence) = opened(&line) {
                self.fence = Some(fence);
                out.push_str(&format!("{DIM}{line}{RESET}"));
                return self.end_line(out);
            }
            if is_rule(&line) {
                out.push_str(&format!("{DIM}{}{RESET}", "─".repeat(24)));
                return self.end_line(out);
            }
            self.place = Place::Text;
            return line.chars().chain(['\n']).for_each(|c| self.character(c, out));
        }
        self.held.push(c);
        let rest = match lead(&self.held) {
            Lead::Undecided => return,
            Lead::Text => 0,
            Lead::Heading(rest) => {
                self.base = HEADING;
                out.push_str(HEADING);
                rest
            }
            Lead::Bullet(rest) => {
                let indent = self.held.len() - self.held.trim_start_matches(' ').len();
                out.push_str(&format!("{}• ", " ".repeat(indent)));
                rest
            }
            Lead::Quote(rest) => {
                out.push_str(&format!("{DIM}│{RESET} "));
                // What is quoted may be a heading or a list in turn.
                self.held = self.held.split_off(rest);
                return;
            }
        };
        let held = std::mem::take(&mut self.held);
        self.place = Place::Text;
        held[rest..].chars().for_each(|c| self.character(c, out));
    }

    fn inline(&mut self, c: char, out: &mut String) {
        if self.held.is_empty() {
            match c {
                '*' | '_' | '`' | '\\' => self.held.push(c),
                '\n' => self.end_line(out),
                _ => self.show(c, out),
            }
            return;
        }
        self.held.push(c);
        match span(&self.held, self.before) {
            Span::Undecided if c != '\n' && self.held.len() < HELD_MAX => {}
            Span::Undecided | Span::Literal => {
                // The first mark is a character like any other; what is behind it may still be a span.
                let held = std::mem::take(&mut self.held);
                let mark = held.chars().take_while(|&c| held.starts_with(c)).count();
                held.chars().take(mark).for_each(|c| self.show(c, out));
                held.chars().skip(mark).for_each(|c| self.character(c, out));
            }
            Span::Escaped => {
                self.held.clear();
                self.show(c, out);
            }
            Span::Closed { style, inner, len } => {
                let inner = inner.to_owned();
                let rest = self.held.split_off(len);
                self.before = self.held.chars().last();
                self.held.clear();
                out.push_str(style);
                if style == CODE {
                    out.push_str(&inner);
                } else {
                    let mut within = Markdown { place: Place::Text, base: style, ..Markdown::default() };
                    let shown = within.push(&inner) + &within.finish();
                    out.push_str(shown.strip_suffix(RESET).unwrap_or(&shown));
                }
                out.push_str(RESET);
                out.push_str(self.base);
                rest.chars().for_each(|c| self.character(c, out));
            }
        }
    }

    fn show(&mut self, c: char, out: &mut String) {
        self.before = Some(c);
        out.push(c);
    }
}

/// What the beginning of a line makes of it.
fn lead(held: &str) -> Lead {
    let text = held.trim_start_matches(' ');
    let Some(first) = text.chars().next() else { return Lead::Undecided };
    let rest = text.trim_start_matches(first);
    let run = text.len() - rest.len();
    match first {
        '#' if rest.is_empty() && run <= 6 => Lead::Undecided,
        '#' if run <= 6 && rest.starts_with(' ') => Lead::Heading(held.len() - rest.len() + 1),
        '>' if rest.is_empty() => Lead::Undecided,
        '>' => Lead::Quote(held.len() - text.len() + 1 + usize::from(text[1..].starts_with(' '))),
        '-' | '+' | '*' if run == 1 && rest.starts_with(' ') => Lead::Bullet(held.len() - rest.len() + 1),
        // A rule, a bullet, or emphasis.
        '-' | '+' | '*' | '_' if rest.is_empty() => Lead::Undecided,
        '`' | '~' if rest.is_empty() => Lead::Undecided,
        // The language, until the line ends; a backtick in it makes it a span.
        '`' | '~' if run >= 3 && !rest.contains('`') && rest.len() < HELD_MAX => Lead::Undecided,
        _ => Lead::Text,
    }
}

/// Whether a whole line opens a code block.
fn opened(line: &str) -> Option<(char, usize)> {
    let text = line.trim_start_matches(' ');
    let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
    let run = text.len() - text.trim_start_matches(mark).len();
    (run >= 3).then_some((mark, run))
}

fn is_rule(line: &str) -> bool {
    let text = line.trim();
    text.len() >= 3 && ['-', '*', '_'].iter().any(|&mark| text.chars().all(|c| c == mark))
}

/// What a mark and what follows it have become.
enum Span<'h> {
    Undecided,
    Literal,
    Escaped,
    Closed { style: &'static str, inner: &'h str, len: usize },
}

/// `held` begins with a mark and has at least one more character.
fn span(held: &str, before: Option<char>) -> Span<'_> {
    let Some(mark) = held.chars().next() else { return Span::Literal };
    if mark == '\\' {
        let next = held[1..].chars().next();
        return if next.is_some_and(|c| c.is_ascii_punctuation()) { Span::Escaped } else { Span::Literal };
    }
    let rest = held.trim_start_matches(mark);
    let run = held.len() - rest.len();
    if rest.is_empty() {
        return Span::Undecided;
    }
    if mark == '`' {
        let closing = &held[..run];
        return match rest.find(closing) {
            Some(at) => Span::Closed { style: CODE, inner: &rest[..at], len: run + at + run },
            None => Span::Undecided,
        };
    }
    let in_word = before.is_some_and(char::is_alphanumeric);
    if run > 2 || in_word || rest.starts_with(char::is_whitespace) {
        return Span::Literal;
    }
    let style = if run == 2 { BOLD } else { ITALIC };
    // The last character is looked at, so that one star is not taken for half of two, nor the underscore in a name for
    // an end.
    let closing = &held[..run];
    let mut from = 0;
    while let Some(at) = rest[from..].find(closing).map(|at| at + from) {
        let (inner, behind) = (&rest[..at], &rest[at + run..]);
        let Some(next) = behind.chars().next() else { return Span::Undecided };
        let ends_well = !inner.is_empty()
            && !inner.ends_with(char::is_whitespace)
            && !inner.ends_with(mark)
            && !inner.ends_with('\\')
            && next != mark
            && (mark == '*' || !next.is_alphanumeric());
        if ends_well {
            return Span::Closed { style, inner, len: run + at + run };
        }
        from = at + run + behind.len() - behind.trim_start_matches(mark).len();
    }
    Span::Undecided
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The escape codes by name, so that expectations can be read.
    fn named(text: &str) -> String {
        let names =
            [(RESET, "</>"), (HEADING, "<h>"), (BOLD, "<b>"), (DIM, "<d>"), (ITALIC, "<i>"), (CODE, "<c>")];
        names.iter().fold(text.to_owned(), |text, (code, name)| text.replace(code, name))
    }

    /// Whole, and a character at a time.
    fn check(text: &str, wanted: &str) {
        for size in [usize::MAX, 1, 3] {
            let mut markdown = Markdown::default();
            let characters: Vec<char> = text.chars().collect();
            let mut shown = String::new();
            for part in characters.chunks(size) {
                shown.push_str(&markdown.push(&part.iter().collect::<String>()));
            }
            shown.push_str(&markdown.finish());
            assert_eq!(named(&shown), wanted, "{text:?} in parts of {size}");
        }
    }

    #[test]
    fn what_is_marked_is_shown_and_the_marks_are_not() {
        check("Plain.", "Plain.");
        check("# A *b*\nc", "<h>A <i>b</><h></>\nc");
        check("a **bold** b", "a <b>bold</> b");
        check("**bold**", "<b>bold</>");
        check("*it* and _it_", "<i>it</> and <i>it</>");
        check("**a `b` c**", "<b>a <c>b</><b> c</>");
        check("run `ls -l` now", "run <c>ls -l</> now");
        check("``a`b``", "<c>a`b</>");
        check("- one\n  * two\n+ three", "• one\n  • two\n• three");
        check("1. one\n2. two", "1. one\n2. two");
        check("> said\n>> twice", "<d>│</> said\n<d>│</> <d>│</> twice");
        check("---", "<d>────────────────────────</>");
        check("- **a**: b", "• <b>a</>: b");
    }

    #[test]
    fn code_is_shown_as_it_is() {
        check(
            "```rust\nlet **a** = 1;\n\n# no\n```\n*b*",
            "<d>```rust</>\n<c>let **a** = 1;</>\n\n<c># no</>\n<d>```</>\n<i>b</>",
        );
        check("~~~~\n```\n~~~~", "<d>~~~~</>\n<c>```</>\n<d>~~~~</>");
        // A block that the answer never closes.
        check("```\na", "<d>```</>\n<c>a</>");
    }

    #[test]
    fn what_only_looks_like_a_mark_stays() {
        for text in [
            "2 * 3 * 4",
            "2**3**4",
            "snake_case_name and __init__x",
            "a ** b",
            "*",
            "**",
            "#no heading",
            "####### seven",
            "-5 degrees",
            "an *open star",
            "an **open\npair**",
            "`open",
            "| a | b |",
            "> ",
            "C:\\dir\\new",
            "***both***",
        ] {
            let shown = if text == "> " { "<d>│</> ".to_owned() } else { text.to_owned() };
            check(text, &shown);
        }
        check("\\*no\\*", "*no*");
    }

    #[test]
    fn nothing_waits_for_a_mark_that_may_never_close() {
        let mut markdown = Markdown::default();
        assert_eq!(markdown.push("Hello wor"), "Hello wor");
        assert_eq!(markdown.push("ld **"), "ld ");
        let long = "x".repeat(HELD_MAX);
        assert!(markdown.push(&long).starts_with("**xxx"));
    }

    #[test]
    fn the_model_cannot_command_the_terminal() {
        check("a\x1b]0;title\x07b\x1b[2J\rc", "a�]0;title�b�[2J�c");
        check("```\n\x1b[1m\n```", "<d>```</>\n<c>�[1m</>\n<d>```</>");
    }

    #[test]
    fn wide_characters_and_long_lines_pass_through() {
        check("**漢字** 👩‍👩‍👧", "<b>漢字</> 👩‍👩‍👧");
        let long = "ä".repeat(10_000);
        check(&long, &long);
    }
}
