"""A split on the coordinator's topics: workers are dealt, arms' weights announced, and shares given back."""

import asyncio

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.schemas.control import ArmShare, ArmWeights, InstanceState, OperatorCommand, PolicySplit, WeightsReady
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.messages import WIRE_VERSION, Message
from streamrl.schemas.topics import COMMANDS, HEARTBEATS, STEPS
from tests.coordinator.factories import heartbeat, relay_beat, step_report
from tests.coordinator.running_coordinator import controls, new_bus, publish
from tests.fakes.waiting import until
from tests.policies.running_coordinator import running

HALF = OperatorCommand(action="split", shares=(ArmShare(policy="second", share=0.5),), sent_at=0.0)


async def publish_own(bus: MemoryBus, message: Message) -> None:
    topic = STEPS.full_name(scope_of("r", "second"))
    await (await bus.publisher("second")).publish(Outgoing.of(topic, message, key="k"))


async def with_an_instance(workers: int = 2) -> MemoryBus:
    bus = new_bus()
    bus.create_topic(STEPS.full_name(scope_of("r", "second")), 1)
    await publish(bus, COMMANDS, OperatorCommand(action="attach", policy="second", algorithm="rloo", sent_at=0.0))
    for number in range(workers):
        await beat(bus, f"w{number}")
    return bus


async def beat(bus: MemoryBus, worker: str, **changes: object) -> None:
    await publish(bus, HEARTBEATS, heartbeat(worker).replace(**({"wire": WIRE_VERSION} | changes)))


def splits(bus: MemoryBus) -> list[tuple[dict[str, float], dict[str, str]]]:
    return [(found.shares, found.workers) for found in controls(bus) if isinstance(found, PolicySplit)]


def arm_weights(bus: MemoryBus) -> list[PolicyVersion]:
    return [found.version for found in controls(bus) if isinstance(found, ArmWeights)]


async def test_workers_are_dealt_to_the_arm_and_its_newest_weights_announced_also_after_a_restart() -> None:
    bus = await with_an_instance()
    for number in range(3):
        await publish_own(bus, step_report(1, number))
    async with running(bus):
        await until(lambda: any(isinstance(found, InstanceState) for found in controls(bus)))
        await publish(bus, COMMANDS, HALF)
        await until(lambda: arm_weights(bus) == [(1, 2)])
        await publish_own(bus, step_report(1, 3))
        await until(lambda: arm_weights(bus) == [(1, 2), (1, 3)])
    assert splits(bus) == [({"second": 0.5}, {"w1": "second"})]
    # What it exported while it was served is no arm's.
    await publish_own(bus, step_report(1, 4).replace(served_as=PolicyVersion(5, 9)))
    await publish_own(bus, step_report(1, 5))
    async with running(bus):
        await until(lambda: arm_weights(bus)[2:] == [(1, 5)])
    assert len(splits(bus)) == 1
    assert not any(isinstance(found, WeightsReady) for found in controls(bus))


async def test_an_arm_goes_on_when_its_share_changes_or_is_given_to_it_again() -> None:
    bus = await with_an_instance(4)
    await publish_own(bus, step_report(1, 1))
    async with running(bus):
        await publish(bus, COMMANDS, HALF)
        await until(lambda: arm_weights(bus) == [(1, 1)])
        await publish(bus, COMMANDS, HALF.replace(shares=(ArmShare(policy="second", share=0.75),)))
        await publish_own(bus, step_report(1, 2))
        await until(lambda: arm_weights(bus)[1:] == [(1, 2)])
        await publish(bus, COMMANDS, OperatorCommand(action="split", sent_at=0.0))
        await publish(bus, COMMANDS, HALF)
        await publish_own(bus, step_report(1, 3))
        await until(lambda: arm_weights(bus)[2:] == [(1, 3)])
    assert [shares.get("second") for shares, _ in splits(bus)] == [0.5, 0.75, None, 0.5]


async def test_a_worker_that_is_lost_is_replaced_and_one_of_a_version_too_far_off_is_dealt_to_no_arm() -> None:
    now = [0.0]
    bus = await with_an_instance(3)
    await beat(bus, "other", wire=WIRE_VERSION + 2)
    async with running(bus, lambda: now[0], heartbeat_timeout_s=8.0):
        await publish(bus, COMMANDS, HALF)
        await until(lambda: len(splits(bus)) >= 1 and len(splits(bus)[-1][1]) == 1)
        (first,) = splits(bus)[-1][1]
        there = [f"w{number}" for number in range(3) if f"w{number}" != first]
        for sequence in range(1, 60):  # small steps: of a large one the coordinator takes itself for the cause
            if set(splits(bus)[-1][1]) & set(there) and len(splits(bus)[-1][1]) == 1:
                break
            now[0] += 1.0
            for worker in there:
                await beat(bus, worker, sequence=sequence)
            await asyncio.sleep(0.1)
    assert set(splits(bus)[-1][1]) <= set(there)
    assert now[0] > 8.0
    assert all("other" not in workers for _, workers in splits(bus))


async def test_an_arm_s_weights_only_grow() -> None:
    bus = await with_an_instance()
    await publish_own(bus, step_report(2, 3))
    async with running(bus):
        await publish(bus, COMMANDS, HALF)
        await until(lambda: arm_weights(bus) == [(2, 3)])
        for lineage, number in ((2, 3), (2, 2), (1, 9), (2, 4)):
            await publish_own(bus, step_report(lineage, number))
        await until(lambda: arm_weights(bus)[1:] == [(2, 4)])


async def test_a_removed_arm_returns_its_share() -> None:
    for ending in ("detach", "last step"):
        bus = await with_an_instance()
        async with running(bus):
            await publish(bus, COMMANDS, HALF)
            await until_split(bus, times=1)
            if ending == "detach":
                await publish(bus, COMMANDS, OperatorCommand(action="detach", policy="second", sent_at=0.0))
            else:
                await publish_own(bus, step_report(1, 9, finished=True))
            await until_split(bus, times=2)
        assert splits(bus)[-1] == ({}, {}), ending


async def until_split(bus: MemoryBus, times: int) -> None:
    await until(lambda: len(splits(bus)) == times)


async def test_an_arm_s_weights_are_named_at_all_relays() -> None:
    bus = await with_an_instance()
    for name, changes in (("h1", {"has_store": True}), ("h2", {})):
        await publish(bus, HEARTBEATS, relay_beat(name, **changes))
    await publish_own(bus, step_report(1, 1))
    async with running(bus):
        await publish(bus, COMMANDS, HALF)
        await until(lambda: len(arm_weights(bus)) == 1)
    (found,) = (message for message in controls(bus) if isinstance(message, ArmWeights))
    assert found.relay_hosts == ("h1", "h2")
    assert found.relays[:2] == ("http://h1:1", "http://h2:1")


async def test_an_ended_split_assigns_no_worker() -> None:
    bus = await with_an_instance()
    async with running(bus):
        await publish(bus, COMMANDS, HALF)
        await until(lambda: len(splits(bus)) == 1)
        await publish(bus, COMMANDS, OperatorCommand(action="split", sent_at=0.0))
        await until(lambda: len(splits(bus)) == 2)
        # What is not so already and cannot be changes nothing.
        await publish(bus, COMMANDS, HALF.replace(shares=(ArmShare(policy="third", share=0.5),)))
        await publish(bus, COMMANDS, OperatorCommand(action="pause", sent_at=0.0))
        await until(lambda: controls(bus)[-1].kind == "flow")  # type: ignore[attr-defined]
    assert splits(bus) == [({"second": 0.5}, {"w1": "second"}), ({}, {})]


async def test_a_coordinator_that_is_cancelled_leaves_no_task() -> None:
    bus = new_bus()
    before = asyncio.all_tasks()
    async with running(bus) as task:
        task.cancel()
        await asyncio.wait({task})
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
