"""Which files a trajectory goes through, measured: one loop in this process, and a look at every call of ours in it.

A sample has forms on its way: prompt, order, request, tokens, record, trajectory, group, micro-batch. A file touches it
if one of its functions is handed one of them, or returns one, alone or as the first of several. What only handles its
bytes or tensors cannot be told by this; such a file is at least called.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import Outgoing, Record
from streamrl.deploy.wiring.build import build_role
from streamrl.observability.interceptor import observed
from streamrl.observability.role_context import ProcessContext
from streamrl.schemas.topics import TRAJECTORIES, WORK_ORDERS
from streamrl.settings.loading import load_settings
from streamrl.settings.run_directory import RunDirectory
from tests.architecture.sources import ROOT
from tests.pipeline.local_run import write_config
from tests.pipeline.tiny_model import save_tiny_model

FORMS = frozenset(
    {
        "Prompt",
        "LengthEstimate",
        "PendingPrompt",
        "WorkOrder",
        "GenerationRequest",
        "TokenDelta",
        "ActiveCompletion",
        "SampledCompletion",
        "ScoreRequest",
        "RewardCall",
        "Trajectory",
        "Sample",
        "Group",
        "Credit",
        "TrainingSample",
        "MicroBatch",
    }
)
"""The sample on its way, by the name of its class."""
CARRIED = (WORK_ORDERS.name, TRAJECTORIES.name)
STEPS = 2
TIMEOUT_S = 90


@dataclass(frozen=True)
class Way:
    """Files of ours, relative to the repository's root: those that touched a sample, and all that were called."""

    touching: frozenset[str]
    called: frozenset[str]


async def measured(directory: Path, address: str) -> Way:
    """A loop of two steps on a real broker, with a real model, all roles in this process but the reward function."""
    sections: dict[str, Any] = {
        "kafka": {"bootstrap_servers": address},
        "relay": {"port": 0},
        "loop": {"groups_per_step": 2, "num_generations": 2, "max_completion_length": 6},
        "training": {"max_steps": STEPS},
    }
    config = write_config(directory, save_tiny_model(directory / "model"), "way", **sections)
    settings = load_settings(config, [f"--relay.port={_free_port()}"])
    RunDirectory(settings.run.path).create()
    await apply_topics(address, settings.run.name, settings.loop.trajectory_partitions, 1, settings.kafka)
    bus, stop = KafkaBus(settings.kafka), asyncio.Event()
    with _watched() as watched:
        roles = {
            name: build_role(name, settings, ProcessContext(name, observed(bus, _Nobody())))
            for name in ("coordinator", "relay", "trainer", "worker", "dispatcher")
        }
        running = {name: asyncio.create_task(role.run(stop)) for name, role in roles.items()}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await running["trainer"]
        finally:
            stop.set()
            await asyncio.wait(running.values(), timeout=TIMEOUT_S)
    return watched.way()


class _Nobody:
    """An observer that looks away: the interceptor is on the way, whoever looks."""

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments, **_named: None


class _Watch:
    """A profiling function: called at each call and return of a Python function, in whatever thread."""

    def __init__(self) -> None:
        self._ours = str(ROOT / "streamrl") + "/"
        self._called: set[str] = set()
        self._touching: set[str] = set()

    def __call__(self, frame: FrameType, event: str, returned: object) -> None:
        path = frame.f_code.co_filename
        if event not in ("call", "return") or path in self._touching or not path.startswith(self._ours):
            return
        self._called.add(path)
        if _is_handed_one(frame) if event == "call" else _is_form(_first_of(returned)):
            self._touching.add(path)

    def way(self) -> Way:
        touching, called = (
            frozenset(str(Path(path).resolve().relative_to(ROOT)) for path in paths)
            for paths in (self._touching, self._called)
        )
        return Way(touching, called)


@contextmanager
def _watched() -> Iterator[_Watch]:
    """Watch this thread, and those that begin while the block runs."""
    before, watch = sys.getprofile(), _Watch()
    sys.setprofile(watch)
    threading.setprofile(watch)
    try:
        yield watch
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def _is_handed_one(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name.startswith("<"):
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(_is_form(_first_of(frame.f_locals.get(name))) for name in names)


def _first_of(value: object) -> object:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and value and not isinstance(value, Record | Outgoing):
        return value[0]
    return value


def _is_form(value: object) -> bool:
    if isinstance(value, Record | Outgoing):
        return value.topic.endswith(CARRIED)
    return type(value).__name__ in FORMS


def _free_port() -> int:
    from streamrl.bus.embedded.node import free_ports

    return free_ports(1)[0]
