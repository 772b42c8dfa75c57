//! Chat in the terminal, or one answer.

use std::io::{self, BufRead, IsTerminal, Write};

use fornax::{Completion, Error, Form, Fornax, Message, OpenOptions, Prompt, Request, Sampling};

use super::args::Run;
use super::generate::{complete, show};
use super::interrupt::Interrupt;
use super::locate::{self, Reference};
use super::{device, output, plan};

/// Livelier than greedy, which repeats itself in a chat, and tame enough for small models.
fn defaults() -> Sampling {
    Sampling { temperature: 0.7, top_p: 0.95, ..Sampling::greedy() }
}

pub(crate) fn run(args: &Run) -> anyhow::Result<()> {
    run_with(args, &|options| options)
}

/// The same, with the model opened by options that `adapt` changes.
pub(crate) fn run_with(args: &Run, adapt: &dyn Fn(OpenOptions) -> OpenOptions) -> anyhow::Result<()> {
    let (model, prompt) = positionals(args);
    let path = locate::locate(model)?;
    let interrupt = Interrupt::install()?;
    let mut options = device::options(&path, &args.capacity.device)?;
    if let Some(file) = &args.chat_template_file {
        options = options.chat_template(output::text_of(file)?);
    }
    let form = args.sampling.form()?;
    let model = device::open(adapt(options.parallel(args.capacity.parallel)))?;
    let mut chat = Chat { model, args, form, messages: Vec::new(), interrupt };
    // A chat template that cannot be used is found before the first question is typed.
    chat.model.check(&chat.request(&[Message::user(prompt.unwrap_or("Hello"))])?)?;
    device::announce(chat.model.device(), &args.capacity.device)?;
    if args.verbose {
        writeln!(io::stderr(), "{}", plan::comparison_line(&chat.model.memory()))?;
    }
    match prompt {
        Some(prompt) => chat.answer(prompt),
        None => chat.converse(),
    }
}

/// Which positional is what.
fn positionals(args: &Run) -> (Option<&str>, Option<&str>) {
    match (args.model.as_deref(), args.prompt.as_deref()) {
        (Some(only), None) if !Reference::parse(only).is_model() => (None, Some(only)),
        both => both,
    }
}

struct Chat<'a> {
    model: Fornax,
    args: &'a Run,
    form: Option<Form>,
    messages: Vec<Message>,
    interrupt: Interrupt,
}

impl Chat<'_> {
    fn request(&self, messages: &[Message]) -> Result<Request, Error> {
        let prompt = Prompt::Chat(messages.to_vec());
        self.args.sampling.request(prompt, self.form.clone(), defaults(), self.model.text())
    }

    /// Answers one message and says how fast.
    fn answer(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(Message::user(text));
        let request = self.request(&self.messages)?;
        let Chat { model, interrupt, .. } = self;
        let mut out = io::stdout().lock();
        let completion =
            interrupt.during(|| complete(model, &request, interrupt, &mut |text| show(&mut out, text)))?;
        writeln!(out)?;
        tell_speed(&completion)?;
        self.messages.push(Message::assistant(completion.text));
        Ok(())
    }

    /// Answers every line of standard input until it ends.
    fn converse(&mut self) -> anyhow::Result<()> {
        let terminal = io::stdin().is_terminal();
        if terminal {
            writeln!(io::stderr(), "Type a message; Ctrl-C stops an answer, Ctrl-D ends the chat.")?;
        }
        loop {
            if terminal {
                write!(io::stderr(), "> ")?;
            }
            let mut line = String::new();
            if io::stdin().lock().read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim().is_empty() {
                continue;
            }
            match self.answer(line.trim_end_matches(['\r', '\n'])) {
                Err(error) if terminal && is_cancelled(&error) => {
                    // The user saw half an answer; the model forgets question and half alike.
                    self.messages.pop();
                    writeln!(io::stdout())?;
                }
                answered => answered?,
            }
        }
    }
}

fn is_cancelled(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<Error>(), Some(Error::Cancelled))
}

fn tell_speed(completion: &Completion) -> io::Result<()> {
    let decode =
        completion.decode_tokens_per_second().map(|rate| format!(", {rate:.1} tok/s")).unwrap_or_default();
    writeln!(
        io::stderr(),
        "{} tokens{decode}; prompt {} tokens, {} of them cached, {:.1} tok/s; seed {}",
        completion.tokens.len(),
        completion.prompt_tokens,
        completion.cached_tokens,
        completion.prompt_tokens_per_second(),
        completion.seed,
    )
}
