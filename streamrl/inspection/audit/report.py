"""The result of an audit, as data that prints as JSON.

The accounting identity, per algorithm: produced = trained + skipped + pending + ``expired_fates`` + ``carried_over``.
``expired_fates`` are finished records whose report or skip row retention has deleted. ``carried_over`` are records that
were finished on another cluster.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self


class ViolationKind(StrEnum):
    """The ways in which the identity can be broken, the worst first. ``EXPLANATIONS`` puts them into words."""

    LOST = "lost"
    TRAINED_TWICE = "trained_twice"
    TWO_FATES = "two_fates"
    SKIPPED_TWICE = "skipped_twice"
    UNKNOWN_RECORD = "unknown_record"
    WRONG_RECORD = "wrong_record"
    NOT_FINISHED = "not_finished"
    FINISHED_EARLY = "finished_early"
    ORPHAN_FRONTIER = "orphan_frontier"
    SKIP_ROW_MISSING = "skip_row_missing"
    SKIP_MISMATCH = "skip_mismatch"
    STEP_GAP = "step_gap"
    BROKEN_CHAIN = "broken_chain"
    UNREPORTED_CHECKPOINT = "unreported_checkpoint"
    CONFLICT = "conflict"


EXPLANATIONS = {
    ViolationKind.LOST: "finished in the newest checkpoint's frontier, but neither trained nor skipped",
    ViolationKind.TRAINED_TWICE: "trained more than once by the surviving steps",
    ViolationKind.TWO_FATES: "both trained and skipped",
    ViolationKind.SKIPPED_TWICE: "skipped by more than one row",
    ViolationKind.UNKNOWN_RECORD: "trained or skipped, but not on the trajectories topic",
    ViolationKind.WRONG_RECORD: "trained or skipped under a name that the record does not have",
    ViolationKind.NOT_FINISHED: "trained or skipped before the newest checkpoint, which would read it again",
    ViolationKind.FINISHED_EARLY: "finished in the newest checkpoint's frontier before it was trained or skipped",
    ViolationKind.ORPHAN_FRONTIER: "the newest checkpoint's frontier does not belong to this topic",
    ViolationKind.SKIP_ROW_MISSING: "a skip row that a checkpoint contains is not on the skips topic",
    ViolationKind.SKIP_MISMATCH: "the skip rows on the topic are not those that the checkpoint contains",
    ViolationKind.STEP_GAP: "a step of the surviving lineages was never reported",
    ViolationKind.BROKEN_CHAIN: "the lineages' parents do not fit together",
    ViolationKind.UNREPORTED_CHECKPOINT: "a checkpoint is newer than any report",
    ViolationKind.CONFLICT: "one version or row was written with two contents",
}


@dataclass(frozen=True)
class Violation:
    """The first of ``count`` violations of one kind."""

    kind: ViolationKind
    algorithm: str
    count: int
    trajectory_id: str | None
    partition: int | None
    offset: int | None
    detail: str

    def __str__(self) -> str:
        where = "" if self.partition is None else f" at partition {self.partition} offset {self.offset}"
        name = "" if self.trajectory_id is None else f" {self.trajectory_id}"
        # A position without a name: the record's bytes did not decode.
        if not name:
            name = " a record without a readable name" if where else ""
        more = f" ({self.count} in all)" if self.count > 1 else ""
        detail = f"; {self.detail}" if self.detail else ""
        line = f"{self.kind.value}:{name}{where}{more}: {EXPLANATIONS[self.kind]}{detail} [{self.algorithm}]"
        # Names come from the topics: an escape sequence in them must not reach a terminal.
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


@dataclass(frozen=True)
class UndoneWork:
    """Work that crashes or an operator undid: it was reported, but no surviving lineage contains it."""

    lineages: int = 0
    steps: int = 0
    trained: int = 0
    rows: int = 0


class Waiting(StrEnum):
    """Why a record is pending, as far as the topics show it. Of several reasons, the first counts."""

    UNDONE = "a crash or a restore undid its training or skipping: it will be trained or skipped again"
    COPY = "a copy of a trained trajectory, which will be skipped when it is read"
    UNFINISHED_GROUP = "its group has samples that are not on the topic yet"
    READ = "read, in a complete group that waits for its step"
    BEHIND = "after every trained or skipped record of its partition: not read yet, or just read"


@dataclass(frozen=True)
class AlgorithmBalance:
    """Records of the trajectories topic by their fate in one algorithm.

    ``trained`` and ``skipped``: records on the topic, as the surviving lineages reported them. ``expired_trained`` and
    ``expired_skipped``: such records that retention has deleted since, which are in no other figure.
    ``expired_fates``: finished records whose report or row is deleted. ``undone``: by crashes; ``rolled_back``: by an
    operator. ``carried_over``: finished on another cluster. ``waiting``: the pending records by ``Waiting``'s names.
    ``finished``: the trainer has reported that the run reached its end.
    """

    algorithm: str
    produced: int
    trained: int
    skipped: dict[str, int]
    pending: int
    expired_trained: int
    expired_skipped: int
    expired_fates: int
    steps: int
    refused_steps: int
    lineages: tuple[int, ...]
    checkpoint: str | None
    undone: UndoneWork
    rolled_back: UndoneWork = UndoneWork()
    carried_over: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    finished: bool = False
    notes: tuple[str, ...] = ()
    violations: tuple[Violation, ...] = ()

    @property
    def skipped_in_all(self) -> int:
        """Records that were skipped for any reason."""
        return sum(self.skipped.values())

    @property
    def is_balanced(self) -> bool:
        """Whether every record has exactly one fate."""
        # produced = trained + skipped + expired_fates + carried_over + pending. The sum alone proves little: a lost
        # record still counts as pending in it.
        fates = self.trained + self.skipped_in_all + self.expired_fates + self.carried_over
        return not self.violations and self.produced == fates + self.pending


@dataclass(frozen=True)
class AuditReport:
    """The audit of a run. ``produced``: records that the trajectories topic holds; ``distinct``: names among them."""

    run: str
    produced: int
    distinct: int
    undecodable: int
    # Offsets that retention deleted; work orders; distinct trajectories in the orders, and those never produced.
    expired: int
    orders: int
    ordered: int
    ordered_unproduced: int
    dead_letters: dict[str, int]
    algorithms: tuple[AlgorithmBalance, ...]
    # Records of trajectories that another worker continued, and how often workers did so.
    continued: int = 0
    continuations: int = 0
    # Distinct trajectories that went to graders; those of them that are not on the trajectories topic.
    sampled: int = 0
    in_grading: int = 0
    # Records of sessions' trajectories, and the turns in them.
    sessions: int = 0
    turns: int = 0
    seconds: float = 0.0
    violations: tuple[Violation, ...] = field(init=False)

    def __post_init__(self) -> None:
        # A frozen dataclass refuses plain assignment. Derived violations cannot differ from the algorithms'.
        object.__setattr__(self, "violations", tuple(_flat(each.violations for each in self.algorithms)))

    @property
    def is_balanced(self) -> bool:
        """Whether every algorithm's accounts add up."""
        return all(each.is_balanced for each in self.algorithms)

    @property
    def is_finished(self) -> bool:
        """Whether every algorithm's trainer has reported that the run reached its end."""
        return bool(self.algorithms) and all(each.finished for each in self.algorithms)

    def timed(self, seconds: float) -> Self:
        """The same report, with the seconds that the audit took."""
        # ``replace`` runs ``__post_init__``, which derives the violations again.
        return replace(self, seconds=seconds)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-safe data."""
        algorithms = {each.algorithm: {**asdict(each), "balanced": each.is_balanced} for each in self.algorithms}
        # Every algorithm gives every record a fate of its own, so totals count a record once per algorithm.
        total = {
            "produced": sum(each.produced for each in self.algorithms) if self.algorithms else self.produced,
            "trained": sum(each.trained for each in self.algorithms),
            "skipped": sum(each.skipped_in_all for each in self.algorithms),
            "pending": sum(each.pending for each in self.algorithms) if self.algorithms else self.produced,
        }
        return {"balanced": self.is_balanced, "total": total, **asdict(self), "algorithms": algorithms}


def _flat(groups: Iterable[tuple[Violation, ...]]) -> list[Violation]:
    return [violation for group in groups for violation in group]
