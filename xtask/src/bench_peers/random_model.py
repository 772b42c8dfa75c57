"""Writes a GGUF file of the shape of Qwen2.5-0.5B with random weights: python random.py f16-or-q8_0-or-bf16 FILE

Speed does not depend on the weights' values as long as they are ordinary numbers.
"""

import sys

import gguf
import numpy as np
from gguf import GGMLQuantizationType as T

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 24, 896, 4864, 14, 2, 151936
dtype, path = T[sys.argv[1].upper()], sys.argv[2]
rng = np.random.default_rng(1)
writer = gguf.GGUFWriter(path, "qwen2")
writer.add_context_length(32768)
writer.add_embedding_length(HIDDEN)
writer.add_block_count(LAYERS)
writer.add_feed_forward_length(FFN)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KV_HEADS)
writer.add_rope_freq_base(1e6)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list([f"t{i}" for i in range(VOCAB)])
writer.add_token_types([1] * VOCAB)
writer.add_token_merges(["t 0"])
writer.add_eos_token_id(VOCAB - 1)


def matrix(name, rows, columns):
    # One random tensor of each shape would compress in no cache either, but would be copied: make them all.
    values = rng.standard_normal((rows, columns), dtype=np.float32) * 0.03
    writer.add_tensor(name, gguf.quants.quantize(values, dtype), raw_dtype=dtype)


def vector(name, size, mean=0.0):
    writer.add_tensor(name, rng.standard_normal(size, dtype=np.float32) * 0.01 + np.float32(mean))


matrix("token_embd.weight", VOCAB, HIDDEN)
vector("output_norm.weight", HIDDEN, 1.0)
for layer in range(LAYERS):
    block = f"blk.{layer}."
    vector(block + "attn_norm.weight", HIDDEN, 1.0)
    vector(block + "ffn_norm.weight", HIDDEN, 1.0)
    for name, rows in (("attn_q", HIDDEN), ("attn_k", 128), ("attn_v", 128)):
        matrix(f"{block}{name}.weight", rows, HIDDEN)
        vector(f"{block}{name}.bias", rows)
    matrix(block + "attn_output.weight", HIDDEN, HIDDEN)
    matrix(block + "ffn_gate.weight", FFN, HIDDEN)
    matrix(block + "ffn_up.weight", FFN, HIDDEN)
    matrix(block + "ffn_down.weight", HIDDEN, FFN)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
