"""Renders a report as one self-contained page, for one run or to compare several. The page loads nothing.

Invariant texts_of_a_run_are_escaped: texts of a run never become markup, and the page's policy allows only its own
script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from streamrl.inspection.charts.assets import embedded_script, embedded_style
from streamrl.inspection.report.charts import WORKERS, axes, curves, marks, order_over_time, shares, timeline
from streamrl.inspection.report.figures import GROUPS, Figure, Value, common_level, figures_of, shown
from streamrl.inspection.report.headline import MOST_CHANGES, changed_settings, headline_of, setup_of, tiles_of
from streamrl.inspection.report.pairing import paired_differences, shown_p
from streamrl.inspection.report.record import RunRecord
from streamrl.inspection.report.values import value_charts
from streamrl.observability.run_state.aggregates import ENDS
from streamrl.settings.differences import ABSENT, PER_RUN_SETTINGS, differing, value_text


class FigureRow(NamedTuple):
    """One figure of every run. ``best``: whether a run has the best value; all False if no value can be best."""

    key: str
    label: str
    texts: tuple[str, ...]
    values: tuple[Value, ...]
    best: tuple[bool, ...]


def figure_rows(by_run: Sequence[Sequence[Figure]]) -> list[FigureRow]:
    """One row for every figure that any run has."""
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
    """The largest position of a figure in the lists that have it."""
    places = [[figure.key for figure in figures].index(key) for figures in by_run if any(f.key == key for f in figures)]
    return max(places)


def _best(values: Sequence[Value], better: int) -> tuple[bool, ...]:
    numbers = [value for value in values if isinstance(value, int | float)]
    # If all are equal, none is best.
    if not better or len(values) < 2 or not numbers or len(set(values)) < 2:
        return (False,) * len(values)
    best = max(numbers) if better > 0 else min(numbers)
    return tuple(value == best for value in values)


def differing_settings(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Keys whose values differ between the runs that have settings, in the order of the files."""
    return differing([record.settings for record in records], ignored=PER_RUN_SETTINGS)


def differing_environment(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Facts about machine and code that differ between the runs."""
    return differing([record.facts.environment for record in records])


def side_by_side(evaluated: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Held-out samples before and after training as rows of one table. Columns that changed are there once a moment."""
    moments = [moment for moment, rows in evaluated.items() if rows]
    if not moments:
        return []
    if len(moments) == 1:
        return [dict(row) for row in evaluated[moments[0]]]
    # Paired by position: an evaluation has the same questions at each moment.
    pairs = list(zip(*(evaluated[moment] for moment in moments), strict=False))
    columns = list(dict.fromkeys(name for rows in pairs for row in rows for name in row))
    changed = {name for name in columns if any(len({value_text(row.get(name)) for row in rows}) > 1 for rows in pairs)}
    found = []
    for rows in pairs:
        cells: dict[str, Any] = {name: rows[0].get(name) for name in columns if name not in changed}
        for moment, row in zip(moments, rows, strict=True):
            cells |= {f"{name} {moment}": row.get(name) for name in columns if name in changed}
        found.append(cells)
    return found


PARTS = Path(__file__).parent / "page"
SCRIPTS = ("timeline.js", "main.js")
MOMENTS = (("_before", "_after"), ("_first", "_last"))
"""How the keys of one held-out measure end, before and after training."""


def write_page(path: Path, records: Sequence[RunRecord], level: float | None = None) -> None:
    """Write the report of one run, or a comparison. ``level``: the reward for which the steps to reach it are shown."""
    path.write_text(page_of(records, level), encoding="utf-8")


def page_of(records: Sequence[RunRecord], level: float | None = None) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style, script = embedded_style(PARTS / "report.css"), embedded_script(PARTS / name for name in SCRIPTS)
    # The policy names the hashes of our own style and script, so nothing else can run.
    parts = {"style": style, "script": script, "style_sha": _sha(style), "script_sha": _sha(script)}
    compared = len(records) > 1
    content = _shared(records) | (_compared(records, level) if compared else _single(records[0]))
    return environment.from_string((PARTS / "report.html.j2").read_text()).render(**parts, **content, compared=compared)


def level_for(records: Sequence[RunRecord], level: float | None) -> float | None:
    """The given level, else the highest that all runs reached."""
    return level if level is not None else common_level(record.rows for record in records)


def _shared(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Template values that the pages of one run and of several runs share."""
    all_rows = [record.rows for record in records]
    timelines = [{"run": number, **timeline(record)} for number, record in enumerate(records)]
    bars = [{"run": number, "bars": shares(record)} for number, record in enumerate(records)]
    facts = [(number, record.facts.topics) for number, record in enumerate(records)]
    ages = [
        {"run": n, "counts": sorted(topics.staleness.items())} for n, topics in facts if topics and topics.staleness
    ]
    lengths = [{"run": n, "cells": topics.lengths.cells} for n, topics in facts if topics and topics.lengths]
    data = {
        "runs": [{"name": record.name, **axes(record.rows)} for record in records],
        "curves": curves(all_rows),
        "timelines": timelines,
        "shares": bars,
        "staleness": ages,
        "lengths": lengths,
        "order": order_over_time(records),
        "marks": [{"run": number, **mark} for number, record in enumerate(records) for mark in marks(record)],
        "values": value_charts(records),
    }
    # Runs of different lengths have different strides. A stride of 1 needs no note.
    strides = sorted({each["stride"] for each in data["runs"]} - {1})
    return {
        "data": _embedded(data),
        "names": [record.name for record in records],
        "has_curves": bool(data["curves"]),
        "marks": data["marks"],
        "curve_note": "".join(f"a point is the mean of {stride} steps; " for stride in strides).removesuffix("; "),
        "has_timeline": any(each["lanes"] for each in timelines),
        "has_shares": any(each["bars"] for each in bars),
        "has_staleness": bool(ages),
        "has_values": any(record.facts.topics and record.facts.topics.value for record in records),
        "lengths": [_length_values(number, record) for number, record in enumerate(records) if _has_lengths(record)],
        "timeline_notes": _notes(records),
        "missing": _missing(records),
        "configs": [(record.name, record.config) for record in records if record.config],
    }


def _single(record: RunRecord) -> dict[str, Any]:
    topics = record.facts.topics
    samples = {"first": topics.first, "last": topics.last} if topics else {}
    return {
        "title": record.title,
        "subtitle": _subtitle(record),
        "headline": headline_of(record),
        "tiles": tiles_of(record),
        "setup": setup_of(record),
        "changed": changed_settings(record),
        "most_changes": MOST_CHANGES,
        "compared_measures": measures_of(figures_of(record)),
        "figures": _grouped(figure_rows([figures_of(record)])),
        "evaluated": side_by_side(record.facts.evaluated),
        "samples": {moment: rows for moment, rows in samples.items() if rows},
        "rare": topics.value.rare if topics and topics.value else (),
        "environment": record.facts.environment,
    }


def _grouped(rows: Sequence[FigureRow]) -> dict[str, list[FigureRow]]:
    """The rows by group, in the order of the groups, without empty groups and held-out measures."""
    found = {name: [row for row in rows if row.key in keys] for name, keys in GROUPS.items()}
    return {name: of_group for name, of_group in found.items() if of_group}


class ComparedMeasure(NamedTuple):
    """A held-out measure before and after training, as text; ``change`` is empty if one of them is missing."""

    measure: str
    before: str
    after: str
    change: str


def measures_of(figures: Sequence[Figure]) -> list[ComparedMeasure]:
    """The held-out measures among a run's figures, before and after next to each other."""
    in_groups = {key for keys in GROUPS.values() for key in keys}
    held_out = {figure.key: figure for figure in figures if figure.key not in in_groups}
    found = []
    for earlier, later in MOMENTS:
        names = (key.removesuffix(end) for key in held_out for end in (earlier, later) if key.endswith(end))
        for name in dict.fromkeys(names):
            before, after = held_out.get(name + earlier), held_out.get(name + later)
            label = next(each.label for each in (before, after) if each is not None).split(" (held out)")[0]
            was, is_now = (ABSENT if each is None else shown(each) for each in (before, after))
            found.append(ComparedMeasure(label, was, is_now, _change(before, after)))
    return found


def _change(before: Figure | None, after: Figure | None) -> str:
    values = [each.value for each in (before, after) if each is not None and isinstance(each.value, int | float)]
    return f"{values[1] - values[0]:+.4g}" if len(values) == 2 else ""


def _compared(records: Sequence[RunRecord], level: float | None) -> dict[str, Any]:
    # A level that the user gave needs no explanation.
    explanation = "" if level is not None else "this level is the highest that every run reached"
    level = level_for(records, level)
    return {
        "title": " · ".join(record.name for record in records),
        "subtitle": f"{len(records)} runs compared",
        "figures": figure_rows([figures_of(record, level) for record in records]),
        "paired": [(each, shown_p(each.p) if each.p is not None else ABSENT) for each in paired_differences(records)],
        "level": level,
        "level_explanation": explanation,
        "ends": ENDS,
        "differing": {"settings": differing_settings(records), "environment": differing_environment(records)},
        "evaluated": [],
        "samples": {},
        "rare": (),
        "environment": {},
    }


def _subtitle(record: RunRecord) -> str:
    settings, steps = record.settings, len(record.rows.steps)
    values = {
        "": settings.get("algorithm.name"),
        "mode ": settings.get("loop.mode"),
        "engine ": settings.get("generation.engine"),
        "seed ": settings.get("run.seed"),
    }
    return ", ".join([f"{steps} steps", *(f"{word}{value}" for word, value in values.items() if value is not None)])


def _has_lengths(record: RunRecord) -> bool:
    return record.facts.topics is not None and record.facts.topics.lengths is not None


def _length_values(number: int, record: RunRecord) -> dict[str, Any]:
    assert record.facts.topics is not None
    lengths = record.facts.topics.lengths
    assert lengths is not None
    # Figures without key or label, only to be formatted like all others.
    figures: dict[str, Figure] = {
        "longest 20 % recalled": Figure("", "", lengths.recall, "share"),
        "by a constant prediction": Figure("", "", lengths.constant, "share"),
        "below the upper estimate": Figure("", "", lengths.coverage, "share"),
        "typically off by a factor of": Figure("", "", None if lengths.factor is None else round(lengths.factor, 2)),
    }
    texts = {word: shown(figure) for word, figure in figures.items() if figure.value is not None}
    return {"run": number, "count": f"{lengths.count:,}", "values": texts}


def _notes(records: Sequence[RunRecord]) -> list[str]:
    found = []
    for record in records:
        topics = record.facts.topics
        if topics is not None and topics.read < topics.held:
            found.append(
                f"Only the newest {topics.read:,} of {topics.held:,} trajectories of {record.name} were read. "
                "The workers' tracks, staleness and lengths show these."
            )
        if topics is not None and len(topics.workers) > WORKERS:
            found.append(f"Only {WORKERS} of {len(topics.workers)} workers of {record.name} are drawn, by name.")
    return found


def _missing(records: Sequence[RunRecord]) -> list[str]:
    """Notes on missing parts, and how to get them."""
    names = [record.name for record in records if record.facts.topics is None]
    if not names:
        return []
    return [
        f"{', '.join(names)}: topics were not read, so workers' tracks, staleness, lengths and samples are missing. "
        "Run `streamrl report --run RUN --from-topics` to read them."
    ]


def _embedded(data: Mapping[str, Any]) -> str:
    """The data as JSON that can be embedded in a script element."""
    # A "</script>" in a completion would end the element, and two separators end a line in old scripts.
    # NaN is refused: it would be written as is, which is not JSON, and the page would show nothing.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sha(text: str) -> str:
    # The form that a content security policy uses: base64 of the SHA-256 of the text's exact bytes.
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
