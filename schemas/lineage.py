"""Which steps and skip rows of a run survive. Pure.

All steps and rows of the newest lineage survive, and those of its ancestors that it continued from. A lineage starts
with a step report without groups that names its parent. An ancestor's part that counts is the content of the checkpoint
that its child continued from: steps up to the parent's number, skip rows up to ``parent_skips``.

An operator may go back to an early checkpoint, and later forward again to one that the first move had undone. So a
parent need not be among the steps that survived before. A lineage that moved to another cluster's topic is the first of
its chain. It lists the records that were finished before; the offsets in older lineages are those of the other topic.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipRecord, StepReport


class LineageStart(NamedTuple):
    """The first report of a lineage: the step it started at, and the version it continued from.

    ``undoes`` and ``carried_parts``: see ``StepReport``.
    """

    lineage: int
    step: int
    parent: PolicyVersion | None
    parent_skips: int
    undoes: int = 0
    carried_parts: int = 0

    @classmethod
    def of(cls, report: StepReport) -> "LineageStart":
        """The start that a lineage's first report announces; this is a report without groups."""
        version = report.version
        return cls(
            version.lineage, version.number, report.parent, report.parent_skips, report.undoes, report.carried_parts
        )


class LineageLink(NamedTuple):
    """The part of a lineage that counts: steps ``after < step <= until``, rows up to ``rows``.

    ``after`` is None if the lineage's start is unknown. ``until`` and ``rows`` are None for the newest lineage, of
    which everything counts.
    """

    lineage: int
    after: int | None
    until: int | None
    rows: int | None

    def holds_step(self, number: int) -> bool:
        """Whether a step of the lineage counts. The step that the lineage started from counts too."""
        return (self.after is None or self.after <= number) and (self.until is None or number <= self.until)

    def holds_row(self, sequence: int) -> bool:
        """Whether the skip row with this number counts."""
        return self.rows is None or sequence <= self.rows


class BrokenLineageLink(NamedTuple):
    """A lineage at which the chain is inconsistent, and the reason."""

    lineage: int
    problem: str


@dataclass(frozen=True)
class LineageChain:
    """Links from the oldest lineage to the newest. Reports of lineages below ``begin`` are about another cluster."""

    links: tuple[LineageLink, ...]
    broken: tuple[BrokenLineageLink, ...]
    begin: int = 0

    def link(self, lineage: int) -> LineageLink | None:
        """The part of a lineage that counts; None if nothing of it counts."""
        return next((link for link in self.links if link.lineage == lineage), None)

    @property
    def newest(self) -> int:
        """Number of the newest lineage; 0 if there is none."""
        return self.links[-1].lineage if self.links else 0

    def holds(self, version: PolicyVersion) -> bool:
        """Whether the step that led to a version survives, as far as the reports show."""
        link = self.link(version.lineage)
        if link is None:
            return self._is_beyond(version.lineage)
        return link.until is None or version.number <= link.until

    def holds_row(self, row: SkipRecord) -> bool:
        """Whether a skip row counts, as far as the reports show."""
        link = self.link(row.lineage)
        return self._is_beyond(row.lineage) if link is None else link.holds_row(row.sequence)

    def _is_beyond(self, lineage: int) -> bool:
        """Whether the fate of a lineage outside the chain is unknown.

        This is so for a future lineage, and for one older than the chain if the oldest link's first report has expired.
        """
        if not lineage or lineage > self.newest:
            return True
        oldest = self.links[0]
        return oldest.after is None and lineage < oldest.lineage


def surviving_chain(lineage_starts: Mapping[int, LineageStart], *, beginning_is_held: bool) -> LineageChain:
    """The chain of lineages of one algorithm.

    Args:
        lineage_starts: first reports by lineage.
        beginning_is_held: whether the topic still holds its first report; if not, a start may have expired.
    """
    # The loop goes from the newest lineage to its parent, and so on. ``until`` and ``rows`` are where the child
    # continued: they bound the current lineage. The newest lineage has no bound.
    links: list[LineageLink] = []
    broken: list[BrokenLineageLink] = []
    lineage, until, rows, begin = max(lineage_starts, default=0), None, None, 0
    # Lineages count from 1. The initial model has lineage 0 and no reports.
    while lineage:
        start = lineage_starts.get(lineage)
        links.append(LineageLink(lineage, start.step if start else None, until, rows))
        if start is None:
            if beginning_is_held:
                broken.append(
                    BrokenLineageLink(lineage, f"lineage {lineage} has successors, but its first report is missing")
                )
            break
        problem = _problem(start, until)
        if problem:
            broken.append(BrokenLineageLink(lineage, problem))
        # Only an older parent is followed, so that a wrong report cannot make this loop endless. A parent whose records
        # are on another cluster is not followed.
        begin = lineage if start.carried_parts else 0
        if start.parent is None or start.parent.lineage >= lineage or begin:
            break
        lineage, until, rows = start.parent.lineage, start.parent.number, start.parent_skips
    return LineageChain(tuple(reversed(links)), tuple(broken), begin)


def _problem(start: LineageStart, until: int | None) -> str | None:
    number, step, parent = start.lineage, start.step, start.parent
    if parent is None and step:
        return f"lineage {number} started at step {step} without a parent, expected step 0"
    if parent is not None and parent.lineage >= number:
        return f"lineage {number} names {parent} as its parent, which is not older"
    if parent is not None and parent.number != step:
        return f"lineage {number} started at step {step}, but its parent is {parent}"
    if until is not None and until < step:
        return f"lineage {number} started at step {step}, but a later lineage continued from its step {until}"
    return None


class SurvivingSteps:
    """Keeps the chain up to date as reports arrive. Only the first report of a lineage changes it."""

    def __init__(self, reports: Iterable[StepReport] = ()) -> None:
        self._starts: dict[int, LineageStart] = {}
        self.chain = LineageChain((), ())
        for report in reports:
            self.add(report)

    def add(self, report: StepReport) -> None:
        """Update the chain with a report."""
        if not report.group_ids and report.version.lineage not in self._starts:
            self._starts[report.version.lineage] = LineageStart.of(report)
            self.chain = surviving_chain(self._starts, beginning_is_held=False)
