"""The trainer's driver: groups in, weight versions and step reports out. Knows no torch, no threads and no files.

A process starts with these acts (``hold_run``, ``open_announcements``, ``open_session``):
 - make sure that its directory holds the run;
 - fence older trainers in Kafka, by the transactional id;
 - claim the next lineage;
 - restore the newest checkpoint, and open the policy;
 - export its weights;
 - announce the checkpoint's report again, and then the lineage's first report.

One optimizer step, in this order:
 1. take a group, oldest first or as ``ingest.sampling`` says;
 2. give its samples their advantages, or skip it;
 3. form micro-batches and add up their gradients while further groups arrive;
 4. at ``groups_per_step`` groups: normalise, clip, apply; or refuse, skip the groups, and report that;
 5. mark the step's records as finished on the live frontier;
 6. copy the weights, once the version before is exported, and export the copy;
 7. make the step's report;
 8. write a checkpoint when one is due, with the report in it;
 9. announce: the report, and once a second the offsets, in one short transaction.
Export, report and announcement (6 after the copy, 7 and 9) may run while the next groups are taken. In a step with a
checkpoint only 9 may, because the checkpoint contains the report. A version is announced when it can be fetched, and
after all earlier versions.

So a step announced with a checkpoint has one, and a restart announces again the report that a crash cut off. Steps that
were announced after the last checkpoint belong to an orphaned lineage. Nothing here waits for a worker.
``failpoints.py`` names the moments between these acts; a process that dies at any of them is resumed without loss or
repeat.

``Trainer`` drives; ``Gatherer`` does numbers 1 to 3. The modes of the loop differ here only in when a micro-batch is
cut. ``synchronous`` takes all groups of the step before the first cut. The others cut as soon as a micro-batch is worth
computing, and never let the device wait for a better one.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from streamrl.bus.waiting import wait_for_tasks
from streamrl.consumers.algorithms.advantages import credit_group, skip_reason_of
from streamrl.consumers.batching.micro_batches import Group, MicroBatch
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.metrics import PhaseSpan, StepTimer, append_metrics, finite
from streamrl.consumers.training.ports import StepOutcome
from streamrl.consumers.training.session import (
    MakeReport,
    TrainerContext,
    TrainerSession,
    hold_run,
    open_announcements,
    open_session,
)
from streamrl.consumers.training.step_report import GatheredStep, refused_step, step_report
from streamrl.schemas.errors import OutOfMemory, StreamRLError
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, named_version
from streamrl.schemas.reports import SkipReason, StepReport

log = structlog.get_logger()

MAX_EXCLUDED = 8
"""Most groups of one step that may be skipped because they do not fit into memory; more than that ends the run."""
MAX_REFUSED_STEPS = 20
"""Refused gradients in a row that end the run: by then, the weights or the data are at fault and not a single batch."""
IDLE_S = 5.0
"""Seconds between two checks, while waiting for a group, whether another trainer has taken over; object stores bill
requests, so not often."""


class Trainer:
    """One trainer process. ``session``: its part of the run while it trains; None before and after."""

    def __init__(self, context: TrainerContext) -> None:
        self.context = context
        self.session: TrainerSession | None = None
        self._last_version: PolicyVersion | None = None

    @property
    def version(self) -> PolicyVersion | None:
        """The version of its weights, also after it has ended; None before it holds a lineage."""
        return self._last_version if self.session is None else self.session.version

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until stopped.

        Consumes: trajectories, through the reader.
        Produces: steps, skips and dead letters; the run's identity on control; weight versions, checkpoints,
            ``metrics.jsonl``.
        Waits for: groups of samples.
        On failure: raises; a restart continues from the newest checkpoint under the next lineage.
        On stop: finishes the step if its batch is complete, drops its gradient otherwise, writes a checkpoint.
        """
        context, parts = self.context, self.context.parts
        compute, exporter = parts.open_compute(), (parts.open_exporter or parts.open_compute)()
        try:
            keeper = await hold_run(context, compute)
            announcements = await open_announcements(context)
            try:
                self.session = session = await open_session(context, compute, exporter, announcements, keeper)
                await self._read_and_train(session, stop)
            finally:
                self._last_version, self.session = self.version, None
                await announcements.close()
        finally:
            # Last: an announcement under way uses this thread to check that its lineage is still the newest.
            exporter.close()
            compute.close()

    async def _read_and_train(self, session: TrainerSession, stop: asyncio.Event) -> None:
        stop_reading = asyncio.Event()
        reading = asyncio.create_task(session.reader.run(stop_reading))
        try:
            await self._steps_loop(session, stop)
            # While the reader still runs: the checkpoint waits for rows that the reader publishes.
            await session.checkpoint()
            await session.announcements.settled()
            self.context.failpoint(Failpoint.LAST_ANNOUNCED)
        finally:
            stop_reading.set()
            try:
                # Also when the trainer is cancelled again: the reader must not use what the trainer then closes.
                await wait_for_tasks([reading])
            finally:
                # Only logged: the reader's error must not hide the error that ended the trainer.
                if not reading.cancelled() and (error := reading.exception()) is not None:
                    log.error("reading trajectories failed", error=str(error))
        self.context.failpoint(Failpoint.READING_ENDED)
        log.info("trainer ended", step=session.policy.step, finished=session.is_finished)

    async def _steps_loop(self, session: TrainerSession, stop: asyncio.Event) -> None:
        """Take optimizer steps.

        Consumes: groups. Produces: what ``run`` says. Waits for: groups.
        On failure: raises to ``run``. On stop: drops the gradient of an incomplete batch and returns.
        """
        gatherer = Gatherer(session)
        while not session.is_finished and (gathered := await gatherer.gather(stop)) is not None:
            with gathered.timer.measure("optimizer"):
                outcome = await session.compute(session.policy.finish_step, gathered.reward_deviation)
            self.context.failpoint(Failpoint.STEP_APPLIED)
            if outcome.applied:
                await self._finish_step(session, gathered, outcome)
            else:
                await self._refuse_step(session, gathered, outcome)

    async def _finish_step(self, session: TrainerSession, gathered: GatheredStep, outcome: StepOutcome) -> None:
        """Numbers 5 to 9."""
        # First: rows written below carry the number of the step just taken.
        session.advance(gathered.tokens)
        context, ledger, timer = self.context, session.reader.ledger, gathered.timer
        settings = context.settings
        ledger.mark_trained(ref for batch in gathered.micro_batches for ref in batch)
        context.failpoint(Failpoint.TRAINED_MARKED)
        for part, detail in gathered.left_out:
            ledger.mark_skipped(part, SkipReason.FILTERED, detail)
        context.failpoint(Failpoint.LEFT_OUT_SKIPPED)
        with timer.measure("broadcast_weights"):
            snapshot = await session.copy_weights()
        context.failpoint(Failpoint.WEIGHTS_COPIED)
        metrics = finite(await self._metrics(session, gathered, outcome.metrics))
        name, now = settings.algorithm.name, context.clock()
        draft = step_report(name, session.published_weights(), gathered, metrics, ledger.prompt_cursor, now)
        draft = draft.replace(usage=context.usage())
        make_report = session.exporting(snapshot, draft)
        report: StepReport | MakeReport = make_report
        if session.is_checkpoint_due:
            with timer.measure("broadcast_weights"):
                report = await make_report()
            # Before the announcement: a crash between the two loses neither, since the checkpoint contains the report.
            with timer.measure("save_ckpt"):
                await session.checkpoint()
        with timer.measure("announce"):
            await session.announce(report)
        # The report's metrics were made before these phases ended, so only the file has their times.
        late = {f"time/{name}": timer.seconds.get(name, 0.0) for name in ("broadcast_weights", "save_ckpt", "announce")}
        self._write_metrics(session.policy.step, metrics | late, timer.spans)
        context.failpoint(Failpoint.METRICS_WRITTEN)
        reward, version = round(metrics.get("reward", 0.0), 4), named_version(context.run.policy, session.version)
        log.info("step", step=session.policy.step, reward=reward, version=version)

    async def _metrics(
        self, session: TrainerSession, gathered: GatheredStep, learned: dict[str, float]
    ) -> dict[str, float]:
        return {
            **gathered.metrics.summary(),
            **gathered.padding.summary(),
            **learned,
            **gathered.timings(),
            **await session.compute(session.policy.speed_metrics, gathered.tokens, gathered.computing_s),
            **await session.reader.metrics(),
            "num_tokens": float(session.tokens_seen),
            "time/export_weights": session.export_s,  # of the previous version, exported during this step
            "ledger/trained": float(sum(len(batch) for batch in gathered.micro_batches)),
            "ledger/groups": float(len(gathered.groups)),
            "lineage/number": float(session.lineage.number),
            "progress/step": float(session.policy.step),
            "progress/max_steps": float(self.context.settings.training.max_steps),
        }

    def _write_metrics(self, step: int, metrics: dict[str, float], spans: Sequence[PhaseSpan]) -> None:
        """Append metrics for displays. The report has them too, so a full disk does not stop the step."""
        directory = self.context.run.directory
        if directory is None:
            return
        try:
            append_metrics(directory / "metrics.jsonl", step, self.context.clock(), metrics, spans)
        except OSError as error:
            log.error("metrics not written", step=step, error=str(error))

    async def _refuse_step(self, session: TrainerSession, gathered: GatheredStep, outcome: StepOutcome) -> None:
        """Number 4, when the gradient cannot be applied."""
        context, ledger = self.context, session.reader.ledger
        session.count_refused_gradient()
        log.error("step not taken, its groups are skipped", step=session.policy.step + 1, problem=outcome.problem)
        for group in gathered.groups:
            ledger.mark_skipped(group, SkipReason.FILTERED, outcome.problem)
        context.failpoint(Failpoint.STEP_REFUSED)
        name, now, policy = context.settings.algorithm.name, context.clock(), context.run.named_policy
        await session.announce(
            refused_step(name, session.version, gathered, outcome.problem, outcome.metrics, now, policy)
        )
        if session.refused_in_a_row >= MAX_REFUSED_STEPS:
            # Closing drops an announcement that is under way, but the error below refers to this one.
            await session.announcements.settled()
            raise StreamRLError(
                f"expected gradients that can be applied, got {session.refused_in_a_row} in a row that cannot, the "
                f"last one at step {session.policy.step + 1}: {outcome.problem}; their groups are named on the steps "
                "topic; lower training.learning_rate or training.max_grad_norm"
            )


@dataclass
class Gatherer:
    """Takes the groups of one step and adds up their gradients. Applies nothing, announces nothing.

    A micro-batch that does not fit into memory is split: the gradient is a sum, so two halves add up to it. If a single
    sample does not fit, its group is skipped, and another group takes its place. ``too_large``: tokens, with padding,
    of the smallest micro-batch that did not fit; one that is not smaller is split at once. ``has_begun``: the first
    group has arrived.
    """

    session: TrainerSession
    too_large: float = math.inf
    has_begun: bool = False

    async def gather(self, stop: asyncio.Event) -> GatheredStep | None:
        """A complete batch, its gradient accumulated in the policy; None if stopped before."""
        session, context, loop = self.session, self.session.context, self.session.context.settings.loop
        algorithm = context.settings.algorithm
        gathered = GatheredStep(session.versions.current, StepTimer(context.clock, context.monotonic))
        limits = session.policy.limits
        while len(gathered.groups) < loop.groups_per_step:
            group = await self._next_group(gathered, stop)
            if group is None:
                await self._drop()
                return None
            if not self.has_begun:
                # Until now engines were starting and the initial model was evaluated: not part of the step's time.
                self.has_begun = True
                gathered.timer.restart()
            context.failpoint(Failpoint.GROUP_TAKEN)
            credit = credit_group(group, algorithm, limits)
            if (reason := skip_reason_of(credit, algorithm)) is not None:
                session.reader.ledger.mark_skipped(group, *reason)
                context.failpoint(Failpoint.GROUP_SKIPPED)
                continue  # it does not count towards the step, which waits for another group instead
            session.reader.ledger.skip_streak.end()
            gathered.add_group(group, credit)
            context.failpoint(Failpoint.GROUP_CREDITED)
            for batch in session.batcher.hold(credit.training_samples):
                await self._backward(gathered, batch)
            if len(gathered.groups) == loop.groups_per_step:
                # Inside the loop: a group may turn out not to fit here, and then the step waits for another one.
                for batch in session.batcher.flush():
                    await self._backward(gathered, batch)
        context.failpoint(Failpoint.BATCH_GATHERED)
        return gathered

    async def _next_group(self, gathered: GatheredStep, stop: asyncio.Event) -> Group | None:
        """The next group, or None once stopped. While none is ready, held samples go to the device."""
        while not stop.is_set():
            await asyncio.sleep(0)  # lets the reader run, which a series of ready groups would otherwise starve
            # Counted each time: a micro-batch that did not fit may have removed a group from the step.
            places = self.session.context.settings.loop.groups_per_step - len(gathered.groups)
            if (group := self.session.reader.ready_group(places)) is not None:
                return group
            batch = self.session.batcher.cut_for_idle()
            if batch is None:
                with gathered.timer.measure("wait_for_batch"):
                    return await self._wait_for_group(stop, places)
            await self._backward(gathered, batch)
        return None

    async def _wait_for_group(self, stop: asyncio.Event, places: int) -> Group | None:
        """The next group, or None once stopped.

        While it waits, it raises the error of a failed announcement, and checks for a newer trainer.
        """
        session = self.session
        while not stop.is_set():
            getting = asyncio.ensure_future(session.reader.next_group(places))
            stopping = asyncio.ensure_future(stop.wait())
            announcing = session.announcements.under_way
            try:
                waited_for = {getting, stopping} if announcing is None else {getting, stopping, announcing}
                finished, _ = await asyncio.wait(waited_for, timeout=IDLE_S, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done() and announcing is not None and announcing.done():
                    await session.announcements.settled()
                if not finished:
                    await session.check_lineage()
                if getting.done():  # it may also have taken a group during the awaits above
                    return getting.result()
            finally:
                # ``next_group`` takes a group as its last act, so cancelling it while it waits loses none. The
                # announcement goes on: others wait for it too.
                for waiting in (getting, stopping):
                    waiting.cancel()
        return None

    async def _drop(self) -> None:
        session = self.session
        session.context.failpoint(Failpoint.STOP_SEEN)
        session.batcher.clear()
        await session.compute(session.policy.discard)
        session.context.failpoint(Failpoint.GRADIENT_DROPPED)

    async def _backward(self, gathered: GatheredStep, batch: MicroBatch) -> None:
        session = self.session
        waiting = deque([batch])
        while waiting:
            part = waiting.popleft().without(gathered.excluded)
            if part is None:
                continue
            if part.num_positions >= self.too_large and len(part.refs) > 1:
                waiting.extendleft(reversed(part.halves()))
                continue
            with gathered.timer.measure("forward_backward"):
                shortage = await self._attempt(part)
            if shortage is None:
                gathered.add_trained(part, session.context.settings.loop.shards)
                session.context.failpoint(Failpoint.GRADIENT_ADDED)
                continue
            must_restart = shortage.gradient_lost
            if len(part.refs) > 1:
                self.too_large = part.num_positions
                log.warning("micro-batch split; all of this size will be split from now on", problem=str(shortage))
                waiting.extendleft(reversed(part.halves()))
            else:
                # Other samples of its group may already be in the gradient. It is a sum, so removing them means adding
                # up all other groups again.
                must_restart |= self._exclude_group(gathered, part.refs[0].trajectory_id, shortage)
            if must_restart:
                waiting.extendleft(reversed(gathered.restart_gradient()))
                await session.compute(session.policy.discard)

    async def _attempt(self, batch: MicroBatch) -> OutOfMemory | None:
        """Add the micro-batch's gradient; returns the error if it does not fit into memory."""
        try:
            await self.session.compute(self.session.policy.accumulate, batch)
        except OutOfMemory as shortage:
            # A new one: the frames of the caught error would keep memory in use.
            return OutOfMemory(str(shortage), gradient_lost=shortage.gradient_lost)
        return None

    def _exclude_group(self, gathered: GatheredStep, trajectory_id: str, shortage: OutOfMemory) -> bool:
        """Skip the group of a sample that does not fit; returns whether the gradient contains samples of the group.

        Raises:
            OutOfMemory: more than ``MAX_EXCLUDED`` groups of this step do not fit.
        """
        session, group_id = self.session, group_id_of(trajectory_id)
        group = gathered.exclude(group_id)
        session.batcher.drop_group(group_id)
        log.error("group skipped: one of its samples does not fit into memory", trajectory=trajectory_id)
        detail = f"does not fit into memory: {trajectory_id}: {shortage}"
        session.reader.ledger.mark_skipped(group, SkipReason.OUT_OF_MEMORY, detail)
        session.context.failpoint(Failpoint.GROUP_SKIPPED)
        if len(gathered.excluded) > MAX_EXCLUDED:
            raise OutOfMemory(
                f"expected samples that fit into the trainer's memory, got {len(gathered.excluded)} groups of one step "
                f"that do not, the last one for {trajectory_id}: {shortage}, or lower loop.max_completion_length"
            )
        return any(group_id_of(ref.trajectory_id) == group_id for batch in gathered.batches for ref in batch.refs)
