"""Finds the broker for a command: the configured one, else the one that `streamrl kafka up` left running, else its own.

It also sends an operator's command to a run, as one record to that broker.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamrl.bus.kafka.bus import KafkaBus
from streamrl.bus.kafka.settings import KafkaSettings
from streamrl.bus.port import Bus, Outgoing, message_of
from streamrl.inspection.diagnostics.connect import kafka_from_environment
from streamrl.inspection.source import RUNS, directory_of, nodes_of, open_run, own_broker
from streamrl.schemas.control import OperatorAction, OperatorCommand
from streamrl.schemas.errors import SettingsError, UserError
from streamrl.schemas.identifiers import is_plain_name
from streamrl.schemas.reports import Heartbeat, TrainerBeat, WorkerState
from streamrl.schemas.topics import COMMANDS, HEARTBEATS
from streamrl.settings.run_directory import RunDirectory
from streamrl.settings.tree import Settings

LISTEN_S = 3.0
"""Seconds to listen for heartbeats, which every living worker and trainer sends once a second."""


@contextmanager
def broker_for(
    bootstrap_servers: str | None, progress: Callable[[str], None], data_dir: Path | None = None
) -> Iterator[str]:
    """The address of a broker; if it was started here, it is stopped at the end of the block.

    Args:
        bootstrap_servers: a broker that the user configured; it is not checked here.
        progress: called with lines about the start of a broker.
        data_dir: where a broker started here keeps its data; None: a temporary directory.

    Raises:
        BrokerError: no broker can be started.
    """
    if bootstrap_servers is not None:
        yield bootstrap_servers
        return
    # Imported only if no broker is configured, because processes that join one do not need it.
    from streamrl.bus.embedded.cluster import start_cluster

    if address := _left_running(progress):
        yield address
        return
    with (
        tempfile.TemporaryDirectory(prefix="streamrl-kafka-") as scratch,
        start_cluster(data_dir=data_dir or Path(scratch), progress=progress) as cluster,
    ):
        yield cluster.bootstrap_servers


def existing_broker(settings: Settings, progress: Callable[[str], None]) -> str:
    """The address of an existing broker, for a process that joins a run.

    It is the configured one, else the run's own if the run is on this machine, else that of `streamrl kafka up`.

    Raises:
        SettingsError: no broker is configured, and none is running.
    """
    directory = RunDirectory(settings.run.path)
    if address := settings.kafka.bootstrap_servers or own_broker(directory) or _left_running(progress):
        return address
    if nodes_of(directory):
        raise SettingsError(
            f"expected a running broker of run {settings.run.name}, got none: the run's own broker stops with it; "
            f"continue the run with `streamrl run {directory.config}`, or start the broker alone with "
            f"`{directory.broker_command}`"
        )
    raise SettingsError(
        f"expected a broker of run {settings.run.name}, got no kafka.bootstrap_servers, no broker in {directory.path} "
        "and none of `streamrl kafka up`: name the run on this machine with --run, set kafka.bootstrap_servers to the "
        "address that `streamrl run` prints, or start a broker with `streamrl kafka up`"
    )


def _left_running(progress: Callable[[str], None]) -> str | None:
    from streamrl.bus.embedded import detached

    if (address := detached.running_bootstrap_servers()) is not None:
        progress(f"using the broker of `streamrl kafka up`: {address}")
    return address


@contextmanager
def broker_with(run: Path, servers: str | None, progress: Callable[[str], None]) -> Iterator[tuple[KafkaSettings, str]]:
    """The broker with the topics of a run, and the run's name there.

    The broker is the given one, else the configured one, else the run's own, which is started if necessary, else the
    one that `streamrl kafka up` left running.

    Raises:
        BrokerError: the run's own broker cannot be started.
        SettingsError: no broker is given, and the run has none.
        UserError: ``run`` is neither a run on this machine nor a name.
    """
    directory, name, kafka = _topics_owner(run)
    if address := servers or kafka.bootstrap_servers or own_broker(directory):
        yield kafka.model_copy(update={"bootstrap_servers": address}), name
    elif nodes := nodes_of(directory):
        from streamrl.bus.embedded.cluster import start_cluster

        with start_cluster(data_dir=directory.kafka, nodes=len(nodes), progress=progress) as cluster:
            yield kafka.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers}), name
    elif address := _left_running(progress):
        yield kafka.model_copy(update={"bootstrap_servers": address}), name
    else:
        raise SettingsError(
            f"expected a broker with the topics of run {name}, got no --bootstrap-servers, no data in "
            f"{directory.kafka} and no running broker of `streamrl kafka up`; give it with --bootstrap-servers "
            "HOST:PORT"
        )


def _topics_owner(run: Path) -> tuple[RunDirectory, str, KafkaSettings]:
    """A run's directory, its name on a broker, and how to reach that; the run need not be on this machine."""
    if run.is_file() or directory_of(run) is not None:
        past = open_run(run)
        return past.directory, past.name, past.settings.kafka
    if not is_plain_name(str(run)):
        raise UserError(f"expected a run's directory, or its name (a-z, 0-9, '.', '_', '-'), got {str(run)!r}")
    return RunDirectory(RUNS / run), str(run), kafka_from_environment()


async def living_process(bus: Bus, run: str, listen_s: float = LISTEN_S) -> str | None:
    """The first process of the run, trainer or worker, that sends a heartbeat within ``listen_s``; None if none does.

    Raises:
        BusError: the broker does not answer, or does not have the topic.
    """
    listening = await bus.subscribe([HEARTBEATS.full_name(run)], client_id="streamrl-operator", start="latest")
    loop = asyncio.get_running_loop()
    try:
        deadline = loop.time() + listen_s
        while (left := deadline - loop.time()) > 0:
            for record in await listening.poll(timeout_s=min(0.5, left)):
                message = message_of(record)
                if isinstance(message, TrainerBeat):
                    return "trainer"
                # The last heartbeat of a worker that leaves has this state.
                if isinstance(message, Heartbeat) and message.state is not WorkerState.STOPPED:
                    return f"worker {message.worker_id}"
    finally:
        await listening.close()
    return None


def send_command(
    kafka: KafkaSettings,
    run: str,
    action: OperatorAction,
    reason: str,
    **about: Any,
) -> int:
    """Publish the command and wait until the broker has it; returns its offset, by which control messages refer to it.

    ``about``: further fields of ``OperatorCommand``.

    Raises:
        BrokerError: no broker answers.
    """
    command = OperatorCommand(action=action, reason=reason, sent_at=time.time(), **about)
    return asyncio.run(_publish(kafka, run, command))


async def _publish(settings: KafkaSettings, run: str, command: OperatorCommand) -> int:
    publisher = await KafkaBus(settings).publisher("streamrl-operator")
    try:
        placed = await publisher.publish(Outgoing.of(COMMANDS.full_name(run), command, key=command.action))
        return placed.offset
    finally:
        await publisher.close()
