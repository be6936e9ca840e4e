"""What make, the images and pip install has wheels for each Python that is promised; locks have versions only."""

import re
import tomllib
from pathlib import Path

import pytest

from streamrl.producers.prompts.gym import WITHOUT_WHEEL
from streamrl.schemas.extras import EXTRAS
from tests.architecture.sources import ROOT
from tests.packaging.scripts import can_set_up

IMAGES = ROOT / "deploy" / "images"
LOCKS = [*sorted(ROOT.glob("requirements*.txt")), IMAGES / "requirements-vllm-gpu.txt"]
LOCKS = [path for path in LOCKS if "overrides" not in path.name]
INSTALLS = [ROOT / "Makefile", IMAGES / "Dockerfile", IMAGES / "Dockerfile.vllm"]


def lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def names(path: Path) -> set[str]:
    return {re.split(r"[=\[ <>~;]", line)[0] for line in lines(path)}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_has_versions_only_and_nothing_without_a_wheel(path: Path) -> None:
    assert not [line for line in lines(path) if not re.fullmatch(r"[\w.-]+==[\w.]+( ; [\w.\s'<>=!*-]+)?", line)]
    assert not names(path) & set(WITHOUT_WHEEL)


def test_packages_without_wheels_are_left_out_of_the_locks() -> None:
    assert names(ROOT / "requirements-overrides.txt") == set(WITHOUT_WHEEL)


def test_the_base_has_neither_the_optional_packages_nor_those_of_tests_and_manual() -> None:
    base = names(ROOT / "requirements.txt")
    apart = names(ROOT / "requirements-optional.in") | names(ROOT / "requirements-test.in")
    apart |= names(ROOT / "requirements-dev.in") | {"pymdown-extensions"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    direct = {
        re.split(r"[\[<>=~]", one)[0]
        for wanted in (project["dependencies"], *(extras[name] for name in EXTRAS))
        for one in wanted
    }
    assert direct <= base
    assert not base & (apart - direct - {"-r", "pyyaml", "setuptools"})
    assert not names(ROOT / "requirements-test.txt") & {"mypy", "pymdown-extensions", "ruff", "zensical"}


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ("requirements.txt", "requirements-test.txt"),
        ("requirements-optional.txt", "requirements-test.txt"),
        ("requirements-test.txt", "requirements-dev.txt"),
    ],
)
def test_larger_requirements_keep_the_versions_of_smaller_ones(smaller: str, larger: str) -> None:
    """So that nothing is installed twice, and tests run on what the demo runs on."""
    assert not set(lines(ROOT / smaller)) - set(lines(ROOT / larger))


@pytest.mark.parametrize("path", INSTALLS, ids=lambda path: path.name)
def test_every_package_is_installed_from_its_wheel_and_only_ours_is_built(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    installs = [line for line in text.splitlines() if re.search(r"\bpip install\b", line) and not line.startswith("#")]
    assert installs
    for line in installs:
        for command in re.findall(r"pip install[^&;]*", line):
            ours = re.search(r"--no-build-isolation (-e )?\.", command)
            assert ours or re.search(r"--no-build(?!-)|--only-binary :all:|\buv==|\"uv==", command), command


def test_the_pythons_that_are_promised_are_the_same_everywhere() -> None:
    oldest, newest = can_set_up.OLDEST, can_set_up.NEWEST
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == f">={oldest[0]}.{oldest[1]}"
    (environment,) = project["tool"]["uv"]["environments"]
    assert f"python_full_version < '{newest[0]}.{newest[1] + 1}'" in environment
    promised = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert f"Python {promised}" in (ROOT / page).read_text(), page


def test_the_extra_that_is_named_to_users_is_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["reasoning-gym"] == ["reasoning-gym"]
