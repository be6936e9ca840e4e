"""The evaluator where another policy is promoted, on a bus in memory, among workers that the test plays."""

import asyncio
from pathlib import Path

import pytest

from streamrl.policies.dispatching import SeveralPolicyDispatch
from streamrl.schemas.control import Promotion, Served, WeightsReady
from streamrl.schemas.identifiers import PolicyVersion, scope_of
from streamrl.schemas.topics import CONTROL, STEPS
from tests.coordinator.factories import step_report
from tests.fakes.waiting import until
from tests.producers.evaluation.test_evaluator import PROMPTS, RUN, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, policies=SeveralPolicyDispatch)


def weights(sequence: int, version: PolicyVersion, promotion: Promotion | None) -> WeightsReady:
    """Weights of a policy that was promoted are announced."""
    return WeightsReady(
        sequence=sequence,
        sent_at=0.0,
        version=version,
        step=version.number - (0 if promotion is None else promotion.shift),
        manifest_sha256="0" * 64,
        relays=(),
        promotion=promotion,
    )


def served(sequence: int, policy: str, since: PolicyVersion) -> Served:
    return Served(sequence=sequence, sent_at=0.0, policy=policy, since=since)


SECOND = Promotion(policy="second", since=PolicyVersion(1, 5), lineage=2, shift=2)


async def test_after_a_promotion_the_weights_that_are_served_are_evaluated_under_their_served_versions(
    stage: Stage,
) -> None:
    stage.settings = {"samples": 1}
    scope = scope_of(RUN, "second")
    stage.bus.create_topic(STEPS.full_name(scope), 1)
    async with stage.running() as task:
        await stage.beat("w0", 1)
        await stage.send(STEPS, step_report(1, 4), scope=scope)  # nobody samples with these
        await stage.send(STEPS, step_report(2, 4), scope=scope)
        await stage.send(CONTROL, weights(1, PolicyVersion(2, 6), SECOND))
        await stage.send(STEPS, step_report(2, 6))  # of the run's own trainer, which goes on beside
        await stage.beat("w0", version=PolicyVersion(2, 6))
        await until(lambda: len(stage.orders) == PROMPTS)
        assert {order.version for order in stage.orders} == {PolicyVersion(2, 6)}
        for order in stage.orders:
            await stage.deliver(order)
        await until(lambda: stage.reports)
        # And the run's own is served again: what it did meanwhile was never sampled with.
        await stage.send(CONTROL, served(2, "policy", PolicyVersion(2, 7)))
        own = Promotion(policy="policy", since=PolicyVersion(2, 7), lineage=3, shift=2)
        await stage.send(STEPS, step_report(3, 6))
        await stage.send(CONTROL, weights(3, PolicyVersion(3, 8), own))
        await stage.beat("w0", version=PolicyVersion(3, 8))
        await until(lambda: len(stage.orders) == 2 * PROMPTS)
        for order in stage.orders[PROMPTS:]:
            await stage.deliver(order)
        await until(lambda: len(stage.reports) == 2)
        await stage.send(STEPS, step_report(3, 7, finished=True))
        await until(task.done)
    assert [line["evaluated"] for line in stage.lines] == ["2-6", "3-8"]


async def test_a_promotion_is_not_missed_while_the_past_is_read(stage: Stage) -> None:
    stage.settings = {"samples": 1}
    scope = scope_of(RUN, "second")
    stage.bus.create_topic(STEPS.full_name(scope), 1)
    await stage.send(STEPS, step_report(2, 4), scope=scope)

    async def promoted() -> None:
        await stage.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
        await stage.send(CONTROL, weights(2, PolicyVersion(2, 6), SECOND))
        await stage.beat("w0", version=PolicyVersion(2, 6))

    # Control was read by then, and the steps that are read are still those of the policy before.
    stage.bus.before[STEPS.full_name(RUN)] = promoted
    async with stage.running():
        await until(lambda: len(stage.orders) == PROMPTS)
    assert {order.version for order in stage.orders} == {PolicyVersion(2, 6)}


@pytest.mark.parametrize(("restarted", "moment"), [(False, 0.0), (False, 0.05), (True, 0.0)])
async def test_of_a_policy_that_is_served_no_longer_nothing_counts_that_was_never_announced(
    stage: Stage, restarted: bool, moment: float
) -> None:
    stage.settings = {"samples": 1}
    await stage.send(STEPS, step_report(1, 4))
    await stage.send(STEPS, step_report(1, 5))
    if restarted:
        await stage.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
    async with stage.running():
        if not restarted:
            await asyncio.sleep(moment)
            await stage.send(STEPS, step_report(1, 6))  # exported, and never announced
            await asyncio.sleep(moment)
            await stage.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
            await asyncio.sleep(0.05)
        await stage.send(STEPS, step_report(2, 6))  # its trainer goes on beside
        # Workers are quicker than the word of the promoted policy's weights is here.
        await stage.beat("w0", version=PolicyVersion(2, 6))
        await until(lambda: len(stage.orders) == PROMPTS)
        for order in stage.orders:
            await stage.deliver(order)
        await until(lambda: stage.reports)
        await stage.beat("w0", version=PolicyVersion(2, 6))
        await asyncio.sleep(0.05)
    assert {order.version for order in stage.orders} == {PolicyVersion(1, 4)}
