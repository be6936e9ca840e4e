"""The composition root: builds each role from the settings and what its process hands it; here ports meet adapters.

A role is imported when it is built: each process has one, and what the others need takes it seconds of a start (an HTTP
server, a planner) or half a gigabyte (torch). The trainer is built in ``deploy.wiring.trainer``, apart.
"""

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from streamrl.deploy.wiring.context import ProcessContext
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.secrets import revealed
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings, decode_curve, request_slots, worker_curves

if TYPE_CHECKING:
    from streamrl.coordinator.coordinator import Coordinator, FleetScaling
    from streamrl.producers.dispatch.dispatcher import Dispatcher
    from streamrl.producers.evaluation.state import HeldOutPrompts
    from streamrl.producers.gateway.text import ChatTokenizer
    from streamrl.producers.gateway.tool_calls import ToolCallParser
    from streamrl.producers.generation.engines.port import Engine, Tokenizer
    from streamrl.producers.generation.rollout import RewardScorer
    from streamrl.producers.generation.side_work import SideWorkFactory
    from streamrl.producers.generation.worker import GenerationWorker
    from streamrl.producers.grading.grader import Grader
    from streamrl.producers.lengths.predictor import SampleLength
    from streamrl.weights.relay.server import Relay


class Role(Protocol):
    """What every role is, once built."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until stopped."""
        ...


@runtime_checkable
class StandbyRole(Role, Protocol):
    """One that does nothing while another does the work."""

    def take_over(self) -> None:
        """The other is gone."""
        ...


def build_role(role: str, settings: Settings, context: ProcessContext) -> Role:
    """The role of that name.

    Raises:
        UserError: there is no such role, or its settings, its data or its model are not what it needs.
    """
    match role:
        case "dispatcher":
            return build_dispatcher(settings, context)
        case "worker":
            return build_worker(settings, context)
        case "trainer":
            from streamrl.deploy.wiring import trainer

            return trainer.build_leading(settings, context)
        case "standby":
            from streamrl.deploy.wiring import trainer

            return trainer.build_standby(settings, context)
        case "coordinator":
            return build_coordinator(settings, context)
        case "relay":
            return build_relay(settings, context)
        case "sender":
            return build_sender(settings, context)
        case "evaluator":
            return build_evaluator(settings, context)
        case "ranker":
            return build_ranker(settings, context)
        case "grader":
            return build_grader(settings, context)
        case "gateway":
            return build_gateway(settings, context)
        case "environments":
            return build_environments(settings, context)
        case _:
            raise UserError(
                "expected one of worker, trainer, standby, dispatcher, evaluator, grader, ranker, gateway, "
                f"environments, coordinator, relay, sender, got {role!r}"
            )


def build_coordinator(settings: Settings, context: ProcessContext) -> "Coordinator":
    """The coordinator; it announces the relays that it hears, and those that the settings name.

    Raises:
        SettingsError: no relay is named, so no worker could ever fetch weights.
    """
    from streamrl.coordinator.coordinator import Coordinator, LastEvaluation

    relays = settings.coordinator.relays
    if not relays:
        if not settings.relay.port:
            raise SettingsError(
                "expected coordinator.relays to name the relays, got none; set it, or relay.port of the one relay"
            )
        # Without a list there is one relay, at the address of its own section.
        relays = (f"http://{settings.relay.host}:{settings.relay.port}",)
    # Sections are frozen: the relays that were worked out go into a copy.
    coordinator = settings.coordinator.model_copy(update={"relays": relays})
    evaluation = settings.evaluation
    due = partial(evaluation.newest_due, exported_every=settings.training.weight_sync_steps)
    last = LastEvaluation(due, evaluation.patience_s) if evaluation.data else None
    return Coordinator(
        context.bus,
        settings.run.name,
        coordinator,
        heartbeat_timeout_s=settings.loop.heartbeat_timeout_s,
        on_tick=context.on_tick,
        scaling=_scaling(settings),
        evaluation=last,
    )


def _scaling(settings: Settings) -> "FleetScaling | None":
    """None unless the run may have more workers than it starts with."""
    from streamrl.coordinator.coordinator import FleetScaling
    from streamrl.coordinator.scaling import FleetBounds

    if settings.run.max_workers is None:
        return None
    bounds = FleetBounds(settings.run.workers, settings.run.max_workers)
    return FleetScaling(bounds, settings.scaling, overlaps=settings.loop.staleness_bound > 0)


def build_relay(settings: Settings, context: ProcessContext) -> "Relay":
    """The relay over the run's weights store, or over copies of what other relays have.

    Raises:
        SettingsError: copies are to lie where the trainer's store is, or others could not reach it.
    """
    from streamrl.weights.relay.copies import RelayCopies
    from streamrl.weights.relay.server import Relay
    from streamrl.weights.relay.tier import open_tier
    from streamrl.weights.store import WeightStore

    relay, root = settings.relay, settings.run.weights_store
    store, copies = WeightStore(root, relay.lease_s), None
    if relay.store is not None:
        if relay.store.absolute() == root.absolute():
            raise SettingsError(
                f"expected relay.store to be a directory of the relay's own, got {relay.store}, where the trainer "
                "writes; name another, or leave it out: then this relay serves the trainer's store"
            )
        copies = RelayCopies(relay.store / settings.run.name, relay.keep_versions, relay.lease_s)
    if not relay.port:
        raise SettingsError("expected relay.port to be one that others can be told, got 0; set it with --relay.port")
    tier = open_tier(context.bus, settings.run.name, relay, store, copies, settings.loop.heartbeat_timeout_s)

    def store_of_arm(arm: str) -> WeightStore:
        return WeightStore(settings.run.weights_store_of(arm), relay.lease_s)

    return Relay(store, relay, context.on_response, copies, tier, None if copies is not None else store_of_arm)


def build_sender(settings: Settings, context: ProcessContext) -> Role:
    """The weight sender over the run's weights store.

    Raises:
        SettingsError: there is to be none, or workers could not reach it.
    """
    from streamrl.weights.groups import open_group  # which needs torch
    from streamrl.weights.sender import WeightSender

    sender = settings.sender
    if sender.backend == "none":
        raise SettingsError("expected sender.backend to say how weights are sent, got none; set it for all processes")
    if not sender.port:
        raise SettingsError("expected sender.port to be one that workers can be told, got 0; set it with --sender.port")
    opened = partial(open_group, sender.backend, sender.host, timeout_s=sender.timeout_s)
    return WeightSender(settings.run.weights_store, sender, opened)


def build_dispatcher(settings: Settings, context: ProcessContext) -> "Dispatcher":
    """The dispatcher over the prompts that the settings name.

    Raises:
        DataError: there are no such prompts.
    """
    from streamrl.producers.dispatch.dispatcher import Dispatcher
    from streamrl.producers.lengths.startup import build_predictor
    from streamrl.producers.prompts.sources import open_source

    dispatcher = Dispatcher(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.dispatch,
        source=open_source(settings.data, run_seed=settings.run.seed),
        predictor=build_predictor(settings.lengths, settings.loop, _trace(settings)),
        seed=_sampling_seed(settings),
        curve=decode_curve(settings),
        curves=worker_curves(settings),
        # The oldest checkpoint that is kept was written so many intervals ago, less than one of them unfinished.
        history_steps=settings.training.keep_checkpoints * settings.training.checkpoint_every,
        on_tick=context.on_tick,
        has_graders=bool(settings.rewards.graded),
    )
    # Given the method and not its answer: metrics ask for it at each collection.
    context.watch_status(dispatcher.status)
    return dispatcher


def build_evaluator(settings: Settings, context: ProcessContext) -> Role:
    """The evaluator over the held-out sets that the settings name.

    Raises:
        SettingsError: they name none.
    """
    from streamrl.producers.evaluation.evaluator import Evaluator

    if not settings.evaluation.data:
        raise SettingsError("expected held-out prompts, got none: name a set, such as [evaluation.data.held_out]")
    return Evaluator(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.evaluation,
        dispatch=settings.dispatch,
        held_out=partial(_held_out, settings),
        weights=settings.rewards.weight_by_name,
        metrics=RunDirectory(settings.run.path).metrics,
        seed=_sampling_seed(settings),
        on_tick=context.on_tick,
    )


def _held_out(settings: Settings) -> "HeldOutPrompts":
    from streamrl.producers.evaluation.state import HeldOutPrompts
    from streamrl.producers.prompts.sources import first_prompts, open_source

    sources = {name: open_source(data, run_seed=settings.run.seed) for name, data in settings.evaluation.data.items()}
    wanted = settings.evaluation.prompts
    return HeldOutPrompts.of({name: first_prompts(source, wanted) for name, source in sources.items()})


def build_grader(settings: Settings, context: ProcessContext) -> "Grader":
    """A grader under the name of its process.

    Raises:
        SettingsError: no reward is for graders.
    """
    from streamrl.producers.grading.grader import Grader
    from streamrl.producers.rewards.runner import RewardRunner

    rewards = settings.rewards
    if not rewards.graded:
        raise SettingsError(
            "expected rewards.graded to name the reward functions that graders call, got none; set it for all "
            "processes of the run"
        )
    return Grader(
        context.bus,
        settings.run.name,
        context.name,
        RewardRunner(rewards, rewards.graded_names),
        attempts=rewards.grading_attempts,
        concurrency=rewards.concurrency,
        on_tick=context.on_tick,
    )


def build_ranker(settings: Settings, context: ProcessContext) -> Role:
    """The ranker, which makes newer models of lengths for the dispatcher's predictor.

    Raises:
        SettingsError: the predictor has no model that could be made.
    """
    from streamrl.producers.lengths.ranker import Ranker, build_model_trainer  # its language model needs torch

    model_trainer = build_model_trainer(settings.lengths, settings.loop)
    return Ranker(context.bus, settings.run.name, model_trainer, on_tick=context.on_tick)


def _trace(settings: Settings) -> "SampleLength | None":
    """The lengths that emulated workers will produce."""
    from streamrl.producers.generation.engines.length_trace import trace_length

    # A real engine's lengths are known to nobody before they are sampled.
    return partial(trace_length, settings.emulation.lengths) if settings.generation.engine == "emulated" else None


def _sampling_seed(settings: Settings) -> int | None:
    """None for vLLM, which draws seeded requests one by one; our own engine draws all rows at once in any case."""
    return settings.run.seed if settings.generation.engine == "transformers" else None


def build_worker(settings: Settings, context: ProcessContext) -> "GenerationWorker":
    """A worker under the name of its process, around a model or around what stands in for one.

    Raises:
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    from streamrl.consumers.training.identity_store import IdentityFile
    from streamrl.producers.generation.worker import GenerationWorker, RunContext
    from streamrl.schemas.identifiers import partition_of_worker
    from streamrl.weights.fetch import WeightsFetcher

    engine, tokenizer, rewards = (_emulated_worker if settings.generation.engine == "emulated" else _modelled)(settings)
    if settings.data.requests_only:
        rewards = _no_rewards()
    return GenerationWorker(
        bus=context.bus,
        context=RunContext(
            settings.run.name,
            settings.loop,
            settings.generation,
            run_id=IdentityFile(settings.run.path).run_id,
            has_graders=bool(settings.rewards.graded),
        ),
        worker_id=context.name,
        # Wrapped out here, so that a worker does not know whether it is traced.
        engine=context.around_engine(engine),
        tokenizer=tokenizer,
        rewards=rewards,
        fetcher=WeightsFetcher(
            weights_cache(settings),
            settings.generation.fetch_timeout_s,
            offset=partition_of_worker(context.name),  # workers start at different relays
            sender=settings.sender.address,
        ),
        side_work=_side_work(settings),
        on_tick=context.on_tick,
    )


def weights_cache(settings: Settings) -> Path:
    """Where the workers of this host keep the run's weights, together."""
    if settings.generation.weights_cache is not None:
        return settings.generation.weights_cache / settings.run.name
    if settings.relay.store is not None:
        # On the same file system, so that the files that the relay of this host has need not be copied.
        return settings.relay.store / ".workers" / settings.run.name
    # By host: the run's directory may be on a disk that machines share, and each is to fetch for itself.
    return settings.run.path / "workers" / socket.gethostname()


def _side_work(settings: Settings) -> "tuple[SideWorkFactory, ...]":
    """What a worker does besides its orders."""
    found: list[SideWorkFactory] = []
    if slots := settings.evaluation.slots(settings.generation.max_num_seqs):
        from streamrl.producers.evaluation.worker_samples import EvaluationSlots

        found.append(EvaluationSlots(slots))
    if slots := request_slots(settings):
        from streamrl.producers.gateway.worker_requests import RequestSlots

        found.append(RequestSlots(settings.generation.request_host, slots, _request_secret(settings)))
    return tuple(found)


def _request_secret(settings: Settings) -> str:
    from streamrl.producers.gateway.worker_requests import shared_secret

    given = revealed(settings.generation.request_secret, "generation", "request_secret")
    return given or shared_secret(RunDirectory(settings.run.path).gateway / "secret")


def build_gateway(settings: Settings, context: ProcessContext) -> Role:
    """The gateway to the run's workers.

    Raises:
        SettingsError: workers keep no slots for requests, or there is no such tool parser.
        ModelError: the model has no tokenizer.
    """
    from streamrl.consumers.algorithms.settings import lone_refusal
    from streamrl.producers.gateway.gateway import Gateway  # its web server is no other process's affair

    if not request_slots(settings):
        raise SettingsError(
            "expected workers that take requests, got none: set gateway.enabled, for the workers too, or "
            "generation.request_slots"
        )
    tokenizer, parser = _conversation(settings)
    gateway = Gateway(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.gateway,
        lengths=settings.lengths,
        engine=settings.generation.engine,
        tokenizer=tokenizer,
        parser=parser,
        secret=_request_secret(settings),
        directory=RunDirectory(settings.run.path).gateway,
        observer=context.request_observer,
        lone_refusal=lone_refusal(settings.algorithm.name),
        on_tick=context.on_tick,
        calls=context.calls,
    )
    context.watch_gateway(gateway.status)
    return gateway


def build_environments(settings: Settings, context: ProcessContext) -> Role:
    """What has the run's environments played.

    Raises:
        SettingsError: none is named, or there is no gateway that could be asked.
    """
    from streamrl.consumers.algorithms.settings import lone_refusal
    from streamrl.producers.environments.driver import Door, Environments

    wanted, gateway = settings.environments, settings.gateway
    if not wanted.names:
        raise SettingsError("expected environments.names, got none; set it, for example to '[\"calculator\"]'")
    key = revealed(wanted.api_key, "environments", "api_key")
    if key is None:
        key = _own_key(gateway.key_file(RunDirectory(settings.run.path).gateway))
    if wanted.gateway is None and not gateway.port:
        raise SettingsError("expected gateway.port to be one that can be told, got 0; set it, or environments.gateway")
    address = wanted.gateway or f"http://{gateway.host}:{gateway.port}"
    return Environments(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=wanted,
        door=Door(address.rstrip("/"), key, gateway.model_name or settings.run.name),
        learns_alone=not lone_refusal(settings.algorithm.name),
        on_tick=context.on_tick,
    )


def _own_key(path: Path) -> str:
    """A key for this process alone: made anew at each start, since only its hash is kept."""
    from streamrl.producers.gateway.keys import KeyFile

    file = KeyFile(path)
    if any(key.name == "environments" for key in file.read()):
        file.remove("environments")
    return file.add("environments", train=True)


def _conversation(settings: Settings) -> "tuple[ChatTokenizer, ToolCallParser]":
    from streamrl.producers.gateway.tool_calls import BUILT_IN, VllmToolCalls

    name = settings.gateway.tool_parser
    if settings.generation.engine == "emulated":
        from streamrl.producers.generation.engines.emulated import FillerChat

        return FillerChat(settings.emulation.lengths.prompt_characters_per_token), BUILT_IN["hermes"]()
    from streamrl.producers.generation.engines.vllm_tools import vllm_tool_parser
    from streamrl.producers.generation.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    return tokenizer, BUILT_IN[name]() if name in BUILT_IN else VllmToolCalls(vllm_tool_parser(name, tokenizer))


def _modelled(settings: Settings) -> "tuple[Engine, Tokenizer, RewardScorer]":
    from streamrl.producers.generation.engines.factory import build_engine
    from streamrl.producers.generation.tokenizer import ModelTokenizer
    from streamrl.producers.rewards.runner import RewardRunner

    sampling, lora_rank = settings.loop.sampling_params(), settings.training.lora.rank
    # Requesters may ask for JSON of a schema; orders never do.
    keeps = request_slots(settings) > 0
    made_of = settings.generation, settings.model.path, sampling, lora_rank
    engine = build_engine(*made_of, keeps_to_schemas=keeps, transfer=settings.sender.transfer)
    tokenizer = ModelTokenizer(settings.model.path, settings.data.chat_template_kwargs)
    return engine, tokenizer, RewardRunner(settings.rewards, settings.rewards.worker_names)


def _no_rewards() -> "RewardScorer":
    """Where nothing is ordered nothing is scored: requesters and environments give rewards themselves."""
    from streamrl.producers.generation.engines.emulated import ConstantRewards

    return ConstantRewards(())


def _emulated_worker(settings: Settings) -> "tuple[Engine, Tokenizer, RewardScorer]":
    """Without a library that could load a model: eight of these processes share two cores and little memory."""
    from streamrl.producers.generation.engines.emulated import ConstantRewards, FillerTokenizer
    from streamrl.producers.generation.engines.factory import build_emulated

    emulation = settings.emulation
    # Decode times are in emulated seconds; ``time_scale`` turns them into those of the wall clock.
    engine = build_emulated(settings.generation, emulation.decode, emulation.lengths, emulation.time_scale)
    tokenizer = FillerTokenizer(emulation.lengths.prompt_characters_per_token)
    return engine, tokenizer, ConstantRewards(settings.rewards.worker_names)
