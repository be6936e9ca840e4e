"""All roles, so many moments each: in processes that may crash, a few at a time; a table of the results."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.stops.moment import Moment
from tests.chaos.stops.roles import ROLES

ROOT = Path(__file__).parents[3]
Say = Callable[[str], None]


@dataclass
class Tally:
    """What came of one role's moments."""

    role: str
    moments: int = 0
    bad: list[Moment] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def row(self) -> str:
        return f"{self.role:22} {self.moments:7} {len(self.bad):8} {self.seconds:8.0f}"


HEAD = f"{'role':22} {'moments':>7} {'bad ends':>8} {'seconds':>8}"


def ends_of(role: str, first: int, count: int, tree: Path = ROOT) -> Iterator[Moment]:
    """The moments of a role from a process of its own. ``tree``: the checkout whose packages are tried."""
    command = [sys.executable, "-m", "tests.chaos.stops.batch", role, str(first), str(count)]
    process = subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process, ThreadPoolExecutor(1) as reading:
        assert process.stdout is not None
        assert process.stderr is not None
        said = reading.submit(process.stderr.read)
        for line in process.stdout:
            found = json.loads(line)
            if "seed" in found:
                yield Moment(**found)
        if (code := process.wait()) != 0:
            yield Moment(-1, "?", 0.0, [f"the harness ended with {code}: {said.result()[-2000:]}"])


def run_stops(count: int, jobs: int, say: Say, roles: Sequence[str] = tuple(ROLES), first: int = 0) -> list[Tally]:
    """End each role at so many moments; what came of it is said line by line, and at the end as a table."""

    def tallied(role: str) -> Tally:
        began, found = time.monotonic(), Tally(role)
        for moment in ends_of(role, first, count):
            found.moments += 1
            if moment.problems:
                found.bad.append(moment)
                say(f"    FAIL {role}: {moment.told}: {moment.problems[0]}")
        found.seconds = time.monotonic() - began
        say(f"[stops] {found.row}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        tallies = list(pool.map(tallied, roles))
    say("\n".join([HEAD, *(tally.row for tally in tallies)]))
    return tallies


def as_results(tallies: Sequence[Tally]) -> Mapping[str, Any]:
    """For the results file."""
    return {
        tally.role: {
            "moments": tally.moments,
            "bad_ends": len(tally.bad),
            "seconds": round(tally.seconds),
            "problems": [f"{moment.told}: {moment.problems[0]}" for moment in tally.bad[:10]],
        }
        for tally in tallies
    }
