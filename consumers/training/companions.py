"""The models that an algorithm needs besides the policy: a frozen reference, a frozen teacher, a critic that learns.

A critic's weights and moments are stored in the checkpoint with the policy's moments (``Critic.PREFIX``), so that a
resumed or replayed step starts from the same state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.consumers.algorithms.packing import body_of, states_at
from streamrl.consumers.algorithms.settings import AlgorithmSettings
from streamrl.consumers.algorithms.shelf import algorithm_of
from streamrl.consumers.training.attention import prepare
from streamrl.consumers.training.model import load_model, load_reference
from streamrl.consumers.training.optimizer import GuardedAdamW, learning_rate_at
from streamrl.consumers.training.settings import TrainingSettings
from streamrl.schemas.errors import ModelError


class Critic(nn.Module):
    """V(s): a linear head on hidden states, of the policy or of a separate trunk. All values start at 0."""

    PREFIX = "critic."

    def __init__(self, policy: Any, trunk: Any | None, settings: AlgorithmSettings, training: TrainingSettings) -> None:
        super().__init__()
        config = policy.config.get_text_config()
        device = next(policy.parameters()).device
        # Zeros, not random: a fresh critic is the same in every process and in every replay.
        self.head = nn.Parameter(torch.zeros(1, int(config.hidden_size), device=device))
        self.bias = nn.Parameter(torch.zeros(1, device=device))
        self.own_trunk = trunk
        # In a list, so that ``nn.Module`` does not register the policy's weights as the critic's.
        self._policy = [policy]
        self.states_at: Callable[[Tensor, Tensor, Tensor], Tensor] = self._states_at
        """Hidden states [K, H] of K positions (row and column, int64 [K]) of token ids [B, S]."""
        if policy.get_decoder() is policy:
            raise ModelError(
                f"expected a model that gives hidden states without logits, for a critic, got {type(policy).__name__}; "
                "choose an algorithm without a critic"
            )
        self._training = training
        self._peak = settings.critic.learning_rate
        self.optimizer = GuardedAdamW(self.named_parameters(), training, training.max_grad_norm)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Values [B, S], float32. Entry t is the value of the state before token t; 0 where ``mask`` [B, S] is 0.

        ``mask`` is 0 at the first position.
        """
        row, column = torch.nonzero(mask, as_tuple=True)
        # The critic's loss must not train the policy, so no gradient flows into the policy's states.
        with torch.set_grad_enabled(self.own_trunk is not None and torch.is_grad_enabled()):
            states = self.states_at(input_ids, row, column - 1)  # the state before a token is one token back
        with torch.autocast(states.device.type, enabled=False):
            values = (states.float() @ self.head.T).squeeze(-1) + self.bias
        return torch.zeros_like(mask).index_put((row, column), values)

    def _states_at(self, input_ids: Tensor, row: Tensor, column: Tensor) -> Tensor:
        trunk = self._policy[0].get_decoder() if self.own_trunk is None else self.own_trunk
        return states_at(body_of(trunk), self._training.packing, input_ids, row, column)

    def scale(self, factor: float) -> float:
        """Multiply the accumulated gradient; returns its L2 norm afterwards."""
        return self.optimizer.scale(factor)

    def problem(self, loss: float, norm: float) -> str:
        """Why the gradient must not be applied; empty if it may be. Large norms are fine: a new critic learns fast."""
        problem = self.optimizer.problem(loss, norm, 0.0)
        return problem and f"critic: {problem}"

    def take_step(self, norm: float, step: int) -> None:
        """Apply an update of the step that follows ``step`` finished ones."""
        self.optimizer.apply(norm, learning_rate_at(step, self._training, self._peak))

    def clear(self) -> None:
        """Drop the accumulated gradient."""
        self.optimizer.clear()

    def weights(self) -> dict[str, Tensor]:
        """Weights by name, on the CPU."""
        return {
            f"{self.PREFIX}{name}": parameter.detach().cpu().clone().contiguous()
            for name, parameter in self.named_parameters()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state."""
        return self.weights() | {f"{self.PREFIX}{name}": value for name, value in self.optimizer.tensors().items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``tensors`` returned; values that are missing are left unchanged."""
        own = {name.removeprefix(self.PREFIX): value for name, value in tensors.items() if name.startswith(self.PREFIX)}
        for name, parameter in self.named_parameters():
            if name in own:
                parameter.copy_(own[name])
        self.optimizer.load(own)


@dataclass(frozen=True)
class Companions:
    """The models that an algorithm uses besides the policy; None: it needs no such model."""

    reference: Any | None = None
    teacher: Any | None = None
    critic: Critic | None = None


def open_companions(
    policy: Any,
    initial_model: str,
    settings: AlgorithmSettings,
    training: TrainingSettings,
    frozen: Callable[[str, torch.device], Any] = load_reference,
) -> Companions:
    """Load the models that the algorithm needs. ``frozen`` loads a model that is not trained.

    Raises:
        ModelError: a model does not exist, or does not fit the policy.
    """
    algorithm, device = algorithm_of(settings), policy.device
    # Always the initial model, even after a restore: KL(pi || ref) is measured from where the run started.
    reference = None
    if algorithm.needs_reference:
        # With adapters, the policy contains the reference: its base, with the adapters off.
        reference = policy if training.lora.rank else frozen(initial_model, device)
    teacher = _teacher(policy, settings, frozen) if algorithm.has_teacher else None
    critic = None
    if algorithm.has_critic:
        trunk = None
        if settings.critic.trunk == "own":
            whole = load_model(initial_model, device, gradient_checkpointing=training.gradient_checkpointing)
            prepare(whole, training)
            trunk = whole.get_decoder()
        critic = Critic(policy, trunk, settings, training)
    return Companions(reference, teacher, critic)


def _teacher(policy: Any, settings: AlgorithmSettings, frozen: Callable[[str, torch.device], Any]) -> Any:
    path = settings.teacher.path
    if not path:
        raise ModelError(f"expected a model in algorithm.teacher.path for {settings.name}, got none")
    teacher = frozen(path, policy.device)
    theirs, ours = (int(model.config.get_text_config().vocab_size) for model in (teacher, policy))
    if theirs != ours:
        raise ModelError(
            f"expected a teacher with the policy's vocabulary of {ours} tokens, got {theirs} in {path!r}; "
            "choose one of the same family"
        )
    return teacher
