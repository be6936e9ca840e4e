"""What a process and its machine use is measured rarely, and what is not known is no zero."""

import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import meter_usage
from streamrl.observability.run_state.snapshot import snapshot
from streamrl.observability.run_state.state import RunState
from streamrl.observability.usage import EVERY_S, UsageSampler, gpu_reader
from streamrl.schemas.reports import GpuUsage, Heartbeat, ResourceUsage
from tests.fakes.messages import heartbeat
from tests.schemas.examples import USAGE


class Nvml:
    """NVIDIA's library, for two whole GPUs and a part of one, which has no utilisation."""

    class NVMLError(Exception):
        """As the library's."""

    def __init__(self, *, driver: bool = True) -> None:
        self.driver = driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"name of {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=1 << 30, total=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG"):
            raise self.NVMLError
        return SimpleNamespace(gpu=75)


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ["GPU-0", "GPU-1"]),
        ("1", ["GPU-1"]),
        ("GPU-1,0", ["GPU-1", "GPU-0"]),
        ("MIG-7", ["MIG-7"]),
        ("", []),
        ("-1", []),
    ],
)
def test_a_process_reports_the_gpus_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, ids: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    found = gpu_reader({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})()
    assert found is not None
    assert [gpu.gpu_id for gpu in found] == ids
    assert [gpu.busy for gpu in found] == [None if name.startswith("MIG") else 0.75 for name in ids]
    assert {gpu.total_bytes for gpu in found} <= {4 << 30}


def test_what_is_not_known_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(driver=False))
    assert gpu_reader()() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    assert gpu_reader()() is None
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert gpu_reader()() == ()
    meters = Meters("r")
    unknown = USAGE.model_copy(update={"gpus": (GpuUsage(gpu_id="GPU-1", name="H200"),)})
    meter_usage(meters, SimpleNamespace(usage=lambda: unknown))  # type: ignore[arg-type]
    assert not any(family.name.startswith("streamrl_gpu") for family in meters.registry.collect())


def test_usage_is_exported_under_prometheus_names() -> None:
    meters = Meters("r")
    meter_usage(meters, SimpleNamespace(usage=lambda: USAGE))  # type: ignore[arg-type]
    machine, gpu = {"run": "r", "host": "box"}, {"run": "r", "host": "box", "gpu": "GPU-1", "device": "H200"}
    value = meters.registry.get_sample_value
    assert value("streamrl_process_cpu_cores", {"run": "r"}) == 1.5
    assert value("streamrl_process_tree_memory_bytes", {"run": "r"}) == 2 << 30
    assert value("streamrl_machine_cpu_ratio", machine) == 0.25
    assert value("streamrl_machine_memory_bytes", machine) == 16 << 30
    assert value("streamrl_gpu_utilization_ratio", gpu) == 0.75
    assert value("streamrl_gpu_memory_used_bytes", gpu) == 70 << 30


@pytest.mark.processes
def test_a_process_is_measured_with_its_children_and_rarely() -> None:
    now, looks = [0.0], []

    class Counted(psutil.Process):  # type: ignore[misc]  # psutil has no types
        def children(self, recursive: bool = False) -> list[psutil.Process]:
            looks.append(now[0])
            found: list[psutil.Process] = super().children(recursive)
            return found

    sampler = UsageSampler(Counted(), lambda: (), lambda: now[0])
    assert sampler.usage() is None
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        now[0] = EVERY_S
        alone, found = psutil.Process().memory_info().rss, sampler.usage()
        for _ in range(100):
            now[0] += EVERY_S / 200
            assert sampler.usage() is found
        child.kill()
    assert looks == [0.0, EVERY_S]
    assert found is not None
    assert (found.host, found.gpus) == (socket.gethostname(), ())
    assert found.memory_bytes > 0.9 * alone
    assert 0 <= found.machine_busy <= 1
    assert 0 < found.machine_used_bytes < found.machine_bytes


def test_a_measurement_costs_a_small_part_of_a_second() -> None:
    sampler = UsageSampler()
    began = time.process_time()
    sampler._measure(EVERY_S)
    assert time.process_time() - began < EVERY_S / 20


def using(worker: str, usage_of: ResourceUsage, at: float) -> Heartbeat:
    return heartbeat(worker, usage=usage_of, sent_at=at)


def test_machines_and_processes_are_shown_while_they_are_alive() -> None:
    state = RunState("r")
    other = USAGE.model_copy(update={"cores_used": 3.0})
    bare = USAGE.model_copy(update={"host": "bare", "gpus": ()})
    unknown = USAGE.model_copy(update={"host": "mute", "gpus": None})
    for worker, used in (("a", USAGE), ("b", other), ("c", bare), ("d", unknown)):
        state.observe_message(using(worker, used, 100.0))
    found = snapshot(state, 101.0)["usage"]
    assert [row[:3] for row in found["processes"][:2]] == [["a", "box", 1.5], ["b", "box", 3.0]]
    gpus = {row["host"]: row["gpus"] for row in found["machines"]}
    assert gpus == {"box": [["H200", 0.75, 70 << 30, 140 << 30]], "bare": [], "mute": None}
    assert snapshot(state, 200.0)["usage"] == {"processes": [], "machines": []}
