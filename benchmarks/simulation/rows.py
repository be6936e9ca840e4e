"""All rows that there are, by part; of throughputs, what is simulated for a row and what is told of it, also of ranker
and repack beyond the papers: 72B on 1,024 GPUs and more.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from benchmarks.simulation import papers
from benchmarks.simulation.details import Detail, every, generation_s, place, streamrl_row
from benchmarks.simulation.outcome import KINDS, Outcome
from benchmarks.simulation.papers import LAMINAR, STREAMRL, LaminarRow, StreamRow
from benchmarks.simulation.parameters import LAMINAR_SYSTEMS, STREAMRL_SYSTEMS, known, laminar, streamrl, tool_calling
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.world import World

SEEDS, MEASURED = 5, 8
WARM_UP = {"synchronous": 1, "stream": 1, "one_step_async": 2, "trajectory_async": known("warm_up_laminar")}
"""Steps that are dropped: until as many batches are under way as the mode has."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A row, or several that come from the same runs. ``published``: None where the paper's figure is not used."""

    part: str
    paper: Literal["streamrl", "laminar", "none"]
    figure: str
    model: str
    gpus: int
    system: str
    published: float | None = None
    fitted: bool = False
    lengths: str = ""
    kind: str = "rate"
    seeds: int = SEEDS
    measured: int = MEASURED

    def rows(self) -> list[Row]:
        """Simulate it."""
        began = time.process_time()
        found = getattr(self, f"_{self.kind}")()
        told = {"published": self.published, "fitted": self.fitted, "cpu_s": time.process_time() - began}
        return [{**place(self), **found, **told}]

    def rank(self) -> int:
        """Published rows first, and of those the ones that take seconds; partial rollout takes longest."""
        is_long = self.system.startswith(("areal", "streamrl_"))
        return 3 * (self.figure == "12") + is_long if self.published is not None else 2 + 2 * is_long

    def setting(self) -> tuple[Plant, Workload, System]:
        """What is simulated."""
        if self.paper == "streamrl":
            return streamrl(streamrl_row(self.lengths, self.model), self.system)
        row = next(row for row in LAMINAR if (row.model, row.gpus) == (self.model, self.gpus))
        plant, work, system = laminar(row, self.system)
        return (*tool_calling(plant, work), system) if self.figure == "12" else (plant, work, system)

    def unbound(self, plant: Plant) -> Plant:
        """The plant that the bound is reckoned of."""
        return plant

    def _rate(self) -> Row:
        plant, work, system = self.setting()
        warm_up = WARM_UP[system.mode]
        outcomes = simulated(plant, work, system, self.seeds, steps=warm_up + self.measured)
        most = bound(self.unbound(plant), work, system)
        rates = [outcome.rate(warm_up) for outcome in outcomes]
        samples = self.paper == "streamrl"
        scaled = [rate / work.tokens * work.samples if samples else rate / 1000 for rate in rates]
        return {
            "predicted": fmean(scaled),
            "unit": "samples/s" if samples else "thousand tokens/s",
            "range": [min(scaled), max(scaled)],
            **observed(outcomes, warm_up),
            "share_of_bound": fmean(rates) / most,
            "worst_share_of_bound": min(rates) / most,
            "stage": "generation" if sampling_s(self.unbound(plant), work) > training_s(plant, work) else "training",
            "seeds": len(outcomes),
            "steps": self.measured,
        }

    def _dispatch(self) -> Row:
        """Generation alone, as a share of what placement without knowledge takes."""
        row = streamrl_row("20K", self.model)
        plain, ours = (
            [generation_s(row, seed, steps=MEASURED, known=known) for seed in range(self.seeds)]
            for known in ("nothing", self.system)
        )
        shares = [mine / theirs for theirs, mine in zip(plain, ours, strict=True)]
        return {
            "predicted": fmean(ours) / fmean(plain),
            "unit": "share of random placement's time",
            "range": [min(shares), max(shares)],
            "seeds": self.seeds,
            "steps": MEASURED,
        }


def simulated(plant: Plant, work: Workload, system: System, seeds: int, *, steps: int) -> list[Outcome]:
    """A run of each seed."""
    return [World(plant, work, system, seed).run(steps) for seed in range(seeds)]


def observed(outcomes: list[Outcome], warm_up: int) -> Row:
    """Means over the runs: staleness shares at a completion's end and where it is trained, cache in use, latencies."""

    def shares(name: str) -> list[float]:
        counts = [outcome.counted(name, warm_up) for outcome in outcomes]
        total = sum(sum(one.values()) for one in counts)
        return [sum(one[steps] for one in counts) / total for steps in range(1 + max(max(one) for one in counts))]

    return {
        "step_s": fmean(outcome.step_s(warm_up) for outcome in outcomes),
        "kv": fmean(outcome.share("kv_s", warm_up) for outcome in outcomes),
        "busy": fmean(outcome.share("busy_s", warm_up) for outcome in outcomes),
        "sampled_per_s": fmean(outcome.sampled_rate(warm_up) for outcome in outcomes),
        "staleness_at_end": shares("finished"),
        "staleness_trained": shares("consumed"),
        "latency_mean_s": fmean(fmean(outcome.latencies_after(warm_up)) for outcome in outcomes),
        "latency_max_s": max(max(outcome.latencies_after(warm_up)) for outcome in outcomes),
        **slots(outcomes, warm_up),
        "moves_per_step": fmean(outcome.per_step("moves", warm_up) for outcome in outcomes),
        "released_per_step": fmean(outcome.per_step("released", warm_up) for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "simulated_s": sum(outcome.marks[-1].at for outcome in outcomes),
    }


def slots(outcomes: list[Outcome], warm_up: int) -> Row:
    """What slots did, as shares of all, and how much of the time the trainer worked; nothing without looks."""
    total: Counter[str] = sum((outcome.counted("slots", warm_up) for outcome in outcomes), Counter())
    looks, waits = total.pop("looks", 0), total.pop("trainer_waits", 0)
    if not looks:
        return {}
    shares = {kind: total[kind] / sum(total.values()) for kind in KINDS}
    return {"bubbles": shares, "trainer_busy": 1 - waits / looks}


def bound(plant: Plant, work: Workload, system: System) -> float:
    """Tokens a second without any bubble: the trainer busy all the time, or all replicas with full slots or caches, or
    the one process through which all samples pass; of colocated ones the first two after each other.
    """
    stages = [training_s(plant, work), sampling_s(plant, work)]
    control_s = work.tokens * plant.control_s_per_token
    return work.tokens / max(control_s, sum(stages) if system.colocated else max(stages))


def training_s(plant: Plant, work: Workload) -> float:
    """Seconds of a step's training."""
    return work.tokens * plant.train_s_per_token + plant.train_s_per_step


def sampling_s(plant: Plant, work: Workload) -> float:
    """Seconds of a step's tokens with every replica as full as slots and cache allow, contexts as in the mean."""
    held = work.lengths.held_mean(work.prompts.mean)
    batch = max(1, min(plant.slots, int(plant.kv_tokens / held)))
    prefill_s = plant.curve.prefill_s(round(work.prompts.mean)) * work.groups
    return (plant.curve.kept_full_s(work.samples * work.lengths.mean, batch, held) + prefill_s) / plant.replicas


Known = Literal["nothing", "ranker"]
Adoption = Literal["idle", "kept"]
FOUR: tuple[tuple[Known, bool, Adoption], ...] = (
    ("nothing", False, "idle"),
    ("nothing", True, "idle"),
    ("ranker", False, "idle"),
    ("ranker", True, "idle"),
)
"""What is known of lengths, repack, and when weights are taken."""


@dataclass(frozen=True)
class ScaleTask(Task):
    """``training`` GPUs and ``generating`` ones; the batch is so many ``times`` the paper's.

    ``slots``: completions that a replica may run; the bound is that of as many as the paper allows.
    """

    known: Known = "nothing"
    repack: bool = False
    adoption: Adoption = "idle"
    training: int = 768
    generating: int = 256
    times: int = 1
    slots: int = 1024

    def rank(self) -> int:
        """The largest takes as long as all others."""
        return 2 if self.gpus <= 1024 else 9

    def setting(self) -> tuple[Plant, Workload, System]:
        """As Laminar's 72B at 1,024 GPUs, with another split, or batch and replicas as many times as large."""
        row = replace(LAMINAR[-1], gpus=self.gpus, laminar=(self.training, self.generating))
        plant, work, _ = laminar(row, "streamrl_ranker_repack")
        system = replace(
            LAMINAR_SYSTEMS["streamrl_ranker_repack"],
            known=self.known,
            repack=self.repack,
            adoption=self.adoption,
            look_s=LOOK_S,
        )
        if self.known == "nothing":
            system = replace(system, strategy="least_loaded")
        # So many times the batch takes the trainer longer on so many times the GPUs by what the fit found serial.
        return replace(plant, slots=self.slots), replace(work, groups=work.groups * self.times), system

    def rows(self) -> list[Row]:
        """With what its split is."""
        split = {"training": self.training, "generating": self.generating, "slots": self.slots}
        return [{**row, **split} for row in super().rows()]

    def unbound(self, plant: Plant) -> Plant:
        """With as many slots as the paper allows."""
        return replace(plant, slots=known("concurrency"))


LOOK_S = 5.0
SPLITS = ((768, 256), (640, 384), (512, 512), (384, 640))
"""GPUs that train and that generate, of 1,024: Laminar's own split first."""
FEW_SLOTS = 256


def scale_tasks() -> Iterator[ScaleTask]:
    """All of them."""
    for training, generating in SPLITS:
        for choice in FOUR:
            yield _task(training, generating, choice)
    for choice in (*FOUR, ("ranker", False, "kept")):
        yield _task(*SPLITS[0], choice, slots=FEW_SLOTS)
    yield _task(12_288, 4096, FOUR[-1], times=16)


def _task(
    training: int, generating: int, choice: tuple[Known, bool, Adoption], *, times: int = 1, slots: int = 1024
) -> ScaleTask:
    known_of, is_repacked, adoption = choice
    name = f"{'ranker' if known_of == 'ranker' else 'no ranker'}, {'repack' if is_repacked else 'no repack'}"
    name += ", weights in flight" if adoption == "kept" else ""
    name = f"{training} + {generating}, {slots} slots: {name}"
    return ScaleTask(
        "scale", "none", "", "72B", training + generating, name, known=known_of, repack=is_repacked,
        adoption=adoption, training=training, generating=generating, times=times, slots=slots,
        measured=16 if times == 1 else 8,
    )  # fmt: skip


PARTS = ("streamrl", "laminar", "details", "scale")
OTHERS = (
    "synchronous",
    "laminar_without_repack",
    "streamrl_ranker_repack",
    "areal, k = 1",
    "areal, k = 2",
    "areal, k = 4",
)
"""Simulated beside what Laminar compared, in the configurations ``DETAILED``."""
DISPATCH_FITTED = ("7B", "32B")
"""Models on whose figure 9 the completions that a StreamRL replica runs at once were fitted."""
DETAILED = (("7B", 64), ("32B", 128), ("72B", 1024))


def tasks(part: str) -> Iterator[Task | Detail]:
    """Of a part."""
    match part:
        case "streamrl":
            for row in STREAMRL:
                yield from _streamrl_tasks(row)
            for model, published in papers.DISPATCH.items():
                gpus = next(row.generating for row in STREAMRL if (row.lengths, row.model) == ("20K", model))
                for known, share in published.items():
                    is_fitted = model in DISPATCH_FITTED
                    yield Task(part, "streamrl", "9", model, gpus, known, share, is_fitted, "20K", "dispatch")
        case "laminar":
            for compared in LAMINAR:
                yield from _laminar_tasks(compared)
            for gpus, rates in papers.TOOL_CALLING.items():
                for system, value in zip(papers.TOOL_SYSTEMS, rates, strict=True):
                    yield Task(part, "laminar", "12", "7B", gpus, system, value)
        case "details":
            yield from every()
        case "scale":
            yield from scale_tasks()


def _streamrl_tasks(row: StreamRow) -> Iterator[Task]:
    published = dict(zip(papers.STREAMRL_SYSTEMS, row.published, strict=False))
    for system in STREAMRL_SYSTEMS:
        value = published.get(system)
        yield Task(
            "streamrl", "streamrl", "8", row.model, row.gpus, system, value, value is not None, lengths=row.lengths
        )


def _laminar_tasks(row: LaminarRow) -> Iterator[Task]:
    published = dict(zip(papers.SYSTEMS, row.published, strict=False))
    others = OTHERS if (row.model, row.gpus) in DETAILED else ()
    for system in (*papers.SYSTEMS, *others):
        value = published.get(system)
        yield Task("laminar", "laminar", "11", row.model, row.gpus, system, value, value is not None)
