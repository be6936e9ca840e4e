"""Which steps and skip rows of a run survive: of the newest lineage all, of its ancestors what it went on from. Pure.

A lineage starts with a step report without groups that names its parent. Of an ancestor, what counts is what the
checkpoint held from which its child went on: steps up to the parent's number, skip rows up to ``parent_skips``. An
operator may go back to an early checkpoint, and later forward again to one that the first move had undone. So a parent
need not be among the steps that survived before. A lineage that went on with another cluster's topic is the first of
its chain: it says itself which records were finished before; older ones speak of other offsets.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipRecord, StepReport


class LineageStart(NamedTuple):
    """The first report of a lineage: at which step it began, and from which version it went on.

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
        """What the first report of a lineage says, which is one without groups."""
        version = report.version
        return cls(
            version.lineage, version.number, report.parent, report.parent_skips, report.undoes, report.carried_parts
        )


class LineageLink(NamedTuple):
    """The part of a lineage that counts: steps ``after < step <= until``, rows up to ``rows``.

    ``after`` None: its start is not known. ``until``, ``rows`` None: it is the newest, and all of it counts.
    """

    lineage: int
    after: int | None
    until: int | None
    rows: int | None

    def holds_step(self, number: int) -> bool:
        """Whether this step of the lineage counts; the step that it started from does."""
        return (self.after is None or self.after <= number) and (self.until is None or number <= self.until)

    def holds_row(self, sequence: int) -> bool:
        """Whether the skip row of this number counts."""
        return self.rows is None or sequence <= self.rows


class BrokenLineageLink(NamedTuple):
    """Why the chain cannot be followed, and at which lineage."""

    lineage: int
    problem: str


@dataclass(frozen=True)
class LineageChain:
    """Links from the oldest lineage to the newest. ``begin``: what lineages below it say is about another cluster."""

    links: tuple[LineageLink, ...]
    broken: tuple[BrokenLineageLink, ...]
    begin: int = 0

    def link(self, lineage: int) -> LineageLink | None:
        """The counted part of a lineage, if any."""
        return next((link for link in self.links if link.lineage == lineage), None)

    @property
    def newest(self) -> int:
        """Number of the newest lineage; 0 if there is none."""
        return self.links[-1].lineage if self.links else 0

    def holds(self, version: PolicyVersion) -> bool:
        """Whether the step that led to a version survives, as far as the reports tell."""
        link = self.link(version.lineage)
        if link is None:
            return self._is_beyond(version.lineage)
        return link.until is None or version.number <= link.until

    def holds_row(self, row: SkipRecord) -> bool:
        """Whether a skip row counts, as far as the reports tell."""
        link = self.link(row.lineage)
        return self._is_beyond(row.lineage) if link is None else link.holds_row(row.sequence)

    def _is_beyond(self, lineage: int) -> bool:
        """Whether nothing tells what became of a lineage outside of the chain: it is one to come, or the first report
        is gone of the oldest that was followed, and it is older.
        """
        if not lineage or lineage > self.newest:
            return True
        oldest = self.links[0]
        return oldest.after is None and lineage < oldest.lineage


def surviving_chain(lineage_starts: Mapping[int, LineageStart], *, beginning_is_held: bool) -> LineageChain:
    """The chain of one algorithm.

    Args:
        lineage_starts: first reports by lineage.
        beginning_is_held: whether the topic still holds its first report; if not, a start may have expired.
    """
    # From the newest lineage to its parent, and so on. ``until`` and ``rows`` are where the child went on: they bound
    # the lineage looked at; of the newest there is no bound.
    links: list[LineageLink] = []
    broken: list[BrokenLineageLink] = []
    lineage, until, rows, begin = max(lineage_starts, default=0), None, None, 0
    # Lineages count from 1; 0 is that of the initial model, which has no reports.
    while lineage:
        start = lineage_starts.get(lineage)
        links.append(LineageLink(lineage, start.step if start else None, until, rows))
        if start is None:
            if beginning_is_held:
                broken.append(
                    BrokenLineageLink(lineage, f"lineage {lineage} went on to others and never announced itself")
                )
            break
        problem = _problem(start, until)
        if problem:
            broken.append(BrokenLineageLink(lineage, problem))
        # Only an older parent is followed, so that a wrong report cannot make this walk go round for ever; and none
        # whose records are of another cluster.
        begin = lineage if start.carried_parts else 0
        if start.parent is None or start.parent.lineage >= lineage or begin:
            break
        lineage, until, rows = start.parent.lineage, start.parent.number, start.parent_skips
    return LineageChain(tuple(reversed(links)), tuple(broken), begin)


def _problem(start: LineageStart, until: int | None) -> str | None:
    number, step, parent = start.lineage, start.step, start.parent
    if parent is None and step:
        return f"lineage {number} began at step {step} without a parent, expected step 0"
    if parent is not None and parent.lineage >= number:
        return f"lineage {number} names {parent} as its parent, which is not older"
    if parent is not None and parent.number != step:
        return f"lineage {number} began at step {step}, its parent is {parent}"
    if until is not None and until < step:
        return f"lineage {number} began at step {step}, a later one went on from its step {until}"
    return None


class SurvivingSteps:
    """The chain as reports come in. Of a lineage only the first report says anything."""

    def __init__(self, reports: Iterable[StepReport] = ()) -> None:
        self._starts: dict[int, LineageStart] = {}
        self.chain = LineageChain((), ())
        for report in reports:
            self.add(report)

    def add(self, report: StepReport) -> None:
        """Take note of a report."""
        if not report.group_ids and report.version.lineage not in self._starts:
            self._starts[report.version.lineage] = LineageStart.of(report)
            self.chain = surviving_chain(self._starts, beginning_is_held=False)
