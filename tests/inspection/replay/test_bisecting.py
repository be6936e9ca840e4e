import pytest

from inspection.replay.attribution import Bisection


@pytest.mark.parametrize("culprits", [{3}, {0}, {63}, {5, 40}, {1, 2, 61}])
def test_what_is_found_fails_and_nothing_of_it_can_be_spared(culprits: set[int]) -> None:
    bisection = Bisection(range(64), lambda items: culprits <= set(items))
    assert bisection.culprits() == [sorted(culprits)]
    assert len(bisection.answers) < 64 * len(culprits)


def test_independent_culprits_are_found_one_after_the_other() -> None:
    bisection = Bisection("abcdefgh", lambda items: "b" in items or "g" in items)
    assert sorted(map(tuple, bisection.culprits())) == [("b",), ("g",)]


def test_what_only_fails_together_is_found_as_one_set() -> None:
    weights = dict(zip("abcdef", (1, 5, 1, 4, 1, 1), strict=True))
    found = Bisection("abcdef", lambda items: sum(weights[item] for item in items) > 8).culprits()
    assert found == [["b", "d"]]


def test_a_single_culprit_takes_few_questions() -> None:
    asked: list[int] = []

    def fails(items: list[int]) -> bool:
        asked.append(len(items))
        return 77 in items

    assert Bisection(range(128), fails).culprits() == [[77]]
    assert len(asked) <= 17


def test_what_does_not_fail_has_no_culprits() -> None:
    assert Bisection([1, 2, 3], lambda items: False).culprits() == []
    assert Bisection([], lambda items: True).culprits() == []
