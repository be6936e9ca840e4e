"""How a run under test is set up: small, and slow enough that faults happen in the middle of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.supervisor import ChildSpec
from streamrl.schemas.identifiers import scope_of
from streamrl.settings.features import features
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings
from tests.pipeline.local_run import EMULATED, write_config

MAX_STEPS = 40
GROUPS_PER_STEP = 2
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "rewards": {"functions": ["tests.chaos.runs.slow_reward:share_of_a"]},
    "loop": {"groups_per_step": GROUPS_PER_STEP, "heartbeat_timeout_s": 4.0},
    "generation": {"max_num_seqs": 16},
    "training": {"max_steps": MAX_STEPS, "checkpoint_every": 3},
    "kafka": {"request_timeout_ms": 4000},
}

DURABLE: Mapping[str, Any] = {"partial_trajectories": "durable"}
"""What a killed worker had begun goes on elsewhere. Not among the sections that the last version reads, too."""
IDLE: Mapping[str, Mapping[str, Any]] = {"generation": {"adopt": "idle"}}
REPACKED: Mapping[str, Mapping[str, Any]] = {**IDLE, "dispatch": {"repack": True}}
DRAWN: tuple[Mapping[str, Mapping[str, Any]], ...] = ({}, IDLE, REPACKED)
"""When workers take new weights, and whether the tails of those that wait for them are put together."""
COPIES = "relay-copies"
"""The process of the relay that holds copies; a worker asks it where the store's does not answer."""

WITHOUT_A_MODEL: Mapping[str, Mapping[str, Any]] = {
    **EMULATED,
    "emulation.decode": {"chunk_tokens": 100},
}
"""Processes start in a third of the time."""


@dataclass(frozen=True)
class Setting:
    """Settings of a run, its directory, and the commands of its processes."""

    settings: Settings
    directory: RunDirectory
    specs: tuple[ChildSpec, ...]

    @property
    def name(self) -> str:
        """Prefix of its topics."""
        return scope_of(self.settings.run.name, self.settings.run.instance)

    @property
    def last_step(self) -> int:
        return self.settings.training.max_steps

    def of_instance(self, name: str) -> "Setting":
        """Directory and topics of an attached instance."""
        run = self.settings.run.model_copy(update={"instance": name})
        return replace(self, settings=self.settings.model_copy(update={"run": run}), directory=RunDirectory(run.path))


def make_setting(
    root: Path,
    model: Path,
    name: str,
    address: str,
    relay_port: int,
    changes: Mapping[str, Mapping[str, Any]],
    copies_port: int = 0,
) -> Setting:
    """``changes`` to sections come on top of ours. ``copies_port``: of a second relay, with copies, if there is one."""
    sections = {name: {**SECTIONS.get(name, {}), **changes.get(name, {})} for name in {*SECTIONS, *changes}}
    sections["generation"] = {**DURABLE, **sections["generation"]}
    root.mkdir(parents=True, exist_ok=True)
    settings = load_settings(write_config(root, model, name, **sections), [])
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": address})
    relay = settings.relay.model_copy(update={"port": relay_port})
    settings = settings.model_copy(update={"kafka": kafka, "relay": relay})
    directory = RunDirectory(settings.run.path)
    directory.create()
    directory.config.write_text(as_toml(settings))
    # A trainer that is superseded is to end here, and not to stand by: the fault asks why it ended.
    children = ChildSpecs(directory, [])
    added = [process for feature in features() for process in feature.processes.started(settings)]
    specs = [replace(spec, standby=()) for spec in children.all(settings.run.workers, others=added)]
    if copies_port:
        own = f"--relay.store={directory.path / COPIES}", f"--relay.port={copies_port}"
        specs.insert(2, children.of(COPIES, "relay", *own))
    return Setting(settings, directory, tuple(specs))


async def create_topics(setting: Setting) -> None:
    """The run's topics."""
    kafka = setting.settings.kafka
    assert kafka.bootstrap_servers is not None
    await apply_topics(kafka.bootstrap_servers, setting.name, setting.settings.loop.trajectory_partitions)
