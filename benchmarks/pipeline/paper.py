"""The paper's own case: its length histogram and decode curve, 1,024 samples, generation alone. Plans are executed to
the letter: no item moves afterwards.

Placement is random with equally many samples on each instance (a random one that is not even is slower). Slots of a 7B
instance: its key-value cache of 114,688 bytes a token (28 layers, 8 heads of 128, two bytes, keys and values) in nine
tenths of the memory beside the weights. Of 32 GPUs of 80 GB half generate: 8 instances of two GPUs hold 1.12 M tokens
each, which is 64 completions of 17.5 K.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from benchmarks.pipeline.workload import PUBLISHED_RECALL, recall
from streamrl.planning.prediction import ends_alone
from streamrl.producers.dispatch.plans import Item, WorkerCapacity
from streamrl.producers.dispatch.strategies import STRATEGIES
from streamrl.producers.generation.engines.length_trace import STREAMRL_BINS, LengthTraceSettings, cumulated
from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

CURVE = DecodeCurve(DecodeSettings(step_s=0.00859, batch_scale=0.00859 / 0.0000527))
SAMPLES = 1024
PLANTS = ((8, 64), (8, 128), (4, 116), (16, 64))
"""Instances and slots; the first is the one that is derived above."""
COMPARED = ("lpt", "streamrl_sum", "streamrl_max", "skewness_aware")
PUBLISHED = {"oracle": 0.82, "paper_recall": 0.90}
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Queue:
    """One worker's completions by their real lengths, in the order in which they get slots; ``slots`` run at once."""

    lengths: tuple[int, ...]
    slots: int


def finish_times(queue: Queue, curve: DecodeCurve) -> list[float]:
    """Seconds from the start to each completion's end, in the order of the queue: the emulated engine's own batch."""
    return ends_alone(((0, length) for length in queue.lengths), curve, max(1, queue.slots))


def makespan(queues: Sequence[Queue], curve: DecodeCurve) -> float:
    """Seconds until the last completion ends."""
    return max(at for queue in queues for at in finish_times(queue, curve))


def round_robin(lengths: Sequence[int], workers: int, slots: int) -> list[Queue]:
    """Completion i goes to worker i modulo the number of workers."""
    return [Queue(tuple(lengths[worker::workers]), slots) for worker in range(workers)]


def planned(
    strategy: str, lengths: Sequence[int], told: Sequence[int], workers: int, slots: int, curve: DecodeCurve
) -> list[Queue]:
    """The strategy's plan for idle workers, from what is told of the lengths."""
    items = [Item(key, max(1, tokens)) for key, tokens in enumerate(told)]
    fleet = [WorkerCapacity(f"worker-{number}", slots, curve=curve) for number in range(workers)]
    shares = STRATEGIES[strategy](items, fleet).shares
    return [Queue(tuple(lengths[item.key] for item in share.items), share.concurrency) for share in shares]


@dataclass(frozen=True)
class Noise:
    """A ranker's error in normal scores: its standard deviation is ``base`` + ``tail`` × max(0, score)."""

    base: float
    tail: float

    def ranked(self, lengths: Sequence[int], rng: random.Random) -> list[int]:
        """Lengths as the ranker has them: the real ones, in an order that is only roughly right."""
        count = len(lengths)
        scores = []
        for rank, index in enumerate(np.argsort(lengths, kind="stable")):
            score = _NORMAL.inv_cdf((rank + 0.5) / count)
            scores.append((score + rng.gauss(0.0, self.base + self.tail * max(0.0, score)), int(index)))
        estimates = [0] * count
        for length, (_, index) in zip(sorted(lengths), sorted(scores), strict=True):
            estimates[index] = length
        return estimates


def draw(rng: random.Random, count: int = SAMPLES) -> list[int]:
    """Lengths from the paper's histogram."""
    shares, ends = cumulated(STREAMRL_BINS, LengthTraceSettings().histogram_end_tokens)
    return [int(length) for length in np.interp([rng.random() for _ in range(count)], shares, ends)]


def calibrated(seeds: int) -> tuple[Noise, dict[float, float]]:
    """The noise whose recalls come closest to the published ones, and these recalls, means over seeds."""
    found = []
    for base in (0.14, 0.16, 0.18, 0.2, 0.22, 0.24):
        for tail in (0.0, 0.04, 0.08, 0.12, 0.16, 0.2):
            noise = Noise(base, tail)
            recalls = _recalls(noise, seeds)
            # Squares, so that no one of the three published shares is missed by much.
            error = sum((recalls[share] - wanted) ** 2 for share, wanted in PUBLISHED_RECALL.items())
            found.append((error, base, tail, recalls))
    _, base, tail, recalls = min(found, key=lambda entry: entry[0])
    return Noise(base, tail), recalls


def _recalls(noise: Noise, seeds: int) -> dict[float, float]:
    tried = []
    for seed in range(seeds):
        rng = random.Random(f"recall/{seed}")
        lengths = draw(rng)
        estimates = noise.ranked(lengths, rng)
        tried.append({share: recall(lengths, estimates, share) for share in PUBLISHED_RECALL})
    return {share: fmean(one[share] for one in tried) for share in PUBLISHED_RECALL}


def compare(seeds: int) -> list[dict[str, Any]]:
    """Every plant, ranker and strategy; generation time as a share of random placement's, means over seeds."""
    noise, recalls = calibrated(max(10, seeds))
    rows = []
    for instances, slots in PLANTS:
        for known in PUBLISHED:
            shares: dict[str, list[float]] = {strategy: [] for strategy in COMPARED}
            seconds = []
            for seed in range(seeds):
                rng = random.Random(f"paper/{seed}")
                lengths = draw(rng)
                told = lengths if known == "oracle" else noise.ranked(lengths, rng)
                base = makespan(round_robin(lengths, instances, slots), CURVE)
                seconds.append(base)
                for strategy in COMPARED:
                    queues = planned(strategy, lengths, told, instances, slots, CURVE)
                    shares[strategy].append(makespan(queues, CURVE) / base)
            rows += [
                _row(strategy, known, (instances, slots), fmean(seconds), found, recalls)
                for strategy, found in shares.items()
            ]
    return rows


def _row(
    strategy: str,
    known: str,
    plant: tuple[int, int],
    random_s: float,
    shares: list[float],
    recalls: dict[float, float],
) -> dict[str, Any]:
    share = fmean(shares)
    return {
        "workload": f"streamrl-7b-20k/{plant[0]}x{plant[1]}",
        "group": 1,
        "mode": "generation_alone",
        "dispatch": strategy,
        "lengths": known,
        "measured": False,
        "time_scale": 1.0,
        "trajectories_per_s": SAMPLES / (share * random_s),
        "ratio_to_synchronous": 1 / share,
        "share_of_random": share,
        "share_range": [min(shares), max(shares)],
        "published_share": PUBLISHED[known],
        "recalls": [1.0, 1.0, 1.0] if known == "oracle" else [round(value, 3) for value in recalls.values()],
        "seeds": len(shares),
    }
