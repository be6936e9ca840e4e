"""The processes that a section measures, from outside, and their requesters."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway.parts import MODEL

ROOT = Path(__file__).parents[2]
PROMPT = 32
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True)
class Door:
    """Where requests go, with which key, and what more each of them says."""

    address: str
    key: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Answers:
    """What requesters saw: seconds to first tokens and between tokens, tokens of whole answers, and statuses."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    broken: int = 0


class Part:
    """A process of ``parts``. ``said``: its first line, with its address."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid
        self.said = self._answer()
        self.door = Door(str(self.said.get("address", "")), str(self.said.get("key", "")))

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):  # not one of the log's lines
                found: dict[str, Any] = json.loads(line)
                return found
        raise SystemExit(f"a process of the benchmark ended, or took too long: {self._process.args!r}")

    def ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Tell it a command; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(command)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def processor_s(self) -> float:
        """Seconds of a processor that it has spent so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def part(*arguments: object, limit_s: float, python: str = sys.executable) -> Iterator[Part]:
    """A process of ``parts``, which is killed after so long: whoever waits for it ends then, too."""
    command = [python, "-P", "-m", "benchmarks.gateway.parts", *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
    ) as process:
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        try:
            yield Part(process)
        finally:
            timer.cancel()
            process.terminate()


def connected() -> aiohttp.ClientSession:
    """A client with as many connections as it takes."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def ask(session: aiohttp.ClientSession, door: Door, answers: Answers, tokens: int) -> None:
    """One request as a stream, read to its end. Its tokens are told by the server, once they are all there."""
    body = {"model": MODEL, "prompt": [7] * PROMPT, "max_tokens": tokens, "temperature": 1.0, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | dict(door.more)
    headers = {"Authorization": f"Bearer {door.key}"} if door.key else {}
    began = last = time.monotonic()
    async with session.post(f"{door.address}/v1/completions", json=body, headers=headers) as response:
        answers.statuses[response.status] = answers.statuses.get(response.status, 0) + 1
        if response.status != 200:
            await response.read()
            return
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            if line.startswith(b'data: {"error"'):
                answers.broken += 1
            elif b'"choices":[]' in line:
                answers.tokens += json.loads(line.removeprefix(b"data: "))["usage"]["completion_tokens"]
            else:
                now = time.monotonic()
                (answers.between_s if last > began else answers.first_s).append(now - last)
                last = now


async def so_many(door: Door, requests: int, at_once: int, tokens: int, pause_s: float = 0.0) -> tuple[Answers, float]:
    """So many requests, so many at once; what was seen, and tokens a second. ``pause_s``: most before each, drawn."""
    answers, places, draw = Answers(), asyncio.Semaphore(at_once), random.Random(0)
    async with connected() as session:

        async def one() -> None:
            async with places:
                await asyncio.sleep(draw.uniform(0, pause_s))
                await ask(session, door, answers, tokens)

        began = time.monotonic()
        await asyncio.gather(*(one() for _ in range(requests)))
    return answers, answers.tokens / (time.monotonic() - began)


async def at_rate(door: Door, per_s: float, seconds: float, tokens: int) -> Answers:
    """Requests that come at a rate, whatever becomes of those before."""
    answers = Answers()
    async with connected() as session:
        loop, asking = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        began = due = loop.time()
        while due < began + seconds:
            await asyncio.sleep(max(0.0, due - loop.time()))
            asking.append(asyncio.create_task(ask(session, door, answers, tokens)))
            due += 1 / per_s
        await asyncio.gather(*asking)
    return answers


def ms(seconds: float) -> float:
    """Milliseconds, as results have them."""
    return round(1000 * seconds, 2)
