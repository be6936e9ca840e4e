"""Settings and observers with which roles are built."""

from pathlib import Path

from streamrl.observability.metrics.exporting import Metering
from streamrl.observability.metrics.families import Meters
from streamrl.observability.metrics.metering import metering_of
from streamrl.settings.features import metric_families
from streamrl.settings.loading import validated
from streamrl.settings.tree import Settings


def role_settings(directory: Path) -> Settings:
    return validated(
        {
            "run": {"name": "r", "directory": str(directory)},
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},
            "model": {"path": "m"},
            "data": {"dataset": "chain_sum"},
            "generation": {"engine": "emulated"},
            "training": {"backend": "emulated"},
            "relay": {"port": 8080},
        }
    )


def metering(role: str) -> Metering:
    meters = Meters("r", metric_families())
    return Metering(meters, *metering_of(role, meters))
