"""The first and the last trajectories of a run, read from its topic."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.errors import BusError, WireError
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Bus, Record, Subscription, TopicPartition
from schemas.wire.topics import TRAJECTORIES

PER_PARTITION = 16


@dataclass(frozen=True)
class Samples:
    """Trajectories as published: the earliest and the latest, oldest first."""

    first: tuple[Trajectory, ...] = ()
    last: tuple[Trajectory, ...] = ()


async def read_samples(bus: Bus, run: str, count: int = 12) -> Samples:
    """Read both ends of every partition; an unreadable topic gives no samples, for a report is not worth a crash."""
    topic = TRAJECTORIES.full_name(run)
    try:
        head = await bus.subscribe([topic], client_id="report", start="earliest")
        ends = await head.end_offsets()
        first = await _read(head, {tp: min(end, PER_PARTITION) for tp, end in ends.items()})
        starts = {tp: max(0, end - PER_PARTITION) for tp, end in ends.items()}
        tail = await bus.subscribe([topic], client_id="report", start=starts)
        last = await _read(tail, ends)
    except BusError:
        return Samples()
    return Samples(tuple(first[:count]), tuple(last[-count:]))


async def _read(subscription: Subscription, ends: Mapping[TopicPartition, int]) -> list[Trajectory]:
    records: list[Record] = []
    try:
        while any(position < ends[tp] for tp, position in (await subscription.positions()).items()):
            batch = await subscription.poll(max_records=PER_PARTITION, timeout_s=2.0)
            if not batch:
                break
            records += batch
    finally:
        await subscription.close()
    found = []
    for record in records:
        try:
            message = record.message()
        except WireError:
            continue
        if isinstance(message, Trajectory) and record.offset < ends[TopicPartition(record.topic, record.partition)]:
            found.append(message)
    return sorted(found, key=lambda trajectory: trajectory.finished_at)
