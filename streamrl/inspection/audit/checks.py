"""The accounting check: produced = trained + skipped + pending, per algorithm. Names the records that break it. Pure.

Every record on the trajectories topic must be trained by exactly one surviving step, skipped by exactly one surviving
row, or pending. The records that the newest checkpoint's frontier calls finished must be exactly those that were
trained or skipped before it. Positions below the first offset that the topic holds are only compared with each other.

Invariants, each with a test of its name:
- every_surviving_step_is_reported: the numbers of each lineage's counted steps have no gap;
- nothing_is_trained_twice, no_record_has_two_fates, every_reference_is_right: hold for each record;
- nothing_finished_is_unexplained, nothing_counted_is_read_again, the_checkpoint_contains_the_rows_on_the_topic: hold
  for the newest surviving checkpoint.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from streamrl.consumers.ingest.rejections import next_row_hash
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.columns import PARTITION_SHIFT, Ints, Mask, as_hashes, keys_of
from streamrl.inspection.audit.index import CARRIED, RANGES, REASONS, TRAINED, AlgorithmIndex, AuditIndex
from streamrl.inspection.audit.lineages import check_lineages, counted_steps
from streamrl.inspection.audit.report import AlgorithmBalance, AuditReport, Violation, ViolationKind
from streamrl.inspection.audit.rows import RowContent, RowSum
from streamrl.inspection.audit.settled import SettledRecords
from streamrl.inspection.audit.table import PENDING, AuditTable, ProducedRecords
from streamrl.inspection.audit.undone import undone_work
from streamrl.inspection.audit.waiting import HashesSeen, explain_pending
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.lineage import LineageChain, surviving_chain
from streamrl.schemas.reports import SkipRecord

_SEVERITY = tuple(ViolationKind)
"""Kinds of violation, the worst first: the order in which they are declared."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest announced checkpoint that survives, if any. ``unannounced``: a newer one, not yet in any report."""

    manifest: CheckpointManifest | None
    unannounced: CheckpointManifest | None
    violations: tuple[Violation, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """A report and its inputs: the table and the newest checkpoint of each algorithm."""

    report: AuditReport
    produced: ProducedRecords
    tables: dict[str, tuple[AuditTable, NewestCheckpoint]]


def check_balance(run: str, index: AuditIndex, manifests: Sequence[CheckpointManifest]) -> AuditReport:
    """The report on a run. ``manifests``: its checkpoints, listed before the topics were read."""
    return judge(run, index, manifests, SettledRecords()).report


def judge(run: str, index: AuditIndex, manifests: Sequence[CheckpointManifest], settled: SettledRecords) -> Judgement:
    """The judgement on all records: the indexed ones, and the settled ones, which break no rule."""
    produced = ProducedRecords(index.trajectories)
    names = algorithms_of(index, manifests)
    # Hash 0 marks a record without a readable name. It does not count as a trajectory.
    sampled = as_hashes(index.sampled)
    hashes = np.unique(produced.hashes[produced.hashes != 0])
    topic, ordered = index.trajectories, index.orders.hashes
    ordered = ordered[~settled.ordered.holds(ordered)]
    seen = HashesSeen(hashes, settled)
    balances, tables = [], {}
    for name in names:
        table = table_of(name, index, produced)
        newest = newest_checkpoint(table.index, table.chain, name, manifests)
        balances.append(_balance_of(table, newest, index, settled, seen))
        tables[name] = table, newest
    report = AuditReport(
        run=run,
        produced=len(produced) + settled.records,
        distinct=len(settled.produced) + int(np.count_nonzero(~settled.produced.holds(hashes))),
        undecodable=int(np.count_nonzero(produced.hashes == 0)) + settled.nameless,
        expired=topic.expired,
        orders=index.orders.count,
        ordered=len(settled.ordered) + len(ordered),
        ordered_unproduced=int(np.count_nonzero(~seen.on_topic(ordered))),
        dead_letters=dict(sorted(index.dead_letters.items())),
        algorithms=tuple(balances),
        continued=topic.continued,
        continuations=topic.continuations,
        sampled=len(index.sampled),
        in_grading=int(np.count_nonzero(~seen.on_topic(sampled))),
        sessions=topic.sessions,
        turns=topic.turns,
    )
    return Judgement(report, produced, tables)


def algorithms_of(index: AuditIndex, manifests: Iterable[CheckpointManifest]) -> list[str]:
    """All algorithms that have reported something or have a checkpoint."""
    return sorted({*index.algorithms, *(manifest.account for manifest in manifests)})


def table_of(name: str, index: AuditIndex, produced: ProducedRecords) -> AuditTable:
    """The table of one algorithm's entries, with the chain of its surviving lineages."""
    own = index.algorithms.get(name, AlgorithmIndex())
    return AuditTable(name, own, surviving_chain(own.lineage_starts, beginning_is_held=index.steps_begin), produced)


def _balance_of(
    table: AuditTable, newest: NewestCheckpoint, index: AuditIndex, settled: SettledRecords, seen: HashesSeen
) -> AlgorithmBalance:
    name, own, chain, produced = table.algorithm, table.index, table.chain, table.produced
    violations = [*check_references(table), *check_lineages(table), *newest.violations]
    forgotten: Mask = np.zeros(len(produced), dtype=np.bool_)
    if newest.manifest is not None:
        found, forgotten = check_checkpoint(
            table, newest.manifest, settled, rows_are_held=index.skips_begin, steps_are_held=index.steps_begin
        )
        violations = found + violations
    here, before = ~table.expired, settled.fates(name)
    # Not the forgotten ones: the frontier calls them finished, though no record on the topics tells their fate.
    pending = (table.fates == PENDING) & ~forgotten
    skipped = _skip_codes(table.codes[~here]).size + sum(_skip_counts(before.expired).values())
    counted = counted_steps(own, chain)
    undone, rolled_back = undone_work(table, before.undone, counted)
    return AlgorithmBalance(
        algorithm=name,
        produced=len(produced) + settled.records,
        trained=int(np.count_nonzero(here & (table.codes == TRAINED))) + before.codes[TRAINED],
        skipped=_skipped(table, before.codes),
        pending=int(np.count_nonzero(pending)),
        expired_trained=int(np.count_nonzero(~here & (table.codes == TRAINED))) + before.expired[TRAINED],
        expired_skipped=skipped,
        expired_fates=int(np.count_nonzero(forgotten)),
        steps=len(counted),
        refused_steps=own.refused_steps,
        lineages=tuple(link.lineage for link in chain.links),
        checkpoint=newest.manifest.named_version if newest.manifest else None,
        undone=undone,
        rolled_back=rolled_back,
        carried_over=int(np.count_nonzero(here & (table.codes == CARRIED))) + before.codes[CARRIED],
        waiting=explain_pending(table, pending, index, settled, seen),
        finished=_has_finished(own, chain),
        notes=tuple(_notes(index, table, newest, int(np.count_nonzero(forgotten)))),
        violations=tuple(sorted(violations, key=lambda violation: _SEVERITY.index(violation.kind))),
    )


def _has_finished(own: AlgorithmIndex, chain: LineageChain) -> bool:
    """Whether the newest report calls itself the run's last one."""
    newest = chain.newest
    start = own.lineage_starts.get(newest)
    steps = [step.number for step in own.steps if step.lineage == newest]
    last = max(steps) if steps else start.step if start else None
    return last is not None and PolicyVersion(newest, last) in own.last_steps


def _skip_codes(codes: Ints) -> Ints:
    skips: Ints = codes[(codes != TRAINED) & (codes != CARRIED)]
    return skips


def _skip_counts(counts: Counter[int]) -> dict[int, int]:
    return {code: count for code, count in counts.items() if code not in (TRAINED, CARRIED)}


def _skipped(table: AuditTable, before: Counter[int]) -> dict[str, int]:
    codes = _skip_codes(table.codes[~table.expired])
    found = zip(*np.unique(codes, return_counts=True), strict=True)
    counts = Counter({REASONS[int(code) - 1].value: int(count) for code, count in found})
    counts.update({REASONS[code - 1].value: count for code, count in _skip_counts(before).items()})
    # A range names no single record, so it is not in ``codes``. Its covered records that the topic holds are counted.
    for code in RANGES:
        counts[REASONS[code - 1].value] += int(np.count_nonzero(table.fates == code))
    return dict(sorted((+counts).items()))


def _notes(index: AuditIndex, table: AuditTable, newest: NewestCheckpoint, forgotten: int) -> Iterable[str]:
    for link in table.chain.links:
        if (carried := table.index.carried.get(link.lineage)) is not None:
            yield (
                f"lineage {link.lineage} moved to another cluster, where at most {carried.absent} finished records "
                "were not found"
            )
    if not index.steps_begin:
        yield "retention has deleted the start of the steps topic: records trained in those steps cannot be known"
    if not index.skips_begin:
        yield "retention has deleted the start of the skips topic: the checkpoint's rows could not be compared"
    if forgotten:
        yield f"retention has deleted the reports or rows of {forgotten} finished records: their fate is unknown"
    if newest.unannounced is not None:
        yield f"checkpoint {newest.unannounced.policy_version} has not been announced yet"
    if newest.manifest is None:
        yield "no announced checkpoint yet: nothing is compared with a frontier"


def check_references(table: AuditTable) -> list[Violation]:
    """All violations that concern single records."""
    return [
        *_second_fates(table),
        *_same_name_trained_twice(table),
        *_unknown_records(table),
        *_wrong_records(table),
    ]


def _second_fates(table: AuditTable) -> list[Violation]:
    """Records that more than one counted entry names, by what the entries say."""
    # Sorted by position, the entries of one record are neighbours. Each run of equal keys starts at one of ``begins``
    # and has ``sizes`` entries; ``trained_in`` of them are steps.
    keys, trained = table.keys, table.codes == TRAINED
    # The first key always starts a run, hence the special case of no keys. reduceat sums
    # trained[begins[i]:begins[i + 1]].
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
            which[begins[offending]] = True
            sources = " and ".join(table.source(position) for position in range(begin, begin + min(size, 4)))
            found += table.violation(kind, which, f"by {sources}")
    return found


def _same_name_trained_twice(table: AuditTable) -> list[Violation]:
    """Trajectories that were trained from two records. ``_second_fates`` finds a record that was trained twice."""
    hashes = table.chosen_hashes
    positions = np.flatnonzero((table.codes == TRAINED) & (hashes != 0))
    # One entry per position: otherwise a record that two steps trained would look like two records of one name.
    _, first = np.unique(table.keys[positions], return_index=True)
    positions = positions[first]
    order = np.argsort(hashes[positions], kind="stable")
    sorted_hashes = hashes[positions][order]
    again = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
    if not len(again):
        return []
    which = np.zeros(len(hashes), dtype=np.bool_)
    which[positions[order[again]]] = True
    # The first by position, which the violation names, and its neighbour of the same name.
    first = again[np.argmin(positions[order[again]])]
    one, other = (int(positions[order[index]]) for index in (first, first + 1))
    detail = f"two records of it, by {table.source(one)} and {table.source(other)}"
    return table.violation(ViolationKind.TRAINED_TWICE, which, detail)


def _unknown_records(table: AuditTable) -> list[Violation]:
    # A record below the first held offset is deleted, not unknown.
    return table.violation(ViolationKind.UNKNOWN_RECORD, (table.at < 0) & ~table.expired)


def _wrong_records(table: AuditTable) -> list[Violation]:
    """Entries whose name differs from the record's. A row's None fits any record: the record did not decode."""
    known = table.at >= 0
    reported = table.chosen_hashes
    differs: Mask = np.zeros(len(table.at), dtype=np.bool_)
    differs[known] = table.produced.hashes[table.at[known]] != reported[known]
    # A skip row may have no name (hash 0), since undecodable records are skipped too. A step names every record that it
    # trained.
    wrong = differs & ((reported != 0) | (table.codes == TRAINED))
    if not np.any(wrong):
        return []
    position = int(np.flatnonzero(wrong)[0])
    holds = table.produced.name(int(table.at[position])) or "undecodable bytes"
    return table.violation(ViolationKind.WRONG_RECORD, wrong, f"by {table.source(position)}, the record holds {holds}")


def newest_checkpoint(
    own: AlgorithmIndex, chain: LineageChain, algorithm: str, manifests: Iterable[CheckpointManifest]
) -> NewestCheckpoint:
    """The newest of one algorithm's checkpoints, apart from those that a crash undid."""
    reported = max((step for step in own.steps if step.lineage == chain.newest), default=None)
    start = own.lineage_starts.get(chain.newest)
    # A lineage without steps is at the step that it started from.
    last = reported.number if reported else start.step if start else 0
    announced, ahead = [], []
    for manifest in manifests:
        version, link = manifest.policy_version, chain.link(manifest.policy_version.lineage)
        if manifest.account != algorithm:
            continue
        if version.lineage > chain.newest or (version.lineage == chain.newest and version.number > last):
            ahead.append(manifest)
        elif link is not None and link.holds_step(version.number):
            announced.append(manifest)
    newest = max(announced, key=lambda manifest: manifest.policy_version, default=None)
    first_ahead = min(ahead, key=lambda manifest: manifest.policy_version, default=None)
    # A trainer writes a checkpoint before it publishes the step's report: the next step's checkpoint may be there
    # already.
    if first_ahead is None or first_ahead.policy_version == (chain.newest, last + 1):
        return NewestCheckpoint(newest, first_ahead)
    detail = f"checkpoint {first_ahead.policy_version}, newest report {chain.newest}-{last}"
    violation = Violation(ViolationKind.UNREPORTED_CHECKPOINT, algorithm, len(ahead), None, None, None, detail)
    return NewestCheckpoint(newest, None, (violation,))


def check_checkpoint(
    table: AuditTable,
    manifest: CheckpointManifest,
    settled: SettledRecords,
    *,
    rows_are_held: bool,
    steps_are_held: bool,
) -> tuple[list[Violation], Mask]:
    """All violations against one checkpoint, and which finished records have lost their report or row to retention.

    ``rows_are_held``, ``steps_are_held``: whether the topics still hold their first records. If not, a finished record
    without a fate is no proof of loss.
    """
    produced, name, version = table.produced, table.algorithm, f"checkpoint {manifest.policy_version}"
    finished, orphans = _finished(table, manifest, settled)
    contained = _contained(table, manifest)
    # A finished record without a fate is lost. One with a fate from after the checkpoint was called finished too early.
    unexplained = finished & (table.fates == PENDING)
    early = finished & (table.fates != PENDING) & ~contained
    violations = orphans
    loss_is_proven = rows_are_held and steps_are_held
    if loss_is_proven:
        violations += produced.violation(ViolationKind.LOST, name, unexplained, version)
    violations += produced.violation(ViolationKind.FINISHED_EARLY, name, early, version)
    violations += produced.violation(ViolationKind.NOT_FINISHED, name, contained & ~finished, version)
    if rows_are_held:
        violations += _check_rows(table, manifest, settled)
    return violations, unexplained & (not loss_is_proven)


def _finished(table: AuditTable, manifest: CheckpointManifest, settled: SettledRecords) -> tuple[Mask, list[Violation]]:
    produced = table.produced
    finished: Mask = np.zeros(len(produced), dtype=np.bool_)
    problems: list[tuple[int, int, str | None, str]] = []
    for partition, frontier in frontiers_of(manifest).items():
        # Keys sort by partition first: a partition is the slice from its offset 0 up to the next partition's offset 0.
        begin, end = np.searchsorted(produced.keys, [partition << PARTITION_SHIFT, (partition + 1) << PARTITION_SHIFT])
        offsets = produced.keys[begin:end] - (partition << PARTITION_SHIFT)
        finished[begin:end] = frontier.finished(offsets)
        extent = produced.held.get(partition)
        beyond = max([frontier.low, *(offset + 1 for offset in frontier.done)])
        if beyond > (extent.end if extent else 0):
            problem = f"the frontier reaches offset {beyond}, but the log ends at {extent.end if extent else 0}"
            problems.append((partition, beyond - 1, None, problem))
    for text, anchor in manifest.anchors.items():
        keys = np.array([(int(text) << PARTITION_SHIFT) | anchor.offset], dtype=np.int64)
        index = int(produced.find(keys)[0])
        there, name = (True, produced.name(index)) if index >= 0 else settled.record_at(int(keys[0]))
        held = (name or "") if there else None
        # Another name at the same offset: the topic was recreated, and the frontier's offsets mean other records.
        if not produced.expired(keys)[0] and held != anchor.trajectory_id:
            problem = f"the log holds {held or 'no such record'} at the frontier's anchor: was the topic recreated?"
            problems.append((int(text), anchor.offset, anchor.trajectory_id, problem))
    if not problems:
        return finished, []
    partition, offset, name, problem = min(problems, key=lambda each: each[:2])
    return finished, [
        Violation(ViolationKind.ORPHAN_FRONTIER, table.algorithm, len(problems), name, partition, offset, problem)
    ]


class FinishedOffsets(NamedTuple):
    """The finished offsets of one partition in a checkpoint: all below ``low``, and those in ``done`` above it."""

    low: int
    done: list[int]

    @classmethod
    def of(cls, content: Any) -> "FinishedOffsets":
        """From one partition's entry in a manifest's ``frontier``."""
        return cls(int(content["low"]), [int(offset) for offset in content["done"]])

    def finished(self, offsets: Ints) -> Mask:
        """Which of these are finished."""
        finished: Mask = (offsets < self.low) | np.isin(offsets, np.array(self.done, dtype=np.int64))
        return finished


def frontiers_of(manifest: CheckpointManifest) -> dict[int, FinishedOffsets]:
    """The checkpoint's frontier by partition."""
    return {int(partition): FinishedOffsets.of(content) for partition, content in manifest.frontier.items()}


def is_contained(table: AuditTable, manifest: CheckpointManifest) -> Mask:
    """Which of all entries the checkpoint contains."""
    lineage, number = manifest.policy_version
    numbers, lineages = table.all_numbers, table.all_lineages
    # The checkpoint holds its lineage's steps up to its own number, and skip rows up to the tally's count.
    limit = np.where(table.all_codes == TRAINED, number, manifest.skips.count)
    # Older lineages need no limit here: ``counted`` ends each where the next one started, which was before the
    # checkpoint.
    before: Mask = (lineages < lineage) | ((lineages == lineage) & (numbers <= limit))
    return before


def _contained(table: AuditTable, manifest: CheckpointManifest) -> Mask:
    """Which produced records were trained or skipped before the checkpoint, according to the topics."""
    before = is_contained(table, manifest)
    contained: Mask = np.zeros(len(table.produced), dtype=np.bool_)
    known = table.at >= 0
    contained[table.at[known & before[table.chosen]]] = True
    for index in table.ranges:
        if before[index]:
            contained |= table.covered_by(int(index))
    return contained


def _check_rows(table: AuditTable, manifest: CheckpointManifest, settled: SettledRecords) -> list[Violation]:
    """Check that all rows up to the checkpoint are there, and that their rolling hash is the checkpoint's."""
    # A lineage continues its parent's rolling hash, so the hash can only be computed from the first lineage's first
    # row. Rows do not change, so sums made for an earlier checkpoint of the same lineages are still valid.
    own, total = table.index, RowSum(0, "", Counter())
    before: tuple[int, ...] = ()
    for link in table.chain.links:
        if link.lineage > manifest.lineage:
            break
        if (carried := own.carried.get(link.lineage)) is not None:
            # Earlier rows, on another cluster, need not be here: the lineage carries their hash and counts. 0 marks
            # that cluster, since no lineage has this number.
            total, before = RowSum(0, carried.skips_hash, Counter(carried.skips_by_reason)), (0,)
        count = manifest.skips.count if link.lineage == manifest.lineage else link.rows or 0
        known = own.row_sums.get((*before, link.lineage))
        total = known if known is not None and known.rows <= count else RowSum(0, total.hash, total.reasons)
        rolling, reasons = total.hash, Counter(total.reasons)
        for sequence in range(total.rows + 1, count + 1):
            row = own.rows.get(link.lineage, sequence)
            if row is None:
                detail = f"row {sequence} of lineage {link.lineage}"
                return [Violation(ViolationKind.SKIP_ROW_MISSING, table.algorithm, 1, None, None, None, detail)]
            rolling = next_row_hash(rolling, _as_record(link.lineage, sequence, row))
            reasons[REASONS[row.code - 1].value] += row.end - row.offset
        total = own.row_sums[*before, link.lineage] = RowSum(count, rolling, reasons)
        before = (*before, link.lineage, count)
    # Unary plus drops zero counts, so that a reason with no rows equals one that is not listed.
    if total.hash == manifest.skips.hash and +total.reasons == +Counter(manifest.skips.by_reason):
        return []
    return [_mismatch(table, manifest, settled, total.reasons, total.hash)]


def _mismatch(
    table: AuditTable, manifest: CheckpointManifest, settled: SettledRecords, reasons: Counter[str], rolling: str
) -> Violation:
    # If counts differ, the message names a reason to look at. If only the hash differs, rows differ in place or order.
    wanted = Counter(manifest.skips.by_reason)
    differing = sorted(reason for reason in {*reasons, *wanted} if reasons[reason] != wanted[reason])
    if differing:
        reason = differing[0]
        detail = f"{reason}: the topic has {reasons[reason]}, checkpoint {manifest.policy_version} {wanted[reason]}"
    else:
        detail = (
            f"hash {rolling or 'of no row'}, checkpoint {manifest.policy_version} has {manifest.skips.hash or 'none'}"
        )
    which = _first_row_of(table, settled, differing)
    return Violation(ViolationKind.SKIP_MISMATCH, table.algorithm, 1, *which, detail)


def _first_row_of(
    table: AuditTable, settled: SettledRecords, reasons: Sequence[str]
) -> tuple[str | None, int | None, int | None]:
    """Where to start looking: the first counted row of a reason that differs."""
    codes = {code for code, reason in enumerate(REASONS, start=1) if reason.value in reasons}
    for link in table.chain.links:
        if (found := table.index.rows.first_of(link.lineage, link.rows, codes)) is not None:
            sequence, row = found
            wanted = (table.all_codes == row.code) & (table.all_lineages == link.lineage)
            at = np.flatnonzero(wanted & (table.all_numbers == sequence))
            # The name in a settled row is the record's own name.
            key = int(keys_of(np.array([row.partition]), np.array([row.offset]))[0])
            name = table.index.entries.names[int(at[0])] if len(at) else settled.record_at(key)[1]
            return name, row.partition, row.offset
    return None, None, None


def _as_record(lineage: int, sequence: int, content: RowContent) -> SkipRecord:
    """A row with only the fields that its hash covers."""
    return SkipRecord.model_construct(
        algorithm="",
        trajectory_id=None,
        group_id=None,
        step=0,
        sent_at=0.0,
        lineage=lineage,
        sequence=sequence,
        reason=REASONS[content.code - 1],
        partition=content.partition,
        offset=content.offset,
        end_offset=content.end,
    )
