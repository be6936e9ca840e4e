import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.deploy.local.supervisor import ChildSpec
from streamrl.settings.loading import without_settings
from tests.chaos.faults.clocks import give_clocks
from tests.chaos.faults.wrong_clock import WrongClock

pytestmark = pytest.mark.processes


def test_a_process_of_a_run_has_the_clock_it_was_given_and_one_of_a_clean_environment_that_of_the_machine(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-P", "-c", "import time; print(time.time())"]
    spec = ChildSpec("trainer", command, log_path=tmp_path / "log")
    setting = SimpleNamespace(directory=SimpleNamespace(path=tmp_path), specs=[spec])
    run: Any = SimpleNamespace(setting=setting, plan=SimpleNamespace(seed=0))
    give_clocks(run)
    (given,) = run.fleet.specs
    WrongClock(tmp_path / "clocks" / "trainer").set(7200.0)

    def off_by(environment: dict[str, str]) -> float:
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
        assert not done.stderr
        return float(done.stdout) - time.time()

    clean = without_settings(os.environ)
    assert abs(off_by(clean | given.environment) - 7200.0) < 30
    assert abs(off_by(clean | {"PYTHONPATH": given.environment["PYTHONPATH"]})) < 30
