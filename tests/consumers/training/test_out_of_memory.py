"""Memory that does not hold a micro-batch, or a sample: nothing is lost, nothing is trained twice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamrl.bus.history import BusHistory
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.policy import TrainedPolicy
from streamrl.consumers.training.trainer import MAX_EXCLUDED
from streamrl.inspection.audit.audit import audit
from streamrl.schemas.errors import OutOfMemory
from streamrl.schemas.reports import SkipReason
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness
from tests.inspection.replay.recorded_run import record, usual_groups

STEPS = 3
ROOMY = BatchingSettings(token_budget=64)
Fits = Callable[[MicroBatch], bool]


def only_what_fits(patch: pytest.MonkeyPatch, fits: Fits) -> list[MicroBatch]:
    """Memory runs out in the middle of backward passes, when the gradient has a part of them already."""
    plain, failed = TrainedPolicy.accumulate, list[MicroBatch]()

    def accumulate(policy: TrainedPolicy, batch: MicroBatch) -> None:
        if fits(batch):
            plain(policy, batch)
            return
        failed.append(batch)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(policy.learner.model.model.layers[0], "forward", _failing(policy.learner.model))
            plain(policy, batch)

    patch.setattr(TrainedPolicy, "accumulate", accumulate)
    return failed


def _failing(model: Any) -> Callable[..., Tensor]:
    forward = model.model.layers[0].forward

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def wrapped(*args: object, **options: object) -> Tensor:
        output: Tensor = forward(*args, **options)
        output.register_hook(fail)
        return output

    return wrapped


async def test_a_micro_batch_that_does_not_fit_is_split_and_the_step_is_the_same_and_replays_bit_equal(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = usual_groups(STEPS)
    whole = await record(tmp_path / "whole", model_path, groups, batching=ROOMY)
    with monkeypatch.context() as patch:
        failed = only_what_fits(patch, lambda batch: batch.num_positions <= 24)
        split = await record(tmp_path / "split", model_path, groups, batching=ROOMY)
    assert failed
    assert max(map(len, (b for r in whole.harness.reports() for b in r.micro_batches))) > 2
    for one, other in zip(whole.harness.reports(), split.harness.reports(), strict=True):
        assert sorted(other.trained_refs) == sorted(one.trained_refs)
        assert other.metrics.get("grad_norm", 0.0) == pytest.approx(one.metrics.get("grad_norm", 0.0), rel=1e-4)
    expected = load_file(tmp_path / "whole" / "weights" / f"1-{STEPS}" / "model.safetensors")
    found = load_file(tmp_path / "split" / "weights" / f"1-{STEPS}" / "model.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5)
    # The report names what was computed, in its order, so a replay that has memory enough adds up the same sums.
    assert [each.rebuilt.verdict for each in await split.replays(1, STEPS)] == ["bit-equal"] * STEPS


@pytest.mark.parametrize("budget", [16, 64])
async def test_the_group_of_a_sample_that_does_not_fit_is_skipped_and_its_step_takes_another(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Its sibling is in the gradient by then, and comes out of it again."""
    groups = usual_groups(STEPS)
    rewards = [float(one.rewards["exact"] or 0.0) for one in groups[2]]
    # One that has an advantage: others are not computed.
    too_long = groups[2][int(np.argmax(np.abs(np.array(rewards) - np.mean(rewards))))]
    others = [group for group in groups if group[0].group_id != too_long.group_id]

    def fits(batch: MicroBatch) -> bool:
        return too_long.trajectory_id not in {ref.trajectory_id for ref in batch.refs}

    taken = STEPS - 1
    narrow: dict[str, Any] = {"batching": BatchingSettings(token_budget=budget), "lookahead": 1.0, "steps": taken}
    expected = await record(tmp_path / "without", model_path, others, **narrow)
    with monkeypatch.context() as patch:
        failed = only_what_fits(patch, fits)
        run = await record(tmp_path / "with", model_path, groups, **narrow)
    assert failed
    harness = run.harness
    for one, other in zip(expected.harness.reports(), harness.reports(), strict=True):
        assert other.group_ids == one.group_ids
        assert other.metrics.get("loss", 0.0) == pytest.approx(one.metrics.get("loss", 0.0), rel=1e-4, abs=1e-6)
        assert other.metrics.get("reward", 0.0) == one.metrics.get("reward", 0.0)
    trained = harness.trained_ids(1)
    assert len(trained) == len(set(trained))
    skipped = {row.trajectory_id: row for row in harness.skips() if row.reason is SkipReason.OUT_OF_MEMORY}
    assert set(skipped) == {f"{too_long.group_id}/{index}" for index in range(3)}
    assert not set(skipped) & set(trained)
    detail = skipped[too_long.trajectory_id].detail
    assert detail.startswith(f"does not fit into memory: {too_long.trajectory_id}: ")
    assert "Tried to allocate 2.00 GiB" in detail
    report = await audit(BusHistory(harness.bus), RUN, harness.store().manifests)
    assert report.is_balanced, report
    assert [each.rebuilt.verdict for each in await run.replays(1, taken)] == ["bit-equal"] * taken


async def test_a_run_whose_groups_all_run_out_of_memory_ends_with_what_to_do(
    tmp_path: Path, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_what_fits(monkeypatch, lambda batch: False)
    harness = TrainerHarness.make(tmp_path, model_path)
    for number in range(MAX_EXCLUDED + 3):
        await harness.publish_group(number)
    loop = LOOP.model_copy(update={"max_staleness": 9})
    with pytest.raises(OutOfMemory, match=f"got {MAX_EXCLUDED + 1} groups of one step that do not.*gradient_checkpoin"):
        async with harness.running(harness.trainer(training=TRAINING, loop=loop)):
            await harness.until(lambda: len(harness.skips()) > 2 * MAX_EXCLUDED)
