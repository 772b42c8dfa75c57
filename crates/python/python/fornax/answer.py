"""What comes back of a request."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Part:
    """A piece of an answer while it is made."""

    kind: Literal["text", "thought", "call", "arguments"]
    """What it is a piece of. A ``call`` is followed by the pieces of its ``arguments``."""
    text: str
    """The piece; of a call, the name of its tool."""


@dataclass(frozen=True)
class Call:
    """A tool that the model calls."""

    id: str
    """What its result is given back under."""
    name: str
    """The tool, as the model wrote it."""
    arguments: dict[str, Any]
    """The arguments by name."""

    def result(self, content: object) -> dict[str, Any]:
        """The message that tells the model what came of it; what is no text is told as JSON."""
        text = content if isinstance(content, str) else json.dumps(content)
        return {"role": "tool", "tool_call_id": self.id, "content": text}


@dataclass(frozen=True)
class Likely:
    """A token that the model thought likely."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Scored:
    """A token of an answer, and how likely the model thought it."""

    token: int
    logprob: float | None
    """``None`` for a token that the form of the answer forced."""
    top: list[Likely]
    """The most likely ones there, the most likely first."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    """What was said."""
    thought: str
    """What was thought before, in a chat."""
    calls: list[Call]
    """The tools that are called, in order."""
    tokens: list[int]
    """The generated ids."""
    logprobs: list[Scored]
    """How likely each of them was, where ``logprobs`` was asked for."""
    finish: Literal["stop", "length"]
    """Why it ended: by itself, or because there was no more room."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were found computed."""
    seed: int
    """The seed by which it comes again."""
    first_token_seconds: float
    decode_seconds: float
    parsed: Any = field(default=None)
    """The answer as an instance of what was asked for as ``schema``; JSON's own values where that was a dict."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message to go on with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            message["thought"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


def completion_of(end: dict[str, Any], parsed: Any) -> Completion:
    """What the engine hands out at the end of an answer."""
    calls = [Call(call["id"], call["name"], json.loads(call["arguments"])) for call in end.pop("calls")]
    logprobs = [
        Scored(scored["token"], scored["logprob"], [Likely(**likely) for likely in scored["top"]])
        for scored in end.pop("logprobs")
    ]
    return Completion(calls=calls, logprobs=logprobs, parsed=parsed, **end)
