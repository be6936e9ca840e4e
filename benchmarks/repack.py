"""``python -m benchmarks.repack``: ranker and repack, alone and together, against a fleet that is always busy.

The real dispatcher, workers, trainer and coordinator in virtual time (``streamrl/planning/simulation.py``), so that the
figures are those of the machine's logic, whatever else the machine does. Completions have a heavy tail and come in
groups of 8; the trainer is fast, so generation decides. Workers take new weights once they run nothing, so a completion
is of one version, as in Laminar. ``ranker`` ranks prompts as well as StreamRL's best one did; without it dispatch knows
no lengths. What ``repack`` moves is prefilled anew. For comparison, the same fleet with weights that are taken in
flight, with the cache kept or computed anew: no tail keeps a worker from anything there, and nothing is moved; and
repack on three quarters of the workers, which is how many it needs for the throughput of all without it.

The bound knows no tail: all slots of all workers busy all the time, at the rate of a full batch, prefills included.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.recording import read_recording
from benchmarks.pipeline.running import simulate_each, simulated
from benchmarks.pipeline.workload import Workload
from streamrl.planning.simulation import SimulatedRun
from streamrl.schemas.profiles import DecodeSettings
from streamrl.schemas.topics import TRAJECTORIES
from streamrl.schemas.trajectories import Trajectory
from streamrl.settings.tree import Settings

WORK = Workload(
    name="repack",
    samples=256,
    group=8,
    cap=20_000,
    max_staleness=6,
    workers=8,
    slots=32,
    p99_over_median=20.0,
    train_ratio=0.1,
    export_s=0.5,
    optimizer_s=0.5,
    decode=DecodeSettings(step_s=0.01, batch_scale=64.0, prefill_s_per_token=3e-5, adopt_s=0.5),
)
"""A prompt token is prefilled sixteen times as fast as one is decoded in a full batch."""
TIME_SCALE = 4.0
"""Emulated seconds in a virtual one: plans are made every second, so every four of the emulated ones."""
WARM_UP, STEPS = 10, 20
PASS_STEPS = 64
"""Steps in one pass over the prompts: more than are taken, so that no prompt comes twice."""


@dataclass(frozen=True)
class Arm:
    """What dispatch has (a ranker with the plan that uses it, moves), when workers take weights, and how many."""

    ranker: bool
    repack: bool
    adopt: str = "idle"
    workers: int = WORK.workers


ARMS = (
    Arm(False, False),
    Arm(True, False),
    Arm(False, True),
    Arm(True, True),
    Arm(False, True, workers=WORK.workers * 3 // 4),
    Arm(False, False, "in_flight"),
    Arm(True, False, "in_flight"),
    Arm(False, False, "recompute"),
    Arm(True, False, "recompute"),
)


def trial(job: tuple[Arm, int]) -> dict[str, float]:
    """One run of an arm, and its figures over the measured steps."""
    arm, seed = job
    work = replace(WORK, workers=arm.workers)
    dispatch, lengths = ("skewness_aware", "paper_recall") if arm.ranker else ("least_loaded", "none")
    case = Case(work, "trajectory_async", dispatch, lengths, warm_up=WARM_UP, steps=STEPS)  # type: ignore[arg-type]
    run = simulated(case, seed, PASS_STEPS, partial(_changed, arm))
    return asyncio.run(figures(run, work))


def _changed(arm: Arm, plain: Settings) -> Settings:
    return plain.model_copy(
        update={
            "dispatch": plain.dispatch.model_copy(update={"repack": arm.repack}),
            "generation": plain.generation.model_copy(update={"adopt": arm.adopt}),
            "emulation": plain.emulation.model_copy(update={"time_scale": TIME_SCALE}),
        }
    )


async def figures(run: SimulatedRun, work: Workload) -> dict[str, float]:
    """Over the measured steps; seconds are emulated ones.

    ``overhead``: share of the workers' time in which what was moved is prefilled anew; ``moves`` a step, in samples;
    ``age_s``: from a trajectory's first order to the end of the step that trains it, in the mean. ``longest_s``: of the
    completion that took longest from its first order to its end, in the mean over the steps.
    """
    recording = await read_recording(run.history, run.name)
    marks = run.steps[WARM_UP : WARM_UP + STEPS + 1]
    began, ended = marks[0].report.sent_at, marks[-1].report.sent_at
    seconds = (ended - began) * TIME_SCALE
    reports = [mark.report for mark in marks[1:]]
    counted = np.isin(recording.trained_in, [report.step for report in reports])
    tokens = float(recording.lengths[counted].sum())
    # One prefill of a prompt serves the samples of its group.
    prefill_s = sum(map(work.curve.prefill_s, recording.prompts[counted].tolist())) / work.group
    least_s = tokens / work.tokens_per_s + prefill_s / work.workers
    took = (recording.finished_at - recording.created_at) * TIME_SCALE
    ended_at = {report.step: report.sent_at for report in reports}
    age = np.array([ended_at.get(int(step), np.nan) for step in recording.trained_in]) - recording.created_at
    again_s, moves = 0.0, 0
    async for record in run.history.records(TRAJECTORIES.full_name(run.name)):
        one = record.message()
        assert isinstance(one, Trajectory), "the topic holds nothing else"
        if began <= one.finished_at <= ended:
            moves += len(one.parts[1:])
            again_s += sum(work.curve.prefill_s(len(one.prompt_token_ids) + part.start) for part in one.parts[1:])
    return {
        "tokens_per_s": tokens / seconds,
        "share_of_bound": least_s / seconds,
        "mean_staleness": fmean(report.metrics["off_policy/mean"] for report in reports),
        "max_staleness": max(report.metrics["off_policy/max"] for report in reports),
        "age_s": float(age[counted].mean()) * TIME_SCALE,
        "step_s": seconds / STEPS,
        "longest_s": fmean(float(took[recording.trained_in == report.step].max()) for report in reports),
        "slots_busy": (marks[-1].slot_s - marks[0].slot_s) * TIME_SCALE / seconds / work.workers / work.slots,
        "overhead": again_s / seconds / work.workers,
        "moves": moves / STEPS,
    }


def rows_of(trials: Sequence[tuple[tuple[Arm, int], dict[str, float]]]) -> Iterator[dict[str, Any]]:
    """A row an arm, means over the seeds; throughput as a multiple of that of neither."""
    by_arm = {arm: [found for (each, _), found in trials if each == arm] for arm in ARMS}
    base = fmean(found["tokens_per_s"] for found in by_arm[ARMS[0]])
    for arm, several in by_arm.items():
        mean = {name: fmean(found[name] for found in several) for name in several[0]}
        yield {
            "ranker": arm.ranker,
            "repack": arm.repack,
            "adopt": arm.adopt,
            "workers": arm.workers,
            "throughput_ratio": mean["tokens_per_s"] / base,
            **mean,
            "max_staleness": max(found["max_staleness"] for found in several),
            "seeds": len(several),
        }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Simulate as the arguments say."""
    return simulate_each(arguments, "repack", __doc__, jobs, trial, rows_of)


def jobs(seeds: int) -> list[tuple[Arm, int]]:
    """All arms, seed by seed."""
    return [(arm, seed) for seed in range(seeds) for arm in ARMS]


if __name__ == "__main__":
    main()
