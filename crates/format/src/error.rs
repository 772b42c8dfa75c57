//! Every way in which a model file can be wrong.

use std::io;
use std::path::{Path, PathBuf};

use crate::DType;

/// Why a file is not a model that can be read. One line each, with the values that are wrong and, where something
/// can be done about it, what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Where the fault is: parsers see bytes, only the opener knows the path.
    #[error("{}: {fault}", path.display())]
    In {
        /// The file in which the fault was found.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        fault: Box<Error>,
    },

    // Quantised safetensors.
    /// `quantization_config` describes what is not read.
    #[error("config.json: quantization_config: {what} is not supported; docs/files.md lists what is")]
    Quantization {
        /// Method and detail.
        what: String,
    },
    /// A matrix without the scales or zero points that belong to it.
    #[error("tensor {tensor}: {wanted} is missing")]
    PackingMissing {
        /// The tensor with the values.
        tensor: String,
        /// What should be there.
        wanted: String,
    },
    /// A tensor of a quantised matrix that does not fit the others.
    #[error("tensor {tensor}: {dtype} {shape:?}, wanted {wanted}")]
    PackingShape {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
        /// Its shape.
        shape: Vec<usize>,
        /// What the other tensors ask for.
        wanted: String,
    },
    /// A tensor that fuses several matrices in a type whose rows lie mixed.
    #[error("tensor {tensor}: some rows of {dtype} cannot be taken out")]
    PackedRows {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
    },
    /// A file that is quantised already is to be quantised.
    #[error("quantising on load is for safetensors; a GGUF file is used as it is stored")]
    QuantizeGguf,
    /// Activations are to be 8-bit floats, and no weight is.
    #[error(
        "no weight of this model is multiplied with 8-bit floats: that takes 8-bit floats in safetensors, or float \
         matrices that are quantised to them (fp8), in rows of a multiple of 128 values"
    )]
    NoFloats8,

    // The file system.
    /// Nothing exists at the path.
    #[error("no such file or directory; check the path")]
    NotFound,
    /// The operating system refused to open, read or map it.
    #[error("cannot be read: {0}")]
    Io(#[source] io::Error),
    /// A device, pipe or directory where a file was expected.
    #[error("is not a regular file")]
    NotAFile,
    /// The directory holds nothing that Fornax can open.
    #[error(
        "the directory holds no model; expected one .gguf file, or config.json with model.safetensors or model.safetensors.index.json"
    )]
    NoModel,
    /// The directory holds several models and none is preferred.
    #[error("the directory holds {count} models; name one of them, for example {first}")]
    SeveralModels {
        /// How many.
        count: usize,
        /// The first by name.
        first: String,
    },
    /// Neither GGUF nor safetensors by its first bytes and its name.
    #[error("is neither GGUF nor safetensors (it starts with {found:02x?})")]
    NotAModel {
        /// Its first bytes, at most four.
        found: Vec<u8>,
    },
    /// A safetensors file without the configuration that says what its tensors mean.
    #[error("config.json is missing beside it; put the model's config.json into the same directory")]
    ConfigMissing,
    /// A Hugging Face directory whose weights are absent or in a format that is not read.
    #[error(
        "holds no safetensors weights (found instead: {found}); convert the weights to safetensors or fetch them again"
    )]
    WeightsMissing {
        /// Files that look like weights in other formats, or "nothing".
        found: String,
    },

    // GGUF: the fixed part.
    /// The first four bytes are not "GGUF".
    #[error("not a GGUF file: the first four bytes are {found:02x?}, not 47 47 55 46")]
    Magic {
        /// The bytes found.
        found: [u8; 4],
    },
    /// The file was written for a big-endian machine.
    #[error("a big-endian GGUF file (version field {version:#010x}); only little-endian files are read")]
    BigEndian {
        /// The version field as read.
        version: u32,
    },
    /// A version that is neither 2 nor 3.
    #[error(
        "GGUF version {version} is not supported, only 2 and 3; convert the model again with a current tool"
    )]
    Version {
        /// The version found.
        version: u32,
    },
    /// The file ends inside a field.
    #[error(
        "truncated: {what} needs {need} bytes at offset {at}, but only {left} are left; fetch the file again"
    )]
    Truncated {
        /// The field that was being read.
        what: &'static str,
        /// Offset of the field.
        at: usize,
        /// Bytes it needs.
        need: u64,
        /// Bytes that are left.
        left: usize,
    },
    /// A count that cannot be true: the file is too short for this many.
    #[error("{what} says {count}, but the {left} bytes left can hold at most {most}")]
    Count {
        /// What is counted.
        what: &'static str,
        /// The count found.
        count: u64,
        /// Bytes left in the file.
        left: usize,
        /// The largest count that these bytes could hold.
        most: usize,
    },
    /// A string that is not UTF-8.
    #[error("{what} at offset {at} is not UTF-8 (bad byte at {valid_up_to} of {len})")]
    Utf8 {
        /// What the string is.
        what: &'static str,
        /// Offset of its first byte.
        at: usize,
        /// Length in bytes.
        len: usize,
        /// How many of its bytes are good.
        valid_up_to: usize,
    },

    // GGUF: metadata.
    /// A metadata type id that GGUF does not define.
    #[error("metadata key {key:?} has unknown type id {id}")]
    ValueType {
        /// The key.
        key: String,
        /// The type id.
        id: u32,
    },
    /// A truth value that is neither 0 nor 1.
    #[error("a truth value at offset {at} is {found}, neither 0 nor 1")]
    Bool {
        /// Offset of the byte.
        at: usize,
        /// The byte found.
        found: u8,
    },
    /// Arrays inside arrays beyond any use.
    #[error("metadata key {key:?} nests arrays deeper than {most}")]
    Depth {
        /// The key.
        key: String,
        /// The deepest nesting that is read.
        most: usize,
    },
    /// A key that occurs twice: which one counts is anybody's guess.
    #[error("metadata key {key:?} occurs twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// A key that is needed and absent.
    #[error("metadata key {key:?} is missing; convert the model again with a current tool")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key that holds another type than its meaning demands.
    #[error("metadata key {key:?} should be {want}, but is {got}")]
    KeyType {
        /// The key.
        key: String,
        /// The type that is needed.
        want: &'static str,
        /// The type found.
        got: &'static str,
    },
    /// A key whose value does not fit what it is used as.
    #[error("metadata key {key:?} is {value}, which does not fit {want}")]
    KeyRange {
        /// The key.
        key: String,
        /// The value found.
        value: String,
        /// The range that is needed.
        want: &'static str,
    },
    /// `general.alignment` is zero or not a power of two.
    #[error("general.alignment is {alignment}, not a power of two")]
    Alignment {
        /// The value found.
        alignment: u64,
    },

    // Tensors of either container.
    /// A ggml type id that is unknown or was removed from ggml.
    #[error("tensor {tensor:?} has ggml type id {id}, which is unknown or was removed from ggml")]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The type id.
        id: u32,
    },
    /// A safetensors type that came with a newer version of the format.
    #[error("tensor {tensor:?} has the safetensors type {name}, which is unknown")]
    TensorTypeName {
        /// The tensor.
        tensor: String,
        /// The type's name.
        name: String,
    },
    /// A step behind the model that sentence-transformers takes and that is not computed.
    #[error(
        "modules.json names {module:?}, which is not computed; known are Transformer, Pooling and Normalize"
    )]
    Module {
        /// Its type.
        module: String,
    },
    /// More dimensions than any model uses.
    #[error("tensor {tensor:?} has {found} dimensions, more than {most}")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// Dimensions found.
        found: u64,
        /// Most that are read.
        most: usize,
    },
    /// The product of the dimensions, or its bytes, overflow.
    #[error("tensor {tensor:?} of shape {shape:?} ({dtype}) is larger than any memory")]
    TensorOverflow {
        /// The tensor.
        tensor: String,
        /// Its shape, slowest dimension first.
        shape: Vec<usize>,
        /// Its type.
        dtype: DType,
    },
    /// A row that does not fill whole blocks.
    #[error(
        "tensor {tensor:?} has rows of {row} values, not a multiple of the {block} values in a block of {dtype}"
    )]
    RaggedRow {
        /// The tensor.
        tensor: String,
        /// Values in one row.
        row: usize,
        /// Its type.
        dtype: DType,
        /// Values in one block of that type.
        block: usize,
    },
    /// An offset that the file's alignment forbids.
    #[error("tensor {tensor:?} starts at offset {offset}, not a multiple of the alignment {alignment}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Offset in the data section.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor that ends behind the end of the file.
    #[error(
        "tensor {tensor:?} needs {need} bytes at offset {offset} of the data section, which has only {data}; the file is truncated or corrupt, fetch it again"
    )]
    OutOfFile {
        /// The tensor.
        tensor: String,
        /// Offset in the data section.
        offset: u64,
        /// Bytes it needs.
        need: u64,
        /// Bytes of the data section.
        data: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors {first:?} and {second:?} overlap: one ends at byte {end}, the other begins at {begin}")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins inside it.
        second: String,
        /// Where the first ends, as an offset in the file.
        end: usize,
        /// Where the second begins, as an offset in the file.
        begin: usize,
    },
    /// Two tensors of one name.
    #[error("tensor {tensor:?} occurs twice")]
    DuplicateTensor {
        /// The name.
        tensor: String,
    },
    /// Bytes that are not what type and shape demand.
    #[error("tensor {tensor:?} of shape {shape:?} ({dtype}) is {want} bytes, but {got} are given")]
    TensorSize {
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: DType,
        /// Its shape, slowest dimension first.
        shape: Vec<usize>,
        /// Bytes that type and shape demand.
        want: usize,
        /// Bytes given.
        got: usize,
    },
    /// Rows that the tensor does not have.
    #[error("tensor {tensor:?} has {rows} rows; {begin}..{end} are not among them")]
    Rows {
        /// The tensor.
        tensor: String,
        /// Rows it has.
        rows: usize,
        /// First row wanted.
        begin: usize,
        /// Row behind the last wanted.
        end: usize,
    },

    // Models in several files.
    /// A shard other than the first was named.
    #[error("is shard {number} of {count}; open the first shard instead, {first}")]
    NotFirstShard {
        /// This shard, counted from one.
        number: u64,
        /// How many there are.
        count: u64,
        /// The first shard's name, as far as it can be told.
        first: String,
    },
    /// A shard whose name does not say where its siblings are.
    #[error(
        "is the first of {count} shards, but its name does not end in -00001-of-{count:05}.gguf; rename the shards back"
    )]
    ShardName {
        /// How many shards the file speaks of.
        count: u64,
    },
    /// A shard that should lie beside the first and does not.
    #[error("shard {number} of {count} is missing; fetch it again")]
    ShardMissing {
        /// The shard, counted from one.
        number: u64,
        /// How many there are.
        count: u64,
    },
    /// A file in the place of one shard that says it is another, or of another set.
    #[error(
        "should be shard {number} of {count}, but says that it is shard {found_number} of {found_count}; fetch it again"
    )]
    WrongShard {
        /// The shard that belongs here, counted from one.
        number: u64,
        /// How many there are.
        count: u64,
        /// The shard that the file says it is.
        found_number: u64,
        /// How many it says there are.
        found_count: u64,
    },
    /// The shards together do not hold as many tensors as they should.
    #[error("the shards hold {found} tensors together, but split.tensors.count says {want}")]
    ShardTensors {
        /// Tensors promised.
        want: u64,
        /// Tensors found.
        found: u64,
    },
    /// More shards than can be numbered.
    #[error("split.count says {count} shards, more than {most}")]
    ShardCount {
        /// The number found.
        count: u64,
        /// The most that are read.
        most: u64,
    },
    /// An index that points outside its directory.
    #[error(
        "names the shard {name:?}, which is not a plain file name; an index may name only files beside it"
    )]
    ShardPath {
        /// The name found.
        name: String,
    },
    /// A tensor that the index places into a shard that lacks it.
    #[error("says that tensor {tensor:?} is in {shard}, but it is not")]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard's file name.
        shard: String,
    },

    // safetensors and JSON.
    /// A header longer than the file or than any model needs.
    #[error(
        "the safetensors header says {len} bytes, more than {most}; the file is truncated or not safetensors"
    )]
    HeaderLength {
        /// The length found.
        len: u64,
        /// The most it could be.
        most: u64,
    },
    /// A tensor whose bytes end before they begin.
    #[error("tensor {tensor:?} ends at {end}, before it begins at {begin}")]
    Backwards {
        /// The tensor.
        tensor: String,
        /// First byte.
        begin: usize,
        /// Byte behind the last.
        end: usize,
    },
    /// Bytes that belong to no tensor: safetensors forbids them.
    #[error("bytes {begin}..{end} of the data section belong to no tensor")]
    Hole {
        /// First byte.
        begin: usize,
        /// Byte behind the last.
        end: usize,
    },
    /// A fault that the safetensors crate found and Fornax did not.
    #[error("is not valid safetensors: {0}")]
    Safetensors(#[source] safetensors::SafeTensorError),
    /// A document that is not the JSON it should be.
    #[error("is not the JSON expected here: {}", in_one_line(.0))]
    Json(#[source] serde_json::Error),
    /// A document longer than any model needs.
    #[error("is {len} bytes long; at most {most} are read of such a file")]
    TooLong {
        /// Its length.
        len: u64,
        /// The most that is read.
        most: u64,
    },
}

impl Error {
    /// The fault itself, without the path around it.
    pub fn fault(&self) -> &Error {
        match self {
            Error::In { fault, .. } => fault.fault(),
            fault => fault,
        }
    }

    /// Says where the fault is, unless that is already said.
    pub(crate) fn at(self, path: &Path) -> Error {
        match self {
            placed @ Error::In { .. } => placed,
            fault => Error::In { path: path.to_path_buf(), fault: Box::new(fault) },
        }
    }
}

/// The parser's message with what it repeats of the document: that may hold line ends, codes that a terminal obeys,
/// or megabytes.
fn in_one_line(error: &serde_json::Error) -> String {
    const CHARS_MAX: usize = 300;
    let message = error.to_string();
    let mut line = String::new();
    for c in message.chars().take(CHARS_MAX) {
        if c.is_control() {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    if message.chars().nth(CHARS_MAX).is_some() {
        line += &format!(" … at line {} column {}", error.line(), error.column());
    }
    line
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::NotFound => Error::NotFound,
            _ => Error::Io(error),
        }
    }
}
