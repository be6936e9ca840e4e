import pytest

from streamrl.consumers.algorithms.advantages import ModelLimits, credit_group
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group, Sample
from streamrl.consumers.training.step_report import GatheredStep
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from tests.consumers.training.factories import make_micro_batch, make_trajectory


def group(name: str, tokens: list[list[int]]) -> Group:
    samples = [
        Sample(make_trajectory(name, i, tokens=found), RecordRef(f"{name}/{i}", 0, i), float(i))
        for i, found in enumerate(tokens)
    ]
    return Group(name, 0.0, tuple(samples))


def test_left_out_samples_are_kept_by_what_keeps_them_out() -> None:
    gathered = GatheredStep(PolicyVersion(1, 0))
    found = group("p/0/0", [[4], [], [99], []])
    gathered.add_group(found, credit_group(found, AlgorithmSettings(), ModelLimits(vocabulary=20, positions=20)))
    assert gathered.group_ids == ("p/0/0",)
    by_size = {len(part.samples): detail for part, detail in gathered.left_out}
    assert "no token" in by_size[2]
    assert "vocabulary" in by_size[1]


def test_the_deviation_is_of_the_rewards_of_all_groups() -> None:
    gathered = GatheredStep(PolicyVersion(1, 0))
    for name in ("p/0/0", "p/1/0"):
        found = group(name, [[4], [5]])
        gathered.add_group(found, credit_group(found, AlgorithmSettings(), ModelLimits(vocabulary=20, positions=20)))
    assert gathered.reward_deviation == pytest.approx((1 / 3) ** 0.5)


def test_timings_name_what_was_measured_and_the_share_of_training() -> None:
    gathered = GatheredStep(PolicyVersion(1, 0))
    batch = make_micro_batch(3)
    gathered.add_trained(batch, 1)
    gathered.timer.seconds |= {"forward_backward": 3.0, "optimizer": 1.0, "wait_for_batch": 4.0}
    gathered.timer.started_at -= 8.0
    found = gathered.timings()
    assert (found["time/forward_backward"], found["time/wait_for_batch"]) == (3.0, 4.0)
    assert found["time/step"] == pytest.approx(8.0, abs=0.5)
    assert found["time/train_share"] == pytest.approx(0.5, abs=0.05)
    assert found["training_tok/s"] == pytest.approx(batch.num_tokens / 8, rel=0.1)
    assert gathered.micro_batches == (batch.refs,)
