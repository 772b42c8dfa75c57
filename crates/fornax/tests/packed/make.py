"""Writes a tiny llama as FP8, GPTQ and AWQ, and the logits that transformers gives with the dequantised weights.

Run with Python, numpy, torch, transformers, safetensors and gguf:  python crates/fornax/tests/packed/make.py
The model is crates/model/tests/fixtures/llama; its projections are rounded here, the rest stays. How codes are packed is in
crates/compute/tests/packed/make_packed.py, after the quantisers' own packers. q8_0.bin has the logits where every matrix, the
embedding too, is what the `gguf` package makes of its Q8_0.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

HERE = Path(__file__).parent
CRATES = HERE.parents[2]
sys.path.insert(0, str(CRATES / "compute/tests/packed"))
from make_packed import awq_tensors, gptq_tensors, matrix  # noqa: E402

SOURCE = CRATES / "model/tests/fixtures/llama"
GROUP = 32


def four_bits(values, symmetric):
    """Codes, zero points and scales for groups of columns, by rounding to nearest."""
    rows, columns = values.shape
    grouped = values.reshape(rows, -1, GROUP)
    if symmetric:
        scales = np.abs(grouped).max(-1) / 7
        zeros = np.full(scales.shape, 8)
    else:
        low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
        scales = (high - low) / 15
        zeros = np.clip(np.rint(-low / scales), 1, 15).astype(int)
    scales = scales.astype(np.float16)
    codes = np.clip(np.rint(grouped / scales[..., None].astype(np.float32)) + zeros[..., None], 0, 15).astype(int)
    return codes.reshape(rows, columns), zeros.T, np.ascontiguousarray(scales.T)


def quantized(kind, name, values):
    """The tensors of one projection, and its values."""
    group = np.arange(values.shape[1]) // GROUP
    if kind == "fp8":
        scales = torch.from_numpy(np.abs(values).max(1, keepdims=True) / 448)
        codes = (torch.from_numpy(values) / scales).to(torch.float8_e4m3fn)
        return {f"{name}.weight": codes, f"{name}.weight_scale": scales}, (codes.float() * scales).numpy()
    codes, zeros, scales = four_bits(values, kind == "gptq")
    if kind == "gptq":
        tensors = gptq_tensors(name, codes, zeros, scales, group)
    else:
        tensors = awq_tensors(name, codes, zeros, torch.from_numpy(scales))
    return tensors, matrix(codes, zeros, scales, group)


CONFIGS = {
    "fp8": {"quant_method": "fbgemm_fp8"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def main():
    tokens = json.loads((SOURCE / "golden.json").read_text())["tokens"]
    for kind, config in CONFIGS.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(str(SOURCE), dtype=torch.float32)
        tensors = {}
        for name, parameter in model.named_parameters():
            if not name.endswith("_proj.weight"):
                tensors[name] = parameter.detach().clone()
                continue
            parts, values = quantized(kind, name.removesuffix(".weight"), parameter.detach().numpy())
            tensors |= parts
            parameter.data = torch.from_numpy(np.ascontiguousarray(values, np.float32))
        folder = HERE / kind
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        whole = json.loads((SOURCE / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(whole, indent=1) + "\n")
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        (folder / "golden.bin").write_bytes(logits.numpy().tobytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(str(SOURCE), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            blocks = gguf.quants.quantize(parameter.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    (HERE / "q8_0.bin").write_bytes(logits.numpy().tobytes())


if __name__ == "__main__":
    main()
