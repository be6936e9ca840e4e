"""Builds a generation worker, around a model or around what stands in for one."""

import socket
import uuid

from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings
from producers.generation.engines.choice import build_emulated, build_engine
from producers.generation.worker import GenerationWorker, Rewards
from schemas.errors import SettingsError
from schemas.identifiers import is_plain_name
from schemas.ports.engine import Engine, Tokenizer


def build_worker(settings: Settings, worker_id: str) -> GenerationWorker:
    """A worker; without an id it makes one up that no other worker has.

    Raises:
        SettingsError: the id is not a plain name.
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    name = worker_id or f"{socket.gethostname().lower().split('.')[0][:32]}-{uuid.uuid4().hex[:6]}"
    if not is_plain_name(name):
        raise SettingsError(f"expected a worker id of 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
    engine, tokenizer, rewards = (_emulated if settings.generation.engine == "emulated" else _modelled)(settings)
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


def _emulated(settings: Settings) -> tuple[Engine, Tokenizer, Rewards]:
    """Without a library that could load a model: eight of these processes share two cores and little memory."""
    from producers.generation.engines.emulated.stand_ins import ConstantRewards, FillerTokenizer

    emulation = settings.emulation
    engine = build_emulated(settings.generation, emulation.decode, emulation.lengths, emulation.time_scale)
    tokenizer = FillerTokenizer(emulation.lengths.prompt_characters_per_token)
    return engine, tokenizer, ConstantRewards(settings.rewards.names)
