"""The real dispatcher, workers, trainer and coordinator in one process, on a bus in memory and in virtual time.

Nothing but decoding and training takes time here: what a mode or a strategy reaches is what its logic allows, without
the latencies of processes and broker.
"""

import asyncio
import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from benchmarks.pipeline.cases import Case
from benchmarks.pipeline.running.recording import Recording, read_recording
from benchmarks.pipeline.running.settings import configuration
from benchmarks.pipeline.virtual.time_lapse import TimeLapse
from bus.history import BusHistory
from bus.memory import MemoryBus
from consumers.training.checkpoints.storage import open_storage
from consumers.training.checkpoints.store import CheckpointStore
from consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy
from consumers.training.trainer import Trainer
from consumers.training.weight_export import WeightStore
from coordinator.coordinator import Coordinator
from deploy.wiring.build import build_dispatcher
from deploy.wiring.context import ProcessContext
from producers.generation.engines.emulated import ConstantRewards, EmulatedEngine, FillerTokenizer
from producers.generation.worker import GenerationWorker
from schemas.control import WeightsReady
from schemas.identifiers import PolicyVersion
from schemas.topics import CATALOGUE
from settings.tree import Settings

TIME_SCALE = 20.0
"""Emulated seconds in a virtual one: heartbeats and the like come at the pace at which they do in a real run."""


@dataclass(frozen=True)
class StoreFetcher:
    """Weights straight from the store, without a relay."""

    store: Path

    async def fetch(self, ready: WeightsReady, attempt: int = 0) -> Path:
        """The version's directory."""
        return self.store / str(ready.version)

    def keep_only(self, versions: Iterable[PolicyVersion]) -> None:
        """Nothing is kept twice."""


def run_virtually(case: Case, prompts: Path, *, steps: int, seed: int) -> Recording:
    """One run of so many optimizer steps; times are virtual seconds, ``TIME_SCALE`` emulated ones each."""
    with _silence(), tempfile.TemporaryDirectory(prefix="streamrl-virtual-") as scratch:
        settings = configuration(
            case,
            run="virtual",
            directory=Path(scratch),
            prompts=prompts,
            address="nowhere:1",
            time_scale=TIME_SCALE,
            steps=steps,
            seed=seed,
        )
        with asyncio.Runner(loop_factory=TimeLapse) as runner:
            return runner.run(_run(settings))


@contextmanager
def _silence() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


async def _run(settings: Settings) -> Recording:
    bus, clock, name = MemoryBus(), asyncio.get_running_loop().time, settings.run.name
    for topic in CATALOGUE:
        bus.create_topic(topic.full_name(name), topic.partition_count(settings.loop.trajectory_partitions))
    dispatcher = build_dispatcher(settings, ProcessContext("dispatcher", bus))
    dispatcher.clock = clock
    coordination = settings.coordinator.model_copy(update={"relays": ("http://store",)})
    trainer = _trainer(settings, bus)
    workers = [_worker(settings, bus, f"worker-{number}") for number in range(settings.run.workers)]
    stop = asyncio.Event()
    others = [
        asyncio.create_task(Coordinator(bus, name, coordination, clock).run(stop)),
        asyncio.create_task(dispatcher.run(stop)),
        *(asyncio.create_task(worker.run(stop)) for worker in workers),
    ]
    training = asyncio.create_task(trainer.run(stop))
    await asyncio.wait([training, *others], return_when=asyncio.FIRST_COMPLETED)
    for broken in (task for task in others if task.done() and not training.done()):
        broken.result()
    await training
    stop.set()
    await asyncio.gather(*others)
    return await read_recording(BusHistory(bus), name)


def _trainer(settings: Settings, bus: MemoryBus) -> Trainer:
    clock, emulation = asyncio.get_running_loop().time, settings.emulation
    device = EmulatedDevice(emulation.time_scale, clock)
    weights = WeightStore(settings.run.weights_store, settings.training.keep_weight_versions)
    place = open_storage(settings.run.path / "checkpoints", settings.run.path / "cache")
    checkpoints = CheckpointStore(place, settings.training.keep_checkpoints)
    return Trainer(
        bus=bus,
        run_name=settings.run.name,
        loop=settings.loop,
        algorithm=settings.algorithm,
        training=settings.training,
        ingest=settings.ingest,
        batching=settings.batching,
        reward_weights=settings.rewards.weight_by_name,
        open_policy=lambda restored: EmulatedPolicy(emulation.training, device, weights, checkpoints, restored),
        open_compute=lambda: EmulatedCompute(device),
        checkpoints=checkpoints,
        run_dir=settings.run.path,
        clock=clock,
    )


def _worker(settings: Settings, bus: MemoryBus, worker_id: str) -> GenerationWorker:
    clock, emulation, generation = asyncio.get_running_loop().time, settings.emulation, settings.generation
    engine = EmulatedEngine(
        emulation.decode, emulation.lengths, emulation.time_scale, generation.max_num_seqs, monotonic=clock
    )
    return GenerationWorker(
        bus=bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=generation,
        worker_id=worker_id,
        engine=engine,
        tokenizer=FillerTokenizer(emulation.lengths.prompt_characters_per_token),
        rewards=ConstantRewards(settings.rewards.names),
        weights_cache=settings.run.path / "workers" / worker_id,
        clock=clock,
        monotonic=clock,
        open_fetcher=lambda *_: StoreFetcher(settings.run.weights_store),  # type: ignore[arg-type]
    )
