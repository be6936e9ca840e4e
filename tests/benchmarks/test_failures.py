"""What a stretch generated counts once, and ratios are to the stretches in which nobody was killed."""

import numpy as np
import pytest

from benchmarks.failures import Stretch, delivered, noise_of, rows_of
from benchmarks.pipeline.recording import Recording
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport


def recording(*completions: tuple[float, float, int], steps: tuple[float, ...] = ()) -> Recording:
    starts, ends, lengths = (np.array(column) for column in zip(*completions, strict=True))
    count = len(completions)
    reports = tuple(
        StepReport(
            algorithm="grpo",
            sent_at=at,
            step=number,
            version=PolicyVersion(1, number),
            group_ids=(),
            manifest_sha256=None,
            micro_batches=(),
            metrics={},
        )
        for number, at in enumerate(steps)
    )
    none = np.zeros(count, np.int64)
    return Recording(
        none, np.array(["worker-0"] * count), lengths, none, none, starts, starts, ends, none, reports=reports
    )


def test_a_completion_counts_by_its_share_of_time_in_the_stretch() -> None:
    whole, half, outside = (1.0, 3.0, 100), (8.0, 12.0, 40), (11.0, 12.0, 7)
    assert delivered(recording(whole, half, outside), 0.0, 10.0) == pytest.approx(100 + 20)


def test_ratios_compare_with_runs_without_a_kill() -> None:
    steps = (0.0, 5.0, 10.0, 20.0, 24.0, 30.0)
    found = recording((0.0, 10.0, 1000), (10.0, 20.0, 900), (20.0, 30.0, 1000), steps=steps)
    kill = (10.0, "worker-3")
    quiet, kills, again = Stretch("nobody", 0, 10), Stretch("worker", 10, 20, (kill,), 5.0), Stretch("nobody", 20, 30)
    rest, workers = rows_of([quiet, kills, again], found)
    assert rest["generated_tokens_per_s"] == pytest.approx(100.0)
    assert (workers["kills"], workers["every_s"], workers["generated_ratio"]) == (1, 5.0, pytest.approx(0.9))
    assert workers["trained_ratio"] == pytest.approx(0.5)
    assert workers["generated_of_each_stretch"] == [90]
    assert noise_of([rest, workers]) == {"generated": 0.0, "trained": 0.0}


def test_a_step_that_was_under_way_counts_by_its_share_of_time() -> None:
    found = recording((0.0, 10.0, 1000), (10.0, 20.0, 1000), steps=(0.0, 8.0, 16.0, 24.0))
    rest, kills = rows_of([Stretch("nobody", 0, 10), Stretch("trainer", 12, 20)], found)
    assert rest["steps_of_each_stretch"] == [7.5]
    assert kills["trained_ratio"] == pytest.approx(1.0)
