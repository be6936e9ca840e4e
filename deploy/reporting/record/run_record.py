"""One run as its directory tells it. Reads only; needs no broker."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.reporting.gathering.gathered import Gathered, read_gathered
from deploy.reporting.record.rows import Rows, read_rows
from schemas.errors import DataError

if TYPE_CHECKING:
    from deploy.runs.directory import RunDirectory


@dataclass(frozen=True)
class RunRecord:
    """``name``: what a person calls it. ``config``: the settings' text, ``settings``: by dotted key."""

    name: str
    path: Path
    rows: Rows
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    gathered: Gathered = field(default_factory=Gathered)

    @property
    def title(self) -> str:
        """The run's own name."""
        return str(self.settings.get("run.name") or self.name)


def read_record(directory: "RunDirectory", name: str) -> RunRecord:
    """What a directory holds; a run that took no step yet has no rows.

    Raises:
        DataError: a file is there and cannot be read.
    """
    try:
        config = directory.config.read_text() if directory.config.is_file() else ""
        summary = json.loads(directory.summary.read_text()) if directory.summary.is_file() else {}
        return RunRecord(
            name=name,
            path=directory.path,
            rows=read_rows(directory.metrics) if directory.metrics.is_file() else Rows(),
            summary=summary if isinstance(summary, dict) else {},
            config=config,
            settings=flat(tomllib.loads(config)),
            gathered=read_gathered(directory.gathered),
        )
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise DataError(f"expected the files of a run in {directory.path}, got: {error}") from error


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
