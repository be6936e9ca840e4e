"""When each worker generated, and when it adopted which weights. Pure but for reading the workers' log files."""

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

MOST = 2000
"""Stretches kept of a worker."""
_ADOPTED = re.compile(r'^timestamp=(\S+) .*event="weights adopted" version=(\d+-\d+)\b')


def joined(stretches: Iterable[tuple[float, float]], most: int = MOST) -> tuple[tuple[float, float], ...]:
    """The union of stretches, ascending; if that is more than ``most``, nearer ones are joined until it is not."""
    found = list(_union(sorted(stretches), 0.0))
    gap = 0.001
    while len(found) > most:
        found = list(_union(found, gap))
        gap *= 2
    return tuple((round(start, 3), round(end, 3)) for start, end in found)


def _union(ascending: Sequence[tuple[float, float]], gap: float) -> Iterator[tuple[float, float]]:
    current: tuple[float, float] | None = None
    for start, end in ascending:
        if current is not None and start <= current[1] + gap:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = start, end
    if current is not None:
        yield current


def adoptions(log: Path) -> tuple[tuple[float, str], ...]:
    """What a worker's log file says of weights it adopted; nothing if there is no such file."""
    try:
        with log.open(encoding="utf-8", errors="replace") as lines:
            return tuple(found for line in lines if (found := _adoption(line)) is not None)
    except OSError:
        return ()


def _adoption(line: str) -> tuple[float, str] | None:
    if (match := _ADOPTED.match(line)) is None:
        return None
    try:
        return round(datetime.fromisoformat(match[1]).timestamp(), 3), match[2]
    except ValueError:
        return None
