//! A conversation with a model: what was said, how answers are chosen, and what they cost.

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use fornax::{
    Call, Completion, Content, Error, Finish, Form, Fornax, Image, Message, Outcome, Prompt, Request, Role,
    Sampling, Tools,
};

use super::super::failure::Failure;
use super::super::generate::{complete, show};
use super::super::interrupt::Interrupt;
use super::super::sampling::SamplingArgs;
use super::super::{headline, output, plan};
use super::Run;
use super::command::{self, Command};
use super::dragged::Dragged;
use super::is_cancelled;
use super::saved::Saved;
use super::screen::{Said, Screen, Style};

/// Tokens that are kept free for an answer whose length nobody has limited.
const ANSWER_ROOM: usize = 256;

/// Livelier than greedy, which repeats itself in a chat, and tame enough for small models.
fn defaults() -> Sampling {
    Sampling { temperature: 0.7, top_p: 0.95, ..Sampling::greedy() }
}

/// Opens the model of a name; the default without one.
pub(super) type Opener<'a> = dyn Fn(Option<&str>) -> anyhow::Result<Fornax> + 'a;

pub(super) struct Chat<'a> {
    model: Fornax,
    /// As it was asked for.
    name: String,
    /// Opens another model.
    open: &'a Opener<'a>,
    /// What was asked last.
    question: Option<Message>,
    args: &'a Run,
    interrupt: Interrupt,
    system: Option<String>,
    /// Pictures that the next message shows.
    images: Vec<Image>,
    /// Questions and answers in turn.
    turns: Vec<Message>,
    form: Option<Form>,
    /// What the model may call.
    tools: Option<Tools>,
    /// Calls of the last answer that have no result yet, and the results of those before them.
    open_calls: Vec<Call>,
    results: Vec<Content>,
    /// The flags of sampling, with what `/set` has changed of them.
    sampling: SamplingArgs,
    set: Vec<(String, String)>,
    /// In place of the flags'.
    temperature: Option<f32>,
    seed: Option<u64>,
    totals: Totals,
    /// How the last answer went.
    last: Option<String>,
}

/// What the answers so far have cost.
#[derive(Default)]
struct Totals {
    answers: usize,
    tokens: usize,
    /// Tokens after the first of each answer, and how long they took.
    decoded: usize,
    decode: Duration,
    prompt_tokens: usize,
    cached_tokens: usize,
    /// Turns that were dropped for want of room.
    forgotten: usize,
}

/// How an answer ended, if it did not fail.
pub(super) enum Answered {
    Whole,
    /// By Ctrl-C. What had come is remembered.
    Stopped,
}

impl Answered {
    /// For callers that have no second question: an answer that was stopped is a failure.
    pub(super) fn whole(self) -> anyhow::Result<()> {
        match self {
            Answered::Whole => Ok(()),
            Answered::Stopped => Err(Error::Cancelled.into()),
        }
    }

    /// What is to be said about it.
    pub(super) fn words(self) -> Option<String> {
        match self {
            Answered::Whole => None,
            Answered::Stopped => Some("stopped".to_owned()),
        }
    }
}

impl<'a> Chat<'a> {
    pub(super) fn new(
        (model, name): (Fornax, String),
        open: &'a Opener<'a>,
        args: &'a Run,
        (form, tools): (Option<Form>, Option<Tools>),
        interrupt: Interrupt,
    ) -> Chat<'a> {
        let system = args.system.clone();
        Chat {
            model,
            name,
            open,
            question: None,
            sampling: args.sampling.clone(),
            set: Vec::new(),
            args,
            interrupt,
            system,
            images: Vec::new(),
            turns: Vec::new(),
            form,
            tools,
            open_calls: Vec::new(),
            results: Vec::new(),
            temperature: None,
            seed: None,
            totals: Totals::default(),
            last: None,
        }
    }

    pub(super) fn model(&self) -> &Fornax {
        &self.model
    }

    /// Shows these with the next message.
    pub(super) fn show(&mut self, images: Vec<Image>) {
        self.images.extend(images);
    }

    /// Shows an image with the next message, if the model reads it.
    fn show_file(&mut self, path: &Path) -> anyhow::Result<()> {
        self.images.push(fornax::image(path)?);
        if let Err(error) = self.check("Hello") {
            self.images.pop();
            return Err(error.into());
        }
        Ok(())
    }

    /// Answers what was typed at a terminal. Images whose paths stand in it are shown with it, or with the next
    /// message where nothing else does.
    pub(super) fn answer_typed(&mut self, text: &str, home: Option<&Path>) -> anyhow::Result<Option<String>> {
        let Dragged { paths, text } = Dragged::of(text, home, Path::is_file);
        for path in &paths {
            self.show_file(path)?;
        }
        if text.trim().is_empty() {
            return Ok(Some(self.images_words()));
        }
        self.answer(&text).map(Answered::words)
    }

    fn images_words(&self) -> String {
        match self.images.len() {
            1 => "one image is shown with the next message".to_owned(),
            count => format!("{count} images are shown with the next message"),
        }
    }

    /// A message with the pictures that it shows, which stand before what is said.
    fn asked(&self, text: &str) -> Message {
        let images = self.images.iter().cloned().map(Content::Image);
        Message::of(Role::User, images.chain([Content::Text(text.to_owned())]).collect())
    }

    /// Whether `question` could be asked now.
    pub(super) fn check(&self, question: &str) -> Result<(), Error> {
        let question = self.asked(question);
        self.model.check(&self.request(self.turns.iter().chain([&question]))?)
    }

    fn request<'m>(&self, turns: impl Iterator<Item = &'m Message>) -> Result<Request, Error> {
        let system = self.system.iter().map(Message::system);
        let prompt = Prompt::Chat(system.chain(turns.cloned()).collect());
        let mut request = self.sampling.request(prompt, self.form.clone(), defaults(), self.model.text())?;
        request.sampling.temperature = self.temperature.unwrap_or(request.sampling.temperature);
        request.seed = self.seed.or(request.seed);
        request.tools.clone_from(&self.tools);
        request.thinking.budget = self.args.thinking_budget;
        request.parts = self.tells_thoughts();
        Ok(request)
    }

    /// Answers one message and says how fast.
    pub(super) fn answer(&mut self, text: &str) -> anyhow::Result<Answered> {
        // Whoever says something else does not answer the model's calls.
        self.open_calls.clear();
        self.results.clear();
        let question = self.asked(text);
        self.images.clear();
        self.question = Some(question.clone());
        self.respond(question)
    }

    /// Answers the last question once more, as if it had not been answered.
    pub(super) fn retry(&mut self) -> anyhow::Result<Option<String>> {
        let Some(question) = self.question.clone().or_else(|| self.turns.iter().rfind(is_question).cloned())
        else {
            return Ok(Some("nothing was asked yet".to_owned()));
        };
        // A question whose answer failed is not among the turns.
        let asked =
            self.turns.iter().rposition(|turn| is_question(&turn)).filter(|&at| self.turns[at] == question);
        let kept = self.turns.clone();
        self.turns.truncate(asked.unwrap_or(self.turns.len()));
        self.open_calls.clear();
        self.results.clear();
        let answered = self.respond(question);
        if answered.is_err() {
            self.turns = kept;
        }
        answered.map(Answered::words)
    }

    /// Goes on with another model. The one before stays where that cannot be had.
    fn change_model(&mut self, name: &str) -> anyhow::Result<String> {
        let model = (self.open)(Some(name))?;
        let before = std::mem::replace(&mut self.model, model);
        if let Err(error) = self.change(|_| {}) {
            self.model = before;
            return Err(error);
        }
        self.name = name.to_owned();
        Ok(self.headline())
    }

    /// What answers, and where.
    pub(super) fn headline(&self) -> String {
        let auto = self.args.capacity.device.device == "auto";
        let place = headline::place(self.model.kind(), self.model.device(), auto);
        format!("{} · {place}", headline::model(&self.name, self.model.plan()))
    }

    /// Changes one flag of sampling, or puts it back.
    fn set(&mut self, name: &str, value: &str) -> anyhow::Result<String> {
        let name = name.replace('-', "_");
        let mut set = self.set.clone();
        set.retain(|(known, _)| *known != name);
        if value != "off" {
            set.push((name.clone(), value.to_owned()));
        }
        let mut sampling = self.args.sampling.clone();
        for (name, value) in &set {
            sampling = sampling.with(name, value).map_err(Failure::usage)?;
        }
        // A name that does not exist is as wrong to put back.
        if value == "off" {
            self.args.sampling.knows(&name).map_err(Failure::usage)?;
        }
        let before = (std::mem::replace(&mut self.sampling, sampling), std::mem::replace(&mut self.set, set));
        if let Err(error) = self.change(|_| {}) {
            (self.sampling, self.set) = before;
            return Err(error);
        }
        Ok(self.set_words())
    }

    fn set_words(&self) -> String {
        let set: Vec<String> = self.set.iter().map(|(name, value)| format!("{name} {value}")).collect();
        if set.is_empty() { "nothing is set".to_owned() } else { format!("set: {}", set.join(", ")) }
    }

    /// Takes what the oldest open call came to; when all have a result, the model answers them.
    pub(super) fn give_result(&mut self, text: &str) -> anyhow::Result<Option<String>> {
        if self.open_calls.is_empty() {
            return Ok(Some("the model waits for no result".to_owned()));
        }
        let call = self.open_calls.remove(0);
        self.results.push(Content::Result(Outcome {
            call: call.id,
            name: Some(call.name),
            text: text.to_owned(),
        }));
        if let Some(next) = self.open_calls.first() {
            return Ok(Some(format!("and what did {} come to? /result TEXT", next.name)));
        }
        let results = std::mem::take(&mut self.results);
        self.respond(Message::of(Role::User, results)).map(Answered::words)
    }

    fn respond(&mut self, question: Message) -> anyhow::Result<Answered> {
        let style = Style::of(&io::stderr());
        let (request, forgotten) = self.request_with_room(&question)?;
        if forgotten > 0 {
            let context = self.model.context();
            let words = format!(
                "the context of {context} tokens is full: the oldest {forgotten} messages were forgotten"
            );
            writeln!(io::stderr(), "{}", style.dim(&words))?;
        }
        let mut out = io::stdout().lock();
        // An answer in a form is for programs, and is shown as it is.
        let mut said = Said::new(Screen::of(&io::stdout(), self.form.is_none()));
        let Chat { model, interrupt, .. } = self;
        let result = interrupt
            .during(|| complete(model, &request, interrupt, &mut |event| show(&mut out, &said.push(event))));
        let (rest, said) = said.end();
        show(&mut out, &rest)?;
        let completion = match result {
            Ok(completion) => completion,
            Err(error) => {
                if !said.is_empty() {
                    writeln!(out)?;
                }
                if !is_cancelled(&error) {
                    return Err(error);
                }
                // The model remembers what the user saw.
                if !said.is_empty() {
                    self.turns.extend([question, Message::assistant(said)]);
                }
                return Ok(Answered::Stopped);
            }
        };
        writeln!(out)?;
        out.flush()?;
        let cut = match (completion.finish, request.max_tokens) {
            (Finish::Stop, _) => "",
            (_, Some(_)) => "; cut at --max-tokens",
            (_, None) => "; cut: the context is full",
        };
        let words = speed(&completion);
        writeln!(io::stderr(), "{}", style.dim(&format!("{words}{cut}")))?;
        self.totals.count(&completion);
        self.last = Some(words);
        // What was thought is not remembered.
        let mut answer = vec![Content::Text(said)];
        answer.extend(completion.calls.iter().cloned().map(Content::Call));
        self.turns.extend([question, Message::of(Role::Assistant, answer)]);
        self.open_calls = completion.calls;
        Ok(Answered::Whole)
    }

    /// Whether thoughts are told apart, for people: programs get what the model wrote.
    fn tells_thoughts(&self) -> bool {
        let thinks = self.model.text().template().is_ok_and(|template| template.dialect(false).thinks());
        thinks && self.form.is_none() && io::stdout().is_terminal()
    }

    /// What to ask. Where the context is full the oldest messages go, the system's never; with it, how many went.
    fn request_with_room(&mut self, question: &Message) -> anyhow::Result<(Request, usize)> {
        let context = self.model.context();
        let mut forgotten = 0;
        let request = loop {
            let turns = self.turns[forgotten..].iter().chain([question]);
            let request = self.request(turns)?;
            let prompt = self.model.text().request_tokens(&request)?.len();
            let wanted = prompt + request.max_tokens.unwrap_or(ANSWER_ROOM.min(context / 4));
            // Half is cleared at once: what is behind a gap is computed again, which should be rare.
            let room = if forgotten == 0 { context } else { context / 2 };
            if wanted <= room || forgotten == self.turns.len() {
                break request;
            }
            forgotten = (forgotten + 2).min(self.turns.len());
            // Results do not stay without their calls.
            while self.turns.get(forgotten).is_some_and(has_results) {
                forgotten = (forgotten + 2).min(self.turns.len());
            }
        };
        // What does not fit even alone is refused before anything is forgotten.
        self.model.check(&request)?;
        self.turns.drain(..forgotten);
        self.totals.forgotten += forgotten;
        Ok((request, forgotten))
    }

    /// Does what a command says; what is to be said about it.
    pub(super) fn obey(&mut self, command: Command) -> anyhow::Result<String> {
        Ok(match command {
            Command::Help => command::help(),
            Command::Exit => String::new(),
            // These are answered where answers are shown.
            Command::Result(_) | Command::Retry => String::new(),
            Command::Image(path) => {
                self.show_file(&path)?;
                self.images_words()
            }
            Command::Model(None) => self.headline(),
            Command::Model(Some(name)) => self.change_model(&name)?,
            Command::Set(None) => self.set_words(),
            Command::Set(Some((name, value))) => self.set(&name, &value)?,
            Command::Clear => {
                self.turns.clear();
                self.images.clear();
                self.open_calls.clear();
                self.question = None;
                "the conversation is forgotten; settings stay".to_owned()
            }
            Command::System(None) => match &self.system {
                Some(system) => format!("system: {system}"),
                None => "no system message of your own".to_owned(),
            },
            Command::System(Some(system)) => {
                self.change(|chat| chat.system = system)?;
                "the system message is changed".to_owned()
            }
            Command::Temperature(None) => format!("temperature {}", self.settings()?.sampling.temperature),
            Command::Temperature(Some(temperature)) => {
                self.change(|chat| chat.temperature = temperature)?;
                format!("temperature {}", self.settings()?.sampling.temperature)
            }
            Command::Seed(None) => self.seed_words()?,
            Command::Seed(Some(seed)) => {
                self.seed = seed;
                self.seed_words()?
            }
            Command::Schema(None) => self.form_words(),
            Command::Schema(Some(path)) => {
                let form = path.map(|path| schema(&path)).transpose()?;
                self.change(|chat| chat.form = form)?;
                self.form_words()
            }
            Command::Save(path) => {
                let messages = self.system.iter().map(Message::system).chain(self.turns.iter().cloned());
                let saved = Saved {
                    model: self.name.clone(),
                    messages: messages.collect(),
                    temperature: self.temperature,
                    seed: self.seed,
                    schema: match &self.form {
                        Some(Form::JsonSchema(schema)) => Some(schema.clone()),
                        _ => None,
                    },
                };
                saved.write(&path)?;
                format!("{} messages are saved in {}", saved.messages.len(), path.display())
            }
            Command::Load(path) => {
                let saved = Saved::read(&path)?;
                let count = saved.messages.len();
                let other = (saved.model != self.name).then(|| format!("; they were {}'s", saved.model));
                self.change(|chat| {
                    (chat.system, chat.turns) = saved.split();
                    chat.question = None;
                    (chat.temperature, chat.seed) = (saved.temperature, saved.seed);
                    if let Some(schema) = saved.schema {
                        chat.form = Some(Form::JsonSchema(schema));
                    }
                })?;
                format!("{count} messages are loaded{}", other.unwrap_or_default())
            }
            Command::Stats => self.stats()?,
        })
    }

    /// Changes settings, or nothing if no question could be asked with them.
    fn change(&mut self, change: impl FnOnce(&mut Chat<'a>)) -> anyhow::Result<()> {
        let before =
            (self.system.clone(), self.turns.clone(), self.form.clone(), self.temperature, self.seed);
        change(self);
        let checked = match self.check("Hello") {
            // Room is made when something is asked.
            Err(Error::PromptTooLong { .. } | Error::RequestTooLong { .. }) if !self.turns.is_empty() => {
                Ok(())
            }
            checked => checked,
        };
        if checked.is_err() {
            (self.system, self.turns, self.form, self.temperature, self.seed) = before;
        }
        Ok(checked?)
    }

    /// A request with nothing in it but how answers are chosen.
    fn settings(&self) -> Result<Request, Error> {
        self.request(std::iter::empty())
    }

    fn seed_words(&self) -> Result<String, Error> {
        Ok(match self.settings()?.seed {
            Some(seed) => format!("seed {seed}"),
            None => "a new seed for each answer".to_owned(),
        })
    }

    fn form_words(&self) -> String {
        match &self.form {
            None => "answers have no set form",
            Some(Form::JsonSchema(_)) => "answers are JSON of your schema",
            Some(_) => "answers have the form that the flags ask for",
        }
        .to_owned()
    }

    fn stats(&self) -> Result<String, Error> {
        let Chat { model, totals, .. } = self;
        let used = match self.turns.is_empty() && self.system.is_none() {
            true => 0,
            false => model.text().request_tokens(&self.request(self.turns.iter())?)?.len(),
        };
        let share = totals.cached_tokens * 100 / totals.prompt_tokens.max(1);
        let rate = match totals.decoded {
            0 => String::new(),
            decoded => format!(", {:.1} tok/s", decoded as f64 / totals.decode.as_secs_f64().max(1e-9)),
        };
        let temperature = self.settings()?.sampling.temperature;
        let lines = [
            format!("model: {}", self.headline()),
            format!(
                "context: {used} of {} tokens, {} messages{}",
                model.context(),
                self.turns.len(),
                match totals.forgotten {
                    0 => String::new(),
                    count => format!(", {count} forgotten"),
                }
            ),
            format!("last answer: {}", self.last.as_deref().unwrap_or("none yet")),
            format!("all {} answers: {} tokens{rate}", totals.answers, totals.tokens),
            format!(
                "prompts: {} tokens, {} of them ({share} %) found in the cache and not computed again",
                totals.prompt_tokens, totals.cached_tokens
            ),
            format!("settings: temperature {temperature}, {}, {}", self.seed_words()?, self.form_words()),
            self.set_words(),
            plan::comparison_line(&model.memory()),
        ];
        Ok(lines.join("\n"))
    }
}

impl Totals {
    fn count(&mut self, completion: &Completion) {
        self.answers += 1;
        self.tokens += completion.tokens.len();
        self.decoded += completion.tokens.len().saturating_sub(1);
        self.decode += completion.timings.decode;
        self.prompt_tokens += completion.prompt_tokens;
        self.cached_tokens += completion.cached_tokens;
    }
}

fn schema(path: &Path) -> Result<Form, Failure> {
    let schema = serde_json::from_str(&output::text_of(path)?)
        .map_err(|error| Failure::usage(format!("{} is no JSON: {error}", path.display())))?;
    Ok(Form::JsonSchema(schema))
}

/// Whether a turn is what the user asked, and no result of a call.
fn is_question(message: &&Message) -> bool {
    message.role == Role::User && !has_results(message)
}

fn has_results(message: &Message) -> bool {
    message.content.iter().any(|part| matches!(part, Content::Result(_)))
}

fn speed(completion: &Completion) -> String {
    let decode =
        completion.decode_tokens_per_second().map(|rate| format!(", {rate:.1} tok/s")).unwrap_or_default();
    format!(
        "{} tokens{decode}; prompt {} tokens, {} of them cached, {:.1} tok/s; seed {}",
        completion.tokens.len(),
        completion.prompt_tokens,
        completion.cached_tokens,
        completion.prompt_tokens_per_second(),
        completion.seed,
    )
}
