"""Gathers a report's data from a run's topics, once, at its end. Joins no group and commits no offset.

Invariant a_fixed_number_of_records_is_read: for a run of any length, only a fixed number of the newest records is read.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import xxhash

from streamrl.bus.history import Extent, History
from streamrl.bus.port import Record
from streamrl.inspection.report.record import LengthFacts, RunMark, SampleText, TopicDigest, WorkerActivity
from streamrl.inspection.report.values import value_facts
from streamrl.observability.run_state.aggregates import LengthCalibration, StalenessHistogram, TrajectoryFates
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary, summary_of
from streamrl.producers.lengths.calibration import recall_of_longest
from streamrl.schemas.control import Served
from streamrl.schemas.errors import WireError
from streamrl.schemas.identifiers import is_plain_name
from streamrl.schemas.messages import Message
from streamrl.schemas.reports import Heartbeat, StepReport
from streamrl.schemas.topics import CONTROL, HEARTBEATS, STEPS, TRAJECTORIES, WORK_ORDERS, Topic
from streamrl.schemas.trajectories import Trajectory, WorkOrder

MOST = {TRAJECTORIES: 60_000, WORK_ORDERS: 20_000, STEPS: 2000, HEARTBEATS: 20_000, CONTROL: 2000}
"""Most records read from each topic, which takes some seconds for any run."""
MOST_GROUPS = 4096
"""Most groups whose rewards are kept, to compare runs."""
SAMPLES = 12
LONGEST_TEXT = 4000
"""Most characters kept of a prompt or completion."""
MOST_INTERVALS = 2000
"""Most intervals kept of a worker: about one per pixel of a wide screen."""
WINDOWS = 16
LEAST = 64
"""Fewest completions in a window: the longest fifth of a smaller one says little."""
_ADOPTED = re.compile(r'^timestamp=(\S+) .*event="weights adopted" version=((?:[^\s/]+/)?\d+-\d+)\b')


async def gather_topics(
    history: History, run: str, logs: Path, reward_weights: Mapping[str, float]
) -> TopicDigest | None:
    """A summary of the topics; None if they hold no trajectory. ``logs``: folder of the workers' log files, if any.

    Raises:
        BusError: see ``History``.
    """
    held = await history.extents(TRAJECTORIES.full_name(run))
    newest = _newest(history, run, TRAJECTORIES)
    summaries = [summary async for record in newest if (summary := summary_of(record, reward_weights))]
    if not summaries:
        return None
    # First and last are by the completion's end, not by its offset.
    summaries.sort(key=lambda summary: summary.finished_at)
    upper, decided = await _read_orders(history, run)
    staleness, restarts = await _steps(history, run, summaries)
    estimated = [Estimated(s.finished_at, s.predicted, s.length, upper.get(s.group_id)) for s in summaries]
    return TopicDigest(
        held=sum(extent.end - extent.first for extent in held.values()),
        ends={place.partition: extent.end for place, extent in held.items()},
        read=len(summaries),
        workers=await _workers(history, run, summaries, logs),
        lengths=length_facts(estimated),
        value=value_facts(summaries, decided),
        staleness=staleness,
        marks=tuple(sorted([*restarts, *await _promotions(history, run)], key=lambda mark: mark.at)),
        rewards=rewards_by_group(summaries),
        first=await _samples(history, run, _one_a_group(summaries)),
        # Chosen from the end, then put back into the order of time.
        last=await _samples(history, run, _one_a_group(summaries[::-1])[::-1]),
    )


async def _newest(history: History, run: str, topic: Topic) -> AsyncIterator[Record]:
    """The newest records of a topic. The share of each partition is the same, so they span about the same time."""
    name = topic.full_name(run)
    extents = await history.extents(name)
    # Not the same count: partitions of long buckets have fewer records.
    share = min(1.0, MOST[topic] / max(1, sum(held.end - held.first for held in extents.values())))
    ranges = {
        tp.partition: Extent(held.end - int(share * (held.end - held.first)), held.end) for tp, held in extents.items()
    }
    if ranges:
        async for record in history.records(name, ranges):
            yield record


async def _messages(history: History, run: str, topic: Topic) -> AsyncIterator[Message]:
    async for record in _newest(history, run, topic):
        with suppress(WireError):
            yield record.message()


async def _read_orders(history: History, run: str) -> tuple[dict[str, int], dict[int, float]]:
    """Upper length estimates by group, the last one if a group was ordered again; and ``WorkOrder.decided``."""
    upper: dict[str, int] = {}
    decided: dict[int, float] = {}
    async for message in _messages(history, run, WORK_ORDERS):
        if isinstance(message, WorkOrder):
            # A group has one estimate for all its samples.
            upper[message.group_id] = message.estimate.upper
            decided |= message.decided or ()
    return upper, decided


async def _workers(
    history: History, run: str, summaries: Sequence[TrajectorySummary], logs: Path
) -> dict[str, WorkerActivity]:
    intervals: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        intervals.setdefault(summary.worker_id, []).append((summary.started_at, summary.finished_at))
    # Names come from records: a name with a path in it must not lead out of the folder of logs.
    adopted = {worker: adoptions(logs / f"{worker}.log") for worker in intervals if is_plain_name(worker)}
    # Log files may be on another machine, or cut. Heartbeats tell the same, up to a second late.
    if not all(adopted.get(worker) for worker in intervals):
        adopted |= {worker: seen for worker, seen in (await _beats(history, run)).items() if not adopted.get(worker)}
    return {
        worker: WorkerActivity(generating=joined(found), adopted=adopted.get(worker, ()))
        for worker, found in sorted(intervals.items())
    }


async def _beats(history: History, run: str) -> dict[str, tuple[tuple[float, str], ...]]:
    """Adoptions by worker, from heartbeats. They are up to one heartbeat late."""
    found: dict[str, list[tuple[float, str]]] = {}
    async for message in _messages(history, run, HEARTBEATS):
        if isinstance(message, Heartbeat):
            seen, version = found.setdefault(message.worker_id, []), message.weights
            if not seen or seen[-1][1] != version:
                seen.append((message.sent_at, version))
    return {worker: tuple(seen) for worker, seen in found.items()}


async def _steps(
    history: History, run: str, summaries: Sequence[TrajectorySummary]
) -> tuple[dict[int, int], list[RunMark]]:
    """Trained trajectories by the age of their oldest token in optimizer steps, and the marks of replaced trainers."""
    fates, ages = TrajectoryFates(kept=MOST[TRAJECTORIES]), StalenessHistogram(fade_every=None)
    marks: list[RunMark] = []
    first: int | None = None
    for summary in summaries:
        fates.arrived((summary.partition, summary.offset), summary.aged_from)
    async for message in _messages(history, run, STEPS):
        if isinstance(message, StepReport):
            first = message.version.lineage if first is None else first
            # The first report of a lineage has no groups. The run's first trainer replaces no other.
            if not message.group_ids and message.version.lineage > first:
                by = "a restore" if message.undoes else "a new trainer"
                marks.append(RunMark(at=message.sent_at, kind="restart", text=f"{by}, from step {message.step}"))
            positions = [(ref.partition, ref.offset) for ref in message.trained_refs]
            # Step n makes version n from version n - 1, from which ages are counted.
            ages.add(fates.trained(positions, message.step, message.version.number - 1))
    return {age: round(count) for age, count in sorted(ages.counts.items())}, marks


async def _promotions(history: History, run: str) -> list[RunMark]:
    """The last promotion: the topic is compacted, so it has no earlier ones."""
    return [
        RunMark(at=message.sent_at, kind="promotion", text=f"{message.policy} is served")
        async for message in _messages(history, run, CONTROL)
        if isinstance(message, Served)
    ]


def rewards_by_group(summaries: Sequence[TrajectorySummary]) -> dict[str, tuple[float, float]]:
    """Mean reward of each group, and the share of groups that had ended before it.

    ``summaries`` ascend in time. If there are more than ``MOST_GROUPS`` groups, those with the smallest hashes of their
    names are kept. So two runs over the same prompts keep the same groups.
    """
    found: dict[str, list[float]] = {}
    for summary in summaries:
        # Removed and inserted again, so that the dictionary is in the order of the groups' ends.
        rewards = found.pop(summary.group_id, [])
        found[summary.group_id] = rewards + ([] if summary.reward is None else [summary.reward])
    ended = {group: (rewards, index / len(found)) for index, (group, rewards) in enumerate(found.items()) if rewards}
    kept = sorted(ended, key=lambda group: xxhash.xxh3_64_intdigest(group.encode(errors="replace")))[:MOST_GROUPS]
    return {
        group: (round(sum(rewards) / len(rewards), 6), round(when, 4))
        for group in kept
        for rewards, when in [ended[group]]
    }


def _one_a_group(summaries: Sequence[TrajectorySummary]) -> list[TrajectorySummary]:
    """The first sample of each of the first groups: many answers to one prompt would show little."""
    found: dict[str, TrajectorySummary] = {}
    for summary in summaries:
        found.setdefault(summary.group_id, summary)
        if len(found) == SAMPLES:
            break
    return list(found.values())


async def _samples(history: History, run: str, summaries: Sequence[TrajectorySummary]) -> tuple[SampleText, ...]:
    places = [(summary.partition, summary.offset) for summary in summaries]
    records = await history.fetch(TRAJECTORIES.full_name(run), places)
    found = []
    for place in places:
        # KeyError: retention deleted the record after its summary was read.
        with suppress(WireError, KeyError):
            message = records[place].message()
            if isinstance(message, Trajectory):
                found.append(_sample(message))
    return tuple(found)


def _sample(trajectory: Trajectory) -> SampleText:
    return SampleText(
        trajectory_id=trajectory.trajectory_id,
        prompt=_cut(trajectory.prompt_text),
        completion=_cut(trajectory.completion_text),
        rewards=trajectory.rewards,
        tokens=len(trajectory.token_ids),
        predicted=trajectory.predicted_length,
        versions=tuple(trajectory.named(span.version) for span in trajectory.version_spans),
        worker=trajectory.worker_id,
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "…"


def joined(intervals: Iterable[tuple[float, float]], most: int = MOST_INTERVALS) -> tuple[tuple[float, float], ...]:
    """The union of intervals, ascending. If there are more than ``most``, the nearest ones are joined."""
    found = list(_union(sorted(intervals), 0.0))
    # The joined gap is doubled until there are few enough intervals, so only the shortest pauses disappear.
    gap = 0.001
    while len(found) > most:
        found = list(_union(found, gap))
        gap *= 2
    return tuple((round(start, 3), round(end, 3)) for start, end in found)


def _union(ascending: Sequence[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    current: tuple[float, float] | None = None
    for start, end in ascending:
        if current is not None and start <= current[1] + gap:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = start, end
    if current is not None:
        yield current


def adoptions(log: Path) -> tuple[tuple[float, str], ...]:
    """Times and versions of a worker's adoptions, from its log file and its rotated copies; empty without a file."""
    copies = [path for path in log.parent.glob(f"{log.name}.*") if path.suffix[1:].isdecimal()]
    # The copy with the highest number is the oldest.
    files = [*sorted(copies, key=lambda path: int(path.suffix[1:]), reverse=True), log]
    return tuple(found for file in files for found in _adoptions_in(file))


def _adoptions_in(file: Path) -> list[tuple[float, str]]:
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return [found for line in lines if (found := _adoption(line)) is not None]
    except OSError:
        return []


def _adoption(line: str) -> tuple[float, str] | None:
    if (match := _ADOPTED.match(line)) is None:
        return None
    try:
        return round(datetime.fromisoformat(match[1]).timestamp(), 3), match[2]
    except ValueError:
        return None


class Estimated(NamedTuple):
    """A completion: its end, its predicted and actual length in tokens, and the upper estimate (None: unknown)."""

    at: float
    predicted: int
    actual: int
    upper: int | None


def length_facts(completions: Sequence[Estimated]) -> LengthFacts | None:
    """The quality of length estimates; None without completions.

    The order is judged within windows of time, because lengths drift as the policy learns.
    """
    if not completions:
        return None
    # Without fading: a report gives all parts of the run the same weight.
    calibration = LengthCalibration(fade_every=None)
    for each in completions:
        calibration.add(each.predicted, each.actual)
    windows = [_judged(window) for window in _windows(sorted(completions, key=lambda each: each.at))]
    return LengthFacts(
        count=len(completions),
        cells=tuple((*cell, round(count)) for cell, count in sorted(calibration.cells.items())),
        recall=_mean([recall for _, recall, _, _ in windows]),
        constant=_mean([constant for _, _, constant, _ in windows]),
        coverage=_coverage(completions),
        factor=calibration.typical_factor,
        windows=tuple((at, recall, coverage) for at, recall, _, coverage in windows),
    )


def _windows(ascending: Sequence[Estimated]) -> list[Sequence[Estimated]]:
    count = max(1, min(WINDOWS, len(ascending) // LEAST))
    # Equal counts rather than equal times, so that each recall is based on equally many completions.
    edges = [round(index * len(ascending) / count) for index in range(count + 1)]
    return [ascending[begin:end] for begin, end in pairwise(edges)]


def _judged(window: Sequence[Estimated]) -> tuple[float, float | None, float | None, float | None]:
    actual = [each.actual for each in window]
    recall = recall_of_longest([each.predicted for each in window], actual)
    # The recall, by chance, of a predictor that takes all completions for equally long.
    constant = recall_of_longest([1] * len(window), actual)
    return round(window[-1].at, 3), recall, constant, _coverage(window)


def _coverage(completions: Sequence[Estimated]) -> float | None:
    known = [each.actual <= each.upper for each in completions if each.upper is not None]
    return sum(known) / len(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
