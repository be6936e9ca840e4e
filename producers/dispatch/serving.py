"""Whose trainer ends groups: the policy that is served. One that was promoted counts its steps in numbers of its own.
And whose workers sample them, if there is a split.

Invariant numbers_go_on: what the trainer of a promoted policy says is read in the numbers of served versions, in which
orders, workers and admission count, so that a promotion looks like a trainer that was started again. Pure.
"""

from collections.abc import Collection, Mapping

from streamrl.schemas.control import PolicySplit, Promotion, RunFinished
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, arm_of, scope_of
from streamrl.schemas.reports import SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import WorkOrder


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


def shares_of(split: PolicySplit | None) -> dict[str, float]:
    """What arms there are beside the served policy, with their shares."""
    return {} if split is None else split.shares


def sampling_arm(group_id: str, shares: Mapping[str, float], there: Collection[str]) -> str:
    """Which policy's workers sample a group that has no order yet; ``there``: those that have workers.

    Its arm's, by the group's name. While nobody is there of that arm they are the served policy's, for a group that is
    held back would hold back all behind it; if nobody is there of that one, any arm's.
    """
    arm = arm_of(group_id, shares)
    if arm in there or not shares:
        return arm
    return "" if "" in there else next((other for other in shares if other in there), arm)


def continuing_arm(order: WorkOrder, shares: Mapping[str, float], there: Collection[str]) -> str:
    """Which policy's workers sample what is missing of a group: those that began, as long as some are there.

    Else what was sampled and what comes are of two policies; each trajectory says its own.
    """
    return order.policy if order.policy in there else sampling_arm(order.group_id, shares, there)


def is_before(end: RunFinished, current: PolicyVersion | None, promotion: Promotion | None) -> bool:
    """Whether an end of the run was told before the served policy got to its present version."""
    step = end.step + (0 if promotion is None else promotion.shift)
    return current is not None and step < current.number


def covers_before_attach(row: SkipRecord, partition: int, offset: int) -> bool:
    """Whether a row says of this record that it was there before its instance was attached, which never reads it."""
    return row.reason is SkipReason.BEFORE_ATTACH and row.partition == partition and row.offset <= offset < row.end
