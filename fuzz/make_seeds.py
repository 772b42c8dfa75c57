"""Writes the seeds of what callers and strangers send: frames, forms, bodies, adapters, tokenizer files.

The bytes of frames are put together here from docs/private.md and not by our own writer. Python's standard library is
enough. (Seeds of GGUF and safetensors are written by crates/format/tests/make_files.py.)
"""

import json
import shutil
import struct
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
ADAPTERS = Path(__file__).parent.parent / "crates/model/tests/fixtures/adapters"


def write(target, seeds):
    folder = SEEDS / target
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in seeds.items():
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def frame(kind, body=b""):
    return struct.pack("<IB", len(body), kind) + body


def draw(counter, matrix, rows):
    return struct.pack("<QII", counter, matrix, rows)


INFO = {
    "protocol": "blind2", "version": 1, "party": 0, "ring_bits": 32, "weights": {"sha256": "ab" * 32, "quant": "q"},
    "dims": [[4, 3], [1, 8]], "positions_max": 100, "leaks": ["rows"], "assumes": [], "demo_single_host": True,
    "instance": "1",
}
write("frame", {
    # The first byte says who reads: party 0, party 1, a client that awaits anything, one that awaits a product.
    "zero": b"\0" + frame(1) + frame(2, struct.pack("<II", 1, 7))
    + frame(3, draw(0, 0, 2) + struct.pack("<6I", *range(6))) + frame(4),
    "zero-row": b"\0" + frame(3, draw(6, 1, 1) + struct.pack("<8I", *range(8))),
    "one": b"\1" + frame(1) + frame(2, struct.pack("<II", 1, 7) + bytes(range(32)))
    + frame(3, draw(0, 0, 2) + draw(6, 3, 2) + draw(10, 2, 1)) + frame(4),
    "one-few": b"\1" + frame(3, draw(0, 3, 3)),
    "replies": b"\2" + frame(129, json.dumps(INFO).encode()) + frame(130, struct.pack("<Q", 9)) + frame(132, b"no"),
    "product": b"\3" + frame(131, struct.pack("<Q5I", 3, *range(5))) + frame(132, "nö".encode()),
})

SCHEMAS = {
    "object": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"type": "string",
        "maxLength": 5}}, "required": ["a"], "additionalProperties": False},
    "any": {"anyOf": [{"type": "null"}, {"enum": ["x", 1, True]}, {"const": {"k": []}}]},
    "ref": {"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"},
        {"type": "null"}]}}, "required": ["next"]}}, "$ref": "#/$defs/n"},
    "all": {"allOf": [{"type": "string", "pattern": "^a.*"}, {"pattern": "b$"}, {"minLength": 2}]},
    "formats": {"type": "array", "items": {"type": "string", "format": "date-time"}, "minItems": 1, "maxItems": 3},
    "prefix": {"type": "array", "prefixItems": [{"type": "number", "multipleOf": 0.5}, {"type": "boolean"}]},
    "names": {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "minProperties": 1},
}
write("form", {f"schema-{name}": "s" + json.dumps(schema) for name, schema in SCHEMAS.items()} | {
    "regex": r"r(a|b)+\d{2,4}[^x-z]?(?i:end)",
    "regex-class": r"r\p{L}+(\s|\.){0,3}$",
    "choice": "cyes\nno\nmaybe \"so\"",
    "grammar": 'gstart: item ("," item)*\nitem: WORD | NUMBER\nWORD: /[a-z]+/\nNUMBER: /[0-9]+/\n',
    "grammar-rules": 'gstart: a | b\na[lazy]: /x.*y/\nb: "(" start ")" | "z"{2,5}\n%ignore / +/\n',
    "grammar-meet": 'gstart: "v" MEET\nMEET: /[ab][0-9]*/ & ~/b.*/\n',
    "grammar-json": 'gstart: "v" obj\nobj: %json {"type": "object"}\n',
})

TEXT = "Tell me"
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": TEXT}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": {
        "name": "look", "arguments": "{\"at\":\"sky\"}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "blue"}, {"role": "user", "content": "And?"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks", "strict": True, "parameters": {
    "type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}}}
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 7, "stop": ["x"], "logit_bias": {"65": 2},
    "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "max_tokens": 5, "n": 2}
FILE = "\r\n".join(["--B", 'Content-Disposition: form-data; name="purpose"', "", "batch", "--B",
    'Content-Disposition: form-data; name="file"; filename="a.jsonl"', "Content-Type: application/jsonl", "",
    json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}), "--B--", ""])
BODIES = {
    "completions": ("/v1/completions", {"prompt": TEXT, "logprobs": 2, "echo": True, **SAMPLING}),
    "completions-tokens": ("/v1/completions", {"prompt": [[72, 105], [72]], "stream": True, "max_tokens": 3,
        "stream_options": {"include_usage": True}}),
    "completions-form": ("/v1/completions", {"prompt": "a", "guided_regex": "[ab]+", "max_tokens": 4}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "tools": [TOOL], "tool_choice": "auto", **SAMPLING, "n": 1}),
    "chat-stream": ("/v1/chat/completions", {"messages": CHAT[:2], "stream": True, "logprobs": True, "top_logprobs": 3,
        "max_completion_tokens": 4, "chat_template_kwargs": {"enable_thinking": True}}),
    "chat-form": ("/v1/chat/completions", {"messages": CHAT[1:2], "max_tokens": 8, "response_format": {
        "type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMAS["object"]}}}),
    "chat-demanded": ("/v1/chat/completions", {"messages": CHAT[1:2], "tools": [TOOL], "max_tokens": 20,
        "tool_choice": {"type": "function", "function": {"name": "look"}}, "parallel_tool_calls": False}),
    "embeddings": ("/v1/embeddings", {"input": [TEXT, "b"], "encoding_format": "base64", "dimensions": 3}),
    "rerank": ("/v1/rerank", {"query": TEXT, "documents": ["a", {"text": "b"}], "top_n": 1}),
    "tokenize": ("/tokenize", {"content": TEXT, "with_pieces": True, "add_special": True}),
    "detokenize": ("/detokenize", {"tokens": [72, 105, 300]}),
    "messages": ("/v1/messages", {"model": "script", "max_tokens": 4, "system": [{"type": "text", "text": "Be."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"at": "sky"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "blue"}]}],
        "tools": [{"name": "look", "input_schema": TOOL["function"]["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"]}),
    "count": ("/v1/messages/count_tokens", {"model": "script", "messages": [{"role": "user", "content": TEXT}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "blue"}], "instructions": "Be.", "stream": True,
        "max_output_tokens": 16, "text": {"format": {"type": "json_object"}}, "tools": [{"type": "function",
            "name": "look", "parameters": TOOL["function"]["parameters"]}], "reasoning": {"effort": "low"}}),
    "ollama-chat": ("/api/chat", {"model": "script", "messages": CHAT[:1], "stream": False, "think": False,
        "options": {"num_predict": 3, "temperature": 0, "stop": ["x"]}, "format": SCHEMAS["object"], "keep_alive": "5m"}),
    "ollama-generate": ("/api/generate", {"model": "script", "prompt": TEXT, "system": "Be.", "raw": False,
        "options": {"num_predict": 2}}),
    "ollama-embed": ("/api/embed", {"model": "script", "input": [TEXT], "truncate": True}),
    "ollama-show": ("/api/show", {"model": "script"}),
    "llama": ("/completion", {"prompt": TEXT, "n_predict": 3, "n_probs": 2, "json_schema": SCHEMAS["any"],
        "return_tokens": True, "cache_prompt": True}),
    "template": ("/apply-template", {"messages": CHAT}),
    "execute": ("/execute", {"job_id": "job-1", "prompt": TEXT, "max_tokens": 3, "temperature": 0.5}),
    "cancel": ("/cancel", {"job_id": "job-1"}),
    "run": ("/v2/default/runsync", {"input": {"prompt": TEXT, "max_tokens": 3, "schema": SCHEMAS["object"]},
        "policy": {"executionTimeout": 5000, "ttl": 60000}, "webhook": None}),
    "run-items": ("/v2/default/run", {"input": {"items": [{"id": "a", "text": "x"}, {"id": "b", "messages": CHAT[:1]}],
        "shared_prefix": "p", "max_tokens": 2, "temperature": 0}}),
    "batches": ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"a": "b"}}),
    "files": ("/v1/files", FILE),
}
# The first line is the route, the rest the body.
write("body", {name: f"{path}\n{body if isinstance(body, str) else json.dumps(body)}"
    for name, (path, body) in BODIES.items()})

write("adapter", {name: (ADAPTERS / name / "adapter_config.json").read_bytes() + b"\xffFILE\xff"
    + (ADAPTERS / name / "adapter_model.safetensors").read_bytes() for name in ["llama-qv", "qwen2-all"]})


def tokenizer(model):
    """A small file of a model that the `tokenizers` crate has, with most of its parts."""
    def special(name):
        return {"SpecialToken": {"id": name, "type_id": 0}}

    def sequence(name, kind):
        return {"Sequence": {"id": name, "type_id": kind}}
    return json.dumps({"version": "1.0", "model": model,
        "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": {"strategy": {"Fixed": 4}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "<unk>"},
        "added_tokens": [{"id": 7, "content": "<x>", "special": True, "normalized": False, "lstrip": False,
            "rstrip": False, "single_word": False}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"Regex": " +"}, "content": "▁"}, {"type": "Lowercase"},
            {"type": "Strip", "strip_left": True, "strip_right": False}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "(?=a)\\w+|\\s"}, "behavior": "Isolated", "invert": False},
            {"type": "Digits", "individual_digits": True}, {"type": "Metaspace", "replacement": "▁",
                "prepend_scheme": "first", "split": True}]},
        "post_processor": {"type": "TemplateProcessing", "single": [special("<x>"), sequence("A", 0)],
            "pair": [sequence("A", 0), sequence("B", 0)],
            "special_tokens": {"<x>": {"id": "<x>", "ids": [7], "tokens": ["<x>"]}}},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}},
        ensure_ascii=False)


write("tokenizer", {
    "bpe": tokenizer({"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True,
        "vocab": {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "ab": 4, "▁": 5, "<0x0A>": 6}, "merges": ["a b"]}),
    "unigram": tokenizer({"type": "Unigram", "unk_id": 0, "byte_fallback": False,
        "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0], ["▁ab", -1.5]]}),
    "wordpiece": tokenizer({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "a": 1, "##b": 2}}),
    "wordlevel": tokenizer({"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0, "ab": 1}}),
})
