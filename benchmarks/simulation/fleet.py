"""What dispatch sees of simulated replicas, in place of heartbeats: the state that the product's scheduler asks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from benchmarks.simulation.replica import Replica
from streamrl.producers.dispatch.admission import AdmissionLedger
from streamrl.producers.dispatch.fleet import Candidate
from streamrl.producers.dispatch.plans import HEAVY_TAIL_EXCESS
from streamrl.producers.dispatch.progress import PlanAccuracy
from streamrl.producers.dispatch.state import PromptCursor
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import DecodeCurve
from streamrl.schemas.settings import LoopSettings
from streamrl.schemas.trajectories import Prompt

LINEAGE = 1


@dataclass(frozen=True)
class _Left(Sequence[int]):
    """Expected tokens left of each completion that runs; of those past their estimate, a share of what they have."""

    replica: Replica

    def __len__(self) -> int:
        return len(self.replica.active)

    def __iter__(self) -> Iterator[int]:
        steps = self.replica.steps
        for one in self.replica.active:
            made = steps - one.first_step
            yield one.expected - made if one.expected > made else max(1, round(HEAVY_TAIL_EXCESS * made))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        return list(self)[index]


@dataclass(frozen=True)
class Held:
    """As ``Remaining``, worked out only where it is asked for: a scheduler's turn asks for few of the workers."""

    replica: Replica

    @property
    def tokens(self) -> int:
        """Of all completions."""
        return self.replica.expected_left

    @property
    def running(self) -> Sequence[int]:
        """Expected tokens left of each."""
        return _Left(self.replica)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Expected tokens of each."""
        return tuple(max(1, one.expected - one.made) for one in self.replica.waiting)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens in the cache of each that runs, then prompts of the waiting."""
        steps = self.replica.steps
        contexts = [one.prompt + steps - one.first_step for one in self.replica.active]
        return (*contexts, *(one.prompt + one.made for one in self.replica.waiting))

    @property
    def outgrown(self) -> tuple[int, ...]:
        """Expected tokens left of those that are past their estimate."""
        made = map(self.replica.made_of, self.replica.outgrown())
        return tuple(max(1, round(HEAVY_TAIL_EXCESS * tokens)) for tokens in made)


@dataclass
class Pace:
    """The trainer as the scheduler knows it (``TrainerPace``, with nothing to learn): seconds of a token, and when it
    will be free.
    """

    s_per_token: float = 0.0
    free_at: float = 0.0

    def free_in_s(self, now: float) -> float:
        """Seconds until it has done what it has."""
        return max(0.0, self.free_at - now)


@dataclass
class FleetView:
    """In place of ``DispatchState``, of which it has what ``Scheduler`` uses, and no record of each completion that is
    kept by message after message. ``told_slots``: a replica's capacity.

    Its cache bounds that to what it holds of contexts of mean length; the replica itself has the bound in tokens.
    ``awaiting``: numbers of those that will take new weights when they run nothing, and get no orders until then.
    """

    loop: LoopSettings
    ledger: AdmissionLedger
    replicas: Sequence[Replica]
    curve: DecodeCurve
    told_slots: int
    mean_prompt: int
    trainer: Pace = field(default_factory=Pace)
    plan_accuracy: PlanAccuracy = field(default_factory=PlanAccuracy)
    awaiting: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.by_name = {replica.name: replica for replica in self.replicas}
        self.progress = self.fleet = self
        self.positions = PromptCursor(self.loop.groups_per_step)

    def get(self, worker_id: str) -> Replica:
        """As if its heartbeat."""
        return self.by_name[worker_id]

    def candidate(self, replica: Replica) -> Candidate:
        """A replica that may take an order."""
        return Candidate(
            replica.name,
            "",
            PolicyVersion(LINEAGE, replica.version),
            self.told_slots,
            replica.load,
            replica.expected_left,
        )

    def candidates(self, now: float) -> list[Candidate]:
        """All that do not await weights: none is lost here."""
        return [self.candidate(replica) for replica in self.replicas if replica.number not in self.awaiting]

    def curve_of(self, worker_id: str) -> DecodeCurve:
        """They are all alike."""
        return self.curve

    def remaining(self, worker_id: str, now: float) -> Held:
        """What it has; as of its last boundary, which is younger than a heartbeat."""
        return Held(self.by_name[worker_id])

    def prompt_tokens(self, prompt: Prompt) -> int:
        """The mean of the workload."""
        return self.mean_prompt
