"""A small policy for tests. A prompt's text shows its typical length, and samples vary around that length."""

import math
import random
from collections.abc import Iterable

from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import ObservedCompletion
from streamrl.schemas.trajectories import Prompt

SAMPLES = 4


def prompt_of(index: int, *, dataset: str = "", seed: int = 0) -> Prompt:
    rng = random.Random(f"{seed}/{index}")
    dataset = dataset or rng.choice(["sort", "spell"])
    size = rng.randint(2, 40)
    text = f"Sort these {size} numbers." if dataset == "sort" else f"Spell backward: {'ab' * size}"
    return Prompt(prompt_id=f"{dataset}/{index}", dataset=dataset, content=text, columns={"size": size})


def typical(prompt: Prompt) -> float:
    size = prompt.columns["size"]
    assert isinstance(size, int)
    return 20.0 * size if prompt.dataset == "sort" else 5.0 + size


def teach(
    predictor: LearnedLengths, indices: Iterable[int], *, growth: float = 1.0, version: int = 0, limit: int = 10**6
) -> None:
    """Let the predictor observe one group after another. Each fit is awaited, so that tests are reproducible."""
    rng = random.Random(version)
    for index in indices:
        prompt = prompt_of(index)
        predictor.predict(prompt)
        for _ in range(SAMPLES):
            length = min(limit, max(1, round(typical(prompt) * growth * math.exp(rng.gauss(0, 0.2)))))
            predictor.observe(
                ObservedCompletion(prompt, f"{index}/{version}", length, version, censored=length == limit)
            )
            predictor.wait()
