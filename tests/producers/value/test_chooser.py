import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Record
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.producers.value.chooser import ValuedPrompts
from streamrl.schemas.codec import encode
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import WorkOrder
from tests.fakes import messages
from tests.fakes.topics import create_topics, records_of, send
from tests.producers.dispatch.dispatcher_harness import RUN, CountedSource, DispatcherHarness, trajectory

LOOP = LoopSettings(
    groups_per_step=4, num_generations=4, max_staleness=1, max_completion_length=100, heartbeat_timeout_s=30.0
)
PROMPTS = 8
"""In a pass over the data. Those of the second half always fail, and are never learned."""


def rewards_of(order: WorkOrder) -> list[float]:
    is_hard = int(order.prompt.prompt_id.rpartition("/")[2]) >= PROMPTS // 2
    return [0.0] * 4 if is_hard else [0.0, 1.0, 0.0, 1.0]


@dataclass
class ValuedRun:
    """A run whose dispatcher orders prompts by their values, and may be killed at any time."""

    history: Sequence[str] = ()
    has_values: bool = True
    harness: DispatcherHarness = field(init=False)
    step: int = 0
    read: int = 0
    """Orders read so far; all are for one worker, so they are in one partition."""

    def __post_init__(self) -> None:
        def chooser() -> ValuedPrompts:
            return ValuedPrompts({}, LOOP.num_generations, 0, self.history)

        chosen = {"chooser": chooser} if self.has_values else {}
        self.harness = DispatcherHarness(loop=LOOP, source=CountedSource(PROMPTS), orders_per_turn=1, **chosen)  # type: ignore[arg-type]

    async def train(self, steps: int) -> None:
        """Sample every order, and train all groups that have both rewards, as dynamic sampling does."""
        if not self.step:
            await self.harness.step(0)
        await self.harness.beat(number=self.step)
        for _ in range(steps):
            ended: list[str] = []
            while len(ended) < LOOP.groups_per_step:
                await self.harness.until(lambda: len(self._log()) > self.read)
                for record in self._log()[self.read :]:
                    self.read += 1
                    order = record.message()
                    assert isinstance(order, WorkOrder)
                    rewards = rewards_of(order)
                    for sample, reward in enumerate(rewards):
                        message = trajectory(order, sample).replace(rewards={"right": reward})
                        await self.harness.send(TRAJECTORIES, message, order.group_id, order.partition)
                    if len(set(rewards)) > 1:
                        ended.append(order.group_id)
                    else:
                        await self.harness.skip(order.group_id, 0, SkipReason.ZERO_ADVANTAGE, step=self.step)
            self.step += 1
            await self.harness.step(self.step, ended)
            await self.harness.beat(number=self.step)

    def _log(self) -> list[Record]:
        return records_of(self.harness.bus, RUN, WORK_ORDERS)

    def hard_share(self, orders: Sequence[WorkOrder]) -> float:
        return sum(len(set(rewards_of(order))) == 1 for order in orders) / max(1, len(orders))


async def test_prompts_that_always_fail_are_ordered_less_often() -> None:
    run = ValuedRun()
    await run.harness.start()
    await run.train(30)
    await run.harness.end()
    orders = run.harness.orders()
    assert run.hard_share(orders[:16]) == pytest.approx(0.5, abs=0.15)
    assert run.hard_share(orders[-40:]) < 0.25
    # They are not forgotten.
    assert run.hard_share(orders[40:]) > 0.0


async def test_without_values_every_prompt_is_ordered_and_orders_have_the_bytes_they_had() -> None:
    run = ValuedRun(has_values=False)
    await run.harness.start()
    await run.train(3)
    await run.harness.end()
    orders = run.harness.orders()
    assert [order.position for order in orders] == list(range(len(orders)))
    for message in (*orders, trajectory(orders[0], 0)):
        assert b"chance" not in encode(message)
        assert b"decided" not in encode(message)


@pytest.mark.parametrize("seed", range(4))
async def test_after_every_crash_no_position_is_decided_twice_or_left_out(seed: int) -> None:
    """Recorded_probability_decides, also for prompts that a dispatcher had chosen and not sent when it was killed."""
    chance, run = random.Random(seed), ValuedRun()
    for _ in range(6):
        await run.harness.start()
        await run.train(2)
        for _ in range(chance.randrange(8)):
            await asyncio.sleep(0)
        await run.harness.end()
    orders = run.harness.orders()
    by_position = {order.position: order for order in orders}
    assert len(by_position) == len(orders)
    decided = [pair for order in orders for pair in order.decided or ()]
    known = dict(decided)
    # A dispatcher that sends what an earlier one left reports its probability once more.
    assert {(position, probability) for position, probability in decided} == set(known.items())
    # Orders of the last window may be unsent.
    whole = max(by_position) - LOOP.groups_per_step
    assert whole > 40
    assert set(range(whole)) <= set(known)
    for position in range(whole):
        order = by_position.get(position)
        assert (order is not None) == (known[position] > 0.0)
        if order is not None:
            assert order.chance is not None
            assert order.chance.probability == known[position]


def test_a_prompt_that_was_chosen_and_not_sent_keeps_its_recorded_probability() -> None:
    """Recorded_probability_decides."""
    state = DispatchState(LOOP, DispatchSettings(), ConstantLength(LOOP), chooser=ValuedPrompts({}, 4, 0, ()))
    # Of one plan, the longer prompt was sent first; then the dispatcher was killed.
    state.restore(messages.work_order("d/0/4", position=4, decided=((2, 0.0), (3, 0.25), (4, 0.5))), now=0.0)
    state.positions.find_unsent([])
    state.resume(now=0.0)
    assert 3 in state.positions.unsent
    assert 2 not in state.positions.unsent
    prompt, _ = CountedSource(PROMPTS).prompt_at(3)
    is_ordered, chance = state.decide(3, prompt)
    assert is_ordered
    assert chance is not None
    assert chance.probability == 0.25
    assert state.decided == {3: 0.25}


async def test_a_restarted_dispatcher_decides_as_the_one_before() -> None:
    run = ValuedRun()
    first = await run.harness.start()
    await run.train(12)
    await run.harness.settle()
    await run.harness.end()
    second = await run.harness.start()
    await run.harness.settle()
    await run.harness.end()
    for position in range(1000, 1000 + PROMPTS):
        prompt, _ = run.harness.source.prompt_at(position)
        one, other = (life.state.chooser.decide(position, prompt, run.step) for life in (first, second))
        assert one.is_ordered == other.is_ordered
        assert one.chance is not None
        assert other.chance is not None
        assert one.chance.probability == pytest.approx(other.chance.probability)
        assert one.chance.zero_advantage == pytest.approx(other.chance.zero_advantage)


async def test_another_runs_history_is_used_from_the_start() -> None:
    earlier = ValuedRun(has_values=False)
    await earlier.harness.start()
    await earlier.train(16)
    await earlier.harness.end()
    run = ValuedRun(history=["earlier"])
    create_topics(run.harness.bus, "earlier", LOOP.trajectory_partitions)
    for order in earlier.harness.orders():
        for sample, reward in enumerate(rewards_of(order)):
            message = trajectory(order, sample).replace(rewards={"right": reward})
            await send(run.harness.bus, "earlier", TRAJECTORIES, message, order.group_id, order.partition)
    await run.harness.start()
    await run.train(6)
    await run.harness.end()
    assert run.hard_share(run.harness.orders()) < 0.3


async def test_a_start_reads_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = MemoryBus()
    create_topics(bus, "r", LOOP.trajectory_partitions)
    for number in range(40):
        for sample in range(2):
            message = messages.trajectory(f"d/{number}/0", sample)
            await send(bus, "r", TRAJECTORIES, message, message.group_id, number % 2)
    for limit, value, most in (("MAX_RECORDS", 20, 10), ("MAX_BYTES", 20_000, 39), ("MAX_RECORDS", 1000, 40)):
        with monkeypatch.context() as patch:
            patch.setattr(f"streamrl.producers.value.chooser.{limit}", value)
            chooser = ValuedPrompts({}, 2, 0)
            await chooser.recall(bus, "r", lambda: None)
            assert 0 < chooser.values.prompts <= most


async def test_an_earlier_run_that_the_broker_does_not_have_is_refused() -> None:
    chooser, bus = ValuedPrompts({}, 4, 0, ["never-was"]), MemoryBus()
    create_topics(bus, "r", LOOP.trajectory_partitions)
    with pytest.raises(SettingsError, match=r"dispatch\.value_history .* 'never-was'"):
        await chooser.recall(bus, "r", lambda: None)


async def test_prompts_that_an_earlier_life_ordered_are_left_out() -> None:
    harness = DispatcherHarness(loop=LOOP)
    dispatcher = await harness.start()
    await harness.end()
    dispatcher.state.positions.ordered = frozenset({"toy/1/0"})
    drawn = await dispatcher._draw(3)
    assert [pending.position for pending in drawn] == [0, 2]
