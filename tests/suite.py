"""`python -m tests.suite`: all tests, as `make test` runs them; with `--changed-since REV`, changed ones, ten times.

Runs the suite and, next to it, the tests of vLLM in their own environment, which is made meanwhile if it is missing.
Prints the twenty slowest tests of each.
A test that fails is run once more by itself: if it passes then, it is named as flaky. The command fails all the same.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
WHY_NOT = VLLM.parents[1] / "why-not"
"""What is missing for vLLM, where the environment could not be made."""
MAKE_VLLM = ("make", "--no-print-directory", ".venv-vllm/tried")
LIMIT_S = 3600
"""For one run of pytest. Each test has its own time limit, so only a stalled run takes this long."""
AGAIN_LIMIT_S = 600
"""For the second try of all failed tests."""
AGAIN_AT_MOST = 20
OPTIONS = ("--durations=20", "--durations-min=1")
# A test process that dies ends the run: xdist would start another one, and may wait for ever for what the first had.
PARALLEL = ("--dist=loadgroup", "--max-worker-restart=0")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suite", description=__doc__)
    parser.add_argument("--jobs", type=int, default=4, help="test processes next to each other (default: 4)")
    parser.add_argument("--changed-since", metavar="REV", help="run only the tests that changed since this commit")
    parser.add_argument("--times", type=int, default=10, help="rounds of the changed tests (default: 10)")
    parser.add_argument("--busy", type=int, default=0, help="busy loops next to the tests (default: none)")
    parser.add_argument("--minutes", type=float, default=10, help="most minutes for the changed tests (default: 10)")
    arguments, for_pytest = parser.parse_known_args()
    os.chdir(ROOT)
    # A stop of this command stops the test processes too, through the exception that it becomes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with busy_loops(arguments.busy):
        if arguments.changed_since:
            return run_changed(arguments.changed_since, arguments.times, arguments.minutes, arguments.jobs)
        return run_all(arguments.jobs, for_pytest)


def run_all(jobs: int, for_pytest: Sequence[str]) -> int:
    """Both suites next to each other; the exit code of the first that failed, or 0."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder, runs, making = Path(name), list[Run](), None
        # With arguments of pytest's the user asks for certain tests.
        if not for_pytest:
            making = stack.enter_context(Run("environment of vLLM", MAKE_VLLM, folder, folder / "make.txt"))
            runs.append(making)
        if not for_pytest:
            compile_once()
        runs.append(stack.enter_context(Run("tests", [sys.executable, *_suite(jobs, for_pytest)], folder)))
        waited_until = time.monotonic() + LIMIT_S
        while any(run.code() is None for run in runs) and time.monotonic() < waited_until:
            if died := [run for run in runs if (run.code() or 0) < 0]:
                print(f"error: the process of the {died[0].name} died of signal {-(died[0].code() or 0)}")
                break
            time.sleep(0.2)
            if making is not None and making.code() == 0:
                making = None
                if VLLM.exists():
                    command = [str(VLLM), "-m", "pytest", "-m", "vllm", *OPTIONS, "tests/producers/generation/engines"]
                    runs.append(stack.enter_context(Run("tests of vLLM", command, folder, folder / "vllm.txt")))
                else:
                    print(f"tests of vLLM skipped: {WHY_NOT.read_text().strip()}", flush=True)
        for run in runs:
            run.end()
        return max((run.judged() for run in runs), default=0)


def compile_once() -> None:
    """Where nothing is compiled yet, all of it once here, and not by every test process at the same time."""
    if any((ROOT / "tests" / "__pycache__").glob("test_suite.*.pyc")):
        return
    print("compiling tests and libraries once", flush=True)
    library = [sys.executable, "-c", "import transformers.models.qwen2.modeling_qwen2"]
    tests = [sys.executable, *_suite(0, ("--collect-only", "-q"))]
    # What fails here fails again, and is shown, where the tests are run.
    with subprocess.Popen(library, stderr=subprocess.DEVNULL):
        subprocess.run(tests, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _suite(jobs: int, for_pytest: Sequence[str]) -> list[str]:
    return ["-m", "pytest", f"-n{jobs}", *PARALLEL, *OPTIONS, "--ignore=tests/architecture", *for_pytest]


class Run(contextlib.AbstractContextManager["Run"]):
    """A run of pytest or of make. ``output``: a file that is shown at the end; None: shown at once."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, output: Path | None = None) -> None:
        self.name, self._command, self._output = name, list(command), output
        self._failed = folder / f"{name}.json".replace(" ", "-")
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "STREAMRL_TEST_FAILED": str(self._failed)}
        self._file = output.open("wb") if output is not None else None
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._file, stderr=self._file and subprocess.STDOUT
        )

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it, if it still runs: pytest takes Ctrl-C and clears up."""
        if self.code() is None:
            print(f"error: the {self.name} did not end, or the other tests died: interrupted")
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
            self._process.kill()
            self._process.wait()

    def judged(self) -> int:
        """Show what is to be shown, and run what failed once more; the exit code."""
        code = self._process.returncode
        if self._file is not None and self._output is not None:
            self._file.close()
            # What was installed says nothing to who wants to know about the tests.
            if code != 0 or "pytest" in self._command:
                print(self._output.read_text(errors="replace"), flush=True)
        failed = json.loads(self._failed.read_text()) if self._failed.exists() else []
        if failed:
            self._try_again(failed)
        return code if code >= 0 else 128 - code

    def _try_again(self, failed: Sequence[str]) -> None:
        python, again = self._command[0], failed[:AGAIN_AT_MOST]
        print(f"\n{len(failed)} failed; {len(again)} of them once more, alone:", flush=True)
        flaky = []
        until = time.monotonic() + AGAIN_LIMIT_S
        for nodeid in again:
            with contextlib.suppress(subprocess.TimeoutExpired):
                command = [python, "-m", "pytest", "-q", "--no-header", nodeid]
                left = max(1.0, until - time.monotonic())
                if subprocess.run(command, env=self._environment, capture_output=True, timeout=left).returncode == 0:
                    flaky.append(nodeid)
        for nodeid in again:
            said = "passed now: it is flaky, which is a defect" if nodeid in flaky else "failed again"
            print(f"  {nodeid}: {said}")

    def __exit__(self, *_: object) -> None:
        if self.code() is None:
            self._process.kill()
            self._process.wait()
        if self._file is not None:
            self._file.close()


def run_changed(since: str, times: int, minutes: float, jobs: int) -> int:
    """The tests that changed since a commit, so often, within so many minutes; the exit code."""
    nodeids = changed_tests(since)
    if not nodeids:
        print(f"no tests changed since {since}")
        return 0
    print(f"{len(nodeids)} tests changed since {since}", flush=True)
    until, rounds = time.monotonic() + 60 * minutes, 0
    while rounds < times and (rounds == 0 or time.monotonic() < until):
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", f"-n{jobs}", *PARALLEL, "-q", "--no-header", *nodeids]
        with tempfile.TemporaryDirectory() as folder, Run("changed tests", command, Path(folder)) as run:
            while run.code() is None and time.monotonic() < began + LIMIT_S:
                time.sleep(0.2)
            run.end()
            # 5: all that changed needs what is not here, and was deselected.
            if (code := run.judged()) not in (0, 5):
                print(f"error: round {rounds + 1} of the changed tests failed")
                return code
        rounds += 1
    print(
        f"the changed tests passed {rounds} times of {times}" + ("" if rounds == times else f" in {minutes:g} minutes")
    )
    return 0


def changed_tests(since: str) -> list[str]:
    """Node ids of the test functions with a line that was added or changed since a commit. A new name is no change."""
    diff = _git("diff", "-U0", "--no-color", since, "--", "tests")
    found, path, functions = dict[str, None](), None, list[tuple[str, int, int]]()
    for part in re.split(r"^(?=@@ |diff )", diff, flags=re.MULTILINE):
        head, _, body = part.partition("\n")
        if head.startswith("diff "):
            path = next((line[6:] for line in body.splitlines() if line.startswith("+++ b/tests/")), None)
            path = path if path and re.search(r"/test_\w+\.py$", path) else None
            functions = _test_functions(ROOT / path) if path else []
        elif path and (hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", head)) and not _is_renaming(body):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            for name, start, end in functions:
                if first <= end and first + count > start:
                    found[f"{path}::{name}"] = None
    return list(found)


def _is_renaming(hunk: str) -> bool:
    """Whether the lines of a hunk differ in the names of tests only."""
    lines = [re.sub(r"\btest_\w+", "test", line) for line in hunk.splitlines()]
    before, after = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
    return before == after


def _test_functions(path: Path) -> list[tuple[str, int, int]]:
    tree = ast.parse(path.read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [
        (node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or node.lineno)
        for node in functions
        if node.name.startswith("test_")
    ]


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that each keep a processor busy, for two hours at most."""
    code = "import signal; signal.alarm(7200)\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


if __name__ == "__main__":
    sys.exit(main())
