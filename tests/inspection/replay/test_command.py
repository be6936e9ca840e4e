import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file

from streamrl.bus.history import BusHistory
from streamrl.cli.app import main
from streamrl.inspection.replay.command import (
    GradientOptions,
    ReplayRequest,
    StepChoice,
    WhatIfOptions,
    replay,
    replay_with,
    step_range,
)
from streamrl.inspection.source import open_run
from streamrl.schemas.errors import SettingsError, UserError
from tests.inspection.replay.conftest import BAD_STEP, CULPRIT, RecordedRunFiles

Ask = Callable[..., tuple[int, str]]


def request_of(run: Path, *, steps: tuple[int | None, int | None] = (None, None), **options: Any) -> ReplayRequest:
    """Each option in its group."""

    def grouped(kind: type[Any], *given: Any) -> Any:
        return kind(*given, **{each.name: options.pop(each.name) for each in fields(kind) if each.name in options})

    groups = grouped(StepChoice, *steps), grouped(WhatIfOptions), grouped(GradientOptions)
    return ReplayRequest(run, *groups, **options)


@pytest.fixture
def ask(recorded_run: RecordedRunFiles, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Replay from the export, without any broker; the exit code and what was printed."""

    def asked(**options: Any) -> tuple[int, str]:
        code = replay(request_of(recorded_run.directory, export=recorded_run.export, **options))
        return code, capsys.readouterr().out

    return asked


def test_without_a_step_it_says_what_can_be_replayed(ask: Ask) -> None:
    code, text = ask()
    assert code == 0
    assert "steps 1 to 6 of lineage 1\n  steps 7 to 14 of lineage 2" in text
    assert "1-7, 1-8" in text
    assert "checkpoints: 2-14, 2-12, 2-9, 1-6, 1-3" in text


def test_a_range_prints_one_line_a_step_and_ends_well_if_all_are_equal(ask: Ask) -> None:
    code, text = ask(steps=(5, 8))
    lines = text.splitlines()
    assert code == 0
    assert [line.split("  ")[:2] for line in lines] == [
        [f"step {n} ({'1' if n <= 6 else '2'}-{n})", "bit-equal"] for n in range(5, 9)
    ]


def test_one_step_is_shown_in_full(ask: Ask) -> None:
    code, text = ask(steps=(8, 8), per_trajectory=True)
    assert code == 0
    assert "step 8 (2-8), from checkpoint 1-6 over 1 steps: bit-equal" in text
    for part in ("tensors bit-equal", "grad_norm", "model.layers.0", "own grad norm", "streamrl show TRAJECTORY"):
        assert part in text


def test_json_is_one_object_with_everything_in_it(ask: Ask) -> None:
    _, text = ask(steps=(8, 8), json=True, algorithm="rloo")
    found = json.loads(text)
    assert found["rebuilt"]["verdict"] == "bit-equal"
    assert found["what_if"]["changes"] == ["algorithm.name=rloo"]
    assert 0 < found["what_if"]["update"]["cosine"] <= 1
    assert found["rebuilt"]["rows"][0]["ratio_mean"] > 0


def test_a_step_that_differs_ends_with_exit_code_one_and_a_what_if_does_not(
    recorded_run: RecordedRunFiles, ask: Ask
) -> None:
    config = recorded_run.directory / "config.resolved.toml"
    before = config.read_text()
    config.write_text(before.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    try:
        assert ask(steps=(2, 2))[0] == 1
        assert ask(steps=(2, 2), changes=("algorithm.epsilon_high=0.3",))[0] == 0
    finally:
        config.write_text(before)


def test_a_planted_trajectory_is_found_with_one_command(ask: Ask) -> None:
    code, text = ask(steps=(BAD_STEP, BAD_STEP), bisect=True)
    assert code == 0
    assert "1 culprit(s)" in text
    assert f"streamrl show {CULPRIT}" in text
    assert "prompt:     'why?'" in text
    assert "completion: 'because'" in text
    found = json.loads(ask(steps=(BAD_STEP, BAD_STEP), bisect=True, json=True)[1])
    assert [[outlier["row"]["trajectory_id"] for outlier in culprit] for culprit in found["culprits"]] == [[CULPRIT]]


def test_without_the_culprit_the_step_is_a_usual_one(ask: Ask) -> None:
    _, text = ask(steps=(BAD_STEP, BAD_STEP), without=(CULPRIT,), json=True)
    before, after = json.loads(text)["what_if"]["metrics"]["grad_norm"]
    assert after < before / 50


@pytest.mark.parametrize("option", ["only", "without"])
def test_a_wrong_trajectory_is_refused_before_any_step_is_taken(
    ask: Ask, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=rf"that step {BAD_STEP} trained, got 'p/0/0/9'; .* --step {BAD_STEP}` lists"):
        ask(steps=(BAD_STEP, BAD_STEP), **{option: (CULPRIT, "p/0/0/9")})
    assert capsys.readouterr().err == ""


def test_dead_letters_can_be_asked_for(ask: Ask) -> None:
    assert ask(from_dlq=True) == (0, "0 dead letters, 0 of them usable now; weights none\n")


def test_kept_tensors_are_those_of_the_trainer(recorded_run: RecordedRunFiles, ask: Ask, tmp_path: Path) -> None:
    ask(steps=(12, 12), out=tmp_path)
    kept = load_file(tmp_path / "step_12" / "weights.safetensors")
    original = load_file(recorded_run.directory / "checkpoints" / "step_12" / "model.safetensors")
    assert kept.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in kept.items())
    assert (tmp_path / "step_12" / "gradients.safetensors").exists()
    assert (tmp_path / "step_12" / "update.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": (99, 99)}, "steps 7 to 14 of lineage 2, got step 99"),
        ({"steps": (9, 9), "lineage": 1}, "steps 1 to 8 of lineage 1, got step 9"),
        ({"steps": (9, 9), "attempt": 1}, "never refused"),
        ({"steps": (8, 9), "bisect": True}, "one --step"),
        ({"bisect": True}, "--step N or --steps"),
        ({"steps": (2, 2), "only": ("x",)}, "'x'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(ask: Ask, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ask(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changes": ("algorithm.epsilon_hihg=0.3",)}, "did you mean algorithm.epsilon_high"),
        ({"changes": ("algorithm.epsilon_high=high",)}, "algorithm.epsilon_high"),
        ({"changes": ("loop.groups_per_step=3",)}, "algorithm, training, batching"),
        ({"changes": ("algorithm.epsilon",)}, "SECTION.KEY=VALUE"),
        ({"algorithm": "ppoo"}, "did you mean ppo"),
    ],
)
def test_a_wrong_setting_is_refused_as_in_a_configuration(ask: Ask, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        ask(steps=(2, 2), **changes)


def test_a_replay_writes_nothing(
    recorded_run: RecordedRunFiles, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Neither to any topic, nor to the run's directory, whatever it is asked for; but for the index of its records."""
    bus = recorded_run.recorded.harness.bus

    def state() -> tuple[dict[str, list[int]], dict[str, tuple[int, int]], dict[Any, int]]:
        ends = {name: [len(partition) for partition in log.partitions] for name, log in bus.logs.items()}
        files = {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(recorded_run.directory.rglob("*"))
            if path.name != "records.sqlite" and path != recorded_run.directory
        }
        return ends, files, dict(bus.committed)

    before = state()
    for changes in (
        {"steps": (8, 8), "per_trajectory": True, "algorithm": "rloo"},
        {"steps": (BAD_STEP, BAD_STEP), "bisect": True},
        {"from_dlq": True},
        {"steps": (3, 4), "out": tmp_path},
    ):
        bus.arrived = asyncio.Condition()
        request = request_of(recorded_run.directory, **changes)
        asyncio.run(replay_with(request, open_run(recorded_run.directory), BusHistory(bus), tmp_path))
    assert capsys.readouterr().out
    assert state() == before


def test_steps_are_named_by_number_or_range() -> None:
    assert step_range(None, None) == (None, None)
    assert step_range(7, None) == (7, 7)
    assert step_range(None, "3:9") == (3, 9)
    for step, steps in ((1, "2:3"), (None, "3"), (None, "9:3"), (None, "a:b"), (None, "1:")):
        with pytest.raises(UserError, match="FIRST:LAST"):
            step_range(step, steps)


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.resolved\.toml"):
        open_run(tmp_path)


def test_the_command_ends_in_one_line_and_exit_code_two(
    recorded_run: RecordedRunFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--export", str(recorded_run.export), "--step", "99"]
    monkeypatch.setattr(sys, "argv", ["streamrl", "replay", "--run", str(recorded_run.directory), *options])
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        structlog.reset_defaults()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: expected one of steps 1 to 6 of lineage 1")
