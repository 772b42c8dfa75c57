"""Embeddings of SmolLM2 by transformers, from the dequantised weights, for the test of /v1/embeddings.

    pip install torch transformers gguf
    python tests/golden/make_embeddings.py FOLDER_OF_THE_GGUF > tests/golden/smollm2-embeddings.json

A text's embedding is the last hidden state, after the last norm, of its last token, scaled to length one. Token ids are
those of `fornax tokenize`, which other golden data prove right.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

CASES = [
    ("The sky is blue because", [504, 6376, 314, 4461, 975]),
    ("A cat sleeps on the sofa.", [49, 2644, 2801, 99, 335, 260, 588, 12155, 30]),
    ("A kitten naps on the couch.", [49, 42262, 304, 1810, 335, 260, 33172, 30]),
    ("def add(a, b):\n    return a + b\n", [1604, 803, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278, 198]),
]

model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], gguf_file="smollm2-135m-instruct-q4_1.gguf", torch_dtype=torch.float32
).eval()
cases = []
for text, tokens in CASES:
    with torch.no_grad():
        hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, -1].double()
    embedding = [round(value, 6) for value in (hidden / hidden.norm()).tolist()]
    cases.append({"text": text, "tokens": tokens, "embedding": embedding})
json.dump(cases, sys.stdout)
