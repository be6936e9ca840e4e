"""Trajectories and samples with only what a test cares about spelled out."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streamrl.consumers.batching.micro_batches import Sample, TrainingSample
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import Trajectory, VersionSpan
from tests.fakes import messages

V0 = PolicyVersion(1, 0)


def trajectory(
    group_id: str = "d/0/0",
    index: int = 0,
    *,
    of: int = 2,
    tokens: int = 3,
    prompt: int = 2,
    versions: Sequence[PolicyVersion] = (V0,),
    rewards: Mapping[str, float | None] | None = None,
    created_at: float = 0.0,
    **changes: Any,
) -> Trajectory:
    """Completion of ``tokens`` tokens, shared evenly by ``versions``."""
    edges = np.linspace(0, tokens, len(versions) + 1).astype(int).tolist()
    spans = [
        VersionSpan(version=version, start=start, end=end)
        for version, start, end in zip(versions, edges, edges[1:], strict=False)
        if end > start
    ]
    fields: dict[str, Any] = {
        "num_generations": of,
        "prompt_token_ids": np.arange(1, prompt + 1, dtype="<i4"),
        "version_spans": tuple(spans),
        "rewards": {"exact": float(index)} if rewards is None else dict(rewards),
        "version": versions[0],
        "created_at": created_at,
    }
    return messages.trajectory(group_id, index, tokens, **fields | changes)


def sample(group_id: str = "d/0/0", index: int = 0, *, offset: int = 0, partition: int = 0, **changes: Any) -> Sample:
    found = trajectory(group_id, index, **changes)
    return Sample(found, RecordRef(found.trajectory_id, partition, offset), reward=float(index))


def training_sample(index: int, *, prompt: int = 2, tokens: int = 3, advantage: float = 1.0) -> TrainingSample:
    return TrainingSample(sample("d/0/0", index, of=10_000, offset=index, prompt=prompt, tokens=tokens), advantage)
