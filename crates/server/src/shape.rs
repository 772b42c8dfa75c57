//! Bodies checked against the very schema that the API document publishes: document and validator cannot drift.

use std::{collections::BTreeMap, sync::LazyLock};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::{
    error::{ApiError, Fault},
    json,
};

/// Faults reported for one body: a client that is wrong in more places reads the document.
const FAULTS_MAX: usize = 32;

/// What happens to fields that a type does not have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unknown {
    /// They are faults.
    Refuse,
    /// Ignored as OpenAI's API does, except those that it knows and this server does not.
    IgnoreBut(&'static [Unsupported]),
}

/// A field of somebody's API that is not honoured here, and the values that ask for nothing.
#[derive(Debug)]
pub(crate) struct Unsupported {
    pub(crate) field: &'static str,
    /// JSON texts of values that mean what happens anyway.
    pub(crate) neutral: &'static [&'static str],
}

/// The schema of a body.
pub(crate) struct Shape {
    root: Value,
    /// By the name that `$ref` ends with.
    named: BTreeMap<String, Value>,
}

/// A type of body with its schema, made once.
pub(crate) trait Body: DeserializeOwned + ToSchema + 'static {
    /// Its schema, in a static of its own.
    fn shape() -> &'static LazyLock<Shape>;
    /// What happens to other fields.
    const UNKNOWN: Unknown;
}

/// Gives a type its [`Body`].
macro_rules! body {
    ($type:ty, $unknown:expr) => {
        impl $crate::shape::Body for $type {
            fn shape() -> &'static std::sync::LazyLock<$crate::shape::Shape> {
                static SHAPE: std::sync::LazyLock<$crate::shape::Shape> =
                    std::sync::LazyLock::new($crate::shape::Shape::of::<$type>);
                &SHAPE
            }
            const UNKNOWN: $crate::shape::Unknown = $unknown;
        }
    };
}
pub(crate) use body;

/// The JSON of a body, as long as it is wanted.
pub(crate) fn parse(bytes: &[u8], wanted: &dyn Fn() -> bool) -> Result<Value, ApiError> {
    // Its messages name places, never what stands there.
    json::read(bytes, wanted)
        .map_err(|error| ApiError::fault(Fault::rule("body", format!("must be JSON: {error}"))))
}

/// Understands a body that was read, or says everything that is wrong with it.
pub(crate) fn understand<T: Body>(value: Value, other_fields: Unknown) -> Result<T, ApiError> {
    let Value::Object(fields) = &value else {
        return Err(ApiError::fault(Fault::value("body", "a JSON object", &value)));
    };
    let shape = T::shape();
    let mut faults = Vec::new();
    unknown(other_fields, fields, shape, &mut faults);
    shape.check(&shape.root, &value, "", None, &mut faults);
    if !faults.is_empty() {
        faults.truncate(FAULTS_MAX);
        return Err(ApiError::faults(faults));
    }
    // The schema says all that the type demands; if it ever does not, the client learns which field it was. Fields that
    // the type does not have are left out first: a body may have thousands of them, a type has some dozens.
    T::deserialize(&value).map_err(|_| {
        let known: Vec<&String> =
            fields.keys().filter(|name| shape.root["properties"].get(name.as_str()).is_some()).collect();
        // One copy, out of which one field after the other is taken and put back.
        let copied = known.iter().filter_map(|name| Some(((*name).clone(), fields.get(*name)?.clone())));
        let mut others = Value::Object(copied.collect());
        let wrong = known.into_iter().find(|name| {
            let taken = others.as_object_mut().and_then(|others| others.swap_remove(name.as_str()));
            let is_wrong = T::deserialize(&others).is_ok();
            if let (Some(taken), Some(others)) = (taken, others.as_object_mut()) {
                others.insert((*name).clone(), taken);
            }
            is_wrong
        });
        let wrong = wrong.and_then(|name| fields.get_key_value(name));
        let (field, value) = wrong.map_or(("body", &value), |(name, value)| (name.as_str(), value));
        ApiError::fault(Fault::value(field, shape.described(field), value))
    })
}

/// Understands a part of a body that is read later than the body, or says what is wrong with it at `path`.
pub(crate) fn part<T: DeserializeOwned + ToSchema>(
    value: &Value,
    path: &str,
    faults: &mut Vec<Fault>,
) -> Option<T> {
    let shape = Shape::of::<T>();
    let before = faults.len();
    shape.check(&shape.root, value, path, None, faults);
    if faults.len() > before {
        return None;
    }
    let part = T::deserialize(value);
    if part.is_err() {
        faults.push(Fault::value(path, constraint(&shape.root), value));
    }
    part.ok()
}

fn unknown(rule: Unknown, fields: &Map<String, Value>, shape: &Shape, faults: &mut Vec<Fault>) {
    let known = |name: &str| shape.root["properties"].get(name).is_some();
    for (name, value) in fields.iter().filter(|(name, _)| !known(name)) {
        match rule {
            Unknown::Refuse => {
                let name: String = name.chars().take(64).collect();
                faults.push(Fault::rule(name, "is not a field of this request"));
            }
            Unknown::IgnoreBut(unsupported) => {
                let refused = unsupported.iter().find(|entry| entry.field == name && !value.is_null());
                if let Some(entry) = refused
                    && !entry
                        .neutral
                        .iter()
                        .any(|text| serde_json::from_str(text).is_ok_and(|v: Value| v == *value))
                {
                    faults.push(Fault::rule(entry.field, "is not supported by this server"));
                }
            }
        }
    }
}

impl Shape {
    /// The schema of a type and of all types it names.
    pub(crate) fn of<T: ToSchema>() -> Shape {
        let mut schemas = Vec::new();
        T::schemas(&mut schemas);
        let json = |schema| serde_json::to_value(schema).expect("schemas are JSON");
        let named = schemas.iter().map(|(name, schema)| (name.clone(), json(schema))).collect();
        let mut shape = Shape { root: json(&T::schema()), named };
        shape.root = shape.merged(&shape.root);
        shape
    }

    /// A struct with flattened parts, as one object.
    fn merged(&self, schema: &Value) -> Value {
        let Some(parts) = schema["allOf"].as_array() else { return schema.clone() };
        let mut whole = json!({"type": "object", "properties": {}, "required": []});
        for part in parts {
            let part = self.merged(self.resolve(part));
            if let (Some(into), Some(from)) =
                (whole["properties"].as_object_mut(), part["properties"].as_object())
            {
                into.extend(from.clone());
            }
            if let (Some(into), Some(from)) = (whole["required"].as_array_mut(), part["required"].as_array())
            {
                into.extend(from.clone());
            }
        }
        whole
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        let named = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next());
        named.and_then(|name| self.named.get(name)).unwrap_or(schema)
    }

    /// Adds what is wrong with `value` at `path`. Where several shapes are allowed, `hint` says which, if it is known
    /// from outside.
    fn check(&self, schema: &Value, value: &Value, path: &str, hint: Option<&str>, faults: &mut Vec<Fault>) {
        // What a field says about itself is closer than what its type says.
        let own = described(schema);
        let hint = hint.or(own.as_deref());
        let schema = self.resolve(schema);
        if faults.len() >= FAULTS_MAX {
            return;
        }
        if let Some(options) = schema["oneOf"].as_array().or_else(|| schema["anyOf"].as_array()) {
            let named = described(schema);
            let hint = hint.or(named.as_deref());
            return self.check_one_of(options, value, path, hint, faults);
        }
        let kinds = kinds(schema);
        if !kinds.is_empty() && !kinds.iter().any(|kind| is_kind(value, kind)) {
            return faults.push(Fault::value(path, constraint(schema), value));
        }
        let within = match value {
            Value::Number(_) => number_within(schema, value),
            Value::String(text) => {
                let length = text.chars().count() as u64;
                length_within(schema, length, "minLength", "maxLength")
            }
            Value::Array(items) => length_within(schema, items.len() as u64, "minItems", "maxItems"),
            Value::Object(fields) => {
                length_within(schema, fields.len() as u64, "minProperties", "maxProperties")
            }
            Value::Null | Value::Bool(_) => true,
        };
        let listed = value.is_null() || schema["enum"].as_array().is_none_or(|values| values.contains(value));
        if !within || !listed {
            return faults.push(Fault::value(path, constraint(schema), value));
        }
        match value {
            Value::Array(items) if !schema["items"].is_null() => {
                for (index, item) in items.iter().enumerate() {
                    self.check(&schema["items"], item, &format!("{path}[{index}]"), None, faults);
                }
            }
            Value::Object(fields) => self.check_fields(schema, fields, path, faults),
            _ => {}
        }
    }

    fn check_fields(&self, schema: &Value, fields: &Map<String, Value>, path: &str, faults: &mut Vec<Fault>) {
        let at = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            if !fields.contains_key(name) {
                faults.push(Fault::rule(at(name), "is required"));
            }
        }
        for (name, value) in fields {
            match schema["properties"].get(name) {
                Some(property) => self.check(property, value, &at(name), None, faults),
                None if schema["additionalProperties"].is_object() => {
                    self.check(&schema["additionalProperties"], value, &at(name), None, faults);
                }
                None if schema["additionalProperties"] == json!(false) => {
                    let name: String = name.chars().take(64).collect();
                    faults.push(Fault::rule(at(&name), "is not a field of this request"));
                }
                None => {}
            }
        }
    }

    /// One of several shapes fits. If none does and only one has the value's type, that one says why.
    fn check_one_of(
        &self,
        options: &[Value],
        value: &Value,
        path: &str,
        hint: Option<&str>,
        faults: &mut Vec<Fault>,
    ) {
        let is_null = |option: &&Value| kinds(option) == ["null"];
        if value.is_null() && options.iter().any(|option| is_null(&option)) {
            return;
        }
        let options: Vec<&Value> = options.iter().filter(|option| !is_null(option)).collect();
        if let [only] = options[..] {
            return self.check(only, value, path, hint, faults);
        }
        let mut closest: Option<Vec<Fault>> = None;
        let mut candidates = 0;
        for option in &options {
            let mut found = Vec::new();
            self.check(option, value, path, None, &mut found);
            if found.is_empty() {
                return;
            }
            // A fault deeper than this value: its type was right.
            if found.iter().all(|fault| fault.field != path) {
                candidates += 1;
                closest = Some(found);
            }
        }
        match (closest, hint) {
            (Some(found), _) if candidates == 1 => faults.extend(found),
            (_, Some(hint)) => faults.push(Fault::value(path, hint, value)),
            (_, None) => faults.push(Fault::value(path, self.any_of(&options), value)),
        }
    }

    fn any_of(&self, options: &[&Value]) -> String {
        let options: Vec<String> = options.iter().map(|option| constraint(self.resolve(option))).collect();
        options.join(" or ")
    }

    /// What a top-level field must be.
    fn described(&self, field: &str) -> String {
        let schema = &self.root["properties"][field];
        described(schema).unwrap_or_else(|| constraint(self.resolve(schema)))
    }
}

fn kinds(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(kind) => vec![kind],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

fn is_kind(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        _ => false,
    }
}

fn number_within(schema: &Value, value: &Value) -> bool {
    let Some(number) = value.as_f64() else { return false };
    let above = schema["minimum"].as_f64().is_none_or(|least| number >= least);
    let below = schema["maximum"].as_f64().is_none_or(|most| number <= most);
    let strictly_above = schema["exclusiveMinimum"].as_f64().is_none_or(|bound| number > bound);
    // A type that has a sign has one bit less, which a maximum as a float could not say.
    let signed = schema["minimum"].as_f64().is_none_or(|least| least < 0.0);
    let fits = match schema["format"].as_str() {
        Some("int64") if signed => value.is_i64(),
        _ => true,
    };
    above && below && strictly_above && fits
}

fn length_within(schema: &Value, length: u64, least: &str, most: &str) -> bool {
    let number = |key: &str| schema[key].as_u64();
    number(least).is_none_or(|least| length >= least) && number(most).is_none_or(|most| length <= most)
}

/// The first sentence of a description, as what the field must be.
fn described(schema: &Value) -> Option<String> {
    let text = schema["description"].as_str()?;
    let sentence = text.split(". ").next().unwrap_or(text).trim_end_matches('.').replace('\n', " ");
    let mut chars = sentence.chars();
    Some(chars.next()?.to_lowercase().chain(chars).collect())
}

/// The rule of a schema in words.
fn constraint(schema: &Value) -> String {
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<String> = values.iter().map(Value::to_string).collect();
        return format!("one of {}", values.join(", "));
    }
    let bounds = |least: &Value, most: &Value, unit: &str| match (least.as_f64(), most.as_f64()) {
        (Some(least), Some(most)) => format!(" from {least} to {most}{unit}"),
        (Some(least), None) => format!(" of at least {least}{unit}"),
        (None, Some(most)) => format!(" of at most {most}{unit}"),
        (None, None) => String::new(),
    };
    let words: Vec<String> = kinds(schema)
        .into_iter()
        .filter(|kind| *kind != "null")
        .map(|kind| match kind {
            "integer" if schema["format"] == json!("int64") && schema["minimum"].is_null() => {
                "an integer of 64 bits with a sign".to_owned()
            }
            "integer" => format!("an integer{}", bounds(&schema["minimum"], &schema["maximum"], "")),
            "number" if !schema["exclusiveMinimum"].is_null() => {
                let most = bounds(&Value::Null, &schema["maximum"], "");
                format!("a number above {}{most}", schema["exclusiveMinimum"])
            }
            "number" => format!("a number{}", bounds(&schema["minimum"], &schema["maximum"], "")),
            "string" => {
                format!("a string{}", bounds(&schema["minLength"], &schema["maxLength"], " characters"))
            }
            "array" => format!("an array{}", bounds(&schema["minItems"], &schema["maxItems"], " items")),
            "object" => "an object".to_owned(),
            "boolean" => "true or false".to_owned(),
            other => other.to_owned(),
        })
        .collect();
    match words.is_empty() {
        true => described(schema).unwrap_or_else(|| "of another form".to_owned()),
        false => words.join(" or "),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    fn read<T: Body>(bytes: &[u8]) -> Result<T, ApiError> {
        understand(parse(bytes, &|| true)?, T::UNKNOWN)
    }

    /// Everything a body can be made of.
    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    struct Sample {
        #[schema(required = true, min_length = 1, max_length = 5)]
        name: String,
        #[schema(minimum = 0, maximum = 2)]
        heat: Option<f32>,
        #[schema(minimum = 1, maximum = 8)]
        count: Option<u32>,
        seed: Option<i64>,
        #[serde(flatten)]
        more: More,
        /// A string or up to 2 strings. More is less.
        stop: Option<OneOrMany>,
        #[schema(max_items = 2)]
        parts: Option<Vec<Part>>,
    }

    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    struct More {
        flag: Option<bool>,
    }

    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    struct Part {
        kind: Kind,
        text: String,
    }

    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    #[serde(rename_all = "snake_case")]
    enum Kind {
        Text,
        Image,
    }

    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Two),
    }

    #[derive(Debug, Deserialize, ToSchema, PartialEq)]
    #[schema(max_items = 2)]
    struct Two(Vec<String>);

    body!(
        Sample,
        Unknown::IgnoreBut(&[
            Unsupported { field: "store", neutral: &["false"] },
            Unsupported { field: "audio", neutral: &[] }
        ])
    );

    fn faults(body: &Value) -> Vec<String> {
        match read::<Sample>(body.to_string().as_bytes()) {
            Ok(_) => Vec::new(),
            Err(error) => error.faults.into_iter().map(|fault| fault.message).collect(),
        }
    }

    #[test]
    fn every_wrong_field_is_named_with_its_rule_and_no_text_is_repeated() {
        let check = |body: Value, wanted: &[&str]| assert_eq!(faults(&body), wanted, "{body}");
        check(json!({"name": "a", "heat": 2, "count": 8, "flag": null, "stop": ["x"], "other": 1}), &[]);
        check(json!({}), &["name: is required"]);
        check(
            json!({"name": "a", "seed": u64::MAX, "count": 9}),
            &[
                "seed must be an integer of 64 bits with a sign; got 18446744073709551615",
                "count must be an integer from 1 to 8; got 9",
            ],
        );
        check(
            json!({"name": "secret", "heat": "hot", "count": 0, "flag": 1}),
            &[
                "name must be a string from 1 to 5 characters; got a string of 6 characters",
                "heat must be a number from 0 to 2; got a string of 3 characters",
                "count must be an integer from 1 to 8; got 0",
                "flag must be true or false; got 1",
            ],
        );
        check(
            json!({"name": "a", "parts": [{"kind": "text", "text": "x"}, {"kind": "sound"}]}),
            &[
                "parts[1].text: is required",
                "parts[1].kind must be one of \"text\", \"image\"; got a string of 5 characters",
            ],
        );
        check(json!({"name": "a", "stop": 5}), &["stop must be a string or up to 2 strings; got 5"]);
        check(
            json!({"name": "a", "store": true, "audio": {}}),
            &["store: is not supported by this server", "audio: is not supported by this server"],
        );
        check(json!({"name": "a", "store": false, "audio": null}), &[]);
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for body in [&b"[]"[..], b"", b"{", b"\xff\xfe", b"\"text\"", b"{\"name\":\"\xc3\"}"] {
            let error = read::<Sample>(body).unwrap_err();
            assert_eq!(error.faults[0].field, "body", "{body:?}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(read::<Sample>(deep.as_bytes()).unwrap_err().faults[0].field, "body");
    }

    /// JSON with keys that the sample has, more often than not.
    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            (-3.0..3.0f64).prop_map(Value::from),
            "[a-z]{0,7}".prop_map(Value::from),
        ];
        let key =
            prop_oneof!["name", "heat", "count", "seed", "flag", "stop", "parts", "kind", "text", "[a-z]{3}"];
        leaf.prop_recursive(3, 24, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key.clone(), inner, 0..5)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// The schema and the type agree: what the schema lets through is what the type takes.
        #[test]
        fn no_body_passes_the_schema_and_fails_the_type(value in value()) {
            let shape = Sample::shape();
            let mut faults = Vec::new();
            if value.is_object() {
                shape.check(&shape.root, &value, "", None, &mut faults);
                if faults.is_empty() {
                    prop_assert!(Sample::deserialize(&value).is_ok(), "{value}");
                }
            }
        }
    }
}
