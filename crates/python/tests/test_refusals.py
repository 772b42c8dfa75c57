"""What is wrong is refused by name, with a code."""

from __future__ import annotations

import pickle
from typing import Any

import fornax
import pytest


def refused(code: str, words: str, act: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(fornax.Error) as raised:
        act(*args, **options)
    assert raised.value.code == code, raised.value
    assert words in str(raised.value), raised.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1.0}, "unknown field `temprature`"),
        ({"temperature": "hot"}, "temperature: invalid type"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_k": -1}, "top_k: invalid value"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"mirostat": 3}, "mirostat is 3"),
        ({"regex": "a", "choice": ["b"]}, "exclude each other"),
        ({"tools": [{"name": "f"}]}, "belong to a chat"),
        ({"stop": ["x"] * 100}, "100 stop strings"),
        ({"bad_words": ["x", ""]}, "bad_words holds an empty text"),
        ({"allowed_tokens": [1 << 30]}, "1073741824"),
    ],
)
def test_an_option_is_refused_by_its_name(model: fornax.Model, options: dict[str, Any], words: str) -> None:
    refused("INVALID_INPUT", words, model.generate, "x", **options)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[1]: content is missing"),
        ({"role": "clown", "content": "x"}, "messages[1]: unknown variant `clown`"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1]: content must be a text"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[1]: unknown field `colour`"),
        ({"role": "tool", "content": "x"}, "messages[1]: tool_call_id and the role tool belong together"),
        ({"role": "user", "content": "x", "thought": "y"}, "messages[1]: only an assistant's"),
    ],
)
def test_a_message_is_refused_by_its_place(model: fornax.Model, message: dict[str, Any], words: str) -> None:
    refused("INVALID_INPUT", words, model.chat, [{"role": "user", "content": "Hi"}, message])


def test_what_does_not_fit_or_is_not_there_has_its_code(model: fornax.Model) -> None:
    refused("PROMPT_TOO_LONG", "the context holds 1024", model.generate, "word " * 2000)
    refused("SCHEMA_UNSUPPORTED", "$dynamicRef", model.generate, "x", schema={"$dynamicRef": "#a"})
    refused("MODEL_NOT_FOUND", "nearest: smollm2", fornax.open, "smolm2")
    refused("MODEL_NOT_FOUND", "/nowhere", fornax.open, "/nowhere/model.gguf")
    refused("INVALID_INPUT", "device is 'gpu'".replace("'", '"'), fornax.open, "smollm2", device="gpu")
    refused("INVALID_INPUT", "quant is", fornax.open, "smollm2", quant="q9")
    refused("MODEL_DOES_NOT_FIT", "16.0 MiB", fornax.open, "smollm2", device="cpu", memory_limit=16 << 20)


def test_no_number_is_no_json(model: fornax.Model) -> None:
    with pytest.raises(ValueError, match="JSON"):
        model.generate("x", temperature=float("nan"))


def test_a_text_is_no_list_of_texts(encoder: fornax.Model) -> None:
    with pytest.raises(TypeError, match="give a list"):
        encoder.embed("one text")


def test_a_closed_model_says_so_and_answers_under_way_end() -> None:
    model = fornax.open("smollm2", device="cpu", context=256)
    stream = model.stream("Hello", max_tokens=16, ignore_eos=True)
    model.close()
    assert len(stream.result().tokens) == 16
    refused("MODEL_NOT_READY", "closed", model.generate, "Hello")


def test_an_error_keeps_its_code_between_processes(model: fornax.Model) -> None:
    with pytest.raises(fornax.Error) as raised:
        model.generate("x", max_tokens=0)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), copy.code, str(copy)) == (fornax.Error, raised.value.code, str(raised.value))
