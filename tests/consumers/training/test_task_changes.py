"""A run that is continued after its task changed: which trajectories of earlier starts are trained."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.history import BusHistory
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.checkpoints.catalogue import CheckpointsState, read_checkpoints_state
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.identity import IdentityKeeper, Start, TopicsState, decide, here
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.inspection.audit.audit import audit
from streamrl.schemas.control import RunIdentity
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from tests.consumers.training.trainer_harness import RUN, TRAINING, TrainerHarness, group

OLD, NEW = {"prompts": "a", "reward house:score": "1"}, {"prompts": "a", "reward house:score": "2"}
LEFT = {sample.trajectory_id for number in (4, 5) for sample in group(number)}
"""Trajectories that the first start sampled and did not train."""


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path / "first", model_path)


async def start(harness: TrainerHarness, task: Mapping[str, str]) -> RunIdentity:
    """A start of the run, as ``streamrl run`` makes it before it starts a trainer."""
    storage = open_storage(harness.root / "checkpoints", harness.root / "cache")

    async def held(claimed: int) -> CheckpointsState:
        return read_checkpoints_state(storage, claimed)

    keeper = IdentityKeeper(
        harness.bus, RUN, IdentityFile(harness.root), holder=here(harness.root), clock=lambda: 0.0, task=task
    )
    return await keeper.hold(held)


async def train(harness: TrainerHarness, lineage: int, number: int, **changes: Any) -> None:
    async with harness.running(harness.trainer(**changes)):
        await harness.until_version(lineage, number)


async def a_life(harness: TrainerHarness) -> None:
    """A start, two steps of four groups, and two groups that are left."""
    await start(harness, OLD)
    for index in range(6):
        await harness.publish_group(index)
    await train(harness, 1, 2, training=TRAINING.model_copy(update={"max_steps": 2}))


async def publish_more(harness: TrainerHarness, lineage: int) -> None:
    for index in (6, 7):
        await harness.publish_group(index, version=PolicyVersion(lineage, 2))


def trained(harness: TrainerHarness, lineage: int) -> set[str]:
    return {name.rpartition("/")[0] for name in harness.trained_ids(lineage)}


async def test_trajectories_of_another_task_are_skipped_and_the_accounts_balance(harness: TrainerHarness) -> None:
    await a_life(harness)
    identity = await start(harness, NEW)
    assert identity.is_changed
    await publish_more(harness, 2)
    await train(harness, 2, 3)
    rows = [row for row in harness.skips() if row.lineage == 2]
    assert {row.trajectory_id: row.reason for row in rows} == dict.fromkeys(LEFT, SkipReason.TASK_CHANGED)
    assert "ingest.on_change" in rows[0].detail
    assert trained(harness, 2) == {"p/6/0", "p/7/0"}
    (own,) = (await audit(BusHistory(harness.bus), RUN, harness.store().manifests)).algorithms
    assert not own.violations
    assert (own.produced, own.trained, own.skipped, own.pending) == (16, 12, {"task_changed": 4}, 0)


async def test_a_setting_trains_them_all_the_same(harness: TrainerHarness) -> None:
    await a_life(harness)
    await start(harness, NEW)
    await train(harness, 2, 3, ingest=IngestSettings(on_change="train"))
    assert trained(harness, 2) == {"p/4/0", "p/5/0"}


async def test_a_start_of_the_same_task_trains_them(harness: TrainerHarness) -> None:
    await a_life(harness)
    identity = await start(harness, OLD)
    assert not identity.is_changed
    await train(harness, 2, 3)
    assert trained(harness, 2) == {"p/4/0", "p/5/0"}


async def test_a_trainer_that_restarts_during_the_new_start_decides_alike(harness: TrainerHarness) -> None:
    await a_life(harness)
    await start(harness, NEW)
    await train(harness, 2, 2)
    # Sampled by the weights of the second lineage, whose trainer ends before it trains them.
    await publish_more(harness, 2)
    await train(harness, 3, 3)
    assert {row.reason for row in harness.skips()} == {SkipReason.TASK_CHANGED}
    assert {row.trajectory_id for row in harness.skips()} == LEFT
    assert trained(harness, 3) == {"p/6/0", "p/7/0"}
    assert not (await start(harness, NEW)).is_changed


async def test_one_sample_of_another_task_takes_its_group_with_it(harness: TrainerHarness) -> None:
    await a_life(harness)
    await start(harness, NEW)
    old, new = group(8, version=PolicyVersion(1, 2)), group(8, version=PolicyVersion(2, 2))
    await harness.publish(old[0], new[1])
    await publish_more(harness, 2)
    await train(harness, 2, 3)
    rows = {row.trajectory_id: row for row in harness.skips()}
    assert {name for name in rows if name and name.startswith("p/8/")} == {"p/8/0/0", "p/8/0/1"}
    assert {row.reason for row in rows.values()} == {SkipReason.TASK_CHANGED}
    assert "p/8/0/0 is outdated, and its group with it" in rows["p/8/0/1"].detail


MINE = RunIdentity(run_id="mine", holder="h:/mine", since=0.0, lineage=3, task=OLD)
START = Start(RUN, MINE, CheckpointsState("c", 3), TopicsState(MINE, 3), MINE)


@pytest.mark.parametrize(
    ("before", "task", "through"),
    [
        (OLD, OLD, 0),
        (OLD, NEW, 3),
        # Nothing is known of the start before, as after one by an older release.
        ({}, NEW, 0),
        # What is not known now, because the hub does not answer, has not changed.
        (OLD, {"prompts": "a"}, 0),
        (OLD, OLD | {"model": "m"}, 0),
        # A trainer knows no task.
        (OLD, {}, 0),
    ],
)
def test_only_fingerprints_that_differ_change_a_task(
    before: dict[str, str], task: dict[str, str], through: int
) -> None:
    identity = MINE.replace(task=before)
    found = decide(replace(START, here=identity, topics=TopicsState(identity, 3), task=task))
    assert (found.changed_through, found.task) == (through, before | task)
    again = decide(replace(START, here=found, topics=TopicsState(found, 3), task=task))
    assert again == found
