"""One life of the trainer: how it begins, its lineage, and the acts that touch both the policy and the stream.

Invariants:
- the_checkpoint_is_the_truth: stream position and weights are taken at the same moment; the rows they rest on, and
  the reports before, are on the topics before the manifest is;
- a_checkpoint_is_announced_after_it_is_written: its report is in it, so that a restart can announce it again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from bus.port import Bus, Outgoing
from consumers.batching.micro_batches import MicroBatcher
from consumers.batching.settings import BatchingSettings
from consumers.ingest.reader import Intake, IntakeStart
from consumers.training.announcer import Announcements, open_announcer
from consumers.training.checkpoints.manifest import CheckpointManifest
from consumers.training.ports import Checkpoints, Compute, Lineage, OpenPolicy, Policy, Restored
from consumers.training.resume import (
    Point,
    Reached,
    check_continues,
    config_marks,
    intake_document,
    intake_start,
    stream_fields,
)
from consumers.training.settings import TrainingSettings
from consumers.training.step_report import Ancestry, Weights, first_report
from schemas.codec import encode, headers_of
from schemas.errors import CheckpointError
from schemas.identifiers import PolicyVersion
from schemas.reports import RefusedStep, StepReport
from schemas.settings import Section
from schemas.topics import STEPS

log = structlog.get_logger()

OFFSETS_INTERVAL_S = 1.0
"""Offsets are for lag displays only, and make two more requests of a transaction."""


@dataclass
class Incarnation:
    """``version`` is that of the weights in memory, and changes on the event loop only.

    The durable frontier is the newest manifest's, where a restart goes on; the live one is ``Intake.frontier``.
    ``report``: of the last step taken; ``refused_in_a_row``: gradients since then that were not applied.
    """

    run_name: str
    algorithm: str
    training: TrainingSettings
    config_marks: str
    lineage: Lineage
    ancestry: Ancestry
    compute: Compute
    policy: Policy
    batcher: MicroBatcher
    announcements: Announcements
    clock: Callable[[], float]
    reached: Reached
    version: PolicyVersion
    checkpointed_step: int
    tokens_seen: int = 0
    report: StepReport | None = None
    refused_in_a_row: int = 0
    offsets_told_at: float = 0.0

    def advance(self, tokens: int) -> None:
        """Name the weights after the step just taken, with the tokens it was computed of."""
        self.version = PolicyVersion(self.lineage.number, self.policy.step)
        self.tokens_seen += tokens
        self.refused_in_a_row = 0

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken."""
        return self.policy.step >= self.training.max_steps

    async def export(self) -> str | None:
        """Put the weights into the store if they are due; the sha256 of their manifest.

        Raises:
            Superseded: a newer lineage exists; its trainer removes what it finds half written.
        """
        if self.policy.step % self.training.weight_sync_steps and not self.is_finished:
            return None
        return await self._exported()

    async def _exported(self) -> str:
        try:
            return await self.compute(self.policy.export, self.version, self.clock())
        except Exception:
            await self.check_lineage()
            raise

    async def weights(self, manifest_sha256: str | None) -> Weights:
        """What the weights in memory are known by; checksums only if they are wanted."""
        digests = await self.compute(self.policy.digests) if self.training.tensor_digests else {}
        return Weights(self.version, manifest_sha256, digests, self.is_finished)

    async def begin(self, restored: Restored | None, start: IntakeStart) -> None:
        """Announce the checkpoint's report again, and that this lineage goes on from there."""
        sha256 = await self._exported()
        self.reached(Point.START_EXPORTED)
        topic, weights = STEPS.full_name(self.run_name), await self.weights(sha256)
        own = first_report(self.algorithm, weights, self.ancestry, start.prompt_cursor, self.clock())
        records = [Outgoing.of(topic, own, key=self.algorithm)]
        if restored is not None and restored.state.report:
            again = Outgoing(topic, restored.state.report, self.algorithm, headers=headers_of(StepReport))
            records.insert(0, again)
        await self.announcements.post(records, {})
        await self.announcements.settled()
        self.reached(Point.START_ANNOUNCED)

    async def check_lineage(self) -> None:
        """Make sure that nobody has taken over; what cannot be asked now is asked before anything is kept.

        Raises:
            Superseded: a newer lineage exists.
        """
        try:
            await self.compute(self.lineage.check)
        except CheckpointError as error:
            log.warning("lineage claims not readable", error=str(error))

    async def announce(self, message: StepReport | RefusedStep, intake: Intake) -> None:
        """Tell the steps topic, after what was told before; goes on while the trainer does."""
        record = Outgoing.of(STEPS.full_name(self.run_name), message, key=self.algorithm)
        self.reached(Point.ANNOUNCING)
        await self.announcements.post([record], intake.offsets() if self._tells_offsets() else {})

    def _tells_offsets(self) -> bool:
        now = self.clock()
        if 0 <= now - self.offsets_told_at < OFFSETS_INTERVAL_S and not self.is_finished:
            return False
        self.offsets_told_at = now
        return True

    async def checkpoint(self, intake: Intake) -> None:
        """Write a checkpoint of this moment, unless this step has one already.

        Raises:
            CheckpointError: it could not be written; older ones are as they were.
            Superseded: a newer trainer has taken over.
            BusError: the broker does not take what the checkpoint rests on.
        """
        if self.policy.step == self.checkpointed_step or self.report is None:
            return
        snapshot = intake.snapshot()
        self.reached(Point.SNAPSHOT_TAKEN)
        await self.announcements.settled()
        await intake.settled()
        self.reached(Point.ROWS_SETTLED)
        manifest = CheckpointManifest(
            run=self.run_name,
            algorithm=self.algorithm,
            lineage=self.lineage.number,
            parent=self.ancestry.parent,
            step=self.policy.step,
            policy_version=self.version,
            tokens_seen=self.tokens_seen,
            config_hash=self.config_marks,
            created_at=self.clock(),
            **stream_fields(snapshot),
        )
        document = intake_document(snapshot)
        place = await self.compute(self.policy.checkpoint, manifest, document, encode(self.report), self.lineage)
        self.checkpointed_step = self.policy.step
        self.reached(Point.CHECKPOINT_WRITTEN)
        log.info("checkpoint written", step=self.policy.step, place=place)

    async def checkpoint_if_due(self, intake: Intake) -> bool:
        """Write a checkpoint when the step just taken is to be kept; false if that failed and may fail.

        Raises:
            CheckpointError: it could not be written, and ``training.on_checkpoint_failure`` is ``stop``, or the run
                would end without it.
            Superseded: a newer trainer has taken over.
        """
        if self.policy.step % self.training.checkpoint_every and not self.is_finished:
            return True
        try:
            await self.checkpoint(intake)
        except CheckpointError as error:
            if self.training.on_checkpoint_failure == "stop" or self.is_finished:
                raise
            log.error("checkpoint failed, going on without it", step=self.policy.step, error=str(error))
            return False
        return True


@dataclass
class Beginning:
    """Opens what a life needs, in the order in which older trainers are kept out. ``sections``: to notice changes."""

    bus: Bus
    run_name: str
    algorithm: str
    training: TrainingSettings
    batching: BatchingSettings
    whole_batches: bool
    sections: dict[str, Section]
    checkpoints: Checkpoints
    open_policy: OpenPolicy
    clock: Callable[[], float]
    reached: Reached
    announcements: Announcements | None = None

    async def begin(self, compute: Compute) -> tuple[Incarnation, IntakeStart]:
        """Fence older trainers, take the next lineage, restore, and announce; where the intake goes on."""
        announcer = await open_announcer(self.bus, self.training.announce, self.run_name, self.algorithm)
        announcements = self.announcements = Announcements(announcer, lambda: self.reached(Point.ANNOUNCED))
        self.reached(Point.FENCED)
        lineage = await compute(self._claim)
        announcer.guard_with(lambda: compute(lineage.check))
        self.reached(Point.LINEAGE_CLAIMED)
        restored = await compute(self.checkpoints.newest)
        manifest = restored.state.manifest if restored else None
        marks = config_marks({**self.sections, "training": self.training, "batching": self.batching})
        if manifest is not None:
            check_continues(manifest, self.run_name, self.algorithm, marks)
        self.reached(Point.RESTORED)
        policy = await compute(self.open_policy, restored)
        self.reached(Point.POLICY_OPENED)
        start = intake_start(manifest, restored.state.intake if restored else {}, lineage.number)
        life = Incarnation(
            run_name=self.run_name,
            algorithm=self.algorithm,
            training=self.training,
            config_marks=marks,
            lineage=lineage,
            ancestry=Ancestry(manifest.policy_version, manifest.skips.count) if manifest else Ancestry(None, 0),
            compute=compute,
            policy=policy,
            batcher=MicroBatcher(self.batching, self.whole_batches),
            announcements=announcements,
            clock=self.clock,
            reached=self.reached,
            version=PolicyVersion(lineage.number, policy.step),
            checkpointed_step=policy.step,
            tokens_seen=manifest.tokens_seen if manifest else 0,
        )
        await life.begin(restored, start)
        log.info("trainer ready", version=str(life.version), resumed=restored is not None)
        return life, start

    def _claim(self) -> Lineage:
        return self.checkpoints.claim_lineage(now=self.clock())

    async def close(self) -> None:
        """Release what was opened."""
        if self.announcements is not None:
            await self.announcements.close()
