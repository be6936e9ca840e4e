"""Tells when a reader is stuck: its position stands still while the end of the log is ahead.

Pure; times are the caller's, in seconds. Invariants: a paused partition is never stuck; movement of a position clears
that partition only; time in which the broker did not say that there is more to read does not count.
"""

from collections.abc import Collection, Mapping

from schemas.ports.bus import TopicPartition

Positions = Mapping[TopicPartition, int]


class StallWatch:
    """``timeout_s``: how long a partition may be behind without moving. ``rebuilds``: how often to try anew."""

    def __init__(self, timeout_s: float, rebuilds: int) -> None:
        self._timeout_s = timeout_s
        self._rebuilds = rebuilds
        self._positions: dict[TopicPartition, int] = {}
        self._quiet_since: dict[TopicPartition, float] = {}
        self._told_at: float | None = None
        self._behind_since: dict[TopicPartition, float] = {}
        self._rebuilt: dict[TopicPartition, int] = {}

    def note(self, now: float, positions: Positions, paused: Collection[TopicPartition]) -> None:
        """After every read: where it stands."""
        for tp, position in positions.items():
            if position != self._positions.get(tp) or tp in paused:
                self._positions[tp] = position
                self._quiet_since[tp] = now
                self._behind_since.pop(tp, None)
                if tp not in paused:
                    self._rebuilt.pop(tp, None)

    def should_ask(self, now: float) -> bool:
        """Whether it is time to ask the broker: something is quiet, or nothing was asked for long."""
        if self._told_at is None:
            self._told_at = now
        return now - self._told_at >= self._timeout_s or any(
            now - since >= self._timeout_s / 4 for since in self._quiet_since.values()
        )

    def told(self, now: float, ends: Positions) -> list[TopicPartition]:
        """The broker's ends; returns the partitions that are stuck, which are then counted as rebuilt."""
        self._told_at = now
        for tp, position in self._positions.items():
            self._quiet_since[tp] = now
            if ends[tp] > position:
                self._behind_since.setdefault(tp, now)
            else:
                self._behind_since.pop(tp, None)
        return [tp for tp, since in self._behind_since.items() if now - since >= self._timeout_s]

    def rebuilt(self, now: float, stuck: Collection[TopicPartition]) -> None:
        """A new consumer reads on from the same positions."""
        for tp in stuck:
            self._rebuilt[tp] = self._rebuilt.get(tp, 0) + 1
            self._behind_since[tp] = now

    def hopeless(self, stuck: Collection[TopicPartition]) -> list[TopicPartition]:
        """Those of the stuck that no new consumer got moving."""
        return [tp for tp in stuck if self._rebuilt.get(tp, 0) >= self._rebuilds]
