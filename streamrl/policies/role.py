"""Several policies on one stream as a feature: what coordinator, dispatcher and trainers ask about them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from streamrl.settings.features import Displays, Feature, LoopHooks, PolicyHooks

if TYPE_CHECKING:
    from pathlib import Path

    import typer
    from rich.text import Text

    from streamrl.consumers.training.session import PartsOf, TrainerContext
    from streamrl.coordinator.policies import CoordinatorContext, PolicyControl
    from streamrl.observability.role_context import Role
    from streamrl.observability.run_state.parts import RunPart
    from streamrl.producers.dispatch.policies import PolicyDispatch
    from streamrl.schemas.control import OperatorAction
    from streamrl.schemas.messages import Message
    from streamrl.weights.series import WantedSeries


def _policy_control(context: "CoordinatorContext") -> "PolicyControl":
    from streamrl.policies.coordinating import SeveralPolicyControl

    return SeveralPolicyControl(context)


def _policy_dispatch() -> "PolicyDispatch":
    from streamrl.policies.dispatching import SeveralPolicyDispatch

    return SeveralPolicyDispatch()


def _lead_trainer(context: "TrainerContext", beat_s: float, parts_of: "PartsOf") -> "Role":
    from streamrl.policies.following_trainer import FollowingTrainer

    return FollowingTrainer(context, beat_s, parts_of=parts_of)


def _wanted_series() -> "WantedSeries":
    from streamrl.policies.splitting import SplitSeries

    return SplitSeries()


def _run_part(run: str) -> "RunPart":
    from streamrl.policies.role_run_part import Instances

    return Instances(run)


def _worker_rows(data: "Mapping[str, Any]", name: int) -> "list[Text]":
    from streamrl.policies.role_terminal import policy_rows

    return policy_rows(data, name)


def _policy_in(message: "Message") -> str | None:
    from streamrl.schemas.control import InstanceState

    return message.policy if isinstance(message, InstanceState) else None


def _commands(app: "typer.Typer") -> None:
    from streamrl.policies.role_commands import register

    register(app)


class _Operators:
    """See ``PolicyOperators``."""

    def instances(self, run: "Path") -> "list[dict[str, Any]]":
        import asyncio

        from streamrl.inspection.diagnostics.connect import connect
        from streamrl.policies.role_attaching import read_instances

        async def read() -> "list[dict[str, Any]]":
            connection = await connect(run, None).with_run()
            return [one.to_json() for one in await read_instances(connection)]

        return asyncio.run(read())

    def split(self, run: "Path", shares: "Mapping[str, float]", reason: str) -> None:
        from streamrl.policies.role_splitting import split

        split(run, None, shares, reason)

    def tell(self, run: "Path", action: "OperatorAction", name: str, reason: str) -> None:
        from streamrl.policies.role_attaching import tell

        tell(run, None, action, name, reason)


FEATURE = Feature(
    name="policies",
    loop=LoopHooks(
        policies=PolicyHooks(_policy_control, _policy_dispatch, _lead_trainer, _wanted_series, _Operators())
    ),
    displays=Displays(part=_run_part, sections=("instances", "arms"), worker_rows=_worker_rows, policy_in=_policy_in),
    commands=_commands,
)
