"""Writes a GGUF file's weights as a Hugging Face folder in F16, for measuring what quantising on load costs.

    python tests/golden/expand_gguf.py SOURCE.gguf FOLDER

Needs numpy, gguf and safetensors. Llama and Qwen2 with byte-level BPE. Dequantised values are rounded to F16, once.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from safetensors.numpy import save_file

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE = {
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTES],
    "qwen2": [
        {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False},
        BYTES | {"use_regex": False},
    ],
}


def name_of(tensor):
    *block, name, kind = tensor.split(".")
    return ".".join((["model.layers", block[1]] if block else []) + [NAMES[name], kind])


def main(source, folder):
    reader = gguf.GGUFReader(source)
    field = lambda key: reader.fields[key].contents()
    kind = field("general.architecture")
    heads, kv_heads = field(f"{kind}.attention.head_count"), field(f"{kind}.attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        if kind == "llama" and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            # Pairs that are turned together lie side by side in the file, and half a head apart here.
            count = heads if "attn_q" in tensor.name else kv_heads
            values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        tensors[name_of(tensor.name)] = np.ascontiguousarray(values)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    config = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[kind]],
        "model_type": kind,
        "hidden_size": field(f"{kind}.embedding_length"),
        "intermediate_size": field(f"{kind}.feed_forward_length"),
        "num_hidden_layers": field(f"{kind}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field(f"{kind}.context_length"),
        "rms_norm_eps": field(f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_theta": field(f"{kind}.rope.freq_base"),
        "vocab_size": len(tokens),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float16",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    special = [
        {"id": i, "content": token, "special": types[i] == 3, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, token in enumerate(tokens) if types[i] in (3, 4)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "NFC"} if kind == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE[field("tokenizer.ggml.pre")]},
        "post_processor": None,
        "decoder": BYTES,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": field("tokenizer.ggml.merges"),
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
