"""Simulates a run: the real dispatcher, workers, trainer and coordinator in one process, in virtual time.

Every role is the same class that a run starts. Only their surroundings differ: the bus is in memory, decoding and
training are emulated, records and weights arrive after the latencies of processes, broker and network (``Latencies``),
and waiting costs no real time. Invariant equal_settings_give_equal_simulations.
"""

import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import structlog

from streamrl.bus.clocks import Clocks
from streamrl.bus.history import BusHistory
from streamrl.bus.memory import MemoryBus, MemoryPublisher, MemorySubscription
from streamrl.bus.port import Outgoing, Position, Record, Start, TopicPartition
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.storage import open_storage
from streamrl.consumers.training.checkpoints.store import CheckpointStore
from streamrl.consumers.training.emulation import EmulatedCompute, EmulatedDevice, EmulatedPolicy
from streamrl.consumers.training.ports import RestoredCheckpoint
from streamrl.consumers.training.session import LearningSettings, TrainedRun, TrainerContext, TrainerParts
from streamrl.consumers.training.trainer import Trainer
from streamrl.coordinator.coordinator import Coordinator
from streamrl.planning.cores import SharedCores
from streamrl.planning.virtual_time import VirtualLoop, sweeping
from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.producers.dispatch.state import OtherRoles
from streamrl.producers.generation.engines.emulated import ConstantRewards, EmulatedEngine, FillerTokenizer
from streamrl.producers.generation.engines.length_trace import trace_length
from streamrl.producers.generation.engines.port import GenerationRequest, TokenDelta
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.producers.lengths.startup import build_predictor
from streamrl.producers.prompts.sources import PromptSource, open_source
from streamrl.schemas.control import AnnouncedWeights
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import CoreCosts, DecodeCurve, TrainingCosts
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CATALOGUE, CONTROL, HEARTBEATS, STEPS, TRAJECTORIES, WORK_ORDERS
from streamrl.settings.features import predictors
from streamrl.settings.tree import Settings, decode_curve, worker_curves
from streamrl.weights.export import WeightExporter

LONGEST_S = 30 * 86_400.0
"""Virtual seconds after which a simulation counts as endless."""
RELAY = "http://simulated"
"""The relay's address in announcements; no worker connects to it."""


@dataclass(frozen=True)
class Latencies:
    """Delays between the acts of a run, in virtual seconds.

    ``order_s``: from the dispatcher's decision until the worker has the order. ``sample_s``: from a finished completion
    until trainer and dispatcher have it. ``report_s``: from a finished step until dispatcher and coordinator know it.
    ``announce_s``: from there until workers know its weights. ``fetch_s``: from there until they have fetched them.
    ``heartbeat_s``: from adoption until the dispatcher knows it. ``trajectory_s``, ``step_s``: the trainer's own work
    on a trajectory, and on a step.
    """

    order_s: float = 0.0
    sample_s: float = 0.0
    report_s: float = 0.0
    announce_s: float = 0.0
    fetch_s: float = 0.0
    heartbeat_s: float = 0.0
    trajectory_s: float = 0.0
    step_s: float = 0.0

    def times(self, factor: float) -> "Latencies":
        """All latencies, multiplied by a factor."""
        return Latencies(**{name: value * factor for name, value in vars(self).items()})

    def with_transfer(self, seconds: float) -> "Latencies":
        """The latencies with a longer ``fetch_s``."""
        return replace(self, fetch_s=self.fetch_s + seconds)

    def of_topics(self, run: str) -> dict[str, float]:
        """Seconds from writing a record until readers have it, by topic."""
        return {
            WORK_ORDERS.full_name(run): self.order_s,
            TRAJECTORIES.full_name(run): self.sample_s,
            STEPS.full_name(run): self.report_s,
            CONTROL.full_name(run): self.announce_s,
            HEARTBEATS.full_name(run): self.heartbeat_s,
        }


INSTANT = Latencies()
"""No latencies: the result of a mode or strategy then depends only on its logic."""


@dataclass(frozen=True)
class StepMark:
    """A step's report, and sums up to that moment, in virtual seconds.

    ``slot_s``: busy time of slots. ``idle_s``: time of workers without work. ``training_s``: training work.
    """

    report: StepReport
    slot_s: float
    idle_s: float
    training_s: float


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulation: its topics, its steps in order (step 0 first), and completion tokens by group."""

    bus: MemoryBus
    name: str
    steps: tuple[StepMark, ...]
    completion_tokens: Mapping[str, int]

    @property
    def history(self) -> BusHistory:
        """The run's topics, which can be read in any event loop."""
        return BusHistory(self.bus)


@dataclass
class SimulatedPipeline:
    """A simulated run of ``training.max_steps`` steps. ``source`` replaces the prompts that the settings name.

    A virtual second is ``emulation.time_scale`` emulated seconds, and one second for all time-outs of the settings.
    ``training_devices``: number of the trainer's ranks; a fraction below one takes longer in proportion.
    ``worker_speeds``: how fast each worker decodes, as a multiple of the settings' curve; 1 for the others. ``cores``:
    those of one machine, which all processes share; None: each has what it needs.
    ``chunk_tokens``: tokens that an engine returns at once; 0: the whole completion at its end, which saves most of the
    simulation's work.
    """

    settings: Settings
    latencies: Latencies = INSTANT
    training_devices: float = 1
    source: PromptSource | None = None
    chunk_tokens: int = 0
    worker_speeds: Sequence[float] = ()
    cores: CoreCosts | None = None

    def run(self) -> SimulatedRun:
        """Simulate the run.

        Raises:
            DataError: the run's prompts or lengths cannot be read.
            Stuck: the run does not reach its last step.
        """
        # Only virtual time is limited: a large pipeline makes millions of callbacks, thousands at one moment.
        bounds = {"max_seconds": LONGEST_S, "max_callbacks": float("inf"), "max_at_once": float("inf")}
        # Left in reverse order: the loop ends its tasks while the directory that they write to still exists.
        with (
            _silence(),
            tempfile.TemporaryDirectory(prefix="streamrl-simulation-") as scratch,
            sweeping(VirtualLoop(**bounds)) as loop,
        ):
            parts = _Parts(self, _emulated(self.settings, Path(scratch), self.chunk_tokens), loop.time)
            return loop.run_until_complete(parts.run())


def _emulated(settings: Settings, scratch: Path, chunk_tokens: int) -> Settings:
    """The settings with everything emulated, and with every group trained.

    The emulated rewards are constant, so some settings would otherwise skip every group for lack of spread.
    """

    # ``model_copy`` validates nothing, so these values must be valid as they are.
    def changed(section: str, **values: object) -> Any:
        return getattr(settings, section).model_copy(update=values)

    decode = settings.emulation.decode.model_copy(update={"chunk_tokens": chunk_tokens})
    # Without chunks a completion shows no progress before its end. Here no order is lost, so none must time out.
    patience = {} if chunk_tokens else {"order_timeout_s": LONGEST_S}
    # All rewards are equal: other algorithms would skip groups that a real run trains.
    algorithm = changed("algorithm", name="grpo", dynamic_sampling=False)
    # Partial completions matter only for moves by repack: no worker is lost here.
    partials = "durable" if settings.dispatch.repack else "off"
    return settings.model_copy(
        update={
            "run": changed("run", directory=scratch, name=settings.run.name or "plan"),
            "algorithm": algorithm,
            "generation": changed("generation", engine="emulated", partial_trajectories=partials),
            "training": changed("training", backend="emulated"),
            "coordinator": changed("coordinator", relays=(RELAY,)),
            "emulation": changed("emulation", decode=decode),
            "dispatch": changed("dispatch", **patience),
        }
    )


@contextmanager
def _silence() -> Iterator[None]:
    # structlog's configuration is global, so the caller's is restored afterwards.
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@dataclass
class _Parts:
    """Builds the roles of one run and runs them together. ``clock``: the virtual loop's, which all roles use."""

    pipeline: SimulatedPipeline
    settings: Settings
    clock: Callable[[], float]
    engines: "list[MeteredEngine]" = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)

    def __post_init__(self) -> None:
        name, partitions = self.settings.run.name, self.settings.loop.trajectory_partitions
        self.bus = DelayedBus(delays=self.pipeline.latencies.of_topics(name))
        for topic in CATALOGUE:
            self.bus.create_topic(topic.full_name(name), topic.partition_count(partitions))
        # Called before any delay: a step is marked when it ends, not when another role reads its report.
        self.bus.written = self._mark
        scale, costs = self.settings.emulation.time_scale, self.pipeline.cores
        self.cores = None if costs is None else SharedCores(costs, self.clock, scale)
        self.device = MeteredDevice(scale, self.clock, self.cores)

    async def run(self) -> SimulatedRun:
        """Run until the trainer ends. A role that ends earlier has failed, and its error is raised."""
        name, stop = self.settings.run.name, asyncio.Event()
        trainer, dispatcher = self._trainer(), self._dispatcher()
        coordinator = Coordinator(self.bus, name, self.settings.coordinator.relays, self.clock, time_of_day=self.clock)
        workers = [self._worker(number) for number in range(self.settings.run.workers)]
        others = [asyncio.create_task(coordinator.run(stop)), asyncio.create_task(dispatcher.run(stop))]
        others += [asyncio.create_task(worker.run(stop)) for worker in workers]
        training = asyncio.create_task(trainer.run(stop))
        # Waits for all roles: without a failed one the trainer would wait until ``LONGEST_S`` and hide the failure.
        await asyncio.wait([training, *others], return_when=asyncio.FIRST_COMPLETED)
        for ended in (task for task in others if task.done() and not training.done()):
            ended.result()
        await training
        # The others stop only now: up to its last step the trainer needs their records.
        stop.set()
        await asyncio.gather(*others)
        tokens: defaultdict[str, int] = defaultdict(int)
        for engine in self.engines:
            for group, count in engine.tokens.items():
                tokens[group] += count
        return SimulatedRun(self.bus, name, tuple(self.steps), tokens)

    def _mark(self, record: Outgoing) -> None:
        """Take a written record. If it is a step's report, note how busy the slots were."""
        if self.cores is not None and record.topic == TRAJECTORIES.full_name(self.settings.run.name):
            self.cores.add_trajectory()
        if record.topic != STEPS.full_name(self.settings.run.name) or record.value is None:
            return
        # Only for decoding: partition, offset and timestamp have no meaning here.
        message = Record(record.topic, 0, 0, record.key, record.value, record.headers, 0.0).message()
        if isinstance(message, StepReport):
            # Update the sums first: an engine's own are valid up to its last request that started or ended.
            for engine in self.engines:
                engine.meter()
            mark = StepMark(
                report=message,
                slot_s=sum(engine.slot_s for engine in self.engines),
                idle_s=sum(engine.idle_s for engine in self.engines),
                training_s=self.device.busy_s,
            )
            self.steps.append(mark)

    def _dispatcher(self) -> Dispatcher:
        settings, drawn = self.settings, self.settings.emulation.lengths
        length_of = partial(trace_length, drawn)
        return Dispatcher(
            bus=self.bus,
            run_name=settings.run.name,
            loop=settings.loop,
            settings=settings.dispatch,
            source=self.pipeline.source or open_source(settings.data, run_seed=settings.run.seed),
            predictor=build_predictor(settings.lengths, settings.loop, length_of, predictors(), drawn.prediction_noise),
            clocks=Clocks(self.clock, self.clock),
            roles=OtherRoles(
                curve=decode_curve(settings),
                curves=worker_curves(settings),
                # Age in steps of the oldest checkpoint that may still be kept.
                history_steps=settings.training.keep_checkpoints * settings.training.checkpoint_every,
            ),
        )

    def _trainer(self) -> Trainer:
        settings, latencies = self.settings, self.pipeline.latencies
        weights = WeightExporter(settings.run.weights_store, settings.training.keep_weight_versions)
        place = open_storage(settings.run.path / "checkpoints", settings.run.path / "cache")
        checkpoints = CheckpointStore(place, settings.training.keep_checkpoints)
        scale = settings.emulation.time_scale
        ranks = whole_ranks(self.pipeline.training_devices)
        costs = shared_costs(settings.emulation.training, self.pipeline.training_devices / ranks)
        # Latencies are in virtual seconds, costs in emulated ones; the device divides by the scale again.
        costs = costs.model_copy(update={"optimizer_step_s": costs.optimizer_step_s + latencies.step_s * scale})

        exporting = MeteredDevice(scale, self.clock, self.cores)

        def open_policy(restored: RestoredCheckpoint | None) -> EmulatedPolicy:
            own_s = latencies.trajectory_s * scale
            made_of = costs, self.device, exporting, weights, checkpoints, restored
            return BusyPolicy(*made_of, trajectory_s=own_s, ranks=ranks)

        learning = LearningSettings(
            loop=settings.loop,
            algorithm=settings.algorithm,
            training=settings.training.model_copy(update={"ranks": ranks}),
            ingest=settings.ingest,
            batching=settings.batching,
            reward_weights=settings.rewards.weight_by_name,
        )
        parts = TrainerParts(
            open_policy=open_policy,
            open_compute=lambda: EmulatedCompute(self.device),
            checkpoints=checkpoints,
            open_exporter=lambda: EmulatedCompute(exporting),
        )
        # ``monotonic`` too: the dispatcher learns the trainer's speed from the phases.
        run, clock = TrainedRun(self.bus, settings.run.name), self.clock
        return Trainer(TrainerContext(learning, run, parts, clock=clock, monotonic=clock))

    def _worker(self, number: int) -> GenerationWorker:
        settings, worker_id, speeds = self.settings, f"worker-{number}", self.pipeline.worker_speeds
        engine = MeteredEngine(settings, self.clock, self.cores, speeds[number] if number < len(speeds) else 1.0)
        self.engines.append(engine)
        return GenerationWorker(
            bus=self.bus,
            context=RunContext(settings.run.name, settings.loop, settings.generation),
            worker_id=worker_id,
            engine=engine,
            tokenizer=FillerTokenizer(settings.emulation.lengths.prompt_characters_per_token),
            rewards=ConstantRewards(settings.rewards.names),
            fetcher=StoreFetcher(settings.run.weights_store, self.pipeline.latencies.fetch_s),  # type: ignore[arg-type]
            # Both clocks are virtual: the machine's own would hardly advance during a simulation.
            clocks=Clocks(self.clock, self.clock),
        )


def whole_ranks(devices: float) -> int:
    """The number of ranks for a number of devices, which is fractional if a pipeline is simulated in part."""
    return max(1, round(devices))


def shared_costs(costs: TrainingCosts, devices: float) -> TrainingCosts:
    """The costs if ``devices`` devices share each micro-batch evenly; optimizer and export are not shared."""
    # step = (per_micro_batch * M + per_token * T + per_squared_token * Q) / devices + optimizer_step + export
    shared = ("per_micro_batch", "per_token", "per_squared_token")
    names = [f"forward_backward_s_{name}" for name in shared]
    return costs.model_copy(update={name: getattr(costs, name) / devices for name in names})


@dataclass(frozen=True)
class StoreFetcher:
    """Takes weights straight from the store, without a relay, after ``fetch_s`` seconds."""

    store: Path
    fetch_s: float

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        """The version's directory."""
        await asyncio.sleep(self.fetch_s)
        return self.store / str(ready.version)

    def keep_only(self, versions: Iterable[PolicyVersion], series: str = "") -> None:
        """Do nothing: the fetcher has no copies."""

    def set_run_id(self, run_id: str) -> None:
        """Do nothing: there is only one run."""

    def release(self) -> None:
        """Do nothing: no version is held."""


class MeteredDevice(EmulatedDevice):
    """An emulated device that also measures its work. It works on ``cores``."""

    def __init__(self, time_scale: float, clock: Callable[[], float], cores: SharedCores | None) -> None:
        super().__init__(time_scale, clock if cores is None else cores.now)
        self._scale, self._cores, self._launched_s = time_scale, cores, 0.0

    @property
    def busy_s(self) -> float:
        """Virtual seconds of its work so far; with shared cores, waiting for them included."""
        return self._launched_s / self._scale if self._cores is None else self._cores.busy_s(self)

    def launch(self, seconds: float) -> None:
        """Count the seconds, then do as the emulated device does."""
        self._launched_s += seconds
        super().launch(seconds)
        if self._cores is not None:
            self._cores.compute(self, self._cores.costs.trainer_cores, self.free_at)


class BusyPolicy(EmulatedPolicy):
    """An emulated policy whose trainer spends ``trajectory_s`` emulated seconds of its own work per trajectory."""

    def __init__(
        self, costs: TrainingCosts, device: EmulatedDevice, *places: Any, trajectory_s: float, ranks: int
    ) -> None:
        super().__init__(costs, device, *places, ranks=ranks)
        self._own_device, self._trajectory_s = device, trajectory_s

    def accumulate(self, batch: MicroBatch) -> None:
        """Launch the work of making the batch, then its forward and backward pass."""
        # ``lengths`` has one entry per trajectory. Launched first, so that the pass starts after that work.
        self._own_device.launch(len(batch.lengths) * self._trajectory_s)
        super().accumulate(batch)


class MeteredEngine(EmulatedEngine):
    """An emulated engine that also measures ``slot_s`` and ``idle_s``, in virtual seconds, and tokens by group.

    The seconds are valid up to the last ``meter``. It decodes on ``cores``.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float], cores: SharedCores | None, speed: float) -> None:
        emulation, slots = settings.emulation, settings.generation.max_num_seqs
        decode = DecodeCurve(emulation.decode).times(1 / speed).settings
        recomputes = settings.generation.adopt == "recompute"
        monotonic = clock if cores is None else cores.now
        super().__init__(
            decode, emulation.lengths, emulation.time_scale, slots, monotonic=monotonic, recomputes=recomputes
        )
        self.slot_s = self.idle_s = 0.0
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self._clock, self._cores = clock, cores
        self._requests = 0
        self._metered_at = clock()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """Do as the emulated engine does, and count."""
        # Before the number of requests changes: the time until now passed with the old one.
        self.meter()
        self._requests += 1
        # A request is named after its trajectory: <group>/<sample index>.
        group = request.request_id.rpartition("/")[0]
        try:
            async for delta in super().generate(request):
                self.tokens[group] += len(delta.token_ids)
                yield delta
        finally:
            self.meter()
            self._requests -= 1

    def _advance(self) -> None:
        super()._advance()
        if self._cores is not None:  # the timer is set as long as there is something to decode
            self._cores.compute(self, self._cores.costs.engine_cores, 0.0 if self._timer is None else inf)

    def meter(self) -> None:
        """Count the time since the last call. With continuous batching, each request keeps one slot busy."""
        now = self._clock()
        elapsed, self._metered_at = now - self._metered_at, now
        # Requests beyond the number of slots wait in the engine and keep no slot busy.
        self.slot_s += elapsed * min(self._requests, self.max_num_seqs)
        self.idle_s += elapsed * (not self._requests)


@dataclass
class DelayedBus(MemoryBus):
    """A bus in memory whose records become visible ``delays[topic]`` seconds after the write; at once by default.

    Records of a topic stay in order, since their delay is constant. ``written`` is called at the write of each record.
    """

    delays: Mapping[str, float] = field(default_factory=dict)
    written: Callable[[Outgoing], None] = lambda record: None
    _ends: defaultdict[TopicPartition, int] = field(default_factory=lambda: defaultdict(int))
    _readers: "defaultdict[TopicPartition, list[DelayedSubscription]]" = field(
        default_factory=lambda: defaultdict(list)
    )

    async def publisher(self, client_id: str) -> "DelayedPublisher":
        """A publisher on this bus."""
        return DelayedPublisher(self, client_id)

    async def subscribe(
        self,
        topics: Iterable[str],
        *,
        client_id: str,
        start: Start = "earliest",
        partitions: Iterable[int] | None = None,
        group_id: str | None = None,
    ) -> "DelayedSubscription":
        """A subscription on this bus that only records of its own partitions wake."""
        plain = await super().subscribe(
            topics, client_id=client_id, start=start, partitions=partitions, group_id=group_id
        )
        subscription = DelayedSubscription(self, plain.offsets, group_id)
        for tp in plain.offsets:
            self._readers[tp].append(subscription)
        return subscription

    def append(self, record: Outgoing, number: int) -> Position:
        """Write a record. Its position is known at once, even if readers get the record later."""
        loop, tp = asyncio.get_running_loop(), TopicPartition(record.topic, number)
        # Not the length of the log, which grows only when a record becomes visible: offsets would repeat.
        position = Position(record.topic, number, self._ends[tp])
        self._ends[tp] += 1
        kept = Record(*position, record.key, record.value, record.headers, timestamp=loop.time())
        self.written(record)
        if delay := self.delays.get(record.topic, 0.0):
            loop.call_later(delay, self._show, tp, kept)
        else:
            self._show(tp, kept)
        return position

    def forget(self, subscription: "DelayedSubscription") -> None:
        """Stop waking a subscription."""
        for tp in subscription.offsets:
            self._readers[tp] = [reader for reader in self._readers[tp] if reader is not subscription]

    def _show(self, tp: TopicPartition, record: Record) -> None:
        self.log(tp.topic).partitions[tp.partition].append(record)
        for reader in self._readers[tp]:
            reader.wake()


@dataclass
class DelayedPublisher(MemoryPublisher):
    """Writes to a ``DelayedBus``; acknowledgements come at once."""

    bus: DelayedBus

    async def write(self, records: Iterable[Outgoing]) -> list[Position]:
        """Write all records or none, with no other publisher's records in between."""
        # All partitions first: a wrong one raises before any write. No await, so no other publisher can interleave.
        numbered = [(record, self._partition_for(record)) for record in records]
        return [self.bus.append(record, number) for record, number in numbered]


@dataclass
class DelayedSubscription(MemorySubscription):
    """Reads a ``DelayedBus``. Only records of its own partitions wake it, so that hundreds of readers cost little."""

    bus: DelayedBus
    _waiting: "asyncio.Future[None] | None" = None

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; waits for the first one at most ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)  # lets other tasks write, even if the caller polls without waiting
        while not (batch := self._take(max_records)) and loop.time() < deadline:
            # A record or the deadline wakes this; the loop's condition checks both.
            self._waiting = loop.create_future()
            timer = loop.call_at(deadline, self.wake)
            try:
                await self._waiting
            finally:
                timer.cancel()  # otherwise it would wake a later poll for nothing
                self._waiting = None
        return batch

    def wake(self) -> None:
        """Wake a waiting poll: there may be records to read."""
        # A future takes only one result, and several records may come at one moment.
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def close(self) -> None:
        """Refuse further reading."""
        self.bus.forget(self)
        await super().close()
