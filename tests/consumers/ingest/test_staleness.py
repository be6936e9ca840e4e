import pytest

from streamrl.consumers.ingest.filters import StalenessRule, staleness
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason
from tests.consumers.factories import trajectory

CURRENT = PolicyVersion(2, 10)


def v(number: int, lineage: int = 2) -> PolicyVersion:
    return PolicyVersion(lineage, number)


@pytest.mark.parametrize(
    ("versions", "age"),
    [
        ((v(10),), 0),
        ((v(7), v(9)), 3),
        ((v(11, lineage=1),), 0),
        ((v(9, lineage=1), v(6)), 4),
    ],
)
def test_the_oldest_span_counts_by_its_number_whatever_its_lineage(
    versions: tuple[PolicyVersion, ...], age: int
) -> None:
    assert staleness(trajectory(tokens=4, versions=versions), CURRENT) == age


def test_an_empty_completion_is_as_old_as_its_order() -> None:
    assert staleness(trajectory(tokens=0, versions=(v(8),)), CURRENT) == 2


def test_a_trajectory_is_kept_up_to_the_bound_and_skipped_beyond_it() -> None:
    rule = StalenessRule(4)
    assert rule.violation(trajectory(versions=(v(6),)), CURRENT) is None
    violation = rule.violation(trajectory(versions=(v(5),)), CURRENT)
    assert violation is not None
    assert violation[0] is SkipReason.STALE
