from observability.run_state.aggregates import EVENTS_KEPT, EventLog


def test_repeats_are_counted_and_the_log_is_bounded() -> None:
    log = EventLog()
    for index in range(1000):
        log.add(100.0 + index / 1000, "warn", "skipped")
    assert [(event.text, event.times) for event in log.events] == [("skipped", 1000)]
    for index in range(1000):
        log.add(200.0, "info", f"event {index}")
    assert len(log.events) == EVENTS_KEPT
    assert log.events[-1].number == 1001
