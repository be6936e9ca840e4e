"""The port through which the dispatcher asks about the policies that share its stream, and its one-policy answers.

With one policy the run's own trainer ends every group, and any worker may sample it. ``streamrl/policies`` has the
answers for several policies.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from streamrl.schemas.control import Control
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion
from streamrl.schemas.reports import SkipRecord, StepReport
from streamrl.schemas.trajectories import WorkOrder


class PolicyDispatch(Protocol):
    """Questions about policies, for a role that counts in announced versions. Pure.

    A policy's trainer may number its steps differently. Workers, orders and trajectories carry their policy's name; it
    is empty for the announced policy.
    """

    def observe(self, message: Control) -> bool:
        """Apply a control message; true if a different trainer ends groups from now on."""
        ...

    def trainer_scope(self, run: str) -> str:
        """Prefix of the steps and skips topics of the trainer that ends groups."""
        ...

    def as_announced(self, report: StepReport) -> StepReport:
        """A report of that trainer, converted to announced versions."""
        ...

    def row_as_announced(self, row: SkipRecord) -> SkipRecord:
        """A skip row of that trainer, converted to announced versions."""
        ...

    def announced_number(self, step: int) -> int:
        """The number of the announced version that a step of that trainer makes."""
        ...

    def own_step(self, number: int) -> int | None:
        """That trainer's step that made the version of this number; None if another trainer made it."""
        ...

    def is_never_read(self, row: SkipRecord) -> bool:
        """Whether a row says that the trainer never reads the records that the row covers."""
        ...

    @property
    def trained(self) -> str:
        """The policy whose trainer's end ends the run. Samples and requesters' rewards are for this policy first."""
        ...

    def trainer_in(self, message: Control) -> str | None:
        """The policy that a control message gives a trainer next to the run's own; None if the message gives none."""
        ...

    def ends_run(self, report: StepReport) -> bool:
        """Whether a report of the trained policy ends the run."""
        ...

    @property
    def left_after(self) -> PolicyVersion | None:
        """The announced policy's last version, if versions of another policy are known to follow it; else None."""
        ...

    @property
    def shares(self) -> Mapping[str, float]:
        """The policies that sample next to the announced one, with each one's share of the groups."""
        ...

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """The policy whose workers sample a group without an order; ``there``: policies that have workers."""
        ...

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """The policy whose workers sample a group's missing samples."""
        ...


class OnePolicyDispatch:
    """The answers for a run with one policy."""

    trained: str = SERVED_POLICY
    left_after: PolicyVersion | None = None
    shares: Mapping[str, float] = {}

    def observe(self, message: Control) -> bool:
        """See ``PolicyDispatch``: the trainer never changes."""
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
        """See ``PolicyDispatch``: there is no other trainer."""
        return None

    def ends_run(self, report: StepReport) -> bool:
        """See ``PolicyDispatch``: the trainer is the run's own."""
        return report.finished

    def sampling(self, group_id: str, there: Collection[str]) -> str:
        """See ``PolicyDispatch``: any worker."""
        return ""

    def continuing(self, order: WorkOrder, there: Collection[str]) -> str:
        """See ``PolicyDispatch``: any worker."""
        return ""
