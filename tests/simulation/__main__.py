"""``python -m tests.simulation``: many seeds, or the trace of one. Exit code 1 when a rule was broken."""

import argparse
import sys

from streamrl.planning.virtual_time import START
from tests.simulation.run import Outcome, run_seed, simulate
from tests.simulation.worlds.scenarios import SCENARIOS, TAKES

EVERY = 500


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--scenario", choices=SCENARIOS, help="only this one; otherwise all in turn")
    parser.add_argument("--takes", choices=TAKES, help="in which order groups are taken; otherwise the scenario's")
    parser.add_argument("--seed", type=int, help="one seed alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    options = parser.parse_args()
    if options.seed is not None:
        return _show(
            run_seed(options.seed, options.scenario, takes=options.takes, keep_trace=True), with_trace=options.trace
        )
    done = 0

    def progress(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        for problem in outcome.problems[:3]:
            print(f"FAILED seed {outcome.setup.seed} {outcome.setup.scenario}: {problem.rule}: {problem.detail}")
        if outcome.problems:
            print(f"       {outcome.command}", flush=True)
        if done % EVERY == 0:
            print(f"{done} seeds", flush=True)

    drawn = {"first": options.first, "scenario": options.scenario, "takes": options.takes}
    sums = simulate(options.seeds, options.jobs, **drawn, on_outcome=progress)
    failures = sums.pop("failures")
    print(f"{len(failures)} of {sums['seeds']} seeds failed, " + ", ".join(f"{k} {v}" for k, v in sums.items()))
    return 1 if failures else 0


def _show(outcome: Outcome, *, with_trace: bool) -> int:
    if with_trace:
        for at, kind, who, details in outcome.trace:
            print(f"{at - START:9.3f}  {who:24} {kind:22} {' '.join(map(str, details))}")
    print(outcome.setup)
    work = f"{outcome.events} events, {outcome.callbacks} callbacks, {outcome.restarts} restarts"
    print(f"{work}, {outcome.virtual_s:.1f} s of virtual time")
    for problem in outcome.problems:
        print(f"{problem.rule}: {problem.detail}")
    print(f"trace {outcome.trace_hash}, {len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
