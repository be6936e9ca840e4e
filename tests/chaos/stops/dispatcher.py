"""Stops a dispatcher while workers, graders and a trainer keep it busy.

The test plays everybody but the dispatcher. Workers die, fall silent and lose orders. A second dispatcher must see that
each group which the first one opened ends.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from streamrl.bus.port import Record, TopicPartition
from streamrl.producers.dispatch import dispatcher
from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import OtherRoles
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.control import FlowControl
from streamrl.schemas.identifiers import graders_group, make_group_id, make_trajectory_id, partition_of_worker
from streamrl.schemas.reports import SkipReason, WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CONTROL, HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, UNGRADED, WORK_ORDERS
from streamrl.schemas.trajectories import (
    FinishedCompletion,
    FinishReason,
    LengthEstimate,
    Prompt,
    Trajectory,
    UngradedTrajectory,
    WorkOrder,
)
from tests.chaos.stops.moment import Subject
from tests.chaos.stops.second_life import second_life
from tests.chaos.stops.slow_bus import Reader, SlowBus
from tests.producers.dispatch.dispatcher_harness import CountedSource, heartbeat, skip_record, step_report, trajectory

LOOP = LoopSettings(
    groups_per_step=4, num_generations=2, max_staleness=1, max_completion_length=100, heartbeat_timeout_s=0.15
)
MAX_ATTEMPTS = 3
WORKERS = 3
EVERY_S = 0.01
"""Each player acts about this often."""


class _VariedLengths(ConstantLength):
    """Predicts another length for each prompt.

    So the dispatcher orders the prompts of a window by length, and a stop leaves gaps between their positions.
    """

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        length = 1 + 37 * int(prompt.prompt_id.rpartition("/")[2]) % 90
        return super().predict(prompt, group_id).model_copy(update={"median": length, "upper": length})


def dispatcher_on(bus: SlowBus, *, has_graders: bool = False) -> Dispatcher:
    """Make a dispatcher with short leases."""
    predictor = _VariedLengths(LOOP)
    roles = OtherRoles(has_graders=has_graders)
    settings = DispatchSettings(order_timeout_s=1.0)
    dispatcher = Dispatcher(bus, bus.run, LOOP, settings, CountedSource(), predictor, roles=roles)
    dispatcher.poll_s, dispatcher.orders_per_turn, dispatcher.max_attempts = 0.01, 1, MAX_ATTEMPTS
    return dispatcher


@dataclass
class _RunAroundDispatcher:
    """Plays everybody but the dispatcher.

    ``trained``: the number of the trainer's newest weights. ``arrived``: the samples that the trainer has, by group.
    ``ended``: the groups that the trainer trained or skipped; ``skipped``: those that it skipped.
    ``to_grade``: records that the graders have read and not graded. ``has_begun``: the trainer has reported step 0.
    """

    bus: SlowBus
    random: Random
    has_graders: bool
    trained: int = 0
    orders: list[WorkOrder] = field(default_factory=list)
    arrived: dict[str, dict[int, Trajectory]] = field(default_factory=lambda: defaultdict(dict))
    ended: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    to_grade: list[Record] = field(default_factory=list)
    has_begun: bool = False
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.bus.run
        self._ordered = Reader(self.bus, WORK_ORDERS.full_name(run))
        self._finished = Reader(self.bus, TRAJECTORIES.full_name(run))
        self._ungraded = Reader(self.bus, UNGRADED.full_name(run))
        self._numbers = count()

    def dispatcher(self) -> Dispatcher:
        return dispatcher_on(self.bus, has_graders=self.has_graders)

    def listen(self) -> None:
        self.orders += [one for record in self._ordered.new() if isinstance(one := record.message(), WorkOrder)]

    async def load(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._train())
            for number in range(WORKERS):
                tasks.create_task(self._work(f"w{number}"))
            if self.has_graders:
                tasks.create_task(self._grade())
            tasks.create_task(self._operate())

    async def _operate(self) -> None:
        """Pause the run for a moment now and then."""
        while True:
            for mode, longest_s in (("run", 0.3), ("pause", 0.03)):
                await self.bus.send(CONTROL, FlowControl(sequence=next(self._numbers), sent_at=0.0, mode=mode))
                await asyncio.sleep(self.random.uniform(0, longest_s))

    async def _work(self, worker: str) -> None:
        orders = Reader(self.bus, WORK_ORDERS.full_name(self.bus.run), partition_of_worker(worker))
        while True:
            incarnation = f"{next(self._numbers)}"
            await self._live(worker, incarnation, orders)
            # The worker stays away for longer than its lease, or comes back before its lease ends.
            await asyncio.sleep(self.random.choice((0.0, 0.05, 2 * LOOP.heartbeat_timeout_s)))

    async def _live(self, worker: str, incarnation: str, orders: Reader) -> None:
        """Deliver the samples that are ordered, until this process of the worker dies or leaves."""
        owed, version, random = list[tuple[WorkOrder, int]](), self.trained, self.random
        for _ in range(random.randrange(1, 60)):
            for record in orders.new():
                order = record.message()
                # Now and then the worker loses an order, and its next heartbeat does not name that order.
                if isinstance(order, WorkOrder) and order.incarnation == incarnation and random.random() > 0.02:
                    owed += [(order, index) for index in order.sample_indices]
            finished = [one for one in owed if random.random() < 0.2]
            owed = [one for one in owed if one not in finished]
            for order, index in finished:
                await self._deliver(trajectory(order, index), order)
            version = self.trained if random.random() < 0.3 else version
            ages = {order.group_id: 0.0 for order, _ in owed}
            await self._beat(worker, incarnation=incarnation, number=version, orders=ages, capacity=8)
            # Sometimes the worker stalls for longer than its lease, then delivers samples that others have by now.
            await asyncio.sleep(2 * LOOP.heartbeat_timeout_s if random.random() < 0.01 else EVERY_S)
        if random.random() < 0.3:
            await self._beat(worker, incarnation=incarnation, number=version, state=WorkerState.STOPPED)

    async def _beat(self, worker: str, **fields: Any) -> None:
        await self.bus.send(HEARTBEATS, heartbeat(worker, **fields), worker)

    async def _deliver(self, made: Trajectory, order: WorkOrder) -> None:
        message = UngradedTrajectory.of(made, order.prompt) if self.has_graders else made
        await self.bus.send(UNGRADED if self.has_graders else TRAJECTORIES, message, order.group_id, order.partition)

    async def _grade(self) -> None:
        """Grade slowly, so that some samples wait for a grade when the dispatcher is stopped."""
        while True:
            self.to_grade += self._ungraded.new()
            for record in self.to_grade[: self.random.randrange(6)]:
                self.to_grade.remove(record)
                # A grader commits a grade together with the next offset to read.
                place = TopicPartition(record.topic, record.partition)
                self.bus.committed[graders_group(self.bus.run), place] = record.offset + 1
                message = record.message()
                assert isinstance(message, UngradedTrajectory)
                await self.bus.send(TRAJECTORIES, message.graded({}, {}), message.group_id, record.partition)
            await asyncio.sleep(self.random.uniform(0, 8 * EVERY_S))

    async def _train(self) -> None:
        """Train whole groups, the oldest first, and skip some."""
        if not self.has_begun:
            self.has_begun = True
            await self.bus.send(STEPS, step_report(0))
        while True:
            for record in self._finished.new():
                if isinstance(made := record.message(), Trajectory):
                    self.arrived[made.group_id].setdefault(made.sample_index, made)
            whole = sorted(filter(self._is_whole, self.arrived), key=lambda group: self.arrived[group][0].created_at)
            if whole and self.random.random() < 0.02:
                group = whole.pop()
                self.ended.add(group)
                self.skipped.add(group)
                await self.bus.send(SKIPS, skip_record(group, 0, SkipReason.ZERO_ADVANTAGE, step=self.trained))
            if len(whole) >= LOOP.groups_per_step:
                await self._take_step(whole[: LOOP.groups_per_step])
            await asyncio.sleep(self.random.uniform(0, EVERY_S))

    def _is_whole(self, group: str) -> bool:
        return group not in self.ended and len(self.arrived[group]) == LOOP.num_generations

    async def _take_step(self, groups: list[str]) -> None:
        versions = [made.admitted_version.number for group in groups for made in self.arrived[group].values()]
        if (age := self.trained - min(versions)) > LOOP.max_staleness:
            self.problems.append(f"step {self.trained + 1} trains samples that are {age} versions old")
        self.ended.update(groups)
        self.trained += 1
        await self.bus.send(STEPS, step_report(self.trained, groups))

    def next_position(self) -> int:
        """The position after the last prompt that was ordered."""
        self.listen()
        return max((order.position for order in self.orders), default=-1) + 1

    def delivered(self) -> set[str]:
        """The ids of the samples that are on the topics, graded or not."""
        topics = (TRAJECTORIES, UNGRADED)
        records = [one for topic in topics for one in Reader(self.bus, topic.full_name(self.bus.run)).new()]
        made = [record.message() for record in records]
        return {one.trajectory_id for one in made if isinstance(one, FinishedCompletion)}

    def left_to_do(self, before: int) -> list[str]:
        """List what the second dispatcher has still to do.

        The groups of all prompts before position ``before`` must end. A window of new prompts must be ordered.
        """
        now, ordered = self.next_position(), {order.group_id for order in self.orders}
        groups = [make_group_id(f"toy/{position}", 0) for position in range(before)]
        left = [f"group {group} is not ordered" for group in groups if group not in ordered]
        left += [f"group {group} does not end" for group in groups if group in ordered - self.ended]
        if now < before + LOOP.groups_per_step:
            left.append(f"only {now - before} prompts are ordered after those of the first life")
        return left

    def wrong(self) -> list[str]:
        """List doubled and lost orders, groups given up twice or too soon, and groups beyond the staleness bound."""
        self.listen()
        found, attempts = list[str](), dict[tuple[str, int], WorkOrder]()
        for order in self.orders:
            # An order whose fate was unknown is repeated as it was.
            if attempts.setdefault((order.group_id, order.attempt), order) != order:
                found.append(f"group {order.group_id} is ordered twice as attempt {order.attempt}")
        for group, attempt in attempts:
            if attempt and (group, attempt - 1) not in attempts:
                found.append(f"group {group} is ordered as attempt {attempt}, and attempt {attempt - 1} is lost")
        found += self._wrongly_given_up({*attempts})
        first = sorted((one for one in attempts.values() if one.attempt == 0), key=lambda order: order.created_at)
        kept = [order for order in first if order.group_id not in self.skipped]
        for number, order in enumerate(kept, 1):
            limit = (order.admitted_version.number + LOOP.max_staleness + 1) * LOOP.groups_per_step
            if number > limit:
                found.append(f"group {order.group_id} is number {number} at version {order.admitted_version}")
        return found

    def _wrongly_given_up(self, attempts: set[tuple[str, int]]) -> Iterator[str]:
        """List samples that were given up twice, or before their group was ordered ``MAX_ATTEMPTS`` times."""
        records: dict[str, set[bytes | None]] = defaultdict(set)
        for record in Reader(self.bus, TRAJECTORIES.full_name(self.bus.run)).new():
            made = record.message()
            if not isinstance(made, Trajectory) or made.finish_reason is not FinishReason.ABORT:
                continue
            records[made.trajectory_id].add(record.value)
            if made.attempt + 1 < MAX_ATTEMPTS or (made.group_id, made.attempt) not in attempts:
                yield f"{made.trajectory_id} is given up after {made.attempt + 1} orders, and some of them are lost"
        yield from (f"{name} is given up {len(values)} times" for name, values in records.items() if len(values) > 1)


@asynccontextmanager
async def of_a_run(_root: Path, random: Random) -> AsyncIterator[Subject]:
    around = _RunAroundDispatcher(SlowBus(random=Random(random.random())), random, has_graders=random.random() < 0.5)

    async def judge() -> list[str]:
        problems, before, delivered = around.bus.left_open(), around.next_position(), around.delivered()
        known = len(around.orders)
        problems += await second_life(around.dispatcher().run, around.load, lambda: around.left_to_do(before))
        around.listen()
        for order in around.orders[known:]:
            samples = [make_trajectory_id(order.group_id, index) for index in order.sample_indices]
            problems += [f"{one} is ordered again, and was delivered" for one in samples if one in delivered]
        return problems + around.problems + around.wrong() + around.bus.left_open()

    # A moment lasts a fraction of a second, so orders that were not confirmed are soon sent again.
    with mock.patch.object(dispatcher, "RETRY_S", 0.05):
        yield Subject(around.dispatcher().run, around.load, lambda: around.trained > 1, judge)
