"""What the simulation moves around: groups with their lengths, and the plant that works on them. Pure data."""

from dataclasses import dataclass, field
from typing import Protocol

from consumers.batching.settings import BatchingSettings
from producers.dispatch.settings import DispatchSettings
from producers.dispatch.window.drafts import Draft
from producers.lengths.predictor import LengthPredictor
from schemas.profiles.decode import DecodeCurve
from schemas.profiles.training import TrainingCosts
from schemas.settings import LoopSettings


@dataclass(frozen=True, slots=True)
class Work:
    """A group: tokens of its prompt and of each completion."""

    group_id: str
    position: int
    prompt_tokens: int
    lengths: tuple[int, ...]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all its completions."""
        return sum(self.lengths)


class Supply(Protocol):
    """Prompts by position, what is predicted of them, and what becomes of them."""

    @property
    def predictor(self) -> LengthPredictor:
        """What the dispatcher estimates lengths with, and teaches."""
        ...

    def draft(self, position: int) -> Draft:
        """The prompt at a position with the estimate of now."""
        ...

    def work(self, draft: Draft) -> Work:
        """What sampling it takes."""
        ...


@dataclass(frozen=True)
class Latencies:
    """What passes between two acts beside the acts themselves, in emulated seconds.

    ``turn_s``: from news until the dispatcher has decided; ``order_s``: from there until the worker's engine has the
    group; ``sample_s``: from a finished completion until trainer and dispatcher know of it; ``announce_s``: from a
    finished step until workers have fetched its weights; ``report_s``: until the dispatcher knows of the step;
    ``adopted_s``: from adoption until the dispatcher knows of it; ``trajectory_s``: the trainer's own work on a
    trajectory; ``step_s``: its own work on a step.
    """

    turn_s: float = 0.0
    order_s: float = 0.0
    sample_s: float = 0.0
    announce_s: float = 0.0
    report_s: float = 0.0
    adopted_s: float = 0.0
    trajectory_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Plant:
    """Workers and trainers as planned; seconds are emulated ones. ``trainers`` share a step's micro-batches.

    ``dispatch_curve``: what the dispatcher knows of the workers, in seconds of the wall clock, of which each lasts
    ``time_scale`` emulated ones.
    """

    loop: LoopSettings
    dispatch: DispatchSettings
    workers: int
    slots: int
    curve: DecodeCurve
    dispatch_curve: DecodeCurve
    costs: TrainingCosts
    time_scale: float = 1.0
    trainers: int = 1
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    checkpoint_every: int = 1 << 30
    steps: int = 8
    latencies: Latencies = field(default_factory=Latencies)
