"""The rows of ``pipeline.json``: what one measurement gives; what is measured anew replaces its old rows."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
IDENTITY = ("kind", "workload", "mode", "dispatch", "ranker")


def identity(row: Row) -> tuple[Any, ...]:
    """What makes two rows the same measurement."""
    return tuple(row[name] for name in IDENTITY)


def read_rows(path: Path) -> list[Row]:
    """Rows of an earlier measurement; none if there was none."""
    found: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return found


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """New rows in place of old ones of the same identity, and behind them those that are really new."""
    by_identity = {identity(row): row for row in old} | {identity(row): row for row in new}
    return list(by_identity.values())


def write_rows(path: Path, rows: list[Row]) -> None:
    """One row a line, so that differences show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(_rounded(row)) for row in rows) + "\n]\n")


def _rounded(row: Row) -> Row:
    return {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
