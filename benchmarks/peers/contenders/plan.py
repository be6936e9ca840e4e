"""What all contenders have in common: policy, prompts, hyper-parameters, cores and time. Plain data, also as JSON."""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from streamrl.demo.task import ANSWER_PATTERN, MAX_COMPLETION_TOKENS, MAX_PROMPT_TOKENS


@dataclass(frozen=True)
class Hyperparameters:
    """The same for everybody, under TRL's names; the defaults are the demo's, for half of its steps."""

    groups_per_step: int = 16
    num_generations: int = 8
    max_completion_length: int = MAX_COMPLETION_TOKENS
    max_prompt_length: int = MAX_PROMPT_TOKENS
    temperature: float = 1.0
    learning_rate: float = 1e-4
    adam_beta2: float = 0.99
    warmup_steps: int = 5
    max_grad_norm: float = 1.0
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    beta: float = 0.0
    loss_type: str = "dapo"
    scale_rewards: str = "none"
    max_steps: int = 120
    dtype: str = "float32"


@dataclass(frozen=True)
class Plan:
    """One run of one contender. ``limit_s``: it is stopped after so much wall-clock; ``cores``: all it may use.

    ``reward`` and ``answer_pattern``: the same function, by its path and by what it is made of.
    """

    policy: Path
    prompts: Path
    output: Path
    seed: int
    cores: tuple[int, ...]
    limit_s: float
    save_every: int = 5
    hyperparameters: Hyperparameters = field(default_factory=Hyperparameters)
    reward: str = "benchmarks.peers.tasks:verified"
    answer_pattern: str = ANSWER_PATTERN
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def into(self, output: Path) -> "Plan":
        """The same with another place for what it leaves behind."""
        return replace(self, output=output)

    def as_json(self) -> dict[str, Any]:
        """In JSON's types."""
        return asdict(self) | {name: str(getattr(self, name)) for name in ("policy", "prompts", "output")}


@dataclass(frozen=True)
class Saved:
    """Weights after an optimizer step, and the seconds from the command's start to that moment."""

    step: int
    seconds: float
    weights: Path


@dataclass(frozen=True)
class Trained:
    """A contender's run: what it saved, measures of its own by step (rewards, lengths), processor time of all of it."""

    contender: str
    seed: int
    saved: tuple[Saved, ...]
    steps: tuple[dict[str, float], ...]
    finished: bool
    cpu_seconds: float
