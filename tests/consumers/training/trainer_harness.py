"""A trainer on a bus in memory, and hand-published trajectories."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.bus.memory import MemoryBus
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.identity_store import IdentityFile
from streamrl.consumers.training.policy import ComputeThread, PolicyPaths, TrainedPolicy
from streamrl.consumers.training.session import LearningSettings, TrainedRun, TrainerContext, TrainerParts
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.consumers.training.trainer import Trainer
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RefusedStep, SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from tests.consumers.training.factories import VOCABULARY, make_trajectory
from tests.fakes.one_shard import OneShardLoop
from tests.fakes.topics import create_topics, send
from tests.progress import patience, within

RUN = "r"
LOOP = OneShardLoop(
    groups_per_step=2, num_generations=2, max_staleness=4, max_completion_length=8, bucket_boundaries=(4,)
)
TRAINING = TrainingSettings(
    learning_rate=1e-2, max_steps=100, checkpoint_every=2, threads=1, weight_decay=0.01, keep_weight_versions=20
)


@dataclass
class TrainerHarness:
    """Trainers of one run, and what they wrote. ``root``: the run's directory."""

    bus: MemoryBus
    root: Path
    model_path: Path

    @classmethod
    def make(cls, root: Path, model_path: Path) -> "TrainerHarness":
        return cls(create_topics(MemoryBus(), RUN, LOOP.trajectory_partitions), root, model_path)

    def trainer(self, **changes: Any) -> Trainer:
        """A trainer in this directory, wired as a process would be; ``changes``: see ``context``."""
        return Trainer(self.context(**changes))

    def context(self, **changes: Any) -> TrainerContext:
        """What a trainer in this directory is given. ``changes``: fields of the context or of its groups."""
        training = changes.get("training", TRAINING)
        algorithm = changes.get("algorithm", AlgorithmSettings())
        storage = open_storage(self.root / "checkpoints", self.root / "cache")

        def open_policy(restored: Any) -> TrainedPolicy:
            paths = PolicyPaths(str(self.model_path), storage, self.root / "weights")
            return TrainedPolicy(paths, algorithm, training, LOOP.max_completion_length, restored)

        options: dict[str, Any] = {
            "bus": self.bus,
            "name": RUN,
            "loop": LOOP,
            "algorithm": algorithm,
            "training": training,
            "ingest": IngestSettings(),
            "batching": BatchingSettings(token_budget=24),
            "reward_weights": {},
            "open_policy": open_policy,
            "open_compute": lambda: ComputeThread(1),
            "checkpoints": CheckpointStore(storage, training.keep_checkpoints),
            "directory": self.root,
            "weights": self.root / "weights",
            "identity": IdentityFile(self.root),
        }
        options |= changes

        def of(kind: type[Any]) -> dict[str, Any]:
            return {each.name: options.pop(each.name) for each in fields(kind) if each.name in options}

        learning, run = LearningSettings(**of(LearningSettings)), TrainedRun(**of(TrainedRun))
        return TrainerContext(learning, run, TrainerParts(**of(TrainerParts)), **options)

    def store(self) -> CheckpointStore:
        """The checkpoints, as another process would see them."""
        return CheckpointStore(open_storage(self.root / "checkpoints", self.root / "cache"), 2)

    async def publish(self, *trajectories: Trajectory) -> None:
        for trajectory in trajectories:
            partition = int(trajectory.group_id.split("/")[1]) % LOOP.trajectory_partitions
            await send(self.bus, RUN, TRAJECTORIES, trajectory, trajectory.group_id, partition)

    async def publish_group(self, number: int, rewards: Sequence[float] = (1.0, 0.0), **changes: Any) -> None:
        await self.publish(*group(number, rewards, **changes))

    def messages(self, topic: str) -> list[Any]:
        return [record.message() for record in self.bus.log(f"{RUN}.{topic}").partitions[0] if record.value]

    def reports(self) -> list[StepReport]:
        """Each version once, as readers see them."""
        found = [message for message in self.messages(STEPS.name) if isinstance(message, StepReport)]
        return list({report.version: report for report in found}.values())

    def refused(self) -> list[RefusedStep]:
        return [message for message in self.messages(STEPS.name) if isinstance(message, RefusedStep)]

    def skips(self) -> list[SkipRecord]:
        return self.messages(SKIPS.name)

    def trained_ids(self, lineage: int) -> list[str]:
        return [
            ref.trajectory_id
            for report in self.reports()
            if report.version.lineage == lineage
            for batch in report.micro_batches
            for ref in batch
        ]

    @asynccontextmanager
    async def running(self, trainer: Trainer) -> AsyncIterator[None]:
        """The trainer runs within the block; afterwards it is stopped, as by SIGTERM."""
        stop = asyncio.Event()
        task = asyncio.create_task(trainer.run(stop))
        waiting = asyncio.create_task(self.until(lambda: task.done() or bool(self.reports())))
        await waiting
        try:
            yield
        finally:
            stop.set()
            await within(task, 20)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with patience(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_version(self, lineage: int, number: int) -> None:
        wanted = PolicyVersion(lineage, number)
        await self.until(lambda: any(report.version == wanted for report in self.reports()))


def group(number: int, rewards: Sequence[float] = (1.0, 0.0), **changes: Any) -> list[Trajectory]:
    """A group whose tokens are drawn from its number, sampled by the weights of the step that will train it."""
    random = np.random.default_rng(number)
    tokens = random.integers(1, VOCABULARY, size=int(random.integers(2, 9))).tolist()
    version = PolicyVersion(1, number // LOOP.groups_per_step)
    return [
        make_trajectory(
            f"p/{number}/0",
            index,
            num_generations=len(rewards),
            reward=reward,
            created_at=float(number),
            **({"tokens": tokens, "version": version} | changes),
        )
        for index, reward in enumerate(rewards)
    ]
