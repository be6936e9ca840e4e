"""Going on with another cluster: a mirror of the topic, or a restored backup, whose offsets are not those of before.

A checkpoint says by offset what is finished, which means nothing there. What it knows by name does: the topic is read
once, the first record of each finished trajectory is finished there too, and everything else is pending. Invariants,
each with a test of its name:
- what_was_finished_stays_finished: as far as the checkpoint knows its name, whatever its partition, offset and order;
- what_is_not_found_is_counted: finished records, at most, that the topic lacks or that have no name.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from streamrl.bus.history import BusHistory
from streamrl.bus.port import Bus, Record
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.consumers.ingest.ledger import KnownRecord
from streamrl.schemas.codec import peek_trajectory_id
from streamrl.schemas.reports import RecordRef

IsFinished = Callable[[str], bool]
"""Whether a checkpoint knows the trajectory of this name as trained or skipped."""


@dataclass
class Translation:
    """A checkpoint's part of the stream in the offsets of another topic.

    ``carried``: the records of finished trajectories; ``finished_before``: offsets that the checkpoint calls finished.
    """

    is_finished: IsFinished
    finished_before: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    known_records: dict[int, KnownRecord] = field(default_factory=dict)
    carried: list[RecordRef] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    @property
    def absent(self) -> int:
        """Finished records that were not found here, at most: offsets count that never held a record of a name."""
        return max(0, self.finished_before - len(self.carried))

    def add(self, name: str | None, partition: int, offset: int) -> None:
        """The next record. A second copy of a finished trajectory stays pending, to be skipped as a duplicate."""
        if name is None or name in self._seen or not self.is_finished(name):
            return
        self._seen.add(name)
        self.carried.append(RecordRef(name, partition, offset))
        self.frontier.partition(partition).done.add(offset)
        # Ascending within a partition, so the last one is the highest.
        self.known_records[partition] = KnownRecord(offset=offset, trajectory_id=name)


async def translate(bus: Bus, topic: str, client_id: str, is_finished: IsFinished, before: Frontier) -> Translation:
    """Read the whole topic and find what was finished. ``before``: the frontier in the offsets of the other cluster.

    Raises:
        BusUnavailable: no broker answers, or the topic is not there.
    """
    found = Translation(is_finished, finished_records(before))
    history = BusHistory(bus, client_id)
    # What comes before the first offsets is not here, and not waited for.
    found.frontier.begin_at({tp.partition: extent.first for tp, extent in (await history.extents(topic)).items()})
    async with aclosing(_named(history, topic)) as records:
        async for record, name in records:
            found.add(name, record.partition, record.offset)
    return found


def finished_records(frontier: Frontier) -> int:
    """Offsets that a frontier calls finished; more than records, where some offsets never held one."""
    return sum(
        found.low + sum(offset >= found.low for offset in found.done) + sum(end - first for first, end in found.passed)
        for found in frontier.partitions.values()
    )


async def _named(history: BusHistory, topic: str) -> AsyncGenerator[tuple[Record, str | None], None]:
    async with aclosing(history.records(topic)) as records:
        async for record in records:
            # A record that does not decode as a whole was finished under its name or not at all.
            yield record, peek_trajectory_id(record.value, record.headers)
