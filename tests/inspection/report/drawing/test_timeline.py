from collections.abc import Mapping
from pathlib import Path

import pytest

from streamrl.inspection.report.charts import MOST, WORKERS, shares, timeline
from streamrl.inspection.report.record import RunFacts, RunRecord, TopicDigest, WorkerActivity, rows_of


def record(workers: Mapping[str, WorkerActivity] | None = None, *, steps: int = 2) -> RunRecord:
    """A trainer that waits 0.25 s, trains 0.5 s and does something else for the rest of each second."""
    lines = [
        {
            "step": at + 1,
            "time": 101.0 + at,
            "spans": [["wait_for_batch", 100.0 + at, 100.25 + at], ["forward_backward", 100.25 + at, 100.75 + at]],
        }
        for at in range(steps)
    ]
    return RunRecord(
        "r", Path("r"), rows_of(lines), facts=RunFacts(topics=TopicDigest(held=1, read=1, workers=dict(workers or {})))
    )


def test_lanes_are_in_milliseconds_since_the_first_step() -> None:
    worker = WorkerActivity(generating=((99.5, 100.5), (101.0, 102.0)), adopted=((100.75, "1-1"),))
    found = timeline(record({"worker": worker}))
    assert found == {
        "end": 2000,
        "lanes": [
            {"name": "trainer", "kinds": {"wait": [0, 250, 1000, 250], "train": [250, 500, 1250, 500]}, "marks": []},
            {"name": "worker", "kinds": {"generate": [-500, 1000, 1000, 1000]}, "marks": [[750, "1-1"]]},
        ],
    }


def test_shares_add_up_to_the_whole_time() -> None:
    trainer, worker = shares(record({"worker": WorkerActivity(generating=((99.0, 100.5), (101.0, 109.0)))}))
    assert trainer == {"name": "trainer", "parts": [("train", 0.5), ("other", 0.25), ("wait", 0.25)]}
    assert worker == {"name": "worker", "parts": [("generate", 0.75), ("wait", 0.25)]}


def test_a_long_lane_is_drawn_with_what_took_most_of_each_piece() -> None:
    (lane,) = timeline(record(steps=20_000))["lanes"]
    assert 0 < sum(len(packed) // 2 for packed in lane["kinds"].values()) <= MOST
    assert sum(lane["kinds"]["train"][1::2]) > sum(lane["kinds"].get("wait", [0, 0])[1::2])
    (trainer,) = shares(record(steps=20_000))
    assert dict(trainer["parts"])["train"] == pytest.approx(0.5, abs=0.001)


def test_at_most_a_limited_number_of_workers_is_drawn() -> None:
    found = record({f"worker-{number:03}": WorkerActivity() for number in range(100)})
    assert len(timeline(found)["lanes"]) == 1 + WORKERS
    assert len(shares(found)) == 1 + WORKERS


def test_a_run_without_spans_has_shares_from_its_metrics() -> None:
    rows = rows_of(
        [{"step": 1, "time": 104.0, "time/step": 4.0, "time/wait_for_batch": 1.0, "time/forward_backward": 2.0}]
    )
    found = RunRecord("r", Path("r"), rows)
    assert timeline(found)["lanes"] == []
    assert shares(found) == [{"name": "trainer", "parts": [("train", 0.5), ("other", 0.25), ("wait", 0.25)]}]
