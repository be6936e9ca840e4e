"""The coordinator's driver: step reports, heartbeats and operator commands in, control messages out.

It handles a few messages per step, holds nothing that its topics do not hold, and may be restarted at any time.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from coordinator.announcer import Announcer
from coordinator.flow import decide
from coordinator.membership import Membership, Standing
from coordinator.recovery import Recovered, message_of, recover
from coordinator.settings import CoordinatorSettings
from schemas.messages.control import OperatorCommand
from schemas.messages.reports import Heartbeat, StepReport
from schemas.ports.bus import Bus, Subscription
from schemas.wire.topics import COMMANDS, HEARTBEATS

log = structlog.get_logger()

POLL_S = 0.5


@dataclass
class Coordinator:
    """One per run."""

    bus: Bus
    run_name: str
    settings: CoordinatorSettings
    clock: Callable[[], float] = time.time
    client_id: str = "coordinator"

    async def run(self, stop: asyncio.Event) -> None:
        """Announce weights and flow until stopped.

        Consumes: steps (from the beginning), heartbeats and operator commands (from now on).
        Produces: control.
        Waits for: any of the three.
        On failure: raises; a restart replays the topics and goes on.
        On stop: closes its clients; what it announced stays on the compacted topic.
        """
        state, steps = await recover(self.bus, self.run_name, self.client_id)
        others = await self.bus.subscribe(
            [HEARTBEATS.full_name(self.run_name), COMMANDS.full_name(self.run_name)],
            client_id=self.client_id,
            start="latest",
        )
        publisher = await self.bus.publisher(self.client_id)
        announcer = Announcer(publisher, self.run_name, self.settings.relays, self.clock, state.next_sequence)
        members = Membership(self.settings.heartbeat_timeout_s)
        log.info("coordinator ready", announced=str(state.ledger.announced), mode=state.mode, finished=state.finished)
        try:
            await self._announce_due(state, announcer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._steps_loop(steps, state, announcer, stop))
                tasks.create_task(self._members_loop(others, members, state, announcer, stop))
        finally:
            for client in (steps, others, publisher):
                await client.close()

    async def _steps_loop(
        self, steps: Subscription, state: Recovered, announcer: Announcer, stop: asyncio.Event
    ) -> None:
        """Turn step reports into announcements.

        Consumes: steps. Produces: control (weights ready, run finished). Waits for: the trainer.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        while not stop.is_set():
            for record in await steps.poll(timeout_s=POLL_S):
                message = message_of(record)
                if message is not None:
                    state.apply(message)
                if isinstance(message, StepReport) and not state.ledger.is_newest(message):
                    log.warning("report of an older lineage ignored", version=str(message.version))
            await self._announce_due(state, announcer)

    async def _announce_due(self, state: Recovered, announcer: Announcer) -> None:
        report = state.ledger.to_announce()
        if report is not None:
            state.ledger.observe_announcement(await announcer.weights_ready(report))
            log.info("weights announced", version=str(report.version), step=report.step)
        latest = state.ledger.latest
        if latest is not None and latest.finished and not state.finished:
            await announcer.run_finished(latest.step, "the trainer reached its last step")
            state.finished = True
            log.info("run finished", step=latest.step)

    async def _members_loop(
        self, others: Subscription, members: Membership, state: Recovered, announcer: Announcer, stop: asyncio.Event
    ) -> None:
        """Follow who is there, and carry out what operators ask for.

        Consumes: heartbeats, commands. Produces: control (flow, drain of one worker). Waits for: either.
        On failure: raises to ``run``. On stop: returns within one poll.
        """
        lost: set[str] = set()
        while not stop.is_set():
            for record in await others.poll(timeout_s=POLL_S):
                match message_of(record):
                    case Heartbeat() as heartbeat:
                        if (standing := members.observe(heartbeat, self.clock())) is not None:
                            log.info("worker changed", worker=heartbeat.worker_id, standing=standing.value)
                            lost.discard(heartbeat.worker_id)
                    case OperatorCommand() as command:
                        await self._obey(command, state, announcer)
            for worker in set(members.with_standing(Standing.LOST, self.clock())) - lost:
                log.warning("worker lost", worker=worker, silent_for_s=self.settings.heartbeat_timeout_s)
                lost.add(worker)

    async def _obey(self, command: OperatorCommand, state: Recovered, announcer: Announcer) -> None:
        decision = decide(command, state.mode, state.finished)
        if decision is None:
            log.warning("command changes nothing", action=command.action, mode=state.mode, finished=state.finished)
        elif decision.drain_worker is not None:
            await announcer.drain_worker(decision.drain_worker, decision.reason)
        elif decision.mode is not None:
            await announcer.flow(decision.mode, decision.reason)
            state.mode = decision.mode
