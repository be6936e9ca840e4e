"""`make setup` says in its first second what is missing, in one line that names what to do."""

import builtins
import os
import platform
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.sources import ROOT
from tests.packaging.scripts import can_set_up

SCRIPT = ROOT / ".ci" / "can_set_up.py"
MAKE = shutil.which("make")


def test_this_machine_can_be_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert can_set_up.main([]) == 0
    assert capsys.readouterr().err == ""


def _said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert can_set_up.main(list(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: expected ")
    assert said.count("\n") == 1
    return said


Version = namedtuple("Version", "major minor micro releaselevel serial")


@pytest.mark.parametrize(
    ("version", "words"), [((3, 9, 18), "CPython 3.11 to 3.14"), ((3, 15, 0), "no wheels for a newer one")]
)
def test_a_python_outside_the_range_gives_the_range_and_how_to_choose(
    version: tuple[int, int, int], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", Version(*version, "final", 0))
    monkeypatch.setattr(platform, "python_version", lambda: ".".join(map(str, version)))
    said = _said(capsys)
    assert words in said
    assert ".".join(map(str, version)) in said
    assert "PYTHON=" in said


def test_a_missing_venv_module_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "ensurepip":
            raise ModuleNotFoundError("No module named 'ensurepip'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "sudo apt install python3.{}-venv".format(sys.version_info.minor) in _said(capsys)  # noqa: UP032


@pytest.mark.parametrize(("version", "words"), [(None, "musl"), ((2, 17), "glibc 2.17")])
def test_a_c_library_without_wheels_is_named(
    version: tuple[int, int] | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(can_set_up, "libc", lambda: version)
    said = _said(capsys)
    assert words in said
    assert "glibc 2.28 or newer" in said


def test_vllm_needs_a_newer_c_library_than_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(can_set_up, "libc", lambda: (2, 28))
    assert can_set_up.main([]) == 0
    assert "wheels of vLLM" in _said(capsys, "--vllm")


def test_a_machine_without_wheels_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "i686")
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    assert "got 32-bit Linux on i686" in _said(capsys)


def test_a_full_disk_is_reported_before_the_directory_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "not" / "yet"))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**12, 0, 2 * 10**9))
    assert f"expected 7 GB of room on the disk for .venv, got 2.0 GB at {tmp_path}" in _said(capsys, str(tmp_path))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: usage(10**12, 0, 10**9 if place == str(tmp_path) else 10**11)
    )
    assert "UV_CACHE_DIR" in _said(capsys, "/")


def _fake_python(folder: Path, name: str, code: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{code}\n")
    (folder / name).chmod(0o755)


def _found(path: str) -> str:
    command = [ROOT / ".ci" / "find-python"]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.processes
def test_the_first_python_that_can_be_used_is_found(tmp_path: Path) -> None:
    """python3 is too old and python3.13 a shim that runs nothing, as pyenv has them."""
    folder, tools = tmp_path / "bin", f"{tmp_path / 'bin'}:/nowhere"
    _fake_python(folder, "python3", 'case "$1" in -c) exit 0;; *) exit 2;; esac')
    _fake_python(folder, "python3.13", "exit 127")
    for tool in ("bash", "dirname", "env"):
        (folder / tool).symlink_to(shutil.which(tool) or "")
    assert _found(tools) == str(folder / "python3")  # which can say what is wrong with it
    (folder / "python3.12").symlink_to(sys.executable)
    assert _found(tools) == str(folder / "python3.12")
    (folder / "python3").unlink()
    (folder / "python3.12").unlink()
    assert _found(tools) == "python3"


@pytest.mark.processes
@pytest.mark.skipif(MAKE is None, reason="needs make")
@pytest.mark.parametrize("said", ["error: expected a better one, got this", "nothing at"])
def test_make_setup_ends_with_that_line_and_leaves_nothing(tmp_path: Path, said: str) -> None:
    for name in ("Makefile", ".ci/can_set_up.py", ".ci/find-python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    _fake_python(tmp_path / "bin", "python", f"echo '{said}' >&2; exit 2")
    python = tmp_path / "bin" / "python" if said.startswith("error") else tmp_path / "none"
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        [str(MAKE), "setup", f"PYTHON={python}"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert (
        first == said if said.startswith("error") else first.startswith("error: expected Python 3.11 to 3.14, got none")
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.processes
@pytest.mark.parametrize("version", ["2.7", "3.6", "3.10"])
def test_an_old_python_can_say_that_it_is_too_old(version: str) -> None:
    """By its own parser, where one is installed."""
    here = [*sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")), shutil.which(f"python{version}")]
    # A shim of pyenv is there for versions that are not chosen, and runs nothing.
    old = next(
        (one for one in here if one and subprocess.run([one, "-c", ""], capture_output=True).returncode == 0), None
    )
    if old is None:
        pytest.skip(f"needs a Python {version} that runs")
    done = subprocess.run([old, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"got CPython {version}." in done.stderr
    assert "Traceback" not in done.stderr
