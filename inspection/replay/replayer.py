"""The driver of a replay: brings a scratch policy to the moment before a step, and takes the step again.

Invariant a_replay_writes_nothing: it is handed a history and checkpoints to read, and no publisher; all that it ever
writes are tensors, to a directory that the caller names.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from bus.history import History
from consumers.batching.micro_batches import Group
from consumers.batching.settings import BatchingSettings
from consumers.training.model import resolve_device
from consumers.training.ports import Compute
from inspection.replay.comparing import Row, compared_updates, measured_rows, tensor_equality
from inspection.replay.results import Rebuilt, StepReplay, WhatIf, metric_pairs
from inspection.replay.scratch_policy import (
    Moment,
    Recipe,
    ScratchPolicy,
    Start,
    Starts,
    Taken,
    Variation,
    begins_with_the_model,
    candidates,
    keep_tensors,
)
from inspection.replay.steps import (
    Batch,
    ChainSegment,
    Step,
    StepLog,
    as_recorded,
    read_groups,
    read_steps,
    steps_between,
)
from schemas.errors import CheckpointError, UserError
from schemas.identifiers import PolicyVersion
from schemas.reports import StepReport

INITIAL = PolicyVersion(0, 0)


@dataclass(frozen=True)
class Reached:
    """A scratch policy with the weights that a step starts from, and how it came there."""

    policy: ScratchPolicy
    start: Start
    steps_between: int
    differing: tuple[int, ...]

    @property
    def origin(self) -> str:
        """Where it began, in words."""
        return "the initial model" if self.start.version == INITIAL else f"checkpoint {self.start.version}"


@dataclass(frozen=True)
class Wanted:
    """What to look at besides whether a step comes out as recorded. ``keep``: where to write the rebuilt tensors."""

    variation: Variation | None = None
    rows: bool = True
    row_gradients: bool = False
    keep: Path | None = None


@dataclass
class Replayer:
    """Rebuilds steps of one run by its own settings, ``recipe`` and ``batching``. One replay at a time."""

    history: History
    run: str
    recipe: Recipe
    batching: BatchingSettings
    reward_weights: Mapping[str, float]
    starts: Starts
    compute: Compute
    progress: Callable[[str], None]

    @property
    def on_accelerator(self) -> bool:
        """Whether sums may come out in another order each time."""
        return resolve_device(self.recipe.training).type != "cpu"

    async def log(self) -> StepLog:
        """The steps of the run's algorithm."""
        return await read_steps(self.history, self.run, self.recipe.algorithm.name)

    async def replay(
        self, log: StepLog, steps: Sequence[Step], lineage: int | None, wanted: Wanted
    ) -> AsyncGenerator[StepReplay, None]:
        """Take consecutive steps of one chain again, from the first one's recorded past.

        Raises:
            UserError: a record or a start is missing.
        """
        reached = await self.reach(log, steps[0], lineage)
        between, differing = reached.steps_between, reached.differing
        async with aclosing(self._groups(steps)) as gathered:
            async for step, groups in gathered:
                found = await self._replay_one(reached, step, groups, wanted)
                rebuilt = found.rebuilt
                way = replace(rebuilt, start=reached.origin, steps_between=between, differing_between=differing)
                yield StepReplay(way, found.what_if)
                between += 1
                if rebuilt.verdict == "differs":
                    differing = (*differing, rebuilt.step)

    async def reach(self, log: StepLog, step: Step, lineage: int | None) -> Reached:
        """A policy with the weights that this step starts from.

        Raises:
            UserError: there is nothing to start from, or a step between is gone.
        """
        done = step.step - 1
        start = await self._start(log.chain(lineage), done)
        policy = await self.compute(ScratchPolicy, self.recipe, start.model, start.version.number, start.optimizer)
        reached = Reached(policy, start, max(0, done - start.version.number), ())
        self.progress(f"from {reached.origin}, over {reached.steps_between} steps, to step {step.step}")
        if not reached.steps_between:
            return reached
        differing = await self._catch_up(policy, steps_between(log, start.version.number + 1, done, lineage))
        return Reached(policy, start, reached.steps_between, tuple(differing))

    async def newest(self) -> tuple[ScratchPolicy, PolicyVersion]:
        """The weights of the newest checkpoint of the surviving chain, else the initial model, and their version.

        Raises:
            UserError: there is neither.
        """
        chain = (await self.log()).chain()
        start = await self._start(chain, chain[-1].last)
        args = (self.recipe, start.model, start.version.number, start.optimizer)
        return await self.compute(ScratchPolicy, *args), start.version

    async def _start(self, chain: Sequence[ChainSegment], done: int) -> Start:
        """Where the steps after ``done`` finished ones can be rebuilt from."""
        for version in candidates(chain, done, await self.compute(self.starts.versions)):
            try:
                return await self.compute(self.starts.load, version)
            except CheckpointError as error:
                self.progress(f"checkpoint {version} cannot be used: {error}")
        if not begins_with_the_model(chain):
            raise UserError(
                f"expected a checkpoint of step {done} or before to rebuild step {done + 1} from, got none of its "
                "chain; keep more of them (training.keep_checkpoints), or choose a later step"
            )
        return Start(INITIAL, self.recipe.initial_model)

    async def _catch_up(self, policy: ScratchPolicy, reports: Sequence[StepReport]) -> list[int]:
        """Take the steps; those that did not come out as recorded."""
        differing = []
        async with aclosing(self._groups(reports)) as gathered:
            async for step, groups in gathered:
                batch = as_recorded(groups, step.micro_batches, self.recipe.algorithm, policy.limits)
                outcome = await self.compute(policy.take, batch)
                recorded = step.digests if isinstance(step, StepReport) else {}
                tensors = await self.compute(tensor_equality, policy.tensors(), recorded, None)
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

    async def _replay_one(self, reached: Reached, step: Step, groups: tuple[Group, ...], wanted: Wanted) -> StepReplay:
        policy, variation = reached.policy, wanted.variation
        batch = as_recorded(groups, step.micro_batches, self.recipe.algorithm, policy.limits)
        rows = await self._rows(policy, batch, step, wanted)
        moment = await self.compute(policy.moment) if variation else None
        gradients = await self.compute(policy.gradients, batch) if wanted.keep else {}
        taken = await self.compute(policy.take_observed, batch)
        after = await self.compute(policy.moment) if variation else None
        if wanted.keep is not None:
            kept = {"weights": policy.tensors(), "gradients": gradients, "update": taken.update}
            await self.compute(keep_tensors, wanted.keep, step.step, kept)
        rebuilt = await self._rebuilt(policy, step, batch, taken, rows)
        if variation is None or moment is None or after is None:
            return StepReplay(rebuilt)
        what_if = await self._what_if(policy, moment, step, groups, wanted, taken, rebuilt)
        await self.compute(policy.back_to, after, self.recipe)
        return StepReplay(rebuilt, what_if)

    async def _rows(self, policy: ScratchPolicy, batch: Batch, step: Step, wanted: Wanted) -> list[Row]:
        if not wanted.rows:
            return []
        before = PolicyVersion(step.version.lineage, step.step - 1)
        return await self.compute(
            measured_rows, policy, batch, before, with_gradients=wanted.row_gradients, progress=self.progress
        )

    async def _rebuilt(
        self, policy: ScratchPolicy, step: Step, batch: Batch, taken: Taken, rows: Sequence[Row]
    ) -> Rebuilt:
        refused = not isinstance(step, StepReport)
        digests = step.digests if isinstance(step, StepReport) else {}
        originals = None if refused else await self.compute(self.starts.originals, step.version)
        tensors = await self.compute(tensor_equality, policy.tensors(), digests, originals)
        return Rebuilt(
            step=step.step,
            version=str(step.version),
            refused=refused,
            start="",
            steps_between=0,
            differing_between=(),
            problem=taken.outcome.problem,
            recorded_problem="" if isinstance(step, StepReport) else step.problem,
            metrics=metric_pairs(taken.outcome, step.metrics),
            tensors=tensors,
            gradient_norms=taken.gradient_norms,
            rows=tuple(rows),
            left_out=batch.left_out,
        )

    async def _what_if(
        self,
        policy: ScratchPolicy,
        moment: Moment,
        step: Step,
        groups: tuple[Group, ...],
        wanted: Wanted,
        original: Taken,
        rebuilt: Rebuilt,
    ) -> WhatIf:
        assert wanted.variation is not None, "only asked for with a variation"
        variation = wanted.variation
        await self.compute(policy.back_to, moment, variation.recipe)
        batch = variation.batch(groups, step.micro_batches, self.batching, policy.limits)
        rows = await self._rows(policy, batch, step, wanted)
        taken = await self.compute(policy.take_observed, batch)
        both = original.outcome.applied and taken.outcome.applied
        now = taken.outcome.metrics
        before = {pair.name: pair.rebuilt for pair in rebuilt.metrics}
        return WhatIf(
            changes=variation.changes,
            problem=taken.outcome.problem,
            metrics={name: (before[name], now[name]) for name in before if name in now},
            update=await self.compute(compared_updates, original.update, taken.update) if both else None,
            rows=tuple(rows),
        )
