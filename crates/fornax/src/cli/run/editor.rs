//! The line that is being typed: history, several lines, completion.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustyline::completion::{Completer, FilenameCompleter, Pair};
use rustyline::config::{Behavior, CompletionType};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{
    Cmd, ConditionalEventHandler, Config, Context, Event, EventContext, EventHandler, Helper, KeyEvent,
    RepeatCount,
};

use super::command::{COMMANDS, TAKE_FILES};
use super::screen::Style;

/// Messages that are remembered from one chat to the next.
const HISTORY_MAX: usize = 1000;

/// What came from the keyboard.
pub(super) enum Typed {
    Text(String),
    /// Ctrl-C; `empty` where nothing had been typed.
    Interrupted {
        empty: bool,
    },
    /// Ctrl-D, or the terminal is gone.
    End,
}

pub(super) struct Editor {
    inner: rustyline::Editor<Keys, FileHistory>,
    history: Option<PathBuf>,
    complaint: Option<String>,
    /// Whether Ctrl-C came on an empty line.
    empty: Arc<AtomicBool>,
    style: Style,
}

impl Editor {
    /// Takes the terminal itself, wherever the answers go. Without `history` nothing is kept.
    pub(super) fn open(history: Option<PathBuf>, style: Style) -> anyhow::Result<Editor> {
        let config = Config::builder()
            .behavior(Behavior::PreferTerm)
            .completion_type(CompletionType::List)
            .max_history_size(HISTORY_MAX)?
            .history_ignore_dups(true)?
            .history_ignore_space(true)
            .build();
        let mut inner = rustyline::Editor::with_config(config)?;
        inner.set_helper(Some(Keys { files: FilenameCompleter::new() }));
        let empty = Arc::new(AtomicBool::new(false));
        inner.bind_sequence(KeyEvent::alt('\r'), EventHandler::Simple(Cmd::Newline));
        let interrupted = Box::new(Interrupted(Arc::clone(&empty)));
        inner.bind_sequence(KeyEvent::ctrl('C'), EventHandler::Conditional(interrupted));
        let mut editor = Editor { inner, history, complaint: None, empty, style };
        if let Some(path) = editor.history.clone().filter(|path| path.exists())
            && let Err(error) = editor.inner.load_history(&path)
        {
            editor.give_up_history(&error);
        }
        Ok(editor)
    }

    /// The next line, which may be several.
    pub(super) fn read(&mut self) -> anyhow::Result<Typed> {
        let prompt = ("> ", self.style.prompt("> "));
        let text = match self.inner.readline(&prompt) {
            Ok(text) => text,
            Err(ReadlineError::Interrupted) => {
                return Ok(Typed::Interrupted { empty: self.empty.swap(false, Ordering::Relaxed) });
            }
            Err(ReadlineError::Eof) => return Ok(Typed::End),
            Err(error) => return Err(error.into()),
        };
        self.remember(&text);
        Ok(Typed::Text(text))
    }

    /// Written at once: a chat that is killed loses nothing, and two at once keep both.
    fn remember(&mut self, text: &str) {
        let Some(path) = self.history.clone() else { return };
        let kept = || -> rustyline::Result<()> {
            if self.inner.add_history_entry(text)? {
                path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
                self.inner.append_history(&path)?;
            }
            Ok(())
        }();
        if let Err(error) = kept {
            self.give_up_history(&error);
        }
    }

    fn give_up_history(&mut self, error: &ReadlineError) {
        if let Some(path) = self.history.take() {
            self.complaint = Some(format!("no history is kept: {}: {error}", path.display()));
        }
    }

    /// What went wrong with the history, once.
    pub(super) fn take_complaint(&mut self) -> Option<String> {
        self.complaint.take()
    }
}

/// Whether more lines follow: an open `"""`, or a backslash at the end.
pub(super) fn is_open(text: &str) -> bool {
    let backslashes = text.len() - text.trim_end_matches('\\').len();
    text.matches("\"\"\"").count() % 2 == 1 || backslashes % 2 == 1
}

/// The message that was typed as several lines: without the `"""` around it and the backslashes before line ends.
pub(super) fn unfolded(text: &str) -> String {
    let inner = text.trim().strip_prefix("\"\"\"").and_then(|rest| rest.strip_suffix("\"\"\""));
    match inner {
        Some(inner) => inner.trim_matches(['\r', '\n']).to_owned(),
        None => text.replace("\\\r\n", "\n").replace("\\\n", "\n"),
    }
}

/// What the editor asks while a line is typed.
struct Keys {
    files: FilenameCompleter,
}

impl Helper for Keys {}
impl Highlighter for Keys {}
impl Hinter for Keys {
    type Hint = String;
}

impl Validator for Keys {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match is_open(typed.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

impl Completer for Keys {
    type Candidate = Pair;

    fn complete(
        &self,
        line: &str,
        position: usize,
        context: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<Pair>)> {
        let before = &line[..position];
        match before.split_once(' ') {
            None if before.starts_with('/') => Ok((0, commands(before))),
            Some((command, _)) if TAKE_FILES.contains(&command) => {
                self.files.complete(line, position, context)
            }
            _ => Ok((0, Vec::new())),
        }
    }
}

fn commands(beginning: &str) -> Vec<Pair> {
    let fitting = COMMANDS.iter().filter(|(name, ..)| name.starts_with(beginning));
    let pair = |&(name, value, _): &(&str, &str, &str)| {
        let space = if value.is_empty() { "" } else { " " };
        Pair { display: name.to_owned(), replacement: format!("{name}{space}") }
    };
    fitting.map(pair).collect()
}

/// Notes whether there was something on the line that Ctrl-C leaves.
struct Interrupted(Arc<AtomicBool>);

impl ConditionalEventHandler for Interrupted {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        self.0.store(context.line().is_empty(), Ordering::Relaxed);
        Some(Cmd::Interrupt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_lines_are_begun_and_ended() {
        let check = |text: &str, open: bool, message: &str| {
            assert_eq!((is_open(text), unfolded(text).as_str()), (open, message), "{text:?}");
        };
        check("one line", false, "one line");
        check("one \\\ntwo", false, "one \ntwo");
        check("one \\", true, "one \\");
        check("a \\\\", false, "a \\\\");
        check("\"\"\"", true, "\"\"\"");
        check("\"\"\"one\n  two\n", true, "\"\"\"one\n  two\n");
        check("\"\"\"one\n  two\"\"\"", false, "one\n  two");
        check("\"\"\"\none\n\n\"\"\"", false, "one");
        // A docstring in the middle is the message's own.
        check("def f(): \"\"\"Doc.\"\"\"", false, "def f(): \"\"\"Doc.\"\"\"");
    }

    #[test]
    fn names_of_commands_are_completed() {
        let names = |beginning| -> Vec<String> {
            commands(beginning).into_iter().map(|pair| pair.replacement).collect()
        };
        assert_eq!(names("/s"), ["/system ", "/seed ", "/set ", "/schema ", "/save ", "/stats"]);
        assert_eq!(names("/st"), ["/stats"]);
        assert_eq!(names("/x").len(), 0);
    }
}
