"""A model that takes the place of those of llama.cpp's tests, which only its hub has: a random llama of some numbers with a
tokenizer of another GGUF file: python llama_server_model.py TOKENIZER.gguf OUT.gguf.

It says nothing that makes sense, soon, as theirs (stories of 260 thousand numbers) do nearly.
"""

import sys

import gguf
import numpy

LAYERS, WIDTH, HEADS, INNER, CONTEXT = 2, 64, 4, 128, 32768

source, out = sys.argv[1:]
reader = gguf.GGUFReader(source)
writer = gguf.GGUFWriter(out, "llama")
writer.add_name("random llama")
writer.add_block_count(LAYERS)
writer.add_context_length(CONTEXT)
writer.add_embedding_length(WIDTH)
writer.add_feed_forward_length(INNER)
writer.add_head_count(HEADS)
writer.add_head_count_kv(HEADS)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(WIDTH // HEADS)
writer.add_file_type(0)
for name, field in reader.fields.items():
    if not name.startswith("tokenizer."):
        continue
    kind = field.types[0]
    value = field.contents()
    if kind == gguf.GGUFValueType.ARRAY:
        writer.add_array(name, value)
    else:
        writer.add_key_value(name, value, kind)
vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
random = numpy.random.default_rng(42)


def add(name, *shape):
    writer.add_tensor(name, (random.standard_normal(shape) / shape[-1] ** 0.5).astype(numpy.float32))


add("token_embd.weight", vocab, WIDTH)
for layer in range(LAYERS):
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        add(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
    add(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
    add(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
    add(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", numpy.ones(WIDTH, dtype=numpy.float32))
writer.add_tensor("output_norm.weight", numpy.ones(WIDTH, dtype=numpy.float32))
add("output.weight", vocab, WIDTH)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
