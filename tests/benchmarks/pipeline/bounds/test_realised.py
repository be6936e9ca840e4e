import pytest

from benchmarks.pipeline.bounds.realised import Queue, ended, finish_times, makespan, round_robin
from schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1.0))


def test_completions_that_run_together_slow_each_other_down() -> None:
    assert finish_times(Queue((2, 4), slots=2), CURVE) == pytest.approx([6.0, 10.0])


def test_a_completion_without_a_slot_waits_for_the_one_before_it() -> None:
    assert finish_times(Queue((2, 4), slots=1), CURVE) == pytest.approx([4.0, 12.0])


def test_round_robin_deals_in_order() -> None:
    assert round_robin([1, 2, 3, 4, 5], workers=2, slots=8) == [Queue((1, 3, 5), 8), Queue((2, 4), 8)]


def test_ends_come_in_order_and_the_last_is_the_makespan() -> None:
    queues = round_robin([9, 1, 5, 3], workers=2, slots=2)
    assert [length for _, length in ended(queues, CURVE)] == [1, 3, 5, 9]
    assert ended(queues, CURVE)[-1][0] == makespan(queues, CURVE)
