"""How `make test` ends when a test process dies, a test is flaky, or a test changed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import suite
from tests.suite import PARALLEL, Run, changed_tests

pytestmark = pytest.mark.processes

CONFTEST = "from tests.conftest import pytest_terminal_summary, pytest_xdist_make_scheduler\n"
DIES = """
import os, signal, time, pytest

@pytest.mark.parametrize("number", range(400))
def test_it(number):
    time.sleep(0.05)
    if number == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
"""
FLAKY = """
from pathlib import Path

def test_it():
    seen = Path(__file__).with_name("seen")
    was_there, _ = seen.exists(), seen.touch()
    assert was_there

def test_another():
    assert False
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A run of pytest over one module of this text."""
    monkeypatch.setenv("PYTHONPATH", str(suite.ROOT))
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def begun(text: str, *options: str) -> Run:
        (tmp_path / "test_module.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--rootdir={tmp_path}", *options]
        return Run("tests", [*command, str(tmp_path)], tmp_path, tmp_path / "said.txt")

    return begun


def test_a_test_process_that_dies_ends_the_run_and_names_its_test(
    run: Callable[..., Run], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "AGAIN_AT_MOST", 0)
    with run(DIES, "-n2", *PARALLEL) as dying:
        assert dying._process.wait(200) == 1
        assert dying.judged() == 1
    said = capfd.readouterr().out
    assert "crashed while running" in said
    assert "test_it[7]" in said
    passed = int(said.rpartition(" passed")[0].split()[-1])
    assert passed < 200, "the others are not run to their end"


def test_a_failed_test_runs_again_is_named_flaky_and_still_fails(
    run: Callable[..., Run], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with run(FLAKY) as failing:
        assert failing._process.wait(200) == 1
        assert failing.judged() == 1
    said = capfd.readouterr().out
    assert "test_module.py::test_it: passed now: it is flaky, which is a defect" in said
    assert "test_module.py::test_another: failed again" in said


def test_changed_tests_are_those_with_a_changed_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "tests" / "test_it.py"
    module.parent.mkdir()
    module.write_text("def test_one():\n    pass\n\n\ndef test_two():\n    pass\n\n\ndef helper():\n    pass\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert changed_tests("HEAD") == []
    module.write_text(module.read_text().replace("test_two():\n    pass", "test_two():\n    assert 1 + 1 == 2"))
    (tmp_path / "tests" / "test_new.py").write_text("async def test_three():\n    pass\n")
    git("add", ".")
    assert changed_tests("HEAD") == ["tests/test_it.py::test_two", "tests/test_new.py::test_three"]
    module.write_text(module.read_text().replace("test_one", "test_first"))
    assert changed_tests("HEAD") == ["tests/test_it.py::test_two", "tests/test_new.py::test_three"], "only renamed"
