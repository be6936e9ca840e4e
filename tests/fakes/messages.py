"""Messages of a run, with only what differs spelled out."""

from typing import Any

import numpy as np

from streamrl.schemas.identifiers import PolicyVersion, make_trajectory_id
from streamrl.schemas.reports import Heartbeat, SkipReason, SkipRecord, StepReport, WorkerState
from streamrl.schemas.trajectories import (
    FinishReason,
    LengthEstimate,
    Prompt,
    SamplingParams,
    Trajectory,
    VersionSpan,
    WorkOrder,
)

FIRST = PolicyVersion(1, 0)


def heartbeat(worker: str = "w0", **changes: Any) -> Heartbeat:
    """Of a worker that is ready and runs nothing, but for the changes."""
    return Heartbeat(
        worker_id=worker,
        incarnation="a",
        state=WorkerState.READY,
        engine="fake",
        version=FIRST,
        capacity=8,
        running=0,
        waiting=0,
        generated_tokens=0,
        finished_trajectories=0,
        tokens_per_s=0.0,
        sequence=0,
        sent_at=0.0,
    ).replace(**changes)


def step_report(lineage: int = 1, number: int = 0, **changes: Any) -> StepReport:
    """Of a step that trained nothing, but for the changes; so is the first one of a trainer."""
    return StepReport(
        algorithm="grpo",
        step=number,
        version=PolicyVersion(lineage, number),
        manifest_sha256=None,
        group_ids=(),
        micro_batches=(),
        metrics={},
        sent_at=0.0,
    ).replace(**changes)


def skip_record(offset: int = 0, **changes: Any) -> SkipRecord:
    """Of a record of partition 0 that is too old, but for the changes."""
    return SkipRecord(
        algorithm="grpo",
        reason=SkipReason.STALE,
        trajectory_id=None,
        group_id=None,
        partition=0,
        offset=offset,
        step=0,
        sent_at=0.0,
    ).replace(**changes)


def work_order(group_id: str = "d/0/0", samples: int = 2, **changes: Any) -> WorkOrder:
    """For all samples of a group, whose prompt has its position in its name."""
    prompt_id = group_id.rpartition("/")[0]
    dataset, _, index = prompt_id.rpartition("/")
    return WorkOrder(
        group_id=group_id,
        worker_id="w0",
        position=int(index),
        prompt=Prompt(prompt_id=prompt_id, dataset=dataset, content="question"),
        estimate=LengthEstimate(median=8, upper=16, bucket=1, predictor="constant"),
        sampling=SamplingParams(max_completion_length=16),
        num_generations=samples,
        sample_indices=tuple(range(samples)),
        partition=0,
        admitted_version=FIRST,
        created_at=0.0,
    ).replace(**changes)


def trajectory(group_id: str = "d/0/0", index: int = 0, tokens: int = 4, **changes: Any) -> Trajectory:
    """Of so many tokens, by ``version`` (the first) at the moment ``created_at`` (0), but for the changes."""
    version, moment = changes.pop("version", FIRST), changes.pop("created_at", 0.0)
    prompt_id = group_id.rpartition("/")[0]
    fields: dict[str, Any] = {
        "trajectory_id": make_trajectory_id(group_id, index),
        "group_id": group_id,
        "prompt_id": prompt_id,
        "dataset": prompt_id.rpartition("/")[0],
        "sample_index": index,
        "num_generations": 2,
        "prompt_token_ids": np.array([1, 2, 3], "<i4"),
        "token_ids": np.arange(10, 10 + tokens, dtype="<i4"),
        "logprobs": -np.arange(1, tokens + 1, dtype="<f4"),
        "loss_mask": np.ones(tokens, "<u1"),
        "version_spans": (VersionSpan(version=version, start=0, end=tokens),) if tokens else (),
        "finish_reason": FinishReason.STOP,
        "prompt_text": "",
        "completion_text": "",
        "rewards": {"exact": float(index)},
        "temperature": 1.0,
        "bucket": 0,
        "predicted_length": 4,
        "worker_id": "w0",
        "attempt": 0,
        "admitted_version": version,
        "created_at": moment,
        "started_at": moment,
        "finished_at": moment,
    }
    return Trajectory(**fields | changes)
