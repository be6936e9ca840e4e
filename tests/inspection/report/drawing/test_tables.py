from pathlib import Path

import pytest

from streamrl.inspection.report.figures import Figure, shown
from streamrl.inspection.report.page import (
    differing_environment,
    differing_settings,
    figure_rows,
    measures_of,
    side_by_side,
)
from streamrl.inspection.report.record import RunFacts, RunRecord, StepTable


def record(environment: dict[str, str] | None = None, **settings: object) -> RunRecord:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return RunRecord("r", Path("r"), StepTable(), settings=keys, facts=RunFacts(environment=environment or {}))


def test_the_best_is_marked_where_more_or_less_is_better() -> None:
    runs = [[Figure("a", "A", 1.0, better=1), Figure("b", "B", 1.0), Figure("c", "C", 2, "count", -1)],
            [Figure("a", "A", 2.0, better=1), Figure("b", "B", 2.0), Figure("c", "C", 2, "count", -1)],
            [Figure("b", "B", 3.0)]]  # fmt: skip
    a, b, c = figure_rows(runs)
    assert (a.best, a.texts) == ((False, True, False), ("1", "2", "–"))
    assert b.best == (False, False, False)
    assert c.best == (True, True, False)


def test_a_run_that_never_reached_a_level_is_not_the_best() -> None:
    (row,) = figure_rows([[Figure("t", "T", "never", "seconds", -1)], [Figure("t", "T", 61.0, "seconds", -1)]])
    assert row.best == (False, True)
    assert row.texts == ("never", "61.0 s")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [(0.12345, "share", "12.3%"), (119.9, "seconds", "119.9 s"), (600, "seconds", "10 min 00 s"),
     (9000, "seconds", "2 h 30 min"),
     (12345, "count", "12,345"), (5049.4, "rate", "5,049"), (3.14159, "rate", "3.14"), (0.98437, "value", "0.9844")],
)  # fmt: skip
def test_figures_are_shown_as_people_read_them(value: float, kind: str, text: str) -> None:
    assert shown(Figure("k", "l", value, kind)) == text  # type: ignore[arg-type]


def test_only_settings_that_differ_are_shown() -> None:
    runs = [record(loop__top_k=1, run__name="a", x=[1]), record(loop__top_k=2, run__name="b", x=[1])]
    assert differing_settings(runs) == [("loop.top_k", ("1", "2"))]
    assert differing_settings([*runs, record()]) == [("loop.top_k", ("1", "2", "–"))]
    assert differing_settings([record(), record(x=1)]) == []


def test_only_environments_that_were_kept_are_compared() -> None:
    runs = [record({"CPU": "one", "torch": "2"}), record(), record({"CPU": "two", "torch": "2"})]
    assert differing_environment(runs) == [("CPU", ("one", "–", "two"))]


def test_samples_are_shown_side_by_side_and_unchanged_columns_once() -> None:
    before, after = [{"prompt": "p", "said": "x"}, {"prompt": "q", "said": "y"}], [{"prompt": "p", "said": "z"}]
    assert side_by_side({"before": before, "after": after}) == [{"prompt": "p", "said before": "x", "said after": "z"}]
    assert side_by_side({"before": before, "after": []}) == before
    assert side_by_side({}) == []


def test_held_out_measures_stand_with_before_after_and_change_in_one_row() -> None:
    figures = [
        Figure("mean_length_before", "mean length (held out), before", 18.5),
        Figure("mean_length_after", "mean length (held out), after", 20.0, better=1),
        Figure("bare_before", "bare (held out), before", 0.5),
        Figure("pass_at_1_first", "pass@1 (held out), first weights", 0.25),
        Figure("pass_at_1_last", "pass@1 (held out), last weights", 0.5),
        Figure("reward_first", "reward, first 5 steps", 0.1),
        Figure("reward_last", "reward, last 5 steps", 0.2),
    ]
    assert [tuple(each) for each in measures_of(figures)] == [
        ("mean length", "18.5", "20", "+1.5"),
        ("bare", "0.5", "–", ""),
        ("pass@1", "0.25", "0.5", "+0.25"),
    ]
