"""Going on with another cluster: a mirror of the topic, or a restored backup, whose offsets are not those of before.

A checkpoint says by offset what is finished, which means nothing there. What it knows by name does: the topic is read
once, the first record of each finished trajectory is finished there too, and everything else is pending. Invariants,
each with a test of its name:
- what_was_finished_stays_finished: as far as the checkpoint knows its name, whatever its partition, offset and order;
- what_is_not_known_is_counted: finished trajectories that the topic lacks, and finished records without a known name.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from bus.history import BusHistory
from bus.port import Bus, Record
from consumers.ingest.frontier import Frontier, PartitionFrontier
from consumers.ingest.ledger import KnownRecord
from schemas.codec import header_of
from schemas.errors import WireError
from schemas.reports import RecordRef

PartitionOffset = tuple[int, int]
NOWHERE: PartitionOffset = (0, -1)
"""Of a finished trajectory that the topic does not hold: below every frontier, so that its name stays known."""


@dataclass
class Translation:
    """A checkpoint's part of the stream in the offsets of another topic.

    ``finished``: names of finished trajectories; ``carried``: their records, as far as they are here; ``unknown``: at
    most so many records were finished under names that are not known.
    """

    finished: frozenset[str]
    unknown: int = 0
    frontier: Frontier = field(default_factory=Frontier)
    known_records: dict[int, KnownRecord] = field(default_factory=dict)
    carried: list[RecordRef] = field(default_factory=list)
    places: dict[str, PartitionOffset] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Finished trajectories that the topic does not hold."""
        return len(self.finished) - len(self.carried)

    def begin(self, begins: Mapping[int, int]) -> None:
        """The first offset that each partition holds: what comes before it is not here, and not waited for."""
        for number, begin in begins.items():
            self.frontier.partitions[number] = PartitionFrontier(low=begin, position=begin)

    def add(self, name: str | None, partition: int, offset: int) -> None:
        """The next record. A second copy of a finished trajectory stays pending, to be skipped as a duplicate."""
        if name is None or name not in self.finished or name in self.places:
            return
        self.places[name] = (partition, offset)
        self.carried.append(RecordRef(name, partition, offset))
        self.frontier.partition(partition).done.add(offset)
        # Ascending within a partition, so the last one is the highest.
        self.known_records[partition] = KnownRecord(offset=offset, trajectory_id=name)

    def all_places(self) -> dict[str, PartitionOffset]:
        """Where every finished trajectory stands, or ``NOWHERE``."""
        return {name: self.places.get(name, NOWHERE) for name in self.finished}


async def translate(bus: Bus, topic: str, client_id: str, finished: Iterable[str], before: Frontier) -> Translation:
    """Read the whole topic and find what was finished. ``before``: the frontier in the offsets of the other cluster.

    Raises:
        BusUnavailable: no broker answers, or the topic is not there.
    """
    names = frozenset(finished)
    found = Translation(names, unknown=max(0, finished_records(before) - len(names)))
    history = BusHistory(bus, client_id)
    found.begin({tp.partition: extent.first for tp, extent in (await history.extents(topic)).items()})
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


async def _named(history: BusHistory, topic: str) -> AsyncIterator[tuple[Record, str | None]]:
    async with aclosing(history.records(topic)) as records:
        async for record in records:
            try:
                # The header alone: a record that does not decode as a whole was finished under its name or not at all.
                name = header_of(record.value, record.headers)[0].get("trajectory_id")
            except WireError:
                name = None
            yield record, name if isinstance(name, str) else None
