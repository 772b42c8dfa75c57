//! Tools of a request: checked, told to the model, and held to where a call is demanded.

use std::sync::Arc;

use fornax_form::Form;
use fornax_text::{Dialect, Tool};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::error::Fault;

/// Levels of a tool's schema that are looked at.
const DEPTH_MAX: usize = 64;

/// A function that the model may call.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ToolBody {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    function: Function,
}

#[derive(Clone, Copy, Debug, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToolType {
    Function,
}

/// What a tool is.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
pub(crate) struct Function {
    /// Letters, digits, `_`, `-` and `.`.
    #[schema(min_length = 1, max_length = 128)]
    pub(crate) name: String,
    #[schema(max_length = 65536)]
    pub(crate) description: Option<String>,
    /// The JSON Schema of its arguments, an object's; without it there are none.
    #[schema(value_type = Option<Object>)]
    pub(crate) parameters: Option<Value>,
    /// Whether arguments follow the schema by construction; those of a call that is demanded do in any case. Such a call
    /// ends the answer, unless parallel_tool_calls is true.
    pub(crate) strict: Option<bool>,
}

/// `none`, `auto`, `required`, or {type: function, function: {name}}.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum ToolChoiceBody {
    Mode(Mode),
    Named(Named),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    None,
    Auto,
    Required,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct Named {
    #[expect(dead_code, reason = "there is only one type")]
    r#type: ToolType,
    function: NamedFunction,
}

#[derive(Clone, Debug, Deserialize, ToSchema)]
struct NamedFunction {
    #[schema(min_length = 1, max_length = 128)]
    name: String,
}

/// What the model is told of, and what it must do with it.
#[derive(Clone, Debug)]
pub(crate) struct Tools {
    pub(crate) list: Arc<[Tool]>,
    /// As templates know them.
    pub(crate) described: Vec<Value>,
    pub(crate) demand: Demand,
    /// Which of them are strict.
    strict: Vec<bool>,
}

/// Whether a call is left to the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    No,
    /// One of them.
    Any,
    /// The one of that index.
    One(usize),
}

impl Tools {
    /// The tools of a request, if it has any that may be called.
    pub(crate) fn new(
        tools: Option<&[ToolBody]>,
        choice: Option<&ToolChoiceBody>,
        faults: &mut Vec<Fault>,
    ) -> Option<Tools> {
        let bodies = tools.unwrap_or_default();
        let mut list: Vec<Tool> = Vec::with_capacity(bodies.len());
        let mut described = Vec::with_capacity(bodies.len());
        for (index, body) in bodies.iter().enumerate() {
            let path = format!("tools[{index}].function");
            let name = &body.function.name;
            // It becomes part of the prompt, where it must not spell a control token.
            if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')) {
                faults.push(Fault::rule(format!("{path}.name"), "must be letters, digits, _, - and ."));
            }
            if list.iter().any(|other| other.name == *name) {
                faults.push(Fault::rule(format!("{path}.name"), "is the name of another tool, too"));
            }
            let nothing = || json!({"type": "object", "properties": {}});
            let parameters = body.function.parameters.clone().unwrap_or_else(nothing);
            check_parameters(&parameters, &format!("{path}.parameters"), faults);
            let mut function = Map::new();
            function.insert("name".to_owned(), json!(name));
            if let Some(description) = &body.function.description {
                function.insert("description".to_owned(), json!(description));
            }
            function.insert("parameters".to_owned(), parameters.clone());
            described.push(json!({"type": "function", "function": function}));
            list.push(Tool { name: name.clone(), parameters });
        }
        let demand = match choice {
            None | Some(ToolChoiceBody::Mode(Mode::Auto)) => Demand::No,
            Some(ToolChoiceBody::Mode(Mode::None)) => return None,
            Some(_) if list.is_empty() => {
                faults.push(Fault::rule("tool_choice", "needs tools"));
                return None;
            }
            Some(ToolChoiceBody::Mode(Mode::Required)) if list.len() == 1 => Demand::One(0),
            Some(ToolChoiceBody::Mode(Mode::Required)) => Demand::Any,
            Some(ToolChoiceBody::Named(named)) => {
                match list.iter().position(|tool| tool.name == named.function.name) {
                    Some(index) => Demand::One(index),
                    None => {
                        faults.push(Fault::rule("tool_choice.function.name", "is none of the tools"));
                        return None;
                    }
                }
            }
        };
        let strict = bodies.iter().map(|body| body.function.strict == Some(true)).collect();
        (!list.is_empty()).then(|| Tools { list: list.into(), described, demand, strict })
    }

    /// What the arguments of calls look like that the model makes by itself: those of strict tools, and behind a call that
    /// was demanded those of every tool that may have been.
    pub(crate) fn held_forms(&self, several: bool) -> impl Iterator<Item = (&Tool, Form)> {
        let held = self.list.iter().zip(&self.strict).enumerate().filter(move |(at, (_, strict))| match self
            .demand
        {
            Demand::No => **strict,
            Demand::Any => several,
            Demand::One(index) => several && index == *at,
        });
        held.map(|(_, (tool, _))| (tool, Form::JsonSchema(tool.parameters.clone())))
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
            Demand::One(index) => Some(Form::JsonSchema(self.list[index].parameters.clone())),
            Demand::Any => {
                let (name_key, arguments_key) = dialect.call_keys();
                let mut defined = Map::new();
                let cases: Vec<Value> = self
                    .list
                    .iter()
                    .enumerate()
                    .map(|(index, tool)| {
                        let at = format!("tool{index}");
                        let mut parameters = tool.parameters.clone();
                        move_references(&mut parameters, &format!("#/$defs/{at}"));
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
                Some(Form::JsonSchema(json!({"anyOf": cases, "$defs": defined})))
            }
        }
    }
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
fn check_parameters(schema: &Value, path: &str, faults: &mut Vec<Fault>) {
    if !schema.is_object() {
        return faults.push(Fault::value(path, "a JSON Schema object", schema));
    }
    let fields = schema.as_object().is_some_and(Map::is_empty);
    if !fields && schema["type"] != json!("object") {
        faults.push(Fault::rule(format!("{path}.type"), "must be \"object\": arguments have names"));
    }
    check_schema(schema, path, 0, faults);
}

fn check_schema(schema: &Value, path: &str, depth: usize, faults: &mut Vec<Fault>) {
    const TYPES: [&str; 7] = ["null", "boolean", "object", "array", "number", "integer", "string"];
    if depth > DEPTH_MAX {
        return faults.push(Fault::rule(path, "is nested too deeply"));
    }
    let fields = match schema {
        Value::Bool(_) => return,
        Value::Object(fields) => fields,
        other => return faults.push(Fault::value(path, "a JSON Schema: an object or a boolean", other)),
    };
    for (keyword, value) in fields {
        let at = format!("{path}.{keyword}");
        let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
        match keyword.as_str() {
            "type" => {
                let several =
                    value.as_array().is_some_and(|types| !types.is_empty() && types.iter().all(is_type));
                if !is_type(value) && !several {
                    faults.push(Fault::value(at, "a type of JSON Schema or a list of them", value));
                }
            }
            "properties" | "patternProperties" | "$defs" | "definitions" => match value.as_object() {
                None => faults.push(Fault::value(at, "an object of JSON Schemas", value)),
                Some(schemas) => {
                    for (name, schema) in schemas {
                        check_schema(schema, &format!("{at}.{name}"), depth + 1, faults);
                    }
                }
            },
            "anyOf" | "oneOf" | "allOf" | "prefixItems" => match value.as_array() {
                None => faults.push(Fault::value(at, "an array of JSON Schemas", value)),
                Some(schemas) => {
                    for (index, schema) in schemas.iter().enumerate() {
                        check_schema(schema, &format!("{at}[{index}]"), depth + 1, faults);
                    }
                }
            },
            "items" if value.is_array() => {}
            "items" | "additionalProperties" | "not" => check_schema(value, &at, depth + 1, faults),
            "required" if !is_array_of_strings(value) => {
                faults.push(Fault::value(at, "an array of strings", value));
            }
            "enum" if !value.is_array() => faults.push(Fault::value(at, "an array", value)),
            "$ref" if !value.is_string() => faults.push(Fault::value(at, "a string", value)),
            _ => {}
        }
    }
}

fn is_array_of_strings(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(Value::is_string))
}

/// 9 letters and digits: some templates (Mistral's) take ids of no other length.
pub(crate) fn call_id() -> String {
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
        check_parameters(parameters, "p", &mut faults);
        faults.into_iter().map(|fault| fault.field).collect()
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
        let tool =
            |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
        let tools: Vec<ToolBody> = vec![
            serde_json::from_value(tool("f")).expect("it is a tool"),
            serde_json::from_value(tool("g")).expect("it is a tool"),
        ];
        let mut faults = Vec::new();
        let tools = Tools::new(Some(&tools), Some(&ToolChoiceBody::Mode(Mode::Required)), &mut faults);
        let Some(Form::JsonSchema(schema)) = tools.expect("there are tools").form(Dialect::of("<tool_call>"))
        else {
            panic!("a demanded call has a form");
        };
        assert_eq!(schema["$defs"]["tool1"]["properties"]["a"]["$ref"], "#/$defs/tool1/$defs/x");
        assert_eq!(schema["anyOf"][1]["properties"]["name"]["const"], "g");
    }
}
