"""The reward process: loads one function and scores tasks until its standard input ends.

Pipes carry msgpack: in come ``[job id, packed task]``, out go one greeting and then ``[job id, reward, reason]``. A
synchronous function takes jobs in order and answers each at once, so that its process's owner knows which job it is
at; an async one takes all jobs concurrently. What the function prints goes to standard error.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgpack

from producers.rewards import loading as verdict
from producers.rewards.loading import Scorer, load_scorer
from schemas.errors import UserError

Job = tuple[int, bytes]
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Pipes:
    """The protocol's own descriptors, out of reach of ``print`` and ``input``."""

    requests: int
    replies: int

    @classmethod
    def take_over(cls) -> "Pipes":
        """Move standard input and output aside; the function gets an empty input, and standard error as output."""
        pipes = cls(os.dup(0), os.dup(1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        return pipes

    def reply(self, *message: Any) -> None:
        """Write one message at once."""
        rest = memoryview(msgpack.packb(message))
        while rest:
            rest = rest[os.write(self.replies, rest) :]

    def follow(self, deliver: Callable[[Job], object]) -> None:
        """Hand over every job; ends this process, and all it started, when its owner is gone."""
        unpacker = msgpack.Unpacker(max_buffer_size=0)
        while data := os.read(self.requests, 1 << 16):
            unpacker.feed(data)
            for job_id, task in unpacker:
                deliver((job_id, task))
        os.killpg(0, signal.SIGKILL)


def main(function: str, timeout_s: float, options: str = "{}") -> None:
    """Load, greet, serve."""
    pipes = Pipes.take_over()
    _die_with_the_worker()
    try:
        scorer = load_scorer(function, options)
    except UserError as error:
        pipes.reply("failed", " ".join(str(error).split()))
        return
    pipes.reply("ready", scorer.is_async)
    if scorer.is_async:
        asyncio.run(_serve_async(scorer, pipes, timeout_s))
    else:
        _serve(scorer, pipes)


def _die_with_the_worker() -> None:
    """Ask Linux for SIGKILL at the worker's end: a function that never lets go of the interpreter would live on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(scorer: Scorer, pipes: Pipes) -> None:
    inbox: SimpleQueue[Job] = SimpleQueue()
    Thread(target=pipes.follow, args=(inbox.put,), daemon=True).start()
    while True:
        job_id, task = inbox.get()
        pipes.reply(job_id, *_judged(scorer, task))


def _judged(scorer: Scorer, task: bytes) -> verdict.Verdict:
    try:
        return verdict.of_returned(scorer.call(_unpacked(task)))
    except BaseException as error:
        return verdict.of_raised(error)


def _unpacked(task: bytes) -> Any:
    return msgpack.unpackb(task, unicode_errors="surrogatepass")


async def _serve_async(scorer: Scorer, pipes: Pipes, timeout_s: float) -> None:
    loop, running = asyncio.get_running_loop(), set()

    def start(job: Job) -> None:
        task = loop.create_task(_answer(scorer, pipes, timeout_s, *job))
        running.add(task)
        task.add_done_callback(running.discard)

    Thread(target=pipes.follow, args=(lambda job: loop.call_soon_threadsafe(start, job),), daemon=True).start()
    await loop.create_future()


async def _answer(scorer: Scorer, pipes: Pipes, timeout_s: float, job_id: int, task: bytes) -> None:
    call = asyncio.ensure_future(_judged_async(scorer, task))
    done, _ = await asyncio.wait({call}, timeout=timeout_s)
    if done:
        pipes.reply(job_id, *call.result())
    else:
        call.cancel()
        pipes.reply(job_id, None, verdict.timed_out(timeout_s))


async def _judged_async(scorer: Scorer, task: bytes) -> verdict.Verdict:
    try:
        return verdict.of_returned(await scorer.call(_unpacked(task)))
    except BaseException as error:
        return verdict.of_raised(error)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
