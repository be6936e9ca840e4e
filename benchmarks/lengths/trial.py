"""One trial: a predictor learns from a stream of groups, then predicts prompts, and is judged by what they become."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lengths.workload import Policy, Task
from producers.lengths.buckets import Buckets, RecentLengths
from producers.lengths.calibration import kendall_tau, recall_of_longest
from producers.lengths.learned.predictor import LearnedLengths
from producers.lengths.predictor import LengthPredictor, ObservedCompletion
from producers.lengths.settings import LengthSettings
from producers.lengths.startup import build_predictor
from schemas.settings import LoopSettings
from schemas.trajectories import LengthEstimate, Prompt

BUILT = ("constant", "observed_quantiles", "learned")


class PerDataset:
    """The baseline that knows only which data set a prompt is of: its recent quantiles."""

    def __init__(self, policy: Policy) -> None:
        self.buckets = Buckets(())
        self._limit = policy.limit
        self._seen: dict[str, RecentLengths] = {}

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The data set's quantiles; half the limit for one never seen."""
        seen = self._seen.get(prompt.dataset)
        median, upper = (
            (self._limit // 2, self._limit)
            if seen is None
            else (max(1, seen.quantile(0.5)), max(1, seen.quantile(0.9)))
        )
        return LengthEstimate(median=median, upper=upper, bucket=0, predictor="per_dataset")

    def observe(self, completion: ObservedCompletion) -> None:
        """Note the length."""
        self._seen.setdefault(completion.prompt.dataset, RecentLengths(512)).add(completion.length)


class Perfect:
    """Knows what a prompt is about, hidden difficulty included, but not the luck of a sample: the most one can know."""

    def __init__(self, policy: Policy, tasks: Sequence[Task]) -> None:
        self.buckets = Buckets(())
        self._limit = policy.limit
        self._typical = {task.prompt.prompt_id: task.typical * policy.growth for task in tasks}

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """The median of the policy itself."""
        length = max(1, min(self._limit, round(self._typical.get(prompt.prompt_id, 1))))
        return LengthEstimate(median=length, upper=length, bucket=0, predictor="perfect")

    def observe(self, completion: ObservedCompletion) -> None:
        """Knows already."""


@dataclass(frozen=True)
class Judged:
    """``recall``: of the longest 20 % (or 10, 5), of prompts by their mean, of samples by themselves."""

    prompts: int
    recall_prompts: float
    recall_samples: float
    recall_prompts_10: float
    recall_prompts_5: float
    tau: float
    coverage: float | None

    def row(self) -> dict[str, Any]:
        """For the result file."""
        return {
            name: value if value is None or isinstance(value, int) else round(value, 4)
            for name, value in vars(self).items()
        }


def loop_of(policy: Policy) -> LoopSettings:
    """The settings that a predictor of these lengths asks for."""
    return LoopSettings(max_completion_length=policy.limit)


def predictors(policy: Policy, tasks: Sequence[Task]) -> dict[str, LengthPredictor]:
    """All that are compared, untaught; ``tasks`` are for the one that knows."""
    built: dict[str, LengthPredictor] = {
        name: build_predictor(LengthSettings.model_validate({"predictor": name}), loop_of(policy)) for name in BUILT
    }
    return {**built, "per_dataset": PerDataset(policy), "perfect": Perfect(policy, tasks)}


def teach(predictor: LengthPredictor, policy: Policy, tasks: Sequence[Task], seed: int, version: int = 0) -> None:
    """Groups in order, sample by sample; every fit that begins is waited for, so that results repeat."""
    rng = random.Random(f"teach/{seed}/{version}")
    for number, task in enumerate(tasks):
        predictor.predict(task.prompt)
        for _ in range(policy.samples):
            length = policy.sample(task, rng)
            group = f"{task.prompt.prompt_id}/{version}/{number}"
            predictor.observe(ObservedCompletion(task.prompt, group, length, version, censored=length == policy.limit))
            if isinstance(predictor, LearnedLengths):
                predictor.wait()


def ask(predictor: LengthPredictor, tasks: Sequence[Task]) -> tuple[list[LengthEstimate], list[float]]:
    """Estimates, and the microseconds of processor time that each took: others on the machine do not change them."""
    estimates, microseconds = [], []
    for task in tasks:
        started = time.thread_time()
        estimates.append(predictor.predict(task.prompt))
        microseconds.append((time.thread_time() - started) * 1e6)
    return estimates, microseconds


def judge(
    estimates: Sequence[LengthEstimate], policy: Policy, tasks: Sequence[Task], seed: int, *, covers: bool = True
) -> dict[str, Judged]:
    """By data set and over ``all``: the estimates against ``policy.samples`` completions of each prompt."""
    rng = random.Random(f"judge/{seed}")
    lengths = np.array([[policy.sample(task, rng) for _ in range(policy.samples)] for task in tasks], np.float64)
    medians = np.array([estimate.median for estimate in estimates], np.float64)
    uppers = np.array([estimate.upper for estimate in estimates], np.float64)
    names = np.array([task.kind for task in tasks])
    return {
        name: _judged(medians[chosen], uppers[chosen], lengths[chosen], covers)
        for name in ("all", *sorted(set(names)))
        for chosen in [np.ones(len(names), bool) if name == "all" else names == name]
    }


def _judged(medians: Any, uppers: Any, lengths: Any, covers: bool) -> Judged:
    means = lengths.mean(axis=1)
    return Judged(
        prompts=len(means),
        recall_prompts=recall_of_longest(medians, means) or 0.0,
        recall_samples=recall_of_longest(np.repeat(medians, lengths.shape[1]), lengths.ravel()) or 0.0,
        recall_prompts_10=recall_of_longest(medians, means, 0.1) or 0.0,
        recall_prompts_5=recall_of_longest(medians, means, 0.05) or 0.0,
        tau=kendall_tau(medians, means) or 0.0,
        coverage=float((lengths <= uppers[:, None]).mean()) if covers else None,
    )
