"""Makes the processes of a run: production classes with simulated parts. Each call gives one fresh life of a role."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from streamrl.bus.clocks import Clocks
from streamrl.bus.port import message_of
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.batching.settings import BatchingSettings
from streamrl.consumers.ingest.limits import IntakeLimits
from streamrl.consumers.ingest.settings import IngestSettings
from streamrl.consumers.training.failpoints import Failpoint
from streamrl.consumers.training.ports import RestoredCheckpoint
from streamrl.consumers.training.session import LearningSettings, TrainedRun, TrainerContext, TrainerParts
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.coordinator.coordinator import Coordinator, CoordinatorTimeouts
from streamrl.policies.coordinating import SeveralPolicyControl
from streamrl.policies.dispatching import SeveralPolicyDispatch
from streamrl.policies.following_trainer import FollowingTrainer
from streamrl.policies.splitting import SplitSeries
from streamrl.producers.dispatch.dispatcher import Dispatcher
from streamrl.producers.dispatch.settings import DispatchSettings
from streamrl.producers.dispatch.state import OtherRoles
from streamrl.producers.generation.pace import WorkerPace
from streamrl.producers.generation.settings import GenerationSettings
from streamrl.producers.generation.worker import GenerationWorker, RunContext
from streamrl.producers.grading.grader import Grader
from streamrl.producers.lengths.predictor import ObservedQuantiles
from streamrl.schemas.control import RunIdentity
from streamrl.schemas.identifiers import SERVED_POLICY, scope_of
from streamrl.schemas.reports import StepReport
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.topics import CATALOGUE, CONTROL, INSTANCE_TOPICS, STEPS
from tests.fakes.one_shard import OneShardLoop
from tests.simulation.bus.broker import committed
from tests.simulation.bus.sim_bus import SimBus
from tests.simulation.clocks import HostClock
from tests.simulation.parts.checkpoints import BeforeWrite, MemoryPlace, SimCheckpoints, SimDirectory, SimRestored
from tests.simulation.parts.policy import SimCompute, SimPolicy
from tests.simulation.parts.sampling import SimEngine, SimPrompts, SimRewards, SimTokenizer
from tests.simulation.parts.weights import SimFetcher, WeightShelf
from tests.simulation.worlds.scenarios import Setup

RUN = "sim"
INSTANCE = "second"
SCOPE = scope_of(RUN, INSTANCE)
Life = Callable[[asyncio.Event], Awaitable[None]]

PACE = WorkerPace(
    heartbeat_interval_s=1.0, fencing_timeout_s=2.0, partial_chunk_tokens=1, drain_grace_s=2.0, max_undelivered=32
)
"""The workers'. Each beat is an event of the simulation: more of them leave less time for the harm."""


@dataclass
class Crew:
    """What outlives the processes: the bus, the run's directory, the weights; and the settings of all.

    ``directories``: all that there are of the run's name, the one in which the run is started last. ``instance``:
    directory of the instance that is attached, if one is. ``beside``: weights of those that are not served, by policy.
    ``sampled``: how often each token of each trajectory was, by whomever.
    """

    setup: Setup
    bus: SimBus
    directories: list[SimDirectory] = field(init=False)
    shelf: WeightShelf = field(default_factory=WeightShelf)
    beside: dict[str, WeightShelf] = field(default_factory=dict)
    sampled: "Counter[tuple[str, int]]" = field(default_factory=Counter)
    loop: LoopSettings = field(init=False)
    instance: SimDirectory = field(init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self.loop = (OneShardLoop if setup.shards == 1 else LoopSettings)(
            groups_per_step=setup.groups_per_step,
            num_generations=setup.num_generations,
            mode="one_step_async" if setup.fixed_batches else "trajectory_async",
            max_staleness=setup.max_staleness,
            max_completion_length=16,
            bucket_boundaries=(8,),
            heartbeat_timeout_s=3.0,
        )
        for topic in CATALOGUE:
            self.bus.create_topic(topic.full_name(RUN), topic.partition_count(self.loop.trajectory_partitions))
        for topic in INSTANCE_TOPICS if setup.attached_from else ():
            self.bus.create_topic(topic.full_name(SCOPE), 1)
        self.directories = [self.empty_directory()]
        self.instance = SimDirectory(MemoryPlace(setup.by_lineage))

    def empty_directory(self, *, adopts: bool = False) -> SimDirectory:
        """One in which nothing was started yet."""
        (steps,) = self.bus.broker.logs(STEPS.full_name(RUN))
        reports = [each for record in committed(steps) if isinstance(each := message_of(record), StepReport)]
        newest = max((report.version.lineage for report in reports), default=0)
        return SimDirectory(MemoryPlace(self.setup.by_lineage), adopts=adopts, orphans_through=newest)

    @property
    def directory(self) -> SimDirectory:
        """In which the run is started."""
        return self.directories[-1]

    def move_to_holder(self) -> None:
        """An operator starts the run where it is, as the topics say; where nobody holds it, in the newest directory."""
        (control,) = self.bus.broker.logs(CONTROL.full_name(RUN))
        said = [each for record in committed(control) if isinstance(each := message_of(record), RunIdentity)]
        for directory in self.directories:
            own = directory.identity.load()
            if said and own is not None and said[-1].has_same_owner_as(own):
                self.directories.remove(directory)
                self.directories.append(directory)
                return

    def shelf_of(self, arm: str) -> WeightShelf:
        """Where the weights of an arm of a split lie; without a name, those of the served policy."""
        return self.beside.setdefault(arm, WeightShelf()) if arm else self.shelf

    def roles(self) -> list[str]:
        """Everybody the run needs."""
        workers, graders = (f"worker-{n}" for n in range(self.setup.workers)), range(self.setup.graders)
        own = ["instance"] if self.setup.attached_from else []
        return ["trainer", "coordinator", "dispatcher", *workers, *(f"grader-{n}" for n in graders), *own]

    def life(
        self,
        role: str,
        clock: HostClock,
        chance: Random,
        before_write: BeforeWrite,
        failpoint: Callable[[Failpoint], None],
        directory: SimDirectory,
    ) -> Life:
        """A fresh life of a role, on a machine with this clock; a trainer's in this directory."""
        if role in ("trainer", "instance"):
            policy = SERVED_POLICY if role == "trainer" else INSTANCE
            return self._trainer(policy, clock, chance, before_write, failpoint, directory).run
        if role == "coordinator":
            timeouts = CoordinatorTimeouts(self.loop.heartbeat_timeout_s, finish_s=5.0)
            made_of = self.bus, RUN, (), clock.monotonic, timeouts, SeveralPolicyControl
            return Coordinator(*made_of, time_of_day=clock).run
        if role == "dispatcher":
            return self._dispatcher(clock)
        if role.startswith("grader"):
            return self._grader(role, clock, chance)
        return self._worker(role, clock, chance)

    def _trainer(
        self,
        name: str,
        clock: HostClock,
        chance: Random,
        before_write: BeforeWrite,
        failpoint: Callable[[Failpoint], None],
        directory: SimDirectory,
    ) -> FollowingTrainer:
        setup = self.setup

        async def pause() -> None:
            draw = chance.random()
            await asyncio.sleep(setup.compute_s * (40 * draw if draw > 0.95 else draw))

        checkpoints = SimCheckpoints(directory.place, setup.keep_checkpoints, before_write, pause)

        def open_policy(is_served: bool, restored: RestoredCheckpoint | None) -> SimPolicy:
            policy = SimPolicy(
                self.shelf_of("" if is_served else name), checkpoints, chance, setup.bad_gradient, setup.out_of_memory
            )
            if isinstance(restored, SimRestored):
                policy.contents = list(restored.state.saved.contents)
                policy.step = restored.state.manifest.step
            return policy

        def parts_of(is_served: bool) -> TrainerParts:
            return TrainerParts(
                partial(open_policy, is_served), lambda: SimCompute(chance, setup.compute_s), checkpoints
            )

        run = TrainedRun(self.bus, RUN, name, identity=directory.identity, adopt=directory.adopts)
        context = TrainerContext(
            self._learning(name), run, parts_of(True), clock=clock, monotonic=clock.monotonic, failpoint=failpoint
        )
        return FollowingTrainer(context, parts_of=parts_of)

    def _learning(self, policy: str) -> LearningSettings:
        """An instance's: it learns until nothing is left of the stream."""
        setup, is_own = self.setup, policy == SERVED_POLICY
        return LearningSettings(
            loop=self.loop,
            algorithm=AlgorithmSettings(name="grpo" if is_own else "rloo", dynamic_sampling=setup.dynamic_sampling),
            training=TrainingSettings(
                max_steps=setup.max_steps if is_own else 1000,
                checkpoint_every=setup.checkpoint_every,
                keep_checkpoints=setup.keep_checkpoints,
                weight_sync_steps=setup.weight_sync_steps,
            ),
            ingest=IngestSettings(
                max_unrewarded_share=1.0,
                accept_loss=setup.accept_loss,
                sampling=setup.takes,
                passed_over=setup.passed_over,
                staleness_cap=setup.staleness_cap,
                attach_from="now" if setup.attached_from == "now" else "beginning",
            ),
            batching=BatchingSettings(token_budget=64),
            reward_weights={},
            limits=IntakeLimits(max_consecutive_faults=10_000, max_undecodable_share=1.0),
        )

    def _dispatcher(self, clock: HostClock) -> Life:
        dispatcher = Dispatcher(
            self.bus,
            RUN,
            self.loop,
            DispatchSettings(repack=self.setup.repack),
            SimPrompts(self.setup.prompts),
            ObservedQuantiles(self.loop),
            clocks=Clocks(clock.monotonic, clock),
            roles=OtherRoles(has_graders=bool(self.setup.graders)),
            policies=SeveralPolicyDispatch,
        )
        dispatcher.max_attempts = 20
        return dispatcher.run

    def _grader(self, role: str, clock: HostClock, chance: Random) -> Life:
        return Grader(
            self.bus,
            RUN,
            role,
            SimRewards(chance, self.setup.sampling, ("judge",), seconds=0.3),
            attempts=2,
            concurrency=4,
            clocks=Clocks(clock.monotonic, clock),
        ).run

    def _worker(self, role: str, clock: HostClock, chance: Random) -> Life:
        setup = self.setup
        return GenerationWorker(
            self.bus,
            RunContext(
                RUN,
                self.loop,
                GenerationSettings(
                    partial_trajectories="durable" if setup.durable else "off",
                    adopt="idle" if setup.idle else "in_flight",
                ),
                has_graders=bool(setup.graders),
                wanted_series=SplitSeries,
                pace=lambda _: PACE,
            ),
            role,
            SimEngine(
                chance,
                setup.sampling,
                setup.slots,
                setup.token_s,
                self.loop.max_completion_length,
                pieces=6 if setup.durable else 2,
                counts=self.sampled,
            ),
            SimTokenizer(),
            SimRewards(chance, setup.sampling, slow=setup.slow_reward),
            SimFetcher(self.shelf_of, chance, setup.failing_fetch),
            clocks=Clocks(clock.monotonic, clock),
        ).run
