"""Follows the control topic for one worker: the newest weights, whether to start anything new, whether to leave.

Of which series the weights are, another mechanism says (``streamrl/weights/series.py``): the run's own unless it does.

The end of a run that was there before this process began may have been followed by a continuation whose weights are not
announced yet, so the worker stays. The end counts when it comes later and there are no newer weights than its step's.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from streamrl.bus.port import Record, Subscription, TopicPartition
from streamrl.producers.generation.outbox import Fence
from streamrl.producers.generation.status import WorkerStatus
from streamrl.schemas.control import (
    AnnouncedWeights,
    DrainWorker,
    FlowControl,
    RunFinished,
    RunIdentity,
    WorkerClaimed,
    refuse_stranger,
)
from streamrl.schemas.errors import BusUnavailable, WireError
from streamrl.weights.adopt import WeightsAdopter
from streamrl.weights.series import OwnSeries, WantedSeries

log = structlog.get_logger()

POLL_S = 0.5
RETRY_S = 0.5


@dataclass
class ControlFollower:
    """Follows the control topic from its beginning; what it says holds from ``caught_up`` on.

    An order to drain this worker that was there before this process began was meant for an earlier one. ``run_id``: of
    the run whose directory the worker has, None if that says nothing; once control says whose topics these are, status
    and weights cache are that run's.
    """

    subscription: Subscription
    fence: Fence
    adopter: WeightsAdopter
    status: WorkerStatus
    on_tick: Callable[[str], None] = lambda name: None
    run: str = ""
    run_id: str | None = None
    wanted: WantedSeries = field(default_factory=OwnSeries)
    mode: Literal["run", "pause", "drain"] = field(init=False, default="run")
    drained: bool = field(init=False, default=False)
    finished: bool = field(init=False, default=False)
    caught_up: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _newest: dict[str, AnnouncedWeights] = field(init=False, default_factory=dict)
    _series: str = field(init=False, default="")

    @property
    def may_start(self) -> bool:
        """Whether new completions may be started."""
        return self.caught_up.is_set() and self.mode == "run" and not self.leaving

    @property
    def leaving(self) -> bool:
        """Whether this worker is to finish what it holds and leave."""
        return self.caught_up.is_set() and (self.drained or self.finished or self.mode == "drain")

    async def control_loop(self) -> None:
        """Follow the topic.

        Consumes: control. Produces: offers to the adopter, ``mode``, ``drained``, ``finished``, looks at the fence.
        Waits for: the coordinator.
        On failure: a record that does not decode is logged and passed over; a failing bus raises.
            ``Superseded``: another incarnation holds this worker's id. ``IdentityError``: this is another run.
        On stop: is cancelled; nothing is lost.
        """
        await self._read_to_the_end(is_old=True)
        self.caught_up.set()
        # Only now is the newest of all announcements known; earlier ones would be fetched for nothing.
        self._offer()
        while True:
            self.on_tick("control")
            for record in await self.subscription.poll(timeout_s=POLL_S):
                self._apply(record, is_old=False)
            if self.fence.was_suspended:
                log.warning("process was suspended, reading control to its end before anything is published")
                await self._read_to_the_end(is_old=False)
            # After was_suspended, which looks at the time that this sets.
            self.fence.control_was_read()
            self._offer()

    async def _read_to_the_end(self, *, is_old: bool) -> None:
        # The end as it is now: a topic that goes on growing would never be read to its end.
        ends = await self._ends()
        while any(position < ends[tp] for tp, position in (await self.subscription.positions()).items()):
            for record in await self.subscription.poll(timeout_s=POLL_S):
                self._apply(record, is_old=is_old)

    async def _ends(self) -> dict[TopicPartition, int]:
        while True:
            self.on_tick("control")
            try:
                return await self.subscription.end_offsets()
            except BusUnavailable as error:
                log.warning("control cannot be read, asking again", error=str(error))
                await asyncio.sleep(RETRY_S)

    def _offer(self) -> None:
        # Until weights of the series are announced, what this worker has is good for orders of the one that it is of.
        if (newest := self._newest.get(self._series)) is not None:
            self.adopter.offer(newest)

    def _apply(self, record: Record, *, is_old: bool) -> None:
        if record.value is None:
            return
        try:
            message = record.message()
        except WireError as error:
            log.error("control record not understood", offset=record.offset, error=str(error))
            return
        if self.wanted.observe(message):
            self._series = self.wanted.of_worker(self.fence.worker_id)
        match message:
            case AnnouncedWeights():
                before = self._newest.get(message.series)
                if before is None or message.version >= before.version:  # the same ones may be at other relays now
                    self._newest[message.series] = message
            case FlowControl():
                self.mode = message.mode
                log.info("flow changed", mode=message.mode, reason=message.reason)
            case DrainWorker() if message.worker_id == self.fence.worker_id and not is_old:
                self.drained = True
                log.info("asked to leave", reason=message.reason)
            case WorkerClaimed() if message.worker_id == self.fence.worker_id:
                # Old claims are of earlier incarnations, unless our first heartbeat was answered before we got to read.
                if not is_old or message.incarnation == self.fence.incarnation:
                    self.fence.claimed(message.incarnation)
            case RunIdentity():
                refuse_stranger(self.run, self.run_id, message)
                # From now on: if a run was deleted and started again under its name, its topics are another run's.
                self.run_id = self.status.run_id = message.run_id
                self.adopter.fetcher.set_run_id(message.run_id)
            case RunFinished():
                self._end(message, is_old)

    def _end(self, message: RunFinished, is_old: bool) -> None:
        if is_old:
            log.info("the run finished earlier, waiting for its continuation", step=message.step)
        elif (newest := self._newest.get("")) is None or message.step >= newest.step:
            self.finished = True
