"""Runs llama.cpp as PyPI's llama-cpp-python builds it for this machine, and prints what speed.rs prints of Fornax.

python native.py MODEL THREADS

Straight through its C interface: no server, no sampler, the largest logit is the next token.
"""

import ctypes
import sys
import time

import numpy as np
from figures import tell
from llama_cpp import llama_cpp as lib

STREAMS, CONTEXT = 8, 1024
path, threads = sys.argv[1], int(sys.argv[2])
quiet = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(quiet, ctypes.c_void_p(0))
lib.llama_backend_init()
start = time.time()
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_seq_max = STREAMS * CONTEXT, STREAMS
params.n_batch = params.n_ubatch = 512
params.n_threads = params.n_threads_batch = threads
context = lib.llama_init_from_model(model, params)
load = time.time() - start
vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
batch = lib.llama_batch_init(512, 0, 1)


def step(position, tokens):
    """Computes these tokens of the first sequences, each from `position` on; the next token of each."""
    count = 0
    for stream, these in enumerate(tokens):
        for at, token in enumerate(these):
            batch.token[count], batch.pos[count] = token, position + at
            batch.n_seq_id[count], batch.seq_id[count][0] = 1, stream
            batch.logits[count] = at == len(these) - 1
            count += 1
    batch.n_tokens = count
    if lib.llama_decode(context, batch) != 0:
        sys.exit("llama_decode failed")
    ends = np.cumsum([len(these) for these in tokens]) - 1
    logits = (lib.llama_get_logits_ith(context, int(end)) for end in ends)
    return [[int(np.argmax(np.ctypeslib.as_array(row, (vocab,))))] for row in logits]


def prompt(streams, tokens):
    lib.llama_memory_clear(lib.llama_get_memory(context), False)
    return step(0, [[i * 7919 % 32000 for i in range(tokens)]] * streams)


def decode(streams, tokens):
    """Tokens per second of all streams together."""
    following = prompt(streams, 32)
    start = time.time()
    for token in range(tokens):
        following = step(32 + token, following)
    return streams * tokens / (time.time() - start)


# Weights and caches are touched before anything counts.
decode(1, 8)
start = time.time()
prompt(1, 512)
figures = [512 / (time.time() - start), decode(1, 64), decode(STREAMS, 32)]
tell(load, *figures, lib.llama_print_system_info().decode())
