"""What held-out prompts came to at the weights of a run, as displays tell it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.schemas.evaluation import EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion

MOST = 400
OVERALL = "eval/pass@1"  # over all sets


@dataclass
class EvaluationHistory:
    """By step, ascending, the newest. One that was evaluated again takes the place of it and of all after it."""

    rows: list[tuple[PolicyVersion, Mapping[str, float]]] = field(default_factory=list)

    def add(self, report: EvaluationReport) -> bool:
        """Take a report; whether it is news. One of an older lineage that comes late is none."""
        if self.rows and report.version <= self.rows[-1][0]:
            return False
        while self.rows and self.rows[-1][0].number >= report.version.number:
            self.rows.pop()
        self.rows.append((report.version, report.metrics))
        del self.rows[:-MOST]
        return True

    @property
    def newest(self) -> Mapping[str, float]:
        """Of the newest weights that were evaluated; empty if none were."""
        return self.rows[-1][1] if self.rows else {}

    @property
    def pass_at_1(self) -> float | None:
        """Share of held-out samples that passed; None without an evaluation."""
        return self.newest.get(OVERALL)

    def columns(self) -> dict[str, list[float | None]]:
        """pass@k of each set and of all, over ``step``."""
        names = sorted({name for _, metrics in self.rows for name in metrics if "/pass@" in name})
        found: dict[str, list[float | None]] = {"step": [float(version.number) for version, _ in self.rows]}
        for name in names:
            values = [metrics.get(name) for _, metrics in self.rows]
            found[name] = [None if value is None else round(value, 4) for value in values]
        return found
