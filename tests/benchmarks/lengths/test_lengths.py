"""What the comparison of length predictors rests on: halves that share nothing, and a fair judge."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.lengths.__main__ import main
from benchmarks.lengths.trial import DataSetIdentity, Perfect, ask, judge, mean_of, predictors, teach
from benchmarks.lengths.workload import (
    CAP,
    INSTRUCTIONS,
    Policy,
    Split,
    Task,
    recorded_tasks,
    split_by_content,
    split_by_dataset,
)
from streamrl.schemas.trajectories import LengthEstimate, Prompt


def task(dataset: str, text: str, content: str, *lengths: int) -> Task:
    prompt = Prompt(prompt_id=f"{dataset}/{text}", dataset=dataset, content=text)
    return Task(prompt, sum(lengths) / max(1, len(lengths)), content, lengths, (False,) * len(lengths))


@pytest.fixture(scope="module")
def made_up() -> list[Task]:
    return Policy("synthetic").tasks(200, 5)


@pytest.mark.parametrize("name", ["synthetic", "answers", "lognormal", "real"])
def test_nothing_asked_was_taught_neither_as_a_question_nor_by_its_parameters(name: str) -> None:
    tasks = Policy(name).tasks(200, 5)
    split = split_by_content(tasks, 5)
    assert len(split.taught) + len(split.asked) == len(tasks) == len({one.prompt.text for one in tasks})
    assert (split.overlap, split.content_overlap) == (0, 0)
    assert 0.2 < len(split.asked) / len(tasks) < 0.6
    assert {one.prompt.dataset for one in split.asked} <= {one.prompt.dataset for one in split.taught}


def test_overlap_is_counted() -> None:
    first, second = task("a", "one", "a: 1", 5), task("a", "two", "a: 1", 5)
    assert (Split([first], [first, second]).overlap, Split([first], [first, second]).content_overlap) == (1, 2)


def test_every_data_set_is_asked_in_one_fold_and_taught_in_none_of_its_own(made_up: list[Task]) -> None:
    folds = split_by_dataset(made_up, 5)
    asked = Counter(dataset for fold in folds for dataset in {one.prompt.dataset for one in fold.asked})
    assert set(asked) == {one.prompt.dataset for one in made_up}
    assert set(asked.values()) == {1}
    for fold in folds:
        assert not {one.prompt.dataset for one in fold.asked} & {one.prompt.dataset for one in fold.taught}
        assert (fold.overlap, fold.content_overlap) == (0, 0)


def test_subjects_of_instructions_are_on_one_side_whatever_is_asked_of_them() -> None:
    split = split_by_content(recorded_tasks(), 5)
    subjects = [
        {one.content for one in half if one.prompt.dataset in INSTRUCTIONS} for half in (split.taught, split.asked)
    ]
    assert all(subjects)
    assert not subjects[0] & subjects[1]


def test_the_recorded_lengths_are_whole() -> None:
    tasks = recorded_tasks()
    assert len({one.prompt.dataset for one in tasks}) >= 20
    for one in tasks:
        assert len(one.recorded) == len(one.capped) in (2, 8)
        assert all(1 <= length <= CAP for length in one.recorded)
        # Nothing but the cap ends a completion of that length, and the cap ends none before.
        assert all(length == CAP for length, capped in zip(one.recorded, one.capped, strict=True) if capped)


def test_a_draw_is_the_same_for_a_seed(made_up: list[Task]) -> None:
    again = Policy("synthetic").tasks(200, 5)
    assert [one.prompt.text for one in again] == [one.prompt.text for one in made_up]
    policy = Policy("synthetic")
    assert policy.lengths(made_up[0], random.Random(1)) == policy.lengths(again[0], random.Random(1))


def test_recall_within_data_sets_does_not_pay_for_knowing_the_data_set() -> None:
    """Two data sets, one ten times as long: who knows that alone recalls the longest fifth, and nothing within."""
    tasks = [
        task(name, f"{name} {number}", f"{name}: {number}", factor * (number + 10))
        for name, factor in (("short", 1), ("long", 10))
        for number in range(40)
    ]
    policy = Policy("real")
    by_name = DataSetIdentity(policy)
    teach(by_name, policy, tasks, 0)
    known = judge(ask(by_name, tasks)[0], policy, tasks, 0)["all"]
    # The predicted fifth is any 16 of the 40 long ones; the truly longest 16 are among these.
    assert (known.recall, known.within_data_set_recall) == pytest.approx((0.4, 0.2))
    perfect = judge(ask(Perfect(policy, tasks), tasks)[0], policy, tasks, 0)["all"]
    assert (perfect.recall, perfect.within_data_set_recall) == (1.0, 1.0)
    chance = judge(ask(predictors(policy, tasks)["chance"], tasks)[0], policy, tasks, 0)["all"]
    assert (chance.recall, chance.within_data_set_recall) == pytest.approx((0.2, 0.2))


def test_folds_are_weighed_by_what_was_asked() -> None:
    def judged(count: int, right: bool) -> list:  # type: ignore[type-arg]
        tasks = [task("a", f"{right} {number}", str(number), number + 1) for number in range(count)]
        estimates = [
            LengthEstimate(median=number + 1 if right else count - number, upper=CAP, bucket=0, predictor="x")
            for number in range(count)
        ]
        return [judge(estimates, Policy("real"), tasks, 0)["all"]]

    both = mean_of(judged(30, right=True) + judged(10, right=False))
    assert (both.prompts, both.recall, both.coverage) == pytest.approx((40, 0.75, 1.0))


@pytest.mark.processes
def test_a_run_leaves_rows_that_say_what_they_are_and_repeats(tmp_path: Path) -> None:
    def run(name: str) -> list[dict]:  # type: ignore[type-arg]
        results = tmp_path / f"{name}.json"
        main(
            [
                *("--prompts", "180", "--workloads", "answers"),
                *("--results", str(results), "--readme", str(tmp_path / f"{name}.md")),
            ]
        )
        rows = json.loads(results.read_text())["rows"]
        # Processor time is all that may differ.
        return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]

    rows = run("first")
    assert rows == run("second")
    whole = {(row["split"], row["predictor"]): row for row in rows if row["dataset"] == "all"}
    assert {split for split, _ in whole} == {"seen", "unseen_data_sets"}
    assert {name for _, name in whole} == {"chance", "data_set", "observed_quantiles", "learned", "perfect"}
    assert all(row["overlap"] == row["content_overlap"] == 0 for row in rows)
    assert whole["seen", "perfect"]["recall"] == 1.0
    assert whole["seen", "data_set"]["recall"] > whole["seen", "chance"]["recall"]
    # Of a data set that was never taught its name says nothing.
    assert whole["unseen_data_sets", "data_set"]["recall"] == whole["unseen_data_sets", "chance"]["recall"]
    assert "| unseen_data_sets |" in (tmp_path / "first.md").read_text()


TIMES = ("us_per_prompt_p50", "us_per_prompt_p99", "seconds")
