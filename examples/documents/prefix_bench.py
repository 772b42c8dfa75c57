"""What a shared prompt saves: 50 short documents under one long task, as one batch and as jobs that share nothing.

    fornax serve --port 8080 --context 8192
    python3 examples/documents/prefix_bench.py http://127.0.0.1:8080 [DOCUMENTS] [KEY]
"""

import json
import sys
import time
import urllib.request

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["invoice", "receipt", "other"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
# Some four thousand tokens: rules as a bookkeeper's handbook has them.
TASK = "Say what each document is. " + " ".join(
    f"Rule {n}: a document of kind {n % 40} that names an amount due is an invoice, unless rule {n + 7} says otherwise."
    for n in range(130)
)


def call(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{BASE}/v2/default/{path}", data=data, headers={"Content-Type": "application/json"})
    if KEY:
        request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def ended(job):
    while True:
        status = call(f"status/{job['id']}")
        if status["status"] not in ("IN_QUEUE", "IN_PROGRESS"):
            assert status["status"] == "COMPLETED", status
            return status["output"]["metadata"]["usage"]
        time.sleep(0.2)


def show(name, began, usages):
    prompt, cached = (sum(usage[field] for usage in usages) for field in ("prompt", "cached"))
    seconds = time.time() - began
    print(f"{name}: {seconds:.1f} s, {prompt - cached} of {prompt} prompt tokens computed", flush=True)
    return seconds, prompt - cached


BASE = sys.argv[1].rstrip("/")
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 50
KEY = sys.argv[3] if len(sys.argv) > 3 else None
documents = [f"Document {n}: {n} chairs, total {n * 20}.00 EUR, please pay." for n in range(COUNT)]
params = {"schema": SCHEMA, "temperature": 0, "max_tokens": 30}

began = time.time()
items = [{"id": str(n), "text": text} for n, text in enumerate(documents)]
usage = ended(call("run", {"input": {"shared_prefix": TASK, "items": items, **params}}))
shared = show("shared", began, [usage])

began = time.time()
jobs = []
for n, text in enumerate(documents):
    messages = [{"role": "system", "content": TASK}, {"role": "user", "content": text}]
    # Under a salt of its own no job finds another's prefix.
    jobs.append(call("run", {"input": {"messages": messages, "cache_salt": f"own-{n}", **params}}))
alone = show("not shared", began, [ended(job) for job in jobs])
print(f"{alone[1] / shared[1]:.1f} times fewer prompt tokens computed, {alone[0] / shared[0]:.1f} times faster")
