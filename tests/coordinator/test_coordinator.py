import asyncio
from typing import cast

from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import Outgoing
from streamrl.coordinator.coordinator import FleetScaling, LastEvaluation
from streamrl.coordinator.scaling import FleetBounds
from streamrl.schemas.control import (
    DrainWorker,
    FleetTarget,
    FlowControl,
    OperatorCommand,
    RunFinished,
    WeightsReady,
    WorkerClaimed,
    control_key,
)
from streamrl.schemas.errors import FinishedRunContinues
from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import COMMANDS, EVALUATIONS, HEARTBEATS, STEPS
from tests.coordinator.factories import heartbeat, relay_beat, step_report
from tests.coordinator.running_coordinator import RELAYS, controls, new_bus, publish, running
from tests.fakes.waiting import until


async def test_each_newer_step_is_announced_with_its_relays_and_checksum() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 0))
        await until(lambda: len(controls(bus)) == 1)
        await publish(bus, STEPS, step_report(1, 1))
        await until(lambda: len(controls(bus)) == 2)
    first, second = controls(bus)
    assert isinstance(first, WeightsReady)
    assert isinstance(second, WeightsReady)
    assert (first.version, second.version) == (PolicyVersion(1, 0), PolicyVersion(1, 1))
    assert second.relays == RELAYS
    assert second.manifest_sha256 == step_report(1, 1).manifest_sha256
    assert (first.sequence, second.sequence) == (0, 1)


async def test_relays_that_are_heard_are_announced_and_again_when_others_are_there() -> None:
    bus, now = new_bus(), [1000.0]

    async def beats(name: str, *, leaving: bool = False) -> None:
        # An early wire version, as a relay that says none.
        await publish(bus, HEARTBEATS, relay_beat(name, sequence=int(leaving), leaving=leaving, wire=1))

    def named() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        return [(found.relays, found.relay_hosts) for found in controls(bus) if isinstance(found, WeightsReady)]

    async with running(bus, lambda: now[0]):
        await beats("h2")
        await asyncio.sleep(0.05)
        await publish(bus, STEPS, step_report(1, 0))
        await until(lambda: len(named()) == 1)
        await beats("h1")
    now[0] += 1.0
    # A successor knows from the topic what was named, and names what it hears once it has listened for a while.
    async with running(bus, lambda: now[0]):
        await asyncio.sleep(0.6)
        assert len(named()) == 1
        now[0] += 5.5
        await until(lambda: len(named()) == 2)
        await beats("h2", leaving=True)
        await asyncio.sleep(0.05)
        await publish(bus, STEPS, step_report(1, 1, finished=True))
        await until(lambda: len(named()) == 3)
        # Behind the end of the run, weights would mean that it goes on.
        await beats("h1", leaving=True)
        now[0] += 10.0
        await asyncio.sleep(0.6)
    assert named() == [
        (("http://h2:1", *RELAYS), ("h2",)),
        (("http://h1:1", "http://h2:1", *RELAYS), ("h1", "h2")),
        (("http://h1:1", *RELAYS), ("h1",)),
    ]


async def test_a_restarted_coordinator_goes_on_where_the_topics_end() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 1))
        await publish(bus, COMMANDS, OperatorCommand(action="pause", sent_at=0.0))
        await until(lambda: len(controls(bus)) == 2)
    await publish(bus, STEPS, step_report(1, 2))
    async with running(bus):
        await until(lambda: len(controls(bus)) == 3)
        await publish(bus, COMMANDS, OperatorCommand(action="pause", sent_at=0.0))
        await publish(bus, COMMANDS, OperatorCommand(action="resume", sent_at=0.0))
        await until(lambda: len(controls(bus)) == 4)
    messages = controls(bus)
    assert sorted(message.sequence for message in messages) == [0, 1, 2, 3]
    weights = [message.version for message in messages if isinstance(message, WeightsReady)]
    assert weights == [PolicyVersion(1, 1), PolicyVersion(1, 2)]
    assert [m.mode for m in messages if isinstance(m, FlowControl)] == ["pause", "run"]


async def test_weights_of_an_older_lineage_are_not_announced() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, STEPS, step_report(2, 10))
        await until(lambda: len(controls(bus)) == 1)
        await publish(bus, STEPS, step_report(1, 15))
        await publish(bus, STEPS, step_report(2, 11))
        await until(lambda: len(controls(bus)) == 2)
    versions = [message.version for message in controls(bus) if isinstance(message, WeightsReady)]
    assert versions == [PolicyVersion(2, 10), PolicyVersion(2, 11)]


async def test_the_end_of_the_run_is_announced_once() -> None:
    bus = new_bus()
    await publish(bus, STEPS, step_report(1, 5, finished=True))
    for _ in range(2):
        async with running(bus, finish_timeout_s=0.1):
            await until(lambda: any(isinstance(m, RunFinished) for m in controls(bus)))
    assert sum(isinstance(message, RunFinished) for message in controls(bus)) == 1


async def test_an_end_undone_during_its_announcement_is_an_error() -> None:
    bus = new_bus()
    await publish(bus, STEPS, step_report(1, 5, finished=True))
    async with running(bus, finish_timeout_s=0.1) as task:
        await until(lambda: any(isinstance(m, RunFinished) for m in controls(bus)))
        # Killed behind its last report, a trainer repeats it under its next lineage: the end is told again.
        await publish(bus, STEPS, step_report(2, 5, finished=True))
        await until(lambda: [type(m) for m in controls(bus)[-2:]] == [WeightsReady, RunFinished])
        await publish(bus, STEPS, step_report(3, 4))
        await until(task.done)
    (error,) = cast("ExceptionGroup", task.exception()).exceptions
    assert isinstance(error, FinishedRunContinues)
    assert "expected nothing after step 5, announced as the last, got weights 3-4 of step 4" in str(error)
    last = controls(bus)[-1]
    assert isinstance(last, WeightsReady)
    assert last.version == PolicyVersion(3, 4)
    async with running(bus, finish_timeout_s=0.1) as task:
        await publish(bus, STEPS, step_report(3, 5, finished=True))
        await until(lambda: isinstance(controls(bus)[-1], RunFinished))
        assert not task.done(), "a successor goes on"


async def test_the_end_of_the_run_waits_for_the_evaluation_of_its_last_weights_and_not_for_ever() -> None:
    bus, now = new_bus(), [1000.0]
    evaluation = LastEvaluation(newest_due=lambda last: last - last % 4, patience_s=60.0)

    def has_ended() -> bool:
        return any(isinstance(message, RunFinished) for message in controls(bus))

    async with running(bus, lambda: now[0], evaluation=evaluation):
        await publish(bus, STEPS, step_report(1, 5, finished=True))
        await asyncio.sleep(0.7)
        assert not has_ended()
        version = PolicyVersion(1, 4)
        report = EvaluationReport(
            version=version,
            step=4,
            metrics={},
            prompts=1,
            samples=1,
            oldest=version,
            newest=version,
            began_at=0.0,
            sent_at=0.0,
        )
        await publish(bus, EVALUATIONS, report)
        await until(has_ended)
    bus = new_bus()
    async with running(bus, lambda: now[0], evaluation=evaluation):
        await publish(bus, STEPS, step_report(1, 5, finished=True))
        await asyncio.sleep(0.7)
        assert not has_ended()
        now[0] += 61.0
        await until(has_ended)


async def test_unreadable_records_are_passed_over() -> None:
    bus = new_bus()
    await (await bus.publisher("test")).publish(Outgoing(STEPS.full_name("r"), b"\xff" * 9, key=None))
    async with running(bus):
        await publish(bus, STEPS, step_report(1, 0))
        await until(lambda: len(controls(bus)) == 1)


async def test_one_worker_is_drained_under_a_key_of_its_own() -> None:
    bus = new_bus()
    async with running(bus):
        await publish(bus, COMMANDS, OperatorCommand(action="drain_worker", worker_id="w3", sent_at=0.0))
        await until(lambda: len(controls(bus)) == 1)
    (message,) = controls(bus)
    assert isinstance(message, DrainWorker)
    assert control_key(message) == "drain/w3"


async def test_commands_sent_while_no_coordinator_lives_are_carried_out_once_and_in_order() -> None:
    bus = new_bus()
    for action in ("pause", "resume", "pause"):
        await publish(bus, COMMANDS, OperatorCommand(action=action, sent_at=0.0))
    for _ in range(2):
        async with running(bus):
            await until(lambda: len(controls(bus)) == 3)
            await asyncio.sleep(0.05)
    await publish(bus, COMMANDS, OperatorCommand(action="resume", sent_at=0.0))
    async with running(bus):
        await until(lambda: len(controls(bus)) == 4)
    messages = [message for message in controls(bus) if isinstance(message, FlowControl)]
    assert [(message.mode, message.command_offset) for message in messages] == [
        ("pause", 0),
        ("run", 1),
        ("pause", 2),
        ("run", 3),
    ]


async def test_a_long_wait_of_the_trainer_asks_for_one_more_worker_once() -> None:
    bus, scaling = new_bus(), FleetScaling(FleetBounds(1, 3), overlaps=True, settle_steps=0)

    def waiting(number: int) -> StepReport:
        metrics = {"time/step": 10.0, "time/wait_for_batch": 9.0}
        return step_report(1, number).replace(metrics=metrics, group_ids=(f"g{number}",))

    async with running(bus, scaling=scaling):
        await publish(bus, HEARTBEATS, heartbeat())
        await until(lambda: any(isinstance(message, WorkerClaimed) for message in controls(bus)))
        for number in (1, 2, 3):
            await publish(bus, STEPS, waiting(number))
            await _until_announced(bus, number)
        await asyncio.sleep(0.1)
    targets = [message.workers for message in controls(bus) if isinstance(message, FleetTarget)]
    assert targets == [2]


def _announced(bus: MemoryBus) -> int:
    versions = [message.version.number for message in controls(bus) if isinstance(message, WeightsReady)]
    return max(versions, default=0)


async def _until_announced(bus: MemoryBus, number: int) -> None:
    await until(lambda: _announced(bus) == number)


async def test_a_command_about_policies_changes_nothing_where_there_is_one() -> None:
    bus = new_bus()
    await publish(bus, STEPS, step_report(1, 0))
    for action in ("attach", "promote", "detach", "split"):
        await publish(bus, COMMANDS, OperatorCommand(action=action, policy="rloo", sent_at=0.0))
    await publish(bus, COMMANDS, OperatorCommand(action="pause", sent_at=0.0))
    async with running(bus):
        await until(lambda: len(controls(bus)) == 2)
    assert {type(message) for message in controls(bus)} == {WeightsReady, FlowControl}
