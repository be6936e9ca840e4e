"""What each trajectory contributes to a step: loss, ratio, staleness, and its own gradient. Changes no weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from consumers.algorithms.losses import token_losses
from consumers.batching.samples import MicroBatch
from consumers.intake.judging.staleness import staleness
from consumers.replay.rebuilding.scratch_policy import ScratchPolicy
from consumers.replay.steps.batches import Batch
from consumers.training.scoring.logprobs import CompletionScorer
from schemas.identifiers import PolicyVersion


@dataclass(frozen=True)
class Row:
    """One trajectory in a step. ``loss``: its share, so that the shares add up to the step's loss; ratios are of the
    policy at the start of the step over the behaviour policy, over trained tokens; ``tokens``: those trained.
    """

    trajectory_id: str
    partition: int
    offset: int
    reward: float
    advantage: float
    tokens: int
    loss: float
    ratio_mean: float
    ratio_max: float
    staleness: int
    gradient_norm: float | None = None


def measured_rows(
    policy: ScratchPolicy,
    batch: Batch,
    version: PolicyVersion,
    *,
    with_gradients: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """The rows of a step in their order. ``version``: of the weights that the policy holds."""
    scale = policy.scale(batch)
    norms = own_gradient_norms(policy, batch, scale, progress) if with_gradients else {}
    scorer = CompletionScorer(policy.model)
    reference = None if policy.reference is None else CompletionScorer(policy.reference)
    rows: list[Row] = []
    with torch.no_grad():
        for micro_batch in batch.micro_batches:
            rows += _rows(policy, micro_batch, scorer, reference, batch, scale, version, norms)
    return rows


def own_gradient_norms(
    policy: ScratchPolicy, batch: Batch, scale: float, progress: Callable[[str], None] = lambda line: None
) -> dict[str, float]:
    """Norm of each trajectory's share of the step's gradient."""
    names = batch.trajectory_ids
    norms: dict[str, float] = {}
    for number, name in enumerate(names, 1):
        norms[name] = policy.gradient_norm(batch.keeping([name]), scale)
        if number % 16 == 0 or number == len(names):
            progress(f"gradients of {number}/{len(names)} trajectories")
    return norms


def _rows(
    policy: ScratchPolicy,
    micro_batch: MicroBatch,
    scorer: CompletionScorer,
    reference: CompletionScorer | None,
    batch: Batch,
    scale: float,
    version: PolicyVersion,
    norms: dict[str, float],
) -> Iterator[Row]:
    device = policy.device
    mask = torch.tensor(micro_batch.loss_mask)
    mask[:, 0] = 0.0
    input_ids, temperatures = torch.as_tensor(micro_batch.input_ids), torch.as_tensor(micro_batch.temperatures)
    inputs = (input_ids.to(device), mask.to(device), temperatures.to(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=policy.recipe.training.dtype == "bfloat16"):
        logprobs, _ = scorer(*inputs)
        anchored = None if reference is None else reference(*inputs)[0]
    behaviour = torch.as_tensor(micro_batch.behaviour_logprobs).to(device)
    advantages = torch.as_tensor(micro_batch.advantages).to(device)
    for number, ref in enumerate(micro_batch.refs):
        here = slice(number, number + 1)
        sums = token_losses(
            policy.recipe.algorithm,
            logprobs[here],
            behaviour[here],
            advantages[here],
            inputs[1][here],
            None if anchored is None else anchored[here],
        )
        item, tokens = batch.samples[ref.trajectory_id], int(mask[number].sum())
        yield Row(
            *ref,
            reward=batch.rewards[ref.trajectory_id],
            advantage=item.advantage,
            tokens=tokens,
            loss=float(sums.loss) * scale,
            ratio_mean=float(sums.metrics["ratio"]) / max(tokens, 1),
            ratio_max=_finite_or_zero(sums.metrics["ratio_max"], tokens),
            staleness=staleness(item.sample.trajectory, version),
            gradient_norm=norms.get(ref.trajectory_id),
        )


def _finite_or_zero(value: Tensor, tokens: int) -> float:
    return float(value) if tokens else 0.0
