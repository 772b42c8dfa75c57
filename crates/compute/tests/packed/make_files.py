"""Writes tiny safetensors directories with the quantisers' own packages, and what the packages make of their matrices.

Run with Python, numpy, torch, safetensors, compressed-tensors 0.20, bitsandbytes 0.50, mlx 0.32 (mlx-cpu) and autoawq 0.2.7:
    python crates/compute/tests/packed/make_files.py
The output is deterministic.

<folder>/config.json, model.safetensors   as the tools write them
<folder>/<name>.f32                       the values of one matrix, (rows, columns)

Values are those of the package's own dequantisation. Where a package computes in the type of the scales (bfloat16 or float16),
it is handed the same scales as float32, which changes no scale and leaves out its rounding of products.

compressed: compressed_tensors' compressors, `pack-quantized` of 4, 8 and 3 bits and signed bytes
nvfp4, mxfp4: compressed_tensors' compressors of 4-bit floats
modelopt: written from NVIDIA's description (modelopt/torch/quantization/qtensor/nvfp4_tensor.py): two floats a byte, the first in
      the low half; value = float * weight_scale (e4m3) * weight_scale_2
gptq_bits: as AutoGPTQ packs 2, 3 and 8 bits (see make_packed.py), 3 bits as one stream down three words
awq_gemv: awq.modules.linear.gemv.WQLinear_GEMV.from_linear
bnb: bitsandbytes.functional.quantize_4bit (nf4 and fp4, with and without nested scales) and int8_vectorwise_quant
mlx: mlx.core.quantize
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
ROWS, COLUMNS = 16, 256


def write(folder, config, tensors, values):
    path = HERE / folder
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config) + "\n")
    tensors["norm.weight"] = torch.ones(8, dtype=torch.float16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    for name, matrix in values.items():
        matrix = np.asarray(matrix)
        assert matrix.dtype == np.float32, (name, matrix.dtype)
        (path / f"{name}.f32").write_bytes(np.ascontiguousarray(matrix).tobytes())


def weights(seed, rows=ROWS, columns=COLUMNS):
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 0.05, (rows, columns)).astype(np.float32))


def compressed():
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    tensors, values, groups = {}, {}, {}

    def add(name, seed, kind="pack-quantized", columns=COLUMNS, dtype=torch.bfloat16, order=False, **args):
        weight = weights(seed, columns=columns)
        args = QuantizationArgs(type="int", **args)
        size = args.group_size or columns
        group = torch.arange(columns) // size
        if order:
            group = group[torch.from_numpy(np.random.default_rng(seed).permutation(columns))]
        each = [weight[:, group == g] for g in range(columns // size)]
        least = torch.stack([part.min(1).values for part in each], 1).to(dtype)
        most = torch.stack([part.max(1).values for part in each], 1).to(dtype)
        scale, zero = calculate_qparams(least, most, args)
        scale = scale.to(dtype)
        # The package's own order of columns: it sorts by group where an index says which is whose.
        state = {"weight": weight.to(dtype), "weight_scale": scale}
        if not args.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        if order:
            state["weight"] = state["weight"][:, torch.argsort(group, stable=True)]
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(kind)
        packed = compressor.compress(dict(state), scheme)
        wide = {key: value.float() if value.is_floating_point() else value for key, value in packed.items()}
        value = compressor.decompress(wide, scheme)["weight"].float()
        if order:
            # Codes are kept in the columns' own order, with the group of each beside them.
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

            back = torch.argsort(torch.argsort(group, stable=True))
            codes = unpack_from_int32(packed["weight_packed"], args.num_bits, weight.shape)[:, back]
            packed["weight_packed"] = pack_to_int32(codes, args.num_bits)
            packed["weight_g_idx"] = group.to(torch.int32)
            value = value[:, back]
        tensors.update({f"{name}.{key}": tensor for key, tensor in packed.items()})
        values[f"{name}.weight"] = value.numpy()

    add("four", 1, num_bits=4, strategy="group", group_size=64)
    add("four_asymmetric", 2, num_bits=4, strategy="group", group_size=128, symmetric=False)
    add("four_channel", 3, num_bits=4, strategy="channel")
    add("four_ordered", 4, num_bits=4, strategy="group", group_size=64, order=True)
    add("eight", 5, num_bits=8, strategy="channel", dtype=torch.float16)
    add("eight_asymmetric", 6, num_bits=8, strategy="group", group_size=128, symmetric=False)
    add("three", 7, num_bits=3, strategy="group", group_size=32)
    add("bytes", 8, kind="int-quantized", num_bits=8, strategy="channel")
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    write("compressed", {"quantization_config": config}, tensors, values)


def float4(folder, form, global_scales):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    tensors, values = {}, {}
    for index, (name, scale) in enumerate(global_scales.items()):
        run = 32 if scale is None else 16
        # Scales with all their bits, whose halves have them too.
        weight = weights(20 + index) * (8 if scale == 2.0 else 1)
        most = weight.reshape(ROWS, -1, run).abs().amax(-1)
        if scale is None:
            args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8)
            power = torch.exp2(torch.floor(torch.log2(most)) - 2)
            state = {"weight": weight, "weight_scale": power}
        else:
            args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
            state = {
                "weight": weight,
                "weight_scale": (most / 6 * scale).to(torch.float8_e4m3fn).float(),
                "weight_global_scale": torch.tensor([scale], dtype=torch.float32),
            }
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(dict(state), scheme)
        codes = unpack_fp4_from_uint8(packed["weight_packed"], ROWS, COLUMNS, dtype=torch.float32)
        scales = compressor._decompress_scale(packed["weight_scale"], torch.float32)
        factor = packed.get("weight_global_scale")
        value = dequantize(x_q=codes, scale=scales, args=args, global_scale=factor, dtype=torch.float32)
        tensors.update({f"{name}.{key}": tensor for key, tensor in packed.items()})
        values[f"{name}.weight"] = value.numpy()
    config = {"quant_method": "compressed-tensors", "format": form}
    write(folder, {"quantization_config": config}, tensors, values)


def modelopt():
    rng = np.random.default_rng(40)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), dtype=np.uint8)
    scales = torch.from_numpy(rng.uniform(1, 448, (ROWS, COLUMNS // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    factor = np.float32(0.000123)
    tensors = {
        "linear.weight": torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4),
        "linear.weight_scale": scales,
        "linear.weight_scale_2": torch.tensor(factor),
        "linear.input_scale": torch.tensor(1.0),
    }
    each = (scales.float() * torch.tensor(factor)).repeat_interleave(16, 1).numpy()
    values = {"linear.weight": table[codes] * each}
    bits = rng.integers(0, 127, (ROWS, 128), dtype=np.uint8)
    eight = torch.from_numpy(bits).view(torch.float8_e4m3fn)
    tensors |= {"eight.weight": eight, "eight.weight_scale": torch.tensor(0.0123), "eight.input_scale": torch.tensor(1.0)}
    values["eight.weight"] = (eight.float() * torch.tensor(0.0123)).numpy()
    write("modelopt", {}, tensors, values)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (HERE / "modelopt" / "hf_quant_config.json").write_text(json.dumps(config) + "\n")


def gptq_bits():
    def stream(codes, bits):
        """Along the first dimension: (count, lines) to words (count * bits / 32, lines)."""
        count, lines = codes.shape
        words = np.zeros((count * bits // 32, lines), np.uint64)
        for i in range(count):
            at, shift = i * bits // 32, i * bits % 32
            wide = codes[i].astype(np.uint64) << np.uint64(shift)
            words[at] |= wide & np.uint64(0xFFFFFFFF)
            if shift + bits > 32:
                words[at + 1] |= wide >> np.uint64(32)
        return torch.from_numpy(words.astype(np.uint32).view(np.int32))

    rng = np.random.default_rng(50)
    tensors, values = {}, {}
    for name, bits, size, symmetric in [
        ("two", 2, 64, False), ("three", 3, 128, False), ("eight", 8, 128, True), ("eight_asymmetric", 8, 64, False),
    ]:
        rows, groups, most = 32, COLUMNS // size, 2**bits - 1
        codes = rng.integers(0, most + 1, (rows, COLUMNS))
        zeros = np.full((groups, rows), (most + 1) // 2) if symmetric else rng.integers(1, most + 1, (groups, rows))
        scales = rng.uniform(1e-3, 1e-1, (groups, rows)).astype(np.float16)
        group = np.arange(COLUMNS) // size
        tensors |= {
            f"{name}.qweight": stream(codes.T, bits),
            f"{name}.qzeros": stream((zeros - 1).T, bits).T,
            f"{name}.scales": torch.from_numpy(scales),
            f"{name}.g_idx": torch.from_numpy(group.astype(np.int32)),
        }
        values[f"{name}.weight"] = scales.astype(np.float32)[group].T * (codes - zeros[group].T).astype(np.float32)
    config = {"quant_method": "gptq", "bits": 3, "group_size": 128, "desc_act": False, "sym": False}
    write("gptq_bits", {"quantization_config": config}, tensors, values)


def awq_gemv():
    # The one file: its package imports kernels and data sets.
    import importlib.util
    import sys
    import types

    kernels = types.ModuleType("awq.utils.module")
    kernels.try_import = lambda name: (None, "")
    sys.modules |= {"awq.utils": types.ModuleType("awq.utils"), "awq.utils.module": kernels}
    folder = Path(importlib.util.find_spec("awq").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("gemv", folder / "modules" / "linear" / "gemv.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    WQLinear_GEMV = module.WQLinear_GEMV

    tensors, values = {}, {}
    for name, size, seed, columns in [("wide", 128, 60, 256), ("narrow", 64, 61, 320)]:
        weight = weights(seed, columns=columns)
        groups = weight.reshape(ROWS, -1, size)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = ((most - least) / 15).half().float()
        zeros = (-torch.round(least / scales)).clamp(0, 15)
        codes = (torch.round(groups / scales[..., None]) + zeros[..., None]).clamp(0, 15)
        value = ((codes - zeros[..., None]) * scales[..., None]).reshape(ROWS, columns)
        linear = torch.nn.Linear(columns, ROWS, bias=False)
        linear.weight.data = value.clone()
        packed = WQLinear_GEMV.from_linear(linear, 4, size, scales=scales.half(), zeros=zeros)
        tensors |= {f"{name}.{key}": getattr(packed, key) for key in ["qweight", "qzeros", "scales"]}
        values[f"{name}.weight"] = value.numpy()
    for name, size in [("awq_gemv", 128), ("awq_gemv_64", 64)]:
        own = "wide" if size == 128 else "narrow"
        config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemv"}
        kept = {key: tensor for key, tensor in tensors.items() if key.startswith(own)}
        write(name, {"quantization_config": config}, kept, {f"{own}.weight": values[f"{own}.weight"]})


def bnb():
    import bitsandbytes.functional as F

    tensors, values = {}, {}
    for index, (name, kind, nested, dtype) in enumerate([
        ("nf4", "nf4", False, torch.float16), ("nf4_nested", "nf4", True, torch.bfloat16), ("fp4", "fp4", False, torch.float32),
    ]):
        weight = weights(70 + index, rows=96).to(dtype)
        packed, state = F.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        tensors[f"{name}.weight"] = packed
        tensors |= {f"{name}.weight.{key}": tensor for key, tensor in state.as_dict(packed=True).items()}
        values[f"{name}.weight"] = F.dequantize_4bit(packed, state).float().numpy()
    weight = weights(80)
    bytes_, largest, _ = F.int8_vectorwise_quant(weight.half())
    tensors |= {"bytes.weight": bytes_, "bytes.SCB": largest, "bytes.weight_format": torch.tensor(0, dtype=torch.uint8)}
    values["bytes.weight"] = F.int8_vectorwise_dequant(bytes_, largest).float().numpy()
    write("bnb", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, tensors, values)


def mlx():
    import mlx.core as mx

    tensors, values = {}, {}
    overrides = {}
    for index, (name, bits, size, dtype) in enumerate([
        ("four", 4, 64, mx.float16), ("four_brain", 4, 32, mx.bfloat16), ("four_wide", 4, 128, mx.float16),
        ("two", 2, 64, mx.float16), ("three", 3, 64, mx.float16), ("five", 5, 64, mx.float16), ("six", 6, 64, mx.float16),
        ("eight", 8, 64, mx.float16),
    ]):
        weight = mx.array(weights(90 + index).numpy()).astype(dtype)
        packed, scales, biases = mx.quantize(weight, group_size=size, bits=bits)
        value = mx.dequantize(packed, scales.astype(mx.float32), biases.astype(mx.float32), group_size=size, bits=bits)
        kept = torch.float16 if dtype == mx.float16 else torch.bfloat16
        tensors[f"{name}.weight"] = torch.from_numpy(np.array(packed)).view(torch.uint32)
        for key, tensor in [("scales", scales), ("biases", biases)]:
            tensors[f"{name}.{key}"] = torch.from_numpy(np.array(tensor.astype(mx.float32))).to(kept)
        values[f"{name}.weight"] = np.array(value)
        if size != 64:
            overrides[name] = {"group_size": size, "bits": bits}
    write("mlx", {"quantization": {"group_size": 64, "bits": 4} | overrides}, tensors, values)


if __name__ == "__main__":
    compressed()
    float4("nvfp4", "nvfp4-pack-quantized", {"odd": 1357.0, "power": 2.0})
    float4("mxfp4", "mxfp4-pack-quantized", {"plain": None})
    modelopt()
    gptq_bits()
    awq_gemv()
    bnb()
    mlx()
