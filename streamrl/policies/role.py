"""Several policies on one stream as a feature: what coordinator, dispatcher and trainers ask about them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamrl.settings.features import Feature

if TYPE_CHECKING:
    from streamrl.consumers.training.session import TrainerContext, TrainerParts
    from streamrl.coordinator.policies import CoordinatorContext, PolicyControl
    from streamrl.observability.role_context import Role
    from streamrl.producers.dispatch.policies import PolicyDispatch


def _policy_control(context: "CoordinatorContext") -> "PolicyControl":
    from streamrl.policies.coordinating import SeveralPolicyControl

    return SeveralPolicyControl(context)


def _policy_dispatch() -> "PolicyDispatch":
    from streamrl.policies.dispatching import SeveralPolicyDispatch

    return SeveralPolicyDispatch()


def _lead_trainer(context: "TrainerContext", beat_s: float, parts_of: "Callable[[bool], TrainerParts]") -> "Role":
    from streamrl.policies.following_trainer import FollowingTrainer

    return FollowingTrainer(context, beat_s, parts_of=parts_of)


FEATURE = Feature(
    name="policies",
    policy_control=_policy_control,
    policy_dispatch=_policy_dispatch,
    lead_trainer=_lead_trainer,
)
