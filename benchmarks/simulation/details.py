"""What the papers show beside throughputs, as rows: simulated, or from the parameters where it is a formula.

Every function returns rows as changes to its task's own.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.pipeline.paper import Noise
from benchmarks.pipeline.workload import recall
from benchmarks.simulation import papers
from benchmarks.simulation.fitting import NEUTRAL
from benchmarks.simulation.papers import LAMINAR, STREAMRL, StreamRow
from benchmarks.simulation.parameters import (
    across,
    arrivals,
    detail,
    fitted,
    known,
    laminar,
    streamrl,
    train_s,
    weight_bytes,
)
from benchmarks.simulation.plant import Fault, Lengths, Workload
from benchmarks.simulation.replica import NEVER, Replica
from benchmarks.simulation.world import World
from streamrl.planning.planner import one_site

Row = dict[str, Any]
PROBES_S = (1500.0, 1752.0, 2400.0)
FAIL_S = 1500.0
FULL = 0.98
"""Share of the cache: replicas give a hundredth up at once when they are full, so that they are seen just below it."""
STEP_GPUS = 8
"""That algorithm 1's scaling adds at once."""


def place(of: object) -> Row:
    """The identity of the first row that comes of it."""
    return {name: getattr(of, name) for name in papers.IDENTITY}


@dataclass(frozen=True)
class Detail:
    """Rows of one figure. ``system``: that of the first one."""

    paper: str
    figure: str
    model: str
    gpus: int
    system: str
    find: Callable[["Detail"], Iterator[Row]]
    lengths: str = ""
    seeds: int = 5

    def rows(self) -> list[Row]:
        """Find them."""
        began = time.process_time()
        found = [{**place(self), "published": None, "fitted": False, **row} for row in self.find(self)]
        spent_s = time.process_time() - began
        return [{**row, "cpu_s": spent_s / len(found)} for row in found]

    def rank(self) -> int:
        """They take seconds."""
        return 0


def _row(system: str, predicted: float | None, published: float, unit: str, **more: Any) -> Row:
    return {"system": system, "predicted": predicted, "published": published, "unit": unit, **more}


def _over_seeds(system: str, values: Sequence[float], published: float, unit: str) -> Row:
    ends = [min(values), max(values)]
    return _row(system, fmean(values), published, unit, range=ends, seeds=len(values))


def streamrl_row(lengths: str, model: str) -> StreamRow:
    """A configuration of StreamRL's figure 8."""
    return next(row for row in STREAMRL if (row.lengths, row.model) == (lengths, model))


def generation_s(row: StreamRow, seed: int, *, work: Workload | None = None, steps: int = 1, known: str = "") -> float:
    """Seconds of a step's generation alone; by the ranker's placement unless something else is ``known``."""
    plant, own, system = streamrl(row, "sync", NEUTRAL)
    plant = replace(plant, sync_s=0.0, stall_s=0.0, arrivals_s=())
    system = replace(system, mode="synchronous", trains="batch")
    if known:
        system = replace(system, known=known)  # type: ignore[arg-type]
    if known == "nothing":
        system = replace(system, strategy="round_robin")
    return World(plant, work or own, system, seed).run(steps).step_s(0)


def training_s(row: StreamRow, work: Workload, training: int) -> float:
    """Seconds of a step's training alone."""
    return work.tokens * train_s("streamrl", row.model, training, fitted("streamrl"))[0]


def relays(of: Detail) -> Iterator[Row]:
    """Laminar's figure 18, whose bandwidth and chunks are from 32B's first and last figure."""
    figures = papers.BROADCAST[of.model]
    unit = "s until the last machine has new weights"
    for machines, seconds in figures.items():
        is_fitted = of.model == "32B" and machines in (min(figures), max(figures))
        slowest_s = max(arrivals(of.model, machines, 8))
        yield _row("relays", slowest_s, seconds, unit, gpus=8 * machines, fitted=is_fitted)


def waits(of: Detail) -> Iterator[Row]:
    """Laminar's figure 14, and the trainer's stall. A replica pulls what its host has, and waits for no broadcast."""
    size = weight_bytes(of.model)
    is_32b = of.model == "32B"
    for gpus, (together, mean, best) in papers.WAITS[of.model].items():
        pull_s = size / detail("pull_bytes_per_s")
        for system, predicted, published, is_fitted in (
            ("all GPUs together", size / detail("global_sync_bytes_per_s"), together, is_32b),
            ("relays, mean", pull_s, mean, False),
            ("relays, at best", pull_s, best, is_32b),
        ):
            unit = "s that a replica waits for weights"
            yield _row(system, predicted, published, unit, gpus=gpus, fitted=is_fitted)
    stall_s, published = size / detail("actor_bytes_per_s"), papers.STALL_S[of.model]
    unit = "s that the trainer waits"
    yield _row("trainer", stall_s, published, unit, figure="section 4", gpus=0, fitted=is_32b)


def one_replica(of: Detail) -> Iterator[Row]:
    """Laminar's figure 9: a batch on one replica, which nobody joins."""
    runs = [_run_out(seed) for seed in range(of.seeds)]
    units = {
        "full_s": "s until the cache is fullest",
        "waiting": "completions that wait, at most",
        "queued_s": "s until none waits any more",
        "left": "completions left then",
        "batch_s": "s in all",
        "tail_share": "share of the time with at most 4 left",
    }
    for name, unit in units.items():
        yield _over_seeds(name, [run[name] for run in runs], papers.ONE_REPLICA[name], unit)


def _run_out(seed: int) -> dict[str, float]:
    plant, work, system = laminar(next(row for row in LAMINAR if row.model == "32B"), "laminar")
    world = World(plant, replace(work, groups=32), system, seed)
    replica = Replica(0, plant.curve, plant.slots, plant.kv_tokens)
    replica.offer(one for group in world.draw(32) for one in group.samples)
    replica.settle()
    found = {"full_s": 0.0, "waiting": 0.0, "queued_s": 0.0, "left": float(replica.load)}
    tail_at = fullest = 0.0
    while replica.next_at < NEVER:
        replica.fire()
        if fullest < FULL * replica.kv_tokens and replica.context > fullest:
            fullest, found["full_s"], found["left"] = replica.context, replica.at, float(replica.load)
        found["waiting"] = max(found["waiting"], float(len(replica.waiting)))
        if replica.waiting:
            found["queued_s"], found["left"] = replica.at, float(replica.load)
        else:
            found["queued_s"] = max(found["queued_s"], found["full_s"])
        if replica.load > 4:
            tail_at = replica.at
    return {**found, "batch_s": replica.at, "tail_share": 1 - tail_at / replica.at}


def failure(of: Detail) -> Iterator[Row]:
    """Laminar's figure 15: a machine with two of 16 replicas fails and is replaced."""
    plant, work, system = laminar(next(row for row in LAMINAR if (row.model, row.gpus) == ("32B", 128)), "laminar")
    whole = replace(work, fault=Fault(0, FAIL_S, known("restore_s"), PROBES_S))
    broken = replace(work, fault=Fault(2, FAIL_S, known("restore_s"), PROBES_S))
    found: dict[str, list[float]] = {"during": [], "after": [], "step": []}
    for seed in range(of.seeds):
        # Of the same run without a failure: replicas begin together, so what they sample goes up and down for long.
        usual, hit = (World(plant, one, system, seed).run(10) for one in (whole, broken))
        sampled = [[late[1] - early[1] for early, late in pairwise(run.probes)] for run in (usual, hit)]
        found["during"].append(sampled[1][0] / sampled[0][0])
        found["after"].append(sampled[1][1] / sampled[0][1])
        rates = [(late.tokens - early.tokens) / (late.at - early.at) for early, late in pairwise(hit.marks[1:])]
        slowest = min(range(len(rates)), key=rates.__getitem__)
        found["step"].append(rates[slowest] / fmean(rates[:slowest] + rates[slowest + 1 :]))
    units = {"during": "tokens sampled, over without", "after": "the same, restored", "step": "slowest step / others"}
    for name, values in found.items():
        yield _over_seeds(name, values, papers.FAILURE[name], units[name])


def ranked(of: Detail) -> Iterator[Row]:
    """StreamRL's table 4: how many of the longest a ranker of these errors finds."""
    noise = Noise(*detail("ranker_score_error"))
    rng = np.random.default_rng(0)
    for share, published in papers.RECALL.items():
        found = []
        for seed in range(4 * of.seeds):
            lengths = papers.STREAMRL_LENGTHS.quantile(rng.random(1024))
            told = noise.ranked(lengths.tolist(), random.Random(f"recall/{seed}"))
            found.append(recall(lengths, told, share / 100))
        yield _row(f"longest {share} %", fmean(found), published, "recall", fitted=True, seeds=of.seeds)


def profile(of: Detail) -> Iterator[Row]:
    """StreamRL's figure 2: one stage alone by GPUs, at 8,192 tokens, and by tokens, on 8 GPUs."""
    row = streamrl_row("20K", of.model)

    def alone(gpus: int, tokens: int) -> tuple[float, float]:
        _, work, _ = streamrl(row, "sync", NEUTRAL)
        work = replace(work, lengths=Lengths(((tokens - 0.4, 1.0),), tokens + 0.4))
        seconds = generation_s(replace(row, gpus=2 * gpus, generating=gpus), 0, work=work, known="nothing")
        return seconds, training_s(row, work, gpus)

    first = alone(8, 8192)
    for gpus, published in papers.PROFILE_GPUS.items():
        yield from _stages(alone(gpus, 8192), first, published, gpus, f"{gpus} GPUs")
    first = alone(8, 1024)
    for tokens, published in papers.PROFILE_TOKENS.items():
        yield from _stages(alone(8, tokens), first, published, 8, f"{tokens} tokens")


def _stages(
    found: tuple[float, float], first: tuple[float, float], published: tuple[float, float], gpus: int, name: str
) -> Iterator[Row]:
    for stage, mine, base, theirs in zip(("generation", "training"), found, first, published, strict=True):
        yield _row(f"{stage}, {name}", mine / base, theirs, "time, over the first", gpus=gpus)


def splits(of: Detail) -> Iterator[Row]:
    """StreamRL's figure 10: both stages by split, and the split that its algorithm 1 takes here."""
    row = streamrl_row("20K", of.model)
    _, work, _ = streamrl(row, "sync", NEUTRAL)
    even = next(iter(papers.SPLITS[of.model]))

    def found(generating: int) -> float:
        return fmean(generation_s(replace(row, generating=generating), seed, steps=8) for seed in range(of.seeds))

    base = found(even)
    for generating, (generation, training) in papers.SPLITS[of.model].items():
        trained_s = training_s(row, work, row.gpus - generating)
        for stage, predicted, published in (
            ("generation", found(generating) / base, generation),
            ("training", trained_s / base, training),
        ):
            name = f"{generating} + {row.gpus - generating}: {stage}"
            yield _row(name, predicted, published, "time, over generation on half", seeds=of.seeds)
    yield _row("split of algorithm 1", balanced(row), max(papers.SPLITS[of.model]), "GPUs that generate")


@cache
def balanced(row: StreamRow) -> int:
    """GPUs that generate by StreamRL's algorithm 1, in whole replicas: the slower of both stages takes least then."""
    _, work, _ = streamrl(row, "sync", NEUTRAL)
    unit: int = known("replica_gpus_streamrl")[row.model]
    generate_s = cache(lambda replicas: generation_s(replace(row, generating=replicas * unit), 0))
    (split,) = one_site(row.gpus // unit, generate_s, lambda units: training_s(row, work, units * unit), max)
    return split.workers * unit


def growing(of: Detail) -> Iterator[Row]:
    """StreamRL's figure 11: lengths grow, and GPUs are added when that gains as much as generation is behind."""
    row = streamrl_row("10K", of.model)
    _, work, _ = streamrl(row, "sync", NEUTRAL)
    generating = balanced(row)
    training, added = row.gpus - generating, []
    largest = max(map(abs, papers.GROWING))
    for step, published in enumerate(papers.GROWING, start=1):
        longer = replace(work.lengths, factor=0.5 + 0.5 * (step - 1) / (len(papers.GROWING) - 1))
        now = replace(work, lengths=longer)

        def found(gpus: int, now: Workload = now) -> float:
            one = replace(row, gpus=gpus + training, generating=gpus)
            return fmean(generation_s(one, seed, work=now) for seed in range(of.seeds))

        mine_s = found(generating)
        behind_s = mine_s - training_s(row, now, training)
        more = {"of": largest, "generating": generating, "seeds": of.seeds}
        yield _row(f"step {step}", behind_s, published, "s that generation takes longer", **more)
        if behind_s >= mine_s - found(generating + STEP_GPUS):
            generating += STEP_GPUS
            added.append(step)
    for number, published in enumerate(papers.ADDED):
        at = added[number] if number < len(added) else None
        yield _row(f"GPUs added, time {number + 1}", at, published, "step", seeds=of.seeds)


def other_place(of: Detail) -> Iterator[Row]:
    """StreamRL's figure 12: cheaper GPUs in another place generate."""
    row = streamrl_row(of.lengths, of.model)
    training = row.gpus // 2
    rates = []
    for plant, work, system in (across(row, training), streamrl(row, "async")):
        outcomes = [World(plant, work, system, seed).run(10) for seed in range(of.seeds)]
        rates.append(fmean(outcome.rate(2) for outcome in outcomes) / work.tokens * work.samples)
    cost = (row.gpus * known("h20_cost") + training) / row.gpus
    runs = {"seeds": of.seeds, "steps": 8}
    yield _row("two places", rates[0], papers.ACROSS[of.lengths], "samples/s", **runs)
    gain, published = rates[0] / cost / rates[1], papers.ACROSS_GAIN[of.lengths]
    yield _row("two places, by cost", gain, published, "over one place's", **runs)


def link(of: Detail) -> Iterator[Row]:
    """StreamRL's section 7.3: weights over the link between two places, at line rate and in two bytes."""
    seconds = weight_bytes(of.model) / known("link_bytes_per_s")
    yield _row("link", seconds, papers.LINK_S, "s until weights have crossed the link")


def every() -> Iterator[Detail]:
    """All of them."""
    for model in ("32B", "72B"):
        yield Detail("laminar", "18", model, 32, "relays", relays)
        yield Detail("laminar", "14", model, 32, "all GPUs together", waits)
        yield Detail("streamrl", "10", model, streamrl_row("20K", model).gpus, "split of algorithm 1", splits, "20K")
    yield Detail("laminar", "9", "32B", 4, "full_s", one_replica)
    yield Detail("laminar", "15", "32B", 128, "during", failure)
    yield Detail("streamrl", "table 4", "7B", 0, "longest 20 %", ranked, "20K")
    yield Detail("streamrl", "2", "7B", 8, "generation, 8 GPUs", profile)
    yield Detail("streamrl", "11", "7B", 32, "step 1", growing, "10K to 20K")
    yield Detail("streamrl", "section 7.3", "72B", 0, "link", link)
    for lengths in papers.ACROSS:
        yield Detail("streamrl", "12", "7B", 48, "two places", other_place, lengths)
