//! How text looks where it is shown: rendered on a terminal with colours, plain on one without, untouched in a pipe.

use std::borrow::Cow;
use std::io::IsTerminal;

use super::markdown::Markdown;

/// Colours for what the program itself says; nothing at all where they are not wanted.
#[derive(Clone, Copy)]
pub(super) struct Style {
    coloured: bool,
}

impl Style {
    /// As <https://no-color.org> asks: a terminal that knows colours, and nobody who forbids them.
    pub(super) fn of(stream: &impl IsTerminal) -> Style {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let dumb = set("TERM").is_none_or(|term| term == "dumb");
        Style { coloured: stream.is_terminal() && set("NO_COLOR").is_none() && !dumb }
    }

    pub(super) fn dim<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.paint("2", text)
    }

    pub(super) fn bad<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.paint("31", text)
    }

    pub(super) fn prompt<'t>(&self, text: &'t str) -> Cow<'t, str> {
        self.paint("1;36", text)
    }

    fn paint<'t>(&self, code: &str, text: &'t str) -> Cow<'t, str> {
        if self.coloured { Cow::Owned(format!("\x1b[{code}m{text}\x1b[0m")) } else { Cow::Borrowed(text) }
    }
}

/// What becomes of an answer's text on its way out.
pub(super) enum Screen {
    /// Programs get exactly what the model said.
    Pipe,
    /// A terminal without colours: the markdown as it was written.
    Plain,
    Rendered(Markdown),
}

impl Screen {
    /// For a stream; `prose` is false for answers that are not meant to be read as text.
    pub(super) fn of(stream: &impl IsTerminal, prose: bool) -> Screen {
        match (stream.is_terminal(), Style::of(stream).coloured && prose) {
            (false, _) => Screen::Pipe,
            (true, false) => Screen::Plain,
            (true, true) => Screen::Rendered(Markdown::default()),
        }
    }

    pub(super) fn text<'t>(&mut self, text: &'t str) -> Cow<'t, str> {
        match self {
            Screen::Pipe => Cow::Borrowed(text),
            Screen::Plain => Cow::Owned(printable(text)),
            Screen::Rendered(markdown) => Cow::Owned(markdown.push(text)),
        }
    }

    /// What was held back.
    pub(super) fn end(self) -> String {
        match self {
            Screen::Pipe | Screen::Plain => String::new(),
            Screen::Rendered(markdown) => markdown.finish(),
        }
    }
}

/// A text that moves no cursor and sets no title: control characters of a model or a file are no commands to the
/// terminal.
pub(super) fn printable(text: &str) -> String {
    text.chars().map(printable_char).collect()
}

pub(super) fn printable_char(c: char) -> char {
    if c.is_control() && !matches!(c, '\n' | '\t') { char::REPLACEMENT_CHARACTER } else { c }
}
