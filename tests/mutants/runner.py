"""Plants a known bug in a copy of the tree and runs its tests: red with it, green without it.

The working tree is only read. Each mutant has a copy of its own, so that several can be judged side by side.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.catalogue import Mutant

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
"""Of one call of pytest: over ten times what the slowest takes, since other things may have the processor."""
GREEN, RED = 0, 1
"""Exit codes of pytest: all tests passed; some failed. A test that is not found or does not import has another."""
DOES_NOT_RUN = re.compile(r"(Name|Import|ModuleNotFound|Attribute|Type|Syntax)Error\b")
"""Failures by which a bug shows that it was planted wrongly: any test of that code would be red."""


@dataclass(frozen=True)
class Outcome:
    """Of one call of pytest: its exit code, none if it took too long, and the message of the first failure."""

    code: int | None
    message: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. ``failures``: how each of its tests failed; ``problem``: why it is not caught, if so."""

    mutant: Mutant
    failures: Sequence[str]
    problem: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether every test was red with the bug, and green without."""
        return not self.problem


def judge(mutant: Mutant) -> Verdict:
    """Run the tests of a mutant with it, each by itself, and then without it."""
    began = time.monotonic()
    with copied_tree() as root:
        with planted(root, mutant):
            red = [run_tests(root, [test]) for test in mutant.tests]
        green = run_tests(root, mutant.tests)
    problem = problem_of(mutant, red, green)
    return Verdict(mutant, [each.message for each in red], problem, round(time.monotonic() - began, 1))


def problem_of(mutant: Mutant, red: Sequence[Outcome], green: Outcome) -> str:
    """Why the mutant is not caught, or an empty string."""
    for test, outcome in zip(mutant.tests, red, strict=True):
        if outcome.code != RED:
            return f"{test} ended with {outcome.code} instead of {RED}"
        if DOES_NOT_RUN.match(outcome.message):
            return f"the mutant does not run: {outcome.message}"
    if green.code != GREEN:
        return f"its tests ended with {green.code} without the mutant: {green.message}"
    return ""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary directory with every file that git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory).resolve()
        for name in filter(None, listed.split("\0")):
            if (source := ROOT / name).is_file():  # a file that was deleted is tracked until that is committed
                target = root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield root


@contextmanager
def planted(root: Path, mutant: Mutant) -> Iterator[None]:
    """The bug is in the file within the block.

    Raises:
        ValueError: ``old`` does not occur exactly once.
    """
    path = root / mutant.file
    before = path.read_text()
    if (count := before.count(mutant.old)) != 1:
        raise ValueError(f"mutant {mutant.id}: expected its old text once in {mutant.file}, got it {count} times")
    path.write_text(before.replace(mutant.old, mutant.new))
    yield
    path.write_text(before)


def run_tests(root: Path, tests: Sequence[str]) -> Outcome:
    """Run these node ids on the code of ``root``."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-rf", *tests]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment(root), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, f"took over {LIMIT_S:.0f} s")
    failed = re.search(r"^FAILED .+? - (.+)$", done.stdout, re.MULTILINE)
    return Outcome(done.returncode, failed[1] if failed else "")


def environment(root: Path) -> dict[str, str]:
    """Imports come from ``root``, whatever is installed.

    No byte code is kept: Python takes it for current by time in seconds and size, and a mutant may change neither.
    """
    return os.environ | {
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(root / ".hypothesis"),
        "COLUMNS": "240",  # pytest cuts its messages there
    }


def check_imports() -> None:
    """Make sure that tests of a copy import the code of that copy.

    Raises:
        ValueError: they do not.
    """
    with copied_tree() as root:
        command = [sys.executable, "-c", "import consumers; print(consumers.__file__)"]
        done = subprocess.run(command, cwd=root, env=environment(root), capture_output=True, text=True, check=True)
        if not Path(done.stdout.strip()).is_relative_to(root):
            raise ValueError(f"expected an import from {root}, got one from {done.stdout.strip()}")
