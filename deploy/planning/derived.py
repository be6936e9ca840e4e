"""Settings that follow from measured times: which mode composes a step how, and how large micro-batches pay. Pure."""

from typing import Literal

from deploy.planning.allocation import Composed
from schemas.profiles.training import TrainingCosts

Mode = Literal["synchronous", "stream", "one_step_async", "trajectory_async"]
MODES: tuple[Mode, ...] = ("synchronous", "stream", "one_step_async", "trajectory_async")
OVERHEAD = 0.02
"""Share of a micro-batch's time that may go into launching it."""


def composed(mode: Mode, hand_over_s: float) -> Composed:
    """Seconds of a step; ``hand_over_s``: from its end until workers sample with its weights.

    Only asynchronous modes hide the shorter stage and the hand-over; stream hides the shorter stage at best.
    """
    match mode:
        case "synchronous":
            return lambda generate_s, train_s: generate_s + train_s + hand_over_s
        case "stream":
            return lambda generate_s, train_s: max(generate_s, train_s) + hand_over_s
        case "one_step_async" | "trajectory_async":
            return lambda generate_s, train_s: max(generate_s, train_s, hand_over_s)


def token_budget(costs: TrainingCosts, longest: int, configured: int) -> int:
    """The smallest power of two of tokens that holds the longest sequence and hides a micro-batch's own cost.

    What is configured stays where a micro-batch costs nothing by itself.
    """
    if not costs.forward_backward_s_per_micro_batch or not costs.forward_backward_s_per_token:
        return configured
    launch = costs.forward_backward_s_per_micro_batch / costs.forward_backward_s_per_token
    wanted = max(float(longest), launch * (1 - OVERHEAD) / OVERHEAD)
    return 1 << max(0, (int(wanted) - 1).bit_length())
