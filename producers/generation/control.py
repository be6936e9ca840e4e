"""Follows the control topic for one worker: the newest weights, whether to start new work, whether to leave.

``streamrl/weights/series.py`` decides which series of weights the worker follows; the default is the run's own.

A run's end that is on the topic when the worker starts does not make the worker leave: the run may have been resumed,
with weights that are not announced yet. A later end counts, unless there are newer weights than those of its step.
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
    check_run_identity,
)
from streamrl.schemas.errors import BusUnavailable, WireError
from streamrl.weights.adopt import WeightsAdopter
from streamrl.weights.series import OwnSeries, WantedSeries

log = structlog.get_logger()

POLL_S = 0.5
RETRY_S = 0.5


@dataclass
class ControlFollower:
    """Follows the control topic from its start; its fields are valid once ``caught_up`` is set.

    A drain order that was on the topic when this process started was for an earlier process and is ignored.
    ``run_id``: id of the run in the worker's run directory, None if the directory has none. When control names the
    topics' run, status and weights cache switch to that run.
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
        """Whether this worker should finish the samples that it holds and leave."""
        return self.caught_up.is_set() and (self.drained or self.finished or self.mode == "drain")

    async def control_loop(self) -> None:
        """Follow the topic.

        Consumes: control. Produces: offers to the adopter; ``mode``, ``drained``, ``finished``; claims and read times
            for the fence.
        Waits for: the coordinator.
        On failure: a record that cannot be decoded is logged and skipped; a failing bus raises. ``Superseded``: another
            incarnation holds this worker's id. ``IdentityError``: the topics belong to another run.
        On stop: is cancelled; nothing is lost.
        """
        await self._read_to_the_end(is_old=True)
        self.caught_up.set()
        # Only now the newest announcement is known; fetching an earlier one would be wasted.
        self._offer()
        while True:
            self.on_tick("control")
            for record in await self.subscription.poll(timeout_s=POLL_S):
                self._apply(record, is_old=False)
            if self.fence.was_suspended:
                log.warning("process was suspended, reading control to its end before anything is published")
                await self._read_to_the_end(is_old=False)
            # Called after ``was_suspended``, which compares with the time that this sets.
            self.fence.note_control_read()
            self._offer()

    async def _read_to_the_end(self, *, is_old: bool) -> None:
        # Reads up to the current end: a growing topic would never be read to its end.
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
                log.warning("control cannot be read, trying again", error=str(error))
                await asyncio.sleep(RETRY_S)

    def _offer(self) -> None:
        # Until the series has announced weights, the worker keeps sampling with the weights and policy that it has.
        if (newest := self._newest.get(self._series)) is not None:
            self.adopter.offer(newest)

    def _apply(self, record: Record, *, is_old: bool) -> None:
        if record.value is None:
            return
        try:
            message = record.message()
        except WireError as error:
            log.error("a control record cannot be decoded", offset=record.offset, error=str(error))
            return
        if self.wanted.observe(message):
            self._series = self.wanted.of_worker(self.fence.worker_id)
        match message:
            case AnnouncedWeights():
                before = self._newest.get(message.series)
                if before is None or message.version >= before.version:  # the same version may be at other relays now
                    self._newest[message.series] = message
            case FlowControl():
                self.mode = message.mode
                log.info("flow changed", mode=message.mode, reason=message.reason)
            case DrainWorker() if message.worker_id == self.fence.worker_id and not is_old:
                self.drained = True
                log.info("asked to leave", reason=message.reason)
            case WorkerClaimed() if message.worker_id == self.fence.worker_id:
                # Old claims are of earlier incarnations, unless the coordinator answered our first heartbeat already.
                if not is_old or message.incarnation == self.fence.incarnation:
                    self.fence.claimed(message.incarnation)
            case RunIdentity():
                check_run_identity(self.run, self.run_id, message)
                # A run that was deleted and started again under the same name has other topics and another id.
                self.run_id = self.status.run_id = message.run_id
                self.adopter.fetcher.set_run_id(message.run_id)
            case RunFinished():
                self._end(message, is_old)

    def _end(self, message: RunFinished, is_old: bool) -> None:
        if is_old:
            log.info("the run finished earlier, waiting for it to be resumed", step=message.step)
        elif (newest := self._newest.get("")) is None or message.step >= newest.step:
            self.finished = True
