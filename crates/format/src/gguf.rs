//! GGUF files, one or split into shards.

use std::path::{Path, PathBuf};

use crate::map::Map;
use crate::metadata::Metadata;
use crate::reader::Reader;
use crate::table::{Entry, Table};
use crate::view::tensor_bytes;
use crate::{DType, Error, View};

/// An open model in GGUF, versions 2 and 3.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    table: Table,
    maps: Vec<Map>,
    paths: Vec<PathBuf>,
}

/// What ggml allows, and so every file that ggml wrote.
const DIMENSIONS_MAX: usize = 4;

/// Shards are numbered with 16 bits.
const SHARDS_MAX: u64 = u16::MAX as u64;

impl Gguf {
    /// Maps the file at `path` and, when it is the first shard of a split, all others beside it.
    pub fn open(path: &Path) -> Result<Gguf, Error> {
        Gguf::assemble(Map::open(path)?, |number, count| {
            let name = ShardName::of(path).filter(|name| name.number == 1 && name.count == count);
            let sibling = name.ok_or(Error::ShardName { count })?.sibling(path, number);
            match Map::open(&sibling) {
                Err(error) if matches!(error.fault(), Error::NotFound) => {
                    Err(Error::ShardMissing { number, count }.at(&sibling))
                }
                opened => opened,
            }
        })
    }

    /// Whether a file's name says that it is a shard other than the first.
    pub(crate) fn is_further_shard(path: &Path) -> bool {
        ShardName::of(path).is_some_and(|name| name.number != 1)
    }

    /// Reads a model from memory: the bytes of its file, or of its shards in order.
    pub fn from_bytes(shards: Vec<Vec<u8>>) -> Result<Gguf, Error> {
        let named = |number: u64| PathBuf::from(format!("memory-{number:05}"));
        let mut maps = (1..).zip(shards).map(|(number, bytes)| Map::from_bytes(&named(number), bytes));
        let first = maps.next().unwrap_or_else(|| Map::from_bytes(&named(1), Vec::new()));
        Gguf::assemble(first, |number, count| {
            maps.next().ok_or_else(|| Error::ShardMissing { number, count }.at(&named(number)))
        })
    }

    /// Reads the first file, then asks `open` for every further shard that it speaks of, by number from 2 and count.
    fn assemble(first: Map, mut open: impl FnMut(u64, u64) -> Result<Map, Error>) -> Result<Gguf, Error> {
        let mut entries = Vec::new();
        let header = Header::parse(&first, 0, &mut entries).map_err(|error| error.at(first.path()))?;
        let shards = header.shards().and_then(|shards| {
            if shards.number != 1 {
                let name = ShardName::of(first.path());
                let first = name.map_or_else(
                    || format!("the one that ends in -00001-of-{:05}.gguf", shards.count),
                    |name| name.sibling(first.path(), 1).display().to_string(),
                );
                return Err(Error::NotFirstShard { number: shards.number, count: shards.count, first });
            }
            Ok(shards)
        });
        let shards = shards.map_err(|error| error.at(first.path()))?;

        let mut maps = vec![first];
        for number in 2..=shards.count {
            let map = open(number, shards.count).map_err(|error| error.at(maps[0].path()))?;
            // At most SHARDS_MAX, so the position fits.
            let position = maps.len() as u32;
            let shard = Header::parse(&map, position, &mut entries).and_then(|header| header.shards());
            let found = shard.map_err(|error| error.at(map.path()))?;
            if (found.number, found.count) != (number, shards.count) {
                let (count, found_number, found_count) = (shards.count, found.number, found.count);
                return Err(Error::WrongShard { number, count, found_number, found_count }.at(map.path()));
            }
            maps.push(map);
        }
        let found = entries.len() as u64;
        if let Some(want) = shards.tensors.filter(|&want| want != found) {
            return Err(Error::ShardTensors { want, found }.at(maps[0].path()));
        }
        let table = Table::new(entries).map_err(|error| error.at(maps[0].path()))?;
        let paths = maps.iter().map(|map| map.path().to_path_buf()).collect();
        Ok(Gguf { version: header.version, metadata: header.metadata, table, maps, paths })
    }

    /// The version of the format: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The key-value pairs (of the first shard).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<View<'_>> {
        self.table.view(name, &self.maps)
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl Iterator<Item = View<'_>> {
        self.table.views(&self.maps)
    }

    /// The file, or the shards in order.
    pub fn files(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Size of all files together.
    pub fn file_bytes(&self) -> u64 {
        self.maps.iter().map(|map| map.len() as u64).sum()
    }

    /// Size of all tensors together.
    pub fn data_bytes(&self) -> u64 {
        self.table.bytes()
    }
}

/// What stands in front of one file's tensor data.
struct Header {
    version: u32,
    metadata: Metadata,
}

/// What a file says of the split that it belongs to; a whole model is shard 1 of 1.
struct Shards {
    /// Counted from one.
    number: u64,
    count: u64,
    /// Tensors of all shards together.
    tensors: Option<u64>,
}

impl Header {
    /// Reads the header in `bytes` and adds the tensors it lists to `entries`, as lying in file number `file`.
    fn parse(bytes: &[u8], file: u32, entries: &mut Vec<Entry>) -> Result<Header, Error> {
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

    fn shards(&self) -> Result<Shards, Error> {
        let metadata = &self.metadata;
        let Some(count) = metadata.opt_u64("split.count")? else {
            return Ok(Shards { number: 1, count: 1, tensors: None });
        };
        if !(1..=SHARDS_MAX).contains(&count) {
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

/// A file name like `model-00001-of-00004.gguf`, taken apart.
struct ShardName {
    prefix: String,
    number: u64,
    count: u64,
}

impl ShardName {
    fn of(path: &Path) -> Option<ShardName> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| (text.len() == 5).then(|| text.parse().ok()).flatten();
        Some(ShardName { prefix: prefix.to_owned(), number: digits(number)?, count: digits(count)? })
    }

    fn sibling(&self, path: &Path, number: u64) -> PathBuf {
        path.with_file_name(format!("{}-{number:05}-of-{:05}.gguf", self.prefix, self.count))
    }
}
