"""``python .ci/release.py``: builds what a release publishes into dist/, and tries it as a user would.

1. Build a wheel and an sdist of the last commit. The sdist must build the same wheel.
2. Install the wheel into an empty environment outside of the tree: the base, then with the extra ``local``. Train three
   steps of the demo there.
3. Write an SBOM (CycloneDX, JSON) of the Python packages that the image gets.
4. Build the image with the SBOM in it, if a Docker engine answers.

dist/ is emptied first. The last lines are its files with their SHA-256, which SHA256SUMS also has.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).parent))
from check_pythons import DEMO, ROOT, STEPS, UV, WARM_START, own_cache, run

DIST = ROOT / "dist"
DOCKERFILE = Path("deploy", "images", "Dockerfile")
SBOM_IN_IMAGE = "/usr/share/doc/streamrl/"


class ReleaseError(Exception):
    """A step of the release failed; the text is one line, or a command's last lines."""


def main() -> int:
    """0, or 1 after the failure was printed."""
    try:
        with tempfile.TemporaryDirectory(prefix="streamrl-release-") as folder:
            release(Path(folder))
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def release(work: Path) -> None:
    """All steps, with temporary files in ``work``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = f"{project['name']}-{project['version']}"
    if wrong := version_problem(project["version"], (ROOT / "CHANGELOG.md").read_text()):
        raise ReleaseError(wrong)
    shutil.rmtree(DIST, ignore_errors=True)
    source = work / "source"
    wheel = build(source, work / "again", name)
    try_wheel(wheel, work)
    sbom = write_sbom(source, wheel, work, DIST / f"{name}.cdx.json")
    build_image(source, f"streamrl:{project['version']}", sbom)
    sums = checksums(sorted(DIST.iterdir()))
    (DIST / "SHA256SUMS").write_text(sums)
    print(f"dist/ has:\n{sums}", end="")


def version_problem(version: str, changelog: str) -> str:
    """Why this version cannot be released; empty if it can."""
    (newest,) = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)[:1] or [""]
    if newest == version:
        return ""
    return f"expected CHANGELOG.md to begin with version {version} of pyproject.toml, got {newest or 'no version'}"


def build(source: Path, again: Path, name: str) -> Path:
    """The wheel in dist/, next to an sdist that builds the same wheel; ``source`` gets the committed tree."""
    committed_tree(source)
    _build(source, DIST, "--wheel")
    _build(source, DIST, "--sdist")
    wheel, sdist = next(DIST.glob("*.whl")), DIST / f"{name}.tar.gz"
    _build(sdist, again, "--wheel")
    contents = contents_of(wheel)
    wrong = [*wheel_problems(contents), *differences(contents, contents_of(again / wheel.name))]
    if wrong:
        raise ReleaseError("; ".join(wrong[:5]))
    print(f"built {wheel.name} and {sdist.name}, which builds the same wheel", flush=True)
    return wheel


def committed_tree(to: Path) -> None:
    """Write the files of the last commit, and say which changes are left out."""
    to.mkdir()
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", to], input=packed, check=True)
    changed = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if changed:
        print(f"note: the release is built from the last commit, without {len(changed.splitlines())} changed files")


def _build(source: Path, to: Path, kind: str) -> None:
    # The commit's time, so that the same commit gives the same wheel.
    when = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    environ = {**os.environ, "SOURCE_DATE_EPOCH": when.stdout.strip()}
    command = [UV, "build", "-q", kind, "--no-build-isolation", "--no-create-gitignore", "--python", sys.executable]
    _checked([*command, "--out-dir", to, source], timeout_s=300, environ=environ)


def contents_of(wheel: Path) -> dict[str, bytes]:
    """A wheel's files by name."""
    with ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist() if not name.endswith("/")}


def wheel_problems(names: Collection[str]) -> list[str]:
    """What a wheel must not have: other top-level names than ours, tests, and compiled or temporary files."""
    wrong = [f"expected only streamrl at the top of the wheel, got {name}" for name in names if not _is_ours(name)]
    unwanted = re.compile(r"(^|/)(tests?|__pycache__)/|(^|/)(test_[^/]*|conftest)\.py$|\.pyc$")
    found = [name for name in names if unwanted.search(name)]
    return wrong + [f"expected no tests and no compiled files in the wheel, got {name}" for name in found]


def _is_ours(name: str) -> bool:
    return re.match(r"streamrl(-[\d.]+\w*\.dist-info)?/", name) is not None


def differences(wheel: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    """Files that the wheel of the sdist lacks, has in addition, or has with other contents."""
    changed = sorted(name for name in wheel.keys() | other.keys() if wheel.get(name) != other.get(name))
    return [f"expected the sdist to build the same wheel, got another {name}" for name in changed]


def try_wheel(wheel: Path, work: Path) -> None:
    """Install the wheel as `pip install` would, print what that takes, and train three steps."""
    environment = work / "environment"
    _checked([UV, "venv", "-q", "--python", sys.executable, environment], timeout_s=120)
    streamrl, into = environment / "bin" / "streamrl", [UV, "pip", "install", "-q", "--python", environment]
    began = time.monotonic()
    _checked([*into, wheel], timeout_s=1800)
    print(f"base: {_size(environment)}, installed in {time.monotonic() - began:.0f} s", flush=True)
    environ = own_cache(work / "cache")
    _checked([streamrl, "worker", "--help"], timeout_s=120, cwd=work, environ=environ)
    _checked([*into, f"{wheel}[local]"], timeout_s=600)
    print(f"with the extra local: {_size(environment)}", flush=True)
    began = time.monotonic()
    model = [environment / "bin" / "python", "-P", "-c", WARM_START]
    for command in (model, [streamrl, *DEMO]):
        _checked(command, timeout_s=1200, cwd=work, environ=environ)
    print(f"trained {STEPS} steps of the demo in {time.monotonic() - began:.0f} s", flush=True)


def _size(environment: Path) -> str:
    packages = len(list(environment.glob("lib/*/site-packages/*.dist-info"))) - 1  # ours
    size = sum(path.stat().st_size for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{packages} packages, {size / 1e6:,.0f} MB"


def packages_of_image(dockerfile: str, requirements: str, optional: str) -> str:
    """The requirements that the Dockerfile installs: those of both files without the ones that its pattern removes."""
    (left_out,) = re.findall(r"grep -vE '([^']+)' requirements\.txt", dockerfile)
    return "".join(line + "\n" for line in requirements.splitlines() if not re.search(left_out, line)) + optional


def write_sbom(source: Path, wheel: Path, work: Path, sbom: Path) -> Path:
    """The SBOM of an environment with the image's Python packages."""
    wanted, environment = work / "image.txt", work / "image"
    read = [(source / name).read_text() for name in (DOCKERFILE, "requirements.txt", "requirements-optional.txt")]
    wanted.write_text(packages_of_image(*read))
    _checked([UV, "venv", "-q", "--python", sys.executable, environment], timeout_s=120)
    into = [UV, "pip", "install", "-q", "--no-deps", "--python", environment]
    _checked([*into, "--no-build", "-r", wanted, wheel], timeout_s=1800)
    tool = [Path(sys.executable).parent / "cyclonedx-py", "environment", "--pyproject", source / "pyproject.toml"]
    _checked([*tool, "--output-reproducible", "-o", sbom, environment], timeout_s=600)
    return sbom


def build_image(source: Path, tag: str, sbom: Path) -> None:
    """Build the image and add the SBOM as its last layer. Without a Docker engine, say that no image was built."""
    if shutil.which("docker") is None or run(["docker", "info"], timeout_s=60):
        print(f"no image {tag}: no Docker engine answers; start one, then `make release` builds it", flush=True)
        return
    context = source.with_name("image-context")
    context.mkdir()
    shutil.copy(sbom, context)
    (context / "Dockerfile").write_text(f"FROM {tag}\nCOPY {sbom.name} {SBOM_IN_IMAGE}\n")
    _checked(["docker", "build", "--file", source / DOCKERFILE, "--tag", tag, source], timeout_s=3600)
    _checked(["docker", "build", "--tag", tag, context], timeout_s=300)
    print(f"image {tag} has its SBOM in {SBOM_IN_IMAGE}{sbom.name}", flush=True)


def checksums(files: Iterable[Path]) -> str:
    """One line for each file: its SHA-256 and its name, as `sha256sum --check` reads them."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def _checked(command: list[Any], **options: Any) -> None:
    if said := run(command, **options):
        raise ReleaseError(said)


if __name__ == "__main__":
    sys.exit(main())
