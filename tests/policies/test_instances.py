"""Instances attached to a run on the coordinator's topics, and which of the policies is served."""

import asyncio

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.schemas.control import (
    InstanceState,
    OperatorCommand,
    Promotion,
    RunFinished,
    Served,
    WeightsReady,
    control_key,
)
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.topics import COMMANDS, STEPS
from tests.coordinator.factories import step_report
from tests.coordinator.running_coordinator import controls, new_bus, publish
from tests.fakes.waiting import until
from tests.policies.running_coordinator import running


async def test_instances_are_attached_paused_and_detached_as_asked_and_a_successor_knows_them() -> None:
    bus = new_bus()

    def asked(action: str, policy: str = "rloo", algorithm: str | None = None) -> OperatorCommand:
        return OperatorCommand(action=action, policy=policy, algorithm=algorithm, sent_at=0.0)

    commands = [
        asked("attach", algorithm="rloo"),
        asked("pause_instance"),
        asked("attach", algorithm="rloo"),  # come back after a crash: it stays paused
        asked("resume_instance", "nobody"),
        asked("resume_instance"),
        asked("detach"),
        asked("pause_instance"),
    ]
    for command in commands[:4]:
        await publish(bus, COMMANDS, command)
    async with running(bus):
        await until(lambda: len(controls(bus)) == 2)
    for command in commands[4:]:
        await publish(bus, COMMANDS, command)
    async with running(bus):
        await until(lambda: len(controls(bus)) == 4)
        await asyncio.sleep(0.05)
    told = [message for message in controls(bus) if isinstance(message, InstanceState)]
    assert [(each.policy, each.algorithm, each.mode, each.command_offset) for each in told] == [
        ("rloo", "rloo", "run", 0),
        ("rloo", "rloo", "pause", 1),
        ("rloo", "rloo", "run", 4),
        ("rloo", "rloo", "detached", 5),
    ]
    assert len({control_key(each) for each in told}) == 1


async def test_promoted_weights_are_announced_above_all_others_and_a_successor_goes_on_with_them() -> None:
    bus, own = new_bus(), STEPS.full_name(scope_of("r", "rloo"))
    bus.create_topic(own, 1)

    async def report(lineage: int, step: int, served_as: PolicyVersion | None) -> None:
        made = step_report(lineage, step).replace(policy="rloo", served_as=served_as)
        publisher = await bus.publisher("rloo")
        await publisher.publish(Outgoing.of(own, made, key="rloo"))

    await publish(bus, STEPS, step_report(1, 40))
    for policy, action in (("rloo", "promote"), ("rloo", "attach"), ("rloo", "promote"), ("rloo", "pause_instance")):
        await publish(bus, COMMANDS, OperatorCommand(action=action, policy=policy, sent_at=0.0))
    await report(3, 7, None)  # of a time when others were served
    async with running(bus):
        await until(lambda: any(isinstance(message, Served) for message in controls(bus)))
        await report(4, 7, PolicyVersion(4, 41))
        await publish(bus, STEPS, step_report(1, 41))
        await until(lambda: len(announced(bus)) == 2)
    await report(4, 8, PolicyVersion(4, 42))
    async with running(bus):
        await until(lambda: len(announced(bus)) == 3)
        await publish(bus, COMMANDS, OperatorCommand(action="promote", policy="policy", sent_at=0.0))
        await until(lambda: sum(isinstance(message, Served) for message in controls(bus)) == 2)
    served = [message for message in controls(bus) if isinstance(message, Served)]
    assert [(each.policy, each.since, each.command_offset) for each in served] == [
        ("rloo", (1, 40), 2),
        ("policy", (4, 42), 4),
    ]
    promotion = Promotion(policy="rloo", since=PolicyVersion(1, 40), lineage=4, shift=34)
    assert [(each.version, each.step, each.promotion) for each in announced(bus)] == [
        ((1, 40), 40, None),
        ((4, 41), 7, promotion),
        ((4, 42), 8, promotion),
    ]
    # Served ones are not paused: workers would wait for their weights.
    assert [message.mode for message in controls(bus) if isinstance(message, InstanceState)] == ["run"]


async def test_nothing_is_promoted_after_the_last_step() -> None:
    """Its trainer is gone: no trainer could be asked to serve again, and the run would never end."""
    bus = new_bus()
    bus.create_topic(STEPS.full_name(scope_of("r", "rloo")), 1)
    await publish(bus, STEPS, step_report(1, 40).replace(finished=True))
    for action in ("attach", "promote"):
        await publish(bus, COMMANDS, OperatorCommand(action=action, policy="rloo", sent_at=0.0))
    async with running(bus, finish_timeout_s=1.0):
        await until(lambda: any(isinstance(message, RunFinished) for message in controls(bus)))
    assert [message.policy for message in controls(bus) if isinstance(message, InstanceState)] == ["rloo"]
    assert not [message for message in controls(bus) if isinstance(message, Served)]


def announced(bus: MemoryBus) -> list[WeightsReady]:
    return [message for message in controls(bus) if isinstance(message, WeightsReady)]
