"""Writes a tiny llama whose every matrix has another weight format, and the logits that transformers gives with it.

Run with Python, numpy, torch, transformers, gguf and llama-cpp-python:
    python crates/fornax/tests/packed/make_formats.py
Matrices are random, quantised by llama.cpp's own quantiser (tests/golden/make_formats.py); transformers reads the GGUF file
with the `gguf` package's dequantised values. formats.json has the tokens, formats.bin the logits of every position.
"""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as T

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location("make", HERE.parents[3] / "tests/golden/make_formats.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)

HIDDEN, HEAD, FFN, VOCAB, LAYERS = 256, 64, 64, 64, 3
# Rows of 256 values, then rows of 64: five and two of each layer.
WIDE = [T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS,
        T.TQ1_0, T.TQ2_0]
NARROW = [T.IQ4_NL, T.MXFP4, T.NVFP4, T.Q5_1, T.Q4_0, T.Q8_0]


def main():
    rng = np.random.default_rng(20261115)
    quantize = make.quantizer()
    path = HERE / "formats.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_dimension_count(HEAD)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)

    def add(name, rows, columns, dtype):
        values = rng.normal(0.0, 2.0 / np.sqrt(columns), (rows, columns)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", quantize(values, dtype), raw_dtype=dtype)

    def norm(name):
        writer.add_tensor(f"{name}.weight", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32))

    wide, narrow = iter(WIDE), iter(NARROW)
    add("token_embd", VOCAB, HIDDEN, T.Q8_0)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
        for name, rows in [("attn_q", HEAD), ("attn_k", HEAD), ("attn_v", HEAD), ("ffn_gate", FFN), ("ffn_up", FFN)]:
            add(f"blk.{layer}.{name}", rows, HIDDEN, next(wide))
        for name, columns in [("attn_output", HEAD), ("ffn_down", FFN)]:
            add(f"blk.{layer}.{name}", HIDDEN, columns, next(narrow))
    norm("output_norm")
    add("output", VOCAB, HIDDEN, T.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = rng.integers(0, VOCAB, 48).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(str(HERE), gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    (HERE / "formats.json").write_text(json.dumps({"tokens": tokens}) + "\n")
    (HERE / "formats.bin").write_bytes(logits.numpy().tobytes())


if __name__ == "__main__":
    main()
