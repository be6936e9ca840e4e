"""Builds each role but the trainer from the settings: the only place where ports meet adapters."""

import socket
import uuid
from functools import partial
from typing import TYPE_CHECKING

from bus.kafka.bus import KafkaBus
from coordinator.coordinator import Coordinator, Scaling
from coordinator.relay import Relay, WeightsStore
from coordinator.scaling import Bounds
from producers.dispatch.dispatcher import Dispatcher
from producers.generation.engines.factory import build_emulated, build_engine
from producers.generation.engines.length_trace import trace_length
from producers.generation.engines.port import Engine, Tokenizer
from producers.generation.worker import GenerationWorker, Rewards
from producers.lengths.estimators import SampleLength
from producers.lengths.predictor import build_predictor
from producers.prompts.sources import open_source
from schemas.errors import SettingsError
from schemas.identifiers import is_plain_name
from settings.tree import Settings, decode_curve

if TYPE_CHECKING:
    from producers.lengths.ranker import Ranker

# Builds the coordinator and the relay.


def build_coordinator(settings: Settings, _worker_id: str) -> Coordinator:
    """The coordinator; it announces the relays that the settings name.

    Raises:
        SettingsError: no relay is named, so no worker could ever fetch weights.
    """
    relays = settings.coordinator.relays
    if not relays:
        if not settings.relay.port:
            raise SettingsError(
                "expected coordinator.relays to name the relays, got none; set it, or relay.port of the one relay"
            )
        relays = (f"http://{settings.relay.host}:{settings.relay.port}",)
    coordinator = settings.coordinator.model_copy(update={"relays": relays})
    return Coordinator(KafkaBus(settings.kafka), settings.run.name, coordinator, scaling=_scaling(settings))


def _scaling(settings: Settings) -> Scaling | None:
    """None unless the run may have more workers than it starts with."""
    if settings.run.max_workers is None:
        return None
    bounds = Bounds(settings.run.workers, settings.run.max_workers)
    return Scaling(bounds, settings.scaling, overlaps=settings.loop.staleness_bound > 0)


def build_relay(settings: Settings, _worker_id: str) -> Relay:
    """The relay over the run's weights store."""
    return Relay(WeightsStore(settings.run.weights_store), settings.relay)


# Builds the dispatcher, and the ranker that makes newer models of lengths for it.


def build_dispatcher(settings: Settings, _worker_id: str) -> Dispatcher:
    """The dispatcher over the prompts that the settings name.

    Raises:
        DataError: there are no such prompts.
    """
    return Dispatcher(
        bus=KafkaBus(settings.kafka),
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.dispatch,
        source=open_source(settings.data, run_seed=settings.run.seed),
        predictor=build_predictor(settings.lengths, settings.loop, _trace(settings)),
        seed=_sampling_seed(settings),
        curve=decode_curve(settings),
    )


def build_ranker(settings: Settings, _worker_id: str) -> "Ranker":
    """The ranker of the run's predictor.

    Raises:
        SettingsError: the predictor has no model that could be made.
    """
    from producers.lengths.ranker import Ranker, build_student  # its language model needs torch

    return Ranker(KafkaBus(settings.kafka), settings.run.name, build_student(settings.lengths, settings.loop))


def _trace(settings: Settings) -> SampleLength | None:
    """The lengths that emulated workers will produce."""
    return partial(trace_length, settings.emulation.lengths) if settings.generation.engine == "emulated" else None


def _sampling_seed(settings: Settings) -> int | None:
    """None for vLLM, which draws seeded requests one by one; our own engine draws all rows at once in any case."""
    return settings.run.seed if settings.generation.engine == "transformers" else None


# Builds a generation worker, around a model or around what stands in for one.


def build_worker(settings: Settings, worker_id: str) -> GenerationWorker:
    """A worker; without an id it makes one up that no other worker has.

    Raises:
        SettingsError: the id is not a plain name.
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    name = worker_id or f"{socket.gethostname().lower().split('.')[0][:32]}-{uuid.uuid4().hex[:6]}"
    if not is_plain_name(name):
        raise SettingsError(f"expected a worker id of 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
    engine, tokenizer, rewards = (_emulated_worker if settings.generation.engine == "emulated" else _modelled)(settings)
    return GenerationWorker(
        bus=KafkaBus(settings.kafka),
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.generation,
        worker_id=name,
        engine=engine,
        tokenizer=tokenizer,
        rewards=rewards,
        weights_cache=settings.run.path / "workers" / name,
    )


def _modelled(settings: Settings) -> tuple[Engine, Tokenizer, Rewards]:
    from producers.generation.tokenizer import ModelTokenizer
    from producers.rewards.runner import RewardRunner

    engine = build_engine(settings.generation, settings.model.path)
    return engine, ModelTokenizer(settings.model.path), RewardRunner(settings.rewards)


def _emulated_worker(settings: Settings) -> tuple[Engine, Tokenizer, Rewards]:
    """Without a library that could load a model: eight of these processes share two cores and little memory."""
    from producers.generation.engines.emulated import ConstantRewards, FillerTokenizer

    emulation = settings.emulation
    engine = build_emulated(settings.generation, emulation.decode, emulation.lengths, emulation.time_scale)
    tokenizer = FillerTokenizer(emulation.lengths.prompt_characters_per_token)
    return engine, tokenizer, ConstantRewards(settings.rewards.names)
