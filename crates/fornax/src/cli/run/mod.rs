//! Chat in the terminal, or one answer.

mod args;
mod chat;
mod command;
mod dragged;
mod editor;
mod markdown;
mod saved;
mod screen;
mod tools;
mod wrap;

use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::Path;

use anyhow::Context;
use fornax::hub::{Name, nearest};
use fornax::{Error, Fornax, OpenOptions, catalog};

use self::chat::{Answered, Chat};
use self::command::Command;
use self::editor::{Editor, Typed, is_open, unfolded};
use self::screen::{Style, printable};
use super::failure;
use super::interrupt::Interrupt;
use super::locate::{self, Alone};
use super::{choose, device, output, plan};
pub(crate) use args::Run;

/// Most bytes that are read from a pipe as one message: more is no question.
const INPUT_BYTES_MAX: u64 = 16 << 20;

pub(crate) fn run(args: &Run) -> anyhow::Result<()> {
    run_with(args, &|options| options)
}

/// The same, with the model opened by options that `adapt` changes.
pub(crate) fn run_with(args: &Run, adapt: &dyn Fn(OpenOptions) -> OpenOptions) -> anyhow::Result<()> {
    let (named, prompt) = positionals(args)?;
    if prompt.is_some_and(|prompt| prompt.trim().is_empty()) {
        return Err(failure::Failure::usage("the prompt is empty; write one, or leave it out to chat").into());
    }
    let chosen = choose::model(named)?;
    let path = locate::locate(Some(&chosen))?;
    // What a pipe has is read before the model is loaded: it may be what is wrong.
    let prompt = prompt.map(with_standard_input).transpose()?;
    let interrupt = Interrupt::install()?;
    let template = args.chat_template_file.as_deref().map(output::text_of).transpose()?;
    let open_at = |path: &Path, template: Option<String>| -> anyhow::Result<Fornax> {
        let mut options = args.draft.apply(device::options(path, &args.capacity.device)?)?;
        options = args.kv_disk.apply(options, device::tell_of_disk)?;
        if let Some(template) = template {
            options = options.chat_template(template);
        }
        Ok(device::open(adapt(options.parallel(args.capacity.parallel)))?)
    };
    let form = args.sampling.form()?;
    let tools = args.tools.as_deref().map(tools::read).transpose()?.flatten();
    let images = args.image.iter().map(fornax::image).collect::<Result<Vec<_>, Error>>()?;
    let model = open_at(&path, template)?;
    // A template of the user's own was meant for the model that it was given with.
    let open = |name: Option<&str>| open_at(&locate::locate(name)?, None);
    let mut chat = Chat::new((model, chosen), &open, args, (form, tools), interrupt);
    chat.show(images);
    // A chat template that cannot be used is found before the first question is typed.
    chat.check(prompt.as_deref().unwrap_or("Hello"))?;
    writeln!(io::stderr(), "{}", Style::of(&io::stderr()).dim(&printable(&chat.headline())))?;
    if args.verbose {
        writeln!(io::stderr(), "{}", plan::comparison_line(&chat.model().memory()))?;
    }
    match prompt {
        Some(prompt) => chat.answer(&prompt).and_then(Answered::whole),
        None if io::stdin().is_terminal() => converse(&mut chat, args),
        None => answer_lines(&mut chat),
    }
}

/// Which positional is what.
fn positionals(args: &Run) -> Result<(Option<&str>, Option<&str>), failure::Failure> {
    match (args.model.as_deref(), args.prompt.as_deref()) {
        (Some(only), None) => match Alone::of(&Name::parse(only)) {
            Alone::Model => Ok((Some(only), None)),
            Alone::Prompt => Ok((None, Some(only))),
            Alone::Unknown => {
                let nearest = nearest::words(only, locate::hub().ok().as_ref());
                let example = format!("fornax run {} {only:?}", catalog::DEFAULT);
                Err(failure::Failure::usage(format!(
                    "no model is called {only:?}{nearest}; see `fornax list --available`, or ask a single word with its model: {example}"
                )))
            }
        },
        both => Ok(both),
    }
}

/// The prompt, and below it what a pipe carries: `fornax run "Summarise:" < report.txt`.
fn with_standard_input(prompt: &str) -> anyhow::Result<String> {
    if io::stdin().is_terminal() {
        return Ok(prompt.to_owned());
    }
    let mut text = String::new();
    let read = io::stdin().lock().take(INPUT_BYTES_MAX + 1).read_to_string(&mut text);
    read.map_err(|error| failure::Failure::usage(format!("cannot read standard input: {error}")))?;
    if text.len() as u64 > INPUT_BYTES_MAX {
        let message = format!("standard input has more than {INPUT_BYTES_MAX} bytes; send less");
        return Err(failure::Failure::usage(message).into());
    }
    let text = text.trim_end_matches(['\r', '\n']);
    Ok(if text.is_empty() { prompt.to_owned() } else { format!("{prompt}\n\n{text}") })
}

/// Answers every line of a pipe until it ends. Lines are messages and never commands: they may come from anywhere.
fn answer_lines(chat: &mut Chat<'_>) -> anyhow::Result<()> {
    let mut input = io::stdin().lock().take(INPUT_BYTES_MAX);
    let mut text = String::new();
    loop {
        input.set_limit(INPUT_BYTES_MAX);
        let count = input.read_line(&mut text).context("cannot read standard input")?;
        if count > 0 && is_open(text.trim_end_matches(['\r', '\n'])) {
            continue;
        }
        let message = unfolded(text.trim_end_matches(['\r', '\n']));
        if !message.trim().is_empty() {
            chat.answer(&message).and_then(Answered::whole)?;
        }
        if count == 0 {
            return Ok(());
        }
        text.clear();
    }
}

/// Talks with whoever sits at the terminal until they end it.
fn converse(chat: &mut Chat<'_>, args: &Run) -> anyhow::Result<()> {
    let style = Style::of(&io::stderr());
    let say = |text: &str| writeln!(io::stderr(), "{}", style.dim(text));
    let history = (!args.no_history)
        .then(|| catalog::cache_dir(|name| std::env::var_os(name)))
        .transpose()
        .unwrap_or_default()
        .map(|folder| folder.join("history"));
    let mut editor = Editor::open(history, style)?;
    say("Type a message, or /help. Ctrl-C stops an answer, Ctrl-D ends the chat.")?;
    let home = std::env::home_dir();
    let mut leaving = false;
    loop {
        let typed = editor.read()?;
        let asked_to_leave = std::mem::replace(&mut leaving, false);
        let text = match typed {
            Typed::End => return Ok(()),
            Typed::Interrupted { empty: true } if asked_to_leave => return Ok(()),
            Typed::Interrupted { empty } => {
                leaving = empty;
                if empty {
                    say("Ctrl-C again, or Ctrl-D, ends the chat.")?;
                }
                continue;
            }
            Typed::Text(text) => text,
        };
        if let Some(complaint) = editor.take_complaint() {
            say(&complaint)?;
        }
        let done = match Command::parse(&text) {
            _ if text.trim().is_empty() => continue,
            None => chat.answer_typed(&unfolded(&text), home.as_deref()),
            Some(Ok(Command::Result(text))) => chat.give_result(&text),
            Some(Ok(Command::Retry)) => chat.retry(),
            Some(Ok(Command::Exit)) => return Ok(()),
            Some(Ok(command)) => chat.obey(command).map(Some),
            Some(Err(complaint)) => Ok(Some(complaint)),
        };
        match done {
            Ok(None) => {}
            Ok(Some(words)) => say(&printable(&words))?,
            // Whoever read the answers is gone, or the terminal.
            Err(error) if error.chain().any(|cause| cause.is::<io::Error>()) => return Err(error),
            // What is wrong with one message does not end the chat.
            Err(error) => {
                let line = failure::report(&error).line.unwrap_or_default();
                writeln!(io::stderr(), "{}", style.bad(&printable(&line)))?;
            }
        }
    }
}

fn is_cancelled(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<Error>(), Some(Error::Cancelled))
}
