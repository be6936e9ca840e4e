import math

import numpy as np

from streamrl.producers.lengths.learned.history import DatasetLevels, Reservoir


def _filled(count: int, capacity: int = 100) -> Reservoir:
    reservoir = Reservoir(capacity, width=2)
    for index in range(count):
        row = np.array([index, -index], np.float32)
        reservoir.add(row, level=1.0, length=index, censored=index % 2 == 0, dataset="ab"[index % 2])
    return reservoir


def test_it_never_holds_more_than_its_capacity_and_rows_stay_whole() -> None:
    held = _filled(1000).snapshot(DatasetLevels())
    assert len(held) == 100
    assert np.array_equal(held.rows[:, 0], held.length)
    assert np.array_equal(held.rows[:, 1], -held.length)
    assert np.array_equal(held.censored, held.length % 2 == 0)


def test_old_observations_fade_and_the_newest_is_always_there() -> None:
    lengths = _filled(1000).snapshot(DatasetLevels()).length
    assert 999 in lengths
    assert (lengths < 500).sum() <= 3
    assert 30 <= (lengths >= 900).sum() <= 90


def test_a_snapshot_does_not_change_when_more_is_observed() -> None:
    reservoir = _filled(10)
    before = reservoir.snapshot(DatasetLevels())
    reservoir.add(np.zeros(2, np.float32), level=0.0, length=7, censored=False, dataset="a")
    assert (len(before), len(reservoir)) == (10, 11)


def test_without_a_settled_level_the_present_one_is_used() -> None:
    reservoir, levels = Reservoir(10, width=1), DatasetLevels()
    for level, dataset in ((math.nan, "a"), (3.0, "a"), (math.nan, "b")):
        reservoir.add(np.zeros(1, np.float32), level=level, length=1, censored=False, dataset=dataset)
    levels.add("a", 100)
    levels.add("b", 10)
    assert np.allclose(reservoir.snapshot(levels).level, [math.log(100), 3.0, math.log(10)])
