"""What the trainer's driver asks of others: a policy that learns, a place to compute, checkpoints, and its standing.

Knows no torch and no threads, so that thousands of trainers can be simulated in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.ingest.versions import CountedVersions, OwnVersions
from streamrl.consumers.training.checkpoints.catalogue import HeldCheckpoints, Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.schemas.control import RunIdentity
from streamrl.schemas.identifiers import PolicyVersion

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StepOutcome:
    """Whether the step was applied, why not, and its metrics (TRL's and prime-rl's names)."""

    applied: bool
    problem: str
    metrics: dict[str, float]


class RestoredState(Protocol):
    """What a checkpoint holds besides the model, as far as the trainer's driver looks at it."""

    @property
    def manifest(self) -> CheckpointManifest:
        """What it is of, and where in the stream it stands."""
        ...

    @property
    def reader(self) -> Mapping[str, Any]:
        """The part of the reader's snapshot that is too large for the manifest."""
        ...

    @property
    def report(self) -> bytes:
        """The step report of its step, encoded."""
        ...


class RestoredCheckpoint(Protocol):
    """A verified checkpoint. What else it holds is between its store and the policy."""

    @property
    def state(self) -> RestoredState:
        """All of it but the model."""
        ...

    @property
    def undoes(self) -> int:
        """The newest lineage whose later steps an operator undid by choosing this checkpoint; 0: none."""
        ...


class Checkpoints(Protocol):
    """Where checkpoints are kept. Its calls may block: they run where the policy computes."""

    def held(self, claimed: int = 0) -> HeldCheckpoints:
        """What is claimed and kept there, and by which claim a lineage; reads only."""
        ...

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """Take the run over: the next number, greater than that of every claim and every checkpoint."""
        ...

    def newest(self) -> RestoredCheckpoint | None:
        """The checkpoint to go on from: the newest that verifies or the one that was chosen; none if there is none.

        Raises:
            CheckpointError: there are checkpoints, and none of them verifies.
        """
        ...


class WeightSnapshot(Protocol):
    """The weights of one moment. Its calls come one after the other, and may run beside those of the policy."""

    def export(self, version: PolicyVersion, now: float) -> str:
        """Put them into the weights store; the sha256 of their manifest."""
        ...

    def digests(self) -> dict[str, str]:
        """xxh3-128, in hex, of each float32 tensor's little-endian bytes, by its name on disk."""
        ...


class Policy(Protocol):
    """A model that learns. All calls come one after the other, each from wherever ``Compute`` runs it."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the beginning of the run."""
        ...

    @property
    def limits(self) -> ModelLimits:
        """What the model can take."""
        ...

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch.

        Raises:
            OutOfMemory: it does not fit, and counts for nothing. If ``gradient_lost``, what was gathered before has to
                be gathered anew, after ``discard``.
        """
        ...

    def discard(self) -> None:
        """Drop the gathered gradient."""
        ...

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Apply the gathered gradient, unless it is not fit to be; either way it is gone afterwards."""
        ...

    def snapshot(self) -> WeightSnapshot:
        """A copy of the weights as they are; the one before must not be used any more."""
        ...

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment; where it is.

        Raises:
            CheckpointError: it could not be written; older ones are as they were.
            Superseded: a newer lineage exists; nothing was written.
        """
        ...


class Compute(Protocol):
    """Runs calls one after the other, off the event loop or not."""

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result; what it raises is raised here."""
        ...

    def close(self) -> None:
        """Wait for the call in progress, and end."""
        ...


OpenPolicy = Callable[[RestoredCheckpoint | None], Policy]
OpenCompute = Callable[[], Compute]


class Standing(Protocol):
    """How a trainer's policy stands to the stream that it reads. It stays the same for as long as a lineage lasts.

    The driver asks it and never tests which one it is. ``OwnStream`` is a trainer whose weights sample the stream.
    """

    @property
    def run_id(self) -> str:
        """The run that the trainer's directory has to belong to; empty: the directory itself says which one."""
        ...

    @property
    def above_lineage(self) -> int:
        """A new lineage gets a greater number than this one, also where the trainer itself has never had it."""
        ...

    def orphans_through(self, identity: RunIdentity) -> int:
        """The last lineage whose trajectories are skipped, since the run was begun again after it; 0: none."""
        ...

    def shift_at(self, step: int) -> int | None:
        """What is added to the steps of a lineage that begins at ``step`` to get the numbers under which workers know
        its weights; None: workers know them by the steps themselves.
        """
        ...

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """The versions in which ages are counted. ``own``: the trainer's newest, by the number under which workers know
        it; ``max_age``: the bound where those are counted, in steps.
        """
        ...


@dataclass(frozen=True)
class OwnStream:
    """A trainer whose own weights sample the stream, and always have."""

    run_id: str = ""
    above_lineage: int = 0

    def orphans_through(self, identity: RunIdentity) -> int:
        """As the run's identity says."""
        return identity.orphans_through

    def shift_at(self, step: int) -> int | None:
        """Workers know its weights by its steps."""
        return None

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """Its own."""
        return OwnVersions(own, max_age)
