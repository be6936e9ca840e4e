"""Feeds TRL's GRPOTrainer with the trajectories of a run. TRL generates nothing, and the run is not affected.

``GRPOTrainer(rollout_func=…)`` asks a function for completions. In TRL 1.x ``rollout_func(prompts, trainer)`` returns
``prompt_ids``, ``completion_ids`` and ``logprobs``, and TRL passes every other field to the reward functions.
``StreamedRollouts`` returns the next complete groups of the stream with their rewards.

TRL's own data set only sets the number of prompts in a batch: give it rows with any text.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from streamrl.datasets import Example, TrajectoryDataset
from streamrl.inspection.diagnostics.connect import connect
from streamrl.schemas.errors import UserError
from streamrl.schemas.trajectories import total_reward
from streamrl.streaming import From

log = structlog.get_logger()

MOST_OPEN = 4096
"""Most incomplete groups in memory. The oldest is dropped first: it may never complete, if a sample was abandoned."""
Rollouts = dict[str, list[Any]]


class StreamedRollouts:
    """A ``rollout_func`` for TRL; each training process needs its own.

    A group is returned whole once all members have arrived, so that TRL's groups are the run's groups. Groups with a
    sample without tokens or without any reward are left out. Each process reads its own partitions and commits under
    ``group``, at least once.

    Args:
        run: see ``streamrl.stream``.
        group: consumer group; a restarted trainer continues after its last commit.
        num_generations: the run's ``loop.num_generations``, which TRL's configuration must share.
        reward_weights: weights by reward name, 1 for rewards that are not named; None: those of the run's settings, or
            1 for each, with a warning, if the run's directory is not on this machine.
        rank: rank of this training process.
        world_size: number of training processes.
        start: ``committed`` continues after the group's last commit, or at the earliest record if it has none;
            ``latest`` skips existing records; see ``streamrl.stream``.
        bootstrap_servers: see ``streamrl.stream``.
    """

    __name__ = "streamed_rollouts"  # TRL logs the function's name

    def __init__(
        self,
        run: str | Path = "",
        *,
        group: str,
        num_generations: int,
        reward_weights: Mapping[str, float] | None = None,
        rank: int = 0,
        world_size: int = 1,
        start: From = "committed",
        bootstrap_servers: str | None = None,
    ) -> None:
        self._examples: Iterable[Example] = TrajectoryDataset(
            run, group=group, rank=rank, world_size=world_size, start=start, bootstrap_servers=bootstrap_servers
        )
        self._num_generations = num_generations
        self._run, self._servers, self._weights = run, bootstrap_servers, reward_weights
        self._groups: Iterator[list[Example]] | None = None

    def __call__(self, prompts: Sequence[Any], trainer: Any = None) -> Rollouts:
        """As many completions as TRL has prompts, group after group; waits until the stream has them.

        In addition to TRL's fields: ``streamed_reward`` (for the reward function of this name), ``group_id``,
        ``version`` (the oldest weights that sampled a token) and ``trajectory_id``.

        Raises:
            UserError: a process's batch is not a whole number of groups, or the run's groups have another size.
        """
        size = self._num_generations
        if len(prompts) % size:
            raise UserError(
                f"expected a multiple of {size} completions per process, because groups of {size} are kept whole, got "
                f"{len(prompts)}; set per_device_train_batch_size and steps_per_generation accordingly"
            )
        if self._weights is None:
            self._weights = _weights_of(self._run, self._servers)
        weights = self._weights
        if self._groups is None:
            self._groups = complete_groups(self._examples, size)
        found = [example for _ in range(len(prompts) // size) for example in next(self._groups)]
        return {
            "prompt_ids": [example["prompt_ids"].tolist() for example in found],
            "completion_ids": [example["completion_ids"].tolist() for example in found],
            "logprobs": [example["sampling_per_token_logps"].tolist() for example in found],
            "streamed_reward": [reward_of(example["rewards"], weights) for example in found],
            "group_id": [example["group_id"] for example in found],
            "version": [example["version"] for example in found],
            "trajectory_id": [example["trajectory_id"] for example in found],
        }


def _weights_of(run: str | Path, servers: str | None) -> Mapping[str, float]:
    """The reward weights in the run's settings; empty, with a warning, if they are not on this machine."""
    found = connect(Path(run) if str(run) else None, servers)
    if found.settings is None:
        log.warning("reward weights are not known, each reward counts 1: name the run's directory, or reward_weights")
    return found.reward_weights


def streamed_reward(completions: Sequence[Any], streamed_reward: Sequence[float | None], **_: Any) -> list[Any]:
    """A function for TRL's ``reward_funcs``: the weighted sum of the rewards that came with each trajectory."""
    return list(streamed_reward)


def reward_of(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """The total reward, as StreamRL's trainer computes it; None if no reward applies."""
    return total_reward({name: value for name, value in rewards.items() if not math.isnan(value)}, weights)


def complete_groups(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    """Complete groups in the order in which their last members arrived, each at most once; members by trajectory id.

    Raises:
        UserError: the groups have another size.
    """
    open_groups: dict[str, dict[str, Example]] = {}
    ended: dict[str, None] = {}
    for example in examples:
        if example["num_generations"] != size:
            raise UserError(
                f"expected groups of {size}, got one of {example['num_generations']}: set num_generations of "
                "GRPOConfig and of StreamedRollouts to the run's loop.num_generations"
            )
        group_id = example["group_id"]
        # Delivery is at least once, so a sample of a group that was already returned may come again.
        if group_id in ended:
            continue
        members = open_groups.setdefault(group_id, {})
        members.setdefault(example["trajectory_id"], example)
        if len(members) == size:
            del open_groups[group_id]
            _remember(ended, group_id)
            found = [members[name] for name in sorted(members)]
            if all(len(each["completion_ids"]) and reward_of(each["rewards"], {}) is not None for each in found):
                yield found
        elif len(open_groups) > MOST_OPEN:
            oldest = next(iter(open_groups))
            log.warning("incomplete group dropped", group=oldest)
            del open_groups[oldest]
            _remember(ended, oldest)


def _remember(ended: dict[str, None], group_id: str) -> None:
    ended[group_id] = None
    if len(ended) > 4 * MOST_OPEN:
        del ended[next(iter(ended))]
