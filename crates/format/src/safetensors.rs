//! safetensors files, one or several with an index.

use std::path::{Path, PathBuf};

use crate::map::Map;
use crate::table::Table;
use crate::{Error, View};

mod header;
mod index;

use index::Index;

/// The open weights of a model in safetensors.
#[derive(Debug)]
pub struct Safetensors {
    table: Table,
    maps: Vec<Map>,
    paths: Vec<PathBuf>,
}

/// The name of a model's weights in one file.
pub(crate) const SINGLE: &str = "model.safetensors";
/// The name of the list of a model's weights in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

impl Safetensors {
    /// Maps one `.safetensors` file, or the weights in a directory: `model.safetensors`, else all shards that
    /// `model.safetensors.index.json` lists.
    pub fn open(path: &Path) -> Result<Safetensors, Error> {
        if !path.is_dir() {
            return Safetensors::assemble(vec![Map::open(path)?]);
        }
        let single = path.join(SINGLE);
        if single.exists() {
            return Safetensors::assemble(vec![Map::open(&single)?]);
        }
        let index = path.join(INDEX);
        if !index.exists() {
            return Err(Error::WeightsMissing { found: other_weights(path) }.at(path));
        }
        Safetensors::assemble_indexed(&Map::open(&index)?, |name, number, count| {
            let shard = path.join(name);
            match Map::open(&shard) {
                Err(error) if matches!(error.fault(), Error::NotFound) => {
                    Err(Error::ShardMissing { number, count }.at(&shard))
                }
                opened => opened,
            }
        })
    }

    /// Reads one file from memory.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Safetensors, Error> {
        Safetensors::assemble(vec![Map::from_bytes(Path::new(SINGLE), bytes)])
    }

    /// Reads an index and the shards it lists, by file name, from memory.
    pub fn from_shards(index: Vec<u8>, mut shards: Vec<(String, Vec<u8>)>) -> Result<Safetensors, Error> {
        Safetensors::assemble_indexed(&Map::from_bytes(Path::new(INDEX), index), |name, number, count| {
            let place = shards.iter().position(|(shard, _)| shard == name);
            let place = place.ok_or_else(|| Error::ShardMissing { number, count }.at(Path::new(name)))?;
            let (name, bytes) = shards.swap_remove(place);
            Ok(Map::from_bytes(Path::new(&name), bytes))
        })
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<View<'_>> {
        self.table.view(name, &self.maps)
    }

    /// All tensors in file order.
    pub fn tensors(&self) -> impl Iterator<Item = View<'_>> {
        self.table.views(&self.maps)
    }

    /// The file, or the shards in the order in which the index first names them.
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

    /// Reads all shards of an index, which `open` finds by name, number from 1, and count.
    fn assemble_indexed(
        index: &Map,
        mut open: impl FnMut(&str, u64, u64) -> Result<Map, Error>,
    ) -> Result<Safetensors, Error> {
        let Index { files, tensors } = Index::parse(index).map_err(|error| error.at(index.path()))?;
        let mut maps = Vec::new();
        for (number, name) in (1..).zip(&files) {
            maps.push(open(name, number, files.len() as u64)?);
        }
        let opened = Safetensors::assemble(maps)?;
        for (tensor, file) in tensors {
            if opened.table.find(&tensor).is_none_or(|entry| entry.file != file) {
                let shard = files[file as usize].clone();
                return Err(Error::NotInShard { tensor: tensor.into(), shard }.at(index.path()));
            }
        }
        Ok(opened)
    }

    fn assemble(maps: Vec<Map>) -> Result<Safetensors, Error> {
        let mut entries = Vec::new();
        for (file, map) in (0..).zip(&maps) {
            header::parse(map, file, &mut entries).map_err(|error| error.at(map.path()))?;
        }
        let last = maps.last().map_or(Path::new(INDEX), Map::path);
        let table = Table::new(entries).map_err(|error| error.at(last))?;
        let paths = maps.iter().map(|map| map.path().to_path_buf()).collect();
        Ok(Safetensors { table, maps, paths })
    }
}

/// Weights in formats that are not read, for the error that says so.
fn other_weights(directory: &Path) -> String {
    let known = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "tf_model.h5"];
    known.into_iter().find(|name| directory.join(name).exists()).unwrap_or("nothing").to_owned()
}
