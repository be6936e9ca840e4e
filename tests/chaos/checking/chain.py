"""Which steps and skip rows survive: of the newest lineage, and of its ancestors up to where each was left. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.schemas.reports import SkipRecord, StepReport

NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Limit:
    """Of a lineage, steps up to ``step`` and skip rows up to ``sequence`` count."""

    step: int = NO_LIMIT
    sequence: int = NO_LIMIT


def surviving(reports: Iterable[StepReport]) -> dict[int, Limit]:
    """Limits by lineage, newest first; empty without reports. A lineage that is not in it counts for nothing."""
    firsts: dict[int, StepReport] = {}
    newest = 0
    for report in reports:
        lineage = report.version.lineage
        newest = max(newest, lineage)
        if not report.micro_batches and lineage not in firsts:
            firsts[lineage] = report
    chain: dict[int, Limit] = {}
    lineage, limit = newest, Limit()
    while lineage and lineage not in chain:
        chain[lineage] = limit
        first = firsts.get(lineage)
        if first is None or first.parent is None:
            break
        lineage, limit = first.parent.lineage, Limit(first.parent.number, first.parent_skips)
    return chain


def counted_steps(reports: Iterable[StepReport], chain: dict[int, Limit]) -> list[StepReport]:
    """Reports of steps that survive, by step; a repeat of a version counts once."""
    found = {
        report.version: report
        for report in reports
        if report.micro_batches
        and (limit := chain.get(report.version.lineage)) is not None
        and report.step <= limit.step
    }
    return sorted(found.values(), key=lambda report: report.step)


def counted_rows(rows: Iterable[SkipRecord], chain: dict[int, Limit]) -> list[SkipRecord]:
    """Rows that survive; a row sent again counts once."""
    found: dict[tuple[int, int], SkipRecord] = {}
    for row in rows:
        limit = chain.get(row.lineage)
        if limit is not None and row.sequence <= limit.sequence:
            found.setdefault((row.lineage, row.sequence), row)
    return list(found.values())
