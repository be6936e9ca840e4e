"""The reward of one trajectory from its raw rewards, or why it has none. Pure."""

from collections.abc import Mapping

from schemas.messages.trajectories import Trajectory


def weighted_reward(trajectory: Trajectory, weights: Mapping[str, float]) -> tuple[float, str | None]:
    """The weighted sum of the rewards that apply (TRL's rule: ``None`` is left out), and what is wrong with it.

    A function without a weight counts once. A trajectory that a function failed on has no reward at all, for its
    siblings were judged by more.
    """
    if trajectory.reward_errors:
        return 0.0, "; ".join(f"reward {name}: {text}" for name, text in sorted(trajectory.reward_errors.items()))
    given = {name: value for name, value in trajectory.rewards.items() if value is not None}
    if not given:
        return 0.0, f"no reward applies, of {sorted(trajectory.rewards)}"
    return sum(weights.get(name, 1.0) * value for name, value in given.items()), None
