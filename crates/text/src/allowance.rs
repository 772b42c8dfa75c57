//! What one rendering of a template may make and do.
//!
//! The template engine counts instructions, but a single one can double a string, repeat a list, or join a million
//! references to a long text. So a compiled template is changed before it runs: what makes values or looks through them
//! goes by way of this module, which weighs what goes in, counts what comes out, and ends the rendering before memory
//! or patience end. Bytes and work are counted, not time, so that a template that renders once renders always.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::LocalKey;

use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};

use crate::python;

/// Bytes of one value, with all that it holds: several times the longest prompt.
const VALUE_BYTES_MAX: usize = 16 << 20;

/// Bytes that one rendering may make in all. Templates that grow a string message by message make it anew each time.
const MADE_BYTES_MAX: usize = 256 << 20;

/// Values, and stretches of [`STRETCH`] bytes, that one rendering may look at in operations that look through all of
/// what they are given. Chosen as a few seconds' worth; not measured.
const WORK_MAX: usize = 100_000_000;

/// Bytes of text that are looked through as fast as one value.
const STRETCH: usize = 64;

/// Bytes of a value beside its text, in a list.
const VALUE_BYTES: usize = 24;

/// How deep lists and maps may lie in each other where they are looked through. JSON's reader allows 128.
const DEPTH_MAX: usize = 160;

/// Filters that look at the outside of their values only, or that have bounds of their own.
const SHALLOW_FILTERS: &[&str] =
    &["count", "d", "default", "first", "items", "last", "length", "string", "tojson"];

/// Methods of which the same is true.
const SHALLOW_METHODS: &[&str] = &["get", "items", "keys", "values"];

thread_local! {
    // A rendering has a thread of its own, so both begin anew with each.
    static MADE_LEFT: Cell<usize> = const { Cell::new(MADE_BYTES_MAX) };
    static WORK_LEFT: Cell<usize> = const { Cell::new(WORK_MAX) };
}

/// A template that keeps to what it may.
pub(crate) struct Metered<'source> {
    root: Instructions<'source>,
    blocks: BTreeMap<&'source str, Instructions<'source>>,
}

impl<'source> Metered<'source> {
    /// Compiles a template.
    pub(crate) fn compile(
        name: &'source str,
        source: &'source str,
        syntax: SyntaxConfig,
    ) -> Result<Metered<'source>, Error> {
        let config =
            TemplateConfig { syntax_config: syntax, default_auto_escape: Arc::new(|_| AutoEscape::None) };
        let compiled = CompiledTemplate::new(name, source, &config)?;
        let blocks = compiled.blocks.iter();
        Ok(Metered {
            root: metered(&compiled.instructions)?,
            blocks: blocks.map(|(name, block)| Ok((*name, metered(block)?))).collect::<Result<_, Error>>()?,
        })
    }

    /// Renders with an environment that [`equip`] has seen, on a thread that renders nothing else.
    pub(crate) fn render(&self, environment: &Environment<'_>, variables: Value) -> Result<String, Error> {
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        eval(environment, &self.root, variables, &self.blocks, &mut out, AutoEscape::None)?;
        Ok(text)
    }
}

/// Puts into an environment what changed templates call. Their names are none that a template can write.
pub(crate) fn equip(environment: &mut Environment<'_>) {
    for hook in [Hook::Look, Hook::Made, Hook::Concat, Hook::Multiply, Hook::Filter, Hook::Method] {
        environment.add_global(hook.name(), Value::from_object(hook));
    }
    environment.set_formatter(|out, _, value| {
        let text = python::display(value)?;
        made(text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
}

/// What stands in the place of an instruction.
fn expanded(instruction: Instruction<'_>) -> Result<Vec<Instruction<'_>>, Error> {
    let call = |hook: Hook, values: u16| Instruction::CallFunction(hook.name(), Some(values));
    let (look, made) = (call(Hook::Look, 1), call(Hook::Made, 1));
    Ok(match instruction {
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(text)), Instruction::Emit],
        Instruction::StringConcat => vec![call(Hook::Concat, 2)],
        Instruction::Mul => vec![call(Hook::Multiply, 2)],
        Instruction::ApplyFilter(name, Some(count), _) => {
            vec![Instruction::LoadConst(Value::from(name)), call(Hook::Filter, count.saturating_add(1))]
        }
        Instruction::ApplyFilter(_, None, _) => return Err(wrong("a filter with *arguments is not read")),
        Instruction::CallMethod(name, Some(count)) => {
            vec![Instruction::LoadConst(Value::from(name)), call(Hook::Method, count.saturating_add(1))]
        }
        Instruction::CallMethod(_, None) => return Err(wrong("a method with *arguments is not read")),
        Instruction::Add
        | Instruction::Slice
        | Instruction::CallFunction(..)
        | Instruction::CallObject(_) => {
            vec![instruction, made]
        }
        Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_)
        | Instruction::PerformTest(_, Some(_), _) => vec![look, instruction],
        other => vec![other],
    })
}

/// The same instructions with the expanded ones among them, and jumps that lead where they led.
fn metered<'source>(old: &Instructions<'source>) -> Result<Instructions<'source>, Error> {
    let old_ones = (0..).map_while(|at| old.get(at).cloned());
    let parts = old_ones.map(expanded).collect::<Result<Vec<_>, Error>>()?;
    let mut places = vec![0_u32];
    for part in &parts {
        places.push(places[places.len() - 1] + u32::try_from(part.len()).unwrap_or(u32::MAX));
    }
    let mut new = Instructions::new(old.name(), old.source());
    for (at, part) in (0..).zip(parts) {
        let line = old.get_line(at).and_then(|line| u16::try_from(line).ok()).unwrap_or(u16::MAX);
        for mut instruction in part {
            match &mut instruction {
                Instruction::Iterate(to)
                | Instruction::Jump(to)
                | Instruction::JumpIfFalse(to)
                | Instruction::JumpIfFalseOrPop(to)
                | Instruction::JumpIfTrueOrPop(to)
                | Instruction::BuildMacro(_, to, _) => *to = places[*to as usize],
                _ => {}
            }
            new.add_with_line(instruction, line);
        }
    }
    Ok(new)
}

/// What a changed template calls.
#[derive(Clone, Copy, Debug)]
enum Hook {
    /// Gives its value back, which is about to be looked through.
    Look,
    /// Gives its value back, which was made.
    Made,
    /// Two values as one text.
    Concat,
    /// A product of numbers, or something repeated.
    Multiply,
    /// A filter; its name is the last value.
    Filter,
    /// A method; its name is the last value.
    Method,
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Hook::Look => "%look",
            Hook::Made => "%made",
            Hook::Concat => "%concat",
            Hook::Multiply => "%multiply",
            Hook::Filter => "%filter",
            Hook::Method => "%method",
        }
    }
}

impl Object for Hook {
    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        match (**self, args) {
            (Hook::Look, [value]) => {
                work(weigh(std::slice::from_ref(value))?.units())?;
                Ok(value.clone())
            }
            (Hook::Made, [value]) => counted(value.clone()),
            (Hook::Concat, [left, right]) => {
                counted(Value::from(python::display(left)? + &python::display(right)?))
            }
            (Hook::Multiply, [left, right]) => counted(product(left, right)?),
            (Hook::Filter, [values @ .., name]) => filter(state, name.as_str().unwrap_or_default(), values),
            (Hook::Method, [value, values @ .., name]) => {
                let name = name.as_str().unwrap_or_default();
                if !SHALLOW_METHODS.contains(&name) {
                    let all: Vec<Value> = std::iter::once(value).chain(values).cloned().collect();
                    let weight = check(name, &all)?;
                    work(weight.units())?;
                }
                counted(value.call_method(state, name, values)?)
            }
            _ => Err(wrong("a template called what it cannot name")),
        }
    }
}

/// Applies a filter to its values.
fn filter(state: &mut State<'_, '_>, name: &str, values: &[Value]) -> Result<Value, Error> {
    if SHALLOW_FILTERS.contains(&name) {
        return counted(state.apply_filter(name, values)?);
    }
    // Of members one attribute is looked at, and conversations are asked so for each of their messages.
    let weight = match (name, values.first().and_then(Value::len)) {
        ("selectattr" | "rejectattr", Some(values)) => Weight { values, bytes: 0 },
        _ => check(name, values)?,
    };
    // What every member is compared with or given to, or how often members are compared with each other.
    let each = match name {
        "map" | "select" | "reject" | "selectattr" | "rejectattr" => {
            weigh(values.get(1..).unwrap_or_default())?.units()
        }
        "sort" | "dictsort" | "groupby" | "unique" => weight.values.max(2).ilog2() as usize,
        _ => 1,
    };
    work(weight.units().saturating_mul(each.max(1)))?;
    // A filter for each member is one of these too.
    if let ("map", [list, inner, rest @ ..]) = (name, values)
        && let Some(inner) = inner.as_str()
    {
        let one = |item: Value| {
            let values: Vec<Value> = std::iter::once(item).chain(rest.iter().cloned()).collect();
            filter(state, inner, &values)
        };
        return counted(list.try_iter()?.map(one).collect::<Result<Vec<Value>, Error>>()?.into());
    }
    counted(state.apply_filter(name, values)?)
}

/// Weighs the values of a filter or method and refuses those of which it would make far more than they are.
fn check(name: &str, values: &[Value]) -> Result<Weight, Error> {
    let weight = weigh(values)?;
    let text = |at: usize| values.get(at).and_then(Value::as_str).unwrap_or_default();
    let bytes = match name {
        "replace" => text(0).matches(text(1)).count().saturating_mul(text(2).len()),
        // Whichever of them stands between the others.
        "join" => weight
            .values
            .saturating_mul(values.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0)),
        "batch" | "slice" => values.get(1).and_then(Value::as_usize).unwrap_or(0).saturating_mul(VALUE_BYTES),
        "format" => {
            let form = text(0);
            let numbers = form.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let widest = numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0);
            if form.contains('*') {
                return Err(wrong("a format whose widths are arguments is not read"));
            }
            form.matches(['%', '{']).count().saturating_mul(weight.bytes.saturating_add(widest))
        }
        _ => 0,
    };
    if bytes > VALUE_BYTES_MAX {
        return Err(wrong(format!(
            "{name} would make {bytes} bytes, and at most {VALUE_BYTES_MAX} are made"
        )));
    }
    Ok(weight)
}

/// As Python multiplies.
fn product(left: &Value, right: &Value) -> Result<Value, Error> {
    let (thing, times) = if right.is_number() { (left, right) } else { (right, left) };
    if thing.is_number() {
        return match (i128::try_from(left.clone()), i128::try_from(right.clone())) {
            (Ok(left), Ok(right)) if left_is_whole(thing, times) => {
                let product = left.checked_mul(right).ok_or_else(|| wrong("a product is too large"))?;
                Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from))
            }
            _ => Ok(Value::from(f64::try_from(left.clone())? * f64::try_from(right.clone())?)),
        };
    }
    let times =
        times.as_usize().ok_or_else(|| wrong("only numbers are multiplied by what is no whole number"))?;
    let bytes = weigh(std::slice::from_ref(thing))?.bytes;
    if bytes.saturating_mul(times) > VALUE_BYTES_MAX {
        return Err(wrong(format!("{times} times {bytes} bytes, and at most {VALUE_BYTES_MAX} are made")));
    }
    match thing.kind() {
        ValueKind::String => Ok(Value::from(thing.as_str().unwrap_or_default().repeat(times))),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = thing.try_iter()?.collect();
            Ok(Value::from(std::iter::repeat_n(items, times).flatten().collect::<Vec<Value>>()))
        }
        kind => Err(wrong(format!("a value of type {kind} cannot be multiplied"))),
    }
}

fn left_is_whole(one: &Value, other: &Value) -> bool {
    one.is_integer() && other.is_integer()
}

/// A value that was made.
fn counted(value: Value) -> Result<Value, Error> {
    let bytes = match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Bytes => value.as_bytes().map_or(0, <[u8]>::len),
        // What it holds was counted when it was made. Lists that are joined share most of themselves.
        ValueKind::Seq | ValueKind::Iterable => match value.len() {
            Some(len) if len.saturating_mul(VALUE_BYTES) > VALUE_BYTES_MAX => return Err(too_large()),
            Some(len) => len * VALUE_BYTES / 4,
            None => weigh(std::slice::from_ref(&value))?.bytes,
        },
        _ => VALUE_BYTES,
    };
    if bytes > VALUE_BYTES_MAX {
        return Err(too_large());
    }
    made(bytes)?;
    Ok(value)
}

/// How much values are, with all that they hold.
#[derive(Clone, Copy, Debug, Default)]
struct Weight {
    bytes: usize,
    values: usize,
}

impl Weight {
    /// As work.
    fn units(self) -> usize {
        self.values + self.bytes / STRETCH
    }

    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(wrong(format!("lists and maps lie more than {DEPTH_MAX} deep in each other")));
        }
        self.values += 1;
        self.bytes += VALUE_BYTES + value.as_bytes().map_or(0, <[u8]>::len);
        if self.bytes > VALUE_BYTES_MAX {
            return Err(too_large());
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.add(&item, depth + 1)?;
                }
            }
            ValueKind::Map => {
                for key in value.try_iter()? {
                    self.add(&value.get_item(&key)?, depth + 1)?;
                    self.add(&key, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

fn weigh(values: &[Value]) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    for value in values {
        weight.add(value, 0).inspect_err(|_| {
            // Looking for the end of it was work, too; where none is left the next error says so.
            work(weight.units()).unwrap_or_default();
        })?;
    }
    Ok(weight)
}

fn made(bytes: usize) -> Result<(), Error> {
    spend(&MADE_LEFT, bytes, || format!("the template made more than {MADE_BYTES_MAX} bytes"))
}

fn work(units: usize) -> Result<(), Error> {
    spend(&WORK_LEFT, units, || "the template looks through too much".to_owned())
}

fn spend(
    left: &'static LocalKey<Cell<usize>>,
    amount: usize,
    reason: impl FnOnce() -> String,
) -> Result<(), Error> {
    let rest = left.get().checked_sub(amount);
    left.set(rest.unwrap_or(0));
    rest.map(drop).ok_or_else(|| wrong(reason()))
}

fn too_large() -> Error {
    wrong(format!("a value has more than {VALUE_BYTES_MAX} bytes"))
}

fn wrong(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
