"""Decides which records are settled, and which settled records are no longer settled. Pure.

Invariant settling_changes_no_verdict: judging the unsettled records and adding the tallies of the settled ones always
gives the same report as judging all records. It holds because a settled record alone breaks no rule. Several events
could make it break one: a second fate, a second record of its name that is trained, a crash or a restore that undoes
its step, another cluster, a checkpoint that disagrees with it. Each of them unpacks the record before it is judged.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.checks import (
    FinishedOffsets,
    Judgement,
    NewestCheckpoint,
    algorithms_of,
    frontiers_of,
    is_contained,
    newest_checkpoint,
    table_of,
)
from streamrl.inspection.audit.columns import PARTITION_SHIFT, Hashes, Ints, Mask, RecordEntries
from streamrl.inspection.audit.index import TRAINED, AuditIndex, counted_by
from streamrl.inspection.audit.lineages import missing_steps
from streamrl.inspection.audit.settled import (
    SettledFates,
    SettledRecords,
    SettledSegment,
    bounds_of,
    intervals_of,
    pack,
)
from streamrl.inspection.audit.table import AuditTable, ProducedRecords
from streamrl.schemas.lineage import LineageChain


def unsettle(settled: SettledRecords, index: AuditIndex, manifests: Sequence[CheckpointManifest]) -> None:
    """Unpack every segment that the index or a checkpoint affects. Call it before judging."""
    names = algorithms_of(index, manifests)
    if settled.segments and tuple(names) != settled.algorithms:
        # To an algorithm that starts later, every record is pending.
        settled.unpack(list(settled.segments), index)
    # An unpacked segment may affect others.
    while touched := _touched(settled, index, names, manifests):
        settled.unpack(touched, index)


def _touched(
    settled: SettledRecords, index: AuditIndex, names: Iterable[str], manifests: Sequence[CheckpointManifest]
) -> set[int]:
    if not settled.segments:
        return set()
    found: set[int] = set()
    produced = ProducedRecords(index.trajectories)
    for name in names:
        table = table_of(name, index, produced)
        newest = newest_checkpoint(table.index, table.chain, name, manifests).manifest
        found |= settled.holding(table.index.entries.keys()[~table.is_range])
        found |= settled.trained(name, table.chosen_hashes[table.codes == TRAINED]).keys()
        frontiers = {} if newest is None else frontiers_of(newest)
        for number, segment in settled.segments.items():
            fates = segment.fates[name]
            if not _survives(fates, table.chain) or (
                newest is not None and not (_contains(newest, fates) and _finishes(frontiers, segment))
            ):
                found.add(number)
    return found


def _survives(fates: SettledFates, chain: LineageChain) -> bool:
    """Whether the same entries count as when the segment was packed."""
    codes, lineages, numbers, _ = fates.undone.T
    counted = all(bounds.is_within(chain.link(lineage)) for lineage, bounds in fates.counted.items())
    return counted and not np.any(counted_by(chain, codes, lineages, numbers))


def _contains(manifest: CheckpointManifest, fates: SettledFates) -> bool:
    """Whether the checkpoint contains all of these fates."""
    number, rows = manifest.policy_version.number, manifest.skips.count
    return all(
        lineage < manifest.lineage
        or (lineage == manifest.lineage and bounds.last_step <= number and bounds.last_row <= rows)
        for lineage, bounds in fates.counted.items()
    )


def _finishes(frontiers: Mapping[int, FinishedOffsets], segment: SettledSegment) -> bool:
    """Whether the checkpoint's frontiers call all records of the segment finished."""
    for begin, end in zip(segment.begins.tolist(), segment.ends.tolist(), strict=True):
        partition, base = begin >> PARTITION_SHIFT, begin >> PARTITION_SHIFT << PARTITION_SHIFT
        frontier = frontiers.get(partition, NOTHING)
        # Nearly always, all offsets lie below the low mark.
        if end - base > frontier.low and not np.all(frontier.finished(np.arange(begin - base, end - base))):
            return False
    return True


NOTHING = FinishedOffsets(0, [])
"""The finished offsets of a partition that is not in the checkpoint."""


def settle(settled: SettledRecords, index: AuditIndex, judgement: Judgement, at_least: int = 1) -> int:
    """Pack the records that this judgement settles, if they are ``at_least`` so many. Returns the number packed."""
    keys = _settled_keys(judgement)
    if len(keys) < max(1, at_least):
        return 0
    names = tuple(sorted(judgement.tables))
    produced = index.trajectories.take(keys)
    fates, entries = {}, {}
    for name, (table, _) in judgement.tables.items():
        mine = np.isin(table.index.entries.keys(), keys) & ~table.is_range
        fates[name], entries[name] = _fates_of(table, mine, keys), index.of(name).take(mine)
    hashes = produced.names.hashes()
    nameless = int(np.count_nonzero(hashes == 0))
    packed = pack(produced, entries)
    settled.keep(SettledSegment(*intervals_of(keys), len(produced), nameless, fates, packed))
    settled.algorithms = names
    settled.produced.include(hashes[hashes != 0])
    _settle_orders(settled, index)
    return len(keys)


def _settle_orders(settled: SettledRecords, index: AuditIndex) -> None:
    ordered = index.orders.hashes
    there = settled.produced.holds(ordered)
    settled.ordered.include(ordered[there])
    index.orders.forget(ordered[there])


def _settled_keys(judgement: Judgement) -> Ints:
    """Sorted positions whose records have one sound fate, in the newest checkpoint, in every algorithm."""
    common: Ints | None = None
    for table, newest in judgement.tables.values():
        keys = _settled_keys_of(table, newest)
        common = keys if common is None else np.intersect1d(common, keys, assume_unique=True)
    return np.zeros(0, dtype=np.int64) if common is None else common


def _settled_keys_of(table: AuditTable, newest: NewestCheckpoint) -> Ints:
    if newest.manifest is None:
        return np.zeros(0, dtype=np.int64)
    keys, known = table.keys, table.at >= 0
    good: Mask = is_contained(table, newest.manifest)[table.chosen] & (known | table.expired)
    good &= _frontier_holds(newest.manifest, keys)
    good[known] &= table.produced.hashes[table.at[known]] == table.chosen_hashes[known]
    good &= ~_named_again(table.chosen_hashes, table.codes == TRAINED, keys)
    good &= _in_sound_lineages(table)
    values, first, counts = np.unique(keys, return_index=True, return_counts=True)
    single = counts == 1
    found = values[single & good[first]]
    # An entry of a lineage that has not announced itself yet is neither counted nor undone.
    unannounced = table.index.entries.keys()[table.all_lineages > table.chain.newest]
    return np.setdiff1d(found, unannounced, assume_unique=False)


def _frontier_holds(manifest: CheckpointManifest, keys: Ints) -> Mask:
    partitions, holds = keys >> PARTITION_SHIFT, np.zeros(len(keys), dtype=np.bool_)
    frontiers = frontiers_of(manifest)
    for partition in np.unique(partitions).tolist():
        own = partitions == partition
        holds[own] = frontiers.get(partition, NOTHING).finished(keys[own] - (partition << PARTITION_SHIFT))
    return holds


def _named_again(hashes: Hashes, trained: Mask, keys: Ints) -> Mask:
    """Whether a record of the same name was trained elsewhere."""
    order = np.lexsort((keys[trained], hashes[trained]))
    names, places = hashes[trained][order], keys[trained][order]
    twice = (names[1:] == names[:-1]) & (places[1:] != places[:-1]) & (names[1:] != 0)
    again: Mask = trained & np.isin(hashes, names[1:][twice])
    return again


def _in_sound_lineages(table: AuditTable) -> Mask:
    """Which entries come before any missing step of their lineage, and after every break in the chain of lineages."""
    sound: Mask = np.ones(len(table.chosen), dtype=np.bool_)
    for lineage, number in missing_steps(table):
        sound &= (table.lineages != lineage) | (table.numbers < number) | (table.codes != TRAINED)
    for broken in table.chain.broken:
        sound &= table.lineages > broken.lineage
    return sound


def _fates_of(table: AuditTable, mine: Mask, keys: Ints) -> SettledFates:
    entries: RecordEntries = table.index.entries
    counted = np.isin(table.keys, keys)
    codes, expired = table.codes[counted], table.expired[counted]
    lost = np.column_stack((table.all_codes, table.all_lineages, table.all_numbers))[mine & ~table.counted]
    undone, sizes = np.unique(lost, axis=0, return_counts=True)
    return SettledFates(
        codes=Counter(codes[~expired].tolist()),
        expired=Counter(codes[expired].tolist()),
        counted=bounds_of(entries, mine & table.counted),
        undone=np.column_stack((undone, sizes)),
        trained=np.sort(table.chosen_hashes[counted & (table.codes == TRAINED)]),
    )
