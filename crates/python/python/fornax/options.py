"""What may be asked of an answer, for type checkers: the engine itself names what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict


class Options(TypedDict, total=False):
    """How tokens are chosen, when to stop, and what an answer must look like. Without any of it an answer is greedy and
    goes on to its end or that of the context. Names and ranges are those of the HTTP API (docs/api.md)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    banned_tokens: Sequence[int]
    allowed_tokens: Sequence[int]
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int
    schema: Any
    """A JSON schema as a dict, a pydantic model, or any type that pydantic knows."""
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]


class ChatOptions(Options, total=False):
    """What may be asked of a chat, besides."""

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]]
    """Definitions as OpenAI's API has them, or functions (with pydantic)."""
    tool_choice: str
    """``"auto"``, ``"none"``, ``"required"``, or the name of the tool that must be called."""
    parallel_tool_calls: bool
    thinking_budget: int
    thinking_effort: str
