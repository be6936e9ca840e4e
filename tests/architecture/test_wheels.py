"""What an image installs can be installed there: what has no wheel, in a stage with a compiler."""

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

IMAGES = ROOT / "deploy" / "images"


def installed() -> Iterator[Distribution]:
    """In this environment, and in that of vLLM if it is there."""
    yield from distributions()
    for site in ROOT.glob(".venv-vllm/lib/python*/site-packages"):
        yield from distributions(path=[str(site)])


def compiled_here(found: Iterable[Distribution]) -> set[str]:
    """Packages that were compiled on this machine: the tag "linux_x86_64" is of no use elsewhere, so no wheel that is
    published has it.
    """
    return {
        _plain(each.metadata["Name"])
        for each in found
        if re.search(r"^Tag: .*-linux_", each.read_text("WHEEL") or "", re.M)
    }


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_in(requirements: Path) -> set[str]:
    """Names of the packages of a lock file."""
    return {_plain(line.partition("==")[0]) for line in requirements.read_text().splitlines() if "==" in line}


def without_compiler(dockerfile: str, locks: dict[str, set[str]], compiled: set[str]) -> set[str]:
    """Packages that the stages of an image would have to compile and cannot."""
    missing: set[str] = set()
    for stage in re.split(r"^FROM ", dockerfile, flags=re.M)[1:]:
        has_compiler = re.search(r"apt-get install .*\bgcc\b.*\blibc6-dev\b", stage)
        for file, names in locks.items():
            if re.search(rf"^COPY .*{file} ", stage, re.M) and not has_compiler:
                missing |= names & compiled
    return missing


LOCKS = {
    "requirements.txt": locked_in(ROOT / "requirements.txt"),
    "deploy/images/requirements-vllm-gpu.txt": locked_in(IMAGES / "requirements-vllm-gpu.txt"),
}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_what_has_no_wheel_is_installed_where_there_is_a_compiler(name: str) -> None:
    text, compiled = (IMAGES / name).read_text(), compiled_here(installed())
    assert any(file in text for file in LOCKS)
    assert not without_compiler(text, LOCKS, compiled)


def test_a_stage_without_a_compiler_is_found() -> None:
    text = (IMAGES / "Dockerfile").read_text()
    assert without_compiler(text.replace("gcc libc6-dev", "make"), LOCKS, {"pycosat", "unused"}) == {"pycosat"}


def test_what_was_compiled_here_is_told_from_a_published_wheel() -> None:
    compiled = compiled_here(installed())
    assert "torch" not in compiled
    assert "numpy" not in compiled
    # The one that has no wheel; once it has one, or is not needed, this line goes.
    assert "pycosat" in compiled
