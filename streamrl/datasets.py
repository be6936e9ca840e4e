"""Trajectories of a running loop as a PyTorch data set, for another library's trainer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from streamrl.schemas.trajectories import Trajectory
from streamrl.streaming import From, stream

Example = dict[str, Any]


class TrajectoryDataset(IterableDataset[Example]):
    """An endless data set over a consumer group: each trajectory is delivered to one rank and one loader worker.

    An example has ``prompt_ids`` (int64, P), ``completion_ids`` (int64, T), ``completion_mask`` (int64, T: 1 where a
    token was sampled), ``sampling_per_token_logps`` (float32, T: nats, of the behaviour policy), ``rewards`` (floats by
    name, NaN where a function gave none), ``prompt`` and ``completion`` (text), ``group_id``, ``trajectory_id``,
    ``num_generations``, and ``version`` (the oldest weights that sampled a token; such as ``rloo/1-7`` if an arm of a
    split sampled it). Names are TRL's if TRL has one.

    Args:
        run: see ``streamrl.stream``.
        group: consumer group; a restarted reader continues after its last commit, at least once.
        rank: rank of this training process.
        world_size: number of training processes. A process's loader workers share its partitions.
        start: ``committed`` continues after the group's last commit, or at the earliest record if it has none;
            ``latest`` skips existing records; see ``streamrl.stream``.
        bootstrap_servers: see ``streamrl.stream``.
    """

    def __init__(
        self,
        run: str | Path = "",
        *,
        group: str,
        rank: int = 0,
        world_size: int = 1,
        start: From = "committed",
        bootstrap_servers: str | None = None,
    ) -> None:
        super().__init__()
        self._run, self._group, self._start, self._servers = run, group, start, bootstrap_servers
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Example]:
        """Read until the iterator is dropped.

        Raises:
            UserError: see ``streamrl.stream``.
        """
        worker = get_worker_info()
        workers, number = (1, 0) if worker is None else (worker.num_workers, worker.id)
        trajectories = stream(
            self._run,
            start=self._start,
            group=self._group,
            rank=self._rank * workers + number,
            world_size=self._world_size * workers,
            bootstrap_servers=self._servers,
        )
        with asyncio.Runner() as runner:

            async def next_trajectory() -> Trajectory | None:
                return await anext(trajectories, None)

            try:
                while (trajectory := runner.run(next_trajectory())) is not None:
                    yield example_of(trajectory)
            finally:
                runner.run(trajectories.aclose())


def example_of(trajectory: Trajectory) -> Example:
    """A trajectory as an example for a trainer, with tensors."""
    return {
        "prompt_ids": torch.tensor(trajectory.prompt_token_ids, dtype=torch.int64),
        "completion_ids": torch.tensor(trajectory.token_ids, dtype=torch.int64),
        "completion_mask": torch.tensor(trajectory.loss_mask, dtype=torch.int64),
        "sampling_per_token_logps": torch.tensor(trajectory.logprobs, dtype=torch.float32),
        "rewards": {name: float("nan") if value is None else value for name, value in trajectory.rewards.items()},
        "prompt": trajectory.prompt_text,
        "completion": trajectory.completion_text,
        "group_id": trajectory.group_id,
        "trajectory_id": trajectory.trajectory_id,
        "num_generations": trajectory.num_generations,
        "version": trajectory.named(trajectory.oldest_version),
    }
