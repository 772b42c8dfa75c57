//! GGUF files, one or split into shards.

use std::path::{Path, PathBuf};

use crate::map::Map;
use crate::metadata::Metadata;
use crate::table::Table;
use crate::{Error, View};

mod header;

use header::Header;

/// An open model in GGUF, versions 2 and 3.
#[derive(Debug)]
pub struct Gguf {
    version: u32,
    metadata: Metadata,
    table: Table,
    maps: Vec<Map>,
    paths: Vec<PathBuf>,
    beside: Vec<Gguf>,
}

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

    /// Takes a file that belongs to the model beside its own, with metadata and tensors of its own: what reads images,
    /// say.
    pub fn add(&mut self, path: &Path) -> Result<(), Error> {
        self.beside.push(Gguf::open(path)?);
        Ok(())
    }

    /// The files that belong to the model beside its own.
    pub fn beside(&self) -> &[Gguf] {
        &self.beside
    }

    /// Whether a file's name says that it belongs beside a model: what reads its images, as llama.cpp names it.
    pub(crate) fn is_beside(path: &Path) -> bool {
        path.file_name().is_some_and(|name| name.to_string_lossy().to_lowercase().contains("mmproj"))
    }

    /// Whether a file's name says that it is a shard other than the first.
    pub(crate) fn is_further_shard(path: &Path) -> bool {
        ShardName::of(path).is_some_and(|name| name.number != 1)
    }

    /// Whether `bytes`, which begin a file, hold all that stands in front of its data.
    pub fn has_header(bytes: &[u8]) -> Result<bool, Error> {
        match Header::parse(bytes, 0, &mut Vec::new()) {
            Ok(_) | Err(Error::OutOfFile { .. }) => Ok(true),
            // A count of more than is there is that of a file that goes on.
            Err(Error::Truncated { .. } | Error::Count { .. }) => Ok(false),
            Err(error) => Err(error),
        }
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
        Ok(Gguf {
            version: header.version,
            metadata: header.metadata,
            table,
            maps,
            paths,
            beside: Vec::new(),
        })
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
