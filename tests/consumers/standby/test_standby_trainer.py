import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from streamrl.bus.memory import MemoryBus, MemorySubscription
from streamrl.bus.port import Record, TopicPartition
from streamrl.consumers.standby.standby_trainer import Prefetch, StandbyTrainer
from streamrl.consumers.training.checkpoints.catalogue import next_start
from streamrl.consumers.training.leading import LeadingTrainer
from streamrl.schemas.errors import BusUnavailable, Superseded
from tests.consumers.training.surviving import surviving
from tests.consumers.training.trainer_harness import TRAINING, TrainerHarness, group
from tests.progress import calm_s, within

TAKEOVER_S = 0.6
BEAT_S = 0.1
FIRST_WORD_S = 4.0


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path, model_path)


def leader(harness: TrainerHarness, beat_s: float = BEAT_S, **changes: Any) -> LeadingTrainer:
    return LeadingTrainer(harness.trainer(**changes), beat_s)


def standby(harness: TrainerHarness, **changes: Any) -> StandbyTrainer:
    context, store = harness.context(**changes), harness.store()
    prefetch = Prefetch(store, context.parts.open_policy, lambda: next_start(store.storage))
    ready = replace(context, parts=replace(context.parts, checkpoints=prefetch, open_policy=prefetch.open_policy))
    return StandbyTrainer(ready, prefetch, TAKEOVER_S, beat_s=BEAT_S, first_beat_timeout_s=FIRST_WORD_S)


@asynccontextmanager
async def running(role: LeadingTrainer | StandbyTrainer) -> AsyncIterator["asyncio.Task[None]"]:
    stop = asyncio.Event()
    task = asyncio.create_task(role.run(stop))
    try:
        yield task
    finally:
        stop.set()
        with suppress(Superseded, asyncio.CancelledError):
            await within(task, 20)


async def publish(harness: TrainerHarness, groups: range) -> None:
    for number in groups:
        await harness.publish_group(number)


async def test_a_silent_leader_is_replaced(harness: TrainerHarness) -> None:
    await publish(harness, range(6))
    with capture_logs() as logs:
        async with running(leader(harness)) as leading:
            await harness.until_version(1, 3)
            async with running(standby(harness)):
                await harness.until(lambda: any(line["event"] == "standing by" for line in logs))
                leading.cancel()
                killed_at, calm = time.monotonic(), calm_s()
                await publish(harness, range(6, 8))
                await harness.until_version(2, 3)
                assert time.monotonic() - killed_at > TAKEOVER_S / 2
                assert calm_s() - calm < TAKEOVER_S + 5.0
                await harness.until_version(2, 4)
    assert any(line["event"] == "continuing with the policy loaded in advance" for line in logs)
    found = surviving(harness.reports(), harness.skips())
    assert [report.step for report in found.steps] == [1, 2, 3, 4]
    trained = [ref.trajectory_id for report in found.steps for ref in report.trained_refs]
    assert sorted(trained) == sorted(sample.trajectory_id for number in range(8) for sample in group(number))


async def test_a_leader_with_heartbeats_is_not_replaced(harness: TrainerHarness) -> None:
    async with running(leader(harness)):
        await harness.until(lambda: bool(harness.reports()))
        async with running(standby(harness)) as waiting:
            await asyncio.sleep(3 * TAKEOVER_S)
            assert not waiting.done()
            assert harness.store().storage.claims() == [1], "no step was taken meanwhile, and nobody took over"


async def test_a_leader_that_is_still_starting_is_left_alone(harness: TrainerHarness) -> None:
    async with running(standby(harness)):
        await asyncio.sleep(3 * TAKEOVER_S)
        assert harness.store().storage.claims() == []
        await harness.until(lambda: bool(harness.reports()))  # nobody came


async def test_a_leader_that_was_only_slow_ends_superseded(harness: TrainerHarness) -> None:
    await publish(harness, range(4))
    async with running(leader(harness, beat_s=1000.0)) as slow:
        await harness.until_version(1, 2)
        waiting = standby(harness)
        waiting.first_beat_timeout_s = TAKEOVER_S
        async with running(waiting):
            await harness.until_version(2, 2)
            await publish(harness, range(4, 8))
            with pytest.raises(Superseded):
                await within(slow, 20)
            await harness.until_version(2, 4)
    found = surviving(harness.reports(), harness.skips())
    assert max(found.places.values()) == 1
    assert [report.step for report in found.steps] == [1, 2, 3, 4]


async def test_a_standby_told_to_take_over_does_not_wait(harness: TrainerHarness) -> None:
    ready = standby(harness)
    ready.takeover_after_s = 1000.0
    async with running(ready):
        ready.take_over()
        await harness.until(lambda: bool(harness.reports()))


async def test_a_standby_ends_with_the_run(harness: TrainerHarness) -> None:
    training = TRAINING.model_copy(update={"max_steps": 2})
    async with running(leader(harness, training=training)) as leading:
        await harness.until(lambda: bool(harness.reports()))
        async with running(standby(harness, training=training)) as waiting:
            await asyncio.sleep(TAKEOVER_S / 2)
            await publish(harness, range(4))
            await within(leading, 20)
            await within(waiting, 20)
    assert harness.store().storage.claims() == [1]


class SilentBus(MemoryBus):
    """Answers nothing while ``is_away``."""

    is_away = False

    async def subscribe(self, *args: Any, **options: Any) -> MemorySubscription:
        found = await super().subscribe(*args, **options)
        return SilentSubscription(self, found.offsets, found.group_id)


class SilentSubscription(MemorySubscription):
    bus: SilentBus

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        if self.bus.is_away:
            await asyncio.sleep(timeout_s)
            return []
        return await super().poll(max_records=max_records, timeout_s=timeout_s)

    async def end_offsets(self) -> Mapping[TopicPartition, int]:  # type: ignore[override]
        if self.bus.is_away:
            raise BusUnavailable("no answer")
        return await super().end_offsets()


async def test_a_broker_outage_does_not_count_as_silence(harness: TrainerHarness) -> None:
    silent = SilentBus()
    silent.logs = harness.bus.logs
    silent.is_away = True
    waiting = standby(harness, bus=silent)
    waiting.first_beat_timeout_s = TAKEOVER_S
    async with running(waiting):
        await asyncio.sleep(3 * TAKEOVER_S)
        assert harness.store().storage.claims() == []
        silent.is_away = False
        await harness.until(lambda: bool(harness.reports()))
