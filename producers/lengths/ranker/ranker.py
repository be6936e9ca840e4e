"""The ranker's loop: reads the trajectories as a group of its own, so that its student makes newer models of lengths.

Invariants, each with a test of its name:
- nobody_waits_for_the_ranker: predictors take models from a folder when there are newer ones; without a ranker they go
  on with what they have;
- the_past_makes_no_version: after a restart, models are made only once everything is read that was there at the start.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from producers.lengths.completion import Completion
from producers.lengths.ranker.students import Student
from schemas.errors import WireError
from schemas.messages.base import Message
from schemas.messages.control import RunFinished
from schemas.messages.trajectories import FinishReason, Trajectory
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition
from schemas.wire.topics import CONTROL, TRAJECTORIES

log = structlog.get_logger()

CLIENT_ID = "ranker"
POLL_S = 0.5
COMMIT_S = 5.0
REMEMBERED = 100_000
"""Trajectories, the newest, that are recognised when they are read again."""


@dataclass
class Ranker:
    """One per run; a second one does no harm but to the versions' numbers. ``alive`` is told of every turn."""

    bus: Bus
    run_name: str
    student: Student
    clock: Callable[[], float] = time.time
    alive: Callable[[str], None] = lambda name: None
    learned: int = field(default=0, init=False)
    _seen: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Learn every completion of the run.

        Consumes: trajectories, from the earliest; control, from now on.
        Produces: nothing on a topic; versions of a model in a folder. It commits how far it has read, for displays.
        Waits for: trajectories.
        On failure: raises; a restart reads the trajectories again and goes on with the newest version.
        On stop: ends within one poll, as it does when the run has finished; a version under way is given up.
        """
        topic = TRAJECTORIES.full_name(self.run_name)
        trajectories = await self.bus.subscribe([topic], client_id=CLIENT_ID, group_id=f"{self.run_name}.{CLIENT_ID}")
        control = await self.bus.subscribe([CONTROL.full_name(self.run_name)], client_id=CLIENT_ID, start="latest")
        try:
            await self._learn(trajectories, control, stop)
        finally:
            await trajectories.close()
            await control.close()
            self.student.close()
        log.info("ranker ended", completions=self.learned)

    async def _learn(self, trajectories: Subscription, control: Subscription, stop: asyncio.Event) -> None:
        ends = await trajectories.end_offsets()
        committed_at, is_held, finished = self.clock(), True, False
        self.student.hold(True)
        while not stop.is_set() and not finished:
            self.alive("ranker")
            for record in await trajectories.poll(timeout_s=POLL_S):
                self._observe(record)
            finished = any(isinstance(_message(record), RunFinished) for record in await control.poll(timeout_s=0.0))
            positions = await trajectories.positions()
            if is_held and all(positions.get(tp, end) >= end for tp, end in ends.items()):
                is_held = False
                self.student.hold(False)
                log.info("ranker has read the past", completions=self.learned)
            if self.clock() - committed_at >= COMMIT_S:
                committed_at = self.clock()
                await self._commit(trajectories, positions)

    async def _commit(self, trajectories: Subscription, positions: dict[TopicPartition, int]) -> None:
        try:
            await trajectories.commit(positions)
        except Exception as error:
            log.warning("ranker's position not committed", error=str(error))

    def _observe(self, record: Record) -> None:
        message = _message(record)
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        if message.trajectory_id in self._seen:
            return
        self._seen[message.trajectory_id] = None
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        self.student.observe(Completion.of(message))
        self.learned += 1


def _message(record: Record) -> Message | None:
    try:
        return None if record.value is None else record.message()
    except WireError:
        return None
