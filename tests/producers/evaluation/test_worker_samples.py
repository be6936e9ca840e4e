"""A worker's samples of held-out prompts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from streamrl.producers.evaluation.worker_samples import DECLINED_S, EvaluationSlots
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.schemas.control import ArmShare, ArmWeights, PolicySplit
from streamrl.schemas.evaluation import EvaluationOrder
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.topics import EVALUATION_ORDERS, EVALUATION_SAMPLES
from streamrl.schemas.trajectories import FinishReason, Prompt, Trajectory
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import until
from tests.producers.generation.factories import WORKER, work_order
from tests.producers.generation.worker_harness import V0, MakeWorker, WorkerHarness
from tests.progress import within


def evaluation_order(index: int = 0, *, samples: int = 1, **changes: Any) -> EvaluationOrder:
    order = work_order(index, samples=samples)
    fields = {name: getattr(order, name) for name in ("prompt", "sampling", "num_generations", "sample_indices")}
    return EvaluationOrder(
        group_id=f"evaluation:set/{index}/1-0", worker_id=WORKER, incarnation="", version=V0, created_at=1.0, **fields
    ).replace(**changes)


async def test_evaluation_never_waits_for_training_and_training_is_not_held_up(make_worker: MakeWorker) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4), side_work=[EvaluationSlots(2)])
    await it.ready()
    incarnation = it.heartbeats[-1].incarnation
    for index in range(4):
        await it.send(EVALUATION_ORDERS, evaluation_order(index, incarnation=incarnation), "k")
    # For another worker, for a process that has ended, and one that was sent before.
    await it.send(EVALUATION_ORDERS, evaluation_order(7, incarnation=incarnation, worker_id="other"), "k")
    await it.send(EVALUATION_ORDERS, evaluation_order(8, incarnation="gone"), "k")
    await it.send(EVALUATION_ORDERS, evaluation_order(0, incarnation=incarnation), "k")
    await until(lambda: it.engine.running == 2)
    await it.order(work_order(9, samples=2))
    await until(lambda: it.engine.running == 4)  # they wait for nothing of the evaluation's
    beats = len(it.heartbeats)
    await until(lambda: len(it.heartbeats) > beats + 1)
    assert it.heartbeats[-1].running == 2
    it.engine.release.set()
    await until(lambda: len(it.read(EVALUATION_SAMPLES)) == 4)
    await until(lambda: len(it.trajectories) == 2)
    names = {message.trajectory_id for message in it.read(EVALUATION_SAMPLES) if isinstance(message, Trajectory)}
    assert names == {f"evaluation:set/{index}/1-0/0" for index in range(4)}
    assert it.heartbeats[-1].finished_trajectories <= 2
    assert {one.group_id for one in it.trajectories} == {work_order(9).group_id}


async def test_a_prompt_that_cannot_be_sampled_counts_and_unfinished_samples_are_dropped(
    make_worker: MakeWorker,
) -> None:
    it = make_worker(engine=FakeEngine(hold_at=4), side_work=[EvaluationSlots(2)])
    running = await it.ready()
    incarnation = it.heartbeats[-1].incarnation
    long = Prompt(prompt_id="p", dataset="d", content="x" * 99)
    await it.send(EVALUATION_ORDERS, evaluation_order(0, incarnation=incarnation, prompt=long), "k")
    await until(lambda: it.read(EVALUATION_SAMPLES))
    (refused,) = it.read(EVALUATION_SAMPLES)
    assert isinstance(refused, Trajectory)
    assert refused.finish_reason is FinishReason.ABORT
    await it.send(EVALUATION_ORDERS, evaluation_order(1, incarnation=incarnation), "k")
    await until(lambda: it.engine.running == 1)
    it.stop.set()
    await within(running, 5)
    assert it.engine.left_early == 1
    assert len(it.read(EVALUATION_SAMPLES)) == 1


async def deal_to_an_arm(it: WorkerHarness) -> PolicyVersion:
    """The worker is dealt to arm rloo, whose weights are there: their version."""
    version = PolicyVersion(1, 7)
    ready = it.relay.add(version)
    weights = ArmWeights(**ready.model_dump(exclude={"kind", "promotion"}), policy="rloo")
    arms = (ArmShare(policy="rloo", share=0.5),)
    await it.control(weights)
    await it.control(PolicySplit(sequence=9, sent_at=0.0, arms=arms, workers={WORKER: "rloo"}))
    return version


class Gated(FakeEngine):
    """Lets go on what is sampled for evaluation, and what is sampled for orders, each when told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.evaluation, self.orders = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        async for delta in super().generate(request):
            yield delta
            await (self.evaluation if request.request_id.startswith("evaluation") else self.orders).wait()


async def test_no_completion_mixes_two_policies_though_orders_come_while_evaluation_delays_an_arm(
    make_worker: MakeWorker,
) -> None:
    """Orders are idle, evaluation is not: what was on its way comes just then, and is sampled to its end before."""
    engine = Gated()
    it = make_worker(engine=engine, side_work=[EvaluationSlots(1)])
    await it.ready()
    incarnation = it.heartbeats[-1].incarnation
    await it.send(EVALUATION_ORDERS, evaluation_order(0, incarnation=incarnation), "k")
    await until(lambda: engine.running == 1)
    of_arm = await deal_to_an_arm(it)
    await until(lambda: it.heartbeats[-1].awaits == of_arm)
    await it.order(work_order(1, samples=1))
    await until(lambda: engine.running == 2)
    engine.evaluation.set()
    await until(lambda: len(it.read(EVALUATION_SAMPLES)) == 1)
    await asyncio.sleep(0.2)
    assert engine.version == V0
    engine.orders.set()
    await until(lambda: it.heartbeats[-1].policy == "rloo")
    (trajectory,) = it.trajectories
    assert (trajectory.policy, [span.version for span in trajectory.version_spans]) == ("", [V0])
    await it.order(work_order(2, samples=1))
    await until(lambda: len(it.trajectories) == 2)
    assert [(one.policy, one.version_spans[0].version) for one in it.trajectories[1:]] == [("rloo", of_arm)]


async def test_only_the_served_policy_is_evaluated_and_a_worker_of_an_arm_samples_nothing(
    make_worker: MakeWorker,
) -> None:
    """Evaluation is of the served policy: what was on its way as the worker changed is not for these weights."""
    it = make_worker(side_work=[EvaluationSlots(1)])
    await it.ready()
    await deal_to_an_arm(it)
    await until(lambda: it.heartbeats[-1].policy == "rloo")
    incarnation = it.heartbeats[-1].incarnation
    await it.send(EVALUATION_ORDERS, evaluation_order(0, incarnation=incarnation), "k")
    await until(lambda: it.heartbeats[-1].declined)
    assert it.heartbeats[-1].declined == {evaluation_order(0).group_id: 0}
    await it.order(work_order(1, samples=1))
    await until(lambda: it.trajectories)
    await asyncio.sleep(0.2)
    assert it.read(EVALUATION_SAMPLES) == []
    assert len(it.engine.requests) == 1


async def test_declined_orders_are_reported_while_a_worker_turns_to_an_arm(make_worker: MakeWorker) -> None:
    """It may have to wait for long completions before it has the arm's weights, or be dealt back before that."""
    now = 100.0
    engine = FakeEngine(hold_at=4)
    it = make_worker(engine=engine, side_work=[EvaluationSlots(1)], monotonic=lambda: now)
    await it.ready()
    await it.order(work_order(1, samples=1))
    await until(lambda: engine.running == 1)
    await deal_to_an_arm(it)
    await until(lambda: it.heartbeats[-1].awaits)
    order = evaluation_order(0, incarnation=it.heartbeats[-1].incarnation, attempt=3)
    await it.send(EVALUATION_ORDERS, order, "k")
    await until(lambda: it.heartbeats[-1].declined)
    beat = it.heartbeats[-1]
    assert (beat.policy, beat.declined) == ("", {order.group_id: 3})
    now += DECLINED_S
    await until(lambda: not it.heartbeats[-1].declined)
    engine.release.set()
