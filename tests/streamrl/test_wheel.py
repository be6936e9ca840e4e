"""A built wheel is what `pip install` gets: it needs what running needs, and its command works without this tree."""

import os
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.architecture.sources import PACKAGES, ROOT

pytestmark = pytest.mark.processes

FOR_DEVELOPMENT = {"pytest", "mypy", "ruff", "moto", "testcontainers", "zensical", "hypothesis", "redis", "vllm"}


def test_a_wheel_needs_no_development_package_and_its_command_works_by_itself(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    for name in ("streamrl", *PACKAGES):
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    uv = [str(Path(sys.executable).parent / "uv"), "build", "--quiet", "--offline", "--wheel", "--no-build-isolation"]
    subprocess.run([*uv, "--python", sys.executable, "--out-dir", tmp_path, source], check=True, timeout=60)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as packed:
        names = packed.namelist()
        told = message_from_bytes(next(packed.read(name) for name in names if name.endswith("/METADATA")))
        (entries,) = [packed.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
        packed.extractall(installed)
    always = {
        need.split(";")[0].split(" ")[0].split("[")[0].rstrip("<>=!~0123456789.,").lower()
        for need in told.get_all("Requires-Dist", [])
        if "extra ==" not in need
    }
    assert {"aiokafka", "torch", "transformers", "typer"} <= always
    assert not always & FOR_DEVELOPMENT
    assert told["Requires-Python"] == ">=3.11"
    assert told.get_all("License-File") == ["LICENSE"]
    assert "streamrl = streamrl.__main__:main" in entries
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"streamrl"}
    # Away from this tree, whose packages would be found first in the working directory.
    code = "from streamrl.schemas import topics; from streamrl.__main__ import main; print(topics.__file__); main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "init", "task"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert (tmp_path / "task" / "streamrl.toml").is_file()
