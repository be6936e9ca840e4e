from streamrl.inspection.report.charts import POINTS, axes, curves
from streamrl.inspection.report.record import StepTable, rows_of


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


def test_what_no_run_tells_has_no_chart() -> None:
    assert drawn([StepTable()]) == {}
    assert "Loss" not in drawn([run(5)])
