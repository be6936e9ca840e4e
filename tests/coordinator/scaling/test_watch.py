from coordinator.scaling import FleetBounds, FleetWatch
from coordinator.settings import ScalingSettings
from schemas.reports import Heartbeat, StepReport, WorkerState
from tests.coordinator.factories import heartbeat, step_report


def watch(*, overlaps: bool = True, wanted: int = 2, **settings: float) -> FleetWatch:
    made = FleetWatch(FleetBounds(1, 3), ScalingSettings(settle_steps=0, **settings), overlaps, wanted)
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


def test_where_stages_do_not_overlap_generation_is_what_the_trainer_waits_for() -> None:
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
