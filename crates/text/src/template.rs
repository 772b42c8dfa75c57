//! Chat templates: a conversation becomes the text that a model was trained on.
//!
//! Templates are Jinja, written for Python. What a message says must never turn into structure, so every string of
//! the conversation is searched for control tokens before it is rendered, and where one starts (or could start, at
//! the end of a string) the character is marked. Templates pass marks through untouched; afterwards they are taken out
//! and remembered. A conversation without control tokens carries no marks and renders byte for byte as in Python.

use std::borrow::Cow;
use std::fmt;

use fornax_format::Checkpoint;
use jiff::Zoned;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, StringInput, Value, ValueKind};
use minijinja::{Environment, ErrorKind};
use serde_json::Value as Json;

use crate::allowance::{self, Metered};
use crate::special::WholeTokens;
use crate::{Dialect, Error, Tokenizer, python};

/// Stands before a character that a message wrote and that must not begin a control token. A noncharacter, so text
/// never holds it; where it does all the same, it is doubled.
const MARK: char = '\u{fdd0}';

/// Instructions that one rendering may take, chosen to leave room for long conversations. It stops endless loops. It
/// also bounds how deep values can be nested, and with that the stack that dropping or comparing them takes.
const FUEL: u64 = 5_000_000;

/// Lexical tokens between `{{` and `}}`, or `{%` and `%}`. The parser goes one call deeper for each operator of a
/// chain. Chosen far above what templates write; not measured.
const EXPRESSION_TOKENS_MAX: usize = 4096;

/// Stack of the thread that parses and renders. Only what is touched takes memory. A test nests 99,990
/// lists and comes back; how much of the stack that needs was not measured.
const STACK_BYTES: usize = 512 << 20;

/// Bytes of a rendered prompt: more than any context holds.
const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    plain: Part,
    /// What is used where there are tools, if it is another one.
    tools: Option<Part>,
}

/// A template that compiles, and how the model writes its answers to it. It is compiled again for each rendering, which
/// takes a small part of the time.
#[derive(Debug)]
struct Part {
    name: &'static str,
    source: String,
    dialect: Dialect,
}

impl Part {
    fn new(name: &'static str, source: &str) -> Result<Part, Error> {
        check_expressions(source)?;
        let part =
            Part { name, source: without_generation_tags(source).into_owned(), dialect: Dialect::of(source) };
        let failed = |e: minijinja::Error| Error::TemplateSyntax { reason: e.to_string() };
        on_large_stack(|| part.compile().map(drop).map_err(failed))?;
        Ok(part)
    }

    fn compile(&self) -> Result<Metered<'_>, minijinja::Error> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        Metered::compile(self.name, &self.source, syntax)
    }
}

/// A conversation and how to render it.
#[derive(Debug, Clone)]
pub struct Chat {
    /// The messages: objects with `role`, `content` and whatever else the template knows.
    pub messages: Vec<Json>,
    /// Tools that the model may call, as JSON schemas; empty for none.
    pub tools: Vec<Json>,
    /// Documents to answer from; empty for none.
    pub documents: Vec<Json>,
    /// Whether the text ends where the assistant begins to answer.
    pub add_generation_prompt: bool,
    /// Further variables that the template knows, such as `enable_thinking`.
    pub variables: serde_json::Map<String, Json>,
    /// What the template takes for the present.
    pub now: Zoned,
}

impl Chat {
    /// A conversation that the assistant is to go on with, now, without tools.
    pub fn new(messages: Vec<Json>) -> Chat {
        Chat {
            messages,
            tools: Vec::new(),
            documents: Vec::new(),
            add_generation_prompt: true,
            variables: serde_json::Map::new(),
            now: Zoned::now(),
        }
    }
}

/// A rendered chat that knows which of its characters may not be part of a control token.
/// [`Tokenizer::encode_chat`] makes tokens of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    text: String,
    /// Byte offsets, ascending.
    untrusted: Vec<usize>,
}

impl ChatPrompt {
    /// The rendered text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Goes on with text of our own, which may spell control tokens.
    pub fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Goes on with somebody else's text, which spells no control tokens.
    pub fn push_untrusted(&mut self, text: &str) {
        let at = self.text.len();
        self.untrusted.extend(text.char_indices().map(|(offset, _)| at + offset));
        self.text.push_str(text);
    }

    /// The same with another text of our own in the place of each of its control tokens that are written so. Where
    /// somebody else has written it, it stays.
    pub fn with_replaced(&self, written: &str, by: &str) -> ChatPrompt {
        let mut prompt = ChatPrompt { text: String::with_capacity(self.text.len()), untrusted: Vec::new() };
        let mut untrusted = self.untrusted.iter().copied().peekable();
        let (mut copied, mut from) = (0, 0);
        // What lies before `end` and is not copied yet.
        let mut copy = |prompt: &mut ChatPrompt, start: usize, end: usize| {
            let moved = prompt.text.len();
            prompt.text.push_str(&self.text[start..end]);
            while let Some(at) = untrusted.next_if(|at| *at < end) {
                prompt.untrusted.push(at - start + moved);
            }
        };
        while let Some(at) = self.text[from..].find(written).filter(|_| !written.is_empty()) {
            let (start, end) = (from + at, from + at + written.len());
            from = end;
            let first = self.untrusted.partition_point(|at| *at < start);
            if self.untrusted.get(first).is_some_and(|at| *at < end) {
                continue;
            }
            copy(&mut prompt, copied, start);
            prompt.text.push_str(by);
            copied = end;
        }
        copy(&mut prompt, copied, self.text.len());
        prompt
    }

    pub(crate) fn untrusted(&self) -> &[usize] {
        &self.untrusted
    }

    fn unmark(rendered: &str) -> ChatPrompt {
        let mut prompt = ChatPrompt { text: String::with_capacity(rendered.len()), untrusted: Vec::new() };
        let mut chars = rendered.chars();
        while let Some(c) = chars.next() {
            if c != MARK {
                prompt.text.push(c);
            } else if let Some(marked) = chars.next() {
                prompt.untrusted.push(prompt.text.len());
                prompt.text.push(marked);
            }
        }
        prompt
    }
}

impl ChatTemplate {
    /// Parses a template.
    pub fn new(source: &str) -> Result<ChatTemplate, Error> {
        Ok(ChatTemplate {
            environment: environment(),
            source: source.to_owned(),
            plain: Part::new("chat", source)?,
            tools: None,
        })
    }

    /// The template that a checkpoint carries. [`Error::NoTemplate`] if it carries none.
    pub fn open(checkpoint: &Checkpoint) -> Result<ChatTemplate, Error> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => {
                let metadata = gguf.metadata();
                let source = metadata.opt_str("tokenizer.chat_template")?.ok_or(Error::NoTemplate)?;
                let mut template = ChatTemplate::new(source)?;
                if let Some(source) = metadata.opt_str("tokenizer.chat_template.tool_use")? {
                    template.tools = Some(Part::new("tool_use", source)?);
                }
                Ok(template)
            }
            Checkpoint::HuggingFace(directory) => {
                ChatTemplate::new(directory.chat_template().ok_or(Error::NoTemplate)?)
            }
        }
    }

    /// The template as the model carries it.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the model writes its answers, where it is told of tools or where it is not.
    pub fn dialect(&self, with_tools: bool) -> Dialect {
        self.part(with_tools).dialect
    }

    fn part(&self, with_tools: bool) -> &Part {
        self.tools.as_ref().filter(|_| with_tools).unwrap_or(&self.plain)
    }

    /// Renders a conversation for the model of `tokenizer`.
    pub fn render(&self, chat: &Chat, tokenizer: &Tokenizer) -> Result<ChatPrompt, Error> {
        for (index, message) in chat.messages.iter().enumerate() {
            let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | ' ');
            if let Some(role) = message["role"].as_str().filter(|role| !role.chars().all(is_plain)) {
                return Err(Error::Role { index, role: role.to_owned() });
            }
        }
        let wholes = tokenizer.wholes();
        let list = |items: &[Json]| items.iter().map(|item| marked_value(item, wholes)).collect::<Value>();
        // Python passes None for what is not given; templates tell it from an empty list.
        let optional = |items: &[Json]| if items.is_empty() { Value::from(()) } else { list(items) };
        let now = chat.now.clone();
        let [messages, tools, documents, prompted, clock] = OWN_NAMES.map(str::to_owned);
        let mut variables: Vec<(String, Value)> = vec![
            (messages, list(&chat.messages)),
            (tools, optional(&chat.tools)),
            (documents, optional(&chat.documents)),
            (prompted, Value::from(chat.add_generation_prompt)),
            (clock, Value::from_function(move |format: String| strftime(&now, &format))),
        ];
        variables.extend(tokenizer.named_pieces().map(|(name, piece)| (name.to_owned(), Value::from(piece))));
        variables
            .extend(chat.variables.iter().map(|(name, value)| (name.clone(), marked_value(value, wholes))));
        let part = self.part(!chat.tools.is_empty());
        on_large_stack(move || {
            let rendered =
                part.compile().and_then(|it| it.render(&self.environment, Value::from_pairs(variables)));
            let text = rendered.map_err(|e| failure(&e))?;
            if text.len() > OUTPUT_BYTES_MAX {
                let reason = format!("the prompt has more than {OUTPUT_BYTES_MAX} bytes");
                return Err(Error::TemplateFailed { reason });
            }
            Ok(ChatPrompt::unmark(&text))
        })
    }
}

/// Variables that the renderer itself sets.
const OWN_NAMES: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"];

/// Whether a variable of templates is the renderer's, or names a control token: nobody else may set it.
pub fn is_template_name(name: &str) -> bool {
    OWN_NAMES.contains(&name) || name.ends_with("_token")
}

/// Runs `work` where no template can reach the end of the stack, which would end the process.
fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |reason: String| Error::TemplateFailed { reason };
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK_BYTES);
        let thread = builder.spawn_scoped(scope, work).map_err(|e| failed(e.to_string()))?;
        thread.join().unwrap_or_else(|_| Err(failed("rendering panicked".to_owned())))
    })
}

/// Refuses expressions so long that parsing them would reach the end of any stack.
fn check_expressions(source: &str) -> Result<(), Error> {
    let mut rest = source;
    // Not by looking for each of both to the end, which takes the square of the tags where there are only such of one
    // kind.
    let opening = |text: &str| text.as_bytes().windows(2).position(|pair| pair == b"{{" || pair == b"{%");
    while let Some(open) = opening(rest) {
        let inside = &rest[open + 2..];
        let close = if rest[open..].starts_with("{{") { "}}" } else { "%}" };
        let (tokens, len) = expression(inside, close);
        if tokens > EXPRESSION_TOKENS_MAX {
            let reason =
                format!("an expression of {tokens} tokens; at most {EXPRESSION_TOKENS_MAX} are read");
            return Err(Error::TemplateSyntax { reason });
        }
        rest = &inside[len..];
    }
    Ok(())
}

/// Counts lexical tokens up to `close`: words, strings and single signs. With them, the bytes that were read.
fn expression(text: &str, close: &str) -> (usize, usize) {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut tokens = 0;
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        if text[at..].starts_with(close) {
            return (tokens, at + close.len());
        }
        if is_word(c) {
            at += text[at..].find(|c| !is_word(c)).unwrap_or(text.len() - at);
        } else if matches!(c, '"' | '\'') {
            at += 1;
            let mut is_escaped = false;
            let end = text[at..].find(|d| {
                let ends = d == c && !is_escaped;
                is_escaped = d == '\\' && !is_escaped;
                ends
            });
            at = end.map_or(text.len(), |end| at + end + 1);
        } else {
            at += c.len_utf8();
            if c.is_whitespace() {
                continue;
            }
        }
        tokens += 1;
    }
    (tokens, at)
}

/// What Jinja2 has as transformers sets it up.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    allowance::equip(&mut environment);
    environment.add_filter("tojson", python::to_json);
    environment.add_filter("string", |value: &Value| python::display(value));
    environment.add_filter("indent", indent);
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map)
    });
    environment.add_test("iterable", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        let refused = Refused(message);
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, refused.0.clone()).with_source(refused))
    });
    environment
}

/// The filter `indent`, with a bound on how far.
fn indent(
    value: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, minijinja::Error> {
    let asked = width.or(options.get::<Option<usize>>("width")?).unwrap_or(4);
    let lines = 1 + value.as_str().matches('\n').count();
    if asked.saturating_mul(lines) > OUTPUT_BYTES_MAX {
        let reason = format!("indent by {asked}");
        return Err(minijinja::Error::new(ErrorKind::InvalidOperation, reason));
    }
    minijinja::filters::indent(value, Some(asked), first, blank, options)
}

/// `{% generation %}` only tells trainers which tokens are the assistant's; rendering is that of a block that is
/// always there.
fn without_generation_tags(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        // Behind the opening: `{%}` is no whole tag.
        let Some(close) = rest[open + 2..].find("%}").map(|at| open + 2 + at) else { break };
        let inside = &rest[open + 2..close];
        let word = inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        out.push_str(&rest[..open + 2]);
        match word {
            "generation" => out.push_str(&inside.replace("generation", "if true")),
            "endgeneration" => out.push_str(&inside.replace("endgeneration", "endif")),
            _ => out.push_str(inside),
        }
        rest = &rest[close..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// A template's own refusal, carried through the engine's error.
#[derive(Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

fn failure(error: &minijinja::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(current) = cause {
        if let Some(refused) = current.downcast_ref::<Refused>() {
            // Messages may quote the conversation, marks and all.
            return Error::TemplateRefused { message: ChatPrompt::unmark(&refused.0).text };
        }
        cause = current.source();
    }
    Error::TemplateFailed { reason: ChatPrompt::unmark(&error.to_string()).text }
}

fn strftime(now: &Zoned, format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, now)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))
}

/// A value of the conversation with all its strings marked.
fn marked_value(json: &Json, wholes: &WholeTokens) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (_, Some(integer)) => Value::from(integer),
            _ => number.as_f64().map_or_else(|| Value::from(number.to_string()), Value::from),
        },
        Json::String(text) => Value::from(marked(text, wholes)),
        Json::Array(items) => items.iter().map(|item| marked_value(item, wholes)).collect(),
        Json::Object(fields) => {
            let fields = fields.iter();
            Value::from_pairs(fields.map(|(name, value)| (marked(name, wholes), marked_value(value, wholes))))
        }
    }
}

fn marked<'t>(text: &'t str, wholes: &WholeTokens) -> Cow<'t, str> {
    let starts = wholes.reserved_starts(text);
    if starts.is_empty() && !text.contains(MARK) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for (at, c) in text.char_indices() {
        if c == MARK || starts.binary_search(&at).is_ok() {
            out.push(MARK);
        }
        out.push(c);
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_template_wrote_is_replaced_and_what_somebody_else_wrote_stays() {
        let mut prompt = ChatPrompt { text: String::new(), untrusted: Vec::new() };
        prompt.push("<a>x");
        prompt.push_untrusted("<a>ü");
        prompt.push("<a><a>");
        prompt.push_untrusted("z");
        let replaced = prompt.with_replaced("<a>", "(long)");
        assert_eq!(replaced.text(), "(long)x<a>ü(long)(long)z");
        assert_eq!(replaced.untrusted, [7, 8, 9, 10, 24]);
        assert_eq!(prompt.with_replaced("", "?"), prompt);
        assert_eq!(prompt.with_replaced("<b>", "?"), prompt);
    }
}
