"""Measures what this process and its machine use of processors, memory and GPUs, for heartbeats and metrics.

A measurement takes some milliseconds, most of them to find the process's children, so it is kept for ``EVERY_S``.
Invariant what_is_not_known_is_no_zero: a machine without GPUs has an empty list of them, and a figure that cannot be
read is None.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil

from streamrl.observability.run_state.pace import ProcessorTime, spent_by_all
from streamrl.schemas.reports import GpuUsage, ResourceUsage

EVERY_S = 5.0
"""Seconds for which a measurement is kept: enough for displays, and a new one takes some milliseconds."""
IDLE = ("idle", "iowait")
"""Kinds of processor time that are not busy; that of processes at a low priority is."""

ReadGpus = Callable[[], tuple[GpuUsage, ...] | None]
"""Gives the GPUs that this process sees: none, or None if it cannot be known."""


@dataclass
class UsageSampler:
    """Measures the process ``process`` with its children, and the machine. ``clock``: monotonic, in seconds."""

    process: psutil.Process = field(default_factory=psutil.Process)
    read_gpus: ReadGpus = field(default_factory=lambda: gpu_reader())
    clock: Callable[[], float] = time.monotonic
    _measured_at: float = field(init=False)
    _spent: dict[int, float] = field(init=False)
    _machine: ProcessorTime = field(init=False)
    _kept: ResourceUsage | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Start to measure: shares of time need a beginning."""
        self._measured_at, self._machine = self.clock(), spent_by_all(IDLE)
        self._spent = {pid: spent for pid, spent, _ in family_of(self.process)}

    def usage(self) -> ResourceUsage | None:
        """The newest measurement; None in the first seconds of the process."""
        elapsed = self.clock() - self._measured_at
        if elapsed >= EVERY_S:
            self._kept = self._measure(elapsed)
        return self._kept

    def _measure(self, elapsed: float) -> ResourceUsage:
        family, machine, memory = list(family_of(self.process)), spent_by_all(IDLE), psutil.virtual_memory()
        # A process that was started since has spent all of its time since.
        spent = sum(max(0.0, seconds - self._spent.get(pid, 0.0)) for pid, seconds, _ in family)
        total = machine.total - self._machine.total
        busy = 0.0 if total <= 0 else 1 - (machine.free - self._machine.free) / total
        self._measured_at, self._machine = self.clock(), machine
        self._spent = {pid: seconds for pid, seconds, _ in family}
        return ResourceUsage(
            host=socket.gethostname(),
            cores_used=round(spent / elapsed, 3),
            memory_bytes=sum(size for *_, size in family),
            machine_cores=psutil.cpu_count() or 1,
            machine_busy=round(min(1.0, max(0.0, busy)), 4),
            machine_used_bytes=memory.total - memory.available,
            machine_bytes=memory.total,
            gpus=self.read_gpus(),
        )


def family_of(process: psutil.Process) -> Iterator[tuple[int, float, int]]:
    """Of a process and all below it: id, seconds of processor time so far, and bytes in memory."""
    with suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended in the meantime
                times, memory = each.cpu_times(), each.memory_info()
                yield each.pid, times.user + times.system, memory.rss


def cpu_s_by_process(root: int) -> dict[int, float]:
    """Seconds of processor time so far, by the id of each process: this one and all below it; empty if it has ended."""
    with suppress(psutil.Error):
        return {pid: seconds for pid, seconds, _ in family_of(psutil.Process(root))}
    return {}


@cache
def own_usage() -> UsageSampler:
    """The sampler of this process: heartbeats and metrics share it."""
    return UsageSampler()


def gpu_reader(environ: Mapping[str, str] = os.environ) -> ReadGpus:
    """Reads the GPUs that this process sees: through NVIDIA's library if it is installed, else through torch."""
    try:
        import pynvml
    except ImportError:
        return _through_torch
    try:
        pynvml.nvmlInit()
        handles = [_handle(pynvml, name) for name in _visible(pynvml, environ.get("CUDA_VISIBLE_DEVICES"))]
    except pynvml.NVMLError:  # there is no driver
        return lambda: ()
    return lambda: tuple(_read(pynvml, handle) for handle in handles)


def _visible(nvml: Any, visible: str | None) -> Sequence[str]:
    if visible is None:
        return [str(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [name for part in visible.split(",") if (name := part.strip()) not in ("", "-1")]


def _handle(nvml: Any, name: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)


def _read(nvml: Any, handle: Any) -> GpuUsage:
    gpu_id, name, busy, used, total = "", "GPU", None, None, None
    # A part of a GPU (MIG) has memory but no utilisation.
    with suppress(nvml.NVMLError):
        gpu_id = nvml.nvmlDeviceGetUUID(handle)
    with suppress(nvml.NVMLError):
        name = nvml.nvmlDeviceGetName(handle)
    with suppress(nvml.NVMLError):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        used, total = int(memory.used), int(memory.total)
    with suppress(nvml.NVMLError):
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return GpuUsage(gpu_id=gpu_id, name=name, busy=busy, used_bytes=used, total_bytes=total)


def _through_torch() -> tuple[GpuUsage, ...] | None:
    """Torch knows the memory of the devices that this process computes on, and no utilisation."""
    # Not imported for this: a process without a model does not load torch.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        # A driver without its Python library: there may be GPUs, in use by this process's children.
        return None if shutil.which("nvidia-smi") else ()
    found = []
    for index in range(cuda.device_count()):
        free, total = cuda.mem_get_info(index)
        device = cuda.get_device_properties(index)
        gpu_id = str(getattr(device, "uuid", index))
        found.append(GpuUsage(gpu_id=gpu_id, name=device.name, used_bytes=total - free, total_bytes=total))
    return tuple(found)
