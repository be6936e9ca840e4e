"""Processor time of processes and of all that they started."""

from collections.abc import Iterable
from contextlib import suppress

import psutil

from streamrl.observability.usage import cpu_s_by_process


def cpu_s_of(roots: Iterable[int]) -> float:
    """Seconds in user and kernel mode so far, of these processes and everything below them that lives."""
    return sum(sum(cpu_s_by_process(root).values()) for root in roots)


def broker_cpu_s_of(root: int) -> float:
    """The same, of the broker below this process alone."""
    with suppress(psutil.NoSuchProcess):
        return sum(_cpu_s(each) for each in psutil.Process(root).children(recursive=True) if _is_broker(each))
    return 0.0


def _is_broker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return str(process.name()) == "java"
    return False


def _cpu_s(process: psutil.Process) -> float:
    with suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0
