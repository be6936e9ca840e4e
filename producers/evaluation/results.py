"""Results of an evaluation: pass@k and means for each set of held-out prompts, and their lines in metrics.jsonl.

Invariant a_version_is_written_once: a line names its version, and a version that is in the file is not added again.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any, Self

from streamrl.schemas.errors import BadInput
from streamrl.schemas.evaluation import EVALUATED, PROMPTS, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Trajectory

MAX_FAILED_IN_A_ROW = 50
"""Completions in a row whose rewards may fail, as in training (``IntakeLimits``)."""
ROUNDING = 1e-9
"""By how much a sum of full rewards may be below the sum of their weights."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """One completion of a held-out prompt. ``reward``: the weighted sum of its rewards; ``clipped``: cut off by the
    length limit; ``oldest``, ``newest``: versions that sampled it.
    """

    prompt_id: str
    dataset: str
    reward: float
    passed: bool
    length: int
    clipped: bool
    oldest: PolicyVersion
    newest: PolicyVersion


@dataclass(frozen=True, slots=True)
class PassRule:
    """What makes a completion pass: the sum of its rewards, weighted with ``weights``, is at least ``least``."""

    weights: Mapping[str, float]
    least: float

    @classmethod
    def of(cls, passes_at: float | str | None, weights: Mapping[str, float]) -> Self:
        """The rule that ``evaluation.passes_at`` sets; ``weights``: weight of each reward, by the reward's name."""
        if isinstance(passes_at, str):
            return cls({passes_at: 1.0}, 1.0)
        positive = {name: weight for name, weight in weights.items() if weight > 0}
        return cls(weights, sum(positive.values()) if passes_at is None else passes_at)

    def __str__(self) -> str:
        terms = (name if weight == 1 else f"{weight:g} {name}" for name, weight in self.weights.items() if weight)
        return f"{' + '.join(terms)} >= {self.least:g}"

    def is_met(self, rewards: Mapping[str, float | None]) -> bool:
        """Whether a completion with these rewards passes; one that failed or does not apply counts as 0."""
        return weighted_sum(rewards, self.weights) >= self.least - ROUNDING


def weighted_sum(rewards: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """The weighted sum of rewards; one that failed or does not apply counts as 0."""
    return sum(weight * (rewards.get(name) or 0.0) for name, weight in weights.items())


def scored(trajectory: Trajectory, weights: Mapping[str, float], rule: PassRule) -> ScoredSample:
    """A trajectory as the evaluation counts it. A reward that failed or does not apply counts as 0."""
    return ScoredSample(
        trajectory.prompt_id,
        trajectory.dataset,
        weighted_sum(trajectory.rewards, weights),
        rule.is_met(trajectory.rewards) and trajectory.finish_reason is not FinishReason.ABORT,
        len(trajectory.token_ids),
        trajectory.finish_reason is FinishReason.LENGTH,
        trajectory.oldest_version,
        trajectory.newest_version,
    )


@dataclass
class FailedRewards:
    """Rewards of held-out completions that failed: too many end the evaluator, and so the run.

    ``max_share``: of one version's completions.
    """

    max_share: float = 1.0
    total: int = 0
    failed: int = 0
    in_a_row: int = 0
    latest: str = ""

    def add(self, trajectory: Trajectory) -> None:
        """Count a completion. One that was refused or given up does not count: its rewards were not asked.

        Raises:
            BadInput: too many failed in a row.
        """
        if trajectory.refusal or trajectory.finish_reason is FinishReason.ABORT:
            return
        self.total += 1
        if not trajectory.reward_errors:
            self.in_a_row = 0
            return
        name, reason = next(iter(sorted(trajectory.reward_errors.items())))
        self.failed, self.in_a_row = self.failed + 1, self.in_a_row + 1
        self.latest = f"{trajectory.prompt_id}: reward {name}: {reason}"
        if self.in_a_row > MAX_FAILED_IN_A_ROW:
            self._refuse()

    def end_version(self) -> None:
        """Start the counts of another version.

        Raises:
            BadInput: too large a share of this one's failed.
        """
        if self.failed > self.max_share * self.total:
            self._refuse()
        self.total = self.failed = 0

    def _refuse(self) -> None:
        raise BadInput(
            f"expected held-out completions with rewards, got {self.failed} of {self.total} without, the latest of "
            f"{self.latest}; correct the reward function, or the columns of the set in [evaluation.data]"
        )


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples passes: 1 - C(n - c, k) / C(n, k).

    Here n is ``samples`` and c is ``passed``. Source: Chen et al., Evaluating Large Language Models Trained on Code,
    2021 (arXiv:2107.03374), equation 1.
    """
    return 1.0 - comb(samples - passed, k) / comb(samples, k)


def metrics_of(
    made: Iterable[ScoredSample], prompts: Mapping[str, str], num_generations: int, told_k: Sequence[int]
) -> dict[str, float]:
    """Metrics of each set and of all sets. ``prompts``: the set of each prompt, by prompt id. Missing samples count as
    failed.
    """
    by_prompt: dict[str, list[ScoredSample]] = {prompt_id: [] for prompt_id in prompts}
    for sample in made:
        by_prompt[sample.prompt_id].append(sample)
    groups: dict[str, list[list[ScoredSample]]] = defaultdict(list)
    for prompt_id, samples in by_prompt.items():
        groups[f"eval/{prompts[prompt_id]}"].append(samples)
        groups["eval"].append(samples)
    found: dict[str, float] = {}
    for name, of_prompts in sorted(groups.items()):
        for k in told_k:
            passed = (sum(sample.passed for sample in samples) for samples in of_prompts)
            found[f"{name}/pass@{k}"] = _mean([pass_at_k(num_generations, each, k) for each in passed])
        if name == "eval":
            continue
        flat = [sample for samples in of_prompts for sample in samples]
        found[f"{name}/reward"] = _mean([sample.reward for sample in flat])
        found[f"{name}/mean_length"] = _mean([sample.length for sample in flat])
        found[f"{name}/clipped_ratio"] = _mean([float(sample.clipped) for sample in flat])
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def append_evaluations(path: Path, reports: Iterable[EvaluationReport]) -> None:
    """Add a line for each report whose version is not in the file.

    Raises:
        OSError: the file cannot be written.
    """
    new = {str(report.version): report for report in reports}
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            # Most lines are those of steps, which are recognised without parsing.
            for line in file:
                if f'"{EVALUATED}"' in line and (found := _object(line)) is not None:
                    new.pop(str(found.get(EVALUATED)), None)
    if not new:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # One write: the trainer appends to the same file, and lines of two writers must not mix.
    lines = [
        json.dumps(
            {"step": report.step, "time": report.sent_at, EVALUATED: version, PROMPTS: report.prompts, **report.metrics}
        )
        for version, report in new.items()
    ]
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
