import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from streamrl.bus.port import Outgoing
from streamrl.producers.lengths.learned.model_updates import FitRules
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.learned.ranker import Ranker
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.schemas.control import RunFinished
from streamrl.schemas.topics import CONTROL, TRAJECTORIES
from streamrl.schemas.trajectories import FinishReason
from tests.producers.dispatch.dispatcher_harness import LOOP, DispatcherHarness, order, trajectory
from tests.progress import patience, within


class _Trainer:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.learned: list[tuple[str, int]] = []
        self.told: list[str] = []

    def observe(self, completion: ObservedCompletion) -> None:
        self.learned.append((completion.group_id, completion.length))

    def hold(self, held: bool) -> None:
        self.told.append(f"{'held' if held else 'free'} after {len(self.learned)}")

    def wait(self) -> None:
        """Never busy."""

    def close(self) -> None:
        self.told.append("closed")


async def _publish(harness: DispatcherHarness, group: str, sample: int = 0, **more: object) -> None:
    record = trajectory(order(group), sample, **more)  # type: ignore[arg-type]
    await harness.send(TRAJECTORIES, record, group, 0)


@asynccontextmanager
async def _running(harness: DispatcherHarness, trainer: _Trainer) -> AsyncIterator[Ranker]:
    ranker, stop = Ranker(harness.bus, "r", trainer), asyncio.Event()
    task = asyncio.create_task(ranker.run(stop))
    try:
        yield ranker
    finally:
        stop.set()
        await within(task, 5)


async def _until(trainer: _Trainer, count: int) -> None:
    async with patience(5):
        while len(trainer.learned) < count or len(trainer.told) < 2:
            await asyncio.sleep(0.01)


async def test_completions_of_the_past_and_new_ones_are_learned_once() -> None:
    harness, trainer = DispatcherHarness(), _Trainer()
    await _publish(harness, "toy/0/0", length=5)
    async with _running(harness, trainer):
        await _until(trainer, 1)
        for _ in range(2):
            await _publish(harness, "toy/1/0", length=7)
        await _publish(harness, "toy/2/0", reason=FinishReason.ABORT)
        await _publish(harness, "toy/3/0", length=9)
        await _until(trainer, 3)
    assert trainer.learned == [("toy/0/0", 5), ("toy/1/0", 7), ("toy/3/0", 9)]
    assert trainer.told[-1] == "closed"


async def test_no_version_is_made_before_the_past_is_read() -> None:
    harness, trainer = DispatcherHarness(), _Trainer()
    for position in range(20):
        await _publish(harness, f"toy/{position}/0")
    async with _running(harness, trainer):
        await _until(trainer, 20)
    assert trainer.told == ["held after 0", "free after 20", "closed"]


async def test_it_ends_with_the_run_and_records_that_cannot_be_read_are_passed_over() -> None:
    harness, trainer = DispatcherHarness(), _Trainer()
    ranker = Ranker(harness.bus, "r", trainer)
    task = asyncio.create_task(ranker.run(asyncio.Event()))
    await asyncio.sleep(0.05)
    publisher = await harness.bus.publisher("x")
    await publisher.publish(Outgoing(TRAJECTORIES.full_name("r"), b"noise", None, partition=0))
    await _publish(harness, "toy/0/0")
    await _until(trainer, 1)
    await harness.send(CONTROL, RunFinished(sequence=1, sent_at=0.0, step=3), "finished", 0)
    await within(task, 5)
    assert ranker.learned == 1


async def test_predictors_never_wait_for_the_ranker(tmp_path: Path) -> None:
    """It dies at a completion and leaves a file that is no model: predictions go on, and no topic has changed."""
    harness, clock = DispatcherHarness(), [0.0]
    taking = LengthSettings(predictor="learned", refit="process", model_dir=tmp_path)
    predictor = LearnedLengths(taking, LOOP, clock=lambda: clock[0], rules=FitRules(min_samples=64))
    fitting = LearnedLengths(taking.model_copy(update={"refit": "thread"}), LOOP, rules=FitRules(min_samples=64))
    for position in range(64):
        await _publish(harness, f"toy/{position}/0", length=5 + position)
        fitting.observe(ObservedCompletion(order(f"toy/{position}/0").prompt, f"toy/{position}/0", 5 + position))
    fitting.wait()
    clock[0] += 10
    predictor.predict(order().prompt)
    predictor.wait()
    before = predictor.predict(order().prompt)
    records = {name: [len(log) for log in topic.partitions] for name, topic in harness.bus.logs.items()}

    class _Dying(_Trainer):
        def observe(self, completion: ObservedCompletion) -> None:
            (tmp_path / "lengths-00000002.safetensors").write_bytes(b"half")
            raise MemoryError

    with pytest.raises(MemoryError):
        await Ranker(harness.bus, "r", _Dying()).run(asyncio.Event())
    clock[0] += 10
    predictor.predict(order().prompt)
    predictor.wait()
    assert predictor.predict(order().prompt) == before
    assert before.predictor == "learned/v1"
    assert predictor.failures == 0
    assert records == {name: [len(log) for log in topic.partitions] for name, topic in harness.bus.logs.items()}
