"""The policy of a trainer over several devices, as the driver on rank 0 uses it: a ``TrainedPolicy`` on all ranks."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamrl.consumers.batching.micro_batches import MicroBatch
from streamrl.consumers.training.checkpoints.catalogue import Lineage
from streamrl.consumers.training.checkpoints.manifest import CheckpointManifest
from streamrl.consumers.training.checkpoints.shards import PiecedTensors, optimizer_files
from streamrl.consumers.training.checkpoints.store import VerifiedCheckpoint
from streamrl.consumers.training.model import as_on_disk
from streamrl.consumers.training.policy import CopiedWeights, LearnerPlan, TrainedPolicy
from streamrl.consumers.training.ports import StepOutcome
from streamrl.consumers.training.ranks.learner import DealingLearner, ShardLearner, open_learner, opening_values
from streamrl.consumers.training.ranks.sharding import (
    GatheredCopy,
    gathered,
    join_ranks,
    leave_ranks,
    offer_meeting,
    rank_device,
    unique_state,
)
from streamrl.consumers.training.ranks.team import StartRank, Team
from streamrl.consumers.training.ranks.wire import RankMessage


class RankedPolicy(TrainedPolicy):
    """The policy on rank 0 of ``training.ranks``. The other ranks are its child processes, and end with it."""

    learner: ShardLearner

    def __init__(self, *made_of: Any, start: StartRank | None = None, **also_of: Any) -> None:
        """As ``TrainedPolicy``; ``start`` starts a rank's process.

        Raises:
            ModelError: there is no model, or there are fewer devices than ranks.
            RankLost: a rank did not start.
        """
        self._start = start
        super().__init__(*made_of, **also_of)
        self._write_optimizer = self.write_parts

    def _open_learner(self, plan: LearnerPlan) -> ShardLearner:
        ranks = plan.training.ranks
        device = rank_device(plan.training, 0)  # first: too few devices are refused before any process is started
        leave_ranks()
        self._team = team = Team(ranks, self._start)
        with team.together():
            meeting = offer_meeting()
            opening = opening_values(plan) | {"ranks": ranks, "port": meeting.port}
            team.send_to_each([RankMessage("open", opening | {"rank": rank}) for rank in range(1, ranks)])
            team.answers()  # each has a device, and so will join
            mesh = join_ranks(meeting, 0, ranks, device)
            learner = open_learner(plan, mesh, partial(DealingLearner, team))
            team.answers()  # each has its shards
        return learner

    def _open_copy(self) -> GatheredCopy:
        return GatheredCopy(torch.float32)

    def _load_optimizer(self, restored: VerifiedCheckpoint) -> None:
        listed = (file.path for file in restored.state.manifest.files)
        paths = [restored.directory / path for path in optimizer_files(listed)]
        with self._team.together():
            self._team.tell("load", paths=[str(path.absolute()) for path in paths])
            self.learner.load_rows(PiecedTensors(paths))

    def speed_metrics(self, tokens: int, seconds: float) -> dict[str, float]:
        """None: what several devices and their links could do together is not measured."""
        return {}

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, distributed over all ranks.

        Raises:
            RankLost: a rank is gone.
            UserError: it does not fit into memory. It cannot be split, since the other ranks are in the middle of it.
        """
        with self._team.together():
            super().accumulate(batch)

    def discard(self) -> None:
        """Drop the accumulated gradient."""
        with self._team.together():
            super().discard()

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Apply the accumulated gradient unless there is a problem with it; clears it in either case."""
        with self._team.together():
            return super().finish_step(reward_deviation)

    def snapshot(self) -> CopiedWeights:
        """The present weights, gathered into the memory of the previous copy."""
        with self._team.together():
            self._request_weights(self._copy.dtype)
            return super().snapshot()

    def checkpoint(
        self, manifest: CheckpointManifest, reader: Mapping[str, Any], report: bytes, lineage: Lineage
    ) -> str:
        """Write a checkpoint of this moment, to which each rank adds a file; returns its path or URL."""
        with self._team.together():
            return super().checkpoint(manifest, reader, report, lineage)

    def close(self) -> None:
        """End the other ranks."""
        self._team.close()
        leave_ranks()

    def _critic_weights(self) -> dict[str, Tensor]:
        return self.learner.gather_critic()

    def _all_tensors(self) -> Mapping[str, Tensor]:
        self._request_weights(torch.float32)
        found = {name: gathered(each, torch.float32).cpu() for name, each in unique_state(self.learner.model).items()}
        self.learner.gather_critic()  # because the other ranks do so too
        return as_on_disk(self.learner.model, found)

    def _request_weights(self, dtype: torch.dtype) -> None:
        self._team.tell("weights", dtype=str(dtype).removeprefix("torch."))

    def write_parts(self, directory: Path) -> None:
        """Write the optimizer's state, one file for each rank, into an existing directory.

        Raises:
            OSError: a rank could not write its file.
        """
        self._team.tell("save", directory=str(directory.absolute()))
        self.learner.write_part(directory)
        for rank, answer in enumerate(self._team.answers(), 1):
            if answer.values["problem"]:
                raise OSError(f"rank {rank}: {answer.values['problem']}")
