from collections.abc import Sequence

import numpy as np
import pytest

from streamrl.consumers.algorithms.advantages import ModelLimits, credit_group
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import FinishReason
from tests.fakes import messages

LIMITS = ModelLimits(vocabulary=20, positions=30)


def sample(index: int, reward: float, tokens: Sequence[int] = (3, 4), **changes: object) -> Sample:
    fields = {"num_generations": 4, "prompt_token_ids": np.array([1, 2], "<i4"), "rewards": {}}
    sampled = {"token_ids": np.array(tokens, "<i4"), "logprobs": np.zeros(len(tokens), "<f4")}
    trajectory = messages.trajectory("p/0/0", index, len(tokens), **fields | sampled | changes)
    return Sample(trajectory, RecordRef(trajectory.trajectory_id, 0, index), reward)


def group(*samples: Sample) -> Group:
    return Group("p/0/0", 0.0, samples)


def test_every_sample_gets_its_advantage_within_the_group() -> None:
    credit = credit_group(group(sample(0, 1.0), sample(1, 0.0)), AlgorithmSettings(scale_rewards="none"), LIMITS)
    assert [item.advantage for item in credit.training_samples] == [0.5, -0.5]
    assert (credit.left_out, credit.rewards.tolist()) == ((), [1.0, 0.0])


def test_scaling_by_the_batch_leaves_the_group_unscaled() -> None:
    credit = credit_group(group(sample(0, 4.0), sample(1, 0.0)), AlgorithmSettings(scale_rewards="batch"), LIMITS)
    assert [item.advantage for item in credit.training_samples] == [2.0, -2.0]


def test_rloo_compares_each_sample_with_the_others_and_divides_by_nothing() -> None:
    members = group(sample(0, 4.0), sample(1, 0.0), sample(2, 2.0))
    credit = credit_group(members, AlgorithmSettings(name="rloo", scale_rewards="group"), LIMITS)
    assert [item.advantage for item in credit.training_samples] == [3.0, -3.0, 0.0]


def test_truncated_completions_leave_the_gradient_but_not_the_baseline() -> None:
    members = group(sample(0, 1.0), sample(1, 0.0, finish_reason=FinishReason.LENGTH))
    settings = AlgorithmSettings(mask_truncated_completions=True, scale_rewards="none")
    credit = credit_group(members, settings, LIMITS)
    assert [(item.sample.ref.offset, item.advantage) for item in credit.training_samples] == [(0, 0.5)]
    assert [(left.ref.offset, "truncated" in detail) for left, detail in credit.left_out] == [(1, True)]
    assert credit_group(members, AlgorithmSettings(), LIMITS).left_out == ()


def test_overlong_completions_are_penalised_before_the_baseline() -> None:
    settings = AlgorithmSettings(overlong_l_max=8, overlong_l_cache=2, scale_rewards="none")
    credit = credit_group(group(sample(0, 1.0, [3] * 8), sample(1, 1.0)), settings, LIMITS)
    assert credit.rewards.tolist() == [0.0, 1.0]
    assert [item.advantage for item in credit.training_samples] == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("odd", "detail"),
    [
        (sample(1, 0.0, []), "no token"),
        (sample(1, 0.0, loss_mask=np.zeros(2, dtype="<u1")), "no token"),
        (sample(1, 0.0, [3, 20]), "below 20"),
        (sample(1, 0.0, prompt_token_ids=np.array([99], dtype="<i4")), "below 20"),
        (sample(1, 0.0, [3] * 29), "at most 30 tokens"),
        (sample(1, 0.0, temperature=0.0), "temperature above 0"),
    ],
)
def test_samples_that_the_model_cannot_take_are_left_out_with_a_reason(odd: Sample, detail: str) -> None:
    credit = credit_group(group(sample(0, 1.0), odd), AlgorithmSettings(), LIMITS)
    assert [item.sample.ref.offset for item in credit.training_samples] == [0]
    assert detail in credit.left_out[0][1]
