import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.dispatch.plans import (
    Item,
    Objective,
    Plan,
    WorkerCapacity,
    WorkerShare,
    completion_ends,
    fits_cache,
    planned_ends,
    predicted_s,
)
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=1.0, batch_scale=1.0))
"""A step of b takes 1 + b seconds."""
LENGTHS = st.lists(st.integers(1, 500), max_size=40)


def worker_finish_s(
    lengths: Sequence[int], concurrency: int, curve: DecodeCurve, running: Sequence[int] = (), kv: int | None = None
) -> float:
    return float(completion_ends(lengths, concurrency, curve, running, kv_tokens=kv).max(initial=0.0))


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
    worker = WorkerCapacity("w0", 2, running=(5, 5), waiting=(3,), curve=CURVE)
    share = WorkerShare(worker, 2, (Item(0, 7, samples=2),))
    finish = worker_finish_s([3, 7, 7], 2, CURVE, [5, 5])
    assert predicted_s(Plan((share,))) == finish
    uneven = WorkerShare(WorkerCapacity("w0", 2, curve=CURVE), 2, (Item(0, 7, samples=3, upper=20),))
    assert predicted_s(Plan((uneven,))) == worker_finish_s([20, 7, 7], 2, CURVE)
    assert predicted_s(Plan((share, WorkerShare(WorkerCapacity("w1", 2), 2)))) == finish
    assert predicted_s(Plan(())) == 0.0


def test_a_large_plan_is_judged_in_a_few_milliseconds() -> None:
    items = tuple(Item(number, 100 + 37 * number % 9000) for number in range(256))
    plan = Plan(tuple(WorkerShare(WorkerCapacity(f"w{n}", 64), 64, items) for n in range(8)))
    began = time.process_time()
    for _ in range(10):
        predicted_s(plan)
    assert (time.process_time() - began) / 10 < 0.02


def test_a_group_ends_with_its_last_sample_and_gives_all_its_tokens_to_train() -> None:
    worker = WorkerCapacity("w0", 3, running=(2,), curve=CURVE, contexts=(10,))
    items = (Item(0, 4, samples=2, prompt=5), Item(1, 6, prompt=1))
    ends, tokens = planned_ends(Plan((WorkerShare(worker, 3, items),)), lambda item: item.lengths)
    # Three run until step 2, and again until 4; the last one goes on alone with the third item, until 8.
    assert ends.tolist() == [2 * 4, 4 * 4, 4 * 4 + 4 * 2]
    assert tokens.tolist() == [12, 18, 7]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 2000))
def test_a_cache_that_holds_everything_changes_nothing_and_a_small_one_makes_nothing_sooner(
    lengths: list[int], concurrency: int, kv: int
) -> None:
    unbounded = worker_finish_s(lengths, concurrency, CURVE)
    assert worker_finish_s(lengths, concurrency, CURVE, kv=10**6) == pytest.approx(unbounded)
    bounded = completion_ends(lengths, concurrency, CURVE, kv_tokens=kv)
    assert bounded.max(initial=0.0) <= sum(lengths) * CURVE.batch_s(1) + 1e-6


def test_a_completion_waits_until_the_cache_has_room_for_its_end() -> None:
    # 10 + 10 tokens never fit into 19, 10 and 4 do: the second has ended when the first becomes long.
    assert completion_ends([10, 10], 2, CURVE, kv_tokens=19).tolist() == [20, 40]
    assert completion_ends([10, 4], 2, CURVE, kv_tokens=13).tolist() == [4 * 3 + 6 * 2, 4 * 3]
    assert completion_ends([10, 4], 2, CURVE, contexts=(3, 3), kv_tokens=13).tolist() == [20, 28]
    assert fits_cache([(10, 0), (4, 0)], 10)
    assert not fits_cache([(10, 0), (4, 0)], 7)


def test_a_trainer_that_takes_groups_as_they_end_is_through_later_the_more_comes_last() -> None:
    ends, tokens = np.array([1.0, 2.0, 9.0]), np.array([1.0, 1.0, 4.0])
    assert Objective().seconds(ends, tokens) == 9.0
    assert Objective(1.0).seconds(ends, tokens) == pytest.approx(13.0, rel=2e-3)
    assert Objective(1.0).seconds(ends, tokens[::-1]) == pytest.approx(10.0, rel=2e-3)
    assert Objective(1.0, trainer_free_s=30.0).seconds(ends, tokens) == pytest.approx(36.0, rel=2e-3)
