//! The JSON of a body, read no further than it may go.
//!
//! A value takes many times the bytes that it is written with: eight megabytes of small objects took most of a gigabyte
//! and most of a minute. So values are counted as they are read, and reading stops when nobody waits for it.

use std::{cell::Cell, fmt};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Values of a body: a prompt of a million token ids, and a million beside them.
const VALUES_MAX: usize = 2 << 20;

/// Objects and lists of a body: batches and schemas have some ten thousand.
const CONTAINERS_MAX: usize = 200_000;

/// Values between two looks at whether it is still wanted.
const LOOK: usize = 4096;

/// Reads one value, as long as it is wanted.
pub(crate) fn read(bytes: &[u8], wanted: &dyn Fn() -> bool) -> Result<Value, serde_json::Error> {
    let count = Count { values: Cell::new(0), containers: Cell::new(0), wanted };
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = Seed(&count).deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

struct Count<'a> {
    values: Cell<usize>,
    containers: Cell<usize>,
    wanted: &'a dyn Fn() -> bool,
}

impl Count<'_> {
    fn value<E: Error>(&self) -> Result<(), E> {
        let values = self.values.get() + 1;
        self.values.set(values);
        if values > VALUES_MAX {
            return Err(E::custom(format_args!("more than {VALUES_MAX} values")));
        }
        if values.is_multiple_of(LOOK) && !(self.wanted)() {
            return Err(E::custom("reading it was broken off"));
        }
        Ok(())
    }

    fn container<E: Error>(&self) -> Result<(), E> {
        let containers = self.containers.get() + 1;
        self.containers.set(containers);
        if containers > CONTAINERS_MAX {
            return Err(E::custom(format_args!("more than {CONTAINERS_MAX} objects and lists")));
        }
        Ok(())
    }
}

struct Seed<'a>(&'a Count<'a>);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        self.0.value()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("any valid JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        self.0.container()?;
        let mut values = Vec::new();
        while let Some(value) = items.next_element_seed(Seed(self.0))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        self.0.container()?;
        let mut fields = Map::new();
        while let Some(name) = entries.next_key::<String>()? {
            fields.insert(name, entries.next_value_seed(Seed(self.0))?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_serde_reads_or_refused_where_serde_refuses() {
        let deep = "[".repeat(1000);
        for text in [
            r#"{"b":[1,-2,3.5,1e300,null,true,"x\u00e9",{"":[]}],"a":18446744073709551615,"b":2}"#,
            "\"text\"",
            " 5 ",
            "",
            "{",
            "[1,]",
            "1 2",
            "{\"a\":1e999}",
            &deep,
        ] {
            let (ours, theirs) = (read(text.as_bytes(), &|| true), serde_json::from_str::<Value>(text));
            assert_eq!(ours.as_ref().ok(), theirs.as_ref().ok(), "{text}");
            let said = |error: Option<serde_json::Error>| error.map(|error| error.to_string());
            assert_eq!(said(ours.err()), said(theirs.err()), "{text}");
        }
    }

    #[test]
    fn it_ends_where_it_takes_too_much_or_nobody_waits() {
        let refused = |text: &str, wanted: bool| read(text.as_bytes(), &|| wanted).unwrap_err().to_string();
        let many = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
        assert!(read(many("1", 1 << 20).as_bytes(), &|| true).is_ok(), "a prompt of a million tokens");
        assert!(refused(&many("1", VALUES_MAX), true).starts_with("more than 2097152 values at"));
        assert!(refused(&many("{}", CONTAINERS_MAX), true).starts_with("more than 200000 objects and lists"));
        assert!(refused(&many("1", LOOK), false).starts_with("reading it was broken off"));
    }
}
