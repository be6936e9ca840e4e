"""Judges what happened on a bus, in the manner of Jepsen's Kafka workload; knows no simulation and no trainer.

The logs are the truth about what was stored. A client's view is judged against them:
- lost write: a writer was told that its record stands there, and it does not;
- aborted read: a reader was given a record of a transaction that was never committed, or one that is not there;
- internal skip: a reader was given records around one that it should have been given;
- non-monotonic poll: a reader was given a record again, or an earlier one after a later one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule, and the first place where it was broken, in words."""

    rule: str
    detail: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A writer was told that a record with this content (any hash) stands there."""

    writer: str
    topic: str
    partition: int
    offset: int
    content: int


@dataclass(frozen=True)
class Delivered:
    """What one subscription was given of a partition, in order. A subscription that seeks is a new reader."""

    reader: str
    topic: str
    partition: int
    offsets: Sequence[int]


@dataclass(frozen=True)
class BusHistory:
    """``logs``: by partition, the content by offset of every committed record, deleted ones too if they are known;
    ``first``: the oldest offset that the log still holds (0 if nothing was deleted)."""

    logs: Mapping[Place, Mapping[int, int]]
    acknowledged: Iterable[Acknowledged] = ()
    delivered: Iterable[Delivered] = ()
    first: Mapping[Place, int] = field(default_factory=dict)


def judge_bus(history: BusHistory) -> list[Problem]:
    """Every broken rule."""
    return [*_lost_writes(history), *_bad_deliveries(history)]


def _lost_writes(history: BusHistory) -> list[Problem]:
    found = []
    for ack in history.acknowledged:
        place = (ack.topic, ack.partition)
        if ack.offset < history.first.get(place, 0):
            continue
        content = history.logs.get(place, {}).get(ack.offset)
        if content != ack.content:
            what = "nothing" if content is None else "another record"
            found.append(Problem("lost write", f"{ack.writer} was told {place}@{ack.offset}; {what} is there"))
    return found


def _bad_deliveries(history: BusHistory) -> list[Problem]:
    found: list[Problem] = []
    for delivered in history.delivered:
        place = (delivered.topic, delivered.partition)
        log = history.logs.get(place, {})
        first, last = history.first.get(place, 0), -1
        for offset in delivered.offsets:
            if offset not in log and offset >= first:
                found.append(Problem("aborted read", f"{delivered.reader} was given {place}@{offset}"))
            if offset <= last:
                found.append(Problem("non-monotonic poll", f"{delivered.reader}: {place}@{offset} after {last}"))
            elif last >= 0 and offset > last + 1:
                found += _skips(delivered.reader, place, log, range(max(first, last + 1), offset))
            last = max(last, offset)
    return found


def _skips(reader: str, place: Place, log: Mapping[int, int], between: range) -> list[Problem]:
    missed = next((offset for offset in between if offset in log), None)
    return [] if missed is None else [Problem("internal skip", f"{reader} was not given {place}@{missed}")]
