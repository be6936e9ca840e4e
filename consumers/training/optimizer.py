"""AdamW with a gradient that is looked at before it is applied: its state, its norms, its learning rate.

Invariant a_bad_gradient_changes_nothing: NaN or infinity, or a norm far above the recent ones, leaves weights and
moments as they were.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from streamrl.consumers.training.settings import TrainingSettings

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
RECENT_NORMS = "recent_grad_norms"
RECENT_STEPS = 50
MIN_RECENT_STEPS = 10
"""Applied gradient norms whose median a new one is compared with, and how many of them that takes: at the beginning,
and after a warm-up of few steps, norms change by much."""


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
    """Copies of trained parameters in the processor's memory, which AdamW steps in their place.

    What crosses to a CUDA device and back, weights and gradients, is in pinned memory, allocated once; from other
    memory a device copies at a fraction of its speed. Moments never cross. The weights have to be taken anew
    (``take_weights``) when somebody else has changed them.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self.named = [(name, nn.Parameter(_host_memory(parameter))) for name, parameter in trained]
        self._sources, self._own = ([parameter for _, parameter in each] for each in (trained, self.named))
        self._gradients = [_host_memory(parameter) for parameter in self._sources]
        self.take_weights()

    def take_weights(self) -> None:
        """Copy the weights from where the model computes."""
        self._copy(self._sources, self._own)

    def give_weights(self) -> None:
        """Copy the weights back."""
        self._copy(self._own, self._sources)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Copy the gradients; a parameter without one has none here either."""
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
    """Of named parameters. ``max_norm``: gradients are scaled down to it.

    With ``training.optimizer_offload`` its state is in the processor's memory, and so the step is taken there. What is
    looked at and clipped is the gradient on the device, as without.
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
        """Multiply the gathered gradient; its L2 norm then, 0 if there is none."""
        gradients = [parameter.grad for _, parameter in self._named if parameter.grad is not None]
        if not gradients:
            return 0.0
        torch._foreach_mul_(gradients, factor)
        return float(nn.utils.get_total_norm(gradients))

    def problem(self, loss: float, norm: float, max_norm_ratio: float) -> str:
        """Why the gradient must not be applied; empty if it may be. ``max_norm_ratio`` 0: however large it is."""
        if not math.isfinite(loss + norm):
            return f"expected a finite loss and gradient, got {loss} and {norm}"
        if not max_norm_ratio or len(self._recent_norms) < MIN_RECENT_STEPS:
            return ""
        usual = max(median(self._recent_norms), self._max_norm)  # below that nothing is clipped either
        if norm <= max_norm_ratio * usual:
            return ""
        return f"expected a gradient norm of at most {max_norm_ratio} x {usual:.3g}, got {norm:.6g}"

    def apply(self, norm: float, learning_rate: float) -> None:
        """Clip the gathered gradient, whose norm this is, and take the step."""
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
            self._host.give_weights()

    def clear(self) -> None:
        """Drop the gathered gradient."""
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
        """Put back what ``tensors`` gave, of the weights that are there; parameters it leaves out start afresh."""
        if self._host is not None:
            self._host.take_weights()
        self._recent_norms.extend(tensors.get(RECENT_NORMS, torch.zeros(0)).tolist())
        for name, parameter in self._stepped:
            if f"{name}.step" in tensors:
                self._adamw.state[parameter] = {
                    moment: tensors[f"{name}.{moment}"].to(parameter.device) for moment in MOMENTS
                }


def _adamw(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.AdamW:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
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
