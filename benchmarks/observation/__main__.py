"""``python -m benchmarks.observation``: the demo with metrics on and off, and with viewers who come and go."""

import argparse
import json
import os
import platform
import statistics
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.observation.trial import METERED, Stretch, demo
from benchmarks.paired import Pair, paired_cost
from deploy.broker.jvm.jars import KAFKA_VERSION

RESULTS = Path(__file__).parents[1] / "results" / "observation.json"
SCRAPED = ("scraper",)
LOOKED_AT = (*SCRAPED, "dashboard", "top")
MAX_STEPS = 2_000
"""More than a round needs; the run is stopped."""


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observation", description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of a stretch")
    parser.add_argument(
        "--pairs", type=int, default=3, help="stretches with viewers in each round, and as many without"
    )
    parser.add_argument("--rounds", type=int, default=5, help="each round runs a demo with metrics and one without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="streamrl-observation-") as name:
        result = _summary(options, _measured(options, Path(name)))
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {options.results}")
    return result


@dataclass
class Measured:
    """Stretches without and with, pair by pair."""

    metrics: list[tuple[Stretch, Stretch]] = field(default_factory=list)
    viewers: list[tuple[Stretch, Stretch]] = field(default_factory=list)


def _measured(options: argparse.Namespace, folder: Path) -> Measured:
    measured = Measured()
    for turn in range(options.rounds):
        kinds = (_plain, _metered) if turn % 2 else (_metered, _plain)
        found = {kind: kind(options, folder, turn, measured) for kind in kinds}
        measured.metrics.append((found[_plain], found[_metered]))
        _say(f"round {turn + 1}/{options.rounds} metrics", *measured.metrics[-1])
    return measured


def _plain(options: argparse.Namespace, folder: Path, turn: int, _: Measured) -> Stretch:
    """A demo without endpoints at which nobody looks."""
    with demo(folder, f"r{turn}-off", MAX_STEPS, options.seed, ()) as running:
        return running.stretch(2 * options.steps, ())


def _metered(options: argparse.Namespace, folder: Path, turn: int, measured: Measured) -> Stretch:
    """A demo with endpoints that are scraped, and with viewers who come and go, the first stretch aside."""
    with demo(folder, f"r{turn}-metered", MAX_STEPS, options.seed, (METERED,)) as running:
        first = running.stretch(2 * options.steps, SCRAPED)
        for number in range(options.pairs):
            ways = (SCRAPED, LOOKED_AT) if (turn + number) % 2 else (LOOKED_AT, SCRAPED)
            found = {way: running.stretch(options.steps, way) for way in ways}
            measured.viewers.append((found[SCRAPED], found[LOOKED_AT]))
            _say(f"round {turn + 1}/{options.rounds} viewers", *measured.viewers[-1])
    return first


def _say(what: str, without: Stretch, having: Stretch) -> None:
    pair = Pair(without.step_s, having.step_s)
    print(f"{what}: {pair.without:.4f} and {pair.having:.4f} s/step, {pair.cost:+.1%}", flush=True)


def _summary(options: argparse.Namespace, measured: Measured) -> dict[str, Any]:
    rows = [
        _row("metrics", "endpoints of every process, scraped every 5 s, against none", measured.metrics, options.seed),
        _row("dashboard and top", "`streamrl ui` with a page open and `streamrl top`", measured.viewers, options.seed),
    ]
    return {
        "rows": rows,
        "steps": options.steps,
        "rounds": options.rounds,
        "pairs_of_a_round": options.pairs,
        "seed": options.seed,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}; viewers share them with the run",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, Apache Kafka {KAFKA_VERSION}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "does_not_show": "what a page costs the browser that draws it; runs of other sizes than the demo's",
    }


def _row(name: str, means: str, pairs: list[tuple[Stretch, Stretch]], seed: int) -> dict[str, Any]:
    """Costs by the clock, by the run's own processor time, and what the viewers' own is of all the cores'."""
    by_clock = paired_cost([Pair(off.step_s, on.step_s) for off, on in pairs], seed)
    by_processor = paired_cost([Pair(off.run_cpu_s, on.run_cpu_s) for off, on in pairs], seed)
    viewers = statistics.median(on.viewers_cpu_s / on.step_s for _, on in pairs) / (os.cpu_count() or 1)
    print(f"{name}: a step takes {by_clock} longer, {by_processor} more of the run's processor time; ", end="")
    print(f"the viewers themselves take {viewers:.1%} of the machine's")
    return {
        "what": name,
        "means": means,
        "off_step_s": round(statistics.median(off.step_s for off, _ in pairs), 5),
        **by_clock.row(),
        "run_processor_time": by_processor.row(),
        "viewers_share_of_processors": round(viewers, 4),
    }


if __name__ == "__main__":
    main()
