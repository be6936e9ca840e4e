"""Messages of every kind, for tests: the golden bytes hold these values."""

from typing import TypeVar

import numpy as np

from streamrl.schemas.control import (
    ArmShare,
    ArmWeights,
    DrainWorker,
    FleetTarget,
    FlowControl,
    InstanceState,
    OperatorCommand,
    PolicySplit,
    Promotion,
    RunFinished,
    RunIdentity,
    Served,
    WeightsReady,
    WorkerClaimed,
)
from streamrl.schemas.evaluation import EvaluationOrder, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import (
    CarriedOver,
    GpuUsage,
    Heartbeat,
    InstanceBeat,
    RecordRef,
    RefusedStep,
    RelayBeat,
    ReleasedOrder,
    ResourceUsage,
    SkipReason,
    SkipRecord,
    StepReport,
    TrainerBeat,
    WorkerState,
)
from streamrl.schemas.trajectories import (
    ChatTurn,
    FinishReason,
    LengthEstimate,
    OrderingChance,
    PartialSource,
    PartialTrajectory,
    Prompt,
    ReleaseOrder,
    SamplingParams,
    TokenChunk,
    Trajectory,
    TrajectoryPart,
    Turn,
    UngradedTrajectory,
    VersionSpan,
    WorkOrder,
)

M = TypeVar("M", bound=Message)
SHA256 = "0123456789abcdef" * 4
USAGE = ResourceUsage(
    host="box",
    cores_used=1.5,
    memory_bytes=2 << 30,
    machine_cores=8,
    machine_busy=0.25,
    machine_used_bytes=5 << 30,
    machine_bytes=16 << 30,
    gpus=(GpuUsage(gpu_id="GPU-1", name="H200", busy=0.75, used_bytes=70 << 30, total_bytes=140 << 30),),
)
CHANCE = OrderingChance(probability=0.25, zero_advantage=0.5, alike="gsm8k/18")
PARTS = (
    TrajectoryPart(worker_id="worker-1", attempt=0, start=0),
    TrajectoryPart(worker_id="worker-2", attempt=1, start=2),
)


def trajectory(tokens: int = 5, **changes: object) -> Trajectory:
    """A trajectory of so many tokens, sampled by two versions if there are two."""
    half = tokens // 2
    cuts = [(PolicyVersion(1, 20), 0, half), (PolicyVersion(1, 21), half, tokens)]
    fields: dict[str, object] = {
        "trajectory_id": "gsm8k/7/0/3",
        "group_id": "gsm8k/7/0",
        "prompt_id": "gsm8k/7",
        "dataset": "gsm8k",
        "sample_index": 3,
        "num_generations": 8,
        "prompt_token_ids": np.array([151_643, 9, 0], np.int32),
        "token_ids": np.arange(tokens, dtype=np.int32) * 1000,
        "logprobs": -np.arange(tokens, dtype=np.float32) / 3,
        "loss_mask": (np.arange(tokens) % 2).astype(np.uint8),
        "version_spans": tuple(
            VersionSpan(version=version, start=start, end=end) for version, start, end in cuts if start < end
        ),
        "finish_reason": FinishReason.LENGTH,
        "prompt_text": "Was ist 2 + 2? 🙂",
        "completion_text": "vier",
        "rewards": {"accuracy": 1.0, "format": None},
        "reward_errors": {"format": "ValueError: no answer"},
        "temperature": 0.7,
        "bucket": 2,
        "predicted_length": 128,
        "worker_id": "worker-1",
        "attempt": 1,
        "admitted_version": PolicyVersion(1, 19),
        "created_at": 1_795_000_000.125,
        "started_at": 1_795_000_001.25,
        "finished_at": 1_795_000_002.5,
    }
    return Trajectory.model_validate(fields | changes)


def work_order(content: str | tuple[ChatTurn, ...]) -> WorkOrder:
    """An order for this prompt."""
    return WorkOrder(
        group_id="gsm8k/7/0",
        worker_id="worker-1",
        position=107,
        prompt=Prompt(
            prompt_id="gsm8k/7",
            dataset="gsm8k",
            content=content,
            columns={"answer": "4", "meta": {"level": 2, "tags": ["a", None, True], "weight": 0.5}},
        ),
        estimate=LengthEstimate(median=100, upper=300, bucket=2, predictor="history"),
        sampling=SamplingParams(max_completion_length=512, temperature=0.7, top_p=0.9, top_k=50, seed=11),
        num_generations=8,
        sample_indices=(0, 3, 7),
        partition=5,
        attempt=1,
        admitted_version=PolicyVersion(1, 19),
        created_at=1_795_000_000.5,
    )


def full_examples() -> dict[str, Message]:
    """Those of ``examples`` that leave fields at their defaults, once more with every field set."""
    some = few_examples()
    order = work_order("2 + 2?").replace(due_step=9, incarnation="a1b2")
    sampling = order.sampling.model_copy(
        update={"min_p": 0.05, "stop": ("\n", "END"), "include_stop_str_in_output": True}
    )
    estimate = order.estimate.model_copy(update={"boundaries_version": 3})
    ref = RecordRef("gsm8k/7/0/0", 1, 10)
    session = trajectory(
        source="request",
        session="agent/7",
        loss_mask=np.array([1, 1, 0, 0, 1], np.uint8),
        turns=(Turn(start=0, end=2, rewards={"feedback": 0.5}), Turn(start=4, end=5)),
    )
    return {
        "work-order-full": order.replace(sampling=sampling, estimate=estimate),
        "trajectory-full": trajectory(position=107, due_step=9, refusal="longer than 127 tokens"),
        "ungraded-trajectory": UngradedTrajectory.of(trajectory(), order.prompt),
        "ungraded-trajectory-full": UngradedTrajectory.of(
            trajectory(position=107, due_step=9, refusal="none", parts=PARTS, source="request"), order.prompt
        ),
        "step-report-full": some["step-report"].replace(
            left_out=(ref,),
            digests={"model.weight": "00ff" * 8},
            parent=PolicyVersion(1, 3),
            parent_skips=7,
            undoes=1,
            carried_parts=2,
            prompt_cursor=120,
            run_id="0f6ad1c2-7a53-4f3e-9d0e-1b7a4f1c2d3e",
        ),
        "step-report-credited": some["step-report"].replace(advantages=(0.5, -0.25)),
        "skip-full": some["skip"].replace(
            reason=SkipReason.RETENTION_EXPIRED, trajectory_id="gsm8k/7/0/1", end_offset=20, lineage=2, sequence=11
        ),
        "heartbeat-full": some["heartbeat"].replace(
            orders={"gsm8k/7/0": 1.5}, kv_tokens=4096, run_id="0f6ad1c2-7a53-4f3e-9d0e-1b7a4f1c2d3e", wire=2
        ),
        "trajectory-continued": trajectory(parts=PARTS),
        "trajectory-requested": trajectory(source="request"),
        "trajectory-session": session,
        "ungraded-trajectory-session": UngradedTrajectory.of(session, order.prompt),
        "work-order-continued": work_order("What is 2 + 2?").replace(
            partials=(PartialSource(partition=3, offset=1 << 40), PartialSource(partition=9, offset=0))
        ),
        "work-order-moved": work_order("What is 2 + 2?").replace(attempt=3, moves=2),
        "release-order-settled": some["release-order"].replace(groups={}, settled={"gsm8k/7/0": 2}),
        "heartbeat-released": some["heartbeat"].replace(
            released=(
                ReleasedOrder(group_id="gsm8k/7/0", attempt=2, samples=((0, 300), (3, 0))),
                ReleasedOrder(group_id="gsm8k/8/0", attempt=0, samples=()),
            ),
            awaits=PolicyVersion(2, 5),
        ),
        "heartbeat-durable": some["heartbeat"].replace(partials_from=77, wire=2),
        "heartbeat-serving": some["heartbeat"].replace(request_address="10.0.0.7:40123"),
        "run-identity-full": some["run-identity"].replace(wire=2),
        "control-flow-full": some["control-flow"].replace(mode="drain", command_offset=4),
        "control-drain-worker-full": some["control-drain-worker"].replace(command_offset=5),
        "control-fleet-target": FleetTarget(sequence=6, sent_at=1_795_000_012.0, workers=3, reason="balance"),
        "step-report-instance": some["step-report"].replace(policy="rloo"),
        "refused-step-instance": some["refused-step"].replace(policy="rloo"),
        "carried-over-instance": some["carried-over"].replace(policy="rloo"),
        "skip-instance": some["skip"].replace(policy="rloo"),
        "trainer-beat-instance": some["trainer-beat"].replace(policy="rloo"),
        "operator-command-instance": OperatorCommand(
            action="attach", policy="rloo", algorithm="rloo", reason="to compare", sent_at=1_795_000_006.0
        ),
        "operator-command-split": OperatorCommand(
            action="split", shares=(ArmShare(policy="rloo", share=0.25),), sent_at=1_795_000_006.0
        ),
        "control-split": PolicySplit(sequence=15, sent_at=1_795_000_009.0),
        "control-split-full": PolicySplit(
            sequence=16,
            sent_at=1_795_000_009.5,
            arms=(ArmShare(policy="rloo", share=0.25), ArmShare(policy="long", share=0.5)),
            workers={"worker-1": "rloo", "worker-2": "long"},
            reason="to compare",
            command_offset=9,
        ),
        "control-arm-weights": ArmWeights(
            sequence=17,
            sent_at=1_795_000_010.0,
            policy="rloo",
            version=PolicyVersion(1, 7),
            step=7,
            manifest_sha256=SHA256,
            relays=("http://relay:8765",),
            relay_hosts=("host-a",),
        ),
        "work-order-chosen": work_order("What is 2 + 2?").replace(
            chance=CHANCE, decided=((105, 0.0), (106, 1.0), (107, 0.25))
        ),
        "trajectory-chosen": trajectory(chance=CHANCE),
        "ungraded-trajectory-chosen": UngradedTrajectory.of(trajectory(chance=CHANCE), order.prompt),
        "work-order-of-an-arm": work_order("What is 2 + 2?").replace(policy="rloo"),
        "trajectory-of-an-arm": trajectory(policy="rloo"),
        "ungraded-trajectory-of-an-arm": UngradedTrajectory.of(trajectory(policy="rloo"), order.prompt),
        "partial-trajectory-of-an-arm": some["partial-trajectory"].replace(policy="rloo"),
        "heartbeat-of-an-arm": some["heartbeat"].replace(policy="rloo"),
        "heartbeat-declining": some["heartbeat"].replace(declined={"evaluation:easy/3/2-4": 1}),
        "operator-command-promote": OperatorCommand(action="promote", policy="rloo", sent_at=1_795_000_006.0),
        "heartbeat-with-usage": some["heartbeat"].replace(usage=USAGE),
        "step-report-with-usage": some["step-report"].replace(usage=USAGE),
        "step-report-promoted": some["step-report"].replace(policy="rloo", served_as=PolicyVersion(5, 41)),
        "control-weights-ready-promoted": some["control-weights-ready"].replace(
            promotion=Promotion(policy="rloo", since=PolicyVersion(4, 40), lineage=5, shift=29)
        ),
        "control-served": Served(sequence=13, sent_at=1_795_000_008.0, policy="rloo", since=PolicyVersion(4, 40)),
        "control-served-full": Served(
            sequence=13,
            sent_at=1_795_000_008.0,
            policy="rloo",
            since=PolicyVersion(4, 40),
            reason="it learns faster",
            command_offset=8,
        ),
        "control-instance": InstanceState(sequence=12, sent_at=1_795_000_007.0, policy="rloo", mode="detached"),
        "control-instance-full": InstanceState(
            sequence=12,
            sent_at=1_795_000_007.0,
            policy="rloo",
            algorithm="rloo",
            mode="pause",
            reason="to compare",
            command_offset=7,
        ),
    }


def examples() -> dict[str, Message]:
    """By name of kind; together each field is set to something that is not its default."""
    return few_examples() | full_examples()


def example(name: str, kind: type[M]) -> M:
    """The one of that name, which is of this kind."""
    found = examples()[name]
    assert isinstance(found, kind)
    return found


def few_examples() -> dict[str, Message]:
    """Of every kind; they are as they were when the first golden bytes were written."""
    return {
        "work-order": work_order("What is 2 + 2?"),
        "work-order-chat": work_order(
            (ChatTurn(role="system", content="Be brief."), ChatTurn(role="user", content="2 + 2?"))
        ),
        "token-chunk": TokenChunk(
            trajectory_id="gsm8k/7/0/3",
            worker_id="worker-1",
            start=16,
            version=PolicyVersion(2, 3),
            token_ids=np.array([5, 6], np.int32),
            logprobs=np.array([-0.5, -1.5], np.float32),
            finish_reason=FinishReason.STOP,
        ),
        "trajectory": trajectory(),
        "partial-trajectory": PartialTrajectory(
            trajectory_id="gsm8k/7/0/3",
            group_id="gsm8k/7/0",
            worker_id="worker-2",
            incarnation="a1b2",
            attempt=1,
            prompt_hash=2**63 + 5,
            start=16,
            token_ids=np.array([5, 6, 7], np.int32),
            logprobs=np.array([-0.5, -1.5, -0.25], np.float32),
            version_spans=(
                VersionSpan(version=PolicyVersion(2, 3), start=16, end=18),
                VersionSpan(version=PolicyVersion(2, 4), start=18, end=19),
            ),
            parts=PARTS,
            finish_reason=FinishReason.LENGTH,
        ),
        "release-order": ReleaseOrder(
            worker_id="worker-2",
            incarnation="a1b2",
            groups={"gsm8k/7/0": 2, "gsm8k/8/0": 0},
            sent_at=1_795_000_002.0,
        ),
        "trajectory-empty": trajectory(0, finish_reason=FinishReason.ABORT, prompt_token_ids=np.zeros(0, np.int32)),
        "trajectory-refused": trajectory(
            0,
            finish_reason=FinishReason.ABORT,
            prompt_token_ids=np.zeros(0, np.int32),
            refusal="longer than 127 tokens",
        ),
        "step-report": StepReport(
            algorithm="grpo",
            step=4,
            version=PolicyVersion(2, 4),
            manifest_sha256=SHA256,
            group_ids=("gsm8k/7/0", "gsm8k/8/0"),
            micro_batches=((RecordRef("gsm8k/7/0/0", 1, 10), RecordRef("gsm8k/7/0/1", 1, 11)), ()),
            metrics={"loss": -0.25, "reward": 0.5},
            finished=True,
            sent_at=1_795_000_003.0,
        ),
        "refused-step": RefusedStep(
            algorithm="grpo",
            step=5,
            version=PolicyVersion(2, 4),
            problem="expected a finite loss and gradient, got nan and inf",
            group_ids=("gsm8k/9/0",),
            micro_batches=((RecordRef("gsm8k/9/0/0", 1, 12),),),
            left_out=(RecordRef("gsm8k/9/0/1", 1, 13),),
            metrics={"reward": 0.5},
            sent_at=1_795_000_003.5,
        ),
        "skip": SkipRecord(
            algorithm="grpo",
            reason=SkipReason.STALE,
            detail="5 steps old, at most 4",
            trajectory_id=None,
            group_id="gsm8k/7/0",
            partition=3,
            offset=12,
            step=4,
            sent_at=1_795_000_004.0,
        ),
        "heartbeat": Heartbeat(
            worker_id="worker-1",
            incarnation="a1b2",
            state=WorkerState.DRAINING,
            engine="transformers",
            version=PolicyVersion(2, 4),
            capacity=16,
            running=3,
            waiting=1,
            generated_tokens=1234,
            finished_trajectories=5,
            tokens_per_s=99.5,
            sequence=7,
            sent_at=1_795_000_005.0,
        ),
        "trainer-beat": TrainerBeat(
            algorithm="grpo", incarnation="c3d4", version=PolicyVersion(2, 4), sequence=9, sent_at=1_795_000_005.5
        ),
        "instance-beat": InstanceBeat(
            policy="rloo-1",
            incarnation="0c1d2e3f4a5b",
            holder="process 812 on host-a",
            leaving=True,
            sequence=4,
            sent_at=1_795_000_005.6,
        ),
        "carried-over": CarriedOver(
            algorithm="grpo",
            lineage=3,
            part=1,
            records=(RecordRef("gsm8k/7/0/0", 2, 5), RecordRef("gsm8k/7/0/1", 2, 7)),
            absent=4,
            skips_hash="00ff",
            skips_by_reason={"stale": 2},
            sent_at=1_795_000_006.5,
        ),
        "run-identity": RunIdentity(
            run_id="0f6ad1c2-7a53-4f3e-9d0e-1b7a4f1c2d3e",
            adoptions=1,
            lineages_before=3,
            orphans_through=3,
            holder="host-a:/data/runs/demo",
            since=1_795_000_010.0,
        ),
        "run-identity-claimed": RunIdentity(
            run_id="0f6ad1c2-7a53-4f3e-9d0e-1b7a4f1c2d3e",
            holder="host-a:/data/runs/demo",
            since=1_795_000_010.0,
            lineage=4,
            claim_id="5c2f9a31-0d4e-4a58-8a51-3f2b6c7d8e90",
        ),
        "run-identity-changed": RunIdentity(
            run_id="0f6ad1c2-7a53-4f3e-9d0e-1b7a4f1c2d3e",
            holder="host-a:/data/runs/demo",
            since=1_795_000_010.0,
            lineage=4,
            task={"prompts": "0123456789ab", "reward house:score": "ba9876543210"},
            changed_through=3,
        ),
        "operator-command": OperatorCommand(
            action="drain_worker", worker_id="worker-1", reason="maintenance", sent_at=1_795_000_006.0
        ),
        "control-weights-ready": WeightsReady(
            sequence=1,
            sent_at=1_795_000_007.0,
            version=PolicyVersion(2, 4),
            step=4,
            manifest_sha256=SHA256,
            relays=("http://relay-0:8471",),
        ),
        "control-weights-ready-full": WeightsReady(
            sequence=1,
            sent_at=1_795_000_007.0,
            version=PolicyVersion(2, 4),
            step=4,
            manifest_sha256=SHA256,
            relays=("http://relay-0:8471", "http://relay-1:8471"),
            relay_hosts=("relay-0", "relay-1"),
        ),
        "relay-beat": RelayBeat(
            relay_id="relay-1:8471",
            incarnation="3f9a",
            address="http://relay-1:8471",
            host="relay-1",
            site="east",
            has_store=True,
            held=(PolicyVersion(2, 3), PolicyVersion(2, 4)),
            leaving=True,
            wire=2,
            sequence=3,
            sent_at=1_795_000_012.0,
        ),
        "relay-beat-arms": RelayBeat(
            relay_id="relay-1:8471",
            incarnation="3f9a",
            address="http://relay-1:8471",
            host="relay-1",
            held_of_arms={"rloo-1": (PolicyVersion(1, 7), PolicyVersion(1, 8))},
            wire=2,
            sequence=4,
            sent_at=1_795_000_012.5,
        ),
        "control-flow": FlowControl(sequence=2, sent_at=1_795_000_008.0, mode="pause", reason="operator"),
        "control-drain-worker": DrainWorker(sequence=3, sent_at=1_795_000_009.0, worker_id="worker-1", reason="old"),
        "control-worker-claimed": WorkerClaimed(
            sequence=5, sent_at=1_795_000_011.0, worker_id="worker-1", incarnation="3f9a"
        ),
        "evaluation-order": EvaluationOrder(
            group_id="evaluation:gsm8k/7/2-20",
            worker_id="worker-1",
            incarnation="a1b2",
            prompt=work_order("2 + 2?").prompt,
            sampling=SamplingParams(max_completion_length=512, temperature=0.0),
            num_generations=4,
            sample_indices=(0, 3),
            attempt=1,
            version=PolicyVersion(2, 20),
            created_at=1_795_000_013.0,
        ),
        "evaluation-report": EvaluationReport(
            version=PolicyVersion(2, 20),
            step=20,
            metrics={"eval/pass@1": 0.5, "eval/gsm8k/pass@1": 0.5},
            prompts=64,
            samples=255,
            missing=1,
            oldest=PolicyVersion(2, 20),
            newest=PolicyVersion(2, 22),
            began_at=1_795_000_013.0,
            sent_at=1_795_000_019.0,
        ),
        "control-run-finished": RunFinished(sequence=4, sent_at=1_795_000_010.0, step=9, reason="max_steps"),
    }
