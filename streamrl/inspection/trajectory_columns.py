"""A trajectory as a row of a table: the columns that the Python API and exports have in common."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from streamrl.bus.port import Record, message_of
from streamrl.schemas.trajectories import Trajectory

TURN = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("rewards", pa.map_(pa.string(), pa.float64()))],
)
"""One call of a session: it sampled tokens [``start``, ``end``) of ``token_ids``, and was given ``rewards`` itself."""
FACTS = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("dataset", pa.string()),
        ("sample_index", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        ("length", pa.int32()),
        ("predicted_length", pa.int32()),
        ("bucket", pa.int32()),
        ("finish_reason", pa.string()),
        ("policy", pa.string()),
        ("oldest_version", pa.string()),
        ("newest_version", pa.string()),
        ("worker_id", pa.string()),
        ("attempt", pa.int32()),
        ("session", pa.string()),
        ("turns", pa.list_(TURN)),
        ("created_at", pa.float64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("step", pa.int64()),
        ("skip_reason", pa.string()),
    ]
)
"""Lengths in tokens, times in seconds since the epoch; ``step`` and ``skip_reason`` both null: pending. ``policy``: the
arm of a split that sampled it, whose versions the two are; null: the served policy. ``turns`` is empty for a completion
that was asked for alone, whose ``session`` is null."""
TOKENS = (
    pa.field("prompt_token_ids", pa.list_(pa.int32())),
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field("loss_mask", pa.list_(pa.uint8())),
)
"""``token_ids``, ``logprobs`` (nats, of the behaviour policy) and ``loss_mask`` are of one length, the completion's."""
NOT_IN_THE_RECORD = frozenset({"partition", "offset", "step", "skip_reason"})
"""Columns of where a record stands, and of what became of it, which other topics tell."""
Place = tuple[int, int]
"""Partition and offset on the trajectories topic."""


def readable_columns(records: Sequence[Record]) -> dict[str, pa.Array]:
    """What trajectories say of themselves, tokens included, a row a record; null where none is."""
    rows: list[dict[str, Any]] = []
    for record in records:
        one = trajectory_in(record)
        found = {} if one is None else facts_of(one, (record.partition, record.offset), None, None)
        rows.append(found if one is None else found | {field.name: getattr(one, field.name) for field in TOKENS})
    return {
        field.name: pa.array([row.get(field.name) for row in rows], field.type)
        for field in (*FACTS, *TOKENS)
        if field.name not in NOT_IN_THE_RECORD
    }


def trajectory_in(record: Record) -> Trajectory | None:
    """None for bytes that are none."""
    message = message_of(record)
    return message if isinstance(message, Trajectory) else None


def facts_of(one: Trajectory, place: Place, step: int | None, skip_reason: str | None) -> dict[str, Any]:
    """By column, without tokens."""
    partition, offset = place
    return {
        "trajectory_id": one.trajectory_id,
        "group_id": one.group_id,
        "prompt_id": one.prompt_id,
        "dataset": one.dataset,
        "sample_index": one.sample_index,
        "prompt": one.prompt_text,
        "completion": one.completion_text,
        # Arrow builds a value of a map type from pairs.
        "rewards": list(one.rewards.items()),
        "length": len(one.token_ids),
        "predicted_length": one.predicted_length,
        "bucket": one.bucket,
        "finish_reason": one.finish_reason.value,
        "policy": one.policy or None,
        "oldest_version": str(one.oldest_version),
        "newest_version": str(one.newest_version),
        "worker_id": one.worker_id,
        "attempt": one.attempt,
        "session": one.session or None,
        "turns": [{"start": turn.start, "end": turn.end, "rewards": list(turn.rewards.items())} for turn in one.turns],
        "created_at": one.created_at,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "partition": partition,
        "offset": offset,
        "step": step,
        "skip_reason": skip_reason,
    }
