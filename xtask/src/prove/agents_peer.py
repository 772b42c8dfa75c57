"""Gives llama.cpp (PyPI's xllamacpp) the load of agents.rs and prints how long it took and what it computed.

python agents_peer.py MODEL THREADS CONTEXT FIRST AGENTS TURNS MORE ANSWER
"""

import json
import sys
import threading
import time
import urllib.request

import xllamacpp

model, numbers = sys.argv[1], [int(number) for number in sys.argv[2:]]
threads, context, first, agents, turns, more, answer = numbers
params = xllamacpp.CommonParams()
params.model.path = model
params.n_parallel = agents
# It is shared out among the agents.
params.n_ctx = agents * -(-context // 256) * 256
params.n_batch = params.n_ubatch = 512
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.verbosity = -1
params.warmup = False
server = xllamacpp.Server(params)
address = server.listening_address
computed = [[] for _ in range(agents)]
failed = []


def converse(agent):
    tokens = []
    for turn in range(turns):
        known = len(tokens)
        said = first if turn == 0 else more - answer
        tokens += [300 + ((known + place) * 7919 + agent * 104729) % 700 for place in range(said)]
        request = dict(prompt=tokens, n_predict=answer, temperature=0, ignore_eos=True, return_tokens=True)
        request.update(cache_prompt=True, id_slot=agent)
        body = json.dumps(request).encode()
        asked = urllib.request.Request(address + "/completion", body, {"Content-Type": "application/json"})
        reply = json.load(urllib.request.urlopen(asked))
        if len(reply.get("tokens", [])) != answer:
            failed.append(str(reply)[:500])
            return
        computed[agent].append(reply["timings"]["prompt_n"])
        tokens += reply["tokens"]


began = time.time()
workers = [threading.Thread(target=converse, args=(agent,)) for agent in range(agents)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
if failed:
    sys.exit(failed[0])
if any(len(one) != turns for one in computed):
    sys.exit("a conversation ended before its last turn")
seconds = time.time() - began
print(json.dumps(dict(seconds=seconds, later=sum(sum(one[1:]) for one in computed), first=[one[0] for one in computed])))
