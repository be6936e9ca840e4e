"""``python -m benchmarks.observation``: demos with and without metrics at once, and viewers who look by turns."""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions
from benchmarks.observation.rounds import STRETCH_STEPS, VISIT_STEPS, Looked, looked_at_by_turns, two_at_once
from benchmarks.paired import Pair, paired_cost
from streamrl.bus.embedded.jars import KAFKA_VERSION

RESULTS = Path(__file__).parents[1] / "results" / "observation.json"
MEANS = {
    "metrics": "endpoints of every process, scraped as often as our prometheus.yaml does; beside a demo with none",
    "viewers": "`streamrl ui` with a page open and `streamrl top`, settled, in every other stretch",
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observation", description=__doc__)
    parser.add_argument("--stretches", type=int, default=4, help="of two demos at once, in each round")
    parser.add_argument("--pairs", type=int, default=3, help="of stretches with viewers and without, in each round")
    parser.add_argument("--rounds", type=int, default=4, help="each starts its demos anew; two pairs a kind at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="streamrl-observation-") as name:
        result = _summary(options, _measured(options, Path(name)))
    result["conditions"] = conditions(
        began, options.seed, ("torch", "transformers", "aiokafka"), "make bench-observation", Kafka=KAFKA_VERSION
    )
    options.results.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {options.results}")
    return result


def _measured(options: argparse.Namespace, folder: Path) -> dict[str, list[Looked]]:
    measured: dict[str, list[Looked]] = {"metrics": [], "viewers": []}
    for turn in range(options.rounds):
        for kind, pairs in (
            ("metrics", two_at_once(folder, turn, options.seed, options.stretches)),
            ("viewers", looked_at_by_turns(folder, turn, options.seed, options.pairs)),
        ):
            for number, pair in enumerate(pairs, start=1):
                measured[kind].append(pair)
                print(f"round {turn + 1}/{options.rounds} {kind} {number}: {_said(pair)}", flush=True)
    return measured


def _said(found: Looked) -> str:
    pair = Pair(found.without.step_s, found.having.step_s)
    work = Pair(found.without.step_per_work, found.having.step_per_work)
    return f"{pair.without:.4f} and {pair.having:.4f} s/step, {pair.cost:+.1%}, at equal work {work.cost:+.1%}"


def _summary(options: argparse.Namespace, measured: dict[str, list[Looked]]) -> dict[str, Any]:
    return {
        "rows": [_row(kind, MEANS[kind], pairs, options.seed) for kind, pairs in measured.items()],
        "steps_of_a_stretch": {"metrics": STRETCH_STEPS, "viewers": VISIT_STEPS},
        "rounds": options.rounds,
        "does_not_show": "what a page costs the browser that draws it; runs of other sizes than the demo's; at equal "
        "work, what the run's own processes need longer because viewers use the caches",
    }


def _row(name: str, means: str, pairs: list[Looked], seed: int) -> dict[str, Any]:
    """Costs by the clock, at equal work (see ``Stretch``), by the run's own processor time, and the viewers' share."""
    by_clock = paired_cost([Pair(off.step_s, on.step_s) for off, on in pairs], seed)
    at_equal_work = paired_cost([Pair(off.step_per_work, on.step_per_work) for off, on in pairs], seed)
    by_processor = paired_cost([Pair(off.run_cpu_s, on.run_cpu_s) for off, on in pairs], seed)
    viewers = statistics.median(on.viewers_cpu_s / on.step_s for _, on in pairs) / (os.cpu_count() or 1)
    run = statistics.median(off.run_cpu_s / off.step_s for off, _ in pairs) / (os.cpu_count() or 1)
    print(f"{name}: a step takes {by_clock} longer, at equal work {at_equal_work}; ", end="")
    print(
        f"{by_processor} more of the run's processor time; the viewers themselves take {viewers:.1%} of the machine's"
    )
    return {
        "what": name,
        "means": means,
        "off_step_s": round(statistics.median(off.step_s for off, _ in pairs), 5),
        **by_clock.row(),
        "at_equal_work": at_equal_work.row(),
        "run_processor_time": by_processor.row(),
        "viewers_share_of_processors": round(viewers, 4),
        "share_of_processors_without": round(run, 4),
    }


if __name__ == "__main__":
    main()
