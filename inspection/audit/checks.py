"""The verdict: produced = trained + skipped(reason) + pending, per algorithm, and whatever breaks it by name. Pure.

Every record on the trajectories topic must be trained by exactly one surviving step, skipped by exactly one surviving
row, or pending; and what the newest checkpoint takes for finished must be exactly what was trained or skipped before
it. Places below the first offset that the topic holds are compared with each other only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumers.ingest.rejections import chained, end_of
from consumers.training.checkpoints.manifest import CheckpointManifest
from inspection.audit.index import (
    PARTITION_SHIFT,
    REASONS,
    TRAINED,
    AlgorithmBooks,
    Books,
    Chain,
    Mask,
    surviving_chain,
)
from inspection.audit.table import EXPIRED_RANGE, PENDING, ProducedRecords, Sheet
from inspection.audit.verdict import AlgorithmBalance, Offence, Undone, Verdict, Violation
from schemas.reports import SkipRecord

# Whether the surviving lineages fit together, and whether every one of their steps was reported, once. Pure.
# Invariant every_surviving_step_is_reported: the numbers of each lineage's counted steps have no gap.


def check_lineages(sheet: Sheet) -> list[Violation]:
    """All offences of lineages, steps and rows as such."""
    return [*_broken_chain(sheet), *_gaps(sheet), *_conflicts(sheet)]


def counted_steps(own: AlgorithmBooks, chain: Chain) -> dict[int, set[int]]:
    """Surviving step numbers, with the lineages that took them."""
    found: dict[int, set[int]] = {}
    for version in own.steps:
        link = chain.link(version.lineage)
        if link is not None and link.holds_step(version.number) and link.after != version.number:
            found.setdefault(version.number, set()).add(version.lineage)
    return found


def _broken_chain(sheet: Sheet) -> list[Violation]:
    broken = sheet.chain.broken
    if not broken:
        return []
    return [Violation(Offence.BROKEN_CHAIN, sheet.algorithm, len(broken), None, None, None, broken[0].problem)]


def _gaps(sheet: Sheet) -> list[Violation]:
    missing: list[tuple[int, int]] = []
    for link in sheet.chain.links:
        reported = {step.number for step in sheet.books.steps if step.lineage == link.lineage}
        reported = {number for number in reported if link.holds_step(number)}
        begin = min(reported, default=0) if link.after is None else link.after + 1
        end = link.until if link.until is not None else max(reported, default=begin - 1)
        missing += [(link.lineage, number) for number in range(begin, end + 1) if number not in reported]
    if not missing:
        return []
    lineage, number = missing[0]
    name, partition, offset = _trained_after(sheet, lineage, number)
    detail = f"step {lineage}-{number} is missing"
    return [Violation(Offence.STEP_GAP, sheet.algorithm, len(missing), name, partition, offset, detail)]


def _trained_after(sheet: Sheet, lineage: int, number: int) -> tuple[str | None, int | None, int | None]:
    """The first record trained behind a gap."""
    behind = (sheet.all_codes == TRAINED) & (sheet.all_lineages == lineage) & (sheet.all_numbers > number)
    found = np.flatnonzero(sheet.counted & behind)
    if not len(found):
        return None, None, None
    entries, index = sheet.books.entries, int(found[0])
    return entries.names[index], entries.partitions[index], entries.offsets[index]


def _conflicts(sheet: Sheet) -> list[Violation]:
    conflicts = sheet.books.conflicts
    if not conflicts:
        return []
    detail, ref = conflicts[0]
    name, partition, offset = (ref.trajectory_id or None, ref.partition, ref.offset) if ref else (None, None, None)
    return [Violation(Offence.CONFLICT, sheet.algorithm, len(conflicts), name, partition, offset, detail)]


# Whether each record met one fate, and is the one that was meant. Pure. Invariants, each with a test of its name:
# nothing_is_trained_twice, no_record_has_two_fates, every_reference_is_right.


def check_references(sheet: Sheet) -> list[Violation]:
    """All offences of single records."""
    return [
        *_second_fates(sheet),
        *_same_name_trained_twice(sheet),
        *_unknown_records(sheet),
        *_wrong_records(sheet),
    ]


def _second_fates(sheet: Sheet) -> list[Violation]:
    """Places that more than one counted entry names, by what the entries say."""
    order = np.argsort(sheet.keys, kind="stable")
    keys, trained = sheet.keys[order], sheet.codes[order] == TRAINED
    begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(begins, len(keys)))
    trained_in = np.add.reduceat(trained.astype(np.int64), begins) if len(begins) else sizes
    found: list[Violation] = []
    for offence, groups in (
        (Offence.TRAINED_TWICE, trained_in > 1),
        (Offence.TWO_FATES, (trained_in > 0) & (trained_in < sizes)),
        (Offence.SKIPPED_TWICE, sizes - trained_in > 1),
    ):
        offending = np.flatnonzero(groups)
        if len(offending):
            begin, size = int(begins[offending[0]]), int(sizes[offending[0]])
            which = np.zeros(len(keys), dtype=np.bool_)
            which[order[begins[offending]]] = True
            sources = " and ".join(sheet.source(int(position)) for position in order[begin : begin + size][:4])
            found += sheet.violation(offence, which, f"by {sources}")
    return found


def _same_name_trained_twice(sheet: Sheet) -> list[Violation]:
    """One trajectory in two records, both trained; the same record twice was found already."""
    hashes = sheet.books.entries.names.hashes()[sheet.chosen]
    positions = np.flatnonzero((sheet.codes == TRAINED) & (hashes != 0))
    _, first = np.unique(sheet.keys[positions], return_index=True)
    positions = positions[first]
    order = np.argsort(hashes[positions], kind="stable")
    sorted_hashes = hashes[positions][order]
    again = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1])
    if not len(again):
        return []
    which = np.zeros(len(hashes), dtype=np.bool_)
    which[positions[order[again]]] = True
    one, other = (int(positions[order[index]]) for index in (again[0], again[0] + 1))
    detail = f"two records of it, by {sheet.source(one)} and {sheet.source(other)}"
    return sheet.violation(Offence.TRAINED_TWICE, which, detail)


def _unknown_records(sheet: Sheet) -> list[Violation]:
    return sheet.violation(Offence.UNKNOWN_RECORD, (sheet.at < 0) & ~sheet.expired)


def _wrong_records(sheet: Sheet) -> list[Violation]:
    """A name of None fits any record: it was not decoded."""
    known = sheet.at >= 0
    reported = sheet.books.entries.names.hashes()[sheet.chosen]
    differs: Mask = np.zeros(len(sheet.at), dtype=np.bool_)
    differs[known] = sheet.produced.hashes[sheet.at[known]] != reported[known]
    wrong = differs & ((reported != 0) | (sheet.codes == TRAINED))
    if not np.any(wrong):
        return []
    first = np.flatnonzero(wrong)
    position = int(first[np.argmin(sheet.keys[first])])
    holds = sheet.produced.name(int(sheet.at[position])) or "undecodable bytes"
    return sheet.violation(Offence.WRONG_RECORD, wrong, f"by {sheet.source(position)}, the record holds {holds}")


# Whether the newest surviving checkpoint's frontier and skip tally are what the topics say. Pure. Invariants, each
# with a test of its name: nothing_finished_is_unexplained, nothing_counted_is_read_again,
# the_checkpoint_contains_the_rows_on_the_topic.


@dataclass(frozen=True)
class Newest:
    """The newest announced checkpoint that survives, if any. ``unannounced``: one that waits for its report."""

    manifest: CheckpointManifest | None
    unannounced: CheckpointManifest | None
    violations: tuple[Violation, ...] = ()


def newest_checkpoint(sheet: Sheet, manifests: Iterable[CheckpointManifest]) -> Newest:
    """Choose among the checkpoints of the sheet's algorithm; those that a crash undid are passed over."""
    reported = max((step for step in sheet.books.steps if step.lineage == sheet.chain.newest), default=None)
    birth = sheet.books.births.get(sheet.chain.newest)
    last = reported.number if reported else birth.step if birth else 0
    announced, ahead = [], []
    for manifest in manifests:
        version, link = manifest.policy_version, sheet.chain.link(manifest.policy_version.lineage)
        if manifest.algorithm != sheet.algorithm:
            continue
        if version.lineage > sheet.chain.newest or (version.lineage == sheet.chain.newest and version.number > last):
            ahead.append(manifest)
        elif link is not None and link.holds_step(version.number):
            announced.append(manifest)
    newest = max(announced, key=lambda manifest: manifest.policy_version, default=None)
    first_ahead = min(ahead, key=lambda manifest: manifest.policy_version, default=None)
    if first_ahead is None or first_ahead.policy_version == (sheet.chain.newest, last + 1):
        return Newest(newest, first_ahead)
    detail = f"checkpoint {first_ahead.policy_version}, newest report {sheet.chain.newest}-{last}"
    violation = Violation(Offence.UNREPORTED_CHECKPOINT, sheet.algorithm, len(ahead), None, None, None, detail)
    return Newest(newest, None, (violation,))


def check_checkpoint(
    sheet: Sheet, manifest: CheckpointManifest, *, rows_are_held: bool, steps_are_held: bool
) -> tuple[list[Violation], int]:
    """All offences against one checkpoint, and how many finished records have a fate that the topics forgot.

    ``rows_are_held``, ``steps_are_held``: whether the topics still hold their first records; if not, a finished record
    without a fate proves nothing.
    """
    produced, name, version = sheet.produced, sheet.algorithm, f"checkpoint {manifest.policy_version}"
    finished, orphans = _finished(sheet, manifest)
    contained = _contained(sheet, manifest)
    unexplained = finished & (sheet.fates == PENDING)
    early = finished & (sheet.fates != PENDING) & ~contained
    violations = orphans
    forgotten = 0
    if rows_are_held and steps_are_held:
        violations += produced.violation(Offence.LOST, name, unexplained, version)
    else:
        forgotten = int(np.count_nonzero(unexplained))
    violations += produced.violation(Offence.FINISHED_EARLY, name, early, version)
    violations += produced.violation(Offence.NOT_FINISHED, name, contained & ~finished, version)
    if rows_are_held:
        violations += _check_rows(sheet, manifest)
    return violations, forgotten


def _finished(sheet: Sheet, manifest: CheckpointManifest) -> tuple[Mask, list[Violation]]:
    produced = sheet.produced
    finished: Mask = np.zeros(len(produced), dtype=np.bool_)
    problems: list[tuple[int, int, str | None, str]] = []
    for text, content in manifest.frontier.items():
        partition, frontier = int(text), _as_frontier(content)
        begin, end = np.searchsorted(produced.keys, [partition << PARTITION_SHIFT, (partition + 1) << PARTITION_SHIFT])
        offsets = produced.keys[begin:end] - (partition << PARTITION_SHIFT)
        low, done = frontier
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
        if not produced.expired(keys)[0] and held != anchor.trajectory_id:
            problem = f"the log holds {held or 'no such record'} at its anchor: was the topic made anew?"
            problems.append((int(text), anchor.offset, anchor.trajectory_id, problem))
    if not problems:
        return finished, []
    partition, offset, name, problem = min(problems, key=lambda each: each[:2])
    return finished, [
        Violation(Offence.ORPHAN_FRONTIER, sheet.algorithm, len(problems), name, partition, offset, problem)
    ]


def _as_frontier(content: Any) -> tuple[int, list[int]]:
    return int(content["low"]), [int(offset) for offset in content["done"]]


def _contained(sheet: Sheet, manifest: CheckpointManifest) -> Mask:
    """Which produced records met their fate before the checkpoint, as the topics tell it."""
    lineage, number = manifest.policy_version
    numbers, lineages = sheet.all_numbers, sheet.all_lineages
    limit = np.where(sheet.all_codes == TRAINED, number, manifest.skips.count)
    before = (lineages < lineage) | ((lineages == lineage) & (numbers <= limit))
    contained: Mask = np.zeros(len(sheet.produced), dtype=np.bool_)
    known = sheet.at >= 0
    contained[sheet.at[known & before[sheet.chosen]]] = True
    for index in sheet.ranges:
        if before[index]:
            contained |= sheet.covered_by(int(index))
    return contained


def _check_rows(sheet: Sheet, manifest: CheckpointManifest) -> list[Violation]:
    """The rows of the chain up to the checkpoint, one after the other: all there, and hashed to what it says."""
    rolling, reasons = "", Counter[str]()
    for link in sheet.chain.links:
        if link.lineage > manifest.lineage:
            break
        count = manifest.skips.count if link.lineage == manifest.lineage else link.rows or 0
        for sequence in range(1, count + 1):
            index = sheet.books.rows.get((link.lineage, sequence))
            if index is None:
                detail = f"row {sequence} of lineage {link.lineage}"
                return [Violation(Offence.SKIP_ROW_MISSING, sheet.algorithm, 1, None, None, None, detail)]
            row = _row(sheet, index)
            rolling = chained(rolling, row)
            reasons[row.reason.value] += end_of(row) - row.offset
    if rolling == manifest.skips.hash and +reasons == +Counter(manifest.skips.by_reason):
        return []
    return [_mismatch(sheet, manifest, reasons, rolling)]


def _mismatch(sheet: Sheet, manifest: CheckpointManifest, reasons: Counter[str], rolling: str) -> Violation:
    wanted = Counter(manifest.skips.by_reason)
    differing = sorted(reason for reason in {*reasons, *wanted} if reasons[reason] != wanted[reason])
    if differing:
        reason = differing[0]
        detail = f"{reason}: the topic has {reasons[reason]}, checkpoint {manifest.policy_version} {wanted[reason]}"
    else:
        detail = (
            f"hash {rolling or 'of no row'}, checkpoint {manifest.policy_version} has {manifest.skips.hash or 'none'}"
        )
    which = _first_row_of(sheet, differing)
    return Violation(Offence.SKIP_MISMATCH, sheet.algorithm, 1, *which, detail)


def _first_row_of(sheet: Sheet, reasons: Sequence[str]) -> tuple[str | None, int | None, int | None]:
    """Where to begin to look: the first counted row of the reason that differs."""
    codes = [code for code, reason in enumerate(REASONS, start=1) if reason.value in reasons]
    found = np.flatnonzero(sheet.counted & np.isin(sheet.all_codes, codes))
    if not len(found):
        return None, None, None
    index, entries = int(found[0]), sheet.books.entries
    return entries.names[index], entries.partitions[index], entries.offsets[index]


def _row(sheet: Sheet, index: int) -> SkipRecord:
    """As much of a row as its hash is about."""
    entries = sheet.books.entries
    return SkipRecord.model_construct(
        algorithm=sheet.algorithm,
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


_SEVERITY = tuple(Offence)


def balance(run: str, books: Books, manifests: Sequence[CheckpointManifest]) -> Verdict:
    """Judge a run. ``manifests``: its checkpoints as they were before the books were begun."""
    produced = ProducedRecords(books.produced, books.held)
    names = sorted({*books.algorithms, *(manifest.algorithm for manifest in manifests)})
    hashes = np.unique(produced.hashes[produced.hashes != 0])
    ordered = np.fromiter(books.ordered, dtype=np.uint64, count=len(books.ordered))
    return Verdict(
        run=run,
        produced=len(produced),
        distinct=len(hashes),
        undecodable=int(np.count_nonzero(produced.hashes == 0)),
        expired=sum(extent.first for extent in books.held.values()),
        orders=books.orders,
        ordered=len(ordered),
        ordered_unproduced=int(np.count_nonzero(~np.isin(ordered, hashes))),
        dead_letters=dict(sorted(books.dead_letters.items())),
        algorithms=tuple(_judge(name, books, produced, manifests) for name in names),
    )


def _judge(
    name: str, books: Books, produced: ProducedRecords, manifests: Iterable[CheckpointManifest]
) -> AlgorithmBalance:
    own = books.algorithms.get(name, AlgorithmBooks())
    chain = surviving_chain(own.births, beginning_is_held=books.steps_begin)
    sheet = Sheet(name, own, chain, produced)
    newest = newest_checkpoint(sheet, manifests)
    violations = [*check_references(sheet), *check_lineages(sheet), *newest.violations]
    forgotten = 0
    if newest.manifest is not None:
        found, forgotten = check_checkpoint(
            sheet, newest.manifest, rows_are_held=books.skips_begin, steps_are_held=books.steps_begin
        )
        violations = found + violations
    here = ~sheet.expired
    return AlgorithmBalance(
        algorithm=name,
        produced=len(produced),
        trained=int(np.count_nonzero(here & (sheet.codes == TRAINED))),
        skipped=_skipped(sheet),
        pending=int(np.count_nonzero(sheet.fates == PENDING)) - forgotten,
        expired_trained=int(np.count_nonzero(~here & (sheet.codes == TRAINED))),
        expired_skipped=int(np.count_nonzero(~here & (sheet.codes != TRAINED))),
        expired_fates=forgotten,
        steps=len(counted_steps(own, chain)),
        refused_steps=own.refused_steps,
        lineages=tuple(link.lineage for link in chain.links),
        checkpoint=str(newest.manifest.policy_version) if newest.manifest else None,
        undone=_undone(sheet),
        notes=tuple(_notes(books, newest, forgotten)),
        violations=tuple(sorted(violations, key=lambda violation: _SEVERITY.index(violation.offence))),
    )


def _skipped(sheet: Sheet) -> dict[str, int]:
    codes = sheet.codes[~sheet.expired & (sheet.codes != TRAINED)]
    counts = Counter({REASONS[code - 1].value: int(count) for code, count in zip(*_counted(codes), strict=True)})
    counts[REASONS[EXPIRED_RANGE - 1].value] += int(np.count_nonzero(sheet.fates == EXPIRED_RANGE))
    return dict(sorted((+counts).items()))


def _counted(codes: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[list[int], list[int]]:
    values, counts = np.unique(codes, return_counts=True)
    return values.tolist(), counts.tolist()


def _undone(sheet: Sheet) -> Undone:
    trained = sheet.all_codes == TRAINED
    lost = ~sheet.counted
    surviving = {link.lineage for link in sheet.chain.links}
    counted = counted_steps(sheet.books, sheet.chain)
    return Undone(
        lineages=len(sheet.books.births.keys() - surviving),
        steps=len(sheet.books.steps) - sum(len(lineages) for lineages in counted.values()),
        trained=int(np.count_nonzero(lost & trained)),
        rows=int(np.count_nonzero(lost & ~trained & (sheet.all_lineages <= sheet.chain.newest))),
    )


def _notes(books: Books, newest: Newest, forgotten: int) -> Iterable[str]:
    if not books.steps_begin:
        yield "the steps topic has lost its beginning to retention: what was trained there is not known"
    if not books.skips_begin:
        yield "the skips topic has lost its beginning to retention: the checkpoint's rows could not be compared"
    if forgotten:
        yield f"{forgotten} finished records have a fate that the topics have forgotten"
    if newest.unannounced is not None:
        yield f"checkpoint {newest.unannounced.policy_version} has not been announced yet"
    if newest.manifest is None:
        yield "no announced checkpoint yet: nothing is compared with a frontier"
