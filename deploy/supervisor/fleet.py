"""Has as many workers as the coordinator wants: starts some, or asks one after the other to finish and leave.

Knows nothing of why so many are wanted. Invariant a_worker_that_leaves_loses_nothing: it is never ended from here; it
is drained by the coordinator's order, and its process ends by itself.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from deploy.supervisor.child import ChildSpec
from deploy.supervisor.supervisor import Supervisor
from schemas.errors import WireError
from schemas.messages.control import FleetTarget, OperatorCommand
from schemas.ports.bus import Bus, Outgoing, Publisher, Subscription
from schemas.wire.topics import COMMANDS, CONTROL

log = structlog.get_logger()

POLL_S = 0.5
CLIENT_ID = "fleet"
ASK_AGAIN_S = 10.0


@dataclass
class Fleet:
    """``spec_of``: the process of a worker's number; numbers from 0 to ``initial`` - 1 are there from the beginning.

    Never fewer than ``initial`` workers, never more than ``most``.
    """

    bus: Bus
    run_name: str
    supervisor: Supervisor
    spec_of: Callable[[int], ChildSpec]
    initial: int
    most: int
    clock: Callable[[], float] = time.time
    _present: dict[int, ChildSpec] = field(default_factory=dict)
    _leaving: dict[int, float] = field(default_factory=dict)
    _wanted: int = 0

    def __post_init__(self) -> None:
        self._wanted = self.initial
        self._present = {number: self.spec_of(number) for number in range(self.initial)}

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the wanted number of workers.

        Consumes: control (from the beginning: the last wanted number holds). Produces: processes, operator commands.
        Waits for: the coordinator; a worker that leaves.
        On failure: raises; the run goes on with the workers that it has.
        On stop: returns within one poll; the processes are the supervisor's.
        """
        subscription = await self.bus.subscribe([CONTROL.full_name(self.run_name)], client_id=CLIENT_ID)
        try:
            publisher = await self.bus.publisher(CLIENT_ID)
            try:
                await self._read_to_the_end(subscription)
                while not stop.is_set():
                    await self._obey(publisher)
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
            try:
                message = record.message()
            except WireError as error:
                log.warning("unreadable record ignored", topic=record.topic, offset=record.offset, error=str(error))
                continue
            if isinstance(message, FleetTarget):
                self._wanted = max(self.initial, min(self.most, message.workers))

    async def _obey(self, publisher: Publisher) -> None:
        """One act at a time; a worker that was asked to leave is gone when its process is."""
        for number in [number for number in self._leaving if self._is_gone(number)]:
            del self._leaving[number], self._present[number]
            log.info("worker left", worker=self.spec_of(number).name)
        staying = [number for number in self._present if number not in self._leaving]
        if len(staying) < self._wanted:
            self._start(next(number for number in range(self.most + 1) if number not in self._present))
        elif len(staying) > self._wanted:
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
            action="drain_worker", worker_id=name, reason="fewer workers are wanted", sent_at=self.clock()
        )
        await publisher.publish(Outgoing.of(COMMANDS.full_name(self.run_name), command, key=name))
