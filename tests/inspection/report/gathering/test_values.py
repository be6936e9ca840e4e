from pathlib import Path

import pytest

from streamrl.inspection.report.figures import figures_of
from streamrl.inspection.report.gathering import gather_topics
from streamrl.inspection.report.page import page_of
from streamrl.inspection.report.record import RunFacts, RunRecord, StepTable, TopicDigest
from streamrl.inspection.report.values import MOST_PROMPTS, value_charts, value_facts
from streamrl.observability.run_state.trajectory_summary import TrajectorySummary
from streamrl.schemas.identifiers import PolicyVersion
from tests.inspection.report.recorded import record_run


def group(
    number: int, rewards: tuple[float | None, ...], chance: tuple[float, float, str] | None = (1.0, 0.2, "d/9")
) -> list[TrajectorySummary]:
    version, name, at = PolicyVersion(1, 0), f"d/{number}/0", float(number)
    return [
        TrajectorySummary(
            f"{name}/{n}", name, "w", 0, 1, 1, reward, version, version, "stop", "", at, at, 0, 0, "", 0, False, chance
        )
        for n, reward in enumerate(rewards)
    ]


def record(summaries: list[TrajectorySummary], decided: dict[int, float] | None = None) -> RunRecord:
    topics = TopicDigest(held=1, read=1, value=value_facts(summaries, decided or {}))
    return RunRecord("r", Path("r"), StepTable(), facts=RunFacts(topics=topics))


def test_predictions_are_compared_with_what_happened() -> None:
    # Of ten groups predicted at 0.2, two have no advantage; of four predicted at 0.9, two.
    summaries = [one for n in range(10) for one in group(n, (0.0, float(n > 1)))]
    summaries += [one for n in range(10, 14) for one in group(n, (1.0, n % 2 / 2 + 0.5), (0.05, 0.9, "d/9"))]
    facts = value_facts(summaries, {0: 0.0, 1: 1.0, 2: 0.05, 3: 0.0})
    assert facts is not None
    assert facts.cells == ((0.2, 0.2, 10), (0.9, 0.5, 4))
    assert facts.groups == 14
    assert facts.predicted == pytest.approx((10 * 0.2 + 4 * 0.9) / 14)
    assert facts.observed == pytest.approx(4 / 14)
    assert facts.error == pytest.approx(4 * 0.4 / 14)
    assert (facts.decided, facts.passed_over) == (4, 2)
    figures = {figure.key: figure.value for figure in figures_of(record(summaries, {0: 0.0, 1: 1.0}))}
    assert figures["zero_advantage"] == pytest.approx(4 / 14)
    assert figures["passed_over"] == 0.5


def test_prompts_that_are_asked_rarely_are_listed_with_the_reason() -> None:
    summaries = group(7, (0.0, 0.0), (0.05, 0.97, "d/20"))
    summaries += [one for n in range(100, 150) for one in group(n, (0.0, 1.0), (0.5, 0.3, "d/9"))]
    facts = value_facts(summaries, {})
    assert facts is not None
    assert len(facts.rare) == MOST_PROMPTS
    first = facts.rare[0]
    assert (first.prompt_id, first.probability, first.predicted, first.alike) == ("d/7", 0.05, 0.97, "d/20")
    assert (first.groups, first.equal, first.reward) == (1, 1, 0.0)
    page = page_of([record(summaries)])
    assert "Asked rarely" in page
    assert "d/7" in page
    assert "1 of 1" in page


def test_groups_without_predictions_or_rewards_say_nothing() -> None:
    assert value_facts([*group(1, (0.0, 1.0), None), *group(2, (None, 1.0))], {}) is None
    assert "Prompts by value" not in page_of([record(group(1, (0.0, 1.0), None))])


def test_calibration_is_drawn_for_one_run_and_for_several() -> None:
    records = [record(group(1, (0.0, 1.0)))] * 2
    calibration, over_time = value_charts(records[:1])
    assert [(line["name"], line["at"], line["y"]) for line in calibration["lines"]] == [
        ("observed", [0.2], [0.0]),
        ("as predicted", [0.2], [0.2]),
    ]
    assert calibration["axis"] == "share"
    assert [line["name"] for line in over_time["lines"]] == ["observed", "predicted"]
    assert [line["run"] for line in value_charts(records)[0]["lines"]] == [0, 1]


async def test_predictions_are_read_from_a_runs_topics(tmp_path: Path) -> None:
    recorded = record_run(tmp_path / "trial", has_values=True, seconds=30.0)
    found = await gather_topics(recorded.history, recorded.name, recorded.directory.logs, {})
    assert found is not None
    assert found.value is not None
    assert found.value.groups > 20
    assert found.value.predicted == pytest.approx(0.4)
    assert found.value.passed_over * 2 == found.value.decided > 20
    assert found.value.rare[0].probability == 0.25
