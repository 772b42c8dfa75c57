"""An answer as it is made."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from .answer import Completion, Part, completion_of

if TYPE_CHECKING:
    from . import _fornax
    from .schema import Schema

PATIENCE = 0.05
"""Seconds that a wait lasts at most. Between two of them Python looks whether somebody pressed Ctrl-C."""


class Stream:
    """The pieces of an answer: of its text by ``for`` or ``async for``, of all of it by :meth:`parts`.

    Dropping it, :meth:`close`, the end of its ``with`` block and the cancellation of a task that waits for it cancel the
    answer.
    """

    def __init__(self, answer: _fornax.Answer, schema: Schema | None) -> None:
        self._answer = answer
        self._schema = schema
        self._completion: Completion | None = None
        self._queue: asyncio.Queue[_fornax.Piece | BaseException] | None = None

    @property
    def completion(self) -> Completion:
        """The whole answer. It is there when the stream has come to its end."""
        if self._completion is None:
            raise RuntimeError("the stream has not come to its end; use result()")
        return self._completion

    def result(self) -> Completion:
        """Waits for the end, and gives the whole answer."""
        for _ in self.parts():
            pass
        return self.completion

    def parts(self) -> Iterator[Part]:
        """All pieces: what is said, what is thought, and the tools that are called."""
        while self._completion is None:
            piece = self._answer.next_within(PATIENCE)
            if piece is not None and (part := self._take(piece)) is not None:
                yield part

    async def aparts(self) -> AsyncIterator[Part]:
        """The same by ``async for``."""
        while self._completion is None:
            if (part := self._take(await self._arrival())) is not None:
                yield part

    def __iter__(self) -> Iterator[str]:
        return (part.text for part in self.parts() if part.kind == "text")

    async def __aiter__(self) -> AsyncIterator[str]:
        async for part in self.aparts():
            if part.kind == "text":
                yield part.text

    async def aresult(self) -> Completion:
        """Waits for the end, and gives the whole answer."""
        async for _ in self.aparts():
            pass
        return self.completion

    def close(self) -> None:
        """Cancels the answer, if it is not whole."""
        self._answer.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Cancelling waits for whoever looks at the answer just then.
        await asyncio.to_thread(self.close)

    def _take(self, piece: _fornax.Piece) -> Part | None:
        """What the caller is told of a piece; the last one becomes the completion."""
        if piece["end"] is None:
            return Part(piece["kind"], piece["text"])  # type: ignore[arg-type]
        end: dict[str, Any] = piece["end"]
        parsed = self._schema.value(end["text"]) if self._schema else None
        self._completion = completion_of(end, parsed)
        return None

    async def _arrival(self) -> _fornax.Piece:
        """The next piece, by the loop that runs."""
        if self._queue is None:
            self._queue = asyncio.Queue()
            threading.Thread(
                target=_pump, args=(self._answer, asyncio.get_running_loop(), self._queue), name="fornax-stream"
            ).start()
            # The thread knows nothing of this object: when nobody else does, the answer is nobody's.
            weakref.finalize(self, self._answer.cancel)
        try:
            arrived = await self._queue.get()
        except asyncio.CancelledError:
            await asyncio.to_thread(self.close)
            raise
        if isinstance(arrived, BaseException):
            raise arrived
        return arrived


def _pump(
    answer: _fornax.Answer, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[_fornax.Piece | BaseException]
) -> None:
    """Waits for pieces where waiting stops nobody, and hands them to the loop."""
    try:
        while True:
            try:
                piece = answer.next_within(PATIENCE)
            except BaseException as error:  # It is raised where it is waited for.
                loop.call_soon_threadsafe(queue.put_nowait, error)
                return
            if loop.is_closed():
                answer.cancel()
                return
            if piece is not None:
                loop.call_soon_threadsafe(queue.put_nowait, piece)
                if piece["end"] is not None:
                    return
    except RuntimeError:
        # The loop was closed meanwhile: nobody waits any more.
        answer.cancel()
