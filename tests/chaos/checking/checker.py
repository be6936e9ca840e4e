"""The history checker: rules in the manner of Jepsen's Kafka workload, and one fate for every record. Pure.

It shares no code with `streamrl audit`, so that a mistake in one is seen by the other.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.schemas.control import WeightsReady
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import SkipReason, SkipRecord, StepReport
from tests.chaos.checking.books import Books, Place
from tests.chaos.checking.chain import counted_rows, counted_steps, surviving


@dataclass(frozen=True)
class Finished:
    """Per partition of a checkpoint's frontier: the low mark, and finished offsets above it."""

    low: int
    done: frozenset[int]

    def has(self, offset: int) -> bool:
        return offset < self.low or offset in self.done


@dataclass(frozen=True)
class Durable:
    """What the newest checkpoint says: its step, and which records it has finished, by partition."""

    step: int
    frontier: Mapping[int, Finished]

    def has(self, place: Place) -> bool:
        return place[0] in self.frontier and self.frontier[place[0]].has(place[1])


@dataclass
class Findings:
    """``problems`` is empty when all rules hold. Counts are of records that the topic still holds."""

    produced: int = 0
    trained: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    lost: int = 0
    trained_twice: int = 0
    steps: list[StepReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, Any]:
        """What became of the trajectories."""
        fates = {"produced": self.produced, "trained": self.trained, "skipped": dict(self.skipped)}
        return fates | {"pending": self.pending}

    def refuse(self, rule: str, what: object) -> None:
        if len(self.problems) < 50:
            self.problems.append(f"{rule}: {what}")


def check(books: Books, durable: Durable | None, groups_per_step: int, last_step: int | None) -> Findings:
    """All rules. ``durable``: the newest checkpoint. ``last_step``: that the run had to reach, if it had to."""
    findings = Findings(produced=len(books.produced))
    reports = [entry.report for entry in books.reports]
    chain = surviving(reports)
    findings.steps = counted_steps(reports, chain)
    _check_steps(findings, groups_per_step, last_step)
    _check_fates(findings, books, counted_rows(books.skips, chain), durable)
    _check_order(findings, reports)
    _check_repeats(findings, reports)
    _check_acknowledged(findings, books)
    _check_graded(findings, books)
    _check_announcements(findings, books)
    return findings


def _check_steps(findings: Findings, groups_per_step: int, last_step: int | None) -> None:
    numbers = [report.step for report in findings.steps]
    if numbers != list(range(1, len(numbers) + 1)):
        findings.refuse("internal skip", f"surviving steps are {numbers}, not 1, 2, 3 and so on")
    for report in findings.steps:
        if len(report.group_ids) != groups_per_step:
            findings.refuse("step size", f"step {report.step} took {len(report.group_ids)} groups")
    if last_step is not None and (not numbers or numbers[-1] != last_step):
        findings.refuse("last step", f"expected step {last_step}, the surviving chain ends at {numbers[-1:]}")


def _check_fates(findings: Findings, books: Books, rows: list[SkipRecord], durable: Durable | None) -> None:
    trained: Counter[Place] = Counter()
    for report in findings.steps:
        for ref in (ref for batch in report.micro_batches for ref in batch):
            place = (ref.partition, ref.offset)
            trained[place] += 1
            if durable is not None and report.step <= durable.step and not durable.has(place):
                findings.refuse("not finished", f"{ref} was trained, and the newest checkpoint would train it again")
            known = books.produced.get(place)
            expired = known is None and ref.offset < books.first_held.get(ref.partition, 0)
            if not expired and (known is None or known.trajectory_id != ref.trajectory_id):
                findings.refuse("lost write", f"{ref} was trained, the topic has {known} there")
                findings.lost += 1
    skipped = _skipped_places(findings, books, rows)
    ids: Counter[str] = Counter()
    for place, record in books.produced.items():
        count = trained[place] + skipped[place]
        if trained[place] and record.trajectory_id:
            ids[record.trajectory_id] += trained[place]
        if count > 1:
            findings.refuse(
                "two fates", f"{place} {record.trajectory_id}: trained {trained[place]} x, {skipped[place]}"
            )
        if count == 0:
            findings.pending += 1
            if durable is not None and durable.has(place):
                findings.lost += 1
                findings.refuse("lost", f"{place} {record.trajectory_id} is finished in the checkpoint without a fate")
    for name, count in ids.items():
        if count > 1:
            findings.trained_twice += 1
            findings.refuse("duplicate effect", f"{name} entered the gradient {count} times")
    findings.trained = sum(count for place, count in trained.items() if place in books.produced)


def _skipped_places(findings: Findings, books: Books, rows: list[SkipRecord]) -> Counter[Place]:
    skipped: Counter[Place] = Counter()
    for row in rows:
        findings.skipped[row.reason.value] += 1
        if row.reason is SkipReason.RETENTION_EXPIRED:
            skipped.update((row.partition, offset) for offset in range(row.offset, row.end_offset or row.offset + 1))
            continue
        place = (row.partition, row.offset)
        skipped[place] += 1
        known = books.produced.get(place)
        if known is None and row.offset >= books.first_held.get(row.partition, 0):
            findings.refuse("lost write", f"{place} was skipped as {row.reason.value}, and is not on the topic")
    return skipped


def _check_order(findings: Findings, reports: list[StepReport]) -> None:
    """A lineage's steps come one by one, and none comes after a newer lineage has begun (a zombie's write)."""
    seen: set[PolicyVersion] = set()
    newest = PolicyVersion(0, 0)
    for report in reports:
        if report.version in seen:
            continue
        seen.add(report.version)
        if report.version < newest:
            findings.refuse("nonmonotonic send", f"{report.version} came after {newest}: an older trainer wrote")
        elif report.version.lineage == newest.lineage and report.version.number != newest.number + 1:
            findings.refuse("internal skip", f"{report.version} came right after {newest}")
        newest = max(newest, report.version)


def _check_repeats(findings: Findings, reports: list[StepReport]) -> None:
    """The same version always tells the same story: an aborted or half-done announcement was never readable."""
    told: dict[PolicyVersion, tuple[object, ...]] = {}
    for report in reports:
        story = (report.step, report.group_ids, report.micro_batches, report.digests, report.manifest_sha256)
        if told.setdefault(report.version, story) != story:
            findings.refuse("aborted read", f"{report.version} was told in two ways")


def _check_acknowledged(findings: Findings, books: Books) -> None:
    """A worker counts a trajectory when the broker has acknowledged it: the topic holds at least that many."""
    acknowledged: Counter[str] = Counter()
    highest: dict[tuple[str, str], int] = {}
    for beat in books.heartbeats:
        key = (beat.worker_id, beat.incarnation)
        highest[key] = max(highest.get(key, 0), beat.finished_trajectories)
    for (worker, _), count in highest.items():
        acknowledged[worker] += count
    # What it gave to graders is on the trajectories topic as well, unless they have it in hand.
    graded = {record.trajectory_id for record in books.ungraded.values()}
    direct = [record for record in books.produced.values() if record.trajectory_id not in graded]
    stored = Counter(record.worker_id for record in (*direct, *books.ungraded.values()) if record.worker_id)
    deleted = sum(books.first_held.values())
    for worker, count in acknowledged.items():
        if stored[worker] + deleted < count:
            findings.lost += count - stored[worker]
            findings.refuse("lost write", f"{worker} had {count} writes acknowledged, the topic has {stored[worker]}")


def _check_graded(findings: Findings, books: Books) -> None:
    """What graders have committed is on the trajectories topic, or was there before retention took it."""
    known = {record.trajectory_id for record in books.produced.values()}
    if any(books.first_held.values()):
        return
    for (partition, offset), record in books.ungraded.items():
        if offset < books.graded_to.get(partition, 0) and record.trajectory_id not in known:
            findings.lost += 1
            findings.refuse("lost in grading", f"{record.trajectory_id}, committed at {partition}/{offset}")


def _check_announcements(findings: Findings, books: Books) -> None:
    versions = [message.version for message in books.controls if isinstance(message, WeightsReady)]
    if versions != sorted(versions):
        findings.refuse("nonmonotonic announcement", versions)
    reported = {entry.report.version for entry in books.reports}
    for version in set(versions) - reported:
        findings.refuse("aborted read", f"weights {version} were announced and no step report has them")
