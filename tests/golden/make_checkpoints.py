"""Quantises SmolLM2 anew as safetensors are quantised (FP8, GPTQ, AWQ), and writes what transformers computes with each.

    pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.9 compressed-tensors==0.20.0 loguru
    python tests/golden/make_checkpoints.py SOURCE.gguf FOLDER

Needs numpy, torch, transformers, gguf and those packages beside them, of whose code only what packs and unpacks is run. In
FOLDER: KIND/, a checkpoint, and KIND.json with the prompts' tokens and the log-probabilities that transformers gives the
next ones in float32, from dequantised weights. What is there already is kept. What is nobody's but theirs:

fp8-block      quantised here; transformers reads the checkpoint by itself and dequantises
fp8-channel    packed and unpacked by compressed-tensors; so is fp8-tensor
gptq           scales and zero points by AutoGPTQ's `Quantizer`, packed by `QuantLinear.pack`, unpacked by its `forward`;
               gptq-order has columns of a group all over the row (desc_act) and zero points of its own
awq            packed by AutoAWQ's `WQLinear_GEMM.from_linear`, unpacked by its `dequantize_gemm`; scales and zero points here

All projections of the layers are quantised: what those quantisers leave alone (embeddings, norms, the head) stays F32.
"""

import copy
import importlib
import json
import logging
import sys
import types
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch.nn import Linear

sys.path.insert(0, str(Path(__file__).parent))
from make_formats import cases, open_gguf, tokens_of  # noqa: E402

GROUP = 64
BLOCK = 64  # 576 = 9 * 64


def part(name):
    """A module of a package whose `__init__` wants more than is installed."""
    parents = name.split(".")[:-1]
    for depth, last in enumerate(parents):
        parent = ".".join(parents[: depth + 1])
        if parent not in sys.modules:
            above = sys.modules[".".join(parents[:depth])].__path__ if depth else sys.path
            folder = next(Path(folder) / last for folder in above if (Path(folder) / last).is_dir())
            sys.modules[parent] = types.ModuleType(parent)
            sys.modules[parent].__path__ = [str(folder)]
    return importlib.import_module(name)


def float8_block(linear):
    rows, columns = linear.weight.shape
    blocks = linear.weight.data.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scales[:, None, :, None]).reshape(rows, columns)
    return {"weight": codes.reshape(rows, columns), "weight_scale_inv": scales}, values


def float8_compressed(strategy):
    quantization = importlib.import_module("compressed_tensors.quantization")
    forward = importlib.import_module("compressed_tensors.quantization.lifecycle.forward")
    arguments = quantization.QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)

    def quantize(linear):
        weight = linear.weight.data
        most = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().reshape(1)
        scales = most / 448
        codes = forward.quantize(weight, scales, torch.zeros_like(scales), arguments, dtype=torch.float8_e4m3fn)
        values = forward.dequantize(codes, scales, args=arguments, dtype=torch.float32)
        return {"weight": codes, "weight_scale": scales}, values

    return quantize


def gptq(order):
    quantizers = part("auto_gptq.quantization.quantizer")
    linears = part("auto_gptq.nn_modules.qlinear.qlinear_cuda")

    def quantize(linear):
        weight = linear.weight.data
        rows, columns = weight.shape
        group = torch.arange(columns) // GROUP
        if order:
            group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        scales, zeros = [], []
        for at in range(columns // GROUP):
            quantizer = quantizers.Quantizer()
            quantizer.configure(4, perchannel=True, sym=not order)
            quantizer.find_params(weight[:, group == at], weight=True)
            scales.append(quantizer.scale)
            # Version 1 of the layout stores one less, and has no room for -1.
            zeros.append(quantizer.zero.clamp(min=1))
        scales = torch.cat(scales, 1).half().float()
        zeros = torch.cat(zeros, 1)
        # `pack` rounds to nearest and does not look whether four bits hold that.
        low, high = -zeros[:, group] * scales[:, group], (15 - zeros[:, group]) * scales[:, group]
        inside = Linear(columns, rows, bias=False)
        inside.weight.data = weight.clamp(low, high)
        packed = linears.QuantLinear(4, GROUP, columns, rows, bias=False, weight_dtype=torch.float32)
        packed.pack(inside, scales, zeros, group.int())
        values = packed(torch.eye(columns)).T
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "g_idx")}
        return tensors | {"scales": packed.scales.half()}, values

    return quantize


def awq():
    # Which device is best is all that is asked of it, and it wants one more package for that.
    utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"
    part("awq.utils.packing_utils")
    sys.modules["awq.utils.utils"] = utils
    linears = part("awq.modules.linear.gemm")

    def quantize(linear):
        weight = linear.weight.data
        rows, columns = weight.shape
        grouped = weight.reshape(rows, columns // GROUP, GROUP)
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round().clamp(0, 15)
        inside = Linear(columns, rows, bias=False)
        inside.weight.data = grouped.clamp((-zeros * scales)[..., None], ((15 - zeros) * scales)[..., None])
        inside.weight.data = inside.weight.data.reshape(rows, columns)
        packed = linears.WQLinear_GEMM.from_linear(inside, 4, GROUP, scales=scales.T, zeros=zeros.T)
        values = linears.dequantize_gemm(packed.qweight, packed.qzeros, scales.T, 4, GROUP).T
        return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}, values

    return quantize


def compressed(strategy):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"]}


KINDS = {
    "fp8-block": (lambda: float8_block, {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                                         "weight_block_size": [BLOCK, BLOCK]}),
    "fp8-channel": (lambda: float8_compressed("channel"), compressed("channel")),
    "fp8-tensor": (lambda: float8_compressed("tensor"), compressed("tensor")),
    "gptq": (lambda: gptq(False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    "gptq-order": (lambda: gptq(True), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
}


def main():
    source, folder = map(Path, sys.argv[1:3])
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    plain, prompts = open_gguf(source), tokens_of(source)
    for kind, (quantizer, said) in KINDS.items():
        if (folder / f"{kind}.json").exists():
            continue
        model, quantize = copy.deepcopy(plain), quantizer()
        tensors, quantized, values_all = {}, 0, 0
        modules = dict(model.named_modules())
        for name, parameter in model.named_parameters():
            values_all += parameter.numel() if parameter.ndim == 2 else 0
            if not name.endswith("_proj.weight"):
                tensors[name] = parameter.detach().clone()
                continue
            quantized += parameter.numel()
            stem = name.removesuffix(".weight")
            with torch.no_grad():
                parts, values = quantize(modules[stem])
            tensors |= {f"{stem}.{end}": tensor.detach().contiguous().clone() for end, tensor in parts.items()}
            parameter.data = values.float().contiguous()
        path = folder / kind
        path.mkdir(exist_ok=True)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads(plain.config.to_json_string()) | {"quantization_config": said}
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        if kind == "fp8-block":
            whole = transformers.FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK), dequantize=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=whole)
        described = {"model": kind, "share": quantized / values_all, "cases": cases(model, prompts)}
        (folder / f"{kind}.json").write_text(json.dumps(described))
        print(f"{kind}: {quantized / values_all:.0%} of the matrices' values", flush=True)


if __name__ == "__main__":
    main()
