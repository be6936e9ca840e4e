"""A trajectory as displays need it: its frame's header and the beginning of its text, without arrays or validation.

That takes about half of the time of decoding it. Whether the record is sound is the trainer's business.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from streamrl.bus.port import Record
from streamrl.schemas.codec import beginning_of_text, header_of
from streamrl.schemas.errors import WireError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import Trajectory, total_reward

PREVIEW = 160
"""Characters of a completion that a list shows."""
NAME = 256
"""Characters of a name: whoever wrote the record may have written anything."""
_SCHEMA = ("schema", Trajectory.SCHEMA.encode())


class TrajectorySummary(NamedTuple):
    """``reward``: its total reward, None if there is none. ``oldest`` and ``newest``: weights of its tokens.

    ``policy``: the arm of a split that they are of, empty for the served policy; ``aged_from``: the number of the
    served version from which its age counts.
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


def summary_of(record: Record, reward_weights: Mapping[str, float]) -> TrajectorySummary | None:
    """None if the bytes are not a trajectory's. ``reward_weights``: see ``total_reward``."""
    if _SCHEMA not in record.headers:
        return None
    try:
        # The rest of the text, megabytes in a long completion, is neither decoded nor copied.
        fields, body = header_of(record.value, record.headers)
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
            completion=_preview(beginning_of_text(Trajectory, "completion_text", fields, body, PREVIEW + 1)),
            started_at=_time(fields["started_at"]),
            finished_at=_time(fields["finished_at"]),
            partition=record.partition,
            offset=record.offset,
            policy=policy,
            aged_from=(admitted if policy else min(versions)).number,
        )
    # Whatever else a stranger's header makes of these look-ups: the record is then not shown.
    except (WireError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _total(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    total = total_reward(rewards, weights)
    return None if total is None else _time(total)


def _time(value: Any) -> float:
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
"""Of what came at once: so many are looked into, the newest of them so many, as lists show those."""


def sampled(indices: Sequence[int], most: int = MOST, newest: int = NEWEST) -> set[int]:
    """Which of many are looked into: all if they are at most ``most``, else the newest and others evenly spread."""
    if len(indices) <= most:
        return set(indices)
    # The same ones however often the list is drawn: even steps, and no chance.
    rest = indices[: len(indices) - newest]
    wanted = most - newest
    return {*indices[len(indices) - newest :], *(rest[index * len(rest) // wanted] for index in range(wanted))}
