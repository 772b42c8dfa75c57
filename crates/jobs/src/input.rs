//! What a job asks for: one answer, a batch, or what the older handler took.

use std::{collections::HashSet, sync::Arc};

use fornax_code::Code;
use fornax_form::Schema;
use serde_json::{Map, Value, json};

use crate::{
    Failure,
    model::{Body, Question},
};

/// Items of one batch.
pub const ITEMS_MAX: usize = 4096;

/// Characters of an item's id.
const ID_CHARS_MAX: usize = 256;

/// Parameters of the chat route that a job has no use for, or says otherwise.
const NOT_HERE: [&str; 9] = [
    "echo",
    "stream",
    "stream_options",
    "n",
    "response_format",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "chat_template_kwargs",
];

/// An input that was understood.
#[derive(Clone, Debug)]
pub enum Input {
    /// One answer.
    One(Question),
    /// An answer for each item, in order.
    Batch(Vec<Item>),
    /// How the model stands, as the older handler told it.
    Health,
}

/// One of a batch.
#[derive(Clone, Debug)]
pub struct Item {
    /// What its result is called by.
    pub id: String,
    text: String,
    shared: Arc<Shared>,
}

/// What all items of a batch have in common. A question is made of it only when it is asked: thousands of items times
/// a long prefix would take gigabytes at once.
#[derive(Debug)]
struct Shared {
    fields: Map<String, Value>,
    prefix: Option<String>,
    schema: Option<Arc<Schema>>,
}

impl Item {
    /// What is asked about it.
    pub fn question(&self) -> Question {
        let Shared { fields, prefix, schema } = &*self.shared;
        let system = prefix.iter().map(|prefix| json!({"role": "system", "content": prefix}));
        let messages: Vec<Value> = system.chain([json!({"role": "user", "content": self.text})]).collect();
        let mut body = fields.clone();
        body.insert("messages".to_owned(), Value::Array(messages));
        Question { body: Body::Chat(Value::Object(body)), schema: schema.clone() }
    }
}

/// The name of a registered schema that an input refers to.
pub fn schema_name(input: &Value) -> Option<&str> {
    holder(input)["schema"].as_str()
}

/// Puts a registered schema in the place of its name, so that the job stays what it was when it was submitted.
pub fn set_schema(input: &mut Value, name: &str, schema: Value) {
    let holder = match input.get("data").is_some() {
        true => &mut input["data"],
        false => input,
    };
    holder["schema"] = schema;
    holder["schema_name"] = json!(name);
}

fn holder(input: &Value) -> &Value {
    input.get("data").unwrap_or(input)
}

impl Input {
    /// Understands an input, or says what is wrong with it.
    pub fn parse(input: &Value) -> Result<Input, Failure> {
        let Value::Object(fields) = input else { return Err(Failure::input("input", "must be an object")) };
        let mut fields = fields.clone();
        match fields.remove("endpoint") {
            None => Input::parse_fields(fields, "input"),
            Some(endpoint) => Input::parse_older(endpoint.as_str(), fields),
        }
    }

    /// `{endpoint, data: {prompt, context, …}}`.
    fn parse_older(endpoint: Option<&str>, mut fields: Map<String, Value>) -> Result<Input, Failure> {
        let data = fields.remove("data");
        if let Some(name) = fields.keys().next() {
            return Err(Failure::input(&format!("input.{}", cut(name)), "is not a field of this input"));
        }
        match (endpoint, data) {
            (Some("/health"), _) => Ok(Input::Health),
            (Some("/prompt"), Some(Value::Object(mut data))) => {
                let prompt = data.remove("prompt");
                let Some(Value::String(prompt)) = prompt else {
                    return Err(Failure::input("input.data.prompt", "must be a string"));
                };
                let mut messages = Vec::new();
                match data.remove("context") {
                    None | Some(Value::Null) => {}
                    Some(Value::String(context)) if context.is_empty() => {}
                    Some(Value::String(context)) => {
                        messages.push(json!({"role": "system", "content": context}))
                    }
                    Some(context @ (Value::Object(_) | Value::Array(_))) => {
                        messages.push(json!({"role": "system", "content": context.to_string()}));
                    }
                    Some(_) => {
                        return Err(Failure::input(
                            "input.data.context",
                            "must be a string, an object or a list",
                        ));
                    }
                }
                messages.push(json!({"role": "user", "content": prompt}));
                data.insert("messages".to_owned(), json!(messages));
                Input::parse_fields(data, "input.data")
            }
            (Some("/prompt"), _) => Err(Failure::input("input.data", "must be an object")),
            _ => Err(Failure::input("input.endpoint", "must be \"/prompt\" or \"/health\"")),
        }
    }

    fn parse_fields(mut fields: Map<String, Value>, at: &str) -> Result<Input, Failure> {
        let wrong = |field: &str, rule: &str| Failure::input(&format!("{at}.{field}"), rule);
        if let Some(field) = NOT_HERE.into_iter().find(|field| fields.contains_key(*field)) {
            return Err(wrong(field, "is not a field of a job's input"));
        }
        let schema = schema(&mut fields, at)?;
        let asked: Vec<&str> =
            ["messages", "prompt", "items"].into_iter().filter(|field| fields.contains_key(*field)).collect();
        let one = |body: fn(Value) -> Body, fields, schema| {
            Ok(Input::One(Question { body: body(Value::Object(fields)), schema }))
        };
        match asked[..] {
            ["messages"] => one(Body::Chat, fields, schema),
            ["prompt"] => one(Body::Completion, fields, schema),
            ["items"] => {
                let (items, prefix) = (fields.remove("items"), fields.remove("shared_prefix"));
                let prefix = match prefix {
                    None | Some(Value::Null) => None,
                    Some(Value::String(prefix)) => Some(prefix),
                    Some(_) => return Err(wrong("shared_prefix", "must be a string")),
                };
                let items = items_of(items, at)?;
                let shared = Arc::new(Shared { fields, prefix, schema });
                let items =
                    items.into_iter().map(|(id, text)| Item { id, text, shared: Arc::clone(&shared) });
                Ok(Input::Batch(items.collect()))
            }
            _ => Err(Failure::input(at, "must have one of messages, prompt and items")),
        }
    }

    /// Every question that it asks, each made when it is taken.
    pub fn questions(&self) -> impl Iterator<Item = Question> {
        let (one, items) = match self {
            Input::One(question) => (Some(question.clone()), &[][..]),
            Input::Batch(items) => (None, &items[..]),
            Input::Health => (None, &[][..]),
        };
        one.into_iter().chain(items.iter().map(Item::question))
    }
}

fn schema(fields: &mut Map<String, Value>, at: &str) -> Result<Option<Arc<Schema>>, Failure> {
    let name = match fields.remove("schema_name") {
        None => None,
        Some(Value::String(name)) if name.chars().count() <= ID_CHARS_MAX => Some(name),
        Some(_) => return Err(Failure::input(&format!("{at}.schema_name"), "must be a short string")),
    };
    match fields.remove("schema") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(_)) => {
            let field = format!("{at}.schema");
            Err(Failure::field(Code::SchemaNotFound, &field, "is not the name of a schema here"))
        }
        Some(schema) => Ok(Some(Arc::new(Schema::new(&schema, name.as_deref())?))),
    }
}

fn items_of(items: Option<Value>, at: &str) -> Result<Vec<(String, String)>, Failure> {
    let wrong = |field: String, rule: &str| Failure::input(&format!("{at}.{field}"), rule);
    let Some(Value::Array(items)) = items else { return Err(wrong("items".to_owned(), "must be a list")) };
    if !(1..=ITEMS_MAX).contains(&items.len()) {
        return Err(wrong("items".to_owned(), &format!("must have 1 to {ITEMS_MAX} items")));
    }
    let mut ids = HashSet::new();
    let mut read = Vec::new();
    for (index, item) in items.into_iter().enumerate() {
        let at = |field: &str| format!("items[{index}]{field}");
        let Value::Object(mut item) = item else { return Err(wrong(at(""), "must be an object {id, text}")) };
        let id = match item.remove("id") {
            Some(Value::String(id)) if (1..=ID_CHARS_MAX).contains(&id.chars().count()) => id,
            Some(Value::Number(id)) => id.to_string(),
            _ => return Err(wrong(at(".id"), "must be a string of 1 to 256 characters")),
        };
        let Some(Value::String(text)) = item.remove("text") else {
            return Err(wrong(at(".text"), "must be a string"));
        };
        if let Some(field) = item.keys().next() {
            return Err(wrong(at(&format!(".{}", cut(field))), "is not a field of an item"));
        }
        if !ids.insert(id.clone()) {
            return Err(wrong(at(".id"), "is another item's, too"));
        }
        read.push((id, text));
    }
    Ok(read)
}

/// What clients call their fields is repeated, but not for long.
fn cut(name: &str) -> String {
    name.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_becomes_questions() {
        let check = |input: Value, wanted: &[Body]| {
            let parsed = Input::parse(&input).unwrap();
            let bodies: Vec<Body> = parsed.questions().map(|question| question.body).collect();
            assert_eq!(bodies, wanted, "{input}");
        };
        let user = |text: &str| json!({"role": "user", "content": text});
        let system = |text: &str| json!({"role": "system", "content": text});
        check(json!({"prompt": "a", "seed": 1}), &[Body::Completion(json!({"prompt": "a", "seed": 1}))]);
        let chat = |messages: &[Value]| Body::Chat(json!({"messages": messages}));
        check(json!({"messages": [user("a")], "schema": {}}), &[chat(&[user("a")])]);
        check(
            json!({"shared_prefix": "p", "items": [{"id": "1", "text": "a"}, {"id": 2, "text": "b"}]}),
            &[chat(&[system("p"), user("a")]), chat(&[system("p"), user("b")])],
        );
        check(json!({"items": [{"id": "1", "text": "a"}]}), &[chat(&[user("a")])]);
        check(json!({"endpoint": "/prompt", "data": {"prompt": "a"}}), &[chat(&[user("a")])]);
        check(
            json!({"endpoint": "/prompt", "data": {"prompt": "a", "context": "c"}}),
            &[chat(&[system("c"), user("a")])],
        );
        check(
            json!({"endpoint": "/prompt", "data": {"prompt": "a", "context": {"k": 1}}}),
            &[chat(&[system("{\"k\":1}"), user("a")])],
        );
        check(json!({"endpoint": "/health"}), &[]);
    }

    /// Copies of the prefix would take 32 GiB.
    #[test]
    fn items_share_their_prefix() {
        let prefix = "p".repeat(8 << 20);
        let items: Vec<Value> = (0..ITEMS_MAX).map(|id| json!({"id": id, "text": "x"})).collect();
        let parsed = Input::parse(&json!({"shared_prefix": prefix, "items": items})).unwrap();
        let Input::Batch(items) = &parsed else { panic!("a batch") };
        assert_eq!((items.len(), items[ITEMS_MAX - 1].id.as_str()), (ITEMS_MAX, "4095"));
        let Body::Chat(body) = parsed.questions().next().unwrap().body else { panic!("a chat") };
        assert_eq!(body["messages"][0]["content"].as_str().map(str::len), Some(8 << 20));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |input: Value, code: &str, wanted: &str| {
            let failure = Input::parse(&input).unwrap_err();
            assert_eq!((failure.code.name(), failure.message.as_str()), (code, wanted));
        };
        let invalid = |input: Value, wanted: &str| check(input, "INVALID_INPUT", wanted);
        invalid(json!(5), "input: must be an object");
        invalid(json!({}), "input: must have one of messages, prompt and items");
        invalid(json!({"prompt": "a", "messages": []}), "input: must have one of messages, prompt and items");
        invalid(json!({"prompt": "a", "stream": true}), "input.stream: is not a field of a job's input");
        invalid(json!({"items": []}), "input.items: must have 1 to 4096 items");
        invalid(json!({"items": [{"id": "a"}]}), "input.items[0].text: must be a string");
        let twice = json!({"id": "a", "text": "x"});
        invalid(json!({"items": [twice, twice]}), "input.items[1].id: is another item's, too");
        invalid(
            json!({"items": [{"id": "a", "text": "x", "k": 1}]}),
            "input.items[0].k: is not a field of an item",
        );
        invalid(json!({"endpoint": "/other"}), "input.endpoint: must be \"/prompt\" or \"/health\"");
        invalid(json!({"endpoint": "/prompt", "data": {}}), "input.data.prompt: must be a string");
        check(
            json!({"prompt": "a", "schema": "unknown"}),
            "SCHEMA_NOT_FOUND",
            "input.schema: is not the name of a schema here",
        );
        check(json!({"prompt": "a", "schema": 5}), "SCHEMA_UNSUPPORTED", "a schema is a JSON object");
    }

    #[test]
    fn a_registered_schema_takes_the_place_of_its_name() {
        for (mut input, place) in [
            (json!({"prompt": "a", "schema": "s"}), ""),
            (json!({"endpoint": "/prompt", "data": {"prompt": "a", "schema": "s"}}), "/data"),
        ] {
            assert_eq!(schema_name(&input), Some("s"));
            set_schema(&mut input, "s", json!({"type": "object"}));
            assert_eq!(input.pointer(&format!("{place}/schema")), Some(&json!({"type": "object"})));
            let parsed = Input::parse(&input).unwrap();
            let question = parsed.questions().next().unwrap();
            assert_eq!(question.schema.as_ref().unwrap().name(), Some("s"));
        }
    }
}
