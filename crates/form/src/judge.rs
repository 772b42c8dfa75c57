//! The second opinion: whether a finished answer is what its schema says.
//!
//! Answers are made to fit by the compiled form. Here they are judged by another implementation, and by one that never
//! repairs anything.

use std::fmt;

use serde_json::Value;

use crate::FormError;

/// A schema, compiled for judging.
pub struct Schema {
    value: Value,
    name: Option<String>,
    validator: jsonschema::Validator,
    has_choices: bool,
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schema").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Schema {
    /// Compiles it, or says why it is none.
    pub fn new(value: &Value, name: Option<&str>) -> Result<Schema, FormError> {
        if !value.is_object() {
            return Err(FormError::Compile("a schema is a JSON object".to_owned()));
        }
        let validator = jsonschema::validator_for(value).map_err(|error| {
            FormError::Compile(format!("not a schema, at {:?}", error.instance_path().to_string()))
        })?;
        Ok(Schema {
            has_choices: has_choices(value),
            name: name.map(str::to_owned),
            value: value.clone(),
            validator,
        })
    }

    /// As it was given.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// The name that it was registered under.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether some values are chosen from a list, so that it can be said how surely.
    pub fn has_choices(&self) -> bool {
        self.has_choices
    }

    /// The list that the value at a place (a JSON pointer) is chosen from, if it is.
    pub fn choices(&self, pointer: &str) -> Option<&[Value]> {
        choices_at(&self.value, &self.value, pointer).map(Vec::as_slice)
    }

    /// The answer as a value if it is one and is valid; otherwise where it is wrong.
    pub fn judge(&self, text: &str) -> Result<Value, String> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| format!("column {}", error.column()))?;
        let place = self.validator.iter_errors(&value).next().map(|error| error.instance_path().to_string());
        place.map_or(Ok(value), Err)
    }
}

/// References followed for one step: a schema may refer to itself.
const REFERENCES_MAX: usize = 64;

fn resolved<'a>(root: &'a Value, mut schema: &'a Value) -> Option<&'a Value> {
    for _ in 0..REFERENCES_MAX {
        match schema["$ref"].as_str() {
            Some(reference) => schema = root.pointer(reference.strip_prefix('#')?)?,
            None => return Some(schema),
        }
    }
    None
}

/// The list that the value at a place is chosen from, if it is.
fn choices_at<'a>(root: &'a Value, schema: &'a Value, pointer: &str) -> Option<&'a Vec<Value>> {
    let schema = resolved(root, schema)?;
    let Some(rest) = pointer.strip_prefix('/') else { return schema["enum"].as_array() };
    let (step, rest) = rest.find('/').map_or((rest, ""), |end| rest.split_at(end));
    let name = step.replace("~1", "/").replace("~0", "~");
    let index: Option<usize> = name.parse().ok();
    let next = schema["properties"].get(&name).or_else(|| {
        let prefix = schema["prefixItems"].as_array();
        index.and_then(|index| prefix.and_then(|items| items.get(index)).or(schema.get("items")))
    });
    choices_at(root, next?, rest)
}

fn has_choices(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            fields.get("enum").is_some_and(Value::is_array) || fields.values().any(has_choices)
        }
        Value::Array(items) => items.iter().any(has_choices),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_that_is_cut_anywhere_is_never_a_result() {
        let actions = json!({"type": "object", "properties": {"actions": {"type": "array", "items": {
            "type": "object", "properties": {"book": {"type": "string"}, "cents": {"type": "integer"}},
            "required": ["book", "cents"]}, "minItems": 2}}, "required": ["actions"]});
        let schema = Schema::new(&actions, None).unwrap();
        let text = r#"{"actions":[{"book":"rent","cents":70000},{"book":"tax","cents":1900}]}"#;
        assert!(schema.judge(text).is_ok());
        for end in 0..text.len() {
            assert!(schema.judge(&text[..end]).is_err(), "{}", &text[..end]);
        }
        assert!(schema.judge(r#"{"actions":[{"book":"rent","cents":70000}]}"#).is_err(), "half of it");
    }

    #[test]
    fn what_is_no_schema_is_refused() {
        for schema in
            [json!(5), json!("text"), json!({"type": "nonsense"}), json!({"properties": 3}), json!([])]
        {
            assert!(matches!(Schema::new(&schema, None), Err(FormError::Compile(_))), "{schema}");
        }
    }
}
