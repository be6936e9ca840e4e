import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from streamrl.bus.port import Outgoing, TopicPartition
from streamrl.producers.dispatch.recovery import rebuild
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import DispatchState
from streamrl.producers.lengths.predictor import ConstantLength
from streamrl.schemas.identifiers import partition_of_worker
from streamrl.schemas.reports import RecordRef, SkipReason
from streamrl.schemas.topics import HEARTBEATS, SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from tests.producers.dispatch.dispatcher_harness import (
    LOOP,
    DispatcherHarness,
    order,
    skip_record,
    step_report,
    trajectory,
    version,
)


async def _rebuilt(harness: DispatcherHarness) -> tuple[DispatchState, dict[TopicPartition, int]]:
    state = DispatchState(LOOP, DispatchSettings(), ConstantLength(LOOP))
    return state, await rebuild(harness.bus, "r", state, time.time)


async def _order(
    harness: DispatcherHarness, position: int, *, attempt: int = 0, number: int = 0, incarnation: str | None = None
) -> str:
    made = order(f"toy/{position}/0")
    sent = made.replace(attempt=attempt, admitted_version=version(number), incarnation=incarnation)
    await harness.send(WORK_ORDERS, sent, sent.group_id, position % 64)
    return sent.group_id


async def test_an_empty_run_starts_at_the_first_prompt() -> None:
    state, positions = await _rebuilt(DispatcherHarness())
    assert (state.cursor, state.ledger.in_flight, state.ledger.current) == (0, 0, None)
    assert {tp.topic for tp in positions} == {f"r.{t.name}" for t in (HEARTBEATS, STEPS, SKIPS, TRAJECTORIES)} | {
        "r.control"
    }


async def test_groups_that_did_not_end_are_under_way_again_with_what_is_missing() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.beat()
    trained, skipped, half, whole = [await _order(harness, position) for position in range(4)]
    await harness.finish(order(half), [1])
    await harness.finish(order(whole))
    await harness.step(1, [trained])
    await harness.skip(skipped, 0, SkipReason.ZERO_ADVANTAGE, step=1)
    state, _ = await _rebuilt(harness)
    assert [name for name in (trained, skipped, half, whole) if state.ledger.is_in_flight(name)] == [half, whole]
    assert [(flight.order.group_id, flight.missing) for flight in state.flights.unfinished()] == [(half, {0})]
    assert (state.cursor, state.ledger.current) == (4, version(1))
    assert (state.ledger.oldest, state.ledger.oldest_missing) == (0, 0)
    state.observe(trajectory(order(half), 0), time.time())
    assert state.ledger.oldest_missing is None
    assert not state.lost(time.time())


async def test_groups_are_still_for_the_steps_that_they_were_ordered_for() -> None:
    harness = DispatcherHarness(loop=LOOP.model_copy(update={"mode": "one_step_async"}))
    await harness.start()
    await harness.step(0)
    await harness.beat()
    await harness.until(lambda: len(harness.orders()) == 4)
    await harness.end()
    assert [order.due_step for order in harness.orders()] == [1, 1, 2, 2]
    state = DispatchState(harness.loop, DispatchSettings(), ConstantLength(LOOP))
    await rebuild(harness.bus, "r", state, time.time)
    assert (state.ledger.next_due, state.ledger.room(version(0))) == (3, 0)
    state.observe(step_report(1, ["toy/0/0", "toy/1/0"]), time.time())
    assert (state.ledger.next_due, state.ledger.room(version(0)), state.ledger.room(version(1))) == (3, 0, 2)


async def test_the_order_in_which_the_clocks_tick_does_not_matter() -> None:
    """A step report that claims to be older than the order it consumed still ends the group."""
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.step(1, ["toy/0/0"])
    await _order(harness, 0)
    state, _ = await _rebuilt(harness)
    assert state.ledger.in_flight == 0


@pytest.mark.parametrize("skew_s", [0.0, -5.0, -7200.0, 300.0])
@pytest.mark.parametrize("lineages", [1, 2])
async def test_no_clock_that_is_set_keeps_groups_in_flight(
    skew_s: float, lineages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 3 and 4 and all rows since then bear the stamps of a clock that was set, or of another machine's."""
    now = [1_000_000.0]
    monkeypatch.setattr("streamrl.bus.memory.time", SimpleNamespace(time=lambda: now[0]))
    harness = DispatcherHarness()
    await harness.step(0)
    for position in range(10):
        await _order(harness, position)
        await harness.finish(order(f"toy/{position}/0"))
    for number in range(1, 5):
        lineage = lineages if number > 2 else 1
        if number == 3:
            now[0] += skew_s
            if lineages == 2:
                await harness.step(2, lineage=2, parent=version(2), parent_skips=2)
        now[0] += 1.0
        await harness.step(number, [f"toy/{2 * number - 2}/0", f"toy/{2 * number - 1}/0"], lineage=lineage)
        if number in (2, 4):
            for sample in range(2):
                row = skip_record(f"toy/{8 if number == 2 else 9}/0", sample, SkipReason.POISON)
                row = row.replace(step=number, lineage=lineage, sequence=sample + 1)
                await harness.send(SKIPS, row)
    await _order(harness, 8)
    state, _ = await _rebuilt(harness)
    assert (state.ledger.current, state.ledger.in_flight) == (version(4, lineages), 0)
    assert state.ledger.room(version(4, lineages)) == 4


async def test_rows_of_an_older_lineage_are_undone_by_the_next() -> None:
    """Lineage 2 goes on from step 1 and reads the group again; lineage 3 goes on from step 3, before which it ended."""
    harness = DispatcherHarness()
    await harness.step(0)
    for position in range(3):
        await _order(harness, position)
        await harness.finish(order(f"toy/{position}/0"))
    await harness.step(1)
    row = skip_record("toy/0/0", 0, SkipReason.ZERO_ADVANTAGE, step=2).replace(lineage=1, sequence=1)
    await harness.send(SKIPS, row)
    await harness.step(1, lineage=2, parent=version(1))
    kept = skip_record("toy/1/0", 0, SkipReason.ZERO_ADVANTAGE, step=2).replace(lineage=2, sequence=1)
    await harness.send(SKIPS, kept)
    await harness.step(3, lineage=2)
    await harness.step(3, lineage=3, parent=version(3, lineage=2), parent_skips=1)
    state, _ = await _rebuilt(harness)
    flying = [name for name in ("toy/0/0", "toy/1/0", "toy/2/0") if state.ledger.is_in_flight(name)]
    assert flying == ["toy/0/0", "toy/2/0"]


async def test_rows_of_an_abandoned_lineage_do_not_count() -> None:
    """Lineage 2 goes back to step 1 and skips a group; lineage 3 goes on from step 3 of lineage 1."""
    harness = DispatcherHarness()
    await harness.step(0)
    for position in range(2):
        await _order(harness, position)
        await harness.finish(order(f"toy/{position}/0"))
    for number in (1, 2):
        await harness.step(number)
    kept = skip_record("toy/0/0", 0, SkipReason.ZERO_ADVANTAGE, step=2).replace(lineage=1, sequence=1)
    await harness.send(SKIPS, kept)
    await harness.step(3)
    await harness.step(1, lineage=2, parent=version(1))
    left = skip_record("toy/1/0", 0, SkipReason.ZERO_ADVANTAGE, step=2).replace(lineage=2, sequence=1)
    await harness.send(SKIPS, left)
    await harness.step(3, lineage=3, parent=version(3), parent_skips=1)
    state, _ = await _rebuilt(harness)
    assert [name for name in ("toy/0/0", "toy/1/0") if state.ledger.is_in_flight(name)] == ["toy/1/0"]


async def test_the_clocks_of_workers_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps hours ahead prolong no lease and no patience, stamps hours behind end none."""
    for skew_s in (7200.0, -7200.0):
        monkeypatch.setattr("streamrl.bus.memory.time", SimpleNamespace(time=lambda skew_s=skew_s: 1_000.0 + skew_s))
        harness = DispatcherHarness()
        await harness.step(0)
        await harness.beat()
        await _order(harness, 0)
        await harness.finish(order("toy/0/0"), [0])
        state = DispatchState(LOOP, DispatchSettings(), ConstantLength(LOOP))
        await rebuild(harness.bus, "r", state, lambda: 1_000.0)
        assert not state.lost(1_000.0 + LOOP.heartbeat_timeout_s)
        assert not state.candidates(1_000.0)  # not heard yet
        assert len(state.lost(1_000.1 + LOOP.heartbeat_timeout_s)) == 1


async def test_orders_of_a_worker_that_restarted_meanwhile_are_lost() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.beat(incarnation="a")
    await _order(harness, 0, incarnation="a")
    await harness.beat(incarnation="b")
    await _order(harness, 1, incarnation="b")
    await _order(harness, 2)  # of a dispatcher that did not say: whoever holds the id now may have it
    state, _ = await _rebuilt(harness)
    assert [flight.order.position for flight in state.lost(time.time())] == [0]


@pytest.mark.parametrize("workers", [("w0", "w0"), ("w0", "w1"), ("w1", "w0")])
async def test_a_later_attempt_replaces_the_earlier_one(workers: tuple[str, str]) -> None:
    """In whatever order the partitions of two workers are read."""
    harness = DispatcherHarness()
    await harness.step(0)
    for attempt, worker in enumerate(workers):
        sent = order("toy/0/0", worker).replace(attempt=attempt, admitted_version=version(2 * attempt))
        await harness.send(WORK_ORDERS, sent, sent.group_id, partition_of_worker(worker))
    state, _ = await _rebuilt(harness)
    flight = state.flights.get("toy/0/0")
    assert flight is not None
    assert (flight.order.attempt, flight.worker_id, state.ledger.oldest) == (1, workers[1], 0)


async def test_trajectories_that_were_consumed_are_not_read_again() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    consumed: tuple[RecordRef, ...] = ()
    for position in range(3):
        await _order(harness, position)
        consumed += tuple(await harness.finish(order(f"toy/{position}/0")))
    await harness.send(STEPS, step_report(1, [f"toy/{n}/0" for n in range(3)], refs=consumed), "grpo")
    await _order(harness, 3, number=1)
    await harness.finish(order("toy/3/0"), [0])
    publisher = await harness.bus.publisher("test")
    await publisher.publish(Outgoing("r.trajectories", b"not ours", "toy/3/0", 0))
    opened: list[object] = []
    subscribe = harness.bus.subscribe

    async def noted(topics, **named):  # type: ignore[no-untyped-def]
        opened.append(named.get("start"))
        return await subscribe(topics, **named)

    harness.bus.subscribe = noted  # type: ignore[method-assign]
    state, positions = await _rebuilt(harness)
    assert opened[-1] == {TopicPartition("r.trajectories", 0): 6}
    assert positions[TopicPartition("r.trajectories", 0)] == 8
    flight = state.flights.get("toy/3/0")
    assert flight is not None
    assert flight.missing == {1}


async def test_samples_that_expired_before_they_were_trained_count_as_missing_again() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await _order(harness, 0)
    consumed = tuple(await harness.finish(order("toy/0/0")))
    await harness.send(STEPS, step_report(1, ["toy/0/0"], refs=consumed), "grpo")
    await _order(harness, 1, number=1)
    await harness.finish(order("toy/1/0"))
    row = skip_record("toy/1/0", 0, SkipReason.RETENTION_EXPIRED, step=1)
    lost = row.replace(group_id=None, trajectory_id=None, offset=2, end_offset=4)
    await harness.send(SKIPS, lost)
    subscribe = harness.bus.subscribe

    async def expired(topics, **named):  # type: ignore[no-untyped-def]
        subscription = await subscribe(topics, **named)

        async def beginning_offsets(partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, int]:
            return await subscription.end_offsets(partitions)

        if named.get("start") is None:
            subscription.beginning_offsets = beginning_offsets  # type: ignore[method-assign]
        return subscription

    harness.bus.subscribe = expired  # type: ignore[method-assign]
    state, _ = await _rebuilt(harness)
    flight = state.flights.get("toy/1/0")
    assert flight is not None
    assert flight.missing == {0, 1}
    assert not state.has_lost_samples
    state.observe(lost, time.time())
    assert state.has_lost_samples


async def test_a_trainer_that_resumed_gets_its_groups_back_after_our_restart_too() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    for position in range(3):
        await _order(harness, position)
    await harness.step(1, ["toy/0/0"])
    await harness.step(2, ["toy/1/0"])
    await harness.send(SKIPS, skip_record("toy/2/0", 0, SkipReason.ZERO_ADVANTAGE, step=2))
    await harness.step(1, lineage=2, parent=version(1))
    state, _ = await _rebuilt(harness)
    assert [n for n in range(3) if state.ledger.is_in_flight(f"toy/{n}/0")] == [1, 2]
    assert state.ledger.current == version(1, lineage=2)


@pytest.mark.parametrize("live", [True, False])
async def test_groups_that_a_restore_forward_again_has_trained_are_not_waited_for(*, live: bool) -> None:
    """Back to step 1, and from there to step 2 of the lineage that this had undone."""
    harness = DispatcherHarness()
    await harness.step(0)
    for position in range(4):
        await _order(harness, position)
        await harness.finish(order(f"toy/{position}/0"))
    await harness.step(1, ["toy/0/0"])
    await harness.step(2, ["toy/1/0"])
    row = skip_record("toy/2/0", 0, SkipReason.ZERO_ADVANTAGE, step=2).replace(sequence=1, lineage=1)
    await harness.send(SKIPS, row)
    await harness.send(SKIPS, row.replace(trajectory_id="toy/2/0/1", offset=5, sequence=2))
    await harness.step(1, lineage=2, parent=version(1))
    forward = step_report(2, lineage=3, parent=version(2), parent_skips=2)
    if live:
        state, _ = await _rebuilt(harness)
        assert [n for n in range(4) if state.ledger.is_in_flight(f"toy/{n}/0")] == [1, 2, 3]
        state.observe(forward, time.time())
        assert state.has_lost_samples  # the state is rebuilt then
    await harness.send(STEPS, forward, "grpo")
    state, _ = await _rebuilt(harness)
    assert [n for n in range(4) if state.ledger.is_in_flight(f"toy/{n}/0")] == [3]
    assert (state.ledger.current, state.has_lost_samples) == (version(2, lineage=3), False)


async def test_the_cursor_is_the_largest_that_orders_steps_and_trajectories_tell() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.step(7, ["toy/0/0"], prompt_cursor=20)
    assert (await _rebuilt(harness))[0].cursor == 20
    await harness.finish(order("toy/24/0"), [0])
    assert (await _rebuilt(harness))[0].cursor == 25
    await _order(harness, 29)
    assert (await _rebuilt(harness))[0].cursor == 30


async def test_an_old_end_of_the_run_does_not_end_its_continuation() -> None:
    harness = DispatcherHarness()
    await harness.flow("pause")
    await harness.finish_run()
    state, _ = await _rebuilt(harness)
    assert (state.finished, state.mode) == (False, "pause")


async def test_prompts_of_a_window_that_were_never_ordered_come_first_again() -> None:
    harness = DispatcherHarness()
    await harness.step(0)
    for position in (0, 1, 3):
        await _order(harness, position)
    state, _ = await _rebuilt(harness)
    assert (state.cursor, state.positions.unsent) == (4, [2])


async def test_orders_that_expired_are_known_by_what_came_of_them() -> None:
    """Windows of two: of positions 2 and 3 no order is left. One was trained, of the other a sample was read."""
    harness = DispatcherHarness()
    await harness.step(0)
    await harness.finish(order("toy/3/0"), [0])
    await harness.step(1, ["toy/2/0", "toy/1/0"], prompt_cursor=3)
    state, _ = await _rebuilt(harness)
    assert (state.cursor, state.positions.unsent) == (4, [2])
    assert "toy/2/0" in state.positions.ordered
