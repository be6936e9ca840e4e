"""The real processes of a run, each started by hand on the tests' broker."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.bus.embedded.node import free_ports
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.deploy.local.specs import ChildSpecs
from streamrl.deploy.local.supervisor import Child, ChildSpec
from streamrl.schemas.messages import Message
from streamrl.schemas.topics import Topic
from streamrl.settings.loading import as_toml, load_settings
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings
from tests.pipeline.local_run import write_config
from tests.pipeline.tiny_model import save_tiny_model
from tests.progress import patience


@dataclass
class Processes:
    """``start`` names a process as `streamrl run` does; a second one of a name gets a log of its own."""

    settings: Settings
    directory: RunDirectory
    bus: KafkaBus
    specs: dict[str, ChildSpec]
    started: list[Child] = field(default_factory=list)

    async def start(self, name: str) -> Child:
        spec = self.specs[name]
        log_path = self.directory.logs / f"{name}-{len(self.started)}.log"
        child = await Child.start(ChildSpec(name, spec.command, log_path, spec.environment))
        self.started.append(child)
        return child

    async def read(self, topic: Topic) -> list[Message]:
        """Every message of a topic."""
        subscription = await self.bus.subscribe([topic.full_name(self.settings.run.name)], client_id="test")
        try:
            ends, found = await subscription.end_offsets(), []
            while any(at < ends[tp] for tp, at in (await subscription.positions()).items()):
                found += [record.message() for record in await subscription.poll(timeout_s=1.0)]
            return found
        finally:
            await subscription.close()

    async def until_log(self, child: Child, text: str) -> None:
        """Wait until a process said something."""
        async with patience(60):
            while text not in child.spec.log_path.read_text():
                assert child.process.returncode is None, child.spec.log_path.read_text()[-2000:]
                await asyncio.sleep(0.05)


@asynccontextmanager
async def processes(scratch: Path, bootstrap_servers: str, **sections: dict[str, object]) -> AsyncIterator[Processes]:
    """A run with its topics, directory and, unless it is emulated, a tiny model; no process is started yet."""
    name = f"t{time.time_ns()}"
    kafka = KafkaSettings(bootstrap_servers=bootstrap_servers)
    (port,) = free_ports(1)
    overrides = [f"--kafka.bootstrap_servers={bootstrap_servers}", f"--relay.port={port}"]
    settings = load_settings(write_config(scratch, scratch / "model", name, **sections), overrides)
    if settings.generation.engine != "emulated":
        save_tiny_model(scratch / "model")
    directory = RunDirectory(settings.run.path)
    directory.create()
    directory.config.write_text(as_toml(settings))
    await apply_topics(bootstrap_servers, name, settings.loop.trajectory_partitions, None, kafka)
    specs = {spec.name: spec for spec in ChildSpecs(directory, overrides).all(1)}
    it = Processes(settings, directory, KafkaBus(kafka), specs)
    try:
        yield it
    finally:
        for child in it.started:
            await child.wait_or_kill(0.0)
