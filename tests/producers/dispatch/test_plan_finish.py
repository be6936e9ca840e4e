import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.plans import (
    Item,
    Plan,
    WorkerCapacity,
    WorkerShare,
    _share_finish_s,
    predicted_finish_s,
    worker_finish_s,
)
from schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1.0))
"""A step of b takes 1 + b seconds."""
LENGTHS = st.lists(st.integers(1, 500), max_size=40)


def _step_by_step(lengths: list[int], concurrency: int, running: list[int]) -> float:
    """One decode step after the other."""
    batch, waiting, seconds = list(running), list(lengths), 0.0
    while batch or waiting:
        while waiting and len(batch) < concurrency:
            batch.append(waiting.pop(0))
        seconds += CURVE.batch_s(len(batch))
        batch = [left - 1 for left in batch if left > 1]
    return seconds


@settings(max_examples=150, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 8), st.lists(st.integers(1, 500), max_size=12))
def test_the_finish_is_that_of_decoding_step_by_step(lengths: list[int], concurrency: int, running: list[int]) -> None:
    expected = _step_by_step(lengths, concurrency, running)
    assert worker_finish_s(lengths, concurrency, CURVE, running) == pytest.approx(expected)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 500))
def test_more_work_at_the_end_is_never_over_sooner(lengths: list[int], concurrency: int, more: int) -> None:
    assert worker_finish_s([*lengths, more], concurrency, CURVE) >= worker_finish_s(lengths, concurrency, CURVE)


def test_the_batch_shrinks_when_nothing_waits() -> None:
    assert worker_finish_s([10, 4], 2, CURVE) == 4 * 3 + 6 * 2
    assert worker_finish_s([4, 10], 1, CURVE) == 14 * 2


def test_tokens_in_the_caches_cost_the_same_in_any_order() -> None:
    curve = DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1.0, context_s_per_token=0.5))
    extra = 0.5 * (10 * 9 / 2 + 4 * 3 / 2)
    assert worker_finish_s([10, 4], 2, curve) == worker_finish_s([10, 4], 2, CURVE) + extra
    assert worker_finish_s([4, 10], 1, curve) == worker_finish_s([4, 10], 1, CURVE) + extra


def test_a_share_runs_what_its_worker_has_before_its_items() -> None:
    share = WorkerShare(WorkerCapacity("w0", 2, running=(5, 5), waiting=(3,)), 2, (Item(0, 7, samples=2),))
    assert _share_finish_s(share, CURVE) == worker_finish_s([3, 7, 7], 2, CURVE, [5, 5])
    uneven = WorkerShare(WorkerCapacity("w0", 2), 2, (Item(0, 7, samples=3, upper=20),))
    assert _share_finish_s(uneven, CURVE) == worker_finish_s([20, 7, 7], 2, CURVE)
    assert predicted_finish_s(Plan((share, WorkerShare(WorkerCapacity("w1", 2), 2))), CURVE) == _share_finish_s(
        share, CURVE
    )
    assert predicted_finish_s(Plan(()), CURVE) == 0.0


def test_a_large_plan_is_judged_in_a_few_milliseconds() -> None:
    items = tuple(Item(number, 100 + 37 * number % 9000) for number in range(256))
    plan = Plan(tuple(WorkerShare(WorkerCapacity(f"w{n}", 64), 64, items) for n in range(8)))
    began = time.process_time()
    for _ in range(10):
        predicted_finish_s(plan, CURVE)
    assert (time.process_time() - began) / 10 < 0.02
