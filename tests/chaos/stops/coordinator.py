"""Stops a coordinator while trainers, workers, relays and an operator keep it busy.

The test plays everybody but the coordinator. A second coordinator must announce what the first one left.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from random import Random
from unittest import mock

from streamrl.coordinator import coordinator
from streamrl.coordinator.coordinator import Coordinator, CoordinatorTimeouts, FleetScaling
from streamrl.coordinator.scaling import FleetBounds
from streamrl.policies import arms
from streamrl.policies.coordinating import SeveralPolicyControl
from streamrl.policies.splitting import deal_workers
from streamrl.schemas.control import (
    AnnouncedWeights,
    ArmShare,
    ArmWeights,
    Control,
    FleetTarget,
    OperatorCommand,
    PolicySplit,
    RunFinished,
    Served,
    WeightsReady,
    WorkerClaimed,
)
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, scope_of
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, CONTROL, HEARTBEATS, STEPS
from tests.chaos.stops.moment import Subject
from tests.chaos.stops.second_life import second_life
from tests.chaos.stops.slow_bus import Reader, SlowBus
from tests.coordinator.factories import heartbeat, relay_beat, step_report

SECOND = "second"
WORKERS, RELAYS = 4, 2
EVERY_S = 0.01
"""Each player acts about this often."""
WAITING = {"time/step": 1.0, "time/wait_for_batch": 0.9}
"""Metrics of a trainer that waits for generation. They make the coordinator ask for more workers."""


@dataclass
class _Trainer:
    """Exports weights at each step. Now and then it goes back a few steps, as a trainer does after a crash."""

    policy: str
    lineage: int = 1
    number: int = 0
    shift: int = 0
    served: Served | None = None
    reports: list[StepReport] = field(default_factory=list)

    def step(self, served: Served | None, random: Random, *, finished: bool = False) -> StepReport:
        is_served = served is not None and served.policy == self.policy
        self.number += 1
        if served is not None and is_served and served != self.served:
            self.served, self.shift = served, served.since.number + 1 - self.number
            self.lineage = max(self.lineage, served.since.lineage) + 1
        elif self.number > 5 and random.random() < 0.1:
            self.lineage, self.number = self.lineage + 1, self.number - random.randrange(1, 4)
        made = step_report(self.lineage, self.number, finished=finished).replace(
            policy=None if self.policy == SERVED_POLICY else self.policy,
            served_as=PolicyVersion(self.lineage, self.number + self.shift) if is_served else None,
            group_ids=(f"g{self.number}",),
            metrics=WAITING,
        )
        self.reports.append(made)
        return made


@dataclass
class _Operator:
    """Gives only commands that change something. The coordinator must carry out each command exactly once."""

    mode: str = "run"
    served: str = SERVED_POLICY
    arm: str | None = None
    is_attached: bool = False
    offsets: list[int] = field(default_factory=list)

    def next(self, random: Random, *, may_promote: bool) -> OperatorCommand:
        if not self.is_attached:
            self.is_attached = True
            return OperatorCommand(action="attach", policy=SECOND, algorithm="rloo", sent_at=0.0)
        wanted = random.choice(("flow", "drain_worker", "split", "promote"))
        if wanted == "flow":
            self.mode = "run" if self.mode == "pause" else "pause"
            return OperatorCommand(action="resume" if self.mode == "run" else "pause", sent_at=0.0)
        other = SECOND if self.served == SERVED_POLICY else SERVED_POLICY
        if wanted == "split" or (wanted == "promote" and self.arm is not None):
            self.arm = other if self.arm is None else None
            shares = () if self.arm is None else (ArmShare(policy=self.arm, share=0.5),)
            return OperatorCommand(action="split", shares=shares, sent_at=0.0)
        if wanted == "promote" and may_promote:
            self.served = other
            return OperatorCommand(action="promote", policy=other, sent_at=0.0)
        return OperatorCommand(action="drain_worker", worker_id=f"w{random.randrange(WORKERS)}", sent_at=0.0)


@dataclass
class _RunAroundCoordinator:
    """Plays everybody but the coordinator.

    ``holders``: the newest incarnation of each worker that has not left. ``told``: the messages on the control topic.
    ``is_settled``: the second coordinator has announced everything, so the trainer may take its last step.
    """

    bus: SlowBus
    random: Random
    holders: dict[str, str] = field(default_factory=dict)
    operator: _Operator = field(default_factory=_Operator)
    told: list[Control] = field(default_factory=list)
    is_settled: bool = False
    is_finished: bool = False

    def __post_init__(self) -> None:
        self.bus.create_topic(STEPS.full_name(scope_of(self.bus.run, SECOND)), 1)
        self.trainers = {policy: _Trainer(policy) for policy in (SERVED_POLICY, SECOND)}
        self._control, self._numbers = Reader(self.bus, CONTROL.full_name(self.bus.run)), count()

    def coordinator(self) -> Coordinator:
        return Coordinator(
            self.bus,
            self.bus.run,
            timeouts=CoordinatorTimeouts(heartbeat_s=0.15),
            policies=SeveralPolicyControl,
            scaling=FleetScaling(FleetBounds(1, WORKERS + 4), overlaps=True, settle_steps=0),
        )

    def listen(self) -> None:
        self.told += [message for record in self._control.new() if isinstance(message := record.message(), Control)]

    def last(self, kind: type[Control]) -> Control | None:
        return next((message for message in reversed(self.told) if isinstance(message, kind)), None)

    @property
    def served(self) -> Served | None:
        found = self.last(Served)
        return found if isinstance(found, Served) else None

    async def step(self, trainer: _Trainer, *, finished: bool = False) -> None:
        self.listen()
        made = trainer.step(self.served, self.random, finished=finished)
        await self.bus.send(STEPS, made, scope=scope_of(self.bus.run, trainer.policy))

    async def beat(self, worker: str, incarnation: str, state: str = "ready") -> None:
        made = heartbeat(worker, incarnation=incarnation, sequence=next(self._numbers), state=state)
        await self.bus.send(HEARTBEATS, made.replace(wire=WIRE_VERSION))

    async def beat_relay(self, name: str) -> None:
        await self.bus.send(HEARTBEATS, relay_beat(name, sequence=next(self._numbers)))

    async def load(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for trainer in self.trainers.values():
                tasks.create_task(self._train(trainer))
            for number in range(WORKERS):
                tasks.create_task(self._work(f"w{number}"))
            for number in range(RELAYS):
                tasks.create_task(self._relay(f"r{number}"))
            tasks.create_task(self._operate())

    async def _train(self, trainer: _Trainer) -> None:
        while True:
            await self.step(trainer)
            await asyncio.sleep(self.random.uniform(0, 4 * EVERY_S))

    async def _work(self, worker: str) -> None:
        """Restart again and again. A process leaves or falls silent; the one before it may still send heartbeats."""
        for life in count():
            former, incarnation = self.holders.get(worker), f"{life}"
            self.holders[worker] = incarnation
            for _ in range(self.random.randrange(1, 12)):
                await self.beat(worker, incarnation)
                if former is not None and self.random.random() < 0.2:
                    await self.beat(worker, former)
                await asyncio.sleep(self.random.uniform(0, 2 * EVERY_S))
            if self.random.random() < 0.5:
                await self.beat(worker, incarnation, "stopped")
                del self.holders[worker]
            await asyncio.sleep(self.random.choice((0.0, 0.2)))

    async def _relay(self, name: str) -> None:
        while True:
            for _ in range(self.random.randrange(1, 12)):
                await self.beat_relay(name)
                await asyncio.sleep(EVERY_S)
            await asyncio.sleep(self.random.choice((0.0, 0.2)))

    async def _operate(self) -> None:
        while True:
            self.listen()
            may_promote = self.last(WeightsReady) is not None
            command = self.operator.next(self.random, may_promote=may_promote)
            self.operator.offsets.append((await self.bus.send(COMMANDS, command)).offset)
            await asyncio.sleep(self.random.uniform(0, 4 * EVERY_S))

    async def quiet_load(self) -> None:
        """Keep all workers and relays alive. The served trainer takes its last step once everything is announced."""
        for number in range(WORKERS):
            self.holders.setdefault(f"w{number}", "last")
        while True:
            for worker, incarnation in self.holders.items():
                await self.beat(worker, incarnation)
            for number in range(RELAYS):
                await self.beat_relay(f"r{number}")
            if self.is_settled and not self.is_finished:
                self.is_finished = True
                await self.step(self.trainers[self.operator.served], finished=True)
            await asyncio.sleep(EVERY_S)

    def left_to_do(self) -> list[str]:
        """List what the second coordinator has still to announce. The end of the run comes last."""
        self.listen()
        left = [*self._missing_commands(), *self._missing_weights(), *self._missing_workers()]
        if left:
            return left
        self.is_settled = True
        return [] if self.last(RunFinished) is not None else ["it never says that the run has finished"]

    def _missing_commands(self) -> Iterator[str]:
        carried_out = {_command_of(message) for message in self.told}
        yield from (f"command {offset} is lost" for offset in self.operator.offsets if offset not in carried_out)

    def _missing_weights(self) -> Iterator[str]:
        served, trainer = self.served, self.trainers[self.operator.served]
        names = [report.version if served is None else report.served_as for report in trainer.reports]
        newest = max((name for name in names if name and (served is None or name > served.since)), default=None)
        told = max((message.version for message in self.told if isinstance(message, WeightsReady)), default=None)
        if newest is not None and told != newest:
            yield f"weights {newest} are not announced, {told} are"
        if (arm := self.operator.arm) is not None:
            own = max((one.version for one in self.trainers[arm].reports if one.served_as is None), default=None)
            of_arm = [one.version for one in self.told if isinstance(one, ArmWeights) and one.policy == arm]
            if own is not None and max(of_arm, default=None) != own:
                yield f"weights {own} of the arm {arm} are not announced"

    def _missing_workers(self) -> Iterator[str]:
        claims = {one.worker_id: one.incarnation for one in self.told if isinstance(one, WorkerClaimed)}
        for worker, holder in self.holders.items():
            if claims.get(worker) != holder:
                yield f"the id of {worker} is claimed for {claims.get(worker)}, and {holder} holds it"
        split = self.last(PolicySplit)
        if isinstance(split, PolicySplit):
            dealt = deal_workers(split.shares, [f"w{number}" for number in range(WORKERS)], split.workers)
            if dealt != split.workers:
                yield f"{split.workers} work for arms, and {dealt} should"

    def doubled(self) -> list[str]:
        """List the messages that are on the control topic too often or in the wrong order."""
        self.listen()
        found, known, newest = list[str](), dict[int, Control](), -1
        for message in self.told:
            if known.setdefault(message.sequence, message) != message:
                found.append(f"two messages are number {message.sequence}: {known[message.sequence]!r}, {message!r}")
            if message.sequence < newest and message is known[message.sequence]:
                found.append(f"number {message.sequence} comes after {newest}")
            newest = max(newest, message.sequence)
        once = list(known.values())  # a message whose fate was unknown is repeated under its number
        for offset in self.operator.offsets:
            if (times := sum(_command_of(message) == offset for message in once)) > 1:
                found.append(f"command {offset} is carried out {times} times")
        for policy in ("", *self.trainers):
            found += _wrong_order([one for one in once if isinstance(one, AnnouncedWeights) and one.series == policy])
        targets = [one.workers for one in once if isinstance(one, FleetTarget)]
        found += [
            f"{later} workers are wanted after {one}" for one, later in pairwise(targets) if abs(one - later) != 1
        ]
        if (ends := sum(isinstance(one, RunFinished) for one in once)) > 1:
            found.append(f"the end is told {ends} times")
        return found


def _command_of(message: Control) -> int:
    return int(getattr(message, "command_offset", -1))


def _wrong_order(announced: list[AnnouncedWeights]) -> Iterator[str]:
    """List announcements of older weights, and repeats that name the same relays."""
    for one, later in pairwise(announced):
        if later.version < one.version or (later.version == one.version and {*later.relays} == {*one.relays}):
            yield f"weights {later.version} are announced after {one.version}, both at {sorted(later.relays)}"


@asynccontextmanager
async def of_a_run(_root: Path, random: Random) -> AsyncIterator[Subject]:
    around = _RunAroundCoordinator(SlowBus(random=Random(random.random())), random)

    async def judge() -> list[str]:
        problems = around.bus.left_open()
        problems += await second_life(around.coordinator().run, around.quiet_load, around.left_to_do)
        return problems + around.doubled() + around.bus.left_open()

    # A moment lasts a fraction of a second, so what takes seconds in a run takes as much less here.
    with (
        mock.patch.multiple(coordinator, POLL_S=0.05, RELAYS_AGAIN_S=0.05, CLAIM_AGAIN_S=0.05),
        mock.patch.multiple(arms, POLL_S=0.05, RELAYS_AGAIN_S=0.05),
    ):
        yield Subject(around.coordinator().run, around.load, lambda: around.last(WeightsReady) is not None, judge)
