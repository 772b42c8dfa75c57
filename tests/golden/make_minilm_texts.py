"""Embeddings of texts as sentence-transformers makes them with all-MiniLM-L6-v2: transformers in float32, the mean over all
tokens, length one.

    pip install torch transformers
    python tests/golden/make_minilm_texts.py FOLDER > tests/golden/minilm-texts.json

FOLDER holds the model, as `fornax pull minilm` leaves it in `models/all-minilm-l6-v2` of the cache folder.
"""

import json
import sys

import torch
from transformers import AutoTokenizer, BertModel

TEXTS = [
    "This is an example sentence.",
    "A cat sleeps on the warm windowsill.",
    "Stocks fell sharply on Tuesday; e.g. 3.5% in Zürich.",
    "naïve café — ÉCOLE, 東京 \"quoted\"\ttabs",
    "word " * 200,
]

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = BertModel.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
cases = []
for text in TEXTS:
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        mean = model(**inputs).last_hidden_state[0].mean(0)
    embedding = (mean / mean.norm()).tolist()
    cases.append({"text": text, "tokens": inputs["input_ids"].shape[1], "embedding": [round(x, 7) for x in embedding]})
json.dump(cases, sys.stdout, ensure_ascii=False)
print()
