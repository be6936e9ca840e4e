import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.consumers.algorithms.advantages import ModelLimits, credit_group
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, Sample, TrainingSample, collate
from streamrl.consumers.training.metrics import PaddingMetrics, PhaseSpan, StepMetrics, append_metrics, finite
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import FinishReason, VersionSpan
from tests.consumers.factories import sample
from tests.consumers.training.factories import make_trajectory


def group(rewards: list[float], versions: list[int], tokens: list[int], finish_reason: FinishReason) -> Group:
    samples = [
        Sample(
            make_trajectory(
                sample_index=index,
                reward=reward,
                version=PolicyVersion(1, version),
                tokens=[4] * tokens[index],
                finish_reason=finish_reason,
            ),
            RecordRef(str(index), 0, index),
            reward,
        )
        for index, (reward, version) in enumerate(zip(rewards, versions, strict=True))
    ]
    return Group("p/0/0", 0.0, tuple(samples))


def test_a_step_is_summed_up_under_the_known_names() -> None:
    metrics = StepMetrics()
    limits = ModelLimits(vocabulary=100, positions=100)
    for found in (
        group([1.0, 0.0], [3, 5], [2, 4], FinishReason.STOP),
        group([1.0, 1.0], [5, 9], [6, 8], FinishReason.LENGTH),
    ):
        metrics.observe(found, credit_group(found, AlgorithmSettings(), limits), PolicyVersion(2, 7))
    summary = metrics.summary()
    expected = {
        "reward": 0.75,
        "reward_std": math.sqrt(0.5) / 2,
        "frac_reward_zero_std": 0.5,
        "off_policy/mean": (4 + 2 + 2 + 0) / 4,
        "off_policy/max": 4.0,
        "off_policy/p50": 2.0,
        "off_policy/p90": 2 + (4 - 2) * 0.7,  # a fifth of three intervals lies beyond the last but one
        "rewards/exact/mean": 0.75,
        "completions/num_tokens": 20.0,
        "completions/mean_length": 5.0,
        "completions/min_length": 2.0,
        "completions/max_length": 8.0,
        "completions/clipped_ratio": 0.5,
        "completions/mean_terminated_length": 3.0,
    }
    assert {key: summary[key] for key in expected} == pytest.approx(expected)


def test_without_groups_there_is_nothing_to_sum_up() -> None:
    assert StepMetrics().summary() == {}


def test_numbers_that_are_none_are_left_out() -> None:
    assert finite({"a": 1, "b": math.nan, "c": math.inf}) == {"a": 1.0}


def test_each_step_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    append_metrics(path, 1, 10.0, {"reward": 0.5, "bad": math.nan}, [PhaseSpan("optimizer", 9.0, 9.25)])
    append_metrics(path, 2, 11.0, {"reward": 0.6})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "time": 10.0, "reward": 0.5, "spans": [["optimizer", 9.0, 9.25]]},
        {"step": 2, "time": 11.0, "reward": 0.6, "spans": []},
    ]


def test_padding_is_measured_by_the_bucket_of_the_padded_row() -> None:
    def item(partition: int, tokens: int) -> TrainingSample:
        found = sample("d/0/0", partition, of=9, partition=partition, prompt=1, tokens=tokens)
        return TrainingSample(found, 1.0)

    padding = PaddingMetrics()
    assert padding.summary() == {}
    padding.observe(collate([item(0, 3), item(1, 1), item(2, 7)]), shards=2)
    padding.observe(collate([item(3, 7)]), shards=2)
    assert padding.summary() == {
        "batching/micro_batches": 2.0,
        "padding/all": 1 - (4 + 2 + 8 + 8) / 32,
        "padding/bucket_0": 1 - (4 + 2) / 16,
        "padding/bucket_1": 0.0,
    }


def test_packed_rows_have_no_padding() -> None:
    items = [TrainingSample(sample("d/0/0", row, of=9, partition=0, prompt=1, tokens=row), 1.0) for row in range(3)]
    padding = PaddingMetrics()
    padding.observe(collate(items, "varlen"), shards=1)
    assert padding.summary() == {"batching/micro_batches": 1.0, "padding/all": 0.0, "padding/bucket_0": 0.0}


def test_staleness_compares_steps_across_lineages() -> None:
    """Tokens of an orphaned lineage's later weights are not older than those of the surviving one."""
    metrics = StepMetrics()
    spans = (
        VersionSpan(version=PolicyVersion(1, 9), start=0, end=1),
        VersionSpan(version=PolicyVersion(2, 6), start=1, end=2),
    )
    found = make_trajectory(tokens=[4, 5]).replace(version_spans=spans)
    group_of_one = Group("p/0/0", 0.0, (Sample(found, RecordRef("p/0/0/0", 0, 0), 1.0),))
    credit = credit_group(group_of_one, AlgorithmSettings(), ModelLimits(vocabulary=100, positions=100))
    metrics.observe(group_of_one, credit, PolicyVersion(2, 8))
    assert metrics.summary()["off_policy/max"] == 2.0


def test_rewards_are_reported_by_arm_if_another_policy_sampled_some() -> None:
    metrics, limits = StepMetrics(), ModelLimits(vocabulary=100, positions=100)
    found = group([1.0, 0.0], [3, 3], [2, 2], FinishReason.STOP)
    metrics.observe(found, credit_group(found, AlgorithmSettings(), limits), PolicyVersion(1, 4))
    assert not [name for name in metrics.summary() if name.startswith("arms/")]
    of_arm = tuple(
        replace(one, trajectory=one.trajectory.replace(policy="rloo", admitted_version=PolicyVersion(1, 1)))
        for one in group([1.0, 0.5], [900, 900], [2, 2], FinishReason.STOP).samples
    )
    found = Group("p/1/0", 0.0, of_arm)
    metrics.observe(found, credit_group(found, AlgorithmSettings(), limits), PolicyVersion(1, 4))
    summary = metrics.summary()
    assert {name: value for name, value in summary.items() if name.startswith("arms/")} == {
        "arms/served/reward": 0.5,
        "arms/served/trajectories": 2.0,
        "arms/rloo/reward": 0.75,
        "arms/rloo/trajectories": 2.0,
    }
    assert summary["off_policy/max"] == 3.0  # from the order on, in served versions
