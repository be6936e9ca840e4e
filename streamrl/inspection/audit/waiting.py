"""Why records are pending, as far as the topics show it. Pure."""

from dataclasses import dataclass

import numpy as np

from streamrl.inspection.audit.columns import PARTITION_SHIFT, Hashes, Ints, Mask, hash_of
from streamrl.inspection.audit.index import TRAINED, AuditIndex
from streamrl.inspection.audit.report import Waiting
from streamrl.inspection.audit.settled import SettledRecords
from streamrl.inspection.audit.table import AuditTable, ProducedRecords
from streamrl.schemas.identifiers import group_id_of


@dataclass(frozen=True)
class HashesSeen:
    """Names on the topic: ``live``, the unsettled ones' hashes, sorted, and the settled ones."""

    live: Hashes
    settled: SettledRecords

    def on_topic(self, hashes: Hashes) -> Mask:
        """Which of these names were produced."""
        found: Mask = np.isin(hashes, self.live) | self.settled.produced.holds(hashes)
        return found


def explain_pending(
    table: AuditTable, pending: Mask, index: AuditIndex, settled: SettledRecords, seen: HashesSeen
) -> dict[str, int]:
    """Number of pending records by reason. Of several reasons for a record, the first in ``Waiting`` counts."""
    produced = table.produced
    keys, hashes = produced.keys[pending], produced.hashes[pending]
    trained = table.codes == TRAINED
    undone = ~table.counted & (table.all_lineages >= table.chain.begin)
    copies = np.isin(hashes, table.chosen_hashes[trained])
    for there in settled.trained(table.algorithm, hashes).values():
        copies |= there
    reasons = {
        Waiting.UNDONE: np.isin(keys, table.index.entries.keys()[undone]),
        Waiting.COPY: copies & (hashes != 0),
        Waiting.UNFINISHED_GROUP: _group_is_unfinished(produced, np.flatnonzero(pending), index, settled, seen),
        Waiting.READ: _is_overtaken(keys, table, settled),
        Waiting.BEHIND: np.ones(len(keys), dtype=np.bool_),
    }
    counts, open_ones = {}, np.ones(len(keys), dtype=np.bool_)
    for reason, holds in reasons.items():
        counts[reason.name.lower()] = int(np.count_nonzero(open_ones & holds))
        open_ones &= ~holds
    return {name: count for name, count in counts.items() if count}


def _group_is_unfinished(
    produced: ProducedRecords, indices: Ints, index: AuditIndex, settled: SettledRecords, seen: HashesSeen
) -> Mask:
    """Whether a sample of the record's group was ordered but is not on the topic."""
    groups = [group_id_of(name) if (name := produced.name(at)) else "" for at in indices.tolist()]
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    names = [hash_of(f"{group}/{sample}") for group in numbers for sample in range(index.orders.samples)]
    samples = np.array(names, dtype=np.uint64).reshape(len(numbers), index.orders.samples)
    flat = samples.ravel()
    ordered = np.isin(flat, index.orders.hashes)
    absent: Mask = ordered & ~seen.on_topic(flat)
    missing: Mask = np.any(absent.reshape(samples.shape), axis=1, keepdims=True)[:, 0]
    which: Mask = missing[[numbers[group] for group in groups]] if groups else np.zeros(0, dtype=np.bool_)
    return which


def _is_overtaken(keys: Ints, table: AuditTable, settled: SettledRecords) -> Mask:
    """Whether a later record of the partition has a fate. If so, the record was read: partitions are read in order."""
    last = settled.last_keys()
    last |= {
        key >> PARTITION_SHIFT: max(key, last.get(key >> PARTITION_SHIFT, -1)) for key in _last_of_each(table.keys)
    }
    bounds = np.array([last.get(partition, -1) for partition in (keys >> PARTITION_SHIFT).tolist()], dtype=np.int64)
    overtaken: Mask = keys < bounds
    return overtaken


def _last_of_each(keys: Ints) -> list[int]:
    """The last position of each partition, of sorted positions."""
    partitions = keys >> PARTITION_SHIFT
    ends = np.append(partitions[1:] != partitions[:-1], True) if len(keys) else np.zeros(0, dtype=np.bool_)
    found: list[int] = keys[ends].tolist()
    return found
