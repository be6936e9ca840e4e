"""What a user can do wrong ends in one clear line, exit code 2 and no traceback."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.command import Ended, ended
from tests.pipeline.accounts import read_accounts
from tests.pipeline.conftest import Start
from tests.pipeline.local_run import CLI, EMULATED, write_config
from tests.progress import calm_s

pytestmark = pytest.mark.processes


def assert_one_clear_line(done: "Ended | subprocess.CompletedProcess[str]", *parts: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line


def config_with(tmp_path: Path, tiny_model: Path, /, **sections: dict[str, Any]) -> str:
    return str(write_config(tmp_path, tiny_model, "bad", **sections))


def test_a_wrong_key_is_named_with_the_nearest_right_one(tmp_path: Path, tiny_model: Path) -> None:
    """In a process of its own, as a user sees it; the others within this one."""
    command = [*CLI, "run", config_with(tmp_path, tiny_model, loop={"max_stalenes": 3})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert_one_clear_line(done, "loop.max_stalenes", "did you mean loop.max_staleness")


def test_a_wrong_value_is_named_and_quoted(tmp_path: Path, tiny_model: Path) -> None:
    done = ended("run", config_with(tmp_path, tiny_model), "--loop.groups_per_step=none")
    assert_one_clear_line(done, "loop.groups_per_step", "'none'")


def test_a_missing_configuration_file_is_named() -> None:
    assert_one_clear_line(ended("run", "nowhere.toml"), "nowhere.toml", "does not exist")


def test_an_unreachable_broker_is_named_within_seconds(tmp_path: Path, tiny_model: Path) -> None:
    began = calm_s()
    done = ended("run", config_with(tmp_path, tiny_model, **EMULATED), "--kafka.bootstrap_servers=127.0.0.1:1")
    assert_one_clear_line(done, "127.0.0.1:1")
    assert calm_s() - began < 30


def test_a_missing_model_is_named_and_nothing_is_written(tmp_path: Path, tiny_model: Path) -> None:
    config = config_with(tmp_path, tiny_model, model={"path": str(tmp_path / "no-model")})
    assert_one_clear_line(ended("run", config), "no-model", "model.path")
    assert not (tmp_path / "bad").exists()


def test_a_reward_function_that_cannot_be_imported_is_named_and_nothing_is_written(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = config_with(tmp_path, tiny_model, rewards={"functions": ["tests.pipeline.letter_reward:no_such"]})
    assert_one_clear_line(ended("run", config), "no_such")
    assert not (tmp_path / "bad").exists()


@pytest.mark.long
async def test_a_reward_function_that_fails_ends_the_run_and_every_skip_has_its_reason(
    start: Start, bootstrap_servers: str
) -> None:
    run = start(
        "--rewards.timeout_s=0.2",
        "--run.max_restarts=0",
        "--run.workers=1",
        rewards={"functions": ["tests.pipeline.letter_reward:fails_in_turn"]},
    )
    assert run.wait() == 2, run.text()[-4000:]
    last = run.text().strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "in a row" in last
    accounts = await read_accounts(bootstrap_servers, run.directory.name)
    assert set(accounts.skipped.values()) == {"poison"}
    assert not accounts.trained
    for reason in ("cannot judge", "timed out", "nan"):
        assert any(reason in detail for detail in accounts.skip_details), reason
    log = (run.directory / "logs" / "trainer.log").read_text()
    assert "Traceback" not in log
