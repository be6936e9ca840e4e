"""Tables of a report: the figures of runs side by side, and the settings and environments in which they differ."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from deploy.reporting.record.figures import Figure, Value
from deploy.reporting.record.run_record import RunRecord

ABSENT = "–"
SAME_FOR_NOBODY = ("run.name", "run.directory", "kafka.bootstrap_servers", "relay.port")
"""Settings that differ between any two runs and mean nothing."""


class FigureRow(NamedTuple):
    """One figure of every run; ``best``: which of them are best, where that means something."""

    key: str
    label: str
    texts: tuple[str, ...]
    values: tuple[Value, ...]
    best: tuple[bool, ...]


def figure_rows(by_run: Sequence[Sequence[Figure]]) -> list[FigureRow]:
    """One row for every figure that a run has."""
    order: dict[str, Figure] = {}
    for figures in by_run:
        order |= {figure.key: figure for figure in figures if figure.key not in order}
    found = []
    for key in sorted(order, key=lambda each: _place(each, by_run)):
        figure = order[key]
        values = tuple(next((each.value for each in figures if each.key == key), None) for figures in by_run)
        texts = tuple(ABSENT if value is None else shown(figure._replace(value=value)) for value in values)
        found.append(FigureRow(key, figure.label, texts, values, _best(values, figure.better)))
    return found


def _place(key: str, by_run: Sequence[Sequence[Figure]]) -> int:
    """Where a figure stands in the fullest list that has it."""
    places = [[figure.key for figure in figures].index(key) for figures in by_run if any(f.key == key for f in figures)]
    return max(places)


def _best(values: Sequence[Value], better: int) -> tuple[bool, ...]:
    numbers = [value for value in values if isinstance(value, int | float)]
    if not better or len(values) < 2 or not numbers or len(set(values)) < 2:
        return (False,) * len(values)
    best = max(numbers) if better > 0 else min(numbers)
    return tuple(value == best for value in values)


def shown(figure: Figure) -> str:
    """A figure as people read it."""
    value = figure.value
    if not isinstance(value, int | float):
        return str(value)
    match figure.kind:
        case "share":
            return f"{value:.1%}"
        case "seconds":
            return seconds_shown(value)
        case "count":
            return f"{value:,.0f}"
        case "rate":
            return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        case _:
            return f"{value:.4g}"


def seconds_shown(value: float) -> str:
    """In seconds, minutes or hours."""
    if value < 120:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return f"{minutes} min {seconds:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def differing_settings(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Keys whose values are not the same in all runs that kept settings, in the order of the files."""
    return _differing([record.settings for record in records], ignored=SAME_FOR_NOBODY)


def differing_environment(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """What differs of machine and code."""
    return _differing([record.gathered.environment for record in records])


def _differing(trees: Sequence[Mapping[str, Any]], ignored: Sequence[str] = ()) -> list[tuple[str, tuple[str, ...]]]:
    keys = list(dict.fromkeys(key for tree in trees for key in tree if key not in ignored))
    rows = [(key, tuple(_text(tree[key]) if key in tree else ABSENT for tree in trees)) for key in keys]
    telling = [number for number, tree in enumerate(trees) if tree]
    return [(key, texts) for key, texts in rows if len({texts[number] for number in telling}) > 1]


def side_by_side(evaluated: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Held-out samples by moment as rows of one table: a column that never changed stands once, others by moment."""
    moments = [moment for moment, rows in evaluated.items() if rows]
    if not moments:
        return []
    if len(moments) == 1:
        return [dict(row) for row in evaluated[moments[0]]]
    pairs = list(zip(*(evaluated[moment] for moment in moments), strict=False))
    columns = list(dict.fromkeys(name for rows in pairs for row in rows for name in row))
    changed = {name for name in columns if any(len({_text(row.get(name)) for row in rows}) > 1 for rows in pairs)}
    found = []
    for rows in pairs:
        cells: dict[str, Any] = {name: rows[0].get(name) for name in columns if name not in changed}
        for moment, row in zip(moments, rows, strict=True):
            cells |= {f"{name} {moment}": row.get(name) for name in columns if name in changed}
        found.append(cells)
    return found


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 200 else text[:200] + "…"
