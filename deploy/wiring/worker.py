"""Builds a generation worker."""

import socket
import uuid

from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings
from producers.generation.engines.choice import build_engine
from producers.generation.tokenizer import ModelTokenizer
from producers.generation.worker import GenerationWorker
from producers.rewards.runner import RewardRunner
from schemas.errors import SettingsError
from schemas.identifiers import is_plain_name


def build_worker(settings: Settings, worker_id: str) -> GenerationWorker:
    """A worker; without an id it makes one up that no other worker has.

    Raises:
        SettingsError: the id is not a plain name.
        ModelError: the model's tokenizer or the engine's library cannot be loaded.
    """
    name = worker_id or f"{socket.gethostname().lower().split('.')[0][:32]}-{uuid.uuid4().hex[:6]}"
    if not is_plain_name(name):
        raise SettingsError(f"expected a worker id of 1 to 64 of a-z, 0-9, '.', '_' and '-', got {name!r}")
    return GenerationWorker(
        bus=KafkaBus(settings.kafka),
        run_name=settings.run.name,
        loop=settings.loop,
        settings=settings.generation,
        worker_id=name,
        engine=build_engine(settings.generation, settings.model.path),
        tokenizer=ModelTokenizer(settings.model.path),
        rewards=RewardRunner(settings.rewards),
        weights_cache=settings.run.path / "workers" / name,
    )
