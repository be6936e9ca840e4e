"""Builds the dispatcher."""

from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings
from producers.dispatch.dispatcher import Dispatcher
from producers.lengths.predictor import build_predictor
from producers.prompts.source import open_source


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
        predictor=build_predictor(settings.lengths, settings.loop),
        seed=_sampling_seed(settings),
    )


def _sampling_seed(settings: Settings) -> int | None:
    """None for vLLM, which draws seeded requests one by one; our own engine draws all rows at once in any case."""
    return settings.run.seed if settings.generation.engine == "transformers" else None
