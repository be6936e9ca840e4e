"""Numbers over optimizer steps, few enough to draw: when there are too many, neighbours are joined into their mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Row = dict[str, float | None]


@dataclass
class Curves:
    """At most ``most`` points, each the mean of ``stride`` steps, so that all of the past stays in view."""

    names: Sequence[str]
    most: int = 400
    stride: int = 1
    rows: list[Row] = field(default_factory=list)
    _pending: list[Row] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step. One that was seen before takes the place of it and of all after it: its trainer was resumed."""
        while self._pending and (self._pending[-1]["step"] or 0) >= step:
            self._pending.pop()
        while self.rows and (self.rows[-1]["step"] or 0) >= step:
            self.rows.pop()
        self._pending.append({"step": float(step), **{name: values.get(name) for name in self.names}})
        if len(self._pending) >= self.stride:
            self.rows.append(_mean(self._pending))
            self._pending.clear()
        if len(self.rows) > self.most:
            self.rows = [_mean(self.rows[begin : begin + 2]) for begin in range(0, len(self.rows), 2)]
            self.stride *= 2

    def columns(self) -> dict[str, list[float | None]]:
        """By name, and the steps as ``step``; what is not a whole point yet is the last one."""
        rows = [*self.rows, *([_mean(self._pending)] if self._pending else [])]
        return {name: [_short(row[name]) for row in rows] for name in ("step", *self.names)}


def _mean(rows: Sequence[Row]) -> Row:
    mean: Row = {}
    for name in rows[0]:
        known = [value for row in rows if (value := row[name]) is not None]
        mean[name] = sum(known) / len(known) if known else None
    mean["step"] = rows[-1]["step"]
    return mean


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}") if abs(value) < 1e4 else round(value, 1)
