"""Runs llama.cpp (PyPI's xllamacpp) on a model file and prints what crates/model/examples/speed.rs prints of Fornax.

python wheel.py MODEL THREADS
"""

import json
import sys
import threading
import time

import xllamacpp
from figures import tell

model, threads = sys.argv[1], int(sys.argv[2])
start = time.time()
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx = 8 * 1024
params.n_parallel = 8
params.n_batch = params.n_ubatch = 512
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.verbosity = -1
params.warmup = False
server = xllamacpp.Server(params)
load = time.time() - start


def run(tokens, count, seed=0):
    """A prompt of so many tokens and so many greedy ones behind it; how long they took."""
    prompt = [(i * 7919 + seed) % 32000 for i in range(tokens)]
    request = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    reply = server.handle_completions(request)
    return (reply if isinstance(reply, dict) else json.loads(reply))["timings"]


def streams():
    """Tokens per second of eight requests at once, while they generate."""
    timings = [None] * 8

    def one(index):
        timings[index] = run(32, 32, index)

    workers = [threading.Thread(target=one, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(t["predicted_n"] for t in timings) / max(t["predicted_ms"] for t in timings) * 1e3


# Weights and caches are touched before anything counts.
run(32, 8)
figures = [run(512, 1)["prompt_per_second"], run(32, 64)["predicted_per_second"], streams()]
tell(load, *figures, xllamacpp.get_system_info())
