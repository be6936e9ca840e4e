"""Which broker a command uses: the named one, else the one `streamrl kafka up` left running, else one of its own.

An operator's command to a run is sent from here as well: one record to the broker that was found.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from bus.kafka.bus import KafkaBus
from bus.kafka.settings import KafkaSettings
from bus.port import Outgoing
from inspection.diagnostics.connect import kafka_from_environment
from schemas.control import OperatorCommand
from schemas.errors import SettingsError
from schemas.topics import COMMANDS


@contextmanager
def broker_for(
    bootstrap_servers: str | None, progress: Callable[[str], None], data_dir: Path | None = None
) -> Iterator[str]:
    """The address of a broker that answers; one started here is stopped at the end.

    Args:
        bootstrap_servers: a broker named by the user; it is not checked here.
        progress: told what is being started.
        data_dir: where a broker started here keeps its logs; a temporary directory if left out.

    Raises:
        BrokerError: none can be started.
    """
    if bootstrap_servers is not None:
        yield bootstrap_servers
        return
    # Imported only where no broker is named: processes that join one need none of it.
    from bus.embedded.cluster import start_cluster

    if address := _left_running(progress):
        yield address
        return
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-kafka-") as scratch,
        start_cluster(data_dir=data_dir or Path(scratch), progress=progress) as cluster,
    ):
        yield cluster.bootstrap_servers


def broker_of_others(bootstrap_servers: str | None, progress: Callable[[str], None]) -> str:
    """The address of a broker that is there already, for a process that joins others.

    Raises:
        SettingsError: none is named, and none was left running.
    """
    if address := bootstrap_servers or _left_running(progress):
        return address
    raise SettingsError(
        "expected kafka.bootstrap_servers, got none: a single process joins others on their broker, which "
        "`streamrl run` prints; name it, or start one with `streamrl kafka up`"
    )


def _left_running(progress: Callable[[str], None]) -> str | None:
    from bus.embedded import detached

    found = detached.status(detached.default_data_dir())
    if not found.running:
        return None
    progress(f"using the broker of `streamrl kafka up`: {found.bootstrap_servers}")
    return found.bootstrap_servers


OperatorAction = Literal["pause", "resume", "drain", "drain_worker"]


def send_command(bootstrap_servers: str, run: str, action: OperatorAction, reason: str, worker_id: str | None) -> None:
    """Publish the command and wait until the broker has it.

    Raises:
        BrokerError: no broker answers at that address.
    """
    command = OperatorCommand(action=action, worker_id=worker_id, reason=reason, sent_at=time.time())
    kafka = kafka_from_environment().model_copy(update={"bootstrap_servers": bootstrap_servers})
    asyncio.run(_publish(kafka, run, command))


async def _publish(settings: KafkaSettings, run: str, command: OperatorCommand) -> None:
    publisher = await KafkaBus(settings).publisher("streamrl-operator")
    try:
        await publisher.publish(Outgoing.of(COMMANDS.full_name(run), command, key=command.action))
    finally:
        await publisher.close()
