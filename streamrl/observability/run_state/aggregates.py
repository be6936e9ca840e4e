"""Bounded aggregates of a run's records, one for each kind of figure. Pure.

Invariant every_aggregate_is_bounded: the size of an aggregate has an upper limit for any input. Times are in seconds
since the epoch and come with the figures: no aggregate reads a clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from cachetools import FIFOCache

from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport

NO_VERSION = PolicyVersion(0, 0)
KEPT_STEPS = 2000
"""Number of steps kept whole, some megabytes. A resumed trainer hardly ever falls back further than that."""
ENDS = 5
"""Most steps whose mean reward is shown as that of a run's start, and of its end: a single step is noisy."""
RATE_STEPS = 10
LAG_PREFIX = "kafka/lag/bucket_"
"""Prefix of a step's metrics that count the unfinished records of a length bucket."""
K = TypeVar("K")


class StepEntry(NamedTuple):
    """One optimizer step as the trainer reported it. ``trajectories``: their number in its micro-batches."""

    step: int
    version: PolicyVersion
    sent_at: float
    trajectories: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class StepSums:
    """Sums over many steps. ``tokens``: of completions. ``step_s``, ``wait_s``: seconds of steps, and of waiting.

    ``staleness`` is a sum over trajectories, so that dividing by ``trajectories`` gives their mean.
    """

    trajectories: int = 0
    tokens: float = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    staleness: float = 0.0
    staleness_max: float = 0.0

    def plus(self, entry: StepEntry) -> "StepSums":
        """These sums and one more step."""
        metrics = entry.metrics
        return StepSums(
            trajectories=self.trajectories + entry.trajectories,
            tokens=self.tokens + metrics.get("completions/num_tokens", 0.0),
            step_s=self.step_s + metrics.get("time/step", 0.0),
            wait_s=self.wait_s + metrics.get("time/wait_for_batch", 0.0),
            # A step reports the mean over its trajectories, whose number differs from step to step.
            staleness=self.staleness + metrics.get("off_policy/mean", 0.0) * entry.trajectories,
            staleness_max=max(self.staleness_max, metrics.get("off_policy/max", 0.0)),
        )


@dataclass
class StepHistory:
    """All optimizer steps of a run: the newest ones whole, older ones as sums.

    Invariant repeated_steps_replace_older_ones: if a resumed trainer takes steps again, the newer ones count. It first
    reports the step that it resumes from, without micro-batches; steps after that one are undone then.
    """

    entries: deque[StepEntry] = field(default_factory=deque)
    first_rewards: list[tuple[int, float]] = field(default_factory=list)
    _older: StepSums = field(default_factory=StepSums)

    def add(self, report: StepReport) -> bool:
        """Take a report of the newest lineage; returns whether it reports a step."""
        taken = bool(report.micro_batches)
        # A report without a step names the last step that remains, and undoes all later ones.
        undone_from = report.step if taken else report.step + 1
        while self.entries and self.entries[-1].step >= undone_from:
            self.entries.pop()
        self.first_rewards = [(step, reward) for step, reward in self.first_rewards if step < undone_from]
        if taken:
            trajectories = sum(len(batch) for batch in report.micro_batches)
            entry = StepEntry(report.step, report.version, report.sent_at, trajectories, report.metrics)
            self.append(entry)
        return taken

    def append(self, entry: StepEntry) -> None:
        """Add a step after all others."""
        self.entries.append(entry)
        if len(self.first_rewards) < ENDS and "reward" in entry.metrics:
            self.first_rewards.append((entry.step, entry.metrics["reward"]))
        if len(self.entries) > KEPT_STEPS:
            # A step removed here stays in the sums, even if a trainer falls back further than that.
            self._older = self._older.plus(self.entries.popleft())

    @property
    def newest(self) -> StepEntry | None:
        """The last step taken."""
        return self.entries[-1] if self.entries else None

    def sums(self) -> StepSums:
        """The sums over all steps."""
        total = self._older
        for entry in self.entries:
            total = total.plus(entry)
        return total

    def reward_windows(self) -> "tuple[Sequence[float], Sequence[float]]":
        """The mean rewards of the steps at the run's start and at its end; see ``end_windows``."""
        known = {entry.step: entry.metrics["reward"] for entry in self.entries if "reward" in entry.metrics}
        # The first steps of a long run are not among the entries any more.
        return end_windows([*(dict(self.first_rewards) | known).values()])

    def pace(self, now: float | None = None) -> "StepPace":
        """The pace of the last ten steps, up to the newest. With ``now``, the time that a step is overdue counts too.

        Only the newest lineage counts: a pause of the run before it would distort the pace.
        """
        lineage = self.entries[-1].version.lineage if self.entries else 0
        entries = [entry for entry in list(self.entries)[-RATE_STEPS - 1 :] if entry.version.lineage == lineage]
        if len(entries) < 2:
            return StepPace(0.0, 0.0)
        # The first entry's trajectories are left out: they were trained before the measured time.
        elapsed, steps = entries[-1].sent_at - entries[0].sent_at, len(entries) - 1
        if now is not None:  # a step is overdue after the usual duration of one
            elapsed += max(0.0, now - entries[-1].sent_at - elapsed / steps)
        if elapsed <= 0:
            return StepPace(0.0, 0.0)
        return StepPace(steps / elapsed, sum(entry.trajectories for entry in entries[1:]) / elapsed)


def end_windows(values: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """The first and the last values, at most ``ENDS`` each; the two never share a value.

    Of a single value there is only the last.
    """
    size = min(ENDS, len(values) // 2)
    return values[:size], values[-max(1, size) :]


def window_name(which: str, steps: int) -> str:
    """A window of steps in words; ``which``: first or last."""
    return f"{which} {steps} steps" if steps != 1 else f"{which} step"


class StepPace(NamedTuple):
    """Optimizer steps per second, and trajectories trained per second."""

    steps_per_s: float
    trajectories_per_s: float


LEAST_S = 1.0
"""Shortest time for a rate, in seconds: over less, a burst would look like a high rate."""


@dataclass
class Rate:
    """A rate per second over a window. It keeps a count for each tenth of a second, so that its size is bounded."""

    window_s: float = 10.0
    total: float = 0.0
    _since: float | None = None
    _slots: deque[list[float]] = field(default_factory=deque)
    _held: float = 0.0

    def add(self, at: float, amount: float = 1.0) -> None:
        """Count an amount at a time (epoch seconds). A time before the newest slot counts in that slot."""
        # Tenths of a second: fine enough for a window of seconds, and few enough to keep.
        self.total += amount
        slot = int(at * 10) / 10
        self._since = slot if self._since is None else self._since
        # Records of several partitions come slightly out of order; a late one counts now rather than never.
        if self._slots and slot <= self._slots[-1][0]:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])
        self._held += amount
        self._forget(self._slots[-1][0])

    def per_s(self, now: float) -> float:
        """The mean over the window that ends now, or over the time since the first amount if that is shorter."""
        self._forget(now)
        seen_s = self.window_s if self._since is None else min(self.window_s, max(LEAST_S, now - self._since))
        # Adding and subtracting floating-point amounts may leave slightly less than zero.
        return max(0.0, self._held) / seen_s

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - self.window_s:
            self._held -= self._slots.popleft()[1]


EVENTS_KEPT = 120
MARKS_KEPT = 60
"""Most marks in the curves: a reader could not distinguish more in a chart."""
REPEAT_WITHIN_S = 5.0
MarkKind = Literal["promotion", "restart", "resumed", "settings"]


class Event(NamedTuple):
    """An event of a run. ``level``: info, good, warn or bad. ``times``: how often it came since ``at``."""

    number: int
    at: float
    level: str
    text: str
    times: int = 1


class CurveMark(NamedTuple):
    """An event that curves show, since it may change their course. ``step``: the newest step when it came."""

    step: int
    at: float
    kind: MarkKind
    text: str


@dataclass
class EventLog:
    """The newest events of a run in the order of time, newest last. A repeated event is counted instead of added.

    ``marks``: the newest of those that curves show. ``step``: the newest step, at which marks are set.
    """

    events: list[Event] = field(default_factory=list)
    numbered: int = 0
    marks: deque[CurveMark] = field(default_factory=lambda: deque(maxlen=MARKS_KEPT))
    step: int = 0

    def add(self, at: float, level: str, text: str, times: int = 1, mark: MarkKind | None = None) -> None:
        """Add an event, or count up an equal one from a moment ago. ``mark``: show it in the curves as this kind."""
        # The last four events are compared, so that alternating events are counted too.
        for index in range(-1, -min(4, len(self.events)) - 1, -1):
            event = self.events[index]
            if event.text == text and event.level == level and at - event.at < REPEAT_WITHIN_S:
                self.events[index] = event._replace(times=event.times + times)
                return
        self.numbered += 1
        # Processes report at their own times and over several topics, so an event may come after a later one.
        place = len(self.events)
        while place and self.events[place - 1].at > at:
            place -= 1
        self.events.insert(place, Event(self.numbered, at, level, text, times))
        del self.events[:-EVENTS_KEPT]
        if mark is not None:
            self.marks.append(CurveMark(self.step, at, mark, text))


CurveRow = dict[str, float | None]


@dataclass
class Curves:
    """Metrics over the optimizer steps, with few enough points to draw.

    There are at most ``most`` points, each the mean of ``stride`` steps, so that the whole past stays visible.
    ``families``: prefixes and suffixes of further names. The first few such names that occur are added.
    """

    names: Sequence[str]
    most: int = 400
    families: Sequence[tuple[str, str]] = ()
    stride: int = 1
    rows: list[CurveRow] = field(default_factory=list)
    _pending: list[CurveRow] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. A step seen before replaces itself and all later ones, since its trainer was resumed."""
        for rows in (self._pending, self.rows):
            while rows and (rows[-1]["step"] or 0) >= step:
                rows.pop()
        self._take_names(values)
        # The newest steps wait in ``_pending`` until the next point starts, so that the newest is drawn alone.
        if len(self._pending) >= self.stride:
            self.rows.append(_mean(self._pending))
            self._pending.clear()
        self._pending.append({"step": float(step), **{name: values.get(name) for name in self.names}})
        if len(self.rows) > self.most:  # halve the number of points: each pair becomes its mean
            self.rows = [_mean(self.rows[start : start + 2]) for start in range(0, len(self.rows), 2)]
            self.stride *= 2

    def _take_names(self, values: Mapping[str, float]) -> None:
        room = MOST_IN_FAMILIES - sum(_is_of(name, self.families) for name in self.names)
        new = [name for name in values if name not in self.names and _is_of(name, self.families)]
        self.names = (*self.names, *new[: max(0, room)])

    def columns(self) -> dict[str, list[float | None]]:
        """The values by name, and the steps as ``step``. The last point is the newest step alone, not a mean."""
        newest = [_mean(part) for part in (self._pending[:-1], self._pending[-1:]) if part]
        rows = [*self.rows, *newest]
        return {name: [_short(row.get(name)) for row in rows] for name in ("step", *self.names)}


MOST_IN_FAMILIES = 8
"""Most names from families: a run may have many reward functions, and a chart has room for some."""


def _is_of(name: str, families: Sequence[tuple[str, str]]) -> bool:
    return any(name.startswith(prefix) and name.endswith(suffix) for prefix, suffix in families)


def _mean(rows: Sequence[CurveRow]) -> CurveRow:
    mean: CurveRow = {}
    for name in rows[-1]:  # names are only ever added
        known = [value for row in rows if (value := row.get(name)) is not None]
        mean[name] = sum(known) / len(known) if known else None
    # A point is at its last step, so that a repeated step removes it if it may contain that step.
    mean["step"] = rows[-1]["step"]
    return mean


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}") if abs(value) < 1e4 else round(value, 1)


FATES_KEPT = 20_000
"""Number of fates to keep: some minutes of a fast run, far more than displays list, and a few megabytes."""
RecordPosition = tuple[int, int]
"""Partition and offset of a record."""


@dataclass
class TrajectoryFates:
    """The fates of the newest trajectories (trained in a step, or skipped), by partition and offset; and their ages.

    ``kept``: most entries of each kind; the oldest are dropped.
    """

    kept: int = FATES_KEPT
    oldest_version: FIFOCache[RecordPosition, int] = field(init=False)
    fates: FIFOCache[RecordPosition, str] = field(init=False)

    def __post_init__(self) -> None:
        """Start empty."""
        self.oldest_version, self.fates = FIFOCache(self.kept), FIFOCache(self.kept)

    def arrived(self, position: RecordPosition, oldest_version: int) -> None:
        """Note a trajectory, and the number of its oldest weights."""
        self.oldest_version[position] = oldest_version

    def settle(self, position: RecordPosition, fate: str) -> None:
        """Note a trajectory's fate, in words."""
        self.fates[position] = fate

    def trained(self, positions: Iterable[RecordPosition], step: int, base: int) -> Iterator[int]:
        """Note trajectories trained in a step on top of weights number ``base``; gives the ages of the known ones."""
        for position in positions:
            self.settle(position, f"trained in step {step}")
            # A trained trajectory's version is not needed again: removing it leaves room for others.
            number = self.oldest_version.pop(position, None)
            if number is not None:
                yield base - number

    def of(self, position: RecordPosition, *, over: bool = False) -> str:
        """A trajectory's fate as text. ``over``: the run is finished, so that no trajectory waits any more."""
        return self.fates.get(position, "left over" if over else "waiting")


PER_DOUBLING = 2
CLASSES = 40
"""Number of length classes, two per doubling: up to 2 ** 20 tokens. It also limits the ages in the histogram."""
WITHIN = 1.5
FADE_EVERY = 20_000
"""Counts are halved after so many additions, so that a long run's display shows its recent past."""


def length_class(tokens: int) -> int:
    """The length class of a number of tokens; there are two classes per doubling."""
    # class = round(2 * log2(tokens)): the middle of a class is 2 ** (class / 2) tokens.
    return min(CLASSES - 1, round(PER_DOUBLING * math.log2(max(1, tokens))))


@dataclass
class LengthCalibration:
    """Counts of completions by class of predicted and of actual length.

    ``fade_every``: number of completions after which all counts are halved; None: never.
    """

    fade_every: int | None = FADE_EVERY
    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    close: float = 0.0
    count: float = 0.0
    error: float = 0.0
    _since_fade: int = 0

    def add(self, predicted: int, actual: int) -> None:
        """Count a completion; both lengths in tokens."""
        cell = length_class(predicted), length_class(actual)
        self.cells[cell] = self.cells.get(cell, 0.0) + 1.0
        ratio = max(predicted, 1) / max(actual, 1)
        self.close += 1 / WITHIN <= ratio <= WITHIN
        self.error += abs(math.log(ratio))  # too long and too short by the same factor weigh the same
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
        """Geometric mean of the factor by which predictions are too long or too short."""
        # exp(mean |ln(predicted / actual)|)
        return math.exp(self.error / self.count) if self.count else None


@dataclass
class StalenessHistogram:
    """Counts of trained trajectories by the age of their oldest token, in optimizer steps."""

    fade_every: int | None = FADE_EVERY
    counts: dict[int, float] = field(default_factory=dict)
    _since_fade: int = 0

    def add(self, ages: Iterable[int]) -> None:
        """Count a step's trajectories by their ages."""
        for age in ages:
            key = min(max(0, age), CLASSES - 1)
            self.counts[key] = self.counts.get(key, 0.0) + 1.0
            self._since_fade += 1
        if self.fade_every is not None and self._since_fade >= self.fade_every:
            self.counts, self._since_fade = _halved(self.counts), 0


def _halved(counts: Mapping[K, float]) -> dict[K, float]:
    """The counts divided by two, without those below one, so that rare classes do not stay for ever."""
    return {key: count / 2 for key, count in counts.items() if count >= 1}


INTERVALS = 500
MARKS = 200
JOINED_WITHIN_S = 0.05
"""Intervals of one kind with a gap below this many seconds are joined."""


class Interval(NamedTuple):
    """An activity from ``start`` to ``end`` (epoch seconds). ``tag``: the weights' number, or the step."""

    start: float
    end: float
    kind: str
    tag: int


class Mark(NamedTuple):
    """An event at a moment in epoch seconds."""

    at: float
    kind: str
    text: str


@dataclass
class Track:
    """The activities of one process: intervals in order, which never overlap, and marks."""

    intervals: deque[Interval] = field(default_factory=lambda: deque(maxlen=INTERVALS))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))

    def extend(self, start: float, end: float, kind: str, tag: int) -> None:
        """Add an interval. If it overlaps the last one, it starts at the last one's end."""
        last = self.intervals[-1] if self.intervals else None
        if last is not None:
            # Concurrent completions overlap; drawing them as one keeps the number of intervals small.
            if start - last.end < JOINED_WITHIN_S and last.kind == kind and last.tag >= tag:
                if end > last.end:
                    self.intervals[-1] = last._replace(end=end)
                return
            # A late interval starts where the last one ended: without overlaps, shares add up to one.
            start, tag = max(start, last.end), max(tag, last.tag)
        if end > start:
            self.intervals.append(Interval(start, end, kind, tag))

    def mark(self, at: float, kind: str, text: str) -> None:
        """Add a mark."""
        self.marks.append(Mark(at, kind, text))

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """Seconds of each kind between two moments."""
        found: dict[str, float] = {}
        for interval in reversed(self.intervals):
            # Intervals are in order: all before this one are too old as well.
            if interval.end <= since:
                break
            inside = min(interval.end, until) - max(interval.start, since)
            if inside > 0:
                found[interval.kind] = found.get(interval.kind, 0.0) + inside
        return found
