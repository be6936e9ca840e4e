import pytest

from streamrl.producers.dispatch.fleet import Candidate, least_loaded
from streamrl.schemas.identifiers import PolicyVersion


def _candidate(worker: str, *, tokens: int = 0, capacity: int = 8, sequences: int = 0, number: int = 0) -> Candidate:
    return Candidate(worker, "a", PolicyVersion(1, number), capacity, sequences, tokens)


def test_the_worker_with_the_fewest_tokens_per_slot_is_chosen() -> None:
    candidates = [_candidate("a", tokens=100, capacity=10), _candidate("b", tokens=150, capacity=20)]
    assert least_loaded(candidates).worker_id == "b"


def test_among_equals_the_newest_weights_are_chosen() -> None:
    assert least_loaded([_candidate("a", number=1), _candidate("b", number=2)]).worker_id == "b"


@pytest.mark.parametrize(
    ("sequences", "capacity", "has_room"),
    [(0, 8, True), (7, 8, True), (8, 8, False), (8, 32, True), (32, 32, True), (33, 32, False), (0, 0, False)],
)
def test_a_worker_stays_a_little_ahead_of_its_slots(sequences: int, capacity: int, has_room: bool) -> None:
    assert _candidate("a", sequences=sequences, capacity=capacity).has_room(8, 1.25) is has_room


@pytest.mark.parametrize(
    ("sequences", "samples", "has_room"), [(0, 99, True), (19, 1, True), (20, 1, False), (16, 8, True), (17, 8, False)]
)
def test_a_reduced_worker_runs_about_as_many_as_it_shall(sequences: int, samples: int, has_room: bool) -> None:
    assert _candidate("a", sequences=sequences, capacity=64).has_room_within(samples, 20) is has_room
