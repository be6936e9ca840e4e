"""What is run: a workload, a mode, a dispatch strategy, and what is known of the lengths."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.pipeline.workload import CHARACTERS_PER_TOKEN, Workload, paper_noise
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings

Mode = Literal["synchronous", "stream", "one_step_async", "trajectory_async"]
Lengths = Literal["oracle", "learned", "paper_recall", "none"]
MODES: tuple[Mode, ...] = ("synchronous", "stream", "one_step_async", "trajectory_async")
BASELINES = ("round_robin", "least_loaded", "lpt")
DISPATCH = (*BASELINES, "skewness_aware")
TIME_SCALE = 15.0
"""Emulated seconds in one of the wall clock, or of virtual time: the same for all rows, whatever ranks the lengths."""
WARM_UP, STEPS = 6, 5
"""Optimizer steps dropped and measured, in every row: the same stretch of the same prompts. The first ones fill the
pipeline, which holds five batches in ``trajectory_async``, and teach the learned ranker."""
NEVER = 1_000_000
BOUNDARIES = (500, 1000, 2000, 4000)


@dataclass(frozen=True)
class Case:
    """``lengths``: what dispatch is told of them: the truth (``oracle``), the truth with the errors of a ranker that
    has the published recall (``paper_recall``), what trees have learnt from the prompts' text and the run's own
    completions (``learned``), or nothing.
    """

    workload: Workload
    mode: Mode
    dispatch: str
    lengths: Lengths = "none"
    warm_up: int = WARM_UP
    steps: int = STEPS

    @property
    def name(self) -> str:
        """For files, topics and ``--only``."""
        work = self.workload
        return re.sub("[^a-z0-9]+", "-", f"{work.name}-{work.group}-{self.mode}-{self.dispatch}-{self.lengths}")


A = Workload(name="a", samples=256, slots=16)
B = Workload(name="b", samples=64, slots=16, cap=20_000, max_staleness=16, p99_over_median=20.0)
"""a: the throughput of the slots rules. b: the longest completion of a step does."""
SMALL = Workload(name="sweep", samples=64, workers=4, slots=8)


def swept() -> Iterator[Workload]:
    """One quantity at a time is varied around a small workload; workers with the completions in proportion."""
    for skew in (2.0, 5.0, 10.0, 30.0):
        yield replace(SMALL, name=f"sweep/p99_over_median={skew:g}", p99_over_median=skew)
    for workers in (2, 8):
        yield replace(SMALL, name=f"sweep/workers={workers}", workers=workers, samples=16 * workers)
    for ratio in (0.25, 2.0, 4.0):
        yield replace(SMALL, name=f"sweep/train_over_generate={ratio:g}", train_ratio=ratio)
    yield replace(SMALL, name="sweep/group=8", group=8)
    yield replace(SMALL, name="sweep/slow_workers=1", slow_workers=1)
    cached = SMALL.decode.model_copy(update={"kv_tokens": 16_000})
    yield replace(SMALL, name="sweep/kv_tokens=16000", decode=cached)


def main_cases() -> Iterator[Case]:
    """Every mode, alone and in groups of 8, with everything that may be known of the lengths."""
    for group in (1, 8):
        work = replace(A, group=group)
        for mode in MODES:
            yield Case(work, mode, "round_robin")
            for lengths in ("oracle", "paper_recall", "learned", "none"):
                yield Case(work, mode, "skewness_aware", lengths)
    yield Case(B, "synchronous", "round_robin", warm_up=18, steps=12)
    yield Case(B, "trajectory_async", "skewness_aware", "oracle", warm_up=18, steps=12)


def sweep_cases() -> Iterator[Case]:
    """Every mode and strategy, with perfect knowledge, over the swept workloads."""
    for work in swept():
        for mode in MODES:
            for dispatch in DISPATCH:
                yield Case(work, mode, dispatch, "none" if dispatch == "round_robin" else "oracle")


def measured_cases() -> Iterator[Case]:
    """The few that are also run as processes, on a broker, by the clock."""
    for mode in MODES:
        yield Case(A, mode, "round_robin")
        yield Case(A, mode, "skewness_aware", "oracle")
        yield Case(A, mode, "skewness_aware", "learned")


noise_of = cache(paper_noise)


def configuration(case: Case, *, run: str, directory: Path, prompts: Path, address: str, seed: int) -> Settings:
    """A run of the case over the prompts of a file, on a broker that is there."""
    work = case.workload
    known: dict[str, Any] = {"predictor": {"learned": "learned", "none": "constant"}.get(case.lengths, "trace")}
    noise = noise_of(replace(work, group=1, name="")) if case.lengths == "paper_recall" else 0.0
    tree: dict[str, Any] = {
        "run": {"name": run, "directory": str(directory), "workers": work.workers, "seed": seed},
        "kafka": {"bootstrap_servers": address},
        "data": {"path": str(prompts)},
        "loop": {
            "groups_per_step": work.groups_per_step,
            "num_generations": work.group,
            "mode": case.mode,
            "max_staleness": work.max_staleness,
            "max_completion_length": work.cap,
            "bucket_boundaries": list(BOUNDARIES),
        },
        # Emulated rewards are all alike, and no group may be skipped for that.
        "algorithm": {"dynamic_sampling": False},
        "lengths": known,
        "dispatch": {"strategy": case.dispatch},
        "generation": {"engine": "emulated", "max_num_seqs": work.slots},
        "training": {"backend": "emulated", "max_steps": case.warm_up + case.steps, "checkpoint_every": NEVER},
        "emulation": {
            "time_scale": TIME_SCALE,
            "decode": work.decode.model_dump(mode="json", exclude_none=True),
            "lengths": {
                "source": "column",
                "max_tokens": work.cap,
                "prompt_characters_per_token": CHARACTERS_PER_TOKEN,
                "prediction_noise": noise,
            },
            "training": {
                "forward_backward_s_per_token": work.train_s_per_token,
                "optimizer_step_s": work.optimizer_s,
                "export_s": work.export_s,
            },
        },
    }
    return validated(tree)
