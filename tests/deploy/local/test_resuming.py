"""Where a run continues when it is started, tested on real checkpoints."""

import json
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamrl.bus.memory import MemoryBus
from streamrl.cli.app import app
from streamrl.consumers.training.checkpoints import storage
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.deploy.local.resuming import (
    changes_since,
    complete_line,
    final_model,
    is_complete,
    resumed_step,
    resuming_line,
)
from streamrl.deploy.local.run import run_locally
from streamrl.deploy.wiring.trainer import build_leading
from streamrl.observability.role_context import ProcessContext
from streamrl.schemas.errors import SettingsError
from streamrl.schemas.starts import RunInput, RunStart, append_start
from streamrl.settings.loading import as_toml, validated
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings
from tests.consumers.training.checkpoints.damaged_storage import s3_environment, write


def settings_of(tmp_path: Path, *, max_steps: int = 100, **sections: Any) -> Settings:
    tree: dict[str, Any] = {
        "run": {"name": "r", "directory": str(tmp_path)},
        "data": {"path": "p.jsonl"},
        "model": {"path": "m"},
        "training": {"max_steps": max_steps},
    }
    return validated(tree | sections)


def checkpointed(tmp_path: Path, *steps: int) -> RunDirectory:
    directory = RunDirectory(tmp_path / "r")
    place = open_storage(directory.checkpoints, tmp_path / "cache")
    for step in steps:
        write(place, step, CheckpointStore(place, 3).claim_lineage(now=0.0))
    return directory


def write_summary(directory: RunDirectory, steps: object, **more: object) -> None:
    directory.path.mkdir(exist_ok=True)
    directory.summary.write_text(json.dumps({"steps": steps, **more}))


def over(settings: Settings, directory: RunDirectory) -> bool:
    return is_complete(settings, directory, resumed_step(settings))


def files(directory: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}


def test_a_complete_run_says_so_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = checkpointed(tmp_path, 50, 100)
    write_summary(directory, 100, run_seconds=57.42)
    before = files(directory)
    assert run_locally(settings_of(tmp_path)) == 0
    assert capsys.readouterr().out == (
        "run r is already at step 100 of 100: nothing to train; "
        "raise --training.max_steps, or name another run with --run.name\n"
    )
    assert files(directory) == before


def test_a_process_that_would_join_a_complete_run_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = checkpointed(tmp_path, 100)
    config = tmp_path / "streamrl.toml"
    config.write_text(as_toml(settings_of(tmp_path)))
    monkeypatch.setattr(
        "streamrl.deploy.wiring.process.run_role", lambda role, *_arguments, **_options: print(role, "joins")
    )
    for steps, said in ((100, "run r is already at step 100 of 100: nothing to train"), (60, "worker joins")):
        write_summary(directory, steps)
        assert CliRunner().invoke(app, ["worker", str(config)]).stdout.startswith(said)


def test_a_run_beyond_its_new_last_step_is_complete_too(tmp_path: Path) -> None:
    directory = checkpointed(tmp_path, 100)
    write_summary(directory, 100)
    settings = settings_of(tmp_path, max_steps=60)
    assert over(settings, directory)
    assert "already at step 100 of 60" in complete_line(settings, 100)


def test_an_incomplete_run_is_started_again(tmp_path: Path) -> None:
    directory = checkpointed(tmp_path, 50, 100)
    assert not over(settings_of(tmp_path), directory), "what it came to was never summarised"
    for steps in (60, None, "100"):
        write_summary(directory, steps)
        assert not over(settings_of(tmp_path), directory), "the summary is of an earlier start"
    directory.summary.write_text("[")
    assert not over(settings_of(tmp_path), directory)
    write_summary(directory, 100)
    assert not over(settings_of(tmp_path, max_steps=101), directory)
    judged = settings_of(tmp_path, evaluation={"function": "a:b"})
    assert not over(judged, directory), "the evaluation after it is missing"
    write_summary(directory, 100, score_after=1.0)
    assert over(judged, directory)
    (directory.checkpoints / "step_100" / "model.safetensors").write_bytes(b"damaged")
    assert not over(judged, directory), "the trainer would go on from step 50"
    (directory.checkpoints / "step_50" / "model.safetensors").unlink()
    assert not over(judged, directory), "the trainer says what is wrong"


def test_the_newest_lineage_comes_first_and_other_runs_checkpoints_do_not_count(tmp_path: Path) -> None:
    assert resumed_step(settings_of(tmp_path)) == 0
    checkpointed(tmp_path, 100, 40)
    assert resumed_step(settings_of(tmp_path)) == 40
    other = settings_of(tmp_path, algorithm={"name": "rloo"})
    assert resumed_step(other) == 0


def line_of(settings: Settings, directory: RunDirectory, *inputs: RunInput, step: int = 60, fate: str = "") -> str:
    """The line that a start of the run at this step prints."""
    changed = tuple(changes_since(settings, inputs, directory))
    return resuming_line(RunStart(at=0.0, step=step, changed=changed, earlier_trajectories=fate or None))


def test_a_run_that_goes_on_names_a_handful_of_changed_settings(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    settings = settings_of(tmp_path, loop={"num_generations": 4})
    assert line_of(settings, directory) == "continuing from step 60"
    directory.create()
    directory.write_config(as_toml(settings_of(tmp_path, loop={"num_generations": 8})))
    assert line_of(settings, directory) == "continuing from step 60; changed: loop.num_generations 8 → 4"
    directory.write_config(as_toml(settings))
    assert line_of(settings, directory) == "continuing from step 60"
    run = {"name": "r", "directory": str(tmp_path / "elsewhere"), "workers": 1, "seed": 7, "max_restarts": 1}
    more = {"num_generations": 4, "groups_per_step": 3, "top_k": 3}
    line = line_of(settings_of(tmp_path, max_steps=200, run=run, loop=more), directory)
    assert line.count("→") == 5
    assert line.endswith(" and 1 more")
    directory.write_config("= not TOML")
    assert line_of(settings, directory) == "continuing from step 60"


def test_a_run_that_goes_on_names_changed_files_and_code_before_settings(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.create()
    settings = settings_of(tmp_path)
    reward = "reward house:score"
    append_start(directory.starts, RunStart(at=0.0, step=0, inputs={"prompts": "a", reward: "1"}))
    directory.write_config(as_toml(settings_of(tmp_path, loop={"num_generations": 16})))
    same, changed = RunInput("prompts", "a"), RunInput(reward, "2")
    assert line_of(settings, directory, same, changed, fate="skip") == (
        "continuing from step 60; changed: reward house:score 1 → 2, loop.num_generations 16 → 8; trajectories sampled "
        "before are skipped (task_changed); ingest.on_change = train trains them"
    )
    assert line_of(settings, directory, same, changed, fate="train").endswith(
        "; trajectories sampled before are trained (ingest.on_change)"
    )


def test_a_start_without_a_checkpoint_says_only_what_changed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.create()
    settings = settings_of(tmp_path)
    assert line_of(settings, directory, RunInput("prompts", "b"), step=0) == ""
    append_start(directory.starts, RunStart(at=0.0, step=0, inputs={"prompts": "a"}))
    line = line_of(settings, directory, RunInput("prompts", "b"), step=0)
    assert line == "continuing from step 0; changed: prompts a → b"


def test_the_evaluation_after_is_of_the_newest_lineage_wherever_checkpoints_are_kept(tmp_path: Path) -> None:
    judged = {"function": "a:b"}
    checkpointed(tmp_path, 100, 40)
    local = settings_of(tmp_path, evaluation=judged)
    found = final_model(local)
    assert found == RunDirectory(tmp_path / "r").checkpoints / "step_40"
    assert final_model(settings_of(tmp_path)) is None, "nobody asks for it"
    url = f"memory://{uuid.uuid4().hex}"
    place = open_storage(url, tmp_path / "elsewhere")
    write(place, 100, CheckpointStore(place, 3).claim_lineage(now=0.0))
    training = {"training": {"max_steps": 100, "checkpoint_location": url}}
    remote = validated(local.model_dump(exclude_unset=True) | training)
    model = final_model(remote)
    assert model is not None
    assert (model / "model.safetensors").is_file()
    directory = RunDirectory(tmp_path / "r")
    write_summary(directory, 100, score_after=1.0)
    assert is_complete(remote, directory, resumed_step(remote))


@pytest.mark.parametrize("what", ["run", "trainer"])
def test_an_object_store_out_of_reach_is_refused_before_anything_is_written(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_environment("http://127.0.0.1:1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "CHECK_PATIENCE", timedelta(seconds=0.1))
    settings = settings_of(tmp_path)
    settings = validated(
        settings.model_dump(exclude_unset=True) | {"training": {"checkpoint_location": "s3://bucket/x"}}
    )
    with pytest.raises(SettingsError, match="s3://bucket/x") as caught:
        if what == "run":
            run_locally(settings)
        else:
            build_leading(settings, ProcessContext("trainer", MemoryBus(), lambda _name: None))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "r").exists()
