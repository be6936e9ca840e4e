"""Environments as a feature: the process that plays them through a gateway."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import (
    ChildProcess,
    Feature,
    FeatureProcesses,
    FeatureRole,
    OwnEndpoint,
    SettingsRules,
    StartHooks,
    first_of,
    policy_dispatch,
)

if TYPE_CHECKING:
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.producers.environments.settings import EnvironmentSettings
    from streamrl.schemas.starts import RunInput
    from streamrl.settings.tree import Settings


def _environments_of(settings: "Settings") -> "EnvironmentSettings":
    from streamrl.producers.environments.settings import EnvironmentSettings

    return settings.section(EnvironmentSettings)


def _endpoint(settings: "Settings") -> OwnEndpoint | None:
    """The endpoint of the run's own gateway, if this tree has the gateway feature."""
    return first_of(lambda feature: feature.loop.endpoint(settings))


def _gateway_address(wanted: "EnvironmentSettings", own: OwnEndpoint | None) -> str:
    """The address of the gateway that the environments are played through.

    Raises:
        SettingsError: there is no gateway, or its port is known only after the start.
    """
    if wanted.gateway:
        return wanted.gateway
    if own is None or not own.is_enabled:
        raise SettingsError(
            "expected gateway.enabled with environments.names, got no gateway to play them through; set it, or set "
            "environments.gateway and environments.api_key"
        )
    if not own.address:
        raise SettingsError(
            "expected a fixed gateway.port with environments.names, got 0; set it, or set environments.gateway"
        )
    return own.address


def build_environments(settings: "Settings", context: "ProcessContext") -> "Role":
    """Build the process that plays the run's environments.

    Raises:
        SettingsError: the settings name no environment, or there is no gateway to play them through.
    """
    from streamrl.consumers.algorithms.settings import lone_refusal
    from streamrl.producers.environments.driver import Door, Environments
    from streamrl.schemas.secrets import secret_value

    wanted, own = _environments_of(settings), _endpoint(settings)
    if not wanted.names:
        raise SettingsError("expected environments.names, got none; set it, for example to '[\"calculator\"]'")
    address = _gateway_address(wanted, own)
    key = secret_value(wanted.api_key, "environments", "api_key")
    if key is None:
        if own is None:
            raise SettingsError("expected environments.api_key with environments.gateway, got none; set it")
        key = own.new_key("environments")
    return Environments(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=wanted,
        door=Door(address.rstrip("/"), key, own.model if own is not None else settings.run.name),
        learns_alone=not lone_refusal(settings.algorithm.name),
        on_tick=context.on_tick,
        policies=policy_dispatch(),
    )


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    if not _environments_of(settings).names:
        return []
    # A run that trained only on its prompts would not be what the user asked for.
    return [ChildProcess("environments", "environments")]


def _check_settings(settings: "Settings") -> None:
    wanted = _environments_of(settings)
    if wanted.names:
        _gateway_address(wanted, _endpoint(settings))


async def _try_out(settings: "Settings") -> str | None:
    wanted = _environments_of(settings)
    if not wanted.names:
        return None
    from streamrl.producers.environments.driver import try_environments
    from streamrl.producers.environments.made_up_policy import ANSWER

    rewards = await try_environments(wanted)
    played = ", ".join(f"{name} {reward:g}" for name, reward in rewards.items())
    return f"one episode of each was played with a made-up policy that says {ANSWER!r}; rewards: {played}"


def _inputs(settings: "Settings") -> "list[RunInput]":
    """The environments' code, and everything that the settings say of their tasks."""
    from streamrl.producers.environments.shipped import SHIPPED
    from streamrl.schemas.fingerprints import code_fingerprint, package_version, text_fingerprint
    from streamrl.schemas.starts import RunInput

    wanted = _environments_of(settings)
    libraries = {"verifiers", "openenv"}

    def source(name: str) -> str | None:
        library = name.partition(":")[0]
        if name in SHIPPED or library in libraries:
            return package_version(library if library in libraries else "streamrl")
        return code_fingerprint(name)

    rules = wanted.model_dump_json(include={"options", "max_turns"}, exclude_defaults=True)
    return [
        RunInput(f"environment {name}", None if (code := source(name)) is None else f"{code} {text_fingerprint(rules)}")
        for name in wanted.names
    ]


FEATURE = Feature(
    name="environments",
    settings=SettingsRules(check=_check_settings),
    processes=FeatureProcesses(
        roles=(
            FeatureRole(
                "environments", help="The environments: tasks played through the gateway.", build=build_environments
            ),
        ),
        started=_processes,
    ),
    start=StartHooks(try_out=_try_out, inputs=_inputs),
)
