"""Reads from the topics, for a supervisor, how many workers to run, and when a run with a remote trainer has ended.

``Fleet`` follows the number of workers that the coordinator wants. ``RemoteTrainerWatch`` detects the end of a run
whose trainer is supervised on another machine. Invariant a_worker_that_leaves_loses_nothing: the supervisor never
ends a worker to shrink the fleet; the coordinator drains the worker, and its process then exits.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import structlog

from streamrl.bus.port import Bus, Outgoing, Publisher, Subscription, message_of
from streamrl.deploy.local.supervisor import ChildSpec, Supervisor
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.control import FleetTarget, OperatorCommand
from streamrl.schemas.topics import COMMANDS, CONTROL

POLL_S = 0.5
CLIENT_ID = "fleet"
WORKERS_LEAVE_S = 60.0
"""Seconds that workers have to leave once the coordinator reports the end of a run whose trainer is elsewhere."""
ASK_AGAIN_S = 10.0
"""Seconds until an order to drain is repeated, because the coordinator may have restarted before it acted on it."""

log = structlog.get_logger()


@dataclass
class Fleet:
    """Keeps as many workers as the coordinator wants: starts workers, or lets it drain them one after the other.

    There are never fewer than ``initial`` workers and never more than ``most``. ``spec_of`` returns the process spec of
    a worker's number. The workers 0 to ``initial`` - 1 exist from the start.
    """

    bus: Bus
    run_name: str
    supervisor: Supervisor
    spec_of: Callable[[int], ChildSpec]
    initial: int
    most: int
    clock: Callable[[], float] = time.monotonic
    _present: dict[int, ChildSpec] = field(default_factory=dict)
    _leaving: dict[int, float] = field(default_factory=dict)
    _wanted: int = 0

    def __post_init__(self) -> None:
        self._wanted = self.initial
        self._present = {number: self.spec_of(number) for number in range(self.initial)}

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the wanted number of workers.

        Consumes: control (from the beginning; the last wanted number counts). Produces: processes, operator commands.
        Waits for: the coordinator; a worker that leaves.
        On failure: raises; the run continues with the workers that it has.
        On stop: returns within one poll; the supervisor ends the processes.
        """
        subscription = await self.bus.subscribe([CONTROL.full_name(self.run_name)], client_id=CLIENT_ID)
        try:
            publisher = await self.bus.publisher(CLIENT_ID)
            try:
                # Read to the end first: control may hold older targets, and acting on each in turn would start and
                # drain workers for nothing.
                await self._read_to_the_end(subscription)
                while not stop.is_set():
                    await self._adjust(publisher)
                    await self._listen(subscription, POLL_S)
            finally:
                await publisher.close()
        finally:
            await subscription.close()

    async def _read_to_the_end(self, subscription: Subscription) -> None:
        ends = await subscription.end_offsets()
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            await self._listen(subscription, POLL_S)

    async def _listen(self, subscription: Subscription, timeout_s: float) -> None:
        for record in await subscription.poll(timeout_s=timeout_s):
            if isinstance(message := message_of(record, warn=True), FleetTarget):
                self._wanted = max(self.initial, min(self.most, message.workers))

    async def _adjust(self, publisher: Publisher) -> None:
        """Take one step towards the wanted number. A draining worker counts as gone once its process has ended."""
        for number in [number for number in self._leaving if self._is_gone(number)]:
            del self._leaving[number], self._present[number]
            log.info("worker left", worker=self.spec_of(number).name)
        staying = [number for number in self._present if number not in self._leaving]
        if len(staying) < self._wanted:
            # The number may exceed ``most``, because a leaving worker keeps its number until its process has ended.
            self._start(next(number for number in count() if number not in self._present))
        elif len(staying) > self._wanted:
            # The highest number leaves, so that the initial workers stay. The time is set one interval back, so that
            # the loop below asks the worker at once.
            self._leaving[max(staying)] = self.clock() - ASK_AGAIN_S
        for number, asked_at in self._leaving.items():
            if self.clock() - asked_at >= ASK_AGAIN_S:
                self._leaving[number] = self.clock()
                await self._ask_to_leave(publisher, number)

    def _start(self, number: int) -> None:
        spec = self._present[number] = self.spec_of(number)
        log.info("worker joins", worker=spec.name, wanted=self._wanted)
        self.supervisor.join(spec)

    def _is_gone(self, number: int) -> bool:
        return self._present[number].name in self.supervisor.ended

    async def _ask_to_leave(self, publisher: Publisher, number: int) -> None:
        name = self._present[number].name
        log.info("worker asked to leave", worker=name, wanted=self._wanted)
        command = OperatorCommand(
            action="drain_worker", worker_id=name, reason="fewer workers are wanted", sent_at=time.time()
        )
        await publisher.publish(Outgoing.of(COMMANDS.full_name(self.run_name), command, key=name))


@dataclass
class RemoteTrainerWatch:
    """Ends the run if its trainer is elsewhere: once the topics say that it is over and its workers have left.

    ``finish_timeout_s``: the coordinator's time-out, by which its final word may be late after a restart.
    """

    state: RunState
    last_step: int
    supervisor: Supervisor
    finish_timeout_s: float = 0.0
    clock: Callable[[], float] = time.time
    look_every_s: float = POLL_S

    async def run(self, stop: asyncio.Event) -> None:
        """Check the state of the run periodically.

        Consumes: the state that others fold from the topics. Produces: the supervisor's end.
        Waits for: the coordinator's report that the run is over, then for the workers to leave, with a time-out.
        On failure: nothing here fails. On stop: returns within one check.
        """
        ended_at = None
        while not stop.is_set():
            if self._is_over():
                ended_at = self.clock() if ended_at is None else ended_at
                have_left = not self.state.living_workers(self.clock())
                if have_left or self.clock() - ended_at > self.finish_timeout_s + WORKERS_LEAVE_S:
                    self.supervisor.finished.set()
                    return
            await asyncio.sleep(self.look_every_s)

    def _is_over(self) -> bool:
        if not self.state.own_trainer_leads:
            return self.state.progress.finished
        return self.state.progress.finished_step >= self.last_step
