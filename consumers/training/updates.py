"""Held micro-batches of a step that needs its whole batch, their mini-batches, and the log of the step's updates.

A step needs its whole batch if it makes several updates, or if sequences share credit. Mini-batches are made of whole
groups, in an order that depends on step, pass and group names. Computes no gradient.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from streamrl.consumers.algorithms.losses import BatchTotals, TokenBatch
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.token_credit import PairTerms, StepTensors, explained_variance
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.schemas.identifiers import group_id_of

NAMED = {
    "kl": "kl",
    "reverse_kl": "distillation/reverse_kl",
    "is_masked": "sampling/masked_ratio",
}
"""Names under which token metrics of only some algorithms are reported."""
MAX_SPANS = 4
"""Completions with more version spans than this are counted with this many."""
_BY_SPANS = "mismatch_kl/spans_"


@dataclass
class UpdateSums:
    """Sums of one update besides its gradient. ``computed``: tokens whose gradient was computed."""

    loss: Tensor
    value_loss: Tensor
    computed: int = 0
    metrics: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class HeldBatch:
    """A micro-batch that waits for the rest of the step; ``start``: its tensors at the step's start, on the CPU.

    ``advantages`` and ``returns``, float32 [B, S], are set when the credit of the whole batch is computed.
    """

    batch: MicroBatch
    mask: Tensor
    start: StepTensors
    advantages: Tensor
    returns: Tensor | None = None

    @property
    def groups(self) -> list[str]:
        """The group id of each row."""
        return [group_id_of(ref.trajectory_id) for ref in self.batch.refs]


@dataclass(frozen=True)
class HeldRows:
    """Rows (bool [B]) of a held micro-batch."""

    held: HeldBatch
    rows: Tensor

    def halves(self) -> tuple["HeldRows", "HeldRows"]:
        """The first and the second half of the rows, which must be at least two."""
        first = self.rows & (self.rows.cumsum(0) <= int(self.rows.sum()) // 2)
        return HeldRows(self.held, first), HeldRows(self.held, self.rows & ~first)


@dataclass(frozen=True)
class RowLoss:
    """One sequence's share of a step, un-normalised: sums over its trained tokens."""

    tokens: int
    loss: float
    ratio: float
    ratio_max: float


def mini_batches(held: Sequence[HeldBatch], settings: AlgorithmSettings, step: int) -> Iterator[list[HeldRows]]:
    """For each update, in order, its rows that have trained tokens."""
    names = list(dict.fromkeys(name for each in held for name in each.groups))
    for iteration in range(settings.num_iterations):
        for wanted in _split(names, settings.num_mini_batches, f"{step}/{iteration}"):
            parts = [
                HeldRows(each, torch.tensor([name in wanted for name in each.groups]) & (each.mask.sum(dim=1) > 0))
                for each in held
            ]
            if kept := [part for part in parts if part.rows.any()]:
                yield kept


def _split(names: list[str], count: int, salt: str) -> list[set[str]]:
    """Group ids by mini-batch."""
    if count == 1:
        return [set(names)]
    # Not in the order of arrival: micro-batches are cut by length, and an update of short completions only would be
    # biased. By a checksum of the name: a replay must get the same order without a generator's state.
    mixed = sorted(names, key=lambda name: (zlib.crc32(f"{salt}/{name}".encode()), name))
    return [set(chunk.tolist()) for chunk in np.array_split(np.array(mixed, dtype=object), count)]


def critic_metrics(held: Sequence[HeldBatch]) -> dict[str, float]:
    """Metrics of the critic at the step's start, over trained tokens; empty without a critic."""
    found = [
        (each.start.values[each.mask > 0], each.returns[each.mask > 0])
        for each in held
        if each.start.values is not None and each.returns is not None
    ]
    if not found:
        return {}
    values, returns = (torch.cat(tensors).double() for tensors in zip(*found, strict=True))
    return {
        "critic/value/mean": float(values.mean()),
        "critic/return/mean": float(returns.mean()),
        "critic/explained_variance": explained_variance(values, returns),
    }


def totals_of(parts: Sequence[HeldRows]) -> BatchTotals:
    """Sequences and trained tokens of an update."""
    counts = [part.held.mask[part.rows].sum(dim=1) for part in parts]
    return BatchTotals(sum(len(each) for each in counts), sum(int(each.sum()) for each in counts))


def mismatch_by_spans(tokens: TokenBatch, spans: Sequence[int]) -> dict[str, Tensor]:
    """Sums of the mismatch KL, k3 of KL(mu || pi), and of trained tokens, by the number of version spans of the A rows.

    A completion that continues under new weights with the old weights' cache is sampled by neither policy alone. Its
    distance from what the trainer computes serves to compare ways of adopting weights.
    """
    log_ratio, trained = tokens.log_ratio.detach(), tokens.trained
    kl = torch.where(trained, torch.exp(log_ratio) - log_ratio - 1, 0.0)
    sums: dict[str, Tensor] = {}
    for count in {min(each, MAX_SPANS) for each in spans}:
        rows = [row for row, each in enumerate(spans) if min(each, MAX_SPANS) == count]
        sums[f"{_BY_SPANS}{count}"] = kl[rows].sum()
        sums[f"{_BY_SPANS}{count}/tokens"] = trained[rows].sum()
    return sums


class UpdateOutcome(NamedTuple):
    """One update's loss and gradient norm.

    ``critic``: loss and norm of the critic, if there is one. ``problem``: why it was not applied; empty: it was.
    """

    loss: float
    norm: float
    critic: tuple[float, float] | None
    problem: str


@dataclass
class UpdateLog:
    """The updates of one step. ``totals``: its trained sequences and tokens; ``metrics``: the critic's at its start."""

    totals: BatchTotals
    metrics: dict[str, float] = field(default_factory=dict)
    updates: list[UpdateOutcome] = field(init=False, default_factory=list)
    pairs: list[dict[str, PairTerms]] = field(init=False, default_factory=list)
    sums: dict[str, list[Tensor]] = field(init=False, default_factory=lambda: defaultdict(list))
    computed: int = field(init=False, default=0)

    def note(self, update: UpdateOutcome, sums: UpdateSums) -> None:
        """Record an update, whether it was applied or had a problem."""
        self.updates.append(update)
        self.computed += sums.computed
        for name, values in sums.metrics.items():
            self.sums[name] += values

    @property
    def applied(self) -> int:
        """Number of updates that were applied."""
        return sum(not update.problem for update in self.updates)

    @property
    def problem(self) -> str:
        """The problem of the first update that was not applied; empty: all were applied."""
        return next((update.problem for update in self.updates if update.problem), "")

    def pair_metrics(self, beta: float) -> dict[str, float]:
        """Metrics over the pairs of all updates; empty without pairs."""
        pairs = [pair for update in self.pairs for pair in update.values()]
        if not pairs:
            return {}
        return {
            "preference/pairs": float(len(pairs)),
            "preference/accuracy": fmean(float(pair.margin > 0) for pair in pairs),
            "preference/margin": fmean(beta * pair.margin for pair in pairs),
        }

    def token_means(self) -> dict[str, float]:
        """Means over the tokens that entered the gradient."""
        mean = {
            name: float(torch.stack(values).sum()) / self.computed
            for name, values in self.sums.items()
            if not name.endswith(("_min", "_max")) and not name.startswith(_BY_SPANS)
        }
        named = {
            "ratio": mean["ratio"],
            "entropy": mean["entropy"],
            "mismatch_kl/all/mean": mean["mismatch_kl"],
            "clip_ratio/low_mean": mean["clip_low"],
            "clip_ratio/high_mean": mean["clip_high"],
            "clip_ratio/region_mean": mean["clip_low"] + mean["clip_high"],
            "sampling/importance_sampling_ratio/min": float(torch.stack(self.sums["ratio_min"]).min()),
            "sampling/importance_sampling_ratio/max": float(torch.stack(self.sums["ratio_max"]).max()),
        }
        return named | {shown: mean[name] for name, shown in NAMED.items() if name in mean} | self._by_spans()

    def _by_spans(self) -> dict[str, float]:
        totals = {name: float(torch.stack(v).sum()) for name, v in self.sums.items() if name.startswith(_BY_SPANS)}
        return {name: kl / totals[f"{name}/tokens"] for name, kl in totals.items() if totals.get(f"{name}/tokens")}
