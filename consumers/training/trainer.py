"""The trainer's driver: groups in, weight versions and step reports out. Knows no torch, no threads and no files.

A life begins so: fence older trainers in Kafka (by the transactional id), claim the next lineage, restore the newest
checkpoint, open the policy, export its weights, announce the checkpoint's report again and then the lineage's first.

One optimizer step, in this order:
 1. take a group, oldest first;
 2. give its samples their advantages, or skip it;
 3. form micro-batches and add up their gradients while further groups arrive (``gatherer``);
 4. at ``groups_per_step`` groups: normalise, clip, apply; or refuse, skip the groups, and say so;
 5. mark the step's records as finished on the live frontier;
 6. export the weights;
 7. make the step's report;
 8. write a checkpoint when one is due, with the report in it;
 9. announce: the report, and once a second the offsets, in one short transaction, which may last while the next
    groups are taken.
So whatever is announced as kept is kept, a restart announces again what a crash cut off, and what was announced and
not kept belongs to an orphaned lineage. Nothing here waits for a worker. ``resuming/points.py`` names the points
between these acts; a process that dies at any of them is resumed without loss or repeat.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from bus.port import Bus
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.settings import BatchingSettings
from consumers.ingest.reader import Intake
from consumers.ingest.settings import IntakeSettings
from consumers.training.gatherer import Gatherer
from consumers.training.metrics import Span, append_metrics, finite
from consumers.training.ports import Checkpoints, OpenCompute, OpenPolicy, StepOutcome
from consumers.training.resume import Point, Reached, ignore
from consumers.training.session import Beginning, Incarnation
from consumers.training.settings import TrainingSettings
from consumers.training.step_report import GatheredStep, refused_step, step_report
from schemas.errors import SettingsError, StreamRLError
from schemas.reports import SkipReason
from schemas.settings import LoopSettings

log = structlog.get_logger()


@dataclass
class Trainer:
    """One consumer of the stream. ``run_dir`` gets ``metrics.jsonl``; ``reached`` is called at each named point."""

    bus: Bus
    run_name: str
    loop: LoopSettings
    algorithm: AlgorithmSettings
    training: TrainingSettings
    intake: IntakeSettings
    batching: BatchingSettings
    reward_weights: Mapping[str, float]
    open_policy: OpenPolicy
    open_compute: OpenCompute
    checkpoints: Checkpoints
    run_dir: Path | None = None
    clock: Callable[[], float] = time.time
    reached: Reached = ignore

    def __post_init__(self) -> None:
        if self.training.weight_sync_steps > self.loop.staleness_bound + 1:
            raise SettingsError(
                f"expected training.weight_sync_steps of at most the staleness bound (loop.mode, loop.max_staleness) "
                f"+ 1 = {self.loop.staleness_bound + 1}, got {self.training.weight_sync_steps}: "
                "generation would wait for weights that are never exported; lower it"
            )
        if self.loop.num_generations == 1 and self.algorithm.dynamic_sampling:
            raise SettingsError(
                "expected loop.num_generations of at least 2 with algorithm.dynamic_sampling, got 1: a group of one "
                "sample has equal rewards, so every group would be skipped; raise the one or switch off the other"
            )

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until stopped.

        Consumes: trajectories, through the intake.
        Produces: steps, skips and dead-letters; weight versions, checkpoints, ``metrics.jsonl``.
        Waits for: groups of samples.
        On failure: raises; a restart goes on from the newest checkpoint under the next lineage.
        On stop: finishes the step if its batch is complete, drops its gradient otherwise, writes a checkpoint.
        """
        if self.loop.num_generations == 1 and self.training.backend == "torch":
            log.warning("groups of one sample have no baseline: all advantages are 0, and only a KL term learns")
        compute = self.open_compute()
        beginning = Beginning(
            bus=self.bus,
            run_name=self.run_name,
            algorithm=self.algorithm.name,
            training=self.training,
            batching=self.batching,
            whole_batches=self.loop.mode == "synchronous",
            sections={"loop": self.loop, "algorithm": self.algorithm, "intake": self.intake},
            checkpoints=self.checkpoints,
            open_policy=self.open_policy,
            clock=self.clock,
            reached=self.reached,
        )
        try:
            life, start = await beginning.begin(compute)
            intake = Intake(
                self.bus,
                self.run_name,
                self.loop,
                self.intake,
                reward_weights=self.reward_weights,
                algorithm=self.algorithm.name,
                current_version=lambda: life.version,
                start=start,
                clock=self.clock,
            )
            await self._read_and_train(life, intake, stop)
        finally:
            await beginning.close()
            compute.close()

    async def _read_and_train(self, life: Incarnation, intake: Intake, stop: asyncio.Event) -> None:
        stop_reading = asyncio.Event()
        reading = asyncio.create_task(intake.run(stop_reading))
        try:
            await self._steps_loop(life, intake, stop)
            await life.checkpoint(intake)
            await life.announcements.settled()
            self.reached(Point.LAST_ANNOUNCED)
        finally:
            stop_reading.set()
            await asyncio.wait({reading})
            if not reading.cancelled() and (error := reading.exception()) is not None:
                log.error("reading trajectories failed", error=str(error))
        self.reached(Point.READING_ENDED)
        log.info("trainer ended", step=life.policy.step, finished=life.is_finished)

    async def _steps_loop(self, life: Incarnation, intake: Intake, stop: asyncio.Event) -> None:
        """Take optimizer steps.

        Consumes: groups. Produces: what ``run`` says. Waits for: groups.
        On failure: raises to ``run``. On stop: drops the gradient of an incomplete batch and returns.
        """
        gatherer = Gatherer(life, intake, self.loop, self.algorithm, self.clock)
        while not life.is_finished:
            gathered = await gatherer.gather(stop)
            if gathered is None:
                return
            with gathered.watch.measure("optimizer"):
                outcome = await life.compute(life.policy.finish_step, gathered.reward_deviation)
            self.reached(Point.STEP_APPLIED)
            if outcome.applied:
                await self._finish_step(life, intake, gathered, outcome)
            else:
                await self._refuse_step(life, intake, gathered, outcome)

    async def _refuse_step(
        self, life: Incarnation, intake: Intake, gathered: GatheredStep, outcome: StepOutcome
    ) -> None:
        """Number 4, when the gradient is not fit to be applied."""
        life.refused_in_a_row += 1
        log.error("step not taken, its groups are skipped", step=life.policy.step + 1, problem=outcome.problem)
        for group in gathered.groups:
            intake.mark_skipped(group, SkipReason.FILTERED, outcome.problem)
        self.reached(Point.STEP_REFUSED)
        problem, metrics = outcome.problem, outcome.metrics
        refused = refused_step(self.algorithm.name, life.version, gathered, problem, metrics, self.clock())
        await life.announce(refused, intake)
        if life.refused_in_a_row >= self.training.max_refused_steps:
            await life.announcements.settled()
            raise StreamRLError(
                f"expected gradients that can be applied, got {life.refused_in_a_row} in a row that cannot, the last "
                f"one at step {life.policy.step + 1}: {outcome.problem}; their groups are named on the steps topic; "
                "lower training.learning_rate, or raise training.max_refused_steps or training.grad_norm_spike"
            )

    async def _finish_step(
        self, life: Incarnation, intake: Intake, gathered: GatheredStep, outcome: StepOutcome
    ) -> None:
        """Numbers 5 to 9."""
        life.advance(gathered.tokens)
        intake.mark_trained(ref for batch in gathered.micro_batches for ref in batch)
        self.reached(Point.TRAINED_MARKED)
        for part, detail in gathered.left_out:
            intake.mark_skipped(part, SkipReason.FILTERED, detail)
        self.reached(Point.LEFT_OUT_SKIPPED)
        with gathered.watch.measure("broadcast_weights"):
            manifest_sha256 = await life.export()
        self.reached(Point.WEIGHTS_EXPORTED)
        with gathered.watch.measure("digests"):
            weights = await life.weights(manifest_sha256)
        self.reached(Point.DIGESTS_MADE)
        metrics = finite(await self._metrics(life, intake, gathered, outcome.metrics))
        name, cursor = self.algorithm.name, intake.prompt_cursor
        life.report = step_report(name, weights, gathered, metrics, cursor, self.clock())
        self.reached(Point.REPORT_MADE)
        with gathered.watch.measure("save_ckpt"):
            is_kept = await life.checkpoint_if_due(intake)
        if not is_kept:
            metrics["checkpoint/failed"] = 1.0
            life.report = life.report.replace(metrics=metrics)
        with gathered.watch.measure("announce"):
            await life.announce(life.report, intake)
            if self.training.announce == "plain":
                await intake.commit()
        late = {f"time/{act}": gathered.watch.seconds[act] for act in ("save_ckpt", "announce")}
        self._write_metrics(life, metrics | late, gathered.watch.spans)
        self.reached(Point.METRICS_WRITTEN)
        log.info("step", step=life.policy.step, reward=round(metrics.get("reward", 0.0), 4), version=str(life.version))

    def _write_metrics(self, life: Incarnation, metrics: dict[str, float], spans: Sequence[Span]) -> None:
        """For displays; the report has them too, so a full disk is not worth the step."""
        if self.run_dir is None:
            return
        try:
            append_metrics(self.run_dir / "metrics.jsonl", life.policy.step, self.clock(), metrics, spans)
        except OSError as error:
            log.error("metrics not written", step=life.policy.step, error=str(error))

    async def _metrics(
        self, life: Incarnation, intake: Intake, gathered: GatheredStep, learned: dict[str, float]
    ) -> dict[str, float]:
        timings = gathered.timings()
        return {
            **gathered.metrics.summary(),
            **gathered.padding.summary(),
            **learned,
            **timings,
            **await intake.metrics(),
            "weight_sync_time_s": timings["time/broadcast_weights"],
            "num_tokens": float(life.tokens_seen),
            "ledger/trained": float(sum(len(batch) for batch in gathered.micro_batches)),
            "ledger/groups": float(len(gathered.groups)),
            "lineage/number": float(life.lineage.number),
            "progress/step": float(life.policy.step),
        }
