"""AdamW that checks each gradient before applying it: its state, gradient norms, and learning rate.

Invariant a_bad_gradient_changes_nothing: NaN or infinity, or a norm far above the recent ones, leaves weights and
moments unchanged.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from streamrl.consumers.training.settings import TrainingSettings

ADAM_EPSILON = 1e-8
"""Added to the root of AdamW's second moment; the value of the paper and of torch."""
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
RECENT_NORMS = "recent_grad_norms"
RECENT_STEPS = 50
MIN_RECENT_STEPS = 10
"""A new gradient norm is compared with the median of up to ``RECENT_STEPS`` applied ones, from ``MIN_RECENT_STEPS`` on:
at the start, and after a short warm-up, norms change a lot."""


def learning_rate_at(step: int, settings: TrainingSettings, peak: float | None = None) -> float:
    """Learning rate of the optimizer step that follows ``step`` finished ones; ``peak`` None: the policy's."""
    peak = settings.learning_rate if peak is None else peak
    if step < settings.warmup_steps:
        return peak * (step + 1) / settings.warmup_steps
    span = max(settings.max_steps - settings.warmup_steps, 1)
    progress = min((step - settings.warmup_steps) / span, 1.0)
    factor = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return peak * factor[settings.lr_schedule]


class HostParameters:
    """Copies of trained parameters in the processor's memory; AdamW updates these instead of the originals.

    Weights and gradients are copied between them and a CUDA device through pinned memory, allocated once: copies from
    other memory are several times slower. Moments are never copied. Call ``copy_from_model`` again after other code has
    changed the weights.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.named = [(name, nn.Parameter(_host_memory(parameter))) for name, parameter in trained]
        self._sources, self._own = ([parameter for _, parameter in each] for each in (trained, self.named))
        self._gradients = [_host_memory(parameter) for parameter in self._sources]
        self.copy_from_model()

    def copy_from_model(self) -> None:
        """Copy the weights from the model."""
        self._copy(self._sources, self._own)

    def copy_to_model(self) -> None:
        """Copy the weights back to the model."""
        self._copy(self._own, self._sources)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the gradients from the model; a parameter without one has none here either."""
        for source, own, memory in zip(self._sources, self._own, self._gradients, strict=True):
            own.grad = None if source.grad is None else memory.copy_(source.grad, non_blocking=True)
        self._await_copies()

    @torch.no_grad()
    def _copy(self, origins: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for origin, target in zip(origins, targets, strict=True):
            target.copy_(origin, non_blocking=True)
        self._await_copies()

    def _await_copies(self) -> None:
        if any(source.is_cuda for source in self._sources):
            torch.cuda.synchronize()


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda, requires_grad=False)


class GuardedAdamW:
    """AdamW over named parameters. ``max_norm``: larger gradients are scaled down to it.

    With ``training.optimizer_offload`` its state is in the processor's memory, and the step is taken there. The
    gradient is checked and clipped on the device in either case.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], training: TrainingSettings, max_norm: float) -> None:
        self._named = list(named)
        self._training = training
        self._max_norm = max_norm
        self._host = HostParameters(self._named) if training.optimizer_offload else None
        self._stepped = self._named if self._host is None else self._host.named
        self._adamw = _adamw([parameter for _, parameter in self._stepped], training)
        self._recent_norms: deque[float] = deque(maxlen=RECENT_STEPS)

    def scale(self, factor: float) -> float:
        """Multiply the accumulated gradient; returns its L2 norm afterwards, 0 if there is no gradient."""
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        if not gradients:
            return 0.0
        torch._foreach_mul_(gradients, factor)
        return float(nn.utils.get_total_norm(gradients))

    def problem(self, loss: float, norm: float, max_norm_ratio: float) -> str:
        """Why the gradient must not be applied; empty if it may be. ``max_norm_ratio`` 0: any finite norm is fine."""
        if not math.isfinite(loss + norm):
            return f"expected a finite loss and gradient, got {loss} and {norm}"
        if not max_norm_ratio or len(self._recent_norms) < MIN_RECENT_STEPS:
            return ""
        usual = max(median(self._recent_norms), self._max_norm)  # a norm below max_norm is not even clipped
        if norm <= max_norm_ratio * usual:
            return ""
        return f"expected a gradient norm of at most {max_norm_ratio} x {usual:.3g}, got {norm:.6g}"

    def apply(self, norm: float, learning_rate: float) -> None:
        """Clip the accumulated gradient, which has this norm, and take the step."""
        self._recent_norms.append(norm)
        # The norm is known already; ``clip_grad_norm_`` would compute it a second time.
        parameters = [parameter for _, parameter in self._named]
        nn.utils.clip_grads_with_norm_(parameters, self._max_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        if self._host is not None:
            self._host.take_gradients()
        self._adamw.step()
        if self._host is not None:
            self._host.copy_to_model()

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        for _, parameter in self._named:
            parameter.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """AdamW's state as ``<parameter>.<moment>``, on the CPU, and the recent gradient norms."""
        norms = {RECENT_NORMS: torch.tensor(list(self._recent_norms), dtype=torch.float64)}
        return norms | {
            f"{name}.{moment}": self._adamw.state[parameter][moment].detach().cpu().clone().contiguous()
            for name, parameter in self._stepped
            if parameter in self._adamw.state
            for moment in MOMENTS
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``tensors`` returned, for the model's present weights; missing parameters get fresh state."""
        if self._host is not None:
            self._host.copy_from_model()
        self._recent_norms.extend(tensors.get(RECENT_NORMS, torch.zeros(0)).tolist())
        for name, parameter in self._stepped:
            if f"{name}.step" in tensors:
                self._adamw.state[parameter] = {
                    moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS
                }


def _adamw(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    # As usual, biases and the scales of norms are not decayed: decaying them to 0 does not regularise.
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=ADAM_EPSILON,
        fused=True,
    )
