import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pytest

from streamrl.deploy.images.cpu_torch import NO_DRIVER, without_cuda
from streamrl.deploy.images.health import main, metrics_address
from tests.architecture.sources import PACKAGES
from tests.deploy.compose.stack import IMAGES, ROOT, services

DOCKERFILES = [path for path in sorted(IMAGES.glob("Dockerfile*")) if path.suffix != ".dockerignore"]


def test_there_are_two_images_and_the_compose_file_builds_both() -> None:
    built = {service["build"]["dockerfile"] for service in services().values() if "build" in service}
    assert built == {str(path.relative_to(ROOT)) for path in DOCKERFILES}
    assert len(DOCKERFILES) == 2


@pytest.mark.processes
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_unprivileged_and_checked(path: Path) -> None:
    text = path.read_text()
    assert all(
        re.fullmatch(r"python:3\.11-slim-\w+( AS \w+)?", base) for base in re.findall(r"^FROM (.+)$", text, re.M)
    )
    assert text.rstrip().splitlines()[-4] == "USER 10001:10001"
    assert "HEALTHCHECK" in text
    assert 'ENTRYPOINT ["streamrl-entrypoint"]' in text


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_every_copied_path_is_there_and_let_through(path: Path) -> None:
    ignored = path.with_name(f"{path.name}.dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line[:1] == "!"}
    sources = [
        source
        for line in re.findall(r"^COPY (.+)$", path.read_text(), re.M)
        if "--from=" not in line
        for source in [word for word in line.split() if not word.startswith("--")][:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, source


@pytest.mark.processes
def test_the_package_in_the_image_has_all_that_our_code_reads(tmp_path: Path) -> None:
    """Built from what the image's first stage copies, as it is built there."""
    context, built = tmp_path / "context", tmp_path / "built"
    context.mkdir()
    stage = DOCKERFILES[0].read_text().split("\nFROM ")[1]
    for source in " ".join(re.findall(r"^COPY (.+) \S+$", stage, re.M)).split():
        if (ROOT / source).is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, context / source, ignore=ignore, symlinks=True)
        else:
            shutil.copy(ROOT / source, context)
    uv = [str(Path(sys.executable).parent / "uv"), "build", "--quiet", "--offline", "--wheel", "--no-build-isolation"]
    subprocess.run([*uv, "--python", sys.executable, "--out-dir", built, context], check=True, timeout=60)
    (wheel,) = built.glob("*.whl")
    packed = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tops = ("streamrl", *(package for package in PACKAGES if (ROOT / package).is_dir()))
    paths = [path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*") if path.is_file()]
    there = {str(path if path.parts[0] == "streamrl" else "streamrl" / path) for path in paths}
    beside = ("streamrl/deploy/images/", "streamrl/deploy/grafana/", "streamrl/deploy/compose.yaml")
    wanted = {name for name in there if "__pycache__" not in name and not name.startswith(beside)}
    assert not wanted - packed


def test_uv_is_the_version_that_the_makefile_uses() -> None:
    (version,) = re.findall(r"^UV_VERSION := (.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert all(f"ARG UV_VERSION={version}\n" in path.read_text() for path in DOCKERFILES)


def test_the_vllm_image_has_the_torch_of_the_other_one_and_its_packages_are_all_pinned() -> None:
    locked = (IMAGES / "requirements-vllm-gpu.txt").read_text().splitlines()
    (torch,) = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==")]
    assert torch in locked
    assert all(re.match(r"[\w.\[\],-]+==\S+", line) for line in locked)


def _library(path: Path, source: str, *options: str) -> None:
    """A shared library of one C file."""
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-x",
        "c",
        "-",
        "-x",
        "none",
        "-o",
        str(path),
        f"-Wl,-soname,{path.name}",
        *options,
    ]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)


@pytest.mark.processes
@pytest.mark.skipif(not all(map(shutil.which, ("gcc", "nm", "readelf", "ldconfig"))), reason="needs gcc and binutils")
def test_in_the_place_of_cuda_comes_what_the_rest_is_linked_against(tmp_path: Path) -> None:
    """A torch of three functions, whose Python half is linked against its CUDA half and against CUDA itself."""
    torch, libraries = tmp_path / "torch", tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    cuda, half, kept = libraries / "libcudart.so.13", libraries / "libtorch_cuda.so", libraries / "libtorch_python.so"
    (tmp_path / "versions").write_text("libcudart.so.13 { global: *; };")
    _library(cuda, "int cudaGetDevice(int *it) { return 0; }", f"-Wl,--version-script={tmp_path / 'versions'}")
    _library(half, "void _ZN2at4cuda4warpEv(void) {}")
    asking = "int cudaGetDevice(int *); void _ZN2at4cuda4warpEv(void); void *both(void) { return _ZN2at4cuda4warpEv; }"
    asking += " int ask(void) { return cudaGetDevice(0); }"
    _library(kept, asking, "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-l:libstdc++.so.6", str(half), str(cuda))
    cuda.unlink()
    made = without_cuda(torch)
    assert {name: sorted(content.symbols) for name, content in made.items()} == {
        "libcudart.so.13": ["cudaGetDevice"],
        "libtorch_cuda.so": ["_ZN2at4cuda4warpEv"],
    }
    assert made["libcudart.so.13"].version == "libcudart.so.13"
    # In a process of its own: one that has imported torch has libraries of these names already.
    asked = [sys.executable, "-c", f"import ctypes; print(ctypes.CDLL({str(kept)!r}).ask())"]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout == f"{NO_DRIVER}\n"
    half.unlink()
    before = {path: path.read_bytes() for path in libraries.iterdir()}
    assert without_cuda(torch) == {}
    assert {path: path.read_bytes() for path in libraries.iterdir()} == before, "a build without CUDA stays as it is"


@pytest.mark.parametrize("name", ["compose.yaml", "images/Dockerfile", "images/Dockerfile.vllm"])
def test_health_checks_name_modules_that_an_image_has(name: str) -> None:
    modules = re.findall(r"-m\"?, \"?([\w.]+)", (ROOT / "deploy" / name).read_text())
    assert modules
    assert all(module.startswith("streamrl.") and find_spec(module) for module in modules), modules


@pytest.fixture
def answering() -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_RUN__DIRECTORY", str(tmp_path))
    monkeypatch.setenv("STREAMRL_METRICS__HOST", "127.0.0.1")
    folder = tmp_path / ".prometheus"
    folder.mkdir()
    return folder


def _note(folder: Path, name: str, target: str) -> None:
    (folder / f"{name}.json").write_text(json.dumps([{"targets": [target], "labels": {"process": name}}]))


def test_a_process_that_answers_is_healthy(notes: Path, answering: str) -> None:
    _note(notes, "worker", answering)
    assert main([]) == 0


def test_a_process_that_does_not_answer_is_not(notes: Path, answering: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "found none yet" in capsys.readouterr().out
    _note(notes, "worker", "127.0.0.1:1")
    assert main([]) == 1
    assert main([f"http://{answering}/health"]) == 1
    assert "500" in capsys.readouterr().out


def test_the_note_of_another_container_is_left_alone(notes: Path) -> None:
    _note(notes, "trainer", "0123456789ab:9402")
    assert metrics_address(notes, "ba9876543210") is None
    assert metrics_address(notes, "0123456789ab") == "http://0123456789ab:9402/metrics"
