import json
from pathlib import Path

import pytest

from streamrl.inspection.report.record import TrainerSpan, read_rows, rows_of
from streamrl.schemas.evaluation import EVALUATED


def line(step: int, at: float, **more: object) -> dict[str, object]:
    return {"step": step, "time": at, "time/step": 1.0, **more}


def test_a_resumed_trainer_takes_its_steps_back() -> None:
    rows = rows_of([line(1, 11, reward=1.0), line(2, 12, reward=2.0), line(3, 13), line(2, 20, reward=5.0)])
    assert rows.steps == (1, 2)
    assert rows.column("reward") == [1.0, 5.0]
    assert rows.times == (1.0, 10.0)
    assert rows.seconds == 10.0


def test_evaluations_of_undone_weights_are_left_out() -> None:
    done = [line(step, step) for step in range(1, 5)]
    results = [line(step, step + 0.5, **{EVALUATED: f"1-{step}", "eval/pass@1": step / 10}) for step in (0, 2, 4)]
    rows = rows_of([*done, *results, line(3, 20), line(2, 1, **{EVALUATED: "1-2", "eval/pass@1": 0.3})])
    assert rows.steps == (1, 2, 3)
    assert [(step, metrics["eval/pass@1"]) for step, metrics in rows.evaluations] == [(0, 0.0), (2, 0.3)]


def test_a_run_begins_with_its_first_span() -> None:
    rows = rows_of(
        [line(1, 11, spans=[["optimizer", 10.5, 10.9], ["wait_for_batch", 9.0, 10.0], ["odd"], ["x", 3, 3]])]
    )
    assert rows.began == 9.0
    assert rows.spans == (TrainerSpan("wait_for_batch", 9.0, 10.0), TrainerSpan("optimizer", 10.5, 10.9))


def test_a_line_left_half_written_is_passed_over(tmp_path: Path) -> None:
    whole = json.dumps(line(1, 11, reward=1.0, note="text", ok=True))
    (tmp_path / "m").write_bytes(f'{whole}\n[]\n{{"step": "2"}}\n'.encode() + b'\xff\n{"step": 2, "ti')
    rows = read_rows(tmp_path / "m")
    assert rows.steps == (1,)
    assert set(rows.metrics[0]) == {"reward", "time/step"}


def test_an_infinite_value_is_no_value() -> None:
    rows = rows_of([line(1, 11, loss=float("inf")), line(2, float("nan"))])
    assert rows.steps == (1,)
    assert rows.column("loss") == [None]


def test_no_line_is_no_row() -> None:
    assert rows_of([]).seconds == 0.0


def test_rates_and_lag_follow_from_a_steps_metrics() -> None:
    told = {"completions/num_tokens": 50.0, "ledger/trained": 8.0, "time/wait_for_batch": 0.5}
    rows = rows_of([line(1, 11, **told, **{"kafka/lag/bucket_0": 3.0, "kafka/lag/bucket_1": 4.0, "time/step": 2.0})])
    assert rows.column("report/lag") == [7.0]
    assert rows.column("report/tokens_per_s") == [25.0]
    assert rows.column("report/trajectories_per_s") == [4.0]
    assert rows.column("report/wait_share") == [pytest.approx(0.25)]


def test_a_step_without_a_wait_time_waited_zero_if_others_have_one() -> None:
    waited = {"time/wait_for_batch": 0.5}
    assert rows_of([line(1, 11, **waited), line(2, 12)]).column("report/wait_share") == [0.5, 0.0]
    assert rows_of([line(1, 11)]).column("report/wait_share") == [None]


def test_numbered_metrics_are_sorted_by_number() -> None:
    rows = rows_of([line(1, 11, **{f"kafka/lag/bucket_{number}": 1.0 for number in (10, 2, 0)})])
    assert rows.keys("kafka/lag/") == [f"kafka/lag/bucket_{number}" for number in (0, 2, 10)]
