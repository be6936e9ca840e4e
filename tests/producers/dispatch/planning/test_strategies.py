"""Properties of every strategy."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from producers.dispatch.plans import Item, Lane, Plan, Worker, predicted_finish
from producers.dispatch.strategies import STRATEGIES, skewness_aware
from producers.dispatch.uncertainty import Doubt
from schemas.errors import LifecycleError
from schemas.profiles import DecodeCurve, DecodeSettings
from tests.producers.dispatch.planning.lengths import benchmark_lengths, ideal_s

CURVE = DecodeCurve(DecodeSettings())
TABLE = DecodeCurve(DecodeSettings(table=((1, 0.0084), (32, 0.0103), (64, 0.0117), (512, 0.037))))
ITEMS = st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 8), st.integers(0, 12_000)), max_size=60).map(
    lambda rows: [Item(key, tokens, samples, upper) for key, (tokens, samples, upper) in enumerate(rows)]
)
WORKERS = st.lists(
    st.tuples(st.integers(1, 64), st.lists(st.integers(1, 10_000), max_size=20)), min_size=1, max_size=6
).map(lambda rows: [Worker(f"w{number}", slots, tuple(running)) for number, (slots, running) in enumerate(rows)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ITEMS, WORKERS, st.sampled_from(sorted(STRATEGIES)))
def test_every_prompt_is_dispatched_once(items: list[Item], workers: list[Worker], name: str) -> None:
    STRATEGIES[name](items, workers, CURVE).checked(items, workers)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ITEMS, WORKERS, st.sampled_from([CURVE, TABLE]))
def test_lanes_are_never_predicted_worse_than_round_robin_or_lpt(
    items: list[Item], workers: list[Worker], curve: DecodeCurve
) -> None:
    doubt = Doubt(items)
    finish = doubt.finish_s(skewness_aware(items, workers, curve), curve)
    for name in ("round_robin", "lpt"):
        assert finish <= doubt.finish_s(STRATEGIES[name](items, workers, curve), curve)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ITEMS, WORKERS)
def test_longest_first_stays_within_a_longest_completion_of_what_the_others_reach(
    items: list[Item], workers: list[Worker]
) -> None:
    """Graham's bound for list scheduling, as loads go: an item goes where least is to be done."""
    lanes = STRATEGIES["lpt"](items, workers, CURVE).lanes
    loads = [
        (sum(item.load for item in lane.items) + lane.worker.load) * CURVE.batch_s(lane.concurrency) / lane.concurrency
        for lane in lanes
    ]
    largest = max((item.load for item in items), default=0) * max(
        CURVE.batch_s(lane.concurrency) / lane.concurrency for lane in lanes
    )
    for lane, load in zip(lanes, loads, strict=True):
        assert not lane.items or load <= min(loads) + largest + 1e-6


@settings(max_examples=60, deadline=None, derandomize=True)
@given(ITEMS, WORKERS)
def test_no_capacity_is_given_up_for_a_finish_that_is_early_enough(items: list[Item], workers: list[Worker]) -> None:
    plan = skewness_aware(items, workers, CURVE, patience_s=1e9)
    assert not any(lane.is_reduced for lane in plan.lanes)


def test_round_robin_deals_in_order_of_position() -> None:
    plan = STRATEGIES["round_robin"]([Item(n, 9 - n) for n in range(5)], [Worker("a", 4), Worker("b", 4)], CURVE)
    assert [[item.key for item in lane.items] for lane in plan.lanes] == [[0, 2, 4], [1, 3]]


def test_a_worker_that_has_much_to_do_gets_less() -> None:
    workers = [Worker("a", 4, running=(900, 900)), Worker("b", 4)]
    plan = STRATEGIES["least_loaded"]([Item(n, 100) for n in range(10)], workers, CURVE)
    assert [len(lane.items) for lane in plan.lanes] == [0, 10]


@pytest.mark.parametrize("seed", [0, 1])
def test_with_perfect_knowledge_lanes_come_near_the_ideal(seed: int) -> None:
    """Benchmark (a): 2,048 of them over 8 × 64 slots, in a tenth of a second."""
    lengths = benchmark_lengths(2048, seed)
    items, workers = [Item(n, length) for n, length in enumerate(lengths)], [Worker(f"w{n}", 64) for n in range(8)]
    began = time.process_time()
    plan = skewness_aware(items, workers, CURVE)
    assert time.process_time() - began < 0.15
    finish, ideal = predicted_finish(plan, CURVE), ideal_s(lengths, 8, 64, CURVE)
    assert finish < 1.14 * ideal
    assert predicted_finish(STRATEGIES["round_robin"](items, workers, CURVE), CURVE) > 1.37 * finish


def test_the_longest_run_in_small_batches() -> None:
    lengths = benchmark_lengths(2048, 0)
    items, workers = [Item(n, length) for n, length in enumerate(lengths)], [Worker(f"w{n}", 64) for n in range(8)]
    lanes = skewness_aware(items, workers, CURVE).lanes
    first = next(lane for lane in lanes if any(item.tokens == max(lengths) for item in lane.items))
    assert first.is_reduced
    assert sum(lane.is_reduced for lane in lanes) <= 3


def test_a_worker_whose_completion_outgrew_everything_gets_fewer_others() -> None:
    workers = [Worker("a", 64, running=(9000, *[50] * 30)), Worker("b", 64), Worker("c", 64)]
    lanes = skewness_aware([Item(n, 900) for n in range(200)], workers, CURVE).lanes
    assert lanes[0].is_reduced
    assert len(lanes[0].items) < len(lanes[1].items)


@pytest.mark.parametrize("name", ["paper_sum", "paper_max"])
def test_the_papers_algorithm_keeps_its_long_tail_apart(name: str) -> None:
    lengths = benchmark_lengths(1000, 0)
    items, workers = [Item(n, length) for n, length in enumerate(lengths)], [Worker(f"w{n}", 64) for n in range(8)]
    lanes = STRATEGIES[name](items, workers, CURVE).lanes
    bound = sorted(lengths)[800]
    tail = [all(item.tokens >= bound for item in lane.items) for lane in lanes]
    assert tail == sorted(tail, reverse=True)
    assert 0 < sum(tail) < 8
    assert sum(len(lane.items) for lane, is_tail in zip(lanes, tail, strict=True) if is_tail) == 200


@pytest.mark.parametrize(
    "lanes",
    [
        (Lane(Worker("a", 2), 2), Lane(Worker("b", 2), 2)),
        (Lane(Worker("a", 2), 2, (Item(0, 1),)), Lane(Worker("b", 2), 2, (Item(0, 1),))),
        (Lane(Worker("a", 2), 2, (Item(0, 1),)),),
        (Lane(Worker("a", 2), 3, (Item(0, 1),)), Lane(Worker("b", 2), 2)),
    ],
)
def test_a_plan_that_loses_or_repeats_an_item_is_refused(lanes: tuple[Lane, ...]) -> None:
    with pytest.raises(LifecycleError):
        Plan(lanes).checked([Item(0, 1)], [Worker("a", 2), Worker("b", 2)])
