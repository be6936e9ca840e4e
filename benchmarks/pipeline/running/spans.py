"""What the trainer did when, as it wrote it into ``metrics.jsonl``."""

import json
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    """An act of the trainer, in seconds since the epoch."""

    name: str
    start: float
    end: float


def read_spans(metrics: Path) -> list[Span]:
    """All spans of a run, in order."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [Span(name, start, end) for row in rows for name, start, end in row.get("spans", [])]
