"""Each example as a user runs it: a process, from the repository's root, by the command that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.local_run import ENVIRONMENT, PATIENCE_S

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
LINES_OF_THE_LOOP = 150
"""So that the example stays one that is read in one sitting."""


def said_by(module: str, *arguments: str) -> str:
    """Standard output of an example that ended well."""
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_in_one_process_takes_ten_steps_and_leaves_nothing(tmp_path: Path) -> None:
    said = said_by("loop", str(tmp_path))
    assert re.findall(r"^step +(\d+)  reward \d\.\d{3}$", said, re.MULTILINE) == [str(step) for step in range(1, 11)]
    assert (tmp_path / "loop" / "checkpoints" / "step_10").is_dir()


def test_the_loop_is_read_in_one_sitting() -> None:
    assert len((ROOT / "examples" / "loop.py").read_text().splitlines()) <= LINES_OF_THE_LOOP
