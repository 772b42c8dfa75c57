"""Answers: whole, in pieces, in a form, and with tools."""

from __future__ import annotations

import json
import math
from typing import Literal

import fornax
import pytest
from pydantic import BaseModel, Field

PROMPT = "The capital of France is"


def test_a_seed_gives_an_answer_again_and_pieces_are_the_whole(model: fornax.Model) -> None:
    options = {"max_tokens": 24, "temperature": 0.9}
    first = model.generate(PROMPT, **options)
    assert first.prompt_tokens == len(model.tokenize(PROMPT))
    assert first.finish == "length" and len(first.tokens) == 24
    stream = model.stream(PROMPT, seed=first.seed, **options)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == first.text == model.detokenize(first.tokens)
    assert stream.completion.tokens == first.tokens
    assert model.generate(PROMPT, seed=first.seed + 1, **options).tokens != first.tokens


def test_a_prompt_may_be_token_ids(model: fornax.Model) -> None:
    by_text = model.generate(PROMPT, max_tokens=8)
    assert by_text.text.startswith(" Paris")
    assert model.generate(model.tokenize(PROMPT), max_tokens=8).tokens == by_text.tokens


def test_options_do_what_their_names_say(model: fornax.Model) -> None:
    free = model.generate(PROMPT, max_tokens=12)
    paris = free.tokens[0]
    assert model.generate(PROMPT, max_tokens=12, stop=",").text == free.text.split(",")[0]
    assert model.generate(PROMPT, max_tokens=4, banned_tokens=[paris]).tokens[0] != paris
    assert model.generate(PROMPT, max_tokens=4, logit_bias={paris: -100.0}).tokens[0] != paris
    assert set(model.generate(PROMPT, max_tokens=4, allowed_tokens=[paris]).tokens) == {paris}
    assert "Paris" not in model.generate(PROMPT, max_tokens=12, bad_words=["Paris"]).text
    scored = model.generate(PROMPT, max_tokens=4, logprobs=3)
    assert [score.token for score in scored.logprobs] == scored.tokens
    for score in scored.logprobs:
        assert score.top[0].token == score.token and score.top[0].logprob == score.logprob
        assert sum(math.exp(likely.logprob) for likely in score.top) <= 1.0


def test_a_chat_has_messages_of_openai_s_kind(model: fornax.Model) -> None:
    question = "What is the capital of France?"
    alone = model.chat(question, max_tokens=16)
    assert "Paris" in alone.text
    messages = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    assert model.chat(messages, max_tokens=16).tokens == alone.tokens
    more = model.chat([*messages, alone.message, {"role": "user", "content": "And of Spain?"}], max_tokens=1)
    assert more.prompt_tokens > alone.prompt_tokens + len(alone.tokens)
    # The cache has whole pages of what was asked before.
    assert more.cached_tokens >= 32
    instructed = model.chat([{"role": "system", "content": "Answer in Latin."}, *messages], max_tokens=1)
    assert instructed.prompt_tokens != alone.prompt_tokens


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=20)
    age: int = Field(ge=0, le=150)
    kind: Literal["human", "robot"]
    tags: list[Literal["tall", "old"]] = Field(max_length=2)


def test_a_schema_of_pydantic_gives_an_instance(model: fornax.Model) -> None:
    answer = model.chat("Invent a person.", schema=Person, max_tokens=100, temperature=1.0, seed=7)
    assert isinstance(answer.parsed, Person)
    assert Person.model_validate_json(answer.text) == answer.parsed
    numbers = model.generate("1 2 3", schema=list[int] | None, max_tokens=40)
    assert numbers.parsed is None or all(isinstance(number, int) for number in numbers.parsed)


def test_other_forms_are_followed(model: fornax.Model) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 9}}, "required": ["n"]}
    parsed = model.generate("A number:", schema=schema | {"additionalProperties": False}, max_tokens=20).parsed
    assert 3 <= parsed["n"] <= 9
    assert model.generate("Yes or no?", choice=["maybe", "never"]).text in ("maybe", "never")
    assert model.generate("A date:", regex=r"[0-9]{4}-[0-9]{2}", max_tokens=12).text[4] == "-"
    assert isinstance(json.loads(model.generate("JSON:", grammar='start: "[1]" | "[2]"').text), list)


def test_an_answer_cut_before_its_form_is_whole_is_an_error(model: fornax.Model) -> None:
    with pytest.raises(fornax.Error, match="before its form was complete") as raised:
        model.chat("Invent a person.", schema=Person, max_tokens=3)
    assert raised.value.code == "OUTPUT_TRUNCATED"


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}"
    "[{{ message.role }}]{{ message.name }} {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}[assistant]"
)


def temperature(city: Literal["Oslo", "Rome"], unit: Literal["C", "F"] = "C") -> str:
    """How warm it is in a city now."""
    return f"20 {unit} in {city}"


def test_tools_are_called_and_told_what_came_of_it() -> None:
    with fornax.open("smollm2", device="cpu", context=1024, chat_template=TEMPLATE) as model:
        question = {"role": "user", "content": "How warm is it in Rome?"}
        stream = model.stream_chat([question], tools=[temperature], tool_choice="required", max_tokens=64)
        parts = list(stream.parts())
        (call,) = stream.completion.calls
        assert call.name == "temperature" and call.arguments["city"] in ("Oslo", "Rome")
        assert [part.text for part in parts if part.kind == "call"] == ["temperature"]
        said = "".join(part.text for part in parts if part.kind == "arguments")
        assert json.loads(said) == call.arguments
        result = call.result(temperature(**call.arguments))
        messages = [question, stream.completion.message, result]
        assert model.chat(messages, tools=[temperature], max_tokens=8).prompt_tokens > 60
        # The same by definitions: OpenAI's and the inner part alone.
        inner = {"name": "temperature", "parameters": {"type": "object", "properties": {}}}
        for definition in ({"type": "function", "function": inner}, inner):
            calls = model.chat([question], tools=[definition], tool_choice="temperature", max_tokens=32).calls
            assert [call.name for call in calls] == ["temperature"]


def test_vectors_tell_how_alike_texts_are(encoder: fornax.Model) -> None:
    assert encoder.is_encoder
    cat, kitten, engine = encoder.embed(["A cat sleeps.", "A kitten naps.", "The engine broke down."])
    assert math.fsum(x * x for x in cat) == pytest.approx(1, abs=1e-5)
    # What transformers 5.22 computes of the same files on a CPU, in float32: the mean of the last hidden states.
    assert cat[:4] == pytest.approx([0.093675, 0.017769, -0.031395, 0.104523], abs=2e-4)
    alike = [math.fsum(x * y for x, y in zip(cat, other, strict=True)) for other in (kitten, engine)]
    assert alike == pytest.approx([0.713549, 0.055307], abs=1e-3)
    assert encoder.embed(["A cat sleeps."]) == [cat]
    with pytest.raises(fornax.Error, match="makes embeddings and no answers"):
        encoder.generate("Hello")
