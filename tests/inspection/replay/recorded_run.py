"""Runs recorded by a real trainer on a bus in memory, some with a crash in the middle, and replayers over them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.bus.history import BusHistory
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.policy import ComputeThread
from streamrl.consumers.training.session import MakeReport, TrainerSession
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.inspection.replay.replayer import Replayer, ReplayOptions
from streamrl.inspection.replay.results import StepReplay
from streamrl.inspection.replay.scratch_policy import StepConfig, StoredRestorePoints
from streamrl.inspection.replay.steps import steps_between
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RefusedStep, StepReport
from streamrl.schemas.trajectories import FinishReason, Trajectory, VersionSpan
from tests.consumers.training.factories import VOCABULARY, make_trajectory
from tests.consumers.training.trainer_harness import LOOP, RUN, TRAINING, TrainerHarness
from tests.progress import within

BATCHING = BatchingSettings(token_budget=24)
KEPT = TRAINING.model_copy(update={"checkpoint_every": 3, "keep_checkpoints": 20})


class Crash(Exception):
    """Stands for SIGKILL: the trainer gets no chance to do anything more."""


def crash_after(step: int) -> Callable[[Failpoint], None]:
    """Die as soon as so many steps were taken."""
    seen: list[Failpoint] = []

    def failpoint(point: Failpoint) -> None:
        seen.append(point)
        if seen.count(Failpoint.METRICS_WRITTEN) == step:
            raise Crash

    return failpoint


def members(number: int, step: int, size: int = 3) -> list[Trajectory]:
    """A group whose samples differ in tokens, lengths, rewards and versions; some are cut off at the limit."""
    random = np.random.default_rng(1000 + number)
    found = []
    for index in range(size):
        length = int(random.integers(2, 9))
        old, new = PolicyVersion(1, max(step - 2, 0)), PolicyVersion(1, max(step - 1, 0))
        spans = (VersionSpan(version=old, start=0, end=1), VersionSpan(version=new, start=1, end=length))
        trajectory = make_trajectory(
            f"p/{number}/0",
            index,
            num_generations=size,
            reward=float(random.integers(0, 4)),
            tokens=random.integers(1, VOCABULARY, size=length).tolist(),
            finish_reason=FinishReason.LENGTH if length == 8 else FinishReason.STOP,
            created_at=float(number),
        )
        noise = -random.uniform(2.8, 3.5, size=length)
        found.append(trajectory.replace(logprobs=noise.astype("<f4"), version_spans=spans))
    return found


@dataclass
class Recorded:
    """A run that has ended."""

    harness: TrainerHarness
    algorithm: AlgorithmSettings
    training: TrainingSettings

    def config(self) -> StepConfig:
        return StepConfig(self.algorithm, self.training, LOOP.max_completion_length, str(self.harness.model_path))

    @asynccontextmanager
    async def replayer(self, **changes: Any) -> AsyncIterator[Replayer]:
        compute = ComputeThread(1)
        self.harness.bus.arrived = asyncio.Condition()  # of this test's event loop
        options: dict[str, Any] = {
            "history": BusHistory(self.harness.bus),
            "run": RUN,
            "config": self.config(),
            "batching": BATCHING,
            "reward_weights": {},
            "restore_points": StoredRestorePoints(self.harness.store(), self.harness.root / "weights"),
            "compute": compute,
            "progress": lambda line: None,
        }
        try:
            yield Replayer(**(options | changes))
        finally:
            compute.close()

    async def replays(self, first: int, last: int, lineage: int | None = None, **options: Any) -> list[StepReplay]:
        async with self.replayer() as replayer:
            log = await replayer.log()
            steps = steps_between(log, first, last, lineage)
            return [found async for found in replayer.replay(log, steps, lineage, ReplayOptions(**options))]


announce = TrainerSession.announce


async def announced_at_once(session: TrainerSession, report: StepReport | RefusedStep | MakeReport) -> None:
    """Announce, and wait until that is done."""
    await announce(session, report)
    await session.announcements.settled()


async def record(
    root: Path,
    model_path: Path,
    groups: Sequence[Sequence[Trajectory]],
    *,
    steps: int | None = None,
    crash_at: int | None = None,
    **changes: Any,
) -> Recorded:
    """Train over a static topic until the last step; with a crash, by two lineages."""
    harness = TrainerHarness.make(root, model_path)
    for group in groups:
        await harness.publish(*group)
    steps = steps or len(groups) // LOOP.groups_per_step
    training = changes.pop("training", KEPT).model_copy(update={"max_steps": steps})
    recorded = Recorded(harness, changes.pop("algorithm", AlgorithmSettings()), training)
    options = {"algorithm": recorded.algorithm, "training": training, **changes}
    if crash_at is not None:
        with pytest.raises(Crash), pytest.MonkeyPatch.context() as patch:
            # Else the crash may come before the last step is announced, or not.
            patch.setattr(TrainerSession, "announce", announced_at_once)
            await harness.trainer(**options, failpoint=crash_after(crash_at)).run(asyncio.Event())
    await within(harness.trainer(**options).run(asyncio.Event()), 60)
    return recorded


def usual_groups(steps: int) -> list[list[Trajectory]]:
    """Enough groups for so many steps, each sampled by the weights of the two steps before its own."""
    return [members(number, number // LOOP.groups_per_step) for number in range(steps * LOOP.groups_per_step)]
