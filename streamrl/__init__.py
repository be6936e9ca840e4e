"""StreamRL's Python API and the `streamrl` command.

>>> import streamrl
>>> run = streamrl.run("streamrl.toml", training__max_steps=200)
>>> run.summary["reward_last"], run.audit().is_balanced
>>> run.trajectories().to_pandas()

Names are imported when they are first used, so that the command line starts quickly.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.api import Run, compare, run, run_async
    from streamrl.consumers.algorithms.shelf import Algorithm
    from streamrl.datasets import TrajectoryDataset
    from streamrl.schemas.environments import Endpoint, EnvironmentStep, PolicyReply
    from streamrl.streaming import stream

__all__ = [
    "Algorithm",
    "Endpoint",
    "EnvironmentStep",
    "PolicyReply",
    "Run",
    "TrajectoryDataset",
    "compare",
    "run",
    "run_async",
    "stream",
]
_HOMES = {
    "Algorithm": "streamrl.consumers.algorithms.shelf",
    "Endpoint": "streamrl.schemas.environments",
    "EnvironmentStep": "streamrl.schemas.environments",
    "PolicyReply": "streamrl.schemas.environments",
    "Run": "streamrl.api",
    "compare": "streamrl.api",
    "run": "streamrl.api",
    "run_async": "streamrl.api",
    "stream": "streamrl.streaming",
    "TrajectoryDataset": "streamrl.datasets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)
