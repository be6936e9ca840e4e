"""Predicted against actual length as a heat map, lag by length bucket, and how stale trained trajectories were."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from deploy.live.parts.histograms import PER_DOUBLING, WITHIN
from deploy.top.drawing.blocks import ACCENT, GRID, MUTED, SERIES, WARN, bar, fitted, inked, lines, nothing, short

SHADES = "░▒▓█"
CELL = 2
TALLEST = 2
LABEL = 6


def draw_lengths(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Rows: actual, longest first. Columns: predicted. What lies near the diagonal was predicted well."""
    lengths = data["lengths"]
    rows = height - 2
    if not lengths["cells"]:
        return nothing("no trajectory yet", width)
    cells, first, join = _joined(lengths["cells"], min(rows, (width - LABEL - 1) // CELL))
    if rows < 1 or not cells:
        return lines([_judgement(lengths, width)], width, height)
    count = 1 + max(max(cell) for cell in cells)
    tall = max(1, min(TALLEST, rows // count))
    wide = max(CELL, min(CELL * TALLEST, (width - LABEL - 1) // count))
    near = 1 if join == 1 else 0
    drawn = []
    for actual in range(count - 1, -1, -1):
        label = _tokens(first + actual * join) if tall > 1 or count < 4 or actual % 2 == 0 else ""
        row = Text(no_wrap=True)
        for predicted in range(count):
            style = ACCENT if abs(actual - predicted) <= near else WARN
            shade = _shade(cells.get((predicted, actual), 0) / max(cells.values()))
            row.append_text(inked(shade * wide, style))
        for part in range(tall):
            margin = Text(fitted("" if part else label, LABEL, right=True), MUTED).append("▕", GRID)
            drawn.append(margin.append_text(row))
    drawn += [_axis(_tokens(first), _tokens(first + (count - 1) * join), count * wide), _judgement(lengths, width)]
    return lines(drawn, width, height)


def _axis(left: str, right: str, room: int) -> Text:
    between = room - len(left) - len(right)
    axis = left + "predicted".center(between) + right if between > 10 else f"{left} to {right} predicted"
    return Text(" " * (LABEL + 1) + axis, MUTED)


def _joined(rows: list[list[int]], room: int) -> tuple[dict[tuple[int, int], int], int, int]:
    """Counts by (predicted, actual) from 0 on, the class that 0 stands for, and how many classes are one."""
    ends = [index for predicted, actual, _ in rows for index in (predicted, actual)]
    first, span = min(ends), max(ends) - min(ends) + 1
    if room < 1:
        return {}, first, 1
    join = -(-span // room)
    cells: dict[tuple[int, int], int] = {}
    for predicted, actual, count in rows:
        cell = (predicted - first) // join, (actual - first) // join
        cells[cell] = cells.get(cell, 0) + count
    return cells, first, join


def _tokens(length_class: int) -> str:
    """The middle of a class."""
    return short(round(2 ** (length_class / PER_DOUBLING)))


def _shade(share: float) -> str:
    return SHADES[min(3, int(4 * share**0.5))] if share > 0 else " "


def _judgement(lengths: Mapping[str, Any], width: int) -> Text:
    if lengths["close"] is None:
        return nothing("no trajectory yet", width)
    return Text.assemble(
        ("within ×", MUTED), (f"{WITHIN:g}", MUTED), (f" {lengths['close']:.0%}", "bold"),
        ("  off by ×", MUTED), (f"{lengths['factor']:.2f}", "bold"),
    )  # fmt: skip


def draw_lag(data: Mapping[str, Any], width: int, height: int) -> Text:
    """A bar for each bucket: trajectories that the trainer has not finished; unread ones are those not yet fetched."""
    lag = data["lag"]
    if not lag["buckets"]:
        return nothing("no trajectory yet", width)
    unfinished = [
        unread if done is None else done for done, unread in zip(lag["unfinished"], lag["unread"], strict=True)
    ]
    most = max(1, *unfinished)
    room = max(1, width - 9 - 6 - 13)
    rows = []
    for index, bucket in enumerate(lag["buckets"]):
        style = SERIES[bucket % len(SERIES)]
        row = Text.assemble((fitted(f"bucket {bucket}", 9), MUTED), (bar(unfinished[index] / most, room), style))
        row.append(fitted(short(unfinished[index]), 6, right=True), "bold")
        rows.append(row.append(fitted(f"{short(lag['unread'][index])} unread", 13, right=True), MUTED))
    if len(rows) > height > 0:
        rest = sum(unfinished[height - 1 :])
        rows = [*rows[: height - 1], Text(f"and {len(rows) - height + 1} more buckets: {short(rest)}", MUTED)]
    return lines(rows, width, height)


def draw_staleness(data: Mapping[str, Any], width: int, height: int) -> Text:
    """Shares of trained trajectories by the age of their oldest token, in optimizer steps."""
    counts = data["staleness"]["counts"]
    total = sum(count for _, count in counts)
    if not total:
        return nothing("nothing trained yet", width)
    most = max(count for _, count in counts)
    room = max(1, width - 9 - 7)
    rows = []
    for age, count in counts:
        row = Text.assemble((fitted(f"{age} step{'s' if age != 1 else ''}", 9), MUTED))
        row.append(bar(count / most, room), ACCENT).append(fitted(f"{count / total:.1%}", 7, right=True), "bold")
        rows.append(row)
    if len(rows) > height > 0:
        rest = sum(count for _, count in counts[height - 1 :])
        rows = [*rows[: height - 1], Text(f"older: {rest / total:.1%}", MUTED)]
    return lines(rows, width, height)
