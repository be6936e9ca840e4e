"""Builds the trainer."""

from consumers.training.trainer import Trainer
from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings


def build_trainer(settings: Settings, _worker_id: str) -> Trainer:
    """The trainer of the run's directory; it goes on from the newest checkpoint there."""
    return Trainer(
        bus=KafkaBus(settings.kafka),
        run_name=settings.run.name,
        loop=settings.loop,
        algorithm=settings.algorithm,
        training=settings.training,
        intake=settings.intake,
        batching=settings.batching,
        reward_weights=settings.rewards.weight_by_name,
        model_path=settings.model.path,
        run_dir=settings.run.path,
        weights_store=settings.run.weights_store,
        seed=settings.run.seed,
    )
