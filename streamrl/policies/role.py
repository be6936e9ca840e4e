"""Several policies on one stream as a feature: what coordinator, dispatcher and trainers ask about them."""

from typing import TYPE_CHECKING

from streamrl.settings.features import Feature

if TYPE_CHECKING:
    from streamrl.coordinator.policies import CoordinatorContext, PolicyControl
    from streamrl.producers.dispatch.policies import PolicyDispatch


def _policy_control(context: "CoordinatorContext") -> "PolicyControl":
    from streamrl.policies.coordinating import SeveralPolicyControl

    return SeveralPolicyControl(context)


def _policy_dispatch() -> "PolicyDispatch":
    from streamrl.policies.dispatching import SeveralPolicyDispatch

    return SeveralPolicyDispatch()


FEATURE = Feature(name="policies", policy_control=_policy_control, policy_dispatch=_policy_dispatch)
