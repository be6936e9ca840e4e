"""A policy whose weights are the records that entered its gradient, in order; and the place where it computes.

So what the surviving model contains can be compared with the topic, record by record.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, ParamSpec, TypeVar

import xxhash

from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.ports import StepOutcome
from streamrl.schemas.errors import OutOfMemory
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.reports import RecordRef
from tests.simulation.parts.checkpoints import SavedPieces, SimCheckpoints
from tests.simulation.parts.sampling import VOCABULARY
from tests.simulation.parts.weights import WeightShelf
from tests.simulation.processes import Killed

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class SimPolicy:
    """``bad_gradient``: probability that a step is refused for a gradient that is not finite; ``out_of_memory``: that a
    micro-batch does not fit, which then may leave a part of itself in the gradient.
    """

    shelf: WeightShelf
    store: SimCheckpoints
    chance: Random
    bad_gradient: float = 0.0
    out_of_memory: float = 0.0
    contents: list[RecordRef] = field(default_factory=list)
    gathered: list[RecordRef] = field(default_factory=list)
    step: int = 0

    @property
    def limits(self) -> ModelLimits:
        """What the model can take."""
        return ModelLimits(vocabulary=VOCABULARY, positions=1 << 20)

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        return {}

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the records of a micro-batch."""
        if self.out_of_memory and self.chance.random() < self.out_of_memory:
            lost = self.chance.random() < 0.5
            self.gathered += batch.refs[: len(batch.refs) // 2 + 1] if lost else ()
            raise OutOfMemory("expected memory, got none", gradient_lost=lost)
        self.gathered += batch.refs

    def discard(self) -> None:
        """Drop what was gathered."""
        self.gathered.clear()

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Take what was gathered into the weights."""
        if self.chance.random() < self.bad_gradient:
            self.discard()
            return StepOutcome(False, "expected a finite gradient, got nan", {"loss": 0.0})
        self.contents += self.gathered
        self.discard()
        self.step += 1
        return StepOutcome(True, "", {"loss": 0.0})

    def snapshot(self) -> "SimSnapshot":
        """What the weights contain now."""
        return SimSnapshot(self.shelf, tuple(self.contents))

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> Any:
        """Write a checkpoint of this moment; to be awaited, since others get their turn meanwhile."""
        return self.store.write(SavedPieces(tuple(self.contents), json.dumps(reader), report), manifest, lineage)


@dataclass(frozen=True)
class SimSnapshot:
    """``WeightSnapshot`` of a ``SimPolicy``."""

    shelf: WeightShelf
    contents: tuple[RecordRef, ...]

    def export(self, version: PolicyVersion, now: float) -> str:
        """Put the weights on the shelf."""
        return self.shelf.put(version, str(len(self.contents)))

    def digests(self) -> dict[str, str]:
        """Of the one tensor there is."""
        return {"contents": xxhash.xxh3_128_hexdigest(repr(list(self.contents)).encode())}


@dataclass
class SimCompute:
    """Runs calls in virtual time, ``call_s`` each on average; one in fifty takes much longer."""

    chance: Random
    call_s: float
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result. A process that is killed inside it never comes back from it."""
        async with self.lock:
            draw = self.chance.random()
            await asyncio.sleep(self.call_s * (30 * draw if draw > 0.98 else draw))
            try:
                result: Any = call(*args, **kwargs)
                told: T = await result if inspect.iscoroutine(result) else result
                return told
            except Killed:
                await asyncio.get_running_loop().create_future()
                raise

    def close(self) -> None:
        """Nothing is held."""
