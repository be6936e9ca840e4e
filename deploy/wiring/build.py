"""The composition root: builds each role from the settings and what its process hands it; here ports meet adapters.

A role is imported when it is built: each process has one, and what the others need takes it seconds of a start (an HTTP
server, a planner) or half a gigabyte (torch). The trainer is built in ``deploy.wiring.trainer``, apart.
"""

import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.observability.role_context import ProcessContext, Role
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.settings.features import (
    Sending,
    awaited,
    feature_role,
    features,
    first_of,
    policy_dispatch,
    policy_hooks,
    predictors,
    wanted_series,
)
from streamrl.settings.tree import Settings, decode_curve, sampling_seed, worker_curves

if TYPE_CHECKING:
    from streamrl.coordinator.coordinator import Coordinator, FleetScaling
    from streamrl.producers.dispatch.dispatcher import Dispatcher
    from streamrl.producers.generation.engines.port import Engine, Tokenizer
    from streamrl.producers.generation.side_work import SideWorkFactory
    from streamrl.producers.generation.worker import GenerationWorker
    from streamrl.producers.lengths.predictor import SampleLength
    from streamrl.producers.rewards.runner import RewardScorer
    from streamrl.weights.relay.server import Relay


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
        case "coordinator":
            return build_coordinator(settings, context)
        case "relay":
            return build_relay(settings, context)
        case _:
            if (found := feature_role(role)) is None:
                raise UserError(f"expected one of {', '.join(role_names())}, got {role!r}")
            return found.build(settings, context)


CORE_ROLES = ("worker", "trainer", "dispatcher", "coordinator", "relay")


def role_names() -> tuple[str, ...]:
    """The roles of this tree."""
    return (*CORE_ROLES, *(role.name for feature in features() for role in feature.processes.roles))


def build_coordinator(settings: Settings, context: ProcessContext) -> "Coordinator":
    """The coordinator; it announces the relays that it hears, and those that the settings name.

    Raises:
        SettingsError: no relay is named, so no worker could ever fetch weights.
    """
    from streamrl.coordinator.coordinator import Coordinator
    from streamrl.coordinator.policies import OnePolicyControl

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
    hooks = policy_hooks()
    return Coordinator(
        context.bus,
        settings.run.name,
        coordinator,
        heartbeat_timeout_s=settings.loop.heartbeat_timeout_s,
        policies=OnePolicyControl if hooks is None else hooks.control,
        on_tick=context.on_tick,
        scaling=_scaling(settings),
        evaluation=awaited(settings),
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
    patience_s = settings.loop.heartbeat_timeout_s
    tier = open_tier(context.bus, settings.run.name, relay, store, copies, patience_s, wanted_series()())

    def store_of_series(series: str) -> WeightStore:
        return WeightStore(settings.run.weights_store_of(series), relay.lease_s)

    return Relay(store, relay, context.on_response, copies, tier, None if copies is not None else store_of_series)


def build_dispatcher(settings: Settings, context: ProcessContext) -> "Dispatcher":
    """The dispatcher over the prompts that the settings name.

    Raises:
        DataError: there are no such prompts.
    """
    from streamrl.observability.metrics.metering import collect_dispatcher
    from streamrl.producers.dispatch.dispatcher import Dispatcher
    from streamrl.producers.dispatch.state import OtherRoles
    from streamrl.producers.lengths.startup import build_predictor
    from streamrl.producers.prompts.sources import open_source

    dispatcher = Dispatcher(
        bus=context.bus,
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.dispatch,
        source=open_source(settings.data, run_seed=settings.run.seed),
        predictor=build_predictor(settings.lengths, settings.loop, _trace(settings), predictors()),
        roles=OtherRoles(
            curve=decode_curve(settings),
            curves=worker_curves(settings),
            seed=sampling_seed(settings),
            has_graders=_has_graders(settings),
            # The oldest checkpoint that is kept was written so many intervals ago, less than one of them unfinished.
            history_steps=settings.training.keep_checkpoints * settings.training.checkpoint_every,
        ),
        on_tick=context.on_tick,
        policies=policy_dispatch(),
    )
    context.collect(partial(collect_dispatcher, dispatcher.status))
    return dispatcher


def _has_graders(settings: Settings) -> bool:
    return any(feature.loop.takes_samples(settings) for feature in features())


def _trace(settings: Settings) -> "SampleLength | None":
    """The lengths that emulated workers will produce."""
    from streamrl.producers.generation.engines.length_trace import trace_length

    # A real engine's lengths are known to nobody before they are sampled.
    return partial(trace_length, settings.emulation.lengths) if settings.generation.engine == "emulated" else None


def build_worker(settings: Settings, context: ProcessContext) -> "GenerationWorker":
    """A worker under the name of its process, around a model or around what stands in for one.

    Raises:
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    from streamrl.consumers.training.identity_store import IdentityFile
    from streamrl.producers.generation.worker import GenerationWorker, RunContext
    from streamrl.schemas.identifiers import partition_of_worker
    from streamrl.weights.fetch import WeightsFetcher

    sending = _sending(settings)
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
            has_graders=_has_graders(settings),
            wanted_series=wanted_series(),
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
            sender=sending.address,
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


def _sending(settings: Settings) -> Sending:
    """How weights come into engines without files; empty where a feature brings no such way."""
    return first_of(lambda feature: feature.loop.sending(settings)) or Sending()


def _side_work(settings: Settings) -> "tuple[SideWorkFactory, ...]":
    """What a worker does besides its orders."""
    wanted = (feature.loop.side_work(settings) for feature in features())
    return tuple(one for one in wanted if one is not None)


def _modelled(settings: Settings) -> "tuple[Engine, Tokenizer, RewardScorer]":
    from streamrl.producers.generation.engines.factory import build_engine
    from streamrl.producers.generation.tokenizer import ModelTokenizer
    from streamrl.producers.rewards.runner import RewardRunner

    sampling, lora_rank = settings.loop.sampling_params(), settings.training.lora.rank
    keeps = any(feature.loop.asks_for_schemas(settings) for feature in features())
    made_of = settings.generation, settings.model.path, sampling, lora_rank
    engine = build_engine(*made_of, keeps_to_schemas=keeps, transfer=_sending(settings).transfer)
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
