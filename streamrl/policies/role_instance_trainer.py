"""Keeps the trainer of an attached instance alive, as `streamrl run` does with the processes of a run.

Invariants, each with a test of its name:
- a_crashed_trainer_is_restarted, by the same rules as a run's processes;
- a_detached_instance_is_not_restarted: it ends at once, whether it is running, starting or waiting to be started;
- a_name_is_held_once: of two commands with one name, the second is refused while the first sends heartbeats.
"""

import asyncio
import os
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import structlog

from streamrl.bus.history import BusHistory
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.port import Bus, Outgoing, Position, Publisher, TopicPartition, message_of
from streamrl.bus.waiting import wait_for_event
from streamrl.deploy.local.logs import LogRotation
from streamrl.deploy.local.supervisor import CRASHED_AT_STOP, ChildSpec, Supervisor, stop_on_signals
from streamrl.schemas import stopping
from streamrl.schemas.control import InstanceState
from streamrl.schemas.errors import BusError, StreamRLError, UserError
from streamrl.schemas.identifiers import scope_of
from streamrl.schemas.import_path import module_command
from streamrl.schemas.reports import InstanceBeat
from streamrl.schemas.topics import CONTROL, HEARTBEATS
from streamrl.settings.loading import secret_variables
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import RunSettings, Settings

POLL_S = 0.5
RETRY_S = 1.0
GONE_POLL_S = 0.02
BEAT_S = 1.0
SILENT_AFTER_S = 5.0
"""Seconds without a heartbeat, five of its intervals, after which an instance counts as gone."""
LAST_BEAT_S = 2.0
RECENT = 500
"""Number of newest records of a heartbeats topic that show which commands were alive recently."""

log = structlog.get_logger()


async def keep_trainer_alive(settings: Settings, attached_at: int, *, adopt: bool = False) -> int:
    """Start an instance's trainer, and restart it when it crashes, until it ends, is detached, or Ctrl-C.

    ``settings``: as stored in the instance's directory, plus the broker's address, which is not stored there.
    ``attached_at``: offset of the command that attached the instance. With ``adopt`` the first start continues although
    the directory was lost or is another one. The exit code is 0, that of a signal, or 7 if the trainer crashed while it
    was stopped.

    Raises:
        UserError: a mistake that the user can correct, at the first start or at every start.
        Superseded: another trainer of this instance took over.
        StreamRLError: the trainer crashed too often.
    """
    run, spec = settings.run, trainer_spec(settings, adopt=adopt)
    print(f"instance {run.instance} of run {run.name}, in {run.path}/; its log is {spec.log_path}")
    with stop_on_signals() as stop:
        crashes = await supervise_instance(spec, run, KafkaBus(settings.kafka), attached_at, stop)
    for crash in crashes:
        print(f"error: {crash}", file=sys.stderr)
    if crashes:
        return CRASHED_AT_STOP
    return stopping.exit_code() if stop.is_set() else 0


async def supervise_instance(
    spec: ChildSpec, run: RunSettings, bus: Bus, attached_at: int, stop: asyncio.Event
) -> Sequence[str]:
    """Keep the process of a spec alive until ``stop``; returns a message if it crashed while it was stopped.

    Raises:
        StreamRLError: see ``keep_trainer_alive``.
    """
    supervisor = Supervisor([spec], run.max_restarts)
    watch = DetachWatch(bus, run.name, run.instance, attached_at, supervisor)
    rotation = LogRotation(spec.log_path.parent)
    over = asyncio.Event()
    watching = [asyncio.create_task(loop.run(over)) for loop in (watch, rotation)]
    try:
        await supervisor.run(stop)
    finally:
        over.set()
        _, late = await asyncio.wait(watching, timeout=2 * POLL_S)
        for task in late:  # it waits for a broker that is down
            task.cancel()
        for error in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(error, Exception):
                log.warning("a loop next to the instance's trainer failed; the trainer went on", error=str(error))
    return supervisor.crashes


def trainer_spec(settings: Settings, *, adopt: bool = False) -> ChildSpec:
    """How to start an instance's trainer: from the file in its directory, with the broker's current address."""
    directory = RunDirectory(settings.run.path)
    command = module_command("streamrl", "trainer", str(directory.config))
    # Secrets are passed on in the environment, since the file does not have them.
    return ChildSpec(
        name=f"trainer-{settings.run.instance}",
        command=[*command, f"--kafka.bootstrap_servers={settings.kafka.bootstrap_servers}"],
        log_path=directory.logs / "trainer.log",
        environment=secret_variables(settings),
        essential=True,
        only_first=["--adopt"] if adopt else [],
    )


@dataclass
class DetachWatch:
    """Ends an instance when it is detached, even while it has no trainer that could read the message.

    Only control messages for commands after offset ``attached_at`` count.
    """

    bus: Bus
    run_name: str
    instance: str
    attached_at: int
    supervisor: Supervisor

    async def run(self, over: asyncio.Event) -> None:
        """Follow control until the instance is detached, or its trainer has ended.

        Consumes: control, from the beginning. Produces: the end of the supervisor.
        Waits for: an operator.
        On failure: looks again, from the beginning, once the broker answers.
        On stop: returns within one poll.
        """
        topic = CONTROL.full_name(self.run_name)
        while not over.is_set():
            try:
                control = await self.bus.subscribe([topic], client_id=f"{self.instance}-supervisor", start="earliest")
            except StreamRLError:
                await wait_for_event(over, RETRY_S)
                continue
            try:
                while not over.is_set():
                    records = await control.poll(timeout_s=POLL_S)
                    if any(self._is_detached(message_of(record)) for record in records):
                        log.info("detached: ending with a checkpoint", instance=self.instance)
                        await self._end()
                        return
            except StreamRLError as error:
                log.warning("not known whether the instance is detached", error=str(error))
                await wait_for_event(over, RETRY_S)
            finally:
                await control.close()

    def _is_detached(self, message: object) -> bool:
        return (
            isinstance(message, InstanceState)
            and message.policy == self.instance
            and message.mode == "detached"
            and message.command_offset > self.attached_at
        )

    async def _end(self) -> None:
        """Ask the trainer to end, and wait for it; then keep the supervisor from starting it again."""
        asked_pid = -1
        while self.supervisor.children:
            for child in self.supervisor.children.values():
                if child.pid != asked_pid:
                    asked_pid = child.pid
                    child.terminate()
            await asyncio.sleep(GONE_POLL_S)
        self.supervisor.finished.set()


@dataclass
class NameHolder:
    """Announces once a second that this command keeps the trainer of an instance alive.

    The command whose first heartbeat comes first on the topic holds the name. The broker's order decides, and no clock
    except the reader's own.
    """

    bus: Bus
    run_name: str
    instance: str
    silent_after_s: float = SILENT_AFTER_S
    beat_s: float = BEAT_S
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    _sequence: int = 0

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """A block that holds the name. A name is free after its command is silent for a while, or at once if it left.

        Raises:
            UserError: another command holds the name.
            BusError: the broker does not answer.
        """
        publisher = await self.bus.publisher(f"{self.instance}-attach")
        try:
            await self._refuse_if_held(await self._beat(publisher))
            beats = asyncio.create_task(self.beat_loop(publisher))
            try:
                yield
            finally:
                beats.cancel()
                await asyncio.wait({beats})
        finally:
            with suppress(BusError, TimeoutError):
                async with asyncio.timeout(LAST_BEAT_S):
                    await self._beat(publisher, leaving=True)
            await publisher.close()

    async def beat_loop(self, publisher: Publisher) -> None:
        """Send heartbeats.

        Consumes: nothing. Produces: heartbeats of the instance's command.
        Waits for: the interval.
        On failure: goes on; the next heartbeat replaces one that cannot be sent.
        On stop: is cancelled; ``holding`` sends the last heartbeat.
        """
        while True:
            await asyncio.sleep(self.beat_s)
            with suppress(BusError):
                await self._beat(publisher)

    async def _beat(self, publisher: Publisher, *, leaving: bool = False) -> Position:
        topic = HEARTBEATS.full_name(scope_of(self.run_name, self.instance))
        beat = InstanceBeat(
            policy=self.instance,
            incarnation=self.incarnation,
            holder=f"process {os.getpid()} on {socket.gethostname()}",
            leaving=leaving,
            sequence=self._sequence,
            sent_at=time.time(),
        )
        self._sequence += 1
        return await publisher.publish(Outgoing.of(topic, beat, key=self.instance))

    async def _refuse_if_held(self, ours: Position) -> None:
        """Raise if a command that was on the topic before us, and has not left, still sends heartbeats."""
        from streamrl.inspection.diagnostics.tail import newest_records

        topic = HEARTBEATS.full_name(scope_of(self.run_name, self.instance))
        history, before = BusHistory(self.bus, client_id=f"{self.instance}-attach"), dict[str, bool]()
        for record in await newest_records(history, topic, await history.extents(topic), RECENT):
            if isinstance(beat := message_of(record), InstanceBeat) and record.offset < ours.offset:
                before[beat.incarnation] = not beat.leaving
        others = {incarnation for incarnation, has_stayed in before.items() if has_stayed}
        if not others:
            return
        start = {TopicPartition(topic, ours.partition): ours.offset + 1}
        listening = await self.bus.subscribe([topic], client_id=f"{self.instance}-attach", start=start)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.silent_after_s
        try:
            while others and loop.time() < deadline:
                for record in await listening.poll(timeout_s=min(POLL_S, self.silent_after_s)):
                    beat = message_of(record)
                    if not isinstance(beat, InstanceBeat) or beat.incarnation not in others:
                        continue
                    if not beat.leaving:
                        raise UserError(
                            f"expected no other command to attach {self.instance} to run {self.run_name}, got "
                            f"{beat.holder}, which keeps its trainer alive; attach under another name, or end the "
                            f"other with `streamrl detach {self.instance} --run {self.run_name}`"
                        )
                    others.discard(beat.incarnation)
        finally:
            await listening.close()
