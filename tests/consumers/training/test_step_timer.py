import pytest

from streamrl.consumers.training.metrics import PhaseSpan, StepTimer


def test_seconds_add_up_by_name_and_spans_say_when() -> None:
    hours = iter([100.0, 200.0, 300.0])
    timer = StepTimer(lambda: next(hours))
    for name in ("wait_for_batch", "forward_backward", "wait_for_batch"):
        with timer.measure(name):
            pass
    assert [(span.name, span.start) for span in timer.spans] == [
        ("wait_for_batch", 100.0),
        ("forward_backward", 200.0),
        ("wait_for_batch", 300.0),
    ]
    waited = sum(span.end - span.start for span in timer.spans if span.name == "wait_for_batch")
    assert waited == pytest.approx(timer.seconds["wait_for_batch"], abs=1e-6)


def test_spans_of_one_name_that_follow_each_other_are_one() -> None:
    hours = iter([100.0, 100.0005, 101.0])
    timer = StepTimer(lambda: next(hours))
    for _ in range(3):
        with timer.measure("wait_for_batch"):
            pass
    assert [span.start for span in timer.spans] == [100.0, 101.0]
    assert timer.spans[0].end == pytest.approx(100.0005, abs=5e-4)
    assert isinstance(timer.spans[0], PhaseSpan)


def test_failing_blocks_are_measured_too() -> None:
    timer = StepTimer()
    with pytest.raises(ValueError, match="no"), timer.measure("optimizer"):
        raise ValueError("no")
    assert [span.name for span in timer.spans] == ["optimizer"]
