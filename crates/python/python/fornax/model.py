"""An open model, and how one is opened."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _fornax
from .answer import Completion
from .schema import Schema, tool
from .stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ChatOptions, Options

Progress = Callable[[str, int, int], object]
"""Is told what is under way ("downloading", "checking", "loading", "compiling", "waiting"), how far it is, and how far
there is to go. What it raises stops a fetch."""


def pull(name: str = _fornax.DEFAULT, *, progress: Progress | None = None) -> str:
    """Fetches a model unless it is on disk, and gives its path.

    ``name`` is a path, a name of the catalog (``fornax list --available``), or a reference to the Hugging Face hub such
    as ``"owner/name:Q4_K_M"``. ``FORNAX_CACHE``, ``HF_HOME`` and ``HF_TOKEN`` mean what they mean to the command.
    """
    return os.fspath(_fornax.locate(os.fspath(name), progress))


def open(
    name: str | os.PathLike[str] = _fornax.DEFAULT,
    *,
    device: str = "auto",
    context: int | None = None,
    parallel: int = 1,
    threads: int | None = None,
    quant: str | None = None,
    kv_dtype: str | None = None,
    memory_limit: int | None = None,
    pooling: str | None = None,
    chat_template: str | None = None,
    progress: Progress | None = None,
) -> Model:
    """Opens a model, fetching it first where that is needed.

    ``name``: as for :func:`pull`. ``device``: ``"auto"`` (the first GPU that can be used, else the CPU), ``"cpu"`` or
    ``"cuda:N"``. ``context``: most tokens of a request, prompt and answer together. ``parallel``: requests computed at
    once; others wait. ``threads``: of the CPU. ``quant``: brings a safetensors model into ``"q8_0"``, ``"fp8"`` or
    ``"q4_k"``. ``kv_dtype``: how keys and values are stored. ``memory_limit``: bytes; what does not fit is refused
    before it is loaded. ``pooling``: of an encoder, ``"mean"``, ``"cls"`` or ``"last"``. ``chat_template``: Jinja, in
    place of the model's own.
    """
    options = {
        "device": device,
        "context": context,
        "parallel": parallel,
        "threads": threads,
        "quant": quant,
        "kv_dtype": kv_dtype,
        "memory_limit": memory_limit,
        "pooling": pooling,
        "chat_template": chat_template,
    }
    written = _json(options)
    path = pull(os.fspath(name), progress=progress)
    return Model(_fornax.open(path, written, progress))


class Model:
    """An open model. Any thread may ask it; :func:`fornax.open` makes it."""

    def __init__(self, inner: _fornax.Model) -> None:
        self._inner = inner

    # Answers

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """Continues a text, or token ids."""
        return self.stream(prompt, **options).result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """The same, as it is made."""
        asked = {"text": prompt} if isinstance(prompt, str) else {"tokens": list(prompt)}
        return self._ask(asked, dict(options))

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Completion:
        """Answers a conversation by the model's chat template. A text alone is one message of the user's."""
        return self.stream_chat(messages, **options).result()

    def stream_chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Stream:
        """The same, as it is made."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._ask({"messages": list(messages)}, dict(options))

    async def agenerate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Completion:
        """:meth:`generate`, awaited; cancelling the task cancels the answer."""
        stream = await asyncio.to_thread(self.stream, prompt, **options)
        return await stream.aresult()

    async def achat(self, messages: str | Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> Completion:
        """:meth:`chat`, awaited; cancelling the task cancels the answer."""
        stream = await asyncio.to_thread(self.stream_chat, messages, **options)
        return await stream.aresult()

    def _ask(self, asked: dict[str, Any], options: dict[str, Any]) -> Stream:
        schema = None
        if (wanted := options.get("schema")) is not None:
            schema = Schema(wanted)
            options["schema"] = schema.json
        if isinstance(stop := options.get("stop"), str):
            options["stop"] = [stop]
        if (tools := options.get("tools")) is not None:
            options["tools"] = [tool(definition) for definition in tools]
        given = {name: value for name, value in options.items() if value is not None}
        return Stream(self._inner.submit(_json(asked), _json(given)), schema)

    # Embeddings

    def embed(self, texts: Sequence[str], *, raw: bool = False) -> list[list[float]]:
        """A vector for each text, in their order, at length one unless they are wanted ``raw``."""
        if isinstance(texts, str):
            raise TypeError("texts is one text; give a list of them")
        return self._inner.embed(list(texts), raw)

    async def aembed(self, texts: Sequence[str], *, raw: bool = False) -> list[list[float]]:
        """The same, awaited."""
        return await asyncio.to_thread(self.embed, texts, raw=raw)

    # Tokens

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text, with what the model wants in front of one."""
        return self._inner.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self._inner.detokenize(list(tokens))

    # The model itself

    @property
    def context(self) -> int:
        """Most tokens of a request, prompt and answer together."""
        return self._inner.context

    @property
    def parallel(self) -> int:
        """Requests computed at once."""
        return self._inner.parallel

    @property
    def device(self) -> str:
        """Where it is computed, in words."""
        return self._inner.device

    @property
    def is_encoder(self) -> bool:
        """Whether it makes embeddings and no answers."""
        return self._inner.is_encoder

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes, as they were planned."""
        return self._inner.memory_bytes

    def close(self) -> None:
        """Frees it, once the answers under way are over."""
        self._inner.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _json(value: Any) -> str:
    # The engine takes JSON, which has no NaN.
    return json.dumps(value, allow_nan=False)
