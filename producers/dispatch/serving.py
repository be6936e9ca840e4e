"""Whose trainer ends groups: the policy that is served. One that was promoted counts its steps in numbers of its own.

Invariant numbers_go_on: what the trainer of a promoted policy says is read in the numbers of served versions, in which
orders, workers and admission count, so that a promotion looks like a trainer that was started again. Pure.
"""

from schemas.control import Promotion, RunFinished
from schemas.identifiers import SERVED_POLICY, PolicyVersion, scope_of
from schemas.reports import SkipReason, SkipRecord, StepReport


def served_scope(run: str, promotion: Promotion | None) -> str:
    """Prefix of the topics on which the trainer of the served policy says what it consumed."""
    return scope_of(run, SERVED_POLICY if promotion is None else promotion.policy)


def report_as_served(report: StepReport, promotion: Promotion | None) -> StepReport:
    """A report of the served policy's trainer, in served numbers; steps from before its promotion are of lineage 0."""
    if promotion is None:
        return report
    parent = None if report.parent is None else promotion.version_of(report.parent)
    return report.model_copy(update={"version": promotion.version_of(report.version), "parent": parent})


def row_as_served(row: SkipRecord, promotion: Promotion | None) -> SkipRecord:
    """The same of a skip row."""
    if promotion is None:
        return row
    lineage, step = promotion.version_of(PolicyVersion(row.lineage, row.step))
    return row.model_copy(update={"lineage": lineage, "step": step})  # not validated: numbers below 0 are of this view


def is_before(end: RunFinished, current: PolicyVersion | None, promotion: Promotion | None) -> bool:
    """Whether an end of the run was told before the served policy got to its present version."""
    step = end.step + (0 if promotion is None else promotion.shift)
    return current is not None and step < current.number


def covers_before_attach(row: SkipRecord, partition: int, offset: int) -> bool:
    """Whether a row says of this record that it was there before its instance was attached, which never reads it."""
    end = row.offset + 1 if row.end_offset is None else row.end_offset
    return row.reason is SkipReason.BEFORE_ATTACH and row.partition == partition and row.offset <= offset < end
