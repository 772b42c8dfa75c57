"""Quantises a model of the llama family anew, to every format in turn, and writes what transformers computes with each.

    python tests/golden/make_formats.py SOURCE.gguf FOLDER [FORMAT ...]

Needs numpy, torch, transformers, gguf, and llama-cpp-python for llama.cpp's own quantiser (in libggml). The source's values
are what the `gguf` package dequantises; every matrix whose rows fill whole blocks of a format is quantised to it, with all
values equally important, and the others stay in Q8_0 or F32. In FOLDER: FORMAT.gguf, and FORMAT.json with the prompts'
tokens and the log-probabilities that transformers gives the next ones in float32, from weights that the `gguf` package
dequantised. So a difference is the error of a product, not what a format loses.
"""

import ctypes
import importlib.util
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T

FORMATS = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ1_S, T.IQ1_M, T.IQ2_XXS,
           T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_NL, T.IQ4_XS, T.TQ1_0, T.TQ2_0, T.MXFP4, T.NVFP4]
PROMPTS = [
    "The sky is blue because sunlight is scattered by the molecules of the air, and blue light is scattered more than red.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
]


def quantizer():
    """llama.cpp's quantiser, from its library."""
    folder = Path(importlib.util.find_spec("llama_cpp").submodule_search_locations[0]) / "lib"
    library = ctypes.CDLL(folder / "libggml-base.so")
    chunk = library.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]

    def quantize(values, dtype):
        values = np.ascontiguousarray(values, np.float32)
        block, size = gguf.GGML_QUANT_SIZES[dtype]
        out = np.zeros((values.shape[0], values.shape[1] // block * size), np.uint8)
        important = np.ones(values.shape[1], np.float32)
        done = chunk(dtype, values.ctypes.data, out.ctypes.data, 0, *values.shape, important.ctypes.data)
        assert done == out.size, (dtype, done, out.size)
        return out

    return quantize


def write(reader, dtype, path, quantize):
    """The model with its matrices in `dtype`; how many of its values are."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    quantized = values_all = 0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values = values.reshape([int(dim) for dim in reversed(tensor.shape)]).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        values_all += values.size
        fits = values.shape[1] % gguf.GGML_QUANT_SIZES[dtype][0] == 0
        quantized += values.size if fits else 0
        other = dtype if fits else T.Q8_0
        writer.add_tensor(tensor.name, quantize(values, other), raw_dtype=other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return quantized / values_all


def main():
    source, folder, *names = sys.argv[1:]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    reader, quantize = gguf.GGUFReader(source), quantizer()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(Path(source).parent), gguf_file=Path(source).name)
    prompts = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in PROMPTS]
    for dtype in [T[name.upper()] for name in names] or FORMATS:
        path = folder / f"{dtype.name.lower()}.gguf"
        share = write(reader, dtype, path, quantize)
        model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=path.name, dtype=torch.float32)
        cases = []
        for tokens in prompts:
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0].double()
            logprobs = torch.log_softmax(logits, -1)
            next_ones = [logprobs[at, token].item() for at, token in enumerate(tokens[1:])]
            cases.append({"tokens": tokens, "logprobs": next_ones})
        (folder / f"{dtype.name.lower()}.json").write_text(json.dumps({"share": share, "cases": cases}))
        print(f"{dtype.name}: {share:.0%} of the matrices' values", flush=True)


if __name__ == "__main__":
    main()
