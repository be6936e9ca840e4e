"""Placement on given inventories: the devices and threads that each process would start with."""

import tomllib
from pathlib import Path

import pytest

from streamrl.cli.app import app
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.inspection.diagnostics.checks import check_placement
from streamrl.inspection.environment import devices_of, read_machine
from streamrl.producers.rewards.sandbox import environment_for
from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import ChildProcess, standbys
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.placement import Device, Machine, Placement, for_machine, place
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

BASE = ("--data.dataset=chain_sum", "--model.path=m", "--run.name=x", "--generation.engine=vllm")
PLAIN = {"model_type": "llama"}
ADDED = tuple(ChildProcess(name, name, optional=True) for name in ("ranker", "gateway"))


def machine(devices: int, cores: int = 64) -> Machine:
    return Machine(cores, tuple(Device(str(number), "H200", 141 << 30) for number in range(devices)))


def fitted(devices: int, *arguments: str, cores: int = 64) -> tuple[Settings, Placement]:
    there = machine(devices, cores)
    settings = for_machine(load_settings(None, [*BASE, *arguments]), there, {})
    return settings, place(settings, there)


def environments(devices: int, *arguments: str) -> dict[str, dict[str, str]]:
    settings, placement = fitted(devices, *arguments)
    making = ChildSpecs(RunDirectory(Path("runs/x")), [], {}, placement)
    specs = making.all(settings.run.workers, standbys=standbys(settings), others=ADDED)
    return {spec.name: spec.environment for spec in [*specs, making.audit("here:1")]}


def visible(devices: int, *arguments: str) -> dict[str, str]:
    found = environments(devices, *arguments)
    return {name: environment["CUDA_VISIBLE_DEVICES"] for name, environment in found.items()}


def test_without_devices_every_process_has_one_thread_and_finds_for_itself_what_there_is() -> None:
    settings, placement = fitted(0)
    assert settings == load_settings(None, BASE)
    assert len(environments(0)) == 9
    assert not [name for name, each in environments(0).items() if "CUDA_VISIBLE_DEVICES" in each]
    assert {each["OMP_NUM_THREADS"] for each in environments(0).values()} == {"1"}
    assert placement.lines() == [
        "trainer: CPU, 1 thread",
        "workers (2): CPU, 1 thread each",
        "all others: CPU, 1 thread",
    ]


def test_eight_devices_go_to_the_trainer_and_to_as_many_workers_as_fit() -> None:
    on_cpu = dict.fromkeys(("coordinator", "relay", "dispatcher", "ranker", "gateway", "audit"), "")
    assert visible(8, "--generation.tensor_parallel_size=2") == {
        **on_cpu,
        "trainer": "0",
        "worker-0": "1,2",
        "worker-1": "3,4",
        "worker-2": "5,6",
    }
    assert visible(8, "--training.device=cpu", "--run.workers=2") | on_cpu == {
        **on_cpu,
        "trainer": "",
        "worker-0": "0",
        "worker-1": "1",
    }


def test_given_devices_are_kept_and_the_rest_is_placed_around_them() -> None:
    given = ("--placement.trainer=[3]", "--placement.rewards=[0]", "--run.workers=2")
    found = environments(4, *given)
    assert [found[name]["CUDA_VISIBLE_DEVICES"] for name in ("trainer", "worker-0", "worker-1")] == ["3", "1", "2"]
    rewards = [environment_for(found[f"worker-{number}"], ()) for number in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in rewards] == ["0", "0"]
    assert environment_for(found["worker-0"], ["CUDA_VISIBLE_DEVICES"])["CUDA_VISIBLE_DEVICES"] == "1"
    without = environments(4, "--run.workers=2")["worker-0"]
    assert environment_for(without, ())["CUDA_VISIBLE_DEVICES"] == ""
    settings, placement = fitted(4, "--placement.workers=[[1], [2], [3]]")
    assert settings.run.workers == 3
    assert [worker.devices for worker in placement.workers] == [(1,), (2,), (3,)]


def test_threads_are_as_set_or_the_trainers_share_of_the_cores_next_to_a_device() -> None:
    def threads(devices: int, *arguments: str, cores: int = 64) -> tuple[int, int]:
        placement = fitted(devices, "--run.workers=1", *arguments, cores=cores)[1]
        return placement.trainer.threads, placement.worker(0).threads

    assert threads(0) == (1, 1)
    assert threads(0, "--training.threads=4", "--generation.threads=2") == (4, 2)
    assert threads(2) == (8, 1)
    assert threads(2, "--generation.threads=2", cores=6) == (2, 2)
    assert threads(2, cores=2) == (1, 1)
    environment = environments(2, "--training.threads=3")["trainer"]
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "3")


def test_a_single_device_is_shared_and_engines_divide_its_memory() -> None:
    settings, placement = fitted(1, "--run.workers=2")
    assert (placement.trainer.devices, [worker.devices for worker in placement.workers]) == ((0,), [(0,), (0,)])
    assert settings.generation.gpu_memory_utilization == 0.3
    assert fitted(1, "--generation.gpu_memory_utilization=0.5")[0].generation.gpu_memory_utilization == 0.5
    settings, placement = fitted(2, "--run.workers=3", "--placement.share=true")
    assert [worker.devices for worker in placement.workers] == [(1,), (0,), (1,)]
    assert settings.generation.gpu_memory_utilization == 0.45


def test_a_device_has_better_defaults_than_a_processor_and_given_settings_are_kept() -> None:
    settings, _ = fitted(2)
    assert (settings.training.dtype, settings.training.gradient_checkpointing) == ("bfloat16", True)
    assert (settings.generation.dtype, settings.run.workers) == ("bfloat16", 1)
    given = fitted(4, "--training.dtype=float32", "--generation.dtype=auto", "--run.workers=2")[0]
    assert (given.training.dtype, given.generation.dtype, given.run.workers) == ("float32", "auto", 2)
    old = Machine(8, (Device("0", has_bfloat16=False), Device("1", has_bfloat16=False)))
    assert for_machine(load_settings(None, BASE), old, {}).training.dtype == "float32"
    on_cpu = for_machine(load_settings(None, BASE), Machine(8, machine(2).devices, vllm_on_cpu=True), {})
    assert (on_cpu.training.dtype, on_cpu.generation.dtype) == ("bfloat16", "auto")


def test_resolved_settings_are_placed_as_they_were(tmp_path: Path) -> None:
    settings, placement = fitted(4)
    kept = tmp_path / "config.resolved.toml"
    kept.write_text(as_toml(settings))
    again = for_machine(load_settings(kept, []), machine(4), {})
    assert again == settings
    assert place(again, machine(4)) == placement


@pytest.mark.parametrize(
    ("devices", "model", "arguments", "packing"),
    [
        (0, PLAIN, [], "shared"),
        (0, {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, [], "shared"),
        (0, {"model_type": "mistral", "sliding_window": None, "layer_types": ["full_attention"]}, [], "shared"),
        (2, PLAIN, ["--training.device=cpu"], "shared"),
        (2, PLAIN, [], "padded"),
        (0, PLAIN, ["--run.trainer=false"], "padded"),
        (0, PLAIN, ["--training.packing=varlen"], "varlen"),
        (0, PLAIN, ["--training.packing=padded"], "padded"),
        (0, PLAIN, ["--training.backend=emulated", "--generation.engine=emulated"], "padded"),
        (0, {"model_type": "mistral", "sliding_window": 4096}, [], "padded"),
        (0, {"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, [], "padded"),
        (0, {"model_type": "mamba"}, [], "padded"),
        (0, {}, [], "padded"),
    ],
)
def test_a_runs_trainer_on_a_processor_computes_prompts_once_unless_told_or_not_able(
    devices: int, model: dict[str, object], arguments: list[str], packing: str
) -> None:
    assert for_machine(load_settings(None, [*BASE, *arguments]), machine(devices), model).training.packing == packing


@pytest.mark.parametrize(
    ("devices", "arguments", "said"),
    [
        (2, ["--run.workers=2"], r"expected 3 CUDA devices: 1 for the trainer and 2 × 1 for the workers, got 2.*to 1"),
        (4, ["--generation.tensor_parallel_size=4"], r"expected 5 CUDA devices.*got 4 \(3 free\)"),
        (1, ["--generation.tensor_parallel_size=2"], r"expected 3 CUDA devices"),
        (2, ["--placement.trainer=[2]"], r"placement.trainer among this machine's CUDA.*\(devices 0 to 1\), got 2"),
        (0, ["--placement.trainer=[0]"], r"this machine's CUDA devices \(none\), got 0"),
        (2, ["--placement.trainer=[0, 1]"], r"expected 1 CUDA device in placement.trainer, one per rank, got \[0, 1\]"),
        (2, ["--placement.trainer=[0]", "--placement.workers=[[0]]"], r"got 0 in placement.trainer and in placement.w"),
        (4, ["--placement.workers=[[1, 2, 3]]", "--generation.tensor_parallel_size=2"], r"expected 2.*got \[1, 2, 3\]"),
        (4, ["--placement.workers=[[1, 1]]", "--generation.tensor_parallel_size=2"], r"each device once"),
        (4, ["--placement.workers=[[1]]", "--run.workers=2"], r"each of 2 workers .* in placement.workers, got 1"),
        (2, ["--run.workers=1", "--run.max_workers=3"], r"expected 4 CUDA devices"),
        (2, ["--placement.rewards=[0, 1]", "--run.workers=1"], r"expected 1 CUDA device for the trainer, got 0 free"),
    ],
)  # fmt: skip
def test_no_device_is_given_twice_and_what_cannot_be_is_refused_in_one_line(
    devices: int, arguments: list[str], said: str
) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        fitted(devices, *arguments)
    assert "\n" not in str(refused.value)
    assert ";" in str(refused.value)


LISTED = """0, GPU-aa, 81559, 9.0, NVIDIA H100 80GB HBM3
1, GPU-bb, 81559, 9.0, NVIDIA H100 80GB HBM3
2, GPU-cc, 16384, 7.0, Tesla V100
"""


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("2,0", ["2", "0"]),
        ("GPU-bb", ["1"]),
        ("1,7,0", ["1"]),
        ("MIG-x", ["MIG-x"]),
    ],
)
def test_devices_are_those_that_this_process_sees_as_it_numbers_them(seen: str | None, found: list[str]) -> None:
    devices = devices_of(LISTED, seen)
    assert [device.visible for device in devices] == found


def test_devices_are_listed_with_their_memory_and_their_dtypes() -> None:
    devices = devices_of(LISTED, None)
    assert [device.memory_bytes >> 20 for device in devices] == [81559, 81559, 16384]
    assert [device.has_bfloat16 for device in devices] == [True, True, False]
    there = Machine(8, devices_of(LISTED, "2,0"))
    assert place(load_settings(None, [*BASE, "--run.workers=1"]), there).worker(0).visible == "0"


@pytest.mark.processes
def test_a_machine_without_the_drivers_tool_has_no_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_machine().devices == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncase $1 in *index*) ;; *) exit 1;; esac\necho '{LISTED.splitlines()[1]}'\n")
    tool.chmod(0o755)
    assert [device.name for device in read_machine({}).devices] == ["NVIDIA H100 80GB HBM3"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert read_machine({}).devices == ()


def test_the_doctor_says_where_processes_go_or_why_they_cannot() -> None:
    (found,) = check_placement(load_settings(None, [*BASE, "--run.workers=1"]), machine(2))
    assert (found.level, found.detail) == (
        "ok",
        "trainer: device 0, 8 threads; worker-0: device 1, 1 thread; all others: CPU, 1 thread",
    )
    (found,) = check_placement(load_settings(None, [*BASE, "--run.workers=9"]), machine(2))
    assert (found.level, "expected 10 CUDA devices" in found.detail) == ("fail", True)


def test_config_show_ends_with_what_each_process_would_get(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["config", "show", *BASE, "--run.workers=1"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "# On this machine:\n#   trainer: " in shown
    assert tomllib.loads(shown)["placement"] == {"rewards": [], "share": False}
