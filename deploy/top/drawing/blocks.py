"""Bars, columns and short numbers, drawn with block characters.

Invariant nothing_is_wider_than_asked: every line fits its width in terminal cells, whatever the text holds.
"""

import math
import re
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

EIGHTHS = " ▏▎▍▌▋▊▉"
LEVELS = " ▁▂▃▄▅▆▇█"

ACCENT, MUTED, GRID = "#4fd1bd", "#9ba5b3", "#3a434f"
GOOD, WARN, BAD = "#6ed391", "#f0b65c", "#ff8d84"
KINDS = {
    "generate": "#2bb7a3",
    "train": "#9a85f2",
    "optimizer": "#e37acb",
    "publish": "#f0ab45",
    "checkpoint": "#6fa8f5",
    "wait": GRID,
}
SERIES = ("#4fd1bd", "#b3a2ff", "#f0ab45", "#6fa8f5", "#e37acb", "#b9cf5f")

Column = float | None
_RUNS = re.compile("█+|[^█]+")


def plain(text: str) -> str:
    """Without characters that a terminal would obey or that have no width of their own."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def fitted(text: str, width: int, *, right: bool = False) -> str:
    """Exactly ``width`` cells: filled up, or cut with an ellipsis."""
    missing = width - cell_len(text)
    if missing < 0:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    return " " * missing + text if right else text + " " * missing


def short(value: float | None) -> str:
    """At most six characters: 0.123, 12.3, 1234, 12k, 3.4M; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(factor, 9999.5):
            scaled = value / factor
            return f"{scaled:.1f}{letter}" if abs(scaled) < 9.95 else f"{scaled:.0f}{letter}"
    if value == round(value) or size >= 99.95:
        return f"{value:.0f}"
    digits = 1 if size >= 9.995 else 2 if size >= 0.995 else 3
    return f"{value:.{digits}f}" if size >= 0.0005 else f"{value:.0e}"


def bar(share: float, width: int) -> str:
    """A horizontal bar of 0 to 1, filled up with blanks; what is not zero can be seen."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    eighths = max(eighths, 1) if share > 0 and width else eighths
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


def resampled(values: Sequence[Column], width: int) -> list[Column]:
    """As many values as columns: neighbours joined into their mean, or repeated if there are too few."""
    count = len(values)
    if not count or width <= 0:
        return []
    columns: list[Column] = []
    for column in range(width):
        first = column * count // width
        last = max(first + 1, (column + 1) * count // width)
        known = [value for value in values[first:last] if value is not None]
        columns.append(sum(known) / len(known) if known else None)
    return columns


def columns_of(values: Sequence[Column], height: int, low: float, high: float) -> list[str]:
    """Rows from the top: each value as a column of ``height`` rows between two bounds; gaps are blank."""
    span = high - low
    levels = []
    for value in values:
        share = 0.5 if span <= 0 else 0.0 if value is None else (value - low) / span
        levels.append(0 if value is None else 1 + round(min(1.0, max(0.0, share)) * (height * 8 - 1)))
    return ["".join(LEVELS[min(8, max(0, level - 8 * row))] for level in levels) for row in range(height - 1, -1, -1)]


def inked(drawn: str, style: str) -> Text:
    """Blocks in a colour. Full ones fill their cell behind the character too, as some terminals space lines out."""
    text = Text(no_wrap=True)
    for run in _RUNS.findall(drawn):
        text.append(run, f"{style} on {style}" if run[0] == "█" else style)
    return text


def first_that_fits(candidates: Sequence[str], width: int) -> str:
    """The first of some wordings, longest first, that is not too wide; else the last, cut."""
    return next((text for text in candidates if cell_len(text) <= width), fitted(candidates[-1], width).rstrip())


def lines(rows: Sequence[Text], width: int, height: int) -> Text:
    """As one text of at most so many rows, each cut to the width."""
    kept = list(rows[: max(0, height)])
    for row in kept:
        row.no_wrap = True
        row.truncate(max(0, width), overflow="ellipsis" if width > 0 else "crop")
    return Text("\n", no_wrap=True).join(kept)


def nothing(why: str, width: int) -> Text:
    """In place of a drawing."""
    return lines([Text(why, MUTED)], width, 1)
