"""A metric over the optimizer steps, as columns with bounds at the left and steps below."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.text import Text

from deploy.top.drawing.blocks import ACCENT, GRID, MUTED, columns_of, fitted, inked, lines, nothing, resampled, short

MARGIN = 6
Draw = Callable[[Mapping[str, Any], int, int], Text]


def curve(name: str, style: str = ACCENT) -> Draw:
    """Draws the metric of this name."""

    def draw(data: Mapping[str, Any], width: int, height: int) -> Text:
        values, steps = data["curves"][name], data["curves"]["step"]
        known = [value for value in values if value is not None]
        rows, room = height - 1, width - MARGIN - 1
        if not known or rows < 1 or room < 4:
            return nothing("no step yet" if not steps else "not reported by this run", width)
        low, high = min(known), max(known)
        drawn = columns_of(resampled(values, room), rows, low, high)
        text = []
        for number, row in enumerate(drawn):
            label = short(high) if number == 0 else short(low) if number == rows - 1 else ""
            text.append(Text.assemble((fitted(label, MARGIN, right=True), MUTED), ("▕", GRID), inked(row, style)))
        text.append(_axis(steps, known[-1], room))
        return lines(text, width, height)

    return draw


def _axis(steps: list[float | None], last: float, room: int) -> Text:
    first, end = f"step {steps[0] or 0:.0f}", f"{steps[-1] or 0:.0f}"
    now = f"now {short(last)}"
    line = Text(" " * (MARGIN + 1))
    between = room - len(first) - len(end) - len(now)
    if between < 2:
        return line.append(fitted(now, room, right=True), "bold")
    line.append(first, MUTED).append(" " * (between // 2)).append(now, "bold")
    return line.append(" " * (between - between // 2)).append(end, MUTED)
