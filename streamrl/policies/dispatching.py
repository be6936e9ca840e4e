"""The dispatcher's answers where several policies share its stream; see ``producers/dispatch/policies.py``.

The trainer of the policy that is served ends groups. One that was promoted counts its steps in numbers of its own. With
a split, the workers of other policies sample a share of the groups.

Invariant numbers_go_on: reports of a promoted policy's trainer are read in the numbers of served versions. Orders,
workers and admission count in those, so a promotion looks like a trainer that was started again. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamrl.policies.splitting import arm_of
from streamrl.schemas.control import Control, InstanceState, PolicySplit, Promotion, Served, WeightsReady
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, scope_of
from streamrl.schemas.reports import SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import WorkOrder


@dataclass
class SeveralPolicyDispatch:
    """``promotion``: of the weights that were announced last; ``served``: whose follow; ``split``: the last ordered."""

    promotion: Promotion | None = None
    served: Served | None = None
    split: PolicySplit | None = None

    def observe(self, message: Control) -> bool:
        """See ``PolicyDispatch``."""
        match message:
            case WeightsReady() if message.promotion != self.promotion:
                # Its trainer ends groups from now on, and it has consumed others.
                self.promotion = message.promotion
                return True
            case Served():
                self.served = message
            case PolicySplit():
                self.split = message
        return False

    def trainer_scope(self, run: str) -> str:
        """See ``PolicyDispatch``."""
        return scope_of(run, SERVED_POLICY if self.promotion is None else self.promotion.policy)

    def as_announced(self, report: StepReport) -> StepReport:
        """See ``PolicyDispatch``; steps from before the promotion are of lineage 0."""
        if (promotion := self.promotion) is None:
            return report
        parent = None if report.parent is None else promotion.version_of(report.parent)
        return report.model_copy(update={"version": promotion.version_of(report.version), "parent": parent})

    def row_as_announced(self, row: SkipRecord) -> SkipRecord:
        """See ``PolicyDispatch``."""
        if self.promotion is None:
            return row
        lineage, step = self.promotion.version_of(PolicyVersion(row.lineage, row.step))
        # Not validated: numbers below 0 are of this view.
        return row.model_copy(update={"lineage": lineage, "step": step})

    def announced_number(self, step: int) -> int:
        """See ``PolicyDispatch``."""
        return step + (0 if self.promotion is None else self.promotion.shift)

    def own_step(self, number: int) -> int | None:
        """See ``PolicyDispatch``: up to the promotion, versions are other trainers'."""
        if (promotion := self.promotion) is None:
            return number
        return number - promotion.shift if number > promotion.since.number else None

    def is_never_read(self, row: SkipRecord) -> bool:
        """See ``PolicyDispatch``: what was there before an instance was attached."""
        return row.reason is SkipReason.BEFORE_ATTACH

    @property
    def trained(self) -> str:
        """See ``PolicyDispatch``: the one that is served."""
        return SERVED_POLICY if self.served is None else self.served.policy

    def trainer_in(self, message: Control) -> str | None:
        """See ``PolicyDispatch``: an instance, a detached one too, since it may come back."""
        return message.policy if isinstance(message, InstanceState) else None

    def ends_run(self, report: StepReport) -> bool:
        """See ``PolicyDispatch``: not what it ended with before it was served."""
        if not report.finished or self.served is None:
            return report.finished
        return report.served_as is not None and report.served_as > self.served.since

    @property
    def left_after(self) -> PolicyVersion | None:
        """See ``PolicyDispatch``: another policy is served, and no weights of it are announced yet."""
        since = None if self.promotion is None else self.promotion.since
        return None if self.served is None or self.served.since == since else self.served.since

    @property
    def shares(self) -> Mapping[str, float]:
        """See ``PolicyDispatch``: those of the split."""
        return {} if self.split is None else self.split.shares

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """See ``PolicyDispatch``."""
        return sampling_arm(group_id, self.shares, there)

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """See ``PolicyDispatch``."""
        return continuing_arm(order, self.shares, there)


def sampling_arm(group_id: str, shares: Mapping[str, float], there: Collection[str]) -> str:
    """Which policy's workers sample a group that has no order yet; ``there``: those that have workers.

    Its arm's, by the group's name. While that arm has no worker, the served policy's sample it: a group that is held
    back would hold back all behind it. If the served policy has none either, any arm's do.
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
