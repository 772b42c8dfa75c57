//! How text looks where it is shown: rendered on a terminal with colours, plain on one without, untouched in a pipe.

use std::borrow::Cow;
use std::io::IsTerminal;

use fornax::Event;

use super::markdown::Markdown;
use super::wrap::Wrap;

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
        if self.coloured && !text.is_empty() {
            Cow::Owned(format!("\x1b[{code}m{text}\x1b[0m"))
        } else {
            Cow::Borrowed(text)
        }
    }
}

/// What becomes of an answer's text on its way out.
pub(super) enum Screen {
    /// Programs get exactly what the model said.
    Pipe,
    /// A terminal without colours: the markdown as it was written.
    Plain(Wrap),
    Rendered(Markdown, Wrap),
}

impl Screen {
    /// For a stream; `prose` is false for answers that are not meant to be read as text.
    pub(super) fn of(stream: &impl IsTerminal, prose: bool) -> Screen {
        match (stream.is_terminal(), Style::of(stream).coloured && prose) {
            (false, _) => Screen::Pipe,
            (true, false) => Screen::Plain(wrap(prose)),
            (true, true) => Screen::Rendered(Markdown::default(), wrap(prose)),
        }
    }

    pub(super) fn text<'t>(&mut self, text: &'t str) -> Cow<'t, str> {
        match self {
            Screen::Pipe => Cow::Borrowed(text),
            Screen::Plain(wrap) => Cow::Owned(wrap.push(&printable(text), false)),
            Screen::Rendered(markdown, wrap) => {
                let mut shown = String::with_capacity(text.len() + 16);
                for c in text.chars() {
                    // Lines of code are shown as they are.
                    let was_code = markdown.is_in_code();
                    let piece = markdown.push(c.encode_utf8(&mut [0; 4]));
                    shown.push_str(&wrap.push(&piece, was_code || markdown.is_in_code()));
                }
                Cow::Owned(shown)
            }
        }
    }

    /// The same for what is no markdown: thoughts.
    fn plain(&mut self, text: &str) -> String {
        match self {
            Screen::Pipe => text.to_owned(),
            Screen::Plain(wrap) | Screen::Rendered(_, wrap) => wrap.push(&printable(text), false),
        }
    }

    /// A word that was held until it ends.
    fn flush(&mut self) -> String {
        match self {
            Screen::Pipe => String::new(),
            Screen::Plain(wrap) | Screen::Rendered(_, wrap) => wrap.flush(),
        }
    }

    /// What was held back.
    pub(super) fn end(self) -> String {
        match self {
            Screen::Pipe => String::new(),
            Screen::Plain(mut wrap) => wrap.flush(),
            Screen::Rendered(markdown, mut wrap) => wrap.push(&markdown.finish(), false) + &wrap.flush(),
        }
    }
}

/// Prose is laid out in the terminal's columns as they are now.
fn wrap(prose: bool) -> Wrap {
    let size = terminal_size::terminal_size().filter(|_| prose);
    Wrap::new(size.map(|(width, _)| usize::from(width.0)))
}

/// An answer as it is shown: thoughts dimmed, where they are told apart, and above what is said; calls behind it.
pub(super) struct Said {
    screen: Screen,
    style: Style,
    /// What was said, without thoughts and calls.
    text: String,
    /// The last thing was a thought.
    thinks: bool,
    /// A call is being shown.
    calls: bool,
}

impl Said {
    /// For an answer on standard output.
    pub(super) fn new(screen: Screen) -> Said {
        let style = Style::of(&std::io::stdout());
        Said { screen, style, text: String::new(), thinks: false, calls: false }
    }

    /// What can be shown now that this has come.
    pub(super) fn push(&mut self, event: Event<'_>) -> String {
        match event {
            Event::Prompt { .. } | Event::Waiting | Event::Text("") => String::new(),
            Event::Text(text) => {
                let mut shown = self.close_call();
                if std::mem::take(&mut self.thinks) {
                    shown.push_str(&self.style.dim(&self.screen.flush()));
                    shown.push_str(&self.screen.plain("\n\n"));
                }
                self.text.push_str(text);
                shown.push_str(&self.screen.text(text));
                shown
            }
            // Programs asked for what is said.
            Event::Thought(_) if matches!(self.screen, Screen::Pipe) => String::new(),
            Event::Thought(text) => {
                let mut shown = self.close_call();
                // Where nothing can be dimmed, a word says what it is.
                if !self.thinks && !self.style.coloured {
                    shown.push_str("thinking: ");
                }
                self.thinks = true;
                shown.push_str(&self.style.dim(&self.screen.plain(text)));
                shown
            }
            Event::Call(name) => {
                let mut shown = self.close_call();
                shown.push_str(&self.screen.flush());
                let in_line = !(self.text.is_empty() || self.text.ends_with('\n'));
                if std::mem::take(&mut self.thinks) || (in_line && !shown.ends_with('\n')) {
                    shown.push('\n');
                }
                self.calls = true;
                // Programs read a call as JSON, a line each.
                shown.push_str(&match self.screen {
                    Screen::Pipe => format!("{{\"name\":{},\"arguments\":", serde_json::json!(name)),
                    Screen::Plain(_) | Screen::Rendered(..) => format!("calls {}(", printable(name)),
                });
                shown
            }
            Event::Arguments(text) => match self.screen {
                Screen::Pipe => text.to_owned(),
                Screen::Plain(_) | Screen::Rendered(..) => printable(text),
            },
        }
    }

    /// What was held back, and all that was said.
    pub(super) fn end(mut self) -> (String, String) {
        let shown = self.close_call();
        let rest = self.screen.end();
        let rest = if self.thinks { self.style.dim(&rest).into_owned() } else { rest };
        (shown + &rest, self.text)
    }

    fn close_call(&mut self) -> String {
        let end = match self.screen {
            Screen::Pipe => "}\n",
            Screen::Plain(_) | Screen::Rendered(..) => ")\n",
        };
        if std::mem::take(&mut self.calls) { end.to_owned() } else { String::new() }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fornax_text::{Delta, Dialect, Reader};

    use super::*;

    #[test]
    fn thoughts_are_dimmed_above_what_is_said_and_not_remembered() {
        let shown = |coloured: bool, pieces: &[&str]| {
            let mut reader = Reader::new(Dialect::of("<think>"), Arc::default(), "");
            let style = Style { coloured };
            let mut said = Said {
                screen: Screen::Plain(Wrap::default()),
                style,
                text: String::new(),
                thinks: false,
                calls: false,
            };
            let mut deltas: Vec<Delta> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
            deltas.extend(reader.finish());
            let show = |delta: &Delta| match delta {
                Delta::Reasoning(text) => said.push(Event::Thought(text)),
                Delta::Content(text) => said.push(Event::Text(text)),
                Delta::Call { .. } | Delta::Arguments { .. } => panic!("without tools nothing is a call"),
            };
            let mut shown: String = deltas.iter().map(show).collect();
            let (rest, said) = said.end();
            shown.push_str(&rest);
            (shown, said)
        };
        let pieces = ["<thi", "nk>\nHm. \u{1b}", "[2J", "</think>\n\nFour", "."];
        let (dimmed, said) = shown(true, &pieces);
        // A control character of a thought is no command to the terminal either.
        assert_eq!(dimmed.replace("\x1b[0m\x1b[2m", ""), "\x1b[2mHm. \u{fffd}[2J\x1b[0m\n\nFour.");
        assert_eq!(said, "Four.");
        assert_eq!(shown(false, &pieces).0, "thinking: Hm. \u{fffd}[2J\n\nFour.");
        assert_eq!(
            shown(true, &["No ", "thoughts."]),
            ("No thoughts.".to_owned(), "No thoughts.".to_owned())
        );
        // Cut in its thoughts.
        let cut = shown(true, &["<think>Hm"]);
        assert_eq!(cut, ("\x1b[2mHm\x1b[0m".to_owned(), String::new()));
    }

    #[test]
    fn calls_are_lines_of_json_for_programs_and_readable_for_people() {
        let shown = |screen: Screen| {
            let style = Style { coloured: false };
            let mut said = Said { screen, style, text: String::new(), thinks: false, calls: false };
            let events = [
                Event::Text("Let me see."),
                Event::Call("weather"),
                Event::Arguments("{\"city\":"),
                Event::Arguments("\"Paris\"}"),
                Event::Call("time"),
                Event::Arguments("{}"),
            ];
            let shown: String = events.into_iter().map(|event| said.push(event)).collect();
            let (rest, said) = said.end();
            assert_eq!(said, "Let me see.");
            shown + &rest
        };
        assert_eq!(
            shown(Screen::Pipe),
            "Let me see.\n{\"name\":\"weather\",\"arguments\":{\"city\":\"Paris\"}}\n{\"name\":\"time\",\"arguments\":{}}\n"
        );
        assert_eq!(
            shown(Screen::Plain(Wrap::default())),
            "Let me see.\ncalls weather({\"city\":\"Paris\"})\ncalls time({})\n"
        );
    }
}
