from collections.abc import Callable
from typing import Any

from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.producers.dispatch.recovery import rebuild
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ConstantLength, ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.lengths.startup import build_predictor, replay
from streamrl.schemas.errors import BusUnavailable
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import FinishReason, Trajectory
from tests.producers.dispatch.dispatcher_harness import LOOP, DispatcherHarness, order, trajectory

SETTINGS = LengthSettings(predictor="learned")
RULES = FitRules(min_samples=64, min_observations=8)


def _taught() -> LearnedLengths:
    return LearnedLengths(SETTINGS, LOOP, rules=RULES)


async def _publish(harness: DispatcherHarness, sample: Trajectory, partition: int = 0) -> None:
    await harness.send(TRAJECTORIES, sample, sample.group_id, partition)


async def _replay(
    harness: DispatcherHarness, predictor: LearnedLengths, skip: Callable[[str], bool] = lambda group: False
) -> int:
    return await replay(harness.bus, "r", predictor, skip=skip)


async def test_lengths_on_the_topic_are_learned_again_after_a_restart() -> None:
    harness, predictor = DispatcherHarness(), _taught()
    for position in range(40):
        for index in range(2):
            await _publish(harness, trajectory(order(f"toy/{position}/0"), index, length=5 + position % 4))
    assert await _replay(harness, predictor) == 80
    predictor.wait()
    assert predictor.model is not None
    assert predictor.predict(order("toy/99/0").prompt).predictor == "learned/v1"


async def test_repeats_aborts_and_skipped_groups_are_not_learned() -> None:
    harness = DispatcherHarness()
    for _ in range(2):
        await _publish(harness, trajectory(order("toy/0/0"), 0))
    await _publish(harness, trajectory(order("toy/0/0"), 1, reason=FinishReason.ABORT))
    await _publish(harness, trajectory(order("toy/1/0"), 0))
    assert await _replay(harness, _taught(), skip=lambda group: group == "toy/1/0") == 1


async def test_boundaries_that_were_fitted_are_fitted_again_after_a_restart() -> None:
    harness = DispatcherHarness()
    for position in range(300):
        await _publish(harness, trajectory(order(f"toy/{position}/0"), 0, length=5 + position % 80))
    predictor = build_predictor(LengthSettings(buckets="fitted"), LOOP)
    assert await replay(harness.bus, "r", predictor, skip=lambda group: False) == 300
    estimate = predictor.predict(order("toy/99/0").prompt)
    assert estimate.boundaries_version == predictor.buckets.version > 0
    assert predictor.buckets.boundaries.lengths[0] < 64


async def test_a_predictor_that_learns_nothing_reads_nothing() -> None:
    harness = DispatcherHarness()
    await _publish(harness, trajectory(order("toy/0/0"), 0))
    predictor = ConstantLength(LOOP)
    assert await replay(harness.bus, "r", predictor, skip=lambda group: False) == 0


async def test_a_broken_bus_is_no_reason_to_stop() -> None:
    class _Down(MemoryBus):
        async def subscribe(self, *arguments: Any, **named: Any) -> MemorySubscription:
            raise BusUnavailable("expected a broker, got none")

    assert await replay(_Down(), "r", _taught(), skip=lambda group: False) == 0


async def test_a_rebuilt_dispatcher_has_learned_each_sample_once() -> None:
    """Of a trained group from the topic's past, of one in flight as the flight's sample."""
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.beat()
    for name in ("toy/0/0", "toy/1/0"):
        sent = order(name)
        await harness.send(WORK_ORDERS, sent, sent.group_id, 0)
        await harness.finish(sent)
    await harness.step(1, ["toy/0/0"])
    predictor = _Counting()
    await rebuild(harness.bus, "r", DispatchState(LOOP, DispatchSettings(), predictor), lambda: 0.0)
    assert sorted(predictor.groups) == ["toy/0/0"] * 2 + ["toy/1/0"] * 2


class _Counting(LearnedLengths):
    def __init__(self) -> None:
        super().__init__(SETTINGS, LOOP, rules=RULES)
        self.groups: list[str] = []

    def observe(self, completion: ObservedCompletion) -> None:
        self.groups.append(completion.group_id)
