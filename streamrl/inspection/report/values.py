"""Which prompts a run ordered less often, and how good the predictions behind that were: data, figures and charts.

A group has no advantage if all its samples earned the same. The dispatcher predicts the chance of that, and each
trajectory carries the prediction (``chance``). Runs without ``dispatch.value`` have none.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from streamrl.inspection.report.record import PromptAsked, RunRecord, ValueFacts
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary

CELLS = 10
"""Ranges of the predicted chance, of equal width, in which predictions are compared with what happened."""
WINDOWS = 16
LEAST = 16
"""Fewest groups in a window: a share of fewer says little."""
MOST_PROMPTS = 20
"""Most prompts in the table of those that are asked rarely."""


class _Group(NamedTuple):
    """A whole group, with the prediction that its order carried. ``is_equal``: all samples earned the same."""

    prompt_id: str
    at: float
    probability: float
    predicted: float
    alike: str
    reward: float
    is_equal: bool


def value_facts(summaries: Sequence[TrajectorySummary], decided: Mapping[int, float]) -> ValueFacts | None:
    """The quality of predictions; None if no trajectory carries one.

    ``summaries`` ascend in time. ``decided``: positions and their probabilities, as in ``WorkOrder``.
    """
    groups = _groups(summaries)
    if not groups:
        return None
    cells = [[group for group in groups if _cell(group) == number] for number in range(CELLS)]
    judged = [_judged(cell) for cell in cells if cell]
    return ValueFacts(
        groups=len(groups),
        predicted=_mean([group.predicted for group in groups]),
        observed=_mean([group.is_equal for group in groups]),
        # The expected calibration error: over groups, the mean distance of their cell's prediction from the truth.
        error=sum(abs(predicted - observed) * count for predicted, observed, count in judged) / len(groups),
        cells=tuple(judged),
        windows=tuple((group[-1].at, *_judged(group)[:2]) for group in _windows(groups)),
        decided=len(decided),
        passed_over=sum(probability == 0.0 for probability in decided.values()),
        rare=_rare(groups),
    )


def _groups(summaries: Sequence[TrajectorySummary]) -> list[_Group]:
    samples: dict[str, list[TrajectorySummary]] = {}
    for summary in summaries:
        if summary.chance is not None:
            samples.setdefault(summary.group_id, []).append(summary)
    found = []
    for group_id, members in samples.items():
        rewards = [member.reward for member in members if member.reward is not None]
        probability, predicted, alike = members[0].chance or (1.0, 0.0, "")
        if len(rewards) > 1:
            at, is_equal = max(member.finished_at for member in members), min(rewards) == max(rewards)
            prompt_id = group_id.rpartition("/")[0]
            found.append(_Group(prompt_id, at, probability, predicted, alike, _mean(rewards), is_equal))
    return sorted(found, key=lambda group: group.at)


def _cell(group: _Group) -> int:
    return min(CELLS - 1, int(group.predicted * CELLS))


def _judged(groups: Sequence[_Group]) -> tuple[float, float, int]:
    """Mean prediction, share of groups without advantage, and number of groups."""
    predicted, observed = _mean([one.predicted for one in groups]), _mean([one.is_equal for one in groups])
    return round(predicted, 4), round(observed, 4), len(groups)


def _windows(groups: Sequence[_Group]) -> list[Sequence[_Group]]:
    count = max(1, min(WINDOWS, len(groups) // LEAST))
    edges = [round(number * len(groups) / count) for number in range(count + 1)]
    return [groups[begin:end] for begin, end in pairwise(edges)]


def _rare(groups: Sequence[_Group]) -> tuple[PromptAsked, ...]:
    """The prompts with the lowest probabilities at their last order."""
    by_prompt: dict[str, list[_Group]] = {}
    for group in groups:
        by_prompt.setdefault(group.prompt_id, []).append(group)
    rarest = sorted(by_prompt.values(), key=lambda found: (found[-1].probability, found[0].prompt_id))
    return tuple(
        PromptAsked(
            prompt_id=found[-1].prompt_id,
            probability=round(found[-1].probability, 4),
            predicted=round(found[-1].predicted, 4),
            alike=found[-1].alike,
            groups=len(found),
            equal=sum(group.is_equal for group in found),
            reward=round(_mean([group.reward for group in found]), 4),
        )
        for found in rarest[:MOST_PROMPTS]
        if found[-1].probability < 1.0
    )


def value_charts(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Two charts: outcomes against predictions, and both over the run."""
    calibration: list[dict[str, Any]] = []
    over_time: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        facts = record.facts.topics.value if record.facts.topics else None
        if facts is None:
            continue
        at = [predicted for predicted, _, _ in facts.cells]
        calibration.append({"run": number, "name": "observed", "at": at, "y": [seen for _, seen, _ in facts.cells]})
        if len(records) == 1:
            calibration.append({"run": number, "name": "as predicted", "at": at, "y": at})
        when = [round(max(0.0, ended - record.rows.began), 1) for ended, _, _ in facts.windows]
        over_time.append({"run": number, "name": "observed", "at": when, "y": [seen for _, _, seen in facts.windows]})
        if len(records) == 1:
            predicted = [chance for _, chance, _ in facts.windows]
            over_time.append({"run": number, "name": "predicted", "at": when, "y": predicted})
    charts = {
        ("Groups without advantage, by predicted chance", "share"): calibration,
        ("Groups without advantage over the run", "time"): over_time,
    }
    return [{"title": title, "unit": "share", "axis": axis, "lines": lines} for (title, axis), lines in charts.items()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
