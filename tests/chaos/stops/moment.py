"""One moment: a role under load in an event loop of its own, ended, and looked at afterwards."""

import asyncio
import gc
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos.stops.watching import OWNER, ROLE, Complaints, Marks, SlowThreads, descriptors, slow_sql, soon

END_S = 15.0
"""Within which whatever is stopped or cancelled has ended."""
WAYS = ("stop", "cancel", "stop, then cancel", "cancel twice")
"""How a role is ended: asked to, as by SIGTERM; cancelled, as by a failure beside it; and both impatiently."""
MOST_TOLD = 8
"""Problems of one moment."""
AT_ITS_START = 0.15
"""Of the moments: before the role is ready."""


@dataclass
class Subject:
    """A role and what is around it. ``run`` ends when its event is set; ``load`` works it until it is cancelled.

    ``ready``: whether the load gets anywhere. ``judge``: what was lost or doubled, asked once the role has ended.
    ``span_s``: the moment is drawn from so many seconds.
    """

    run: Callable[[asyncio.Event], Awaitable[None]]
    load: Callable[[], Awaitable[None]]
    ready: Callable[[], bool]
    judge: Callable[[], Awaitable[list[str]]]
    span_s: float = 0.3


Role = Callable[[Path, Random], AbstractAsyncContextManager[Subject]]


@dataclass
class Moment:
    """``seed`` says when and how; ``problems`` is empty after a good end."""

    seed: int
    way: str = ""
    at_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def told(self) -> str:
        return f"seed {self.seed}, {self.way} after {self.at_s:.3f} s"


def live_through(role: Role, seed: int) -> Moment:
    """Play one moment from an empty directory."""
    random = Random(seed)
    moment = Moment(seed, random.choice(WAYS))
    complaints, slow, root = Complaints(), SlowThreads(Random(seed + 1)), Path(tempfile.mkdtemp(prefix="stops-"))
    gc.collect()
    threads, before = {*threading.enumerate()}, descriptors()
    with complaints.listening(), slow.patched(), slow_sql(Random(seed + 2)), asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(complaints.of_loop)
        try:
            runner.run(_play(role, root, random, moment, slow, threads))
        except Exception as error:  # whatever went wrong is this moment's result
            moment.problems.append(f"the test of it failed: {error!r:.500}")
    moment.problems += [f"complaint: {one}" for one in complaints.found]
    moment.problems += soon(lambda: [f"thread left: {one.name}" for one in {*threading.enumerate()} - threads])
    moment.problems += soon(lambda: [f"open: {what}" for fd, what in descriptors().items() if before.get(fd) != what])
    shutil.rmtree(root, ignore_errors=True)
    moment.problems = [one.replace(str(root), "ROOT") for one in moment.problems[:MOST_TOLD]]
    return moment


async def _play(
    role: Role, root: Path, random: Random, moment: Moment, slow: SlowThreads, threads: set[threading.Thread]
) -> None:
    marks, stop, loop = Marks(), asyncio.Event(), asyncio.get_running_loop()
    marks.install(loop)
    async with role(root, random) as subject:
        of_role = copy_context()
        of_role.run(OWNER.set, ROLE)
        running = loop.create_task(_as_coroutine(subject.run(stop)), name="the role", context=of_role)
        marks_of_role = of_role.run(OWNER.get)
        assert marks_of_role == ROLE
        loading = loop.create_task(_as_coroutine(subject.load()), name="the load")
        began = loop.time()
        if random.random() >= AT_ITS_START:
            async with asyncio.timeout(END_S):
                while not (subject.ready() or running.done() or loading.done()):
                    await asyncio.sleep(0.002)
        await asyncio.sleep(random.uniform(0, subject.span_s))
        moment.at_s = loop.time() - began
        if running.done():
            moment.problems.append("it ended before it was asked to")
        await _end(running, stop, moment, random)
        moment.problems += [f"a thread is still at {name}" for name in slow.under_way]
        for _ in range(5):
            await asyncio.sleep(0)
        moment.problems += [f"task left: {one}" for one in marks.left()]
        moment.problems += await asyncio.to_thread(soon, lambda: _threads_left(threads))
        loading.cancel()
        await asyncio.wait({loading})
        if not loading.cancelled() and (error := loading.exception()) is not None:
            moment.problems.append(f"the load failed: {error!r:.300}")
        moment.problems += await subject.judge()


def _threads_left(before: set[threading.Thread]) -> list[str]:
    """But for those of the loop's own executor, which wait for calls and end with the loop."""
    found = [one for one in {*threading.enumerate()} - before if not one.name.startswith("asyncio_")]
    return [f"thread left: {one.name}" for one in found]


async def _as_coroutine(waited: Awaitable[None]) -> None:
    await waited


async def _end(running: "asyncio.Task[None]", stop: asyncio.Event, moment: Moment, random: Random) -> None:
    is_cancelled = "cancel" in moment.way
    if moment.way.startswith("stop"):
        stop.set()
    else:
        running.cancel()
    if moment.way in ("stop, then cancel", "cancel twice"):
        await asyncio.sleep(random.uniform(0, 0.05))
        running.cancel()
    await asyncio.wait({running}, timeout=END_S)
    if not running.done():
        frames = [f"{frame.f_code.co_qualname}:{frame.f_lineno}" for frame in running.get_stack()]
        raise TimeoutError(f"it stands still for {END_S} s at {frames}")
    if running.cancelled():
        if not is_cancelled:
            moment.problems.append("it was asked to stop, and ended cancelled")
    elif (error := running.exception()) is not None:
        moment.problems.append(f"it ended with {error!r:.500}")
