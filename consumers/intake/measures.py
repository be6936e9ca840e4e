"""What the intake measures: rates, lag per length bucket, latency."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from consumers.intake.frontier import Frontier
from schemas.errors import BusError
from schemas.messages.reports import SkipReason
from schemas.messages.trajectories import Trajectory
from schemas.ports.bus import Subscription, TopicPartition
from schemas.settings import LoopSettings

log = structlog.get_logger()

SILENCE_S = 10.0


@dataclass
class IntakeMeasures:
    """Counts since the last summary."""

    loop: LoopSettings
    clock: Callable[[], float]
    records: int = 0
    bytes_read: int = 0
    latency_s: float = 0.0
    trajectories: int = 0
    since: float = field(init=False)
    ask_again_at: float = 0.0
    last_lag: dict[TopicPartition, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = self.clock()

    def observe_record(self, size: int) -> None:
        """A record was read."""
        self.records += 1
        self.bytes_read += size

    def observe_trajectory(self, trajectory: Trajectory) -> None:
        """A trajectory was decoded."""
        self.trajectories += 1
        self.latency_s += max(0.0, self.clock() - trajectory.finished_at)

    def summary(
        self, *, lag: Mapping[TopicPartition, int], pending_bytes: int, skipped: Mapping[str, int], dead_letters: int
    ) -> dict[str, float]:
        """Metrics since the last call; the counters start again. Skips and dead letters count from the start."""
        now = self.clock()
        elapsed = max(1e-3, now - self.since)
        found = {
            "kafka/records_per_s": self.records / elapsed,
            "kafka/bytes_per_s": self.bytes_read / elapsed,
            "kafka/intake_latency_s": self.latency_s / self.trajectories if self.trajectories else 0.0,
            "kafka/pending_bytes": float(pending_bytes),
            "kafka/dead_letters": float(dead_letters),
            "off_policy/dropped": float(skipped.get(SkipReason.STALE, 0) + skipped.get(SkipReason.ORPHAN_LINEAGE, 0)),
            **{f"kafka/lag/bucket_{bucket}": float(count) for bucket, count in self._by_bucket(lag).items()},
            **{f"ledger/skipped/{reason}": float(count) for reason, count in sorted(skipped.items())},
        }
        self.records = self.bytes_read = self.trajectories = 0
        self.latency_s, self.since = 0.0, now
        return found

    async def lag(self, subscription: Subscription, frontier: Frontier) -> dict[TopicPartition, int]:
        """Records on the topic that are not finished, read or not; the last known if nobody answers.

        After a silence the broker is not asked again at once: the trainer must not wait for a display.
        """
        if self.clock() < self.ask_again_at:
            return dict(self.last_lag)
        try:
            ends, positions = await subscription.end_offsets(), await subscription.positions()
        except BusError as error:
            self.ask_again_at = self.clock() + SILENCE_S
            log.warning("lag not known", error=str(error))
            return dict(self.last_lag)
        self.last_lag = {
            tp: max(0, end - positions.get(tp, 0)) + frontier.partition(tp.partition).unfinished()
            for tp, end in ends.items()
        }
        return dict(self.last_lag)

    def _by_bucket(self, lag: Mapping[TopicPartition, int]) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for tp, count in lag.items():
            found[tp.partition // self.loop.shards] += count
        return dict(sorted(found.items()))
