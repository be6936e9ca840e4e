"""How far everybody has got: the workers with what they were sent, the trainer with what has arrived. Pure; seconds.

- ``Progress``: a worker's decode steps are counted from the time that passes and from how many completions it runs, by
  its decode curve; each completion that arrives tells how many there really were, and so how fast this worker is;
- ``TrainerPace``: how long the trainer takes for a token, and until when it has enough to do;
- ``PlanAccuracy``: when windows ended, against when they were planned to.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.producers.dispatch.plans import mean_excess
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.reports import StepReport

GRACE = 1.1
"""How far past its estimate a completion must be: news of its end may be under way."""
LEARNING_RATE = 0.2
"""Weight of the longest completion in the estimate of a worker's speed; shorter ones weigh less, since the time that
news is under way distorts them more."""
FIRST = 32
"""Completions of a worker of which the plain mean counts."""
TAKEN_FROM_FLEET = 4
"""Completions that the fleet's speed counts for in that mean: a new worker is taken to be as fast as the others."""
NEWEST_STEP = 0.5
"""Weight of the newest step in the estimate of the trainer's speed: it drifts with the lengths."""
MOST_WRONG = 4.0
"""After these, none counts as faster or slower than expected by more than this factor."""
Sample = tuple[str, int]
"""A group's id and the index of a sample."""


class ExpectedLength(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known.

    ``prompt``: tokens of the prompt before it; ``begun``: of its own tokens, those that others had sampled.
    """

    tokens: int
    deviation: float = 0.0
    prompt: int = 0
    begun: int = 0


class HeldSample(NamedTuple):
    """A sample that a worker has: expected tokens left, and tokens in its cache when it goes on."""

    sample: Sample
    left: int
    context: int
    is_running: bool
    is_outgrown: bool = False


@dataclass(slots=True)
class _Running:
    expected: ExpectedLength
    at_step: float


@dataclass(slots=True)
class _WorkerBatch:
    """A worker's completions: ``running`` ones, and those that wait for a slot, in order of arrival.

    ``steps``: so many that it has made by ``curve``; really it makes ``speed`` times as many, as far as is known after
    ``seen`` completions.
    """

    curve: DecodeCurve
    slots: int
    at: float
    speed: float
    seen: int = 0
    steps: float = 0.0
    running: dict[Sample, _Running] = field(default_factory=dict)
    waiting: dict[Sample, ExpectedLength] = field(default_factory=dict)

    def learn(self, speed: float, weight: float) -> None:
        """A completion was sampled at this speed; ``weight`` from 0 to 1, by its length."""
        self.seen += 1
        if self.seen > FIRST:
            # One completion whose news was held up must not slow down what is expected of all that follow.
            speed = min(max(speed, self.speed / MOST_WRONG), self.speed * MOST_WRONG)
        # The plain mean of the first ones, then an exponential mean that weighs a completion by its length.
        first = 1 / self.seen if self.seen <= FIRST else 0.0
        self.speed += max(LEARNING_RATE * weight, first) * (speed - self.speed)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Expected tokens left, by completion. ``outgrown``: of those among the running that are past their estimate.

    ``contexts``: tokens in the cache of each that runs, then those of the prompts of the waiting.
    """

    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outgrown: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """All of them together."""
        return sum(self.running) + sum(self.waiting)


class Progress:
    """The progress of all workers. ``longest``: no completion has more tokens; ``measured``: a worker's curve, by id.

    With b completions running, dt seconds are dt / t(b) steps by the worker's curve. Each worker has a speed: the steps
    that it really makes, as a multiple of that, so that a completion that began at step k has speed × (steps - k)
    tokens now. It is learnt from the worker's own completions, and begins as the fleet's. What a completion that
    outgrew its estimate still has before it follows from how sure the estimate was (``mean_excess``).
    """

    def __init__(self, measured: Callable[[str], DecodeCurve], longest: int) -> None:
        self._measured = measured
        self._longest = longest
        self._batches: dict[str, _WorkerBatch] = {}

    @property
    def speed(self) -> float:
        """The fleet's: mean over the workers of which some completion has come; 1 before the first."""
        known = [batch.speed for batch in self._batches.values() if batch.seen]
        return sum(known) / len(known) if known else 1.0

    @property
    def speeds(self) -> dict[str, float]:
        """By worker, of those that have had something to do."""
        return {name: batch.speed for name, batch in self._batches.items()}

    def curve_of(self, worker_id: str) -> DecodeCurve:
        """A worker's decode steps as they are: its curve, at its speed."""
        batch = self._batches.get(worker_id)
        curve, speed = (batch.curve, batch.speed) if batch else (self._measured(worker_id), self.speed)
        return curve.times(1 / speed)

    def send(
        self,
        worker_id: str,
        slots: int,
        samples: Iterable[Sample],
        expected: ExpectedLength,
        now: float,
        begun: Mapping[Sample, int] | None = None,
    ) -> None:
        """These samples, of so many tokens each, are with a worker now. ``begun``: tokens of each sampled elsewhere."""
        batch = self._batches.get(worker_id)
        if batch is None:
            seen = TAKEN_FROM_FLEET if any(other.seen for other in self._batches.values()) else 0
            batch = _WorkerBatch(self._measured(worker_id), slots, now, self.speed, seen)
            self._batches[worker_id] = batch
        self._count(batch, now)
        batch.slots = slots
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        begun = begun or {}
        batch.waiting.update({sample: expected._replace(begun=begun.get(sample, 0)) for sample in samples})
        self._begin(batch)

    def drop(self, worker_id: str, samples: Iterable[Sample], now: float) -> None:
        """The worker does not have these any more."""
        if (batch := self._batches.get(worker_id)) is not None:
            self._count(batch, now)
            for sample in samples:
                batch.waiting.pop(sample, None)
                batch.running.pop(sample, None)
            self._begin(batch)

    def finished(self, worker_id: str, sample: Sample, length: int, now: float) -> None:
        """A completion of so many tokens is there."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return
        self._count(batch, now)
        # Tokens that came, over steps by the curve since it began: the speed of this worker meanwhile.
        sampled = batch.running.get(sample)
        if sampled is not None and length > 0 and (reckoned := batch.steps - sampled.at_step) > 0:
            batch.learn(length / reckoned, min(1.0, length / self._longest))
        self.drop(worker_id, (sample,), now)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """What is left of a worker's completions."""
        held = self.held(worker_id, now)
        return Remaining(
            running=tuple(one.left for one in held if one.is_running),
            waiting=tuple(one.left for one in held if not one.is_running),
            outgrown=tuple(one.left for one in held if one.is_outgrown),
            contexts=tuple(one.context for one in held),
        )

    def held(self, worker_id: str, now: float) -> list[HeldSample]:
        """What a worker has, in order of arrival."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return []
        self._count(batch, now)
        held = []
        for sample, running in batch.running.items():
            sampled = int(batch.speed * (batch.steps - running.at_step))
            held.append(self._held(sample, running.expected, sampled, is_running=True))
        held += [self._held(sample, expected, 0, is_running=False) for sample, expected in batch.waiting.items()]
        return held

    def taken_on(self, expected: ExpectedLength, begun: Mapping[Sample, int]) -> list[HeldSample]:
        """What a worker has that begins with samples of which others had sampled so many tokens."""
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        return [self._held(sample, expected._replace(begun=had), 0, is_running=True) for sample, had in begun.items()]

    def _held(self, sample: Sample, expected: ExpectedLength, sampled: int, *, is_running: bool) -> HeldSample:
        done, tokens = expected.begun + sampled, expected.tokens
        # At least one token, for it has not ended.
        left, is_outgrown = max(1, tokens - done), done >= GRACE * tokens
        if is_outgrown:
            # What it still has, given that it has come so far.
            more = int(done * mean_excess(done / tokens, expected.deviation))
            left = max(1, min(more, self._longest - done))
        return HeldSample(sample, left, expected.prompt + done, is_running, is_outgrown and is_running)

    def _count(self, batch: _WorkerBatch, now: float) -> None:
        if batch.running and now > batch.at:
            # As many ran all the time since the last change, so every step took t(b).
            batch.steps += (now - batch.at) / batch.curve.batch_s(len(batch.running))
        batch.at = max(batch.at, now)

    @staticmethod
    def _begin(batch: _WorkerBatch) -> None:
        # In order of arrival, as engines do.
        while batch.waiting and len(batch.running) < batch.slots:
            sample = next(iter(batch.waiting))
            batch.running[sample] = _Running(batch.waiting.pop(sample), batch.steps)


class TrainerPace:
    """How fast the trainer is, from what its steps say they took; and what it has to do, from what has arrived.

    It takes groups when they are whole: with w seconds of work in a group that becomes whole at t, it is free at
    max(free, t) + w. ``s_per_token``: of forward, backward and optimizer; 0 before the first step.
    """

    def __init__(self) -> None:
        self.s_per_token = 0.0
        self._free_at = 0.0
        self._tokens: dict[str, int] = {}

    def produced(self, group_id: str, tokens: int, now: float, *, is_whole: bool) -> None:
        """A sample of a group is there: so many tokens of prompt and completion."""
        self._tokens[group_id] = self._tokens.get(group_id, 0) + tokens
        if is_whole:
            self._free_at = max(self._free_at, now) + self.s_per_token * self._tokens[group_id]

    def stepped(self, report: StepReport, now: float) -> None:
        """A step was taken: what is left to do is what has arrived and is in no step yet."""
        tokens = sum(self._tokens.pop(group_id, 0) for group_id in report.group_ids)
        seconds = sum(report.metrics.get(f"time/{phase}", 0.0) for phase in ("forward_backward", "optimizer"))
        if tokens and seconds:
            # Of all tokens of its groups: what it left out of the gradient costs nothing, now as in the next step.
            weight = NEWEST_STEP if self.s_per_token else 1.0
            self.s_per_token += weight * (seconds / tokens - self.s_per_token)
        self._free_at = now + self.s_per_token * sum(self._tokens.values())

    def forget(self, group_id: str) -> None:
        """It is in no step: it was skipped, or given up."""
        self._tokens.pop(group_id, None)

    def free_in_s(self, now: float) -> float:
        """Seconds until the trainer is through with what has arrived whole."""
        return max(0.0, self._free_at - now)


@dataclass(slots=True)
class _PlannedWindow:
    began_at: float
    predicted_s: float
    missing: int


class PlanAccuracy:
    """Holds the predicted finish of each window against the actual one, for logs and displays. Times in seconds.

    ``predicted_s`` and ``actual_s``: of the window that ended last; none before the first.
    """

    def __init__(self) -> None:
        self._window_of: dict[str, _PlannedWindow] = {}
        self._newest: _PlannedWindow | None = None
        self.predicted_s: float | None = None
        self.actual_s: float | None = None

    def begin(self, groups: Iterable[str], now: float) -> None:
        """A window of these groups was drawn; its plan follows."""
        names = list(groups)
        self._newest = _PlannedWindow(now, 0.0, len(names))
        self._window_of.update(dict.fromkeys(names, self._newest))

    def planned(self, predicted_s: float) -> None:
        """What the first plan of the newest window says; later ones know more, and are no prediction."""
        # Made before anything of the window was sent.
        if self._newest is not None and not self._newest.predicted_s:
            self._newest.predicted_s = predicted_s

    def over(self, group_id: str, now: float) -> None:
        """Nothing is missing of a group any more."""
        window = self._window_of.pop(group_id, None)
        if window is not None:
            window.missing -= 1
            if not window.missing:
                self.predicted_s, self.actual_s = window.predicted_s, now - window.began_at
