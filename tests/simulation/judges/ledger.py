"""Judges one algorithm's training against the topics: what the surviving model contains, exactly. Knows no simulation.

Rules: duplicate effect (a record or trajectory is in the model twice), ledger (a record is not exactly one of trained,
skipped, pending), lost (the checkpoint calls a pending record finished), phantom (trained or skipped, and not on the
topic), contents (the model does not hold what the reports say), step size, staleness.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef, RefusedStep, SkipReason, SkipRecord, StepReport
from streamrl.schemas.trajectories import Trajectory
from tests.simulation.history import Problem

STARTING_S = 3.0
"""From a model's first report until it reads the topic."""
Spot = tuple[int, int]
"""Partition and offset on the trajectories topic."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest one: its version, its frontier as its manifest has it, the records in its model, in order, and how
    many skip rows of its lineage it contains."""

    version: PolicyVersion
    frontier: Mapping[str, Mapping[str, object]]
    contents: Sequence[RecordRef] | None = None
    skips: int | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was written of one algorithm. ``records``: the trajectories topic (none: bytes that do not decode)."""

    records: Mapping[Spot, Trajectory | None]
    reports: Sequence[StepReport | RefusedStep]
    rows: Sequence[SkipRecord]
    groups_per_step: int
    max_staleness: int
    checkpoint: Checkpoint | None = None
    gone: Mapping[Spot, float] = field(default_factory=dict)
    """Records that retention deleted, and when: a model that began after that owes nothing for them."""
    began: Mapping[int, float] = field(default_factory=dict)
    """When each lineage really began, whatever the clock of its machine said."""
    orphans_through: int = 0
    """What lineages up to this one sampled belongs to a life that the run went on without."""
    has_promotions: bool = False
    """Now this policy is served and now another; ages are judged of those steps that say that it was."""
    rolled_back: tuple[PolicyVersion, int] | None = None
    """What an operator restored last, and the lineage up to which all else that came after it is undone."""


@dataclass
class Chain:
    """The steps and rows that survive, oldest first."""

    steps: dict[PolicyVersion, StepReport] = field(default_factory=dict)
    rows: dict[tuple[int, int], SkipRecord] = field(default_factory=dict)
    lineages: dict[int, int | None] = field(default_factory=dict)
    root: int = 0

    def contains(self, version: PolicyVersion) -> bool:
        """Whether the step that made a version survives."""
        limit = self.lineages.get(version.lineage, -1)
        return limit is None or version.number <= limit


def surviving_chain(reports: Iterable[StepReport | RefusedStep], rows: Iterable[SkipRecord]) -> Chain | Problem:
    """Follow the newest lineage to its ancestors; a report or row that was sent again counts once."""
    firsts: dict[int, StepReport] = {}
    steps: dict[PolicyVersion, StepReport] = {}
    for report in reports:
        if isinstance(report, RefusedStep):
            continue
        if report.group_ids:
            known = steps.setdefault(report.version, report)
            if known.micro_batches != report.micro_batches:
                return Problem("two steps of one version", f"{report.version} was reported with different records")
        else:
            firsts.setdefault(report.version.lineage, report)
    chain = Chain()
    if not firsts:
        return chain
    lineage: int | None = max(firsts)
    last_step: int | None = None
    last_row: int | None = None
    by_lineage: dict[int, list[SkipRecord]] = {}
    for row in rows:
        by_lineage.setdefault(row.lineage, []).append(row)
    while lineage is not None:
        chain.lineages[lineage] = last_step
        for version, report in steps.items():
            if version.lineage == lineage and (last_step is None or version.number <= last_step):
                chain.steps[version] = report
        for row in by_lineage.get(lineage, ()):
            if last_row is None or row.sequence <= last_row:
                known_row = chain.rows.setdefault((lineage, row.sequence), row)
                if (known_row.partition, known_row.offset) != (row.partition, row.offset):
                    return Problem("two rows of one number", f"row {row.sequence} of lineage {lineage}")
        first = firsts.get(lineage)
        if first is None:
            return Problem("lineage without a beginning", f"{lineage} is a parent and never reported its first version")
        chain.root, lineage = lineage, None
        if first.parent is not None:
            lineage, last_step, last_row = first.parent.lineage, first.parent.number, first.parent_skips
    chain.steps = dict(sorted(chain.steps.items(), key=lambda item: item[0].number))
    return chain


def judge_training(evidence: Evidence) -> list[Problem]:
    """Every broken rule."""
    chain = surviving_chain(evidence.reports, evidence.rows)
    if isinstance(chain, Problem):
        return [chain]
    fates = _fates(chain)
    return [
        *_numbering(chain),
        *_duplicates(chain, evidence),
        *_ledger(fates, evidence),
        *_frontier(chain, fates, evidence),
        *_contents(chain, evidence),
        *_sizes(chain, evidence),
        *_staleness(chain, evidence),
        *_orphans(chain, evidence),
        *_undone(chain, evidence),
    ]


def _trained(report: StepReport) -> list[RecordRef]:
    return [ref for batch in report.micro_batches for ref in batch]


def _fates(chain: Chain) -> Counter[Spot]:
    """How many fates each record has met."""
    fates: Counter[Spot] = Counter()
    for report in chain.steps.values():
        fates.update((ref.partition, ref.offset) for ref in _trained(report))
    for row in chain.rows.values():
        fates.update((row.partition, offset) for offset in range(row.offset, row.end_offset or row.offset + 1))
    return fates


def _numbering(chain: Chain) -> list[Problem]:
    numbers = [version.number for version in chain.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        return [Problem("steps", f"expected steps 1, 2, 3 … in the surviving chain, got {numbers}")]
    return []


def _duplicates(chain: Chain, evidence: Evidence) -> list[Problem]:
    found = []
    seen: dict[str, tuple[PolicyVersion, RecordRef]] = {}
    for version, report in chain.steps.items():
        for ref in _trained(report):
            if ref.trajectory_id in seen:
                found.append(Problem("duplicate effect", f"{ref} in {version}, and in {seen[ref.trajectory_id]}"))
            seen[ref.trajectory_id] = (version, ref)
            record = evidence.records.get((ref.partition, ref.offset))
            if record is None or record.trajectory_id != ref.trajectory_id:
                found.append(Problem("phantom", f"{ref} was trained in {version} and is not on the topic"))
    return found


def _ledger(fates: Counter[Spot], evidence: Evidence) -> list[Problem]:
    found = [Problem("ledger", f"{spot} met {count} fates") for spot, count in fates.items() if count > 1]
    expired = {
        (row.partition, offset)
        for row in evidence.rows
        if row.reason in (SkipReason.RETENTION_EXPIRED, SkipReason.BEFORE_ATTACH)
        for offset in range(row.offset, row.end_offset or row.offset + 1)
    }
    absent = [spot for spot in fates if spot not in evidence.records and spot not in expired]
    return found + [Problem("phantom", f"{spot} met a fate and is not on the topic") for spot in absent]


def _frontier(chain: Chain, fates: Counter[Spot], evidence: Evidence) -> list[Problem]:
    checkpoint = evidence.checkpoint
    if checkpoint is None:
        return []
    if not chain.contains(checkpoint.version):
        return [Problem("lineage", f"the newest checkpoint, {checkpoint.version}, is not in the surviving chain")]
    found = []
    for spot in evidence.records:
        finished = is_finished(checkpoint.frontier, spot)
        if (
            finished
            and not fates[spot]
            and evidence.gone.get(spot, float("inf")) > evidence.began.get(chain.root, 0.0) + STARTING_S
        ):
            found.append(Problem("lost", f"{spot} is pending, and finished in checkpoint {checkpoint.version}"))
    for version, report in chain.steps.items():
        if version.number <= checkpoint.version.number:
            for ref in _trained(report):
                if not is_finished(checkpoint.frontier, (ref.partition, ref.offset)):
                    found.append(Problem("frontier", f"{ref} was trained in {version}, and is to be read again"))
    return found + _skipped_and_unfinished(chain, checkpoint)


def _skipped_and_unfinished(chain: Chain, checkpoint: Checkpoint) -> list[Problem]:
    found = []
    for (lineage, sequence), row in chain.rows.items():
        own = checkpoint.version.lineage
        contained = lineage < own or (lineage == own and sequence <= (checkpoint.skips or 0))
        if contained and not is_finished(checkpoint.frontier, (row.partition, row.offset)):
            spot = (row.partition, row.offset)
            found.append(Problem("frontier", f"{spot}, skipped in row {lineage}/{sequence}, is to be read again"))
    return found


def is_finished(frontier: Mapping[str, Mapping[str, object]], spot: Spot) -> bool:
    """Whether a manifest's frontier calls a record finished."""
    partition = frontier.get(str(spot[0]))
    if partition is None:
        return False
    low: Any = partition["low"]
    done: Any = partition["done"]
    passed: Any = partition.get("passed", ())
    return spot[1] < low or spot[1] in done or any(first <= spot[1] < end for first, end in passed)


def _contents(chain: Chain, evidence: Evidence) -> list[Problem]:
    checkpoint = evidence.checkpoint
    if checkpoint is None or checkpoint.contents is None:
        return []
    expected = [
        ref
        for version, report in chain.steps.items()
        if version.number <= checkpoint.version.number
        for ref in _trained(report)
    ]
    if list(checkpoint.contents) == expected:
        return []
    model, reported = Counter(checkpoint.contents), Counter(expected)
    extra, absent = model - reported, reported - model
    return [Problem("contents", f"the model at {checkpoint.version} has {dict(extra)} more, {dict(absent)} less")]


def _sizes(chain: Chain, evidence: Evidence) -> list[Problem]:
    return [
        Problem("step size", f"{version} took {report.group_ids}, expected {evidence.groups_per_step} groups")
        for version, report in chain.steps.items()
        if len(set(report.group_ids)) != evidence.groups_per_step or len(report.group_ids) != evidence.groups_per_step
    ]


def _staleness(chain: Chain, evidence: Evidence) -> list[Problem]:
    """A token in step n was sampled by step n - 1 - max_staleness or a later one, both in served numbers.

    One of an arm of a split is as old as its order, since its weights have numbers of their own.
    """
    found = []
    for own, report in chain.steps.items():
        if evidence.has_promotions and report.served_as is None:
            continue  # whether it was served then is not on record
        version = report.served_as or own
        for ref in _trained(report):
            record = evidence.records.get((ref.partition, ref.offset))
            if record is None:
                continue
            oldest = record.admitted_version if record.policy else record.oldest_version
            age = version.number - 1 - oldest.number
            if age > evidence.max_staleness:
                found.append(Problem("staleness", f"{ref} was {age} steps old in {version}"))
    return found


def _orphans(chain: Chain, evidence: Evidence) -> list[Problem]:
    """Nothing of an abandoned life is trained."""
    trained = [(version, ref) for version, report in chain.steps.items() for ref in _trained(report)]
    return [
        Problem("orphan", f"{ref} was sampled by {record.newest_version} and trained in {version}")
        for version, ref in trained
        if (record := evidence.records.get((ref.partition, ref.offset))) is not None
        and record.newest_version.lineage <= evidence.orphans_through
    ]


def _undone(chain: Chain, evidence: Evidence) -> list[Problem]:
    """What an operator undid stays undone."""
    if evidence.rolled_back is None:
        return []
    restored, through = evidence.rolled_back
    return [
        Problem("restore", f"{version} survives, though {restored} was restored and all after it undone")
        for version in chain.steps
        if version.lineage <= through and version.number > restored.number
    ]
