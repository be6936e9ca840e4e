"""The trainer's own parts with its protocol behind a switch, so that both ways share a process and the machine's mood.

On: as in every run. Off: the report goes out as a plain record without offsets, no checksum of any tensor is made, and
a checkpoint is what other trainers write: model and optimizer, neither verified nor forced to the disk.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from streamrl.bus.port import (
    Bus,
    GroupMember,
    Outgoing,
    Publisher,
    Subscription,
    TopicPartition,
    TransactionalPublisher,
)
from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.policy import TrainedPolicy
from streamrl.consumers.training.ports import (
    OpenPolicy,
    Policy,
    RestoredCheckpoint,
    StepOutcome,
    WeightSnapshot,
)
from streamrl.consumers.training.session import TrainerContext
from streamrl.schemas.identifiers import PolicyVersion

BLOCK_STEPS = 2
"""Steps from one turn of the switch to the next: so short a time that a shared machine keeps its pace in it."""


@dataclass
class Switch:
    """``phase``: 0 or 1; what is on at a step in the one is off in the other. ``step``: the newest optimizer step."""

    phase: int
    step: int = 0

    def is_on(self, step: int) -> bool:
        """Whether the protocol is followed in the time of a step."""
        return (step // BLOCK_STEPS + self.phase) % 2 == 0


def switched(context: TrainerContext, phase: int, folder: Path) -> TrainerContext:
    """The same trainer's context with the switch in it. ``folder``: for plain checkpoints."""
    switch, run = Switch(phase), context.run
    open_policy: OpenPolicy = context.parts.open_policy

    def open_switched(restored: RestoredCheckpoint | None) -> Policy:
        policy = open_policy(restored)
        assert isinstance(policy, TrainedPolicy), "there are weights to keep"
        return SwitchedPolicy(policy, switch, folder)

    return replace(
        context,
        run=replace(run, bus=SwitchedBus(run.bus, switch)),
        parts=replace(context.parts, open_policy=open_switched),
    )


@dataclass
class SwitchedPolicy:
    """``consumers.training.ports.Policy``; tells the switch of each step."""

    policy: TrainedPolicy
    switch: Switch
    folder: Path

    @property
    def step(self) -> int:
        """See the port."""
        return self.policy.step

    @property
    def limits(self) -> ModelLimits:
        """See the port."""
        return self.policy.limits

    def accumulate(self, batch: MicroBatch) -> None:
        """See the port."""
        self.policy.accumulate(batch)

    def discard(self) -> None:
        """See the port."""
        self.policy.discard()

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """See the port."""
        return self.policy.speed_metrics(tokens, seconds)

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """See the port."""
        outcome = self.policy.finish_step(reward_deviation)
        self.switch.step = self.policy.step
        return outcome

    def snapshot(self) -> WeightSnapshot:
        """See the port; no digests of it while the switch is off."""
        return SwitchedSnapshot(self.policy.snapshot(), self.switch.is_on(self.step))

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """See the port."""
        if self.switch.is_on(self.step):
            return self.policy.checkpoint(manifest, reader, report, lineage)
        return self._plain_checkpoint()

    def _plain_checkpoint(self) -> str:
        """As transformers' Trainer keeps them, the newest only."""
        shutil.rmtree(self.folder, ignore_errors=True)
        learner = self.policy.learner
        learner.model.save_pretrained(self.folder)
        torch.save(learner.optimizer_tensors(), self.folder / "optimizer.pt")
        torch.save(torch.get_rng_state(), self.folder / "rng_state.pth")
        return str(self.folder)


@dataclass(frozen=True)
class SwitchedSnapshot:
    """``consumers.training.ports.WeightSnapshot``."""

    snapshot: WeightSnapshot
    is_on: bool

    def export(self, version: PolicyVersion, now: float) -> str:
        """See the port."""
        return self.snapshot.export(version, now)

    def digests(self) -> dict[str, str]:
        """See the port."""
        return self.snapshot.digests() if self.is_on else {}


@dataclass
class SwitchedBus:
    """``bus.port.Bus`` whose transactions are plain records while the switch is off."""

    bus: Bus
    switch: Switch

    async def publisher(self, client_id: str) -> Publisher:
        """See the port."""
        return await self.bus.publisher(client_id)

    async def subscribe(self, topics: Iterable[str], **how: Any) -> Subscription:
        """See the port."""
        return await self.bus.subscribe(topics, **how)

    async def join(self, topic: str, *, group_id: str, client_id: str) -> GroupMember:
        """See the port."""
        return await self.bus.join(topic, group_id=group_id, client_id=client_id)

    async def group_offsets(self, topic: str, *, group_id: str) -> dict[TopicPartition, int]:
        """See the port."""
        return await self.bus.group_offsets(topic, group_id=group_id)

    async def transactional(self, transactional_id: str) -> TransactionalPublisher:
        """See the port."""
        inside = await self.bus.transactional(transactional_id)
        return SwitchedPublisher(inside, await self.bus.publisher(f"{transactional_id}.plain"), self.switch)


@dataclass
class SwitchedPublisher:
    """``bus.port.TransactionalPublisher``. ``outside``: where records go without a transaction."""

    inside: TransactionalPublisher
    outside: Publisher
    switch: Switch

    async def commit(
        self,
        records: Sequence[Outgoing],
        *,
        offsets: Mapping[TopicPartition, int] | None = None,
        group_id: str | None = None,
    ) -> None:
        """See the port. A step is announced in the time of the next one."""
        if self.switch.is_on(self.switch.step + 1):
            await self.inside.commit(records, offsets=offsets, group_id=group_id)
            return
        for record in records:
            await self.outside.publish(record)

    async def close(self) -> None:
        """See the port."""
        await self.outside.close()
        await self.inside.close()
