#!/usr/bin/env python3
"""Writes the model files that the tests of this crate read and the seeds of the fuzz targets.

    pip install gguf==0.19.0 safetensors==0.8.0 numpy
    python crates/format/tests/make_files.py

Valid files are written by the `gguf` and `safetensors` packages, never by Fornax; what they hold is noted in
valid/expected.json. Hostile files are valid ones with a few bytes changed. The output is the same on every run.
"""

import json
import shutil
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import save

TESTS = Path(__file__).resolve().parent
VALID, HOSTILE = TESTS / "valid", TESTS / "hostile"
SEEDS = TESTS.parents[2] / "fuzz" / "seeds"

# The fuzz targets take several files as one input, with this between them.
SEPARATOR = b"\xffFILE\xff"


def u32(number):
    return struct.pack("<I", number)


def u64(number):
    return struct.pack("<Q", number)


def write_gguf(fill, **options):
    """The bytes of the file or files that a GGUFWriter writes after `fill` filled it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        writer = GGUFWriter(path, "test", **options)
        fill(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return [written.read_bytes() for written in sorted(Path(directory).iterdir())]


def describe(data):
    """Tensors as the package's own reader sees them."""
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(data)
        file.flush()
        return [
            {
                "name": tensor.name,
                "dtype": tensor.tensor_type.name,
                "shape": [int(dim) for dim in reversed(tensor.shape)],
                "crc32": zlib.crc32(tensor.data.tobytes()),
            }
            for tensor in GGUFReader(file.name).tensors
        ]


# Every metadata type, the extremes of each number, and arrays of them.
METADATA = [
    ("u8", GGUFValueType.UINT8, 255),
    ("i8", GGUFValueType.INT8, -128),
    ("u16", GGUFValueType.UINT16, 65535),
    ("i16", GGUFValueType.INT16, -32768),
    ("u32", GGUFValueType.UINT32, 2**32 - 1),
    ("i32", GGUFValueType.INT32, -(2**31)),
    ("f32", GGUFValueType.FLOAT32, 0.5),
    ("bool", GGUFValueType.BOOL, True),
    ("string", GGUFValueType.STRING, "grüße, 世界 \n"),
    ("u64", GGUFValueType.UINT64, 2**64 - 1),
    ("i64", GGUFValueType.INT64, -(2**63)),
    ("f64", GGUFValueType.FLOAT64, -1e300),
]
ARRAYS = [
    ("u8s", GGUFValueType.UINT8, [0, 255]),
    ("i8s", GGUFValueType.INT8, [-128, 127]),
    ("u16s", GGUFValueType.UINT16, [0, 65535]),
    ("i16s", GGUFValueType.INT16, [-32768, 32767]),
    ("u32s", GGUFValueType.UINT32, [0, 2**32 - 1]),
    ("i32s", GGUFValueType.INT32, [-(2**31), 2**31 - 1]),
    ("f32s", GGUFValueType.FLOAT32, [0.25, -2.0]),
    ("bools", GGUFValueType.BOOL, [True, False, True]),
    ("strings", GGUFValueType.STRING, ["", "a", "ä b"]),
    ("u64s", GGUFValueType.UINT64, [0, 2**64 - 1]),
    ("i64s", GGUFValueType.INT64, [-(2**63), 2**63 - 1]),
    ("f64s", GGUFValueType.FLOAT64, [1e-300, 1e300]),
    ("nested", GGUFValueType.ARRAY, [[1, 2], [3]]),
    ("nested_deep", GGUFValueType.ARRAY, [[[["x"]], [["y", "z"]]]]),
]


def fill_metadata(writer):
    for key, kind, value in METADATA:
        writer.add_key_value(f"test.{key}", value, kind)
    for key, kind, value in ARRAYS:
        writer.add_key_value(f"test.{key}", value, GGUFValueType.ARRAY, sub_type=kind)
    writer.add_tensor("vector", np.arange(3, dtype=np.float32))


# The package and ggml disagree on the size of Q8_1.
DTYPES = {kind: size for kind, (_, size) in GGML_QUANT_SIZES.items() if kind != GGMLQuantizationType.Q8_1}


def fill_dtypes(writer, kinds=DTYPES):
    """A tensor of two rows of one block of every type that the package knows."""
    random = np.random.default_rng(1)
    for kind in kinds:
        size = DTYPES[kind]
        data = random.integers(0, 256, (2, size), dtype=np.uint8)
        writer.add_tensor(f"{kind.name.lower()}.weight", data, raw_shape=(2, size), raw_dtype=kind)


def fill_shapes(writer):
    """One to four dimensions and an alignment that is not the default."""
    writer.add_custom_alignment(64)
    for rank in range(1, 5):
        shape = tuple(range(2, 2 + rank))
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        writer.add_tensor(f"rank{rank}", values.astype(np.float16) if rank % 2 else values)


def fill_split(writer):
    writer.add_uint32("test.layers", 3)
    for layer in range(3):
        writer.add_tensor(f"blk.{layer}.weight", np.full((2, 8), layer, dtype=np.float32))


def fill_base(writer):
    """What the hostile files are made of."""
    writer.add_custom_alignment(32)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "value")
    writer.add_key_value("test.array", [1, 2, 3], GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT32)
    writer.add_array("test.strings", ["one", "two"])
    writer.add_tensor("aaaa", np.arange(32, dtype=np.float32).reshape(4, 8))
    writer.add_tensor("bbbb", np.zeros((2, 34), dtype=np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("cccc", np.arange(8, dtype=np.float16))


def patched(data, anchor, skip, new):
    """`data` with `new` written `skip` bytes behind the only `anchor`."""
    assert data.count(anchor) == 1, anchor
    at = data.index(anchor) + len(anchor) + skip
    return data[:at] + new + data[at + len(new) :]


def hostile_gguf(base):
    # A pair is key, type (4), value; an array's value is type (4), count (8), elements.
    # A matrix's line is name, rank (4), two dimensions (8 each), type (4), offset (8).
    rank, fastest, slowest, kind, offset = 0, 4, 12, 20, 24
    nested = b"".join(u32(9) + u64(1) for _ in range(10_000))
    files = {
        "empty": b"",
        "magic-wrong": b"GGML" + base[4:],
        "magic-swapped": b"FUGG" + base[4:],
        "version-swapped": patched(base, b"GGUF", 0, struct.pack(">I", 3)),
        "version-1": patched(base, b"GGUF", 0, u32(1)),
        "version-4": patched(base, b"GGUF", 0, u32(4)),
        "version-missing": base[:6],
        "tensors-absurd": patched(base, b"GGUF", 4, u64(2**63)),
        "tensors-one-more": patched(base, b"GGUF", 4, u64(4)),
        "pairs-absurd": patched(base, b"GGUF", 12, u64(2**64 - 1)),
        "key-length-absurd": patched(base, b"GGUF", 20, u64(2**64 - 1)),
        "key-not-utf8": patched(base, b"test.boo", 0, b"\xff"),
        "key-twice": base.replace(b"test.bool", b"test.dupe").replace(
            u64(11) + b"test.string", u64(9) + b"test.dupe"
        ),
        "value-type-unknown": patched(base, b"test.bool", 0, u32(13)),
        "bool-two": patched(base, b"test.bool", 4, b"\x02"),
        "string-length-absurd": patched(base, b"test.string" + u32(8), 0, u64(2**40)),
        "string-not-utf8": patched(base, b"valu", 0, b"\x80"),
        "array-type-unknown": patched(base, b"test.array", 4, u32(99)),
        "array-length-absurd": patched(base, b"test.array", 8, u64(2**40)),
        "array-length-overflows": patched(base, b"test.array", 8, u64(2**62 + 1)),
        "array-bool-two": patched(base, b"test.array", 4, u32(7) + u64(12)),
        "array-of-strings-absurd": patched(base, b"test.strings", 8, u64(2**40)),
        "array-of-strings-long": patched(base, b"test.strings", 8, u64(20)),
        "array-of-arrays-absurd": patched(base, b"test.array", 4, u32(9) + u64(2**40)),
        "array-nested-deep": base[: base.index(b"test.array") + 14] + nested,
        "alignment-zero": patched(base, b"general.alignment", 4, u32(0)),
        "alignment-48": patched(base, b"general.alignment", 4, u32(48)),
        "alignment-huge": patched(base, b"general.alignment", 4, u32(2**31)),
        "alignment-float": patched(base, b"general.alignment", 0, u32(6)),
        "alignment-negative": patched(base, b"general.alignment", 0, u32(5) + u32(2**32 - 32)),
        "name-not-utf8": patched(base, b"aaa", 0, b"\xc0"),
        "name-twice": base.replace(b"bbbb", b"aaaa"),
        "dimensions-many": patched(base, b"aaaa", rank, u32(2**31)),
        "dimensions-five": patched(base, b"aaaa", rank, u32(5)),
        "dimensions-overflow": patched(base, b"aaaa", fastest, u64(2**33) + u64(2**33)),
        "dimensions-bytes-overflow": patched(base, b"aaaa", fastest, u64(2**31) + u64(2**32)),
        "dimension-largest": patched(base, b"aaaa", slowest, u64(2**64 - 1)),
        "type-unknown": patched(base, b"aaaa", kind, u32(1000)),
        "type-removed": patched(base, b"aaaa", kind, u32(4)),
        "row-ragged": patched(base, b"bbbb", fastest, u64(33)),
        "row-shorter-than-block": patched(base, b"aaaa", kind, u32(12)),
        "offset-misaligned": patched(base, b"bbbb", offset, u64(129)),
        "offset-behind-end": patched(base, b"bbbb", offset, u64(2**20)),
        "offset-overflows": patched(base, b"bbbb", offset, u64(2**64 - 32)),
        "overlap-whole": patched(base, b"bbbb", offset, u64(0)),
        "overlap-part": patched(base, b"bbbb", offset, u64(96)),
        "data-truncated": base[:-24],
        "data-missing": base[: base.index(b"cccc") + 30],
        "list-truncated": base[: base.index(b"cccc") + 2],
    }
    # Three dimensions, the slowest zero, in the place of one: the line grows by two dimensions.
    at = base.index(b"cccc") + 4
    files["dimensions-overflow-behind-zero"] = (
        base[:at] + u32(3) + u64(2**33) + u64(2**33) + u64(0) + base[at + 12 :]
    )
    return {f"{name}.gguf": data for name, data in files.items()}


def hostile_splits(shards):
    """Directories, each with shards of which one is wrong."""

    def names(count, of=None):
        return [f"model-{number:05}-of-{of or count:05}.gguf" for number in range(1, count + 1)]

    first, second, third = shards
    foreign = patched(second, b"split.count", 4, struct.pack("<H", 2))
    few, many = u32(2) + struct.pack("<H", 3), u32(4) + u32(70_000)
    absurd = first.replace(b"split.count" + few, b"split.count" + many) + bytes(64)
    cases = {
        "split-missing": [first, second],
        "split-cyclic": [first, first, third],
        "split-swapped": [first, third, second],
        "split-foreign": [first, foreign, third],
        "split-total-wrong": [patched(first, b"split.tensors.count", 4, u32(5)), second, third],
        "split-total-negative": [patched(first, b"split.tensors.count", 4, u32(2**32 - 1)), second, third],
        "split-count-absurd": [absurd, second, third],
        "split-number-missing": [first.replace(b"split.no", b"split.xx"), second, third],
        "split-tensor-twice": [first, second.replace(b"blk.1.", b"blk.0."), third],
        "split-not-gguf": [first, b"no model at all", third],
    }
    files = {
        f"{case}/{name}": data for case, parts in cases.items() for name, data in zip(names(3), parts)
    }
    files["split-renamed/first.gguf"] = first
    files["split-count-wrong/model-00001-of-00002.gguf"] = first
    files["split-count-wrong/model-00002-of-00002.gguf"] = second
    return files


def safetensors_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return u64(len(text)) + text + data


def hostile_safetensors(base):
    def tensor(begin, end, dtype="F32", shape=(2,)):
        return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}

    eight = bytes(8)
    files = {
        "empty": b"",
        "length-truncated": base[:5],
        "length-absurd": u64(2**64 - 1) + base[8:],
        "length-one-more": u64(len(base) - 8 + 1) + base[8:],
        "header-not-json": safetensors_file(b"not json"),
        "header-a-list": safetensors_file(b"[]"),
        "header-not-utf8": safetensors_file(b'{"\xff":1}'),
        "header-deep": safetensors_file(b'{"a":{"x":' + b"[" * 20_000),
        "header-twice-metadata": safetensors_file(b'{"__metadata__":{},"__metadata__":{}}'),
        "metadata-number": safetensors_file(b'{"__metadata__":{"a":1}}'),
        "dtype-unknown": safetensors_file({"a": tensor(0, 8, "F7")}, eight),
        "dtype-control-codes": safetensors_file({"a": tensor(0, 8, "\n\x1b[2J" + "x" * 1000)}, eight),
        "field-missing": safetensors_file({"a": {"dtype": "F32", "shape": [2]}}, eight),
        "shape-negative": safetensors_file({"a": tensor(0, 8, shape=[-2])}, eight),
        "dimensions-many": safetensors_file({"a": tensor(0, 8, shape=[2] + [1] * 20_000)}, eight),
        "dimensions-overflow": safetensors_file({"a": tensor(0, 8, shape=[2**33, 2**33])}, eight),
        "dimensions-overflow-behind-zero": safetensors_file({"a": tensor(0, 0, shape=[0, 2**33, 2**33])}),
        "size-wrong": safetensors_file({"a": tensor(0, 8, shape=[3])}, eight),
        "row-ragged": safetensors_file({"a": tensor(0, 8, "F4", [2, 3])}, eight),
        "backwards": safetensors_file({"a": tensor(8, 0)}, eight),
        "behind-end": safetensors_file({"a": tensor(0, 8)}, bytes(7)),
        "hole-first": safetensors_file({"a": tensor(8, 16)}, bytes(16)),
        "hole-between": safetensors_file({"a": tensor(0, 8), "b": tensor(12, 20)}, bytes(20)),
        "hole-last": safetensors_file({"a": tensor(0, 8)}, bytes(9)),
        "overlap": safetensors_file({"a": tensor(0, 8), "b": tensor(4, 12)}, bytes(12)),
        "name-twice": safetensors_file(
            b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
            b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
        "name-twice-one-wrong": safetensors_file(
            b'{"a":{"dtype":"F32","shape":[5],"data_offsets":[0,0]},'
            b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
        ),
    }
    return {f"{name}.safetensors": data for name, data in files.items()}


def hostile_directories(one, two):
    """Hugging Face directories, each with something wrong."""
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    config = b'{"model_type": "test"}'

    def indexed(weights, **files):
        index = {"metadata": {"total_size": 0}, "weight_map": weights}
        return {
            "config.json": config,
            "model.safetensors.index.json": json.dumps(index).encode(),
            first: one,
            second: two,
        } | files

    many = {f"t{number}": f"f{number}" for number in range(5000)}
    cases = {
        "index-traversal": indexed({"a": "../empty.safetensors"}),
        "index-absolute": indexed({"a": "/etc/hostname"}),
        "index-parent": indexed({"a": ".."}),
        "index-nothing": indexed({"a": ""}),
        "index-control-codes": indexed({"a": "a\n\x1b[2J.safetensors"}),
        "index-itself": indexed({"a": "model.safetensors.index.json"}),
        "index-missing-shard": indexed({"a": first, "b": "model-00003-of-00002.safetensors"}),
        "index-wrong-shard": indexed({"a": second, "b": first}),
        "index-missing-tensor": indexed({"a": first, "b": second, "c": second}),
        "index-not-json": indexed({}, **{"model.safetensors.index.json": b"{"}),
        "index-many-files": indexed(many),
        "index-tensor-twice": indexed({"a": first, "b": second}, **{second: one}),
        "config-not-json": {"config.json": b"{,}", "model.safetensors": one},
        "config-missing": {"model.safetensors": one},
        "weights-pickled": {"config.json": config, "pytorch_model.bin": b"\x80"},
        "template-not-utf8": {"config.json": config, "model.safetensors": one, "chat_template.jinja": b"\xff"},
    }
    return {f"{case}/{name}": data for case, files in cases.items() for name, data in files.items()}


def valid_directory(one, two):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": first, "b": second}}
    return {
        "config.json": b'{"model_type": "test", "vocab_size": 3}',
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "tokenizer_config.json": b'{"chat_template": "in the configuration"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index, indent=2).encode(),
        first: one,
        second: two,
    }


def write(directory, files):
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def main():
    for directory in (VALID, HOSTILE, SEEDS):
        shutil.rmtree(directory, ignore_errors=True)

    [metadata], [dtypes], [shapes], [base] = map(write_gguf, (fill_metadata, fill_dtypes, fill_shapes, fill_base))
    shards = write_gguf(fill_split, split_max_tensors=1)
    version2 = patched(shapes, b"GGUF", 0, u32(2))  # laid out as version 3
    whole = {"metadata": metadata, "dtypes": dtypes, "shapes": shapes, "base": base, "version2": version2}
    # What is left of a split after merging: a whole file that still has the keys.
    whole["merged"] = patched(shards[0], b"split.count", 4, struct.pack("<H", 0))
    split = {f"split-{number:05}-of-00003.gguf": data for number, data in enumerate(shards, 1)}
    write(VALID, {f"{name}.gguf": data for name, data in whole.items()} | split)

    one, two = (save({name: np.arange(2, dtype=np.float32)}) for name in "ab")
    arrays = {
        "scalar": np.array(1.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float16),
        "matrix": np.arange(6, dtype=np.int64).reshape(2, 3),
        "bytes": np.arange(5, dtype=np.uint8),
        "truth": np.array([True, False]),
    }
    single = save(arrays, metadata={"format": "np"})
    write(VALID, {"single.safetensors": single})
    write(VALID / "huggingface", valid_directory(one, two))
    tensors = [
        {
            "name": name,
            "dtype": {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8", "bool": "BOOL"}[str(array.dtype)],
            "shape": list(array.shape),
            "crc32": zlib.crc32(array.tobytes()),
        }
        for name, array in arrays.items()
    ]
    expected = {
        "metadata": {f"test.{key}": value for key, _, value in METADATA + ARRAYS},
        "tensors": {f"{name}.gguf": describe(data) for name, data in whole.items()}
        | {"split-00001-of-00003.gguf": [line for data in shards for line in describe(data)]}
        | {"single.safetensors": tensors},
    }
    write(VALID, {"expected.json": json.dumps(expected, indent=1, ensure_ascii=False).encode() + b"\n"})

    write(HOSTILE, hostile_gguf(base) | hostile_splits(shards) | hostile_safetensors(single))
    write(HOSTILE, hostile_directories(one, two))

    # Seeds are short: a fuzzer finds more in many runs than in long ones.
    seeds = {name: data for name, data in whole.items() if name != "dtypes"} | {"split": SEPARATOR.join(shards)}
    kinds = sorted(DTYPES, key=DTYPES.get)
    for part in range(6):
        [seeds[f"dtypes{part}"]] = write_gguf(lambda writer: fill_dtypes(writer, kinds[part::6]))
    write(SEEDS / "gguf", seeds)
    index = {"weight_map": {"a": "1", "b": "2"}}
    sharded = SEPARATOR.join([json.dumps(index).encode(), one, two])
    # Types that numpy does not have; four values of each fill whole bytes.
    bits = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
    bits |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
    bits |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
    header, end = {}, 0
    for dtype, size in bits.items():
        header[dtype] = {"dtype": dtype, "shape": [4], "data_offsets": [end, end + size // 2]}
        end += size // 2
    dtypes = safetensors_file(header, bytes(end))
    write(SEEDS / "safetensors", {"single": single, "sharded": sharded, "one": one, "dtypes": dtypes})


if __name__ == "__main__":
    main()
