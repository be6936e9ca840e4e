from dataclasses import dataclass

from streamrl.schemas.liveness import LastBeats


@dataclass(frozen=True)
class Beat:
    sequence: int
    incarnation: str = "a"


def test_the_newest_incarnation_owns_the_name() -> None:
    beats = LastBeats[Beat](10.0)
    assert beats.observe("w0", Beat(3), 0.0)
    assert beats.observe("w0", Beat(0, "b"), 1.0)
    # However high its number, and even if the newer one is silent.
    assert not beats.observe("w0", Beat(9), 2.0)
    assert not beats.observe("w0", Beat(10), 100.0)
    assert beats.get("w0") == Beat(0, "b")
    assert (beats.was_replaced("w0", "a"), beats.was_replaced("w0", "b"), beats.was_replaced("w1", "a")) == (
        True,
        False,
        False,
    )


def test_a_repeated_heartbeat_does_not_renew_the_timeout() -> None:
    beats = LastBeats[Beat](10.0)
    beats.observe("w0", Beat(3), 0.0)
    for repeat in (Beat(3), Beat(2)):
        assert not beats.observe("w0", repeat, 9.0)
    assert not beats.is_silent("w0", 10.0)
    assert beats.is_silent("w0", 10.1)


def test_time_when_the_reader_hears_nothing_does_not_count() -> None:
    beats = LastBeats[Beat](10.0)
    for worker, at in (("w0", 0.0), ("w1", 5.0)):
        beats.observe(worker, Beat(0), at)
    beats.extend(60.0)
    assert [name for name, _ in beats if not beats.is_silent(name, 72.0)] == ["w1"]


def test_a_process_that_was_never_heard_is_silent() -> None:
    assert LastBeats[Beat](10.0).is_silent("w0", 0.0)
    assert LastBeats[Beat](10.0).get("w0") is None
