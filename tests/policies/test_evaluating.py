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
from tests.producers.evaluation.evaluator_harness import PROMPTS, RUN, EvaluatorHarness


@pytest.fixture
def harness(tmp_path: Path) -> EvaluatorHarness:
    return EvaluatorHarness(tmp_path, policies=SeveralPolicyDispatch)


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
    harness: EvaluatorHarness,
) -> None:
    harness.settings = {"samples": 1}
    scope = scope_of(RUN, "second")
    harness.bus.create_topic(STEPS.full_name(scope), 1)
    async with harness.running() as task:
        await harness.beat("w0", 1)
        await harness.send(STEPS, step_report(1, 4), scope=scope)  # nobody samples with these
        await harness.send(STEPS, step_report(2, 4), scope=scope)
        await harness.send(CONTROL, weights(1, PolicyVersion(2, 6), SECOND))
        await harness.send(STEPS, step_report(2, 6))  # of the run's own trainer, which goes on beside
        await harness.beat("w0", version=PolicyVersion(2, 6))
        await until(lambda: len(harness.orders) == PROMPTS)
        assert {order.version for order in harness.orders} == {PolicyVersion(2, 6)}
        for order in harness.orders:
            await harness.deliver(order)
        await until(lambda: harness.reports)
        # And the run's own is served again: what it did meanwhile was never sampled with.
        await harness.send(CONTROL, served(2, "policy", PolicyVersion(2, 7)))
        own = Promotion(policy="policy", since=PolicyVersion(2, 7), lineage=3, shift=2)
        await harness.send(STEPS, step_report(3, 6))
        await harness.send(CONTROL, weights(3, PolicyVersion(3, 8), own))
        await harness.beat("w0", version=PolicyVersion(3, 8))
        await until(lambda: len(harness.orders) == 2 * PROMPTS)
        for order in harness.orders[PROMPTS:]:
            await harness.deliver(order)
        await until(lambda: len(harness.reports) == 2)
        await harness.send(STEPS, step_report(3, 7, finished=True))
        await until(task.done)
    assert [line["evaluated"] for line in harness.lines] == ["2-6", "3-8"]


async def test_a_promotion_is_not_missed_while_the_past_is_read(harness: EvaluatorHarness) -> None:
    harness.settings = {"samples": 1}
    scope = scope_of(RUN, "second")
    harness.bus.create_topic(STEPS.full_name(scope), 1)
    await harness.send(STEPS, step_report(2, 4), scope=scope)

    async def promoted() -> None:
        await harness.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
        await harness.send(CONTROL, weights(2, PolicyVersion(2, 6), SECOND))
        await harness.beat("w0", version=PolicyVersion(2, 6))

    # Control was read by then, and the steps that are read are still those of the policy before.
    harness.bus.before[STEPS.full_name(RUN)] = promoted
    async with harness.running():
        await until(lambda: len(harness.orders) == PROMPTS)
    assert {order.version for order in harness.orders} == {PolicyVersion(2, 6)}


@pytest.mark.parametrize(("restarted", "moment"), [(False, 0.0), (False, 0.05), (True, 0.0)])
async def test_unannounced_versions_of_a_former_served_policy_are_ignored(
    harness: EvaluatorHarness, restarted: bool, moment: float
) -> None:
    harness.settings = {"samples": 1}
    await harness.send(STEPS, step_report(1, 4))
    await harness.send(STEPS, step_report(1, 5))
    if restarted:
        await harness.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
    async with harness.running():
        if not restarted:
            await asyncio.sleep(moment)
            await harness.send(STEPS, step_report(1, 6))  # exported, and never announced
            await asyncio.sleep(moment)
            await harness.send(CONTROL, served(1, "second", PolicyVersion(1, 5)))
            await asyncio.sleep(0.05)
        await harness.send(STEPS, step_report(2, 6))  # its trainer goes on beside
        # Workers are quicker than the word of the promoted policy's weights is here.
        await harness.beat("w0", version=PolicyVersion(2, 6))
        await until(lambda: len(harness.orders) == PROMPTS)
        for order in harness.orders:
            await harness.deliver(order)
        await until(lambda: harness.reports)
        await harness.beat("w0", version=PolicyVersion(2, 6))
        await asyncio.sleep(0.05)
    assert {order.version for order in harness.orders} == {PolicyVersion(1, 4)}
