from streamrl.producers.dispatch.fleet import Flight, FlightTable
from tests.producers.dispatch.dispatcher_harness import heartbeat, order


def _sent(table: FlightTable, group_id: str = "toy/0/0", worker: str = "w0") -> Flight:
    table.send(order(group_id, worker), "a", 0.0)
    flight = table.get(group_id)
    assert flight is not None
    return flight


def test_a_produced_sample_leaves_the_worker_but_the_group_stays() -> None:
    table = FlightTable()
    _sent(table)
    assert table.load("w0") == (2, 20)
    assert table.produced("toy/0/0", 0, 0.0) is not None
    assert table.produced("toy/0/0", 0, 0.0) is None
    assert table.load("w0") == (1, 10)
    table.produced("toy/0/0", 1, 0.0)
    assert (table.load("w0"), len(table), list(table.unfinished())) == ((0, 0), 1, [])


def test_a_flight_sent_elsewhere_takes_its_load_along() -> None:
    table = FlightTable()
    flight = _sent(table)
    table.produced("toy/0/0", 0, 0.0)
    table.release(flight)
    assert table.load("w0") == (0, 0)
    table.send(order(worker="w1").replace(sample_indices=(1,), attempt=1), "b", 5.0)
    assert (table.load("w1"), flight.missing, flight.worker_id, flight.sent_at) == ((1, 10), {1}, "w1", 5.0)


def test_the_load_ends_with_the_group() -> None:
    table = FlightTable()
    _sent(table)
    table.end("toy/0/0")
    table.end("toy/0/0")
    assert (table.load("w0"), len(table)) == ((0, 0), 0)


def test_a_group_ends_when_every_sample_of_it_was_skipped() -> None:
    table = FlightTable()
    _sent(table)
    assert not table.skip("toy/0/0", "toy/0/0/0", 1, closed=False)
    assert not table.skip("toy/0/0", "toy/0/0/0", 1, closed=False)
    assert table.skip("toy/0/0", "toy/0/0/1", 1, closed=False)


def test_a_closed_group_ends_when_all_that_exists_of_it_was_skipped() -> None:
    table = FlightTable()
    _sent(table)
    table.produced("toy/0/0", 0, 0.0)
    assert table.skip("toy/0/0", "toy/0/0/0", 1, closed=True)


def test_a_late_sample_does_not_end_a_group_that_is_still_to_be_trained() -> None:
    table = FlightTable()
    _sent(table)
    table.produced("toy/0/0", 0, 0.0)
    assert not table.skip("toy/0/0", "toy/0/0/1", 1, closed=True)


def test_skips_that_will_be_judged_again_are_forgotten() -> None:
    table = FlightTable()
    _sent(table)
    table.skip("toy/0/0", "toy/0/0/0", 5, closed=False)
    table.forget_skips_after(4)
    assert not table.skip("toy/0/0", "toy/0/0/1", 5, closed=False)


def test_an_abandoned_flight_is_no_load_and_misses_nothing() -> None:
    table = FlightTable()
    flight = _sent(table)
    table.give_up(flight)
    assert (table.load("w0"), flight.missing) == ((0, 0), set())


def test_an_order_gets_on_as_far_as_its_workers_heartbeats_say() -> None:
    table = FlightTable()
    flight = _sent(table)
    table.heard(heartbeat(orders={"toy/0/0": 2.0}), 100.0)
    assert (flight.progress_at, flight.absent_since) == (98.0, None)
    table.heard(heartbeat(), 200.0)
    table.heard(heartbeat(incarnation="b", orders={"toy/0/0": 0.0}), 200.0)
    table.heard(heartbeat("w1", orders={"toy/0/0": 0.0}), 200.0)
    assert (flight.progress_at, flight.absent_since) == (98.0, None)


def test_an_order_is_absent_from_the_first_heartbeat_that_lacks_it_until_one_names_it() -> None:
    table = FlightTable()
    flight = _sent(table)
    for at in (3.0, 6.0):
        table.heard(heartbeat(orders={}), at)
    assert flight.absent_since == 3.0
    table.extend(10.0)
    assert flight.absent_since == 13.0
    table.heard(heartbeat(orders={"toy/0/0": 1.0}), 20.0)
    assert flight.absent_since is None
