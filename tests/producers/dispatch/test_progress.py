import pytest

from producers.dispatch.fleet import ExpectedLength, Progress
from schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=1.0))
"""A step of b takes 10 ms × (1 + b)."""


def _progress(longest: int = 10_000) -> Progress:
    return Progress(CURVE, longest)


def test_what_is_left_follows_the_curve() -> None:
    progress = _progress()
    progress.send("w0", 4, [("a", 0)], ExpectedLength(1000), now=0.0)
    assert progress.remaining("w0", 2.0).running == (900,)
    progress.send("w0", 4, [("b", 0)], ExpectedLength(500), now=2.0)
    remaining = progress.remaining("w0", 5.0)
    assert (remaining.running, remaining.tokens, remaining.outgrown) == ((800, 400), 1200, ())


def test_what_has_no_slot_waits_and_begins_in_order() -> None:
    progress = _progress()
    progress.send("w0", 1, [("a", 0), ("a", 1)], ExpectedLength(100), now=0.0)
    assert progress.remaining("w0", 1.0).waiting == (100,)
    progress.finished("w0", ("a", 0), 100, now=2.0)
    assert progress.remaining("w0", 3.0).running == (50,)


def test_a_completion_that_outgrew_its_estimate_is_expected_to_go_on_for_half_of_what_it_has() -> None:
    progress = _progress(longest=1000)
    progress.send("w0", 1, [("a", 0)], ExpectedLength(100), now=0.0)
    assert progress.remaining("w0", 8.0).outgrown == (200,)
    assert progress.remaining("w0", 19.0).outgrown == (50,)
    assert progress.remaining("w0", 2.1).outgrown == (50,)


def test_of_a_completion_that_outgrew_a_sure_estimate_little_is_still_to_come() -> None:
    progress = _progress()
    progress.send("w0", 2, [("a", 0)], ExpectedLength(1000, deviation=0.2), now=0.0)
    assert progress.remaining("w0", 19.0).running == (50,)
    (sure,) = progress.remaining("w0", 24.0).outgrown
    assert 100 < sure < 200
    (beyond_belief,) = progress.remaining("w0", 40.0).outgrown
    assert beyond_belief == 1000


def test_what_was_dropped_is_not_counted() -> None:
    progress = _progress()
    progress.send("w0", 1, [("a", 0), ("a", 1)], ExpectedLength(100), now=0.0)
    progress.drop("w0", [("a", 0)], 1.0)
    progress.drop("w9", [("a", 0)], 1.0)
    assert progress.remaining("w0", 1.0).running == (100,)
    assert progress.remaining("w9", 1.0).tokens == 0


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_the_scale_of_the_curve_is_learnt_from_what_arrives(factor: float) -> None:
    progress, now = _progress(), 0.0
    for number in range(40):
        progress.send("w0", 1, [("a", number)], ExpectedLength(100), now)
        now += 1000 * CURVE.batch_s(1) / factor
        progress.finished("w0", ("a", number), 1000, now)
    assert progress.speed == pytest.approx(factor, rel=0.01)


def test_short_completions_whose_news_is_late_say_little() -> None:
    progress, now = _progress(), 0.0
    for number in range(100):
        length, late = (5000, 0.0) if number < 40 else (10, 0.5)
        progress.send("w0", 1, [("a", number)], ExpectedLength(length), now)
        now += length * CURVE.batch_s(1) + late
        progress.finished("w0", ("a", number), length, now)
    assert progress.speed > 0.95
