"""Replays recorded steps: rebuilds the weights before a step in a scratch policy, and takes the step again.

Invariant a_replay_writes_nothing: a replay gets a history and checkpoints to read, and no publisher. It writes only
tensors, to a directory that the caller names.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from streamrl.bus.history import History
from streamrl.consumers.batching.micro_batches import Group
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.model import resolve_device
from streamrl.consumers.training.ports import Compute
from streamrl.inspection.replay.comparing import (
    TrajectoryContribution,
    compare_updates,
    measure_contributions,
    tensor_equality,
)
from streamrl.inspection.replay.results import RebuiltStep, StepReplay, WhatIf, metric_pairs
from streamrl.inspection.replay.scratch_policy import (
    ObservedStep,
    PolicySnapshot,
    RestorePoint,
    RestorePoints,
    ScratchPolicy,
    StepConfig,
    Variation,
    keep_tensors,
    starts_at_initial_model,
    usable_restore_points,
)
from streamrl.inspection.replay.steps import (
    ChainSegment,
    Step,
    StepBatch,
    StepLog,
    read_groups,
    read_steps,
    recorded_batch,
    steps_between,
)
from streamrl.schemas.errors import CheckpointError, UserError
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import StepReport

INITIAL = PolicyVersion(0, 0)
"""The version of the initial model, before the first lineage."""


@dataclass(frozen=True)
class PreparedPolicy:
    """A scratch policy with the weights that a step starts from, and how they were rebuilt.

    ``steps_between``: steps taken since the restore point; ``differing``: those whose result is not as recorded.
    """

    policy: ScratchPolicy
    start: RestorePoint
    steps_between: int
    differing: tuple[int, ...]

    @property
    def origin(self) -> str:
        """The restore point, in words."""
        return "the initial model" if self.start.version == INITIAL else f"checkpoint {self.start.version}"


@dataclass(frozen=True)
class ReplayOptions:
    """What to find out in addition to whether a step's result is as recorded.

    ``variation``: the what-if; ``rows``: each trajectory's contribution; ``row_gradients``: also each trajectory's
    gradient norm, at one backward pass each; ``keep``: the directory for the rebuilt tensors.
    """

    variation: Variation | None = None
    rows: bool = True
    row_gradients: bool = False
    keep: Path | None = None


@dataclass
class Replayer:
    """Rebuilds steps of one run with its own settings, ``config`` and ``batching``. Runs one replay at a time."""

    history: History
    run: str
    config: StepConfig
    batching: BatchingSettings
    reward_weights: Mapping[str, float]
    restore_points: RestorePoints
    compute: Compute
    progress: Callable[[str], None]

    @property
    def on_accelerator(self) -> bool:
        """Whether the order of floating-point sums may change from run to run."""
        return resolve_device(self.config.training).type != "cpu"

    async def log(self) -> StepLog:
        """The steps of the run's algorithm."""
        return await read_steps(self.history, self.run, self.config.algorithm.name)

    async def replay(
        self, log: StepLog, steps: Sequence[Step], lineage: int | None, options: ReplayOptions
    ) -> AsyncGenerator[StepReplay, None]:
        """Take consecutive steps of one chain again, starting from the recorded weights before the first one.

        Raises:
            UserError: a record or a restore point is missing.
        """
        prepared = await self.prepare(log, steps[0], lineage)
        between, differing = prepared.steps_between, prepared.differing
        # Without ``aclosing``, an abandoned generator would stay open, with its reader, until garbage collection.
        async with aclosing(self._groups(steps)) as gathered:
            async for step, groups in gathered:
                found = await self._replay_one(prepared, step, groups, options)
                rebuilt = found.rebuilt
                rebuilt = replace(rebuilt, start=prepared.origin, steps_between=between, differing_between=differing)
                yield StepReplay(rebuilt, found.what_if)
                # After the yield: this step lies before the next one, not before itself.
                between += 1
                if rebuilt.verdict == "differs":
                    differing = (*differing, rebuilt.step)

    async def prepare(self, log: StepLog, step: Step, lineage: int | None) -> PreparedPolicy:
        """A policy with the weights that this step starts from.

        Raises:
            UserError: there is no restore point, or a step after it is missing.
        """
        done = step.step - 1
        start = await self._start(log.chain(lineage), done)
        # All computation is in the one compute thread, where torch has as many threads as in the trainer.
        policy = await self.compute(ScratchPolicy, self.config, start.model, start.version.number, start.optimizer)
        prepared = PreparedPolicy(policy, start, max(0, done - start.version.number), ())
        self.progress(f"from {prepared.origin}, over {prepared.steps_between} steps, to step {step.step}")
        if not prepared.steps_between:
            return prepared
        differing = await self._catch_up(policy, steps_between(log, start.version.number + 1, done, lineage))
        return PreparedPolicy(policy, start, prepared.steps_between, tuple(differing))

    async def newest(self) -> tuple[ScratchPolicy, PolicyVersion]:
        """The weights of the newest checkpoint of the surviving chain, else the initial model, and their version.

        Raises:
            UserError: there is neither.
        """
        chain = (await self.log()).chain()
        start = await self._start(chain, chain[-1].last)
        args = (self.config, start.model, start.version.number, start.optimizer)
        return await self.compute(ScratchPolicy, *args), start.version

    async def _start(self, chain: Sequence[ChainSegment], done: int) -> RestorePoint:
        """The nearest restore point at or before step ``done``."""
        # Nearest first, so that few steps are taken again. A running trainer may prune a checkpoint during this.
        for version in usable_restore_points(chain, done, await self.compute(self.restore_points.versions)):
            try:
                return await self.compute(self.restore_points.load, version)
            except CheckpointError as error:
                self.progress(f"checkpoint {version} cannot be used: {error}")
        # Only a chain that starts with step 1 goes back to the initial model.
        if not starts_at_initial_model(chain):
            raise UserError(
                f"expected a checkpoint of step {done} or before to rebuild step {done + 1} from, found none in its "
                "chain; keep more of them (training.keep_checkpoints), or choose a later step"
            )
        return RestorePoint(INITIAL, self.config.initial_model)

    async def _catch_up(self, policy: ScratchPolicy, reports: Sequence[StepReport]) -> list[int]:
        """Take the steps, and return those whose result is not as recorded."""
        differing = []
        async with aclosing(self._groups(reports)) as gathered:
            async for step, groups in gathered:
                batch = recorded_batch(groups, step.micro_batches, self.config.algorithm, policy.limits)
                outcome = await self.compute(policy.take_step, batch)
                recorded = step.digests if isinstance(step, StepReport) else {}
                tensors = await self.compute(tensor_equality, policy.tensors(), recorded, None)
                # A difference is only noted. But if the step cannot be taken, there are no weights to continue from.
                if not outcome.applied:
                    raise UserError(f"expected step {step.step} to be taken as recorded, got: {outcome.problem}")
                pairs = metric_pairs(outcome, step.metrics)
                same = all(tensor.equal for tensor in tensors) and all(pair.equal for pair in pairs)
                self.progress(f"step {step.step}: {'as recorded' if same else 'differs'}")
                differing += [] if same else [step.step]
        return differing

    async def groups(self, step: Step) -> tuple[Group, ...]:
        """The groups of one step."""
        async with aclosing(self._groups([step])) as gathered:
            async for _, groups in gathered:
                return groups
        raise AssertionError("unreachable: every step is delivered")

    def _groups(self, steps: Sequence[Step]) -> AsyncGenerator[tuple[Step, tuple[Group, ...]], None]:
        return read_groups(self.history, self.run, steps, self.reward_weights)

    async def _replay_one(
        self, prepared: PreparedPolicy, step: Step, groups: tuple[Group, ...], options: ReplayOptions
    ) -> StepReplay:
        policy, variation = prepared.policy, options.variation
        batch = recorded_batch(groups, step.micro_batches, self.config.algorithm, policy.limits)
        # Before the step is taken: rows and gradients must be those of the weights that it starts from.
        rows = await self._rows(policy, batch, step, options)
        snapshot = await self.compute(policy.snapshot) if variation else None
        # A step of several updates, or with credit that sequences share, has no single gradient to keep.
        has_gradient = options.keep and policy.learner.algorithm.is_separable
        gradients = await self.compute(policy.gradients, batch) if has_gradient else {}
        # First the step as recorded, then the what-if from the snapshot before it. Then the snapshot after the recorded
        # step is restored, so that the next step continues the recorded chain.
        observed = await self.compute(policy.take_observed_step, batch)
        after = await self.compute(policy.snapshot) if variation else None
        if options.keep is not None:
            kept = {"weights": policy.tensors(), "gradients": gradients, "update": observed.update}
            await self.compute(keep_tensors, options.keep, step.step, kept)
        rebuilt = await self._rebuilt(policy, step, batch, observed, rows)
        if variation is None or snapshot is None or after is None:
            return StepReplay(rebuilt)
        what_if = await self._what_if(policy, snapshot, step, groups, options, observed, rebuilt)
        await self.compute(policy.restore, after, self.config)
        return StepReplay(rebuilt, what_if)

    async def _rows(
        self, policy: ScratchPolicy, batch: StepBatch, step: Step, options: ReplayOptions
    ) -> list[TrajectoryContribution]:
        if not options.rows:
            return []
        if not policy.learner.algorithm.is_separable and not options.row_gradients:
            self.progress(f"trajectories' shares are not shown: those of {policy.config.algorithm.name} do not add up")
            return []
        # The step before a lineage's first one belongs to its parent, but staleness only compares numbers.
        before = PolicyVersion(step.version.lineage, step.step - 1)
        return await self.compute(
            measure_contributions, policy, batch, before, with_gradients=options.row_gradients, progress=self.progress
        )

    async def _rebuilt(
        self,
        policy: ScratchPolicy,
        step: Step,
        batch: StepBatch,
        observed: ObservedStep,
        rows: Sequence[TrajectoryContribution],
    ) -> RebuiltStep:
        refused = not isinstance(step, StepReport)
        digests = step.digests if isinstance(step, StepReport) else {}
        # A refused attempt has the version before it, whose weights are not the attempt's result.
        originals = None if refused else await self.compute(self.restore_points.originals, step.version)
        tensors = await self.compute(tensor_equality, policy.tensors(), digests, originals)
        return RebuiltStep(
            step=step.step,
            version=str(step.version),
            refused=refused,
            start="",
            steps_between=0,
            differing_between=(),
            problem=observed.outcome.problem,
            recorded_problem="" if isinstance(step, StepReport) else step.problem,
            metrics=metric_pairs(observed.outcome, step.metrics),
            tensors=tensors,
            gradient_norms=observed.gradient_norms,
            rows=tuple(rows),
            left_out=batch.left_out,
        )

    async def _what_if(
        self,
        policy: ScratchPolicy,
        snapshot: PolicySnapshot,
        step: Step,
        groups: tuple[Group, ...],
        options: ReplayOptions,
        original: ObservedStep,
        rebuilt: RebuiltStep,
    ) -> WhatIf:
        assert options.variation is not None, "called only with a variation"
        variation = options.variation
        await self.compute(policy.restore, snapshot, variation.config)
        batch = variation.batch(groups, step.micro_batches, self.batching, policy.limits)
        rows = await self._rows(policy, batch, step, options)
        observed = await self.compute(policy.take_observed_step, batch)
        # If a step was not applied, its update is zero and has no direction to compare.
        both = original.outcome.applied and observed.outcome.applied
        now = observed.outcome.metrics
        before = {pair.name: pair.rebuilt for pair in rebuilt.metrics}
        return WhatIf(
            changes=variation.changes,
            problem=observed.outcome.problem,
            metrics={name: (before[name], now[name]) for name in before if name in now},
            update=await self.compute(compare_updates, original.update, observed.update) if both else None,
            rows=tuple(rows),
        )
