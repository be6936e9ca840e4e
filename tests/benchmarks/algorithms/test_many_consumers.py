"""The pure parts of `make bench-algorithms`: what is made of what was measured."""

import subprocess
from pathlib import Path
from typing import cast

import pytest

from benchmarks.algorithms.__main__ import with_conditions
from benchmarks.algorithms.attached import ALGORITHMS, BEHIND, LEVELS, Window, keeps_up, rows_of, staircase
from benchmarks.algorithms.emulated import GROUPS, MEDIAN_TOKENS, SAMPLES, TOKENS_PER_S, settings_tree
from benchmarks.algorithms.graders import Look, row_of, waiting_by_bucket
from benchmarks.algorithms.live import (
    OWN,
    PROMOTED,
    SHOWN,
    Course,
    Event,
    compared,
    curve_of,
    served_at,
    told_events,
)
from benchmarks.algorithms.shared import ratios
from benchmarks.algorithms.streams import Stream, generated, tokens_per_s
from streamrl.consumers.algorithms.settings import PRESETS
from streamrl.schemas.errors import StreamRLError
from streamrl.settings.loading import validated
from streamrl.settings.tree import decode_curve


def test_a_rate_counts_what_came_between_two_heartbeats_in_proportion() -> None:
    counts = {"a/1": [(0.0, 0), (2.0, 200), (4.0, 200)], "b/1": [(4.0, 40), (0.0, 0)]}
    assert tokens_per_s(counts, 1.0, 3.0) == pytest.approx((100 + 20) / 2)
    assert generated(counts) == 240


def test_a_worker_that_was_started_again_counts_with_both_lives() -> None:
    counts = {"a/1": [(0.0, 0), (2.0, 200)], "a/2": [(3.0, 0), (4.0, 100)]}
    assert tokens_per_s(counts, 0.0, 4.0) == pytest.approx(300 / 4)
    assert generated(counts) == 300


def test_each_number_of_consumers_comes_as_early_as_late_in_a_sweep() -> None:
    sweep = staircase()
    assert sweep == sweep[::-1]
    assert {sweep.count(level) for level in LEVELS} == {2}


def test_rows_compare_means_with_those_without_consumers() -> None:
    rates = {0: (100.0, 98.0, 102.0), 1: (99.0, 99.0), 2: (100.0, 100.0, 103.0), 4: (100.0,), 8: (95.0, 97.0)}
    windows = [
        (Window(level, 0.0, 1.0, None if level == 0 else 1.0, 0.1 * level, 0.5), rate)
        for level, found in rates.items()
        for rate in found
    ]
    rows = {row["consumers"]: row for row in rows_of(windows)}
    assert [row["throughput_ratio"] for row in rows.values()] == [1.0, 0.99, 1.01, 1.0, 0.96]
    assert rows[0]["range"] == [0.98, 1.02]
    assert rows[0]["kept_up"] is None
    assert rows[8] == rows[8] | {"range": [0.95, 0.97], "windows": 2, "kept_up": 1.0, "processors": 0.8}


def test_an_instance_keeps_up_once_it_takes_steps_and_little_is_left() -> None:
    near, far = {"step": 3, "kafka/lag/bucket_0": BEHIND / 2}, {"step": 3, "kafka/lag/bucket_0": BEHIND + 1}
    assert not keeps_up([near])
    assert not keeps_up([near, far | {"kafka/lag/bucket_1": 1}])
    assert keeps_up([far, near | {"kafka/lag/bucket_1": BEHIND / 2}])


def test_the_shared_run_is_compared_with_the_sum_of_separate_runs() -> None:
    apart = [{"tokens": 100, "seconds": 10.0}, {"tokens": 110, "seconds": 11.0}, {"tokens": 90, "seconds": 12.0}]
    found = ratios(apart, {"tokens": 120, "seconds": 11.0})
    assert (found["shared_tokens_ratio"], found["shared_seconds_ratio"]) == (2.5, 3.0)


def test_parts_keep_their_conditions_apart() -> None:
    found = with_conditions("attached", {"attached": [], "conditions": {"window_s": 2}}, {"load": 1.0})
    assert found == {"attached": [], "attached_conditions": {"load": 1.0, "window_s": 2}}
    assert with_conditions("shelf", {"losses": []}, {"load": 1.0}) == {"losses": [], "conditions": {"load": 1.0}}


def test_the_emulated_run_is_set_by_its_curve_and_a_step_takes_a_second_of_it(tmp_path: Path) -> None:
    settings = validated(settings_tree("run", tmp_path, "nowhere:1", "ppo", 5, seed=0))
    slots = settings.generation.max_num_seqs
    assert settings.run.workers * slots / decode_curve(settings).batch_s(slots) == TOKENS_PER_S
    assert 0.5 < GROUPS * SAMPLES * MEDIAN_TOKENS / TOKENS_PER_S < 2
    assert set(ALGORITHMS) <= set(PRESETS)


def test_the_newest_rows_are_whole_ones(tmp_path: Path) -> None:
    run = Stream(cast("subprocess.Popen[bytes]", None), tmp_path)
    assert (run.newest(), run.step()) == ([], 0)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert run.newest() == [{"step": 1}]
    path.write_text("".join(f'{{"step": {step}, "padding": "{"x" * 1000}"}}\n' for step in range(1, 101)) + '{"step"')
    assert [row["step"] for row in run.newest()] == [99, 100]
    assert run.step() == 100


def test_a_curve_is_the_means_of_equal_parts_in_order() -> None:
    assert curve_of([0.0, 0.0, 1.0, 0.0, 1.0, 1.0], points=3) == [0.0, 0.5, 1.0]
    assert curve_of([1.0, 0.0], points=12) == [1.0, 0.0]
    with pytest.raises(StreamRLError, match="trajectories of every arm"):
        curve_of([])


def test_samples_belong_to_the_policy_served_at_their_moment() -> None:
    events = [
        Event("split", 10.0, 3),
        Event(f"{PROMOTED} promoted", 20.0, 30, PROMOTED),
        Event("rloo stalled", 25.0, 35),
        Event(f"{OWN} promoted", 30.0, 40, OWN),
    ]
    assert [served_at(moment, events) for moment in (11.0, 19.9, 20.0, 29.0, 31.0)] == [
        OWN,
        OWN,
        PROMOTED,
        PROMOTED,
        OWN,
    ]


def test_runs_are_compared_by_their_rate_and_by_the_policy_that_differs_most() -> None:
    def told(name: str, last: float) -> dict[str, object]:
        return {
            "name": name,
            "algorithm": name,
            "held_out_before": 0.1,
            **dict.fromkeys(SHOWN, 0.1),
            "reward_last": last,
        }

    late = {"name": "late", "algorithm": "late", **dict.fromkeys(SHOWN, 9.0)}  # is in one of them alone
    found = compared(
        {"tokens_per_s": 200.0, "instances": [told(OWN, 0.6), told("dpo", 0.5)]},
        {"tokens_per_s": 190.0, "instances": [told(OWN, 0.62), told("dpo", 0.4), late]},
    )
    assert found["live_throughput_ratio"] == 0.95
    assert found["live_largest_difference"] == pytest.approx(0.1)
    assert [(row["algorithm"], row["disturbed"]["reward_last"]) for row in found["live_rows"]] == [
        (OWN, 0.62),
        ("dpo", 0.4),
    ]


def test_a_stretch_is_compared_with_the_same_steps_of_the_run_that_was_left_alone() -> None:
    alone = Course(steps=[float(10 * n) for n in range(1, 9)])
    disturbed = Course(steps=[100.0 + 20 * n for n in range(1, 9)])
    disturbed.events = [Event("begun", 121.0, 1), Event("a kill", 165.0, 3)]
    rows = told_events(alone, {"w/1": [(0.0, 0), (100.0, 1000)]}, disturbed, {"w/1": [(0.0, 0), (400.0, 2000)]}, 8)
    assert [(row["what"], row["step"], row["until"]) for row in rows] == [("begun", 1, 3), ("a kill", 3, 8)]
    assert [row["throughput_ratio"] for row in rows] == [0.5, 0.5]


def test_samples_waiting_for_graders_are_counted_by_bucket_and_as_a_rate() -> None:
    ends = {0: 100, 3: 10, 4: 50, 15: 7}
    assert waiting_by_bucket(ends, {0: 40, 3: 10, 15: 9}) == (60, 50, 0, 0), "of partition 4 the group has said nothing"
    begin, end = Look(10.0, 1000, (60, 50, 0, 4)), Look(12.0, 1160, (20, 30, 0, 4))
    assert row_of(4, begin, end) == {
        "members": 4,
        "per_s": 80.0,
        "lag_begin": [60, 50, 0, 4],
        "lag_end": [20, 30, 0, 4],
        "lag_per_s": -30.0,
    }
