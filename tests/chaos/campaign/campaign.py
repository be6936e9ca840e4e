"""Crash points, then runs, then simulated seeds, then stops; a line for each, and the results file after each."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.bus.embedded.node import free_ports
from tests.chaos.campaign.results import Results
from tests.chaos.crashing.commit import POINTS, POINTS_OF_RANKS, RANK_DIES
from tests.chaos.crashing.points import CrashPoint
from tests.chaos.crashing.trial import Trained, Trials, codes_of
from tests.chaos.faults.schedule import plans
from tests.chaos.runs.brokers import Brokers
from tests.chaos.runs.chaos_run import PATIENCE_S, Outcome, execute
from tests.chaos.stops.campaign import as_results, run_stops
from tests.chaos.stops.processes import results_of, stop_processes
from tests.pipeline.tiny_model import save_tiny_model

FRESH_BROKER_EVERY = 12
SEEDS_A_LINE = 500
RANKS = 2


@dataclass(frozen=True)
class Wanted:
    """What a campaign is to do. ``only``: the one fault of all runs. ``stops``: moments at which each role is ended."""

    runs: int
    seeds: int
    first_seed: int
    only: str | None
    crash_points: bool
    jobs: int
    patience_s: float = PATIENCE_S
    stops: int = 0


async def run_campaign(wanted: Wanted, results: Results, say: Callable[[str], None]) -> bool:
    """Whether nothing failed."""
    root = Path(tempfile.mkdtemp(prefix="streamrl-chaos-"))
    model = save_tiny_model(root / "model")
    brokers = Brokers(root)
    results.write()
    try:
        if wanted.crash_points:
            await _crash_points(brokers, root, model, results, say)
        await _runs(wanted, brokers, root, model, results, say)
        if wanted.stops:
            broker = await brokers.only("one")
            stopped = await stop_processes(wanted.stops, broker.address, root / "stops", model, wanted.first_seed, say)
            results.add_stops(results_of(stopped))
    finally:
        await brokers.close()
    if wanted.seeds:
        _seeds(wanted, results, say)
    if wanted.stops:
        results.add_stops(as_results(run_stops(wanted.stops, wanted.jobs, say, first=wanted.first_seed)))
    failed = bool(results.failures)
    if not failed:
        shutil.rmtree(root, ignore_errors=True)
    say(
        f"{'FAILED' if failed else 'passed'}: results in {results.path}"
        + (f", directories in {root}" if failed else "")
    )
    return not failed


async def _crash_points(
    brokers: Brokers, root: Path, model: Path, results: Results, say: Callable[[str], None]
) -> None:
    broker = await brokers.only("one")
    trials = Trials.prepare(root, model, broker.address)
    try:
        await _each_point(trials, POINTS, "", results, say)
        of_ranks = (*POINTS_OF_RANKS, *RANK_DIES)
        await _each_point(trials.of_ranks(RANKS), of_ranks, f"{RANKS} ranks: ", results, say)
    finally:
        trials.server.close()
        await brokers.drop("one")


async def _each_point(
    trials: Trials, points: Sequence[CrashPoint], prefix: str, results: Results, say: Callable[[str], None]
) -> None:
    undisturbed = await trials.run(None)
    say(f"{prefix}undisturbed: {len(undisturbed.trained)} trained, exit codes {undisturbed.codes}")
    results.add_crash_point_baseline(problems_of(undisturbed, undisturbed, (0,)))
    for number, point in enumerate(points, start=1):
        began = time.monotonic()
        found = await trials.kill_at(point)
        problems = problems_of(found, undisturbed, codes_of(point))
        results.add_crash_point(prefix + point.name, problems, found.tensors == undisturbed.tensors)
        verdict = "FAIL" if problems else "ok"
        say(f"[point {number:2}/{len(points)}] {verdict:4} {time.monotonic() - began:4.1f} s  {prefix}{point.name}")
        for problem in problems[:5]:
            say(f"    {problem}")


def problems_of(found: Trained, undisturbed: Trained, codes: tuple[int, ...]) -> list[str]:
    """What differs from a run that nobody disturbed, and what the checker and the audit found."""
    problems = list(found.problems)
    if found.codes != codes:
        problems.append(f"expected the processes to end with {codes}, got {found.codes}")
    if found.trained != undisturbed.trained:
        problems.append("the surviving steps took other records, or in another order")
    if found.tensors != undisturbed.tensors or not found.tensors:
        differing = [name for name, digest in undisturbed.tensors.items() if found.tensors.get(name) != digest]
        problems.append(f"{len(differing)} of {len(undisturbed.tensors)} tensors differ: {differing[:3]}")
    return problems


async def _runs(
    wanted: Wanted, brokers: Brokers, root: Path, model: Path, results: Results, say: Callable[[str], None]
) -> None:
    todo = plans(wanted.runs, wanted.first_seed, wanted.only)
    for number, plan in enumerate(todo, start=1):
        if plan.fault.fresh or number % FRESH_BROKER_EVERY == 0:
            await brokers.drop(plan.broker)
        broker = await brokers.only(plan.broker)
        outcome = await execute(plan, broker, root, model, free_ports(1)[0], wanted.patience_s)
        results.add_run(outcome)
        say(f"[run {number:2}/{len(todo)}] {_line(outcome)}")
        if not outcome.passed:
            say(f"    reproduce: {plan.command}\n    directory: {outcome.directory}")
            for problem in outcome.all_problems[:5]:
                say(f"    {problem}")
            await brokers.drop(plan.broker)


def _line(outcome: Outcome) -> str:
    findings, own = outcome.findings, outcome.of_instance
    recovered = ", ".join(f"{each.fault} +{each.step_s} s" for each in outcome.recoveries if each.step_s is not None)
    return (
        f"{'ok' if outcome.passed else 'FAIL':4} {outcome.seconds:4.0f} s  {outcome.plan}  | "
        f"{findings.produced} produced, {findings.trained} trained, "
        f"{findings.skipped.total()} skipped, {findings.pending} pending"
        + (f" | instance: {own.trained} trained, {own.skipped.total()} skipped, {own.pending} pending" if own else "")
        + (f" | next step: {recovered}" if recovered else "")
    )


def _seeds(wanted: Wanted, results: Results, say: Callable[[str], None]) -> None:
    from tests.simulation.run import simulate
    from tests.simulation.worlds.scenarios import SCENARIOS

    done = 0

    def progress(_outcome: object) -> None:
        nonlocal done
        done += 1
        if done % SEEDS_A_LINE == 0:
            say(f"[seed {done:6}/{wanted.seeds}]")

    # Scenarios that take no turns, of which one has long runs, get a few seeds of their own before.
    by_name = {name: 1 + wanted.seeds // 1000 for name, kind in SCENARIOS.items() if not kind.takes_turns}
    for name, seeds in [*by_name.items(), (None, wanted.seeds)]:
        counts = progress if name is None else lambda _outcome: None
        found = simulate(seeds, wanted.jobs, first=wanted.first_seed, scenario=name, on_outcome=counts)
        results.add_simulation(found)
        for failure in found["failures"][:10]:
            say(f"    FAIL {failure['rule']}: {failure['detail']}\n    reproduce: {failure['command']}")
        say(
            f"[seeds{f' of {name}' if name else ''}] {len(found['failures'])} of {found['seeds']} failed, "
            f"{found['per_minute']} a minute"
        )


def default_jobs() -> int:
    return os.cpu_count() or 1
