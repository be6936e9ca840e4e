"""The weight sender as a feature: its process, and its demands on engines and settings."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError
from streamrl.settings.features import (
    ChildProcess,
    ExclusionRule,
    Feature,
    FeatureProcesses,
    FeatureRole,
    LoopHooks,
    Sending,
    SettingsRules,
    StartHooks,
)

if TYPE_CHECKING:
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.settings.tree import Settings
    from streamrl.weights.sending.settings import SenderSettings


def _sender_of(settings: "Settings") -> "SenderSettings":
    from streamrl.weights.sending.settings import SenderSettings

    return settings.section(SenderSettings)


def build_sender(settings: "Settings", context: "ProcessContext") -> "Role":
    """The weight sender over the run's weights store.

    Raises:
        SettingsError: the settings ask for no sender, or workers could not reach it.
    """
    from streamrl.weights.groups import open_group  # which needs torch
    from streamrl.weights.sending.sender import TIMEOUT_S, WeightSender

    sender = _sender_of(settings)
    if sender.backend == "none":
        raise SettingsError('expected sender.backend to name a transport, got "none"; set it for all processes')
    if not sender.port:
        raise SettingsError("expected a fixed sender.port that workers can use, got 0; set it with --sender.port")
    opened = partial(open_group, sender.backend, sender.host, timeout_s=TIMEOUT_S)
    return WeightSender(settings.run.weights_store, sender, opened)


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    # Optional: if the sender is down, workers fetch files.
    wanted = bool(_sender_of(settings).transfer)
    return [ChildProcess("sender", "sender", optional=True, on_trainer_devices=True)] if wanted else []


def _start_options(settings: "Settings") -> Sequence[str]:
    sender = _sender_of(settings)
    if not sender.transfer:
        return []
    from streamrl.bus.embedded.node import free_port

    return [f"--sender.port={sender.port or free_port(sender.host)}"]


def _sending(settings: "Settings") -> Sending | None:
    sender = _sender_of(settings)
    return Sending(sender.transfer, sender.address) if sender.transfer else None


def _is_wanted(settings: "Settings") -> bool:
    return _sender_of(settings).backend != "none"


def _check_settings(settings: "Settings") -> None:
    if (backend := _sender_of(settings).backend) == "none":
        return
    got = None
    if settings.generation.engine != "vllm":
        got = f'generation.engine = "{settings.generation.engine}", which takes weights only from files'
    elif settings.training.backend != "torch":
        got = f'training.backend = "{settings.training.backend}", which has no weights to send'
    elif settings.training.lora.rank:
        got = f"training.lora.rank = {settings.training.lora.rank}: adapters are small and are fetched as files"
    elif _sender_of(settings).host in ("0.0.0.0", "::"):  # noqa: S104 - refused
        got = f'sender.host = "{_sender_of(settings).host}": engines need an address at which they reach the sender'
    if got is not None:
        raise SettingsError(
            f'expected settings that work with sender.backend = "{backend}", got {got}; change one of the two'
        )


FEATURE = Feature(
    name="sender",
    settings=SettingsRules(
        check=_check_settings,
        exclusions=(
            ExclusionRule(
                ("sender.host", "sender.port"),
                ("sender.backend",),
                _is_wanted,
                lambda _: 'sender.backend = "none"',
            ),
        ),
    ),
    processes=FeatureProcesses(
        roles=(
            FeatureRole(
                "sender",
                help="The weight sender: versions straight into vLLM's processes.\n\nNeeded for sender.backend.",
                build=build_sender,
            ),
        ),
        started=_processes,
    ),
    start=StartHooks(options=_start_options),
    loop=LoopHooks(sending=_sending),
)
