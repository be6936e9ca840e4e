"""How far each worker has got with what it samples, reckoned from the decode curve and corrected by what arrives. Pure.

A worker's decode steps are counted from the time that passes and from how many completions it runs; each completion
that arrives tells how many there really were. What a completion that outgrew its estimate still has before it follows
from how sure the estimate was.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from producers.dispatch.planning.doubt import excess
from schemas.profiles.decode import DecodeCurve

GRACE = 1.1
"""How far past its estimate a completion must be: news of its end may be under way."""
LEARNING_RATE = 0.2
"""Weight of the longest completion in the estimate of the fleet's speed; shorter ones weigh less, since the time that
news is under way distorts them more."""
FIRST = 32
"""Completions of which the plain mean counts."""
MOST_WRONG = 4.0
"""After these, none counts as faster or slower than expected by more than this factor."""
Sample = tuple[str, int]
"""A group's id and the index of a sample."""


class Expected(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known."""

    tokens: int
    spread: float = 0.0


@dataclass(slots=True)
class _Begun:
    expected: Expected
    at_step: float


@dataclass(slots=True)
class _Bench:
    """A worker's completions: ``begun`` ones, and those that wait for a slot, in order of arrival."""

    slots: int
    at: float
    steps: float = 0.0
    begun: dict[Sample, _Begun] = field(default_factory=dict)
    waiting: dict[Sample, Expected] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Expected tokens left, by completion. ``outgrown``: of those among the running that are past their estimate."""

    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outgrown: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them together."""
        return sum(self.running) + sum(self.waiting)


class Progress:
    """The progress of all workers. ``longest``: no completion has more tokens.

    ``speed``: decode steps that workers really make, as a multiple of what the curve says.
    """

    def __init__(self, curve: DecodeCurve, longest: int) -> None:
        self._curve = curve
        self._longest = longest
        self._benches: dict[str, _Bench] = {}
        self._seen = 0
        self.speed = 1.0

    def send(self, worker_id: str, slots: int, samples: Iterable[Sample], expected: Expected, now: float) -> None:
        """These samples, of so many tokens each, are with a worker now."""
        bench = self._benches.setdefault(worker_id, _Bench(slots, now))
        self._count(bench, now)
        bench.slots = slots
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        bench.waiting.update(dict.fromkeys(samples, expected))
        self._begin(bench)

    def drop(self, worker_id: str, samples: Iterable[Sample], now: float) -> None:
        """The worker does not have these any more."""
        if (bench := self._benches.get(worker_id)) is not None:
            self._count(bench, now)
            for sample in samples:
                bench.waiting.pop(sample, None)
                bench.begun.pop(sample, None)
            self._begin(bench)

    def finished(self, worker_id: str, sample: Sample, length: int, now: float) -> None:
        """A completion of so many tokens is there."""
        bench = self._benches.get(worker_id)
        if bench is None:
            return
        self._count(bench, now)
        begun = bench.begun.get(sample)
        if begun is not None and length > 0 and (reckoned := bench.steps - begun.at_step) > 0:
            self._learn(length / reckoned, length)
        self.drop(worker_id, (sample,), now)

    def _learn(self, speed: float, length: int) -> None:
        self._seen += 1
        if self._seen > FIRST:
            speed = min(max(speed, self.speed / MOST_WRONG), self.speed * MOST_WRONG)
        weight = max(min(1.0, LEARNING_RATE * length / self._longest), 1 / self._seen if self._seen <= FIRST else 0.0)
        self.speed += weight * (speed - self.speed)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """What is left of a worker's completions."""
        bench = self._benches.get(worker_id)
        if bench is None:
            return Remaining()
        self._count(bench, now)
        running, outgrown = [], []
        for begun in bench.begun.values():
            done = int(self.speed * (bench.steps - begun.at_step))
            expected = begun.expected.tokens
            left = max(1, expected - done)
            if done >= GRACE * expected:
                more = int(done * excess(done / expected, begun.expected.spread))
                left = max(1, min(more, self._longest - done))
                outgrown.append(left)
            running.append(left)
        return Remaining(tuple(running), tuple(expected.tokens for expected in bench.waiting.values()), tuple(outgrown))

    def _count(self, bench: _Bench, now: float) -> None:
        if bench.begun and now > bench.at:
            bench.steps += (now - bench.at) / self._curve.batch_s(len(bench.begun))
        bench.at = max(bench.at, now)

    @staticmethod
    def _begin(bench: _Bench) -> None:
        while bench.waiting and len(bench.begun) < bench.slots:
            sample = next(iter(bench.waiting))
            bench.begun[sample] = _Begun(bench.waiting.pop(sample), bench.steps)
