"""What following costs: a made-up run is revealed bit by bit, and looked at each time by a follower and by an audit."""

import asyncio
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.audit.made_up import GROUP, MadeUpRun, Moment
from streamrl.bus.history import BusHistory, Extent
from streamrl.bus.memory import MemoryBus
from streamrl.bus.port import TopicPartition
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.inspection.audit.audit import audit
from streamrl.inspection.audit.follower import AuditFollower
from streamrl.inspection.audit.state import AuditStateFile, FollowedRun
from streamrl.schemas.topics import CATALOGUE, SKIPS, STEPS, TRAJECTORIES

RUN = "made-up"
PARTITIONS = 8
TOKENS = 200
AHEAD = 100
"""Groups that are on the topic before the trainer comes to them."""


@dataclass(frozen=True)
class _RevealedSoFar(BusHistory):
    """A history that ends where the run was at some moment; ``ends``: by topic and partition."""

    ends: dict[TopicPartition, int] = field(default_factory=dict)

    async def extents(self, *topics: str) -> dict[TopicPartition, Extent]:
        held = await super().extents(*topics)
        return {tp: Extent(extent.first, min(extent.end, self.ends.get(tp, extent.end))) for tp, extent in held.items()}

    def reveal(self, moment: Moment) -> None:
        """Show what was there then."""
        # Trajectories go to the partitions group by group, in turn.
        rounds, rest = divmod(moment.trajectories // GROUP + AHEAD, PARTITIONS)
        for partition in range(PARTITIONS):
            self.ends[TopicPartition(TRAJECTORIES.full_name(RUN), partition)] = GROUP * (rounds + (partition < rest))
        self.ends[TopicPartition(STEPS.full_name(RUN), 0)] = moment.reports
        self.ends[TopicPartition(SKIPS.full_name(RUN), 0)] = moment.rows


@dataclass
class _Looks:
    """Processor seconds of each look, of the follower and of the whole audit."""

    follower: list[float]
    whole: list[float]


def following(records: int, looks: int) -> dict[str, Any]:
    """Figures of a follower that looks so often while so many trajectories come in."""
    return asyncio.run(_following(records, looks))


async def _following(records: int, looks: int) -> dict[str, Any]:
    bus = MemoryBus()
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(RUN), topic.partition_count(PARTITIONS))
    run = MadeUpRun(bus, RUN, records, PARTITIONS, TOKENS)
    await run.write()
    history, visible = _RevealedSoFar(bus), list[CheckpointManifest]()
    known, taken = FollowedRun(RUN), _Looks([], [])
    follower = AuditFollower(history, lambda: visible, known)
    every = -(-len(run.moments) // looks)
    for at, moment in enumerate(run.moments):
        if moment.checkpoint is not None:
            visible[:] = [*visible[-1:], moment.checkpoint]
        if at % every != every - 1 and at != len(run.moments) - 1:
            continue
        history.reveal(moment)
        before = time.process_time()
        report = await follower.advance()
        taken.follower.append(time.process_time() - before)
        # Every fifth is enough of what takes longer each time.
        if len(taken.follower) % 5 == 0:
            before = time.process_time()
            whole = await audit(history, RUN, lambda: list(visible))
            taken.whole.append(time.process_time() - before)
            assert whole.timed(0) == report.timed(0), "the follower and the audit agree"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "audit.sqlite"
        file = AuditStateFile(path)
        before = time.process_time()
        file.save(known)
        saved, size = time.process_time() - before, path.stat().st_size
        file.close()
        live, memory = len(known.index.trajectories.records), _memory_of(path)
    return {
        "looks": len(taken.follower),
        "follower_cpu_s_per_100k": round(sum(taken.follower) * 100_000 / records, 2),
        "follower_look_cpu_ms": _spread(taken.follower),
        "whole_look_cpu_ms": _spread(taken.whole),
        "whole_cpu_s_per_100k_if_it_looked_as_often": round(
            sum(taken.whole) / len(taken.whole) * len(taken.follower) * 100_000 / records, 2
        ),
        "not_settled": live,
        "state_bytes_per_record": round(size / records, 1),
        "memory_bytes_per_record": round(memory / records, 1),
        "save_all_cpu_s": round(saved, 2),
    }


def _memory_of(path: Path) -> int:
    """Bytes that a follower holds which begins with this state."""
    gc.collect()
    tracemalloc.start()
    file = AuditStateFile(path)
    known = file.load(RUN)
    file.close()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert known is not None
    return size


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * each for each in seconds)
    values = {"median": ordered[len(ordered) // 2], "max": ordered[-1], "last": 1000 * seconds[-1]}
    return {name: round(value, 1) for name, value in values.items()}
