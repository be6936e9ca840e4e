"""The evaluator on a bus in memory, among workers that the test plays."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.producers.evaluation.results import MAX_FAILED_IN_A_ROW, FailedRewards
from streamrl.producers.evaluation.settings import PATIENCE_S
from streamrl.schemas.control import RunFinished
from streamrl.schemas.errors import BadInput, Superseded
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport, WorkerState
from streamrl.schemas.topics import (
    CONTROL,
    STEPS,
    TRAJECTORIES,
    WORK_ORDERS,
)
from streamrl.schemas.trajectories import FinishReason
from tests.coordinator.factories import step_report
from tests.fakes.topics import records_of
from tests.fakes.waiting import until
from tests.producers.evaluation.evaluator_harness import PROMPTS, RUN, EvaluatorHarness
from tests.progress import within
from tests.schemas.examples import trajectory


@pytest.fixture
def harness(tmp_path: Path) -> EvaluatorHarness:
    return EvaluatorHarness(tmp_path)


async def test_weights_are_evaluated_by_workers_that_hold_them_and_reported_once(harness: EvaluatorHarness) -> None:
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat("w0", 0)
        # Of 16 slots a quarter are the evaluation's, and twice as many samples are sent: four prompts of two.
        await until(lambda: len(harness.orders) == 4)
        await harness.send(STEPS, step_report(1, 1))  # not due
        first = harness.orders
        assert {order.version for order in first} == {PolicyVersion(1, 0)}
        assert first[0].group_id == "evaluation:easy/0/1-0"
        await harness.deliver(first[0])
        await until(lambda: len(harness.orders) == 5)
        for order in harness.orders[1:]:
            await harness.deliver(order, float("easy" in order.group_id), newest=PolicyVersion(1, 1))
        await harness.deliver(first[0], 0.0)  # a repeat counts for nothing
        await until(lambda: harness.reports)
        await harness.send(STEPS, step_report(1, 2))
        await asyncio.sleep(0.02)
        assert len(harness.orders) == 5  # nobody holds them yet
        await harness.beat("w0", 2)
        await until(lambda: len(harness.orders) > 5)
    (report,) = harness.reports
    assert (report.version, report.prompts, report.samples, report.missing) == (PolicyVersion(1, 0), PROMPTS, 10, 0)
    assert (report.oldest, report.newest) == (PolicyVersion(1, 0), PolicyVersion(1, 1))
    assert {name: value for name, value in report.metrics.items() if "pass@" in name} == {
        "eval/easy/pass@1": 1.0,
        "eval/easy/pass@2": 1.0,
        "eval/hard/pass@1": 0.0,
        "eval/hard/pass@2": 0.0,
        "eval/pass@1": pytest.approx(0.6),
        "eval/pass@2": pytest.approx(0.6),
    }
    assert [(line["step"], line["evaluated"], line["eval/hard/pass@1"]) for line in harness.lines] == [(0, "1-0", 0.0)]


async def test_held_out_rewards_that_fail_end_the_evaluation_with_their_reason(harness: EvaluatorHarness) -> None:
    async with harness.running() as task:
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat("w0", 0)
        await until(lambda: len(harness.orders) == 4)
        fine, *failing = harness.orders
        await harness.deliver(fine)
        await until(lambda: len(harness.orders) == 5)
        for order in [*failing, harness.orders[4]]:
            await harness.deliver(order, errors={"right": "KeyError: 'solution'"})
        with pytest.raises(
            BadInput, match=r"got 8 of 10 without, the latest of .*: reward right: KeyError: 'solution'"
        ):
            await within(task, 20)
    assert not harness.reports


def test_refused_completions_and_few_failures_end_no_evaluation() -> None:
    failures = FailedRewards(max_share=0.2)
    failed: dict[str, Any] = {"rewards": {"right": None}, "reward_errors": {"right": "broke"}}
    for _ in range(MAX_FAILED_IN_A_ROW + 1):
        failures.add(trajectory(**failed, refusal="longer than 64 tokens"))
        failures.add(trajectory(**failed, finish_reason=FinishReason.ABORT))
    for _ in range(10):
        for _ in range(4):
            failures.add(trajectory(reward_errors={}))
        failures.add(trajectory(**failed))
    failures.add(trajectory(reward_errors={}))
    failures.end_version()
    for _ in range(MAX_FAILED_IN_A_ROW):
        failures.add(trajectory(**failed))
    with pytest.raises(BadInput, match=f"got {MAX_FAILED_IN_A_ROW + 1} of {MAX_FAILED_IN_A_ROW + 1} without"):
        failures.add(trajectory(**failed))


async def test_evaluation_trains_nothing(harness: EvaluatorHarness) -> None:
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat()
        await until(lambda: harness.orders)
    assert not records_of(harness.bus, RUN, WORK_ORDERS)
    assert not records_of(harness.bus, RUN, TRAJECTORIES)


async def test_every_sample_ends_or_is_given_up_after_so_many_lost_workers(harness: EvaluatorHarness) -> None:
    harness.settings = {"samples": 1}
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat("w0")
        await until(lambda: len(harness.orders) == PROMPTS)
        lost, *others = harness.orders
        for order in others:
            await harness.deliver(order)
        # Its process was replaced; then the other worker falls silent; then the third does not deliver.
        await harness.beat("w0", incarnation="b", state=WorkerState.PAUSED)
        await harness.beat("w1")
        await until(lambda: len(harness.orders) == PROMPTS + 1)
        await harness.pass_time(12.0, WorkerState.PAUSED)
        await harness.beat("w2")
        await until(lambda: len(harness.orders) == PROMPTS + 2)
        again = harness.orders[PROMPTS:]
        assert [(order.worker_id, order.group_id, order.attempt) for order in again] == [
            ("w1", lost.group_id, 1),
            ("w2", lost.group_id, 2),
        ]
        await harness.pass_time(85.0, WorkerState.READY)
        await until(lambda: harness.reports)
    (report,) = harness.reports
    assert (report.samples, report.missing) == (PROMPTS - 1, 1)
    assert report.metrics["eval/pass@1"] == pytest.approx((PROMPTS - 1) / PROMPTS)


async def test_a_declined_order_is_sent_elsewhere_at_once_and_counts_as_no_loss(harness: EvaluatorHarness) -> None:
    """It turned to an arm and back before it was heard again: its weights are the served policy's as they were."""
    harness.settings = {"samples": 1}
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat("w0")
        await until(lambda: len(harness.orders) == PROMPTS)
        await harness.deliver(harness.orders[0])
        declined = {order.group_id: 0 for order in harness.orders[:3]}
        await harness.beat("w0", declined=declined)
        await asyncio.sleep(0.02)
        assert len(harness.orders) == PROMPTS, "what it may decline as well is not sent to it"
        # More often than workers may be lost with a prompt, and one of them is heard behind its next heartbeat.
        await harness.beat("w1")
        for attempt in (1, 2, 3, 4):
            await until(lambda: len(harness.orders) == PROMPTS + 2 * attempt)  # noqa: B023
            again = harness.orders[-2:]
            assert {order.group_id for order in again} == {order.group_id for order in harness.orders[1:3]}
            assert {(order.worker_id, order.attempt) for order in again} == {(f"w{attempt}", attempt)}
            if attempt < 4:
                await harness.beat(f"w{attempt}", declined=declined | {order.group_id: attempt for order in again})
                await harness.beat(f"w{attempt}", state=WorkerState.PAUSED)
                await harness.beat(f"w{attempt + 1}")
        for order in (*harness.orders[3:PROMPTS], *again):
            await harness.deliver(order)
        await until(lambda: harness.reports)
    (report,) = harness.reports
    assert (report.samples, report.missing) == (PROMPTS, 0)


async def test_a_restarted_evaluator_orders_what_is_missing_and_a_version_is_reported_once(
    harness: EvaluatorHarness,
) -> None:
    harness.settings = {"samples": 1}
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat()
        await until(lambda: len(harness.orders) == PROMPTS)
        for order in harness.orders[:3]:
            await harness.deliver(order)
    async with harness.running():
        await harness.beat()
        await until(lambda: len(harness.orders) == PROMPTS + 2)
        assert {order.group_id for order in harness.orders[PROMPTS:]} == {o.group_id for o in harness.orders[3:PROMPTS]}
        for order in harness.orders[PROMPTS:]:
            await harness.deliver(order)
        await until(lambda: harness.lines)
    (harness.path / "metrics.jsonl").unlink()  # killed between its report and the file
    async with harness.running():
        await until(lambda: harness.lines)
        await harness.beat()
        await asyncio.sleep(0.05)
    assert len(harness.orders) == PROMPTS + 2
    assert [line["evaluated"] for line in harness.lines] == ["1-0"]
    assert len(harness.reports) == 1


async def test_only_newest_weights_are_due_of_those_that_became_so_meanwhile(harness: EvaluatorHarness) -> None:
    harness.settings = {"samples": 1}
    async with harness.running():
        await harness.send(STEPS, step_report(1, 0))
        await harness.beat("w0", 6)
        await until(lambda: len(harness.orders) == PROMPTS)
        for number in range(1, 7):
            await harness.send(STEPS, step_report(1, number))
        await asyncio.sleep(0.02)
        for order in harness.orders:
            await harness.deliver(order)
        await until(lambda: len(harness.orders) == 2 * PROMPTS)
    assert {order.version.number for order in harness.orders[PROMPTS:]} == {6}


async def test_weights_that_a_crash_undid_are_dropped_and_those_it_went_on_from_are_not_evaluated_again(
    harness: EvaluatorHarness,
) -> None:
    harness.settings = {"samples": 1}

    def resumed(lineage: int, number: int, parent: int) -> StepReport:
        return step_report(lineage, number).replace(parent=PolicyVersion(1, parent))

    async with harness.running():
        await harness.send(STEPS, step_report(1, 2))
        await harness.beat("w0", 2)
        await until(lambda: len(harness.orders) == PROMPTS)
        for order in harness.orders:
            await harness.deliver(order)
        await until(lambda: harness.reports)
        await harness.send(STEPS, step_report(1, 4))
        await harness.beat("w0", 4)
        await until(lambda: len(harness.orders) == 2 * PROMPTS)
        await harness.send(STEPS, resumed(2, 2, parent=2))
        await harness.beat("w0", version=PolicyVersion(2, 2))
        await asyncio.sleep(0.05)
        assert len(harness.orders) == 2 * PROMPTS
        await harness.send(STEPS, step_report(2, 4))
        await harness.beat("w0", version=PolicyVersion(2, 4))
        await until(lambda: len(harness.orders) == 3 * PROMPTS)
    assert {order.version for order in harness.orders[2 * PROMPTS :]} == {PolicyVersion(2, 4)}


async def test_it_ends_once_the_last_weights_are_reported_or_after_its_patience(harness: EvaluatorHarness) -> None:
    harness.settings = {"samples": 1}
    async with harness.running() as task:
        await harness.beat("w0", 4)
        await harness.send(STEPS, step_report(1, 4, finished=True))
        await until(lambda: len(harness.orders) == PROMPTS)
        await asyncio.sleep(0.02)
        assert not task.done()
        for order in harness.orders:
            await harness.deliver(order)
        await until(task.done)
    assert len(harness.reports) == 1
    async with harness.running() as task:  # of a run that was over when it began
        await until(task.done)
    await harness.send(STEPS, step_report(1, 6, finished=True))
    async with harness.running() as task:
        await harness.beat("w0", 6)
        await until(lambda: len(harness.orders) == 2 * PROMPTS)
        harness.now += PATIENCE_S + 1.0
        await until(task.done)
    assert len(harness.reports) == 1


async def test_one_evaluator_reports_and_ends_with_the_run_or_when_another_took_over(harness: EvaluatorHarness) -> None:
    await harness.send(STEPS, step_report(1, 4))
    async with harness.running() as task:
        await harness.beat("w0", 4)
        await until(lambda: harness.orders)
        await harness.send(CONTROL, RunFinished(sequence=0, sent_at=0.0, step=4, reason="test"))
        await until(task.done)
    async with harness.running() as task:
        await until(lambda: len(harness.orders) >= 1)
        await asyncio.sleep(0.02)
        await harness.bus.transactional(f"{RUN}.evaluator")
        await harness.beat("w1", 4)
        await until(task.done)
    assert isinstance(task.exception(), Superseded)
