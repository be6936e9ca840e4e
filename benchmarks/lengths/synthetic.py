"""Prompts whose lengths are known, and can be learned from their text as well as wanted: for emulated runs.

Lengths are lognormal with median 1,000 and p99 = 10 × median. Of a prompt's normal score a part is visible: the text
asks for a number of steps of some kind, each kind with its own cost, among numbers that mean nothing. ``noise`` is the
standard deviation, in units of the score's, of the part that is not.
"""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

MEDIAN = 1000
P99_OVER_MEDIAN = 10.0
SIGMA = math.log(P99_OVER_MEDIAN) / NormalDist().inv_cdf(0.99)
NOISE = 0.2
"""With which a ranker that has seen a thousand completions recalls 0.89 of the longest fifth, as the paper's does."""
KINDS = (
    ("Sort these {n} records by their keys and show every exchange.", -0.6, 0.8),
    ("Prove the lemma for all cases up to {n}, one after the other.", 0.7, 1.0),
    ("Spell the word of {n} letters backward.", -1.0, 0.6),
    ("Search the tree of {n} nodes for the cheapest path.", 0.3, 1.2),
    ("Add {n} columns of figures by hand.", -0.2, 0.9),
    ("Explore a maze with {n} junctions until the exit is found.", 1.0, 1.1),
)
"""What is asked for, the score of a usual number of steps, and how much the score grows when they multiply by e."""
USUAL_STEPS = 60.0


def prompts(count: int, seed: int, noise: float = NOISE) -> Iterator[dict[str, Any]]:
    """Rows with ``prompt`` and ``length`` (tokens, not capped); as many as wanted, the same ones for a seed."""
    rng = random.Random(f"synthetic/{seed}/{noise}")
    for _ in range(count):
        visible, hidden = rng.gauss(0, 1), rng.gauss(0, 1)
        score = math.sqrt(max(0.0, 1 - noise**2)) * visible + noise * hidden
        text, offset, growth = rng.choice(KINDS)
        steps = max(1, round(USUAL_STEPS * math.exp((visible - offset) / growth)))
        asked = f"Ticket {rng.randint(1000, 9999)}, room {rng.randint(1, 40)}. {text.format(n=steps)}"
        yield {"prompt": asked, "length": max(1, round(MEDIAN * math.exp(SIGMA * score)))}


def write_prompts(path: Path, n: int, seed: int = 0, noise: float = NOISE) -> Path:
    """Write ``n`` rows as JSON lines, for ``data.path`` with ``emulation.lengths.source = "column"``; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in prompts(n, seed, noise):
            file.write(json.dumps(row) + "\n")
    return path


def fit_ahead(
    model_dir: Path, n: int, seed: int, noise: float = NOISE, limit: int = 10 * MEDIAN, dataset: str = "synthetic"
) -> float:
    """Fit the light ranker to ``n`` earlier prompts of this kind, so that a run starts warm; recall@20 % held out.

    A run of them needs ``lengths.model_dir``, and its prompts of a data set of that name: in ``synthetic.jsonl``.
    """
    from streamrl.producers.lengths.learned.offline import fit_trees
    from streamrl.producers.lengths.predictor import ObservedCompletion
    from streamrl.schemas.trajectories import Prompt

    earlier = []
    for number, row in enumerate(prompts(n, seed, noise)):
        prompt = Prompt(prompt_id=f"earlier/{seed}/{number}", dataset=dataset, content=row["prompt"])
        length = min(limit, row["length"])
        earlier.append(ObservedCompletion(prompt, f"{prompt.prompt_id}/0", length, censored=length == limit))
    return fit_trees(earlier, model_dir, quantile=0.9, test_share=0.2).scores["learned"]["all"].recall[0] or 0.0
