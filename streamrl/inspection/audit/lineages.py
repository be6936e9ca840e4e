"""Checks of lineages, steps and rows: which steps count, and which ones are missing, broken or written twice. Pure."""

import numpy as np

from streamrl.inspection.audit.columns import position_of
from streamrl.inspection.audit.index import TRAINED, AlgorithmIndex
from streamrl.inspection.audit.report import Violation, ViolationKind
from streamrl.inspection.audit.table import AuditTable
from streamrl.schemas.lineage import LineageChain


def check_lineages(table: AuditTable) -> list[Violation]:
    """All violations that concern lineages, steps and rows rather than single records."""
    return [*_broken_chain(table), *_carried_gaps(table), *_gaps(table), *_conflicts(table)]


def counted_steps(own: AlgorithmIndex, chain: LineageChain) -> dict[int, set[int]]:
    """Surviving step numbers, with the lineages that took these steps."""
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
    """Missing parts of the list of records that were finished on another cluster."""
    # A lineage sends all parts before its first report.
    own, missing = table.index, list[tuple[int, int]]()
    for link in table.chain.links:
        if (start := own.lineage_starts.get(link.lineage)) is not None:
            found = own.carried[link.lineage].parts if link.lineage in own.carried else ()
            missing += [(link.lineage, part) for part in range(start.carried_parts) if part not in found]
    if not missing:
        return []
    detail = f"part {missing[0][1]} of the list of records that lineage {missing[0][0]} carried over is missing"
    return [Violation(ViolationKind.BROKEN_CHAIN, table.algorithm, len(missing), None, None, None, detail)]


def missing_steps(table: AuditTable) -> list[tuple[int, int]]:
    """Steps of the surviving lineages that were never reported, as lineage and number."""
    reported: dict[int, set[int]] = {link.lineage: set() for link in table.chain.links}
    for step in table.index.steps:
        if step.lineage in reported:
            reported[step.lineage].add(step.number)
    missing: list[tuple[int, int]] = []
    for link in table.chain.links:
        numbers = {number for number in reported[link.lineage] if link.holds_step(number)}
        # If a lineage's start is unknown, gaps show only after its first known step. In the newest lineage they show
        # only before its last step.
        begin = min(numbers, default=0) if link.after is None else link.after + 1
        end = link.until if link.until is not None else max(numbers, default=begin - 1)
        missing += [(link.lineage, number) for number in range(begin, end + 1) if number not in numbers]
    return missing


def _gaps(table: AuditTable) -> list[Violation]:
    missing = missing_steps(table)
    if not missing:
        return []
    lineage, number = missing[0]
    name, partition, offset = _trained_after(table, lineage, number)
    detail = f"step {lineage}-{number} is missing"
    return [Violation(ViolationKind.STEP_GAP, table.algorithm, len(missing), name, partition, offset, detail)]


def _trained_after(table: AuditTable, lineage: int, number: int) -> tuple[str | None, int | None, int | None]:
    """The first record that the next step after a gap trained."""
    later = (table.codes == TRAINED) & (table.lineages == lineage) & (table.numbers > number)
    found = np.flatnonzero(later)
    if not len(found):
        return None, None, None
    first = int(found[np.argmin(table.numbers[found])])
    return table.name(first), *position_of(table.keys[first])


def _conflicts(table: AuditTable) -> list[Violation]:
    conflicts, first = table.index.conflicts, table.index.conflicts.first
    if first is None:
        return []
    ref = first.ref
    name, partition, offset = (ref.trajectory_id or None, ref.partition, ref.offset) if ref else (None, None, None)
    found = Violation(ViolationKind.CONFLICT, table.algorithm, conflicts.count, name, partition, offset, first.detail)
    return [found]
