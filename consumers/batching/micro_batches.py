"""Cuts micro-batches of similar lengths as samples arrive, so that the gradient can start before the batch is complete.

``MicroBatcher`` holds samples sorted by length and cuts runs of neighbours; ``best_run`` and ``cheapest_runs`` choose
them. A run is padded to its longest sample, which is its first and sets its width S. Rows times S stay within the token
budget; a sample over the budget gets its own micro-batch. Padding is weighed against the fixed cost of a micro-batch
(``CostModel``). With R ranks, the budget is for each rank: a micro-batch is distributed over all of them
(``dealing.py``), and takes as long as the largest share, of ceil(rows / R) rows. Without padding (``packing``
"varlen"), a share is one row of all its tokens, which stay within the budget, and the fullest run is the best
(``fullest_run``, ``fewest_runs``). With ``packing`` "shared", samples are held in the order of their tokens, so that
neighbours share prefixes, and tokens that a run has in common count once. Knows no torch.

Invariants:
- every_sample_is_in_exactly_one_micro_batch: between two flushes, each sample added is returned once, unless its group
  was dropped;
- a_prompt_is_computed_once: with "shared", samples of one prompt are in one micro-batch, unless they alone exceed the
  budget.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamrl.consumers.batching.prefixes import sequence_key, shared_tokens, token_order
from streamrl.consumers.batching.settings import BatchingSettings, Packing
from streamrl.schemas.identifiers import group_id_of
from streamrl.schemas.reports import RecordRef
from streamrl.schemas.trajectories import Trajectory

Lengths = NDArray[np.int64]
Costs = NDArray[np.float64]

LOOKAHEAD = 4.0
"""Budgets of samples that are held before a micro-batch is cut: more of them hardly lower the padding any further."""
FIXED_COST_FRACTION = 0.03
"""Fixed cost of a micro-batch, in budgets. Lower, and more small micro-batches with less padding are cut."""
ATTENTION_COST_FRACTION = 0.2
"""Share of attention in the cost of a sequence as long as the token budget; it grows with the square of the length."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One accepted trajectory: its place on the topic, and its weighted reward.

    ``turn_rewards``: the parts of the reward that belong to turns, one for each turn; empty: all of it came at the end.
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
        """The earliest optimizer step that may train the group, 0 for any."""
        return max((sample.trajectory.due_step for sample in self.samples), default=0)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A sample with its advantage, which all its completion tokens share."""

    sample: Sample
    advantage: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of prompt and completion, right-padded to S tokens.

    ``input_ids`` int64 [B, S]; ``loss_mask`` float32 [B, S], 1 for completion tokens to train; ``behaviour_logprobs``
    float32 [B, S], of each token given the earlier ones; ``advantages`` float32 [B]; ``lengths`` int64 [B], prompt and
    completion; ``temperatures`` float32 [B]; ``refs``: places of the B records on the topic; ``versions``: number of
    version spans of each, empty if unknown; ``turn_rewards`` float32 [B, S]: each turn's reward at its last token, None
    if no sample has any; ``packing``: how it is computed. The arrays are padded in any case.
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
        """The first and the second half of the rows, which must be at least two."""
        middle = len(self.refs) // 2
        return self.repacked(range(middle)), self.repacked(range(middle, len(self.refs)))

    def without(self, group_ids: Collection[str]) -> "MicroBatch | None":
        """The rows of all other groups; None if there are none."""
        rows = [row for row, ref in enumerate(self.refs) if group_id_of(ref.trajectory_id) not in group_ids]
        if len(rows) == len(self.refs):
            return self
        return self.repacked(rows) if rows else None

    def repacked(self, rows: Sequence[int]) -> "MicroBatch":
        """These rows, at least one, padded to the longest of them, as ``collate`` would do."""
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
        """Tokens that are computed: with padding, B times S; those of shared prefixes once."""
        if self.packing == "padded":
            return int(self.input_ids.size)
        shared = token_order(self.input_ids, self.lengths).shared.sum() if self.packing == "shared" else 0
        return self.num_tokens - int(shared)


def collate(samples: list[TrainingSample], packing: Packing = "padded") -> MicroBatch:
    """One micro-batch of B samples, right-padded to S, the length of the longest in tokens."""
    lengths = np.array([item.sample.length for item in samples], dtype=np.int64)
    shape = (len(samples), int(lengths.max()))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    behaviour: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    turn_rewards = np.zeros(shape, dtype=np.float32) if any(item.sample.turn_rewards for item in samples) else None
    # Row by row, since lengths differ; padding stays 0 and is masked.
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
    """Sorts longest first, or by its tokens, then by trajectory id, so that the order does not depend on arrival."""

    order: int | bytes
    trajectory_id: str
    item: TrainingSample


def _key_of(trajectory: Trajectory) -> bytes:
    return sequence_key(np.concatenate([trajectory.prompt_token_ids, trajectory.token_ids]))


@dataclass
class MicroBatcher:
    """Holds samples until there are ``lookahead`` budgets of them, then cuts the run with the least padding.

    ``whole_batches``: nothing is cut before the flush, which then sees all samples of the step. ``ranks``: number of
    ranks that share each micro-batch.
    """

    settings: BatchingSettings
    whole_batches: bool = False
    ranks: int = 1
    packing: Packing = "padded"
    lookahead: float = LOOKAHEAD
    fixed_cost_fraction: float = FIXED_COST_FRACTION
    _held: list[_HeldSample] = field(default_factory=list)
    _tokens: int = 0

    def hold(self, samples: Iterable[TrainingSample]) -> list[MicroBatch]:
        """Add samples; returns the micro-batches that are due."""
        for item in samples:
            length = item.sample.length
            # Kept sorted, so that samples of similar length are neighbours. Ids are unique (the filter drops repeats),
            # so tuples are never compared by their items, which have no order.
            order = -length if self.packing != "shared" else _key_of(item.sample.trajectory)
            insort(self._held, _HeldSample(order, item.sample.ref.trajectory_id, item))
            self._tokens += length
        # Cuts down to the lookahead: a choice among several budgets of samples keeps padding low.
        due: list[MicroBatch] = []
        while not self.whole_batches and self._to_compute > self._budgets * self.lookahead:
            due.append(self._cut_best())
        return due

    def cut_for_idle(self) -> MicroBatch | None:
        """The best micro-batch now, for a trainer that is idle; None if less than a budget is held."""
        # With less than a budget, the fixed cost would be paid for few tokens; more may arrive soon.
        is_enough = self._to_compute >= self._budgets and not self.whole_batches
        return self._cut_best() if is_enough else None

    def flush(self) -> list[MicroBatch]:
        """All samples still held, as the cheapest micro-batches within the budget, longest samples first."""
        if self.packing == "padded":
            runs = cheapest_runs(self._lengths(), self.settings.token_budget, self._costs, self.ranks)
        else:
            runs = fewest_runs(self._lengths(), self.settings.token_budget, self.ranks, self._prefixes())
        rest = [self._collate(run) for run in runs]
        self.clear()
        return rest

    def drop_group(self, group_id: str) -> None:
        """Forget the samples of a group that are still held."""
        self._held = [each for each in self._held if group_id_of(each.trajectory_id) != group_id]
        self._tokens = int(self._lengths().sum())

    def clear(self) -> None:
        """Forget all samples held."""
        self._held.clear()
        self._tokens = 0

    def _cut_best(self) -> MicroBatch:
        lengths, budget = self._lengths(), self.settings.token_budget
        if (prefixes := self._prefixes()) is None:
            choose = best_run if self.packing == "padded" else fullest_run
            run = choose(lengths, budget, self._costs, self.ranks)
        else:
            # The first and not the fullest: what precedes a run could be a part of a prompt's samples.
            run = fewest_runs(lengths, budget, self.ranks, prefixes)[0]
        batch = self._collate(run)
        del self._held[run.start : run.end]
        self._tokens -= batch.num_tokens
        return batch

    @property
    def _costs(self) -> "CostModel":
        return CostModel.of(self.settings.token_budget, self.fixed_cost_fraction)

    @property
    def _budgets(self) -> int:
        """Tokens that all ranks together may compute at once."""
        return self.settings.token_budget * self.ranks

    @property
    def _to_compute(self) -> int:
        """Tokens of all samples held, those of shared prefixes once."""
        prefixes = self._prefixes()
        return self._tokens - (0 if prefixes is None else int(prefixes.shared.sum()))

    def _lengths(self) -> Lengths:
        return np.array([each.item.sample.length for each in self._held], dtype=np.int64)

    def _prefixes(self) -> "Prefixes | None":
        if self.packing != "shared":
            return None
        shared = shared_tokens([each.order for each in self._held if isinstance(each.order, bytes)])
        prompts = [len(each.item.sample.trajectory.prompt_token_ids) for each in self._held]
        return Prefixes.of(shared, np.array(prompts, dtype=np.int64))

    def _collate(self, run: "SampleRange") -> MicroBatch:
        return collate([each.item for each in self._held[run.start : run.end]], self.packing)


@dataclass(frozen=True)
class CostModel:
    """The cost of computing, in units of one token's cost.

    A sequence of L tokens costs ``linear * L + quadratic * L * L`` (attention is the square), and each micro-batch
    ``fixed`` (launching kernels, the optimizer's hooks). A micro-batch of B rows of S tokens costs ``fixed + B *
    (linear * S + quadratic * S * S)``: padding costs as much as tokens.
    """

    linear: float
    quadratic: float
    fixed: float

    @classmethod
    def of(cls, token_budget: int, fixed_cost_fraction: float = FIXED_COST_FRACTION) -> "CostModel":
        """The cost model for a token budget, in units in which a sequence of that length costs ``token_budget``."""
        share = ATTENTION_COST_FRACTION
        # At L = budget: (1 - share) budget + (share / budget) budget^2 = budget, and attention is ``share`` of it.
        return cls(1 - share, share / token_budget, fixed_cost_fraction * token_budget)

    def of_sequences(self, lengths: Lengths) -> Costs:
        """The cost of each sequence without padding, float64 [N]."""
        return self.linear * lengths + self.quadratic * np.square(lengths, dtype=np.float64)


class SampleRange(NamedTuple):
    """Samples ``start`` (inclusive) to ``end`` (exclusive) of samples sorted longest first."""

    start: int
    end: int


def best_run(lengths: Lengths, budget: int, costs: CostModel, ranks: int = 1) -> SampleRange:
    """The micro-batch whose cost has the largest useful share: little padding, and little fixed cost for each token.

    ``lengths``: int64 [N], N >= 1, longest first; ``budget``: tokens, padding included. Let c(i) be the cost of sample
    i without padding. The n samples from s on are padded to the length of s, so their useful share is

        u(s, n) = (c(s) + ... + c(s + n - 1)) / (n c(s) + fixed).

    One more sample adds c(s + n) to the numerator and c(s) to the denominator, so it raises u if and only if
    c(s + n) / c(s) > u(s, n). If it does not, the new u is still at least that ratio. The ratios of later, shorter
    samples are no larger, so none of them raises u again. So u has one peak in n, and bisection finds it for all s at
    once, in O(N log N).

    With ``ranks`` R, samples are added R at a time, one to each rank's share (the last step may add fewer). Then n
    counts rows of a share. The argument holds for the sums of R samples, since later sums are no larger.
    """
    own = costs.of_sequences(lengths)  # c, float64 [N], not increasing
    sums = np.concatenate([[0.0], np.cumsum(own)])  # sums[j] - sums[i] = c(i) + ... + c(j - 1)
    start = np.arange(len(lengths))
    # For each start, the best n is in rows .. most; both are int64 [N].
    rows = np.ones_like(start)
    most = _most_rows(lengths, budget, ranks)

    def end(rows: Lengths) -> Lengths:
        # For starts whose n is final this may point past the end; their result is not used.
        found: Lengths = np.minimum(start + rows * ranks, len(lengths))
        return found

    while (is_open := rows < most).any():
        middle = (rows + most) // 2
        if ranks == 1:  # the exact cost: a difference of sums has rounding errors
            added = own[np.minimum(start + middle, len(lengths) - 1)]
        else:
            added = sums[end(middle + 1)] - sums[end(middle)]
        # c(s + n) / c(s) > u(s, n), multiplied by both denominators.
        gains = added * (middle * own + costs.fixed) > own * (sums[end(middle)] - sums[start])
        rows = np.where(is_open & gains, middle + 1, rows)
        most = np.where(is_open & ~gains, middle, most)
    useful = (sums[end(rows)] - sums[start]) / (rows * own + costs.fixed)
    best = int(np.argmax(useful))
    return SampleRange(best, int(end(rows)[best]))


def cheapest_runs(lengths: Lengths, budget: int, costs: CostModel, ranks: int = 1) -> list[SampleRange]:
    """All samples in micro-batches of the least total cost, longest first.

    Dynamic programming over ends, O(N x longest run): ``total[j]``, the least cost of the first j samples, is the
    minimum over i of ``total[i] + fixed + rows c(i)``, where ``rows`` is the largest share of j - i samples.
    """
    count = len(lengths)
    own = costs.of_sequences(lengths)
    most = np.minimum(_most_rows(lengths, budget, ranks) * ranks, np.arange(count, 0, -1))
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    came_from = np.zeros(count + 1, dtype=np.int64)
    row_counts = np.arange(ranks, int(most.max(initial=0)) + ranks) // ranks  # of a share: ceil(n / ranks), n from 1
    # ``total[start]`` is final here: all runs that end at ``start`` have earlier starts.
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
    """The best micro-batch without padding: the costliest one within the budget.

    ``lengths``: int64 [N], N >= 1, longest first. Without padding, the useful share u(s, n) of ``best_run`` is
    C / (C + ``fixed``), with the sum C = c(s) + ... + c(s + n - 1). So every further sample raises it.
    """
    ends = _farthest_ends(lengths, budget, ranks)
    sums = np.concatenate([[0.0], np.cumsum(costs.of_sequences(lengths))])
    best = int(np.argmax(sums[ends] - sums[:-1]))
    return SampleRange(best, int(ends[best]))


class Prefixes(NamedTuple):
    """What N samples in the order of their tokens have in common.

    ``shared``: of each, the first tokens that are those of the one before it, int64 [N]. ``borders``: where a run may
    end, since the next sample has another prompt; int64, the last is N.
    """

    shared: Lengths
    borders: Lengths

    @classmethod
    def of(cls, shared: Lengths, prompts: Lengths) -> "Prefixes":
        """``prompts``: the length of each sample's prompt, int64 [N]."""
        # Samples of one prompt share all of it.
        begins = shared < np.maximum(prompts, np.roll(prompts, 1))
        return cls(shared, np.append(np.flatnonzero(begins), len(shared)))


def fewest_runs(lengths: Lengths, budget: int, ranks: int = 1, prefixes: Prefixes | None = None) -> list[SampleRange]:
    """All samples in the fewest micro-batches of neighbours without padding, in their order."""
    ends = _farthest_ends(lengths, budget, ranks, prefixes)
    runs: list[SampleRange] = []
    while (start := runs[-1].end if runs else 0) < len(lengths):
        runs.append(SampleRange(start, int(ends[start])))
    return runs


def _farthest_ends(lengths: Lengths, budget: int, ranks: int, prefixes: Prefixes | None = None) -> Lengths:
    """For each start, the largest end of a run: each rank's share of neighbours fits the budget, or is one sample.

    A share with shared prefixes ends where the next sample has another prompt, if one of its samples does.
    """
    count = len(lengths)
    shared = np.zeros_like(lengths) if prefixes is None else prefixes.shared
    sums = np.concatenate([[0], np.cumsum(lengths - shared)])
    # The first sample of a share has all of its tokens.
    starts = np.arange(count)
    fitting = np.maximum(starts, np.searchsorted(sums, sums[:-1] - shared + budget, side="right") - 1)
    if prefixes is not None:
        whole = prefixes.borders[np.searchsorted(prefixes.borders, fitting, side="right") - 1]
        fitting = np.where(whole > starts, whole, fitting)
    after_share = np.append(np.maximum(fitting, starts + 1), count)
    ends = starts
    for _ in range(ranks):
        ends = after_share[ends]
    return ends


def _most_rows(lengths: Lengths, budget: int, ranks: int) -> Lengths:
    """For each start, the most rows of a rank's share: rows times the first length fit the budget.

    At least one row, and at most as many as the remaining samples allow.
    """
    fitting = np.maximum(1, budget // np.maximum(1, lengths))
    left = np.arange(len(lengths), 0, -1)
    most: Lengths = np.minimum(fitting, -(-left // ranks))
    return most
