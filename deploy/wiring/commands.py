"""Sends an operator's command to the coordinator of a run."""

import asyncio
import time
from typing import Literal

from deploy.bus.kafka_bus import KafkaBus
from deploy.bus.settings import KafkaSettings
from schemas.messages.control import OperatorCommand
from schemas.ports.bus import Outgoing
from schemas.wire.topics import COMMANDS

Action = Literal["pause", "resume", "drain", "drain_worker"]


def send_command(bootstrap_servers: str, run: str, action: Action, reason: str, worker_id: str | None) -> None:
    """Publish the command and wait until the broker has it.

    Raises:
        BrokerError: no broker answers at that address.
    """
    command = OperatorCommand(action=action, worker_id=worker_id, reason=reason, sent_at=time.time())
    asyncio.run(_publish(KafkaSettings(bootstrap_servers=bootstrap_servers), run, command))


async def _publish(settings: KafkaSettings, run: str, command: OperatorCommand) -> None:
    publisher = await KafkaBus(settings).publisher("streamrl-operator")
    try:
        await publisher.publish(Outgoing.of(COMMANDS.full_name(run), command, key=command.action))
    finally:
        await publisher.close()
