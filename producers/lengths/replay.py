"""Lets a predictor that learns, or whose buckets do, read at the start what the trajectories topic still holds.

Of a long past only the newest is read. It does not know the dispatcher; groups that are fed to the predictor in
another way are left to that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from producers.lengths.completion import Completion
from producers.lengths.learning import LearnedLengths
from producers.lengths.predictor import LengthPredictor
from schemas.errors import StreamRLError, WireError
from schemas.messages.trajectories import FinishReason, Trajectory
from schemas.ports.bus import Bus, Record
from schemas.wire.topics import TRAJECTORIES

log = structlog.get_logger()

MAX_RECORDS = 4096
MAX_BYTES = 256 << 20


@dataclass
class _Past:
    """What was read, by trajectory; repeats count once. ``oldest``: by partition, the first record's time."""

    completions: dict[str, tuple[float, Completion]] = field(default_factory=dict)
    oldest: dict[int, float] = field(default_factory=dict)
    bytes_read: int = 0

    def add(self, record: Record, skip: Callable[[str], bool]) -> None:
        self.bytes_read += len(record.value or b"")
        self.oldest.setdefault(record.partition, record.timestamp)
        try:
            message = None if record.value is None else record.message()
        except WireError:
            return
        if not isinstance(message, Trajectory) or message.finish_reason is FinishReason.ABORT:
            return
        if not skip(message.group_id):
            self.completions.setdefault(message.trajectory_id, (record.timestamp, Completion.of(message)))


async def replay(bus: Bus, run: str, predictor: LengthPredictor, *, skip: Callable[[str], bool]) -> int:
    """Feed the predictor the newest completions, oldest first; returns how many. Advice only: a broken bus ends it.

    ``skip``: groups, by id, whose completions reach the predictor otherwise.
    """
    if not isinstance(predictor, LearnedLengths) and not predictor.buckets.are_fitted:
        return 0
    try:
        completions = await _read(bus, TRAJECTORIES.full_name(run), skip)
    except StreamRLError as error:
        log.warning("lengths of the past not read", error=str(error))
        return 0
    for completion in completions:
        predictor.observe(completion)
    log.info("lengths of the past read", completions=len(completions))
    return len(completions)


async def _read(bus: Bus, topic: str, skip: Callable[[str], bool]) -> list[Completion]:
    subscription = await bus.subscribe([topic], client_id="length-replay", start="latest")
    try:
        first, ends = await subscription.beginning_offsets(), await subscription.end_offsets()
    finally:
        await subscription.close()
    each = max(1, MAX_RECORDS // max(1, sum(ends[tp] > first[tp] for tp in ends)))
    start = {tp: max(first[tp], ends[tp] - each) for tp in ends}
    past = _Past()
    subscription = await bus.subscribe([topic], client_id="length-replay", start=start)
    try:
        while past.bytes_read < MAX_BYTES:
            positions = await subscription.positions()
            if all(position >= ends[tp] for tp, position in positions.items()):
                break
            for record in await subscription.poll(timeout_s=1.0):
                past.add(record, skip)
    finally:
        await subscription.close()
    # Partitions are length buckets. Where one was cut off, older records of the others would skew what is learned.
    cut = [past.oldest[tp.partition] for tp in start if start[tp] > first[tp] and tp.partition in past.oldest]
    horizon = max(cut, default=0.0)
    ordered = sorted((pair for pair in past.completions.values() if pair[0] >= horizon), key=lambda pair: pair[0])
    return [completion for _, completion in ordered]
