"""Answers a question from texts: embeds, reranks, asks.
python3 retrieve.py SERVER QUESTION FILE... [--chat MODEL] [--embed MODEL] [--rerank MODEL] [--key KEY]"""

import argparse
import json
import pathlib
import urllib.request

NEAREST, BEST = 10, 3
# Characters of a paragraph that an encoder of 512 tokens can read.
LONGEST = 1000

parser = argparse.ArgumentParser()
parser.add_argument("server")
parser.add_argument("question")
parser.add_argument("files", nargs="+", type=pathlib.Path)
parser.add_argument("--chat", default="smollm2")
parser.add_argument("--embed", default="minilm")
parser.add_argument("--rerank", default="minilm")
parser.add_argument("--key", default="none")
args = parser.parse_args()


def call(path, body):
    headers = {"Authorization": f"Bearer {args.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(args.server + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def embeddings(texts):
    return [one["embedding"] for one in call("/v1/embeddings", {"model": args.embed, "input": texts})["data"]]


paragraphs = []
for file in args.files:
    for text in file.read_text().split("\n\n"):
        if text.strip():
            paragraphs.append((file.name, text.strip()[:LONGEST]))

# 1. Which paragraphs are about it: embeddings have length one, so their product is the cosine.
texts = [text for _, text in paragraphs]
vectors = [vector for start in range(0, len(texts), 64) for vector in embeddings(texts[start : start + 64])]
[asked] = embeddings([args.question])
scores = [sum(a * b for a, b in zip(asked, vector)) for vector in vectors]
nearest = sorted(range(len(texts)), key=lambda index: -scores[index])[:NEAREST]

# 2. Which of them answer it: a reranker reads question and paragraph together.
ranked = call("/v1/rerank", {"model": args.rerank, "query": args.question, "documents": [texts[index] for index in nearest], "top_n": BEST})
chosen = [nearest[one["index"]] for one in ranked["results"]]
for one, index in zip(ranked["results"], chosen):
    print(f"{one['relevance_score']:.3f}  {paragraphs[index][0]}: {texts[index][:80]!r}")

# 3. The answer, from these alone.
sources = "\n\n".join(f"[{paragraphs[index][0]}]\n{texts[index]}" for index in chosen)
messages = [
    {"role": "system", "content": "Answer from the sources alone, and name the one you used. Say so if they do not answer it."},
    {"role": "user", "content": f"Sources:\n\n{sources}\n\nQuestion: {args.question}"},
]
answer = call("/v1/chat/completions", {"model": args.chat, "messages": messages, "temperature": 0, "max_tokens": 200})
print(answer["choices"][0]["message"]["content"])
