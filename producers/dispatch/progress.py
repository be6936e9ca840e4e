"""Estimates of how far the workers and the trainer have got. Pure; times in seconds.

- ``Progress``: counts each worker's decode steps by its decode curve, from the elapsed time and its batch size. Each
  completion that arrives shows how many steps there really were, and so how fast the worker is;
- ``TrainerPace``: seconds that the trainer takes per token, and how long it is busy with what has arrived;
- ``PlanAccuracy``: the predicted and the actual time of each window.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from streamrl.producers.dispatch.plans import mean_excess
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.reports import StepReport

OUTGROWN_FACTOR = 1.1
"""A completion has outgrown its estimate when it exceeds it by this factor. Below, its record may be on the way."""
LEARNING_RATE = 0.2
"""Weight of the longest possible completion in the estimate of a worker's speed. Shorter ones weigh less, because the
time that their records take to arrive distorts them more."""
FIRST_COMPLETIONS = 32
"""A worker's first completions, over which its speed is a plain mean."""
FLEET_SPEED_WEIGHT = 4
"""Weight of the fleet's speed in that mean, in completions: a new worker is assumed to be as fast as the others."""
NEWEST_STEP = 0.5
"""Weight of the newest step in the estimate of the trainer's speed, which drifts with the lengths."""
MAX_SPEED_CHANGE = 4.0
"""After the first completions, a single one changes the estimated speed by at most this factor."""
Sample = tuple[str, int]
"""A group's id and the index of a sample."""


class ExpectedLength(NamedTuple):
    """Tokens of a completion, and the standard deviation of their logarithm; 0 if that is not known.

    ``prompt``: tokens of the prompt. ``begun``: tokens of the completion that other workers have already sampled.
    """

    tokens: int
    deviation: float = 0.0
    prompt: int = 0
    begun: int = 0


class HeldSample(NamedTuple):
    """A sample that a worker has: expected tokens left, and tokens in the cache when it runs."""

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
    """A worker's completions: ``running``, and ``waiting`` for a slot in order of arrival.

    ``steps``: decode steps made until ``at``, by ``curve``. The worker really makes ``speed`` times as many, as
    estimated from ``seen`` completions.
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
        """Update the speed from one completion; ``weight``: from 0 to 1, by its length."""
        self.seen += 1
        if self.seen > FIRST_COMPLETIONS:
            # A single completion whose record was delayed must not distort the estimate for all later ones.
            speed = min(max(speed, self.speed / MAX_SPEED_CHANGE), self.speed * MAX_SPEED_CHANGE)
        # A plain mean of the first completions, then an exponential mean weighted by length.
        first = 1 / self.seen if self.seen <= FIRST_COMPLETIONS else 0.0
        self.speed += max(LEARNING_RATE * weight, first) * (speed - self.speed)


@dataclass(frozen=True, slots=True)
class Remaining:
    """Expected tokens left of each completion. ``outgrown``: of the running ones that are past their estimate.

    ``contexts``: tokens in the cache of each running completion, then of each waiting one when it starts.
    """

    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    outgrown: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Sum over all completions."""
        return sum(self.running) + sum(self.waiting)


class Progress:
    """The progress of all workers. ``longest``: most tokens of a completion; ``measured``: a worker's curve, by id.

    With b completions running, dt seconds are dt / t(b) steps by the worker's curve. A worker's speed is the ratio of
    its real steps to these, so a completion that started at step k has speed × (steps - k) tokens now. The speed starts
    as the fleet's, and is then learned from the worker's own completions. The expected rest of a completion that
    outgrew its estimate follows from how certain the estimate was (``mean_excess``).
    """

    def __init__(self, measured: Callable[[str], DecodeCurve], longest: int) -> None:
        self._measured = measured
        self._longest = longest
        self._batches: dict[str, _WorkerBatch] = {}

    @property
    def speed(self) -> float:
        """The fleet's speed: the mean over workers with at least one completion; 1 before the first."""
        known = [batch.speed for batch in self._batches.values() if batch.seen]
        return sum(known) / len(known) if known else 1.0

    @property
    def speeds(self) -> dict[str, float]:
        """Speed by worker, for workers that were sent samples."""
        return {name: batch.speed for name, batch in self._batches.items()}

    def curve_of(self, worker_id: str) -> DecodeCurve:
        """A worker's curve, corrected by its speed."""
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
        """Note samples that were sent to a worker, with their length. ``begun``: tokens of each sampled elsewhere."""
        batch = self._batches.get(worker_id)
        if batch is None:
            seen = FLEET_SPEED_WEIGHT if any(other.seen for other in self._batches.values()) else 0
            batch = _WorkerBatch(self._measured(worker_id), slots, now, self.speed, seen)
            self._batches[worker_id] = batch
        self._count(batch, now)
        batch.slots = slots
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        begun = begun or {}
        batch.waiting.update({sample: expected._replace(begun=begun.get(sample, 0)) for sample in samples})
        self._fill_slots(batch)

    def drop(self, worker_id: str, samples: Iterable[Sample], now: float) -> None:
        """Remove samples that the worker no longer has."""
        if (batch := self._batches.get(worker_id)) is not None:
            self._count(batch, now)
            for sample in samples:
                batch.waiting.pop(sample, None)
                batch.running.pop(sample, None)
            self._fill_slots(batch)

    def finished(self, worker_id: str, sample: Sample, length: int, now: float) -> None:
        """Note that a worker's completion has arrived; ``length``: tokens that this worker sampled of it."""
        batch = self._batches.get(worker_id)
        if batch is None:
            return
        self._count(batch, now)
        # The worker's speed since the completion started: its tokens per step of the curve.
        sampled = batch.running.get(sample)
        if sampled is not None and length > 0 and (expected_steps := batch.steps - sampled.at_step) > 0:
            batch.learn(length / expected_steps, min(1.0, length / self._longest))
        self.drop(worker_id, (sample,), now)

    def remaining(self, worker_id: str, now: float) -> Remaining:
        """Expected tokens left of a worker's completions."""
        held = self.held(worker_id, now)
        return Remaining(
            running=tuple(one.left for one in held if one.is_running),
            waiting=tuple(one.left for one in held if not one.is_running),
            outgrown=tuple(one.left for one in held if one.is_outgrown),
            contexts=tuple(one.context for one in held),
        )

    def held(self, worker_id: str, now: float) -> list[HeldSample]:
        """The samples that a worker has, in order of arrival."""
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

    def held_if_continued(self, expected: ExpectedLength, begun: Mapping[Sample, int]) -> list[HeldSample]:
        """The samples as a worker would have them if it continued them; ``begun``: tokens of each that exist."""
        expected = expected._replace(tokens=min(expected.tokens, self._longest))
        return [self._held(sample, expected._replace(begun=had), 0, is_running=True) for sample, had in begun.items()]

    def _held(self, sample: Sample, expected: ExpectedLength, sampled: int, *, is_running: bool) -> HeldSample:
        done, tokens = expected.begun + sampled, expected.tokens
        # At least one token, because the completion has not ended.
        left, is_outgrown = max(1, tokens - done), done >= OUTGROWN_FACTOR * tokens
        if is_outgrown:
            # The expected rest, given the tokens so far.
            more = int(done * mean_excess(done / tokens, expected.deviation))
            left = max(1, min(more, self._longest - done))
        return HeldSample(sample, left, expected.prompt + done, is_running, is_outgrown and is_running)

    def _count(self, batch: _WorkerBatch, now: float) -> None:
        if batch.running and now > batch.at:
            # The batch has not changed since ``batch.at``, so every step took t(b).
            batch.steps += (now - batch.at) / batch.curve.batch_s(len(batch.running))
        batch.at = max(batch.at, now)

    @staticmethod
    def _fill_slots(batch: _WorkerBatch) -> None:
        # In order of arrival, as in engines.
        while batch.waiting and len(batch.running) < batch.slots:
            sample = next(iter(batch.waiting))
            batch.running[sample] = _Running(batch.waiting.pop(sample), batch.steps)


class TrainerPace:
    """The trainer's speed, from the times in its step reports; and its work, from the samples that have arrived.

    The trainer takes groups when they are complete. A group with w seconds of work that is complete at t makes it busy
    until max(free, t) + w. ``s_per_token``: seconds of forward, backward and optimizer; 0 before the first step.
    """

    def __init__(self) -> None:
        self.s_per_token = 0.0
        self._free_at = 0.0
        self._tokens: dict[str, int] = {}

    def produced(self, group_id: str, tokens: int, now: float, *, is_whole: bool) -> None:
        """Note a sample that has arrived; ``tokens``: of prompt and completion; ``is_whole``: the group is complete."""
        self._tokens[group_id] = self._tokens.get(group_id, 0) + tokens
        if is_whole:
            self._free_at = max(self._free_at, now) + self.s_per_token * self._tokens[group_id]

    def stepped(self, report: StepReport, now: float) -> None:
        """Note a step: the work left is the samples that have arrived and are in no step yet."""
        tokens = sum(self._tokens.pop(group_id, 0) for group_id in report.group_ids)
        seconds = sum(report.metrics.get(f"time/{phase}", 0.0) for phase in ("forward_backward", "optimizer"))
        if tokens and seconds:
            # Over all tokens of its groups: those outside the gradient cost nothing, in this step as in the next.
            weight = NEWEST_STEP if self.s_per_token else 1.0
            self.s_per_token += weight * (seconds / tokens - self.s_per_token)
        self._free_at = now + self.s_per_token * sum(self._tokens.values())

    def forget(self, group_id: str) -> None:
        """Remove a group that no step will train: it was skipped or given up."""
        self._tokens.pop(group_id, None)

    def free_in_s(self, now: float) -> float:
        """Seconds until the trainer has finished the complete groups that have arrived."""
        return max(0.0, self._free_at - now)


@dataclass(slots=True)
class _PlannedWindow:
    drawn_at: float
    predicted_s: float
    missing: int


class PlanAccuracy:
    """Compares the predicted time of each window with the actual one, for logs and displays. Times in seconds.

    ``predicted_s`` and ``actual_s``: of the window that ended last; None before the first.
    """

    def __init__(self) -> None:
        self._window_of: dict[str, _PlannedWindow] = {}
        self._newest: _PlannedWindow | None = None
        self.predicted_s: float | None = None
        self.actual_s: float | None = None

    def begin(self, groups: Iterable[str], now: float) -> None:
        """Note a window of these groups that was drawn; its plan follows."""
        names = list(groups)
        self._newest = _PlannedWindow(now, 0.0, len(names))
        self._window_of.update(dict.fromkeys(names, self._newest))

    def planned(self, predicted_s: float) -> None:
        """Note the prediction of the newest window's first plan. Later plans know more, so they are ignored."""
        # The first plan is made before anything of the window is sent.
        if self._newest is not None and not self._newest.predicted_s:
            self._newest.predicted_s = predicted_s

    def over(self, group_id: str, now: float) -> None:
        """Note a group with no samples missing."""
        window = self._window_of.pop(group_id, None)
        if window is not None:
            window.missing -= 1
            if not window.missing:
                self.predicted_s, self.actual_s = window.predicted_s, now - window.drawn_at
