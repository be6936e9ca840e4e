import lightgbm
import numpy as np
import pytest

from streamrl.producers.lengths.learned.features import ROW_WIDTH
from streamrl.producers.lengths.learned.history import Observations
from streamrl.producers.lengths.learned.model import PARAMETERS, fit, lengths_to_learn, packed
from streamrl.schemas.errors import MalformedFrame


def _observed(count: int = 600, seed: int = 0) -> Observations:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 20, (count, ROW_WIDTH)).astype(np.float32)
    return Observations(
        rows=rows,
        level=np.full(count, 3.0, np.float32),
        length=np.exp(3 + 0.2 * rows[:, 0] + rng.normal(0, 0.3, count)).astype(np.float32),
        censored=np.zeros(count, np.bool_),
        dataset=np.zeros(count, np.int64),
    )


def _lengths(length: list[float], censored: list[bool], dataset: list[int]) -> Observations:
    count = len(length)
    return Observations(
        rows=np.zeros((count, ROW_WIDTH), np.float32),
        level=np.zeros(count, np.float32),
        length=np.array(length, np.float32),
        censored=np.array(censored),
        dataset=np.array(dataset),
    )


def test_the_packed_trees_say_what_the_library_says() -> None:
    observed = _observed()
    data = lightgbm.Dataset(observed.rows, np.log(observed.length))
    booster = lightgbm.train({**PARAMETERS, "alpha": 0.9}, data, num_boost_round=20)
    trees = [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    forest = packed([trees, trees[:5]])
    forest.check(ROW_WIDTH, quantiles=2)
    ours = np.array([forest.predict(row) for row in observed.rows[:100]])
    assert np.allclose(ours[:, 0], booster.predict(observed.rows[:100]))
    assert np.allclose(ours[:, 1], booster.predict(observed.rows[:100], num_iteration=5))


def test_the_same_observations_give_the_same_trees() -> None:
    first, second = (fit(_observed(), (0.5, 0.9), 10_000) for _ in range(2))
    assert np.array_equal(first.value, second.value)


def test_quantiles_lie_where_the_lengths_are() -> None:
    forest, new = fit(_observed(2000), (0.5, 0.9), 10_000), _observed(500, seed=1)
    predicted = np.array([forest.predict(row) for row in new.rows]) + new.level[:, None]
    below = (np.log(new.length)[:, None] <= predicted).mean(axis=0)
    assert below[0] == pytest.approx(0.5, abs=0.08)
    assert below[1] == pytest.approx(0.9, abs=0.08)
    assert np.corrcoef(predicted[:, 0], new.rows[:, 0])[0, 1] > 0.9


def test_a_length_cut_off_by_the_present_limit_counts_as_the_limit() -> None:
    assert lengths_to_learn(_lengths([5, 90, 100], [False, False, True], [0, 0, 0]), 100).tolist() == [5, 90, 100]


def test_lengths_cut_off_by_a_lower_limit_are_raised_to_longer_ones_of_their_data_set() -> None:
    observed = _lengths([50, 60, 70, 95, 400, 50], [True, False, False, False, False, True], [0, 0, 0, 0, 1, 2])
    assert lengths_to_learn(observed, 200).tolist() == [70, 60, 70, 95, 200, 50]


def test_no_length_counts_as_more_than_the_limit_or_less_than_a_token() -> None:
    assert lengths_to_learn(_lengths([0, 900], [False, False], [0, 0]), 100).tolist() == [1, 100]


def test_every_walk_ends_or_the_trees_are_refused() -> None:
    forest = fit(_observed(), (0.5, 0.9), 10_000)
    for name, value in (("children", 0), ("children", 10**6), ("feature", ROW_WIDTH), ("roots", -1), ("value", np.nan)):
        arrays = {key: getattr(forest, key).copy() for key in ("feature", "threshold", "children", "value", "roots")}
        arrays[name].flat[-1] = value
        with pytest.raises(MalformedFrame):
            type(forest)(**arrays, depth=forest.depth).check(ROW_WIDTH, quantiles=2)
