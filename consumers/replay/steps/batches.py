"""Groups → the micro-batches of a step: as recorded, or as other settings would have cut them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from consumers.algorithms.advantages import deviation
from consumers.algorithms.credit import Credit, ModelLimits, credit_group, refusal_of
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batcher import MicroBatcher
from consumers.batching.samples import Group, MicroBatch, TrainingSample, collate
from consumers.batching.settings import BatchingSettings
from schemas.errors import UserError
from schemas.messages.reports import RecordRef

Cut = Sequence[Sequence[RecordRef]]


@dataclass(frozen=True)
class Batch:
    """What one step computes with. ``rewards``: shaped, by trajectory; ``left_out``: not in the gradient, and why."""

    micro_batches: tuple[MicroBatch, ...]
    samples: dict[str, TrainingSample]
    rewards: dict[str, float]
    left_out: tuple[tuple[str, str], ...]
    reward_deviation: float

    @property
    def trajectory_ids(self) -> list[str]:
        """Rows in the order in which they enter the gradient."""
        return [ref.trajectory_id for batch in self.micro_batches for ref in batch.refs]

    @property
    def totals(self) -> tuple[int, int]:
        """Trained sequences and tokens, as the learner counts them: a first token is never trained."""
        per_row = [batch.loss_mask[:, 1:].sum(axis=1) for batch in self.micro_batches]
        return sum(int((rows > 0).sum()) for rows in per_row), sum(int(rows.sum()) for rows in per_row)

    def keeping(self, wanted: Iterable[str]) -> "Batch":
        """Only these rows; advantages stay what they are within the whole groups."""
        names = set(wanted)
        kept = tuple(part for batch in self.micro_batches if (part := rows_of(batch, names)) is not None)
        return replace(self, micro_batches=kept)


def as_recorded(groups: Iterable[Group], cut: Cut, algorithm: AlgorithmSettings, limits: ModelLimits) -> Batch:
    """The micro-batches in their recorded order of rows.

    Raises:
        UserError: a recorded row would not be trained under these settings.
    """
    credits = _credits(groups, algorithm, limits)
    samples = _samples(credits)
    if lacking := [ref.trajectory_id for rows in cut for ref in rows if ref.trajectory_id not in samples]:
        reasons = {sample.trajectory.trajectory_id: detail for credit in credits for sample, detail in credit.left_out}
        why = reasons.get(lacking[0], "its group is not trained")
        raise UserError(f"expected {lacking[0]} to be trained under the run's settings, got: {why}")
    return _batch(credits, samples, [collate([samples[ref.trajectory_id] for ref in rows]) for rows in cut])


def as_cut_anew(
    groups: Iterable[Group], algorithm: AlgorithmSettings, batching: BatchingSettings, limits: ModelLimits
) -> Batch:
    """The micro-batches that the trainer would have cut, had the groups come in this order."""
    credits = _credits(groups, algorithm, limits)
    batcher = MicroBatcher(batching)
    cut = [batch for credit in credits for batch in batcher.add(credit.training_samples)]
    return _batch(credits, _samples(credits), [*cut, *batcher.flush()])


def rows_of(batch: MicroBatch, wanted: set[str]) -> MicroBatch | None:
    """The rows of these trajectories at the batch's width; none if there are none."""
    rows = [index for index, ref in enumerate(batch.refs) if ref.trajectory_id in wanted]
    if len(rows) == len(batch.refs):
        return batch
    if not rows:
        return None
    return batch.take(rows)


def _credits(groups: Iterable[Group], algorithm: AlgorithmSettings, limits: ModelLimits) -> list[Credit]:
    """Of the groups that these settings let into a step."""
    credits = [credit_group(group, algorithm, limits) for group in groups]
    return [credit for credit in credits if refusal_of(credit, algorithm) is None]


def _samples(credits: Iterable[Credit]) -> dict[str, TrainingSample]:
    return {item.sample.ref.trajectory_id: item for credit in credits for item in credit.training_samples}


def _batch(credits: list[Credit], samples: dict[str, TrainingSample], cut: list[MicroBatch]) -> Batch:
    rewards: dict[str, float] = {}
    for credit in credits:
        members = [item.sample for item in credit.training_samples] + [sample for sample, _ in credit.left_out]
        members.sort(key=lambda sample: sample.trajectory.sample_index)
        rewards |= {
            sample.ref.trajectory_id: reward for sample, reward in zip(members, credit.rewards.tolist(), strict=True)
        }
    everything = [reward for credit in credits for reward in credit.rewards.tolist()]
    return Batch(
        micro_batches=tuple(cut),
        samples=samples,
        rewards=rewards,
        left_out=tuple((sample.ref.trajectory_id, why) for credit in credits for sample, why in credit.left_out),
        reward_deviation=deviation(np.array(everything, dtype=np.float64)),
    )
