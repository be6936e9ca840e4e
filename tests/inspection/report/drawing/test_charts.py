from pathlib import Path
from typing import Any

from streamrl.inspection.report.charts import MARKS, POINTS, axes, curves, marks
from streamrl.inspection.report.record import (
    RunFacts,
    RunMark,
    RunRecord,
    StepTable,
    TopicDigest,
    rows_of,
)
from streamrl.schemas.evaluation import EVALUATED
from streamrl.schemas.starts import ChangedValue, RunStart


def run(count: int, **metrics: float) -> StepTable:
    return rows_of(
        {"step": at, "time": 100.0 + at, "time/step": 1.0, "reward": float(at), **metrics} for at in range(1, count + 1)
    )


def drawn(all_rows: list[StepTable]) -> dict[str, list[dict[str, object]]]:
    return {curve["title"]: curve["lines"] for group in curves(all_rows) for curve in group["curves"]}


def test_the_page_stays_small_however_long_the_run() -> None:
    rows = run(10_000)
    (line,) = drawn([rows])["Reward"]
    axis = axes(rows)
    assert POINTS // 2 < len(line["y"]) == len(axis["step"]) == len(axis["time"]) <= POINTS  # type: ignore[arg-type]
    assert axis["stride"] == 17
    assert line["y"][0] == 9.0  # type: ignore[index]
    assert axis["step"][0] == 17
    assert axis["step"][-1] == 10_000


def test_one_run_has_a_line_for_every_bucket_and_part() -> None:
    rows = run(
        5,
        **{f"kafka/lag/bucket_{n}": float(n) for n in range(3)},
        **{"rewards/a/mean": 1.0, "rewards/b/mean": 2.0, "rewards/b/std": 9.0},
    )
    found = drawn([rows])
    assert [line["name"] for line in found["Parts of the reward"]] == ["a", "b"]
    assert [line["name"] for line in found["Lag by length bucket"]] == ["bucket 1", "bucket 2"]
    assert "Lag" not in found


def test_compared_runs_have_one_line_each() -> None:
    with_lag = {"kafka/lag/bucket_0": 2.0, "reward_std": 1.0}
    found = drawn([run(5, **with_lag), run(7), run(3, **with_lag)])
    assert [line["run"] for line in found["Reward"]] == [0, 1, 2]
    assert [line["run"] for line in found["Lag"]] == [0, 2]
    assert "Lag by length bucket" not in found


def test_figures_that_no_run_has_give_no_chart() -> None:
    assert drawn([StepTable()]) == {}
    assert "Loss" not in drawn([run(5)])


def evaluated(*names: str) -> StepTable:
    lines = [{"step": at, "time": 200.0, EVALUATED: f"1-{at}", **dict.fromkeys(names, at / 10)} for at in (0, 4)]
    return rows_of([{"step": 1, "time": 100.0, "reward": 1.0}, *lines])


def test_a_single_held_out_set_is_drawn_once() -> None:
    one = evaluated("eval/pass@1", "eval/pass@8", "eval/easy/pass@1", "eval/easy/pass@8")
    assert [line["name"] for line in drawn([one])["Held-out prompts passed"]] == ["pass@1", "pass@8"]
    two = evaluated("eval/pass@1", "eval/easy/pass@1", "eval/hard/pass@1")
    assert [line["name"] for line in drawn([two])["Held-out prompts passed"]] == [
        "easy/pass@1", "hard/pass@1", "pass@1",
    ]  # fmt: skip


def test_a_chart_has_one_scale() -> None:
    rows = run(5, **{"preference/accuracy": 0.9, "preference/margin": 12.0})
    found = {curve["title"]: curve for group in curves([rows]) for curve in group["curves"]}
    assert [line["name"] for line in found["Preferences"]["lines"]] == ["pairs in the right order"]
    assert found["Preferences"]["unit"] == "share"
    assert [line["name"] for line in found["Margin of preferences"]["lines"]] == ["margin"]


def record_with(*starts: RunStart, **topics: Any) -> RunRecord:
    facts = RunFacts(topics=TopicDigest(held=1, read=1, **topics))
    return RunRecord("r", Path("r"), run(20), facts=facts, starts=starts)


def test_a_jump_is_marked_with_its_step_and_its_reason() -> None:
    restarted = RunMark(at=105.5, kind="restart", text="a new trainer, from step 4")
    promoted = RunMark(at=112.2, kind="promotion", text="rloo is served")
    assert marks(record_with(marks=(restarted, promoted))) == [
        {"step": 5, "time": 5.5, "kind": "restart", "text": "a new trainer, from step 4"},
        {"step": 12, "time": 12.2, "kind": "promotion", "text": "rloo is served"},
    ]
    assert marks(RunRecord("r", Path("r"), run(20))) == []
    assert marks(RunRecord("r", Path("r"), StepTable(), starts=(RunStart(at=1.0, step=1),))) == []


def test_a_resumed_run_has_one_mark_with_what_changed() -> None:
    crashed, resumed = (RunMark(at=at, kind="restart", text="a new trainer, from step 4") for at in (104.5, 110.5))
    start = RunStart(at=108.0, step=8, changed=(ChangedValue("training.learning_rate", "5e-05", "3e-05"),))
    found = marks(record_with(start, marks=(crashed, resumed)))
    assert [(mark["kind"], mark["text"]) for mark in found] == [
        ("restart", "a new trainer, from step 4"),
        ("settings", "resumed from step 8; changed: training.learning_rate 5e-05 → 3e-05"),
    ]
    assert [mark["step"] for mark in found] == [4, 10]
    (only,) = marks(record_with(RunStart(at=108.0, step=8)))
    assert (only["kind"], only["step"], only["text"]) == ("resumed", 8, "resumed from step 8")


def test_the_marks_of_a_run_that_restarts_all_the_time_stay_few() -> None:
    restarts = tuple(RunMark(at=101.0 + n / 10, kind="restart", text=str(n)) for n in range(150))
    found = marks(record_with(marks=restarts))
    assert [mark["text"] for mark in found] == [str(n) for n in range(150 - MARKS, 150)]
