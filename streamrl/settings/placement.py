"""Decides which devices and how many threads each process of this machine gets, from settings and an inventory.

The functions are pure: the caller reads the inventory and the model (``inspection.environment.fitted_here``).
Devices are numbered as this process sees them. A child process sees only its own devices, through
``CUDA_VISIBLE_DEVICES``.

Invariants:
- no_device_is_given_twice: unless ``placement.share`` allows it, or the machine has only one device;
- given_settings_are_kept: only settings that the user left out are adapted to the machine.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.producers.rewards.sandbox import REWARD_DEVICES
from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import standbys
from streamrl.settings.tree import Settings

MOST_TRAINER_THREADS = 8
"""Most CPU threads of a trainer that computes on a device. They cast and write weights, which memory speed limits."""
MEMORY_SHARE = 0.9
"""Share of a device's memory for all its engines together. It is vLLM's default ``gpu_memory_utilization``."""
SHARES_PREFIXES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types that compute a prefix once for all who share it, unless some layers have a sliding window."""


@dataclass(frozen=True)
class Device:
    """A CUDA device. ``visible``: its name in ``CUDA_VISIBLE_DEVICES``."""

    visible: str
    name: str = "GPU"
    memory_bytes: int = 0
    has_bfloat16: bool = True


@dataclass(frozen=True)
class Machine:
    """The inventory of a machine. ``vllm_on_cpu``: the installed vLLM supports only CPUs."""

    cores: int
    devices: tuple[Device, ...] = ()
    vllm_on_cpu: bool = False


@dataclass(frozen=True)
class ProcessPlace:
    """The devices and threads of one process.

    ``devices``: device numbers; None: the inventory has no devices, and the process uses any that it finds. ``visible``
    and ``reward_devices``: ``CUDA_VISIBLE_DEVICES`` of the process and of its reward processes.
    """

    devices: tuple[int, ...] | None = None
    visible: str = ""
    threads: int = 1
    reward_devices: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the process."""
        # By default, each process makes a thread pool for all cores. Several such pools would slow each other down.
        threads = str(self.threads)
        found = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if self.devices is not None:
            # The inventory numbers devices in the driver's order. CUDA's default order puts the fastest first.
            found |= {"CUDA_VISIBLE_DEVICES": self.visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if self.reward_devices is not None:
            found[REWARD_DEVICES] = self.reward_devices
        return found

    def __str__(self) -> str:
        on = "CPU" if not self.devices else f"device{'s' * (len(self.devices) > 1)} {', '.join(map(str, self.devices))}"
        return f"{on}, {self.threads} thread{'s' * (self.threads != 1)}"


@dataclass(frozen=True)
class Placement:
    """The place of each process on a machine. ``rewards``: numbers of the devices for reward processes."""

    trainer: ProcessPlace = ProcessPlace()
    workers: tuple[ProcessPlace, ...] = ()
    others: ProcessPlace = ProcessPlace()
    rewards: tuple[int, ...] = ()

    def worker(self, number: int) -> ProcessPlace:
        """The place of a worker; a worker beyond the planned number gets one without devices."""
        return self.workers[number] if number < len(self.workers) else self.others

    def lines(self) -> list[str]:
        """The placement as text. Workers on the CPU share a line, and so do all other processes without devices."""
        found = [f"trainer: {self.trainer}"]
        on_cpu = [place for place in self.workers if not place.devices]
        found += [f"worker-{number}: {place}" for number, place in enumerate(self.workers) if place.devices]
        if on_cpu:
            found.append(f"workers ({len(on_cpu)}): {on_cpu[0]} each")
        if self.rewards:
            found.append(f"reward processes: devices {', '.join(map(str, self.rewards))}")
        return [*found, f"all others: {self.others}"]


UNPLACED = Placement()
"""One thread for each process, and any device that a process finds."""


def trainer_ranks(settings: Settings) -> int:
    """The number of ranks, which are the trainer's processes."""
    return settings.training.ranks


def trains_on_cuda(settings: Settings, machine: Machine) -> bool:
    """Whether a trainer on this machine computes on CUDA devices."""
    training = settings.training
    return bool(machine.devices) and training.backend == "torch" and training.device != "cpu"


def samples_on_cuda(settings: Settings, machine: Machine) -> bool:
    """Whether a worker on this machine samples on CUDA devices."""
    generation = settings.generation
    if generation.engine == "emulated" or generation.device == "cpu":
        return False
    return bool(machine.devices) and not (generation.engine == "vllm" and machine.vllm_on_cpu)


def for_machine(settings: Settings, machine: Machine, model: Mapping[str, Any]) -> Settings:
    """The settings with better defaults for the machine and the model. Settings that the user gave are kept.

    The defaults for CUDA devices are bfloat16, gradient checkpointing, as many workers as fit on the devices, and each
    engine's share of a shared device's memory. On the CPU prompts of a group are computed once, see ``with_packing``.

    ``model``: its ``config.json``; empty if it is not known.

    Raises:
        SettingsError: the processes cannot be placed, see ``place``.
    """
    settings = _with(settings, "run", workers=_workers_wanted(settings, machine))
    has_bfloat16 = all(device.has_bfloat16 for device in machine.devices)
    if trains_on_cuda(settings, machine):
        dtype = "bfloat16" if has_bfloat16 else None
        settings = _with(settings, "training", dtype=dtype, gradient_checkpointing=True)
    elif _has_trainer(settings):  # one that is started alone has its own settings, which the run records
        settings = with_packing(settings, model)
    if samples_on_cuda(settings, machine):
        dtype = "bfloat16" if has_bfloat16 else None
        # Only vLLM allocates its cache at the start. An engine that has a device alone keeps vLLM's default.
        share = _memory_share(place(settings, machine)) if settings.generation.engine == "vllm" else None
        settings = _with(settings, "generation", dtype=dtype, gpu_memory_utilization=share)
    return settings


def with_packing(settings: Settings, model: Mapping[str, Any]) -> Settings:
    """The settings for a trainer on the CPU, which computes shared prefixes once if the model is known to allow it."""
    training = settings.training
    if training.backend != "torch" or training.attn_implementation != "sdpa" or not shares_prefixes(model):
        return settings
    return _with(settings, "training", packing="shared")


def shares_prefixes(model: Mapping[str, Any]) -> bool:
    """Whether all layers of a model with this ``config.json`` are plain attention. The trainer probes it besides."""
    is_windowed = model.get("sliding_window") is not None and model.get("use_sliding_window", True)
    layers = model.get("layer_types") or ()
    return model.get("model_type") in SHARES_PREFIXES and not is_windowed and set(layers) <= {"full_attention"}


def _with(settings: Settings, name: str, **wanted: Any) -> Settings:
    """The settings with new values in a section. A value that the user gave is kept; None gives no new value."""
    section = getattr(settings, name)
    update = {key: value for key, value in wanted.items() if value is not None and key not in section.model_fields_set}
    return settings.model_copy(update={name: section.model_copy(update=update)}) if update else settings


def _workers_wanted(settings: Settings, machine: Machine) -> int | None:
    """The number of workers that the devices suggest; None: the setting is kept."""
    placement, run = settings.placement, settings.run
    if placement.workers is not None:
        return len(placement.workers)
    if run.max_workers is not None or placement.share or not samples_on_cuda(settings, machine):
        return None
    spare = len(machine.devices) - len(placement.rewards)
    if placement.trainer is not None:
        spare -= len(placement.trainer)
    elif trains_on_cuda(settings, machine):
        spare -= trainer_ranks(settings)
    return max(1, min(256, spare // settings.generation.devices_per_worker))


def _memory_share(placement: Placement) -> float | None:
    """The share of a device's memory for each engine; None: no engine shares a device."""
    holders = Counter(placement.trainer.devices or ())
    for worker in placement.workers:
        holders.update(worker.devices or ())
    most = max((holders[device] for worker in placement.workers for device in worker.devices or ()), default=1)
    return round(MEMORY_SHARE / most, 2) if most > 1 else None


def place(settings: Settings, machine: Machine) -> Placement:
    """Assign each process its devices and threads. ``[placement]`` comes first, then the trainer, then the workers.

    Raises:
        SettingsError: a device does not exist or was given twice, there are too few devices, or a process was given a
            wrong number of devices.
    """
    wanted, size = settings.placement, settings.generation.devices_per_worker
    ranks = trainer_ranks(settings) if trains_on_cuda(settings, machine) and _has_trainer(settings) else 0
    count = max(settings.run.workers, settings.run.max_workers or 0)
    workers_on_cuda = samples_on_cuda(settings, machine)
    _check_given(settings, machine, ranks, count, on_cuda=workers_on_cuda)
    free = _unclaimed(settings, machine)
    if wanted.trainer is not None:
        trainer = wanted.trainer
    else:
        trainer, free = _trainer_devices(settings, machine, free, ranks)
    if wanted.workers is not None:
        workers = wanted.workers
    elif not workers_on_cuda or not count:
        workers = ((),) * count
    elif len(free) >= count * size:
        workers = tuple(free[at : at + size] for at in range(0, count * size, size))
    else:
        workers = _shared_devices(settings, machine, free, ranks, count)
    threads = _threads(settings, machine, len(trainer), count)
    known = bool(machine.devices)
    rewards = [_visible(machine, [device]) for device in wanted.rewards]
    return Placement(
        trainer=ProcessPlace(trainer if known else None, _visible(machine, trainer), threads),
        workers=tuple(
            ProcessPlace(
                devices if known else None,
                _visible(machine, devices),
                settings.generation.threads,
                (rewards[number % len(rewards)] if rewards else "") if known else None,
            )
            for number, devices in enumerate(workers)
        ),
        others=ProcessPlace(() if known else None),
        rewards=wanted.rewards,
    )


def _has_trainer(settings: Settings) -> bool:
    return settings.run.trainer or standbys(settings) > 0


def _visible(machine: Machine, devices: Iterable[int]) -> str:
    return ",".join(machine.devices[device].visible for device in devices)


def _threads(settings: Settings, machine: Machine, ranks: int, workers: int) -> int:
    """Threads of each trainer rank. Unless set: 1 on the CPU, else an equal part of the cores that others leave."""
    if settings.training.threads or not ranks:
        return settings.training.threads or 1
    # Two cores are left for all processes other than trainer and workers.
    return max(1, min(MOST_TRAINER_THREADS, (machine.cores - 2 - workers * settings.generation.threads) // ranks))


def _unclaimed(settings: Settings, machine: Machine) -> tuple[int, ...]:
    """The devices that ``[placement]`` gives to no process."""
    wanted = settings.placement
    claimed = {*(wanted.trainer or ()), *wanted.rewards, *(each for one in wanted.workers or () for each in one)}
    return tuple(number for number in range(len(machine.devices)) if number not in claimed)


def _trainer_devices(
    settings: Settings, machine: Machine, free: tuple[int, ...], ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The trainer's devices, and the devices that are still free."""
    if len(free) >= ranks:
        return free[:ranks], free[ranks:]
    if not settings.placement.share or ranks > len(machine.devices):
        raise SettingsError(
            f"expected {_devices(ranks)} for the trainer, got {len(free)} free of {len(machine.devices)}; "
            'free some in [placement], set placement.share = true, or training.device = "cpu"'
        )
    return tuple(range(ranks)), ()


def _shared_devices(
    settings: Settings, machine: Machine, free: tuple[int, ...], ranks: int, count: int
) -> tuple[tuple[int, ...], ...]:
    """The devices of each worker if some must be shared. Free devices are assigned first."""
    size, existing = settings.generation.devices_per_worker, len(machine.devices)
    only_one = existing == 1 and size == 1  # sharing is the only way
    if not (settings.placement.share or only_one) or size > existing:
        trainer = f"{ranks} for the trainer and " if ranks else ""
        most = len(free) // size
        raise SettingsError(
            f"expected {_devices(count * size + ranks)}: {trainer}{count} × {size} for the workers, got {existing} "
            f"({len(free)} free); lower run.workers to {most}, lower generation.tensor_parallel_size or "
            "generation.data_parallel_size, or set placement.share = true"
        )
    order = (*free, *(number for number in range(existing) if number not in free))
    return tuple(tuple(order[(number * size + each) % existing] for each in range(size)) for number in range(count))


def _devices(count: int) -> str:
    return f"{count} CUDA device{'s' * (count != 1)}"


def _check_given(settings: Settings, machine: Machine, ranks: int, count: int, *, on_cuda: bool) -> None:
    wanted, size = settings.placement, settings.generation.devices_per_worker
    given = {"trainer": wanted.trainer or (), "rewards": wanted.rewards}
    given |= {f"workers[{number}]": devices for number, devices in enumerate(wanted.workers or ())}
    for name, devices in given.items():
        _check_known(f"placement.{name}", devices, machine)
    if wanted.trainer is not None and len(wanted.trainer) != ranks:
        raise SettingsError(
            f"expected {_devices(ranks)} in placement.trainer, one per rank, got {[*wanted.trainer]}; "
            "change it, or leave it out"
        )
    if wanted.workers is not None and len(wanted.workers) != count:
        raise SettingsError(
            f"expected a list of devices for each of {count} workers (run.workers, or run.max_workers) in "
            f"placement.workers, got {len(wanted.workers)} lists; make the numbers equal"
        )
    each = size if on_cuda else 0
    for number, devices in enumerate(wanted.workers or ()):
        if len(devices) != each:
            raise SettingsError(
                f"expected {_devices(each)} for each worker (generation.tensor_parallel_size × data_parallel_size) in "
                f"placement.workers[{number}], got {[*devices]}; list {each} there, or change these settings"
            )
    if not wanted.share:
        _check_disjoint(given)


def _check_known(name: str, devices: Sequence[int], machine: Machine) -> None:
    existing = len(machine.devices)
    if unknown := [device for device in devices if device >= existing]:
        known = f"devices 0 to {existing - 1}" if existing else "none"
        raise SettingsError(
            f"expected {name} among this machine's CUDA devices ({known}), got {unknown[0]}; check nvidia-smi "
            "and CUDA_VISIBLE_DEVICES"
        )
    if len(set(devices)) < len(devices):
        raise SettingsError(f"expected each device once in {name}, got {[*devices]}; remove the repeated one")


def _check_disjoint(given: dict[str, tuple[int, ...]]) -> None:
    holder: dict[int, str] = {}
    for name, devices in given.items():
        for device in devices:
            if (other := holder.setdefault(device, name)) != name:
                raise SettingsError(
                    f"expected each CUDA device in one place, got {device} in placement.{other} and in "
                    f"placement.{name}; name another device in one of them, or set placement.share = true"
                )
