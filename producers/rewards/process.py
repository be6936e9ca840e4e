"""A running reward process as its owner sees it: start, send, receive, kill. Knows no jobs and no retries."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgpack
import structlog

from schemas.errors import RewardLoadError

log = structlog.get_logger()

MAX_REPLY_BYTES = 1 << 20
MAX_LOGGED_LINES = 100
LAST_WORDS_S = 0.2
_ROOT = str(Path(__file__).parents[2])


@dataclass
class RewardProcess:
    """One loaded function. It leads a process group, so that whatever the function starts ends with it."""

    process: asyncio.subprocess.Process
    output: asyncio.Task[None]
    unpacker: msgpack.Unpacker
    is_async: bool = False

    @classmethod
    async def start(
        cls, function: str, name: str, *, timeout_s: float, load_timeout_s: float, options: str = "{}"
    ) -> Self:
        """Start the process and wait until the function is loaded.

        Raises:
            RewardLoadError: it cannot be imported, is no function, ends the process or takes too long.
        """
        try:
            process = await _spawn(function, timeout_s, options)
        except OSError as error:
            raise RewardLoadError(f"expected to start a process for reward {function}, got: {error}") from error
        output = asyncio.create_task(_log_output(process, name))
        started = cls(process, output, msgpack.Unpacker(max_buffer_size=MAX_REPLY_BYTES))
        try:
            await started._greet(function, load_timeout_s)
        except BaseException:
            started.kill()
            await started.ended()
            raise
        return started

    async def _greet(self, function: str, load_timeout_s: float) -> None:
        try:
            async with asyncio.timeout(load_timeout_s):
                replies = await self.receive()
        except TimeoutError as error:
            raise RewardLoadError(f"expected reward {function} to load within {load_timeout_s:g} s") from error
        if not replies:
            raise RewardLoadError(f"expected reward {function} to load, but {await self.ended()}")
        match replies[0]:
            case ["ready", bool(is_async)]:
                self.is_async = is_async
            case ["failed", str(reason)]:
                raise RewardLoadError(reason)
            case other:
                raise RewardLoadError(f"expected a greeting from reward {function}, got {other!r}")

    def send(self, data: bytes) -> None:
        """Hand over bytes; nothing waits for a function that hangs, the caller bounds how much it sends.

        To a process that has just ended they are lost; ``receive`` tells.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(data)

    async def receive(self) -> list[Any]:
        """The next messages; none when the process has ended or no longer speaks msgpack."""
        assert self.process.stdout is not None
        messages: list[Any] = []
        while not messages and (data := await self.process.stdout.read(1 << 16)):
            try:
                self.unpacker.feed(data)
                messages += self.unpacker
            except Exception as error:
                log.error("reward process wrote what is no reply", error=repr(error))
                self.kill()
                return []
        return messages

    def kill(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Wait for the end and describe it."""
        code = await self.process.wait()
        await asyncio.wait({self.output}, timeout=LAST_WORDS_S)
        self.output.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


async def _spawn(function: str, timeout_s: float, options: str) -> asyncio.subprocess.Process:
    """Start the process; cancelled half-way, it still ends what it started."""
    python_path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "producers.rewards.child", function, str(timeout_s), options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": python_path},
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        process = await spawning
        process.kill()
        await process.wait()
        raise


async def _log_output(process: asyncio.subprocess.Process, name: str) -> None:
    """Log the first lines of what a function prints; read the rest, so that printing never blocks it."""
    assert process.stderr is not None
    logged = 0
    while data := await process.stderr.read(1 << 14):
        for line in data.decode(errors="replace").splitlines()[: MAX_LOGGED_LINES - logged]:
            log.info("reward output", function=name, line=line[:500])
            logged += 1
