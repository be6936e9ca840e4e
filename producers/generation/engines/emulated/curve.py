"""How long decode steps take, in emulated seconds: one step, many in a row, and how many fit. Pure.

A step of b completions whose caches hold C tokens takes t(b) + c * C; each step then adds b to C, so that k steps take
k * t(b) + c * (k * C + b * k * (k - 1) / 2).
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from producers.generation.engines.emulated.settings import DecodeSettings


@dataclass(frozen=True)
class DecodeCurve:
    """The curve that the settings describe."""

    settings: DecodeSettings

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    def batch_s(self, batch: int) -> float:
        """t(b): a step's seconds with empty caches."""
        known = self._known.get(batch)
        if known is None:
            known = self._known[batch] = self._interpolated(batch) if self.settings.table else self._formula(batch)
        return known

    def leg_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of so many steps in a row with nobody coming or going; ``context``: tokens in all caches before."""
        grown = steps * context + batch * (steps * (steps - 1) // 2)
        return steps * self.batch_s(batch) + self.settings.context_s_per_token * grown

    def steps_by(self, end: float, start: float, batch: int, context: int) -> int:
        """The most steps in a row, the first one begun at ``start``, whose last is over by ``end``."""
        seconds = end - start
        if seconds < 0:
            return 0
        bend = self.settings.context_s_per_token * batch / 2
        slope = max(self.batch_s(batch) + self.settings.context_s_per_token * context - bend, 1e-12)
        steps = int(2 * seconds / (slope + math.sqrt(slope * slope + 4 * bend * seconds)))
        while start + self.leg_s(steps + 1, batch, context) <= end:
            steps += 1
        while steps and start + self.leg_s(steps, batch, context) > end:
            steps -= 1
        return steps

    def steps_until(self, end: float, start: float, batch: int, context: int) -> int:
        """The fewest steps in a row, the first one begun at ``start``, whose last is not over before ``end``."""
        steps = self.steps_by(end, start, batch, context)
        return steps if start + self.leg_s(steps, batch, context) >= end else steps + 1

    def _formula(self, batch: int) -> float:
        return self.settings.step_s * (1 + batch / self.settings.batch_scale)

    def _interpolated(self, batch: int) -> float:
        table = self.settings.table
        if batch <= table[0][0] or len(table) == 1:
            return table[0][1]
        upper = min(bisect_left(table, batch, key=lambda point: point[0]), len(table) - 1)
        (before, low), (after, high) = table[upper - 1], table[upper]
        return low + (high - low) * (batch - before) / (after - before)
