"""``python -m benchmarks.sampling``: how old what is trained is, by the order in which a step takes whole groups.

The real dispatcher, workers, trainer and coordinator in virtual time (``streamrl/planning/simulation.py``), so that the
figures are those of the machine's logic, whatever else the machine does. Completions have a heavy tail and come in
groups of 8; three fleets: the trainer takes half the time that generation takes, as much, and twice as much, so that
few, some and many whole groups wait. A group's value, by which ``priority`` goes, is drawn evenly from 0 to 1 and has
nothing to do with its length or age: what is trained is worth 0.5 on average unless an order chooses.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import xxhash

from benchmarks.conditions import conditions, rounded
from benchmarks.pipeline.cases import TIME_SCALE, Case, configuration
from benchmarks.pipeline.workload import Workload
from streamrl.consumers.ingest.filters import oldest_version
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.planning.simulation import SimulatedPipeline, SimulatedRun
from streamrl.schemas.reports import SkipReason, SkipRecord
from streamrl.schemas.topics import SKIPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.tree import Settings

RESULTS = Path(__file__).parent / "results" / "sampling.json"
WORK = Workload(name="sampling", samples=64, group=8, max_staleness=4, workers=4, slots=16)
TRAIN_RATIOS = (0.5, 1.0, 2.0)
WARM_UP, STEPS = 10, 24
SEEDS = 2
PASS_STEPS = 160
"""Steps in one pass over the prompts: more than are taken and thrown away, so that no prompt comes twice."""


VALUE = "benchmarks.sampling:value"


def value(rewards: Sequence[float], trajectories: Sequence[Trajectory]) -> float:
    """Of a group, from 0 to 1, by its name alone."""
    return xxhash.xxh32_intdigest(trajectories[0].group_id.encode()) / (1 << 32)


@dataclass(frozen=True)
class Arm:
    """How a step takes groups, and what becomes of those that are passed over."""

    sampling: str
    passed_over: str = "train"
    staleness_cap: int | None = None

    @property
    def settings(self) -> IngestSettings:
        """``[ingest]`` of it."""
        return IngestSettings.model_validate({**vars(self), "priority": VALUE})


ARMS = (
    Arm("oldest"),
    Arm("freshest"),
    Arm("freshest", "skip"),
    Arm("capped", staleness_cap=2),
    Arm("capped", staleness_cap=1),
    Arm("priority"),
    Arm("priority", "skip"),
)
Job = tuple[Arm, float, int]
"""An arm, the trainer's time as a multiple of generation's, and a seed."""


def settings_of(job: Job, work: Workload, prompts: Path, steps: int) -> Settings:
    """The run of an arm over the prompts of a file."""
    arm, ratio, seed = job
    case = Case(replace(work, train_ratio=ratio), "trajectory_async", "least_loaded", warm_up=0, steps=steps)
    plain = configuration(case, run="order", directory=prompts.parent, prompts=prompts, address="nowhere:1", seed=seed)
    return plain.model_copy(update={"ingest": arm.settings})


def trial(job: Job, work: Workload = WORK, warm_up: int = WARM_UP, steps: int = STEPS) -> dict[str, float]:
    """One run of an arm, and its figures over the measured steps."""
    with tempfile.TemporaryDirectory(prefix="streamrl-sampling-") as scratch:
        prompts = Path(scratch) / "prompts.jsonl"
        work.write_prompts(prompts, PASS_STEPS * work.groups_per_step, job[2])
        run = SimulatedPipeline(settings_of(job, work, prompts, warm_up + steps)).run()
    return asyncio.run(figures(run, work, warm_up))


async def figures(run: SimulatedRun, work: Workload, warm_up: int) -> dict[str, float]:
    """Over the steps after ``warm_up``; ages in optimizer steps, seconds are emulated ones.

    ``age_N``: share of trained trajectories whose oldest token was N steps old; ``wasted``: of all that were trained or
    skipped as stale, the share that was skipped; ``value``: mean over trained groups; ``tokens``: mean of trained
    completions, which falls where long ones are the first to be skipped.
    """
    marks = run.steps[warm_up:]
    step_of = {group: mark.report.step for mark in marks[1:] for group in mark.report.group_ids}
    ages: list[int] = []
    values: dict[str, float] = {}
    lengths: list[int] = []
    async for record in run.history.records(TRAJECTORIES.full_name(run.name)):
        one = record.message()
        assert isinstance(one, Trajectory), "the topic holds nothing else"
        if (step := step_of.get(one.group_id)) is not None:
            ages.append(max(0, step - 1 - oldest_version(one)))
            lengths.append(len(one.token_ids))
            values[one.group_id] = value((), (one,))
    skipped = 0
    async for record in run.history.records(SKIPS.full_name(run.name)):
        row = record.message()
        assert isinstance(row, SkipRecord), "the topic holds nothing else"
        skipped += row.reason is SkipReason.STALE and row.step >= warm_up
    seconds = (marks[-1].report.sent_at - marks[0].report.sent_at) * TIME_SCALE
    counts = Counter(ages)
    return {
        "mean": fmean(ages),
        **{f"p{part}": float(np.percentile(ages, part)) for part in (50, 90, 99)},
        "max": float(max(ages)),
        **{f"age_{age}": counts[age] / len(ages) for age in range(work.max_staleness + 1)},
        "wasted": skipped / (skipped + len(ages)),
        "value": fmean(values.values()),
        "tokens": fmean(lengths),
        "step_s": seconds / (len(marks) - 1),
    }


def rows_of(trials: Sequence[tuple[Job, dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """A row an arm and fleet, means over the seeds; steps an hour as a multiple of the oldest first's."""
    for ratio in dict.fromkeys(job[1] for job, _ in trials):
        base: float | None = None
        for arm in dict.fromkeys(job[0] for job, _ in trials):
            several = [found for job, found in trials if job[:2] == (arm, ratio)]
            mean = {name: fmean(found[name] for found in several) for name in several[0]}
            base = mean["step_s"] if base is None else base
            top = max(found["max"] for found in several)
            row = {"train_ratio": ratio, **vars(arm), **mean, "max": top, "steps_ratio": base / mean["step_s"]}
            yield rounded(row)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Simulate as the arguments say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that compute at once")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options, began = parser.parse_args(arguments), time.monotonic()
    jobs = [(arm, ratio, seed) for seed in range(options.seeds) for ratio in TRAIN_RATIOS for arm in ARMS]
    with ProcessPoolExecutor(options.processes) as pool:
        found = list(zip(jobs, pool.map(trial, jobs), strict=True))
    rows = list(rows_of(found))
    for row in rows:
        print(row, flush=True)
    said = conditions(began, list(range(options.seeds)), ("numpy",), "make bench-sampling")
    lines = ",\n".join(map(json.dumps, rows))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(f'{{"conditions": {json.dumps(said)},\n"rows": [\n{lines}\n]}}\n')
    return rows


if __name__ == "__main__":
    main()
