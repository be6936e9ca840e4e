"""One optimizer step: gradients of micro-batches are summed un-normalised, then scaled, clipped and applied.

What the losses average over (sequences or tokens of the whole batch, a deviation of all its rewards) is known only
when the last micro-batch is in. Since a gradient is linear in its loss, the division may come then: each micro-batch
adds the gradient of a plain sum, and ``finish_step`` multiplies the total by one number. Shapes: B rows of S tokens,
of which A rows are active. Knows no bus and no files. Invariants:
- accumulated_micro_batches_equal_one_batch: the step does not depend on how its batch was split;
- what_does_not_fit_counts_for_nothing: after ``OutOfMemory`` sums and metrics are as before; the gradient too, unless
  the error says that it is lost, since memory may run out when half of the layers have theirs;
- a_bad_gradient_changes_nothing: NaN or infinity in loss or gradient, or a norm far above the recent ones, leaves
  weights, moments and step as they were.
"""

import gc
import math
from collections import defaultdict, deque
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from consumers.algorithms.advantages import SCALE_EPSILON
from consumers.algorithms.losses import BatchTotals, CompletionScorer, LossSums, denominator, token_losses
from consumers.algorithms.settings import AlgorithmSettings
from consumers.batching.micro_batches import MicroBatch
from consumers.training.ports import StepOutcome
from consumers.training.settings import TrainingSettings
from schemas.errors import OutOfMemory

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
RECENT_NORMS = "recent_grad_norms"
RECENT_STEPS = 50
MIN_RECENT_STEPS = 10
"""Applied gradient norms whose median a new one is compared with, and how many of them that takes: at the beginning,
and after a warm-up of few steps, norms change by much."""


MAX_SAID = 300
"""Characters of what an allocator says, which may list all of the device's memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; only CUDA's allocator has a class of its own for that."""
    words = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


def learning_rate_at(step: int, settings: TrainingSettings) -> float:
    """Learning rate of the optimizer step that follows ``step`` finished ones."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(settings.max_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / span, 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return settings.learning_rate * factor[settings.lr_schedule]


class PolicyLearner:
    """Model, optimizer and the gradient being gathered. Not safe for two threads at once."""

    def __init__(
        self,
        model: Any,
        reference: Any | None,
        algorithm: AlgorithmSettings,
        training: TrainingSettings,
        max_completion_length: int,
    ) -> None:
        self.model = model
        self.step = 0
        self._algorithm = algorithm
        self._training = training
        self._max_completion_length = max_completion_length
        in_float32 = training.cast_lm_head_to_fp32
        self._scorer = CompletionScorer(model, float32_head=in_float32)
        self._reference = None if reference is None else CompletionScorer(reference, float32_head=in_float32)
        self._optimizer = _adamw(model, training)
        self._recent_norms: deque[float] = deque(maxlen=RECENT_STEPS)
        self._reset_sums()

    def _reset_sums(self) -> None:
        self._sequences = 0  # with at least one trained token
        self._tokens = 0  # trained ones, for the denominator
        self._computed_tokens = 0  # of these, those that had a gradient to be computed
        self._loss = torch.zeros((), device=self.model.device)
        self._sums: dict[str, list[Tensor]] = defaultdict(list)

    def accumulate(self, batch: MicroBatch) -> None:
        """Add the un-normalised gradient of a micro-batch.

        Samples whose advantage is 0 have no gradient unless there is a KL term; they count, but are not computed.

        Raises:
            OutOfMemory: it does not fit; see what_does_not_fit_counts_for_nothing.
        """
        mask = torch.tensor(batch.loss_mask)  # float32 [B, S]
        mask[:, 0] = 0.0  # the first token has nothing before it to be predicted from
        has_tokens = mask.sum(dim=1) > 0  # bool [B]
        active = has_tokens
        if self._algorithm.beta == 0 and not self._training.compute_zero_advantage:
            active = has_tokens & (torch.as_tensor(batch.advantages) != 0)
        if active.any() and (shortage := self._backward(batch, mask, active)) is not None:
            # Raised out here, where no frame of the traceback holds activations; and what is free by now is given
            # back, since pieces of what did not fit would stand in the way of what does.
            if self.model.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            raise shortage
        self._sequences += int(has_tokens.sum())
        self._tokens += int(mask.sum())

    def _backward(self, batch: MicroBatch, mask: Tensor, active: Tensor) -> OutOfMemory | None:
        """Add the gradient of the active rows, or say that memory does not hold them."""
        begun = False
        try:
            sums, mask = self._forward(batch, mask, active)
            begun = True
            sums.loss.backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0][:MAX_SAID]
            return OutOfMemory(
                f"expected a micro-batch of {int(active.sum())} samples, {batch.num_tokens} tokens, to fit into "
                f"memory, got: {said}; lower batching.token_budget or set training.gradient_checkpointing",
                gradient_lost=begun,
            )
        self._loss += sums.loss.detach()
        self._computed_tokens += int(mask.sum())
        for name, value in sums.metrics.items():
            self._sums[name].append(value)
        return None

    def _forward(self, batch: MicroBatch, mask: Tensor, active: Tensor) -> tuple[LossSums, Tensor]:
        """Loss and metrics of the active rows as sums over their trained tokens, and the mask of these rows."""
        device = self.model.device
        # The longest of the rows that are left, which may be shorter than the micro-batch was padded to.
        width = int(torch.as_tensor(batch.lengths)[active].max())

        def rows(array: Any) -> Tensor:
            """[B, S] becomes [A, width], [B] becomes [A]."""
            tensor = torch.as_tensor(array)[active]
            return (tensor[:, :width] if tensor.ndim == 2 else tensor).to(device)

        input_ids, mask, temperatures = rows(batch.input_ids), rows(mask), rows(batch.temperatures)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._training.dtype == "bfloat16"):
            reference = self._reference_logprobs(input_ids, mask, temperatures)
            logprobs, entropy = self._scorer(input_ids, mask, temperatures)  # [A, width] in nats, and a sum
        sums = token_losses(
            self._algorithm, logprobs, rows(batch.behaviour_logprobs), rows(batch.advantages), mask, reference
        )
        return replace(sums, metrics={**sums.metrics, "entropy": entropy.detach()}), mask

    def _reference_logprobs(self, input_ids: Tensor, mask: Tensor, temperatures: Tensor) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference(input_ids, mask, temperatures)[0]

    def discard(self) -> None:
        """Drop the gathered gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        self._reset_sums()

    def finish_step(self, reward_deviation: float) -> StepOutcome:
        """Normalise, clip and apply the gathered gradient; ``reward_deviation`` is of all rewards of the batch."""
        totals = BatchTotals(self._sequences, self._tokens)
        # The loss is the sum of token losses / denominator. With ``scale_rewards="batch"`` the advantages, which were
        # only centred so far, are divided by sd + 1e-4 as well: A / k with k > 0 makes each token loss, a minimum of
        # multiples of A, 1 / k of what it was. (A KL term would not shrink with it; settings refuse the two together.)
        # So one factor turns the gathered gradient into that of the loss.
        scale = 1.0 / denominator(self._algorithm, totals, self._max_completion_length)
        if self._algorithm.scale_rewards == "batch":
            scale /= reward_deviation + SCALE_EPSILON
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = 0.0
        if gradients:
            torch._foreach_mul_(gradients, scale)
            norm = float(nn.utils.get_total_norm(gradients))
        metrics = self._metrics(scale, norm)
        loss = float(self._loss) * scale
        problem = self._problem(loss, norm)
        if not problem:
            self._apply(norm)
        self.discard()
        return StepOutcome(not problem, problem, metrics)

    def _problem(self, loss: float, norm: float) -> str:
        """Why the gradient must not be applied; empty if it may be."""
        if not math.isfinite(loss + norm):
            return f"expected a finite loss and gradient, got {loss} and {norm}"
        factor = self._training.max_grad_norm_ratio
        if not factor or len(self._recent_norms) < MIN_RECENT_STEPS:
            return ""
        usual = max(median(self._recent_norms), self._training.max_grad_norm)  # below that nothing is clipped either
        if norm <= factor * usual:
            return ""
        return f"expected a gradient norm of at most {factor} x {usual:.3g}, got {norm:.6g}"

    def _apply(self, norm: float) -> None:
        self._recent_norms.append(norm)
        # The norm is known already; ``clip_grad_norm_`` would compute it a second time.
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self._training.max_grad_norm, torch.tensor(norm))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, self._training)
        self._optimizer.step()
        self.step += 1

    def _metrics(self, scale: float, norm: float) -> dict[str, float]:
        metrics = {
            "loss": float(self._loss) * scale,
            "grad_norm": norm,
            "optim/lr": learning_rate_at(self.step, self._training),
            "tokens/trained": float(self._tokens),
            "tokens/computed": float(self._computed_tokens),
        }
        if self._sums:
            metrics |= self._token_means()
        return metrics

    def _token_means(self) -> dict[str, float]:
        """Means over the tokens that entered the gradient."""
        mean = {
            name: float(torch.stack(values).sum()) / self._computed_tokens
            for name, values in self._sums.items()
            if not name.endswith(("_min", "_max"))
        }
        named = {
            "ratio": mean["ratio"],
            "entropy": mean["entropy"],
            "mismatch_kl/all/mean": mean["mismatch_kl"],
            "clip_ratio/low_mean": mean["clip_low"],
            "clip_ratio/high_mean": mean["clip_high"],
            "clip_ratio/region_mean": mean["clip_low"] + mean["clip_high"],
            "sampling/importance_sampling_ratio/min": float(torch.stack(self._sums["ratio_min"]).min()),
            "sampling/importance_sampling_ratio/max": float(torch.stack(self._sums["ratio_max"]).max()),
        }
        return named | ({"kl": mean["kl"]} if "kl" in mean else {})

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """AdamW's state as ``<parameter>.<moment>``, on the CPU, and the recent gradient norms."""
        norms = {RECENT_NORMS: torch.tensor(list(self._recent_norms), dtype=torch.float64)}
        return norms | {
            f"{name}.{moment}": self._optimizer.state[parameter][moment].detach().cpu().clone().contiguous()
            for name, parameter in self.model.named_parameters()
            if parameter in self._optimizer.state
            for moment in MOMENTS
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``optimizer_tensors`` gave; parameters it leaves out start afresh."""
        self._recent_norms.extend(tensors.get(RECENT_NORMS, torch.zeros(0)).tolist())
        for name, parameter in self.model.named_parameters():
            if f"{name}.step" in tensors:
                self._optimizer.state[parameter] = {
                    moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS
                }


def _adamw(model: Any, settings: TrainingSettings) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # As usual, biases and the scales of norms are not decayed: pulling those to 0 regularises nothing.
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )
