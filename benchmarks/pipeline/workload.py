"""What is sampled: so many workers and slots, so many completions a step, lengths with a heavy tail, and the prompts.

The logarithm of a completion's length is normal. Its variance has three parts: what the wording of the prompt shows
(``SHOWN``), what the prompt hides (``HIDDEN``), and the luck of the sample, the rest. No prompt states a number.
"""

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np

from streamrl.schemas.profiles import DecodeCurve, DecodeSettings

_NORMAL = NormalDist()
_P99 = _NORMAL.inv_cdf(0.99)
SHOWN, HIDDEN = 0.7, 0.1
"""Shares of the variance of a log-length; 1 - SHOWN - HIDDEN differs among the samples of one prompt."""
SLOTS = (
    ("Prove", "Derive", "Compute", "Estimate", "Explain", "Sketch", "List", "Name"),
    ("the winding number", "a tiling", "the shortest route", "a schedule", "the remainder", "a colouring"),
    ("of a torus", "of a grid", "in a maze", "for a relay", "by hand", "under a budget"),
    ("and check every case.", "and show the work.", "with one example.", "in plain words.", "briefly."),
)
"""Wordings: one of each. A choice adds to the log-length by its place: the first ones are the longest."""
WEIGHTS = (0.5, 0.2, 0.2, 0.1)
"""Share of the shown variance that each choice has."""
CHARACTERS_PER_TOKEN = 0.35
"""So that a prompt of some sixty characters takes the prefill of one of two hundred tokens."""
PUBLISHED_RECALL = {0.2: 0.87, 0.1: 0.82, 0.05: 0.76}
"""Of the longest share of all samples, the part that StreamRL's best ranker finds (arXiv 2504.15930, table 4)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Times are emulated seconds.

    ``samples``: completions a step, in groups of ``group``; ``cap``: most tokens of one; ``max_staleness``: of the mode
    ``trajectory_async``; ``train_ratio``: training time of a token as a multiple of its generation time with all slots
    busy; ``export_s``: from an optimizer step until its weights are where workers fetch them; ``slow_workers``: so many
    decode at half the speed of the others.
    """

    name: str
    samples: int
    group: int = 1
    cap: int = 10_000
    max_staleness: int = 4
    workers: int = 8
    slots: int = 32
    median: float = 1000.0
    p99_over_median: float = 10.0
    train_ratio: float = 1.0
    optimizer_s: float = 1.0
    export_s: float = 2.0
    slow_workers: int = 0
    decode: DecodeSettings = field(default_factory=lambda: DecodeSettings(prefill_s_per_token=1e-4, adopt_s=1.0))

    @property
    def groups_per_step(self) -> int:
        """Groups in an optimizer step."""
        return self.samples // self.group

    @property
    def speeds(self) -> tuple[float, ...]:
        """Of each worker, as a multiple of the curve's."""
        return tuple(0.5 if number < self.slow_workers else 1.0 for number in range(self.workers))

    @property
    def curve(self) -> DecodeCurve:
        """Seconds of a decode step by batch size, of a worker that is not slow."""
        return DecodeCurve(self.decode)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all workers with all slots busy."""
        return sum(self.speeds) * self.slots / self.curve.batch_s(self.slots)

    @property
    def train_s_per_token(self) -> float:
        """Seconds of forward and backward for a token."""
        return self.train_ratio / self.tokens_per_s

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of a length."""
        return math.log(self.p99_over_median) / _P99

    def length(self, score: float) -> int:
        """Tokens at a normal score, from 1 to the cap."""
        return max(1, min(self.cap, round(self.median * math.exp(self.sigma * score))))

    def write_prompts(self, path: Path, count: int, seed: int) -> None:
        """One prompt a line, with the lengths of its samples in the column that the emulated engine reads."""
        rng = random.Random(f"prompts/{seed}")
        path.write_text("".join(json.dumps(self._row(rng)) + "\n" for _ in range(count)))

    def _row(self, rng: random.Random) -> dict[str, str | list[int]]:
        words, shown = [], 0.0
        for choices, weight in zip(SLOTS, WEIGHTS, strict=True):
            place = rng.randrange(len(choices))
            words.append(choices[place])
            shown += math.sqrt(weight) * _effect(place, len(choices))
        own = math.sqrt(SHOWN) * shown + math.sqrt(HIDDEN) * rng.gauss(0.0, 1.0)
        luck = math.sqrt(1.0 - SHOWN - HIDDEN)
        return {
            "prompt": " ".join(words),
            "length": [self.length(own + luck * rng.gauss(0.0, 1.0)) for _ in range(self.group)],
        }


def _effect(place: int, count: int) -> float:
    """The normal score of a place among so many alike, scaled to a variance of 1; the first is the largest."""
    scores = [_NORMAL.inv_cdf((number + 0.5) / count) for number in range(count)]
    return -scores[place] / math.sqrt(sum(score * score for score in scores) / count)


def recall(lengths: "np.typing.ArrayLike", estimates: "np.typing.ArrayLike", share: float) -> float:
    """How much of the longest share is in the share that is estimated to be longest."""
    real, told = np.asarray(lengths), np.asarray(estimates)
    count = max(1, int(len(real) * share))
    longest = set(np.argsort(real, kind="stable")[-count:].tolist())
    return len(longest & set(np.argsort(told, kind="stable")[-count:].tolist())) / count


def paper_noise(work: Workload, draws: int = 20_000) -> float:
    """The sigma of a log-normal error with which lengths have the published recall of the longest fifth.

    Recall falls as the error grows, so it is found by bisection, over the workload's own lengths.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([work.length(score) for score in rng.standard_normal(draws)], np.float64)
    errors, low, high = rng.standard_normal(draws), 0.0, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        found = recall(lengths, lengths * np.exp(middle * errors), 0.2)
        low, high = (middle, high) if found > PUBLISHED_RECALL[0.2] else (low, middle)
    return low
