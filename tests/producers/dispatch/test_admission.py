import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.producers.dispatch.admission import AdmissionLedger
from streamrl.schemas.errors import LifecycleError
from tests.producers.dispatch.simulated_admission import MOVES, SimulatedAdmission, v


def _ledger(groups_per_step: int = 2, max_staleness: int = 1, number: int = 0) -> AdmissionLedger:
    ledger = AdmissionLedger(groups_per_step, max_staleness)
    ledger.advance(v(number), [])
    return ledger


def _moves(names: tuple[str, ...], seed: int) -> list[tuple[str, int]]:
    rng = random.Random(seed)
    return [(rng.choice(names), rng.randint(0, 30)) for _ in range(400)]


SHAPES = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 3))
FIXED = st.booleans()
SEEDS = st.integers(0, 1 << 32)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, SEEDS, FIXED)
def test_no_consumed_token_is_older_than_max_staleness(shape: tuple[int, int, int], seed: int, fixed: bool) -> None:
    """It holds by admission alone: the trainer's own check never finds anything."""
    world = SimulatedAdmission(*shape, fixed=fixed)
    world.play(_moves(MOVES, seed))
    for _ in range(6):
        world.settle()
    assert world.oldest_trained <= world.bound
    assert world.stale == 0


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, SEEDS, st.sampled_from(["freshest", "any"]))
def test_nor_is_one_where_places_are_kept_in_whatever_order_groups_are_taken(
    shape: tuple[int, int, int], seed: int, takes: str
) -> None:
    """By the same admission: it sees to places for all, and the window to their being kept."""
    world = SimulatedAdmission(*shape, takes=takes)
    world.play(_moves(MOVES, seed))
    for _ in range(6):
        world.settle()
    assert world.oldest_trained <= world.bound
    assert world.stale == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(SHAPES, SEEDS, FIXED)
def test_after_a_resume_the_trainers_own_check_keeps_the_bound(
    shape: tuple[int, int, int], seed: int, fixed: bool
) -> None:
    world = SimulatedAdmission(*shape, fixed=fixed)
    world.play(_moves((*MOVES, "resume"), seed))
    for _ in range(6):
        world.settle()
    assert world.oldest_trained <= world.bound


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SHAPES, SEEDS, FIXED)
def test_admission_never_deadlocks(shape: tuple[int, int, int], seed: int, fixed: bool) -> None:
    world = SimulatedAdmission(*shape, fixed=fixed)
    world.play(_moves((*MOVES, "resume"), seed))
    before = world.version.number
    for _ in range(20):
        world.settle()
    assert world.version.number >= before + 5


@pytest.mark.parametrize("groups_per_step", [1, 3])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("fixed", [False, True])
def test_every_step_makes_room_for_as_many_new_groups_at_once(
    groups_per_step: int, max_staleness: int, fixed: bool
) -> None:
    """No sawtooth: with a trainer that is always busy, what is in flight never stays below its full bound."""
    world = SimulatedAdmission(groups_per_step, max_staleness, workers=2, fixed=fixed)
    for number in range(12):
        world.supply()
        assert world.ledger.in_flight == (max_staleness + 1) * groups_per_step
        assert world.admitted == (number + max_staleness + 1) * groups_per_step
        assert world.train()
        world.hear_all()
        assert world.ledger.in_flight == max_staleness * groups_per_step
    assert world.oldest_trained == max_staleness


def test_the_bound_is_used_in_full() -> None:
    """A slow worker holds version 0 while the others train on: its group ends exactly at the bound."""
    world = SimulatedAdmission(groups_per_step=1, max_staleness=2, workers=2)
    world.hear()
    assert world.admit(0)
    world.sample(0, finish=False)
    for _ in range(5):
        world.adopt(1)
        world.heartbeat(1)
        if world.admit(1):
            world.sample(1, finish=True)
            world.train()
        world.hear_all()
    assert world.version.number == 2
    world.sample(0, finish=True)
    world.train()
    assert world.oldest_trained == 2


def test_only_groups_with_samples_missing_hold_others_back() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=2)
    for name in ("a", "b", "c"):
        ledger.admit(name, v(0))
    ledger.advance(v(1), ["a"])
    assert (ledger.oldest_missing, ledger.room(v(1))) == (0, 0)
    ledger.produced("b")
    assert ledger.room(v(1)) == 0
    ledger.produced("c")
    assert (ledger.oldest, ledger.oldest_missing, ledger.room(v(1)), ledger.room(v(0))) == (0, None, 1, 0)
    ledger.produced("never admitted")
    assert ledger.in_flight == 2


def _moved(ledger: AdmissionLedger) -> None:
    ledger.admit("a", v(1))
    ledger.produced("b")
    ledger.move("a", v(1))


@pytest.mark.parametrize("arrive", [_moved, lambda ledger: ledger.restore("a", v(1))])
def test_moved_and_restored_groups_hold_others_back_until_they_are_produced(
    arrive: Callable[[AdmissionLedger], None],
) -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=1, number=1)
    arrive(ledger)
    assert ledger.oldest_missing == 1
    ledger.produced("a")
    assert ledger.oldest_missing is None


def test_ended_groups_do_not_hold_admission_back() -> None:
    ledger = _ledger()
    ledger.admit("a", v(0))
    ledger.end("a", 0)
    assert ledger.oldest_missing is None


def test_nothing_is_admitted_before_the_trainer_is_known() -> None:
    assert not AdmissionLedger(1, 1).may_admit(v(0))


def test_the_room_is_the_bound_less_what_is_under_way() -> None:
    ledger = _ledger(groups_per_step=2, max_staleness=1)
    assert ledger.room(v(0)) == 4
    ledger.admit("a", v(0))
    assert (ledger.room(v(0)), ledger.in_flight, ledger.oldest) == (3, 1, 0)
    ledger.advance(v(1), ["a", "b"])
    assert (ledger.room(v(0)), ledger.room(v(1))) == (2, 4)


def test_without_staleness_a_worker_must_hold_the_newest_weights() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.advance(v(1), [])
    assert not ledger.may_admit(v(0))
    assert ledger.may_admit(v(1))


def test_illegal_moves_are_refused() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.admit("a", v(0))
    with pytest.raises(LifecycleError, match="in flight"):
        ledger.admit("a", v(0))
    with pytest.raises(LifecycleError, match="expected room"):
        ledger.admit("b", v(0))
    with pytest.raises(LifecycleError, match="group in flight"):
        ledger.move("b", v(0))


def test_a_group_moves_only_to_weights_that_are_new_enough() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=1)
    ledger.advance(v(1), [])
    ledger.admit("a", v(1))
    ledger.admit("b", v(1))
    assert ledger.may_move("a", v(1))
    assert not ledger.may_move("a", v(0))
    ledger.end("b", 1)
    ledger.move("a", v(0))
    assert ledger.oldest == 0


def test_a_skipped_group_frees_its_place() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=0)
    ledger.admit("a", v(0))
    assert ledger.end("a", 0)
    assert not ledger.end("a", 0)
    assert ledger.may_admit(v(0))


def test_a_resumed_trainer_gets_back_the_groups_it_will_read_again() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=3)
    for name in ("a", "b", "c"):
        ledger.admit(name, v(0))
    for number, name in ((1, "a"), (2, "b"), (3, "c")):
        ledger.advance(v(number), [name])
    ledger.admit("d", v(3))
    assert ledger.advance(v(1, lineage=2), [])
    assert {name for name in "abcd" if ledger.is_in_flight(name)} == {"b", "c", "d"}
    assert (ledger.oldest, ledger.oldest_missing) == (0, 1)
    ledger.advance(v(2, lineage=2), ["b"])
    ledger.advance(v(3, lineage=2), ["c"])
    assert ledger.oldest == 1


@pytest.mark.parametrize("steps", [100, 600])
def test_a_trainer_that_falls_back_as_far_as_it_may_is_not_flooded(steps: int) -> None:
    """Every group that it will read again counts, however far apart checkpoints are: there is room for no other."""
    ledger = AdmissionLedger(groups_per_step=1, max_staleness=1, history_steps=steps)
    ledger.advance(v(0), [])
    for number in range(1, steps + 2):
        ledger.admit(f"g{number}", v(number - 1))
        ledger.advance(v(number), [f"g{number}"])
    ledger.advance(v(1, lineage=2), [])
    assert ledger.in_flight == steps
    assert ledger.room(v(1, lineage=2)) == 0
    for number in range(2, steps + 2):
        ledger.advance(v(number, lineage=2), [f"g{number}"])
    assert (ledger.in_flight, ledger.room(v(steps + 1, lineage=2))) == (0, 2)


def test_repeats_and_orphaned_lineages_change_nothing() -> None:
    ledger = _ledger(groups_per_step=1, max_staleness=3)
    ledger.admit("a", v(0))
    ledger.advance(v(1, lineage=2), [])
    assert not ledger.advance(v(1, lineage=2), ["a"])
    assert not ledger.advance(v(9, lineage=1), ["a"])
    assert ledger.is_in_flight("a")


def test_a_late_sample_holds_back_its_own_step_only() -> None:
    """With fixed batches the next batch begins on newer weights, whatever is missing of the one before."""
    for fixed, room in ((False, 0), (True, 2)):
        ledger = AdmissionLedger(2, 1, has_fixed_batches=fixed)
        ledger.advance(v(0), [])
        for name in ("a", "b", "c", "late"):
            ledger.admit(name, v(0))
        for name in ("a", "b", "c"):
            ledger.produced(name)
        ledger.advance(v(1), ["a", "b"])
        assert ledger.room(v(1)) == room


def test_batches_fill_in_order() -> None:
    """The place of a group that was skipped is taken by the next one, before the batch behind it grows."""
    ledger = AdmissionLedger(2, 1, has_fixed_batches=True)
    ledger.advance(v(0), [])
    for name, due_step in (("a", 1), ("b", 1), ("c", 2), ("d", 2)):
        assert ledger.next_due == due_step
        ledger.admit(name, v(0))
    assert not ledger.may_admit(v(0))
    ledger.end("a", 0)
    assert ledger.next_due == 1
    ledger.admit("e", v(0))
    ledger.advance(v(1), ["b", "e"])
    assert ledger.next_due == 3


def test_a_group_may_move_to_a_worker_whose_weights_will_do_for_its_step() -> None:
    ledger = AdmissionLedger(1, 1, has_fixed_batches=True)
    ledger.advance(v(0), [])
    ledger.admit("a", v(0))
    ledger.advance(v(1), ["a"])
    ledger.admit("b", v(1))
    ledger.admit("c", v(1))
    assert ledger.may_move("b", v(0))
    assert not ledger.may_move("c", v(0))


def test_groups_come_back_for_the_steps_that_they_were_for() -> None:
    ledger = AdmissionLedger(1, 1, has_fixed_batches=True)
    ledger.advance(v(0), [])
    for number, name in enumerate("abc"):
        ledger.admit(name, v(number))
        ledger.advance(v(number + 1), [name])
    ledger.advance(v(1, lineage=2), [])
    assert not ledger.may_admit(v(1, lineage=2))
    ledger.advance(v(2, lineage=2), ["b"])
    assert ledger.next_due == 4
