"""The composition root: builds each role from the settings and its process's context, and gives ports their adapters.

A role's code is imported only when the role is built. Each process has one role, and the imports of the others would
cost it seconds at the start (an HTTP server, a planner) or half a gigabyte (torch). ``deploy.wiring.trainer`` builds
the trainer.
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
    prompt_chooser,
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
    """The role of this name.

    Raises:
        UserError: the role does not exist, or cannot work with its settings, data or model.
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
    """The names of all roles in this tree."""
    return (*CORE_ROLES, *(role.name for feature in features() for role in feature.processes.roles))


def build_coordinator(settings: Settings, context: ProcessContext) -> "Coordinator":
    """The coordinator; it announces the relays that it hears of on the topics and those in the settings.

    Raises:
        SettingsError: the settings name no relay, so no worker could ever fetch weights.
    """
    from streamrl.coordinator.coordinator import Coordinator, CoordinatorTimeouts
    from streamrl.coordinator.policies import OnePolicyControl

    relays = settings.coordinator.relays
    if not relays:
        if not settings.relay.port:
            raise SettingsError(
                "expected coordinator.relays to name the relays, got none; set it, or relay.port for a single relay"
            )
        # Without a list there is one relay, at the address in its own section.
        relays = (f"http://{settings.relay.host}:{settings.relay.port}",)
    hooks = policy_hooks()
    return Coordinator(
        context.bus,
        settings.run.name,
        relays,
        timeouts=CoordinatorTimeouts(settings.loop.heartbeat_timeout_s),
        policies=OnePolicyControl if hooks is None else hooks.control,
        on_tick=context.on_tick,
        scaling=_scaling(settings),
        evaluation=awaited(settings),
    )


def _scaling(settings: Settings) -> "FleetScaling | None":
    """The scaling of workers; None unless the run may have more workers than it starts with."""
    from streamrl.coordinator.coordinator import FleetScaling
    from streamrl.coordinator.scaling import FleetBounds

    if settings.run.max_workers is None:
        return None
    bounds = FleetBounds(settings.run.workers, settings.run.max_workers)
    return FleetScaling(bounds, overlaps=settings.loop.staleness_bound > 0)


def build_relay(settings: Settings, context: ProcessContext) -> "Relay":
    """The relay that serves the run's weights store, or copies of other relays' versions.

    Raises:
        SettingsError: the copies would go into the trainer's store, or the port is unknown to others.
    """
    from streamrl.weights.relay.copies import RelayCopies
    from streamrl.weights.relay.limits import KEEP_VERSIONS, LEASE_S
    from streamrl.weights.relay.server import Relay
    from streamrl.weights.relay.tier import open_tier
    from streamrl.weights.store import WeightStore

    relay, root = settings.relay, settings.run.weights_store
    store, copies = WeightStore(root, LEASE_S), None
    if relay.store is not None:
        if relay.store.absolute() == root.absolute():
            raise SettingsError(
                f"expected relay.store to be a separate directory, got {relay.store}, where the trainer writes; name "
                "another, or leave it out: then this relay serves the trainer's store"
            )
        copies = RelayCopies(relay.store / settings.run.name, KEEP_VERSIONS, LEASE_S)
    if not relay.port:
        raise SettingsError("expected relay.port to be a fixed port that others know, got 0; set it with --relay.port")
    patience_s = settings.loop.heartbeat_timeout_s
    tier = open_tier(context.bus, settings.run.name, relay, store, copies, patience_s, wanted_series()())

    def store_of_series(series: str) -> WeightStore:
        return WeightStore(settings.run.weights_store_of(series), LEASE_S)

    return Relay(store, relay, context.on_response, copies, tier, None if copies is not None else store_of_series)


def build_dispatcher(settings: Settings, context: ProcessContext) -> "Dispatcher":
    """The dispatcher for the prompts in the settings.

    Raises:
        DataError: the prompts do not exist.
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
        source=open_source(settings.data, run_seed=settings.run.seed, rewards=settings.rewards.functions),
        predictor=build_predictor(
            settings.lengths,
            settings.loop,
            _trace(settings),
            predictors(),
            settings.emulation.lengths.prediction_noise,
        ),
        roles=OtherRoles(
            curve=decode_curve(settings),
            curves=worker_curves(settings),
            seed=sampling_seed(settings),
            has_graders=_has_graders(settings),
            # The oldest checkpoint that is kept was written at most this many steps ago.
            history_steps=settings.training.keep_checkpoints * settings.training.checkpoint_every,
        ),
        on_tick=context.on_tick,
        policies=policy_dispatch(),
        chooser=prompt_chooser(settings),
    )
    context.collect(partial(collect_dispatcher, dispatcher.status))
    return dispatcher


def _has_graders(settings: Settings) -> bool:
    return any(feature.loop.takes_samples(settings) for feature in features())


def _trace(settings: Settings) -> "SampleLength | None":
    """The lengths that emulated workers will produce."""
    from streamrl.producers.generation.engines.length_trace import trace_length

    # The lengths of a real engine are not known before sampling.
    return partial(trace_length, settings.emulation.lengths) if settings.generation.engine == "emulated" else None


def build_worker(settings: Settings, context: ProcessContext) -> "GenerationWorker":
    """A worker with its process's name and a real or an emulated model.

    Raises:
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    from streamrl.consumers.training.identity_store import IdentityFile
    from streamrl.observability.usage import own_usage
    from streamrl.producers.generation.worker import GenerationWorker, RunContext
    from streamrl.schemas.identifiers import partition_of_worker
    from streamrl.weights.fetch import WeightsFetcher

    sending = _sending(settings)
    build = _emulated_parts if settings.generation.engine == "emulated" else _model_parts
    engine, tokenizer, rewards = build(settings)
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
            usage=own_usage().usage,
        ),
        worker_id=context.name,
        # Wrapped here, so that a worker does not know whether it is traced.
        engine=context.around_engine(engine),
        tokenizer=tokenizer,
        rewards=rewards,
        fetcher=WeightsFetcher(
            weights_cache(settings),
            offset=partition_of_worker(context.name),  # workers start at different relays
            sender=sending.address,
        ),
        side_work=_side_work(settings),
        on_tick=context.on_tick,
    )


def weights_cache(settings: Settings) -> Path:
    """The directory in which all workers of this host cache the run's weights."""
    if settings.generation.weights_cache is not None:
        return settings.generation.weights_cache / settings.run.name
    if settings.relay.store is not None:
        # On the same file system, so that files of this host's relay need not be copied.
        return settings.relay.store / ".workers" / settings.run.name
    # One per host: the run's directory may be on a shared disk, and each machine should fetch for itself.
    return settings.run.path / "workers" / socket.gethostname()


def _sending(settings: Settings) -> Sending:
    """How weights reach engines without files; empty if no feature offers that."""
    return first_of(lambda feature: feature.loop.sending(settings)) or Sending()


def _side_work(settings: Settings) -> "tuple[SideWorkFactory, ...]":
    """The work that features give a worker in addition to its orders."""
    wanted = (feature.loop.side_work(settings) for feature in features())
    return tuple(one for one in wanted if one is not None)


def _model_parts(settings: Settings) -> "tuple[Engine, Tokenizer, RewardScorer]":
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
    """A scorer without rewards, for runs without work orders: there, requesters and environments give the rewards."""
    from streamrl.producers.generation.engines.emulated import ConstantRewards

    return ConstantRewards(())


def _emulated_parts(settings: Settings) -> "tuple[Engine, Tokenizer, RewardScorer]":
    """Parts that load no model library, so that eight such processes can share two cores and little memory."""
    from streamrl.producers.generation.engines.emulated import ConstantRewards, FillerTokenizer
    from streamrl.producers.generation.engines.factory import build_emulated

    emulation = settings.emulation
    # Decode times are in emulated seconds; the engine converts them to wall-clock seconds with ``time_scale``.
    engine = build_emulated(settings.generation, emulation.decode, emulation.lengths, emulation.time_scale)
    tokenizer = FillerTokenizer(emulation.lengths.prompt_characters_per_token)
    return engine, tokenizer, ConstantRewards(settings.rewards.worker_names)
