"""What the trainer does when something around it fails, and what its messages say."""

import asyncio
import contextlib
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file
from safetensors.torch import save_file

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.ingest.reader import TrajectoryReader
from streamrl.consumers.training import trainer
from streamrl.consumers.training.checkpoints.storage import open_storage, remove_leftovers
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.policy import PolicyPaths, TrainedPolicy
from streamrl.schemas.errors import CheckpointError, DeliveryUnknown, StreamRLError, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason, StepReport
from streamrl.schemas.topics import SKIPS, STEPS
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness, group
from tests.fakes.publisher import FailingBus
from tests.fakes.topics import records_of
from tests.fakes.transactions import AnsweringBus
from tests.progress import within

UNCAPPED = AlgorithmSettings(importance_sampling_cap=None)


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path, model_path)


def training(**changes: Any) -> Any:
    return TRAINING.model_copy(update=changes)


async def publish_impossible(harness: TrainerHarness, number: int) -> None:
    found = group(number)
    await harness.publish(*(t.replace(logprobs=np.full(len(t.token_ids), -500.0, dtype="<f4")) for t in found))


async def run(trainer: Any, stop: asyncio.Event | None = None) -> None:
    await within(trainer.run(stop or asyncio.Event()), 20)


def raw_reports(harness: TrainerHarness) -> list[PolicyVersion]:
    return [message.version for message in harness.messages("steps") if isinstance(message, StepReport)]


async def test_a_restart_announces_the_checkpoint_s_report_again_and_then_its_own_lineage(
    harness: TrainerHarness,
) -> None:
    for number in range(4):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=2)))
    async with harness.running(harness.trainer(training=training(max_steps=3))):
        await harness.until_version(2, 2)
    assert [str(version) for version in raw_reports(harness)] == ["1-0", "1-1", "1-2", "1-2", "2-2"]
    again = [m for m in harness.messages("steps") if m.version == PolicyVersion(1, 2)]
    assert again[0] == again[1]
    first, other = (report for report in harness.reports() if not report.group_ids)
    assert (first.parent, first.parent_skips) == (None, 0)
    assert (other.parent, other.parent_skips) == (PolicyVersion(1, 2), 0)


async def test_a_checkpoint_is_announced_after_it_is_written(harness: TrainerHarness) -> None:
    passed: list[Failpoint] = []
    for number in range(4):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=2), failpoint=passed.append))
    written = passed.index(Failpoint.CHECKPOINT_WRITTEN)
    assert passed[:written].count(Failpoint.ANNOUNCED) == 2, "the first report and that of step 1"
    assert passed[written:].count(Failpoint.ANNOUNCED) == 1


async def test_a_checkpoint_claims_no_row_that_it_has_not_waited_for(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading goes on while its rows settle: what is skipped then is not in it, and its row may be lost."""
    flush, read_meanwhile = TrajectoryReader.flush, 0

    async def flush_and_read_on(reader: TrajectoryReader) -> None:
        nonlocal read_meanwhile
        await flush(reader)
        while (found := reader.ready_group()) is not None:
            reader.ledger.mark_skipped(found, SkipReason.FILTERED, "read meanwhile")
            read_meanwhile += 1

    monkeypatch.setattr(TrajectoryReader, "flush", flush_and_read_on)
    for number in range(4):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=1)))
    (manifest,) = harness.store().manifests()
    assert (read_meanwhile, manifest.skips.count) == (2, 0)
    frontier: dict[str, Any] = manifest.frontier
    done = sum(found["low"] + len(found["done"]) for found in frontier.values())
    assert done == 4, "the samples of the two groups that were trained"


@pytest.mark.parametrize("slow", [STEPS.full_name(RUN), SKIPS.full_name(RUN)])
async def test_a_checkpoint_waits_for_the_reports_and_rows_that_it_rests_on(harness: TrainerHarness, slow: str) -> None:
    def is_later_report_or_row(record: Outgoing) -> bool:
        return record.topic == slow and bool(records_of(bus, RUN, STEPS))

    harness.bus, written = (bus := FailingBus(harness.bus.logs, holds=is_later_report_or_row)), asyncio.Event()
    there: list[tuple[list[str], int]] = []
    waiting: list[asyncio.Task[None]] = []

    async def let_go_soon() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(written.wait(), 0.5)
        bus.release.set()

    def note(failpoint: Failpoint) -> None:
        if failpoint is Failpoint.SNAPSHOT_TAKEN:
            waiting.append(asyncio.create_task(let_go_soon()))
        elif failpoint is Failpoint.CHECKPOINT_WRITTEN:
            there.append(([str(version) for version in raw_reports(harness)], len(harness.skips())))
            written.set()

    await harness.publish_group(0)
    await harness.publish_group(0)  # again, so that there are rows
    for number in (1, 2, 3):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=2), failpoint=note))
    assert there == [(["1-0", "1-1"], 2)], "of step 2, whose own report comes after it"
    assert len(waiting) == 1


async def test_a_checkpoint_is_written_before_offsets_behind_it_are_committed(harness: TrainerHarness) -> None:
    committed: list[set[int]] = []

    def note(failpoint: Failpoint) -> None:
        if failpoint is Failpoint.CHECKPOINT_WRITTEN:
            committed.append(set(harness.bus.committed.values()))

    for number in range(4):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=2), failpoint=note))
    assert committed == [{2}], "of both partitions what step 1 trained, while the checkpoint is of step 2"
    assert set(harness.bus.committed.values()) == {4}


async def test_rows_of_the_parent_s_checkpoint_are_counted_in_the_first_report(harness: TrainerHarness) -> None:
    await harness.publish_group(0)
    await harness.publish_group(0)
    for number in (1, 2, 3):
        await harness.publish_group(number)
    async with harness.running(harness.trainer()):
        await harness.until_version(1, 2)
    async with harness.running(harness.trainer()):
        await harness.until_version(2, 2)
    assert harness.reports()[-1].parent_skips == 2
    assert [(skip.lineage, skip.sequence) for skip in harness.skips()] == [(1, 1), (1, 2)]


async def test_reports_carry_the_digest_of_every_tensor_as_it_is_on_disk(harness: TrainerHarness) -> None:
    for number in range(2):
        await harness.publish_group(number)
    await run(harness.trainer(training=training(max_steps=1)))
    tensors = load_file(harness.root / "checkpoints" / "step_1" / "model.safetensors")
    expected = {name: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(found).data) for name, found in tensors.items()}
    assert harness.reports()[-1].digests == expected
    assert harness.reports()[0].digests.keys() == expected.keys()


async def test_a_refused_step_names_its_records_and_the_next_one_counts_from_zero(harness: TrainerHarness) -> None:
    await publish_impossible(harness, 0)
    for number in (1, 2, 3):
        await harness.publish_group(number)
    await run(harness.trainer(algorithm=UNCAPPED, training=training(max_steps=1)))
    (refused,) = harness.refused()
    assert (refused.step, refused.version, refused.group_ids) == (1, PolicyVersion(1, 0), ("p/0/0", "p/1/0"))
    assert sorted(ref.trajectory_id for batch in refused.micro_batches for ref in batch) == [
        "p/0/0/0", "p/0/0/1", "p/1/0/0", "p/1/0/1",
    ]  # fmt: skip
    assert "finite" in refused.problem
    assert {skip.reason.value for skip in harness.skips()} == {"filtered"}


async def test_too_many_refused_steps_in_a_row_end_the_trainer(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "MAX_REFUSED_STEPS", 2)
    for number in range(6):
        await publish_impossible(harness, number)
    with pytest.raises(StreamRLError, match=r"got 2 in a row that cannot, the last one at step 1: .*finite"):
        await run(harness.trainer(algorithm=UNCAPPED, training=training()))
    assert len(harness.refused()) == 2


class FullDisk(CheckpointStore):
    """Has no room for the checkpoint of step 2."""

    def write(self, state: Any, write_model: Any, lineage: Any, write_optimizer: Any = None) -> str:
        if state.manifest.step == 2:
            raise CheckpointError("expected room for a checkpoint, got none")
        return super().write(state, write_model, lineage, write_optimizer)


class FullDiskPolicy(TrainedPolicy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._checkpoints = FullDisk(self._checkpoints.storage, 2)


async def test_a_checkpoint_that_fails_ends_the_trainer(harness: TrainerHarness) -> None:
    for number in range(8):
        await harness.publish_group(number)
    settings = training(max_steps=4)
    storage = open_storage(harness.root / "checkpoints", harness.root / "cache")

    def open_policy(restored: Any) -> TrainedPolicy:
        paths = PolicyPaths(str(harness.model_path), storage, harness.root / "weights")
        return FullDiskPolicy(paths, AlgorithmSettings(), settings, LOOP.max_completion_length, restored)

    with pytest.raises(CheckpointError, match="room"):
        await run(harness.trainer(training=settings, open_policy=open_policy))
    assert [report.step for report in harness.reports()] == [0, 1]


async def test_an_unanswered_announcement_is_made_again_and_learning_is_the_same(
    tmp_path: Path, model_path: Path
) -> None:
    digests = []
    for answers in ([], [None, DeliveryUnknown("late"), None, DeliveryUnknown("late")]):
        harness = TrainerHarness.make(tmp_path / str(len(answers)), model_path)
        bus = AnsweringBus(harness.bus.logs, role=".trainer", answers=list(answers), arrives=True)
        harness.bus = bus
        for number in range(4):
            await harness.publish_group(number)
        await run(harness.trainer(training=training(max_steps=2)))
        digests.append(harness.reports()[-1].digests)
        assert bus.opened == 1 + len(answers) // 2
    assert digests[0] == digests[1]
    assert [str(version) for version in raw_reports(harness)] == ["1-0", "1-1", "1-1", "1-2", "1-2"]


async def test_a_fenced_trainer_that_waits_for_groups_ends_at_its_next_word(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        pass
    older = asyncio.create_task(harness.trainer().run(asyncio.Event()))
    await harness.until_version(2, 0)
    assert isinstance(harness.bus, MemoryBus)
    async with harness.running(harness.trainer()):
        await harness.until_version(3, 0)
        for number in range(2):
            await harness.publish_group(number)
        with pytest.raises(Superseded) as told:
            await within(older, 20)
        assert told.value.exit_code == 3
        await harness.until_version(3, 1)
    assert not [v for v in raw_reports(harness) if v.lineage == 2 and v.number > 0]


async def test_the_durable_frontier_is_the_checkpoint_s_and_the_live_one_runs_ahead(harness: TrainerHarness) -> None:
    """What no checkpoint contains is read again by the next process, and only that."""
    for number in range(6):
        await harness.publish_group(number)
    stop = asyncio.Event()
    seconds = itertools.count(1_000.0)
    crashing = asyncio.create_task(harness.trainer(monotonic=lambda: next(seconds)).run(stop))
    await harness.until_version(1, 3)
    await harness.until(lambda: len(harness.bus.committed) == 2 and set(harness.bus.committed.values()) == {6})
    crashing.cancel()
    await asyncio.wait({crashing})
    newest, *_ = harness.store().manifests()
    assert newest.frontier == {"0": {"low": 4, "done": []}, "1": {"low": 4, "done": []}}


async def test_a_trainer_that_is_cancelled_twice_leaves_no_task(harness: TrainerHarness) -> None:
    before = asyncio.all_tasks()
    for turns in range(4):
        await harness.publish_group(turns)
        twice = asyncio.create_task(harness.trainer().run(asyncio.Event()))
        await harness.until_version(turns + 1, 0)
        await asyncio.sleep(0.02)
        twice.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        twice.cancel()
        await asyncio.wait({twice})
        assert asyncio.all_tasks() == before


@pytest.mark.processes
def test_the_driver_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "aiokafka"}
    code = f"import streamrl.consumers.training.trainer, sys; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


async def test_a_trainer_that_waits_in_vain_notices_that_another_has_taken_over(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.consumers.training.trainer.IDLE_S", 0.05)
    older = asyncio.create_task(harness.trainer().run(asyncio.Event()))
    await harness.until_version(1, 0)
    harness.store().claim_lineage(now=0.0)
    with pytest.raises(Superseded, match="another trainer has taken over"):
        await within(older, 20)


async def test_a_trainer_whose_half_written_weights_a_newer_one_removed_is_superseded(
    harness: TrainerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []

    def save(tensors: dict[str, Any], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        saved.append(path)
        if len(saved) == 2:
            harness.store().claim_lineage(now=0.0)
            remove_leftovers(harness.root / "weights")

    monkeypatch.setattr("streamrl.weights.export.save_file", save)
    for number in range(2):
        await harness.publish_group(number)
    with pytest.raises(Superseded, match="another trainer has taken over"):
        await within(harness.trainer().run(asyncio.Event()), 20)
    assert saved
    assert [path.name for path in (harness.root / "weights").iterdir()] == ["1-0"]
