"""``python -m tests.mutants [--json FILE] [ID ...]``: plant known bugs one at a time, and see that tests go red."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.conditions import conditions
from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.runner import ROOT, Verdict, check_imports, judge, run_without_bugs

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"


def main() -> int:
    """Judge the mutants, print the table, write the file; 0 if every one was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--json", type=Path, help=f"default: {RESULTS.name}, or none if ids are given")
    parser.add_argument("--jobs", type=int, default=2, help="mutants side by side")
    parser.add_argument("ids", nargs="*", metavar="ID", help=f"only these: {', '.join(each.id for each in MUTANTS)}")
    arguments = parser.parse_args()
    if unknown := set(arguments.ids) - {mutant.id for mutant in MUTANTS}:
        parser.error(f"expected ids of mutants, got {', '.join(sorted(unknown))}")
    began = time.monotonic()
    check_imports()
    verdicts = judged(tuple(each for each in MUTANTS if not arguments.ids or each.id in arguments.ids), arguments.jobs)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{len(verdicts)} planted, {caught} caught")
    output = arguments.json or (None if arguments.ids else RESULTS)
    if output is not None:
        result = {
            "planted": len(verdicts),
            "caught": caught,
            "rows": [row_of(verdict) for verdict in verdicts],
            "conditions": conditions(began, (), ("pytest", "torch", "transformers"), "make mutants"),
        }
        output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if caught == len(verdicts) else 1


def judged(mutants: Sequence[Mutant], jobs: int) -> list[Verdict]:
    """The verdicts in the order of the catalogue, each printed when it and those before it are known."""
    verdicts = []
    with ThreadPoolExecutor(jobs) as pool:  # threads only wait: the work is done by pytest's processes
        without_bugs = pool.submit(run_without_bugs, mutants)
        for verdict in pool.map(partial(judge, without_bugs=without_bugs), mutants):
            verdicts.append(verdict)
            print(line_of(verdict), flush=True)
    return verdicts


def line_of(verdict: Verdict) -> str:
    """A line of the table, one for each test, and one for what is wrong."""
    mutant, word = verdict.mutant, "caught" if verdict.caught else "NOT CAUGHT"
    details = [f"\n{'':6}{test}\n{'':8}{how}" for test, how in zip(mutant.tests, verdict.failures, strict=True)]
    if verdict.problem:
        details.append(f"\n{'':6}problem: {verdict.problem}")
    return f"{mutant.id:5} {word:10} {verdict.seconds:6.1f} s  {mutant.description} ({mutant.file}){''.join(details)}"


def row_of(verdict: Verdict) -> dict[str, object]:
    """Of the results file."""
    mutant = verdict.mutant
    return {
        "id": mutant.id,
        "description": mutant.description,
        "file": mutant.file,
        "tests": mutant.tests,
        "failures": verdict.failures,
        "caught": verdict.caught,
        "seconds": verdict.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
