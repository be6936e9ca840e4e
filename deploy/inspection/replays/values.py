"""Results as JSON, and as aligned plain columns. Knows nothing of what the results mean."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel


def as_json(value: Any) -> str:
    """One JSON text; numbers that are not finite become the strings ``inf``, ``-inf`` and ``nan``."""
    return json.dumps(plain(value), ensure_ascii=False)


def plain(value: Any) -> Any:
    """Dataclasses (with their ``verdict``, if they have one) and messages as plain values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields | ({"verdict": value.verdict} if hasattr(value, "verdict") else {})
    if isinstance(value, BaseModel):
        return plain(value.__dict__)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence | set | frozenset):
        return [plain(item) for item in value]
    return value


def columns(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(row[number]) for row in [head, *rows]) for number in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in (head, *rows)]


def number(value: float | None, digits: int = 6) -> str:
    """A number for reading; ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}g}"
