import pytest

from benchmarks.peers.contenders.plan import Trained
from benchmarks.peers.judging.curves import Point
from benchmarks.peers.judging.judge import Judged
from benchmarks.peers.judging.report import SHARES, figures, parts_of_the_ratio


def judged(contender: str, seconds_a_step: float, seed: int = 0) -> Judged:
    curve = tuple(Point(step, step * seconds_a_step, step / 20) for step in range(0, 21, 5))
    return Judged(Trained(contender, seed, (), (), True, 0.0), curve, {})


PACES = {
    "streamrl trajectory_async": 100.0,
    "streamrl trajectory_async, zero advantages computed": 125.0,
    "streamrl synchronous": 200.0,
    "TRL GRPOTrainer, one process": 800.0,
    "TRL GRPOTrainer, two processes": 400.0,
}


def test_ratios_are_to_the_peers_fastest_way_at_every_target() -> None:
    rows = figures([[judged(name, pace, seed) for name, pace in PACES.items()] for seed in range(2)])
    assert len(rows) == len(PACES) * len(SHARES)
    for row in rows:
        assert row["ratio_to_trl"] == pytest.approx(PACES[row["contender"]] / 400.0, abs=1e-3)


def test_a_peer_that_never_gets_there_sets_no_measure() -> None:
    slow = judged("TRL GRPOTrainer, two processes", 4.0)
    short = Judged(slow.trained, (*slow.curve[:1], Point(20, 80.0, 0.0)), {})
    rows = figures([[judged("streamrl synchronous", 2.0), judged("TRL GRPOTrainer, one process", 8.0), short]])
    assert all(row["ratio_to_trl"] in (None, pytest.approx(0.25), pytest.approx(1.0)) for row in rows)


def test_the_ratio_is_the_product_of_its_engine_and_its_asynchrony() -> None:
    rows = figures([[judged(name, pace) for name, pace in PACES.items()]])
    assert parts_of_the_ratio(rows) == {"engine": 0.5, "asynchrony": 0.5, "zero_advantage": 0.8}
    whole = next(row for row in rows if row["contender"] == "streamrl trajectory_async" and row["share_of_gain"] == 0.9)
    assert whole["ratio_to_trl"] == pytest.approx(0.5 * 0.5)


def test_parts_of_contenders_that_did_not_run_are_none() -> None:
    rows = figures([[judged("streamrl synchronous", 2.0)]])
    assert parts_of_the_ratio(rows) == {"engine": None, "asynchrony": None, "zero_advantage": None}
