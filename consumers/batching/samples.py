"""What passes from intake to the trainer: samples, groups, and micro-batches as plain arrays. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schemas.messages.reports import RecordRef
from schemas.messages.trajectories import Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One accepted trajectory: where it stands on the topic, its weighted reward, its size as read in bytes."""

    trajectory: Trajectory
    ref: RecordRef
    reward: float
    size_bytes: int

    @property
    def length(self) -> int:
        """Prompt and completion tokens."""
        return len(self.trajectory.prompt_token_ids) + len(self.trajectory.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """The usable samples of one prompt, in the order of their sample index."""

    group_id: str
    created_at: float
    samples: tuple[Sample, ...]

    @property
    def due_step(self) -> int:
        """The earliest optimizer step that may train it, 0 for any."""
        return max((sample.trajectory.due_step for sample in self.samples), default=0)


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A sample with its advantage, which all of its completion tokens share."""

    sample: Sample
    advantage: float


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B sequences of prompt and completion, right-padded to S tokens.

    ``input_ids`` int64 [B, S]; ``attention_mask`` int64 [B, S], 1 on tokens; ``loss_mask`` float32 [B, S], 1 where
    token t is a completion token to be trained; ``behaviour_logprobs`` float32 [B, S], of token t given those before
    it; ``advantages`` float32 [B]; ``lengths`` int64 [B], prompt and completion; ``temperatures`` float32 [B];
    ``refs``: where the B records stand on the topic.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    lengths: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    refs: tuple[RecordRef, ...]

    def take(self, rows: Sequence[int]) -> "MicroBatch":
        """Only these rows, in this order, at the same width."""
        wanted = list(rows)
        return MicroBatch(
            input_ids=self.input_ids[wanted],
            attention_mask=self.attention_mask[wanted],
            loss_mask=self.loss_mask[wanted],
            behaviour_logprobs=self.behaviour_logprobs[wanted],
            advantages=self.advantages[wanted],
            lengths=self.lengths[wanted],
            temperatures=self.temperatures[wanted],
            refs=tuple(self.refs[row] for row in wanted),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths.sum())

    @property
    def padding_share(self) -> float:
        """Share of the B × S positions that hold no token."""
        return 1.0 - self.num_tokens / self.input_ids.size if self.input_ids.size else 0.0


def collate(samples: list[TrainingSample]) -> MicroBatch:
    """Pad samples to the longest of them."""
    lengths = np.array([item.sample.length for item in samples], dtype=np.int64)
    shape = (len(samples), int(lengths.max()))
    input_ids = np.zeros(shape, dtype=np.int64)
    loss_mask: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    behaviour: NDArray[Any] = np.zeros(shape, dtype=np.float32)
    for row, item in enumerate(samples):
        trajectory = item.sample.trajectory
        start, end = len(trajectory.prompt_token_ids), item.sample.length
        input_ids[row, :start] = trajectory.prompt_token_ids
        input_ids[row, start:end] = trajectory.token_ids
        loss_mask[row, start:end] = trajectory.loss_mask
        behaviour[row, start:end] = trajectory.logprobs
    return MicroBatch(
        input_ids=input_ids,
        attention_mask=(np.arange(shape[1]) < lengths[:, None]).astype(np.int64),
        loss_mask=loss_mask,
        behaviour_logprobs=behaviour,
        advantages=np.array([item.advantage for item in samples], dtype=np.float32),
        lengths=lengths,
        temperatures=np.array([item.sample.trajectory.temperature for item in samples], dtype=np.float32),
        refs=tuple(item.sample.ref for item in samples),
    )
