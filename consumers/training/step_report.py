"""What an optimizer step has gathered, and the messages in which the trainer reports it. Sends nothing."""

from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.consumers.algorithms.advantages import Credit
from streamrl.consumers.algorithms.estimators import deviation
from streamrl.consumers.batching.micro_batches import Group, MicroBatch, Sample
from streamrl.consumers.ingest.opening import Translation
from streamrl.consumers.training.checkpoints.manifest import SkipSummary
from streamrl.consumers.training.metrics import PaddingMetrics, StepMetrics, StepTimer, finite
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import MAX_ADVANTAGES, CarriedOver, RecordRef, RefusedStep, StepReport


@dataclass
class GatheredStep:
    """A step's groups and micro-batches so far; ``served``: the last version announced to workers, to count ages."""

    served: PolicyVersion
    timer: StepTimer = field(default_factory=StepTimer)
    groups: list[Group] = field(init=False, default_factory=list)
    credits: list[Credit] = field(init=False, default_factory=list)  # one for each group
    # Groups that do not fit into memory: none of their rows may enter the gradient.
    excluded: set[str] = field(init=False, default_factory=set)
    left_out: list[tuple[Group, str]] = field(init=False, default_factory=list)
    # In the order of computing: floating-point sums depend on it, and a replay compares bit by bit.
    batches: list[MicroBatch] = field(init=False, default_factory=list)
    metrics: StepMetrics = field(init=False, default_factory=StepMetrics)
    padding: PaddingMetrics = field(init=False, default_factory=PaddingMetrics)

    def add_group(self, group: Group, credit: Credit) -> None:
        """Add a group; its samples that stay out of the gradient are listed by the reason."""
        self.groups.append(group)
        self.credits.append(credit)
        self.metrics.observe(group, credit, self.served)
        # One part of the group for each detail, because ``mark_skipped`` writes one detail for all its samples.
        by_detail: dict[str, list[Sample]] = {}
        for sample, detail in credit.left_out:
            by_detail.setdefault(detail, []).append(sample)
        self.left_out += [(replace(group, samples=tuple(found)), detail) for detail, found in by_detail.items()]

    def add_trained(self, batch: MicroBatch, shards: int) -> None:
        """Add a micro-batch that entered the gradient; ``shards``: partitions of a length bucket."""
        self.batches.append(batch)
        self.padding.observe(batch, shards)

    def exclude(self, group_id: str) -> Group:
        """Remove a group, as if it had never been added, except from the gradient; returns the group."""
        self.excluded.add(group_id)
        taken = list(zip(self.groups, self.credits, strict=True))
        self.groups, self.credits, self.left_out = [], [], []
        self.metrics = StepMetrics()
        for group, credit in taken:
            if group.group_id != group_id:
                self.add_group(group, credit)
        return next(group for group, _ in taken if group.group_id == group_id)

    def restart_gradient(self) -> list[MicroBatch]:
        """Start a new gradient; returns the micro-batches of the old one, in their order."""
        batches, self.batches, self.padding = self.batches, [], PaddingMetrics()
        return batches

    @property
    def micro_batches(self) -> tuple[tuple[RecordRef, ...], ...]:
        """The records of each micro-batch, in the order of computing."""
        return tuple(batch.refs for batch in self.batches)

    @property
    def advantages(self) -> tuple[float, ...]:
        """The advantages of these records, in the same order; empty if a report has no room for them."""
        found = tuple(value for batch in self.batches for value in batch.advantages.tolist())
        return found if len(found) <= MAX_ADVANTAGES else ()

    @property
    def tokens(self) -> int:
        """Prompts and completions that entered the gradient, without padding."""
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def computing_s(self) -> float:
        """Seconds of forward and backward passes so far."""
        return self.timer.seconds.get("forward_backward", 0.0)

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Ids of the groups, in the order of arrival."""
        return tuple(group.group_id for group in self.groups)

    @property
    def left_out_refs(self) -> tuple[RecordRef, ...]:
        """The records of samples that stay out of the gradient."""
        return tuple(sample.ref for part, _ in self.left_out for sample in part.samples)

    @property
    def reward_deviation(self) -> float:
        """Standard deviation of the shaped rewards of all samples, left out or not."""
        return deviation(np.concatenate([credit.rewards for credit in self.credits]))

    def timings(self) -> dict[str, float]:
        """Seconds of the step by phase so far, the share that was training, and tokens per second."""
        seconds = self.timer.seconds
        step = max(self.timer.since_start(), 1e-9)
        training = self.computing_s + seconds.get("optimizer", 0.0)
        return {f"time/{name}": value for name, value in seconds.items()} | {
            "time/step": step,
            "time/train_share": training / step,
            "training_tok/s": self.tokens / step,
        }


MAX_CARRIED_RECORDS = 10_000
"""Most references in a message: with usual names some hundred kilobytes, far below the codec's limits."""
PROBLEM_LIMIT = 4096
"""Most characters of a problem in a report."""


@dataclass(frozen=True)
class PublishedWeights:
    """The names of the weights in memory.

    ``manifest_sha256`` None: they were not exported. ``policy``: the policy's name; None for the policy that the run
    started with. ``served_as``: the version under which they are exported, if it is not ``version``.
    """

    version: PolicyVersion
    manifest_sha256: str | None
    digests: dict[str, str]
    is_last: bool
    policy: str | None = None
    served_as: PolicyVersion | None = None


@dataclass(frozen=True)
class Ancestry:
    """The checkpoint that a lineage continued from: its version, and how many skip rows of its lineage it includes.

    ``undoes``: the newest lineage whose later steps an operator undid by choosing that checkpoint; 0: none.
    ``carried_parts``: number of messages before the first report that list records finished on another cluster.
    """

    parent: PolicyVersion | None
    parent_skips: int
    undoes: int = 0
    carried_parts: int = 0


def first_report(
    algorithm: str, weights: PublishedWeights, ancestry: Ancestry, prompt_cursor: int, run_id: str, now: float
) -> StepReport:
    """The report that starts a lineage: its run, and the checkpoint that it continues from."""
    return StepReport(
        algorithm=algorithm,
        step=weights.version.number,
        version=weights.version,
        manifest_sha256=weights.manifest_sha256,
        group_ids=(),  # no groups: this tells readers that the report is not of a step
        micro_batches=(),
        metrics={},
        digests=weights.digests,
        parent=ancestry.parent,
        parent_skips=ancestry.parent_skips,
        undoes=ancestry.undoes,
        carried_parts=ancestry.carried_parts,
        prompt_cursor=prompt_cursor,
        finished=weights.is_last,
        run_id=run_id,
        policy=weights.policy,
        served_as=weights.served_as,
        sent_at=now,
    )


def carried_over(
    algorithm: str, lineage: int, found: Translation, skips: SkipSummary, now: float, policy: str | None = None
) -> list[CarriedOver]:
    """The records finished on another cluster, in one or more messages.

    ``skips``: of the checkpoint that the lineage continues from.
    """
    starts = range(0, max(1, len(found.carried)), MAX_CARRIED_RECORDS)
    return [
        CarriedOver(
            algorithm=algorithm,
            lineage=lineage,
            part=part,
            records=tuple(found.carried[start : start + MAX_CARRIED_RECORDS]),
            absent=found.absent,
            skips_hash=skips.hash,
            skips_by_reason=skips.by_reason,
            policy=policy,
            sent_at=now,
        )
        for part, start in enumerate(starts)
    ]


def step_report(
    algorithm: str,
    weights: PublishedWeights,
    gathered: GatheredStep,
    metrics: dict[str, float],
    prompt_cursor: int,
    now: float,
) -> StepReport:
    """The report of the step just taken: the records that it used, and the resulting weights."""
    return StepReport(
        algorithm=algorithm,
        step=weights.version.number,
        version=weights.version,
        manifest_sha256=weights.manifest_sha256,
        group_ids=gathered.group_ids,
        micro_batches=gathered.micro_batches,
        left_out=gathered.left_out_refs,
        advantages=gathered.advantages,
        metrics=metrics,
        digests=weights.digests,
        prompt_cursor=prompt_cursor,
        finished=weights.is_last,
        policy=weights.policy,
        served_as=weights.served_as,
        sent_at=now,
    )


def refused_step(
    algorithm: str,
    version: PolicyVersion,
    gathered: GatheredStep,
    problem: str,
    metrics: dict[str, float],
    now: float,
    policy: str | None = None,
) -> RefusedStep:
    """The report of a gradient that was not applied to the weights of ``version``."""
    return RefusedStep(
        algorithm=algorithm,
        step=version.number + 1,  # the step that was tried; the next attempt has the same number
        version=version,
        problem=problem[:PROBLEM_LIMIT],
        group_ids=gathered.group_ids,
        micro_batches=gathered.micro_batches,
        left_out=gathered.left_out_refs,
        metrics=finite(metrics),  # the problem may be a loss of NaN, which a report refuses
        policy=policy,
        sent_at=now,
    )
