"""The results of a run's evaluations on held-out prompts, for displays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion

MOST = 400
OVERALL = "eval/pass@1"  # over all sets of prompts


@dataclass
class EvaluationHistory:
    """The newest ``MOST`` evaluations, by ascending step. A repeated step replaces itself and all later ones.

    ``continues``: the version that the newest lineage continues from.
    """

    rows: list[tuple[PolicyVersion, Mapping[str, float]]] = field(default_factory=list)
    continues: PolicyVersion | None = None
    lineage: int = 0

    def add(self, report: EvaluationReport) -> bool:
        """Take a report; returns whether it is new. A late report of an older lineage is not."""
        if self._is_undone(report.version) or (self.rows and report.version <= self.rows[-1][0]):
            return False
        while self.rows and self.rows[-1][0].number >= report.version.number:
            self.rows.pop()
        self.rows.append((report.version, report.metrics))
        del self.rows[:-MOST]
        return True

    def start_lineage(self, lineage: int, parent: PolicyVersion) -> None:
        """Drop the evaluations of weights that a new lineage undoes: it continues from ``parent``."""
        if lineage > self.lineage:
            self.lineage, self.continues = lineage, parent
            self.rows = [row for row in self.rows if not self._is_undone(row[0])]

    def _is_undone(self, version: PolicyVersion) -> bool:
        return self.continues is not None and version.lineage < self.lineage and version.number > self.continues.number

    @property
    def newest(self) -> Mapping[str, float]:
        """The metrics of the newest evaluated weights; empty if there are none."""
        return self.rows[-1][1] if self.rows else {}

    @property
    def pass_at_1(self) -> float | None:
        """Share of held-out samples that passed; None without an evaluation."""
        return self.newest.get(OVERALL)

    def columns(self) -> dict[str, list[float | None]]:
        """Columns for a chart: pass@k of all sets, and of each if there are several, over ``step``."""
        names = sorted({name for _, metrics in self.rows for name in metrics if "/pass@" in name})
        # A single set has the values of all sets: its curves would be drawn twice.
        if len({name.rpartition("/")[0] for name in names}) == 2:
            names = [name for name in names if name.count("/") == 1]
        found: dict[str, list[float | None]] = {"step": [float(version.number) for version, _ in self.rows]}
        for name in names:
            values = [metrics.get(name) for _, metrics in self.rows]
            found[name] = [None if value is None else round(value, 4) for value in values]
        return found
