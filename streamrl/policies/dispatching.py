"""The dispatcher's answers if several policies share its stream; see ``producers/dispatch/policies.py``. Pure.

The trainer of the served policy ends groups. A promoted policy's trainer counts steps in its own numbers. With a split,
workers of other policies sample a share of the groups.

Invariant served_numbers_continue: reports of a promoted policy's trainer are converted to served version numbers.
Orders, workers and admission use those numbers, so a promotion looks like a restarted trainer.
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
    """``PolicyDispatch`` for several policies.

    ``promotion``: from the last announced weights. ``served``: the last promotion ordered. ``split``: the last one.
    """

    promotion: Promotion | None = None
    served: Served | None = None
    split: PolicySplit | None = None

    def observe(self, message: Control) -> bool:
        """See ``PolicyDispatch``."""
        match message:
            case WeightsReady() if message.promotion != self.promotion:
                # The promoted policy's trainer ends groups from now on, and it has consumed different ones.
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
        # Not validated: in served numbers, early steps may be below 0.
        return row.model_copy(update={"lineage": lineage, "step": step})

    def announced_number(self, step: int) -> int:
        """See ``PolicyDispatch``."""
        return step + (0 if self.promotion is None else self.promotion.shift)

    def own_step(self, number: int) -> int | None:
        """See ``PolicyDispatch``: versions up to the promotion are other trainers'."""
        if (promotion := self.promotion) is None:
            return number
        return number - promotion.shift if number > promotion.since.number else None

    def is_never_read(self, row: SkipRecord) -> bool:
        """See ``PolicyDispatch``: trajectories from before an instance was attached."""
        return row.reason is SkipReason.BEFORE_ATTACH

    @property
    def trained(self) -> str:
        """See ``PolicyDispatch``: the served policy."""
        return SERVED_POLICY if self.served is None else self.served.policy

    def trainer_in(self, message: Control) -> str | None:
        """See ``PolicyDispatch``: an instance, even a detached one, since it may come back."""
        return message.policy if isinstance(message, InstanceState) else None

    def ends_run(self, report: StepReport) -> bool:
        """See ``PolicyDispatch``: an end from before the policy was served does not count."""
        if not report.finished or self.served is None:
            return report.finished
        return report.served_as is not None and report.served_as > self.served.since

    @property
    def left_after(self) -> PolicyVersion | None:
        """See ``PolicyDispatch``: not None while a newly served policy has no announced weights yet."""
        since = None if self.promotion is None else self.promotion.since
        return None if self.served is None or self.served.since == since else self.served.since

    @property
    def shares(self) -> Mapping[str, float]:
        """See ``PolicyDispatch``: the split's shares."""
        return {} if self.split is None else self.split.shares

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """See ``PolicyDispatch``."""
        return sampling_arm(group_id, self.shares, there)

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """See ``PolicyDispatch``."""
        return continuing_arm(order, self.shares, there)


def sampling_arm(group_id: str, shares: Mapping[str, float], there: Collection[str]) -> str:
    """The policy whose workers sample a group that has no order yet. ``there``: the policies that have workers.

    The group's name decides its arm. While that arm has no worker, the served policy's workers sample the group, since
    a waiting group would hold up all later ones. If the served policy has no worker either, any arm's sample it.
    """
    arm = arm_of(group_id, shares)
    if arm in there or not shares:
        return arm
    return "" if "" in there else next((other for other in shares if other in there), arm)


def continuing_arm(order: WorkOrder, shares: Mapping[str, float], there: Collection[str]) -> str:
    """The policy whose workers sample the missing part of a group: the one that started it, while it has workers.

    Otherwise the group has samples of two policies; each trajectory names its own.
    """
    return order.policy if order.policy in there else sampling_arm(order.group_id, shares, there)
