"""A comparison that was interrupted goes on: no judged run is trained again."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.contenders.plan import Plan, Saved, Trained
from benchmarks.peers.judging.curves import Point
from benchmarks.peers.judging.judge import HeldOut, Judged

NAME = "TRL GRPOTrainer, one process"


def test_a_kept_run_is_trained_again_only_with_another_plan_or_other_settings_or_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Plan] = []

    def train(plan: Plan) -> Trained:
        plan.output.mkdir()
        weights = plan.output / "step_5"
        weights.mkdir()
        trained.append(plan)
        return Trained(NAME, plan.seed, (Saved(5, 2.5, weights),), ({"step": 5, "seconds": 2.5},), True, 4.0)

    def judge(run: Trained, examiner: HeldOut, folder: Path) -> Judged:
        assert all(saved.weights.is_dir() for saved in run.saved)
        return Judged(run, (Point(0, 0.0, 0.1), Point(5, 2.5, 0.3)), {"sum": (0.1, 0.3)})

    monkeypatch.setitem(peers.CONTENDERS, NAME, train)
    monkeypatch.setattr(peers, "judge", judge)
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("{}\n")
    examiner = HeldOut(tmp_path, tmp_path / "held_out.jsonl", "", 1.0, 8, 1)
    plan = Plan(tmp_path, tmp_path / "prompts.jsonl", tmp_path / "run", 0, (0, 1), 60.0)
    first = peers._once(NAME, plan, examiner)
    assert not (plan.output / "step_5").exists(), "weights are not kept"
    assert peers._once(NAME, plan, examiner) == first
    assert len(trained) == 1
    longer = replace(plan, limit_s=90.0)
    assert peers._once(NAME, longer, examiner) == first
    assert trained == [plan, longer]
    other = next(name for name in peers.SETTINGS if name != NAME)
    monkeypatch.setitem(peers.SETTINGS, other, {"processes": 3})
    assert peers._once(NAME, longer, examiner) == first
    assert trained == [plan, longer], "another contender's settings do not count"
    monkeypatch.setitem(peers.SETTINGS, NAME, {"processes": 3})
    assert peers._once(NAME, longer, examiner) == first
    examiner.prompts.write_text("{}\n{}\n")
    assert peers._once(NAME, longer, examiner) == first
    assert trained == [plan, longer, longer, longer]
