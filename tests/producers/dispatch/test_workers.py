from streamrl.producers.dispatch.fleet import LiveWorkers
from streamrl.schemas.messages import WIRE_VERSION
from streamrl.schemas.reports import WorkerState
from tests.producers.dispatch.dispatcher_harness import heartbeat


def _names(workers: LiveWorkers, now: float) -> list[str]:
    return [seen.worker_id for seen in workers.ready(now)]


def test_a_worker_is_there_until_its_lease_ends() -> None:
    workers = LiveWorkers(timeout_s=10)
    workers.observe(heartbeat("w0"), at=0)
    workers.observe(heartbeat("w1"), at=5)
    assert _names(workers, 10) == ["w0", "w1"]
    assert _names(workers, 11) == ["w1"]
    assert workers.has("w0", "a", now=10)
    assert not workers.has("w0", "a", now=11)


def test_only_ready_workers_take_orders_but_draining_ones_keep_theirs() -> None:
    workers = LiveWorkers(timeout_s=10)
    for state in WorkerState:
        workers.observe(heartbeat(state.value, state=state), at=0)
    assert _names(workers, 1) == ["ready"]
    assert {state.value for state in WorkerState if workers.has(state.value, "a", 1)} == {
        "starting", "ready", "paused", "draining",
    }  # fmt: skip


def test_a_new_incarnation_has_none_of_the_orders_of_the_old_one() -> None:
    workers = LiveWorkers(timeout_s=10)
    workers.observe(heartbeat(incarnation="a"), at=0)
    workers.observe(heartbeat(incarnation="b"), at=5)
    workers.observe(heartbeat(incarnation="a"), at=6)
    assert not workers.has("w0", "a", now=6)
    assert workers.has("w0", "b", now=6)
    assert (known := workers.get("w0")) is not None
    assert known.incarnation == "b"


def test_a_pause_of_our_own_expires_no_lease() -> None:
    workers = LiveWorkers(timeout_s=10)
    workers.observe(heartbeat(), at=0)
    workers.extend(60)
    assert _names(workers, 65) == ["w0"]
    assert not _names(workers, 71)


def test_an_unknown_worker_has_nothing() -> None:
    assert not LiveWorkers(10.0).has("w9", None, 0)


def test_a_worker_whose_wire_version_is_too_far_off_is_ordered_nothing() -> None:
    workers = LiveWorkers(timeout_s=10)
    for name, wire in (("same", WIRE_VERSION), ("newer", WIRE_VERSION + 1), ("much-newer", WIRE_VERSION + 2)):
        workers.observe(heartbeat(name).replace(wire=wire), at=0)
    assert _names(workers, now=1) == ["same", "newer"]
