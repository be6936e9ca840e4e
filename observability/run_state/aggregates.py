"""A trajectory as displays need it, read from its frame's header alone: no arrays, no validation of the whole record.

That takes about half of the time of decoding it. Whether the record is sound is the intake's business.
"""

import math
import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from bus.port import Record
from schemas.codec import MAX_HEADER_BYTES, MAX_ITEMS, refuse_many_items
from schemas.errors import FrameTooLarge
from schemas.identifiers import PolicyVersion
from schemas.trajectories import Trajectory

# Which of many are looked into, where looking into all would cost what the run needs.

MOST, NEWEST = 200, 40


def sampled(places: Sequence[int], most: int = MOST, newest: int = NEWEST) -> set[int]:
    """All of them if they are not more than ``most``; else the newest, and others evenly from the rest."""
    if len(places) <= most:
        return set(places)
    rest = places[: len(places) - newest]
    wanted = most - newest
    return {*places[len(places) - newest :], *(rest[index * len(rest) // wanted] for index in range(wanted))}


# How many of something came in a second, over the last few seconds.


@dataclass
class Rate:
    """Counts by tenths of a second within a window; holds as many numbers as the window has tenths."""

    window_s: float = 5.0
    total: float = 0.0
    _slots: deque[list[float]] = field(default_factory=deque)
    _held: float = 0.0

    def add(self, at: float, amount: float = 1.0) -> None:
        """Note what came ``at`` (epoch seconds); what lies behind the newest slot is counted in it."""
        self.total += amount
        slot = int(at * 10) / 10
        if self._slots and slot <= self._slots[-1][0]:
            self._slots[-1][1] += amount
        else:
            self._slots.append([slot, amount])
        self._held += amount
        self._forget(self._slots[-1][0])

    def per_s(self, now: float) -> float:
        """Mean over the window that ends now."""
        self._forget(now)
        return max(0.0, self._held) / self.window_s

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - self.window_s:
            self._held -= self._slots.popleft()[1]


# What is worth a line: the newest events, with repeats counted instead of repeated.

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
    """Newest last."""

    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    numbered: int = 0

    def add(self, at: float, level: str, text: str, times: int = 1) -> None:
        """Note an event; the same one a moment ago is counted up."""
        for index in range(-1, -min(4, len(self.events)) - 1, -1):
            event = self.events[index]
            if event.text == text and event.level == level and at - event.at < REPEAT_WITHIN_S:
                self.events[index] = event._replace(times=event.times + times)
                return
        self.numbered += 1
        self.events.append(Event(self.numbered, at, level, text, times))


# Numbers over optimizer steps, few enough to draw: when there are too many, neighbours are joined into their mean.

Row = dict[str, float | None]


@dataclass
class Curves:
    """At most ``most`` points, each the mean of ``stride`` steps, so that all of the past stays in view."""

    names: Sequence[str]
    most: int = 400
    stride: int = 1
    rows: list[Row] = field(default_factory=list)
    _pending: list[Row] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. One that was seen before takes the place of it and of all after it: its trainer was resumed."""
        while self._pending and (self._pending[-1]["step"] or 0) >= step:
            self._pending.pop()
        while self.rows and (self.rows[-1]["step"] or 0) >= step:
            self.rows.pop()
        self._pending.append({"step": float(step), **{name: values.get(name) for name in self.names}})
        if len(self._pending) >= self.stride:
            self.rows.append(_mean(self._pending))
            self._pending.clear()
        if len(self.rows) > self.most:
            self.rows = [_mean(self.rows[begin : begin + 2]) for begin in range(0, len(self.rows), 2)]
            self.stride *= 2

    def columns(self) -> dict[str, list[float | None]]:
        """By name, and the steps as ``step``; what is not a whole point yet is the last one."""
        rows = [*self.rows, *([_mean(self._pending)] if self._pending else [])]
        return {name: [_short(row[name]) for row in rows] for name in ("step", *self.names)}


def _mean(rows: Sequence[Row]) -> Row:
    mean: Row = {}
    for name in rows[0]:
        known = [value for row in rows if (value := row[name]) is not None]
        mean[name] = sum(known) / len(known) if known else None
    mean["step"] = rows[-1]["step"]
    return mean


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}") if abs(value) < 1e4 else round(value, 1)


# What became of the newest trajectories: waiting, trained in a step, or skipped; and how old they were then.

FATES_KEPT = 20_000
Place = tuple[int, int]


@dataclass
class Fates:
    """By partition and offset; the oldest are forgotten."""

    oldest: OrderedDict[Place, int] = field(default_factory=OrderedDict)
    told: OrderedDict[Place, str] = field(default_factory=OrderedDict)

    def arrived(self, place: Place, oldest_number: int) -> None:
        """A trajectory came whose oldest weights have this number."""
        self.oldest[place] = oldest_number
        if len(self.oldest) > FATES_KEPT:
            self.oldest.popitem(last=False)

    def tell(self, place: Place, fate: str) -> None:
        """Its end."""
        self.told[place] = fate
        if len(self.told) > FATES_KEPT:
            self.told.popitem(last=False)

    def trained(self, places: Iterable[Place], step: int, base: int) -> Iterator[int]:
        """These were trained in a step that improved weights number ``base``; the ages of those that were seen."""
        for place in places:
            self.tell(place, f"trained in step {step}")
            number = self.oldest.pop(place, None)
            if number is not None:
                yield base - number

    def of(self, place: Place, *, over: bool = False) -> str:
        """As text. ``over``: the run is finished, so that nothing waits any more."""
        return self.told.get(place, "left over" if over else "waiting")


# Predicted against actual length, and staleness: counts in fixed classes, recent ones weighing more.

PER_DOUBLING = 2
CLASSES = 40
WITHIN = 1.5
FADE_EVERY = 20_000


def length_class(tokens: int) -> int:
    """Two classes for each doubling."""
    return min(CLASSES - 1, round(PER_DOUBLING * math.log2(max(1, tokens))))


@dataclass
class Calibration:
    """Counts of (predicted, actual) by class. Each is halved from time to time, so that old ones fade."""

    cells: dict[tuple[int, int], float] = field(default_factory=dict)
    close: float = 0.0
    count: float = 0.0
    error: float = 0.0
    since_fade: int = 0

    def add(self, predicted: int, actual: int) -> None:
        """Note a completion."""
        cell = length_class(predicted), length_class(actual)
        self.cells[cell] = self.cells.get(cell, 0.0) + 1.0
        ratio = max(predicted, 1) / max(actual, 1)
        self.close += 1 / WITHIN <= ratio <= WITHIN
        self.error += abs(math.log(ratio))
        self.count += 1
        self.since_fade += 1
        if self.since_fade >= FADE_EVERY:
            self._fade()

    def _fade(self) -> None:
        self.cells = {cell: count / 2 for cell, count in self.cells.items() if count >= 1}
        self.close, self.count, self.error, self.since_fade = self.close / 2, self.count / 2, self.error / 2, 0

    @property
    def close_share(self) -> float | None:
        """Share of completions whose length was within a factor of 1.5 of the prediction."""
        return self.close / self.count if self.count else None

    @property
    def typical_factor(self) -> float | None:
        """Geometric mean of how many times too long or too short predictions are."""
        return math.exp(self.error / self.count) if self.count else None


@dataclass
class Staleness:
    """Trajectories by the age of their oldest token when they were trained, in steps."""

    counts: dict[int, float] = field(default_factory=dict)
    since_fade: int = 0

    def add(self, ages: Iterable[int]) -> None:
        """Note a step's trajectories."""
        for age in ages:
            key = min(max(0, age), CLASSES - 1)
            self.counts[key] = self.counts.get(key, 0.0) + 1.0
            self.since_fade += 1
        if self.since_fade >= FADE_EVERY:
            self.counts, self.since_fade = {age: count / 2 for age, count in self.counts.items() if count >= 1}, 0


# Who did what and when: a lane of stretches and marks for every process, the newest few hundred of each.

STRETCHES = 500
MARKS = 200
JOINED_WITHIN_S = 0.05
"""Stretches of one kind that are nearer than that are one."""


class Stretch(NamedTuple):
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
class Lane:
    """Stretches follow each other and never overlap."""

    stretches: deque[Stretch] = field(default_factory=lambda: deque(maxlen=STRETCHES))
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))

    def extend(self, start: float, end: float, kind: str, tag: int) -> None:
        """Note a stretch; what overlaps the last one begins at its end."""
        last = self.stretches[-1] if self.stretches else None
        if last is not None:
            if start - last.end < JOINED_WITHIN_S and last.kind == kind and last.tag >= tag:
                if end > last.end:
                    self.stretches[-1] = last._replace(end=end)
                return
            start, tag = max(start, last.end), max(tag, last.tag)
        if end > start:
            self.stretches.append(Stretch(start, end, kind, tag))

    def mark(self, at: float, kind: str, text: str) -> None:
        """Note a moment."""
        self.marks.append(Mark(at, kind, text))

    def seconds(self, since: float, until: float) -> dict[str, float]:
        """Seconds of each kind between two moments."""
        found: dict[str, float] = {}
        for stretch in reversed(self.stretches):
            if stretch.end <= since:
                break
            inside = min(stretch.end, until) - max(stretch.start, since)
            if inside > 0:
                found[stretch.kind] = found.get(stretch.kind, 0.0) + inside
        return found


PREVIEW = 160
NAME = 256
_PREFIX = struct.Struct("<I")
_SMALL = 16 << 10
_SCHEMA = ("schema", Trajectory.SCHEMA.encode())


class Sketch(NamedTuple):
    """``reward``: sum of the raw rewards, None if there is none. ``oldest`` and ``newest``: weights of its tokens."""

    trajectory_id: str
    group_id: str
    worker_id: str
    bucket: int
    predicted: int
    length: int
    reward: float | None
    oldest: PolicyVersion
    newest: PolicyVersion
    finish_reason: str
    completion: str
    started_at: float
    finished_at: float
    partition: int
    offset: int


def sketch_of(record: Record) -> Sketch | None:
    """None if the bytes are not a trajectory's."""
    fields = _header(record)
    if fields is None:
        return None
    try:
        versions = [PolicyVersion(*map(_count, span["version"])) for span in fields["version_spans"]]
        versions = versions or [PolicyVersion(*map(_count, fields["admitted_version"]))]
        return Sketch(
            trajectory_id=_name(fields["trajectory_id"]),
            group_id=_name(fields["group_id"]),
            worker_id=_name(fields["worker_id"]),
            bucket=_count(fields["bucket"]),
            predicted=_count(fields["predicted_length"]),
            length=_count(fields["token_ids"]),
            reward=_total(fields["rewards"]),
            oldest=min(versions),
            newest=max(versions),
            finish_reason=_name(fields["finish_reason"]),
            completion=_preview(fields["completion_text"]),
            started_at=_time(fields["started_at"]),
            finished_at=_time(fields["finished_at"]),
            partition=record.partition,
            offset=record.offset,
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _header(record: Record) -> Mapping[str, Any] | None:
    value = record.value
    if value is None or len(value) < _PREFIX.size or _SCHEMA not in record.headers:
        return None
    (size,) = _PREFIX.unpack_from(value)
    header = value[_PREFIX.size : _PREFIX.size + size]
    if size > MAX_HEADER_BYTES or len(header) < size:
        return None
    try:
        if size > _SMALL:
            refuse_many_items(header, MAX_ITEMS)
        fields = msgpack.unpackb(header, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError, IndexError, FrameTooLarge):
        return None
    return fields if isinstance(fields, dict) else None


def _total(rewards: Mapping[str, float | None]) -> float | None:
    values = [value for value in rewards.values() if value is not None]
    return _time(sum(values)) if values else None


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a count, got {value!r}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value[:NAME]


def _preview(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    return value if len(value) <= PREVIEW else value[:PREVIEW] + "…"
