"""Emulated training: a device that only takes time, a ``Compute`` that waits for it, and a policy that learns nothing.

Checkpoints, lineages and weight versions are real, so relays, workers and restarts behave as in a real run. The weights
are the number of their step. As on a real device, micro-batches are launched first and waited for later. The caller may
run a little ahead, so that its own work or a late wake-up leaves no gap between two micro-batches. Invariant
consecutive_work_takes_the_sum_of_its_durations.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from streamrl.bus.waiting import in_thread
from streamrl.consumers.algorithms.advantages import ModelLimits
from streamrl.consumers.batching.dealing import deal_rows
from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.batching.prefixes import token_order
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.checkpoints.storage import remove_leftovers
from streamrl.consumers.training.checkpoints.store import CheckpointStore, TrainerState
from streamrl.consumers.training.ports import RestoredCheckpoint, StepOutcome
from streamrl.schemas.identifiers import PolicyVersion
from streamrl.schemas.profiles import TrainingCosts
from streamrl.schemas.weights import WEIGHTS
from streamrl.weights.export import WeightExporter

P = ParamSpec("P")
T = TypeVar("T")

RUN_AHEAD_S = 0.02
"""How much launched work may be unfinished when a call returns, in seconds of the wall clock; more than a late wake-up
takes."""
SHORTEST_SLEEP_S = 0.0005
"""Shortest wait for the device, in seconds: the event loop's timers may fire up to this much early."""


class EmulatedDevice:
    """Does one piece of work at a time; ``time_scale`` emulated seconds take one second."""

    def __init__(self, time_scale: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._time_scale = time_scale
        self._monotonic = monotonic
        self._free_at = self._returns_at = monotonic()

    def launch(self, seconds: float) -> None:
        """Queue work of so many emulated seconds, after earlier work."""
        # A busy device starts the work when it is free, so delays of the caller do not add up; an idle one starts now.
        self._free_at = max(self._free_at, self._monotonic()) + seconds / self._time_scale
        # Never earlier than before: a ``finish`` stays valid if more work is launched after it.
        self._returns_at = max(self._returns_at, self._free_at - RUN_AHEAD_S)

    def finish(self, seconds: float) -> None:
        """Queue work like ``launch``; the call then returns only when all work is done."""
        self.launch(seconds)
        self._returns_at = self._free_at

    @property
    def free_at(self) -> float:
        """Time of the clock at which all launched work is done."""
        return self._free_at

    def wall_s_to_wait(self) -> float:
        """Seconds of the wall clock until the caller may continue."""
        return self._returns_at - self._monotonic()


class EmulatedCompute:
    """A ``Compute`` that runs calls in a thread, because they use files, and then waits for the device."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._turn = asyncio.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compute")

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, once the device has finished; its exceptions are raised here."""
        # Held during the wait too: the thread is free by then, but the next call must still come after this one.
        async with self._turn:
            result = await in_thread(partial(call, *args, **kwargs), executor=self._pool)
            # Again, if the device's clock is slower than the event loop's.
            while (wait_s := self._device.wall_s_to_wait()) > 0:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(max(wait_s, SHORTEST_SLEEP_S))
            return result

    def close(self) -> None:
        """Wait for the call in progress, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


NO_LIMIT = 1 << 30
"""Above any vocabulary and any length: this policy reads no tokens."""
CONFIG = json.dumps({"model_type": "emulated"})


class EmulatedPolicy:
    """A ``Policy`` whose calls take time on ``device``, and whose exports take time on ``exporting``."""

    def __init__(
        self,
        durations: TrainingCosts,
        device: EmulatedDevice,
        exporting: EmulatedDevice,
        weights: WeightExporter,
        checkpoints: CheckpointStore,
        restored: RestoredCheckpoint | None,
        *,
        ranks: int = 1,
    ) -> None:
        """``ranks``: number of equal devices that share each micro-batch."""
        self._durations = durations
        self._ranks = ranks
        self._device = device
        self._exporting = exporting
        self._weights = weights
        self._checkpoints = checkpoints
        self._step = restored.state.manifest.step if restored else 0
        self._gathered_s = 0.0
        self._has_removed_leftovers = False

    @property
    def step(self) -> int:
        """Optimizer steps taken since the start of the run."""
        return self._step

    @property
    def limits(self) -> ModelLimits:
        """No limits in practice."""
        return ModelLimits(vocabulary=NO_LIMIT, positions=NO_LIMIT)

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """None: nothing is computed."""
        return {}

    def accumulate(self, batch: MicroBatch) -> None:
        """Launch a forward and backward pass."""
        seconds = dealt_s(batch, self._durations, self._ranks)
        self._gathered_s += seconds
        self._device.launch(seconds)  # returns at once: ``EmulatedCompute`` waits, off this thread

    def discard(self) -> None:
        """Forget the launched micro-batches; the device still takes their time."""
        self._gathered_s = 0.0

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Wait for the micro-batches and the optimizer."""
        self._device.finish(self._durations.optimizer_step_s)
        self._step += 1
        train_s, self._gathered_s = self._gathered_s + self._durations.optimizer_step_s, 0.0
        return StepOutcome(True, "", {"loss": 0.0, "emulated/train_s": train_s})

    def snapshot(self) -> "EmulatedSnapshot":
        """A copy of the step's number, which is all there is."""
        return EmulatedSnapshot(self._step, self._export)

    def _export(self, step: int, version: PolicyVersion, now: float) -> str:
        # Not on the device that trains: there it would queue after the next step.
        self._exporting.finish(self._durations.export_s)
        if not self._has_removed_leftovers:
            # Only here, where this trainer holds a lineage: a standby must not remove files that the leader is writing.
            remove_leftovers(self._weights.root)
            self._has_removed_leftovers = True
        return self._weights.export(_tensors(step), {"config.json": CONFIG}, version, step, now)

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment; returns its path or URL."""
        assert isinstance(lineage, Lineage), "claimed from the same store"
        self._device.finish(self._durations.checkpoint_s)
        state = TrainerState(manifest, optimizer={}, rng={}, reader=dict(reader), report=report)
        return self._checkpoints.write(state, self._write_model, lineage)

    def _write_model(self, directory: Path) -> None:
        save_file(_tensors(self._step), directory / WEIGHTS)
        (directory / "config.json").write_text(CONFIG)


@dataclass(frozen=True)
class EmulatedSnapshot:
    """``WeightSnapshot`` of ``step``."""

    step: int
    write: Callable[[int, PolicyVersion, float], str]

    def export(self, version: PolicyVersion, now: float) -> str:
        """Write the weights to the store; returns the sha256 of their manifest."""
        return self.write(self.step, version, now)

    def digests(self) -> dict[str, str]:
        """Empty: there is nothing to compare."""
        return {}


def _tensors(step: int) -> dict[str, Tensor]:
    return {"step": torch.tensor([step], dtype=torch.int64)}


def dealt_s(batch: MicroBatch, durations: TrainingCosts, ranks: int) -> float:
    """Emulated seconds of a micro-batch's forward and backward pass on several ranks, which wait for the slowest."""
    if ranks == 1:
        return forward_backward_s(batch, durations)
    shares = [share for share in deal_rows(batch, range(len(batch.refs)), ranks, batch.packing) if share]
    return max(forward_backward_s(batch.repacked(share), durations) for share in shares)


def forward_backward_s(batch: MicroBatch, durations: TrainingCosts) -> float:
    """Emulated seconds of a micro-batch's forward and backward pass."""
    # a + b sum(L) + c sum(L^2) over the rows' lengths L. If padding counts, every row is as long as the width S. Shared
    # prefixes are computed once.
    rows, width = batch.input_ids.shape  # [B, S]
    tokens, squares = batch.num_tokens, int((batch.lengths.astype("int64") ** 2).sum())
    if durations.padding_counts and batch.packing == "padded":
        tokens, squares = rows * width, rows * width * width
    elif batch.packing == "shared":
        shared = token_order(batch.input_ids, batch.lengths).shared
        tokens, squares = tokens - int(shared.sum()), squares - int((shared**2).sum())
    return (
        durations.forward_backward_s_per_micro_batch
        + durations.forward_backward_s_per_token * tokens
        + durations.forward_backward_s_per_squared_token * squares
    )
