"""What one process of the trainer holds of the run: its lineage, its policy, its reader of the stream.

The session is opened once and does whatever touches both the policy and the stream. Invariants:
- the_checkpoint_is_the_truth: stream position and weights are taken at the same moment; the rows they rest on, and
  the reports before, are on the topics before the manifest is;
- a_checkpoint_is_announced_after_it_is_written: its report is in it, so that a restart can announce it again.
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
from streamrl.consumers.batching.micro_batches import MicroBatcher
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.filters import IntakeRules
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
from streamrl.schemas.reports import RefusedStep, StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import STEPS
from streamrl.schemas.weights import newest_lineage

log = structlog.get_logger()

T = TypeVar("T")
MakeReport = Callable[[], Awaitable[StepReport]]

OFFSETS_INTERVAL_S = 1.0
"""Offsets are for lag displays only, and make two more requests of a transaction."""


@dataclass(frozen=True)
class LearningSettings:
    """The settings of learning: the loop, the algorithm, the data that is taken, and what rewards weigh.

    Raises:
        SettingsError: two of the settings contradict each other, or a function that one of them names is not there.
    """

    loop: LoopSettings
    algorithm: AlgorithmSettings
    training: TrainingSettings
    ingest: IngestSettings
    batching: BatchingSettings
    reward_weights: Mapping[str, float]

    def __post_init__(self) -> None:
        algorithm_of(self.algorithm)  # one of the user's own may not be there, or not take its options
        open_window(self.loop, self.ingest, lambda: 0)  # nor may a priority
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
                "sample has equal rewards, so every group would be skipped; raise the one or switch off the other"
            )

    @property
    def max_age(self) -> int:
        """Most optimizer steps that a token may be old where the trainer's own weights sample the stream."""
        return self.ingest.max_age(self.loop)

    @property
    def marks(self) -> str:
        """Checksums of the settings that shape training, to notice a resume under others."""
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
    """The run, and in whose name its trainer works.

    ``policy``: name of the trained policy. ``directory`` gets ``metrics.jsonl``, ``identity`` keeps which run that
    directory is of; with ``adopt`` the trainer takes over a run that it finds on the topics and not here. ``servers``:
    the broker as the user named it.
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
        """Prefix of all that is the trainer's own: topics, groups, transactional ids."""
        return scope_of(self.name, self.policy)

    @property
    def named_policy(self) -> str | None:
        """The policy's name as the trainer's messages carry it; None for the policy that the run began with."""
        return policy_in(self.scope)


@dataclass(frozen=True)
class TrainerParts:
    """Where the policy and its weights come from, are computed and are kept.

    ``open_compute`` is for the policy, ``open_exporter`` for the export of its weights beside it; None: another of the
    same kind. ``weights``: the store to which its weights go, above whose lineages its own begin; None: not known.
    """

    open_policy: OpenPolicy
    open_compute: OpenCompute
    checkpoints: Checkpoints
    open_exporter: OpenCompute | None = None
    weights: Path | None = None


PartsOf = Callable[[bool], TrainerParts]
"""A trainer's parts by whether its policy is served: its weights go to the relay's store then."""


@dataclass(frozen=True)
class TrainerContext:
    """What a trainer is given: made once, and the same object for all that takes part in training.

    ``failpoint`` is called at each failpoint. ``clock`` tells the time of day, ``monotonic`` what a phase of a step
    took; both in seconds.
    """

    settings: LearningSettings
    run: TrainedRun
    parts: TrainerParts
    standing: Standing = field(default_factory=OwnStream)
    clock: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.perf_counter
    failpoint: FailpointHook = no_failpoint


async def hold_run(context: TrainerContext, compute: Compute) -> IdentityKeeper:
    """Make sure that this directory holds the run, before anything is written and before anybody is fenced.

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
        # Without a directory time is virtual, and what happens is not to depend on where it is computed.
        holder=run.name if run.directory is None else here(run.directory),
        run_id=context.standing.run_id,
    )
    await keeper.hold(lambda claimed: compute(context.parts.checkpoints.held, claimed))
    context.failpoint(Failpoint.IDENTITY_HELD)
    return keeper


async def open_announcements(context: TrainerContext) -> Announcements:
    """The way to the steps topic. Opening its transactional id fences older trainers.

    Raises:
        BusUnavailable: no broker answers.
    """
    run, settings = context.run, context.settings
    announcer = await open_announcer(run.bus, settings.training.announce, run.scope, settings.algorithm.name)
    return Announcements(announcer, lambda: context.failpoint(Failpoint.ANNOUNCED))


async def open_session(
    context: TrainerContext, compute: Compute, exporter: Compute, announcements: Announcements, keeper: IdentityKeeper
) -> "TrainerSession":
    """Claim the next lineage, restore the newest checkpoint, open the policy, and announce where it goes on.

    In this order, so that an older trainer is kept out before anything is read that it might still change: Kafka has
    fenced its transactions (``open_announcements``), then its lineage is no longer the newest, and only then is the
    checkpoint chosen.

    Raises:
        CheckpointError: no checkpoint verifies, or it is of another run.
        Superseded: a newer trainer has taken over meanwhile.
        IdentityError: a lineage of the run began with other checkpoints meanwhile.
    """
    context.failpoint(Failpoint.FENCED)
    assert keeper.identity is not None, "the run is held before a lineage of it begins"
    parts, above = context.parts, max(keeper.identity.lineages_before, context.standing.above_lineage)

    def claim() -> Lineage:
        # Also above what lies where its weights will: of an earlier life whose checkpoints are gone, or another's.
        in_store = 0 if parts.weights is None else newest_lineage(parts.weights)
        return parts.checkpoints.claim_lineage(at_least=max(above, in_store) + 1, now=context.clock())

    lineage = await compute(claim)
    # Before the first announcement: one that has to open its transactional id again fences whoever holds it then.
    announcements.announcer.guard_with(lambda: compute(lineage.check), lambda: keeper.check(lineage.number))
    # Here for those who share these checkpoints, and now on the topic for those who do not.
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
    """``version`` is that of the weights in memory, and changes on the event loop only.

    The durable frontier is the newest manifest's, where a restart goes on; the live one is ``reader.ledger.frontier``.
    ``report``: of the last step taken, once its weights are exported; ``export_s``: what the last export took, in the
    background; ``refused_in_a_row``: gradients since then that were not applied.
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
        assert keeper.identity is not None, "the run is held before a session of it begins"
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
        in_whole, training = settings.loop.mode == "synchronous", settings.training
        self.batcher = MicroBatcher(settings.batching, in_whole, training.ranks, training.packing)
        self.versions = standing.versions(lambda: self.served_version, settings.max_age)
        orphans_through = standing.orphans_through(keeper.identity)
        self.reader = TrajectoryReader(
            ReadStream(context.run.bus, context.run.name, context.run.scope, settings.algorithm.name),
            IntakeRules(settings.loop, settings.ingest, settings.reward_weights, orphans_through),
            self.versions,
            lambda: self.version.number,  # asked for each row: it moves with every step
            reader_snapshot(manifest, restored.state.reader if restored else {}, lineage.number),
            clock=context.clock,
            monotonic=context.monotonic,
        )
        self._skips = manifest.skips if manifest else SkipSummary()
        self._ancestry = Ancestry(None, 0)
        if restored is not None and manifest is not None:
            self._ancestry = Ancestry(manifest.policy_version, manifest.skips.count, restored.undoes)
        self._checkpointed_step = policy.step  # the one restored; at 0 the initial model serves
        self._offsets_announced_at = -math.inf

    def published_weights(self, sha256: str | None = None, digests: dict[str, str] | None = None) -> PublishedWeights:
        """What the weights in memory are known by. ``sha256``: of their manifest; None: they are not exported yet."""
        served_as = None if self._shift is None else self.served_version
        policy = self.context.run.named_policy
        return PublishedWeights(self.version, sha256, digests or {}, self.is_finished, policy, served_as)

    @property
    def served_version(self) -> PolicyVersion:
        """The version under which workers know these weights."""
        return PolicyVersion(self.version.lineage, max(0, self.version.number + (self._shift or 0)))

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken."""
        return self.policy.step >= self.context.settings.training.max_steps

    def note_refused(self) -> None:
        """Count a gradient that was not applied."""
        self.refused_in_a_row += 1

    def with_metrics(self, metrics: dict[str, float]) -> StepReport:
        """The report of the last step taken, with these metrics instead of its own from now on."""
        assert self.report is not None, "a step was taken, and its report is made"
        self.report = self.report.replace(metrics=metrics)
        return self.report

    def advance(self, tokens: int) -> None:
        """Name the weights after the step just taken, with the tokens it was computed of."""
        self.version = PolicyVersion(self.lineage.number, self.policy.step)
        self.tokens_seen += tokens
        self.refused_in_a_row = 0

    async def announce_start(self, restored: RestoredCheckpoint | None, carried: Translation | None) -> None:
        """Announce the checkpoint's report again, and that this lineage goes on from there.

        ``carried``: what was finished on another cluster, if this is not the one of the checkpoint.
        """
        run, name, clock = self.context.run, self.context.settings.algorithm.name, self.context.clock
        # First the weights, then word of them: whoever reads the report may fetch them at once.
        snapshot = await self.compute(self.policy.snapshot)
        sha256 = await self._export(snapshot, self.served_version)
        self.context.failpoint(Failpoint.START_EXPORTED)
        digests = await self._digests(snapshot)
        topic, lineage = STEPS.full_name(run.scope), self.lineage.number
        parts = [] if carried is None else carried_over(name, lineage, carried, self._skips, clock(), run.named_policy)
        ancestry = replace(self._ancestry, carried_parts=len(parts))
        weights = self.published_weights(sha256, digests)
        first = first_report(name, weights, ancestry, self.reader.ledger.prompt_cursor, self.run_id, clock())
        records = [Outgoing.of(topic, message, key=name) for message in (*parts, first)]
        if restored is not None and restored.state.report:
            # The crash may have come between the checkpoint and its announcement; readers ignore a repeat.
            again = Outgoing(topic, restored.state.report, name, headers=headers_of(StepReport))
            records.insert(0, again)  # in front: the first report names that step as its parent
        await self.announcements.post(partial(_made, records), {})
        # Waited for: no step is taken of a lineage that the topic does not know.
        await self.announcements.settled()
        self.context.failpoint(Failpoint.START_ANNOUNCED)

    async def copy_weights(self) -> WeightSnapshot | None:
        """A copy of the weights to be exported, or to make checksums of; none if neither is wanted of this step.

        Waits for the export before, whose memory the copy takes: so at most one is under way, and exports that take
        longer than a step hold the trainer up instead of piling up. None is left out for the next one: a step without
        weights may be the one that generation waits for (``training.weight_sync_steps``).
        """
        await self.announcements.made()
        if not self.context.settings.training.tensor_digests and not self._is_export_due:
            return None
        return await self.compute(self.policy.snapshot)

    @property
    def _is_export_due(self) -> bool:
        # The last step's weights go out in any case: the end of a run is announced with them.
        return self.policy.step % self.context.settings.training.weight_sync_steps == 0 or self.is_finished

    def exporting(self, snapshot: WeightSnapshot | None, draft: StepReport) -> MakeReport:
        """What exports the weights of the step just taken, and then makes its report of the draft.

        It raises ``Superseded`` if a newer lineage exists; its trainer removes what it finds half written.
        """
        # Asked now: the next step may have been taken by the time that it is called.
        return partial(self._exported, snapshot, draft, is_due=self._is_export_due)

    async def _exported(self, snapshot: WeightSnapshot | None, draft: StepReport, *, is_due: bool) -> StepReport:
        began = self.context.monotonic()
        version = draft.served_as or draft.version
        sha256 = None
        if snapshot is not None and is_due:
            try:
                sha256 = await self._export(snapshot, version)
            except LateExport as error:
                # Newer weights of another trainer are there already: no worker waits for these.
                log.warning("weights not exported", version=str(version), error=str(error))
        self.context.failpoint(Failpoint.WEIGHTS_EXPORTED)
        digests = {} if snapshot is None else await self._digests(snapshot)
        self.context.failpoint(Failpoint.DIGESTS_MADE)
        self.report = draft.replace(manifest_sha256=sha256, digests=digests)
        self.export_s = self.context.monotonic() - began
        self.context.failpoint(Failpoint.REPORT_MADE)
        return self.report

    async def _export(self, snapshot: WeightSnapshot, version: PolicyVersion) -> str:
        try:
            return await self.exporter(snapshot.export, version, self.context.clock())
        except Exception:
            # A newer trainer clears the leftovers of this one's export: that must be told from a broken disk.
            await self.check_lineage()
            raise

    async def _digests(self, snapshot: WeightSnapshot) -> dict[str, str]:
        return await self.exporter(snapshot.digests) if self.context.settings.training.tensor_digests else {}

    async def check_lineage(self) -> None:
        """Make sure that nobody has taken over; what cannot be asked now is asked before anything is kept.

        Raises:
            Superseded: a newer lineage exists.
        """
        try:
            await self.compute(self.lineage.check)
            await self.keeper.check(self.lineage.number)
        except (CheckpointError, BusError) as error:
            log.warning("not known whether another trainer has taken over", error=str(error))

    async def announce(self, message: StepReport | RefusedStep | MakeReport) -> None:
        """Put a report on the steps topic, after those before it. What is left of making it goes on beside training."""
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
        """Whether the step just taken is to be kept."""
        return self.policy.step % self.context.settings.training.checkpoint_every == 0 or self.is_finished

    async def checkpoint_if_due(self) -> bool:
        """Write a checkpoint when the step just taken is to be kept; false if that failed and may fail.

        Raises:
            CheckpointError: it could not be written, and ``training.on_checkpoint_failure`` is ``stop``, or the run
                would end without it.
            Superseded: a newer trainer has taken over.
        """
        if not self.is_checkpoint_due:
            return True
        try:
            await self.checkpoint()
        except CheckpointError as error:
            if self.context.settings.training.on_checkpoint_failure == "stop" or self.is_finished:
                raise
            log.error("checkpoint failed, going on without it", step=self.policy.step, error=str(error))
            return False
        return True

    async def checkpoint(self) -> None:
        """Write a checkpoint of this moment, unless this step has one already.

        The snapshot comes first, before anything is awaited: reading goes on meanwhile, and what it finishes later is
        not in it. Then everything that the snapshot claims is made sure of, and the manifest is written last.

        Raises:
            CheckpointError: it could not be written; older ones are as they were.
            Superseded: a newer trainer has taken over.
            BusError: the broker does not take what the checkpoint rests on.
        """
        # A stop may come right after a step whose checkpoint was due, or before this process took any.
        if self.policy.step == self._checkpointed_step:
            return
        context = self.context
        snapshot = self.reader.snapshot()
        context.failpoint(Failpoint.SNAPSHOT_TAKEN)
        # A restart announces this step's report again, and none before it: those have to be on the topic by now.
        await self.announcements.settled()
        # The snapshot's records are never read again, so a row lost now would be a record without an outcome.
        await self.reader.flush()
        context.failpoint(Failpoint.ROWS_SETTLED)
        assert self.report is not None, "a step was taken, and its report is made by the time that it is settled"
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
    """What needs no making, for those who await it."""
    return value
