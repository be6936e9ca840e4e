"""The part of a run that one trainer process holds: its lineage, its policy, and its reader of the stream.

The session is opened once. It does all work that needs both the policy and the stream. Invariants:
- a_checkpoint_captures_one_moment: stream position and weights are taken at the same moment. The rows that they depend
  on, and earlier reports, are on the topics before the manifest is written;
- a_checkpoint_is_announced_after_it_is_written: the checkpoint contains its report, so a restart can announce it again.
"""

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from streamrl.bus.port import Bus, Outgoing
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.batching.micro_batches import LOOKAHEAD, MicroBatcher
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.filters import IntakeRules
from streamrl.consumers.ingest.limits import LIMITS, IntakeLimits
from streamrl.consumers.ingest.opening import Translation
from streamrl.consumers.ingest.reader import ReadStream, TrajectoryReader
from streamrl.consumers.ingest.sampling import open_window
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.announcer import Announcements, open_announcer
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest, SkipSummary
from streamrl.consumers.training.failpoints import Failpoint, FailpointHook, no_failpoint
from streamrl.consumers.training.identity import IdentityKeeper, here
from streamrl.consumers.training.identity_store import IdentityStore, MemoryIdentity
from streamrl.consumers.training.ports import (
    Checkpoints,
    Compute,
    OpenCompute,
    OpenPolicy,
    OwnStream,
    Policy,
    RestoredCheckpoint,
    Standing,
    WeightSnapshot,
)
from streamrl.consumers.training.resume import (
    check_continues,
    config_marks,
    reader_document,
    reader_snapshot,
    stream_fields,
)
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.step_report import Ancestry, PublishedWeights, carried_over, first_report
from streamrl.schemas.codec import encode, headers_of
from streamrl.schemas.errors import BusError, CheckpointError, LateExport, SettingsError
from streamrl.schemas.identifiers import SERVED_POLICY, PolicyVersion, named_version, policy_in, scope_of
from streamrl.schemas.reports import RefusedStep, ResourceUsage, StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import STEPS
from streamrl.schemas.weights import newest_lineage

log = structlog.get_logger()

T = TypeVar("T")
MakeReport = Callable[[], Awaitable[StepReport]]

OFFSETS_INTERVAL_S = 1.0
"""Seconds between two commits of offsets: they are for lag displays only, and cost two requests in a transaction."""


@dataclass(frozen=True)
class LearningSettings:
    """The settings that shape learning: loop, algorithm, training, intake, batching, and the weights of rewards.

    Raises:
        SettingsError: two of the settings contradict each other, or name a function that does not exist.
    """

    loop: LoopSettings
    algorithm: AlgorithmSettings
    training: TrainingSettings
    ingest: IngestSettings
    batching: BatchingSettings
    reward_weights: Mapping[str, float]
    limits: IntakeLimits = LIMITS
    lookahead: float = LOOKAHEAD

    def __post_init__(self) -> None:
        algorithm_of(self.algorithm)  # raises if the user's own does not exist or refuses its options
        open_window(self.loop, self.ingest, lambda: 0)  # the same for a priority function
        bound = self.max_age
        if self.training.weight_sync_steps > bound + 1:
            raise SettingsError(
                "expected training.weight_sync_steps of at most the staleness bound (loop.mode, loop.max_staleness, "
                f"ingest.staleness_cap) + 1 = {bound + 1}, got {self.training.weight_sync_steps}: "
                "generation would wait for weights that are never exported; lower it"
            )
        if self.loop.num_generations == 1 and self.algorithm.dynamic_sampling:
            raise SettingsError(
                "expected loop.num_generations of at least 2 with algorithm.dynamic_sampling, got 1: a group of one "
                "sample has equal rewards, so every group would be skipped; raise num_generations, or switch "
                "dynamic_sampling off"
            )

    @property
    def max_age(self) -> int:
        """The largest age of a token, in optimizer steps, where the trainer's own weights sample the stream."""
        return self.ingest.max_age(self.loop)

    @property
    def marks(self) -> str:
        """Checksums of the settings that shape training, to notice a resume with other settings."""
        return config_marks(
            {
                "loop": self.loop,
                "algorithm": self.algorithm,
                "ingest": self.ingest,
                "training": self.training,
                "batching": self.batching,
            }
        )


@dataclass(frozen=True)
class TrainedRun:
    """The run, and the policy that its trainer trains.

    ``policy``: the trained policy's name. ``directory`` gets ``metrics.jsonl``. ``identity`` stores which run the
    directory belongs to. With ``adopt`` the trainer takes over a run that is on the topics but not in this directory.
    ``servers``: the broker as the user named it.
    """

    bus: Bus
    name: str
    policy: str = SERVED_POLICY
    servers: str | None = None
    directory: Path | None = None
    identity: IdentityStore = field(default_factory=MemoryIdentity)
    adopt: bool = False

    @property
    def scope(self) -> str:
        """Prefix of the trainer's own topics, groups and transactional ids."""
        return scope_of(self.name, self.policy)

    @property
    def named_policy(self) -> str | None:
        """The policy's name as the trainer's messages carry it; None for the policy that the run started with."""
        return policy_in(self.scope)


@dataclass(frozen=True)
class TrainerParts:
    """Where the policy comes from, where it is computed, and where its checkpoints and weights are kept.

    ``open_compute`` is for the policy, ``open_exporter`` for the export of its weights next to training; None: one more
    of the same kind. ``weights``: the store that its weights go to; its lineage numbers start above those in the store.
    None: not known.
    """

    open_policy: OpenPolicy
    open_compute: OpenCompute
    checkpoints: Checkpoints
    open_exporter: OpenCompute | None = None
    weights: Path | None = None


PartsOf = Callable[[bool], TrainerParts]
"""A trainer's parts by whether its policy is served; the weights of a served one go to the relay's store."""


@dataclass(frozen=True)
class TrainerContext:
    """A trainer's settings and ports, made once and shared by all parts of training.

    ``failpoint`` is called at each failpoint. ``clock`` gives the time of day and ``monotonic`` measures phases of a
    step, both in seconds. ``usage`` measures this process.
    """

    settings: LearningSettings
    run: TrainedRun
    parts: TrainerParts
    standing: Standing = field(default_factory=OwnStream)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.perf_counter
    failpoint: FailpointHook = no_failpoint
    usage: Callable[[], ResourceUsage | None] = lambda: None


async def hold_run(context: TrainerContext, compute: Compute) -> IdentityKeeper:
    """Make sure that this directory holds the run, before anything is written and before any trainer is fenced.

    Raises:
        IdentityError: the topics belong to another run, or to lineages that this directory does not have.
        BusUnavailable: no broker answers.
    """
    run = context.run
    keeper = IdentityKeeper(
        run.bus,
        run.scope,
        run.identity,
        adopt=run.adopt,
        servers=run.servers,
        clock=context.clock,
        # Without a directory time is virtual, and the run must not depend on the machine that computes it.
        holder=run.name if run.directory is None else here(run.directory),
        run_id=context.standing.run_id,
    )
    await keeper.hold(lambda claimed: compute(context.parts.checkpoints.held, claimed))
    context.failpoint(Failpoint.IDENTITY_HELD)
    return keeper


async def open_announcements(context: TrainerContext) -> Announcements:
    """Opens the publisher of the steps topic. Opening its transactional id fences older trainers.

    Raises:
        BusUnavailable: no broker answers.
    """
    run, settings = context.run, context.settings
    announcer = await open_announcer(run.bus, run.scope, settings.algorithm.name)
    return Announcements(announcer, lambda: context.failpoint(Failpoint.ANNOUNCED))


async def open_session(
    context: TrainerContext, compute: Compute, exporter: Compute, announcements: Announcements, keeper: IdentityKeeper
) -> "TrainerSession":
    """Claim the next lineage, restore the newest checkpoint, open the policy, and announce where training continues.

    The order keeps an older trainer out before this one reads anything that the older one might still change: first
    Kafka fences its transactions (``open_announcements``), then its lineage is no longer the newest, and only then is
    the checkpoint chosen.

    Raises:
        CheckpointError: no checkpoint verifies, or it belongs to another run.
        Superseded: a newer trainer has taken over in the meantime.
        IdentityError: another trainer started a lineage of the run from other checkpoints in the meantime.
    """
    context.failpoint(Failpoint.FENCED)
    assert keeper.identity is not None, "the run must be held before a lineage of it starts"
    parts, above = context.parts, max(keeper.identity.lineages_before, context.standing.above_lineage)

    def claim() -> Lineage:
        # Also above the lineages in its weights' store: they may be of an earlier trainer whose checkpoints are gone,
        # or of another run.
        in_store = 0 if parts.weights is None else newest_lineage(parts.weights)
        return parts.checkpoints.claim_lineage(at_least=max(above, in_store) + 1, now=context.clock())

    lineage = await compute(claim)
    # Before the first announcement: if that must open its transactional id again, it fences the id's present holder.
    announcements.announcer.guard_with(lambda: compute(lineage.check), lambda: keeper.check(lineage.number))
    # The claim above stops trainers that share these checkpoints; this one, on the topic, stops all others.
    await keeper.claim(lineage.number, lineage.claim_id)
    context.failpoint(Failpoint.LINEAGE_CLAIMED)
    restored = await compute(parts.checkpoints.newest)
    if restored is not None:
        settings = context.settings
        check_continues(restored.state.manifest, context.run.scope, settings.algorithm.name, settings.marks)
    context.failpoint(Failpoint.RESTORED)
    policy = await compute(parts.open_policy, restored)
    context.failpoint(Failpoint.POLICY_OPENED)
    session = TrainerSession(context, compute, exporter, announcements, keeper, lineage, policy, restored)
    await session.announce_start(restored, await session.reader.carry_over())
    version = named_version(context.run.policy, session.version)
    log.info("trainer ready", version=version, resumed=restored is not None)
    return session


class TrainerSession:
    """``version``: of the weights in memory; it changes on the event loop only.

    A restart continues from the durable frontier, in the newest manifest; the live one is ``reader.ledger.frontier``.
    ``report``: of the last step taken, once its weights are exported. ``export_s``: seconds that the last background
    export took. ``refused_in_a_row``: gradients not applied since the last step taken.
    """

    def __init__(
        self,
        context: TrainerContext,
        compute: Compute,
        exporter: Compute,
        announcements: Announcements,
        keeper: IdentityKeeper,
        lineage: Lineage,
        policy: Policy,
        restored: RestoredCheckpoint | None,
    ) -> None:
        assert keeper.identity is not None, "the run must be held before a session of it starts"
        manifest = restored.state.manifest if restored else None
        settings, standing = context.settings, context.standing
        self.keeper = keeper
        self.run_id = keeper.identity.run_id
        self.context = context
        self.compute = compute
        self.exporter = exporter
        self.announcements = announcements
        self.lineage = lineage
        self.policy = policy
        self.version = PolicyVersion(lineage.number, policy.step)
        self._shift = standing.shift_at(policy.step)
        self.tokens_seen = manifest.tokens_seen if manifest else 0
        self.report: StepReport | None = None
        self.export_s = 0.0
        self.refused_in_a_row = 0
        is_synchronous, training = settings.loop.mode == "synchronous", settings.training
        self.batcher = MicroBatcher(
            settings.batching, is_synchronous, training.ranks, training.packing, settings.lookahead
        )
        self.versions = standing.versions(lambda: self.served_version, settings.max_age)
        orphans_through = standing.orphans_through(keeper.identity)
        changed_through = keeper.identity.changed_through if settings.ingest.on_change == "skip" else 0
        self.reader = TrajectoryReader(
            ReadStream(context.run.bus, context.run.name, context.run.scope, settings.algorithm.name),
            IntakeRules(
                settings.loop,
                settings.ingest,
                settings.reward_weights,
                orphans_through,
                changed_through,
                settings.limits,
            ),
            self.versions,
            lambda: self.version.number,  # called for each row, since every step changes it
            reader_snapshot(manifest, restored.state.reader if restored else {}, lineage.number),
            clock=context.clock,
            monotonic=context.monotonic,
        )
        self._skips = manifest.skips if manifest else SkipSummary()
        self._ancestry = Ancestry(None, 0)
        if restored is not None and manifest is not None:
            self._ancestry = Ancestry(manifest.policy_version, manifest.skips.count, restored.undoes)
        self._checkpointed_step = policy.step  # the restored one; step 0 is the initial model and needs no checkpoint
        self._offsets_announced_at = -math.inf

    def published_weights(self, sha256: str | None = None, digests: dict[str, str] | None = None) -> PublishedWeights:
        """The names of the weights in memory. ``sha256``: of their manifest; None: they are not exported yet."""
        served_as = None if self._shift is None else self.served_version
        policy = self.context.run.named_policy
        return PublishedWeights(self.version, sha256, digests or {}, self.is_finished, policy, served_as)

    @property
    def served_version(self) -> PolicyVersion:
        """The version under which workers know these weights."""
        return PolicyVersion(self.version.lineage, max(0, self.version.number + (self._shift or 0)))

    @property
    def is_finished(self) -> bool:
        """Whether the run's last step was taken."""
        return self.policy.step >= self.context.settings.training.max_steps

    def count_refused_gradient(self) -> None:
        """Count a gradient that was not applied."""
        self.refused_in_a_row += 1

    def advance(self, tokens: int) -> None:
        """Number the weights after the step just taken; ``tokens``: those that the step was computed from."""
        self.version = PolicyVersion(self.lineage.number, self.policy.step)
        self.tokens_seen += tokens
        self.refused_in_a_row = 0

    async def announce_start(self, restored: RestoredCheckpoint | None, carried: Translation | None) -> None:
        """Announce the checkpoint's report again, and then that this lineage continues from it.

        ``carried``: records finished on another cluster, if the checkpoint was written with that one.
        """
        run, name, clock = self.context.run, self.context.settings.algorithm.name, self.context.clock
        # First the weights, then the report: its readers may fetch them at once.
        snapshot = await self.compute(self.policy.snapshot)
        sha256 = await self._export(snapshot, self.served_version)
        self.context.failpoint(Failpoint.START_EXPORTED)
        digests = await self.exporter(snapshot.digests)
        topic, lineage = STEPS.full_name(run.scope), self.lineage.number
        parts = [] if carried is None else carried_over(name, lineage, carried, self._skips, clock(), run.named_policy)
        ancestry = replace(self._ancestry, carried_parts=len(parts))
        weights = self.published_weights(sha256, digests)
        first = first_report(name, weights, ancestry, self.reader.ledger.prompt_cursor, self.run_id, clock())
        records = [Outgoing.of(topic, message, key=name) for message in (*parts, first)]
        if restored is not None and restored.state.report:
            # The crash may have come between the checkpoint and its announcement. Readers ignore a repeated report.
            again = Outgoing(topic, restored.state.report, name, headers=headers_of(StepReport))
            records.insert(0, again)  # in front: the first report names that step as its parent
        await self.announcements.post(partial(_made, records), {})
        # Wait: this lineage takes no step before the topic knows it.
        await self.announcements.settled()
        self.context.failpoint(Failpoint.START_ANNOUNCED)

    async def copy_weights(self) -> WeightSnapshot:
        """A copy of the weights, to make checksums of and to export if this step is due.

        Waits for the previous export, whose memory the copy reuses. So at most one export runs, and exports that take
        longer than a step delay the trainer instead of piling up. No export is dropped in favour of the next one:
        generation may be waiting for exactly this version (``training.weight_sync_steps``).
        """
        await self.announcements.made()
        return await self.compute(self.policy.snapshot)

    @property
    def _is_export_due(self) -> bool:
        # The last step's weights are always exported: the end of a run is announced with them.
        return self.policy.step % self.context.settings.training.weight_sync_steps == 0 or self.is_finished

    def exporting(self, snapshot: WeightSnapshot, draft: StepReport) -> MakeReport:
        """A function that exports the weights of the step just taken, and then completes its report from the draft.

        It raises ``Superseded`` if a newer lineage exists, whose trainer removes half-written files.
        """
        # Decided now: the next step may have been taken before the function is called.
        return partial(self._exported, snapshot, draft, is_due=self._is_export_due)

    async def _exported(self, snapshot: WeightSnapshot, draft: StepReport, *, is_due: bool) -> StepReport:
        started_at = self.context.monotonic()
        version = draft.served_as or draft.version
        sha256 = None
        if is_due:
            try:
                sha256 = await self._export(snapshot, version)
            except LateExport as error:
                # The store already holds newer weights of another trainer: no worker waits for these.
                log.warning("weights not exported", version=str(version), error=str(error))
        self.context.failpoint(Failpoint.WEIGHTS_EXPORTED)
        digests = await self.exporter(snapshot.digests)
        self.context.failpoint(Failpoint.DIGESTS_MADE)
        self.report = draft.replace(manifest_sha256=sha256, digests=digests)
        self.export_s = self.context.monotonic() - started_at
        self.context.failpoint(Failpoint.REPORT_MADE)
        return self.report

    async def _export(self, snapshot: WeightSnapshot, version: PolicyVersion) -> str:
        try:
            return await self.exporter(snapshot.export, version, self.context.clock())
        except Exception:
            # A newer trainer may have cleared this one's files, which looks like a broken disk but is not.
            await self.check_lineage()
            raise

    async def check_lineage(self) -> None:
        """Check that no newer trainer has taken over. If storage or broker fail, only log: writes check again.

        Raises:
            Superseded: a newer lineage exists.
        """
        try:
            await self.compute(self.lineage.check)
            await self.keeper.check(self.lineage.number)
        except (CheckpointError, BusError) as error:
            log.warning("not known whether another trainer has taken over", error=str(error))

    async def announce(self, message: StepReport | RefusedStep | MakeReport) -> None:
        """Queue a report for the steps topic, after earlier ones. If it is still to be made, training does not wait."""
        make = partial(_made, message) if isinstance(message, StepReport | RefusedStep) else message
        offsets = self.reader.offsets() if self._are_offsets_due() else {}
        await self.announcements.post(partial(self._records, make), offsets)

    async def _records(self, make: Callable[[], Awaitable[StepReport | RefusedStep]]) -> list[Outgoing]:
        message = await make()
        self.context.failpoint(Failpoint.ANNOUNCING)
        topic, name = STEPS.full_name(self.context.run.scope), self.context.settings.algorithm.name
        return [Outgoing.of(topic, message, key=name)]

    def _are_offsets_due(self) -> bool:
        now = self.context.monotonic()
        if now - self._offsets_announced_at < OFFSETS_INTERVAL_S and not self.is_finished:
            return False
        self._offsets_announced_at = now
        return True

    @property
    def is_checkpoint_due(self) -> bool:
        """Whether the step just taken gets a checkpoint."""
        return self.policy.step % self.context.settings.training.checkpoint_every == 0 or self.is_finished

    async def checkpoint(self) -> None:
        """Write a checkpoint of this moment, unless this step has one already.

        The reader's snapshot is taken first, before anything is awaited: reading continues in the meantime, and records
        that it finishes later are not in the snapshot. Then the rows and reports that the snapshot relies on are
        confirmed, and the manifest is written last.

        Raises:
            CheckpointError: it could not be written; older ones are unchanged.
            Superseded: a newer trainer has taken over.
            BusError: the broker does not accept the rows and reports that the checkpoint relies on.
        """
        # The step has one if a stop comes right after a due checkpoint, or before this process took a step.
        if self.policy.step == self._checkpointed_step:
            return
        context = self.context
        snapshot = self.reader.snapshot()
        context.failpoint(Failpoint.SNAPSHOT_TAKEN)
        # A restart announces only this step's report again, so earlier ones must be on the topic by now.
        await self.announcements.settled()
        # The snapshot's records are never read again, so a row lost now would leave a record without an outcome.
        await self.reader.flush()
        context.failpoint(Failpoint.ROWS_SETTLED)
        assert self.report is not None, "a step was taken, and its report is complete once announcements have settled"
        manifest = CheckpointManifest(
            run=context.run.scope,
            run_id=self.run_id,
            algorithm=context.settings.algorithm.name,
            lineage=self.lineage.number,
            parent=self._ancestry.parent,
            step=self.policy.step,
            policy_version=self.version,
            tokens_seen=self.tokens_seen,
            config_hash=context.settings.marks,
            created_at=context.clock(),
            **stream_fields(snapshot),
        )
        document = reader_document(snapshot)
        place = await self.compute(self.policy.checkpoint, manifest, document, encode(self.report), self.lineage)
        self._checkpointed_step = self.policy.step
        context.failpoint(Failpoint.CHECKPOINT_WRITTEN)
        log.info("checkpoint written", step=self.policy.step, place=place)


async def _made(value: T) -> T:
    """A finished value, where an awaitable is expected."""
    return value
