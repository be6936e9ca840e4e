"""One trial: a predictor learns from a stream of groups, then predicts prompts, and is judged by what they become."""

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.lengths.workload import Policy, Task
from streamrl.producers.lengths.buckets import Buckets, RecentLengths
from streamrl.producers.lengths.calibration import kendall_tau, recall_of_longest
from streamrl.producers.lengths.learned.predictor import LearnedLengths
from streamrl.producers.lengths.predictor import LengthPredictor, ObservedCompletion
from streamrl.producers.lengths.settings import LengthSettings
from streamrl.producers.lengths.startup import build_predictor
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import LengthEstimate, Prompt
from streamrl.settings.features import predictors as learned_predictors

BUILT = {"chance": "constant", "observed_quantiles": "observed_quantiles", "learned": "learned"}
"""Name here, and name in the settings; the same estimate for every prompt ranks as chance does."""
BASELINES = ("chance", "data_set", "perfect")
MIN_ASKED = 5
"""Prompts of a data set that its recall is told of: fewer have no longest fifth."""


class DataSetIdentity:
    """The baseline that knows only which data set a prompt is of: its recent quantiles."""

    def __init__(self, policy: Policy) -> None:
        self.buckets, self.learns_from_the_past = Buckets(()), False
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
        return LengthEstimate(median=median, upper=upper, bucket=0, predictor="data_set")

    def observe(self, completion: ObservedCompletion) -> None:
        """Note the length."""
        self._seen.setdefault(completion.prompt.dataset, RecentLengths(512)).observe(completion.length)


class Perfect:
    """Knows what a prompt is about, hidden difficulty included, but not the luck of a sample: the most one can know.

    Of a made-up policy its own median; of recorded lengths the mean of those very completions, which is more than
    anybody could know.
    """

    def __init__(self, policy: Policy, tasks: Sequence[Task]) -> None:
        self.buckets, self.learns_from_the_past = Buckets(()), False
        self._limit = policy.limit
        self._typical = {task.prompt.text: task.typical * policy.growth for task in tasks}

    def predict(self, prompt: Prompt, group_id: str = "") -> LengthEstimate:
        """What is to be expected, rounded to a token."""
        length = max(1, min(self._limit, round(self._typical.get(prompt.text, 1))))
        return LengthEstimate(median=length, upper=length, bucket=0, predictor="perfect")

    def observe(self, completion: ObservedCompletion) -> None:
        """Knows already."""


@dataclass(frozen=True)
class Judged:
    """``recall`` of the longest 20 % (or 10, 5) of prompts, by the mean of their completions; of single samples.

    ``within_data_set_recall``: the same within each data set, weighted by prompts: what is known beyond the data set.
    """

    prompts: int
    recall: float
    within_data_set_recall: float | None
    recall_samples: float
    recall_10: float
    recall_5: float
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


def predictors(policy: Policy, asked: Sequence[Task]) -> dict[str, LengthPredictor]:
    """All that are compared, untaught, but for language models; ``asked`` are for the one that knows."""
    others = learned_predictors()
    built: dict[str, LengthPredictor] = {
        name: build_predictor(LengthSettings.model_validate({"predictor": setting}), loop_of(policy), others=others)
        for name, setting in BUILT.items()
    }
    return {**built, "data_set": DataSetIdentity(policy), "perfect": Perfect(policy, asked)}


def completions_of(policy: Policy, tasks: Iterable[Task], seed: int, version: int = 0) -> list[ObservedCompletion]:
    """What the policy makes of the prompts, group by group; the same for a seed."""
    rng = random.Random(f"teach/{seed}/{version}")
    return [
        ObservedCompletion(
            task.prompt,
            f"{task.prompt.prompt_id}/{version}/{number}",
            length,
            version,
            censored=task.capped[index] if task.capped else length == policy.limit,
        )
        for number, task in enumerate(tasks)
        for index, length in enumerate(policy.lengths(task, rng))
    ]


def teach(predictor: LengthPredictor, policy: Policy, tasks: Sequence[Task], seed: int, version: int = 0) -> None:
    """Groups in order, sample by sample; every fit that begins is waited for, so that results repeat."""
    group = ""
    for completion in completions_of(policy, tasks, seed, version):
        if completion.group_id != group:
            group = completion.group_id
            predictor.predict(completion.prompt)
        predictor.observe(completion)
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
    """By data set and over ``all``: the estimates against completions of each prompt that nobody was taught."""
    rng = random.Random(f"judge/{seed}")
    lengths = [policy.lengths(task, rng) for task in tasks]
    names = [task.prompt.dataset for task in tasks]
    judged = {}
    for name in sorted(set(names)):
        chosen = [index for index, own in enumerate(names) if own == name]
        if len(chosen) >= MIN_ASKED:
            judged[name] = _judged([estimates[i] for i in chosen], [lengths[i] for i in chosen], covers, None)
    parts = [(one.prompts, one.recall) for one in judged.values()]
    within = (
        sum(prompts * recall for prompts, recall in parts) / sum(prompts for prompts, _ in parts) if parts else None
    )
    return {"all": _judged(estimates, lengths, covers, within), **judged}


def mean_of(parts: Sequence[Judged]) -> Judged:
    """The folds together: means, weighted by prompts."""
    total = sum(part.prompts for part in parts)

    def mean(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if any(value is None for value in values):
            return None
        return sum(value * part.prompts for value, part in zip(values, parts, strict=True)) / total

    return Judged(total, *(mean(name) for name in list(vars(parts[0]))[1:]))


def _judged(
    estimates: Sequence[LengthEstimate], lengths: Sequence[Sequence[int]], covers: bool, within: float | None
) -> Judged:
    medians = np.array([estimate.median for estimate in estimates], np.float64)
    means = np.array([np.mean(own) for own in lengths])
    counts = [len(own) for own in lengths]
    samples = np.array([length for own in lengths for length in own], np.float64)
    uppers = np.repeat(np.array([estimate.upper for estimate in estimates], np.float64), counts)
    return Judged(
        prompts=len(means),
        recall=recall_of_longest(medians, means) or 0.0,
        within_data_set_recall=within,
        recall_samples=recall_of_longest(np.repeat(medians, counts), samples) or 0.0,
        recall_10=recall_of_longest(medians, means, 0.1) or 0.0,
        recall_5=recall_of_longest(medians, means, 0.05) or 0.0,
        tau=kendall_tau(medians, means) or 0.0,
        coverage=float((samples <= uppers).mean()) if covers else None,
    )
