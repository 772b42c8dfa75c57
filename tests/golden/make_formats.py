"""Quantises SmolLM2 anew, to every GGUF format in turn, and writes what transformers computes with each.

    python tests/golden/make_formats.py SOURCE.gguf FOLDER [FORMAT ...]

Needs numpy, torch, transformers, gguf, and llama-cpp-python for llama.cpp's own quantiser (in libggml). The source's values
are what the `gguf` package dequantises, and all of them are equally important. In FOLDER: FORMAT.gguf, and FORMAT.json with
the prompts' tokens and the log-probabilities that transformers gives the next ones in float32, from weights that the `gguf`
package dequantised. So a difference is the error of a product, not what a format loses. What is there already is kept.

Rows of 576 values do not fill blocks of 256. For formats that have those, the same model is written with 768 (`widen`), so
that every matrix can be quantised; `f32-wide` is that model in F32, beside what transformers computes with the source
itself. With the IQ formats, whose quantiser is slow, the table of tokens and the head stay Q8_0.
"""

import ctypes
import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
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
WIDE = "f32-wide"


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

        def rows(part):
            values, out = part
            done = chunk(dtype, values.ctypes.data, out.ctypes.data, 0, *values.shape, important.ctypes.data)
            assert done == out.size, (dtype, done, out.size)

        parts = min(4 * os.cpu_count(), len(values))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(rows, zip(np.array_split(values, parts), np.array_split(out, parts))))
        return out

    return quantize


def values_of(reader):
    """Every tensor as f32, and what else the file says."""
    tensors = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = values.reshape([int(dim) for dim in reversed(tensor.shape)]).astype(np.float32)
    fields = {}
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            kinds = field.types
            fields[field.name] = (field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    return tensors, fields


def widen(tensors, fields):
    """The same function with hidden states of 768 values for 576, and 12 heads for 9; no weight is zero for it.

    Hidden states are turned by an orthonormal matrix, which RMSNorm does not see: it divides by the root of 768th parts
    where it divided by that of 576th, so weights of norms, which go into the matrices behind them, leave sqrt(576 / 768),
    and epsilon shrinks likewise. The last group of heads stands twice, and each of the two writes half.
    """
    narrow, wide, head = 576, 768, 64
    turn = np.linalg.qr(np.random.default_rng(576).normal(size=(wide, narrow)))[0]  # (wide, narrow)
    heads = np.r_[0:9, 6:9]
    kv_heads = np.r_[0:3, 2]

    def rows(matrix, which):
        return matrix.reshape(-1, head, matrix.shape[1])[which].reshape(-1, matrix.shape[1])

    def reads(matrix, norm):
        return (matrix.astype(np.float64) * norm) @ turn.T

    wider = {"token_embd.weight": reads(tensors["token_embd.weight"], 1.0)}
    for layer in range(fields["llama.block_count"][0]):
        old = {name: tensors[f"blk.{layer}.{name}.weight"] for name in
               ("attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}
        output = old["attn_output"].reshape(narrow, -1, head)[:, heads] * np.r_[np.ones(6), np.full(6, 0.5)][:, None]
        new = {
            "attn_norm": np.full(wide, np.sqrt(narrow / wide)),
            "ffn_norm": np.full(wide, np.sqrt(narrow / wide)),
            "attn_q": reads(rows(old["attn_q"], heads), old["attn_norm"]),
            "attn_k": reads(rows(old["attn_k"], kv_heads), old["attn_norm"]),
            "attn_v": reads(rows(old["attn_v"], kv_heads), old["attn_norm"]),
            "attn_output": turn @ output.reshape(narrow, wide),
            "ffn_gate": reads(old["ffn_gate"], old["ffn_norm"]),
            "ffn_up": reads(old["ffn_up"], old["ffn_norm"]),
            "ffn_down": turn @ old["ffn_down"],
        }
        wider |= {f"blk.{layer}.{name}.weight": values for name, values in new.items()}
    wider["output_norm.weight"] = np.full(wide, np.sqrt(narrow / wide))
    # The head shares the table's values, and has another norm before it.
    wider["output.weight"] = reads(tensors["token_embd.weight"], tensors["output_norm.weight"])
    facts = {"llama.embedding_length": wide, "llama.attention.head_count": 12, "llama.attention.head_count_kv": 4}
    epsilon = "llama.attention.layer_norm_rms_epsilon"
    facts[epsilon] = fields[epsilon][0] * narrow / wide
    said = fields | {name: (value, *fields[name][1:]) for name, value in facts.items()}
    return {name: values.astype(np.float32) for name, values in wider.items()}, said


def write(tensors, fields, dtype, path, quantize):
    """The model with its matrices in `dtype`; the share of their values that are."""
    writer = gguf.GGUFWriter(path, fields["general.architecture"][0])
    for name, (value, kind, of) in fields.items():
        if name != "general.architecture":
            writer.add_key_value(name, value, kind, of)
    quantized = values_all = 0
    for name, values in tensors.items():
        if values.ndim < 2 or dtype == T.F32:
            writer.add_tensor(name, values)
            continue
        values_all += values.size
        fits = values.shape[1] % gguf.GGML_QUANT_SIZES[dtype][0] == 0
        if dtype.name.startswith("IQ") and dtype != T.IQ4_NL:
            fits = fits and name.startswith("blk.")
        quantized += values.size if fits else 0
        other = dtype if fits else T.Q8_0
        writer.add_tensor(name, quantize(values, other), raw_dtype=other)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return quantized / max(values_all, 1)


def cases(model, prompts):
    """What a model of transformers gives the next token, at each place of each prompt."""
    made = []
    for tokens in prompts:
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)
        made.append({"tokens": tokens, "logprobs": [logprobs[at, token].item() for at, token in enumerate(tokens[1:])]})
    return made


def open_gguf(path):
    return transformers.AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)


def tokens_of(source):
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    return [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in PROMPTS]


def main():
    source, folder, *names = sys.argv[1:]
    source, folder = Path(source), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    quantize, prompts = quantizer(), tokens_of(source)
    tensors, fields = values_of(gguf.GGUFReader(source))
    wide = widen(tensors, fields)

    def save(name, share, model):
        described = {"model": f"{name}.gguf", "share": share, "cases": cases(model, prompts)}
        (folder / f"{name}.json").write_text(json.dumps(described))
        print(f"{name}: {share:.0%} of the matrices' values", flush=True)

    if not names and not (folder / f"{WIDE}.json").exists():
        write(*wide, T.F32, folder / f"{WIDE}.gguf", quantize)
        save(WIDE, 1.0, open_gguf(source))
    for dtype in [T[name.upper()] for name in names] or FORMATS:
        name = dtype.name.lower()
        if (folder / f"{name}.json").exists():
            continue
        path = folder / f"{name}.gguf"
        share = write(*(wide if gguf.GGML_QUANT_SIZES[dtype][0] == 256 else (tensors, fields)), dtype, path, quantize)
        save(name, share, open_gguf(path))


if __name__ == "__main__":
    main()
