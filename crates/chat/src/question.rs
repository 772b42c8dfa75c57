//! A conversation to go on with, and what decides how.

use std::sync::Arc;

use fornax_engine::Grammar;
use fornax_form::{Form, FormError};
use fornax_text::{Chat, ChatPrompt, ChatTemplate, Dialect, Reader, Special, Tokenizer};
use serde_json::{Map, Value, json};

use crate::sight::{self, Bounds, Shown, Sight};
use crate::{Content, Conversation, Error, Fault, Place, Reading, Role, Thinking, Tools, thinking};

/// What some templates want otherwise; each says whether there was anything to change.
const CHANGES: [fn(&mut Chat) -> bool; 4] =
    [describe_tools, join_instructions, write_arguments, number_calls];

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
    /// The last message is the beginning of the answer, which goes on behind it.
    pub continues: bool,
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
    /// What looks at pictures for it, or why it reads none.
    pub sight: Result<&'a dyn Sight, &'static str>,
    /// How far a prompt with pictures is written.
    pub bounds: Bounds<'a>,
}

/// Why a question is refused whose answer would be asked for anew in its middle.
const ASKED_ANEW: &str = "would have the model asked anew in the middle of an answer, which tells those who compute for \
    it where that is; --ask-anew allows it";

/// Compiles a form for the vocabulary of the model that is asked.
pub type Compile<'a> = &'a dyn Fn(&Form) -> Result<Grammar, FormError>;

/// A question as tokens, and how its answer is read.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The prompt, with as many placeholders as pictures take tokens.
    pub prompt: Vec<u32>,
    /// The pictures that are read in their place: whoever asks the engine looks at them when it is known that the prompt
    /// is not too long.
    pub shown: Vec<Shown>,
    /// What the answer must look like, and where that is asked for: the question's own form, or that of a demanded
    /// call.
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
        Ok(settled.tokens(&prompt)?.0)
    }

    /// The prompt and how its answer is read. Renders, encodes and compiles: it takes as long as the conversation makes
    /// it.
    pub fn prepare(&self, model: Model<'_>, compile: Compile<'_>) -> Result<Prepared, Error> {
        let settled = self.settle(model)?;
        let mut prompt = settled.render()?;
        settled.begin_answer(&mut prompt);
        let reading = settled.reading(&prompt, compile)?;
        let (prompt, shown) = settled.tokens(&prompt)?;
        let form = match settled.demanded {
            Some(demanded) => Some(("tools", demanded)),
            // Only what is said has it, if anything is.
            None if self.tools.is_some() => None,
            None => self.form.clone(),
        };
        Ok(Prepared { prompt, shown, form, reading })
    }

    fn settle<'a>(&'a self, model: Model<'a>) -> Result<Settled<'a>, Error> {
        let template = model.template.map_err(|error| Error::NoTemplate(error.to_string()))?;
        self.conversation.check(model.sight.err())?;
        let dialect = template.dialect(self.tools.is_some());
        let mut variables = self.variables.clone();
        let mut faults = Vec::new();
        faults.extend(thinking::apply(self.thinking.effort, template, dialect, &mut variables));
        if self.thinking.budget.is_some() && !dialect.thinks() {
            let rule = "this model does not think apart from its answer";
            faults.push(Fault::rule(Place::Budget, rule));
        }
        let demanded = self.tools.as_ref().and_then(|tools| tools.form(dialect));
        let parallel = self.tools.as_ref().and_then(|tools| tools.parallel);
        let several = parallel == Some(true) && dialect.call_rest().is_some();
        if !model.asks_anew {
            // A call that is demanded has its form from the beginning; only what comes behind it has not.
            if self.tools.as_ref().is_some_and(|tools| tools.held_forms(several).next().is_some()) {
                let rule = format!("strict tools, or calls behind one that is demanded, {ASKED_ANEW}");
                faults.push(Fault::rule(Place::Tools, rule));
            }
            // Which of both it becomes is seen in the answer.
            if self.form.is_some() && self.tools.is_some() {
                faults.push(Fault::rule(
                    Place::Tools,
                    format!("tools beside a form of the answer, {ASKED_ANEW}"),
                ));
            }
            // None at all is decided before the answer begins.
            if self.thinking.budget.is_some_and(|most| most > 0) {
                faults.push(Fault::rule(Place::Budget, ASKED_ANEW));
            }
        }
        if !faults.is_empty() {
            return Err(Error::Asked(faults));
        }
        if self.continues {
            let rule = match self.conversation.messages.last() {
                Some(last) if last.role != Role::Assistant => "must be the assistant's, whose answer goes on",
                Some(last) if !last.content.iter().all(|part| matches!(part, Content::Text(_))) => {
                    "goes on only behind text"
                }
                _ if self.form.is_some() || demanded.is_some() => "cannot go on as a form or a demanded call",
                Some(_) => "",
                None => "must be there to go on from",
            };
            if !rule.is_empty() {
                let place = Place::Message(self.conversation.messages.len().saturating_sub(1));
                return Err(Error::Asked(vec![Fault::rule(place, rule)]));
            }
        }
        Ok(Settled { question: self, model, template, dialect, variables, demanded, several })
    }
}

impl Settled<'_> {
    /// The conversation as the template writes it. A template that cannot tell the model of its tools, or calls that
    /// cannot be read, are an error: nothing is guessed.
    fn render(&self) -> Result<ChatPrompt, Error> {
        let mut chat = Chat::new(self.question.conversation.to_json(self.template.source()));
        chat.variables.clone_from(&self.variables);
        if self.question.continues {
            // It is written behind what begins an answer.
            chat.messages.pop();
        }
        let without = self.render_chat(&chat)?;
        let Some(tools) = &self.question.tools else { return Ok(without) };
        chat.tools.clone_from(&tools.described);
        let prompt = self.render_chat(&chat).map_err(|error| {
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

    /// The prompt's tokens, with room for its pictures.
    fn tokens(&self, prompt: &ChatPrompt) -> Result<(Vec<u32>, Vec<Shown>), Error> {
        let images = self.question.conversation.images();
        let Some(sight) = self.model.sight.ok().filter(|_| !images.is_empty()) else {
            return Ok((self.model.tokenizer.encode_chat(prompt)?, Vec::new()));
        };
        let framed = sight.frame().map(|frame| prompt.with_replaced(frame.written, frame.by));
        let tokens = self.model.tokenizer.encode_chat(framed.as_ref().unwrap_or(prompt))?;
        sight::make_room(&tokens, &images, sight, self.model.bounds)
    }

    /// A template that fails may want it otherwise: the fewest changes with which it does not.
    fn render_chat(&self, chat: &Chat) -> Result<ChatPrompt, fornax_text::Error> {
        use fornax_text::Error::{TemplateFailed, TemplateRefused};
        let failed = match self.template.render(chat, self.model.tokenizer) {
            Err(failed @ (TemplateFailed { .. } | TemplateRefused { .. })) => failed,
            other => return other,
        };
        let mut sets: Vec<u32> = (1..1 << CHANGES.len()).collect();
        sets.sort_by_key(|set| set.count_ones());
        for set in sets {
            let mut changed = chat.clone();
            let mut changes = (0..CHANGES.len()).filter(|change| set >> change & 1 == 1);
            if changes.all(|change| CHANGES[change](&mut changed))
                && let Ok(prompt) = self.template.render(&changed, self.model.tokenizer)
            {
                return Ok(prompt);
            }
        }
        Err(failed)
    }

    /// Writes what the answer begins with, where that is not left to the model: the end of thinking, or of a demanded
    /// call all that stands before its arguments.
    fn begin_answer(&self, prompt: &mut ChatPrompt) {
        let is_said =
            self.question.form.is_some() && self.question.tools.is_none() || self.question.continues;
        // An answer of a form has no room for thoughts.
        let at_once = is_said || self.demanded.is_some() || self.question.thinking.budget == Some(0);
        if at_once
            && self.dialect.is_thinking_after(prompt.text())
            && let Some(stop) = self.dialect.stop_thinking()
        {
            prompt.push(&stop);
        } else if is_said && let Some(opening) = self.dialect.answer_opening() {
            prompt.push(opening);
        }
        if let (Some(tools), Some(_)) = (&self.question.tools, &self.demanded) {
            prompt.push(&self.dialect.call_opening(tools.demanded()).unwrap_or_default());
        }
        if let Some(begun) = self.question.conversation.messages.last().filter(|_| self.question.continues) {
            prompt.push_untrusted(&begun.text());
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
            said: self.said(compile)?,
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
            (None, _) if self.question.form.is_some() => Reader::plain(),
            // What begins such an answer was written.
            _ if self.question.continues && self.dialect.answer_opening().is_some() => Reader::plain(),
            (tools, _) => {
                let list = tools.as_ref().map_or_else(Arc::default, |tools| Arc::clone(&tools.list));
                Reader::new(self.dialect, list, prompt.text())
            }
        }
    }

    /// What is said must look like, where the model may call instead.
    fn said(&self, compile: Compile<'_>) -> Result<Option<(Grammar, Vec<u32>)>, Error> {
        let (Some((field, form)), Some(_), None) =
            (&self.question.form, &self.question.tools, &self.demanded)
        else {
            return Ok(None);
        };
        let form = compile(form).map_err(|error| Error::Said { field, error })?;
        let opening = self.dialect.answer_opening().unwrap_or_default();
        Ok(Some((form, self.model.tokenizer.encode(opening, Special::Parse)?)))
    }

    /// By tool, what the arguments of calls must look like that the model makes by itself.
    fn strict(&self, compile: Compile<'_>) -> Result<Vec<(String, Grammar)>, Error> {
        let mut strict = Vec::new();
        for (tool, form) in self.question.tools.iter().flat_map(|tools| tools.held_forms(self.several)) {
            strict.push((tool.name.clone(), compile(&form).map_err(Error::Form)?));
        }
        Ok(strict)
    }
}

/// Some templates fail on a tool without a description. An empty one says as little.
fn describe_tools(chat: &mut Chat) -> bool {
    let mut changed = false;
    for tool in &mut chat.tools {
        if tool["function"]["description"].is_null() {
            tool["function"]["description"] = json!("");
            changed = true;
        }
    }
    changed
}

/// Some templates know instructions only before everything else: what is said later goes there, in its order.
fn join_instructions(chat: &mut Chat) -> bool {
    let is_instruction = |message: &Value| message["role"] == "system";
    // Where there are pictures, what is said is no text that others could be put behind.
    let has_parts = |message: &Value| is_instruction(message) && !message["content"].is_string();
    if !chat.messages.iter().skip(1).any(is_instruction) || chat.messages.iter().any(has_parts) {
        return false;
    }
    let (said, rest): (Vec<Value>, Vec<Value>) =
        std::mem::take(&mut chat.messages).into_iter().partition(is_instruction);
    let texts: Vec<&str> = said.iter().filter_map(|message| message["content"].as_str()).collect();
    chat.messages = vec![json!({"role": "system", "content": texts.join("\n\n")})];
    chat.messages.extend(rest);
    true
}

/// Some templates want the arguments of earlier calls as text.
fn write_arguments(chat: &mut Chat) -> bool {
    let calls = chat.messages.iter_mut().filter_map(|message| message["tool_calls"].as_array_mut());
    let mut changed = false;
    for call in calls.flatten() {
        call["function"]["arguments"] = json!(call["function"]["arguments"].to_string());
        changed = true;
    }
    changed
}

/// Some templates take ids of nine letters and digits alone (Mistral's), or fail on calls that have none, as those of Ollama's
/// API. The ids follow from the order of the calls, so that a conversation that goes on begins with the same text. A result
/// without an id belongs to the first call of its tool that has none yet.
fn number_calls(chat: &mut Chat) -> bool {
    struct Open {
        id: Value,
        tool: Value,
        number: String,
        answered: bool,
    }
    let mut calls: Vec<Open> = Vec::new();
    for message in &mut chat.messages {
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let number = format!("call{:05}", calls.len());
            let (id, tool) = (call["id"].take(), call["function"]["name"].clone());
            call["id"] = json!(number);
            calls.push(Open { id, tool, number, answered: false });
        }
        if message["role"] != "tool" {
            continue;
        }
        let (id, tool) = (&message["tool_call_id"], &message["name"]);
        let meant = calls.iter_mut().find(|call| match id.is_string() {
            true => call.id == *id,
            false => !call.answered && (tool.is_null() || call.tool == *tool),
        });
        if let Some(call) = meant {
            call.answered = true;
            message["tool_call_id"] = json!(call.number);
        }
    }
    !calls.is_empty()
}
