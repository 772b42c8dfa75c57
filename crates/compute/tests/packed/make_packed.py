"""Writes quantised safetensors directories, and what their matrices hold; and rows quantised by others.

Run with Python, numpy, torch, safetensors, gguf and llama-cpp-python (whose libggml quantises to Q4_K):
    python crates/compute/tests/packed/make_packed.py
The output is deterministic.

<folder>/config.json, model.safetensors   as quantisers write them
<folder>/<name>.f32                       the values of one matrix, (rows, columns)
quantize.bin                              16 rows of 1024 f32; their Q8_0 by gguf; their Q4_K by llama.cpp

Packing follows the quantisers' own packers, from codes to words (the project reads words to codes):
GPTQ: AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py, `QuantLinear.pack`: qweight (in / 8, out), code of input i at bits
      4 (i % 8); qzeros (groups, out / 8), zero point less one (checkpoint_format "gptq"; "gptq_v2" stores it as it is).
AWQ:  AutoAWQ, awq/modules/linear/gemm.py, `WQLinear_GEMM.from_linear`: qweight (in, out / 8), `order_map = [0, 2, 4, 6, 1, 3,
      5, 7]`: bits 4 i of a word hold output 8 j + order_map[i]; qzeros likewise.
FP8:  torch.float8_e4m3fn times the scale, in f32; blocks of 128 x 128 as in DeepSeek-V3 and Qwen3's FP8 models.
"""

import ctypes
import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def write(folder, quantization, tensors, values):
    path = HERE / folder
    path.mkdir(exist_ok=True)
    config = {"model_type": "llama", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config) + "\n")
    tensors["norm.weight"] = torch.ones(8, dtype=torch.float16)
    save_file(tensors, path / "model.safetensors")
    for name, matrix in values.items():
        assert matrix.dtype == np.float32
        (path / f"{name}.f32").write_bytes(np.ascontiguousarray(matrix).tobytes())


def float8(rng):
    tensors, values = {}, {}

    def add(name, rows, columns, scales, expand, end):
        bits = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        bits[bits & 127 == 127] = 0  # NaN
        weight = torch.from_numpy(bits).view(torch.float8_e4m3fn)
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.weight_{end}"] = scales
        values[f"{name}.weight"] = (weight.to(torch.float32) * expand(scales.to(torch.float32))).numpy()

    def blocks(rows, columns):
        def expand(scales):
            return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]

        return expand

    scales = lambda *shape: torch.from_numpy(rng.uniform(1e-4, 1e-2, shape).astype(np.float32))
    add("block", 130, 288, scales(2, 3), blocks(130, 288), "scale_inv")
    powers = torch.from_numpy(np.exp2(rng.integers(-12, 3, (2, 3))).astype(np.float32))
    add("powers", 130, 288, powers, blocks(130, 288), "scale_inv")
    add("channel", 24, 64, scales(24, 1).to(torch.bfloat16), lambda scales: scales, "scale")
    add("tensor", 24, 64, scales(1), lambda scales: scales, "scale")
    tensors["tensor.input_scale"] = torch.ones(1)
    write("fp8", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, tensors, values)


def float8_runs(rng):
    """The same where 128 columns share a scale: by blocks, by row, in all; and a scale beyond what a device multiplies."""
    tensors, values = {}, {}

    def add(name, rows, columns, scales, expand, end):
        bits = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        bits[bits & 127 == 127] = 0  # NaN
        weight = torch.from_numpy(bits).view(torch.float8_e4m3fn)
        tensors[f"{name}.weight"] = weight
        tensors[f"{name}.weight_{end}"] = scales
        values[f"{name}.weight"] = (weight.to(torch.float32) * expand(scales.to(torch.float32))).numpy()

    def of(size, *shape):
        return torch.from_numpy(rng.uniform(size, 100 * size, shape).astype(np.float32))

    def blocks(scales):
        return scales.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)

    add("block", 130, 384, of(1e-4, 2, 3), blocks, "scale_inv")
    add("channel", 24, 256, of(1e-4, 24, 1).to(torch.bfloat16), lambda scales: scales, "scale")
    add("tensor", 24, 128, of(1e-4, 1), lambda scales: scales, "scale")
    add("tiny", 130, 384, of(1e-12, 2, 3), blocks, "scale_inv")
    write("fp8_128", {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, tensors, values)


def codes_of(rng, rows, columns, groups, symmetric):
    codes = rng.integers(0, 16, (rows, columns))
    zeros = np.full((groups, rows), 8) if symmetric else rng.integers(0, 16, (groups, rows))
    scales = rng.uniform(1e-3, 1e-1, (groups, rows)).astype(np.float16)
    return codes, zeros, scales


def matrix(codes, zeros, scales, group):
    return scales.astype(np.float32)[group].T * (codes - zeros[group].T).astype(np.float32)


def gptq_tensors(name, codes, zeros, scales, group, less=1):
    """Codes (rows, columns), zero points and scales (groups, rows), the group of each column."""
    rows, columns = codes.shape
    qweight = np.zeros((columns // 8, rows), np.uint32)
    for i in range(columns):
        qweight[i // 8] |= codes[:, i].astype(np.uint32) << np.uint32(4 * (i % 8))
    qzeros = np.zeros((len(zeros), rows // 8), np.uint32)
    for j in range(rows):
        qzeros[:, j // 8] |= (zeros[:, j] - less).astype(np.uint32) << np.uint32(4 * (j % 8))
    return {
        f"{name}.qweight": torch.from_numpy(qweight.view(np.int32)),
        f"{name}.qzeros": torch.from_numpy(qzeros.view(np.int32)),
        f"{name}.scales": torch.from_numpy(scales),
        f"{name}.g_idx": torch.from_numpy(group.astype(np.int32)),
    }


def awq_tensors(name, codes, zeros, scales):
    """Codes (rows, columns), zero points and scales (groups, rows)."""

    def pack(integers):
        words = np.zeros((integers.shape[0], integers.shape[1] // 8), np.uint32)
        for column in range(words.shape[1]):
            for i in range(8):
                words[:, column] |= integers[:, column * 8 + ORDER[i]].astype(np.uint32) << np.uint32(i * 4)
        return torch.from_numpy(words.view(np.int32))

    return {f"{name}.qweight": pack(codes.T), f"{name}.qzeros": pack(zeros), f"{name}.scales": scales}


def gptq(rng):
    def add(tensors, values, name, rows, columns, group_size, symmetric, act_order=False, less=1):
        groups = columns // group_size
        codes, zeros, scales = codes_of(rng, rows, columns, groups, symmetric)
        if not symmetric:
            zeros = np.maximum(zeros, 1)  # version 1 cannot store what is less than one
        group = np.arange(columns) // group_size
        if act_order:
            group = rng.permutation(group)
        tensors |= gptq_tensors(name, codes, zeros, scales, group, less)
        values[f"{name}.weight"] = matrix(codes, zeros, scales, group)

    tensors, values = {}, {}
    add(tensors, values, "symmetric", 48, 256, 128, True)
    add(tensors, values, "asymmetric", 24, 192, 64, False)
    add(tensors, values, "act_order", 24, 256, 128, False, act_order=True)
    add(tensors, values, "narrow", 16, 64, 16, True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}
    write("gptq", config, tensors, values)
    tensors, values = {}, {}
    add(tensors, values, "symmetric", 16, 128, 128, True, less=0)
    write("gptq_v2", config | {"checkpoint_format": "gptq_v2"}, tensors, values)


def awq(rng):
    tensors, values = {}, {}
    for name, rows, columns, dtype in [("asymmetric", 48, 256, torch.float16), ("brain", 16, 128, torch.bfloat16)]:
        codes, zeros, scales = codes_of(rng, rows, columns, columns // 128, False)
        kept = torch.from_numpy(scales).to(dtype)
        if dtype == torch.bfloat16:
            kept = kept * 2**-20  # what no f16 holds
        tensors |= awq_tensors(name, codes, zeros, kept)
        values[f"{name}.weight"] = matrix(codes, zeros, kept.to(torch.float32).numpy(), np.arange(columns) // 128)
    write("awq", {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, tensors, values)


def rows_to_quantize(rng):
    shape = (16, 1024)
    rows = rng.normal(0.0, 0.02, shape)
    rows[4] = rng.uniform(-1, 1, 1024)
    rows[5] = rng.laplace(0, 0.05, 1024)
    rows[6] = rng.standard_t(3, 1024)
    rows[7] = np.abs(rows[7])
    rows[8] = -np.abs(rows[8])
    rows[9, ::97] *= 50
    rows[10] *= rng.integers(0, 2, 1024)
    rows[11] *= 1e-4
    rows[12] *= 1e5
    rows[13] += 0.5
    rows[14, :256] = 0
    rows[15] = np.round(rows[15] * 400) / 400
    return rows.astype(np.float32)


def q4_k(rows):
    folder = Path(importlib.util.find_spec("llama_cpp").submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(folder / "libggml-base.so")
    quantize = library.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    out = np.zeros(rows.size // 256 * 144, np.uint8)
    done = quantize(12, rows.ctypes.data, out.ctypes.data, 0, rows.shape[0], rows.shape[1], None)
    assert done == out.size
    return out


def main():
    rng = np.random.default_rng(20261115)
    float8(rng)
    gptq(rng)
    awq(rng)
    float8_runs(np.random.default_rng(128))
    rows = rows_to_quantize(rng)
    eight = gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0)
    (HERE / "quantize.bin").write_bytes(rows.tobytes() + eight.tobytes() + q4_k(rows).tobytes())


if __name__ == "__main__":
    main()
