from collections.abc import Sequence
from pathlib import Path

import pytest

from streamrl.inspection.report.figures import common_level, figures_of, reached
from streamrl.inspection.report.record import RunFacts, RunRecord, StepTable, TopicDigest, WorkerActivity, rows_of


def rising(rewards: Sequence[float], **more: float) -> StepTable:
    return rows_of(
        {"step": at, "time": 100.0 + at, "time/step": 1.0, "reward": reward, **more}
        for at, reward in enumerate(rewards, 1)
    )


def values(record: RunRecord, level: float | None = None) -> dict[str, object]:
    return {figure.key: figure.value for figure in figures_of(record, level)}


def test_a_level_counts_as_reached_when_the_mean_of_five_steps_is_there() -> None:
    rows = rising([0, 9, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    assert reached(rows, 1.0) == (5, 5.0)
    assert reached(rising([0, 0, 0, 0, 1, 1, 1, 1, 1, 1]), 1.0) == (9, 9.0)
    assert reached(rows, 3.0) is None
    assert reached(rising([1, 1]), 1.0) is None


def test_the_common_level_is_the_highest_that_all_reached() -> None:
    assert common_level([rising([0] * 5 + [2] * 5), rising([0] * 5 + [1] * 5)]) == pytest.approx(1.0)
    assert common_level([rising([1] * 5), rising([1] * 3)]) is None
    assert common_level([]) is None


def test_figures_are_of_the_whole_run() -> None:
    more = {
        "ledger/trained": 10.0,
        "completions/num_tokens": 500.0,
        "time/wait_for_batch": 0.25,
        "off_policy/mean": 1.5,
    }
    record = RunRecord(
        "r", Path("r"), rising([0.0] * 5 + [1.0] * 5, **more), summary={"acc_after": 0.5, "skipped": {"stale": 3}}
    )
    found = values(record, 1.0)
    assert found["reward_first"] == 0.0
    assert found["reward_last"] == 1.0
    assert found["reached_step"] == 10
    assert found["reached_seconds"] == pytest.approx(10.0)
    assert found["trajectories_per_s"] == 10.0
    assert found["tokens_per_s"] == 500.0
    assert found["trainer_wait_share"] == 0.25
    assert found["staleness_mean"] == 1.5
    assert found["acc_after"] == 0.5
    assert found["skipped"] == 3


def test_missing_measurements_give_no_figure() -> None:
    found = values(RunRecord("r", Path("r"), rising([1.0])))
    assert "tokens_per_s" not in found
    assert "workers_busy" not in found
    assert values(RunRecord("r", Path("r"), rising([0.0] * 9)), 1.0)["reached_step"] == "never"


def test_workers_are_busy_only_within_the_run() -> None:
    workers = {
        "a": WorkerActivity(generating=((90.0, 105.0), (200.0, 300.0))),
        "b": WorkerActivity(generating=((100.0, 110.0),)),
    }
    facts = TopicDigest(held=1, read=1, workers=workers)
    record = RunRecord("r", Path("r"), rising([1.0] * 10), facts=RunFacts(topics=facts))
    assert record.rows.began == 100.0
    assert values(record)["workers_busy"] == pytest.approx(0.75)
