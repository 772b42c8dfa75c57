"""llama.cpp's server, as the package `xllamacpp` has it, until standard input ends: python llama_peer.py GGUF CONTEXT SLOTS.

It answers at the address in its first line.
"""

import sys

import xllamacpp

gguf, context, slots = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path = gguf
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_parallel = int(slots)
# There it is for all slots together.
params.n_ctx = int(context) * int(slots)
params.warmup = False
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
