"""A summary of a trajectory for displays: its frame's header and the start of its text, without arrays or validation.

This takes about half the time of decoding the record. Validation is left to the trainer.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.bus.port import Record
from streamrl.schemas.codec import split_frame, text_prefix
from streamrl.schemas.errors import WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Trajectory, total_reward

PREVIEW = 160
"""Most characters of a completion in a list."""
ROUNDING = 1e-9
"""Difference of two sums of the same rewards that comes from rounding."""
NAME = 256
"""Most characters of a name: the record's writer may have written anything."""
_SCHEMA = ("schema", Trajectory.SCHEMA.encode())


class TrajectorySummary(NamedTuple):
    """A trajectory's data for displays.

    ``reward``: its total reward; None if there is none. ``oldest`` and ``newest``: weights of its tokens. ``policy``:
    the arm of a split whose weights they are; empty for the served policy. ``aged_from``: number of the served version
    from which its age counts. ``solved``: whether its rewards are full: 1 for each with a weight above 0, or more.
    ``chance``: probability, predicted chance of no advantage, and name of the prompts that are alike, as in
    ``OrderingChance``.
    """

    trajectory_id: str
    group_id: str
    worker_id: str
    bucket: int
    predicted: int
    length: int
    reward: float | None
    oldest: PolicyVersion
    newest: PolicyVersion
    finish_reason: str
    completion: str
    started_at: float
    finished_at: float
    partition: int
    offset: int
    policy: str
    aged_from: int
    solved: bool
    chance: tuple[float, float, str] | None = None


def summary_of(record: Record, reward_weights: Mapping[str, float]) -> TrajectorySummary | None:
    """The summary of a record; None if it is not a trajectory. ``reward_weights``: see ``total_reward``."""
    if _SCHEMA not in record.headers:
        return None
    try:
        # The rest of the text, which may be megabytes, is neither decoded nor copied.
        fields, body = split_frame(record.value, record.headers)
        versions = [PolicyVersion(*map(_count, span["version"])) for span in fields["version_spans"]]
        admitted = PolicyVersion(*map(_count, fields["admitted_version"]))
        versions = versions or [admitted]
        policy = _name(fields.get("policy", ""))
        return TrajectorySummary(
            trajectory_id=_name(fields["trajectory_id"]),
            group_id=_name(fields["group_id"]),
            worker_id=_name(fields["worker_id"]),
            bucket=_count(fields["bucket"]),
            predicted=_count(fields["predicted_length"]),
            length=_count(fields["token_ids"]),
            reward=_total(fields["rewards"], reward_weights),
            oldest=min(versions),
            newest=max(versions),
            finish_reason=_name(fields["finish_reason"]),
            completion=_preview(text_prefix(Trajectory, "completion_text", fields, body, PREVIEW + 1)),
            started_at=_number(fields["started_at"]),
            finished_at=_number(fields["finished_at"]),
            partition=record.partition,
            offset=record.offset,
            policy=policy,
            aged_from=(admitted if policy else min(versions)).number,
            solved=_is_full(fields["rewards"], reward_weights),
            chance=_chance(fields.get("chance")),
        )
    # A foreign header may fail in any of these ways: then the record is not shown.
    except (WireError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _chance(given: Mapping[str, Any] | None) -> tuple[float, float, str] | None:
    if given is None:
        return None
    return _number(given["probability"]), _number(given["zero_advantage"]), _name(given["alike"])


def _total(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    total = total_reward(rewards, weights)
    return None if total is None else _number(total)


def _is_full(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> bool:
    total = total_reward(rewards, weights)
    full = sum(max(0.0, weights.get(name, 1.0)) for name in rewards)
    # A reward without any weight above 0 says nothing of success.
    return total is not None and full > 0 and total >= full - ROUNDING


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value[:NAME]


def _preview(text: str) -> str:
    return text if len(text) <= PREVIEW else text[:PREVIEW] + "…"


MOST, NEWEST = 200, 40
"""If many trajectories come at once: most to decode, and how many of those are the newest, which lists show."""


def sampled(indices: Sequence[int], most: int = MOST, newest: int = NEWEST) -> set[int]:
    """The indices to decode: all if they are at most ``most``, else the newest ones and evenly spread others."""
    if len(indices) <= most:
        return set(indices)
    # Even steps instead of a random choice, so that the result is always the same.
    rest = indices[: len(indices) - newest]
    wanted = most - newest
    return {*indices[len(indices) - newest :], *(rest[index * len(rest) // wanted] for index in range(wanted))}
