"""Writes the topics and the checkpoint of a made-up run onto a broker: a trainer that steps, skips and crashes once.

The bytes are those of real messages; only what they say is made up.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.completed import completed
from streamrl.bus.port import Bus, Outgoing, Publisher
from streamrl.consumers.ingest.rejections import SkipTally
from streamrl.consumers.training.checkpoints import manifest as stored
from streamrl.schemas.identifiers import PolicyVersion, group_id_of, make_group_id
from streamrl.schemas.reports import RecordRef, SkipReason, SkipRecord, StepReport
from streamrl.schemas.topics import SKIPS, STEPS, TRAJECTORIES, WORK_ORDERS
from streamrl.schemas.trajectories import (
    LengthEstimate,
    Prompt,
    SamplingParams,
    Trajectory,
    WorkOrder,
)

ALGORITHM = "grpo"
GROUP = 8
GROUPS_PER_STEP = 32
SKIPPED = 0.1
UNDONE_STEPS = 3
CHECKPOINT_EVERY = 5


class Moment(NamedTuple):
    """How far the run was after a step: trajectories that it needed, reports, rows, and its checkpoint, if any."""

    trajectories: int
    reports: int
    rows: int
    checkpoint: stored.CheckpointManifest | None


@dataclass
class MadeUpRun:
    """``tokens``: of each completion. The run crashes in its middle, which undoes some steps.

    ``moments``: what was there after each step, as it would have come about.
    """

    bus: Bus
    run: str
    records: int
    partitions: int
    tokens: int = 200
    random: Random = field(default_factory=lambda: Random(0))
    moments: list[Moment] = field(default_factory=list)
    _reports: int = 0
    _rows: int = 0

    async def write(self) -> stored.CheckpointManifest:
        """Write everything; the manifest of the last checkpoint."""
        publisher = await self.bus.publisher("made-up")
        try:
            refs = await self._trajectories(publisher)
            return await self._trainer(publisher, refs)
        finally:
            await publisher.close()

    async def _trajectories(self, publisher: Publisher) -> list[RecordRef]:
        refs: list[RecordRef] = []
        ends: Counter[int] = Counter()
        for number in range(self.records // GROUP):
            prompt = f"made-up/{number}"
            group, partition = make_group_id(prompt, 0), number % self.partitions
            order = self.order(prompt, group, number, partition)
            await publisher.submit(
                Outgoing.of(WORK_ORDERS.full_name(self.run), order, key=group, partition=number % 64)
            )
            for index in range(GROUP):
                trajectory = self.trajectory(prompt, group, index)
                await publisher.submit(
                    Outgoing.of(TRAJECTORIES.full_name(self.run), trajectory, key=group, partition=partition)
                )
                refs.append(RecordRef(trajectory.trajectory_id, partition, ends[partition]))
                ends[partition] += 1
        return refs

    async def _trainer(self, publisher: Publisher, refs: list[RecordRef]) -> stored.CheckpointManifest:
        tally, version, done = SkipTally(1), PolicyVersion(1, 0), Counter[int]()
        await self._report(publisher, version, [])
        size, crash = GROUP * GROUPS_PER_STEP, len(refs) // 2
        begin = 0
        while begin + size <= len(refs) * 0.98:
            if begin >= crash and version.lineage == 1:
                crash = len(refs)
                version, tally = await self._crash(publisher, version, tally, refs[begin : begin + size])
            step = [ref for ref in refs[begin : begin + size] if not await self._maybe_skip(publisher, tally, ref)]
            version = PolicyVersion(version.lineage, version.number + 1)
            await self._report(publisher, version, step)
            for ref in refs[begin : begin + size]:
                done[ref.partition] = max(done[ref.partition], ref.offset + 1)
            begin += size
            saved = self._manifest(version, tally, done) if version.number % CHECKPOINT_EVERY == 0 else None
            self.moments.append(Moment(begin, self._reports, self._rows, saved))
        return self._manifest(version, tally, done)

    async def _crash(
        self, publisher: Publisher, version: PolicyVersion, tally: SkipTally, refs: list[RecordRef]
    ) -> tuple[PolicyVersion, SkipTally]:
        """Steps that no checkpoint followed, and the next lineage's first report."""
        for number in range(1, UNDONE_STEPS + 1):
            await self._report(publisher, PolicyVersion(1, version.number + number), refs[number::UNDONE_STEPS])
        fresh = SkipTally(2, 0, tally.hash, Counter(tally.reasons))
        began = PolicyVersion(2, version.number)
        await self._report(publisher, began, [], parent=version, parent_skips=tally.count)
        return began, fresh

    async def _maybe_skip(self, publisher: Publisher, tally: SkipTally, ref: RecordRef) -> bool:
        if self.random.random() >= SKIPPED:
            return False
        row = SkipRecord(
            algorithm=ALGORITHM,
            reason=self.random.choice([SkipReason.STALE, SkipReason.ZERO_ADVANTAGE, SkipReason.FILTERED]),
            trajectory_id=ref.trajectory_id,
            group_id=group_id_of(ref.trajectory_id),
            partition=ref.partition,
            offset=ref.offset,
            step=0,
            lineage=tally.lineage,
            sequence=tally.next_sequence,
            sent_at=0.0,
        )
        tally.add(row)
        self._rows += 1
        await publisher.submit(Outgoing.of(SKIPS.full_name(self.run), row, key=ref.trajectory_id))
        return True

    async def _report(
        self,
        publisher: Publisher,
        version: PolicyVersion,
        refs: list[RecordRef],
        *,
        parent: PolicyVersion | None = None,
        parent_skips: int = 0,
    ) -> None:
        report = StepReport(
            algorithm=ALGORITHM,
            step=version.number,
            version=version,
            manifest_sha256=None,
            group_ids=tuple(dict.fromkeys(group_id_of(ref.trajectory_id) for ref in refs)),
            micro_batches=tuple(tuple(refs[at : at + 32]) for at in range(0, len(refs), 32)),
            metrics={f"metric/{number}": float(number) for number in range(60)},
            digests={f"model.layers.{number}.weight": f"{number:032x}" for number in range(100)} if refs else {},
            parent=parent,
            parent_skips=parent_skips,
            sent_at=0.0,
        )
        self._reports += 1
        await publisher.submit(Outgoing.of(STEPS.full_name(self.run), report, key=ALGORITHM))

    def _manifest(self, version: PolicyVersion, tally: SkipTally, done: Counter[int]) -> stored.CheckpointManifest:
        return stored.CheckpointManifest(
            run=self.run,
            algorithm=ALGORITHM,
            lineage=version.lineage,
            step=version.number,
            policy_version=version,
            frontier={str(partition): {"low": low, "done": []} for partition, low in done.items()},
            skips=stored.SkipSummary(count=tally.count, hash=tally.hash, by_reason=dict(tally.reasons)),
            config_hash="",
            created_at=0.0,
        )

    def order(self, prompt: str, group: str, position: int, partition: int) -> WorkOrder:
        """Of all samples of a group."""
        return WorkOrder(
            group_id=group,
            worker_id="w",
            position=position,
            prompt=Prompt(prompt_id=prompt, dataset="made-up", content="What is the answer? " * 10),
            estimate=LengthEstimate(median=self.tokens, upper=2 * self.tokens, bucket=0, predictor="made-up"),
            sampling=SamplingParams(max_completion_length=1024),
            num_generations=GROUP,
            sample_indices=tuple(range(GROUP)),
            partition=partition,
            admitted_version=PolicyVersion(1, 0),
            created_at=0.0,
        )

    def trajectory(self, prompt: str, group: str, index: int) -> Trajectory:
        """A sample."""
        tokens = self.tokens
        told: dict[str, Any] = {
            "dataset": "made-up",
            "num_generations": GROUP,
            "prompt_text": "What is the answer? " * 10,
            "completion_text": "The answer is 42. " * (tokens // 5),
            "rewards": {"exact": 1.0},
            "reward_errors": {},
            "worker_id": "w",
            "position": 0,
            "prompt_id": prompt,
        }
        arrays = np.zeros(32, "<i4"), np.zeros(tokens, "<i4"), np.zeros(tokens, "<f4")
        return Trajectory.model_construct(**completed(group, index, *arrays, **told))
