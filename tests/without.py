"""``python -m tests.without FEATURE ...``: take optional features out of a copy of the tree, one at a time, and see
that the rest holds.

Of each, the folder, its tests and its line in ``streamrl/settings/feature_folders.py`` are deleted, and nothing else is
edited. Then the copy's types are checked, the tests of the loop are run, and the demo takes its first steps.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from streamrl.settings.feature_folders import FOLDERS
from tests.mutants.runner import copied_tree, environment

LIST = Path("streamrl/settings/feature_folders.py")
LOOP = (
    "tests/consumers",
    "tests/coordinator",
    "tests/producers/dispatch",
    "tests/producers/generation",
    "tests/producers/lengths",
    "tests/producers/prompts",
    "tests/producers/rewards",
    "tests/weights",
    "tests/settings",
    "tests/schemas",
    "tests/architecture/test_import_layers.py",
    "tests/deploy/wiring",
)
"""Tests of the loop: from prompts to optimizer steps, and what builds it. The simulation is not among them: it plays
graders and several policies too; nor are tests of what pages and docstrings say of features.
"""
IMPORTED = ("streamrl", "tests", "benchmarks", "docs")
"""All that is found by its name. The tree itself is not on the path: a ``schemas.py`` of a user's comes before ours."""
WITHOUT_FINDER = """import sys
sys.meta_path = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
"""
"""Run at a process's start: an editable installation would find in the tree what its copy does not have."""
START = ".start"
STEPS = 3
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Result:
    """Of one check: how it ended, in a few words, and how long it took."""

    is_good: bool
    said: str
    seconds: float


def main() -> int:
    """Print a line for each check of each feature; 0 if all are good."""
    parser = argparse.ArgumentParser(prog="python -m tests.without", description=__doc__)
    names = {folder.rpartition(".")[2]: folder for folder in FOLDERS}
    parser.add_argument("features", nargs="*", metavar="FEATURE", help=f"of {', '.join(names)}; all, if left out")
    parser.add_argument("--jobs", type=int, default=2, help="test processes")
    arguments = parser.parse_args()
    if unknown := set(arguments.features) - set(names):
        parser.error(f"expected features of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    checks: dict[str, Callable[[Path], Result]] = {
        "types": _types,
        "tests of the loop": lambda root: _tests(root, arguments.jobs),
        "demo": _demo,
    }
    is_good = True
    for name in arguments.features or names:
        with copied_tree() as root:
            take_out(root, names[name])
            for check, run in checks.items():
                result = run(root)
                is_good &= result.is_good
                word = "ok" if result.is_good else "FAILED"
                print(f"without {name:14} {check:18} {word:7} {result.seconds:6.0f} s  {result.said}", flush=True)
    return 0 if is_good else 1


def take_out(root: Path, folder: str) -> None:
    """Delete a feature's folder, its tests and its line in the list.

    Raises:
        ValueError: the list does not name it exactly once.
    """
    line, features = f'    "{folder}",\n', root / LIST
    before = features.read_text()
    if before.count(line) != 1:
        raise ValueError(f"expected {folder} once in {LIST}, got it {before.count(line)} times")
    features.write_text(before.replace(line, ""))
    (root / START).mkdir()
    (root / START / "sitecustomize.py").write_text(WITHOUT_FINDER)
    for name in IMPORTED:
        (root / START / name).symlink_to(root / name)
    place = Path(*folder.split("."))
    shutil.rmtree((root / "streamrl" / place).resolve())
    if (tests := root / "tests" / place).is_dir():
        shutil.rmtree(tests)


def _types(root: Path) -> Result:
    cache = Path(__file__).parents[1] / ".mypy_cache"
    if cache.is_dir():
        shutil.copytree(cache, root / ".mypy_cache")
    return _run(root, [sys.executable, "-m", "mypy", "-p", "streamrl"])


def _tests(root: Path, jobs: int) -> Result:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rf", "-n", str(jobs), "--dist", "loadgroup"]
    return _run(root, [*command, *(place for place in LOOP if (root / place).is_dir())])


def _demo(root: Path) -> Result:
    steps = f"--training.max_steps={STEPS}"
    return _run(root, [sys.executable, "-P", "-m", "streamrl", "demo", steps, "--run.name=without"])


def _environment(root: Path) -> dict[str, str]:
    return environment(root) | {"PYTHONPATH": str(root / START)}


def _run(root: Path, command: list[str]) -> Result:
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=root, env=_environment(root), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Result(False, f"not done within {LIMIT_S:.0f} s", time.monotonic() - began)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    said = lines[-1].strip("= ") if done.returncode == 0 and lines else "\n" + "\n".join(lines[-40:])
    return Result(done.returncode == 0, said, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
