"""The recorded steps by lineage, and which of them lie on the chain that leads to a lineage. Pure.

Invariant only_the_surviving_chain_counts: of an ancestor, only the steps up to where its child went on from count.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from consumers.audit.books.chain import Birth, Link, surviving_chain
from schemas.errors import UserError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RefusedStep, SkipRecord, StepReport


@dataclass(frozen=True)
class Stretch:
    """Steps ``first`` to ``last`` (both inclusive; none if last < first) of one lineage, as part of a chain."""

    lineage: int
    first: int
    last: int

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.last}" if self.last >= self.first else "no step"
        return f"{steps} of lineage {self.lineage}"


@dataclass
class StepLog:
    """The reports of one algorithm, as they stand on the steps topic; repeats of a version are ignored.

    ``births``: by lineage; one whose first report is gone is taken to begin with the first step that is left of it.
    """

    reports: dict[PolicyVersion, StepReport] = field(default_factory=dict)
    births: dict[int, Birth] = field(default_factory=dict)
    refused: list[RefusedStep] = field(default_factory=list)

    def observe(self, message: StepReport | RefusedStep) -> None:
        """Take the next message of the topic."""
        if isinstance(message, RefusedStep):
            self.refused.append(message)
            return
        lineage, step = message.version.lineage, message.step
        if message.group_ids:
            self.reports.setdefault(message.version, message)
            self.births.setdefault(lineage, Birth(lineage, step - 1, None, 0))
        else:
            self.births.setdefault(lineage, Birth(lineage, step, message.parent, message.parent_skips))

    @property
    def newest(self) -> int:
        """The newest lineage, whose chain is the one that survives.

        Raises:
            UserError: there are no reports.
        """
        if not self.births:
            raise UserError("expected reports of optimizer steps on the steps topic, got none: nothing was trained")
        return max(self.births)

    def chain(self, lineage: int | None = None) -> tuple[Stretch, ...]:
        """The stretches that a lineage (None: the newest) consists of, oldest first.

        Raises:
            UserError: there is no such lineage.
        """
        return tuple(
            Stretch(link.lineage, link.after + 1, self._last(link) if link.until is None else link.until)
            for link in self._links(lineage)
            if link.after is not None
        )

    def _links(self, lineage: int | None) -> tuple[Link, ...]:
        number = self.newest if lineage is None else lineage
        if number not in self.births:
            known = ", ".join(str(each) for each in sorted(self.births))
            raise UserError(f"expected one of the lineages {known}, got {lineage}")
        known_by_then = {each: birth for each, birth in self.births.items() if each <= number}
        return surviving_chain(known_by_then, beginning_is_held=False).links

    def _last(self, link: Link) -> int:
        steps = [version.number for version in self.reports if version.lineage == link.lineage]
        return max(steps, default=link.after or 0)

    def counts(self, version: PolicyVersion) -> bool:
        """Whether this step is in the surviving chain."""
        stretch = holding(self.chain(), version.number)
        return stretch is not None and stretch.lineage == version.lineage

    def counts_row(self, row: SkipRecord) -> bool:
        """Whether a skip row belongs to the surviving chain."""
        link = next((link for link in self._links(None) if link.lineage == row.lineage), None)
        return link is not None and (link.rows is None or row.sequence <= link.rows)

    def attempts(self, step: int, chain: Iterable[Stretch]) -> list[RefusedStep]:
        """Gradients of this step that were not applied, computed from weights of the chain."""
        lineages = {stretch.lineage for stretch in chain if stretch.first <= step <= stretch.last + 1}
        return [refused for refused in self.refused if refused.step == step and refused.version.lineage in lineages]


def holding(chain: Iterable[Stretch], step: int) -> Stretch | None:
    """The stretch that a step is in."""
    return next((stretch for stretch in chain if stretch.first <= step <= stretch.last), None)
