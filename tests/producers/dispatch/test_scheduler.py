"""What plans and corrections come to with simulated workers, and when windows are drawn."""

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from streamrl.producers.dispatch.dispatcher import build_order
from streamrl.producers.dispatch.scheduler import PendingPrompt, Scheduler
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.reports import WorkerState
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from tests.producers.dispatch.benchmark_lengths import benchmark_lengths, ideal_s
from tests.producers.dispatch.dispatcher_harness import heartbeat, step_report, version
from tests.producers.dispatch.simulated_workers import CURVE, SimulatedWorkers

COUNT, WORKERS, SLOTS = 256, 4, 16
STRATEGIES = ["round_robin", "least_loaded", "lpt", "skewness_aware"]
LOOP = LoopSettings(
    groups_per_step=4, num_generations=1, mode="stream", max_completion_length=100, heartbeat_timeout_s=1e9
)


def _finish(lengths: list[int], predicted: list[int], strategy: str, delay_s: float = 0.5) -> float:
    return SimulatedWorkers(lengths, predicted, strategy, workers=WORKERS, slots=SLOTS, delay_s=delay_s).run()


def _shuffled(lengths: list[int], seed: int) -> list[int]:
    return random.Random(seed).sample(lengths, len(lengths))


@pytest.mark.parametrize("seed", [0, 1])
def test_with_perfect_knowledge_the_finish_is_as_predicted_and_near_the_ideal(seed: int) -> None:
    lengths = benchmark_lengths(COUNT, seed, cap=4000)
    workers = SimulatedWorkers(lengths, lengths, "skewness_aware", workers=WORKERS, slots=SLOTS, delay_s=0.2)
    finish = workers.run()
    assert finish < 1.35 * ideal_s(lengths, WORKERS, SLOTS, CURVE)
    assert finish < 0.85 * _finish(lengths, lengths, "round_robin")
    assert workers.state.plan_accuracy.predicted_s == pytest.approx(finish, rel=0.06)


def test_a_random_ranker_costs_nothing_on_average() -> None:
    """Corrections make up for shares that hold the wrong prompts."""
    ratios = []
    for seed in range(6):
        lengths = benchmark_lengths(COUNT, seed, cap=4000)
        predicted = _shuffled(lengths, seed)
        ratios.append(_finish(lengths, predicted, "skewness_aware") / _finish(lengths, predicted, "round_robin"))
    assert fmean(ratios) <= 1.05


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_prompt_leaves_once_whatever_the_strategy(strategy: str) -> None:
    lengths = benchmark_lengths(120, 3)
    workers = SimulatedWorkers(lengths, _shuffled(lengths, 3), strategy, workers=3, slots=8)
    workers.run()
    assert sorted(order.position for order in workers.sent) == list(range(120))
    assert {order.attempt for order in workers.sent} == {0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_queue_of_a_worker_that_dies_is_for_the_others(strategy: str) -> None:
    lengths = benchmark_lengths(120, 4, cap=4000)
    workers = SimulatedWorkers(lengths, lengths, strategy, workers=3, slots=8, delay_s=0.1)
    workers.run(dies_at=5.0)
    assert len(workers.finished_at) == 120
    again = [order for order in workers.sent if order.attempt]
    assert 0 < len(again) <= 10
    assert {order.worker_id for order in again} <= {"w1", "w2"}
    assert sorted({order.position for order in workers.sent}) == list(range(120))


def _scheduler(**settings: object) -> tuple[DispatchState, Scheduler]:
    chosen = DispatchSettings.model_validate(settings)
    state = DispatchState(LOOP, chosen, ConstantLength(LOOP))
    state.observe(step_report(0), 0.0)
    return state, Scheduler(state, chosen)


def test_workers_that_are_to_run_nothing_get_nothing_new() -> None:
    state, scheduler = _scheduler()
    state.observe(heartbeat("w0", awaits=version(1)), 0.0)
    state.observe(heartbeat("w1"), 0.0)
    scheduler.begin_turn(0.0)
    scheduler.add(_pending(*range(4)))
    scheduler.adopt(scheduler.planner()())
    assert {queue.worker_id for queue in scheduler.queues} == {"w1"}
    assert state.choose(1, lambda held: True, 0.0, other_than="w1") == state.candidate(heartbeat("w1"))


def _pending(*positions: int) -> list[PendingPrompt]:
    estimate = LengthEstimate(median=10, upper=10, bucket=0, predictor="test")
    return [
        PendingPrompt(n, Prompt(prompt_id=f"toy/{n}", dataset="toy", content="question"), f"toy/{n}/0", estimate)
        for n in positions
    ]


def _send_all(state: DispatchState, scheduler: Scheduler, now: float = 0.0) -> list[tuple[int, str]]:
    sent = []
    while (found := scheduler.next()) is not None:
        pending, worker = found
        due_step = state.ledger.next_due
        state.admit(
            build_order(LOOP, pending, worker, created_at=state.created_at(now), due_step=due_step, seed=None),
            worker,
            now,
        )
        scheduler.sent(worker)
        sent.append((pending.position, worker.worker_id))
    return sent


def _wanted(scheduler: Scheduler, now: float) -> int:
    scheduler.begin_turn(now)
    return scheduler.wanted()


def test_a_batch_waits_until_all_workers_hold_its_weights_but_not_for_ever() -> None:
    state, scheduler = _scheduler()
    state.observe(step_report(1), 0.0)
    state.observe(heartbeat("w0", number=1), 0.0)
    state.observe(heartbeat("w1", number=0), 0.0)
    assert _wanted(scheduler, 1.0) == 0
    assert _wanted(scheduler, 5.9) == 0
    assert _wanted(scheduler, 6.0) == 4
    state.observe(heartbeat("w1", number=1), 6.1)
    assert _wanted(scheduler, 6.1) == 4


def test_a_window_is_sent_before_the_next_is_drawn() -> None:
    state, scheduler = _scheduler()
    state.observe(heartbeat("w0", capacity=2), 0.0)
    assert _wanted(scheduler, 0.0) == 4
    scheduler.add(_pending(0, 1, 2))
    assert scheduler.wants_plan()
    scheduler.adopt(scheduler.planner()())
    assert _send_all(state, scheduler) == [(0, "w0"), (1, "w0")]
    assert _wanted(scheduler, 1.0) == 0


@pytest.mark.parametrize(("mode", "gives_up_slots"), [("synchronous", True), ("one_step_async", False)])
def test_no_slot_is_freed_for_a_finish_that_has_no_waiter(mode: str, gives_up_slots: bool) -> None:
    """The next batch is sampled behind this one, and is not due before the step in between."""
    loop = LOOP.model_copy(update={"mode": mode, "groups_per_step": 128, "max_completion_length": 1000})
    state = DispatchState(loop, DispatchSettings(), ConstantLength(loop))
    state.observe(step_report(0), 0.0)
    for worker in ("w0", "w1"):
        state.observe(heartbeat(worker, capacity=32), 0.0)
    scheduler = Scheduler(state, DispatchSettings())
    scheduler.begin_turn(0.0)
    lengths = [1000] * 4 + [300] * 124
    scheduler.add(
        [
            replace(pending, estimate=pending.estimate.model_copy(update={"median": length, "upper": length}))
            for pending, length in zip(_pending(*range(128)), lengths, strict=True)
        ]
    )
    shares = scheduler.planner()().plan.shares
    assert any(share.is_reduced for share in shares) is gives_up_slots


def test_a_worker_that_comes_later_gets_its_share() -> None:
    state, scheduler = _scheduler(strategy="round_robin")
    state.observe(heartbeat("w0", capacity=1), 0.0)
    scheduler.begin_turn(0.0)
    scheduler.add(_pending(0, 1, 2))
    scheduler.adopt(scheduler.planner()())
    assert _send_all(state, scheduler) == [(0, "w0")]
    state.observe(heartbeat("w1", capacity=1), 1.0)
    scheduler.begin_turn(1.0)
    assert scheduler.wants_plan()
    scheduler.adopt(scheduler.planner()())
    assert _send_all(state, scheduler) == [(2, "w1")]


@pytest.mark.parametrize(
    "leave",
    [
        lambda state: state.observe(heartbeat("w0", state=WorkerState.DRAINING, capacity=1), 1.0),
        lambda state: state.observe(heartbeat("w0", incarnation="b", state=WorkerState.STARTING, capacity=1), 1.0),
    ],
)
def test_unsent_orders_of_a_leaving_worker_are_planned_again(leave: Callable[[DispatchState], None]) -> None:
    state, scheduler = _scheduler()
    for name in ("w0", "w1"):
        state.observe(heartbeat(name, capacity=1), 0.0)
    scheduler.begin_turn(0.0)
    scheduler.add(_pending(0, 1, 2, 3))
    scheduler.adopt(scheduler.planner()())
    assert len(_send_all(state, scheduler)) == 2
    leave(state)
    scheduler.begin_turn(1.0)
    assert scheduler.wants_plan()
    scheduler.adopt(scheduler.planner()())
    assert [(share.worker_id, len(share.items)) for share in scheduler.queues] == [("w1", 2)]


def test_a_worker_that_never_adopts_keeps_its_queue_only_for_so_long() -> None:
    state, scheduler = _scheduler(strategy="round_robin")
    for name in ("w0", "w1"):
        state.observe(heartbeat(name, capacity=1), 0.0)
    scheduler.begin_turn(0.0)
    scheduler.add(_pending(0, 1, 2, 3))
    scheduler.adopt(scheduler.planner()())
    _send_all(state, scheduler)
    state.observe(step_report(1, [f"toy/{n}/0" for n in range(4)]), 1.0)
    state.observe(heartbeat("w1", capacity=1, number=1), 1.0)
    scheduler.begin_turn(2.0)
    assert not scheduler.queues.pool
    scheduler.begin_turn(7.1)
    assert [item.key for item in scheduler.queues.pool] == [2]
