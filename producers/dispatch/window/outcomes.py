"""Holds the predicted finish of each window against the actual one, for logs and displays. Pure; times in seconds."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Window:
    began_at: float
    predicted_s: float
    missing: int


class Outcomes:
    """``predicted_s`` and ``actual_s``: of the window that ended last; none before the first."""

    def __init__(self) -> None:
        self._window_of: dict[str, _Window] = {}
        self._newest: _Window | None = None
        self.predicted_s: float | None = None
        self.actual_s: float | None = None

    def begin(self, groups: Iterable[str], now: float) -> None:
        """A window of these groups was drawn; its plan follows."""
        names = list(groups)
        self._newest = _Window(now, 0.0, len(names))
        self._window_of.update(dict.fromkeys(names, self._newest))

    def planned(self, predicted_s: float) -> None:
        """What the first plan of the newest window says; later ones know more, and are no prediction."""
        if self._newest is not None and not self._newest.predicted_s:
            self._newest.predicted_s = predicted_s

    def over(self, group_id: str, now: float) -> None:
        """Nothing is missing of a group any more."""
        window = self._window_of.pop(group_id, None)
        if window is not None:
            window.missing -= 1
            if not window.missing:
                self.predicted_s, self.actual_s = window.predicted_s, now - window.began_at
