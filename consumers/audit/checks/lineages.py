"""Whether the surviving lineages fit together, and whether every one of their steps was reported, once. Pure.

Invariant every_surviving_step_is_reported: the numbers of each lineage's counted steps have no gap.
"""

import numpy as np

from consumers.audit.books.books import TRAINED, AlgorithmBooks
from consumers.audit.books.chain import Chain
from consumers.audit.checks.sheet import Sheet
from consumers.audit.checks.verdict import Offence, Violation


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
