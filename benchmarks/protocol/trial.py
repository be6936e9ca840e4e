"""One trainer over a topic that holds all its trajectories from the start, so that it never waits for generation."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.protocol.variants import Variant
from deploy.bus.kafka_bus import KafkaBus
from deploy.bus.settings import KafkaSettings
from deploy.bus.topic_admin import apply_topics
from deploy.inspection.segments.history import SegmentHistory
from deploy.runs.children import ONE_THREAD
from schemas.ports.bus import Outgoing, Record
from schemas.wire.topics import TRAJECTORIES

TIMEOUT_S = 300
WARM_UP_STEPS = 5
"""The first steps of a process are slower, whatever the protocol."""


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


def step_seconds(
    recording: Recording, variant: Variant, address: str, folder: Path, run: str, steps: int, extra: Sequence[str] = ()
) -> list[float]:
    """Seconds from one finished step to the next, everything included, without the first few.

    Raises:
        RuntimeError: the trainer did not take its steps.
    """
    asyncio.run(recording.copy_to(address, run))
    command = [
        *(sys.executable, "-m", "deploy.cli.app", "trainer", str(recording.config)),
        f"--kafka.bootstrap_servers={address}",
        f"--run.name={run}",
        f"--run.directory={folder}",
        f"--training.max_steps={steps}",
        "--loop.max_staleness=100000",
        *variant.overrides,
        *extra,
    ]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    metrics = folder / run / "metrics.jsonl"
    times = [json.loads(line)["time"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if done.returncode or len(times) != steps:
        raise RuntimeError(f"expected {steps} steps of {variant.name!r}, got {len(times)}: {done.stdout[-2000:]}")
    return [later - earlier for earlier, later in pairwise(times)][WARM_UP_STEPS:]


def _environment() -> dict[str, str]:

    return {**os.environ, **ONE_THREAD}
