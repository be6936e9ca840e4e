"""What of a trainer's reports and skip rows survives its crashes, by the rule of the contract; written for tests."""

from collections import Counter
from dataclasses import dataclass

from streamrl.schemas.reports import SkipRecord, StepReport

PartitionOffset = tuple[int, int]


@dataclass(frozen=True)
class Surviving:
    """Steps of the chain of lineages that the newest one stands on, and the skip rows that count with them."""

    steps: list[StepReport]
    skips: dict[PartitionOffset, str]
    places: Counter[PartitionOffset]


def surviving(reports: list[StepReport], skips: list[SkipRecord]) -> Surviving:
    """Follow the parents from the newest lineage."""
    first = {report.version.lineage: report for report in reports if not report.group_ids}
    steps: list[StepReport] = []
    rows: dict[tuple[int, int], SkipRecord] = {}
    lineage, last_step, last_row = max(first), 1 << 30, 1 << 30
    while True:
        steps += [r for r in reports if r.version.lineage == lineage and r.group_ids and r.step <= last_step]
        rows |= {(lineage, s.sequence): s for s in skips if s.lineage == lineage and s.sequence <= last_row}
        parent = first[lineage].parent
        if parent is None:
            break
        last_row, (lineage, last_step) = first[lineage].parent_skips, parent
    places: Counter[PartitionOffset] = Counter(
        (ref.partition, ref.offset) for r in steps for b in r.micro_batches for ref in b
    )
    for row in rows.values():
        places.update((row.partition, offset) for offset in range(row.offset, row.end_offset or row.offset + 1))
    skipped = {(row.partition, row.offset): row.reason.value for row in rows.values()}
    return Surviving(sorted(steps, key=lambda report: report.step), skipped, places)
