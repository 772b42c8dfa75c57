//! A conversation to go on with, and what decides how.

use std::sync::Arc;

use fornax_engine::Grammar;
use fornax_form::{Form, FormError};
use fornax_text::{Chat, ChatPrompt, ChatTemplate, Dialect, Reader, Special, Tokenizer};
use serde_json::{Map, Value, json};

use crate::{Conversation, Error, Fault, Place, Reading, Thinking, Tools, thinking};

/// What is asked of a model in a conversation.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// What was said so far.
    pub conversation: Conversation,
    /// What the model may call.
    pub tools: Option<Tools>,
    /// How much to think.
    pub thinking: Thinking,
    /// Variables of the chat template.
    pub variables: Map<String, Value>,
    /// What the answer must look like, and what the caller calls that.
    pub form: Option<(&'static str, Form)>,
    /// Stop strings may end the answer, so nothing of it can be promised a form.
    pub has_stops: bool,
}

/// The text side of the model that is asked.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its chat template, or why there is none.
    pub template: Result<&'a ChatTemplate, &'a fornax_text::Error>,
    /// Whether it may be asked anew in the middle of an answer. Whoever computes for it then sees where that is.
    pub asks_anew: bool,
}

/// Why a question is refused whose answer would be asked for anew in its middle.
const ASKED_ANEW: &str = "would have the model asked anew in the middle of an answer, which tells those who compute for \
    it where that is; --ask-anew allows it";

/// Compiles a form for the vocabulary of the model that is asked.
pub type Compile<'a> = &'a dyn Fn(&Form) -> Result<Grammar, FormError>;

/// A question as tokens, and how its answer is read.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// What the answer must look like, and where that is asked for: the question's own form, or that of a demanded call.
    pub form: Option<(&'static str, Form)>,
    /// How the answer is read.
    pub reading: Reading,
}

/// What the model, its template and the tools decide together, before anything is written.
struct Settled<'a> {
    question: &'a Question,
    model: Model<'a>,
    template: &'a ChatTemplate,
    dialect: Dialect,
    variables: Map<String, Value>,
    /// What an answer that must be a call looks like.
    demanded: Option<Form>,
    /// Another call may follow one whose arguments are a form.
    several: bool,
}

impl Question {
    /// Refuses what can be seen to be impossible before anything is written.
    pub fn check(&self, model: Model<'_>) -> Result<(), Error> {
        self.settle(model).map(drop)
    }

    /// The tokens of the prompt, for whoever wants to know how long it is.
    pub fn prompt(&self, model: Model<'_>) -> Result<Vec<u32>, Error> {
        let settled = self.settle(model)?;
        let mut prompt = settled.render()?;
        settled.begin_answer(&mut prompt);
        Ok(model.tokenizer.encode_chat(&prompt)?)
    }

    /// The prompt and how its answer is read. Renders, encodes and compiles: it takes as long as the conversation makes it.
    pub fn prepare(&self, model: Model<'_>, compile: Compile<'_>) -> Result<Prepared, Error> {
        let settled = self.settle(model)?;
        let mut prompt = settled.render()?;
        settled.begin_answer(&mut prompt);
        let reading = settled.reading(&prompt, compile)?;
        let form = match settled.demanded {
            Some(demanded) => Some(("tools", demanded)),
            None => self.form.clone(),
        };
        Ok(Prepared { prompt: model.tokenizer.encode_chat(&prompt)?, form, reading })
    }

    fn settle<'a>(&'a self, model: Model<'a>) -> Result<Settled<'a>, Error> {
        let template = model.template.map_err(|error| Error::NoTemplate(error.to_string()))?;
        self.conversation.check()?;
        let dialect = template.dialect(self.tools.is_some());
        let mut variables = self.variables.clone();
        let mut faults = Vec::new();
        faults.extend(thinking::apply(self.thinking.effort, template, dialect, &mut variables));
        if self.thinking.budget.is_some() && !dialect.thinks() {
            let rule = "this model does not think apart from its answer";
            faults.push(Fault::rule(Place::Budget, rule));
        }
        if let (Some((field, _)), Some(_)) = (&self.form, &self.tools) {
            faults.push(Fault::rule(Place::Tools, format!("cannot be had with {field}")));
        }
        let demanded = self.tools.as_ref().and_then(|tools| tools.form(dialect));
        let parallel = self.tools.as_ref().and_then(|tools| tools.parallel);
        let several = parallel == Some(true) && dialect.call_rest().is_some() && !self.has_stops;
        if !model.asks_anew {
            // A call that is demanded has its form from the beginning; only what comes behind it has not.
            if self.tools.as_ref().is_some_and(|tools| tools.held_forms(several).next().is_some()) {
                let rule = format!("strict tools, or calls behind one that is demanded, {ASKED_ANEW}");
                faults.push(Fault::rule(Place::Tools, rule));
            }
            // None at all is decided before the answer begins.
            if self.thinking.budget.is_some_and(|most| most > 0) {
                faults.push(Fault::rule(Place::Budget, ASKED_ANEW));
            }
        }
        if !faults.is_empty() {
            return Err(Error::Asked(faults));
        }
        Ok(Settled { question: self, model, template, dialect, variables, demanded, several })
    }
}

impl Settled<'_> {
    /// The conversation as the template writes it. A template that cannot tell the model of its tools, or calls that cannot
    /// be read, are an error: nothing is guessed.
    fn render(&self) -> Result<ChatPrompt, Error> {
        let mut chat = Chat::new(self.question.conversation.to_json(self.template.source()));
        chat.variables.clone_from(&self.variables);
        let without = self.render_chat(&mut chat)?;
        let Some(tools) = &self.question.tools else { return Ok(without) };
        chat.tools.clone_from(&tools.described);
        let prompt = self.render_chat(&mut chat).map_err(|error| {
            Error::ToolsUnsupported(format!("fails where there are tools: {}", Error::Text(error)))
        })?;
        if prompt.text() == without.text() {
            return Err(Error::ToolsUnsupported("does not tell the model of tools".to_owned()));
        }
        if self.dialect.family().is_none() {
            let reason = "tells the model of tools in a way whose calls cannot be read here";
            return Err(Error::ToolsUnsupported(reason.to_owned()));
        }
        Ok(prompt)
    }

    /// Some templates want the arguments of earlier calls as text.
    fn render_chat(&self, chat: &mut Chat) -> Result<ChatPrompt, fornax_text::Error> {
        let failed = match self.template.render(chat, self.model.tokenizer) {
            Ok(prompt) => return Ok(prompt),
            Err(failed) => failed,
        };
        let calls = chat.messages.iter_mut().filter_map(|message| message["tool_calls"].as_array_mut());
        let mut changed = false;
        for call in calls.flatten() {
            call["function"]["arguments"] = json!(call["function"]["arguments"].to_string());
            changed = true;
        }
        match (changed, &failed) {
            (true, fornax_text::Error::TemplateFailed { .. }) => {
                self.template.render(chat, self.model.tokenizer)
            }
            _ => Err(failed),
        }
    }

    /// Writes what the answer begins with, where that is not left to the model: the end of thinking, or of a demanded call
    /// all that stands before its arguments.
    fn begin_answer(&self, prompt: &mut ChatPrompt) {
        let has_form = self.question.form.is_some();
        // An answer of a form has no room for thoughts.
        let at_once = has_form || self.demanded.is_some() || self.question.thinking.budget == Some(0);
        if at_once
            && self.dialect.is_thinking_after(prompt.text())
            && let Some(stop) = self.dialect.stop_thinking()
        {
            prompt.push(&stop);
        } else if has_form && let Some(opening) = self.dialect.answer_opening() {
            prompt.push(opening);
        }
        if let (Some(tools), Some(_)) = (&self.question.tools, &self.demanded) {
            prompt.push(&self.dialect.call_opening(tools.demanded()).unwrap_or_default());
        }
    }

    /// How the answer to this prompt is read.
    fn reading(&self, prompt: &ChatPrompt, compile: Compile<'_>) -> Result<Reading, Error> {
        let Settled { question, model, dialect, several, .. } = *self;
        let is_demanded = self.demanded.is_some();
        let budget = question.thinking.budget;
        let stop = dialect.stop_thinking().filter(|_| budget.is_some());
        let stop = stop.map(|stop| model.tokenizer.encode(&stop, Special::Parse)).transpose()?;
        Ok(Reading {
            reader: self.reader(prompt),
            shown: model.tokenizer.controls_in(&dialect.marks()).into(),
            one_call: question.tools.as_ref().is_some_and(|tools| tools.parallel == Some(false)),
            budget: budget.zip(stop),
            strict: self.strict(compile)?.into(),
            held: is_demanded,
            several,
            only_calls: is_demanded && several,
        })
    }

    fn reader(&self, prompt: &ChatPrompt) -> Reader {
        match (&self.question.tools, &self.demanded) {
            (Some(tools), Some(_)) => {
                let list = if self.several { Arc::clone(&tools.list) } else { Arc::default() };
                match tools.demanded() {
                    Some(tool) => Reader::arguments_of(self.dialect, list, &tool.name),
                    None => Reader::call_of_any(self.dialect, list),
                }
            }
            _ if self.question.form.is_some() => Reader::plain(),
            (tools, _) => {
                let list = tools.as_ref().map_or_else(Arc::default, |tools| Arc::clone(&tools.list));
                Reader::new(self.dialect, list, prompt.text())
            }
        }
    }

    /// By tool, what the arguments of calls must look like that the model makes by itself.
    fn strict(&self, compile: Compile<'_>) -> Result<Vec<(String, Grammar)>, Error> {
        let mut strict = Vec::new();
        for (tool, form) in self.question.tools.iter().flat_map(|tools| tools.held_forms(self.several)) {
            if self.question.has_stops {
                return Err(Error::Asked(vec![Fault::rule(Place::Stop, "cannot be had with strict tools")]));
            }
            strict.push((tool.name.clone(), compile(&form).map_err(Error::Form)?));
        }
        Ok(strict)
    }
}
