//! The header of a GGUF file that is being made: what this crate reads, written.

use crate::metadata::{Array, Value};
use crate::{DType, Error};

/// Where data begins, and every tensor in it, unless `general.alignment` says otherwise.
pub const ALIGNMENT: usize = 32;

/// A tensor of a file that is being made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Its name.
    pub name: String,
    /// Its type, one that GGUF has.
    pub dtype: DType,
    /// Slowest dimension first, as [`View::shape`](crate::View::shape).
    pub shape: Vec<usize>,
}

impl Planned {
    /// Its bytes; an error where the shape does not fill the type's blocks, or GGUF has no such type.
    pub fn bytes(&self) -> Result<usize, Error> {
        if self.dtype.ggml_id().is_none() {
            return Err(Error::TensorTypeName {
                tensor: self.name.clone(),
                name: self.dtype.name().to_owned(),
            });
        }
        crate::view::tensor_bytes(&self.name, self.dtype, &self.shape)
    }

    /// The same with what follows it up to the next tensor.
    pub fn padded_bytes(&self) -> Result<usize, Error> {
        Ok(self.bytes()?.next_multiple_of(ALIGNMENT))
    }
}

/// Everything in front of the data of a file, of version 3, whose tensors follow each other in this order.
pub fn header<'a>(
    metadata: impl ExactSizeIterator<Item = (&'a str, &'a Value)>,
    tensors: &[Planned],
) -> Result<Vec<u8>, Error> {
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        put_string(&mut out, key);
        out.extend(value_id(value).to_le_bytes());
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        put_string(&mut out, &tensor.name);
        let dimensions = u32::try_from(tensor.shape.len()).unwrap_or(u32::MAX);
        out.extend(dimensions.to_le_bytes());
        // Fastest dimension first.
        tensor.shape.iter().rev().for_each(|size| out.extend((*size as u64).to_le_bytes()));
        let padded = tensor.padded_bytes()? as u64;
        out.extend(tensor.dtype.ggml_id().unwrap_or(u32::MAX).to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += padded;
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
    Ok(out)
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// GGUF's number of a value's type.
fn value_id(value: &Value) -> u32 {
    match value {
        Value::U8(_) => 0,
        Value::I8(_) => 1,
        Value::U16(_) => 2,
        Value::I16(_) => 3,
        Value::U32(_) => 4,
        Value::I32(_) => 5,
        Value::F32(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::U64(_) => 10,
        Value::I64(_) => 11,
        Value::F64(_) => 12,
    }
}

/// The same of an array's elements.
fn element_id(array: &Array) -> u32 {
    match array {
        Array::U8(_) => 0,
        Array::I8(_) => 1,
        Array::U16(_) => 2,
        Array::I16(_) => 3,
        Array::U32(_) => 4,
        Array::I32(_) => 5,
        Array::F32(_) => 6,
        Array::Bool(_) => 7,
        Array::String(_) => 8,
        Array::Array(_) => 9,
        Array::U64(_) => 10,
        Array::I64(_) => 11,
        Array::F64(_) => 12,
    }
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(value) => out.push(*value),
        Value::I8(value) => out.extend(value.to_le_bytes()),
        Value::U16(value) => out.extend(value.to_le_bytes()),
        Value::I16(value) => out.extend(value.to_le_bytes()),
        Value::U32(value) => out.extend(value.to_le_bytes()),
        Value::I32(value) => out.extend(value.to_le_bytes()),
        Value::F32(value) => out.extend(value.to_le_bytes()),
        Value::Bool(value) => out.push(u8::from(*value)),
        Value::String(value) => put_string(out, value),
        Value::Array(array) => put_array(out, array),
        Value::U64(value) => out.extend(value.to_le_bytes()),
        Value::I64(value) => out.extend(value.to_le_bytes()),
        Value::F64(value) => out.extend(value.to_le_bytes()),
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    out.extend(element_id(array).to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        Array::U8(values) => out.extend(values),
        Array::I8(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::U16(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::I16(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::U32(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::I32(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::F32(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::Bool(values) => out.extend(values.iter().map(|&value| u8::from(value))),
        Array::String(values) => values.iter().for_each(|value| put_string(out, value)),
        Array::Array(values) => values.iter().for_each(|value| put_array(out, value)),
        Array::U64(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::I64(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
        Array::F64(values) => values.iter().for_each(|value| out.extend(value.to_le_bytes())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Gguf;

    #[test]
    fn what_is_written_is_read_again_as_it_was() {
        let pairs = [
            ("general.architecture", Value::String("llama".to_owned())),
            ("a.u8", Value::U8(200)),
            ("a.i8", Value::I8(-3)),
            ("a.u16", Value::U16(60_000)),
            ("a.i16", Value::I16(-300)),
            ("a.u32", Value::U32(7)),
            ("a.i32", Value::I32(-7)),
            ("a.f32", Value::F32(0.1)),
            ("a.bool", Value::Bool(true)),
            ("a.u64", Value::U64(1 << 40)),
            ("a.i64", Value::I64(-(1 << 40))),
            ("a.f64", Value::F64(0.1)),
            ("a.texts", Value::Array(Array::String(vec!["é".to_owned(), String::new()]))),
            ("a.nested", Value::Array(Array::Array(vec![Array::I32(vec![-1]), Array::Bool(vec![false])]))),
        ];
        let planned = |name: &str, dtype, shape: &[usize]| Planned {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
        };
        let tensors = [planned("m", DType::Q8_0, &[3, 64]), planned("v", DType::F32, &[5])];
        let mut file = header(pairs.iter().map(|(key, value)| (*key, value)), &tensors).unwrap();
        assert!(file.len().is_multiple_of(ALIGNMENT));
        for (fill, tensor) in (1u8..).zip(&tensors) {
            let (bytes, padded) = (tensor.bytes().unwrap(), tensor.padded_bytes().unwrap());
            file.extend(vec![fill; bytes]);
            file.extend(vec![0; padded - bytes]);
        }
        let gguf = Gguf::from_bytes(vec![file]).unwrap();
        let read: Vec<_> = gguf.metadata().iter().collect();
        assert_eq!(read, pairs.iter().map(|(key, value)| (*key, value)).collect::<Vec<_>>());
        for (fill, tensor) in (1u8..).zip(&tensors) {
            let view = gguf.tensor(&tensor.name).unwrap();
            assert_eq!((view.dtype, &view.shape), (tensor.dtype, &tensor.shape));
            assert!(view.bytes.iter().all(|byte| *byte == fill));
        }
        assert!(planned("r", DType::Q8_0, &[3, 65]).bytes().is_err(), "rows of whole blocks");
        assert!(planned("x", DType::GPTQ_4, &[8, 8]).bytes().is_err(), "no type of GGUF");
    }
}
