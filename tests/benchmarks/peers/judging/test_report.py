import pytest

from benchmarks.peers.contenders.plan import Trained
from benchmarks.peers.judging.curves import Point
from benchmarks.peers.judging.judge import Judged
from benchmarks.peers.judging.report import SHARES, figures, parts_of_the_ratio


def judged(contender: str, seconds_a_step: float, seed: int = 0) -> Judged:
    curve = tuple(Point(step, step * seconds_a_step, step / 20) for step in range(0, 21, 5))
    steps = tuple(
        {"step": float(step), "seconds": 1.0, "samples": 128.0, "sampled_tokens": 1000.0, "trained_tokens": 600.0}
        for step in range(1, 21)
    )
    return Judged(Trained(contender, seed, (), steps, True, 200.0), curve, {})


PACES = {
    "streamrl trajectory_async": 100.0,
    "streamrl trajectory_async, zero advantages computed": 125.0,
    "streamrl synchronous": 200.0,
    "TRL GRPOTrainer, one process": 800.0,
    "TRL GRPOTrainer, two processes": 400.0,
}


def test_ratios_are_to_the_peers_fastest_way_at_every_target() -> None:
    rows = figures("demo", [[judged(name, pace, seed) for name, pace in PACES.items()] for seed in range(2)])
    assert len(rows) == len(PACES) * len(SHARES)
    for row in rows:
        assert row["ratio_to_trl"] == pytest.approx(PACES[row["contender"]] / 400.0, abs=1e-3)


def test_a_peer_that_never_gets_there_sets_no_measure() -> None:
    slow = judged("TRL GRPOTrainer, two processes", 4.0)
    short = Judged(slow.trained, (*slow.curve[:1], Point(20, 80.0, 0.0)), {})
    rows = figures("demo", [[judged("streamrl synchronous", 2.0), judged("TRL GRPOTrainer, one process", 8.0), short]])
    assert all(row["ratio_to_trl"] in (None, pytest.approx(0.25), pytest.approx(1.0)) for row in rows)


def test_the_ratio_is_the_product_of_its_engine_and_its_asynchrony() -> None:
    rows = figures("demo", [[judged(name, pace) for name, pace in PACES.items()]])
    assert parts_of_the_ratio(rows) == {"engine": 0.5, "asynchrony": 0.5, "zero_advantage": 0.8}
    whole = next(row for row in rows if row["contender"] == "streamrl trajectory_async" and row["share_of_gain"] == 0.9)
    assert whole["ratio_to_trl"] == pytest.approx(0.5 * 0.5)


def test_parts_of_contenders_that_did_not_run_are_none() -> None:
    rows = figures("demo", [[judged("streamrl synchronous", 2.0)]])
    assert parts_of_the_ratio(rows) == {"engine": None, "asynchrony": None, "zero_advantage": None}


def test_a_row_says_what_was_spent_until_the_target() -> None:
    rows = figures("demo", [[judged(name, 4.0, seed) for name in PACES] for seed in range(3)])
    row = next(row for row in rows if row["share_of_gain"] == 0.5)
    assert row["task"] == "demo"
    steps = row["steps"][0]
    assert 5 < steps < 15
    assert row["samples"][0] == pytest.approx(steps * 128, abs=1)
    assert row["tokens_computed"][0] == pytest.approx(steps * 1600, abs=100)
    assert row["cpu_s"][0] == pytest.approx(steps * 10, abs=0.6)


def test_the_interval_of_a_ratio_is_over_pairs_of_seeds() -> None:
    """A seed that is slow for both of a pair does not widen it; seeds that disagree do."""

    def rows(ours: list[float], theirs: list[float]) -> dict[str, list[float]]:
        rounds = [
            [judged("streamrl trajectory_async", mine, seed), judged("TRL GRPOTrainer, one process", other, seed)]
            for seed, (mine, other) in enumerate(zip(ours, theirs, strict=True))
        ]
        found = figures("demo", rounds)
        return next(row for row in found if row["share_of_gain"] == 0.9 and row["contender"].startswith("streamrl"))

    alike = rows([1.0, 2.0, 8.0], [2.0, 4.0, 16.0])
    assert alike["seconds_ci"] == [0.5, 0.5]
    differing = rows([1.0, 2.0, 8.0], [1.5, 5.0, 16.0])
    low, high = differing["seconds_ci"]
    assert low < 0.45
    assert high > 0.6
    assert rows([1.0], [2.0])["seconds_ci"] is None
