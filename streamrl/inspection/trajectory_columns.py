"""A trajectory as a row of a table, with the columns that the Python API and exports share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from streamrl.bus.port import Record, message_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.trajectories import Trajectory

TURN = pa.struct(
    [("start", pa.int32()), ("end", pa.int32()), ("rewards", pa.map_(pa.string(), pa.float64()))],
)
"""One call of a session: it sampled tokens [``start``, ``end``) of ``token_ids``; ``rewards`` are this call's own."""
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
        ("ordering_probability", pa.float64()),
        ("session", pa.string()),
        ("turns", pa.list_(TURN)),
        ("created_at", pa.float64()),
        ("started_at", pa.float64()),
        ("finished_at", pa.float64()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("step", pa.int64()),
        ("advantage", pa.float64()),
        ("skip_reason", pa.string()),
    ]
)
"""Lengths are in tokens, times in seconds since the epoch. ``advantage``: that the trainer gave it in ``step``, null
if it was not trained. If ``step`` and ``skip_reason`` are both null, the
trajectory is pending. ``policy``: the arm of a split that sampled it and that the two versions belong to; null: the
served policy. ``ordering_probability``: its inverse weighs the trajectory as if every prompt were ordered; null: every
prompt was. ``session`` is null and ``turns`` is empty for a completion outside a session."""
TOKENS = (
    pa.field("prompt_token_ids", pa.list_(pa.int32())),
    pa.field("token_ids", pa.list_(pa.int32())),
    pa.field("logprobs", pa.list_(pa.float32())),
    pa.field("loss_mask", pa.list_(pa.uint8())),
)
"""``token_ids``, ``logprobs`` (nats, of the behaviour policy) and ``loss_mask``: one element per completion token."""
NOT_IN_THE_RECORD = frozenset({"partition", "offset", "step", "skip_reason"})
"""Columns for a record's position and fate, which the record itself does not contain."""
Place = tuple[int, int]
"""Partition and offset on the trajectories topic."""


class Trained(NamedTuple):
    """The step that trained a trajectory, and the advantage that it had there; None: the report does not name it."""

    step: int
    advantage: float | None


def trained_in(reports: Iterable[StepReport]) -> dict[Place, Trained]:
    """The trained trajectories of some steps, by their places."""
    # Without those that a step left out: they only counted for its advantages, and have a skip row.
    found: dict[Place, Trained] = {}
    for report in reports:
        advantages = report.advantage_of
        places = [(ref.partition, ref.offset) for ref in report.trained_refs]
        found |= {place: Trained(report.step, advantages.get(place)) for place in places}
    return found


def readable_columns(records: Sequence[Record], trained: Mapping[Place, Trained]) -> dict[str, pa.Array]:
    """Columns with the contents of trajectories, tokens included. One row per record, nulls if it does not decode.

    ``trained``: the steps that trained them, for the advantages.
    """
    rows: list[dict[str, Any]] = []
    for record in records:
        one = trajectory_in(record)
        place = record.partition, record.offset
        found = {} if one is None else facts_of(one, place, trained.get(place), None)
        rows.append(found if one is None else found | {field.name: getattr(one, field.name) for field in TOKENS})
    return {
        field.name: pa.array([row.get(field.name) for row in rows], field.type)
        for field in (*FACTS, *TOKENS)
        if field.name not in NOT_IN_THE_RECORD
    }


def trajectory_in(record: Record) -> Trajectory | None:
    """The trajectory in a record; None if there is none."""
    message = message_of(record)
    return message if isinstance(message, Trajectory) else None


def facts_of(one: Trajectory, place: Place, trained: Trained | None, skip_reason: str | None) -> dict[str, Any]:
    """A trajectory's row by column, without tokens."""
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
        "ordering_probability": one.chance.probability if one.chance else None,
        "session": one.session or None,
        "turns": [{"start": turn.start, "end": turn.end, "rewards": list(turn.rewards.items())} for turn in one.turns],
        "created_at": one.created_at,
        "started_at": one.started_at,
        "finished_at": one.finished_at,
        "partition": partition,
        "offset": offset,
        "step": None if trained is None else trained.step,
        "advantage": None if trained is None else trained.advantage,
        "skip_reason": skip_reason,
    }
