#!/usr/bin/env python3
"""Stands where llama.cpp's own tests start `llama-server`: the same flags, and Fornax answers.

`FORNAX_BINARY` is the server, `FORNAX_STAND_INS` a folder with the models that take the place of those of the tests, which only
their hub has: `tiny.gguf` and, with tokens for gaps, `infill.gguf`. Encoders are all-MiniLM. What a flag asks for that Fornax has
no flag for is left out: the tests that need it fail, and are classified in `llama_server.json` beside this file.
"""

import os
import sys
import tempfile

SHORT = ("-fa", "-ctk", "-ctv")

arguments = sys.argv[1:]
flags = {}
while arguments:
    flag = arguments.pop(0)
    # Those that are followed by a value are told by what follows.
    has_value = arguments and not arguments[0].startswith("--") and arguments[0] not in SHORT
    flags[flag] = arguments.pop(0) if has_value else None

repository = (flags.get("--hf-repo") or "") + (flags.get("--hf-file") or "")
encoder = "bert" in repository or "reranker" in repository
stand_in = "infill.gguf" if "infill" in repository else "tiny.gguf"
model = "minilm" if encoder else os.path.join(os.environ["FORNAX_STAND_INS"], stand_in)
command = [
    os.environ["FORNAX_BINARY"], "serve", f"{flags.get('--alias') or 'model'}={model}",
    "--host", flags["--host"], "--port", flags["--port"],
    "--health-when-ready", "--any-model-name", "--log-level", "info",
]
slots = int(flags.get("--parallel") or 1)
command += ["--parallel", str(slots)]
if "--ctx-size" in flags:
    # There it is for all slots together.
    context = int(flags["--ctx-size"]) // (1 if "--kv-unified" in flags else slots)
    command += ["--context", str(min(context, 256) if encoder else context)]
if flags.get("--chat-template-file"):
    command += ["--chat-template-file", flags["--chat-template-file"]]
if flags.get("--pooling") and encoder:
    command += ["--pooling", flags["--pooling"]]
if flags.get("--cors-origins"):
    command += ["--cors-origin", flags["--cors-origins"]]
if flags.get("--api-key"):
    keys = tempfile.NamedTemporaryFile("w", delete=False, suffix=".keys")
    # A key has at least sixteen characters here; theirs may be shorter, and then the server does not start.
    keys.write(flags["--api-key"] + "\n")
    keys.close()
    os.chmod(keys.name, 0o600)
    command += ["--api-key-file", keys.name]
print("starting", *command, flush=True)
os.execv(command[0], command)
