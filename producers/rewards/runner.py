"""Scores completions with the reward functions of the settings: one process per function, time-outs, restarts.

``RewardRunner`` packs a completion once, and passes it to the ``RewardQueue`` of each function. The queue sends calls
in batches to its ``RewardProcess``, which runs ``producers.rewards.child``, and settles them by the replies. When the
process hangs or dies, the queue decides which call failed.

Invariants:
- a_failing_reward_is_recorded_and_harms_no_other: if a function fails in any way, its reward is None with a reason of
  one line. Other functions and completions are scored as usual;
- only_the_failing_call_is_blamed: a call that hangs or ends the process gets the reason; every other call is repeated.
"""

import asyncio
import contextlib
import json
import os
import signal
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Protocol, Self

import msgpack
import structlog

from streamrl.bus.waiting import to_its_end, wait_for_tasks
from streamrl.producers.rewards.child import RewardResult, timeout_reason
from streamrl.producers.rewards.sandbox import environment_for
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.errors import RewardLoadError
from streamrl.schemas.import_path import module_command
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

SYNC_WINDOW = 64
"""Calls sent ahead to a synchronous function: enough to keep it busy, and few to repeat if its process dies."""
LOAD_TIMEOUT_S = 600.0
"""Seconds in which a function must be imported: some load a model, or fetch a data set."""
LATE_REPLY_S = 0.05
"""Seconds after a time-out in which a reply still counts: this process's loop may have been busy, not the function."""
ASYNC_MARGIN_S = 1.0
"""Seconds beyond ``timeout_s`` that an async function's process may be silent before it counts as hung. The process
itself applies ``timeout_s`` to each call."""
RESTART_PAUSE_S = 1.0
"""Seconds between attempts to reload a function that cannot be loaded any more, such as a file that is being edited."""
MAX_REPLY_BYTES = 1 << 20
MAX_LOGGED_LINES = 100
LAST_OUTPUT_S = 0.2
"""Seconds to read the last output of a dead process. A program that it started may hold the pipe open for ever."""
_ROOT = str(Path(__file__).parents[3])


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A finished completion: its text and token ids, and its prompt with the columns for the functions."""

    prompt: Prompt
    completion_text: str
    completion_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw rewards by name (None: not applicable, or failed), and the reasons of those that failed."""

    rewards: dict[str, float | None]
    errors: dict[str, str]


class RewardScorer(Protocol):
    """Scores completions; ``RewardRunner`` is one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the rewards."""
        ...

    async def start(self) -> None:
        """Load the reward functions; raises ``RewardLoadError``."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Rewards by name, and the reasons of those that failed."""
        ...

    async def close(self) -> None:
        """Release the functions; idempotent."""
        ...


class RewardRunner:
    """Scores with all functions of the settings, or with those of ``names``. Call ``start`` first, ``close`` last."""

    def __init__(self, settings: RewardSettings, names: Collection[str] | None = None) -> None:
        chosen = {
            name: RewardQueue(function, name, settings)
            for function, name in zip(settings.functions, settings.names, strict=True)
            if names is None or name in names
        }
        self.names, self._queues = tuple(chosen), list(chosen.values())

    async def start(self) -> None:
        """Load every function.

        Raises:
            RewardLoadError: one of them cannot be loaded; then all processes are ended.
        """
        outcomes = await asyncio.gather(*(queue.start() for queue in self._queues), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]  # the others are running
        if failed:
            await self.close()
            raise failed[0]

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """Score one completion with all functions, or ``only`` these. A function's failure is returned, not raised."""
        task = packed_request(request)
        # All calls are queued before the first is awaited, so that the functions run in parallel.
        calls = {queue.name: queue.call(task) for queue in self._queues if only is None or queue.name in only}
        results = {name: await call for name, call in calls.items()}
        return Scores(
            {name: reward for name, (reward, _) in results.items()},
            {name: reason for name, (_, reason) in results.items() if reason is not None},
        )

    async def close(self) -> None:
        """End every reward process; waiting calls are cancelled. Idempotent."""
        await asyncio.gather(*(queue.close() for queue in self._queues))


def packed_request(request: ScoreRequest) -> bytes:
    """The request as a packed ``RewardTask`` for the reward process."""
    prompt, ids = request.prompt, request.completion_ids
    stated = prompt.content if prompt.stated is None else prompt.stated
    packed: bytes = msgpack.packb(
        {
            "prompt": stated if isinstance(stated, str) else [turn.model_dump() for turn in stated],
            "dataset": prompt.dataset,
            "columns": prompt.columns,
            "text": request.completion_text,
            "ids": (ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)).tobytes(),
        },
        # A tokenizer may produce half a surrogate pair, which strict UTF-8 refuses.
        unicode_errors="surrogatepass",
    )
    return packed


@dataclass(eq=False, slots=True)
class RewardCall:
    """One call and the future of its result."""

    number: int
    task: bytes
    result: "asyncio.Future[RewardResult]"

    def settle(self, reward: float | None, reason: str | None) -> None:
        """Set the result, unless the caller was cancelled."""
        if not self.result.done():
            self.result.set_result((reward, reason))


def failed_and_suspect_calls(
    unanswered: list[RewardCall], *, is_async: bool
) -> tuple[list[RewardCall], list[RewardCall]]:
    """The calls that failed when the process died, and the suspects, which are repeated one at a time.

    A synchronous function answers in order, so the first unanswered call failed. With an async function it may be any
    of the unanswered calls.
    """
    if not is_async or len(unanswered) == 1:
        return unanswered[:1], []
    return [], unanswered


class RewardQueue:
    """Calls to one function, in order of arrival.

    A call is in one of three places: ``_waiting``; ``_unanswered``, if it was sent to the process; or ``_suspects``, if
    it was sent to a process that died. Each suspect is sent again alone, before the waiting calls.
    """

    def __init__(self, function: str, name: str, settings: RewardSettings) -> None:
        self.function = function
        self.name = name
        self._settings = settings
        self._numbers = count()
        self._waiting: deque[RewardCall] = deque()
        self._suspects: deque[RewardCall] = deque()
        self._unanswered: dict[int, RewardCall] = {}
        self._suspect_runs = False
        self._send_is_due = False
        self._has_hung = False
        self._silence: asyncio.Timeout | None = None
        self._process: RewardProcess | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the function in a new process.

        Raises:
            RewardLoadError: the function cannot be loaded.
        """
        self._process = await RewardProcess.start(self.function, self.name, self._settings)
        self._serving = asyncio.create_task(self._serve())

    def call(self, task: bytes) -> "asyncio.Future[RewardResult]":
        """Queue a call; calls of one tick of the loop are sent together."""
        loop = asyncio.get_running_loop()
        call = RewardCall(next(self._numbers), task, loop.create_future())
        self._waiting.append(call)
        # One write for all calls of a tick: the samples of a group often end together, and each write is a system call.
        if not self._send_is_due:
            self._send_is_due = True
            loop.call_soon(self._send)
        return call.result

    async def close(self) -> None:
        """Kill the process; waiting calls are cancelled. Idempotent."""
        # The serving task ends first: it would treat the killed process as one that died, and start another.
        if self._serving is not None:
            self._serving.cancel()
            # wait() instead of await: the task's CancelledError would look like a cancellation of this call.
            await asyncio.wait({self._serving})
        if self._process is not None:
            self._process.kill()
            await self._process.ended()
            self._process = None
        for call in self._take_all():
            call.result.cancel()

    async def _serve(self) -> None:
        while True:
            if self._process is None:
                await self._restart()
            elif replies := await self._replies(self._process):
                self._settle(replies, self._process)
            else:
                # Clear _process first, so that no call is sent, and blamed, while the last output is read.
                process, self._process = self._process, None
                ended = await process.ended()
                self._blame(process, timeout_reason(self._settings.timeout_s) if self._has_hung else ended)
                self._has_hung = False
            self._send()

    async def _replies(self, process: "RewardProcess") -> list[Any]:
        """The next replies; empty when the process has ended. A process that is silent for too long is killed.

        The silence is measured from the last reply, or from the first call after an idle time.
        """
        with contextlib.suppress(TimeoutError):
            # No limit while no call is open: _send sets one with the first call.
            try:
                async with asyncio.timeout(
                    self._silence_limit_s(process) if self._unanswered else None
                ) as self._silence:
                    return await process.receive()
            finally:
                self._silence = None
        # If this process's loop was blocked, the reply is already in the pipe and is read at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_REPLY_S):
                return await process.receive()
        self._has_hung = True
        process.kill()
        return []

    def _silence_limit_s(self, process: "RewardProcess") -> float:
        return self._settings.timeout_s + (ASYNC_MARGIN_S if process.is_async else 0.0)

    async def _restart(self) -> None:
        try:
            self._process = await RewardProcess.start(self.function, self.name, self._settings)
        except RewardLoadError as error:
            log.error("reward function cannot be loaded again", function=self.name, error=str(error))
            for call in self._take_all():
                call.settle(None, f"cannot be loaded again: {error}")
            await asyncio.sleep(RESTART_PAUSE_S)

    def _send(self) -> None:
        self._send_is_due = False
        # Between two processes calls wait; _serve sends them when the next process runs.
        if self._process is None:
            return
        calls = self._next_calls(self._settings.concurrency if self._process.is_async else SYNC_WINDOW)
        if calls:
            # At the first call after an idle time _replies is waiting without a limit.
            if not self._unanswered and self._silence is not None:
                until = asyncio.get_running_loop().time() + self._silence_limit_s(self._process)
                self._silence.reschedule(until)
            self._unanswered.update((call.number, call) for call in calls)
            self._process.send(b"".join(msgpack.packb((call.number, call.task)) for call in calls))

    def _next_calls(self, window: int) -> list[RewardCall]:
        """The calls to send now: a suspect alone, else as many as fill the window of unanswered calls."""
        # A suspect runs alone: if the process dies again, this call failed.
        if self._suspect_runs and self._unanswered:
            return []
        self._suspect_runs = bool(self._suspects)
        if self._suspects:
            return [self._suspects.popleft()]
        calls: list[RewardCall] = []
        while self._waiting and len(calls) + len(self._unanswered) < window:
            call = self._waiting.popleft()
            if not call.result.done():  # done: its caller was cancelled
                calls.append(call)
        return calls

    def _settle(self, replies: list[Any], process: "RewardProcess") -> None:
        for reply in replies:
            match reply:
                case [int(number), float() | None as reward, str() | None as reason]:
                    if (call := self._unanswered.pop(number, None)) is not None:
                        call.settle(reward, reason)
                case _:
                    log.error("reward process wrote an invalid reply", function=self.name, reply=repr(reply)[:200])
                    process.kill()

    def _blame(self, process: "RewardProcess", reason: str) -> None:
        failed, suspects = failed_and_suspect_calls(list(self._unanswered.values()), is_async=process.is_async)
        others = [call for call in self._unanswered.values() if call not in failed and call not in suspects]
        self._unanswered.clear()
        # The others go back to the front, in their order: they have waited longest.
        self._suspects.extend(suspects)
        self._waiting.extendleft(reversed(others))
        for call in failed:
            call.settle(None, reason)
        log.warning("reward process replaced", function=self.name, reason=reason, calls_to_repeat=len(self._waiting))

    def _take_all(self) -> list[RewardCall]:
        calls = [*self._unanswered.values(), *self._suspects, *self._waiting]
        for queue in (self._unanswered, self._suspects, self._waiting):
            queue.clear()
        return calls


@dataclass
class RewardProcess:
    """A running reward process. It leads a process group, so that processes of the function end with it."""

    process: asyncio.subprocess.Process
    output: asyncio.Task[None]
    unpacker: msgpack.Unpacker
    is_async: bool = False

    @classmethod
    async def start(cls, function: str, name: str, settings: RewardSettings) -> Self:
        """Start the process and wait until the function is loaded.

        Raises:
            RewardLoadError: it cannot be imported, is not a function, ends the process or takes too long.
        """
        options, confinement = asdict(settings.built_in_options), asdict(settings.confinement_of(function))
        arguments = (function, str(settings.timeout_s), json.dumps(options), json.dumps(confinement))
        try:
            process = await _spawn(arguments, environment_for(os.environ, settings.environment_of(function)))
        except OSError as error:
            raise RewardLoadError(f"expected to start a process for reward {function}, got: {error}") from error
        output = asyncio.create_task(_log_output(process, name))
        started = cls(process, output, msgpack.Unpacker(max_buffer_size=MAX_REPLY_BYTES))
        try:
            await started._wait_until_loaded(function, LOAD_TIMEOUT_S)
        except BaseException:
            # Also at a cancellation, because no caller has this process yet and could end it.
            started.kill()
            await started.ended()
            raise
        return started

    async def _wait_until_loaded(self, function: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                replies = await self.receive()
        except TimeoutError as error:
            raise RewardLoadError(f"expected reward {function} to load within {timeout_s:g} s") from error
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
        """Write bytes to the process without waiting; the caller limits the amount.

        Bytes to a process that has just ended are lost; ``receive`` shows that it ended.
        """
        assert self.process.stdin is not None
        # For a closed pipe uvloop raises RuntimeError, and asyncio OSError.
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(data)

    async def receive(self) -> list[Any]:
        """The next messages; empty when the process has ended or wrote invalid msgpack. May be cancelled."""
        assert self.process.stdout is not None
        messages: list[Any] = []
        while not messages and (data := await self.process.stdout.read(1 << 16)):
            try:
                self.unpacker.feed(data)
                messages += self.unpacker
            except Exception as error:
                log.error("reward process wrote an invalid reply", error=repr(error))
                self.kill()
                return []
        return messages

    def kill(self) -> None:
        """Kill the process and all processes that it started."""
        # The process leads its own session, so its pid is the group's id. macOS raises PermissionError for a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Wait until the process has ended; returns how it ended."""
        code = await self.process.wait()
        await asyncio.wait({self.output}, timeout=LAST_OUTPUT_S)
        self.output.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        # asyncio reports an end by signal n as exit code -n.
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


async def _spawn(arguments: Sequence[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
    """Start the process. If this call is cancelled, the process is ended.

    A new interpreter, not a fork, because the worker has a model, threads and sockets. ``-P`` keeps the user's
    directory, which may contain a json.py, from the front of the path; the function is still found there.
    """
    python_path = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *module_command("streamrl.producers.rewards.child", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment | {"PYTHONPATH": python_path},
            start_new_session=True,
        )
    )
    try:
        # A creation that is cancelled half-way could leave a process running.
        await wait_for_tasks([spawning])
    except asyncio.CancelledError:
        if spawning.exception() is None:
            spawning.result().kill()
            await to_its_end(spawning.result().wait())
        raise
    return spawning.result()


async def _log_output(process: asyncio.subprocess.Process, name: str) -> None:
    """Log the first lines that a function prints, and read the rest, so that printing never blocks the function."""
    assert process.stderr is not None
    logged = 0
    while data := await process.stderr.read(1 << 14):
        for line in data.decode(errors="replace").splitlines()[: MAX_LOGGED_LINES - logged]:
            log.info("reward output", function=name, line=line[:500])
            logged += 1
