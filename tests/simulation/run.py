"""Runs seeds: one by one here, or many over several processes; the same seed always goes the same way."""

import gc
import random
import time
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import structlog

from streamrl.planning.virtual_time import START, Stuck
from streamrl.schemas.reports import SkipReason
from tests.simulation.bus.events import Event
from tests.simulation.history import Problem
from tests.simulation.judges.verdict import Counts, judge, rows_of, trajectories_of
from tests.simulation.processes import PROCESS, process_loop
from tests.simulation.worlds.crew import Crew
from tests.simulation.worlds.nemesis import Nemesis
from tests.simulation.worlds.scenarios import Setup, draw_setup, taking
from tests.simulation.worlds.world import World

MAX_SECONDS = 600.0
BATCH = 20


@dataclass(frozen=True)
class Outcome:
    """What became of a seed. ``restarts`` and ``stale``, rows on what grew too old, and ``of_arms``,
    trajectories that an arm of a split sampled, say that something happened.
    """

    setup: Setup
    problems: tuple[Problem, ...]
    trace_hash: str
    events: int
    callbacks: int
    virtual_s: float
    restarts: int
    trace: tuple[Event, ...] = ()
    takes: str | None = None
    stale: int = 0
    of_arms: int = 0

    @property
    def command(self) -> str:
        """Shows this seed again."""
        takes = f" --takes {self.takes}" if self.takes else ""
        return f"python -m tests.simulation --scenario {self.setup.scenario}{takes} --seed {self.setup.seed} --trace"


def run_seed(
    seed: int,
    scenario: str | None = None,
    *,
    takes: str | None = None,
    keep_trace: bool = False,
    make_crew: Callable[..., Crew] = Crew,
) -> Outcome:
    """Simulate one seed and judge it. ``takes``: the order in which groups are taken, instead of the scenario's."""
    setup = draw_setup(seed, scenario)
    if takes is not None:
        setup = taking(setup, takes, random.Random(f"{takes}/{seed}"))
    return replace(run_setup(setup, keep_trace=keep_trace, make_crew=make_crew), takes=takes)


def run_setup(setup: Setup, *, keep_trace: bool = False, make_crew: Callable[..., Crew] = Crew) -> Outcome:
    """Simulate one run and judge it."""
    events: list[Event] = []
    with (
        _known_chance(setup.seed),
        _without_collection(),
        _logging_into(events if keep_trace else None),
        process_loop(max_seconds=MAX_SECONDS) as loop,
    ):
        world = World(setup, loop, make_crew)
        world.bus.events.seen = events
        loop.set_exception_handler(partial(_unexpected, world))
        try:
            loop.run_until_complete(Nemesis(world).torment())
        except Stuck as stuck:
            world.problems.append(Problem("stuck", str(stuck)))
        finally:
            world.bus.is_over = True
        problems = judge(world)
        return Outcome(
            setup,
            tuple(problems),
            world.bus.events.hash() if keep_trace else "",
            len(events),
            loop.callbacks,
            loop.time() - START,
            world.restarts,
            tuple(events) if keep_trace else (),
            stale=sum(row.reason is SkipReason.STALE for row in rows_of(world)),
            of_arms=sum(one is not None and bool(one.policy) for one in trajectories_of(world).values()),
        )


@contextmanager
def _without_collection() -> Iterator[None]:
    """The tasks of killed processes are reachable only from themselves; they are to stay as they are to the end."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _unexpected(world: World, loop: Any, context: dict[str, Any]) -> None:
    """A callback failed, or an exception was never looked at."""
    if "never retrieved" not in context["message"] and "destroyed" not in context["message"]:
        world.problems.append(Problem("crash", f"{context['message']}: {context.get('exception')!r}"))


@contextmanager
def _known_chance(seed: int) -> Iterator[None]:
    """Names that production code draws at random come from the seed."""
    chance = random.Random(f"names/{seed}")
    real = uuid.uuid4
    uuid.uuid4 = lambda: uuid.UUID(int=chance.getrandbits(128), version=4)
    random.seed(seed)
    try:
        yield
    finally:
        uuid.uuid4 = real


@contextmanager
def _logging_into(events: list[Event] | None) -> Iterator[None]:
    """Log lines of all processes become events of the trace, or are dropped."""
    before = structlog.get_config()

    def keep(_logger: Any, level: str, event: MutableMapping[str, Any]) -> Any:
        process = PROCESS.get()
        details = (event.pop("event", ""), *(f"{key}={value}" for key, value in event.items()))
        if events is not None:
            events.append((events[-1][0] if events else START, level, process.name if process else "outside", details))
        raise structlog.DropEvent

    level = 0 if events is not None else 50
    structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.configure(**before)


def simulate(
    seeds: int,
    jobs: int = 1,
    *,
    first: int = 0,
    scenario: str | None = None,
    takes: str | None = None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> dict[str, Any]:
    """Simulate seeds from ``first`` on; sums for reports, failures with the commands that show them."""
    began = time.perf_counter()
    failures: list[dict[str, str | int]] = []
    sums = Counts(0, 0, 0)
    ranges = [range(at, min(at + BATCH, first + seeds)) for at in range(first, first + seeds, BATCH)]
    for outcome in _outcomes(ranges, jobs, scenario, takes):
        on_outcome(outcome)
        counts = Counts.of(list(outcome.problems))
        sums = Counts(
            sums.lost + counts.lost,
            sums.trained_twice + counts.trained_twice,
            sums.audit_failures + counts.audit_failures,
        )
        if outcome.problems:
            problem = outcome.problems[0]
            failures.append(
                {
                    "seed": outcome.setup.seed,
                    "scenario": outcome.setup.scenario,
                    "rule": problem.rule,
                    "detail": problem.detail,
                    "command": outcome.command,
                }
            )
    seconds = time.perf_counter() - began
    return {
        "seeds": seeds,
        "failures": failures,
        "lost": sums.lost,
        "trained_twice": sums.trained_twice,
        "audit_failures": sums.audit_failures,
        "per_minute": round(60 * seeds / seconds),
    }


def _outcomes(ranges: list[range], jobs: int, scenario: str | None, takes: str | None) -> Iterator[Outcome]:
    if jobs <= 1:
        for seeds in ranges:
            yield from _run_range(seeds, scenario, takes)
        return
    # Not forked: a fork of a process with threads, as a test's is, may end in a crash.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for outcomes in pool.map(partial(_run_range, scenario=scenario, takes=takes), ranges):
            yield from outcomes


def _run_range(seeds: range, scenario: str | None, takes: str | None) -> list[Outcome]:
    return [run_seed(seed, scenario, takes=takes) for seed in seeds]
