"""The ports of the trainer's driver: a policy that learns, a place to compute, checkpoints, and its standing.

Knows no torch and no threads, so that thousands of trainers can be simulated in one process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.ingest.versions import CountedVersions, OwnVersions
from streamrl.consumers.training.checkpoints.catalogue import CheckpointsState, Lineage
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
    """The parts of a checkpoint, besides the model, that the trainer's driver reads."""

    @property
    def manifest(self) -> CheckpointManifest:
        """The manifest: run, step, and position in the stream."""
        ...

    @property
    def reader(self) -> Mapping[str, Any]:
        """The part of the reader's snapshot that is too large for the manifest."""
        ...

    @property
    def report(self) -> bytes:
        """The encoded report of its step."""
        ...


class RestoredCheckpoint(Protocol):
    """A verified checkpoint. The rest of its content concerns only the store and the policy."""

    @property
    def state(self) -> RestoredState:
        """Everything except the model."""
        ...

    @property
    def undoes(self) -> int:
        """The newest lineage whose later steps an operator undid by choosing this checkpoint; 0: none."""
        ...


class Checkpoints(Protocol):
    """Where checkpoints are kept. Its calls may block: they run where the policy computes."""

    def held(self, claimed: int = 0) -> CheckpointsState:
        """The claims and checkpoints there, with the claim's id of lineage ``claimed``; reads only."""
        ...

    def claim_lineage(self, *, at_least: int = 1, now: float) -> Lineage:
        """Take the run over under the next number, greater than that of every claim and every checkpoint."""
        ...

    def newest(self) -> RestoredCheckpoint | None:
        """The checkpoint to continue from: the newest that verifies, or a restored one; None: there is none.

        Raises:
            CheckpointError: there are checkpoints, but none of them verifies.
        """
        ...


class WeightSnapshot(Protocol):
    """The weights of one moment. Its calls come one at a time, and may run concurrently with the policy's."""

    def export(self, version: PolicyVersion, now: float) -> str:
        """Write the weights to the weights store; returns the sha256 of their manifest."""
        ...

    def digests(self) -> dict[str, str]:
        """xxh3-128, in hex, of each float32 tensor's little-endian bytes, by its name on disk."""
        ...


class Policy(Protocol):
    """A model that learns. All calls come one at a time, in the thread in which ``Compute`` runs them."""

    @property
    def step(self) -> int:
        """Optimizer steps taken since the start of the run."""
        ...

    @property
    def limits(self) -> ModelLimits:
        """The model's vocabulary and longest sequence."""
        ...

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """Metrics of the speed against the device's limit, for tokens computed in so many seconds.

        Empty if the limit is not known.
        """
        ...

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch.

        Raises:
            OutOfMemory: it does not fit, and changes no sums. If ``gradient_lost``, call ``discard``, and add all
                earlier micro-batches of the step again.
        """
        ...

    def discard(self) -> None:
        """Drop the accumulated gradient."""
        ...

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Apply the accumulated gradient unless there is a problem with it; clears it in either case."""
        ...

    def snapshot(self) -> WeightSnapshot:
        """A copy of the present weights; the previous snapshot must not be used any more."""
        ...

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment; returns its path or URL.

        Raises:
            CheckpointError: it could not be written; older ones are unchanged.
            Superseded: a newer lineage exists; nothing was written.
        """
        ...


class Compute(Protocol):
    """Runs calls one at a time, on the event loop or in a thread."""

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result; its exceptions are raised here."""
        ...

    def close(self) -> None:
        """Wait for the call in progress, then close."""
        ...


OpenPolicy = Callable[[RestoredCheckpoint | None], Policy]
OpenCompute = Callable[[], Compute]


class Standing(Protocol):
    """How a trainer's policy relates to the stream that it reads. It does not change during a lineage.

    The driver calls its methods and never tests its class. ``OwnStream``: the trainer's own weights sample the stream.
    """

    @property
    def run_id(self) -> str:
        """The run that the trainer's directory must belong to; empty: any, the directory decides."""
        ...

    @property
    def above_lineage(self) -> int:
        """A new lineage's number must be greater than this one, even if the trainer never had that lineage."""
        ...

    def orphans_through(self, identity: RunIdentity) -> int:
        """The last lineage whose trajectories are skipped, because the run was restarted without it; 0: none."""
        ...

    def shift_at(self, step: int) -> int | None:
        """The difference between workers' version numbers and the steps of a lineage that starts at ``step``.

        None: workers use the steps themselves.
        """
        ...

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """The versions in which ages are counted.

        ``own``: the trainer's newest version, by the number that workers use; ``max_age``: the bound on ages counted in
        these versions, in steps.
        """
        ...


@dataclass(frozen=True)
class OwnStream:
    """A trainer whose own weights always sample the stream."""

    run_id: str = ""
    above_lineage: int = 0

    def orphans_through(self, identity: RunIdentity) -> int:
        """The run's identity says it."""
        return identity.orphans_through

    def shift_at(self, step: int) -> int | None:
        """None: workers' version numbers are its steps."""
        return None

    def versions(self, own: Callable[[], PolicyVersion], max_age: int) -> CountedVersions:
        """The trainer's own versions."""
        return OwnVersions(own, max_age)
