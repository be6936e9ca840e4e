"""The metrics of one optimizer step, under TRL's and prime-rl's names, and the file to which they are appended.

Knows no torch and no bus.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamrl.consumers.algorithms.advantages import Credit
from streamrl.consumers.batching.micro_batches import Group, MicroBatch
from streamrl.consumers.ingest.filters import staleness
from streamrl.schemas.identifiers import SERVED_ARM, PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Trajectory

GAP_S = 1e-3
"""Spans of one phase that are less than this many seconds apart are joined, so that a display shows one bar for all
micro-batches of a step."""


class PhaseSpan(NamedTuple):
    """A phase of a step from ``start`` to ``end``, in seconds on the trainer's clock (since the epoch)."""

    name: str
    start: float
    end: float


@dataclass
class StepTimer:
    """Where the time of one step goes: seconds by phase, and when each phase started and ended.

    ``clock`` gives the time of day; durations are measured with ``monotonic``, which is never set back.
    """

    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.perf_counter
    started_at: float = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[PhaseSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started_at = self.monotonic()

    def restart(self) -> None:
        """Forget all measurements, and start now."""
        self.started_at, self.seconds, self.spans = self.monotonic(), {}, []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's duration. Blocks must not be nested."""
        # Durations from one clock, moments from the other: setting the clock must not make a phase negative.
        start, at = self.monotonic(), self.clock()
        try:
            yield
        finally:
            taken = self.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
            self._add(PhaseSpan(name, at, at + taken))  # not the clock again: it may have been set in the meantime

    def _add(self, span: PhaseSpan) -> None:
        last = self.spans[-1] if self.spans else None
        if last is not None and last.name == span.name and span.start - last.end < GAP_S:
            self.spans[-1] = last._replace(end=span.end)
        else:
            self.spans.append(span)

    def since_start(self) -> float:
        """Seconds since this timer was made or restarted."""
        return self.monotonic() - self.started_at


@dataclass
class StepMetrics:
    """Collects rewards, staleness and completions of one step's groups."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    def observe(self, group: Group, credit: Credit, version: PolicyVersion) -> None:
        """Record a group that enters the gradient of the step after ``version``."""
        for sample in group.samples:
            self.trajectories.append(sample.trajectory)
            self.staleness.append(float(staleness(sample.trajectory, version)))
        self.rewards += credit.rewards.tolist()
        self.deviations.append(credit.deviation)

    def summary(self) -> dict[str, float]:
        """Rewards, completions and staleness; empty if nothing was observed."""
        if not self.trajectories:
            return {}
        return {
            "reward": float(np.mean(self.rewards)),
            "reward_std": float(np.mean(self.deviations)),  # mean of the groups' deviations, not that of all rewards
            # ``deviation`` is exactly 0 for equal rewards, so ``==`` is safe.
            "frac_reward_zero_std": float(np.mean([value == 0.0 for value in self.deviations])),
            "off_policy/mean": float(np.mean(self.staleness)),
            "off_policy/max": max(self.staleness),
            **{f"off_policy/p{part}": float(np.percentile(self.staleness, part)) for part in (50, 90, 99)},
            **_by_reward_function(self.trajectories),
            **_by_arm(self.trajectories, self.rewards),
            **_completions(self.trajectories),
        }


@dataclass
class PaddingMetrics:
    """Counts positions and tokens in micro-batches, by each row's length bucket."""

    positions: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    micro_batches: int = 0

    def observe(self, batch: MicroBatch, shards: int) -> None:
        """Record a micro-batch; a row's partition gives its bucket."""
        self.micro_batches += 1
        width = batch.input_ids.shape[1] if batch.packing == "padded" else 0  # input_ids: [B, S]
        # partition = bucket x shards + shard. A micro-batch may mix buckets, so each row is counted in its own.
        for ref, length in zip(batch.refs, batch.lengths.tolist(), strict=True):
            self.positions[ref.partition // shards] += width or length
            self.tokens[ref.partition // shards] += length

    def summary(self) -> dict[str, float]:
        """Shares of padding, and the number of micro-batches; empty if there was none."""
        if not self.micro_batches:
            return {}
        by_bucket = {
            f"padding/bucket_{bucket}": 1 - self.tokens[bucket] / count
            for bucket, count in sorted(self.positions.items())
        }
        everything = 1 - sum(self.tokens.values()) / sum(self.positions.values())
        return {"batching/micro_batches": float(self.micro_batches), "padding/all": everything, **by_bucket}


def _by_reward_function(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, reward in trajectory.rewards.items():
            if reward is not None:  # None: not applicable, or failed; neither is a reward of 0
                values[name].append(reward)
    means = {f"rewards/{name}/mean": float(np.mean(found)) for name, found in values.items()}
    return means | {f"rewards/{name}/std": float(np.std(found)) for name, found in values.items()}


def _by_arm(trajectories: Iterable[Trajectory], rewards: Iterable[float]) -> dict[str, float]:
    """Mean reward and number of trajectories of each arm of a split; empty if the served policy sampled all."""
    found: dict[str, list[float]] = defaultdict(list)
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        found[trajectory.policy or SERVED_ARM].append(reward)
    if found.keys() <= {SERVED_ARM}:
        return {}
    means = {f"arms/{arm}/reward": float(np.mean(values)) for arm, values in found.items()}
    return means | {f"arms/{arm}/trajectories": float(len(values)) for arm, values in found.items()}


def _completions(trajectories: list[Trajectory]) -> dict[str, float]:
    lengths = np.array([len(trajectory.token_ids) for trajectory in trajectories])
    clipped = np.array([trajectory.finish_reason is FinishReason.LENGTH for trajectory in trajectories])
    finished = lengths[~clipped]
    found = {
        "completions/num_tokens": float(lengths.sum()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(clipped.mean()),
    }
    if finished.size:  # the mean of an empty array is NaN
        found["completions/mean_terminated_length"] = float(finished.mean())
    return found


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics without NaN and infinity, which a step report refuses."""
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


def append_metrics(
    path: Path, step: int, now: float, metrics: Mapping[str, float], spans: Iterable[PhaseSpan] = ()
) -> None:
    """Append one line of JSON: ``step``, ``time`` (s since the epoch), the metrics, ``spans`` as [name, start, end]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [[span.name, round(span.start, 4), round(span.end, 4)] for span in spans]
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "time": now, **finite(metrics), "spans": rows}) + "\n")
