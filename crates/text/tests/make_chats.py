"""Writes chats.json: conversations rendered by Jinja2, set up as transformers sets it up.

    python make_chats.py MODELS_FOLDER    (needs: pip install gguf transformers)

The templates are those inside the model files; the texts are what our renderer must give byte for byte.
"""

import json
import pathlib
import sys

from gguf import GGUFReader
from transformers.utils.chat_template_utils import render_jinja_template

MODELS = {
    "smollm2": "smollm2-135m-instruct-q4_1.gguf",
    "qwen": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city — with <tags> & 'quotes'",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "東京"]},
                "days": {"type": "integer", "minimum": 1, "default": 1.0},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "東京", "days": 2, "ratio": 1e-7, "x": None}},
        }
    ],
}

CHATS = [
    {"messages": [user("Hi")]},
    {"messages": [user("Hi")], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "You answer in one word."}, user("The capital of France?")]},
    {"messages": [user("  spaces\n\n and tabs\t "), assistant("ok"), user("naïve 東京 🙂 \"quoted\" \\ <b>&amp;</b>")]},
    {"messages": [user("one"), assistant("two"), user("three"), assistant("four"), user("five")]},
    {"messages": [user("Weather?")], "tools": [WEATHER]},
    {"messages": [{"role": "system", "content": "Be brief."}, user("Weather?")], "tools": [WEATHER, WEATHER]},
    {
        "messages": [
            user("Weather?"),
            CALL,
            {"role": "tool", "name": "get_weather", "content": '{"temp": 21}'},
            {"role": "tool", "name": "get_weather", "content": "rain"},
            assistant("It rains."),
            user("Thanks"),
        ],
        "tools": [WEATHER],
    },
]


def main():
    folder = pathlib.Path(sys.argv[1])
    cases = []
    for model, file in MODELS.items():
        fields = GGUFReader(folder / file).fields
        template = fields["tokenizer.chat_template"].contents()
        tokens = fields["tokenizer.ggml.tokens"].contents()
        named = {
            name: tokens[fields[key].contents()]
            for name, key in [
                ("bos_token", "tokenizer.ggml.bos_token_id"),
                ("eos_token", "tokenizer.ggml.eos_token_id"),
            ]
        }
        for chat in CHATS:
            rendered, _ = render_jinja_template(
                conversations=[chat["messages"]],
                tools=chat.get("tools"),
                chat_template=template,
                add_generation_prompt=chat.get("add_generation_prompt", True),
                **named,
            )
            cases.append({"model": model, **chat, "text": rendered[0]})
    path = pathlib.Path(__file__).with_name("chats.json")
    path.write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


main()
