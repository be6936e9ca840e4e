"""The real dispatcher, workers, trainer and coordinator in one process, on a bus in memory and in virtual time.

Nothing is written again: every role is the class that a run starts. What differs is around them: decoding and training
are emulated, records and weights arrive after the latencies that processes, broker and network have (``Latencies``),
and waiting costs no time. Invariant a_simulation_is_a_function_of_its_settings.
"""

import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
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
from streamrl.schemas.profiles import DecodeCurve, TrainingCosts
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import CATALOGUE, CONTROL, HEARTBEATS, STEPS, TRAJECTORIES, WORK_ORDERS
from streamrl.settings.features import predictors
from streamrl.settings.tree import Settings, decode_curve, worker_curves
from streamrl.weights.export import WeightExporter

LONGEST_S = 30 * 86_400.0
"""Virtual seconds after which a simulation counts as one that never ends."""
RELAY = "http://simulated"
"""Announced as where weights are; nobody connects to it."""


@dataclass(frozen=True)
class Latencies:
    """What passes between two acts beside the acts themselves, in virtual seconds.

    ``order_s``: from a decision of the dispatcher until the worker has the order; ``sample_s``: from a finished
    completion until trainer and dispatcher have it; ``report_s``: from a finished step until dispatcher and coordinator
    know of it; ``announce_s``: from there until workers know of its weights; ``fetch_s``: until they have fetched them;
    ``heartbeat_s``: from adoption until the dispatcher knows of it; ``trajectory_s``: the trainer's own work on a
    trajectory; ``step_s``: its own work on a step.
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
        """All of them, longer by a factor."""
        return Latencies(**{name: value * factor for name, value in vars(self).items()})

    def with_transfer(self, seconds: float) -> "Latencies":
        """With weights on their way for so much longer."""
        return replace(self, fetch_s=self.fetch_s + seconds)

    def of_topics(self, run: str) -> dict[str, float]:
        """From writing a record until readers have it, by topic."""
        return {
            WORK_ORDERS.full_name(run): self.order_s,
            TRAJECTORIES.full_name(run): self.sample_s,
            STEPS.full_name(run): self.report_s,
            CONTROL.full_name(run): self.announce_s,
            HEARTBEATS.full_name(run): self.heartbeat_s,
        }


INSTANT = Latencies()
"""What a mode or a strategy reaches is then what its logic allows."""


@dataclass(frozen=True)
class StepMark:
    """The moment of a step's report; sums since the beginning, in virtual seconds.

    ``slot_s``: of busy slots; ``idle_s``: of workers without any work; ``training_s``: of the training device's work.
    """

    report: StepReport
    slot_s: float
    idle_s: float
    training_s: float


@dataclass(frozen=True)
class SimulatedRun:
    """What is left of a run: its topics, its steps in order (that of step 0 first), completion tokens by group."""

    bus: MemoryBus
    name: str
    steps: tuple[StepMark, ...]
    completion_tokens: Mapping[str, int]

    @property
    def history(self) -> BusHistory:
        """Its topics, to be read in any event loop."""
        return BusHistory(self.bus)


@dataclass
class SimulatedPipeline:
    """A run of ``training.max_steps`` steps, over ``source`` in place of the prompts that the settings name.

    A virtual second is ``emulation.time_scale`` emulated ones, and one second for all time-outs of the settings.
    ``training_devices`` are the trainer's ranks; a fraction of one works so much longer. ``worker_speeds``:
    how fast each worker decodes, as a multiple of the settings' curve; of those not named, 1. ``chunk_tokens``:
    that an engine hands over at once; 0: a completion when it is over, which saves most of the work of simulating.
    """

    settings: Settings
    latencies: Latencies = INSTANT
    training_devices: float = 1
    source: PromptSource | None = None
    chunk_tokens: int = 0
    worker_speeds: Sequence[float] = ()

    def run(self) -> SimulatedRun:
        """Simulate it.

        Raises:
            DataError: its prompts or lengths cannot be read.
            Stuck: it does not come to its last step.
        """
        # Only virtual time bounds it: a large pipeline rightly makes millions of callbacks, thousands at one moment.
        bounds = {"max_seconds": LONGEST_S, "max_callbacks": float("inf"), "max_at_once": float("inf")}
        # Left in reverse order: the loop ends its tasks while the directory that they write into is still there.
        with (
            _silence(),
            tempfile.TemporaryDirectory(prefix="streamrl-simulation-") as scratch,
            sweeping(VirtualLoop(**bounds)) as loop,
        ):
            parts = _Parts(self, _emulated(self.settings, Path(scratch), self.chunk_tokens), loop.time)
            return loop.run_until_complete(parts.run())


def _emulated(settings: Settings, scratch: Path, chunk_tokens: int) -> Settings:
    """Everything emulated, and every group trained.

    Constant rewards would otherwise have every group skipped where groups without a spread are.
    """

    # ``model_copy`` validates nothing, so these values have to be right as they stand.
    def changed(section: str, **values: object) -> Any:
        return getattr(settings, section).model_copy(update=values)

    decode = settings.emulation.decode.model_copy(update={"chunk_tokens": chunk_tokens})
    # Without chunks a completion shows no progress before it ends, and nothing is lost here that had to be found.
    patience = {} if chunk_tokens else {"order_timeout_s": LONGEST_S}
    # Made-up rewards are all equal: with another algorithm whole groups would be skipped that a real run trains.
    algorithm = changed("algorithm", name="grpo", dynamic_sampling=False)
    # Only what moves goes on elsewhere; here nobody else is lost.
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
    # structlog is configured for the whole process, so whoever simulates gets its own logging back afterwards.
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


@dataclass
class _Parts:
    """Builds the roles of one run and runs them together; ``clock`` is the virtual loop's, for all of them."""

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
        # Called before any delay: a step is marked at the moment when it ends, not when somebody reads of it.
        self.bus.written = self._mark
        self.device = MeteredDevice(self.settings.emulation.time_scale, self.clock)

    async def run(self) -> SimulatedRun:
        """Until the trainer ends; a role that ends before it has failed."""
        name, stop = self.settings.run.name, asyncio.Event()
        trainer, dispatcher = self._trainer(), self._dispatcher()
        coordinator = Coordinator(self.bus, name, self.settings.coordinator, self.clock, time_of_day=self.clock)
        workers = [self._worker(number) for number in range(self.settings.run.workers)]
        others = [asyncio.create_task(coordinator.run(stop)), asyncio.create_task(dispatcher.run(stop))]
        others += [asyncio.create_task(worker.run(stop)) for worker in workers]
        training = asyncio.create_task(trainer.run(stop))
        # Not for the trainer alone: with a role gone it would wait until ``LONGEST_S``, and hide why that role failed.
        await asyncio.wait([training, *others], return_when=asyncio.FIRST_COMPLETED)
        for ended in (task for task in others if task.done() and not training.done()):
            ended.result()
        await training
        # Only now: up to its last step the trainer lives on what the others send.
        stop.set()
        await asyncio.gather(*others)
        tokens: defaultdict[str, int] = defaultdict(int)
        for engine in self.engines:
            for group, count in engine.tokens.items():
                tokens[group] += count
        return SimulatedRun(self.bus, name, tuple(self.steps), tokens)

    def _mark(self, record: Outgoing) -> None:
        """A record is written; with that of a step, take down how busy the slots were."""
        if record.topic != STEPS.full_name(self.settings.run.name) or record.value is None:
            return
        # Made up to be decoded: partition, offset and timestamp say nothing here.
        message = Record(record.topic, 0, 0, record.key, record.value, record.headers, 0.0).message()
        if isinstance(message, StepReport):
            # Before the sums are taken: an engine's own reach only up to its last request that came or went.
            for engine in self.engines:
                engine.meter()
            mark = StepMark(
                report=message,
                slot_s=sum(engine.slot_s for engine in self.engines),
                idle_s=sum(engine.idle_s for engine in self.engines),
                # Emulated seconds into virtual ones, which the other two are in already.
                training_s=self.device.launched_s / self.settings.emulation.time_scale,
            )
            self.steps.append(mark)

    def _dispatcher(self) -> Dispatcher:
        settings, lengths = self.settings, partial(trace_length, self.settings.emulation.lengths)
        return Dispatcher(
            bus=self.bus,
            run_name=settings.run.name,
            loop=settings.loop,
            settings=settings.dispatch,
            source=self.pipeline.source or open_source(settings.data, run_seed=settings.run.seed),
            predictor=build_predictor(settings.lengths, settings.loop, lengths, predictors()),
            clocks=Clocks(self.clock, self.clock),
            roles=OtherRoles(
                curve=decode_curve(settings),
                curves=worker_curves(settings),
                # How far back the oldest checkpoint that is kept may lie.
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
        # Latencies are virtual seconds, costs emulated ones: the device divides by the scale again.
        costs = costs.model_copy(update={"optimizer_step_s": costs.optimizer_step_s + latencies.step_s * scale})

        exporting = EmulatedDevice(scale, self.clock)

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
        # Also ``monotonic``: the dispatcher learns from the phases how fast the trainer is.
        run, clock = TrainedRun(self.bus, settings.run.name), self.clock
        return Trainer(TrainerContext(learning, run, parts, clock=clock, monotonic=clock))

    def _worker(self, number: int) -> GenerationWorker:
        settings, worker_id, speeds = self.settings, f"worker-{number}", self.pipeline.worker_speeds
        engine = MeteredEngine(settings, self.clock, speeds[number] if number < len(speeds) else 1.0)
        self.engines.append(engine)
        return GenerationWorker(
            bus=self.bus,
            context=RunContext(settings.run.name, settings.loop, settings.generation),
            worker_id=worker_id,
            engine=engine,
            tokenizer=FillerTokenizer(settings.emulation.lengths.prompt_characters_per_token),
            rewards=ConstantRewards(settings.rewards.names),
            fetcher=StoreFetcher(settings.run.weights_store, self.pipeline.latencies.fetch_s),  # type: ignore[arg-type]
            # Both clocks: the machine's own would hardly move during a simulation.
            clocks=Clocks(self.clock, self.clock),
        )


def whole_ranks(devices: float) -> int:
    """So many ranks stand for a number of devices, which of a pipeline simulated in part is a fraction."""
    return max(1, round(devices))


def shared_costs(costs: TrainingCosts, devices: float) -> TrainingCosts:
    """What a step costs where so many devices share each micro-batch evenly; optimizer and export stay whole."""
    # step = (per_micro_batch * M + per_token * T + per_squared_token * Q) / devices + optimizer_step + export
    shared = ("per_micro_batch", "per_token", "per_squared_token")
    names = [f"forward_backward_s_{name}" for name in shared]
    return costs.model_copy(update={name: getattr(costs, name) / devices for name in names})


@dataclass(frozen=True)
class StoreFetcher:
    """Weights straight from the store, without a relay, after ``fetch_s`` on their way."""

    store: Path
    fetch_s: float

    async def fetch(self, ready: AnnouncedWeights, attempt: int = 0) -> Path:
        """The version's directory."""
        await asyncio.sleep(self.fetch_s)
        return self.store / str(ready.version)

    def keep_only(self, versions: Iterable[PolicyVersion], series: str = "") -> None:
        """Nothing is kept twice."""

    def set_run_id(self, run_id: str) -> None:
        """Nor from one run to the next."""

    def release(self) -> None:
        """No version is held."""


class MeteredDevice(EmulatedDevice):
    """Also measures: ``launched_s`` emulated seconds of work so far."""

    launched_s = 0.0

    def launch(self, seconds: float) -> None:
        """As the emulated device does, counted."""
        self.launched_s += seconds
        super().launch(seconds)


class BusyPolicy(EmulatedPolicy):
    """An emulated policy whose trainer spends ``trajectory_s`` emulated seconds of its own on every trajectory."""

    def __init__(
        self, costs: TrainingCosts, device: EmulatedDevice, *places: Any, trajectory_s: float, ranks: int
    ) -> None:
        super().__init__(costs, device, *places, ranks=ranks)
        self._own_device, self._trajectory_s = device, trajectory_s

    def accumulate(self, batch: MicroBatch) -> None:
        """Launch a forward and backward pass, after what was done to make the batch."""
        # ``lengths`` has one entry a trajectory. Launched first: the pass then begins after that work.
        self._own_device.launch(len(batch.lengths) * self._trajectory_s)
        super().accumulate(batch)


class MeteredEngine(EmulatedEngine):
    """Also measures: ``slot_s`` and ``idle_s`` in virtual seconds up to the last ``meter``, and tokens by group."""

    def __init__(self, settings: Settings, monotonic: Callable[[], float], speed: float) -> None:
        emulation, slots = settings.emulation, settings.generation.max_num_seqs
        decode = DecodeCurve(emulation.decode).times(1 / speed).settings
        recomputes = settings.generation.adopt == "recompute"
        super().__init__(
            decode, emulation.lengths, emulation.time_scale, slots, monotonic=monotonic, recomputes=recomputes
        )
        self.slot_s = self.idle_s = 0.0
        self.tokens: defaultdict[str, int] = defaultdict(int)
        self._clock = monotonic
        self._requests = 0
        self._metered_at = monotonic()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        """As the emulated engine does, counted."""
        # Before the count changes: the time until now passed with the old one.
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

    def meter(self) -> None:
        """Count the time since the last call. Continuous batching: so many requests keep as many slots busy."""
        now = self._clock()
        elapsed, self._metered_at = now - self._metered_at, now
        # Requests beyond the slots wait in the engine and keep nothing busy.
        self.slot_s += elapsed * min(self._requests, self.max_num_seqs)
        self.idle_s += elapsed * (not self._requests)


@dataclass
class DelayedBus(MemoryBus):
    """A bus in memory whose records become visible ``delays[topic]`` seconds after they were written; else at once.

    Records of a topic stay in order, as their delay is constant. ``written`` is called with every record at once.
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
        """A subscription on this bus, woken by records of its own partitions only."""
        plain = await super().subscribe(
            topics, client_id=client_id, start=start, partitions=partitions, group_id=group_id
        )
        subscription = DelayedSubscription(self, plain.offsets, group_id)
        for tp in plain.offsets:
            self._readers[tp].append(subscription)
        return subscription

    def append(self, record: Outgoing, number: int) -> Position:
        """Write; the position is known at once, also where readers have to wait for the record."""
        loop, tp = asyncio.get_running_loop(), TopicPartition(record.topic, number)
        # Not the length of the log, which grows only when a record is shown: offsets would be given twice.
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
        """Wake it no more."""
        for tp in subscription.offsets:
            self._readers[tp] = [reader for reader in self._readers[tp] if reader is not subscription]

    def _show(self, tp: TopicPartition, record: Record) -> None:
        self.log(tp.topic).partitions[tp.partition].append(record)
        for reader in self._readers[tp]:
            reader.wake()


@dataclass
class DelayedPublisher(MemoryPublisher):
    """Writes to a ``DelayedBus``; nobody waits for an acknowledgement."""

    bus: DelayedBus

    async def write(self, records: Iterable[Outgoing]) -> list[Position]:
        """Write all of them or none, and nothing of others in between."""
        # All partitions first: a wrong one is refused before anything was written. No await, so nobody comes between.
        numbered = [(record, self._partition_for(record)) for record in records]
        return [self.bus.append(record, number) for record, number in numbered]


@dataclass
class DelayedSubscription(MemorySubscription):
    """Reads a ``DelayedBus``. Waits for records of its own partitions, so that hundreds of readers cost little."""

    bus: DelayedBus
    _waiting: "asyncio.Future[None] | None" = None

    async def poll(self, *, max_records: int = 500, timeout_s: float = 1.0) -> list[Record]:
        """The next records; waits for the first one at most ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await asyncio.sleep(0)  # so that a caller that asks without waiting lets others write
        while not (batch := self._take(max_records)) and loop.time() < deadline:
            # Records and the deadline wake it alike; the loop's condition tells which of them it was.
            self._waiting = loop.create_future()
            timer = loop.call_at(deadline, self.wake)
            try:
                await self._waiting
            finally:
                timer.cancel()  # left set, it would wake a later poll for nothing
                self._waiting = None
        return batch

    def wake(self) -> None:
        """There may be something to read."""
        # A future takes one result only, and several records may come at one moment.
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def close(self) -> None:
        """Refuse further reading."""
        self.bus.forget(self)
        await super().close()
