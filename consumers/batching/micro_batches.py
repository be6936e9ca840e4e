"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is whole.

``MicroBatcher`` holds samples sorted by length and cuts runs of neighbours; which run, ``best_run`` and
``cheapest_runs`` say. A run is padded to its longest sample, so it is the first of a run that sets its width S, and
rows times S stay within the token budget; a sample over the budget stands alone. Padding is weighed against the fixed
cost of a micro-batch (``CostModel``). Where R ranks train, the budget is each rank's: a micro-batch is dealt over all
of them (``dealing.py``) and takes as long as the fullest share, of ceil(rows / R) rows. Computed without padding
(``packing`` "varlen"), a share is one row of all its tokens, which stay within the budget, and the fullest run is the
best (``fullest_run``, ``fewest_runs``). Knows no torch.

Invariant every_sample_is_in_exactly_one_micro_batch: between two flushes, what went in came out once,
unless its group was dropped.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.consumers.batching.settings import BatchingSettings, Packing
from streamrl.schemas.identifiers import group_id_of
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import Trajectory

Lengths = NDArray[np.int64]
Costs = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One accepted trajectory: where it stands on the topic, and its weighted reward.

    ``turn_rewards``: parts of the reward that came with a turn, one a turn; empty: it came at the end.
    """

    trajectory: Trajectory
    ref: RecordRef
    reward: float
    turn_rewards: tuple[float, ...] = ()

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

    ``input_ids`` int64 [B, S]; ``loss_mask`` float32 [B, S], 1 where token t is a completion token to be trained;
    ``behaviour_logprobs`` float32 [B, S], of token t given those before it; ``advantages`` float32 [B]; ``lengths``
    int64 [B], prompt and completion; ``temperatures`` float32 [B]; ``refs``: where the B records stand on the topic;
    ``versions``: by how many versions' spans each was sampled, empty where nobody knows. ``turn_rewards`` float32 [B,
    S], at the last token of a turn, what came with it; None: with none of these. ``packing``: how it is computed; its
    arrays are padded in any case.
    """

    input_ids: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lengths: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    refs: tuple[RecordRef, ...]
    turn_rewards: NDArray[np.float32] | None = None
    versions: tuple[int, ...] = ()
    packing: Packing = "padded"

    def take(self, rows: Sequence[int]) -> "MicroBatch":
        """Only these rows, in this order, at the same width."""
        wanted = list(rows)
        return MicroBatch(
            input_ids=self.input_ids[wanted],
            loss_mask=self.loss_mask[wanted],
            behaviour_logprobs=self.behaviour_logprobs[wanted],
            advantages=self.advantages[wanted],
            lengths=self.lengths[wanted],
            temperatures=self.temperatures[wanted],
            refs=tuple(self.refs[row] for row in wanted),
            turn_rewards=None if self.turn_rewards is None else self.turn_rewards[wanted],
            versions=tuple(self.versions[row] for row in wanted) if self.versions else (),
            packing=self.packing,
        )

    def halves(self) -> tuple["MicroBatch", "MicroBatch"]:
        """The first and the second half of at least two rows."""
        middle = len(self.refs) // 2
        return self.repacked(range(middle)), self.repacked(range(middle, len(self.refs)))

    def without(self, group_ids: Collection[str]) -> "MicroBatch | None":
        """The rows of other groups; none if none are left."""
        rows = [row for row, ref in enumerate(self.refs) if group_id_of(ref.trajectory_id) not in group_ids]
        if len(rows) == len(self.refs):
            return self
        return self.repacked(rows) if rows else None

    def repacked(self, rows: Sequence[int]) -> "MicroBatch":
        """These rows, at least one, as ``collate`` would have packed them: no wider than the longest."""
        part = self.take(rows)
        width = int(part.lengths.max())
        return replace(
            part,
            input_ids=part.input_ids[:, :width],
            loss_mask=part.loss_mask[:, :width],
            behaviour_logprobs=part.behaviour_logprobs[:, :width],
            turn_rewards=None if part.turn_rewards is None else part.turn_rewards[:, :width],
        )

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def num_positions(self) -> int:
        """Tokens that are computed: with padding, B times S."""
        return int(self.input_ids.size) if self.packing == "padded" else self.num_tokens


def collate(samples: list[TrainingSample], packing: Packing = "padded") -> MicroBatch:
    """B samples as one micro-batch, right-padded to S, the tokens of the longest of them."""
    lengths = np.array([item.sample.length for item in samples], dtype=np.int64)
    shape = (len(samples), int(lengths.max()))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    behaviour: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    turn_rewards = np.zeros(shape, dtype=np.float32) if any(item.sample.turn_rewards for item in samples) else None
    # Row by row, since trajectories are ragged; what no trajectory covers stays 0 and is masked.
    for row, item in enumerate(samples):
        trajectory = item.sample.trajectory
        start, end = len(trajectory.prompt_token_ids), item.sample.length
        input_ids[row, :start] = trajectory.prompt_token_ids
        input_ids[row, start:end] = trajectory.token_ids
        loss_mask[row, start:end] = trajectory.loss_mask
        behaviour[row, start:end] = trajectory.logprobs
        if turn_rewards is not None and item.sample.turn_rewards:
            turn_rewards[row, [start + turn.end - 1 for turn in trajectory.turns]] = item.sample.turn_rewards
    return MicroBatch(
        input_ids=input_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour,
        advantages=np.array([item.advantage for item in samples], dtype=np.float32),
        lengths=lengths,
        temperatures=np.array([item.sample.trajectory.temperature for item in samples], dtype=np.float32),
        refs=tuple(item.sample.ref for item in samples),
        turn_rewards=turn_rewards,
        versions=tuple(len(item.sample.trajectory.version_spans) for item in samples),
        packing=packing,
    )


class _HeldSample(NamedTuple):
    """Sorts longest first, then by name, so that the order does not depend on the order of arrival."""

    minus_length: int
    trajectory_id: str
    item: TrainingSample


@dataclass
class MicroBatcher:
    """Holds samples until there is a choice among ``lookahead`` budgets of them, then cuts the run with least padding.

    ``whole_batches``: nothing is cut before the flush, which then sees all samples of the step. ``ranks``: that share
    each micro-batch.
    """

    settings: BatchingSettings
    whole_batches: bool = False
    ranks: int = 1
    packing: Packing = "padded"
    _held: list[_HeldSample] = field(default_factory=list)
    _tokens: int = 0

    def hold(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Take samples in; the micro-batches that are due."""
        for item in samples:
            length = item.sample.length
            # Sorted as they come, so that every cut finds neighbours in length side by side. Ids are unique (the filter
            # drops repeats), so no comparison of tuples gets as far as the item, which has no order.
            insort(self._held, _HeldSample(-length, item.sample.ref.trajectory_id, item))
            self._tokens += length
        # Down to the lookahead: a choice among several budgets' worth of samples is what keeps padding low.
        due: list[MicroBatch] = []
        while not self.whole_batches and self._tokens > self._budgets * self.settings.lookahead:
            due.append(self._cut_best())
        return due

    def cut_for_idle(self) -> MicroBatch | None:
        """The best micro-batch now, because nothing else is there to be done; none if less than a budget is held."""
        # Less than a budget would pay the fixed cost for few tokens, which may soon come along with others.
        is_enough = self._tokens >= self._budgets and not self.whole_batches
        return self._cut_best() if is_enough else None

    def flush(self) -> list[MicroBatch]:
        """Everything still held, as the cheapest micro-batches within the budget, longest samples first."""
        if self.packing == "padded":
            runs = cheapest_runs(self._lengths(), self.settings.token_budget, CostModel.of(self.settings), self.ranks)
        else:
            runs = fewest_runs(self._lengths(), self.settings.token_budget, self.ranks)
        rest = [self._collated(run) for run in runs]
        self.clear()
        return rest

    def drop_group(self, group_id: str) -> None:
        """Forget the samples of a group that are still held."""
        self._held = [each for each in self._held if group_id_of(each.trajectory_id) != group_id]
        self._tokens = -sum(each.minus_length for each in self._held)

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()
        self._tokens = 0

    def _cut_best(self) -> MicroBatch:
        choose = best_run if self.packing == "padded" else fullest_run
        run = choose(self._lengths(), self.settings.token_budget, CostModel.of(self.settings), self.ranks)
        batch = self._collated(run)
        del self._held[run.start : run.end]
        self._tokens -= batch.num_tokens
        return batch

    @property
    def _budgets(self) -> int:
        """Tokens that all ranks together may be given at once."""
        return self.settings.token_budget * self.ranks

    def _lengths(self) -> Lengths:
        return np.array([-each.minus_length for each in self._held], dtype=np.int64)

    def _collated(self, run: "SampleRange") -> MicroBatch:
        return collate([each.item for each in self._held[run.start : run.end]], self.packing)


@dataclass(frozen=True)
class CostModel:
    """What computing takes, in units of a token's own cost: ``linear * L + quadratic * L * L`` for a sequence of L
    tokens (the square is attention's), and ``fixed`` for each micro-batch (launching kernels, the optimizer's hooks).

    A micro-batch of B rows of S tokens costs ``fixed + B * (linear * S + quadratic * S * S)``: padding costs as much
    as tokens do.
    """

    linear: float
    quadratic: float
    fixed: float

    @classmethod
    def of(cls, settings: BatchingSettings) -> "CostModel":
        """The units are such that a sequence as long as the token budget costs as much as the budget has tokens."""
        budget, share = settings.token_budget, settings.attention_cost_fraction
        # At L = budget: (1 - share) budget + (share / budget) budget^2 = budget, of which attention is the share.
        return cls(1 - share, share / budget, settings.fixed_cost_fraction * budget)

    def of_sequences(self, lengths: Lengths) -> Costs:
        """Of each sequence by itself; float64 [N]."""
        return self.linear * lengths + self.quadratic * np.square(lengths, dtype=np.float64)


class SampleRange(NamedTuple):
    """Samples ``start`` (inclusive) to ``end`` (exclusive) of those given, which are sorted longest first."""

    start: int
    end: int


def best_run(lengths: Lengths, budget: int, costs: CostModel, ranks: int = 1) -> SampleRange:
    """The micro-batch with the largest useful share of its cost: the least padding for its fixed cost.

    ``lengths``: int64 [N], N >= 1, longest first; ``budget``: tokens, padding included. With c(i) the cost of sample i
    by itself, the n samples from s on are padded to the length of s, so that their useful share is

        u(s, n) = (c(s) + ... + c(s + n - 1)) / (n c(s) + fixed).

    One more sample adds c(s + n) above and c(s) below, so it raises u if and only if c(s + n) / c(s) > u(s, n). If it
    does not, the new u still is at least that ratio, and the ratios of later, shorter samples are no larger: none of
    them raises u again. So u has one peak in n, and bisection finds it for all s at once, in O(N log N).

    With ``ranks`` R the samples are added R at a time, one to each rank's share (the last ones may be fewer): n counts
    rows of a share, and all of the above holds of their sums, since those of later, shorter samples are no larger.
    """
    own = costs.of_sequences(lengths)  # c, float64 [N], not increasing
    sums = np.concatenate([[0.0], np.cumsum(own)])  # sums[j] - sums[i] = c(i) + ... + c(j - 1)
    start = np.arange(len(lengths))
    # Of each start, the best n is in rows .. most; both are int64 [N].
    rows = np.ones_like(start)
    most = _most_rows(lengths, budget, ranks)

    def end(rows: Lengths) -> Lengths:
        # For starts that are settled this may point past the end; their answer is not used.
        found: Lengths = np.minimum(start + rows * ranks, len(lengths))
        return found

    while (is_open := rows < most).any():
        middle = (rows + most) // 2
        if ranks == 1:  # the cost itself, which a difference of sums has lost the last bits of
            added = own[np.minimum(start + middle, len(lengths) - 1)]
        else:
            added = sums[end(middle + 1)] - sums[end(middle)]
        # c(s + n) / c(s) > u(s, n), multiplied out.
        gains = added * (middle * own + costs.fixed) > own * (sums[end(middle)] - sums[start])
        rows = np.where(is_open & gains, middle + 1, rows)
        most = np.where(is_open & ~gains, middle, most)
    useful = (sums[end(rows)] - sums[start]) / (rows * own + costs.fixed)
    best = int(np.argmax(useful))
    return SampleRange(best, int(end(rows)[best]))


def cheapest_runs(lengths: Lengths, budget: int, costs: CostModel, ranks: int = 1) -> list[SampleRange]:
    """All samples in micro-batches of the least total cost, longest first.

    Dynamic programming over ends, O(N x longest run): ``total[j]``, the least cost of the first j samples, is the
    minimum over i of ``total[i] + fixed + rows c(i)``, where the rows are those of the fullest share of j - i.
    """
    count = len(lengths)
    own = costs.of_sequences(lengths)
    most = np.minimum(_most_rows(lengths, budget, ranks) * ranks, np.arange(count, 0, -1))
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    row_counts = np.arange(ranks, int(most.max(initial=0)) + ranks) // ranks  # of a share: ceil(n / ranks), n from 1
    # ``total[start]`` is final when its turn comes: a run that ends at it began before it.
    for start in range(count):
        reach = slice(start + 1, start + 1 + int(most[start]))
        offered = total[start] + costs.fixed + own[start] * row_counts[: most[start]]
        is_better = offered < total[reach]
        total[reach][is_better] = offered[is_better]  # a slice is a view, so this writes into ``total`` itself
        came_from[reach][is_better] = start
    runs: list[SampleRange] = []
    end = count
    while end:
        runs.append(SampleRange(int(came_from[end]), end))
        end = runs[-1].start
    return runs[::-1]


def fullest_run(lengths: Lengths, budget: int, costs: CostModel, ranks: int = 1) -> SampleRange:
    """The micro-batch without padding that is most of its cost's worth: of those within the budget, the costliest.

    ``lengths``: int64 [N], N >= 1, longest first. The useful share u(s, n) of ``best_run`` is without padding that of
    the fixed cost alone, c(s) + ... + c(s + n - 1) over itself plus fixed, which every sample raises.
    """
    ends = _farthest_ends(lengths, budget, ranks)
    sums = np.concatenate([[0.0], np.cumsum(costs.of_sequences(lengths))])
    best = int(np.argmax(sums[ends] - sums[:-1]))
    return SampleRange(best, int(ends[best]))


def fewest_runs(lengths: Lengths, budget: int, ranks: int = 1) -> list[SampleRange]:
    """All samples in as few micro-batches without padding as there can be of neighbours, longest first."""
    ends = _farthest_ends(lengths, budget, ranks)
    runs: list[SampleRange] = []
    while (start := runs[-1].end if runs else 0) < len(lengths):
        runs.append(SampleRange(start, int(ends[start])))
    return runs


def _farthest_ends(lengths: Lengths, budget: int, ranks: int) -> Lengths:
    """Where a run from each sample on ends at most: each rank's share of neighbours has the budget's tokens or fewer,
    or one sample.
    """
    count = len(lengths)
    sums = np.concatenate([[0], np.cumsum(lengths)])
    fitting = np.searchsorted(sums, sums[:-1] + budget, side="right") - 1
    after_share = np.append(np.maximum(fitting, np.arange(1, count + 1)), count)
    ends = np.arange(count)
    for _ in range(ranks):
        ends = after_share[ends]
    return ends


def _most_rows(lengths: Lengths, budget: int, ranks: int) -> Lengths:
    """Rows that each rank's share of a run from each sample on may have: rows times its length within the budget, at
    least one, and not more than samples are left.
    """
    fitting = np.maximum(1, budget // np.maximum(1, lengths))
    left = np.arange(len(lengths), 0, -1)
    most: Lengths = np.minimum(fitting, -(-left // ranks))
    return most
