"""What a run's records add up to: bounded aggregates, each of which takes one kind of figure. Pure.

Invariant each_is_bounded: whatever comes, what an aggregate holds has an upper limit. Times are epoch seconds, and come
with the figures: no aggregate asks a clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from cachetools import FIFOCache

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport

NO_VERSION = PolicyVersion(0, 0)
KEPT_STEPS = 2000
"""Steps kept whole, some megabytes. A resumed trainer falls back to a checkpoint, hardly ever further than that."""
ENDS = 5
"""Steps whose mean reward stands for the beginning of a run, and for its end: one step alone is noisy."""
RATE_STEPS = 10
LAG_PREFIX = "kafka/lag/bucket_"
"""Of metrics of a step: records of a length bucket that are not finished."""
K = TypeVar("K")


class StepEntry(NamedTuple):
    """One optimizer step as the trainer reported it. ``trajectories``: in its micro-batches."""

    step: int
    version: PolicyVersion
    sent_at: float
    trajectories: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepSums:
    """Over many steps. ``tokens``: of completions; seconds of whole steps and of waiting for a batch.

    ``staleness`` is a sum over trajectories, so that dividing by ``trajectories`` gives their mean.
    """

    trajectories: int = 0
    tokens: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    staleness: float = 0.0
    staleness_max: float = 0.0

    def plus(self, entry: StepEntry) -> "StepSums":
        """These and one step more."""
        metrics = entry.metrics
        return StepSums(
            trajectories=self.trajectories + entry.trajectories,
            tokens=self.tokens + metrics.get("completions/num_tokens", 0.0),
            step_s=self.step_s + metrics.get("time/step", 0.0),
            wait_s=self.wait_s + metrics.get("time/wait_for_batch", 0.0),
            # The step tells a mean over its trajectories; steps differ in how many they have.
            staleness=self.staleness + metrics.get("off_policy/mean", 0.0) * entry.trajectories,
            staleness_max=max(self.staleness_max, metrics.get("off_policy/max", 0.0)),
        )


@dataclass
class StepHistory:
    """Every optimizer step of a run: the newest whole, older ones as sums.

    Invariant a_resumed_trainer_takes_its_steps_back: of steps taken again, the newer ones count. A resumed trainer
    first reports the step it goes on from, without micro-batches; what came after that step is undone then.
    """

    entries: deque[StepEntry] = field(default_factory=deque)
    first_rewards: list[tuple[int, float]] = field(default_factory=list)
    _older: StepSums = field(default_factory=StepSums)

    def add(self, report: StepReport) -> bool:
        """Take a report of the newest lineage; whether a step was taken in it."""
        taken = bool(report.micro_batches)
        # Of version n, step n is the newest: a report without a step keeps that one and undoes what came after.
        undone_from = report.step if taken else report.step + 1
        while self.entries and self.entries[-1].step >= undone_from:
            self.entries.pop()
        self.first_rewards = [(step, reward) for step, reward in self.first_rewards if step < undone_from]
        if taken:
            trajectories = sum(len(batch) for batch in report.micro_batches)
            entry = StepEntry(report.step, report.version, report.sent_at, trajectories, report.metrics)
            self._append(entry)
        return taken

    def _append(self, entry: StepEntry) -> None:
        self.entries.append(entry)
        if len(self.first_rewards) < ENDS and "reward" in entry.metrics:
            self.first_rewards.append((entry.step, entry.metrics["reward"]))
        if len(self.entries) > KEPT_STEPS:
            # What leaves stays in the sums, even if a trainer fell back further than that.
            self._older = self._older.plus(self.entries.popleft())

    @property
    def newest(self) -> StepEntry | None:
        """The last step that was taken."""
        return self.entries[-1] if self.entries else None

    def sums(self) -> StepSums:
        """Over all steps."""
        total = self._older
        for entry in self.entries:
            total = total.plus(entry)
        return total

    def last_rewards(self) -> list[float]:
        """Of the newest steps that told one, at most five."""
        told = [entry.metrics["reward"] for entry in self.entries if "reward" in entry.metrics]
        return told[-ENDS:]

    def pace(self, now: float | None = None) -> "StepPace":
        """Over the last ten steps, up to the newest; with ``now``, the time in which a step is overdue counts too.

        Of the newest lineage alone: how long the run stood still before it says nothing of the pace.
        """
        lineage = self.entries[-1].version.lineage if self.entries else 0
        entries = [entry for entry in list(self.entries)[-RATE_STEPS - 1 :] if entry.version.lineage == lineage]
        if len(entries) < 2:
            return StepPace(0.0, 0.0)
        # What the first of them trained was trained before its report, outside of the time that is divided by.
        elapsed, steps = entries[-1].sent_at - entries[0].sent_at, len(entries) - 1
        if now is not None:  # as long as a step usually takes, nothing speaks for a change of pace
            elapsed += max(0.0, now - entries[-1].sent_at - elapsed / steps)
        if elapsed <= 0:
            return StepPace(0.0, 0.0)
        return StepPace(steps / elapsed, sum(entry.trajectories for entry in entries[1:]) / elapsed)


class StepPace(NamedTuple):
    """Optimizer steps, and trajectories trained in them, a second."""

    steps_per_s: float
    trajectories_per_s: float


LEAST_S = 1.0
"""Over less than that, what comes in bursts is no rate."""


@dataclass
class Rate:
    """How much came a second: counts by tenths of a second within a window, so that at most ten are held for each."""

    window_s: float = 10.0
    total: float = 0.0
    _since: float | None = None
    _slots: deque[list[float]] = field(default_factory=deque)
    _held: float = 0.0

    def add(self, at: float, amount: float = 1.0) -> None:
        """Note what came ``at`` (epoch seconds); what lies behind the newest slot is counted in it."""
        # Tenths of a second: fine enough for a window of seconds, and few enough to hold.
        self.total += amount
        slot = int(at * 10) / 10
        self._since = slot if self._since is None else self._since
        # Records of several partitions come a little out of order; a late one counts now rather than not at all.
        if self._slots and slot <= self._slots[-1][0]:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])
        self._held += amount
        self._forget(self._slots[-1][0])

    def per_s(self, now: float) -> float:
        """Mean over the window that ends now, or over the time since the first came if that is shorter."""
        self._forget(now)
        seen_s = self.window_s if self._since is None else min(self.window_s, max(LEAST_S, now - self._since))
        # Adding and taking away floating-point amounts may leave a little less than nothing.
        return max(0.0, self._held) / seen_s

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - self.window_s:
            self._held -= self._slots.popleft()[1]


EVENTS_KEPT = 120
REPEAT_WITHIN_S = 5.0


class Event(NamedTuple):
    """``level``: info, good, warn or bad. ``times``: how often it came since ``at``."""

    number: int
    at: float
    level: str
    text: str
    times: int = 1


@dataclass
class EventLog:
    """What is worth a line, newest last; repeats are counted instead of repeated."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    numbered: int = 0

    def add(self, at: float, level: str, text: str, times: int = 1) -> None:
        """Note an event; the same one a moment ago is counted up."""
        # Two kinds of event that alternate are still counted up: the last four are looked at.
        for index in range(-1, -min(4, len(self.events)) - 1, -1):
            event = self.events[index]
            if event.text == text and event.level == level and at - event.at < REPEAT_WITHIN_S:
                self.events[index] = event._replace(times=event.times + times)
                return
        self.numbered += 1
        self.events.append(Event(self.numbered, at, level, text, times))


CurveRow = dict[str, float | None]


@dataclass
class Curves:
    """Metrics over the optimizer steps, few enough to draw.

    At most ``most`` points, each the mean of ``stride`` steps, so that all of the past stays in view. ``families``:
    beginnings and ends of further names, of which a few are taken as they come.
    """

    names: Sequence[str]
    most: int = 400
    families: Sequence[tuple[str, str]] = ()
    stride: int = 1
    rows: list[CurveRow] = field(default_factory=list)
    _pending: list[CurveRow] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. One that was seen before takes the place of it and of all after it: its trainer was resumed."""
        for rows in (self._pending, self.rows):
            while rows and (rows[-1]["step"] or 0) >= step:
                rows.pop()
        self._take_names(values)
        # Points of ``stride`` steps each; a rest waits here, and is drawn as the last point.
        self._pending.append({"step": float(step), **{name: values.get(name) for name in self.names}})
        if len(self._pending) >= self.stride:
            self.rows.append(_mean(self._pending))
            self._pending.clear()
        if len(self.rows) > self.most:  # every second point goes: neighbours become their mean
            self.rows = [_mean(self.rows[begin : begin + 2]) for begin in range(0, len(self.rows), 2)]
            self.stride *= 2

    def _take_names(self, values: Mapping[str, float]) -> None:
        room = MOST_IN_FAMILIES - sum(_is_of(name, self.families) for name in self.names)
        new = [name for name in values if name not in self.names and _is_of(name, self.families)]
        self.names = (*self.names, *new[: max(0, room)])

    def columns(self) -> dict[str, list[float | None]]:
        """By name, and the steps as ``step``; what is not a whole point yet is the last one."""
        rows = [*self.rows, *([_mean(self._pending)] if self._pending else [])]
        return {name: [_short(row.get(name)) for row in rows] for name in ("step", *self.names)}


MOST_IN_FAMILIES = 8
"""A run may have many reward functions; a chart has room for some."""


def _is_of(name: str, families: Sequence[tuple[str, str]]) -> bool:
    return any(name.startswith(begin) and name.endswith(end) for begin, end in families)


def _mean(rows: Sequence[CurveRow]) -> CurveRow:
    mean: CurveRow = {}
    for name in rows[-1]:  # names only ever come up
        known = [value for row in rows if (value := row.get(name)) is not None]
        mean[name] = sum(known) / len(known) if known else None
    # A point stands at its last step, so that a step taken again is found behind it or not at all.
    mean["step"] = rows[-1]["step"]
    return mean


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}") if abs(value) < 1e4 else round(value, 1)


FATES_KEPT = 20_000
"""Some minutes of a fast run: far more than displays list, and a few megabytes."""
RecordPosition = tuple[int, int]
"""Partition and offset."""


@dataclass
class TrajectoryFates:
    """What became of the newest trajectories: trained in a step, or skipped; and how old they were then.

    By partition and offset. ``kept``: of each kind; the oldest are forgotten.
    """

    kept: int = FATES_KEPT
    oldest_version: FIFOCache[RecordPosition, int] = field(init=False)
    fates: FIFOCache[RecordPosition, str] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing is known yet."""
        self.oldest_version, self.fates = FIFOCache(self.kept), FIFOCache(self.kept)

    def arrived(self, position: RecordPosition, oldest_version: int) -> None:
        """A trajectory came whose oldest weights have this number."""
        self.oldest_version[position] = oldest_version

    def settle(self, position: RecordPosition, fate: str) -> None:
        """A trajectory was trained or skipped, in words."""
        self.fates[position] = fate

    def trained(self, positions: Iterable[RecordPosition], step: int, base: int) -> Iterator[int]:
        """These were trained in a step that improved weights number ``base``; the ages of those that were seen."""
        for position in positions:
            self.settle(position, f"trained in step {step}")
            # Once trained it is not asked for again, which leaves room for those that wait.
            number = self.oldest_version.pop(position, None)
            if number is not None:
                yield base - number

    def of(self, position: RecordPosition, *, over: bool = False) -> str:
        """As text. ``over``: the run is finished, so that nothing waits any more."""
        return self.fates.get(position, "left over" if over else "waiting")


PER_DOUBLING = 2
CLASSES = 40
"""Length classes, two for each doubling: up to 2 ** 20 tokens. Ages of trajectories stop at the last one too."""
WITHIN = 1.5
FADE_EVERY = 20_000
"""Counts are halved each time that so many came, so that what is shown is of the recent past of a long run."""


def length_class(tokens: int) -> int:
    """Two classes for each doubling."""
    # class = round(2 * log2(tokens)): the middle of a class is 2 ** (class / 2) tokens.
    return min(CLASSES - 1, round(PER_DOUBLING * math.log2(max(1, tokens))))


@dataclass
class LengthCalibration:
    """Completions by class of predicted and of actual length.

    ``fade_every``: completions after which all counts are halved; None: old ones weigh as much as new ones.
    """

    fade_every: int | None = FADE_EVERY
    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    close: float = 0.0
    count: float = 0.0
    error: float = 0.0
    _since_fade: int = 0

    def add(self, predicted: int, actual: int) -> None:
        """Note a completion; both in tokens."""
        cell = length_class(predicted), length_class(actual)
        self.cells[cell] = self.cells.get(cell, 0.0) + 1.0
        ratio = max(predicted, 1) / max(actual, 1)
        self.close += 1 / WITHIN <= ratio <= WITHIN
        self.error += abs(math.log(ratio))  # too long and too short by one factor weigh alike
        self.count += 1
        self._since_fade += 1
        if self.fade_every is not None and self._since_fade >= self.fade_every:
            self._fade()

    def _fade(self) -> None:
        self.cells = _halved(self.cells)
        self.close, self.count, self.error, self._since_fade = self.close / 2, self.count / 2, self.error / 2, 0

    @property
    def close_share(self) -> float | None:
        """Share of completions whose length was within a factor of 1.5 of the prediction."""
        return self.close / self.count if self.count else None

    @property
    def typical_factor(self) -> float | None:
        """Geometric mean of how many times too long or too short predictions are."""
        # exp(mean |ln(predicted / actual)|)
        return math.exp(self.error / self.count) if self.count else None


@dataclass
class StalenessHistogram:
    """Trajectories by the age of their oldest token when they were trained, in optimizer steps."""

    fade_every: int | None = FADE_EVERY
    counts: dict[int, float] = field(default_factory=dict)
    _since_fade: int = 0

    def add(self, ages: Iterable[int]) -> None:
        """Note a step's trajectories."""
        for age in ages:
            key = min(max(0, age), CLASSES - 1)
            self.counts[key] = self.counts.get(key, 0.0) + 1.0
            self._since_fade += 1
        if self.fade_every is not None and self._since_fade >= self.fade_every:
            self.counts, self._since_fade = _halved(self.counts), 0


def _halved(counts: Mapping[K, float]) -> dict[K, float]:
    """Without those that have faded to nothing, so that rare classes do not stay for ever."""
    return {key: count / 2 for key, count in counts.items() if count >= 1}


INTERVALS = 500
MARKS = 200
JOINED_WITHIN_S = 0.05
"""Intervals of one kind that are nearer than that are one."""


class Interval(NamedTuple):
    """``kind`` was done from ``start`` to ``end`` (epoch seconds); ``tag``: the weights' number, or the step."""

    start: float
    end: float
    kind: str
    tag: int


class Mark(NamedTuple):
    """Something that happened at a moment."""

    at: float
    kind: str
    text: str


@dataclass
class Track:
    """What one process did and when: intervals that follow each other and never overlap, and marks."""

    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=INTERVALS))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))

    def extend(self, start: float, end: float, kind: str, tag: int) -> None:
        """Note an interval; what overlaps the last one begins at its end."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None:
            # Many completions at once overlap; to draw them as one keeps the number of intervals small.
            if start - last.end < JOINED_WITHIN_S and last.kind == kind and last.tag >= tag:
                if end > last.end:
                    self.intervals[-1] = last._replace(end=end)
                return
            # What is told late begins where the last one ended: intervals never overlap, so that shares add up to one.
            start, tag = max(start, last.end), max(tag, last.tag)
        if end > start:
            self.intervals.append(Interval(start, end, kind, tag))

    def mark(self, at: float, kind: str, text: str) -> None:
        """Note a moment."""
        self.marks.append(Mark(at, kind, text))

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """Seconds of each kind between two moments."""
        found: dict[str, float] = {}
        for interval in reversed(self.intervals):
            # They are in order: what is before the first that is too old is older still.
            if interval.end <= since:
                break
            inside = min(interval.end, until) - max(interval.start, since)
            if inside > 0:
                found[interval.kind] = found.get(interval.kind, 0.0) + inside
        return found
