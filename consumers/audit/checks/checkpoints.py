"""Whether the newest surviving checkpoint's frontier and skip tally are what the topics say. Pure.

Invariants, each with a test of its name: nothing_finished_is_unexplained, nothing_counted_is_read_again,
the_checkpoint_contains_the_rows_on_the_topic.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from consumers.audit.books.books import REASONS, TRAINED
from consumers.audit.books.columns import PARTITION_SHIFT, Mask
from consumers.audit.checks.sheet import PENDING, Sheet
from consumers.audit.checks.verdict import Offence, Violation
from consumers.intake.tally import chained, end_of
from consumers.training.persistence.manifest import CheckpointManifest
from schemas.messages.reports import SkipRecord


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
