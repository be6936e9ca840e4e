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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
LIMIT_S, LIMIT_A_TEST_S = 600.0, 60.0
"""Of one call of pytest: over ten times what the slowest takes, since other things may have the processor."""
SAYS_NOTHING = re.compile(r"(Name|Import|ModuleNotFound|Attribute|Type|Syntax)Error\b|Failed: Timeout")
"""Failures of a bug that was planted wrongly, which any test of that code would notice, or of a busy machine."""
OUTCOME = re.compile(r"^(PASSED|FAILED) (\S+::.+?)(?: - (.+))?$", re.MULTILINE)
"""A line of pytest's short summary."""


@dataclass(frozen=True)
class Outcomes:
    """Of tests by their node ids, a parametrised one by each of its cases; of failed ones the message."""

    passed: frozenset[str]
    failed: Mapping[str, str]

    def failure(self, test: str) -> str | None:
        """The message of the first failed case of a test, or none if there is no such case."""
        return next((message for case, message in self.failed.items() if _is_case_of(case, test)), None)

    def has_passed(self, test: str) -> bool:
        """Whether the test was run and no case of it failed."""
        return any(_is_case_of(case, test) for case in self.passed) and self.failure(test) is None


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. ``failures``: how each of its tests failed; ``problem``: why it is not caught, if so.

    ``seconds``: of the tests with the bug.
    """

    mutant: Mutant
    failures: Sequence[str]
    problem: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether every test was red with the bug, and green without."""
        return not self.problem


def judge(mutant: Mutant, without_bugs: Future[Outcomes]) -> Verdict:
    """Run the tests of a mutant with it, and compare them to what they say without any."""
    with copied_tree() as root:
        plant(root, mutant)
        began = time.monotonic()
        red = run_tests(root, mutant.tests)
        seconds = round(time.monotonic() - began, 1)
    problem = problem_of(mutant, red, without_bugs.result())
    return Verdict(mutant, [red.failure(test) or "" for test in mutant.tests], problem, seconds)


def run_without_bugs(mutants: Sequence[Mutant]) -> Outcomes:
    """The tests of all mutants on the tree as it is: one run does for all."""
    with copied_tree() as root:
        return run_tests(root, sorted({test for mutant in mutants for test in mutant.tests}))


def problem_of(mutant: Mutant, red: Outcomes, green: Outcomes) -> str:
    """Why the mutant is not caught, or an empty string."""
    for test in mutant.tests:
        if (message := red.failure(test)) is None:
            return f"{test} passed with the bug" if red.has_passed(test) else f"{test} was not run to its end"
        if SAYS_NOTHING.match(message):
            return f"{test} failed for another reason: {message}"
        if not green.has_passed(test):
            return f"{test} did not pass without the bug: {green.failure(test) or 'it was not run to its end'}"
    return ""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary directory with every file that git tracks, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        root = Path(directory).resolve()
        for name in filter(None, listed.split("\0")):
            source, target = ROOT / name, root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_symlink():  # to a folder of the copy, in which bugs are planted
                target.symlink_to(source.readlink())
            elif source.is_file():  # a file that was deleted is tracked until that is committed
                shutil.copy2(source, target)
        yield root


def plant(root: Path, mutant: Mutant) -> None:
    """Put the bug into its file.

    Raises:
        ValueError: ``old`` does not occur exactly once.
    """
    path = root / mutant.file
    before = path.read_text()
    if (count := before.count(mutant.old)) != 1:
        raise ValueError(f"mutant {mutant.id}: expected its old text once in {mutant.file}, got it {count} times")
    path.write_text(before.replace(mutant.old, mutant.new))


def run_tests(root: Path, tests: Sequence[str]) -> Outcomes:
    """Run these node ids on the code of ``root``. Tests that are not found, or not reached in time, have no outcome."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfp", *tests]
    try:
        output = subprocess.run(
            command,
            cwd=root,
            env=environment(root),
            capture_output=True,
            text=True,
            # Of the tests of all mutants in one call, each has its share.
            timeout=LIMIT_S + LIMIT_A_TEST_S * len(tests),
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        return Outcomes(frozenset(), {})
    found = OUTCOME.findall(output)
    return Outcomes(
        frozenset(case for word, case, _ in found if word == "PASSED"),
        {case: message for word, case, message in found if word == "FAILED"},
    )


def environment(root: Path) -> dict[str, str]:
    """Imports come from ``root``, whatever is installed; pytest cuts its messages at so many columns."""
    return os.environ | {
        "PYTHONPATH": str(root),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(root / ".hypothesis"),
        "COLUMNS": "240",
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


def _is_case_of(case: str, test: str) -> bool:
    return case == test or case.startswith(f"{test}[")
