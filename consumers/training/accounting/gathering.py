"""What one optimizer step has gathered so far: its groups, what entered the gradient, and where the time went. Pure."""

from dataclasses import dataclass, field, replace

import numpy as np

from consumers.algorithms.advantages import deviation
from consumers.algorithms.credit import Credit
from consumers.batching.samples import Group, MicroBatch, Sample
from consumers.training.accounting.metrics import PaddingMetrics, StepMetrics
from consumers.training.accounting.stopwatch import Stopwatch
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import RecordRef


@dataclass
class GatheredStep:
    """Grows group by group; ``version`` is of the weights that the gradient is computed with."""

    version: PolicyVersion
    watch: Stopwatch = field(default_factory=Stopwatch)
    groups: list[Group] = field(default_factory=list)
    left_out: list[tuple[Group, str]] = field(default_factory=list)
    micro_batches: list[tuple[RecordRef, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    padding: PaddingMetrics = field(default_factory=PaddingMetrics)

    def add(self, group: Group, credit: Credit) -> None:
        """A group is in; samples that stay out of the gradient are kept by what keeps them out."""
        self.groups.append(group)
        self.rewards += credit.rewards.tolist()
        self.metrics.observe(group, credit, self.version)
        by_detail: dict[str, list[Sample]] = {}
        for sample, detail in credit.left_out:
            by_detail.setdefault(detail, []).append(sample)
        self.left_out += [(replace(group, samples=tuple(found)), detail) for detail, found in by_detail.items()]

    def trained(self, batch: MicroBatch, shards: int) -> None:
        """A micro-batch entered the gradient; ``shards``: partitions of a length bucket."""
        self.micro_batches.append(tuple(batch.refs))
        self.tokens += batch.num_tokens
        self.padding.observe(batch, shards)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Names of the groups, in the order in which they came."""
        return tuple(group.group_id for group in self.groups)

    @property
    def left_out_refs(self) -> tuple[RecordRef, ...]:
        """The records of samples that stay out of the gradient."""
        return tuple(sample.ref for part, _ in self.left_out for sample in part.samples)

    @property
    def reward_deviation(self) -> float:
        """Standard deviation of all shaped rewards."""
        return deviation(np.array(self.rewards, dtype=np.float64))

    def timings(self) -> dict[str, float]:
        """Where the step's time went so far, in seconds, and the share of it that was training."""
        seconds = self.watch.seconds
        step = max(self.watch.since_start(), 1e-9)
        training = seconds.get("forward_backward", 0.0) + seconds.get("optimizer", 0.0)
        return {f"time/{name}": value for name, value in seconds.items()} | {
            "time/step": step,
            "step_time": step,
            "time/train_share": training / step,
            "training_tok/s": self.tokens / step,
            "perf/throughput": self.tokens / step,
        }
