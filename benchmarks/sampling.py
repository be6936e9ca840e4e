"""``python -m benchmarks.sampling``: how old what is trained is, by the order in which a step takes whole groups.

The real dispatcher, workers, trainer and coordinator in virtual time (``streamrl/planning/simulation.py``), so that the
figures are those of the machine's logic, whatever else the machine does. Completions have a heavy tail and come in
groups of 8; three fleets: the trainer takes half the time that generation takes, as much, and twice as much, so that
few, some and many whole groups wait. A group's value, by which ``priority`` goes, is drawn evenly from 0 to 1 and has
nothing to do with its length or age: what is trained is worth 0.5 on average unless an order chooses.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import xxhash

from benchmarks.pipeline.cases import TIME_SCALE, Case
from benchmarks.pipeline.running import simulate_each, simulated
from benchmarks.pipeline.workload import Workload
from streamrl.consumers.ingest.filters import oldest_version
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.planning.simulation import SimulatedRun
from streamrl.schemas.reports import SkipReason, SkipRecord
from streamrl.schemas.topics import SKIPS, TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory

WORK = Workload(name="sampling", samples=64, group=8, max_staleness=4, workers=4, slots=16)
TRAIN_RATIOS = (0.5, 1.0, 2.0)
WARM_UP, STEPS = 10, 24
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
        sampling = VALUE if self.sampling == "priority" else self.sampling
        return IngestSettings.model_validate({**vars(self), "sampling": sampling})


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


def trial(job: Job) -> dict[str, float]:
    """One run of an arm, and its figures over the measured steps."""
    arm, ratio, seed = job
    work, steps = replace(WORK, train_ratio=ratio), WARM_UP + STEPS
    case = Case(work, "trajectory_async", "least_loaded", warm_up=0, steps=steps)
    run = simulated(case, seed, PASS_STEPS, lambda plain: plain.model_copy(update={"ingest": arm.settings}))
    return asyncio.run(figures(run, work, WARM_UP))


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
            yield {"train_ratio": ratio, **vars(arm), **mean, "max": top, "steps_ratio": base / mean["step_s"]}


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Simulate as the arguments say."""
    return simulate_each(arguments, "sampling", __doc__, jobs, trial, rows_of)


def jobs(seeds: int) -> list[Job]:
    """All arms on all fleets, seed by seed."""
    return [(arm, ratio, seed) for seed in range(seeds) for ratio in TRAIN_RATIOS for arm in ARMS]


if __name__ == "__main__":
    main()
