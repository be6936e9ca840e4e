"""Every drawing over a made-up run, in every size: its figures are there, and nothing is larger than its room."""

from typing import Any

import pytest
from rich.cells import cell_len

from streamrl.inspection.terminal.drawing import Draw, curve, draw_events, draw_head, draw_rows, preview, row_of, whole
from streamrl.inspection.terminal.sections import (
    draw_lag,
    draw_lengths,
    draw_loop,
    draw_split,
    draw_staleness,
    draw_workers,
)
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.schemas.trajectories import Trajectory
from tests.inspection.terminal.made_up_state import MadeUpState
from tests.schemas.examples import example

DRAWINGS: dict[str, Draw] = {
    "head": draw_head,
    "loop": draw_loop,
    "reward": curve("reward"),
    "lengths": draw_lengths,
    "lag": draw_lag,
    "staleness": draw_staleness,
    "workers": draw_workers,
    "split": draw_split,
    "rows": draw_rows,
    "events": draw_events,
}


@pytest.fixture(scope="module")
def run() -> MadeUpState:
    return MadeUpState(90.0)


@pytest.fixture(scope="module")
def data(run: MadeUpState) -> dict[str, Any]:
    return snapshot(run.state, run.now)


@pytest.mark.parametrize("name", DRAWINGS)
@pytest.mark.parametrize("full", [False, True])
def test_a_drawing_stays_within_its_room(name: str, full: bool, data: dict[str, Any]) -> None:
    shown = data if full else snapshot(RunState("empty"), 1_795_000_000.0)
    for width in (0, 1, 7, 20, 36, 48, 76, 77, 108, 116, 200):
        for height in (0, 1, 2, 4, 5, 6, 12, 40):
            rows = DRAWINGS[name](shown, width, height).plain.split("\n")
            assert len(rows) <= max(1, height), (width, height)
            assert all(cell_len(row) <= width for row in rows), (width, height, rows)


@pytest.mark.parametrize("width", [76, 116, 156])
def test_the_loop_has_a_rate_on_every_arrow(width: int, data: dict[str, Any]) -> None:
    shown = {**data, "loop": {
        **data["loop"], "ordered_per_s": 2.5, "sampled_per_s": 1000.0, "sampled_tokens_per_s": 250_000,
        "trajectories_per_s": 987.0, "weights_per_min": 30.0, "time_left_s": 4000.0,
    }}  # fmt: skip
    drawn = draw_loop(shown, width, 6).plain
    for told in (
        "prompts",
        "workers",
        "trajectories",
        "trainer",
        "2.50/s",
        "1000/s",
        "250k",
        "987/s",
        "30/min",
        "67 min",
    ):
        assert told in drawn, told
    assert f"{data['loop']['step']}/900" in drawn
    assert drawn.count("▶") == 3


def test_dead_letters_and_skips_are_counted_at_their_topic(data: dict[str, Any]) -> None:
    loop = {**data["loop"], "skipped": 7, "dead_letters": 2}
    assert "7 skipped, 2 dead" in draw_loop({**data, "loop": loop}, 140, 6).plain
    assert "2 dead" in draw_loop({**data, "loop": loop}, 76, 6).plain


def test_lag_is_drawn_by_bucket_and_the_rest_is_summed() -> None:
    lag = {"buckets": [0, 1, 2], "lag": [12, 4, 0]}
    rows = draw_lag({"lag": lag}, 60, 5).plain.split("\n")
    assert [row.split()[-1] for row in rows] == ["12", "4", "0"]
    assert rows[0].count("█") > rows[1].count("█") > rows[2].count("█") == 0
    assert "and 2 more buckets: 4" in draw_lag({"lag": lag}, 60, 2).plain


def test_staleness_adds_up_to_a_hundred_per_cent() -> None:
    drawn = draw_staleness({"staleness": {"counts": [[0, 30], [1, 60], [3, 10]]}}, 50, 5).plain
    assert [row.split()[-1] for row in drawn.split("\n")] == ["30.0%", "60.0%", "10.0%"]
    assert "older: 70.0%" in draw_staleness({"staleness": {"counts": [[0, 30], [1, 60], [3, 10]]}}, 50, 2).plain


def test_the_heat_map_has_actual_upward_and_predicted_rightward() -> None:
    lengths = {"cells": [[8, 8, 100], [8, 12, 100]], "close": 0.5, "factor": 2.0}
    rows = draw_lengths({"lengths": lengths}, 60, 7).plain.split("\n")
    cells = [row.partition("▕")[2] for row in rows[:5]]
    assert [index for index, row in enumerate(cells) if "█" in row] == [0, 4]
    assert cells[0].index("█") == cells[4].index("█") == 0
    assert "within ×1.5 50%" in rows[-1]
    assert "off by ×2.00" in rows[-1]


def test_classes_are_joined_where_there_is_no_room_for_all() -> None:
    lengths = {"cells": [[index, index, 1] for index in range(20)], "close": 1.0, "factor": 1.0}
    rows = draw_lengths({"lengths": lengths}, 60, 7).plain.split("\n")
    assert len(rows) <= 7
    assert sum("█" in row for row in rows) == 5


def test_a_curve_shows_its_bounds_its_steps_and_its_last_value() -> None:
    curves = {"step": [1.0, 2.0, 3.0], "reward": [0.25, 0.75, 0.5]}
    drawn = curve("reward")({"curves": curves}, 48, 4).plain
    for told in ("0.750", "0.250", "step 1", "now 0.500", "3"):
        assert told in drawn
    assert "not reported" in curve("loss")({"curves": {"step": [1.0], "loss": [None]}}, 48, 4).plain


def test_workers_show_their_versions_and_their_lag(data: dict[str, Any]) -> None:
    workers = [{**data["workers"][0], "id": "w\x1b[2J", "version": "1-70", "behind": 3, "state": "silent"}]
    drawn = draw_workers({"workers": workers, "instances": [], "arms": []}, 100, 4)
    assert "\x1b" not in drawn.plain
    assert "1-70 −3" in drawn.plain
    assert "silent" in drawn.plain


def test_many_workers_are_counted_instead_of_cut(data: dict[str, Any]) -> None:
    many = {"workers": data["workers"] * 10, "split": data["split"] * 10, "instances": [], "arms": []}
    assert "and 56 more" in draw_workers(many, 100, 6).plain
    assert "more" in draw_split(many, 100, 6).plain


def test_time_split_says_who_waits(data: dict[str, Any]) -> None:
    split = [{"name": "trainer", "shares": {"train": 0.25, "optimizer": 0.25}, "wait": 0.5}]
    rows = draw_split({"split": split}, 62, 4).plain.split("\n")
    assert rows[0].replace("█", "").split() == ["train", "optimizer", "wait"]
    assert "50% busy" in rows[1]


def test_a_row_and_its_preview_hold_the_figures_of_a_trajectory(data: dict[str, Any]) -> None:
    row = {**data["trajectories"][0], "fate": "trained in step 9", "text": "first\x1b[31m\nsecond", "reward": 0.5}
    told = row_of(row, 160).plain
    for each in (row["id"], row["worker"], str(row["length"]), str(row["predicted"]), "0.500", "trained in step 9"):
        assert each in told
    assert "\x1b" not in told + preview(row).plain
    assert row["place"] in preview(row).plain


def test_a_whole_trajectory_has_prompt_text_reward_parts_and_versions() -> None:
    trajectory = example("trajectory", Trajectory)
    told = whole(
        trajectory.replace(completion_text="done\x1b]0;x\x07\nnext"), "3@7", "waiting", "streamrl show x"
    ).plain
    for name in trajectory.rewards:
        assert name in told
    for span in trajectory.version_spans:
        assert f"{span.version}" in told
    assert trajectory.prompt_text.split("\n")[0] in told
    assert "done\\x1b]0;x\\x07\nnext" in told
    assert "3@7" in told


def test_events_are_newest_first_and_repeats_are_counted() -> None:
    events = [[1, 1_795_000_000.0, "info", "older", 1], [2, 1_795_000_001.0, "bad", "newer", 3]]
    rows = draw_events({"events": events}, 60, 5).plain.split("\n")
    assert "newer  ×3" in rows[0]
    assert "older" in rows[1]
    assert "newer" in draw_events({"events": events}, 60, 1).plain
