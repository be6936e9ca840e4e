"""Coordinators that are killed, replaced, or come back, and runs that are continued."""

import asyncio

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.coordinator.coordinator import CLAIM_AGAIN_S, Coordinator
from streamrl.schemas.control import RunFinished, WeightsReady, WorkerClaimed, control_key
from streamrl.schemas.errors import BusUnavailable, DeliveryUnknown, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import CONTROL, HEARTBEATS, STEPS
from tests.coordinator.factories import heartbeat, step_report
from tests.coordinator.running_coordinator import RELAYS, controls, new_bus, publish, running
from tests.fakes.clock import FakeClock
from tests.fakes.topics import create_topics
from tests.fakes.transactions import AnsweringBus
from tests.fakes.waiting import until
from tests.progress import within


def versions(bus: MemoryBus) -> list[PolicyVersion]:
    return [message.version for message in controls(bus) if isinstance(message, WeightsReady)]


def claims(bus: MemoryBus) -> list[tuple[str, str]]:
    return [(m.worker_id, m.incarnation) for m in controls(bus) if isinstance(m, WorkerClaimed)]


def compacted(bus: MemoryBus) -> MemoryBus:
    """The same run after compaction: of each key of control the last record is left."""
    partition = bus.log(CONTROL.full_name("r")).partitions[0]
    last = {record.key: record for record in partition}
    partition[:] = sorted(last.values(), key=lambda record: record.offset)
    return bus


@pytest.mark.parametrize("arrives", [False, True])
async def test_a_coordinator_killed_before_or_after_an_announcement_is_followed_by_one_that_makes_it(
    arrives: bool,
) -> None:
    bus = create_topics(AnsweringBus(answers=[RuntimeError("killed")], arrives=arrives), "r", 4)
    await publish(bus, STEPS, step_report(1, 3))
    stop = asyncio.Event()
    with pytest.raises(ExceptionGroup):
        await Coordinator(bus, "r", RELAYS).run(stop)
    await publish(bus, STEPS, step_report(1, 4))
    async with running(bus):
        await until(lambda: versions(bus)[-1:] == [PolicyVersion(1, 4)])
    announced = versions(bus)
    assert announced == sorted(set(announced))
    sequences = [message.sequence for message in controls(bus)]
    assert sequences == sorted(set(sequences))


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("error", [DeliveryUnknown, BusUnavailable])
async def test_an_announcement_of_unknown_fate_is_repeated_unchanged(arrives: bool, error: type[Exception]) -> None:
    bus = create_topics(AnsweringBus(answers=[error("no answer")] * 2, arrives=arrives), "r", 4)
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 3))
        await until(lambda: len(versions(bus)) == (3 if arrives else 1))
    assert {message.sequence for message in controls(bus)} == {0}


async def test_a_zombie_announces_nothing() -> None:
    """It stood still while its replacement announced newer weights; then it tries to announce older ones."""
    bus = new_bus()
    zombie = await bus.transactional("r.coordinator")
    async with running(bus):
        await publish(bus, STEPS, step_report(2, 9))
        await until(lambda: versions(bus) == [PolicyVersion(2, 9)])
        older = WeightsReady(
            sequence=9, sent_at=0.0, version=PolicyVersion(1, 3), step=3, manifest_sha256="0" * 64, relays=RELAYS
        )
        with pytest.raises(Superseded):
            await zombie.commit([Outgoing.of(CONTROL.full_name("r"), older, key=control_key(older))])
    assert versions(bus) == [PolicyVersion(2, 9)]


async def test_a_coordinator_that_was_replaced_ends_superseded() -> None:
    bus = new_bus()
    first = asyncio.create_task(Coordinator(bus, "r", RELAYS).run(asyncio.Event()))
    await asyncio.sleep(0.05)
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 3))
        with pytest.raises(ExceptionGroup) as raised:
            await within(first, 5)
        await until(lambda: versions(bus))
    assert raised.group_contains(Superseded)
    assert versions(bus) == [PolicyVersion(1, 3)]


async def test_each_incarnation_of_a_worker_claims_its_id_once() -> None:
    bus = new_bus()
    async with running(bus):
        for sequence in range(3):
            await publish(bus, HEARTBEATS, heartbeat(incarnation="a", sequence=sequence))
        await publish(bus, HEARTBEATS, heartbeat("w1", incarnation="x"))
        await until(lambda: len(claims(bus)) == 2)
        await publish(bus, HEARTBEATS, heartbeat(incarnation="b"))
        await until(lambda: len(claims(bus)) == 3)
        await publish(bus, HEARTBEATS, heartbeat(incarnation="a", sequence=4))
        await asyncio.sleep(0.05)
    assert claims(bus) == [("w0", "a"), ("w1", "x"), ("w0", "b")]


async def test_a_restarted_coordinator_knows_which_incarnation_came_first() -> None:
    """The zombie beats after the restart; it is not taken for a newcomer."""
    bus = new_bus()
    for incarnation in "ab":
        await publish(bus, HEARTBEATS, heartbeat(incarnation=incarnation))
    async with running(bus):
        await until(lambda: claims(bus) == [("w0", "b")])
    async with running(compacted(bus)):
        await publish(bus, HEARTBEATS, heartbeat(incarnation="a", sequence=7))
        await asyncio.sleep(0.1)
    assert claims(bus) == [("w0", "b")]


async def test_a_superseded_worker_that_stays_is_notified_again() -> None:
    bus = new_bus()
    clock = FakeClock()
    async with running(bus, clock):
        for incarnation in "ab":
            await publish(bus, HEARTBEATS, heartbeat(incarnation=incarnation))
        for sequence in range(1, 4):
            await publish(bus, HEARTBEATS, heartbeat(incarnation="a", sequence=sequence))
            await asyncio.sleep(0.02)
            clock.advance(CLAIM_AGAIN_S)
        await until(lambda: claims(bus).count(("w0", "b")) >= 2)
    assert ("w0", "a") not in claims(bus)[1:]


async def test_a_finished_run_that_is_continued_ends_again_only_at_its_new_end() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 5, finished=True))
        await until(lambda: isinstance(controls(bus)[-1], RunFinished) if controls(bus) else False)
    async with running(compacted(bus)):
        await publish(bus, STEPS, step_report(1, 5, finished=True))
        await publish(bus, STEPS, step_report(2, 5))
        await until(lambda: versions(bus)[-1] == PolicyVersion(2, 5))
        assert sum(isinstance(message, RunFinished) for message in controls(bus)) == 1
    async with running(compacted(bus)):
        await publish(bus, STEPS, step_report(2, 8, finished=True))
        await until(lambda: isinstance(controls(bus)[-1], RunFinished))
    assert [message.step for message in controls(bus) if isinstance(message, RunFinished)] == [5, 8]


async def test_the_last_report_that_a_resumed_trainer_repeats_does_not_end_its_run() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 5, finished=True))
        await publish(bus, STEPS, step_report(2, 5))
        await until(lambda: versions(bus)[-1:] == [PolicyVersion(2, 5)])
        await asyncio.sleep(0.7)
    assert not [message for message in controls(bus) if isinstance(message, RunFinished)]


async def test_an_unannounced_end_waits_for_a_continuation_after_a_restart() -> None:
    bus = new_bus()
    await publish(bus, STEPS, step_report(1, 5, finished=True))
    async with running(bus, finish_timeout_s=30.0):
        await until(lambda: versions(bus))
        await asyncio.sleep(0.05)
        await publish(bus, STEPS, step_report(2, 5))
        await until(lambda: versions(bus)[-1] == PolicyVersion(2, 5))
    assert not [message for message in controls(bus) if isinstance(message, RunFinished)]
