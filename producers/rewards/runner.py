"""Scores completions with every reward function of the settings: one process per function, time-outs, restarts.

``RewardRunner`` packs a completion once and asks a ``RewardQueue`` per function. The queue sends calls in batches to
its ``RewardProcess`` (in which ``producers.rewards.child`` runs), settles them by the replies, and decides who is to
blame when the process hangs or dies.

Invariants:
- a_failing_reward_is_recorded_and_harms_no_other: whatever a function does, its reward becomes none with a one-line
  reason, and the other functions and completions are scored as if nothing had happened;
- only_the_offender_pays: a call that hangs or ends the process gets the reason; every other call is made again.
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

from streamrl.bus.waiting import to_its_end, until_ended
from streamrl.producers.rewards.child import RewardResult, timed_out
from streamrl.producers.rewards.sandbox import environment_for
from streamrl.producers.rewards.settings import RewardSettings
from streamrl.schemas.errors import RewardLoadError
from streamrl.schemas.import_path import own_command
from streamrl.schemas.trajectories import Prompt

log = structlog.get_logger()

SYNC_WINDOW = 64
"""Calls sent ahead to a synchronous function: enough that it never waits for us, few to repeat when it dies."""
SECOND_LOOK_S = 0.05
"""A time-out counts only if no reply is found this much later: our own loop may have been busy, not the function."""
ASYNC_MARGIN_S = 1.0
"""An async function's process keeps its own time-outs; it hangs as a whole if nothing comes for this much longer."""
RESTART_PAUSE_S = 1.0
"""Between attempts to load a function that loaded once and does not any more, such as a file that is being edited."""
MAX_REPLY_BYTES = 1 << 20
MAX_LOGGED_LINES = 100
LAST_WORDS_S = 0.2
"""How long to read what a dead process wrote last; a program that it started may hold the pipe open for ever."""
_ROOT = str(Path(__file__).parents[3])


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A finished completion: its text and token ids, and the prompt with the columns that functions ask for."""

    prompt: Prompt
    completion_text: str
    completion_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Scores:
    """Raw rewards by name (none: not applicable, or failed), and why those that failed did."""

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
        """Rewards by name, and why those that failed did."""
        ...

    async def close(self) -> None:
        """Release them; idempotent."""
        ...


class RewardRunner:
    """Functions of the settings: all, or those of these names. ``start`` before ``score``, ``close`` at the end."""

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
            RewardLoadError: one of them cannot be loaded; none is left running.
        """
        outcomes = await asyncio.gather(*(queue.start() for queue in self._queues), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]  # the others run already
        if failed:
            await self.close()
            raise failed[0]

    async def score(self, request: ScoreRequest, only: Collection[str] | None = None) -> Scores:
        """Score one completion with all functions, or ``only`` these; never raises for what a function does."""
        task = packed_request(request)
        # All are asked before the first is waited for: the functions run side by side, each in its own process.
        calls = {queue.name: queue.call(task) for queue in self._queues if only is None or queue.name in only}
        results = {name: await call for name, call in calls.items()}
        return Scores(
            {name: reward for name, (reward, _) in results.items()},
            {name: reason for name, (_, reason) in results.items() if reason is not None},
        )

    async def close(self) -> None:
        """End every reward process; calls still waiting are cancelled. Idempotent."""
        await asyncio.gather(*(queue.close() for queue in self._queues))


def packed_request(request: ScoreRequest) -> bytes:
    """A ``RewardTask`` of the reward process."""
    prompt, ids = request.prompt, request.completion_ids
    turns = () if isinstance(prompt.content, str) else prompt.content
    packed: bytes = msgpack.packb(
        {
            "prompt": [{"role": turn.role, "content": turn.content} for turn in turns] or prompt.text,
            "dataset": prompt.dataset,
            "columns": prompt.columns,
            "text": request.completion_text,
            "ids": (ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)).tobytes(),
        },
        # A tokenizer may give half a surrogate pair, which strict UTF-8 refuses.
        unicode_errors="surrogatepass",
    )
    return packed


@dataclass(eq=False, slots=True)
class RewardCall:
    """One call that someone waits for."""

    number: int
    task: bytes
    result: "asyncio.Future[RewardResult]"

    def settle(self, reward: float | None, reason: str | None) -> None:
        """Answer whoever waits, if anybody still does."""
        if not self.result.done():
            self.result.set_result((reward, reason))


def offenders(unanswered: list[RewardCall], *, is_async: bool) -> tuple[list[RewardCall], list[RewardCall]]:
    """Who gets the blame when the process dies, and who is under suspicion: called again, one at a time.

    A synchronous function answers in order, so the first unanswered call is the offender. Of an async one's many it is
    not known which, unless there was only one.
    """
    if not is_async or len(unanswered) == 1:
        return unanswered[:1], []
    return [], unanswered


class RewardQueue:
    """Calls to one function, in order of arrival.

    A call is in one of three places: ``_waiting``, ``_unanswered`` (sent to the process), or ``_suspects`` (sent to a
    process that died; each is sent again alone, and the waiting ones after them).
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
            RewardLoadError: it cannot be loaded.
        """
        self._process = await RewardProcess.start(self.function, self.name, self._settings)
        self._serving = asyncio.create_task(self._serve())

    def call(self, task: bytes) -> "asyncio.Future[RewardResult]":
        """Queue a call; calls of one tick of the loop travel together."""
        loop = asyncio.get_running_loop()
        call = RewardCall(next(self._numbers), task, loop.create_future())
        self._waiting.append(call)
        # One write for all calls of a tick: a whole group often ends together, and each write is a system call.
        if not self._send_is_due:
            self._send_is_due = True
            loop.call_soon(self._send)
        return call.result

    async def close(self) -> None:
        """Kill the process; calls still waiting are cancelled. Idempotent."""
        # The serving task first: it would take a killed process for one that died, and start the next.
        if self._serving is not None:
            self._serving.cancel()
            # wait() in place of await: the task's CancelledError would look like a cancellation of ours.
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
                # Nothing more is sent to it: a call that comes while its last words are read must not get the blame.
                process, self._process = self._process, None
                ended = await process.ended()
                self._blame(process, timed_out(self._settings.timeout_s) if self._has_hung else ended)
                self._has_hung = False
            self._send()

    async def _replies(self, process: "RewardProcess") -> list[Any]:
        """The next replies; none when the process has ended, which it is made to if it is silent for too long.

        The silence is measured from the last reply, or from the first call after a rest.
        """
        with contextlib.suppress(TimeoutError):
            # No limit while nothing is asked: _send sets one with the first call.
            try:
                async with asyncio.timeout(
                    self._silence_limit_s(process) if self._unanswered else None
                ) as self._silence:
                    return await process.receive()
            finally:
                self._silence = None
        # The time-out may have been ours: where the loop was blocked, the reply lies in the pipe and is read at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECOND_LOOK_S):
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
            log.error("reward function does not load again", function=self.name, error=str(error))
            for call in self._take_all():
                call.settle(None, f"cannot be loaded again: {error}")
            await asyncio.sleep(RESTART_PAUSE_S)

    def _send(self) -> None:
        self._send_is_due = False
        # Between two processes calls wait; _serve sends them when the next one runs.
        if self._process is None:
            return
        calls = self._next_calls(self._settings.concurrency if self._process.is_async else SYNC_WINDOW)
        if calls:
            # The first call after a rest: _replies has waited without a limit so far.
            if not self._unanswered and self._silence is not None:
                until = asyncio.get_running_loop().time() + self._silence_limit_s(self._process)
                self._silence.reschedule(until)
            self._unanswered.update((call.number, call) for call in calls)
            self._process.send(b"".join(msgpack.packb((call.number, call.task)) for call in calls))

    def _next_calls(self, window: int) -> list[RewardCall]:
        """What may be sent now: a suspect alone, else as many as fill the window of unanswered calls."""
        # While a suspect runs, nothing else does: if the process dies again, it was this one.
        if self._suspect_runs and self._unanswered:
            return []
        self._suspect_runs = bool(self._suspects)
        if self._suspects:
            return [self._suspects.popleft()]
        calls: list[RewardCall] = []
        while self._waiting and len(calls) + len(self._unanswered) < window:
            call = self._waiting.popleft()
            if not call.result.done():  # its caller was cancelled meanwhile
                calls.append(call)
        return calls

    def _settle(self, replies: list[Any], process: "RewardProcess") -> None:
        for reply in replies:
            match reply:
                case [int(number), float() | None as reward, str() | None as reason]:
                    if (call := self._unanswered.pop(number, None)) is not None:
                        call.settle(reward, reason)
                case _:
                    log.error("reward process wrote what is no reply", function=self.name, reply=repr(reply)[:200])
                    process.kill()

    def _blame(self, process: "RewardProcess", reason: str) -> None:
        guilty, suspects = offenders(list(self._unanswered.values()), is_async=process.is_async)
        innocent = [call for call in self._unanswered.values() if call not in guilty and call not in suspects]
        self._unanswered.clear()
        # The innocent go back to the front, in their order: they have waited longest.
        self._suspects.extend(suspects)
        self._waiting.extendleft(reversed(innocent))
        for call in guilty:
            call.settle(None, reason)
        log.warning("reward process replaced", function=self.name, reason=reason, calls_to_repeat=len(self._waiting))

    def _take_all(self) -> list[RewardCall]:
        calls = [*self._unanswered.values(), *self._suspects, *self._waiting]
        for queue in (self._unanswered, self._suspects, self._waiting):
            queue.clear()
        return calls


@dataclass
class RewardProcess:
    """A running reward process. It leads a process group, so that whatever the function starts ends with it."""

    process: asyncio.subprocess.Process
    output: asyncio.Task[None]
    unpacker: msgpack.Unpacker
    is_async: bool = False

    @classmethod
    async def start(cls, function: str, name: str, settings: RewardSettings) -> Self:
        """Start the process and wait until the function is loaded.

        Raises:
            RewardLoadError: it cannot be imported, is no function, ends the process or takes too long.
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
            await started._greet(function, settings.load_timeout_s)
        except BaseException:
            # Cancellation, too: nobody holds this process yet who could end it later.
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
        # RuntimeError is uvloop's for a pipe that is closed, OSError asyncio's.
        with contextlib.suppress(OSError, RuntimeError):
            self.process.stdin.write(data)

    async def receive(self) -> list[Any]:
        """The next messages; none when the process has ended or no longer speaks msgpack. May be cancelled."""
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
        # Its pid is its group's number: it leads a session of its own. PermissionError is macOS' for a zombie.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> str:
        """Wait for the end and describe it."""
        code = await self.process.wait()
        await asyncio.wait({self.output}, timeout=LAST_WORDS_S)
        self.output.cancel()
        if self.process.stdin is not None:
            self.process.stdin.close()
        # asyncio gives a death by signal n as the exit code -n.
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


async def _spawn(arguments: Sequence[str], environment: dict[str, str]) -> asyncio.subprocess.Process:
    """Start the process; cancelled half-way, it still ends what it started.

    A new interpreter, not a fork: the worker holds a model, threads and sockets. ``-P`` keeps the user's directory, in
    which a json.py may lie, from the front of the path; the function is still found there.
    """
    python_path = os.pathsep.join(filter(None, (_ROOT, environment.get("PYTHONPATH"))))
    spawning = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *own_command("streamrl.producers.rewards.child", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment | {"PYTHONPATH": python_path},
            start_new_session=True,
        )
    )
    try:
        # Cancelled half-way, a creation could leave a process without an owner.
        await until_ended([spawning])
    except asyncio.CancelledError:
        if spawning.exception() is None:
            spawning.result().kill()
            await to_its_end(spawning.result().wait())
        raise
    return spawning.result()


async def _log_output(process: asyncio.subprocess.Process, name: str) -> None:
    """Log the first lines of what a function prints; read the rest, so that printing never blocks it."""
    assert process.stderr is not None
    logged = 0
    while data := await process.stderr.read(1 << 14):
        for line in data.decode(errors="replace").splitlines()[: MAX_LOGGED_LINES - logged]:
            log.info("reward output", function=name, line=line[:500])
            logged += 1
