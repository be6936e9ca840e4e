"""The whole loop in one process: broker, coordinator, relay, dispatcher, worker and trainer, for ten steps.

    python -m examples.loop [DIRECTORY]

`streamrl run` starts each role as a process of its own and restarts those that die. Here they are tasks of one event
loop, so that one page shows which roles there are and what they send each other:

    dispatcher --work orders--> worker --trajectories--> trainer --new version--> coordinator --announcement--> worker
                                   ^                        |
                                   +------- relay <---- weights store

Every arrow but those at the relay is a Kafka topic. The trainer writes weights into a directory, the relay serves it
over HTTP, and the worker fetches a version when the coordinator has announced it.
"""

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import structlog

from examples.scratch import working_directory
from examples.tiny_model import build
from streamrl.api import settings_of
from streamrl.bus.embedded.cluster import start_cluster
from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.topic_admin import apply_topics
from streamrl.bus.port import message_of
from streamrl.deploy.wiring.build import build_role
from streamrl.observability.role_context import ProcessContext
from streamrl.schemas.reports import StepReport
from streamrl.schemas.topics import STEPS
from streamrl.settings.tree import Settings

ROLES = ("coordinator", "relay", "dispatcher", "worker", "trainer")
STEPS_TAKEN = 10


def share_of_e(completions: list[str], **_: Any) -> list[float]:
    """The reward of each completion: which share of its characters are the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]


def configured(directory: Path, bootstrap_servers: str) -> Settings:
    """Settings of a small run: four prompts a step, four completions of each, at most two steps of staleness."""
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(100)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return settings_of(
        {
            "run": {"name": "loop", "directory": str(directory), "workers": 1},
            "model": {"path": str(build(directory / "model"))},
            "data": {"path": str(prompts)},
            "rewards": {"functions": ["examples.loop:share_of_e"]},
            "loop": {"groups_per_step": 4, "num_generations": 4, "max_staleness": 2, "max_completion_length": 16},
            "generation": {"max_num_seqs": 16},
            "training": {"max_steps": STEPS_TAKEN, "learning_rate": 3e-3, "threads": 1},
            "relay": {"port": port},
            "kafka": {"bootstrap_servers": bootstrap_servers},
        },
        {},
    )


async def print_steps(bus: KafkaBus, topic: str) -> None:
    """Consumes: the trainer's report of each step. Produces: a line for each. On stop: cancelled."""
    reports = await bus.subscribe([topic], client_id="example", start="earliest")
    try:
        while True:
            for record in await reports.poll():
                # The first report of a lineage tells where training starts, and has no metrics.
                if isinstance(report := message_of(record), StepReport) and report.metrics:
                    print(f"step {report.step:2}  reward {report.metrics['reward']:.3f}")
    finally:
        await reports.close()


async def loop(settings: Settings) -> None:
    """Run every role until the trainer has taken its last step, then stop the others."""
    assert settings.kafka.bootstrap_servers is not None
    await apply_topics(settings.kafka.bootstrap_servers, settings.run.name, settings.loop.trajectory_partitions)
    bus, stop = KafkaBus(settings.kafka), asyncio.Event()
    roles = {role: build_role(role, settings, ProcessContext(role, bus)) for role in ROLES}
    async with asyncio.TaskGroup() as tasks:
        printing = tasks.create_task(print_steps(bus, STEPS.full_name(settings.run.name)))
        running = {name: tasks.create_task(role.run(stop)) for name, role in roles.items()}
        await running["trainer"]
        stop.set()
        await asyncio.wait([task for name, task in running.items() if name != "trainer"])
        printing.cancel()


def main(directory: Path) -> None:
    """Start a broker in the directory and run the loop on it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    with start_cluster(data_dir=directory / "kafka", progress=print) as cluster:
        asyncio.run(loop(configured(directory, cluster.bootstrap_servers)))


if __name__ == "__main__":
    with working_directory() as scratch:
        main(scratch)
