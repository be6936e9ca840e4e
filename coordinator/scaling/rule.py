"""When a worker is added and when one leaves (StreamRL, 2025, section 4.2, dynamic adjustment). Pure.

delta = seconds that generation of a step takes longer than its training. One more worker is wanted once delta is at
least what it is predicted to save; the paper only adds. One leaves when generation would still be the shorter stage
without it, by a margin and for several steps in a row.

Invariants: a_worker_is_added_only_when_it_saves_no_more_than_is_missing; what_was_added_does_not_leave_at_once.
"""

from dataclasses import dataclass, field

from coordinator.scaling.settings import ScalingSettings


@dataclass(frozen=True, slots=True)
class Balance:
    """One optimizer step with so many workers, in seconds; ``gain_s``: what one more is predicted to save."""

    generate_s: float
    train_s: float
    workers: int
    gain_s: float

    @property
    def delta_s(self) -> float:
        """By how much generation is the longer stage."""
        return self.generate_s - self.train_s

    @property
    def with_one_fewer_s(self) -> float:
        """Generation if all of it were shared by one worker fewer."""
        return self.generate_s * self.workers / (self.workers - 1) if self.workers > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Fewest and most workers."""

    fewest: int
    most: int

    def nearest(self, workers: int) -> int:
        """The allowed number that is nearest."""
        return max(self.fewest, min(self.most, workers))


@dataclass(frozen=True, slots=True)
class Decision:
    """So many workers are wanted from now on."""

    workers: int
    reason: str


@dataclass
class Rule:
    """Judges steps one after the other."""

    bounds: Bounds
    settings: ScalingSettings
    _spare_steps: int = field(default=0, init=False)

    def judge(self, balance: Balance) -> Decision | None:
        """What follows from a step; none if nothing changes."""
        spare = balance.with_one_fewer_s <= balance.train_s * (1 - self.settings.margin)
        self._spare_steps = self._spare_steps + 1 if spare else 0
        if balance.workers < self.bounds.most and balance.delta_s >= balance.gain_s > 0:
            return self._decided(
                balance, 1, f"saves {balance.gain_s:.1f} s of the {balance.delta_s:.1f} s that are missing"
            )
        if balance.workers > self.bounds.fewest and self._spare_steps >= self.settings.idle_steps:
            return self._decided(
                balance, -1, f"without it {balance.with_one_fewer_s:.1f} s, training takes {balance.train_s:.1f} s"
            )
        return None

    def _decided(self, balance: Balance, change: int, why: str) -> Decision:
        self._spare_steps = 0
        act = "one more worker" if change > 0 else "one worker fewer"
        return Decision(balance.workers + change, f"generation takes {balance.generate_s:.1f} s; {act}: {why}")
