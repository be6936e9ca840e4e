"""A tracker that the user named and that cannot be opened ends the run before it trains anything."""

import os
import subprocess
from pathlib import Path

import pytest

from streamrl.deploy.wiring.process import _tracking
from streamrl.schemas.errors import SettingsError
from tests.deploy.local.test_refused_start import settings_in, write_config
from tests.pipeline.local_run import CLI, PATIENCE_S


def test_the_coordinator_alone_opens_the_named_trackers(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "runs", '--tracking.to=["tensorboard"]')
    for role in ("trainer", "worker", "dispatcher"):
        assert _tracking(role, settings) is None
    assert _tracking("coordinator", settings_in(tmp_path / "runs")) is None
    opened = _tracking("coordinator", settings)
    assert opened is not None
    opened.close()
    assert [*(tmp_path / "runs/refused/tracking/tensorboard").glob("events.*")]


def test_the_coordinator_refuses_a_tracker_that_cannot_be_opened(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "runs", '--tracking.to=["tensorboard"]')
    (tmp_path / "runs/refused").mkdir(parents=True)
    (tmp_path / "runs/refused/tracking").write_text("a file")
    with pytest.raises(SettingsError, match="expected to open tensorboard of tracking"):
        _tracking("coordinator", settings)


def test_a_named_tracker_without_a_login_ends_the_run_in_one_line(tmp_path: Path, bootstrap_servers: str) -> None:
    config = write_config(tmp_path / "runs")
    options = [str(config), "--run.name=no-login", '--tracking.to=["wandb"]']
    options.append(f"--kafka.bootstrap_servers={bootstrap_servers}")
    nobody = {"WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    command = [*CLI, "run", *options]
    run = subprocess.run(command, env=os.environ | nobody, capture_output=True, text=True, timeout=PATIENCE_S)
    said = run.stdout + run.stderr
    assert run.returncode == 2, said
    (line,) = [line for line in said.splitlines() if "wandb login" in line and "level=" not in line]
    assert "Traceback" not in said
    assert line.startswith("error: "), said
    assert "trained" not in said
