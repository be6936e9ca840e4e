from itertools import pairwise

import pytest

from streamrl.coordinator.scaling import IDLE_STEPS, SPARE_MARGIN, FleetBounds, FleetWatch, ScalingRule, StageTimes
from streamrl.schemas.reports import Heartbeat, StepReport, WorkerState
from tests.coordinator.factories import heartbeat, step_report

PAPER: tuple[float, ...] = (-0.7, 1.8, -4.3, 4.5, 3.2, 10.1, 9.4, 18.1, 21.9, 29.7, -8.2, 1.6)
PAPER += (9.2, 12.1, 17.0, 21.6, -7.7, -2.1, 7.7, 5.9, 10.1, 15.7, -4.1)
"""StreamRL, figure 11: delta by iteration in seconds, read off the picture; a node was added after 10, 16 and 22."""
PREDICTED = {4: 25.8, 5: 19.3, 6: 12.9, 7: 10.0}
"""What one more node saves, by nodes: the paper gives no figures; each lies between the deltas around its addition."""


def rule(fewest: int = 1, most: int = 8, *, margin: float = SPARE_MARGIN, idle_steps: int = IDLE_STEPS) -> ScalingRule:
    return ScalingRule(FleetBounds(fewest, most), margin, idle_steps)


def test_nodes_are_added_after_the_same_iterations_as_in_the_paper() -> None:
    scaling, nodes, added = rule(4, 16), 4, list[int]()
    for iteration, delta in enumerate(PAPER, start=1):
        decision = scaling.decide(StageTimes(100.0 + delta, 100.0, nodes, PREDICTED[nodes]))
        if decision is not None:
            assert decision.workers == nodes + 1
            nodes, added = decision.workers, [*added, iteration]
    assert added == [10, 16, 22]


def test_a_worker_is_added_only_if_it_saves_no_more_than_is_missing() -> None:
    assert rule().decide(StageTimes(119.0, 100.0, 4, 20.0)) is None
    decision = rule().decide(StageTimes(120.0, 100.0, 4, 20.0))
    assert decision is not None
    assert decision.workers == 5


def test_the_most_workers_are_never_exceeded_and_the_fewest_stay() -> None:
    assert rule(most=4).decide(StageTimes(300.0, 100.0, 4, 20.0)) is None
    idle = rule(fewest=4, idle_steps=1)
    assert [idle.decide(StageTimes(1.0, 100.0, 4, 0.2)) for _ in range(5)] == [None] * 5


def test_a_worker_leaves_after_several_steps_in_which_it_was_not_needed() -> None:
    scaling = rule(idle_steps=3, margin=0.2)
    spare = StageTimes(50.0, 100.0, 3, 12.5)  # 75 s with two workers
    assert scaling.decide(spare) is None
    assert scaling.decide(spare) is None
    decision = scaling.decide(spare)
    assert decision is not None
    assert decision.workers == 2


def test_one_busy_step_resets_the_count_of_idle_ones() -> None:
    scaling = rule(idle_steps=2)
    spare, busy = StageTimes(50.0, 100.0, 3, 12.5), StageTimes(99.0, 100.0, 3, 24.7)
    assert [scaling.decide(times) for times in (spare, busy, spare)] == [None] * 3
    assert scaling.decide(spare) is not None


@pytest.mark.parametrize("workers", range(1, 9))
def test_an_added_worker_does_not_leave_at_once(workers: int) -> None:
    """Whatever the times were that added a worker: with perfectly shared work it does not remove it again."""
    for longer in (1.0, 1.2, 1.5, 2.0, 4.0):
        before = StageTimes(100.0 * longer, 100.0, workers, 100.0 * longer / (workers + 1))
        if rule(most=99).decide(before) is None:
            continue
        after_s = before.generate_s * workers / (workers + 1)
        after = StageTimes(after_s, 100.0, workers + 1, after_s / (workers + 2))
        down = rule(most=workers + 1, idle_steps=1).decide(after)
        assert down is None


def test_growing_lengths_add_workers_one_by_one_and_never_remove_one() -> None:
    scaling, workers, seen = rule(2, 8), 2, [2]
    for step in range(60):
        generate_s = (1 + step / 12) * 100.0 * 2 / workers
        decision = scaling.decide(StageTimes(generate_s, 120.0, workers, generate_s / (workers + 1)))
        workers = decision.workers if decision else workers
        seen.append(workers)
    assert all(0 <= after - before <= 1 for before, after in pairwise(seen))
    assert seen[-1] == 8


def watch(*, overlaps: bool = True, wanted: int = 2, idle_steps: int = IDLE_STEPS) -> FleetWatch:
    made = FleetWatch(FleetBounds(1, 3), overlaps, wanted, settle_steps=0, idle_steps=idle_steps)
    for worker in ("w0", "w1"):
        made.heard(beat(worker))
    made.stepped(report(1, step_s=10.0, waited_s=0.0))
    return made


def beat(worker: str, *, running: int = 8, state: WorkerState = WorkerState.READY) -> Heartbeat:
    return heartbeat(worker).replace(running=running, state=state)


def report(number: int, *, step_s: float, waited_s: float, lineage: int = 1) -> StepReport:
    metrics = {"time/step": step_s, "time/wait_for_batch": waited_s}
    return step_report(lineage, number).replace(metrics=metrics, group_ids=(f"g{number}",))


def test_a_trainer_that_waits_long_enough_brings_one_more_worker() -> None:
    one = watch()
    assert one.stepped(report(2, step_s=10.0, waited_s=3.0)) is None  # one more of two saves a third of 10 s
    decision = one.stepped(report(3, step_s=10.0, waited_s=4.0))
    assert decision is not None
    assert (decision.workers, one.wanted) == (3, 3)


def test_nothing_is_decided_until_the_wanted_worker_is_there() -> None:
    one = watch()
    assert one.stepped(report(2, step_s=10.0, waited_s=9.0)) is not None
    assert one.stepped(report(3, step_s=10.0, waited_s=9.0)) is None
    one.heard(beat("w2"))
    assert one.stepped(report(4, step_s=10.0, waited_s=9.0)) is None  # there are as many as there may be


def test_empty_slots_while_the_trainer_never_waits_let_a_worker_leave() -> None:
    one = watch(idle_steps=2)
    for number in (2, 3):
        for worker in ("w0", "w1"):
            one.heard(beat(worker, running=2))
        decision = one.stepped(report(number, step_s=10.0, waited_s=0.1))
    assert decision is not None
    assert decision.workers == 1


def test_empty_slots_while_the_trainer_waits_are_the_tail_of_a_batch_and_no_spare_capacity() -> None:
    one = watch(idle_steps=1)
    for worker in ("w0", "w1"):
        one.heard(beat(worker, running=1))
    assert one.stepped(report(2, step_s=10.0, waited_s=3.0)) is None


def test_without_overlap_the_whole_generation_counts_as_the_trainers_wait() -> None:
    one = watch(overlaps=False)
    assert one.stepped(report(2, step_s=10.0, waited_s=5.9)) is None  # 1.8 s are missing, one more saves 1.97 s
    assert watch(overlaps=False).stepped(report(2, step_s=10.0, waited_s=7.0)) is not None


def test_reports_without_groups_old_ones_and_the_first_of_a_lineage_are_not_judged() -> None:
    one = watch()
    assert one.stepped(step_report(1, 2)) is None
    assert one.stepped(report(1, step_s=10.0, waited_s=9.0)) is None
    assert one.stepped(report(2, step_s=10.0, waited_s=9.0, lineage=2)) is None
    assert one.stepped(report(3, step_s=10.0, waited_s=9.0, lineage=2)) is not None


def test_a_worker_that_left_or_was_lost_is_not_counted() -> None:
    one = watch()
    one.lost("w1")
    assert one.workers == 1
    one.heard(beat("w1", state=WorkerState.DRAINING))
    assert one.workers == 1
