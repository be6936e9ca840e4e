"""What an erring ranker costs: generation alone with the real dispatcher and its corrections, in virtual time.

Lengths are told times exp(sigma × z), z standard normal: 0 is perfect knowledge; against lengths with a sigma of about
one, 4 is as good as random. Recall: of the longest fifth, the part that is told to be in it.
"""

import random
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.pipeline.bounds.planned import noisy
from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.results import Row
from benchmarks.pipeline.running.figures import figures
from benchmarks.pipeline.studies.paper import recall
from benchmarks.pipeline.virtual import TIME_SCALE, run_virtually
from benchmarks.pipeline.workload.prompts import write_prompts
from benchmarks.pipeline.workload.workload import WORKLOADS

WORK = replace(WORKLOADS["a"], name="sweep/ranker", groups_per_step=1024)
SIGMAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)


def ranker_sweep(steps: int, seed: int) -> list[Row]:
    """Round robin, and skewness-aware dispatch with ever worse rankers."""
    cases = [Case(WORK, "synchronous", "round_robin", warm_up=0, steps=steps)]
    cases += [
        Case(WORK, "synchronous", "skewness_aware", "perfect", warm_up=0, steps=steps, options={"trace_noise": sigma})
        for sigma in SIGMAS
    ]
    with tempfile.TemporaryDirectory(prefix="streamrl-ranking-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        write_prompts(prompts, WORK, steps * WORK.groups_per_step, seed)
        base, *others = (_generation_s(case, prompts, seed) for case in cases)
    rows = [_row("round_robin", "none", base, base, None, steps)]
    for sigma, seconds in zip(SIGMAS, others, strict=True):
        rows.append(_row("skewness_aware", f"sigma={sigma:g}", seconds, base, _recall(sigma, seed), steps))
    return rows


def _generation_s(case: Case, prompts: Path, seed: int) -> float:
    recording = run_virtually(case, prompts, steps=case.steps, seed=seed)
    found = figures(recording, warm_up=0, steps=case.steps, slots=WORK.slots, time_scale=TIME_SCALE)
    return found.generation_s


def _recall(sigma: float, seed: int) -> float:
    lengths = WORK.lengths(20_000, seed)
    return recall(lengths, noisy(lengths, sigma, random.Random(seed)), 0.2)


def _row(dispatch: str, ranker: str, seconds: float, base_s: float, found: float | None, steps: int) -> Row:
    return {
        "workload": WORK.name,
        "mode": "generation_alone",
        "dispatch": dispatch,
        "ranker": ranker,
        "kind": "virtual",
        "trajectories_per_s": WORK.groups_per_step / seconds,
        "ratio_to_synchronous": base_s / seconds,
        "ratio_to_bound": None,
        "recall_of_longest_fifth": found,
        "generation_s": seconds,
        "steps": steps,
    }
