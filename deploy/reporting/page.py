"""A report as one self-contained page, of one run or of several side by side. Loads nothing and may run nothing else.

Invariant nothing_of_a_run_is_markup: texts of a run are escaped, and the page's policy runs its own script only.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from deploy.reporting.drawing.charts import axes, curves, order_over_time
from deploy.reporting.drawing.tables import differing_environment, differing_settings, figure_rows, shown, side_by_side
from deploy.reporting.drawing.timeline import WORKERS, shares, timeline
from deploy.reporting.record.figures import ENDS, Figure, common_level, figures_of
from deploy.reporting.record.run_record import RunRecord

PARTS = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "timeline.js", "main.js")
CARDS = (
    "reward_first", "reward_last", "steps", "train_seconds", "trajectories_per_s", "tokens_per_s", "staleness_mean",
    "wait_share", "workers_busy", "length_recall",
)  # fmt: skip


def write_page(path: Path, records: Sequence[RunRecord], level: float | None = None) -> None:
    """Write the report of one run, or of several compared. ``level``: the reward whose first reaching is told."""
    path.write_text(page_of(records, level), encoding="utf-8")


def page_of(records: Sequence[RunRecord], level: float | None = None) -> str:
    """The page's text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style, script = (PARTS / "report.css").read_text(), "".join((PARTS / name).read_text() for name in SCRIPTS)
    parts = {"style": style, "script": script, "style_sha": _sha(style), "script_sha": _sha(script)}
    compared = len(records) > 1
    content = _shared(records) | (_compared(records, level) if compared else _single(records[0]))
    return environment.from_string((PARTS / "report.html.j2").read_text()).render(**parts, **content, compared=compared)


def level_for(records: Sequence[RunRecord], level: float | None) -> float | None:
    """The given level, else the highest that all reached."""
    return level if level is not None else common_level(record.rows for record in records)


def _shared(records: Sequence[RunRecord]) -> dict[str, Any]:
    """What the pages of one and of several runs have in common."""
    all_rows = [record.rows for record in records]
    timelines = [{"run": number, **timeline(record)} for number, record in enumerate(records)]
    bars = [{"run": number, "bars": shares(record)} for number, record in enumerate(records)]
    facts = [(number, record.gathered.topics) for number, record in enumerate(records)]
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
    }
    strides = sorted({each["stride"] for each in data["runs"]} - {1})
    return {
        "data": _embedded(data),
        "names": [record.name for record in records],
        "has_curves": bool(data["curves"]),
        "curve_note": "".join(f"a point is the mean of {stride} steps; " for stride in strides).removesuffix("; "),
        "has_timeline": any(each["lanes"] for each in timelines),
        "has_shares": any(each["bars"] for each in bars),
        "has_staleness": bool(ages),
        "lengths": [_told_of_lengths(number, record) for number, record in enumerate(records) if _has_lengths(record)],
        "timeline_notes": _notes(records),
        "missing": _missing(records),
        "configs": [(record.name, record.config) for record in records if record.config],
    }


def _single(record: RunRecord) -> dict[str, Any]:
    figures = figures_of(record)
    rows = figure_rows([figures])
    wanted = [row for row in rows if row.key in CARDS or row.key.endswith(("_before", "_after"))]
    topics = record.gathered.topics
    samples = {"first": topics.first, "last": topics.last} if topics else {}
    return {
        "title": record.title,
        "subtitle": _subtitle(record),
        "cards": wanted,
        "figures": rows,
        "evaluated": side_by_side(record.gathered.evaluated),
        "samples": {moment: rows for moment, rows in samples.items() if rows},
        "environment": record.gathered.environment,
    }


def _compared(records: Sequence[RunRecord], level: float | None) -> dict[str, Any]:
    told = "" if level is not None else "this level is the highest that every run reached"
    level = level_for(records, level)
    return {
        "title": " · ".join(record.name for record in records),
        "subtitle": f"{len(records)} runs compared",
        "figures": figure_rows([figures_of(record, level) for record in records]),
        "level": level,
        "level_told": told,
        "ends": ENDS,
        "differing": {"settings": differing_settings(records), "environment": differing_environment(records)},
        "evaluated": [],
        "samples": {},
        "environment": {},
    }


def _subtitle(record: RunRecord) -> str:
    settings, steps = record.settings, len(record.rows.steps)
    told = {
        "": settings.get("algorithm.name"),
        "mode ": settings.get("loop.mode"),
        "engine ": settings.get("generation.engine"),
        "seed ": settings.get("run.seed"),
    }
    return ", ".join([f"{steps} steps", *(f"{word}{value}" for word, value in told.items() if value is not None)])


def _has_lengths(record: RunRecord) -> bool:
    return record.gathered.topics is not None and record.gathered.topics.lengths is not None


def _told_of_lengths(number: int, record: RunRecord) -> dict[str, Any]:
    assert record.gathered.topics is not None
    lengths = record.gathered.topics.lengths
    assert lengths is not None
    told: dict[str, Figure] = {
        "longest 20 % recalled": Figure("", "", lengths.recall, "share"),
        "by saying the same for all": Figure("", "", lengths.constant, "share"),
        "below the upper estimate": Figure("", "", lengths.coverage, "share"),
        "typically off by a factor of": Figure("", "", None if lengths.factor is None else round(lengths.factor, 2)),
    }
    texts = {word: shown(figure) for word, figure in told.items() if figure.value is not None}
    return {"run": number, "count": f"{lengths.count:,}", "told": texts}


def _notes(records: Sequence[RunRecord]) -> list[str]:
    found = []
    for record in records:
        topics = record.gathered.topics
        if topics is not None and topics.read < topics.held:
            found.append(
                f"Of {topics.held:,} trajectories of {record.name} the newest {topics.read:,} were read: "
                "lanes of workers, staleness and lengths are of these."
            )
        if topics is not None and len(topics.workers) > WORKERS:
            found.append(f"Of {len(topics.workers)} workers of {record.name} the first {WORKERS} by name are drawn.")
    return found


def _missing(records: Sequence[RunRecord]) -> list[str]:
    """What could not be shown, and how to have it."""
    names = [record.name for record in records if record.gathered.topics is None]
    if not names:
        return []
    return [
        f"{', '.join(names)}: topics were not read, so lanes of workers, staleness, lengths and samples are missing; "
        "`streamrl report RUN --from-topics` reads them."
    ]


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sha(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
