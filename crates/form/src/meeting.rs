//! How much patterns multiply that must hold for one string at once.
//!
//! The compiler builds the intersection of all patterns of a string. To derive it once, it makes every combination of
//! what each pattern can do next, and asks none of its own limits meanwhile: 26 short patterns took four gigabytes. So
//! the combinations are estimated before anything is derived, and forms with too many are refused.

use std::collections::{HashMap, HashSet};

use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder, raw::ExprSet};
use serde_json::{Map, Value};

use crate::FormError;

/// Combinations of what patterns can do next. A pattern is counted with the nodes of its expression, several times what
/// it can do at once. The most that is let in compiles in seconds (a test says so); five long patterns are too many.
const COMBINATIONS_MAX: usize = 1 << 20;

/// What follows a negation are disjoint sets of bytes: at most one for each byte, and what is left over.
const NEGATION_MAX: usize = 257;

/// Nodes of a format that only the compiler knows, inside a grammar: more than the longest of our own.
const FORMAT_NODES: usize = 200;

/// Nodes looked at while sizes are counted: a large schema has some thousand.
const NODES_MAX: usize = 10_000_000;

/// Schemas looked at, each as often as it meets others: schemas of schemas take some thousand.
const VISITS_MAX: usize = 200_000;

/// What is refused.
const TOO_MANY: FormError =
    FormError::TooLarge { what: "number of combinations of patterns for one string", max: COMBINATIONS_MAX };

/// Refuses a schema that lets too many patterns meet.
///
/// Follows which schemas apply to the same place of an answer: those at the root, then those of each member and item.
pub(crate) fn check_schema(schema: &Value) -> Result<(), FormError> {
    let mut count = Count { root: schema, referred: HashMap::new(), patterns: HashMap::new() };
    let mut visits = 0;
    let mut open = vec![vec![Part::All(schema)]];
    let mut seen = HashSet::new();
    while let Some(parts) = open.pop() {
        let combinations = parts.iter().map(|part| count.of_part(*part)).fold(1, usize::saturating_mul);
        if combinations > COMBINATIONS_MAX {
            return Err(TOO_MANY);
        }
        let here = closure(schema, &parts);
        visits += here.len();
        if visits > VISITS_MAX {
            return Err(FormError::TooLarge {
                what: "number of ways in which schemas meet",
                max: VISITS_MAX,
            });
        }
        for mut parts in below(&here) {
            parts.sort_unstable_by_key(|part| part.address());
            parts.dedup_by_key(|part| part.address());
            if !parts.is_empty() && seen.insert(parts.iter().map(|part| part.address()).collect::<Vec<_>>()) {
                open.push(parts);
            }
        }
    }
    Ok(())
}

/// What applies to a place.
#[derive(Clone, Copy)]
enum Part<'a> {
    /// This schema.
    All(&'a Value),
    /// At most one of these, so far as it can be told.
    OneOfList(&'a Vec<Value>),
    /// The same, by name.
    OneOfNamed(&'a Map<String, Value>),
}

impl<'a> Part<'a> {
    fn address(self) -> usize {
        match self {
            Part::All(schema) => std::ptr::from_ref(schema).addr(),
            Part::OneOfList(schemas) => std::ptr::from_ref(schemas).addr(),
            Part::OneOfNamed(schemas) => std::ptr::from_ref(schemas).addr(),
        }
    }

    fn schemas(self) -> Vec<&'a Value> {
        match self {
            Part::All(schema) => vec![schema],
            Part::OneOfList(schemas) => schemas.iter().collect(),
            Part::OneOfNamed(schemas) => schemas.values().collect(),
        }
    }
}

/// All schemas that may apply where these do: what they are composed of, and what they refer to.
fn closure<'a>(root: &'a Value, parts: &[Part<'a>]) -> Vec<&'a Map<String, Value>> {
    let mut open: Vec<&Value> = parts.iter().flat_map(|part| part.schemas()).collect();
    let (mut seen, mut all) = (HashSet::new(), Vec::new());
    while let Some(schema) = open.pop() {
        let Some(fields) = schema.as_object().filter(|_| seen.insert(std::ptr::from_ref(schema).addr()))
        else {
            continue;
        };
        all.push(fields);
        for keyword in ["allOf", "anyOf", "oneOf"] {
            open.extend(fields.get(keyword).and_then(Value::as_array).into_iter().flatten());
        }
        open.extend(referred(root, fields));
    }
    all
}

fn referred<'a>(root: &'a Value, fields: &'a Map<String, Value>) -> Option<&'a Value> {
    root.pointer(fields.get("$ref")?.as_str()?.strip_prefix('#')?)
}

/// What applies to each member and to the items of what all of these apply to.
fn below<'a>(schemas: &[&'a Map<String, Value>]) -> Vec<Vec<Part<'a>>> {
    let named =
        |fields: &'a Map<String, Value>, keyword: &str| fields.get(keyword).and_then(Value::as_object);
    // A member has the schema of its name and one for its pattern; without its name, the one for all others.
    let member = |name: Option<&str>| -> Vec<Part<'a>> {
        let of_one = |fields: &&'a Map<String, Value>| {
            let own = named(fields, "properties").and_then(|properties| properties.get(name?));
            let others = if own.is_none() { fields.get("additionalProperties") } else { None };
            let patterns = named(fields, "patternProperties").map(Part::OneOfNamed);
            own.or(others).map(Part::All).into_iter().chain(patterns).collect::<Vec<_>>()
        };
        schemas.iter().flat_map(of_one).collect()
    };
    let names: HashSet<&str> = schemas
        .iter()
        .filter_map(|fields| named(fields, "properties"))
        .flat_map(|properties| properties.keys().map(String::as_str))
        .collect();
    let mut places: Vec<Vec<Part<'a>>> = names.into_iter().map(|name| member(Some(name))).collect();
    places.push(member(None));
    let listed = |fields: &&'a Map<String, Value>| {
        let keywords = ["items", "prefixItems", "additionalItems"].into_iter();
        keywords
            .filter_map(|keyword| fields.get(keyword))
            .map(|schema| schema.as_array().map_or(Part::All(schema), Part::OneOfList))
            .collect::<Vec<_>>()
    };
    places.push(schemas.iter().flat_map(listed).collect());
    places
}

/// Counts the combinations of the patterns that hold for one place together.
struct Count<'a> {
    root: &'a Value,
    /// By what is referred to; one for what refers to itself, which adds nothing again.
    referred: HashMap<usize, usize>,
    /// Nodes of a pattern.
    patterns: HashMap<&'a str, usize>,
}

impl<'a> Count<'a> {
    fn of_part(&mut self, part: Part<'a>) -> usize {
        part.schemas().into_iter().map(|schema| self.of(schema)).max().unwrap_or(1)
    }

    fn of(&mut self, schema: &'a Value) -> usize {
        let Some(fields) = schema.as_object() else { return 1 };
        let pattern = fields.get("pattern").and_then(Value::as_str);
        let mut count =
            pattern.map_or(1, |pattern| *self.patterns.entry(pattern).or_insert_with(|| nodes(pattern)));
        if fields.contains_key("format") {
            count = count.saturating_mul(FORMAT_NODES);
        }
        for (keyword, all) in [("allOf", true), ("anyOf", false), ("oneOf", false)] {
            let parts = fields.get(keyword).and_then(Value::as_array).into_iter().flatten();
            let parts = parts.map(|schema| self.of(schema));
            let parts = if all { parts.fold(1, usize::saturating_mul) } else { parts.max().unwrap_or(1) };
            count = count.saturating_mul(parts);
        }
        let Some(target) = referred(self.root, fields) else { return count };
        let address = std::ptr::from_ref(target).addr();
        let known = self.referred.get(&address).copied();
        let behind = known.unwrap_or_else(|| {
            self.referred.insert(address, 1);
            let behind = self.of(target);
            self.referred.insert(address, behind);
            behind
        });
        count.saturating_mul(behind)
    }
}

/// Nodes of a pattern's expression. One that the compiler cannot read is refused later; until then its length will do.
fn nodes(pattern: &str) -> usize {
    let mut builder = RegexBuilder::new();
    let empty = builder.exprset().len();
    let read = builder.mk_regex_for_serach(pattern);
    if read.is_ok() { (builder.exprset().len() - empty).max(1) } else { pattern.len().max(1) }
}

/// Refuses schemas inside a grammar that let too many patterns meet. The compiler reads them as this does: JSON from
/// the first character behind the keyword on.
pub(crate) fn check_grammar(lark: &str) -> Result<(), FormError> {
    for (at, keyword) in lark.match_indices("%json") {
        let mut values = serde_json::Deserializer::from_str(&lark[at + keyword.len()..]).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            crate::schema::check_size(&schema)?;
            check_schema(&schema)?;
        }
    }
    Ok(())
}

/// Refuses terminals whose intersections multiply too much, whatever language they were written in.
pub(crate) fn check_terms(expressions: &ExprSet) -> Result<(), FormError> {
    // The tags have no public names.
    let mut builder = RegexBuilder::new();
    let [a, b] = ["a.*", ".*b"].map(|pattern| RegexAst::Regex(pattern.to_owned()));
    let and = builder.mk(&RegexAst::And(vec![a.clone(), b])).expect("two patterns have an intersection");
    let not = builder.mk(&RegexAst::Not(Box::new(a))).expect("a pattern has a complement");
    let (and, not) = (builder.exprset().get_tag(and), builder.exprset().get_tag(not));
    let id = |index: usize| ExprRef::new(u32::try_from(index).expect("ids fit 32 bits"));
    let mut sizes = Sizes { expressions, intersections: HashMap::new(), known: HashMap::new(), visits: 0 };
    // Parts are made before what they are part of, so an intersection inside another one is known by then.
    for index in (1..expressions.len()).filter(|&index| expressions.get_tag(id(index)) == and) {
        let mut combinations = 1_usize;
        for &part in expressions.get_args(id(index)) {
            let size = sizes.of(part)?;
            let size = if expressions.get_tag(part) == not { size.min(NEGATION_MAX) } else { size };
            combinations = combinations.saturating_mul(size);
        }
        if combinations > COMBINATIONS_MAX {
            return Err(TOO_MANY);
        }
        sizes.intersections.insert(id(index), combinations);
    }
    Ok(())
}

/// Sizes of expressions: their nodes, with intersections inside them counted as their combinations.
struct Sizes<'a> {
    expressions: &'a ExprSet,
    intersections: HashMap<ExprRef, usize>,
    known: HashMap<ExprRef, usize>,
    visits: usize,
}

impl Sizes<'_> {
    fn of(&mut self, expression: ExprRef) -> Result<usize, FormError> {
        if let Some(&known) = self.known.get(&expression) {
            return Ok(known);
        }
        let (mut open, mut seen, mut size) = (vec![expression], HashSet::from([expression]), 0_usize);
        while let Some(node) = open.pop() {
            self.visits += 1;
            if self.visits > NODES_MAX {
                return Err(FormError::TooLarge {
                    what: "number of nodes of patterns that meet",
                    max: NODES_MAX,
                });
            }
            if let Some(&combinations) = self.intersections.get(&node) {
                size = size.saturating_add(combinations);
                continue;
            }
            size = size.saturating_add(1);
            open.extend(self.expressions.get_args(node).iter().filter(|&&part| seen.insert(part)));
        }
        self.known.insert(expression, size);
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patterns_are_counted_where_they_meet_and_nowhere_else() {
        let check = |schema: Value, fits: bool| assert_eq!(check_schema(&schema).is_ok(), fits, "{schema}");
        let pattern = json!({"pattern": "^(.*a.*)*x$"});
        let some = |count: usize| vec![pattern.clone(); count];
        // As many as fit at once.
        let most = (1..10).take_while(|&count| check_schema(&json!({"allOf": some(count)})).is_ok()).count();
        assert!((3..6).contains(&most), "{most}");
        check(json!({"pattern": "^(.*a.*)*x$", "allOf": some(most - 1)}), true);
        check(json!({"pattern": "^(.*a.*)*x$", "allOf": some(most)}), false);
        // Of alternatives one holds; members are different strings.
        check(json!({"anyOf": some(40)}), true);
        check(json!({"prefixItems": some(40), "items": pattern}), true);
        let members: Map<String, Value> = (0..40).map(|n| (format!("m{n}"), pattern.clone())).collect();
        check(json!({"properties": members}), true);
        check(json!({"allOf": vec![json!({"anyOf": some(3)}); most + 1]}), false);
        // The same member, from several sides.
        let member = json!({"properties": {"a": pattern}});
        check(json!({"allOf": vec![member.clone(); most]}), true);
        check(json!({"allOf": vec![member; most + 1]}), false);
        // Behind references.
        let twice = |target: &str| json!({"allOf": [{"$ref": target}, {"$ref": target}]});
        let doubling = json!({"$ref": "#/$defs/a", "$defs": {"a": twice("#/$defs/b"), "b": twice("#/$defs/c"),
            "c": twice("#/$defs/d"), "d": pattern}});
        check(doubling, false);
        // A tree whose nodes have what all have, and nodes below: no place has more than one.
        let base = json!({"properties": {"id": pattern}});
        let nodes = json!({"properties": {"nodes": {"items": {"$ref": "#"}}}});
        check(json!({"allOf": [{"$ref": "#/$defs/base"}, nodes], "$defs": {"base": base}}), true);
        check(json!({"allOf": [pattern, {"$ref": "#"}]}), true);
        // One more with every level, as a member that refers to the whole: the same pattern, met twice.
        let more = json!({"allOf": [{"$ref": "#"}, {"properties": {"a": pattern}}]});
        check(json!({"properties": {"a": more}}), true);
        let names: Map<String, Value> = (0..40).map(|n| (format!("^{n}"), pattern.clone())).collect();
        check(json!({"patternProperties": names}), true);
    }
}
