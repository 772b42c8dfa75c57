//! The key-value pairs in front of a GGUF file's tensors.

use std::borrow::Cow;

use crate::Error;
use crate::reader::Reader;

/// Key-value pairs in file order.
///
/// The typed readers take any width that the value fits, because converters disagree on widths, and name the key when
/// they fail. The `opt_` readers give `None` for an absent key; one that is present with a wrong type is still an
/// error.
#[derive(Debug, Default)]
pub struct Metadata {
    pairs: Vec<(Box<str>, Value)>,
    /// Positions in `pairs`, ordered by key.
    by_key: Vec<usize>,
}

/// One metadata value of the types that GGUF defines.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "the variants are GGUF's own type names")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// A metadata array: all elements have one type, so that they are stored as tightly as in the file.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[serde(untagged)]
#[expect(missing_docs, reason = "the variants are GGUF's own type names")]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// Arrays in arrays in arrays: no known file nests at all, and recursion must end.
pub(crate) const DEPTH_MAX: usize = 4;

/// The shortest pair: an empty key (8 bytes of length), a type (4) and a one-byte value.
const PAIR_BYTES_MIN: usize = 13;

impl Metadata {
    /// Reads the pairs, of which the file says there are `count`.
    pub(crate) fn parse(reader: &mut Reader<'_>, count: u64) -> Result<Metadata, Error> {
        let (left, most) = (reader.left(), reader.left() / PAIR_BYTES_MIN);
        if count > most as u64 {
            return Err(Error::Count { what: "the number of metadata pairs", count, left, most });
        }
        // Grown as pairs are really read: `count` alone must not allocate.
        let mut pairs = Vec::new();
        for _ in 0..count {
            let key = reader.str("a metadata key")?;
            let id = reader.u32("a metadata type")?;
            pairs.push((Box::from(key), value(reader, key, id)?));
        }
        Metadata::new(pairs)
    }

    fn new(pairs: Vec<(Box<str>, Value)>) -> Result<Metadata, Error> {
        let mut by_key: Vec<usize> = (0..pairs.len()).collect();
        let key = |&position: &usize| &*pairs[position].0;
        by_key.sort_unstable_by_key(key);
        if let Some(pair) = by_key.windows(2).find(|pair| key(&pair[0]) == key(&pair[1])) {
            return Err(Error::DuplicateKey { key: key(&pair[0]).to_owned() });
        }
        Ok(Metadata { pairs, by_key })
    }

    /// The value of `key`, as it is stored.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.by_key.binary_search_by_key(&key, |&position| &*self.pairs[position].0).ok()?;
        Some(&self.pairs[self.by_key[at]].1)
    }

    /// All pairs in file order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.pairs.iter().map(|(key, value)| (&**key, value))
    }

    /// An integer of any width that fits 32 bits unsigned.
    pub fn u32(&self, key: &str) -> Result<u32, Error> {
        self.opt_u32(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`u32`](Metadata::u32), `None` where the key is absent.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>, Error> {
        self.read(key, "an integer", |value| fit(key, "32 bits unsigned", value.integer()?))
    }

    /// An integer of any width that fits 64 bits unsigned.
    pub fn u64(&self, key: &str) -> Result<u64, Error> {
        self.opt_u64(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`u64`](Metadata::u64), `None` where the key is absent.
    pub fn opt_u64(&self, key: &str) -> Result<Option<u64>, Error> {
        self.read(key, "an integer", |value| fit(key, "64 bits unsigned", value.integer()?))
    }

    /// A floating-point number of either width.
    pub fn f32(&self, key: &str) -> Result<f32, Error> {
        self.opt_f32(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`f32`](Metadata::f32), `None` where the key is absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>, Error> {
        self.read(key, "a floating-point number", |value| match *value {
            Value::F32(number) => Some(Ok(number)),
            Value::F64(number) => Some(narrow(key, number)),
            _ => None,
        })
    }

    /// A truth value.
    pub fn bool(&self, key: &str) -> Result<bool, Error> {
        self.opt_bool(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`bool`](Metadata::bool), `None` where the key is absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.read(key, "a truth value", |value| match *value {
            Value::Bool(truth) => Some(Ok(truth)),
            _ => None,
        })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<&str, Error> {
        self.opt_str(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`str`](Metadata::str), `None` where the key is absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>, Error> {
        self.read(key, "a string", |value| match value {
            Value::String(string) => Some(Ok(string.as_str())),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<&[String], Error> {
        self.opt_strings(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`strings`](Metadata::strings), `None` where the key is absent.
    pub fn opt_strings(&self, key: &str) -> Result<Option<&[String]>, Error> {
        self.read(key, "an array of strings", |value| match value {
            Value::Array(Array::String(strings)) => Some(Ok(strings.as_slice())),
            _ => None,
        })
    }

    /// An array of integers that each fit 32 bits signed; borrowed where it is stored so.
    pub fn i32s(&self, key: &str) -> Result<Cow<'_, [i32]>, Error> {
        self.opt_i32s(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`i32s`](Metadata::i32s), `None` where the key is absent.
    pub fn opt_i32s(&self, key: &str) -> Result<Option<Cow<'_, [i32]>>, Error> {
        self.read(key, "an array of integers", |value| match value {
            Value::Array(Array::I32(numbers)) => Some(Ok(Cow::from(numbers))),
            Value::Array(array) => array.integers(key, "32 bits signed").map(|all| all.map(Cow::Owned)),
            _ => None,
        })
    }

    /// An array of integers that each fit 32 bits unsigned; borrowed where it is stored so.
    pub fn u32s(&self, key: &str) -> Result<Cow<'_, [u32]>, Error> {
        self.opt_u32s(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`u32s`](Metadata::u32s), `None` where the key is absent.
    pub fn opt_u32s(&self, key: &str) -> Result<Option<Cow<'_, [u32]>>, Error> {
        self.read(key, "an array of integers", |value| match value {
            Value::Array(Array::U32(numbers)) => Some(Ok(Cow::from(numbers))),
            Value::Array(array) => array.integers(key, "32 bits unsigned").map(|all| all.map(Cow::Owned)),
            _ => None,
        })
    }

    /// An array of floating-point numbers of either width; borrowed where it is stored so.
    pub fn f32s(&self, key: &str) -> Result<Cow<'_, [f32]>, Error> {
        self.opt_f32s(key)?.ok_or_else(|| missing(key))
    }

    /// Like [`f32s`](Metadata::f32s), `None` where the key is absent.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<Cow<'_, [f32]>>, Error> {
        self.read(key, "an array of floating-point numbers", |value| match value {
            Value::Array(Array::F32(numbers)) => Some(Ok(Cow::from(numbers))),
            Value::Array(Array::F64(numbers)) => Some(
                numbers.iter().map(|&number| narrow(key, number)).collect::<Result<_, _>>().map(Cow::Owned),
            ),
            _ => None,
        })
    }

    /// Reads `key` with `pick`, which answers `None` for a value of another type than `want`.
    fn read<'a, T>(
        &'a self,
        key: &str,
        want: &'static str,
        pick: impl FnOnce(&'a Value) -> Option<Result<T, Error>>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match pick(value) {
            Some(picked) => picked.map(Some),
            None => Err(Error::KeyType { key: key.to_owned(), want, got: value.type_name() }),
        }
    }
}

impl Value {
    /// The type in words, for people.
    pub fn type_name(&self) -> &'static str {
        match self {
            Value::U8(_) => "u8",
            Value::I8(_) => "i8",
            Value::U16(_) => "u16",
            Value::I16(_) => "i16",
            Value::U32(_) => "u32",
            Value::I32(_) => "i32",
            Value::F32(_) => "f32",
            Value::Bool(_) => "a truth value",
            Value::String(_) => "a string",
            Value::Array(array) => array.type_name(),
            Value::U64(_) => "u64",
            Value::I64(_) => "i64",
            Value::F64(_) => "f64",
        }
    }

    /// The value of any integer type.
    fn integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(number) => number.into(),
            Value::I8(number) => number.into(),
            Value::U16(number) => number.into(),
            Value::I16(number) => number.into(),
            Value::U32(number) => number.into(),
            Value::I32(number) => number.into(),
            Value::U64(number) => number.into(),
            Value::I64(number) => number.into(),
            _ => return None,
        })
    }
}

impl Array {
    /// The type in words, for people.
    pub fn type_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "an array of u8",
            Array::I8(_) => "an array of i8",
            Array::U16(_) => "an array of u16",
            Array::I16(_) => "an array of i16",
            Array::U32(_) => "an array of u32",
            Array::I32(_) => "an array of i32",
            Array::F32(_) => "an array of f32",
            Array::Bool(_) => "an array of truth values",
            Array::String(_) => "an array of strings",
            Array::Array(_) => "an array of arrays",
            Array::U64(_) => "an array of u64",
            Array::I64(_) => "an array of i64",
            Array::F64(_) => "an array of f64",
        }
    }

    /// How many elements it has.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(all) => all.len(),
            Array::I8(all) => all.len(),
            Array::U16(all) => all.len(),
            Array::I16(all) => all.len(),
            Array::U32(all) => all.len(),
            Array::I32(all) => all.len(),
            Array::F32(all) => all.len(),
            Array::Bool(all) => all.len(),
            Array::String(all) => all.len(),
            Array::Array(all) => all.len(),
            Array::U64(all) => all.len(),
            Array::I64(all) => all.len(),
            Array::F64(all) => all.len(),
        }
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of any integer type, each of which must fit `T`.
    fn integers<T: TryFrom<i128>>(&self, key: &str, want: &'static str) -> Option<Result<Vec<T>, Error>> {
        fn all<T: TryFrom<i128>, N: Copy + Into<i128>>(
            key: &str,
            want: &'static str,
            numbers: &[N],
        ) -> Option<Result<Vec<T>, Error>> {
            numbers.iter().map(|&number| fit(key, want, number.into())).collect()
        }
        match self {
            Array::U8(numbers) => all(key, want, numbers),
            Array::I8(numbers) => all(key, want, numbers),
            Array::U16(numbers) => all(key, want, numbers),
            Array::I16(numbers) => all(key, want, numbers),
            Array::U32(numbers) => all(key, want, numbers),
            Array::I32(numbers) => all(key, want, numbers),
            Array::U64(numbers) => all(key, want, numbers),
            Array::I64(numbers) => all(key, want, numbers),
            _ => None,
        }
    }
}

fn missing(key: &str) -> Error {
    Error::MissingKey { key: key.to_owned() }
}

fn fit<T: TryFrom<i128>>(key: &str, want: &'static str, number: i128) -> Option<Result<T, Error>> {
    let fits = T::try_from(number);
    Some(fits.map_err(|_| Error::KeyRange { key: key.to_owned(), value: number.to_string(), want }))
}

/// Rounding to 32 bits is fine, becoming infinite is not.
fn narrow(key: &str, number: f64) -> Result<f32, Error> {
    let narrowed = number as f32;
    if number.is_finite() && narrowed.is_infinite() {
        let want = "32 bits floating-point";
        return Err(Error::KeyRange { key: key.to_owned(), value: number.to_string(), want });
    }
    Ok(narrowed)
}

/// Reads a value of type `id`.
fn value(reader: &mut Reader<'_>, key: &str, id: u32) -> Result<Value, Error> {
    const WHAT: &str = "a metadata value";
    Ok(match id {
        0 => Value::U8(u8::from_le_bytes(reader.array(WHAT)?)),
        1 => Value::I8(i8::from_le_bytes(reader.array(WHAT)?)),
        2 => Value::U16(u16::from_le_bytes(reader.array(WHAT)?)),
        3 => Value::I16(i16::from_le_bytes(reader.array(WHAT)?)),
        4 => Value::U32(u32::from_le_bytes(reader.array(WHAT)?)),
        5 => Value::I32(i32::from_le_bytes(reader.array(WHAT)?)),
        6 => Value::F32(f32::from_le_bytes(reader.array(WHAT)?)),
        7 => Value::Bool(truth(reader.at(), u8::from_le_bytes(reader.array(WHAT)?))?),
        8 => Value::String(reader.str(WHAT)?.to_owned()),
        9 => Value::Array(array(reader, key, 1)?),
        10 => Value::U64(u64::from_le_bytes(reader.array(WHAT)?)),
        11 => Value::I64(i64::from_le_bytes(reader.array(WHAT)?)),
        12 => Value::F64(f64::from_le_bytes(reader.array(WHAT)?)),
        _ => return Err(Error::ValueType { key: key.to_owned(), id }),
    })
}

/// Reads an array, the `depth`th around its elements.
fn array(reader: &mut Reader<'_>, key: &str, depth: usize) -> Result<Array, Error> {
    if depth > DEPTH_MAX {
        return Err(Error::Depth { key: key.to_owned(), most: DEPTH_MAX });
    }
    let id = reader.u32("an array's type")?;
    Ok(match id {
        0 => Array::U8(numbers(reader, u8::from_le_bytes)?),
        1 => Array::I8(numbers(reader, i8::from_le_bytes)?),
        2 => Array::U16(numbers(reader, u16::from_le_bytes)?),
        3 => Array::I16(numbers(reader, i16::from_le_bytes)?),
        4 => Array::U32(numbers(reader, u32::from_le_bytes)?),
        5 => Array::I32(numbers(reader, i32::from_le_bytes)?),
        6 => Array::F32(numbers(reader, f32::from_le_bytes)?),
        7 => {
            let at = reader.at() + 8; // behind the count
            let bytes = numbers(reader, u8::from_le_bytes)?;
            Array::Bool((at..).zip(bytes).map(|(at, byte)| truth(at, byte)).collect::<Result<_, _>>()?)
        }
        8 => {
            // Room is taken for all at once: a string is at least its 8 bytes of length and takes 24 in memory.
            let count = reader.count(COUNT, 8)?;
            let mut strings = Vec::with_capacity(count);
            for _ in 0..count {
                strings.push(reader.str("a string in an array")?.to_owned());
            }
            Array::String(strings)
        }
        9 => {
            // An array is at least its type and its count. Grown as they are read: every level of nesting could
            // claim the rest of the file.
            let count = reader.count(COUNT, 12)?;
            let mut arrays = Vec::new();
            for _ in 0..count {
                arrays.push(array(reader, key, depth + 1)?);
            }
            Array::Array(arrays)
        }
        10 => Array::U64(numbers(reader, u64::from_le_bytes)?),
        11 => Array::I64(numbers(reader, i64::from_le_bytes)?),
        12 => Array::F64(numbers(reader, f64::from_le_bytes)?),
        _ => return Err(Error::ValueType { key: key.to_owned(), id }),
    })
}

const COUNT: &str = "an array's length";

/// Reads the numbers of an array, which take as much room in memory as in the file.
fn numbers<T, const N: usize>(reader: &mut Reader<'_>, decode: fn([u8; N]) -> T) -> Result<Vec<T>, Error> {
    let count = reader.count(COUNT, N)?;
    let bytes = reader.bytes("an array", (count * N) as u64)?;
    Ok(bytes.as_chunks().0.iter().map(|&chunk| decode(chunk)).collect())
}

fn truth(at: usize, found: u8) -> Result<bool, Error> {
    match found {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Error::Bool { at, found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let pairs = [
            ("u8", Value::U8(7)),
            ("i64", Value::I64(7)),
            ("negative", Value::I8(-1)),
            ("large", Value::U64(1 << 32)),
            ("f32", Value::F32(0.1)),
            ("f64", Value::F64(0.5)),
            ("f64 large", Value::F64(1e300)),
            ("bool", Value::Bool(true)),
            ("string", Value::String("s".to_owned())),
            ("strings", Value::Array(Array::String(vec!["s".to_owned()]))),
            ("i32s", Value::Array(Array::I32(vec![-1, 2]))),
            ("u16s", Value::Array(Array::U16(vec![1, 2]))),
            ("u64s", Value::Array(Array::U64(vec![1, 1 << 40]))),
            ("f32s", Value::Array(Array::F32(vec![0.1]))),
            ("f64s", Value::Array(Array::F64(vec![0.5]))),
            ("f64s large", Value::Array(Array::F64(vec![0.5, -1e300]))),
        ];
        Metadata::new(pairs.into_iter().map(|(key, value)| (key.into(), value)).collect()).unwrap()
    }

    #[test]
    fn integers_of_any_width_are_read_where_they_fit() {
        let metadata = metadata();
        for key in ["u8", "i64"] {
            assert_eq!((metadata.u32(key).unwrap(), metadata.u64(key).unwrap()), (7, 7));
        }
        assert_eq!(metadata.u64("large").unwrap(), 1 << 32);
        assert_eq!(*metadata.u32s("u16s").unwrap(), [1, 2]);
        assert_eq!(*metadata.i32s("u16s").unwrap(), [1, 2]);
        assert!(matches!(metadata.i32s("i32s").unwrap(), Cow::Borrowed([-1, 2])));
        assert!(matches!(metadata.f32s("f32s").unwrap(), Cow::Borrowed([0.1])));
        assert_eq!(*metadata.f32s("f64s").unwrap(), [0.5]);
        assert_eq!((metadata.f32("f32").unwrap(), metadata.f32("f64").unwrap()), (0.1, 0.5));
        assert!(metadata.bool("bool").unwrap());
        assert_eq!((metadata.str("string").unwrap(), metadata.strings("strings").unwrap().len()), ("s", 1));
    }

    #[test]
    fn a_value_that_does_not_fit_is_an_error_with_its_key_and_value() {
        fn check<T>(read: Result<T, Error>, key_wanted: &str, value_wanted: &str) {
            match read {
                Err(Error::KeyRange { key, value, .. }) => {
                    assert_eq!((&*key, &*value), (key_wanted, value_wanted))
                }
                Err(error) => panic!("{error}"),
                Ok(_) => panic!("{key_wanted} fits"),
            }
        }
        let metadata = metadata();
        check(metadata.u32("negative"), "negative", "-1");
        check(metadata.u32("large"), "large", "4294967296");
        check(metadata.u64("negative"), "negative", "-1");
        check(metadata.u32s("i32s"), "i32s", "-1");
        check(metadata.i32s("u64s"), "u64s", "1099511627776");
        check(metadata.f32("f64 large"), "f64 large", &1e300.to_string());
        check(metadata.f32s("f64s large"), "f64s large", &(-1e300).to_string());
    }

    #[test]
    fn a_missing_key_is_an_error_with_its_name_and_an_optional_one_is_none() {
        fn check<T>(read: Result<T, Error>, optional: Result<Option<T>, Error>) {
            assert!(matches!(read, Err(Error::MissingKey { key }) if key == "gone"));
            assert!(matches!(optional, Ok(None)));
        }
        let metadata = metadata();
        check(metadata.u32("gone"), metadata.opt_u32("gone"));
        check(metadata.u64("gone"), metadata.opt_u64("gone"));
        check(metadata.f32("gone"), metadata.opt_f32("gone"));
        check(metadata.bool("gone"), metadata.opt_bool("gone"));
        check(metadata.str("gone"), metadata.opt_str("gone"));
        check(metadata.strings("gone"), metadata.opt_strings("gone"));
        check(metadata.i32s("gone"), metadata.opt_i32s("gone"));
        check(metadata.u32s("gone"), metadata.opt_u32s("gone"));
        check(metadata.f32s("gone"), metadata.opt_f32s("gone"));
    }

    #[test]
    fn another_type_is_an_error_also_for_optional_keys() {
        fn check<T>(read: Result<Option<T>, Error>, got_wanted: &str) {
            match read {
                Err(Error::KeyType { got, .. }) => assert_eq!(got, got_wanted),
                Err(error) => panic!("{error}"),
                Ok(_) => panic!("{got_wanted} is taken for another type"),
            }
        }
        let metadata = metadata();
        check(metadata.opt_u32("f32"), "f32");
        check(metadata.opt_u64("string"), "a string");
        check(metadata.opt_f32("u8"), "u8");
        check(metadata.opt_bool("u8"), "u8");
        check(metadata.opt_str("strings"), "an array of strings");
        check(metadata.opt_strings("string"), "a string");
        check(metadata.opt_i32s("f32s"), "an array of f32");
        check(metadata.opt_u32s("u8"), "u8");
        check(metadata.opt_f32s("i32s"), "an array of i32");
    }
}
