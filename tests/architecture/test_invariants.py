"""Invariants have names, in docstrings, and each has a test that bears its name."""

import pytest

from tests.architecture.invariants import invariants, named_in, named_tests


def test_every_invariant_has_a_test_of_its_name() -> None:
    named, written = invariants(), "\n".join(name for _, name in named_tests())
    assert len(named) > 250, "names are not found any more"
    assert not [f"{one.path}: {one.name}" for one in named if one.name not in written]


@pytest.mark.parametrize(
    ("docstring", "named"),
    [
        ("Pure. Invariant it_holds: whatever comes.", [("it_holds", "whatever comes.")]),
        (
            "Invariants: it_holds; it_stays, in the tables of\n``groups_per_step``.\n\nMore.",
            [("it_holds", ""), ("it_stays", "in the tables of ``groups_per_step``.")],
        ),
        (
            "Invariants, each with a test\nof its name:\n- it_holds: of *a_b*;\n- it_stays: all.\n\nMore.",
            [("it_holds", "of *a_b*"), ("it_stays", "all.")],
        ),
        ("Nothing of that_kind: it_holds.", []),
    ],
)
def test_names_are_found_as_they_are_written(docstring: str, named: list[tuple[str, str]]) -> None:
    assert named_in(docstring) == named
