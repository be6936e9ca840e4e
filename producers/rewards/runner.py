"""Scores completions with every reward function of the settings, outside the event loop and with time-outs.

Invariant a_failing_reward_is_recorded_and_harms_no_other: whatever a function does, its reward becomes none with a
one-line reason, and the other functions and completions are scored as if nothing had happened.
"""

import asyncio
import json
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import msgpack
import structlog

from producers.rewards.loading import Verdict, timed_out
from producers.rewards.process import RewardProcess
from producers.rewards.settings import RewardSettings
from schemas.errors import RewardLoadError
from schemas.trajectories import Prompt

# The queue in front of one reward function: batches, time-outs, and who is to blame when its process dies. Invariant
# only_the_offender_pays: a call that hangs or ends the process gets the reason; every other call is made again. A
# synchronous function answers in order, so the first unanswered job is the offender. Of an async one's many it is not
# known which, so they are made again one at a time.

log = structlog.get_logger()

SYNC_WINDOW = 64
SECOND_LOOK_S = 0.05
"""A time-out counts only if no reply is found this much later: our own loop may have been busy, not the function."""
ASYNC_MARGIN_S = 1.0
"""An async function's process keeps its own time-outs; it hangs as a whole if nothing comes for this much longer."""
RESTART_PAUSE_S = 1.0


@dataclass(eq=False, slots=True)
class Job:
    """One call that someone waits for."""

    number: int
    task: bytes
    verdict: "asyncio.Future[Verdict]"


def offenders(unanswered: list[Job], *, is_async: bool) -> tuple[list[Job], list[Job]]:
    """Who gets the blame when the process dies, and who is under suspicion: called again, one at a time."""
    if not is_async or len(unanswered) == 1:
        return unanswered[:1], []
    return [], unanswered


class FunctionLane:
    """Calls to one function, in order of arrival."""

    def __init__(
        self,
        function: str,
        name: str,
        *,
        timeout_s: float,
        load_timeout_s: float,
        concurrency: int,
        options: str = "{}",
    ) -> None:
        self.function = function
        self.name = name
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._concurrency = concurrency
        self._options = options
        self._numbers = count()
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._unanswered: dict[int, Job] = {}
        self._is_async = False
        self._alone = False
        self._send_due = False
        self._hung = False
        self._deadline = 0.0
        self._second_look = False
        self._timer: asyncio.TimerHandle | None = None
        self._process: RewardProcess | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the function in a new process.

        Raises:
            RewardLoadError: it cannot be loaded.
        """
        self._process = await self._load()
        self._serving = asyncio.create_task(self._serve())

    def call(self, task: bytes) -> "asyncio.Future[Verdict]":
        """Queue a call; calls of one tick of the loop travel together."""
        loop = asyncio.get_running_loop()
        job = Job(next(self._numbers), task, loop.create_future())
        self._waiting.append(job)
        if not self._send_due:
            self._send_due = True
            loop.call_soon(self._send)
        return job.verdict

    async def close(self) -> None:
        """Kill the process; calls still waiting are cancelled. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})
        if self._process is not None:
            self._process.kill()
            await self._process.ended()
            self._process = None
        for job in self._everyone():
            job.verdict.cancel()

    async def _load(self) -> RewardProcess:
        process = await RewardProcess.start(
            self.function,
            self.name,
            timeout_s=self._timeout_s,
            load_timeout_s=self._load_timeout_s,
            options=self._options,
        )
        self._is_async = process.is_async
        return process

    async def _serve(self) -> None:
        while True:
            if self._process is None:
                await self._restart()
                continue
            replies = await self._process.receive()
            if replies:
                self._settle(replies)
            else:
                reason = await self._process.ended()
                self._process = None
                self._blame(timed_out(self._timeout_s) if self._hung else reason)
            self._send()

    async def _restart(self) -> None:
        try:
            self._process = await self._load()
        except RewardLoadError as error:
            log.error("reward function does not load again", function=self.name, error=str(error))
            self._give_up(self._everyone(), f"cannot be loaded again: {error}")
            await asyncio.sleep(RESTART_PAUSE_S)
        self._send()

    def _send(self) -> None:
        self._send_due = False
        if self._process is None:
            return
        jobs = self._next_jobs(self._concurrency if self._is_async else SYNC_WINDOW)
        if jobs:
            if not self._unanswered:
                self._progress()
            self._unanswered.update((job.number, job) for job in jobs)
            self._process.send(b"".join(msgpack.packb((job.number, job.task)) for job in jobs))

    def _next_jobs(self, window: int) -> list[Job]:
        if self._alone or self._suspects:
            if self._unanswered:
                return []
            self._alone = bool(self._suspects)
            if self._suspects:
                return [self._suspects.popleft()]
        jobs: list[Job] = []
        while self._waiting and len(jobs) + len(self._unanswered) < window:
            job = self._waiting.popleft()
            if not job.verdict.done():
                jobs.append(job)
        return jobs

    def _settle(self, replies: list[Any]) -> None:
        for reply in replies:
            match reply:
                case [int(number), float() | None as reward, str() | None as reason]:
                    job = self._unanswered.pop(number, None)
                    if job is not None and not job.verdict.done():
                        job.verdict.set_result((reward, reason))
                case _:
                    log.error("reward process wrote what is no reply", function=self.name, reply=repr(reply)[:200])
                    if self._process is not None:
                        self._process.kill()
        self._progress()

    def _blame(self, reason: str) -> None:
        guilty, suspects = offenders(list(self._unanswered.values()), is_async=self._is_async)
        innocent = [job for job in self._unanswered.values() if job not in guilty and job not in suspects]
        self._unanswered.clear()
        self._suspects.extend(suspects)
        self._waiting.extendleft(reversed(innocent))
        self._give_up(guilty, reason)
        log.warning("reward process replaced", function=self.name, reason=reason, calls_to_repeat=len(self._waiting))
        self._hung = False

    def _give_up(self, jobs: Iterable[Job], reason: str) -> None:
        for job in jobs:
            if not job.verdict.done():
                job.verdict.set_result((None, reason))

    def _everyone(self) -> list[Job]:
        jobs = [*self._unanswered.values(), *self._suspects, *self._waiting]
        for queue in (self._unanswered, self._suspects, self._waiting):
            queue.clear()
        return jobs

    def _progress(self) -> None:
        """The function has shown life, or has just been given its first job: its time starts anew."""
        loop = asyncio.get_running_loop()
        self._second_look = False
        self._deadline = loop.time() + self._timeout_s + (ASYNC_MARGIN_S if self._is_async else 0.0)
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if not self._unanswered or self._process is None:
            return
        if loop.time() < self._deadline:
            self._timer = loop.call_at(self._deadline, self._look)
        elif not self._second_look:
            self._second_look = True
            self._timer = loop.call_later(SECOND_LOOK_S, self._look)
        else:
            self._hung = True
            self._process.kill()


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


class RewardRunner:
    """One process per function. ``start`` before ``score``, ``close`` at the end."""

    def __init__(self, settings: RewardSettings) -> None:
        self.names = settings.names
        options = json.dumps(asdict(settings.built_in_options))
        self._lanes = [
            FunctionLane(
                function,
                name,
                timeout_s=settings.timeout_s,
                load_timeout_s=settings.load_timeout_s,
                concurrency=settings.concurrency,
                options=options,
            )
            for function, name in zip(settings.functions, settings.names, strict=True)
        ]

    async def start(self) -> None:
        """Load every function.

        Raises:
            RewardLoadError: one of them cannot be loaded; none is left running.
        """
        outcomes = await asyncio.gather(*(lane.start() for lane in self._lanes), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            await self.close()
            raise failed[0]

    async def score(self, request: ScoreRequest) -> Scores:
        """Score one completion with all functions; never raises for what a function does."""
        task = _packed(request)
        calls = [lane.call(task) for lane in self._lanes]
        verdicts = {name: await call for name, call in zip(self.names, calls, strict=True)}
        return Scores(
            {name: reward for name, (reward, _) in verdicts.items()},
            {name: reason for name, (_, reason) in verdicts.items() if reason is not None},
        )

    async def close(self) -> None:
        """End every reward process; calls still waiting are cancelled. Idempotent."""
        await asyncio.gather(*(lane.close() for lane in self._lanes))


def _packed(request: ScoreRequest) -> bytes:
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
        unicode_errors="surrogatepass",
    )
    return packed
