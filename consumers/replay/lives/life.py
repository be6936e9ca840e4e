"""What can be told of one trajectory: its record, and the hops of its life in the order of their times. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from schemas.identifiers import PolicyVersion
from schemas.messages.control import WeightsReady
from schemas.messages.prompts import WorkOrder
from schemas.messages.reports import Heartbeat, SkipRecord
from schemas.messages.trajectories import Trajectory


@dataclass(frozen=True)
class Hop:
    """Something that happened: when (seconds since the epoch), and the seconds since the hop before."""

    at: float
    what: str
    detail: str
    since: float | None = None


@dataclass(frozen=True)
class Appearance:
    """A record of the trajectory. ``fate``: trained, skipped, pending, or left over, in the surviving chain."""

    partition: int
    offset: int
    appended_at: float
    fate: str


@dataclass(frozen=True)
class Life:
    """``trajectory``: as in the first of its records."""

    trajectory: Trajectory
    appearances: tuple[Appearance, ...]
    hops: tuple[Hop, ...]


def in_order(hops: Iterable[Hop]) -> tuple[Hop, ...]:
    """By time, each with the seconds since the one before."""
    ordered = sorted(hops, key=lambda hop: hop.at)
    return tuple(
        replace(hop, since=None if number == 0 else hop.at - ordered[number - 1].at)
        for number, hop in enumerate(ordered)
    )


def ordered_hop(order: WorkOrder) -> Hop:
    """The dispatcher asks a worker for it."""
    estimate = order.estimate
    return Hop(
        order.created_at,
        "ordered",
        f"worker {order.worker_id}, attempt {order.attempt}, prompt position {order.position}, estimated "
        f"{estimate.median} tokens (upper {estimate.upper}, bucket {estimate.bucket}, by {estimate.predictor}), "
        f"admitted at {order.admitted_version}",
    )


def worker_hops(trajectory: Trajectory) -> list[Hop]:
    """What its worker says."""
    tokens, seconds = len(trajectory.token_ids), trajectory.finished_at - trajectory.started_at
    rate = f", {tokens / seconds:.0f} tokens/s" if seconds > 0 else ""
    return [
        Hop(trajectory.started_at, "started", f"worker {trajectory.worker_id}, attempt {trajectory.attempt}"),
        Hop(
            trajectory.finished_at,
            "finished",
            f"{tokens} tokens (predicted {trajectory.predicted_length}), {trajectory.finish_reason.value}{rate}",
        ),
    ]


def skipped_hop(row: SkipRecord, *, counts: bool) -> Hop:
    """The trainer does not train it."""
    undone = "" if counts else "; undone by a crash"
    return Hop(row.sent_at, "skipped", f"{row.reason.value} at step {row.step}: {row.detail or 'no detail'}{undone}")


def announced_hop(message: WeightsReady, version: PolicyVersion) -> Hop:
    """The coordinator tells the workers of weights that contain it."""
    later = "" if message.version == version else ", which contains it"
    return Hop(message.sent_at, "weights announced", f"version {message.version}{later}")


def adopted_hop(beat: Heartbeat, version: PolicyVersion) -> Hop:
    """The first worker that was seen on the weights."""
    later = "" if beat.version == version else f" (already {beat.version})"
    return Hop(beat.sent_at, "weights in use", f"first seen on worker {beat.worker_id}{later}")
