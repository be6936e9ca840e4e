import pytest

from streamrl.producers.dispatch.progress import ExpectedLength, Progress, TrainerPace
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings
from streamrl.schemas.reports import StepReport
from tests.producers.dispatch.dispatcher_harness import step_report

CURVE = DecodeCurve(DecodeSettings(step_s=0.01, batch_scale=1.0))
"""A step of b takes 10 ms × (1 + b)."""


def _progress(longest: int = 10_000) -> Progress:
    return Progress(lambda worker_id: CURVE, longest)


def test_remaining_tokens_follow_the_speed_curve() -> None:
    progress = _progress()
    progress.send("w0", 4, [("a", 0)], ExpectedLength(1000), now=0.0)
    assert progress.remaining("w0", 2.0).running == (900,)
    progress.send("w0", 4, [("b", 0)], ExpectedLength(500), now=2.0)
    remaining = progress.remaining("w0", 5.0)
    assert (remaining.running, remaining.tokens, remaining.outgrown) == ((800, 400), 1200, ())


def test_samples_without_a_slot_wait_and_start_in_order() -> None:
    progress = _progress()
    progress.send("w0", 1, [("a", 0), ("a", 1)], ExpectedLength(100), now=0.0)
    assert progress.remaining("w0", 1.0).waiting == (100,)
    progress.finished("w0", ("a", 0), 100, now=2.0)
    assert progress.remaining("w0", 3.0).running == (50,)


def test_a_completion_that_outgrew_its_estimate_is_expected_to_grow_by_half() -> None:
    progress = _progress(longest=1000)
    progress.send("w0", 1, [("a", 0)], ExpectedLength(100), now=0.0)
    assert progress.remaining("w0", 8.0).outgrown == (200,)
    assert progress.remaining("w0", 19.0).outgrown == (50,)
    assert progress.remaining("w0", 2.1).outgrown == (50,)


def test_a_completion_that_outgrew_a_precise_estimate_is_expected_to_end_soon() -> None:
    progress = _progress()
    progress.send("w0", 2, [("a", 0)], ExpectedLength(1000, deviation=0.2), now=0.0)
    assert progress.remaining("w0", 19.0).running == (50,)
    (sure,) = progress.remaining("w0", 24.0).outgrown
    assert 100 < sure < 200
    (beyond_belief,) = progress.remaining("w0", 40.0).outgrown
    assert beyond_belief == 1000


def test_dropped_samples_are_not_counted() -> None:
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


def test_each_worker_has_a_speed_of_its_own_and_a_new_one_begins_with_the_others() -> None:
    progress, now = _progress(), 0.0
    for number in range(32):
        for name, speed in (("fast", 1.0), ("slow", 0.5)):
            began = now + 100 * number
            progress.send(name, 1, [(name, number)], ExpectedLength(1000), began)
            progress.finished(name, (name, number), 1000, began + 1000 * CURVE.batch_s(1) / speed)
    assert progress.speeds == {"fast": pytest.approx(1.0, rel=0.05), "slow": pytest.approx(0.5, rel=0.12)}
    assert progress.curve_of("slow").batch_s(4) == pytest.approx(2 * progress.curve_of("fast").batch_s(4), rel=0.12)
    assert progress.curve_of("new").batch_s(1) == pytest.approx(CURVE.batch_s(1) / 0.75, rel=0.08)


def test_contexts_are_what_the_prompt_and_the_tokens_so_far_hold() -> None:
    progress = _progress()
    progress.send("w0", 1, [("a", 0), ("a", 1)], ExpectedLength(1000, prompt=50), now=0.0)
    assert progress.remaining("w0", 2.0).contexts == (150, 50)


def _report(step: int, groups: tuple[str, ...], seconds: float) -> StepReport:
    return step_report(step, groups).replace(metrics={"time/forward_backward": seconds, "time/optimizer": 0.0})


def test_the_trainer_is_as_fast_as_its_steps_say_and_busy_until_it_has_done_what_arrived_whole() -> None:
    trainer = TrainerPace()
    for group in ("a", "b"):
        trainer.produced(group, 60, 1.0, is_whole=False)
        trainer.produced(group, 40, 2.0, is_whole=True)
    assert (trainer.s_per_token, trainer.free_in_s(2.0)) == (0.0, 0.0)
    trainer.stepped(_report(1, ("a",), 5.0), 10.0)
    assert trainer.s_per_token == 0.05
    assert trainer.free_in_s(11.0) == pytest.approx(4.0)
    trainer.produced("c", 100, 11.0, is_whole=True)
    assert trainer.free_in_s(11.0) == pytest.approx(9.0)
    trainer.stepped(_report(2, ("b", "c"), 20.0), 20.0)
    assert trainer.s_per_token == pytest.approx((0.05 + 0.1) / 2)
    assert trainer.free_in_s(20.0) == 0.0
