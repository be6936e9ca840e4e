import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.bus.port import TopicPartition
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.checkpoints.store import load_checkpoint
from streamrl.schemas.errors import IdentityError, NothingToTrain, SettingsError, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness, group
from tests.progress import within


@pytest.fixture
def harness(tmp_path: Path, model_path: Path) -> TrainerHarness:
    return TrainerHarness.make(tmp_path, model_path)


def weights(root: Path, version: str) -> dict[str, torch.Tensor]:
    return dict(load_file(root / "weights" / version / "model.safetensors"))


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


async def test_the_first_report_makes_the_initial_weights_available(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        pass
    (report,) = harness.reports()
    assert (report.version, report.step, report.group_ids, report.micro_batches) == (PolicyVersion(1, 0), 0, (), ())
    manifest = (harness.root / "weights" / "1-0" / "manifest.json").read_bytes()
    assert hashlib.sha256(manifest).hexdigest() == report.manifest_sha256
    assert same(weights(harness.root, "1-0"), dict(load_file(harness.model_path / "model.safetensors")))


async def test_each_step_reports_exactly_what_it_trained_and_moves_the_weights(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        for number in range(4):
            await harness.publish_group(number)
        await harness.until_version(1, 2)
    _, first, second = harness.reports()
    assert [first.group_ids, second.group_ids] == [("p/0/0", "p/1/0"), ("p/2/0", "p/3/0")]
    for report, numbers in ((first, (0, 1)), (second, (2, 3))):
        refs = [ref for batch in report.micro_batches for ref in batch]
        assert {ref.trajectory_id for ref in refs} == {f"p/{n}/0/{i}" for n in numbers for i in (0, 1)}
        assert len(refs) == 4
        for ref in refs:
            record = harness.bus.log(f"{RUN}.trajectories").partitions[ref.partition][ref.offset]
            assert record.key is not None
            assert ref.trajectory_id.startswith(record.key)
    assert not same(weights(harness.root, "1-1"), weights(harness.root, "1-0"))
    assert not same(weights(harness.root, "1-2"), weights(harness.root, "1-1"))


async def test_reports_and_the_metrics_file_hold_the_known_names(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        await harness.publish_group(0)
        await harness.publish_group(1, (0.0, 0.0))
        await harness.until_version(1, 1)
    (line,) = [json.loads(text) for text in (harness.root / "metrics.jsonl").read_text().splitlines()]
    metrics = harness.reports()[1].metrics
    assert (line["step"], line["reward"], line["frac_reward_zero_std"]) == (1, 0.25, 0.5)
    assert set(metrics) <= set(line)
    names = {
        "loss", "reward_std", "rewards/exact/mean", "completions/mean_length", "entropy", "ratio", "grad_norm",
        "clip_ratio/region_mean", "mismatch_kl/all/mean", "mismatch_kl/spans_1", "optim/lr", "off_policy/mean",
        "off_policy/max", "num_tokens", "training_tok/s", "time/step",
        "time/forward_backward", "time/broadcast_weights", "time/train_share",
        "kafka/lag/bucket_0", "ledger/trained", "lineage/number",
    }  # fmt: skip
    assert names <= set(metrics)


async def test_offsets_are_committed_for_displays(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        for number in range(2):
            await harness.publish_group(number)
        await harness.until(lambda: bool(harness.bus.committed))
    assert harness.bus.committed == {
        (f"{RUN}.grpo", TopicPartition(f"{RUN}.trajectories", number)): 2 for number in (0, 1)
    }


async def test_offsets_are_sent_once_a_second_and_with_the_last_step(harness: TrainerHarness) -> None:
    now = [1000.0]
    trainer = harness.trainer(training=TRAINING.model_copy(update={"max_steps": 4}), monotonic=lambda: now[0])
    told = []
    async with harness.running(trainer):
        for step, later_s in ((1, 0.0), (2, 0.9), (3, 0.2), (4, 0.1)):
            now[0] += later_s
            for number in (2 * step - 2, 2 * step - 1):
                await harness.publish_group(number)
            await harness.until_version(1, step)
            told.append(sum(harness.bus.committed.values()))
    assert told == [4, 4, 12, 16]


async def test_a_stopped_trainer_leaves_a_checkpoint_that_transformers_load(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        for number in range(3):
            await harness.publish_group(number)
        await harness.until_version(1, 1)
    directory = harness.root / "checkpoints" / "step_1"
    loaded = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in weights(harness.root, "1-1").items())
    assert (directory / "tokenizer_config.json").is_file()
    manifest = load_checkpoint(directory).state.manifest
    assert (manifest.step, manifest.policy_version, manifest.lineage) == (1, PolicyVersion(1, 1), 1)
    assert manifest.frontier == {"0": {"low": 2, "done": []}, "1": {"low": 2, "done": []}}


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": "varlen"}, {"packing": "shared"}, {"optimizer_offload": True}],
    ids=["as by default", "packed", "prompts once", "optimizer on the processor"],
)
async def test_a_resumed_trainer_goes_on_bit_equal_to_one_that_never_stopped(
    tmp_path: Path, model_path: Path, options: dict[str, Any]
) -> None:
    straight, halves = (TrainerHarness.make(tmp_path / name, model_path) for name in ("straight", "halves"))
    for harness in (straight, halves):
        for number in range(12):
            await harness.publish_group(number)
    six = TRAINING.model_copy(update={"max_steps": 6} | options)
    async with straight.running(straight.trainer(training=six)):
        await straight.until_version(1, 6)
    three = six.model_copy(update={"max_steps": 3})
    async with halves.running(halves.trainer(training=three)):
        await halves.until_version(1, 3)
    async with halves.running(halves.trainer(training=six)):
        await halves.until_version(2, 6)
    assert same(weights(straight.root, "1-6"), weights(halves.root, "2-6"))
    assert same(weights(halves.root, "1-3"), weights(halves.root, "2-3"))
    one, other = (load_checkpoint(harness.root / "checkpoints" / "step_6").state for harness in (straight, halves))
    assert same(one.optimizer, other.optimizer)
    assert same(one.rng, other.rng)
    assert one.manifest.frontier == other.manifest.frontier
    assert sorted(straight.trained_ids(1)) == sorted(halves.trained_ids(1) + halves.trained_ids(2))


async def test_a_resumed_trainer_reads_again_what_no_checkpoint_contains(harness: TrainerHarness) -> None:
    for number in range(7):
        await harness.publish_group(number)
    stop = asyncio.Event()
    crashing = asyncio.create_task(harness.trainer().run(stop))
    await harness.until_version(1, 3)
    crashing.cancel()
    await asyncio.wait({crashing})
    assert [path.name for path in (harness.root / "checkpoints").glob("step_*")] == ["step_2"]
    async with harness.running(harness.trainer()):
        await harness.until_version(2, 3)
    first_of_resumed = next(report for report in harness.reports() if report.version.lineage == 2)
    assert (first_of_resumed.version, first_of_resumed.group_ids) == (PolicyVersion(2, 2), ())
    assert sorted(harness.trained_ids(2)) == sorted(f"p/{n}/0/{i}" for n in (4, 5) for i in (0, 1))


async def test_a_corrupt_newest_checkpoint_falls_back_to_the_one_before(harness: TrainerHarness) -> None:
    for number in range(8):
        await harness.publish_group(number)
    async with harness.running(harness.trainer()):
        await harness.until_version(1, 4)
    newest = harness.root / "checkpoints" / "step_4" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x7f")
    async with harness.running(harness.trainer()):
        await harness.until_version(2, 4)
    assert [r.step for r in harness.reports() if r.version.lineage == 2] == [2, 3, 4]
    assert load_checkpoint(newest.parent).state.manifest.lineage == 2


async def test_a_repeated_trajectory_is_not_trained_twice(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        for number in (0, 0, 1, 0):
            await harness.publish_group(number)
        await harness.until_version(1, 1)
    async with harness.running(harness.trainer()):
        for number in (1, 2, 3):
            await harness.publish_group(number)
        await harness.until_version(2, 2)
    trained = harness.trained_ids(1) + harness.trained_ids(2)
    assert sorted(trained) == sorted(f"p/{n}/0/{i}" for n in range(4) for i in (0, 1))
    assert {skip.reason for skip in harness.skips()} == {SkipReason.DUPLICATE}
    assert len(harness.skips()) == 6


async def test_dynamic_sampling_waits_for_groups_that_differ(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer(algorithm=AlgorithmSettings(dynamic_sampling=True))):
        for number in range(4):
            await harness.publish_group(number, (1.0, 1.0) if number < 2 else (1.0, 0.0))
        await harness.until_version(1, 1)
    assert harness.reports()[1].group_ids == ("p/2/0", "p/3/0")
    assert {(skip.group_id, skip.reason) for skip in harness.skips()} == {
        ("p/0/0", SkipReason.ZERO_ADVANTAGE),
        ("p/1/0", SkipReason.ZERO_ADVANTAGE),
    }


async def test_a_trainer_whose_groups_all_have_equal_rewards_ends_and_every_row_is_written(
    harness: TrainerHarness,
) -> None:
    limits = IntakeLimits(max_skipped_groups=1, max_skipped_steps=1)
    end = limits.end_after(LOOP)
    trainer = harness.trainer(algorithm=AlgorithmSettings(dynamic_sampling=True), limits=limits)
    for number in range(end):
        await harness.publish_group(number, (1.0, 1.0))
    with pytest.raises(NothingToTrain, match=rf"got {end} skipped in a row \({end} zero_advantage\), the latest p/"):
        await within(trainer.run(asyncio.Event()), 20)
    assert sorted(skip.group_id or "" for skip in harness.skips()) == sorted(2 * [f"p/{n}/0" for n in range(end)])


async def test_groups_that_can_be_trained_end_the_streak_of_skipped_ones(harness: TrainerHarness) -> None:
    limits = IntakeLimits(max_skipped_groups=1, max_skipped_steps=1)
    skipped = limits.end_after(LOOP) - 1
    trainer = harness.trainer(algorithm=AlgorithmSettings(dynamic_sampling=True), limits=limits)
    async with harness.running(trainer):
        for step in (1, 2):
            for number in range(skipped):
                await harness.publish_group(1000 * step + number, (1.0, 1.0))
            await harness.until(lambda: len(harness.skips()) == 2 * skipped * step)  # noqa: B023
            for number in (1, 2):
                await harness.publish_group(100 * step + number)
            await harness.until_version(1, step)


async def test_samples_left_out_of_a_group_are_skipped_with_the_step_that_trained_the_rest(
    harness: TrainerHarness,
) -> None:
    settings = AlgorithmSettings(mask_truncated_completions=True)
    kept, cut = group(0)
    async with harness.running(harness.trainer(algorithm=settings)):
        await harness.publish(kept, cut.replace(finish_reason=FinishReason.LENGTH))
        await harness.until(lambda: (harness.root / "weights" / "1-0").exists())
        assert harness.skips() == []
        await harness.publish_group(1)
        await harness.until_version(1, 1)
    (skip,) = harness.skips()
    assert (skip.trajectory_id, skip.reason, skip.step) == ("p/0/0/1", SkipReason.FILTERED, 1)
    assert sorted(harness.trained_ids(1)) == ["p/0/0/0", "p/1/0/0", "p/1/0/1"]


async def test_a_group_the_model_cannot_take_is_skipped_whole(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        await harness.publish_group(0, tokens=[5, 9999])
        for number in (1, 2):
            await harness.publish_group(number)
        await harness.until_version(1, 1)
    assert harness.reports()[1].group_ids == ("p/1/0", "p/2/0")
    assert {(skip.group_id, skip.reason) for skip in harness.skips()} == {("p/0/0", SkipReason.FILTERED)}
    assert "vocabulary" in harness.skips()[0].detail


async def test_a_step_without_a_finite_gradient_is_not_taken(harness: TrainerHarness) -> None:
    impossible = np.full(2, -500.0, dtype="<f4")
    async with harness.running(harness.trainer(algorithm=AlgorithmSettings(importance_sampling_cap=None))):
        await harness.publish(*(item.replace(logprobs=impossible) for item in group(0, tokens=[4, 5])))
        for number in (1, 2, 3):
            await harness.publish_group(number)
        await harness.until_version(1, 1)
    assert harness.reports()[1].group_ids == ("p/2/0", "p/3/0")
    assert {(skip.group_id, skip.reason) for skip in harness.skips()} == {
        ("p/0/0", SkipReason.FILTERED),
        ("p/1/0", SkipReason.FILTERED),
    }
    assert "finite" in harness.skips()[0].detail
    assert all(np.isfinite(tensor).all() for tensor in weights(harness.root, "1-1").values())


async def test_an_incomplete_batch_is_dropped_on_stop_and_read_again(harness: TrainerHarness) -> None:
    async with harness.running(harness.trainer()):
        for number in range(3):
            await harness.publish_group(number)
        await harness.until_version(1, 1)
        await asyncio.sleep(0.05)
    async with harness.running(harness.trainer()):
        await harness.publish_group(3)
        await harness.until_version(2, 2)
    assert harness.reports()[-1].group_ids == ("p/2/0", "p/3/0")


async def test_the_last_step_is_reported_as_such_and_checkpointed(harness: TrainerHarness) -> None:
    for number in range(8):
        await harness.publish_group(number)
    trainer = harness.trainer(training=TRAINING.model_copy(update={"max_steps": 3}))
    await within(trainer.run(asyncio.Event()), 20)
    assert [report.finished for report in harness.reports()] == [False, False, False, True]
    assert (harness.root / "checkpoints" / "step_3").is_dir()
    await within(trainer.run(asyncio.Event()), 20)
    assert (harness.reports()[-1].version, harness.reports()[-1].finished) == (PolicyVersion(2, 3), True)


async def test_weights_are_exported_only_when_due(harness: TrainerHarness) -> None:
    for number in range(6):
        await harness.publish_group(number)
    trainer = harness.trainer(training=TRAINING.model_copy(update={"max_steps": 3, "weight_sync_steps": 2}))
    await within(trainer.run(asyncio.Event()), 20)
    assert [report.manifest_sha256 is None for report in harness.reports()] == [False, True, False, False]
    assert sorted(path.name for path in (harness.root / "weights").iterdir()) == ["1-0", "1-2", "1-3"]


async def test_an_older_trainer_gives_way_to_a_newer_one(harness: TrainerHarness) -> None:
    stop = asyncio.Event()
    older = asyncio.create_task(harness.trainer().run(stop))
    await harness.until_version(1, 0)
    async with harness.running(harness.trainer()):
        await harness.until_version(2, 0)
    for number in range(2):
        await harness.publish_group(number)
    with pytest.raises(Superseded):
        await within(older, 20)
    assert PolicyVersion(1, 1) not in {report.version for report in harness.reports()}


async def test_a_checkpoint_of_another_run_is_refused(harness: TrainerHarness) -> None:
    for number in range(2):
        await harness.publish_group(number)
    async with harness.running(harness.trainer()):
        await harness.until_version(1, 1)
    with pytest.raises(IdentityError, match="'r'"):
        await harness.trainer(name="other").run(asyncio.Event())


def test_exporting_more_rarely_than_generation_can_wait_is_refused(harness: TrainerHarness) -> None:
    with pytest.raises(SettingsError, match="weight_sync_steps"):
        harness.trainer(training=TRAINING.model_copy(update={"weight_sync_steps": LOOP.max_staleness + 2}))
    capped = IngestSettings(sampling="capped", staleness_cap=0)
    with pytest.raises(SettingsError, match=r"ingest.staleness_cap\) \+ 1 = 1, got 2"):
        harness.trainer(ingest=capped, training=TRAINING.model_copy(update={"weight_sync_steps": 2}))
