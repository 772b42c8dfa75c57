"""A model that calls tools until it can answer: python3 agent.py SERVER QUESTION FOLDER [--model M] [--key KEY] [--must-call]"""

import argparse
import json
import pathlib
import urllib.request

ROUNDS = 8

parser = argparse.ArgumentParser()
parser.add_argument("server")
parser.add_argument("question")
parser.add_argument("folder", type=pathlib.Path)
parser.add_argument("--model")
parser.add_argument("--key", default="none")
parser.add_argument("--must-call", action="store_true")
args = parser.parse_args()


def files():
    return sorted(path.name for path in args.folder.iterdir() if path.is_file())


def read(name):
    # Only what is in the folder, whatever the model asks for.
    if name not in files():
        raise ValueError(f"there is no file {name!r}")
    return (args.folder / name).read_text()[:4000]


def add(numbers):
    return sum(numbers)


def tool(function, does, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": function.__name__, "description": does, "parameters": schema}}


ACTS = {function.__name__: function for function in (files, read, add)}
TOOLS = [
    tool(files, "Lists the files of the folder"),
    tool(read, "Reads a file", name={"type": "string"}),
    tool(add, "Adds numbers", numbers={"type": "array", "items": {"type": "number"}, "maxItems": 50}),
]


def ask(messages, choice):
    body = {"messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 400}
    if args.model:
        body["model"] = args.model
    headers = {"Authorization": f"Bearer {args.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{args.server}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def run(call):
    try:
        return json.dumps(ACTS[call["name"]](**json.loads(call["arguments"])))
    except Exception as error:
        # The model can do something about it.
        return f"failed: {error!r}"


messages = [{"role": "user", "content": args.question}]
for number in range(ROUNDS):
    answer = ask(messages, "required" if args.must_call and number == 0 else "auto")
    messages.append(answer)
    calls = answer.get("tool_calls") or []
    if not calls:
        print(answer["content"])
        break
    for call in calls:
        result = run(call["function"])
        print(f"calls {call['function']['name']}({call['function']['arguments']}): {result[:100]}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
else:
    print(f"no answer after {ROUNDS} rounds")
