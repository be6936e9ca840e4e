"""One Kafka node: formats its folder, starts its process, waits until it serves, explains why it did not."""

import base64
import fcntl
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.broker.jvm.process import ProcessId
from deploy.broker.probe import live_brokers
from deploy.broker.server_properties import NodeSpec, logging_properties, server_properties
from schemas.errors import BrokerError

START_TIMEOUT_S = 90.0
CLAIM_TIMEOUT_S = 2.0
_POLL_S = 0.05
_TELLING = re.compile(r"\b(FATAL|ERROR|Error|[A-Za-z.]*Exception)\b")


class PortTaken(BrokerError):
    """A port of the node was taken by another process before the node could listen on it."""


def new_uuid() -> str:
    """A Kafka uuid: 16 random bytes in unpadded URL-safe base64 that do not start like a command-line flag."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


@contextmanager
def claimed(spec: NodeSpec) -> Iterator[int]:
    """Holds the node's folder for one process; yields the file descriptor that carries the claim over to it.

    The claim lasts until every process that inherited the descriptor has ended, so two nodes never write one folder.
    Raises BrokerError when a node already runs there.
    """
    spec.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + CLAIM_TIMEOUT_S
    with (spec.folder / "lock").open("w") as claim:
        while True:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A process that was just killed lets go of its files a moment later.
                if time.monotonic() > deadline:
                    raise BrokerError(
                        f"a Kafka node already runs on the data in {spec.folder}: end what runs it (if it was "
                        f"`kafka up`: `streamrl kafka down --data-dir {spec.folder.parent}`), or name another folder"
                    ) from None
                time.sleep(_POLL_S)
        yield claim.fileno()


def cluster_id_of(spec: NodeSpec) -> str | None:
    """The cluster to which the node's folder was formatted; None when it was not."""
    meta = spec.data / "meta.properties"
    lines = meta.read_text().splitlines() if meta.exists() else []
    return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)


def write_configuration(spec: NodeSpec, cluster: tuple[NodeSpec, ...]) -> None:
    """Writes the node's configuration files; its ports may differ from those of an earlier start."""
    spec.data.mkdir(parents=True, exist_ok=True)
    # The codecs unpack native code there; a killed node leaves it behind.
    shutil.rmtree(spec.folder / "tmp", ignore_errors=True)
    spec.output.unlink(missing_ok=True)
    (spec.folder / "tmp").mkdir()
    (spec.folder / "server.properties").write_text(server_properties(spec, cluster))
    (spec.folder / "log4j2.properties").write_text(logging_properties(spec))


def format_storage(spec: NodeSpec, cluster_id: str, bootstrap_checkpoint: Path) -> None:
    """Makes the data folder a member of ``cluster_id``, as Kafka's storage tool does, without a second JVM start.

    ``bootstrap_checkpoint`` is that tool's own file of feature levels; it names neither node nor cluster.
    """
    shutil.copyfile(bootstrap_checkpoint, spec.data / "bootstrap.checkpoint")
    identity = {"version": 1, "cluster.id": cluster_id, "node.id": spec.node_id, "directory.id": new_uuid()}
    (spec.data / "meta.properties").write_text("".join(f"{key}={value}\n" for key, value in identity.items()))


def wait_ready(spec: NodeSpec, process: ProcessId, expected: Iterable[int]) -> None:
    """Returns when the node serves clients and knows all ``expected`` broker ids to be alive.

    Raises BrokerError with the node's last telling log line when it ends, or after START_TIMEOUT_S seconds.
    """
    wanted = frozenset(expected)
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if not process.alive():
            words = last_words(spec)
            kind = PortTaken if "Address already in use" in words else BrokerError
            raise kind(f"Kafka node {spec.node_id} ended while starting: {words}")
        try:
            if wanted <= live_brokers(spec.port):
                return
        except OSError:
            pass  # not listening yet
        time.sleep(_POLL_S)
    raise BrokerError(
        f"Kafka node {spec.node_id} on {spec.address} did not serve within {START_TIMEOUT_S:.0f} s: {last_words(spec)}"
    )


def last_words(spec: NodeSpec) -> str:
    """The last line of the node's logs that tells an error, else the last line, and where to read more."""
    lines: list[str] = []
    for log in (spec.output, spec.server_log):
        if log.exists():
            lines += [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("at ")]
    telling = [line for line in lines if _TELLING.search(line)]
    return f"{(telling or lines or ['it logged nothing'])[-1][:300]} (see {spec.server_log})"
