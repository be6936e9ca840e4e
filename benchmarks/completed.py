"""What a made-up trajectory says of itself, for benchmarks to which only some of it matters."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, VersionSpan

FIRST = PolicyVersion(1, 0)


def completed(
    group: str, index: int, prompt: NDArray[Any], tokens: NDArray[Any], logprobs: NDArray[Any], **others: Any
) -> dict[str, Any]:
    """The fields of a completion that ended by itself, all of it by the first weights. ``others``: what differs."""
    prompt_id, count = group.rpartition("/")[0], len(tokens)
    return {
        "trajectory_id": f"{group}/{index}",
        "group_id": group,
        "prompt_id": prompt_id,
        "dataset": prompt_id.partition("/")[0],
        "sample_index": index,
        "num_generations": 1,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "logprobs": logprobs,
        "loss_mask": np.ones(count, "<u1"),
        "version_spans": (VersionSpan(version=FIRST, start=0, end=count),),
        "finish_reason": FinishReason.STOP,
        "prompt_text": "",
        "completion_text": "",
        "rewards": {},
        "temperature": 1.0,
        "bucket": 0,
        "predicted_length": count,
        "worker_id": "benchmark",
        "attempt": 0,
        "admitted_version": FIRST,
        "created_at": 0.0,
        "started_at": 0.0,
        "finished_at": 0.0,
        **others,
    }
