"""Continuous batching in emulated time: who runs in which decode step, and when each boundary between steps comes.

Pure: knows no clock. It is told what happens and when, and advanced to a moment; steps between which nothing changes
are taken in one go.

At a boundary, in this order: completions that have all their tokens leave; dropped ones leave; new weights are taken,
each for ``adopt_s``; waiting ones are admitted in order of arrival, each for ``prefill_s_per_token`` a token. What
arrives while that lasts is looked at before the next step begins. Then every running completion gets one token.
Invariants: fast_forward_equals_step_by_step; every_token_belongs_to_the_version_of_its_step.
"""

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schemas.profiles.decode import DecodeCurve

V = TypeVar("V")


@dataclass(slots=True, eq=False)
class Sequence:
    """A completion of ``length`` tokens: waiting until ``first_step`` is set, and then one token a step."""

    prompt_tokens: int
    length: int
    arrived_at: float = 0.0
    first_step: int | None = None
    handed: int = 0
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Grown(Generic[V]):
    """Tokens to hand over, by the versions that sampled them; ``is_over``: these were the last."""

    sequence: Sequence
    at: float
    parts: tuple[tuple[V, int], ...]
    is_over: bool


@dataclass(frozen=True, slots=True)
class Adopted(Generic[V]):
    """From ``at`` on, decode steps are of this version."""

    version: V
    at: float


@dataclass(slots=True)
class _Drop:
    at: float
    sequence: Sequence


@dataclass
class Timeline(Generic[V]):
    """``at``: the boundary reached, in seconds; ``steps``: decode steps taken; ``context``: tokens in all caches.

    What is told carries its time, never earlier than that of what was told before. ``version``: of the first step.
    """

    curve: DecodeCurve
    slots: int
    version: V
    at: float = 0.0
    steps: int = 0
    running: int = 0
    context: int = 0
    _waiting: deque[Sequence] = field(default_factory=deque)
    _orders: "deque[_Drop | Adopted[V]]" = field(default_factory=deque)
    _adopting: "deque[Adopted[V]]" = field(default_factory=deque)
    _due: list[tuple[int, int, Sequence]] = field(default_factory=list)
    _admitted: int = 0

    def __post_init__(self) -> None:
        self._since, self._versions = [0], [self.version]

    def arrive(self, sequence: Sequence, at: float) -> None:
        """A completion asks for a slot."""
        sequence.arrived_at = at
        self._waiting.append(sequence)

    def drop(self, sequence: Sequence, at: float) -> None:
        """A completion is not wanted any more."""
        self._orders.append(_Drop(at, sequence))

    def adopt(self, version: V, at: float) -> None:
        """New weights are there."""
        self._orders.append(Adopted(version, at))

    def advance(self, until: float) -> list[Grown[V] | Adopted[V]]:
        """Go to the last boundary not after ``until``; what happened on the way."""
        happened: list[Grown[V] | Adopted[V]] = []
        while (news := self._next_news()) is not None or self.running:
            if not self.running and news is not None:
                self.at = max(self.at, news)
            if self.at > until:
                break
            self._take_in()
            if self.at > until or not self.running:
                continue
            wanted = self._steps_to_go()
            taken = min(wanted, self.curve.steps_by(until, self.at, self.running, self.context))
            self._decode(taken)
            self._collect(happened)
            if taken < wanted:
                break
        while self._adopting and self._adopting[0].at <= until:
            happened.append(self._adopting.popleft())
        return happened

    def next_wake(self) -> float | None:
        """When to advance next: something may be handed over then, or a boundary takes in what was told."""
        moments = [self._adopting[0].at] if self._adopting else []
        news = self._next_news()
        if news is not None and (news <= self.at or not self.running):
            moments.append(max(news, self.at))
        elif self.running:
            moments.append(self.at + self.curve.leg_s(self._steps_to_go(), self.running, self.context))
        return min(moments, default=None)

    def _next_news(self) -> float | None:
        """When the first thing was told that a boundary has yet to take in."""
        order = self._orders[0].at if self._orders else None
        if not self._waiting or self.running >= self.slots:
            return order
        arrival = self._waiting[0].arrived_at
        return arrival if order is None else min(order, arrival)

    def _take_in(self) -> None:
        while (news := self._next_news()) is not None and news <= self.at:
            self.at += self._obeyed_s() + self._admitted_s()

    def _obeyed_s(self) -> float:
        stall = 0.0
        while self._orders and self._orders[0].at <= self.at:
            order = self._orders.popleft()
            if isinstance(order, _Drop):
                self._release(order.sequence)
                continue
            stall += self.curve.settings.adopt_s
            self._since.append(self.steps)
            self._versions.append(order.version)
            self._adopting.append(Adopted(order.version, self.at + stall))
        return stall

    def _release(self, sequence: Sequence) -> None:
        if sequence.is_gone:
            return
        sequence.is_gone = True
        if sequence.first_step is None:
            self._waiting.remove(sequence)
        else:
            self.running -= 1
            self.context -= sequence.prompt_tokens + self.steps - sequence.first_step

    def _admitted_s(self) -> float:
        stall = 0.0
        while self.running < self.slots and self._waiting and self._waiting[0].arrived_at <= self.at:
            sequence = self._waiting.popleft()
            sequence.first_step = self.steps
            self.running += 1
            self.context += sequence.prompt_tokens
            self._expect(sequence)
            stall += sequence.prompt_tokens * self.curve.settings.prefill_s_per_token
        return stall

    def _expect(self, sequence: Sequence) -> None:
        assert sequence.first_step is not None
        chunk = self.curve.settings.chunk_tokens or sequence.length
        due = sequence.first_step + min(sequence.length, sequence.handed + chunk)
        self._admitted += 1
        heapq.heappush(self._due, (due, self._admitted, sequence))

    def _steps_to_go(self) -> int:
        """Decode steps until somebody is due, or until the boundary that takes in what was told meanwhile."""
        steps = self._due[0][0] - self.steps
        if (news := self._next_news()) is not None:
            steps = min(steps, max(1, self.curve.steps_until(news, self.at, self.running, self.context)))
        return steps

    def _decode(self, steps: int) -> None:
        self.at += self.curve.leg_s(steps, self.running, self.context)
        self.steps += steps
        self.context += self.running * steps

    def _collect(self, happened: list[Grown[V] | Adopted[V]]) -> None:
        while self._due and self._due[0][0] <= self.steps:
            sequence = heapq.heappop(self._due)[2]
            if sequence.is_gone:
                continue
            parts = self._parts(sequence)
            is_over = sequence.handed == sequence.length
            happened.append(Grown(sequence, self.at, parts, is_over))
            if is_over:
                self._release(sequence)
            else:
                self._expect(sequence)

    def _parts(self, sequence: Sequence) -> tuple[tuple[V, int], ...]:
        """Tokens not handed over yet, by version."""
        assert sequence.first_step is not None
        start = sequence.first_step + sequence.handed
        sequence.handed = self.steps - sequence.first_step
        first = bisect_right(self._since, start) - 1
        ends = [*self._since[first + 1 :], self.steps]
        parts = []
        for version, end in zip(self._versions[first:], ends, strict=True):
            if end > start:
                parts.append((version, end - start))
                start = end
        return tuple(parts)
