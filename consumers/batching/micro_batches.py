"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is whole.

Invariant every_sample_is_in_exactly_one_micro_batch: between two flushes, what went in came out once.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from consumers.batching.settings import BatchingSettings
from schemas.reports import RecordRef
from schemas.trajectories import Trajectory

# What passes from intake to the trainer: samples, groups, and micro-batches as plain arrays. Knows no torch.


@dataclass(frozen=True, slots=True)
class Sample:
    """One accepted trajectory: where it stands on the topic, its weighted reward, its size as read in bytes."""

    trajectory: Trajectory
    ref: RecordRef
    reward: float
    size_bytes: int

    @property
    def length(self) -> int:
        """Prompt and completion tokens."""
        return len(self.trajectory.prompt_token_ids) + len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """The usable samples of one prompt, in the order of their sample index."""

    group_id: str
    created_at: float
    samples: tuple[Sample, ...]

    @property
    def due_step(self) -> int:
        """The earliest optimizer step that may train it, 0 for any."""
        return max((sample.trajectory.due_step for sample in self.samples), default=0)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A sample with its advantage, which all of its completion tokens share."""

    sample: Sample
    advantage: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of prompt and completion, right-padded to S tokens.

    ``input_ids`` int64 [B, S]; ``attention_mask`` int64 [B, S], 1 on tokens; ``loss_mask`` float32 [B, S], 1 where
    token t is a completion token to be trained; ``behaviour_logprobs`` float32 [B, S], of token t given those before
    it; ``advantages`` float32 [B]; ``lengths`` int64 [B], prompt and completion; ``temperatures`` float32 [B];
    ``refs``: where the B records stand on the topic.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lengths: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    refs: tuple[RecordRef, ...]

    def take(self, rows: Sequence[int]) -> "MicroBatch":
        """Only these rows, in this order, at the same width."""
        wanted = list(rows)
        return MicroBatch(
            input_ids=self.input_ids[wanted],
            attention_mask=self.attention_mask[wanted],
            loss_mask=self.loss_mask[wanted],
            behaviour_logprobs=self.behaviour_logprobs[wanted],
            advantages=self.advantages[wanted],
            lengths=self.lengths[wanted],
            temperatures=self.temperatures[wanted],
            refs=tuple(self.refs[row] for row in wanted),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def padding_share(self) -> float:
        """Share of the B × S positions that hold no token."""
        return 1.0 - self.num_tokens / self.input_ids.size if self.input_ids.size else 0.0


def collate(samples: list[TrainingSample]) -> MicroBatch:
    """Pad samples to the longest of them."""
    lengths = np.array([item.sample.length for item in samples], dtype=np.int64)
    shape = (len(samples), int(lengths.max()))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    behaviour: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    for row, item in enumerate(samples):
        trajectory = item.sample.trajectory
        start, end = len(trajectory.prompt_token_ids), item.sample.length
        input_ids[row, :start] = trajectory.prompt_token_ids
        input_ids[row, start:end] = trajectory.token_ids
        loss_mask[row, start:end] = trajectory.loss_mask
        behaviour[row, start:end] = trajectory.logprobs
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=(np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour,
        advantages=np.array([item.advantage for item in samples], dtype=np.float32),
        lengths=lengths,
        temperatures=np.array([item.sample.trajectory.temperature for item in samples], dtype=np.float32),
        refs=tuple(item.sample.ref for item in samples),
    )


# What computing a sequence costs, in units of a token's own cost: its length, and its square's share. Pure.

Lengths = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True)
class CostModel:
    """cost(L) = linear * L + quadratic * L * L for a sequence of L tokens, and ``launch`` for each micro-batch."""

    linear: float
    quadratic: float
    launch: float

    @classmethod
    def of(cls, settings: BatchingSettings) -> "CostModel":
        """The units are such that a sequence as long as the token budget costs as much as the budget has tokens."""
        budget, share = settings.token_budget, settings.quadratic_share
        return cls(1 - share, share / budget, settings.launch_share * budget)

    def of_sequences(self, lengths: Lengths) -> Costs:
        """Of each sequence by itself; float64 (N)."""
        return self.linear * lengths + self.quadratic * np.square(lengths, dtype=np.float64)

    def of_rows(self, rows: int, width: int) -> float:
        """Of a micro-batch of so many sequences, padded to ``width`` tokens each."""
        return self.launch + rows * (self.linear * width + self.quadratic * width * width)


# Which samples share a micro-batch: neighbours in length, within a token budget, with little padding. Pure. Lengths
# are given longest first, so that a run of neighbours is padded to its first. Rows times that length stay within the
# budget; a sample over the budget stands alone. Padding is weighed against the fixed cost of a micro-batch.


class Run(NamedTuple):
    """Samples ``start`` (inclusive) to ``end`` (exclusive) of those given."""

    start: int
    end: int


def best_run(lengths: Lengths, budget: int, costs: CostModel) -> Run:
    """The micro-batch whose share of useful cost is the largest: the least padding for its fixed cost.

    A run from a given sample on gets better with each neighbour up to a point, and worse from there on; so the best
    end of all runs is found by bisection at once.
    """
    own = costs.of_sequences(lengths)
    sums = np.concatenate([[0.0], np.cumsum(own)])
    start = np.arange(len(lengths))
    rows = np.ones_like(start)
    most = _most_rows(lengths, budget)
    while (is_open := rows < most).any():
        middle = (rows + most) // 2
        beyond = own[np.minimum(start + middle, len(lengths) - 1)]
        gains = beyond * (middle * own + costs.launch) > own * (sums[start + middle] - sums[start])
        rows = np.where(is_open & gains, middle + 1, rows)
        most = np.where(is_open & ~gains, middle, most)
    useful = (sums[start + rows] - sums[start]) / (rows * own + costs.launch)
    best = int(np.argmax(useful))
    return Run(best, best + int(rows[best]))


def cheapest_runs(lengths: Lengths, budget: int, costs: CostModel) -> list[Run]:
    """All samples in micro-batches of the least total cost, longest first; found by dynamic programming."""
    count = len(lengths)
    own = costs.of_sequences(lengths)
    most = _most_rows(lengths, budget)
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    steps = np.arange(1, int(most.max(initial=0)) + 1)
    for start in range(count):
        reach = slice(start + 1, start + 1 + int(most[start]))
        offered = total[start] + costs.launch + own[start] * steps[: most[start]]
        is_better = offered < total[reach]
        total[reach][is_better] = offered[is_better]
        came_from[reach][is_better] = start
    runs: list[Run] = []
    end = count
    while end:
        runs.append(Run(int(came_from[end]), end))
        end = runs[-1].start
    return runs[::-1]


def split_to_multiple(runs: Sequence[Run], ranks: int) -> list[Run]:
    """As many runs as make whole rounds of ``ranks``: those of the most rows are halved. One-row runs stay whole,
    so that with fewer samples than needed the last round stays short.
    """
    found = sorted(runs, key=lambda run: run.end - run.start)
    while len(found) % ranks and found[-1].end - found[-1].start > 1:
        start, end = found.pop()
        middle = (start + end + 1) // 2
        found += [Run(start, middle), Run(middle, end)]
        found.sort(key=lambda run: run.end - run.start)
    return sorted(found)


def _most_rows(lengths: Lengths, budget: int) -> Lengths:
    """Rows that a run from each sample on may have."""
    fitting = np.maximum(1, budget // np.maximum(1, lengths))
    most: Lengths = np.minimum(fitting, np.arange(len(lengths), 0, -1))
    return most


class _Held(NamedTuple):
    """A sample in the order of the shelf: longest first, then by name."""

    minus_length: int
    trajectory_id: str
    item: TrainingSample


@dataclass
class MicroBatcher:
    """Holds samples until there is a choice among ``lookahead`` budgets of them, then cuts the run with least padding.

    ``whole_batches``: nothing is cut before the flush, which then sees all samples of the step.
    """

    settings: BatchingSettings
    whole_batches: bool = False
    _held: list[_Held] = field(default_factory=list)
    _tokens: int = 0

    def add(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Take samples in; the micro-batches that are due."""
        for item in samples:
            length = item.sample.length
            insort(self._held, _Held(-length, item.sample.ref.trajectory_id, item))
            self._tokens += length
        due: list[MicroBatch] = []
        while not self.whole_batches and self._tokens > self.settings.token_budget * self.settings.lookahead:
            due.append(self._cut_best())
        return due

    def cut_for_idle(self) -> MicroBatch | None:
        """The best micro-batch now, because nothing else is there to be done; none if less than a budget is held."""
        is_enough = self._tokens >= self.settings.token_budget and not self.whole_batches
        return self._cut_best() if is_enough else None

    def flush(self) -> list[MicroBatch]:
        """Everything still held, as the cheapest micro-batches within the budget, longest samples first."""
        runs = cheapest_runs(self._lengths(), self.settings.token_budget, CostModel.of(self.settings))
        rest = [self._collated(run) for run in runs]
        self.clear()
        return rest

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()
        self._tokens = 0

    def _cut_best(self) -> MicroBatch:
        run = best_run(self._lengths(), self.settings.token_budget, CostModel.of(self.settings))
        batch = self._collated(run)
        del self._held[run.start : run.end]
        self._tokens -= batch.num_tokens
        return batch

    def _lengths(self) -> Lengths:
        return np.array([-each.minus_length for each in self._held], dtype=np.int64)

    def _collated(self, run: Run) -> MicroBatch:
        return collate([each.item for each in self._held[run.start : run.end]])
