//! The parts of an assistant's text, as it comes.

use std::{borrow::Cow, sync::Arc};

use serde_json::Value as Json;

use super::{
    dialect::{Dialect, Family, Syntax, Tags},
    json::{Field, Object, Progress, Value},
    values,
};

/// A part of an answer. Parts of one kind that follow each other belong together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// What the model thinks.
    Reasoning(String),
    /// What it says.
    Content(String),
    /// It calls a tool; calls are numbered from 0.
    Call {
        /// Which call.
        index: usize,
        /// The tool, as the model wrote it: it may be none of those it was given.
        name: String,
    },
    /// More of a call's arguments, which together are JSON unless the answer was cut.
    Arguments {
        /// Which call.
        index: usize,
        /// Its text.
        text: String,
    },
}

/// A tool that the model was told of.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The JSON schema of its arguments.
    pub parameters: Json,
}

/// Reads an answer piece by piece. However it is cut, the parts joined are the same: characters are looked at one by
/// one. What may still become a mark is held; what begins like a call and is none is given out as it was written.
#[derive(Clone, Debug)]
pub struct Reader {
    dialect: Dialect,
    tools: Arc<[Tool]>,
    /// Without tools, what looks like a call is text.
    calls_tools: bool,
    state: State,
    marks: Vec<(Cow<'static, str>, Mark)>,
    /// May be the beginning of a mark.
    held: String,
    /// Nothing if a mark follows, text otherwise.
    space: String,
    /// White space is dropped until something is said.
    fresh: bool,
    /// The model may still begin to think: nothing was said or thought yet.
    may_think: bool,
    /// Calls begun.
    calls: usize,
    /// Calls complete.
    complete: usize,
    /// The last thing was a call.
    after_call: bool,
    /// What was read of a call that may turn out to be none.
    raw: String,
    /// The tool that is being called.
    tool: String,
    /// Text of the part that is being collected.
    text: String,
    deltas: Vec<Delta>,
}

#[derive(Clone, Debug)]
enum State {
    Content,
    Thinking,
    /// Between JSON objects of calls.
    Sequence,
    Object {
        object: Object,
        arguments: Option<String>,
        begun: bool,
        bare: bool,
    },
    /// Before a name.
    Lead,
    Name,
    /// The arguments of a call.
    Arguments(Value),
    /// Between arguments in tags.
    Body {
        count: usize,
    },
    Key {
        count: usize,
    },
    /// Between a key and its value.
    Gap {
        count: usize,
        key: String,
    },
    Value {
        count: usize,
        key: String,
    },
    /// A call that is read when it is whole.
    Whole,
    /// Of a message.
    Header,
    Message(Channel),
    /// All that comes are the arguments of one call.
    Forced,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    Thought,
    Said,
    Call,
}

/// What a mark does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Think,
    Open,
    Drop,
    /// A header follows.
    Head,
    End,
}

impl Reader {
    /// For the answer to `prompt`. Calls are looked for if there are tools.
    pub fn new(dialect: Dialect, tools: Arc<[Tool]>, prompt: &str) -> Reader {
        let calls_tools = !tools.is_empty();
        let mut reader = Reader {
            dialect,
            tools,
            calls_tools,
            state: State::Content,
            marks: Vec::new(),
            held: String::new(),
            space: String::new(),
            fresh: false,
            may_think: true,
            calls: 0,
            complete: 0,
            after_call: false,
            raw: String::new(),
            tool: String::new(),
            text: String::new(),
            deltas: Vec::new(),
        };
        let opened = |family: &Family| {
            matches!(family.syntax, Syntax::Named { .. })
                && family.opens.iter().any(|open| prompt.ends_with(open))
        };
        if dialect.has_channels() || dialect.has_headers() {
            reader.enter(State::Header);
        } else if dialect.is_thinking_after(prompt) {
            reader.fresh = true;
            reader.enter(State::Thinking);
        } else if dialect.family.is_some_and(opened) {
            reader.enter(State::Name);
        } else {
            reader.enter(State::Content);
        }
        reader
    }

    /// For an answer that is all said.
    pub fn plain() -> Reader {
        Reader::new(Dialect { thinking: None, family: None }, Arc::new([]), "")
    }

    /// For an answer that begins as the arguments of a call of this tool. Other calls may follow it if there are tools.
    pub fn arguments_of(dialect: Dialect, tools: Arc<[Tool]>, tool: &str) -> Reader {
        let mut reader = Reader::new(dialect, tools, "");
        reader.begin(tool);
        reader.enter(State::Forced);
        reader
    }

    /// For an answer that begins as a call, a JSON object with [`Dialect::call_keys`]. Others may follow if there are
    /// tools.
    pub fn call_of_any(dialect: Dialect, tools: Arc<[Tool]>) -> Reader {
        let mut reader = Reader::new(dialect, tools, "");
        reader.enter(State::Sequence);
        reader
    }

    /// The parts that a piece of text adds.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        for c in text.chars() {
            self.step(c);
        }
        std::mem::take(&mut self.deltas)
    }

    /// The parts that were still held.
    pub fn finish(&mut self) -> Vec<Delta> {
        let held = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Content => {
                self.say_all(&held);
                // White space at the end is the answer's own, unless it stood around calls.
                if self.calls == 0 && !self.fresh {
                    let space = std::mem::take(&mut self.space);
                    self.give_content(&space);
                }
            }
            State::Thinking => held.chars().for_each(|c| self.think(c)),
            State::Message(channel) => held.chars().for_each(|c| self.tell(channel, c)),
            State::Header => {
                let header = std::mem::take(&mut self.text) + &held;
                // Text without any header.
                if !header.contains("<|") {
                    self.say_all(&header);
                }
            }
            State::Forced => self.complete = self.calls,
            State::Sequence if self.after_call => {}
            State::Object { begun: false, .. } | State::Sequence | State::Lead | State::Name => {
                self.raw.push_str(&held);
                self.say_raw();
            }
            // The closing tag is all that is missing.
            State::Body { .. } => self.end_body(),
            State::Whole => {
                self.text.push_str(&held);
                self.read_whole();
            }
            State::Object { .. }
            | State::Arguments(_)
            | State::Key { .. }
            | State::Gap { .. }
            | State::Value { .. } => {}
        }
        std::mem::take(&mut self.deltas)
    }

    /// Whether the model thinks at this point.
    pub fn is_thinking(&self) -> bool {
        matches!(self.state, State::Thinking | State::Message(Channel::Thought))
    }

    /// Whether words may follow, and all that was read is decided: none of it is part of what may yet become a call, a
    /// thought or a mark.
    pub fn is_settled(&self) -> bool {
        let words = matches!(self.state, State::Content | State::Message(Channel::Said));
        words && self.held.is_empty() && self.raw.is_empty()
    }

    /// The tool that is being called at this point.
    pub fn called(&self) -> Option<&str> {
        (self.calls > self.complete).then_some(self.tool.as_str())
    }

    /// From here on, all that comes are the arguments of the call that was begun.
    pub fn expect_arguments(&mut self) {
        self.held.clear();
        self.enter(State::Forced);
    }

    /// The call that was expected is whole. What has to be written behind it, so that the answer goes on as the model's
    /// own;
    /// `None` where it cannot.
    pub fn call_ended(&mut self) -> Option<&'static str> {
        let rest = self.dialect.call_rest()?;
        match &self.state {
            State::Forced => {
                self.end_call();
                let named = matches!(self.dialect.family?.syntax, Syntax::Named { .. });
                self.enter(if named { State::Content } else { State::Sequence });
                Some(rest)
            }
            // Written as an object, as the model's own are.
            State::Sequence if self.after_call && !rest.is_empty() => Some(""),
            _ => None,
        }
    }

    /// Calls that were begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Calls that are whole.
    pub fn calls_complete(&self) -> usize {
        self.complete
    }

    /// Goes to a state and looks for its marks.
    fn enter(&mut self, state: State) {
        self.state = state;
        self.look();
    }

    fn look(&mut self) {
        let mut marks: Vec<(Cow<'static, str>, Mark)> = Vec::new();
        let mut add = |texts: &[&'static str], mark| {
            marks.extend(texts.iter().map(|&text| (Cow::Borrowed(text), mark)));
        };
        let family = self.dialect.family;
        match (&self.state, self.dialect.thinking, family) {
            (State::Thinking, Some(thinking), _) => add(&[thinking.close], Mark::End),
            (State::Content, thinking, family) => {
                if let Some(thinking) = thinking.filter(|_| self.may_think) {
                    add(&[thinking.open], Mark::Think);
                }
                if let Some(family) = family {
                    add(family.frames, Mark::Drop);
                    if family.headed {
                        add(&["<|start|>"], Mark::Head);
                    }
                    if self.calls_tools {
                        add(family.opens, Mark::Open);
                        add(family.sections, Mark::Drop);
                    }
                    if self.after_call {
                        add(family.closes, Mark::Drop);
                    }
                }
            }
            (State::Header, ..) => add(&["<|message|>"], Mark::End),
            (State::Message(_), ..) => {
                add(&["<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>"], Mark::End);
            }
            (State::Lead | State::Name, _, Some(Family { syntax: Syntax::Named { lead, ends }, .. })) => {
                match (&self.state, lead) {
                    (State::Lead, Some(lead)) => add(&[*lead], Mark::End),
                    _ => add(ends, Mark::End),
                }
            }
            (State::Whole, _, Some(family)) => add(family.closes, Mark::End),
            (state, _, Some(Family { syntax: Syntax::Tagged(tags), .. })) => match state {
                State::Name => match tags.name_end {
                    Some(end) => add(&[end], Mark::End),
                    None => add(&[tags.key, tags.end], Mark::End),
                },
                State::Body { .. } => add(&[tags.key, tags.end], Mark::End),
                State::Key { .. } => add(&[tags.key_end], Mark::End),
                State::Gap { .. } => add(tags.value.as_slice(), Mark::End),
                State::Value { key, .. } => {
                    marks.push((Cow::Owned(tags.value_end.replace("{}", key)), Mark::End));
                }
                _ => {}
            },
            _ => {}
        }
        self.marks = marks;
    }

    /// Takes a character into what is held; what is now certain to be text, and the mark that it completed.
    fn scan(&mut self, c: char) -> (String, Option<(Cow<'static, str>, Mark)>) {
        self.held.push(c);
        let mut text = String::new();
        while !self.held.is_empty() {
            let begins = |(mark, _): &&(Cow<'static, str>, Mark)| mark.starts_with(self.held.as_str());
            match self.marks.iter().find(begins) {
                None => text.push(self.held.remove(0)),
                Some(_) => {
                    let whole = self.marks.iter().find(|(mark, _)| *mark == self.held).cloned();
                    if whole.is_some() {
                        self.held.clear();
                    }
                    return (text, whole);
                }
            }
        }
        (text, None)
    }

    fn step(&mut self, c: char) {
        match &self.state {
            State::Content => self.step_content(c),
            State::Thinking => {
                let (text, mark) = self.scan(c);
                text.chars().for_each(|c| self.think(c));
                if mark.is_some() {
                    self.space.clear();
                    (self.fresh, self.may_think) = (true, false);
                    self.enter(State::Content);
                }
            }
            State::Sequence => self.step_sequence(c),
            State::Object { .. } => self.step_object(c),
            State::Lead | State::Name => self.step_name(c),
            State::Arguments(_) => self.step_arguments(c),
            State::Body { .. } | State::Key { .. } | State::Gap { .. } | State::Value { .. } => {
                self.step_tagged(c)
            }
            State::Whole => {
                let (text, mark) = self.scan(c);
                self.raw.push(c);
                self.text.push_str(&text);
                if mark.is_some() {
                    self.read_whole();
                }
            }
            State::Header => {
                let (text, mark) = self.scan(c);
                self.text.push_str(&text);
                if mark.is_some() {
                    self.read_header();
                }
            }
            &State::Message(channel) => {
                let (text, mark) = self.scan(c);
                text.chars().for_each(|c| self.tell(channel, c));
                if let Some((mark, _)) = mark {
                    if channel == Channel::Call {
                        self.complete += 1;
                    }
                    self.space.clear();
                    self.text.clear();
                    if mark == "<|channel|>" {
                        self.text.push_str(&mark);
                    }
                    self.enter(State::Header);
                }
            }
            State::Forced => {
                self.give_arguments(c.encode_utf8(&mut [0; 4]));
            }
        }
    }

    fn step_content(&mut self, c: char) {
        let bare = self.calls_tools
            && self.held.is_empty()
            && c == '{'
            && (self.may_think || self.after_call)
            && self.dialect.family.is_some_and(|family| family.syntax == Syntax::BareJson);
        if bare {
            self.raw = std::mem::take(&mut self.space);
            self.raw.push(c);
            return self.enter(object(true));
        }
        let (text, mark) = self.scan(c);
        self.say_all(&text);
        let Some((mark, kind)) = mark else { return };
        match kind {
            Mark::Think => {
                self.space.clear();
                self.fresh = true;
                self.enter(State::Thinking);
            }
            Mark::Drop | Mark::End => {
                self.space.clear();
                self.fresh = true;
            }
            Mark::Head => {
                self.space.clear();
                self.text.clear();
                self.enter(State::Header);
            }
            Mark::Open => {
                self.raw = std::mem::take(&mut self.space) + &mark;
                self.text.clear();
                let Some(family) = self.dialect.family else { return };
                let state = match &family.syntax {
                    Syntax::Json { .. } | Syntax::BareJson | Syntax::NameIsKey => {
                        self.after_call = false;
                        State::Sequence
                    }
                    Syntax::Named { lead: Some(_), .. } => State::Lead,
                    Syntax::Named { .. } | Syntax::Tagged(_) => State::Name,
                    Syntax::Python | Syntax::Gemma => State::Whole,
                    Syntax::Channels => State::Header,
                };
                self.enter(state);
            }
        }
    }

    fn step_sequence(&mut self, c: char) {
        if c == '{' {
            self.raw.push(c);
            self.enter(object(false));
        } else if c.is_whitespace() || matches!(c, '[' | ']' | ',') {
            self.raw.push(c);
        } else if self.after_call {
            // Behind the last one.
            self.enter(State::Content);
            self.step(c);
        } else {
            // No call begins so.
            self.raw.push(c);
            self.say_raw();
        }
    }

    fn step_object(&mut self, c: char) {
        self.raw.push(c);
        let State::Object { object, .. } = &mut self.state else { return };
        for field in object.push(c) {
            self.take_field(field, c);
        }
    }

    fn take_field(&mut self, field: Field, c: char) {
        let key_is_name = self.dialect.family.is_some_and(|family| family.syntax == Syntax::NameIsKey);
        let (name_key, arguments_key) = self.dialect.call_keys();
        let State::Object { object, arguments, begun, bare } = &mut self.state else { return };
        let is_name = !key_is_name && object.key == name_key;
        // Models mix up the words for arguments; nothing else has them.
        let is_arguments = key_is_name
            || object.key == arguments_key
            || matches!(object.key.as_str(), "arguments" | "parameters");
        match field {
            Field::More => {}
            Field::Key if key_is_name && !*begun => {
                let tool = object.key.clone();
                *begun = true;
                self.begin(&tool);
            }
            Field::Key => {}
            Field::Value { is_object: true } if is_arguments && *begun && arguments.is_none() => {
                self.give_arguments(c.encode_utf8(&mut [0; 4]));
            }
            Field::Value { .. } => {}
            Field::Complete { text } if is_name => {
                let tool: Option<String> = serde_json::from_str(&text).ok();
                let known = |tool: &String| !*bare || self.tools.iter().any(|other| other.name == *tool);
                match tool.filter(known) {
                    Some(tool) if !*begun => {
                        *begun = true;
                        let early = arguments.clone();
                        self.begin(&tool);
                        if let Some(early) = early {
                            self.give_arguments(&early);
                        }
                    }
                    Some(_) => {}
                    None => self.say_raw(),
                }
            }
            Field::Complete { text } if is_arguments && arguments.is_none() => {
                // Some write the arguments as a text that is JSON.
                let inner = serde_json::from_str::<String>(&text).ok();
                let streamed = *begun && text.starts_with('{');
                let text = inner.unwrap_or(text);
                *arguments = Some(text.clone());
                if *begun && !streamed {
                    self.give_arguments(&text);
                }
            }
            Field::Complete { .. } => {}
            Field::Ended if *begun => {
                let empty = arguments.is_none() && !key_is_name;
                if empty {
                    self.give_arguments("{}");
                }
                self.end_call();
                self.enter(State::Sequence);
            }
            Field::Ended | Field::Wrong if !*begun => self.say_raw(),
            Field::Ended | Field::Wrong => {
                self.end_call();
                self.enter(State::Content);
            }
        }
    }

    fn step_name(&mut self, c: char) {
        self.raw.push(c);
        let (text, mark) = self.scan(c);
        self.text.push_str(&text);
        let Some((mark, _)) = mark else { return };
        let text = std::mem::take(&mut self.text);
        if matches!(self.state, State::Lead) {
            return self.enter(State::Name);
        }
        // Kimi numbers its calls: functions.name:0. Attributes follow a quote.
        let name = text.split('"').next().unwrap_or_default().trim();
        let name = name.strip_prefix("functions.").unwrap_or(name);
        let name = name
            .rsplit_once(':')
            .filter(|(_, number)| number.parse::<u32>().is_ok())
            .map_or(name, |(name, _)| name);
        let family = self.dialect.family;
        if family.is_some_and(|family| family.name == "functionary-v3.2") && name == "all" {
            self.raw.clear();
            self.fresh = true;
            return self.enter(State::Content);
        }
        if name.is_empty() || !self.calls_tools {
            return self.say_raw();
        }
        self.begin(name);
        match family.map(|family| &family.syntax) {
            Some(Syntax::Tagged(tags)) => {
                self.give_arguments("{");
                if tags.name_end.is_none() && mark == tags.key {
                    self.enter(State::Key { count: 0 });
                } else if tags.name_end.is_none() {
                    self.end_body();
                } else {
                    self.enter(State::Body { count: 0 });
                }
            }
            _ => {
                self.enter(State::Arguments(Value::default()));
                if mark == "{" {
                    self.step('{');
                }
            }
        }
    }

    fn step_arguments(&mut self, c: char) {
        let State::Arguments(value) = &mut self.state else { return };
        // Fences and ids stand before the object.
        if value.text.is_empty() && c != '{' {
            return;
        }
        let progress = value.push(c);
        self.give_arguments(c.encode_utf8(&mut [0; 4]));
        if progress != Progress::More {
            self.end_call();
            self.enter(State::Content);
        }
    }

    fn step_tagged(&mut self, c: char) {
        let (text, mark) = self.scan(c);
        self.text.push_str(&text);
        let Some((mark, _)) = mark else { return };
        let Some(Family { syntax: Syntax::Tagged(tags), .. }) = self.dialect.family else { return };
        let text = std::mem::take(&mut self.text);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Body { count } if mark == tags.key => self.enter(State::Key { count }),
            State::Body { .. } => self.end_body(),
            // An opening tag that begins like a closing one.
            State::Key { .. } if text.starts_with('/') => self.end_body(),
            State::Key { count } => {
                let key = text.trim().to_owned();
                match tags.value {
                    Some(_) => self.enter(State::Gap { count, key }),
                    None => self.enter(State::Value { count, key }),
                }
            }
            State::Gap { count, key } => self.enter(State::Value { count, key }),
            State::Value { count, key } => {
                self.give_field(tags, count, &key, &text);
                self.enter(State::Body { count: count + 1 });
            }
            other => self.state = other,
        }
    }

    fn give_field(&mut self, tags: &Tags, count: usize, key: &str, text: &str) {
        let (key, attributes) = key.split_once('"').unwrap_or((key, ""));
        let is_text = if attributes.contains("string=\"true\"") || attributes.contains("type=\"string\"") {
            Some(true)
        } else {
            (!attributes.is_empty()).then_some(false)
        };
        let text = match tags.lines {
            true => {
                let text = text.strip_prefix('\n').unwrap_or(text);
                text.strip_suffix('\n').unwrap_or(text)
            }
            false => text,
        };
        let tool = self.tools.iter().find(|tool| tool.name == self.tool);
        let schema = tool.and_then(|tool| tool.parameters["properties"].get(key));
        let comma = if count > 0 { "," } else { "" };
        let field = format!("{comma}{}:{}", Json::from(key), values::typed(text, schema, is_text));
        self.give_arguments(&field);
    }

    fn end_body(&mut self) {
        self.give_arguments("}");
        self.end_call();
        self.enter(State::Content);
    }

    fn read_whole(&mut self) {
        let text = std::mem::take(&mut self.text);
        let calls = match self.dialect.family.map(|family| &family.syntax) {
            Some(Syntax::Gemma) => values::gemma_call(&text).map(|call| vec![call]),
            _ => values::python_calls(&text),
        };
        let Some(calls) = calls else { return self.say_raw() };
        for (name, arguments) in calls {
            self.begin(&name);
            self.give_arguments(&arguments);
            self.end_call();
        }
        self.enter(State::Content);
    }

    fn read_header(&mut self) {
        let header = std::mem::take(&mut self.text);
        let word = |after: &str| {
            let rest = header.split_once(after)?.1.trim_start();
            rest.split(|c: char| c.is_whitespace() || c == '<').next().filter(|word| !word.is_empty())
        };
        self.fresh = true;
        if self.dialect.has_headers() {
            self.may_think = false;
            let thinks = word("to=") == Some("self") && self.dialect.thinking.is_some();
            return self.enter(if thinks { State::Thinking } else { State::Content });
        }
        let channel = match word("to=") {
            Some(recipient) => {
                self.begin(recipient.strip_prefix("functions.").unwrap_or(recipient));
                Channel::Call
            }
            None if word("<|channel|>") == Some("analysis") => Channel::Thought,
            None => Channel::Said,
        };
        self.enter(State::Message(channel));
    }

    fn tell(&mut self, channel: Channel, c: char) {
        match channel {
            Channel::Thought => self.think(c),
            Channel::Said => self.say(c),
            Channel::Call => self.give_arguments(c.encode_utf8(&mut [0; 4])),
        }
    }

    fn begin(&mut self, name: &str) {
        self.deltas.push(Delta::Call { index: self.calls, name: name.to_owned() });
        self.calls += 1;
        name.clone_into(&mut self.tool);
        self.raw.clear();
        (self.after_call, self.may_think) = (false, false);
        self.space.clear();
    }

    fn end_call(&mut self) {
        self.complete = self.calls;
        (self.after_call, self.fresh) = (true, true);
        self.raw.clear();
        self.text.clear();
    }

    fn give_arguments(&mut self, more: &str) {
        let index = self.calls.saturating_sub(1);
        match self.deltas.last_mut() {
            Some(Delta::Arguments { index: last, text }) if *last == index => text.push_str(more),
            _ => self.deltas.push(Delta::Arguments { index, text: more.to_owned() }),
        }
    }

    fn give_content(&mut self, more: &str) {
        match self.deltas.last_mut() {
            _ if more.is_empty() => {}
            Some(Delta::Content(text)) => text.push_str(more),
            _ => self.deltas.push(Delta::Content(more.to_owned())),
        }
    }

    fn think(&mut self, c: char) {
        if c.is_whitespace() {
            if !self.fresh {
                self.space.push(c);
            }
            return;
        }
        self.fresh = false;
        let mut more = std::mem::take(&mut self.space);
        more.push(c);
        match self.deltas.last_mut() {
            Some(Delta::Reasoning(text)) => text.push_str(&more),
            _ => self.deltas.push(Delta::Reasoning(more)),
        }
    }

    fn say(&mut self, c: char) {
        // Where nothing is looked for, nothing waits.
        if c.is_whitespace() && (self.fresh || !self.marks.is_empty()) {
            if !self.fresh {
                self.space.push(c);
            }
            return;
        }
        let mut more = std::mem::take(&mut self.space);
        more.push(c);
        self.give_content(&more);
        let looks_again = self.may_think || self.after_call;
        (self.may_think, self.fresh, self.after_call) = (false, false, false);
        if looks_again && matches!(self.state, State::Content) {
            self.look();
        }
    }

    fn say_all(&mut self, text: &str) {
        text.chars().for_each(|c| self.say(c));
    }

    /// What looked like a call is text after all.
    fn say_raw(&mut self) {
        let raw = std::mem::take(&mut self.raw);
        self.text.clear();
        self.held.clear();
        self.fresh = false;
        self.enter(State::Content);
        self.say_all(&raw);
    }
}

fn object(bare: bool) -> State {
    State::Object { object: Object::default(), arguments: None, begun: false, bare }
}
