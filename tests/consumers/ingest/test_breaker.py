import pytest

from consumers.ingest.filters import CircuitBreaker
from schemas.errors import BadInput


def breaker(max_consecutive: int = 50, max_share: float = 0.01) -> CircuitBreaker:
    return CircuitBreaker("undecodable records", max_consecutive, max_share)


def test_more_than_the_allowed_number_in_a_row_trips_it() -> None:
    found = breaker(3)
    for _ in range(3):
        found.failed("x")
    with pytest.raises(BadInput, match="undecodable records, got 4 in a row"):
        found.failed("x")


def test_a_good_record_ends_the_row() -> None:
    found = breaker(3)
    for _ in range(20):
        found.failed("x")
        found.good()


def test_a_share_is_judged_only_from_a_hundred_records_on() -> None:
    found = breaker()
    for number in range(98):
        found.good() if number % 20 else found.failed("x")
    with pytest.raises(BadInput, match="the latest: p/0/0: bad"):
        for _ in range(2):
            found.failed("p/0/0: bad")


def test_one_in_a_hundred_is_allowed_and_old_faults_are_forgotten() -> None:
    found = breaker()
    for number in range(5000):
        found.failed("x") if number % 100 == 99 else found.good()
    assert found.bad == 10
    for _ in range(1000):
        found.good()
    assert found.bad == 0
