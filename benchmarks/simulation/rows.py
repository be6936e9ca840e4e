"""What is simulated and told: a task a row, by part."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from benchmarks.simulation import papers
from benchmarks.simulation.papers import LAMINAR, STREAMRL, LaminarRow, StreamRow
from benchmarks.simulation.parameters import (
    LAMINAR_SYSTEMS,
    STREAMRL_SYSTEMS,
    arrivals,
    laminar,
    streamrl,
)
from benchmarks.simulation.plant import Plant, System, Workload
from benchmarks.simulation.stages import NEUTRAL
from benchmarks.simulation.world import Outcome, World

PARTS = ("streamrl", "laminar", "details", "scale")
SEEDS, MEASURED = 5, 8
WARM_UP = {"synchronous": 1, "stream": 1, "one_step_async": 2, "trajectory_async": 4}
"""Steps that are dropped: until as many batches are under way as the mode has."""
OTHERS = ("synchronous", "laminar_without_repack", "streamrl_ranker_repack")
"""Simulated beside what Laminar compared, in the configurations ``DETAILED``."""
DETAILED = (("7B", 64), ("32B", 128), ("72B", 1024))
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

    def row(self) -> Row:
        """Simulate it."""
        began = time.process_time()
        found = getattr(self, f"_{self.kind}")()
        return {
            "paper": self.paper,
            "figure": self.figure,
            "model": self.model,
            "gpus": self.gpus,
            "lengths": self.lengths,
            "system": self.system,
            **found,
            "published": self.published,
            "fitted": self.fitted,
            "cpu_s": time.process_time() - began,
        }

    def rank(self) -> int:
        """Published rows first, and those whose completions are not followed one by one, which take a fifth as long."""
        is_long = self.system in ("areal", "laminar", *OTHERS[1:])
        return 2 * is_long + 3 * (self.published is None)

    def setting(self) -> tuple[Plant, Workload, System]:
        """What is simulated."""
        if self.paper == "streamrl":
            row = next(row for row in STREAMRL if (row.lengths, row.model) == (self.lengths, self.model))
            return streamrl(row, self.system)
        row = next(row for row in LAMINAR if (row.model, row.gpus) == (self.model, self.gpus))
        return laminar(row, self.system)

    def _rate(self) -> Row:
        plant, work, system = self.setting()
        outcomes = simulated(plant, work, system, self.seeds)
        warm_up = WARM_UP[system.mode]
        rates = [outcome.rate(warm_up) for outcome in outcomes]
        samples = self.paper == "streamrl"
        scaled = [rate / work.tokens * work.samples if samples else rate / 1000 for rate in rates]
        return {
            "predicted": fmean(scaled),
            "unit": "samples/s" if samples else "thousand tokens/s",
            "range": [min(scaled), max(scaled)],
            **observed(outcomes, warm_up),
            "share_of_bound": fmean(rates) / bound(plant, work, system),
            "stage": "generation" if generation_s(plant, work) > training_s(plant, work) else "training",
            "seeds": len(outcomes),
            "steps": MEASURED,
        }

    def _dispatch(self) -> Row:
        """Generation alone, as a share of what placement without knowledge takes."""
        row = next(row for row in STREAMRL if (row.lengths, row.model) == ("20K", self.model))
        plant, work, _ = streamrl(row, "sync", NEUTRAL)
        plant = replace(plant, sync_s=0.0, stall_s=0.0, arrivals_s=())
        plain = System("", "synchronous", "plan")
        ranked = replace(plain, strategy="skewness_aware", known=self.system)  # type: ignore[arg-type]
        seconds = [
            [found.step_s(0) for found in simulated(plant, work, one, self.seeds, warm_up=0)] for one in (plain, ranked)
        ]
        shares = [ours / theirs for theirs, ours in zip(*seconds, strict=True)]
        return {
            "predicted": fmean(seconds[1]) / fmean(seconds[0]),
            "unit": "share of random placement's time",
            "range": [min(shares), max(shares)],
            "seeds": self.seeds,
            "steps": MEASURED,
        }

    def _broadcast(self) -> Row:
        hosts = self.gpus // 8
        return {"predicted": max(arrivals(self.model, hosts, 8)), "unit": "s until the last machine has new weights"}


def simulated(plant: Plant, work: Workload, system: System, seeds: int, *, warm_up: int = -1) -> list[Outcome]:
    """A run of each seed."""
    before = WARM_UP[system.mode] if warm_up < 0 else warm_up
    return [World(plant, work, system, seed).run(before + MEASURED) for seed in range(seeds)]


def observed(outcomes: list[Outcome], warm_up: int) -> Row:
    """Means over the runs: staleness shares at a completion's end and where it is trained, cache in use, latencies."""

    def shares(name: str) -> list[float]:
        counts = [getattr(outcome, name) for outcome in outcomes]
        total = sum(sum(one.values()) for one in counts)
        return [sum(one[steps] for one in counts) / total for steps in range(1 + max(max(one) for one in counts))]

    return {
        "step_s": fmean(outcome.step_s(warm_up) for outcome in outcomes),
        "kv": fmean(outcome.share("kv_s", warm_up) for outcome in outcomes),
        "busy": fmean(outcome.share("busy_s", warm_up) for outcome in outcomes),
        "sampled_per_s": fmean(outcome.sampled_rate(warm_up) for outcome in outcomes),
        "staleness_at_end": shares("finished"),
        "staleness_trained": shares("consumed"),
        "latency_mean_s": fmean(fmean(outcome.latencies) for outcome in outcomes),
        "latency_max_s": max(max(outcome.latencies) for outcome in outcomes),
        "moves": fmean(outcome.marks[-1].moves for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "simulated_s": sum(outcome.marks[-1].at for outcome in outcomes),
    }


def bound(plant: Plant, work: Workload, system: System) -> float:
    """Tokens a second without any bubble: the trainer busy all the time, or all replicas with full slots or caches, or
    the one process through which all samples pass; of colocated ones the first two after each other.
    """
    stages = [training_s(plant, work), generation_s(plant, work)]
    control_s = work.tokens * plant.control_s_per_token
    return work.tokens / max(control_s, sum(stages) if system.colocated else max(stages))


def training_s(plant: Plant, work: Workload) -> float:
    """Seconds of a step's training."""
    return work.tokens * plant.train_s_per_token + plant.train_s_per_step


def generation_s(plant: Plant, work: Workload) -> float:
    """Seconds of a step's tokens with every replica as full as slots and cache allow, contexts as in the mean."""
    held = work.lengths.held_mean(work.prompts.mean)
    batch = max(1, min(plant.slots, int(plant.kv_tokens / held)))
    step_s = plant.curve.leg_s(1, batch, round(batch * held))
    prefill_s = plant.curve.prefill_s(round(work.prompts.mean)) * work.groups
    return (work.samples * work.lengths.mean / batch * step_s + prefill_s) / plant.replicas


def tasks(part: str) -> Iterator[Task]:
    """Of a part."""
    match part:
        case "streamrl":
            for row in STREAMRL:
                yield from _streamrl_tasks(row)
            for model, published in papers.DISPATCH.items():
                gpus = next(row.generating for row in STREAMRL if (row.lengths, row.model) == ("20K", model))
                for known, share in published.items():
                    yield Task(part, "streamrl", "9", model, gpus, known, share, lengths="20K", kind="dispatch")
        case "laminar":
            for row in LAMINAR:
                yield from _laminar_tasks(row)
        case "details":
            for model in ("32B", "72B"):
                for machines, seconds in papers.BROADCAST[model].items():
                    yield Task(part, "laminar", "18", model, 8 * machines, "relays", seconds, kind="broadcast")
        case "scale":
            yield from _scale_tasks()


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


_BOTH = ("ranker", True, "idle")
_FOUR = (("nothing", False, "idle"), ("nothing", True, "idle"), ("ranker", False, "idle"), _BOTH)
SCALES = {1024: (768, 256, 1, (*_FOUR, ("ranker", False, "kept"))), 16_384: (12_288, 4096, 16, (_BOTH,))}
"""GPUs: those that train and that generate, the batch as a multiple of the paper's, and what is compared: what is known
of lengths, repack, and when weights are taken."""


@dataclass(frozen=True)
class ScaleTask(Task):
    """72B beyond the papers: with and without ranker and repack."""

    known: Literal["nothing", "ranker"] = "nothing"
    repack: bool = False
    adoption: Literal["idle", "kept"] = "idle"

    def rank(self) -> int:
        """The largest takes as long as all others."""
        return 1 if self.gpus <= 1024 else 9

    def setting(self) -> tuple[Plant, Workload, System]:
        """The paper's configuration at 1,024 GPUs, or batch and replicas as many times as large."""
        training, generating, times, _ = SCALES[self.gpus]
        row = replace(LAMINAR[-1], gpus=self.gpus, laminar=(training, generating))
        plant, work, _ = laminar(row, "streamrl_ranker_repack")
        system = replace(
            LAMINAR_SYSTEMS["streamrl_ranker_repack"], known=self.known, repack=self.repack, adoption=self.adoption
        )
        if self.known == "nothing":
            system = replace(system, strategy="least_loaded")
        # So many times the batch takes the trainer longer on so many times the GPUs by what the fit found serial.
        return plant, replace(work, groups=work.groups * times), system


def _scale_tasks() -> Iterator[Task]:
    for gpus, (*_, adoptions) in SCALES.items():
        for known, is_repacked, adoption in adoptions:
            name = f"{'ranker' if known == 'ranker' else 'no ranker'}, {'repack' if is_repacked else 'no repack'}"
            name += ", weights in flight" if adoption == "kept" else ""
            yield ScaleTask("scale", "none", "", "72B", gpus, name, known=known, repack=is_repacked, adoption=adoption)
