//! Whatever a writer writes is read back, and no change of its bytes makes a reader panic.

use std::path::Path;

use fornax_format::{Array, DType, Error, Gguf, Safetensors, Value};
use proptest::collection::vec;
use proptest::prelude::*;
use safetensors::SafeTensors;

/// A model to write: what a reader must give back.
#[derive(Clone, Debug)]
struct Model {
    version: u32,
    alignment: Option<u32>,
    pairs: Vec<Value>,
    tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    fill: u8,
}

impl Tensor {
    fn bytes(&self) -> Vec<u8> {
        let values: usize = self.shape.iter().product();
        let len = values / self.dtype.block_values() * self.dtype.block_bytes();
        (0..len).map(|at| self.fill.wrapping_add(at as u8)).collect()
    }
}

impl Model {
    /// The writer: the GGUF specification's tables in their order, nothing shared with the reader.
    fn write(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.pairs.len() as u64 + u64::from(self.alignment.is_some())).to_le_bytes());
        if let Some(alignment) = self.alignment {
            write_string(&mut file, "general.alignment");
            write_value(&mut file, &Value::U32(alignment));
        }
        for (number, value) in self.pairs.iter().enumerate() {
            write_string(&mut file, &format!("key.{number}"));
            write_value(&mut file, value);
        }
        let alignment = self.alignment.unwrap_or(32) as usize;
        let mut offset = 0;
        for (number, tensor) in self.tensors.iter().enumerate() {
            write_string(&mut file, &format!("tensor.{number}"));
            file.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dim in tensor.shape.iter().rev() {
                file.extend((dim as u64).to_le_bytes());
            }
            file.extend(tensor.dtype.ggml_id().expect("only such types are generated").to_le_bytes());
            file.extend((offset as u64).to_le_bytes());
            offset = (offset + tensor.bytes().len()).next_multiple_of(alignment);
        }
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(alignment), 0);
            file.extend(tensor.bytes());
        }
        file
    }
}

fn write_string(file: &mut Vec<u8>, text: &str) {
    file.extend((text.len() as u64).to_le_bytes());
    file.extend(text.as_bytes());
}

fn write_value(file: &mut Vec<u8>, value: &Value) {
    let mut number = |id: u32, bytes: &[u8]| {
        file.extend(id.to_le_bytes());
        file.extend(bytes);
    };
    match value {
        Value::U8(n) => number(0, &n.to_le_bytes()),
        Value::I8(n) => number(1, &n.to_le_bytes()),
        Value::U16(n) => number(2, &n.to_le_bytes()),
        Value::I16(n) => number(3, &n.to_le_bytes()),
        Value::U32(n) => number(4, &n.to_le_bytes()),
        Value::I32(n) => number(5, &n.to_le_bytes()),
        Value::F32(n) => number(6, &n.to_le_bytes()),
        Value::Bool(b) => number(7, &[u8::from(*b)]),
        Value::String(text) => {
            number(8, &[]);
            write_string(file, text);
        }
        Value::Array(array) => {
            number(9, &[]);
            write_array(file, array);
        }
        Value::U64(n) => number(10, &n.to_le_bytes()),
        Value::I64(n) => number(11, &n.to_le_bytes()),
        Value::F64(n) => number(12, &n.to_le_bytes()),
    }
}

fn write_array(file: &mut Vec<u8>, array: &Array) {
    fn all<T>(file: &mut Vec<u8>, id: u32, elements: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
        file.extend(id.to_le_bytes());
        file.extend((elements.len() as u64).to_le_bytes());
        elements.iter().for_each(|element| write(file, element));
    }
    match array {
        Array::U8(ns) => all(file, 0, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::I8(ns) => all(file, 1, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::U16(ns) => all(file, 2, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::I16(ns) => all(file, 3, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::U32(ns) => all(file, 4, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::I32(ns) => all(file, 5, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::F32(ns) => all(file, 6, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::Bool(bs) => all(file, 7, bs, |file, b| file.push(u8::from(*b))),
        Array::String(texts) => all(file, 8, texts, |file, text| write_string(file, text)),
        Array::Array(arrays) => all(file, 9, arrays, write_array),
        Array::U64(ns) => all(file, 10, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::I64(ns) => all(file, 11, ns, |file, n| file.extend(n.to_le_bytes())),
        Array::F64(ns) => all(file, 12, ns, |file, n| file.extend(n.to_le_bytes())),
    }
}

fn arrays() -> impl Strategy<Value = Array> {
    let flat = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(Array::U8),
        vec(any::<i8>(), 0..9).prop_map(Array::I8),
        vec(any::<u16>(), 0..9).prop_map(Array::U16),
        vec(any::<i16>(), 0..9).prop_map(Array::I16),
        vec(any::<u32>(), 0..9).prop_map(Array::U32),
        vec(any::<i32>(), 0..9).prop_map(Array::I32),
        vec(any::<f32>(), 0..9).prop_map(Array::F32),
        vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        vec(".{0,6}", 0..9).prop_map(Array::String),
        vec(any::<u64>(), 0..9).prop_map(Array::U64),
        vec(any::<i64>(), 0..9).prop_map(Array::I64),
        vec(any::<f64>(), 0..9).prop_map(Array::F64),
    ];
    // Three levels around the flat one: the deepest that is read.
    flat.prop_recursive(3, 12, 3, |inner| vec(inner, 0..3).prop_map(Array::Array))
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".{0,12}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
        arrays().prop_map(Value::Array),
    ]
}

fn tensors() -> impl Strategy<Value = Tensor> {
    let dtypes: Vec<_> = DType::all().filter(|dtype| dtype.ggml_id().is_some()).collect();
    let dtype = proptest::sample::select(dtypes);
    (dtype, vec(0usize..4, 0..=4), any::<u8>()).prop_map(|(dtype, mut shape, fill)| {
        match shape.last_mut() {
            Some(row) => *row *= dtype.block_values(),
            None if dtype.block_values() > 1 => shape.push(dtype.block_values()),
            None => {}
        }
        Tensor { dtype, shape, fill }
    })
}

fn models() -> impl Strategy<Value = Model> {
    let alignment = proptest::option::of((0u32..13).prop_map(|power| 1 << power));
    (2u32..=3, alignment, vec(values(), 0..6), vec(tensors(), 0..6))
        .prop_map(|(version, alignment, pairs, tensors)| Model { version, alignment, pairs, tensors })
}

/// A change of some bytes, as damage or malice make it. Places are fractions of the file, in 2^-32.
#[derive(Clone, Debug)]
enum Edit {
    Byte(u32, u8),
    Number(u32, u64),
    Cut(u32),
    Insert(u32, Vec<u8>),
    Copy(u32, u32, usize),
}

impl Edit {
    fn apply(&self, file: &mut Vec<u8>) {
        let len = file.len();
        let at = |place: u32| ((u64::from(place) * len as u64) >> 32) as usize;
        match self {
            Edit::Byte(place, byte) => {
                if let Some(target) = file.get_mut(at(*place)) {
                    *target = *byte;
                }
            }
            Edit::Number(place, number) => {
                if let Some(target) = file[at(*place)..].first_chunk_mut() {
                    *target = number.to_le_bytes();
                }
            }
            Edit::Cut(place) => file.truncate(at(*place)),
            Edit::Insert(place, bytes) => drop(file.splice(at(*place)..at(*place), bytes.iter().copied())),
            Edit::Copy(from, to, count) => {
                let part = file[at(*from)..len.min(at(*from) + count)].to_vec();
                let to = at(*to);
                let end = len.min(to + part.len());
                file[to..end].copy_from_slice(&part[..end - to]);
            }
        }
    }
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let place = any::<u32>;
    let number = prop_oneof![
        any::<u64>(),
        0u64..64,
        (0u32..64).prop_map(|power| 1 << power),
        (0u32..64).prop_map(|power| (1u64 << power).wrapping_neg()),
    ];
    let edit = prop_oneof![
        4 => (place(), any::<u8>()).prop_map(|(place, byte)| Edit::Byte(place, byte)),
        4 => (place(), number).prop_map(|(place, number)| Edit::Number(place, number)),
        1 => place().prop_map(Edit::Cut),
        1 => (place(), vec(any::<u8>(), 1..9)).prop_map(|(place, bytes)| Edit::Insert(place, bytes)),
        1 => (place(), place(), 1usize..64).prop_map(|(from, to, count)| Edit::Copy(from, to, count)),
    ];
    vec(edit, 1..5)
}

/// Reads every view to its end; the sum keeps the reads.
fn read_all<'a>(views: impl Iterator<Item = fornax_format::View<'a>>) -> u64 {
    views.map(|view| view.bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>() + view.values() as u64).sum()
}

fn valid(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/valid").join(name))
        .expect("the file is committed")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_written_is_read_back(model in models()) {
        let gguf = Gguf::from_bytes(vec![model.write()]).unwrap();
        prop_assert_eq!(gguf.version(), model.version);
        for (number, value) in model.pairs.iter().enumerate() {
            // NaN is not equal to itself, but its text is.
            let got = gguf.metadata().get(&format!("key.{number}"));
            prop_assert_eq!(format!("{got:?}"), format!("{:?}", Some(value)));
        }
        prop_assert_eq!(gguf.tensors().count(), model.tensors.len());
        for (number, tensor) in model.tensors.iter().enumerate() {
            let view = gguf.tensor(&format!("tensor.{number}")).unwrap();
            prop_assert_eq!(view.dtype, tensor.dtype);
            prop_assert_eq!(&view.shape, &tensor.shape);
            prop_assert_eq!(view.bytes, tensor.bytes());
        }
    }

    #[test]
    fn an_edited_gguf_file_is_read_or_refused(model in models(), edits in edits()) {
        let mut file = model.write();
        edits.iter().for_each(|edit| edit.apply(&mut file));
        if let Ok(gguf) = Gguf::from_bytes(vec![file]) {
            read_all(gguf.tensors());
        }
    }

    #[test]
    fn edited_shards_are_read_or_refused(edits in edits(), shard in 0usize..3) {
        let mut shards: Vec<_> = (1..=3).map(|number| valid(&format!("split-0000{number}-of-00003.gguf"))).collect();
        edits.iter().for_each(|edit| edit.apply(&mut shards[shard]));
        if let Ok(gguf) = Gguf::from_bytes(shards) {
            read_all(gguf.tensors());
        }
    }

    /// The safetensors crate is the reference: what we accept it accepts too, with the same tensors. The other way
    /// round there are more rules here: no name twice, few dimensions, rows of whole blocks, no overflow beside a zero.
    #[test]
    fn an_edited_safetensors_file_is_read_as_the_reference_reads_it_or_refused(edits in edits()) {
        let mut file = valid("single.safetensors");
        edits.iter().for_each(|edit| edit.apply(&mut file));
        match (Safetensors::from_bytes(file.clone()), SafeTensors::deserialize(&file)) {
            (Ok(ours), Ok(reference)) => {
                prop_assert_eq!(ours.tensors().count(), reference.len());
                for (name, tensor) in reference.iter() {
                    let view = ours.tensor(name).unwrap();
                    prop_assert_eq!(view.dtype.name(), tensor.dtype().to_string());
                    prop_assert_eq!(&view.shape, tensor.shape());
                    prop_assert_eq!(view.bytes, tensor.data());
                }
            }
            (Ok(_), Err(error)) => prop_assert!(false, "accepted, but {error}"),
            (Err(error), Ok(_)) => {
                let stricter = matches!(
                    error.fault(),
                    Error::DuplicateTensor { .. }
                        | Error::Dimensions { .. }
                        | Error::RaggedRow { .. }
                        | Error::TensorOverflow { .. }
                );
                prop_assert!(stricter, "refused: {error}");
            }
            (Err(_), Err(_)) => {}
        }
    }
}
