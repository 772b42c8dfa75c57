"""Embeddings of texts by sentence-transformers with all-MiniLM-L6-v2, in float32.

    pip install sentence-transformers==6.2.0
    python tests/golden/make_minilm_texts.py FOLDER > tests/golden/minilm-texts.json

FOLDER holds the model, as `fornax pull minilm` leaves it in `models/all-minilm-l6-v2` of the cache folder. The modules are
those that its modules.json names: Transformer, Pooling (mean), Normalize. All texts are encoded as one batch, with room for
the 512 tokens that the model has positions for.

Its sentence_bert_config.json has sentence-transformers drop what is beyond 256 tokens. `cut` is what it makes of a text then:
the same as of as many words as it keeps. No text names a control token: here that is text, there it is the token.
"""

import json
import sys

import sentence_transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

TEXTS = [
    "This is an example sentence.",
    "A cat sleeps on the warm windowsill.",
    "",
    " \n\t ",
    "Stocks fell sharply on Tuesday; e.g. 3.5% in Zürich.",
    "naïve café — ÉCOLE, 東京 \"quoted\"\ttabs",
    "Ελληνικά, русский, عربى, हिन्दी, 한국어 🙂👩‍💻 ﬁ ǅ İstanbul ß",
    "e\u0301 and \u00e9, \u00ad soft, \u200bzero width, \ufffd",
    "antidisestablishmentarianism " + "x" * 300,
    "word " * 200,
    "The sky is blue because sunlight is scattered by the molecules of the air. " * 30,
]
KEPT = 254  # and two tokens around them

transformer = modules.Transformer(sys.argv[1], max_seq_length=512)
pooling = modules.Pooling(transformer.get_embedding_dimension(), pooling_mode="mean")
model = SentenceTransformer(modules=[transformer, pooling, modules.Normalize()], device="cpu")
embeddings = model.encode(TEXTS, batch_size=len(TEXTS))


def case(text, embedding):
    tokens = int(transformer.tokenizer(text, return_tensors="pt")["input_ids"].shape[1])
    return {"text": text, "tokens": tokens, "embedding": [round(float(x), 7) for x in embedding]}


cases = [case(text, embedding) for text, embedding in zip(TEXTS, embeddings)]
model.max_seq_length = 256
cut = case("word " * KEPT, model.encode("word " * 300))
made = {"sentence_transformers": sentence_transformers.__version__, "cases": cases, "cut": cut}
json.dump(made, sys.stdout, ensure_ascii=False)
print()
