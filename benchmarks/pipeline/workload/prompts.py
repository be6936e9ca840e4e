"""Prompts whose text tells most of their length: what a ranker can learn, and a rest that it cannot.

A completion's log-length is normal, as the workload says; its standard deviation consists of what the prompt asks for
(its kind of task and a size) and of ``HIDDEN``, the luck of the sample. Perfect knowledge knows both.
"""

import json
import math
import random
from pathlib import Path

from benchmarks.pipeline.workload.workload import Workload

HIDDEN = 0.2
"""Spread of the log-length that the text does not show; a text model can rank the longest fifth with recall 0.89."""
KINDS = {
    "Sort these words by their last letter, {size} in all.": 11.0,
    "Add up {size} numbers and show every carry.": 27.0,
    "Find a way through a maze of {size} rooms.": 43.0,
    "Fill in a grid with {size} empty cells; no cell may repeat.": 83.0,
    "Prove that no {size} queens can attack each other here.": 160.0,
}
"""Wording, and tokens for each unit of its size."""


def write_prompts(path: Path, work: Workload, count: int, seed: int) -> None:
    """One prompt a line, with its completion's length in the column that the emulated engine reads."""
    rng = random.Random(f"{work.name}/{seed}")
    path.write_text("".join(json.dumps(_row(work, rng)) + "\n" for _ in range(count)))


def _row(work: Workload, rng: random.Random) -> dict[str, str | int]:
    shown = work.median * math.exp(rng.gauss(0.0, math.sqrt(max(0.0, work.sigma**2 - HIDDEN**2))))
    wording, unit = rng.choice(list(KINDS.items()))
    length = work.bounded(shown * math.exp(rng.gauss(0.0, min(HIDDEN, work.sigma))))
    return {"prompt": wording.format(size=max(1, round(shown / unit))), "length": length}
