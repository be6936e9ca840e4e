"""One trainer over a topic that holds all its trajectories from the start, so that it never waits for generation."""

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.paired import Pair
from benchmarks.protocol.switched import BLOCK_STEPS
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, Record
from streamrl.inspection.export import SegmentHistory
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.settings.placement import ProcessPlace

TIMEOUT_S = 300
WARM_UP_BLOCKS = 20
"""An even number, so that the first of two blocks is one with the switch on, in a run of phase 0."""
CHECKPOINT_S = 0.001
"""What lies where a checkpoint would be takes less than this if none is due."""


@dataclass(frozen=True)
class Recording:
    """A demo run whose trajectories are trained again: its settings, and every record of its topic."""

    name: str
    config: Path
    partitions: int
    records: list[Record]

    @classmethod
    async def of(cls, run: str, config: Path, export: Path, partitions: int) -> "Recording":
        """Read what ``streamrl export`` wrote."""
        history = SegmentHistory(export)
        records = [record async for record in history.records(TRAJECTORIES.full_name(run))]
        return cls(run, config, partitions, records)

    async def copy_to(self, address: str, run: str) -> None:
        """Create the topics of another run on a broker and publish the trajectories there."""
        kafka = KafkaSettings(bootstrap_servers=address)
        await apply_topics(address, run, self.partitions, 1, kafka)
        publisher = await KafkaBus(kafka).publisher("protocol-bench")
        try:
            topic = TRAJECTORIES.full_name(run)
            sent = [
                await publisher.submit(Outgoing(topic, record.value, record.key, record.partition, record.headers))
                for record in self.records
            ]
            await asyncio.gather(*sent)
        finally:
            await publisher.close()


@dataclass(frozen=True)
class ProcessorTime:
    """Of one kind, the clock's or the processor's: seconds of each step but its checkpoint, and of each checkpoint."""

    steps: list[float]
    checkpoints: list[float]

    @classmethod
    def of(cls, after_step: Sequence[float], checkpoint: Sequence[float]) -> "ProcessorTime":
        """From what was spent after each step, and on its checkpoint; the first step is left out."""
        steps = [
            later - earlier - kept for (earlier, later), kept in zip(pairwise(after_step), checkpoint[1:], strict=True)
        ]
        return cls([0.0, *steps], [kept for kept in checkpoint if kept > CHECKPOINT_S])

    def block(self, number: int) -> float:
        """A step's mean in a block of the switch; steps are counted from one."""
        return statistics.fmean(self.steps[number * BLOCK_STEPS - 1 : (number + 1) * BLOCK_STEPS - 1])


def train(
    recording: Recording, phase: int, address: str, folder: Path, run: str, steps: int
) -> tuple[ProcessorTime, ProcessorTime]:
    """Train a recording with the switch in the trainer; by the clock, and by the processor.

    Raises:
        RuntimeError: it did not take its steps.
    """
    asyncio.run(recording.copy_to(address, run))
    marks = folder / f"{run}.json"
    command = [
        *(sys.executable, "-m", "benchmarks.protocol.trainer", str(recording.config), str(phase), str(marks)),
        f"--kafka.bootstrap_servers={address}",
        f"--run.name={run}",
        f"--run.directory={folder}",
        f"--training.max_steps={steps}",
    ]
    environment = {**os.environ, **ProcessPlace().environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    taken = json.loads(marks.read_text()) if marks.exists() else []
    if done.returncode or len(taken) != steps:
        raise RuntimeError(f"expected {steps} steps of {run}, got {len(taken)}: {(done.stdout + done.stderr)[-2000:]}")
    clock, processor, checkpoint_clock, checkpoint_processor = zip(*taken, strict=True)
    return ProcessorTime.of(clock, checkpoint_clock), ProcessorTime.of(processor, checkpoint_processor)


def switch_pairs(on_first: ProcessorTime, off_first: ProcessorTime) -> list[Pair]:
    """The same trajectories trained in two runs, whose switches stood against each other.

    A pair is two blocks, one after the other, in both runs: what the blocks hold weighs the same in both kinds, and so
    does the pace of either run.
    """
    blocks = (len(on_first.steps) + 1) // BLOCK_STEPS
    return [
        Pair(
            math.sqrt(off_first.block(block) * on_first.block(block + 1)),
            math.sqrt(on_first.block(block) * off_first.block(block + 1)),
        )
        for block in range(WARM_UP_BLOCKS, blocks - 1, 2)
    ]
