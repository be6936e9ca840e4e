"""What each side holds when a trajectory ends: typed arrays for us, lists for the peers. Same values, one seed.

Texts are left empty on both sides: what is carried is token ids, log-probabilities and which of the tokens to train.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.schemas.identifiers import PolicyVersion, make_group_id, make_prompt_id, make_trajectory_id
from streamrl.schemas.trajectories import FinishReason, Trajectory, VersionSpan

PROMPT_TOKENS = 32
VOCABULARY = 151_936
GROUP_SIZE = 8
DISTINCT = 64
"""Different trajectories per size; the stream repeats them, so that the lists of 5,000 need not fit in memory."""
MASKED = -100
VERSION = PolicyVersion(1, 20)


@dataclass(frozen=True)
class Ended:
    """A completion as the generation loop leaves it."""

    prompt_token_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    loss_mask: NDArray[np.uint8]


def ended_trajectories(tokens: int, seed: int) -> list[Ended]:
    """``DISTINCT`` completions of ``tokens`` tokens, as typed arrays."""
    random = np.random.default_rng([seed, tokens])
    return [
        Ended(
            prompt_token_ids=random.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32),
            token_ids=random.integers(0, VOCABULARY, tokens, dtype=np.int32),
            logprobs=-random.exponential(0.5, tokens).astype(np.float32),
            loss_mask=np.ones(tokens, np.uint8),
        )
        for _ in range(DISTINCT)
    ]


@lru_cache(maxsize=8)
def _order_of(prompt: int) -> tuple[str, str]:
    """The names that came with the work order of a group."""
    prompt_id = make_prompt_id("bench", prompt)
    return prompt_id, make_group_id(prompt_id, 0)


def as_message(ended: Ended, index: int) -> Trajectory:
    """Our record of a completion."""
    prompt_id, group_id = _order_of(index // GROUP_SIZE)
    sample_index = index % GROUP_SIZE
    now = time.time()
    return Trajectory(
        trajectory_id=make_trajectory_id(group_id, sample_index),
        group_id=group_id,
        prompt_id=prompt_id,
        dataset="bench",
        sample_index=sample_index,
        num_generations=GROUP_SIZE,
        prompt_token_ids=ended.prompt_token_ids,
        token_ids=ended.token_ids,
        logprobs=ended.logprobs,
        loss_mask=ended.loss_mask,
        version_spans=(VersionSpan(version=VERSION, start=0, end=len(ended.token_ids)),),
        finish_reason=FinishReason.STOP,
        prompt_text="",
        completion_text="",
        rewards={"accuracy": 1.0},
        temperature=1.0,
        bucket=0,
        predicted_length=len(ended.token_ids),
        worker_id="bench-0",
        attempt=0,
        admitted_version=VERSION,
        created_at=now,
        started_at=now,
        finished_at=now,
    )


def index_of(trajectory: Trajectory) -> int:
    """The position in the stream that ``as_message`` was given."""
    return int(trajectory.prompt_id.partition("/")[2]) * GROUP_SIZE + trajectory.sample_index


@dataclass(frozen=True)
class Lists:
    """The same completion as a peer's worker holds it: a list of ids and a list of log-probabilities."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


def as_lists(ended: Ended) -> Lists:
    """The values of a completion as Python numbers."""
    return Lists(ended.prompt_token_ids.tolist(), ended.token_ids.tolist(), ended.logprobs.tolist())


def as_record(lists: Lists, index: int) -> dict[str, Any]:
    """The peer's record: PipelineRL's training text as the dictionary that its actor dumps."""
    return {
        "text": "",
        "n_predicted": len(lists.token_ids),
        "reward": 1.0,
        "logprobs": lists.logprobs,
        "ref_logprobs": [],
        "input_ids": lists.prompt_token_ids + lists.token_ids,
        "labels": [MASKED] * len(lists.prompt_token_ids) + lists.token_ids,
        "group_id": f"bench_{index // GROUP_SIZE}",
        "finished": True,
        "prompt_tokens": len(lists.prompt_token_ids),
        "output_tokens": len(lists.token_ids),
        "visual_features": None,
        "metadata": {"model_version": 20, "rollout_index": index % GROUP_SIZE, "step_index": 0},
    }


def to_arrays(record: dict[str, Any]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """What the peer's trainer needs of a record: ids, labels and log-probabilities as arrays."""
    return (
        np.asarray(record["input_ids"], dtype=np.int32),
        np.asarray(record["labels"], dtype=np.int32),
        np.asarray(record["logprobs"], dtype=np.float32),
    )
