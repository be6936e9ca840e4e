"""The accounting check: produced = trained + skipped + pending, per algorithm, and by name what breaks it. Pure.

Every record on the trajectories topic must be trained by exactly one surviving step, skipped by exactly one surviving
row, or pending; and what the newest checkpoint's frontier calls finished must be exactly what was trained or skipped
before it. Positions below the first offset that the topic holds are compared with each other only.

Invariants, each with a test of its name:
- every_surviving_step_is_reported: the numbers of each lineage's counted steps have no gap;
- nothing_is_trained_twice, no_record_has_two_fates, every_reference_is_right: of single records;
- nothing_finished_is_unexplained, nothing_counted_is_read_again, the_checkpoint_contains_the_rows_on_the_topic: of the
  newest surviving checkpoint.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumers.ingest.rejections import chained, end_of
from consumers.training.checkpoints.manifest import CheckpointManifest
from inspection.audit.index import (
    CARRIED,
    PARTITION_SHIFT,
    REASONS,
    TRAINED,
    AlgorithmIndex,
    AuditIndex,
    LineageChain,
    Mask,
    surviving_chain,
)
from inspection.audit.report import AlgorithmBalance, AuditReport, Violation, ViolationKind
from inspection.audit.table import EXPIRED_RANGE, PENDING, AuditTable, ProducedRecords
from inspection.audit.undone import undone_work
from schemas.reports import SkipRecord

_SEVERITY = tuple(ViolationKind)
"""Worst first: the order in which the kinds are declared."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest announced checkpoint that survives, if any. ``unannounced``: one that waits for its report."""

    manifest: CheckpointManifest | None
    unannounced: CheckpointManifest | None
    violations: tuple[Violation, ...] = ()


def check_balance(run: str, index: AuditIndex, manifests: Sequence[CheckpointManifest]) -> AuditReport:
    """The report on a run. ``manifests``: its checkpoints as they were before the topics were read."""
    produced = ProducedRecords(index.produced, index.held)
    names = sorted({*index.algorithms, *(manifest.algorithm for manifest in manifests)})
    # Hash 0 is a record without a readable name, and no trajectory of its own.
    hashes = np.unique(produced.hashes[produced.hashes != 0])
    ordered = np.fromiter(index.ordered, dtype=np.uint64, count=len(index.ordered))
    return AuditReport(
        run=run,
        produced=len(produced),
        distinct=len(hashes),
        undecodable=int(np.count_nonzero(produced.hashes == 0)),
        expired=sum(extent.first for extent in index.held.values()),
        orders=index.orders,
        ordered=len(ordered),
        ordered_unproduced=int(np.count_nonzero(~np.isin(ordered, hashes))),
        dead_letters=dict(sorted(index.dead_letters.items())),
        algorithms=tuple(_balance_of(name, index, produced, manifests) for name in names),
    )


def _balance_of(
    name: str, index: AuditIndex, produced: ProducedRecords, manifests: Iterable[CheckpointManifest]
) -> AlgorithmBalance:
    own = index.algorithms.get(name, AlgorithmIndex())
    chain = surviving_chain(own.lineage_starts, beginning_is_held=index.steps_begin)
    table = AuditTable(name, own, chain, produced)
    newest = newest_checkpoint(table, manifests)
    violations = [*check_references(table), *check_lineages(table), *newest.violations]
    forgotten = 0
    if newest.manifest is not None:
        found, forgotten = check_checkpoint(
            table, newest.manifest, rows_are_held=index.skips_begin, steps_are_held=index.steps_begin
        )
        violations = found + violations
    undone, rolled_back = undone_work(table, counted_steps(own, chain))
    here = ~table.expired
    return AlgorithmBalance(
        algorithm=name,
        produced=len(produced),
        trained=int(np.count_nonzero(here & (table.codes == TRAINED))),
        skipped=_skipped(table),
        # The frontier calls the forgotten ones finished: nobody waits for them, though nothing held says their fate.
        pending=int(np.count_nonzero(table.fates == PENDING)) - forgotten,
        expired_trained=int(np.count_nonzero(~here & (table.codes == TRAINED))),
        expired_skipped=int(np.count_nonzero(~here & (table.codes != TRAINED) & (table.codes != CARRIED))),
        expired_fates=forgotten,
        steps=len(counted_steps(own, chain)),
        refused_steps=own.refused_steps,
        lineages=tuple(link.lineage for link in chain.links),
        checkpoint=str(newest.manifest.policy_version) if newest.manifest else None,
        undone=undone,
        rolled_back=rolled_back,
        carried_over=int(np.count_nonzero(here & (table.codes == CARRIED))),
        notes=tuple(_notes(index, table, newest, forgotten)),
        violations=tuple(sorted(violations, key=lambda violation: _SEVERITY.index(violation.kind))),
    )


def _skipped(table: AuditTable) -> dict[str, int]:
    codes = table.codes[~table.expired & (table.codes != TRAINED) & (table.codes != CARRIED)]
    counts = Counter({REASONS[code - 1].value: int(count) for code, count in zip(*_counted(codes), strict=True)})
    # A range names no single record, so it is not among ``codes``: the held records that it covers are counted.
    counts[REASONS[EXPIRED_RANGE - 1].value] += int(np.count_nonzero(table.fates == EXPIRED_RANGE))
    return dict(sorted((+counts).items()))


def _counted(codes: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[list[int], list[int]]:
    values, counts = np.unique(codes, return_counts=True)
    return values.tolist(), counts.tolist()


def _notes(index: AuditIndex, table: AuditTable, newest: NewestCheckpoint, forgotten: int) -> Iterable[str]:
    for link in table.chain.links:
        for part in sorted(table.index.carried.get(link.lineage, {}).values(), key=lambda each: each.part)[:1]:
            yield (
                f"lineage {link.lineage} went on with another cluster, on which at most {part.absent} finished "
                "records were not found"
            )
    if not index.steps_begin:
        yield "the steps topic has lost its beginning to retention: what was trained there is not known"
    if not index.skips_begin:
        yield "the skips topic has lost its beginning to retention: the checkpoint's rows could not be compared"
    if forgotten:
        yield f"{forgotten} finished records have a fate that the topics have forgotten"
    if newest.unannounced is not None:
        yield f"checkpoint {newest.unannounced.policy_version} has not been announced yet"
    if newest.manifest is None:
        yield "no announced checkpoint yet: nothing is compared with a frontier"


def check_lineages(table: AuditTable) -> list[Violation]:
    """All violations of lineages, steps and rows as such."""
    return [*_broken_chain(table), *_carried_gaps(table), *_gaps(table), *_conflicts(table)]


def counted_steps(own: AlgorithmIndex, chain: LineageChain) -> dict[int, set[int]]:
    """Surviving step numbers, with the lineages that took them."""
    found: dict[int, set[int]] = {}
    for version in own.steps:
        link = chain.link(version.lineage)
        # ``holds_step`` includes the step that a lineage started from, which its parent took.
        if link is not None and link.holds_step(version.number) and link.after != version.number:
            found.setdefault(version.number, set()).add(version.lineage)
    return found


def _broken_chain(table: AuditTable) -> list[Violation]:
    broken = table.chain.broken
    if not broken:
        return []
    return [Violation(ViolationKind.BROKEN_CHAIN, table.algorithm, len(broken), None, None, None, broken[0].problem)]


def _carried_gaps(table: AuditTable) -> list[Violation]:
    """What was finished on another cluster is told in parts, all of them before the lineage's first report."""
    missing = [
        (link.lineage, part)
        for link in table.chain.links
        if (start := table.index.lineage_starts.get(link.lineage)) is not None
        for part in range(start.carried_parts)
        if part not in table.index.carried.get(link.lineage, {})
    ]
    if not missing:
        return []
    detail = f"lineage {missing[0][0]} does not tell which records it carried over: part {missing[0][1]} is missing"
    return [Violation(ViolationKind.BROKEN_CHAIN, table.algorithm, len(missing), None, None, None, detail)]


def _gaps(table: AuditTable) -> list[Violation]:
    missing: list[tuple[int, int]] = []
    for link in table.chain.links:
        reported = {step.number for step in table.index.steps if step.lineage == link.lineage}
        reported = {number for number in reported if link.holds_step(number)}
        # Without its start only gaps behind the first step left can be seen; of the newest, those before its last one.
        begin = min(reported, default=0) if link.after is None else link.after + 1
        end = link.until if link.until is not None else max(reported, default=begin - 1)
        missing += [(link.lineage, number) for number in range(begin, end + 1) if number not in reported]
    if not missing:
        return []
    lineage, number = missing[0]
    name, partition, offset = _trained_after(table, lineage, number)
    detail = f"step {lineage}-{number} is missing"
    return [Violation(ViolationKind.STEP_GAP, table.algorithm, len(missing), name, partition, offset, detail)]


def _trained_after(table: AuditTable, lineage: int, number: int) -> tuple[str | None, int | None, int | None]:
    """The first record trained behind a gap."""
    behind = (table.all_codes == TRAINED) & (table.all_lineages == lineage) & (table.all_numbers > number)
    found = np.flatnonzero(table.counted & behind)
    if not len(found):
        return None, None, None
    entries, index = table.index.entries, int(found[0])
    return entries.names[index], entries.partitions[index], entries.offsets[index]


def _conflicts(table: AuditTable) -> list[Violation]:
    conflicts = table.index.conflicts
    if not conflicts:
        return []
    detail, ref = conflicts[0]
    name, partition, offset = (ref.trajectory_id or None, ref.partition, ref.offset) if ref else (None, None, None)
    return [Violation(ViolationKind.CONFLICT, table.algorithm, len(conflicts), name, partition, offset, detail)]


def check_references(table: AuditTable) -> list[Violation]:
    """All violations of single records."""
    return [
        *_second_fates(table),
        *_same_name_trained_twice(table),
        *_unknown_records(table),
        *_wrong_records(table),
    ]


def _second_fates(table: AuditTable) -> list[Violation]:
    """Positions that more than one counted entry names, by what the entries say."""
    # Sorted by position, the entries of one record are neighbours: a run of equal keys begins at ``begins``, has
    # ``sizes`` entries, and ``trained_in`` of them are steps.
    order = np.argsort(table.keys, kind="stable")
    keys, trained = table.keys[order], table.codes[order] == TRAINED
    # The first key always begins a run, hence the case of no keys. reduceat sums trained[begins[i]:begins[i + 1]].
    begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(begins, len(keys)))
    trained_in = np.add.reduceat(trained.astype(np.int64), begins) if len(begins) else sizes
    found: list[Violation] = []
    for kind, groups in (
        (ViolationKind.TRAINED_TWICE, trained_in > 1),
        (ViolationKind.TWO_FATES, (trained_in > 0) & (trained_in < sizes)),
        (ViolationKind.SKIPPED_TWICE, sizes - trained_in > 1),
    ):
        offending = np.flatnonzero(groups)
        if len(offending):
            begin, size = int(begins[offending[0]]), int(sizes[offending[0]])
            which = np.zeros(len(keys), dtype=np.bool_)
            # Marks one entry of each run, so that the violation counts records and not entries.
            which[order[begins[offending]]] = True
            sources = " and ".join(table.source(int(position)) for position in order[begin : begin + size][:4])
            found += table.violation(kind, which, f"by {sources}")
    return found


def _same_name_trained_twice(table: AuditTable) -> list[Violation]:
    """One trajectory in two records, both trained; the same record twice was found already."""
    hashes = table.index.entries.names.hashes()[table.chosen]
    positions = np.flatnonzero((table.codes == TRAINED) & (hashes != 0))
    # One entry per position, or a record that two steps trained would pass for two records of one name.
    _, first = np.unique(table.keys[positions], return_index=True)
    positions = positions[first]
    order = np.argsort(hashes[positions], kind="stable")
    sorted_hashes = hashes[positions][order]
    again = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
    if not len(again):
        return []
    which = np.zeros(len(hashes), dtype=np.bool_)
    which[positions[order[again]]] = True
    one, other = (int(positions[order[index]]) for index in (again[0], again[0] + 1))
    detail = f"two records of it, by {table.source(one)} and {table.source(other)}"
    return table.violation(ViolationKind.TRAINED_TWICE, which, detail)


def _unknown_records(table: AuditTable) -> list[Violation]:
    # Below the first held offset a record is deleted, not unknown.
    return table.violation(ViolationKind.UNKNOWN_RECORD, (table.at < 0) & ~table.expired)


def _wrong_records(table: AuditTable) -> list[Violation]:
    """A name of None fits any record: it was not decoded."""
    known = table.at >= 0
    reported = table.index.entries.names.hashes()[table.chosen]
    differs: Mask = np.zeros(len(table.at), dtype=np.bool_)
    differs[known] = table.produced.hashes[table.at[known]] != reported[known]
    # A skip row may name nobody (hash 0), since undecodable records are skipped too; a step names all that it trained.
    wrong = differs & ((reported != 0) | (table.codes == TRAINED))
    if not np.any(wrong):
        return []
    first = np.flatnonzero(wrong)
    position = int(first[np.argmin(table.keys[first])])
    holds = table.produced.name(int(table.at[position])) or "undecodable bytes"
    return table.violation(ViolationKind.WRONG_RECORD, wrong, f"by {table.source(position)}, the record holds {holds}")


def newest_checkpoint(table: AuditTable, manifests: Iterable[CheckpointManifest]) -> NewestCheckpoint:
    """Choose among the checkpoints of the table's algorithm; those that a crash undid are passed over."""
    reported = max((step for step in table.index.steps if step.lineage == table.chain.newest), default=None)
    start = table.index.lineage_starts.get(table.chain.newest)
    # A lineage that has only announced itself stands at the step it went on from.
    last = reported.number if reported else start.step if start else 0
    announced, ahead = [], []
    for manifest in manifests:
        version, link = manifest.policy_version, table.chain.link(manifest.policy_version.lineage)
        if manifest.algorithm != table.algorithm:
            continue
        if version.lineage > table.chain.newest or (version.lineage == table.chain.newest and version.number > last):
            ahead.append(manifest)
        elif link is not None and link.holds_step(version.number):
            announced.append(manifest)
    newest = max(announced, key=lambda manifest: manifest.policy_version, default=None)
    first_ahead = min(ahead, key=lambda manifest: manifest.policy_version, default=None)
    # A trainer writes the checkpoint before it publishes the report: one checkpoint, of the next step, may be ahead.
    if first_ahead is None or first_ahead.policy_version == (table.chain.newest, last + 1):
        return NewestCheckpoint(newest, first_ahead)
    detail = f"checkpoint {first_ahead.policy_version}, newest report {table.chain.newest}-{last}"
    violation = Violation(ViolationKind.UNREPORTED_CHECKPOINT, table.algorithm, len(ahead), None, None, None, detail)
    return NewestCheckpoint(newest, None, (violation,))


def check_checkpoint(
    table: AuditTable, manifest: CheckpointManifest, *, rows_are_held: bool, steps_are_held: bool
) -> tuple[list[Violation], int]:
    """All violations against one checkpoint, and how many finished records have a fate whose report or row is deleted.

    ``rows_are_held``, ``steps_are_held``: whether the topics still hold their first records; if not, a finished record
    without a fate proves nothing.
    """
    produced, name, version = table.produced, table.algorithm, f"checkpoint {manifest.policy_version}"
    finished, orphans = _finished(table, manifest)
    contained = _contained(table, manifest)
    # Finished without a fate is lost; finished with a fate that came after the checkpoint was called finished early.
    unexplained = finished & (table.fates == PENDING)
    early = finished & (table.fates != PENDING) & ~contained
    violations = orphans
    forgotten = 0
    if rows_are_held and steps_are_held:
        violations += produced.violation(ViolationKind.LOST, name, unexplained, version)
    else:
        forgotten = int(np.count_nonzero(unexplained))
    violations += produced.violation(ViolationKind.FINISHED_EARLY, name, early, version)
    violations += produced.violation(ViolationKind.NOT_FINISHED, name, contained & ~finished, version)
    if rows_are_held:
        violations += _check_rows(table, manifest)
    return violations, forgotten


def _finished(table: AuditTable, manifest: CheckpointManifest) -> tuple[Mask, list[Violation]]:
    produced = table.produced
    finished: Mask = np.zeros(len(produced), dtype=np.bool_)
    problems: list[tuple[int, int, str | None, str]] = []
    for text, content in manifest.frontier.items():
        partition, frontier = int(text), _as_frontier(content)
        # Keys sort by partition first: a partition is the slice from its offset 0 up to the next one's.
        begin, end = np.searchsorted(produced.keys, [partition << PARTITION_SHIFT, (partition + 1) << PARTITION_SHIFT])
        offsets = produced.keys[begin:end] - (partition << PARTITION_SHIFT)
        low, done = frontier
        # A frontier per partition: all below ``low`` are finished, and those of ``done`` above it.
        finished[begin:end] = (offsets < low) | np.isin(offsets, np.array(done, dtype=np.int64))
        extent = produced.held.get(partition)
        beyond = max([low, *(offset + 1 for offset in done)])
        if beyond > (extent.end if extent else 0):
            problem = f"it has finished records up to offset {beyond}, the log ends at {extent.end if extent else 0}"
            problems.append((partition, beyond - 1, None, problem))
    for text, anchor in manifest.anchors.items():
        keys = np.array([(int(text) << PARTITION_SHIFT) | anchor.offset], dtype=np.int64)
        index = int(produced.find(keys)[0])
        held = (produced.name(index) or "") if index >= 0 else None
        # Another name at the same offset: the topic was made anew, and the frontier's offsets mean other records.
        if not produced.expired(keys)[0] and held != anchor.trajectory_id:
            problem = f"the log holds {held or 'no such record'} at its anchor: was the topic made anew?"
            problems.append((int(text), anchor.offset, anchor.trajectory_id, problem))
    if not problems:
        return finished, []
    partition, offset, name, problem = min(problems, key=lambda each: each[:2])
    return finished, [
        Violation(ViolationKind.ORPHAN_FRONTIER, table.algorithm, len(problems), name, partition, offset, problem)
    ]


def _as_frontier(content: Any) -> tuple[int, list[int]]:
    return int(content["low"]), [int(offset) for offset in content["done"]]


def _contained(table: AuditTable, manifest: CheckpointManifest) -> Mask:
    """Which produced records were trained or skipped before the checkpoint, by what the topics say."""
    lineage, number = manifest.policy_version
    numbers, lineages = table.all_numbers, table.all_lineages
    # The checkpoint holds its lineage's steps up to its own number, and skip rows up to the tally's count.
    limit = np.where(table.all_codes == TRAINED, number, manifest.skips.count)
    # Older lineages need no limit here: ``counted`` has cut each where its child went on, which was before.
    before = (lineages < lineage) | ((lineages == lineage) & (numbers <= limit))
    contained: Mask = np.zeros(len(table.produced), dtype=np.bool_)
    known = table.at >= 0
    contained[table.at[known & before[table.chosen]]] = True
    for index in table.ranges:
        if before[index]:
            contained |= table.covered_by(int(index))
    return contained


def _check_rows(table: AuditTable, manifest: CheckpointManifest) -> list[Violation]:
    """The rows of the chain up to the checkpoint, one after the other: all there, and hashed to what it says."""
    # The rolling hash goes on from parent to child: it can only be recomputed from the first lineage's first row.
    rolling, reasons = "", Counter[str]()
    for link in table.chain.links:
        # Rows from before another cluster need not be here: what they came to is told.
        for part in list(table.index.carried.get(link.lineage, {}).values())[:1]:
            rolling, reasons = part.skips_hash, Counter(part.skips_by_reason)
        if link.lineage > manifest.lineage:
            break
        count = manifest.skips.count if link.lineage == manifest.lineage else link.rows or 0
        for sequence in range(1, count + 1):
            index = table.index.rows.get((link.lineage, sequence))
            if index is None:
                detail = f"row {sequence} of lineage {link.lineage}"
                return [Violation(ViolationKind.SKIP_ROW_MISSING, table.algorithm, 1, None, None, None, detail)]
            row = _row(table, index)
            rolling = chained(rolling, row)
            reasons[row.reason.value] += end_of(row) - row.offset
    # Unary plus drops zero counts, so that a reason listed without a row equals one that is not listed.
    if rolling == manifest.skips.hash and +reasons == +Counter(manifest.skips.by_reason):
        return []
    return [_mismatch(table, manifest, reasons, rolling)]


def _mismatch(table: AuditTable, manifest: CheckpointManifest, reasons: Counter[str], rolling: str) -> Violation:
    # Counts that differ name a reason to look at; with equal counts and another hash, rows differ in place or order.
    wanted = Counter(manifest.skips.by_reason)
    differing = sorted(reason for reason in {*reasons, *wanted} if reasons[reason] != wanted[reason])
    if differing:
        reason = differing[0]
        detail = f"{reason}: the topic has {reasons[reason]}, checkpoint {manifest.policy_version} {wanted[reason]}"
    else:
        detail = (
            f"hash {rolling or 'of no row'}, checkpoint {manifest.policy_version} has {manifest.skips.hash or 'none'}"
        )
    which = _first_row_of(table, differing)
    return Violation(ViolationKind.SKIP_MISMATCH, table.algorithm, 1, *which, detail)


def _first_row_of(table: AuditTable, reasons: Sequence[str]) -> tuple[str | None, int | None, int | None]:
    """Where to start looking: the first counted row of a reason that differs."""
    codes = [code for code, reason in enumerate(REASONS, start=1) if reason.value in reasons]
    found = np.flatnonzero(table.counted & np.isin(table.all_codes, codes))
    if not len(found):
        return None, None, None
    index, entries = int(found[0]), table.index.entries
    return entries.names[index], entries.partitions[index], entries.offsets[index]


def _row(table: AuditTable, index: int) -> SkipRecord:
    """As much of a row as its hash is about."""
    entries = table.index.entries
    return SkipRecord.model_construct(
        algorithm=table.algorithm,
        trajectory_id=None,
        group_id=None,
        step=0,
        sent_at=0.0,
        lineage=entries.lineages[index],
        sequence=entries.numbers[index],
        reason=REASONS[entries.codes[index] - 1],
        partition=entries.partitions[index],
        offset=entries.offsets[index],
        end_offset=entries.ends[index],
    )
