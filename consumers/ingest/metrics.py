"""Metrics of reading: rates, lag by length bucket, latency."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from streamrl.bus.port import Subscription, TopicPartition
from streamrl.consumers.ingest.frontier import Frontier
from streamrl.schemas.errors import BusError
from streamrl.schemas.reports import SkipReason
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Trajectory

log = structlog.get_logger()

LOOK_S = 0.5
"""Seconds between two requests for the ends of the topic: a display shows about one value a second."""
ENDS_RETRY_S = 10.0
"""Seconds before the next request if the broker did not answer: reading must not wait for the sake of a display."""


@dataclass
class IngestMetrics:
    """Counts since the last summary."""

    loop: LoopSettings
    clock: Callable[[], float]
    monotonic: Callable[[], float]
    records: int = 0
    bytes_read: int = 0
    latency_s: float = 0.0
    trajectories: int = 0
    since: float = field(init=False)
    ask_again_at: float = -math.inf
    ends: dict[TopicPartition, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = self.monotonic()

    def observe_record(self, size: int) -> None:
        """Count a record; ``size``: its bytes."""
        self.records += 1
        self.bytes_read += size

    def observe_trajectory(self, trajectory: Trajectory) -> None:
        """Count a decoded trajectory, and its latency."""
        self.trajectories += 1
        self.latency_s += max(0.0, self.clock() - trajectory.finished_at)

    def summary(
        self,
        *,
        lag: Mapping[TopicPartition, int],
        finished: Mapping[TopicPartition, int],
        pending_bytes: int,
        skipped: Mapping[str, int],
        dead_letters: int,
    ) -> dict[str, float]:
        """Metrics since the last call; resets the counters.

        ``finished`` and ``skipped``: since the run started; ``dead_letters``: since this process started.
        """
        now = self.monotonic()
        elapsed = max(1e-3, now - self.since)
        found = {
            "kafka/records_per_s": self.records / elapsed,
            "kafka/bytes_per_s": self.bytes_read / elapsed,
            "kafka/ingest_latency_s": self.latency_s / self.trajectories if self.trajectories else 0.0,
            "kafka/pending_bytes": float(pending_bytes),
            "kafka/dead_letters": float(dead_letters),
            "off_policy/dropped": float(skipped.get(SkipReason.STALE, 0) + skipped.get(SkipReason.ORPHAN_LINEAGE, 0)),
            **{f"kafka/lag/bucket_{bucket}": float(count) for bucket, count in self._by_bucket(lag).items()},
            # From these a display computes the lag between two steps: ends of the topic minus finished records.
            **{f"kafka/finished/bucket_{bucket}": float(count) for bucket, count in self._by_bucket(finished).items()},
            **{f"ledger/skipped/{reason}": float(count) for reason, count in sorted(skipped.items())},
        }
        self.records = self.bytes_read = self.trajectories = 0
        self.latency_s, self.since = 0.0, now
        return found

    async def refresh_ends(self, subscription: Subscription) -> None:
        """Ask the broker for the topic's ends, at most every ``LOOK_S`` seconds. Only the reading task may call it.

        The trainer must not: the broker answers only after a pending read, which it holds while there are no records.
        """
        if self.monotonic() < self.ask_again_at:
            return
        try:
            self.ends = await subscription.end_offsets()
            self.ask_again_at = self.monotonic() + LOOK_S
        except BusError as error:
            self.ask_again_at = self.monotonic() + ENDS_RETRY_S
            log.warning("lag not known", error=str(error))

    def lag(self, positions: Mapping[TopicPartition, int], frontier: Frontier) -> dict[TopicPartition, int]:
        """By partition, records up to the last known ends that are not finished, whether read or not."""
        return {
            tp: max(0, end - positions.get(tp, 0)) + frontier.partition(tp.partition).unfinished()
            for tp, end in self.ends.items()
        }

    def _by_bucket(self, counts: Mapping[TopicPartition, int]) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for tp, count in counts.items():
            found[tp.partition // self.loop.shards] += count  # partition = bucket x shards + shard
        return dict(sorted(found.items()))
