//! Tools of a question: checked, told to the model, and held to where a call is demanded.

use std::sync::Arc;

use fornax_form::Form;
use fornax_text::{Dialect, Tool};
use serde_json::{Map, Value, json};

use crate::{Fault, Place, ToolField};

/// Levels of a tool's schema that are looked at.
const DEPTH_MAX: usize = 64;

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Definition {
    /// Letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// The JSON Schema of its arguments, an object's; without it, or where it is empty, there are none.
    pub parameters: Option<Value>,
    /// Whether arguments follow the schema by construction; those of a call that is demanded do in any case. Such a
    /// call ends the answer, unless several may follow each other ([`Tools::parallel`]).
    pub strict: bool,
}

/// Whether the model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// It may.
    #[default]
    Auto,
    /// It may not, and is not told of them.
    Never,
    /// It must call one of them.
    Required,
    /// It must call the one of that name.
    Named(String),
    /// Only these are there to be called, whichever others are defined.
    Among {
        /// Their names.
        names: Vec<String>,
        /// One of them must be called.
        required: bool,
    },
}

/// What the model is told of, and what it must do with it.
#[derive(Clone, Debug)]
pub struct Tools {
    pub(crate) list: Arc<[Tool]>,
    /// As templates know them.
    pub(crate) described: Vec<Value>,
    demand: Demand,
    /// Which of them are strict.
    strict: Vec<bool>,
    /// Whether one answer may have several calls.
    pub(crate) parallel: Option<bool>,
}

/// Whether a call is left to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Demand {
    No,
    /// One of them.
    Any,
    /// The one of that index.
    One(usize),
}

impl Tools {
    /// Tools that may be called, if there are any; or all that is wrong with them.
    pub fn new(definitions: &[Definition], choice: &Choice) -> Result<Option<Tools>, Vec<Fault>> {
        let mut faults = Vec::new();
        let mut list: Vec<Tool> = Vec::with_capacity(definitions.len());
        let mut described = Vec::with_capacity(definitions.len());
        for (index, Definition { name, description, parameters, .. }) in definitions.iter().enumerate() {
            let mut wrong = |rule: &str| faults.push(Fault::rule(Place::Tool(index, ToolField::Name), rule));
            // It becomes part of the prompt, where it must not spell a control token.
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
                wrong("must be letters, digits, _, - and .");
            }
            if list.iter().any(|other| other.name == *name) {
                wrong("is the name of another tool, too");
            }
            // An empty schema lets any value be the arguments, but they always are an object.
            let given = parameters.as_ref().filter(|schema| **schema != json!({}));
            let parameters = given.cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}}));
            check_parameters(&parameters, index, &mut faults);
            let mut function = Map::new();
            function.insert("name".to_owned(), json!(name));
            if let Some(description) = description {
                function.insert("description".to_owned(), json!(description));
            }
            function.insert("parameters".to_owned(), parameters.clone());
            described.push(json!({"type": "function", "function": function}));
            list.push(Tool { name: name.clone(), parameters });
        }
        let mut strict: Vec<bool> = definitions.iter().map(|definition| definition.strict).collect();
        if let Choice::Among { names, .. } = choice {
            let known = |name: &String| list.iter().any(|tool| tool.name == *name);
            if !names.iter().all(known) {
                faults.push(Fault::rule(Place::ChoiceName, "is none of the tools"));
            }
            // The others are not told of either: what a model knows of it may call.
            let chosen: Vec<bool> = list.iter().map(|tool| names.contains(&tool.name)).collect();
            keep(&mut list, &chosen);
            keep(&mut described, &chosen);
            keep(&mut strict, &chosen);
        }
        let demand = match choice {
            Choice::Auto | Choice::Among { required: false, .. } => Some(Demand::No),
            Choice::Never => None,
            _ if list.is_empty() => {
                faults.push(Fault::rule(Place::Choice, "needs tools"));
                None
            }
            Choice::Required | Choice::Among { .. } if list.len() == 1 => Some(Demand::One(0)),
            Choice::Required | Choice::Among { .. } => Some(Demand::Any),
            Choice::Named(name) => {
                let named = list.iter().position(|tool| tool.name == *name);
                if named.is_none() {
                    faults.push(Fault::rule(Place::ChoiceName, "is none of the tools"));
                }
                named.map(Demand::One)
            }
        };
        if !faults.is_empty() {
            return Err(faults);
        }
        let demand = demand.filter(|_| !list.is_empty());
        Ok(demand.map(|demand| Tools { list: list.into(), described, demand, strict, parallel: None }))
    }

    /// Whether one answer may have several calls. Without a word it may, but for calls that are strict or demanded:
    /// behind those others follow only where this is true, and where the model's format has JSON for arguments.
    #[must_use]
    pub fn parallel(self, parallel: Option<bool>) -> Tools {
        Tools { parallel, ..self }
    }

    /// What the arguments of calls look like that the model makes by itself: those of strict tools, and behind a call
    /// that was demanded those of every tool that may have been.
    pub(crate) fn held_forms(&self, several: bool) -> impl Iterator<Item = (&Tool, Form)> {
        let held = self.list.iter().zip(&self.strict).enumerate().filter(move |(at, (_, strict))| match self
            .demand
        {
            Demand::No => **strict,
            Demand::Any => several,
            Demand::One(index) => several && index == *at,
        });
        held.map(|(_, (tool, _))| (tool, Form::JsonSchema(held_to(&tool.parameters))))
    }

    /// The tool that has to be called, if it is known which.
    pub(crate) fn demanded(&self) -> Option<&Tool> {
        match self.demand {
            Demand::One(index) => self.list.get(index),
            Demand::No | Demand::Any => None,
        }
    }

    /// What an answer that must be a call looks like: the arguments, or an object with name and arguments.
    pub(crate) fn form(&self, dialect: Dialect) -> Option<Form> {
        match self.demand {
            Demand::No => None,
            Demand::One(index) => Some(Form::JsonSchema(held_to(&self.list[index].parameters))),
            Demand::Any => {
                let (name_key, arguments_key) = dialect.call_keys();
                let mut defined = Map::new();
                let mut versions = Vec::with_capacity(self.list.len());
                let cases: Vec<Value> = self
                    .list
                    .iter()
                    .enumerate()
                    .map(|(index, tool)| {
                        let at = format!("tool{index}");
                        let mut parameters = held_to(&tool.parameters);
                        move_references(&mut parameters, &format!("#/$defs/{at}"));
                        if let Some(fields) = parameters.as_object_mut() {
                            // It names a schema that stands alone; this one does no longer.
                            fields.remove("$id");
                            versions.push(fields.get("$schema").cloned());
                        }
                        let arguments = json!({"$ref": format!("#/$defs/{at}")});
                        defined.insert(at, parameters);
                        json!({
                            "type": "object",
                            "properties": {name_key: {"const": tool.name}, arguments_key: arguments},
                            "required": [name_key, arguments_key],
                            "additionalProperties": false,
                        })
                    })
                    .collect();
                let mut schema = json!({"anyOf": cases, "$defs": defined});
                // Of one version all of them, the whole is of that version, too.
                if let Some(Some(version)) =
                    versions.first().filter(|first| versions.iter().all(|v| v == *first))
                {
                    schema["$schema"] = version.clone();
                }
                Some(Form::JsonSchema(schema))
            }
        }
    }
}

/// What of a list was chosen.
fn keep<T>(list: &mut Vec<T>, chosen: &[bool]) {
    let mut chosen = chosen.iter();
    list.retain(|_| chosen.next() == Some(&true));
}

/// The schema that arguments are held to. One that says there are no properties would let a model invent some, and
/// callers hand them to functions that take none: such arguments are the empty object.
fn held_to(parameters: &Value) -> Value {
    const SAY_NOTHING: [&str; 7] =
        ["type", "properties", "required", "title", "description", "$schema", "$id"];
    let mut schema = parameters.clone();
    let has_none = schema["properties"] == json!({})
        && schema
            .as_object()
            .is_some_and(|fields| fields.keys().all(|key| SAY_NOTHING.contains(&key.as_str())));
    if has_none {
        schema["additionalProperties"] = json!(false);
    }
    schema
}

/// References into a schema that becomes part of a larger one.
fn move_references(schema: &mut Value, to: &str) {
    match schema {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(reference) if name == "$ref" && reference.starts_with('#') => {
                        *reference = format!("{to}{}", &reference[1..]);
                    }
                    _ => move_references(value, to),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, to)),
        _ => {}
    }
}

/// Says what is no JSON Schema of an object.
fn check_parameters(schema: &Value, tool: usize, faults: &mut Vec<Fault>) {
    let mut check = Check { tool, faults };
    if !schema.is_object() {
        return check.value("", "a JSON Schema object", schema);
    }
    let fields = schema.as_object().is_some_and(Map::is_empty);
    if !fields && schema["type"] != json!("object") {
        check.rule(".type", "must be \"object\": arguments have names");
    }
    check.schema(schema, "", 0);
}

/// A look through the schema of one tool.
struct Check<'a> {
    tool: usize,
    faults: &'a mut Vec<Fault>,
}

impl Check<'_> {
    fn place(&self, path: &str) -> Place {
        Place::Tool(self.tool, ToolField::Parameters(path.to_owned()))
    }

    fn rule(&mut self, path: &str, rule: &str) {
        self.faults.push(Fault::rule(self.place(path), rule));
    }

    fn value(&mut self, path: &str, rule: &str, got: &Value) {
        self.faults.push(Fault::value(self.place(path), rule, got));
    }

    fn schema(&mut self, schema: &Value, path: &str, depth: usize) {
        const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "integer", "string"];
        if depth > DEPTH_MAX {
            return self.rule(path, "is nested too deeply");
        }
        let fields = match schema {
            Value::Bool(_) => return,
            Value::Object(fields) => fields,
            other => return self.value(path, "a JSON Schema: an object or a boolean", other),
        };
        for (keyword, value) in fields {
            let at = format!("{path}.{keyword}");
            let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
            match keyword.as_str() {
                "type" => {
                    let several =
                        value.as_array().is_some_and(|types| !types.is_empty() && types.iter().all(is_type));
                    if !is_type(value) && !several {
                        self.value(&at, "a type of JSON Schema or a list of them", value);
                    }
                }
                "properties" | "patternProperties" | "$defs" | "definitions" => match value.as_object() {
                    None => self.value(&at, "an object of JSON Schemas", value),
                    Some(schemas) => {
                        for (name, schema) in schemas {
                            self.schema(schema, &format!("{at}.{name}"), depth + 1);
                        }
                    }
                },
                "anyOf" | "oneOf" | "allOf" | "prefixItems" => match value.as_array() {
                    None => self.value(&at, "an array of JSON Schemas", value),
                    Some(schemas) => {
                        for (index, schema) in schemas.iter().enumerate() {
                            self.schema(schema, &format!("{at}[{index}]"), depth + 1);
                        }
                    }
                },
                "items" if value.is_array() => {}
                "items" | "additionalProperties" | "not" => self.schema(value, &at, depth + 1),
                "required" if !is_array_of_strings(value) => {
                    self.value(&at, "an array of strings", value);
                }
                "enum" if !value.is_array() => self.value(&at, "an array", value),
                "$ref" if !value.is_string() => self.value(&at, "a string", value),
                _ => {}
            }
        }
    }
}

fn is_array_of_strings(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(Value::is_string))
}

/// 9 letters and digits: some templates (Mistral's) take ids of no other length.
pub fn call_id() -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let mut bytes = [0; 9];
    getrandom::fill(&mut bytes).expect("the operating system has random numbers");
    bytes.iter().map(|byte| char::from(LETTERS[usize::from(byte % 32)])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(parameters: &Value) -> Vec<String> {
        let mut faults = Vec::new();
        check_parameters(parameters, 0, &mut faults);
        let path = |fault: Fault| match fault.place {
            Place::Tool(0, ToolField::Parameters(path)) => format!("p{path}"),
            other => other.to_string(),
        };
        faults.into_iter().map(path).collect()
    }

    #[test]
    fn what_is_no_schema_is_told_with_its_place() {
        let check = |parameters: Value, want: &[&str]| assert_eq!(faults(&parameters), want, "{parameters}");
        check(json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}), &[]);
        check(json!({}), &[]);
        check(json!([1]), &["p"]);
        check(json!({"type": "string"}), &["p.type"]);
        check(json!({"type": "object", "properties": {"a": {"type": "strin"}}}), &["p.properties.a.type"]);
        check(
            json!({"type": "object", "properties": {"a": 3}, "required": "a"}),
            &["p.properties.a", "p.required"],
        );
        check(
            json!({"type": "object", "properties": {"a": {"anyOf": [{"items": {"enum": 1}}]}}}),
            &["p.properties.a.anyOf[0].items.enum"],
        );
    }

    #[test]
    fn references_of_a_tool_stay_inside_it() {
        let parameters = json!({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string"}}});
        let tool = |name: &str| Definition {
            name: name.to_owned(),
            parameters: Some(parameters.clone()),
            ..Definition::default()
        };
        let tools = Tools::new(&[tool("f"), tool("g")], &Choice::Required).unwrap();
        let Some(Form::JsonSchema(schema)) = tools.expect("there are tools").form(Dialect::of("<tool_call>"))
        else {
            panic!("a demanded call has a form");
        };
        assert_eq!(schema["$defs"]["tool1"]["properties"]["a"]["$ref"], "#/$defs/tool1/$defs/x");
        assert_eq!(schema["anyOf"][1]["properties"]["name"]["const"], "g");
    }
}
