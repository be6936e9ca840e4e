import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.inspection.report.charts import curves
from streamrl.inspection.report.record import read_rows
from streamrl.producers.evaluation.results import PassRule, append_evaluations, metrics_of, pass_at_k, scored
from streamrl.producers.evaluation.settings import HeldOutSettings
from streamrl.producers.prompts.settings import DataSettings
from streamrl.schemas.evaluation import EVALUATED, EvaluationReport
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.trajectories import FinishReason, Trajectory
from tests.schemas.examples import trajectory


@pytest.mark.parametrize(("samples", "passed"), [(4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_one_that_passed(samples: int, passed: int) -> None:
    outcomes = [True] * passed + [False] * (samples - passed)
    for k in range(1, samples + 1):
        drawn = [any(outcomes[at] for at in chosen) for chosen in combinations(range(samples), k)]
        assert pass_at_k(samples, passed, k) == pytest.approx(np.mean(drawn))


def sample(prompt: int, reward: float | None, **changes: Any) -> Trajectory:
    return trajectory(**{"prompt_id": f"p/{prompt}", "rewards": {"right": reward, "style": 5.0}} | changes)


def test_figures_are_by_set_and_what_is_missing_has_failed() -> None:
    weights = {"right": 1.0, "style": 0.0}
    made = [
        scored(each, weights, PassRule.of("right", weights))
        for each in (
            sample(0, 1.0),
            sample(0, 0.0),
            sample(1, None),
            sample(1, 1.0, finish_reason=FinishReason.ABORT),
            sample(2, 1.0),  # and its other sample was given up
        )
    ]
    found = metrics_of(made, {"p/0": "easy", "p/1": "easy", "p/2": "hard"}, 2, (1, 2))
    assert found["eval/easy/pass@1"] == pytest.approx(0.25)
    assert found["eval/easy/pass@2"] == pytest.approx(0.5)
    assert found["eval/hard/pass@1"] == pytest.approx(0.5)
    assert found["eval/hard/pass@2"] == pytest.approx(1.0)
    assert found["eval/pass@1"] == pytest.approx(1 / 3)
    assert found["eval/easy/reward"] == pytest.approx(0.5)
    assert found["eval/hard/mean_length"] == 5.0


def test_a_completion_passes_by_all_rewards_by_a_named_one_or_by_their_sum() -> None:
    weights = {"math_verify": 1.0, "format": 0.2, "length": -0.1}
    right, formed = {"math_verify": 1.0, "format": 0.0}, {"math_verify": 0.0, "format": 1.0}
    both = {"math_verify": 1.0, "format": 1.0, "length": None}
    everything, named, sum_of = (PassRule.of(passes_at, weights) for passes_at in (None, "math_verify", 0.5))
    assert [rule.is_met(both) for rule in (everything, named, sum_of)] == [True] * 3
    assert [rule.is_met(right) for rule in (everything, named, sum_of)] == [False, True, True]
    assert not any(rule.is_met(formed) for rule in (everything, named, sum_of))
    assert str(everything) == "math_verify + 0.2 format + -0.1 length >= 1.2"
    assert str(named) == "math_verify >= 1"
    thirds = dict.fromkeys("abc", 0.1)
    assert PassRule.of(None, thirds).is_met(dict.fromkeys("cba", 1.0))


def report(lineage: int, number: int, passed: float) -> EvaluationReport:
    version = PolicyVersion(lineage, number)
    return EvaluationReport(
        version=version,
        step=number,
        metrics={"eval/pass@1": passed, "eval/easy/pass@1": passed},
        prompts=4,
        samples=4,
        oldest=version,
        newest=version,
        began_at=1.0,
        sent_at=2.0 + number,
    )


def test_a_version_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    append_evaluations(path, [report(1, 0, 0.25)])
    with path.open("a") as file:
        file.write(json.dumps({"step": 1, "time": 3.0, "reward": 0.5}) + "\n")
        file.write(f'half a line with "{EVALUATED}" that a killed')
        file.write("\n")
    for _ in range(3):
        append_evaluations(path, [report(1, 0, 0.25), report(1, 2, 0.5), report(2, 2, 0.75)])
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [row.get(EVALUATED) for row in rows] == ["1-0", None, "1-2", "2-2"]
    table = read_rows(path)
    assert table.steps == (1,)
    assert [(step, metrics["eval/pass@1"]) for step, metrics in table.evaluations] == [(0, 0.25), (2, 0.75)]
    (drawn,) = [each for group in curves([table]) for each in group["curves"] if each["title"].startswith("Held-out")]
    assert [(line["name"], line["at"], line["y"]) for line in drawn["lines"]] == [
        ("pass@1", [0, 2], [0.25, 0.75]),  # of the only set
    ]


def test_settings_tell_what_is_due_and_how_many_slots_it_takes() -> None:
    none = HeldOutSettings()
    assert (none.slots(64), none.is_due(0)) == (0, False)
    some = HeldOutSettings(data={"held_out": DataSettings(dataset="chain_sum")}, every=10, samples=8, k=(4,))
    assert [step for step in range(25) if some.is_due(step)] == [0, 10, 20]
    assert [some.newest_due(last, exported_every=4) for last in (0, 9, 20, 25, 30)] == [0, 0, 20, 20, 30]
    assert (some.slots(64), some.slots(4), some.told_k) == (8, 1, (1, 4))
    off = HeldOutSettings(data=some.data, every=0)
    assert (off.sets, off.slots(64), off.is_due(0)) == ({}, 0, False)
    with pytest.raises(ValueError, match=r"each of evaluation.k from 1 to evaluation.samples \(2\), got 3; lower it"):
        HeldOutSettings(samples=2, k=(3,))
    with pytest.raises(ValueError, match=r"expected evaluation\.samples = 1 with evaluation\.temperature = 0.*got 2"):
        HeldOutSettings(samples=2, temperature=0)
