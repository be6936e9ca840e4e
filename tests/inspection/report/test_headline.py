"""What a report starts with: the headline, six tiles and the setup."""

from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from streamrl.inspection.report.headline import (
    changed_settings,
    difference_interval,
    headline_of,
    held_out_of,
    setup_of,
    tiles_of,
    wilson,
)
from streamrl.inspection.report.record import RunRecord, rows_of
from streamrl.schemas.evaluation import EVALUATED, PROMPTS
from streamrl.settings.explaining import defaults
from streamrl.settings.keys import known_keys

SETTINGS = {
    "run.name": "mine",
    "model.path": "Qwen/Qwen3-0.6B",
    "data.path": "train.jsonl",
    "data.split": "train",
    "algorithm.name": "grpo",
    "training.learning_rate": 5e-06,
    "training.lr_schedule": "constant",
    "training.max_steps": 20,
    "loop.max_staleness": 2,
    "loop.temperature": 1.0,
}


def recorded(rewards: int = 20, evaluations: dict[int, float] | None = None, **more: Any) -> RunRecord:
    """A run with the rewards 1, 2, 3 ... and these results on 64 held-out prompts, by step."""
    steps = [
        {"step": n, "time": 100.0 + n, "time/step": 1.0, "reward": float(n), "ledger/trained": 8.0,
         "completions/num_tokens": 80.0, "off_policy/mean": 0.5, "off_policy/max": 2.0}
        for n in range(1, rewards + 1)
    ]  # fmt: skip
    results = [
        {"step": n, "time": 200.0, EVALUATED: f"1-{n}", PROMPTS: 64, "eval/pass@1": value, "eval/one/pass@1": value}
        for n, value in (evaluations or {}).items()
    ]
    settings = SETTINGS | more.pop("settings", {})
    return RunRecord("mine", Path("mine"), rows_of([*steps, *results]), settings=settings, **more)


def test_an_interval_of_a_share_is_wilsons() -> None:
    for passed in (0, 1, 32, 64):
        known = binomtest(passed, 64).proportion_ci(method="wilson")
        assert wilson(passed / 64, 64) == pytest.approx((known.low, known.high), abs=1e-6)


def test_an_interval_of_a_difference_is_newcombes() -> None:
    # 0.5 - sqrt((0.75 - 0.6318)² + (0.3682 - 0.25)²), and the same upwards: the shares mirror each other.
    assert difference_interval(0.25, 0.75, 64) == pytest.approx((0.3329, 0.6275), abs=1e-3)
    low, high = difference_interval(0.5, 0.5, 64)
    assert low == pytest.approx(-high)
    assert high > 0.16


def test_the_headline_is_the_held_out_result_with_its_intervals_and_conditions() -> None:
    found = headline_of(
        recorded(
            evaluations={0: 0.25, 10: 0.5, 20: 0.75},
            settings={"evaluation.data.one.path": "test.jsonl", "evaluation.samples": 2},
        )
    )
    assert (found.what, found.before, found.after, found.change) == ("held out: pass@1", "0.250", "0.750", "+0.500")
    assert found.better is True
    assert found.notes[0].startswith("95 % intervals: before 0.160 to 0.368, after 0.632 to 0.840, difference +0.3")
    assert found.notes[1] == ("weights of step 0 and of step 20; 64 prompts of one, 2 samples of each, temperature 1")


def test_a_change_within_its_interval_is_not_called_one() -> None:
    found = headline_of(recorded(evaluations={0: 0.5, 20: 0.52}))
    assert found.better is None
    assert "no certain change: the last one includes 0" in found.notes[0]
    assert headline_of(recorded(evaluations={0: 0.9, 20: 0.1})).better is False


def test_one_evaluation_is_not_shown_twice() -> None:
    found = headline_of(recorded(evaluations={0: 0.5}))
    assert (found.before, found.after, found.change) == ("", "0.500", "")
    assert tiles_of(recorded(evaluations={0: 0.5}))[0].note == "one evaluation"


def test_a_function_s_first_measure_is_the_headline_where_no_set_is_held_out() -> None:
    summary = {"accuracy_before": 0.25, "accuracy_after": 0.5, "mean_length_before": 9.0, "mean_length_after": 8.0}
    settings = {"evaluation.function": "mine:judge"}
    without = headline_of(recorded(summary=summary, settings=settings))
    assert (without.what, without.before, without.after) == ("held out: accuracy", "0.250", "0.500")
    assert without.notes[0] == "no intervals: the number of prompts is not known"
    known = held_out_of(recorded(summary=summary | {"held_out_prompts": 512}, settings=settings))
    assert known is not None
    assert (known.prompts, known.steps, known.conditions) == (512, (0, 20), "judged by mine:judge")


def test_without_held_out_prompts_the_headline_says_that_the_reward_is_one_of_training() -> None:
    found = headline_of(recorded())
    assert (found.what, found.before, found.after, found.change) == ("training reward", "3.000", "18.000", "+15.000")
    assert found.notes[0] == "means of the first 5 steps and the last 5 steps"
    assert "no held-out prompts were evaluated" in found.notes[1]
    assert found.better is None


@pytest.mark.parametrize(
    ("steps", "before", "after", "windows"),
    [
        (1, "", "1.000", "mean of the last step"),
        (3, "1.000", "3.000", "means of the first step and the last step"),
        (7, "2.000", "6.000", "means of the first 3 steps and the last 3 steps"),
    ],
)
def test_the_two_windows_of_a_short_run_share_no_step(steps: int, before: str, after: str, windows: str) -> None:
    found = headline_of(recorded(steps))
    assert (found.before, found.after, found.notes[0]) == (before, after, windows)


def test_every_run_has_six_tiles_that_name_what_they_compare_with() -> None:
    summary = {"skipped": {"stale": 40}, "audit": {"balanced": True}}
    tiles = tiles_of(recorded(summary=summary, evaluations={0: 0.25, 20: 0.75}))
    assert [tuple(tile) for tile in tiles] == [
        ("pass@1, held out", "0.750", "+0.500 against step 0"),
        ("reward, last 5 steps", "18.000", "+15.000 against the first 5 steps"),
        ("optimizer steps", "20", "in 20.0 s of steps"),
        ("trajectories/s", "8", "80 completion tokens/s, start-up excluded"),
        ("staleness, mean steps", "0.5", "at most 2, 2 allowed"),
        ("skipped", "20.0%", "40 trajectories; audit: nothing lost"),
    ]
    assert [tile.value for tile in tiles_of(RunRecord("r", Path("r"), rows_of([])))] == [
        "not measured", "–", "0", "–", "–", "–",
    ]  # fmt: skip


def test_the_setup_names_model_data_algorithm_and_learning_rate_and_what_is_not_the_default() -> None:
    adapted = recorded(settings={"training.lora.rank": 8, "loop.groups_per_step": defaults()["loop.groups_per_step"]})
    assert setup_of(adapted) == [
        ("model", "Qwen/Qwen3-0.6B"),
        ("data", "train.jsonl, train"),
        ("algorithm", "grpo, LoRA of rank 8"),
        ("learning rate", "5e-06, constant"),
    ]
    changed = {each.key: (each.value, each.default) for each in changed_settings(adapted)}
    assert changed["loop.max_staleness"] == ("2", "4")
    assert changed["training.lora.rank"] == ("8", "0")
    assert not changed.keys() & {"loop.groups_per_step", "run.name", "model.path", "training.learning_rate"}
    assert setup_of(RunRecord("r", Path("r"), rows_of([]))) == []


def test_every_default_is_one_of_a_setting() -> None:
    assert len(defaults()) > 150
    assert defaults()["training.max_steps"] is not None
    assert defaults().keys() <= set(known_keys(in_tables=True))
