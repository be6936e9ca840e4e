"""A row of throughputs: what is simulated for it, and what is told of it."""

import time
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from benchmarks.simulation.bubbles import KINDS
from benchmarks.simulation.details import generation_s, streamrl_row
from benchmarks.simulation.outcome import Outcome
from benchmarks.simulation.papers import LAMINAR
from benchmarks.simulation.parameters import known, laminar, streamrl, tool_calling
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
        row = {
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
        return [row]

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
    step_s = plant.curve.leg_s(1, batch, round(batch * held))
    prefill_s = plant.curve.prefill_s(round(work.prompts.mean)) * work.groups
    return (work.samples * work.lengths.mean / batch * step_s + prefill_s) / plant.replicas
