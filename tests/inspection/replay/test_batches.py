import numpy as np
import pytest

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.inspection.replay.steps import rebatched, recorded_batch
from streamrl.schemas.errors import UserError
from streamrl.schemas.trajectories import FinishReason
from tests.consumers.factories import sample

LIMITS = ModelLimits(vocabulary=100, positions=100)
SETTINGS = AlgorithmSettings(mask_truncated_completions=True)


def groups() -> list[Group]:
    first = tuple(sample("d/0/0", index, of=3, offset=index, tokens=3 + index) for index in range(3))
    cut_off = sample("d/1/0", 2, offset=5, finish_reason=FinishReason.LENGTH)
    second = (sample("d/1/0", 0, offset=3), sample("d/1/0", 1, offset=4), cut_off)
    return [Group("d/0/0", 0.0, first), Group("d/1/0", 0.0, second)]


def test_rows_stand_as_they_were_recorded() -> None:
    refs = [each.ref for group in groups() for each in group.samples][:5]
    cut = [(refs[4], refs[0]), (refs[2],), (refs[3], refs[1])]
    batch = recorded_batch(groups(), cut, SETTINGS, LIMITS)
    assert [tuple(part.refs) for part in batch.micro_batches] == cut
    assert batch.left_out[0][0] == "d/1/0/2"
    assert set(batch.rewards) == {ref.trajectory_id for ref in refs} | {"d/1/0/2"}
    assert batch.totals == (5, sum(len(batch.samples[ref.trajectory_id].sample.trajectory.token_ids) for ref in refs))
    assert batch.reward_deviation == pytest.approx(np.std([0, 1, 2, 0, 1, 2], ddof=1))


def test_a_recorded_row_that_would_not_be_trained_is_named() -> None:
    refs = [each.ref for each in groups()[1].samples]
    with pytest.raises(UserError, match=r"d/1/0/2 to be trained.*truncated"):
        recorded_batch(groups(), [refs], SETTINGS, LIMITS)


def test_other_batching_packs_as_the_trainer_does() -> None:
    batch = rebatched(groups(), SETTINGS, BatchingSettings(token_budget=12), LIMITS)
    assert sorted(batch.trajectory_ids) == sorted(batch.samples)
    assert all(part.input_ids.size <= 12 for part in batch.micro_batches)


def test_keeping_some_rows_keeps_their_advantages() -> None:
    whole = rebatched(groups(), SETTINGS, BatchingSettings(), LIMITS)
    part = whole.keeping(["d/0/0/2"])
    assert part.trajectory_ids == ["d/0/0/2"]
    assert part.micro_batches[0].advantages.tolist() == [np.float32(whole.samples["d/0/0/2"].advantage)]
