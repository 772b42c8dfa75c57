"""How the library behaves in a process that is not its own: threads, signals, tasks, forks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import fornax
import pytest

ENDLESS = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def alone() -> fornax.Model:
    """A model that computes one request at once: whether an answer was cancelled is seen by how soon the next comes."""
    return fornax.open("smollm2", device="cpu", context=1024)


def is_free(model: fornax.Model, whole: float) -> bool:
    """Whether a short answer comes sooner than a long one lasts, which it would have to wait for."""
    started = time.monotonic()
    model.generate("Hello", max_tokens=1)
    return time.monotonic() - started < whole * 0.8


@pytest.fixture(scope="module")
def whole() -> float:
    """Seconds of a long answer here."""
    with fornax.open("smollm2", device="cpu", context=1024) as model:
        started = time.monotonic()
        model.generate("Once", **ENDLESS)
        return time.monotonic() - started


def test_a_stream_that_is_dropped_or_left_is_cancelled(alone: fornax.Model, whole: float) -> None:
    stream = alone.stream("Once", **ENDLESS)
    next(iter(stream))
    del stream
    assert is_free(alone, whole)
    for _ in alone.stream("Once", **ENDLESS):
        break
    assert is_free(alone, whole)
    with alone.stream("Once", **ENDLESS) as stream:
        pass
    assert is_free(alone, whole)
    with pytest.raises(fornax.Error) as raised:
        stream.result()
    assert raised.value.code == "CANCELLED"


def test_other_threads_run_while_one_waits(model: fornax.Model) -> None:
    seconds: list[float] = []
    waiting = threading.Thread(target=lambda: seconds.append(model.generate("Once", **ENDLESS).decode_seconds))
    waiting.start()
    turns = 0
    while waiting.is_alive():
        turns += 1
        time.sleep(0.005)
    assert turns > 10 * min(seconds[0], 2)


def test_threads_get_the_answers_that_they_would_get_alone(model: fornax.Model) -> None:
    prompts = ["One", "Two", "Three", "Four", "Five", "Six"]
    wanted = [model.generate(prompt, max_tokens=12).tokens for prompt in prompts]
    got: dict[str, list[int]] = {}

    def ask(prompt: str) -> None:
        got[prompt] = model.generate(prompt, max_tokens=12).tokens

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[prompt] for prompt in prompts] == wanted


def test_tasks_run_beside_each_other(model: fornax.Model, encoder: fornax.Model) -> None:
    async def pieces(prompt: str) -> str:
        return "".join([piece async for piece in model.stream(prompt, max_tokens=12)])

    async def all_of_it() -> tuple[list[str], fornax.Completion, list[list[float]], int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.002)

        counting = asyncio.create_task(count())
        streams = asyncio.gather(*(pieces(prompt) for prompt in ("One", "Two", "Three")))
        chat, vectors, texts = await asyncio.gather(
            model.achat("Hello", max_tokens=8), encoder.aembed(["A cat."]), streams
        )
        counting.cancel()
        return texts, chat, vectors, turns

    texts, chat, vectors, turns = asyncio.run(all_of_it())
    assert texts == [model.generate(prompt, max_tokens=12).text for prompt in ("One", "Two", "Three")]
    assert chat.tokens == model.chat("Hello", max_tokens=8).tokens
    assert vectors == encoder.embed(["A cat."])
    assert turns > 10


def test_a_task_that_is_cancelled_cancels_its_answer(alone: fornax.Model, whole: float) -> None:
    async def give_up() -> None:
        await asyncio.wait_for(alone.agenerate("Once", **ENDLESS), timeout=0.3)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(give_up())
    assert is_free(alone, whole)

    async def leave() -> None:
        async for _ in alone.stream("Once", **ENDLESS):
            break

    asyncio.run(leave())
    assert is_free(alone, whole)


def test_an_error_of_an_answer_arrives_in_its_task(model: fornax.Model) -> None:
    async def cut() -> None:
        await model.achat("Hello", schema={"type": "string", "minLength": 50}, max_tokens=2)

    with pytest.raises(fornax.Error) as raised:
        asyncio.run(cut())
    assert raised.value.code == "OUTPUT_TRUNCATED"


def test_ctrl_c_interrupts_a_wait(alone: fornax.Model, whole: float) -> None:
    # Whoever starts tests in the background may have them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        alone.generate("Once", **ENDLESS)
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert is_free(alone, whole)


def test_what_progress_raises_stops_the_opening() -> None:
    told: list[str] = []
    fornax.open("smollm2", device="cpu", context=64, progress=lambda what, done, total: told.append(what)).close()
    assert "loading" in told

    def refuse(what: str, done: int, total: int) -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fornax.open("smollm2", device="cpu", context=64, progress=refuse)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_of_fork_is_told_and_ends(model: fornax.Model) -> None:
    child = os.fork()
    if child == 0:
        try:
            model.generate("Hello", max_tokens=1)
        except fornax.Error as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert model.generate("Hello", max_tokens=1).tokens


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_made_while_a_part_is_waited_for_ends() -> None:
    # A thread of the parent is in the middle of waiting at almost any moment, and the child has its locks and not it.
    script = """
import asyncio, os, sys, time, warnings
import fornax
warnings.simplefilter("ignore")
model = fornax.open("smollm2", device="cpu", context=512)
async def main():
    stream = model.stream("Once", max_tokens=400, ignore_eos=True)
    await anext(aiter(stream))
    child = os.fork()
    if child == 0:
        stream.close()
        sys.exit(0)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
    await asyncio.to_thread(stream.close)
    print("ended" if ended and os.waitstatus_to_exitcode(status) == 0 else "hangs")
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ended\n"), ran.stderr


def test_a_process_ends_whatever_is_under_way() -> None:
    script = """
import asyncio, fornax
model = fornax.open("smollm2", device="cpu", context=1024, parallel=2)
kept = model.stream("Once", max_tokens=900, ignore_eos=True)
next(iter(kept))
async def begin():
    global other
    other = model.stream("Twice", max_tokens=900, ignore_eos=True)
    await anext(aiter(other))
asyncio.run(begin())
print("done")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "done\n", "")
