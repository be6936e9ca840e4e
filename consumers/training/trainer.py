"""The trainer's driver: groups in, weight versions and step reports out.

One optimizer step, in this order:
 1. take a group, oldest first;
 2. give its samples their advantages, or skip it;
 3. form micro-batches and add up their gradients while further groups arrive;
 4. at ``groups_per_step`` groups: normalise, clip, apply;
 5. mark the step's records as finished on the live frontier;
 6. export the weights;
 7. report the step;
 8. write a checkpoint when one is due;
 9. commit offsets, for displays only.
The report goes before the checkpoint, so that no restored step was never reported; a report that no checkpoint
followed belongs to an orphaned lineage. Nothing here waits for a worker.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from consumers.algorithms.credit import Credit, credit_group
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batcher import MicroBatcher
from consumers.batching.samples import Group, MicroBatch
from consumers.batching.settings import BatchingSettings
from consumers.intake.reader import Intake
from consumers.intake.settings import IntakeSettings
from consumers.training.accounting.gathering import GatheredStep
from consumers.training.accounting.metrics import append_metrics, finite
from consumers.training.accounting.reporting import StepReporter
from consumers.training.compute import ComputeThread
from consumers.training.incarnation import Incarnation, check_continues, intake_start
from consumers.training.persistence.checkpoint import CheckpointStore, Restored, config_hash
from consumers.training.persistence.files import remove_leftovers
from consumers.training.persistence.lineage import claim_lineage
from consumers.training.policy import PolicyPlaces, TrainedPolicy
from consumers.training.settings import TrainingSettings
from schemas.errors import SettingsError
from schemas.identifiers import PolicyVersion
from schemas.messages.reports import SkipReason
from schemas.ports.bus import Bus, Publisher
from schemas.settings import LoopSettings

log = structlog.get_logger()


@dataclass
class Trainer:
    """One consumer of the stream. ``run_dir`` gets ``checkpoints/`` and ``metrics.jsonl``."""

    bus: Bus
    run_name: str
    loop: LoopSettings
    algorithm: AlgorithmSettings
    training: TrainingSettings
    intake: IntakeSettings
    batching: BatchingSettings
    reward_weights: Mapping[str, float]
    model_path: str
    run_dir: Path
    weights_store: Path
    seed: int = 0
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.training.weight_sync_steps > self.loop.max_staleness + 1:
            raise SettingsError(
                f"expected training.weight_sync_steps of at most loop.max_staleness + 1 = "
                f"{self.loop.max_staleness + 1}, got {self.training.weight_sync_steps}: "
                "generation would wait for weights that are never exported; lower it"
            )

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until stopped.

        Consumes: trajectories, through the intake.
        Produces: steps, skips and dead-letters; weight versions, checkpoints, ``metrics.jsonl``.
        Waits for: groups of samples.
        On failure: raises; a restart goes on from the newest checkpoint under the next lineage.
        On stop: finishes the step if its batch is complete, drops its gradient otherwise, writes a checkpoint.
        """
        publisher = await self.bus.publisher(f"{self.algorithm.name}-trainer")
        compute = ComputeThread(self.training.threads)
        try:
            life, restored = await self._begin(compute, publisher)
            intake = Intake(
                self.bus,
                self.run_name,
                self.loop,
                self.intake,
                reward_weights=self.reward_weights,
                algorithm=self.algorithm.name,
                current_version=lambda: life.version,
                start=intake_start(restored) if restored else None,
                clock=self.clock,
            )
            await self._read_and_train(life, intake, stop)
        finally:
            compute.close()
            await publisher.close()

    async def _begin(self, compute: ComputeThread, publisher: Publisher) -> tuple[Incarnation, Restored | None]:
        """Take the next lineage, so that an older trainer stops; then restore, and publish the weights."""
        checkpoints = self.run_dir / "checkpoints"
        store = CheckpointStore(checkpoints, self.training.keep_checkpoints)
        settings = config_hash(self.loop, self.algorithm, self.training, self.batching)
        lineage = claim_lineage(checkpoints, at_least=1, now=self.clock())
        restored = await compute(store.newest)
        manifest = restored.state.manifest if restored else None
        if restored is not None:
            check_continues(restored, self.run_name, self.algorithm.name, settings)
        if manifest is not None and manifest.lineage >= lineage.number:
            lineage = claim_lineage(checkpoints, at_least=manifest.lineage + 1, now=self.clock())
        step = manifest.step if manifest else 0
        for directory in (checkpoints, self.weights_store):
            remove_leftovers(directory)
        places = PolicyPlaces(self.model_path, checkpoints, self.weights_store)
        policy = await compute(
            TrainedPolicy, places, self.algorithm, self.training, self.loop.max_completion_length, restored, self.seed
        )
        life = Incarnation(
            run_name=self.run_name,
            algorithm=self.algorithm,
            training=self.training,
            config_hash=settings,
            lineage=lineage,
            compute=compute,
            policy=policy,
            batcher=MicroBatcher(self.batching),
            reporter=StepReporter(publisher, self.run_name, self.clock),
            clock=self.clock,
            version=PolicyVersion(lineage.number, step),
            checkpointed_step=step,
            tokens_seen=manifest.tokens_seen if manifest else 0,
            earlier_skips=manifest.skip_counts if manifest else {},
        )
        await life.report(await compute(policy.export, life.version, self.clock()), None, {})
        log.info("trainer ready", version=str(life.version), resumed=restored is not None)
        return life, restored

    async def _read_and_train(self, life: Incarnation, intake: Intake, stop: asyncio.Event) -> None:
        stop_reading = asyncio.Event()
        reading = asyncio.create_task(intake.run(stop_reading))
        try:
            await self._steps_loop(life, intake, stop)
            await life.checkpoint(intake)
        finally:
            stop_reading.set()
            await asyncio.wait({reading})
            if not reading.cancelled() and (error := reading.exception()) is not None:
                log.error("reading trajectories failed", error=str(error))
        log.info("trainer ended", step=life.policy.step, finished=life.is_finished)

    async def _steps_loop(self, life: Incarnation, intake: Intake, stop: asyncio.Event) -> None:
        """Take optimizer steps.

        Consumes: groups. Produces: what ``run`` says. Waits for: groups.
        On failure: raises to ``run``. On stop: drops the gradient of an incomplete batch and returns.
        """
        while not life.is_finished:
            gathered = await self._gather(life, intake, stop)
            if gathered is None:
                return
            await self._step(life, intake, gathered)

    async def _gather(self, life: Incarnation, intake: Intake, stop: asyncio.Event) -> GatheredStep | None:
        """Numbers 1 to 3, until the batch is complete; none if stopped before that."""
        gathered = GatheredStep(life.version)
        limits = life.policy.limits
        while len(gathered.groups) < self.loop.groups_per_step:
            with gathered.watch.measure("wait_for_batch"):
                group = await _next_group(intake, stop)
            if group is None:
                life.batcher.clear()
                await life.compute(life.policy.learner.discard)
                return None
            credit = credit_group(group, self.algorithm, limits)
            if (refusal := self._refusal(credit)) is not None:
                await intake.mark_skipped(group, *refusal)
                continue
            gathered.add(group, credit)
            for batch in life.batcher.add(credit.training_samples):
                await self._backward(life, gathered, batch)
        for batch in life.batcher.flush():
            await self._backward(life, gathered, batch)
        return gathered

    def _refusal(self, credit: Credit) -> tuple[SkipReason, str] | None:
        if self.algorithm.dynamic_sampling and credit.deviation == 0.0:
            return SkipReason.ZERO_ADVANTAGE, "all rewards of the group are equal"
        if not credit.training_samples:
            return SkipReason.FILTERED, credit.left_out[0][1]
        return None

    async def _backward(self, life: Incarnation, gathered: GatheredStep, batch: MicroBatch) -> None:
        with gathered.watch.measure("forward_backward"):
            await life.compute(life.policy.learner.accumulate, batch)
        gathered.trained(batch)

    async def _step(self, life: Incarnation, intake: Intake, gathered: GatheredStep) -> None:
        """Numbers 4 to 9."""
        with gathered.watch.measure("optimizer"):
            outcome = await life.compute(life.policy.learner.finish_step, gathered.reward_deviation)
        if not outcome.applied:
            log.error("step not taken, its groups are skipped", step=life.policy.step + 1, problem=outcome.problem)
            for group in gathered.groups:
                await intake.mark_skipped(group, SkipReason.FILTERED, outcome.problem)
            return
        life.advance()
        life.tokens_seen += gathered.tokens
        intake.mark_trained(ref for batch in gathered.micro_batches for ref in batch)
        for part, detail in gathered.left_out:
            await intake.mark_skipped(part, SkipReason.FILTERED, detail)
        with gathered.watch.measure("broadcast_weights"):
            manifest_sha256 = await life.export()
        metrics = finite(await self._metrics(life, intake, gathered, outcome.metrics))
        await life.report(manifest_sha256, gathered, metrics)
        if life.policy.step % self.training.checkpoint_every == 0 and not life.is_finished:
            with gathered.watch.measure("save_ckpt"):
                await life.checkpoint(intake)
        await intake.commit()
        metrics["time/save_ckpt"] = gathered.watch.seconds.get("save_ckpt", 0.0)
        append_metrics(self.run_dir / "metrics.jsonl", life.policy.step, self.clock(), metrics)
        log.info("step", step=life.policy.step, reward=round(metrics.get("reward", 0.0), 4), version=str(life.version))

    async def _metrics(
        self, life: Incarnation, intake: Intake, gathered: GatheredStep, learned: dict[str, float]
    ) -> dict[str, float]:
        timings = gathered.timings()
        return {
            **gathered.metrics.summary(),
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


async def _next_group(intake: Intake, stop: asyncio.Event) -> Group | None:
    """The next group, or none once stopped."""
    if stop.is_set():
        return None
    getting, stopping = asyncio.ensure_future(intake.next_group()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({getting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return getting.result() if getting.done() else None
    finally:
        for waiting in (getting, stopping):
            waiting.cancel()
