//! safetensors files, one or several with an index.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::map::Map;
use crate::packing::{Assembly, Quantization};
use crate::table::Table;
use crate::{DType, Error, Packing, View};

mod header;
mod index;

use index::Index;

/// The open weights of a model in safetensors.
#[derive(Debug)]
pub struct Safetensors {
    table: Table,
    maps: Vec<Map>,
    paths: Vec<PathBuf>,
    /// Matrices that are made of several tensors, by name, and how.
    packed: Option<Packed>,
    /// The type that float matrices are to be brought into when they are loaded.
    quantize: Option<DType>,
    /// Whether weights in 8-bit floats meet activations in 8-bit floats.
    floats8: bool,
}

/// What a quantised model's tensors are.
#[derive(Debug)]
struct Packed {
    quantization: Quantization,
    /// Ordered by name.
    assemblies: Vec<Assembly>,
    /// Tensors that are part of an assembly, or of no use.
    hidden: HashSet<Box<str>>,
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

    /// Adds the tensors of another file, with this before their names.
    pub(crate) fn add(&mut self, path: &Path, beginning: &str) -> Result<(), Error> {
        let map = Map::open(path)?;
        let mut entries = Vec::new();
        let file = u32::try_from(self.maps.len()).expect("an index has fewer files");
        header::parse(&map, file, &mut entries).map_err(|error| error.at(path))?;
        entries.iter_mut().for_each(|entry| entry.name = format!("{beginning}{}", entry.name).into());
        self.table.add(entries).map_err(|error| error.at(path))?;
        self.paths.push(path.to_path_buf());
        self.maps.push(map);
        Ok(())
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
        if let Some(packed) = &self.packed {
            if let Ok(at) = packed.assemblies.binary_search_by_key(&name, |assembly| &*assembly.name) {
                return Some(self.assembled(packed, &packed.assemblies[at]));
            }
            if packed.hidden.contains(name) {
                return None;
            }
        }
        self.table.view(name, &self.maps).map(|view| self.landing(view))
    }

    /// All tensors in file order; then the matrices that are made of several.
    pub fn tensors(&self) -> impl Iterator<Item = View<'_>> {
        let hidden = |view: &View<'_>| self.packed.as_ref().is_some_and(|all| all.hidden.contains(view.name));
        let plain = self.table.views(&self.maps).filter(move |view| !hidden(view));
        let packed = self.packed.iter().flat_map(move |packed| {
            packed.assemblies.iter().map(move |assembly| self.assembled(packed, assembly))
        });
        plain.map(|view| self.landing(view)).chain(packed)
    }

    /// Reads matrices as `config.json` says they were quantised.
    pub(crate) fn read_as(&mut self, quantization: Quantization) -> Result<(), Error> {
        let mut packed = Packed { quantization, assemblies: Vec::new(), hidden: HashSet::new() };
        for view in self.table.views(&self.maps) {
            let has = |name: &str| self.table.find(name).is_some();
            if packed.quantization.skips(view.name) {
                packed.hidden.insert(view.name.into());
            } else if let Some(assembly) = packed.quantization.assembly(view.name, view.dtype, has)? {
                packed.hidden.extend(assembly.tensors().cloned());
                self.try_assembled(&packed.quantization, &assembly)?;
                packed.assemblies.push(assembly);
            }
        }
        packed.assemblies.sort_by(|a, b| a.name.cmp(&b.name));
        self.packed = Some(packed);
        Ok(())
    }

    /// Brings float matrices into this type when they are loaded.
    pub(crate) fn quantize(&mut self, dtype: DType) {
        self.quantize = Some(dtype);
    }

    /// Multiplies weights in 8-bit floats with activations in 8-bit floats; whether there are any.
    pub(crate) fn multiply_floats8(&mut self) -> bool {
        self.floats8 = true;
        self.tensors().any(|view| view.lands == Some(DType::FP8_A8))
    }

    /// Whether a matrix is multiplied with 8-bit floats. Whole runs of its columns share a scale. Of what the file has in
    /// other floats it is a layer's own: heads, and tables that are looked up, stay more exact, and so do experts.
    fn takes_floats8(&self, view: &View<'_>, columns: usize) -> bool {
        let whole = columns > 0 && columns.is_multiple_of(DType::FP8_A8.block_values());
        whole
            && !view.name.contains(".experts.")
            // Of latent attention: there the product is head by head, which has kernels for wide activations alone.
            && !view.name.ends_with(".kv_b_proj.weight")
            && match view.packing.as_deref() {
                Some(Packing::Float8 { block: (_, across), .. }) => {
                    across.is_multiple_of(DType::FP8_A8.block_values()) || *across >= columns
                }
                Some(_) => false,
                None => of_layer(view) && self.quantize == Some(DType::MXFP8),
            }
    }

    /// Marks a matrix that is to be quantised. What chooses experts stays as it is: it is small, and a wrong choice is
    /// no small error.
    fn landing<'a>(&self, mut view: View<'a>) -> View<'a> {
        const ROUTERS: [&str; 3] = [".gate.weight", ".router.weight", ".shared_expert_gate.weight"];
        let float = matches!(view.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F8_E4M3);
        let [_, columns] = view.shape[..] else { return view };
        if !float || ROUTERS.iter().any(|end| view.name.ends_with(end)) {
            return view;
        }
        if self.floats8 && self.takes_floats8(&view, columns) {
            view.lands = Some(DType::FP8_A8);
            return view;
        }
        // A head of 8-bit floats costs more than all layers of them.
        let head = self.floats8 && !of_layer(&view);
        // Rows that do not fill blocks of 256 take the next more precise type that they fill.
        view.lands = self.quantize.and_then(|dtype| {
            [if head && dtype == DType::MXFP8 { DType::Q8_0 } else { dtype }, DType::Q8_0]
                .into_iter()
                .find(|dtype| columns.is_multiple_of(dtype.block_values()))
        });
        view
    }

    fn assembled<'a>(&'a self, packed: &Packed, assembly: &'a Assembly) -> View<'a> {
        let view =
            self.try_assembled(&packed.quantization, assembly).expect("checked when the file was opened");
        self.landing(view)
    }

    fn try_assembled<'a>(
        &'a self,
        quantization: &Quantization,
        assembly: &'a Assembly,
    ) -> Result<View<'a>, Error> {
        quantization.view(assembly, |name| self.table.view(name, &self.maps))
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
        Ok(Safetensors { table, maps, paths, packed: None, quantize: None, floats8: false })
    }
}

/// Whether a matrix is one of a layer's: heads and embeddings have no number in their names.
fn of_layer(view: &View<'_>) -> bool {
    view.name.split('.').any(|part| part.parse::<u32>().is_ok())
}

/// Weights in formats that are not read, for the error that says so.
fn other_weights(directory: &Path) -> String {
    let known = ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth", "tf_model.h5"];
    known.into_iter().find(|name| directory.join(name).exists()).unwrap_or("nothing").to_owned()
}
