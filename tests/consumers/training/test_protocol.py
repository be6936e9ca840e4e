"""Killed at each of its named points, the trainer resumes without loss or repeat, and learns bit for bit the same."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.port import Outgoing
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.training.surviving import Surviving, surviving
from tests.consumers.training.trainer_harness import LOOP, TRAINING, TrainerHarness, group
from tests.progress import within

ALGORITHM = AlgorithmSettings(dynamic_sampling=True, mask_truncated_completions=True, importance_sampling_cap=None)
SHORT = TRAINING.model_copy(update={"max_steps": 6, "checkpoint_every": 2})
STRICT = LOOP.model_copy(update={"max_staleness": 2})
ON_STOP = {Failpoint.STOP_SEEN, Failpoint.GRADIENT_DROPPED}


class Killed(BaseException):
    """The process is gone."""


@dataclass
class CrashPlan:
    """Kills its trainer at the given occurrence of a point, and asks it to stop at the given group."""

    point: Failpoint | None = None
    occurrence: int = 1
    stop_at_group: int = 1 << 30
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    passed: list[Failpoint] = field(default_factory=list)

    def __call__(self, point: Failpoint) -> None:
        self.passed.append(point)
        if self.passed.count(Failpoint.GROUP_TAKEN) == self.stop_at_group:
            self.stop.set()
        if point is self.point and self.passed.count(point) == self.occurrence:
            raise Killed(point)


async def fill(harness: TrainerHarness) -> None:
    """A topic with everything that happens to records, in all parts of the run."""
    for number in range(20):
        found = group(number, (1.0, 1.0) if number in (2, 9, 12) else (1.0, 0.0))
        if number in (3, 8, 13):
            found[1] = found[1].replace(finish_reason=FinishReason.LENGTH)
        if number == 7:
            found = [item.replace(logprobs=np.full(len(item.token_ids), -500.0, dtype="<f4")) for item in found]
        if number == 11:
            found = group(number, (1.0, 0.0, 0.5))
            found[2:] = group(number, (1.0, 0.0, 0.5), version=PolicyVersion(1, 0))[2:]
        await harness.publish(*(item.replace(position=number) for item in found))
        if number in (1, 10):
            await harness.publish(found[0])
            publisher = await harness.bus.publisher("junk")
            await publisher.publish(Outgoing("r.trajectories", b"junk", "p/0/0", number % 2))


async def live(harness: TrainerHarness, plan: CrashPlan) -> None:
    trainer = harness.trainer(algorithm=ALGORITHM, training=SHORT, loop=STRICT, failpoint=plan)
    await within(trainer.run(plan.stop), 20)


def outcome(harness: TrainerHarness) -> Surviving:
    found = surviving(harness.reports(), harness.skips())
    assert [report.step for report in found.steps] == [1, 2, 3, 4, 5, 6]
    assert max(found.places.values()) == 1, "a record was counted twice"
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> tuple[Surviving, list[Failpoint]]:
    """A run that nothing happened to, and the points it passed."""
    harness, plan = TrainerHarness.make(tmp_path_factory.mktemp("straight"), model_path), CrashPlan()

    async def scenario() -> None:
        await fill(harness)
        await live(harness, plan)

    asyncio.run(scenario())
    return outcome(harness), plan.passed


def assert_same(found: Surviving, expected: Surviving) -> None:
    assert [report.micro_batches for report in found.steps] == [report.micro_batches for report in expected.steps]
    assert [report.left_out for report in found.steps] == [report.left_out for report in expected.steps]
    assert [report.digests for report in found.steps] == [report.digests for report in expected.steps]
    assert [report.prompt_cursor for report in found.steps] == [report.prompt_cursor for report in expected.steps]


def test_a_straight_run_meets_every_kind_of_record(straight: tuple[Surviving, list[Failpoint]]) -> None:
    found, passed = straight
    assert set(found.skips.values()) == {"zero_advantage", "filtered", "duplicate", "poison", "stale"}
    assert set(passed) == set(Failpoint) - ON_STOP
    assert all(report.digests for report in found.steps)
    assert found.steps[-1].prompt_cursor > 14


@pytest.mark.parametrize("point", list(Failpoint))
async def test_a_checkpoint_captures_one_moment_wherever_a_process_ends(
    point: Failpoint, straight: tuple[Surviving, list[Failpoint]], tmp_path: Path, model_path: Path
) -> None:
    harness = TrainerHarness.make(tmp_path, model_path)
    await fill(harness)
    with pytest.raises(Killed):
        await live(harness, CrashPlan(Failpoint.STEP_APPLIED, 4))
    with pytest.raises(Killed):
        await live(harness, CrashPlan(point, stop_at_group=3 if point in ON_STOP else 1 << 30))
    await live(harness, CrashPlan())
    assert_same(outcome(harness), straight[0])


@pytest.mark.parametrize("occurrence", [2, 5])
async def test_many_short_processes_learn_the_same(
    occurrence: int, straight: tuple[Surviving, list[Failpoint]], tmp_path: Path, model_path: Path
) -> None:
    """Killed again and again within one step, then stopped in order within the next."""
    harness = TrainerHarness.make(tmp_path, model_path)
    await fill(harness)
    for _ in range(3):
        with suppress(Killed):
            await live(harness, CrashPlan(Failpoint.GRADIENT_ADDED, occurrence))
    await live(harness, CrashPlan(stop_at_group=occurrence))
    await live(harness, CrashPlan())
    assert_same(outcome(harness), straight[0])


async def test_the_checkpoint_s_own_account_agrees_with_the_topics(tmp_path: Path, model_path: Path) -> None:
    harness = TrainerHarness.make(tmp_path, model_path)
    await fill(harness)
    with pytest.raises(Killed):
        await live(harness, CrashPlan(Failpoint.STEP_APPLIED, 4))
    await live(harness, CrashPlan())
    found = outcome(harness)
    newest, *_ = harness.store().manifests()
    own = [skip for skip in harness.skips() if skip.lineage == newest.lineage]
    assert newest.skips.count <= max(skip.sequence for skip in own)
    assert (newest.parent, newest.lineage) == (PolicyVersion(1, 2), 2)
    counted = {place for place in found.places if _is_done(newest.frontier, place)}
    assert sum(newest.skips.by_reason.values()) == len(counted & found.skips.keys())
    assert set(found.places) - set(found.skips) <= counted


def _is_done(frontier: Mapping[str, object], place: tuple[int, int]) -> bool:
    state = frontier[str(place[0])]
    assert isinstance(state, dict)
    return place[1] < state["low"] or place[1] in state["done"]
