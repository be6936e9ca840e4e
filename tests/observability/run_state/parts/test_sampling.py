import itertools

from observability.run_state.aggregates import MOST, NEWEST, sampled


def test_few_are_all_looked_into() -> None:
    assert sampled(range(MOST)) == set(range(MOST))


def test_of_many_the_newest_and_some_of_all_the_others_are() -> None:
    many = range(0, 10 * MOST, 2)
    found = sampled(many)
    assert len(found) == MOST
    assert set(many[-NEWEST:]) <= found
    older = sorted(found - set(many[-NEWEST:]))
    assert older[0] == 0
    assert max(later - earlier for earlier, later in itertools.pairwise(older)) <= 2 * len(many) / 150
