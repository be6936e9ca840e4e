from pathlib import Path

import numpy as np
import pytest

from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.inspection.replay.attribution import DeltaDebugging, find_gradient_outliers, median_norm
from streamrl.inspection.replay.replayer import ReplayOptions
from streamrl.inspection.replay.scratch_policy import Variation
from streamrl.inspection.replay.steps import refused_step, taken_step
from streamrl.schemas.errors import UserError
from streamrl.schemas.identifiers import PolicyVersion
from tests.inspection.replay.recorded_run import KEPT, Recorded, record, usual_groups

STEPS, BAD_STEP, CULPRIT = 14, 13, "p/25/0/1"
UNGUARDED = AlgorithmSettings(ratio="proximal", importance_sampling_cap=None, scale_rewards="none")


async def poisoned(tmp_path: Path, model_path: Path, *, is_refused: bool, reward: float) -> Recorded:
    """One sample's log-probs are far too low, so that its ratio explodes."""
    groups = usual_groups(STEPS)
    group, index = 25, 1
    bad = groups[group][index]
    groups[group][index] = bad.replace(logprobs=bad.logprobs - np.float32(9.0), rewards={"exact": reward})
    assert bad.trajectory_id == CULPRIT
    training = KEPT.model_copy(update={} if is_refused else {"max_grad_norm": 1e9})
    if is_refused:  # two groups never make a step
        groups += usual_groups(STEPS + 1)[-2:]
    return await record(tmp_path, model_path, groups, algorithm=UNGUARDED, training=training, steps=STEPS)


async def test_a_planted_trajectory_is_found_in_a_step_that_was_taken(tmp_path: Path, model_path: Path) -> None:
    run = await poisoned(tmp_path, model_path, is_refused=False, reward=60.0)
    async with run.replayer() as replayer:
        log = await replayer.log()
        found = await find_gradient_outliers(replayer, log, taken_step(log, BAD_STEP))
        assert found.culprits[0][0].row.trajectory_id == CULPRIT
        assert {outlier.group_id for culprit in found.culprits for outlier in culprit} == {"p/25/0"}
        assert found.ranking[0].trajectory_id == CULPRIT
        assert found.gradient_norm > found.threshold > found.without_culprits
        assert found.gradient_norm == pytest.approx(
            log.reports[PolicyVersion(1, BAD_STEP)].metrics["grad_norm"], rel=1e-5
        )
        assert found.culprits[0][0].row.ratio_max > 1000
        healthy = await find_gradient_outliers(replayer, log, taken_step(log, BAD_STEP - 1))
        assert healthy.culprits == ()
        assert healthy.without_culprits == healthy.gradient_norm <= healthy.threshold
    variation = Variation(run.config(), ("without it",), without=frozenset({CULPRIT}))
    (what_if,) = await run.replays(BAD_STEP, BAD_STEP, variation=variation)
    assert what_if.rebuilt.verdict == "bit-equal"
    assert what_if.what_if is not None
    before, after = what_if.what_if.metrics["grad_norm"]
    assert after < before / 100


async def test_a_planted_trajectory_is_found_in_a_step_that_was_refused(tmp_path: Path, model_path: Path) -> None:
    run = await poisoned(tmp_path, model_path, is_refused=True, reward=5.0)
    async with run.replayer() as replayer:
        log = await replayer.log()
        refused = refused_step(log, BAD_STEP, attempt=1)
        assert CULPRIT in {ref.trajectory_id for batch in refused.micro_batches for ref in batch}
        found = await find_gradient_outliers(replayer, log, refused)
        assert [[outlier.row.trajectory_id for outlier in culprit] for culprit in found.culprits] == [[CULPRIT]]
        (again,) = [each async for each in replayer.replay(log, [refused], None, ReplayOptions())]
        assert again.rebuilt.problem == again.rebuilt.recorded_problem != ""
        assert again.rebuilt.verdict == "bit-equal"
        (taken,) = [each async for each in replayer.replay(log, [taken_step(log, BAD_STEP)], None, ReplayOptions())]
        assert taken.rebuilt.verdict == "bit-equal"


async def test_without_earlier_norms_the_limit_must_be_given(tmp_path: Path, model_path: Path) -> None:
    run = await record(tmp_path, model_path, usual_groups(2))
    async with run.replayer() as replayer:
        log = await replayer.log()
        with pytest.raises(UserError, match="--above"):
            median_norm(log, 1)
        found = await find_gradient_outliers(replayer, log, taken_step(log, 1), above=0.0)
        assert {row.trajectory_id for row in found.ranking if row.gradient_norm} == {
            outlier.row.trajectory_id for culprit in found.culprits for outlier in culprit
        }


@pytest.mark.parametrize("culprits", [{3}, {0}, {63}, {5, 40}, {1, 2, 61}])
def test_each_result_is_a_minimal_failing_set(culprits: set[int]) -> None:
    search = DeltaDebugging(range(64), lambda items: culprits <= set(items))
    assert search.culprits() == [sorted(culprits)]
    assert len(search.answers) < 64 * len(culprits)


def test_independent_culprits_are_found_one_after_the_other() -> None:
    search = DeltaDebugging("abcdefgh", lambda items: "b" in items or "g" in items)
    assert sorted(map(tuple, search.culprits())) == [("b",), ("g",)]


def test_items_that_fail_only_together_are_found_as_one_set() -> None:
    weights = dict(zip("abcdef", (1, 5, 1, 4, 1, 1), strict=True))
    found = DeltaDebugging("abcdef", lambda items: sum(weights[item] for item in items) > 8).culprits()
    assert found == [["b", "d"]]


def test_a_single_culprit_takes_few_questions() -> None:
    asked: list[int] = []

    def fails(items: list[int]) -> bool:
        asked.append(len(items))
        return 77 in items

    assert DeltaDebugging(range(128), fails).culprits() == [[77]]
    assert len(asked) <= 17


def test_a_set_that_does_not_fail_has_no_culprits() -> None:
    assert DeltaDebugging([1, 2, 3], lambda items: False).culprits() == []
    assert DeltaDebugging([], lambda items: True).culprits() == []
