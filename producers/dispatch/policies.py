"""What the dispatcher asks about the policies that share its stream; and the answers of one policy.

With one policy the run's own trainer ends every group, and every worker may sample it. ``streamrl/policies`` has the
answers for several.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from streamrl.schemas.control import Control
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.trajectories import WorkOrder


class PolicyDispatch(Protocol):
    """The questions about policies of a role that counts in the versions that are announced. Pure.

    A policy's trainer may count its steps otherwise. Workers, orders and trajectories bear their policy's name; the
    name of the policy that is announced is empty there.
    """

    def observe(self, message: Control) -> bool:
        """Take a control message into account; true if it is another trainer that ends groups from now on."""
        ...

    def trainer_scope(self, run: str) -> str:
        """Prefix of the topics on which the trainer that ends groups says what it consumed."""
        ...

    def as_announced(self, report: StepReport) -> StepReport:
        """A report of that trainer, in announced versions."""
        ...

    def row_as_announced(self, row: SkipRecord) -> SkipRecord:
        """The same of a skip row."""
        ...

    def announced_number(self, step: int) -> int:
        """The number of the announced version that a step of that trainer makes."""
        ...

    def own_step(self, number: int) -> int | None:
        """That trainer's step that made the version of this number; None: another trainer's did."""
        ...

    def is_never_read(self, row: SkipRecord) -> bool:
        """Whether a row says that the trainer never reads the records that it stands for."""
        ...

    @property
    def trained(self) -> str:
        """The policy whose trainer's end is the run's: what workers sample and requesters reward is for it first."""
        ...

    def trainer_in(self, message: Control) -> str | None:
        """The policy that a control message says has a trainer beside the run's own; None: it says nothing of that."""
        ...

    def ends_run(self, report: StepReport) -> bool:
        """Whether a report, the last of the trained policy, is the end of the run."""
        ...

    @property
    def left_after(self) -> PolicyVersion | None:
        """The last version of the policy that is announced, if it is known that another's follow; None: it is not."""
        ...

    @property
    def shares(self) -> Mapping[str, float]:
        """Which policies sample beside the one that is announced, and the share of the groups of each."""
        ...

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """Whose workers sample a group that has no order yet; ``there``: policies that have workers."""
        ...

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """Whose workers sample what is missing of a group."""
        ...


class OnePolicyDispatch:
    """The answers for a run with one policy."""

    trained: str = SERVED_POLICY
    left_after: PolicyVersion | None = None
    shares: Mapping[str, float] = {}

    def observe(self, message: Control) -> bool:
        """See ``PolicyDispatch``: it is always the same trainer."""
        return False

    def trainer_scope(self, run: str) -> str:
        """See ``PolicyDispatch``: the run's own topics."""
        return run

    def as_announced(self, report: StepReport) -> StepReport:
        """See ``PolicyDispatch``: the report itself."""
        return report

    def row_as_announced(self, row: SkipRecord) -> SkipRecord:
        """See ``PolicyDispatch``: the row itself."""
        return row

    def announced_number(self, step: int) -> int:
        """See ``PolicyDispatch``: versions are numbered by steps."""
        return step

    def own_step(self, number: int) -> int | None:
        """See ``PolicyDispatch``: versions are numbered by steps."""
        return number

    def is_never_read(self, row: SkipRecord) -> bool:
        """See ``PolicyDispatch``: the trainer reads everything."""
        return False

    def trainer_in(self, message: Control) -> str | None:
        """See ``PolicyDispatch``: there is none."""
        return None

    def ends_run(self, report: StepReport) -> bool:
        """See ``PolicyDispatch``: it is the run's trainer."""
        return report.finished

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """See ``PolicyDispatch``: any worker."""
        return ""

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """See ``PolicyDispatch``: any worker."""
        return ""
