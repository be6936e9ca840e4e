"""Graders as a feature: processes that compute slow rewards, between workers and trainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import (
    ChildProcess,
    ExclusionRule,
    Feature,
    FeatureProcesses,
    FeatureRole,
    LoopHooks,
    SettingsRules,
)

if TYPE_CHECKING:
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.producers.grading.settings import GradedRewards
    from streamrl.settings.tree import Settings


def _rewards_of(settings: "Settings") -> "GradedRewards":
    from streamrl.producers.grading.settings import GradedRewards

    return settings.section(GradedRewards)


def build_grader(settings: "Settings", context: "ProcessContext") -> "Role":
    """A grader with the name of its process.

    Raises:
        SettingsError: the settings name no reward function for graders.
    """
    from streamrl.producers.grading.grader import Grader
    from streamrl.producers.rewards.runner import RewardRunner

    rewards = _rewards_of(settings)
    if not rewards.graded:
        raise SettingsError(
            "expected rewards.graded to name the reward functions that graders call, got none; set it in the settings "
            "of all processes of the run"
        )
    return Grader(
        context.bus,
        settings.run.name,
        context.name,
        RewardRunner(rewards, rewards.graded_names),
        concurrency=rewards.concurrency,
        on_tick=context.on_tick,
    )


def _takes_samples(settings: "Settings") -> bool:
    return bool(_rewards_of(settings).graded)


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    rewards = _rewards_of(settings)
    names = map("grader-{}".format, range(rewards.graders if rewards.graded else 0))
    return [ChildProcess(name, "grader", ("--id", name)) for name in names]


FEATURE = Feature(
    name="graders",
    settings=SettingsRules(
        exclusions=(
            ExclusionRule(
                ("rewards.graders",),
                ("rewards.graded",),
                _takes_samples,
                lambda _: "without rewards.graded there are no graders",
            ),
        )
    ),
    processes=FeatureProcesses(
        roles=(
            FeatureRole(
                "grader",
                help="A grader: scores ungraded trajectories.\n\nIt uses the functions of rewards.graded. Graders are "
                "members of one consumer group. Any number of them may run, and each may start or stop at any time.",
                build=build_grader,
                has_id=True,
            ),
        ),
        started=_processes,
    ),
    loop=LoopHooks(takes_samples=_takes_samples),
)
