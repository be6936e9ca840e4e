"""One life of the trainer: what it restored, its lineage, and the acts that touch both the policy and the stream.

Invariants:
- the_checkpoint_is_the_truth: frontier and weights are taken at the same moment, after the rows they rest on landed;
- no_step_without_a_report: a checkpoint of step n is written only after the report of step n is on the bus.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batcher import MicroBatcher
from consumers.intake.frontier import Frontier
from consumers.intake.reader import Intake, IntakeStart
from consumers.training.accounting.gathering import GatheredStep
from consumers.training.accounting.reporting import StepReporter
from consumers.training.compute import ComputeThread
from consumers.training.persistence.checkpoint import CheckpointManifest, Restored
from consumers.training.persistence.lineage import Lineage
from consumers.training.policy import TrainedPolicy
from consumers.training.settings import TrainingSettings
from schemas.errors import CheckpointError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import StepReport

log = structlog.get_logger()


@dataclass
class Incarnation:
    """``version`` is that of the weights in memory, and changes on the event loop only."""

    run_name: str
    algorithm: AlgorithmSettings
    training: TrainingSettings
    config_hash: str
    lineage: Lineage
    compute: ComputeThread
    policy: TrainedPolicy
    batcher: MicroBatcher
    reporter: StepReporter
    clock: Callable[[], float]
    version: PolicyVersion
    checkpointed_step: int
    tokens_seen: int = 0
    earlier_skips: dict[str, int] = field(default_factory=dict)

    def advance(self) -> None:
        """Name the weights after the step just taken."""
        self.version = PolicyVersion(self.lineage.number, self.policy.step)

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken."""
        return self.policy.step >= self.training.max_steps

    async def export(self) -> str | None:
        """Put the weights into the store if they are due; the sha256 of their manifest."""
        if self.policy.step % self.training.weight_sync_steps and not self.is_finished:
            return None
        return await self.compute(self.policy.export, self.version, self.clock())

    async def report(
        self, manifest_sha256: str | None, gathered: GatheredStep | None, metrics: dict[str, float]
    ) -> None:
        """Tell the steps topic what the weights in memory consist of; without ``gathered``: only that they exist."""
        self.lineage.check()
        await self.reporter.publish(
            StepReport(
                algorithm=self.algorithm.name,
                step=self.policy.step,
                version=self.version,
                manifest_sha256=manifest_sha256,
                group_ids=gathered.group_ids if gathered else (),
                micro_batches=tuple(gathered.micro_batches) if gathered else (),
                metrics=metrics,
                finished=self.is_finished,
                sent_at=self.clock(),
            )
        )

    async def checkpoint(self, intake: Intake) -> None:
        """Write a checkpoint of this moment, unless this step has one already."""
        if self.policy.step == self.checkpointed_step:
            return
        await intake.settled()
        self.lineage.check()
        skips = dict(self.earlier_skips)
        for reason, count in intake.counts_by_reason.items():
            skips[reason] = skips.get(reason, 0) + count
        manifest = CheckpointManifest(
            run=self.run_name,
            algorithm=self.algorithm.name,
            lineage=self.lineage.number,
            step=self.policy.step,
            policy_version=self.version,
            frontier=intake.frontier().to_json(),
            skip_counts=skips,
            tokens_seen=self.tokens_seen,
            config_hash=self.config_hash,
            created_at=self.clock(),
        )
        seen: dict[str, Any] = {name: list(place) for name, place in intake.dedupe_ids().items()}
        directory = await self.compute(self.policy.checkpoint, manifest, {"dedupe": seen})
        self.checkpointed_step = self.policy.step
        log.info("checkpoint written", step=self.policy.step, directory=str(directory))


def intake_start(restored: Restored) -> IntakeStart:
    """Where the intake goes on."""
    seen: Any = restored.state.intake.get("dedupe", {})
    return IntakeStart(
        frontier=Frontier.from_json(restored.state.manifest.frontier),
        dedupe={name: (int(place[0]), int(place[1])) for name, place in seen.items()},
    )


def check_continues(restored: Restored, run_name: str, algorithm: str, config_hash: str) -> None:
    """Make sure that a checkpoint is of this run and algorithm; other settings are only worth a warning.

    Raises:
        CheckpointError: it is of another run or algorithm.
    """
    manifest = restored.state.manifest
    if (manifest.run, manifest.algorithm) != (run_name, algorithm):
        raise CheckpointError(
            f"expected a checkpoint of run {run_name!r} and algorithm {algorithm!r} at {restored.directory}, "
            f"got {manifest.run!r} and {manifest.algorithm!r}; use another run directory"
        )
    if manifest.config_hash != config_hash:
        log.warning("resuming under other settings than the checkpoint's", step=manifest.step)
