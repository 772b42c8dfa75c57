//! The header of one safetensors file: a length, and JSON that lists the tensors.

use std::fmt;

use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::table::Entry;
use crate::view::tensor_bytes;
use crate::{DType, Error};

/// What the safetensors crate reads; the headers of the largest models are a tenth of it.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Twice what any known model has.
const DIMENSIONS_MAX: usize = 8;

/// Reads one file's header and adds the tensors it lists to `entries`, as lying in file number `file`.
///
/// The header is read into the safetensors crate's own types and the crate has the last word on them. Its reader is
/// not used: that buffers a hostile header at more than ten times its size, keeps the last of two tensors with one
/// name, and does not say which values are wrong.
pub(super) fn parse(bytes: &[u8], file: u32, entries: &mut Vec<Entry>) -> Result<(), Error> {
    let Some((len, rest)) = bytes.split_first_chunk() else {
        return Err(Error::Truncated { what: "the header's length", at: 0, need: 8, left: bytes.len() });
    };
    let (len, most) = (u64::from_le_bytes(*len), HEADER_BYTES_MAX.min(rest.len() as u64));
    if len > most {
        return Err(Error::HeaderLength { len, most });
    }
    let (header, data) = rest.split_at(len as usize);
    let Header(mut tensors) = serde_json::from_slice(header).map_err(Error::Json)?;
    // First of all, because whatever else is wrong may be wrong with one of the two only.
    tensors.sort_unstable_by(|(first, _), (second, _)| first.cmp(second));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::DuplicateTensor { tensor: pair[0].0.clone() });
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);

    let data_begin = bytes.len() - data.len();
    let (mut last, mut last_end) = ("", 0);
    entries.reserve_exact(tensors.len());
    for (name, info) in &tensors {
        let entry = entry(name, info, data.len())?;
        let (begin, end) = info.data_offsets;
        if begin > last_end {
            return Err(Error::Hole { begin: last_end, end: begin });
        }
        if begin < last_end {
            let (first, second) = (last.to_owned(), name.clone());
            return Err(Error::Overlap {
                first,
                second,
                end: data_begin + last_end,
                begin: data_begin + begin,
            });
        }
        (last, last_end) = (name, end);
        entries.push(Entry { file, begin: data_begin + begin, ..entry });
    }
    if last_end < data.len() {
        return Err(Error::Hole { begin: last_end, end: data.len() });
    }
    let tensors = tensors.into_iter().map(|(name, info)| (name, info.into())).collect();
    Metadata::new(None, tensors).map_err(Error::Safetensors)?;
    Ok(())
}

/// Checks one tensor on its own, in a data section of `data` bytes.
fn entry(name: &str, info: &Info, data: usize) -> Result<Entry, Error> {
    let tensor = || name.to_owned();
    let (begin, end) = info.data_offsets;
    let dtype = dtype(name, info.dtype)?;
    let Shape { dims, found } = &info.shape;
    if *found > DIMENSIONS_MAX {
        return Err(Error::Dimensions { tensor: tensor(), found: *found as u64, most: DIMENSIONS_MAX });
    }
    let Some(len) = end.checked_sub(begin) else {
        return Err(Error::Backwards { tensor: tensor(), begin, end });
    };
    let want = tensor_bytes(name, dtype, dims)?;
    if want != len {
        return Err(Error::TensorSize { tensor: tensor(), dtype, shape: dims.clone(), want, got: len });
    }
    if end > data {
        let (offset, need, data) = (begin as u64, len as u64, data as u64);
        return Err(Error::OutOfFile { tensor: tensor(), offset, need, data });
    }
    Ok(Entry { name: name.into(), dtype, shape: dims.as_slice().into(), file: 0, begin, len })
}

fn dtype(tensor: &str, dtype: Dtype) -> Result<DType, Error> {
    Ok(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::F4 => DType::F4,
        Dtype::F6_E2M3 => DType::F6_E2M3,
        Dtype::F6_E3M2 => DType::F6_E3M2,
        Dtype::U8 => DType::U8,
        Dtype::I8 => DType::I8,
        Dtype::F8_E5M2 => DType::F8_E5M2,
        Dtype::F8_E4M3 => DType::F8_E4M3,
        Dtype::F8_E8M0 => DType::F8_E8M0,
        Dtype::F8_E4M3FNUZ => DType::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ => DType::F8_E5M2FNUZ,
        Dtype::I16 => DType::I16,
        Dtype::U16 => DType::U16,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I32 => DType::I32,
        Dtype::U32 => DType::U32,
        Dtype::F32 => DType::F32,
        Dtype::C64 => DType::C64,
        Dtype::F64 => DType::F64,
        Dtype::I64 => DType::I64,
        Dtype::U64 => DType::U64,
        _ => return Err(Error::TensorTypeName { tensor: tensor.to_owned(), name: dtype.to_string() }),
    })
}

/// A header: tensors by name, in the order of the text, duplicates kept.
struct Header(Vec<(String, Info)>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a safetensors header")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                let mut notes_seen = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name != "__metadata__" {
                        tensors.push((name, map.next_value()?));
                    } else if notes_seen {
                        return Err(A::Error::duplicate_field("__metadata__"));
                    } else {
                        notes_seen = true;
                        map.next_value::<Option<Notes>>()?;
                    }
                }
                Ok(Header(tensors))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// The crate's `TensorInfo`, with a bound on the dimensions that are stored.
#[derive(Deserialize)]
struct Info {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (usize, usize),
}

impl From<Info> for TensorInfo {
    fn from(info: Info) -> TensorInfo {
        TensorInfo { dtype: info.dtype, shape: info.shape.dims, data_offsets: info.data_offsets }
    }
}

/// Dimensions, of which no more are stored than can be used.
struct Shape {
    dims: Vec<usize>,
    found: usize,
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Dims;
        impl<'de> Visitor<'de> for Dims {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = Vec::new();
                while let Some(dim) = seq.next_element()? {
                    dims.push(dim);
                    if dims.len() == DIMENSIONS_MAX {
                        break;
                    }
                }
                let mut found = dims.len();
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    found += 1;
                }
                Ok(Shape { dims, found })
            }
        }
        deserializer.deserialize_seq(Dims)
    }
}

/// The writer's own notes in a header (`__metadata__`): strings by name. They must be well-formed and say nothing
/// that is needed.
struct Notes;

impl<'de> Deserialize<'de> for Notes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Notes, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Notes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("strings by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Notes, A::Error> {
                while map.next_entry::<String, String>()?.is_some() {}
                Ok(Notes)
            }
        }
        deserializer.deserialize_map(Strings)
    }
}
