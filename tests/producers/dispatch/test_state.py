import pytest

from streamrl.producers.dispatch.fleet import Candidate
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ObservedQuantiles
from streamrl.schemas.control import RunFinished
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.trajectories import FinishReason, WorkOrder
from tests.producers.dispatch.dispatcher_harness import (
    LOOP,
    heartbeat,
    order,
    skip_record,
    step_report,
    trajectory,
    version,
)

WORKER = Candidate("w0", "a", version(0), 100, 0, 0)


@pytest.fixture
def state() -> DispatchState:
    state = DispatchState(LOOP, DispatchSettings(), ObservedQuantiles(LOOP, min_observations=1))
    state.observe(step_report(0), 0.0)
    state.observe(heartbeat(), 0.0)
    return state


def _missing(state: DispatchState) -> int:
    return sum(len(flight.missing) for flight in state.flights.unfinished())


def _admit(state: DispatchState, number: int = 0) -> WorkOrder:
    admitted = order(f"toy/{number}/0")
    state.admit(admitted, WORKER, 0.0)
    return admitted


def test_the_end_of_an_earlier_run_of_that_name_is_not_ours(state: DispatchState) -> None:
    state.observe(step_report(5, lineage=2), 1.0)
    state.observe(RunFinished(sequence=0, sent_at=0.0, step=4), 1.0)
    assert not state.finished
    state.observe(RunFinished(sequence=1, sent_at=0.0, step=5), 1.0)
    assert state.finished


def test_the_dispatcher_ignores_trajectories_of_requesters(state: DispatchState) -> None:
    made = trajectory(_admit(state), 0)
    before = (state.cursor, _missing(state), state.ledger.in_flight)
    state.observe(
        made.replace(group_id="gateway/c/0", trajectory_id="gateway/c/0/0", source="request", position=0), 1.0
    )
    assert (state.cursor, _missing(state), state.ledger.in_flight) == before
    state.positions.find_unsent([])
    assert state.positions.unsent == [0], "nobody has ordered the prompt at position 0"


def test_a_trained_group_ends(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(step_report(1, [admitted.group_id]), 1.0)
    assert (state.ledger.in_flight, len(state.flights), state.cursor) == (0, 0, 1)


def test_rows_of_a_resumed_trainer_count_also_if_they_are_read_before_its_first_report(state: DispatchState) -> None:
    groups = [_admit(state, number).group_id for number in range(2)]
    state.observe(step_report(1, [groups[0]]), 1.0)
    for group_id in groups:
        state.observe(skip_record(group_id, 0, SkipReason.ZERO_ADVANTAGE).replace(lineage=2), 1.0)
    assert state.ledger.in_flight == 1
    state.observe(step_report(0, lineage=2), 1.0)
    assert state.ledger.in_flight == 0


def test_rows_that_a_crash_undid_end_nothing(state: DispatchState) -> None:
    group_id = _admit(state).group_id
    state.observe(step_report(0, lineage=2), 1.0)
    state.observe(skip_record(group_id, 0, SkipReason.ZERO_ADVANTAGE).replace(lineage=1, step=1), 1.0)
    assert state.ledger.in_flight == 1


def test_a_group_without_signal_ends_at_once(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(skip_record(admitted.group_id, 0, SkipReason.ZERO_ADVANTAGE), 1.0)
    assert state.ledger.in_flight == 0


def test_an_incomplete_group_ends_although_a_sample_never_came(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(trajectory(admitted, 0), 1.0)
    state.observe(skip_record(admitted.group_id, 0, SkipReason.GROUP_INCOMPLETE), 1.0)
    assert (state.ledger.in_flight, _missing(state)) == (0, 0)


def test_records_that_do_not_decode_end_their_group_when_all_are_poison(state: DispatchState) -> None:
    admitted = _admit(state)
    for offset in range(2):
        assert state.ledger.in_flight == 1
        state.observe(skip_record(admitted.group_id, None, SkipReason.POISON, offset=offset), 1.0)
    assert state.ledger.in_flight == 0


@pytest.mark.parametrize("reason", [SkipReason.STALE, SkipReason.FILTERED, SkipReason.POISON])
def test_a_reason_that_concerns_a_sample_ends_the_group_with_its_last_sample(
    state: DispatchState, reason: SkipReason
) -> None:
    admitted = _admit(state)
    state.observe(skip_record(admitted.group_id, 0, reason), 1.0)
    assert state.ledger.in_flight == 1
    state.observe(skip_record(admitted.group_id, 1, reason), 1.0)
    assert state.ledger.in_flight == 0


def _holds_others_back(state: DispatchState) -> bool:
    return state.ledger.oldest_missing is not None


def test_a_group_is_produced_with_its_last_sample_whatever_that_is(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(trajectory(admitted, 1), 1.0)
    state.observe(trajectory(admitted, 1), 1.0)
    assert _holds_others_back(state)
    state.observe(trajectory(admitted, 0, reason=FinishReason.ABORT), 1.0)
    assert not _holds_others_back(state)
    assert state.ledger.in_flight == 1


def test_a_group_that_was_given_up_holds_others_back_until_the_trainer_ends_it(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(trajectory(admitted, 0), 1.0)
    for flight in list(state.flights.unfinished()):
        state.give_up(flight, 1.0, 1.0)
    assert _holds_others_back(state)
    state.observe(step_report(1, [admitted.group_id]), 2.0)
    assert not _holds_others_back(state)


def test_duplicates_and_nameless_skips_end_nothing(state: DispatchState) -> None:
    admitted = _admit(state)
    for sample in range(2):
        state.observe(skip_record(admitted.group_id, sample, SkipReason.DUPLICATE), 1.0)
        state.observe(skip_record(None, None, SkipReason.POISON, offset=sample), 1.0)
    assert state.ledger.in_flight == 1


def test_a_resumed_trainer_ends_its_groups_a_second_time(state: DispatchState) -> None:
    trained, skipped = _admit(state, 0), _admit(state, 1)
    state.observe(step_report(1, [trained.group_id]), 1.0)
    state.observe(skip_record(skipped.group_id, 0, SkipReason.ZERO_ADVANTAGE, step=1), 1.0)
    state.observe(step_report(0, lineage=2), 2.0)
    assert state.ledger.in_flight == 2
    state.observe(step_report(1, [trained.group_id], lineage=2), 3.0)
    state.observe(skip_record(skipped.group_id, 0, SkipReason.STALE, step=1), 3.0)
    assert state.ledger.in_flight == 0


def test_lengths_are_learnt_from_whole_completions_only(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(trajectory(admitted, 0, length=7), 1.0)
    state.observe(trajectory(admitted, 0, length=90), 1.0)
    state.observe(trajectory(admitted, 1, length=1, reason=FinishReason.ABORT), 1.0)
    assert state.predictor.predict(admitted.prompt).median == 7
    assert state.calibration.report().observations == 1
    assert _missing(state) == 0


def test_a_trajectory_of_an_unknown_group_is_harmless(state: DispatchState) -> None:
    state.observe(trajectory(order("toy/9/0"), 0), 1.0)
    assert state.calibration.report().observations == 0


def test_every_group_is_completed_with_aborted_samples_if_it_is_given_up(state: DispatchState) -> None:
    _admit(state, 0)
    kept = _admit(state, 1)
    state.observe(trajectory(kept, 0), 1.0)
    made = [record for flight in list(state.flights.unfinished()) for record in state.give_up(flight, 1.0, 1.0)]
    assert [record.trajectory_id for record in made] == ["toy/0/0/0", "toy/0/0/1", "toy/1/0/1"]
    assert {record.finish_reason for record in made} == {FinishReason.ABORT}
    assert made[-1].reward_errors == {
        "generation": "given up after 1 orders: each worker was lost, or did not deliver it"
    }
    assert (state.given_up, _missing(state), state.lost(1e9)) == (2, 0, [])
    # Only the trainer ends them: until then they hold others back.
    assert state.ledger.in_flight == 2
    for record in made[:2]:
        state.observe(skip_record(record.group_id, record.sample_index, SkipReason.POISON), 2.0)
    assert state.ledger.in_flight == 1


def test_a_sample_that_the_trainer_rejects_stays_missing(state: DispatchState) -> None:
    admitted = _admit(state)
    state.observe(trajectory(admitted, 1).replace(trajectory_id="elsewhere/7"), 1.0)
    assert _missing(state) == 2


def test_an_order_is_not_late_as_long_as_its_worker_gets_on_with_it(state: DispatchState) -> None:
    """Siblings that end 800 s apart, with a lease of seconds and an order time-out of 300 s."""
    admitted = _admit(state)
    for at in range(1, 801):
        state.observe(heartbeat(orders={admitted.group_id: 0.5}), float(at))
        if at == 3:
            state.observe(trajectory(admitted, 0), 3.0)
        assert state.lost(float(at)) == []
    for at in range(801, 1200):
        state.observe(heartbeat(orders={admitted.group_id: at - 800.0}), float(at))
    # Now it holds the order, and stands still.
    assert state.lost(1099.0) == []
    assert [flight.order.group_id for flight in state.lost(1101.0)] == [admitted.group_id]


def test_an_order_that_its_worker_does_not_name_is_lost_after_three_leases(state: DispatchState) -> None:
    admitted = _admit(state)
    patience_s = 3 * LOOP.heartbeat_timeout_s
    for at in range(1, int(patience_s) + 2):
        state.observe(heartbeat(orders={"toy/9/0": 0.0}), float(at))
        assert state.lost(float(at)) == []
    state.observe(heartbeat(orders={"toy/9/0": 0.0}), patience_s + 1.5)
    assert [flight.order.group_id for flight in state.lost(patience_s + 1.5)] == [admitted.group_id]


def test_no_worker_is_chosen_without_room_or_fitting_weights(state: DispatchState) -> None:
    assert state.choose(2, lambda held: True, 1.0) is not None
    assert state.choose(2, lambda held: held.number > 0, 1.0) is None
    state.observe(heartbeat(capacity=2), 1.0)
    _admit(state)
    assert state.choose(2, lambda held: True, 1.0) is None


def test_asking_what_was_lost_or_whether_all_is_over_changes_nothing(state: DispatchState) -> None:
    admitted = _admit(state)
    gone_at = 2 * LOOP.heartbeat_timeout_s
    state.mode = "drain"
    for _ in range(2):
        assert [flight.order.group_id for flight in state.lost(gone_at)] == [admitted.group_id]
        assert state.is_over(gone_at)
        assert state.flights.load("w0") == (2, 20)
        assert state.progress.remaining("w0", gone_at).tokens > 0
    assert not state.is_over(0.0)
    assert [flight.worker_id for flight in state.take_from_lost_workers(gone_at)] == [None]
    assert state.flights.load("w0") == (0, 0)
    assert state.progress.remaining("w0", gone_at).tokens == 0
