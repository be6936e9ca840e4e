"""Builds the coordinator and the relay."""

from coordinator.coordinator import Coordinator, Scaling
from coordinator.relay.server import Relay
from coordinator.relay.store import WeightsStore
from coordinator.scaling.rule import Bounds
from deploy.bus.kafka_bus import KafkaBus
from deploy.settings.tree import Settings
from schemas.errors import SettingsError


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
