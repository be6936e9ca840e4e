"""What the newest sound checkpoint of a run says about the stream. Knows nothing of tensors."""

from typing import Any

from streamrl.consumers.training.checkpoints.catalogue import read_manifests
from streamrl.consumers.training.checkpoints.storage import CheckpointStorage, open_storage
from tests.chaos.checking.checker import Durable, Finished
from tests.chaos.runs.setting import Setting


def location_of(setting: Setting) -> CheckpointStorage:
    """Where the run keeps its checkpoints."""
    named = setting.settings.training.checkpoint_location or setting.directory.checkpoints
    return open_storage(named, setting.directory.path / "cache")


def newest_checkpoint(setting: Setting) -> Durable | None:
    """None before the first."""
    manifests = read_manifests(location_of(setting))
    if not manifests:
        return None
    frontier: dict[str, Any] = manifests[0].frontier
    return Durable(
        manifests[0].step,
        {
            int(number): Finished(int(found["low"]), frozenset(int(offset) for offset in found["done"]))
            for number, found in frontier.items()
        },
    )
