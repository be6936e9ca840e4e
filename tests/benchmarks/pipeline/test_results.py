from pathlib import Path

import pytest

from benchmarks.conditions import RESULTS
from benchmarks.pipeline.__main__ import KEPT, _write, cells, merged, read_results, with_ratios


def row(dispatch: str, rate: float, **others: object) -> dict[str, object]:
    plain = {"measured": False, "workload": "sweep/x=1", "group": 1, "mode": "synchronous", "lengths": "none"}
    return {**plain, "dispatch": dispatch, "tokens_per_s": rate} | others


def test_a_repeated_measurement_replaces_its_row_in_place() -> None:
    old = [row("lpt", 1.0), row("lpt", 2.0, lengths="oracle")]
    rows = merged(old, [row("lpt", 3.0), row("lpt", 4.0, measured=True)])
    assert [(one["lengths"], one["measured"], one["tokens_per_s"]) for one in rows] == [
        ("none", False, 3.0),
        ("oracle", False, 2.0),
        ("none", True, 4.0),
    ]


def test_rows_are_compared_with_those_of_their_own_kind() -> None:
    rows = [
        row("round_robin", 10.0),
        row("lpt", 15.0, mode="stream"),
        row("round_robin", 5.0, measured=True),
        row("lpt", 15.0, mode="stream", measured=True),
        row("lpt", 15.0, group=8),
    ]
    assert [one["ratio_to_synchronous"] for one in with_ratios(rows)] == [1.0, 1.5, 1.0, 3.0, None]


def test_cells_compare_skewness_aware_with_the_best_of_the_others() -> None:
    rates = {"round_robin": 10.0, "least_loaded": 11.0, "lpt": 12.0, "skewness_aware": 11.4}
    rows = with_ratios([row(dispatch, rate) for dispatch, rate in rates.items()])
    (cell,) = cells(rows)
    assert (cell["workload"], cell["lpt"], cell["over_best"]) == ("x=1", 1.2, pytest.approx(0.95))
    assert cells(rows[:3]) == []
    assert cells([one | {"workload": "a"} for one in rows]) == []


def test_written_results_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    assert read_results(path) == {"conditions": {}, "rows": [], "cells": []}
    found = {"conditions": {"computed": {"seed": 0}}, "rows": [row("lpt", 1.25)], "cells": []}
    _write(path, found)
    assert read_results(path) == found


def test_the_published_rows_have_every_mode_and_what_is_known_of_the_lengths_and_hold_the_bound() -> None:
    found = read_results(RESULTS / "pipeline.json")
    rows = found["rows"]
    main = [one for one in rows if one["workload"] == "a" and not one["measured"]]
    assert {(one["group"], one["mode"]) for one in main} == {
        (group, mode) for group in (1, 8) for mode in ("synchronous", "stream", "one_step_async", "trajectory_async")
    }
    assert {one["lengths"] for one in main} == {"oracle", "learned", "paper_recall", "none"}
    assert len({one["time_scale"] for one in main}) == len({(one["warm_up"], one["steps"]) for one in main}) == 1
    for one in main:
        if (one["lengths"], one["group"]) == ("oracle", 1):
            assert one["recall"] == 1.0
        if (one["lengths"], one["group"]) == ("paper_recall", 1):
            assert one["recall"] == pytest.approx(0.87, abs=0.04)
    assert sum(one["workload"].startswith("sweep") for one in rows) >= 100
    assert all(cell["over_best"] >= KEPT for cell in found["cells"])
    assert {cell["mode"] for cell in found["cells"]} == {one["mode"] for one in main}
