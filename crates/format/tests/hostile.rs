//! Every hostile file is refused with its own error and the values that are wrong.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use fornax_format::{Checkpoint, Error, Safetensors};

/// What is opened under tests/hostile, the variant of the error, and a part of its message that holds its values.
const TABLE: &[(&str, &str, &str)] = &[
    // GGUF: the fixed part.
    ("empty.gguf", "Truncated", "the magic needs 4 bytes at offset 0, but only 0 are left"),
    ("magic-wrong.gguf", "Magic", "the first four bytes are [47, 47, 4d, 4c]"),
    ("magic-swapped.gguf", "BigEndian", "version field 0x00000003"),
    ("version-swapped.gguf", "BigEndian", "version field 0x03000000"),
    ("version-1.gguf", "Version", "GGUF version 1"),
    ("version-4.gguf", "Version", "GGUF version 4"),
    ("version-missing.gguf", "Truncated", "the version needs 4 bytes at offset 4, but only 2 are left"),
    ("tensors-absurd.gguf", "Count", "the number of tensors says 9223372036854775808"),
    ("pairs-absurd.gguf", "Count", "the number of metadata pairs says 18446744073709551615"),
    // GGUF: metadata.
    ("key-length-absurd.gguf", "Truncated", "a metadata key needs 18446744073709551615 bytes"),
    ("key-not-utf8.gguf", "Utf8", "a metadata key at offset 109 is not UTF-8 (bad byte at 8 of 9)"),
    ("key-twice.gguf", "DuplicateKey", "\"test.dupe\" occurs twice"),
    ("value-type-unknown.gguf", "ValueType", "\"test.bool\" has unknown type id 13"),
    ("bool-two.gguf", "Bool", "is 2, neither 0 nor 1"),
    ("string-length-absurd.gguf", "Truncated", "a metadata value needs 1099511627776 bytes"),
    ("string-not-utf8.gguf", "Utf8", "(bad byte at 4 of 5)"),
    ("array-type-unknown.gguf", "ValueType", "\"test.array\" has unknown type id 99"),
    ("array-length-absurd.gguf", "Count", "an array's length says 1099511627776"),
    ("array-length-overflows.gguf", "Count", "an array's length says 4611686018427387905"),
    ("array-bool-two.gguf", "Bool", "is 2, neither 0 nor 1"),
    ("array-of-strings-absurd.gguf", "Count", "an array's length says 1099511627776"),
    ("array-of-strings-long.gguf", "Truncated", "a string in an array needs 34359738370 bytes"),
    ("array-of-arrays-absurd.gguf", "Count", "an array's length says 1099511627776"),
    ("array-nested-deep.gguf", "Depth", "\"test.array\" nests arrays deeper than 4"),
    ("alignment-zero.gguf", "Alignment", "general.alignment is 0"),
    ("alignment-48.gguf", "Alignment", "general.alignment is 48"),
    ("alignment-huge.gguf", "Misaligned", "not a multiple of the alignment 2147483648"),
    ("alignment-float.gguf", "KeyType", "\"general.alignment\" should be an integer, but is f32"),
    ("alignment-negative.gguf", "KeyRange", "\"general.alignment\" is -32"),
    // GGUF: tensors.
    ("list-truncated.gguf", "Truncated", "a tensor's name needs 4 bytes"),
    ("tensors-one-more.gguf", "Overlap", "tensors \"aaaa\" and \"\" overlap"),
    ("name-not-utf8.gguf", "Utf8", "a tensor's name"),
    ("name-twice.gguf", "DuplicateTensor", "\"aaaa\" occurs twice"),
    ("dimensions-many.gguf", "Dimensions", "\"aaaa\" has 2147483648 dimensions, more than 4"),
    ("dimensions-five.gguf", "Dimensions", "\"aaaa\" has 5 dimensions, more than 4"),
    ("dimensions-overflow.gguf", "TensorOverflow", "\"aaaa\" of shape [8589934592, 8589934592] (F32)"),
    ("dimensions-bytes-overflow.gguf", "TensorOverflow", "\"aaaa\" of shape [4294967296, 2147483648] (F32)"),
    (
        "dimensions-overflow-behind-zero.gguf",
        "TensorOverflow",
        "\"cccc\" of shape [0, 8589934592, 8589934592]",
    ),
    ("dimension-largest.gguf", "TensorOverflow", "\"aaaa\" of shape [18446744073709551615, 8]"),
    ("type-unknown.gguf", "TensorType", "\"aaaa\" has ggml type id 1000"),
    ("type-removed.gguf", "TensorType", "\"aaaa\" has ggml type id 4"),
    ("row-ragged.gguf", "RaggedRow", "\"bbbb\" has rows of 33 values, not a multiple of the 32 values"),
    ("row-shorter-than-block.gguf", "RaggedRow", "\"aaaa\" has rows of 8 values, not a multiple of the 256"),
    (
        "offset-misaligned.gguf",
        "Misaligned",
        "\"bbbb\" starts at offset 129, not a multiple of the alignment 32",
    ),
    ("offset-behind-end.gguf", "OutOfFile", "\"bbbb\" needs 68 bytes at offset 1048576"),
    ("offset-overflows.gguf", "OutOfFile", "\"bbbb\" needs 68 bytes at offset 18446744073709551584"),
    ("overlap-whole.gguf", "Overlap", "\"aaaa\" and \"bbbb\""),
    ("overlap-part.gguf", "Overlap", "tensors \"aaaa\" and \"bbbb\" overlap: one ends at byte"),
    ("data-truncated.gguf", "OutOfFile", "\"cccc\" needs 16 bytes at offset 224"),
    (
        "data-missing.gguf",
        "OutOfFile",
        "\"aaaa\" needs 128 bytes at offset 0 of the data section, which has only 0",
    ),
    // GGUF: splits. The path in front names the shard.
    ("split-missing", "ShardMissing", "model-00003-of-00003.gguf: shard 3 of 3 is missing"),
    (
        "split-cyclic",
        "WrongShard",
        "00002-of-00003.gguf: should be shard 2 of 3, but says that it is shard 1 of 3",
    ),
    (
        "split-swapped",
        "WrongShard",
        "00002-of-00003.gguf: should be shard 2 of 3, but says that it is shard 3 of 3",
    ),
    ("split-foreign", "WrongShard", "should be shard 2 of 3, but says that it is shard 2 of 2"),
    ("split-total-wrong", "ShardTensors", "hold 3 tensors together, but split.tensors.count says 5"),
    ("split-total-negative", "KeyRange", "\"split.tensors.count\" is -1"),
    ("split-count-absurd", "ShardCount", "split.count says 70000 shards, more than 65535"),
    ("split-number-missing", "MissingKey", "\"split.no\""),
    ("split-tensor-twice", "DuplicateTensor", "\"blk.0.weight\""),
    ("split-not-gguf", "Magic", "00002-of-00003.gguf: not a GGUF file"),
    ("split-renamed", "ShardName", "does not end in -00001-of-00003.gguf"),
    ("split-count-wrong", "ShardName", "does not end in -00001-of-00003.gguf"),
    // safetensors.
    ("empty.safetensors", "Truncated", "the header's length needs 8 bytes at offset 0, but only 0 are left"),
    ("length-truncated.safetensors", "Truncated", "only 5 are left"),
    ("length-absurd.safetensors", "HeaderLength", "says 18446744073709551615 bytes"),
    ("length-one-more.safetensors", "HeaderLength", "bytes, more than"),
    ("header-not-json.safetensors", "Json", "expected ident at line 1 column 2"),
    ("header-a-list.safetensors", "Json", "expected a safetensors header"),
    ("header-not-utf8.safetensors", "Json", "invalid unicode"),
    ("header-deep.safetensors", "Json", "EOF while parsing"),
    ("header-twice-metadata.safetensors", "Json", "duplicate field `__metadata__`"),
    ("metadata-number.safetensors", "Json", "expected a string"),
    ("dtype-unknown.safetensors", "Json", "unknown variant `F7`"),
    ("dtype-control-codes.safetensors", "Json", "unknown variant `\\n\\u{1b}[2Jxxx"),
    ("field-missing.safetensors", "Json", "missing field `data_offsets`"),
    ("shape-negative.safetensors", "Json", "`-2`"),
    ("dimensions-many.safetensors", "Dimensions", "\"a\" has 20001 dimensions, more than 8"),
    ("dimensions-overflow.safetensors", "TensorOverflow", "\"a\" of shape [8589934592, 8589934592]"),
    ("dimensions-overflow-behind-zero.safetensors", "TensorOverflow", "[0, 8589934592, 8589934592]"),
    ("size-wrong.safetensors", "TensorSize", "\"a\" of shape [3] (F32) is 12 bytes, but 8 are given"),
    ("row-ragged.safetensors", "RaggedRow", "\"a\" has rows of 3 values"),
    ("backwards.safetensors", "Backwards", "\"a\" ends at 0, before it begins at 8"),
    (
        "behind-end.safetensors",
        "OutOfFile",
        "\"a\" needs 8 bytes at offset 0 of the data section, which has only 7",
    ),
    ("hole-first.safetensors", "Hole", "bytes 0..8"),
    ("hole-between.safetensors", "Hole", "bytes 8..12"),
    ("hole-last.safetensors", "Hole", "bytes 8..9"),
    ("overlap.safetensors", "Overlap", "\"a\" and \"b\" overlap"),
    ("name-twice.safetensors", "DuplicateTensor", "\"a\" occurs twice"),
    ("name-twice-one-wrong.safetensors", "DuplicateTensor", "\"a\" occurs twice"),
    // Hugging Face directories.
    ("index-traversal", "ShardPath", "\"../empty.safetensors\""),
    ("index-absolute", "ShardPath", "\"/etc/hostname\""),
    ("index-parent", "ShardPath", "\"..\""),
    ("index-nothing", "ShardPath", "\"\""),
    ("index-control-codes", "ShardPath", "\"a\\n\\u{1b}[2J.safetensors\""),
    ("index-itself", "HeaderLength", "index.json: the safetensors header says"),
    ("index-missing-shard", "ShardMissing", "model-00003-of-00002.safetensors: shard 2 of 2 is missing"),
    ("index-wrong-shard", "NotInShard", "says that tensor \"a\" is in model-00002-of-00002.safetensors"),
    ("index-missing-tensor", "NotInShard", "says that tensor \"c\" is in model-00002-of-00002.safetensors"),
    ("index-not-json", "Json", "EOF while parsing an object"),
    ("index-many-files", "Json", "more than 4096 files"),
    ("index-tensor-twice", "DuplicateTensor", "\"a\" occurs twice"),
    ("config-not-json", "Json", "config.json: is not the JSON expected here"),
    ("config-missing", "NoModel", "the directory holds no model"),
    ("weights-pickled", "WeightsMissing", "(found instead: pytorch_model.bin)"),
    ("template-not-utf8", "Utf8", "chat_template.jinja: the template at offset 0"),
];

fn hostile() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile")
}

fn open(path: &Path) -> Result<(), Error> {
    if path.extension().is_some_and(|extension| extension == "safetensors") {
        // Not as a checkpoint, which would miss config.json first.
        return Safetensors::open(path).map(drop);
    }
    Checkpoint::open(path).map(drop)
}

/// What is wrong with the way in which `path` is refused, if anything.
fn complaint(path: &Path, variant: &str, part: &str) -> Option<String> {
    let Err(error) = open(path) else { return Some(format!("{} was accepted", path.display())) };
    let (message, fault) = (error.to_string(), format!("{:?}", error.fault()));
    let found = fault.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
    if found != variant {
        return Some(format!("{message}\n  is {found}, not {variant}"));
    }
    if message.len() > path.as_os_str().len() + 500 {
        return Some(format!("{message}\n  is too long"));
    }
    if !message.contains(part) {
        return Some(format!("{message}\n  does not say {part}"));
    }
    if !message.starts_with(&*path.to_string_lossy()) || message.contains(char::is_control) {
        return Some(format!("{message}\n  is not one plain line that begins with the place"));
    }
    None
}

fn check(path: &Path, variant: &str, part: &str) {
    assert_eq!(complaint(path, variant, part), None);
}

#[test]
fn every_hostile_file_is_refused_by_name_and_values() {
    let complaints =
        TABLE.iter().filter_map(|(name, variant, part)| complaint(&hostile().join(name), variant, part));
    let complaints: Vec<_> = complaints.collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn the_table_names_every_hostile_file() {
    let there = std::fs::read_dir(hostile()).unwrap();
    let there: BTreeSet<_> = there.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    let named: BTreeSet<_> = TABLE.iter().map(|row| row.0.to_owned()).collect();
    assert_eq!(there, named);
}

#[test]
fn every_prefix_of_a_valid_file_is_refused() {
    for name in ["metadata.gguf", "base.gguf", "single.safetensors"] {
        let path = hostile().join("../valid").join(name);
        let bytes = std::fs::read(&path).unwrap();
        // The last tensor's padding may be cut: it belongs to nothing.
        let needed = match name {
            "base.gguf" => bytes.len() - 16,
            "metadata.gguf" => bytes.len() - 20,
            _ => bytes.len(),
        };
        for len in 0..bytes.len() {
            let part = bytes[..len].to_vec();
            let opened = if name.ends_with("gguf") {
                fornax_format::Gguf::from_bytes(vec![part]).map(drop)
            } else {
                Safetensors::from_bytes(part).map(drop)
            };
            assert_eq!(opened.is_err(), len < needed, "{name} cut to {len}: {opened:?}");
        }
    }
}

#[test]
fn places_without_a_model_say_what_to_do() {
    let place = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = place.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let one = std::fs::read(hostile().join("../valid/single.safetensors")).unwrap();
    let base = std::fs::read(hostile().join("../valid/base.gguf")).unwrap();

    check(&place.path().join("nowhere"), "NotFound", "no such file or directory");
    std::fs::create_dir(place.path().join("empty")).unwrap();
    check(&place.path().join("empty"), "NoModel", "expected one .gguf file");
    check(&file("notes.txt", b"hello"), "NotAModel", "starts with [68, 65, 6c, 6c]");
    check(Path::new("/dev/null"), "NotAFile", "is not a regular file");
    file("pair/a.gguf", &base);
    file("pair/b.gguf", &base);
    check(&place.path().join("pair"), "SeveralModels", "2 models; name one of them, for example a.gguf");
    file("bare/config.json", b"{}");
    check(&place.path().join("bare"), "WeightsMissing", "(found instead: nothing)");
    file("long/model.safetensors", &one);
    file("long/config.json", &vec![b' '; (1 << 20) + 1]);
    check(&place.path().join("long"), "TooLong", "is 1048577 bytes long; at most 1048576");
    std::fs::create_dir(place.path().join("folder.gguf")).unwrap();
    let error = fornax_format::Gguf::open(&place.path().join("folder.gguf")).unwrap_err();
    assert!(matches!(error.fault(), Error::NotAFile), "{error}");

    let weights = file("lone/weights.safetensors", &one);
    let error = Checkpoint::open(&weights).unwrap_err();
    assert!(matches!(error.fault(), Error::ConfigMissing), "{error}");
    file("lone/config.json", b"{}");
    assert!(matches!(Checkpoint::open(&weights), Ok(Checkpoint::HuggingFace(_))));
}

#[test]
fn a_directory_with_one_gguf_model_opens_it() {
    let place = tempfile::tempdir().unwrap();
    for number in 1..=3 {
        let name = format!("split-0000{number}-of-00003.gguf");
        std::fs::copy(hostile().join("../valid").join(&name), place.path().join(&name)).unwrap();
    }
    // Repositories of GGUF files often keep the original configuration.
    std::fs::write(place.path().join("config.json"), b"{}").unwrap();
    let Ok(Checkpoint::Gguf(gguf)) = Checkpoint::open(place.path()) else { panic!("the split is not found") };
    assert_eq!(gguf.tensors().count(), 3);
}
