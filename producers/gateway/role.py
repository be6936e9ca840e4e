"""The gateway as a feature: its process, the rules of its settings, and the workers' slots for its requests."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamrl.schemas.errors import SettingsError
from streamrl.schemas.extras import require_extra
from streamrl.settings.features import (
    ChildProcess,
    Feature,
    FeatureProcesses,
    FeatureRole,
    LoopHooks,
    OwnEndpoint,
    SettingsRules,
    StartHooks,
    policy_dispatch,
)

if TYPE_CHECKING:
    import typer

    from streamrl.observability.metrics.families import Family
    from streamrl.observability.role_context import ProcessContext, Role
    from streamrl.observability.tracing.context import ExportSpan, LoggedTraces
    from streamrl.producers.gateway.calls import ServedModel
    from streamrl.producers.gateway.role_tracer import GatewayTracer
    from streamrl.producers.gateway.settings import GatewaySettings
    from streamrl.producers.gateway.text import ChatTokenizer
    from streamrl.producers.gateway.tool_calls import ToolCallParser
    from streamrl.producers.gateway.worker_requests import RequestSlots
    from streamrl.settings.tree import Settings


def _gateway_of(settings: "Settings") -> "GatewaySettings":
    """The ``[gateway]`` section."""
    from streamrl.producers.gateway.settings import GatewaySettings

    return settings.section(GatewaySettings)


def _request_slots(settings: "Settings") -> int:
    """Slots that each worker keeps for gateways' requests."""
    slots = settings.generation.max_num_seqs
    if settings.data.requests_only:
        return slots
    # A quarter, because fewer requests than orders come at a time.
    return max(1, slots // 4) if _gateway_of(settings).enabled else 0


def build_gateway(settings: "Settings", context: "ProcessContext") -> "Role":
    """Build the gateway to the run's workers.

    Raises:
        SettingsError: workers keep no slots for requests, the tool parser does not exist, or a package is missing.
        ModelError: the model has no tokenizer.
    """
    require_extra("gateway", "the gateway")
    from streamrl.consumers.algorithms.settings import lone_refusal
    from streamrl.producers.gateway.app import NoRequestObserver
    from streamrl.producers.gateway.calls import NoCallObserver
    from streamrl.producers.gateway.gateway import Gateway, GatewayObservers
    from streamrl.producers.gateway.role_meters import GatewayMeter, collect
    from streamrl.settings.run_directory import RunDirectory

    if not _request_slots(settings):
        raise SettingsError(
            "expected workers that take requests, got none: set gateway.enabled for gateway and workers"
        )
    gateway = Gateway(
        bus=context.bus,
        run_name=settings.run.name,
        model=_served_model(settings),
        settings=_gateway_of(settings),
        secret=_request_secret(settings),
        directory=RunDirectory(settings.run.path).gateway,
        lone_refusal=lone_refusal(settings.algorithm.name),
        observers=GatewayObservers(
            requests=NoRequestObserver() if context.meters is None else GatewayMeter(context.meters),
            calls=context.tracer or NoCallObserver(),
            on_tick=context.on_tick,
        ),
        policies=policy_dispatch(),
    )
    context.collect(partial(collect, gateway))
    return gateway


def _request_secret(settings: "Settings") -> str:
    """The secret by which the run's gateways and workers authenticate each other."""
    from streamrl.producers.gateway.worker_requests import shared_secret
    from streamrl.schemas.secrets import secret_value
    from streamrl.settings.run_directory import RunDirectory

    given = secret_value(settings.generation.request_secret, "generation", "request_secret")
    return given or shared_secret(RunDirectory(settings.run.path).gateway / "secret")


def _served_model(settings: "Settings") -> "ServedModel":
    from streamrl.producers.gateway.calls import ServedModel

    return ServedModel(settings.run.name, settings.generation.engine, settings.loop, *_conversation(settings))


def _conversation(settings: "Settings") -> "tuple[ChatTokenizer, ToolCallParser]":
    from streamrl.producers.gateway.tool_calls import BUILT_IN, VllmToolCalls

    name = _gateway_of(settings).tool_parser
    if settings.generation.engine == "emulated":
        from streamrl.producers.generation.engines.emulated import FillerChat

        return FillerChat(settings.emulation.lengths.prompt_characters_per_token), BUILT_IN["hermes"]()
    from streamrl.producers.generation.engines.vllm_tools import vllm_tool_parser
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    return tokenizer, BUILT_IN[name]() if name in BUILT_IN else VllmToolCalls(vllm_tool_parser(name, tokenizer))


def _side_work(settings: "Settings") -> "RequestSlots | None":
    from streamrl.producers.gateway.worker_requests import RequestSlots

    slots = _request_slots(settings)
    return RequestSlots(settings.generation.request_host, slots, _request_secret(settings)) if slots else None


def _asks_for_schemas(settings: "Settings") -> bool:
    return _request_slots(settings) > 0  # requesters may ask for JSON that fits a schema; work orders never do


def _processes(settings: "Settings") -> Sequence[ChildProcess]:
    return [ChildProcess("gateway", "gateway", optional=True)] if _gateway_of(settings).enabled else []


def _check_settings(settings: "Settings") -> None:
    if settings.data.requests_only:
        _check_requests_only(settings)
    elif (slots := _request_slots(settings)) >= settings.generation.max_num_seqs:
        raise SettingsError(
            f"expected generation.max_num_seqs ({settings.generation.max_num_seqs}) above the slots for requests, got "
            f"{slots} of those: work orders would have no slot; raise it"
        )


def _check_requests_only(settings: "Settings") -> None:
    if not _gateway_of(settings).enabled:
        raise SettingsError(
            "expected gateway.enabled with data.requests_only, got neither prompts nor a gateway: the run would have "
            "nothing to train on; set gateway.enabled, or set prompts in [data]"
        )
    if settings.lengths.refit == "process":
        raise SettingsError(
            'expected no lengths.refit = "process" with data.requests_only, got it: there are no work orders whose '
            'lengths could be predicted; set "off"'
        )
    if settings.generation.adopt == "idle":
        raise SettingsError(
            'expected no generation.adopt = "idle" with data.requests_only, got it: weights wait for work orders to '
            "end, never for requests; set in_flight or recompute"
        )


def _check_packages(settings: "Settings") -> None:
    if _gateway_of(settings).enabled:
        require_extra("gateway", "gateway.enabled")


def _check_start(settings: "Settings") -> None:
    from streamrl.producers.gateway.listening import listen

    gateway = _gateway_of(settings)
    if gateway.enabled:
        listen(gateway.host, gateway.port).close()


def _start_lines(settings: "Settings") -> Sequence[str]:
    from streamrl.consumers.algorithms.settings import lone_refusal

    gateway = _gateway_of(settings)
    if not (gateway.enabled and gateway.port):
        return []
    lines = [f"gateway http://{gateway.host}:{gateway.port}/v1, model {settings.run.name}"]
    if refusal := lone_refusal(settings.algorithm.name):
        lines.append(f"gateway: a prompt's only completion is not kept for feedback: {refusal}")
    return lines


def _endpoint(settings: "Settings") -> OwnEndpoint:
    gateway = _gateway_of(settings)
    address = f"http://{gateway.host}:{gateway.port}" if gateway.port else ""
    return OwnEndpoint(gateway.enabled, address, settings.run.name, partial(_new_key, settings))


def _new_key(settings: "Settings", holder: str) -> str:
    """A new key for the process ``holder``. Each start makes a new one, since only a key's hash is kept."""
    from streamrl.producers.gateway.keys import KeyFile
    from streamrl.settings.run_directory import RunDirectory

    file = KeyFile(_gateway_of(settings).key_file(RunDirectory(settings.run.path).gateway))
    if any(key.name == holder for key in file.read()):
        file.remove(holder)
    return file.make_key(holder, train=True)


def _open_tracer(run: str, ratio: float, export: "ExportSpan", logged: "LoggedTraces") -> "GatewayTracer":
    from streamrl.producers.gateway.role_tracer import GatewayTracer

    return GatewayTracer(run, ratio, export, logged)


def _families() -> "tuple[Family, ...]":
    from streamrl.producers.gateway.role_meters import FAMILIES

    return FAMILIES


def _commands(app: "typer.Typer") -> None:
    from streamrl.producers.gateway.role_commands import gateway

    app.add_typer(gateway, name="gateway")


FEATURE = Feature(
    name="gateway",
    settings=SettingsRules(check=_check_settings),
    # The role has no help of its own: its command is a group, which also has the commands for keys.
    processes=FeatureProcesses(
        roles=(FeatureRole("gateway", help="", build=build_gateway, tracer=_open_tracer),), started=_processes
    ),
    start=StartHooks(packages=_check_packages, check=_check_start, lines=_start_lines),
    loop=LoopHooks(side_work=_side_work, asks_for_schemas=_asks_for_schemas, endpoint=_endpoint),
    families=_families,
    commands=_commands,
)
