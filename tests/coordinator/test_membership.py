from streamrl.coordinator.state import Liveness, Membership
from tests.coordinator.factories import heartbeat


def test_a_silent_worker_is_lost_and_comes_back_with_its_next_heartbeat() -> None:
    members = Membership(timeout_s=10)
    assert members.hear(heartbeat(sequence=1), 0.0) is Liveness.ALIVE
    assert members.liveness("w0", 10.0) is Liveness.ALIVE
    assert members.liveness("w0", 10.1) is Liveness.LOST
    assert members.hear(heartbeat(sequence=2), 11.0) is Liveness.ALIVE


def test_a_stopped_worker_has_left_even_when_silent() -> None:
    members = Membership(timeout_s=10)
    members.hear(heartbeat(state="stopped"), 0.0)
    assert members.liveness("w0", 100.0) is Liveness.LEFT
    assert members.with_liveness(Liveness.LOST, 100.0) == []


def test_the_newest_incarnation_holds_the_id() -> None:
    """Newest by the first heartbeat, though its clock may be behind; the former one does not get the id back."""
    members = Membership(timeout_s=10)
    members.hear(heartbeat(incarnation="a", sent_at=50.0, sequence=3), 5.0)
    members.hear(heartbeat(incarnation="b", sent_at=4.0), 6.0)
    assert members.holders() == {"w0": "b"}
    assert members.hear(heartbeat(incarnation="a", sent_at=60.0, sequence=4, state="draining"), 7.0) is None
    assert members.was_replaced("w0", "a")
    assert members.holders() == {"w0": "b"}


def test_a_repeated_heartbeat_changes_nothing() -> None:
    members = Membership(timeout_s=10)
    members.hear(heartbeat(sequence=3), 5.0)
    assert members.hear(heartbeat(sequence=3, state="draining"), 6.0) is None
    assert not members.is_silent("w0", 15.0)
    assert members.is_silent("w0", 15.1)


def test_a_worker_that_left_holds_no_id() -> None:
    members = Membership(timeout_s=10)
    members.hear(heartbeat(), 0.0)
    members.hear(heartbeat(sequence=1, state="stopped"), 1.0)
    assert members.holders() == {}


def test_a_draining_worker_is_neither_alive_nor_lost() -> None:
    members = Membership(timeout_s=10)
    members.hear(heartbeat(state="draining"), 0.0)
    assert members.with_liveness(Liveness.DRAINING, 1.0) == ["w0"]
