"""What all files of results have alike: where and how they came about, and how many digits figures have."""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from streamrl.inspection.environment import environment, library_versions

RESULTS = Path(__file__).parent / "results"
HARDWARE = ("CPU", "GPU", "memory")


def conditions(
    began: float, seed: int | Sequence[int], libraries: Sequence[str], command: str, **others: str
) -> dict[str, Any]:
    """Of a measurement that began at this moment of ``time.monotonic`` and has just ended.

    ``seed``: none where nothing is drawn. ``others``: versions of what is no library of this process.
    ``load``: processes that wanted a processor, the mean of the last minute: above the number of cores, what the clock
    says is of a busy machine.
    """
    found = environment()
    return {
        "command": command,
        "hardware": ", ".join(f"{name} {found[name]}" for name in HARDWARE if found.get(name, "none") != "none"),
        "versions": ", ".join(f"{name} {text}" for name, text in _versions(found, libraries, others).items()),
        "commit": found.get("StreamRL's commit"),
        "seed": list(seed) if isinstance(seed, Sequence) else seed,
        "load": round(os.getloadavg()[0], 1),
        "seconds": round(time.monotonic() - began),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def rounded(value: Any, digits: int = 4) -> Any:
    """The same with so many significant digits of each float in it, down through lists and dicts."""
    if isinstance(value, list):
        return [rounded(one, digits) for one in value]
    if isinstance(value, dict):
        return {name: rounded(one, digits) for name, one in value.items()}
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def write_results(path: Path, found: Mapping[str, Any], tables: Collection[str] = ("rows",)) -> None:
    """Write what was found, of tables a row a line, so that differences show."""

    def text(name: str, value: Any) -> str:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if name in tables else json.dumps(value)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + ",\n".join(f'"{name}": {text(name, value)}' for name, value in found.items()) + "}\n")


def _versions(found: Mapping[str, str], libraries: Sequence[str], others: Mapping[str, str]) -> dict[str, str]:
    return {"Python": found["Python"], **library_versions(libraries), **others}
