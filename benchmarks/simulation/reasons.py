"""Why figures are off, as far as the published ones themselves or the model tell."""

from collections.abc import Mapping
from typing import Any

REASONS: dict[tuple[str, str, str], str] = {}
"""By paper, figure and the beginning of the system's name."""


def reason(row: Mapping[str, Any]) -> str:
    """Of a row or a ratio that is far off."""
    found = [
        (len(name), text)
        for (paper, figure, name), text in REASONS.items()
        if (paper, figure) == (row["paper"], row["figure"]) and row["system"].startswith(name)
    ]
    return max(found, default=(0, "not known"))[1]
