"""`python -m tests.chaos --runs 55 --seeds 10000`: the whole chaos suite, and its results as JSON."""

import argparse
import asyncio
import sys
from pathlib import Path

from tests.chaos.campaign.campaign import Wanted, default_jobs, run_campaign
from tests.chaos.campaign.quiet import quiet_logs
from tests.chaos.campaign.results import Results
from tests.chaos.faults.schedule import BY_NAME
from tests.chaos.runs.chaos_run import PATIENCE_S

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"

STOPS = 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--runs", type=int, default=55, help="runs on real brokers")
    parser.add_argument("--seeds", type=int, default=10_000, help="simulated seeds")
    parser.add_argument("--stops", type=int, default=None, help="moments at which each role is ended; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", choices=sorted(BY_NAME), metavar="FAULT", help=", ".join(BY_NAME))
    parser.add_argument("--crash-points", action=argparse.BooleanOptionalAction, help="default: unless --only is given")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds until a run must be over")
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="processes that simulate")
    parser.add_argument("--output", type=Path, default=None, help=f"default: {RESULTS.name}, or none with --only")
    arguments = parser.parse_args()
    points = arguments.crash_points if arguments.crash_points is not None else arguments.only is None
    stops = arguments.stops if arguments.stops is not None else 0 if arguments.only else STOPS
    output = arguments.output or (RESULTS if arguments.only is None else Path("chaos-only.json").absolute())
    with quiet_logs():
        wanted = Wanted(
            arguments.runs,
            arguments.seeds,
            arguments.seed,
            arguments.only,
            points,
            arguments.jobs,
            arguments.patience,
            stops,
        )
        command = f"make chaos RUNS={arguments.runs} SEEDS={arguments.seeds}"
        results = Results(output, first_seed=arguments.seed, command=command)
        passed = asyncio.run(run_campaign(wanted, results, lambda line: print(line, flush=True)))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
