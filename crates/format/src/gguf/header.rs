//! The part of a GGUF file in front of its data: versions, metadata and the list of tensors.

use crate::metadata::Metadata;
use crate::reader::Reader;
use crate::table::Entry;
use crate::view::tensor_bytes;
use crate::{DType, Error};

/// What stands in front of one file's tensor data.
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: Metadata,
}

/// What ggml allows, and so every file that ggml wrote.
const DIMENSIONS_MAX: usize = 4;

/// Shards are numbered with 16 bits.
const SHARDS_MAX: u64 = u16::MAX as u64;

/// What a file says of the split that it belongs to; a whole model is shard 1 of 1.
pub(super) struct Shards {
    /// Counted from one.
    pub(super) number: u64,
    pub(super) count: u64,
    /// Tensors of all shards together.
    pub(super) tensors: Option<u64>,
}

impl Header {
    /// Reads the header in `bytes` and adds the tensors it lists to `entries`, as lying in file number `file`.
    pub(super) fn parse(bytes: &[u8], file: u32, entries: &mut Vec<Entry>) -> Result<Header, Error> {
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("the magic")?;
        if &magic == b"FUGG" {
            return Err(Error::BigEndian { version: reader.u32("the version")? });
        }
        if &magic != b"GGUF" {
            return Err(Error::Magic { found: magic });
        }
        let version = reader.u32("the version")?;
        match version {
            2 | 3 => {}
            // Versions are small: the low half is empty only when the bytes are the wrong way round.
            _ if version & 0xffff == 0 && version != 0 => return Err(Error::BigEndian { version }),
            _ => return Err(Error::Version { version }),
        }
        // The shortest tensor: an empty name (8 bytes of length), no dimensions (4), a type (4) and an offset (8).
        let tensors = reader.count("the number of tensors", 24)?;
        let pairs = reader.u64("the number of metadata pairs")?;
        let metadata = Metadata::parse(&mut reader, pairs)?;
        let alignment = metadata.opt_u64("general.alignment")?.unwrap_or(32);
        if !alignment.is_power_of_two() {
            return Err(Error::Alignment { alignment });
        }

        let listed = entries.len();
        for _ in 0..tensors {
            entries.push(tensor(&mut reader, alignment, file)?);
        }
        // Only now is it known where the data begins. A file whose data would begin behind its end has no data.
        let data = (reader.at() as u64).checked_next_multiple_of(alignment);
        let data = data
            .and_then(|data| usize::try_from(data).ok())
            .map_or(bytes.len(), |data| data.min(bytes.len()));
        let room = bytes.len() - data;
        for entry in &mut entries[listed..] {
            let outside = entry.begin.checked_add(entry.len).is_none_or(|end| end > room);
            if outside {
                return Err(Error::OutOfFile {
                    tensor: entry.name.to_string(),
                    offset: entry.begin as u64,
                    need: entry.len as u64,
                    data: room as u64,
                });
            }
            entry.begin += data;
        }
        Ok(Header { version, metadata })
    }

    pub(super) fn shards(&self) -> Result<Shards, Error> {
        let metadata = &self.metadata;
        let count = metadata.opt_u64("split.count")?.unwrap_or(0);
        if count == 0 {
            // Also written by the tool that merges shards, which leaves the other keys as they were.
            return Ok(Shards { number: 1, count: 1, tensors: None });
        }
        if count > SHARDS_MAX {
            return Err(Error::ShardCount { count, most: SHARDS_MAX });
        }
        let number = metadata.u64("split.no")?.saturating_add(1);
        Ok(Shards { number, count, tensors: metadata.opt_u64("split.tensors.count")? })
    }
}

/// Reads one line of the list of tensors. Its `begin` is relative to the data section until that is known.
fn tensor(reader: &mut Reader<'_>, alignment: u64, file: u32) -> Result<Entry, Error> {
    let name = reader.str("a tensor's name")?;
    let rank = reader.u32("a tensor's number of dimensions")?;
    if rank as usize > DIMENSIONS_MAX {
        return Err(Error::Dimensions { tensor: name.to_owned(), found: rank.into(), most: DIMENSIONS_MAX });
    }
    // The file lists the fastest dimension first; a view has the slowest first. The bytes are the same.
    let mut shape = [0usize; DIMENSIONS_MAX];
    let shape = &mut shape[..rank as usize];
    for dim in shape.iter_mut().rev() {
        let listed = reader.u64("a tensor's dimension")?;
        *dim = usize::try_from(listed).unwrap_or(usize::MAX);
    }
    let id = reader.u32("a tensor's type")?;
    let dtype = DType::from_ggml(id).ok_or_else(|| Error::TensorType { tensor: name.to_owned(), id })?;
    let offset = reader.u64("a tensor's offset")?;
    let len = tensor_bytes(name, dtype, shape)?;
    if !offset.is_multiple_of(alignment) {
        return Err(Error::Misaligned { tensor: name.to_owned(), offset, alignment });
    }
    let begin = usize::try_from(offset).unwrap_or(usize::MAX);
    Ok(Entry { name: name.into(), dtype, shape: (&*shape).into(), file, begin, len })
}
