"""What the trainer's driver needs of its heavy parts: a policy that learns, a place to compute, a store of checkpoints.

Knows no torch and no threads, so that thousands of trainers can be simulated in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.catalogue import HeldCheckpoints
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.schemas.identifiers import PolicyVersion

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class StepOutcome:
    """Whether the step was applied, why not, and its metrics (TRL's and prime-rl's names)."""

    applied: bool
    problem: str
    metrics: dict[str, float]


class LineageClaim(Protocol):
    """A claimed lineage number, from 1."""

    @property
    def number(self) -> int:
        """The number."""
        ...

    @property
    def claim_id(self) -> str:
        """A name of this claim that no other has, wherever it was made."""
        ...

    def check(self) -> None:
        """Make sure that nobody has taken over.

        Raises:
            Superseded: a newer lineage exists.
        """
        ...


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

    def claim_lineage(self, *, at_least: int = 1, now: float) -> LineageClaim:
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
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: LineageClaim
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
